// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
)

// word is a flag with a few known values.
type word struct {
	value string
	known []string
}

func newWord(def string, known ...string) *word { return &word{value: def, known: known} }

// Set implements pflag.Value.
func (w *word) Set(s string) error {
	if slices.Contains(w.known, s) {
		w.value = s
		return nil
	}
	return fmt.Errorf("it is none of %s", strings.Join(w.known, ", "))
}

// String implements pflag.Value.
func (w *word) String() string { return w.value }

// Type implements pflag.Value; it is what help shows.
func (w *word) Type() string { return strings.Join(w.known, "|") }

// onNewFlag is --on-new.
type onNewFlag struct{ value drain.OnNew }

// Set implements pflag.Value.
func (f *onNewFlag) Set(s string) error {
	if err := api.CheckOnNew(drain.OnNew(s)); err != nil {
		return err
	}
	f.value = drain.OnNew(s)
	return nil
}

// String implements pflag.Value.
func (f *onNewFlag) String() string { return string(f.value) }

// Type implements pflag.Value.
func (f *onNewFlag) Type() string { return "auto|steer|relay|hold|admit|refuse" }

func addOutput(cmd *cobra.Command, w *word) {
	cmd.Flags().VarP(w, "output", "o", "how to show it")
	complete(cmd, "output", w.known)
}

// complete offers values to the shell's completion.
func complete(cmd *cobra.Command, flag string, values []string) {
	// The only error is a flag that does not exist, which every run of --help would show.
	_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
}

// writeDocument writes v as json or yaml, with the members in the order of v.
func writeDocument(w io.Writer, format string, v any) error {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return fmt.Errorf("encode the output: %w", err)
	}
	if format == "yaml" {
		// JSON is YAML already; what differs is the style.
		var n yaml.Node
		if err := yaml.Unmarshal(b, &n); err != nil {
			return fmt.Errorf("encode the output: %w", err)
		}
		blockStyle(&n)
		var buf bytes.Buffer
		enc := yaml.NewEncoder(&buf)
		enc.SetIndent(2)
		if err := enc.Encode(&n); err != nil {
			return fmt.Errorf("encode the output: %w", err)
		}
		b = bytes.TrimSuffix(buf.Bytes(), []byte("\n"))
	}
	_, err = w.Write(append(b, '\n'))
	return err
}

// blockStyle takes away the braces and the quotes that YAML does not need. The encoder quotes again what
// would read as another type.
func blockStyle(n *yaml.Node) {
	n.Style = 0
	for _, c := range n.Content {
		blockStyle(c)
	}
}

// table lines up columns. A cell's colour does not count towards its width.
type table struct {
	rows   [][]cell
	colour bool
}

type cell struct {
	text  string
	paint string // an SGR parameter; empty: none
}

func (t *table) row(cells ...any) {
	r := make([]cell, len(cells))
	for i, c := range cells {
		switch c := c.(type) {
		case cell:
			r[i] = c
		default:
			r[i] = cell{text: fmt.Sprint(c)}
		}
	}
	t.rows = append(t.rows, r)
}

// head is the first row.
func (t *table) head(names ...string) {
	r := make([]cell, len(names))
	for i, n := range names {
		r[i] = cell{text: n, paint: bold}
	}
	t.rows = append(t.rows, r)
}

// write writes the table, each line after indent.
func (t *table) write(w io.Writer, indent string) error {
	var widths []int
	for _, r := range t.rows {
		for i, c := range r {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], utf8.RuneCountInString(c.text))
		}
	}
	var b strings.Builder
	for _, r := range t.rows {
		b.WriteString(indent)
		for i, c := range r {
			b.WriteString(paint(c.text, c.paint, t.colour))
			if i < len(r)-1 {
				b.WriteString(strings.Repeat(" ", widths[i]-utf8.RuneCountInString(c.text)+2))
			}
		}
		b.WriteByte('\n')
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// SGR parameters (ECMA-48).
const (
	bold   = "1"
	red    = "31"
	green  = "32"
	yellow = "33"
)

func paint(s, sgr string, on bool) string {
	if !on || sgr == "" || s == "" {
		return s
	}
	return "\x1b[" + sgr + "m" + s + "\x1b[0m"
}

func stateCell(s drain.State) cell {
	c := cell{text: string(s)}
	switch s {
	case drain.StateServing:
		c.paint = green
	case drain.StateDraining, drain.StateFlushing, drain.StateSuspect:
		c.paint = yellow
	case drain.StateLost:
		c.paint = red
	}
	return c
}

// number shows a count; one that is not known is a question mark, never 0.
func number(n *int64) string {
	if n == nil {
		return "?"
	}
	return fmt.Sprint(*n)
}

// brief shows a length of time as precisely as a person needs it.
func brief(d time.Duration) string {
	switch {
	case d < 0:
		return "0s"
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < 10*time.Second:
		return d.Round(100 * time.Millisecond).String()
	case d < time.Hour:
		return d.Round(time.Second).String()
	}
	s := d.Round(time.Minute).String()
	return strings.TrimSuffix(s, "0s")
}

func briefOr(d *api.Duration, unknown string) string {
	if d == nil {
		return unknown
	}
	return brief(time.Duration(*d))
}

// clockTime is a moment of today.
func clockTime(t time.Time) string { return t.Local().Format("15:04:05") }

// plural is "1 connection", "2 connections".
func plural(n int64, one string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %ss", n, one)
}

// line puts s on one line: names and reasons come from outside and must not move the cursor.
func line(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || (r >= 0x80 && r < 0xa0) {
			return '?'
		}
		return r
	}, s)
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/ebbproxy/ebb/internal/api"
)

func newReportCmd(env *environment) *cobra.Command {
	var at where
	output := newWord("table", "table", "json", "yaml")
	cmd := &cobra.Command{
		Use:   "report [BACKEND]",
		Short: "Show what the last drains did, or would have done",
		Long: `Shows the last drain of each backend; with BACKEND, all of its drains that are
remembered, in detail. A drain of a backend that is only observed says what
enforcing would have done.`,
		Example: `  ebb report
  ebb report web
  ebb report -o json | jq '.drains[] | select(.outcome == "expired")'`,
		Args:              atMost(1),
		ValidArgsFunction: env.completeBackends,
		RunE: func(cmd *cobra.Command, args []string) error {
			name := ""
			if len(args) == 1 {
				name = args[0]
			}
			return env.report(cmd.Context(), at, name, output.value)
		},
	}
	addAPI(cmd, &at)
	addOutput(cmd, output)
	return cmd
}

func (e *environment) report(ctx context.Context, at where, name, format string) error {
	all, bad, err := e.drains(ctx, at)
	if err != nil {
		return err
	}
	l := api.DrainList{Drains: []api.Drain{}}
	seen := make(map[string]bool)
	for _, d := range all {
		if name == d.Backend || name == "" && !seen[d.Service+"\x00"+d.Backend] {
			l.Drains = append(l.Drains, d)
		}
		seen[d.Service+"\x00"+d.Backend] = true
	}
	if name != "" && len(l.Drains) == 0 {
		// A backend that is there, or a remembered one, is told from a name that is wrong.
		if _, err := e.find(ctx, at, name); err != nil {
			return err
		}
	}
	if format != "table" {
		err = writeDocument(e.stdout, format, l)
	} else {
		err = e.reportTable(l.Drains, name != "")
	}
	if err != nil {
		return err
	}
	e.sayHints(bad)
	switch {
	case len(all) == 0 && len(bad) > 0:
		return &exitError{code: exitFailed}
	case len(l.Drains) == 0:
		fmt.Fprintln(e.stderr, "ebb: no drain is remembered")
	}
	return nil
}

// drains asks every socket at once and sorts what they remember, the newest first.
func (e *environment) drains(ctx context.Context, at where) ([]api.Drain, []silent, error) {
	found, err := e.sockets(ctx, at)
	if err != nil {
		return nil, nil, err
	}
	out, bad := askAll(ctx, found, func(ctx context.Context, c *api.Client) ([]api.Drain, error) { return c.Drains(ctx) })
	slices.SortStableFunc(out, func(a, b api.Drain) int { return b.Begun.Compare(a.Begun) })
	return out, bad, nil
}

// reportTable writes a row for each drain, and with details what there is to say about each.
func (e *environment) reportTable(ds []api.Drain, details bool) error {
	if len(ds) == 0 {
		return nil
	}
	t := table{colour: e.colour(e.stdout)}
	t.head("BACKEND", "SERVICE", "GEN", "BEGUN", "CAUSE", "BY", "RESULT", "TOOK", "SURVIVORS", "LATE")
	for _, d := range ds {
		result, took := cell{text: string(d.Outcome), paint: outcomeColour(&d)}, "–"
		switch {
		case d.Running():
			result.text = string(d.Phase())
		case d.WouldHave:
			result.text = "would be " + result.text
		}
		if d.Ended != nil {
			took = brief(d.Ended.Sub(d.Begun))
		}
		result.text = line(result.text)
		t.row(line(d.Backend), line(d.Service), d.Gen, d.Begun.Local().Format("2006-01-02 15:04:05"), line(string(d.Cause)), line(cmp.Or(d.By, "–")),
			result, took, len(d.Survivors), lateText(&d))
	}
	errs := []error{t.write(e.stdout, "")}
	if details {
		for _, d := range ds {
			var s strings.Builder
			reportDetails(&s, d, t.colour)
			_, err := io.WriteString(e.stdout, s.String())
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// reportDetails tells all about a drain.
func reportDetails(w *strings.Builder, d api.Drain, colour bool) {
	fmt.Fprintf(w, "\n%s\n", paint(line("Drain "+d.ID), bold, colour))
	item := func(name, text string) {
		if text != "" {
			fmt.Fprintf(w, "  %-9s %s\n", name, line(text))
		}
	}
	item("reason", d.Reason)
	item("phases", phaseLine(d))
	item("budget", fmt.Sprintf("wait %s, flush %s, reserve %s", brief(time.Duration(d.Slices.Wait)), brief(time.Duration(d.Slices.Flush)),
		brief(time.Duration(d.Slices.Reserve))))
	if d.FlushReason != "" {
		item("flush", fmt.Sprintf("%s, result %s", d.FlushReason, orUnknown(string(d.FlushResult))))
	}
	if !d.Running() {
		item("ended", ending(d))
	}
	if d.Late != nil {
		item("late", lateWords(*d.Late))
	}
	for _, h := range d.Held {
		item("held", heldText(h))
	}
	for _, s := range d.Survivors {
		item("was open", fmt.Sprintf("%s %s, age %s, idle %s, %d B unacknowledged", s.Peer, s.Class, briefOr(s.Age, "?"), briefOr(s.Idle, "?"), s.Unacked))
	}
	// Under observe the notes are what enforcing would have done, in order.
	name := "note"
	if d.WouldHave {
		name = "observed"
	}
	for _, n := range d.Warnings {
		item(name, n)
	}
}

// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/loadtest"
)

// writer is where the story is told. Its methods may be called by several goroutines at once.
type writer struct {
	mu       sync.Mutex
	out      io.Writer
	terminal bool // a line may move
	color    bool
	moving   bool // the last line is not finished
}

// Colours of ECMA-48, 8.3.117.
const (
	bold  = "1"
	faint = "2"
	red   = "31"
	green = "32"
	amber = "33"
)

func (w *writer) paint(color, s string) string {
	if !w.color || s == "" {
		return s
	}
	return "\x1b[" + color + "m" + s + "\x1b[0m"
}

// line writes a line, in place of a moving one.
func (w *writer) line(format string, a ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.moving {
		fmt.Fprint(w.out, "\r\x1b[K")
		w.moving = false
	}
	fmt.Fprintf(w.out, format+"\n", a...)
}

// move replaces the moving line. It does nothing but on a terminal.
func (w *writer) move(format string, a ...any) {
	if !w.terminal {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	fmt.Fprintf(w.out, "\r\x1b[K"+format, a...)
	w.moving = true
}

// moment writes a line of the timeline.
func (w *writer) moment(at time.Duration, what, text string) {
	w.line("   %s  %s %s", w.paint(faint, since(at)), w.paint(bold, pad(what, 8)), text)
}

func since(at time.Duration) string { return fmt.Sprintf("%+6.2f s", at.Seconds()) }

// good and bad begin with the marks that `ebb check` uses too.
func (w *writer) good(format string, a ...any) {
	w.line("   %s", w.paint(green, "√ "+fmt.Sprintf(format, a...)))
}

func (w *writer) bad(format string, a ...any) {
	w.line("   %s", w.paint(red, "× "+fmt.Sprintf(format, a...)))
}

func (w *writer) note(format string, a ...any) { w.line("     %s", fmt.Sprintf(format, a...)) }

// pad fills up to n characters.
func pad(s string, n int) string {
	return s + strings.Repeat(" ", max(0, n-utf8.RuneCountInString(s)))
}

// table writes rows whose first column is words and whose others are numbers.
func (w *writer) table(rows [][]string, color func(row, col int) string) {
	var width []int
	for _, r := range rows {
		for i, c := range r {
			if i == len(width) {
				width = append(width, 0)
			}
			width[i] = max(width[i], utf8.RuneCountInString(c))
		}
	}
	for i, r := range rows {
		var b strings.Builder
		for j, c := range r {
			space := strings.Repeat(" ", width[j]-utf8.RuneCountInString(c))
			cell := c
			if col := color(i, j); col != "" {
				cell = w.paint(col, c)
			}
			if j == 0 {
				b.WriteString("   " + cell + space)
			} else {
				b.WriteString("   " + space + cell)
			}
		}
		w.line("%s", strings.TrimRight(b.String(), " "))
	}
}

// number groups digits by thousands.
func number[T int | int64 | uint64](n T) string {
	s := strconv.FormatInt(int64(n), 10)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// several is a number with its noun.
func several[T int | int64 | uint64](n T, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return number(n) + " " + many
}

// verdictWords say what a client saw.
var verdictWords = []struct {
	v loadtest.Verdict
	s string
}{
	{loadtest.ConnectRefused, "refused"},
	{loadtest.ConnectReset, "reset while connecting"},
	{loadtest.ConnectTimeout, "without a connection in time"},
	{loadtest.ConnectError, "without a connection"},
	{loadtest.ReadReset, "cut off without an answer"},
	{loadtest.EOF, "closed without an answer"},
	{loadtest.KeepAliveRace, "closed and not sent again"},
	{loadtest.Partial, "cut off in the middle of the answer"},
	{loadtest.Status, "answered with an error"},
	{loadtest.Timeout, "not answered in time"},
	{loadtest.Malformed, "answered with nonsense"},
	{loadtest.ClientError, "not sent by the client"},
}

// losses lists what was lost, by what the clients saw.
func losses(by map[loadtest.Verdict]int64) string {
	var parts []string
	for _, w := range verdictWords {
		if n := by[w.v]; n > 0 {
			parts = append(parts, number(n)+" "+w.s)
		}
	}
	return strings.Join(parts, ", ")
}

// open says what is connected, by class.
func open(b *api.Backend) string {
	if b == nil {
		return ""
	}
	if !b.CountsKnown {
		return "count unknown"
	}
	var parts []string
	var sum int64
	for _, c := range []struct{ class, word string }{
		{"handshake", "half-open"}, {"queued", "queued"}, {"active", "active"}, {"stalled", "stalled"}, {"idle", "idle"}, {"unused", "unused"},
	} {
		if n := b.Counts.Class(c.class); n != nil && *n > 0 {
			parts = append(parts, number(*n)+" "+c.word)
			sum += *n
		}
	}
	if sum == 0 {
		return "nothing open"
	}
	return number(sum) + " open: " + strings.Join(parts, ", ")
}

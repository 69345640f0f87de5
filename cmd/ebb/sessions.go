// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/ebbproxy/ebb/internal/api"
)

// listed is how many sessions and how many leases a person is shown: -o json has all.
const listed = 10

// lease is one that a flush at zero waits for.
type lease struct {
	api.Lease
	pid int // of its session's process
}

// leases are those of a backend, the oldest first. Those of a lost session do not count.
func leases(b api.Backend) (ls []lease) {
	for _, s := range b.Sessions {
		if s.Health == api.HealthLost {
			continue
		}
		for _, h := range s.Holds {
			ls = append(ls, lease{h, s.PID})
		}
	}
	slices.SortStableFunc(ls, func(a, b lease) int { return a.Since.Compare(b.Since) })
	return ls
}

// leasesText names who holds the flush of a running drain.
func leasesText(b api.Backend) string {
	ls := leases(b)
	switch n := b.Drain.Blocking["hold"]; {
	case len(ls) > 0 && b.Drain.FlushReason == "":
		return fmt.Sprintf("%d held; the flush at zero waits for the release", len(ls))
	case len(ls) > 0:
		return fmt.Sprintf("%d held; the flush has not waited for the release", len(ls))
	case n > 0:
		return plural(n, "hold") + " of the application"
	}
	return "none held"
}

// writeSessions draws the tables of leases and of sessions, if there are any.
func writeSessions(w *strings.Builder, b api.Backend, colour bool, now time.Time) {
	if ls := leases(b); len(ls) > 0 {
		rest := heading(w, colour, "Leases, the oldest first", &ls)
		t := table{colour: colour}
		t.row("NAME", "HELD FOR", "PID")
		for _, l := range ls {
			t.row(line(l.Name), brief(now.Sub(l.Since)), l.pid)
		}
		// A strings.Builder does not fail.
		_ = t.write(w, "  ")
		w.WriteString(rest)
	}
	if len(b.Sessions) == 0 {
		return
	}
	ss := slices.Clone(b.Sessions)
	// The worst first; within a health those that have been silent longest.
	slices.SortStableFunc(ss, func(a, b api.SessionView) int {
		return cmp.Or(-cmp.Compare(badness(a.Health), badness(b.Health)), a.Heard.Compare(b.Heard))
	})
	rest := heading(w, colour, "Sessions of the application", &ss)
	t := table{colour: colour}
	t.row("PID", "ROLE", "HEALTH", "HEARD", "HOLDS", "REMAINING", "VERSION", "UNREAD")
	for _, s := range ss {
		remaining, version := "–", "–"
		if s.Remaining != nil {
			remaining = fmt.Sprint(*s.Remaining)
		}
		if s.Version != 0 {
			version = fmt.Sprint(s.Version)
		}
		t.row(s.PID, line(string(s.Role)), healthCell(s.Health), brief(now.Sub(s.Heard))+" ago", len(s.Holds), remaining, version, s.Seq-min(s.Acked, s.Seq))
	}
	_ = t.write(w, "  ")
	w.WriteString(rest)
}

// heading writes a heading, cuts all to what is listed, and returns what is to be said of the rest.
func heading[T any](w *strings.Builder, colour bool, text string, all *[]T) (rest string) {
	fmt.Fprintf(w, "\n%s\n", paint(text, bold, colour))
	if n := len(*all) - listed; n > 0 {
		*all = (*all)[:listed]
		return fmt.Sprintf("  and %d more, see -o json\n", n)
	}
	return ""
}

func badness(h api.Health) int {
	return slices.Index([]api.Health{api.HealthOK, api.HealthSuspect, api.HealthLost}, h)
}

func healthCell(h api.Health) cell {
	c := cell{text: line(string(h))}
	switch h {
	case api.HealthSuspect:
		c.paint = yellow
	case api.HealthLost:
		c.paint = red
	}
	return c
}

// sessionsCell is how many sessions there are, and how many are silent.
func sessionsCell(b api.Backend) cell {
	if len(b.Sessions) == 0 {
		return cell{text: "–"}
	}
	silent := 0
	for _, s := range b.Sessions {
		if s.Health != api.HealthOK {
			silent++
		}
	}
	c := cell{text: fmt.Sprint(len(b.Sessions))}
	if silent > 0 {
		c.text, c.paint = fmt.Sprintf("%s (%d silent)", c.text, silent), yellow
	}
	return c
}

// heldText says how long a drain has met a lease.
func heldText(h api.HeldDuring) string {
	s := fmt.Sprintf("%s by process %d, for %s", h.Name, h.PID, brief(time.Duration(h.For)))
	if !h.Released {
		s += ", not released"
	}
	return s
}

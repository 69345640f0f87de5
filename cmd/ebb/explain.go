// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
)

func newExplainCmd(env *environment) *cobra.Command {
	var (
		at  where
		top int
	)
	output := newWord("table", "table", "json", "yaml")
	cmd := &cobra.Command{
		Use:   "explain BACKEND",
		Short: "Show what blocks a drain, who began it, what happens next, and what to type",
		Long: `One screen for three in the morning: what blocks, the connections that block
longest, who began the drain, what happens at the deadline, what to type next.`,
		Example:           `  ebb explain web`,
		Args:              exactly(1, "BACKEND"),
		ValidArgsFunction: env.completeBackends,
		RunE: func(cmd *cobra.Command, args []string) error {
			if top < 1 {
				return usagef("--top %d is not greater than 0", top)
			}
			return env.explain(cmd.Context(), at, args[0], top, output.value)
		},
	}
	addAPI(cmd, &at)
	addOutput(cmd, output)
	cmd.Flags().IntVar(&top, "top", 10, "how many connections to list")
	return cmd
}

// explanation is what explain shows, for a machine.
type explanation struct {
	Backend    api.Backend     `json:"backend"`
	Stragglers []api.Straggler `json:"stragglers"`
	Next       []nextStep      `json:"next"`
}

// nextStep is a command and what it does.
type nextStep struct {
	Command string `json:"command"`
	Does    string `json:"does"`
}

func (e *environment) explain(ctx context.Context, at where, name string, top int, format string) error {
	b, err := e.find(ctx, at, name)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	if b.Backend, err = b.client.Backend(ctx, name); err != nil {
		return err
	}
	rows, err := b.client.Stragglers(ctx, name, top)
	why := ""
	if err != nil {
		why = err.Error()
	}
	x := explanation{Backend: b.Backend, Stragglers: rows, Next: nextSteps(b.Backend)}
	if x.Stragglers == nil {
		x.Stragglers = []api.Straggler{}
	}
	if format != "table" {
		return writeDocument(e.stdout, format, x)
	}
	var s strings.Builder
	x.write(&s, e.colour(e.stdout), why, time.Now())
	_, err = io.WriteString(e.stdout, s.String())
	return err
}

// write draws the screen. why says why there are no stragglers, if they could not be listed.
func (x explanation) write(w *strings.Builder, colour bool, why string, now time.Time) {
	b, d := x.Backend, x.Backend.Drain
	running := d != nil && d.Running()
	item := func(name, format string, args ...any) {
		fmt.Fprintf(w, "  %s %s\n", paint(fmt.Sprintf("%-11s", name), bold, colour), line(fmt.Sprintf(format, args...)))
	}
	st := stateCell(b.State)
	fmt.Fprintf(w, "%s (service %s, generation %d) is %s", paint(line(b.Name), bold, colour), line(b.Service), b.Gen, paint(st.text, st.paint, colour))
	if running {
		fmt.Fprintf(w, ", phase %s, %s of %s left", d.Phase(), brief(d.Deadline.Sub(now)), brief(d.Deadline.Sub(d.Begun)))
	}
	w.WriteByte('\n')

	if d != nil {
		item("begun", "%s (%s ago) by %s, cause %s%s", clockTime(d.Begun), brief(now.Sub(d.Begun)), orUnknown(d.By), d.Cause, because(d.Reason))
		item("phases", "%s", phaseLine(*d))
	}
	if running {
		item("blocks", "%s", blocks(b))
	} else if d != nil {
		item("ended", "%s", ending(*d))
	}
	item("connections", "%s", connections(b))
	for _, a := range b.Addresses {
		item("service", "%s %s", a.Address, sharesText(a))
	}
	if running {
		x.drainItems(item, now)
	} else {
		item("new", "while it drains: %s%s", b.OnNew.Chosen, whyChosen(b.OnNew))
	}
	if !b.Guarded && b.PID != 0 {
		item("unguarded", "admission cannot close here: zero is believed after a pause of arrivals only")
	}

	switch {
	case why != "":
		item("open", "the connections cannot be listed: %s", why)
	case len(x.Stragglers) > 0:
		fmt.Fprintf(w, "\n%s\n", paint("Open connections, those that block first", bold, colour))
		t := table{colour: colour}
		t.row("PEER", "LOCAL", "CLASS", "AGE", "IDLE", "UNACKED", "PID")
		for _, s := range x.Stragglers {
			pid := "?"
			if s.PID != 0 {
				pid = fmt.Sprint(s.PID)
			}
			t.row(line(s.Peer), line(s.Local), line(s.Class), briefOr(s.Age, "?"), briefOr(s.Idle, "?"), fmt.Sprintf("%d B", s.Unacked), pid)
		}
		// A strings.Builder does not fail.
		_ = t.write(w, "  ")
	}

	writeSessions(w, b, colour, now)

	var notes []string
	for _, n := range b.NotCovered {
		notes = append(notes, fmt.Sprintf("not covered: %s (%s)", n.What, n.Why))
	}
	notes = append(notes, b.Warnings...)
	if d != nil {
		notes = append(notes, d.Warnings...)
	}
	if len(notes) > 0 {
		fmt.Fprintf(w, "\n%s\n", paint("Take note", bold, colour))
		for _, n := range notes {
			fmt.Fprintf(w, "  ‼ %s\n", line(n))
		}
	}

	fmt.Fprintf(w, "\n%s\n", paint("What to type next", bold, colour))
	t := table{colour: colour}
	for _, n := range x.Next {
		t.row(n.Command, n.Does)
	}
	_ = t.write(w, "  ")
}

// drainItems are the lines about a running drain's future.
func (x explanation) drainItems(item func(string, string, ...any), now time.Time) {
	b, d := x.Backend, x.Backend.Drain
	wouldBe := ""
	if d.WouldHave {
		wouldBe = " (observed only: nothing is touched)"
	}
	item("new", "%s%s%s", b.OnNew.Chosen, whyChosen(b.OnNew), wouldBe)
	acts := d.Deadline.Add(-time.Duration(d.Slices.Reserve))
	flush := acts.Add(-time.Duration(d.Slices.Flush))
	switch {
	case d.FlushResult != "":
		item("flush", "sent (reason %s), result %s", d.FlushReason, d.FlushResult)
	case d.FlushReason != "":
		end := acts // of its slice
		for _, p := range d.Phases {
			if at := p.At.Add(time.Duration(d.Slices.Flush)); p.Phase == drain.PhaseFlush && at.Before(acts) {
				end = at
			}
		}
		item("flush", "sent (reason %s); the application has until %s", d.FlushReason, clockTime(end))
	default:
		item("flush", "at zero that lasts %s, at the latest %s (in %s); the application then has %s",
			d.Policy.QuietPeriod, clockTime(flush), brief(flush.Sub(now)), brief(time.Duration(d.Slices.Flush)))
	}
	item("deadline", "%s (in %s): %s", clockTime(d.Deadline), brief(d.Deadline.Sub(now)), atDeadline(*d, acts))
	item("leases", "%s", leasesText(b))
	if d.Retired > 0 {
		item("retired", "%s closed one by one", plural(d.Retired, "idle connection"))
	}
	if d.Late != nil && d.Late.Any() {
		item("late", "%s since the backend was told to stop", lateWords(*d.Late))
	}
}

// sharesText says who gets the new connections to an address of the service.
func sharesText(a api.ServiceAddress) string {
	sum := 0
	for _, n := range a.Shares {
		sum += n
	}
	if sum == 0 {
		return "is not steered: " + a.Why
	}
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(a.Shares)) {
		parts = append(parts, fmt.Sprintf("%s (%d of %d)", name, a.Shares[name], sum))
	}
	return "is steered to " + strings.Join(parts, ", ")
}

func atDeadline(d api.Drain, acts time.Time) string {
	what, ok := map[drain.OnDeadline]string{
		drain.OnDeadlineCut:   "cut: each is shut for reading, may acknowledge, and is then destroyed",
		drain.OnDeadlineReset: "reset at once",
		drain.OnDeadlineLeave: "left alone",
	}[d.Policy.OnDeadline]
	if !ok {
		what = fmt.Sprintf("treated by %q, a word of a newer ebb", string(d.Policy.OnDeadline))
	}
	return fmt.Sprintf("what is still open at %s is %s", clockTime(acts), what)
}

// blocks names what keeps the drain from its end.
func blocks(b api.Backend) string {
	if b.Drain.Blocking == nil {
		return "unknown: the connections cannot be counted, so the drain waits for its deadline"
	}
	var parts []string
	for _, class := range api.Classes {
		if n := b.Drain.Blocking[class]; n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, class))
		}
	}
	if n := b.Drain.Blocking["hold"]; n > 0 {
		parts = append(parts, plural(n, "hold"))
	}
	if _, ok := b.Drain.Blocking["unknown"]; ok {
		parts = append(parts, "an unknown count")
	}
	if _, ok := b.Drain.Blocking["quiet"]; ok {
		parts = append(parts, fmt.Sprintf("zero must last %s", b.Drain.Policy.QuietPeriod))
	}
	if len(parts) == 0 {
		return "nothing"
	}
	return strings.Join(parts, ", ")
}

// connections lists the classes that have any.
func connections(b api.Backend) string {
	if !b.CountsKnown {
		return "unknown (which is not zero)"
	}
	var parts []string
	for _, class := range api.Classes {
		n := b.Counts.Class(class)
		switch {
		case n == nil:
			parts = append(parts, "? "+class)
		case *n > 0:
			parts = append(parts, fmt.Sprintf("%d %s", *n, class))
		}
	}
	if len(parts) == 0 {
		parts = []string{"none"}
	}
	return fmt.Sprintf("%s in flight; by class: %s", number(b.InFlight), strings.Join(parts, ", "))
}

// ending says how a drain went.
func ending(d api.Drain) string {
	s := string(d.Outcome)
	if d.Ended != nil {
		s += fmt.Sprintf(" at %s, after %s", clockTime(*d.Ended), brief(d.Ended.Sub(d.Begun)))
	}
	if n := len(d.Survivors); n > 0 {
		s += fmt.Sprintf("; %s open when the wait ran out", plural(int64(n), "connection"))
	}
	if c := d.Cut; c != nil {
		s += fmt.Sprintf("; %s: %d closed by the application, %d destroyed, %d left", c.Method, c.Graceful, c.Destroyed, c.Left)
		if c.InFlight > 0 {
			s += fmt.Sprintf(", %d with a request in flight, whose result is unknown", c.InFlight)
		}
	}
	if d.Retired > 0 {
		s += fmt.Sprintf("; %s retired", plural(d.Retired, "idle connection"))
	}
	kept := 0
	for _, h := range d.Held {
		if !h.Released {
			kept++
		}
	}
	if kept > 0 {
		s += fmt.Sprintf("; %s not released", plural(int64(kept), "lease"))
	}
	return s
}

// phaseLine is when each phase was entered, from the beginning.
func phaseLine(d api.Drain) string {
	parts := make([]string, len(d.Phases))
	for i, p := range d.Phases {
		parts[i] = fmt.Sprintf("%s +%s", p.Phase, brief(p.At.Sub(d.Begun)))
	}
	return strings.Join(parts, " → ")
}

func because(reason string) string {
	if reason == "" {
		return ""
	}
	return ": " + reason
}

// lateWords says what became of late connections, without what did not happen.
func lateWords(l api.Late) string {
	var parts []string
	for _, p := range []struct {
		n    int64
		what string
	}{
		{l.Admitted, "admitted"}, {l.Refused, "refused"}, {l.Redirected, "redirected"}, {l.Adopted, "out of the accept queue"},
		{value(l.Carried), "being carried"}, {value(l.Parked), "held"}, {l.Failed, "not carried"},
		{l.Health, "health checks turned away"}, {l.Ended, "ended at the deadline"},
	} {
		if p.n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", p.n, p.what))
		}
	}
	return strings.Join(parts, ", ")
}

// value is a number that may not be known, as none.
func value(n *int64) int64 {
	if n == nil {
		return 0
	}
	return *n
}

// whyChosen is what on_new was set to, where that was not the answer itself, and why.
func whyChosen(c api.OnNewChoice) string {
	why := c.Why
	if set := string(c.Configured); c.Configured != c.Chosen && !strings.HasPrefix(why, set+":") {
		why = strings.TrimSuffix(set+": "+why, ": ")
	}
	if why == "" {
		return ""
	}
	return " (" + why + ")"
}

func orUnknown(s string) string {
	if s == "" {
		return "unknown"
	}
	return s
}

// nextSteps are the commands that make sense now.
func nextSteps(b api.Backend) []nextStep {
	name := shellWord(b.Name)
	d := b.Drain
	switch {
	case d != nil && d.Running() && b.State == drain.StateFlushing:
		return []nextStep{
			{"ebb events --follow " + name, "watch it end: the application has been told, which nothing takes back"},
			{"ebb drain " + name + " --wait", "wait for its end"},
		}
	case d != nil && d.Running():
		steps := []nextStep{
			{"ebb drain " + name + " --wait", "wait for its end"},
			{"ebb extend " + name + " --by 30s", "give the connections more time"},
			{"ebb cut " + name, "end them now"},
			{"ebb undrain " + name, "take the drain back (until the flush)"},
		}
		if ls := leases(b); len(ls) > 0 {
			steps[2].Does = "end them now, and wait for no lease"
			steps = slices.Insert(steps, 0, nextStep{fmt.Sprintf("ps -f -p %d", ls[0].pid), "see who holds " + line(ls[0].Name) + ": the flush waits for its release, or its end"})
		}
		return steps
	case b.State == drain.StateDone || b.State == drain.StateLost:
		return []nextStep{
			{"ebb report " + name, "see what its drains did"},
			{"ebb events " + name, "see what happened"},
		}
	}
	return []nextStep{
		{"ebb drain " + name + " --wait", "drain it"},
		{"ebb status " + name + " --watch", "watch it"},
	}
}

// shellWord is s as a shell reads it back.
func shellWord(s string) string {
	if s != "" && strings.IndexFunc(s, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("-_.@:/", r))
	}) < 0 {
		return s
	}
	return "'" + strings.ReplaceAll(line(s), "'", `'\''`) + "'"
}

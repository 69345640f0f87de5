// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// The two servers. Their addresses are free in a network namespace of our own.
const (
	blueName  = "blue"
	greenName = "green"
	blueAddr  = "127.0.0.1:8001"
	greenAddr = "127.0.0.1:8002"
)

// stage is where the acts are played.
type stage struct {
	o Options
	w *writer
}

// play plays the acts one after the other and pronounces the verdict.
func play(ctx context.Context, o Options) (int, error) {
	s := &stage{o: o, w: &writer{out: o.Stdout, terminal: o.Terminal && !o.JSON, color: o.Color}}
	if o.JSON {
		s.w.out = discard{}
	}
	rep := &Report{Kernel: release(), Load: Load{
		Rate: max(0, o.Rate), KeepAlive: max(0, o.KeepAlive), Slow: max(0, o.Slow), SlowFor: o.SlowFor.Seconds(), Lag: o.Lag.Seconds(),
	}}
	s.introduce()
	green, err := startServer(ctx, greenName, greenAddr)
	if err != nil {
		return 0, err
	}
	defer green.kill()
	for i, name := range o.Acts {
		s.w.line("")
		a, err := s.act(ctx, i+1, name)
		if err != nil {
			return 0, fmt.Errorf("act %d, %s: %w", i+1, name, err)
		}
		rep.Acts = append(rep.Acts, a)
	}
	s.conclude(rep)
	if o.JSON {
		e := json.NewEncoder(o.Stdout)
		e.SetIndent("", "  ")
		if err := e.Encode(rep); err != nil {
			return 0, fmt.Errorf("write report: %w", err)
		}
	}
	if !rep.OK {
		return 1, nil
	}
	return 0, nil
}

type discard struct{}

func (discard) Write(b []byte) (int, error) { return len(b), nil }

func (s *stage) act(ctx context.Context, n int, name string) (*Act, error) {
	a := &Act{Name: name}
	switch name {
	case ActBare:
		a.Title, a.Command = "Today: SIGTERM goes to blue itself", "blue"
	case ActDrain:
		a.Title, a.Command = "With Ebb: SIGTERM goes to ebb run", "ebb run --protocol http1 -- blue"
	case ActRefuse:
		a.Title, a.Command = "With Ebb, newcomers turned away at once", "ebb run --protocol http1 --on-new refuse -- blue"
	case ActCrash:
		a.Title, a.Command = "With Ebb, and ebb run killed halfway", "ebb run --protocol http1 --on-new refuse -- blue, kill -9, and again"
	}
	s.w.line("%s  %s", s.w.paint(bold, fmt.Sprintf("%d. %s", n, a.Title)), s.w.paint(faint, "$ "+a.Command))
	var err error
	if name == ActBare {
		err = s.bare(ctx, a)
	} else {
		a.Ebb = true
		err = s.drained(ctx, a)
	}
	if err != nil {
		return nil, err
	}
	s.sumUp(a)
	return a, nil
}

// bare is a server that is told to stop as everybody does it.
func (s *stage) bare(ctx context.Context, a *Act) error {
	blue, err := startServer(ctx, blueName, blueAddr)
	if err != nil {
		return err
	}
	defer blue.kill()
	l, err := s.startLoad(ctx, a)
	if err != nil {
		return err
	}
	defer l.stop()
	signal, err := l.signal(ctx, blue)
	if err != nil {
		return err
	}
	s.moment(a, 0, "", "SIGTERM to blue")
	if err := blue.wait(ctx); err != nil {
		return err
	}
	a.Gone = time.Since(signal).Seconds()
	s.moment(a, time.Since(signal), "", "blue is gone. The balancer does not know yet and goes on sending there")
	if err := until(ctx, signal.Add(s.o.Lag)); err != nil {
		return err
	}
	s.moment(a, time.Since(signal), "", "the balancer has noticed: from now on all goes to green")
	return l.finish(ctx, signal, time.Time{})
}

// moment adds to the timeline and shows it.
func (s *stage) moment(a *Act, at time.Duration, what, text string) {
	a.Timeline = append(a.Timeline, Moment{At: at.Seconds(), Text: text})
	s.w.moment(at, what, text)
}

func until(ctx context.Context, t time.Time) error {
	timer := time.NewTimer(time.Until(t))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (s *stage) introduce() {
	o, w := s.o, s.w
	w.line("%s", w.paint(bold, "What do users notice when a server leaves?"))
	w.line("")
	w.line("   Two ordinary web servers, blue and green, share the work. Their clients:")
	var who []string
	if o.Rate > 0 {
		who = append(who, fmt.Sprintf("%.0f new connections a second", o.Rate))
	}
	if o.KeepAlive > 0 {
		who = append(who, fmt.Sprintf("%d that keep their connection", o.KeepAlive))
	}
	if o.Slow > 0 {
		who = append(who, fmt.Sprintf("%d that wait for answers of %v", o.Slow, o.SlowFor))
	}
	w.line("   %s.", strings.Join(who, ", "))
	w.line("   Then blue has to stop. SIGTERM ends it at once, as it ends most programs, and the load")
	w.line("   balancer needs %v to notice. Everything here is real: processes, connections, signals.", o.Lag)
}

// sumUp says what became of the requests of an act.
func (s *stage) sumUp(a *Act) {
	w := s.w
	if a.Skipped != "" {
		w.line("   %s", w.paint(amber, "‼ cannot be shown here: "+a.Skipped))
		return
	}
	if a.Lost > 0 {
		w.bad("%s of %s requests failed: %s", number(a.Lost), number(a.Requests), losses(a.LostBy))
	} else if !a.Ebb {
		w.note("this time all %s requests were answered", number(a.Requests))
	} else if a.TurnedAway > 0 {
		w.good("%s of %s requests answered, %s turned away before they sent a byte, none lost", number(a.Answered), number(a.Requests), number(a.TurnedAway))
	} else {
		w.good("all %s requests answered", number(a.Requests))
	}
	if !a.Ebb {
		w.note("blue was working on %s when it died; %s by clients whose connection had been closed between two",
			several(a.AtSignal, "request", "requests"), several(a.Repeated, "request was repeated", "requests were repeated"))
		return
	}
	for _, l := range a.Losses {
		w.note("at %+.3f s: %s, sent to %s %.3f s earlier (%s)", l.At, l.Verdict, l.Target, l.Took, l.Err)
	}
	w.note("requests under way at the signal: %s, when the door shut: %s; came late and were served: %s", number(a.AtSignal), number(a.AtFlip), number(a.Late))
	if d := a.Drain; d != nil {
		var cut int64
		if d.Cut != nil {
			cut = d.Cut.Graceful + d.Cut.Destroyed
		}
		w.note("idle connections ended one by one: %s (%s sent again by their clients); cut: %s", number(d.Retired), number(a.Repeated), number(cut))
	}
	if a.Flushed > 0 {
		w.note("blue gave its last answer at %+.2f s and, after a quiet period, got its SIGTERM at %+.2f s", a.LastAnswer, a.Flushed)
	}
	for _, c := range a.Checks {
		if !c.OK {
			w.bad("%s", c.Text)
		}
	}
	if a.held() {
		w.note("%s", w.paint(faint, fmt.Sprintf("counted by the network stack as well: %s connections made, %s refused", number(a.Network.Made), number(a.Network.Refused))))
	}
}

// conclude shows the table and decides.
func (s *stage) conclude(rep *Report) {
	w := s.w
	rows := [][]string{{"", "requests", "answered", "turned away", "lost"}}
	var lost, played, skipped int64
	rep.OK = true
	for i, a := range rep.Acts {
		title := fmt.Sprintf("%d. %s", i+1, a.Title)
		if a.Skipped != "" {
			skipped++
			rows = append(rows, []string{title, "–", "–", "–", "–"})
			continue
		}
		rows = append(rows, []string{title, number(a.Requests), number(a.Answered), number(a.TurnedAway), number(a.Lost)})
		if a.Ebb {
			played++
			lost += a.Lost
			rep.OK = rep.OK && a.held()
		}
	}
	switch {
	case played == 0:
		rep.OK = false
		rep.Verdict = "no act with Ebb was shown, so there is no verdict"
	case rep.OK:
		rep.Verdict = "nothing was lost with Ebb"
	case lost > 0:
		rep.Verdict = several(lost, "request was", "requests were") + " lost with Ebb, which must not be"
	default:
		rep.Verdict = "no request was lost with Ebb, but not all went as promised: see above"
	}
	if skipped > 0 && played > 0 {
		rep.Verdict += fmt.Sprintf(" (%s not shown here)", several(skipped, "act was", "acts were"))
	}
	w.line("")
	w.table(rows, func(row, col int) string {
		switch {
		case row == 0:
			return faint
		case col != 4 || rows[row][4] == "–":
			return ""
		case rows[row][4] == "0":
			return green
		}
		return red
	})
	w.line("")
	if rep.OK {
		w.good("%s", rep.Verdict)
	} else {
		w.bad("%s", rep.Verdict)
	}
}

func release() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return ""
	}
	return unix.ByteSliceToString(u.Release[:])
}

var errNoBlue = errors.New("blue has ended before it was told to")

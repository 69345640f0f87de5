// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
)

// supervised is blue under `ebb run`.
type supervised struct {
	*process
	report string
	client *api.Client
	events chan drain.Event // closed when the stream has ended
}

// supervise starts blue under `ebb run` and waits until its listener is found. again: blue lives already and is in
// the middle of its drain.
func (s *stage) supervise(ctx context.Context, a *Act, again bool) (*supervised, error) {
	server, err := serverCommand(blueName, blueAddr)
	if err != nil {
		return nil, err
	}
	sock := filepath.Join(runDir, a.Name+".sock")
	report := filepath.Join(reports, a.Name+".json")
	argv := []string{"/proc/self/exe", "run", "--name", blueName, "--protocol", "http1", "--datapath", s.o.Datapath, "--api", sock, "--report", report}
	if a.turnsAway() {
		argv = append(argv, "--on-new", string(drain.OnNewRefuse))
	}
	if s.o.Grace > 0 {
		argv = append(argv, "--grace", s.o.Grace.String())
	}
	p, err := start("ebb run", append(append(argv, "--"), server...), []string{ownBPFFS + "=" + pins, ownRun + "=" + runDir})
	if err != nil {
		return nil, err
	}
	e := &supervised{process: p, report: report}
	if err := e.connect(ctx, sock, again); err != nil {
		p.kill()
		return nil, fmt.Errorf("%w%s", err, p.words())
	}
	return e, nil
}

// connect follows the events from the first one on and waits until blue is found to be listening, unless it drains.
func (e *supervised) connect(ctx context.Context, sock string, again bool) error {
	wait, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for e.client == nil {
		c, err := api.Dial(wait, sock)
		switch {
		case err == nil:
			e.client = c
			continue
		case !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, api.ErrNotAnswering):
			return err
		}
		select {
		case <-tick.C:
		case <-e.done:
			return fmt.Errorf("start ebb run: it ended (%v)", e.cmd.ProcessState)
		case <-wait.Done():
			return fmt.Errorf("start ebb run: its socket does not answer: %w", context.Cause(wait))
		}
	}
	e.events = make(chan drain.Event, 256)
	go func() {
		defer close(e.events)
		for ev, err := range e.client.Events(ctx, 0, true) {
			if err != nil {
				return
			}
			select {
			case e.events <- ev:
			case <-ctx.Done():
				return
			}
		}
	}()
	for {
		err := e.client.Ready(wait)
		if err == nil || again {
			return nil
		}
		select {
		case <-tick.C:
		case <-e.done:
			return fmt.Errorf("start ebb run: it ended (%v)", e.cmd.ProcessState)
		case <-wait.Done():
			return fmt.Errorf("start ebb run: blue does not become ready: %w", err)
		}
	}
}

// backend asks for the present state; nil if nobody answers any more.
func (e *supervised) backend(ctx context.Context) *api.Backend {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	b, err := e.client.Backend(ctx, blueName)
	if err != nil {
		return nil
	}
	return &b
}

// course is what the events told of a drain. Times are the wall clock's.
type course struct {
	onNew     drain.OnNew
	flip      time.Time // admission was closed by then
	waiting   bool
	flushes   []time.Time
	reason    string
	outcome   drain.Outcome
	signal    time.Time
	unguarded bool
	orphan    int // blue, when its supervisor was killed
}

// drained plays an act in which blue leaves with Ebb.
func (s *stage) drained(ctx context.Context, a *Act) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	e, err := s.supervise(ctx, a, false)
	if err != nil {
		return err
	}
	defer e.kill()
	b := e.backend(ctx)
	if b == nil {
		return fmt.Errorf("ask ebb run for its backend: no answer%s", e.words())
	}
	if !b.Guarded {
		why := "admission cannot be closed on this machine, so nothing can be refused"
		if len(b.Warnings) > 0 {
			why += " (" + strings.Join(b.Warnings, "; ") + ")"
		}
		switch a.Name {
		case ActRefuse, ActCrash:
			a.Skipped = why
			// ebb run ends with its server, and so takes back what it has in the kernel.
			if err := unix.Kill(b.PID, unix.SIGKILL); err != nil {
				return fmt.Errorf("end blue: %w", err)
			}
			return e.wait(ctx)
		}
		s.w.line("   %s", s.w.paint(amber, "‼ reduced: "+why))
	}
	l, err := s.startLoad(ctx, a)
	if err != nil {
		return err
	}
	defer l.stop()
	c := &course{unguarded: !b.Guarded}
	if c.signal, err = l.signal(ctx, e); err != nil {
		return err
	}
	s.moment(a, 0, "", "SIGTERM to ebb run")
	if a.Name == ActCrash {
		if e, err = s.crash(ctx, a, e, c); err != nil {
			return err
		}
		defer e.kill()
	}
	if err := s.follow(ctx, a, e, c); err != nil {
		return err
	}
	if err := e.wait(ctx); err != nil {
		return err
	}
	a.Gone = time.Since(c.signal).Seconds()
	if c.orphan > 0 {
		reap(c.orphan)
	}
	// The balancer may still be sending: what it sends now meets a port on which nobody listens, as after any stop.
	if err := until(ctx, c.signal.Add(s.o.Lag)); err != nil {
		return err
	}
	if err := l.finish(ctx, c.signal, c.flip); err != nil {
		return err
	}
	return s.judge(a, e, c)
}

// follow shows the events of the drain until ebb run has ended.
func (s *stage) follow(ctx context.Context, a *Act, e *supervised, c *course) error {
	for {
		select {
		case ev, ok := <-e.events:
			if !ok {
				return nil
			}
			s.hear(ctx, a, e, c, ev)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// hear takes in one event.
func (s *stage) hear(ctx context.Context, a *Act, e *supervised, c *course, ev drain.Event) {
	phase, text := ev.Phase, ""
	switch ev.Type {
	case drain.EventBegin:
		if v, ok := ev.Fields["on_new"].(string); ok {
			c.onNew = drain.OnNew(v)
		}
		text = "blue hears nothing yet; health checks now read 503"
		if resumed, _ := ev.Fields["resumed"].(bool); resumed {
			text = "the drain goes on, from its journal and the kernel's counts"
		}
	case drain.EventPhase:
		switch ev.Phase {
		case drain.PhaseStopNew:
			if !c.flip.IsZero() {
				return // see below
			}
			text = "newcomers are to be turned away"
			if c.onNew != drain.OnNewRefuse {
				text = "late connections are still let in, until they pause"
			}
		case drain.PhaseSettle:
			if !c.flip.IsZero() {
				return // a drain that goes on after a restart: the door was shut all along
			}
			c.flip = ev.Time
			text = "the door is shut; those on the threshold come in"
			if c.unguarded {
				c.flip = time.Time{} // nothing was closed
				text = "the door cannot be shut here: newcomers may still come"
			}
		case drain.PhaseWait:
			if c.waiting {
				return // see above
			}
			c.waiting = true
			text = "requests get their answers, idle connections are ended"
		case drain.PhaseFlush:
			text = "nothing is left: blue gets its SIGTERM now"
		case drain.PhaseCut:
			text = "time is up: what is left is ended"
		case drain.PhaseDone:
			return // EventEnd says more
		}
	case drain.EventFlush:
		if ev.Fields["result"] == nil {
			c.flushes = append(c.flushes, ev.Time)
			c.reason, _ = ev.Fields["reason"].(string)
		}
		return
	case drain.EventSurvivors:
		text = "the time to wait is over: " + ev.Message
	case drain.EventEnd:
		c.outcome = ev.Outcome
		text = string(ev.Outcome)
	case drain.EventWarning:
		phase, text = "", "‼ "+ev.Message
	default:
		return
	}
	m := Moment{At: ev.Time.Sub(c.signal).Seconds(), Phase: phase, Text: text}
	switch ev.Type {
	case drain.EventBegin, drain.EventPhase:
		if b := e.backend(ctx); b != nil {
			m.Counts, m.InFlight = &b.Counts, b.InFlight
			if ev.Phase != drain.PhaseFlush {
				text += s.w.paint(faint, " · "+open(b))
			}
		}
	}
	a.Timeline = append(a.Timeline, m)
	s.w.moment(ev.Time.Sub(c.signal), string(phase), text)
}

// crash kills ebb run in the middle of the drain and starts it again under the same name.
func (s *stage) crash(ctx context.Context, a *Act, e *supervised, c *course) (*supervised, error) {
	for !c.waiting {
		select {
		case ev, ok := <-e.events:
			if !ok {
				return e, errors.New("ebb run has ended before it could be killed")
			}
			s.hear(ctx, a, e, c, ev)
		case <-ctx.Done():
			return e, context.Cause(ctx)
		}
	}
	if b := e.backend(ctx); b != nil {
		c.orphan = b.PID
	}
	e.kill()
	s.moment(a, time.Since(c.signal), "kill -9", "ebb run is gone; blue goes on, and the kernel keeps the door closed")
	s.moment(a, time.Since(c.signal), "restart", "ebb run is started again under the same name")
	next, err := s.supervise(ctx, a, true)
	if err != nil {
		return e, err
	}
	return next, nil
}

// reap waits for an orphan, if it has already ended: in our pid namespace orphans are ours.
func reap(pid int) {
	var ws unix.WaitStatus
	_, _ = unix.Wait4(pid, &ws, unix.WNOHANG, nil) // one that lives is reaped when the namespace ends
}

// judge checks what Ebb promised.
func (s *stage) judge(a *Act, e *supervised, c *course) error {
	var rep struct {
		Backend api.Backend `json:"backend"`
	}
	text, err := os.ReadFile(e.report)
	if err != nil {
		return fmt.Errorf("read the report of ebb run: %w%s", err, e.words())
	}
	if err := json.Unmarshal(text, &rep); err != nil {
		return fmt.Errorf("read the report of ebb run: %w", err)
	}
	a.Drain, a.Census = rep.Backend.Drain, rep.Backend.Counts.Accepted
	if len(c.flushes) > 0 {
		a.Flushed = c.flushes[0].Sub(c.signal).Seconds()
	}
	check := func(name string, ok bool, format string, args ...any) {
		a.Checks = append(a.Checks, Check{Name: name, OK: ok, Text: fmt.Sprintf(format, args...)})
	}
	check("lost", a.Lost == 0, "%s lost", several(a.Lost, "request was", "requests were"))
	check("unsent", a.Unsent == 0, "%s were not sent: the clients could not keep up, so the load was not what it should be", several(a.Unsent, "request", "requests"))
	check("outcome", c.outcome == drain.OutcomeDrained, "the drain ended as %q; drained is what it should be", or(string(c.outcome), "nothing"))
	check("signal", len(c.flushes) == 1 && c.reason == string(drain.FlushZero),
		"blue got its own SIGTERM %d times, reason %q; once, at zero, is right", len(c.flushes), c.reason)
	check("order", a.Flushed >= a.LastAnswer, "blue got its SIGTERM at %+.3f s, before its last answer at %+.3f s", a.Flushed, a.LastAnswer)
	check("network", a.Network == a.Clients, "the clients count %d connections and %d refusals, the network stack %d and %d",
		a.Clients.Made, a.Clients.Refused, a.Network.Made, a.Network.Refused)
	if !c.unguarded {
		check("flip", a.Through == 0, "%s reached blue although the door was closed before", several(a.Through, "connection", "connections"))
		counted := "unknown"
		if a.Census != nil {
			counted = number(*a.Census)
		}
		check("census", a.Census != nil && *a.Census == uint64(a.ToBlue), "Ebb counted %s connections to blue, the clients %s", counted, number(a.ToBlue))
	}
	return nil
}

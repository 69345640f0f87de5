// SPDX-License-Identifier: Apache-2.0

package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// run is one drain, from draining on.
type run struct {
	id, cause         string // of the agent's drain; a cause of our own if the id is empty
	deadline, flushBy time.Time
	led               bool               // the agent has announced it
	own               bool               // begun by this process too, with a deadline of its own
	committed         bool               // too far gone to be taken back
	ask               string             // why, if the agent is still to be asked for a drain
	cancel            context.CancelFunc // ends alone; nil: it does not run
}

// signal is a signal of Options.Signals. Under an agent that is heard from it may be its flush: then the event that says so
// has been sent as well. It may be the orchestrator's, while the agent drains for the same reason. So it begins what has not
// begun, and decides nothing else.
func (s *Session) signal(name string) {
	s.signals++
	s.o.Log.Info("stop signal", "signal", name, "number", s.signals)
	switch s.signals {
	case 1:
		s.begin(name, time.Now().Add(s.o.Grace))
	case 3:
		s.forceNow()
	}
}

// forceNow ends everything at once.
func (s *Session) forceNow() {
	s.force()
	s.begin("force", time.Now())
	s.flush(FlushDeadline, s.drain.id, time.Now())
}

// begin begins a drain of our own, or makes the running one ours and its deadline no later than this.
func (s *Session) begin(cause string, deadline time.Time) {
	if s.status.Flushing {
		return
	}
	now := time.Now()
	flushBy := deadline.Add(-s.slices(deadline.Sub(now)))
	d := s.drain
	if d == nil {
		d = &run{cause: cause, deadline: deadline, flushBy: flushBy, ask: cause}
		s.announce(d)
		s.nudge()
	}
	d.own, d.committed = true, true
	if deadline.Before(d.deadline) {
		d.deadline = deadline
	}
	d.flushBy = earlier(d.flushBy, flushBy)
	s.lead()
}

// slices is what reserve and flush take of a budget: as configured, or in proportion if it is shorter than Grace.
func (s *Session) slices(total time.Duration) time.Duration {
	full := s.o.Reserve + s.o.FlushTimeout
	if total >= s.o.Grace {
		return full
	}
	return max(0, time.Duration(float64(full)*float64(total)/float64(s.o.Grace)))
}

// announce tells whoever listens.
func (s *Session) announce(d *run) {
	s.o.Log.Info("draining", "drain", d.id, "cause", d.cause, "deadline", d.deadline)
	s.drain = d
	s.heldAt = time.Now()
	close(s.notice.Load().c)
}

// lead sees to it that somebody decides when to flush: the agent if it has announced the drain and is heard from, else alone.
func (s *Session) lead() {
	d := s.drain
	if d == nil || s.status.Flushing {
		return
	}
	switch agent := d.led && (s.status.Agent == HealthOK || s.status.Agent == HealthSuspect); {
	case agent && d.cancel != nil:
		d.cancel()
		d.cancel = nil
	case !agent && d.cancel == nil && d.committed:
		s.restart()
	}
}

// restart runs alone for all servers.
func (s *Session) restart() {
	d := s.drain
	if d.cancel != nil {
		d.cancel()
	}
	var ctx context.Context
	ctx, d.cancel = context.WithCancel(s.forced)
	go s.alone(ctx, slices.Clone(s.servers), time.Now().Add(time.Until(d.flushBy)/2))
}

// alone stops new work when none arrives any more, at the latest at admitUntil: readiness is false, and whoever sends work
// needs a while to notice. It flushes when one look finds that no server has anything in flight, and nothing is held: while one
// was waited for, another may have begun something on a connection that it had kept.
func (s *Session) alone(ctx context.Context, servers []Server, admitUntil time.Time) {
	admit, cancel := context.WithDeadline(ctx, admitUntil)
	defer cancel()
	each(servers, func(srv Server) error {
		_ = srv.Pause(admit, s.o.QuietPeriod) // also over at admitUntil
		if ctx.Err() != nil {
			return nil
		}
		srv.StopNew()
		return nil
	})
	look, cancelLook := context.WithCancel(ctx)
	cancelLook() // Wait says how it is, and does not wait
	for ctx.Err() == nil {
		if each(servers, func(srv Server) error { return srv.Wait(ctx) }) != nil || s.unheld(ctx, s.o.QuietPeriod) != nil {
			return
		}
		if each(servers, func(srv Server) error { return srv.Wait(look) }) != nil {
			continue
		}
		s.do(func() {
			if ctx.Err() == nil && s.snapshot().Holds == 0 {
				s.flush(FlushZero, s.drain.id, s.drain.deadline)
			}
		})
	}
}

// each calls f for all servers at once and joins their errors.
func each(servers []Server, f func(Server) error) error {
	errs := make([]error, len(servers))
	var wg sync.WaitGroup
	for i, srv := range servers {
		wg.Go(func() { errs[i] = f(srv) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// flush begins the flush, unless it has begun: what comes first decides. until is the end of its slice.
func (s *Session) flush(reason FlushReason, drain string, until time.Time) {
	if s.status.Flushing {
		return
	}
	if s.drain == nil {
		s.announce(&run{id: drain, cause: "flush", deadline: until, flushBy: time.Now(), led: true})
	}
	d := s.drain
	d.ask = ""
	if d.cancel != nil {
		d.cancel()
		d.cancel = nil
	}
	s.status.Flushing = true
	s.o.Log.Info("flushing", "drain", drain, "reason", reason)
	for name, l := range s.leases {
		if len(l.waiters) > 0 {
			s.answerHolds(name, l, ErrFlushing)
		}
	}
	f := Flush{Drain: drain, Reason: reason, Until: until}
	if drain != "" {
		f.Key = drain + "-flush"
	}
	go s.finish(f, slices.Clone(s.servers), slices.Clone(s.onFlush))
}

// finish does what is left to do: close, ask to end, wait, flush, close by force. What begins after it was asked to end, on a
// connection that is kept, is waited for like the rest, and nothing begins any more when the functions run.
func (s *Session) finish(f Flush, servers []Server, functions []func(context.Context, Flush) error) {
	slice, cancel := context.WithDeadline(s.forced, f.Until)
	defer cancel()
	share := float64(s.o.Reserve) / float64(s.o.Reserve+s.o.FlushTimeout)
	wait, cancelWait := context.WithTimeout(slice, time.Duration(share*float64(time.Until(f.Until))))
	defer cancelWait()
	_ = each(servers, func(srv Server) error { srv.StopNew(); return nil })
	s.ask(ErrFlushing)
	_ = each(servers, func(srv Server) error { return srv.Retire(wait) }) // over at the end of its share
	_ = s.unheld(wait, 0)                                                 // so is this

	// Whoever returns when its context is over does so in time.
	f.Until = f.Until.Add(-max(0, min(lastWord, time.Until(f.Until)/10)))
	ctx, cancelFunctions := context.WithDeadline(context.WithValue(slice, flushKey{}, s), f.Until)
	defer cancelFunctions()
	err := call(ctx, f, functions)
	told := make(chan struct{})
	s.do(func() {
		s.answer = &answer{err: err, told: told}
		if s.flushing == "" || s.id == "" {
			s.answer.heard() // nobody is to be told
		}
		s.nudge()
	})
	forced := each(servers, func(srv Server) error { return srv.Shutdown(slice) })
	if forced != nil {
		forced = fmt.Errorf("%w: %w", ErrForced, forced)
	}
	if s.unheld(slice, 0) != nil {
		forced = errors.Join(forced, s.leftHeld())
	}
	bye := time.NewTimer(byeTimeout)
	defer bye.Stop()
	select {
	case <-told:
	case <-bye.C:
	case <-s.forced.Done():
	}
	s.do(func() {
		s.err = errors.Join(err, forced)
		s.o.Log.Info("flushed", "drain", f.Drain, "err", s.err)
	})
	close(s.finished)
}

// leftHeld says what is still held at the end, or nil.
func (s *Session) leftHeld() error {
	var names []string
	s.do(func() {
		for name, l := range s.leases {
			if l.n > 0 {
				names = append(names, name)
			}
		}
	})
	if len(names) == 0 {
		return nil
	}
	slices.Sort(names)
	return fmt.Errorf("%w: still held: %q", ErrForced, names)
}

// lastWord is how long a function of OnFlush has to return when its context is over. That ends as much before the slice does.
const lastWord = 100 * time.Millisecond

// call runs the functions of OnFlush, one after the other, and joins their errors. It leaves one behind that does not heed the
// end of its context.
func call(ctx context.Context, f Flush, functions []func(context.Context, Flush) error) error {
	flushed := make(chan error, len(functions))
	go func() {
		for _, fn := range functions {
			flushed <- fn(ctx, f)
		}
	}()
	var errs []error
	done, late := ctx.Done(), (<-chan time.Time)(nil)
	for len(errs) < len(functions) {
		select {
		case err := <-flushed:
			errs = append(errs, err)
		case <-done:
			done, late = nil, time.After(lastWord)
		case <-late:
			return errors.Join(append(errs, fmt.Errorf("flush: %w", ErrForced))...)
		}
	}
	return errors.Join(errs...)
}

// answer is how the flush went.
type answer struct {
	err  error
	told chan struct{} // closed when the agent has heard it, or will not; then nil
}

func (a *answer) heard() {
	if a.told != nil {
		close(a.told)
		a.told = nil
	}
}

// apply does what an event says. Each is applied once.
func (s *Session) apply(ev wireEvent) {
	if ev.Seq != 0 {
		defer s.nudge() // it is acknowledged, again if need be
		if ev.Seq <= s.seq {
			return
		}
		s.seq = ev.Seq
	}
	now := time.Now()
	if ev.Type != "deadline" && ev.Type != "end" && s.remember(ev.Drain, ev.Type) {
		return
	}
	if s.applied != nil {
		s.applied(ev)
	}
	deadline := ev.Deadline
	if ev.TimeLeftMS != nil {
		// The wall clock may have been set since.
		deadline = now.Add(time.Duration(*ev.TimeLeftMS) * time.Millisecond)
	}
	flushBy := deadline.Add(-ev.Deadline.Sub(ev.FlushBy))
	switch ev.Type {
	case "end":
		if ev.Reason == "evicted" {
			s.o.Log.Info("this generation is over", "backend", s.status.Backend, "gen", s.status.Gen)
			s.status.Evicted = true
			s.think(HealthNone)
		}
	case "draining":
		if s.status.Flushing {
			return
		}
		d := s.drain
		if d == nil {
			d = &run{id: ev.Drain, cause: ev.Cause, deadline: deadline, flushBy: flushBy}
			s.announce(d)
		}
		d.led, d.ask = true, ""
		s.moved(d, ev, deadline, flushBy)
		s.lead()
	case "deadline":
		if d := s.drain; d != nil && d.id == ev.Drain {
			s.moved(d, ev, deadline, flushBy)
		}
	case "cancelled":
		s.takeBack(ev.Drain)
	case "flush":
		s.flushing = ev.Drain
		s.flush(FlushReason(ev.Reason), ev.Drain, deadline)
	case "done":
		s.status.Outcome = ev.Outcome
		if ev.Outcome == "cancelled" {
			s.takeBack(ev.Drain)
		} else if d := s.drain; d != nil && d.id == ev.Drain {
			// Nothing is waited for any more. The flush comes before, unless it has been lost.
			s.flush(FlushDeadline, d.id, now.Add(s.o.FlushTimeout))
		}
	}
}

// moved takes the agent's times. Those of a drain that is ours as well only move it forward.
func (s *Session) moved(d *run, ev wireEvent, deadline, flushBy time.Time) {
	d.id = ev.Drain
	if d.own {
		deadline, flushBy = earlier(d.deadline, deadline), earlier(d.flushBy, flushBy)
	}
	d.deadline, d.flushBy = deadline, flushBy
}

// takeBack ends a drain as if it had not been. One that is committed goes on alone.
func (s *Session) takeBack(drain string) {
	d := s.drain
	if d == nil || d.id != drain || s.status.Flushing {
		return
	}
	if d.committed {
		d.led, d.id = false, ""
		s.lead()
		return
	}
	s.o.Log.Info("drain taken back", "drain", drain)
	s.drain = nil
	s.notice.Store(&notice{make(chan struct{})})
}

// SPDX-License-Identifier: Apache-2.0

package session

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
)

// deadlineSlack is by how much a deadline may differ from the one that was told and be the same. After a restart it comes
// from another clock, which is slewed by at most 500 ppm (adjtimex(2)): 100 ms in 200 s.
const deadlineSlack = 100 * time.Millisecond

// told is the last drain that the applications were told of.
type told struct {
	ID       string      `json:"drain"`
	Cause    drain.Cause `json:"cause"`
	Reason   string      `json:"reason,omitempty"`
	Time     time.Time   `json:"time"` // when they were told
	Deadline time.Time   `json:"deadline"`
	FlushBy  time.Time   `json:"flush_by"`

	Flush   *flush        `json:"flush,omitempty"`   // nil: not sent
	Outcome drain.Outcome `json:"outcome,omitempty"` // empty: it runs
}

// flush is the one flush of a drain.
type flush struct {
	Reason drain.FlushReason `json:"reason"`
	Time   time.Time         `json:"time"`
	Until  time.Time         `json:"until"`            // the end of its slice
	Errors []string          `json:"errors,omitempty"` // with which applications have answered
}

func (t *told) draining() event {
	return event{SessionEvent: api.SessionEvent{
		Type: api.SessionDraining, Drain: t.ID, Time: t.Time, Cause: t.Cause, Reason: t.Reason, Deadline: t.Deadline, FlushBy: t.FlushBy,
	}, Until: t.Deadline}
}

func (t *told) flush() event {
	return event{SessionEvent: api.SessionEvent{
		Type: api.SessionFlush, Drain: t.ID, Time: t.Flush.Time, Reason: string(t.Flush.Reason), Key: t.ID + "-flush",
	}, Until: t.Flush.Until}
}

func (b *Book) evicted() event {
	e := event{SessionEvent: api.SessionEvent{Type: api.SessionEnd, Time: time.Now(), Reason: api.EndEvicted}}
	if b.Told != nil {
		e.Drain = b.Told.ID
	}
	return e
}

// running is the drain that the applications know of; nil if none runs.
func (b *Book) running() *told {
	if b.Told == nil || b.Told.Outcome != "" {
		return nil
	}
	return b.Told
}

// flushing reports whether it is too late to begin work: the flush has begun, or everything is over.
func (b *Book) flushing() bool {
	s := b.stateNow()
	return s == drain.StateFlushing || b.Over
}

// sent is an event as it is sent now.
func (b *Book) sent(e event) api.SessionEvent {
	v := e.SessionEvent
	if !e.Until.IsZero() {
		v.TimeLeftMS = left(e.Until)
	}
	if v.Type == api.SessionDraining && v.Reason == "" && b.Told != nil && v.Drain == b.Told.ID {
		v.Reason = b.Told.Reason // it was not known yet
	}
	return v
}

// queue numbers an event of a session. It stays until it is acknowledged. When there are too many the oldest of drains that
// are over go first, then deadlines, which later ones replace.
func (b *Book) queue(s *session, e event) {
	s.Seq++
	e.Seq, e.Backend, e.Service, e.Gen = s.Seq, b.o.Backend, b.o.Service, b.o.Gen
	s.Events = append(s.Events, e)
	b.dirty = true
	if s.stream != 0 {
		b.say(s, e.Type)
	} else {
		b.mention(s, e.Type) // it has no stream that waits for it
	}
	if len(s.Events) <= maxEvents {
		return
	}
	i := slices.IndexFunc(s.Events, func(e event) bool {
		return e.Type != api.SessionEnd && (b.running() == nil || e.Drain != b.Told.ID)
	})
	if i < 0 {
		i = slices.IndexFunc(s.Events, func(e event) bool { return e.Type == api.SessionDeadline })
	}
	s.Events = slices.Delete(s.Events, max(i, 0), max(i, 0)+1)
}

// queueAll queues an event for every session; none when the last one was.
func (b *Book) queueAll(e event) {
	if b.Over {
		return
	}
	for _, s := range b.Sessions {
		b.queue(s, e)
	}
}

// Draining tells the applications of a drain, each session once: again with the same drain it does nothing. flushBy is when
// the flush is sent at the latest. The error wraps [api.ErrStale] for another generation.
func (b *Book) Draining(n drain.Notice, flushBy time.Time) error {
	return b.do(func() error {
		if n.Gen != b.o.Gen {
			b.stale++
			return fmt.Errorf("%w: the notice is for %d, the sessions are of %d", api.ErrStale, n.Gen, b.o.Gen)
		}
		if !b.isOver(n.Drain) {
			b.announce(told{ID: n.Drain, Cause: n.Cause, Deadline: n.Deadline, FlushBy: flushBy})
		}
		return nil
	})
}

// Flush queues the flush, once per drain and session: again with the same drain it does nothing. From then on nobody is given
// a hold. The error wraps [api.ErrStale] for another generation, and [drain.ErrHeld] for a flush on zero while something is
// held: then nobody is told.
func (b *Book) Flush(q drain.FlushRequest) error {
	return b.do(func() error {
		if q.Gen != b.o.Gen {
			b.stale++
			return fmt.Errorf("%w: the flush is for %d, the sessions are of %d", api.ErrStale, q.Gen, b.o.Gen)
		}
		told := b.isOver(q.Drain) || b.Told != nil && b.Told.ID == q.Drain && b.Told.Flush != nil
		if n := len(b.held()); n > 0 && q.Reason == drain.FlushZero && !told {
			return fmt.Errorf("%w: %d leases", drain.ErrHeld, n)
		}
		if !told {
			b.flush(q.Drain, q.Reason, time.Now().Add(q.TimeLeft))
		}
		return nil
	})
}

// isOver reports whether a drain is known to have ended: what is late of it says nothing.
func (b *Book) isOver(id string) bool { return b.level.ID == id && b.level.Over() }

// announce tells of a drain that was not told of.
func (b *Book) announce(t told) {
	if b.Told != nil && b.Told.ID == t.ID {
		return
	}
	b.conclude(drain.OutcomeCancelled) // of the one before: where another begins, it was taken back
	t.Time = time.Now()
	if b.level.ID == t.ID {
		t.Reason = cmp.Or(b.level.Reason, b.level.By)
	}
	b.Told, b.dirty = &t, true
	b.queueAll(t.draining())
}

// flush queues the flush of a drain, behind the news of it if there was none.
func (b *Book) flush(id string, reason drain.FlushReason, until time.Time) {
	t := told{ID: id, Deadline: until, FlushBy: time.Now()}
	if b.level.ID == id {
		t.Cause, t.Deadline, t.FlushBy = b.level.Cause, b.level.Deadline, b.level.FlushBy
	}
	b.announce(t)
	if r := b.running(); r != nil && r.Flush == nil {
		r.Flush = &flush{Reason: reason, Time: time.Now(), Until: until}
		b.dirty = true
		b.queueAll(r.flush())
	}
}

// conclude tells that the drain is over that the applications were told of.
func (b *Book) conclude(o drain.Outcome) {
	t := b.running()
	if t == nil {
		return
	}
	t.Outcome, b.dirty = o, true
	e := event{SessionEvent: api.SessionEvent{Type: api.SessionDone, Drain: t.ID, Time: time.Now(), Outcome: o}}
	if o == drain.OutcomeCancelled {
		e.Type, e.Outcome = api.SessionCancelled, ""
	}
	b.queueAll(e)
	if o != drain.OutcomeCancelled {
		return
	}
	// Whoever took the drain back wants the backend to serve. One that is lost and speaks again registers anew.
	for _, s := range slices.Clone(b.Sessions) {
		if s.health == api.HealthLost {
			b.drop(s, "lost, and the drain was taken back")
		}
	}
}

// evict tells, once, that the generation is over.
func (b *Book) evict() {
	if b.Over {
		return
	}
	b.queueAll(b.evicted())
	b.Over, b.dirty, b.changed = true, true, true
}

// Follow takes the machine's present status: a level, of which the applications are told what they have not been told. It is
// to be called with each in turn, by one goroutine, and again changes nothing. A machine that is new knows of no drain before
// it has resumed the one that runs, so that it is believed to have none only when Suspect has passed.
func (b *Book) Follow(s drain.Status) {
	_ = b.do(func() error {
		before := b.level
		b.level = s
		if s.ID == "" && before.ID != "" {
			b.alone = b.up
		}
		b.meet()
		if s.Mode != drain.ModeEnforce {
			return nil
		}
		if t := b.running(); t != nil {
			switch {
			case t.ID == s.ID:
				b.same(t)
			case t.ID == before.ID && s.ID != "": // and not a status that is older than the notice
				b.conclude(drain.OutcomeCancelled)
			}
		}
		if s.State == drain.StateFlushing && s.FlushReason != "" && !s.Over() {
			until := s.CutAt
			if i := slices.IndexFunc(s.Phases, func(p drain.PhaseTime) bool { return p.Phase == drain.PhaseFlush }); i >= 0 {
				if t := s.Phases[i].At.Add(s.Budget.Policy.FlushTimeout); t.Before(until) {
					until = t
				}
			}
			b.flush(s.ID, s.FlushReason, until)
		}
		if s.State == drain.StateDone || s.State == drain.StateLost {
			b.evict()
		}
		return nil
	})
}

// same compares the drain that the applications know of with what it is now.
func (b *Book) same(t *told) {
	s := b.level
	if t.Reason == "" {
		t.Reason = cmp.Or(s.Reason, s.By)
	}
	if s.Over() {
		b.conclude(s.Outcome)
		return
	}
	if s.Deadline.Sub(t.Deadline).Abs() > deadlineSlack || s.FlushBy.Sub(t.FlushBy).Abs() > deadlineSlack {
		t.Deadline, t.FlushBy, b.dirty = s.Deadline, s.FlushBy, true
		b.queueAll(event{SessionEvent: api.SessionEvent{
			Type: api.SessionDeadline, Drain: t.ID, Time: time.Now(), Deadline: t.Deadline, FlushBy: t.FlushBy,
		}, Until: t.Deadline})
	}
}

// resolve ends, for the applications, a drain that the machine of now does not know.
func (b *Book) resolve() {
	t := b.running()
	if t != nil && b.level.Mode == drain.ModeEnforce && b.level.ID == "" && b.up-b.alone >= b.o.Suspect && time.Since(t.Time) >= b.o.Suspect {
		b.conclude(drain.OutcomeCancelled)
	}
}

// Answered waits until every application that is not lost has answered the flush of a drain, or has ended, and joins
// their errors; one that is lost is an error. When ctx ends first the error wraps its cause.
func (b *Book) Answered(ctx context.Context, id string) error {
	for {
		b.mu.Lock()
		waiting, err := b.answers(id)
		moved := b.moved
		b.mu.Unlock()
		if waiting == 0 {
			return err
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return fmt.Errorf("%d sessions have not answered the flush: %w", waiting, context.Cause(ctx))
		}
	}
}

func (b *Book) answers(id string) (waiting int, err error) {
	if b.Told == nil || b.Told.ID != id || b.Told.Flush == nil {
		return 0, fmt.Errorf("wait for the flush of drain %s: it was not sent", id)
	}
	var errs []error
	for _, e := range b.Told.Flush.Errors {
		errs = append(errs, errors.New(e))
	}
	for _, s := range b.Sessions {
		switch {
		case s.Role != api.RoleApp || s.Flushed == id || b.unknown(s):
		case s.lives():
			waiting++
		default:
			errs = append(errs, fmt.Errorf("process %d is lost and has not answered the flush", s.PID))
		}
	}
	return waiting, errors.Join(errs...)
}

// unknown reports whether nobody knows of a session: its process did not get the answer, and has registered anew.
func (b *Book) unknown(s *session) bool {
	return s.mute && slices.ContainsFunc(b.Sessions, func(x *session) bool {
		return x.Role == api.RoleApp && !x.mute && x.of(s.PID, s.Start) && x.Since.After(s.Since)
	})
}

// flushed takes an application's answer to the flush.
func (b *Book) flushed(s *session, c api.SessionCall) error {
	t := b.running()
	if t == nil || t.Flush == nil || t.ID != c.Drain {
		return b.ignore("flushed", c.Drain)
	}
	if s.Flushed == t.ID {
		return nil
	}
	s.Flushed, b.dirty, b.changed = t.ID, true, true
	if c.Error != "" && len(t.Flush.Errors) < maxSessions {
		text := strings.ToValidUTF8(c.Error[:min(len(c.Error), maxError)], "")
		t.Flush.Errors = append(t.Flush.Errors, fmt.Sprintf("process %d: %s", s.PID, text))
	}
	b.log.Info("application has flushed", "session", s.ID, "pid", s.PID, "drain", t.ID, "failed", c.Error != "")
	b.mention(s, "flushed")
	return nil
}

// ignore counts a late word on a drain that is not the present one.
func (b *Book) ignore(what, id string) error {
	b.stale++
	b.log.Debug("late word ignored", "what", what, "drain", id)
	return fmt.Errorf("%w: %s for drain %q, which is not the one that runs; it is ignored", api.ErrStale, what, id)
}

// mayExtend is by how much the drain that runs may be extended now, and notes that it was.
func (b *Book) mayExtend(c api.SessionCall) (time.Duration, error) {
	no := func(why string) (time.Duration, error) { return 0, fmt.Errorf("%w: %s", api.ErrNotPossible, why) }
	t := b.running()
	switch {
	case b.o.Extension == 0 || b.o.Extend == nil:
		return no("extensions are off; set extension in the configuration")
	case c.ByMS <= 0:
		return no("by_ms is above 0")
	case t == nil && c.Drain == "":
		return no("no drain runs")
	case t == nil || c.Drain != "" && c.Drain != t.ID:
		return 0, b.ignore("extend", c.Drain)
	case b.flushing():
		return no("the flush has begun")
	case b.Extended == t.ID:
		return no("the drain was extended already, and is once at most")
	}
	if err := b.mayWrite(); err != nil {
		return 0, err
	}
	b.Extended, b.dirty = t.ID, true
	if c.ByMS < b.o.Extension.Milliseconds() {
		return time.Duration(c.ByMS) * time.Millisecond, nil
	}
	return b.o.Extension, nil
}

// extend asks for the extension that mayExtend has noted.
func (b *Book) extend(ctx context.Context, id string, p api.Process, by time.Duration) (api.Session, error) {
	now, failed := b.o.Extend(ctx, by)
	var v api.Session
	err := b.do(func() error {
		s, err := b.find(id, p)
		if failed != nil {
			b.Extended, b.dirty = "", true
			return fmt.Errorf("%w: %w", api.ErrNotPossible, failed)
		}
		if err != nil {
			return err
		}
		b.log.Info("application has extended the drain", "session", id, "pid", s.PID, "by", by)
		b.mention(s, "extended")
		v = b.view(s)
		if v.Drain != nil && v.Drain.ID == now.ID { // of which Follow hears in a moment
			v.Drain.Deadline, v.Drain.FlushBy, v.Drain.TimeLeftMS = now.Deadline, now.FlushBy, *left(now.Deadline)
		}
		return nil
	})
	return v, err
}

// met are the leases that a drain has met and that are given back.
type met struct {
	Drain string           `json:"drain"`
	Begun time.Time        `json:"begun"`
	Ended bool             `json:"ended,omitempty"`
	Held  []api.HeldDuring `json:"held,omitempty"`
}

// during is a lease as the drain has met it.
func (m *met) during(s *session, l api.Lease, now time.Time, released bool) api.HeldDuring {
	from := l.Since
	if from.Before(m.Begun) {
		from = m.Begun
	}
	return api.HeldDuring{Name: l.Name, PID: s.PID, For: api.Duration(max(0, now.Sub(from))), Released: released}
}

// met notes a lease that is given back, or that a drain leaves, if one runs.
func (b *Book) met(s *session, l api.Lease, released bool) {
	m := b.Met
	if m == nil || m.Ended {
		return
	}
	m.Held, b.dirty = append(m.Held, m.during(s, l, time.Now(), released)), true
	if len(m.Held) > maxMet {
		shortest := slices.MinFunc(m.Held, func(a, b api.HeldDuring) int { return cmp.Compare(a.For, b.For) })
		i := slices.Index(m.Held, shortest)
		m.Held = slices.Delete(m.Held, i, i+1)
	}
}

// meet follows which drain meets the leases.
func (b *Book) meet() {
	s := b.level
	if s.ID == "" {
		return
	}
	if b.Met == nil || b.Met.Drain != s.ID {
		b.Met, b.dirty = &met{Drain: s.ID, Begun: s.Begun}, true
	}
	if s.Over() && !b.Met.Ended {
		for _, x := range b.Sessions {
			for _, l := range x.Holds {
				b.met(x, l, false)
			}
		}
		b.Met.Ended, b.dirty = true, true
	}
}

// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/session"
	"github.com/ebbproxy/ebb/probes"
)

// book is the sessions of one process of a backend. It outlives the incarnations that a changed configuration makes of that
// process, and, in its file, us.
type book struct {
	*session.Book
	machine atomic.Pointer[drain.Machine] // of the present incarnation
	turned  chan struct{}                 // of capacity 1: holds, health, version or number of applications may have changed
}

// openBook is the book of an arrival. The same process keeps the one that it has, and with it the extension that its sessions
// were told of.
func (m *member) openBook(a arrival, before *backend) (*book, error) {
	if before != nil && before.proc == a.proc {
		return before.book, nil
	}
	bk := &book{turned: make(chan struct{}, 1)}
	var err error
	bk.Book, err = session.New(session.Options{
		Backend: m.name, Service: m.service, Gen: a.gen, Extension: a.set.extension, File: m.sessions, Log: m.log, Started: probes.Started, Hears: m.hears,
		Emit: m.emit, Changed: func() { bk.changed() }, Stale: func() { m.metrics.StaleSignal(m.service) },
		Extend: func(ctx context.Context, by time.Duration) (drain.Status, error) { return m.extendOnce(ctx, a.gen, by) },
	})
	if err != nil {
		return nil, err
	}
	return bk, nil
}

// changed is called before the application is answered whose call has changed the book: a lease that it has been given blocks
// the flush already.
func (bk *book) changed() {
	if mach := bk.machine.Load(); mach != nil {
		mach.SetHolds(bk.Holds())
	}
	select {
	case bk.turned <- struct{}{}:
	default:
	}
}

// extendOnce is an application's wish for more time. Who has set a deadline nearer than the configured grace decides: it may be
// the time at which the application is killed.
func (m *member) extendOnce(ctx context.Context, gen uint64, by time.Duration) (drain.Status, error) {
	inc, mach, err := m.machine()
	if err != nil {
		return drain.Status{}, err
	}
	s := mach.Status()
	if s.Budget.Policy.Grace < inc.set.eff.Policy.Grace-time.Second { // not by what a restart rounds
		return s, fmt.Errorf("%w: the deadline was set %v after the beginning, which is nearer than grace (%v)",
			api.ErrNotPossible, s.Budget.Policy.Grace.Round(time.Second), inc.set.eff.Policy.Grace)
	}
	return mach.Extend(ctx, gen, min(by, inc.set.extension), time.Time{}, "the application")
}

// attend keeps a drain and the sessions of its application informed of each other until ctx ends.
func (m *member) attend(ctx context.Context, inc *incarnation) {
	b, mach := inc.b, inc.machine
	// The last drain that the sessions know of, the last of which the machine knows that, and that whose flush a restart has left.
	var announced, told, left string
	var health api.Health
	var version int64
	lost := false // and its drain has begun
	turned := true
	var changed <-chan struct{}
	// A function of its own: while there is nothing to do, its stack is not kept for each of hundreds of backends.
	look := func() error {
		changed = mach.Changed()
		s := mach.Status()
		if announced != s.ID && b.enforce && noticeDue(s) {
			if err := b.book.Draining(drain.Notice{Drain: s.ID, Gen: s.Gen, Cause: s.Cause, Deadline: s.Deadline}, s.FlushBy); err != nil {
				b.log.Error("tell the sessions of the drain", "drain", s.ID, "err", err)
			}
			announced = s.ID
		}
		b.book.Follow(s)
		if left != s.ID && b.flush.API && s.State == drain.StateFlushing && s.FlushResult == drain.FlushUnknown {
			left = s.ID
			inc.wg.Go(func() { b.answered(ctx, mach, s.ID) })
		}
		if told != announced && b.book.Apps() > 0 {
			if err := mach.Told(ctx, announced); err != nil {
				return err // it has ended
			}
			told = announced
		}
		if turned {
			mach.SetHolds(b.book.Holds()) // what was set last may have been read before
			h, why := b.book.Health()
			v, _ := b.book.Version()
			if m.turned != nil && (h != health || v != version) {
				m.turned()
			}
			health, version = h, v
			switch {
			case h != api.HealthLost:
				lost = false
			case !lost && inc.proc.lives():
				lost = true
				m.lose(ctx, inc, why)
			}
		}
		return nil
	}
	for look() == nil {
		select {
		case <-changed:
			turned = false
		case <-b.book.turned:
			turned = true
		case <-ctx.Done():
			return
		}
	}
}

// loseEvery is how often the drain of an application that is lost is begun anew where it could not be.
const loseEvery = 5 * time.Second

// lose drains a backend whose application has fallen silent.
func (m *member) lose(ctx context.Context, inc *incarnation, why string) {
	if inc.set.mode != drain.ModeEnforce {
		m.emit(drain.Event{Type: drain.EventWould, Gen: inc.gen, Cause: drain.CauseHeartbeat, Message: "would drain: " + why})
		return
	}
	inc.wg.Go(func() {
		for {
			_, err := inc.machine.Begin(ctx, drain.Request{Gen: inc.gen, Cause: drain.CauseHeartbeat, Policy: inc.set.eff.Policy, Join: true, Reason: why, By: "ebb"})
			if err == nil || ctx.Err() != nil {
				return
			}
			m.log.Error("drain an application that is lost", "err", err)
			if h, _ := inc.b.book.Health(); !wait(ctx, loseEvery) || h != api.HealthLost {
				return
			}
		}
	})
}

// noticeDue tells whether the application is to know by now that it drains. It may close its listener then, and so not before
// new connections go elsewhere.
func noticeDue(s drain.Status) bool {
	switch {
	case s.ID == "" || s.Over():
		return false
	case s.Budget.Policy.NotifyAt == drain.NotifyAtSettled:
		return s.Phase == drain.PhaseWait || s.Phase == drain.PhaseFlush || s.Phase == drain.PhaseCut
	}
	return !s.Flipped.IsZero() || s.OnNew == drain.OnNewAdmit || s.OnNew == drain.OnNewRefuse
}

// heard tells whether no application has fallen silent.
func (b *backend) heard() bool {
	h, _ := b.book.Health()
	return h == api.HealthOK
}

// sessionWarnings say which applications are not heard of, and that none has come that could be told what is to be told still.
func (b *backend) sessionWarnings(s drain.State) (why []string) {
	for _, v := range b.book.Views() {
		if v.Role == api.RoleApp && v.Health != api.HealthOK {
			why = append(why, fmt.Sprintf("the application's process %d has been silent for %v: %s", v.PID, time.Since(v.Heard).Round(time.Second), v.Health))
		}
	}
	if b.flush.API && b.book.Apps() == 0 && (s == drain.StateServing || s == drain.StateDraining) {
		why = append(why, "no application has registered: a flush is SIGTERM, although its hook is api")
	}
	return why
}

// OpenSession implements api.Sessions.
func (r roster) OpenSession(ctx context.Context, backend string, p api.Process, q api.SessionRequest) (s api.Session, err error) {
	err = r.inBook(ctx, backend, func(b *book) error {
		s, err = b.Open(ctx, p, q)
		return err
	})
	return s, err
}

// SessionCall implements api.Sessions.
func (r roster) SessionCall(ctx context.Context, backend, id string, p api.Process, c api.SessionCall) (s api.Session, err error) {
	err = r.inBook(ctx, backend, func(b *book) error {
		s, err = b.Call(ctx, id, p, c)
		return err
	})
	return s, err
}

// SessionEvents implements api.Sessions.
func (r roster) SessionEvents(ctx context.Context, backend, id string, p api.Process, from, stream uint64) (t api.SessionBatch, err error) {
	err = r.inBook(ctx, backend, func(b *book) error {
		t, err = b.Events(ctx, id, p, from, stream)
		return err
	})
	return t, err
}

// inBook does what a process asks of the sessions of its backend.
func (r roster) inBook(ctx context.Context, backend string, do func(*book) error) error {
	m, err := r.find(backend)
	if err != nil {
		return err
	}
	inc := m.life()
	if inc.b == nil {
		return fmt.Errorf("%w: %s has no process", api.ErrUnknownSession, backend)
	}
	return do(inc.b.book)
}

var _ api.Sessions = roster(nil)

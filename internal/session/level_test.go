// SPDX-License-Identifier: Apache-2.0

package session

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
)

func TestR4_EachSubscriberHearsOfADrainOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o owner
		b := open(t, o.options())
		ids := []string{enter(t, b, 10, api.SessionRequest{}), enter(t, b, 11, api.SessionRequest{Role: api.RoleHolder})}
		s := draining("d1", 30*time.Second)
		notify(t, b, s) // the status may come later
		for range 3 {
			notify(t, b, s)
			b.Follow(s)
		}
		for _, id := range ids {
			time.Sleep(time.Second)
			batch, err := b.Events(t.Context(), id, api.Process{}, 0, 0)
			if err != nil || len(batch.Events) != 1 {
				t.Fatalf("got %+v, %v", batch, err)
			}
			e := batch.Events[0]
			if e.Seq != 1 || e.Type != api.SessionDraining || e.Drain != "d1" || e.Cause != drain.CauseOperator || e.Reason != "new kernel" ||
				!e.Deadline.Equal(s.Deadline) || !e.FlushBy.Equal(s.FlushBy) || *e.TimeLeftMS != time.Until(s.Deadline).Milliseconds() || e.Gen != gen {
				t.Errorf("got %+v", e)
			}
			if d := batch.Session.Drain; d == nil || d.ID != "d1" || d.State != drain.StateDraining || d.TimeLeftMS != *e.TimeLeftMS || batch.Session.State != drain.StateDraining {
				t.Errorf("got %+v of %+v", d, batch.Session)
			}
		}
		b.Follow(over(s, drain.OutcomeCancelled))
		notify(t, b, s) // which is late
		s = over(draining("d2", 30*time.Second), drain.OutcomeCancelled)
		b.Follow(s)
		notify(t, b, s) // too late for it to be one
		tellFlush(t, b, "d2")
		begin(t, b, "d3", 30*time.Second)
		want(t, types(t, b, ids[0], 0), api.SessionDraining, api.SessionCancelled, api.SessionDraining)
		if n := (drain.Notice{Drain: "d3", Gen: gen - 1}); !errors.Is(b.Draining(n, time.Time{}), api.ErrStale) {
			t.Error("a notice for another generation was taken")
		}
		if q := (drain.FlushRequest{Drain: "d3", Gen: gen - 1}); !errors.Is(b.Flush(q), api.ErrStale) || o.stale != 2 {
			t.Errorf("a flush for another generation was taken, or not counted: %d", o.stale)
		}
	})
}

// A status or a notice may be missed where drains follow each other fast.
func TestWhereAnotherDrainBeginsTheOneBeforeWasTakenBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o owner
		b := open(t, o.options())
		id := enter(t, b, 10, api.SessionRequest{})
		begin(t, b, "d1", 30*time.Second)
		b.Follow(draining("d2", 30*time.Second))
		want(t, types(t, b, id, 0), api.SessionDraining, api.SessionCancelled)
		notify(t, b, draining("d3", 30*time.Second))
		notify(t, b, draining("d4", 30*time.Second))
		want(t, types(t, b, id, 3), api.SessionDraining, api.SessionCancelled, api.SessionDraining)
	})
}

// Under at: settled the notice may never come, and the machine's status comes long before it.
func TestR4_NothingIsToldBeforeTheNotice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o owner
		b := open(t, o.options())
		id := enter(t, b, 10, api.SessionRequest{})
		s := draining("d1", 30*time.Second)
		b.Follow(s)
		want(t, types(t, b, id, 0))
		if v := call(t, b, id, api.SessionCall{Op: "get"}); v.Drain != nil || v.State != drain.StateDraining {
			t.Errorf("got %+v", v)
		}
		tellFlush(t, b, "d1")
		want(t, types(t, b, id, 0), api.SessionDraining, api.SessionFlush)
	})
}

func TestObserveTellsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o owner
		b := open(t, o.options())
		id := enter(t, b, 10, api.SessionRequest{})
		s := draining("d1", 30*time.Second)
		s.Mode = drain.ModeObserve
		for _, s := range []drain.Status{s, flushing(s), over(s, drain.OutcomeDrained)} {
			b.Follow(s)
			if v := call(t, b, id, api.SessionCall{Op: "get"}); v.Drain != nil || v.State != drain.StateServing {
				t.Errorf("got %+v", v)
			}
		}
		want(t, types(t, b, id, 0))
		call(t, b, id, api.SessionCall{Op: "hold", Name: "job"})
	})
}

func TestT11_LateSubscriberIsToldThePresentPhase(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o owner
		b := open(t, o.options())
		s := begin(t, b, "d1", 30*time.Second)
		late := enter(t, b, 10, api.SessionRequest{})
		want(t, types(t, b, late, 0), api.SessionDraining)
		tellFlush(t, b, "d1")
		later := enter(t, b, 11, api.SessionRequest{})
		want(t, types(t, b, late, 0), api.SessionDraining, api.SessionFlush)
		want(t, types(t, b, later, 0), api.SessionDraining, api.SessionFlush)
		b.Follow(over(s, drain.OutcomeDrained))
		last := enter(t, b, 12, api.SessionRequest{})
		want(t, types(t, b, later, 0), api.SessionDraining, api.SessionFlush, api.SessionDone, api.SessionEnd)
		want(t, types(t, b, last, 0), api.SessionEnd)
	})
}

func TestDeadlineThatMovesIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o owner
		b := open(t, o.options())
		id := enter(t, b, 10, api.SessionRequest{})
		s := begin(t, b, "d1", 30*time.Second)
		s.Deadline = s.Deadline.Add(deadlineSlack) // another clock's
		b.Follow(s)
		want(t, types(t, b, id, 0), api.SessionDraining)
		s.Deadline, s.FlushBy = s.Deadline.Add(-10*time.Second), s.FlushBy.Add(-10*time.Second)
		b.Follow(s)
		b.Follow(s)
		batch, _ := b.Events(t.Context(), id, api.Process{}, 2, 0)
		if len(batch.Events) != 1 || batch.Events[0].Type != api.SessionDeadline || !batch.Events[0].Deadline.Equal(s.Deadline) ||
			!batch.Events[0].FlushBy.Equal(s.FlushBy) || *batch.Events[0].TimeLeftMS != 20100 || !batch.Session.Drain.Deadline.Equal(s.Deadline) {
			t.Errorf("got %+v", batch)
		}
	})
}

func TestFlushIsSentOnceWithItsKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o owner
		b := open(t, o.options())
		id := enter(t, b, 10, api.SessionRequest{})
		s := begin(t, b, "d1", 30*time.Second)
		for range 2 {
			tellFlush(t, b, "d1")
			b.Follow(flushing(s))
		}
		time.Sleep(time.Second)
		batch, _ := b.Events(t.Context(), id, api.Process{}, 2, 0)
		if len(batch.Events) != 1 {
			t.Fatalf("got %+v", batch.Events)
		}
		if e := batch.Events[0]; e.Type != api.SessionFlush || e.Key != "d1-flush" || e.Reason != "zero" || *e.TimeLeftMS != 4000 || !e.Deadline.IsZero() {
			t.Errorf("got %+v", e)
		}
		if d := batch.Session.Drain; d.State != drain.StateFlushing || batch.Session.State != drain.StateFlushing {
			t.Errorf("got %+v", d)
		}
		b.Follow(over(s, drain.OutcomeDrained))
		tellFlush(t, b, "d1") // late
		want(t, types(t, b, id, 3), api.SessionDone, api.SessionEnd)
	})
}

// A process that died between the journal and the book comes back with a status that says it all.
func TestStatusAloneTellsOfTheFlush(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o owner
		b := open(t, o.options())
		id := enter(t, b, 10, api.SessionRequest{})
		s := flushing(draining("d1", 30*time.Second))
		s.Phases = []drain.PhaseTime{{Phase: drain.PhaseFlush, At: s.Begun}}
		b.Follow(s)
		batch, _ := b.Events(t.Context(), id, api.Process{}, 0, 0)
		if len(batch.Events) != 2 || batch.Events[1].Type != api.SessionFlush || *batch.Events[1].TimeLeftMS != 5000 {
			t.Errorf("got %+v", batch.Events)
		}
	})
}

func TestAnsweredWaitsForEveryApplication(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o owner
		b := open(t, o.options())
		ctx, cancel := context.WithCancelCause(t.Context())
		go b.Run(ctx)
		ids := make([]string, 4)
		for i := range ids {
			ids[i] = enter(t, b, 10+i, api.SessionRequest{})
		}
		holder := enter(t, b, 20, api.SessionRequest{Role: api.RoleHolder}) // is not waited for
		s := begin(t, b, "d1", time.Hour)
		if err := b.Answered(ctx, "d1"); err == nil {
			t.Error("a flush that was not sent was answered")
		}
		tellFlush(t, b, "d1")
		short, stop := context.WithTimeoutCause(ctx, time.Second, drain.ErrSlice)
		defer stop()
		if err := b.Answered(short, "d1"); !errors.Is(err, drain.ErrSlice) || !strings.Contains(err.Error(), "4 sessions") {
			t.Errorf("got %v, want the end of the slice", err)
		}
		told := make(chan error, 1)
		go func() { told <- b.Answered(ctx, "d1") }()
		late := enter(t, b, 30, api.SessionRequest{}) // is
		call(t, b, ids[0], api.SessionCall{Op: "flushed", Drain: "d1"})
		call(t, b, ids[0], api.SessionCall{Op: "flushed", Drain: "d1", Error: "counted once"})
		call(t, b, ids[1], api.SessionCall{Op: "flushed", Drain: "d1", Error: "the disk is full"})
		call(t, b, ids[1], api.SessionCall{Op: "end"})
		call(t, b, ids[2], api.SessionCall{Op: "end"})
		synctest.Wait()
		select {
		case err := <-told:
			t.Fatalf("got %v before everybody has answered", err)
		default:
		}
		for range 5 { // ids[3] says nothing, and is lost
			time.Sleep(3 * time.Second)
			call(t, b, late, api.SessionCall{Op: "heartbeat"})
			call(t, b, holder, api.SessionCall{Op: "heartbeat"})
		}
		call(t, b, late, api.SessionCall{Op: "flushed", Drain: "d1"})
		err := <-told
		if err == nil || !strings.Contains(err.Error(), "process 11: the disk is full") || !strings.Contains(err.Error(), "process 13 is lost") ||
			strings.Contains(err.Error(), "counted once") || strings.Contains(err.Error(), "process 20") {
			t.Errorf("got %v", err)
		}
		b.Follow(over(s, drain.OutcomeDrained))
		cancel(nil)
	})
}

// A registration whose answer was lost answers no flush; whoever is there and has said nothing yet is waited for.
func TestR13_NobodyWaitsForASessionThatNobodyKnows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o owner
		b := open(t, o.options())
		enter(t, b, 10, api.SessionRequest{})
		time.Sleep(time.Second)
		known := enter(t, b, 10, api.SessionRequest{})
		call(t, b, known, api.SessionCall{Op: "heartbeat"})
		time.Sleep(time.Second)
		last := enter(t, b, 10, api.SessionRequest{})
		other := enter(t, b, 11, api.SessionRequest{})
		begin(t, b, "d1", 30*time.Second)
		tellFlush(t, b, "d1")
		for i, id := range []string{known, last, other} {
			if n, err := b.answers("d1"); n != 3-i || err != nil {
				t.Errorf("got %d sessions that have not answered, %v; want %d", n, err, 3-i)
			}
			call(t, b, id, api.SessionCall{Op: "flushed", Drain: "d1"})
		}
		if n, err := b.answers("d1"); n != 0 || err != nil {
			t.Errorf("got %d sessions that have not answered, %v", n, err)
		}
	})
}

func TestD5_LateFlushedIsIgnoredAndCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o owner
		b := open(t, o.options())
		id := enter(t, b, 10, api.SessionRequest{})
		refused(t, b, id, api.SessionCall{Op: "flushed", Drain: "d0"}, api.ErrStale)
		b.Follow(over(begin(t, b, "d1", 30*time.Second), drain.OutcomeCancelled))
		s := begin(t, b, "d2", 30*time.Second)
		refused(t, b, id, api.SessionCall{Op: "flushed", Drain: "d2"}, api.ErrStale) // not yet
		tellFlush(t, b, "d2")
		refused(t, b, id, api.SessionCall{Op: "flushed", Drain: "d1"}, api.ErrStale)
		if n, _ := b.answers("d2"); n != 1 || o.stale != 3 {
			t.Errorf("got %d still to answer and %d late answers, want 1 and 3", n, o.stale)
		}
		b.Follow(over(s, drain.OutcomeExpired))
		refused(t, b, id, api.SessionCall{Op: "flushed", Drain: "d2"}, api.ErrStale)
		if o.stale != 4 {
			t.Errorf("got %d late answers, want 4", o.stale)
		}
	})
}

func TestD6_OneExtensionToTheCap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o owner
		opt := o.options()
		opt.File = filepath.Join(t.TempDir(), "web-blue")
		b := open(t, opt)
		id := enter(t, b, 10, api.SessionRequest{})
		begin(t, b, "d0", 30*time.Second)
		refused(t, b, id, api.SessionCall{Op: "extend", ByMS: 1000}, api.ErrNotPossible) // off

		opt.File, opt.Extension = opt.File+"2", 10*time.Second
		b = open(t, opt)
		id = enter(t, b, 10, api.SessionRequest{})
		other := enter(t, b, 11, api.SessionRequest{})
		extend := api.SessionCall{Op: "extend", ByMS: 1 << 60}
		refused(t, b, id, extend, api.ErrNotPossible) // no drain
		s := begin(t, b, "d1", 30*time.Second)
		refused(t, b, id, api.SessionCall{Op: "extend", ByMS: -1}, api.ErrNotPossible)
		refused(t, b, id, api.SessionCall{Op: "extend", ByMS: 1, Drain: "d0"}, api.ErrStale)
		o.refuse = drain.ErrLimit
		refused(t, b, id, extend, drain.ErrLimit)
		refused(t, b, id, extend, api.ErrNotPossible)
		o.refuse = nil
		o.extends = nil
		v := call(t, b, id, extend)
		if v.ID != id || v.ExtensionMS != 10000 {
			t.Errorf("got %+v", v)
		}
		if d := v.Drain; d == nil || !d.Deadline.Equal(time.Now().Add(time.Minute)) || !d.FlushBy.Equal(time.Now().Add(52*time.Second)) || d.TimeLeftMS != 60000 {
			t.Errorf("got %+v, want the new deadline", d)
		}
		refused(t, b, other, extend, api.ErrNotPossible) // once
		b = open(t, opt)
		b.Follow(s)
		refused(t, b, id, extend, api.ErrNotPossible) // a restart changes nothing
		b.Follow(over(s, drain.OutcomeCancelled))
		s = begin(t, b, "d2", 30*time.Second)
		call(t, b, id, api.SessionCall{Op: "extend", ByMS: 1500, Drain: "d2"})
		b.Follow(over(s, drain.OutcomeCancelled))
		begin(t, b, "d3", 30*time.Second)
		tellFlush(t, b, "d3")
		refused(t, b, id, extend, api.ErrNotPossible) // the wait is over
		if want := []time.Duration{10 * time.Second, 1500 * time.Millisecond}; !slices.Equal(o.extends, want) {
			t.Errorf("got extensions by %v, want %v", o.extends, want)
		}
	})
}

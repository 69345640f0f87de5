// SPDX-License-Identifier: Apache-2.0

package session

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
)

const gen = 7

// owner is what a book calls back.
type owner struct {
	mu      sync.Mutex
	what    []string // of session events, in order
	warned  []string
	changed int
	stale   int
	extends []time.Duration
	refuse  error // what Extend answers
}

func (o *owner) options() Options {
	return Options{
		Backend: "web-blue", Service: "web", Gen: gen, boot: "this-boot",
		Emit: func(e drain.Event) {
			o.mu.Lock()
			defer o.mu.Unlock()
			if e.Type == api.EventSession {
				o.what = append(o.what, e.Fields["what"].(string))
			} else {
				o.warned = append(o.warned, e.Message)
			}
		},
		Changed: func() { o.mu.Lock(); defer o.mu.Unlock(); o.changed++ },
		Stale:   func() { o.mu.Lock(); defer o.mu.Unlock(); o.stale++ },
		Extend: func(_ context.Context, by time.Duration) (drain.Status, error) {
			o.mu.Lock()
			defer o.mu.Unlock()
			o.extends = append(o.extends, by)
			return drain.Status{ID: "d1", Deadline: time.Now().Add(time.Minute), FlushBy: time.Now().Add(52 * time.Second)}, o.refuse
		},
		watch: func(ctx context.Context, _ int, _ func() bool) error { <-ctx.Done(); return context.Cause(ctx) },
	}
}

// changes is how often the owner was told of a change since the call before.
func (o *owner) changes() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	n := o.changed
	o.changed = 0
	return n
}

func open(t *testing.T, o Options) *Book {
	t.Helper()
	b, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func enter(t *testing.T, b *Book, pid int, r api.SessionRequest) string {
	t.Helper()
	s, err := b.Open(t.Context(), api.Process{PID: pid}, r)
	if err != nil {
		t.Fatal(err)
	}
	return s.ID
}

// call does what a session asks, and must succeed.
func call(t *testing.T, b *Book, id string, c api.SessionCall) api.Session {
	t.Helper()
	s, err := b.Call(t.Context(), id, api.Process{}, c)
	if err != nil {
		t.Fatalf("%s: %v", c.Op, err)
	}
	return s
}

// refused does what a session asks, and must get the error.
func refused(t *testing.T, b *Book, id string, c api.SessionCall, want error) {
	t.Helper()
	if _, err := b.Call(t.Context(), id, api.Process{}, c); !errors.Is(err, want) {
		t.Errorf("%s: got %v, want %v", c.Op, err, want)
	}
}

// types are the types of what a session is sent from a number on.
func types(t *testing.T, b *Book, id string, from uint64) []string {
	t.Helper()
	batch, err := b.Events(t.Context(), id, api.Process{}, from, 0)
	if err != nil {
		t.Fatal(err)
	}
	got := []string{}
	for _, e := range batch.Events {
		got = append(got, e.Type)
	}
	return got
}

func want(t *testing.T, got []string, want ...string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// draining is a machine's status in a drain that has d to go.
func draining(id string, d time.Duration) drain.Status {
	now := time.Now()
	return drain.Status{
		Gen: gen, Mode: drain.ModeEnforce, State: drain.StateDraining, ID: id, Cause: drain.CauseOperator, Reason: "new kernel",
		Begun: now, Deadline: now.Add(d), FlushBy: now.Add(d - 8*time.Second), CutAt: now.Add(d - 3*time.Second),
		Budget: drain.Effective{Policy: drain.Policy{FlushTimeout: 5 * time.Second}},
	}
}

func flushing(s drain.Status) drain.Status {
	s.State, s.FlushReason = drain.StateFlushing, drain.FlushZero
	return s
}

func over(s drain.Status, o drain.Outcome) drain.Status {
	s.State, s.Outcome, s.Ended = drain.StateDone, o, time.Now()
	if o == drain.OutcomeCancelled {
		s.State = drain.StateServing
	}
	return s
}

// begin has the applications told of a drain.
func begin(t *testing.T, b *Book, id string, d time.Duration) drain.Status {
	t.Helper()
	s := draining(id, d)
	b.Follow(s)
	notify(t, b, s)
	return s
}

func notify(t *testing.T, b *Book, s drain.Status) {
	t.Helper()
	if err := b.Draining(drain.Notice{Drain: s.ID, Gen: gen, Cause: s.Cause, Deadline: s.Deadline}, s.FlushBy); err != nil {
		t.Error(err)
	}
}

func tellFlush(t *testing.T, b *Book, id string) {
	t.Helper()
	if err := b.Flush(drain.FlushRequest{Drain: id, Gen: gen, Reason: drain.FlushZero, TimeLeft: 5 * time.Second}); err != nil {
		t.Error(err)
	}
}

func TestSessionIsMeantByIDOrByItsProcess(t *testing.T) {
	var o owner
	starts := map[int]uint64{10: 1000, 11: 1100}
	opt := o.options()
	opt.Started = func(pid int) (uint64, error) { return starts[pid], nil }
	b := open(t, opt)
	remaining := int64(12)
	a := enter(t, b, 10, api.SessionRequest{Version: 3, Remaining: &remaining})
	c := enter(t, b, 11, api.SessionRequest{Role: api.RoleHolder})
	if len(a) != 32 || a == c {
		t.Errorf("got ids %q and %q, want 128 random bits each", a, c)
	}
	s, err := b.Call(t.Context(), "", api.Process{PID: 10}, api.SessionCall{Op: "get"})
	if err != nil || s.ID != a || s.Role != api.RoleApp || s.Version != 3 || *s.Remaining != 12 || s.Backend != "web-blue" || s.Gen != gen || s.PID != 10 ||
		s.State != drain.StateServing || s.Health != api.HealthOK || s.HeartbeatMS != 3000 || s.SuspectMS != 10000 || s.LostMS != 15000 || s.Holds == nil {
		t.Errorf("got %+v, %v", s, err)
	}
	if v, ok := b.Version(); v != 3 || !ok || b.Apps() != 1 {
		t.Errorf("got version %d, %v and %d applications", v, ok, b.Apps())
	}
	// Another process may speak for it, if it knows the id.
	if s, err := b.Call(t.Context(), a, api.Process{PID: 99}, api.SessionCall{Op: "heartbeat"}); err != nil || s.ID != a || *s.Remaining != 12 {
		t.Errorf("got %+v, %v", s, err)
	}
	if _, err := b.Call(t.Context(), "", api.Process{PID: 99}, api.SessionCall{Op: "get"}); !errors.Is(err, api.ErrUnknownSession) {
		t.Errorf("got %v, want ErrUnknownSession", err)
	}
	refused(t, b, "no-such-id", api.SessionCall{Op: "get"}, api.ErrUnknownSession)
	refused(t, b, a, api.SessionCall{Op: "dance"}, api.ErrNotPossible)
	// The next owner of the pid is not who has registered.
	starts[10] = 2000
	if _, err := b.Call(t.Context(), "", api.Process{PID: 10}, api.SessionCall{Op: "get"}); !errors.Is(err, api.ErrUnknownSession) {
		t.Errorf("got %v, want ErrUnknownSession", err)
	}
	starts[10] = 1000
	enter(t, b, 10, api.SessionRequest{})
	if _, err := b.Events(t.Context(), "", api.Process{PID: 10}, 0, 1); !errors.Is(err, api.ErrAmbiguous) {
		t.Errorf("got %v, want ErrAmbiguous", err)
	}
	call(t, b, a, api.SessionCall{Op: "end"})
	refused(t, b, a, api.SessionCall{Op: "get"}, api.ErrUnknownSession)
	for _, r := range []api.SessionRequest{{Role: "king"}, {Version: -1}} {
		if _, err := b.Open(t.Context(), api.Process{PID: 1}, r); !errors.Is(err, api.ErrNotPossible) {
			t.Errorf("open %+v: got %v, want ErrNotPossible", r, err)
		}
	}
}

func TestT9_HoldsAreCountedAndRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o owner
		var b *Book
		opt := o.options()
		var seen []int // what the machine knows when the application is answered
		opt.Changed = func() { n, _ := b.Holds(); seen = append(seen, n) }
		b = open(t, opt)
		id := enter(t, b, 10, api.SessionRequest{})
		if s := call(t, b, id, api.SessionCall{Op: "hold", Name: "invoice"}); len(s.Holds) != 1 || s.Holds[0].ID != "invoice" {
			t.Errorf("got %+v", s.Holds)
		}
		call(t, b, id, api.SessionCall{Op: "hold", ID: "42", Name: "mail"})
		call(t, b, id, api.SessionCall{Op: "hold", ID: "42", Name: "again"})
		if n, names := b.Holds(); n != 2 || !slices.Equal(names, []string{"invoice", "mail"}) {
			t.Errorf("got %d holds, %q", n, names)
		}
		if l := b.Leases(); len(l) != 2 || l[1].PID != 10 || l[1].Session != id || l[1].ID != "42" || l[1].Since.IsZero() {
			t.Errorf("got %+v", l)
		}
		call(t, b, id, api.SessionCall{Op: "release", ID: "no-such-hold"})
		call(t, b, id, api.SessionCall{Op: "release", Name: "mail"})
		call(t, b, id, api.SessionCall{Op: "end"}) // releases the other
		if want := []int{0, 1, 2, 1, 0}; !slices.Equal(seen, want) {
			t.Errorf("the machine saw %v, want %v", seen, want)
		}
	})
}

func TestR22_DrainListsWhatHeldIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o owner
		opt := o.options()
		opt.File = filepath.Join(t.TempDir(), "web-blue")
		b := open(t, opt)
		id := enter(t, b, 10, api.SessionRequest{})
		call(t, b, id, api.SessionCall{Op: "hold", Name: "before"})
		call(t, b, id, api.SessionCall{Op: "hold", Name: "early"})
		call(t, b, id, api.SessionCall{Op: "release", Name: "early"})
		time.Sleep(time.Minute)
		s := begin(t, b, "d1", 30*time.Second)
		time.Sleep(2 * time.Second)
		call(t, b, id, api.SessionCall{Op: "hold", Name: "during"})
		time.Sleep(3 * time.Second)
		call(t, b, id, api.SessionCall{Op: "release", Name: "before"})
		time.Sleep(time.Second)
		sec := func(n int) api.Duration { return api.Duration(time.Duration(n) * time.Second) }
		check := func(want ...api.HeldDuring) {
			t.Helper()
			if got := b.HeldDuring("d1"); !slices.Equal(got, want) {
				t.Errorf("got %v, want %v", got, want)
			}
		}
		before := api.HeldDuring{Name: "before", PID: 10, For: sec(5), Released: true}
		check(before, api.HeldDuring{Name: "during", PID: 10, For: sec(4)})
		b = open(t, opt)
		b.Follow(s)
		check(before, api.HeldDuring{Name: "during", PID: 10, For: sec(4)})
		time.Sleep(time.Second)
		b.Follow(over(s, drain.OutcomeExpired))
		time.Sleep(time.Minute)
		call(t, b, id, api.SessionCall{Op: "release", Name: "during"})
		check(before, api.HeldDuring{Name: "during", PID: 10, For: sec(5)})
		if got := b.HeldDuring("d0"); got != nil {
			t.Errorf("got %v of another drain", got)
		}
	})
}

func TestR22_TooLateToHoldOnceTheFlushHasBegun(t *testing.T) {
	for _, how := range []string{"flush", "status"} {
		synctest.Test(t, func(t *testing.T) {
			var o owner
			b := open(t, o.options())
			id := enter(t, b, 10, api.SessionRequest{})
			s := begin(t, b, "d1", 30*time.Second)
			call(t, b, id, api.SessionCall{Op: "hold", Name: "job"})
			if how == "flush" {
				if err := b.Flush(drain.FlushRequest{Drain: "d1", Gen: gen, Reason: drain.FlushDeadline, TimeLeft: 5 * time.Second}); err != nil {
					t.Error(err)
				}
			} else {
				b.Follow(flushing(s))
			}
			refused(t, b, id, api.SessionCall{Op: "hold", Name: "another"}, api.ErrFlushing)
			call(t, b, id, api.SessionCall{Op: "hold", Name: "job"}) // which it has
			b.Follow(over(s, drain.OutcomeDrained))
			refused(t, b, id, api.SessionCall{Op: "hold", Name: "another"}, api.ErrFlushing)
		})
	}
}

// Whatever the machine has read before: a flush on zero goes out, or a hold is given, and never both.
func TestR22_AHoldOrTheFlush(t *testing.T) {
	var given, sent int
	for i := range 300 {
		var o owner
		b := open(t, o.options())
		id := enter(t, b, 10, api.SessionRequest{})
		q := drain.FlushRequest{Drain: "d1", Gen: gen, Reason: drain.FlushZero, TimeLeft: 5 * time.Second}
		var wg sync.WaitGroup
		var held, flushed error
		hold := func() { _, held = b.Call(t.Context(), id, api.Process{}, api.SessionCall{Op: "hold", Name: "job"}) }
		flush := func() { flushed = b.Flush(q) }
		if i%2 == 0 {
			hold, flush = flush, hold
		}
		wg.Go(hold)
		wg.Go(flush)
		wg.Wait()
		switch events := types(t, b, id, 0); {
		case held == nil && errors.Is(flushed, drain.ErrHeld) && len(events) == 0:
			given++
			call(t, b, id, api.SessionCall{Op: "release", Name: "job"})
			tellFlush(t, b, "d1")
			want(t, types(t, b, id, 0), "draining", "flush")
		case errors.Is(held, api.ErrFlushing) && flushed == nil && slices.Equal(events, []string{"draining", "flush"}):
			sent++
			if err := b.Flush(q); err != nil {
				t.Errorf("the same flush again: got %v", err)
			}
		default:
			t.Fatalf("hold: got %v; flush: got %v, and events %q", held, flushed, events)
		}
	}
	if given == 0 || sent == 0 {
		t.Errorf("got %d holds and %d flushes: only one of them has been tried first", given, sent)
	}
}

func TestLimits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o owner
		b := open(t, o.options())
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go b.Run(ctx)
		id := enter(t, b, 10, api.SessionRequest{})
		for i := range maxHolds {
			call(t, b, id, api.SessionCall{Op: "hold", Name: fmt.Sprint(i)})
		}
		refused(t, b, id, api.SessionCall{Op: "hold", Name: "one more"}, api.ErrNotPossible)
		refused(t, b, enter(t, b, 99, api.SessionRequest{}), api.SessionCall{Op: "hold", Name: "one of another"}, api.ErrNotPossible)
		for _, name := range []string{"", "line\nbreak", "\xff", strings.Repeat("x", maxName+1)} {
			refused(t, b, id, api.SessionCall{Op: "hold", Name: name, ID: name}, api.ErrNotPossible)
		}
		if n, names := b.Holds(); n != maxHolds || len(names) != maxNames {
			t.Errorf("got %d holds, %d of them named", n, len(names))
		}
		for i := range maxSessions - 2 {
			enter(t, b, 100+i, api.SessionRequest{})
		}
		if _, err := b.Open(ctx, api.Process{PID: 1}, api.SessionRequest{}); !errors.Is(err, api.ErrNotPossible) {
			t.Errorf("got %v, want ErrNotPossible", err)
		}
		// One that is lost makes room.
		time.Sleep(5 * time.Second)
		for i, v := range b.Views() {
			if i != 40 {
				call(t, b, v.ID, api.SessionCall{Op: "heartbeat"})
			}
		}
		time.Sleep(10*time.Second + time.Millisecond)
		gone := b.Views()[40]
		if gone.Health != api.HealthLost {
			t.Fatalf("got %+v, want it lost", gone)
		}
		enter(t, b, 1, api.SessionRequest{})
		refused(t, b, gone.ID, api.SessionCall{Op: "get"}, api.ErrUnknownSession)
		if n := len(b.Views()); n != maxSessions {
			t.Errorf("got %d sessions, want %d", n, maxSessions)
		}
	})
}

// Of too many events the oldest of drains that are over go first, and never the last one.
func TestEventsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o owner
		b := open(t, o.options())
		id := enter(t, b, 10, api.SessionRequest{})
		for i := range maxEvents {
			s := begin(t, b, fmt.Sprintf("d%d", i), 30*time.Second)
			b.Follow(over(s, drain.OutcomeCancelled))
		}
		batch, _ := b.Events(t.Context(), id, api.Process{}, 0, 0)
		if n := len(batch.Events); n != maxEvents || batch.Events[0].Drain != "d32" {
			t.Errorf("got %d events from %+v on, want the last %d", n, batch.Events[0], maxEvents)
		}
		s := begin(t, b, "last", time.Hour)
		for i := range 2 * maxEvents {
			s.Deadline, s.FlushBy = s.Deadline.Add(-time.Second*time.Duration(i+1)), s.FlushBy.Add(-time.Second*time.Duration(i+1))
			b.Follow(s)
		}
		tellFlush(t, b, "last")
		got := types(t, b, id, 0)
		if len(got) != maxEvents || got[0] != api.SessionDraining || got[1] != api.SessionDeadline || got[maxEvents-1] != api.SessionFlush {
			t.Errorf("got %d events %q", len(got), got)
		}
		b.Follow(over(flushing(s), drain.OutcomeDrained))
		if got = types(t, b, id, 0); len(got) != maxEvents || !slices.Equal(got[maxEvents-3:], []string{api.SessionFlush, api.SessionDone, api.SessionEnd}) {
			t.Errorf("got %d events %q", len(got), got)
		}
	})
}

func TestR12_StreamsEndForAReason(t *testing.T) {
	var o owner
	b := open(t, o.options())
	id := enter(t, b, 10, api.SessionRequest{})
	read := func(stream uint64) string {
		t.Helper()
		batch, err := b.Events(t.Context(), id, api.Process{}, 0, stream)
		if err != nil {
			t.Fatal(err)
		}
		return batch.End
	}
	want(t, []string{read(1), read(5), read(1), read(5)}, "", "", api.EndTransient, "")
	b.Close(api.EndRestarting)
	want(t, []string{read(5), read(6)}, api.EndRestarting, api.EndRestarting)
	want(t, o.what, "opened", "stream replaced", api.EndRestarting, "stream replaced")

	b = open(t, o.options())
	id = enter(t, b, 10, api.SessionRequest{})
	begin(t, b, "d1", 30*time.Second)
	b.Close(api.EndEvicted)
	b.Close(api.EndEvicted)
	begin(t, b, "d2", 30*time.Second)
	batch, err := b.Events(t.Context(), id, api.Process{}, 0, 0)
	if err != nil || len(batch.Events) != 2 || batch.End != "" || batch.Session.State != drain.StateDone {
		t.Fatalf("got %+v, %v", batch, err)
	}
	if e := batch.Events[1]; e.Type != api.SessionEnd || e.Reason != api.EndEvicted || e.Seq != 2 {
		t.Errorf("got %+v, want the numbered end", e)
	}
	call(t, b, id, api.SessionCall{Op: "ack", Seq: 1})
	call(t, b, id, api.SessionCall{Op: "ack", Seq: 2})
	refused(t, b, id, api.SessionCall{Op: "get"}, api.ErrUnknownSession)
}

func TestOptionsThatDoNotFit(t *testing.T) {
	for _, o := range []Options{{Heartbeat: -1}, {Suspect: time.Second}, {Lost: 10 * time.Second}, {Extension: -1}} {
		if _, err := New(o); err == nil {
			t.Errorf("got no error for %+v", o)
		}
	}
}

// Everything at once, for the race detector; afterwards everybody has the same.
func TestConcurrency(t *testing.T) {
	var o owner
	opt := o.options()
	opt.File = filepath.Join(t.TempDir(), "web-blue")
	var b *Book
	last := -1 // of the holds that the owner has seen; it needs no lock
	opt.Changed = func() { last, _ = b.Holds() }
	b = open(t, opt)
	ctx, cancel := context.WithCancel(t.Context())
	var ran, all sync.WaitGroup
	ran.Go(func() { _ = b.Run(ctx) })
	s := draining("d1", time.Hour)
	for i := range 8 {
		all.Go(func() {
			id := enter(t, b, 10+i, api.SessionRequest{Bound: i%2 == 0})
			for n := range 10 {
				name := fmt.Sprint(n)
				if _, err := b.Call(ctx, id, api.Process{}, api.SessionCall{Op: "hold", Name: name}); err != nil && !errors.Is(err, api.ErrFlushing) {
					t.Error(err)
				}
				call(t, b, id, api.SessionCall{Op: "release", Name: name})
				call(t, b, id, api.SessionCall{Op: "heartbeat"})
				b.Views()
				b.Health()
				b.HeldDuring("d1")
			}
		})
	}
	all.Go(func() {
		b.Follow(s)
		notify(t, b, s)
		b.Follow(flushing(s))
		tellFlush(t, b, "d1")
	})
	all.Wait()
	answered := make(chan error)
	go func() { answered <- b.Answered(ctx, "d1") }()
	for _, v := range b.Views() {
		want(t, types(t, b, v.ID, 0), api.SessionDraining, api.SessionFlush)
		call(t, b, v.ID, api.SessionCall{Op: "flushed", Drain: "d1"})
	}
	if err := <-answered; err != nil {
		t.Error(err)
	}
	cancel()
	ran.Wait()
	if n, _ := b.Holds(); n != 0 || last != 0 {
		t.Errorf("got %d holds, and the owner knows of %d; want 0", n, last)
	}
	if _, err := os.Stat(opt.File); err != nil {
		t.Error(err)
	}
}

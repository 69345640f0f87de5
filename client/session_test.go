// SPDX-License-Identifier: Apache-2.0

package client

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func TestImportsTheStandardLibraryAlone(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	if got, want := strings.Fields(string(out)), []string{"github.com/ebbproxy/ebb/client"}; !slices.Equal(got, want) {
		t.Errorf("not of the standard library: got %q, want %q", got, want)
	}
}

func TestContradictionsAreRefused(t *testing.T) {
	for _, o := range []Options{
		{Version: -1},
		{Grace: 8 * time.Second},
		{FlushTimeout: -time.Second},
	} {
		if _, err := Register(t.Context(), o); err == nil {
			t.Errorf("%+v: no error", o)
		}
	}
}

func TestDrainOfAnAgent(t *testing.T) {
	bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
		o.Version = 3
		s := register(t, o)
		var got Flush
		s.OnFlush(func(_ context.Context, f Flush) error { got = f; return errors.New("disk full") })
		if st := s.Status(); st.ID != "s1" || st.Backend != "web-blue" || st.Service != "web" || st.Gen != 7 || st.Agent != HealthOK || st.Draining {
			t.Errorf("registered: got %+v", st)
		}
		if r := a.sessions["s1"].registered; r.Version != 3 || !r.Bound || r.Role != "app" {
			t.Errorf("registration: got %+v", r)
		}
		s.Remaining(42)
		draining := s.Draining()
		a.begin("d1", 17*time.Second, 25*time.Second)
		synctest.Wait()
		if st := s.Status(); !isClosed(draining) || !st.Draining || st.Drain != "d1" || st.Cause != "operator" ||
			time.Until(st.Deadline) != 25*time.Second || time.Until(st.FlushBy) != 17*time.Second {
			t.Errorf("draining: got %+v", st)
		}
		after(4 * time.Second)
		if a.count("heartbeat") == 0 || *a.calls[slices.IndexFunc(a.calls, func(c fakeCall) bool { return c.op == "heartbeat" })].body.Remaining != 42 {
			t.Errorf("heartbeats with what is left: got %+v", a.calls)
		}
		if s.Context().Err() != nil {
			t.Error("asked to end before the flush")
		}
		a.flush("zero")
		<-s.Done()
		want := Flush{Drain: "d1", Reason: FlushZero, Key: "d1-flush", Until: a.deadline}
		if early := want.Until.Sub(got.Until); early < 0 || early > lastWord+time.Millisecond {
			t.Errorf("until: got %v, want a moment before the end of the slice at %v", got.Until, want.Until)
		}
		if got.Until = want.Until; got != want {
			t.Errorf("flush: got %+v, want %+v", got, want)
		}
		if !slices.Equal(a.flushedBy, []string{"disk full"}) || context.Cause(s.Context()) != ErrFlushing {
			t.Errorf("answers: got %q, cause %v", a.flushedBy, context.Cause(s.Context()))
		}
		a.done("drained")
		synctest.Wait()
		if err := s.Stop(t.Context()); err == nil || err.Error() != "disk full" || s.Status().Outcome != "drained" {
			t.Errorf("stop: got %v, %+v", err, s.Status())
		}
		if a.count("bye") != 1 {
			t.Errorf("said goodbye %d times, want once", a.count("bye"))
		}
	})
}

func TestCancelledDrainIsForgotten(t *testing.T) {
	bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
		s := register(t, o)
		defer leave(s)
		first := s.Draining()
		a.begin("d1", 17*time.Second, 25*time.Second)
		synctest.Wait()
		a.with(func() { a.announced = false; a.push(fakeEvent{Type: "cancelled", Drain: "d1"}) })
		a.done("cancelled")
		synctest.Wait()
		second := s.Draining()
		if !isClosed(first) || isClosed(second) || s.Status().Draining || s.Status().Outcome != "cancelled" {
			t.Errorf("after the drain was taken back: got %+v", s.Status())
		}
		after(time.Minute)
		a.begin("d2", 17*time.Second, 25*time.Second)
		synctest.Wait()
		if !isClosed(second) || s.Status().Drain != "d2" || s.Context().Err() != nil {
			t.Errorf("the drain after it: got %+v", s.Status())
		}
	})
}

func TestDeadlineMoves(t *testing.T) {
	bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
		s := register(t, o)
		defer leave(s)
		a.begin("d1", 17*time.Second, 25*time.Second)
		synctest.Wait()
		a.with(func() {
			by, at := a.flushBy.Add(30*time.Second), a.deadline.Add(30*time.Second)
			a.push(fakeEvent{Type: "deadline", Drain: "d1", By: &by, At: &at, until: at})
			a.away = true
		})
		synctest.Wait()
		if st := s.Status(); time.Until(st.FlushBy) != 47*time.Second || time.Until(st.Deadline) != 55*time.Second {
			t.Errorf("got %+v", st)
		}
	})
}

// The agent says when it will be back, and when not.
func TestR12_EndsOfAStream(t *testing.T) {
	t.Run("evicted", func(t *testing.T) {
		bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
			s := register(t, o)
			defer leave(s)
			a.evict()
			synctest.Wait()
			if !s.Status().Evicted || a.sessions["s1"].acked != 1 {
				t.Errorf("evicted: got %+v, acknowledged %d", s.Status(), a.sessions["s1"].acked)
			}
			calls, dials := len(a.calls), len(a.dials)
			after(60 * time.Second)
			if len(a.calls) != calls || len(a.dials) != dials {
				t.Errorf("came back: %+v", a.calls[calls:])
			}
		})
	})
	t.Run("agent_restarting", func(t *testing.T) {
		bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
			s := register(t, o)
			defer leave(s)
			for range 3 {
				after(10 * time.Second)
				streams := a.count("events")
				a.end("agent_restarting")
				after(time.Second)
				if got := a.count("events"); got != streams+1 || a.opened != 1 {
					t.Errorf("streams a second later: got %d, want %d; sessions %d, want 1", got, streams+1, a.opened)
				}
			}
		})
	})
	t.Run("transient", func(t *testing.T) {
		bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
			s := register(t, o)
			defer leave(s)
			for _, want := range []time.Duration{1, 2, 4, 8, 16, 30, 30, 30} {
				ended := time.Now()
				a.end("transient")
				// It stays away for a quarter less at least and for a quarter more at most.
				streams := a.count("events")
				after(want*time.Second*3/4 - 1)
				if a.count("events") != streams {
					t.Errorf("came back before %v: %v", want*time.Second*3/4, time.Since(ended))
				}
				after(want*time.Second/2 + 2)
				if a.count("events") != streams+1 {
					t.Fatalf("not back after %v", want*time.Second*5/4)
				}
			}
			if s.Status().Agent != HealthOK || a.count("heartbeat") < 30 {
				t.Errorf("heartbeats without a stream: got %d, agent %s", a.count("heartbeat"), s.Status().Agent)
			}
		})
	})
	t.Run("refused", func(t *testing.T) {
		bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
			a.refuse = func(string) *problem { return &problem{Title: "forbidden", Status: 403} }
			s := register(t, o)
			defer leave(s)
			after(2 * time.Minute)
			if n := a.count("open"); n < 6 || n > 12 || s.Status().Agent != HealthNone {
				t.Errorf("attempts in 2m: got %d, want 6 to 12; agent %s", n, s.Status().Agent)
			}
		})
	})
}

// An agent that was away for long counts the silence of a session from its return, and is not made to wait.
func TestSessionIsBackSoonAfterTheAgentIs(t *testing.T) {
	bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
		s := register(t, o)
		defer leave(s)
		a.with(func() { a.away = true })
		a.end("agent_restarting")
		after(5 * time.Minute)
		streams := a.count("events")
		a.with(func() { a.away = false })
		after(2 * time.Second)
		if a.count("events") != streams+1 {
			t.Error("2s after the agent's return there is no stream")
		}
		// That it was away for long has nothing to do with what it asks for now.
		a.end("transient")
		after(2 * time.Second)
		if a.count("events") != streams+2 {
			t.Error("2s after it was asked to stay away for a while it has not come back")
		}
		if a.opened != 1 || time.Since(a.sessions["s1"].lastHeard) > 5*time.Second || s.Status().Agent != HealthOK {
			t.Errorf("4s after the agent's return: %d sessions, heard %v ago, agent %s",
				a.opened, time.Since(a.sessions["s1"].lastHeard), s.Status().Agent)
		}
	})
}

// The agent stands still for 9, 12 and 16 s: nothing, suspect, lost, and ok again.
func TestR13_SilentAgent(t *testing.T) {
	bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
		s := register(t, o)
		defer leave(s)
		for _, tt := range []struct {
			silent time.Duration
			want   Health
		}{{9 * time.Second, HealthOK}, {12 * time.Second, HealthSuspect}, {16 * time.Second, HealthLost}} {
			a.freeze()
			after(tt.silent)
			if got := s.Status().Agent; got != tt.want {
				t.Errorf("silent for %v: got %s, want %s", tt.silent, got, tt.want)
			}
			if s.Status().Draining || s.Context().Err() != nil {
				t.Errorf("silent for %v: the application is not to feel it", tt.silent)
			}
			a.thaw()
			after(10 * time.Second)
			if got := s.Status().Agent; got != HealthOK || a.opened != 1 {
				t.Errorf("10s after it went on: got %s, want %s; sessions %d, want 1", got, HealthOK, a.opened)
			}
		}
	})
}

// A drain that was announced goes its way without the agent, and is not flushed again when that comes back.
func TestR13_GoesOnAlone(t *testing.T) {
	bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
		s := register(t, o)
		defer leave(s)
		var flushes []Flush
		s.OnFlush(func(_ context.Context, f Flush) error { flushes = append(flushes, f); return nil })
		begun := time.Now()
		a.begin("d1", 40*time.Second, 48*time.Second)
		synctest.Wait()
		a.freeze()
		after(39 * time.Second)
		if s.Status().Agent != HealthLost || len(flushes) != 0 || s.Status().Flushing {
			t.Errorf("before the flush is due: got %+v", s.Status())
		}
		<-s.Context().Done()
		if got := time.Since(begun); got != 40*time.Second {
			t.Errorf("flushed after %v, want 40s", got)
		}
		<-s.Done()
		a.thaw()
		a.flush("deadline")
		after(15 * time.Second)
		if len(flushes) != 1 || flushes[0].Reason != FlushDeadline || flushes[0].Drain != "d1" || len(a.flushedBy) != 1 || a.stale != 0 {
			t.Errorf("got %+v, answered %d times, %d stale", flushes, len(a.flushedBy), a.stale)
		}
	})
}

// What was due while the two could not speak arrives later, once, the last message too.
func TestR14_LastMessagePastTheDeadline(t *testing.T) {
	bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
		s := register(t, o)
		defer leave(s)
		var flushes atomic.Int32
		s.OnFlush(func(context.Context, Flush) error { flushes.Add(1); return nil })
		var applied []string
		s.do(func() {
			s.applied = func(ev wireEvent) {
				if ev.Seq > 0 {
					applied = append(applied, ev.Type)
				}
			}
		})
		a.freeze()
		a.begin("d1", 17*time.Second, 25*time.Second)
		a.flush("deadline")
		a.done("expired")
		a.evict()
		after(2 * time.Minute)
		if len(applied) != 0 || s.Status().Draining {
			t.Errorf("while the agent stands still: got %q", applied)
		}
		a.thaw()
		after(30 * time.Second)
		if want := []string{"draining", "flush", "done", "end"}; !slices.Equal(applied, want) || flushes.Load() != 1 || !s.Status().Evicted {
			t.Errorf("got %q and %d flushes, want %q and one", applied, flushes.Load(), want)
		}
		if got := a.sessions["s1"].acked; got != 4 {
			t.Errorf("acknowledged up to %d, want 4", got)
		}
	})
}

// In each of 1,000 random schedules connections break before and after requests and events, the agent restarts and forgets.
// Each event is applied once, with one flush, one answer to it and one outcome.
func TestR15_RandomCuts(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("EBB_SEED"); s != "" {
		if _, err := fmt.Sscan(s, &seed); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("seed %d (EBB_SEED)", seed)
	n := 1000
	if testing.Short() {
		n = 100
	}
	for i := range n {
		rnd := rand.New(rand.NewPCG(seed, uint64(i)))
		bubble(t, func(t *testing.T, a *fakeAgent, o Options) { cutSchedule(t, a, o, rnd) })
		if t.Failed() {
			t.Fatalf("schedule %d of seed %d", i, seed)
		}
	}
}

func cutSchedule(t *testing.T, a *fakeAgent, o Options, rnd *rand.Rand) {
	rate := rnd.Float64() / 2
	calm := false
	theirs := rand.New(rand.NewPCG(rnd.Uint64(), rnd.Uint64())) // used with the agent's lock
	a.fault = func(op string) (before, after bool) {
		if calm || theirs.Float64() > rate {
			return false, false
		}
		switch theirs.IntN(8) {
		case 0: // whatever was asked, it has forgotten who asks
			if op != "open" && op != "flushed" {
				clear(a.sessions)
				clear(a.holds)
			}
			return true, false
		case 1, 2, 3:
			return true, false
		}
		return false, true
	}
	s := register(t, o)
	defer leave(s)
	var flushes atomic.Int32
	s.OnFlush(func(ctx context.Context, _ Flush) error { flushes.Add(1); return pause(ctx, time.Second) })
	applied := make(map[string]int)
	s.do(func() { s.applied = func(ev wireEvent) { applied[ev.Drain+" "+ev.Type+" "+ev.Outcome]++ } })
	step := func() { after(time.Duration(rnd.Int64N(int64(8 * time.Second)))) }
	upset := func() {
		if rnd.IntN(4) == 0 {
			a.end([]string{"agent_restarting", "transient"}[rnd.IntN(2)])
		}
		if rnd.IntN(8) == 0 {
			a.freeze()
			after(time.Duration(rnd.Int64N(int64(20 * time.Second))))
			a.thaw()
		}
		step()
	}
	var want []string
	for i := range rnd.IntN(3) {
		upset()
		id := fmt.Sprintf("c%d", i)
		a.begin(id, 5*time.Minute, 6*time.Minute)
		upset()
		a.with(func() {
			a.announced = false
			a.push(fakeEvent{Type: "cancelled", Drain: id})
			a.push(fakeEvent{Type: "done", Drain: id, Outcome: "cancelled"})
		})
		want = append(want, id)
	}
	release, err := s.Hold(t.Context(), "work")
	if err != nil {
		t.Fatal(err)
	}
	a.begin("d", 5*time.Minute, 6*time.Minute)
	upset()
	release()
	upset()
	a.with(func() {
		by, at := a.flushBy, a.deadline
		a.push(fakeEvent{Type: "deadline", Drain: "d", By: &by, At: &at, until: at})
	})
	upset()
	a.flush([]string{"zero", "deadline"}[rnd.IntN(2)])
	upset()
	a.with(func() { calm = true })
	<-s.Done()
	after(2 * time.Minute)
	a.done("drained")
	a.evict()
	after(2 * time.Minute)

	// A session that had to be registered anew after the flush is told again, and answers for itself.
	if flushes.Load() != 1 || len(a.flushedBy) == 0 || a.stale != 0 {
		t.Errorf("flushed %d times, answered %d times, %d stale; want one flush, answered", flushes.Load(), len(a.flushedBy), a.stale)
	}
	for _, ev := range []string{"d draining ", "d flush ", "d done drained"} {
		if applied[ev] != 1 {
			t.Errorf("%q was applied %d times, want once: %v", ev, applied[ev], applied)
		}
	}
	if applied["d deadline "] > 1 {
		t.Errorf("a deadline was applied %d times", applied["d deadline "])
	}
	// A session that was registered anew is not told of what is over.
	for _, id := range want {
		if applied[id+" draining "] > 1 || applied[id+" cancelled "] > 1 || applied[id+" done cancelled"] > 1 {
			t.Errorf("of drain %s more than once: %v", id, applied)
		}
	}
	if st := s.Status(); !st.Evicted || st.Outcome != "drained" || len(a.held()) != 0 {
		t.Errorf("in the end: got %+v, held %q", st, a.held())
	}
}

func TestR15_ForgottenSessionRegistersAnew(t *testing.T) {
	bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
		s := register(t, o)
		defer leave(s)
		if _, err := s.Hold(t.Context(), "work"); err != nil {
			t.Fatal(err)
		}
		a.begin("d1", 5*time.Minute, 6*time.Minute)
		synctest.Wait()
		draining := 0
		s.do(func() { s.applied = func(wireEvent) { draining++ } })
		a.with(func() { clear(a.sessions); clear(a.holds) })
		after(10 * time.Second)
		if a.opened != 2 || s.Status().ID != "s2" || draining != 0 || !slices.Equal(a.held(), []string{"work"}) || a.sessions["s2"].acked != 1 {
			t.Errorf("got %d registrations, session %q, draining %d times again, held %q", a.opened, s.Status().ID, draining, a.held())
		}
	})
}

func TestT9_Holds(t *testing.T) {
	bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
		s := register(t, o)
		defer leave(s)
		one, err := s.Hold(t.Context(), "invoices")
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(a.held(), []string{"invoices"}) {
			t.Errorf("the agent must know when Hold returns: held %q", a.held())
		}
		two, err := s.Hold(t.Context(), "invoices")
		if err != nil {
			t.Fatal(err)
		}
		if got := a.count("hold"); got != 1 || s.Status().Holds != 2 {
			t.Errorf("two of one name: %d requests, want 1; holds %d, want 2", got, s.Status().Holds)
		}
		one()
		one()
		synctest.Wait()
		if !slices.Equal(a.held(), []string{"invoices"}) {
			t.Errorf("one of two released: held %q", a.held())
		}
		a.with(func() { a.away = true; clear(a.sessions); clear(a.holds) })
		after(time.Minute)
		three, err := s.Hold(t.Context(), "more")
		if err != nil {
			t.Fatalf("without an agent: %v", err)
		}
		a.with(func() { a.away = false })
		after(time.Minute)
		if got, want := a.held(), []string{"invoices", "more"}; !slices.Equal(got, want) {
			t.Errorf("after the agent's return: held %q, want %q", got, want)
		}
		two()
		three()
		after(time.Second)
		if len(a.held()) != 0 || s.Status().Holds != 0 {
			t.Errorf("all released: held %q", a.held())
		}
		if _, err := s.Hold(t.Context(), strings.Repeat("x", 129)); err == nil {
			t.Error("a name that is too long was held")
		}
		a.with(func() { a.drain, a.flushing = "d1", true }) // the flush is on its way here
		if _, err := s.Hold(t.Context(), "late"); !errors.Is(err, ErrFlushing) || s.Status().Holds != 0 {
			t.Errorf("refused by the agent: got %v, holds %d", err, s.Status().Holds)
		}
		a.with(func() { a.deadline = time.Now().Add(time.Second) })
		a.flush("zero")
		<-s.Done()
		if _, err := s.Hold(t.Context(), "late"); !errors.Is(err, ErrFlushing) {
			t.Errorf("after the flush: got %v, want %v", err, ErrFlushing)
		}
	})
}

// An agent that does not answer delays a hold, and does not fail it.
func TestHoldOfAFrozenAgent(t *testing.T) {
	bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
		s := register(t, o)
		defer leave(s)
		a.freeze()
		begun := time.Now()
		release, err := s.Hold(t.Context(), "work")
		if err != nil || time.Since(begun) > answerTimeout {
			t.Errorf("got %v after %v", err, time.Since(begun))
		}
		a.thaw()
		after(20 * time.Second)
		if !slices.Equal(a.held(), []string{"work"}) {
			t.Errorf("held %q", a.held())
		}
		release()
	})
}

// What stands before an agent and refuses for it is no agent: the thresholds count on, work is held without it, and nothing that
// it should know is lost.
func TestR13_RefusalIsNoSignOfLife(t *testing.T) {
	for _, status := range []int{403, 429, 500, 503} {
		bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
			s := register(t, o)
			defer leave(s)
			a.with(func() { a.refuse = func(string) *problem { return &problem{Type: "tag:x:busy", Status: status} } })
			a.end("transient")
			synctest.Wait()
			var calls int
			a.with(func() { calls = len(a.calls) })
			for _, tt := range []struct {
				after time.Duration
				want  Health
			}{{9 * time.Second, HealthOK}, {3 * time.Second, HealthSuspect}, {5 * time.Second, HealthLost}, {time.Minute, HealthLost}} {
				after(tt.after)
				if got := s.Status().Agent; got != tt.want {
					t.Errorf("%d: %v later: got %s, want %s", status, tt.after, got, tt.want)
				}
			}
			a.with(func() {
				if n := len(a.calls) - calls; n < 20 || n > 50 {
					t.Errorf("%d: asked %d times in 77 s, want once in 3 s, and the stream", status, n)
				}
			})
			begun := time.Now()
			if _, err := s.Hold(t.Context(), "work"); err != nil || time.Since(begun) != 0 {
				t.Errorf("%d: hold: got %v after %v", status, err, time.Since(begun))
			}
			a.with(func() { a.refuse = nil })
			after(4 * time.Second)
			if got := a.held(); s.Status().Agent != HealthOK || !slices.Equal(got, []string{"work"}) {
				t.Errorf("%d: 4s after it takes requests again: agent %s, held %q", status, s.Status().Agent, got)
			}
		})
	}
}

// What the agent has to know is said until it is taken.
func TestRefusedForNowIsSaidAgain(t *testing.T) {
	bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
		s := register(t, o)
		defer leave(s)
		s.OnFlush(func(context.Context, Flush) error { return errors.New(strings.Repeat("disk full ", 1000)) })
		refused := map[string]int{}
		a.with(func() {
			a.refuse = func(op string) *problem {
				if op == "drain" || op == "hold" || op == "flushed" {
					if refused[op]++; refused[op] < 3 {
						return &problem{Title: "busy", Status: 503}
					}
				}
				return nil
			}
		})
		release, err := s.Hold(t.Context(), "work")
		if err != nil {
			t.Fatal(err)
		}
		after(10 * time.Second)
		if !slices.Equal(a.held(), []string{"work"}) {
			t.Errorf("held %q", a.held())
		}
		s.do(func() { s.signal("terminated") })
		after(10 * time.Second)
		if s.Status().Drain != "d-app" {
			t.Errorf("the agent has not been asked again: %+v", s.Status())
		}
		release()
		a.flush("zero")
		<-s.Done()
		after(10 * time.Second)
		if len(a.flushedBy) != 1 || refused["flushed"] != 3 || len(a.flushedBy[0]) > maxText {
			t.Errorf("answers: got %d of %d; want one of three, no longer than is taken", len(a.flushedBy), refused["flushed"])
		}
	})
}

// Nobody waits for an agent longer than for one answer, however many do, or than for its own context.
func TestHoldsOfAnAgentThatIsGone(t *testing.T) {
	const n = 20
	for how, gone := range map[string]struct {
		how func(*fakeAgent)
		max time.Duration
	}{
		"stands still": {(*fakeAgent).freeze, answerTimeout},
		"breaks":       {func(a *fakeAgent) { a.with(func() { a.fault = func(string) (bool, bool) { return true, false } }) }, 0},
		"forgets":      {func(a *fakeAgent) { a.with(func() { clear(a.sessions); a.away = true }) }, 0},
		"refuses": {func(a *fakeAgent) {
			a.with(func() { a.refuse = func(string) *problem { return &problem{Status: 503} } })
		}, 0},
	} {
		t.Run(how, func(t *testing.T) {
			bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
				s := register(t, o)
				defer leave(s)
				gone.how(a)
				begun := time.Now()
				var group sync.WaitGroup
				for i := range n {
					group.Go(func() {
						if _, err := s.Hold(t.Context(), fmt.Sprint("job ", i)); err != nil {
							t.Error(err)
						}
					})
				}
				group.Wait()
				if took := time.Since(begun); took > gone.max || s.Status().Holds != n {
					t.Errorf("%d held after %v, want %d after %v", s.Status().Holds, took, n, gone.max)
				}
				a.thaw()
			})
		})
	}
	bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
		s := register(t, o)
		defer leave(s)
		over := errors.New("the job was taken back")
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, over)
		defer cancel()
		a.freeze()
		begun := time.Now()
		for range 2 {
			if _, err := s.Hold(ctx, "work"); !errors.Is(err, over) {
				t.Errorf("got %v, want %v", err, over)
			}
		}
		if took := time.Since(begun); took != time.Second || s.Status().Holds != 0 {
			t.Errorf("%d held after %v, want none after 1s", s.Status().Holds, took)
		}
		a.thaw()
		after(30 * time.Second)
		if len(a.held()) != 0 {
			t.Errorf("the agent knows of %q", a.held())
		}
	})
}

// A name that the agent would not take is not held without one either.
func TestNamesOfHolds(t *testing.T) {
	bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
		a.away = true
		s := register(t, o)
		defer leave(s)
		for _, name := range []string{"", "a\nb", "\xff", strings.Repeat("x", maxName+1)} {
			if _, err := s.Hold(t.Context(), name); err == nil {
				t.Errorf("%q is held", name)
			}
		}
		if _, err := s.Hold(t.Context(), "Übertrag 7"); err != nil {
			t.Error(err)
		}
	})
}

// The agent refuses a heartbeat with a number below 0.
func TestRemainingIsNotBelowZero(t *testing.T) {
	bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
		s := register(t, o)
		defer leave(s)
		s.Remaining(-1)
		after(4 * time.Second)
		a.with(func() {
			if last := a.calls[len(a.calls)-1]; last.op != "heartbeat" || last.body.Remaining == nil || *last.body.Remaining != 0 {
				t.Errorf("got %+v", last)
			}
		})
	})
}

func TestRefusal(t *testing.T) {
	bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
		s := register(t, o)
		defer leave(s)
		a.with(func() {
			a.refuse = func(string) *problem {
				return &problem{Type: "tag:x:not-possible", Detail: "256 leases are held", Status: 422}
			}
		})
		_, err := s.Hold(t.Context(), "work")
		var r *Refusal
		if !errors.As(err, &r) || *r != (Refusal{"not-possible", 422, "256 leases are held"}) || !errors.Is(err, ErrNotPossible) {
			t.Errorf("got %v", err)
		}
		if s.Status().Holds != 0 {
			t.Errorf("what was refused is held")
		}
	})
}

func TestD5_LateAnswerIsIgnored(t *testing.T) {
	bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
		s := register(t, o)
		defer leave(s)
		s.OnFlush(func(ctx context.Context, _ Flush) error { return pause(ctx, 4*time.Second) })
		a.begin("d1", 17*time.Second, 25*time.Second)
		a.flush("deadline")
		synctest.Wait()
		a.done("expired") // the slice was over before
		<-s.Done()
		if a.stale != 1 || len(a.flushedBy) != 0 {
			t.Errorf("stale answers: got %d, want 1; taken %q", a.stale, a.flushedBy)
		}
		after(time.Minute)
		if a.count("flushed") != 1 {
			t.Errorf("answered %d times, want once", a.count("flushed"))
		}
	})
}

func TestD6_Extension(t *testing.T) {
	bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
		s := register(t, o)
		defer leave(s)
		if err := s.Extend(t.Context(), time.Second); !errors.Is(err, ErrNotPossible) {
			t.Errorf("without a drain: got %v", err)
		}
		a.begin("d1", 17*time.Second, 25*time.Second)
		synctest.Wait()
		if err := s.Extend(t.Context(), 90*time.Second); err != nil {
			t.Error(err)
		}
		if last := a.calls[len(a.calls)-1]; last.op != "extend" || last.body.ByMS != 90_000 || last.body.Drain != "d1" {
			t.Errorf("got %+v", last)
		}
		a.refuse = func(op string) *problem {
			return &problem{Type: "tag:x:not-possible", Detail: "extension is 0", Status: 422}
		}
		if err := s.Extend(t.Context(), time.Second); !errors.Is(err, ErrNotPossible) || !strings.Contains(err.Error(), "extension is 0") {
			t.Errorf("refused: got %v", err)
		}
	})
	bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
		a.away = true
		s := register(t, o)
		defer leave(s)
		if err := s.Extend(t.Context(), time.Second); !errors.Is(err, ErrNoAgent) {
			t.Errorf("without an agent: got %v, want %v", err, ErrNoAgent)
		}
	})
}

// job is work that takes a time, and may heed being asked to end.
func job(t *testing.T, s *Session, d time.Duration, heeds bool) (ended func() (after time.Duration, asked bool)) {
	t.Helper()
	release, err := s.Hold(t.Context(), "job")
	if err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	var took time.Duration
	var asked bool
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer release()
		stop := s.Context().Done()
		if !heeds {
			stop = nil
		}
		select {
		case <-time.After(d):
		case <-stop:
			asked = true
		}
		took = time.Since(begun)
	}()
	return func() (time.Duration, bool) { <-done; return took, asked }
}

// Grace of 38 s: what takes 29 s survives; what takes longer is asked to end at 30 s, and what does not heed that is left
// behind at 38 s.
func TestD2_Stages(t *testing.T) {
	for _, tt := range []struct {
		name  string
		job   time.Duration
		heeds bool
		took  time.Duration
		asked bool
		stop  time.Duration
		err   error
	}{
		{"survives", 29 * time.Second, true, 29 * time.Second, false, 30 * time.Second, nil},
		{"is asked", 31 * time.Second, true, 30 * time.Second, true, 30 * time.Second, nil},
		{"ends in time", 31 * time.Second, false, 31 * time.Second, false, 31 * time.Second, nil},
		{"is forced", 60 * time.Second, false, 60 * time.Second, false, 38 * time.Second, context.DeadlineExceeded},
	} {
		for _, agent := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s agent=%v", tt.name, agent), func(t *testing.T) {
				bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
					a.away, a.observed = !agent, true
					s := register(t, o)
					srv := &stubServer{held: s}
					if err := s.Attach(srv); err != nil {
						t.Fatal(err)
					}
					ended := job(t, s, tt.job, tt.heeds)
					begun := time.Now()
					ctx, cancel := context.WithTimeout(t.Context(), 38*time.Second)
					defer cancel()
					if err := s.Stop(ctx); !errors.Is(err, tt.err) {
						t.Errorf("stop: got %v, want %v", err, tt.err)
					}
					if got := time.Since(begun); got != tt.stop {
						t.Errorf("stop took %v, want %v", got, tt.stop)
					}
					if took, asked := ended(); took != tt.took || asked != tt.asked {
						t.Errorf("the job took %v and was asked: %v; want %v, %v", took, asked, tt.took, tt.asked)
					}
					if err := s.Stop(t.Context()); (err == nil) != (tt.err == nil) {
						t.Errorf("again: got %v", err)
					}
				})
			})
		}
	}
}

// stubServer is a Server that has requests in flight as long as its session has holds.
type stubServer struct{ held *Session }

func (f *stubServer) Pause(ctx context.Context, d time.Duration) error { return pause(ctx, d) }
func (f *stubServer) StopNew()                                         {}
func (f *stubServer) Wait(context.Context) error                       { return nil }
func (f *stubServer) Retire(context.Context) error                     { return nil }
func (f *stubServer) Shutdown(ctx context.Context) error {
	return f.held.unheld(ctx, 0)
}

func TestD2_StopIsSafe(t *testing.T) {
	t.Run("before start", func(t *testing.T) {
		var s *Session
		if err := s.Stop(t.Context()); err != nil {
			t.Errorf("of no session: got %v", err)
		}
		bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
			s := register(t, o)
			if err := s.Stop(t.Context()); err != nil {
				t.Error(err)
			}
			if err := s.Attach(&stubServer{s}); err == nil {
				t.Error("a server began after the stop")
			}
		})
	})
	t.Run("at once", func(t *testing.T) {
		bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
			s := register(t, o)
			var flushes atomic.Int32
			s.OnFlush(func(context.Context, Flush) error { flushes.Add(1); return nil })
			ended := job(t, s, 5*time.Second, false)
			errs := make(chan error)
			for range 20 {
				go func() { errs <- s.Stop(t.Context()) }()
			}
			// The agent leads.
			after(6 * time.Second)
			a.flush("zero")
			for range 20 {
				if err := <-errs; err != nil {
					t.Error(err)
				}
			}
			ended()
			if flushes.Load() != 1 || a.count("drain") != 1 || a.count("bye") != 1 {
				t.Errorf("flushes %d, drains %d, goodbyes %d; want one each", flushes.Load(), a.count("drain"), a.count("bye"))
			}
		})
	})
	t.Run("the shortest counts", func(t *testing.T) {
		bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
			a.away = true
			s := register(t, o)
			if err := s.Attach(&stubServer{s}); err != nil {
				t.Fatal(err)
			}
			ended := job(t, s, time.Minute, false)
			begun := time.Now()
			long := make(chan error)
			go func() { long <- s.Stop(t.Context()) }()
			synctest.Wait()
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(3*time.Second, cancel)
			if err := s.Stop(ctx); !errors.Is(err, context.Canceled) {
				t.Errorf("cancelled: got %v", err)
			}
			if err := <-long; !errors.Is(err, ErrForced) || time.Since(begun) != 3*time.Second {
				t.Errorf("the other one: got %v after %v", err, time.Since(begun))
			}
			ended()
		})
	})
	t.Run("a function that does not end", func(t *testing.T) {
		bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
			a.away = true
			s := register(t, o)
			block := make(chan struct{})
			s.OnFlush(func(context.Context, Flush) error { <-block; return nil })
			begun := time.Now()
			if err := s.Stop(t.Context()); !errors.Is(err, ErrForced) || time.Since(begun) != DefaultGrace {
				t.Errorf("got %v after %v", err, time.Since(begun))
			}
			close(block)
		})
	})
}

// shifts is a Server that has something in flight from one time to the other.
type shifts struct{ from, to time.Time }

func (f *shifts) Pause(ctx context.Context, d time.Duration) error { return pause(ctx, d) }
func (f *shifts) StopNew()                                         {}
func (f *shifts) Retire(ctx context.Context) error                 { return f.Wait(ctx) }
func (f *shifts) Shutdown(ctx context.Context) error               { return f.Wait(ctx) }
func (f *shifts) Wait(ctx context.Context) error {
	if now := time.Now(); now.Before(f.from) || !now.Before(f.to) {
		return nil
	}
	return pause(ctx, time.Until(f.to))
}

// Alone, the flush on zero comes when all servers have nothing in flight and nothing is held, at the same time: while the last
// one is waited for, the first may have begun anew.
func TestZeroIsZeroOfAll(t *testing.T) {
	for _, tt := range []struct {
		name       string
		a, b, hold [2]int // from, to
		want       int
	}{
		{"two servers", [2]int{3, 8}, [2]int{0, 5}, [2]int{}, 8},
		{"and back", [2]int{3, 8}, [2]int{7, 12}, [2]int{0, 5}, 12},
		{"a hold", [2]int{3, 8}, [2]int{}, [2]int{0, 5}, 8},
		{"a hold that begins", [2]int{0, 5}, [2]int{}, [2]int{4, 9}, 10}, // and the quiet period
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
				a.away = true
				s := register(t, o)
				begun := time.Now()
				at := func(sec int) time.Time { return begun.Add(time.Duration(sec) * time.Second) }
				for _, x := range [][2]int{tt.a, tt.b} {
					if err := s.Attach(&shifts{at(x[0]), at(x[1])}); err != nil {
						t.Fatal(err)
					}
				}
				if tt.hold[1] > 0 {
					go func() {
						<-time.After(time.Until(at(tt.hold[0])))
						release, err := s.Hold(t.Context(), "work")
						if err != nil {
							t.Error(err)
							return
						}
						<-time.After(time.Until(at(tt.hold[1])))
						release()
					}()
					synctest.Wait()
				}
				var reason FlushReason
				var when time.Duration
				s.OnFlush(func(_ context.Context, f Flush) error { reason, when = f.Reason, time.Since(begun); return nil })
				if err := s.Stop(t.Context()); err != nil {
					t.Error(err)
				}
				// A hold that ends is followed by the quiet period.
				want := max(at(tt.want).Sub(begun), at(tt.hold[1]).Sub(begun)+DefaultQuietPeriod)
				if reason != FlushZero || when != want {
					t.Errorf("flush: got %s after %v, want %s after %v", reason, when, FlushZero, want)
				}
			})
		})
	}
}

// Stop says all that went wrong: what was left behind, that it had to, why, and what OnFlush says.
func TestD2_StopSaysWhatWasLeft(t *testing.T) {
	disk := errors.New("disk full")
	for _, cancelled := range []bool{false, true} {
		bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
			a.away = true
			s := register(t, o)
			for _, name := range []string{"invoices", "mail", "mail"} {
				if _, err := s.Hold(t.Context(), name); err != nil {
					t.Fatal(err)
				}
			}
			release, err := s.Hold(t.Context(), "done in time")
			if err != nil {
				t.Fatal(err)
			}
			s.OnFlush(nil)
			s.OnFlush(func(ctx context.Context, f Flush) error {
				if at, ok := ctx.Deadline(); !ok || !at.Equal(f.Until) {
					t.Errorf("deadline: got %v, want %v", at, f.Until)
				}
				<-ctx.Done()
				return disk
			})
			s.OnFlush(func(context.Context, Flush) error { release(); return nil })
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			if cancelled {
				time.AfterFunc(9*time.Second, cancel)
			}
			begun := time.Now()
			err = s.Stop(ctx)
			if !errors.Is(err, ErrForced) || !errors.Is(err, ctx.Err()) || !errors.Is(err, disk) ||
				!strings.Contains(err.Error(), `still held: ["invoices" "mail"]`) {
				t.Errorf("got %v; want what was left, %v and %v", err, ctx.Err(), disk)
			}
			if took := time.Since(begun); took > 10*time.Second {
				t.Errorf("took %v", took)
			}
			// To one that asks later nothing was over.
			if err := s.Stop(t.Context()); !errors.Is(err, ErrForced) || !errors.Is(err, disk) || errors.Is(err, ctx.Err()) {
				t.Errorf("again: got %v", err)
			}
		})
	}
}

// What is held has until the end of the slice, as what is in flight does.
func TestD2_HoldsHaveUntilTheDeadline(t *testing.T) {
	bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
		a.away = true
		s := register(t, o)
		ended := job(t, s, DefaultGrace-time.Second, false)
		if err := s.Stop(t.Context()); err != nil {
			t.Error(err)
		}
		if took, _ := ended(); took != DefaultGrace-time.Second {
			t.Errorf("took %v", took)
		}
	})
}

func TestStopInOnFlush(t *testing.T) {
	bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
		a.away = true
		s := register(t, o)
		var took time.Duration
		s.OnFlush(func(ctx context.Context, _ Flush) error {
			begun := time.Now()
			err := s.Stop(ctx)
			took = time.Since(begun)
			return err
		})
		if err := s.Stop(t.Context()); err != nil || took != 0 {
			t.Errorf("got %v, inside after %v", err, took)
		}
	})
}

// The second signal is harmless, the third ends the wait.
func TestC16_Signals(t *testing.T) {
	signal := func(s *Session) { s.do(func() { s.signal("terminated") }); synctest.Wait() }
	t.Run("alone", func(t *testing.T) {
		bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
			a.away = true
			s := register(t, o)
			defer leave(s)
			ended := job(t, s, 10*time.Second, true)
			signal(s)
			deadline := s.Status().Deadline
			if !isClosed(s.Draining()) || time.Until(deadline) != DefaultGrace {
				t.Errorf("after the first: got %+v", s.Status())
			}
			after(2 * time.Second)
			signal(s)
			if got := s.Status(); got.Deadline != deadline || got.Flushing {
				t.Errorf("after the second: got %+v", got)
			}
			<-s.Done()
			if took, asked := ended(); took != 10*time.Second || asked || s.err != nil {
				t.Errorf("the job took %v, asked %v, err %v", took, asked, s.err)
			}
		})
	})
	t.Run("third", func(t *testing.T) {
		bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
			a.away = true
			s := register(t, o)
			defer leave(s)
			ended := job(t, s, time.Minute, true)
			for range 3 {
				signal(s)
			}
			<-s.Done()
			if took, asked := ended(); took != 0 || !asked {
				t.Errorf("the job took %v, asked %v", took, asked)
			}
		})
	})
	t.Run("the agent's flush", func(t *testing.T) {
		bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
			s := register(t, o)
			defer leave(s)
			var flushes atomic.Int32
			s.OnFlush(func(context.Context, Flush) error { flushes.Add(1); return nil })
			a.begin("d1", 17*time.Second, 25*time.Second)
			synctest.Wait()
			signal(s)
			a.flush("zero")
			signal(s)
			<-s.Done()
			after(time.Minute)
			if flushes.Load() != 1 || len(a.flushedBy) != 1 || a.stale != 0 {
				t.Errorf("flushes %d, answers %d, stale %d; want 1, 1, 0", flushes.Load(), len(a.flushedBy), a.stale)
			}
		})
	})
	t.Run("told to the agent", func(t *testing.T) {
		bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
			s := register(t, o)
			defer leave(s)
			signal(s)
			if st := s.Status(); a.count("drain") != 1 || st.Drain != "d-app" || !st.Draining {
				t.Errorf("got %d requests, %+v", a.count("drain"), st)
			}
			// It leads: nothing is flushed before it says so.
			after(10 * time.Second)
			if s.Status().Flushing {
				t.Error("flushed alone under an agent")
			}
			// Nobody but this process takes its drain back.
			a.with(func() { a.announced = false; a.push(fakeEvent{Type: "cancelled", Drain: "d-app"}) })
			synctest.Wait()
			if !s.Status().Draining {
				t.Error("the drain of a signal was taken back")
			}
			<-s.Done()
		})
	})
	t.Run("an agent that observes", func(t *testing.T) {
		bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
			a.observed = true
			s := register(t, o)
			defer leave(s)
			begun := time.Now()
			signal(s)
			<-s.Done()
			if took := time.Since(begun); took != DefaultQuietPeriod || a.stale+len(a.flushedBy) != 0 {
				t.Errorf("took %v, want %v; told the agent of a flush: %v", took, DefaultQuietPeriod, a.flushedBy)
			}
		})
	})
	t.Run("the agent dies", func(t *testing.T) {
		bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
			s := register(t, o)
			defer leave(s)
			signal(s)
			a.freeze()
			<-s.Done()
			// It waits for the agent while that is only suspect.
			if s.Status().Agent != HealthLost {
				t.Errorf("agent %s, want %s", s.Status().Agent, HealthLost)
			}
		})
	})
}

func TestDrainRequest(t *testing.T) {
	bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
		s := register(t, o)
		defer leave(s)
		if err := s.Drain(t.Context(), "out of memory"); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if last := s.Status(); last.Drain != "d-app" || a.calls[slices.IndexFunc(a.calls, func(c fakeCall) bool { return c.op == "drain" })].body.Reason != "out of memory" {
			t.Errorf("got %+v", last)
		}
	})
	bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
		a.away = true
		s := register(t, o)
		defer leave(s)
		if err := s.Drain(t.Context(), "out of memory"); err != nil {
			t.Fatal(err)
		}
		if st := s.Status(); !st.Draining || st.Cause != "out of memory" {
			t.Errorf("without an agent: got %+v", st)
		}
		<-s.Done()
	})
}

// An agent that is heard from may be a moment late with its flush, and no more.
func TestFlushThatIsLate(t *testing.T) {
	for _, late := range []time.Duration{flushSlack / 2, 2 * flushSlack} {
		bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
			s := register(t, o)
			defer leave(s)
			var got Flush
			s.OnFlush(func(_ context.Context, f Flush) error { got = f; return nil })
			a.begin("d1", 17*time.Second, 25*time.Second)
			after(17*time.Second + late)
			a.flush("zero")
			<-s.Done()
			after(time.Second)
			want := FlushZero
			if late > flushSlack {
				want = FlushDeadline
			}
			if got.Reason != want || len(a.flushedBy) != 1 {
				t.Errorf("%v late: got %+v and %d answers, want reason %s and one", late, got, len(a.flushedBy), want)
			}
		})
	}
}

// A flush that was lost is made up for when the drain is over.
func TestDoneWithoutAFlush(t *testing.T) {
	bubble(t, func(t *testing.T, a *fakeAgent, o Options) {
		s := register(t, o)
		defer leave(s)
		a.begin("d1", 5*time.Minute, 6*time.Minute)
		a.done("lost")
		<-s.Done()
		if got := s.Status(); got.Outcome != "lost" || !got.Flushing {
			t.Errorf("got %+v", got)
		}
	})
}

func FuzzReadStream(f *testing.F) {
	f.Add("id: 1\nevent: flush\ndata: {\"seq\":1}\n\n: beat\n\ndata: a\ndata: b\n\n")
	f.Fuzz(func(t *testing.T, in string) {
		err := readStream(strings.NewReader(in), func() {}, func(_ string, data []byte) error {
			if data == nil {
				t.Error("an event without data")
			}
			return nil
		})
		if err == nil {
			t.Error("a stream that ends has an error")
		}
	})
}

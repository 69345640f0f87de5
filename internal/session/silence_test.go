// SPDX-License-Identifier: Apache-2.0

package session

import (
	"context"
	"errors"
	"io"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
)

// run watches over a book in a bubble until the end of the test, or until the function that it returns is called.
func run(t *testing.T, b *Book) (stop func()) {
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- b.Run(ctx) }()
	stopped := errors.New("stopped")
	stop = func() {
		cancel(stopped)
		if err := <-done; !errors.Is(err, stopped) {
			t.Errorf("got %v, want the cause", err)
		}
		done <- stopped
	}
	t.Cleanup(stop)
	return stop
}

func TestR13_SilenceIsSuspectAndThenLost(t *testing.T) {
	for _, tt := range []struct {
		silent time.Duration
		app    api.Health
		holder bool // is still there
	}{
		{9 * time.Second, api.HealthOK, true},
		{10*time.Second - time.Millisecond, api.HealthOK, true},
		{12 * time.Second, api.HealthSuspect, true},
		{15*time.Second - time.Millisecond, api.HealthSuspect, true},
		{16 * time.Second, api.HealthLost, false},
	} {
		synctest.Test(t, func(t *testing.T) {
			var o owner
			b := open(t, o.options())
			run(t, b)
			time.Sleep(1234 * time.Millisecond)
			app := enter(t, b, 10, api.SessionRequest{Version: 2})
			holder := enter(t, b, 11, api.SessionRequest{Role: api.RoleHolder})
			for range 3 {
				time.Sleep(7 * time.Second)
				call(t, b, app, api.SessionCall{Op: "heartbeat"})
				call(t, b, holder, api.SessionCall{Op: "get"}) // as good as any
			}
			call(t, b, app, api.SessionCall{Op: "hold", Name: "job"})
			call(t, b, holder, api.SessionCall{Op: "hold", Name: "script"})
			if h, why := b.Health(); h != api.HealthOK || why != "" {
				t.Errorf("got %s (%s) before the silence", h, why)
			}
			o.changes()
			time.Sleep(tt.silent)
			synctest.Wait()
			h, why := b.Health()
			holds, _ := b.Holds()
			wantHolds := 2
			if tt.app == api.HealthLost {
				wantHolds = 0
			}
			if h != tt.app || (why == "") != (h == api.HealthOK) || holds != wantHolds || (o.changes() > 0) != (h != api.HealthOK) {
				t.Errorf("after %v: got %s (%s), %d holds; want %s, %d holds", tt.silent, h, why, holds, tt.app, wantHolds)
			}
			if _, err := b.Call(t.Context(), holder, api.Process{}, api.SessionCall{Op: "get"}); (err == nil) != tt.holder {
				t.Errorf("after %v: the holder got %v", tt.silent, err)
			}
			apps := 1
			if h == api.HealthLost {
				apps = 0
			}
			if _, ok := b.Version(); b.Apps() != apps || ok != (apps == 1) {
				t.Errorf("after %v: got %d applications", tt.silent, b.Apps())
			}
			// To read events is a sign of our life; to come for them is one of its own.
			batch, err := b.Events(t.Context(), app, api.Process{}, 0, 0)
			if got := batch.Session.Health; err != nil || got != tt.app {
				t.Errorf("after %v: got %s, %v", tt.silent, got, err)
			}
			if batch, err = b.Events(t.Context(), app, api.Process{}, 0, 1); err != nil || batch.Session.Health != api.HealthOK || batch.Session.State != drain.StateServing {
				t.Errorf("a sign of life after %v: got %+v, %v", tt.silent, batch.Session, err)
			}
			if h, _ := b.Health(); h != api.HealthOK {
				t.Errorf("a sign of life after %v: got %s", tt.silent, h)
			}
			if n, _ := b.Holds(); n == 0 {
				t.Error("the holds of an application that is back do not count")
			}
		})
	}
}

func TestR13_OneSilentApplicationIsEnough(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o owner
		b := open(t, o.options())
		run(t, b)
		enter(t, b, 10, api.SessionRequest{})
		lively := enter(t, b, 11, api.SessionRequest{})
		for range 4 {
			time.Sleep(3 * time.Second)
			call(t, b, lively, api.SessionCall{Op: "heartbeat"})
		}
		v := call(t, b, lively, api.SessionCall{Op: "get"})
		if h, _ := b.Health(); h != api.HealthSuspect || v.State != drain.StateSuspect || v.Health != api.HealthOK {
			t.Errorf("got %s, %+v", h, v)
		}
		// Once the generation is over nobody's silence matters.
		b.Follow(over(begin(t, b, "d1", 30*time.Second), drain.OutcomeDrained))
		if h, _ := b.Health(); h != api.HealthOK {
			t.Errorf("got %s", h)
		}
	})
}

// While this process does not run nobody can bring it a sign of life.
func TestR13_AProcessThatHasRegisteredAnewIsNotSilent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o owner
		opt := o.options()
		start := uint64(1)
		opt.Started = func(int) (uint64, error) { return start, nil }
		b := open(t, opt)
		run(t, b)
		first := enter(t, b, 10, api.SessionRequest{})
		call(t, b, first, api.SessionCall{Op: "hold", Name: "job"})
		time.Sleep(5 * time.Second)
		second := enter(t, b, 10, api.SessionRequest{})
		enter(t, b, 10, api.SessionRequest{Role: api.RoleHolder})
		for range 4 {
			time.Sleep(2499 * time.Millisecond)
			call(t, b, second, api.SessionCall{Op: "heartbeat"})
			if h, why := b.Health(); h != api.HealthOK {
				t.Fatalf("got %s (%s), although the process is heard of", h, why)
			}
		}
		if n, _ := b.Holds(); n != 1 {
			t.Errorf("got %d holds within lost of the last that was heard of who holds, want 1", n)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		refused(t, b, first, api.SessionCall{Op: "get"}, api.ErrUnknownSession)
		if n, _ := b.Holds(); n != 0 {
			t.Errorf("got %d holds of a session that has ended", n)
		}
		if n := len(b.Views()); n != 2 {
			t.Errorf("got %d sessions, want the second one and the holder", n)
		}
		// Another process of the same number says nothing of this one, nor does one that only holds.
		start = 2
		enter(t, b, 10, api.SessionRequest{})
		for range 8 {
			time.Sleep(2 * time.Second)
			for _, v := range b.Views() {
				if v.ID != second {
					call(t, b, v.ID, api.SessionCall{Op: "heartbeat"})
				}
			}
		}
		if h, _ := b.Health(); h != api.HealthLost {
			t.Errorf("got %s, want lost", h)
		}
	})
}

func TestR13_AProcessThatIsSilentByAllItsSessionsIsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o owner
		b := open(t, o.options())
		run(t, b)
		enter(t, b, 10, api.SessionRequest{})
		time.Sleep(5 * time.Second)
		enter(t, b, 10, api.SessionRequest{})
		for _, want := range []api.Health{api.HealthOK, api.HealthSuspect, api.HealthLost} { // at 5, 12 and 16 s of silence
			synctest.Wait()
			time.Sleep(map[api.Health]time.Duration{api.HealthOK: 5, api.HealthSuspect: 7, api.HealthLost: 4}[want] * time.Second)
			synctest.Wait()
			if h, _ := b.Health(); h != want {
				t.Errorf("got %s, want %s", h, want)
			}
		}
	})
}

func TestR13_OurOwnSilenceIsNobodyElses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o owner
		opt := o.options()
		opt.File = filepath.Join(t.TempDir(), "web-blue")
		b := open(t, opt)
		stop := run(t, b)
		id := enter(t, b, 10, api.SessionRequest{})
		time.Sleep(5 * time.Second)
		stop()
		time.Sleep(time.Hour)
		stop = run(t, b)
		synctest.Wait()
		if h, why := b.Health(); h != api.HealthOK {
			t.Errorf("after a stop: got %s, %s", h, why)
		}
		time.Sleep(5 * time.Second)
		if h, _ := b.Health(); h != api.HealthSuspect {
			t.Errorf("silent while we ran: got %s, want suspect", h)
		}
		stop()
		time.Sleep(time.Hour)
		b = open(t, opt)
		run(t, b)
		time.Sleep(9 * time.Second)
		if h, why := b.Health(); h != api.HealthOK {
			t.Errorf("9 s after a restart: got %s, %s", h, why)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if h, _ := b.Health(); h != api.HealthSuspect {
			t.Errorf("10 s after a restart: got %s, want suspect", h)
		}
		call(t, b, id, api.SessionCall{Op: "heartbeat"})
	})
}

// Nor while who takes the signs of life for this process does not answer.
func TestR13_SilenceThatNobodyCouldBreakIsNotCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o owner
		var deaf atomic.Bool
		opt := o.options()
		opt.Hears = func() bool { return !deaf.Load() }
		b := open(t, opt)
		run(t, b)
		enter(t, b, 10, api.SessionRequest{})
		time.Sleep(5 * time.Second)
		synctest.Wait()
		deaf.Store(true)
		time.Sleep(time.Hour)
		synctest.Wait()
		if h, why := b.Health(); h != api.HealthOK {
			t.Errorf("got %s, %s", h, why)
		}
		deaf.Store(false)
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if h, _ := b.Health(); h != api.HealthSuspect {
			t.Errorf("got %s, want suspect", h)
		}
	})
}

func TestR14_TheLastMessageWaitsForAnApplicationThatWasPaused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o owner
		opt := o.options()
		opt.File = filepath.Join(t.TempDir(), "web-blue")
		b := open(t, opt)
		stop := run(t, b)
		id := enter(t, b, 10, api.SessionRequest{})
		s := begin(t, b, "d1", 30*time.Second)
		time.Sleep(22 * time.Second)
		tellFlush(t, b, "d1")
		time.Sleep(8 * time.Second)
		b.Follow(over(flushing(s), drain.OutcomeExpired))
		stop()
		b = open(t, opt)
		run(t, b)
		time.Sleep(24 * time.Hour)
		want(t, types(t, b, id, 0), api.SessionDraining, api.SessionFlush, api.SessionDone, api.SessionEnd)
		batch, _ := b.Events(t.Context(), id, api.Process{}, 0, 1)
		if e := batch.Events[0]; *e.TimeLeftMS != 0 {
			t.Errorf("got %d ms left", *e.TimeLeftMS)
		}
		call(t, b, id, api.SessionCall{Op: "ack", Seq: 4})
		refused(t, b, id, api.SessionCall{Op: "get"}, api.ErrUnknownSession)
	})
}

// Whoever takes a drain back wants the backend to serve, and the dead would keep it from that.
func TestSessionsThatAreLostEndWhenTheDrainIsTakenBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o owner
		b := open(t, o.options())
		run(t, b)
		id := enter(t, b, 10, api.SessionRequest{})
		time.Sleep(15 * time.Second)
		synctest.Wait()
		s := begin(t, b, "d1", 30*time.Second)
		if h, _ := b.Health(); h != api.HealthLost {
			t.Errorf("got %s", h)
		}
		b.Follow(over(s, drain.OutcomeCancelled))
		if h, _ := b.Health(); h != api.HealthOK {
			t.Errorf("got %s", h)
		}
		refused(t, b, id, api.SessionCall{Op: "get"}, api.ErrUnknownSession)
	})
}

func TestBoundSessionEndsWithItsProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o owner
		opt := o.options()
		ends := map[int]chan error{10: make(chan error), 11: make(chan error), 12: make(chan error)}
		opt.watch = func(ctx context.Context, pid int, _ func() bool) error {
			select {
			case err := <-ends[pid]:
				return err
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		b := open(t, opt)
		stop := run(t, b)
		ids := []string{enter(t, b, 10, api.SessionRequest{Bound: true}), enter(t, b, 11, api.SessionRequest{Bound: true}), enter(t, b, 12, api.SessionRequest{Bound: true})}
		call(t, b, ids[0], api.SessionCall{Op: "hold", Name: "job"})
		synctest.Wait()
		stop()
		run(t, b) // watches anew
		ends[10] <- nil
		ends[11] <- errors.New("no descriptor is left")
		synctest.Wait()
		refused(t, b, ids[0], api.SessionCall{Op: "get"}, api.ErrUnknownSession)
		if n, _ := b.Holds(); n != 0 {
			t.Errorf("got %d holds of a process that has ended", n)
		}
		if h, _ := b.Health(); h != api.HealthOK {
			t.Errorf("got %s", h)
		}
		call(t, b, ids[1], api.SessionCall{Op: "get"}) // its silence decides
		want(t, o.warned, "the end of process 11 cannot be watched, its silence is: no descriptor is left")
		call(t, b, ids[2], api.SessionCall{Op: "end"}) // which ends its watch, or the bubble would never end
	})
}

func TestAwaitEnd(t *testing.T) {
	c := exec.Command("cat")
	stdin, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	c.Stdout = io.Discard
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	yes, no := func() bool { return true }, func() bool { return false }
	if err := awaitEnd(t.Context(), c.Process.Pid, no); err != nil {
		t.Errorf("another process of that pid: got %v", err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(drain.ErrOver)
	if err := awaitEnd(ctx, c.Process.Pid, yes); !errors.Is(err, drain.ErrOver) {
		t.Errorf("got %v, want the cause", err)
	}
	ended := make(chan error)
	go func() { ended <- awaitEnd(t.Context(), c.Process.Pid, yes) }()
	select {
	case err := <-ended:
		t.Fatalf("got %v from a process that runs", err)
	default:
	}
	stdin.Close()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if err := c.Wait(); err != nil {
		t.Error(err)
	}
	if err := awaitEnd(t.Context(), c.Process.Pid, yes); err != nil {
		t.Errorf("a process that is gone: got %v", err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
)

// quietWorld is a drain.World without connections.
type quietWorld struct {
	mu      sync.Mutex
	active  int64
	records []drain.Record
	flushes []drain.FlushReason
}

func (w *quietWorld) Journal(r drain.Record) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.records = append(w.records, r)
	return nil
}
func (w *quietWorld) Flush(ctx context.Context, q drain.FlushRequest) error {
	w.mu.Lock()
	w.flushes = append(w.flushes, q.Reason)
	w.mu.Unlock()
	<-ctx.Done()
	return context.Cause(ctx)
}
func (w *quietWorld) Look(context.Context) (drain.Counts, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return drain.Counts{Known: true, Active: w.active}, nil
}
func (w *quietWorld) flushed() []drain.FlushReason {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.flushes)
}
func (w *quietWorld) last() drain.Record {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.records[len(w.records)-1]
}
func (*quietWorld) SetReady(bool)                                       {}
func (*quietWorld) Notify(context.Context, drain.Notice) error          { return nil }
func (*quietWorld) CloseAdmission(context.Context, time.Time) error     { return nil }
func (*quietWorld) OpenAdmission(context.Context) error                 { return nil }
func (*quietWorld) Settled(context.Context) (drain.Pending, error)      { return drain.Pending{}, nil }
func (*quietWorld) Retire(context.Context) (int, error)                 { return 0, nil }
func (*quietWorld) Survivors(context.Context) ([]drain.Survivor, error) { return nil, nil }
func (*quietWorld) Kill(context.Context) error                          { return nil }
func (*quietWorld) Emit(drain.Event)                                    {}
func (*quietWorld) Cut(context.Context, drain.CutRequest) (drain.CutReport, error) {
	return drain.CutReport{}, nil
}

var sessionPolicy = drain.Policy{Grace: 60 * time.Second, FlushTimeout: 5 * time.Second, Reserve: 3 * time.Second, QuietPeriod: time.Second, OnNew: drain.OnNewRefuse}

// attended is a backend whose drain and sessions are joined as those of a process that runs.
type attended struct {
	*member
	inc   *incarnation
	world *quietWorld
	boot  time.Time
	wait  sync.WaitGroup
}

// attendTo begins to, in a bubble of synctest. dir keeps the sessions.
func attendTo(t *testing.T, dir string, w *quietWorld, mode drain.Mode, boot time.Time, resume *drain.Record) *attended {
	t.Helper()
	eff, err := drain.Validate(sessionPolicy)
	if err != nil {
		t.Fatal(err)
	}
	set := &settings{mode: mode, policy: sessionPolicy, eff: eff, extension: 10 * time.Second}
	m := &member{name: "web", service: "shop", log: slog.New(slog.DiscardHandler), events: api.NewLog(api.LogOptions{}), sessions: filepath.Join(dir, "web")}
	inc := &incarnation{gen: 7, set: set, proc: &process{pid: os.Getpid(), done: make(chan struct{})}}
	m.current.Store(inc)
	bk, err := m.openBook(arrival{gen: 7, set: set, proc: inc.proc}, nil)
	if err != nil {
		t.Fatal(err)
	}
	inc.b = &backend{name: "web", log: m.log, book: bk, enforce: mode == drain.ModeEnforce, proc: inc.proc}
	inc.machine, err = drain.New(drain.Options{
		Backend: "web", Service: "shop", Gen: 7, Mode: mode, World: w, Resume: resume, Boot: func() time.Duration { return time.Since(boot) },
	})
	if err != nil {
		t.Fatal(err)
	}
	a := &attended{member: m, inc: inc, world: w, boot: boot}
	var ctx context.Context
	ctx, inc.cancel = context.WithCancel(t.Context())
	bk.machine.Store(inc.machine)
	inc.machine.SetHolds(bk.Holds())
	a.wait.Go(func() { m.attend(ctx, inc) })
	a.wait.Go(func() { _ = bk.Run(ctx) })
	a.wait.Go(func() { _ = inc.machine.Run(ctx) })
	t.Cleanup(a.die)
	synctest.Wait()
	return a
}

// die leaves everything as a kill would.
func (a *attended) die() {
	a.inc.cancel()
	a.wait.Wait()
	a.inc.wg.Wait()
}

func (a *attended) open(t *testing.T, q api.SessionRequest) api.Session {
	t.Helper()
	s, err := only(a.member).OpenSession(t.Context(), "web", api.Process{PID: os.Getpid()}, q)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func (a *attended) call(t *testing.T, id string, c api.SessionCall) {
	t.Helper()
	if _, err := only(a.member).SessionCall(t.Context(), "web", id, api.Process{PID: os.Getpid()}, c); err != nil {
		t.Fatalf("%s: %v", c.Op, err)
	}
}

// told lists the types of all events that the session has not acknowledged.
func (a *attended) told(t *testing.T, id string) (types []string) {
	t.Helper()
	synctest.Wait()
	batch, err := only(a.member).SessionEvents(t.Context(), "web", id, api.Process{PID: os.Getpid()}, 1, 1)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range batch.Events {
		types = append(types, e.Type)
	}
	return types
}

func (a *attended) begin(t *testing.T, cause drain.Cause) drain.Status {
	t.Helper()
	s, err := a.inc.machine.Begin(t.Context(), drain.Request{Cause: cause, Policy: sessionPolicy})
	if err != nil {
		t.Fatal(err)
	}
	synctest.Wait()
	return s
}

// pass lets time go by in which the session gives signs of life.
func (a *attended) pass(t *testing.T, d time.Duration, id string) {
	t.Helper()
	for end := time.Now().Add(d); time.Now().Before(end); {
		time.Sleep(min(time.Second, time.Until(end)))
		a.call(t, id, api.SessionCall{Op: "heartbeat"})
	}
	synctest.Wait()
}

func TestR22_LeaseOfASessionBlocksTheFlush(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		a := attendTo(t, dir, &quietWorld{}, drain.ModeEnforce, time.Now(), nil)
		s := a.open(t, api.SessionRequest{})
		a.call(t, s.ID, api.SessionCall{Op: "hold", Name: "job"})
		d := a.begin(t, drain.CauseOperator)
		a.pass(t, 8*time.Second, s.ID)
		if st := a.inc.machine.Status(); st.Holds != 1 || !slices.Equal(st.HeldBy, []string{"job"}) || st.State != drain.StateDraining {
			t.Fatalf("got %s with %d holds by %v, want draining with one by job", st.State, st.Holds, st.HeldBy)
		}
		if got := a.told(t, s.ID); !slices.Equal(got, []string{"draining"}) {
			t.Errorf("events: got %v, want draining", got)
		}
		a.call(t, s.ID, api.SessionCall{Op: "release", ID: "job"})
		a.pass(t, 2*time.Second, s.ID)
		if got := a.world.flushed(); !slices.Equal(got, []drain.FlushReason{drain.FlushZero}) {
			t.Errorf("flushes: got %v, want one at zero", got)
		}
		if got := a.told(t, s.ID); !slices.Equal(got, []string{"draining", "flush"}) {
			t.Errorf("events: got %v, want draining and flush", got)
		}
		if h := a.inc.b.book.HeldDuring(d.ID); len(h) != 1 || h[0].Name != "job" || !h[0].Released || time.Duration(h[0].For) != 8*time.Second {
			t.Errorf("held: got %+v, want job for 8s, released", h)
		}
	})
}

// A hold that is given between the machine's look at the holds and the flush's record keeps the flush; none is given after it.
func TestR22_HoldThatRacesTheFlushKeepsIt(t *testing.T) {
	dir := t.TempDir()
	j, _, err := openJournal(filepath.Join(dir, "journal"))
	if err != nil {
		t.Fatal(err)
	}
	defer j.close()
	synctest.Test(t, func(t *testing.T) {
		a := attendTo(t, dir, &quietWorld{}, drain.ModeEnforce, time.Now(), nil)
		s := a.open(t, api.SessionRequest{})
		b := a.inc.b
		b.journal, b.boot = j, func() time.Duration { return 0 }
		r := drain.Record{
			Version: 1, Type: "flush", Drain: "d1", Backend: "web", Gen: 7, Policy: sessionPolicy, FlushReason: drain.FlushZero, CutBoot: int64(time.Minute),
		}
		a.call(t, s.ID, api.SessionCall{Op: "hold", Name: "job"})
		if err := b.Journal(r); !errors.Is(err, drain.ErrHeld) {
			t.Errorf("got %v, want held", err)
		}
		if n, err := os.ReadFile(j.path); err != nil || len(n) != 0 || len(a.told(t, s.ID)) != 0 {
			t.Errorf("the journal has %q (%v), the session %v", n, err, a.told(t, s.ID))
		}
		a.call(t, s.ID, api.SessionCall{Op: "release", Name: "job"})
		if err := b.Journal(r); err != nil {
			t.Error(err)
		}
		if _, err := only(a.member).SessionCall(t.Context(), "web", s.ID, api.Process{}, api.SessionCall{Op: "hold", Name: "job"}); !errors.Is(err, api.ErrFlushing) {
			t.Errorf("hold: got %v, want flushing", err)
		}
	})
}

// What was held before a restart in the middle of a drain is held after it, from the first moment on.
func TestD13_LeasesOutliveARestart(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		boot, w := time.Now().Add(-time.Hour), &quietWorld{}
		a := attendTo(t, dir, w, drain.ModeEnforce, boot, nil)
		s := a.open(t, api.SessionRequest{})
		a.call(t, s.ID, api.SessionCall{Op: "hold", Name: "job"})
		a.begin(t, drain.CauseOperator)
		a.pass(t, 3*time.Second, s.ID)
		a.die()
		r := w.last()
		a = attendTo(t, dir, w, drain.ModeEnforce, boot, &r)
		a.pass(t, 5*time.Second, s.ID)
		if got := w.flushed(); len(got) != 0 {
			t.Fatalf("flushes: got %v while the lease is held", got)
		}
		if got := a.told(t, s.ID); !slices.Equal(got, []string{"draining"}) {
			t.Errorf("events: got %v over both lives, want draining once", got)
		}
		a.call(t, s.ID, api.SessionCall{Op: "release", ID: "job"})
		a.pass(t, 2*time.Second, s.ID)
		if got := w.flushed(); len(got) != 1 {
			t.Errorf("flushes: got %v, want one", got)
		}
	})
}

func TestR13_SilentApplicationIsDrainedOnce(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		a := attendTo(t, dir, &quietWorld{active: 1}, drain.ModeEnforce, time.Now(), nil)
		turned := 0
		a.turned = func() { turned++ }
		s := a.open(t, api.SessionRequest{})
		time.Sleep(12 * time.Second)
		synctest.Wait()
		if a.inc.b.heard() || turned == 0 || a.inc.draining() {
			t.Fatalf("after 12s: heard %t, turned %d times, draining %t, want it suspect and told of", a.inc.b.heard(), turned, a.inc.draining())
		}
		a.call(t, s.ID, api.SessionCall{Op: "heartbeat"})
		if !a.inc.b.heard() {
			t.Error("not heard after a sign of life")
		}
		time.Sleep(16 * time.Second)
		synctest.Wait()
		st := a.inc.machine.Status()
		if st.Cause != drain.CauseHeartbeat || !a.inc.draining() {
			t.Fatalf("after 16s: got %s with cause %q, want a drain with heartbeat", st.State, st.Cause)
		}
		// Taken back it stays so, however long the silence lasts.
		if _, err := a.inc.machine.Undrain(t.Context(), 0, "root"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if a.inc.draining() {
			t.Error("drained again after it was taken back")
		}
	})
}

func TestG3_SilenceUnderObserveIsOnlyTold(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		a := attendTo(t, dir, &quietWorld{active: 1}, drain.ModeObserve, time.Now(), nil)
		s := a.open(t, api.SessionRequest{})
		a.begin(t, drain.CauseOperator)
		if got := a.told(t, s.ID); len(got) != 0 {
			t.Errorf("events: got %v, want none", got)
		}
		time.Sleep(16 * time.Second)
		synctest.Wait()
		a.open(t, api.SessionRequest{}) // another change, while the first one is lost still
		synctest.Wait()
		if err := a.events.Close(); err != nil {
			t.Fatal(err)
		}
		told := 0
		for sub := a.events.Subscribe(1); ; {
			e, err := sub.Next(t.Context())
			if err != nil {
				break
			}
			if e.Type == drain.EventWould && e.Cause == drain.CauseHeartbeat {
				told++
			}
		}
		if told != 1 {
			t.Errorf("told %d times that it would be drained, want once", told)
		}
	})
}

// An application that has heard and ends cleanly has done what it was asked, with a hook or without.
func TestR9_SessionCountsAsTold(t *testing.T) {
	for _, app := range []bool{true, false} {
		dir := t.TempDir()
		synctest.Test(t, func(t *testing.T) {
			a := attendTo(t, dir, &quietWorld{active: 1}, drain.ModeEnforce, time.Now(), nil)
			if app {
				a.open(t, api.SessionRequest{})
			}
			a.begin(t, drain.CauseOperator)
			a.inc.machine.Exited(nil)
			synctest.Wait()
			want := drain.OutcomeLost
			if app {
				want = drain.OutcomeDrained
			}
			if got := a.inc.machine.Status().Outcome; got != want {
				t.Errorf("with a session %t: got %s, want %s", app, got, want)
			}
		})
	}
}

func TestD6_ExtensionStopsAtTheCapAndAtAKillTime(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		a := attendTo(t, dir, &quietWorld{active: 1}, drain.ModeEnforce, time.Now(), nil)
		s := a.open(t, api.SessionRequest{})
		before := a.begin(t, drain.CauseOperator)
		a.call(t, s.ID, api.SessionCall{Op: "extend", ByMS: 60_000})
		if got := a.inc.machine.Status().Deadline.Sub(before.Deadline); got != 10*time.Second {
			t.Errorf("extended by %v, want 10s", got)
		}
		if _, err := a.inc.machine.Undrain(t.Context(), 0, "root"); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if _, err := a.inc.machine.Begin(t.Context(), drain.Request{Cause: drain.CausePrestop, Policy: sessionPolicy, Deadline: time.Now().Add(20 * time.Second)}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		_, err := only(a.member).SessionCall(t.Context(), "web", s.ID, api.Process{PID: os.Getpid()}, api.SessionCall{Op: "extend", ByMS: 1000})
		if !errors.Is(err, api.ErrNotPossible) {
			t.Errorf("past a kill time: got %v, want ErrNotPossible", err)
		}
	})
}

func TestT1_NoticeDue(t *testing.T) {
	now := time.Now()
	at := func(n drain.NotifyAt) drain.Effective { return drain.Effective{Policy: drain.Policy{NotifyAt: n}} }
	for _, tt := range []struct {
		name string
		s    drain.Status
		want bool
	}{
		{"no drain", drain.Status{}, false},
		{"over", drain.Status{ID: "d", Outcome: drain.OutcomeDrained, Flipped: now}, false},
		{"where late ones go is being found out", drain.Status{ID: "d", OnNew: drain.OnNewAuto}, false},
		{"late ones do not go elsewhere yet", drain.Status{ID: "d", OnNew: drain.OnNewSteer}, false},
		{"they do", drain.Status{ID: "d", OnNew: drain.OnNewSteer, Flipped: now}, true},
		{"they are admitted", drain.Status{ID: "d", OnNew: drain.OnNewAdmit}, true},
		{"settled: not yet", drain.Status{ID: "d", OnNew: drain.OnNewRefuse, Flipped: now, Phase: drain.PhaseSettle, Budget: at(drain.NotifyAtSettled)}, false},
		{"settled", drain.Status{ID: "d", OnNew: drain.OnNewRefuse, Flipped: now, Phase: drain.PhaseWait, Budget: at(drain.NotifyAtSettled)}, true},
	} {
		if got := noticeDue(tt.s); got != tt.want {
			t.Errorf("%s: got %t, want %t", tt.name, got, tt.want)
		}
	}
}

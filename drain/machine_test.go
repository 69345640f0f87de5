// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// world is a scripted World. Its fields are set before the machine runs or under its lock.
type world struct {
	mu     sync.Mutex
	start  time.Time
	counts Counts
	pend   Pending
	list   []Survivor

	journalErr, closeErr, openErr, lookErr, notifyErr, flushErr, killErr error

	lookTakes, closeTakes, cutTakes, listTakes time.Duration
	hangLook, hangClose                        bool
	deaf                                       bool // Look, CloseAdmission and Survivors ignore their contexts
	// flush blocks until this is closed, or ctx is over; nil returns at once.
	flushed chan struct{}
	onKill  func()
	refuse  error // of the record of a flush on zero
	cutRep  CutReport

	calls   []call
	events  []Event
	records []Record
	untils  []time.Time
	ready   bool
}

type call struct {
	name string
	at   time.Duration
	arg  any
}

func newWorld() *world {
	return &world{start: time.Now(), counts: Counts{Known: true}, ready: true}
}

func (w *world) note(name string, arg any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.calls = append(w.calls, call{name, time.Since(w.start), arg})
}

func (w *world) set(f func(*world)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f(w)
}

func get[T any](w *world, f func(*world) T) T {
	w.mu.Lock()
	defer w.mu.Unlock()
	return f(w)
}

// names are the calls in order, without those that repeat and the notice, which runs beside the others.
func (w *world) names() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var s []string
	for _, c := range w.calls {
		switch c.name {
		case "look", "settled", "retire", "notify":
		default:
			s = append(s, c.name)
		}
	}
	return s
}

func (w *world) count(name string) int { return len(w.all(name)) }

func (w *world) all(name string) []call {
	w.mu.Lock()
	defer w.mu.Unlock()
	var s []call
	for _, c := range w.calls {
		if c.name == name {
			s = append(s, c)
		}
	}
	return s
}

func (w *world) eventsOf(typ string) []Event {
	w.mu.Lock()
	defer w.mu.Unlock()
	var s []Event
	for _, e := range w.events {
		if e.Type == typ {
			s = append(s, e)
		}
	}
	return s
}

func pause(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return nil
	}
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (w *world) Journal(r Record) error {
	w.note("journal "+r.Type, r)
	w.mu.Lock()
	defer w.mu.Unlock()
	if r.Type == recordFlush && r.FlushReason == FlushZero && w.refuse != nil {
		return w.refuse
	}
	if w.journalErr == nil {
		w.records = append(w.records, r)
	}
	return w.journalErr
}

func (w *world) SetReady(ready bool) {
	w.note(fmt.Sprintf("ready %v", ready), nil)
	w.set(func(w *world) { w.ready = ready })
}

func (w *world) Notify(_ context.Context, n Notice) error {
	w.note("notify", n)
	return get(w, func(w *world) error { return w.notifyErr })
}

func (w *world) CloseAdmission(ctx context.Context, until time.Time) error {
	takes, hang := get(w, func(w *world) time.Duration { return w.closeTakes }), get(w, func(w *world) bool { return w.hangClose })
	if hang {
		<-ctx.Done()
		return ctx.Err()
	}
	if get(w, func(w *world) bool { return w.deaf }) {
		ctx = context.Background()
	}
	if err := pause(ctx, takes); err != nil {
		return err
	}
	w.note("close", until)
	w.set(func(w *world) { w.untils = append(w.untils, until) })
	return get(w, func(w *world) error { return w.closeErr })
}

func (w *world) OpenAdmission(context.Context) error {
	w.note("open", nil)
	return get(w, func(w *world) error { return w.openErr })
}

func (w *world) Settled(context.Context) (Pending, error) {
	w.note("settled", nil)
	return get(w, func(w *world) Pending { return w.pend }), nil
}

func (w *world) Look(ctx context.Context) (Counts, error) {
	w.note("look", nil)
	if get(w, func(w *world) bool { return w.hangLook }) {
		<-ctx.Done()
		return Counts{}, ctx.Err()
	}
	// What it finds is what was there when it began.
	w.mu.Lock()
	c, lerr, takes := w.counts, w.lookErr, w.lookTakes
	if w.deaf {
		ctx = context.Background()
	}
	w.mu.Unlock()
	if err := pause(ctx, takes); err != nil {
		return Counts{}, err
	}
	return c, lerr
}

func (w *world) Retire(context.Context) (int, error) {
	w.note("retire", nil)
	w.mu.Lock()
	defer w.mu.Unlock()
	n := int(w.counts.Idle)
	w.counts.Idle = 0
	return n, nil
}

func (w *world) Survivors(ctx context.Context) ([]Survivor, error) {
	w.note("survivors", nil)
	if get(w, func(w *world) bool { return w.deaf }) {
		ctx = context.Background()
	}
	if err := pause(ctx, get(w, func(w *world) time.Duration { return w.listTakes })); err != nil {
		return nil, err
	}
	return get(w, func(w *world) []Survivor { return w.list }), nil
}

func (w *world) Flush(ctx context.Context, r FlushRequest) error {
	w.note("flush", r)
	ch, err := get(w, func(w *world) chan struct{} { return w.flushed }), get(w, func(w *world) error { return w.flushErr })
	if ch == nil {
		return err
	}
	select {
	case <-ch:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (w *world) Cut(ctx context.Context, r CutRequest) (CutReport, error) {
	w.note("cut", r)
	if err := pause(ctx, get(w, func(w *world) time.Duration { return w.cutTakes })); err != nil {
		return CutReport{}, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	rep := w.cutRep
	if rep == (CutReport{}) {
		rep.Destroyed = int(w.counts.InFlight(IdleWait))
	}
	w.counts = Counts{Known: w.counts.Known, Accepted: w.counts.Accepted}
	return rep, nil
}

func (w *world) Kill(context.Context) error {
	w.note("kill", nil)
	if f := get(w, func(w *world) func() { return w.onKill }); f != nil {
		f()
	}
	return get(w, func(w *world) error { return w.killErr })
}

func (w *world) Emit(e Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.events = append(w.events, e)
}

// bench is a machine that runs in a bubble.
type bench struct {
	*Machine
	t   *testing.T
	w   *world
	log *logBuffer
	end func()
}

// logBuffer is what the machine has logged so far.
type logBuffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// run makes and runs a machine in the present bubble; it is ended with the test.
func run(t *testing.T, w *world, change ...func(*Options)) *bench {
	t.Helper()
	log := &logBuffer{}
	o := Options{Backend: "web", Service: "shop", Gen: 7, World: w, Notify: true, Log: slog.New(slog.NewTextHandler(log, nil))}
	for _, f := range change {
		f(&o)
	}
	m, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	over := make(chan error, 1)
	go func() { over <- m.Run(ctx) }()
	b := &bench{Machine: m, t: t, w: w, log: log}
	b.end = sync.OnceFunc(func() {
		cancel()
		if err := <-over; err != nil {
			t.Errorf("Run: got %v, want nil", err)
		}
	})
	t.Cleanup(b.end)
	return b
}

func (b *bench) begin(r Request) Status {
	b.t.Helper()
	if r.Cause == "" {
		r.Cause = CauseSignal
	}
	st, err := b.Begin(b.t.Context(), r)
	if err != nil {
		b.t.Fatalf("Begin: %v", err)
	}
	return st
}

// ended waits for the end of the drain and returns the last status. Time is virtual, so that the limit
// costs nothing.
func (b *bench) ended() Status {
	b.t.Helper()
	select {
	case <-b.Done():
	case <-time.After(time.Hour):
		b.t.Fatalf("the drain has not ended in an hour: %+v", b.Status())
	}
	return b.Status()
}

// after lets virtual time pass and everything due in it happen.
func after(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func (b *bench) outcome(want Outcome) Status {
	b.t.Helper()
	st := b.ended()
	if st.Outcome != want {
		b.t.Errorf("outcome: got %s, want %s\n%s", st.Outcome, want, b.log)
	}
	return st
}

func (b *bench) order(want ...string) {
	b.t.Helper()
	if got := b.w.names(); !slices.Equal(got, want) {
		b.t.Errorf("calls: got %q, want %q", got, want)
	}
}

func phases(st Status) []Phase {
	var p []Phase
	for _, x := range st.Phases {
		p = append(p, x.Phase)
	}
	return p
}

// budget is the policy of most tests: grace 25 s = wait 17 s + flush 5 s + reserve 3 s.
var budget = Policy{Grace: 25 * time.Second, FlushTimeout: 5 * time.Second, Reserve: 3 * time.Second, OnNew: OnNewRefuse}

func with(f func(*Policy)) Policy {
	p := budget
	f(&p)
	return p
}

var allPhases = []Phase{PhaseBegin, PhaseStopNew, PhaseSettle, PhaseWait, PhaseFlush, PhaseDone}

func TestT1_OrderOfALife(t *testing.T) {
	for _, at := range []NotifyAt{NotifyAtBegin, NotifyAtSettled} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld()
			w.counts = Counts{Known: true, Active: 1, Accepted: 1}
			b := run(t, w)
			b.begin(Request{Policy: with(func(p *Policy) { p.NotifyAt = at })})
			after(4 * time.Second)
			w.set(func(w *world) { w.counts.Active = 0 })
			st := b.outcome(OutcomeDrained)
			if got := phases(st); !slices.Equal(got, allPhases) {
				t.Errorf("phases: got %v, want %v", got, allPhases)
			}
			for i := 1; i < len(st.Phases); i++ {
				if st.Phases[i].At.Before(st.Phases[i-1].At) {
					t.Errorf("phase %s was entered before %s", st.Phases[i].Phase, st.Phases[i-1].Phase)
				}
			}
			var events []Phase
			for _, e := range w.eventsOf(EventPhase) {
				events = append(events, e.Phase)
			}
			if !slices.Equal(events, allPhases[1:]) {
				t.Errorf("phase events: got %v, want %v", events, allPhases[1:])
			}
			notify := w.all("notify")
			if len(notify) != 1 {
				t.Fatalf("notices: got %d, want 1", len(notify))
			}
			settled := st.Phases[3].At.Sub(w.start)
			if at == NotifyAtSettled && notify[0].at < settled {
				t.Errorf("notice at %v, want it after settle at %v", notify[0].at, settled)
			}
			if at == NotifyAtBegin && notify[0].at != 0 {
				t.Errorf("notice at %v, want it at begin", notify[0].at)
			}
			if st.FlushReason != FlushZero || st.FlushResult != FlushOK {
				t.Errorf("flush: got %s, %s, want zero, ok", st.FlushReason, st.FlushResult)
			}
			if st.Ended.Sub(st.Begun) > 7*time.Second {
				t.Errorf("ended after %v, want soon after zero: a drain ends early", st.Ended.Sub(st.Begun))
			}
		})
	}
}

func TestR1_OneFunctionForAllCauses(t *testing.T) {
	var first []string
	for _, cause := range []Cause{CauseSignal, CauseApp, CauseOperator, CausePodDeleted, CausePrestop, CauseVersionUpgrade, CauseHeartbeat} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld()
			b := run(t, w, func(o *Options) { o.NewID = func() string { return "d-1" } })
			b.begin(Request{Cause: cause, Policy: budget})
			b.outcome(OutcomeDrained)
			var seq []string
			for _, e := range w.events {
				if e.Cause != cause {
					t.Errorf("event %s: got cause %q, want %q", e.Type, e.Cause, cause)
				}
				e.Cause, e.Time = "", time.Time{}
				seq = append(seq, fmt.Sprintf("%+v", e))
			}
			if first == nil {
				first = seq
			}
			if !slices.Equal(seq, first) {
				t.Errorf("cause %s: events differ in more than the cause:\n%s\n%s", cause, strings.Join(seq, "\n"), strings.Join(first, "\n"))
			}
		})
	}
}

func TestR2_BeginIsIdempotent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Active: 1}
		b := run(t, w)
		causes := []Cause{CauseOperator, CauseSignal, CausePrestop}
		ids := make([]string, 100)
		got := make([]Cause, 100)
		var wg sync.WaitGroup
		for i := range 100 {
			wg.Go(func() {
				st, err := b.Begin(t.Context(), Request{Cause: causes[i%3], Policy: budget})
				if err != nil {
					t.Error(err)
				}
				ids[i], got[i] = st.ID, st.Cause
			})
		}
		wg.Wait()
		if slices.ContainsFunc(ids, func(id string) bool { return id != ids[0] || id == "" }) {
			t.Errorf("ids: got %q, want one", ids)
		}
		if slices.ContainsFunc(got, func(c Cause) bool { return c != got[0] }) {
			t.Errorf("causes: got %q, want the first one's", got)
		}
		w.set(func(w *world) { w.counts.Active = 0 })
		b.outcome(OutcomeDrained)
		for _, name := range []string{"journal begin", "ready false", "close", "journal flush", "flush", "journal end"} {
			if n := w.count(name); n != 1 {
				t.Errorf("%s: got %d, want 1", name, n)
			}
		}
	})
}

func TestR2_SecondBeginOnlyShortens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Active: 1}
		b := run(t, w)
		first := b.begin(Request{Cause: CauseOperator, Policy: budget})
		after(5 * time.Second)

		later := b.begin(Request{Cause: CauseSignal, Deadline: first.Deadline.Add(time.Minute), Policy: with(func(p *Policy) { p.Grace = time.Hour })})
		if !later.Deadline.Equal(first.Deadline) {
			t.Errorf("deadline: got %v later, want it where it was", later.Deadline.Sub(first.Deadline))
		}
		joined := b.begin(Request{Cause: CauseOperator, Join: true, Policy: with(func(p *Policy) { p.Grace = 9 * time.Second })})
		if !joined.Deadline.Equal(first.Deadline) {
			t.Errorf("a Begin that joins moved the deadline by %v", joined.Deadline.Sub(first.Deadline))
		}
		none := b.begin(Request{})
		if !none.Deadline.Equal(first.Deadline) {
			t.Errorf("a Begin without policy moved the deadline by %v", none.Deadline.Sub(first.Deadline))
		}
		// A deadline without a monotonic reading, as one that came over the wire.
		want := time.Now().Add(10 * time.Second).Round(0)
		sooner := b.begin(Request{Cause: CausePodDeleted, Deadline: want})
		if d := sooner.Deadline.Sub(want); d.Abs() > time.Millisecond {
			t.Errorf("deadline: got %v off, want the earlier one", d)
		}
		if sooner.ID != first.ID || sooner.Cause != CauseOperator {
			t.Errorf("got drain %s cause %s, want %s and the first cause", sooner.ID, sooner.Cause, first.ID)
		}
		if n := len(w.eventsOf(EventShortened)); n != 1 {
			t.Errorf("shortened events: got %d, want 1", n)
		}
		// Half of what was left is left of every slice.
		if got := sooner.Budget.Policy; got.FlushTimeout != 2500*time.Millisecond || got.Reserve != 1500*time.Millisecond {
			t.Errorf("slices: got %v and %v, want half", got.FlushTimeout, got.Reserve)
		}
		if sooner.Budget.Scaled == "" {
			t.Error("the drain does not say that it was scaled")
		}
		// The rule in the kernel ends with the new deadline.
		synctest.Wait()
		untils := get(w, func(w *world) []time.Time { return slices.Clone(w.untils) })
		if len(untils) != 2 || untils[1].Sub(sooner.Deadline) != 10*time.Second {
			t.Errorf("rule ends: got %v, want the second 10 s past the new deadline", untils)
		}
		st := b.outcome(OutcomeExpired)
		if st.Ended.After(sooner.Deadline) {
			t.Errorf("ended %v after the deadline", st.Ended.Sub(sooner.Deadline))
		}
	})
}

func TestR3_JournalThenReadyThenFlipBeforeTheAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Active: 1}
		w.closeTakes = 2 * time.Second // as behind SYN cookies
		b := run(t, w, func(o *Options) { o.Notify = false })
		answered := make(chan Status)
		go func() { answered <- b.begin(Request{Policy: budget}) }()
		after(time.Second)
		select {
		case <-answered:
			t.Fatal("answered before the flip")
		default:
		}
		if st := b.Status(); st.State != StateDraining || st.Admission != AdmissionOpen {
			t.Errorf("while flipping: got %s, %s, want draining and open", st.State, st.Admission)
		}
		st := <-answered
		b.order("journal begin", "ready false", "close")
		if st.Admission != AdmissionClosed || st.Flipped.IsZero() {
			t.Errorf("answer: got admission %s at %v, want closed", st.Admission, st.Flipped)
		}
		if rec := get(w, func(w *world) Record { return w.records[0] }); rec.Drain != st.ID || rec.Type != "begin" || rec.Gen != 7 || rec.Version != 1 {
			t.Errorf("record: got %+v", rec)
		}
	})
}

func TestR3_NoDrainWithoutJournal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.journalErr = errors.New("no space")
		b := run(t, w)
		st, err := b.Begin(t.Context(), Request{Cause: CauseOperator, Policy: budget})
		if !errors.Is(err, ErrJournal) || st.State != StateServing || st.ID != "" {
			t.Errorf("got %v, state %s, drain %q, want ErrJournal and nothing changed", err, st.State, st.ID)
		}
		b.order("journal begin")
		// A stop signal goes on all the same: the process will end anyway.
		st = b.begin(Request{Cause: CauseSignal, Policy: budget, Force: true})
		if len(st.Warnings) == 0 {
			t.Error("no warning that a restart would not resume")
		}
		b.outcome(OutcomeDrained)
		if n := w.count("flush"); n != 1 {
			t.Errorf("flushes: got %d, want 1", n)
		}
	})
}

func TestR5_StaleCommandsAreCountedNoOps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Active: 1}
		b := run(t, w)
		before := b.Status()
		_, e1 := b.Begin(t.Context(), Request{Gen: 6, Policy: budget})
		_, e2 := b.Undrain(t.Context(), 6, "root")
		_, e3 := b.Extend(t.Context(), 6, time.Second, time.Time{}, "root")
		_, e4 := b.Cut(t.Context(), 6, "root")
		for _, err := range []error{e1, e2, e3, e4} {
			if !errors.Is(err, ErrStale) {
				t.Errorf("got %v, want ErrStale", err)
			}
		}
		if n := b.Stale(); n != 4 {
			t.Errorf("stale: got %d, want 4", n)
		}
		if n := len(w.eventsOf(EventStale)); n != 4 {
			t.Errorf("stale events: got %d, want 4", n)
		}
		if st := b.Status(); st.State != before.State || st.ID != "" {
			t.Errorf("got state %s, want it untouched", st.State)
		}
		b.order()
		if st := b.begin(Request{Gen: 7, Policy: budget}); st.State != StateDraining {
			t.Errorf("the right generation: got %s, want draining", st.State)
		}
	})
}

func TestR7_NothingThatArrivesMovesTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Active: 1}
		w.flushed = make(chan struct{})
		b := run(t, w)
		first := b.begin(Request{Policy: budget})
		for range 200 {
			time.Sleep(100 * time.Millisecond)
			b.begin(Request{Cause: CauseHeartbeat, Policy: budget})
			b.Zero()
			w.set(func(w *world) { w.counts.Accepted++ })
		}
		if st := b.Status(); !st.Deadline.Equal(first.Deadline) {
			t.Errorf("deadline: got %v later", st.Deadline.Sub(first.Deadline))
		}
		b.outcome(OutcomeExpired)
		flush, cut, kill := w.all("flush")[0], w.all("cut")[0], w.all("kill")[0]
		// Three timers: the flush and its slice, then the cut, then the end.
		if flush.at != 17*time.Second || cut.at != 22*time.Second {
			t.Errorf("flush at %v and cut at %v, want 17s and 22s", flush.at, cut.at)
		}
		if kill.at < cut.at || kill.at > 25*time.Second {
			t.Errorf("kill at %v, want it inside reserve", kill.at)
		}
	})
}

func TestR8_SurvivorsAreListedBeforeTheFlush(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Active: 1}
		w.list = []Survivor{{Peer: "192.0.2.1:4711", Class: "active", Age: time.Minute, Idle: time.Second, In: 10, Out: 20}}
		b := run(t, w)
		b.begin(Request{Policy: budget})
		st := b.outcome(OutcomeExpired)
		b.order("journal begin", "ready false", "close", "survivors", "journal flush", "flush", "cut", "journal end")
		if !slices.Equal(st.Survivors, w.list) {
			t.Errorf("survivors: got %+v, want %+v", st.Survivors, w.list)
		}
		var seq []string
		for _, e := range w.events {
			if e.Type == EventSurvivors || e.Type == EventFlush || e.Type == EventCut {
				seq = append(seq, e.Type)
			}
		}
		if len(seq) < 3 || seq[0] != EventSurvivors || seq[1] != EventFlush {
			t.Errorf("events: got %v, want the survivors first", seq)
		}
		if r := w.all("flush")[0]; r.at != 17*time.Second || r.arg.(FlushRequest).Reason != FlushDeadline || r.arg.(FlushRequest).TimeLeft != 5*time.Second {
			t.Errorf("flush: got %+v, want reason deadline and a full slice at 17s", r)
		}
	})
}

func TestR8_PolicyDecidesAtTheDeadline(t *testing.T) {
	for _, tt := range []struct {
		policy OnDeadline
		cuts   int
	}{{OnDeadlineCut, 1}, {OnDeadlineReset, 1}, {OnDeadlineLeave, 0}} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld()
			w.counts = Counts{Known: true, Active: 3}
			w.flushed = make(chan struct{})
			b := run(t, w)
			w.onKill = func() { b.Exited(nil) }
			b.begin(Request{Policy: with(func(p *Policy) { p.OnDeadline, p.CloseSpread = tt.policy, 2*time.Second })})
			st := b.outcome(OutcomeExpired)
			cuts := w.all("cut")
			if len(cuts) != tt.cuts {
				t.Fatalf("%s: got %d cuts, want %d", tt.policy, len(cuts), tt.cuts)
			}
			if tt.cuts == 1 {
				r := cuts[0].arg.(CutRequest)
				if r.Method != tt.policy || r.Within > 3*time.Second || r.Drain != st.ID {
					t.Errorf("cut: got %+v", r)
				}
				if want := map[OnDeadline]time.Duration{OnDeadlineCut: 2 * time.Second, OnDeadlineReset: 0}[tt.policy]; r.Spread != want {
					t.Errorf("%s: spread %v, want %v", tt.policy, r.Spread, want)
				}
				if st.Cut == nil || st.Cut.Destroyed != 3 {
					t.Errorf("report: got %+v, want 3 destroyed", st.Cut)
				}
			} else if st.Cut != nil {
				t.Errorf("leave: got a cut report %+v", st.Cut)
			}
			if st.Ended.After(st.Deadline) {
				t.Errorf("%s: ended %v after the deadline", tt.policy, st.Ended.Sub(st.Deadline))
			}
		})
	}
}

func TestR9_OutcomesAreDistinct(t *testing.T) {
	for _, tt := range []struct {
		name   string
		active int64
		do     func(b *bench)
		want   Outcome
		state  State
		errors bool // in the log
	}{
		{"clean", 0, func(*bench) {}, OutcomeDrained, StateDone, false},
		{"stuck", 1, func(*bench) {}, OutcomeExpired, StateDone, false},
		{"killed", 1, func(b *bench) { b.Exited(errors.New("signal: killed")) }, OutcomeLost, StateLost, true},
		{"crash with nothing in flight", 0, func(b *bench) { b.Exited(errors.New("exit status 2")) }, OutcomeDrained, StateDone, true},
		{"told and ended", 1, func(b *bench) { b.Exited(nil) }, OutcomeDrained, StateDone, false},
		{"taken back", 1, func(b *bench) {
			if _, err := b.Undrain(b.t.Context(), 0, "root"); err != nil {
				b.t.Error(err)
			}
		}, OutcomeCancelled, StateServing, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld()
				w.counts = Counts{Known: true, Active: tt.active}
				b := run(t, w)
				over := b.Done()
				b.begin(Request{Policy: budget})
				after(500 * time.Millisecond)
				tt.do(b)
				<-over
				st := b.Status()
				if st.Outcome != tt.want || st.State != tt.state {
					t.Errorf("got %s, %s, want %s, %s", st.Outcome, st.State, tt.want, tt.state)
				}
				ends := w.eventsOf(EventEnd)
				if len(ends) != 1 || ends[0].Outcome != tt.want {
					t.Errorf("end events: got %+v, want one with %s", ends, tt.want)
				}
				b.end()
				if got := strings.Contains(b.log.String(), "level=ERROR"); got != tt.errors {
					t.Errorf("errors in the log: got %v, want %v\n%s", got, tt.errors, b.log)
				}
			})
		})
	}
}

func TestR9_ExitWithoutNoticeAndInFlightIsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Active: 1}
		b := run(t, w, func(o *Options) { o.Notify = false })
		b.begin(Request{Policy: budget})
		after(time.Second)
		b.Exited(nil)
		b.outcome(OutcomeLost)
		if n := w.count("flush"); n != 0 {
			t.Errorf("flushes: got %d, want none to a dead application", n)
		}
	})
}

// An application that somebody else has told to stop is not told of the drain, and has done what it was asked when it ends
// cleanly, whatever was in flight at the last look.
func TestR9_ToldBySomebodyElse(t *testing.T) {
	for _, failed := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld()
			w.counts = Counts{Known: true, Active: 1}
			b := run(t, w)
			b.begin(Request{Policy: budget, Told: true})
			after(time.Second)
			if n := w.count("notify"); n != 0 {
				t.Errorf("notices: got %d, want none", n)
			}
			if failed {
				b.Exited(errors.New("exit status 2"))
				b.outcome(OutcomeLost)
				return
			}
			b.Exited(nil)
			b.outcome(OutcomeDrained)
		})
	}
}

// One that has heard by another way than the notice is given the notice all the same, and counts as told.
func TestR9_ToldByAnotherWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Active: 1}
		b := run(t, w, func(o *Options) { o.Notify = false })
		if err := b.Told(t.Context(), "another drain"); err != nil {
			t.Fatal(err)
		}
		st := b.begin(Request{Policy: budget})
		if err := b.Told(t.Context(), st.ID); err != nil {
			t.Fatal(err)
		}
		b.Exited(nil)
		b.outcome(OutcomeDrained)
	})
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Active: 1}
		b := run(t, w)
		st := b.begin(Request{Policy: with(func(p *Policy) { p.NotifyAt = NotifyAtSettled })})
		if err := b.Told(t.Context(), st.ID); err != nil {
			t.Fatal(err)
		}
		after(3 * time.Second)
		if n := w.count("notify"); n != 1 {
			t.Errorf("notices: got %d, want 1", n)
		}
	})
}

func TestR10_PollSeesZeroWithoutTheEvent(t *testing.T) {
	for _, hint := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld()
			w.counts = Counts{Known: true, Active: 1}
			b := run(t, w)
			b.begin(Request{Policy: budget})
			after(10*time.Second + 30*time.Millisecond)
			w.set(func(w *world) { w.counts.Active = 0 })
			zero := time.Since(w.start)
			if hint {
				b.Zero()
			}
			b.outcome(OutcomeDrained)
			late := w.all("flush")[0].at - zero - time.Second // quiet_period
			limit := pollFloor
			if hint {
				limit = 5 * time.Millisecond
			}
			if late < 0 || late > limit {
				t.Errorf("hint %v: flush %v after zero and quiet_period, want at most %v", hint, late, limit)
			}
			if n := len(w.eventsOf(EventProgress)); n != 2 {
				t.Errorf("progress events in 11 s: got %d, want 2", n)
			}
			e := w.eventsOf(EventProgress)[0]
			if e.Fields["in_flight"] != int64(1) || e.Fields["counts"].(map[string]int64)["active"] != 1 {
				t.Errorf("progress: got %+v, want the counts by class", e.Fields)
			}
		})
	}
}

func TestR10_PollFollowsTheCostOfALook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Active: 1}
		w.lookTakes = 50 * time.Millisecond
		b := run(t, w)
		b.begin(Request{Policy: budget})
		after(11 * time.Second)
		// One look each 50 ms + 10 × 50 ms.
		if n := w.count("look"); n < 19 || n > 22 {
			t.Errorf("looks in 11 s: got %d, want one each 550 ms", n)
		}
		before := w.count("look")
		for range 10000 {
			b.Zero()
		}
		after(100 * time.Millisecond)
		if n := w.count("look") - before; n > 3 {
			t.Errorf("a storm of hints made %d looks in 100 ms", n)
		}
	})
}

func TestR17_SpreadFitsTheReserve(t *testing.T) {
	if _, err := Validate(with(func(p *Policy) { p.CloseSpread = 4 * time.Second })); !errors.Is(err, ErrPolicy) {
		t.Errorf("spread 4s of reserve 3s: got %v, want ErrPolicy", err)
	}
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Active: 1000}
		w.flushed = make(chan struct{})
		b := run(t, w)
		// The kill time is nearer than grace, so that the spread has to shrink with the reserve.
		st := b.begin(Request{Policy: with(func(p *Policy) { p.CloseSpread = 3 * time.Second }), Deadline: time.Now().Add(10 * time.Second)})
		b.ended()
		c := w.all("cut")[0]
		r := c.arg.(CutRequest)
		if r.Spread > r.Within || c.at+r.Within > 10*time.Second || r.Spread <= 0 {
			t.Errorf("cut at %v within %v spread over %v, want it inside the deadline of 10s (%v)", c.at, r.Within, r.Spread, st.Budget)
		}
	})
}

func TestR22_HoldsKeepTheFlush(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		b := run(t, w)
		b.SetHolds(1, []string{"nightly-export"})
		b.begin(Request{Policy: budget})
		after(12 * time.Second)
		if n := w.count("flush"); n != 0 {
			t.Fatal("flushed with a hold")
		}
		st := b.Status()
		if len(st.Blocks) != 1 || st.Blocks[0] != (Block{"hold", 1}) || !slices.Equal(st.HeldBy, []string{"nightly-export"}) {
			t.Errorf("blocks: got %+v by %v, want the hold", st.Blocks, st.HeldBy)
		}
		if !strings.Contains(b.log.String(), "nightly-export") {
			t.Error("the log does not name the hold")
		}
		released := time.Since(w.start)
		b.SetHolds(0, nil)
		b.outcome(OutcomeDrained)
		if d := w.all("flush")[0].at - released; d > 10*time.Millisecond {
			t.Errorf("flush %v after the release, want at once", d)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		b := run(t, w)
		b.SetHolds(1, nil)
		b.begin(Request{Policy: budget})
		st := b.outcome(OutcomeExpired)
		if st.FlushReason != FlushDeadline || w.all("flush")[0].at != 17*time.Second {
			t.Errorf("a hold past the wait slice: got reason %s at %v, want deadline at 17s", st.FlushReason, w.all("flush")[0].at)
		}
	})
}

// A hold that the machine has not heard of yet keeps the flush too.
func TestR22_HoldThatIsNotKnownYetKeepsTheFlush(t *testing.T) {
	for _, at := range []FlushReason{FlushZero, FlushDeadline} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld()
			w.refuse = ErrHeld
			b := run(t, w)
			b.begin(Request{Policy: budget})
			after(12 * time.Second)
			if n := w.count("journal flush"); n < 2 {
				t.Errorf("got %d attempts to flush, want one with each look", n)
			}
			if st := b.Status(); w.count("flush") != 0 || st.State != StateDraining || st.Phase != PhaseWait || st.FlushReason != "" {
				t.Fatalf("got %s in %s, flush %q, want to wait", st.State, st.Phase, st.FlushReason)
			}
			outcome, sent := OutcomeExpired, 17*time.Second
			if at == FlushZero {
				outcome, sent = OutcomeDrained, 12*time.Second
				w.set(func(w *world) { w.refuse = nil })
				b.SetHolds(0, nil)
			}
			st := b.outcome(outcome)
			if f := w.all("flush"); len(f) != 1 || st.FlushReason != at || f[0].at < sent || f[0].at > sent+10*time.Millisecond {
				t.Errorf("got flushes %+v for %s, want one at %v for %s", f, st.FlushReason, sent, at)
			}
			n := 0
			for _, r := range w.records {
				if r.Type == recordFlush {
					n++
				}
			}
			if n != 1 {
				t.Errorf("got %d records of the flush, want 1", n)
			}
		})
	}
}

func TestD4_UnknownIsNeverZero(t *testing.T) {
	for name, set := range map[string]func(*world){
		"unknown":  func(w *world) { w.counts = Counts{} },
		"error":    func(w *world) { w.lookErr = errors.New("no such device") },
		"hangs":    func(w *world) { w.hangLook = true },
		"negative": func(w *world) { w.counts = Counts{Known: true, Active: -1} },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld()
				w.flushed = make(chan struct{})
				b := run(t, w)
				b.begin(Request{Policy: budget})
				after(500 * time.Millisecond)
				w.set(set)
				after(12 * time.Second)
				if st := b.Status(); st.InFlight != nil || st.Counts.Known || len(st.Blocks) == 0 || st.Blocks[0].Class != "unknown" {
					t.Errorf("got in flight %v, blocks %v, want unknown", st.InFlight, st.Blocks)
				}
				st := b.outcome(OutcomeExpired)
				if f := w.all("flush"); len(f) != 1 || f[0].at != 17*time.Second || st.FlushReason != FlushDeadline {
					t.Errorf("flush: got %+v, %s, want one at 17s by deadline", f, st.FlushReason)
				}
				if n := w.count("cut"); n != 1 {
					t.Errorf("cuts: got %d, want 1: what is unknown may be there", n)
				}
			})
		})
	}
}

func TestD6_OneBoundedExtension(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Active: 1}
		b := run(t, w)
		st := b.begin(Request{Policy: budget})
		limit := st.Deadline.Add(4 * time.Second)
		after(2 * time.Second)
		st, err := b.Extend(t.Context(), 7, 10*time.Second, limit, "app")
		if err != nil || !st.Deadline.Equal(limit) {
			t.Errorf("got %v, %v, want the cap", st.Deadline, err)
		}
		for range 3 {
			if _, err := b.Extend(t.Context(), 7, 10*time.Second, limit, "app"); !errors.Is(err, ErrLimit) {
				t.Errorf("at the cap: got %v, want ErrLimit", err)
			}
		}
		if _, err := b.Extend(t.Context(), 7, -time.Second, limit, "app"); !errors.Is(err, ErrLimit) {
			t.Errorf("a negative one: got %v, want ErrLimit", err)
		}
		b.outcome(OutcomeExpired)
		if f := w.all("flush")[0]; f.at != 21*time.Second {
			t.Errorf("flush at %v, want 21s", f.at)
		}
		if n := w.count("journal extend"); n != 1 {
			t.Errorf("extend records: got %d, want 1", n)
		}
	})
}

func TestExtendIsRefusedByFlushAndJournal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Active: 1}
		w.flushed = make(chan struct{})
		b := run(t, w)
		if _, err := b.Extend(t.Context(), 0, time.Second, time.Time{}, "root"); !errors.Is(err, ErrNotDraining) {
			t.Errorf("serving: got %v, want ErrNotDraining", err)
		}
		st := b.begin(Request{Policy: budget})
		w.set(func(w *world) { w.journalErr = errors.New("no space") })
		got, err := b.Extend(t.Context(), 0, time.Second, time.Time{}, "root")
		if !errors.Is(err, ErrJournal) || !got.Deadline.Equal(st.Deadline) || !got.FlushBy.Equal(st.FlushBy) {
			t.Errorf("got %v, deadline moved %v, want ErrJournal and nothing moved", err, got.Deadline.Sub(st.Deadline))
		}
		w.set(func(w *world) { w.journalErr = nil })
		after(18 * time.Second)
		if _, err := b.Extend(t.Context(), 0, time.Second, time.Time{}, "root"); !errors.Is(err, ErrFlushing) {
			t.Errorf("flushing: got %v, want ErrFlushing", err)
		}
		if _, err := b.Undrain(t.Context(), 0, "root"); !errors.Is(err, ErrFlushing) {
			t.Errorf("flushing: got %v, want ErrFlushing", err)
		}
	})
}

func TestExtendWhileFlipping(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Active: 1}
		w.closeTakes = 2 * time.Second
		b := run(t, w)
		go b.Begin(t.Context(), Request{Cause: CauseSignal, Policy: budget})
		after(time.Second)
		st, err := b.Extend(t.Context(), 0, 30*time.Second, time.Time{}, "root")
		if err != nil {
			t.Fatal(err)
		}
		after(5 * time.Second)
		untils := get(w, func(w *world) []time.Time { return slices.Clone(w.untils) })
		if len(untils) != 2 || untils[1].Sub(st.Deadline) != 10*time.Second {
			t.Errorf("rule ends: got %v, want the last 10 s past the extended deadline", untils)
		}
	})
}

func TestExtendWhileSurvivorsAreListed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Active: 1}
		w.listTakes = 80 * time.Millisecond
		w.list = []Survivor{{Peer: "192.0.2.1:1"}}
		b := run(t, w)
		b.begin(Request{Policy: budget})
		after(17*time.Second - 50*time.Millisecond)
		if w.count("survivors") != 1 || w.count("flush") != 0 {
			t.Fatalf("got %v, want the list on its way and no flush", w.names())
		}
		if _, err := b.Extend(t.Context(), 0, 5*time.Second, time.Time{}, "root"); err != nil {
			t.Fatal(err)
		}
		after(4 * time.Second)
		if n := w.count("flush"); n != 0 {
			t.Error("flushed at the deadline from before the extension")
		}
		st := b.outcome(OutcomeExpired)
		if n := w.count("survivors"); n != 2 || len(st.Survivors) != 1 || w.all("flush")[0].at != 22*time.Second {
			t.Errorf("got %d lists, %d survivors, flush at %v, want a second list and the flush at 22s", n, len(st.Survivors), w.all("flush")[0].at)
		}
	})
}

func TestD14_UndrainOpensANewEpoch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Active: 1}
		b := run(t, w)
		over := b.Done()
		first := b.begin(Request{Policy: budget})
		after(3 * time.Second)
		st, err := b.Undrain(t.Context(), 7, "root")
		if err != nil || st.State != StateServing || st.Outcome != OutcomeCancelled || st.Admission != AdmissionOpen {
			t.Fatalf("got %v, %s, %s, %s, want serving, cancelled, open", err, st.State, st.Outcome, st.Admission)
		}
		<-over
		b.order("journal begin", "ready false", "close", "open", "journal undrain", "ready true")
		if _, err := b.Undrain(t.Context(), 7, "root"); !errors.Is(err, ErrNotDraining) {
			t.Errorf("a second undrain: got %v, want ErrNotDraining", err)
		}
		select {
		case <-b.Done():
			t.Error("Done of the next drain is closed already")
		default:
		}
		second := b.begin(Request{Policy: budget})
		if second.ID == first.ID || second.ID == "" {
			t.Errorf("ids: got %q then %q, want another", first.ID, second.ID)
		}
		if n := second.Deadline.Sub(second.Begun); n != 25*time.Second {
			t.Errorf("budget of the second: got %v, want all of it", n)
		}
		b.outcome(OutcomeExpired)
		if n := w.count("notify"); n != 2 {
			t.Errorf("notices: got %d, want one for each drain", n)
		}
	})
}

func TestD14_UndrainRacesZero(t *testing.T) {
	for i := range 40 {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld()
			b := run(t, w)
			over := b.Done()
			b.begin(Request{Policy: with(func(p *Policy) { p.QuietPeriod = 200 * time.Millisecond })})
			time.Sleep(200*time.Millisecond + time.Duration(i-20)*100*time.Microsecond)
			b.Zero()
			_, err := b.Undrain(t.Context(), 0, "root")
			<-over
			ends, flushes := w.eventsOf(EventEnd), w.count("flush")
			if len(ends) != 1 {
				t.Fatalf("outcomes: got %+v, want exactly one", ends)
			}
			switch {
			case err == nil && ends[0].Outcome == OutcomeCancelled && flushes == 0:
			case (errors.Is(err, ErrFlushing) || errors.Is(err, ErrNotDraining)) && ends[0].Outcome == OutcomeDrained && flushes == 1:
			default:
				t.Errorf("undrain %v, outcome %s, %d flushes: they contradict", err, ends[0].Outcome, flushes)
			}
		})
	}
}

func TestD14_UndrainWaitsForTheFlip(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Active: 1}
		w.closeTakes = 2 * time.Second
		b := run(t, w, func(o *Options) { o.Notify = false })
		go b.Begin(t.Context(), Request{Cause: CauseSignal, Policy: budget})
		after(time.Second)
		st, err := b.Undrain(t.Context(), 0, "root")
		if err != nil || st.State != StateServing {
			t.Fatalf("got %v, %s, want serving", err, st.State)
		}
		b.order("journal begin", "ready false", "close", "open", "journal undrain", "ready true")
	})
}

// A World that does not hear the end of its contexts must not let one drain leak into the next.
func TestD14_LateResultsOfAnEarlierEpoch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.deaf, w.lookTakes = true, 3*time.Second
		b := run(t, w)
		b.begin(Request{Policy: with(func(p *Policy) { p.Idle = IdleWait })})
		after(time.Second)
		if _, err := b.Undrain(t.Context(), 0, "root"); err != nil {
			t.Fatal(err)
		}
		w.set(func(w *world) { w.counts.Active, w.lookTakes = 1, 0 })
		b.begin(Request{Policy: budget})
		after(2 * time.Second) // the zero of the first drain's look comes in
		if st := b.Status(); st.InFlight != nil && *st.InFlight != 1 {
			t.Errorf("in flight: got %d from the look of an earlier drain", *st.InFlight)
		}
		after(time.Second)
		if st := b.Status(); st.InFlight == nil || *st.InFlight != 1 {
			t.Errorf("in flight: got %v, want looks of the second drain", st.InFlight)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts.Active = 1
		w.deaf, w.closeTakes = true, 20*time.Second
		b := run(t, w)
		b.begin(Request{Policy: budget}) // answered when the flip is given up
		if _, err := b.Undrain(t.Context(), 0, "root"); err != nil {
			t.Fatal(err)
		}
		after(20 * time.Second) // the flip of the drain that was taken back happens after all
		if n := w.names(); n[len(n)-1] != "open" || n[len(n)-2] != "close" {
			t.Errorf("calls: got %q, want admission opened after the late flip", n)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts.Active = 1
		w.deaf, w.closeTakes = true, 8*time.Second
		b := run(t, w)
		b.begin(Request{Policy: budget})
		if _, err := b.Undrain(t.Context(), 0, "root"); err != nil {
			t.Fatal(err)
		}
		st := b.begin(Request{Policy: budget}) // cannot flip beside the first
		after(20 * time.Second)
		untils := get(w, func(w *world) []time.Time { return slices.Clone(w.untils) })
		if len(untils) != 2 || untils[1].Sub(st.Deadline) != 10*time.Second {
			t.Errorf("rule ends: got %v, want the second drain's own flip last", untils)
		}
	})
}

func TestR8_LateListIsLeftOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts.Active = 1
		w.deaf, w.listTakes, w.flushed = true, 2*time.Second, make(chan struct{})
		w.list = []Survivor{{Peer: "192.0.2.1:1"}}
		b := run(t, w)
		b.begin(Request{Policy: budget})
		st := b.outcome(OutcomeExpired)
		if f := w.all("flush")[0]; f.at != 17*time.Second {
			t.Errorf("flush at %v, want it in time without the list", f.at)
		}
		if len(st.Survivors) != 0 || !slices.ContainsFunc(st.Warnings, func(s string) bool { return strings.Contains(s, "survivors could not be listed") }) {
			t.Errorf("got %d survivors, warnings %q, want none and a warning", len(st.Survivors), st.Warnings)
		}
	})
}

func TestD4_OneHungLookDoesNotBlindTheDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.hangLook = true
		b := run(t, w)
		b.begin(Request{Policy: budget})
		after(time.Second)
		w.set(func(w *world) { w.hangLook = false })
		st := b.outcome(OutcomeDrained)
		if took := st.Ended.Sub(st.Begun); took > 10*time.Second {
			t.Errorf("took %v, want looks again soon after the one that hung", took)
		}
	})
}

func TestForcedBeginUsesTheDefaultPolicy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		b := run(t, w)
		bad := Policy{Grace: time.Second}
		if _, err := b.Begin(t.Context(), Request{Policy: bad}); !errors.Is(err, ErrPolicy) {
			t.Errorf("got %v, want ErrPolicy", err)
		}
		st := b.begin(Request{Policy: bad, Force: true})
		if st.Budget.Policy.Grace != DefaultGrace || len(st.Warnings) != 1 {
			t.Errorf("forced: got %v, warnings %q, want the default and a warning", st.Budget, st.Warnings)
		}
	})
}

func TestUndrainThatCannotOpenLeavesTheDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.openErr = errors.New("map is gone")
		b := run(t, w)
		b.begin(Request{Policy: budget})
		after(300 * time.Millisecond)
		if st, err := b.Undrain(t.Context(), 0, "root"); err == nil || st.State != StateDraining {
			t.Errorf("got %v, %s, want an error and the drain as it was", err, st.State)
		}
		w.set(func(w *world) { w.openErr, w.journalErr = nil, errors.New("no space") })
		if st, err := b.Undrain(t.Context(), 0, "root"); !errors.Is(err, ErrJournal) || st.State != StateDraining {
			t.Errorf("got %v, %s, want ErrJournal and the drain as it was", err, st.State)
		}
		synctest.Wait()
		if n := w.names(); n[len(n)-1] != "close" {
			t.Errorf("calls: got %q, want admission closed again at the end", n)
		}
		b.outcome(OutcomeDrained)
	})
}

func TestT3_AdmitUntilArrivalsPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		b := run(t, w)
		st := b.begin(Request{Policy: with(func(p *Policy) { p.OnNew = OnNewAuto })})
		if st.OnNew != OnNewAdmit || st.OnNewWhy == "" || st.Admission != AdmissionOpen || get(w, func(w *world) bool { return w.ready }) {
			t.Errorf("begin: got %s (%s), %s, want admit, open and not ready", st.OnNew, st.OnNewWhy, st.Admission)
		}
		for range 30 { // a balancer that stops after 3 s
			w.set(func(w *world) { w.counts.Accepted++ })
			after(100 * time.Millisecond)
			if n := w.count("close"); n != 0 {
				t.Fatalf("flipped while connections arrive")
			}
		}
		b.outcome(OutcomeDrained)
		flip := w.all("close")[0].at
		if flip < 3*time.Second+900*time.Millisecond || flip > 4500*time.Millisecond {
			t.Errorf("flip at %v, want one quiet_period after the last arrival at 2.9s", flip)
		}
	})
}

func TestC48_QuietPeriodFollowsTheArrivals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		b := run(t, w)
		b.begin(Request{Policy: with(func(p *Policy) { p.OnNew, p.AdmitFor = OnNewAdmit, 6*time.Second })})
		stop := make(chan struct{})
		done := make(chan struct{})
		go func() { // a balancer that does not stop
			defer close(done)
			for {
				select {
				case <-stop:
					return
				case <-time.After(50 * time.Millisecond):
					w.set(func(w *world) { w.counts.Accepted++ })
				}
			}
		}()
		after(5900 * time.Millisecond)
		if n := w.count("close"); n != 0 {
			t.Error("flipped while connections arrive")
		}
		after(200 * time.Millisecond)
		if c := w.all("close"); len(c) != 1 || c[0].at != 6*time.Second {
			t.Errorf("flip: got %+v, want it when admit_for is over at 6s", c)
		}
		close(stop)
		<-done
		b.outcome(OutcomeDrained)
	})
}

func TestT8_ThereIsAlwaysADeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Active: 1}
		w.flushed = make(chan struct{}) // ignores its signal
		w.cutRep = CutReport{Left: 1}   // and cannot be cut
		w.killErr = errors.New("no such process")
		b := run(t, w)
		b.begin(Request{}) // no policy at all
		st := b.outcome(OutcomeExpired)
		if took := st.Ended.Sub(st.Begun); took > DefaultGrace {
			t.Errorf("took %v, want at most the default grace", took)
		}
	})
}

func TestC2_EndlessStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Active: 1}
		w.list = []Survivor{{Peer: "192.0.2.9:1"}}
		b := run(t, w)
		b.begin(Request{Policy: budget})
		st := b.outcome(OutcomeExpired)
		if len(st.Survivors) != 1 || st.Ended.After(st.Deadline) {
			t.Errorf("got %d survivors, ended %v before the deadline, want 1 in time", len(st.Survivors), st.Deadline.Sub(st.Ended))
		}
	})
}

func TestT10_ZeroCountsOnlyWhileAdmissionIsClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		b := run(t, w)
		for range 20 { // zero before the drain
			b.Zero()
			after(time.Second)
		}
		if n := w.count("look"); n != 0 {
			t.Errorf("looks before a drain: got %d, want none", n)
		}
		// Zero all along while new ones are admitted: it counts from the flip on only.
		w.set(func(w *world) { w.start = time.Now() })
		b.begin(Request{Policy: with(func(p *Policy) { p.OnNew, p.QuietPeriod = OnNewAdmit, 2*time.Second })})
		b.outcome(OutcomeDrained)
		flip, flush := w.all("close")[0].at, w.all("flush")[0].at
		if flush-flip < 2*time.Second {
			t.Errorf("flush %v after the flip, want a whole quiet_period", flush-flip)
		}
	})
}

func TestT10_UnguardedZeroNeedsAPauseOfArrivals(t *testing.T) {
	for name, change := range map[string]func(*Options, *world){
		"none":    func(o *Options, _ *world) { o.Unguarded = true },
		"refused": func(_ *Options, w *world) { w.closeErr = ErrUnguarded },
		"failed":  func(_ *Options, w *world) { w.closeErr = errors.New("operation not permitted") },
		"hangs":   func(_ *Options, w *world) { w.hangClose = true },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld()
				b := run(t, w, func(o *Options) { change(o, w) })
				b.begin(Request{Policy: budget})
				for range 80 { // short ones, which no look sees in flight
					after(100 * time.Millisecond)
					w.set(func(w *world) { w.counts.Accepted++ })
				}
				last := time.Since(w.start)
				if n := w.count("flush"); n != 0 {
					t.Fatal("flushed while connections arrive")
				}
				st := b.outcome(OutcomeDrained)
				if !st.Unguarded || st.UnguardedWhy == "" || st.Admission != AdmissionUnguarded {
					t.Errorf("got unguarded %v (%s), %s, want the label", st.Unguarded, st.UnguardedWhy, st.Admission)
				}
				// Where refusal cannot even be tried they were admitted, hence not late.
				if (st.Late == 0) != (name == "none") {
					t.Errorf("late: got %d", st.Late)
				}
				if f := w.all("flush")[0].at; f-last < time.Second {
					t.Errorf("flush %v after the last arrival, want quiet_period", f-last)
				}
				if name == "none" && w.count("close") != 0 {
					t.Error("CloseAdmission was called without a way to close")
				}
			})
		})
	}
}

func TestT11_LateSubscriberSeesTheLevel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Active: 1}
		b := run(t, w)
		b.begin(Request{Policy: budget})
		after(5 * time.Second)
		if st := b.Status(); st.Phase != PhaseWait || st.State != StateDraining || *st.InFlight != 1 {
			t.Errorf("mid-drain: got %s, %s, want wait", st.Phase, st.State)
		}
		// A subscriber that follows the changes misses no end.
		w.set(func(w *world) { w.counts.Active = 0 })
		var seen []Phase
		for {
			changed := b.Changed()
			st := b.Status()
			if len(seen) == 0 || seen[len(seen)-1] != st.Phase {
				seen = append(seen, st.Phase)
			}
			if st.Over() {
				break
			}
			<-changed
		}
		if seen[0] != PhaseWait || seen[len(seen)-1] != PhaseDone {
			t.Errorf("seen: got %v, want from wait to done", seen)
		}
		if st := b.begin(Request{Policy: budget}); st.Outcome != OutcomeDrained || w.count("flush") != 1 {
			t.Errorf("a Begin after the end: got %s, want the finished status", st.Outcome)
		}
	})
}

func TestT12_FlushAndReserveAreKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Active: 1}
		w.flushed = make(chan struct{})
		b := run(t, w)
		b.begin(Request{Policy: budget})
		after(17 * time.Second)
		// The stuck one ends inside the flush slice, the application a second later.
		after(2 * time.Second)
		w.set(func(w *world) { w.counts.Active = 0 })
		after(time.Second)
		close(w.flushed)
		st := b.outcome(OutcomeExpired)
		b.order("journal begin", "ready false", "close", "survivors", "journal flush", "flush", "journal end")
		if d := st.Ended.Sub(st.Begun); d < 20*time.Second || d > 20*time.Second+200*time.Millisecond {
			t.Errorf("ended after %v, want as soon as the application had ended at 20s", d)
		}
		if st.FlushResult != FlushOK {
			t.Errorf("flush result: got %s, want ok", st.FlushResult)
		}
	})
}

func TestT12_KillIsLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.flushed = make(chan struct{})
		b := run(t, w)
		b.begin(Request{Policy: budget})
		after(10 * time.Second)
		if st := b.Status(); st.State != StateFlushing || st.FlushResult != FlushTimeout || st.Killed {
			t.Errorf("after the flush slice: got %s, %s, killed %v, want a timeout and patience", st.State, st.FlushResult, st.Killed)
		}
		st := b.outcome(OutcomeDrained)
		b.order("journal begin", "ready false", "close", "journal flush", "flush", "kill", "journal end")
		if k := w.all("kill")[0].at; k < 22*time.Second || k > 25*time.Second {
			t.Errorf("kill at %v, want it inside reserve", k)
		}
		if !st.Killed {
			t.Error("the status does not say that the application was killed")
		}
	})
}

func TestT12_BytesOnTheirWayAreWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Active: 1}
		b := run(t, w) // Flush returns at once: the application has exited
		b.begin(Request{Policy: budget})
		after(19 * time.Second)
		if st := b.Status(); st.State != StateFlushing {
			t.Fatalf("got %s, want it to wait for the bytes that the kernel delivers", st.State)
		}
		w.set(func(w *world) { w.counts = Counts{Known: true, Closing: 1} })
		b.outcome(OutcomeExpired)
		if n := w.count("cut"); n != 0 {
			t.Errorf("cuts: got %d, want none", n)
		}
	})
}

func TestT12_FlushThatCannotBeDelivered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.flushErr = errors.New("connection refused")
		b := run(t, w)
		w.onKill = func() { b.Exited(errors.New("signal: killed")) }
		b.begin(Request{Policy: budget})
		st := b.outcome(OutcomeDrained)
		if st.FlushResult != FlushFailed || w.count("flush") != 1 || w.count("kill") != 1 {
			t.Errorf("got %s, %v, want failed, once, then the kill", st.FlushResult, w.names())
		}
		if st.Ended.Sub(st.Begun) > 10*time.Second {
			t.Errorf("ended after %v: waiting for an application that has not heard", st.Ended.Sub(st.Begun))
		}
	})
}

func TestT13_KillTimeScalesTheSlices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Active: 1}
		w.flushed = make(chan struct{})
		b := run(t, w)
		st := b.begin(Request{Policy: budget, Deadline: time.Now().Add(10 * time.Second)})
		p := st.Budget.Policy
		if p.Grace != 10*time.Second || p.FlushTimeout != 2*time.Second || p.Reserve != 1200*time.Millisecond || st.Budget.Wait != 6800*time.Millisecond {
			t.Errorf("slices: got %v", st.Budget)
		}
		if !strings.Contains(st.Budget.Scaled, "10s of 25s") || !strings.Contains(b.log.String(), "10s of 25s") {
			t.Errorf("said: got %q, want both totals", st.Budget.Scaled)
		}
		st = b.outcome(OutcomeExpired)
		if f := w.all("flush")[0].at; f != 6800*time.Millisecond {
			t.Errorf("flush at %v, want 6.8s", f)
		}
		if st.Ended.Sub(st.Begun) > 10*time.Second {
			t.Errorf("ended after %v, want at most 10s", st.Ended.Sub(st.Begun))
		}
	})
}

func TestT13_TimeSpentInPrestopIsSubtracted(t *testing.T) {
	for _, tt := range []struct{ spent, wait, flush, reserve time.Duration }{
		{7 * time.Second, 10 * time.Second, 5 * time.Second, 3 * time.Second},
		{21 * time.Second, 0, 2500 * time.Millisecond, 1500 * time.Millisecond},
		{time.Minute, 0, 62500 * time.Microsecond, 37500 * time.Microsecond},
	} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld()
			w.counts = Counts{Known: true, Active: 1}
			w.flushed = make(chan struct{})
			b := run(t, w)
			st := b.begin(Request{Policy: budget, Spent: tt.spent})
			p := st.Budget.Policy
			if st.Budget.Wait != tt.wait || p.FlushTimeout != tt.flush || p.Reserve != tt.reserve || st.Budget.Scaled == "" {
				t.Errorf("spent %v: got %v, want wait %v, flush %v, reserve %v", tt.spent, st.Budget, tt.wait, tt.flush, tt.reserve)
			}
			b.outcome(OutcomeExpired)
			if w.count("flush") != 1 || w.count("survivors") != 1 {
				t.Errorf("got %v, want survivors and one flush however late", w.names())
			}
		})
	}
}

func TestC16_SecondStopSignalIsHarmless(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Active: 1}
		b := run(t, w)
		b.begin(Request{Policy: budget})
		after(time.Second)
		before := w.names()
		b.begin(Request{Policy: budget})
		if got := w.names(); !slices.Equal(got, before) {
			t.Errorf("the second did something: %q", got[len(before):])
		}
		if !strings.Contains(b.log.String(), "1 active") {
			t.Error("the second does not log what is left")
		}
	})
}

func TestC30_QuietPeriod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Active: 1, Accepted: 1}
		b := run(t, w)
		b.begin(Request{Policy: with(func(p *Policy) { p.QuietPeriod = 4 * time.Second })})
		after(time.Second)
		w.set(func(w *world) { w.counts.Active, w.counts.Idle = 0, 1 })
		b.Zero()
		after(2 * time.Second)
		w.set(func(w *world) { w.counts.Active, w.counts.Idle = 1, 0 }) // a request on the kept connection
		after(500 * time.Millisecond)
		w.set(func(w *world) { w.counts.Active, w.counts.Idle = 0, 1 })
		b.outcome(OutcomeDrained)
		if f := w.all("flush")[0].at; f < 7500*time.Millisecond || f > 7700*time.Millisecond {
			t.Errorf("flush at %v, want 4s after the last request ended at 3.5s", f)
		}
	})
}

func TestSettleWaitsForQueuesAndHalfOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Active: 1}
		w.pend = Pending{Queued: 3, HalfOpen: 2}
		b := run(t, w)
		b.begin(Request{Policy: with(func(p *Policy) { p.NotifyAt = NotifyAtSettled })})
		after(400 * time.Millisecond)
		if st := b.Status(); st.Phase != PhaseSettle || st.Pending != w.pend || w.count("notify") != 0 {
			t.Errorf("got %s, %+v, want settle", st.Phase, st.Pending)
		}
		w.set(func(w *world) { w.pend = Pending{HalfOpen: 1} })
		after(400 * time.Millisecond)
		if st := b.Status(); st.Phase != PhaseSettle {
			t.Errorf("with a half-open request: got %s, want settle", st.Phase)
		}
		w.set(func(w *world) { w.pend = Pending{} })
		after(200 * time.Millisecond)
		if st := b.Status(); st.Phase != PhaseWait || len(st.Warnings) != 0 || w.count("notify") != 1 {
			t.Errorf("got %s, warnings %q, want wait", st.Phase, st.Warnings)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Queued: 9}
		w.pend = Pending{Queued: 9}
		b := run(t, w)
		b.begin(Request{Policy: budget})
		after(3100 * time.Millisecond)
		st := b.Status()
		if st.Phase != PhaseWait || len(st.Warnings) != 1 || !strings.Contains(st.Warnings[0], "9 connections in accept queues") {
			t.Errorf("got %s, %q, want wait after 3s with what is left", st.Phase, st.Warnings)
		}
	})
}

func TestRetireFollowsEveryLookInWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Active: 1, Idle: 50}
		b := run(t, w)
		b.begin(Request{Policy: with(func(p *Policy) { p.Protocol = ProtocolHTTP1 })})
		after(3 * time.Second)
		st := b.Status()
		if st.Retired != 50 {
			t.Errorf("retired: got %d, want 50", st.Retired)
		}
		waited := st.Phases[3].At.Sub(w.start)
		looks := 0
		for _, c := range w.all("look") {
			if c.at >= waited {
				looks++
			}
		}
		if n := w.count("retire"); n < looks-1 || n > looks+1 {
			t.Errorf("retires: got %d, want one after each of %d looks", n, looks)
		}
		w.set(func(w *world) { w.counts.Active = 0 })
		b.outcome(OutcomeDrained)
	})
}

func TestIdlePolicies(t *testing.T) {
	for _, tt := range []struct {
		idle IdlePolicy
		want Outcome
	}{{IdleIgnore, OutcomeDrained}, {IdleWait, OutcomeExpired}} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld()
			w.counts = Counts{Known: true, Idle: 5, Unused: 2, Closing: 3}
			b := run(t, w)
			b.begin(Request{Policy: with(func(p *Policy) { p.Idle = tt.idle })})
			b.outcome(tt.want)
			if n := w.count("retire"); n != 0 {
				t.Errorf("%s: %d retires, want none", tt.idle, n)
			}
		})
	}
}

func TestCutNow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Active: 2}
		w.list = []Survivor{{Peer: "a"}, {Peer: "b"}}
		w.flushed = make(chan struct{})
		b := run(t, w)
		if _, err := b.Cut(t.Context(), 0, "root"); !errors.Is(err, ErrNotDraining) {
			t.Errorf("serving: got %v, want ErrNotDraining", err)
		}
		// From stop_new: admission must close before the application does.
		b.begin(Request{Policy: with(func(p *Policy) { p.OnNew = OnNewAdmit })})
		after(300 * time.Millisecond)
		st, err := b.Cut(t.Context(), 0, "root")
		if err != nil {
			t.Fatal(err)
		}
		if left := time.Until(st.Deadline); left > 8*time.Second+time.Second/2 {
			t.Errorf("deadline in %v, want flush_timeout and reserve from now", left)
		}
		after(10 * time.Millisecond)
		b.order("journal begin", "ready false", "journal shorten", "close", "survivors", "journal flush", "flush")
		if _, err := b.Cut(t.Context(), 0, "root"); err != nil {
			t.Errorf("again: got %v, want nil", err)
		}
		st = b.outcome(OutcomeExpired)
		if c, f := w.all("cut")[0], w.all("flush")[0]; c.at-f.at < 5*time.Second {
			t.Errorf("cut %v after the flush, want its whole slice", c.at-f.at)
		}
		if len(st.Survivors) != 2 || st.FlushReason != FlushDeadline {
			t.Errorf("got %d survivors, reason %s, want 2 and deadline", len(st.Survivors), st.FlushReason)
		}
	})
}

func TestG3_ObserveTouchesNothing(t *testing.T) {
	for _, tt := range []struct {
		active int64
		want   Outcome
		would  []string
	}{
		{0, OutcomeDrained, []string{"turn readiness off", "tell the application that it drains", "close admission", "retire idle connections", "flush: zero"}},
		{2, OutcomeExpired, []string{"turn readiness off", "tell the application that it drains", "close admission", "retire idle connections", "flush: deadline", "cut: 2 active"}},
	} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld()
			w.counts = Counts{Known: true, Active: tt.active, Idle: 1}
			w.list = make([]Survivor, tt.active)
			b := run(t, w, func(o *Options) { o.Mode = ModeObserve })
			b.begin(Request{Policy: with(func(p *Policy) { p.Idle = IdleClose })})
			st := b.outcome(tt.want)
			for _, name := range w.names() {
				if name != "survivors" {
					t.Errorf("observe called %s", name)
				}
			}
			if n := w.count("retire"); n != 0 {
				t.Errorf("observe retired %d times", n)
			}
			if !slices.Equal(st.Would, tt.would) {
				t.Errorf("would: got %q, want %q", st.Would, tt.would)
			}
			if len(st.Survivors) != int(tt.active) || !get(w, func(w *world) bool { return w.ready }) {
				t.Errorf("got %d survivors, want %d", len(st.Survivors), tt.active)
			}
			for _, e := range w.events {
				if e.Fields["would"] != true {
					t.Errorf("event %s does not say that it is only observed", e.Type)
				}
			}
		})
	}
	synctest.Test(t, func(t *testing.T) {
		b := run(t, newWorld(), func(o *Options) { o.Mode = ModeOff })
		if _, err := b.Begin(t.Context(), Request{}); !errors.Is(err, ErrOff) {
			t.Errorf("off: got %v, want ErrOff", err)
		}
	})
}

func TestLookThatHangsLeavesTheMachineResponsive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.hangLook = true
		b := run(t, w)
		b.begin(Request{Policy: budget})
		after(time.Second)
		at := time.Now()
		if _, err := b.Extend(t.Context(), 0, time.Second, time.Time{}, "root"); err != nil {
			t.Error(err)
		}
		if _, err := b.Undrain(t.Context(), 0, "root"); err != nil {
			t.Error(err)
		}
		if d := time.Since(at); d != 0 {
			t.Errorf("answers took %v", d)
		}
	})
}

func TestExitedWithoutADrain(t *testing.T) {
	for _, tt := range []struct {
		err  error
		want State
	}{{nil, StateDone}, {errors.New("exit status 1"), StateLost}} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld()
			b := run(t, w)
			b.Exited(tt.err)
			<-b.Done()
			st := b.begin(Request{Policy: budget})
			if st.State != tt.want || st.ID != "" {
				t.Errorf("got %s, drain %q, want %s and nothing to do", st.State, st.ID, tt.want)
			}
			b.order()
		})
	}
}

func TestRunEndsAndRefuses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Active: 1}
		w.hangLook, w.flushed = true, make(chan struct{})
		m, err := New(Options{Backend: "web", World: w})
		if err != nil {
			t.Fatal(err)
		}
		over := make(chan error)
		go func() { over <- m.Run(context.Background()) }()
		if _, err := m.Begin(t.Context(), Request{Policy: budget}); err != nil {
			t.Fatal(err)
		}
		if err := m.Run(t.Context()); !errors.Is(err, ErrRunning) {
			t.Errorf("second Run: got %v, want ErrRunning", err)
		}
		after(18 * time.Second) // in the middle of a flush
		for range 2 {
			if err := m.Close(); err != nil {
				t.Error(err)
			}
		}
		if err := <-over; err != nil {
			t.Errorf("Run: got %v, want nil", err)
		}
		if _, err := m.Begin(t.Context(), Request{}); !errors.Is(err, ErrClosed) {
			t.Errorf("Begin: got %v, want ErrClosed", err)
		}
		if err := m.Run(t.Context()); !errors.Is(err, ErrClosed) {
			t.Errorf("Run: got %v, want ErrClosed", err)
		}
		if n := w.count("journal end"); n != 0 {
			t.Error("the end of Run ended the drain")
		}
		// synctest fails the test if a goroutine is left.
	})
}

func TestBeginGivesUpWithItsContext(t *testing.T) {
	m, err := New(Options{Backend: "web", World: newWorld()})
	if err != nil {
		t.Fatal(err)
	}
	why := errors.New("the client has gone")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(why)
	if _, err := m.Begin(ctx, Request{}); !errors.Is(err, why) { // Run never ran
		t.Errorf("got %v, want the cause", err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// chaos is a World whose answers, failures and durations are random.
type chaos struct {
	mu    sync.Mutex
	rnd   *rand.Rand
	calm  int  // one call in so many is slow or fails
	deaf  bool // some calls do not hear the end of their contexts
	open  int64
	total uint64
	start time.Time

	m       *Machine
	trace   []string
	begun   map[string]int
	ends    map[string][]Outcome
	flushes map[string][]time.Time
	reasons map[string]FlushReason
	cuts    map[string][]time.Time
	choices int
	endings map[string]int // of late connections, by drain
	closed  bool
	ready   bool
	held    int      // by the application, which the machine may not know yet
	tooLate bool     // to take a hold
	broken  []string // what must never happen
}

func (c *chaos) say(format string, a ...any) {
	c.trace = append(c.trace, fmt.Sprintf("%v %s", time.Since(c.start), fmt.Sprintf(format, a...)))
}

func (c *chaos) wrong(format string, a ...any) {
	s := fmt.Sprintf(format, a...)
	c.broken = append(c.broken, s)
	c.say("WRONG: %s", s)
}

// trouble is how long a call takes and how it ends.
func (c *chaos) trouble(longest time.Duration) (time.Duration, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var err error
	if c.rnd.IntN(c.calm) == 0 {
		err = errors.New("trouble")
	}
	if c.rnd.IntN(c.calm) == 0 {
		return time.Duration(c.rnd.Int64N(int64(longest))), err
	}
	return time.Duration(c.rnd.Int64N(int64(5 * time.Millisecond))), err
}

func (c *chaos) call(ctx context.Context, longest time.Duration) error {
	d, err := c.trouble(longest)
	c.mu.Lock()
	if c.deaf && c.rnd.IntN(c.calm) == 0 {
		ctx = context.WithoutCancel(ctx)
	}
	c.mu.Unlock()
	if perr := pause(ctx, d); perr != nil {
		return perr
	}
	return err
}

func (c *chaos) Journal(r Record) error {
	_, err := c.trouble(time.Second)
	c.mu.Lock()
	defer c.mu.Unlock()
	if r.Type == recordFlush {
		if r.FlushReason == FlushZero && c.held > 0 {
			err = ErrHeld
		}
		c.tooLate = !errors.Is(err, ErrHeld)
	}
	c.say("journal %s %v", r.Type, err)
	return err
}

func (c *chaos) SetReady(ready bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ready = ready
	c.say("ready %v", ready)
}

func (c *chaos) Notify(ctx context.Context, _ Notice) error { return c.call(ctx, 20*time.Second) }

func (c *chaos) CloseAdmission(ctx context.Context, until time.Time) error {
	err := c.call(ctx, 8*time.Second)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil {
		c.closed = true
	}
	c.say("close %v", err)
	return err
}

func (c *chaos) OpenAdmission(ctx context.Context) error {
	_, err := c.trouble(time.Second)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil {
		c.closed = false
	}
	c.say("open %v", err)
	return err
}

func (c *chaos) Settled(ctx context.Context) (Pending, error) {
	err := c.call(ctx, 10*time.Second)
	c.mu.Lock()
	defer c.mu.Unlock()
	return Pending{Queued: c.rnd.IntN(2), HalfOpen: c.rnd.IntN(2)}, err
}

func (c *chaos) Look(ctx context.Context) (Counts, error) {
	err := c.call(ctx, 10*time.Second)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.rnd.IntN(c.calm) == 0 {
		return Counts{Active: 3}, err
	}
	return Counts{Known: true, Active: c.open, Idle: 1, Accepted: c.total}, err
}

func (c *chaos) Retire(ctx context.Context) (int, error) { return 1, c.call(ctx, time.Second) }

func (c *chaos) Survivors(ctx context.Context) ([]Survivor, error) {
	return []Survivor{{Peer: "192.0.2.1:1"}}, c.call(ctx, 3*time.Second)
}

func (c *chaos) Flush(ctx context.Context, r FlushRequest) error {
	c.mu.Lock()
	c.say("flush %s %s", r.Drain, r.Reason)
	c.flushes[r.Drain] = append(c.flushes[r.Drain], time.Now())
	c.reasons[r.Drain] = r.Reason
	if r.Reason == FlushZero && c.open != 0 && c.closed {
		c.wrong("flush on zero with %d in flight", c.open)
	}
	if r.Reason == FlushZero && c.held > 0 {
		c.wrong("flush on zero with %d held", c.held)
	}
	if !c.tooLate {
		c.wrong("flush without a record")
	}
	never := c.rnd.IntN(4) == 0
	c.mu.Unlock()
	if never {
		<-ctx.Done()
		return ctx.Err()
	}
	return c.call(ctx, 8*time.Second)
}

func (c *chaos) Cut(ctx context.Context, r CutRequest) (CutReport, error) {
	st := c.m.Status()
	c.mu.Lock()
	now := time.Now()
	c.say("cut %s %+v", r.Drain, r)
	c.cuts[r.Drain] = append(c.cuts[r.Drain], now)
	if n := len(c.flushes[r.Drain]); n == 0 {
		c.wrong("a cut without a flush before it")
	}
	if now.Before(st.CutAt) {
		c.wrong("a cut %v before the flush slice ended", st.CutAt.Sub(now))
	}
	c.mu.Unlock()
	err := c.call(ctx, 5*time.Second)
	c.mu.Lock()
	defer c.mu.Unlock()
	rep := CutReport{Destroyed: int(c.open)}
	c.open = 0
	return rep, err
}

func (c *chaos) Kill(ctx context.Context) error { return c.call(ctx, 2*time.Second) }

func (c *chaos) Emit(e Event) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.say("event %s %s %s: %s", e.Type, e.Phase, e.Outcome, e.Message)
	switch e.Type {
	case EventBegin:
		c.begun[e.Drain]++
	case EventEnd:
		c.ends[e.Drain] = append(c.ends[e.Drain], e.Outcome)
	}
}

// lateChaos is chaos that can redirect.
type lateChaos struct {
	*chaos
	arrived uint64
	carried int
}

func (c *lateChaos) ChooseLate(ctx context.Context, want OnNew) (OnNew, string, error) {
	err := c.call(ctx, 3*time.Second)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.choices++
	got := []OnNew{OnNewSteer, OnNewRelay, OnNewHold, OnNewAdmit, OnNewRefuse, "", OnNewRelay}[c.rnd.IntN(7)]
	c.say("choose %s: %s %v", want, got, err)
	return got, "by chance", err
}

func (c *lateChaos) Redirect(ctx context.Context, how OnNew, until time.Time) error {
	err := c.call(ctx, 8*time.Second)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil {
		c.closed = true
	}
	if !how.redirects() {
		c.wrong("redirect by %q", how)
	}
	c.say("redirect %s %v", how, err)
	return err
}

func (c *lateChaos) Late(ctx context.Context) (LateCounts, error) {
	err := c.call(ctx, 10*time.Second)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.rnd.IntN(3) == 0 {
		n := c.rnd.IntN(3)
		c.arrived += uint64(n)
		c.carried = max(0, c.carried+n-c.rnd.IntN(4))
	}
	return LateCounts{Arrived: c.arrived, Carried: c.carried, Known: c.rnd.IntN(c.calm) != 0}, err
}

func (c *lateChaos) EndLate(ctx context.Context) error {
	st := c.m.Status()
	c.mu.Lock()
	c.endings[st.ID]++
	if st.Over() {
		c.wrong("late connections ended after their drain")
	}
	c.carried = 0
	c.mu.Unlock()
	return c.call(ctx, 3*time.Second)
}

// schedule drives one machine by one seed and returns what went wrong, with the trace.
func schedule(t *testing.T, seed uint64) (broken, trace []string) {
	rnd := rand.New(rand.NewPCG(seed, 1))
	c := &chaos{
		rnd: rand.New(rand.NewPCG(seed, 2)), calm: []int{3, 20, 1000}[rnd.IntN(3)], deaf: rnd.IntN(3) == 0, open: int64(rnd.IntN(3)), start: time.Now(), ready: true,
		begun: map[string]int{}, ends: map[string][]Outcome{}, flushes: map[string][]time.Time{}, reasons: map[string]FlushReason{}, cuts: map[string][]time.Time{},
		endings: map[string]int{},
	}
	var w World = c
	redirects := rnd.IntN(2) == 0
	if redirects {
		w = &lateChaos{chaos: c}
	}
	n := 0
	m, err := New(Options{
		Backend: "web", Gen: 7, World: w, Notify: rnd.IntN(2) == 0, Unguarded: rnd.IntN(5) == 0,
		NewID: func() string { n++; return fmt.Sprintf("d-%d", n) },
	})
	if err != nil {
		t.Fatal(err)
	}
	c.m = m
	ctx, cancel := context.WithCancel(t.Context())
	over := make(chan error, 1)
	go func() { over <- m.Run(ctx) }()
	wrong := func(format string, a ...any) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.wrong(format, a...)
	}

	policy := Policy{
		OnNew: []OnNew{OnNewAuto, OnNewRefuse, OnNewRelay}[rnd.IntN(3)], OnDeadline: []OnDeadline{OnDeadlineCut, OnDeadlineLeave}[rnd.IntN(2)],
		Idle: []IdlePolicy{IdleIgnore, IdleClose, IdleWait}[rnd.IntN(3)], NotifyAt: []NotifyAt{NotifyAtBegin, NotifyAtSettled}[rnd.IntN(2)],
		Grace: time.Duration(9+rnd.IntN(30)) * time.Second, QuietPeriod: time.Duration(1+rnd.IntN(900)) * time.Millisecond,
	}
	var drain string
	var deadline time.Time
	see := func(what string, st Status, extended bool) {
		if st.ID == "" {
			return
		}
		if st.ID == drain && st.Deadline.After(deadline) && !extended {
			wrong("%s moved the deadline %v later", what, st.Deadline.Sub(deadline))
		}
		drain, deadline = st.ID, st.Deadline
		if st.Outcome == "" && (st.FlushBy.After(st.CutAt) || st.CutAt.After(st.Deadline)) && st.FlushReason == "" {
			wrong("%s: flush by %v, cut at %v, deadline %v: out of order", what, st.FlushBy, st.CutAt, st.Deadline)
		}
		if got := len(st.Phases); got > 1 && !slices.IsSortedFunc(st.Phases, func(a, b PhaseTime) int { return a.At.Compare(b.At) }) {
			wrong("%s: phases %v are out of order", what, st.Phases)
		}
		for i, p := range st.Phases {
			if slices.ContainsFunc(st.Phases[i+1:], func(q PhaseTime) bool { return q.Phase == p.Phase }) {
				wrong("%s: phase %s was entered twice", what, p.Phase)
			}
		}
	}
	for range 30 + rnd.IntN(60) {
		callCtx, stop := context.WithTimeout(ctx, time.Minute)
		switch k := rnd.IntN(20); {
		case k < 5:
			r := Request{Cause: CauseOperator, Policy: policy, Force: rnd.IntN(2) == 0, Gen: uint64(rnd.IntN(3)/2) * 7}
			if rnd.IntN(3) == 0 {
				r.Deadline = time.Now().Add(time.Duration(rnd.IntN(40)-5) * time.Second)
			}
			if rnd.IntN(3) == 0 {
				r.Spent = time.Duration(rnd.IntN(10)) * time.Second
			}
			st, err := m.Begin(callCtx, r)
			if err != nil && !errors.Is(err, ErrJournal) {
				wrong("begin: %v", err)
			}
			see("begin", st, false)
		case k == 5:
			st, err := m.Undrain(callCtx, 0, "root")
			see("undrain", st, false)
			if errors.Is(err, context.DeadlineExceeded) {
				wrong("undrain was not answered in a minute")
			}
		case k == 6:
			before := m.Status()
			st, err := m.Extend(callCtx, 7, time.Duration(rnd.IntN(10))*time.Second, time.Time{}, "root")
			if err == nil && st.ID == before.ID && !st.Deadline.After(before.Deadline) {
				wrong("extend did not move the deadline")
			}
			see("extend", st, err == nil)
		case k == 7:
			st, _ := m.Cut(callCtx, 7, "root")
			see("cut", st, false)
		case k == 8:
			if _, err := m.Begin(callCtx, Request{Gen: 3}); !errors.Is(err, ErrStale) {
				wrong("stale begin: %v", err)
			}
		case k == 9:
			// What the application is given, or gives back, the machine hears of a little later.
			n := rnd.IntN(3) / 2
			c.mu.Lock()
			if c.tooLate {
				n = min(n, c.held)
			}
			c.held = n
			c.mu.Unlock()
			time.Sleep(time.Duration(rnd.Int64N(int64(time.Second))))
			m.SetHolds(n, []string{"job"})
		case k == 10 && rnd.IntN(8) == 0:
			m.Exited([]error{nil, errors.New("exit status 2")}[rnd.IntN(2)])
		case k < 14:
			m.Zero()
		case k < 17:
			c.mu.Lock()
			c.open = int64(rnd.IntN(3))
			c.total += uint64(rnd.IntN(2))
			c.mu.Unlock()
		default:
			c.mu.Lock()
			c.open = 0
			c.mu.Unlock()
		}
		stop()
		see("status", m.Status(), false)
		time.Sleep(time.Duration(rnd.Int64N(int64(1500 * time.Millisecond))))
	}
	c.mu.Lock()
	c.held = 0
	c.mu.Unlock()
	m.SetHolds(0, nil)
	if st := m.Status(); st.ID != "" && st.Outcome == "" {
		select {
		case <-m.Done():
		case <-time.After(max(0, time.Until(st.Deadline)) + 2*time.Second):
			wrong("the drain runs %v past its deadline: %+v", time.Since(st.Deadline), m.Status())
		}
	}
	see("end", m.Status(), false)
	cancel()
	if err := <-over; err != nil {
		wrong("Run: %v", err)
	}

	for i := 1; i <= n; i++ {
		id := fmt.Sprintf("d-%d", i)
		if len(c.ends[id]) != c.begun[id] || c.begun[id] > 1 {
			c.wrong("%s: began %d times with outcomes %v, want one each", id, c.begun[id], c.ends[id])
		}
		if len(c.flushes[id]) > 1 || len(c.cuts[id]) > 1 {
			c.wrong("%s: %d flushes and %d cuts, want at most one", id, len(c.flushes[id]), len(c.cuts[id]))
		}
		if c.endings[id] > 1 {
			c.wrong("%s: late connections ended %d times, want at most once", id, c.endings[id])
		}
		for _, o := range c.ends[id] {
			switch {
			case o == OutcomeCancelled && len(c.flushes[id])+c.endings[id] > 0:
				c.wrong("%s: cancelled after a flush or an end of late connections", id)
			case o == OutcomeDrained && c.reasons[id] == FlushDeadline:
				c.wrong("%s: drained although the wait slice ran out", id)
			case o == OutcomeExpired && len(c.flushes[id]) == 0:
				c.wrong("%s: expired without a flush", id)
			}
		}
	}
	if c.choices > n {
		c.wrong("%d choices for %d drains", c.choices, n)
	}
	if st := m.Status(); st.State == StateServing && st.Outcome == OutcomeCancelled && (!c.ready || c.closed) {
		c.wrong("serving with ready %v, admission closed %v", c.ready, c.closed)
	}
	return c.broken, c.trace
}

func trySchedule(t *testing.T, seed uint64) {
	synctest.Test(t, func(t *testing.T) {
		broken, trace := schedule(t, seed)
		if len(broken) == 0 {
			return
		}
		for _, l := range trace {
			t.Log(l)
		}
		t.Fatalf("seed %d: %q", seed, broken)
	})
}

// TestRandomSchedules drives machines by random commands, counts and failures. A seed that fails is
// printed, and FuzzSchedule takes it.
func TestRandomSchedules(t *testing.T) {
	runs := 600
	if testing.Short() {
		runs = 60
	}
	first := rand.Uint64()
	for i := range runs {
		trySchedule(t, first+uint64(i))
		if t.Failed() {
			return
		}
	}
}

func FuzzSchedule(f *testing.F) {
	f.Add(uint64(1))
	f.Fuzz(trySchedule)
}

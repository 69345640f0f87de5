// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Options are what New needs to know of a backend.
type Options struct {
	Backend string
	Service string
	Gen     uint64 // of the backend; a command for another one is stale
	Mode    Mode   // default enforce

	// Unguarded says that admission cannot be closed here at all (--datapath none): CloseAdmission is
	// not called, and zero is believed only after a pause of arrivals.
	Unguarded bool

	World World
	Log   *slog.Logger // nil discards

	// Boot is the boot clock (CLOCK_BOOTTIME). Nil counts from New, which is enough unless a drain is
	// to be resumed by another process.
	Boot func() time.Duration

	NewID  func() string // of drains; nil makes random ones
	Resume *Record       // the last record of a drain that was running when the process before this one ended
	Over   *Record       // the last record of the drain that has ended this generation; there is nothing left to do
	Notify bool          // a notify hook is configured
}

// Request asks for a drain.
type Request struct {
	Gen    uint64 // 0 means the current one
	Cause  Cause
	Policy Policy

	// Deadline is when everything must be over, where that is known, for example from the
	// orchestrator's kill time. Zero is now + grace. A nearer one scales the slices in proportion, a
	// later one changes nothing.
	Deadline time.Time

	// Join says that nobody asked for this grace: a drain that runs already keeps its deadline. Else the policy's
	// grace, counted from now, shortens it, as a stop signal must.
	Join bool

	// Spent is time of grace that was used before this call, as by a preStop hook.
	Spent time.Duration

	Reason string
	By     string // who asks, for the audit

	// Told says that somebody else has told the application to stop: it is not notified, and when it ends cleanly at
	// any moment from now on it has done what it was asked.
	Told bool

	// Force begins the drain even when it cannot be journalled or its policy is refused, which is right
	// where the process ends anyway, as after a stop signal.
	Force bool
}

// Machine is the state machine of one backend generation. One goroutine, that of Run, owns it; every
// method may be called from any goroutine. Calls of World that take long run beside it, so that it
// always answers.
//
//	             Begin                       admit: arrivals paused,
//	             journal, ready=false,       or admit_for is over
//	             notify (at: begin)          others: at once
//	┌─────────┐        ┌───────┐ ┌──────────┐ flip ┌────────┐ queues empty  ┌──────┐
//	│ serving │───────►│ begin ├►│ stop_new ├─────►│ settle ├──────────────►│ wait │
//	└─────────┘        └───────┘ └──────────┘      └────────┘ notify        └──┬───┘
//	     ▲                           │                 │      (at: settled)    │ zero for quiet_period
//	     │ Undrain: cancelled        │                 │                       │ and no hold: reason zero
//	     └───────────────────────────┴─────────────────┴───────────────────────┤
//	                                                                           │ deadline − reserve −
//	       Exited before the flush, from any phase                             │ flush_timeout: survivors,
//	          │ in flight: lost, none: drained                                 ▼ reason deadline
//	          ▼                                                             ┌───────┐
//	┌──────────────┐  cut over and the application ended, or killed ┌─────┐ │ flush │ state: flushing
//	│ done or lost │◄───────────────────────────────────────────────┤ cut │◄┴───┬───┘
//	└──────────────┘                                                └─────┘     │ deadline − reserve
//	          ▲              application ended and none in flight               │
//	          └─────────────────────────────────────────────────────────────────┘
//
// The flush goes out exactly once and never later than deadline − reserve − flush_timeout. After a
// flush at zero the application has at least flush_timeout, and is not killed before deadline − reserve:
// nobody waits for the rest of it but the application itself. Connections that are still in flight
// when the application has gone (the kernel delivers its last bytes) keep the drain in flush until they
// are through, at the latest until deadline − reserve.
//
// Where World is a LateWorld, what happens to new connections is asked of it at Begin. A drain that
// redirects them (steer, relay, hold) is done when, besides all that, none has come for quiet_period and
// none is carried, or at the deadline, which ends those that are. That changes no outcome, and neither
// settle nor wait nor flush knows of them. The notice of at: begin waits for the redirection.
type Machine struct {
	opt  Options
	late LateWorld // nil: late connections cannot be redirected
	log  *slog.Logger
	boot func() time.Duration

	cmds    chan *command
	results chan result
	hint    chan struct{} // from Zero; one is as good as many
	held    chan struct{} // from SetHolds
	exited  chan struct{} // closed by Exited
	closing chan struct{} // closed by Close
	dead    chan struct{} // closed when Run has let go of the machine

	running   atomic.Bool
	exitOnce  sync.Once
	exitErr   error // written before exited is closed
	closeOnce sync.Once
	holds     atomic.Pointer[holds]
	stale     atomic.Uint64
	snap      atomic.Pointer[snapshot]

	// What follows belongs to the goroutine of Run.
	ctx      context.Context
	wg       sync.WaitGroup
	state    State
	gone     bool // the application has ended
	life     *life
	epoch    uint64 // of life, so that a late result of an earlier one is told apart
	busy     [kinds]bool
	over     chan struct{} // closed when the current drain is over
	closeOld []chan struct{}
	deferred []*command // undrains that wait for the flip to return
	waiting  []*command // begins that wait for the flip
	dirty    bool
}

type holds struct {
	n     int
	names []string
}

// snapshot is what readers see. It is replaced as a whole and never written to.
type snapshot struct {
	status  Status
	over    chan struct{}
	changed chan struct{}
}

type command struct {
	do       func(*command) error
	afterFor func(*Machine) bool // set by do: answer only when it holds
	reply    chan answer
}

type answer struct {
	st  Status
	err error
}

// New makes a machine. It is idle until Run, which also resumes Options.Resume. The error wraps
// ErrRecord if that record belongs to another generation, layout or boot, or is not of a running drain.
func New(o Options) (*Machine, error) {
	if o.World == nil {
		return nil, fmt.Errorf("make drain machine for %q: no world", o.Backend)
	}
	switch o.Mode {
	case "":
		o.Mode = ModeEnforce
	case ModeOff, ModeObserve, ModeEnforce:
	default:
		return nil, fmt.Errorf("make drain machine for %q: mode %q is unknown: use off, observe or enforce", o.Backend, o.Mode)
	}
	log := o.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	if o.Boot == nil {
		start := time.Now()
		o.Boot = func() time.Duration { return time.Since(start) }
	}
	if o.NewID == nil {
		o.NewID = randomID
	}
	if r := o.Over; r != nil && (r.Type != recordEnd || r.Gen != o.Gen) {
		return nil, fmt.Errorf("go on after drain %s of %q: %w: it is a %s of generation %d", r.Drain, o.Backend, ErrRecord, r.Type, r.Gen)
	}
	if o.Resume != nil {
		if err := checkRecord(*o.Resume, o); err != nil {
			return nil, err
		}
	}
	m := &Machine{
		opt:     o,
		log:     log.With("service", o.Service, "backend", o.Backend, "gen", o.Gen),
		boot:    o.Boot,
		cmds:    make(chan *command),
		results: make(chan result),
		hint:    make(chan struct{}, 1),
		held:    make(chan struct{}, 1),
		exited:  make(chan struct{}),
		closing: make(chan struct{}),
		dead:    make(chan struct{}),
		state:   StateServing,
		over:    make(chan struct{}),
	}
	m.late, _ = o.World.(LateWorld)
	m.holds.Store(&holds{})
	m.publish()
	return m, nil
}

func randomID() string {
	var b [8]byte
	// crypto/rand's Read never fails: the program ends instead.
	_, _ = rand.Read(b[:])
	return "d-" + hex.EncodeToString(b[:])
}

// Run owns the state machine until ctx ends or Close is called, and returns nil then. It does not
// return when a drain is over: a generation stays queryable. What World was doing is cancelled and
// waited for; a running drain is left as it is, to be resumed from the journal. ErrRunning and
// ErrClosed tell of a second call.
func (m *Machine) Run(ctx context.Context) error {
	if !m.running.CompareAndSwap(false, true) {
		select {
		case <-m.dead:
			return ErrClosed
		default:
			return ErrRunning
		}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer m.wg.Wait()
	defer cancel(ErrClosed)
	defer close(m.dead)
	m.ctx = ctx

	switch {
	case m.opt.Resume != nil:
		m.resume(*m.opt.Resume)
	case m.opt.Over != nil:
		m.restore(*m.opt.Over)
	}
	exited := m.exited
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	var asked *command
	var askedErr error
	for {
		again := m.again()
		m.advance()
		m.publish()
		for _, f := range again {
			f()
		}
		if asked != nil {
			m.settleUp(asked, askedErr)
			asked = nil
		}
		m.answerWaiting()
		timer.Reset(m.sleep())
		select {
		case <-ctx.Done():
			return nil
		case <-m.closing:
			return nil
		case asked = <-m.cmds:
			askedErr = asked.do(asked)
			m.dirty = true
		case r := <-m.results:
			m.onResult(r)
			m.dirty = true
		case <-m.hint:
			m.onHint()
		case <-m.held:
			m.onHint() // a zero that is known already is confirmed by a fresh look
			m.dirty = true
		case <-exited:
			exited = nil
			m.onExited(m.exitErr)
			m.dirty = true
		case <-timer.C:
		}
	}
}

// Close ends Run without waiting for it. It may be called at any time and again.
func (m *Machine) Close() error {
	m.closeOnce.Do(func() { close(m.closing) })
	return nil
}

// settleUp answers a command, or puts it aside until what it waits for has come.
func (m *Machine) settleUp(c *command, err error) {
	switch {
	case err == nil && c.afterFor != nil && !c.afterFor(m):
		m.waiting = append(m.waiting, c)
	case errors.Is(err, errDeferred):
		m.deferred = append(m.deferred, c)
	default:
		c.reply <- answer{m.snap.Load().status, err}
	}
}

// again does what was deferred until the flip had returned, and returns the answers.
func (m *Machine) again() []func() {
	if len(m.deferred) == 0 || m.flipping() {
		return nil
	}
	cmds := m.deferred
	m.deferred = nil
	m.dirty = true
	var answers []func()
	for _, c := range cmds {
		err := c.do(c)
		answers = append(answers, func() { m.settleUp(c, err) })
	}
	return answers
}

func (m *Machine) answerWaiting() {
	m.waiting = slices.DeleteFunc(m.waiting, func(c *command) bool {
		if !c.afterFor(m) {
			return false
		}
		c.reply <- answer{m.snap.Load().status, nil}
		return true
	})
}

// ask hands a command to the owner and waits for its answer.
func (m *Machine) ask(ctx context.Context, do func(*command) error) (Status, error) {
	c := &command{do: do, reply: make(chan answer, 1)}
	select {
	case m.cmds <- c:
	case <-ctx.Done():
		return m.Status(), context.Cause(ctx)
	case <-m.dead:
		return m.Status(), ErrClosed
	}
	select {
	case a := <-c.reply:
		return a.st, a.err
	case <-ctx.Done():
		return m.Status(), context.Cause(ctx)
	case <-m.dead:
	}
	select {
	case a := <-c.reply:
		return a.st, a.err
	default:
		return m.Status(), ErrClosed
	}
}

// Begin starts a drain, or joins the one that runs: that one keeps its id, first cause and policy, and
// takes the new deadline if it is earlier. It is answered when the journal and, where new connections
// are refused or redirected at once, the flip are written; what is done with them is known then. After the drain of this generation is over, or after the
// application has ended, there is nothing to do: the answer is the last status and no error. Otherwise
// the error is ErrStale, ErrOff, ErrClosed, the end of ctx, or wraps ErrPolicy or ErrJournal. When ctx
// ends first, the drain may have begun.
func (m *Machine) Begin(ctx context.Context, r Request) (Status, error) {
	return m.ask(ctx, func(c *command) error { return m.begin(c, r) })
}

// Undrain takes a drain back: admission opens, readiness returns, the outcome is cancelled, and the next
// Begin starts another drain with another id. The error is ErrFlushing after the flush began,
// ErrNotDraining, ErrStale, ErrClosed, the end of ctx, what World said about opening admission (the
// drain goes on), or wraps ErrJournal (the drain goes on).
func (m *Machine) Undrain(ctx context.Context, gen uint64, by string) (Status, error) {
	return m.ask(ctx, func(c *command) error { return m.undrain(gen, by) })
}

// Extend moves the deadline later by a duration, at most to limit; a zero limit is none. It is for
// those who may: who is journalled. The error is ErrLimit if the deadline would not move, ErrFlushing
// after the flush began, ErrNotDraining, ErrStale, ErrClosed, the end of ctx, or wraps ErrJournal.
func (m *Machine) Extend(ctx context.Context, gen uint64, by time.Duration, limit time.Time, who string) (Status, error) {
	return m.ask(ctx, func(*command) error { return m.extend(gen, by, limit, who) })
}

// Cut ends a drain now: survivors are listed, the flush goes out at once with reason deadline and has
// its full slice, then what is left is cut. During the flush it changes nothing but that late
// connections are not waited for. The error is ErrNotDraining, ErrStale, ErrClosed or the end of ctx.
func (m *Machine) Cut(ctx context.Context, gen uint64, who string) (Status, error) {
	return m.ask(ctx, func(*command) error { return m.cutNow(gen, who) })
}

// Zero is the kernel's hint that the count has reached zero: the machine looks at once. A lost hint
// costs one poll interval, a spurious one costs one look. It never blocks.
func (m *Machine) Zero() {
	select {
	case m.hint <- struct{}{}:
	default:
	}
}

// Exited says that the application has ended; err is how, nil for a clean exit. Only the first call
// counts. It never blocks and may be called before Run.
func (m *Machine) Exited(err error) {
	m.exitOnce.Do(func() {
		m.exitErr = err
		close(m.exited)
	})
}

// SetHolds sets how many holds of the application keep a flush on zero from being sent, and their
// names for the log. It never blocks.
func (m *Machine) SetHolds(n int, names []string) {
	m.holds.Store(&holds{n: max(0, n), names: slices.Clone(names)})
	select {
	case m.held <- struct{}{}:
	default:
	}
}

// Told says that the application knows of a drain by another way than Notify: when it ends cleanly from now on it has done what
// it was asked. The notice goes out all the same. A drain that does not run is no error. The error is ErrClosed or the end of
// ctx.
func (m *Machine) Told(ctx context.Context, id string) error {
	_, err := m.ask(ctx, func(*command) error {
		if m.live() && m.life.id == id {
			m.life.told = true
		}
		return nil
	})
	return err
}

// Flushed says that the application has answered a flush that was sent before a restart, so that nobody waits for its return
// any more. Of a flush that is waited for, or a drain that does not run, it says nothing. The error is ErrClosed or the end of ctx.
func (m *Machine) Flushed(ctx context.Context, id string) error {
	_, err := m.ask(ctx, func(*command) error {
		if m.live() && m.life.id == id && m.life.flushResult == FlushUnknown {
			m.life.flushResult = FlushOK
			m.appGone(time.Now())
		}
		return nil
	})
	return err
}

// Status is the present snapshot. It never blocks.
func (m *Machine) Status() Status { return m.snap.Load().status }

// Stale counts the commands that meant another generation.
func (m *Machine) Stale() uint64 { return m.stale.Load() }

// Done is closed when the drain that runs, or else the next one, is over, and when the application has
// ended without a drain. Once a drain has ended the generation it stays closed; after Undrain it is
// another channel.
func (m *Machine) Done() <-chan struct{} { return m.snap.Load().over }

// Changed is closed when the status has changed since the call. Take it first, then read Status, and no
// change is missed: states are levels, so a late subscriber sees the present one at once.
func (m *Machine) Changed() <-chan struct{} { return m.snap.Load().changed }

// publish replaces the snapshot if anything changed.
func (m *Machine) publish() {
	old := m.snap.Load()
	if old != nil && !m.dirty {
		return
	}
	m.dirty = false
	m.snap.Store(&snapshot{status: m.status(), over: m.over, changed: make(chan struct{})})
	if old != nil {
		close(old.changed)
	}
	// Only now, so that whoever is woken finds the outcome and the next channel.
	for _, c := range m.closeOld {
		close(c)
	}
	m.closeOld = nil
}

func (m *Machine) status() Status {
	h := m.holds.Load()
	s := Status{
		Service: m.opt.Service, Backend: m.opt.Backend, Gen: m.opt.Gen, Mode: m.opt.Mode, State: m.state,
		Admission: AdmissionOpen, Holds: h.n, HeldBy: slices.Clone(h.names), Stale: m.stale.Load(),
	}
	d := m.life
	if d == nil {
		return s
	}
	s.ID, s.Cause, s.By, s.Reason = d.id, d.cause, d.by, d.reason
	s.Begun, s.Ended, s.Deadline, s.FlushBy, s.CutAt = d.begun, d.ended, d.deadline, d.flushDue, d.cutAt
	s.Phase, s.Phases, s.Budget, s.Outcome = d.phase, slices.Clone(d.phases), d.eff, d.outcome
	s.OnNew, s.OnNewWhy, s.Admission, s.Flipped = d.onNew, d.why, d.admission, d.flipped
	s.Unguarded, s.UnguardedWhy = d.unguardedWhy != "", d.unguardedWhy
	s.Counts, s.CountsAt, s.LookTook = d.counts, d.countsAt, d.lookTook
	if d.counts.Known {
		n := d.inFlight()
		s.InFlight = &n
	}
	if d.outcome == "" {
		s.Blocks = d.blocks(h.n)
	}
	s.Pending, s.Late, s.Retired = d.pending, d.late, d.retired
	if d.how != "" {
		c := d.lates
		s.LateCounts = &c
	}
	s.LateEnded, s.Lingering = d.lateEnded, d.lingering && d.outcome == ""
	s.Notified, s.FlushReason, s.FlushResult = d.notifiedAt, d.flushReason, d.flushResult
	s.Survivors, s.Killed = d.survivors, d.killed // the list is replaced as a whole, never written to
	if d.report != nil {
		r := *d.report
		s.Cut = &r
	}
	s.Warnings, s.Would = slices.Clone(d.warnings), slices.Clone(d.would)
	return s
}

// checkRecord refuses a record that this machine cannot go on from.
func checkRecord(r Record, o Options) error {
	refuse := func(format string, a ...any) error {
		return fmt.Errorf("resume drain %s of %q: %w: %s", r.Drain, o.Backend, ErrRecord, fmt.Sprintf(format, a...))
	}
	switch {
	case r.Version != recordVersion:
		return refuse("its layout is %d, this version reads %d", r.Version, recordVersion)
	case r.Gen != o.Gen:
		return refuse("it is of generation %d, this is %d", r.Gen, o.Gen)
	case r.Drain == "":
		return refuse("it has no drain id")
	case r.Type == recordEnd || r.Type == recordUndrain:
		return refuse("its drain is over (%s)", r.Type)
	case time.Duration(r.BegunBoot) > o.Boot():
		return refuse("it is of an earlier boot: it began at %v of the boot clock, which is at %v", time.Duration(r.BegunBoot), o.Boot())
	}
	if _, err := Validate(r.Policy); err != nil {
		return fmt.Errorf("resume drain %s of %q: %w: %w", r.Drain, o.Backend, ErrRecord, err)
	}
	return nil
}

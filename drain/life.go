// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

const (
	// pollFloor and pollFactor bound the cost of looking: a walk of all sockets takes 40 to 100 ms at
	// 100,000 connections and must not become the load.
	pollFloor  = 100 * time.Millisecond
	pollFactor = 10

	// hintGap keeps a storm of hints from becoming a storm of looks: the gap after a look is this, or
	// the look's own duration if longer.
	hintGap = time.Millisecond

	// lookLimit is when a look is given up; its counts are unknown then.
	lookLimit = 5 * time.Second

	// retryGap is the longest pause after a look that failed.
	retryGap = time.Second

	// flipLimit is when a flip is given up. Behind SYN cookies a flip waits 2 s for handshakes that are
	// already out.
	flipLimit = 5 * time.Second

	// progressEvery is how often progress is logged.
	progressEvery = 5 * time.Second

	// deadMan is how long past the deadline a closed admission may last with nobody alive to open it.
	deadMan = 10 * time.Second

	// maxWarnings bounds what a status carries; the log has all.
	maxWarnings = 32

	recordVersion = 1
)

// The types of a Record.
const (
	recordBegin   = "begin"
	recordShorten = "shorten"
	recordExtend  = "extend"
	recordFlush   = "flush"
	recordUndrain = "undrain"
	recordEnd     = "end"
)

// life is one drain. It belongs to the goroutine of Run. Its moments are absolute and monotonic; a zero
// one has not come or is not set.
type life struct {
	id     string
	cause  Cause
	by     string
	reason string
	base   Policy // validated and unscaled, for the journal
	eff    Effective

	ctx    context.Context
	cancel context.CancelCauseFunc

	begun, deadline, ended time.Time
	admitEnd               time.Time // stop_new is over at the latest
	settleEnd              time.Time
	flushDue               time.Time // deadline − reserve − flush_timeout
	cutAt                  time.Time // deadline − reserve
	nextProgress           time.Time

	phase   Phase
	phases  []PhaseTime
	outcome Outcome

	away

	onNew        OnNew
	why          string
	admission    Admission
	unguardedWhy string
	flipStart    time.Time
	flipGiveUp   time.Time
	flipped      time.Time
	gaveUp       bool // the flip did not return in time
	renew        bool // the rule's end has moved while a flip was on its way

	counts    Counts
	countsAt  time.Time
	lookTook  time.Duration
	lookStart time.Time // of the look that brought counts
	lookBegan time.Time // of the look on its way
	lookEnd   time.Time
	nextLook  time.Time
	again     bool // look once more when the one on its way is back
	fresh     bool // counts have just come
	unknown   bool // the last look failed, for logging its start and end once

	counted   bool   // accepted is set
	accepted  uint64 // Counts.Accepted at the last known look
	arrivalAt time.Time
	lateBase  uint64
	lateSet   bool
	late      uint64
	zeroSince time.Time // the count has been seen zero at every look since, with admission closed
	busyAt    time.Time // the last look that found something in flight

	pending    Pending
	empties    int // settle looks in a row that found the queues empty
	settled    bool
	settleErr  error
	nextSettle time.Time

	notified   bool // the notice was handed to World, or the application was told by somebody else
	told       bool // it has heard by another way than the notice, which goes out all the same
	notifiedAt time.Time
	retired    int

	hurry     bool // an operator ends the drain now
	listStart time.Time
	listBy    time.Time
	listed    bool
	listErr   error
	survivors []Survivor

	flushReason FlushReason
	flushAt     time.Time
	flushEnd    time.Time // the flush slice is over
	flushBack   bool      // Flush has returned
	flushResult FlushResult
	appEnded    bool // the application has flushed or ended
	appEndedAt  time.Time

	cutStart time.Time
	cutOver  bool
	report   *CutReport
	killing  bool
	killBy   time.Time
	killed   bool
	killOver bool

	warnings []string
	would    []string
}

func (d *life) inFlight() int64 { return d.counts.InFlight(d.eff.Policy.Idle) }

// none reports whether the last look is known to have found nothing in flight.
func (d *life) none() bool { return d.counts.Known && d.inFlight() == 0 }

// blocks says what keeps a flush on zero from being sent, or a drain from being over.
func (d *life) blocks(held int) []Block {
	if d.lingering {
		return d.lateBlocks()
	}
	var b []Block
	add := func(class string, n int64) {
		if n > 0 {
			b = append(b, Block{class, n})
		}
	}
	c := d.counts
	if !c.Known {
		b = append(b, Block{Class: "unknown"})
	} else {
		add("handshake", c.Handshake)
		add("queued", c.Queued)
		add("active", c.Active)
		add("stalled", c.Stalled)
		if d.eff.Policy.Idle == IdleWait {
			add("idle", c.Idle)
			add("unused", c.Unused)
		}
	}
	add("hold", int64(held))
	if len(b) == 0 && d.flushAt.IsZero() {
		b = append(b, Block{Class: "quiet"})
	}
	return b
}

func blockWords(b []Block) string {
	words := make([]string, len(b))
	for i, x := range b {
		words[i] = x.Class
		if x.N > 0 {
			words[i] = fmt.Sprintf("%d %s", x.N, x.Class)
		}
	}
	return strings.Join(words, ", ")
}

func (c Counts) fields() map[string]int64 {
	return map[string]int64{
		"handshake": c.Handshake, "queued": c.Queued, "active": c.Active, "idle": c.Idle,
		"unused": c.Unused, "stalled": c.Stalled, "closing": c.Closing,
	}
}

// listAt is when survivors begin to be listed, so that they are listed before the flush and the flush
// is not late.
func (d *life) listAt() time.Time {
	if d.hurry {
		return d.begun
	}
	lead := min(max(4*d.lookTook, 100*time.Millisecond), time.Second, d.flushDue.Sub(d.begun)/4)
	return d.flushDue.Add(-lead)
}

// killAt is when an application that has not ended is killed: late inside reserve.
func (d *life) killAt() time.Time {
	at := d.deadline.Add(-min(500*time.Millisecond, max(0, d.deadline.Sub(d.cutAt))/4))
	if at.Before(d.cutAt) {
		return d.cutAt
	}
	return at
}

// paused reports whether a known look found that nothing has arrived for quiet_period.
func (d *life) paused() bool {
	return d.counted && d.counts.Known && d.lookStart.Sub(d.arrivalAt) >= d.eff.Policy.QuietPeriod
}

// quiet reports whether zero has lasted for quiet_period.
func (d *life) quiet() bool {
	return !d.zeroSince.IsZero() && d.lookStart.Sub(d.zeroSince) >= d.eff.Policy.QuietPeriod
}

// justBusy reports whether a zero is so young that the end of the application may have made it: an exit closes the
// connections before it can be seen. Like every zero it counts once it has lasted for quiet_period.
func (d *life) justBusy(now time.Time) bool {
	return !d.busyAt.IsZero() && now.Sub(d.busyAt) < d.eff.Policy.QuietPeriod+max(pollFloor, pollFactor*d.lookTook)
}

func (d *life) lookGap() time.Duration { return max(hintGap, d.lookTook) }

// enforce reports whether anything may be touched.
func (m *Machine) enforce() bool { return m.opt.Mode == ModeEnforce }

func (m *Machine) live() bool { return m.life != nil && m.life.outcome == "" }

// isStale counts and reports a command for another generation.
func (m *Machine) isStale(gen uint64, name string) bool {
	if gen == 0 || gen == m.opt.Gen {
		return false
	}
	n := m.stale.Add(1)
	m.log.Info("stale command ignored", "command", name, "meant", gen)
	m.emit(Event{Type: EventStale, Message: fmt.Sprintf("%s for generation %d ignored", name, gen),
		Fields: map[string]any{"command": name, "gen": gen, "stale": n}})
	return true
}

func (m *Machine) begin(c *command, r Request) error {
	if m.isStale(r.Gen, "begin") {
		return ErrStale
	}
	if m.opt.Mode == ModeOff {
		return ErrOff
	}
	if m.gone || (m.life != nil && m.life.outcome != "" && m.life.outcome != OutcomeCancelled) {
		return nil
	}
	now := time.Now()
	if m.live() {
		m.join(r, now)
		c.afterFor = flipped(m.life.id)
		return nil
	}

	eff, err := Validate(r.Policy)
	var forced []error
	if err != nil {
		if !r.Force {
			return fmt.Errorf("begin drain of %q: %w", m.opt.Backend, err)
		}
		forced = append(forced, fmt.Errorf("use the default policy: %w", err))
		if eff, err = Validate(Policy{}); err != nil {
			return err
		}
	}
	base := eff.Policy
	eff = eff.spend(r.Spent)
	if !r.Deadline.IsZero() {
		eff = eff.scale(r.Deadline.Sub(now))
	}
	d := &life{
		id: m.opt.NewID(), cause: r.Cause, by: r.By, reason: r.Reason, base: base, eff: eff,
		begun: now, deadline: now.Add(eff.Policy.Grace), admission: AdmissionOpen, notified: r.Told,
	}
	d.cutAt = d.deadline.Add(-eff.Policy.Reserve)
	d.flushDue = d.cutAt.Add(-eff.Policy.FlushTimeout)
	d.admitEnd = now.Add(eff.Policy.AdmitFor)
	m.chooseOnNew(d)

	if m.enforce() {
		if err := m.opt.World.Journal(m.record(d, recordBegin, PhaseBegin)); err != nil {
			if !r.Force {
				return fmt.Errorf("begin drain of %q: %w: %w", m.opt.Backend, ErrJournal, err)
			}
			forced = append(forced, fmt.Errorf("%w: a restart would not resume this drain: %w", ErrJournal, err))
		}
	}
	m.take(d)
	m.start(d, false)
	for _, err := range forced {
		m.warn("the drain was forced", err)
	}
	c.afterFor = flipped(d.id)
	return nil
}

// flipped is what the answer to a Begin waits for: that it is known what happens to new connections, and
// that it happens where they are refused or redirected at once.
func flipped(id string) func(*Machine) bool {
	return func(m *Machine) bool {
		d := m.life
		if d == nil || d.id != id || d.outcome != "" || d.lingering {
			return true
		}
		return !d.choosing && (d.onNew == OnNewAdmit || !d.flipped.IsZero())
	}
}

// take makes d the current drain.
func (m *Machine) take(d *life) {
	m.epoch++
	d.ctx, d.cancel = context.WithCancelCause(m.ctx)
	m.life = d
	m.state = StateDraining
	m.dirty = true
}

// start does what a begin or a resumption does once, in this order: readiness, event, notice.
func (m *Machine) start(d *life, resumed bool) {
	now := time.Now()
	if m.enforce() {
		m.opt.World.SetReady(false)
	} else {
		m.would("turn readiness off")
	}
	d.nextProgress = now.Add(progressEvery)
	d.nextLook = now
	msg := "the drain begins"
	if resumed {
		msg = "the drain goes on after a restart"
	}
	m.log.Info("drain begins", "drain", d.id, "cause", d.cause, "by", d.by, "reason", d.reason, "deadline", d.deadline,
		"budget", d.eff.String(), "on_new", d.onNew, "on_new_why", d.why, "mode", m.opt.Mode, "resumed", resumed)
	m.emit(Event{Type: EventBegin, Phase: PhaseBegin, Message: msg, Fields: map[string]any{
		"by": d.by, "reason": d.reason, "deadline": d.deadline.Format(time.RFC3339Nano), "on_new": string(d.onNew), "on_new_why": d.why,
		"budget": d.eff.String(), "resumed": resumed,
	}})
	m.enter(PhaseBegin, d.begun)
	if !resumed && d.eff.Policy.NotifyAt == NotifyAtBegin {
		// An application that closes its listener when it hears of the drain must not do so before
		// new connections go elsewhere.
		if d.noticeDue = d.choosing; !d.noticeDue {
			m.notify()
		}
	}
	if d.choosing {
		m.choose(now)
	}
}

// join lets another Begin shorten the drain that runs; nothing else of it counts.
func (m *Machine) join(r Request, now time.Time) {
	d := m.life
	m.log.Info("drain runs already", "drain", d.id, "phase", d.phase, "cause", r.Cause, "by", r.By, "blocks", blockWords(d.blocks(m.holds.Load().n)))
	want := d.deadline
	if !r.Deadline.IsZero() {
		want = now.Add(r.Deadline.Sub(now)) // with a monotonic reading of its own
	}
	if g := r.Policy.Grace; g > 0 && !r.Join {
		if t := now.Add(g - r.Spent); t.Before(want) {
			want = t
		}
	}
	if floor := now.Add(minBudget); want.Before(floor) {
		want = floor
	}
	if !want.Before(d.deadline) {
		return
	}
	from := d.deadline
	m.squeeze(want, now)
	m.moved(recordShorten, EventShortened, r.By, from)
}

// squeeze moves the deadline to an earlier one and what is still to come in proportion.
func (m *Machine) squeeze(to, now time.Time) {
	d := m.life
	left, rest := d.deadline.Sub(now), to.Sub(now)
	move := func(t time.Time) time.Time {
		if !t.After(now) {
			return t
		}
		return now.Add(part(t.Sub(now), rest, left))
	}
	wait := d.flushDue.Sub(now)
	d.admitEnd, d.settleEnd, d.flushDue, d.cutAt, d.flushEnd, d.listBy = move(d.admitEnd), move(d.settleEnd), move(d.flushDue), move(d.cutAt), move(d.flushEnd), move(d.listBy)
	d.deadline = to
	p := &d.eff.Policy
	if now := d.flushDue.Sub(now); wait > 0 && p.QuietPeriod > now/2 {
		p.QuietPeriod = part(p.QuietPeriod, now, wait)
	}
	p.AdmitFor = part(p.AdmitFor, rest, left)
	d.eff.Scaled = fmt.Sprintf("what was left was scaled from %v to %v: the deadline moved earlier", show(left), show(rest))
	m.reslice()
}

// reslice computes the slices anew from the moments.
func (m *Machine) reslice() {
	d := m.life
	p := &d.eff.Policy
	p.Grace = d.deadline.Sub(d.begun)
	p.Reserve = d.deadline.Sub(d.cutAt)
	p.FlushTimeout = d.cutAt.Sub(d.flushDue)
	p.CloseSpread = min(p.CloseSpread, p.Reserve)
	d.eff.Wait = d.flushDue.Sub(d.begun)
	d.eff.Settle = min(maxSettle, d.eff.Wait/3)
}

// moved tells everyone that the deadline has moved. The journal of an earlier one is a courtesy: a
// restart that did not know it would be too late, not wrong.
func (m *Machine) moved(record, event, by string, from time.Time) {
	d := m.life
	if record == recordShorten && m.enforce() {
		if err := m.opt.World.Journal(m.record(d, record, d.phase)); err != nil {
			m.warn("the earlier deadline is not in the journal", err)
		}
	}
	m.log.Info("deadline moved", "drain", d.id, "by", by, "from", from, "deadline", d.deadline, "budget", d.eff.String())
	m.emit(Event{Type: event, Phase: d.phase, Message: "the deadline moved", Fields: map[string]any{
		"by": by, "from": from.Format(time.RFC3339Nano), "deadline": d.deadline.Format(time.RFC3339Nano), "budget": d.eff.String(),
	}})
	if d.admission == AdmissionClosed || m.flipping() {
		m.renewFlip()
	}
}

// refusal returns why a command that needs a drain before its flush cannot be done, or nil.
func (m *Machine) refusal() error {
	switch {
	case !m.live():
		return ErrNotDraining
	case m.state == StateFlushing:
		return ErrFlushing
	}
	return nil
}

func (m *Machine) extend(gen uint64, by time.Duration, limit time.Time, who string) error {
	if m.isStale(gen, "extend") {
		return ErrStale
	}
	if err := m.refusal(); err != nil {
		return err
	}
	d := m.life
	if by <= 0 || by > maxDuration {
		return fmt.Errorf("%w: by %v", ErrLimit, by)
	}
	now := time.Now()
	delta := by
	if !limit.IsZero() {
		delta = min(by, now.Add(limit.Sub(now)).Sub(d.deadline))
	}
	if delta <= 0 {
		return fmt.Errorf("%w: it is %v, the limit %v", ErrLimit, d.deadline.Format(time.RFC3339), limit.Format(time.RFC3339))
	}
	from := d.deadline
	move := func(by time.Duration) {
		d.deadline, d.cutAt, d.flushDue = d.deadline.Add(by), d.cutAt.Add(by), d.flushDue.Add(by)
	}
	move(delta)
	if m.enforce() {
		rec := m.record(d, recordExtend, d.phase)
		rec.By = who
		if err := m.opt.World.Journal(rec); err != nil {
			move(-delta)
			return fmt.Errorf("extend drain %s: %w: %w", d.id, ErrJournal, err)
		}
	}
	d.eff.Scaled = fmt.Sprintf("extended by %v", show(delta))
	m.reslice()
	// A list of survivors made for the old deadline is none for the new one.
	d.hurry, d.listed, d.listErr, d.survivors, d.listStart, d.listBy = false, false, nil, nil, time.Time{}, time.Time{}
	m.moved(recordExtend, EventExtended, who, from)
	return nil
}

func (m *Machine) cutNow(gen uint64, who string) error {
	if m.isStale(gen, "cut") {
		return ErrStale
	}
	if err := m.refusal(); errors.Is(err, ErrFlushing) {
		m.life.endNow = true
		return nil
	} else if err != nil {
		return err
	}
	d := m.life
	now, from := time.Now(), d.deadline
	d.hurry = true
	// Time to flip and to list the survivors; the flush goes out as soon as both are done.
	if due := now.Add(2 * pollFloor); due.Before(d.flushDue) {
		by := d.flushDue.Sub(due)
		d.flushDue, d.cutAt, d.deadline = due, d.cutAt.Add(-by), d.deadline.Add(-by)
		d.listBy = earliest(d.listBy, due)
		d.eff.Scaled = "ended by " + who
		m.reslice()
		m.moved(recordShorten, EventShortened, who, from)
	}
	return nil
}

func (m *Machine) undrain(gen uint64, by string) error {
	if m.isStale(gen, "undrain") {
		return ErrStale
	}
	if err := m.refusal(); err != nil {
		return err
	}
	d := m.life
	if m.flipping() {
		return errDeferred
	}
	if m.enforce() {
		if d.touched && !m.opt.Unguarded {
			ctx, cancel := context.WithTimeoutCause(d.ctx, flipLimit, ErrSlice)
			err := m.opt.World.OpenAdmission(ctx)
			cancel()
			if err != nil {
				return fmt.Errorf("undrain %q: open admission: %w", m.opt.Backend, err)
			}
		}
		rec := m.record(d, recordUndrain, d.phase)
		rec.Outcome, rec.By = OutcomeCancelled, by
		if err := m.opt.World.Journal(rec); err != nil {
			if d.admission == AdmissionClosed {
				m.renewFlip()
			}
			return fmt.Errorf("undrain %q: %w: %w", m.opt.Backend, ErrJournal, err)
		}
		m.opt.World.SetReady(true)
	} else {
		m.would("open admission and turn readiness on again")
	}
	if (d.notified || d.told) && m.enforce() {
		m.warn("the application was told that it drains and may end by itself", nil)
	}
	d.admission, d.unguardedWhy = AdmissionOpen, ""
	m.log.Info("drain taken back", "drain", d.id, "by", by)
	m.finish(OutcomeCancelled)
	return nil
}

// resume goes on with a drain from its record, which checkRecord has found good. The flush is not sent
// again when it was journalled, and neither is the notice: whether they arrived cannot be known, and
// twice is worse than late.
func (m *Machine) resume(r Record) {
	now, boot := time.Now(), m.boot()
	at := func(ns int64) time.Time { return now.Add(time.Duration(ns) - boot) }
	eff, err := Validate(r.Policy)
	if err != nil {
		return
	}
	d := &life{
		id: r.Drain, cause: r.Cause, by: r.By, reason: r.Reason, base: eff.Policy,
		begun: at(r.BegunBoot), deadline: at(r.DeadlineBoot), admission: AdmissionOpen,
	}
	d.eff = eff.scale(d.deadline.Sub(d.begun))
	d.cutAt, d.flushDue = at(r.CutBoot), at(r.FlushBoot)
	if r.CutBoot == 0 || r.FlushBoot == 0 {
		d.cutAt = d.deadline.Add(-d.eff.Policy.Reserve)
		d.flushDue = d.cutAt.Add(-d.eff.Policy.FlushTimeout)
	}
	d.admitEnd = d.begun.Add(d.eff.Policy.AdmitFor)
	switch r.Reached {
	case PhaseSettle, PhaseWait:
		d.admitEnd = now // the flip was made; it is made again, which changes nothing
	}
	m.chooseOnNew(d)
	d.touched = true
	m.take(d)
	m.reslice()
	m.start(d, true)
	if m.opt.Notify && m.enforce() {
		d.notified = true
		m.warn("the application was perhaps told before the restart; it is not told again", nil)
	}
	if r.FlushReason == "" && r.Type != recordFlush {
		return
	}
	d.flushReason = r.FlushReason
	if d.flushReason == "" {
		d.flushReason = FlushDeadline
	}
	m.state = StateFlushing
	d.flushAt, d.flushEnd, d.flushBack, d.flushResult = now, d.cutAt, true, FlushUnknown
	d.flipStart, d.flipped, d.flipGiveUp = now, now, now.Add(chooseLimit+flipLimit)
	m.enter(PhaseFlush, now)
	if m.opt.Unguarded {
		d.admission, d.unguardedWhy = AdmissionUnguarded, whyUnguarded
	} else if m.enforce() {
		d.admission = AdmissionClosed
		if !d.choosing {
			m.renewFlip()
		}
	}
}

// restore is the end of a drain that another process has brought there.
func (m *Machine) restore(r Record) {
	d := &life{
		id: r.Drain, cause: r.Cause, by: r.By, reason: r.Reason, base: r.Policy, eff: Effective{Policy: r.Policy},
		begun: r.Begun, deadline: r.Deadline, admission: AdmissionOpen, flushReason: r.FlushReason, outcome: r.Outcome,
	}
	m.take(d)
	d.cancel(ErrOver)
	if m.enforce() {
		m.opt.World.SetReady(false)
	}
	m.state = StateDone
	if r.Outcome == OutcomeLost {
		m.state = StateLost
	}
	m.closeOld = append(m.closeOld, m.over)
}

const whyUnguarded = "this datapath cannot close admission; zero is believed only after a pause of arrivals"

// onExited is the application's end by itself. What it leaves open then is closed by the kernel, so
// that only the last look before tells what was in flight.
func (m *Machine) onExited(err error) {
	m.gone = true
	now := time.Now()
	d := m.life
	if !m.live() {
		if d != nil && d.outcome != OutcomeCancelled {
			return // after its drain, as it should
		}
		m.state = StateDone
		if err != nil {
			m.state = StateLost
			m.log.Error("application ended by itself", "err", err)
		} else {
			m.log.Info("application ended by itself")
		}
		m.closeOld = append(m.closeOld, m.over)
		return
	}
	if m.state == StateFlushing {
		m.appGone(now)
		return
	}
	if err != nil {
		m.log.Error("application ended before the flush", "drain", d.id, "phase", d.phase, "err", err)
	} else {
		m.log.Info("application ended before the flush", "drain", d.id, "phase", d.phase)
	}
	// An application that was told, and that ends cleanly, has done what it was asked. The last look
	// may be one poll interval older than its last response. Under observe it is told by whoever stops it.
	told := d.notified || d.told
	switch d.cause {
	case CauseSignal, CausePodDeleted, CausePrestop:
		told = told || !m.enforce()
	}
	switch {
	case d.none() && err != nil && d.justBusy(now):
		m.warn("the application ended with connections in flight a moment ago", err)
		m.finish(OutcomeLost)
	case d.none():
		m.conclude(OutcomeDrained)
	case told && err == nil:
		m.warn(fmt.Sprintf("the application was told and ended cleanly; at the last look there were: %s", blockWords(d.blocks(0))), nil)
		m.conclude(OutcomeDrained)
	default:
		m.warn(fmt.Sprintf("the application ended with connections in flight: %s", blockWords(d.blocks(0))), err)
		m.conclude(OutcomeLost)
	}
}

// appGone notes that the application has flushed or ended, and looks what that left.
func (m *Machine) appGone(now time.Time) {
	d := m.life
	if d.appEnded {
		return
	}
	d.appEnded, d.appEndedAt = true, now
	if d.flushResult == "" {
		d.flushResult = FlushOK
	}
	m.onHint()
}

// enter records a phase.
func (m *Machine) enter(p Phase, now time.Time) {
	d := m.life
	d.phase = p
	d.phases = append(d.phases, PhaseTime{p, now})
	m.dirty = true
	if p == PhaseBegin {
		return // EventBegin says it
	}
	m.log.Info("drain phase", "drain", d.id, "phase", p, "left", show(d.deadline.Sub(now)))
	m.emit(Event{Type: EventPhase, Phase: p, Message: "the drain is in " + string(p), Fields: map[string]any{"left_s": d.deadline.Sub(now).Seconds()}})
}

// finish ends the drain with its one outcome.
func (m *Machine) finish(o Outcome) {
	d := m.life
	now := time.Now()
	d.outcome, d.ended = o, now
	m.enter(PhaseDone, now)
	d.cancel(ErrOver)
	m.closeOld = append(m.closeOld, m.over)
	switch o {
	case OutcomeCancelled:
		m.state = StateServing
		m.over = make(chan struct{})
	case OutcomeLost:
		m.state = StateLost
	default:
		m.state = StateDone
	}
	if m.enforce() && o != OutcomeCancelled {
		rec := m.record(d, recordEnd, PhaseDone)
		if err := m.opt.World.Journal(rec); err != nil {
			m.warn("the end of the drain is not in the journal", err)
		}
	}
	took := now.Sub(d.begun)
	args := []any{"drain", d.id, "cause", d.cause, "outcome", o, "took", show(took), "flush_reason", d.flushReason,
		"survivors", len(d.survivors), "retired", d.retired, "late", d.late}
	if d.how != "" {
		args = append(args, "late_arrived", d.arrived, "late_ended", d.lateEnded)
	}
	switch {
	case o == OutcomeLost && m.enforce():
		m.log.Error("drain ended", args...)
	case o == OutcomeLost || o == OutcomeExpired:
		m.log.Warn("drain ended", args...)
	default:
		m.log.Info("drain ended", args...)
	}
	fields := map[string]any{
		"flush_reason": string(d.flushReason), "took_s": took.Seconds(), "retired": d.retired, "late": d.late, "survivors": len(d.survivors),
	}
	if d.report != nil {
		fields["report"] = *d.report
	}
	if d.how != "" {
		fields["late_arrived"], fields["late_ended"] = d.arrived, d.lateEnded
	}
	m.emit(Event{Type: EventEnd, Phase: PhaseDone, Outcome: o, Message: "the drain is over: " + string(o), Fields: fields})
}

// record is the journal's line of d as it is now.
func (m *Machine) record(d *life, typ string, reached Phase) Record {
	now, boot := time.Now(), m.boot()
	on := func(t time.Time) int64 { return int64(boot + t.Sub(now)) }
	return Record{
		Version: recordVersion, Type: typ, Drain: d.id, Backend: m.opt.Backend, Gen: m.opt.Gen, Cause: d.cause, By: d.by, Reason: d.reason,
		Begun: d.begun, Deadline: d.deadline, BegunBoot: on(d.begun), DeadlineBoot: on(d.deadline), FlushBoot: on(d.flushDue), CutBoot: on(d.cutAt),
		Policy: d.base, Reached: reached, FlushReason: d.flushReason, Outcome: d.outcome,
	}
}

// emit fills in whose the event is and publishes it.
func (m *Machine) emit(e Event) {
	e.Time = time.Now()
	e.Service, e.Backend, e.Gen = m.opt.Service, m.opt.Backend, m.opt.Gen
	if d := m.life; d != nil {
		e.Drain, e.Cause = d.id, d.cause
	}
	if m.opt.Mode == ModeObserve {
		if e.Fields == nil {
			e.Fields = map[string]any{}
		}
		e.Fields["would"] = true
	}
	m.opt.World.Emit(e)
}

// warn says that something is not as it should be, and goes on.
func (m *Machine) warn(msg string, err error) {
	d := m.life
	text := msg
	fields := map[string]any{}
	args := []any{"drain", d.id, "phase", d.phase, "warning", msg}
	if err != nil {
		text = msg + ": " + err.Error()
		fields["err"] = err.Error()
		args = append(args, "err", err)
	}
	if len(d.warnings) < maxWarnings {
		d.warnings = append(d.warnings, text)
	}
	m.dirty = true
	m.log.Warn("drain warning", args...)
	m.emit(Event{Type: EventWarning, Phase: d.phase, Message: text, Fields: fields})
}

// would notes what enforcing would have done now.
func (m *Machine) would(what string) {
	d := m.life
	d.would = append(d.would, what)
	m.dirty = true
	m.log.Info("observe", "drain", d.id, "phase", d.phase, "would", what)
	m.emit(Event{Type: EventWould, Phase: d.phase, Message: "would " + what})
}

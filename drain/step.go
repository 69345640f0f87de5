// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// kind is one of World's calls that run beside the machine, each at most once at a time.
type kind int

const (
	callFlip kind = iota
	callNotify
	callSettled
	callLook
	callRetire
	callSurvivors
	callFlush
	callCut
	callKill
	callChoose
	callLate
	callEndLate
	kinds
)

// result is what such a call brought.
type result struct {
	kind           kind
	epoch          uint64
	started, ended time.Time
	err            error

	counts  Counts
	pending Pending
	n       int
	list    []Survivor
	report  CutReport
	renewal bool
	how     OnNew // what was chosen, or redirected to; empty for a closed admission
	why     string
	lates   LateCounts
}

// call runs f in a goroutine of its own, with a context that ends at until or with the drain. It
// reports false if such a call is still on its way.
func (m *Machine) call(k kind, until time.Time, f func(context.Context, *result)) bool {
	if m.busy[k] {
		return false
	}
	m.busy[k] = true
	r := result{kind: k, epoch: m.epoch, started: time.Now()}
	ctx, cancel := context.WithDeadlineCause(m.life.ctx, until, ErrSlice)
	m.wg.Go(func() {
		defer cancel()
		f(ctx, &r)
		r.ended = time.Now()
		select {
		case m.results <- r:
		case <-m.dead:
		}
	})
	return true
}

// onResult takes in what a call brought. That of an earlier drain only frees its place.
func (m *Machine) onResult(r result) {
	m.busy[r.kind] = false
	if r.epoch != m.epoch || !m.live() {
		m.lateFlip(r)
		return
	}
	d := m.life
	switch r.kind {
	case callFlip:
		m.onFlip(r)
	case callNotify:
		if r.err != nil {
			m.warn("the application could not be told that it drains", r.err)
			d.notified = false
			return
		}
		d.notifiedAt = r.ended
	case callSettled:
		m.onSettled(r)
	case callLook:
		m.onLook(r)
	case callRetire:
		d.retired += r.n
		if r.err != nil && !errors.Is(r.err, context.DeadlineExceeded) && !errors.Is(r.err, context.Canceled) {
			m.warnOnce("idle connections could not be retired", r.err)
		}
	case callSurvivors:
		if !d.flushAt.IsZero() || d.listStart.IsZero() || r.started.Before(d.listStart) {
			return // too late, or made for a deadline that has been extended since
		}
		d.listed, d.survivors, d.listErr = true, r.list, r.err
	case callFlush:
		m.onFlush(r)
	case callCut:
		d.cutOver = true
		d.report = &r.report
		if r.err != nil {
			m.warn("not all could be ended", r.err)
		}
		m.log.Info("connections cut", "drain", d.id, "graceful", r.report.Graceful, "destroyed", r.report.Destroyed,
			"left", r.report.Left, "in_flight", r.report.InFlight, "note", r.report.Note)
		m.emit(Event{Type: EventCut, Phase: d.phase, Message: "connections were ended", Fields: map[string]any{
			"method": string(d.eff.Policy.OnDeadline), "report": r.report,
		}})
	case callKill:
		d.killOver = true
		if r.err != nil {
			m.warn("the application could not be killed", r.err)
		}
	case callChoose:
		if d.choosing { // else given up already
			m.chosen(r.how, r.why, r.err)
		}
	case callLate:
		m.onLate(r)
	case callEndLate:
		m.onEndLate(r)
	}
}

// lateFlip undoes a flip that returned after its drain was taken back, and makes the one that had to
// wait for it.
func (m *Machine) lateFlip(r result) {
	if r.kind != callFlip {
		return
	}
	if m.live() && m.life.renew {
		m.renewFlip()
		return
	}
	serving := m.state == StateServing || m.live() && m.life.flipStart.IsZero()
	if r.err != nil || !serving {
		return
	}
	ctx, cancel := context.WithTimeoutCause(m.ctx, flipLimit, ErrSlice)
	defer cancel()
	if err := m.opt.World.OpenAdmission(ctx); err != nil {
		m.log.Error("open admission after a late flip", "err", err)
	}
}

// warnOnce is warn for what repeats at every look.
func (m *Machine) warnOnce(msg string, err error) {
	text := msg + ": " + err.Error()
	if slices.Contains(m.life.warnings, text) {
		return
	}
	m.warn(msg, err)
}

// advance moves the drain as far as it goes now, and starts the calls that are due.
func (m *Machine) advance() {
	if !m.live() {
		return
	}
	for m.live() && m.transition(time.Now()) {
		m.dirty = true
	}
	if !m.live() {
		return
	}
	m.life.fresh = false
	now := time.Now()
	m.poll(now)
	m.progress(now)
}

// transition takes one step if one is due, and reports whether it did.
func (m *Machine) transition(now time.Time) bool {
	d := m.life
	if d.lateDue(now) {
		m.endLate(now)
		return true
	}
	if d.lingering {
		return m.stepLinger(now)
	}
	listing := !now.Before(d.listAt())
	switch d.phase {
	case PhaseBegin:
		m.enter(PhaseStopNew, now)
		return true

	case PhaseStopNew:
		if d.choosing {
			if now.Before(d.chooseBy) && !listing {
				return false
			}
			m.chosen("", "", errors.New("there was no answer in time"))
			return true
		}
		if d.noticeDue && (!d.onNew.redirects() || !d.flipped.IsZero()) {
			d.noticeDue = false
			m.notify()
		}
		if d.flipped.IsZero() {
			if d.flipStart.IsZero() {
				if d.onNew == OnNewAdmit && now.Before(d.admitEnd) && !listing && !d.paused() {
					return false
				}
				m.flip(now)
				return true
			}
			if now.Before(d.flipGiveUp) {
				return false
			}
			d.gaveUp = true
			if err := fmt.Errorf("it did not return within %v", show(now.Sub(d.flipStart))); d.onNew.redirects() {
				m.fallBack(err)
			} else {
				m.unguarded(now, err)
			}
			return true
		}
		d.settleEnd = now.Add(d.eff.Settle)
		d.nextSettle = now
		m.enter(PhaseSettle, now)
		return true

	case PhaseSettle:
		if !d.settled && now.Before(d.settleEnd) && !listing {
			return false
		}
		m.endSettle(now)
		return true

	case PhaseWait:
		if d.fresh && d.quiet() && m.holds.Load().n == 0 {
			if m.flush(FlushZero, now) {
				return true
			}
			d.fresh = false // ask again after the next look
		}
		if d.listStart.IsZero() {
			if !listing {
				return false
			}
			m.list(now)
			return true
		}
		switch {
		case d.listed && (d.hurry || !now.Before(d.flushDue)):
		case !now.Before(d.listBy):
		default:
			return false
		}
		m.flush(FlushDeadline, now)
		return true

	case PhaseFlush:
		return m.stepFlush(now)

	case PhaseCut:
		return m.stepCut(now)
	}
	return false
}

// flip closes admission, or redirects what comes.
func (m *Machine) flip(now time.Time) {
	d := m.life
	d.flipStart = now
	switch {
	case !m.enforce():
		d.flipped, d.nextLook = now, now
		if d.onNew.redirects() {
			m.would(string(d.onNew) + " new connections")
		} else {
			m.would("close admission")
		}
	case m.opt.Unguarded:
		d.flipped, d.nextLook = now, now
		d.admission, d.unguardedWhy = AdmissionUnguarded, whyUnguarded
	default:
		// Not so long that the flush would be late.
		until := now.Add(flipLimit)
		if at := d.listAt(); at.Before(until) {
			until = at
		}
		if least := now.Add(pollFloor); until.Before(least) {
			until = least
		}
		d.flipGiveUp = until.Add(pollFloor)
		if !m.busy[callFlip] {
			d.gaveUp = false
		}
		m.closeAdmission(until, false)
	}
}

func (m *Machine) closeAdmission(until time.Time, renewal bool) {
	d := m.life
	d.touched = true
	end := d.deadline.Add(deadMan)
	how := d.onNew
	if !how.redirects() {
		how = ""
	}
	if !m.call(callFlip, until, func(ctx context.Context, r *result) {
		r.renewal, r.how = renewal, how
		if how != "" {
			r.err = m.late.Redirect(ctx, how, end)
		} else {
			r.err = m.opt.World.CloseAdmission(ctx, end)
		}
	}) {
		d.renew = true
	}
}

// renewFlip moves the end of the rule with the deadline.
func (m *Machine) renewFlip() {
	m.life.renew = false
	m.closeAdmission(time.Now().Add(flipLimit), true)
}

// flipping reports whether a call that closes admission is on its way and waited for.
func (m *Machine) flipping() bool {
	return m.live() && m.busy[callFlip] && !m.life.gaveUp
}

func (m *Machine) onFlip(r result) {
	d := m.life
	switch {
	case r.err == nil:
		d.admission, d.unguardedWhy = AdmissionClosed, ""
		if d.flipped.IsZero() {
			d.flipped = r.ended
			d.nextLook = r.ended // the baseline of late arrivals
		}
		if r.how != "" {
			m.redirected(r.how, r.ended)
		}
	case r.renewal && r.how != "" && d.how == "": // after a restart
		m.fallBack(r.err)
		d.renew = true
	case r.renewal:
		m.warn("the end of the admission rule could not be moved with the deadline", r.err)
	case d.gaveUp:
	case d.flipped.IsZero() && r.how != "":
		m.fallBack(r.err)
	case d.flipped.IsZero():
		m.unguarded(r.ended, r.err)
	}
	if d.renew {
		m.renewFlip()
	}
}

// unguarded goes on without a closed admission.
func (m *Machine) unguarded(now time.Time, err error) {
	d := m.life
	d.flipped, d.nextLook = now, now
	d.admission = AdmissionUnguarded
	d.unguardedWhy = "close admission: " + err.Error()
	m.warn("admission is not closed; zero is believed only after a pause of arrivals", err)
}

func (m *Machine) notify() {
	d := m.life
	if !m.opt.Notify || d.notified {
		return
	}
	d.notified = true
	if !m.enforce() {
		m.would("tell the application that it drains")
		return
	}
	n := Notice{Drain: d.id, Gen: m.opt.Gen, Cause: d.cause, Deadline: d.deadline}
	if !m.call(callNotify, d.flushDue, func(ctx context.Context, r *result) { r.err = m.opt.World.Notify(ctx, n) }) {
		d.notified = false
		m.warn("the application is not told: the notice of the drain before this one has not returned", nil)
	}
}

func (m *Machine) onSettled(r result) {
	d := m.life
	// Settle is short, so that its cost is bounded by its length too: a slow look must not be the only one.
	d.nextSettle = r.ended.Add(min(max(pollFloor, pollFactor*r.ended.Sub(r.started)), maxSettle/6))
	d.settleErr = r.err
	if r.err != nil {
		d.empties = 0
		return
	}
	d.pending = r.pending
	if r.pending.Queued == 0 {
		d.empties++
	} else {
		d.empties = 0
	}
	// Once is not enough: a handshake can complete between the reading of two listeners.
	d.settled = d.empties >= 2 && r.pending.HalfOpen == 0
}

func (m *Machine) endSettle(now time.Time) {
	d := m.life
	if !d.settled {
		msg := fmt.Sprintf("not settled: %d connections in accept queues and %d half-open are left", d.pending.Queued, d.pending.HalfOpen)
		if d.settleErr != nil || d.empties == 0 && d.pending == (Pending{}) {
			msg = "not settled: what the flip left behind is not known"
		}
		m.warn(msg, d.settleErr)
	}
	m.enter(PhaseWait, now)
	if d.eff.Policy.NotifyAt == NotifyAtSettled && now.Before(d.listAt()) {
		m.notify()
	}
	if !m.enforce() && d.eff.Policy.Idle == IdleClose {
		m.would("retire idle connections")
	}
	if d.quiet() {
		d.nextLook = now // it was zero while settling: confirm
	}
}

// poll starts the looks that are due.
func (m *Machine) poll(now time.Time) {
	d := m.life
	w := m.opt.World
	m.pollLate(now)
	if d.lingering {
		return
	}
	if d.phase == PhaseSettle && !d.settled && !now.Before(d.nextSettle) {
		m.call(callSettled, d.settleEnd, func(ctx context.Context, r *result) { r.pending, r.err = w.Settled(ctx) })
	}
	if m.busy[callLook] {
		if !d.lookBegan.IsZero() && d.counts.Known && !now.Before(d.lookBegan.Add(lookLimit)) {
			m.lost(now, fmt.Errorf("a look has not returned for %v", show(now.Sub(d.lookBegan))))
		}
		return
	}
	if !now.Before(d.nextLook) {
		d.lookBegan, d.again = now, false
		m.call(callLook, now.Add(lookLimit), func(ctx context.Context, r *result) { r.counts, r.err = w.Look(ctx) })
	}
}

// lost makes the counts unknown.
func (m *Machine) lost(now time.Time, err error) {
	d := m.life
	d.counts, d.countsAt = Counts{}, now
	d.zeroSince = time.Time{}
	m.dirty = true
	if !d.unknown {
		d.unknown = true
		m.warn("the counts are unknown, which never reads as zero", err)
	}
}

var errNegative = errors.New("a count below zero")

func (m *Machine) onLook(r result) {
	d := m.life
	took := r.ended.Sub(r.started)
	d.lookTook, d.lookStart, d.lookEnd = took, r.started, r.ended
	d.lookBegan = time.Time{}
	gap := max(pollFloor, pollFactor*took)
	if r.err != nil {
		gap = min(gap, retryGap) // one that hung must not blind the rest of the drain
	}
	d.nextLook = r.ended.Add(gap)
	if d.again {
		d.nextLook = earliest(d.nextLook, r.ended.Add(d.lookGap()))
	}
	d.fresh = true
	c := r.counts
	if r.err == nil && c.Known && min(c.Handshake, c.Queued, c.Active, c.Idle, c.Unused, c.Stalled, c.Closing) < 0 {
		r.err = errNegative
	}
	if r.err != nil || !c.Known {
		m.lost(r.ended, r.err)
	} else {
		if d.unknown {
			d.unknown = false
			m.log.Info("counts are known again", "drain", d.id)
		}
		m.known(r)
	}
	if d.phase == PhaseWait && m.enforce() && d.eff.Policy.Idle == IdleClose && !r.started.Before(d.flipped) {
		m.call(callRetire, d.flushDue, func(ctx context.Context, r *result) { r.n, r.err = m.opt.World.Retire(ctx) })
	}
}

// known takes in a known count.
func (m *Machine) known(r result) {
	d := m.life
	c := r.counts
	d.counts, d.countsAt = c, r.ended
	if d.inFlight() != 0 {
		d.busyAt = r.ended
	}
	arrived := d.counted && c.Accepted != d.accepted
	if !d.counted || arrived {
		// The moment of the look's end is the latest at which it can have happened.
		d.arrivalAt = r.ended
	}
	d.counted, d.accepted = true, c.Accepted
	quiet := d.eff.Policy.QuietPeriod

	if d.flipped.IsZero() || r.started.Before(d.flipped) {
		// Zero is not believed while admission is open, only a pause of arrivals is.
		d.zeroSince = time.Time{}
		if d.onNew == OnNewAdmit && !d.paused() {
			d.confirm(d.arrivalAt.Add(quiet))
		}
		return
	}
	if !d.lateSet {
		d.lateSet, d.lateBase = true, c.Accepted
	}
	if c.Accepted > d.lateBase {
		d.late = max(d.late, c.Accepted-d.lateBase)
	}
	switch {
	case d.inFlight() != 0:
		d.zeroSince = time.Time{}
	case d.zeroSince.IsZero() || arrived:
		// Something that came and went between two looks was not zero.
		d.zeroSince = r.ended
	}
	if !d.zeroSince.IsZero() && !d.quiet() {
		d.confirm(d.zeroSince.Add(quiet))
	}
}

// confirm makes the next look one that starts at t, if that is earlier than the poll.
func (d *life) confirm(t time.Time) {
	if gap := d.lookEnd.Add(d.lookGap()); t.Before(gap) {
		t = gap
	}
	d.nextLook = earliest(d.nextLook, t)
}

func earliest(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// onHint looks at once, or right after the look that is on its way.
func (m *Machine) onHint() {
	if !m.live() {
		return
	}
	d := m.life
	if m.busy[callLook] {
		d.again = true
		return
	}
	now := time.Now()
	t := now
	if gap := d.lookEnd.Add(d.lookGap()); t.Before(gap) {
		t = gap
	}
	d.nextLook = earliest(d.nextLook, t)
}

// list starts to list the survivors. The list is late after listBy, and the flush goes out without it.
func (m *Machine) list(now time.Time) {
	d := m.life
	d.listStart = now
	d.listBy = d.flushDue
	if least := now.Add(min(pollFloor, max(0, d.cutAt.Sub(now))/10)); d.listBy.Before(least) {
		d.listBy = least
	}
	m.call(callSurvivors, d.listBy, func(ctx context.Context, r *result) { r.list, r.err = m.opt.World.Survivors(ctx) })
}

// flush sends the flush. It is journalled first, so that no restart sends it again. One on zero is not sent, and everything
// is as before, if the application holds something.
func (m *Machine) flush(reason FlushReason, now time.Time) bool {
	d := m.life
	d.flushReason, d.flushAt = reason, now
	if reason == FlushDeadline {
		if !d.listed && d.listErr == nil {
			d.listErr = errors.New("the list did not come in time")
		}
		m.tellSurvivors()
	}
	if m.enforce() {
		err := m.opt.World.Journal(m.record(d, recordFlush, PhaseFlush))
		if reason == FlushZero && errors.Is(err, ErrHeld) {
			d.flushReason, d.flushAt = "", time.Time{}
			return false
		}
		if err != nil {
			m.warn("the flush is not in the journal: a restart would send it again", err)
		}
	}
	if reason == FlushZero {
		d.survivors = nil
	}
	m.state = StateFlushing
	m.enter(PhaseFlush, now)
	// A flush that is late, as after an outage, is still sent, and given a moment.
	if least := now.Add(minBudget); d.cutAt.Before(least) {
		d.cutAt = earliest(least, now.Add(max(minBudget/2, d.cutAt.Sub(now))))
	}
	d.flushEnd = earliest(now.Add(d.eff.Policy.FlushTimeout), d.cutAt)
	left := max(0, d.flushEnd.Sub(now))
	m.log.Info("flush", "drain", d.id, "flush_reason", reason, "left", show(left), "blocks", blockWords(d.blocks(m.holds.Load().n)))
	msg := "the application is told to flush: " + string(reason)
	if !m.enforce() {
		msg = "would tell the application to flush: " + string(reason)
	}
	m.emit(Event{Type: EventFlush, Phase: PhaseFlush, Message: msg, Fields: map[string]any{"reason": string(reason), "left_s": left.Seconds()}})
	if !m.enforce() {
		d.flushBack, d.flushResult = true, FlushWould
		m.would("flush: " + string(reason))
		return true
	}
	// Its context lasts as long as the application may: it is how its end is heard of.
	req := FlushRequest{Drain: d.id, Gen: m.opt.Gen, Cause: d.cause, Reason: reason, TimeLeft: left}
	m.call(callFlush, d.killAt(), func(ctx context.Context, r *result) { r.err = m.opt.World.Flush(ctx, req) })
	return true
}

func (m *Machine) tellSurvivors() {
	d := m.life
	fields := map[string]any{"survivors": d.survivors, "n": len(d.survivors)}
	if d.listErr != nil {
		fields["err"] = d.listErr.Error()
		m.warn("the survivors could not be listed", d.listErr)
	}
	m.log.Warn("wait slice is over", "drain", d.id, "survivors", len(d.survivors), "blocks", blockWords(d.blocks(m.holds.Load().n)))
	m.emit(Event{Type: EventSurvivors, Phase: d.phase, Message: fmt.Sprintf("the wait slice is over with %d connections open", len(d.survivors)), Fields: fields})
}

func (m *Machine) onFlush(r result) {
	d := m.life
	d.flushBack = true
	switch {
	case r.err == nil:
		if d.flushResult == "" {
			d.flushResult = FlushOK
		}
		m.appGone(r.ended)
	case d.appEnded:
	case errors.Is(r.err, context.DeadlineExceeded) || errors.Is(r.err, ErrSlice):
		d.flushResult = FlushTimeout
	default:
		d.flushResult = FlushFailed
		m.warn("the flush could not be delivered", r.err)
	}
	if errors.Is(r.err, ErrEnded) {
		m.appGone(r.ended)
	}
	fields := map[string]any{"reason": string(d.flushReason), "result": string(d.flushResult)}
	if r.err != nil {
		fields["err"] = r.err.Error()
	}
	m.emit(Event{Type: EventFlush, Phase: d.phase, Message: "the flush came back: " + string(d.flushResult), Fields: fields})
}

// stepFlush waits for the application and for what is still in flight, until deadline − reserve.
func (m *Machine) stepFlush(now time.Time) bool {
	d := m.life
	if !m.enforce() {
		if d.flushReason == FlushZero || (d.fresh && d.none()) {
			m.conclude(d.result())
			return true
		}
	}
	if d.appEnded && d.fresh && !d.lookStart.Before(d.appEndedAt) {
		if !d.counts.Known {
			m.warn("the count is unknown after the flush; the application has ended, so nothing is cut", nil)
			m.conclude(d.result())
			return true
		}
		if d.inFlight() == 0 {
			m.conclude(d.result())
			return true
		}
	}
	if d.flushResult == "" && !now.Before(d.flushEnd) {
		d.flushResult = FlushTimeout
		m.warn(fmt.Sprintf("the application has not ended within flush_timeout; it has until %s", d.killAt().Format(time.TimeOnly)), nil)
	}
	if d.flushResult == FlushFailed && !d.appEnded && d.fresh && d.none() {
		// It has not heard, nobody is connected, and nothing that is to come changes that.
		m.enter(PhaseCut, now)
		d.cutOver = true
		m.kill(now)
		return true
	}
	if now.Before(d.cutAt) {
		return false
	}
	if d.appEnded && !(d.counts.Known && d.inFlight() > 0) {
		m.conclude(d.result())
		return true
	}
	m.enter(PhaseCut, now)
	return true
}

// result is the outcome after a flush.
func (d *life) result() Outcome {
	cut := d.report != nil && d.report.Graceful+d.report.Destroyed+d.report.Left > 0
	if d.flushReason != FlushZero || cut || (d.killed && !d.none()) {
		return OutcomeExpired
	}
	return OutcomeDrained
}

// stepCut ends what is left by policy, then an application that has not ended.
func (m *Machine) stepCut(now time.Time) bool {
	d := m.life
	if d.cutStart.IsZero() && !d.cutOver {
		m.cut(now)
		return true
	}
	if !d.cutOver && !now.Before(d.cutLimit()) {
		d.cutOver = true
		m.warn("the cut has not returned in time", nil)
		return true
	}
	if !d.cutOver {
		return false
	}
	switch {
	case d.appEnded || !m.enforce():
	case d.killing:
		if !d.killOver && now.Before(d.killBy) {
			return false
		}
	case now.Before(d.killAt()):
		return false
	default:
		m.kill(now)
		return true
	}
	m.conclude(d.result())
	return true
}

// cutLimit is when a cut must be over: before the kill, or at the deadline if nobody is left to kill.
func (d *life) cutLimit() time.Time {
	t := d.killAt()
	if d.appEnded {
		t = d.deadline
	}
	if least := d.cutStart.Add(minBudget / 2); t.Before(least) {
		return least
	}
	return t
}

func (m *Machine) cut(now time.Time) {
	d := m.life
	d.cutStart = now
	p := d.eff.Policy
	if d.none() || p.OnDeadline == OnDeadlineLeave {
		d.cutOver = true
		if !d.none() {
			m.log.Info("connections left alone", "drain", d.id, "blocks", blockWords(d.blocks(0)))
		}
		return
	}
	within := d.cutLimit().Sub(now)
	req := CutRequest{Drain: d.id, Method: p.OnDeadline, Within: within}
	if p.OnDeadline == OnDeadlineCut {
		req.Spread = min(p.CloseSpread, within)
	}
	msg := "connections are being ended"
	if !m.enforce() {
		msg = fmt.Sprintf("would %s: %s", p.OnDeadline, blockWords(d.blocks(0)))
	}
	m.emit(Event{Type: EventCut, Phase: PhaseCut, Message: msg, Fields: map[string]any{
		"method": string(p.OnDeadline), "spread_s": req.Spread.Seconds(), "within_s": within.Seconds(),
	}})
	if !m.enforce() {
		m.would(fmt.Sprintf("%s: %s", p.OnDeadline, blockWords(d.blocks(0))))
		d.cutOver = true
		return
	}
	m.call(callCut, now.Add(within), func(ctx context.Context, r *result) { r.report, r.err = m.opt.World.Cut(ctx, req) })
}

func (m *Machine) kill(now time.Time) {
	d := m.life
	d.killing, d.killed = true, true
	d.killBy = d.deadline
	if least := now.Add(5 * minBudget); d.killBy.Before(least) {
		d.killBy = least
	}
	m.warn("the application has not ended in time", nil)
	m.call(callKill, d.killBy, func(ctx context.Context, r *result) { r.err = m.opt.World.Kill(ctx) })
}

// progress logs the counts every 5 s.
func (m *Machine) progress(now time.Time) {
	d := m.life
	if now.Before(d.nextProgress) {
		return
	}
	d.nextProgress = d.nextProgress.Add(progressEvery)
	h := m.holds.Load()
	blocks := blockWords(d.blocks(h.n))
	fields := map[string]any{"known": d.counts.Known, "blocks": blocks, "holds": h.n, "retired": d.retired, "left_s": d.deadline.Sub(now).Seconds()}
	args := []any{"drain", d.id, "phase", d.phase, "left", show(d.deadline.Sub(now)), "known", d.counts.Known, "blocks", blocks, "retired", d.retired}
	if len(h.names) > 0 {
		args = append(args, "held_by", h.names)
	}
	if d.counts.Known {
		fields["in_flight"], fields["counts"] = d.inFlight(), d.counts.fields()
		args = append(args, "in_flight", d.inFlight(), "counts", d.counts.fields())
	}
	m.log.Info("drain progress", args...)
	m.emit(Event{Type: EventProgress, Phase: d.phase, Message: "waiting for: " + cmp.Or(blocks, "the application"), Fields: fields})
	if d.how != "" && d.lates != d.lateTold {
		m.tellLate(fmt.Sprintf("late connections: %d came, %d are carried, %d parked", d.lates.Arrived, d.lates.Carried, d.lates.Parked), nil)
	}
}

// sleep is how long nothing is due.
func (m *Machine) sleep() time.Duration {
	if !m.live() {
		return time.Hour
	}
	d := m.life
	next := d.nextProgress
	at := func(t time.Time) {
		if !t.IsZero() {
			next = earliest(next, t)
		}
	}
	m.sleepLate(at)
	if d.lingering {
		return max(0, time.Until(next))
	}
	if m.busy[callLook] {
		if !d.lookBegan.IsZero() && d.counts.Known {
			at(d.lookBegan.Add(lookLimit))
		}
	} else {
		at(d.nextLook)
	}
	switch d.phase {
	case PhaseStopNew:
		if d.choosing {
			at(d.chooseBy)
			at(d.listAt())
		} else if d.flipStart.IsZero() {
			at(d.admitEnd)
			at(d.listAt())
		} else {
			at(d.flipGiveUp)
		}
	case PhaseSettle:
		at(d.settleEnd)
		at(d.listAt())
		if !m.busy[callSettled] {
			at(d.nextSettle)
		}
	case PhaseWait:
		switch {
		case d.listStart.IsZero():
			at(d.listAt())
		case d.listed:
			at(d.flushDue)
			at(d.listBy)
		default:
			at(d.listBy)
		}
	case PhaseFlush:
		if d.flushResult == "" {
			at(d.flushEnd)
		}
		at(d.cutAt)
	case PhaseCut:
		switch {
		case !d.cutOver:
			at(d.cutLimit())
		case d.killing:
			at(d.killBy)
		default:
			at(d.killAt())
		}
	}
	return max(0, time.Until(next))
}

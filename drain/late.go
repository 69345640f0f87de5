// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// chooseLimit is when a choice is given up, and what a test dial gets.
const chooseLimit = time.Second

// redirects reports whether a connection that comes late goes elsewhere.
func (o OnNew) redirects() bool { return o == OnNewSteer || o == OnNewRelay || o == OnNewHold }

// away is what a life knows of late connections. It belongs to the goroutine of Run.
//
// A drain whose application is done, but whose late connections are not, lingers: its outcome is settled
// and its phase stays, until none has come for quiet_period and none is carried, or until the deadline.
type away struct {
	choosing  bool
	chooseBy  time.Time // the choice is given up
	chosenWhy string
	noticeDue bool // the application is told as soon as late connections go elsewhere
	touched   bool // admission may be closed: a flip was started, here or before a restart

	how       OnNew // what is in force; empty: nothing is redirected
	lates     LateCounts
	arrived   uint64    // at the last known look
	arrivedAt time.Time // of the last arrival, or of the redirection
	lateLook  time.Time // when the look began that brought lates
	lateBegan time.Time // of the look on its way
	nextLate  time.Time
	lateLost  bool       // the last look failed, for warning once
	lateTold  LateCounts // what the last event said

	lingering  bool
	verdict    Outcome
	lingerFrom time.Time
	endNow     bool // an operator ends the drain
	endStart   time.Time
	endBy      time.Time
	endOver    bool
	lateEnded  int // how many were carried or parked when they were ended
}

// chooseOnNew resolves what needs no question: admit, refuse, and all else where nothing can be redirected.
func (m *Machine) chooseOnNew(d *life) {
	want := d.eff.Policy.OnNew
	d.onNew, d.why = want, "configured"
	switch {
	case want == OnNewAdmit:
	case want == OnNewRefuse:
		if m.opt.Unguarded {
			d.onNew, d.why = OnNewAdmit, "refuse is configured, but admission cannot be closed here"
		}
	case m.late != nil && !m.opt.Unguarded:
		d.choosing, d.why = true, "being found out"
	case want == OnNewAuto:
		d.onNew, d.why = OnNewAdmit, "nothing else could take new connections, so they are admitted until they pause"
	default:
		d.onNew, d.why = OnNewAdmit, fmt.Sprintf("%s is configured, but new connections cannot be redirected here, so they are admitted until they pause", want)
	}
}

// choose asks World what can be done for late connections.
func (m *Machine) choose(now time.Time) {
	d := m.life
	want := d.eff.Policy.OnNew
	until := earliest(now.Add(chooseLimit), d.listAt())
	d.chooseBy = until.Add(pollFloor)
	if !m.call(callChoose, until, func(ctx context.Context, r *result) { r.how, r.why, r.err = m.late.ChooseLate(ctx, want) }) {
		m.chosen("", "", errors.New("the question of the drain before this one has not been answered"))
	}
}

// chosen takes in what ChooseLate said.
func (m *Machine) chosen(got OnNew, why string, err error) {
	d := m.life
	want := d.eff.Policy.OnNew
	d.choosing = false
	if err == nil && !got.redirects() && got != OnNewAdmit && got != OnNewRefuse {
		err = fmt.Errorf("on_new %q is no answer", got)
	}
	if err != nil {
		got, why = OnNewAdmit, "new connections are admitted until they pause, since it could not be found out what else can be done with them"
		if want != OnNewAuto {
			why = fmt.Sprintf("%s is configured, but it could not be found out whether it works, so new connections are admitted until they pause", want)
		}
		m.warn(why, err)
	}
	d.onNew, d.why, d.chosenWhy = got, why, why
	m.tellLate(fmt.Sprintf("%s: %s", got, why), err)
	if !d.flushAt.IsZero() && m.enforce() {
		m.renewFlip() // resumed: the flush was sent before the restart, so admission is closed already
	}
}

// fallBack goes on without a redirection that did not work.
func (m *Machine) fallBack(err error) {
	d := m.life
	how := d.onNew
	d.onNew = OnNewAdmit
	d.why = fmt.Sprintf("%s did not work (%s), so new connections are admitted until they pause", how, err)
	d.flipStart, d.flipGiveUp, d.renew = time.Time{}, time.Time{}, false
	m.warn(fmt.Sprintf("%s did not work; new connections are admitted until they pause", how), err)
	m.tellLate(d.why, err)
}

// redirected notes that a redirection is in force.
func (m *Machine) redirected(how OnNew, at time.Time) {
	d := m.life
	if d.onNew != how {
		d.onNew, d.why = how, d.chosenWhy // it had been given up and works after all
		d.renew = true                    // the deadline may have moved meanwhile
	}
	d.how = how
	if d.arrivedAt.IsZero() {
		d.arrivedAt, d.nextLate = at, at
	}
}

// redirecting reports whether a redirection may come in yet.
func (m *Machine) redirecting() bool {
	d := m.life
	if d.choosing {
		return !d.flushAt.IsZero() // resumed
	}
	return d.onNew.redirects() && m.busy[callFlip] && !d.flipStart.IsZero()
}

// conclude ends the drain with its outcome, as soon as its late connections are through.
func (m *Machine) conclude(o Outcome) {
	d := m.life
	if d.how == "" && !m.redirecting() {
		m.finish(o)
		return
	}
	now := time.Now()
	d.lingering, d.verdict, d.lingerFrom = true, o, now
	d.nextLate = now
	m.state = StateFlushing
	m.log.Info("application is done", "drain", d.id, "outcome", o, "blocks", blockWords(d.blocks(0)))
}

// stepLinger waits for late connections.
func (m *Machine) stepLinger(now time.Time) bool {
	d := m.life
	switch {
	case d.how == "":
		if m.redirecting() && now.Before(d.flipGiveUp) {
			return false
		}
	case d.endOver:
	case !d.endStart.IsZero():
		if now.Before(d.endBy) {
			return false
		}
		m.warn("late connections have not been ended in time", nil)
	case !d.lateThrough():
		return false
	}
	m.finish(d.verdict)
	return true
}

// lateThrough reports whether a look since the application was done found that nothing came for
// quiet_period and nothing is left.
func (d *life) lateThrough() bool {
	return d.lates.none() && !d.lateLook.Before(d.lingerFrom) && d.lateLook.Sub(d.arrivedAt) >= d.eff.Policy.QuietPeriod
}

// lateDue reports whether late connections are ended now: at the deadline, with so much time left that
// it is over then, or because an operator ends the drain.
func (d *life) lateDue(now time.Time) bool {
	if d.how == "" || !d.endStart.IsZero() {
		return false
	}
	over := d.lingering || d.phase == PhaseFlush || d.phase == PhaseCut
	return over && (d.lingering && d.endNow || !now.Before(d.killAt()))
}

// endLate ends what is still carried or parked.
func (m *Machine) endLate(now time.Time) {
	d := m.life
	d.endStart = now
	d.endBy = d.deadline
	if least := now.Add(5 * minBudget); d.endBy.Before(least) {
		d.endBy = least
	}
	if d.lates.Known {
		d.lateEnded = d.lates.Carried + d.lates.Parked
	}
	if d.lateEnded > 0 {
		m.warn(fmt.Sprintf("the deadline has come for late connections: %d carried and %d parked are ended", d.lates.Carried, d.lates.Parked), nil)
	}
	if !m.call(callEndLate, d.endBy, func(ctx context.Context, r *result) { r.err = m.late.EndLate(ctx) }) {
		d.endOver = true
		m.warn("late connections are not ended: the end of the drain before this one has not returned", nil)
	}
}

func (m *Machine) onEndLate(r result) {
	d := m.life
	d.endOver = true
	if r.err != nil {
		m.warn("not all late connections could be ended", r.err)
	}
	m.tellLate("late connections are over", r.err)
}

// pollLate starts a look at late connections when one is due.
func (m *Machine) pollLate(now time.Time) {
	d := m.life
	if d.how == "" || !d.endStart.IsZero() {
		return
	}
	if m.busy[callLate] {
		if d.lates.Known && !now.Before(d.lateBegan.Add(lookLimit)) {
			m.lostLate(fmt.Errorf("a look has not returned for %v", show(now.Sub(d.lateBegan))))
		}
		return
	}
	if now.Before(d.nextLate) {
		return
	}
	d.lateBegan = now
	m.call(callLate, now.Add(lookLimit), func(ctx context.Context, r *result) { r.lates, r.err = m.late.Late(ctx) })
}

// lostLate makes the counts of late connections unknown.
func (m *Machine) lostLate(err error) {
	d := m.life
	d.lates = LateCounts{}
	m.dirty = true
	if !d.lateLost {
		d.lateLost = true
		m.warn("the counts of late connections are unknown, which never reads as none", err)
	}
}

func (m *Machine) onLate(r result) {
	d := m.life
	if !d.endStart.IsZero() {
		return // what was ended is counted already
	}
	took := r.ended.Sub(r.started)
	gap := max(pollFloor, pollFactor*took)
	if r.err != nil {
		gap = min(gap, retryGap)
	}
	d.nextLate = r.ended.Add(gap)
	c := r.lates
	if r.err == nil && c.Known && min(c.Carried, c.Parked) < 0 {
		r.err = errNegative
	}
	if r.err != nil || !c.Known {
		m.lostLate(r.err)
		return
	}
	d.lateLost = false
	d.lates, d.lateLook = c, r.started
	if c.Arrived != d.arrived {
		// The moment of the look's end is the latest at which it can have come.
		d.arrived, d.arrivedAt = c.Arrived, r.ended
	}
	if d.lingering && c.none() && !d.lateThrough() {
		t := d.arrivedAt.Add(d.eff.Policy.QuietPeriod)
		if least := r.ended.Add(max(hintGap, took)); t.Before(least) {
			t = least
		}
		d.nextLate = earliest(d.nextLate, t)
	}
}

// lateBlocks is what a drain that lingers waits for.
func (d *life) lateBlocks() []Block {
	var b []Block
	if !d.lates.Known {
		return []Block{{Class: "unknown"}}
	}
	if d.lates.Carried > 0 {
		b = append(b, Block{"relayed", int64(d.lates.Carried)})
	}
	if d.lates.Parked > 0 {
		b = append(b, Block{"parked", int64(d.lates.Parked)})
	}
	if len(b) == 0 {
		b = append(b, Block{Class: "quiet"})
	}
	return b
}

// tellLate says what happens to late connections.
func (m *Machine) tellLate(msg string, err error) {
	d := m.life
	fields := map[string]any{
		"action": string(d.onNew), "why": d.why, "known": d.lates.Known,
		"arrived": d.lates.Arrived, "carried": d.lates.Carried, "parked": d.lates.Parked, "ended": d.lateEnded,
	}
	args := []any{"drain", d.id, "on_new", d.onNew, "why", d.why}
	if err != nil {
		fields["err"] = err.Error()
		args = append(args, "err", err)
	}
	if d.how != "" {
		args = append(args, "known", d.lates.Known, "arrived", d.lates.Arrived, "carried", d.lates.Carried, "parked", d.lates.Parked, "ended", d.lateEnded)
	}
	d.lateTold = d.lates
	m.dirty = true
	m.log.Info("late connections", args...)
	m.emit(Event{Type: EventLate, Phase: d.phase, Message: msg, Fields: fields})
}

// sleepLate adds what is due for late connections.
func (m *Machine) sleepLate(at func(time.Time)) {
	d := m.life
	switch {
	case d.how == "":
		if d.lingering {
			at(d.flipGiveUp)
		}
		return
	case !d.endStart.IsZero():
		if !d.endOver {
			at(d.endBy)
		}
		return
	case !m.busy[callLate]:
		at(d.nextLate)
	case d.lates.Known:
		at(d.lateBegan.Add(lookLimit))
	}
	if d.lingering || d.phase == PhaseFlush || d.phase == PhaseCut {
		at(d.killAt())
	}
}

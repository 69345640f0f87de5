// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/bpf"
	"github.com/ebbproxy/ebb/drain"
)

// early closes admission in the kernel when CMD is sent a stop signal by somebody else: before a handler of CMD's runs.
// What the kernel does then has to be there beforehand: it is prepared for the siblings and peers that can be reached, and
// again whenever those may have changed.
type early struct {
	k       *kernelDatapath
	prog    *bpf.Early
	signals []syscall.Signal
	span    time.Duration
	stops   chan syscall.Signal // what the kernel told; the first one is enough

	mu       sync.Mutex
	prepared bpf.BackendRule
}

const (
	// earlyEvery is how often what is prepared is brought up to date.
	earlyEvery = 2 * time.Second

	// earlyGuard is the time between two looks whether the application still has its listeners.
	earlyGuard = 100 * time.Millisecond
)

// earlyDeadMan is how long past the longest drain an admission that was closed early may last, as that of a drain.
const earlyDeadMan = 10 * time.Second

// openEarly attaches the program. The error says what to do about it.
func (r *runner) openEarly(dp datapath) (*early, error) {
	k, ok := dp.(*kernelDatapath)
	if !ok || !dp.guarded() {
		return nil, errors.New("early admission needs the kernel datapath: see `ebb check`")
	}
	prog, err := k.host.OpenEarly()
	if err != nil {
		return nil, err
	}
	e := &early{k: k, prog: prog, span: r.set.eff.Policy.Grace + earlyDeadMan, stops: make(chan syscall.Signal, 1)}
	for _, s := range append([]syscall.Signal{r.o.flushSignal()}, r.o.StopSignals...) {
		// What we send to tell of a drain is no stop.
		if s != r.o.Notify.Signal && !slices.Contains(e.signals, s) {
			e.signals = append(e.signals, s)
		}
	}
	k.mu.Lock()
	k.early = e
	k.mu.Unlock()
	return e, nil
}

// stopped delivers a stop signal that CMD was sent by somebody else; it never does without --early.
func (e *early) stopped() <-chan syscall.Signal {
	if e == nil {
		return nil
	}
	return e.stops
}

// caught tells whether a stop signal was seen that nobody has heard of yet.
func (e *early) caught() (syscall.Signal, bool) {
	if e == nil {
		return 0, false
	}
	select {
	case sig := <-e.stops:
		return sig, true
	default:
	}
	rule, ok, err := e.k.host.Backend(e.k.id)
	if err != nil || !ok || rule.Action == bpf.ActionOpen || e.k.closed() {
		return 0, false
	}
	e.k.mu.Lock()
	e.k.rule = rule
	e.k.mu.Unlock()
	return unix.SIGTERM, true
}

// close detaches the program.
func (e *early) close() error {
	if e == nil {
		return nil
	}
	return e.prog.Close()
}

// keep prepares what a stop signal of the process does, until ctx ends.
func (e *early) keep(ctx context.Context, b *backend) {
	tgid, start, err := bpf.TaskID(b.proc.pid)
	if err != nil {
		b.log.Warn("prepare early admission", "err", err)
		return
	}
	said := ""
	var next time.Time
	var seen []uint64 // cookies of the listeners at the last preparation
	for {
		if now := time.Now(); !now.Before(next) {
			next = now.Add(earlyEvery)
			what, err := e.prepare(ctx, b, tgid, start)
			switch {
			case ctx.Err() != nil:
			case err != nil:
				b.log.Warn("prepare early admission", "err", err)
			case what != "":
				seen = e.guard(b, seen)
				if what != said {
					b.emit(drain.Event{Type: EventEarly, Message: "a stop signal to CMD closes admission at once: " + what, Fields: map[string]any{"prepared": what}})
					said = what
				}
			}
		}
		if !wait(ctx, earlyGuard) {
			if err := e.prog.Clear(tgid); err != nil {
				b.log.Warn("end early admission", "err", err)
			}
			return
		}
		e.unguard(b)
	}
}

// guard duplicates the listeners that were there at the last preparation already: what waits in their queues outlives a
// close that comes at once with the signal. An application that opens, closes and opens a listener while it starts must
// not meet EADDRINUSE, so that a new one is given time first.
func (e *early) guard(b *backend, seen []uint64) (now []uint64) {
	for _, c := range b.listening() {
		now = append(now, c.cookie)
	}
	slices.Sort(now)
	b.late.mu.Lock()
	held := b.late.dups
	b.late.mu.Unlock()
	switch {
	case !slices.Equal(now, seen):
		if b.late.drop(held) {
			letGo(held, b.log)
		}
	case held == nil:
		b.late.holdNow()
		b.emit(drain.Event{Type: EventEarly, Message: "what waits to be accepted outlives CMD's close of its listeners", Fields: map[string]any{"guarded": true}})
	}
	return now
}

// unguard lets go of the listeners that the application has closed without having been sent a stop signal.
func (e *early) unguard(b *backend) {
	b.late.mu.Lock()
	held := b.late.dups
	b.late.mu.Unlock()
	if held == nil {
		return
	}
	pids := b.proc.descendants()
	owned := true
	for _, h := range held {
		ok, err := h.Owned(pids)
		if err != nil {
			return
		}
		owned = owned && ok
	}
	if owned {
		return
	}
	// The kernel writes the rule before the signal can be heard of.
	if r, ok, err := e.k.host.Backend(e.k.id); err != nil || !ok || r.Action != bpf.ActionOpen {
		return
	}
	if b.late.drop(held) {
		letGo(held, b.log)
	}
}

// prepare looks what could take late connections now and makes it ready: the targets are on standby and change nothing
// until the kernel writes the rule.
func (e *early) prepare(ctx context.Context, b *backend, tgid uint32, start uint64) (what string, err error) {
	l := b.late
	look, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	l.act.Lock()
	defer l.act.Unlock()
	if l.redirecting() || e.k.closed() || len(b.listening()) == 0 {
		return "", nil // a drain runs, or there is nothing to close
	}
	p := l.survey(look)
	how, why := l.choose(drain.OnNewAuto, p)
	rule := bpf.BackendRule{Action: bpf.ActionSteer, Enforce: true, Standby: true}
	var targets map[netip.AddrPort][]uint64
	switch how {
	case drain.OnNewSteer:
		targets, err = l.aim(p.space, p.steer)
	case drain.OnNewRelay:
		var cookie uint64
		cookie, err = l.spareListener(p.space)
		targets = map[netip.AddrPort][]uint64{{}: {cookie}}
	default:
		// A client that is turned away can try again elsewhere; one that was taken in would be reset.
		rule.Action, why = bpf.ActionRefuse, "there is nowhere to send late connections"
		how = drain.OnNewRefuse
	}
	if err != nil {
		return "", err
	}
	if targets != nil {
		if err := e.k.standBy(b.listening(), targets); err != nil {
			return "", err
		}
	}
	e.k.mu.Lock()
	rule.Gen, rule.Bypass, rule.Aside = e.k.rule.Gen, e.k.rule.Bypass, e.k.rule.Aside
	e.k.mu.Unlock()
	b.mu.Lock()
	rule.Aside = b.aside
	b.mu.Unlock()
	e.mu.Lock()
	e.prepared = rule
	e.mu.Unlock()
	l.mu.Lock()
	l.plan, l.own = p, nil
	l.mu.Unlock()
	l.addresses() // CMD may have closed them by the time of its drain
	err = e.prog.Set(tgid, bpf.EarlyRule{Start: start, Signals: e.signals, Backend: e.k.id, Rule: rule, Span: e.span})
	return fmt.Sprintf("%s, %s", how, why), err
}

// seen takes in that the kernel has written the rule.
func (e *early) seen(ev bpf.Event) {
	e.mu.Lock()
	rule := e.prepared
	e.mu.Unlock()
	rule.Until = ev.Time + e.span
	e.k.mu.Lock()
	e.k.rule = rule
	e.k.mu.Unlock()
	select {
	case e.stops <- syscall.Signal(ev.Cookie):
	default: // CMD is on its way out already
	}
}

// standBy sets the targets of listeners while the admission is open.
func (k *kernelDatapath) standBy(ls []listener, targets map[netip.AddrPort][]uint64) error {
	k.mu.Lock()
	k.targets = targets
	k.mu.Unlock()
	if _, err := k.shadow(context.Background(), ls); err != nil {
		return err
	}
	return k.setTargets(ls)
}

// spareListener is a listener for a relay that is not there yet: its backlog holds what is sent there until it is.
func (l *late) spareListener(sp *space) (uint64, error) {
	l.mu.Lock()
	p, cookie, spare := l.relay, l.listener, l.spare
	l.mu.Unlock()
	if (p != nil && cookie != 0) || spare != nil {
		return cookie, nil
	}
	f, err := openListener(sp)
	if err != nil {
		return 0, err
	}
	if cookie, err = l.b.dp.target(int(f.Fd()), sp); err != nil {
		return 0, errors.Join(err, f.Close())
	}
	l.mu.Lock()
	l.spare, l.listener = f, cookie
	l.mu.Unlock()
	return cookie, nil
}

// takeSpare is the spare listener, which is the caller's from then on; nil if there is none.
func (l *late) takeSpare() (*os.File, uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f := l.spare
	l.spare = nil
	return f, l.listener
}

// holdNow duplicates the listeners for the next redirection, unless that was done already.
func (l *late) holdNow() {
	l.mu.Lock()
	done := l.dups != nil
	l.mu.Unlock()
	if done {
		return
	}
	held := l.hold()
	l.mu.Lock()
	l.dups = held
	l.mu.Unlock()
}

// drop takes back what holdNow did; false if somebody has taken it.
func (l *late) drop(held []*heldListener) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.dups) != len(held) || len(held) == 0 || l.dups[0] != held[0] {
		return false
	}
	l.dups = nil
	return true
}

// takeHeld are the duplicates of holdNow, or new ones.
func (l *late) takeHeld() []*heldListener {
	l.mu.Lock()
	held := l.dups
	l.dups = nil
	l.mu.Unlock()
	if held != nil {
		return held
	}
	return l.hold()
}

// stoppedElsewhere begins the drain of a CMD that was sent a stop signal by somebody else. CMD has what it should have: it
// is not told again.
func (r *runner) stoppedElsewhere(ctx context.Context, sig syscall.Signal) {
	inc := r.life()
	inc.b.told.Store(true)
	inc.b.flushed.Store(true)
	inc.b.late.holdNow()
	r.mu.Lock()
	r.stopping++
	r.mu.Unlock()
	r.emit(drain.Event{Type: EventSignal, Message: fmt.Sprintf("CMD was sent %s by another process; its admission closed before that returned", unix.SignalName(sig)), Fields: map[string]any{"signal": unix.SignalName(sig), "forwarded": false, "early": true}})
	// The end of CMD may be the next thing that is heard. What happens to late connections has to be settled before: a
	// drain whose application has ended has nothing left to redirect for.
	ctx, cancel := context.WithTimeout(ctx, stoppedLimit)
	defer cancel()
	_, err := inc.machine.Begin(ctx, drain.Request{Gen: inc.gen, Cause: drain.CauseSignal, Policy: r.set.eff.Policy, By: unix.SignalName(sig) + " to CMD", Told: true, Force: true})
	if err != nil && ctx.Err() == nil {
		r.log.Error("begin drain of a CMD that was told to stop", "err", err)
	}
}

// stoppedLimit bounds the wait until late connections are redirected: a choice, and 2 s more behind SYN cookies.
const stoppedLimit = 4 * time.Second

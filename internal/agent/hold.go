// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/relay"
	"github.com/ebbproxy/ebb/probes"
	"github.com/ebbproxy/ebb/proxy"
)

const (
	// guardAfter is how long a listener must have been there before it is guarded: an application that opens, closes and
	// opens one again while it starts must not meet EADDRINUSE.
	guardAfter = time.Second

	// guardEvery is the time between two looks whether the application still has its listeners.
	guardEvery = 100 * time.Millisecond

	// tallyEvery is how many of those there are between two looks at what the relay has done.
	tallyEvery = 10

	// emptyFor bounds the wait for half-open requests of an application that is away. A client whose last ACK was lost
	// is asked for it again after 1 s.
	emptyFor = 1500 * time.Millisecond

	// steadyFor is how long the listeners of one that came back must have been the same: the first listen is not
	// readiness.
	steadyFor = 150 * time.Millisecond

	// wholeFor is how long one that came back is given to open the rest of the addresses that it had.
	wholeFor = time.Second

	// backEvery is the time between two looks at one that is coming back.
	backEvery = 20 * time.Millisecond
)

// keep stands in for an application that goes away and comes back (`ebb run --restart-on-exit`): new connections wait
// in the relay, and what was queued when it went is adopted.
//
//	standing ──CMD ends, or closes its listeners──► away ──listens again, is ready──► releasing ──nothing is parked──► standing
//	                                                 └── hold_for is over: the rule ends, connections are refused ──► standing
//
// While it stands, it holds a duplicate of each listener, so that nothing between the end of CMD and the flip is reset.
// The price is that an application which closes a listener cannot open the same address again before that was seen.
type keep struct {
	l       *late
	ports   [2]uint16 // source ports of the relay's dials, which the rule lets pass
	ready   func(context.Context) error
	holdFor time.Duration

	mu       sync.Mutex
	guards   map[uint64]*guard // by cookie
	away     time.Time         // when it went; zero: it is there
	draining bool              // a drain has begun: what happens to late connections is its choice
	cancel   context.CancelFunc
	done     chan struct{} // closed when the goroutine has ended; nil: there was none
}

// guard is a duplicate of a listener, and where the application has its own.
type guard struct {
	*heldListener
	inode   uint64
	pid, fd int
}

// owned looks where the application had its descriptor; only if it is not there any more, everywhere.
func (g *guard) owned(p *process) (bool, error) {
	link, err := os.Readlink("/proc/" + strconv.Itoa(g.pid) + "/fd/" + strconv.Itoa(g.fd))
	if err == nil && link == "socket:["+strconv.FormatUint(g.inode, 10)+"]" {
		return true, nil
	}
	return g.Owned(p.descendants())
}

// MaxHold bounds RunOptions.HoldMax: each connection that waits takes one of the ports that freePorts finds.
const MaxHold = 16384

// freePorts are want ports that the kernel gives to nobody by itself, or half as many if there are no more: ip(7),
// ip_local_port_range.
func freePorts(want int) [2]uint16 {
	lo, hi := 32768, 60999
	if text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range"); err == nil {
		if _, err := fmt.Sscan(string(text), &lo, &hi); err != nil {
			lo, hi = 32768, 60999
		}
	}
	switch {
	case 65535-hi >= want/2:
		return [2]uint16{uint16(hi + 1), 65535}
	case lo-1024 >= want/2:
		return [2]uint16{uint16(max(1024, lo-want)), uint16(lo - 1)}
	}
	// A client on this host that is given one of these is not held.
	return [2]uint16{uint16(65535 - want + 1), 65535}
}

// begin watches over the application, if nobody does.
func (k *keep) begin() {
	if k == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.draining = false
	if k.done != nil {
		select {
		case <-k.done:
		default:
			return
		}
	}
	ctx, cancel := context.WithCancel(k.l.ctx)
	done := make(chan struct{})
	k.cancel, k.done = cancel, done
	k.l.wg.Go(func() {
		defer close(done)
		defer cancel()
		k.tend(ctx)
	})
}

// end ends what begin began.
func (k *keep) end() {
	if k == nil {
		return
	}
	k.mu.Lock()
	cancel, done := k.cancel, k.done
	k.mu.Unlock()
	if done != nil {
		cancel()
		<-done
	}
}

// yield leaves late connections to a drain that begins. An application that is away and comes back is still given what
// waits for it.
func (k *keep) yield() {
	if k == nil {
		return
	}
	k.mu.Lock()
	k.draining = true
	away := !k.away.IsZero()
	k.mu.Unlock()
	if !away {
		k.end()
		k.letGo()
	}
}

// letGo closes the guards.
func (k *keep) letGo() {
	if k == nil {
		return
	}
	for _, g := range k.taken() {
		if err := g.Close(); err != nil {
			k.l.log.Warn("let go of a listener", "err", err)
		}
	}
}

// taken are the guards, which are the caller's from now on.
func (k *keep) taken() []*heldListener {
	k.mu.Lock()
	defer k.mu.Unlock()
	var held []*heldListener
	for _, g := range k.guards {
		held = append(held, g.heldListener)
	}
	k.guards = nil
	return held
}

// isAway tells whether connections wait for the application.
func (k *keep) isAway() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return !k.away.IsZero()
}

// warnings say that the application is away.
func (k *keep) warnings() []string {
	if k == nil {
		return nil
	}
	k.mu.Lock()
	away := k.away
	k.mu.Unlock()
	if away.IsZero() {
		return nil
	}
	return []string{fmt.Sprintf("CMD is away since %s: new connections wait for it until %s, and are refused then", away.Format(time.TimeOnly), away.Add(k.holdFor).Format(time.TimeOnly))}
}

// tend is the goroutine.
func (k *keep) tend(ctx context.Context) {
	seen := map[uint64]time.Time{}
	for n := 0; wait(ctx, guardEvery); n++ {
		if n%tallyEvery == 0 {
			k.tally(ctx)
		}
		if k.isAway() {
			if !k.comeBack(ctx) {
				return
			}
			clear(seen)
			continue
		}
		lost, err := k.look(ctx, seen)
		if err != nil && ctx.Err() == nil {
			k.l.log.Warn("watch over the listeners", "err", err)
		}
		if lost {
			select {
			case <-k.l.b.proc.exited():
				return // whoever starts it again goes on
			default:
			}
			if err := k.flip("it has closed its listeners"); err != nil && ctx.Err() == nil {
				k.l.log.Error("hold connections", "err", err)
			}
			k.empty()
		}
	}
}

// look guards listeners that have proved steady. lost tells that the application has closed all that were guarded.
func (k *keep) look(ctx context.Context, seen map[uint64]time.Time) (lost bool, err error) {
	now := time.Now()
	k.mu.Lock()
	guards := make(map[uint64]*guard, len(k.guards))
	maps.Copy(guards, k.guards)
	k.mu.Unlock()
	due := false
	for _, c := range k.l.b.listening() {
		if guards[c.cookie] != nil {
			continue
		}
		if seen[c.cookie].IsZero() {
			seen[c.cookie] = now
		}
		due = due || now.Sub(seen[c.cookie]) >= guardAfter
	}
	if due {
		if err := k.guard(ctx); err != nil {
			return false, err
		}
	}
	var gone []uint64
	for cookie, g := range guards {
		owned, err := g.owned(k.l.b.proc)
		if err != nil {
			return false, err
		}
		if !owned {
			gone = append(gone, cookie)
		}
	}
	if len(gone) > 0 && len(gone) == len(guards) {
		return true, nil
	}
	// One of several: that was meant.
	for _, cookie := range gone {
		k.mu.Lock()
		delete(k.guards, cookie)
		k.mu.Unlock()
		if err := guards[cookie].Close(); err != nil {
			return false, err
		}
	}
	return false, nil
}

// guard duplicates the listeners that are not guarded yet, and has the relay ready.
func (k *keep) guard(ctx context.Context) error {
	l := k.l
	if err := k.standBy(ctx); err != nil {
		return err
	}
	covered := l.b.coveredMap()
	for _, sp := range l.b.dp.spaces() {
		found, err := probes.Listeners(sp.diag, l.b.proc.descendants())
		if err != nil {
			return err
		}
		for _, f := range found {
			c, ok := covered[f.Cookie]
			k.mu.Lock()
			guarded := k.guards[f.Cookie] != nil
			k.mu.Unlock()
			if !ok || !c.live || guarded {
				continue
			}
			h, err := probes.HoldListener(f)
			if errors.Is(err, probes.ErrGone) {
				continue
			}
			if err != nil {
				return err
			}
			g := &guard{&heldListener{HeldListener: h, cookie: f.Cookie, port: f.Local.Port(), space: sp}, f.Inode, f.PID, f.FD}
			k.mu.Lock()
			if k.guards == nil {
				k.guards = map[uint64]*guard{}
			}
			k.guards[f.Cookie] = g
			k.mu.Unlock()
			l.b.emit(drain.Event{Type: EventGuarded, Message: "what comes to " + f.Local.String() + " while CMD is away waits for it", Fields: map[string]any{"address": f.Local.String()}})
		}
	}
	return nil
}

// standBy starts the relay before it is needed, so that the flip is one write.
func (k *keep) standBy(ctx context.Context) error {
	l := k.l
	sp, err := l.space()
	if err != nil {
		return err
	}
	l.act.Lock()
	defer l.act.Unlock()
	l.addresses() // what is listened on now is what is held later
	l.mu.Lock()
	p := l.relay
	l.plan.space = sp
	l.mu.Unlock()
	if p != nil {
		select {
		case <-p.Done():
			l.dropRelay(p)
		default:
			return nil
		}
	}
	// Its time is over at once, and it lives because it is owned.
	_, err = l.startRelay(ctx, sp, k.peers(), false, time.Now().Add(time.Second))
	return err
}

// peers is where each client wanted to go.
func (k *keep) peers() []proxy.Peer { return []proxy.Peer{{Own: true, Ports: k.ports}} }

// empty adopts what the application has left in its queues. When it returns, the addresses are free.
func (k *keep) empty() {
	l := k.l
	held := k.taken()
	if len(held) == 0 {
		return
	}
	// Not to be cut short: what is still queued when the guards are let go is reset.
	ctx, cancel := context.WithTimeout(l.ctx, emptyFor)
	defer cancel()
	done := make(chan struct{})
	l.wg.Go(func() {
		defer close(done)
		// poll and accept block: on a thread of their own.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer letGo(held, l.log)
		l.emptyAll(ctx, held)
	})
	<-done
}

// flip has new connections go to the relay, which parks them.
func (k *keep) flip(why string) error {
	l := k.l
	ctx, cancel := context.WithTimeout(l.ctx, k.holdFor)
	defer cancel()
	l.act.Lock()
	defer l.act.Unlock()
	if how, _ := l.inForce(); how != "" {
		return nil
	}
	now := time.Now()
	until := now.Add(k.holdFor)
	l.mu.Lock()
	sp := l.plan.space
	l.mu.Unlock()
	if sp == nil {
		return errors.New("hold connections: nothing has listened yet")
	}
	cookie, err := l.startRelay(ctx, sp, k.peers(), true, until)
	if err != nil {
		return fmt.Errorf("hold connections: %w", err)
	}
	l.mu.Lock()
	p := l.relay
	l.how, l.why = drain.OnNewHold, why // from now on the addresses stay covered
	l.mu.Unlock()
	addrs := l.addresses()
	for _, a := range addrs {
		if err := l.b.dp.cover(a); err != nil {
			l.log.Warn("cover address", "address", a.addr.String(), "err", err)
		}
	}
	if err := l.flipTo(ctx, why, addrs, cookie, until); err != nil {
		l.mu.Lock()
		l.how, l.why = "", ""
		l.mu.Unlock()
		return errors.Join(fmt.Errorf("hold connections: %w", err), p.Release(ctx))
	}
	k.mu.Lock()
	k.away = now
	k.mu.Unlock()
	l.tell("new connections wait: "+why, nil)
	return nil
}

// flipTo steers everything to the relay's listener, and notes that first.
func (l *late) flipTo(ctx context.Context, why string, addrs []listener, cookie uint64, until time.Time) error {
	steered, _ := l.b.dp.steered()
	rec := lateRecord{Version: journalVersion, Type: "late", How: drain.OnNewHold, Why: why, Listener: cookie, Base: steered}
	if err := l.b.journal.append(rec); err != nil {
		l.log.Warn("journal what happens to late connections: a restart could not go on with it", "err", err)
	}
	if err := l.b.dp.steer(ctx, addrs, map[netip.AddrPort][]uint64{{}: {cookie}}, l.b.boot()+time.Until(until)); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.until, l.base = until, steered
	return nil
}

// comeBack waits until the application serves again, and gives it what waits, a few at a time. It reports false when the
// goroutine is to end.
func (k *keep) comeBack(ctx context.Context) bool {
	l := k.l
	k.mu.Lock()
	end := k.away.Add(k.holdFor)
	k.mu.Unlock()
	if !k.served(ctx, end) {
		if ctx.Err() != nil {
			return false
		}
		l.tell(fmt.Sprintf("it has not come back within %v: new connections are refused", k.holdFor), nil)
		return k.back(ctx)
	}
	if err := k.release(ctx); err != nil && ctx.Err() == nil {
		l.log.Error("release what waits", "err", err)
	}
	return ctx.Err() == nil && k.back(ctx)
}

// served waits until the application listens steadily, on all of the addresses that it had, and is ready.
func (k *keep) served(ctx context.Context, end time.Time) bool {
	b := k.l.b
	var last []uint64
	var changed, refreshed time.Time
	for wait(ctx, backEvery) {
		now := time.Now()
		if now.After(end) {
			return false
		}
		if now.Sub(refreshed) > guardEvery {
			refreshed = now
			if err := b.refresh(ctx); err != nil {
				k.l.log.Debug("look for listeners", "err", err)
			}
		}
		var cookies []uint64
		for _, c := range b.listening() {
			cookies = append(cookies, c.cookie)
		}
		slices.Sort(cookies)
		if !slices.Equal(cookies, last) {
			last, changed = cookies, now
		}
		if len(cookies) == 0 || now.Sub(changed) < steadyFor || !k.whole() && now.Sub(changed) < wholeFor {
			continue
		}
		if k.ready == nil || k.ready(ctx) == nil {
			return true
		}
	}
	return false
}

// whole tells whether each address that was listened on is again.
func (k *keep) whole() bool {
	now := k.l.b.listening()
	k.l.mu.Lock()
	defer k.l.mu.Unlock()
	for addr := range k.l.own {
		if !slices.ContainsFunc(now, func(c listener) bool { return c.addr == addr }) {
			return false
		}
	}
	return true
}

// release carries what is parked to the application.
func (k *keep) release(ctx context.Context) error {
	l := k.l
	l.mu.Lock()
	p := l.relay
	l.mu.Unlock()
	if p == nil {
		return relay.ErrEnded
	}
	// The last of them may have come a moment ago, and has its time too.
	end := time.Now().Add(k.holdFor)
	l.act.Lock()
	err := l.extend(ctx, end)
	l.act.Unlock()
	if err != nil {
		return err
	}
	if err := p.Release(ctx, k.peers()...); err != nil {
		return err
	}
	l.tell("it is back: what waits is released", nil)
	for wait(ctx, backEvery/2) && time.Now().Before(end) {
		s, err := p.Stats(ctx)
		if err != nil {
			return err
		}
		if s.Relay.Parked == 0 {
			return nil
		}
	}
	return ctx.Err()
}

// back ends the hold: connections go to the application by themselves again, and what the relay carries goes on.
func (k *keep) back(ctx context.Context) bool {
	l := k.l
	k.mu.Lock()
	k.away = time.Time{}
	draining := k.draining
	k.mu.Unlock()
	k.tally(ctx)
	if draining {
		return false
	}
	if err := l.b.dp.admit(); err != nil {
		l.log.Error("end the hold", "err", err)
	}
	l.open()
	return true
}

// resume goes on with a hold that an earlier owner has begun. It comes before begin.
func (k *keep) resume() {
	if k == nil {
		return
	}
	if how, _ := k.l.inForce(); how != drain.OnNewHold {
		return
	}
	k.l.unfollow()
	k.mu.Lock()
	k.away = time.Now()
	k.mu.Unlock()
}

// tally counts what the relay has done.
func (k *keep) tally(ctx context.Context) {
	k.l.mu.Lock()
	p := k.l.relay
	k.l.mu.Unlock()
	if p != nil {
		k.l.tally(ctx, p)
	}
}

// inherit goes on with what waits in the relay of an owner that has died together with its CMD. The rule that sent it
// there is gone; what waits is released as soon as the new CMD serves.
func (k *keep) inherit(ctx context.Context) {
	if k == nil {
		return
	}
	k.l.resume(ctx, nil)
	k.l.mu.Lock()
	p := k.l.relay
	k.l.mu.Unlock()
	if p == nil {
		return
	}
	s, err := p.Stats(ctx)
	if err != nil || s.Stopping || s.Relay.Parked == 0 {
		if err != nil {
			k.l.log.Warn("ask the relay of the owner before", "err", err)
		}
		k.l.dropRelay(p) // the standing one is started anew
		return
	}
	k.l.mu.Lock()
	k.l.how, k.l.why = drain.OnNewHold, "the owner before has ended together with CMD"
	k.l.mu.Unlock()
	k.mu.Lock()
	k.away = time.Now()
	k.mu.Unlock()
	k.l.tell(fmt.Sprintf("%d connections wait since the owner before", s.Relay.Parked), nil)
}

// handOver ends what belongs to one incarnation and gives the relay, the hold and the counts to the next one.
func (l *late) handOver(to *late) {
	l.keep.end()
	l.cancel()
	l.letGo()
	l.wg.Wait()
	if l.keep != nil && to.keep != nil {
		l.keep.mu.Lock()
		to.keep.away = l.keep.away
		l.keep.mu.Unlock()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	to.mu.Lock()
	defer to.mu.Unlock()
	to.how, to.why, to.until, to.base, to.own, to.adopted = l.how, l.why, l.until, l.base, l.own, l.adopted
	to.plan.space = l.plan.space
	to.relay, to.listener, l.relay = l.relay, l.listener, nil
	to.counted, to.gone, to.now, to.pauses = l.counted, l.gone, l.now, l.pauses
	if to.relay != nil {
		to.b.proc.leaveOut(to.relay.PID())
	}
}

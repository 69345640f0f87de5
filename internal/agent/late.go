// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/metrics"
	"github.com/ebbproxy/ebb/internal/netns"
	"github.com/ebbproxy/ebb/internal/relay"
	"github.com/ebbproxy/ebb/probes"
	"github.com/ebbproxy/ebb/proxy"
)

// lateOptions say what may be done with late connections.
type lateOptions struct {
	name, service, runDir string
	relay                 string        // name of the relay's socket and cgroup
	sock                  string        // our own API socket
	peers                 []Peer        // --peer
	health                *proxy.Health // nil: health checks are like other connections
	retire                time.Duration // idle relayed connections are retired after so long; 0: never
	quiet                 time.Duration // none must have come for so long before relayed clients that do not pause are let go
	successor             bool          // CMD is started again when it ends: hold works
	park                  proxy.ParkOptions
	ports                 [2]uint16                   // source ports that the rule lets pass
	keep                  bool                        // what comes while CMD is away waits for it
	ready                 func(context.Context) error // of --ready; nil: none
	// siblings are further backends of the service on this host, beside those of runs; nil: none.
	siblings func(context.Context, *space) (sibs []sibling, why []string)
}

// late is what a backend does with connections that come after its drain has begun. The drain calls the methods of
// drain.LateWorld on the backend; goroutines of its own follow siblings, peers and the relay while a redirection is in
// force, and empty the accept queue that the flip left.
type late struct {
	o    lateOptions
	b    *backend
	log  *slog.Logger
	keep *keep // nil unless connections wait for a CMD that is started again

	ctx    context.Context // of the goroutines
	cancel context.CancelFunc
	wg     sync.WaitGroup

	// act is held by whoever redirects or changes where: the drain's calls and the goroutine that follows.
	act     sync.Mutex
	steered uint64         // what the kernel had steered at the last look; guarded by act, as the next two
	calm    time.Time      // since when that is so
	hurried *relay.Process // that lets go already

	mu        sync.Mutex
	how       drain.OnNew // in force; "" while nothing is redirected
	why       string
	until     time.Time
	plan      plan
	stop      context.CancelFunc // ends the goroutines of this redirection
	relay     *relay.Process
	listener  uint64                                   // cookie of the relay's listener
	base      uint64                                   // what the kernel had steered before this redirection
	adopted   uint64                                   // connections that went from accept queues to the relay
	counted   map[proxy.Action]map[proxy.Result]uint64 // of the relay, told to the metrics
	gone      relayTotals                              // of relays that have ended
	now       relayTotals
	pauses    uint64                      // how often the relay has paused at a limit
	atLimit   bool                        // it did so between the last two looks
	spare     *os.File                    // the listener of a relay that is not there yet
	dups      []*heldListener             // for the next redirection, taken before it
	stopEmpty func()                      // ends the adoption and waits for it
	waiting   atomic.Int64                // half-open requests, or queues that are not empty, that are to be adopted
	own       map[netip.AddrPort]listener // what the rule covers, the application's closed listeners among them
}

// relayTotals are counts of relays.
type relayTotals struct{ ok, failed, health uint64 }

func newLate(b *backend, o lateOptions) *late {
	ctx, cancel := context.WithCancel(context.Background())
	l := &late{o: o, b: b, log: b.log, ctx: ctx, cancel: cancel, counted: map[proxy.Action]map[proxy.Result]uint64{}}
	if o.keep {
		l.keep = &keep{l: l, ports: o.ports, ready: o.ready, holdFor: cmp.Or(o.park.For, proxy.DefaultParkFor)}
	}
	return l
}

// lateRecord is the journal's word of what is in force, by which the next owner goes on.
type lateRecord struct {
	Version  int         `json:"version"`
	Type     string      `json:"type"` // always "late"
	Drain    string      `json:"drain,omitempty"`
	How      drain.OnNew `json:"how"` // "": nothing any more
	Why      string      `json:"why,omitempty"`
	Listener uint64      `json:"listener,omitempty"` // cookie of the relay's listener
	Base     uint64      `json:"base,omitempty"`     // what the kernel had steered before
	Adopted  uint64      `json:"adopted,omitempty"`
}

// resume goes on with what an earlier owner has left: its relay, and the redirection if the rule is still there.
func (l *late) resume(ctx context.Context, past *lateRecord) {
	p, err := relay.Find(ctx, l.o.runDir, l.o.relay)
	if err != nil && !errors.Is(err, relay.ErrNone) {
		l.log.Warn("find the relay of the owner before", "err", err)
	}
	var listener uint64
	if p != nil {
		s, err := p.Stats(ctx)
		if err != nil {
			l.log.Warn("ask the relay of the owner before", "err", err)
		}
		listener = s.Listener
	}
	l.mu.Lock()
	l.relay, l.listener = p, listener
	if past != nil {
		l.base, l.adopted = past.Base, past.Adopted
	}
	l.mu.Unlock()
	if p != nil {
		l.b.proc.leaveOut(p.PID())
	}
	until, steering := l.b.dp.steering()
	if past == nil || past.How == "" || !steering {
		return
	}
	l.mu.Lock()
	l.how, l.why = past.How, past.Why
	l.until = time.Now().Add(until - l.b.boot())
	l.mu.Unlock()
	l.log.Info("late connections are redirected already", "on_new", string(past.How))
	l.follow()
}

// inForce tells what is redirected now.
func (l *late) inForce() (how drain.OnNew, why string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.how, l.why
}

// redirecting tells whether a redirection is in force.
func (l *late) redirecting() bool {
	how, _ := l.inForce()
	return how != ""
}

// plan is what could be done with late connections, and why not something better.
type plan struct {
	space  *space
	steer  map[netip.AddrPort][]probes.Listener // our address → listeners of siblings that can take its connections
	whom   []string                             // the siblings' names
	peers  []proxy.Peer                         // each was dialled
	unable []string                             // why something cannot be used
	silent bool                                 // a run on this host has not answered in time
}

// ChooseLate implements drain.LateWorld.
func (b *backend) ChooseLate(ctx context.Context, want drain.OnNew) (drain.OnNew, string, error) {
	l := b.late
	if how, why := l.inForce(); how != "" {
		return how, why, nil
	}
	if err := b.refresh(ctx); err != nil {
		return "", "", err
	}
	p := l.survey(ctx)
	l.mu.Lock()
	l.plan = p
	l.mu.Unlock()
	how, why := l.choose(want, p)
	return how, why, nil
}

// choose decides. What is told apart by the relay alone, a balancer's health checks, keeps steer from being chosen.
func (l *late) choose(want drain.OnNew, p plan) (drain.OnNew, string) {
	not := strings.Join(p.unable, "; ")
	because := func(why string) string {
		if not != "" {
			return why + "; " + not
		}
		return why
	}
	steerable, relayable := len(p.steer) > 0, len(p.peers) > 0
	to := inWords(p.peers)
	switch want {
	case drain.OnNewAuto, drain.OnNewSteer:
		switch {
		case steerable && l.o.health == nil:
			which := ", which listens in the same network namespace"
			if len(p.whom) > 1 {
				which = ", which listen in the same network namespace"
			}
			return drain.OnNewSteer, "to " + strings.Join(p.whom, ", ") + which
		case steerable && relayable:
			return drain.OnNewRelay, "to " + to + "; health checks are turned away, which steering cannot do"
		}
		if want == drain.OnNewSteer {
			return drain.OnNewAdmit, because("steer is configured, and there is nothing to steer to")
		}
		switch {
		case relayable:
			return drain.OnNewRelay, "to " + to
		case l.o.successor:
			return drain.OnNewHold, because("a successor is expected")
		}
		return drain.OnNewAdmit, because("no other backend of the service can be reached")
	case drain.OnNewRelay:
		if relayable {
			return drain.OnNewRelay, "to " + to
		}
		return drain.OnNewAdmit, because("relay is configured, and no peer can be reached")
	case drain.OnNewHold:
		return drain.OnNewHold, "until another backend of the service can be reached"
	}
	return drain.OnNewAdmit, fmt.Sprintf("%q is nothing that can be chosen", want)
}

// survey finds out what could take late connections. Every peer in the plan has been dialled, from the network namespace
// from which the relay dials.
func (l *late) survey(ctx context.Context) plan {
	var p plan
	own := l.b.listening()
	if len(own) == 0 {
		own = l.addresses() // the application has closed them, and their connections go elsewhere
	}
	sp, err := l.spaceOf(own)
	if err != nil {
		p.unable = append(p.unable, err.Error())
		return p
	}
	p.space = sp
	sibs, silent, why := l.siblings(ctx, sp)
	p.silent = silent
	p.unable = append(p.unable, why...)
	var candidates []Peer
	p.steer, p.whom, candidates, why = match(own, sibs)
	p.unable = append(p.unable, why...)
	peers, why := assign(own, append(candidates, l.o.peers...))
	p.unable = append(p.unable, why...)
	peers, why = dialAll(ctx, sp, own, peers)
	p.unable = append(p.unable, why...)
	if p.peers, why = whole(own, peers); len(peers) > 0 {
		p.unable = append(p.unable, why...)
	}
	return p
}

// addresses are the listeners that the rule covers: those that are open and those that were when it began, or since.
func (l *late) addresses() []listener {
	now := l.b.listening()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.own == nil {
		l.own = map[netip.AddrPort]listener{}
	}
	for _, c := range now {
		l.own[c.addr] = c
	}
	return slices.Collect(maps.Values(l.own))
}

// space is the one network namespace in which the backend listens.
func (l *late) space() (*space, error) { return l.spaceOf(l.b.listening()) }

func (l *late) spaceOf(own []listener) (*space, error) {
	ids := map[uint64]bool{}
	for _, c := range own {
		ids[c.netns] = true
	}
	if len(ids) == 0 {
		return nil, errors.New("nothing listens")
	}
	if len(ids) > 1 {
		return nil, errors.New("it listens in several network namespaces")
	}
	for _, sp := range l.b.dp.spaces() {
		if ids[sp.id] {
			return sp, nil
		}
	}
	return nil, errors.New("the network namespace of its listeners is not known")
}

// in runs f in the network namespace.
func (s *space) in(f func() error) error {
	if s.fd < 0 {
		return f()
	}
	return netns.Do(s.fd, f)
}

// Redirect implements drain.LateWorld.
func (b *backend) Redirect(ctx context.Context, how drain.OnNew, until time.Time) error {
	l := b.late
	l.act.Lock()
	defer l.act.Unlock()
	if now, _ := l.inForce(); now == how {
		return l.extend(ctx, until)
	}
	if err := b.refresh(ctx); err != nil {
		return err
	}
	l.mu.Lock()
	p := l.plan
	l.mu.Unlock()
	if p.space == nil {
		return errors.New("nothing to redirect: nothing listens")
	}
	if how == drain.OnNewSteer && b.cookies.recent(time.Now()) {
		// The last ACK of a stateless handshake would go to a listener that has sent no cookie, and be reset there. The
		// relay's listener is warmed; a sibling's is not ours to warm.
		b.emit(drain.Event{Type: drain.EventWarning, Message: "SYN cookies were sent within the last minute: admission stays open 2s more, since a sibling cannot complete their handshakes"})
		wait(ctx, 2*time.Second)
	}
	// The duplicates come before the flip: the application may close at once when it hears of the drain.
	held := l.takeHeld()
	targets, err := l.targets(ctx, how, p, until)
	if err == nil {
		err = l.flip(ctx, how, targets, until)
	}
	if err == nil && b.flipped != nil {
		err = b.flipped(ctx)
	}
	if err != nil {
		letGo(held, l.log)
		return err
	}
	l.follow()
	if len(p.peers) == 0 && how != drain.OnNewHold {
		// Nobody to carry them to: they are settled like those of a refusal.
		letGo(held, l.log)
	} else {
		l.empty(held)
	}
	if other := b.dp.overruled(); other != "" {
		b.emit(drain.Event{Type: drain.EventWarning, Message: other + " may choose a socket although late connections are redirected"})
	}
	return nil
}

// targets makes what connections are sent to ready: by our address, or for all.
func (l *late) targets(ctx context.Context, how drain.OnNew, p plan, until time.Time) (map[netip.AddrPort][]uint64, error) {
	if how == drain.OnNewSteer {
		return l.aim(p.space, p.steer)
	}
	cookie, err := l.startRelay(ctx, p.space, p.peers, how == drain.OnNewHold && len(p.peers) == 0, until)
	if err != nil {
		return nil, err
	}
	return map[netip.AddrPort][]uint64{{}: {cookie}}, nil
}

// aim adds the listeners of siblings to those that can be steered to.
func (l *late) aim(sp *space, steer map[netip.AddrPort][]probes.Listener) (map[netip.AddrPort][]uint64, error) {
	targets := make(map[netip.AddrPort][]uint64, len(steer))
	known := map[uint64]uint64{}
	for addr, ls := range steer {
		for _, s := range ls {
			cookie, ok := known[s.Inode]
			if !ok {
				h, err := probes.HoldListener(s)
				if err == nil {
					// Not kept: the sibling's close of its listener must close it.
					cookie, err = l.b.dp.target(h.FD(), sp)
					err = errors.Join(err, h.Close())
				}
				if err != nil {
					return nil, fmt.Errorf("steer to %s: %w", s.Local, err)
				}
				known[s.Inode] = cookie
			}
			targets[addr] = append(targets[addr], cookie)
		}
	}
	return targets, nil
}

// flip is the one write, and notes that it was done.
func (l *late) flip(ctx context.Context, how drain.OnNew, targets map[netip.AddrPort][]uint64, until time.Time) error {
	steered, _ := l.b.dp.steered()
	l.mu.Lock()
	_, why := l.choose(how, l.plan)
	rec := lateRecord{Version: journalVersion, Type: "late", How: how, Why: why, Listener: l.listener, Base: steered}
	l.mu.Unlock()
	// Before the flip: the owner after a crash must know whose rule it finds.
	if err := l.b.journal.append(rec); err != nil {
		l.log.Warn("journal what happens to late connections: a restart could not go on with it", "err", err)
	}
	if err := l.b.dp.steer(ctx, l.addresses(), targets, l.b.boot()+time.Until(until)); err != nil {
		return err
	}
	l.b.mu.Lock()
	l.b.halfOpen = nil
	l.b.mu.Unlock()
	// Not with the backend's lock: whoever has that asks whether something is redirected.
	l.mu.Lock()
	defer l.mu.Unlock()
	l.how, l.why, l.until, l.base = how, why, until, steered
	return nil
}

// extend moves the end of what is in force.
func (l *late) extend(ctx context.Context, until time.Time) error {
	if err := l.b.dp.steer(ctx, l.addresses(), nil, l.b.boot()+time.Until(until)); err != nil {
		return err
	}
	l.mu.Lock()
	l.until = until
	p := l.relay
	l.mu.Unlock()
	if p == nil {
		return nil
	}
	if err := p.Extend(ctx, until); err != nil && !errors.Is(err, relay.ErrEnded) {
		return err
	}
	return nil
}

// relayBacklog holds what comes while the relay is busy; the kernel caps it at net.core.somaxconn.
const relayBacklog = 4096

// openListener opens and warms the relay's listener in the namespace: plain TCP, of both families where there are two.
func openListener(sp *space) (*os.File, error) {
	fd, err := -1, error(nil)
	err = sp.in(func() error {
		for _, family := range []int{unix.AF_INET6, unix.AF_INET} {
			if fd, err = listenAny(family); err == nil {
				break
			}
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open listener for the relay: %w", err)
	}
	f := os.NewFile(uintptr(fd), "relay listener")
	// Its warming dials it: in the namespace, before anybody is sent there.
	if err := sp.in(func() error { return proxy.Warm(f, relayBacklog) }); err != nil {
		return nil, errors.Join(fmt.Errorf("warm listener for the relay: %w", err), f.Close())
	}
	return f, nil
}

func listenAny(family int) (int, error) {
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_TCP)
	if err != nil {
		return -1, err
	}
	var to unix.Sockaddr = &unix.SockaddrInet4{}
	if family == unix.AF_INET6 {
		to = &unix.SockaddrInet6{}
		err = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 0)
	}
	// Its connections have the application's port. Without this, which they inherit, they would keep one that is started
	// anew from binding to it (inet_csk_bind_conflict in net/ipv4/inet_connection_sock.c).
	err = errors.Join(err, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1))
	if err == nil {
		err = unix.Bind(fd, to)
	}
	if err == nil {
		err = unix.Listen(fd, relayBacklog)
	}
	if err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

// startRelay makes a relay that carries to peers and returns the cookie of its listener. One that is there already, from
// an earlier drain or for the accept queue, is used again.
//
// It is ready before the flip: until then every connection is still served where it always was, so nothing is lost if it
// cannot be had.
func (l *late) startRelay(ctx context.Context, sp *space, peers []proxy.Peer, parked bool, until time.Time) (uint64, error) {
	l.mu.Lock()
	p, cookie := l.relay, l.listener
	l.mu.Unlock()
	if p != nil && cookie != 0 {
		err := p.Extend(ctx, until)
		if err == nil {
			err = p.SetPeers(ctx, peers)
		}
		if err == nil && parked {
			err = p.Park(ctx)
		}
		if err == nil {
			return cookie, nil
		}
		l.log.Warn("use the relay that is there; another one is started", "err", err)
		l.dropRelay(p)
	}
	f, cookie := l.takeSpare()
	if f == nil {
		var err error
		if f, err = openListener(sp); err != nil {
			return 0, err
		}
		if cookie, err = l.b.dp.target(int(f.Fd()), sp); err != nil {
			return 0, errors.Join(err, f.Close())
		}
	}
	defer f.Close()
	err := sp.in(func() (err error) {
		p, err = relay.Start(ctx, f, relay.Options{
			RetireAfter: l.o.retire,
			Name:        l.o.relay, RunDir: l.o.runDir, Until: until, Peers: peers, Parked: parked, Park: l.o.park,
			Health: l.o.health, Log: l.log,
		})
		return err
	})
	if err != nil {
		return 0, err
	}
	l.b.proc.leaveOut(p.PID())
	l.mu.Lock()
	l.relay, l.listener = p, cookie
	l.mu.Unlock()
	if p.Place() == relay.PlaceBeside {
		l.b.emit(drain.Event{Type: EventDegraded, Message: "the relay lives in the cgroup of `ebb run`: it outlives a crash of ebb, but not what ends the whole unit or container"})
	}
	return cookie, nil
}

// dropRelay forgets a relay that is of no use any more and lets it finish.
func (l *late) dropRelay(p *relay.Process) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	l.tally(ctx, p)
	l.mu.Lock()
	if l.relay == p {
		l.relay, l.listener, l.pauses = nil, 0, 0
		l.gone, l.now = l.gone.plus(l.now), relayTotals{}
		l.counted = map[proxy.Action]map[proxy.Result]uint64{}
	}
	l.mu.Unlock()
	if err := errors.Join(p.Stop(ctx), p.Close()); err != nil {
		l.log.Warn("stop the relay", "err", err)
	}
}

func (a relayTotals) plus(b relayTotals) relayTotals {
	return relayTotals{a.ok + b.ok, a.failed + b.failed, a.health + b.health}
}

// followEvery is how often siblings, peers and the relay are looked at while late connections go there.
const followEvery = 500 * time.Millisecond

// follow keeps the redirection true to what is there, until open or close.
func (l *late) follow() {
	ctx, stop := context.WithCancel(l.ctx)
	l.mu.Lock()
	if l.stop != nil {
		l.stop()
	}
	l.stop = stop
	l.mu.Unlock()
	l.wg.Go(func() {
		for wait(ctx, followEvery) {
			l.step(ctx)
		}
	})
}

// unfollow ends follow.
func (l *late) unfollow() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stop != nil {
		l.stop()
		l.stop = nil
	}
}

// step looks once.
func (l *late) step(ctx context.Context) {
	l.mu.Lock()
	p := l.relay
	l.mu.Unlock()
	if p != nil {
		l.tally(ctx, p)
	}
	look, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	l.act.Lock()
	defer l.act.Unlock()
	how, _ := l.inForce()
	if how == "" || ctx.Err() != nil {
		return
	}
	if p != nil {
		l.hurry(look, p)
	}
	next := l.survey(look)
	if next.space == nil || look.Err() != nil {
		return // the look was not to the end: what is in force stays as it is
	}
	if how == drain.OnNewSteer && next.silent && len(next.steer) == 0 {
		return // the kernel has let go of its listener if that has closed; else it is busy, and better than a refusal
	}
	l.mu.Lock()
	last := l.plan
	l.plan = next
	l.mu.Unlock()
	var err error
	switch how {
	case drain.OnNewSteer:
		err = l.retarget(ctx, last, next)
	default:
		err = l.repeer(ctx, how, last, next)
	}
	if err != nil && ctx.Err() == nil {
		l.log.Warn("follow what takes late connections", "err", err)
	}
}

// hurry has the relay let go of clients that hardly pause, once they alone keep the drain from its end: the application is
// flushed, and none has come for the quiet period. Before that they would only come back.
func (l *late) hurry(ctx context.Context, p *relay.Process) {
	steered, ok := l.b.dp.steered()
	if !ok || steered != l.steered || l.calm.IsZero() {
		l.steered, l.calm = steered, time.Now()
	}
	if l.o.retire == 0 || l.hurried == p || !l.b.flushed.Load() || l.b.flushing.Load() || time.Since(l.calm) < l.o.quiet {
		return
	}
	if err := p.LetGo(ctx); err != nil {
		if ctx.Err() == nil && !errors.Is(err, relay.ErrEnded) {
			l.log.Warn("let go of relayed connections", "err", err)
		}
		return
	}
	l.hurried = p
	l.tell("relayed clients that hardly pause are let go between two requests", nil)
}

// retarget steers to the siblings that are ready now. With none left connections are refused: the application has been
// told to end, and a refusal can be tried again elsewhere.
func (l *late) retarget(ctx context.Context, last, next plan) error {
	if sameSiblings(last.steer, next.steer) {
		return nil
	}
	if len(next.steer) > 0 {
		targets, err := l.aim(next.space, next.steer)
		if err != nil {
			return err
		}
		l.log.Info("late connections are steered elsewhere", "to", strings.Join(next.whom, ", "))
		l.tell("late connections are steered to "+strings.Join(next.whom, ", "), nil)
		return l.resteer(ctx, targets)
	}
	if len(next.peers) > 0 {
		cookie, err := l.startRelay(ctx, next.space, next.peers, false, l.end())
		if err != nil {
			return err
		}
		if err := l.resteer(ctx, map[netip.AddrPort][]uint64{{}: {cookie}}); err != nil {
			return err
		}
		l.mu.Lock()
		l.how = drain.OnNewRelay
		l.mu.Unlock()
		l.tell("no sibling is ready any more: late connections are relayed", nil)
		return nil
	}
	l.mu.Lock()
	l.plan = last // to be tried again
	l.mu.Unlock()
	if l.b.dp.refusing() {
		return nil
	}
	l.tell("no sibling is ready any more: late connections are refused", nil)
	return l.b.dp.refuse(ctx, l.addresses(), false, l.left())
}

// repeer gives the relay the peers that can be reached now; what is parked goes there. A relay that has ended is replaced.
func (l *late) repeer(ctx context.Context, how drain.OnNew, last, next plan) error {
	l.mu.Lock()
	p := l.relay
	l.mu.Unlock()
	ended := p == nil
	if p != nil {
		select {
		case <-p.Done():
			ended = true
		default:
		}
	}
	if ended {
		if p != nil {
			l.dropRelay(p)
		}
		l.tell("the relay has ended: another one is started", relay.ErrEnded)
		cookie, err := l.startRelay(ctx, next.space, next.peers, how == drain.OnNewHold && len(next.peers) == 0, l.end())
		if err != nil {
			return err
		}
		return l.resteer(ctx, map[netip.AddrPort][]uint64{{}: {cookie}})
	}
	if slices.Equal(last.peers, next.peers) {
		return nil
	}
	if len(next.peers) == 0 {
		// The relay goes on trying those that it has.
		l.mu.Lock()
		l.plan.peers = last.peers
		l.mu.Unlock()
		return nil
	}
	if how == drain.OnNewHold {
		l.tell("another backend can be reached: what is parked is released", nil)
		return p.Release(ctx, next.peers...)
	}
	return p.SetPeers(ctx, next.peers)
}

// resteer sends what is late elsewhere.
func (l *late) resteer(ctx context.Context, targets map[netip.AddrPort][]uint64) error {
	if err := l.b.dp.steer(ctx, l.addresses(), targets, l.left()); err != nil || l.b.flipped == nil {
		return err
	}
	return l.b.flipped(ctx)
}

func (l *late) end() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.until
}

// left is the end of the rule on the boot clock.
func (l *late) left() time.Duration { return l.b.boot() + time.Until(l.end()) }

func (l *late) tell(msg string, err error) {
	how, why := l.inForce()
	fields := map[string]any{"action": string(how), "why": why}
	if err != nil {
		fields["err"] = err.Error()
	}
	l.b.emit(drain.Event{Type: drain.EventLate, Message: msg, Fields: fields})
}

// Late implements drain.LateWorld.
func (b *backend) Late(ctx context.Context) (drain.LateCounts, error) {
	l := b.late
	steered, ok := b.dp.steered()
	l.mu.Lock()
	p := l.relay
	c := drain.LateCounts{Arrived: steered - min(l.base, steered), Known: ok}
	l.mu.Unlock()
	select {
	case <-b.proc.exited():
		// What waits at its listeners is in no other count any more.
		c.Parked = int(l.waiting.Load())
	default:
	}
	if p == nil {
		return c, nil
	}
	s, err := p.Stats(ctx)
	if errors.Is(err, relay.ErrEnded) {
		return c, nil
	}
	if err != nil {
		return drain.LateCounts{}, err
	}
	c.Parked += s.Relay.Parked
	c.Carried = max(0, s.Relay.Active-s.Relay.Parked)
	b.metrics.HeldConnections(b.service, s.Relay.Parked)
	return c, nil
}

// EndLate implements drain.LateWorld: what is carried or parked is reset on both sides.
func (b *backend) EndLate(ctx context.Context) error {
	l := b.late
	l.mu.Lock()
	p := l.relay
	l.mu.Unlock()
	if p == nil {
		return nil
	}
	l.tally(ctx, p)
	if err := p.Kill(); err != nil {
		return err
	}
	select {
	case <-p.Done():
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// open ends a redirection for new connections; what is carried goes on.
func (l *late) open() {
	l.mu.Lock()
	was := l.how
	l.how, l.why, l.own = "", "", nil
	l.mu.Unlock()
	l.unfollow()
	if was == "" {
		return
	}
	l.letGo()
	if err := l.b.journal.append(lateRecord{Version: journalVersion, Type: "late"}); err != nil {
		l.log.Warn("journal that late connections are not redirected any more", "err", err)
	}
}

// tally tells the metrics what the relay has done since the last time.
func (l *late) tally(ctx context.Context, p *relay.Process) {
	s, err := p.Stats(ctx)
	if err != nil {
		if !errors.Is(err, relay.ErrEnded) && ctx.Err() == nil {
			l.log.Warn("ask the relay what it carries", "err", err)
		}
		return
	}
	l.b.metrics.HeldConnections(l.b.service, s.Relay.Parked)
	over, full := l.count(p, s)
	if full {
		l.tell(fmt.Sprintf("the relay carries %d connections, as many as it may or has descriptors for: later ones wait in its backlog", s.Relay.Active), nil)
	}
	if over > 0 {
		l.tell(fmt.Sprintf("%d more connections came than may wait, which are %d, and were reset", over, cmp.Or(l.o.park.Max, proxy.DefaultParkMax)), nil)
	}
}

// count takes over what the relay has counted. Since the last time it has reset over connections because too many waited,
// and full tells that it has come to a limit, at which it accepts nothing for moments.
func (l *late) count(p *relay.Process, s relay.Stats) (over uint64, full bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.relay != p {
		return 0, false
	}
	paused := s.Relay.Pauses > l.pauses
	full = paused && !l.atLimit
	l.pauses, l.atLimit = s.Relay.Pauses, paused
	l.now = relayTotals{}
	for _, c := range s.Late {
		n := &l.now.failed
		result := metrics.LateFailed
		switch c.Result {
		case proxy.ResultDone, proxy.ResultReset, proxy.ResultGone, proxy.ResultIdle, proxy.ResultRefused:
			n, result = &l.now.ok, metrics.LateOK
		}
		if c.Action == proxy.ActionHealth {
			n = &l.now.health
		}
		*n += c.N
		of := l.counted[c.Action]
		if of == nil {
			of = map[proxy.Result]uint64{}
			l.counted[c.Action] = of
		}
		if c.N > of[c.Result] {
			l.b.metrics.LateConnections(l.b.service, metrics.LateAction(c.Action), result, int(c.N-of[c.Result]))
			if c.Result == proxy.ResultOverflow {
				over += c.N - of[c.Result]
			}
			of[c.Result] = c.N
		}
	}
	return over, full
}

// view fills in what is known of late connections.
func (l *late) view(v *api.Late) {
	steered, _ := l.b.dp.steered()
	l.mu.Lock()
	defer l.mu.Unlock()
	all := l.gone.plus(l.now)
	v.Redirected = int64(steered - min(l.base, steered))
	v.Adopted, v.Relayed, v.Failed, v.Health = int64(l.adopted), int64(all.ok), int64(all.failed), int64(all.health)
}

// warnings say what late connections lead to that nobody may have thought of.
func (l *late) warnings() []string {
	how, _ := l.inForce()
	if l.o.health != nil || (how != drain.OnNewSteer && how != drain.OnNewRelay) {
		return nil
	}
	return []string{"health checks on the service's port are answered by another backend, so a balancer that relies on them does not see this drain: name them, by --health-from or --health-path, or under health: in the configuration of the agent"}
}

// leaveFor bounds the wait of leave for the accept queues that are being emptied: what is taken in by nobody is reset.
const leaveFor = time.Second

// leave lets go of what this process holds. The rule and the relay go on, for the next owner.
func (l *late) leave() {
	for end := time.Now().Add(leaveFor); l.waiting.Load() > 0 && time.Now().Before(end); {
		if !wait(l.ctx, emptyEvery) {
			break
		}
	}
	l.keep.end()
	l.cancel()
	l.letGo()
	l.wg.Wait()
	l.keep.letGo()
	l.mu.Lock()
	held, p := l.dups, l.relay
	l.dups, l.relay = nil, nil
	l.mu.Unlock()
	letGo(held, l.log)
	if p != nil {
		if err := p.Close(); err != nil {
			l.log.Warn("let go of the relay", "err", err)
		}
	}
}

// shed gives the relay up, which goes on until nothing is carried, and ends the redirection: another process has the
// addresses now.
func (l *late) shed() {
	l.open()
	l.mu.Lock()
	p := l.relay
	l.mu.Unlock()
	if p != nil {
		l.dropRelay(p)
	}
}

// close lets the relay finish and gives it up.
func (l *late) close() {
	l.keep.end()
	l.cancel()
	l.letGo()
	l.wg.Wait()
	l.keep.letGo()
	if f, _ := l.takeSpare(); f != nil {
		if err := f.Close(); err != nil {
			l.log.Warn("close the listener that no relay took", "err", err)
		}
	}
	l.mu.Lock()
	held := l.dups
	l.dups = nil
	l.mu.Unlock()
	letGo(held, l.log)
	l.mu.Lock()
	p := l.relay
	l.mu.Unlock()
	if p != nil {
		l.dropRelay(p)
	}
}

var _ drain.LateWorld = (*backend)(nil)

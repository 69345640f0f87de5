// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const maxLoops = 4

// defaultLoops leaves half of the machine to whom the relay serves. Loops that compete with client and server for
// processors cost more than they bring: on two processors 16 bulk flows took a quarter more CPU time per GB with two
// loops than with one.
func defaultLoops() int { return max(1, min(runtime.GOMAXPROCS(0)/2, maxLoops)) }

// reservedFDs are left to the rest of the process when the number of connections is bounded by its limit.
const reservedFDs = 64

// Relay carries connections. Its methods may be called by any goroutine at any time.
type Relay struct {
	o     Options
	log   *slog.Logger
	debug bool
	begun time.Time
	ports [2]uint16
	loops []*loop
	peers atomic.Pointer[peerSet]
	hold  atomic.Bool  // new connections are parked
	letGo atomic.Int64 // when LetGo was called; 0: it was not

	live   atomic.Int64 // connections, from accepted to over
	parked atomic.Int64
	pipes  atomic.Int64

	accepted, dialFailures, noPeer, refused, pauses atomic.Uint64
	results                                         map[Result]*atomic.Uint64
	fullSaid                                        atomic.Int64 // when the log last said that the relay is full

	probeNow   chan struct{}
	stopProbes context.CancelFunc
	tasks      sync.WaitGroup

	mu        sync.Mutex // guards what follows
	setPeers  sync.Mutex // one change of peers at a time
	waiting   []chan struct{}
	closing   chan struct{} // closed when nothing is accepted any more
	closed    bool
	serving   sync.WaitGroup
	listeners map[int]*listener
	nextID    int
	addresses []netip.AddrPort // of the listeners
}

// New starts a relay that accepts nothing yet. The error wraps ErrOptions if the options cannot work.
func New(o Options) (*Relay, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	r := &Relay{
		o: o, log: o.Log, debug: o.Log.Enabled(context.Background(), slog.LevelDebug), begun: time.Now(), ports: ephemeralPorts(),
		probeNow: make(chan struct{}, 1), closing: make(chan struct{}), listeners: make(map[int]*listener),
		results: make(map[Result]*atomic.Uint64),
	}
	for _, v := range []Result{ResultDone, ResultReset, ResultGone, ResultNoPeer, ResultOverflow, ResultExpired, ResultIdle, ResultRefused, ResultClosed, ResultError} {
		r.results[v] = new(atomic.Uint64)
	}
	if err := r.fit(); err != nil {
		return nil, err
	}
	if err := r.SetPeers(o.Peers); err != nil {
		return nil, err
	}
	for i := range o.Loops {
		l, err := newLoop(r, i)
		if err != nil {
			for _, l := range r.loops {
				l.release()
			}
			return nil, err
		}
		r.loops = append(r.loops, l)
	}
	ctx, cancel := context.WithCancel(context.Background())
	r.stopProbes = cancel
	if o.Probe.Interval > 0 {
		r.tasks.Go(func() { r.prober(ctx) })
	}
	for _, l := range r.loops {
		r.tasks.Go(func() {
			l.run()
			l.release()
		})
	}
	return r, nil
}

// fit lowers what may be used to what the process has descriptors for.
func (r *Relay) fit() error {
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		return fmt.Errorf("read limit of descriptors: %w", err)
	}
	have := int(min(lim.Cur, 1<<30))
	r.o.MaxPipes = max(1, min(r.o.MaxPipes, have/16))
	most := (have - reservedFDs - 2*(r.o.MaxPipes+sparePipes*r.o.Loops)) / 2
	if most < 1 {
		return fmt.Errorf("%w: the limit of %d descriptors leaves none for connections: raise it (ulimit -n, LimitNOFILE=)", ErrOptions, have)
	}
	if most < r.o.MaxConnections {
		r.log.Info("fewer connections fit into the limit of descriptors", "connections", most, "wanted", r.o.MaxConnections, "limit", have)
		r.o.MaxConnections = most
	}
	return nil
}

// clock is the time since the relay began, in ns.
func (r *Relay) clock() int64 { return int64(time.Since(r.begun)) }

// Serve accepts connections from ln until ctx ends, Shutdown or Close is called, or ln fails; only then the error is not
// nil. What was accepted goes on being relayed. Several listeners may be served.
//
// ln is an *os.File or a *net.TCPListener. It stays the caller's, but becomes non-blocking, and its connections inherit
// TCP_NODELAY, SO_OOBINLINE and SO_KEEPALIVE from it: it must be the relay's own and not a dup of an application's
// listener. Warm sets them before connections come, which spares setting them on each. The error wraps ErrNotListener,
// ErrLoop or ErrClosed.
func (r *Relay) Serve(ctx context.Context, ln syscall.Conn) error {
	fd, prepared, err := dupListener(ln)
	if err != nil {
		return err
	}
	defer closeFD(fd)
	addr := name(fd, unix.SYS_GETSOCKNAME)
	n := &listener{fd: fd, prepared: prepared, err: make(chan error, 1)}
	r.mu.Lock()
	select {
	case <-r.closing:
		r.mu.Unlock()
		return ErrClosed
	default:
	}
	for _, p := range r.peers.Load().peers {
		if same(p.Address, addr) {
			r.mu.Unlock()
			return fmt.Errorf("serve %v: peer %v: %w", addr, p.Address, ErrLoop)
		}
	}
	n.id = r.nextID
	r.nextID++
	r.listeners[n.id] = n
	r.addresses = append(r.addresses, addr)
	r.serving.Add(1)
	r.mu.Unlock()
	defer r.serving.Done()
	r.log.Info("relay accepts connections", "listener", addr)
	r.each(func(l *loop) {
		l.listeners = append(l.listeners, n)
		if !l.deaf {
			l.watch(n)
		}
	})
	select {
	case <-ctx.Done():
	case <-r.closing:
	case err = <-n.err:
		err = fmt.Errorf("serve %v: %w", addr, err)
	}
	r.each(func(l *loop) {
		for i, v := range l.listeners {
			if v == n {
				// Our descriptor is a dup: closing it does not take it out of epoll.
				epollDel(l.ep, n.fd)
				l.listeners = append(l.listeners[:i:i], l.listeners[i+1:]...)
				break
			}
		}
	})
	r.mu.Lock()
	delete(r.listeners, n.id)
	for i, a := range r.addresses {
		if a == addr {
			r.addresses = append(r.addresses[:i:i], r.addresses[i+1:]...)
			break
		}
	}
	r.mu.Unlock()
	return err
}

// each has every loop do f, and waits until all have or are over.
func (r *Relay) each(f func(*loop)) {
	var wg sync.WaitGroup
	for _, l := range r.loops {
		wg.Add(1)
		if !l.post(func() { f(l); wg.Done() }) {
			wg.Done()
		}
	}
	wg.Wait()
}

// same tells whether dialling peer may reach a listener on addr.
func same(peer, addr netip.AddrPort) bool {
	if peer.Port() != addr.Port() {
		return false
	}
	a, p := addr.Addr().Unmap(), peer.Addr().Unmap()
	if a == p.WithZone("") {
		return true
	}
	if !a.IsUnspecified() || a.Is4() && !p.Is4() {
		return false
	}
	if p.IsLoopback() {
		return true
	}
	own, err := net.InterfaceAddrs()
	if err != nil {
		return false
	}
	for _, o := range own {
		if n, ok := o.(*net.IPNet); ok {
			if ip, ok := netip.AddrFromSlice(n.IP); ok && ip.Unmap() == p.WithZone("") {
				return true
			}
		}
	}
	return false
}

// dupListener checks and prepares a listener. prepared is whether it was so before, and connections in its queue are too.
func dupListener(ln syscall.Conn) (_ int32, prepared bool, err error) {
	raw, err := ln.SyscallConn()
	if err != nil {
		return -1, false, fmt.Errorf("reach listener: %w", err)
	}
	fd := -1
	var inner error
	if err := raw.Control(func(p uintptr) {
		listens, err := unix.GetsockoptInt(int(p), unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
		if err != nil {
			inner = fmt.Errorf("%w: %w", ErrNotListener, err)
			return
		}
		proto, err := unix.GetsockoptInt(int(p), unix.SOL_SOCKET, unix.SO_PROTOCOL)
		if err != nil || listens == 0 || proto != unix.IPPROTO_TCP {
			inner = fmt.Errorf("%w: protocol %d", ErrNotListener, proto)
			return
		}
		if fd, inner = unix.FcntlInt(p, unix.F_DUPFD_CLOEXEC, 3); inner != nil {
			inner = fmt.Errorf("duplicate listener: %w", inner)
		}
	}); err != nil {
		return -1, false, fmt.Errorf("reach listener: %w", err)
	}
	if inner != nil {
		return -1, false, inner
	}
	inline, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_OOBINLINE)
	if err == nil {
		err = errors.Join(unix.SetNonblock(fd, true), setOptions(fd))
	}
	if err != nil {
		closeFD(int32(fd))
		return -1, false, fmt.Errorf("prepare listener: %w", err)
	}
	return int32(fd), inline == 1, nil
}

// setOptions sets what a client's connection needs. Set on a listener, later connections inherit it.
func setOptions(fd int) error {
	var errs []error
	for _, o := range [][3]int{
		{unix.IPPROTO_TCP, unix.TCP_NODELAY, 1},
		{unix.SOL_SOCKET, unix.SO_OOBINLINE, 1}, // or else an urgent byte would be lost
		// A client that vanished must not stay for ever: two minutes of silence end it.
		{unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
		{unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, 60},
		{unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, 15},
		{unix.IPPROTO_TCP, unix.TCP_KEEPCNT, 4},
	} {
		errs = append(errs, unix.SetsockoptInt(fd, o[0], o[1], o[2]))
	}
	return errors.Join(errs...)
}

// Adopt takes over an established connection, such as one out of an application's accept queue, and relays it like one
// that was accepted. The descriptor is the relay's from then on, also on error, and becomes non-blocking. The error
// wraps ErrFull or ErrClosed, and the connection has then been reset.
func (r *Relay) Adopt(fd int) error {
	if err := prepare(fd); err != nil {
		unix.Close(fd)
		return fmt.Errorf("adopt connection: %w", err)
	}
	if !r.reserve() {
		reset(int32(fd))
		return fmt.Errorf("adopt connection: %w", ErrFull)
	}
	r.mu.Lock()
	over := r.isClosing()
	r.mu.Unlock()
	l := r.loops[0]
	for _, o := range r.loops[1:] {
		if o.conns.Load() < l.conns.Load() {
			l = o
		}
	}
	if over || !l.post(func() {
		var from *rawAddr
		if h := r.o.Health; h != nil && len(h.From) > 0 {
			from = &l.from
			if a, _, err := newRawAddr(name(int32(fd), unix.SYS_GETPEERNAME)); err == nil {
				l.from = a
			} else {
				from = nil
			}
		}
		l.place(int32(fd), from)
	}) {
		r.unreserve()
		reset(int32(fd))
		return fmt.Errorf("adopt connection: %w", ErrClosed)
	}
	r.accepted.Add(1)
	return nil
}

func prepare(fd int) error {
	if _, err := unix.Getpeername(fd); err != nil {
		return fmt.Errorf("%w: %w", errNotSocket, err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		return err
	}
	unix.CloseOnExec(fd)
	proto, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL)
	switch {
	case err != nil:
		return fmt.Errorf("%w: %w", errNotSocket, err)
	case proto == unix.IPPROTO_MPTCP:
		// It knows only some of the options, and none is worth losing a client for.
		_ = setOptions(fd)
		return nil
	case proto == unix.IPPROTO_TCP:
		return setOptions(fd)
	}
	return fmt.Errorf("%w: protocol %d", errNotSocket, proto)
}

// SetPeers replaces the peers. Those that stay keep what is known of them; connections that are being dialled or
// carried are not touched. The error wraps ErrOptions or ErrLoop, and nothing has changed then.
func (r *Relay) SetPeers(peers []Peer) error {
	r.setPeers.Lock()
	defer r.setPeers.Unlock()
	known := make(map[Peer]*peer)
	if old := r.peers.Load(); old != nil {
		for _, p := range old.peers {
			known[p.Peer] = p
		}
	}
	r.mu.Lock()
	addresses := r.addresses[:len(r.addresses):len(r.addresses)]
	r.mu.Unlock()
	var set []*peer
	seen := make(map[Peer]bool)
	for _, p := range peers {
		if seen[p] {
			continue
		}
		seen[p] = true
		for _, a := range addresses {
			if same(p.Address, a) {
				return fmt.Errorf("peer %v: %w", p.Address, ErrLoop)
			}
		}
		n := known[p]
		if n == nil {
			var err error
			if n, err = newPeer(p, r.o.Probe, r.ports); err != nil {
				return err
			}
		}
		set = append(set, n)
	}
	r.peers.Store(newPeerSet(set).split())
	select {
	case r.probeNow <- struct{}{}:
	default:
	}
	return nil
}

// Peers tells what is known of the peers.
func (r *Relay) Peers() []PeerStatus {
	var out []PeerStatus
	for _, p := range r.peers.Load().peers {
		out = append(out, p.status())
	}
	return out
}

// Check dials every peer once, from where and as clients' connections are dialled, and returns nil if one can be
// reached: only then it makes sense to send connections here. The error wraps ErrNoPeer and every dial's own.
func (r *Relay) Check(ctx context.Context) error {
	peers := r.peers.Load().peers
	errs := make([]error, len(peers))
	var wg sync.WaitGroup
	for i, p := range peers {
		wg.Go(func() {
			errs[i] = p.probe(ctx, r.o.Probe.Timeout)
			if ctx.Err() == nil {
				r.judgePeer(p, errs[i])
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err == nil {
			return nil
		}
	}
	return errors.Join(append([]error{ErrNoPeer}, errs...)...)
}

// Park lets connections wait from now on: nothing is dialled until Release.
func (r *Relay) Park() {
	if !r.hold.Swap(true) {
		r.log.Info("connections are parked")
	}
}

// Release carries what is parked to peers, oldest first and paced as ParkOptions say, and repeats dials that fail until
// a connection has waited for ParkOptions.For. Connections that come meanwhile wait behind. Without peers those that are
// set stay. Stats tells when nothing is parked any more, and not before that traffic may go past the relay again.
func (r *Relay) Release(peers ...Peer) error {
	if len(peers) > 0 {
		if err := r.SetPeers(peers); err != nil {
			return err
		}
	}
	if r.hold.Swap(false) {
		r.log.Info("parked connections are released", "parked", r.parked.Load())
	}
	r.loops[0].post(func() {}) // a turn, in which it begins
	return nil
}

// LetGo does not wait for pauses of RetireAfter from now on, for when nobody but clients that hardly pause keep the relay
// from its end. A connection on which two answers were seen without a pause is retired as soon as it is idle for 8 ms. One
// that is never so is retired after a second, at the moment at which its next request comes: the answer before it has
// arrived then. This request is not read, and its client sees what it would see of a server that closes an idle
// connection: only safe methods (RFC 9110, section 9.2.1) are treated so, which clients repeat by themselves. Without
// RetireAfter nothing changes.
func (r *Relay) LetGo() {
	if r.o.RetireAfter > 0 && r.letGo.CompareAndSwap(0, max(1, r.clock())) {
		r.log.Info("connections of clients that do not pause are let go")
	}
}

// reserve counts a connection that is about to be accepted.
func (r *Relay) reserve() bool {
	if r.live.Add(1) > int64(r.o.MaxConnections) {
		r.unreserve()
		return false
	}
	return true
}

func (r *Relay) unreserve() {
	if r.live.Add(-1) == 0 {
		r.mu.Lock()
		if r.live.Load() == 0 {
			for _, c := range r.waiting {
				close(c)
			}
			r.waiting = nil
		}
		r.mu.Unlock()
	}
}

// over notes what became of a connection.
func (r *Relay) over(a Action, v Result) {
	r.results[v].Add(1)
	if r.o.Metrics != nil {
		r.o.Metrics.LateConnection(a, v)
	}
	if r.debug {
		r.log.Debug("connection is over", "action", string(a), "result", string(v))
	}
	r.unreserve()
}

// full says that nothing is accepted for a while, at most once in ten seconds.
func (r *Relay) full(why string, err error, now int64) {
	r.pauses.Add(1)
	said := r.fullSaid.Load()
	if (said == 0 || now-said > int64(10*time.Second)) && r.fullSaid.CompareAndSwap(said, max(now, 1)) {
		r.log.Warn("relay accepts nothing for the moment", "why", why, "connections", r.live.Load(), slog.Any("err", err))
	}
}

// least is the loop that should have the next connection: own unless another has clearly less.
func (r *Relay) least(own *loop) *loop {
	best, n := own, own.conns.Load()
	for _, l := range r.loops {
		if m := l.conns.Load(); m+m/8+2 < n {
			best, n = l, m
		}
	}
	return best
}

// Stats is what a relay has done and holds. Counters begin with the relay.
type Stats struct {
	Active int // connections that are held: parked, dialled or carried
	Parked int // of them parked, those included that are being released
	Pipes  int // in use or spare

	Accepted       uint64 // adopted ones included
	BytesToPeers   uint64
	BytesToClients uint64
	DialFailures   uint64 // dials of a peer for a client that failed
	Pauses         uint64 // times at which a loop stopped accepting at a limit
	Results        map[Result]uint64
}

// Stats counts at this moment; connections move on meanwhile.
func (r *Relay) Stats() Stats {
	s := Stats{
		Active: int(r.live.Load()), Parked: int(r.parked.Load()), Pipes: int(r.pipes.Load()),
		Accepted: r.accepted.Load(), DialFailures: r.dialFailures.Load(), Pauses: r.pauses.Load(), Results: make(map[Result]uint64),
	}
	for _, l := range r.loops {
		s.BytesToPeers += l.carried[client].Load()
		s.BytesToClients += l.carried[server].Load()
	}
	for v, n := range r.results {
		s.Results[v] = n.Load()
	}
	return s
}

// Idle returns a channel that is closed as soon as no connection is held.
func (r *Relay) Idle() <-chan struct{} {
	c := make(chan struct{})
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.live.Load() == 0 {
		close(c)
	} else {
		r.waiting = append(r.waiting, c)
	}
	return c
}

func (r *Relay) isClosing() bool {
	select {
	case <-r.closing:
		return true
	default:
		return false
	}
}

// stopAccepting ends every Serve.
func (r *Relay) stopAccepting() {
	r.mu.Lock()
	if !r.isClosing() {
		close(r.closing)
	}
	r.mu.Unlock()
	r.serving.Wait()
}

// Shutdown stops accepting, waits until every connection is over and closes the relay. If ctx ends before, it returns
// its cause, and what is left goes on being relayed.
func (r *Relay) Shutdown(ctx context.Context) error {
	r.stopAccepting()
	select {
	case <-r.Idle():
		return r.Close()
	case <-ctx.Done():
		return fmt.Errorf("wait for %d connections: %w", r.live.Load(), context.Cause(ctx))
	}
}

// Close ends everything at once: what is relayed is reset on both sides. It may be called again.
func (r *Relay) Close() error {
	r.stopAccepting()
	r.mu.Lock()
	first := !r.closed
	r.closed = true
	r.mu.Unlock()
	if first {
		r.stopProbes()
		for _, l := range r.loops {
			l.post(l.stop)
		}
	}
	r.tasks.Wait()
	return nil
}

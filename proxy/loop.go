// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// sparePipes is how many empty pipes a loop keeps for the next flow.
	sparePipes = 16

	// events is how many a loop takes at a time.
	events = 256

	// slab is how many connections are allocated at a time, which also keeps their addresses fixed.
	slab = 128

	// maxAccepts is how many connections are taken from a listener before others get their turn.
	maxAccepts = 32

	// heldFor is how many ms a loop waits for events without telling the Go scheduler. Told, it has a thread of its own
	// take the processor away after 20 µs and look for more of the kind all the time: an eighth of the CPU time of a
	// relay under load. Not told, it sends a signal when it needs the processor, which ends the wait.
	heldFor = 2

	// deafFor is how long a loop does not accept after it could not, unless a connection ends before.
	deafFor = int64(100 * time.Millisecond)

	edges = unix.EPOLLIN | unix.EPOLLOUT | unix.EPOLLRDHUP | unix.EPOLLPRI | unix.EPOLLET&math.MaxUint32
)

// What is not a connection has one of these, or a listener's −(3+index), in place of its id.
const wakeID = -1

// loop is one event loop: the goroutine of run, which alone touches what it holds.
type loop struct {
	r     *Relay
	index int
	ep    int32
	wakeR int32 // an eventfd that wakes it
	buf   []byte
	now   int64 // of the turn, in ns since the relay began
	rng   *rand.Rand
	turn  int // bytes that a flow may carry at a time

	slabs [][]conn
	spare []int32 // ids that are free
	pipes []*pipe
	again []task

	listeners []*listener
	deaf      bool  // the listeners are not listened to
	deafUntil int64 // when to try again
	accepts   int   // how many connections to take at once
	from, own rawAddr

	dials, shortDials, peeks, turns, idle, soon, halfClosed queue

	// Only the first loop parks, so that connections are released in the order in which they came.
	parks     queue
	releasing int   // released ones that are dialled now
	nextPace  int64 // when the next ones may be
	burst     int   // how many
	strained  bool  // a dial of one has failed since

	mu     sync.Mutex // guards the two below
	inbox  []func()
	closed bool
	woken  atomic.Bool

	conns   atomic.Int64
	carried [2]atomic.Uint64 // bytes, by the side that sent them
}

// task is a flow that used up its turn.
type task struct {
	c   *conn
	gen int32
	s   int
}

// listener is a descriptor that connections are accepted from, by every loop.
type listener struct {
	fd       int32
	id       int
	prepared bool // its connections inherit what they need
	once     sync.Once
	err      chan error // of the first loop that cannot go on
}

func newLoop(r *Relay, index int) (*loop, error) {
	l := &loop{r: r, index: index, buf: make([]byte, bufferSize), rng: rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())), turn: turnSize, accepts: 1}
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("create epoll: %w", err)
	}
	l.ep = int32(ep)
	wake, err := unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC)
	if err != nil {
		closeFD(l.ep)
		return nil, fmt.Errorf("create eventfd: %w", err)
	}
	l.wakeR = int32(wake)
	if errno := epollAdd(l.ep, l.wakeR, unix.EPOLLIN|unix.EPOLLET&math.MaxUint32, wakeID, 0); errno != 0 {
		closeFD(l.ep)
		closeFD(l.wakeR)
		return nil, fmt.Errorf("watch eventfd: %w", errno)
	}
	l.dials.expire = func(c *conn) { l.dialFailed(c, unix.ETIMEDOUT) }
	l.shortDials.expire = l.dials.expire
	l.peeks.expire = l.start
	l.turns.expire = func(c *conn) { l.end(c, ResultRefused) }
	l.idle.expire = l.idled
	l.soon.expire = l.idled
	l.halfClosed.expire = func(c *conn) { l.end(c, ResultIdle) }
	l.parks.expire = func(c *conn) { l.end(c, ResultExpired) }
	return l, nil
}

// post has f called by the loop. It reports false if the loop has ended, and then f is never called.
func (l *loop) post(f func()) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	l.inbox = append(l.inbox, f)
	if !l.woken.Swap(true) {
		// The counter of an eventfd cannot overflow by ones.
		unix.Write(int(l.wakeR), []byte{1, 0, 0, 0, 0, 0, 0, 0})
	}
	return true
}

// run is the loop. It returns when stop has been called.
func (l *loop) run() {
	evs := make([]unix.EpollEvent, events)
	for {
		wait := l.wait()
		n, errno := epollHeld(l.ep, evs, min(uint(wait), heldFor)) // −1, which is for ever, is the largest
		if errno != 0 {
			n = 0 // a signal: the Go scheduler wants something, and gets it in what follows
		}
		if n == 0 && errno == 0 && uint(wait) > heldFor {
			// It is quiet: let others have the processor.
			var err error
			if n, err = unix.EpollWait(int(l.ep), evs, l.wait()); err != nil {
				n = 0
			}
		}
		l.now = l.r.clock()
		for i := range n {
			l.event(&evs[i])
		}
		if again := l.again; len(again) > 0 {
			l.again = nil
			for _, t := range again {
				if t.c.gen == t.gen && t.c.phase == open {
					t.c.flow[t.s].again = false
					l.pump(t.c, t.s)
				}
			}
			if l.again == nil {
				l.again = again[:0]
			}
		}
		l.timers()
		if l.woken.Load() && l.work() {
			break
		}
	}
	for i := range l.slabs {
		for j := range l.slabs[i] {
			if c := &l.slabs[i][j]; c.phase != free {
				l.end(c, ResultClosed)
			}
		}
	}
	for _, p := range l.pipes {
		p.close()
		l.r.pipes.Add(-1)
	}
}

// work does what was posted. It reports true when the loop has ended.
func (l *loop) work() bool {
	var b [8]byte
	unix.Read(int(l.wakeR), b[:])
	l.woken.Store(false)
	for {
		l.mu.Lock()
		fs := l.inbox
		l.inbox = nil
		closed := l.closed
		l.mu.Unlock()
		if len(fs) == 0 {
			return closed
		}
		for _, f := range fs {
			f()
		}
	}
}

// stop lets run end, and with it every connection, after what was posted before. It is posted.
func (l *loop) stop() {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
}

// release closes what the loop itself holds, after run has returned.
func (l *loop) release() {
	closeFD(l.ep)
	closeFD(l.wakeR)
}

// wait is the time until the next deadline in ms, −1 if there is none.
func (l *loop) wait() int {
	if len(l.again) > 0 {
		return 0
	}
	at := int64(math.MaxInt64)
	for _, q := range [...]*queue{&l.dials, &l.shortDials, &l.peeks, &l.turns, &l.idle, &l.soon, &l.halfClosed, &l.parks} {
		if q.first != nil {
			at = min(at, q.first.deadline)
		}
	}
	if l.deaf {
		at = min(at, l.deafUntil)
	}
	if l.parks.first != nil && !l.r.hold.Load() && l.releasing < max(l.burst, l.r.o.Park.Burst) {
		at = min(at, l.nextPace)
	}
	if at == math.MaxInt64 {
		return -1
	}
	// A moment late rather than a moment early, and then once more.
	return int(max(0, min(at-l.r.clock()+int64(time.Millisecond)-1, int64(time.Hour))) / int64(time.Millisecond))
}

// timers does what is due.
func (l *loop) timers() {
	for _, q := range [...]*queue{&l.dials, &l.shortDials, &l.peeks, &l.turns, &l.idle, &l.soon, &l.halfClosed, &l.parks} {
		for c := q.first; c != nil && c.deadline <= l.now; c = q.first {
			c.leave()
			q.expire(c)
		}
	}
	if l.deaf && l.deafUntil <= l.now {
		l.hear()
	}
	l.pace()
}

// event is told what epoll has to say.
func (l *loop) event(ev *unix.EpollEvent) {
	if ev.Fd < 0 {
		if ev.Fd != wakeID {
			l.acceptFrom(-3 - int(ev.Fd))
		}
		return
	}
	id, s := ev.Fd>>1, int(ev.Fd&1)
	c := &l.slabs[id/slab][id%slab]
	if c.gen != ev.Pad || c.phase == free || c.side[s].fd < 0 {
		return
	}
	sd := &c.side[s]
	if ev.Events&(unix.EPOLLIN|unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR|unix.EPOLLPRI) != 0 {
		sd.ready = true
	}
	if ev.Events&(unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0 {
		sd.hup = true
	}
	if ev.Events&unix.EPOLLPRI != 0 {
		sd.plain = true
	}
	dead := ev.Events&(unix.EPOLLHUP|unix.EPOLLERR) != 0
	switch c.phase {
	case open:
		if ev.Events&unix.EPOLLOUT != 0 {
			sd.room = true
		}
		if sd.ready {
			l.pump(c, s)
		}
		if o := 1 - s; sd.room && c.phase == open && (c.side[o].ready || c.flow[o].rest != nil || c.flow[o].pipe != nil) && !c.flow[o].again {
			l.pump(c, o)
		}
		if ev.Events&unix.EPOLLERR != 0 && c.phase == open {
			l.failed(c, s)
		}
	case dialing:
		switch {
		case s == client && dead:
			l.end(c, ResultGone)
		case s == server && dead:
			l.dialFailed(c, l.soError(sd.fd))
		case s == server && ev.Events&unix.EPOLLOUT != 0:
			l.connected(c)
		}
	case parked:
		if dead {
			l.end(c, ResultGone)
		}
	case peeking:
		if dead {
			l.end(c, ResultGone)
		} else {
			l.peek(c)
		}
	case turning:
		l.turnAway(c)
	}
}

func (l *loop) soError(fd int32) unix.Errno {
	v, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
	if err != nil || v == 0 {
		return unix.ECONNREFUSED
	}
	return unix.Errno(v)
}

// acceptFrom takes connections from a listener, more at a time while there are more.
func (l *loop) acceptFrom(id int) {
	i := slices.IndexFunc(l.listeners, func(n *listener) bool { return n.id == id })
	if i < 0 || l.deaf {
		return
	}
	ln := l.listeners[i]
	var from *rawAddr
	if l.r.o.Health != nil && len(l.r.o.Health.From) > 0 {
		from = &l.from
	}
	for n := range l.accepts {
		if !l.r.reserve() {
			l.deafen("as many connections are relayed as may be", ErrFull)
			return
		}
		fd, errno := accept(ln.fd, from)
		switch errno {
		case 0:
			l.r.accepted.Add(1)
			if !ln.prepared {
				if err := setOptions(int(fd)); err != nil {
					l.r.log.Debug("cannot set options of a connection", "err", err)
				}
			}
			l.place(fd, from)
			continue
		case unix.EAGAIN:
			l.accepts = max(1, n)
			l.r.unreserve()
			return
		case unix.EMFILE, unix.ENFILE, unix.ENOBUFS, unix.ENOMEM:
			l.r.unreserve()
			l.deafen("descriptors or memory are exhausted", errno)
			return
		case unix.EBADF, unix.EINVAL, unix.ENOTSOCK, unix.EOPNOTSUPP, unix.EFAULT:
			l.r.unreserve()
			ln.once.Do(func() { ln.err <- fmt.Errorf("accept: %w", errno) })
			return
		default:
			// The connection was gone before it was taken, accept(2).
			l.r.unreserve()
		}
	}
	l.accepts = min(2*l.accepts, maxAccepts)
}

// deafen stops accepting for a while: a listener that stays readable would be told of for ever.
func (l *loop) deafen(why string, err error) {
	l.deaf, l.deafUntil = true, l.now+deafFor
	for _, ln := range l.listeners {
		epollDel(l.ep, ln.fd)
	}
	l.r.full(why, err, l.now)
}

// hear accepts again.
func (l *loop) hear() {
	l.deaf = false
	for _, ln := range l.listeners {
		l.watch(ln)
	}
}

func (l *loop) watch(ln *listener) {
	// A listener is told of while connections are queued, so that taking a few leaves the rest for the next turn or
	// another loop; one loop is woken for one connection.
	if errno := epollAdd(l.ep, ln.fd, unix.EPOLLIN|unix.EPOLLEXCLUSIVE, int32(-3-ln.id), 0); errno != 0 {
		ln.once.Do(func() { ln.err <- fmt.Errorf("watch listener: %w", errno) })
	}
}

// place gives a new connection to this loop, or to one that has clearly less.
func (l *loop) place(fd int32, from *rawAddr) {
	if from != nil && l.r.o.Health.from(from.addrPort().Addr()) {
		l.r.refused.Add(1)
		reset(fd)
		l.r.over(ActionHealth, ResultRefused)
		return
	}
	if to := l.r.least(l); to != l {
		to.conns.Add(1) // now, or else the whole of a burst would go there
		if to.post(func() { to.conns.Add(-1); to.take(fd) }) {
			return
		}
		to.conns.Add(-1)
	}
	l.take(fd)
}

// take begins with a connection that is accepted and counted.
func (l *loop) take(fd int32) {
	c := l.get()
	c.side[client].fd = fd
	if errno := l.add(c, client); errno != 0 {
		l.r.log.Warn("cannot watch a connection", "err", errno)
		l.end(c, ResultError)
		return
	}
	if h := l.r.o.Health; h != nil && h.Path != "" {
		c.phase = peeking
		l.peeks.push(c, l.now+int64(h.Within))
		l.peek(c)
		return
	}
	l.start(c)
}

func (l *loop) add(c *conn, s int) unix.Errno {
	return epollAdd(l.ep, c.side[s].fd, edges, c.id<<1|int32(s), c.gen)
}

// get takes a place for a connection.
func (l *loop) get() *conn {
	if len(l.spare) == 0 {
		base := int32(len(l.slabs) * slab)
		cs := make([]conn, slab)
		for i := range cs {
			cs[i].id = base + int32(i)
			l.spare = append(l.spare, base+slab-1-int32(i))
		}
		l.slabs = append(l.slabs, cs)
	}
	id := l.spare[len(l.spare)-1]
	l.spare = l.spare[:len(l.spare)-1]
	c := &l.slabs[id/slab][id%slab]
	*c = conn{id: id, gen: c.gen + 1, phase: dialing, side: [2]side{{fd: -1}, {fd: -1}}}
	l.conns.Add(1)
	return c
}

// end ends a connection. Unless both sides are done, both are told by a reset.
func (l *loop) end(c *conn, result Result) {
	closing := reset
	if result == ResultDone || c.phase == turning {
		closing = closeFD
	}
	for s := range c.side {
		if fd := c.side[s].fd; fd >= 0 {
			closing(fd)
		}
		l.putPipe(&c.flow[s])
	}
	action := ActionRelay
	switch {
	case c.phase == turning:
		action = ActionHealth
	case c.held:
		action = ActionHold
	}
	l.forget(c)
	l.r.over(action, result)
}

// forget gives a connection's place back.
func (l *loop) forget(c *conn) {
	c.leave()
	if c.waits {
		if c.phase == dialing {
			l.releasing--
		}
		l.r.parked.Add(-1)
	}
	if c.peer != nil {
		c.peer.inFlight.Add(-1)
	}
	*c = conn{id: c.id, gen: c.gen + 1}
	l.spare = append(l.spare, c.id)
	l.conns.Add(-1)
	if l.deaf {
		l.deafUntil = l.now
	}
}

// start carries a new connection, or parks it while nobody serves. While some are parked a later one waits behind them.
func (l *loop) start(c *conn) {
	if l.r.hold.Load() || l.r.parked.Load() > 0 {
		l.park(c)
		return
	}
	c.phase = dialing
	l.dial(c)
}

// park hands a connection to the loop that parks.
func (l *loop) park(c *conn) {
	c.held, c.phase = true, parked
	if l.r.parked.Add(1) > int64(l.r.o.Park.Max) {
		l.r.parked.Add(-1)
		l.end(c, ResultOverflow)
		return
	}
	c.waits = true
	c.setup = &setup{until: l.now + int64(l.r.o.Park.For)}
	if first := l.r.loops[0]; first != l {
		l.move(c, first, func(n *conn) { first.parkHere(n) })
		return
	}
	l.parkHere(c)
}

func (l *loop) parkHere(c *conn) {
	l.parks.push(c, c.setup.until)
}

// move hands a connection to another loop, which calls then for it.
func (l *loop) move(c *conn, to *loop, then func(*conn)) {
	moved := *c
	for s := range c.side {
		if fd := c.side[s].fd; fd >= 0 {
			epollDel(l.ep, fd)
		}
	}
	c.leave()
	if !to.post(func() { to.receive(moved, then) }) {
		l.end(c, ResultClosed)
		return
	}
	*c = conn{id: c.id, gen: c.gen + 1}
	l.spare = append(l.spare, c.id)
	l.conns.Add(-1)
}

// receive takes over what another loop handed on. Adding a socket to epoll tells again what is pending.
func (l *loop) receive(moved conn, then func(*conn)) {
	c := l.get()
	id, gen := c.id, c.gen
	*c = moved
	c.id, c.gen = id, gen
	c.queue, c.prev, c.next = nil, nil, nil
	for s := range c.side {
		if c.side[s].fd >= 0 {
			if errno := l.add(c, s); errno != 0 {
				l.r.log.Warn("cannot watch a connection", "err", errno)
				l.end(c, ResultError)
				return
			}
		}
	}
	then(c)
}

// pace releases parked connections: a few in each period, and no more at a time.
func (l *loop) pace() {
	if l.parks.first == nil || l.r.hold.Load() || l.now < l.nextPace {
		return
	}
	if l.strained {
		l.burst = 0
	}
	// Where every dial works the pace grows by one each period, so that what arrives meanwhile cannot outrun it.
	l.burst, l.strained = max(l.burst+1, l.r.o.Park.Burst), false
	for n := 0; n < l.burst && l.releasing < l.burst; n++ {
		c := l.parks.first
		if c == nil {
			break
		}
		c.leave()
		c.phase = dialing
		c.setup.tried = c.setup.tried[:0]
		l.releasing++
		l.nextPace = l.now + int64(l.r.o.Park.Every)
		l.dial(c)
	}
}

// dial begins to dial the next peer. Nothing of what the client sent is taken before a dial has succeeded.
func (l *loop) dial(c *conn) {
	for {
		var tried []*peer
		if c.setup != nil {
			tried = c.setup.tried
		}
		p := l.r.peers.Load().of(c.side[client].fd).choose(l.rng, tried)
		if p == nil {
			l.noPeer(c)
			return
		}
		p.inFlight.Add(1)
		c.peer = p
		errno := l.begin(c, p)
		if errno == 0 {
			return
		}
		l.dropServer(c, errno)
	}
}

// dropServer gives up the dial of a peer.
func (l *loop) dropServer(c *conn, errno unix.Errno) {
	if fd := c.side[server].fd; fd >= 0 {
		reset(fd)
	}
	c.side[server] = side{fd: -1}
	p := c.peer
	c.peer = nil
	p.inFlight.Add(-1)
	p.failed.Add(1)
	l.r.dialFailures.Add(1)
	if c.setup == nil {
		c.setup = &setup{until: l.now + int64(redialFor)}
	}
	c.setup.tried = append(c.setup.tried, p)
	c.setup.slow = c.setup.slow || errno == unix.ETIMEDOUT
	if !local(errno) {
		l.r.judgePeer(p, fmt.Errorf("dial %v: %w", p.Address, errno))
	}
	if l.r.debug {
		l.r.log.Debug("dial failed", "peer", p.Address, slog.Any("err", errno))
	}
}

// local tells errors that say nothing about a peer.
func local(errno unix.Errno) bool {
	switch errno {
	case unix.EMFILE, unix.ENFILE, unix.ENOBUFS, unix.ENOMEM, unix.EADDRNOTAVAIL, unix.EADDRINUSE, unix.EPERM, unix.EACCES, unix.ELOOP:
		return true
	}
	return false
}

func (l *loop) dialFailed(c *conn, errno unix.Errno) {
	c.leave()
	l.dropServer(c, errno)
	l.dial(c)
}

// redialFor is how long after its first failed dial a connection is dialled again where a peer did not answer. A peer
// that is alive and crowded drops SYNs, and a client that had come to it directly would have waited.
const redialFor = 10 * time.Second

// noPeer is called when every peer has been tried. A parked connection goes back to the head of the queue and is tried
// again until its time is over; any other is refused, unless a peer was silent and may only be crowded.
func (l *loop) noPeer(c *conn) {
	if !c.held && c.setup != nil && c.setup.slow && l.now < c.setup.until {
		c.setup.tried, c.setup.slow = c.setup.tried[:0], false
		l.dial(c)
		return
	}
	if !c.held {
		l.r.noPeer.Add(1)
		l.end(c, ResultNoPeer)
		return
	}
	l.releasing--
	l.strained = true
	c.phase = parked
	l.parks.pushFirst(c, c.setup.until)
}

// connected is called when a dial has succeeded.
func (l *loop) connected(c *conn) {
	p := c.peer
	if p.ourself && name(c.side[server].fd, unix.SYS_GETSOCKNAME) == name(c.side[server].fd, unix.SYS_GETPEERNAME) {
		l.dialFailed(c, unix.ECONNREFUSED)
		return
	}
	c.leave()
	p.dialled.Add(1)
	l.r.judgePeer(p, nil)
	if p.ProxyProtocol {
		fd := c.side[client].fd
		c.flow[client].rest = AppendHeader(nil, Header{Source: name(fd, unix.SYS_GETPEERNAME), Destination: name(fd, unix.SYS_GETSOCKNAME)})
	}
	c.setup = nil
	if c.waits {
		c.waits = false
		l.releasing--
		l.r.parked.Add(-1)
		if to := l.r.least(l); to != l {
			c.phase = open
			l.move(c, to, to.opened)
			return
		}
	}
	l.opened(c)
}

func (l *loop) opened(c *conn) {
	c.phase, c.last = open, l.now
	c.side[client].room, c.side[server].room = true, true
	l.touch(c)
	if c.side[client].ready || c.flow[client].rest != nil {
		l.pump(c, client)
	}
	if c.phase == open && c.side[server].ready {
		l.pump(c, server)
	}
}

// peek looks whether a connection is a health check.
func (l *loop) peek(c *conn) {
	b := l.buf[:peekSize]
	n, errno := recv(c.side[client].fd, b, unix.MSG_PEEK)
	switch {
	case errno == unix.EAGAIN:
		return
	case errno != 0:
		l.end(c, ResultGone)
		return
	}
	switch v := judge(b[:n], l.r.o.Health.Path); {
	case v == verdictCheck:
		c.leave()
		c.phase = turning
		l.r.refused.Add(1)
		// The answer fits into the empty buffer of a new socket.
		send(c.side[client].fd, []byte(healthAnswer))
		shutdownWrite(c.side[client].fd)
		l.turns.push(c, l.now+int64(time.Second))
		l.turnAway(c)
	case v == verdictOther || c.side[client].hup || n == 0:
		c.side[client].ready = true // nothing was consumed, and no edge will tell of it again
		c.leave()
		l.start(c)
	}
}

// turnAway reads the rest of a health check until its client has closed: a close with something unread would be a reset,
// which may overtake the answer.
func (l *loop) turnAway(c *conn) {
	for range 16 {
		n, errno := recv(c.side[client].fd, l.buf, 0)
		if errno == unix.EAGAIN {
			return
		}
		if errno != 0 || n == 0 {
			break
		}
	}
	l.end(c, ResultRefused)
}

var errNotSocket = errors.New("not a connected TCP socket")

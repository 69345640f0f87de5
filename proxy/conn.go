// SPDX-License-Identifier: Apache-2.0

package proxy

import "golang.org/x/sys/unix"

// The sides of a connection.
const (
	client = 0
	server = 1 // the peer that was chosen
)

type phase uint8

// The phases of a connection.
//
//	            ┌─► turning (a health check gets its answer) ─────────────┐
//	peeking ────┤                                                         │
//	            ├─► dialing ◄──retry──┐                                   ├─► free
//	            │      │ ▲            │                                   │
//	            │      │ └─ parked ◄──┴─ (dial of a released one failed)  │
//	            └─► parked ──► dialing ──► open ──────────────────────────┘
//
// Every phase may end in free: by a reset from either side, a limit, or the end of the relay.
const (
	free phase = iota
	peeking
	parked
	dialing
	open
	turning
)

// conn is one relayed connection. The loop that holds it is the only one to touch it.
type conn struct {
	id    int32 // its place in the loop, which is in the data of its events
	gen   int32 // counts the uses of that place: an event of an earlier one is stale
	phase phase
	held  bool  // was parked
	waits bool  // is counted as parked: until a dial has succeeded
	late  bool  // half-closed by its peer, or retired, so that the other side is given HalfClosed
	fail  bool  // one side has been reset
	asked bool  // the last bytes came from the client: it waits for an answer
	gone  bool  // was retired: what its client sends is not read any more
	slow  bool  // its server has paused in an answer, or speaks unasked
	times uint8 // that its client has asked, 2 for more
	last  int64 // when it carried bytes
	side  [2]side
	flow  [2]flow // by the side that sends
	peer  *peer   // that is dialled or carried to
	setup *setup  // nil once it is open

	queue      *queue // in which it waits for its deadline
	prev, next *conn
	deadline   int64
}

// side is one socket of a connection. The two hints follow from epoll's edges: an edge sets one, and it stays set until a
// call says that there is no more.
type side struct {
	fd    int32 // −1: none
	ready bool  // there may be something to read
	room  bool  // there may be room to write
	hup   bool  // a FIN or an error has been seen: a short read does not mean that nothing is left
	plain bool  // is read, not spliced, and until nothing is left: urgent data has been seen, at which both end early
}

// flow is what goes from one side to the other.
type flow struct {
	rest  []byte // read, but not taken by the other side yet; or the header that goes first
	pipe  *pipe  // what was spliced in and not out yet; nil: nothing
	bulk  bool   // comes faster than it is worth copying
	ended bool   // the sender has finished
	done  bool   // and the other side has been told
	again bool   // used up its turn and waits for the next
}

// setup is what a connection needs until it is open.
type setup struct {
	tried []*peer
	until int64 // a parked one's deadline, dials included; of another when it is not dialled again
	slow  bool  // one of tried did not answer in time
}

// pipe is a pipe(2).
type pipe struct {
	r, w int32
	size int // that it can hold
	n    int // that it holds
}

func (p *pipe) close() {
	closeFD(p.r)
	closeFD(p.w)
}

const pipeSize = 1 << 20

func newPipe() (*pipe, error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_NONBLOCK|unix.O_CLOEXEC); err != nil {
		return nil, err
	}
	p := &pipe{r: int32(fds[0]), w: int32(fds[1])}
	// An unprivileged user has pipe-user-pages-soft to share; beyond it a pipe stays as it is (pipe(7)).
	size, err := unix.FcntlInt(uintptr(p.w), unix.F_SETPIPE_SZ, pipeSize)
	if err != nil {
		if size, err = unix.FcntlInt(uintptr(p.w), unix.F_GETPIPE_SZ, 0); err != nil {
			p.close()
			return nil, err
		}
	}
	p.size = size
	return p, nil
}

// queue holds connections in the order of their deadlines, which come in the order in which they are put in.
type queue struct {
	first, last *conn
	len         int
	expire      func(*conn) // called when the deadline of the first is over, which is no more in the queue then
}

// push appends c with a deadline that is not before the last one's.
func (q *queue) push(c *conn, deadline int64) {
	c.leave()
	c.queue, c.deadline, c.prev, c.next = q, deadline, q.last, nil
	if q.last != nil {
		q.last.next = c
	} else {
		q.first = c
	}
	q.last = c
	q.len++
}

// pushFirst puts c back at the head: its deadline is not after the first one's.
func (q *queue) pushFirst(c *conn, deadline int64) {
	c.leave()
	c.queue, c.deadline, c.prev, c.next = q, deadline, nil, q.first
	if q.first != nil {
		q.first.prev = c
	} else {
		q.last = c
	}
	q.first = c
	q.len++
}

// leave takes c out of its queue, if it is in one.
func (c *conn) leave() {
	q := c.queue
	if q == nil {
		return
	}
	if c.prev != nil {
		c.prev.next = c.next
	} else {
		q.first = c.next
	}
	if c.next != nil {
		c.next.prev = c.prev
	} else {
		q.last = c.prev
	}
	c.queue, c.prev, c.next = nil, nil, nil
	q.len--
}

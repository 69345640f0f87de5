// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// bufferSize is a loop's buffer, and the read beyond which a flow is spliced: copying less is cheaper than the two
	// calls and the pipe that splicing takes.
	bufferSize = 32 << 10

	// bulkLeast is what a turn of a spliced flow has to carry, or else it is copied again.
	bulkLeast = 16 << 10

	// turnSize bounds what one flow carries before others get theirs.
	turnSize = 2 << 20

	// restFor is how long a connection must be idle to be taken for one between two requests, once two were answered: two
	// ticks of the kernel at HZ 250, as for connections that are not relayed.
	restFor = int64(8 * time.Millisecond)

	// unasked is how many times RetireAfter a client has for its first request. One on a machine that is very busy may have
	// connected, and not come to send it yet.
	unasked = 4

	// busyAfter is how long LetGo waits for such a moment.
	busyAfter = int64(time.Second)
)

// pump carries what side s sends to the other side, until one has no more to give or the other to take, or the turn is
// over. It may end the connection.
func (l *loop) pump(c *conn, s int) {
	f := &c.flow[s]
	if f.done {
		return
	}
	if s == client && l.busy(c) {
		l.retire(c)
		return
	}
	carried := 0
	next := l.carry(c, s, &carried)
	if f.pipe != nil && f.pipe.n == 0 {
		l.putPipe(f)
	}
	if carried > 0 {
		l.carried[s].Add(uint64(carried))
		switch {
		case s == server && !c.asked && l.now-c.last > restFor:
			c.slow = true
		case s == client && !c.asked && c.times < 2:
			c.times++
		}
		c.asked, c.last = s == client, l.now
		l.touch(c)
	}
	switch next {
	case flowWaits:
	case flowAgain:
		if !f.again {
			f.again = true
			l.again = append(l.again, task{c, c.gen, s})
		}
	case flowEnded:
		l.finish(c, s)
	case senderFailed:
		l.failed(c, s)
	case receiverFailed:
		l.failed(c, 1-s)
	}
}

// next says why a flow stands still.
type next uint8

const (
	flowWaits      next = iota // for bytes, or for room for them
	flowAgain                  // for its next turn
	flowEnded                  // its sender has finished, and every byte is through
	senderFailed               // its sender has been reset
	receiverFailed             // its receiver has been reset
)

func (l *loop) carry(c *conn, s int, carried *int) next {
	f, src, dst := &c.flow[s], &c.side[s], &c.side[1-s]
	for {
		// What is in hand goes first.
		if len(f.rest) > 0 {
			if !dst.room {
				return flowWaits
			}
			n, errno := send(dst.fd, f.rest)
			switch errno {
			case 0:
				*carried += n
				f.rest = f.rest[n:]
			case unix.EAGAIN:
				dst.room = false
			default:
				return receiverFailed
			}
			continue
		}
		f.rest = nil
		if f.pipe != nil && f.pipe.n > 0 {
			if !dst.room {
				return flowWaits
			}
			n, errno := splice(f.pipe.r, dst.fd, f.pipe.n)
			switch errno {
			case 0:
				*carried += n
				f.pipe.n -= n
			case unix.EAGAIN:
				dst.room = false
			default:
				return receiverFailed
			}
			continue
		}
		if f.ended {
			return flowEnded
		}
		// What the one side does not take is left with the other: that is the back-pressure.
		if !src.ready || !dst.room {
			return flowWaits
		}
		if *carried >= l.turn {
			return flowAgain
		}
		if f.bulk && !src.plain {
			if !l.takePipe(f) {
				if n := l.leave(c, s, carried); n != flowAgain {
					return n
				}
				continue
			}
			n, errno := splice(src.fd, f.pipe.w, f.pipe.size)
			if errno == 0 && n > 0 {
				f.pipe.n = n
				continue
			}
			switch {
			case errno == unix.EAGAIN && !src.hup:
				src.ready = false
				f.bulk = *carried >= bulkLeast
				continue
			case errno == unix.EINVAL: // not every kind of socket can be spliced
				src.plain = true
			case errno != 0 && errno != unix.EAGAIN:
				return senderFailed // the kernel says so once: a read would now look like the end
			}
			// splice(2) also says that nothing is there in front of urgent data: what it really was is read.
		}
		n, errno := recv(src.fd, l.buf, 0)
		if errno == unix.EAGAIN {
			src.ready = false
			continue
		}
		if errno != 0 || n == 0 && c.fail {
			return senderFailed
		}
		if n == 0 {
			f.ended = true
			continue
		}
		if n < len(l.buf) && !src.hup && !src.plain {
			src.ready = false // a short read has emptied the queue, and more will be another edge
		}
		if n == len(l.buf) {
			f.bulk = true
		}
		w, errno := send(dst.fd, l.buf[:n])
		switch errno {
		case 0:
			*carried += w
		case unix.EAGAIN:
			w, dst.room = 0, false
		default:
			return receiverFailed
		}
		if w < n {
			// The receiver is the slower one: from now on what comes stays with the sender, or in a pipe.
			f.rest, f.bulk = append([]byte(nil), l.buf[w:n]...), true
		}
	}
}

// leave carries bytes while no pipe is to be had, and keeps none: what the receiver takes is looked at first and then
// taken from the sender. It returns flowAgain if it carried some or has nothing more to say.
func (l *loop) leave(c *conn, s int, carried *int) next {
	f, src, dst := &c.flow[s], &c.side[s], &c.side[1-s]
	n, errno := recv(src.fd, l.buf, unix.MSG_PEEK)
	switch {
	case errno == unix.EAGAIN:
		src.ready = false
		return flowAgain
	case errno != 0 || n == 0 && c.fail:
		return senderFailed
	case n == 0:
		f.ended = true
		return flowAgain
	}
	w, errno := send(dst.fd, l.buf[:n])
	switch {
	case errno == unix.EAGAIN:
		dst.room = false
		return flowAgain
	case errno != 0:
		return receiverFailed
	}
	*carried += w
	for w > 0 {
		n, errno := discard(src.fd, w)
		if errno != 0 || n == 0 {
			return senderFailed // it was there a moment ago
		}
		w -= n
	}
	return flowAgain
}

// finish passes on that side s has finished, now that every byte before is through.
func (l *loop) finish(c *conn, s int) {
	c.flow[s].done = true
	if c.flow[1-s].done {
		if c.gone {
			// A request that has crossed the end was never begun. Unread it would turn the close into a reset.
			for range 16 {
				if n, errno := recv(c.side[client].fd, l.buf, 0); errno != 0 || n == 0 {
					break
				}
			}
		}
		// Nothing is left on either side, so that a plain close says the same as a shutdown and takes one call less.
		l.end(c, ResultDone)
		return
	}
	if errno := shutdownWrite(c.side[1-s].fd); errno != 0 {
		l.failed(c, 1-s)
		return
	}
	if s == server && l.r.o.HalfClosed > 0 {
		c.late = true
		l.halfClosed.push(c, l.now+int64(l.r.o.HalfClosed))
	}
}

// failed passes on that side s has been reset. What it sent before is carried first, as far as the other side takes it
// at once: a server that closes with a request half read has answered before its reset.
func (l *loop) failed(c *conn, s int) {
	if !c.fail {
		c.fail = true
		c.side[s].ready, c.side[s].hup = true, true
		l.pump(c, s)
		if c.phase != open {
			return
		}
	}
	l.end(c, ResultReset)
}

// touch notes that a connection carried bytes.
func (l *loop) touch(c *conn) {
	switch {
	case c.late:
		l.halfClosed.push(c, l.now+int64(l.r.o.HalfClosed))
	case l.r.letGo.Load() != 0 && c.brisk() && !c.asked:
		l.soon.push(c, l.now+restFor)
	case l.r.o.RetireAfter > 0:
		l.idle.push(c, l.now+int64(l.r.o.RetireAfter))
	case l.r.o.IdleTimeout > 0:
		l.idle.push(c, l.now+int64(l.r.o.IdleTimeout))
	}
}

// idled is told of a connection that has carried nothing for as long as it may.
func (l *loop) idled(c *conn) {
	if l.r.o.RetireAfter <= 0 {
		l.end(c, ResultIdle)
		return
	}
	if !c.rests() || c.times == 0 && l.now-c.last < unasked*int64(l.r.o.RetireAfter) {
		l.idle.push(c, l.now+int64(l.r.o.RetireAfter)) // it waits for an answer, for room, or for its first request
		return
	}
	l.retire(c)
}

// rests tells that nothing is under way: the last answer has been carried.
func (c *conn) rests() bool {
	to, from := &c.flow[client], &c.flow[server]
	return c.phase == open && !c.asked && !to.ended && !from.ended && len(to.rest)+len(from.rest) == 0 && to.pipe == nil && from.pipe == nil
}

// brisk tells that two answers came without a pause, so that none is to be expected in the next.
func (c *conn) brisk() bool { return c.times >= 2 && !c.slow }

// busy tells that a client's next request comes although its connection was to be let go.
func (l *loop) busy(c *conn) bool {
	began := l.r.letGo.Load()
	if began == 0 || l.now-began < busyAfter || !c.brisk() || !c.rests() || c.side[client].hup {
		return false
	}
	n, errno := recv(c.side[client].fd, l.buf[:len("OPTIONS ")], unix.MSG_PEEK)
	return errno == 0 && safe(string(l.buf[:n]))
}

// safe tells whether a request begins with a method that clients repeat by themselves.
func safe(request string) bool {
	return strings.HasPrefix(request, "GET ") || strings.HasPrefix(request, "HEAD ") || strings.HasPrefix(request, "OPTIONS ")
}

// retire ends a connection as if its client had finished. Its own end, or a request that crosses this one, is not read
// any more: when the peer closes, both sides end.
func (l *loop) retire(c *conn) {
	c.gone = true
	c.flow[client].ended = true
	l.finish(c, client)
	if c.phase == open && l.r.o.HalfClosed > 0 {
		// A peer that does not close at the end of its client would keep it.
		c.late = true
		l.halfClosed.push(c, l.now+int64(l.r.o.HalfClosed))
	}
}

// takePipe gives a flow a pipe, if it has none and one is to be had.
func (l *loop) takePipe(f *flow) bool {
	if f.pipe != nil {
		return true
	}
	if n := len(l.pipes); n > 0 {
		f.pipe = l.pipes[n-1]
		l.pipes = l.pipes[:n-1]
		return true
	}
	if l.r.pipes.Add(1) > int64(l.r.o.MaxPipes) {
		l.r.pipes.Add(-1)
		return false
	}
	p, err := newPipe()
	if err != nil {
		l.r.pipes.Add(-1)
		return false
	}
	f.pipe = p
	return true
}

// putPipe takes a flow's pipe back. One with bytes in it is of no further use.
func (l *loop) putPipe(f *flow) {
	p := f.pipe
	if p == nil {
		return
	}
	f.pipe = nil
	if p.n == 0 && len(l.pipes) < sparePipes {
		l.pipes = append(l.pipes, p)
		return
	}
	p.close()
	l.r.pipes.Add(-1)
}

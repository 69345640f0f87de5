// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/relay"
	"github.com/ebbproxy/ebb/probes"
)

// heldListener is a duplicate of a covered listener: the kernel keeps its queue although the application closes it.
type heldListener struct {
	*probes.HeldListener
	cookie  uint64
	port    uint16
	space   *space
	full    int  // looks in a row that found something in the queue
	empty   int  // looks in a row that found nothing
	allowed bool // to take connections although the application has the listener
}

const (
	// emptyEvery is the time between two looks at the queues that the flip left.
	emptyEvery = 20 * time.Millisecond

	// patientLooks is how many of them an application that has its listener is given to accept by itself.
	patientLooks = 3

	// emptyBatch bounds what is taken from a queue at once.
	emptyBatch = 128
)

// hold duplicates the covered listeners. What cannot be duplicated is left to settle.
func (l *late) hold() []*heldListener {
	var held []*heldListener
	covered := l.b.coveredMap()
	for _, sp := range l.b.dp.spaces() {
		ls, err := probes.Listeners(sp.diag, l.b.proc.descendants())
		if err != nil {
			l.log.Debug("look for listeners to hold", "err", err)
			continue
		}
		for _, f := range ls {
			if c, ok := covered[f.Cookie]; !ok || !c.live {
				continue
			}
			h, err := probes.HoldListener(f)
			if err != nil {
				l.log.Info("the accept queue cannot be adopted", "address", f.Local.String(), "err", err)
				continue
			}
			allowed, err := h.NonBlocking()
			if err != nil {
				l.log.Debug("look at listener", "err", err)
			}
			held = append(held, &heldListener{HeldListener: h, cookie: f.Cookie, port: f.Local.Port(), space: sp, allowed: allowed})
		}
	}
	return held
}

// letGo closes duplicates.
func letGo(held []*heldListener, log *slog.Logger) {
	for _, h := range held {
		if err := h.Close(); err != nil {
			log.Warn("let go of a listener", "err", err)
		}
	}
}

// empty carries what waits in the accept queues, and the half-open requests of the flip as they complete, to the relay:
// from an application that does not accept in time, or has closed or died. It lets go of the listeners as soon as both
// are empty: a bind of their addresses fails until then.
func (l *late) empty(held []*heldListener) {
	if len(held) == 0 {
		return
	}
	ctx, stop := context.WithCancel(l.ctx)
	done := make(chan struct{})
	l.mu.Lock()
	l.stopEmpty = func() { stop(); <-done }
	l.mu.Unlock()
	l.waiting.Store(int64(len(held))) // until it is known
	l.wg.Go(func() {
		defer close(done)
		defer l.waiting.Store(0)
		defer stop()
		// poll and accept block: on a thread of their own.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer letGo(held, l.log)
		l.emptyAll(ctx, held)
	})
}

// letGo ends empty.
func (l *late) letGo() {
	l.mu.Lock()
	stop := l.stopEmpty
	l.stopEmpty = nil
	l.mu.Unlock()
	if stop != nil {
		stop()
	}
}

func (l *late) emptyAll(ctx context.Context, held []*heldListener) {
	requests := map[*space]*probes.HalfOpen{}
	for _, h := range held {
		if requests[h.space] != nil {
			continue
		}
		var ports []uint16
		for _, x := range held {
			if x.space == h.space {
				ports = append(ports, x.port)
			}
		}
		s, err := h.space.diag.HalfOpen(ctx, slices.Compact(ports))
		if err != nil {
			l.log.Warn("list half-open requests", "err", err)
			return
		}
		requests[h.space] = s
	}
	adopted := 0
	defer func() {
		if adopted > 0 {
			l.b.emit(drain.Event{Type: drain.EventLate, Message: fmt.Sprintf("%d connections that waited to be accepted were given to the relay", adopted), Fields: map[string]any{"adopted": adopted}})
		}
	}()
	for {
		left := 0
		for _, h := range held {
			n, some, err := l.emptyOne(ctx, h)
			adopted += n
			if err != nil {
				if ctx.Err() == nil {
					l.log.Warn("adopt the accept queue", "port", h.port, "err", err)
				}
				return
			}
			if some {
				left++
			}
		}
		n := left // never 0 in between, which would end the drain
		if left == 0 {
			open, err := l.halfOpen(ctx, held, requests)
			if err != nil {
				if ctx.Err() == nil {
					l.log.Warn("list half-open requests", "err", err)
				}
				return
			}
			if open == 0 {
				return
			}
			n = open
		}
		l.waiting.Store(int64(n))
		if !wait(ctx, emptyEvery) {
			return
		}
	}
}

// halfOpen counts the requests of the flip that are still half-open. They are asked for only while there are any.
func (l *late) halfOpen(ctx context.Context, held []*heldListener, requests map[*space]*probes.HalfOpen) (n int, err error) {
	for sp, s := range requests {
		if s.Len() == 0 {
			continue
		}
		var ports []uint16
		for _, h := range held {
			if h.space == sp {
				ports = append(ports, h.port)
			}
		}
		_, open, err := sp.diag.Pending(ctx, ports, func(uint64) bool { return false }, s)
		if err != nil {
			return 0, err
		}
		n += open
	}
	return n, nil
}

// emptyOne looks at one queue and takes what may be taken. some tells that the queue is not known to be empty: a request
// that completes may be on its way from one to the other, so that takes two looks.
func (l *late) emptyOne(ctx context.Context, h *heldListener) (taken int, some bool, err error) {
	n, err := h.Queue()
	if err != nil {
		return 0, false, err
	}
	if n == 0 {
		h.full = 0
		h.empty++
		return 0, h.empty < 2, nil
	}
	h.empty = 0
	h.full++
	if !h.allowed || h.full < patientLooks {
		owned, err := h.Owned(l.b.proc.descendants())
		if err != nil || owned {
			return 0, true, err
		}
	}
	// First, so that nothing is taken that nobody carries.
	p, err := l.adopter(ctx)
	if err != nil {
		return 0, true, err
	}
	var fds []int
	defer func() {
		for _, fd := range fds {
			unix.Close(fd) // the relay has its own
		}
	}()
	for len(fds) < emptyBatch {
		fd, ok, err := h.Accept(0)
		if err != nil {
			return 0, true, err
		}
		if !ok {
			break
		}
		fds = append(fds, fd)
	}
	if len(fds) == 0 {
		return 0, true, nil
	}
	// Before the relay has them: from then on they are late connections, for which the application's flush does not wait.
	if err := l.b.dp.disown(fds); err != nil {
		l.log.Warn("take adopted connections out of the count: the drain waits for them", "err", err)
	}
	for _, fd := range fds {
		if err := p.Adopt(ctx, fd); err != nil {
			if errors.Is(err, relay.ErrEnded) {
				return taken, true, err
			}
			l.log.Warn("give a connection to the relay", "err", err)
			continue
		}
		taken++
	}
	l.mu.Lock()
	l.adopted += uint64(taken)
	l.mu.Unlock()
	return taken, true, nil
}

// adopter is the relay that takes what was accepted; under steer it is started when it is needed first.
func (l *late) adopter(ctx context.Context) (*relay.Process, error) {
	l.act.Lock()
	defer l.act.Unlock()
	l.mu.Lock()
	p, pl := l.relay, l.plan
	l.mu.Unlock()
	if p != nil {
		return p, nil
	}
	if _, err := l.startRelay(ctx, pl.space, pl.peers, false, l.end()); err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.relay, nil
}

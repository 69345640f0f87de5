// SPDX-License-Identifier: Apache-2.0

package client

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// lastAccept is how long a listener that closes goes on accepting what the kernel has queued. It takes each at once, and
// what is half-open needs one more round trip.
const lastAccept = 100 * time.Millisecond

// Listen is net.Listen without MPTCP, which Go asks for by default: the socket calls with which Ebb steers and cuts
// connections in the kernel know plain TCP alone.
func Listen(ctx context.Context, network, address string) (net.Listener, error) {
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	return lc.Listen(ctx, network, address)
}

// Listener notes when connections arrive, and closes without resetting those that the kernel has queued. Its methods may be
// called from any goroutine.
//
// For servers of other protocols; it may change before version 1.
type Listener struct {
	net.Listener
	last    arrival       // of a connection
	closing chan struct{} // closed by Finish
	finish  sync.Once
	done    chan struct{} // closed when it is closed
	close   sync.Once
}

// NewListener wraps l, whose methods nobody else is to call from then on.
func NewListener(l net.Listener) *Listener {
	return &Listener{Listener: l, closing: make(chan struct{}), done: make(chan struct{})}
}

// Accept is that of the listener; when Finish has been called and nothing is queued any more, its error is net.ErrClosed.
func (l *Listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err == nil {
		l.last.now()
		return c, nil
	}
	if l.finishing() {
		_ = l.Close() // Finish waits for this
		return nil, net.ErrClosed
	}
	return nil, err
}

// finishing says whether Finish has been called.
func (l *Listener) finishing() bool {
	select {
	case <-l.closing:
		return true
	default:
		return false
	}
}

// Close closes the listener at once.
func (l *Listener) Close() error {
	var err error
	l.close.Do(func() {
		err = l.Listener.Close()
		close(l.done)
	})
	return err
}

// Finish has Accept take what the kernel has queued, and then closes the listener. It returns when it is closed, and may be
// called again.
func (l *Listener) Finish() {
	l.finish.Do(func() {
		close(l.closing)
		d, ok := l.Listener.(interface{ SetDeadline(time.Time) error })
		if !ok || d.SetDeadline(time.Now().Add(lastAccept)) != nil {
			_ = l.Close() // whoever accepts is told
		}
	})
	// Nobody may be accepting any more.
	timer := time.NewTimer(2 * lastAccept)
	defer timer.Stop()
	select {
	case <-l.done:
	case <-timer.C:
		_ = l.Close()
	}
}

// Pause returns nil once nothing has arrived for quiet, counted from the call at the earliest, else the error of ctx.
func (l *Listener) Pause(ctx context.Context, quiet time.Duration) error {
	return l.last.pause(ctx, quiet)
}

// arrival is the time of the last one, Unix in nanoseconds.
type arrival struct{ atomic.Int64 }

func (a *arrival) now() { a.Store(time.Now().UnixNano()) }

func (a *arrival) pause(ctx context.Context, quiet time.Duration) error {
	from := time.Now()
	for {
		if last := time.Unix(0, a.Load()); last.After(from) {
			from = last
		}
		left := time.Until(from.Add(quiet))
		if left <= 0 {
			return nil
		}
		if err := pause(ctx, left); err != nil {
			return err
		}
	}
}

// pause waits for d, or returns the error of ctx.
func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

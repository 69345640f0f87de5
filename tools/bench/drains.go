// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/drain"
)

// quiet is the quiet period of the measured drains. It is taken off what is measured: it is a choice and not a cost.
const quiet = 50 * time.Millisecond

// drainTimes are the latencies of one drain, a line of the raw data.
type drainTimes struct {
	Drain int `json:"drain"`
	// Flip is from the stop signal's sending to the event that says that admission has closed, FlipBegin from the
	// event that says that the drain began.
	Flip      time.Duration `json:"flip_ns"`
	FlipBegin time.Duration `json:"flip_from_begin_ns"`
	// Flush is from the close of the last connection to the event that says that the flush is sent, less the quiet
	// period; Signal to when the server heard its signal.
	Flush  time.Duration `json:"zero_to_flush_ns"`
	Signal time.Duration `json:"zero_to_signal_ns"`
}

// oneDrain lets a server under Ebb drain with one connection open, and closes that once all else is over.
func oneDrain(ctx context.Context, o options, n int) (t drainTimes, err error) {
	t.Drain = n
	sp, err := newSpace(loopback)
	if err != nil {
		return t, err
	}
	srv, err := startServer(ctx, o, sp, true, "--on-new", "refuse", "--quiet-period", quiet.String(), "--idle", "wait")
	if err != nil {
		return t, errors.Join(err, sp.close())
	}
	defer func() {
		srv.kill()
		err = errors.Join(err, sp.close(), gone(ctx))
	}()
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var c net.Conn
	if err := inside(sp.client, func() error {
		c, err = net.DialTimeout("tcp", sp.addr, limit)
		return err
	}); err != nil {
		return t, fmt.Errorf("connect: %w", err)
	}
	defer c.Close()
	if _, err := c.Write(request()); err != nil {
		return t, fmt.Errorf("send request: %w", err)
	}
	if _, err := c.Read(make([]byte, answerSize)); err != nil {
		return t, fmt.Errorf("read answer: %w", err)
	}
	asked := time.Now()
	if err := srv.cmd.Process.Signal(unix.SIGTERM); err != nil {
		return t, fmt.Errorf("send SIGTERM: %w", err)
	}
	var begun, closed time.Time
	for ev, err := range srv.client.Events(ctx, 0, true) {
		if err != nil {
			return t, err
		}
		switch {
		case ev.Type == drain.EventBegin:
			begun = ev.Time
		case ev.Type == drain.EventPhase && ev.Phase == drain.PhaseSettle:
			t.Flip, t.FlipBegin = ev.Time.Sub(asked), ev.Time.Sub(begun)
		case ev.Type == drain.EventPhase && ev.Phase == drain.PhaseWait:
			// Not at once: the first look of the phase must not be what finds the zero.
			if err := pause(ctx, 2*quiet); err != nil {
				return t, err
			}
			closed = time.Now()
			if err := c.Close(); err != nil {
				return t, fmt.Errorf("close connection: %w", err)
			}
		case ev.Type == drain.EventFlush && ev.Fields["result"] == nil:
			if closed.IsZero() {
				return t, errors.New("the flush came before the last connection was closed")
			}
			t.Flush = ev.Time.Sub(closed) - quiet
		}
	}
	select {
	case ns := <-srv.signal:
		t.Signal = time.Unix(0, ns).Sub(closed) - quiet
	case <-ctx.Done():
		return t, errors.New("the server has not heard its signal")
	}
	return t, nil
}

func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

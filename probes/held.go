// SPDX-License-Identifier: Apache-2.0

package probes

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// Held is a duplicate of an application's connection that outlives the application. While it is held the kernel does
// not close the connection, whatever becomes of the process: not even when the application closes it. It is not safe
// for concurrent use.
type Held struct {
	fd       int // -1 once closed
	readShut bool
}

const (
	// finishStep is how often a connection that is being finished is looked at. A blocked thread for each of some
	// thousand survivors would be dearer.
	finishStep = 20 * time.Millisecond
	// finishQuiet is how long the peer must have sent nothing before writing is shut down after reading was.
	finishQuiet = 200 * time.Millisecond
)

// Hold duplicates a connection that a process holds. It wraps [ErrGone] if the descriptor is not that socket any more.
// It needs the same right as [Retire].
func Hold(pid, fd int, inode uint64) (*Held, error) {
	dup, err := dupOf(pid, fd, inode)
	if err != nil {
		return nil, fmt.Errorf("hold connection: %w", err)
	}
	return &Held{fd: dup}, nil
}

// ShutRead makes the application read the end after what has been received. What it writes still goes out.
func (h *Held) ShutRead() error {
	if err := shutdown(h.fd, unix.SHUT_RD); err != nil {
		return fmt.Errorf("shut down reading: %w", err)
	}
	h.readShut = true
	return nil
}

// Acked reports whether the peer has acknowledged all that was written.
func (h *Held) Acked() (bool, error) {
	info, err := tcpInfo(h.fd)
	if err != nil {
		return false, err
	}
	return info.Unacked == 0 && info.NotSent == 0, nil
}

// FinishAfterExit closes the connection so that what was written arrives: it sends FIN, reads and discards what the
// peer still sends, and returns nil once the peer has closed its side. Closing with unread data would send a RST
// instead, and a peer that gets one may lose an answer that it has not read yet (RFC 2525, section 2.17).
//
// After ShutRead the FIN must wait: a connection with both sides shut down answers further data by a RST
// (tcp_rcv_state_process). It is sent when the peer has acknowledged everything and sent nothing for 200 ms.
//
// Call it only after the application has exited or closed the connection: shutting down writing under a living one
// raises SIGPIPE there. It returns the cause if ctx ends before the peer has closed, and wraps [ErrGone] if the
// connection broke. Close it afterwards in any case.
func (h *Held) FinishAfterExit(ctx context.Context) error {
	if err := h.finish(ctx); err != nil {
		return fmt.Errorf("finish connection: %w", err)
	}
	return nil
}

func (h *Held) finish(ctx context.Context) error {
	tick := time.NewTicker(finishStep)
	defer tick.Stop()
	buf := make([]byte, 64<<10)
	sent := false
	for last := time.Now(); ; {
		n, err := h.discard(buf)
		if err != nil {
			return err
		}
		info, err := tcpInfo(h.fd)
		if err != nil {
			return err
		}
		switch info.State {
		case StateEstablished, StateFinWait1, StateFinWait2:
		default:
			// The peer has closed. Had it reset the connection, reading would have told.
			return nil
		}
		now := time.Now()
		if n > 0 {
			last = now
		}
		acked := info.Unacked == 0 && info.NotSent == 0
		if !sent && (!h.readShut || acked && now.Sub(last) >= finishQuiet) {
			if err := shutdown(h.fd, unix.SHUT_WR); err != nil {
				return err
			}
			sent = true
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}

// discard reads all that is there. The end is not told: after ShutRead it cannot be told from an empty queue.
func (h *Held) discard(buf []byte) (total int, err error) {
	for {
		// MSG_DONTWAIT, since O_NONBLOCK would be set for everyone who shares the socket.
		n, _, err := unix.Recvfrom(h.fd, buf, unix.MSG_DONTWAIT)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.EAGAIN, err == nil && n == 0:
			return total, nil
		case err == unix.ECONNRESET, err == unix.ECONNABORTED, err == unix.ETIMEDOUT, err == unix.EPIPE:
			return total, fmt.Errorf("%w: %w", ErrGone, err)
		case err != nil:
			return total, err
		}
		total += n
	}
}

// Close lets go of the connection. If nobody else holds it, the kernel closes it. It may be called again.
func (h *Held) Close() error {
	if h.fd < 0 {
		return nil
	}
	err := unix.Close(h.fd)
	h.fd = -1
	if err != nil {
		return fmt.Errorf("close held connection: %w", err)
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package probes

import (
	"context"
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"
)

// Held is a duplicate of an application's connection that outlives the application. While it is held the kernel does
// not close the connection, whatever becomes of the process. It is not safe for concurrent use.
type Held struct {
	fd int // -1 once closed
}

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
func (h *Held) ShutRead() error { return shutdown(h.fd, unix.SHUT_RD) }

// Acked reports whether the peer has acknowledged all that was written.
func (h *Held) Acked() (bool, error) {
	info, err := tcpInfo(h.fd)
	if err != nil {
		return false, err
	}
	return info.Unacked == 0 && info.NotSent == 0, nil
}

// FinishAfterExit closes the connection so that what was written arrives: it shuts down writing, then reads and
// discards until the peer has closed its side, and returns nil. Closing with unread data instead would send a RST, and a
// peer that gets one may discard an answer it has not read yet (RFC 2525, section 2.17).
//
// Call it only after the application has exited: shutting down writing under a living one raises SIGPIPE there. It returns
// the cause if ctx ends before the peer has closed, and wraps [ErrGone] if the connection broke.
func (h *Held) FinishAfterExit(ctx context.Context) error {
	if err := h.finish(ctx); err != nil {
		return fmt.Errorf("finish connection: %w", err)
	}
	return nil
}

func (h *Held) finish(ctx context.Context) error {
	if err := shutdown(h.fd, unix.SHUT_WR); err != nil {
		return err
	}
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return err
	}
	defer unix.Close(wake)
	woken := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(woken)
		unix.Write(wake, binary.NativeEndian.AppendUint64(nil, 1)) // fails only if it has been told already
	})
	defer func() {
		if !stop() {
			<-woken // it still uses the descriptor
		}
	}()
	buf := make([]byte, 64<<10)
	for ctx.Err() == nil {
		// MSG_DONTWAIT, since O_NONBLOCK would be set for everyone who shares the socket.
		n, _, err := unix.Recvfrom(h.fd, buf, unix.MSG_DONTWAIT)
		switch {
		case err == unix.EINTR, err == nil && n > 0:
		case err == nil:
			return nil
		case err == unix.EAGAIN:
			fds := []unix.PollFd{{Fd: int32(h.fd), Events: unix.POLLIN | unix.POLLRDHUP}, {Fd: int32(wake), Events: unix.POLLIN}}
			if _, err := unix.Poll(fds, -1); err != nil && err != unix.EINTR {
				return err
			}
		case err == unix.ECONNRESET, err == unix.ECONNABORTED, err == unix.ETIMEDOUT, err == unix.EPIPE:
			return fmt.Errorf("%w: %w", ErrGone, err)
		default:
			return err
		}
	}
	return context.Cause(ctx)
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

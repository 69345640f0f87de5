// SPDX-License-Identifier: Apache-2.0

package probes

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// HeldListener is a duplicate of an application's listener. While it is held the kernel keeps the accept queue and the
// half-open requests although the application has closed the listener or died, and a bind of its address fails with
// EADDRINUSE: hold it for as short as possible. It is not safe for concurrent use.
type HeldListener struct {
	fd    int // -1 once closed
	inode uint64
}

// HoldListener duplicates a listener that a process holds. It wraps [ErrGone] if the descriptor is not that socket any
// more. It needs the same right as [Retire].
func HoldListener(l Listener) (*HeldListener, error) {
	fd, err := dupOf(l.PID, l.FD, l.Inode)
	if err != nil {
		return nil, fmt.Errorf("hold listener %s: %w", l.Local, err)
	}
	return &HeldListener{fd: fd, inode: l.Inode}, nil
}

// FD is the descriptor. Its flags are the application's too, so they must not be changed.
func (h *HeldListener) FD() int { return h.fd }

// NonBlocking reports whether the application has made the listener non-blocking. If it has not, it may be on its way
// from a poll to an accept that waits for ever once somebody else has taken the connection: two of seven blocking
// servers hung so.
func (h *HeldListener) NonBlocking() (bool, error) {
	flags, err := unix.FcntlInt(uintptr(h.fd), unix.F_GETFL, 0)
	if err != nil {
		return false, fmt.Errorf("read flags of listener: %w", err)
	}
	return flags&unix.O_NONBLOCK != 0, nil
}

// Queue is the length of the accept queue: of a listener tcp_info tells it as tcpi_unacked (tcp_get_info in
// net/ipv4/tcp.c). Of an MPTCP listener it is that of the TCP socket beneath it.
func (h *HeldListener) Queue() (int, error) {
	info, err := tcpInfo(h.fd)
	if err != nil {
		return 0, err
	}
	return int(info.Unacked), nil
}

// Accept takes a connection out of the queue, for at most wait; ok is false if there was none. It blocks the calling
// thread. The descriptor is the caller's, and is non-blocking.
func (h *HeldListener) Accept(wait time.Duration) (fd int, ok bool, err error) {
	fds := []unix.PollFd{{Fd: int32(h.fd), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, int(wait/time.Millisecond))
	switch {
	case errors.Is(err, unix.EINTR), err == nil && n == 0:
		return -1, false, nil
	case err != nil:
		return -1, false, fmt.Errorf("wait for a connection: %w", err)
	case fds[0].Revents&unix.POLLIN == 0:
		return -1, false, fmt.Errorf("wait for a connection: %w", ErrGone)
	}
	// Whether the listener blocks is the application's: one that does would block us too, should the application have
	// been faster. It has closed its own descriptor by then, or the caller would not ask; see NonBlocking.
	fd, _, err = unix.Accept4(h.fd, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
	switch {
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ECONNABORTED), errors.Is(err, unix.EINTR):
		return -1, false, nil
	case err != nil:
		return -1, false, fmt.Errorf("accept: %w", err)
	}
	return fd, true, nil
}

// Owned reports whether one of the processes still holds the listener.
func (h *HeldListener) Owned(pids []int) (bool, error) {
	held, err := sockets(pids, map[uint64]bool{h.inode: true})
	if err != nil {
		return false, err
	}
	_, ok := held[h.inode]
	return ok, nil
}

// Close lets go of the listener. If nobody else holds it, the kernel resets what is still queued. It may be called
// again.
func (h *HeldListener) Close() error {
	if h.fd < 0 {
		return nil
	}
	err := unix.Close(h.fd)
	h.fd = -1
	if err != nil {
		return fmt.Errorf("close held listener: %w", err)
	}
	return nil
}

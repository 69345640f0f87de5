// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"errors"
	"fmt"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// warmFor bounds each step of Warm, which is done in microseconds unless something is wrong.
const warmFor = 2 * time.Second

// Warm makes one connection to a listener, in a way that the kernel answers with a SYN cookie if it knows how. A listener
// takes the last step of a handshake that another one began under SYN cookies only if it has sent a cookie itself within
// two minutes (tcp_synq_no_recent_overflow in net/ipv4/syncookies.c): without it clients of the leaving backend whose
// handshake is half done at the flip are reset.
//
// Call it before connections are sent to ln, in whose network namespace the calling thread has to be: what is queued by
// others meanwhile is closed. backlog is what ln is to have afterwards; for a moment it is 0, which makes the kernel
// send a cookie although nothing is crowded. The error wraps ErrNotListener.
func Warm(ln syscall.Conn, backlog int) (err error) {
	fd, err := dupListener(ln)
	if err != nil {
		return err
	}
	defer closeFD(fd)
	to := name(fd, unix.SYS_GETSOCKNAME)
	if to.Addr().IsUnspecified() {
		addr := netip.AddrFrom4([4]byte{127, 0, 0, 1})
		if family, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_DOMAIN); err == nil && family == unix.AF_INET6 {
			addr = netip.IPv6Loopback()
		}
		to = netip.AddrPortFrom(addr, to.Port())
	}
	if err := unix.Listen(int(fd), 0); err != nil {
		return fmt.Errorf("shorten backlog: %w", err)
	}
	defer func() {
		if e := unix.Listen(int(fd), backlog); e != nil {
			err = errors.Join(err, fmt.Errorf("restore backlog: %w", e))
		}
	}()
	raw, family, err := newRawAddr(to)
	if err != nil {
		return err
	}
	own, errno := socket(family)
	if errno != 0 {
		return fmt.Errorf("open socket: %w", errno)
	}
	defer reset(own)
	if errno := connect(own, &raw); errno != 0 && errno != unix.EINPROGRESS {
		return fmt.Errorf("connect to %v: %w", to, errno)
	}
	if err := await(own, unix.POLLOUT); err != nil {
		return fmt.Errorf("connect to %v: %w", to, err)
	}
	if v, err := unix.GetsockoptInt(int(own), unix.SOL_SOCKET, unix.SO_ERROR); err != nil || v != 0 {
		return fmt.Errorf("connect to %v: %w", to, errors.Join(err, syscall.Errno(v)))
	}
	self := name(own, unix.SYS_GETSOCKNAME)
	from := new(rawAddr)
	for {
		if err := await(fd, unix.POLLIN); err != nil {
			return fmt.Errorf("wait for own connection on %v: %w", to, err)
		}
		c, errno := accept(fd, from)
		switch errno {
		case 0:
			reset(c)
			if from.addrPort() == self {
				return nil
			}
		case unix.EAGAIN, unix.ECONNABORTED:
		default:
			return fmt.Errorf("accept own connection on %v: %w", to, errno)
		}
	}
}

// await waits for an event on one descriptor.
func await(fd int32, event int16) error {
	end := time.Now().Add(warmFor)
	for {
		left := time.Until(end)
		if left <= 0 {
			return unix.ETIMEDOUT
		}
		p := []unix.PollFd{{Fd: fd, Events: event}}
		n, err := unix.Poll(p, int(left/time.Millisecond)+1)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
		if n > 0 {
			return nil
		}
	}
}

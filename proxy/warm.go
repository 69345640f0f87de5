// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// warmFor bounds each step of Warm, which is done in microseconds unless something is wrong.
const warmFor = 2 * time.Second

// Warm makes a listener ready for connections that are sent to it, and lets the kernel send one SYN cookie for it. A
// listener takes the last step of a handshake that another one began under SYN cookies only if it has sent a cookie
// itself within two minutes (tcp_synq_no_recent_overflow in net/ipv4/syncookies.c): without it clients of the leaving
// backend whose handshake is half done at the flip are reset.
//
// Call it before connections are sent to ln, in whose network namespace the calling thread has to be: what others have
// queued by then is closed. backlog is what ln is to have afterwards. For a moment it is 0, with one connection held
// half-open by TCP_DEFER_ACCEPT, so that the next one finds the queue crowded. Where the kernel sends no cookies
// (tcp_syncookies is 0) none is needed. The error wraps ErrNotListener.
func Warm(ln syscall.Conn, backlog int) (err error) {
	fd, _, err := dupListener(ln)
	if err != nil {
		return err
	}
	defer closeFD(fd)
	// It is read in the namespace of this thread. 0 is never, 1 under pressure, which is the default, and 2 always.
	text, _ := os.ReadFile("/proc/sys/net/ipv4/tcp_syncookies")
	mode := strings.TrimSpace(string(text))
	if mode == "0" {
		return nil
	}
	to := name(fd, unix.SYS_GETSOCKNAME)
	if to.Addr().IsUnspecified() {
		addr := netip.AddrFrom4([4]byte{127, 0, 0, 1})
		if family, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_DOMAIN); err == nil && family == unix.AF_INET6 {
			addr = netip.IPv6Loopback()
		}
		to = netip.AddrPortFrom(addr, to.Port())
	}
	if mode != "2" {
		undo, err := crowd(fd, to, backlog)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, undo()) }()
	}
	own, err := connected(to)
	if err != nil {
		return err
	}
	defer reset(own)
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

// crowd leaves a listener with a backlog of 0 and one half-open connection, until undo.
func crowd(fd int32, to netip.AddrPort, backlog int) (undo func() error, err error) {
	deferFor, err := unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_DEFER_ACCEPT)
	if err != nil {
		return nil, fmt.Errorf("read TCP_DEFER_ACCEPT: %w", err)
	}
	restore := func() error {
		err := errors.Join(unix.Listen(int(fd), backlog), unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_DEFER_ACCEPT, deferFor))
		if err != nil {
			return fmt.Errorf("restore listener: %w", err)
		}
		return nil
	}
	if err := errors.Join(unix.Listen(int(fd), 0), unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_DEFER_ACCEPT, 1)); err != nil {
		return nil, errors.Join(fmt.Errorf("crowd listener: %w", err), restore())
	}
	half, err := connected(to)
	if err != nil {
		return nil, errors.Join(err, restore())
	}
	return func() error {
		reset(half)
		return restore()
	}, nil
}

// connected makes a connection on this very thread, whose network namespace is not that of others.
func connected(to netip.AddrPort) (int32, error) {
	raw, family, err := newRawAddr(to)
	if err != nil {
		return -1, err
	}
	fd, errno := socket(family)
	if errno != 0 {
		return -1, fmt.Errorf("open socket: %w", errno)
	}
	if errno := connect(fd, &raw); errno != 0 && errno != unix.EINPROGRESS {
		err = errno
	} else if err = await(fd, unix.POLLOUT); err == nil {
		var v int
		if v, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR); err == nil && v != 0 {
			err = syscall.Errno(v)
		}
	}
	if err != nil {
		closeFD(fd)
		return -1, fmt.Errorf("connect to %v: %w", to, err)
	}
	return fd, nil
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

// SPDX-License-Identifier: Apache-2.0

// Package inside reaches a workload where it lives: it connects to it, and runs
// programs beside it, in its network namespace.
//
// It knows nothing of what is said on a connection, and it changes no other
// namespace than the network's: a program sees the file system and the processes
// of the caller.
//
//	c, err := inside.Dial(ctx, int(ns.Fd()), netip.MustParseAddrPort("127.0.0.1:80"), [2]uint16{})
//	…
//	err = inside.Run(ctx, inside.Program{NetNS: int(ns.Fd()), Argv: []string{"/usr/bin/flush"}, Output: out})
package inside

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/netns"
)

// do runs fn in the namespace of the descriptor, or right here without one.
func do(netNS int, fn func() error) error {
	if netNS <= 0 {
		return fn()
	}
	return netns.Do(netNS, fn)
}

// Dial connects by TCP to an address in the network namespace of a descriptor;
// 0 or less is the caller's own. Only the making of the socket holds a thread,
// so that hundreds may wait for an answer at a time. The connection never comes
// from a port of notFrom, both ends inclusive, unless that is zero. An error of
// the context is its cause.
func Dial(ctx context.Context, netNS int, to netip.AddrPort, notFrom [2]uint16) (net.Conn, error) {
	c, err := dial(ctx, netNS, to, notFrom)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", to, err)
	}
	return c, nil
}

func dial(ctx context.Context, netNS int, to netip.AddrPort, notFrom [2]uint16) (net.Conn, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	to = netip.AddrPortFrom(to.Addr().Unmap(), to.Port())
	fd, err := socket(netNS, to.Addr(), notFrom)
	if err != nil {
		return nil, err
	}
	// A connect that a signal interrupts goes on, and must not be made again: connect(2).
	err = unix.Connect(fd, sockaddr(to))
	if err != nil && !errors.Is(err, unix.EINPROGRESS) && !errors.Is(err, unix.EINTR) {
		unix.Close(fd)
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "connection") // the descriptor is non-blocking, so the poller takes it
	defer f.Close()                            // net.FileConn takes a duplicate
	if err := connected(ctx, f); err != nil {
		return nil, err
	}
	return net.FileConn(f)
}

// socket makes a non-blocking socket that is bound, if it must be, to a port outside of notFrom.
func socket(netNS int, to netip.Addr, notFrom [2]uint16) (int, error) {
	family, anyAddr := unix.AF_INET, netip.IPv4Unspecified()
	if to.Is6() {
		family, anyAddr = unix.AF_INET6, netip.IPv6Unspecified()
	}
	var refused []int // kept until the end, so that the kernel chooses another
	defer func() {
		for _, fd := range refused {
			unix.Close(fd)
		}
	}()
	// Sixteen choices at random in one half of the ports are one in 65,536.
	for range 16 {
		fd := -1
		err := do(netNS, func() (err error) {
			fd, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
			return err
		})
		if err != nil {
			return -1, err
		}
		if notFrom[1] == 0 {
			return fd, nil
		}
		port, err := bind(fd, netip.AddrPortFrom(anyAddr, 0))
		if err == nil && (port < notFrom[0] || port > notFrom[1]) {
			return fd, nil
		}
		refused = append(refused, fd)
		if err != nil {
			return -1, err
		}
	}
	return -1, fmt.Errorf("every port that the kernel chose lies in %d to %d, which rules let pass: widen ip_local_port_range", notFrom[0], notFrom[1])
}

// bind gives the socket a port of the kernel's choice.
func bind(fd int, to netip.AddrPort) (uint16, error) {
	if err := unix.Bind(fd, sockaddr(to)); err != nil {
		return 0, fmt.Errorf("bind: %w", err)
	}
	switch sa, err := unix.Getsockname(fd); sa := sa.(type) {
	case *unix.SockaddrInet4:
		return uint16(sa.Port), nil
	case *unix.SockaddrInet6:
		return uint16(sa.Port), nil
	default:
		return 0, fmt.Errorf("read port: %w", err)
	}
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

// connected waits until the connect that is under way has succeeded or failed.
func connected(ctx context.Context, f *os.File) error {
	stop := context.AfterFunc(ctx, func() { _ = f.SetWriteDeadline(time.Unix(1, 0)) })
	defer stop()
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Write(func(fd uintptr) (done bool) {
		if errno, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR); err != nil || errno != 0 {
			failed = err
			if err == nil {
				failed = unix.Errno(errno)
			}
			return true
		}
		_, err := unix.Getpeername(int(fd)) // SO_ERROR alone does not tell success from "not yet"
		return err == nil
	})
	if errors.Is(err, os.ErrDeadlineExceeded) && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return errors.Join(err, failed)
}

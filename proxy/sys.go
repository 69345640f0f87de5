// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The calls of the data path. None of them blocks for long, since every descriptor is non-blocking; so they go past the Go
// scheduler, which would otherwise note each as a chance that this thread blocks. That is a tenth of the cost of a small
// message. Buffers are on the heap and referenced by their loop for as long as a call lasts.

// recv reads what is there. n is 0 at the end of the stream.
func recv(fd int32, b []byte, flags int) (n int, errno unix.Errno) {
	for {
		r, _, e := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), uintptr(flags|unix.MSG_DONTWAIT), 0, 0)
		if e != unix.EINTR {
			return int(r), e
		}
	}
}

// discard takes n bytes out of the receive queue without copying them, as recv(2) does for TCP under MSG_TRUNC (tcp(7)).
func discard(fd int32, n int) (int, unix.Errno) {
	for {
		r, _, e := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), 0, uintptr(n), unix.MSG_DONTWAIT|unix.MSG_TRUNC, 0, 0)
		if e != unix.EINTR {
			return int(r), e
		}
	}
}

func send(fd int32, b []byte) (n int, errno unix.Errno) {
	for {
		r, _, e := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0, 0)
		if e != unix.EINTR {
			return int(r), e
		}
	}
}

func splice(from, to int32, n int) (int, unix.Errno) {
	for {
		r, _, e := unix.RawSyscall6(unix.SYS_SPLICE, uintptr(from), 0, uintptr(to), 0, uintptr(n), unix.SPLICE_F_MOVE|unix.SPLICE_F_NONBLOCK)
		if e != unix.EINTR {
			return int(r), e
		}
	}
}

// accept takes a connection. from is filled in if it is not nil.
func accept(fd int32, from *rawAddr) (int32, unix.Errno) {
	var p, n unsafe.Pointer
	if from != nil {
		from.n = uint32(len(from.b))
		p, n = unsafe.Pointer(&from.b[0]), unsafe.Pointer(&from.n)
	}
	for {
		r, _, e := unix.RawSyscall6(unix.SYS_ACCEPT4, uintptr(fd), uintptr(p), uintptr(n), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0, 0)
		if e != unix.EINTR {
			return int32(r), e
		}
	}
}

func socket(family int) (int32, unix.Errno) {
	r, _, e := unix.RawSyscall(unix.SYS_SOCKET, uintptr(family), unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	return int32(r), e
}

func connect(fd int32, to *rawAddr) unix.Errno {
	_, _, e := unix.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&to.b[0])), uintptr(to.n))
	return e
}

func bind(fd int32, to *rawAddr) unix.Errno {
	_, _, e := unix.RawSyscall(unix.SYS_BIND, uintptr(fd), uintptr(unsafe.Pointer(&to.b[0])), uintptr(to.n))
	return e
}

func shutdownWrite(fd int32) unix.Errno {
	_, _, e := unix.RawSyscall(unix.SYS_SHUTDOWN, uintptr(fd), unix.SHUT_WR, 0)
	return e
}

func closeFD(fd int32) { unix.RawSyscall(unix.SYS_CLOSE, uintptr(fd), 0, 0) }

var (
	optOn     = int32(1)
	optLinger = unix.Linger{Onoff: 1, Linger: 0}
)

func setOn(fd int32, level, name int) unix.Errno {
	_, _, e := unix.RawSyscall6(unix.SYS_SETSOCKOPT, uintptr(fd), uintptr(level), uintptr(name), uintptr(unsafe.Pointer(&optOn)), 4, 0)
	return e
}

// reset closes so that the other end is told by a RST: what is not sent yet is dropped (socket(7), SO_LINGER with 0).
func reset(fd int32) {
	unix.RawSyscall6(unix.SYS_SETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_LINGER, uintptr(unsafe.Pointer(&optLinger)), unsafe.Sizeof(optLinger), 0)
	closeFD(fd)
}

// Epoll data is two words of our own: Fd and Pad of the event.
func epollAdd(ep, fd int32, events uint32, a, b int32) unix.Errno {
	ev := unix.EpollEvent{Events: events, Fd: a, Pad: b}
	_, _, e := unix.RawSyscall6(unix.SYS_EPOLL_CTL, uintptr(ep), unix.EPOLL_CTL_ADD, uintptr(fd), uintptr(unsafe.Pointer(&ev)), 0, 0)
	return e
}

func epollDel(ep, fd int32) {
	var ev unix.EpollEvent
	unix.RawSyscall6(unix.SYS_EPOLL_CTL, uintptr(ep), unix.EPOLL_CTL_DEL, uintptr(fd), uintptr(unsafe.Pointer(&ev)), 0, 0)
}

// epollHeld waits for events up to ms milliseconds, and keeps the processor from other goroutines meanwhile.
func epollHeld(ep int32, evs []unix.EpollEvent, ms uint) (int, unix.Errno) {
	r, _, e := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(ep), uintptr(unsafe.Pointer(&evs[0])), uintptr(len(evs)), uintptr(ms), 0, 0)
	return int(r), e
}

// rawAddr is a socket address as the kernel has it.
type rawAddr struct {
	b [unix.SizeofSockaddrInet6]byte
	n uint32
}

// newRawAddr encodes ap. The zone of an IPv6 address may be an interface's name or index.
func newRawAddr(ap netip.AddrPort) (r rawAddr, family int, err error) {
	addr := ap.Addr().Unmap()
	binary.BigEndian.PutUint16(r.b[2:], ap.Port())
	if addr.Is4() {
		binary.NativeEndian.PutUint16(r.b[:], unix.AF_INET)
		a := addr.As4()
		copy(r.b[4:], a[:])
		r.n = unix.SizeofSockaddrInet4
		return r, unix.AF_INET, nil
	}
	binary.NativeEndian.PutUint16(r.b[:], unix.AF_INET6)
	a := addr.As16()
	copy(r.b[8:], a[:])
	if zone := addr.Zone(); zone != "" {
		index, err := strconv.ParseUint(zone, 10, 32)
		if err != nil {
			dev, err := net.InterfaceByName(zone)
			if err != nil {
				return r, 0, fmt.Errorf("find interface of %v: %w", ap, err)
			}
			index = uint64(dev.Index)
		}
		binary.NativeEndian.PutUint32(r.b[24:], uint32(index))
	}
	r.n = unix.SizeofSockaddrInet6
	return r, unix.AF_INET6, nil
}

// addrPort decodes an address. IPv4 inside IPv6 comes out as IPv4.
func (r *rawAddr) addrPort() netip.AddrPort {
	port := binary.BigEndian.Uint16(r.b[2:])
	switch {
	case r.n >= unix.SizeofSockaddrInet4 && binary.NativeEndian.Uint16(r.b[:]) == unix.AF_INET:
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(r.b[4:8])), port)
	case r.n >= unix.SizeofSockaddrInet6 && binary.NativeEndian.Uint16(r.b[:]) == unix.AF_INET6:
		return netip.AddrPortFrom(netip.AddrFrom16([16]byte(r.b[8:24])).Unmap(), port)
	}
	return netip.AddrPort{}
}

// name asks for an address of a socket: SYS_GETSOCKNAME for its own, SYS_GETPEERNAME for the other end's.
func name(fd int32, call uintptr) netip.AddrPort {
	r := new(rawAddr)
	if rawName(fd, call, r) != 0 {
		return netip.AddrPort{}
	}
	return r.addrPort()
}

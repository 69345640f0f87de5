// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// maxPortTries bounds how many ports of Peer.Ports are tried for one dial.
const maxPortTries = 256

// checkPorts refuses a peer whose source ports, or whose address where it is the client's own, cannot be.
func (p Peer) checkPorts() error {
	switch {
	case p.Ports[0] > p.Ports[1] || p.Ports[0] == 0 && p.Ports[1] != 0:
		return fmt.Errorf("%w: source ports %d to %d of peer %v are no range", ErrOptions, p.Ports[0], p.Ports[1], p.Address)
	case p.Own && (p.Address.IsValid() || p.Source.IsValid()):
		return fmt.Errorf("%w: a peer that is the client's own destination has no address or source: got %v and %v", ErrOptions, p.Address, p.Source)
	case p.Own && p.Ports[1] == 0:
		return fmt.Errorf("%w: a peer that is the client's own destination needs source ports, by which its dials are told", ErrOptions)
	}
	return nil
}

// begin begins to dial p for c.
func (l *loop) begin(c *conn, p *peer) unix.Errno {
	to, family := &p.to, p.family
	if p.Own {
		var errno unix.Errno
		if family, errno = ownAddr(c.side[client].fd, p.Ports, &l.own); errno != 0 {
			return errno
		}
		to = &l.own
	}
	tries := 1
	if p.Ports[1] != 0 {
		tries = maxPortTries
	}
	for {
		tries--
		errno := l.connectOnce(c, p, to, family)
		if tries == 0 || errno != unix.EADDRINUSE && errno != unix.EADDRNOTAVAIL {
			return errno
		}
		// This port is taken, or its last connection to the same destination is not forgotten yet.
		reset(c.side[server].fd)
		c.side[server] = side{fd: -1}
	}
}

// connectOnce begins a dial from one port.
func (l *loop) connectOnce(c *conn, p *peer, to *rawAddr, family int) unix.Errno {
	fd, errno := socket(family)
	if errno != 0 {
		return errno
	}
	c.side[server] = side{fd: fd}
	if errno := setOn(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY); errno != 0 {
		return errno
	}
	switch {
	case p.Ports[1] != 0:
		from := &p.from
		if p.Own {
			from = to // the same host, and the same address of it
		}
		if errno := bindPort(fd, family, from, p.port()); errno != 0 {
			return errno
		}
	case p.from.n > 0:
		// Without it a port would be taken before it is known for which destination (ip(7)).
		if errno := setOn(fd, unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT); errno != 0 {
			return errno
		}
		if errno := bind(fd, &p.from); errno != 0 {
			return errno
		}
	}
	if errno := connect(fd, to); errno != 0 && errno != unix.EINPROGRESS {
		return errno
	}
	if errno := l.add(c, server); errno != 0 {
		return errno
	}
	if c.held {
		l.shortDials.push(c, l.now+int64(l.r.o.Park.DialTimeout))
	} else {
		l.dials.push(c, l.now+int64(l.r.o.DialTimeout))
	}
	return 0
}

// port is the next of the peer's source ports.
func (p *peer) port() uint16 {
	n := uint32(p.Ports[1]-p.Ports[0]) + 1
	return p.Ports[0] + uint16(p.nextPort.Add(1)%n)
}

// bindPort binds to one port, of any address if from is empty.
func bindPort(fd int32, family int, from *rawAddr, port uint16) unix.Errno {
	// A port whose connections to other destinations are open or not forgotten can be used again.
	if errno := setOn(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR); errno != 0 {
		return errno
	}
	at := new(rawAddr)
	*at = *from
	if at.n == 0 {
		binary.NativeEndian.PutUint16(at.b[:], uint16(family))
		at.n = unix.SizeofSockaddrInet4
		if family == unix.AF_INET6 {
			at.n = unix.SizeofSockaddrInet6
		}
	}
	binary.BigEndian.PutUint16(at.b[2:], port)
	return bind(fd, at)
}

// bindProbe makes a probe come from one of the peer's source ports.
func (p *peer) bindProbe(_, _ string, c syscall.RawConn) error {
	var errno unix.Errno
	err := c.Control(func(fd uintptr) {
		for range maxPortTries {
			if errno = bindPort(int32(fd), p.family, &p.from, p.port()); errno != unix.EADDRINUSE {
				return
			}
		}
	})
	if err == nil && errno != 0 {
		err = fmt.Errorf("bind to source port: %w", errno)
	}
	return err
}

// ownAddr is where the client of a connection wanted to go. It refuses a connection that is a dial of ours which came
// back, because the rule that should have let it pass is not there: it would go round for ever.
func ownAddr(fd int32, ports [2]uint16, to *rawAddr) (family int, errno unix.Errno) {
	if errno := rawName(fd, unix.SYS_GETSOCKNAME, to); errno != 0 {
		return 0, errno
	}
	addr := to.addrPort()
	if from := name(fd, unix.SYS_GETPEERNAME); from.Addr() == addr.Addr() && from.Port() >= ports[0] && from.Port() <= ports[1] {
		return 0, unix.ELOOP
	}
	if !addr.Addr().Is4() {
		return unix.AF_INET6, 0
	}
	// An IPv4 client of a listener on [::] has an IPv4 address inside IPv6.
	r, family, err := newRawAddr(netip.AddrPortFrom(addr.Addr(), addr.Port()))
	if err != nil {
		return 0, unix.EINVAL
	}
	*to = r
	return family, 0
}

// rawName asks for an address of a socket: SYS_GETSOCKNAME for its own, SYS_GETPEERNAME for the other end's.
func rawName(fd int32, call uintptr, r *rawAddr) unix.Errno {
	r.n = uint32(len(r.b))
	_, _, e := unix.RawSyscall(call, uintptr(fd), uintptr(unsafe.Pointer(&r.b[0])), uintptr(unsafe.Pointer(&r.n)))
	return e
}

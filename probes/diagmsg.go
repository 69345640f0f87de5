// SPDX-License-Identifier: Apache-2.0

package probes

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Numbers of include/uapi/linux/sock_diag.h and inet_diag.h.
const (
	sockDiagByFamily = 20
	sockDestroy      = 21

	reqBytecode = 1
	reqStorages = 2
	reqProtocol = 3
	reqMapFD    = 1

	attrInfo     = 2
	attrShutdown = 8
	attrV6Only   = 11
	attrMark     = 15
	attrULP      = 19
	attrStorages = 20
	attrCgroup   = 21

	ulpName      = 1
	storage      = 1
	storageValue = 3

	bcJump = 1
	bcSrc  = 11 // INET_DIAG_BC_S_EQ: the source port, as the kernel calls the local one, is equal

	lenNlmsg  = 16
	lenSockID = 48
	lenReq    = 8 + lenSockID
	lenMsg    = 4 + lenSockID + 20
	attrType  = 0x3fff // without the bits for nesting and byte order
)

// maxFilterPorts keeps the offsets of a filter within the 16 bits that they have.
const maxFilterPorts = 4096

// message is one netlink message.
type message struct {
	typ     uint16
	flags   uint16
	seq     uint32
	payload []byte
}

// errno is the number an error or the end of a dump carries, 0 for none.
func (m message) errno() unix.Errno {
	if len(m.payload) < 4 {
		return 0
	}
	return unix.Errno(-int32(binary.NativeEndian.Uint32(m.payload)))
}

var nativeLittle = binary.NativeEndian.Uint16([]byte{1, 0}) == 1

var errMalformed = errors.New("malformed netlink message")

// eachMessage calls fn for each message of a datagram until it returns an error.
func eachMessage(b []byte, fn func(message) error) error {
	for len(b) >= lenNlmsg {
		n := int(binary.NativeEndian.Uint32(b))
		if n < lenNlmsg || n > len(b) {
			return errMalformed
		}
		if err := fn(message{
			typ:     binary.NativeEndian.Uint16(b[4:]),
			flags:   binary.NativeEndian.Uint16(b[6:]),
			seq:     binary.NativeEndian.Uint32(b[8:]),
			payload: b[lenNlmsg:n],
		}); err != nil {
			return err
		}
		b = b[min(align4(n), len(b)):]
	}
	if len(b) != 0 {
		return errMalformed
	}
	return nil
}

// eachAttr calls fn for each attribute. fn must not keep the value.
func eachAttr(b []byte, fn func(typ uint16, value []byte)) error {
	for len(b) >= 4 {
		n := int(binary.NativeEndian.Uint16(b))
		if n < 4 || n > len(b) {
			return errMalformed
		}
		fn(binary.NativeEndian.Uint16(b[2:])&attrType, b[4:n])
		b = b[min(align4(n), len(b)):]
	}
	if len(b) != 0 {
		return errMalformed
	}
	return nil
}

func align4(n int) int { return (n + 3) &^ 3 }

func appendAttr(b []byte, typ uint16, value []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(4+len(value)))
	b = binary.NativeEndian.AppendUint16(b, typ)
	b = append(b, value...)
	return append(b, make([]byte, align4(len(value))-len(value))...)
}

// request builds a netlink message around an inet_diag_req_v2.
func request(typ, flags uint16, seq uint32, req [lenReq]byte, attrs []byte) []byte {
	n := lenNlmsg + lenReq + len(attrs)
	b := make([]byte, 0, n)
	b = binary.NativeEndian.AppendUint32(b, uint32(n))
	b = binary.NativeEndian.AppendUint16(b, typ)
	b = binary.NativeEndian.AppendUint16(b, flags)
	b = binary.NativeEndian.AppendUint32(b, seq)
	b = binary.NativeEndian.AppendUint32(b, 0)
	b = append(b, req[:]...)
	return append(b, attrs...)
}

func dumpRequest(seq uint32, family uint8, f Filter, tagFD int) []byte {
	proto := f.Protocol
	if proto == 0 {
		proto = protoTCP
	}
	states := f.States
	if states == 0 {
		states = ^uint32(0)
	}
	var req [lenReq]byte
	req[0] = family
	req[1] = uint8(min(proto, 255)) // a larger one is told by the attribute
	// The cgroup needs no flag of its own; it comes with every answer of a kernel that knows it. What sits on top of TCP
	// comes with the info.
	if f.Info {
		req[2] |= 1<<(attrInfo-1) | 1<<(attrShutdown-1)
	}
	binary.NativeEndian.PutUint32(req[4:], states)
	var attrs []byte
	if 0 < len(f.LocalPorts) && len(f.LocalPorts) <= maxFilterPorts {
		attrs = appendAttr(attrs, reqBytecode, portFilter(f.LocalPorts))
	}
	if f.Tags && tagFD > 0 {
		fd := appendAttr(nil, reqMapFD, binary.NativeEndian.AppendUint32(nil, uint32(tagFD)))
		attrs = appendAttr(attrs, reqStorages|unix.NLA_F_NESTED, fd)
	}
	if proto > 255 {
		attrs = appendAttr(attrs, reqProtocol, binary.NativeEndian.AppendUint32(nil, uint32(proto)))
	}
	return request(sockDiagByFamily, unix.NLM_F_REQUEST|unix.NLM_F_DUMP, seq, req, attrs)
}

// portFilter compiles "local port is one of" into the bytecode of inet_diag. An operation is {code, yes, no}, both
// offsets in bytes from itself; the program accepts when it ends exactly, and rejects when it jumps past its end. The
// kernel's verifier wants every target on the path of the yes branches, so each test that succeeds falls into a jump
// to the end, over which the failing one steps.
//
//	test p1  yes ↓  no ┐
//	jump to the end    │
//	test p2  yes ↓  no ┤ ←
//	…
//	test pn  yes: the end, no: beyond it
func portFilter(ports []uint16) []byte {
	const op = 4
	block := 3 * op // test, its port, jump
	total := block*len(ports) - op
	b := make([]byte, 0, total)
	put := func(code, yes uint8, no uint16) {
		b = append(b, code, yes)
		b = binary.NativeEndian.AppendUint16(b, no)
	}
	for _, port := range ports {
		put(bcSrc, 2*op, uint16(block))
		put(0, 0, port)
		if len(b) < total {
			put(bcJump, op, uint16(total-len(b)))
		}
	}
	return b
}

func destroyRequest(seq uint32, s Socket) []byte {
	var req [lenReq]byte
	req[0], req[1] = s.Family, protoTCP
	binary.NativeEndian.PutUint32(req[4:], ^uint32(0))
	id := req[8:]
	binary.BigEndian.PutUint16(id[0:], s.Local.Port())
	binary.BigEndian.PutUint16(id[2:], s.Remote.Port())
	putAddr(id[4:20], s.Family, s.Local.Addr())
	putAddr(id[20:36], s.Family, s.Remote.Addr())
	binary.NativeEndian.PutUint32(id[36:], s.Interface)
	binary.NativeEndian.PutUint32(id[40:], uint32(s.Cookie))
	binary.NativeEndian.PutUint32(id[44:], uint32(s.Cookie>>32))
	return request(sockDestroy, unix.NLM_F_REQUEST|unix.NLM_F_ACK, seq, req, nil)
}

func putAddr(b []byte, family uint8, a netip.Addr) {
	if !a.IsValid() {
		return
	}
	if family == unix.AF_INET {
		if v4 := a.Unmap(); v4.Is4() {
			p := v4.As4()
			copy(b, p[:])
		}
		return
	}
	p := a.As16() // an IPv4 address becomes a mapped one
	copy(b, p[:])
}

func getAddr(b []byte, family uint8) netip.Addr {
	if family == unix.AF_INET {
		return netip.AddrFrom4([4]byte(b[:4]))
	}
	return netip.AddrFrom16([16]byte(b[:16])).Unmap()
}

// parseSocket reads an inet_diag_msg and its attributes.
func parseSocket(b []byte, f Filter) (Socket, error) {
	if len(b) < lenMsg {
		return Socket{}, errMalformed
	}
	s := Socket{Family: b[0], State: b[1]}
	if s.Family != unix.AF_INET && s.Family != unix.AF_INET6 {
		return Socket{}, errMalformed
	}
	id := b[4:]
	s.Local = netip.AddrPortFrom(getAddr(id[4:], s.Family), binary.BigEndian.Uint16(id[0:]))
	s.Remote = netip.AddrPortFrom(getAddr(id[20:], s.Family), binary.BigEndian.Uint16(id[2:]))
	s.Interface = binary.NativeEndian.Uint32(id[36:])
	s.Cookie = uint64(binary.NativeEndian.Uint32(id[40:])) | uint64(binary.NativeEndian.Uint32(id[44:]))<<32
	t := b[4+lenSockID:]
	s.RQueue, s.WQueue = binary.NativeEndian.Uint32(t[4:]), binary.NativeEndian.Uint32(t[8:])
	s.UID, s.Inode = binary.NativeEndian.Uint32(t[12:]), binary.NativeEndian.Uint32(t[16:])
	err := eachAttr(b[lenMsg:], func(typ uint16, v []byte) {
		switch {
		case typ == attrInfo && f.Info && len(v) > 0:
			info := parseTCPInfo(v)
			s.Info = &info
		case typ == attrShutdown && len(v) >= 1:
			s.Shutdown = v[0]
		case typ == attrV6Only && len(v) >= 1:
			s.V6Only = v[0] != 0
		case typ == attrMark && len(v) >= 4:
			s.Mark = binary.NativeEndian.Uint32(v)
		case typ == attrCgroup && f.Cgroup && len(v) >= 8:
			s.CgroupID = binary.NativeEndian.Uint64(v)
		case typ == attrULP:
			s.MPTCP = parseULP(v) == "mptcp"
		case typ == attrStorages && f.Tags:
			s.Tag = parseStorages(v)
		}
	})
	return s, err
}

// parseULP returns the name of what sits on top of TCP: "tls", "mptcp".
func parseULP(b []byte) (name string) {
	if err := eachAttr(b, func(typ uint16, v []byte) {
		if typ == ulpName {
			name, _, _ = strings.Cut(string(v), "\x00")
		}
	}); err != nil {
		return ""
	}
	return name
}

// parseStorages returns a copy of the value of the one map that was asked for.
func parseStorages(b []byte) (value []byte) {
	if err := eachAttr(b, func(typ uint16, v []byte) {
		if typ != storage {
			return
		}
		if err := eachAttr(v, func(typ uint16, v []byte) {
			if typ == storageValue {
				value = slices.Clone(v)
			}
		}); err != nil {
			value = nil
		}
	}); err != nil {
		return nil
	}
	return value
}

// matches repeats the comparison of ports for lists that are too long for the kernel.
func (s Socket) matches(f Filter) bool {
	return len(f.LocalPorts) <= maxFilterPorts || slices.Contains(f.LocalPorts, s.Local.Port())
}

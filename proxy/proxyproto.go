// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"encoding/binary"
	"fmt"
	"net/netip"
)

// The PROXY protocol version 2, section 2.2 of https://www.haproxy.org/download/2.8/doc/proxy-protocol.txt.
const (
	headerSignature = "\r\n\r\n\x00\r\nQUIT\n"
	headerFixed     = len(headerSignature) + 4
	headerV4        = 12 // the address block of TCP over IPv4: two addresses and two ports
	headerV6        = 36

	versionCommandLocal = 0x20
	versionCommandProxy = 0x21
	familyUnspec        = 0x00
	familyTCP4          = 0x11
	familyTCP6          = 0x21
)

// Header is what a PROXY protocol header says.
type Header struct {
	// Local is set on connections that the sender made for itself, such as a probe; there are no addresses then.
	Local       bool
	Source      netip.AddrPort // the client
	Destination netip.AddrPort // what the client connected to
}

// AppendHeader appends h to b in version 2. Addresses of different families, and invalid ones, cannot be told: the
// header then says that they are unknown (AF_UNSPEC), which receivers take as the address of the connection itself.
func AppendHeader(b []byte, h Header) []byte {
	b = append(b, headerSignature...)
	src, dst := h.Source.Addr().Unmap(), h.Destination.Addr().Unmap()
	switch {
	case h.Local:
		return append(b, versionCommandLocal, familyUnspec, 0, 0)
	case src.Is4() && dst.Is4():
		b = append(b, versionCommandProxy, familyTCP4, 0, headerV4)
		b = append(b, src.AsSlice()...)
		b = append(b, dst.AsSlice()...)
	case src.IsValid() && dst.IsValid():
		s, d := src.As16(), dst.As16() // IPv4 beside IPv6 is told as IPv4 inside IPv6
		b = append(b, versionCommandProxy, familyTCP6, 0, headerV6)
		b = append(b, s[:]...)
		b = append(b, d[:]...)
	default:
		return append(b, versionCommandProxy, familyUnspec, 0, 0)
	}
	b = binary.BigEndian.AppendUint16(b, h.Source.Port())
	return binary.BigEndian.AppendUint16(b, h.Destination.Port())
}

// ParseHeader reads a version 2 header from the beginning of b. n is its length with what extends it, which is not
// looked at. n is 0 and err is nil if b is only the beginning of one: ask again with more. The error wraps ErrHeader.
func ParseHeader(b []byte) (h Header, n int, err error) {
	if k := min(len(b), len(headerSignature)); string(b[:k]) != headerSignature[:k] {
		return Header{}, 0, fmt.Errorf("%w: no signature", ErrHeader)
	}
	if len(b) > 12 && b[12] != versionCommandLocal && b[12] != versionCommandProxy {
		return Header{}, 0, fmt.Errorf("%w: version and command %#02x", ErrHeader, b[12])
	}
	if len(b) < headerFixed {
		return Header{}, 0, nil
	}
	size := int(binary.BigEndian.Uint16(b[14:]))
	if b[12] == versionCommandLocal {
		// The receiver must take no notice of the family and addresses of such a one.
		if len(b) < headerFixed+size {
			return Header{}, 0, nil
		}
		return Header{Local: true}, headerFixed + size, nil
	}
	need := 0
	switch b[13] {
	case familyTCP4:
		need = headerV4
	case familyTCP6:
		need = headerV6
	case familyUnspec:
	default:
		return Header{}, 0, fmt.Errorf("%w: family and protocol %#02x", ErrHeader, b[13])
	}
	if size < need {
		return Header{}, 0, fmt.Errorf("%w: %d bytes of addresses where %d are needed", ErrHeader, size, need)
	}
	if len(b) < headerFixed+size {
		return Header{}, 0, nil
	}
	a := b[headerFixed:]
	switch b[13] {
	case familyTCP4:
		h.Source = netip.AddrPortFrom(netip.AddrFrom4([4]byte(a[:4])), binary.BigEndian.Uint16(a[8:]))
		h.Destination = netip.AddrPortFrom(netip.AddrFrom4([4]byte(a[4:8])), binary.BigEndian.Uint16(a[10:]))
	case familyTCP6:
		h.Source = netip.AddrPortFrom(netip.AddrFrom16([16]byte(a[:16])), binary.BigEndian.Uint16(a[32:]))
		h.Destination = netip.AddrPortFrom(netip.AddrFrom16([16]byte(a[16:32])), binary.BigEndian.Uint16(a[34:]))
	}
	return h, headerFixed + size, nil
}

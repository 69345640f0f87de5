// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"net/netip"
	"strings"
)

const (
	maxHealthPath = 1024

	// peekSize holds a request line with the longest path.
	peekSize = maxHealthPath + 64

	healthAnswer = "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
)

// from tells whether addr is a source of health checks.
func (h *Health) from(addr netip.Addr) bool {
	addr = addr.Unmap()
	for _, p := range h.From {
		if p.Contains(addr) {
			return true
		}
		// A prefix of IPv4 inside IPv6 contains no plain IPv4 address by netip's rule.
		if p.Addr().Is4In6() && p.Bits() >= 96 && netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96).Contains(addr) {
			return true
		}
	}
	return false
}

// verdict says what the first bytes of a connection are.
type verdict uint8

const (
	verdictMore  verdict = iota // cannot be told yet
	verdictOther                // anything else, to be relayed
	verdictCheck                // GET or HEAD of the path
)

// judge looks at the first bytes of a connection for a request of HTTP/1 for exactly path, with or without a query. It
// asks for more only while what is there may still become one. A line may be preceded by empty ones (RFC 9112,
// section 2.2). The absolute form of a request, which only proxies are sent, is not looked at.
func judge(b []byte, path string) verdict {
	if len(b) > peekSize {
		b = b[:peekSize]
	}
	full := len(b) == peekSize
	more := func() verdict {
		if full {
			return verdictOther
		}
		return verdictMore
	}
	s := string(b)
	for strings.HasPrefix(s, "\r\n") || strings.HasPrefix(s, "\n") {
		s = strings.TrimPrefix(strings.TrimPrefix(s, "\r"), "\n")
	}
	if s == "" || s == "\r" {
		return more()
	}
	rest, found := "", false
	for _, want := range []string{"GET " + path, "HEAD " + path} {
		if strings.HasPrefix(want, s) {
			return more() // also when nothing follows the path yet
		}
		if r, ok := strings.CutPrefix(s, want); ok {
			rest, found = r, true
		}
	}
	if !found || rest[0] != ' ' && rest[0] != '?' {
		return verdictOther
	}
	// The version tells a request of HTTP from a protocol that merely begins like one.
	_, version, ok := strings.Cut(rest, " ")
	const http = "HTTP/1."
	switch {
	case strings.ContainsAny(rest[:len(rest)-len(version)], "\r\n"):
		return verdictOther
	case !ok || len(version) < len(http) && strings.HasPrefix(http, version):
		return more()
	case strings.HasPrefix(version, http):
		return verdictCheck
	}
	return verdictOther
}

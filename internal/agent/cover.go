// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"net/netip"
	"slices"
)

// coverage decides which of a process tree's listeners are the service.
type coverage struct {
	ports   []uint16         // of a match; empty: all
	only    []netip.AddrPort // --listen; empty: all but the excluded
	exclude []uint16         // --exclude-port
	aux     []uint16         // ports of --ready and the hooks: left out as long as another listener is there
}

// split says for each listener why it is not covered; "" means that it is. The default is what a person would take
// for the service: the listeners that can be reached from outside, or all when there are no others.
func (c coverage) split(ls []listener) (why []string) {
	why = make([]string, len(ls))
	outside := false
	main := false
	for i, l := range ls {
		switch {
		case len(c.ports) > 0 && !slices.Contains(c.ports, l.addr.Port()):
			why[i] = "another port than the backend's"
		case slices.Contains(c.exclude, l.addr.Port()):
			why[i] = "excluded by --exclude-port"
		case len(c.only) > 0 && !slices.ContainsFunc(c.only, func(w netip.AddrPort) bool { return names(w, l.addr) }):
			why[i] = "not named by --listen"
		default:
			if !slices.Contains(c.aux, l.addr.Port()) {
				main = true
			}
		}
	}
	for i, l := range ls {
		if why[i] == "" && main && slices.Contains(c.aux, l.addr.Port()) {
			why[i] = "serves --ready or a hook"
		}
		outside = outside || (why[i] == "" && !l.loopback())
	}
	for i, l := range ls {
		if why[i] == "" && len(c.only) == 0 && len(c.ports) == 0 && outside && l.loopback() {
			why[i] = "loopback, and there are others"
		}
	}
	return why
}

// names tells whether the wanted address is the listener's: an unspecified host, as in ":80" or "0.0.0.0:80", names
// every listener of its port that has an unspecified address of either family, since [::]:80 serves both.
func names(want, have netip.AddrPort) bool {
	if want.Port() != have.Port() {
		return false
	}
	w, h := want.Addr().Unmap(), have.Addr().Unmap()
	return w == h || (w.IsUnspecified() && h.IsUnspecified())
}

// ParseListen reads one --listen value: ADDR:PORT, :PORT or [ADDR6]:PORT.
func ParseListen(s string) (netip.AddrPort, error) {
	if len(s) > 1 && s[0] == ':' {
		s = "0.0.0.0" + s
	}
	ap, err := netip.ParseAddrPort(s)
	if err != nil || ap.Port() == 0 {
		return netip.AddrPort{}, fmt.Errorf("listen address %q: want ADDR:PORT with a numeric address, such as 0.0.0.0:8080 or [::]:8080", s)
	}
	return ap, nil
}

// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/netnstest"
)

// TestBypassNeedsPortAndAddress is the table of who is passed, for both actions that it is for.
func TestBypassNeedsPortAndAddress(t *testing.T) {
	netnstest.RequireRoot(t)
	h := installed(t, options(t))
	const netns = 77
	prog, err := h.loadAdmission(netns)
	if err != nil {
		t.Fatal(err)
	}
	defer prog.Close()
	for _, addr := range []string{"0.0.0.0:80", "[::]:80"} {
		if err := h.Admit(Address{netns, netip.MustParseAddrPort(addr)}, false, 7); err != nil {
			t.Fatal(err)
		}
	}
	if err := h.maps.Listeners.Put(uint64(7), &censusAlive{Live: 1}); err != nil {
		t.Fatal(err)
	}
	run := func(from, to netip.AddrPort) uint32 {
		ctx := lookupContext{Family: unix.AF_INET, Protocol: unix.IPPROTO_TCP, LocalPort: uint32(to.Port())}
		ctx.RemotePort = [2]byte{byte(from.Port() >> 8), byte(from.Port())}
		if to.Addr().Is4() {
			ctx.LocalIP4, ctx.RemoteIP4 = to.Addr().As4(), from.Addr().As4()
		} else {
			ctx.Family, ctx.LocalIP6, ctx.RemoteIP6 = unix.AF_INET6, to.Addr().As16(), from.Addr().As16()
		}
		v, err := prog.Run(&ebpf.RunOptions{Context: &ctx})
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	for _, tt := range []struct {
		bypass   [2]uint16
		from, to string
		passed   bool
		why      string
	}{
		{[2]uint16{200, 300}, "192.0.2.1:200", "192.0.2.1:80", true, "the first port"},
		{[2]uint16{200, 300}, "192.0.2.1:300", "192.0.2.1:80", true, "the last port"},
		{[2]uint16{200, 300}, "192.0.2.1:199", "192.0.2.1:80", false, "one before"},
		{[2]uint16{200, 300}, "192.0.2.1:301", "192.0.2.1:80", false, "one after"},
		{[2]uint16{200, 300}, "192.0.2.1:51200", "192.0.2.1:80", false, "the first port in the wrong byte order"},
		{[2]uint16{200, 300}, "192.0.2.2:250", "192.0.2.1:80", false, "another address"},
		{[2]uint16{200, 300}, "127.77.0.1:250", "127.0.0.1:80", true, "another loopback address"},
		{[2]uint16{200, 300}, "126.255.255.255:250", "127.0.0.1:80", false, "just no loopback address"},
		{[2]uint16{200, 300}, "[2001:db8::1]:250", "[2001:db8::1]:80", true, "IPv6"},
		{[2]uint16{200, 300}, "[2001:db8::2]:250", "[2001:db8::1]:80", false, "IPv6, another address"},
		{[2]uint16{200, 300}, "[2001:db8:1::1]:250", "[2001:db8::1]:80", false, "IPv6, another prefix"},
		{[2]uint16{200, 300}, "[::1]:250", "[2001:db8::1]:80", true, "IPv6 loopback"},
		{[2]uint16{200, 300}, "[::2]:250", "[::1]:80", false, "just no IPv6 loopback"},
		{[2]uint16{200, 300}, "[2001:db8::1]:100", "[2001:db8::1]:80", false, "IPv6, another port"},
		{[2]uint16{}, "192.0.2.1:0", "192.0.2.1:80", false, "no range, no port"},
		{[2]uint16{}, "127.0.0.1:250", "127.0.0.1:80", false, "no range"},
		{[2]uint16{1, 65535}, "127.0.0.1:65535", "127.0.0.1:80", true, "any port"},
	} {
		rule := BackendRule{Action: ActionRefuse, Enforce: true, Until: BootNow() + time.Hour, Bypass: tt.bypass}
		setRule(t, h, 7, rule)
		if got, _, err := h.Backend(7); err != nil || got != rule {
			t.Fatalf("rule: got %+v, %v, want %+v", got, err, rule)
		}
		want := uint32(skDrop)
		if tt.passed {
			want = skPass
		}
		if got := run(netip.MustParseAddrPort(tt.from), netip.MustParseAddrPort(tt.to)); got != want {
			t.Errorf("%s (%s to %s, bypass %v): got verdict %d, want %d", tt.why, tt.from, tt.to, tt.bypass, got, want)
		}
	}
	for _, bad := range [][2]uint16{{2, 1}, {0, 1}} {
		if err := h.SetBackend(7, BackendRule{Bypass: bad}); err == nil {
			t.Errorf("bypass %v: got no error", bad)
		}
	}
}

// A relay in front of an address reaches that very address, on IPv4 and IPv6, on loopback and on an interface,
// whatever is done with everybody else, and nobody else does. Steer needs no live listener there, only a live target.
func TestC34_RelayReachesItsOwnAddress(t *testing.T) {
	client, ns := netnstest.New(t), netnstest.New(t)
	link := netnstest.Veth(t, client, ns)
	h := installed(t, options(t))
	id := attach(t, h, ns)
	watchSelf(t, h, Watch{Backend: 7, Gen: 1, Only: []uint16{4395}})
	app := ns.Listen(t, "tcp", "[::]:4395")
	own := acceptAll(t, app)
	relay := ns.Listen(t, "tcp", "[::]:4396")
	steered := acceptAll(t, relay)
	all := Address{id, netip.MustParseAddrPort("[::]:4395")}
	admit(t, h, id, all.AddrPort, false, 7)
	cookie, err := h.AddTarget(rawFD(t, relay), id)
	if err != nil {
		t.Fatal(err)
	}
	if err := h.SetTargets(all, []uint64{cookie}); err != nil {
		t.Fatal(err)
	}
	next := uint16(20000)
	from := func(addr netip.Addr, inside bool) *net.TCPAddr {
		next++ // each connection from another port: none waits for TIME_WAIT
		p := next
		if !inside {
			p += 1000
		}
		return &net.TCPAddr{IP: addr.AsSlice(), Port: int(p)}
	}
	goes := func(ns *netnstest.NS, from *net.TCPAddr, to netip.Addr) string {
		t.Helper()
		var c net.Conn
		var err error
		ns.Do(t, func() {
			d := net.Dialer{LocalAddr: from, Timeout: 30 * time.Second}
			d.SetMultipathTCP(false)
			c, err = d.Dial("tcp", netip.AddrPortFrom(to, 4395).String())
		})
		if err != nil {
			return fmt.Sprint(err)
		}
		defer c.Close()
		select {
		case <-own:
			return "own"
		case <-steered:
			return "relay"
		case <-time.After(30 * time.Second):
			return "nowhere"
		}
	}
	setRule(t, h, 7, BackendRule{Action: ActionSteer, Enforce: true, Until: BootNow() + time.Hour, Bypass: [2]uint16{20000, 20999}})
	lo4, lo6 := netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("::1")
	for _, to := range []netip.Addr{lo4, lo6, link.B.V4, link.B.V6} {
		if got := goes(ns, from(to, true), to); got != "own" {
			t.Errorf("the relay's own connection to %s: went to %s, want the listener behind", to, got)
		}
		if got := goes(ns, from(to, false), to); got != "relay" {
			t.Errorf("another local connection to %s: went to %s, want the relay", to, got)
		}
	}
	if got := goes(ns, from(netip.MustParseAddr("127.77.0.1"), true), lo4); got != "own" {
		t.Errorf("from another loopback address: went to %s, want the listener behind", got)
	}
	for _, e := range []struct{ from, to netip.Addr }{{link.A.V4, link.B.V4}, {link.A.V6, link.B.V6}} {
		if got := goes(client, from(e.from, true), e.to); got != "relay" {
			t.Errorf("a client elsewhere with a port of the range: went to %s, want the relay", got)
		}
	}
	if err := app.Close(); err != nil {
		t.Fatal(err)
	}
	own = nil
	for _, to := range []netip.Addr{link.B.V4, link.B.V6} {
		if got := goes(ns, from(to, false), to); got != "relay" {
			t.Errorf("%s with the listener gone: went to %s, want the relay", to, got)
		}
	}
	again := ns.Listen(t, "tcp", "[::]:4395")
	own = acceptAll(t, again)
	for _, to := range []netip.Addr{lo4, lo6, link.B.V4, link.B.V6} {
		if got := goes(ns, from(to, true), to); got != "own" {
			t.Errorf("to the successor on %s: went to %s, want it there", to, got)
		}
		if got := goes(ns, from(to, false), to); got != "relay" {
			t.Errorf("everybody else to %s with a successor: went to %s, want the relay", to, got)
		}
	}
}

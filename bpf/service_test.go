// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/netnstest"
)

const (
	webService = 100
	blue       = 101
	green      = 102
)

// service is a service address that nobody listens on, and two backends behind it.
type service struct {
	ns      *netnstest.NS
	h       *Host
	id      uint64 // of the namespace
	at      []Address
	cookies []uint64 // of blue, of green
	ln      map[uint64]net.Listener
}

// newService puts the service on the addresses and its backends on blueAt and greenAt.
func newService(t *testing.T, blueAt, greenAt string, at ...string) *service {
	t.Helper()
	s := &service{ns: netnstest.New(t), h: installed(t, options(t)), ln: map[uint64]net.Listener{}}
	quickPorts(t, s.ns)
	s.id = attach(t, s.h, s.ns)
	for _, b := range []struct {
		id uint64
		at string
	}{{blue, blueAt}, {green, greenAt}} {
		addr := netip.MustParseAddrPort(b.at)
		if err := s.h.WatchPort(s.id, addr.Port(), Watch{Backend: b.id, Gen: 1}); err != nil {
			t.Fatal(err)
		}
		network := "tcp"
		if addr.Addr().Is4() {
			network = "tcp4"
		}
		ln := s.ns.Listen(t, network, b.at)
		admit(t, s.h, s.id, addr, false, b.id)
		setRule(t, s.h, b.id, BackendRule{Action: ActionOpen, Enforce: true, Gen: 1, Standby: true})
		cookie, err := s.h.AddTarget(rawFD(t, ln), s.id)
		if err != nil {
			t.Fatal(err)
		}
		s.cookies = append(s.cookies, cookie)
		s.ln[b.id] = ln
	}
	for _, a := range at {
		addr := netip.MustParseAddrPort(a)
		admit(t, s.h, s.id, addr, false, webService)
		s.at = append(s.at, Address{s.id, addr})
	}
	setRule(t, s.h, webService, BackendRule{Action: ActionOpen, Enforce: true})
	return s
}

// steer spreads new connections by weight.
func (s *service) steer(t *testing.T, weights ...int) {
	t.Helper()
	for _, a := range s.at {
		old, err := s.h.Targets(a)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.h.SetTargets(a, Place(old, s.cookies, weights)); err != nil {
			t.Fatal(err)
		}
	}
}

// arrivals counts what each backend's listener has taken so far.
func (s *service) arrivals(t *testing.T) (b, g uint64) {
	t.Helper()
	return sum(t, s.h, blue).Total, sum(t, s.h, green).Total
}

// The kill switch opens what is closed. A service's address is not: nobody else listens there, so that it goes on to be
// steered.
func TestG2_KillSwitchLeavesServiceAddresses(t *testing.T) {
	s := newService(t, "127.0.0.1:4661", "127.0.0.1:4662", "127.0.0.1:4660")
	for _, ln := range s.ln {
		go answer(ln)
	}
	s.steer(t, 1, 1)
	setRule(t, s.h, blue, BackendRule{Action: ActionRefuse, Enforce: true, Gen: 1, Until: BootNow() + time.Minute})
	if !refused(s.ns, "127.0.0.1:4661") {
		t.Fatal("a closed backend is served")
	}
	if _, err := SetControl(s.h.opts, false); err != nil {
		t.Fatal(err)
	}
	for _, addr := range []string{"127.0.0.1:4660", "127.0.0.1:4661"} {
		if refused(s.ns, addr) {
			t.Errorf("%s is refused with the kill switch on", addr)
		}
	}
}

// A service address is nobody's: what comes there goes to the listeners of the ready backends, and counts for the one
// that took it. A backend that leaves is left out by one write, its own refusal stops nothing of what goes elsewhere,
// and a connection that exists stays where it is.
func TestC40_ServiceAddressSteersToItsBackends(t *testing.T) {
	for _, tt := range []struct {
		name, blue, green string
		at, dial          []string
	}{
		{"IPv4", "0.0.0.0:4601", "127.0.0.1:4602", []string{"0.0.0.0:4600"}, []string{"127.0.0.1:4600", "127.0.0.9:4600"}},
		{"IPv6", "[::1]:4601", "[::1]:4602", []string{"[::1]:4600"}, []string{"[::1]:4600"}},
		{"dual stack", "[::]:4601", "[::]:4602", []string{"[::]:4600"}, []string{"127.0.0.1:4600", "[::1]:4600"}},
		{"both by name", "[::]:4601", "[::]:4602", []string{"0.0.0.0:4600", "[::]:4600"}, []string{"127.0.0.1:4600", "[::1]:4600"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newService(t, tt.blue, tt.green, tt.at...)
			for _, ln := range s.ln {
				go answer(ln)
			}
			for _, addr := range tt.dial {
				if !refused(s.ns, addr) {
					t.Fatalf("%s is served before it has targets", addr)
				}
			}
			s.steer(t, 1, 1)
			all := func(n int) (b, g uint64) {
				t.Helper()
				b0, g0 := s.arrivals(t)
				for i := range n {
					if err := exchange(s.ns, tt.dial[i%len(tt.dial)], 1); err != nil {
						t.Fatal(err)
					}
				}
				b, g = s.arrivals(t)
				return b - b0, g - g0
			}
			if b, g := all(100); b+g != 100 || b < 20 || g < 20 {
				t.Errorf("got %d and %d of 100, want about as many each", b, g)
			}
			// Held at blue, wherever others go later.
			var held net.Conn
			for held == nil {
				before, _ := s.arrivals(t)
				c := dial(t, s.ns, tt.dial[0])
				if after, _ := s.arrivals(t); after > before {
					held = c
				}
			}
			s.steer(t, 0, 1)
			refuse(t, s.h, blue)
			if b, g := all(60); b != 0 || g != 60 {
				t.Errorf("blue left out: got %d and %d of 60, want all at green", b, g)
			}
			if own := fmt.Sprintf("%s:4601", hostOf(tt.dial[0])); !refused(s.ns, own) {
				t.Errorf("blue's own address %s is not refused", own)
			}
			for range 3 {
				if _, err := held.Write([]byte("k")); err != nil {
					t.Fatal(err)
				}
				if _, err := held.Read(make([]byte, 1)); err != nil {
					t.Fatalf("a connection that was there: %v", err)
				}
			}
			if got := sum(t, s.h, blue).Open; got != 1 {
				t.Errorf("got %d connections open at blue, want the one held", got)
			}
		})
	}
}

func hostOf(addr string) string {
	if a := netip.MustParseAddrPort(addr).Addr(); a.Is6() {
		return "[" + a.String() + "]"
	}
	return netip.MustParseAddrPort(addr).Addr().String()
}

// G1: without a live target a service address is the ordinary look-up again, whoever set the rule: refused because
// nobody listens there, and served once somebody does.
func TestG1_ServiceAddressWithoutTargetsIsOrdinary(t *testing.T) {
	s := newService(t, "127.0.0.1:4611", "127.0.0.1:4612", "0.0.0.0:4610")
	s.steer(t, 3, 1)
	s.ln[blue].Close()
	got := acceptAll(t, s.ln[green])
	for range 20 { // blue's six slots fall to green
		c := dial(t, s.ns, "127.0.0.1:4610")
		select {
		case <-got:
		case <-time.After(30 * time.Second):
			t.Fatal("a connection came nowhere")
		}
		c.Close()
	}
	s.ln[green].Close()
	eventually(t, "the refusal of a port without a listener", func() bool { return refused(s.ns, "127.0.0.1:4610") })
	own := acceptAll(t, s.ns.Listen(t, "tcp4", "0.0.0.0:4610"))
	dial(t, s.ns, "127.0.0.1:4610")
	select {
	case <-own:
	case <-time.After(30 * time.Second):
		t.Error("a listener on the address itself got nothing")
	}
}

// A target of another family is passed over: IPv6 clients of an IPv4 target meet the ordinary look-up.
func TestServiceTargetOfAnotherFamilyIsPassedOver(t *testing.T) {
	s := newService(t, "127.0.0.1:4621", "[::]:4622", "[::]:4620")
	s.steer(t, 1, 1)
	for _, ln := range s.ln {
		go answer(ln)
	}
	for range 40 {
		if err := exchange(s.ns, "[::1]:4620", 1); err != nil {
			t.Fatal(err)
		}
	}
	if b, g := s.arrivals(t); b != 0 || g != 40 {
		t.Errorf("IPv6 clients: got %d and %d, want all 40 at the dual-stack listener", b, g)
	}
	s.steer(t, 1, 0)
	if !refused(s.ns, "[::1]:4620") {
		t.Error("an IPv6 client of an IPv4 target is not refused")
	}
	if err := exchange(s.ns, "127.0.0.1:4620", 1); err != nil {
		t.Errorf("an IPv4 client: %v", err)
	}
}

// C36: a thousand changes of the targets under load cost no connection.
func TestC36_TargetFlipsUnderLoad(t *testing.T) {
	s := newService(t, "127.0.0.1:4631", "127.0.0.1:4632", "0.0.0.0:4630")
	for _, ln := range s.ln {
		go answer(ln)
	}
	s.steer(t, 1, 1)
	total := size(4000, 100_000)
	var flips atomic.Int64
	loaded := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 0; i < 1000 || !closed(loaded); i++ {
			weights := [][]int{{1, 1}, {0, 1}, {3, 1}, {1, 0}}[i%4]
			s.steer(t, weights...)
			flips.Add(1)
		}
	})
	churn(t, s.ns, "127.0.0.1:4630", total)
	close(loaded)
	wg.Wait()
	b, g := s.arrivals(t)
	t.Logf("%d connections, %d flips, %d and %d", total, flips.Load(), b, g)
	if b+g != uint64(total) || b == 0 || g == 0 {
		t.Errorf("got %d and %d connections, want %d in all", b, g, total)
	}
}

// The slots are hit alike by one client's successive ports, of which Linux gives every second one to connect(), and by
// many clients' equal ones.
func TestServiceSpreadIsNearUniform(t *testing.T) {
	netnstest.RequireRoot(t)
	ns := netnstest.New(t)
	h := installed(t, options(t))
	id := netnsID(t, ns)
	const n = 8000
	slots := map[uint64]int{}
	var cookies []uint64
	for i := range MaxTargets {
		cookie, err := h.AddTarget(rawFD(t, ns.Listen(t, "tcp", fmt.Sprintf("[::]:%d", 4641+i))), id)
		if err != nil {
			t.Fatal(err)
		}
		cookies, slots[cookie] = append(cookies, cookie), i
	}
	a := Address{id, netip.MustParseAddrPort("[::]:4640")}
	admit(t, h, id, a.AddrPort, false, webService)
	setRule(t, h, webService, BackendRule{Action: ActionOpen, Enforce: true})
	if err := h.SetTargets(a, cookies); err != nil {
		t.Fatal(err)
	}
	prog, err := h.loadAdmission(id)
	if err != nil {
		t.Fatal(err)
	}
	defer prog.Close()
	for _, tt := range []struct {
		name string
		vary func(c *lookupContext, i int)
	}{
		{"even ports", func(c *lookupContext, i int) { binary.BigEndian.PutUint16(c.RemotePort[:], uint16(32768+2*i)) }},
		{"all ports", func(c *lookupContext, i int) { binary.BigEndian.PutUint16(c.RemotePort[:], uint16(1024+i)) }},
		{"IPv6 even ports", func(c *lookupContext, i int) {
			c.Family, c.RemoteIP6 = unix.AF_INET6, netip.MustParseAddr("2001:db8::7").As16()
			binary.BigEndian.PutUint16(c.RemotePort[:], uint16(32768+2*i))
		}},
		{"clients", func(c *lookupContext, i int) {
			binary.BigEndian.PutUint16(c.RemotePort[:], 40000)
			binary.BigEndian.PutUint16(c.RemoteIP4[2:], uint16(i))
		}},
		{"IPv6 clients", func(c *lookupContext, i int) {
			c.Family, c.RemoteIP6 = unix.AF_INET6, netip.MustParseAddr("2001:db8::").As16()
			binary.BigEndian.PutUint16(c.RemotePort[:], 40000)
			binary.BigEndian.PutUint16(c.RemoteIP6[6:], uint16(i)) // a /64 each
		}},
	} {
		var hits [MaxTargets]float64
		for i := range n {
			c := lookupContext{
				Family: unix.AF_INET, Protocol: unix.IPPROTO_TCP, LocalPort: 4640,
				RemoteIP4: [4]byte{192, 0, 2, 7}, LocalIP4: [4]byte{192, 0, 2, 1}, LocalIP6: netip.MustParseAddr("2001:db8::1").As16(),
			}
			tt.vary(&c, i)
			var out lookupContext
			if _, err := prog.Run(&ebpf.RunOptions{Context: &c, ContextOut: &out}); err != nil {
				t.Fatal(err)
			}
			slot, ok := slots[out.Cookie]
			if !ok {
				t.Fatalf("%s: connection %d was steered to no target", tt.name, i)
			}
			hits[slot]++
		}
		chi, want := 0.0, float64(n)/MaxTargets
		for _, x := range hits {
			chi += (x - want) * (x - want) / want
		}
		t.Logf("%s: %v, chi-square %.1f", tt.name, hits, chi)
		// Seven degrees of freedom: a uniform hash exceeds 40 once in a million times.
		if chi > 40 {
			t.Errorf("%s: chi-square %.1f over %v, want at most 40", tt.name, chi, hits)
		}
	}
}

// The same address in two namespaces is two backends: rule, counts and removal of one leave the other alone.
func TestSameAddressInTwoNamespaces(t *testing.T) {
	h := installed(t, options(t))
	const addr = "127.0.0.1:4660"
	var spaces []*netnstest.NS
	var ids []uint64
	for i := range 2 {
		ns := netnstest.New(t)
		id := attach(t, h, ns)
		if err := h.WatchPort(id, 4660, Watch{Backend: uint64(blue + i), Gen: 1}); err != nil {
			t.Fatal(err)
		}
		go answer(ns.Listen(t, "tcp", addr))
		admit(t, h, id, netip.MustParseAddrPort(addr), false, uint64(blue+i))
		setRule(t, h, uint64(blue+i), BackendRule{Action: ActionOpen, Enforce: true})
		for range 3 + i {
			dial(t, ns, addr)
		}
		spaces, ids = append(spaces, ns), append(ids, id)
	}
	refuse(t, h, blue)
	if !refused(spaces[0], addr) || refused(spaces[1], addr) {
		t.Error("a refusal in one namespace: want it there and nowhere else")
	}
	eventually(t, "the counts", func() bool { return sum(t, h, blue).Open == 3 && sum(t, h, green).Open == 4 })
	if err := h.RemoveBackend(blue); err != nil {
		t.Fatal(err)
	}
	if got, _, ok, err := h.Admission(Address{ids[1], netip.MustParseAddrPort(addr)}); got != green || !ok || err != nil {
		t.Errorf("the other's admission: got backend %d, %v, %v, want %d", got, ok, err, green)
	}
	refuse(t, h, green)
	if refused(spaces[0], addr) || !refused(spaces[1], addr) {
		t.Error("a refusal in the other namespace: want it there and nowhere else")
	}
}

// A port is watched before anybody listens on it, on whatever address, and only in its namespace; another kind of watch
// goes before it.
func TestListenersAreFoundByPort(t *testing.T) {
	ns, elsewhere := netnstest.New(t), netnstest.New(t)
	h := installed(t, options(t))
	id := netnsID(t, ns)
	if err := h.WatchPort(id, 4670, Watch{Backend: 14, Gen: 3}); err != nil {
		t.Fatal(err)
	}
	if err := h.WatchPort(id, 4670, Watch{Backend: 15}); !errors.Is(err, ErrTaken) {
		t.Errorf("watch of another's port: got %v, want %v", err, ErrTaken)
	}
	found := func(ns *netnstest.NS, network, addr string, want uint64) {
		t.Helper()
		p, at := start(t, ns, "listen", network, addr)
		defer p.end(t)
		if b, aside := backendOf(t, h, at); b != want || aside {
			t.Errorf("%s: got backend %d, aside %v, want %d", addr, b, aside, want)
		}
	}
	for network, addrs := range map[string][]string{
		"tcp4": {"0.0.0.0:4670", "127.0.0.1:4670"}, "tcp6": {"[::]:4670", "[::1]:4670"},
	} {
		for _, addr := range addrs {
			found(ns, network, addr, 14)
		}
	}
	found(ns, "tcp4", "0.0.0.0:4671", 0)
	found(elsewhere, "tcp4", "0.0.0.0:4670", 0)
	watchSelf(t, h, Watch{Backend: 16, Gen: 1})
	found(ns, "tcp4", "0.0.0.0:4670", 16)
	if err := h.UnwatchProcess(selfID(t)); err != nil {
		t.Fatal(err)
	}
	found(ns, "tcp4", "0.0.0.0:4670", 14)
	if err := h.UnwatchPort(id, 4670); err != nil {
		t.Fatal(err)
	}
	found(ns, "tcp4", "0.0.0.0:4670", 0)
}

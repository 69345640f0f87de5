// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/netnstest"
)

// lookupContext is struct bpf_sk_lookup of include/uapi/linux/bpf.h.
type lookupContext struct {
	Cookie     uint64
	Family     uint32
	Protocol   uint32
	RemoteIP4  [4]byte
	RemoteIP6  [16]byte
	RemotePort [2]byte
	_          uint16
	LocalIP4   [4]byte
	LocalIP6   [16]byte
	LocalPort  uint32
	Ingress    uint32
	_          uint32
}

const (
	skDrop = 0
	skPass = 1
)

// verdict runs the program for a SYN to addr.
func verdict(t *testing.T, prog *ebpf.Program, addr netip.AddrPort) uint32 {
	t.Helper()
	ctx := lookupContext{Family: unix.AF_INET, Protocol: unix.IPPROTO_TCP, LocalPort: uint32(addr.Port())}
	if addr.Addr().Is4() {
		ctx.LocalIP4 = addr.Addr().As4()
	} else {
		ctx.Family, ctx.LocalIP6 = unix.AF_INET6, addr.Addr().As16()
	}
	v, err := prog.Run(&ebpf.RunOptions{Context: &ctx})
	if err != nil {
		t.Fatalf("run admission: %v", err)
	}
	return v
}

func TestAdmissionVerdicts(t *testing.T) {
	netnstest.RequireRoot(t)
	h := installed(t, options(t))
	const netns = 77
	prog, err := h.loadAdmission(netns)
	if err != nil {
		t.Fatal(err)
	}
	defer prog.Close()

	const (
		closed = 1 + iota
		expired
		observing
		empty
		opened
		asideOnly
		asideCounts
		unruled
	)
	alive := func(id uint64, live, aside int32) {
		if err := h.maps.Listeners.Put(id, &censusAlive{Live: live, Aside: aside}); err != nil {
			t.Fatal(err)
		}
	}
	in := func(d time.Duration) time.Duration { return BootNow() + d }
	for id, r := range map[uint64]BackendRule{
		closed:      {Action: ActionRefuse, Enforce: true, Until: in(time.Hour)},
		expired:     {Action: ActionRefuse, Enforce: true, Until: in(-time.Nanosecond)},
		observing:   {Action: ActionRefuse, Until: in(time.Hour)},
		empty:       {Action: ActionRefuse, Enforce: true, Until: in(time.Hour)},
		opened:      {Action: ActionOpen, Enforce: true},
		asideOnly:   {Action: ActionRefuse, Enforce: true, Until: in(time.Hour)},
		asideCounts: {Action: ActionRefuse, Enforce: true, Until: in(time.Hour), Aside: true},
	} {
		setRule(t, h, id, r)
		switch id {
		case empty:
		case asideOnly, asideCounts:
			alive(id, 0, 1)
		default:
			alive(id, 1, 0)
		}
	}
	for i, a := range []struct {
		addr    string
		v6only  bool
		backend uint64
	}{
		{"192.0.2.1:80", false, closed},
		{"0.0.0.0:81", false, closed},
		{"[::]:82", false, closed},
		{"[::]:83", true, closed},
		{"[::ffff:192.0.2.1]:84", false, closed},
		{"[2001:db8::1]:85", false, closed},
		{"0.0.0.0:90", false, expired},
		{"0.0.0.0:91", false, observing},
		{"0.0.0.0:92", false, empty},
		{"0.0.0.0:93", false, opened},
		{"0.0.0.0:94", false, asideOnly},
		{"0.0.0.0:95", false, asideCounts},
		{"0.0.0.0:96", false, unruled},
	} {
		if err := h.Admit(Address{netns, netip.MustParseAddrPort(a.addr)}, a.v6only, a.backend); err != nil {
			t.Fatal(i, err)
		}
	}
	for _, p := range []string{"192.0.2.9:81", "192.0.2.9:82", "[2001:db8::9]:82"} {
		if err := h.Pass(Address{netns, netip.MustParseAddrPort(p)}, closed); err != nil {
			t.Fatal(err)
		}
	}

	for _, tt := range []struct {
		addr string
		want uint32
		why  string
	}{
		{"192.0.2.1:80", skDrop, "exact IPv4"},
		{"192.0.2.2:80", skPass, "another address"},
		{"192.0.2.1:8080", skPass, "another port"},
		{"192.0.2.2:81", skDrop, "IPv4 wildcard"},
		{"[2001:db8::1]:81", skPass, "IPv4 wildcard does not see IPv6"},
		{"192.0.2.9:81", skPass, "passed under a wildcard"},
		{"192.0.2.2:82", skDrop, ":: sees IPv4"},
		{"[2001:db8::1]:82", skDrop, ":: sees IPv6"},
		{"192.0.2.9:82", skPass, "IPv4 passed under ::"},
		{"[2001:db8::9]:82", skPass, "IPv6 passed under ::"},
		{"192.0.2.2:83", skPass, "v6only does not see IPv4"},
		{"[2001:db8::1]:83", skDrop, "v6only sees IPv6"},
		{"192.0.2.1:84", skDrop, "v4-mapped is the IPv4 address"},
		{"192.0.2.2:84", skPass, "another address than the v4-mapped one"},
		{"[2001:db8::1]:85", skDrop, "exact IPv6"},
		{"[2001:db8::2]:85", skPass, "another IPv6 address"},
		{"192.0.2.1:90", skPass, "past its until"},
		{"192.0.2.1:91", skPass, "not enforced"},
		{"192.0.2.1:92", skPass, "no listener of the backend lives"},
		{"192.0.2.1:93", skPass, "open"},
		{"192.0.2.1:94", skPass, "only listeners put aside live"},
		{"192.0.2.1:95", skDrop, "listeners put aside count by the rule"},
		{"192.0.2.1:96", skPass, "backend without a rule"},
	} {
		if got := verdict(t, prog, netip.MustParseAddrPort(tt.addr)); got != tt.want {
			t.Errorf("%s (%s): got verdict %d, want %d", tt.addr, tt.why, got, tt.want)
		}
	}

	other, err := h.loadAdmission(netns + 1)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if got := verdict(t, other, netip.MustParseAddrPort("192.0.2.1:80")); got != skPass {
		t.Errorf("in another namespace: got verdict %d, want %d", got, skPass)
	}
	if _, err := SetControl(h.opts, false); err != nil {
		t.Fatal(err)
	}
	if got := verdict(t, prog, netip.MustParseAddrPort("192.0.2.1:80")); got != skPass {
		t.Errorf("under the kill switch: got verdict %d, want %d", got, skPass)
	}
}

func TestAdmitIsIdempotentAndExclusive(t *testing.T) {
	netnstest.RequireRoot(t)
	h := installed(t, options(t))
	a := Address{1, netip.MustParseAddrPort("192.0.2.1:80")}
	for range 2 {
		if err := h.Admit(a, false, 7); err != nil {
			t.Fatal(err)
		}
	}
	var taken *TakenError
	if err := h.Admit(a, false, 8); !errors.As(err, &taken) || taken.Backend != 7 || !errors.Is(err, ErrTaken) {
		t.Fatalf("admit of another's address: got %v, want a TakenError of backend 7", err)
	}
	if err := h.Pass(a, 8); err != nil {
		t.Fatal(err)
	}
	if id, pass, ok, err := h.Admission(a); err != nil || !ok || pass || id != 7 {
		t.Errorf("a pass entry replaced a rule: got %d, %v, %v, %v", id, pass, ok, err)
	}
	b := Address{1, netip.MustParseAddrPort("192.0.2.2:80")}
	if err := h.Pass(b, 7); err != nil {
		t.Fatal(err)
	}
	if err := h.Admit(b, false, 8); err != nil {
		t.Errorf("admit over a pass entry: %v", err)
	}
	if err := h.SetTargets(Address{1, netip.MustParseAddrPort("192.0.2.3:80")}, []uint64{1}); !errors.Is(err, ErrNoRule) {
		t.Errorf("targets without an admission: got %v, want %v", err, ErrNoRule)
	}
	if err := h.Dismiss(b, 7); err != nil {
		t.Fatal(err)
	}
	if _, _, ok, _ := h.Admission(b); !ok {
		t.Error("dismissed another backend's address")
	}
	if err := h.Dismiss(b, 8); err != nil {
		t.Fatal(err)
	}
	if _, _, ok, _ := h.Admission(b); ok {
		t.Error("own address was not dismissed")
	}
	if err := h.RemoveBackend(7); err != nil {
		t.Fatal(err)
	}
	if _, _, ok, _ := h.Admission(a); ok {
		t.Error("an admission outlived its backend")
	}
}

// C33: one rule covers both families of a listener on [::].
func TestC33_OneRuleCoversBothFamilies(t *testing.T) {
	for _, v6only := range []bool{false, true} {
		t.Run(fmt.Sprintf("v6only=%v", v6only), func(t *testing.T) {
			client, server := netnstest.New(t), netnstest.New(t)
			link := netnstest.Veth(t, client, server)
			h := installed(t, options(t))
			watchSelf(t, h, Watch{Backend: 7, Gen: 1})
			id := attach(t, h, server)
			network := "tcp"
			if v6only {
				network = "tcp6"
			}
			ln := server.Listen(t, network, "[::]:4100")
			go serve(ln)
			v4, v6 := netip.AddrPortFrom(link.B.V4, 4100).String(), netip.AddrPortFrom(link.B.V6, 4100).String()
			cs, err := h.Counts(7)
			if err != nil || len(cs) != 1 || cs[0].V6Only != v6only {
				t.Fatalf("counts: got %+v, %v, want one listener with v6only %v", cs, err, v6only)
			}
			admit(t, h, id, cs[0].Address.AddrPort, cs[0].V6Only, 7)
			// Another process's IPv4 listener beside a v6only one is none of the rule's business.
			if v6only {
				p, _ := start(t, server, "listen", "tcp4", "0.0.0.0:4100")
				defer p.end(t)
			}
			for _, open := range []bool{true, false, true} {
				if open {
					setRule(t, h, 7, BackendRule{Action: ActionOpen, Enforce: true})
				} else {
					refuse(t, h, 7)
				}
				if got := refused(client, v6); got != !open {
					t.Errorf("open %v, IPv6 client: refused %v", open, got)
				}
				if got, want := refused(client, v4), !open && !v6only; got != want {
					t.Errorf("open %v, IPv4 client: refused %v, want %v", open, got, want)
				}
			}
		})
	}
}

// G6: another process's listener on a more specific address of the same port is not affected, whether it was
// there before the rule (user space passes it) or comes later (the kernel does).
func TestG6_SpecificListenerOfAnotherProcessIsNotAffected(t *testing.T) {
	ns := netnstest.New(t)
	h := installed(t, options(t))
	id := attach(t, h, ns)
	watchSelf(t, h, Watch{Backend: 7, Gen: 1, Only: []uint16{4200, 4201}})
	for _, addr := range []string{"0.0.0.0:4200", "[::]:4201"} {
		ln := shared(t, ns, "tcp", addr)
		go serve(ln)
		admit(t, h, id, netip.MustParseAddrPort(addr), false, 7)
	}
	refuse(t, h, 7)
	// Not of this process tree, as the kernel sees it: watched by nobody.
	if err := h.UnwatchProcess(selfID(t)); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ network, addr string }{
		{"tcp4", "127.0.0.2:4200"}, {"tcp4", "127.0.0.2:4201"}, {"tcp6", "[::1]:4201"},
	} {
		if !refused(ns, tt.addr) {
			t.Fatalf("%s: not refused before anybody listens there", tt.addr)
		}
		p, _ := start(t, ns, "listen", tt.network, tt.addr)
		if refused(ns, tt.addr) {
			t.Errorf("%s: another process's listener is refused", tt.addr)
		}
		a := Address{id, netip.MustParseAddrPort(tt.addr)}
		if owner, pass, ok, err := h.Admission(a); err != nil || !ok || !pass || owner != 7 {
			t.Errorf("%s: got owner %d, pass %v, %v, %v, want a pass entry of backend 7", tt.addr, owner, pass, ok, err)
		}
		p.end(t)
	}
	if !refused(ns, "127.0.0.3:4200") || !refused(ns, "127.0.0.3:4201") {
		t.Error("the wildcard itself is no longer refused")
	}
	if err := h.RemoveBackend(7); err != nil {
		t.Fatal(err)
	}
	if _, _, ok, _ := h.Admission(Address{id, netip.MustParseAddrPort("127.0.0.2:4200")}); ok {
		t.Error("a pass entry outlived the backend that it was made for")
	}
}

func selfID(t *testing.T) uint32 {
	t.Helper()
	tgid, _, err := Self()
	if err != nil {
		t.Fatal(err)
	}
	return tgid
}

// G1: with no process of ours alive, a refusal ends with the last listener of its backend, whether the next one is
// another's or found by the watch on its port.
func TestG1_RefusalEndsWithItsLastListener(t *testing.T) {
	for _, name := range []string{"another's", "the same backend's"} {
		t.Run(name, func(t *testing.T) {
			ns := netnstest.New(t)
			o := options(t)
			h := installed(t, o)
			id := attach(t, h, ns)
			if err := h.WatchPort(id, 4290, Watch{Backend: 7, Gen: 1}); err != nil {
				t.Fatal(err)
			}
			app, first := start(t, ns, "listen", "tcp4", "127.0.0.1:4290")
			addr := netip.MustParseAddrPort(first)
			if name == "another's" {
				if err := h.UnwatchPort(id, 4290); err != nil {
					t.Fatal(err)
				}
			}
			owner, _ := start(t, ns, "refuse", o.Dir, "7", fmt.Sprint(id), addr.String())
			if err := h.Close(); err != nil {
				t.Fatal(err)
			}
			owner.kill9()
			if !refused(ns, addr.String()) {
				t.Fatal("not refused with its owner dead and its listener alive")
			}
			app.end(t)
			again, _ := start(t, ns, "listen", "tcp4", addr.String())
			defer again.end(t)
			if refused(ns, addr.String()) {
				t.Error("the restarted application is refused by the rule of a dead one")
			}
		})
	}
}

// G1: past its until a refusal admits although its listener lives.
func TestG1_RefusalEndsWithItsTime(t *testing.T) {
	ns := netnstest.New(t)
	h := installed(t, options(t))
	id := attach(t, h, ns)
	watchSelf(t, h, Watch{Backend: 7, Gen: 1, Only: []uint16{4300}})
	ln := ns.Listen(t, "tcp", "127.0.0.1:4300")
	go serve(ln)
	admit(t, h, id, addrPort(ln.Addr()), false, 7)
	refuse(t, h, 7)
	if !refused(ns, ln.Addr().String()) {
		t.Fatal("not refused")
	}
	setRule(t, h, 7, BackendRule{Action: ActionRefuse, Enforce: true, Until: BootNow() + 50*time.Millisecond})
	eventually(t, "the refusal to end by itself", func() bool { return !refused(ns, ln.Addr().String()) })
}

// G2: the kill switch opens everything at once and needs only the pin.
func TestG2_KillSwitchOpensEverything(t *testing.T) {
	ns := netnstest.New(t)
	o := options(t)
	if had, err := SetControl(o, false); had || err != nil {
		t.Fatalf("nothing installed: got %v, %v", had, err)
	}
	if _, err := Control(o); !errors.Is(err, ErrNotInstalled) {
		t.Fatalf("nothing installed: got %v, want %v", err, ErrNotInstalled)
	}
	h := installed(t, o)
	id := attach(t, h, ns)
	watchSelf(t, h, Watch{Backend: 7, Gen: 1, Only: []uint16{4310}})
	ln := ns.Listen(t, "tcp", "127.0.0.1:4310")
	go serve(ln)
	admit(t, h, id, addrPort(ln.Addr()), false, 7)
	refuse(t, h, 7)
	for _, enforce := range []bool{true, false, true} {
		if had, err := SetControl(o, enforce); !had || err != nil {
			t.Fatalf("set control: got %v, %v", had, err)
		}
		if got, err := Control(o); got != enforce || err != nil {
			t.Errorf("control: got %v, %v, want %v", got, err, enforce)
		}
		if got := refused(ns, ln.Addr().String()); got != enforce {
			t.Errorf("enforce %v: refused %v", enforce, got)
		}
		// A second installer must not lift the switch.
		again, err := Install(o)
		if err != nil {
			t.Fatal(err)
		}
		if got, _ := Control(o); got != enforce {
			t.Errorf("a second install changed the kill switch to %v", got)
		}
		again.Close()
	}
}

func rawFD(t *testing.T, ln net.Listener) int {
	t.Helper()
	rc, err := ln.(*net.TCPListener).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	fd := -1
	if err := rc.Control(func(p uintptr) { fd = int(p) }); err != nil {
		t.Fatal(err)
	}
	return fd
}

// A steered connection goes to the target and not to a reuseport sibling of it, and when the target is gone
// the ordinary look-up is back (G1).
func TestG1_SteerEndsWithItsLastTarget(t *testing.T) {
	ns := netnstest.New(t)
	h := installed(t, options(t))
	id := attach(t, h, ns)
	watchSelf(t, h, Watch{Backend: 7, Gen: 1, Only: []uint16{4320}})
	leaving := shared(t, ns, "tcp4", "127.0.0.1:4320")
	sibling := shared(t, ns, "tcp4", "127.0.0.1:4320")
	relay := ns.Listen(t, "tcp", "127.0.0.1:4321")
	accepted := map[string]<-chan net.Conn{
		"leaving": acceptAll(t, leaving), "sibling": acceptAll(t, sibling), "relay": acceptAll(t, relay),
	}
	a := Address{id, netip.MustParseAddrPort("127.0.0.1:4320")}
	admit(t, h, id, a.AddrPort, false, 7)
	count := func(n int) map[string]int {
		got := map[string]int{}
		for range n {
			c := dial(t, ns, "127.0.0.1:4320")
			select {
			case s := <-accepted["leaving"]:
				got["leaving"]++
				s.Close()
			case s := <-accepted["sibling"]:
				got["sibling"]++
				s.Close()
			case s := <-accepted["relay"]:
				got["relay"]++
				s.Close()
			case <-time.After(30 * time.Second):
				t.Fatal("a connection was accepted nowhere")
			}
			c.Close()
		}
		return got
	}
	steer := func(ln net.Listener) {
		cookie, err := h.AddTarget(rawFD(t, ln), id)
		if err != nil {
			t.Fatal(err)
		}
		if again, err := h.AddTarget(rawFD(t, ln), id); again != cookie || err != nil {
			t.Fatalf("add target again: got %d, %v, want %d", again, err, cookie)
		}
		if err := h.SetTargets(a, []uint64{cookie}); err != nil {
			t.Fatal(err)
		}
		setRule(t, h, 7, BackendRule{Action: ActionSteer, Enforce: true, Until: BootNow() + time.Hour})
	}
	steer(sibling)
	if got := count(40); got["sibling"] != 40 {
		t.Errorf("steered to one of a reuseport group: got %v, want all 40 there", got)
	}
	steer(relay)
	if got := count(40); got["relay"] != 40 {
		t.Errorf("steered to another port: got %v, want all 40 there", got)
	}
	relay.Close()
	accepted["relay"] = nil
	if got := count(10); got["leaving"]+got["sibling"] != 10 {
		t.Errorf("target gone: got %v, want all 10 by the ordinary look-up", got)
	}

	other := netnstest.New(t)
	foreign := other.Listen(t, "tcp", "127.0.0.1:4322")
	if _, err := h.AddTarget(rawFD(t, foreign), id); !errors.Is(err, ErrForeignNamespace) {
		t.Errorf("target of another namespace: got %v, want %v", err, ErrForeignNamespace)
	}
}

func TestMPTCPCannotBeATarget(t *testing.T) {
	ns := netnstest.New(t)
	h := installed(t, options(t))
	ns.Do(t, func() {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_MPTCP)
		if err != nil {
			t.Skipf("needs MPTCP: %v", err)
		}
		defer unix.Close(fd)
		if err := errors.Join(unix.Bind(fd, &unix.SockaddrInet4{Port: 4323, Addr: [4]byte{127, 0, 0, 1}}), unix.Listen(fd, 8)); err != nil {
			t.Fatal(err)
		}
		if _, err := h.AddTarget(fd, netnsID(t, ns)); !errors.Is(err, ErrMPTCP) {
			t.Errorf("MPTCP target: got %v, want %v", err, ErrMPTCP)
		}
	})
}

// The namespace of a dead pin's inode may be another one now: pins are kept under the cookie, and those of
// dead namespaces are removed.
func TestG6_DeadNamespaceLeavesNoPin(t *testing.T) {
	h := installed(t, options(t))
	dead := netnstest.New(t)
	id := attach(t, h, dead)
	if again := attach(t, h, dead); again != id {
		t.Fatalf("attached again: got id %d, want %d", again, id)
	}
	if n := pins(t, h, "netns"); n != 1 {
		t.Fatalf("got %d pins, want 1", n)
	}
	if err := dead.Close(); err != nil {
		t.Fatal(err)
	}
	live := netnstest.New(t)
	eventually(t, "the pin of the dead namespace to go", func() bool {
		attach(t, h, live)
		return pins(t, h, "netns") == 1
	})
}

// Reading a namespace's id leaves no thread in it: the first thread of a process never ends, and would keep the namespace
// of a pod that is gone.
func TestG6_NoThreadStaysInANamespace(t *testing.T) {
	ns := netnstest.New(t)
	var in unix.Stat_t
	if err := unix.Fstat(ns.Fd(), &in); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 50 {
				if _, err := NetNSID(ns.Fd()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	eventually(t, "every thread to be elsewhere", func() bool {
		tasks, err := filepath.Glob("/proc/self/task/*/ns/net")
		if err != nil || len(tasks) == 0 {
			t.Fatalf("list threads: %v", err)
		}
		return !slices.ContainsFunc(tasks, func(path string) bool {
			var st unix.Stat_t
			return unix.Stat(path, &st) == nil && st.Ino == in.Ino
		})
	})
}

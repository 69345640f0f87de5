// SPDX-License-Identifier: Apache-2.0

package probes

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/netnstest"
)

func TestDumpTellsWhatASocketIs(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	d := openDiag(t, ns)
	for _, c := range []struct {
		listen, dial string
		family       uint8
	}{
		{"127.0.0.1:0", "127.0.0.1", unix.AF_INET},
		{"[::1]:0", "[::1]", unix.AF_INET6},
		{"[::]:0", "127.0.0.1", unix.AF_INET6}, // dual stack
	} {
		l := ns.Listen(t, "tcp", c.listen)
		p := port(t, l.Addr())
		client := dial(t, ns, fmt.Sprintf("%s:%d", c.dial, p))
		server := accept(t, l)
		write(t, client, "hello")
		var got Socket
		eventually(t, "data to arrive", func() bool {
			socks, err := d.Dump(t.Context(), Filter{States: 1 << StateEstablished, LocalPorts: []uint16{p}, Info: true, Cgroup: true})
			if err != nil || len(socks) != 1 {
				t.Fatalf("%s: got %d sockets, %v, want 1", c.listen, len(socks), err)
			}
			got = socks[0]
			return got.RQueue == 5
		})
		var st unix.Stat_t
		control(t, server, func(fd int) {
			if err := unix.Fstat(fd, &st); err != nil {
				t.Fatal(err)
			}
		})
		switch {
		case got.Family != c.family, uint64(got.Inode) != st.Ino, got.Cookie != cookie(t, server), got.CgroupID == 0,
			got.Local.Port() != p, got.Remote != netip.MustParseAddrPort(client.LocalAddr().String()),
			got.Info == nil, got.Info.BytesReceived != 5, got.Info.DataSegsIn != 1, got.Info.SndWnd == 0:
			t.Errorf("%s: got %+v with %+v, want inode %d, cookie %d", c.listen, got, got.Info, st.Ino, cookie(t, server))
		}
		listeners, err := d.Dump(t.Context(), Filter{States: 1 << StateListen, LocalPorts: []uint16{p}})
		if err != nil || len(listeners) != 1 || listeners[0].Cookie != cookie(t, l) {
			t.Errorf("%s: got listeners %+v, %v", c.listen, listeners, err)
		}
	}
}

func TestDumpFiltersPorts(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	d := openDiag(t, ns)
	var ports []uint16
	for range 12 {
		ports = append(ports, port(t, ns.Listen(t, "tcp", "127.0.0.1:0").Addr()))
	}
	many := append([]uint16{}, ports[0], ports[5])
	for p := uint16(1); len(many) <= maxFilterPorts; p++ {
		many = append(many, p) // below the ephemeral range
	}
	for _, c := range []struct {
		name  string
		ports []uint16
		want  int
	}{
		{"all", nil, 12}, {"one", ports[:1], 1}, {"three", ports[3:6], 3}, {"none", []uint16{1}, 0}, {"too many for the kernel", many, 2},
		{"as many as the kernel takes", many[:maxFilterPorts], 2},
	} {
		socks, err := d.Dump(t.Context(), Filter{States: 1 << StateListen, LocalPorts: c.ports})
		if err != nil || len(socks) != c.want {
			t.Errorf("%s: got %d sockets, %v, want %d", c.name, len(socks), err, c.want)
		}
	}
}

// A Diag belongs to the namespace it was opened in, whoever uses it.
func TestDiagKeepsItsNamespace(t *testing.T) {
	netnstest.LeakCheck(t)
	a, b := netnstest.New(t), netnstest.New(t)
	a.Listen(t, "tcp", "127.0.0.1:0")
	da, db := openDiag(t, a), openDiag(t, b)
	var here *Diag
	a.Do(t, func() {
		var err error
		if here, err = OpenDiag(DiagOptions{NetNS: -1}); err != nil {
			t.Fatal(err)
		}
	})
	defer here.Close()
	var wg sync.WaitGroup
	for range 8 {
		for _, c := range []struct {
			d    *Diag
			want int
		}{{da, 1}, {here, 1}, {db, 0}} {
			wg.Go(func() {
				socks, err := c.d.Dump(t.Context(), Filter{States: 1 << StateListen})
				if err != nil || len(socks) != c.want {
					t.Errorf("got %d listeners, %v, want %d", len(socks), err, c.want)
				}
			})
		}
	}
	wg.Wait()
}

func TestDiagAfterCancelAndClose(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	for range 300 { // more than fits one answer, so that there is a rest to be thrown away
		ns.Listen(t, "tcp", "127.0.0.1:0")
	}
	d := openDiag(t, ns)
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	// take() would stop a call that is over before it began; the walk itself must also survive it.
	if err := d.take(t.Context()); err != nil {
		t.Fatal(err)
	}
	_, _, err := d.dumpOnce(ctx, unix.AF_INET, Filter{States: 1 << StateListen})
	d.give()
	if !errors.Is(err, cause) {
		t.Fatalf("got %v, want the cause", err)
	}
	if _, err := d.Dump(ctx, Filter{}); !errors.Is(err, cause) {
		t.Fatalf("got %v, want the cause", err)
	}
	if socks, err := d.Dump(t.Context(), Filter{States: 1 << StateListen}); err != nil || len(socks) != 300 {
		t.Fatalf("after a cancelled dump: got %d, %v, want 300", len(socks), err)
	}
	if err := errors.Join(d.Close(), d.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Dump(t.Context(), Filter{}); !errors.Is(err, unix.EBADF) {
		t.Errorf("after Close: got %v, want EBADF", err)
	}
}

func TestUnknownProtocolIsErrNoDiag(t *testing.T) {
	netnstest.LeakCheck(t)
	d := openDiag(t, netnstest.New(t))
	if _, err := d.Dump(t.Context(), Filter{Protocol: 200}); !errors.Is(err, ErrNoDiag) {
		t.Errorf("got %v, want ErrNoDiag", err)
	}
}

func TestDestroyThousandConnections(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	d := openDiag(t, ns)
	const n = 1000
	l := ns.Listen(t, "tcp", "[::]:0")
	p := port(t, l.Addr())
	var servers []net.Conn
	for i := range n {
		host := "127.0.0.1"
		if i%2 == 1 {
			host = "[::1]"
		}
		dial(t, ns, fmt.Sprintf("%s:%d", host, p))
		servers = append(servers, accept(t, l))
	}
	bystander := ns.Listen(t, "tcp", "127.0.0.1:0")
	other := dial(t, ns, bystander.Addr().String())
	otherServer := accept(t, bystander)

	socks, err := d.Dump(t.Context(), Filter{States: StatesConnected, LocalPorts: []uint16{p}})
	if err != nil || len(socks) != n {
		t.Fatalf("got %d connections, %v, want %d", len(socks), err, n)
	}
	listener, err := d.Dump(t.Context(), Filter{States: 1 << StateListen, LocalPorts: []uint16{p}})
	if err != nil {
		t.Fatal(err)
	}
	stale := socks[0]
	stale.Cookie++
	done, err := d.Destroy(t.Context(), append([]Socket{stale}, append(listener, socks...)...))
	if err != nil || done != n {
		t.Fatalf("got %d destroyed, %v, want %d", done, err, n)
	}
	for _, c := range servers {
		if _, err := c.Write([]byte("x")); !errors.Is(err, unix.ECONNABORTED) && !errors.Is(err, unix.EPIPE) {
			t.Fatalf("write on a destroyed connection: got %v, want ECONNABORTED", err)
		}
	}
	if done, err = d.Destroy(t.Context(), socks); err != nil || done != 0 {
		t.Errorf("a second time: got %d, %v, want 0", done, err)
	}
	write(t, other, "ok")
	read(t, otherServer, "ok")
	dial(t, ns, fmt.Sprintf("127.0.0.1:%d", p)) // the listener is untouched
	accept(t, l)
}

func TestT4_QueueOf200IsCounted(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	d := openDiag(t, ns)
	l, other := ns.Listen(t, "tcp", "[::]:0"), ns.Listen(t, "tcp", "127.0.0.1:0")
	for _, x := range []net.Listener{l, other} {
		control(t, x, func(fd int) {
			if err := unix.Listen(fd, 1024); err != nil {
				t.Fatal(err)
			}
		})
	}
	const n = 200
	p := port(t, l.Addr())
	for range n {
		dial(t, ns, fmt.Sprintf("127.0.0.1:%d", p))
	}
	dial(t, ns, other.Addr().String())
	ports := []uint16{p, port(t, other.Addr())}
	mine := cookie(t, l)
	ours := func(c uint64) bool { return c == mine }
	eventually(t, "200 in the queue", func() bool {
		q, h, err := d.Pending(t.Context(), ports, ours, nil)
		if err != nil {
			t.Fatal(err)
		}
		return q == n && h == 0
	})
	for i := range n {
		accept(t, l)
		q, _, err := d.Pending(t.Context(), ports, ours, &HalfOpen{})
		if err != nil || q != n-1-i {
			t.Fatalf("after %d accepted: got %d queued, %v", i+1, q, err)
		}
	}
}

func TestR6_HalfOpenSnapshot(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	d := openDiag(t, ns)
	l := ns.Listen(t, "tcp", "[::]:0")
	control(t, l, func(fd int) {
		// The request stays half-open until data comes.
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_DEFER_ACCEPT, 30); err != nil {
			t.Fatal(err)
		}
	})
	p := port(t, l.Addr())
	ports, all := []uint16{p}, func(uint64) bool { return true }
	var clients []net.Conn
	for i := range 20 {
		host := "127.0.0.1"
		if i%2 == 1 {
			host = "[::1]"
		}
		clients = append(clients, dial(t, ns, fmt.Sprintf("%s:%d", host, p)))
	}
	snap, err := d.HalfOpen(t.Context(), ports)
	if err != nil || snap.Len() != 20 {
		t.Fatalf("got %+v, %v, want 20", snap, err)
	}
	late := dial(t, ns, fmt.Sprintf("127.0.0.1:%d", p)) // not of the snapshot
	if _, h, err := d.Pending(t.Context(), ports, all, snap); err != nil || h != 20 {
		t.Fatalf("got %d half-open, %v, want 20", h, err)
	}
	if _, h, err := d.Pending(t.Context(), ports, all, nil); err != nil || h != 21 {
		t.Fatalf("without a snapshot: got %d half-open, %v, want 21", h, err)
	}
	for i, c := range clients {
		write(t, c, "x")
		accept(t, l)
		if _, h, err := d.Pending(t.Context(), ports, all, snap); err != nil || h != 19-i {
			t.Fatalf("after %d completed: got %d half-open, %v, want %d", i+1, h, err, 19-i)
		}
	}
	write(t, late, "x")
	accept(t, l)
}

// A connection on its way from half-open to accepted is seen at each moment.
func TestR6_PendingNeverMisses(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	d := openDiag(t, ns)
	l := ns.Listen(t, "tcp", "127.0.0.1:0")
	control(t, l, func(fd int) {
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_DEFER_ACCEPT, 30); err != nil {
			t.Fatal(err)
		}
	})
	ports, all := []uint16{port(t, l.Addr())}, func(uint64) bool { return true }
	for i := range 300 {
		c := dial(t, ns, l.Addr().String())
		done := make(chan struct{})
		go func() {
			defer close(done)
			c.Write([]byte("x"))
		}()
		q, h, err := d.Pending(t.Context(), ports, all, nil)
		if err != nil || q+h == 0 {
			t.Fatalf("attempt %d: got %d queued, %d half-open, %v, want at least one", i, q, h, err)
		}
		<-done
		accept(t, l)
	}
}

func TestListenersOfEveryKind(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	d := openDiag(t, ns)
	want := map[string]Listener{} // by local address
	add := func(l net.Listener, proto string, v6only bool) {
		t.Helper()
		control(t, l, func(fd int) {
			var st unix.Stat_t
			if err := unix.Fstat(fd, &st); err != nil {
				t.Fatal(err)
			}
			want[l.Addr().String()] = Listener{PID: os.Getpid(), FD: fd, Inode: st.Ino, Protocol: proto, V6Only: v6only}
		})
	}
	add(ns.Listen(t, "tcp", "127.0.0.1:0"), "tcp", false)
	add(ns.Listen(t, "tcp6", "[::]:0"), "tcp", true)
	add(ns.Listen(t, "tcp", "[::1]:0"), "tcp", true)
	closed := ns.Listen(t, "tcp", "127.0.0.1:0")
	var dup int
	ns.Do(t, func() {
		for _, address := range []string{"127.0.0.1:0", "[::]:0"} {
			l, err := net.Listen("tcp", address) // MPTCP, Go's default
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { l.Close() })
			proto := "tcp"
			control(t, l, func(fd int) {
				if p, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL); err == nil && p == protoMPTCP {
					proto = "mptcp"
				}
			})
			add(l, proto, false)
		}
	})
	control(t, closed, func(fd int) { // held twice: named once, by the lower number
		var err error
		if dup, err = unix.FcntlInt(uintptr(fd), syscall.F_DUPFD_CLOEXEC, 200); err != nil {
			t.Fatal(err)
		}
	})
	defer unix.Close(dup)
	add(closed, "tcp", false)

	check := func(got []Listener) {
		t.Helper()
		if len(got) != len(want) {
			t.Errorf("got %d listeners, want %d", len(got), len(want))
		}
		for _, l := range got {
			w := want[l.Local.String()]
			if l.PID != w.PID || l.FD != w.FD || l.Inode != w.Inode || l.Protocol != w.Protocol || l.V6Only != w.V6Only || l.Cookie == 0 || l.Backlog == 0 {
				t.Errorf("%s: got %+v, want %+v", l.Local, l, w)
			}
		}
	}
	got, err := Listeners(d, []int{os.Getpid(), 1 << 29})
	if err != nil {
		t.Fatal(err)
	}
	check(got)

	for _, l := range got {
		if mptcp := isMPTCP(l.PID, l.FD, l.Inode); mptcp != (l.Protocol == "mptcp") {
			t.Errorf("%s: the socket says mptcp %v, want %s", l.Local, mptcp, l.Protocol)
		}
	}
}

// dialMPTCP makes an MPTCP connection to an MPTCP listener in a namespace.
func dialMPTCP(t *testing.T, ns *netnstest.NS) (l net.Listener, client, server net.Conn) {
	t.Helper()
	ns.Do(t, func() {
		var err error
		if l, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, protoMPTCP)
		if err != nil {
			t.Skipf("no MPTCP here: %v", err)
		}
		f := os.NewFile(uintptr(fd), "mptcp")
		defer f.Close()
		if err := unix.Connect(fd, &unix.SockaddrInet4{Port: int(port(t, l.Addr())), Addr: [4]byte{127, 0, 0, 1}}); err != nil {
			t.Fatal(err)
		}
		if client, err = net.FileConn(f); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { client.Close() })
	})
	server = accept(t, l)
	write(t, client, "a") // the connection is MPTCP for good once data has passed
	read(t, server, "a")
	write(t, server, "b")
	read(t, client, "b")
	return l, client, server
}

// An MPTCP connection is known as one, since it cannot be ended by force, and is left alone.
func TestDestroyLeavesMPTCP(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	d := openDiag(t, ns)
	l, client, server := dialMPTCP(t, ns)
	plain := dial(t, ns, l.Addr().String())
	plainServer := accept(t, l)
	socks, err := d.Dump(t.Context(), Filter{States: StatesConnected, LocalPorts: []uint16{port(t, l.Addr())}, Info: true})
	if err != nil || len(socks) != 2 {
		t.Fatalf("got %+v, %v, want 2 connections", socks, err)
	}
	for _, s := range socks {
		if want := s.Remote.Port() == port(t, client.LocalAddr()); s.MPTCP != want {
			t.Errorf("%s: got MPTCP %v, want %v", s.Remote, s.MPTCP, want)
		}
	}
	if n, err := d.Destroy(t.Context(), socks); err != nil || n != 1 {
		t.Errorf("got %d destroyed, %v, want the plain one", n, err)
	}
	write(t, client, "c")
	read(t, server, "c")
	if _, err := plain.Read(make([]byte, 1)); err == nil {
		t.Error("the plain connection is still there")
	}
	plainServer.Close()
}

func TestRetireAndHoldMPTCP(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	d := openDiag(t, ns)
	_, client, server := dialMPTCP(t, ns)
	var v Verdict
	eventually(t, "the answer to be acknowledged", func() bool {
		x, ok := sample(t, d, client)
		list := []Sample{x}
		if err := Locate([]int{os.Getpid()}, list); err != nil {
			t.Fatal(err)
		}
		v = Verdict{Sample: list[0], Class: ClassIdle}
		return ok && x.queued() == 0 && list[0].FD >= 0
	})
	if !v.MPTCP {
		t.Errorf("got %+v, want MPTCP", v.Sample)
	}
	h, err := Hold(v.PID, v.FD, v.Inode)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	if ok, err := h.Acked(); err != nil || !ok {
		t.Errorf("got acknowledged %v, %v, want true", ok, err)
	}
	if err := Retire(t.Context(), v); err != nil {
		t.Fatal(err)
	}
	if n, err := server.Read(make([]byte, 1)); n != 0 || err == nil {
		t.Errorf("got %d bytes, %v, want the end", n, err)
	}
	write(t, server, "last words")
	read(t, client, "last words")
}

func TestG10_NotCovered(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	d := openDiag(t, ns)
	path := t.TempDir() + "/a socket"
	var udp, connected net.Conn
	ns.Do(t, func() {
		l, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		if udp, err = net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)}); err != nil {
			t.Fatal(err)
		}
		if connected, err = net.Dial("udp", udp.LocalAddr().String()); err != nil {
			t.Fatal(err)
		}
	})
	defer udp.Close()
	defer connected.Close()
	find := func(d *Diag) map[string]bool {
		t.Helper()
		us, err := NotCovered(d, []int{os.Getpid()})
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]bool{}
		for _, u := range us {
			if u.PID != os.Getpid() || u.Why == "" {
				t.Errorf("got %+v", u)
			}
			got[u.What] = true
		}
		return got
	}
	got := find(d)
	if !got["udp "+udp.LocalAddr().String()] || got["udp "+connected.LocalAddr().String()] {
		t.Errorf("got %v, want the unconnected socket %s only", got, udp.LocalAddr())
	}
	// The process's own namespace is that of its main thread, where Unix sockets of another are not listed. What the
	// table of the namespace says is the same.
	ns.Do(t, func() {
		for table, want := range map[string]string{"udp": udp.LocalAddr().String(), "unix": path} {
			f, err := os.Open("/proc/thread-self/net/" + table)
			if err != nil {
				t.Fatal(err)
			}
			parse := parseProcUDP
			if table == "unix" {
				parse = parseProcUnix
			}
			list, err := parse(f)
			f.Close()
			if err != nil || len(list) != 1 || list[0].name != want {
				t.Errorf("%s: got %v, %v, want %s", table, list, err, want)
			}
		}
	})
}

// BenchmarkDump is one walk that finds 100 of 2,000 connections.
func BenchmarkDump(b *testing.B) {
	netnstest.RequireRoot(b)
	ns := netnstest.New(b)
	d := openDiag(b, ns)
	l, other := ns.Listen(b, "tcp", "127.0.0.1:0"), ns.Listen(b, "tcp", "127.0.0.1:0")
	for i := range 1000 {
		to := other
		if i%10 == 0 {
			to = l
		}
		dial(b, ns, to.Addr().String())
		accept(b, to)
	}
	ports := []uint16{port(b, l.Addr())}
	for _, c := range []struct {
		name   string
		family uint8
		info   bool
	}{{"both families", 0, false}, {"IPv4", unix.AF_INET, false}, {"IPv4 with info", unix.AF_INET, true}} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				socks, err := d.Dump(b.Context(), Filter{States: StatesConnected, Family: c.family, LocalPorts: ports, Info: c.info})
				if err != nil || len(socks) != 100 {
					b.Fatalf("got %d sockets, %v, want 100", len(socks), err)
				}
			}
		})
	}
}

// What needs no privilege works without: the listeners and connections of our own user's processes, and their classes.
func TestOwnSocketsWithoutPrivilege(t *testing.T) {
	d, err := OpenDiag(DiagOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	l, err := net.Listen("tcp", "127.0.0.1:0") // MPTCP where the kernel has it
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	want := "tcp"
	control(t, l, func(fd int) {
		if p, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL); err == nil && p == protoMPTCP {
			want = "mptcp"
		}
	})
	var found []Listener
	ls, err := Listeners(d, []int{os.Getpid()})
	for _, x := range ls {
		if x.Local.String() == l.Addr().String() {
			found = append(found, x)
		}
	}
	if err != nil || len(found) != 1 || found[0].Protocol != want || found[0].PID != os.Getpid() {
		t.Fatalf("got %+v, %v, want one listener by %s", found, err, want)
	}
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ours := func(c uint64) bool { return c == found[0].Cookie }
	if q, _, err := d.Pending(t.Context(), []uint16{port(t, l.Addr())}, ours, nil); err != nil || q != 1 {
		t.Errorf("got %d queued, %v, want 1", q, err)
	}
	s := accept(t, l)
	write(t, c, "ask")
	read(t, s, "ask")
	cl := NewClassifier(ClassifierOptions{})
	if v, ok := look(t, cl, d, c); !ok || v.Class != ClassActive {
		t.Errorf("got %v %+v, want active", v.Class, v.Sample)
	}
}

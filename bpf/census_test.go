// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/netnstest"
)

// Before 5.12 one compare and swap, or one atomic that returns a value, makes the verifier reject the whole
// program.
func TestPlainProgramHasNoFetch(t *testing.T) {
	spec, err := loadCensus()
	if err != nil {
		t.Fatal(err)
	}
	atomics := func(name string) (add, other int) {
		for _, ins := range spec.Programs[name].Instructions {
			if ins.OpCode.Mode() != asm.AtomicMode {
				continue
			}
			if ins.OpCode.AtomicOp() == asm.AddAtomic {
				add++
			} else {
				other++
			}
		}
		return add, other
	}
	if add, other := atomics(censusProgCensusSockopsPlain); add == 0 || other != 0 {
		t.Errorf("plain program: got %d additions and %d other atomics, want only additions", add, other)
	}
	if _, other := atomics(censusProgCensusSockops); other == 0 {
		t.Error("the ordinary program has no compare and swap: the check above would see none either")
	}
}

// An event may be told twice, but a LISTEN once; levels are in the counts.
func TestListenIsSeenOnce(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	h := installed(t, options(t))
	watchSelf(t, h, Watch{Backend: 7, Gen: 3, Only: []uint16{4400}})
	rd, err := h.Events(7)
	if err != nil {
		t.Fatal(err)
	}
	defer rd.Close()
	ln := ns.Listen(t, "tcp", "127.0.0.1:4400")
	cs, err := h.Counts(7)
	if err != nil || len(cs) != 1 {
		t.Fatalf("counts: got %+v, %v, want one listener", cs, err)
	}
	c := cs[0]
	if !c.Listening || c.Aside || c.MPTCP || c.Gen != 3 || c.Address != (Address{netnsID(t, ns), addrPort(ln.Addr())}) {
		t.Errorf("got %+v, want a live listener of gen 3 on %s", c, ln.Addr())
	}
	if a, err := h.Listeners(7); err != nil || a != (Alive{Live: 1}) {
		t.Errorf("listeners: got %+v, %v, want one", a, err)
	}
	if err := h.Forget(c.Cookie); !errors.Is(err, ErrInUse) {
		t.Errorf("forget a live listener: got %v, want %v", err, ErrInUse)
	}
	ln.Close()
	for _, want := range []EventType{EventListen, EventClosed} {
		e, err := rd.Read()
		if err != nil || e.Type != want || e.Cookie != c.Cookie || e.Gen != 3 || e.Backend != 7 {
			t.Errorf("event: got %+v, %v, want type %d of listener %d", e, err, want, c.Cookie)
		}
	}
	if a, err := h.Listeners(7); err != nil || a != (Alive{}) {
		t.Errorf("listeners after the close: got %+v, %v, want none", a, err)
	}
	if err := h.Forget(c.Cookie); err != nil {
		t.Errorf("forget: %v", err)
	}
	if cs, err := h.Counts(7); err != nil || len(cs) != 0 {
		t.Errorf("counts after forget: got %+v, %v", cs, err)
	}
	done := make(chan error)
	go func() {
		_, err := rd.Read()
		done <- err
	}()
	rd.Close()
	if err := <-done; !errors.Is(err, os.ErrClosed) {
		t.Errorf("read after close: got %v, want os.ErrClosed", err)
	}
}

// backendOf tells which backend has a listener on the address, 0 for none.
func backendOf(t *testing.T, h *Host, addr string) (backend uint64, aside bool) {
	t.Helper()
	err := each(h.maps.Counts, func(_ uint64, c censusCount) {
		if addressOf(c.Addr).AddrPort.String() == addr && c.Listening != 0 {
			backend, aside = c.Backend, c.Flags&listenerAside != 0
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	return backend, aside
}

func TestListenersAreFoundByProcess(t *testing.T) {
	ns := netnstest.New(t)
	h := installed(t, options(t))
	tgid, began, err := Self()
	if err != nil {
		t.Fatal(err)
	}
	watch := func(w Watch) {
		t.Helper()
		if err := h.WatchProcess(tgid, began, w); err != nil {
			t.Fatal(err)
		}
	}
	// listening runs a helper and tells whose its listener became.
	listening := func(args ...string) (backend uint64, aside bool) {
		t.Helper()
		p, addr := start(t, ns, args...)
		defer p.end(t)
		return backendOf(t, h, addr)
	}
	watch(Watch{Backend: 7, Gen: 1, NotSelf: true})
	self := ns.Listen(t, "tcp", "127.0.0.1:0")
	if b, _ := backendOf(t, h, self.Addr().String()); b != 0 {
		t.Errorf("own listener of a supervisor: got backend %d, want none", b)
	}
	for _, tt := range []struct {
		who   string
		args  []string
		aside bool
	}{
		{"child on loopback", []string{"listen", "tcp4", "127.0.0.1:0"}, true},
		{"child on IPv6 loopback", []string{"listen", "tcp6", "[::1]:0"}, true},
		{"child on every address", []string{"listen", "tcp4", "0.0.0.0:0"}, false},
		{"grandchild", []string{"spawn", "spawn", "listen", "tcp4", "0.0.0.0:0"}, false},
	} {
		if b, aside := listening(tt.args...); b != 7 || aside != tt.aside {
			t.Errorf("%s: got backend %d, aside %v, want 7, %v", tt.who, b, aside, tt.aside)
		}
	}
	watch(Watch{Backend: 7, Gen: 1, NotSelf: true, Only: []uint16{4501}, Exclude: []uint16{4502}})
	for port, want := range map[int]uint64{4501: 7, 4502: 0, 4503: 0} {
		if b, aside := listening("listen", "tcp4", fmt.Sprintf("127.0.0.1:%d", port)); b != want || aside {
			t.Errorf("port %d: got backend %d, aside %v, want %d", port, b, aside, want)
		}
	}
	watch(Watch{Backend: 7, Gen: 1, NotSelf: true, Exclude: []uint16{4502}})
	for port, want := range map[int]uint64{4501: 7, 4502: 0} {
		if b, _ := listening("listen", "tcp4", fmt.Sprintf("0.0.0.0:%d", port)); b != want {
			t.Errorf("port %d with an exclusion: got backend %d, want %d", port, b, want)
		}
	}
	// The nearest watched ancestor counts.
	if err := h.WatchProcess(tgid, began, Watch{Backend: 8}); !errors.Is(err, ErrTaken) {
		t.Errorf("watch of another's process: got %v, want %v", err, ErrTaken)
	}
	// R5: a reused id has another start time, and is another process.
	if err := h.UnwatchProcess(tgid); err != nil {
		t.Fatal(err)
	}
	if err := h.WatchProcess(tgid, began-1, Watch{Backend: 9, Gen: 1}); err != nil {
		t.Fatal(err)
	}
	if b, _ := listening("listen", "tcp4", "0.0.0.0:0"); b != 0 {
		t.Errorf("with the id of a dead process: got backend %d, want none", b)
	}
	watch(Watch{Backend: 7, Gen: 2, NotSelf: true}) // takes the stale one's place
	if b, _ := listening("listen", "tcp4", "0.0.0.0:0"); b != 7 {
		t.Errorf("after the stale watch was replaced: got backend %d, want 7", b)
	}
}

func TestListenersAreFoundByCgroupAndAddress(t *testing.T) {
	ns := netnstest.New(t)
	h := installed(t, options(t))
	outer := netnstest.Cgroup(t)
	inner := filepath.Join(outer, "inner")
	if err := os.Mkdir(inner, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		eventually(t, "the cgroup to empty", func() bool { return os.Remove(inner) == nil })
	})
	id, err := CgroupID(outer)
	if err != nil {
		t.Fatal(err)
	}
	if err := h.WatchCgroup(id, Watch{Backend: 11, Gen: 1}); err != nil {
		t.Fatal(err)
	}
	dir, err := os.Open(inner)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	cmd := ns.Command(t, "/proc/self/exe", "listen", "tcp4", "0.0.0.0:0")
	cmd.Env = append(os.Environ(), helperEnv+"=1")
	cmd.SysProcAttr = &unix.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	p, addr := startCmd(t, cmd)
	if b, _ := backendOf(t, h, addr); b != 11 {
		t.Errorf("process in a cgroup below: got backend %d, want 11", b)
	}
	p.end(t)
	// An address goes before a process.
	a := Address{netnsID(t, ns), netip.MustParseAddrPort("127.0.0.1:4510")}
	if err := h.WatchAddress(a, Watch{Backend: 12, Gen: 1, Only: []uint16{4510}}); err != nil {
		t.Fatal(err)
	}
	watchSelf(t, h, Watch{Backend: 13, Gen: 1, Only: []uint16{4510, 4511}})
	for addr, want := range map[string]uint64{"127.0.0.1:4510": 12, "127.0.0.1:4511": 13, "127.0.0.2:4510": 13} {
		ns.Listen(t, "tcp", addr)
		if b, _ := backendOf(t, h, addr); b != want {
			t.Errorf("%s: got backend %d, want %d", addr, b, want)
		}
	}
	if err := errors.Join(h.UnwatchCgroup(id), h.UnwatchAddress(a)); err != nil {
		t.Fatal(err)
	}
}

// A cgroup's watch holds for cgroups that are made below it later, however deep. What counts is where a process is when
// it listens: one that is moved in afterwards is adopted.
func TestCgroupsThatComeLater(t *testing.T) {
	ns := netnstest.New(t)
	h := installed(t, options(t))
	requireFiles(t, h)
	outer := netnstest.Cgroup(t)
	id, err := CgroupID(outer)
	if err != nil {
		t.Fatal(err)
	}
	if err := h.WatchCgroup(id, Watch{Backend: 11, Gen: 1}); err != nil {
		t.Fatal(err)
	}
	deep := outer
	for range 4 {
		deep = filepath.Join(deep, "below")
		if err := os.Mkdir(deep, 0o755); err != nil {
			t.Fatal(err)
		}
		made := deep
		t.Cleanup(func() { eventually(t, "the cgroup to empty", func() bool { return os.Remove(made) == nil }) })
	}
	dir, err := os.Open(deep)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	cmd := ns.Command(t, "/proc/self/exe", "listen", "tcp4", "0.0.0.0:0")
	cmd.Env = append(os.Environ(), helperEnv+"=1")
	cmd.SysProcAttr = &unix.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	p, addr := startCmd(t, cmd)
	if b, _ := backendOf(t, h, addr); b != 11 {
		t.Errorf("process in a cgroup that came later: got backend %d, want 11", b)
	}
	p.end(t)

	p, addr = start(t, ns, "listen", "tcp4", "127.0.0.1:4520")
	dial(t, ns, addr)
	if err := os.WriteFile(filepath.Join(outer, "cgroup.procs"), fmt.Append(nil, p.Process.Pid), 0); err != nil {
		t.Fatal(err)
	}
	if b, _ := backendOf(t, h, addr); b != 0 {
		t.Errorf("moved in after it listened: got backend %d, want none yet", b)
	}
	adopted := 0
	eventually(t, "the connection to be accepted and adopted", func() bool {
		_, n, err := h.Adopt([]int{p.Process.Pid}, AdoptTarget{Backend: 11, Gen: 1, Only: []uint16{4520}})
		if err != nil {
			t.Fatal(err)
		}
		adopted += n
		return adopted == 1
	})
	if b, _ := backendOf(t, h, addr); b != 11 {
		t.Errorf("adopted: got backend %d, want 11", b)
	}
	p.end(t)
}

// A socket that listens without having been bound gets its port inside listen(); one that listens again after
// a shutdown is a new listener with the old count.
func TestUnboundAndRepeatedListen(t *testing.T) {
	ns := netnstest.New(t)
	h := installed(t, options(t))
	watchSelf(t, h, Watch{Backend: 7, Gen: 1})
	ns.Do(t, func() {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		for i := range 3 {
			if err := unix.Listen(fd, 16); err != nil {
				t.Fatal(err)
			}
			sa, err := unix.Getsockname(fd)
			if err != nil {
				t.Fatal(err)
			}
			cs, err := h.Counts(7)
			if err != nil || len(cs) != 1 || !cs[0].Listening || int(cs[0].Address.AddrPort.Port()) != sa.(*unix.SockaddrInet4).Port {
				t.Fatalf("listen %d: got %+v, %v, want one live listener on port %d", i, cs, err, sa.(*unix.SockaddrInet4).Port)
			}
			if a, _ := h.Listeners(7); a.Live != 1 {
				t.Fatalf("listen %d: got %+v live, want 1", i, a)
			}
			c, err := net.Dial("tcp4", fmt.Sprintf("127.0.0.1:%d", sa.(*unix.SockaddrInet4).Port))
			if err != nil {
				t.Fatal(err)
			}
			eventually(t, "the connection to count", func() bool { return sum(t, h, 7).Total == uint64(i+1) })
			c.Close()
			if err := unix.Shutdown(fd, unix.SHUT_RD); err != nil {
				t.Fatal(err)
			}
			if a, _ := h.Listeners(7); a.Live != 0 {
				t.Fatalf("after shutdown %d: got %+v live, want 0", i, a)
			}
		}
	})
	eventually(t, "all to be closed", func() bool { s := sum(t, h, 7); return s.Closed == 3 && s.Open+s.Ending+s.Closing == 0 })
}

// What each state of TCP counts as; R6: the accept queue counts; C11, C18: a response that is not acknowledged
// is in flight, a connection that only waits for its client's FIN is not.
func TestC18_StatesOfAConnection(t *testing.T) {
	ns := netnstest.New(t)
	h := installed(t, options(t))
	watchSelf(t, h, Watch{Backend: 7, Gen: 1, Only: []uint16{4600}})
	ln := ns.Listen(t, "tcp", "127.0.0.1:4600")
	want := func(what string, open, ending, closing int64) {
		t.Helper()
		eventually(t, what, func() bool {
			s := sum(t, h, 7)
			return s.Open == open && s.Ending == ending && s.Closing == closing
		})
	}
	pair := func() (client, server *net.TCPConn) {
		c := dial(t, ns, "127.0.0.1:4600")
		s, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		return c.(*net.TCPConn), s.(*net.TCPConn)
	}

	queued := dial(t, ns, "127.0.0.1:4600")
	want("the connection in the accept queue", 1, 0, 0)
	s, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	want("the accepted connection", 1, 0, 0)
	if err := queued.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Read(make([]byte, 1)); err != io.EOF {
		t.Fatalf("got %v, want EOF", err)
	}
	want("a half-closed client still in flight", 1, 0, 0)
	s.Close()
	want("nothing after both ends closed", 0, 0, 0)

	c, s2 := pair()
	if err := s2.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	want("our acknowledged FIN as closing", 0, 0, 1)
	c.Close()
	want("nothing after the client closed", 0, 0, 0)

	// The client does not read: the response and with it our FIN stay unacknowledged.
	c, s2 = pair()
	if err := s2.SetWriteBuffer(4 << 20); err != nil {
		t.Fatal(err)
	}
	if err := s2.SetWriteDeadline(time.Now().Add(500 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	n, _ := s2.Write(make([]byte, 4<<20))
	s2.Close()
	want("an unacknowledged response as ending", 0, 1, 0)
	if got, err := io.Copy(io.Discard, c); err != nil || got < int64(n) {
		t.Fatalf("read the response: got %d bytes, %v, want %d", got, err, n)
	}
	// Its application has let go of it: what is left of the connection is TIME_WAIT.
	want("nothing once the response is acknowledged", 0, 0, 0)
	c.Close()

	// C20: an abort is seen at once.
	c, _ = pair()
	want("one open", 1, 0, 0)
	if err := c.SetLinger(0); err != nil {
		t.Fatal(err)
	}
	c.Close()
	want("nothing after the abort", 0, 0, 0)
	if s := sum(t, h, 7); s.Total != 4 || s.Closed != 4 {
		t.Errorf("got %d in total, %d closed, want 4 and 4", s.Total, s.Closed)
	}
}

// C33: connections of either family on [::] count.
func TestC33_BothFamiliesCount(t *testing.T) {
	client, server := netnstest.New(t), netnstest.New(t)
	link := netnstest.Veth(t, client, server)
	h := installed(t, options(t))
	watchSelf(t, h, Watch{Backend: 7, Gen: 1})
	ln := server.Listen(t, "tcp", "[::]:4610")
	go serve(ln)
	for _, a := range []netip.Addr{link.B.V4, link.B.V6} {
		dial(t, client, netip.AddrPortFrom(a, 4610).String())
	}
	eventually(t, "two connections", func() bool { return sum(t, h, 7).Open == 2 })
}

// An MPTCP listener's subflow is counted, flagged, and its connections' files show the tag.
func TestMPTCPIsCounted(t *testing.T) {
	ns := netnstest.New(t)
	h := installed(t, options(t))
	watchSelf(t, h, Watch{Backend: 7, Gen: 1, Only: []uint16{4620}})
	var ln net.Listener
	ns.Do(t, func() {
		lc := net.ListenConfig{}
		lc.SetMultipathTCP(true)
		var err error
		if ln, err = lc.Listen(context.Background(), "tcp4", "127.0.0.1:4620"); err != nil {
			t.Fatal(err)
		}
	})
	t.Cleanup(func() { ln.Close() })
	accepted := acceptAll(t, ln)
	cs, err := h.Counts(7)
	if err != nil || len(cs) != 1 {
		t.Fatalf("got %+v, %v, want one listener", cs, err)
	}
	if !cs[0].MPTCP {
		t.Skip("no MPTCP on this kernel")
	}
	var c net.Conn
	ns.Do(t, func() {
		d := net.Dialer{}
		d.SetMultipathTCP(true)
		if c, err = d.Dial("tcp4", "127.0.0.1:4620"); err != nil {
			t.Fatal(err)
		}
	})
	defer c.Close()
	s := <-accepted
	defer s.Close()
	if got, err := s.(*net.TCPConn).MultipathTCP(); err != nil || !got {
		t.Skipf("the connection is not MPTCP (%v)", err)
	}
	eventually(t, "one connection", func() bool { return sum(t, h, 7).Open == 1 })
	requireFiles(t, h)
	files, err := h.Files(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	found := false
	for _, f := range files {
		if f.Protocol == unix.IPPROTO_MPTCP && f.State == tcpEstablished && f.Local.Port() == 4620 {
			found = true
			if !f.Tagged || f.Tag.Backend != 7 || f.Tag.State != TagOpen || f.Cookie == 0 {
				t.Errorf("file of an MPTCP connection: got %+v, want the tag of backend 7", f)
			}
		}
	}
	if !found {
		t.Error("the MPTCP connection is not among the files")
	}
	if _, _, err := h.Adopt([]int{os.Getpid()}, AdoptTarget{Backend: 7, Gen: 1, Only: []uint16{4620}}); err != nil {
		t.Errorf("adopt what is counted already: %v", err)
	}
	s.Close()
	c.Close()
	eventually(t, "no connection", func() bool { s := sum(t, h, 7); return s.Open+s.Ending+s.Closing == 0 })
}

// A listener that is not the backend's gets neither a tag nor a count, nor do outgoing connections.
func TestC28_OthersAreNotCounted(t *testing.T) {
	ns := netnstest.New(t)
	h := installed(t, options(t))
	watchSelf(t, h, Watch{Backend: 7, Gen: 1, Only: []uint16{4630}})
	ours := ns.Listen(t, "tcp", "127.0.0.1:4630")
	others := ns.Listen(t, "tcp", "127.0.0.1:4631")
	go serve(ours)
	go serve(others)
	for range 5 {
		dial(t, ns, others.Addr().String())
	}
	dial(t, ns, ours.Addr().String())
	eventually(t, "the one connection", func() bool { return sum(t, h, 7).Total == 1 })
	if s := sum(t, h, 7); s.Total != 1 {
		t.Errorf("got %d connections, want the 1 to our listener", s.Total)
	}
}

// R10: zero is an event during a drain, and none is missed when many connections close at once.
func TestR10_ZeroIsNeverMissed(t *testing.T) {
	ns := netnstest.New(t)
	h := installed(t, options(t))
	watchSelf(t, h, Watch{Backend: 7, Gen: 1, Only: []uint16{4640}})
	rd, err := h.Events(7)
	if err != nil {
		t.Fatal(err)
	}
	defer rd.Close()
	events := make(chan Event, 1<<16)
	go func() {
		defer close(events)
		for {
			e, err := rd.Read()
			if err != nil {
				return
			}
			events <- e
		}
	}()
	ln := ns.Listen(t, "tcp", "127.0.0.1:4640")
	accepted := acceptAll(t, ln)
	const parallel = 40
	drains := size(30, 300)
	for i := range drains {
		if err := h.ClearDrain(7); err != nil {
			t.Fatal(err)
		}
		clients := make([]net.Conn, parallel)
		servers := make([]net.Conn, parallel)
		for j := range clients {
			clients[j] = dial(t, ns, ln.Addr().String())
			servers[j] = <-accepted
		}
		want := DrainMark{Gen: uint64(i), Begun: BootNow(), Deadline: BootNow() + time.Minute, Draining: true}
		if err := h.SetDrain(7, want); err != nil {
			t.Fatal(err)
		}
		if got, ok, err := h.DrainMark(7); err != nil || !ok || got != want {
			t.Fatalf("drain mark: got %+v, %v, %v, want %+v", got, ok, err, want)
		}
		for _, list := range [][]net.Conn{clients, servers} {
			for _, c := range list {
				go c.Close()
			}
		}
		limit := time.After(60 * time.Second)
		for zero := false; !zero; {
			select {
			case e := <-events:
				zero = e.Type == EventZero && e.Open == 0
			case <-limit:
				t.Fatalf("drain %d: no event of zero; counts %+v", i, sum(t, h, 7))
			}
		}
		eventually(t, "zero", func() bool { s := sum(t, h, 7); return s.Open+s.Ending+s.Closing == 0 })
	}
}

// Two owners on one host: each has its own ring, rule and counts (G9).
func TestG9_TwoOwnersSideBySide(t *testing.T) {
	ns := netnstest.New(t)
	o := options(t)
	a, b := installed(t, o), installed(t, o)
	tgid, began, err := Self()
	if err != nil {
		t.Fatal(err)
	}
	if err := a.WatchProcess(tgid, began, Watch{Backend: 1, Gen: 1, NotSelf: true}); err != nil {
		t.Fatal(err)
	}
	ra, err := a.Events(1)
	if err != nil {
		t.Fatal(err)
	}
	defer ra.Close()
	rb, err := b.Events(2)
	if err != nil {
		t.Fatal(err)
	}
	defer rb.Close()
	pa, addrA := start(t, ns, "listen", "tcp4", "0.0.0.0:0")
	pb, _ := start(t, ns, "self")
	tb, sb, err := TaskID(pb.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	// The nearer watch is b's.
	if err := b.WatchProcess(tb, sb, Watch{Backend: 2, Gen: 1}); err != nil {
		t.Fatal(err)
	}
	if err := b.WatchAddress(Address{netnsID(t, ns), netip.MustParseAddrPort("127.0.0.1:4650")}, Watch{Backend: 2, Gen: 1, Only: []uint16{4650}}); err != nil {
		t.Fatal(err)
	}
	ns.Listen(t, "tcp", "127.0.0.1:4650")
	for _, tt := range []struct {
		rd      *EventReader
		backend uint64
	}{{ra, 1}, {rb, 2}} {
		if e, err := tt.rd.Read(); err != nil || e.Type != EventListen || e.Backend != tt.backend {
			t.Errorf("ring of backend %d: got %+v, %v", tt.backend, e, err)
		}
	}
	// b leaves; a goes on.
	if err := b.RemoveBackend(2); err != nil {
		t.Fatal(err)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	dial(t, ns, "127.0.0.1:"+port(addrA))
	eventually(t, "a's connection", func() bool { return sum(t, a, 1).Open == 1 })
	pa.end(t)
	pb.end(t)
}

// A listener that outlived its backend is none of the next one that has the same id.
func TestListenerOfARemovedBackendIsNotSubtracted(t *testing.T) {
	ns := netnstest.New(t)
	h := installed(t, options(t))
	id := netnsID(t, ns)
	watch := func(addr string) {
		t.Helper()
		if err := h.WatchAddress(Address{id, netip.MustParseAddrPort(addr)}, Watch{Backend: 1, Gen: 1, Only: []uint16{4650, 4651}}); err != nil {
			t.Fatal(err)
		}
	}
	watch("127.0.0.1:4650")
	old := ns.Listen(t, "tcp", "127.0.0.1:4650")
	if err := h.RemoveBackend(1); err != nil {
		t.Fatal(err)
	}
	watch("127.0.0.1:4651")
	ns.Listen(t, "tcp", "127.0.0.1:4651")
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}
	if a, err := h.Listeners(1); err != nil || a.Live != 1 {
		t.Errorf("got %d listeners, %v, want the one that is open", a.Live, err)
	}
}

func port(addr string) string {
	_, p, _ := net.SplitHostPort(addr)
	return p
}

// size is how much a test does: the full size with EBB_LONG=1, a quarter of the usual with -short.
func size(usual, full int) int {
	switch {
	case os.Getenv("EBB_LONG") == "1":
		return full
	case testing.Short():
		return usual / 4
	}
	return usual
}

// C26: TCP Fast Open, deferred accept and SYN cookies count like the socket table.
func TestC26_FastOpenDeferAcceptSynCookies(t *testing.T) {
	client, server := netnstest.New(t), netnstest.New(t)
	link := netnstest.Veth(t, client, server)
	h := installed(t, options(t))
	watchSelf(t, h, Watch{Backend: 7, Gen: 1})
	sysctl(t, client, "net/ipv4/tcp_fastopen", "7") // client, server, without cookie
	sysctl(t, server, "net/ipv4/tcp_fastopen", "519")
	sysctl(t, server, "net/ipv4/tcp_syncookies", "2") // always
	var fds []int
	defer func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
	}()
	listenWith := func(port, opt, value int) {
		server.Do(t, func() {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				t.Fatal(err)
			}
			fds = append(fds, fd)
			err = unix.Bind(fd, &unix.SockaddrInet4{Port: port})
			if opt != 0 {
				err = errors.Join(err, unix.SetsockoptInt(fd, unix.IPPROTO_TCP, opt, value))
			}
			if err := errors.Join(err, unix.Listen(fd, 256)); err != nil {
				t.Fatal(err)
			}
		})
	}
	const n = 20
	for _, tt := range []struct {
		name       string
		port       int
		opt, value int
		cookies    string
		connect    func(sa *unix.SockaddrInet4, fd int) error
	}{
		{"syncookies", 4700, 0, 0, "2", func(sa *unix.SockaddrInet4, fd int) error { return unix.Connect(fd, sa) }},
		{"defer accept", 4701, unix.TCP_DEFER_ACCEPT, 30, "0", func(sa *unix.SockaddrInet4, fd int) error {
			if err := unix.Connect(fd, sa); err != nil {
				return err
			}
			_, err := unix.Write(fd, []byte("x"))
			return err
		}},
		{"fast open", 4702, unix.TCP_FASTOPEN, 256, "0", func(sa *unix.SockaddrInet4, fd int) error {
			return unix.Sendto(fd, []byte("x"), unix.MSG_FASTOPEN, sa)
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			sysctl(t, server, "net/ipv4/tcp_syncookies", tt.cookies)
			listenWith(tt.port, tt.opt, tt.value)
			before := sum(t, h, 7)
			var conns []int
			defer func() {
				for _, fd := range conns {
					unix.Close(fd)
				}
			}()
			client.Do(t, func() {
				for range n {
					fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
					if err != nil {
						t.Fatal(err)
					}
					conns = append(conns, fd)
					if err := tt.connect(&unix.SockaddrInet4{Port: tt.port, Addr: link.B.V4.As4()}, fd); err != nil {
						t.Fatalf("%s: connect: %v", tt.name, err)
					}
				}
			})
			eventually(t, "the count to equal the socket table", func() bool {
				table := tableOf(t, server, uint16(tt.port))
				return table[tcpEstablished] == n && sum(t, h, 7).Open-before.Open == n
			})
			for _, fd := range conns {
				unix.Close(fd)
			}
			conns = nil
			// Nobody accepts: they wait for the listener in CLOSE_WAIT, still in flight.
			eventually(t, "all in CLOSE_WAIT", func() bool { return tableOf(t, server, uint16(tt.port))[tcpCloseWait] == n })
			if got := sum(t, h, 7).Open - before.Open; got != n {
				t.Errorf("half-closed clients: got %d open, want %d", got, n)
			}
		})
	}
	for _, fd := range fds {
		unix.Close(fd)
	}
	fds = nil
	eventually(t, "all to be closed", func() bool { s := sum(t, h, 7); return s.Open+s.Ending+s.Closing == 0 && s.Closed == 3*n })
}

// sysctl sets a parameter of a namespace.
func sysctl(t *testing.T, ns *netnstest.NS, name, value string) {
	t.Helper()
	ns.Do(t, func() {
		if err := os.WriteFile("/proc/thread-self/root/proc/sys/"+name, []byte(value), 0); err != nil {
			t.Fatal(err)
		}
	})
}

// A process in a pid namespace learns its own global id.
func TestSelfInAPIDNamespace(t *testing.T) {
	ns := netnstest.New(t)
	cmd := ns.Command(t, "/proc/self/exe", "self")
	cmd.Env = append(os.Environ(), helperEnv+"=1")
	cmd.SysProcAttr = &unix.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}
	p, line := startCmd(t, cmd)
	defer p.end(t)
	var tgid uint32
	var began uint64
	var local int
	if _, err := fmt.Sscan(line, &tgid, &began, &local); err != nil {
		t.Fatal(err)
	}
	if local != 1 {
		t.Fatalf("the helper is pid %d of its namespace, want 1", local)
	}
	wantTgid, wantStart, err := TaskID(p.Process.Pid)
	if err != nil || tgid != wantTgid || began != wantStart {
		t.Errorf("got %d started %d, want %d started %d (%v)", tgid, began, wantTgid, wantStart, err)
	}
	exit := exec.Command("true")
	if err := exit.Run(); err != nil {
		t.Fatal(err)
	}
	if _, _, err := TaskID(exit.Process.Pid); !errors.Is(err, unix.ESRCH) {
		t.Errorf("id of a process that has ended: got %v, want %v", err, unix.ESRCH)
	}
}

// An audit corrects a count inside the kernel, and only if nothing moved since it looked.
func TestCorrectAddsInTheKernel(t *testing.T) {
	ns := netnstest.New(t)
	h := installed(t, options(t))
	watchSelf(t, h, Watch{Backend: 7, Gen: 1, Only: []uint16{4660}})
	ns.Listen(t, "tcp", "127.0.0.1:4660")
	dial(t, ns, "127.0.0.1:4660")
	dial(t, ns, "127.0.0.1:4660")
	counts := func() ListenerCount {
		t.Helper()
		cs, err := h.Counts(7)
		if err != nil || len(cs) != 1 {
			t.Fatalf("counts: got %+v, %v, want one listener", cs, err)
		}
		return cs[0]
	}
	eventually(t, "two connections", func() bool { return counts().Open == 2 })
	seen := counts()
	stale := seen
	stale.Total--
	if done, err := h.Correct(stale, -1, 0, 0); done || err != nil {
		t.Errorf("correct what has moved: got %v, %v, want nothing done", done, err)
	}
	if done, err := h.Correct(seen, -1, 3, 2); !done || err != nil {
		t.Errorf("correct: got %v, %v", done, err)
	}
	if c := counts(); c.Open != 1 || c.Ending != 3 || c.Closing != 2 || c.Healed != seen.Healed+1 {
		t.Errorf("got %+v, want 1 open, 3 ending, 2 closing", c)
	}
	if done, err := h.Correct(counts(), 0, -4, 0); done || err == nil {
		t.Errorf("correct below zero: got %v, %v, want an error", done, err)
	}
}

func FuzzDecodeTag(f *testing.F) {
	f.Add(make([]byte, 40))
	f.Add([]byte{1})
	f.Fuzz(func(t *testing.T, b []byte) {
		tag, err := DecodeTag(b)
		if (len(b) < 40) != (err != nil) {
			t.Errorf("%d bytes: got %+v, %v", len(b), tag, err)
		}
	})
}

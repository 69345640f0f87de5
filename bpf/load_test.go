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
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/netnstest"
)

// churn opens and closes connections from client to addr, several at a time, until total were served. Each
// carries a byte both ways. Half are closed by the client first, half by the server, some are aborted.
func churn(t *testing.T, client *netnstest.NS, addr string, total int) {
	t.Helper()
	var next atomic.Int64
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for {
				n := next.Add(1)
				if n > int64(total) {
					return
				}
				if err := exchange(client, addr, n); err != nil {
					t.Errorf("connection %d: %v", n, err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// exchange is one connection, closed in one of several ways.
func exchange(client *netnstest.NS, addr string, n int64) error {
	c, err := client.DialContext(context.Background(), "tcp", addr)
	if err != nil {
		return err
	}
	defer c.Close()
	if n%5 == 0 {
		return c.(*net.TCPConn).SetLinger(0) // close aborts
	}
	how := byte('k')
	if n%2 == 0 {
		how = 'c'
	}
	if _, err := c.Write([]byte{how}); err != nil {
		return err
	}
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		return err
	}
	if how == 'c' {
		_, err = c.Read(make([]byte, 1))
		if err == io.EOF {
			err = nil
		}
	}
	return err
}

// answer accepts, echoes a byte, and closes first if it is a 'c'.
func answer(ln net.Listener) {
	for {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			b := make([]byte, 1)
			for {
				if _, err := c.Read(b); err != nil {
					return
				}
				if _, err := c.Write(b); err != nil || b[0] == 'c' {
					return
				}
			}
		}()
	}
}

// census compares the counts with the socket table of the server's namespace until both agree.
func census(t *testing.T, h *Host, server *netnstest.NS, port uint16, backend uint64) {
	t.Helper()
	var table map[uint8]int
	var s ListenerCount
	defer func() {
		if t.Failed() {
			t.Logf("the socket table has %v, the census %+v", table, s)
		}
	}()
	eventually(t, "the census to equal the socket table", func() bool {
		table, s = tableOf(t, server, port), sum(t, h, backend)
		return s.Open == int64(table[tcpEstablished]+table[tcpCloseWait]) &&
			s.Ending == int64(table[tcpFinWait1]+table[tcpLastAck]+table[tcpClosing]) &&
			s.Closing == int64(table[tcpFinWait2]) && s.Total-s.Closed == uint64(s.Open+s.Ending+s.Closing)
	})
}

// The counts are exact after churn over veth with packet steering, which makes the tracepoint lose events, and
// beside a sock_ops program that overwrites our flags, which makes ours lose them.
func TestCensusIsExactUnderChurn(t *testing.T) {
	total := size(6000, 1_000_000)
	client, server := netnstest.New(t), netnstest.New(t)
	l := netnstest.Veth(t, client, server)
	netnstest.RPS(t, server, l.B.Dev)
	netnstest.RPS(t, client, l.A.Dev)
	quickPorts(t, client)
	h := installed(t, options(t))
	watchSelf(t, h, Watch{Backend: 7, Gen: 1, Only: []uint16{4900}})
	if h.Guarded() {
		clobber(t, 4900)
	}
	ln := server.Listen(t, "tcp", "0.0.0.0:4900")
	go answer(ln)
	addr := netip.AddrPortFrom(l.B.V4, 4900).String()
	var held []net.Conn
	for range 50 {
		held = append(held, dial(t, client, addr))
	}
	churn(t, client, addr, total)
	census(t, h, server, 4900, 7)
	s := sum(t, h, 7)
	if s.Open != 50 || s.Total != uint64(total+50) {
		t.Errorf("got %d open of %d, want 50 of %d", s.Open, s.Total, total+50)
	}
	if h.Guarded() && s.Healed == 0 {
		t.Error("no flag was healed: the other program did not work, and the test shows nothing")
	}
	for _, c := range held {
		c.Close()
	}
	eventually(t, "zero", func() bool { s := sum(t, h, 7); return s.Open+s.Ending+s.Closing == 0 && s.Total == s.Closed })
	t.Logf("counted %d connections: %d by sock_ops, %d by the tracepoint; %d healed", s.Total, s.BySockops, s.ByTracing, s.Healed)
}

// quickPorts lets a client namespace reuse its ports: without it a long churn runs out of them in TIME_WAIT.
func quickPorts(t *testing.T, ns *netnstest.NS) {
	t.Helper()
	sysctl(t, ns, "net/ipv4/tcp_tw_reuse", "1")
	sysctl(t, ns, "net/ipv4/ip_local_port_range", "1024 65535")
}

// R3: a connection whose SYN is sent after the flip has returned goes the new way, all of them.
func TestR3_FlipUnderLoad(t *testing.T) {
	total := int64(size(5000, 100_000))
	ns := netnstest.New(t)
	quickPorts(t, ns)
	h := installed(t, options(t))
	id := attach(t, h, ns)
	watchSelf(t, h, Watch{Backend: 7, Gen: 1, Only: []uint16{4910}})
	ln := ns.Listen(t, "tcp", "127.0.0.1:4910")
	go answer(ln)
	admit(t, h, id, addrPort(ln.Addr()), false, 7)
	setRule(t, h, 7, BackendRule{Action: ActionOpen, Enforce: true})

	// The epoch is odd while the rule changes; a connection is judged if the epoch was even and the same
	// before its SYN and after its outcome. Multiples of four are open.
	var epoch, judged, wrong, made atomic.Int64
	var wg sync.WaitGroup
	for range 6 {
		wg.Go(func() {
			for made.Add(1) <= total {
				before := epoch.Load()
				c, err := ns.DialContext(context.Background(), "tcp", ln.Addr().String())
				if err == nil {
					_ = c.(*net.TCPConn).SetLinger(0)
					c.Close()
				} else if !errors.Is(err, unix.ECONNREFUSED) {
					t.Errorf("dial: %v", err)
					return
				}
				if before%2 != 0 || epoch.Load() != before {
					continue
				}
				judged.Add(1)
				if (err == nil) != (before%4 == 0) {
					wrong.Add(1)
				}
			}
		})
	}
	flips := 0
	for made.Load() < total {
		epoch.Add(1)
		if flips%2 == 0 {
			refuse(t, h, 7)
		} else {
			setRule(t, h, 7, BackendRule{Action: ActionOpen, Enforce: true})
		}
		epoch.Add(1)
		flips++
		// The next flip comes when this one has been seen by some.
		at := made.Load()
		for made.Load() < min(at+50, total) {
			time.Sleep(100 * time.Microsecond) // a pause of the load, not a wait for its effect
		}
	}
	wg.Wait()
	t.Logf("%d connections, %d judged, %d flips", total, judged.Load(), flips)
	if wrong.Load() != 0 || judged.Load() < total/4 || flips < 10 {
		t.Errorf("got %d of %d judged connections on the wrong side in %d flips, want 0", wrong.Load(), judged.Load(), flips)
	}
}

// Programs are replaced in place under load: nothing is lost or counted twice.
func TestD7_UpgradeUnderLoad(t *testing.T) {
	total := size(4000, 100_000)
	client, server := netnstest.New(t), netnstest.New(t)
	l := netnstest.Veth(t, client, server)
	netnstest.RPS(t, server, l.B.Dev)
	quickPorts(t, client)
	o := options(t)
	h := installed(t, o)
	watchSelf(t, h, Watch{Backend: 7, Gen: 1, Only: []uint16{4920}})
	ln := server.Listen(t, "tcp", "0.0.0.0:4920")
	go answer(ln)
	attachedOnce := len(h.links)
	done := make(chan struct{})
	upgrades := 0
	var wg sync.WaitGroup
	wg.Go(func() {
		for upgrades < 5 || !closed(done) {
			if err := h.maps.Meta.Put(metaDigest, uint64(1)); err != nil {
				t.Error(err)
				return
			}
			h2, err := Install(o)
			if err != nil {
				t.Error(err)
				return
			}
			h2.Close()
			upgrades++
		}
	})
	churn(t, client, netip.AddrPortFrom(l.B.V4, 4920).String(), total)
	close(done)
	wg.Wait()
	t.Logf("%d upgrades", upgrades)
	census(t, h, server, 4920, 7)
	if ids := programs(t, o); len(ids) != attachedOnce {
		t.Errorf("after %d upgrades: got %d programs attached, want %d", upgrades, len(ids), attachedOnce)
	}
	if s := sum(t, h, 7); s.Total != uint64(total) || s.Open != 0 {
		t.Errorf("after %d upgrades: got %+v, want %d in total and none open", upgrades, s, total)
	}
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// C24: the process that installed and watches is killed in the middle; the counts go on.
func TestC24_CountsSurviveTheirOwner(t *testing.T) {
	total := size(2000, 500_000)
	client, server := netnstest.New(t), netnstest.New(t)
	l := netnstest.Veth(t, client, server)
	netnstest.RPS(t, server, l.B.Dev)
	quickPorts(t, client)
	o := options(t)
	owner, _ := start(t, server, "install", o.Dir)
	h, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	watchSelf(t, h, Watch{Backend: 7, Gen: 1, Only: []uint16{4930}})
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	ln := server.Listen(t, "tcp", "0.0.0.0:4930")
	go answer(ln)
	addr := netip.AddrPortFrom(l.B.V4, 4930).String()
	for range 100 {
		dial(t, client, addr)
	}
	churn(t, client, addr, total/2)
	owner.kill9()
	churn(t, client, addr, total/2)
	h = installed(t, o)
	census(t, h, server, 4930, 7)
	if s := sum(t, h, 7); s.Open != 100 || s.Total != uint64(total+100) {
		t.Errorf("after the kill: got %d open of %d, want 100 of %d", s.Open, s.Total, total+100)
	}
}

// C25: connections before, during and after the attachment are all counted.
func TestC25_ConnectionsBeforeDuringAndAfterAttach(t *testing.T) {
	const n = 1000
	requireFiles(t, installed(t, options(t)))
	raiseFiles(t, 4*n)
	client, server := netnstest.New(t), netnstest.New(t)
	l := netnstest.Veth(t, client, server)
	netnstest.RPS(t, server, l.B.Dev)
	ln := server.Listen(t, "tcp", "0.0.0.0:4940")
	accepted := acceptAll(t, ln)
	addr := netip.AddrPortFrom(l.B.V4, 4940).String()
	connect := func(n int) {
		for range n {
			dial(t, client, addr)
		}
	}
	connect(n * 4 / 10)
	o := options(t)
	var h *Host
	var wg sync.WaitGroup
	var listeners, conns int
	wg.Go(func() {
		var err error
		if h, err = Install(o); err != nil {
			t.Error(err)
			return
		}
		for {
			ls, cs, err := h.Adopt([]int{os.Getpid()}, AdoptTarget{Backend: 7, Gen: 1, Only: []uint16{4940}})
			if err != nil {
				t.Error(err)
				return
			}
			listeners, conns = listeners+ls, conns+cs
			if ls+cs == 0 {
				return
			}
		}
	})
	connect(n * 3 / 10)
	wg.Wait()
	if h == nil {
		t.FailNow()
	}
	t.Cleanup(func() {
		h.Close()
		if _, err := Cleanup(o); err != nil {
			t.Error(err)
		}
	})
	connect(n * 3 / 10)
	var servers []net.Conn
	for len(servers) < n {
		servers = append(servers, <-accepted)
	}
	// What waited in the accept queue at the time has a file now.
	_, more, err := h.Adopt([]int{os.Getpid()}, AdoptTarget{Backend: 7, Gen: 1, Only: []uint16{4940}})
	if err != nil {
		t.Fatal(err)
	}
	census(t, h, server, 4940, 7)
	s := sum(t, h, 7)
	if listeners != 1 || s.Open != n || s.Total != n || s.ByAdopt != uint64(conns+more) || s.ByAdopt < n*4/10 {
		t.Errorf("got %d listeners and %d+%d connections adopted, counts %+v, want %d open", listeners, conns, more, s, n)
	}
	if ls, cs, err := h.Adopt([]int{os.Getpid()}, AdoptTarget{Backend: 7, Gen: 1, Only: []uint16{4940}}); ls+cs != 0 || err != nil {
		t.Errorf("another pass: got %d listeners, %d connections, %v, want none", ls, cs, err)
	}
	for _, c := range servers {
		c.Close()
	}
	eventually(t, "zero", func() bool { s := sum(t, h, 7); return s.Open == 0 })
}

// raiseFiles raises the limit of open files for the test.
func raiseFiles(t *testing.T, n uint64) {
	t.Helper()
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		t.Fatal(err)
	}
	if lim.Cur >= n {
		return
	}
	if lim.Max < n {
		netnstest.Skip(t, "needs %d open files, the limit is %d", n, lim.Max)
	}
	old := lim
	lim.Cur = n
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		netnstest.Skip(t, "cannot raise the limit of open files: %v", err)
	}
	t.Cleanup(func() { _ = unix.Setrlimit(unix.RLIMIT_NOFILE, &old) })
}

// Adoption knows the state: a half-closed client is open, an acknowledged FIN of ours is closing.
func TestAdoptionKnowsTheState(t *testing.T) {
	ns := netnstest.New(t)
	ln := ns.Listen(t, "tcp", "127.0.0.1:4950")
	accepted := acceptAll(t, ln)
	pair := func() (c, s *net.TCPConn) {
		c = dial(t, ns, "127.0.0.1:4950").(*net.TCPConn)
		s = (<-accepted).(*net.TCPConn)
		t.Cleanup(func() { s.Close() })
		return c, s
	}
	pair() // ESTABLISHED
	c, _ := pair()
	if err := c.CloseWrite(); err != nil { // CLOSE_WAIT
		t.Fatal(err)
	}
	_, s := pair()
	if err := s.CloseWrite(); err != nil { // FIN_WAIT2
		t.Fatal(err)
	}
	eventually(t, "the states", func() bool {
		table := tableOf(t, ns, 4950)
		return table[tcpCloseWait] == 1 && table[tcpFinWait2] == 1
	})
	h := installed(t, options(t))
	requireFiles(t, h)
	ls, cs, err := h.Adopt([]int{os.Getpid()}, AdoptTarget{Backend: 7, Gen: 1, Only: []uint16{4950}})
	if ls != 1 || cs != 3 || err != nil {
		t.Fatalf("adopt: got %d, %d, %v, want 1 listener and 3 connections", ls, cs, err)
	}
	if s := sum(t, h, 7); s.Open != 2 || s.Closing != 1 || s.ByAdopt != 3 {
		t.Errorf("got %+v, want 2 open and 1 closing", s)
	}
	if a, err := h.Listeners(7); err != nil || a.Live != 1 {
		t.Errorf("got %+v, %v, want one live listener", a, err)
	}
}

// What the readers of files say about a socket.
func TestFilesShowTheSocket(t *testing.T) {
	ns := netnstest.New(t)
	h := installed(t, options(t))
	requireFiles(t, h)
	watchSelf(t, h, Watch{Backend: 7, Gen: 4, Only: []uint16{4960}})
	ln := ns.Listen(t, "tcp", "[::]:4960")
	accepted := acceptAll(t, ln)
	c := dial(t, ns, "127.0.0.1:4960")
	s := <-accepted
	defer s.Close()
	if _, err := c.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Write([]byte("hi")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, 2)); err != nil {
		t.Fatal(err)
	}
	find := func(local, remote string) (File, bool) {
		files, err := h.Files(os.Getpid())
		if err != nil {
			t.Fatal(err)
		}
		var found []File
		for _, f := range files {
			if f.Local.String() == local && (remote == "" || f.Remote.String() == remote) {
				found = append(found, f)
			}
		}
		if len(found) > 1 {
			t.Fatalf("%s is shown %d times", local, len(found))
		}
		return append(found, File{})[0], len(found) == 1
	}
	var f File
	eventually(t, "the acknowledgement", func() bool {
		var ok bool
		f, ok = find("127.0.0.1:4960", c.LocalAddr().String())
		return ok && f.BytesAcked == 2 && f.SndUna == f.SndNxt
	})
	if f.State != tcpEstablished || f.Protocol != unix.IPPROTO_TCP || f.RcvNxt-f.CopiedSeq != 5 || f.BytesReceived != 5 ||
		f.BytesSent != 2 || f.WriteSeq != f.SndNxt || f.NetNS != netnsID(t, ns) || f.PID != os.Getpid() {
		t.Errorf("server's end: got %+v, want 5 bytes unread and 2 sent", f)
	}
	if !f.Tagged || f.Tag.Backend != 7 || f.Tag.Gen != 4 || f.Tag.State != TagOpen || f.Tag.Since <= 0 || f.Tag.Since > BootNow() {
		t.Errorf("server's end: got tag %+v", f.Tag)
	}
	var st unix.Stat_t
	if err := unix.Stat(fmt.Sprintf("/proc/self/fd/%d", f.FD), &st); err != nil || st.Ino != f.Inode {
		t.Errorf("descriptor %d: got inode %d, want %d (%v)", f.FD, f.Inode, st.Ino, err)
	}
	if f.LastReceived < 0 || f.LastReceived > time.Minute || f.LastSent > time.Minute || f.Tick <= 0 || f.Tick > 10*time.Millisecond {
		t.Errorf("got ages %v, %v and a tick of %v", f.LastReceived, f.LastSent, f.Tick)
	}
	if f, ok := find(c.LocalAddr().String(), ""); !ok || f.Tagged {
		t.Errorf("client's end: got %+v, %v, want it without a tag", f, ok)
	}
	l, ok := find("[::]:4960", "")
	if !ok || l.State != tcpListen || !l.Tagged || l.Tag.State != TagListener || l.Tag.Cookie != l.Cookie || l.MaxAckBacklog == 0 {
		t.Errorf("listener: got %+v, %v", l, ok)
	}
	if _, err := h.Files(1 << 30); !errors.Is(err, unix.ESRCH) {
		t.Errorf("files of no process: got %v, want %v", err, unix.ESRCH)
	}
}

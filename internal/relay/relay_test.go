// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/netnstest"
	"github.com/ebbproxy/ebb/proxy"
)

func TestRelayHasNoPrivilege(t *testing.T) {
	netnstest.RequireRoot(t)
	f := newFixture(t)
	p, at := f.start(Options{Peers: []proxy.Peer{{Address: echo(t, "127.0.0.1:0")}}})
	ask(t, dialTCP(t, at), "first") // every thread that carrying needs has been started
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", p.PID()))
	if err != nil || len(threads) < 2 {
		t.Fatalf("got %d threads, %v, want some", len(threads), err)
	}
	for _, path := range threads {
		s, err := readStatusFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if want := (status{noNewPrivs: true}); s != want {
			t.Errorf("%s: got %+v, want %+v", path, s, want)
		}
	}
	// The same look must see a process that has some.
	if s, err := readStatusFile("/proc/self/status"); err != nil || s.effective == 0 || s.bounding == 0 {
		t.Errorf("own status: got %+v, %v, want capabilities", s, err)
	}
}

// TestD1_RelayedBytesSurviveTheOwner kills the owner while 200 transfers run both ways; the next owner finds the relay.
func TestD1_RelayedBytesSurviveTheOwner(t *testing.T) {
	const transfers, before, after = 200, 64 << 10, 192 << 10
	f := newFixture(t)
	owner, at, pid := f.startOwner(sums(t))
	var wg sync.WaitGroup
	halfway, killed := make(chan struct{}, transfers), make(chan struct{})
	for i := range transfers {
		c := dialTCP(t, at)
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(1, uint64(i)))
			sum := sha256.New()
			send := func(n int) error {
				b := make([]byte, n)
				for i := range b {
					b[i] = byte(rng.Uint32())
				}
				sum.Write(b)
				_, err := c.Write(b)
				return err
			}
			err := send(before)
			halfway <- struct{}{}
			<-killed
			if err == nil {
				err = send(after)
			}
			if err == nil {
				err = c.CloseWrite()
			}
			got, rerr := io.ReadAll(c)
			if err := errors.Join(err, rerr); err != nil {
				t.Errorf("transfer %d: %v", i, err)
			} else if want := answerOf(sum, before+after); !bytes.Equal(got, want) {
				t.Errorf("transfer %d: got an answer of %d bytes that is not what was sent, want %d", i, len(got), len(want))
			}
		})
	}
	for range transfers {
		<-halfway
	}
	if err := owner.Process.Kill(); err != nil {
		t.Error(err)
	}
	_ = owner.Wait() // says that it was killed
	p, err := Find(t.Context(), f.dir, f.name)
	close(killed)
	if err != nil {
		t.Fatal(err)
	}
	if p.PID() != pid {
		t.Errorf("found process %d, want %d", p.PID(), pid)
	}
	wg.Wait()
	eventually(t, "every connection over", func() bool { return f.stats(p).Relay.Active == 0 })
	s := f.stats(p)
	if len(s.Late) != 1 || s.Late[0] != (LateCount{proxy.ActionRelay, proxy.ResultDone, transfers}) {
		t.Errorf("got %+v, want %d done", s.Late, transfers)
	}
	if s.Relay.BytesToPeers != transfers*(before+after) {
		t.Errorf("got %d bytes carried, want %d", s.Relay.BytesToPeers, transfers*(before+after))
	}
	if err := p.Stop(t.Context()); err != nil {
		t.Error(err)
	}
	// This owner does not wait for the end either, so the process has to clean up by itself.
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	if dir, err := besideCgroup(f.name); err == nil {
		eventually(t, "its cgroup is gone", func() bool {
			_, err := os.Stat(dir)
			return errors.Is(err, os.ErrNotExist)
		})
	}
	eventually(t, "its process is gone", func() bool { return errors.Is(unix.Kill(pid, 0), unix.ESRCH) })
	if _, err := Find(t.Context(), f.dir, f.name); !errors.Is(err, ErrNone) {
		t.Errorf("after its end: got %v, want %v", err, ErrNone)
	}
	// What was in /proc is gone when whoever adopted it has reaped it; its socket and cgroup are gone already.
	if _, err := os.Lstat(Socket(f.dir, f.name)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("control socket: got %v, want %v", err, os.ErrNotExist)
	}
}

// sums serves connections by an answer that every byte of what came decides: as many bytes as came, made of their sum.
func sums(t *testing.T) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				sum := sha256.New()
				n, err := io.Copy(sum, c)
				if err == nil {
					_, _ = c.Write(answerOf(sum, int(n)))
				}
			}()
		}
	}()
	return l.Addr().(*net.TCPAddr).AddrPort()
}

func answerOf(sum hash.Hash, n int) []byte {
	return bytes.Repeat(sum.Sum(nil), n/sum.Size())
}

func TestAdoptByDescriptor(t *testing.T) {
	f := newFixture(t)
	p, _ := f.start(Options{Peers: []proxy.Peer{{Address: echo(t, "127.0.0.1:0")}}})
	// An application's listener, out of whose queue connections are taken.
	app, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer app.Close()
	for i := range 20 {
		c := dialTCP(t, app.Addr().(*net.TCPAddr).AddrPort())
		s, err := app.Accept()
		if err != nil {
			t.Fatal(err)
		}
		file, err := s.(*net.TCPConn).File()
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Adopt(t.Context(), int(file.Fd())); err != nil {
			t.Fatal(err)
		}
		file.Close()
		s.Close()
		ask(t, c, fmt.Sprintf("adopted %d", i))
		c.Close()
	}
	eventually(t, "every connection over", func() bool { return f.stats(p).Relay.Active == 0 })
	if s := f.stats(p); s.Relay.Accepted != 20 || s.Relay.Results[proxy.ResultDone] != 20 {
		t.Errorf("got %+v, want 20 accepted and done", s.Relay)
	}
	// What is no connection is refused, and harms nothing.
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	if err := p.Adopt(t.Context(), int(null.Fd())); !errors.Is(err, ErrCommand) {
		t.Errorf("adopt of a device: got %v, want %v", err, ErrCommand)
	}
	if s := f.stats(p); s.Relay.Accepted != 20 {
		t.Errorf("got %d accepted, want still 20", s.Relay.Accepted)
	}
}

// TestD9_ParkedConnectionsAreReleasedPaced parks connections and releases them into a server whose backlog is 5 and that
// takes a moment for each.
func TestD9_ParkedConnectionsAreReleasedPaced(t *testing.T) {
	for _, listen := range []string{"127.0.0.1", "[::1]"} {
		t.Run(listen, func(t *testing.T) {
			const parked = 300
			f := newFixture(t)
			p, at := f.startOn(listen+":0", Options{Parked: true, Park: proxy.ParkOptions{For: patience}})
			var clients []*net.TCPConn
			for i := range parked {
				c := dialTCP(t, at)
				// What a client sends while it is parked must be there when it is carried.
				if _, err := fmt.Fprintf(c, "early %d\n", i); err != nil {
					t.Fatal(err)
				}
				clients = append(clients, c)
			}
			eventually(t, "all are parked", func() bool { return f.stats(p).Relay.Parked == parked })
			if err := p.Release(t.Context(), proxy.Peer{Address: slowServer(t, listen)}); err != nil {
				t.Fatal(err)
			}
			for i, c := range clients {
				line, err := bufio.NewReader(c).ReadString('\n')
				if want := fmt.Sprintf("early %d\n", i); err != nil || line != want {
					t.Errorf("client %d: got %q, %v, want %q", i, line, err, want)
				}
				c.Close()
			}
			eventually(t, "every connection over", func() bool { return f.stats(p).Relay.Active == 0 })
			s := f.stats(p)
			if s.Relay.Parked != 0 || s.Parking || len(s.Late) != 1 || s.Late[0] != (LateCount{proxy.ActionHold, proxy.ResultDone, parked}) {
				t.Errorf("got %+v, parked %d, want %d held and done", s.Late, s.Relay.Parked, parked)
			}
		})
	}
}

// slowServer echoes a line at a time, one connection after the other, with a backlog of 5.
func slowServer(t *testing.T, host string) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp", host+":0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	raw, err := l.(*net.TCPListener).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := raw.Control(func(fd uintptr) { err = unix.Listen(int(fd), 5) }); err != nil {
		t.Fatal(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			if line, err := bufio.NewReader(c).ReadBytes('\n'); err == nil {
				timer := time.NewTimer(2 * time.Millisecond) // the work of a request
				<-timer.C
				_, _ = c.Write(line)
			}
			c.Close()
		}
	}()
	return l.Addr().(*net.TCPAddr).AddrPort()
}

func TestD9_ParkingIsBounded(t *testing.T) {
	f := newFixture(t)
	const most = 10
	p, at := f.start(Options{Park: proxy.ParkOptions{Max: most, For: 300 * time.Millisecond}})
	if err := p.Park(t.Context()); err != nil {
		t.Fatal(err)
	}
	var clients []*net.TCPConn
	for range most {
		clients = append(clients, dialTCP(t, at))
	}
	eventually(t, "all are accepted", func() bool { return f.stats(p).Relay.Accepted >= most })
	for range 5 {
		// The reset may be there before the caller knows that it is connected.
		c, err := net.DialTimeout("tcp", at.String(), patience)
		if errors.Is(err, unix.ECONNRESET) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		clients = append(clients, c.(*net.TCPConn))
	}
	for _, c := range clients {
		wantReset(t, c)
	}
	eventually(t, "every connection over", func() bool { return f.stats(p).Relay.Active == 0 })
	var overflow, expired uint64
	s := f.stats(p)
	for _, l := range s.Late {
		if l.Action != proxy.ActionHold {
			t.Errorf("got action %s, want %s", l.Action, proxy.ActionHold)
		}
		switch l.Result {
		case proxy.ResultOverflow:
			overflow = l.N
		case proxy.ResultExpired:
			expired = l.N
		}
	}
	// On a machine that stands still, one that was parked has expired before the next one came.
	if overflow+expired != most+5 || overflow > 5 {
		t.Errorf("got %d beyond the bound and %d expired, want at most 5 and together %d", overflow, expired, most+5)
	}
	if !s.Parking {
		t.Error("it parks no more, want it to until it is released")
	}
}

// TestAStoppingRelayGivesItsNameUp has a second relay of the name begin while the first one still carries.
func TestAStoppingRelayGivesItsNameUp(t *testing.T) {
	f := newFixture(t)
	server := echo(t, "127.0.0.1:0")
	first, at := f.start(Options{Peers: []proxy.Peer{{Address: server}}})
	carried := dialTCP(t, at)
	ask(t, carried, "before")
	if err := first.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "its name is free", func() bool {
		_, err := Find(t.Context(), f.dir, f.name)
		return errors.Is(err, ErrNone)
	})
	second, at := f.start(Options{Peers: []proxy.Peer{{Address: server}}})
	ask(t, dialTCP(t, at), "by the second")
	ask(t, carried, "after")
	carried.Close()
	f.ended(first)
	// The end of the first has taken nothing of the second's away.
	found, err := Find(t.Context(), f.dir, f.name)
	if err != nil {
		t.Fatal(err)
	}
	defer found.Close()
	if found.PID() != second.PID() {
		t.Errorf("found %d, want %d", found.PID(), second.PID())
	}
	if a, b := f.stats(found).Listener, f.stats(second).Listener; a == 0 || a != b {
		t.Errorf("listener's cookie: got %d and %d, want the same", a, b)
	}
}

func TestStopEndsWhenNothingIsCarried(t *testing.T) {
	f := newFixture(t)
	p, at := f.start(Options{Peers: []proxy.Peer{{Address: echo(t, "127.0.0.1:0")}}})
	carried := dialTCP(t, at)
	ask(t, carried, "before")
	if err := p.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	// Its listener closes, and what it carries goes on.
	eventually(t, "nothing is accepted", func() bool {
		c, err := net.Dial("tcp", at.String())
		if err == nil {
			c.Close()
		}
		return errors.Is(err, unix.ECONNREFUSED)
	})
	ask(t, carried, "after")
	if s := f.stats(p); !s.Stopping || s.Relay.Active != 1 {
		t.Errorf("got %+v, want it stopping with 1 carried", s)
	}
	if err := carried.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(carried); err != nil {
		t.Errorf("end of the carried connection: %v", err)
	}
	f.ended(p)
	if _, err := p.Stats(t.Context()); !errors.Is(err, ErrEnded) {
		t.Errorf("after its end: got %v, want %v", err, ErrEnded)
	}
	if err := p.Stop(t.Context()); err != nil {
		t.Errorf("stop of one that has ended: got %v, want nil", err)
	}
}

// TestG1_OrphanEndsAfterItsTime has a relay that nobody owns end once its time is over and it carries nothing, and not
// before either.
func TestG1_OrphanEndsAfterItsTime(t *testing.T) {
	f := newFixture(t)
	owned, at := f.start(Options{Peers: []proxy.Peer{{Address: echo(t, "127.0.0.1:0")}}, Until: time.Now().Add(200 * time.Millisecond), OrphanFor: 50 * time.Millisecond})
	carried := dialTCP(t, at)
	ask(t, carried, "while it is owned")
	// Its time is over now, or soon; the owner goes, and one looks in now and then, as a status command would.
	pidfd, err := unix.PidfdOpen(owned.PID(), 0)
	if err != nil {
		t.Fatal(err)
	}
	gone := os.NewFile(uintptr(pidfd), "pidfd")
	defer gone.Close()
	owned.mu.Lock()
	owned.conn.Close()
	owned.conn = nil
	owned.mu.Unlock()
	eventually(t, "its listener closes", func() bool {
		c, err := net.Dial("tcp", at.String())
		if err == nil {
			c.Close()
		}
		return errors.Is(err, unix.ECONNREFUSED)
	})
	ask(t, carried, "after its time")
	select {
	case <-owned.Done():
		t.Fatal("it has ended although it carries a connection")
	default:
	}
	carried.Close()
	f.ended(owned)
}

func TestTerminationIsForTheOwnerToDecide(t *testing.T) {
	f := newFixture(t)
	p, at := f.start(Options{Peers: []proxy.Peer{{Address: echo(t, "127.0.0.1:0")}}})
	for _, sig := range []unix.Signal{unix.SIGTERM, unix.SIGHUP, unix.SIGINT} {
		if err := unix.Kill(p.PID(), sig); err != nil {
			t.Fatal(err)
		}
	}
	c := dialTCP(t, at)
	ask(t, c, "still here")
	c.Close()
	if s := f.stats(p); s.Stopping {
		t.Error("a signal has stopped a relay that is owned")
	}
	p.mu.Lock()
	p.conn.Close() // the owner is gone
	p.conn = nil
	p.mu.Unlock()
	// The end of the session is seen in its own time, so the signal may have to be sent again.
	eventually(t, "it ends at SIGTERM", func() bool {
		_ = unix.Kill(p.PID(), unix.SIGTERM)
		select {
		case <-p.Done():
			return true
		default:
			return false
		}
	})
}

func TestBadCommandsAreRefusedInWords(t *testing.T) {
	f := newFixture(t)
	p, at := f.start(Options{Peers: []proxy.Peer{{Address: echo(t, "127.0.0.1:0")}}})
	carried := dialTCP(t, at)
	ask(t, carried, "before")
	for _, v := range []struct {
		name, packet string
		fds          int
		want         string
	}{
		{"no JSON", `stop`, 0, "read command"},
		{"half of it", `{"version":1,"op":`, 0, "read command"},
		{"two at once", `{"version":1,"op":"stop"}{"version":1,"op":"stop"}`, 0, "more than one document"},
		{"unknown member", `{"version":1,"op":"stop","when":"now"}`, 0, "unknown field"},
		{"unknown command", `{"version":1,"op":"explode"}`, 0, `"explode" is not a command`},
		{"other version", `{"version":7,"op":"stop"}`, 0, "version 7"},
		{"no version", `{"op":"stop"}`, 0, "version 0"},
		{"configured twice", `{"version":1,"op":"configure","config":{"name":"x","until":"2100-01-01T00:00:00Z"}}`, 0, "configured already"},
		{"configure nothing", `{"version":1,"op":"configure"}`, 0, "without a configuration"},
		{"adopt nothing", `{"version":1,"op":"adopt"}`, 0, "takes 1 descriptors, got 0"},
		{"adopt two", `{"version":1,"op":"adopt"}`, 2, "takes 1 descriptors, got 2"},
		{"stop with a descriptor", `{"version":1,"op":"stop"}`, 1, "takes 0 descriptors, got 1"},
		{"too many descriptors", `{"version":1,"op":"stop"}`, maxRights + 1, "descriptors"},
		{"bad peer", `{"version":1,"op":"peers","peers":[{"Address":"0.0.0.0:0"}]}`, 0, "not an address"},
		{"peer in a loop", fmt.Sprintf(`{"version":1,"op":"peers","peers":[{"Address":%q}]}`, at), 0, "own listener"},
		{"too long", `{"version":1,"op":"` + strings.Repeat("x", maxPacket) + `"}`, 0, "more than"},
	} {
		t.Run(v.name, func(t *testing.T) {
			c, err := dial(t.Context(), Socket(f.dir, f.name))
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			var oob []byte
			if v.fds > 0 {
				fds := make([]int, v.fds)
				for i := range fds {
					if fds[i], err = unix.Dup(2); err != nil {
						t.Fatal(err)
					}
				}
				oob = unix.UnixRights(fds...)
				defer closeAll(fds)
			}
			if _, _, err := c.WriteMsgUnix([]byte(v.packet), oob, nil); err != nil {
				t.Fatal(err)
			}
			if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
				t.Fatal(err)
			}
			b := make([]byte, maxPacket)
			n, _, err := receive(c, b)
			if err != nil || !strings.Contains(string(b[:n]), strings.ReplaceAll(v.want, `"`, `\"`)) || !strings.HasPrefix(string(b[:n]), `{"error":`) {
				t.Errorf("got %s, %v, want an error with %q", b[:n], err, v.want)
			}
		})
	}
	ask(t, carried, "after")
	if s := f.stats(p); s.Stopping || len(s.Peers) != 1 {
		t.Errorf("got %+v, want nothing changed", s)
	}
}

func TestNothingIsDoneBeforeItIsConfigured(t *testing.T) {
	s := &server{wake: make(chan struct{}, 1)}
	for _, op := range []string{opPeers, opPark, opRelease, opStats, opStop, opExtend} {
		if _, err := s.command(request{Op: op}, new([]int)); err == nil || !strings.Contains(err.Error(), "before configure") {
			t.Errorf("%s: got %v, want an error", op, err)
		}
	}
	if s.stopping {
		t.Error("it is stopping")
	}
}

func TestOneRelayOfAName(t *testing.T) {
	f := newFixture(t)
	if _, err := Find(t.Context(), f.dir, f.name); !errors.Is(err, ErrNone) {
		t.Fatalf("find of none: got %v, want %v", err, ErrNone)
	}
	p, _ := f.start(Options{})
	l, _, err := listener("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	o := Options{Name: f.name, RunDir: f.dir, Until: time.Now().Add(time.Hour)}
	if _, err := Start(t.Context(), l, o); !errors.Is(err, ErrInUse) {
		t.Errorf("start of a second one: got %v, want %v", err, ErrInUse)
	}
	f.stats(p)
	// One that was killed leaves its socket, which is in nobody's way.
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	f.ended(p)
	if _, err := os.Lstat(Socket(f.dir, f.name)); err != nil {
		t.Fatalf("a killed relay's socket: %v", err)
	}
	again, _ := f.start(Options{})
	found, err := Find(t.Context(), f.dir, f.name)
	if err != nil {
		t.Fatal(err)
	}
	if found.PID() != again.PID() || found.Place() != again.Place() {
		t.Errorf("found %d in %s, want %d in %s", found.PID(), found.Place(), again.PID(), again.Place())
	}
	if err := found.Close(); err != nil {
		t.Error(err)
	}
	f.end(again)
	if _, err := Find(t.Context(), f.dir, f.name); !errors.Is(err, ErrNone) {
		t.Errorf("find of a killed one: got %v, want %v", err, ErrNone)
	}
	if _, err := os.Lstat(Socket(f.dir, f.name)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("stale socket after find: got %v, want %v", err, os.ErrNotExist)
	}
}

// TestWhatIsNoListenerIsRefused starts relays that cannot work; nothing may be left of them.
func TestWhatIsNoListenerIsRefused(t *testing.T) {
	f := newFixture(t)
	var lc net.ListenConfig
	lc.SetMultipathTCP(true)
	l, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	mptcp, err := l.(*net.TCPListener).File()
	if err != nil {
		t.Fatal(err)
	}
	defer mptcp.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	o := Options{Name: f.name, RunDir: f.dir, Until: time.Now().Add(time.Hour)}
	for _, v := range []struct {
		file *os.File
		o    func(Options) Options
		want error
	}{
		{mptcp, func(o Options) Options { return o }, ErrCommand},
		{null, func(o Options) Options { return o }, ErrEnded},
		{null, func(o Options) Options { o.Until = time.Now(); return o }, nil},
		{null, func(o Options) Options { o.Name = strings.Repeat("x", 120); return o }, nil},
		{null, func(o Options) Options { o.Exe = "/nonexistent"; return o }, os.ErrNotExist},
	} {
		p, err := Start(t.Context(), v.file, v.o(o))
		if err == nil {
			f.end(p)
			t.Error("a relay that cannot work has started")
		} else if v.want != nil && !errors.Is(err, v.want) {
			t.Errorf("got %v, want %v", err, v.want)
		}
		if _, err := os.Lstat(Socket(f.dir, f.name)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("control socket after %v: got %v, want %v", v.want, err, os.ErrNotExist)
		}
	}
}

// TestRelayLeaksNothing carries many connections of every end, and wants as many descriptors afterwards as before.
func TestRelayLeaksNothing(t *testing.T) {
	f := newFixture(t)
	server := echo(t, "127.0.0.1:0")
	p, at := f.start(Options{Peers: []proxy.Peer{{Address: server}}})
	count := func() int {
		fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.PID()))
		if err != nil {
			t.Fatal(err)
		}
		return len(fds)
	}
	round := func() {
		for range 100 {
			c := dialTCP(t, at)
			ask(t, c, "x")
			c.Close()
			c = dialTCP(t, at)
			ask(t, c, "x")
			if err := c.SetLinger(0); err != nil {
				t.Fatal(err)
			}
			c.Close()
		}
		other, err := Find(t.Context(), f.dir, f.name)
		if err != nil {
			t.Fatal(err)
		}
		if err := other.Adopt(t.Context(), 2); err == nil {
			t.Error("adopt of standard error: got nil, want an error")
		}
		if err := other.Close(); err != nil {
			t.Error(err)
		}
		eventually(t, "every connection over", func() bool { return f.stats(p).Relay.Active == 0 })
	}
	round()
	before := count()
	for range 3 {
		round()
	}
	eventually(t, "descriptors are what they were", func() bool { return count() <= before })
}

// TestPlaceIsSaid looks where the process lives, and that nothing of that place is left.
func TestPlaceIsSaid(t *testing.T) {
	netnstest.RequireRoot(t)
	f := newFixture(t)
	dir, err := besideCgroup(f.name)
	if err != nil {
		t.Skipf("no cgroup can be made here: %v", err)
	}
	p, _ := f.start(Options{})
	if p.Place() != PlaceCgroup {
		t.Fatalf("place is %s, want %s", p.Place(), PlaceCgroup)
	}
	procs, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
	if err != nil || strings.TrimSpace(string(procs)) != fmt.Sprint(p.PID()) {
		t.Errorf("processes of %s: got %q, %v, want %d", dir, procs, err, p.PID())
	}
	f.end(p)
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("cgroup after its end: got %v, want %v", err, os.ErrNotExist)
	}
}

// TestScopeKeepsDescriptorsAndProcess stands a script in for systemd-run, which does what that does in the end: it
// becomes the command. One that fails, as without a bus, is no obstacle.
func TestScopeKeepsDescriptorsAndProcess(t *testing.T) {
	for _, v := range []struct {
		script string
		want   func(Place) bool
	}{
		{"#!/bin/sh\nwhile [ \"$1\" != -- ]; do shift; done\nshift\nexec \"$@\"\n", func(p Place) bool { return p == PlaceScope }},
		{"#!/bin/sh\necho no bus >&2\nexit 1\n", func(p Place) bool { return p == PlaceCgroup || p == PlaceBeside }},
	} {
		f := newFixture(t)
		bin := t.TempDir()
		if err := os.WriteFile(filepath.Join(bin, "systemd-run"), []byte(v.script), 0o755); err != nil {
			t.Fatal(err)
		}
		t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
		was := systemd
		systemd = bin
		p, at := f.start(Options{Peers: []proxy.Peer{{Address: echo(t, "127.0.0.1:0")}}})
		systemd = was
		if !v.want(p.Place()) {
			t.Errorf("place is %s after\n%s", p.Place(), v.script)
		}
		ask(t, dialTCP(t, at), "carried")
		if s := f.stats(p); s.Place != p.Place() || s.PID != p.PID() {
			t.Errorf("process says %d in %s, want %d in %s", s.PID, s.Place, p.PID(), p.Place())
		}
	}
}

func FuzzDecodeRequest(f *testing.F) {
	f.Add([]byte(`{"version":1,"op":"stop"}`))
	f.Add([]byte(`{"version":1,"op":"release","peers":[{"Own":true,"Ports":[61000,65535]}]}`))
	f.Add([]byte(`{"version":1,"op":"configure","config":{"name":"x","place":"scope","park":{"Max":1},"until":"2100-01-01T00:00:00Z"}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		q, err := decodeRequest(b)
		if err == nil && q.Version != protocolVersion {
			t.Errorf("version %d was accepted", q.Version)
		}
	})
}

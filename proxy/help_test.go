// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// patience is how long a test waits for what has to come.
const patience = 60 * time.Second

// leakCheck fails the test if it leaves descriptors or goroutines behind.
func leakCheck(t *testing.T) {
	t.Helper()
	// The netpoller has its descriptors from the first socket on.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	fds, goroutines := countFDs(t), runtime.NumGoroutine()
	t.Cleanup(func() {
		if t.Failed() {
			return
		}
		var f, g int
		if !eventually(func() bool {
			f, g = countFDs(t), runtime.NumGoroutine()
			return f <= fds && g <= goroutines
		}) {
			stacks := make([]byte, 1<<20)
			t.Errorf("left behind: %d descriptors (before %d), %d goroutines (before %d)\n%s", f, fds, g, goroutines, stacks[:runtime.Stack(stacks, true)])
		}
	})
}

func countFDs(t *testing.T) int {
	t.Helper()
	names, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(names)
}

// eventually waits for what another goroutine or the kernel does in its own time.
func eventually(ok func() bool) bool {
	end := time.Now().Add(patience)
	for pause := 100 * time.Microsecond; ; pause = min(2*pause, 50*time.Millisecond) {
		if ok() {
			return true
		}
		if time.Now().After(end) {
			return false
		}
		timer := time.NewTimer(pause)
		<-timer.C
	}
}

// listen makes a plain TCP listener.
func listen(t testing.TB, network, addr string) *net.TCPListener {
	t.Helper()
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	l, err := lc.Listen(t.Context(), network, addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l.(*net.TCPListener)
}

// address of a listener, as one can dial it.
func address(l net.Listener) netip.AddrPort {
	ap := l.Addr().(*net.TCPAddr).AddrPort()
	ap = netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
	if ap.Addr().IsUnspecified() {
		return netip.AddrPortFrom(netip.IPv6Loopback(), ap.Port())
	}
	return ap
}

// backend serves connections with f until the test ends, and closes each after it.
func backend(t testing.TB, network, addr string, f func(*net.TCPConn)) netip.AddrPort {
	t.Helper()
	l := listen(t, network, addr)
	serveBackend(t, l, f)
	return address(l)
}

func serveBackend(t testing.TB, l *net.TCPListener, f func(*net.TCPConn)) {
	t.Helper()
	var wg sync.WaitGroup
	var mu sync.Mutex
	conns := make(map[*net.TCPConn]bool)
	over := false
	wg.Go(func() {
		for {
			c, err := l.AcceptTCP()
			if err != nil {
				return
			}
			mu.Lock()
			if over {
				mu.Unlock()
				c.Close()
				return
			}
			conns[c] = true
			mu.Unlock()
			wg.Go(func() {
				f(c)
				c.Close()
				mu.Lock()
				delete(conns, c)
				mu.Unlock()
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		mu.Lock()
		over = true
		for c := range conns {
			c.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
}

// echo answers with what it reads, and finishes when the other side has.
func echo(c *net.TCPConn) {
	// Not spliced: the pipes for that would stay open for a while.
	if _, err := io.Copy(struct{ io.Writer }{c}, struct{ io.Reader }{c}); err == nil {
		c.CloseWrite()
	}
}

// start starts a relay, which is closed when the test ends.
func start(t testing.TB, o Options) *Relay {
	t.Helper()
	if o.Log == nil && testing.Verbose() {
		o.Log = slog.New(slog.NewTextHandler(logWriter{t}, nil))
	}
	if o.Loops == 0 {
		o.Loops = 2 // whatever the machine has
	}
	if o.Probe.Interval == 0 {
		o.Probe.Interval = Never // a probe is a connection that tests would have to expect
	}
	r, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Errorf("close relay: %v", err)
		}
		if s := r.Stats(); s.Active != 0 || s.Parked != 0 || s.Pipes != 0 {
			t.Errorf("after close: got %+v, want nothing held", s)
		}
		for _, p := range r.Peers() {
			if p.InFlight != 0 {
				t.Errorf("after close: %d in flight to %v, want none", p.InFlight, p.Peer.Address)
			}
		}
	})
	return r
}

type logWriter struct{ t testing.TB }

func (w logWriter) Write(b []byte) (int, error) {
	w.t.Log(strings.TrimSpace(string(b)))
	return len(b), nil
}

// serve serves a new listener and returns its address.
func serve(t testing.TB, r *Relay, network, addr string) netip.AddrPort {
	t.Helper()
	l := listen(t, network, addr)
	serveListener(t, r, l)
	return address(l)
}

func serveListener(t testing.TB, r *Relay, l syscall.Conn) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
}

func dial(t testing.TB, to netip.AddrPort) *net.TCPConn {
	t.Helper()
	c, err := net.DialTimeout("tcp", to.String(), patience)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	return c.(*net.TCPConn)
}

// ask sends a line and expects it back.
func ask(c net.Conn, line string) error {
	if _, err := io.WriteString(c, line); err != nil {
		return err
	}
	got := make([]byte, len(line))
	if _, err := io.ReadFull(c, got); err != nil {
		return err
	}
	if string(got) != line {
		return errors.New("got " + string(got) + ", want " + line)
	}
	return nil
}

// isReset tells whether a connection ended by a reset. A write that meets it is told EPIPE if a read was told before.
func isReset(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

func wantResult(t *testing.T, r *Relay, v Result, n uint64) {
	t.Helper()
	var got uint64
	if !eventually(func() bool { got = r.Stats().Results[v]; return got == n }) {
		t.Errorf("got %d connections with result %s, want %d: %+v", got, v, n, r.Stats())
	}
}

func waitIdle(t *testing.T, r *Relay) {
	t.Helper()
	select {
	case <-r.Idle():
	case <-time.After(patience):
		t.Fatalf("relay is not idle: %+v", r.Stats())
	}
}

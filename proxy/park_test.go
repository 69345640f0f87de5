// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// small is a bound socket that becomes a listener with a backlog of 5 when told to.
func small(t *testing.T) (to netip.AddrPort, open func() *net.TCPListener) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "listener")
	t.Cleanup(func() { f.Close() })
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	return name(int32(fd), unix.SYS_GETSOCKNAME), func() *net.TCPListener {
		if err := unix.Listen(fd, 5); err != nil {
			t.Fatal(err)
		}
		l, err := net.FileListener(f)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		return l.(*net.TCPListener)
	}
}

// TestParkedAreReleasedIntoSmallBacklog: connections wait while nobody serves, are released before their successor
// listens, and every one is served although its backlog is 5.
func TestParkedAreReleasedIntoSmallBacklog(t *testing.T) {
	leakCheck(t)
	const n = 400
	to, open := small(t)
	m := &counted{}
	r := start(t, Options{Metrics: m, Park: ParkOptions{For: patience}})
	r.Park()
	at := serve(t, r, "tcp", "127.0.0.1:0")
	var wg sync.WaitGroup
	for i := range n {
		c := dial(t, at)
		if i == n/2 {
			continue // says nothing until its server has
		}
		wg.Go(func() {
			if err := ask(c, fmt.Sprintf("request %d", i)); err != nil {
				t.Errorf("connection %d: %v", i, err)
			}
			c.Close()
		})
	}
	if !eventually(func() bool { return r.Stats().Parked == n }) {
		t.Fatalf("got %+v, want %d parked", r.Stats(), n)
	}
	if err := r.Release(Peer{Address: to}); err != nil {
		t.Fatal(err)
	}
	if !eventually(func() bool { return r.Stats().DialFailures > 0 }) {
		t.Errorf("got %+v, want dials that fail while nobody listens", r.Stats())
	}
	if p := r.Stats().Parked; p != n {
		t.Errorf("%d are parked while nobody listens, want %d", p, n)
	}
	serveBackend(t, open(), echo)
	if !eventually(func() bool { return r.Stats().Parked == 0 }) {
		t.Errorf("got %+v, want none parked", r.Stats())
	}
	wg.Wait()
	if !eventually(func() bool { return m.get("hold done") == n-1 }) {
		t.Errorf("got %v, want %d held and done", m.n, n-1)
	}
	// From now on connections are carried at once.
	c := dial(t, at)
	if err := ask(c, "hello"); err != nil {
		t.Error(err)
	}
	c.Close()
	if !eventually(func() bool { return m.get("relay done") == 1 }) {
		t.Errorf("got %v, want one relayed and done", m.n)
	}
}

// TestParkIsBounded: in number and in time, and what is turned away is told by a reset before a byte was taken.
func TestParkIsBounded(t *testing.T) {
	leakCheck(t)
	m := &counted{}
	r := start(t, Options{Metrics: m, Park: ParkOptions{Max: 5, For: 500 * time.Millisecond}})
	r.Park()
	at := serve(t, r, "tcp", "127.0.0.1:0")
	var conns []*net.TCPConn
	for range 8 {
		c, err := net.Dial("tcp", at.String())
		if isReset(err) {
			continue // as soon as that
		}
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(patience))
		// The kernel tells a reset once, to a read or to a write.
		if _, err := io.WriteString(c, "GET / HTTP/1.1\r\n\r\n"); !isReset(err) {
			conns = append(conns, c.(*net.TCPConn))
		}
	}
	if !eventually(func() bool { return m.get("hold overflow") >= 3 }) {
		t.Errorf("got %v, want three that overflowed", m.n)
	}
	for i, c := range conns {
		if n, err := c.Read(make([]byte, 1)); !isReset(err) {
			t.Errorf("connection %d: got %d, %v, want a reset", i, n, err)
		}
	}
	waitIdle(t, r)
	if over, late := m.get("hold overflow"), m.get("hold expired"); over+late != 8 || late < 5 {
		t.Errorf("got %v, want eight resets, five of which waited", m.n)
	}
	if s := r.Stats(); s.BytesToPeers != 0 || s.Parked != 0 {
		t.Errorf("got %+v, want nothing carried and none parked", s)
	}
}

// TestReleasedWithoutSuccessorExpires: released connections are tried until their time is over.
func TestReleasedWithoutSuccessorExpires(t *testing.T) {
	leakCheck(t)
	r := start(t, Options{Peers: []Peer{{Address: refused(t)}}, Park: ParkOptions{For: 300 * time.Millisecond}})
	r.Park()
	at := serve(t, r, "tcp", "127.0.0.1:0")
	a, b := dial(t, at), dial(t, at)
	if !eventually(func() bool { return r.Stats().Parked == 2 }) {
		t.Fatalf("got %+v, want two parked", r.Stats())
	}
	if err := r.Release(); err != nil {
		t.Fatal(err)
	}
	b.SetLinger(0)
	b.Close()
	if n, err := a.Read(make([]byte, 1)); !isReset(err) {
		t.Errorf("got %d, %v, want a reset", n, err)
	}
	waitIdle(t, r)
	wantResult(t, r, ResultExpired, 1)
	wantResult(t, r, ResultGone, 1)
	if s := r.Stats(); s.DialFailures < 2 {
		t.Errorf("got %+v, want repeated dials", s)
	}
}

// TestParkedClientLeaves: it makes room at once.
func TestParkedClientLeaves(t *testing.T) {
	leakCheck(t)
	to := backend(t, "tcp", "127.0.0.1:0", echo)
	r := start(t, Options{Peers: []Peer{{Address: to}}, Park: ParkOptions{For: patience}})
	r.Park()
	at := serve(t, r, "tcp", "127.0.0.1:0")
	gone, half := dial(t, at), dial(t, at)
	io.WriteString(half, "hello")
	half.CloseWrite() // it has finished, and waits for its answer
	if !eventually(func() bool { return r.Stats().Parked == 2 }) {
		t.Fatalf("got %+v, want two parked", r.Stats())
	}
	gone.SetLinger(0)
	gone.Close()
	wantResult(t, r, ResultGone, 1)
	if err := r.Release(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(half); err != nil || string(got) != "hello" {
		t.Errorf("got %q, %v, want hello", got, err)
	}
}

// TestParkAgain: whoever comes while others are released waits behind them, and a relay can park again.
func TestParkAgain(t *testing.T) {
	leakCheck(t)
	to := backend(t, "tcp", "127.0.0.1:0", echo)
	r := start(t, Options{Peers: []Peer{{Address: to}}, Park: ParkOptions{For: patience}})
	at := serve(t, r, "tcp", "127.0.0.1:0")
	for range 3 {
		r.Park()
		var conns []*net.TCPConn
		for range 20 {
			conns = append(conns, dial(t, at))
		}
		if !eventually(func() bool { return r.Stats().Parked == 20 }) {
			t.Fatalf("got %+v, want 20 parked", r.Stats())
		}
		if err := r.Release(); err != nil {
			t.Fatal(err)
		}
		conns = append(conns, dial(t, at))
		for _, c := range conns {
			if err := ask(c, "hello"); err != nil {
				t.Error(err)
			}
			c.Close()
		}
		waitIdle(t, r)
	}
	if got := r.Stats().Results[ResultDone]; got != 63 {
		t.Errorf("%d are done, want 63", got)
	}
}

// httpBackend answers every request with 200 and its path.
func httpBackend(t *testing.T) netip.AddrPort {
	return backend(t, "tcp", "127.0.0.1:0", func(c *net.TCPConn) {
		b := bufio.NewReader(c)
		for {
			line, err := b.ReadString('\n')
			if err != nil {
				return
			}
			for {
				if h, err := b.ReadString('\n'); err != nil || h == "\r\n" {
					break
				}
			}
			path := strings.Fields(line)[1]
			fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(path), path)
		}
	})
}

// TestHealthChecksAreTurnedAway: by path with a 503, by source with a reset; what else comes is relayed unchanged.
func TestHealthChecksAreTurnedAway(t *testing.T) {
	leakCheck(t)
	to := httpBackend(t)
	m := &counted{}
	r := start(t, Options{Peers: []Peer{{Address: to}}, Metrics: m, Health: &Health{
		Path: "/healthz", From: []netip.Prefix{netip.MustParsePrefix("127.5.0.0/16")}, Within: patience,
	}})
	at := serve(t, r, "tcp", "127.0.0.1:0")
	const rest = " HTTP/1.1\r\nHost: a\r\n\r\n"
	for _, tt := range []struct{ request, want string }{
		{"GET /healthz" + rest, "HTTP/1.1 503"},
		{"HEAD /healthz" + rest, "HTTP/1.1 503"},
		{"GET /healthz?full=1" + rest, "HTTP/1.1 503"},
		{"\r\nGET /healthz HTTP/1.0\r\n\r\n", "HTTP/1.1 503"},
		{"GET /healthzz" + rest, "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n/healthzz"},
		{"GET /" + rest, "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n/"},
		{"POST /healthz" + rest, "HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n/healthz"},
	} {
		for _, pieces := range []bool{false, true} {
			c := dial(t, at)
			if pieces {
				for i := range tt.request {
					io.WriteString(c, tt.request[i:i+1])
				}
			} else {
				io.WriteString(c, tt.request)
			}
			if strings.HasPrefix(tt.want, "HTTP/1.1 503") {
				got, err := io.ReadAll(c)
				if err != nil || !strings.HasPrefix(string(got), tt.want) || !strings.Contains(string(got), "Connection: close\r\n") {
					t.Errorf("%q: got %q, %v, want %s and the end", tt.request, got, err, tt.want)
				}
			} else {
				got := make([]byte, len(tt.want))
				if _, err := io.ReadFull(c, got); err != nil || string(got) != tt.want {
					t.Errorf("%q: got %q, %v, want %q", tt.request, got, err, tt.want)
				}
			}
			c.Close()
		}
	}
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 5, 1, 2)}}
	c, err := d.Dial("tcp", at.String())
	if err == nil {
		defer c.Close()
		c.SetDeadline(time.Now().Add(patience))
		_, err = c.Read(make([]byte, 1))
	}
	if !isReset(err) {
		t.Errorf("from a checker's address: got %v, want a reset", err)
	}
	waitIdle(t, r)
	if got := m.get("health refused"); got != 9 {
		t.Errorf("got %v, want 9 checks", m.n)
	}
	if got := m.get("relay done"); got != 6 {
		t.Errorf("got %v, want 6 relayed", m.n)
	}
}

// TestHealthCheckWaitsNoLonger: what does not send a request line in time is relayed.
func TestHealthCheckWaitsNoLonger(t *testing.T) {
	leakCheck(t)
	to := backend(t, "tcp", "127.0.0.1:0", echo)
	r := start(t, Options{Peers: []Peer{{Address: to}}, Health: &Health{Path: "/healthz", Within: 20 * time.Millisecond}})
	at := serve(t, r, "tcp", "127.0.0.1:0")
	c := dial(t, at)
	io.WriteString(c, "GET /heal")
	got := make([]byte, 9)
	if _, err := io.ReadFull(c, got); err != nil || string(got) != "GET /heal" {
		t.Errorf("got %q, %v, want the beginning back", got, err)
	}
	if err := ask(c, "thz HTTP/1.1\r\n\r\n"); err != nil {
		t.Error(err)
	}
	half := dial(t, at)
	io.WriteString(half, "GE")
	half.CloseWrite()
	if got, err := io.ReadAll(half); err != nil || string(got) != "GE" {
		t.Errorf("got %q, %v, want GE", got, err)
	}
}

func TestJudge(t *testing.T) {
	const path = "/healthz"
	for _, tt := range []struct {
		in   string
		want verdict
	}{
		{"", verdictMore}, {"G", verdictMore}, {"\r", verdictMore}, {"\r\n", verdictMore}, {"\r\n\r\nHEAD ", verdictMore},
		{"GET /healthz", verdictMore}, {"GET /healthz ", verdictMore}, {"GET /healthz HTT", verdictMore},
		{"GET /healthz?", verdictMore}, {"GET /healthz?a=b c", verdictOther},
		{"GET /healthz HTTP/1.", verdictCheck}, {"GET /healthz HTTP/1.1\r\n", verdictCheck}, {"HEAD /healthz?a HTTP/1.0", verdictCheck},
		{"GET /healthz HTTP/2.0", verdictOther}, {"GET /healthz\r\n", verdictOther}, {"GET /healthz?a\r\n", verdictOther},
		{"get /healthz HTTP/1.1", verdictOther}, {"GET  /healthz HTTP/1.1", verdictOther}, {"GET /health HTTP/1.1", verdictOther},
		{"GET /healthz/ HTTP/1.1", verdictOther}, {"PRI * HTTP/2.0", verdictOther}, {"\x16\x03\x01", verdictOther},
		{"GET /healthz?" + strings.Repeat("a", peekSize), verdictOther},
		{strings.Repeat("\r\n", peekSize), verdictOther},
	} {
		if got := judge([]byte(tt.in), path); got != tt.want {
			t.Errorf("%.60q: got %d, want %d", tt.in, got, tt.want)
		}
	}
}

// FuzzJudge: the verdict on a connection does not depend on how its bytes came, and more is never asked for without end.
func FuzzJudge(f *testing.F) {
	for _, s := range []string{"GET /healthz HTTP/1.1\r\n", "HEAD /healthz?x HTTP/1.0\r\n", "\r\nGET /healthz HTTP", "POST / HTTP/1.1"} {
		f.Add([]byte(s), uint16(5))
	}
	f.Fuzz(func(t *testing.T, b []byte, at uint16) {
		const path = "/healthz"
		whole := judge(b, path)
		if cut := int(at); cut < len(b) {
			if part := judge(b[:cut], path); part != verdictMore && part != whole {
				t.Errorf("%q: got %d, and %d after %d bytes", b, whole, part, cut)
			}
		}
		if len(b) >= peekSize && whole == verdictMore {
			t.Errorf("asks for more after %d bytes", len(b))
		}
		if line := strings.TrimLeft(string(b), "\r\n"); whole == verdictCheck && !strings.HasPrefix(line, "GET /healthz") && !strings.HasPrefix(line, "HEAD /healthz") {
			t.Errorf("%q is no health check", b)
		}
	})
}

func TestHealthSources(t *testing.T) {
	h := &Health{From: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/28"), netip.MustParsePrefix("2001:db8::/32"), netip.MustParsePrefix("::ffff:198.51.100.0/120")}}
	for addr, want := range map[string]bool{
		"192.0.2.15": true, "::ffff:192.0.2.1": true, "192.0.2.16": false, "2001:db8::1": true, "2001:db9::1": false,
		"198.51.100.7": true, "198.51.101.7": false, "::1": false,
	} {
		if got := h.from(netip.MustParseAddr(addr)); got != want {
			t.Errorf("%s: got %v, want %v", addr, got, want)
		}
	}
}

var errNone = errors.New("none")

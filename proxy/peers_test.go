// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/netns"
	"github.com/ebbproxy/ebb/internal/netnstest"
)

func testPeers(t *testing.T, weights ...int) []*peer {
	t.Helper()
	var ps []*peer
	for i, w := range weights {
		p, err := newPeer(Peer{Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)}), 80), Weight: w}, ProbeOptions{Rise: 2, Fall: 3}, [2]uint16{32768, 60999})
		if err != nil {
			t.Fatal(err)
		}
		p.state.Store(stateUp)
		ps = append(ps, p)
	}
	return ps
}

// TestChoiceFollowsLoadAndWeight: with every connection staying, peers fill up in proportion to their weights.
func TestChoiceFollowsLoadAndWeight(t *testing.T) {
	ps := testPeers(t, 1, 2, 5)
	s := newPeerSet(ps)
	rng := rand.New(rand.NewPCG(1, 2))
	for range 8000 {
		s.choose(rng, nil).inFlight.Add(1)
	}
	for i, want := range []int64{1000, 2000, 5000} {
		if got := ps[i].inFlight.Load(); got < want*9/10 || got > want*11/10 {
			t.Errorf("peer %d: got %d in flight, want about %d", i, got, want)
		}
	}
	// One that is slow to finish gets less.
	ps = testPeers(t, 1, 1, 1)
	s = newPeerSet(ps)
	ps[0].inFlight.Store(1000)
	for range 300 {
		s.choose(rng, nil).inFlight.Add(1)
	}
	// It is taken only when it is drawn twice.
	if got := ps[0].inFlight.Load() - 1000; got > 80 {
		t.Errorf("the busy peer got %d of 300", got)
	}
}

// TestChoicePrefersPeersThatAreUp and leaves out what was tried, until none is left.
func TestChoicePrefersPeersThatAreUp(t *testing.T) {
	ps := testPeers(t, 1, 1, 1, 1)
	ps[0].state.Store(stateDown)
	ps[1].state.Store(stateUnknown)
	ps[2].inFlight.Store(50)
	ps[3].inFlight.Store(60)
	s := newPeerSet(ps)
	rng := rand.New(rand.NewPCG(3, 4))
	for range 100 {
		var tried []*peer
		for {
			p := s.choose(rng, tried)
			if p == nil {
				break
			}
			tried = append(tried, p)
		}
		if len(tried) != 4 || tried[2] != ps[1] || tried[3] != ps[0] {
			t.Fatalf("got the order %v, want the two that are up, the unknown one, the one that is down", tried)
		}
	}
	if p := newPeerSet(nil).choose(rng, nil); p != nil {
		t.Errorf("got %v of no peers", p)
	}
}

func TestSafe(t *testing.T) {
	for request, want := range map[string]bool{
		"GET /a": true, "HEAD /ab": true, "OPTIONS ": true,
		"POST /a": false, "PUT /abc": false, "GETX /": false, "get /": false, "GE": false, "": false, "\x16\x03\x01": false,
	} {
		if got := safe(request); got != want {
			t.Errorf("%q: got %v, want %v", request, got, want)
		}
	}
}

// TestPeersOfAPort: a relay that stands in for two ports carries each connection to a peer of its own port, and one for any
// port takes part in both.
func TestPeersOfAPort(t *testing.T) {
	leakCheck(t)
	says := func(word string) netip.AddrPort {
		return backend(t, "tcp", "127.0.0.1:0", func(c *net.TCPConn) { _, _ = io.WriteString(c, word) })
	}
	one, two, third := listen(t, "tcp", "127.0.0.1:0"), listen(t, "tcp", "127.0.0.1:0"), listen(t, "tcp", "127.0.0.1:0")
	first, second, either := Peer{Address: says("one"), For: address(one).Port()}, Peer{Address: says("two"), For: address(two).Port()}, Peer{Address: says("any")}
	r := start(t, Options{Peers: []Peer{first, second}})
	for _, l := range []*net.TCPListener{one, two, third} {
		serveListener(t, r, l)
	}
	ask := func(l net.Listener) string {
		var b []byte
		c, err := net.Dial("tcp", address(l).String())
		if err == nil {
			defer c.Close()
			b, err = io.ReadAll(c)
		}
		if err != nil && !errors.Is(err, unix.ECONNRESET) {
			t.Fatal(err)
		}
		return string(b)
	}
	for range 20 {
		if a, b, c := ask(one), ask(two), ask(third); a != "one" || b != "two" || c != "" {
			t.Fatalf("got %q, %q, %q, want one, two and nothing for a port without peers", a, b, c)
		}
	}
	if err := r.SetPeers([]Peer{first, either}); err != nil {
		t.Fatal(err)
	}
	if err := r.Check(t.Context()); err != nil { // which brings the new one up
		t.Fatal(err)
	}
	got := map[string]int{}
	for range 100 {
		got[ask(one)]++
	}
	if a, b := ask(two), ask(third); a != "any" || b != "any" || got["one"] == 0 || got["any"] == 0 || got["one"]+got["any"] != 100 {
		t.Errorf("got %v, %q, %q, want both for the port that has its own and the other one elsewhere", got, a, b)
	}
}

// TestProbes: a peer goes down after failures in a row and comes back after successes.
func TestProbes(t *testing.T) {
	leakCheck(t)
	l := listen(t, "tcp", "127.0.0.1:0")
	heard := make(chan []byte, 1000)
	serveBackend(t, l, func(c *net.TCPConn) {
		b, err := io.ReadAll(c)
		if err != nil {
			t.Errorf("probe: %v", err)
		}
		select {
		case heard <- b:
		default:
		}
	})
	good, bad := Peer{Address: address(l), ProxyProtocol: true}, Peer{Address: refused(t)}
	r := start(t, Options{Peers: []Peer{good, bad}, Probe: ProbeOptions{Interval: time.Millisecond}})
	state := func(p Peer) PeerState {
		for _, s := range r.Peers() {
			if s.Peer == p {
				return s.State
			}
		}
		return ""
	}
	if !eventually(func() bool { return state(good) == PeerUp && state(bad) == PeerDown }) {
		t.Errorf("got %+v, want up and down", r.Peers())
	}
	h, n, err := ParseHeader(<-heard)
	if err != nil || !h.Local || n != headerFixed {
		t.Errorf("the probe said %+v, %d, %v, want a local header", h, n, err)
	}
	for _, s := range r.Peers() {
		if s.Peer == bad && !errors.Is(s.Err, unix.ECONNREFUSED) {
			t.Errorf("got the error %v, want connection refused", s.Err)
		}
	}
	back := listen(t, "tcp", bad.Address.String())
	serveBackend(t, back, func(c *net.TCPConn) { io.Copy(io.Discard, c) })
	if !eventually(func() bool { return state(bad) == PeerUp }) {
		t.Errorf("got %+v, want up again", r.Peers())
	}
	// What is known stays with a peer that stays.
	if err := r.SetPeers([]Peer{good}); err != nil {
		t.Fatal(err)
	}
	if got := r.Peers(); len(got) != 1 || got[0].State != PeerUp {
		t.Errorf("got %+v, want the one that is up", got)
	}
	// The backends read until the end of a probe, so that none is left when they are closed.
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestPeersChangeUnderLoad: connections that are carried stay with their peer.
func TestPeersChangeUnderLoad(t *testing.T) {
	leakCheck(t)
	a, b := backend(t, "tcp", "127.0.0.1:0", echo), backend(t, "tcp", "[::1]:0", echo)
	r := start(t, Options{Peers: []Peer{{Address: a}}})
	at := serve(t, r, "tcp", "127.0.0.1:0")
	first := dial(t, at)
	if err := ask(first, "hello"); err != nil {
		t.Fatal(err)
	}
	if err := r.SetPeers([]Peer{{Address: b}}); err != nil {
		t.Fatal(err)
	}
	second := dial(t, at)
	for _, c := range []*net.TCPConn{first, second} {
		if err := ask(c, "hello again"); err != nil {
			t.Error(err)
		}
	}
	if got := r.Peers(); len(got) != 1 || got[0].Peer.Address != b || got[0].Dialled != 1 || got[0].InFlight != 1 {
		t.Errorf("got %+v, want one connection to %v", got, b)
	}
}

func TestHeaderRoundTrip(t *testing.T) {
	ap := netip.MustParseAddrPort
	for _, tt := range []struct {
		in, out Header
		size    int
	}{
		{Header{Source: ap("192.0.2.1:1000"), Destination: ap("198.51.100.2:80")}, Header{Source: ap("192.0.2.1:1000"), Destination: ap("198.51.100.2:80")}, 28},
		{Header{Source: ap("[2001:db8::1]:1000"), Destination: ap("[2001:db8::2]:80")}, Header{Source: ap("[2001:db8::1]:1000"), Destination: ap("[2001:db8::2]:80")}, 52},
		{Header{Source: ap("[::ffff:192.0.2.1]:1000"), Destination: ap("198.51.100.2:80")}, Header{Source: ap("192.0.2.1:1000"), Destination: ap("198.51.100.2:80")}, 28},
		{Header{Source: ap("192.0.2.1:1000"), Destination: ap("[2001:db8::2]:80")}, Header{Source: ap("[::ffff:192.0.2.1]:1000"), Destination: ap("[2001:db8::2]:80")}, 52},
		{Header{Local: true}, Header{Local: true}, 16},
		{Header{}, Header{}, 16},
	} {
		b := append(AppendHeader([]byte("x"), tt.in), "GET"...)[1:]
		for n := range tt.size {
			if _, k, err := ParseHeader(b[:n]); k != 0 || err != nil {
				t.Errorf("%v, %d bytes: got %d, %v, want a wish for more", tt.in, n, k, err)
			}
		}
		h, n, err := ParseHeader(b)
		if err != nil || n != tt.size || h != tt.out {
			t.Errorf("got %+v, %d, %v, want %+v, %d", h, n, err, tt.out, tt.size)
		}
	}
	for name, b := range map[string]string{
		"version 1":      "PROXY TCP4 192.0.2.1 198.51.100.2 1000 80\r\n",
		"no version":     headerSignature + "\x11\x11\x00\x0c",
		"no command":     headerSignature + "\x22\x11\x00\x0c",
		"udp":            headerSignature + "\x21\x12\x00\x0c123456789012",
		"short":          headerSignature + "\x21\x11\x00\x04",
		"broken quickly": "\r\n\r\r",
	} {
		if _, _, err := ParseHeader([]byte(b)); !errors.Is(err, ErrHeader) {
			t.Errorf("%s: got %v, want ErrHeader", name, err)
		}
	}
	if want := []byte("\x0D\x0A\x0D\x0A\x00\x0D\x0A\x51\x55\x49\x54\x0A"); !bytes.Equal([]byte(headerSignature), want) {
		t.Errorf("got the signature %x, want %x", headerSignature, want)
	}
}

// FuzzParseHeader: what is read can be written again, and the beginning of a header is never refused.
func FuzzParseHeader(f *testing.F) {
	f.Add(AppendHeader(nil, Header{Source: netip.MustParseAddrPort("192.0.2.1:1"), Destination: netip.MustParseAddrPort("192.0.2.2:2")}))
	f.Add(AppendHeader(nil, Header{Source: netip.MustParseAddrPort("[2001:db8::1]:1"), Destination: netip.MustParseAddrPort("[2001:db8::2]:2")}))
	f.Add(AppendHeader(nil, Header{Local: true}))
	f.Add([]byte(headerSignature + "\x21\x11\x00\x10123456789012\x04\x00\x01x"))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, n, err := ParseHeader(b)
		if err != nil || n == 0 {
			if n != 0 || h != (Header{}) {
				t.Errorf("%x: got %+v, %d, %v", b, h, n, err)
			}
			return
		}
		if n > len(b) || n < headerFixed {
			t.Fatalf("%x: got the length %d", b, n)
		}
		if _, k, err := ParseHeader(b[:n-1]); k != 0 || err != nil {
			t.Errorf("%x without its last byte: got %d, %v, want a wish for more", b, k, err)
		}
		again, _, err := ParseHeader(AppendHeader(nil, h))
		if err != nil || again.Local != h.Local || again.Source.Port() != h.Source.Port() || again.Destination.Addr().Unmap() != h.Destination.Addr().Unmap() {
			t.Errorf("%x: got %+v, written and read again %+v, %v", b, h, again, err)
		}
	})
}

// FuzzAppendHeader: every header that is written can be read.
func FuzzAppendHeader(f *testing.F) {
	f.Add([]byte{192, 0, 2, 1}, []byte{192, 0, 2, 2}, uint16(1), uint16(2), false)
	f.Add(make([]byte, 16), make([]byte, 4), uint16(0), uint16(65535), false)
	f.Add([]byte(nil), []byte(nil), uint16(0), uint16(0), true)
	f.Fuzz(func(t *testing.T, a, b []byte, p, q uint16, local bool) {
		src, _ := netip.AddrFromSlice(a)
		dst, _ := netip.AddrFromSlice(b)
		h := Header{Local: local, Source: netip.AddrPortFrom(src, p), Destination: netip.AddrPortFrom(dst, q)}
		w := AppendHeader(nil, h)
		got, n, err := ParseHeader(w)
		if err != nil || n != len(w) || got.Local != local {
			t.Fatalf("%+v: got %+v, %d of %d, %v", h, got, n, len(w), err)
		}
		if !local && src.IsValid() && dst.IsValid() && (got.Source.Addr().Unmap() != src.Unmap() || got.Destination.Addr().Unmap() != dst.Unmap() || got.Source.Port() != p || got.Destination.Port() != q) {
			t.Errorf("%+v: got %+v", h, got)
		}
	})
}

func TestRawAddr(t *testing.T) {
	for _, s := range []string{"192.0.2.1:80", "[2001:db8::1]:443", "[::ffff:192.0.2.1]:80", "[fe80::1%1]:80", "[fe80::1%lo]:80"} {
		ap := netip.MustParseAddrPort(s)
		r, family, err := newRawAddr(ap)
		if err != nil {
			t.Fatal(err)
		}
		got := r.addrPort()
		if got.Addr() != ap.Addr().Unmap().WithZone("") || got.Port() != ap.Port() || (family == unix.AF_INET) != ap.Addr().Unmap().Is4() {
			t.Errorf("%s: got %v, family %d", s, got, family)
		}
		if strings.Contains(s, "%") && binary.NativeEndian.Uint32(r.b[24:]) != 1 {
			t.Errorf("%s: got the index %d, want 1", s, binary.NativeEndian.Uint32(r.b[24:]))
		}
	}
}

// FuzzRawAddr: no bytes of an address make it panic, and what is encoded comes back.
func FuzzRawAddr(f *testing.F) {
	f.Add([]byte{2, 0, 0, 80, 192, 0, 2, 1}, uint32(16))
	f.Add(make([]byte, 28), uint32(28))
	f.Fuzz(func(t *testing.T, b []byte, n uint32) {
		var r rawAddr
		copy(r.b[:], b)
		r.n = min(n, uint32(len(r.b)))
		ap := r.addrPort()
		if !ap.IsValid() {
			return
		}
		again, _, err := newRawAddr(ap)
		if err != nil || again.addrPort() != ap {
			t.Errorf("%v: got %v, %v", ap, again.addrPort(), err)
		}
	})
}

// TestWarm: afterwards the listener is as it was, with nothing in its queue.
func TestWarm(t *testing.T) {
	leakCheck(t)
	for _, addr := range []string{"127.0.0.1:0", "0.0.0.0:0", "[::]:0", "[::1]:0"} {
		l := listen(t, "tcp", addr)
		if err := Warm(l, 128); err != nil {
			t.Fatalf("%s: %v", addr, err)
		}
		raw, err := l.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		var info *unix.TCPInfo
		if err := raw.Control(func(fd uintptr) { info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) }); err != nil {
			t.Fatal(err)
		}
		// For a listener these are the length and the limit of its queue, tcp_get_info in net/ipv4/tcp.c.
		if err != nil || info.Unacked != 0 || info.Sacked != 128 {
			t.Errorf("%s: %d in a queue for %d, %v, want 0 and 128", addr, info.Unacked, info.Sacked, err)
		}
		l.Close()
	}
	if err := Warm(dial(t, backend(t, "tcp", "127.0.0.1:0", echo)), 1); !errors.Is(err, ErrNotListener) {
		t.Errorf("a connection: got %v, want ErrNotListener", err)
	}
}

// TestWarmSendsACookie: the kernel's own count says so.
func TestWarmSendsACookie(t *testing.T) {
	ns := netnstest.New(t)
	for _, mode := range []string{"1", "2"} {
		if err := netns.Do(ns.Fd(), func() error {
			if err := os.WriteFile("/proc/sys/net/ipv4/tcp_syncookies", []byte(mode), 0); err != nil {
				return err
			}
			for _, addr := range []string{"127.0.0.1:0", "[::]:0"} {
				l := listen(t, "tcp", addr)
				before, err := cookies()
				if err != nil {
					return err
				}
				if err := Warm(l, 128); err != nil {
					return err
				}
				after, err := cookies()
				if err != nil {
					return err
				}
				if after <= before {
					t.Errorf("mode %s, %s: no cookie was sent", mode, addr)
				}
				l.Close()
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
}

// cookies is how many SYN cookies the namespace of this thread has sent.
func cookies() (int, error) {
	text, err := os.ReadFile("/proc/thread-self/net/netstat")
	if err != nil {
		return 0, err
	}
	lines := strings.Split(string(text), "\n")
	for i := 0; i+1 < len(lines); i += 2 {
		names, values := strings.Fields(lines[i]), strings.Fields(lines[i+1])
		for j, n := range names {
			if n == "SyncookiesSent" {
				v := 0
				for _, d := range values[j] {
					v = 10*v + int(d-'0')
				}
				return v, nil
			}
		}
	}
	return 0, errNone
}

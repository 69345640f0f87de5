// SPDX-License-Identifier: Apache-2.0

// Package probestest builds real connections in known states, so that whoever reads connections can check that
// their classes come out right.
//
// It classifies nothing itself and needs no privilege. Both ends of each connection belong to the test's process.
//
//	m := probestest.Build(t, 20, probestest.Env{})
//	c := probes.NewClassifier(probes.ClassifierOptions{Protocol: "http1"})
//	verdicts := c.Look(time.Now(), samples, true) // of this process, however they were read
//	for _, e := range m.Wrong(verdicts) {
//		t.Error(e)
//	}
package probestest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/probes"
)

// patience limits a step that takes no time to speak of.
const patience = 30 * time.Second

// apart is two ticks of a kernel at HZ 250, and one at HZ 100: what happens so far apart is not in the same tick.
const apart = 12 * time.Millisecond

// Env says where the connections are made. The zero value is 127.0.0.1 here.
type Env struct {
	Address     string // to listen on; the default is 127.0.0.1:0
	Listen      func(network, address string) (net.Listener, error)
	DialContext func(ctx context.Context, network, address string) (net.Conn, error)
}

// Conn is one connection of the matrix.
type Conn struct {
	State  string
	Truth  probes.Class // what it is
	Server net.Conn     // the end that a sample shows
	Client net.Conn

	// Blind says that one look cannot see the truth: a response that pauses.
	Blind bool
	// Keepalive says that the server's end sends TCP keepalives, whose answers blur the sequence numbers after a second.
	Keepalive bool

	// Unclear says that a look may answer unknown.
	Unclear bool

	paused bool // inside its response
}

// Matrix is some connections in each of the known states.
type Matrix struct {
	Conns []*Conn
	Port  uint16 // of the server's end

	byClient map[uint16]*Conn
}

const (
	ask    = "GET / HTTP/1.1\r\nHost: x\r\n\r\n"
	answer = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
	head   = "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nok"
)

// builder makes one connection.
type builder struct {
	tb testing.TB
	c  *Conn
}

func (b builder) check(err error) {
	b.tb.Helper()
	if err != nil {
		b.tb.Fatalf("%s: %v", b.c.State, err)
	}
}

func (b builder) send(from, to net.Conn, what string) {
	b.tb.Helper()
	b.check(from.SetWriteDeadline(time.Now().Add(patience)))
	_, err := from.Write([]byte(what))
	b.check(err)
	if to == nil {
		return
	}
	b.check(to.SetReadDeadline(time.Now().Add(patience)))
	buf := make([]byte, len(what))
	for got := 0; got < len(what); {
		n, err := to.Read(buf[got:])
		b.check(err)
		got += n
	}
}

func (b builder) request()  { b.tb.Helper(); b.send(b.c.Client, b.c.Server, ask) }
func (b builder) response() { b.tb.Helper(); b.send(b.c.Server, b.c.Client, answer) }

// later lets the kernel's tick pass, so that what follows has another time.
func later() { <-time.After(apart) }

func (b builder) keepalive() {
	b.tb.Helper()
	b.c.Keepalive, b.c.Unclear = true, true
	rc, err := b.c.Server.(syscall.Conn).SyscallConn()
	b.check(err)
	var serr error
	b.check(rc.Control(func(fd uintptr) {
		serr = errors.Join(
			unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1),
			unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, 1),
			unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, 1))
	}))
	b.check(serr)
}

// fill writes until nothing more is taken.
func (b builder) fill() {
	b.tb.Helper()
	big := make([]byte, 1<<20)
	for {
		b.check(b.c.Server.SetWriteDeadline(time.Now().Add(50 * time.Millisecond)))
		if _, err := b.c.Server.Write(big); errors.Is(err, os.ErrDeadlineExceeded) {
			return
		} else if err != nil {
			b.check(err)
		}
	}
}

// closeWrite sends FIN.
func (b builder) closeWrite(c net.Conn) {
	b.tb.Helper()
	b.check(c.(interface{ CloseWrite() error }).CloseWrite())
}

// states are what a connection can be in. Each is made from a fresh connection.
var states = []struct {
	name  string
	truth probes.Class
	blind bool
	make  func(b builder)
}{
	{"unused", probes.ClassUnused, false, func(builder) {}},
	{"first request pending", probes.ClassActive, false, func(b builder) { b.request() }},
	{"first request pending, server keepalive", probes.ClassActive, false, func(b builder) { b.keepalive(); b.request() }},
	{"idle after one request", probes.ClassIdle, false, func(b builder) { b.request(); b.response() }},
	{"idle after 20 requests", probes.ClassIdle, false, func(b builder) {
		for range 20 {
			b.request()
			b.response()
		}
	}},
	{"idle after a slow handler", probes.ClassIdle, false, func(b builder) { b.request(); later(); b.response() }},
	{"idle, server keepalive", probes.ClassIdle, false, func(b builder) { b.keepalive(); b.request(); b.response() }},
	{"second request pending", probes.ClassActive, false, func(b builder) { b.request(); b.response(); later(); b.request() }},
	{"second request pending, server keepalive", probes.ClassActive, false, func(b builder) {
		b.keepalive()
		b.request()
		b.response()
		later()
		b.request()
	}},
	{"request pending in the tick of the answer before", probes.ClassActive, false, func(b builder) { b.request(); b.response(); b.request() }},
	{"the same after 20 requests", probes.ClassActive, false, func(b builder) {
		for range 20 {
			b.request()
			b.response()
		}
		b.request()
	}},
	{"the same, server keepalive", probes.ClassActive, false, func(b builder) {
		b.keepalive()
		b.request()
		b.response()
		b.request()
	}},
	{"part of a request unread", probes.ClassActive, false, func(b builder) {
		b.request()
		b.response()
		b.send(b.c.Client, nil, ask[:5])
	}},
	{"body after 100-continue, pending", probes.ClassActive, false, func(b builder) {
		b.request()
		b.send(b.c.Server, b.c.Client, "HTTP/1.1 100 Continue\r\n\r\n")
		later()
		b.send(b.c.Client, b.c.Server, "body")
	}},
	{"response paused", probes.ClassActive, true, func(b builder) { b.request(); b.send(b.c.Server, b.c.Client, head) }},
	{"peer takes nothing", probes.ClassStalled, false, func(b builder) { b.request(); b.fill() }},
	{"half-closed client waiting", probes.ClassActive, false, func(b builder) {
		b.request()
		b.response()
		later()
		b.request()
		b.closeWrite(b.c.Client)
	}},
	{"half-closed client waiting, all in one tick", probes.ClassActive, false, func(b builder) {
		b.c.Unclear = true // its FIN moves snd_wl1 as a bare ACK would
		b.request()
		b.response()
		b.request()
		b.closeWrite(b.c.Client)
	}},
	{"half-closed client answered", probes.ClassIdle, false, func(b builder) {
		b.request()
		b.closeWrite(b.c.Client)
		later()
		b.response()
	}},
	{"half-closed by the application", probes.ClassClosing, false, func(b builder) {
		b.request()
		b.response()
		b.closeWrite(b.c.Server)
	}},
}

// Build makes n connections in each state. They are closed when the test ends.
func Build(tb testing.TB, n int, env Env) *Matrix {
	tb.Helper()
	if env.Address == "" {
		env.Address = "127.0.0.1:0"
	}
	if env.Listen == nil {
		env.Listen = func(network, address string) (net.Listener, error) {
			var lc net.ListenConfig
			lc.SetMultipathTCP(false)
			return lc.Listen(tb.Context(), network, address)
		}
	}
	if env.DialContext == nil {
		var d net.Dialer
		d.SetMultipathTCP(false)
		env.DialContext = d.DialContext
	}
	l, err := env.Listen("tcp", env.Address)
	if err != nil {
		tb.Fatal(err)
	}
	defer l.Close()
	m := &Matrix{byClient: map[uint16]*Conn{}, Port: netip.MustParseAddrPort(l.Addr().String()).Port()}
	// Those with keepalives come last, so that a first look finds most of them before the first keepalive.
	late := func(name string) bool { return strings.Contains(name, "keepalive") }
	for i := range 2 * n * len(states) {
		s := states[i%len(states)]
		if late(s.name) == (i >= n*len(states)) {
			c := &Conn{State: s.name, Truth: s.truth, Blind: s.blind, paused: s.blind}
			b := builder{tb, c}
			c.Client, err = env.DialContext(tb.Context(), "tcp", l.Addr().String())
			b.check(err)
			tb.Cleanup(func() { c.Client.Close() })
			c.Server, err = l.Accept()
			b.check(err)
			tb.Cleanup(func() { c.Server.Close() })
			if t, ok := c.Server.(interface{ SetKeepAlive(bool) error }); ok {
				b.check(t.SetKeepAlive(false)) // Go's own, after 15 s
			}
			s.make(b)
			m.Conns = append(m.Conns, c)
			m.byClient[netip.MustParseAddrPort(c.Client.LocalAddr().String()).Port()] = c
		}
	}
	return m
}

// each calls fn with the connections and their verdicts. A missing one has class unknown and found false.
func (m *Matrix) each(verdicts []probes.Verdict, fn func(c *Conn, v probes.Verdict, found bool)) {
	got := map[*Conn]probes.Verdict{}
	for _, v := range verdicts {
		if c := m.byClient[v.Remote.Port()]; c != nil && v.Local.Port() == m.Port {
			got[c] = v
		}
	}
	for _, c := range m.Conns {
		v, ok := got[c]
		fn(c, v, ok)
	}
}

// Wrong lists what no look may ever say, whatever it was read by and however early: a connection is missing, or one that
// is busy was taken for one that does not block a drain. What one look cannot see is not listed.
func (m *Matrix) Wrong(verdicts []probes.Verdict) (wrong []string) {
	m.each(verdicts, func(c *Conn, v probes.Verdict, found bool) {
		if !found {
			wrong = append(wrong, c.State+": not seen")
			return
		}
		busy := c.Truth == probes.ClassActive || c.Truth == probes.ClassStalled
		if quiet := v.Class == probes.ClassIdle || v.Class == probes.ClassUnused || v.Class == probes.ClassClosing; busy && quiet && !c.Blind {
			wrong = append(wrong, fmt.Sprintf("%s: called %s: %+v", c.State, v.Class, v.Sample))
		}
	})
	return wrong
}

// Missed lists what a full look should know and does not. It may need a moment until everything is acknowledged, and more
// looks than one. Not listed are connections that are Blind, nor those that are Unclear and called unknown: their numbers
// may have been blurred before the first look.
func (m *Matrix) Missed(verdicts []probes.Verdict) (missed []string) {
	m.each(verdicts, func(c *Conn, v probes.Verdict, found bool) {
		if !found || v.Class == c.Truth || c.Blind || (c.Unclear && v.Class == probes.ClassUnknown) {
			return
		}
		missed = append(missed, fmt.Sprintf("%s: called %s, is %s: %+v", c.State, v.Class, c.Truth, v.Sample))
	})
	return missed
}

// Blurred says that each connection with server keepalives has had one answered, long enough after the data.
func (m *Matrix) Blurred(samples []probes.Sample) bool {
	n := 0
	for _, s := range samples {
		c := m.byClient[s.Remote.Port()]
		if c != nil && c.Keepalive && s.Local.Port() == m.Port && min(s.LastRecv, s.LastSent)-s.LastAck > 500*time.Millisecond {
			n++
		}
	}
	for _, c := range m.Conns {
		if c.Keepalive {
			n--
		}
	}
	return n == 0
}

// Push sends another byte of each response that is paused. Known says that the looks from now on must know the truth:
// the connection was called idle before this byte.
func (m *Matrix) Push(tb testing.TB, known bool) {
	tb.Helper()
	for _, c := range m.Conns {
		if c.paused {
			builder{tb, c}.send(c.Server, c.Client, "x")
			c.Blind = c.Blind && !known
		}
	}
}

// Summary counts the verdicts of each state, for a log.
func (m *Matrix) Summary(verdicts []probes.Verdict) string {
	counts := map[string]map[probes.Class]int{}
	m.each(verdicts, func(c *Conn, v probes.Verdict, _ bool) {
		if counts[c.State] == nil {
			counts[c.State] = map[probes.Class]int{}
		}
		counts[c.State][v.Class]++
	})
	var b strings.Builder
	for _, s := range states {
		fmt.Fprintf(&b, "%-50s is %-8s called %v\n", s.name, s.truth, counts[s.name])
	}
	return b.String()
}

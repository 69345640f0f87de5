// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/proxy"
)

// TestOwnDestination hands a client of an application's own listener to the relay, which has to bring it back to the very
// address that the client dialled, from the source ports that are let pass.
func TestOwnDestination(t *testing.T) {
	for _, v := range []struct{ listen, dial string }{
		{"127.0.0.1:0", "127.0.0.1"}, {"[::1]:0", "::1"}, {"[::]:0", "127.0.0.1"}, {"[::]:0", "::1"},
	} {
		t.Run(v.listen+" "+v.dial, func(t *testing.T) {
			var lc net.ListenConfig
			lc.SetMultipathTCP(false)
			l, err := lc.Listen(t.Context(), "tcp", v.listen)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			app := l.(*net.TCPListener)
			at := netip.AddrPortFrom(netip.MustParseAddr(v.dial), app.Addr().(*net.TCPAddr).AddrPort().Port())
			const low, high = 61111, 61113
			r, err := proxy.New(proxy.Options{Peers: []proxy.Peer{{Own: true, Ports: [2]uint16{low, high}}}})
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			if err := r.Check(t.Context()); err != nil {
				t.Errorf("check of a peer without an address: got %v, want nil", err)
			}
			// More clients at a time than ports must not work, and as many as there are must, again and again.
			for range 5 {
				var clients, servers []net.Conn
				for range high - low + 1 {
					c := adopted(t, r, app, at)
					clients = append(clients, c)
					carried, err := app.Accept()
					if err != nil {
						t.Fatal(err)
					}
					servers = append(servers, carried)
					from := carried.RemoteAddr().(*net.TCPAddr).AddrPort()
					if from.Addr().Unmap() != at.Addr() || from.Port() < low || from.Port() > high {
						t.Errorf("dial came from %v, want %v and a port from %d to %d", from, at.Addr(), low, high)
					}
				}
				c := adopted(t, r, app, at)
				if _, err := io.ReadAll(c); !errors.Is(err, unix.ECONNRESET) {
					t.Errorf("a client for whom no port is left: got %v, want a reset", err)
				}
				c.Close()
				for i := range clients {
					pass(t, clients[i], servers[i])
					pass(t, servers[i], clients[i])
					// The client finishes first, so that it is not the relay's port that has to be remembered.
					servers[i].Close()
					clients[i].Close()
				}
				<-r.Idle()
			}
		})
	}
}

// TestOwnDestinationNeverGoesRound hands the relay a connection of its own dial's kind: from the source ports, to itself.
func TestOwnDestinationNeverGoesRound(t *testing.T) {
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	l, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	const port = 61121
	r, err := proxy.New(proxy.Options{Peers: []proxy.Peer{{Own: true, Ports: [2]uint16{port, port}}}})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port}}
	d.SetMultipathTCP(false)
	c, err := d.DialContext(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	adopt(t, r, s.(*net.TCPConn))
	if _, err := io.ReadAll(c); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("a dial that came back: got %v, want a reset", err)
	}
	<-r.Idle()
	if n := r.Stats().Results[proxy.ResultNoPeer]; n != 1 {
		t.Errorf("got %d connections without a peer, want 1", n)
	}
}

func TestPeerPortsAreChecked(t *testing.T) {
	at := netip.MustParseAddrPort("192.0.2.1:80")
	for _, v := range []struct {
		p  proxy.Peer
		ok bool
	}{
		{proxy.Peer{Own: true, Ports: [2]uint16{61000, 65535}}, true},
		{proxy.Peer{Address: at, Ports: [2]uint16{61000, 61000}}, true},
		{proxy.Peer{Own: true}, false},
		{proxy.Peer{Own: true, Address: at, Ports: [2]uint16{61000, 65535}}, false},
		{proxy.Peer{Own: true, Source: at.Addr(), Ports: [2]uint16{61000, 65535}}, false},
		{proxy.Peer{Address: at, Ports: [2]uint16{2, 1}}, false},
		{proxy.Peer{Address: at, Ports: [2]uint16{0, 1}}, false},
	} {
		r, err := proxy.New(proxy.Options{Peers: []proxy.Peer{v.p}, Probe: proxy.ProbeOptions{Interval: proxy.Never}})
		if err == nil {
			r.Close()
		}
		if (err == nil) != v.ok || err != nil && !errors.Is(err, proxy.ErrOptions) {
			t.Errorf("%+v: got %v, want ok %v", v.p, err, v.ok)
		}
	}
}

// adopted dials the application and gives the connection to the relay.
func adopted(t *testing.T, r *proxy.Relay, app *net.TCPListener, at netip.AddrPort) net.Conn {
	t.Helper()
	var d net.Dialer
	d.SetMultipathTCP(false)
	c, err := d.DialContext(t.Context(), "tcp", at.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	s, err := app.Accept()
	if err != nil {
		t.Fatal(err)
	}
	adopt(t, r, s.(*net.TCPConn))
	return c
}

func adopt(t *testing.T, r *proxy.Relay, s *net.TCPConn) {
	t.Helper()
	f, err := s.File()
	if err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Dup(int(f.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	s.Close()
	if err := r.Adopt(fd); err != nil {
		t.Fatal(err)
	}
}

func pass(t *testing.T, from, to net.Conn) {
	t.Helper()
	if err := to.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if _, err := from.Write([]byte("through")); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 7)
	if _, err := io.ReadFull(to, b); err != nil || string(b) != "through" {
		t.Errorf("got %q, %v, want %q", b, err, "through")
	}
}

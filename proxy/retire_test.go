// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"context"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/proxy"
)

// A client keeps its connection after its answer: it is retired, in order, and neither side sees a reset. One that waits
// for its answer for longer than that is not, and one that never asked is.
func TestC10_RelayedIdleConnectionIsRetired(t *testing.T) {
	answer := make(chan struct{})
	peer, err := new(net.ListenConfig).Listen(t.Context(), "tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	ends := make(chan error, 8)
	go func() {
		for {
			c, err := peer.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				b := make([]byte, 1)
				for {
					if _, err := io.ReadFull(c, b); err != nil {
						ends <- err
						return
					}
					if b[0] == 's' {
						<-answer
					}
					if _, err := c.Write([]byte("y")); err != nil {
						ends <- err
						return
					}
				}
			}()
		}
	}()
	r, err := proxy.New(proxy.Options{
		Peers: []proxy.Peer{{Address: netip.MustParseAddrPort(peer.Addr().String())}}, RetireAfter: 20 * time.Millisecond,
		Probe: proxy.ProbeOptions{Interval: proxy.Never},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	ln, err := lc.Listen(t.Context(), "tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- r.Serve(ctx, ln.(*net.TCPListener)) }()
	defer func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}()
	dial := func(ask string) net.Conn {
		t.Helper()
		c, err := net.Dial("tcp4", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(c, ask); err != nil {
			t.Fatal(err)
		}
		return c
	}
	gets := func(what string, c net.Conn, want string) {
		t.Helper()
		got, err := io.ReadAll(c)
		if err != nil || string(got) != want {
			t.Errorf("%s: got %q, %v, want %q and its end", what, got, err, want)
		}
		if err := <-ends; err != io.EOF {
			t.Errorf("%s: its peer read %v, want the end", what, err)
		}
	}
	slow := dial("s")
	gets("an answered one", dial("q"), "y")
	gets("one that never asked", dial(""), "")
	// By now the slow one has waited for longer than both.
	close(answer)
	gets("a slow one", slow, "y")
	for r.Stats().Active > 0 {
		select {
		case <-t.Context().Done():
			t.Fatal("connections are left")
		case <-time.After(time.Millisecond):
		}
	}
	if s := r.Stats(); s.Results[proxy.ResultDone] != 3 {
		t.Errorf("results: got %v, want 3 done", s.Results)
	}
	if _, err := proxy.New(proxy.Options{RetireAfter: time.Second, IdleTimeout: time.Second}); err == nil {
		t.Error("both limits of idle connections were taken")
	}
}

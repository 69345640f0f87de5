// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/proxy"
)

// retiring is a relay to one peer that retires what is idle for so long, and the address at which it serves.
func retiring(t *testing.T, peer netip.AddrPort, after time.Duration) (r *proxy.Relay, addr string) {
	t.Helper()
	r, err := proxy.New(proxy.Options{
		Peers: []proxy.Peer{{Address: peer}}, RetireAfter: after, Probe: proxy.ProbeOptions{Interval: proxy.Never},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	ln, err := lc.Listen(t.Context(), "tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	served := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { served <- r.Serve(ctx, ln.(*net.TCPListener)) }()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return r, ln.Addr().String()
}

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
	r, addr := retiring(t, netip.MustParseAddrPort(peer.Addr().String()), 20*time.Millisecond)
	dial := func(ask string) net.Conn {
		t.Helper()
		c, err := net.Dial("tcp4", addr)
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

// chatty answers each byte that it reads with another one: of p in two halves, with a pause between them.
func chatty(t *testing.T, asked, answered *atomic.Int64) netip.AddrPort {
	t.Helper()
	ln, err := new(net.ListenConfig).Listen(t.Context(), "tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				br := bufio.NewReader(c)
				for {
					line, err := br.ReadString('\n')
					if err != nil {
						return
					}
					asked.Add(1)
					if strings.Contains(line, "pause") {
						if _, err := io.WriteString(c, "pau"); err != nil {
							return
						}
						pause := time.NewTimer(30 * time.Millisecond)
						<-pause.C
					}
					if _, err := io.WriteString(c, "sed\n"); err != nil {
						return
					}
					answered.Add(1)
				}
			}()
		}
	}()
	return netip.MustParseAddrPort(ln.Addr().String())
}

// Clients that ask again as soon as they are answered are let go between two requests: what was begun is answered in full,
// and what each loses is one request that no server has seen. Those that pause are let go in a pause. Who is answered with
// pauses is left alone.
func TestG5_RelayedClosedLoopsAreLetGo(t *testing.T) {
	var asked, answered atomic.Int64
	r, addr := retiring(t, chatty(t, &asked, &answered), time.Hour)
	type end struct {
		what     string
		answered int
		err      error // of the request that was not answered; nil: the end came in a pause
	}
	ends := make(chan end, 64)
	var stop atomic.Bool
	loop := func(what, request string, pause time.Duration) {
		c, err := net.Dial("tcp4", addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		go func() {
			br := bufio.NewReader(c)
			for e := (end{what: what}); ; e.answered++ {
				if e.answered > 0 && pause > 0 {
					_ = c.SetReadDeadline(time.Now().Add(pause))
					if _, err := br.Peek(1); errors.Is(err, io.EOF) {
						ends <- e
						return
					}
					_ = c.SetReadDeadline(time.Now().Add(time.Minute))
				}
				if stop.Load() {
					e.what += ", stopped"
					ends <- e
					return
				}
				_, werr := io.WriteString(c, request+"\n")
				got, err := br.ReadString('\n')
				if err != nil {
					e.err = errors.Join(fmt.Errorf("got %q: %w", got, err), werr)
					if got != "" {
						t.Errorf("%s: an answer was cut short: %v", what, e.err)
					}
					ends <- e
					return
				}
			}
		}()
	}
	const each = 8
	for range each {
		loop("closed loop", "GET /", 0)
		loop("with pauses", "GET /", 50*time.Millisecond)
		loop("slow answers", "GET /pause", 0)
	}
	wait := func(what string, ok func() bool) {
		t.Helper()
		for begun := time.Now(); !ok(); time.Sleep(time.Millisecond) {
			if time.Since(begun) > time.Minute {
				t.Fatalf("never: %s", what)
			}
		}
	}
	wait("all have asked", func() bool { return answered.Load() > 20*each && r.Stats().Active == 3*each })
	r.LetGo()
	got := map[string]int{}
	for range 2 * each {
		e := <-ends
		got[e.what]++
		if e.err != nil && errors.Is(e.err, syscall.ECONNRESET) {
			t.Errorf("%s: %v, want an orderly end", e.what, e.err)
		}
	}
	if got["closed loop"] != each || got["with pauses"] != each {
		t.Errorf("let go: got %v, want the closed loops and those with pauses", got)
	}
	wait("only the others are left", func() bool { return r.Stats().Active == each })
	stop.Store(true)
	for range each {
		if e := <-ends; e.err != nil || !strings.HasSuffix(e.what, ", stopped") {
			t.Errorf("%s: ended with %v, want it left alone", e.what, e.err)
		}
	}
	if asked.Load() != answered.Load() {
		t.Errorf("%d requests were begun and %d answered", asked.Load(), answered.Load())
	}
}

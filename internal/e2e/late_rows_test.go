// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/loadtest"
)

// redirected runs a test with late connections steered to a sibling, and with them relayed to a peer elsewhere: either is
// a Go server by the name of other. flags make a run of this host choose that.
func redirected(t *testing.T, f func(t *testing.T, n *lan, how drain.OnNew, flags []string)) {
	for _, how := range []drain.OnNew{drain.OnNewSteer, drain.OnNewRelay} {
		t.Run(string(how), func(t *testing.T) {
			n := newLAN(t)
			flags := with(wideBudget, "--service", "web")
			if how == drain.OnNewSteer {
				n.run("other", []string{"--service", "web"}, goServer(t, "[::]:8081", "-name", "other")...)
			} else {
				flags = append(flags, "--peer", newElsewhere(t, n.host, 9000, "-name", "other").v4)
			}
			f(t, n, how, flags)
		})
	}
}

// goneElsewhere opens n late connections, each of which has to be served by the other one, and keeps them.
func goneElsewhere(t *testing.T, from *lan, addr string, n int) []*httpConn {
	t.Helper()
	conns := make([]*httpConn, n)
	for i := range conns {
		conns[i] = dialHTTP(t, from.client, addr)
		if got := conns[i].servedBy(t); got != "other" {
			t.Fatalf("late connection %d to %s: served by %q, want other", i, addr, got)
		}
	}
	return conns
}

// Fifty idle connections and a busy one, and twenty late ones that are idle elsewhere: the drain waits for the busy one
// alone, and under idle: wait for the fifty too. The late ones are in no count of the backend.
func TestC9_IdleConnectionsWithLateOnesElsewhere(t *testing.T) {
	redirected(t, func(t *testing.T, n *lan, how drain.OnNew, flags []string) {
		for _, wait := range []bool{false, true} {
			t.Run(fmt.Sprintf("wait %v", wait), func(t *testing.T) {
				policy := "ignore"
				if wait {
					policy = "wait"
				}
				r := n.as(t).run("web", with(flags, "--protocol", "http1", "--idle", policy), goServer(t, n.v4(8080))...)
				var idle []*httpConn
				for range 50 {
					c := dialHTTP(t, n.client, n.v4(8080))
					c.get(t, "/")
					idle = append(idle, c)
				}
				busy := holdOpen(t, n.client, n.v4(8080))
				r.must("drain", struct{}{})
				chosen(t, r.backend(), how)
				late := goneElsewhere(t, n, n.v4(8080), 20)
				blocks := func(active, idle int64) {
					t.Helper()
					eventually(t, fmt.Sprintf("%d active and %d idle block the drain", active, idle), func() bool {
						d := r.backend().Drain
						return d != nil && d.Phase() == drain.PhaseWait && d.Blocking["active"] == active && d.Blocking["idle"] == idle
					})
				}
				if !wait {
					blocks(1, 0)
				} else {
					blocks(1, 50)
				}
				if b := r.backend(); value(b.Counts.Open) != 51 || value(b.Counts.Accepted) != 51 {
					t.Errorf("beside late ones: %s, want the 51 of before", shown(b))
				}
				busy.Close()
				if wait {
					blocks(0, 50)
					for _, c := range idle {
						c.Close()
					}
				}
				r.phase(drain.PhaseFlush)
				for _, c := range late { // the flush has not waited for them, nor cost them anything
					c.get(t, "/")
					c.Close()
				}
				r.drainedAtZero()
			})
		}
	})
}

// Clients that came late and ask again as soon as they are answered would hold the relay, and with it the drain, up to the
// deadline. Once nothing new comes they are let go between two requests: no answer is cut short, what was begun was
// answered, and each meets what it would meet at a server's own end of a kept connection.
func TestG5_RelayedClosedLoopsLeave(t *testing.T) {
	n := newLAN(t)
	peer := newElsewhere(t, n.host, 9000)
	r := n.run("web", latePolicy("--peer", peer.v4), goServer(t, n.v4(8080))...)
	hold := holdOpen(t, n.client, n.v4(8080))
	r.must("drain", struct{}{})
	const clients = 10
	var wg sync.WaitGroup
	var answered, unanswered atomic.Int64
	for range clients {
		c := dialHTTP(t, n.client, n.v4(8080))
		wg.Go(func() {
			for {
				_, werr := io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
				if _, err := c.br.Peek(1); err != nil {
					if !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
						t.Errorf("before an answer: %v", errors.Join(err, werr))
					}
					unanswered.Add(1)
					return
				}
				if _, err := c.answer(); err != nil {
					t.Errorf("within an answer: %v", err)
					return
				}
				answered.Add(1)
			}
		})
	}
	hold.Close()
	if code := r.wait(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	wg.Wait()
	b, late := r.lateOf()
	chosen(t, b, drain.OnNewRelay)
	if b.Drain.Outcome != drain.OutcomeDrained || !b.Drain.Ended.Before(b.Drain.Deadline) || late.Ended != 0 || late.Relayed != clients {
		t.Errorf("got outcome %s, %+v, want %d relayed to their end before the deadline", b.Drain.Outcome, late, clients)
	}
	if s := dialHTTP(t, n.ns, peer.v4).stats(t); s.Answered != answered.Load() || s.Requests != s.Answered+1 {
		t.Errorf("the peer began %d requests and answered %d, the clients saw %d answers", s.Requests-1, s.Answered, answered.Load())
	}
	t.Logf("%d answered, %d not begun, %v left of the budget", answered.Load(), unanswered.Load(), b.Drain.Deadline.Sub(*b.Drain.Ended))
}

// A client that goes away in the middle of an endless answer leaves the count, here and elsewhere, and the drain ends.
func TestC20_AbortedStreamsHereAndElsewhere(t *testing.T) {
	redirected(t, func(t *testing.T, n *lan, _ drain.OnNew, flags []string) {
		r := n.run("web", flags, goServer(t, n.v4(8080))...)
		here := holdOpen(t, n.client, n.v4(8080))
		r.must("drain", struct{}{})
		polite, rude := holdOpen(t, n.client, n.v4(8080)), holdOpen(t, n.client, n.v4(8080))
		r.awaitCounts("the one of before is active", func(b api.Backend) bool { return value(b.Counts.Active) == 1 && value(b.InFlight) == 1 })
		polite.Close()
		if err := rude.Conn.(*net.TCPConn).SetLinger(0); err != nil {
			t.Fatal(err)
		}
		rude.Close()
		eventually(t, "those that went elsewhere are over", func() bool {
			l := r.backend().Drain.Late
			return l != nil && value(l.Carried) == 0
		})
		r.stays("a stream is open")
		here.Close()
		if d := r.drainedAtZero(); d.Late == nil || d.Late.Redirected < 2 || d.Late.Failed != 0 || !d.Ended.Before(d.Deadline) {
			t.Errorf("got %+v, want two redirected, none failed, and an end before the deadline", d.Late)
		}
	})
}

// The clients' machine vanishes: the connection of before is stalled and listed, and one that the relay carries keeps the
// drain no longer than an operator or the deadline allows.
func TestC21_DeadPeersHereAndElsewhere(t *testing.T) {
	redirected(t, func(t *testing.T, n *lan, how drain.OnNew, flags []string) {
		r := n.run("web", flags, goServer(t, n.v4(8080))...)
		var wg sync.WaitGroup
		stream := func() net.Conn {
			c := dialHTTP(t, n.client, n.v4(8080))
			c.send(t, "/events?ms=20")
			c.head(t)
			wg.Go(func() { _, _ = io.Copy(io.Discard, bufio.NewReader(c)) }) // ends with the connection
			return c
		}
		conns := []net.Conn{stream()}
		r.must("drain", struct{}{})
		conns = append(conns, stream())
		defer func() {
			for _, c := range conns {
				c.Close()
			}
			wg.Wait()
		}()
		n.client.Do(t, func() {
			link, err := netlink.LinkByName(n.link.A.Dev)
			if err == nil {
				err = netlink.LinkSetDown(link)
			}
			if err != nil {
				t.Fatal(err)
			}
		})
		r.awaitCounts("the dead peer is stalled", func(b api.Backend) bool { return value(b.Counts.Stalled) == 1 && value(b.InFlight) == 1 })
		r.must("cut", struct{}{})
		if code := r.wait(); code != 0 {
			t.Errorf("exit code %d, want 0", code)
		}
		d := r.drained()
		if d.Outcome != drain.OutcomeExpired || len(d.Survivors) != 1 || d.Survivors[0].Class != "stalled" {
			t.Errorf("got outcome %s, survivors %+v, want expired and one that is stalled", d.Outcome, d.Survivors)
		}
		if want := map[drain.OnNew]int64{drain.OnNewRelay: 1}[how]; d.Late == nil || d.Late.Ended != want {
			t.Errorf("late: got %+v, want %d ended", d.Late, want)
		}
	})
}

// Thousands of connections go elsewhere while others come to their end here: no count goes below zero, none of the late
// ones is in the backend's, and each is counted as redirected.
func TestC22_RedirectionsAreNotCounted(t *testing.T) {
	redirected(t, func(t *testing.T, n *lan, how drain.OnNew, flags []string) {
		total := int64(2000)
		if long {
			total = 10_000
		}
		r := n.run("web", flags, goServer(t, n.v4(8080))...)
		hold := holdOpen(t, n.client, n.v4(8080))
		var leaving []net.Conn
		for range 20 {
			c := dialHTTP(t, n.client, n.v4(8080))
			c.get(t, "/")
			leaving = append(leaving, c)
		}
		r.awaitCounts("all are counted", func(b api.Backend) bool { return value(b.Counts.Open) == 21 })
		r.must("drain", struct{}{})
		s := newStorm(t, n.client, n.v4(8080), 4, nil)
		for s.served.Load() < total {
			b := r.backend()
			for _, class := range api.Classes {
				if c := b.Counts.Class(class); !b.CountsKnown || value(c) < 0 {
					t.Errorf("%s is %d beside redirections: %s", class, value(c), shown(b))
				}
			}
			if value(b.Counts.Accepted) != 21 {
				t.Fatalf("a redirection was counted: %s", shown(b))
			}
			if len(leaving) > 0 && s.served.Load() > int64(20-len(leaving))*total/25 {
				leaving[0].Close()
				leaving = leaving[1:]
			}
		}
		for _, c := range leaving {
			c.Close()
		}
		shots := int64(0)
		for _, x := range s.end() {
			if !x.served {
				t.Fatalf("a late connection failed: %v", x.err)
			}
			shots++
		}
		r.awaitCounts("only the held one is left", func(b api.Backend) bool { return value(b.Counts.Open) == 1 })
		eventually(t, "every redirection to be counted", func() bool {
			l := r.backend().Drain.Late
			return l != nil && l.Redirected >= shots && l.Failed == 0 && (how == drain.OnNewSteer || l.Relayed == shots)
		})
		hold.Close()
		r.drainedAtZero()
	})
}

// A listener on [::] is one rule for clients of both families, whoever takes its late connections.
func TestC33_BothFamiliesGoElsewhere(t *testing.T) {
	redirected(t, func(t *testing.T, n *lan, how drain.OnNew, flags []string) {
		r := n.run("web", flags, goServer(t, "[::]:8080")...)
		hold := holdOpen(t, n.client, n.v6(8080))
		r.must("drain", struct{}{})
		for _, addr := range []string{n.v4(8080), n.v6(8080)} {
			for _, c := range goneElsewhere(t, n, addr, 5) {
				c.Close()
			}
		}
		hold.Close()
		if d := r.drainedAtZero(); d.Late == nil || d.Late.Redirected < 10 || d.Late.Failed != 0 || d.Late.Refused != 0 {
			t.Errorf("late: got %+v, want 10 redirected", d.Late)
		}
	})
}

// A server that dies at its signal leaves under a storm of new connections, which goes on until it has gone and longer:
// every one of them is served, and none is reset or turned away.
func TestC36_ListenerLeavesAStormThatGoesElsewhere(t *testing.T) {
	redirected(t, func(t *testing.T, n *lan, _ drain.OnNew, flags []string) {
		argv := packaged(loadtest.Nginx)(t, 8080, loadtest.ServerOptions{Host: n.link.B.V4.String(), Workers: 2, ReusePort: true})
		r := n.run("web", flags, argv...)
		pid := r.child()
		s := newStorm(t, n.client, n.v4(8080), 24, nil)
		eventually(t, "the storm is up", func() bool { return s.served.Load() > 1000 })
		r.signal(syscall.SIGTERM)
		eventually(t, "the server has gone", func() bool { return startOf(pid) == "" })
		served := s.served.Load()
		eventually(t, "late connections are served", func() bool { return s.served.Load() > served+500 })
		for _, x := range s.end() {
			if !x.served {
				t.Fatalf("a connection was not served, refused %v: %v", x.refused, x.err)
			}
		}
		r.drainedAtZero()
	})
}

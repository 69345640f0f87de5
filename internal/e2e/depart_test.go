// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"io"
	"net/http"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/loadtest"
	"github.com/ebbproxy/ebb/probes"
)

// The departure as it happens in a network: two machines, packets steered to both CPUs, clients of both families, a
// balancer that learns 3 s late. Everything is answered, and the drain does not use up its budget.
func TestC1_DepartureOverASteeredLink(t *testing.T) {
	for _, tt := range []struct {
		name        string
		argv        func(*testing.T) []string
		flags       []string
		tls, http2  bool
		keepAlive   int
		minRequests int64
	}{
		{"go", func(t *testing.T) []string { return goServer(t, "[::]:8080", "-mptcp") }, []string{"--protocol", "http1"}, false, false, 50, 2000},
		{"nginx, one listener per worker", func(t *testing.T) []string {
			return packaged(loadtest.Nginx)(t, 8080, loadtest.ServerOptions{Host: "::", Workers: 2, ReusePort: true})
		}, []string{"--protocol", "http1"}, false, false, 50, 2000},
		// Behind TLS and HTTP/2 the server closes what its clients keep, when it is told.
		{"go, TLS", func(t *testing.T) []string { return goServer(t, "[::]:8080", "-tls", "-graceful") },
			[]string{"--protocol", "opaque", "--notify", "signal:SIGQUIT@settled"}, true, false, 20, 500},
		{"go, HTTP/2", func(t *testing.T) []string { return goServer(t, "[::]:8080", "-tls", "-graceful") },
			[]string{"--protocol", "opaque", "--notify", "signal:SIGQUIT@settled"}, true, true, 20, 500},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n := newLAN(t)
			// A machine that stands still for a moment is no balancer that has left.
			r := n.run("web", with(wideBudget, append([]string{"--quiet-period", "1s"}, tt.flags...)...), tt.argv(t)...)
			o := loadtest.Options{
				Targets: []loadtest.Target{{Name: "v4", Addr: n.v4(8080)}, {Name: "v6", Addr: n.v6(8080)}},
				Rate:    500, KeepAlive: tt.keepAlive, Slow: 10, Drain: 3 * time.Second, HTTP2: tt.http2,
			}
			if tt.tls {
				o.TLS, o.Rate = loadtest.InsecureTLS(), 50 // a handshake with the race detector on takes its time
			}
			l := loadFrom(t, n.client, o)
			l.warm(tt.minRequests)
			for _, target := range []string{"v4", "v6"} {
				if err := l.Drop(target); err != nil {
					t.Fatal(err)
				}
			}
			r.signal(syscall.SIGTERM)
			if code := r.wait(); code != 0 {
				t.Errorf("exit code %d, want 0", code)
			}
			rep := l.end()
			d := r.result().Backend.Drain
			if d == nil || d.Outcome != drain.OutcomeDrained {
				t.Fatalf("got drain %+v, want drained", d)
			}
			unhurried(t, *d)
			flip := r.phase(drain.PhaseSettle).Time
			for v, tally := range rep.Verdicts {
				switch {
				case !v.Failure():
				case v == loadtest.ConnectRefused && tt.http2 && tally.FirstStart.After(flip) && tally.Count == rep.Kinds[loadtest.KindKeepAlive].Verdicts[v]:
					// A client that was told to go away dials the same address once more: turned away before any byte.
				default:
					t.Errorf("%d × %s (%s)", tally.Count, v, tally.Example)
				}
			}
			for _, target := range []string{"v4", "v6"} {
				if s := rep.Targets[target]; s == nil || s.Verdicts[loadtest.OK] == 0 {
					t.Errorf("nothing was served over %s", target)
				}
			}
			if rep.Races > int64(tt.keepAlive) {
				t.Errorf("%d requests met a closing connection, more than there are clients that keep theirs", rep.Races)
			}
			t.Logf("%d requests, %d races, retired %d, took %v", rep.Requests, rep.Races, d.Retired, d.Ended.Sub(d.Begun))
		})
	}
}

// A server that pauses inside its answer looks idle while it does, and nobody has looked before the drain. On connections
// that have served requests before, as those of any pool have, no answer is broken by retiring: neither one with a pause
// in its middle nor one that comes in drops.
func TestC10_PausedAnswersAreNotRetired(t *testing.T) {
	t.Parallel()
	n := newLAN(t)
	addr := n.v4(8080)
	// The drain must not end in the middle of the pause either: one longer than quiet_period cannot be told from the end.
	r := n.run("web", with(wideBudget, "--protocol", "http1", "--on-new", "refuse", "--quiet-period", "3s"), goServer(t, addr)...)
	const each = 20
	var wg sync.WaitGroup
	var begun sync.WaitGroup
	begun.Add(2 * each)
	for i := range 2 * each {
		c := dialHTTP(t, n.client, addr)
		for range 3 {
			c.get(t, "/")
		}
		path := "/pause?ms=1500"
		if i%2 == 1 {
			path = "/events?ms=100"
		}
		c.send(t, path)
		wg.Go(func() {
			defer c.Close()
			resp, err := http.ReadResponse(c.br, nil)
			begun.Done()
			if err != nil {
				t.Errorf("%s: %v", path, err)
				return
			}
			if i%2 == 1 {
				// Each tick is some 20 bytes: this is more than the second that retiring waits at the most.
				if m, err := io.CopyN(io.Discard, resp.Body, 600); err != nil {
					t.Errorf("a stream was broken after %d bytes: %v", m, err)
				}
				return
			}
			if body, err := io.ReadAll(resp.Body); err != nil || string(body) != "half half\n" {
				t.Errorf("an answer was broken in its pause: %q, %v", body, err)
			}
		})
	}
	begun.Wait()
	r.signal(syscall.SIGTERM)
	wg.Wait()
	r.drainedAtZero()
}

// Connections churn over a steered link, another's program overwrites the flags by which half of what happens is seen, and
// ebb is killed in the middle: the census equals a walk over the sockets, and the total is what clients were served.
func TestC25_CensusEqualsAWalkAfterChurn(t *testing.T) {
	n := newLAN(t)
	const port = 9473 // nobody else's: the other's program sees every socket of this machine
	addr := n.v4(port)
	argv := packaged(loadtest.Nginx)(t, port, loadtest.ServerOptions{Host: n.link.B.V4.String(), Workers: 2, ReusePort: true})
	flags := with(wideBudget, "--on-new", "refuse", "--protocol", "http1")
	r := n.run("churn", flags, argv...)
	pid := r.child()
	endAfter(t, pid)
	clobberFlags(t, "9473")
	reported(t, n.host, r, "e2e_clobber")
	total := int64(12_000)
	if long {
		total = 1_000_000
	}
	var kept []*httpConn
	keep := func() {
		c := dialHTTP(t, n.client, addr)
		c.get(t, "/")
		kept = append(kept, c)
	}
	for range 10 {
		keep()
	}
	s := newStorm(t, n.client, addr, 16, nil)
	s.until(total / 2)
	r.kill9()
	s.until(total * 3 / 4)
	r = n.start("churn", flags, argv...)
	r.adopted(pid)
	for range 10 {
		keep()
	}
	s.until(total)
	shots := s.end()
	neither(t, shots)
	if s.refused.Load() > 0 {
		t.Errorf("%d connections were turned away from a server that serves", s.refused.Load())
	}
	want := s.served.Load() + int64(len(kept))
	same := func(b api.Backend) bool {
		socks := walk(t, n.ns, probes.StatesConnected, port)
		return b.CountsKnown && value(b.Counts.Open) == int64(len(kept)) && len(socks) == len(kept) && value(b.Counts.Closing) == 0
	}
	b := r.awaitCounts("the census equals the walk", same)
	if got := value(b.Counts.Accepted); got != want {
		t.Errorf("ebb counted %d connections, %d were served", got, want)
	}
	for _, c := range kept[:5] {
		c.Close()
	}
	kept = kept[5:]
	r.awaitCounts("the census follows", same)
	t.Logf("%d connections, %s", len(shots), shown(b))
	r.signal(syscall.SIGTERM)
	r.drainedAtZero()
}

// until waits for so many answers, for as long as they keep coming.
func (s *storm) until(n int64) {
	s.t.Helper()
	for s.served.Load() < n && !s.t.Failed() {
		before := s.served.Load()
		eventually(s.t, "the storm goes on", func() bool { return s.served.Load() > before })
	}
}

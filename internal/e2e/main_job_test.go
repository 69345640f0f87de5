// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"net"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/loadtest"
)

// Every server leaves under new connections, keep-alive clients that never pause, and slow responses, and nobody
// notices: with a balancer that learns 3 s late nothing fails; with refuse, what was accepted is answered in full.
func TestC1_DepartureOfRealServers(t *testing.T) {
	for _, s := range servers {
		for _, onNew := range []drain.OnNew{drain.OnNewAuto, drain.OnNewRefuse} {
			t.Run(s.name+"/"+string(onNew), func(t *testing.T) {
				h := newHost(t)
				const port = 8080
				addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
				r := h.run("web", []string{"--protocol", "http1", "--on-new", string(onNew), "--grace", "60s"},
					s.argv(t, port, loadtest.ServerOptions{Host: "127.0.0.1", Workers: 2})...)
				rate := 500.0
				if s.name == "python" {
					rate = 100 // one interpreter does no more beside 50 clients in a closed loop
				}
				l := h.load(loadtest.Options{
					Targets: []loadtest.Target{{Name: "web", Addr: addr}},
					Rate:    rate, KeepAlive: 50, Slow: 10, Drain: 3 * time.Second,
				})
				l.warm(2000)
				if onNew == drain.OnNewAuto {
					if err := l.Drop("web"); err != nil {
						t.Fatal(err)
					}
				}
				r.signal(syscall.SIGTERM)
				if code := r.wait(); code != 0 {
					t.Errorf("exit code %d, want 0", code)
				}
				rep := l.end()
				d := r.result().Backend.Drain
				if d == nil || d.Outcome != drain.OutcomeDrained || d.FlushReason != drain.FlushZero {
					t.Fatalf("got drain %+v, want drained at zero", d)
				}
				if d.Ended.Sub(d.Begun) > 50*time.Second {
					t.Errorf("the drain took %v of 60s: the keep-alive pool kept it open", d.Ended.Sub(d.Begun))
				}
				flip := r.phase(drain.PhaseSettle).Time
				for v, tally := range rep.Verdicts {
					switch {
					case v == loadtest.OK || v == loadtest.KeepAliveRace || v == loadtest.Closed || v == loadtest.Open:
					case onNew == drain.OnNewRefuse && v == loadtest.ConnectRefused && tally.FirstStart.After(r.phase(drain.PhaseBegin).Time.Add(-time.Second)):
						// Turned away before any byte, from the flip on.
					default:
						t.Errorf("%d × %s (%s), first at %v, flip at %v", tally.Count, v, tally.Example, tally.First, flip)
					}
				}
				if n := rep.Races; n > 50 {
					t.Errorf("%d requests met a closing connection, more than there are keep-alive clients", n)
				}
				t.Logf("%d requests, %d races, took %v, retired %d", rep.Requests, rep.Races, d.Ended.Sub(d.Begun), d.Retired)
			})
		}
	}
}

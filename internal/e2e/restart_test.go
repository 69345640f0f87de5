// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/agent"
	"github.com/ebbproxy/ebb/internal/loadtest"
)

// gate lets requests through while it is open, and knows how many are on their way.
type gate struct {
	mu     sync.Mutex
	cond   *sync.Cond
	closed bool
	inside int
}

func newGate() *gate {
	g := &gate{}
	g.cond = sync.NewCond(&g.mu)
	return g
}

func (g *gate) enter() {
	g.mu.Lock()
	for g.closed {
		g.cond.Wait()
	}
	g.inside++
	g.mu.Unlock()
}

func (g *gate) leave() {
	g.mu.Lock()
	g.inside--
	g.cond.Broadcast()
	g.mu.Unlock()
}

// alone does f while no request is on its way; the next ones begin the moment it returns.
func (g *gate) alone(f func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
	for g.inside > 0 {
		g.cond.Wait()
	}
	f()
	g.closed = false
	g.cond.Broadcast()
}

// gapped starts a server at once the first time, and after a pause of seconds each time after.
func gapped(t *testing.T, pause string, argv []string) []string {
	t.Helper()
	mark := filepath.Join(t.TempDir(), "started")
	return append([]string{"sh", "-c", fmt.Sprintf(`if [ -e %[1]s ]; then sleep %[2]s; else : >%[1]s; fi; exec "$@"`, mark, pause), "sh"}, argv...)
}

// restarted are servers that crash. A backlog of 5 is what Python's http.server asks for.
var restarted = []server{
	{"go", func(t *testing.T, port int, o loadtest.ServerOptions) []string {
		t.Helper()
		return goServer(t, net.JoinHostPort(o.Host, strconv.Itoa(port)))
	}},
	{"go, MPTCP", func(t *testing.T, port int, o loadtest.ServerOptions) []string {
		t.Helper()
		return goServer(t, net.JoinHostPort(o.Host, strconv.Itoa(port)), "-mptcp")
	}},
	{"nginx", packaged(loadtest.Nginx)},
	{"node", packaged(loadtest.Node)},
	{"python, backlog 5", func(t *testing.T, port int, o loadtest.ServerOptions) []string {
		t.Helper()
		return append(packaged(loadtest.Python)(t, port, o)[:1], "-m", "http.server", strconv.Itoa(port), "--bind", o.Host, "--directory", t.TempDir())
	}},
}

// TestD9_RestartIsAPause kills servers under 200 new connections per second and has them away for two seconds. Nothing is on
// its way at the moment of the kill, since a crash costs what was in flight; every connection that begins from then on,
// while the killed process still has its listener too, is served by the next one.
func TestD9_RestartIsAPause(t *testing.T) {
	for _, s := range restarted {
		for _, host := range []string{"127.0.0.1", "::1"} {
			t.Run(s.name+" "+host, func(t *testing.T) {
				const port, rate = 8080, 200
				h := newHost(t)
				r := h.run("app", []string{"--restart-on-exit"}, gapped(t, "2", s.argv(t, port, loadtest.ServerOptions{Host: host}))...)
				first := r.child()
				g := newGate()
				l := h.gatedLoad(g, loadtest.Options{Targets: []loadtest.Target{{Name: "app", Addr: net.JoinHostPort(host, strconv.Itoa(port))}}, Rate: rate})
				r.await(agent.EventGuarded)
				l.warm(rate)
				gen := r.backend().Gen
				g.alone(func() {
					if err := syscall.Kill(first, syscall.SIGKILL); err != nil {
						t.Fatal(err)
					}
				})
				r.find("a release", func(e drain.Event) bool {
					return e.Type == drain.EventLate && strings.Contains(e.Message, "is back")
				})
				l.warm(l.Report().OK + 4*rate)
				rep := l.end()
				if rep.Failed != 0 {
					t.Errorf("got %d of %d failed, want 0: %s", rep.Failed, rep.OK+rep.Failed, verdicts(rep))
				}
				b := r.backend()
				if b.PID == first || b.Gen <= gen {
					t.Errorf("after the restart: process %d of generation %d, want another one than %d of %d", b.PID, b.Gen, first, gen)
				}
				// Two seconds of connections had to wait, and all of them were carried.
				eventually(t, "the connections that were held are counted", func() bool {
					return r.sample(`ebb_late_connections_total{action="hold",result="ok",service="app"}`) >= rate
				})
				if lost := r.sample(`ebb_late_connections_total{action="hold",result="failed",service="app"}`); lost != 0 {
					t.Errorf("got %v connections held in vain, want 0", lost)
				}
				r.signal(syscall.SIGTERM)
				if code := r.wait(); code != 0 {
					t.Errorf("exit code %d, want 0", code)
				}
			})
		}
	}
}

// sample is the value of one series.
func (r *supervised) sample(series string) float64 {
	r.h.t.Helper()
	for line := range strings.Lines(r.metrics()) {
		if value, ok := strings.CutPrefix(line, series+" "); ok {
			v, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
			if err != nil {
				r.h.t.Fatalf("read %s: %v", series, err)
			}
			return v
		}
	}
	r.h.t.Fatalf("there is no series %s", series)
	return 0
}

// gatedLoad is load whose requests go through a gate.
func (h *host) gatedLoad(g *gate, o loadtest.Options) *load {
	h.t.Helper()
	o.OnResult = func(loadtest.Result) { g.leave() }
	o.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		g.enter()
		return h.ns.DialContext(ctx, network, addr)
	}
	return h.load(o)
}

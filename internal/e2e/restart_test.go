// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

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
		hosts := []string{"127.0.0.1", "::1"}
		if s.name == "go" {
			hosts = append(hosts, "::") // one listener for clients of both families
		}
		for _, host := range hosts {
			t.Run(s.name+" "+host, func(t *testing.T) {
				const port, rate = 8080, 200
				h := newHost(t)
				r := h.run("app", []string{"--restart-on-exit"}, gapped(t, "2", s.argv(t, port, loadtest.ServerOptions{Host: host}))...)
				first := r.child()
				g := newGate()
				targets := []loadtest.Target{{Addr: net.JoinHostPort(host, strconv.Itoa(port))}}
				if host == "::" {
					targets = []loadtest.Target{{Addr: net.JoinHostPort("127.0.0.1", strconv.Itoa(port))}, {Addr: net.JoinHostPort("::1", strconv.Itoa(port))}}
				}
				l := h.gatedLoad(g, loadtest.Options{Targets: targets, Rate: rate})
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

// TestD9_AHoldIsBounded has a server stay away for longer than connections are held: those that waited are reset, later ones
// are refused, and a stop that comes meanwhile ends the run.
func TestD9_AHoldIsBounded(t *testing.T) {
	const addr = "127.0.0.1:8080"
	h := newHost(t)
	r := h.run("app", []string{"--restart-on-exit"}, gapped(t, "600", goServer(t, addr))...)
	r.await(agent.EventGuarded)
	if err := syscall.Kill(r.child(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	r.find("a hold", func(e drain.Event) bool {
		return e.Type == drain.EventLate && strings.Contains(e.Message, "new connections wait")
	})
	if b := r.backend(); b.Ready || !slices.ContainsFunc(b.Warnings, func(w string) bool { return strings.Contains(w, "CMD is away") }) {
		t.Errorf("while CMD is away: ready %v, warnings %q, want it not ready and said why", b.Ready, b.Warnings)
	}
	c := h.connect(addr)
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if n, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a connection that waited in vain: read %d, %v, want a reset", n, err)
	}
	eventually(t, "new connections are refused", func() bool {
		c, err := h.ns.DialContext(t.Context(), "tcp", addr)
		if err == nil {
			c.Close()
		}
		return errors.Is(err, syscall.ECONNREFUSED)
	})
	eventually(t, "what waited in vain is counted", func() bool {
		return r.sample(`ebb_late_connections_total{action="hold",result="failed",service="app"}`) >= 1
	})
	r.signal(syscall.SIGTERM)
	if code := r.wait(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
}

// TestR11_StopBetweenTwoStarts stops a run whose command ends each time at once.
func TestR11_StopBetweenTwoStarts(t *testing.T) {
	h := newHost(t)
	r := h.start("app", []string{"--restart-on-exit"}, "sh", "-c", "exit 3")
	again := 0
	r.find("three restarts", func(e drain.Event) bool {
		if e.Type == agent.EventRun && strings.Contains(e.Message, "again as process") {
			again++
		}
		return again == 3
	})
	r.signal(syscall.SIGTERM)
	if code := r.wait(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
}

// TestD7_NextOwnerHoldsToo kills the owner of a command that is guarded; the next owner adopts the command, guards it anew
// and starts it again when it ends.
func TestD7_NextOwnerHoldsToo(t *testing.T) {
	const addr = "127.0.0.1:8080"
	h := newHost(t)
	argv := gapped(t, "1", goServer(t, addr))
	r := h.run("app", []string{"--restart-on-exit"}, argv...)
	r.await(agent.EventGuarded)
	pid := r.child()
	if err := r.cmd.Cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-r.done
	next := h.run("app", []string{"--restart-on-exit"}, argv...)
	if got := next.child(); got != pid {
		t.Fatalf("adopted process %d, want %d", got, pid)
	}
	next.await(agent.EventGuarded)
	g := newGate()
	l := h.gatedLoad(g, loadtest.Options{Targets: []loadtest.Target{{Name: "app", Addr: addr}}, Rate: 100})
	l.warm(50)
	g.alone(func() {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	})
	next.find("a release", func(e drain.Event) bool {
		return e.Type == drain.EventLate && strings.Contains(e.Message, "is back")
	})
	l.warm(l.Report().OK + 100)
	if rep := l.end(); rep.Failed != 0 {
		t.Errorf("got %d failed, want 0: %s", rep.Failed, verdicts(rep))
	}
	next.signal(syscall.SIGTERM)
	if code := next.wait(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
}

// TestD7_WhatWaitsOutlivesOwnerAndCommand kills the owner while its command is away. What waits in the relay is carried to
// the command that the next owner starts.
func TestD7_WhatWaitsOutlivesOwnerAndCommand(t *testing.T) {
	const addr = "127.0.0.1:8080"
	h := newHost(t)
	server := goServer(t, addr)
	r := h.run("app", []string{"--restart-on-exit"}, gapped(t, "600", server)...)
	r.await(agent.EventGuarded)
	if err := syscall.Kill(r.child(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	again := r.find("a restart", func(e drain.Event) bool {
		return e.Type == agent.EventRun && strings.Contains(e.Message, "again as process")
	})
	c := h.connect(addr)
	if _, err := c.Write([]byte("GET / HTTP/1.0\r\n\r\n")); err != nil {
		t.Fatal(err)
	}
	if err := r.cmd.Cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-r.done
	if err := syscall.Kill(-int(again.Fields["pid"].(float64)), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	next := h.run("app", []string{"--restart-on-exit"}, server...)
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if answer, err := io.ReadAll(c); err != nil || !strings.Contains(string(answer), " 200 ") {
		t.Errorf("a connection that waited: got %q, %v, want an answer", answer, err)
	}
	next.signal(syscall.SIGTERM)
	if code := next.wait(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
}

// TestG10_WithoutTheKernelARestartIsNoPause says that connections are refused meanwhile, and starts the command again all the
// same.
func TestG10_WithoutTheKernelARestartIsNoPause(t *testing.T) {
	const addr = "127.0.0.1:8080"
	h := newHost(t)
	r := h.run("app", []string{"--restart-on-exit", "--datapath", "none"}, goServer(t, addr)...)
	r.find("a word of it", func(e drain.Event) bool {
		return e.Type == agent.EventDegraded && strings.Contains(e.Message, "while CMD is away")
	})
	if err := syscall.Kill(r.child(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	r.find("a restart", func(e drain.Event) bool {
		return e.Type == agent.EventRun && strings.Contains(e.Message, "again as process")
	})
	eventually(t, "it serves again", func() bool {
		c, err := h.ns.DialContext(t.Context(), "tcp", addr)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
	r.signal(syscall.SIGTERM)
	if code := r.wait(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
}

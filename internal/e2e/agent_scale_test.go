// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/agent"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/netnstest"
	"github.com/ebbproxy/ebb/probes"
)

// crowd is a process for each port from 8000 on, small ones that share their memory. Each ends by its stop signal, and all
// of them with the first, which holds no listener.
const crowd = `
import ctypes, os, select, signal, socket, sys
def serve(port):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(("127.0.0.1", port))
    s.listen(128)
    ep, conns = select.epoll(), {}
    ep.register(s, select.EPOLLIN)
    while True:
        for fd, _ in ep.poll():
            if fd == s.fileno():
                c, _ = s.accept()
                conns[c.fileno()] = c
                ep.register(c, select.EPOLLIN)
                continue
            try:
                got = conns[fd].recv(4096)
            except OSError:
                got = b""
            if got:
                conns[fd].sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            else:
                conns.pop(fd).close()
for i in range(int(sys.argv[1])):
    if os.fork() == 0:
        serve(8000 + i)
signal.pause()
`

// tenant is one of many backends.
type tenant struct {
	name  string
	ns    *netnstest.NS
	port  uint16
	addr  string
	conns []*httpConn // that are open
	made  int         // connections ever made
}

func (r *tenant) connect(t *testing.T) {
	c := dialHTTP(t, r.ns, r.addr)
	c.get(t, "/")
	r.conns, r.made = append(r.conns, c), r.made+1
}

// open is how many connections a walk of the namespace's sockets finds on the server's side.
func (r *tenant) open(t *testing.T) (n int64) {
	for _, s := range walk(t, r.ns, probes.StatesConnected, r.port) {
		if s.Local.Port() == r.port && s.State != probes.StateFinWait2 {
			n++
		}
	}
	return n
}

// views are all backends of the node, by name.
func (n *node) views() map[string]api.Backend {
	n.t.Helper()
	m := map[string]api.Backend{}
	if err := n.ask(func(ctx context.Context, c *api.Client) error {
		bs, err := c.Backends(ctx)
		for _, b := range bs {
			m[b.Name] = b
		}
		return err
	}); err != nil {
		n.t.Fatalf("list the backends: %v", err)
	}
	return m
}

// An agent owns backends in many network namespaces, all of which use the same addresses. It finds each, counts each by
// itself, drains one while the others notice nothing, and its successor takes each over as it was, once.
func TestC13_OneDrainsAmongManyBackends(t *testing.T) {
	t.Parallel()
	namespaces, each := 6, 4
	if long {
		namespaces = 50
	}
	n := newNode(t, "")
	argv := python(t, crowd, fmt.Sprint(each))
	var all []*tenant
	var config strings.Builder
	config.WriteString(agentBudget + "services:\n")
	for i := range namespaces {
		ns := netnstest.New(t)
		program(t, ns, argv...)
		for j := range each {
			r := &tenant{name: fmt.Sprintf("b%d-%d", i, j), ns: ns, port: uint16(8000 + j)}
			r.addr = fmt.Sprintf("127.0.0.1:%d", r.port)
			config.WriteString(service(r.name, ns, int(r.port), "protocol: http1", "idle: wait"))
			all = append(all, r)
		}
	}
	n.set(config.String())
	d := n.agent()

	// agree waits until each backend is as the walk and its clients say, all of them in one answer.
	agree := func(what string, is func(r *tenant, b api.Backend) bool) (views map[string]api.Backend) {
		t.Helper()
		var why string
		defer func() {
			if why != "" {
				t.Log(why)
			}
		}()
		eventually(t, what, func() bool {
			views, why = n.views(), ""
			for _, r := range all {
				b := views[r.name]
				if !b.CountsKnown || value(b.Counts.Open) != r.open(t) || !is(r, b) {
					why = fmt.Sprintf("%s is %s %s %q, its clients have %d of %d connections", r.name, b.State, shown(b), b.Warnings, len(r.conns), r.made)
					return false
				}
			}
			return true
		})
		return views
	}
	serving := func(r *tenant, b api.Backend) bool {
		return b.Ready && b.State == drain.StateServing && value(b.Counts.Open) == int64(len(r.conns)) && value(b.Counts.Accepted) == int64(r.made)
	}
	agree("all found", serving)

	for i, r := range all {
		for range 2 + i%3 {
			r.connect(t)
		}
		for range 2 { // some backends are left with none
			r.conns[0].Close()
			r.conns = r.conns[1:]
		}
	}
	before := agree("counts after churn", serving)

	one, others := all[1], append([]*tenant{all[0]}, all[2:]...)
	if len(one.conns) == 0 {
		t.Fatal("the one that is drained needs a connection")
	}
	got := n.drains(one.name, api.DrainRequest{OnNew: drain.OnNewRefuse})
	refused := &host{t: t, ns: one.ns}
	refused.mustRefuse(one.addr)
	for _, r := range others {
		for _, c := range r.conns {
			c.get(t, "/")
		}
		r.connect(t)
	}
	untouched := func(r *tenant, b api.Backend) bool {
		if r == one {
			return b.State == drain.StateDraining && b.Drain != nil && b.Drain.ID == got.ID && value(b.Counts.Open) == int64(len(r.conns))
		}
		return serving(r, b) && b.Gen == before[r.name].Gen && b.PID == before[r.name].PID && b.Drain == nil
	}
	agree("one drains, the others serve", untouched)
	for _, typ := range []string{drain.EventBegin, drain.EventPhase, drain.EventWarning} {
		for _, e := range d.all(typ) {
			if e.Backend != one.name {
				t.Errorf("event %s of %s, which nobody drains: %s", e.Type, e.Backend, e.Message)
			}
		}
	}

	d.kill9()
	for _, r := range others {
		if len(r.conns) > 1 { // goes while nobody looks
			r.conns[0].Close()
			r.conns = r.conns[1:]
		}
	}
	d = n.agent()
	agree("all taken over", untouched)
	taken := map[string]int{}
	for _, e := range d.all(agent.EventRun) {
		if !strings.HasPrefix(e.Message, "took over ") {
			t.Errorf("%s: %q, want that it was taken over and no more", e.Backend, e.Message)
		}
		taken[e.Backend]++
	}
	for _, r := range all {
		if taken[r.name] != 1 {
			t.Errorf("%s was taken over %d times", r.name, taken[r.name])
		}
	}
	for _, c := range one.conns {
		c.Close()
	}
	one.conns = nil
	if e := d.ended(got.ID); e.Outcome != drain.OutcomeDrained {
		t.Errorf("the drain ended %s, want drained", e.Outcome)
	}
	eventually(t, "its process has its stop signal", func() bool { return !living(before[one.name].PID) })
	all = others
	agree("the others serve", untouched)
}

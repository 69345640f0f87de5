// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/loadtest"
	"github.com/ebbproxy/ebb/internal/netns"
)

// refused is a drain whose new connections are refused.
var refused = api.DrainRequest{OnNew: drain.OnNewRefuse}

// admissions asks two addresses without a pause, of which one has to serve and the other to refuse.
type admissions struct {
	stopped atomic.Bool
	wg      sync.WaitGroup
	asked   atomic.Int64
}

func (n *node) watchAdmissions(open, closed string) *admissions {
	n.t.Helper()
	a := &admissions{}
	ask := func(addr string, good func(shot) bool) {
		err := netns.Do(n.ns.Fd(), func() error {
			for !a.stopped.Load() {
				if x := fire(addr, "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"); !good(x) {
					n.t.Errorf("%s at %v: served %v, refused %v: %v", addr, x.start, x.served, x.refused, x.err)
					return nil
				}
				a.asked.Add(1)
			}
			return nil
		})
		if err != nil {
			n.t.Errorf("enter the namespace: %v", err)
		}
	}
	a.wg.Go(func() { ask(open, func(x shot) bool { return x.served }) })
	a.wg.Go(func() { ask(closed, func(x shot) bool { return x.refused }) })
	n.t.Cleanup(a.end)
	return a
}

func (a *admissions) end() {
	a.stopped.Store(true)
	a.wg.Wait()
}

// A standby takes over from an owner that was killed, and from one that stands still, which it kills first. All the while
// the open backend serves and the draining one refuses.
func TestD3_AStandbyTakesOver(t *testing.T) {
	for _, how := range []string{"killed", "stopped"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, "")
			const open, closed = "127.0.0.1:8080", "127.0.0.1:8081"
			n.set(agentBudget + "services:\n" + service("open", n.ns, 8080) + service("closed", n.ns, 8081))
			program(t, n.ns, goServer(t, open)...)
			program(t, n.ns, goServer(t, closed)...)
			owner := n.agent()
			n.ready("open")
			n.ready("closed")
			hold := holdOpen(t, n.ns, closed)
			before := n.drains("closed", refused)
			if _, stderr, code := n.ebb("agent", "--config", n.config); code != 1 || !strings.Contains(stderr, fmt.Sprint(owner.pid())) {
				t.Errorf("a second agent ended with %d: %s; want it to name process %d", code, stderr, owner.pid())
			}
			standby := n.begin("--standby")
			w := n.watchAdmissions(open, closed)
			if how == "killed" {
				owner.kill9()
			} else {
				owner.freeze()
			}
			standby.owns()
			select {
			case <-owner.done:
			default:
				t.Error("there are two owners")
			}
			b := n.awaitView("closed", "one connection", func(b api.Backend) bool { return value(b.InFlight) == 1 })
			if b.Drain == nil || b.Drain.ID != before.ID || b.Drain.Outcome != "" {
				t.Errorf("got drain %+v, want %s to go on", b.Drain, before.ID)
			}
			n.ready("open")
			from := w.asked.Load()
			eventually(t, "both were asked of the new owner", func() bool { return w.asked.Load() > from+20 })
			w.end()
			hold.Close()
			if e := standby.ended(before.ID); e.Outcome != drain.OutcomeDrained {
				t.Errorf("the drain ended %s, want drained", e.Outcome)
			}
		})
	}
}

// The agent is killed in the middle of a drain with 50 connections open, 20 of which close while it is dead.
func TestD4_TheAgentIsKilledInTheMiddleOfADrain(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	const addr = "127.0.0.1:8080"
	n.set(agentBudget + "services:\n" + service("web", n.ns, 8080))
	p := program(t, n.ns, goServer(t, addr)...)
	d := n.agent()
	n.ready("web")
	var open []*httpConn
	for range 50 {
		open = append(open, holdOpen(t, n.ns, addr))
	}
	before := n.drains("web", refused)
	n.awaitView("web", "50 in flight", func(b api.Backend) bool { return value(b.InFlight) == 50 })
	d.kill9()
	for _, c := range open[:20] {
		c.Close()
	}
	n.mustRefuse(addr)
	d = n.begin()
	b := n.awaitView("web", "30 are left", func(b api.Backend) bool {
		if got := value(b.InFlight); b.CountsKnown && got < 30 {
			t.Fatalf("%d in flight while 30 are open", got)
		}
		return value(b.InFlight) == 30
	})
	if b.Drain == nil || b.Drain.ID != before.ID || b.Drain.Outcome != "" {
		t.Fatalf("got drain %+v, want %s to go on", b.Drain, before.ID)
	}
	// Both are the same moment of the boot clock, shown on the wall clock.
	if off := b.Drain.Deadline.Sub(before.Deadline).Abs(); off > time.Second {
		t.Errorf("the deadline moved by %v", off)
	}
	n.mustRefuse(addr)
	for _, c := range open[20:] {
		c.Close()
	}
	if e := d.ended(before.ID); e.Outcome != drain.OutcomeDrained {
		t.Errorf("the drain ended %s, want drained", e.Outcome)
	}
	_ = p.Wait() // its stop signal ends it
}

// Agents follow each other by SIGTERM under load on a service of two backends, one of which drains meanwhile: nobody is
// reset, no count is lost, and the drain goes on.
func TestD7_UpgradesUnderLoad(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	const addr, one, two = "127.0.0.1:8000", "127.0.0.1:8081", "127.0.0.1:8082"
	n.set(agentBudget + fmt.Sprintf(`services:
  - name: web
    protocol: http1
    listen: [%q]
    backends:
      - {name: one, match: %s}
      - {name: two, match: %s}
`, addr, match(n.ns, 8081), match(n.ns, 8082)))
	program(t, n.ns, goServer(t, one)...)
	program(t, n.ns, goServer(t, two)...)
	d := n.agent()
	n.ready("one")
	n.ready("two")
	eventually(t, "the service is steered", func() bool { served, _ := n.serves(addr); return served })
	streams := func(to string) (cs []*httpConn) {
		for range 10 {
			c := dialHTTP(t, n.ns, to)
			c.send(t, "/events?ms=20")
			c.head(t)
			cs = append(cs, c)
		}
		return cs
	}
	flow := func(cs []*httpConn) {
		t.Helper()
		for _, c := range cs {
			if _, err := c.br.Discard(c.br.Buffered() + 1); err != nil {
				t.Errorf("a stream ended: %v", err)
			}
		}
	}
	ones, twos := streams(one), streams(two)
	load := n.load(loadtest.Options{Targets: []loadtest.Target{{Addr: addr}}, Rate: 200, KeepAlive: 2, Gap: 20 * time.Millisecond})
	load.warm(50)
	got := n.drains("one", api.DrainRequest{})
	for range 3 {
		d.stop()
		load.warm(load.Report().OK + 50)
		d = n.agent()
		b := n.awaitView("one", "its streams are counted", func(b api.Backend) bool { return b.CountsKnown && value(b.Counts.Open) >= 10 })
		if b.Drain == nil || b.Drain.ID != got.ID || b.Drain.Outcome != "" {
			t.Fatalf("got drain %+v, want %s to go on", b.Drain, got.ID)
		}
		flow(ones)
		flow(twos)
		load.warm(load.Report().OK + 50)
	}
	if r := load.end(); r.Failed > 0 {
		t.Errorf("%d of %d requests failed: %s", r.Failed, r.Requests, verdicts(r))
	}
	n.awaitView("two", "its streams are counted", func(b api.Backend) bool { return b.CountsKnown && value(b.Counts.Open) == 10 })
	for _, c := range ones {
		c.Close()
	}
	if e := d.ended(got.ID); e.Outcome != drain.OutcomeDrained {
		t.Errorf("the drain ended %s, want drained", e.Outcome)
	}
	flow(twos)
}

// A hundred connections are counted after a kill of the agent, and later none.
func TestC24_TheAgentIsKilledWith100Connections(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	const addr = "127.0.0.1:8080"
	n.set(agentBudget + "services:\n" + service("web", n.ns, 8080))
	program(t, n.ns, goServer(t, addr)...)
	d := n.agent()
	n.ready("web")
	var open []*httpConn
	for range 100 {
		open = append(open, holdOpen(t, n.ns, addr))
	}
	all := func(b api.Backend) bool {
		return b.CountsKnown && value(b.Counts.Open) == 100 && value(b.InFlight) == 100
	}
	n.awaitView("web", "100", all)
	d.kill9()
	n.begin()
	n.awaitView("web", "100 after a restart", all)
	for _, c := range open {
		c.Close()
	}
	n.awaitView("web", "none later", func(b api.Backend) bool { return b.CountsKnown && value(b.Counts.Open) == 0 })
}

// What was set at run time outlives a kill of the agent: a drain's policy and its extended deadline.
func TestC47_WhatWasSetOutlivesTheAgent(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	const addr = "127.0.0.1:8080"
	n.set(agentBudget + "services:\n" + service("web", n.ns, 8080))
	program(t, n.ns, goServer(t, addr)...)
	d := n.agent()
	n.ready("web")
	open := []*httpConn{holdOpen(t, n.ns, addr)}
	all := func(b api.Backend) bool { return b.CountsKnown && value(b.InFlight) == 1 }
	before := n.drains("web", api.DrainRequest{OnNew: drain.OnNewRefuse, OnDeadline: drain.OnDeadlineLeave, Reason: "for the test"})
	extended, stderr, code := n.ebb("extend", "web", "--by", "30s")
	if code != 0 {
		t.Fatalf("extend: %d: %s%s", code, extended, stderr)
	}
	d.kill9()
	d = n.begin()
	b := n.awaitView("web", "one in flight after a restart", all)
	got := b.Drain
	if got == nil || got.ID != before.ID || got.Policy.OnNew != drain.OnNewRefuse || got.Policy.OnDeadline != drain.OnDeadlineLeave || got.Reason != "for the test" {
		t.Fatalf("got drain %+v, want all of %+v", got, before)
	}
	if off := got.Deadline.Sub(before.Deadline.Add(30 * time.Second)).Abs(); off > time.Second {
		t.Errorf("the deadline is %v away from the extended one", off)
	}
	for _, c := range open {
		c.Close()
	}
	if e := d.ended(before.ID); e.Outcome != drain.OutcomeDrained {
		t.Errorf("the drain ended %s, want drained", e.Outcome)
	}
}

// A thousand connections are opened before an agent attaches, while it does, and afterwards: each is counted once.
func TestC25_ConnectionsAroundTheAttachOfAnAgent(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	const addr, each = "127.0.0.1:8080", 333
	n.set(agentBudget + "services:\n" + service("web", n.ns, 8080))
	program(t, n.ns, goServer(t, addr)...)
	eventually(t, "the server listens", func() bool { served, _ := n.serves(addr); return served })
	opened := make(chan struct{})
	dial := func() {
		c := dialHTTP(t, n.ns, addr)
		c.get(t, "/")
	}
	for range each {
		dial()
	}
	var during atomic.Int64
	go func() {
		defer close(opened)
		for range each {
			dial()
			during.Add(1)
		}
	}()
	eventually(t, "connections are being opened", func() bool { return during.Load() > 0 })
	n.agent()
	<-opened
	n.ready("web")
	for range 1000 - 2*each {
		dial()
	}
	n.awaitView("web", "a thousand", func(b api.Backend) bool {
		if b.CountsKnown && value(b.Counts.Open) > 1000 {
			t.Fatalf("%d are counted", value(b.Counts.Open))
		}
		return b.CountsKnown && value(b.Counts.Open) == 1000
	})
	if got := len(walk(t, n.ns, 1<<1, 8080)); got != 1000 { // TCP_ESTABLISHED
		t.Errorf("a walk finds %d established sockets, want 1000: the test shows nothing", got)
	}
}

// The agent dies after the flip and the server too; whoever is started on its port is served, though no agent lives.
func TestG1_RestartedWithoutAnAgentIsServed(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	const addr = "127.0.0.1:8080"
	n.set(agentBudget + "services:\n" + service("web", n.ns, 8080))
	p := program(t, n.ns, goServer(t, addr)...)
	d := n.agent()
	n.ready("web")
	hold := holdOpen(t, n.ns, addr)
	before := n.drains("web", refused)
	n.mustRefuse(addr)
	d.kill9()
	n.mustRefuse(addr)
	if err := p.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = p.Wait()
	hold.Close()
	next := program(t, n.ns, goServer(t, addr)...)
	eventually(t, "the next server listens", func() bool { return len(walk(t, n.ns, 1<<10, 8080)) == 1 }) // TCP_LISTEN
	n.mustServe(addr)
	if len(n.pinsOf()) == 0 {
		t.Error("nothing is pinned: the test shows nothing")
	}
	// The next agent does not refuse it either, and the old drain has one outcome.
	stop, refusals := make(chan struct{}), make(chan error, 1)
	go func() {
		var err error
		for {
			select {
			case <-stop:
				refusals <- err
				return
			default:
			}
			_ = netns.Do(n.ns.Fd(), func() error {
				if x := fire(addr, "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"); !x.served {
					err = fmt.Errorf("at %v: %w", x.start, x.err)
				}
				return nil
			})
		}
	}()
	d = n.begin()
	e := d.ended(before.ID)
	if e.Outcome != drain.OutcomeLost {
		t.Errorf("the drain ended %s, want lost: its process was killed with a connection open", e.Outcome)
	}
	b := n.awaitView("web", "the next process serves", func(b api.Backend) bool { return b.Ready && b.PID == next.Process.Pid && b.CountsKnown })
	if b.Gen <= before.Gen {
		t.Errorf("got generation %d after %d", b.Gen, before.Gen)
	}
	close(stop)
	if err := <-refusals; err != nil {
		t.Errorf("the next server was not reached: %v", err)
	}
	if ends := d.all(drain.EventEnd); len(ends) != 1 {
		t.Errorf("%d drains have ended, want one", len(ends))
	}
	d.kill9()
	d = n.agent()
	n.ready("web")
	if ends := d.all(drain.EventEnd); len(ends) != 0 {
		t.Errorf("the drain ended again: %+v", ends)
	}
}

// An agent is killed at random moments around the beginning of a drain. Whatever was answered holds afterwards; and what
// was not answered has either begun in full or not at all.
func TestD13_KilledAroundTheFlip(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	const addr = "127.0.0.1:8080"
	n.set(agentBudget + "services:\n" + service("web", n.ns, 8080))
	program(t, n.ns, goServer(t, addr)...)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	d := n.agent()
	holdOpen(t, n.ns, addr)
	begun := 0
	for round := range 12 {
		n.ready("web")
		answered := make(chan string, 1)
		go func() {
			out, _, code := n.ebb("drain", "web", "--on-new", "refuse", "-o", "json")
			if code != 0 {
				out = ""
			}
			answered <- out
		}()
		<-time.After(time.Duration(r.IntN(150)) * time.Millisecond)
		d.kill9()
		served, refusedNow := n.serves(addr)
		if served == refusedNow {
			t.Fatalf("round %d: served %v, refused %v", round, served, refusedNow)
		}
		said := <-answered
		if said != "" && !refusedNow {
			t.Errorf("round %d: the drain was answered, and its admission is open", round)
		}
		d = n.agent()
		b := n.awaitView("web", "its counts are known", func(b api.Backend) bool { return b.CountsKnown && value(b.Counts.Open) == 1 })
		running := b.Drain != nil && b.Drain.Running()
		if said != "" && (!running || !strings.Contains(said, b.Drain.ID)) {
			t.Errorf("round %d: the drain that was answered does not run: %s", round, said)
		}
		if refusedNow && !running {
			t.Errorf("round %d: admission was closed by a drain that does not run", round)
		}
		if !running {
			n.mustServe(addr)
			continue
		}
		begun++
		eventually(t, "what runs is in force", func() bool { _, refused := n.serves(addr); return refused })
		if _, stderr, code := n.ebb("undrain", "web"); code != 0 {
			t.Fatalf("undrain: %s", stderr)
		}
		n.mustServe(addr)
	}
	t.Logf("%d of 12 drains had begun", begun)
}

// Messages for a generation that has gone are counted and change nothing, across restarts of the agent too.
func TestR5_StaleGenerationOnTheSamePort(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	const addr = "127.0.0.1:8080"
	n.set(agentBudget + "services:\n" + service("web", n.ns, 8080))
	p := program(t, n.ns, goServer(t, addr)...)
	d := n.agent()
	n.ready("web")
	first := n.drains("web", refused)
	d.ended(first.ID)
	_ = p.Wait()
	d.kill9()
	next := program(t, n.ns, goServer(t, addr)...)
	d = n.begin()
	b := n.awaitView("web", "the next process serves", func(b api.Backend) bool { return b.Ready && b.PID == next.Process.Pid })
	if b.Gen <= first.Gen {
		t.Fatalf("got generation %d after %d", b.Gen, first.Gen)
	}
	for what, replay := range map[string]func(context.Context, *api.Client) error{
		"drain": func(ctx context.Context, c *api.Client) error {
			_, err := c.Drain(ctx, "web", api.DrainRequest{Gen: first.Gen})
			return err
		},
		"undrain": func(ctx context.Context, c *api.Client) error {
			_, err := c.Undrain(ctx, "web", api.UndrainRequest{Gen: first.Gen})
			return err
		},
		"extend": func(ctx context.Context, c *api.Client) error {
			_, err := c.Extend(ctx, "web", api.ExtendRequest{Gen: first.Gen, Extra: api.Duration(time.Second)})
			return err
		},
		"cut": func(ctx context.Context, c *api.Client) error {
			_, err := c.Cut(ctx, "web", api.CutRequest{Gen: first.Gen})
			return err
		},
	} {
		if err := n.ask(replay); !errors.Is(err, api.ErrStale) {
			t.Errorf("%s for the generation that has gone: got %v, want %v", what, err, api.ErrStale)
		}
	}
	d.await(drain.EventStale, "web")
	if b := n.view("web"); b.State != drain.StateServing || b.Drain != nil && b.Drain.Running() {
		t.Errorf("got state %s, drain %+v", b.State, b.Drain)
	}
	n.mustServe(addr)
}

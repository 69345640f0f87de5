// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
)

// signal sends a signal to an application.
func (p *part) signal(sig syscall.Signal) {
	p.t.Helper()
	if err := p.Process.Signal(sig); err != nil {
		p.t.Fatalf("signal the application: %v", err)
	}
}

// wholeDrain is what an application that takes part applies of a drain that nothing moves.
var wholeDrain = []string{api.SessionDraining, api.SessionFlush, api.SessionDone, api.SessionEnd}

// An application that stands still gets nothing new after 10 s, and again when it goes on. After 15 s it is lost: it drains, and what
// it is told then it hears once when it goes on, however late.
func TestR13_SilenceOfAnApplication(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	n.set("defaults: {grace: 5s, flush_timeout: 1s, reserve: 1s, quiet_period: 300ms}\nservices:\n" +
		backendsOf("web", "listen: [\"127.0.0.1:80\"]\n"+apiFlush, "name: web, match: "+match(n.ns, 8081), "name: other, match: "+match(n.ns, 8082)))
	p := n.part("auto", "listen="+webAddr, "exit=none")
	named(t, n.ns, "other", "127.0.0.1:8082")
	d := n.agent()
	n.sessions("web", 1)
	n.shares("other", "other", "web")
	p.signal(syscall.SIGSTOP)
	b := n.awaitView("web", "suspect", func(b api.Backend) bool { return b.State == drain.StateSuspect })
	if b.Ready || b.Drain != nil {
		t.Errorf("a suspect is ready %t, its drain is %+v", b.Ready, b.Drain)
	}
	if silent := time.Since(b.Sessions[0].Heard); silent < 10*time.Second {
		t.Errorf("it was suspected after %v", silent)
	}
	n.shares("other", "other")
	p.signal(syscall.SIGCONT)
	n.awaitView("web", "back", func(b api.Backend) bool { return b.State == drain.StateServing && b.Ready })
	n.shares("other", "other", "web")
	if all := d.all(drain.EventBegin); len(all) > 0 {
		t.Fatalf("a suspect that came back was drained: %+v", all)
	}
	p.must(`POST /hold {"name":"of a lost one"}`)
	p.signal(syscall.SIGSTOP)
	begun := d.await(drain.EventBegin, "web")
	if begun.Cause != drain.CauseHeartbeat {
		t.Errorf("the cause is %s, want heartbeat", begun.Cause)
	}
	if silent := begun.Time.Sub(n.view("web").Sessions[0].Heard); silent < 14*time.Second {
		t.Errorf("it was lost after %v", silent)
	}
	// What a lost session holds blocks nothing.
	if e := d.await(drain.EventFlush, "web"); e.Fields["reason"] == string(drain.FlushDeadline) {
		t.Errorf("the flush waited for its deadline: %+v", e)
	}
	d.ended(begun.Drain)
	p.signal(syscall.SIGCONT)
	// R14: the last message is there although its time is over.
	p.hears(wholeDrain...)
	if e := p.applied(api.SessionDraining); e.Drain != begun.Drain || e.Cause != drain.CauseHeartbeat {
		t.Errorf("it heard of %+v", e)
	}
	if begins := d.all(drain.EventBegin); len(begins) != 1 {
		t.Errorf("there were %d drains", len(begins))
	}
}

// An application that is paused beyond its deadline in the middle of a drain hears the end of it, once, when it goes on.
func TestR14_TheLastMessageWaitsForAPausedApplication(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	n.set("defaults: {grace: 5s, flush_timeout: 1s, reserve: 1s, quiet_period: 300ms}\nservices:\n" + service("web", n.ns, 8081, apiFlush))
	p := n.part("auto", "listen="+webAddr, "exit=none")
	d := n.agent()
	n.sessions("web", 1)
	c := n.stuck(webAddr)
	got := n.drains("web", api.DrainRequest{})
	p.applied(api.SessionDraining)
	p.signal(syscall.SIGSTOP)
	if e := d.ended(got.ID); e.Outcome != drain.OutcomeExpired {
		t.Errorf("the drain ended %s, want expired", e.Outcome)
	}
	c.Close()
	p.signal(syscall.SIGCONT)
	p.hears(wholeDrain...)
	if e := p.applied(api.SessionDone); e.Outcome != drain.OutcomeExpired {
		t.Errorf("it heard that the drain ended %s", e.Outcome)
	}
	if flushes := p.all("flushing"); len(flushes) != 1 {
		t.Errorf("it flushed %d times", len(flushes))
	}
}

// While the owner stands still nothing beats, although its front lives, and the application thinks of it what it would think of
// the application. An announced drain keeps its time on both sides, and comes to one flush and one outcome.
func TestR13_SilenceOfTheOwner(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	n.set("defaults: {grace: 25s, flush_timeout: 5s, reserve: 3s, quiet_period: 300ms}\nservices:\n" + service("web", n.ns, 8081, apiFlush))
	p := n.part("auto", "listen="+webAddr, "exit=none")
	d := n.agent()
	n.sessions("web", 1)
	p.says("beat", 1)
	d.freeze()
	p.says("away suspect", 1)
	d.signal(syscall.SIGCONT)
	n.awaitView("web", "as before", func(b api.Backend) bool { return b.State == drain.StateServing && b.Ready && len(b.Sessions) == 1 })
	if lost := p.all("away lost"); len(lost) > 0 {
		t.Log("the machine was so slow that the owner was lost")
	}
	n.stuck(webAddr) // so that the drain does not end before its time
	got := n.drains("web", api.DrainRequest{})
	p.applied(api.SessionDraining)
	d.freeze()
	p.says("flushing alone", 1)
	if n := len(p.all("event flush")); n > 0 {
		t.Errorf("%d flushes came from an owner that stands still", n)
	}
	d.signal(syscall.SIGCONT)
	e := d.ended(got.ID)
	p.hears(wholeDrain...)
	if flushes := p.all("flushing"); len(flushes) != 1 {
		t.Errorf("it flushed %q", flushes)
	}
	if done := p.applied(api.SessionDone); done.Outcome != e.Outcome {
		t.Errorf("it heard that the drain ended %s, which ended %s", done.Outcome, e.Outcome)
	}
}

// The connection breaks at each event of a drain, before it is applied and again before it is acknowledged: each event is applied
// once, in order, and there is one flush.
func TestR15_TheConnectionBreaksAtEachEvent(t *testing.T) {
	t.Parallel()
	n := webNode(t, apiFlush)
	p := n.part("auto,twice", "listen="+webAddr, "exit=none")
	d := n.agent()
	n.sessions("web", 1)
	c := n.stuck(webAddr)
	got := n.drains("web", api.DrainRequest{})
	p.applied(api.SessionDraining)
	n.must("extend", "web", "--by", "5s")
	p.applied(api.SessionDeadline)
	c.Close()
	if e := d.ended(got.ID); e.Outcome != drain.OutcomeDrained {
		t.Errorf("the drain ended %s, want drained", e.Outcome)
	}
	p.hears(api.SessionDraining, api.SessionDeadline, api.SessionFlush, api.SessionDone, api.SessionEnd)
	if flushes := p.all("flushing"); len(flushes) != 1 {
		t.Errorf("it flushed %d times", len(flushes))
	}
	for _, kind := range p.order() {
		if times := len(p.all("got " + kind + " ")); times < 3 && kind != api.SessionEnd {
			t.Errorf("%s came %d times, and was not acknowledged before the third", kind, times)
		}
	}
	if e := n.view("web"); e.Drain.FlushResult != drain.FlushOK {
		t.Errorf("the flush came back %s", e.Drain.FlushResult)
	}
}

// The agent is killed, or ends and another begins, at each event of a drain, before the event is applied and acknowledged: the
// session outlives that, each event is applied once, and there is one flush and one outcome.
func TestR15_TheAgentIsReplacedAtEachEvent(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"kill", "stop"} {
		for _, when := range wholeDrain {
			t.Run(how+" at "+when, func(t *testing.T) {
				t.Parallel()
				n := webNode(t, apiFlush)
				p := n.part("auto,wait="+when, "listen="+webAddr, "exit=none")
				d := n.agent()
				n.sessions("web", 1)
				id := p.says("session", 1)
				p.must(`POST /hold {"name":"migration"}`)
				got := n.drains("web", api.DrainRequest{})
				if when != api.SessionDraining {
					p.must(`POST /release {"name":"migration"}`)
				}
				p.says("got "+when+" ", 1)
				if how == "kill" {
					d.kill9()
				} else {
					d.stop()
				}
				p.tell("go")
				n.agent()
				if when == api.SessionDraining {
					// The lease outlives it too.
					b := n.awaitView("web", "held still", func(b api.Backend) bool { return len(b.Sessions) == 1 && len(b.Sessions[0].Holds) == 1 })
					if b.State != drain.StateDraining {
						t.Errorf("the backend is %s, and a lease is held", b.State)
					}
					p.must(`POST /release {"name":"migration"}`)
				}
				p.hears(wholeDrain...)
				if all := p.all("session"); len(all) != 1 || all[0] != id {
					t.Errorf("it registered as %q", all)
				}
				if flushes := p.all("flushing"); len(flushes) != 1 {
					t.Errorf("it flushed %d times", len(flushes))
				}
				for _, kind := range wholeDrain[:3] {
					if e := p.applied(kind); e.Drain != got.ID {
						t.Errorf("%s is of drain %s, want %s", kind, e.Drain, got.ID)
					}
				}
				if e := p.applied(api.SessionDone); e.Outcome != drain.OutcomeDrained {
					t.Errorf("the drain ended %s, want drained", e.Outcome)
				}
				// The answer counts, although the one who asked is gone.
				if d := n.view("web").Drain; d == nil || d.FlushResult != drain.FlushOK {
					t.Errorf("the drain: %+v, want its flush answered", d)
				}
				if ends := p.all("stream end"); how == "stop" && (when == api.SessionDraining || when == api.SessionFlush) && !slices.Contains(ends, api.EndRestarting) {
					t.Errorf("its streams ended %q, want one that says %s", ends, api.EndRestarting)
				}
			})
		}
	}
}

// A session outlives a restart of the run that supervises its process, too.
func TestR15_TheRunIsKilledInADrain(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	argv := app(t, "session=auto,leave", "listen="+webAddr, "exit=none")
	r := h.run("web", with(wideBudget, "--flush", "api"), argv...)
	pid := r.child()
	endAfter(t, pid)
	r.find("a session", func(e drain.Event) bool { return e.Type == api.EventSession })
	c := h.stuck(webAddr)
	r.signal(syscall.SIGTERM)
	r.phase(drain.PhaseWait)
	stdout := r.lines
	r.kill9()
	again := h.start("web", with(wideBudget, "--flush", "api"), argv...)
	again.adopted(pid)
	c.Close()
	if e := again.await(drain.EventEnd); e.Outcome != drain.OutcomeDrained {
		t.Errorf("the drain ended %s, want drained", e.Outcome)
	}
	again.wait()
	var kinds []string
	for _, l := range stdout() {
		if rest, ok := strings.CutPrefix(l, "event "); ok {
			kind, _, _ := strings.Cut(rest, " ")
			kinds = append(kinds, kind)
		}
	}
	if want := wholeDrain[:2]; !slices.Equal(kinds, want) {
		t.Errorf("CMD applied %q, want %q", kinds, want)
	}
}

// How a session ends says what comes after it: by itself, with its process, with its generation.
func TestR12_HowASessionEnds(t *testing.T) {
	t.Parallel()
	t.Run("by itself", func(t *testing.T) {
		t.Parallel()
		n := webNode(t, apiFlush)
		p := n.part("", "listen="+webAddr)
		d := n.agent()
		n.ready("web")
		p.must(`POST  {"role":"app"}`)
		p.must(`POST /hold {"name":"import"}`)
		n.sessions("web", 1)
		p.must("DELETE ")
		n.sessions("web", 0)
		p.refuses("GET ", 404, "unknown-session")
		p.tell("as ")
		p.must(`POST  {}`)
		p.must(`POST  {}`)
		p.tell("as ")
		if status, body := p.ask("GET "); status != 400 || !strings.Contains(body, "session") {
			t.Errorf("of two sessions none is named: got %d %s", status, body)
		}
		if begins := d.all(drain.EventBegin); len(begins) > 0 {
			t.Errorf("a session that ends by itself began %+v", begins)
		}
	})
	t.Run("with its process", func(t *testing.T) {
		t.Parallel()
		n := webNode(t, apiFlush)
		p := n.part("auto", "listen="+webAddr)
		d := n.agent()
		n.sessions("web", 1)
		// A job of the application, with a session of its own.
		p.tell("run exec " + n.bin + " hold --name import -- sleep 300")
		b := n.awaitView("web", "held", func(b api.Backend) bool {
			return slices.ContainsFunc(b.Sessions, func(s api.SessionView) bool { return len(s.Holds) == 1 })
		})
		i := slices.IndexFunc(b.Sessions, func(s api.SessionView) bool { return len(s.Holds) == 1 })
		// Not by a signal that it could pass on.
		if err := syscall.Kill(b.Sessions[i].PID, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		n.awaitView("web", "without the job", func(b api.Backend) bool { return len(b.Sessions) == 1 && len(b.Sessions[0].Holds) == 0 })
		if b := n.view("web"); b.State != drain.StateServing {
			t.Errorf("after the end of a job the backend is %s", b.State)
		}
		if begins := d.all(drain.EventBegin); len(begins) > 0 {
			t.Errorf("the end of a job began %+v", begins)
		}
	})
	t.Run("with its generation", func(t *testing.T) {
		t.Parallel()
		n := webNode(t, apiFlush)
		p := n.part("auto", "listen="+webAddr, "exit=none")
		n.agent()
		n.sessions("web", 1)
		n.drains("web", api.DrainRequest{})
		p.hears(wholeDrain...)
		if e := p.applied(api.SessionEnd); e.Reason != api.EndEvicted || e.Seq == 0 {
			t.Errorf("got %+v, want evicted, numbered", e)
		}
		// Another process is another generation, with a session of its own.
		p.signal(syscall.SIGKILL)
		_ = p.Wait()
		next := n.part("auto", "listen="+webAddr)
		b := n.sessions("web", 1)
		if b.PID != next.pid() || b.Sessions[0].ID == p.says("session", 1) {
			t.Errorf("got %+v of process %d", b.Sessions, b.PID)
		}
	})
	t.Run("with its configuration", func(t *testing.T) {
		t.Parallel()
		n := webNode(t, apiFlush)
		p := n.part("auto", "listen="+webAddr)
		d := n.agent()
		n.sessions("web", 1)
		d.reload(agentBudget)
		p.says("stream end "+api.EndTransient, 1)
		p.refuses("GET ", 403, "forbidden")
	})
	t.Run("not with an agent that restarts", func(t *testing.T) {
		t.Parallel()
		n := webNode(t, apiFlush)
		p := n.part("auto", "listen="+webAddr)
		d := n.agent()
		n.sessions("web", 1)
		p.must(`POST /hold {"name":"import"}`)
		d.stop()
		p.says("stream end "+api.EndRestarting, 1)
		n.agent()
		b := n.sessions("web", 1)
		if b.Sessions[0].ID != p.says("session", 1) || len(b.Sessions[0].Holds) != 1 {
			t.Errorf("after the restart: %+v", b.Sessions)
		}
		if ids := p.all("session"); len(ids) != 1 {
			t.Errorf("it registered as %q", ids)
		}
	})
}

// A newer stream of a session replaces the older one, which hears it.
func TestR15_ANewerStreamReplacesTheOlder(t *testing.T) {
	t.Parallel()
	n := webNode(t, apiFlush)
	p := n.part("auto", "listen="+webAddr)
	n.agent()
	n.sessions("web", 1)
	id := p.says("session", 1)
	p.says("beat", 1)
	curl := need(t, "curl")
	p.tell(fmt.Sprintf("run exec timeout 60 %s -sSN --unix-socket $EBB_APP_SOCKET 'http://ebb/v1/session/events?session=%s'", curl, id))
	p.says("stream end "+api.EndTransient, 1)
	// The application comes back, and now it is curl's that ends.
	p.says("ran", 1)
	if !slices.ContainsFunc(p.lines(), func(l string) bool { return strings.Contains(l, `"reason":"transient"`) }) {
		t.Error("curl was not told why its stream ends")
	}
}

// A drain that is over for the application goes nowhere: what comes late for it is counted and changes nothing.
func TestD5_ALateAnswerIsIgnored(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	n.set("defaults: {grace: 5s, flush_timeout: 1s, reserve: 1s, quiet_period: 300ms}\nservices:\n" + service("web", n.ns, 8081, apiFlush))
	p := n.part("auto,mute,wait=end", "listen="+webAddr, "exit=none")
	d := n.agent()
	n.sessions("web", 1)
	got := n.drains("web", api.DrainRequest{})
	p.applied(api.SessionFlush)
	d.ended(got.ID)
	before := n.view("web").Drain
	p.refuses(fmt.Sprintf(`POST /flushed {"drain":%q}`, got.ID), 409, "stale-generation")
	after := n.view("web").Drain
	if after.FlushResult != before.FlushResult || after.Outcome != before.Outcome {
		t.Errorf("a late answer made %s, %s of %s, %s", after.Outcome, after.FlushResult, before.Outcome, before.FlushResult)
	}
	if _, text := n.get(n.sock, "/metrics"); !strings.Contains(text, `ebb_stale_signals_total{service="web"} 1`) {
		t.Error("it was not counted")
	}
}

// What a backend is told under observe: nothing. Its sessions, leases and silence are seen all the same.
func TestG3_AnObservedApplicationIsToldNothing(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	n.set("defaults: {grace: 6s, flush_timeout: 1s, reserve: 1s, quiet_period: 300ms}\nservices:\n" + service("web", n.ns, 8081, "mode: observe", apiFlush))
	p := n.part("auto", "listen="+webAddr)
	d := n.agent()
	n.sessions("web", 1)
	p.must(`POST /hold {"name":"import"}`)
	var got api.Drain
	if err := n.ask(func(ctx context.Context, c *api.Client) (err error) {
		got, err = c.Drain(ctx, "web", api.DrainRequest{})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	d.ended(got.ID)
	if got := p.order(); len(got) > 0 {
		t.Errorf("the application applied %q", got)
	}
	if b := n.view("web"); len(b.Sessions) != 1 || len(b.Sessions[0].Holds) != 1 {
		t.Errorf("got sessions %+v", b.Sessions)
	}
}

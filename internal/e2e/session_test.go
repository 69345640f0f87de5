// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/agent"
	"github.com/ebbproxy/ebb/internal/api"
)

// apiFlush are the keys of a service whose application takes part in its drain.
const apiFlush = "flush: {api: true}"

// webNode is a node with one backend, web, on 8081 of the loopback, and further keys of its service.
func webNode(t *testing.T, keys ...string) *node {
	t.Helper()
	n := newNode(t, "")
	n.set(agentBudget + "services:\n" + service("web", n.ns, 8081, keys...))
	return n
}

const webAddr = "127.0.0.1:8081"

// sessions waits until a backend has so many sessions.
func (n *node) sessions(backend string, count int) api.Backend {
	n.t.Helper()
	return n.awaitView(backend, fmt.Sprintf("with %d sessions", count), func(b api.Backend) bool { return b.Ready && len(b.Sessions) == count })
}

// arrivals makes a connection every now and then, until stop.
func (h *host) arrivals(addr string) (stop func()) {
	ctx, cancel := context.WithCancel(h.t.Context())
	var done sync.WaitGroup
	done.Go(func() {
		for ctx.Err() == nil {
			if c, err := h.ns.DialContext(ctx, "tcp", addr); err == nil {
				c.Close()
			}
			select {
			case <-time.After(50 * time.Millisecond):
			case <-ctx.Done():
			}
		}
	})
	return func() {
		cancel()
		done.Wait()
	}
}

// jobs are background jobs of an application, by its own session and by `ebb hold`, that last for 8 s. start returns when the flush
// is held. The name is that of the lease.
var jobs = []struct {
	name  string
	start func(n *node, p *part)
}{
	{"import", func(_ *node, p *part) { p.must("job import 8s") }},
	{"sleep", func(n *node, p *part) {
		p.tell("run " + n.bin + " hold -- sleep 8")
		n.awaitView("web", "held", func(b api.Backend) bool {
			return slices.ContainsFunc(b.Sessions, func(s api.SessionView) bool { return s.Role == api.RoleHolder && len(s.Holds) == 1 })
		})
	}},
}

// A job that outlives the last connection holds the flush: what it waits for is named, and the report counts it.
func TestR22_AJobOutlivesTheLastConnection(t *testing.T) {
	t.Parallel()
	for _, j := range jobs {
		t.Run(j.name, func(t *testing.T) {
			t.Parallel()
			n := webNode(t, apiFlush)
			p := n.part("auto", "listen="+webAddr)
			d := n.agent()
			n.sessions("web", 1)
			c := n.stuck(webAddr)
			j.start(n, p)
			got := n.drains("web", api.DrainRequest{})
			c.Close()
			d.phase("web", drain.PhaseWait)
			eventually(t, "explain names the lease", func() bool {
				text, _, _ := n.ebb("explain", "web")
				return strings.Contains(text, j.name) && strings.Contains(text, "lease")
			})
			if b := n.view("web"); b.State != drain.StateDraining {
				t.Errorf("the backend is %s, and a lease is held", b.State)
			}
			e := d.ended(got.ID)
			if e.Outcome != drain.OutcomeDrained {
				t.Errorf("the drain ended %s, want drained", e.Outcome)
			}
			b := n.view("web")
			if b.Drain.FlushReason != drain.FlushZero || b.Drain.FlushResult != drain.FlushOK {
				t.Errorf("the flush: %s, %s", b.Drain.FlushReason, b.Drain.FlushResult)
			}
			if len(b.Drain.Held) != 1 || b.Drain.Held[0].Name != j.name || !b.Drain.Held[0].Released || b.Drain.Held[0].PID == 0 {
				t.Fatalf("the report counts %+v, want %s", b.Drain.Held, j.name)
			}
			held := time.Duration(b.Drain.Held[0].For)
			if flush := at(t, *b.Drain, drain.PhaseFlush).Sub(b.Drain.Begun); held < time.Second || flush < held {
				t.Errorf("the flush came after %v, the job was over after %v", flush, held)
			}
			if text, _, _ := n.ebb("report", "web"); !strings.Contains(text, j.name) {
				t.Errorf("the report does not name the job:\n%s", text)
			}
			p.hears(api.SessionDraining, api.SessionFlush, api.SessionDone, api.SessionEnd)
		})
	}
}

// A lease holds the flush at zero, not the one at the end of the wait.
func TestT9_ALeaseDoesNotMoveTheDeadline(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	n.set("defaults: {grace: 9s, flush_timeout: 2s, reserve: 2s, quiet_period: 300ms}\nservices:\n" + service("web", n.ns, 8081, apiFlush))
	p := n.part("auto,mute", "listen="+webAddr) // which answers the flush when it is told to
	d := n.agent()
	n.sessions("web", 1)
	p.must(`POST /hold {"name":"endless"}`)
	if s := p.must(`POST /hold {"name":"endless"}`); len(s.Holds) != 1 {
		t.Errorf("the same lease twice is %d leases", len(s.Holds))
	}
	p.must(`POST /release {"name":"never held"}`)
	got := n.drains("web", api.DrainRequest{})
	if e := p.applied(api.SessionFlush); e.Reason != string(drain.FlushDeadline) || e.Key != got.ID+"-flush" {
		t.Errorf("got flush %+v, want one for the deadline", e)
	}
	p.refuses(`POST /hold {"name":"late"}`, http.StatusConflict, "flush-has-begun")
	p.must(fmt.Sprintf(`POST /flushed {"drain":%q}`, got.ID))
	d.ended(got.ID)
	b := n.view("web")
	if len(b.Drain.Held) != 1 || b.Drain.Held[0].Released {
		t.Errorf("the report counts %+v, want one lease that was held to the end", b.Drain.Held)
	}
}

// The flush of an application that takes part is its session's: it is waited for until it has answered, and told nothing else.
func TestT12_TheFlushOfASessionIsWaitedFor(t *testing.T) {
	t.Parallel()
	t.Run("agent", func(t *testing.T) {
		t.Parallel()
		n := webNode(t, apiFlush)
		p := n.part("auto,mute", "listen="+webAddr)
		d := n.agent()
		n.sessions("web", 1)
		got := n.drains("web", api.DrainRequest{})
		e := p.applied(api.SessionFlush)
		if e.Reason != string(drain.FlushZero) || e.Drain != got.ID || *e.TimeLeftMS > 5000 {
			t.Errorf("got flush %+v of drain %s", e, got.ID)
		}
		p.refuses(`POST /flushed {"drain":"d-another"}`, http.StatusConflict, "stale-generation")
		if b := n.view("web"); b.State != drain.StateFlushing {
			t.Errorf("the backend is %s before the application has answered", b.State)
		}
		p.must(fmt.Sprintf(`POST /flushed {"drain":%q}`, e.Drain))
		if end := d.ended(got.ID); end.Outcome != drain.OutcomeDrained {
			t.Errorf("the drain ended %s, want drained", end.Outcome)
		}
		p.hears(api.SessionDraining, api.SessionFlush, api.SessionDone, api.SessionEnd)
		if signals := p.all("signal"); len(signals) > 0 {
			t.Errorf("the application was sent %q as well", signals)
		}
		_, text := n.get(n.sock, "/metrics")
		if !strings.Contains(text, `ebb_stale_signals_total{service="web"} 1`) {
			t.Error("the answer for another drain was not counted")
		}
	})
	t.Run("error", func(t *testing.T) {
		t.Parallel()
		n := webNode(t, apiFlush)
		p := n.part("auto,mute", "listen="+webAddr)
		d := n.agent()
		n.sessions("web", 1)
		got := n.drains("web", api.DrainRequest{})
		p.must(fmt.Sprintf(`POST /flushed {"drain":%q,"error":"the disk is full"}`, p.applied(api.SessionFlush).Drain))
		d.ended(got.ID)
		if b := n.view("web"); b.Drain.FlushResult != drain.FlushFailed || !strings.Contains(strings.Join(b.Drain.Warnings, "\n"), "the disk is full") {
			t.Errorf("the flush came back %s, warnings %q", b.Drain.FlushResult, b.Drain.Warnings)
		}
	})
	t.Run("run", func(t *testing.T) {
		t.Parallel()
		h := newHost(t)
		r := h.run("web", with(wideBudget, "--flush", "api"), app(t, "session=auto,leave", "listen="+webAddr, "exit=none")...)
		r.find("a session", func(e drain.Event) bool { return e.Type == api.EventSession })
		c := h.stuck(webAddr)
		r.signal(syscall.SIGTERM)
		r.phase(drain.PhaseWait)
		c.Close()
		if e := r.await(drain.EventEnd); e.Outcome != drain.OutcomeDrained {
			t.Errorf("the drain ended %s, want drained", e.Outcome)
		}
		if code := r.wait(); code != 0 {
			t.Errorf("exit code %d, want 0", code)
		}
		if signals := r.heard(); slices.Contains(signals, "SIGTERM") {
			t.Errorf("CMD was sent %q as well", signals)
		}
		if d := r.drained(); d.FlushReason != drain.FlushZero || d.FlushResult != drain.FlushOK {
			t.Errorf("the flush: %s, %s", d.FlushReason, d.FlushResult)
		}
		if _, err := os.Stat(filepath.Join(h.runDir, "run", "web.app.sock")); err == nil {
			t.Error("the socket of the application is left behind")
		}
	})
}

// Where the flush is a session's and nobody has one, the application gets its stop signal after all, and a warning says so.
func TestT12_WithoutASessionTheFlushIsASignal(t *testing.T) {
	t.Parallel()
	t.Run("agent", func(t *testing.T) {
		t.Parallel()
		n := webNode(t, apiFlush)
		p := n.part("", "listen="+webAddr)
		d := n.agent()
		n.ready("web")
		got := n.drains("web", api.DrainRequest{})
		if e := d.ended(got.ID); e.Outcome != drain.OutcomeDrained {
			t.Errorf("the drain ended %s, want drained", e.Outcome)
		}
		p.says("signal SIGTERM", 1)
		d.find("a warning", func(e drain.Event) bool {
			return e.Type == drain.EventWarning && strings.Contains(e.Message, "is sent SIGTERM")
		})
	})
	t.Run("run", func(t *testing.T) {
		t.Parallel()
		h := newHost(t)
		r := h.run("web", with(wideBudget, "--flush", "api"), app(t, "listen="+webAddr)...)
		r.signal(syscall.SIGTERM)
		if code := r.wait(); code != 0 {
			t.Errorf("exit code %d, want 0", code)
		}
		if got := r.heard(); !slices.Equal(got, []string{"SIGTERM"}) {
			t.Errorf("CMD heard %q, want SIGTERM", got)
		}
		r.find("a warning", func(e drain.Event) bool {
			return e.Type == drain.EventWarning && strings.Contains(e.Message, "is sent SIGTERM")
		})
	})
}

// The hooks of a run: a program and a URL are told what an agent tells them, once each.
func TestT12_HooksOfARun(t *testing.T) {
	t.Parallel()
	const hooked = `
import http.server, json, threading
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        print("hook", self.path, self.headers["Idempotency-Key"], body["drain"], body["kind"], body["reason"] if "reason" in body else "", body["time_left_ms"] > 0, flush=True)
        self.send_response(204); self.end_headers()
        if body["kind"] == "flush":
            threading.Thread(target=server.shutdown).start()
    def log_message(self, *a): pass
# Another port than the service's, which is closed by the time of the flush.
server = http.server.ThreadingHTTPServer(("127.0.0.1", 8082), Handler)
service = http.server.ThreadingHTTPServer(("127.0.0.1", 8081), Handler)
threading.Thread(target=service.serve_forever, daemon=True).start()
server.serve_forever()
`
	t.Run("http", func(t *testing.T) {
		t.Parallel()
		h := newHost(t)
		r := h.run("web", with(wideBudget, "--notify", "http://127.0.0.1:8082/notify", "--flush", "http://127.0.0.1:8082/flush"), python(t, hooked)...)
		r.awaitCounts("without the hooks' port", func(b api.Backend) bool {
			b.Listeners = slices.DeleteFunc(b.Listeners, func(l api.Listener) bool { return !l.Covered })
			return len(b.Listeners) == 1 && b.Listeners[0].Address == webAddr
		})
		r.signal(syscall.SIGTERM)
		if code := r.wait(); code != 0 {
			t.Errorf("exit code %d, want 0", code)
		}
		d := r.drained()
		want := []string{
			fmt.Sprintf("hook /notify %s-notify %[1]s notify  True", d.ID),
			fmt.Sprintf("hook /flush %s-flush %[1]s flush zero True", d.ID),
		}
		if got := r.lines(); !slices.Equal(got, want) {
			t.Errorf("CMD heard %q, want %q", got, want)
		}
		if d.Outcome != drain.OutcomeDrained || d.FlushResult != drain.FlushOK {
			t.Errorf("the drain ended %s, the flush %s", d.Outcome, d.FlushResult)
		}
	})
	t.Run("exec", func(t *testing.T) {
		t.Parallel()
		h := newHost(t)
		said := filepath.Join(t.TempDir(), "said")
		script := filepath.Join(t.TempDir(), "hook")
		if err := os.WriteFile(script, []byte("#!/bin/sh\necho $1 $EBB_KIND $EBB_REASON $EBB_DRAIN $EBB_BACKEND >>"+said+"\n[ $EBB_KIND = notify ] || kill -KILL $(cat "+said+".pid)\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		r := h.run("web", with(wideBudget, "--notify", "exec:"+script+" one@settled", "--flush", "exec:"+script+" two"), app(t, "listen="+webAddr)...)
		if err := os.WriteFile(said+".pid", fmt.Append(nil, r.child()), 0o600); err != nil {
			t.Fatal(err)
		}
		r.signal(syscall.SIGTERM)
		if code := r.wait(); code != 0 {
			t.Errorf("exit code %d, want 0", code)
		}
		d := r.drained()
		b, err := os.ReadFile(said)
		if want := fmt.Sprintf("one notify %s web\ntwo flush zero %[1]s web\n", d.ID); err != nil || string(b) != want {
			t.Errorf("the programs have said %q (%v), want %q", b, err, want)
		}
		if signals := r.heard(); len(signals) > 0 {
			t.Errorf("CMD was sent %q as well", signals)
		}
	})
}

// Each session hears that its backend drains, once: at Begin, or under `at: settled` when new connections go elsewhere; one that
// comes later hears it at once.
func TestR4_EachSessionHearsItOnce(t *testing.T) {
	t.Parallel()
	for _, when := range []string{"begin", "settled"} {
		t.Run(when, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, "")
			n.set(agentBudget + "services:\n" + service("web", n.ns, 8081, apiFlush, "notify: {api: true, at: "+when+"}", "on_new: admit", "admit_for: 5s"))
			p := n.part("auto", "listen="+webAddr)
			d := n.agent()
			n.sessions("web", 1)
			c := n.stuck(webAddr)
			// Arrivals never pause, so that admission stays open until admit_for is over.
			stop := n.arrivals(webAddr)
			got := n.drains("web", api.DrainRequest{Reason: "a new release"})
			e := p.applied(api.SessionDraining)
			if e.Drain != got.ID || e.Cause != drain.CauseOperator || e.Gen != got.Gen || e.Deadline.IsZero() || !e.FlushBy.Before(e.Deadline) || *e.TimeLeftMS <= 0 {
				t.Errorf("got %+v for drain %+v", e, got)
			}
			d.phase("web", drain.PhaseWait)
			stop()
			settled := at(t, *n.view("web").Drain, drain.PhaseWait)
			if after := !e.Time.Before(settled); after != (when == "settled") {
				t.Errorf("it was told at %v, settled at %v", e.Time, settled)
			}
			// T11: one that comes in the middle hears the present first.
			p.tell("run exec " + strings.Join(app(t, "name=late", "session=auto"), " "))
			late := p.says("late: event ", 1)
			if kind, data, _ := strings.Cut(late, " "); kind != api.SessionDraining || !strings.Contains(data, got.ID) {
				t.Errorf("a session that came late heard %s first", late)
			}
			c.Close()
			d.ended(got.ID)
			p.hears(api.SessionDraining, api.SessionFlush, api.SessionDone, api.SessionEnd)
			p.says("late: event end", 1)
			var kinds []string
			for _, l := range p.all("late: event ") {
				kind, _, _ := strings.Cut(l, " ")
				kinds = append(kinds, kind)
			}
			if want := p.order(); !slices.Equal(kinds, want) {
				t.Errorf("the late session applied %q, want %q", kinds, want)
			}
		})
	}
}

// An application asks for more time once, and gets no more than is configured; nothing else that it says moves the deadline.
func TestD6_OneExtensionToTheCap(t *testing.T) {
	t.Parallel()
	n := webNode(t, apiFlush, "extension: 5s")
	p := n.part("auto", "listen="+webAddr)
	n.agent()
	if b := n.sessions("web", 1); b.Drain != nil {
		t.Fatalf("there is a drain: %+v", b.Drain)
	}
	c := n.stuck(webAddr)
	p.refuses(`POST /extend {"by_ms":1000}`, http.StatusUnprocessableEntity, "not-possible")
	got := n.drains("web", api.DrainRequest{})
	p.applied(api.SessionDraining)
	extend := func(ms int) string { return fmt.Sprintf(`POST /extend {"by_ms":%d,"drain":%q}`, ms, got.ID) }
	p.refuses(`POST /extend {"by_ms":1000,"drain":"d-another"}`, http.StatusConflict, "stale-generation")
	p.must(extend(60_000))
	e := p.applied(api.SessionDeadline)
	if later := e.Deadline.Sub(got.Deadline); later.Round(time.Second) != 5*time.Second {
		t.Errorf("the deadline moved by %v, want the configured 5 s", later)
	}
	p.refuses(extend(1000), http.StatusUnprocessableEntity, "not-possible")
	for i := range 5 {
		p.must(fmt.Sprintf(`POST /heartbeat {"remaining":%d}`, 5-i))
	}
	b := n.view("web")
	if !b.Drain.Deadline.Equal(e.Deadline) || b.Sessions[0].Remaining == nil || *b.Sessions[0].Remaining != 1 {
		t.Errorf("after heartbeats: deadline %v, want %v; sessions %+v", b.Drain.Deadline, e.Deadline, b.Sessions)
	}
	c.Close()
	p.hears(api.SessionDraining, api.SessionDeadline, api.SessionFlush, api.SessionDone, api.SessionEnd)
}

// By default there is no extension.
func TestD6_NoExtensionUnlessConfigured(t *testing.T) {
	t.Parallel()
	n := webNode(t, apiFlush)
	p := n.part("auto", "listen="+webAddr)
	n.agent()
	n.sessions("web", 1)
	n.stuck(webAddr)
	n.drains("web", api.DrainRequest{})
	p.refuses(`POST /extend {"by_ms":1000}`, http.StatusUnprocessableEntity, "not-possible")
}

// An application may begin its own drain, and everything is as if anybody else had.
func TestR1_AnApplicationDrainsItself(t *testing.T) {
	t.Parallel()
	n := webNode(t, apiFlush)
	p := n.part("auto", "listen="+webAddr)
	d := n.agent()
	n.sessions("web", 1)
	status, body := p.ask(`POST /drain {"reason":"I have had enough"}`)
	var got api.Drain
	if err := json.Unmarshal([]byte(body), &got); err != nil || status != http.StatusOK && status != http.StatusAccepted {
		t.Fatalf("got %d %s", status, body)
	}
	if got.Cause != drain.CauseApp || got.Reason != "I have had enough" {
		t.Errorf("got %+v", got)
	}
	if e := d.ended(got.ID); e.Outcome != drain.OutcomeDrained {
		t.Errorf("the drain ended %s, want drained", e.Outcome)
	}
	p.hears(api.SessionDraining, api.SessionFlush, api.SessionDone, api.SessionEnd)
	d.find("who asked", func(e drain.Event) bool { return e.Type == agent.EventAction && e.Fields["pid"] == float64(p.pid()) })
}

// A drain that is taken back is told, and the next one is another.
func TestD14_SessionsHearThatADrainWasTakenBack(t *testing.T) {
	t.Parallel()
	n := webNode(t, apiFlush)
	p := n.part("auto", "listen="+webAddr)
	d := n.agent()
	n.sessions("web", 1)
	c := n.stuck(webAddr)
	first := n.drains("web", api.DrainRequest{})
	p.applied(api.SessionDraining)
	n.must("undrain", "web")
	if e := p.applied(api.SessionCancelled); e.Drain != first.ID {
		t.Errorf("cancelled is %s, want %s", e.Drain, first.ID)
	}
	second := n.drains("web", api.DrainRequest{})
	c.Close()
	if e := d.ended(second.ID); e.Outcome != drain.OutcomeDrained {
		t.Errorf("the second drain ended %s", e.Outcome)
	}
	if e := p.applied(api.SessionFlush); e.Drain != second.ID {
		t.Errorf("the flush is that of %s, want %s", e.Drain, second.ID)
	}
	p.says("event end", 1)
	got := slices.DeleteFunc(p.order(), func(k string) bool { return k == api.SessionDone })
	if want := []string{api.SessionDraining, api.SessionCancelled, api.SessionDraining, api.SessionFlush, api.SessionEnd}; !slices.Equal(got, want) {
		t.Errorf("the application applied %q, want %q", got, want)
	}
}

// A process has sessions of the backend that it belongs to, whoever's it is, and no others: there is nothing to name another one
// by, and the id of another backend's session opens nothing.
func TestSessionsAreOfOnesOwnBackend(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	_, application := n.unprivileged(t)
	if err := os.Chown(n.runDir, 0, 0); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(n.runDir, 0o755); err != nil {
		t.Fatal(err)
	}
	n.sock = filepath.Join(n.runDir, api.AgentSocket)
	n.set(agentBudget + "services:\n" + service("web", n.ns, 8081, apiFlush) + service("other", n.ns, 8082, apiFlush))
	web := n.part("auto", "listen="+webAddr)
	other := n.partAs(func(p *part) {
		p.Path = application()[0]
		p.SysProcAttr.Credential = &syscall.Credential{Uid: nobody, Gid: nobody}
	}, "", "listen=127.0.0.1:8082")
	stranger := n.part("")
	n.agent()
	n.sessions("web", 1)
	n.ready("other")
	if s := other.must("POST  {}"); s.Backend != "other" || s.PID != other.pid() {
		t.Errorf("nobody's session is %+v", s)
	}
	other.refuses(`POST  {"backend":"web"}`, http.StatusBadRequest, "bad-request")
	stranger.refuses("POST  {}", http.StatusForbidden, "forbidden")
	id := web.says("session", 1)
	commands := []string{"GET ", "GET /events", `POST /hold {"name":"forged"}`, `POST /heartbeat {}`, `POST /ack {"seq":1}`, "DELETE "}
	stranger.tell("as " + id)
	other.tell("as " + id)
	for _, command := range commands {
		stranger.refuses(command, http.StatusForbidden, "forbidden")
		other.refuses(command, http.StatusNotFound, "unknown-session")
	}
	if b := n.view("web"); b.State != drain.StateServing || len(b.Sessions) != 1 || len(b.Sessions[0].Holds) > 0 {
		t.Errorf("web is %s with sessions %+v", b.State, b.Sessions)
	}
	// An operator's socket has no sessions.
	if status, body := n.get(n.sock, "/v1/session"); status != http.StatusForbidden || !strings.Contains(body, api.AppSocket) {
		t.Errorf("at the operators' socket: got %d %s", status, body)
	}
}

// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/agent"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/loadtest"
	"github.com/ebbproxy/ebb/internal/netnstest"
)

// get asks a path of the API at a socket.
func (n *node) get(sock, path string) (status int, body string) {
	n.t.Helper()
	c := &http.Client{Timeout: patience, Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", sock)
	}}}
	resp, err := c.Get("http://ebb" + path)
	if err != nil {
		n.t.Fatalf("ask for %s: %v", path, err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		n.t.Fatalf("ask for %s: %v", path, err)
	}
	return resp.StatusCode, string(b)
}

// inFlight are the samples of ebb_connections_in_flight, by backend.
func inFlight(metrics string) map[string]string {
	out := map[string]string{}
	for _, m := range regexp.MustCompile(`(?m)^ebb_connections_in_flight\{backend="([^"]*)",service="[^"]*"\} (\S+)$`).FindAllStringSubmatch(metrics, -1) {
		out[m[1]] = m[2]
	}
	return out
}

// Each configured backend has its series, whether it runs or not, and keeps them when it is configured no more.
func TestC50_SeriesOfAnAgentsBackends(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	const web = "web-1"
	all := backendsOf("web", "", "name: "+web+", match: "+match(n.ns, 8081)) + backendsOf("api", "", "name: absent, match: "+match(n.ns, 8082))
	n.set(agentBudget + "services:\n" + all)
	named(t, n.ns, "web", "127.0.0.1:8081")
	d := n.agent()
	n.ready(web)
	holdOpen(t, n.ns, "127.0.0.1:8081")
	eventually(t, "the open connection is in the metrics", func() bool {
		_, text := n.get(n.sock, "/metrics")
		got := inFlight(text)
		return got[web] == "1" && got["absent"] == "0"
	})
	_, text := n.get(n.sock, "/metrics")
	if tool, err := exec.LookPath("promtool"); err == nil {
		check := exec.Command(tool, "check", "metrics")
		check.Stdin = strings.NewReader(text)
		if out, err := check.CombinedOutput(); err != nil {
			t.Errorf("promtool check metrics: %v\n%s", err, out)
		}
	}
	if status, _ := n.get(n.sock, "/readyz/"+web); status != http.StatusOK {
		t.Errorf("/readyz/%s: got %d", web, status)
	}
	if status, _ := n.get(n.sock, "/readyz/absent"); status != http.StatusServiceUnavailable {
		t.Errorf("/readyz/absent: got %d", status)
	}
	if status, _ := n.get(n.sock, "/readyz"); status != http.StatusOK {
		t.Errorf("/readyz of an agent that owns its host: got %d", status)
	}
	d.reload(agentBudget + "services:\n" + backendsOf("api", "", "name: absent, match: "+match(n.ns, 8082)))
	_, text = n.get(n.sock, "/metrics")
	if got := inFlight(text); got[web] == "" || got["absent"] != "0" {
		t.Errorf("after %s is configured no more: got %v", web, got)
	}
}

// A backend that is configured no more keeps its connections, and admits new ones as if nobody had ever counted them; so does
// one that is in the middle of a drain then.
func TestC40_ConfiguredNoMore(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	none := agentBudget + "services:\n" + service("other", n.ns, 8099)
	n.set(agentBudget + "services:\n" + service("one", n.ns, 8081, "on_new: refuse") + service("two", n.ns, 8082, "on_new: refuse") + service("other", n.ns, 8099))
	var conns []*httpConn
	for i, name := range []string{"one", "two"} {
		addr := fmt.Sprintf("127.0.0.1:%d", 8081+i)
		named(t, n.ns, name, addr)
		eventually(t, "it listens", func() bool { return len(walk(t, n.ns, 1<<10, uint16(8081+i))) == 1 })
		c := dialHTTP(t, n.ns, addr)
		c.get(t, "/")
		conns = append(conns, c)
	}
	d := n.agent()
	n.ready("one")
	n.ready("two")
	hold := holdOpen(t, n.ns, "127.0.0.1:8081")
	defer hold.Close()
	got := n.drains("one", api.DrainRequest{})
	n.mustRefuse("127.0.0.1:8081")
	d.reload(none)
	eventually(t, "new connections are admitted again", func() bool { served, _ := n.serves("127.0.0.1:8081"); return served })
	n.mustServe("127.0.0.1:8082")
	for i, c := range conns {
		if s := c.stats(t); len(s.Signals) > 0 {
			t.Errorf("%d: it heard %v", i, s.Signals)
		}
	}
	if e := d.ended(got.ID); e.Outcome != drain.OutcomeCancelled {
		t.Errorf("the drain ended %s, want cancelled", e.Outcome)
	}
}

// A backend that is configured no more and then again, as it was or by another name, is counted as if nothing had been.
func TestC40_ConfiguredAnew(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	conf := func(name string) string {
		text := agentBudget + "services:\n" + service("other", n.ns, 8099)
		if name != "" {
			text += service(name, n.ns, 8081, "on_new: refuse")
		}
		return text
	}
	n.set(conf("one"))
	named(t, n.ns, "one", webAddr)
	eventually(t, "it listens", func() bool { return len(walk(t, n.ns, 1<<10, 8081)) == 1 })
	before := dialHTTP(t, n.ns, webAddr)
	before.get(t, "/")
	d := n.agent()
	n.ready("one")
	open, was := int64(1), "one"
	for _, name := range []string{"one", "two"} {
		d.reload(conf(""))
		eventually(t, "it is configured no more", func() bool {
			err := n.ask(func(ctx context.Context, c *api.Client) error { _, err := c.Backend(ctx, was); return err })
			return errors.Is(err, api.ErrUnknown)
		})
		meanwhile := dialHTTP(t, n.ns, webAddr)
		meanwhile.get(t, "/")
		open++
		d.reload(conf(name))
		n.awaitView(name, "counted", func(b api.Backend) bool { return b.Ready && b.Counts.Open != nil && *b.Counts.Open == open })
		before.get(t, "/")
		was = name
	}
	hold := holdOpen(t, n.ns, webAddr)
	defer hold.Close()
	n.drains("two", api.DrainRequest{})
	n.mustRefuse(webAddr)
}

// A configuration that changes before the accept queue of a server was seen empty does not leave its count unknown for ever.
func TestC25_ReloadWhileAQueueIsNotEmpty(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	conf := func(more ...string) string {
		return agentBudget + "services:\n" + service("web", n.ns, 8081, more...)
	}
	n.set(conf())
	p := named(t, n.ns, "web", webAddr)
	eventually(t, "it listens", func() bool { return len(walk(t, n.ns, 1<<10, 8081)) == 1 })
	if err := p.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	var queued []*httpConn
	for range 3 {
		queued = append(queued, dialHTTP(t, n.ns, webAddr))
	}
	d := n.agent()
	n.awaitView("web", "found, and its count unknown", func(b api.Backend) bool { return b.PID != 0 && len(b.Listeners) > 0 && !b.CountsKnown })
	d.reload(conf("close_spread: 1s"))
	if err := p.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	n.awaitView("web", "counted", func(b api.Backend) bool { return b.CountsKnown && *b.Counts.Open == int64(len(queued)) })
}

// Every action is an event that says who asked for it. An application may ask for its own backend, and for nothing else.
func TestAgentActionsAreAudited(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	// The application is a shell that starts the server, and runs what it reads.
	argv := goServer(t, "127.0.0.1:8081")
	p := n.ns.Command(t, "sh", "-c", strings.Join(argv, " ")+" & while read -r line; do eval \"$line\"; done; kill $!")
	in, err := p.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.Cmd.Env = n.env
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		_ = p.Wait() // with the code of its last command
	})
	n.set(agentBudget + "services:\n" + backendsOf("web", "flush: {exec: [\"true\"]}", fmt.Sprintf("name: web, match: {pid: %d}", p.Process.Pid)) + service("other", n.ns, 8082))
	named(t, n.ns, "other", "127.0.0.1:8082")
	d := n.agent()
	n.ready("web")
	n.ready("other")
	app := filepath.Join(n.runDir, "app.sock")
	if status, body := n.get(app, "/v1/backends"); status != http.StatusForbidden || !strings.Contains(body, "belongs to no backend") {
		t.Errorf("from outside of every backend: got %d %s", status, body)
	}
	action := func(name string, refused bool) drain.Event {
		t.Helper()
		return d.find(fmt.Sprintf("action %s, refused %t", name, refused), func(e drain.Event) bool {
			_, bad := e.Fields["err"]
			return e.Type == agent.EventAction && e.Backend == name && bad == refused
		})
	}
	// Of another backend.
	post := python(t, "import http.client, socket, sys\n"+
		"s = socket.socket(socket.AF_UNIX)\ns.connect(sys.argv[1])\nc = http.client.HTTPConnection('ebb')\nc.sock = s\n"+
		"c.request('POST', sys.argv[2], '{}', {'Content-Type': 'application/json'})\nprint(c.getresponse().status)\n", app, "/v1/backends/other/drain")
	fmt.Fprintln(in, strings.Join(post, " "))
	if e := action("other", true); e.Fields["uid"] != float64(0) || e.Fields["action"] != "drain" {
		t.Errorf("got %+v", e.Fields)
	}
	if b := n.view("other"); b.State != drain.StateServing {
		t.Errorf("other is %s", b.State)
	}
	// Of its own: it blocks until that is over.
	fmt.Fprintln(in, ebbBin, "prestop")
	if e := action("web", false); e.Fields["uid"] != float64(0) || e.Drain == "" {
		t.Errorf("got %+v of drain %q", e.Fields, e.Drain)
	} else if end := d.ended(e.Drain); end.Outcome != drain.OutcomeDrained || end.Cause != drain.CausePrestop {
		t.Errorf("the drain ended %s, its cause is %s", end.Outcome, end.Cause)
	}
}

// drain --all drains what runs, and --unit what a unit runs. Backends without a process are none that could not be drained.
func TestAgentDrainsAll(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	n.set("defaults: {grace: 20s, flush_timeout: 3s, reserve: 2s, quiet_period: 300ms}\nservices:\n" + service("one", n.ns, 8081) + service("two", n.ns, 8082) + service("absent", n.ns, 8083))
	named(t, n.ns, "one", "127.0.0.1:8081", "-graceful")
	named(t, n.ns, "two", "127.0.0.1:8082", "-graceful")
	n.agent()
	n.ready("one")
	n.ready("two")
	stdout, stderr, code := n.ebb("drain", "--all", "--wait", "--reason", "the host goes")
	if code != 0 || !strings.Contains(stderr, "absent has no process") {
		t.Errorf("drain --all: code %d\n%s%s", code, stdout, stderr)
	}
	for _, name := range []string{"one", "two"} {
		b := n.awaitView(name, "done", func(b api.Backend) bool { return b.State == drain.StateDone })
		if b.Drain == nil || b.Drain.Outcome != drain.OutcomeDrained || b.Drain.Reason != "the host goes" {
			t.Errorf("%s: got %+v", name, b.Drain)
		}
	}
	report, _, code := n.ebb("report")
	if code != 0 || strings.Count(report, "drained") != 2 {
		t.Errorf("report: code %d\n%s", code, report)
	}
}

// An agent and runs of one service share a host: each steers to the others, whoever starts and ends first, and the service's
// address follows a drain to a run.
func TestG9_AnAgentBesideRuns(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	n.set(agentBudget + "services:\n" + backendsOf("web", `listen: ["127.0.0.1:80"]`, "name: owned, match: "+match(n.ns, 8081)))
	r := n.run("run", with(wideBudget, "--service", "web"), goServer(t, "127.0.0.1:8082", "-name", "run")...)
	named(t, n.ns, "owned", "127.0.0.1:8081")
	d := n.agent()
	n.shares("owned", "owned")
	by := func(addr, want string) {
		t.Helper()
		for range 4 {
			c := dialHTTP(t, n.ns, addr)
			if got := c.servedBy(t); got != want {
				t.Errorf("%s is answered by %s, want %s", addr, got, want)
			}
			c.Close()
		}
	}
	undrain := func() {
		t.Helper()
		if err := n.ask(func(ctx context.Context, c *api.Client) error {
			_, err := c.Undrain(ctx, "owned", api.UndrainRequest{})
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	hold := holdOpen(t, n.ns, "127.0.0.1:8081")
	defer hold.Close()
	n.drains("owned", api.DrainRequest{})
	chosen(t, n.view("owned"), drain.OnNewSteer)
	by("127.0.0.1:8081", "run")
	by("127.0.0.1:80", "run")
	undrain()
	by("127.0.0.1:80", "owned")
	n.shares("owned", "owned")
	// The other way round.
	held := holdOpen(t, n.ns, "127.0.0.1:8082")
	defer held.Close()
	r.must("drain", struct{}{})
	chosen(t, r.backend(), drain.OnNewSteer)
	by("127.0.0.1:8082", "owned")
	// The agent ends, and the run goes on; the run ends, and a new agent finds nothing wrong.
	d.stop()
	by("127.0.0.1:8081", "owned")
	by("127.0.0.1:80", "owned")
	held.Close()
	r.wait()
	n.agent()
	n.shares("owned", "owned")
	by("127.0.0.1:80", "owned")
	if b := n.view("owned"); !b.CountsKnown || value(b.InFlight) != 1 {
		t.Errorf("the agent after it counts %s", shown(b))
	}
}

// What an `ebb run` has started is its own. An agent that is told to own it too says that it has another owner, and does not
// take its own count for true; nobody is cut, and the run drains it.
func TestG9_TwoOwnersClaimOneProcess(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	n.set(agentBudget + "services:\n" + service("claimed", n.ns, 8081))
	before := named(t, n.ns, "before", "127.0.0.1:8081")
	n.agent()
	n.ready("claimed")
	if err := before.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = before.Wait()
	r := n.run("run", tightBudget, goServer(t, "127.0.0.1:8081", "-graceful")...)
	hold := holdOpen(t, n.ns, "127.0.0.1:8081")
	b := n.awaitView("claimed", "another owner's", func(b api.Backend) bool {
		return b.PID == r.child() && slices.ContainsFunc(b.Warnings, func(w string) bool { return strings.Contains(w, "has another owner on this host") })
	})
	if b.CountsKnown {
		t.Errorf("the agent counts %s", shown(b))
	}
	r.awaitCounts("counted by the run", func(b api.Backend) bool { return value(b.InFlight) == 1 })
	n.mustServe("127.0.0.1:8081")
	r.signal(syscall.SIGTERM)
	r.phase(drain.PhaseWait)
	hold.Close()
	if e := r.await(drain.EventEnd); e.Outcome != drain.OutcomeDrained {
		t.Errorf("the drain of the run ended %s", e.Outcome)
	}
	r.wait()
}

// The death of one of three costs what was in flight there, and nothing else: what is new goes to the two that live.
func TestD1_OneOfThreeBackendsDies(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	var backends []string
	procs := map[string]*netnstest.Cmd{}
	for i, name := range []string{"a", "b", "c"} {
		backends = append(backends, fmt.Sprintf("name: %s, match: %s", name, match(n.ns, 8081+i)))
		procs[name] = named(t, n.ns, name, fmt.Sprintf("127.0.0.1:%d", 8081+i))
	}
	n.set(agentBudget + "services:\n" + backendsOf("web", `listen: ["127.0.0.1:80"]`, backends...))
	n.agent()
	n.shares("a", "a", "b", "c")
	l := n.load(loadtest.Options{Rate: 100, Targets: []loadtest.Target{{Addr: "127.0.0.1:80"}}})
	l.warm(50)
	if err := procs["b"].Process.Kill(); err != nil {
		t.Fatal(err)
	}
	n.shares("a", "a", "c")
	l.warm(l.Report().OK + 50)
	died := time.Now()
	l.warm(l.Report().OK + 50)
	r := l.end()
	// What was in flight at that moment may have failed, nothing that came later.
	for v, tally := range r.Verdicts {
		if v.Failure() && tally.LastStart.After(died) {
			t.Errorf("%s %d: %s", v, tally.Count, tally.Example)
		}
	}
	if r.Failed > 5 {
		t.Errorf("%d of %d failed: %s", r.Failed, r.OK+r.Failed, verdicts(r))
	}
	b := n.view("b")
	if b.Ready || len(b.Warnings) == 0 {
		t.Errorf("the dead one is ready %v, warnings %q", b.Ready, b.Warnings)
	}
}

// A health probe of the agent's own does not keep a drain from being quiet, nor do its connections count while one runs.
func TestC28_ProbesDoNotDisturbADrain(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	n.set("defaults: {grace: 60s, flush_timeout: 3s, reserve: 2s, quiet_period: 2s, on_new: admit, admit_for: 50s}\nservices:\n" +
		service("web", n.ns, 8081, "ready: {http: {path: /healthz}, interval: 200ms}"))
	named(t, n.ns, "web", "127.0.0.1:8081", "-graceful")
	d := n.agent()
	n.ready("web")
	got := n.drains("web", api.DrainRequest{})
	if e := d.ended(got.ID); e.Outcome != drain.OutcomeDrained {
		t.Errorf("the drain ended %s, want drained", e.Outcome)
	}
	b := n.view("web")
	if took := b.Drain.Ended.Sub(b.Drain.Begun); took > 40*time.Second {
		t.Errorf("the drain took %s: arrivals of the probe went on", took)
	}
	if b.Drain.Late != nil && b.Drain.Late.Admitted > 1 {
		t.Errorf("%d connections came during the drain, and nobody but the probe makes any", b.Drain.Late.Admitted)
	}
}

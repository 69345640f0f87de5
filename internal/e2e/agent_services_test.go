// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/agent"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/loadtest"
	"github.com/ebbproxy/ebb/internal/netnstest"
)

// reload has the agent read a configuration, and waits until it has.
func (d *daemon) reload(rest string) {
	d.n.t.Helper()
	d.n.set(rest)
	before := d.logged("configuration reloaded")
	d.signal(syscall.SIGHUP)
	d.look("the reload", func() bool { return d.count("configuration reloaded") > before })
}

// logged counts the lines of its log that hold a text.
func (d *daemon) logged(text string) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.count(text)
}

// count is logged for a caller that holds mu.
func (d *daemon) count(text string) (n int) {
	for _, l := range d.log {
		if strings.Contains(l, text) {
			n++
		}
	}
	return n
}

// backendsOf is a service with several backends, as YAML. Each backend is what stands between its braces.
func backendsOf(service, keys string, backends ...string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "  - name: %s\n", service)
	for k := range strings.Lines(keys) {
		fmt.Fprintf(&b, "    %s\n", strings.TrimSpace(k))
	}
	b.WriteString("    backends:\n")
	for _, x := range backends {
		fmt.Fprintf(&b, "      - {%s}\n", x)
	}
	return b.String()
}

// named is the Go server with a name that its answers tell.
func named(t *testing.T, ns *netnstest.NS, name, addr string, flags ...string) *netnstest.Cmd {
	t.Helper()
	return program(t, ns, goServer(t, addr, append([]string{"-name", name}, flags...)...)...)
}

// shares waits until the service of a backend is steered to these, and to nobody else.
func (n *node) shares(backend string, want ...string) api.ServiceAddress {
	n.t.Helper()
	b := n.awaitView(backend, fmt.Sprintf("steered to %q", want), func(b api.Backend) bool {
		return len(b.Addresses) > 0 && slices.Equal(slices.Sorted(maps.Keys(b.Addresses[0].Shares)), want)
	})
	return b.Addresses[0]
}

// One of two instances behind a service address is taken out and comes back, while clients come all the time: none of them
// fails, and none is given to the one that is out.
func TestD10_OneOfTwoInstancesGoesAndComesBack(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	const addr = "127.0.0.1:80"
	n.set(agentBudget + "services:\n" + backendsOf("web", `listen: ["127.0.0.1:80"]`, "name: blue, match: "+match(n.ns, 8081), "name: green, match: "+match(n.ns, 8082)))
	named(t, n.ns, "blue", "127.0.0.1:8081", "-graceful")
	named(t, n.ns, "green", "127.0.0.1:8082", "-graceful")
	d := n.agent()
	n.shares("blue", "blue", "green")
	l := n.load(loadtest.Options{Rate: 100, Targets: []loadtest.Target{{Addr: addr}}})
	l.warm(100)
	if by := l.Report().ServedBy; by["blue"] == 0 || by["green"] == 0 {
		t.Errorf("answers by backend: got %v, want both", by)
	}
	got := n.drains("blue", api.DrainRequest{})
	if e := d.ended(got.ID); e.Outcome != drain.OutcomeDrained {
		t.Errorf("the drain ended %s, want drained", e.Outcome)
	}
	n.shares("green", "green")
	before := l.Report()
	l.warm(before.OK + 100)
	if by := l.Report().ServedBy; by["blue"] != before.ServedBy["blue"] {
		t.Errorf("blue is out and answered %d more", by["blue"]-before.ServedBy["blue"])
	}
	named(t, n.ns, "blue", "127.0.0.1:8081", "-graceful")
	n.shares("green", "blue", "green")
	before = l.Report()
	eventually(t, "blue answers again", func() bool { return l.Report().ServedBy["blue"] > before.ServedBy["blue"] })
	if r := l.end(); r.Failed > 0 {
		t.Errorf("%d of %d failed: %s", r.Failed, r.OK+r.Failed, verdicts(r))
	}
}

// What a new configuration does not change is not touched: the same one again begins nothing anew, and one that is wrong
// changes nothing.
func TestC14_TheSameAgainBeginsNothing(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	backends := func(weight int) string {
		return agentBudget + "services:\n" + backendsOf("web", `listen: ["127.0.0.1:80"]`,
			fmt.Sprintf("name: blue, match: %s, weight: %d", match(n.ns, 8081), weight), "name: green, match: "+match(n.ns, 8082))
	}
	n.set(backends(1))
	named(t, n.ns, "blue", "127.0.0.1:8081")
	named(t, n.ns, "green", "127.0.0.1:8082")
	d := n.agent()
	n.shares("blue", "blue", "green")
	kept := holdOpen(t, n.ns, "127.0.0.1:80")
	defer kept.Close()
	before := n.awaitView("blue", "counted", func(b api.Backend) bool { return b.CountsKnown })
	events := len(d.all(agent.EventService)) + len(d.all(agent.EventRun)) + len(d.all(agent.EventListener))
	for range 5 {
		d.reload(backends(1))
	}
	n.set("services: {}\n")
	d.signal(syscall.SIGHUP)
	d.says("the configuration stays as it was")
	after := n.view("blue")
	if after.Gen != before.Gen || after.PID != before.PID || value(after.Counts.Accepted) != value(before.Counts.Accepted) || len(after.Warnings) > 0 {
		t.Errorf("after five reloads of the same: got generation %d, process %d, %s, %q; want %d, %d, %s", after.Gen, after.PID, shown(after), after.Warnings, before.Gen, before.PID, shown(before))
	}
	if now := len(d.all(agent.EventService)) + len(d.all(agent.EventRun)) + len(d.all(agent.EventListener)); now != events {
		t.Errorf("%d events for reloads that change nothing", now-events)
	}
	// What is changed takes effect, and the process that it is about stays what it was.
	d.reload(backends(3))
	if a := n.shares("blue", "blue", "green"); a.Shares["blue"] != 6 {
		n.awaitView("blue", "6 of 8 shares", func(b api.Backend) bool { return b.Addresses[0].Shares["blue"] == 6 })
	}
	after = n.view("blue")
	if after.Gen != before.Gen || after.PID != before.PID || value(after.Counts.Accepted) != value(before.Counts.Accepted) || !after.CountsKnown {
		t.Errorf("after another weight: got generation %d, process %d, %s; want %d, %d, %s", after.Gen, after.PID, shown(after), before.Gen, before.PID, shown(before))
	}
	n.mustServe("127.0.0.1:80")
}

// Twenty reloads, each of which changes something and is followed by a WebSocket, close none of them. Nothing is left behind
// in the agent.
func TestC17_ReloadsKeepWebSockets(t *testing.T) {
	t.Parallel()
	const reloads = 20
	n := newNode(t, "")
	conf := func(i int) string {
		keys := fmt.Sprintf("listen: [\"127.0.0.1:80\"]\nhold_max: %d", 10+i)
		return agentBudget + "services:\n" + backendsOf("web", keys, "name: web, match: "+match(n.ns, 8081)) +
			backendsOf("other", fmt.Sprintf("grace: %ds", 30+i), "name: other, match: "+match(n.ns, 8082))
	}
	n.set(conf(0))
	named(t, n.ns, "web", "127.0.0.1:8081")
	d := n.agent()
	n.shares("web", "web")
	var open []*httpConn
	upgrade := func() {
		c := dialHTTP(t, n.ns, "127.0.0.1:80")
		c.send(t, "/upgrade")
		c.head(t)
		open = append(open, c)
	}
	upgrade()
	descriptors := func() int {
		fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", d.pid()))
		if err != nil {
			t.Fatal(err)
		}
		return len(fds)
	}
	n.awaitView("web", "1 in flight", func(b api.Backend) bool { return value(b.InFlight) == 1 })
	before, gen := descriptors(), n.view("web").Gen
	for i := range reloads {
		d.reload(conf(i + 1))
		upgrade()
	}
	b := n.awaitView("web", "all counted", func(b api.Backend) bool { return value(b.Counts.Active)+value(b.Counts.Idle) == reloads+1 })
	if b.Gen != gen {
		t.Errorf("generation %d after the reloads, want %d", b.Gen, gen)
	}
	for i, c := range open {
		if _, err := io.WriteString(c, "ping"); err != nil {
			t.Errorf("WebSocket %d: %v", i, err)
			continue
		}
		got := make([]byte, 4)
		if _, err := io.ReadFull(c.br, got); err != nil || string(got) != "ping" {
			t.Errorf("WebSocket %d: got %q, %v", i, got, err)
		}
	}
	eventually(t, "the agent has no more descriptors than before", func() bool { return descriptors() <= before+2 })
}

// A drain keeps the policy with which it began. What was configured meanwhile is for the next one.
func TestD11_AReloadDuringADrainIsForTheNext(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	conf := func(grace string) string {
		return "services:\n" + service("web", n.ns, 8080, "grace: "+grace, "flush_timeout: 1s", "reserve: 1s", "quiet_period: 300ms", "on_new: refuse")
	}
	n.set(conf("60s"))
	named(t, n.ns, "web", "127.0.0.1:8080")
	d := n.agent()
	n.ready("web")
	holdOpen(t, n.ns, "127.0.0.1:8080")
	first := n.drains("web", api.DrainRequest{})
	d.reload(conf("50s"))
	during := n.view("web").Drain
	if during == nil || during.ID != first.ID || !during.Deadline.Equal(first.Deadline) || during.Policy != first.Policy {
		t.Errorf("after the reload: got %+v, want %+v", during, first)
	}
	n.mustRefuse("127.0.0.1:8080")
	if err := n.ask(func(ctx context.Context, c *api.Client) error {
		_, err := c.Undrain(ctx, "web", api.UndrainRequest{})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	d.ended(first.ID)
	n.mustServe("127.0.0.1:8080")
	eventually(t, "the next drain has the new policy", func() bool {
		second := n.drains("web", api.DrainRequest{})
		if err := n.ask(func(ctx context.Context, c *api.Client) error {
			_, err := c.Undrain(ctx, "web", api.UndrainRequest{})
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return second.ID != first.ID && time.Duration(second.Policy.Grace) == 50*time.Second
	})
}

// A backend that does not answer its probe gets nothing new, keeps what it has, and comes back. Neither is a failure of
// anything.
func TestD10_AProbeTakesABackendOutAndBack(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	dir := t.TempDir()
	sick := dir + "/sick"
	n.set(agentBudget + "services:\n" +
		backendsOf("web", "listen: [\"127.0.0.1:80\"]\nready: {exec: [sh, -c, '! test -e "+sick+"'], interval: 200ms}", "name: blue, match: "+match(n.ns, 8081)) +
		backendsOf("tcp", "listen: [\"127.0.0.1:81\"]\nready: {tcp: {port: 9000}, interval: 200ms}", "name: red, match: "+match(n.ns, 8083)))
	named(t, n.ns, "blue", "127.0.0.1:8081")
	named(t, n.ns, "red", "127.0.0.1:8083")
	n.agent()
	n.shares("blue", "blue")
	kept := dialHTTP(t, n.ns, "127.0.0.1:80")
	kept.get(t, "/")
	if err := os.WriteFile(sick, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	b := n.awaitView("blue", "left out", func(b api.Backend) bool { return len(b.Addresses) > 0 && len(b.Addresses[0].Shares) == 0 })
	if b.Ready || b.State != drain.StateServing || b.Addresses[0].Why == "" || len(b.Warnings) == 0 {
		t.Errorf("got %+v, want a backend that serves, is not ready, and says why", b)
	}
	n.mustRefuse("127.0.0.1:80")
	kept.get(t, "/")
	if err := os.Remove(sick); err != nil {
		t.Fatal(err)
	}
	n.shares("blue", "blue")
	n.mustServe("127.0.0.1:80")
	// A port that opens later.
	if b := n.view("red"); b.Ready {
		t.Error("red is ready without its probe's port")
	}
	program(t, n.ns, app(t, "listen=127.0.0.1:9000")...)
	n.shares("red", "red")
	n.mustServe("127.0.0.1:81")
}

// An address of a service belongs to whoever listens there, before or after: a listener of somebody else gets what it would
// get without Ebb, and the service gets it back when that one has gone.
func TestG6_AServiceTakesNothingFromAListener(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	n.set(agentBudget + "services:\n" + backendsOf("web", `listen: ["0.0.0.0:80"]`, "name: web, match: "+match(n.ns, 8081)))
	named(t, n.ns, "web", "127.0.0.1:8081")
	by := func(addr string) string {
		c := dialHTTP(t, n.ns, addr)
		defer c.Close()
		return c.servedBy(t)
	}
	before := named(t, n.ns, "specific", "127.0.0.2:80")
	d := n.agent()
	n.shares("web", "web")
	after := named(t, n.ns, "later", "127.0.0.3:80")
	eventually(t, "the later listener is there", func() bool { return len(walk(t, n.ns, 1<<10, 80)) == 2 })
	for addr, want := range map[string]string{"127.0.0.1:80": "web", "127.0.0.2:80": "specific", "127.0.0.3:80": "later", "127.0.0.4:80": "web"} {
		if got := by(addr); got != want {
			t.Errorf("%s is answered by %s, want %s", addr, got, want)
		}
	}
	for _, p := range []*netnstest.Cmd{before, after} {
		if err := p.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = p.Wait()
	}
	// On the very address.
	foreign := named(t, n.ns, "foreign", "0.0.0.0:80")
	b := n.awaitView("web", "steered no more", func(b api.Backend) bool { return len(b.Addresses[0].Shares) == 0 })
	if !strings.Contains(b.Addresses[0].Why, "somebody else listens on ") {
		t.Errorf("why: got %q", b.Addresses[0].Why)
	}
	if got := by("127.0.0.1:80"); got != "foreign" {
		t.Errorf("answered by %s, want foreign", got)
	}
	if err := foreign.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = foreign.Wait()
	n.shares("web", "web")
	if got := by("127.0.0.1:80"); got != "web" {
		t.Errorf("answered by %s, want web", got)
	}
	d.stop()
	// Nobody there at all: the service goes on.
	if got := by("127.0.0.1:80"); got != "web" {
		t.Errorf("without an agent answered by %s, want web", got)
	}
}

// The last backend on this host goes: what comes late is relayed to the one elsewhere.
func TestD9_TheLastLocalBackendHandsOverToARemoteOne(t *testing.T) {
	t.Parallel()
	lan := newLAN(t)
	n := nodeOn(lan.host, "")
	remote := netip.AddrPortFrom(lan.link.A.V4, 8080).String()
	n.set("defaults: {grace: 30s, flush_timeout: 3s, reserve: 2s, quiet_period: 300ms}\nservices:\n" +
		backendsOf("web", "listen: [\"0.0.0.0:80\"]", "name: here, match: "+match(n.ns, 8081), fmt.Sprintf("name: there, address: %q", remote)))
	named(t, n.ns, "here", "0.0.0.0:8081", "-graceful")
	named(t, lan.client, "there", remote)
	d := n.agent()
	n.shares("here", "here")
	l := loadFrom(t, lan.client, loadtest.Options{Rate: 50, Targets: []loadtest.Target{{Addr: lan.v4(80)}}})
	l.warm(50)
	got := n.drains("here", api.DrainRequest{})
	if got.ID == "" || n.view("here").OnNew.Chosen != drain.OnNewRelay {
		t.Errorf("new connections: got %+v, want relay", n.view("here").OnNew)
	}
	eventually(t, "the remote one answers", func() bool { return l.Report().ServedBy["there"] > 20 })
	if r := l.end(); r.Failed > 0 || r.ServedBy["here"] == 0 {
		t.Errorf("%d of %d failed: %s, by %v", r.Failed, r.OK+r.Failed, verdicts(r), r.ServedBy)
	}
	if e := d.ended(got.ID); e.Outcome != drain.OutcomeDrained {
		t.Errorf("the drain ended %s, want drained", e.Outcome)
	}
}

// A service on [::] takes clients of both families, and the workload itself by the address of its service.
func TestC33_AServiceOfBothFamilies(t *testing.T) {
	t.Parallel()
	lan := newLAN(t)
	n := nodeOn(lan.host, "")
	n.set(agentBudget + "services:\n" + backendsOf("web", `listen: ["[::]:80"]`, "name: blue, match: "+match(n.ns, 8081), "name: green, match: "+match(n.ns, 8082)))
	named(t, n.ns, "blue", "[::]:8081")
	named(t, n.ns, "green", "[::]:8082")
	n.agent()
	n.shares("blue", "blue", "green")
	for range 2 {
		for _, addr := range []string{lan.v4(80), lan.v6(80)} {
			c := dialHTTP(t, lan.client, addr)
			c.servedBy(t)
		}
	}
	n.drains("blue", api.DrainRequest{OnNew: drain.OnNewSteer})
	for range 8 {
		for _, addr := range []string{lan.v4(80), lan.v6(80), lan.v4(8081), lan.v6(8081)} {
			c := dialHTTP(t, lan.client, addr)
			if name := c.servedBy(t); name != "green" {
				t.Errorf("%s: answered by %s, want green", addr, name)
			}
			c.Close()
		}
	}
}

// Two namespaces with the same addresses are two backends of two services.
func TestG9_TheSameAddressesInTwoNamespaces(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	other := netnstest.New(t)
	n.set(agentBudget + "services:\n" +
		backendsOf("one", `listen: ["127.0.0.1:80"]`, "name: one, match: "+match(n.ns, 8080)) +
		backendsOf("two", `listen: ["127.0.0.1:80"]`, "name: two, match: "+match(other, 8080)))
	named(t, n.ns, "one", "127.0.0.1:8080")
	named(t, other, "two", "127.0.0.1:8080")
	d := n.agent()
	n.shares("one", "one")
	n.shares("two", "two")
	for name, ns := range map[string]*netnstest.NS{"one": n.ns, "two": other} {
		for _, addr := range []string{"127.0.0.1:80", "127.0.0.1:8080"} {
			c := dialHTTP(t, ns, addr)
			if got := c.servedBy(t); got != name {
				t.Errorf("%s in the namespace of %s: answered by %s", addr, name, got)
			}
			c.Close()
		}
	}
	got := n.drains("one", api.DrainRequest{OnNew: drain.OnNewRefuse})
	n.mustRefuse("127.0.0.1:8080")
	c := dialHTTP(t, other, "127.0.0.1:8080")
	if name := c.servedBy(t); name != "two" {
		t.Errorf("answered by %s, want two", name)
	}
	n.awaitView("two", "serves its client", func(b api.Backend) bool {
		return b.State == drain.StateServing && b.CountsKnown && value(b.InFlight) == 1
	})
	d.ended(got.ID)
}

// Under observe the application and its clients see nothing of the agent: the service's address is nobody's, a drain
// leaves the process alone, and when it is over the backend serves as before and can be drained again.
func TestG3_AnObservingAgentTouchesNothing(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	n.set(agentBudget + "services:\n" + backendsOf("web", "mode: observe\nprotocol: http1\nlisten: [\"127.0.0.1:80\"]", "name: web, match: "+match(n.ns, 8080)))
	p := named(t, n.ns, "web", "127.0.0.1:8080")
	d := n.agent()
	n.ready("web")
	n.mustRefuse("127.0.0.1:80")
	c := dialHTTP(t, n.ns, "127.0.0.1:8080")
	for range 2 {
		got := n.drains("web", api.DrainRequest{})
		n.mustServe("127.0.0.1:8080")
		c.get(t, "/")
		if e := d.ended(got.ID); e.Outcome == "" {
			t.Errorf("no outcome: %+v", e)
		}
		b := n.awaitView("web", "serving again", func(b api.Backend) bool { return b.State == drain.StateServing && b.Ready })
		if b.PID != p.Process.Pid {
			t.Errorf("process %d, want %d", b.PID, p.Process.Pid)
		}
	}
	if s := c.stats(t); len(s.Signals) > 0 || s.Flushes > 0 {
		t.Errorf("the application heard %v and %d flushes", s.Signals, s.Flushes)
	}
}

// A hundred who drain two backends at once begin one drain of each.
func TestR2_AHundredDrainTwoBackends(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	n.set(agentBudget + "services:\n" + service("one", n.ns, 8081, "on_new: refuse") + service("two", n.ns, 8082, "on_new: refuse"))
	named(t, n.ns, "one", "127.0.0.1:8081")
	named(t, n.ns, "two", "127.0.0.1:8082")
	d := n.agent()
	for _, name := range []string{"one", "two"} {
		n.ready(name)
	}
	holdOpen(t, n.ns, "127.0.0.1:8081")
	holdOpen(t, n.ns, "127.0.0.1:8082")
	var mu sync.Mutex
	ids := map[string]map[string]bool{"one": {}, "two": {}}
	var wg sync.WaitGroup
	for i := range 100 {
		wg.Go(func() {
			name := []string{"one", "two"}[i%2]
			err := n.ask(func(ctx context.Context, c *api.Client) error {
				x, err := c.Drain(ctx, name, api.DrainRequest{})
				mu.Lock()
				defer mu.Unlock()
				ids[name][x.ID] = true
				return err
			})
			if err != nil {
				t.Errorf("drain %s: %v", name, err)
			}
		})
	}
	wg.Wait()
	for name, got := range ids {
		if len(got) != 1 {
			t.Errorf("%s: drains %v, want one", name, got)
		}
	}
	if begun := d.all(drain.EventBegin); len(begun) != 2 {
		t.Errorf("%d drains began, want 2", len(begun))
	}
}

// A listener that somebody holds for the next process, as a service manager does for a socket unit, is refused no longer than
// the drain of this one takes: what comes then waits for the next.
func TestG1_AListenerThatIsKeptForTheNextProcess(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	const parent = `
import socket, subprocess, sys
s = socket.socket()
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.bind(("127.0.0.1", 8081))
s.listen(64)
child = """
import socket, sys
s = socket.socket(fileno=int(sys.argv[1]))
while True:
    c, _ = s.accept()
    c.recv(1000)
    c.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n")
    c.close()
"""
while True:
    p = subprocess.Popen([sys.executable, "-c", child, str(s.fileno())], pass_fds=[s.fileno()])
    print(p.pid, flush=True)
    p.wait()
    if not sys.stdin.readline():
        break
`
	argv := python(t, parent)
	p := n.ns.Command(t, argv[0], argv[1:]...)
	in, out := pipes(t, p)
	pid := func() (pid int) {
		t.Helper()
		if _, err := fmt.Fscan(out, &pid); err != nil {
			t.Fatal(err)
		}
		return pid
	}
	conf := func(pid int) string {
		return agentBudget + "services:\n" + backendsOf("web", "on_new: refuse", fmt.Sprintf("name: web, match: {pid: %d}", pid))
	}
	n.set(conf(pid()))
	d := n.agent()
	n.ready("web")
	n.mustServe("127.0.0.1:8081")
	got := n.drains("web", api.DrainRequest{})
	d.ended(got.ID)
	served := make(chan bool, 1)
	eventually(t, "its connections wait for the next one", func() bool {
		c, err := n.ns.DialContext(t.Context(), "tcp", "127.0.0.1:8081")
		if err != nil {
			return false
		}
		go func() {
			defer c.Close()
			_, _ = io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
			b := make([]byte, 12)
			_, err := io.ReadFull(c, b)
			served <- err == nil
		}()
		return true
	})
	fmt.Fprintln(in)
	pid()
	if !<-served {
		t.Error("what waited for the next process was not served")
	}
}

// pipes starts a process with pipes to and from it. It ends when its standard input does.
func pipes(t *testing.T, p *netnstest.Cmd) (io.Writer, io.Reader) {
	t.Helper()
	in, err := p.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := p.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { in.Close() })
	return in, out
}

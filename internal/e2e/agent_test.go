// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/agent"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/netnstest"
)

// node is a host whose backends `ebb agent` owns. The agent comes and goes, its state directory, run directory and bpffs
// stay.
type node struct {
	*host
	config string // file
	state  string // directory
	sock   string // of operators
}

// agentHead is what the configuration of a node begins with; the rest is the test's.
const agentHead = `mode: enforce
api: {socket: %s/ebb.sock, app_socket: %[1]s/app.sock}
metrics: {listen: ""}
state: {dir: %s, bpffs: %s}
`

// newNode makes a node with a configuration that begins with agentHead; see set.
func newNode(t *testing.T, rest string) *node {
	t.Helper()
	return nodeOn(newHost(t), rest)
}

// nodeOn is newNode on a host that is there.
func nodeOn(h *host, rest string) *node {
	h.t.Helper()
	dir := h.t.TempDir()
	n := &node{host: h, config: filepath.Join(dir, "agent.yaml"), state: filepath.Join(dir, "state"), sock: filepath.Join(h.runDir, api.AgentSocket)}
	n.set(rest)
	return n
}

// set writes the configuration: agentHead, and then rest. An agent that runs has to be told (SIGHUP).
func (n *node) set(rest string) {
	n.t.Helper()
	text := fmt.Sprintf(agentHead, n.runDir, n.state, n.bpffs) + rest
	if err := os.WriteFile(n.config, []byte(text), 0o600); err != nil {
		n.t.Fatal(err)
	}
}

// match is the match of a port in a namespace, as YAML.
func match(ns *netnstest.NS, port int) string {
	return fmt.Sprintf("{port: %d, netns: %s}", port, ns.Path())
}

// service is one service of one local backend of the same name, as YAML, with further keys in lines of their own.
func service(name string, ns *netnstest.NS, port int, keys ...string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "  - name: %s\n", name)
	for _, k := range keys {
		fmt.Fprintf(&b, "    %s\n", k)
	}
	fmt.Fprintf(&b, "    backends:\n      - {name: %s, match: %s}\n", name, match(ns, port))
	return b.String()
}

// agentBudget are the defaults of a drain that no test uses up, as YAML.
const agentBudget = "defaults: {grace: 60s, flush_timeout: 5s, reserve: 3s, quiet_period: 300ms}\n"

// daemon is one process of `ebb agent`.
type daemon struct {
	n    *node
	cmd  *netnstest.Cmd
	done chan struct{}

	mu     sync.Mutex
	events []drain.Event
	log    []string // lines of stderr
	wake   chan struct{}
}

// begin starts an agent and does not wait until it owns anything.
func (n *node) begin(flags ...string) *daemon {
	n.t.Helper()
	return n.beginUnder(nil, flags...)
}

// beginUnder is begin under a command that executes it, such as one that takes privileges away.
func (n *node) beginUnder(under []string, flags ...string) *daemon {
	n.t.Helper()
	d := &daemon{n: n, done: make(chan struct{}), wake: make(chan struct{})}
	argv := append(append(under[:len(under):len(under)], n.bin, "agent", "--config", n.config), flags...)
	d.cmd = n.ns.Command(n.t, argv[0], argv[1:]...)
	d.cmd.Cmd.Env = n.env
	stderr, w, err := os.Pipe()
	if err != nil {
		n.t.Fatal(err)
	}
	defer w.Close()
	d.cmd.Cmd.Stderr = w
	if err := d.cmd.Start(); err != nil {
		n.t.Fatalf("start ebb agent: %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var readers sync.WaitGroup
	readers.Go(func() { d.read(stderr) })
	readers.Go(func() { d.follow(ctx) })
	go func() {
		d.cmd.Wait() // its exit code is read from the state
		// A relay that it has started may hold its stderr open.
		end := time.AfterFunc(2*time.Second, func() { stderr.Close() })
		cancel()
		readers.Wait()
		end.Stop()
		stderr.Close()
		close(d.done)
	}()
	n.t.Cleanup(func() {
		d.cmd.Cmd.Process.Kill()
		<-d.done
		if n.t.Failed() {
			d.dump()
		}
	})
	return d
}

// agent starts an agent and waits until it owns the backends of the node.
func (n *node) agent(flags ...string) *daemon {
	n.t.Helper()
	d := n.begin(flags...)
	d.owns()
	return d
}

// owns waits until this agent owns the backends of the node.
func (d *daemon) owns() {
	d.n.t.Helper()
	d.find("word that it owns the host", func(e drain.Event) bool {
		return e.Type == agent.EventAgent && strings.HasPrefix(e.Message, "owns ")
	})
}

func (d *daemon) read(stderr io.Reader) {
	sc := bufio.NewScanner(stderr)
	sc.Buffer(nil, 16<<20)
	for sc.Scan() {
		d.mu.Lock()
		d.log = append(d.log, sc.Text())
		d.woken()
		d.mu.Unlock()
	}
}

// woken tells who waits that there is something new. The caller holds mu.
func (d *daemon) woken() {
	close(d.wake)
	d.wake = make(chan struct{})
}

// follow reads the events of this process, from the moment when it serves the socket. The end of the process ends it.
func (d *daemon) follow(ctx context.Context) {
	for !d.serves() {
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return
		}
	}
	c, err := api.Dial(ctx, d.n.sock)
	if err != nil {
		return // it has ended
	}
	defer c.Close()
	// Not under ctx: what was said at the end is read to the end.
	for e, err := range c.Events(context.Background(), 1, true) {
		if err != nil {
			return
		}
		d.mu.Lock()
		d.events = append(d.events, e)
		d.woken()
		d.mu.Unlock()
	}
}

// serves tells whether it is this process that listens on the node's socket (SO_PEERCRED, unix(7)).
func (d *daemon) serves() bool {
	c, err := net.Dial("unix", d.n.sock)
	if err != nil {
		return false
	}
	defer c.Close()
	rc, err := c.(*net.UnixConn).SyscallConn()
	if err != nil {
		return false
	}
	var cred *unix.Ucred
	cerr := rc.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	return cerr == nil && err == nil && int(cred.Pid) == d.pid()
}

func (d *daemon) dump() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, e := range d.events {
		b, _ := json.Marshal(e)
		d.n.t.Logf("agent %d event %s", d.pid(), b)
	}
	for _, l := range d.log {
		d.n.t.Logf("agent %d stderr %s", d.pid(), l)
	}
}

// look waits until ok, which is asked again whenever the agent has said something.
func (d *daemon) look(what string, ok func() bool) {
	d.n.t.Helper()
	deadline := time.After(patience)
	for {
		d.mu.Lock()
		found, wake := ok(), d.wake
		d.mu.Unlock()
		if found {
			return
		}
		select {
		case <-wake:
			continue
		default:
		}
		select {
		case <-wake:
		case <-d.done:
			d.mu.Lock()
			found = ok()
			d.mu.Unlock()
			if !found {
				d.n.t.Fatalf("agent %d ended without %s", d.pid(), what)
			}
			return
		case <-deadline:
			d.n.t.Fatalf("agent %d: no %s", d.pid(), what)
		}
	}
}

// find waits until an event satisfies is, looking at those that have come already too.
func (d *daemon) find(what string, is func(drain.Event) bool) (found drain.Event) {
	d.n.t.Helper()
	d.look(what, func() bool {
		for _, e := range d.events {
			if is(e) {
				found = e
				return true
			}
		}
		return false
	})
	return found
}

// await waits for an event of a type about a backend; "" is any.
func (d *daemon) await(typ, backend string) drain.Event {
	d.n.t.Helper()
	return d.find("event "+typ+" of "+backend, func(e drain.Event) bool {
		return e.Type == typ && (backend == "" || e.Backend == backend)
	})
}

// phase waits until the drain of a backend has entered a phase.
func (d *daemon) phase(backend string, p drain.Phase) drain.Event {
	d.n.t.Helper()
	return d.find("phase "+string(p)+" of "+backend, func(e drain.Event) bool {
		return (e.Type == drain.EventPhase || e.Type == drain.EventBegin) && e.Phase == p && e.Backend == backend
	})
}

// ended waits for the end of a drain.
func (d *daemon) ended(id string) drain.Event {
	d.n.t.Helper()
	return d.find("end of drain "+id, func(e drain.Event) bool { return e.Type == drain.EventEnd && e.Drain == id })
}

// all returns the events of a type that have come so far.
func (d *daemon) all(typ string) (out []drain.Event) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, e := range d.events {
		if e.Type == typ {
			out = append(out, e)
		}
	}
	return out
}

// says waits for a line of its log that holds a text.
func (d *daemon) says(text string) {
	d.n.t.Helper()
	d.look("line with "+text, func() bool {
		for _, l := range d.log {
			if strings.Contains(l, text) {
				return true
			}
		}
		return false
	})
}

func (d *daemon) pid() int { return d.cmd.Cmd.Process.Pid }

func (d *daemon) signal(sig syscall.Signal) {
	d.n.t.Helper()
	if err := d.cmd.Cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		d.n.t.Fatalf("signal ebb agent: %v", err)
	}
}

// wait returns the exit code; -1 after a signal.
func (d *daemon) wait() int {
	d.n.t.Helper()
	select {
	case <-d.done:
	case <-time.After(patience):
		d.n.t.Fatal("ebb agent has not ended")
	}
	return d.cmd.Cmd.ProcessState.ExitCode()
}

// stop ends the agent as an upgrade does.
func (d *daemon) stop() {
	d.n.t.Helper()
	d.signal(syscall.SIGTERM)
	if code := d.wait(); code != 0 {
		d.n.t.Errorf("the agent ended with code %d after SIGTERM", code)
	}
}

// kill9 ends the agent as a crash does, and waits until it is gone.
func (d *daemon) kill9() {
	d.n.t.Helper()
	d.signal(syscall.SIGKILL)
	<-d.done
}

// freeze stops the agent without ending it, and waits until it stands.
func (d *daemon) freeze() {
	d.n.t.Helper()
	d.signal(syscall.SIGSTOP)
	eventually(d.n.t, "the agent stands still", func() bool {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", d.pid()))
		_, rest, _ := strings.Cut(string(b), ") ")
		return err != nil || strings.HasPrefix(rest, "T")
	})
}

// ask calls the node's API. Whoever owns the node answers.
func (n *node) ask(call func(context.Context, *api.Client) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := api.Dial(ctx, n.sock)
	if err != nil {
		return err
	}
	defer c.Close()
	return call(ctx, c)
}

// view asks for the present state of a backend.
func (n *node) view(backend string) (b api.Backend) {
	n.t.Helper()
	err := n.ask(func(ctx context.Context, c *api.Client) (err error) {
		b, err = c.Backend(ctx, backend)
		return err
	})
	if err != nil {
		n.t.Fatalf("ask for backend %s: %v", backend, err)
	}
	return b
}

// awaitView waits until the state of a backend satisfies ok. While nobody answers, it is asked again.
func (n *node) awaitView(backend, what string, ok func(api.Backend) bool) (b api.Backend) {
	n.t.Helper()
	var err error
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		err = n.ask(func(ctx context.Context, c *api.Client) (err error) {
			b, err = c.Backend(ctx, backend)
			return err
		})
		if err == nil && ok(b) {
			return b
		}
	}
	n.t.Fatalf("never %s: %s %s: %s (%v) %q", what, backend, b.State, shown(b), err, b.Warnings)
	return b
}

// ready waits until a backend serves.
func (n *node) ready(backend string) api.Backend {
	n.t.Helper()
	return n.awaitView(backend, "ready", func(b api.Backend) bool { return b.Ready })
}

// drains begins the drain of a backend.
func (n *node) drains(backend string, q api.DrainRequest) (d api.Drain) {
	n.t.Helper()
	err := n.ask(func(ctx context.Context, c *api.Client) (err error) {
		d, err = c.Drain(ctx, backend, q)
		return err
	})
	if err != nil {
		n.t.Fatalf("drain %s: %v", backend, err)
	}
	return d
}

// An agent owns a process that it did not start: it counts it, drains it with its stop signal at zero, and leaves the next
// one alone.
func TestAgentDrainsAProcessOfTheHost(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	const addr = "127.0.0.1:8080"
	n.set(agentBudget + "services:\n" + service("web", n.ns, 8080))
	first := program(t, n.ns, goServer(t, addr)...)
	d := n.agent()
	n.ready("web")
	hold := holdOpen(t, n.ns, addr)
	n.awaitView("web", "one connection", func(b api.Backend) bool { return value(b.InFlight) == 1 && b.PID == first.Process.Pid })
	got := n.drains("web", api.DrainRequest{OnNew: drain.OnNewRefuse})
	n.mustRefuse(addr)
	hold.Close()
	if e := d.ended(got.ID); e.Outcome != drain.OutcomeDrained {
		t.Errorf("the drain ended %s, want drained", e.Outcome)
	}
	_ = first.Wait() // by its stop signal
	if ws, ok := first.ProcessState.Sys().(syscall.WaitStatus); !ok || ws.Signal() != syscall.SIGTERM {
		t.Errorf("the process ended with %v, want its stop signal", first.ProcessState)
	}
	second := program(t, n.ns, goServer(t, addr)...)
	n.awaitView("web", "the next process serves", func(b api.Backend) bool { return b.Ready && b.PID == second.Process.Pid && b.Gen > got.Gen })
	n.mustServe(addr)
	d.stop()
	n.mustServe(addr)
}

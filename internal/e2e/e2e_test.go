// SPDX-License-Identifier: Apache-2.0

// Package e2e holds the end-to-end tests: the real binary, real servers, real kernel state, in network namespaces of
// their own. It has no code but tests.
//
// The binary is the one named by EBB_BIN, or else one that is built with the race detector at the start.
package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
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

// patience bounds every wait for something that must happen. It is never a measure of how fast.
const patience = 60 * time.Second

// long says that the long versions of the tests are wanted.
var long = os.Getenv("EBB_LONG") != ""

// ebbBin is the binary under test.
var ebbBin string

func TestMain(m *testing.M) {
	loadtest.ServeIfAsked()
	actIfAsked()
	os.Exit(testMain(m))
}

func testMain(m *testing.M) int {
	// What is built with the race detector sleeps for a second before it exits, in case other goroutines still race
	// (runtime/race, atexit_sleep_ms). Here that would be a second for each of hundreds of processes.
	if err := os.Setenv("GORACE", strings.TrimSpace("atexit_sleep_ms=0 "+os.Getenv("GORACE"))); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	ebbBin = os.Getenv("EBB_BIN")
	if ebbBin == "" {
		dir, err := os.MkdirTemp("", "ebb-e2e-*")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		ebbBin = filepath.Join(dir, "ebb")
		build := exec.Command("go", "build", "-race", "-o", ebbBin, "github.com/ebbproxy/ebb/cmd/ebb")
		if out, err := build.CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "build the binary under test: %v\n%s", err, out)
			return 1
		}
	}
	return m.Run()
}

// host is a small machine: a network namespace with a bpffs and a run directory of its own.
type host struct {
	t      *testing.T
	ns     *netnstest.NS
	bpffs  string // the directory that ebb pins in
	runDir string
	env    []string
	bin    string     // ebb; another version's where a test sets it
	files  []*os.File // handed down to `ebb run` from descriptor 3 on, as a service manager does
}

func newHost(t *testing.T) *host {
	t.Helper()
	netnstest.RequireRoot(t)
	return hostIn(t, netnstest.New(t))
}

func hostIn(t *testing.T, ns *netnstest.NS) *host {
	t.Helper()
	h := &host{t: t, ns: ns, bpffs: filepath.Join(netnstest.BPFFS(t), "ebb"), runDir: t.TempDir(), bin: ebbBin}
	if len(h.runDir) > 60 { // a socket's path has 107 bytes
		short, err := os.MkdirTemp("", "e")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(short) })
		h.runDir = short
	}
	h.env = append(os.Environ(), "EBB_BPFFS="+h.bpffs, "EBB_RUN_DIR="+h.runDir, "EBB_STATE_DIR="+filepath.Join(h.runDir, "state"))
	return h
}

// ebb runs a command to its end.
func (h *host) ebb(args ...string) (stdout, stderr string, code int) {
	h.t.Helper()
	cmd := h.ns.Command(h.t, h.bin, args...)
	var out, errs bytes.Buffer
	cmd.Cmd.Env, cmd.Cmd.Stdout, cmd.Cmd.Stderr = h.env, &out, &errs
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		h.t.Fatalf("ebb %s: %v", strings.Join(args, " "), err)
	}
	return out.String(), errs.String(), cmd.Cmd.ProcessState.ExitCode()
}

// supervised is one `ebb run`.
type supervised struct {
	h      *host
	name   string
	cmd    *netnstest.Cmd
	report string // file
	stdout string // file
	done   chan struct{}

	mu     sync.Mutex
	events []drain.Event
	other  []string // lines of stderr that are no events
	wake   chan struct{}
}

// start begins `ebb run` and does not wait for it to listen.
func (h *host) start(name string, flags []string, argv ...string) *supervised {
	h.t.Helper()
	return h.startWith(nil, name, flags, argv...)
}

// startWith is start after prepare has changed the command, for another user, namespace or standard input.
func (h *host) startWith(prepare func(*exec.Cmd), name string, flags []string, argv ...string) *supervised {
	h.t.Helper()
	r := &supervised{h: h, name: name, done: make(chan struct{}), wake: make(chan struct{}), report: filepath.Join(h.t.TempDir(), "report"), stdout: filepath.Join(h.t.TempDir(), "stdout")}
	args := append([]string{"run", "--name", name, "--report", r.report}, flags...)
	args = append(append(args, "--"), argv...)
	r.cmd = h.ns.Command(h.t, h.bin, args...)
	r.cmd.Cmd.Env, r.cmd.Cmd.ExtraFiles = h.env, h.files
	// Files, not pipes of ours: CMD shares them, and an orphan of it may hold them open long after ebb has gone.
	stdout, err := os.Create(r.stdout)
	if err != nil {
		h.t.Fatal(err)
	}
	defer stdout.Close()
	errs, stderr, err := os.Pipe()
	if err != nil {
		h.t.Fatal(err)
	}
	defer stderr.Close()
	r.cmd.Cmd.Stdout, r.cmd.Cmd.Stderr = stdout, stderr
	if prepare != nil {
		prepare(r.cmd.Cmd)
	}
	if err := r.cmd.Start(); err != nil {
		h.t.Fatalf("start ebb run: %v", err)
	}
	read := make(chan struct{})
	go func() {
		defer close(read)
		r.read(errs)
	}()
	go func() {
		r.cmd.Wait() // its exit code is read from the state
		select {
		case <-read:
		case <-time.After(2 * time.Second):
			errs.Close()
			<-read
		}
		close(r.done)
	}()
	h.t.Cleanup(func() {
		r.cmd.Cmd.Process.Kill()
		<-r.done
		if len(argv) > 0 { // else it was attached to what the test has started itself
			r.endOrphan(argv[0])
		}
		if h.t.Failed() {
			r.dump()
		}
	})
	return r
}

// run starts `ebb run` and waits until it has found a listener.
func (h *host) run(name string, flags []string, argv ...string) *supervised {
	h.t.Helper()
	r := h.start(name, flags, argv...)
	r.await(agent.EventListener)
	return r
}

// endOrphan ends a CMD that outlives its killed ebb, as that of a failed test does: it leads the process group that ebb
// made for it, and its command line still names the program.
func (r *supervised) endOrphan(program string) {
	for _, e := range r.all(agent.EventRun) {
		pid, ok := e.Fields["pid"].(float64)
		if !ok {
			continue
		}
		title, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", int(pid)))
		if err == nil && strings.Contains(string(title), filepath.Base(program)) {
			_ = syscall.Kill(-int(pid), syscall.SIGKILL) // it may be ending by itself
		}
	}
}

func (r *supervised) read(stderr io.Reader) {
	sc := bufio.NewScanner(stderr)
	sc.Buffer(nil, 16<<20)
	for sc.Scan() {
		var e drain.Event
		r.mu.Lock()
		if err := json.Unmarshal(sc.Bytes(), &e); err == nil && e.Seq > 0 {
			r.events = append(r.events, e)
		} else {
			r.other = append(r.other, sc.Text())
		}
		close(r.wake)
		r.wake = make(chan struct{})
		r.mu.Unlock()
	}
}

func (r *supervised) dump() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.events {
		b, _ := json.Marshal(e)
		r.h.t.Logf("%s event %s", r.name, b)
	}
	for _, l := range r.other {
		r.h.t.Logf("%s stderr %s", r.name, l)
	}
}

// find waits until an event satisfies is, looking at those that have come already too.
func (r *supervised) find(what string, is func(drain.Event) bool) drain.Event {
	r.h.t.Helper()
	deadline := time.After(patience)
	for seen := 0; ; {
		r.mu.Lock()
		for ; seen < len(r.events); seen++ {
			if is(r.events[seen]) {
				e := r.events[seen]
				r.mu.Unlock()
				return e
			}
		}
		wake := r.wake
		r.mu.Unlock()
		select {
		case <-wake:
		case <-r.done:
			r.mu.Lock()
			more := seen < len(r.events)
			r.mu.Unlock()
			if !more {
				r.h.t.Fatalf("%s: ended without %s", r.name, what)
			}
		case <-deadline:
			r.h.t.Fatalf("%s: no %s", r.name, what)
		}
	}
}

// await waits for an event of a type.
func (r *supervised) await(typ string) drain.Event {
	r.h.t.Helper()
	return r.find("event "+typ, func(e drain.Event) bool { return e.Type == typ })
}

// phase waits until the drain has entered a phase.
func (r *supervised) phase(p drain.Phase) drain.Event {
	r.h.t.Helper()
	return r.find("phase "+string(p), func(e drain.Event) bool {
		return (e.Type == drain.EventPhase || e.Type == drain.EventBegin) && e.Phase == p
	})
}

// all returns the events of a type that have come so far.
func (r *supervised) all(typ string) (out []drain.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.events {
		if e.Type == typ {
			out = append(out, e)
		}
	}
	return out
}

func (r *supervised) pid() int { return r.cmd.Cmd.Process.Pid }

// child is CMD's pid.
func (r *supervised) child() int {
	r.h.t.Helper()
	return int(r.await(agent.EventRun).Fields["pid"].(float64))
}

func (r *supervised) signal(sig syscall.Signal) {
	r.h.t.Helper()
	if err := r.cmd.Cmd.Process.Signal(sig); err != nil {
		r.h.t.Fatalf("signal ebb run: %v", err)
	}
}

// wait returns the exit code.
func (r *supervised) wait() int {
	r.h.t.Helper()
	select {
	case <-r.done:
	case <-time.After(patience):
		r.h.t.Fatalf("%s: ebb run has not ended", r.name)
	}
	return r.cmd.Cmd.ProcessState.ExitCode()
}

// result reads the report file.
func (r *supervised) result() agent.Report {
	r.h.t.Helper()
	b, err := os.ReadFile(r.report)
	if err != nil {
		r.h.t.Fatalf("read report: %v", err)
	}
	var rep agent.Report
	if err := json.Unmarshal(b, &rep); err != nil {
		r.h.t.Fatalf("decode report: %v", err)
	}
	return rep
}

// client talks to the run's API.
func (r *supervised) client() *http.Client {
	sock := api.RunSocket(r.h.runDir, r.name)
	// No keep-alive: nobody would close the connections, and the server bounds them.
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", sock)
	}}}
}

// backend asks the API for the present state.
func (r *supervised) backend() api.Backend {
	r.h.t.Helper()
	resp, err := r.client().Get("http://ebb/v1/backends/" + r.name)
	if err != nil {
		r.h.t.Fatalf("ask for backend: %v", err)
	}
	defer resp.Body.Close()
	var b api.Backend
	if err := json.NewDecoder(resp.Body).Decode(&b); err != nil {
		r.h.t.Fatalf("decode backend: %v", err)
	}
	return b
}

// status is that of a readiness or liveness probe.
func (r *supervised) status(path string) int {
	r.h.t.Helper()
	resp, err := r.client().Get("http://ebb" + path)
	if err != nil {
		r.h.t.Fatalf("ask for %s: %v", path, err)
	}
	resp.Body.Close()
	return resp.StatusCode
}

// eventually waits until ok holds.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("never: %s", what)
}

// load is a generator in the host's namespace that runs until stop.
type load struct {
	*loadtest.Generator
	t    *testing.T
	stop context.CancelFunc
	done chan error
}

func (h *host) load(o loadtest.Options) *load {
	h.t.Helper()
	if o.Dial == nil {
		o.Dial = h.ns.DialContext
	}
	g, err := loadtest.New(o)
	if err != nil {
		h.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	l := &load{Generator: g, t: h.t, stop: cancel, done: make(chan error, 1)}
	go func() { l.done <- g.Run(ctx) }()
	h.t.Cleanup(cancel)
	return l
}

// end stops the load, waits for every answer and returns what happened.
func (l *load) end() loadtest.Report {
	l.t.Helper()
	l.stop()
	select {
	case err := <-l.done:
		if err != nil && !errors.Is(err, context.Canceled) {
			l.t.Fatalf("load: %v", err)
		}
	case <-time.After(2 * patience):
		l.t.Fatal("load has not ended")
	}
	return l.Report()
}

// warm waits until the load has had n good answers.
func (l *load) warm(n int64) {
	l.t.Helper()
	eventually(l.t, fmt.Sprintf("%d good answers", n), func() bool { r := l.Report(); return r.OK >= n })
}

// server is a real server to supervise.
type server struct {
	name string
	argv func(t *testing.T, port int, o loadtest.ServerOptions) []string
}

// servers are those that every departure must go well with.
var servers = []server{
	{"go", func(t *testing.T, port int, o loadtest.ServerOptions) []string {
		t.Helper()
		host := o.Host
		if host == "" {
			host = "127.0.0.1"
		}
		argv, err := loadtest.GoServer("-listen", net.JoinHostPort(host, strconv.Itoa(port)), "-mptcp")
		if err != nil {
			t.Fatal(err)
		}
		return argv
	}},
	{"nginx", packaged(loadtest.Nginx)},
	{"haproxy", packaged(loadtest.HAProxy)},
	{"python", packaged(loadtest.Python)},
	{"node", packaged(loadtest.Node)},
}

func packaged(f func(string, int, loadtest.ServerOptions) ([]string, error)) func(*testing.T, int, loadtest.ServerOptions) []string {
	return func(t *testing.T, port int, o loadtest.ServerOptions) []string {
		t.Helper()
		argv, err := f(t.TempDir(), port, o)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := exec.LookPath(argv[0]); err != nil {
			if os.Getenv("CI") == "true" {
				t.Fatalf("%s is not installed, and CI=true", argv[0])
			}
			t.Skipf("%s is not installed", argv[0])
		}
		return argv
	}
}

// goServer is the argument vector of the Go server on a port of loopback.
func goServer(t *testing.T, addr string, flags ...string) []string {
	t.Helper()
	argv, err := loadtest.GoServer(append([]string{"-listen", addr}, flags...)...)
	if err != nil {
		t.Fatal(err)
	}
	return argv
}

// verdicts is a readable list of what became of the attempts.
func verdicts(r loadtest.Report) string {
	var parts []string
	for v, tally := range maps.All(r.Verdicts) {
		parts = append(parts, fmt.Sprintf("%s %d (%s)", v, tally.Count, tally.Example))
	}
	return strings.Join(parts, ", ")
}

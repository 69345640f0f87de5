// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/agent"
	"github.com/ebbproxy/ebb/internal/api"
)

// kept is a connection that carries requests one after the other.
type kept struct {
	net.Conn
	t  *testing.T
	br *bufio.Reader
}

func (h *host) kept(t *testing.T, addr string) *kept {
	t.Helper()
	c := h.connect(addr)
	return &kept{c, t, bufio.NewReader(c)}
}

func (k *kept) send(path string) {
	k.t.Helper()
	if _, err := fmt.Fprintf(k.Conn, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", path); err != nil {
		k.t.Fatalf("send request: %v", err)
	}
}

// answer is the body of the next answer.
func (k *kept) answer() string {
	k.t.Helper()
	if err := k.SetReadDeadline(time.Now().Add(patience)); err != nil {
		k.t.Fatal(err)
	}
	resp, err := http.ReadResponse(k.br, nil)
	if err != nil {
		k.t.Fatalf("read answer: %v", err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		k.t.Fatalf("read body: %v", err)
	}
	return string(b)
}

func (r *supervised) flights(want int64) api.Backend {
	r.h.t.Helper()
	var b api.Backend
	eventually(r.h.t, fmt.Sprintf("%d in flight", want), func() bool {
		b = r.backend()
		return b.CountsKnown && *b.InFlight == want
	})
	return b
}

// A client that connects and sends nothing is unused: it delays a drain under idle: wait alone.
func TestC8_ASilentClientDelaysOnlyUnderWait(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	// Go's MPTCP listener and a plain TCP one.
	ignore := h.run("ignore", roomy("--on-new", "refuse"), goServer(t, "127.0.0.1:8001", "-mptcp")...)
	wait := h.run("wait", []string{"--grace", "60s", "--quiet-period", "300ms", "--on-new", "refuse", "--idle", "wait"}, goServer(t, "127.0.0.1:8002")...)
	h.connect("127.0.0.1:8001")
	c := h.connect("127.0.0.1:8002")
	eventually(t, "one unused connection each", func() bool {
		a, b := ignore.backend(), wait.backend()
		return a.Counts.Unused != nil && *a.Counts.Unused == 1 && b.Counts.Unused != nil && *b.Counts.Unused == 1
	})
	ignore.flights(0)
	wait.flights(1)
	ignore.signal(unix.SIGTERM)
	wait.signal(unix.SIGTERM)
	if code := ignore.wait(); code != 0 {
		t.Errorf("got exit code %d, want 0", code)
	}
	if d := ignore.drained(); d.Outcome != drain.OutcomeDrained || d.FlushReason != drain.FlushZero {
		t.Errorf("under ignore got %s at %s, want drained at zero", d.Outcome, d.FlushReason)
	}
	eventually(t, "the other one waits for it", func() bool {
		d := wait.backend().Drain
		return d != nil && d.Phase() == drain.PhaseWait && d.Blocking["unused"] == 1
	})
	c.Close()
	if code := wait.wait(); code != 0 {
		t.Errorf("got exit code %d, want 0", code)
	}
	if d := wait.drained(); d.Outcome != drain.OutcomeDrained || d.FlushReason != drain.FlushZero {
		t.Errorf("under wait got %s at %s, want drained at zero", d.Outcome, d.FlushReason)
	}
}

// Fifty idle connections beside one busy request: the request is answered; the others delay under idle: wait alone.
func TestC9_IdleConnectionsBesideABusyRequest(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	for _, c := range []struct {
		name     string
		flags    []string
		blocking map[string]int64
	}{
		{"http1-ignore", []string{"--protocol", "http1", "--idle", "ignore"}, map[string]int64{"active": 1}},
		{"opaque-wait", []string{"--idle-after", "500ms", "--idle", "wait"}, map[string]int64{"active": 1, "idle": 50}},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := h.as(t)
			r := h.run(c.name, append([]string{"--grace", "60s", "--quiet-period", "300ms", "--on-new", "refuse"}, c.flags...), goServer(t, "127.0.0.1:8001")...)
			var idle []*kept
			for range 50 {
				k := h.kept(t, "127.0.0.1:8001")
				k.send("/")
				k.answer()
				idle = append(idle, k)
			}
			busy := h.kept(t, "127.0.0.1:8001")
			path, want := "/?ms=4000", "hello\n"
			if c.name == "opaque-wait" {
				// Under opaque silence is idleness, so the answer is one that does not pause for long.
				path = "/events?ms=100"
			}
			busy.send(path)
			r.signal(unix.SIGTERM)
			r.phase(drain.PhaseWait)
			var last map[string]int64
			eventually(t, fmt.Sprintf("the drain waits for %v", c.blocking), func() bool {
				d := r.backend().Drain
				if d == nil {
					return false
				}
				last = d.Blocking
				return last["active"] == c.blocking["active"] && last["idle"] == c.blocking["idle"] && len(last) == len(c.blocking)
			})
			if c.name == "opaque-wait" {
				busy.Close()
				eventually(t, "the idle ones alone are left", func() bool {
					d := r.backend().Drain
					return d.Blocking["idle"] == 50 && len(d.Blocking) == 1
				})
				for _, k := range idle {
					k.Close()
				}
			} else if got := busy.answer(); got != want {
				t.Errorf("the busy request was answered %q, want %q", got, want)
			}
			if code := r.wait(); code != 0 {
				t.Errorf("got exit code %d, want 0", code)
			}
			if d := r.drained(); d.Outcome != drain.OutcomeDrained || d.FlushReason != drain.FlushZero {
				t.Errorf("got %s at %s, want drained at zero", d.Outcome, d.FlushReason)
			}
		})
	}
}

// Without a kernel datapath a zero from before the drain means nothing, and one in it only with a pause of arrivals; all
// of it is labelled.
func TestT10_AZeroFromBeforeTheDrainMeansNothing(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	r := h.run("web", []string{"--grace", "60s", "--quiet-period", "500ms", "--datapath", "none", "--on-new", "refuse"}, app(t, "listen=127.0.0.1:8001")...)
	c := h.stuck("127.0.0.1:8001")
	b := r.flights(1)
	if b.Guarded || b.Datapath != api.DatapathNone {
		t.Errorf("got datapath %s, guarded %t; want none and unguarded", b.Datapath, b.Guarded)
	}
	c.Close()
	r.flights(0)
	r.signal(unix.SIGUSR2)
	r.said("signal SIGUSR2")
	if got := r.heard(); !slices.Equal(got, []string{"SIGUSR2"}) || r.backend().Drain != nil {
		t.Fatalf("zero without a drain: CMD heard %v", got)
	}
	c = h.stuck("127.0.0.1:8001")
	r.signal(unix.SIGTERM)
	r.phase(drain.PhaseWait)
	if h.refused("127.0.0.1:8001") {
		t.Error("a connection was refused by a datapath that cannot")
	}
	alive(t, c)
	b = r.backend()
	if b.OnNew.Chosen != drain.OnNewAdmit || b.OnNew.Why == "" || !b.Drain.Unguarded {
		t.Errorf("got on_new %+v, unguarded %t; want admit, a reason, and the label", b.OnNew, b.Drain.Unguarded)
	}
	out, _, _ := h.ebb("explain", "web")
	if !strings.Contains(out, "unguarded") {
		t.Errorf("ebb explain does not say unguarded:\n%s", out)
	}
	if !strings.Contains(r.metrics(), `ebb_feature{feature="admission"} 0`) {
		t.Error("the metrics do not say that admission cannot close")
	}
	c.Close()
	if code := r.wait(); code != 0 {
		t.Errorf("got exit code %d, want 0", code)
	}
	d := r.drained()
	if d.Outcome != drain.OutcomeDrained || d.FlushReason != drain.FlushZero || !d.Unguarded {
		t.Errorf("got %s at %s, unguarded %t; want drained at zero, unguarded", d.Outcome, d.FlushReason, d.Unguarded)
	}
	if got := r.heard(); !slices.Equal(got, []string{"SIGUSR2", "SIGTERM"}) {
		t.Errorf("CMD heard %v, want SIGTERM once", got)
	}
}

// The probes of --ready are no clients: they are not counted, and they keep no drain from being quiet.
func TestC28_ReadinessProbesAreNotCounted(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	r := h.run("own", roomy("--ready", "http://127.0.0.1:8002/healthz", "--on-new", "refuse"), goServer(t, "127.0.0.1:8001", "-listen", "127.0.0.1:8002")...)
	eventually(t, "ready", func() bool { return r.status("/readyz") == http.StatusOK })
	for range 20 {
		if s := r.status("/readyz"); s != http.StatusOK {
			t.Fatalf("readiness is %d, want 200", s)
		}
	}
	k := h.kept(t, "127.0.0.1:8001")
	k.send("/")
	k.answer()
	if b := r.backend(); b.Counts.Accepted == nil || *b.Counts.Accepted != 1 {
		t.Errorf("%d connections are counted, want the client's alone", *b.Counts.Accepted)
	}
	k.Close()
	r.signal(unix.SIGTERM)
	if code := r.wait(); code != 0 {
		t.Errorf("got exit code %d, want 0", code)
	}

	// On the service's own port, with a balancer that asks without a pause while late connections are admitted.
	r = h.run("shared", []string{"--grace", "120s", "--quiet-period", "1s", "--admit-for", "60s", "--ready", "http://127.0.0.1:8001/healthz"}, goServer(t, "127.0.0.1:8001")...)
	eventually(t, "ready", func() bool { return r.status("/readyz") == http.StatusOK })
	client := r.client()
	stop := make(chan struct{})
	asked := make(chan int)
	go func() {
		n := 0
		for {
			select {
			case <-stop:
				asked <- n
				return
			default:
			}
			if resp, err := client.Get("http://ebb/readyz"); err == nil {
				resp.Body.Close()
				n++
			}
		}
	}()
	r.signal(unix.SIGTERM)
	if code := r.wait(); code != 0 {
		t.Errorf("got exit code %d, want 0", code)
	}
	close(stop)
	if n := <-asked; n == 0 {
		t.Error("readiness was never asked for")
	}
	d := r.drained()
	if flip := at(t, d, drain.PhaseSettle).Sub(d.Begun); d.Outcome != drain.OutcomeDrained || flip > 50*time.Second {
		t.Errorf("got %s, admission closed after %v; want it closed by a pause of 1s, whatever the probes did", d.Outcome, flip)
	}
}

// What is not covered is said: by status, by explain and in the report.
func TestG10_WhatIsNotCoveredIsSaid(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	sock := filepath.Join(t.TempDir(), "s")
	r := h.run("web", roomy(), app(t, "listen=0.0.0.0:8001", "listen=127.0.0.1:8002", "udp=127.0.0.1:5353", "unix="+sock)...)
	r.said("ready")
	want := []string{"127.0.0.1:8002", "127.0.0.1:5353", sock}
	check := func(where string, list []api.NotCovered) {
		t.Helper()
		for _, w := range want {
			if !slices.ContainsFunc(list, func(n api.NotCovered) bool { return strings.Contains(n.What, w) && n.Why != "" }) {
				t.Errorf("%s does not name %s: %v", where, w, list)
			}
		}
	}
	check("the API", r.backend().NotCovered)
	out, _, _ := h.ebb("explain", "web")
	for _, w := range want {
		if !strings.Contains(out, w) {
			t.Errorf("ebb explain does not name %s:\n%s", w, out)
		}
	}
	r.signal(unix.SIGTERM)
	if code := r.wait(); code != 0 {
		t.Errorf("got exit code %d, want 0", code)
	}
	// CMD has ended by now; what it had is known from before.
	check("the report", r.result().Backend.NotCovered)
}

// A connection that really speaks MPTCP cannot be destroyed: it is left, and the report says so.
func TestG10_MPTCPSurvivorsOfACutAreReported(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	r := h.run("web", []string{"--grace", "8s", "--flush-timeout", "500ms", "--reserve", "6s", "--quiet-period", "200ms", "--on-new", "refuse"},
		app(t, "deaf", "mptcp=127.0.0.1:8001", "exit=none")...)
	var c net.Conn
	h.ns.Do(t, func() {
		var d net.Dialer
		d.SetMultipathTCP(true)
		var err error
		if c, err = d.DialContext(t.Context(), "tcp", "127.0.0.1:8001"); err != nil {
			t.Error(err)
		}
	})
	if c == nil {
		return
	}
	defer c.Close()
	if is, err := c.(*net.TCPConn).MultipathTCP(); err != nil || !is {
		t.Skipf("this kernel speaks no MPTCP over loopback (%v)", err)
	}
	if _, err := c.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	r.flights(1)
	r.signal(unix.SIGTERM)
	if code := r.wait(); code != 0 {
		t.Errorf("got exit code %d, want 0", code)
	}
	d := r.drained()
	if d.Outcome != drain.OutcomeExpired || d.Cut == nil || d.Cut.Left != 1 || d.Cut.Destroyed != 0 || !strings.Contains(d.Cut.Note, "MPTCP") {
		t.Errorf("got %s with cut %+v, want 1 MPTCP connection left, and said", d.Outcome, d.Cut)
	}
}

// Under observe the application lives as it does without Ebb: the same signals at once, the same exit code, every
// connection untouched. What enforcing would have done is reported.
func TestG3_ObserveTouchesNothing(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	strace := installed(t, "strace")

	// Without: signals, output and exit code of the application alone.
	alone := func(t *testing.T) (string, int) {
		t.Helper()
		argv := app(t, "listen=127.0.0.1:8001", "exit=QUIT", "code=7")
		stdout := filepath.Join(t.TempDir(), "alone")
		f, err := os.Create(stdout)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		cmd := h.ns.Command(t, argv[0], argv[1:]...)
		cmd.Cmd.Stdout = f
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		scenario(t, h, func(sig unix.Signal) error { return cmd.Process.Signal(sig) }, func() string {
			b, err := os.ReadFile(stdout)
			if err != nil {
				t.Fatal(err)
			}
			return string(b)
		})
		_ = cmd.Wait() // its code is read from the state
		b, err := os.ReadFile(stdout)
		if err != nil {
			t.Fatal(err)
		}
		return string(b), cmd.Cmd.ProcessState.ExitCode()
	}
	want, wantCode := alone(t)

	trace := filepath.Join(t.TempDir(), "trace")
	r := h.startWith(func(c *exec.Cmd) {
		c.Path = strace
		c.Args = append([]string{"strace", "-f", "-qq", "-e", "trace=pidfd_getfd,shutdown", "-e", "signal=none", "-o", trace}, c.Args...)
	}, "web", []string{"--mode", "observe", "--grace", "60s", "--protocol", "http1", "--on-new", "refuse", "--notify", "signal:HUP", "--quiet-period", "300ms"},
		app(t, "listen=127.0.0.1:8001", "exit=QUIT", "code=7")...)
	r.await(agent.EventListener)
	owner := r.backend().Owner.PID
	scenario(t, h, func(sig unix.Signal) error { return unix.Kill(owner, sig) }, func() string { return strings.Join(r.lines(), "\n") + "\n" })
	code := r.wait()
	got := strings.Join(r.lines(), "\n") + "\n"
	// Ports of clients differ from run to run.
	if !slices.Equal(withoutPeers(got), withoutPeers(want)) || code != wantCode || wantCode != 7 {
		t.Errorf("with observe the application said\n%s\nand ended with %d; without Ebb\n%s\nand %d", got, code, want, wantCode)
	}
	if b, err := os.ReadFile(trace); err != nil || len(b) > 0 {
		t.Errorf("a connection was touched (%v):\n%s", err, b)
	}
	d := r.drained()
	if !d.WouldHave {
		t.Error("the report does not say that it only observed")
	}
	for _, what := range []string{"turn readiness off", "close admission", "tell the application that it drains"} {
		if !slices.ContainsFunc(d.Warnings, func(w string) bool { return strings.Contains(w, what) }) {
			t.Errorf("the report does not say that enforcing would %s: %q", what, d.Warnings)
		}
	}
	if n := len(r.all(drain.EventWould)); n < 3 {
		t.Errorf("%d events tell what enforcing would have done, want 3 at least", n)
	}
	out, _, _ := h.ebb("status", "-o", "json")
	var list api.BackendList
	if err := json.Unmarshal([]byte(out), &list); err == nil && len(list.Backends) > 0 {
		t.Errorf("the run is still listed after its end: %s", out)
	}
}

// scenario is what a client and a sender of signals do to the application: a stop signal that it does not end by, new and old
// connections after it, and one that ends it.
func scenario(t *testing.T, h *host, send func(unix.Signal) error, said func() string) {
	t.Helper()
	hear := func(line string) {
		t.Helper()
		eventually(t, "the application says "+line, func() bool { return strings.Contains(said(), line+"\n") })
	}
	hear("ready")
	c := h.stuck("127.0.0.1:8001")
	idle := h.stuck("127.0.0.1:8001")
	if err := send(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	hear("signal SIGTERM") // at once, though two connections are open
	alive(t, c)
	if h.refused("127.0.0.1:8001") {
		t.Error("a new connection was refused")
	}
	eventually(t, "the application sees it leave", func() bool { return strings.Contains(said(), "eof ") })
	if err := send(unix.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	hear("signal SIGUSR1")
	// Long enough for an idle connection to be retired, if anybody did that here.
	ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
	defer cancel()
	<-ctx.Done()
	alive(t, idle)
	alive(t, c)
	if err := send(unix.SIGQUIT); err != nil {
		t.Fatal(err)
	}
	ended(t, c)
	ended(t, idle)
}

func withoutPeers(s string) []string {
	var out []string
	for l := range strings.Lines(s) {
		if strings.HasPrefix(l, "eof ") {
			l = "eof"
		}
		out = append(out, strings.TrimSpace(l))
	}
	return out
}

// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/agent"
	"github.com/ebbproxy/ebb/internal/api"
)

// nobody is the user without any privilege.
const nobody = 65534

// unprivileged makes the binaries and a run directory that nobody can use, and returns what changes a command to
// be nobody's.
func (h *host) unprivileged(t *testing.T) (asNobody func(*exec.Cmd), application func(...string) []string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "e")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	copyTo := func(from, name string) string {
		t.Helper()
		in, err := os.Open(from)
		if err != nil {
			t.Fatal(err)
		}
		defer in.Close()
		to := filepath.Join(dir, name)
		out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY, 0o755)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(out, in); err != nil {
			t.Fatal(err)
		}
		if err := out.Close(); err != nil {
			t.Fatal(err)
		}
		return to
	}
	ebb, exe := copyTo(ebbBin, "ebb"), copyTo(app(t)[0], "app")
	h.runDir = filepath.Join(dir, "r")
	if err := os.Mkdir(h.runDir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(h.runDir, nobody, nobody); err != nil {
		t.Fatal(err)
	}
	h.env = append(h.env, "EBB_RUN_DIR="+h.runDir)
	return func(c *exec.Cmd) {
			c.Path = ebb
			c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
			for i, a := range c.Args {
				if a == "--report" {
					c.Args[i+1] = filepath.Join(h.runDir, "report")
				}
			}
		}, func(options ...string) []string {
			return append([]string{exe, appCommand}, options...)
		}
}

// Without any privilege it works all the same, with what is left, and says what is missing and what to do.
func TestWithoutPrivilegeItCountsAndSaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	asNobody, application := h.unprivileged(t)
	for _, datapath := range []string{"auto", "none"} {
		t.Run(datapath, func(t *testing.T) {
			h := h.as(t)
			r := h.startWith(asNobody, "web", []string{"--datapath", datapath, "--grace", "60s", "--quiet-period", "300ms"},
				application("listen=127.0.0.1:8001")...)
			r.report = filepath.Join(h.runDir, "report")
			r.await(agent.EventListener)
			h.stuck("127.0.0.1:8001").Close()
			c := h.stuck("127.0.0.1:8001")
			b := r.flights(1)
			if b.Guarded || b.Datapath != api.DatapathNone || *b.Counts.Open != 1 {
				t.Errorf("got datapath %s, guarded %t, open %d; want none, unguarded, 1", b.Datapath, b.Guarded, *b.Counts.Open)
			}
			if datapath == "auto" {
				said := r.await(agent.EventDegraded)
				if !strings.Contains(said.Message, "admission cannot close") || !strings.Contains(said.Message, "ebb check") {
					t.Errorf("the start says %q, want what is missing and where to look", said.Message)
				}
				if len(b.Warnings) == 0 {
					t.Error("status does not say that something is missing")
				}
			} else if n := len(r.all(agent.EventDegraded)); n > 0 {
				t.Errorf("what was asked for is called degraded %d times", n)
			}
			r.signal(unix.SIGTERM)
			r.phase(drain.PhaseWait)
			alive(t, c)
			c.Close()
			if code := r.wait(); code != 0 {
				t.Errorf("got exit code %d, want 0", code)
			}
			d := r.drained()
			if d.Outcome != drain.OutcomeDrained || d.FlushReason != drain.FlushZero || !d.Unguarded {
				t.Errorf("got %s at %s, unguarded %t; want drained at zero, unguarded", d.Outcome, d.FlushReason, d.Unguarded)
			}
			if s := r.stderr(); datapath == "none" && s != "" {
				t.Errorf("a clean drain wrote to the log:\n%s", s)
			}
		})
	}
	t.Run("cut", func(t *testing.T) {
		h := h.as(t)
		r := h.startWith(asNobody, "web", []string{"--grace", "8s", "--flush-timeout", "500ms", "--reserve", "6s", "--quiet-period", "200ms"},
			application("deaf", "listen=127.0.0.1:8001", "exit=none")...)
		r.report = filepath.Join(h.runDir, "report")
		r.await(agent.EventListener)
		c := h.connect("127.0.0.1:8001")
		if _, err := c.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		r.flights(1)
		r.signal(unix.SIGTERM)
		if code := r.wait(); code != 0 {
			t.Errorf("got exit code %d, want 0", code)
		}
		d := r.drained()
		if d.Outcome != drain.OutcomeExpired || d.Cut == nil || d.Cut.Left != 1 || d.Cut.Destroyed != 0 || !strings.Contains(d.Cut.Note, "CAP_NET_ADMIN") {
			t.Errorf("got %s with cut %+v, want 1 left that may not be destroyed, and said", d.Outcome, d.Cut)
		}
	})
	t.Run("bpf", func(t *testing.T) {
		h := h.as(t)
		r := h.startWith(asNobody, "web", []string{"--datapath", "bpf"}, application("listen=127.0.0.1:8001")...)
		if code := r.wait(); code != agent.ExitFailure || !strings.Contains(r.stderr(), "ebb check") {
			t.Errorf("got exit code %d, want %d and a hint\n%s", code, agent.ExitFailure, r.stderr())
		}
		if n := len(r.all(agent.EventRun)); n > 0 {
			t.Error("CMD was started")
		}
	})
	t.Run("check", func(t *testing.T) {
		h := h.as(t)
		features, code := h.check(t, asNobody)
		if code != 1 {
			t.Errorf("got exit code %d, want 1", code)
		}
		p := features["privilege"]
		if p.State != agent.FeatureMissing || !strings.Contains(p.Detail, "CAP_BPF") || !strings.Contains(p.Hint, "--datapath none") {
			t.Errorf("privilege is %+v, want it missing, named, and what to do", p)
		}
		for _, name := range []string{"sock_diag", "run directory"} {
			if f := features[name]; f.State != agent.FeatureOK {
				t.Errorf("%s is %+v, want it to work without privilege", name, f)
			}
		}
		if _, ok := features["kill switch"]; ok {
			t.Errorf("a kill switch that cannot be read is reported beside the missing privilege: %+v", features["kill switch"])
		}
	})
}

// A listener that the application closes at its notice keeps its connections in the count, without the kernel's help too.
func TestT7_ConnectionsOfAClosedListenerStillCountWithoutBPF(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	r := h.run("web", []string{"--grace", "60s", "--quiet-period", "300ms", "--datapath", "none", "--notify", "signal:TERM", "--protocol", "http1"},
		goServer(t, "127.0.0.1:8001", "-graceful")...)
	k := h.kept(t, "127.0.0.1:8001")
	k.send("/?ms=3000")
	r.flights(1)
	r.signal(unix.SIGTERM)
	r.said("signal SIGTERM")
	if got := k.answer(); got != "hello\n" {
		t.Errorf("got answer %q", got)
	}
	if n := len(r.all(drain.EventFlush)); n != 0 {
		t.Error("the flush did not wait for the answer")
	}
	if code := r.wait(); code != 0 {
		t.Errorf("got exit code %d, want 0", code)
	}
	if d := r.drained(); d.Outcome != drain.OutcomeDrained {
		t.Errorf("got outcome %s, want drained", d.Outcome)
	}
}

type feature struct{ Name, State, Detail, Hint string }

// check runs `ebb check` and returns what it says by name.
func (h *host) check(t *testing.T, prepare func(*exec.Cmd)) (map[string]feature, int) {
	t.Helper()
	cmd := h.ns.Command(t, ebbBin, "check", "-o", "json")
	cmd.Cmd.Env = h.env
	if prepare != nil {
		prepare(cmd.Cmd)
	}
	out, err := cmd.Output()
	if cmd.Cmd.ProcessState == nil {
		t.Fatalf("run ebb check: %v", err)
	}
	var doc struct{ Features []feature }
	if err := json.Unmarshal(out, &doc); err != nil {
		t.Fatalf("decode the answer of ebb check: %v\n%s", err, out)
	}
	m := map[string]feature{}
	for _, f := range doc.Features {
		m[f.Name] = f
		if f.State != agent.FeatureOK && (f.Detail == "" || strings.ContainsAny(f.Detail, "\n")) {
			t.Errorf("%s is %s and does not say why in a line: %q", f.Name, f.State, f.Detail)
		}
	}
	return m, cmd.Cmd.ProcessState.ExitCode()
}

// in makes the command run in a mount namespace of its own after a script has changed the mounts.
func in(script string) func(*exec.Cmd) {
	return func(c *exec.Cmd) {
		sh, err := exec.LookPath("sh")
		if err != nil {
			return // the run then fails, which the test sees
		}
		c.Args = append([]string{"sh", "-c", "mount --make-rprivate / && { " + script + "; } && exec \"$@\"", "sh"}, c.Args...)
		c.Path = sh
		c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS}
	}
}

// Each thing that a host can lack: check says it with a hint and the run goes on with less, or says plainly why it cannot.
func TestEachMissingThingIsSaid(t *testing.T) {
	t.Parallel()
	t.Run("healthy", func(t *testing.T) {
		h := newHost(t)
		before, err := os.ReadDir(filepath.Dir(h.bpffs))
		if err != nil {
			t.Fatal(err)
		}
		features, code := h.check(t, nil)
		for _, f := range features {
			if f.State == agent.FeatureMissing {
				t.Errorf("%+v is missing on a host that has everything", f)
			}
		}
		if code != 0 {
			t.Errorf("got exit code %d, want 0", code)
		}
		if left, err := os.ReadDir(filepath.Dir(h.bpffs)); err != nil || len(left) != len(before) {
			t.Errorf("ebb check left %v (%v)", left, err)
		}
	})
	t.Run("run directory", func(t *testing.T) {
		h := newHost(t)
		file := filepath.Join(t.TempDir(), "file")
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		h.env = append(h.env, "EBB_RUN_DIR="+filepath.Join(file, "r"))
		features, code := h.check(t, nil)
		if f := features["run directory"]; f.State != agent.FeatureMissing || !strings.Contains(f.Hint, "EBB_RUN_DIR") || code != 1 {
			t.Errorf("run directory is %+v, exit code %d; want it missing with a hint, and 1", f, code)
		}
		_, stderr, code := h.ebb("run", "--", "sh", "-c", "echo started >&2")
		if code != agent.ExitFailure || strings.Contains(stderr, "started") || !strings.Contains(stderr, file) {
			t.Errorf("ebb run: exit code %d, want %d, no start, and the path\n%s", code, agent.ExitFailure, stderr)
		}
		// One that others could write to is not trusted either.
		open := filepath.Join(t.TempDir(), "open")
		if err := os.Mkdir(open, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(open, 0o777); err != nil {
			t.Fatal(err)
		}
		h.env = append(h.env, "EBB_RUN_DIR="+open)
		if _, stderr, code = h.ebb("run", "--", "true"); code != agent.ExitFailure || !strings.Contains(stderr, "other users") {
			t.Errorf("ebb run: exit code %d, want %d and why\n%s", code, agent.ExitFailure, stderr)
		}
	})
	lacking := func(t *testing.T, h *host, prepare func(*exec.Cmd), name, what string) {
		t.Helper()
		features, code := h.check(t, prepare)
		if f := features[name]; f.State == agent.FeatureOK || f.State == "" || !strings.Contains(f.Detail, what) || f.Hint == "" {
			t.Errorf("%s is %+v, want it to lack something about %q, with a hint", name, f, what)
		} else if f.State == agent.FeatureMissing && code != 1 {
			t.Errorf("got exit code %d of ebb check, want 1", code)
		}
		r := h.startWith(prepare, "web", roomy(), app(t, "listen=127.0.0.1:8001")...)
		said := r.await(agent.EventDegraded)
		if !strings.Contains(said.Message, what) || !strings.Contains(said.Message, "ebb check") {
			t.Errorf("the start says %q, want something about %q and where to look", said.Message, what)
		}
		r.await(agent.EventListener)
		h.stuck("127.0.0.1:8001").Close()
		r.signal(unix.SIGTERM)
		if code := r.wait(); code != 0 {
			t.Errorf("got exit code %d, want 0", code)
		}
		if d := r.drained(); d.Outcome != drain.OutcomeDrained || !d.Unguarded {
			t.Errorf("got %s, unguarded %t; want drained, unguarded", d.Outcome, d.Unguarded)
		}
	}
	t.Run("no bpffs", func(t *testing.T) {
		h := newHost(t)
		plain := t.TempDir()
		h.env = append(h.env, "EBB_BPFFS="+filepath.Join(plain, "ebb"))
		// Where none can be mounted: every mount is refused to a process without CAP_SYS_ADMIN, so an ordinary directory stays one.
		lacking(t, h, nil, "BPF file system", plain)
		if left, err := os.ReadDir(plain); err != nil || len(left) > 0 {
			t.Errorf("%v was left in a directory that is no bpffs (%v)", left, err)
		}
	})
	t.Run("bpffs read-only", func(t *testing.T) {
		h := newHost(t)
		mount := filepath.Dir(h.bpffs)
		lacking(t, h, in("mount -o remount,bind,ro "+mount+" || { mount --bind "+mount+" "+mount+" && mount -o remount,bind,ro "+mount+"; }"), "pin directory", "read-only")
	})
	t.Run("pins of another version", func(t *testing.T) {
		h := newHost(t)
		if err := os.MkdirAll(filepath.Join(h.bpffs, "v999", "maps"), 0o700); err != nil {
			t.Fatal(err)
		}
		r := h.run("web", roomy("--on-new", "refuse"), app(t, "listen=127.0.0.1:8001")...)
		if b := r.flights(0); !b.Guarded {
			t.Errorf("another version's pins took the kernel datapath away: %v", b.Warnings)
		}
		r.signal(unix.SIGTERM)
		r.drainedAtZero()
		if _, err := os.Stat(filepath.Join(h.bpffs, "v999")); err != nil {
			t.Errorf("another version's pins were touched: %v", err)
		}
		_, stderr, code := h.ebb("cleanup")
		if _, err := os.Stat(h.bpffs); code != 0 || err == nil {
			t.Errorf("ebb cleanup: exit code %d, the pins are still there: %t\n%s", code, err == nil, stderr)
		}
	})
	t.Run("foreign file", func(t *testing.T) {
		h := newHost(t)
		foreign := filepath.Join(h.bpffs, "somebody")
		if err := os.MkdirAll(foreign, 0o700); err != nil {
			t.Fatal(err)
		}
		r := h.run("web", roomy("--on-new", "refuse"), app(t, "listen=127.0.0.1:8001")...)
		c := h.stuck("127.0.0.1:8001")
		if b := r.flights(1); !b.Guarded {
			t.Errorf("a directory of somebody else's took the kernel datapath away: %v", b.Warnings)
		}
		r.signal(unix.SIGTERM)
		r.phase(drain.PhaseWait)
		if !h.refused("127.0.0.1:8001") {
			t.Error("a new connection was taken after the flip")
		}
		c.Close()
		if code := r.wait(); code != 0 {
			t.Errorf("got exit code %d, want 0", code)
		}
		if _, err := os.Stat(foreign); err != nil {
			t.Errorf("what somebody else had pinned is gone: %v", err)
		}
		left, err := os.ReadDir(h.bpffs)
		if err != nil || len(left) != 1 {
			t.Errorf("got %v left in the pin directory (%v), want somebody's alone", left, err)
		}
	})
}

// The metrics of a run are what promtool takes, over its own address too, and no series is missing before the first drain.
func TestC50_MetricsOverTCPBeforeAndDuringADrain(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	promtool := installed(t, "promtool")
	r := h.run("web", []string{"--grace", "60s", "--quiet-period", "300ms", "--on-new", "refuse", "--metrics", "127.0.0.1:9402", "--service", "shop"},
		app(t, "listen=127.0.0.1:8001")...)
	c := h.stuck("127.0.0.1:8001")
	client := &http.Client{Transport: &http.Transport{DialContext: h.ns.DialContext, DisableKeepAlives: true}}
	get := func(path string) (string, int) {
		t.Helper()
		resp, err := client.Get("http://127.0.0.1:9402" + path)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return string(b), resp.StatusCode
	}
	has := func(text string, lines ...string) {
		t.Helper()
		all := strings.Split(text, "\n")
		for _, l := range lines {
			if !slices.Contains(all, l) {
				t.Errorf("no line %q among the metrics", l)
			}
		}
	}
	text, _ := get("/metrics")
	has(text, `ebb_connections_in_flight{backend="web",service="shop"} 1`, `ebb_counts_known{backend="web",service="shop"} 1`,
		`ebb_backend_state{backend="web",service="shop",state="serving"} 1`, `ebb_backend_state{backend="web",service="shop",state="draining"} 0`,
		`ebb_connections{backend="web",class="active",service="shop"} 1`, `ebb_connections{backend="web",class="stalled",service="shop"} 0`,
		`ebb_drains_total{cause="signal",outcome="drained",service="shop"} 0`, `ebb_drains_total{cause="signal",outcome="lost",service="shop"} 0`,
		`ebb_flushes_total{reason="zero",result="ok",service="shop"} 0`, `ebb_census_drift_total 0`, `ebb_stale_signals_total{service="shop"} 0`)
	check := exec.Command(promtool, "check", "metrics")
	check.Stdin = strings.NewReader(text)
	if out, err := check.CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("promtool check metrics: %v\n%s", err, out)
	}
	for path, want := range map[string]int{"/readyz": 200, "/livez": 200, "/readyz/web": 200, "/v1/backends": 404} {
		if _, got := get(path); got != want {
			t.Errorf("%s answers %d over TCP, want %d", path, got, want)
		}
	}
	r.signal(unix.SIGTERM)
	r.phase(drain.PhaseWait)
	text, _ = get("/metrics")
	has(text, `ebb_backend_state{backend="web",service="shop",state="draining"} 1`, `ebb_backend_state{backend="web",service="shop",state="serving"} 0`,
		`ebb_connections_in_flight{backend="web",service="shop"} 1`)
	for path, want := range map[string]int{"/readyz": 503, "/livez": 200} {
		if _, got := get(path); got != want {
			t.Errorf("%s answers %d during the drain, want %d", path, got, want)
		}
	}
	c.Close()
	if code := r.wait(); code != 0 {
		t.Errorf("got exit code %d, want 0", code)
	}
	// An address that is taken is Ebb's own failure, and CMD does not live on.
	l := h.ns.Listen(t, "tcp", "127.0.0.1:9403")
	defer l.Close()
	if _, ok := l.(*net.TCPListener); !ok {
		t.Fatalf("got a %T", l)
	}
	_, stderr, code := h.ebb("run", "--name", "taken", "--metrics", "127.0.0.1:9403", "--", "sleep", "600")
	if code != agent.ExitFailure || !strings.Contains(stderr, "127.0.0.1:9403") {
		t.Errorf("got exit code %d, want %d and the address\n%s", code, agent.ExitFailure, stderr)
	}
}

// After the end there is a report, a journal that tells of the drain, and no socket; and no pin.
func TestWhatIsLeftAfterTheEnd(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	r := h.run("web", roomy("--on-new", "refuse", "--service", "shop"), app(t, "listen=127.0.0.1:8001", "code=3")...)
	c := h.stuck("127.0.0.1:8001")
	sock := api.RunSocket(h.runDir, "web")
	if fi, err := os.Stat(sock); err != nil || fi.Mode().Perm() != 0o660 {
		t.Errorf("the socket has mode %v (%v), want 0660", fi.Mode(), err)
	}
	// A second run of the name does not start while this one lives.
	if _, stderr, code := h.ebb("run", "--name", "web", "--", "true"); code != agent.ExitFailure || !strings.Contains(stderr, "--name") {
		t.Errorf("a second run of the name: exit code %d, want %d and what to do\n%s", code, agent.ExitFailure, stderr)
	}
	if _, _, code := h.ebb("drain", "web", "--reason", "kernel update"); code != 0 {
		t.Errorf("ebb drain: exit code %d", code)
	}
	c.Close()
	if code := r.wait(); code != 0 {
		t.Errorf("got exit code %d, want 0: the stop was asked for", code)
	}
	rep := r.result()
	d := rep.Backend.Drain
	if rep.Name != "web" || rep.Service != "shop" || rep.Code != 0 || rep.Exit != "exit status 3" || d == nil {
		t.Fatalf("got report %+v", rep)
	}
	if d.Cause != drain.CauseOperator || d.Reason != "kernel update" || !strings.Contains(d.By, "root") && !strings.Contains(d.By, "0") || d.Ended == nil {
		t.Errorf("the report tells of a drain by %q, cause %s, reason %q", d.By, d.Cause, d.Reason)
	}
	if _, err := os.Lstat(sock); !os.IsNotExist(err) {
		t.Errorf("the socket is left: %v", err)
	}
	if _, err := os.Lstat(h.bpffs); !os.IsNotExist(err) {
		t.Errorf("pins are left: %v", err)
	}
	journal, err := os.ReadFile(filepath.Join(h.runDir, "run", "web.journal"))
	if err != nil {
		t.Fatal(err)
	}
	types := []string{}
	for l := range strings.Lines(string(journal)) {
		var rec struct{ Type, Drain string }
		_, body, _ := strings.Cut(l, " ") // after the checksum
		if err := json.Unmarshal([]byte(body), &rec); err != nil {
			t.Errorf("the journal has a line %q: %v", l, err)
		}
		types = append(types, rec.Type)
	}
	if !slices.Equal(types, []string{"run", "begin", "flush", "end"}) {
		t.Errorf("the journal tells of %v, want run, begin, flush, end", types)
	}
	// The report is written whole or not at all: no temporary file is beside it.
	if files, err := filepath.Glob(filepath.Join(filepath.Dir(r.report), ".*")); err != nil || len(files) > 0 {
		t.Errorf("%v is left beside the report (%v)", files, err)
	}
	if out, stderr, code := h.ebb("status"); code != 0 || strings.Contains(out, "web") {
		t.Errorf("ebb status: exit code %d\n%s%s", code, out, stderr)
	}
}

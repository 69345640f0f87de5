// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/agent"
)

// The codes of the contract: CMD's own when it ends by itself, 0 after a requested stop, 125 to 127 for what is Ebb's.
func TestExitCodesOfTheContract(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	notExecutable := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(notExecutable, []byte("no program\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		args []string
		code int
		say  string
	}{
		{"own code", []string{"--", "sh", "-c", "exit 7"}, 7, ""},
		{"well", []string{"--", "true"}, 0, ""},
		{"killed", []string{"--", "sh", "-c", "kill -KILL $$"}, 137, ""},
		{"signal", []string{"--", "sh", "-c", "kill -SEGV $$"}, 139, ""},
		{"not found", []string{"--", "ebb-no-such-command"}, 127, "not found"},
		{"no such path", []string{"--", "/nonexistent/command"}, 127, "not found"},
		{"not executable", []string{"--", notExecutable}, 126, "not executable"},
		{"directory", []string{"--", os.TempDir()}, 126, "not executable"},
		{"no command", nil, 125, "no command"},
		{"unknown flag", []string{"--grave", "10s", "--", "true"}, 125, "--grace"},
		{"unknown word", []string{"--mode", "force", "--", "true"}, 125, "observe"},
		{"unknown hook", []string{"--notify", "mail:root", "--", "true"}, 125, "signal:NAME"},
		{"own failure", []string{"--api", "/nonexistent/dir/x.sock", "--", "sleep", "60"}, 125, "/nonexistent/dir"},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := h.as(t)
			_, stderr, code := h.ebb(append([]string{"run", "--name", "codes"}, c.args...)...)
			if code != c.code || !strings.Contains(stderr, c.say) {
				t.Errorf("got exit code %d, want %d with %q on stderr:\n%s", code, c.code, c.say, stderr)
			}
			if c.code >= 125 && c.code <= 127 && !strings.Contains(stderr, "ebb: ") {
				t.Errorf("stderr does not say ebb: …:\n%s", stderr)
			}
		})
	}
	// Whatever went wrong, nothing is left.
	eventually(t, "no process of a failed start is left", func() bool {
		out, _ := exec.Command("pgrep", "-f", "^sleep 60$").Output()
		for pid := range strings.FieldsSeq(string(out)) {
			if env, err := os.ReadFile("/proc/" + pid + "/environ"); err == nil && strings.Contains(string(env), "EBB_RUN_DIR="+h.runDir) {
				return false
			}
		}
		return true
	})
}

// --exit-on-outcome makes the outcome the code; without it a requested stop is 0.
func TestR9_ExitOnOutcome(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	flags := []string{"--exit-on-outcome", "--grace", "3s", "--flush-timeout", "1s", "--reserve", "1s", "--quiet-period", "200ms", "--on-new", "refuse"}
	t.Run("expired", func(t *testing.T) {
		h := h.as(t)
		r := h.run("expired", flags, app(t, "listen=127.0.0.1:8001")...)
		h.stuck("127.0.0.1:8001")
		r.signal(unix.SIGTERM)
		if code := r.wait(); code != agent.ExitExpired {
			t.Errorf("got exit code %d, want %d", code, agent.ExitExpired)
		}
	})
	t.Run("drained", func(t *testing.T) {
		h := h.as(t)
		r := h.run("drained", append(slices.Clone(flags), "--grace", "60s"), app(t, "listen=127.0.0.1:8002", "code=9")...)
		r.signal(unix.SIGTERM)
		if code := r.wait(); code != 0 {
			t.Errorf("got exit code %d, want 0", code)
		}
	})
	t.Run("lost", func(t *testing.T) {
		h := h.as(t)
		r := h.run("lost", append(slices.Clone(flags), "--grace", "60s"), app(t, "listen=127.0.0.1:8003")...)
		h.stuck("127.0.0.1:8003")
		r.signal(unix.SIGTERM)
		r.phase(drain.PhaseWait)
		if err := unix.Kill(r.child(), unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		if code := r.wait(); code != agent.ExitLost {
			t.Errorf("got exit code %d, want %d", code, agent.ExitLost)
		}
	})
}

// A drain and a crash do not look alike: outcome, log and metrics.
func TestR9_ADrainIsNoErrorAndACrashIsOne(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	t.Run("drain", func(t *testing.T) {
		h := h.as(t)
		r := h.run("clean", roomy("--on-new", "refuse"), app(t, "listen=127.0.0.1:8001")...)
		c := h.stuck("127.0.0.1:8001")
		r.signal(unix.SIGTERM)
		r.phase(drain.PhaseWait)
		c.Close()
		if code := r.wait(); code != 0 {
			t.Errorf("got exit code %d, want 0", code)
		}
		d := r.drained()
		if d.Outcome != drain.OutcomeDrained || d.FlushReason != drain.FlushZero || len(d.Survivors) > 0 || len(d.Warnings) > 0 || d.Cut != nil {
			t.Errorf("got %+v, want drained at zero and nothing to say about it", d)
		}
		if lines := r.complaints(); len(lines) > 0 {
			t.Errorf("a clean drain wrote to the log:\n%s", strings.Join(lines, "\n"))
		}
	})
	t.Run("crash while serving", func(t *testing.T) {
		h := h.as(t)
		r := h.run("crash", roomy(), app(t, "listen=127.0.0.1:8002")...)
		h.stuck("127.0.0.1:8002")
		if err := unix.Kill(r.child(), unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		if code := r.wait(); code != 137 {
			t.Errorf("got exit code %d, want 137", code)
		}
		rep := r.result()
		if rep.Backend.State != drain.StateLost || rep.Backend.Drain != nil || !strings.Contains(rep.Exit, "SIGKILL") {
			t.Errorf("got state %s, exit %q, drain %v; want lost, killed, none", rep.Backend.State, rep.Exit, rep.Backend.Drain)
		}
		if !r.logged("ERROR", "SIGKILL") {
			t.Errorf("the log does not call the crash an error:\n%s", r.stderr())
		}
	})
	t.Run("crash while draining", func(t *testing.T) {
		h := h.as(t)
		r := h.run("lost", roomy("--on-new", "refuse"), app(t, "listen=127.0.0.1:8003")...)
		h.stuck("127.0.0.1:8003")
		r.signal(unix.SIGTERM)
		r.phase(drain.PhaseWait)
		if err := unix.Kill(r.child(), unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		end := r.await(drain.EventEnd)
		if end.Outcome != drain.OutcomeLost {
			t.Errorf("got outcome %s, want lost", end.Outcome)
		}
		r.wait()
		if !r.logged("ERROR", "lost") {
			t.Errorf("the log does not call the loss an error:\n%s", r.stderr())
		}
		if n := len(r.all(drain.EventFlush)); n != 0 {
			t.Errorf("a dead application was flushed %d times", n)
		}
	})
}

// A stop signal in each step of a start ends it with code 0, and nothing is left running.
func TestR11_AStopDuringTheStartEndsIt(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	exists := func(path string) func() bool {
		return func() bool { _, err := os.Stat(path); return err == nil }
	}
	for _, step := range []struct {
		name string
		path string // what that step of the start makes
	}{
		{"lock", filepath.Join(h.runDir, "run", "lock.lock")},
		{"journal", filepath.Join(h.runDir, "run", "journal.journal")},
		{"maps", filepath.Join(h.bpffs, "v1", "maps")},
		{"links", filepath.Join(h.bpffs, "v1", "links")},
		{"socket", filepath.Join(h.runDir, "run", "socket.sock")},
	} {
		t.Run(step.name, func(t *testing.T) {
			h := h.as(t)
			r := h.start(step.name, roomy("--on-new", "refuse"), app(t, "listen=127.0.0.1:8001")...)
			for !exists(step.path)() {
				select {
				case <-r.done:
					t.Fatalf("the run ended before %s was made", step.path)
				default:
				}
			}
			r.signal(unix.SIGTERM)
			if code := r.wait(); code != 0 {
				t.Errorf("got exit code %d, want 0", code)
			}
			// That CMD was started at all is not promised; that it does not live on is.
			for _, e := range r.all(agent.EventRun) {
				if pid, ok := e.Fields["pid"].(float64); ok && living(int(pid)) {
					t.Error("CMD still lives")
				}
			}
			for _, path := range []string{h.bpffs, filepath.Join(h.runDir, "run", step.name+".sock")} {
				if exists(path)() {
					t.Errorf("%s is left", path)
				}
			}
		})
	}
	t.Run("no listener yet", func(t *testing.T) {
		h := h.as(t)
		r := h.start("deaf", roomy(), app(t)...)
		r.said("ready")
		r.signal(unix.SIGTERM)
		if code := r.wait(); code != 0 {
			t.Errorf("got exit code %d, want 0", code)
		}
		if d := r.drained(); d.Outcome != drain.OutcomeDrained || d.FlushReason != drain.FlushZero {
			t.Errorf("got %s at %s, want drained at zero", d.Outcome, d.FlushReason)
		}
		if got := r.heard(); !slices.Equal(got, []string{"SIGTERM"}) {
			t.Errorf("CMD heard %v, want SIGTERM once", got)
		}
	})
	t.Run("just listening", func(t *testing.T) {
		h := h.as(t)
		r := h.start("fresh", roomy("--on-new", "refuse"), app(t, "listen=127.0.0.1:8002")...)
		r.said("listening 127.0.0.1:8002")
		r.signal(unix.SIGTERM)
		r.phase(drain.PhaseSettle)
		if !h.refused("127.0.0.1:8002") && r.count("signal SIGTERM") == 0 {
			t.Error("a connection was taken after the flip")
		}
		if code := r.wait(); code != 0 {
			t.Errorf("got exit code %d, want 0", code)
		}
	})
	t.Run("listens while draining", func(t *testing.T) {
		h := h.as(t)
		// The stop comes first, the listener after it: it must be closed to new connections as well.
		r := h.start("late", []string{"--grace", "30s", "--on-new", "refuse", "--quiet-period", "300ms"}, app(t, "listen=127.0.0.1:8003", "usr2=127.0.0.1:8004")...)
		r.await(agent.EventListener)
		c := h.stuck("127.0.0.1:8003")
		r.signal(unix.SIGTERM)
		r.phase(drain.PhaseWait)
		r.signal(unix.SIGUSR2)
		r.said("listening 127.0.0.1:8004")
		eventually(t, "a listener opened during the drain is closed to new connections", func() bool { return h.refused("127.0.0.1:8004") })
		c.Close()
		if code := r.wait(); code != 0 {
			t.Errorf("got exit code %d, want 0", code)
		}
	})
}

// The first stop signal drains, the second only says what is left, the third ends it by force.
func TestR20_ThreeStopSignals(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	r := h.run("thrice", []string{"--grace", "10m", "--on-new", "refuse"}, app(t, "listen=127.0.0.1:8001")...)
	h.stuck("127.0.0.1:8001")
	r.signal(unix.SIGTERM)
	r.phase(drain.PhaseWait)
	r.signal(unix.SIGTERM)
	said := r.find("what is left", func(e drain.Event) bool {
		return e.Type == agent.EventSignal && strings.Contains(e.Message, "already draining")
	})
	if !strings.Contains(said.Message, "1 active") {
		t.Errorf("the second signal says %q, want what is left: 1 active", said.Message)
	}
	if !living(r.child()) || r.backend().State != drain.StateDraining {
		t.Fatal("the second stop signal changed the drain")
	}
	r.signal(unix.SIGTERM)
	if code := r.wait(); code != 0 {
		t.Errorf("got exit code %d, want 0", code)
	}
	if living(r.child()) {
		t.Error("CMD lives on after the third stop signal")
	}
	if d := r.drained(); d.Outcome == drain.OutcomeDrained {
		t.Errorf("got outcome %s of a forced end with one connection open", d.Outcome)
	}
	if got := r.heard(); len(got) > 0 {
		t.Errorf("CMD heard %v before its turn", got)
	}
}

// Two stop signals do what one does.
func TestC16_TheSecondStopSignalIsHarmless(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	r := h.run("twice", []string{"--grace", "60s", "--on-new", "refuse", "--quiet-period", "300ms"}, app(t, "listen=127.0.0.1:8001")...)
	c := h.stuck("127.0.0.1:8001")
	r.signal(unix.SIGTERM)
	r.phase(drain.PhaseWait)
	deadline := r.backend().Drain.Deadline
	r.signal(unix.SIGTERM)
	r.find("what is left", func(e drain.Event) bool {
		return e.Type == agent.EventSignal && strings.Contains(e.Message, "already draining")
	})
	alive(t, c)
	c.Close()
	if code := r.wait(); code != 0 {
		t.Errorf("got exit code %d, want 0", code)
	}
	if d := r.drained(); d.Outcome != drain.OutcomeDrained || !d.Deadline.Equal(deadline) {
		t.Errorf("got %s with deadline %v, want drained with %v", d.Outcome, d.Deadline, deadline)
	}
	if got := r.heard(); !slices.Equal(got, []string{"SIGTERM"}) {
		t.Errorf("CMD heard %v, want SIGTERM once", got)
	}
}

// Each stop signal begins a drain, and CMD gets its own one after zero; whatever is no stop signal is CMD's at once.
func TestT2_StopSignalsDrainAndOthersAreForwarded(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	for _, stop := range []unix.Signal{unix.SIGTERM, unix.SIGINT, unix.SIGQUIT} {
		t.Run(unix.SignalName(stop), func(t *testing.T) {
			h := h.as(t)
			r := h.run("stop", []string{"--grace", "60s", "--on-new", "refuse", "--quiet-period", "300ms", "--flush", "signal:USR1"},
				app(t, "listen=127.0.0.1:8001", "exit=USR1")...)
			c := h.stuck("127.0.0.1:8001")
			r.signal(unix.SIGHUP)
			r.said("signal SIGHUP")
			r.signal(unix.SIGUSR2)
			r.said("signal SIGUSR2")
			r.signal(unix.SIGWINCH)
			r.said("signal SIGWINCH")
			r.signal(stop)
			r.phase(drain.PhaseWait)
			r.signal(unix.SIGHUP) // forwarded during the drain too
			eventually(t, "a second SIGHUP", func() bool { return r.count("signal SIGHUP") == 2 })
			c.Close()
			if code := r.wait(); code != 0 {
				t.Errorf("got exit code %d, want 0", code)
			}
			want := []string{"SIGHUP", "SIGUSR2", "SIGWINCH", "SIGHUP", "SIGUSR1"}
			if got := r.heard(); !slices.Equal(got, want) {
				t.Errorf("CMD heard %v, want %v", got, want)
			}
			if d := r.drained(); d.By != unix.SignalName(stop) || d.Cause != drain.CauseSignal {
				t.Errorf("got a drain by %q, cause %q; want %s, signal", d.By, d.Cause, unix.SignalName(stop))
			}
		})
	}
	t.Run("configured", func(t *testing.T) {
		h := h.as(t)
		r := h.run("stop", []string{"--grace", "60s", "--quiet-period", "300ms", "--stop-signal", "USR1"}, app(t, "listen=127.0.0.1:8001", "exit=TERM")...)
		r.signal(unix.SIGINT)
		r.said("signal SIGINT")
		r.signal(unix.SIGUSR1)
		if code := r.wait(); code != 0 {
			t.Errorf("got exit code %d, want 0", code)
		}
		if got := r.heard(); !slices.Equal(got, []string{"SIGINT", "SIGTERM"}) {
			t.Errorf("CMD heard %v, want SIGINT at once and SIGTERM at zero", got)
		}
	})
}

// asInit makes the run process 1 of a pid namespace with a /proc of its own.
func asInit(cmd *exec.Cmd) {
	sh, err := exec.LookPath("sh")
	if err != nil {
		return // the run then fails, which the test sees
	}
	cmd.Args = append([]string{"sh", "-c", `mount --make-rprivate / && mount -t proc proc /proc && exec "$@"`, "sh"}, cmd.Args...)
	cmd.Path = sh
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS}
}

// As process 1 it counts, takes the STOPSIGNALs of images, reaps what it inherits and forwards the rest.
func TestT2_AsProcess1OfAPidNamespace(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	for _, stop := range []unix.Signal{unix.SIGTERM, unix.SIGQUIT, unix.SIGUSR1, unix.SIGWINCH} {
		t.Run(unix.SignalName(stop), func(t *testing.T) {
			h := h.as(t)
			r := h.startWith(asInit, "init", []string{"--grace", "60s", "--on-new", "refuse", "--quiet-period", "300ms"},
				app(t, "listen=127.0.0.1:8001")...)
			r.await(agent.EventListener)
			if pid := r.child(); pid > 100 {
				t.Errorf("CMD is process %d: the run is not process 1 of a namespace", pid)
			}
			c := h.stuck("127.0.0.1:8001")
			if b := r.backend(); !b.CountsKnown || *b.InFlight != 1 || !b.Guarded {
				t.Errorf("got in flight %v (known %t, guarded %t), want 1", b.InFlight, b.CountsKnown, b.Guarded)
			}
			r.signal(unix.SIGHUP)
			r.said("signal SIGHUP")
			r.signal(stop)
			r.phase(drain.PhaseWait)
			if got := r.heard(); !slices.Equal(got, []string{"SIGHUP"}) {
				t.Errorf("CMD heard %v while a connection was open, want SIGHUP alone", got)
			}
			c.Close()
			if code := r.wait(); code != 0 {
				t.Errorf("got exit code %d, want 0", code)
			}
			if got := r.heard(); !slices.Equal(got, []string{"SIGHUP", "SIGTERM"}) {
				t.Errorf("CMD heard %v, want SIGHUP and SIGTERM at zero", got)
			}
		})
	}
}

// children counts the children of a process, zombies among them.
func children(pid int) (all, zombies int) {
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return 0, 0
	}
	for _, path := range stats {
		b, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		_, rest, ok := strings.Cut(string(b), ") ")
		f := strings.Fields(rest)
		if !ok || len(f) < 2 || f[1] != strconv.Itoa(pid) {
			continue
		}
		all++
		if f[0] == "Z" {
			zombies++
		}
	}
	return all, zombies
}

// What CMD leaves behind is reaped, by the supervisor and by process 1 alike.
func TestT2_OrphansAreReaped(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	for name, prepare := range map[string]func(*exec.Cmd){"subreaper": nil, "process 1": asInit} {
		t.Run(name, func(t *testing.T) {
			h := h.as(t)
			// Twenty orphans end by themselves; the exec'ed application never waits for anybody.
			script := `i=0; while [ $i -lt 20 ]; do (sleep 0.2 &) ; i=$((i+1)); done; exec "$@"`
			r := h.startWith(prepare, "reap", roomy(), append([]string{"sh", "-c", script, "sh"}, app(t, "listen=127.0.0.1:8001")...)...)
			r.await(agent.EventListener)
			eventually(t, "the orphans are gone, CMD alone is left", func() bool {
				all, _ := children(r.pid())
				return all == 1
			})
			if _, z := children(r.pid()); z > 0 {
				t.Errorf("%d zombies are left", z)
			}
			r.signal(unix.SIGTERM)
			if code := r.wait(); code != 0 {
				t.Errorf("got exit code %d, want 0", code)
			}
		})
	}
}

// Standard input reaches CMD as it is, and its end too.
func TestT2_StandardInputIsPassedThrough(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	in, out, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	r := h.startWith(func(c *exec.Cmd) { c.Stdin = in }, "stdin", roomy(), app(t, "listen=127.0.0.1:8001", "read=stdin")...)
	in.Close()
	if _, err := io.WriteString(out, "first line\nsecond\n"); err != nil {
		t.Fatal(err)
	}
	r.said("stdin first line")
	r.said("stdin second")
	out.Close()
	r.said("eof")
	r.signal(unix.SIGTERM)
	if code := r.wait(); code != 0 {
		t.Errorf("got exit code %d, want 0", code)
	}
}

// The shell is CMD's main process and the server its child: the server is found, counted and drained, and does not
// outlive its supervisor, whatever the shell does with the signal.
func TestT12_AServerBehindAShell(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	r := h.run("shell", []string{"--grace", "60s", "--on-new", "refuse", "--quiet-period", "300ms"},
		append([]string{"sh", "-c", `"$@" & echo "child $!"; wait`, "sh"}, app(t, "listen=127.0.0.1:8001")...)...)
	c := h.stuck("127.0.0.1:8001")
	r.signal(unix.SIGTERM)
	r.phase(drain.PhaseWait)
	alive(t, c)
	if got := r.heard(); len(got) > 0 {
		t.Errorf("the server heard %v with a connection open", got)
	}
	var server int
	for _, l := range r.lines() {
		fmt.Sscanf(l, "child %d", &server)
	}
	c.Close()
	if code := r.wait(); code != 0 {
		t.Errorf("got exit code %d, want 0", code)
	}
	if server == 0 || living(server) {
		t.Errorf("the server, process %d, lives on without its supervisor", server)
	}
	if d := r.drained(); d.Outcome != drain.OutcomeDrained {
		t.Errorf("got outcome %s, want drained", d.Outcome)
	}
	if got := r.heard(); !slices.Equal(got, []string{"SIGTERM"}) {
		t.Errorf("the server heard %v, want SIGTERM once", got)
	}
}

// Children that ignore SIGTERM and have left the process group are killed when CMD has ended.
func TestT12_NothingOutlivesTheRun(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	setsid := installed(t, "setsid")
	r := h.run("family", roomy(), append([]string{"sh", "-c", setsid + ` sh -c 'trap "" TERM; echo "child $$"; while :; do sleep 0.1; done' & exec "$@"`, "sh"}, app(t, "listen=127.0.0.1:8001")...)...)
	child := 0
	eventually(t, "the child says its pid", func() bool {
		for _, l := range r.lines() {
			fmt.Sscanf(l, "child %d", &child)
		}
		return child != 0
	})
	r.signal(unix.SIGTERM)
	if code := r.wait(); code != 0 {
		t.Errorf("got exit code %d, want 0", code)
	}
	if living(child) {
		t.Errorf("process %d, which ignores SIGTERM in a session of its own, outlives the run", child)
	}
}

// A CMD that ignores its stop signal hears it once, and is killed with its group inside reserve.
func TestT12_ACommandThatIgnoresItsStopIsKilled(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	r := h.run("stubborn", []string{"--grace", "8s", "--flush-timeout", "1s", "--reserve", "1s", "--quiet-period", "200ms", "--on-new", "refuse"},
		append([]string{"sh", "-c", `sleep 600 & echo "child $!"; exec "$@"`, "sh"}, app(t, "listen=127.0.0.1:8001", "exit=none")...)...)
	child := 0
	for _, l := range r.lines() {
		fmt.Sscanf(l, "child %d", &child)
	}
	cmd := r.child()
	r.signal(unix.SIGTERM)
	if code := r.wait(); code != 0 {
		t.Errorf("got exit code %d, want 0", code)
	}
	if living(cmd) || child == 0 || living(child) {
		t.Errorf("CMD (%d) or its child (%d) lives on", cmd, child)
	}
	if got := r.heard(); !slices.Equal(got, []string{"SIGTERM"}) {
		t.Errorf("CMD heard %v, want SIGTERM once", got)
	}
	rep := r.result()
	d := rep.Backend.Drain
	if d == nil || d.FlushResult != drain.FlushTimeout || !strings.Contains(rep.Exit, "SIGKILL") {
		t.Fatalf("got exit %q and drain %+v, want a timeout of the flush and SIGKILL", rep.Exit, d)
	}
	// The count was zero: nothing was lost, so this is a drain all the same.
	if d.Outcome != drain.OutcomeDrained || d.FlushReason != drain.FlushZero {
		t.Errorf("got %s at %s, want drained at zero", d.Outcome, d.FlushReason)
	}
	if d.Ended.Before(d.Deadline.Add(-time.Second)) {
		t.Errorf("CMD was killed %v before the deadline, not inside reserve", d.Deadline.Sub(*d.Ended))
	}
	if !r.logged("ERROR", "killed") {
		t.Errorf("the log does not say that CMD was killed:\n%s", r.stderr())
	}
}

// Listeners that come later, on other ports, are covered too; --listen and --exclude-port say which are the service.
func TestListenersAreFoundAndChosen(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	addresses := func(r *supervised) (covered, others []string) {
		for _, l := range r.backend().Listeners {
			if l.Covered {
				covered = append(covered, l.Address)
			} else {
				others = append(others, l.Address+" "+l.Why)
			}
		}
		return covered, others
	}
	end := func(t *testing.T, r *supervised) {
		t.Helper()
		r.signal(unix.SIGTERM)
		if code := r.wait(); code != 0 {
			t.Errorf("got exit code %d, want 0", code)
		}
	}
	t.Run("later", func(t *testing.T) {
		h := h.as(t)
		r := h.run("later", roomy("--on-new", "refuse"), app(t, "listen=127.0.0.1:8001", "usr2=127.0.0.1:8002")...)
		r.signal(unix.SIGUSR2)
		r.find("the second listener", func(e drain.Event) bool {
			return e.Type == agent.EventListener && e.Fields["address"] == "127.0.0.1:8002"
		})
		if got, _ := addresses(r); !slices.Equal(got, []string{"127.0.0.1:8001", "127.0.0.1:8002"}) {
			t.Errorf("got %v covered, want both", got)
		}
		c := h.stuck("127.0.0.1:8002")
		r.signal(unix.SIGTERM)
		r.phase(drain.PhaseWait)
		if !h.refused("127.0.0.1:8001") || !h.refused("127.0.0.1:8002") {
			t.Error("a new connection was taken after the flip")
		}
		alive(t, c)
		c.Close()
		if code := r.wait(); code != 0 {
			t.Errorf("got exit code %d, want 0", code)
		}
	})
	t.Run("--listen", func(t *testing.T) {
		h := h.as(t)
		r := h.run("only", roomy("--listen", "127.0.0.1:8002"), app(t, "listen=127.0.0.1:8001", "listen=127.0.0.1:8002")...)
		covered, others := addresses(r)
		if !slices.Equal(covered, []string{"127.0.0.1:8002"}) || !slices.Equal(others, []string{"127.0.0.1:8001 not named by --listen"}) {
			t.Errorf("got %q covered and %q not", covered, others)
		}
		h.stuck("127.0.0.1:8001") // does not hold the drain up
		end(t, r)
		if d := r.drained(); d.Outcome != drain.OutcomeDrained {
			t.Errorf("got outcome %s, want drained: the other listener is not the service", d.Outcome)
		}
	})
	t.Run("--exclude-port", func(t *testing.T) {
		h := h.as(t)
		r := h.run("but", roomy("--exclude-port", "8001", "--on-new", "refuse"), app(t, "listen=127.0.0.1:8001", "listen=127.0.0.1:8002")...)
		covered, others := addresses(r)
		if !slices.Equal(covered, []string{"127.0.0.1:8002"}) || !slices.Equal(others, []string{"127.0.0.1:8001 excluded by --exclude-port"}) {
			t.Errorf("got %q covered and %q not", covered, others)
		}
		c := h.stuck("127.0.0.1:8002")
		r.signal(unix.SIGTERM)
		r.phase(drain.PhaseWait)
		if h.refused("127.0.0.1:8001") {
			t.Error("a connection to the excluded port was refused")
		}
		c.Close()
		if code := r.wait(); code != 0 {
			t.Errorf("got exit code %d, want 0", code)
		}
	})
	t.Run("loopback aside", func(t *testing.T) {
		h := h.as(t)
		r := h.run("aside", roomy(), app(t, "listen=0.0.0.0:8001", "listen=127.0.0.1:8002")...)
		covered, others := addresses(r)
		if !slices.Equal(covered, []string{"[::]:8001"}) || !slices.Equal(others, []string{"127.0.0.1:8002 loopback, and there are others"}) {
			t.Errorf("got %q covered and %q not", covered, others)
		}
		end(t, r)
	})
}

// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/agent"
)

// drainAndBack begins a drain over the command line and takes it back.
func drainAndBack(t *testing.T, h *host, name string) {
	t.Helper()
	for _, cmd := range []string{"drain", "undrain"} {
		if _, stderr, code := h.ebb(cmd, name); code != 0 {
			t.Fatalf("ebb %s: exit code %d: %s", cmd, code, stderr)
		}
	}
}

// A command that ends by itself after a drain was taken back ends the run, with its own code.
func TestD14_CommandThatEndsAfterAnUndrain(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	r := h.run("back", nil, goServer(t, "127.0.0.1:8001")...)
	drainAndBack(t, h, "back")
	if err := syscall.Kill(r.child(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if code := r.wait(); code != 128+9 {
		t.Errorf("exit code %d, want 137", code)
	}
}

// A stop signal after a drain was taken back is the first of a new drain.
func TestD14_StopAfterAnUndrain(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	r := h.run("again", nil, goServer(t, "127.0.0.1:8001")...)
	r.signal(syscall.SIGTERM)
	first := r.await(drain.EventBegin)
	if _, stderr, code := h.ebb("undrain", "again"); code != 0 {
		t.Fatalf("undrain: %d: %s", code, stderr)
	}
	r.find("the end of the first drain", func(e drain.Event) bool { return e.Type == drain.EventEnd && e.Drain == first.Drain })
	time.Sleep(200 * time.Millisecond) // a second one within 100 ms is taken for the same stop
	r.signal(syscall.SIGTERM)
	second := r.find("another drain", func(e drain.Event) bool { return e.Type == drain.EventBegin && e.Drain != first.Drain })
	if code := r.wait(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	if d := r.result().Backend.Drain; d == nil || d.ID != second.Drain || d.Outcome != drain.OutcomeDrained {
		t.Errorf("got drain %+v, want %s drained", d, second.Drain)
	}
}

// However often a drain is begun and taken back, a command that serves is left alone.
func TestD14_ManyUndrainsEndNobody(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	r := h.run("storm", []string{"--on-new", "refuse"}, goServer(t, "127.0.0.1:8001")...)
	pid := r.child()
	c := r.client()
	defer c.CloseIdleConnections()
	done := make(chan struct{})
	for _, action := range []string{"drain", "undrain"} {
		go func() {
			defer func() { done <- struct{}{} }()
			for range 150 {
				resp, err := c.Post("http://ebb/v1/backends/storm/"+action, "application/json", strings.NewReader("{}"))
				if err == nil {
					resp.Body.Close()
				}
			}
		}()
	}
	<-done
	<-done
	eventually(t, "the last drain is taken back", func() bool {
		h.ebb("undrain", "storm")
		return r.backend().State == drain.StateServing
	})
	// Longer than a command that has not ended after its drain is waited for.
	time.Sleep(6 * time.Second)
	if b := r.backend(); b.State != drain.StateServing || b.PID != pid || syscall.Kill(pid, 0) != nil {
		t.Errorf("got %s with process %d, want process %d serving", b.State, b.PID, pid)
	}
	r.signal(syscall.SIGTERM)
	if code := r.wait(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
}

// Nobody reads stderr: the drain goes on all the same, to its deadline and to the end of the run.
func TestT8_NobodyReadsTheLog(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	report := filepath.Join(t.TempDir(), "report")
	args := append([]string{"run", "--name", "mute", "--report", report, "--grace", "4s", "--flush-timeout", "1s", "--reserve", "1s", "--quiet-period", "200ms", "--on-new", "refuse", "--"},
		goServer(t, "127.0.0.1:8001")...)
	cmd := h.ns.Command(t, ebbBin, args...)
	errs, stderr, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer errs.Close()
	fd := int(stderr.Fd()) // which makes it block, every time it is asked for
	if err := syscall.SetNonblock(fd, true); err != nil {
		t.Fatal(err)
	}
	for full := make([]byte, 4096); err == nil; {
		_, err = syscall.Write(fd, full)
	}
	if err := syscall.SetNonblock(fd, false); err != nil {
		t.Fatal(err)
	}
	cmd.Cmd.Env, cmd.Cmd.Stderr = h.env, stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	stderr.Close()
	var stuck net.Conn
	eventually(t, "the server takes connections", func() bool {
		stuck, err = h.ns.DialContext(t.Context(), "tcp", "127.0.0.1:8001")
		return err == nil
	})
	defer stuck.Close()
	if _, err := stuck.Write([]byte("GET /?ms=600000 HTTP/1.1\r\nHost: x\r\n\r\n")); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { cmd.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(patience):
		t.Fatal("ebb run has not ended")
	}
	if _, err := os.Stat(report); err != nil {
		t.Errorf("no report: %v", err)
	}
}

// A server behind a shell has its flush slice although the shell ends at once.
func TestT12_ServerBehindAShell(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	mark := filepath.Join(t.TempDir(), "ended")
	// The server takes longer than reserve to end, and says when it has.
	script := `sh -c 'trap "sleep 1.5; echo done > ` + mark + `; exit 0" TERM; ` +
		`python3 -c "import socket,time; s=socket.socket(); s.setsockopt(1,2,1); s.bind((\"127.0.0.1\",8001)); s.listen(9); time.sleep(600)" & wait' & wait`
	r := h.run("shell", []string{"--grace", "20s", "--flush-timeout", "10s", "--reserve", "500ms", "--quiet-period", "200ms"}, "sh", "-c", script)
	r.signal(syscall.SIGTERM)
	r.wait()
	if b, err := os.ReadFile(mark); err != nil || string(b) != "done\n" {
		t.Errorf("what the shell had started was killed before it had ended: %q, %v", b, err)
	}
}

// What cannot be served is known before the command runs.
func TestR11_AddressThatIsTaken(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	ln := h.ns.Listen(t, "tcp", "127.0.0.1:9102")
	defer ln.Close()
	mark := filepath.Join(t.TempDir(), "ran")
	for _, flags := range [][]string{{"--metrics", "127.0.0.1:9102"}, {"--metrics", "bogus"}, {"--api", "/nonexistent/x.sock"}} {
		r := h.start("taken", flags, "sh", "-c", "echo > "+mark+"; sleep 60")
		if code := r.wait(); code != agent.ExitFailure {
			t.Errorf("%v: exit code %d, want %d", flags, code, agent.ExitFailure)
		}
		if _, err := os.Stat(mark); err == nil {
			t.Fatalf("%v: the command was started", flags)
		}
	}
}

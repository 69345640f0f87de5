// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/netnstest"
)

// terminal is a pseudo-terminal as a person sits before it.
type terminal struct {
	t      *testing.T
	master *os.File
	slave  *os.File

	mu   sync.Mutex
	seen bytes.Buffer
}

func openTerminal(t *testing.T) *terminal {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatalf("open pseudo-terminal: %v", err)
	}
	t.Cleanup(func() { master.Close() })
	if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatalf("unlock pseudo-terminal: %v", err)
	}
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatalf("number of pseudo-terminal: %v", err)
	}
	slave, err := os.OpenFile("/dev/pts/"+strconv.Itoa(n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatalf("open pseudo-terminal: %v", err)
	}
	t.Cleanup(func() { slave.Close() })
	if err := unix.IoctlSetWinsize(int(slave.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 25, Col: 100}); err != nil {
		t.Fatalf("size of pseudo-terminal: %v", err)
	}
	term := &terminal{t: t, master: master, slave: slave}
	go func() {
		buf := make([]byte, 4096)
		for {
			n, err := master.Read(buf)
			term.mu.Lock()
			term.seen.Write(buf[:n])
			term.mu.Unlock()
			if err != nil {
				return // closed, or nobody has it open any more
			}
		}
	}()
	return term
}

// screen is all that has been written to the terminal.
func (term *terminal) screen() string {
	term.mu.Lock()
	defer term.mu.Unlock()
	return term.seen.String()
}

func (term *terminal) shows(text string) {
	term.t.Helper()
	end := time.Now().Add(patience)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for time.Now().Before(end) {
		if strings.Contains(term.screen(), text) {
			return
		}
		<-tick.C
	}
	term.t.Fatalf("the terminal never shows %q:\n%q", text, term.screen())
}

// press types a key.
func (term *terminal) press(key string) {
	term.t.Helper()
	if _, err := io.WriteString(term.master, key); err != nil {
		term.t.Fatalf("type: %v", err)
	}
}

// take runs a command in the foreground of the terminal.
func (term *terminal) take(h *host, args ...string) *netnstest.Cmd {
	term.t.Helper()
	cmd := h.ns.Command(term.t, ebbBin, args...)
	cmd.Cmd.Env = append(h.env, "TERM=xterm")
	cmd.Cmd.Stdin, cmd.Cmd.Stdout, cmd.Cmd.Stderr = term.slave, term.slave, term.slave
	cmd.Cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		term.t.Fatal(err)
	}
	return cmd
}

// code waits for the end of a command.
func code(t *testing.T, cmd *netnstest.Cmd) int {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	select {
	case err := <-done:
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
	case <-time.After(patience):
		t.Fatal("the command has not ended")
	}
	return cmd.Cmd.ProcessState.ExitCode()
}

// state is the letter of proc_pid_stat(5).
func state(pid int) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	return rest[:1]
}

// awaitBackend waits for the socket of a run, and for one covered listener.
func (h *host) awaitBackend(t *testing.T, name string) api.Backend {
	t.Helper()
	r := &supervised{h: h, name: name}
	eventually(t, name+" listens", func() bool {
		if c, err := net.Dial("unix", api.RunSocket(h.runDir, name)); err != nil {
			return false
		} else {
			c.Close()
		}
		for _, l := range r.backend().Listeners {
			if l.Covered {
				return true
			}
		}
		return false
	})
	return r.backend()
}

// Ctrl-C on a terminal drains: CMD, which shares it, does not hear the key before its turn. One line is kept up to date,
// words say what happens, and CMD's own output is where it was.
func TestT2_CtrlCOnATerminalDrains(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	term := openTerminal(t)
	cmd := term.take(h, append([]string{"run", "--name", "tty", "--grace", "60s", "--on-new", "refuse", "--quiet-period", "300ms", "--"}, app(t, "listen=127.0.0.1:8001", "read=stdin")...)...)
	term.shows("listening 127.0.0.1:8001\r\n")
	// Reading the terminal from the background would stop CMD for ever: its input is empty instead.
	term.shows("eof\r\n")
	h.awaitBackend(t, "tty")
	c := h.stuck("127.0.0.1:8001")
	term.press("\x03")
	term.shows("ebb: tty wait: 1 active, ")
	term.shows(" left")
	alive(t, c)
	if s := term.screen(); strings.Contains(s, "signal SIG") {
		t.Errorf("CMD heard a signal before its turn:\n%q", s)
	}
	// Another Ctrl-C says what is left and changes nothing.
	term.press("\x03")
	term.shows("already draining: 1 active left")
	alive(t, c)
	c.Close()
	if got := code(t, cmd); got != 0 {
		t.Errorf("got exit code %d, want 0", got)
	}
	term.shows("drained; the drain is over: drained")
	s := term.screen()
	if strings.Count(s, "signal SIGTERM") != 1 || strings.Contains(s, "signal SIGINT") {
		t.Errorf("CMD heard something else than one SIGTERM:\n%q", s)
	}
	if strings.Contains(s, `{"seq"`) || strings.Contains(s, `{"time"`) {
		t.Errorf("a person is shown JSON:\n%q", s)
	}
	// The live line has been taken away: nothing of it stands after the last erasure.
	last := s[strings.LastIndex(s, "\x1b[K")+3:]
	if strings.Contains(last, " left") && !strings.Contains(last, "\n") {
		t.Errorf("the live line is left on the terminal: %q", last)
	}
}

// Ctrl-Z stops the run and CMD, fg lets both go on, and nothing is lost.
func TestT2_CtrlZStopsBothAndContinueWakesBoth(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	term := openTerminal(t)
	argv := goServer(t, "127.0.0.1:8001") // one that leaves SIGTSTP alone
	cmd := term.take(h, append([]string{"run", "--name", "tty", "--grace", "60s", "--quiet-period", "300ms", "--"}, argv...)...)
	term.shows("listening 127.0.0.1:8001\r\n")
	child := h.awaitBackend(t, "tty").PID
	pid := cmd.Process.Pid
	term.press("\x1a")
	eventually(t, "both are stopped", func() bool { return state(pid) == "T" && state(child) == "T" })
	if err := unix.Kill(pid, unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	eventually(t, "both go on", func() bool { return state(pid) != "T" && state(child) != "T" })
	k := h.kept(t, "127.0.0.1:8001")
	k.send("/")
	if got := k.answer(); got != "hello\n" {
		t.Errorf("got answer %q after the pause", got)
	}
	k.Close()
	term.press("\x03")
	if got := code(t, cmd); got != 0 {
		t.Errorf("got exit code %d, want 0:\n%q", got, term.screen())
	}
}

// Whoever waits on a terminal sees one live line with the counts and the time left, and the outcome in its place at the end.
func TestDrainWaitShowsALiveLine(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	r := h.run("web", []string{"--grace", "60s", "--on-new", "refuse", "--quiet-period", "300ms"}, app(t, "listen=127.0.0.1:8001")...)
	c := h.stuck("127.0.0.1:8001")
	term := openTerminal(t)
	cmd := term.take(h, "drain", "web", "--wait")
	term.shows("web wait · 1 in flight · 1 active · ")
	// Ctrl-C ends the wait and not the drain.
	term.press("\x03")
	if got := code(t, cmd); got != 1 {
		t.Errorf("an interrupted wait: exit code %d, want 1", got)
	}
	term.shows("the drain goes on")
	alive(t, c)
	again := openTerminal(t)
	cmd = again.take(h, "drain", "web", "--wait")
	again.shows("web wait · 1 in flight · 1 active · ")
	c.Close()
	if got := code(t, cmd); got != 0 {
		t.Errorf("got exit code %d, want 0", got)
	}
	again.shows("drained at ")
	if code := r.wait(); code != 0 {
		t.Errorf("got exit code %d, want 0", code)
	}
	if s := again.screen(); strings.Contains(s, "drain.phase") || strings.Count(s, "\n") > 8 {
		t.Errorf("a person is shown more than a line and the outcome:\n%q", s)
	}
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"
	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/agent"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/api/apitest"
	"github.com/ebbproxy/ebb/internal/hook"
)

// buffer is a bytes.Buffer that a test reads while a command writes.
type buffer struct {
	mu    sync.Mutex
	buf   bytes.Buffer
	wrote chan struct{} // has room for one
}

func newBuffer() *buffer { return &buffer{wrote: make(chan struct{}, 1)} }

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	select {
	case b.wrote <- struct{}{}:
	default:
	}
	return b.buf.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// waitFor waits until what was written matches re.
func (b *buffer) waitFor(t *testing.T, re string) {
	t.Helper()
	limit := time.After(patience)
	for !regexp.MustCompile(re).MatchString(b.String()) {
		select {
		case <-b.wrote:
		case <-limit:
			t.Fatalf("%q never came; got %q", re, b.String())
		}
	}
}

// testEnv is an environment whose sockets are in dir and whose variables are vars.
func testEnv(dir string, stdout, stderr io.Writer, vars map[string]string, args ...string) environment {
	return environment{
		args: args, stdin: strings.NewReader(""), stdout: stdout, stderr: stderr, uid: os.Getuid(),
		getenv: func(k string) string {
			if k == "EBB_RUN_DIR" {
				return dir
			}
			return vars[k]
		},
	}
}

func mustFake(t *testing.T, dir, name string, backends ...api.Backend) *fake {
	t.Helper()
	f, err := startFake(dir, name, backends...)
	if err != nil {
		t.Fatal(err)
	}
	stop := f.stop
	f.stop = sync.OnceValue(stop)
	t.Cleanup(func() {
		if err := f.stop(); err != nil {
			t.Errorf("stop the fake: %v", err)
		}
	})
	return f
}

// start runs a command in a goroutine; the channel gets its exit code.
func start(ctx context.Context, env environment) <-chan int {
	code := make(chan int, 1)
	go func() { code <- run(ctx, env) }()
	return code
}

func wait(t *testing.T, code <-chan int) int {
	t.Helper()
	select {
	case c := <-code:
		return c
	case <-time.After(patience):
		t.Fatal("the command does not end")
		return -1
	}
}

// openTerminal is a new pseudo terminal of 60 columns: its two ends.
func openTerminal(t *testing.T) (master, slave *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = master.Close() })
	var n int
	raw, err := master.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var ioErr error
	err = raw.Control(func(fd uintptr) {
		if ioErr = unix.IoctlSetPointerInt(int(fd), unix.TIOCSPTLCK, 0); ioErr != nil {
			return
		}
		if n, ioErr = unix.IoctlGetInt(int(fd), unix.TIOCGPTN); ioErr != nil {
			return
		}
		ioErr = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: 60})
	})
	if err := errors.Join(err, ioErr); err != nil {
		t.Fatal(err)
	}
	slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = slave.Close() })
	return master, slave
}

// On a terminal the wait is one live line with counts by class and the time left, never wider than the
// terminal, and gone when the drain has ended.
func TestDrainWaitDrawsALiveLine(t *testing.T) {
	dir := shortDir(t)
	f := mustFake(t, dir, "web", apitest.Web())
	master, slave := openTerminal(t)
	screen := newBuffer()
	go func() { _, _ = io.Copy(screen, master) }() // ends when the test closes the terminal
	out := newBuffer()
	code := start(t.Context(), testEnv(dir, out, slave, nil, "drain", "web", "--wait", "--grace", "1h"))
	screen.waitFor(t, `\r\x1b\[Kweb stop_new · 4 in flight · 3 active · 50 idle · 1 stalled`)
	f.source.Update("web", func(b *api.Backend) {
		c := drain.Counts{Known: true, Active: 1, Idle: 7}
		b.Counts, b.InFlight = api.CountsOf(c), api.InFlightOf(c, drain.IdleClose)
	})
	screen.waitFor(t, `\r\x1b\[Kweb stop_new · 1 in flight · 1 active · 7 idle · (59m|1h)`)
	f.source.Update("web", func(b *api.Backend) { b.CountsKnown = false })
	screen.waitFor(t, `web stop_new · connections unknown`)
	f.source.End("web", drain.OutcomeDrained)
	if got := wait(t, code); got != 0 {
		t.Errorf("exit code: got %d, want 0", got)
	}
	screen.waitFor(t, `web: \x1b\[32mdrained at`)
	for draw := range strings.SplitSeq(screen.String(), "\x1b[K") {
		text, _, _ := strings.Cut(draw, "\r")
		if n := len([]rune(text)); !strings.Contains(text, "drained") && n >= 60 {
			t.Errorf("a live line of %d columns on a terminal of 60: %q", n, text)
		}
	}
	if strings.Contains(out.String(), "\x1b") {
		t.Errorf("stdout is no terminal and got %q", out.String())
	}
}

// A hook in front of a stop is never held up by a drain that does nothing.
func TestAnObservedDrainIsNotWaitedFor(t *testing.T) {
	for _, args := range [][]string{{"drain", "web", "--wait"}, {"drain", "--all", "--wait"}, {"drain", "web", "--wait", "-o", "json"}, {"prestop", "--backend", "web"}} {
		dir := shortDir(t)
		web := apitest.Web()
		web.Mode = drain.ModeObserve
		f := mustFake(t, dir, "web", web)
		out, said := newBuffer(), newBuffer()
		if code := wait(t, start(t.Context(), testEnv(dir, out, said, nil, args...))); code != 0 {
			t.Errorf("%q: exit code: got %d, want 0: %s", args, code, said)
		}
		if want := "web: observe: nothing is done; ebb report shows what would have been\n"; said.String() != want {
			t.Errorf("%q: got %q on stderr, want %q", args, said, want)
		}
		if calls := f.source.Calls(); len(calls) != 1 {
			t.Errorf("%q: got the calls %q, want one drain", args, calls)
		}
	}
}

// An agent that answers with no backends is not the same as none.
func TestStatusOfAnAgentWithoutBackends(t *testing.T) {
	dir := shortDir(t)
	mustFake(t, dir, "ebb")
	out, said := newBuffer(), newBuffer()
	if code := run(t.Context(), testEnv(dir, out, said, nil, "status")); code != 0 {
		t.Errorf("exit code: got %d, want 0", code)
	}
	if want := "ebb: the node agent has no backends; name some under services in its configuration\n"; said.String() != want || out.String() != "" {
		t.Errorf("got %q and on stderr %q, want nothing and %q", out, said, want)
	}
}

func TestNoColour(t *testing.T) {
	dir := shortDir(t)
	mustFake(t, dir, "web", apitest.Web())
	for _, tc := range []struct {
		vars map[string]string
		want bool
	}{
		{nil, true},
		{map[string]string{"NO_COLOR": "1"}, false},
		{map[string]string{"TERM": "dumb"}, false},
	} {
		master, slave := openTerminal(t)
		screen := newBuffer()
		go func() { _, _ = io.Copy(screen, master) }()
		if code := run(t.Context(), testEnv(dir, slave, io.Discard, tc.vars, "status")); code != 0 {
			t.Fatalf("exit code %d", code)
		}
		screen.waitFor(t, `serving(.|\n|\r)*only TCP is drained`)
		if got := strings.Contains(screen.String(), "\x1b["); got != tc.want {
			t.Errorf("%v: colour is %v, want %v: %q", tc.vars, got, tc.want, screen.String())
		}
	}
}

// A terminal is not moved by what a name or a reason contains.
func TestNothingFromOutsideMovesTheCursor(t *testing.T) {
	dir := shortDir(t)
	b := apitest.Web()
	b.Warnings = []string{"evil \x1b[2J\r\nwarning"}
	f := mustFake(t, dir, "web", b)
	f.source.SetStragglers("web", api.Straggler{Peer: "\x1b]0;x\a", Local: "y", Class: "\u009bz"})
	out := newBuffer()
	for _, args := range [][]string{{"status"}, {"explain", "web"}, {"drain", "web", "--reason", "\x1b[31m"}, {"explain", "web"}} {
		if code := run(t.Context(), testEnv(dir, out, out, nil, args...)); code != 0 {
			t.Fatalf("%v: exit code %d: %s", args, code, out)
		}
	}
	if s := out.String(); strings.ContainsAny(s, "\x1b\a\r\u009b") {
		t.Errorf("got %q", s)
	}
}

// Whoever should end the drain hangs: a stop that waits for it goes on.
func TestT8_DrainWaitEndsAfterTheDeadline(t *testing.T) {
	t.Parallel()
	a := newAgent(t, "web")
	var out, stderr buffer
	began := time.Now()
	code := start(t.Context(), testEnv(a.dir, &out, &stderr, nil, "drain", "web", "--wait", "--grace", "1s"))
	if got := wait(t, code); got != 1 {
		t.Errorf("exit code %d, want 1", got)
	}
	stderr.waitFor(t, `its deadline has passed and it has no outcome`)
	if d := time.Since(began); d < time.Second+overdueAfter {
		t.Errorf("given up after %s, before the deadline and %s", d, overdueAfter)
	}
}

// Whoever dies without telling the outcome leaves it unknown: an error, not an outcome.
func TestDrainWaitWhenTheProcessVanishes(t *testing.T) {
	dir := shortDir(t)
	f := mustFake(t, dir, "web", apitest.Web())
	var out bytes.Buffer
	stderr := newBuffer()
	code := start(t.Context(), testEnv(dir, &out, stderr, nil, "drain", "web", "--wait"))
	stderr.waitFor(t, "phase stop_new")
	if err := f.stop(); err != nil {
		t.Fatal(err)
	}
	if got := wait(t, code); got != 1 {
		t.Errorf("exit code: got %d, want 1", got)
	}
	stderr.waitFor(t, `ebb: wait for web: the process that ran the drain went away before its end was seen`)
}

// R8: the survivors are told even if the process that knew them has gone.
func TestR8_DrainWaitListsSurvivorsOfAProcessThatLeft(t *testing.T) {
	dir := shortDir(t)
	f := mustFake(t, dir, "web", apitest.Web())
	var out bytes.Buffer
	stderr := newBuffer()
	code := start(t.Context(), testEnv(dir, &out, stderr, nil, "drain", "web", "--wait"))
	stderr.waitFor(t, "phase stop_new")
	id := f.source.Drains(t.Context())[0].ID
	f.log.Publish(drain.Event{
		Type: drain.EventSurvivors, Backend: "web", Drain: id, Phase: drain.PhaseWait, Message: "the wait is over",
		Fields: map[string]any{"survivors": []drain.Survivor{{Peer: "192.0.2.9:4000", Class: "active", Age: 90 * time.Second, Idle: 2 * time.Second, Unacked: 77}}},
	})
	f.log.Publish(drain.Event{
		Type: drain.EventCut, Backend: "web", Drain: id, Phase: drain.PhaseCut, Message: "cut",
		Fields: map[string]any{"report": drain.CutReport{Graceful: 1, Destroyed: 2}},
	})
	f.log.Publish(drain.Event{Type: drain.EventEnd, Backend: "web", Drain: id, Phase: drain.PhaseDone, Outcome: drain.OutcomeExpired, Message: "over"})
	if err := f.stop(); err != nil {
		t.Fatal(err)
	}
	if got := wait(t, code); got != exitExpired {
		t.Errorf("exit code: got %d, want %d: %s", got, exitExpired, stderr)
	}
	for _, want := range []string{
		"web: expired at", "1 connection open when the wait ran out", "1 closed by the application, 2 destroyed",
		"was open: 192.0.2.9:4000 active, age 1m30s, idle 2s, 77 B unacknowledged",
	} {
		if !strings.Contains(stderr.String(), want) {
			t.Errorf("got %q, want %q in it", stderr, want)
		}
	}
}

// A lease that was held when the wait began is not said to have been held to the end by a process that left.
func TestDrainWaitKnowsNoLeasesOfAProcessThatLeft(t *testing.T) {
	dir := shortDir(t)
	f := mustFake(t, dir, "web", apitest.Web())
	d, err := f.source.Drain(t.Context(), "web", api.DrainRequest{})
	if err != nil {
		t.Fatal(err)
	}
	f.source.Update("web", func(b *api.Backend) {
		now := *b.Drain
		now.Held = []api.HeldDuring{{Name: "job", PID: 4300}}
		b.Drain = &now
	})
	stderr := newBuffer()
	code := start(t.Context(), testEnv(dir, io.Discard, stderr, nil, "drain", "web", "--wait"))
	stderr.waitFor(t, "phase stop_new")
	f.log.Publish(drain.Event{Type: drain.EventEnd, Backend: "web", Drain: d.ID, Phase: drain.PhaseDone, Outcome: drain.OutcomeDrained, Message: "over"})
	if err := f.stop(); err != nil {
		t.Fatal(err)
	}
	if got := wait(t, code); got != 0 {
		t.Errorf("exit code: got %d, want 0: %s", got, stderr)
	}
	if stderr.waitFor(t, "web: drained at"); strings.Contains(stderr.String(), "not released") {
		t.Errorf("got %q", stderr)
	}
}

// command is ebb in a process of its own.
func command(t *testing.T, dir string, args ...string) (*exec.Cmd, *buffer, *buffer) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	// testscript runs main when the binary is called by the command's name.
	ebb := filepath.Join(t.TempDir(), "ebb")
	if err := os.Symlink(self, ebb); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), ebb, args...)
	cmd.Env = append(os.Environ(), "EBB_RUN_DIR="+dir, "GORACE=atexit_sleep_ms=0")
	stdout, stderr := newBuffer(), newBuffer()
	cmd.Stdout, cmd.Stderr = stdout, stderr
	return cmd, stdout, stderr
}

// Interrupting the wait ends the wait, not the drain; interrupting what only watches is no error.
func TestInterrupt(t *testing.T) {
	dir := shortDir(t)
	f := mustFake(t, dir, "web", apitest.Web())
	for _, tc := range []struct {
		args  []string
		ready string // on stdout or stderr
		code  int
	}{
		{[]string{"status", "--watch"}, `(?s)web +shop.*web +shop`, 0},
		{[]string{"drain", "web", "--wait"}, "phase stop_new", 1},
		{[]string{"events", "--follow"}, `"phase":"stop_new"`, 0},
	} {
		cmd, stdout, stderr := command(t, dir, tc.args...)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		out := stdout
		if tc.args[0] == "drain" {
			out = stderr
		}
		out.waitFor(t, tc.ready)
		if err := cmd.Process.Signal(os.Interrupt); err != nil {
			t.Fatal(err)
		}
		err := cmd.Wait()
		if got := cmd.ProcessState.ExitCode(); got != tc.code {
			t.Errorf("%v: got exit code %d (%v), want %d: %s", tc.args, got, err, tc.code, stderr)
		}
		if tc.code != 0 && !strings.Contains(stderr.String(), "the wait was interrupted; the drain goes on") {
			t.Errorf("%v: got %q", tc.args, stderr)
		}
	}
	if d := f.source.Drains(t.Context()); len(d) != 1 || !d[0].Running() {
		t.Errorf("got %+v, want one drain that still runs", d)
	}
}

// A follower reads the events as they come, each a JSON line, and ends with the process it follows.
func TestEventsFollow(t *testing.T) {
	dir := shortDir(t)
	f := mustFake(t, dir, "web", apitest.Web())
	out, stderr := newBuffer(), newBuffer()
	code := start(t.Context(), testEnv(dir, out, stderr, nil, "events", "-f"))
	if _, err := f.source.Drain(t.Context(), "web", api.DrainRequest{}); err != nil {
		t.Fatal(err)
	}
	out.waitFor(t, `"phase":"stop_new"`)
	f.source.End("web", drain.OutcomeDrained)
	if err := f.stop(); err != nil {
		t.Fatal(err)
	}
	if got := wait(t, code); got != 0 {
		t.Errorf("exit code: got %d, want 0: %s", got, stderr)
	}
	lines := bufio.NewScanner(strings.NewReader(out.String()))
	seq := uint64(0)
	for lines.Scan() {
		var ev drain.Event
		if err := json.Unmarshal(lines.Bytes(), &ev); err != nil || ev.Seq != seq+1 {
			t.Errorf("%q: got number %d, %v, want %d", lines.Text(), ev.Seq, err, seq+1)
		}
		seq = ev.Seq
	}
	if seq != 3 {
		t.Errorf("got %d events, want 3", seq)
	}
}

// What YAML says is what JSON says.
func TestWriteDocumentYAML(t *testing.T) {
	in := map[string]any{
		"yes": "yes", "number": "12", "null": "null", "n": nil, "empty": []any{}, "b": true, "s": "a: b # c", "multi": "x\ny",
		"list": []any{map[string]any{"k": 1.5}, "-"}, "time": "2026-07-01T12:00:00Z", "colon": "1:2",
	}
	var js, ya bytes.Buffer
	if err := errors.Join(writeDocument(&js, "json", in), writeDocument(&ya, "yaml", in)); err != nil {
		t.Fatal(err)
	}
	var fromYAML any
	if err := yaml.Unmarshal(ya.Bytes(), &fromYAML); err != nil {
		t.Fatalf("%s: %v", ya.String(), err)
	}
	var again bytes.Buffer
	if err := writeDocument(&again, "json", fromYAML); err != nil {
		t.Fatal(err)
	}
	if again.String() != js.String() {
		t.Errorf("got %s from\n%s\nwant %s", again.String(), ya.String(), js.String())
	}
}

func TestRunHooks(t *testing.T) {
	for _, tc := range []struct {
		f    runFlags
		want agent.RunOptions
	}{
		{runFlags{flush: "signal:SIGTERM"}, agent.RunOptions{Flush: hook.Hook{Signal: unix.SIGTERM}}},
		{runFlags{notify: "signal:QUIT@settled", flush: "http://127.0.0.1:8081/flush"}, agent.RunOptions{
			Notify: hook.Hook{Signal: unix.SIGQUIT}, Policy: drain.Policy{NotifyAt: drain.NotifyAtSettled}, Flush: hook.Hook{HTTP: "http://127.0.0.1:8081/flush"},
		}},
		{runFlags{notify: "exec:/bin/told web@begin", flush: "api", grace: time.Minute, extension: time.Minute}, agent.RunOptions{
			Notify: hook.Hook{Exec: []string{"/bin/told", "web"}}, Policy: drain.Policy{NotifyAt: drain.NotifyAtBegin}, Flush: hook.Hook{API: true}, Extension: time.Minute,
		}},
	} {
		var got agent.RunOptions
		if err := tc.f.hooks(&got); err != nil || !reflect.DeepEqual(got, tc.want) {
			t.Errorf("%+v: got %+v, %v, want %+v", tc.f, got, err, tc.want)
		}
	}
}

// An ebb run below another one serves its command at a socket of its own.
func TestWhatASupervisorTellsIsNoFlag(t *testing.T) {
	flags := newRunCmd(&environment{}).Flags()
	vars := map[string]string{"EBB_APP_SOCKET": "/run/ebb/run/outer.app.sock", "EBB_GRACE": "1h"}
	if err := applyVariables(flags, func(k string) string { return vars[k] }); err != nil {
		t.Fatal(err)
	}
	if got := flags.Lookup("app-socket").Value.String(); got != "" {
		t.Errorf("--app-socket: got %q, want none", got)
	}
	if got := flags.Lookup("grace").Value.String(); got != "1h0m0s" {
		t.Errorf("--grace: got %q, want 1h", got)
	}
}

func TestNearest(t *testing.T) {
	names := []string{"grace", "on-new", "on-deadline", "wait", "reason", "api"}
	for in, want := range map[string]string{
		"garce": "grace", "grase": "grace", "onnew": "on-new", "on-dead": "on-deadline", "wiat": "wait",
		"frobnicate": "", "x": "", "xyz": "", "reasons": "reason",
	} {
		if got := nearest(in, names); got != want {
			t.Errorf("%s: got %q, want %q", in, got, want)
		}
	}
}

func TestBrief(t *testing.T) {
	for in, want := range map[time.Duration]string{
		-time.Second: "0s", 0: "0s", 1234 * time.Microsecond: "1ms", 1560 * time.Millisecond: "1.6s",
		12345 * time.Millisecond: "12s", 95 * time.Second: "1m35s", 90*time.Minute + 20*time.Second: "1h30m", 2 * time.Hour: "2h0m",
	} {
		if got := brief(in); got != want {
			t.Errorf("%d: got %s, want %s", in, got, want)
		}
	}
}

func TestShellWord(t *testing.T) {
	for in, want := range map[string]string{"web": "web", "web@blue.service": "web@blue.service", "a b": "'a b'", "": "''", "it's": `'it'\''s'`, "$(x)": "'$(x)'"} {
		if got := shellWord(in); got != want {
			t.Errorf("%q: got %s, want %s", in, got, want)
		}
	}
}

// The exit code of several drains is that of the worst.
func TestWorst(t *testing.T) {
	all := func(os ...drain.Outcome) int {
		var ts []*target
		for _, o := range os {
			ts = append(ts, &target{drain: api.Drain{Outcome: o}})
		}
		return worst(ts)
	}
	for _, tc := range []struct{ got, want int }{
		{all(drain.OutcomeDrained), 0},
		{all(drain.OutcomeDrained, drain.OutcomeExpired), 3},
		{all(drain.OutcomeLost, drain.OutcomeExpired), 4},
		{all(drain.OutcomeCancelled, drain.OutcomeDrained), 5},
		{all(drain.OutcomeCancelled, drain.OutcomeExpired), 3},
		{all(drain.OutcomeLost, "evaporated"), 1}, // of a newer ebb: not known to be good
	} {
		if tc.got != tc.want {
			t.Errorf("got %d, want %d", tc.got, tc.want)
		}
	}
}

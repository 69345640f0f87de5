// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/api/apitest"
	"github.com/ebbproxy/ebb/internal/session"
)

// applications is a source with the sessions of its one backend, web.
type applications struct {
	*apitest.Source
	t    *testing.T
	dir  string
	stop func()

	now     atomic.Pointer[session.Book]
	changed chan struct{} // has room for one
}

func (a *applications) OpenSession(ctx context.Context, _ string, p api.Process, r api.SessionRequest) (api.Session, error) {
	return a.now.Load().Open(ctx, p, r)
}

func (a *applications) SessionCall(ctx context.Context, _, id string, p api.Process, c api.SessionCall) (api.Session, error) {
	defer a.tell()
	return a.now.Load().Call(ctx, id, p, c)
}

func (a *applications) SessionEvents(ctx context.Context, _, id string, p api.Process, from, stream uint64) (api.SessionBatch, error) {
	return a.now.Load().Events(ctx, id, p, from, stream)
}

// newApplications serves app.sock in a new directory, where every process is one of web's.
func newApplications(t *testing.T) *applications {
	a := &applications{t: t, dir: shortDir(t), Source: apitest.New(nil, apitest.Web()), changed: make(chan struct{}, 1)}
	if err := api.MakeRunDir(a.dir, os.Getuid()); err != nil {
		t.Fatal(err)
	}
	a.renew()
	a.serve()
	t.Cleanup(func() { a.stop() })
	return a
}

func (a *applications) serve() {
	log := api.NewLog(api.LogOptions{})
	owns := func(context.Context, int) (string, bool) { return "web", true }
	srv, err := api.NewServer(api.Options{Source: a, Log: log})
	if err != nil {
		a.t.Fatal(err)
	}
	ln, err := api.Listen(filepath.Join(a.dir, api.AppSocket))
	if err != nil {
		a.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- srv.ServeAs(ctx, ln, api.Apps(owns)) }()
	a.stop = func() {
		err := log.Close()
		cancel()
		if err = errors.Join(err, <-served); err != nil {
			a.t.Errorf("stop the server: %v", err)
		}
	}
}

// renew forgets every session. A heartbeat is short, and nobody is taken for silent.
func (a *applications) renew() *session.Book {
	b, err := session.New(session.Options{
		Backend: "web", Service: "shop", Gen: 7, Heartbeat: 20 * time.Millisecond, Suspect: time.Hour, Lost: 2 * time.Hour,
		Changed: a.tell,
	})
	if err != nil {
		a.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ran := make(chan struct{})
	go func() {
		defer close(ran)
		_ = b.Run(ctx)
	}()
	a.t.Cleanup(func() {
		cancel()
		<-ran
	})
	a.now.Store(b)
	return b
}

// tell makes until look again.
func (a *applications) tell() {
	select {
	case a.changed <- struct{}{}:
	default:
	}
}

// flush begins the flush of a drain.
func (a *applications) flush(b *session.Book) {
	err := errors.Join(
		b.Draining(drain.Notice{Drain: "d1", Gen: 7, Cause: drain.CauseOperator, Deadline: time.Now().Add(time.Hour)}, time.Now()),
		b.Flush(drain.FlushRequest{Drain: "d1", Gen: 7, Reason: drain.FlushDeadline, TimeLeft: time.Hour}),
	)
	if err != nil {
		a.t.Fatal(err)
	}
}

// until waits until the sessions are as ok wants them.
func (a *applications) until(what string, ok func(*session.Book) bool) {
	a.t.Helper()
	limit := time.After(patience)
	for !ok(a.now.Load()) {
		select {
		case <-a.changed:
		case <-limit:
			a.t.Fatalf("%s: never; there are %+v", what, a.now.Load().Views())
		}
	}
}

func (a *applications) held(name string, pid int) func(*session.Book) bool {
	return func(b *session.Book) bool {
		ls := b.Leases()
		return len(ls) == 1 && ls[0].Name == name && ls[0].PID == pid
	}
}

func none(b *session.Book) bool { return len(b.Views()) == 0 }

// work is a command that says when it runs, and runs until its input ends.
type work struct {
	code   <-chan int
	stdout *buffer
	stderr *buffer
	end    func()
}

func (a *applications) hold(args ...string) *work {
	a.t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		a.t.Fatal(err)
	}
	k := &work{stdout: newBuffer(), stderr: newBuffer(), end: func() { _ = w.Close() }}
	a.t.Cleanup(func() { _, _ = r.Close(), w.Close() })
	env := testEnv(a.dir, k.stdout, k.stderr, nil, append([]string{"hold"}, args...)...)
	env.stdin = r
	k.code = start(a.t.Context(), env)
	return k
}

const untilEOF = "echo up; cat; exit 7"

func TestT9_ACommandHoldsTheFlushWhileItRuns(t *testing.T) {
	a := newApplications(t)
	job := a.hold("--require", "--name", "job", "--", "sh", "-c", untilEOF)
	job.stdout.waitFor(t, "up")
	if b := a.now.Load(); !a.held("job", os.Getpid())(b) {
		t.Errorf("it runs, and the leases are %+v", b.Leases())
	}
	if n := a.now.Load().Apps(); n != 0 {
		t.Errorf("got %d applications, want none: nobody waits for its answer", n)
	}
	other := a.hold("--", "sh", "-c", untilEOF)
	other.stdout.waitFor(t, "up")
	if n, names := a.now.Load().Holds(); n != 2 {
		t.Errorf("got the holds %q, want two", names)
	}
	other.end()
	if code := wait(t, other.code); code != 7 {
		t.Errorf("exit code: got %d, want 7: %s", code, other.stderr)
	}
	if b := a.now.Load(); !a.held("job", os.Getpid())(b) {
		t.Errorf("the other has ended, and the leases are %+v", b.Leases())
	}
	job.end()
	if code := wait(t, job.code); code != 7 || !none(a.now.Load()) {
		t.Errorf("exit code: got %d, want 7, and no session of %+v: %s", code, a.now.Load().Views(), job.stderr)
	}
	if job.stderr.String()+other.stderr.String() != "" {
		t.Errorf("got on stderr %q and %q", job.stderr, other.stderr)
	}
}

func TestT9_ItIsTooLateToBeginWorkInTheFlush(t *testing.T) {
	a := newApplications(t)
	a.flush(a.now.Load())
	job := a.hold("--", "sh", "-c", untilEOF)
	if code := wait(t, job.code); code != 1 || job.stdout.String() != "" || !none(a.now.Load()) {
		t.Errorf("got exit code %d, output %q and sessions %+v, want 1 and nothing", code, job.stdout, a.now.Load().Views())
	}
	job.stderr.waitFor(t, "ebb: hold: .*flush has begun.*; sh is not run\n")
}

// A server that comes back knows the session, or has it opened anew.
func TestT9_AHoldOutlivesTheOwner(t *testing.T) {
	a := newApplications(t)
	job := a.hold("--name", "job", "--", "sh", "-c", untilEOF)
	job.stdout.waitFor(t, "up")
	first := a.now.Load().Views()[0]

	a.stop()
	back := time.Now()
	a.serve()
	a.until("heard of after the restart", func(b *session.Book) bool { return b.Views()[0].Heard.After(back) })
	if v := a.now.Load().Views(); len(v) != 1 || v[0].ID != first.ID {
		t.Errorf("got %+v, want the session %s", v, first.ID)
	}

	a.renew()
	a.until("held anew", a.held("job", os.Getpid()))
	if id := a.now.Load().Views()[0].ID; id == first.ID {
		t.Errorf("got the old session %s", id)
	}

	a.flush(a.renew())
	job.stderr.waitFor(t, "ebb: hold: the session was lost, and .*flush has begun.*; job goes on without a hold\n")
	job.end()
	if code := wait(t, job.code); code != 7 || !none(a.now.Load()) {
		t.Errorf("exit code: got %d, want 7, and no session of %+v", code, a.now.Load().Views())
	}
}

// A hold ends with the process that took it, which alone knows when the work is over; and what that is sent, CMD gets.
func TestHoldOfAnotherProcess(t *testing.T) {
	a := newApplications(t)
	for _, tc := range []struct {
		sig  unix.Signal
		code int
	}{
		{unix.SIGUSR1, 9}, {unix.SIGTERM, 128 + 15}, {unix.SIGKILL, -1},
	} {
		// The shell that is left behind ends with its input.
		cmd, stdout, stderr := command(t, a.dir, "hold", "--", "sh", "-c", `exec 3<&0; cat <&3 & trap "exit 9" USR1; echo up; wait; exit 8`)
		stdin, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		stdout.waitFor(t, "up")
		a.until("held", a.held("sh", cmd.Process.Pid))
		if err := cmd.Process.Signal(tc.sig); err != nil {
			t.Fatal(err)
		}
		a.until("ended", none)
		_ = stdin.Close()
		_ = cmd.Wait() // its code tells more
		if got := cmd.ProcessState.ExitCode(); got != tc.code {
			t.Errorf("%v: exit code %d, want %d: %s", tc.sig, got, tc.code, stderr)
		}
	}
}

// A key that is pressed on a terminal reaches CMD once: what the terminal sends it is not forwarded too.
func TestHoldOnATerminal(t *testing.T) {
	master, slave := openTerminal(t)
	screen := newBuffer()
	go func() { _, _ = io.Copy(screen, master) }() // ends when the test closes the terminal
	cmd, _, _ := command(t, shortDir(t), "hold", "--", "sh", "-c",
		`sleep 1000 & n=0; trap 'n=$((n+1)); echo key $n' INT; trap 'kill $!; echo all $n; exit 5' USR1; echo up; while :; do wait; done`)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	screen.waitFor(t, "up")
	if _, err := master.WriteString("\x03"); err != nil {
		t.Fatal(err)
	}
	screen.waitFor(t, "key 1")
	if err := cmd.Process.Signal(unix.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	screen.waitFor(t, "all 1")
	if _ = cmd.Wait(); cmd.ProcessState.ExitCode() != 5 {
		t.Errorf("exit code %d, want 5: %s", cmd.ProcessState.ExitCode(), screen)
	}
}

// SPDX-License-Identifier: Apache-2.0

package lease

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/netnstest"
)

const (
	childEnv = "EBB_LEASE_TEST"
	generous = time.Minute
)

// TestMain makes the test binary a process that owns a lease, where a test starts it as one.
func TestMain(m *testing.M) {
	if path := os.Getenv(childEnv); path != "" {
		child(path, os.Args[1] == "standby")
		return
	}
	os.Exit(m.Run())
}

// child owns the lease and does what it reads: renew, release, end.
func child(path string, standby bool) {
	l, err := Acquire(context.Background(), path, Options{Standby: standby})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("acquired")
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		switch in.Text() {
		case "renew":
			err = l.Renew()
		case "release":
			err = l.Release()
		}
		fmt.Println(in.Text(), errors.Is(err, ErrLost), err)
	}
}

// proc is a child of the test.
type proc struct {
	t   *testing.T
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func spawn(t *testing.T, path, role string) *proc {
	t.Helper()
	p := &proc{t: t, cmd: exec.Command(os.Args[0], role)}
	p.cmd.Env = append(os.Environ(), childEnv+"="+path)
	in, err := p.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p.in, p.out = in, bufio.NewReader(out)
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait() // a second Wait says only that
	})
	return p
}

// owner is a child that owns the lease.
func owner(t *testing.T, path string) *proc {
	t.Helper()
	p := spawn(t, path, "owner")
	p.reads("acquired")
	return p
}

func (p *proc) pid() int { return p.cmd.Process.Pid }

func (p *proc) reads(want string) {
	p.t.Helper()
	if got, err := p.out.ReadString('\n'); strings.TrimSpace(got) != want {
		p.t.Fatalf("process %d says %q (%v), want %q", p.pid(), got, err, want)
	}
}

// does makes the child do something, and fails the test if the child does not answer as it should.
func (p *proc) does(what, want string) {
	p.t.Helper()
	if _, err := io.WriteString(p.in, what+"\n"); err != nil {
		p.t.Fatal(err)
	}
	got, err := p.out.ReadString('\n')
	if !strings.HasPrefix(got, what+" "+want) {
		p.t.Fatalf("process %d, told to %s, says %q (%v), want %q", p.pid(), what, got, err, want)
	}
}

const fine, lost = "false <nil>", "true "

func (p *proc) signal(sig unix.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(sig); err != nil {
		p.t.Fatal(err)
	}
}

// stop returns when the child has stopped.
func (p *proc) stop() {
	p.t.Helper()
	p.signal(unix.SIGSTOP)
	var ws unix.WaitStatus
	if _, err := unix.Wait4(p.pid(), &ws, unix.WUNTRACED, nil); err != nil || !ws.Stopped() {
		p.t.Fatalf("process %d is not stopped: %v, %v", p.pid(), ws, err)
	}
}

// killed fails the test unless the child was ended by SIGKILL.
func (p *proc) killed() {
	p.t.Helper()
	err := p.cmd.Wait()
	var e *exec.ExitError
	if !errors.As(err, &e) || !strings.Contains(e.String(), "killed") {
		p.t.Errorf("process %d: got %v, want that it was killed", p.pid(), err)
	}
}

// standby is an Acquire in this process, whose looks the test makes.
type standby struct {
	t      *testing.T
	looks  chan time.Time
	result chan error
	lease  *Lease
	cancel context.CancelCauseFunc
	log    syncBuffer
}

// syncBuffer is a log that is read while it is written.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(b)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func standBy(t *testing.T, path string) *standby {
	t.Helper()
	ctx, cancel := context.WithCancelCause(t.Context())
	s := &standby{t: t, looks: make(chan time.Time), result: make(chan error, 1), cancel: cancel}
	go func() {
		l, err := Acquire(ctx, path, Options{Standby: true, looks: s.looks, Log: slog.New(slog.NewTextHandler(&s.log, nil))})
		s.lease = l
		s.result <- err
	}()
	t.Cleanup(func() { cancel(nil) })
	return s
}

// look makes n looks; all but the last have been acted upon when it returns.
func (s *standby) look(n int) {
	s.t.Helper()
	for i := range n {
		select {
		case s.looks <- time.Time{}:
		case err := <-s.result:
			s.t.Fatalf("Acquire returned %v after %d of %d looks, want it to wait\n%s", err, i, n, &s.log)
		case <-time.After(generous):
			s.t.Fatal("the standby does not look")
		}
	}
}

// owns fails the test unless the standby owns the lease soon, looking or not.
func (s *standby) owns(looking bool) {
	s.t.Helper()
	looks, deadline := s.looks, time.After(generous)
	if !looking {
		looks = nil
	}
	for {
		select {
		case looks <- time.Time{}:
		case err := <-s.result:
			if err != nil {
				s.t.Fatal(err)
			}
			s.t.Cleanup(func() {
				if err := s.lease.Release(); err != nil {
					s.t.Error(err)
				}
			})
			return
		case <-deadline:
			s.t.Fatalf("the standby does not own the lease\n%s", &s.log)
		}
	}
}

// heldBy fails the test unless somebody owns the lease.
func heldBy(t *testing.T, path, who string) {
	t.Helper()
	l, err := Acquire(t.Context(), path, Options{})
	if !errors.Is(err, ErrHeld) || !strings.Contains(err.Error(), who) {
		t.Fatalf("got %v, want ErrHeld and %q", err, who)
	}
	if l != nil {
		t.Fatal("got a lease beside the error")
	}
}

func leasePath(t *testing.T) string { return filepath.Join(t.TempDir(), "state", "lease") }

// inDir makes the directory of a path, as whoever uses a lease does.
func inDir(t *testing.T, path string) string {
	t.Helper()
	if err := os.Mkdir(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestD3_OneOwner(t *testing.T) {
	netnstest.LeakCheck(t)
	path := inDir(t, leasePath(t))
	l, err := Acquire(t.Context(), path, Options{})
	if err != nil {
		t.Fatal(err)
	}
	heldBy(t, path, "by process "+strconv.Itoa(os.Getpid()))
	if err := errors.Join(l.Renew(), l.Release(), l.Release()); err != nil {
		t.Error(err)
	}
	if err := l.Renew(); !errors.Is(err, ErrLost) {
		t.Errorf("Renew of what was released: got %v, want ErrLost", err)
	}
	o := owner(t, path)
	heldBy(t, path, "by process "+strconv.Itoa(o.pid()))
	o.does("renew", fine)
}

// A missing directory is an error for a standby, too.
func TestNoDirectory(t *testing.T) {
	if _, err := Acquire(t.Context(), leasePath(t), Options{Standby: true}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v, want ErrNotExist", err)
	}
}

// An owner that gives up, or is killed, is followed at once, without a look.
func TestD3_StandbyFollowsAtOnce(t *testing.T) {
	for _, how := range []string{"release", "kill"} {
		t.Run(how, func(t *testing.T) {
			netnstest.LeakCheck(t)
			path := inDir(t, leasePath(t))
			o := owner(t, path)
			s := standBy(t, path)
			s.look(1) // it waits
			if how == "release" {
				o.does("release", fine)
			} else {
				o.signal(unix.SIGKILL)
			}
			s.owns(false)
			heldBy(t, path, "by process "+strconv.Itoa(os.Getpid()))
			if how == "release" {
				o.does("renew", lost)
			}
		})
	}
}

func TestD3_StoppedOwnerIsKilled(t *testing.T) {
	netnstest.LeakCheck(t)
	path := inDir(t, leasePath(t))
	o := owner(t, path)
	s := standBy(t, path)
	o.stop()
	s.look(patience) // one to see the record, and one less than it takes
	heldBy(t, path, "by process "+strconv.Itoa(o.pid()))
	s.owns(true)
	o.killed()
	heldBy(t, path, "by process "+strconv.Itoa(os.Getpid()))
}

// An owner that renews after ten seconds each time is slow and lives.
func TestD3_SlowOwnerIsLeftAlone(t *testing.T) {
	netnstest.LeakCheck(t)
	path := inDir(t, leasePath(t))
	o := owner(t, path)
	s := standBy(t, path)
	for range 5 {
		s.look(patience - 1) // the last may come after the renewal, and then be the first of the next ones
		o.does("renew", fine)
	}
	heldBy(t, path, "by process "+strconv.Itoa(o.pid()))
	if strings.Contains(s.log.String(), "does not renew") || strings.Contains(s.log.String(), "did not renew") {
		t.Errorf("got %s, want no complaint", &s.log)
	}
}

// Whatever becomes of its record, an owner stays the only one, and puts it back.
func TestD3_RecordIsTakenAway(t *testing.T) {
	netnstest.LeakCheck(t)
	path := inDir(t, leasePath(t))
	o := owner(t, path)
	for name, do := range map[string]func() error{
		"deleted":  func() error { return os.Remove(path) },
		"replaced": func() error { return errors.Join(os.Rename(path, path+".old"), os.WriteFile(path, blank, 0o600)) },
		"emptied":  func() error { return os.Truncate(path, 0) },
		"garbage":  func() error { return os.WriteFile(path, []byte("garbage"), 0o600) },
		"of another boot": func() error {
			return os.WriteFile(path, record{pid: 1, start: 1, pidns: 1, boot: "another", renewed: 1}.encode(), 0o600)
		},
	} {
		t.Log(name)
		if err := do(); err != nil {
			t.Fatal(err)
		}
		heldBy(t, path, "held")
		o.does("renew", fine)
		heldBy(t, path, "by process "+strconv.Itoa(o.pid()))
	}
}

// Where the whole directory is taken away the owner learns it from its next Renew, and a standby goes to the new one.
func TestD3_DirectoryIsReplaced(t *testing.T) {
	netnstest.LeakCheck(t)
	dir := t.TempDir()
	// A symbolic link can be replaced at one blow.
	state := filepath.Join(dir, "state")
	point := func(name string) {
		t.Helper()
		if err := errors.Join(os.Mkdir(filepath.Join(dir, name), 0o700), os.Symlink(name, state+".new"), os.Rename(state+".new", state)); err != nil {
			t.Fatal(err)
		}
	}
	point("one")
	path := filepath.Join(state, "lease")
	o := owner(t, path)
	s := standBy(t, path)
	s.look(1)
	point("two")
	s.owns(true)
	o.does("renew", lost)
	o.does("renew", lost)
	heldBy(t, path, "by process "+strconv.Itoa(os.Getpid()))
}

// A record of an owner that is gone, or of another boot, is in nobody's way.
func TestLeftRecord(t *testing.T) {
	netnstest.LeakCheck(t)
	own, err := self()
	if err != nil {
		t.Fatal(err)
	}
	path := inDir(t, leasePath(t))
	another := own
	another.boot = "00000000-0000-0000-0000-000000000000"
	for name, text := range map[string][]byte{
		"other boot": another.encode(), "this process, once": own.encode(), "garbage": []byte("\x00\xffgarbage"), "torn": own.encode()[:70],
	} {
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		l, err := Acquire(t.Context(), path, Options{})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if r, err := readPath(path); err != nil || r.pid != own.pid || r.boot != own.boot || r.renewed == 0 {
			t.Errorf("%s: got %+v, %v, want a record of this process", name, r, err)
		}
		if err := l.Release(); err != nil {
			t.Error(err)
		}
	}
}

// Only the very process that wrote the record is killed.
func TestKillsNobodyElse(t *testing.T) {
	netnstest.LeakCheck(t)
	path := inDir(t, leasePath(t))
	o := owner(t, path)
	s := standBy(t, path)
	good, err := readPath(path)
	if err != nil {
		t.Fatal(err)
	}
	o.stop()
	put := func(b []byte) {
		t.Helper()
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for i, change := range []func(*record){
		func(r *record) { r.start++ }, // the number has gone to another process
		func(r *record) { r.boot = "another" },
		func(r *record) { r.pidns++ },
		func(r *record) { r.pid = 1<<22 + 1 }, // beyond PID_MAX_LIMIT
	} {
		r := good
		change(&r)
		put(r.encode())
		s.look(patience + 2) // the last may still go on, the one before is when it would kill
		heldBy(t, path, "by process "+strconv.Itoa(r.pid))
		if got := strings.Count(s.log.String(), "left alone"); got != i+1 {
			t.Errorf("got %d complaints, want %d\n%s", got, i+1, &s.log)
		}
	}
	put([]byte("garbage"))
	s.look(patience + 2)
	heldBy(t, path, "not known")
	put(good.encode())
	s.owns(true)
	o.killed()
}

func TestStandbyIsCancelled(t *testing.T) {
	netnstest.LeakCheck(t)
	path := inDir(t, leasePath(t))
	o := owner(t, path)
	s := standBy(t, path)
	s.look(1)
	enough := errors.New("enough")
	s.cancel(enough)
	if err := <-s.result; !errors.Is(err, enough) {
		t.Fatalf("got %v, want the cause of the context", err)
	}
	o.does("release", fine)
	// The thread that is left gives the lock up when it gets it.
	standBy(t, path).owns(false)
}

// Whatever happens to owners, and however many wait, there is one.
func TestD3_NeverTwoOwners(t *testing.T) {
	netnstest.LeakCheck(t)
	path := inDir(t, leasePath(t))
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	acquired := make(chan *proc, 100)
	var readers sync.WaitGroup
	defer readers.Wait()
	all := map[*proc]bool{}
	more := func() {
		p := spawn(t, path, "standby")
		all[p] = true
		readers.Go(func() {
			if line, _ := p.out.ReadString('\n'); line == "acquired\n" {
				acquired <- p
			}
		})
	}
	for range 4 {
		more()
	}
	for range 25 {
		var p *proc
		select {
		case p = <-acquired:
		case <-time.After(generous):
			t.Fatal("nobody owns the lease")
		}
		heldBy(t, path, "held")
		select {
		case q := <-acquired:
			t.Fatalf("processes %d and %d own the lease", p.pid(), q.pid())
		default:
		}
		if random.IntN(2) == 0 {
			p.does("renew", fine)
		}
		switch random.IntN(3) {
		case 0:
			p.does("release", fine)
		case 1:
			p.stop()
		}
		p.signal(unix.SIGKILL)
		_ = p.cmd.Wait()
		delete(all, p)
		more()
	}
	for p := range all {
		_ = p.cmd.Process.Kill()
	}
}

// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/discovery"
	"github.com/ebbproxy/ebb/probes"
)

// exit is how CMD ended.
type exit struct {
	code  int  // CMD's own code, or 128+N for signal N
	known bool // false: CMD was not our child and the kernel could not tell
	err   error
}

func (e exit) String() string {
	switch {
	case !e.known:
		return "exit status unknown"
	case e.code > 128 && e.code < 128+65:
		return fmt.Sprintf("killed by signal %d (%s)", e.code-128, unix.SignalName(syscall.Signal(e.code-128)))
	}
	return fmt.Sprintf("exit status %d", e.code)
}

// process is the supervised CMD: the leader of its own process group and whatever descends from it.
// Its methods may be called from any goroutine.
type process struct {
	pid   int
	start uint64 // clock ticks, see probes.Process
	pidfd *os.File
	child bool // we are its parent and reap it

	// members lists its processes where they are not one tree; nil: the main process and its descendants.
	members  func() []int
	workload discovery.Workload // by which it was found; zero: it was not
	// foreign says that another manages its life: nothing of it is signalled but what a hook says, and nothing is killed.
	foreign bool

	once sync.Once
	done chan struct{}
	exit exit

	mu    sync.Mutex
	apart map[int]bool // processes below us that are not CMD's
}

// leaveOut says that a process below us is not CMD's: it is neither looked at, nor signalled, nor ended with it.
func (p *process) leaveOut(pid int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.apart == nil {
		p.apart = map[int]bool{}
	}
	p.apart[pid] = true
}

func (p *process) finish(e exit) {
	p.once.Do(func() {
		p.exit = e
		close(p.done)
	})
}

// lives tells whether the main process was not seen to end yet.
func (p *process) lives() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// exited is closed when CMD's main process has ended.
func (p *process) exited() <-chan struct{} { return p.done }

// signal sends sig to CMD's main process. A process that is gone is no error: it has what it should have.
func (p *process) signal(sig syscall.Signal) error {
	if p.pidfd == nil {
		return nil
	}
	err := control(p.pidfd, func(fd int) error { return unix.PidfdSendSignal(fd, sig, nil, 0) })
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("send %s to process %d: %w", unix.SignalName(sig), p.pid, err)
	}
	return nil
}

// signalGroup sends sig to CMD's process group.
func (p *process) signalGroup(sig syscall.Signal) error {
	// The group outlives its leader as long as a member lives, so its number is not reused before.
	if err := unix.Kill(-p.pid, sig); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("send %s to process group %d: %w", unix.SignalName(sig), p.pid, err)
	}
	return nil
}

// killAll ends the group and every descendant that has left it.
func (p *process) killAll() error {
	var err error
	select {
	case <-p.done:
		// The group may be empty by now, and its number somebody else's.
	default:
		// Its main process by itself too: one that somebody else has started need not lead a group.
		err = errors.Join(p.signalGroup(unix.SIGKILL), p.signal(unix.SIGKILL))
	}
	for _, d := range p.descendants() {
		if d != p.pid {
			if kerr := unix.Kill(d, unix.SIGKILL); kerr != nil && !errors.Is(kerr, unix.ESRCH) {
				err = errors.Join(err, fmt.Errorf("kill process %d: %w", d, kerr))
			}
		}
	}
	return err
}

// descendants lists the living processes that are CMD's: its tree, and what was orphaned to us as the subreaper.
func (p *process) descendants() []int {
	if p.members != nil {
		pids := p.members()
		p.mu.Lock()
		defer p.mu.Unlock()
		return slices.DeleteFunc(pids, func(pid int) bool { return p.apart[pid] })
	}
	root := p.pid
	if p.child {
		root = os.Getpid() // orphans of CMD hang below us, and nothing else does
	}
	tree, err := probes.Tree(root)
	if err != nil {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	pids := make([]int, 0, len(tree))
	for _, q := range tree {
		if q.PID != os.Getpid() && !p.apart[q.PID] {
			pids = append(pids, q.PID)
		}
	}
	return pids
}

// has tells whether a process is one of descendants, by its ancestors alone. It is not for processes that members lists.
func (p *process) has(pid int) bool {
	if pid == os.Getpid() {
		return false
	}
	for pid > 1 && pid != os.Getpid() {
		p.mu.Lock()
		apart := p.apart[pid]
		p.mu.Unlock()
		if apart {
			return false
		}
		if pid == p.pid && p.lives() {
			return true
		}
		var err error
		if pid, err = probes.Parent(pid); err != nil {
			return false
		}
	}
	return p.child && pid == os.Getpid() // orphans of CMD hang below us, and nothing else does
}

// rest lists what CMD's main process has left behind.
func (p *process) rest() []int {
	return slices.DeleteFunc(p.descendants(), func(pid int) bool { return pid == p.pid })
}

// endRest asks what is left behind to end, once, since what that starts in order to end must be let do its work, and waits
// until nothing is left or ctx is over, whose cause it returns then.
func (p *process) endRest(ctx context.Context) error {
	for _, pid := range p.rest() {
		// One that cannot be asked is killed when the time is up, as one that does not listen is.
		_ = unix.Kill(pid, unix.SIGTERM)
	}
	for len(p.rest()) > 0 {
		if !wait(ctx, 20*time.Millisecond) {
			return context.Cause(ctx)
		}
	}
	return nil
}

// startProcess starts argv in its own process group with our standard streams, and makes the
// caller a subreaper, so that no descendant of CMD escapes the watch or is left a zombie.
func startProcess(argv, env []string, stdin, stdout, stderr *os.File) (*process, error) {
	path, err := exec.LookPath(argv[0])
	switch {
	case errors.Is(err, fs.ErrPermission), errors.Is(err, unix.EISDIR):
		return nil, fmt.Errorf("%w: %s", ErrNotExecutable, argv[0])
	case err != nil && !errors.Is(err, exec.ErrDot):
		return nil, fmt.Errorf("%w: %s", ErrNotFound, argv[0])
	}
	path, argv = activated(path, argv, env)
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("become subreaper: %w", err)
	}
	pidfd := -1
	pid, _, err := syscall.StartProcess(path, argv, &syscall.ProcAttr{
		Env:   env,
		Files: []uintptr{stdin.Fd(), stdout.Fd(), stderr.Fd()},
		Sys:   &syscall.SysProcAttr{Setpgid: true, PidFD: &pidfd},
	})
	runtime.KeepAlive(stdin) // its finalizer would close what CMD is to inherit
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("%w: %s", ErrNotFound, argv[0])
	case err != nil:
		return nil, fmt.Errorf("%w: %s: %w", ErrNotExecutable, argv[0], err)
	}
	if pidfd < 0 {
		if pidfd, err = unix.PidfdOpen(pid, 0); err != nil {
			return nil, errors.Join(fmt.Errorf("open pidfd: %w", err), unix.Kill(pid, unix.SIGKILL))
		}
	}
	p := &process{pid: pid, child: true, pidfd: os.NewFile(uintptr(pidfd), "pidfd"), done: make(chan struct{})}
	// It may have ended already: as long as it is not reaped, it can be asked.
	if p.start, err = probes.Started(pid); err != nil {
		return nil, errors.Join(err, p.signal(unix.SIGKILL), p.pidfd.Close())
	}
	return p, nil
}

// adoptProcess takes over a CMD that an earlier owner started and that is still the same process.
func adoptProcess(pid int, start uint64) (*process, bool) {
	// Non-blocking, so that the runtime waits for it and not a thread.
	pidfd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.EINVAL) { // before Linux 5.10
		pidfd, err = unix.PidfdOpen(pid, 0)
	}
	if err != nil {
		return nil, false
	}
	// The check comes after the open: the descriptor keeps the process it names, and if the pid had been
	// reused before the open, the start time says so.
	if !probes.Alive(pid, start) {
		unix.Close(pidfd)
		return nil, false
	}
	return &process{pid: pid, start: start, pidfd: os.NewFile(uintptr(pidfd), "pidfd"), done: make(chan struct{})}, true
}

// watch blocks until CMD's main process has ended or ctx is over. Where CMD is our child it also reaps every
// other child, as a subreaper and as PID 1 must.
func (p *process) watch(ctx context.Context) {
	if !p.child {
		p.watchPidfd(ctx)
		return
	}
	sigs := make(chan os.Signal, 1)
	signal.Notify(sigs, unix.SIGCHLD)
	defer signal.Stop(sigs)
	for {
		p.reap()
		select {
		case <-sigs:
		case <-ctx.Done():
			return
		}
	}
}

func (p *process) reap() {
	for {
		var ws unix.WaitStatus
		pid, err := unix.Wait4(-1, &ws, unix.WNOHANG, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
		if pid == p.pid {
			p.finish(exit{code: exitCode(ws), known: true})
		}
	}
}

func exitCode(ws unix.WaitStatus) int {
	if ws.Signaled() {
		return 128 + int(ws.Signal())
	}
	return ws.ExitStatus()
}

// watchPidfd waits for a process that is not our child. Its exit status is asked from the pidfd, which kernels
// since 6.15 answer (PIDFD_INFO_EXIT, commit 7477d7dce48a); elsewhere it stays unknown.
func (p *process) watchPidfd(ctx context.Context) {
	if p.pidfd == nil {
		return
	}
	if err := readable(ctx, p.pidfd); err != nil {
		if ctx.Err() == nil {
			p.finish(exit{err: fmt.Errorf("wait for process %d: %w", p.pid, err)})
		}
		return
	}
	// A zombie shows its status in /proc; the pidfd tells it once the parent, whoever that is now, has reaped it.
	code, known := zombieExit(p.pid, p.start)
	for i := 0; !known && i < 20 && wait(ctx, 5*time.Millisecond); i++ {
		code, known = pidfdExit(p.pidfd)
	}
	p.finish(exit{code: code, known: known})
}

// control runs do on the descriptor of f, which stays in the care of the runtime.
func control(f *os.File, do func(fd int) error) error {
	rc, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var done error
	if err := rc.Control(func(fd uintptr) { done = do(int(fd)) }); err != nil {
		return err
	}
	return done
}

// readable waits until f can be read, or ctx ends.
func readable(ctx context.Context, f *os.File) error {
	rc, err := f.SyscallConn()
	if err != nil {
		return err
	}
	// The deadline that ended an earlier wait is over.
	if err := f.SetReadDeadline(time.Time{}); err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { _ = f.SetReadDeadline(time.Unix(1, 0)) })()
	var polled error
	err = rc.Read(func(fd uintptr) bool {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, 0)
		switch {
		case errors.Is(err, unix.EINTR), err == nil && n == 0:
			return false
		case err != nil:
			polled = err
		case fds[0].Revents&unix.POLLNVAL != 0:
			polled = unix.EBADF
		}
		return true
	})
	return errors.Join(err, polled)
}

// close releases the pidfd. The process is left alone.
func (p *process) close() error {
	if p.pidfd == nil {
		return nil
	}
	return p.pidfd.Close()
}

// zombieExit reads how a process ended that nobody has reaped: field 52 of /proc/PID/stat (proc(5)), which shows a status
// as wait does to whoever may trace it.
func zombieExit(pid int, start uint64) (code int, known bool) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, false
	}
	return parseZombie(string(b), start)
}

// parseZombie reads a line of /proc/PID/stat. The command's name, in parentheses, may hold anything.
func parseZombie(stat string, start uint64) (code int, known bool) {
	end := strings.LastIndexByte(stat, ')')
	if end < 0 {
		return 0, false
	}
	f := strings.Fields(stat[end+1:]) // from field 3 on
	if len(f) < 50 || f[0] != "Z" || f[19] != strconv.FormatUint(start, 10) {
		return 0, false
	}
	status, err := strconv.ParseUint(f[49], 10, 32)
	if err != nil {
		return 0, false
	}
	return exitCode(unix.WaitStatus(status)), true
}

// pidfdExit asks the kernel how the process behind fd ended.
func pidfdExit(pidfd *os.File) (code int, known bool) {
	info := unix.PidfdInfo{Mask: unix.PIDFD_INFO_EXIT}
	err := control(pidfd, func(fd int) error { return unix.IoctlPidfdInfo(fd, &info) })
	if err != nil || info.Mask&unix.PIDFD_INFO_EXIT == 0 {
		return 0, false
	}
	return exitCode(unix.WaitStatus(info.Exit_code)), true
}

// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// The descriptors that a relay process inherits.
const (
	fdListener = 3
	fdControl  = 4
)

// Arg is the argument of this binary that makes it a relay process.
const Arg = "relay"

// Start starts a relay process for a listener that takes connections already, in the network namespace of the calling
// thread, and configures it. The listener stays the caller's, who closes it: from then on the process alone keeps it
// open. The error wraps ErrInUse if one of that name is alive.
//
// The process is a child of the caller until that ends. Whoever lists the caller's descendants as somebody else's has to
// leave out PID.
func Start(ctx context.Context, listener *os.File, o Options) (_ *Process, err error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Exe == "" {
		// Not a path, behind which a newer version may be already.
		o.Exe = "/proc/" + strconv.Itoa(os.Getpid()) + "/exe"
	}
	if !o.Until.After(time.Now()) {
		return nil, fmt.Errorf("start relay %s: its time, until %v, is over", o.Name, o.Until)
	}
	path := Socket(o.RunDir, o.Name)
	control, err := bind(path)
	if err != nil {
		return nil, fmt.Errorf("start relay %s: %w", o.Name, err)
	}
	defer func() {
		err = errors.Join(err, control.Close())
		if err != nil {
			err = errors.Join(err, removeStale(path))
		}
	}()
	p, err := launch(ctx, path, listener, control, o)
	if err != nil {
		return nil, fmt.Errorf("start relay %s: %w", o.Name, err)
	}
	o.Log.Info("relay started", "backend", o.Name, "pid", p.pid, "place", string(p.place))
	return p, nil
}

// launch tries the places from the best on.
func launch(ctx context.Context, path string, listener, control *os.File, o Options) (*Process, error) {
	var tried []error
	for _, at := range places(o) {
		p, err := at.launch(ctx, path, listener, control, o)
		if err == nil {
			return p, nil
		}
		tried = append(tried, fmt.Errorf("%s: %w", at.place, err))
		if ctx.Err() != nil {
			break
		}
		o.Log.Info("no relay could be started there", "backend", o.Name, "place", string(at.place), "err", err)
	}
	return nil, errors.Join(tried...)
}

// site is one way to start the process.
type site struct {
	place Place
	argv  []string // what to execute, the binary and its argument included
	// prepare makes the cgroup that the process begins in; nil: the caller's.
	prepare func() (*os.File, error)
}

// systemd is there if it is the system's manager, sd_booted(3).
var systemd = "/run/systemd/system"

func places(o Options) []site {
	self := []string{o.Exe, Arg}
	var out []site
	if _, err := os.Stat(systemd); err == nil {
		if run, err := exec.LookPath("systemd-run"); err == nil {
			// A scope is made for the process that asks, which then becomes the command: descriptors and pid stay.
			unit := "ebb-relay-" + o.Name + "-" + strconv.FormatInt(time.Now().UnixNano(), 36)
			out = append(out, site{PlaceScope, append([]string{run, "--scope", "--quiet", "--collect", "--no-ask-password", "--unit", unit, "--"}, self...), nil})
		}
	}
	if dir, err := besideCgroup(o.Name); err == nil {
		out = append(out, site{PlaceCgroup, self, func() (*os.File, error) { return makeCgroup(dir) }})
	}
	return append(out, site{PlaceBeside, self, nil})
}

// launch starts the process and configures it.
func (at site) launch(ctx context.Context, path string, listener, control *os.File, o Options) (_ *Process, err error) {
	cmd := exec.Command(at.argv[0], at.argv[1:]...)
	if at.argv[0] == o.Exe {
		cmd.Args[0] = "ebb"
	}
	cmd.Env = os.Environ()
	cmd.Stderr = nil
	if o.Stderr != nil {
		cmd.Stderr = o.Stderr
	}
	cmd.ExtraFiles = []*os.File{listener, control}
	// A session of its own: it gets no signal of the caller's terminal or group.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if at.prepare != nil {
		dir, err := at.prepare()
		if err != nil {
			return nil, err
		}
		defer dir.Close()
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(dir.Fd())
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("execute %s: %w", at.argv[0], err)
	}
	p := &Process{name: o.Name, path: path, pid: cmd.Process.Pid, place: at.place, done: make(chan struct{})}
	err = p.watch()
	// From here on the pidfd tells of it, and reaps it.
	if rerr := cmd.Process.Release(); rerr != nil {
		err = errors.Join(err, rerr)
	}
	if p.pidfd == nil {
		return nil, errors.Join(err, unix.Kill(p.pid, unix.SIGKILL))
	}
	if err == nil {
		err = p.reach(ctx)
	}
	if err == nil {
		err = p.configure(ctx, o)
	}
	if err != nil {
		kerr := p.Kill()
		<-p.done
		return nil, errors.Join(err, kerr, p.Close())
	}
	return p, nil
}

// reach connects as soon as the process listens on its control socket.
func (p *Process) reach(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, startTimeout, errors.New("it does not answer on its control socket"))
	defer cancel()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		conn, err := dial(ctx, p.path)
		if err == nil {
			p.mu.Lock()
			p.conn = conn
			p.mu.Unlock()
			return nil
		}
		if !errors.Is(err, unix.ECONNREFUSED) {
			return err
		}
		select {
		case <-p.done:
			return fmt.Errorf("process %d: %w before it could be told what to do", p.pid, ErrEnded)
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}

// startTimeout bounds the start of a process on a machine that is very busy.
const startTimeout = 10 * time.Second

func (p *Process) configure(ctx context.Context, o Options) error {
	_, err := p.do(ctx, request{Op: opConfigure, Config: &config{
		Name: o.Name, Place: p.place, Peers: o.Peers, MaxConnections: o.MaxConnections, DialTimeout: o.DialTimeout,
		IdleTimeout: o.IdleTimeout, RetireAfter: o.RetireAfter, Park: o.Park, Health: o.Health, Parked: o.Parked, Until: o.Until, OrphanFor: o.OrphanFor,
	}}, -1)
	return err
}

// maxSocketPath is what sun_path holds without its final zero byte (unix(7)).
const maxSocketPath = 107

// bind makes the control socket, which the process will listen on: until then a connect is refused.
func bind(path string) (*os.File, error) {
	if len(path) > maxSocketPath {
		return nil, fmt.Errorf("bind %s: the path has %d bytes, a socket's may have %d; choose a shorter name or run directory", path, len(path), maxSocketPath)
	}
	if err := removeStale(path); err != nil {
		return nil, err
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open control socket: %w", err)
	}
	f := os.NewFile(uintptr(fd), path)
	// The mode of the file is that of the socket at its bind, less the umask.
	err = unix.Fchmod(fd, 0o600)
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrUnix{Name: path})
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("bind %s: %w", path, err), f.Close())
	}
	return f, nil
}

// removeStale removes the socket at path if nobody listens on it.
func removeStale(path string) error {
	fi, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if fi.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("%s exists and is not a socket; remove it", path)
	}
	c, err := dial(context.Background(), path)
	switch {
	case err == nil:
		return errors.Join(fmt.Errorf("%s: %w", path, ErrInUse), c.Close())
	case errors.Is(err, unix.EAGAIN):
		return fmt.Errorf("%s: %w", path, ErrInUse) // a full backlog is alive
	case errors.Is(err, unix.ECONNREFUSED):
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove stale socket: %w", err)
		}
		return nil
	}
	return fmt.Errorf("look at control socket: %w", err)
}

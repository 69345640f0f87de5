// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/proxy"
)

// Place says where a relay process lives, and so what it survives.
type Place string

// The places, the best first.
const (
	// PlaceScope is a systemd scope of its own: the relay survives the kill and the restart of its owner's unit.
	PlaceScope Place = "scope"
	// PlaceCgroup is a cgroup of its own beside the owner's: the relay survives what kills the owner's cgroup.
	PlaceCgroup Place = "cgroup"
	// PlaceBeside is the owner's own cgroup: the relay survives its owner, but not the end of the unit or container.
	PlaceBeside Place = "beside"
)

// Options say what a relay process is to be. The zero value of a field is its documented default.
type Options struct {
	Name   string // of the backend; the control socket is RunDir/run/Name.relay
	RunDir string
	Exe    string // default: this binary

	// Until is when the rule that sends connections there ends. From then on a relay that nobody owns ends as soon as
	// it carries nothing. It must be in the future.
	Until time.Time
	// OrphanFor is how much longer it waits for a next owner then; default 10 s.
	OrphanFor time.Duration

	Peers          []proxy.Peer
	MaxConnections int           // default proxy.DefaultMaxConnections
	DialTimeout    time.Duration // default proxy.DefaultDialTimeout
	IdleTimeout    time.Duration // default none
	RetireAfter    time.Duration // default none; see proxy.Options
	Park           proxy.ParkOptions
	Health         *proxy.Health
	Parked         bool // begin with Park

	Stderr *os.File     // of the process; nil: /dev/null
	Log    *slog.Logger // nil discards
}

// Process is the owner's end of a relay process. Its methods may be called from any goroutine. An error wraps ErrEnded
// if the process has ended, ErrCommand if it did not do what it was told.
type Process struct {
	name, path string
	pid        int
	pidfd      *os.File
	place      Place
	done       chan struct{}

	mu     sync.Mutex // one command at a time
	conn   *net.UnixConn
	closed bool
}

// Socket is the path of the control socket of the relay of a backend.
func Socket(runDir, name string) string { return filepath.Join(runDir, "run", name+".relay") }

// commandTimeout bounds a command whose context has no deadline. The relay answers in microseconds.
const commandTimeout = 5 * time.Second

// Find reaches the relay of a backend that an earlier owner has left. The error wraps ErrNone if there is none; what a dead one
// has left is removed then.
func Find(ctx context.Context, runDir, name string) (*Process, error) {
	path := Socket(runDir, name)
	conn, err := dial(ctx, path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		removeCgroup(name)
		return nil, fmt.Errorf("find relay %s: %w", name, ErrNone)
	case errors.Is(err, unix.ECONNREFUSED):
		removeCgroup(name)
		return nil, errors.Join(fmt.Errorf("find relay %s: %w", name, ErrNone), removeStale(path))
	case err != nil:
		return nil, fmt.Errorf("find relay %s: %w", name, err)
	}
	p := &Process{name: name, path: path, conn: conn, done: make(chan struct{})}
	if p.pid, err = peerPID(conn); err == nil {
		err = p.watch()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("find relay %s: %w", name, err), conn.Close())
	}
	s, err := p.Stats(ctx)
	if err != nil {
		if errors.Is(err, ErrEnded) {
			err = ErrNone
		}
		return nil, errors.Join(fmt.Errorf("find relay %s: %w", name, err), p.Close())
	}
	p.place = s.Place
	return p, nil
}

func dial(ctx context.Context, path string) (*net.UnixConn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unixpacket", path)
	if err != nil {
		return nil, err
	}
	return c.(*net.UnixConn), nil
}

// peerPID is the process that listens: of a connection made, SO_PEERCRED tells who called listen(2) (unix(7)), which is
// the relay itself.
func peerPID(c *net.UnixConn) (int, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var inner error
	if err := raw.Control(func(fd uintptr) {
		cred, inner = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return 0, err
	}
	if inner != nil {
		return 0, fmt.Errorf("tell who listens: %w", inner)
	}
	if uid := os.Geteuid(); int(cred.Uid) != uid {
		return 0, fmt.Errorf("tell who listens: user %d, not %d", cred.Uid, uid)
	}
	return int(cred.Pid), nil
}

// do sends a command and reads its answer.
func (p *Process) do(ctx context.Context, q request, fd int) (*Stats, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	q.Version = protocolVersion
	deadline, ok := ctx.Deadline()
	if limit := time.Now().Add(commandTimeout); !ok || limit.Before(deadline) {
		deadline = limit
	}
	a, err := p.exchange(ctx, q, fd, deadline)
	if err != nil {
		select {
		case <-p.done:
			return nil, fmt.Errorf("%s: %w", q.Op, ErrEnded)
		default:
		}
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, fmt.Errorf("%w %s to process %d: %w", ErrCommand, q.Op, p.pid, err)
	}
	if a.Error != "" {
		return nil, fmt.Errorf("%w %s: %s", ErrCommand, q.Op, a.Error)
	}
	return a.Stats, nil
}

func (p *Process) exchange(ctx context.Context, q request, fd int, deadline time.Time) (answer, error) {
	var a answer
	if p.closed {
		return a, net.ErrClosed
	}
	if p.conn == nil {
		var err error
		if p.conn, err = dial(ctx, p.path); err != nil {
			return a, err
		}
		if pid, err := peerPID(p.conn); err != nil || pid != p.pid {
			err = errors.Join(err, fmt.Errorf("process %d listens there now", pid), p.conn.Close())
			p.conn = nil
			return a, err
		}
	}
	conn := p.conn
	if err := conn.SetDeadline(deadline); err != nil {
		return a, err
	}
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	err := send(conn, q, fd)
	b := make([]byte, maxPacket)
	n := 0
	if err == nil {
		var fds []int
		n, fds, err = receive(conn, b)
		closeAll(fds)
	}
	if err == nil && n == 0 {
		err = net.ErrClosed
	}
	if err == nil {
		err = json.Unmarshal(b[:n], &a)
	}
	if err != nil {
		// An answer may still be on its way: what is read next would be taken for that of the next command.
		err = errors.Join(err, conn.Close())
		p.conn = nil
	}
	return a, err
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

// PID is the relay's process.
func (p *Process) PID() int { return p.pid }

// Place says where the process lives.
func (p *Process) Place() Place { return p.place }

// SetPeers replaces the peers that connections are carried to; none is possible, and then connections are refused unless
// they are parked.
func (p *Process) SetPeers(ctx context.Context, peers []proxy.Peer) error {
	_, err := p.do(ctx, request{Op: opPeers, Peers: peers}, -1)
	return err
}

// Adopt gives an accepted connection to the relay. The descriptor stays the caller's, who closes it.
func (p *Process) Adopt(ctx context.Context, fd int) error {
	_, err := p.do(ctx, request{Op: opAdopt}, fd)
	return err
}

// Park lets connections wait from now on, within what Options.Park allows.
func (p *Process) Park(ctx context.Context) error {
	_, err := p.do(ctx, request{Op: opPark}, -1)
	return err
}

// Release carries what is parked to peers, paced; without peers to those that are set. Connections that come meanwhile
// wait behind: Stats tells when nothing is parked any more, and not before that connections may go past the relay again.
func (p *Process) Release(ctx context.Context, peers ...proxy.Peer) error {
	_, err := p.do(ctx, request{Op: opRelease, Peers: peers}, -1)
	return err
}

// Extend moves Options.Until to a later moment: another drain, or a longer one, uses the same relay. An earlier one
// changes nothing.
func (p *Process) Extend(ctx context.Context, until time.Time) error {
	_, err := p.do(ctx, request{Op: opExtend, Until: until}, -1)
	return err
}

// LetGo lets go sooner of connections that are idle for moments, see proxy.Relay: for when nothing new is to come.
func (p *Process) LetGo(ctx context.Context) error {
	_, err := p.do(ctx, request{Op: opLetGo}, -1)
	return err
}

// Stats tells what the relay has done and holds.
func (p *Process) Stats(ctx context.Context) (Stats, error) {
	s, err := p.do(ctx, request{Op: opStats}, -1)
	if err != nil {
		return Stats{}, err
	}
	if s == nil {
		return Stats{}, fmt.Errorf("%w %s: the answer has none", ErrCommand, opStats)
	}
	return *s, nil
}

// Stop has the relay accept no more and end when it carries nothing; see Done. The rule that sends connections there has to
// be gone before: the listener closes when none has come for a moment. Its name is free at once.
func (p *Process) Stop(ctx context.Context) error {
	_, err := p.do(ctx, request{Op: opStop}, -1)
	if errors.Is(err, ErrEnded) {
		return nil
	}
	return err
}

// Kill ends the process at once: what it carries is reset on both sides.
func (p *Process) Kill() error {
	p.mu.Lock()
	closed := p.closed
	p.mu.Unlock()
	if closed {
		return fmt.Errorf("kill relay: %w", fs.ErrClosed)
	}
	var err error
	raw, rerr := p.pidfd.SyscallConn()
	if rerr != nil {
		return fmt.Errorf("kill relay: %w", rerr)
	}
	if rerr := raw.Control(func(fd uintptr) { err = unix.PidfdSendSignal(int(fd), unix.SIGKILL, nil, 0) }); rerr != nil {
		return fmt.Errorf("kill relay: %w", rerr)
	}
	if err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("kill relay %d: %w", p.pid, err)
	}
	return nil
}

// Done is closed when the process has ended, or when Close was called.
func (p *Process) Done() <-chan struct{} { return p.done }

// Close gives the relay up without ending it. It may be called again.
func (p *Process) Close() error {
	err := p.pidfd.Close()
	if errors.Is(err, fs.ErrClosed) {
		return nil
	}
	<-p.done
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	if p.conn != nil {
		err = errors.Join(err, p.conn.Close())
		p.conn = nil
	}
	return err
}

// watch waits for the end of the process.
func (p *Process) watch() error {
	// Non-blocking, so that the runtime's poller waits for it and no thread.
	fd, err := unix.PidfdOpen(p.pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return fmt.Errorf("open pidfd of process %d: %w", p.pid, err)
	}
	p.pidfd = os.NewFile(uintptr(fd), "pidfd")
	raw, err := p.pidfd.SyscallConn()
	if err != nil {
		return errors.Join(fmt.Errorf("watch process %d: %w", p.pid, err), p.pidfd.Close())
	}
	go func() {
		defer close(p.done)
		ended := false
		// The error is that of a Close, and the end of watching either way.
		_ = raw.Read(func(fd uintptr) bool {
			fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			n, err := unix.Poll(fds, 0)
			if n < 1 || err != nil {
				return false
			}
			// Reaped, if it is our child and nobody else has done so.
			unix.Waitid(unix.P_PIDFD, int(fd), nil, unix.WEXITED|unix.WNOHANG, nil)
			ended = true
			return true
		})
		if ended {
			removeCgroup(p.name)
		}
	}()
	return nil
}

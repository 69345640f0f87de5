// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/proxy"
)

const (
	// orphanFor is how long a relay waits for its first owner, and by default for the next after Options.Until.
	orphanFor = 10 * time.Second

	// calmFor is how long no connection must have come before a relay that is told to stop closes its listener: the rule
	// has gone before, but a handshake that it let begin may take a retransmitted SYN-ACK, which comes after 1 s.
	calmFor = 1100 * time.Millisecond
	// calmMax bounds that.
	calmMax = 5 * time.Second
)

// server is the relay process.
type server struct {
	log      *slog.Logger
	listener *os.File
	started  time.Time
	counts   counts
	wake     chan struct{} // something has changed that the life of the process depends on

	mu       sync.Mutex // guards what follows
	config   *config    // nil until configured
	cookie   uint64     // of the listener
	relay    *proxy.Relay
	stop     context.CancelFunc // of Serve
	served   chan struct{}      // closed when Serve has returned
	parking  bool
	stopping bool
	until    time.Time
	owners   int
	orphaned time.Time // when the last owner went
}

// Run is the relay process. It inherits its listener and its bound control socket as descriptors 3 and 4, gives up every
// privilege, and returns nil when it has carried what there was to carry. See Unprivileged, which does not return the
// first time.
func Run(ctx context.Context, log *slog.Logger) error {
	if err := Unprivileged(); err != nil {
		return err
	}
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	// What a terminal or a parent sends is not for it; a closed standard error is no reason to end.
	signal.Ignore(unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGPIPE, unix.SIGUSR1, unix.SIGUSR2)
	term := make(chan os.Signal, 1)
	signal.Notify(term, unix.SIGTERM)
	defer signal.Stop(term)
	listener, err := inherited(fdListener, unix.AF_UNSPEC)
	if err != nil {
		return err
	}
	control, err := inherited(fdControl, unix.AF_UNIX)
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	ln, remove, err := listenControl(control)
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	s := &server{log: log, listener: listener, started: time.Now(), wake: make(chan struct{}, 1), orphaned: time.Now()}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var sessions sync.WaitGroup
	sessions.Go(func() { s.accept(ctx, ln, &sessions) })
	s.live(ctx, term)
	// From here on its name is free: a new owner finds nothing, and may start another one while this one finishes.
	err = remove()
	s.empty(ctx)
	err = errors.Join(err, ln.Close())
	cancel()
	sessions.Wait()
	err = errors.Join(err, s.close())
	if s.config != nil && s.config.Place == PlaceCgroup {
		leaveCgroup(s.config.Name)
	}
	return err
}

// inherited checks a descriptor that the owner has left open for us.
func inherited(fd, family int) (*os.File, error) {
	domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	if err != nil {
		return nil, fmt.Errorf("look at descriptor %d: %w (`ebb relay` is started by the owner of a backend)", fd, err)
	}
	if family != unix.AF_UNSPEC && domain != family {
		return nil, fmt.Errorf("look at descriptor %d: its family is %d, want %d", fd, domain, family)
	}
	unix.CloseOnExec(fd)
	return os.NewFile(uintptr(fd), "inherited"), nil
}

// listenControl listens on the bound socket, which makes this process the one that SO_PEERCRED names. remove removes the
// socket's file if it is still its own.
func listenControl(control *os.File) (ln *net.UnixListener, remove func() error, err error) {
	defer func() { err = errors.Join(err, control.Close()) }()
	if err := unix.Listen(int(control.Fd()), 16); err != nil {
		return nil, nil, fmt.Errorf("listen on control socket: %w", err)
	}
	l, err := net.FileListener(control)
	if err != nil {
		return nil, nil, fmt.Errorf("listen on control socket: %w", err)
	}
	ln, ok := l.(*net.UnixListener)
	if !ok {
		return nil, nil, errors.Join(fmt.Errorf("listen on control socket: it is a %T", l), l.Close())
	}
	ln.SetUnlinkOnClose(false)
	path := ln.Addr().String()
	own, err := os.Lstat(path)
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("look at control socket: %w", err), ln.Close())
	}
	return ln, func() error {
		fi, err := os.Lstat(path)
		if err == nil && os.SameFile(fi, own) {
			err = os.Remove(path)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove control socket: %w", err)
		}
		return nil
	}, nil
}

// live returns when nothing more is to be accepted.
//
//	waiting ──configured──► serving ──told to stop, or time over and no owner──► calming ──nobody comes──► emptying ──► end
//	   └── no owner comes ──► end
func (s *server) live(ctx context.Context, term <-chan os.Signal) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		s.mu.Lock()
		next, over := s.next(time.Now())
		s.mu.Unlock()
		if over {
			break
		}
		timer.Reset(time.Until(next))
		select {
		case <-timer.C:
		case <-s.wake:
		case <-term:
			s.terminated()
		case <-ctx.Done():
			return
		}
	}
}

// next tells whether the time has come to accept no more, or when to look again. The caller holds mu.
func (s *server) next(now time.Time) (at time.Time, over bool) {
	if s.stopping {
		return now, true
	}
	if s.config != nil && s.isServed() {
		s.stopping = true // the listener has failed, and nothing comes any more
		return now, true
	}
	if s.owners > 0 {
		return now.Add(time.Hour), false // an owner that goes wakes us
	}
	at = s.orphaned.Add(orphanFor)
	if s.config != nil {
		at = s.orphaned
		if s.until.After(at) {
			at = s.until
		}
		at = at.Add(s.config.OrphanFor)
	}
	if now.Before(at) {
		return at, false
	}
	s.stopping = true
	return now, true
}

func (s *server) isServed() bool {
	select {
	case <-s.served:
		return true
	default:
		return false
	}
}

// terminated answers SIGTERM: an owner says by a command what is to be done, and a service manager that ends the owner's
// unit sends it to everybody at the moment at which late connections begin to come.
func (s *server) terminated() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.owners > 0 {
		s.log.Info("SIGTERM is left to the owner")
		return
	}
	s.stopping = true
}

// empty goes on accepting until nobody comes any more, closes the listener, and waits until nothing is carried.
func (s *server) empty(ctx context.Context) {
	s.mu.Lock()
	r, stop, served := s.relay, s.stop, s.served
	s.mu.Unlock()
	if r == nil {
		return
	}
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	begun, calm, seen := time.Now(), time.Now(), r.Stats().Accepted
	for time.Since(calm) < calmFor && time.Since(begun) < calmMax && !s.isServed() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if n := r.Stats().Accepted; n != seen {
			calm, seen = time.Now(), n
		}
	}
	stop()
	<-served
	// The relay's own duplicate has gone with Serve, so this closes it.
	if err := s.listener.Close(); err != nil {
		s.log.Warn("close listener", "err", err)
	}
	for {
		// One that is adopted between the two makes it not idle again.
		select {
		case <-r.Idle():
		case <-ctx.Done():
			return
		}
		s.mu.Lock()
		if r.Stats().Active == 0 {
			s.relay = nil // nothing is adopted any more
			s.mu.Unlock()
			if err := r.Close(); err != nil {
				s.log.Warn("close relay", "err", err)
			}
			return
		}
		s.mu.Unlock()
	}
}

// close releases what a process that ends early holds.
func (s *server) close() error {
	s.mu.Lock()
	r, stop, served := s.relay, s.stop, s.served
	s.relay = nil
	s.mu.Unlock()
	var err error
	if r != nil {
		stop()
		<-served
		err = r.Close()
	}
	if e := s.listener.Close(); e != nil && !errors.Is(e, fs.ErrClosed) {
		err = errors.Join(err, e)
	}
	return err
}

func (s *server) changed() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// accept serves control connections until ln is closed. Whoever may write to the socket's file is an owner.
func (s *server) accept(ctx context.Context, ln *net.UnixListener, sessions *sync.WaitGroup) {
	for {
		c, err := ln.AcceptUnix()
		if err != nil {
			if ctx.Err() == nil && !errors.Is(err, net.ErrClosed) {
				s.log.Error("accept on control socket", "err", err)
				// Descriptors are exhausted, most likely: those that are carried will end.
				timer := time.NewTimer(100 * time.Millisecond)
				select {
				case <-timer.C:
					continue
				case <-ctx.Done():
				}
			}
			return
		}
		s.mu.Lock()
		s.owners++
		s.mu.Unlock()
		s.changed()
		sessions.Go(func() {
			stop := context.AfterFunc(ctx, func() { c.Close() })
			defer stop()
			s.session(c)
			c.Close()
			s.mu.Lock()
			s.owners--
			s.orphaned = time.Now()
			s.mu.Unlock()
			s.changed()
		})
	}
}

// session answers the commands of one owner.
func (s *server) session(c *net.UnixConn) {
	b := make([]byte, maxPacket)
	for {
		n, fds, err := receive(c, b)
		if err != nil && n <= 0 {
			closeAll(fds)
			if !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) && !errors.Is(err, unix.ECONNRESET) {
				s.log.Warn("read command", "err", err)
			}
			return
		}
		if n == 0 {
			closeAll(fds)
			return
		}
		var a answer
		var q request
		if err == nil {
			q, err = decodeRequest(b[:n])
		}
		if err == nil {
			a.Stats, err = s.command(q, &fds)
		}
		closeAll(fds)
		if err != nil {
			a.Error = err.Error()
			s.log.Warn("command", "op", q.Op, "err", err)
		}
		if err := send(c, a, -1); err != nil {
			s.log.Warn("answer command", "op", q.Op, "err", err)
			return
		}
	}
}

// command does what an owner says. A descriptor that it keeps it takes out of fds.
func (s *server) command(q request, fds *[]int) (*Stats, error) {
	want := 0
	if q.Op == opAdopt {
		want = 1
	}
	if len(*fds) != want {
		return nil, fmt.Errorf("%s takes %d descriptors, got %d", q.Op, want, len(*fds))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if q.Op == opConfigure {
		return nil, s.configure(q.Config)
	}
	if s.config == nil {
		return nil, fmt.Errorf("%s before %s", q.Op, opConfigure)
	}
	if s.relay == nil {
		return nil, fmt.Errorf("%s: %w", q.Op, ErrEnded)
	}
	switch q.Op {
	case opPeers:
		return nil, s.relay.SetPeers(q.Peers)
	case opAdopt:
		fd := (*fds)[0]
		*fds = nil
		return nil, s.relay.Adopt(fd)
	case opPark:
		s.relay.Park()
		s.parking = true
		return nil, nil
	case opRelease:
		err := s.relay.Release(q.Peers...)
		s.parking = s.parking && err != nil
		return nil, err
	case opExtend:
		if q.Until.After(s.until) {
			s.until = q.Until
			s.changed()
		}
		return nil, nil
	case opLetGo:
		s.relay.LetGo()
		return nil, nil
	case opStats:
		return s.stats(), nil
	case opStop:
		s.stopping = true
		s.changed()
		return nil, nil
	}
	return nil, fmt.Errorf("%q is not a command", q.Op)
}

// configure begins to serve. The caller holds mu.
func (s *server) configure(c *config) error {
	switch {
	case c == nil:
		return errors.New("configure without a configuration")
	case s.config != nil:
		return errors.New("configured already")
	case c.Until.IsZero():
		return errors.New("configure without until")
	case c.OrphanFor < 0:
		return fmt.Errorf("configure with a negative time for orphans, %v", c.OrphanFor)
	}
	if c.OrphanFor == 0 {
		c.OrphanFor = orphanFor
	}
	cookie, err := checkListener(s.listener)
	if err != nil {
		return err
	}
	r, err := proxy.New(proxy.Options{
		Peers: c.Peers, MaxConnections: c.MaxConnections, DialTimeout: c.DialTimeout, IdleTimeout: c.IdleTimeout, RetireAfter: c.RetireAfter,
		Park: c.Park, Health: c.Health, Metrics: &s.counts, Log: s.log,
	})
	if err != nil {
		return err
	}
	if c.Parked {
		r.Park()
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan struct{})
	go func() {
		defer s.changed()
		defer close(served)
		if err := r.Serve(ctx, s.listener); err != nil {
			s.log.Error("serve", "err", err)
		}
	}()
	s.config, s.relay, s.stop, s.served, s.parking, s.until, s.cookie = c, r, cancel, served, c.Parked, c.Until, cookie
	s.changed()
	return nil
}

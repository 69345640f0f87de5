// SPDX-License-Identifier: Apache-2.0

package front

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/api"
)

// Kind is who may come in at an entrance, and for what.
type Kind string

// The kinds of entrances.
const (
	Operators Kind = "operators" // root, the core's user, and a group, over a Unix socket
	Apps      Kind = "apps"      // the processes of backends, over a Unix socket
	Remote    Kind = "remote"    // whoever has the credentials, over TCP
	Probes    Kind = "probes"    // anyone, for health and metrics alone
)

// Entrance is one address at which the front answers.
type Entrance struct {
	Kind     Kind
	Listener net.Listener // has a method File; stays the caller's
	GID      int          // of Operators
}

// Options of Serve. Source, Log and Entrances are required.
type Options struct {
	Source    api.Source
	Log       *api.Log
	Entrances []Entrance
	// Owns is the backend that a process belongs to; required for Apps.
	Owns        func(ctx context.Context, pid int) (backend string, ok bool)
	Credentials api.Credentials // of Remote; the files need be readable for the core alone
	Metrics     http.Handler    // GET /metrics; nil: none
	Audit       func(api.Audit) // nil: nobody
	Started     func(pid int)   // is told of each front; nil: nobody
	// Heard is told whenever something has come from a front that serves, which is so at least every few seconds; nil: nobody.
	Heard func()
	// Ended is told why a front has ended that should not have; nil: nobody.
	Ended  func(error)
	Logger *slog.Logger // nil discards
}

const (
	// startTimeout bounds the start of a process on a machine that is very busy.
	startTimeout = 15 * time.Second
	// stopTimeout is for a front that was told to stop: a Server lets answers under way finish for 5 s.
	stopTimeout = 7 * time.Second
	// A front that has ended is started again after the first pause, which doubles up to the longest while fronts do not
	// live longer than that.
	firstPause   = 100 * time.Millisecond
	longestPause = 10 * time.Second
)

// Serve has fronts serve the entrances until ctx is over: one at a time, and another one when it ends. It returns
// ErrUnavailable if the first one cannot be started; a later one that cannot is tried again, so that nobody who makes fronts
// fail gets the core to do their work. Close the log before ctx ends, so that its followers read it to its end.
func Serve(ctx context.Context, o Options) error {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	o.Source = api.Checked(o.Source)
	secrets, err := openSecrets(o.Credentials, firstFD+1+len(o.Entrances))
	if err != nil {
		return err
	}
	defer secrets.close()
	watching, stop := context.WithCancel(ctx)
	defer stop()
	go secrets.follow(watching, o.Logger)
	pause := firstPause
	for first := true; ; first = false {
		begun := time.Now()
		ready, err := serveOnce(ctx, o, secrets)
		switch {
		case ctx.Err() != nil:
			return err
		case first && !ready:
			return fmt.Errorf("%w: %w", ErrUnavailable, err)
		}
		if time.Since(begun) > longestPause {
			pause = firstPause
		}
		if o.Ended != nil {
			o.Ended(err)
		}
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return nil
		}
		pause = min(2*pause, longestPause)
	}
}

// session is one front as its core sees it.
type session struct {
	o     Options
	link  link
	slots chan struct{} // of maxCalls
	ready chan struct{} // closed when it serves
	calls sync.WaitGroup
}

// serveOnce starts a front and answers it until it ends or ctx is over. ready says whether it ever served.
func serveOnce(ctx context.Context, o Options, secrets *secrets) (ready bool, err error) {
	conn, p, err := start(o, secrets)
	if err != nil {
		return false, err
	}
	s := &session{o: o, link: link{conn: conn}, slots: make(chan struct{}, maxCalls), ready: make(chan struct{})}
	ctxCalls, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer func() {
		err = errors.Join(err, conn.Close())
		p.kill()
		<-p.done
		cancel()
		s.calls.Wait()
	}()
	snap := o.Log.Snapshot()
	h := &hello{UID: os.Geteuid(), Credentials: secrets.paths, Log: snap, Metrics: o.Metrics != nil}
	_, h.Sessions = o.Source.(api.Sessions)
	for _, e := range o.Entrances {
		h.Entrances = append(h.Entrances, entrance{e.Kind, e.GID})
	}
	if err := s.link.write(message{Hello: h}, maxAnswer); err != nil {
		return false, err
	}
	failed := make(chan error, 2)
	pumped := make(chan struct{})
	s.calls.Go(func() { failed <- s.listen(ctxCalls) })
	s.calls.Go(func() {
		defer close(pumped)
		if err := s.pump(ctxCalls, snap.Next); err != nil {
			failed <- err
		}
	})
	timer := time.NewTimer(startTimeout)
	defer timer.Stop()
	select {
	case <-s.ready:
		if o.Started != nil {
			o.Started(p.pid)
		}
	case err := <-failed:
		return false, p.why(err)
	case <-timer.C:
		return false, errors.New("it does not begin to serve")
	case <-ctx.Done():
		return false, nil
	}
	select {
	case err := <-failed:
		return true, p.why(err)
	case <-ctx.Done():
	}
	// In order: what the log holds, its end, and the stop.
	timer.Reset(stopTimeout)
	select {
	case <-pumped:
		if err := s.link.write(message{Stop: true}, maxAnswer); err != nil {
			return true, p.why(err)
		}
	case <-timer.C:
	}
	select {
	case <-failed: // it has closed its end
	case <-timer.C:
		return true, errors.New("the front does not stop, and is killed")
	}
	return true, nil
}

// pump sends events as they are published.
func (s *session) pump(ctx context.Context, next uint64) error {
	for sub := s.o.Log.Subscribe(next); ; {
		ev, err := sub.Next(ctx)
		switch {
		case errors.Is(err, api.ErrLogClosed):
			return s.link.write(message{Closed: true}, maxAnswer)
		case err != nil:
			return nil // it is over
		case ev.Type == api.EventLost:
			return errors.New("it is too slow for the events")
		}
		if err := s.link.write(message{Event: &ev}, maxAnswer); err != nil {
			return err
		}
	}
}

// listen answers calls until the socket is closed.
func (s *session) listen(ctx context.Context) error {
	for {
		var q call
		if err := s.link.read(&q, maxCall, corePatience); err != nil {
			return err
		}
		if s.o.Heard != nil {
			s.o.Heard()
		}
		switch q.Op {
		case opReady:
			select {
			case <-s.ready:
				return errors.New("it begins twice")
			default:
				close(s.ready)
			}
			continue
		case opPing:
			if err := s.answer(q.ID, struct{}{}, nil); err != nil {
				return err
			}
			continue
		}
		s.slots <- struct{}{}
		s.calls.Go(func() {
			defer func() { <-s.slots }()
			ctx, cancel := context.WithTimeout(ctx, callTimeout)
			defer cancel()
			v, err := s.do(ctx, q)
			// The reader sees it if the socket fails.
			if err := s.answer(q.ID, v, err); errors.Is(err, errTooLong) {
				_ = s.answer(q.ID, nil, err)
			}
		})
	}
}

func (s *session) answer(id uint64, v any, err error) error {
	a := &answer{ID: id}
	if err != nil {
		a.Error = failureOf(err)
	} else if a.Result, err = json.Marshal(v); err != nil {
		return fmt.Errorf("encode answer: %w", err)
	}
	return s.link.write(message{Answer: a}, maxAnswer)
}

// do is all that a front can have the core do.
func (s *session) do(ctx context.Context, q call) (any, error) {
	src := s.o.Source
	switch {
	case q.Op == opBackends:
		return boundBackends(src.Backends(ctx)), nil
	case q.Op == opBackend:
		b, err := src.Backend(ctx, q.Name)
		return boundBackends([]api.Backend{b})[0], err
	case q.Op == opStragglers:
		return src.Stragglers(ctx, q.Name, min(max(q.N, 1), 10_000))
	case q.Op == opDrain && q.Drain != nil:
		q.Drain.By = q.By
		return src.Drain(ctx, q.Name, *q.Drain)
	case q.Op == opUndrain && q.Undrain != nil:
		q.Undrain.By = q.By
		return src.Undrain(ctx, q.Name, *q.Undrain)
	case q.Op == opExtend && q.Extend != nil:
		q.Extend.By = q.By
		return src.Extend(ctx, q.Name, *q.Extend)
	case q.Op == opCut && q.Cut != nil:
		q.Cut.By = q.By
		return src.Cut(ctx, q.Name, *q.Cut)
	case q.Op == opDrains:
		return boundDrains(src.Drains(ctx)), nil
	case q.Op == opDrainByID:
		return src.DrainByID(ctx, q.Name)
	case q.Op == opReadyAll:
		return struct{}{}, src.Ready(ctx)
	case q.Op == opBackendReady:
		return struct{}{}, src.BackendReady(ctx, q.Name)
	case q.Op == opOwner && s.o.Owns != nil:
		name, _ := s.o.Owns(ctx, q.N)
		return name, nil
	case q.Session != nil:
		return s.session(ctx, q)
	case q.Op == opMetrics && s.o.Metrics != nil:
		return s.metrics(ctx)
	case q.Op == opAudit && q.Audit != nil && s.o.Audit != nil:
		a := q.Audit
		r := api.Audit{Time: time.Now(), UID: a.UID, PID: a.PID, By: a.By, Action: a.Action, Backend: a.Backend, Drain: a.Drain, Reason: a.Reason, Status: a.Status, Before: a.Before}
		if a.Err != "" {
			r.Err = errors.New(a.Err)
		}
		s.o.Audit(r)
		return struct{}{}, nil
	}
	return nil, fmt.Errorf("%q is not a call", q.Op)
}

// session asks what the process of a backend asks.
func (s *session) session(ctx context.Context, q call) (any, error) {
	src, ok := s.o.Source.(api.Sessions)
	c := q.Session
	switch {
	case !ok:
	case q.Op == opOpenSession && c.Open != nil:
		return src.OpenSession(ctx, q.Name, c.Process, *c.Open)
	case q.Op == opSessionCall && c.Call != nil:
		return src.SessionCall(ctx, q.Name, c.ID, c.Process, *c.Call)
	case q.Op == opSessionEvents:
		return src.SessionEvents(ctx, q.Name, c.ID, c.Process, c.From, c.Stream)
	}
	return nil, fmt.Errorf("%q is not a call", q.Op)
}

// metrics renders what Prometheus reads, in its text format.
func (s *session) metrics(ctx context.Context) (page, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "/metrics", nil)
	if err != nil {
		return page{}, err
	}
	req.Header.Set("Accept-Encoding", "gzip")
	w := &rendered{header: http.Header{}}
	s.o.Metrics.ServeHTTP(w, req)
	return page{max(w.status, http.StatusOK), w.header.Get("Content-Type"), w.header.Get("Content-Encoding"), w.body.Bytes()}, nil
}

// rendered is an http.ResponseWriter in memory.
type rendered struct {
	header http.Header
	status int
	body   bytes.Buffer
}

func (r *rendered) Header() http.Header         { return r.header }
func (r *rendered) WriteHeader(status int)      { r.status = status }
func (r *rendered) Write(b []byte) (int, error) { return r.body.Write(b) }

// process is a front that was started.
type process struct {
	pid  int
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended
	err  error         // how, once done is closed
}

func (p *process) kill() { _ = p.cmd.Process.Kill() } // it may have ended

// why joins how it has ended, if it has or does in a moment, to what was seen of that.
func (p *process) why(err error) error {
	t := time.NewTimer(time.Second)
	defer t.Stop()
	select {
	case <-p.done:
		return errors.Join(err, p.err)
	case <-t.C:
		return err
	}
}

// firstFD is the descriptor of the socket in a front; the listeners and then the secrets follow.
const firstFD = 3

// start executes a front with one end of a socket pair, the listeners and the secrets.
func start(o Options, secrets *secrets) (_ net.Conn, _ *process, err error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make a pair of sockets: %w", err)
	}
	own, its := os.NewFile(uintptr(pair[0]), "core"), os.NewFile(uintptr(pair[1]), "front")
	files := []*os.File{its}
	defer func() {
		err = errors.Join(err, own.Close())
		for _, f := range files {
			err = errors.Join(err, f.Close())
		}
	}()
	for _, e := range o.Entrances {
		l, ok := e.Listener.(interface{ File() (*os.File, error) })
		if !ok {
			return nil, nil, fmt.Errorf("hand over a %T: %w", e.Listener, errors.ErrUnsupported)
		}
		f, err := l.File()
		if err != nil {
			return nil, nil, fmt.Errorf("hand over listener: %w", err)
		}
		files = append(files, f)
	}
	p := &process{cmd: command(), done: make(chan struct{})}
	p.cmd.ExtraFiles = append(p.cmd.ExtraFiles, files...)
	p.cmd.ExtraFiles = append(p.cmd.ExtraFiles, secrets.files...)
	p.cmd.Stderr = os.Stderr
	// It dies with the thread that started it, which is kept for that: its end of the socket tells a front that listens,
	// and this one that does not.
	p.cmd.SysProcAttr.Pdeathsig = unix.SIGKILL
	started := make(chan error)
	go func() {
		runtime.LockOSThread() // and it ends with this goroutine
		err := p.cmd.Start()
		started <- err
		if err == nil {
			p.err = p.cmd.Wait()
			close(p.done)
		}
	}()
	err = <-started
	// What is handed over becomes blocking, for us as well, even where nobody takes it.
	for _, f := range files[1:] {
		err = errors.Join(err, unix.SetNonblock(int(f.Fd()), true))
	}
	if err != nil {
		if p.cmd.Process != nil {
			p.kill()
		}
		return nil, nil, fmt.Errorf("execute a front: %w", err)
	}
	p.pid = p.cmd.Process.Pid
	conn, err := net.FileConn(own)
	if err != nil {
		p.kill()
		return nil, nil, fmt.Errorf("talk to the front: %w", err)
	}
	return conn, p, nil
}

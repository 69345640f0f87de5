// SPDX-License-Identifier: Apache-2.0

package front

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/api"
)

// Main is the process of a front that serves. It inherits what start hands over, and returns when the core tells it to stop
// or has gone.
func Main(ctx context.Context, log *slog.Logger) error {
	denied, err := confine()
	if err != nil {
		return err
	}
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	if !denied {
		log.Info("the front runs without a filter of system calls: this kernel or architecture has none")
	}
	// It ends with its core, not when a service manager tells everybody to: the core has things to say until its end.
	signal.Ignore(unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGTERM, unix.SIGPIPE)
	f, err := inherited(firstFD)
	if err != nil {
		return err
	}
	conn, err := net.FileConn(f)
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("talk to the core: %w", err)
	}
	defer conn.Close()
	c := &client{link: link{conn: conn}, asked: map[uint64]chan<- *answer{}}
	var m message
	if err := c.link.read(&m, maxAnswer, patience); err != nil {
		return err
	}
	if m.Hello == nil {
		return errors.New("the core does not begin with a greeting")
	}
	return c.serve(ctx, m.Hello, log)
}

func inherited(fd int) (*os.File, error) {
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil {
		return nil, fmt.Errorf("look at descriptor %d: %w (`ebb front` is started by `ebb agent`)", fd, err)
	}
	unix.CloseOnExec(fd)
	return os.NewFile(uintptr(fd), "inherited"), nil
}

// serve answers at the entrances until the core says stop or is gone.
func (c *client) serve(ctx context.Context, h *hello, log *slog.Logger) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	events, err := api.NewLogOf(h.Log)
	if err != nil {
		return err
	}
	o := api.Options{Source: c, Log: events, Audit: c.audit, Logger: log}
	if h.Sessions {
		o.Source = sessionsClient{c}
	}
	if h.Metrics {
		o.Metrics = http.HandlerFunc(c.metrics)
	}
	srv, err := api.NewServer(o)
	if err != nil {
		return err
	}
	var served sync.WaitGroup
	for i, e := range h.Entrances {
		f, err := inherited(firstFD + 1 + i)
		if err != nil {
			return err
		}
		ln, err := net.FileListener(f)
		if err = errors.Join(err, f.Close()); err != nil {
			return fmt.Errorf("take over listener: %w", err)
		}
		var access api.Access
		serve := func() error { return srv.ServeAs(ctx, ln, access) }
		switch e.Kind {
		case Operators:
			access = api.OperatorsOf(h.UID, e.GID)
		case Apps:
			access = api.AppsOf(c.owner)
		case Remote:
			if access, err = api.Remote(h.Credentials, log); err != nil {
				return err
			}
		case Probes:
			serve = func() error { return srv.ServeProbes(ctx, ln) }
		default:
			return fmt.Errorf("%q is no kind of entrance", e.Kind)
		}
		served.Go(func() {
			if err := serve(); err != nil {
				log.Error("serve API", "address", ln.Addr().String(), "err", err)
				cancel(err)
			}
		})
	}
	go c.ping(ctx)
	if err := c.link.write(call{Op: opReady}, maxCall); err != nil {
		return err
	}
	go func() { cancel(c.listen(events)) }()
	<-ctx.Done()
	err = context.Cause(ctx)
	if errors.Is(err, errStop) {
		served.Wait()
		return nil
	}
	return err // and nobody is left to answer for
}

var (
	errStop = errors.New("the core says stop")
	errGone = errors.New("the core does not answer")
)

// client asks the core. It is an api.Source.
type client struct {
	link link

	mu    sync.Mutex
	last  uint64
	asked map[uint64]chan<- *answer // by id
}

var _ api.Source = (*client)(nil)

// listen takes in what the core says until it says stop (errStop) or is gone.
func (c *client) listen(events *api.Log) error {
	for {
		var m message
		if err := c.link.read(&m, maxAnswer, patience); err != nil {
			return err
		}
		switch {
		case m.Answer != nil:
			c.mu.Lock()
			ch := c.asked[m.Answer.ID]
			delete(c.asked, m.Answer.ID)
			c.mu.Unlock()
			if ch != nil { // else whoever asked has gone
				ch <- m.Answer
			}
		case m.Event != nil:
			if n := events.Publish(*m.Event); n != m.Event.Seq {
				return fmt.Errorf("event %d came in place of %d", m.Event.Seq, n)
			}
		case m.Closed:
			if err := events.Close(); err != nil {
				return err
			}
		case m.Stop:
			// What is under way is still answered.
			go func() { _ = c.listen(events) }()
			return errStop
		}
	}
}

// ping keeps the core from giving this process up, and has it answer, so that its silence is noticed.
func (c *client) ping(ctx context.Context) {
	tick := time.NewTicker(pingEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			_ = c.do(ctx, call{Op: opPing}, nil) // the reader sees it
		case <-ctx.Done():
			return
		}
	}
}

// do asks and waits for the answer, which goes into v unless that is nil.
func (c *client) do(ctx context.Context, q call, v any) error {
	ctx, cancel := context.WithTimeoutCause(ctx, callTimeout+patience, errGone)
	defer cancel()
	ch := make(chan *answer, 1)
	c.mu.Lock()
	c.last++
	q.ID = c.last
	c.asked[q.ID] = ch
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		delete(c.asked, q.ID)
		c.mu.Unlock()
	}()
	if err := c.link.write(q, maxCall); err != nil {
		return fmt.Errorf("ask the core: %w", err)
	}
	select {
	case a := <-ch:
		if a.Error != nil {
			return a.Error
		}
		if v == nil {
			return nil
		}
		return decode(a.Result, v)
	case <-ctx.Done():
		return fmt.Errorf("ask the core: %w", context.Cause(ctx))
	}
}

func ask[T any](ctx context.Context, c *client, q call) (v T, err error) {
	err = c.do(ctx, q, &v)
	return v, err
}

// Backends implements api.Source. It shows none if the core does not answer.
func (c *client) Backends(ctx context.Context) []api.Backend {
	bs, _ := ask[[]api.Backend](ctx, c, call{Op: opBackends}) // an end that is near
	return bs
}

// Backend implements api.Source.
func (c *client) Backend(ctx context.Context, name string) (api.Backend, error) {
	return ask[api.Backend](ctx, c, call{Op: opBackend, Name: name})
}

// Stragglers implements api.Source.
func (c *client) Stragglers(ctx context.Context, name string, n int) ([]api.Straggler, error) {
	return ask[[]api.Straggler](ctx, c, call{Op: opStragglers, Name: name, N: n})
}

// Drain implements api.Source.
func (c *client) Drain(ctx context.Context, name string, r api.DrainRequest) (api.Drain, error) {
	return ask[api.Drain](ctx, c, call{Op: opDrain, Name: name, By: r.By, Drain: &r})
}

// Undrain implements api.Source.
func (c *client) Undrain(ctx context.Context, name string, r api.UndrainRequest) (api.Drain, error) {
	return ask[api.Drain](ctx, c, call{Op: opUndrain, Name: name, By: r.By, Undrain: &r})
}

// Extend implements api.Source.
func (c *client) Extend(ctx context.Context, name string, r api.ExtendRequest) (api.Drain, error) {
	return ask[api.Drain](ctx, c, call{Op: opExtend, Name: name, By: r.By, Extend: &r})
}

// Cut implements api.Source.
func (c *client) Cut(ctx context.Context, name string, r api.CutRequest) (api.Drain, error) {
	return ask[api.Drain](ctx, c, call{Op: opCut, Name: name, By: r.By, Cut: &r})
}

// Drains implements api.Source. It shows none if the core does not answer.
func (c *client) Drains(ctx context.Context) []api.Drain {
	ds, _ := ask[[]api.Drain](ctx, c, call{Op: opDrains}) // an end that is near
	return ds
}

// DrainByID implements api.Source.
func (c *client) DrainByID(ctx context.Context, id string) (api.Drain, error) {
	return ask[api.Drain](ctx, c, call{Op: opDrainByID, Name: id})
}

// Ready implements api.Source.
func (c *client) Ready(ctx context.Context) error { return c.do(ctx, call{Op: opReadyAll}, nil) }

// BackendReady implements api.Source.
func (c *client) BackendReady(ctx context.Context, name string) error {
	return c.do(ctx, call{Op: opBackendReady, Name: name}, nil)
}

// sessionsClient is the client of a core that has applications. It is an api.Sessions too.
type sessionsClient struct{ *client }

var _ api.Sessions = sessionsClient{}

// OpenSession implements api.Sessions.
func (c sessionsClient) OpenSession(ctx context.Context, backend string, p api.Process, r api.SessionRequest) (api.Session, error) {
	return ask[api.Session](ctx, c.client, call{Op: opOpenSession, Name: backend, Session: &sessionCall{Process: p, Open: &r}})
}

// SessionCall implements api.Sessions.
func (c sessionsClient) SessionCall(ctx context.Context, backend, id string, p api.Process, q api.SessionCall) (api.Session, error) {
	return ask[api.Session](ctx, c.client, call{Op: opSessionCall, Name: backend, Session: &sessionCall{ID: id, Process: p, Call: &q}})
}

// SessionEvents implements api.Sessions.
func (c sessionsClient) SessionEvents(ctx context.Context, backend, id string, p api.Process, from, stream uint64) (api.SessionBatch, error) {
	q := &sessionCall{ID: id, Process: p, From: from, Stream: stream}
	return ask[api.SessionBatch](ctx, c.client, call{Op: opSessionEvents, Name: backend, Session: q})
}

// ownerTimeout bounds the question whose application has connected, during which no other connection is taken, and the wait
// for an audit record to be taken, during which nobody is answered.
const ownerTimeout = 2 * time.Second

func (c *client) owner(ctx context.Context, pid int) (string, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, ownerTimeout, errGone)
	defer cancel()
	return ask[string](ctx, c, call{Op: opOwner, N: pid})
}

func (c *client) audit(a api.Audit) {
	r := &audit{UID: a.UID, PID: a.PID, By: a.By, Action: a.Action, Backend: a.Backend, Drain: a.Drain, Reason: a.Reason, Status: a.Status, Before: a.Before}
	if a.Err != nil {
		r.Err = a.Err.Error()
	}
	ctx, cancel := context.WithTimeout(context.Background(), ownerTimeout)
	defer cancel()
	_ = c.do(ctx, call{Op: opAudit, Audit: r}, nil) // a core that has gone keeps no audit, one that is slow has it
}

func (c *client) metrics(w http.ResponseWriter, req *http.Request) {
	p, err := ask[page](req.Context(), c, call{Op: opMetrics})
	if err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	var body io.Reader = bytes.NewReader(p.Body)
	switch {
	case p.Encoding == "":
	case strings.Contains(req.Header.Get("Accept-Encoding"), p.Encoding):
		w.Header().Set("Content-Encoding", p.Encoding)
	default:
		if body, err = gzip.NewReader(body); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
	}
	w.Header().Set("Content-Type", p.Type)
	w.WriteHeader(p.Status)
	_, _ = io.Copy(w, body) // the reader may have gone
}

// SPDX-License-Identifier: Apache-2.0

package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"
)

// Option is one of a server that is served by this package.
type Option func(*config)

type config struct {
	session   *Session
	options   *Options
	readyPath string
	ready     http.Handler
	listen    func(ctx context.Context, network, address string) (net.Listener, error)
}

// WithSession has the server belong to a session that the program has registered, and that it stops when the server
// has ended. Otherwise the server has one of its own. It cannot be combined with [WithOptions].
func WithSession(s *Session) Option { return func(c *config) { c.session = s } }

// WithOptions are those of the session that the server registers for itself. It cannot be combined with [WithSession].
func WithOptions(o Options) Option { return func(c *config) { c.options = &o } }

// WithReadiness answers requests for path: 503 while draining, and otherwise as ready does; nil: 200.
func WithReadiness(path string, ready http.Handler) Option {
	return func(c *config) { c.readyPath, c.ready = path, ready }
}

// WithListen is what makes the listener instead of [Listen], such as one that does take MPTCP, or the
// Listen of a net.ListenConfig with socket options of the program's own.
func WithListen(listen func(ctx context.Context, network, address string) (net.Listener, error)) Option {
	return func(c *config) { c.listen = listen }
}

// ListenAndServe is that of srv, which it prepares for draining, once for each server, and serves until it has been drained:
//
//   - While draining readiness answers 503 (see [WithReadiness]), and each answer to a request that begins says `Connection:
//     close`; net/http makes a GOAWAY of that on HTTP/2. New connections and requests are served. Nothing idle is closed: a
//     client, or the balancer before it, may be about to use it, and learns with its next answer that it should not. Under an
//     agent what stays idle is retired by the kernel, one by one, as `idle` is configured.
//   - Handlers that do not end by themselves, such as streams and WebSockets, hijacked or not, wait for [Draining] of their
//     requests' contexts. What a handler leaves behind when it returns is seen by the agent, whose kernel counts every
//     connection; without one, Hold it.
//   - The listener is closed when the flush begins, or without an agent when nothing arrives any more, at the latest after
//     half the wait. What the kernel had queued is served.
//   - When the flush begins, in this order: the listener is closed; contexts of requests end with [ErrFlushing], and what
//     they still answer is delivered; kept connections are closed, those of HTTP/2 with a GOAWAY; requests are waited for, those
//     too that begin in between, whose contexts end when that wait does; the functions of OnFlush run, and no handler is called
//     any more; what is left is closed, by force at the deadline.
//
// It returns nil when all of that went well, where net/http returns ErrServerClosed: ErrForced if something had to be closed by
// force, the errors of OnFlush, or at once why it cannot listen. The process is to end then.
func ListenAndServe(srv *http.Server, opts ...Option) error {
	return listenAndServe(srv, cmp.Or(srv.Addr, ":http"), srv.Serve, opts)
}

// ListenAndServeTLS is ListenAndServe over TLS; the files are those of [http.Server.ListenAndServeTLS].
func ListenAndServeTLS(srv *http.Server, certFile, keyFile string, opts ...Option) error {
	return listenAndServe(srv, cmp.Or(srv.Addr, ":https"), overTLS(srv, certFile, keyFile), opts)
}

// Serve is ListenAndServe for a listener that is there already.
func Serve(srv *http.Server, l net.Listener, opts ...Option) error {
	return serveOn(srv, l, srv.Serve, opts)
}

// ServeTLS is Serve over TLS; the files are those of [http.Server.ServeTLS].
func ServeTLS(srv *http.Server, l net.Listener, certFile, keyFile string, opts ...Option) error {
	return serveOn(srv, l, overTLS(srv, certFile, keyFile), opts)
}

func overTLS(srv *http.Server, certFile, keyFile string) func(net.Listener) error {
	return func(l net.Listener) error { return srv.ServeTLS(l, certFile, keyFile) }
}

func configure(opts []Option) (config, error) {
	c := config{listen: Listen}
	for _, o := range opts {
		o(&c)
	}
	if c.session != nil && c.options != nil {
		return c, errors.New("serve HTTP: WithSession and WithOptions exclude each other: a session has its options")
	}
	if c.options == nil {
		c.options = new(Options)
	}
	return c, nil
}

func listenAndServe(srv *http.Server, addr string, accept func(net.Listener) error, opts []Option) error {
	c, err := configure(opts)
	if err != nil {
		return err
	}
	l, err := c.listen(context.Background(), "tcp", addr)
	if err != nil {
		return err // it names the address
	}
	return serve(srv, l, accept, c)
}

func serveOn(srv *http.Server, l net.Listener, accept func(net.Listener) error, opts []Option) error {
	c, err := configure(opts)
	if err != nil {
		return errors.Join(err, l.Close())
	}
	return serve(srv, l, accept, c)
}

func serve(srv *http.Server, l net.Listener, accept func(net.Listener) error, c config) error {
	own := c.session == nil
	if own {
		s, err := Register(context.Background(), *c.options)
		if err != nil {
			return errors.Join(err, l.Close())
		}
		c.session = s
	}
	s := c.session
	h := newHTTPServer(srv, l, c)
	if err := s.Attach(h); err != nil {
		return errors.Join(err, l.Close())
	}
	served := make(chan error, 1)
	go func() { served <- accept(h.l) }()
	var err error
	select {
	case err = <-served:
		if !h.l.finishing() {
			// It is broken, or the program has closed it. Nobody is served any more, so nothing is drained.
			s.Detach(h)
			if own {
				s.bye.Do(s.leave)
			}
			return err
		}
		<-s.Done()
	case <-s.Done():
		<-served
	}
	if own {
		return s.Stop(context.Background())
	}
	return s.err // nobody writes it after Done
}

// Draining is closed once the server that the context of a request comes from drains; see [Session.Draining]. Elsewhere it is
// nil, which is never closed.
func Draining(ctx context.Context) <-chan struct{} {
	s, _ := ctx.Value(sessionKey{}).(*Session)
	return s.Draining()
}

type sessionKey struct{}

// httpServer is a net/http server as a Server.
type httpServer struct {
	srv  *http.Server
	l    *Listener
	s    *Session
	next http.Handler
	c    config
	last arrival // of a request

	mu      sync.Mutex
	busy    int // connections that carry a request, and handlers
	active  map[net.Conn]struct{}
	changed chan struct{} // closed and replaced when busy becomes 0
	retired bool          // no handler is called any more

	late     context.Context // of requests that begin after the flush has; over when they are waited for no longer
	endLate  context.CancelCauseFunc
	shutdown chan error // how net/http's own has ended
}

func newHTTPServer(srv *http.Server, l net.Listener, c config) *httpServer {
	h := &httpServer{
		srv: srv, l: NewListener(l), s: c.session, next: srv.Handler, c: c,
		active: make(map[net.Conn]struct{}), changed: make(chan struct{}), shutdown: make(chan error, 1),
	}
	h.late, h.endLate = context.WithCancelCause(context.Background())
	if h.next == nil {
		h.next = http.DefaultServeMux
	}
	srv.Handler = h
	base, state := srv.BaseContext, srv.ConnState
	srv.BaseContext = func(l net.Listener) context.Context {
		ctx := context.Background()
		if base != nil {
			ctx = base(l)
		}
		ctx, cancel := context.WithCancelCause(WithDraining(ctx, h.s))
		// The contexts of requests end with the session's.
		context.AfterFunc(h.s.Context(), func() { cancel(context.Cause(h.s.Context())) })
		return ctx
	}
	srv.ConnState = func(c net.Conn, st http.ConnState) {
		h.note(c, st)
		if state != nil {
			state(c, st)
		}
	}
	return h
}

// ServeHTTP answers readiness, and has the client go while draining.
func (h *httpServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	retired := h.add(1)
	defer h.add(-1)
	draining := false
	select {
	case <-h.s.Draining():
		draining = true
	default:
	}
	// An offer that net/http does not take up, such as h2c, changes nothing. A WebSocket's answer needs the header.
	if draining && !strings.EqualFold(r.Header.Get("Upgrade"), "websocket") {
		w.Header().Set("Connection", "close") // HTTP/2: GOAWAY
	}
	switch {
	case retired:
		http.Error(w, "draining", http.StatusServiceUnavailable)
	case h.c.readyPath == "" || r.URL.Path != h.c.readyPath:
		h.last.now()
		if h.s.Context().Err() != nil {
			h.serveLate(w, r)
			return
		}
		h.next.ServeHTTP(w, r)
	case draining:
		http.Error(w, "draining", http.StatusServiceUnavailable)
	case h.c.ready != nil:
		h.c.ready.ServeHTTP(w, r)
	}
}

// serveLate serves a request that begins after those in flight have been asked to end, with a context that has not ended yet.
func (h *httpServer) serveLate(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(r.Context()))
	defer cancel(context.Canceled)
	defer context.AfterFunc(h.late, func() { cancel(context.Cause(h.late)) })()
	late := r.WithContext(ctx)
	defer func() { r.MultipartForm = late.MultipartForm }() // net/http removes its files
	h.next.ServeHTTP(w, late)
}

// note counts the connections that have received a byte of a request. Once one is hijacked its handler counts alone.
func (h *httpServer) note(c net.Conn, st http.ConnState) {
	h.mu.Lock()
	_, was := h.active[c]
	is := st == http.StateActive
	if is {
		h.active[c] = struct{}{}
	} else {
		delete(h.active, c)
	}
	h.mu.Unlock()
	switch {
	case is && !was:
		h.add(1)
	case was && !is:
		h.add(-1)
	}
}

// add counts, and says whether it is too late to begin.
func (h *httpServer) add(n int) (retired bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.busy += n; h.busy == 0 {
		close(h.changed)
		h.changed = make(chan struct{})
	}
	return h.retired
}

// Pause is that of Server. What asks for readiness alone, each time over a new connection since the last one was ended, does not
// keep the listener open.
func (h *httpServer) Pause(ctx context.Context, quiet time.Duration) error {
	return h.last.pause(ctx, quiet)
}

// StopNew is that of Server.
func (h *httpServer) StopNew() { h.l.Finish() }

// Wait is that of Server. A connection that was accepted a moment ago may be about to say something.
func (h *httpServer) Wait(ctx context.Context) error {
	for {
		h.mu.Lock()
		busy, changed := h.busy, h.changed
		h.mu.Unlock()
		if busy == 0 {
			quiet := h.s.o.QuietPeriod
			if last := time.Unix(0, h.l.last.Load()); time.Since(last) >= quiet {
				return nil
			} else if err := pause(ctx, time.Until(last.Add(quiet))); err != nil {
				return err
			}
			continue
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Retire is that of Server. net/http's own Shutdown closes without an answer what it reads after it was called. So kept connections
// go first, each behind its answer; what is left to it are those of HTTP/2, which it sends a GOAWAY.
func (h *httpServer) Retire(ctx context.Context) error {
	h.srv.SetKeepAlivesEnabled(false)
	err := h.Wait(ctx)
	go func() { h.shutdown <- h.srv.Shutdown(context.Background()) }() // at the latest Close ends it
	for {
		h.mu.Lock()
		changed := h.changed
		if h.retired = h.busy == 0 || err != nil; h.retired {
			h.mu.Unlock()
			h.endLate(ErrFlushing)
			return err
		}
		h.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
}

// Shutdown is that of Server.
func (h *httpServer) Shutdown(ctx context.Context) error {
	err := h.Wait(ctx)
	if err == nil {
		select {
		case err = <-h.shutdown:
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	if err != nil {
		return errors.Join(fmt.Errorf("close HTTP connections: %w", err), h.srv.Close())
	}
	return nil
}

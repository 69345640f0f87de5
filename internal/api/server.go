// SPDX-License-Identifier: Apache-2.0

package api

import (
	"cmp"
	"context"
	_ "embed" // openapi.json
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"mime"
	"net"
	"net/http"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/ebbproxy/ebb/drain"
)

// Limits of the server, those of numbers for each listener. They bound what one client can cost; all are far above what
// the command line needs. What an application has too much of is waited for in its own line, so that its other requests
// wait and not those of others.
const (
	maxBody        = 64 << 10
	maxHeader      = 16 << 10
	maxConns       = 128              // open connections; more wait in the backlog
	maxRequests    = 32               // requests answered at the same time
	maxPerApp      = 8                // of them for one application, and as many followers
	maxStreams     = 64               // followers of the event log
	queueTimeout   = 5 * time.Second  // for one of the places to be free
	maxStragglers  = 10_000           // rows of one answer
	headerTimeout  = 5 * time.Second  // from accept to the end of the header
	bodyTimeout    = 10 * time.Second // from accept to the end of the body
	answerTimeout  = 30 * time.Second // to take the answer; per event on a stream
	idleTimeout    = time.Minute      // between two requests of a connection
	closeTimeout   = 5 * time.Second  // for answers under way when the server stops
	streamInterval = 15 * time.Second // between two looks at whether a silent follower is still there

	// An application has at most 64 sessions, each with a stream and a connection for what it says. When they all come back
	// at once, the streams that they had may not be known to be dead yet.
	maxConnsPerApp   = 192  // connections of one application; more are closed
	maxAppConns      = 2048 // of all, some 50 KiB each with its stream
	fewConnsPerApp   = 16   // of one application once half of those of all are open: they are enough for 64 more
	maxWatchersOfApp = 128  // streams of sessions of one application

	// What sessions say is quick and must not wait behind what others ask, nor their streams' looks behind what they say.
	maxSayings      = 32 // answered at the same time
	maxSayingsOfApp = 4
	maxAsks         = 32 // looks at what is new for a stream, of all listeners
	maxAsksOfApp    = 4

	// What applications do is recorded, in a log that all share, and each shorter deadline is written to a disk. Of one
	// application, and of all who are not admitted together:
	maxRecords  = 64 // audit records at once, and one in
	everyRecord = 5 * time.Second
	maxDrains   = 16 // requests to drain at once, and one in
	everyDrain  = time.Second
)

//go:embed openapi.json
var openAPI []byte

// OpenAPI is the OpenAPI 3.1 document of this API, in JSON.
func OpenAPI() []byte { return slices.Clone(openAPI) }

// Source is what the owner of the backends answers and does. Its methods are called from many goroutines
// at once. Errors wrap this package's sentinels; any other is an internal error (500).
type Source interface {
	// Backends are all backends, in the order in which they are shown.
	Backends(context.Context) []Backend
	// Backend is one of them, or ErrUnknown. It may look closer than Backends does.
	Backend(ctx context.Context, name string) (Backend, error)
	// Stragglers are at most n open connections, those that keep a drain open first.
	Stragglers(ctx context.Context, name string, n int) ([]Straggler, error)
	// Drain begins a drain, or joins the one that is running. It returns once the drain is journalled
	// and new connections are decided.
	Drain(ctx context.Context, name string, r DrainRequest) (Drain, error)
	// Undrain takes the running drain back: ErrNotDraining, ErrFlushing.
	Undrain(ctx context.Context, name string, r UndrainRequest) (Drain, error)
	// Extend moves the running drain's deadline later: ErrNotDraining, ErrNotPossible.
	Extend(ctx context.Context, name string, r ExtendRequest) (Drain, error)
	// Cut ends the running drain's wait now: ErrNotDraining.
	Cut(ctx context.Context, name string, r CutRequest) (Drain, error)
	// Drains are the running and the remembered drains, the newest first.
	Drains(context.Context) []Drain
	// DrainByID is one of them, or ErrUnknownDrain.
	DrainByID(ctx context.Context, id string) (Drain, error)
	// Ready is nil when every backend takes new connections, else ErrNotReady with the reason.
	Ready(context.Context) error
	// BackendReady is Ready for one backend.
	BackendReady(ctx context.Context, name string) error
}

// Audit is the record of one action that somebody asked for over the API.
type Audit struct {
	Time    time.Time
	UID     int    // of the caller; -1 if the connection does not tell
	PID     int    // of the caller; 0 if the connection does not tell
	By      string // the user, "certificate NAME", "token", or "unknown"
	Action  string // drain, undrain, extend, cut, open-session, end-session, flushed
	Backend string
	Drain   string // its id, if there is one
	Reason  string
	Status  int   // the HTTP status of the answer
	Err     error // why it was refused
	Before  int   // how many more of this backend's processes, or of those who are refused, came before it and are not recorded
}

// Options of NewServer. Source and Log are required.
type Options struct {
	Source  Source
	Log     *Log
	Metrics http.Handler // GET /metrics; nil: 404
	// Audit is called once for each action, after it; nil writes it to Logger at Info. Of those of one application, and of
	// those who are not admitted, it is called for 64 at once and for one in 5 s.
	Audit  func(Audit)
	Logger *slog.Logger // nil discards
}

// Server serves the API. Its methods may be called from any goroutine.
type Server struct {
	o        Options
	sessions Sessions      // the source's; nil if it has none, and then no route needs them
	asks     *places       // of looks at what is new for a stream
	patience time.Duration // queueTimeout; another one in tests
	slowest  time.Duration // answerTimeout of a session's stream; another one in tests
}

// NewServer returns a server that is not serving yet.
func NewServer(o Options) (*Server, error) {
	if o.Source == nil || o.Log == nil {
		return nil, errors.New("create the API server: Source and Log are required")
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	s := &Server{
		o: o, asks: newPlaces(maxAsks, maxAsksOfApp, "streams are being looked after"), patience: queueTimeout, slowest: answerTimeout,
	}
	s.sessions, _ = o.Source.(Sessions)
	if s.o.Audit == nil {
		s.o.Audit = s.logAudit
	}
	return s, nil
}

// Serve is ServeAs for [Anyone].
func (s *Server) Serve(ctx context.Context, ln net.Listener) error {
	return s.ServeAs(ctx, ln, Anyone())
}

// ServeAs answers on ln, to whom a admits, until ctx is over, then lets the answers under way finish: followers
// of the event log get what is retained if the log has been closed. It closes ln. Nil when it stopped
// because of ctx. A server may serve several listeners at once, each with limits of its own, so that those who ask over one
// cannot keep those of another out.
func (s *Server) ServeAs(ctx context.Context, ln net.Listener, a Access) error {
	return s.serve(ctx, ln, a, routes)
}

// ServeProbes answers /livez, /readyz, /readyz/NAME and /metrics alone, to anyone, for a TCP address that probes and
// Prometheus reach. Otherwise it is like ServeAs.
func (s *Server) ServeProbes(ctx context.Context, ln net.Listener) error {
	return s.serve(ctx, ln, Anyone(), slices.DeleteFunc(slices.Clone(routes), func(r route) bool { return r.kind != probe }))
}

func (s *Server) serve(ctx context.Context, ln net.Listener, a Access, rs []route) error {
	conns := maxConns
	if a.owner != nil {
		conns = maxAppConns
	}
	limited := limitListener(ln, conns)
	if a.listen != nil {
		var err error
		if limited, err = a.listen(limited); err != nil {
			return errors.Join(fmt.Errorf("serve the API: %w", err), ln.Close())
		}
	}
	if s.sessions == nil {
		rs = slices.DeleteFunc(slices.Clone(rs), func(r route) bool { return r.who == apps })
	}
	e := &entrance{
		Server: s, Access: a,
		requests: newPlaces(maxRequests, maxPerApp, "requests are being answered"),
		streams:  newPlaces(maxStreams, maxPerApp, "readers follow the events already; end one of them"),
		sayings:  newPlaces(maxSayings, maxSayingsOfApp, "sessions are being answered"),
		watchers: newPlaces(maxAppConns, maxWatchersOfApp, "sessions have a stream already; end one of them"),
		records:  rates{each: Rate{Burst: maxRecords, Every: everyRecord}},
		drains:   rates{each: Rate{Burst: maxDrains, Every: everyDrain}},
	}
	stopping, stop := context.WithCancelCause(context.WithoutCancel(ctx))
	defer stop(nil)
	srv := &http.Server{
		Handler:           e.mux(rs),
		MaxHeaderBytes:    maxHeader,
		ReadHeaderTimeout: headerTimeout,
		ReadTimeout:       bodyTimeout,
		WriteTimeout:      answerTimeout,
		IdleTimeout:       idleTimeout,
		ErrorLog:          slog.NewLogLogger(s.o.Logger.Handler(), slog.LevelDebug),
		// Not ctx itself: an action under way when the server stops must run to its end.
		BaseContext: func(net.Listener) context.Context {
			return context.WithValue(context.Background(), stoppingKey{}, stopping)
		},
		ConnContext: e.withPeer,
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(limited) }()
	select {
	case err := <-served:
		return fmt.Errorf("serve the API on %s: %w", ln.Addr(), err)
	case <-ctx.Done():
	}
	stop(errStopping)
	within, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	err := srv.Shutdown(within)
	if err != nil {
		err = errors.Join(fmt.Errorf("stop the API on %s: %w", ln.Addr(), err), srv.Close())
	}
	<-served
	return err
}

var errStopping = errors.New("server is stopping")

// stoppingKey is the key of the context that is over when the server stops.
type stoppingKey struct{}

// limitListener accepts while fewer than n connections are open.
func limitListener(ln net.Listener, n int) net.Listener {
	return &limitedListener{Listener: ln, slots: make(chan struct{}, n), closed: make(chan struct{})}
}

type limitedListener struct {
	net.Listener
	slots  chan struct{}
	closed chan struct{}
	once   sync.Once
}

func (l *limitedListener) Accept() (net.Conn, error) {
	select {
	case l.slots <- struct{}{}:
	case <-l.closed:
		return nil, net.ErrClosed
	}
	c, err := l.Listener.Accept()
	if err != nil {
		<-l.slots
		return nil, err
	}
	return &limitedConn{Conn: c, release: sync.OnceFunc(func() { <-l.slots })}, nil
}

func (l *limitedListener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return l.Listener.Close()
}

type limitedConn struct {
	net.Conn
	release func()
	pidfd   *os.File // of the peer, nil if it has none; closed with the connection
}

func (c *limitedConn) Close() error {
	defer c.release()
	if c.pidfd != nil {
		_ = c.pidfd.Close() // nothing was written
	}
	return c.Conn.Close()
}

// route is one operation of the API.
type route struct {
	method, path string
	kind         kind
	who          audience
	handle       func(*Server, http.ResponseWriter, *http.Request) error
}

type kind int

const (
	look   kind = iota
	action      // does something, and is audited
	stream      // may stay for ever
	probe       // also served by ServeProbes, and does not wait behind others
	saying      // of a session, of which there are many
	doing       // of a session, and is audited
	watch       // of a session, and may stay for ever
)

// audited says whether it is recorded who has asked.
func (k kind) audited() bool { return k == action || k == doing }

// audience is who may ask for a route.
type audience int

const (
	operators audience = iota
	everybody          // an application too, of its own backend
	apps               // an application, which is what it is about; only if the source has sessions
)

// routes is the whole API; a test compares it with openapi.json.
var routes = []route{
	{"GET", "/v1/backends", look, everybody, (*Server).getBackends},
	{"GET", "/v1/backends/{name}", look, everybody, (*Server).getBackend},
	{"GET", "/v1/backends/{name}/stragglers", look, everybody, (*Server).getStragglers},
	{"POST", "/v1/backends/{name}/drain", action, everybody, (*Server).postDrain},
	{"POST", "/v1/backends/{name}/undrain", action, operators, (*Server).postUndrain},
	{"POST", "/v1/backends/{name}/extend", action, operators, (*Server).postExtend},
	{"POST", "/v1/backends/{name}/cut", action, operators, (*Server).postCut},
	{"GET", "/v1/drains", look, everybody, (*Server).getDrains},
	{"GET", "/v1/drains/{id}", look, everybody, (*Server).getDrain},
	{"GET", "/v1/events", stream, everybody, (*Server).getEvents},
	{"POST", "/v1/session", doing, apps, (*Server).postSession},
	{"GET", "/v1/session", saying, apps, told[getRequest]},
	{"DELETE", "/v1/session", doing, apps, done[endRequest]},
	{"GET", "/v1/session/events", watch, apps, (*Server).getSessionEvents},
	{"POST", "/v1/session/ack", saying, apps, told[ackRequest]},
	{"POST", "/v1/session/heartbeat", saying, apps, told[heartbeatRequest]},
	{"POST", "/v1/session/drain", action, apps, (*Server).postDrain},
	{"POST", "/v1/session/hold", saying, apps, told[holdRequest]},
	{"POST", "/v1/session/release", saying, apps, told[releaseRequest]},
	{"POST", "/v1/session/flushed", doing, apps, done[flushedRequest]},
	{"POST", "/v1/session/extend", doing, apps, done[extensionRequest]},
	{"GET", "/livez", probe, everybody, (*Server).getLive},
	{"GET", "/readyz", probe, operators, (*Server).getReady},
	{"GET", "/readyz/{name}", probe, everybody, (*Server).getBackendReady},
	{"GET", "/metrics", probe, operators, (*Server).getMetrics},
	{"GET", "/openapi.json", look, everybody, (*Server).getOpenAPI},
}

// entrance is the way in over one listener: who is admitted, and how many at once.
type entrance struct {
	*Server
	Access
	requests, streams, sayings, watchers *places
	conns                                shares // by the backend whose application has made them
	records, drains                      rates  // of who is no operator
}

// mux answers with problem documents where http.ServeMux would answer in plain text.
func (e *entrance) mux(rs []route) http.Handler {
	byPath := make(map[string]map[string]route)
	var paths []string
	for _, r := range rs {
		if byPath[r.path] == nil {
			byPath[r.path] = make(map[string]route)
			paths = append(paths, r.path)
		}
		byPath[r.path][r.method] = r
	}
	mux := http.NewServeMux()
	for path, methods := range byPath {
		mux.HandleFunc(path, func(w http.ResponseWriter, req *http.Request) {
			e.dispatch(w, req, methods)
		})
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, req *http.Request) {
		writeProblem(w, &Problem{
			Title: "no such path", Status: http.StatusNotFound,
			Detail: fmt.Sprintf("%q is not a path of this API", req.URL.Path), Known: paths,
		})
	})
	return mux
}

func (e *entrance) dispatch(w http.ResponseWriter, req *http.Request, methods map[string]route) {
	method := req.Method
	if method == http.MethodHead {
		method = http.MethodGet
	}
	r, ok := methods[method]
	if !ok {
		allow := make([]string, 0, len(methods)+1)
		for m := range methods {
			allow = append(allow, m)
			if m == http.MethodGet {
				allow = append(allow, http.MethodHead)
			}
		}
		slices.Sort(allow)
		w.Header().Set("Allow", strings.Join(allow, ", "))
		writeProblem(w, &Problem{
			Title: "method not allowed", Status: http.StatusMethodNotAllowed,
			Detail: fmt.Sprintf("%s is not possible on %s; use %s", req.Method, req.URL.Path, strings.Join(allow, " or ")),
		})
		return
	}
	c, err := e.admit(req)
	if err != nil || e.owner != nil {
		c.records = &e.records
	}
	if r.who == apps {
		req.SetPathValue("name", c.backend)
	}
	req = req.WithContext(context.WithValue(req.Context(), callerKey{}, c))
	if err == nil {
		err = c.may(r, req.PathValue("name"))
	}
	var leave func()
	if err == nil {
		leave, err = e.enter(req.Context(), r, c)
	}
	if err != nil {
		if r.kind.audited() {
			e.audit(req, Audit{Err: err})
		}
		writeProblem(w, e.problem(req.Context(), err))
		return
	}
	defer leave()
	req.Body = http.MaxBytesReader(w, req.Body, maxBody)
	if err := r.handle(e.Server, w, req); err != nil {
		writeProblem(w, e.problem(req.Context(), err))
	}
}

// may refuses an application what is not for applications, or not its own, and others what is for applications.
func (c caller) may(r route, name string) error {
	switch {
	case c.backend == "" && r.who == apps:
		return forbidden("sessions are for the processes of a backend, over the socket of applications: $EBB_APP_SOCKET, or %s",
			path.Join(RootRunDir, AppSocket))
	case c.backend == "":
		return nil
	case r.who == operators:
		return forbidden("%s %s is for operators", r.method, r.path)
	case name != "" && name != c.backend:
		return forbidden("an application may ask about its own backend only, which is %q", c.backend)
	}
	return nil
}

// enter takes a place among those who are answered, for which it waits a little. leave gives it back.
func (e *entrance) enter(ctx context.Context, r route, c caller) (leave func(), err error) {
	p, patience := e.requests, e.patience
	switch r.kind {
	case probe:
		return func() {}, nil
	case stream:
		p, patience = e.streams, 0
	case watch:
		p, patience = e.watchers, 0
	case saying, doing:
		p = e.sayings
	case action:
		if e.owner == nil {
			break
		}
		if _, ok := e.drains.take(c.backend); !ok {
			return nil, fmt.Errorf("%w: %s may be drained by its processes once in %v", ErrTooFast, c.backend, everyDrain)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return p.enter(ctx, c.backend)
}

func (s *Server) getBackends(w http.ResponseWriter, req *http.Request) error {
	return writeJSON(w, BackendList{s.backends(req.Context())})
}

// backends are those that the caller may see. A look at all is not made for an application.
func (s *Server) backends(ctx context.Context) []Backend {
	c := callerOf(ctx)
	if c.backend == "" {
		return orEmpty(s.o.Source.Backends(ctx))
	}
	b, err := s.o.Source.Backend(ctx, c.backend)
	if err != nil {
		return []Backend{} // it has gone
	}
	return []Backend{b}
}

func (s *Server) getBackend(w http.ResponseWriter, req *http.Request) error {
	b, err := s.o.Source.Backend(req.Context(), req.PathValue("name"))
	if err != nil {
		return err
	}
	return writeJSON(w, b)
}

func (s *Server) getStragglers(w http.ResponseWriter, req *http.Request) error {
	n, err := queryUint(req, "n", 20)
	if err != nil {
		return err
	}
	if n < 1 || n > maxStragglers {
		return &fieldError{Field: "n", Msg: fmt.Sprintf("is %d, want 1 to %d", n, maxStragglers)}
	}
	rows, err := s.o.Source.Stragglers(req.Context(), req.PathValue("name"), int(n))
	if err != nil {
		return err
	}
	return writeJSON(w, StragglerList{orEmpty(rows)})
}

func (s *Server) postDrain(w http.ResponseWriter, req *http.Request) error {
	var r DrainRequest
	return s.action(w, req, &r, func(ctx context.Context, name, by string) (Drain, string, error) {
		mine := drain.CauseOperator
		if callerOf(ctx).backend != "" {
			mine = drain.CauseApp
		}
		if r.Cause = cmp.Or(r.Cause, mine); r.Cause != mine && r.Cause != drain.CausePrestop {
			return Drain{}, r.Reason, &fieldError{Field: "cause", Msg: fmt.Sprintf("%q is neither %s nor %s", string(r.Cause), mine, drain.CausePrestop)}
		}
		r.By = by
		d, err := s.o.Source.Drain(ctx, name, r)
		return d, r.Reason, err
	})
}

func (s *Server) postUndrain(w http.ResponseWriter, req *http.Request) error {
	var r UndrainRequest
	return s.action(w, req, &r, func(ctx context.Context, name, by string) (Drain, string, error) {
		r.By = by
		d, err := s.o.Source.Undrain(ctx, name, r)
		return d, r.Reason, err
	})
}

func (s *Server) postExtend(w http.ResponseWriter, req *http.Request) error {
	var r ExtendRequest
	return s.action(w, req, &r, func(ctx context.Context, name, by string) (Drain, string, error) {
		r.By = by
		d, err := s.o.Source.Extend(ctx, name, r)
		return d, r.Reason, err
	})
}

func (s *Server) postCut(w http.ResponseWriter, req *http.Request) error {
	var r CutRequest
	return s.action(w, req, &r, func(ctx context.Context, name, by string) (Drain, string, error) {
		r.By = by
		d, err := s.o.Source.Cut(ctx, name, r)
		return d, r.Reason, err
	})
}

// action decodes and checks a request, does it, and writes its audit record, whatever became of it.
func (s *Server) action(w http.ResponseWriter, req *http.Request, r interface{ check() error },
	do func(ctx context.Context, backend, by string) (Drain, string, error)) error {
	var (
		d Drain
		a Audit
	)
	a.Err = func() error {
		c := callerOf(req.Context())
		if !c.known() {
			return errNoPeer
		}
		if err := decodeBody(req, r); err != nil {
			return err
		}
		if err := r.check(); err != nil {
			return err
		}
		// A caller who hangs up has still asked: what was begun is brought to its end.
		var err error
		d, a.Reason, err = do(context.WithoutCancel(req.Context()), req.PathValue("name"), c.String())
		return err
	}()
	a.Drain = d.ID
	s.audit(req, a)
	if a.Err != nil {
		return a.Err
	}
	return writeJSON(w, d)
}

// audit completes a with what the request says, and writes it.
func (s *Server) audit(req *http.Request, a Audit) {
	c := callerOf(req.Context())
	a.Time, a.UID, a.PID, a.By = time.Now(), c.uid, c.pid, c.String()
	if c.records != nil {
		var ok bool
		if a.Before, ok = c.records.take(c.backend); !ok {
			return
		}
	}
	a.Action, a.Backend = actionOf(req), req.PathValue("name")
	a.Status = cmp.Or(a.Status, http.StatusOK)
	if a.Err != nil {
		a.Status = s.problem(req.Context(), a.Err).Status
	}
	s.o.Audit(a)
}

// actionOf names what is audited.
func actionOf(req *http.Request) string {
	name := path.Base(req.URL.Path)
	switch {
	case name == "session" && req.Method == http.MethodDelete:
		return "end-session"
	case name == "session":
		return "open-session"
	}
	return name
}

func (s *Server) logAudit(a Audit) {
	attrs := []slog.Attr{
		slog.String("action", a.Action), slog.String("backend", a.Backend), slog.Int("uid", a.UID),
		slog.Int("pid", a.PID), slog.String("by", a.By), slog.Int("status", a.Status),
	}
	if a.Drain != "" {
		attrs = append(attrs, slog.String("drain", a.Drain))
	}
	if a.Reason != "" {
		attrs = append(attrs, slog.String("reason", a.Reason))
	}
	if a.Err != nil {
		attrs = append(attrs, slog.Any("err", a.Err))
	}
	if a.Before > 0 {
		attrs = append(attrs, slog.Int("before", a.Before))
	}
	s.o.Logger.LogAttrs(context.Background(), slog.LevelInfo, "action over the API", attrs...)
}

func (s *Server) getDrains(w http.ResponseWriter, req *http.Request) error {
	c := callerOf(req.Context())
	ds := slices.DeleteFunc(slices.Clone(s.o.Source.Drains(req.Context())), func(d Drain) bool { return !c.sees(d.Backend) })
	return writeJSON(w, DrainList{orEmpty(ds)})
}

func (s *Server) getDrain(w http.ResponseWriter, req *http.Request) error {
	d, err := s.o.Source.DrainByID(req.Context(), req.PathValue("id"))
	if err == nil && !callerOf(req.Context()).sees(d.Backend) {
		err = fmt.Errorf("%w %q", ErrUnknownDrain, d.ID)
	}
	if err != nil {
		return err
	}
	return writeJSON(w, d)
}

// getEvents writes events as JSON lines: those retained, and with follow=true those to come until the
// client leaves or the server stops. A blank line is a sign of life.
func (s *Server) getEvents(w http.ResponseWriter, req *http.Request) error {
	from, err := queryUint(req, "from", 0)
	if err != nil {
		return err
	}
	follow := false
	if v := req.URL.Query().Get("follow"); v != "" {
		if follow, err = strconv.ParseBool(v); err != nil {
			return &fieldError{Field: "follow", Msg: fmt.Sprintf("%q is neither true nor false", v)}
		}
	}
	w.Header().Set(epochHeader, s.o.Log.Epoch())
	w.Header().Set("Content-Type", "application/x-ndjson")
	if req.Method == http.MethodHead {
		return nil
	}
	rc := http.NewResponseController(w)
	// The reader may stay silent for as long as it likes.
	if err := rc.SetReadDeadline(time.Time{}); err != nil {
		return fmt.Errorf("lift the read deadline: %w", err)
	}
	ctx, cancel := context.WithCancelCause(req.Context())
	defer cancel(nil)
	if stopping, ok := req.Context().Value(stoppingKey{}).(context.Context); ok {
		defer context.AfterFunc(stopping, func() { cancel(errStopping) })()
	}
	s.stream(ctx, w, rc, &ownEvents{s.o.Log.Subscribe(from), callerOf(ctx)}, follow)
	return nil
}

// epochHeader names the numbering of the events that follow; see LogOptions.Epoch.
const epochHeader = "Ebb-Log-Epoch"

// ownEvents are the events that a caller may see. What was lost may have been of any backend.
type ownEvents struct {
	sub *Subscription
	c   caller
}

func (o *ownEvents) sees(ev Event) bool { return o.c.sees(ev.Backend) || ev.Type == EventLost }

// TryNext is that of Subscription.
func (o *ownEvents) TryNext() (Event, bool) {
	for {
		if ev, ok := o.sub.TryNext(); !ok || o.sees(ev) {
			return ev, ok
		}
	}
}

// Next is that of Subscription.
func (o *ownEvents) Next(ctx context.Context) (Event, error) {
	for {
		if ev, err := o.sub.Next(ctx); err != nil || o.sees(ev) {
			return ev, err
		}
	}
}

// stream copies events until there are none left, or the client or the server goes. The answer has begun, so
// there is nobody to tell about an error.
func (s *Server) stream(ctx context.Context, w io.Writer, rc *http.ResponseController, sub *ownEvents, follow bool) {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	put := func(ev Event) bool {
		return rc.SetWriteDeadline(time.Now().Add(answerTimeout)) == nil && enc.Encode(ev) == nil
	}
	for {
		for ev, ok := sub.TryNext(); ok; ev, ok = sub.TryNext() {
			if !put(ev) {
				return
			}
		}
		if !follow || ctx.Err() != nil || rc.Flush() != nil {
			return
		}
		wait, cancel := context.WithTimeout(ctx, streamInterval)
		ev, err := sub.Next(wait)
		cancel()
		switch {
		case err == nil:
			if !put(ev) {
				return
			}
		case errors.Is(err, ErrLogClosed):
			return
		case ctx.Err() != nil:
			// What was published before the stop is still delivered.
			continue
		default:
			if rc.SetWriteDeadline(time.Now().Add(answerTimeout)) != nil {
				return
			}
			if _, err := io.WriteString(w, "\n"); err != nil {
				return
			}
		}
	}
}

func (s *Server) getLive(w http.ResponseWriter, _ *http.Request) error {
	return writeJSON(w, Readiness{Status: "ok"})
}

func (s *Server) getReady(w http.ResponseWriter, req *http.Request) error {
	if err := s.o.Source.Ready(req.Context()); err != nil {
		return err
	}
	return writeJSON(w, Readiness{Status: "ok"})
}

func (s *Server) getBackendReady(w http.ResponseWriter, req *http.Request) error {
	if err := s.o.Source.BackendReady(req.Context(), req.PathValue("name")); err != nil {
		return err
	}
	return writeJSON(w, Readiness{Status: "ok"})
}

func (s *Server) getMetrics(w http.ResponseWriter, req *http.Request) error {
	if s.o.Metrics == nil {
		return &Problem{Title: "no metrics", Status: http.StatusNotFound, Detail: "this process serves no metrics"}
	}
	s.o.Metrics.ServeHTTP(w, req)
	return nil
}

func (s *Server) getOpenAPI(w http.ResponseWriter, _ *http.Request) error {
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(openAPI) // the reader may have gone
	return nil
}

func queryUint(req *http.Request, name string, def uint64) (uint64, error) {
	v := req.URL.Query().Get(name)
	if v == "" {
		return def, nil
	}
	n, err := strconv.ParseUint(v, 10, 64)
	if err != nil {
		return 0, &fieldError{Field: name, Msg: fmt.Sprintf("%q is not a whole number", v)}
	}
	return n, nil
}

// errNoPeer: an action over a connection that does not say who asks.
var errNoPeer = errors.New("actions need a connection that says who asks: a Unix socket, a certificate or a token")

// unsupportedType is the content type of a body that is not JSON.
type unsupportedType string

func (t unsupportedType) Error() string {
	return fmt.Sprintf("the body is %q; send Content-Type: application/json", string(t))
}

// checkContentType refuses a body that does not claim to be JSON. Without a body there is nothing to claim.
func checkContentType(req *http.Request) error {
	if req.ContentLength == 0 {
		return nil
	}
	ct := req.Header.Get("Content-Type")
	if mt, _, err := mime.ParseMediaType(ct); err != nil || mt != "application/json" {
		return unsupportedType(ct)
	}
	return nil
}

// decodeBody reads the body of a request into r, a pointer to a struct of scalars.
func decodeBody(req *http.Request, r any) error {
	if err := checkContentType(req); err != nil {
		return err
	}
	return decodeRequest(req.Body, r)
}

// problem is the answer to err.
func (s *Server) problem(ctx context.Context, err error) *Problem {
	var (
		p   *Problem
		fe  *fieldError
		mbe *http.MaxBytesError
		ut  unsupportedType
	)
	switch {
	case errors.As(err, &p):
		return p
	case errors.As(err, &fe):
		return &Problem{
			Type: problemType + "bad-request", Title: "bad request", Status: http.StatusBadRequest,
			Detail: fe.Error(), Field: fe.Field, Known: fe.known,
		}
	case errors.As(err, &mbe):
		return &Problem{
			Title: "request too large", Status: http.StatusRequestEntityTooLarge,
			Detail: fmt.Sprintf("the body has more than %d bytes", mbe.Limit),
		}
	case errors.As(err, &ut):
		return &Problem{Title: "unsupported media type", Status: http.StatusUnsupportedMediaType, Detail: ut.Error()}
	case errors.Is(err, errNoPeer):
		return forbidden("%v", err)
	}
	for _, k := range problemKinds {
		if k.matches(err) {
			p := &Problem{Type: problemType + k.name, Title: k.sentinels[0].Error(), Status: k.status, Detail: err.Error(), retry: k.status == http.StatusTooManyRequests}
			if errors.Is(err, ErrUnknown) {
				p.Known = []string{}
				for _, b := range s.backends(ctx) {
					p.Known = append(p.Known, b.Name)
				}
			}
			return p
		}
	}
	s.o.Logger.Error("answer an API request", "err", err)
	return &Problem{Title: "internal error", Status: http.StatusInternalServerError, Detail: err.Error()}
}

func writeProblem(w http.ResponseWriter, p *Problem) {
	if p.Type == "" {
		q := *p
		q.Type = "about:blank"
		p = &q
	}
	b, err := json.Marshal(p)
	if err != nil {
		http.Error(w, p.Title, p.Status)
		return
	}
	w.Header().Set("Content-Type", "application/problem+json")
	w.Header().Set("Cache-Control", "no-store")
	if p.retry {
		w.Header().Set("Retry-After", "1")
	}
	switch p.Status {
	case http.StatusUnauthorized:
		w.Header().Set("WWW-Authenticate", "Bearer") // RFC 6750 section 3
		fallthrough
	case http.StatusForbidden:
		// Whoever is refused does not keep the place of a connection.
		w.Header().Set("Connection", "close")
	}
	w.WriteHeader(p.Status)
	// The caller may have gone; there is nobody else to tell.
	_, _ = w.Write(append(b, '\n'))
}

func writeJSON(w http.ResponseWriter, v any) error { return writeJSONAs(w, http.StatusOK, v) }

func writeJSONAs(w http.ResponseWriter, status int, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode the answer: %w", err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = w.Write(append(b, '\n')) // the reader may have gone
	return nil
}

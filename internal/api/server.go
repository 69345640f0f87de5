// SPDX-License-Identifier: Apache-2.0

package api

import (
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
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Limits of the server. They bound what one client can cost; all are far above what the command line
// needs.
const (
	maxBody        = 64 << 10
	maxHeader      = 16 << 10
	maxConns       = 128              // open connections; more wait in the backlog
	maxActions     = 32               // requests answered at the same time
	maxStreams     = 64               // followers of the event log
	maxStragglers  = 10_000           // rows of one answer
	headerTimeout  = 5 * time.Second  // from accept to the end of the header
	bodyTimeout    = 10 * time.Second // from accept to the end of the body
	answerTimeout  = 30 * time.Second // to take the answer; per event on a stream
	idleTimeout    = time.Minute      // between two requests of a connection
	closeTimeout   = 5 * time.Second  // for answers under way when the server stops
	streamInterval = 15 * time.Second // between two looks at whether a silent follower is still there
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
	UID     int // of the caller; -1 if the connection does not tell
	PID     int // of the caller; 0 if the connection does not tell
	By      string
	Action  string // drain, undrain, extend, cut
	Backend string
	Drain   string // its id, if there is one
	Reason  string
	Status  int   // the HTTP status of the answer
	Err     error // why it was refused
}

// Options of NewServer. Source and Log are required.
type Options struct {
	Source  Source
	Log     *Log
	Metrics http.Handler // GET /metrics; nil: 404
	// Audit is called once for each action, after it; nil writes it to Logger at Info.
	Audit  func(Audit)
	Logger *slog.Logger // nil discards
}

// Server serves the API. Its methods may be called from any goroutine.
type Server struct {
	o       Options
	handler http.Handler
	probes  http.Handler
	actions chan struct{}
	streams chan struct{}
}

// NewServer returns a server that is not serving yet.
func NewServer(o Options) (*Server, error) {
	if o.Source == nil || o.Log == nil {
		return nil, errors.New("create the API server: Source and Log are required")
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	s := &Server{o: o, actions: make(chan struct{}, maxActions), streams: make(chan struct{}, maxStreams)}
	if s.o.Audit == nil {
		s.o.Audit = s.logAudit
	}
	s.handler = s.mux(routes)
	s.probes = s.mux(slices.DeleteFunc(slices.Clone(routes), func(r route) bool { return !r.probe }))
	return s, nil
}

// Serve answers the whole API on ln until ctx is over, then lets the answers under way finish: followers
// of the event log get what is retained if the log has been closed. It closes ln. Nil when it stopped
// because of ctx.
//
// Actions need to know their caller and are refused on a connection that is not a Unix socket.
func (s *Server) Serve(ctx context.Context, ln net.Listener) error {
	return s.serve(ctx, ln, s.handler)
}

// ServeProbes answers /livez, /readyz, /readyz/NAME and /metrics alone, for a TCP address that probes and
// Prometheus reach. Otherwise it is like Serve.
func (s *Server) ServeProbes(ctx context.Context, ln net.Listener) error {
	return s.serve(ctx, ln, s.probes)
}

func (s *Server) serve(ctx context.Context, ln net.Listener, h http.Handler) error {
	stopping, stop := context.WithCancelCause(context.WithoutCancel(ctx))
	defer stop(nil)
	srv := &http.Server{
		Handler:           h,
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
		ConnContext: withPeer,
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(limitListener(ln, maxConns)) }()
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
}

func (c *limitedConn) Close() error {
	defer c.release()
	return c.Conn.Close()
}

// route is one operation of the API.
type route struct {
	method, path string
	probe        bool // also served by ServeProbes
	handle       func(*Server, http.ResponseWriter, *http.Request) error
}

// routes is the whole API; a test compares it with openapi.json.
var routes = []route{
	{"GET", "/v1/backends", false, (*Server).getBackends},
	{"GET", "/v1/backends/{name}", false, (*Server).getBackend},
	{"GET", "/v1/backends/{name}/stragglers", false, (*Server).getStragglers},
	{"POST", "/v1/backends/{name}/drain", false, (*Server).postDrain},
	{"POST", "/v1/backends/{name}/undrain", false, (*Server).postUndrain},
	{"POST", "/v1/backends/{name}/extend", false, (*Server).postExtend},
	{"POST", "/v1/backends/{name}/cut", false, (*Server).postCut},
	{"GET", "/v1/drains", false, (*Server).getDrains},
	{"GET", "/v1/drains/{id}", false, (*Server).getDrain},
	{"GET", "/v1/events", false, (*Server).getEvents},
	{"GET", "/livez", true, (*Server).getLive},
	{"GET", "/readyz", true, (*Server).getReady},
	{"GET", "/readyz/{name}", true, (*Server).getBackendReady},
	{"GET", "/metrics", true, (*Server).getMetrics},
	{"GET", "/openapi.json", false, (*Server).getOpenAPI},
}

// mux answers with problem documents where http.ServeMux would answer in plain text.
func (s *Server) mux(rs []route) http.Handler {
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
			s.dispatch(w, req, methods)
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

func (s *Server) dispatch(w http.ResponseWriter, req *http.Request, methods map[string]route) {
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
	// A probe must not wait behind others, and a follower stays for ever and has a limit of its own.
	if !r.probe && r.path != "/v1/events" {
		select {
		case s.actions <- struct{}{}:
			defer func() { <-s.actions }()
		case <-req.Context().Done():
			return
		}
	}
	req.Body = http.MaxBytesReader(w, req.Body, maxBody)
	if err := r.handle(s, w, req); err != nil {
		writeProblem(w, s.problem(req.Context(), err))
	}
}

func (s *Server) getBackends(w http.ResponseWriter, req *http.Request) error {
	return writeJSON(w, BackendList{orEmpty(s.o.Source.Backends(req.Context()))})
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
	return s.action(w, req, "drain", &r, func(ctx context.Context, name, by string) (Drain, string, error) {
		r.By = by
		d, err := s.o.Source.Drain(ctx, name, r)
		return d, r.Reason, err
	})
}

func (s *Server) postUndrain(w http.ResponseWriter, req *http.Request) error {
	var r UndrainRequest
	return s.action(w, req, "undrain", &r, func(ctx context.Context, name, by string) (Drain, string, error) {
		r.By = by
		d, err := s.o.Source.Undrain(ctx, name, r)
		return d, r.Reason, err
	})
}

func (s *Server) postExtend(w http.ResponseWriter, req *http.Request) error {
	var r ExtendRequest
	return s.action(w, req, "extend", &r, func(ctx context.Context, name, by string) (Drain, string, error) {
		r.By = by
		d, err := s.o.Source.Extend(ctx, name, r)
		return d, r.Reason, err
	})
}

func (s *Server) postCut(w http.ResponseWriter, req *http.Request) error {
	var r CutRequest
	return s.action(w, req, "cut", &r, func(ctx context.Context, name, by string) (Drain, string, error) {
		r.By = by
		d, err := s.o.Source.Cut(ctx, name, r)
		return d, r.Reason, err
	})
}

// action decodes and checks a request, does it, and writes its audit record, whatever became of it.
func (s *Server) action(w http.ResponseWriter, req *http.Request, name string, r interface{ check() error },
	do func(ctx context.Context, backend, by string) (Drain, string, error)) error {
	p := peerOf(req.Context())
	a := Audit{Time: time.Now(), UID: p.uid, PID: p.pid, By: p.String(), Action: name, Backend: req.PathValue("name")}
	var d Drain
	a.Err = func() error {
		if p.uid < 0 {
			return errNoPeer
		}
		if err := checkContentType(req); err != nil {
			return err
		}
		if err := decodeRequest(req.Body, r); err != nil {
			return err
		}
		if err := r.check(); err != nil {
			return err
		}
		// A caller who hangs up has still asked: what was begun is brought to its end.
		var err error
		d, a.Reason, err = do(context.WithoutCancel(req.Context()), a.Backend, a.By)
		return err
	}()
	a.Drain, a.Status = d.ID, http.StatusOK
	if a.Err != nil {
		a.Status = s.problem(req.Context(), a.Err).Status
	}
	s.o.Audit(a)
	if a.Err != nil {
		return a.Err
	}
	return writeJSON(w, d)
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
	s.o.Logger.LogAttrs(context.Background(), slog.LevelInfo, "action over the API", attrs...)
}

func (s *Server) getDrains(w http.ResponseWriter, req *http.Request) error {
	return writeJSON(w, DrainList{orEmpty(s.o.Source.Drains(req.Context()))})
}

func (s *Server) getDrain(w http.ResponseWriter, req *http.Request) error {
	d, err := s.o.Source.DrainByID(req.Context(), req.PathValue("id"))
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
	select {
	case s.streams <- struct{}{}:
		defer func() { <-s.streams }()
	default:
		w.Header().Set("Retry-After", "1")
		return &Problem{
			Title: "too many followers", Status: http.StatusServiceUnavailable,
			Detail: fmt.Sprintf("%d readers follow the events already; end one of them", maxStreams),
		}
	}
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
	s.stream(ctx, w, rc, s.o.Log.Subscribe(from), follow)
	return nil
}

// stream copies events until there are none left, or the client or the server goes. The answer has begun, so
// there is nobody to tell about an error.
func (s *Server) stream(ctx context.Context, w io.Writer, rc *http.ResponseController, sub *Subscription, follow bool) {
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
var errNoPeer = errors.New("actions need a Unix socket, which says who asks")

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
		return &Problem{Title: "forbidden", Status: http.StatusForbidden, Detail: err.Error()}
	}
	for _, k := range problemKinds {
		if k.matches(err) {
			p := &Problem{Type: problemType + k.name, Title: k.sentinels[0].Error(), Status: k.status, Detail: err.Error()}
			if errors.Is(err, ErrUnknown) {
				p.Known = []string{}
				for _, b := range s.o.Source.Backends(ctx) {
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
	w.WriteHeader(p.Status)
	// The caller may have gone; there is nobody else to tell.
	_, _ = w.Write(append(b, '\n'))
}

func writeJSON(w http.ResponseWriter, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode the answer: %w", err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	_, _ = w.Write(append(b, '\n')) // the reader may have gone
	return nil
}

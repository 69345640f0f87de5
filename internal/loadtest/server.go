// SPDX-License-Identifier: Apache-2.0

package loadtest

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// serverCommand is the first argument by which a binary knows that it was started to be a server.
const serverCommand = "loadtest-server"

// GoServer is the command line of [Serve] in a child process of this binary, whose main function or
// TestMain must call [ServeIfAsked] first. The flags are those of [ParseServerFlags].
func GoServer(flags ...string) ([]string, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find own binary: %w", err)
	}
	return append([]string{exe, serverCommand}, flags...), nil
}

// ServeIfAsked serves and exits, if the process was started by a command line of [GoServer].
func ServeIfAsked() {
	if len(os.Args) < 2 || os.Args[1] != serverCommand {
		return
	}
	os.Exit(ServerMain(os.Args[2:], os.Stdout, os.Stderr))
}

// ServerMain is the main function of a server: it parses the flags, serves until it is told to stop, and
// returns the exit code.
func ServerMain(args []string, stdout, stderr io.Writer) int {
	o, err := ParseServerFlags(args, stderr)
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	if err != nil {
		return 2
	}
	o.Log = stdout
	if err := Serve(context.Background(), o); err != nil {
		fmt.Fprintln(stderr, "server:", err)
		return 1
	}
	return 0
}

// ServeOptions says how a Go server listens and how it takes its stop signal.
//
// It answers
//
//	/            after ?ms= milliseconds, with ?kb= kilobytes
//	/big         10 MB, or ?mb=
//	/events      server-sent events without end, one per ?ms= (default 100)
//	/pause       half of its answer, and the rest after ?ms=
//	/upgrade     101, and then every byte comes back
//	/healthz     200, or 503 once a stop signal has come
//	/flush       200 for a POST, and counts it
//	/stats       what has happened, as [ServerStats] in JSON
//
// and logs a line "listening ADDR" for each listener, "signal NAME" for each stop signal and "exit".
type ServeOptions struct {
	Listen   []string // default 127.0.0.1:0; repeated addresses need ReusePort
	Name     string   // the X-Served-By header of every answer
	Graceful bool     // closes the listeners and waits for what is in flight at SIGTERM, SIGINT or SIGQUIT
	// Patient is Graceful for all that was accepted. net/http's own Shutdown (Go 1.26) reads a request that comes
	// after it on a connection accepted before it, and closes without an answer.
	Patient     bool
	Ignore      bool // logs SIGTERM, SIGINT and SIGQUIT and goes on
	MPTCP       bool // as Go does by default since 1.24; false: plain TCP
	ReusePort   bool
	DeferAccept int           // seconds of TCP_DEFER_ACCEPT, tcp(7)
	FastOpen    int           // queue length of TCP_FASTOPEN, tcp(7)
	AcceptDelay time.Duration // pause before each accept, which fills the accept queue
	TLS         bool          // with a certificate made at start, and HTTP/2 if the client wants it
	H2C         bool          // HTTP/2 without TLS, with prior knowledge
	Delay       time.Duration // before each answer of /
	Linger      time.Duration // between the end of serving and the end of the process
	Log         io.Writer     // nil: discards
}

// ServerStats is what /stats says.
type ServerStats struct {
	Accepted int64    `json:"accepted"` // connections
	Requests int64    `json:"requests"` // begun
	Answered int64    `json:"answered"`
	Flushes  int64    `json:"flushes"`
	Signals  []string `json:"signals"` // stop signals received, in order
}

// ParseServerFlags parses the command line of a server.
func ParseServerFlags(args []string, stderr io.Writer) (ServeOptions, error) {
	var o ServeOptions
	fs := flag.NewFlagSet(serverCommand, flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.Func("listen", "`address` to listen on (repeatable, default 127.0.0.1:0)", func(s string) error {
		o.Listen = append(o.Listen, s)
		return nil
	})
	fs.StringVar(&o.Name, "name", "", "value of the X-Served-By header")
	fs.BoolVar(&o.Graceful, "graceful", false, "finish what is in flight at a stop signal")
	fs.BoolVar(&o.Patient, "patient", false, "answer all that was accepted at a stop signal")
	fs.BoolVar(&o.Ignore, "ignore-signals", false, "log stop signals and go on")
	fs.BoolVar(&o.MPTCP, "mptcp", false, "listen with MPTCP, as Go does by default")
	fs.BoolVar(&o.ReusePort, "reuseport", false, "set SO_REUSEPORT")
	fs.IntVar(&o.DeferAccept, "defer-accept", 0, "TCP_DEFER_ACCEPT in `seconds`")
	fs.IntVar(&o.FastOpen, "fast-open", 0, "TCP_FASTOPEN queue `length`")
	fs.DurationVar(&o.AcceptDelay, "accept-delay", 0, "pause before each accept")
	fs.BoolVar(&o.TLS, "tls", false, "serve TLS with a certificate made at start")
	fs.BoolVar(&o.H2C, "h2c", false, "serve HTTP/2 without TLS")
	fs.DurationVar(&o.Delay, "delay", 0, "pause before each answer of /")
	fs.DurationVar(&o.Linger, "linger", 0, "pause between the end of serving and the end of the process")
	if err := fs.Parse(args); err != nil {
		return o, err
	}
	if fs.NArg() > 0 {
		fmt.Fprintf(stderr, "%s: unexpected argument %q\n", serverCommand, fs.Arg(0))
		return o, errors.New("parse flags: unexpected argument")
	}
	return o, nil
}

// server is one running Serve.
type server struct {
	opts     ServeOptions
	stopping atomic.Bool
	accepted atomic.Int64
	requests atomic.Int64
	answered atomic.Int64
	flushes  atomic.Int64
	open     atomic.Int64 // connections, if Patient

	listeners []net.Listener

	mu      sync.Mutex
	signals []string
}

func (s *server) logf(format string, args ...any) {
	if s.opts.Log == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	fmt.Fprintf(s.opts.Log, format+"\n", args...)
}

// Serve serves until ctx is done or a stop signal ends it. Without Graceful and Ignore a stop signal ends
// the process as it ends any program that does not handle it.
func Serve(ctx context.Context, o ServeOptions) error {
	s := &server{opts: o}
	if len(o.Listen) == 0 {
		s.opts.Listen = []string{"127.0.0.1:0"}
	}
	// Before the listeners, so that a signal which follows the log line is not missed.
	signals := make(chan os.Signal, 16)
	if o.Graceful || o.Patient || o.Ignore {
		signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGQUIT)
		defer signal.Stop(signals)
	}
	hs := &http.Server{Handler: s.handler(), Protocols: new(http.Protocols)}
	hs.Protocols.SetHTTP1(true)
	if o.TLS {
		cert, key, err := selfSigned()
		if err != nil {
			return err
		}
		pair, err := tls.X509KeyPair(cert, key)
		if err != nil {
			return fmt.Errorf("load certificate: %w", err)
		}
		hs.TLSConfig = &tls.Config{Certificates: []tls.Certificate{pair}}
		hs.Protocols.SetHTTP2(true)
	}
	hs.Protocols.SetUnencryptedHTTP2(o.H2C)
	if o.Patient {
		hs.ConnState = s.note
	}

	var listeners []net.Listener
	for _, addr := range s.opts.Listen {
		l, err := s.listen(ctx, addr)
		if err != nil {
			for _, l := range listeners {
				l.Close()
			}
			return err
		}
		listeners = append(listeners, l)
	}
	s.listeners = listeners
	ended := make(chan error, len(listeners))
	for _, l := range listeners {
		s.logf("listening %s", l.Addr())
		go func() {
			if o.TLS {
				ended <- hs.ServeTLS(l, "", "")
			} else {
				ended <- hs.Serve(l)
			}
		}()
	}
	err := s.untilStopped(ctx, hs, signals, ended)
	if err == nil {
		_ = pause(ctx, o.Linger)
		s.logf("exit")
	}
	return err
}

func (s *server) untilStopped(ctx context.Context, hs *http.Server, signals <-chan os.Signal, ended <-chan error) error {
	for {
		select {
		case <-ctx.Done():
			return hs.Close()
		case err := <-ended:
			return errors.Join(fmt.Errorf("serve: %w", err), hs.Close())
		case sig := <-signals:
			s.noteSignal(sig)
			if s.opts.Ignore {
				continue
			}
			shutdown := make(chan error, 1)
			go func() {
				if s.opts.Patient {
					shutdown <- s.finish(ctx, hs, ended)
				} else {
					shutdown <- hs.Shutdown(ctx)
				}
			}()
			for {
				select {
				case sig := <-signals:
					s.noteSignal(sig)
				case err := <-shutdown:
					return err
				}
			}
		}
	}
}

// note follows the connections: they are known before their listener's Serve returns.
func (s *server) note(_ net.Conn, st http.ConnState) {
	switch st {
	case http.StateNew:
		s.open.Add(1)
	case http.StateHijacked, http.StateClosed:
		s.open.Add(-1)
	}
}

// finish closes the listeners and answers what was accepted. A connection closes behind its next answer, or at once
// when it is idle.
func (s *server) finish(ctx context.Context, hs *http.Server, ended <-chan error) error {
	for _, l := range s.listeners {
		_ = l.Close() // Serve tells how that went
	}
	for range s.listeners {
		if err := <-ended; err != nil && !errors.Is(err, net.ErrClosed) {
			return errors.Join(fmt.Errorf("serve: %w", err), hs.Close())
		}
	}
	hs.SetKeepAlivesEnabled(false)
	for s.open.Load() > 0 {
		if err := pause(ctx, 5*time.Millisecond); err != nil {
			return errors.Join(err, hs.Close())
		}
	}
	return nil
}

func (s *server) noteSignal(sig os.Signal) {
	name := sig.String()
	switch sig {
	case syscall.SIGTERM:
		name = "SIGTERM"
	case syscall.SIGINT:
		name = "SIGINT"
	case syscall.SIGQUIT:
		name = "SIGQUIT"
	}
	s.stopping.Store(true)
	s.mu.Lock()
	s.signals = append(s.signals, name)
	s.mu.Unlock()
	s.logf("signal %s", name)
}

// Socket options that package syscall does not name, from include/uapi/linux/tcp.h and asm-generic/socket.h.
const (
	soReusePort = 15
	tcpFastOpen = 23
)

func (s *server) listen(ctx context.Context, addr string) (net.Listener, error) {
	var lc net.ListenConfig
	lc.SetMultipathTCP(s.opts.MPTCP)
	lc.Control = func(_, _ string, rc syscall.RawConn) error {
		var errs []error
		set := func(fd uintptr, level, opt, v int) {
			if v > 0 {
				errs = append(errs, os.NewSyscallError("setsockopt", syscall.SetsockoptInt(int(fd), level, opt, v)))
			}
		}
		err := rc.Control(func(fd uintptr) {
			if s.opts.ReusePort {
				set(fd, syscall.SOL_SOCKET, soReusePort, 1)
			}
			set(fd, syscall.IPPROTO_TCP, syscall.TCP_DEFER_ACCEPT, s.opts.DeferAccept)
			set(fd, syscall.IPPROTO_TCP, tcpFastOpen, s.opts.FastOpen)
		})
		return errors.Join(append(errs, err)...)
	}
	l, err := lc.Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	return &countingListener{Listener: l, s: s}, nil
}

// countingListener counts, and is slow if it is to be.
type countingListener struct {
	net.Listener
	s *server
}

func (l *countingListener) Accept() (net.Conn, error) {
	if d := l.s.opts.AcceptDelay; d > 0 {
		_ = pause(context.Background(), d) // that context never ends
	}
	c, err := l.Listener.Accept()
	if err == nil {
		l.s.accepted.Add(1)
	}
	return c, err
}

func (s *server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/", s.hello)
	mux.HandleFunc("/big", s.big)
	mux.HandleFunc("/events", s.events)
	mux.HandleFunc("/pause", s.pause)
	mux.HandleFunc("/upgrade", s.upgrade)
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) {
		if s.stopping.Load() {
			http.Error(w, "stopping", http.StatusServiceUnavailable)
		}
	})
	mux.HandleFunc("POST /flush", func(http.ResponseWriter, *http.Request) { s.flushes.Add(1) })
	mux.HandleFunc("/stats", func(w http.ResponseWriter, _ *http.Request) {
		s.mu.Lock()
		signals := slices.Clone(s.signals)
		s.mu.Unlock()
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(ServerStats{ // the client is gone if this fails
			Accepted: s.accepted.Load(), Requests: s.requests.Load(), Answered: s.answered.Load(),
			Flushes: s.flushes.Load(), Signals: signals,
		})
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.requests.Add(1)
		defer s.answered.Add(1)
		if s.opts.Name != "" {
			w.Header().Set("X-Served-By", s.opts.Name)
		}
		mux.ServeHTTP(w, r)
	})
}

// number is a query parameter.
func number(r *http.Request, key string, fallback int) int {
	if n, err := strconv.Atoi(r.URL.Query().Get(key)); err == nil && n >= 0 {
		return n
	}
	return fallback
}

func millis(r *http.Request, fallback int) time.Duration {
	return time.Duration(number(r, "ms", fallback)) * time.Millisecond
}

func (s *server) hello(w http.ResponseWriter, r *http.Request) {
	// Not until the request's context ends: it does when a client half-closes, who still wants its answer.
	_ = pause(context.Background(), s.opts.Delay+millis(r, 0))
	if kb := number(r, "kb", 0); kb > 0 {
		writeBody(w, kb<<10)
		return
	}
	w.Header().Set("Content-Length", "6")
	_, _ = io.WriteString(w, "hello\n") // the client's loss, and it will say so
}

func (s *server) big(w http.ResponseWriter, r *http.Request) { writeBody(w, number(r, "mb", 10)<<20) }

func writeBody(w http.ResponseWriter, n int) {
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Content-Length", strconv.Itoa(n))
	chunk := []byte(strings.Repeat("0123456789abcde\n", 2048))
	for n > 0 {
		m, err := w.Write(chunk[:min(n, len(chunk))])
		if err != nil {
			return
		}
		n -= m
	}
}

func (s *server) events(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "text/event-stream")
	rc := http.NewResponseController(w)
	for n := 1; ; n++ {
		if _, err := fmt.Fprintf(w, "id: %d\ndata: tick\n\n", n); err != nil {
			return
		}
		if rc.Flush() != nil || pause(r.Context(), millis(r, 100)) != nil {
			return
		}
	}
}

func (s *server) pause(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Length", "10")
	_, _ = io.WriteString(w, "half ") // what is lost here is missed at the end too
	if http.NewResponseController(w).Flush() != nil || pause(r.Context(), millis(r, 1000)) != nil {
		return
	}
	_, _ = io.WriteString(w, "half\n")
}

func (s *server) upgrade(w http.ResponseWriter, r *http.Request) {
	c, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		http.Error(w, err.Error(), http.StatusNotImplemented)
		return
	}
	defer c.Close()
	head := "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n"
	if s.opts.Name != "" {
		head += "X-Served-By: " + s.opts.Name + "\r\n"
	}
	if _, err := io.WriteString(c, head+"\r\n"); err != nil {
		return
	}
	_, _ = io.Copy(c, io.MultiReader(buffered(rw.Reader), c)) // ends with the connection, however that ends
}

// buffered is what has been read ahead.
func buffered(br *bufio.Reader) io.Reader { return io.LimitReader(br, int64(br.Buffered())) }

// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"math"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Limits of the client, against a server that is stuck or is none of ours.
const (
	dialTimeout = 3 * time.Second
	maxAnswer   = 64 << 20 // and an event: one lists each connection that is left, 300 bytes or so for each
	maxProblem  = 1 << 20
)

// Client talks to one server. Its methods may be called from any goroutine. Errors of the server are
// *Problem and match the sentinels of this package with errors.Is. What a newer server adds to its answers is ignored, and a
// word that this version does not know is kept as it is.
type Client struct {
	path  string // the socket, or the URL
	base  string // of the URL of each request
	token string
	http  *http.Client
}

// Dial connects to the server at the Unix socket path and returns a client for it. ErrNotAnswering: the
// socket is there, its owner is not.
func Dial(ctx context.Context, path string) (*Client, error) {
	if len(path) > maxSocketPath {
		return nil, fmt.Errorf("connect to %s: the path has %d bytes, a socket's may have %d", path, len(path), maxSocketPath)
	}
	d := net.Dialer{Timeout: dialTimeout}
	dial := func(ctx context.Context) (net.Conn, error) {
		c, err := d.DialContext(ctx, "unix", path)
		if errors.Is(err, unix.ECONNREFUSED) {
			return nil, fmt.Errorf("connect to %s: %w", path, ErrNotAnswering)
		}
		if err != nil {
			return nil, fmt.Errorf("connect to %s: %w", path, cause(err))
		}
		return c, nil
	}
	c, err := dial(ctx)
	if err != nil {
		return nil, err
	}
	// The connection only told whether somebody is there; the transport makes its own.
	_ = c.Close()
	// The host is not used: the transport dials the socket.
	return newClient(path, "http://ebb", &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
	}), nil
}

func newClient(path, base string, t *http.Transport) *Client {
	t.MaxIdleConns, t.IdleConnTimeout = 2, idleTimeout/2
	return &Client{path: path, base: base, http: &http.Client{
		Transport: t,
		// The API has none, and what proves who we are is for this server alone.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
}

// Proof says how a client over TCP knows the server and proves who it is.
type Proof struct {
	CA        string // PEM file: who signs the server's certificate; empty: whom the system trusts
	Cert, Key string // PEM files: the client's own certificate
	TokenFile string // its one line is the bearer token
}

// DialURL is a client for the server at an http or https URL. Nothing is sent before the first request. A token is not sent
// in the clear but to a loopback address.
func DialURL(rawURL string, p Proof) (*Client, error) {
	fail := func(err error) (*Client, error) { return nil, fmt.Errorf("connect to %s: %w", rawURL, err) }
	u, err := url.Parse(rawURL)
	switch {
	case err != nil:
		return nil, fmt.Errorf("connect to an API: %w", err)
	case u.Scheme != "http" && u.Scheme != "https", u.Host == "", strings.Trim(u.Path, "/") != "", u.RawQuery != "", u.User != nil:
		return fail(errors.New("it is not of the form https://HOST:PORT"))
	case (p.Cert == "") != (p.Key == ""):
		return fail(errors.New("a certificate and its key belong together: --tls-cert and --tls-key"))
	case u.Scheme == "http" && p.Cert+p.CA != "":
		return fail(errors.New("certificates need https"))
	case u.Scheme == "http" && p.TokenFile != "" && !loopback(u.Hostname()):
		return fail(errors.New("a token is not sent in the clear; use https"))
	}
	cfg := &tls.Config{MinVersion: tls.VersionTLS12}
	if p.CA != "" {
		pem, err := os.ReadFile(p.CA)
		if err != nil {
			return fail(err)
		}
		cfg.RootCAs = x509.NewCertPool()
		if !cfg.RootCAs.AppendCertsFromPEM(pem) {
			return fail(fmt.Errorf("%s holds no certificate in PEM", p.CA))
		}
	}
	if p.Cert != "" {
		pair, err := tls.LoadX509KeyPair(p.Cert, p.Key)
		if err != nil {
			return fail(err)
		}
		cfg.Certificates = []tls.Certificate{pair}
	}
	d := net.Dialer{Timeout: dialTimeout}
	c := newClient(rawURL, u.Scheme+"://"+u.Host, &http.Transport{
		DialContext: d.DialContext, TLSClientConfig: cfg, TLSHandshakeTimeout: dialTimeout,
	})
	if p.TokenFile != "" {
		b, err := os.ReadFile(p.TokenFile)
		if err != nil {
			return fail(err)
		}
		if c.token = strings.TrimSpace(string(b)); strings.ContainsAny(c.token, " \t\r\n") {
			return fail(fmt.Errorf("%s holds more than one word, and a token is one", p.TokenFile))
		}
	}
	return c, nil
}

func loopback(host string) bool {
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.IsLoopback()
}

// cause takes off the layers of net and os that repeat the path.
func cause(err error) error {
	var errno unix.Errno
	if errors.As(err, &errno) {
		return errno
	}
	return err
}

// Path is the socket, or the URL, that the client talks to.
func (c *Client) Path() string { return c.path }

// Close drops idle connections. It is idempotent, and the client stays usable.
func (c *Client) Close() error {
	c.http.CloseIdleConnections()
	return nil
}

// Backends lists the backends.
func (c *Client) Backends(ctx context.Context) ([]Backend, error) {
	var l BackendList
	err := c.do(ctx, http.MethodGet, "/v1/backends", nil, &l)
	return l.Backends, err
}

// Backend is one backend, or ErrUnknown.
func (c *Client) Backend(ctx context.Context, name string) (Backend, error) {
	var b Backend
	err := c.do(ctx, http.MethodGet, "/v1/backends/"+url.PathEscape(name), nil, &b)
	return b, err
}

// Stragglers lists at most n open connections, those that keep a drain open first.
func (c *Client) Stragglers(ctx context.Context, name string, n int) ([]Straggler, error) {
	var l StragglerList
	err := c.do(ctx, http.MethodGet, "/v1/backends/"+url.PathEscape(name)+"/stragglers?n="+strconv.Itoa(n), nil, &l)
	return l.Stragglers, err
}

// Drain begins a drain or joins the running one.
func (c *Client) Drain(ctx context.Context, name string, r DrainRequest) (Drain, error) {
	return c.act(ctx, name, "drain", r)
}

// Undrain takes the running drain back.
func (c *Client) Undrain(ctx context.Context, name string, r UndrainRequest) (Drain, error) {
	return c.act(ctx, name, "undrain", r)
}

// Extend moves the running drain's deadline later.
func (c *Client) Extend(ctx context.Context, name string, r ExtendRequest) (Drain, error) {
	return c.act(ctx, name, "extend", r)
}

// Cut ends the running drain's wait now.
func (c *Client) Cut(ctx context.Context, name string, r CutRequest) (Drain, error) {
	return c.act(ctx, name, "cut", r)
}

func (c *Client) act(ctx context.Context, name, verb string, r any) (Drain, error) {
	var d Drain
	err := c.do(ctx, http.MethodPost, "/v1/backends/"+url.PathEscape(name)+"/"+verb, r, &d)
	return d, err
}

// Drains lists the running and the remembered drains, the newest first.
func (c *Client) Drains(ctx context.Context) ([]Drain, error) {
	var l DrainList
	err := c.do(ctx, http.MethodGet, "/v1/drains", nil, &l)
	return l.Drains, err
}

// DrainByID is one drain, or ErrUnknownDrain.
func (c *Client) DrainByID(ctx context.Context, id string) (Drain, error) {
	var d Drain
	err := c.do(ctx, http.MethodGet, "/v1/drains/"+url.PathEscape(id), nil, &d)
	return d, err
}

// Ready is nil if every backend takes new connections, else a *Problem that matches ErrNotReady.
func (c *Client) Ready(ctx context.Context) error {
	return c.do(ctx, http.MethodGet, "/readyz", nil, &Readiness{})
}

// Events yields the events from number from on (0: the oldest retained): those there are, and with follow
// those to come until ctx is over or the server stops. An error is yielded once, last; the server's
// orderly end is none. Where the log has lost events, an EventLost says so.
func (c *Client) Events(ctx context.Context, from uint64, follow bool) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		s, err := c.open(ctx, from, follow)
		if err != nil {
			yield(Event{}, err)
			return
		}
		defer s.Close()
		s.All()(yield)
	}
}

// Follow opens the stream of events that Events with follow reads, and returns when the server has
// accepted it: from then on an orderly end of the server does not lose an event. ctx holds for the
// stream's whole life.
func (c *Client) Follow(ctx context.Context, from uint64) (*Stream, error) {
	return c.open(ctx, from, true)
}

func (c *Client) open(ctx context.Context, from uint64, follow bool) (*Stream, error) {
	q := url.Values{"from": {strconv.FormatUint(from, 10)}}
	if follow {
		q.Set("follow", "true")
	}
	resp, err := c.send(ctx, http.MethodGet, "/v1/events?"+q.Encode(), nil)
	if err != nil {
		return nil, err
	}
	return &Stream{ctx: ctx, path: c.path, epoch: resp.Header.Get(epochHeader), body: resp.Body}, nil
}

// Stream is an open stream of events. It belongs to one goroutine.
type Stream struct {
	ctx   context.Context // that of the request; for the cause of its end
	path  string
	epoch string // of its numbers; empty if the server does not tell
	body  io.ReadCloser
}

// Close ends the stream. It is idempotent.
func (s *Stream) Close() error { return s.body.Close() }

// All yields the events like Events does. It can be used once.
func (s *Stream) All() iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		lines := bufio.NewScanner(s.body)
		lines.Buffer(nil, maxAnswer)
		for lines.Scan() {
			if len(bytes.TrimSpace(lines.Bytes())) == 0 {
				continue // a sign of life
			}
			var ev Event
			if err := json.Unmarshal(lines.Bytes(), &ev); err != nil {
				yield(Event{}, fmt.Errorf("read an event from %s: %w", s.path, err))
				return
			}
			if !yield(ev, nil) {
				return
			}
		}
		if err := lines.Err(); err != nil {
			if s.ctx.Err() != nil {
				err = context.Cause(s.ctx)
			}
			yield(Event{}, fmt.Errorf("read events from %s: %w", s.path, err))
		}
	}
}

// Forever is the patience of a Tail that does not end by itself.
const Forever = time.Duration(math.MaxInt64)

// Pauses between two attempts to reach a server that has gone.
const (
	firstPause = 100 * time.Millisecond
	lastPause  = 2 * time.Second
)

// Tail is a stream of events that goes on when the server is restarted. It belongs to one goroutine.
type Tail struct {
	ctx      context.Context
	client   *Client
	stream   *Stream
	next     uint64 // the number of the next event wanted
	patience time.Duration
}

// Tail opens a stream like Follow does. When the stream ends it is opened again behind the last event, unless the server
// has not come back for patience; with none the tail ends with its stream. No event is yielded twice. Where the numbers have
// begun again, an EventLost says so and the new ones are yielded from their first on.
func (c *Client) Tail(ctx context.Context, from uint64, patience time.Duration) (*Tail, error) {
	s, err := c.Follow(ctx, from)
	if err != nil {
		return nil, err
	}
	return &Tail{ctx: ctx, client: c, stream: s, next: from, patience: patience}, nil
}

// Close ends the tail. It is idempotent.
func (t *Tail) Close() error { return t.stream.Close() }

// All yields the events. An error is yielded once, last; that the server ended in order and did not come back is none. It can
// be used once.
func (t *Tail) All() iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		for {
			var broken error
			for ev, err := range t.stream.All() {
				if err != nil {
					broken = err
					break
				}
				t.next = ev.Seq + 1
				if !yield(ev, nil) {
					return
				}
			}
			last := t.next - 1
			restarted, ok := t.reopen()
			if !ok {
				if broken != nil {
					yield(Event{}, broken)
				}
				return
			}
			if restarted && !yield(lost(last, last, 0, "the log was restarted; its numbers begin again"), nil) {
				return
			}
		}
	}
}

// reopen opens the stream again. restarted: it begins again at its first number.
func (t *Tail) reopen() (restarted, ok bool) {
	epoch := t.stream.epoch
	_ = t.stream.Close() // it has been read to its end
	start, pause := time.Now(), firstPause
	for t.patience > 0 && t.ctx.Err() == nil && time.Since(start) < t.patience {
		// Even the first attempt waits: a server that is about to stop still answers.
		wait := time.NewTimer(pause)
		select {
		case <-wait.C:
		case <-t.ctx.Done():
			wait.Stop()
		}
		pause = min(2*pause, lastPause)
		s, err := t.client.Follow(t.ctx, t.next)
		if err == nil && t.next > 0 && epoch != "" && s.epoch != epoch {
			_ = s.Close() // nothing of it was read
			restarted, t.next = true, 0
			s, err = t.client.Follow(t.ctx, 0)
		}
		if err == nil {
			t.stream = s
			return restarted, true
		}
		if refused(err) {
			break
		}
	}
	return false, false
}

// refused says whether the server has answered that it never will.
func refused(err error) bool {
	var p *Problem
	return errors.As(err, &p) && p.Status < 500 && p.Status != http.StatusTooManyRequests
}

// send makes a request and turns an answer that is not 2xx into its *Problem.
func (c *Client) send(ctx context.Context, method, target string, body any) (*http.Response, error) {
	return c.sendAs(ctx, "", method, target, body)
}

// sendAs is send for a session; an empty id names none.
func (c *Client) sendAs(ctx context.Context, session, method, target string, body any) (*http.Response, error) {
	var r io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return nil, fmt.Errorf("encode the request: %w", err)
		}
		r = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, c.base+target, r)
	if err != nil {
		return nil, fmt.Errorf("make a request: %w", err)
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if session != "" {
		req.Header.Set(sessionHeader, session)
	}
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		var ue *url.Error
		if errors.As(err, &ue) {
			err = ue.Err // the URL's host says nothing
		}
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, fmt.Errorf("ask %s: %w", c.path, err)
	}
	if resp.StatusCode/100 == 2 {
		return resp, nil
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxProblem))
	if err != nil {
		return nil, fmt.Errorf("read the answer of %s: %w", c.path, err)
	}
	p := &Problem{}
	if err := json.Unmarshal(b, p); err != nil || p.Status == 0 {
		// It is no server of this API, or none of this one's.
		p = &Problem{
			Type: "about:blank", Title: resp.Status, Status: resp.StatusCode,
			Detail: fmt.Sprintf("%s answered %s: %.200q", c.path, resp.Status, bytes.TrimSpace(b)),
		}
	}
	return nil, p
}

func (c *Client) do(ctx context.Context, method, target string, body, answer any) error {
	return c.doAs(ctx, "", method, target, body, answer)
}

// doAs is do for a session. A nil answer is not read.
func (c *Client) doAs(ctx context.Context, session, method, target string, body, answer any) error {
	resp, err := c.sendAs(ctx, session, method, target, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if answer == nil {
		return nil
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxAnswer)).Decode(answer); err != nil {
		return fmt.Errorf("read the answer of %s: %w", c.path, err)
	}
	return nil
}

// Found is one socket that Discover found: a client, or why there is none.
type Found struct {
	Path   string
	Client *Client // nil if Err is not
	Err    error   // ErrNotAnswering if its owner has died, fs.ErrPermission if it may not be asked
}

// Discover finds the sockets in the run directories: the node agent's and those of each `ebb run`. A socket
// whose owner has died is in the result with its error. A directory that does not exist holds none.
func Discover(ctx context.Context, dirs ...string) ([]Found, error) {
	var (
		found []Found
		errs  []error
	)
	for _, dir := range dirs {
		paths, err := sockets(dir)
		if err != nil && !errors.Is(err, fs.ErrPermission) {
			errs = append(errs, fmt.Errorf("look for sockets in %s: %w", dir, err))
		}
		for _, p := range paths {
			c, err := Dial(ctx, p)
			found = append(found, Found{Path: p, Client: c, Err: err})
		}
	}
	return found, errors.Join(errs...)
}

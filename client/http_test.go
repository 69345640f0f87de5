// SPDX-License-Identifier: Apache-2.0

package client

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// generous is for what happens at once unless the machine stands still.
const generous = 30 * time.Second

// alone are options of a session that never finds an agent and has no signals.
func alone(t *testing.T) Options {
	return Options{
		Socket: filepath.Join(t.TempDir(), "none.sock"), Signals: NoSignals, QuietPeriod: 50 * time.Millisecond,
		Grace: 4 * generous,
	}
}

// serving is an HTTP server under test.
type serving struct {
	t    *testing.T
	s    *Session
	url  string
	addr string
	done chan error
	log  *record
}

// record is what has happened, in order.
type record struct {
	mu  sync.Mutex
	got []string
}

func (r *record) add(what string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.got = append(r.got, what)
}

func (r *record) all() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.got)
}

func serveHTTP(t *testing.T, h http.Handler, protocols func(*http.Protocols)) *serving {
	t.Helper()
	s, err := Register(t.Context(), alone(t))
	if err != nil {
		t.Fatal(err)
	}
	l, err := Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	v := &serving{t: t, s: s, addr: l.Addr().String(), url: "http://" + l.Addr().String(), done: make(chan error, 1), log: &record{}}
	srv := &http.Server{Handler: h, Protocols: new(http.Protocols)}
	srv.Protocols.SetHTTP1(true)
	if protocols != nil {
		protocols(srv.Protocols)
	}
	s.OnFlush(func(context.Context, Flush) error { v.log.add("flush"); return nil })
	go func() { v.done <- Serve(srv, l, WithSession(s), WithReadiness("/healthz", nil)) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		_ = s.Stop(ctx) // what the test was about is over
	})
	if res := get(t, newClient(t, srv.Protocols.UnencryptedHTTP2()), v.url+"/healthz"); res.StatusCode != 200 {
		t.Errorf("readiness: got %s", res.Status)
	}
	return v
}

// drain begins one, and returns when it is known.
func (v *serving) drain() {
	v.s.do(func() { v.s.begin("test", time.Now().Add(4*generous)) })
}

func (v *serving) ended() error {
	v.t.Helper()
	select {
	case err := <-v.done:
		return err
	case <-time.After(2 * generous):
		v.t.Fatal("the server does not end")
		return nil
	}
}

func get(t *testing.T, c *http.Client, url string) *http.Response {
	t.Helper()
	res, err := c.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, res.Body); err != nil {
		t.Fatal(err)
	}
	if err := res.Body.Close(); err != nil {
		t.Fatal(err)
	}
	return res
}

func newClient(t *testing.T, h2 bool) *http.Client {
	tr := &http.Transport{Protocols: new(http.Protocols)}
	tr.Protocols.SetHTTP1(!h2)
	tr.Protocols.SetUnencryptedHTTP2(h2)
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// While draining everything is answered, readiness says no, and each answer has the client go.
func TestHTTPWhileDraining(t *testing.T) {
	for _, h2 := range []bool{false, true} {
		t.Run(fmt.Sprintf("h2=%v", h2), func(t *testing.T) {
			var peers record
			v := serveHTTP(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { peers.add(r.RemoteAddr) }),
				func(p *http.Protocols) { p.SetUnencryptedHTTP2(h2) })
			c := newClient(t, h2)
			// Something arrives until the test says so.
			until := make(chan struct{})
			v.s.do(func() { v.s.servers[0] = &patient{Server: v.s.servers[0], until: until} })
			get(t, c, v.url)
			get(t, c, v.url)
			v.drain()
			get(t, c, v.url) // on the kept connection, which it ends
			get(t, c, v.url)
			get(t, c, v.url)
			if res := get(t, c, v.url+"/healthz"); res.StatusCode != 503 || !h2 && !res.Close {
				t.Errorf("readiness while draining: got %s, close %v", res.Status, res.Close)
			}
			got := peers.all()
			if got[0] != got[1] || got[1] != got[2] {
				t.Errorf("a connection was closed before its client was told: %q", got)
			}
			if got[2] == got[3] || got[3] == got[4] {
				t.Errorf("connections were kept while draining: %q", got)
			}
			close(until)
			if err := v.ended(); err != nil {
				t.Error(err)
			}
			if c, err := net.Dial("tcp", v.addr); err == nil {
				_ = c.Close() // nothing was written
				t.Error("the listener is still open")
			}
		})
	}
}

// patient is a Server that something arrives at until it is told.
type patient struct {
	Server
	until chan struct{}
}

func (p *patient) Pause(ctx context.Context, quiet time.Duration) error {
	select {
	case <-p.until:
		return p.Server.Pause(ctx, quiet)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Close, then ask to end, then wait, then flush: what is in flight is answered, and what it does is flushed.
func TestT1_OrderOfAStop(t *testing.T) {
	var v *serving
	inside := make(chan struct{})
	v = serveHTTP(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		close(inside)
		<-Draining(r.Context())
		v.log.add("told")
		<-r.Context().Done()
		v.log.add("asked")
		if context.Cause(r.Context()) != ErrFlushing {
			t.Errorf("cause: got %v, want %v", context.Cause(r.Context()), ErrFlushing)
		}
		if c, err := net.Dial("tcp", v.addr); err == nil {
			_ = c.Close() // nothing was written
			v.log.add("open")
		}
		fmt.Fprint(w, "the last words")
		v.log.add("answered")
	}), nil)
	body := make(chan string, 1)
	go func() {
		res, err := http.Get(v.url)
		if err != nil {
			body <- err.Error()
			return
		}
		defer res.Body.Close()
		b, err := io.ReadAll(res.Body)
		body <- fmt.Sprint(string(b), err)
	}()
	<-inside
	v.s.do(func() {
		v.s.begin("test", time.Now().Add(4*generous))
		v.s.flush(FlushDeadline, "", time.Now().Add(2*generous))
	})
	if err := v.ended(); err != nil {
		t.Error(err)
	}
	if got, want := <-body, "the last words<nil>"; got != want {
		t.Errorf("answer: got %q, want %q", got, want)
	}
	got, want := v.log.all(), []string{"told", "asked", "answered", "flush"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// Before the functions of OnFlush run, kept connections go, and nothing begins while they do: what a request has done would not be
// flushed any more.
func TestT1_NothingBeginsAfterTheFlush(t *testing.T) {
	var served atomic.Int32
	v := serveHTTP(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) { served.Add(1) }),
		func(p *http.Protocols) { p.SetUnencryptedHTTP2(true) })
	h1, h2 := newClient(t, false), newClient(t, true)
	get(t, h1, v.url) // both are kept
	get(t, h2, v.url)
	silent, err := net.Dial("tcp", v.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	frames, err := net.Dial("tcp", v.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer frames.Close()
	const settings = "\x00\x00\x00\x04\x00\x00\x00\x00\x00"
	if _, err := io.WriteString(frames, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"+settings); err != nil {
		t.Fatal(err)
	}
	var before int32
	v.s.OnFlush(func(context.Context, Flush) error {
		before = served.Load()
		for name, c := range map[string]*http.Client{"HTTP/1.1": h1, "HTTP/2": h2} {
			if res, err := c.Get(v.url); err == nil {
				_ = res.Body.Close() // it is not read
				t.Errorf("%s: a request that began while OnFlush ran got %s", name, res.Status)
			}
		}
		fmt.Fprint(silent, "GET / HTTP/1.1\r\nHost: x\r\n\r\n") // the answer says how it went
		if res, err := http.ReadResponse(bufio.NewReader(silent), nil); err == nil && res.StatusCode != 503 {
			t.Errorf("a connection that had said nothing yet got %s", res.Status)
		}
		const goaway = 7
		for typ := byte(0); typ != goaway; {
			var head [9]byte
			if _, err := io.ReadFull(frames, head[:]); err != nil {
				t.Errorf("idle HTTP/2: got %v before a GOAWAY", err)
				break
			}
			typ = head[3]
			if _, err := io.CopyN(io.Discard, frames, int64(head[0])<<16|int64(head[1])<<8|int64(head[2])); err != nil {
				t.Error(err)
			}
		}
		return nil
	})
	v.s.do(func() {
		v.s.begin("test", time.Now().Add(4*generous))
		v.s.flush(FlushZero, "", time.Now().Add(4*generous))
	})
	if err := v.ended(); err != nil {
		t.Error(err)
	}
	if got := served.Load(); got != before {
		t.Errorf("%d requests were served after the flush", got-before)
	}
}

// What begins while those in flight have been asked to end is served with a context of its own, and is flushed as well.
func TestT1_RequestsInBetween(t *testing.T) {
	var v *serving
	inside, asked, leave := make(chan struct{}), make(chan struct{}), make(chan struct{})
	v = serveHTTP(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/first":
			close(inside)
			<-r.Context().Done()
			close(asked)
			<-leave
		case "/late":
			if err := r.Context().Err(); err != nil {
				t.Errorf("a request that has just begun: %v", err)
			}
			v.log.add("late")
		}
	}), func(p *http.Protocols) { p.SetUnencryptedHTTP2(true) })
	kept, err := net.Dial("tcp", v.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer kept.Close()
	fmt.Fprint(kept, "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
	if _, err := http.ReadResponse(bufio.NewReader(kept), nil); err != nil {
		t.Fatal(err)
	}
	c := newClient(t, true)
	first := make(chan struct{})
	go func() {
		defer close(first)
		get(t, c, v.url+"/first")
	}()
	<-inside
	v.s.do(func() {
		v.s.begin("test", time.Now().Add(4*generous))
		v.s.flush(FlushDeadline, "", time.Now().Add(4*generous))
	})
	<-asked
	get(t, c, v.url+"/late")
	if err := kept.SetReadDeadline(time.Now().Add(generous)); err != nil {
		t.Fatal(err)
	}
	if _, err := kept.Read(make([]byte, 1)); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("a kept connection stays while requests are waited for")
	}
	close(leave)
	<-first
	if err := v.ended(); err != nil {
		t.Error(err)
	}
	if got, want := v.log.all(), []string{"late", "flush"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// The context of such a request ends too, when it is waited for no longer.
func TestD2_RequestsInBetweenAreAskedToEnd(t *testing.T) {
	inside, late, left := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	v := serveHTTP(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/first" {
			close(inside)
			<-late
			return
		}
		close(late)
		<-r.Context().Done()
		left <- context.Cause(r.Context())
	}), func(p *http.Protocols) { p.SetUnencryptedHTTP2(true) })
	c := newClient(t, true)
	done := make(chan struct{}, 2)
	ask := func(path string) {
		if res, err := c.Get(v.url + path); err == nil {
			_ = res.Body.Close() // it is not read
		}
		done <- struct{}{}
	}
	go ask("/first")
	<-inside
	v.s.do(func() {
		v.s.begin("test", time.Now().Add(4*generous))
		v.s.flush(FlushDeadline, "", time.Now().Add(4*generous))
	})
	<-v.s.Context().Done()
	go ask("/late")
	<-late
	v.s.do(v.s.forceNow) // the wait is over
	if got := <-left; got != ErrFlushing {
		t.Errorf("cause: got %v, want %v", got, ErrFlushing)
	}
	_ = v.ended() // by force, if the handler has been slower
	<-done
	<-done
}

// An offer to switch the protocol that is not taken up keeps no connection.
func TestUpgradeWhileDraining(t *testing.T) {
	v := serveHTTP(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), nil)
	until := make(chan struct{})
	v.s.do(func() { v.s.servers[0] = &patient{Server: v.s.servers[0], until: until} })
	v.drain()
	for offer, want := range map[string]bool{"h2c": true, "TLS/1.2": true, "websocket": false, "WebSocket": false} {
		c, err := net.Dial("tcp", v.addr)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", offer)
		res, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatal(err)
		}
		if res.Close != want {
			t.Errorf("%s: got close %v, want %v", offer, res.Close, want)
		}
		_ = c.Close() // everything was read
	}
	close(until)
}

func TestOptionsThatExcludeEachOther(t *testing.T) {
	s, err := Register(t.Context(), alone(t))
	if err != nil {
		t.Fatal(err)
	}
	defer leave(s)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := Serve(&http.Server{}, l, WithSession(s), WithOptions(alone(t))); err == nil {
		t.Error("it serves")
	}
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("the listener: got %v, want %v", err, net.ErrClosed)
	}
	if err := ListenAndServe(&http.Server{Addr: "127.0.0.1:0"}, WithSession(s), WithOptions(alone(t))); err == nil {
		t.Error("it serves")
	}
}

// A stream without end learns that it should wind down, and its last message arrives.
func TestC4_StreamsAreTold(t *testing.T) {
	inside := make(chan struct{}, 2)
	v := serveHTTP(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		draining := Draining(r.Context())
		if r.URL.Path == "/hijack" {
			c, rw, err := http.NewResponseController(w).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			inside <- struct{}{}
			<-draining
			fmt.Fprint(rw, "bye\n")
			_ = rw.Flush() // the client says what has arrived
			return
		}
		_ = http.NewResponseController(w).Flush() // so does it here
		inside <- struct{}{}
		<-draining
		fmt.Fprint(w, "bye\n")
	}), nil)
	last := make(chan string, 2)
	go func() {
		res, err := http.Get(v.url)
		if err != nil {
			last <- err.Error()
			return
		}
		defer res.Body.Close()
		b, err := io.ReadAll(res.Body)
		last <- fmt.Sprint(string(b), err)
	}()
	go func() {
		c, err := net.Dial("tcp", v.addr)
		if err != nil {
			last <- err.Error()
			return
		}
		defer c.Close()
		fmt.Fprint(c, "GET /hijack HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n")
		line, err := bufio.NewReader(c).ReadString('\n')
		last <- fmt.Sprint(line, err)
	}()
	<-inside
	<-inside
	v.drain()
	for range 2 {
		if got := <-last; got != "bye\n<nil>" {
			t.Errorf("got %q, want the last message", got)
		}
	}
	if err := v.ended(); err != nil {
		t.Errorf("both have ended in time: %v", err)
	}
}

// What ignores everything is closed at the deadline, and it is said.
func TestD2_RequestsAreForced(t *testing.T) {
	inside, leave := make(chan struct{}), make(chan struct{})
	v := serveHTTP(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		close(inside)
		<-leave
	}), nil)
	failed := make(chan error, 1)
	go func() {
		res, err := http.Get(v.url)
		if err == nil {
			err = res.Body.Close()
		}
		failed <- err
	}()
	<-inside
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if err := v.s.Stop(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want %v", err, context.DeadlineExceeded)
	}
	if err := v.ended(); !errors.Is(err, ErrForced) {
		t.Errorf("serve: got %v, want %v", err, ErrForced)
	}
	if err := <-failed; err == nil {
		t.Error("the request has succeeded")
	}
	close(leave)
}

// The kernel's queue is served when the listener closes.
func TestListenerTakesWhatIsQueued(t *testing.T) {
	inner, err := Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := NewListener(inner)
	const n = 50
	for range n {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	finished := make(chan struct{})
	go func() { l.Finish(); close(finished) }()
	<-l.closing
	got := 0
	for {
		c, err := l.Accept()
		if err != nil {
			if !errors.Is(err, net.ErrClosed) {
				t.Errorf("got %v, want %v", err, net.ErrClosed)
			}
			break
		}
		got++
		_ = c.Close() // nothing was written
	}
	if <-finished; got != n {
		t.Errorf("accepted %d, want %d", got, n)
	}
	l.Finish()
}

func TestListenIsPlainTCP(t *testing.T) {
	l, err := Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		c, err := net.Dial("tcp", l.Addr().String())
		if err == nil {
			_ = c.Close() // nothing was written
		}
	}()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if mptcp, err := c.(*net.TCPConn).MultipathTCP(); mptcp || err != nil {
		t.Errorf("got MPTCP %v, %v", mptcp, err)
	}
	raw, err := l.(*net.TCPListener).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if proto, err := protocol(raw); err != nil || proto != tcpProtocol {
		t.Errorf("protocol of the listener: got %d, %v; want %d", proto, err, tcpProtocol)
	}
}

func TestServerThatBreaks(t *testing.T) {
	t.Run("closed by the program", func(t *testing.T) {
		srv := httptest.NewUnstartedServer(http.NotFoundHandler()).Config
		l, err := Listen(t.Context(), "tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() { done <- Serve(srv, l, WithOptions(alone(t))) }()
		get(t, newClient(t, false), "http://"+l.Addr().String())
		if err := srv.Close(); err != nil {
			t.Fatal(err)
		}
		if err := <-done; !errors.Is(err, http.ErrServerClosed) {
			t.Errorf("got %v, want %v", err, http.ErrServerClosed)
		}
	})
	t.Run("address in use", func(t *testing.T) {
		l, err := Listen(t.Context(), "tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if err := ListenAndServe(&http.Server{Addr: l.Addr().String()}); err == nil || !strings.Contains(err.Error(), "in use") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("no certificate", func(t *testing.T) {
		if err := ListenAndServeTLS(&http.Server{Addr: "127.0.0.1:0"}, "/none", "/none", WithOptions(alone(t))); err == nil {
			t.Error("no error")
		}
	})
}

func TestDrainingElsewhere(t *testing.T) {
	if Draining(t.Context()) != nil {
		t.Error("a context of nobody has a channel")
	}
}

// A TLS server sends its GOAWAY as well.
func TestHTTP2OverTLS(t *testing.T) {
	ts := httptest.NewUnstartedServer(nil)
	ts.EnableHTTP2 = true
	ts.StartTLS() // for its certificate
	defer ts.Close()
	s, err := Register(t.Context(), alone(t))
	if err != nil {
		t.Fatal(err)
	}
	l, err := Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var peers record
	srv := &http.Server{
		Handler:   http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { peers.add(r.Proto + " " + r.RemoteAddr) }),
		TLSConfig: &tls.Config{Certificates: ts.TLS.Certificates},
	}
	done := make(chan error, 1)
	go func() { done <- ServeTLS(srv, l, "", "", WithSession(s)) }()
	tr := ts.Client().Transport.(*http.Transport).Clone()
	defer tr.CloseIdleConnections()
	c := &http.Client{Transport: tr}
	url := "https://" + l.Addr().String()
	get(t, c, url)
	until := make(chan struct{})
	s.do(func() {
		s.servers[0] = &patient{Server: s.servers[0], until: until}
		s.begin("test", time.Now().Add(4*generous))
	})
	get(t, c, url)
	get(t, c, url)
	close(until)
	if err := <-done; err != nil {
		t.Error(err)
	}
	if err := s.Stop(t.Context()); err != nil {
		t.Error(err)
	}
	got := peers.all()
	if !strings.HasPrefix(got[0], "HTTP/2.0 ") || got[0] != got[1] || got[1] == got[2] {
		t.Errorf("got %q, want HTTP/2 and a new connection after the first answer while draining", got)
	}
}

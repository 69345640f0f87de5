// SPDX-License-Identifier: Apache-2.0

package loadtest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// limit is how long a test waits for an event before it gives up.
const limit = time.Minute

func TestMain(m *testing.M) {
	ServeIfAsked()
	os.Exit(m.Run())
}

// scripted serves each connection by fn, which is told how many came before it.
func scripted(t *testing.T, fn func(n int, c *net.TCPConn, br *bufio.Reader)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for n := 0; ; n++ {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				fn(n, c.(*net.TCPConn), bufio.NewReader(c))
			}()
		}
	}()
	return l.Addr().String()
}

func readRequest(t *testing.T, br *bufio.Reader) bool {
	req, err := http.ReadRequest(br)
	if err != nil {
		return false
	}
	_, _ = io.Copy(io.Discard, req.Body)
	return true
}

const hello = "HTTP/1.1 200 OK\r\nContent-Length: 6\r\nX-Served-By: script\r\n\r\nhello\n"

// firstResult runs the load until an attempt has ended, and returns it.
func firstResult(t *testing.T, o Options) (Result, Report) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	results := make(chan Result, 1)
	o.OnResult = func(r Result) {
		select {
		case results <- r:
		default:
		}
		cancel()
	}
	g, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Run(ctx); err != nil {
		t.Fatal(err)
	}
	if len(results) == 0 {
		t.Fatal("no attempt ended")
	}
	return <-results, g.Report()
}

func TestVerdictOfNewConnection(t *testing.T) {
	answer := func(s string) func(int, *net.TCPConn, *bufio.Reader) {
		return func(_ int, c *net.TCPConn, br *bufio.Reader) {
			if readRequest(t, br) {
				_, _ = io.WriteString(c, s)
			}
		}
	}
	reset := func(s string) func(int, *net.TCPConn, *bufio.Reader) {
		return func(_ int, c *net.TCPConn, br *bufio.Reader) {
			if !readRequest(t, br) {
				return
			}
			_, _ = io.WriteString(c, s)
			if s != "" {
				// A RST takes back what the peer has not read yet: it answers by its FIN that it has.
				_, _ = br.ReadByte()
			}
			_ = c.SetLinger(0)
		}
	}
	for _, tt := range []struct {
		name   string
		serve  func(int, *net.TCPConn, *bufio.Reader)
		change func(*Options)
		want   Verdict
	}{
		{name: "complete", serve: answer(hello), want: OK},
		{name: "status", serve: answer("HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n"), want: Status},
		{name: "fin before the answer", serve: answer(""), want: EOF},
		{name: "reset before the answer", serve: reset(""), want: ReadReset},
		{name: "fin inside the head", serve: answer(hello[:20]), want: Partial},
		{name: "fin inside the body", serve: answer(hello[:len(hello)-2]), want: Partial},
		{name: "no HTTP", serve: answer("EHLO\r\n\r\n"), want: Malformed},
		{
			name:   "no answer",
			serve:  func(_ int, _ *net.TCPConn, br *bufio.Reader) { _, _ = io.Copy(io.Discard, br) },
			change: func(o *Options) { o.Timeout = 50 * time.Millisecond }, want: Timeout,
		},
		{
			name: "half-closed client",
			serve: func(_ int, c *net.TCPConn, br *bufio.Reader) {
				_, _ = io.Copy(io.Discard, br)
				_, _ = io.WriteString(c, hello)
			},
			change: func(o *Options) { o.Slow, o.HalfClose = 0, 1 }, want: OK,
		},
		{
			name: "dial timeout",
			change: func(o *Options) {
				o.ConnectTimeout = 10 * time.Millisecond
				o.Dial = func(ctx context.Context, _, _ string) (net.Conn, error) { <-ctx.Done(); return nil, ctx.Err() }
			},
			want: ConnectTimeout,
		},
		{
			name: "reset handshake",
			change: func(o *Options) {
				o.Dial = func(context.Context, string, string) (net.Conn, error) { return nil, syscall.ECONNRESET }
			},
			want: ConnectReset,
		},
		{
			name: "no port left",
			change: func(o *Options) {
				o.Dial = func(context.Context, string, string) (net.Conn, error) { return nil, syscall.EADDRNOTAVAIL }
			},
			want: ClientError,
		},
		{name: "TLS to a server without", serve: func(_ int, c *net.TCPConn, br *bufio.Reader) {
			_, _ = io.WriteString(c, hello)
			_, _ = io.Copy(io.Discard, br)
		}, change: func(o *Options) { o.TLS = InsecureTLS() }, want: ConnectError},
	} {
		t.Run(tt.name, func(t *testing.T) {
			serve := tt.serve
			if serve == nil {
				serve = answer(hello)
			}
			o := Options{Targets: []Target{{Addr: scripted(t, serve)}}, Slow: 1}
			if tt.change != nil {
				tt.change(&o)
			}
			r, rep := firstResult(t, o)
			if r.Verdict != tt.want {
				t.Errorf("got %s (%v), want %s", r.Verdict, r.Err, tt.want)
			}
			if got := rep.Failed > 0; got != tt.want.Failure() {
				t.Errorf("got %d failed, want failure %t", rep.Failed, tt.want.Failure())
			}
		})
	}
}

func TestVerdictRefused(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	r, rep := firstResult(t, Options{Targets: []Target{{Name: "gone", Addr: l.Addr().String()}}, Rate: 100})
	if r.Verdict != ConnectRefused || r.Target != "gone" {
		t.Errorf("got %s of %s, want %s of gone", r.Verdict, r.Target, ConnectRefused)
	}
	tally := rep.Verdicts[ConnectRefused]
	if tally == nil || tally.Count < 1 || tally.First.IsZero() || tally.Last.Before(tally.First) || tally.Example == "" {
		t.Errorf("got tally %+v, want counts, times and an example", tally)
	}
}

// A reset that follows a part of the answer must not read as one before it.
func TestVerdictResetInsideAnswer(t *testing.T) {
	got := make(chan struct{})
	addr := scripted(t, func(_ int, c *net.TCPConn, br *bufio.Reader) {
		if !readRequest(t, br) {
			return
		}
		_, _ = io.WriteString(c, hello[:20])
		<-got
		_ = c.SetLinger(0)
	})
	var once atomic.Bool
	r, _ := firstResult(t, Options{
		Targets: []Target{{Addr: addr}}, Slow: 1,
		Dial: func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := new(net.Dialer).DialContext(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			return onRead{c, func() {
				if !once.Swap(true) {
					close(got)
				}
			}}, nil
		},
	})
	if r.Verdict != Partial || !errors.Is(r.Err, syscall.ECONNRESET) {
		t.Errorf("got %s (%v), want %s by a reset", r.Verdict, r.Err, Partial)
	}
}

// onRead tells when the first bytes have been read.
type onRead struct {
	net.Conn
	tell func()
}

func (c onRead) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 {
		c.tell()
	}
	return n, err
}

// C10: a request on a connection that the server closes at this instant is counted apart and repeated.
func TestKeepAliveRaceIsRepeated(t *testing.T) {
	for _, how := range []string{"fin", "reset"} {
		t.Run(how, func(t *testing.T) {
			addr := scripted(t, func(n int, c *net.TCPConn, br *bufio.Reader) {
				// The first connection answers once and then takes a request without answering it.
				for i := 0; readRequest(t, br); i++ {
					if n == 0 && i == 1 {
						if how == "reset" {
							_ = c.SetLinger(0)
						}
						return
					}
					if _, err := io.WriteString(c, hello); err != nil {
						return
					}
				}
			})
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			var results []Result
			g, err := New(Options{
				Targets: []Target{{Addr: addr}}, KeepAlive: 1,
				OnResult: func(r Result) {
					if results = append(results, r); len(results) == 4 {
						cancel()
					}
				},
			})
			if err != nil {
				t.Fatal(err)
			}
			if err := g.Run(ctx); err != nil {
				t.Fatal(err)
			}
			want := []struct {
				v             Verdict
				reused, retry bool
			}{{OK, false, false}, {KeepAliveRace, true, false}, {OK, false, true}, {OK, true, false}}
			if len(results) < len(want) {
				t.Fatalf("got %d attempts, want %d", len(results), len(want))
			}
			for i, w := range want {
				if r := results[i]; r.Verdict != w.v || r.Reused != w.reused || r.Retry != w.retry {
					t.Errorf("attempt %d: got %s, reused %t, retry %t, want %+v", i, r.Verdict, r.Reused, r.Retry, w)
				}
			}
			rep := g.Report()
			if rep.Races != 1 || rep.Failed != 0 || rep.Abandoned != 0 || rep.Requests != rep.OK || rep.Requests != int64(len(results)-1) {
				t.Errorf("got %d requests, %d ok, %d failed, %d races, %d abandoned in %d attempts",
					rep.Requests, rep.OK, rep.Failed, rep.Races, rep.Abandoned, len(results))
			}
		})
	}
}

// A client sees the FIN of an idle connection and does not send on it.
func TestIdleCloseIsNoRace(t *testing.T) {
	closed := make(chan struct{}, 100)
	addr := scripted(t, func(_ int, c *net.TCPConn, br *bufio.Reader) {
		if readRequest(t, br) {
			_, _ = io.WriteString(c, hello)
		}
		c.Close()
		closed <- struct{}{}
	})
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	n := 0
	g, err := New(Options{Targets: []Target{{Addr: addr}}, KeepAlive: 1, OnResult: func(r Result) {
		<-closed // the FIN is on its way before the client thinks of its next request
		if r.Verdict != OK {
			t.Errorf("got %s (%v), want %s", r.Verdict, r.Err, OK)
		}
		if n++; n == 5 {
			cancel()
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Run(ctx); err != nil {
		t.Fatal(err)
	}
	if rep := g.Report(); rep.IdleClosed < 4 || rep.Races != 0 {
		t.Errorf("got %d idle closes and %d races, want at least 4 and none", rep.IdleClosed, rep.Races)
	}
}

func serve(t *testing.T, o ServeOptions) string {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	r, w := io.Pipe()
	o.Log = w
	go func() {
		done <- Serve(ctx, o)
		w.Close()
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	br := bufio.NewReader(r)
	var addr string
	if _, err := fmt.Fscanf(br, "listening %s\n", &addr); err != nil {
		t.Fatalf("start server: %v", err)
	}
	go func() { _, _ = io.Copy(io.Discard, br) }()
	return addr
}

func TestEveryKindAgainstGoServer(t *testing.T) {
	for _, tt := range []struct {
		name   string
		server ServeOptions
		change func(*Options)
	}{
		{name: "plain"},
		{name: "mptcp", server: ServeOptions{MPTCP: true}},
		{name: "ipv6", server: ServeOptions{Listen: []string{"[::1]:0"}}},
		{name: "defer accept, fast open", server: ServeOptions{DeferAccept: 1, FastOpen: 16, ReusePort: true}, change: func(o *Options) { o.Silent = 0 }},
		{name: "tls", server: ServeOptions{TLS: true}, change: func(o *Options) { o.TLS = InsecureTLS() }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.server.Name = "me"
			o := Options{
				Targets: []Target{{Addr: serve(t, tt.server)}},
				Rate:    50, KeepAlive: 2, Gap: 5 * time.Millisecond, Slow: 1, SlowPath: "/?ms=50", SlowRead: 1, BigPath: "/big?mb=1", SlowReadRate: 8 << 20,
				HalfClose: 1, Events: 1, Upgrade: 1, Silent: 1,
			}
			if tt.change != nil {
				tt.change(&o)
			}
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			seen := make(map[Kind]bool)
			results := make(chan Result, 1000)
			o.OnResult = func(r Result) {
				select {
				case results <- r:
				default:
				}
			}
			go func() {
				for r := range results {
					if seen[r.Kind] = true; len(seen) == 5 {
						cancel()
					}
				}
			}()
			g, err := New(o)
			if err != nil {
				t.Fatal(err)
			}
			if err := g.Run(ctx); err != nil {
				t.Fatal(err)
			}
			close(results)
			rep := g.Report()
			if rep.Failed != 0 || rep.Requests == 0 || rep.Requests != rep.OK {
				t.Errorf("got %d of %d requests, %d failed: %v", rep.OK, rep.Requests, rep.Failed, rep.Failures())
			}
			if got, want := rep.Count(Open), int64(o.Events+o.Upgrade+o.Silent); got != want {
				t.Errorf("got %d streams open at the end, want %d", got, want)
			}
			for _, k := range []Kind{KindNew, KindKeepAlive, KindSlow, KindSlowRead, KindHalfClose} {
				if s := rep.Kinds[k]; s == nil || s.Attempts == 0 || s.Verdicts[OK] != s.Attempts {
					t.Errorf("%s: got %+v", k, s)
				}
			}
			if got := rep.Kinds[KindSlowRead].Bytes; got%(1<<20) != 0 || got == 0 {
				t.Errorf("slow reader got %d bytes, want whole megabytes", got)
			}
			if rep.ServedBy["me"] < rep.OK {
				t.Errorf("got %d answers by me, want at least %d", rep.ServedBy["me"], rep.OK)
			}
			if g.InFlight() != 0 {
				t.Errorf("got %d in flight after the run", g.InFlight())
			}
		})
	}
}

func TestHTTP2(t *testing.T) {
	for _, tt := range []struct {
		name   string
		server ServeOptions
		opts   Options
	}{
		{"h2", ServeOptions{TLS: true}, Options{TLS: InsecureTLS()}},
		{"h2c", ServeOptions{H2C: true}, Options{}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			o := tt.opts
			o.HTTP2, o.Targets, o.KeepAlive, o.Slow, o.SlowPath = true, []Target{{Addr: serve(t, tt.server)}}, 1, 1, "/?ms=1"
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			var n atomic.Int64
			var reused atomic.Bool
			o.OnResult = func(r Result) {
				if r.Reused {
					reused.Store(true)
				}
				if n.Add(1) >= 20 && reused.Load() {
					cancel()
				}
			}
			g, err := New(o)
			if err != nil {
				t.Fatal(err)
			}
			if err := g.Run(ctx); err != nil {
				t.Fatal(err)
			}
			if rep := g.Report(); rep.Failed != 0 || rep.OK < 20 || !reused.Load() {
				t.Errorf("got %d ok, %d failed (%v), reused %t", rep.OK, rep.Failed, rep.Failures(), reused.Load())
			}
		})
	}
}

func TestHTTP2Refused(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	if r, _ := firstResult(t, Options{Targets: []Target{{Addr: l.Addr().String()}}, HTTP2: true, KeepAlive: 1}); r.Verdict != ConnectRefused {
		t.Errorf("got %s (%v), want %s", r.Verdict, r.Err, ConnectRefused)
	}
}

// T3: behind a balancer a target gets new connections until Drain after it turned unready, then none.
func TestBalancerTakesUnreadyTargetOut(t *testing.T) {
	var unready atomic.Bool
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	hs := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if unready.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})}
	go func() { _ = hs.Serve(l) }()
	t.Cleanup(func() { hs.Close() })

	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	leaving, staying := serve(t, ServeOptions{Name: "leaving"}), serve(t, ServeOptions{Name: "staying"})
	var turned time.Time
	streak := 0
	const drain = 2 * time.Second // in which even a slow machine makes one connection
	late := false
	g, err := New(Options{
		Targets: []Target{{Name: "leaving", Addr: leaving, ReadyURL: "http://" + l.Addr().String()}, {Name: "staying", Addr: staying}},
		Rate:    200, Drain: drain, ReadyInterval: time.Millisecond, MaxOutstanding: 1,
		OnResult: func(r Result) { // one at a time, by MaxOutstanding
			switch {
			case r.Target == "leaving" && turned.IsZero():
				turned = time.Now()
				unready.Store(true)
			case r.Target == "leaving":
				streak, late = 0, true
			default:
				if streak++; streak == 50 {
					cancel()
				}
			}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Run(ctx); err != nil {
		t.Fatal(err)
	}
	if ctx.Err() != context.Canceled || turned.IsZero() {
		t.Fatalf("the target never left: %v", ctx.Err())
	}
	if !late {
		t.Error("it got no connection after it had turned unready, want some until the balancer learns of it")
	}
	if rep := g.Report(); rep.Failed != 0 {
		t.Errorf("got %d failed: %v", rep.Failed, rep.Failures())
	}
}

func TestDropOfOnlyTargetStopsNewConnections(t *testing.T) {
	addr := serve(t, ServeOptions{})
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	first := make(chan struct{}, 1)
	g, err := New(Options{Targets: []Target{{Name: "only", Addr: addr}}, Rate: 500, Slow: 1, SlowPath: "/", KeepAlive: 1, OnResult: func(Result) {
		select {
		case first <- struct{}{}:
		default:
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Drop("other"); err == nil {
		t.Error("dropped a target that does not exist")
	}
	done := make(chan error, 1)
	go func() { done <- g.Run(ctx) }()
	<-first
	if err := g.Drop("only"); err != nil {
		t.Fatal(err)
	}
	// Then only the keep-alive client is left, on the connection that it has.
	for quiet := 0; quiet < 20 && ctx.Err() == nil; {
		before := g.Report()
		if pause(ctx, 10*time.Millisecond) != nil {
			break
		}
		if after := g.Report(); after.Connections == before.Connections && after.Requests > before.Requests {
			quiet++
		} else {
			quiet = 0
		}
	}
	if ctx.Err() != nil {
		t.Error("new connections went on after the drop")
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if err := g.Run(ctx); err == nil {
		t.Error("ran twice")
	}
}

func TestOptionsAreChecked(t *testing.T) {
	one := []Target{{Addr: "127.0.0.1:80"}}
	for name, o := range map[string]Options{
		"no target":     {},
		"no port":       {Targets: []Target{{Addr: "127.0.0.1"}}},
		"same name":     {Targets: []Target{{Addr: "127.0.0.1:80"}, {Addr: "127.0.0.1:80"}}},
		"negative":      {Targets: one, Slow: -1},
		"negative rate": {Targets: one, Rate: -1},
	} {
		if _, err := New(o); err == nil {
			t.Errorf("%s: got no error", name)
		}
	}
}

func TestHistogram(t *testing.T) {
	h := new(histogram)
	for i := range 1000 {
		h.add(time.Duration(i+1) * time.Millisecond)
	}
	p := h.percentiles()
	for _, tt := range []struct{ got, want float64 }{{p.P50, 500}, {p.P99, 990}, {p.Max, 1000}} {
		if tt.got < tt.want || tt.got > tt.want*histogramGrowth {
			t.Errorf("got %v ms, want %v to within 5 %%", tt.got, tt.want)
		}
	}
}

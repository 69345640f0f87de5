// SPDX-License-Identifier: Apache-2.0

// Package loadtest puts servers under the load that a departure must survive and says exactly what
// became of every request: a [Generator] of new connections at a rate, keep-alive clients, slow requests
// and streams, with a model of a load balancer in front of it; and servers to load, one in Go ([Serve])
// and configurations of nginx, haproxy, Python and Node ([Nginx], [HAProxy], [Python], [Node]).
//
// It is used by tests, by benchmarks and by the demo. It measures outcomes, not the last per cent of
// throughput, and it needs no privilege, no BPF and nothing but the standard library.
//
//	g, err := loadtest.New(loadtest.Options{
//		Targets:   []loadtest.Target{{Name: "blue", Addr: "127.0.0.1:8080"}},
//		Rate:      500,
//		KeepAlive: 50,
//		Slow:      20,
//	})
//	if err != nil { … }
//	err = g.Run(ctx)      // until ctx is done and every request has its answer
//	r := g.Report()       // r.Failed must be 0
package loadtest

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"time"
)

// Verdict is what became of a request or of a stream. Exactly one applies to each attempt.
type Verdict string

// The verdicts. All but OK, KeepAliveRace, Closed and Open are failures.
const (
	OK             Verdict = "ok"              // a complete answer with a status below 400
	ConnectRefused Verdict = "connect_refused" // a RST in answer to the SYN
	ConnectReset   Verdict = "connect_reset"   // a RST during the handshake, as the dialler saw it
	ConnectTimeout Verdict = "connect_timeout" // no connection in ConnectTimeout
	ConnectError   Verdict = "connect_error"   // any other failure to connect, a TLS handshake among them
	ReadReset      Verdict = "read_reset"      // a RST on a new connection, before any byte of the answer
	EOF            Verdict = "eof"             // a FIN on a new connection, before any byte of the answer
	Partial        Verdict = "partial"         // the answer began and was cut short, by FIN or RST
	Status         Verdict = "status"          // a complete answer with a status of 400 or above
	Timeout        Verdict = "timeout"         // no complete answer in Timeout
	Malformed      Verdict = "malformed"       // what came is no HTTP
	ClientError    Verdict = "client_error"    // the client's own trouble: no port, no descriptor left

	// KeepAliveRace is a request on a connection that had carried one before, which the server closed
	// before any byte of the answer. The request may have crossed the server's FIN, so a client sends it
	// again on another connection (RFC 9112, 9.3.1), and so does the generator.
	KeepAliveRace Verdict = "keepalive_race"

	Closed Verdict = "closed" // a stream that the server ended by FIN
	Open   Verdict = "open"   // a stream that was up when the load ended
)

// Failure tells whether a verdict is something that a user would notice.
func (v Verdict) Failure() bool {
	switch v {
	case OK, KeepAliveRace, Closed, Open:
		return false
	}
	return true
}

// Kind is what sort of load a result belongs to.
type Kind string

// The kinds of load.
const (
	KindNew       Kind = "new"        // one request on a connection of its own
	KindKeepAlive Kind = "keep_alive" // a request of a client that keeps its connection
	KindSlow      Kind = "slow"       // a request whose answer takes long, on a connection of its own
	KindSlowRead  Kind = "slow_read"  // a big answer, read slowly
	KindHalfClose Kind = "half_close" // the client sends its request and then FIN
	KindEvents    Kind = "events"     // an endless response
	KindUpgrade   Kind = "upgrade"    // a connection that leaves HTTP and echoes
	KindSilent    Kind = "silent"     // connects and sends nothing
)

// Target is a server.
type Target struct {
	Name string // default: Addr
	Addr string // host and port, the host a literal address
	// ReadyURL is polled, as a balancer does; empty: only Drop takes the target out. An answer
	// other than 2xx, or none, makes it unready.
	ReadyURL string
}

// Options says which load to make. Counts that are zero make none of their kind.
type Options struct {
	Targets []Target // at least one; new connections take turns over those in rotation

	Rate      float64       // new connections per second, whatever the answers do (open loop)
	KeepAlive int           // clients that keep their connections
	Gap       time.Duration // mean of their exponential pauses; 0: none at all (closed loop)
	Slow      int           // parallel slow requests
	SlowRead  int           // parallel slow readers of BigPath
	HalfClose int           // parallel clients that half-close
	Events    int           // endless responses
	Upgrade   int           // upgraded connections
	Silent    int           // silent connections

	Path         string // default /
	SlowPath     string // default /?ms=3000
	BigPath      string // default /big
	EventsPath   string // default /events
	UpgradePath  string // default /upgrade
	SlowReadRate int    // bytes per second of each slow reader, default 2 MB

	TLS   *tls.Config // nil: cleartext. [InsecureTLS] accepts every certificate
	HTTP2 bool        // HTTP/2 for requests, by ALPN under TLS and with prior knowledge without

	// Drain is how long a target that became unready or was dropped still gets new connections, as
	// behind a load balancer that is slow to learn.
	Drain         time.Duration
	ReadyInterval time.Duration // between two polls of ReadyURL, default 500 ms

	ConnectTimeout time.Duration // default 10 s
	Timeout        time.Duration // of a request from the connection on, default 60 s
	MaxOutstanding int           // open-loop requests in flight, default 20,000; beyond it they are not sent but counted

	// Dial makes the connections, default net.Dialer. It may be called by several goroutines at once.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
	// OnResult hears of every attempt, from many goroutines at once; it must be quick.
	OnResult func(Result)
}

// Result is one attempt: a request, or a stream from its connection to its end.
type Result struct {
	Kind      Kind
	Target    string
	Start     time.Time // of this attempt; for a new connection before the SYN
	Connected time.Time // zero if the attempt reused a connection or got none
	End       time.Time
	Verdict   Verdict
	Reused    bool // the connection had carried a request before
	Retry     bool // of a request that met a KeepAliveRace
	Status    int
	ServedBy  string // the answer's X-Served-By header
	Bytes     int64  // of the answer's body, or received on a stream
	Err       error
}

// classifyDial names what went wrong before there was a connection.
func classifyDial(err error) Verdict {
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return ConnectRefused
	case errors.Is(err, syscall.ECONNRESET):
		return ConnectReset
	case errors.Is(err, syscall.EADDRNOTAVAIL), errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE), errors.Is(err, syscall.ENOBUFS):
		return ClientError
	case isTimeout(err):
		return ConnectTimeout
	}
	return ConnectError
}

// classifyRead names what went wrong on a connection. began: a byte of the answer has been read.
func classifyRead(err error, reused, began bool) Verdict {
	reset := errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNABORTED)
	eof := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
	switch {
	case isTimeout(err):
		return Timeout
	case (reset || eof) && began:
		return Partial
	case (reset || eof) && reused:
		return KeepAliveRace
	case reset:
		return ReadReset
	case eof:
		return EOF
	}
	return Malformed
}

func isTimeout(err error) bool {
	return errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, syscall.ETIMEDOUT)
}

func (o *Options) setDefaults() error {
	if len(o.Targets) == 0 {
		return errors.New("make load: no target given")
	}
	o.Targets = append([]Target(nil), o.Targets...)
	names := make(map[string]bool)
	for i := range o.Targets {
		t := &o.Targets[i]
		if _, _, err := net.SplitHostPort(t.Addr); err != nil {
			return fmt.Errorf("make load: target %q: %w", t.Addr, err)
		}
		t.Name = or(t.Name, t.Addr)
		if names[t.Name] {
			return fmt.Errorf("make load: two targets are named %q", t.Name)
		}
		names[t.Name] = true
	}
	for _, n := range []int{o.KeepAlive, o.Slow, o.SlowRead, o.HalfClose, o.Events, o.Upgrade, o.Silent} {
		if n < 0 {
			return errors.New("make load: a count is negative")
		}
	}
	if o.Rate < 0 || o.Gap < 0 || o.Drain < 0 {
		return errors.New("make load: a rate, gap or drain is negative")
	}
	o.Path = or(o.Path, "/")
	o.SlowPath = or(o.SlowPath, "/?ms=3000")
	o.BigPath = or(o.BigPath, "/big")
	o.EventsPath = or(o.EventsPath, "/events")
	o.UpgradePath = or(o.UpgradePath, "/upgrade")
	o.SlowReadRate = or(o.SlowReadRate, 2<<20)
	o.ReadyInterval = or(o.ReadyInterval, 500*time.Millisecond)
	o.ConnectTimeout = or(o.ConnectTimeout, 10*time.Second)
	o.Timeout = or(o.Timeout, time.Minute)
	o.MaxOutstanding = or(o.MaxOutstanding, 20_000)
	if o.Dial == nil {
		o.Dial = new(net.Dialer).DialContext
	}
	return nil
}

func or[T comparable](v, fallback T) T {
	var zero T
	if v == zero {
		return fallback
	}
	return v
}

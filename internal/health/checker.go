// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/ebbproxy/ebb/internal/hook/inside"
)

// Options configure a Checker. The zero value of a field is its documented default.
type Options struct {
	Probe Probe
	NetNS int // descriptor of the backend's network namespace, open as long as Run runs; 0 or less: the caller's

	// Address is where the ports of the probe are; the default is the loopback, 127.0.0.1 and where nobody answers
	// there ::1.
	Address netip.Addr

	// NotFrom are source ports that an attempt never comes from, both ends inclusive; zero: none. Where the probe asks a
	// port whose admission lets connections of Ebb's own pass by their source port, these ports belong here: then the
	// attempt is treated as any client.
	NotFrom [2]uint16

	// Paused tells that nothing is to be asked now; what was found out stays. nil: never.
	Paused func() bool

	Log *slog.Logger // nil discards
}

// State is what a backend was last known to be.
//
//	          rise successes in a row
//	unknown ───────────────────────────► ready
//	   │                                 │  ▲
//	   │ fall failures in a row     fall │  │ rise
//	   │                                 ▼  │
//	   └──────────────────────────────► not ready
type State struct {
	Ready bool      // false while unknown
	Known bool      // false: neither rise successes nor fall failures have come in a row yet
	Since time.Time // when Ready and Known became what they are
	Err   error     // why the last attempt failed; nil if it did not or there was none
}

// Checker runs one probe of one backend. State and Changed may be called from any goroutine.
type Checker struct {
	o       Options
	probe   Probe // with its defaults
	addrs   []netip.Addr
	http    *http.Transport // of an HTTP or gRPC probe
	attempt func(context.Context) error

	// Of the goroutine in Run.
	row     int  // attempts in a row that came out alike
	success bool // how they came out

	state   atomic.Pointer[State]
	changed chan struct{}
}

// errTimeout says that nothing came in time.
var errTimeout = errors.New("no answer in time")

// New returns a Checker that has asked nothing yet. The error wraps ErrInvalid.
func New(o Options) (*Checker, error) {
	if err := o.Probe.Validate(); err != nil {
		return nil, err
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	c := &Checker{o: o, probe: o.Probe.withDefaults(), addrs: []netip.Addr{o.Address}, changed: make(chan struct{}, 1)}
	if !o.Address.IsValid() {
		c.addrs = []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}
	}
	switch {
	case c.probe.HTTP != nil:
		c.http, c.attempt = c.transport(c.probe.HTTP.Port, (*http.Protocols).SetHTTP1), c.askHTTP
	case c.probe.TCP != nil:
		c.attempt = c.askTCP
	case c.probe.GRPC != nil:
		c.http, c.attempt = c.transport(c.probe.GRPC.Port, (*http.Protocols).SetUnencryptedHTTP2), c.askGRPC
	default:
		c.attempt = c.askExec
	}
	c.state.Store(&State{Since: time.Now()})
	return c, nil
}

// State is the state now.
func (c *Checker) State() State { return *c.state.Load() }

// Changed receives after Ready or Known has changed. Several changes that nobody has received yet are one.
func (c *Checker) Changed() <-chan struct{} { return c.changed }

// Run asks until ctx ends, whose cause it returns. The first attempt comes within a tenth of the interval; each interval
// is up to a tenth shorter or longer than set, so that many checkers that were started together do not stay together. An
// attempt that takes longer than the interval is followed by the next at once. Run is called once.
func (c *Checker) Run(ctx context.Context) error {
	tenth := max(c.probe.Interval/10, 1)
	next := time.NewTimer(rand.N(tenth))
	defer next.Stop()
	for {
		select {
		case <-next.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if c.o.Paused != nil && c.o.Paused() {
			next.Reset(c.probe.Interval - tenth + rand.N(2*tenth))
			continue
		}
		begun := time.Now()
		actx, cancel := context.WithTimeoutCause(ctx, c.probe.Timeout, errTimeout)
		err := c.attempt(actx)
		if err != nil && actx.Err() != nil && !errors.Is(err, errTimeout) {
			err = fmt.Errorf("%w: %w", context.Cause(actx), err)
		}
		cancel()
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		c.count(err)
		next.Reset(c.probe.Interval - tenth + rand.N(2*tenth) - time.Since(begun))
	}
}

// count takes the result of one attempt into account.
func (c *Checker) count(err error) {
	if success := err == nil; success != c.success || c.row == 0 {
		c.success, c.row = success, 0
	}
	c.row++
	old := *c.state.Load()
	s := old
	s.Err = err
	switch {
	case c.success && c.row >= c.probe.Rise:
		s.Ready, s.Known = true, true
	case !c.success && c.row >= c.probe.Fall:
		s.Ready, s.Known = false, true
	}
	turned := s.Ready != old.Ready || s.Known != old.Known
	if turned {
		s.Since = time.Now()
	}
	c.state.Store(&s)
	switch {
	case turned && s.Ready:
		c.o.Log.Info("backend is ready")
	case turned:
		c.o.Log.Info("backend is not ready", "err", err)
	case err != nil:
		c.o.Log.Debug("health probe failed", "err", err)
	}
	if turned {
		select {
		case c.changed <- struct{}{}:
		default:
		}
	}
}

// dial connects to the first address that answers.
func (c *Checker) dial(ctx context.Context, port uint16) (net.Conn, error) {
	var errs error
	for _, a := range c.addrs {
		conn, err := inside.Dial(ctx, c.o.NetNS, netip.AddrPortFrom(a, port), c.o.NotFrom)
		if err == nil {
			return conn, nil
		}
		errs = errors.Join(errs, err)
		if ctx.Err() != nil {
			break
		}
	}
	return nil, errs
}

// transport makes a connection of its own for each request.
func (c *Checker) transport(port uint16, speak func(*http.Protocols, bool)) *http.Transport {
	p := new(http.Protocols)
	speak(p, true)
	return &http.Transport{
		Protocols: p, DisableKeepAlives: true, DisableCompression: true, MaxResponseHeaderBytes: 64 << 10,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return c.dial(ctx, port) },
	}
}

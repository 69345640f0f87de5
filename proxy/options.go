// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"time"
)

// The defaults of Options.
const (
	DefaultMaxConnections = 65536
	DefaultDialTimeout    = time.Second
	// DefaultHalfClosed is what the kernel itself grants a connection whose application has closed it: tcp_fin_timeout,
	// tcp(7).
	DefaultHalfClosed    = 60 * time.Second
	DefaultMaxPipes      = 256
	DefaultParkMax       = 4096
	DefaultParkFor       = 10 * time.Second
	DefaultPaceBurst     = 4
	DefaultPaceEvery     = 10 * time.Millisecond
	DefaultPaceTimeout   = 150 * time.Millisecond
	DefaultProbeInterval = 2 * time.Second
	DefaultProbeTimeout  = time.Second
	DefaultProbeRise     = 2
	DefaultProbeFall     = 3
	DefaultHealthWithin  = 200 * time.Millisecond
)

// Never is a duration that stands for no limit where zero means the default.
const Never = time.Duration(-1)

// Peer is a backend to which connections are carried. Peers are equal if all of their fields are.
type Peer struct {
	Address netip.AddrPort
	// Own stands for the very address and port that each client has dialled: the application's listener on this host,
	// in front of which this relay stands. Address is left out then, and nothing is probed. Whatever sends connections
	// to the relay has to let those from Ports and the address itself pass.
	Own bool
	// Ports are the source ports to dial from, the first and the last; zero leaves the choice to the kernel. They
	// should lie outside the range from which the kernel chooses ports for others (ip_local_port_range, ip(7)).
	Ports [2]uint16
	// Source is the address to dial from; the zero address leaves the choice to the kernel.
	Source netip.Addr
	// ProxyProtocol sends the client's and the service's address ahead of the first byte, in version 2 of the PROXY
	// protocol. The peer must expect it.
	ProxyProtocol bool
	// For is the local port of the connections that this peer is for, where a relay stands in for several; 0 means all.
	For uint16 `json:",omitzero"`
	// Weight is the share of this peer relative to others; 0 means 1.
	Weight int
}

// Options say how a relay works. The zero value of each field is its documented default.
type Options struct {
	Peers []Peer

	// MaxConnections bounds the connections at any moment, parked ones included; default 65,536. It is lowered, and the
	// log says so, to what the process's limit of descriptors allows: two for each, and two for each pipe. At the bound
	// the relay stops accepting, so that the backlog of the listener holds what comes.
	MaxConnections int
	// MaxPipes bounds the pipes that are in use at the same time, each of up to 1 MiB; default 256, at most an eighth
	// of the limit of descriptors. Without a pipe bytes are copied instead of spliced and stay with the sender.
	MaxPipes int
	// Loops is the number of event loops; default half of GOMAXPROCS, at least 1 and at most 4.
	Loops int

	// DialTimeout bounds one dial of one peer; default 1 s, which is one lost SYN.
	DialTimeout time.Duration
	// IdleTimeout ends a connection that carries no byte either way; default none: how long a connection may be
	// silent is for client and backend to say, and a drain has a deadline of its own.
	IdleTimeout time.Duration
	// RetireAfter ends a connection whose answer has been carried, and on which nothing has come either way for so long,
	// in the way its client would: the peer reads the end and closes, and the client is told so. It is for protocols of
	// strict request and response, such as HTTP/1; a request that crosses it meets what it would meet at a server's own
	// keep-alive timeout. A client that has not asked yet has four times as long. Default none. It takes the place of
	// IdleTimeout. See LetGo.
	RetireAfter time.Duration
	// HalfClosed ends a connection whose peer has finished but whose client neither sends nor closes; default 60 s,
	// Never for no limit. A client that has finished and waits for its answer is not bounded by it.
	HalfClosed time.Duration

	Park   ParkOptions
	Probe  ProbeOptions
	Health *Health // what a late health check is told; nil: it is carried like everything else

	Metrics Metrics      // nil: nothing is told
	Log     *slog.Logger // nil discards
}

// ParkOptions bound what waits while nobody serves, and how fast it is let go.
type ParkOptions struct {
	Max int           // connections that may wait; default 4,096; what comes beyond is reset
	For time.Duration // how long each may wait, dials included; default 10 s; then it is reset

	// Burst connections at most are released in each period of Every, and no more than Burst are being dialled at the
	// same time; default 4 in 10 ms. A successor may have a backlog of 5: 400 at once into such a one lost 1,360 dials.
	Burst int
	Every time.Duration
	// DialTimeout bounds each of their dials, which are repeated; default 150 ms. A SYN that a full backlog dropped
	// would come again only after a second.
	DialTimeout time.Duration
}

// ProbeOptions say how peers are probed: by a connection that is made and closed.
type ProbeOptions struct {
	Interval time.Duration // default 2 s; Never: peers are judged by the dials for clients alone
	Timeout  time.Duration // default 1 s
	Rise     int           // successes in a row that bring a peer back; default 2
	Fall     int           // failures in a row that take it out, dials for clients among them; default 3
}

// Health tells a balancer's health checks that this backend is leaving, whatever happens to other connections.
type Health struct {
	// From are the sources of the checks. A connection from there is reset.
	From []netip.Prefix
	// Path answers GET and HEAD of this path with 503. For that the relay looks at a connection's first bytes without
	// consuming them, and waits for them up to Within.
	Path string
	// Within bounds the wait for a request line; default 200 ms. It delays connections on which the server speaks first.
	Within time.Duration
}

// Metrics hears of each connection once, when it is over for the relay. It is called from the event loops, several at
// a time, and must not block.
type Metrics interface {
	LateConnection(action Action, result Result)
}

// Action is what the relay did with a connection.
type Action string

// The actions.
const (
	ActionRelay  Action = "relay"  // carried at once
	ActionHold   Action = "hold"   // parked first
	ActionHealth Action = "health" // turned away as a health check
)

// Result is what became of a connection.
type Result string

// The results.
const (
	ResultDone     Result = "done"     // both sides finished, or it was retired
	ResultReset    Result = "reset"    // one side reset it, and the other was told by a reset
	ResultGone     Result = "gone"     // the client left before it was carried
	ResultNoPeer   Result = "no_peer"  // no peer could be dialled; reset before any byte was taken
	ResultOverflow Result = "overflow" // too many were parked; reset before any byte was taken
	ResultExpired  Result = "expired"  // parked too long; reset before any byte was taken
	ResultIdle     Result = "idle"     // idle or half-closed for too long; reset
	ResultRefused  Result = "refused"  // a health check
	ResultClosed   Result = "closed"   // the relay was closed
	ResultError    Result = "error"    // the relay lacked descriptors or memory
)

// withDefaults fills in what is zero and refuses what cannot work. Every contradiction is named, one a line.
func (o Options) withDefaults() (Options, error) {
	var bad []error
	refuse := func(format string, a ...any) {
		bad = append(bad, fmt.Errorf("%w: "+format, append([]any{ErrOptions}, a...)...))
	}
	for _, v := range []struct {
		name string
		n    *int
		def  int
	}{
		{"max connections", &o.MaxConnections, DefaultMaxConnections},
		{"max pipes", &o.MaxPipes, DefaultMaxPipes},
		{"loops", &o.Loops, defaultLoops()},
		{"park max", &o.Park.Max, DefaultParkMax},
		{"park burst", &o.Park.Burst, DefaultPaceBurst},
		{"probe rise", &o.Probe.Rise, DefaultProbeRise},
		{"probe fall", &o.Probe.Fall, DefaultProbeFall},
	} {
		if *v.n < 0 {
			refuse("%s %d is negative", v.name, *v.n)
		}
		if *v.n == 0 {
			*v.n = v.def
		}
	}
	for _, v := range []struct {
		name  string
		d     *time.Duration
		def   time.Duration
		never bool
	}{
		{"dial timeout", &o.DialTimeout, DefaultDialTimeout, false},
		{"idle timeout", &o.IdleTimeout, Never, true},
		{"retire after", &o.RetireAfter, Never, true},
		{"half-closed", &o.HalfClosed, DefaultHalfClosed, true},
		{"park for", &o.Park.For, DefaultParkFor, false},
		{"park every", &o.Park.Every, DefaultPaceEvery, false},
		{"park dial timeout", &o.Park.DialTimeout, DefaultPaceTimeout, false},
		{"probe interval", &o.Probe.Interval, DefaultProbeInterval, true},
		{"probe timeout", &o.Probe.Timeout, DefaultProbeTimeout, false},
	} {
		if *v.d < 0 && !(v.never && *v.d == Never) {
			refuse("%s %v is negative", v.name, *v.d)
		}
		if *v.d == 0 {
			*v.d = v.def
		}
	}
	if o.RetireAfter > 0 && o.IdleTimeout > 0 {
		refuse("idle timeout %v and retire after %v are both given: they say different things of the same connections", o.IdleTimeout, o.RetireAfter)
	}
	if o.Health != nil {
		h := *o.Health
		if h.Within < 0 {
			refuse("health within %v is negative", h.Within)
		}
		if h.Within == 0 {
			h.Within = DefaultHealthWithin
		}
		if h.Path != "" && (h.Path[0] != '/' || len(h.Path) > maxHealthPath || strings.ContainsAny(h.Path, " \r\n\t?#")) {
			refuse("health path %q is not a path: it begins with /, has no space, query or fragment and at most %d bytes", h.Path, maxHealthPath)
		}
		for _, p := range h.From {
			if !p.IsValid() {
				refuse("health from has an invalid prefix")
			}
		}
		o.Health = &h
	}
	for _, p := range o.Peers {
		if err := p.check(); err != nil {
			bad = append(bad, err)
		}
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return o, errors.Join(bad...)
}

// check refuses a peer that cannot be dialled.
func (p Peer) check() error {
	if err := p.checkPorts(); err != nil {
		return err
	}
	switch {
	case !p.Own && (!p.Address.IsValid() || p.Address.Port() == 0 || p.Address.Addr().IsUnspecified()):
		return fmt.Errorf("%w: peer address %v is not an address with a port", ErrOptions, p.Address)
	case p.Weight < 0 || p.Weight > maxWeight:
		return fmt.Errorf("%w: weight %d of peer %v is not between 0 and %d", ErrOptions, p.Weight, p.Address, maxWeight)
	case p.Source.IsValid() && p.Source.Unmap().Is4() != p.Address.Addr().Unmap().Is4():
		return fmt.Errorf("%w: source %v of peer %v is of the other address family", ErrOptions, p.Source, p.Address)
	}
	return nil
}

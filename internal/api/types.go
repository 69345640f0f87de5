// SPDX-License-Identifier: Apache-2.0

package api

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/ebbproxy/ebb/drain"
)

// Duration is a length of time that is a Go duration string ("25s") in JSON.
type Duration time.Duration

// String is the Go duration string.
func (d Duration) String() string { return time.Duration(d).String() }

// MarshalText writes the Go duration string.
func (d Duration) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText reads a Go duration string; a bare number has no unit and is refused.
func (d *Duration) UnmarshalText(b []byte) error {
	v, err := time.ParseDuration(string(b))
	if err != nil {
		return fmt.Errorf("%q is not a duration such as 25s or 1m30s", b)
	}
	*d = Duration(v)
	return nil
}

// Datapath says what enforces and counts for a backend.
type Datapath string

// The datapaths.
const (
	DatapathBPF  Datapath = "bpf"  // admission and census in the kernel
	DatapathNone Datapath = "none" // counts by sock_diag; admission cannot close
)

// Backend is one look at a backend: everything that status and explain show.
type Backend struct {
	Name       string         `json:"name"`
	Service    string         `json:"service"`
	Gen        uint64         `json:"gen"`
	State      drain.State    `json:"state"`
	Ready      bool           `json:"ready"` // what /readyz/NAME answers
	Mode       drain.Mode     `json:"mode"`
	Protocol   drain.Protocol `json:"protocol"`
	OnNew      OnNewChoice    `json:"on_new"`
	Datapath   Datapath       `json:"datapath"`
	Guarded    bool           `json:"guarded"`        // admission can close, so that a zero is valid
	PID        int            `json:"pid"`            // of the application's main process; 0 if none runs
	Unit       string         `json:"unit,omitempty"` // the systemd unit that it was matched by, if it was
	Owner      Owner          `json:"owner"`
	Listeners  []Listener     `json:"listeners"`
	NotCovered []NotCovered   `json:"not_covered"`
	// Counts is always present; a class that is not known is null, never 0.
	Counts Counts `json:"counts"`
	// InFlight is what a drain waits for, nil when it is not known.
	InFlight    *int64 `json:"in_flight"`
	CountsKnown bool   `json:"counts_known"`
	// CountsAt is when the counts were taken; nil if never.
	CountsAt *time.Time `json:"counts_at"`
	// Drain is the running drain, else the last one of this backend, else nil.
	Drain *Drain `json:"drain"`
	// Addresses are those of the service that its owner steers over the backends, as they are where this one is; none if it
	// steers none.
	Addresses []ServiceAddress `json:"addresses,omitempty"`
	// Sessions are the applications that have registered.
	Sessions []SessionView `json:"sessions,omitempty"`
	Warnings []string      `json:"warnings"`
}

// ServiceAddress is an address of a service, and who gets the new connections to it.
type ServiceAddress struct {
	Address string         `json:"address"`          // ADDR:PORT
	Shares  map[string]int `json:"shares,omitempty"` // by backend, of their sum; one that is left out gets none
	Why     string         `json:"why,omitempty"`    // why it is steered to nobody
}

// OnNewChoice says what was asked for new connections while draining, and what that came to.
type OnNewChoice struct {
	Configured drain.OnNew `json:"configured"`
	Chosen     drain.OnNew `json:"chosen"`
	Why        string      `json:"why,omitempty"`
}

// Owner is the process that owns a backend: who enforces and who must be asked.
type Owner struct {
	PID     int       `json:"pid"`
	Started time.Time `json:"started"`
}

// Listener is one listening socket of a backend.
type Listener struct {
	Address  string `json:"address"`  // ADDR:PORT as bound
	Protocol string `json:"protocol"` // tcp, mptcp, udp, unix
	PID      int    `json:"pid"`      // of a process that holds it; 0 if not known
	Covered  bool   `json:"covered"`  // new connections to it can be turned away and are counted
	Why      string `json:"why,omitempty"`
	// Queued is the length of its accept queue; nil if it was not looked at.
	Queued *int64 `json:"queued"`
}

// NotCovered is something of a backend that Ebb leaves alone, and why.
type NotCovered struct {
	What string `json:"what"`
	Why  string `json:"why"`
}

// Counts is the number of connections by class. The classes are mutually exclusive. A nil count is
// not known, which never reads as zero.
type Counts struct {
	Handshake *int64 `json:"handshake"` // half-open
	Queued    *int64 `json:"queued"`    // established, not yet accepted
	Active    *int64 `json:"active"`
	Idle      *int64 `json:"idle"`
	Unused    *int64 `json:"unused"`  // never carried a byte
	Stalled   *int64 `json:"stalled"` // the peer takes nothing
	Closing   *int64 `json:"closing"` // our FIN is out and everything is acknowledged
	// Open is what the kernel's census counts without a walk: every class above but handshake and closing.
	Open *int64 `json:"open"`
	// Accepted is the number of connections ever established.
	Accepted *uint64 `json:"accepted"`
}

// Classes are the names of the classes in the order in which they are shown.
var Classes = [...]string{"handshake", "queued", "active", "idle", "unused", "stalled", "closing"}

// Class is the count of one of [Classes]; nil if it is not known or there is no such class.
func (c Counts) Class(name string) *int64 {
	switch name {
	case "handshake":
		return c.Handshake
	case "queued":
		return c.Queued
	case "active":
		return c.Active
	case "idle":
		return c.Idle
	case "unused":
		return c.Unused
	case "stalled":
		return c.Stalled
	case "closing":
		return c.Closing
	}
	return nil
}

// CountsOf is the wire form of one look. Unknown counts give all nil.
func CountsOf(c drain.Counts) Counts {
	if !c.Known {
		return Counts{}
	}
	open := c.Queued + c.Active + c.Idle + c.Unused + c.Stalled
	return Counts{
		Handshake: &c.Handshake, Queued: &c.Queued, Active: &c.Active, Idle: &c.Idle,
		Unused: &c.Unused, Stalled: &c.Stalled, Closing: &c.Closing,
		Open: &open, Accepted: &c.Accepted,
	}
}

// InFlightOf is the number in flight of one look; nil if it is not known.
func InFlightOf(c drain.Counts, idle drain.IdlePolicy) *int64 {
	if !c.Known {
		return nil
	}
	n := c.InFlight(idle)
	return &n
}

// Drain is one run of the state machine for one backend generation.
type Drain struct {
	ID      string      `json:"id"`
	Backend string      `json:"backend"`
	Service string      `json:"service"`
	Gen     uint64      `json:"gen"`
	Cause   drain.Cause `json:"cause"`
	By      string      `json:"by,omitempty"`     // who: a user, a signal's name
	Reason  string      `json:"reason,omitempty"` // what they said
	// State is draining or flushing while the drain runs, done or lost after it, serving if it was
	// taken back.
	State       drain.State       `json:"state"`
	Outcome     drain.Outcome     `json:"outcome,omitempty"` // empty while it runs
	Begun       time.Time         `json:"begun"`
	Deadline    time.Time         `json:"deadline"`
	Ended       *time.Time        `json:"ended"`  // nil while it runs
	Phases      []PhaseAt         `json:"phases"` // in the order in which they were entered
	Policy      Policy            `json:"policy"`
	Slices      Slices            `json:"slices"`
	FlushReason drain.FlushReason `json:"flush_reason,omitempty"`
	FlushResult FlushResult       `json:"flush_result,omitempty"`
	// Blocking is what keeps the drain from ending, by class; classes that do not block are left out.
	// Nil when the counts are not known.
	Blocking map[string]int64 `json:"blocking"`
	// Survivors were open when the wait slice ran out.
	Survivors []Straggler `json:"survivors"`
	Cut       *Cut        `json:"cut"`     // nil if nothing was cut
	Retired   int64       `json:"retired"` // idle connections closed one by one
	// Late counts the connections that arrived after the drain began, nil if not known.
	Late *Late `json:"late"`
	// Held are the leases that the drain has met.
	Held []HeldDuring `json:"held,omitempty"`
	// Unguarded: admission could not be closed, so that a zero was believed after a pause only.
	Unguarded bool `json:"unguarded"`
	// WouldHave: under observe; nothing was touched, and this is what enforcing would have done.
	WouldHave bool     `json:"would_have"`
	Warnings  []string `json:"warnings"`
}

// Phase is the phase the drain is in, empty before the first.
func (d Drain) Phase() drain.Phase {
	if len(d.Phases) == 0 {
		return ""
	}
	return d.Phases[len(d.Phases)-1].Phase
}

// Running says whether the drain has no outcome yet.
func (d Drain) Running() bool { return d.Outcome == "" }

// PhaseAt is the moment at which a phase was entered.
type PhaseAt struct {
	Phase drain.Phase `json:"phase"`
	At    time.Time   `json:"at"`
}

// Policy is drain.Policy with its durations as strings.
type Policy struct {
	Protocol     drain.Protocol   `json:"protocol"`
	OnNew        drain.OnNew      `json:"on_new"`
	OnDeadline   drain.OnDeadline `json:"on_deadline"`
	Idle         drain.IdlePolicy `json:"idle"`
	NotifyAt     drain.NotifyAt   `json:"notify_at"`
	Grace        Duration         `json:"grace"`
	FlushTimeout Duration         `json:"flush_timeout"`
	Reserve      Duration         `json:"reserve"`
	QuietPeriod  Duration         `json:"quiet_period"`
	AdmitFor     Duration         `json:"admit_for"`
	IdleAfter    Duration         `json:"idle_after"`
	CloseSpread  Duration         `json:"close_spread"`
	MaxAge       Duration         `json:"max_connection_age"` // 0s: none
}

// PolicyOf is the wire form of a policy.
func PolicyOf(p drain.Policy) Policy {
	return Policy{
		Protocol: p.Protocol, OnNew: p.OnNew, OnDeadline: p.OnDeadline, Idle: p.Idle, NotifyAt: p.NotifyAt,
		Grace: Duration(p.Grace), FlushTimeout: Duration(p.FlushTimeout), Reserve: Duration(p.Reserve),
		QuietPeriod: Duration(p.QuietPeriod), AdmitFor: Duration(p.AdmitFor), IdleAfter: Duration(p.IdleAfter),
		CloseSpread: Duration(p.CloseSpread), MaxAge: Duration(p.MaxAge),
	}
}

// Slices are the parts of the grace period that this drain really has; they are smaller than the
// policy's where the orchestrator kills earlier.
type Slices struct {
	Wait    Duration `json:"wait"`
	Flush   Duration `json:"flush"`
	Reserve Duration `json:"reserve"`
}

// FlushResult says how the flush ended.
type FlushResult = drain.FlushResult

// Straggler is one open connection: a row of explain, a survivor of a drain.
type Straggler struct {
	Peer  string    `json:"peer"`
	Local string    `json:"local"`
	Class string    `json:"class"`
	Age   *Duration `json:"age"`  // since it was established; nil if not known
	Idle  *Duration `json:"idle"` // since the last byte either way; nil if not known
	// Unacked is the number of bytes that the peer has not acknowledged.
	Unacked  uint64 `json:"unacked_bytes"`
	Received uint64 `json:"received_bytes"`
	Sent     uint64 `json:"sent_bytes"`
	PID      int    `json:"pid,omitempty"` // of a process that holds it; 0 if not known
}

// StragglerOf is the wire form of a survivor. Its age is not known when it is 0.
func StragglerOf(s drain.Survivor) Straggler {
	idle := Duration(s.Idle)
	r := Straggler{
		Peer: s.Peer, Local: s.Local, Class: s.Class, Idle: &idle,
		Unacked: s.Unacked, Received: s.In, Sent: s.Out,
	}
	if s.Age > 0 {
		age := Duration(s.Age)
		r.Age = &age
	}
	return r
}

// Cut says what was done to the connections that were left at deadline − reserve.
type Cut struct {
	Method    drain.OnDeadline `json:"method"`
	Graceful  int64            `json:"graceful"`  // ended by SHUT_RD and the application's own close
	Destroyed int64            `json:"destroyed"` // ended by SOCK_DESTROY
	Left      int64            `json:"left"`      // could not be ended
	InFlight  int64            `json:"in_flight"` // ended with a request in flight: its result is unknown
	Note      string           `json:"note,omitempty"`
}

// Late counts the connections that arrived after their backend was told to stop.
type Late struct {
	Admitted int64 `json:"admitted"`
	Refused  int64 `json:"refused"`
	// Redirected went to a sibling or to the relay, as the kernel counts them: a SYN that was sent again counts twice.
	Redirected int64 `json:"redirected"`
	// Adopted were given to the relay out of the accept queue.
	Adopted int64 `json:"adopted"`
	// Carried and Parked are at the relay now; nil if that is not known.
	Carried *int64 `json:"carried"`
	Parked  *int64 `json:"parked"`
	// Relayed, Failed and Health are over at the relay: carried to an end, not carried, turned away as health checks.
	Relayed int64 `json:"relayed"`
	Failed  int64 `json:"failed"`
	Health  int64 `json:"health"`
	// Ended were still carried or parked at the deadline.
	Ended int64 `json:"ended"`
}

// Any says whether any connection arrived late.
func (l Late) Any() bool { return l.Admitted+l.Refused+l.Redirected+l.Adopted > 0 }

// DrainRequest asks for a drain. The zero value means the backend's own policy.
type DrainRequest struct {
	// Grace is the whole budget from Begin; nil: the backend's own. On a running drain it may shorten
	// the deadline and never lengthens it.
	Grace      *Duration        `json:"grace,omitempty"`
	OnNew      drain.OnNew      `json:"on_new,omitempty"`
	OnDeadline drain.OnDeadline `json:"on_deadline,omitempty"`
	Reason     string           `json:"reason,omitempty"`
	// Gen, if not 0, is the generation that is meant; another one is ErrStale.
	Gen uint64 `json:"gen,omitempty"`
	// Cause is prestop or, by default, what the caller is: operator, or app over the socket of applications. The server
	// fills it in.
	Cause drain.Cause `json:"cause,omitempty"`
	// By is who asks, filled by the server from the socket's credentials and never read from the body.
	By string `json:"-"`
}

// UndrainRequest takes a drain back.
type UndrainRequest struct {
	Reason string `json:"reason,omitempty"`
	Gen    uint64 `json:"gen,omitempty"` // as in DrainRequest
	By     string `json:"-"`             // as in DrainRequest
}

// ExtendRequest moves a running drain's deadline later.
type ExtendRequest struct {
	// Extra is by how much; required, greater than 0.
	Extra  Duration `json:"by"`
	Reason string   `json:"reason,omitempty"`
	Gen    uint64   `json:"gen,omitempty"` // as in DrainRequest
	By     string   `json:"-"`             // as in DrainRequest
}

// CutRequest ends a running drain's connections now.
type CutRequest struct {
	Reason string `json:"reason,omitempty"`
	Gen    uint64 `json:"gen,omitempty"` // as in DrainRequest
	By     string `json:"-"`             // as in DrainRequest
}

// Event is one line of GET /v1/events.
type Event = drain.Event

// EventLost is the type of the event that a subscriber reads in place of those that the log no longer
// holds. Its fields are from and to (sequence numbers, inclusive), count (0: not known), and reason.
const EventLost = "events.lost"

// BackendList is the answer of GET /v1/backends.
type BackendList struct {
	Backends []Backend `json:"backends"`
}

// DrainList is the answer of GET /v1/drains, the newest first.
type DrainList struct {
	Drains []Drain `json:"drains"`
}

// StragglerList is the answer of GET /v1/backends/NAME/stragglers.
type StragglerList struct {
	Stragglers []Straggler `json:"stragglers"`
}

// Readiness is the answer of the probes when it is good; otherwise they answer with a Problem.
type Readiness struct {
	Status string `json:"status"` // "ok"
}

// Problem is an error of the API (RFC 9457, application/problem+json). It is an error that matches the
// sentinels of this package with errors.Is.
type Problem struct {
	Type   string `json:"type"` // a tag URI, or about:blank where the status says it all
	Title  string `json:"title"`
	Status int    `json:"status"`
	Detail string `json:"detail,omitempty"`
	// Field is the member of the request that is wrong.
	Field string `json:"field,omitempty"`
	// Known are the names that exist, where the one asked for does not.
	Known []string `json:"known,omitempty"`
	// retry: the same request may succeed in a second.
	retry bool
}

// Error is the detail, or the title if there is none.
func (p *Problem) Error() string {
	if p.Detail != "" {
		return p.Detail
	}
	return p.Title
}

// Is matches the sentinel of the problem's type.
func (p *Problem) Is(target error) bool {
	for _, k := range problemKinds {
		if slices.Contains(k.sentinels, target) {
			return p.Type == problemType+k.name
		}
	}
	return false
}

// normal gives the slices that are always arrays in JSON.
func (b Backend) normal() Backend {
	b.Listeners = orEmpty(b.Listeners)
	b.NotCovered = orEmpty(b.NotCovered)
	b.Warnings = orEmpty(b.Warnings)
	if b.Drain != nil {
		d := b.Drain.normal()
		b.Drain = &d
	}
	return b
}

func (d Drain) normal() Drain {
	d.Phases = orEmpty(d.Phases)
	d.Survivors = orEmpty(d.Survivors)
	d.Warnings = orEmpty(d.Warnings)
	return d
}

func orEmpty[T any](s []T) []T {
	if s == nil {
		return []T{}
	}
	return s
}

// MarshalJSON writes every list as an array, never as null.
func (b Backend) MarshalJSON() ([]byte, error) {
	type plain Backend
	return json.Marshal(plain(b.normal()))
}

// MarshalJSON writes every list as an array, never as null.
func (d Drain) MarshalJSON() ([]byte, error) {
	type plain Drain
	return json.Marshal(plain(d.normal()))
}

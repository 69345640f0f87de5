// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/health"
	"github.com/ebbproxy/ebb/internal/hook"
	"github.com/ebbproxy/ebb/internal/metrics"
	"github.com/ebbproxy/ebb/probes"
	"github.com/ebbproxy/ebb/proxy"
)

// settings are what is configured for a backend. They are never changed, only replaced together with the incarnation that
// uses them: a drain keeps those with which it began.
type settings struct {
	mode          drain.Mode
	policy        drain.Policy // as configured
	eff           drain.Effective
	cov           coverage
	notify, flush hook.Hook
	ready         func(context.Context) error // of the application, beside that it listens; nil: none
	extension     time.Duration               // by so much its sessions may extend a drain, once

	// What follows is of the agent's alone.
	probe   *health.Probe
	health  *proxy.Health
	peers   []netip.AddrPort
	holdMax int
	holdFor time.Duration
	weight  int
	version int64 // of the application, where no session says another; 0: none
	upgrade bool  // it drains when a higher version of the service is ready
}

// member is one backend of this process: its present incarnation, and what became of those before. Its methods may be
// called from any goroutine.
type member struct {
	name, service string
	unit          string // systemd unit that it is matched by; "": none
	matched       string // by what, in words; empty: it was started
	id            uint64 // of its backend in the kernel
	started       time.Time
	log           *slog.Logger
	events        *api.Log
	metrics       *metrics.Metrics
	late          func(*settings, datapath) lateOptions
	flipped       func(context.Context) error // is backend.flipped
	remember      func([]api.Drain)           // keeps the ended drains for the next owner; nil: they go with us
	sessions      string                      // file that keeps the sessions of the present process for the next owner
	hears         func() bool                 // whether what applications say comes in; nil: always
	turned        func()                      // its health or version may have changed; nil: nobody cares
	// addresses are those of the service in a network namespace; nil: nobody steers it.
	addresses func(netns uint64) []api.ServiceAddress
	current   atomic.Pointer[incarnation]
	wg        *sync.WaitGroup // of the owner: every goroutine that uses the datapath

	mu     sync.Mutex
	drains []api.Drain
	had    api.Backend // listeners and what is not covered, when the last drain began
}

// life is the present incarnation. Before a process is there it has a generation and settings only.
func (m *member) life() *incarnation { return m.current.Load() }

func (m *member) emit(e drain.Event) {
	e.Service, e.Backend = m.service, m.name
	if e.Gen == 0 {
		e.Gen = m.life().gen
	}
	if e.Time.IsZero() {
		e.Time = time.Now()
	}
	m.events.Publish(e)
}

func (m *member) degraded(msg string) {
	m.log.Warn("degraded", "why", msg)
	m.emit(drain.Event{Type: EventDegraded, Message: msg})
}

func (m *member) draining() bool { return m.life().draining() }

// view is one look at the backend. closer also names what is not covered, which takes a walk of its own; g is nil where no
// other backend is looked at.
func (m *member) view(ctx context.Context, closer bool, g *glance) api.Backend {
	inc := m.life()
	set := inc.set
	v := api.Backend{
		Name: m.name, Service: m.service, Unit: m.unit, Gen: inc.gen, Mode: set.mode, Protocol: set.eff.Policy.Protocol,
		Owner: api.Owner{PID: os.Getpid(), Started: m.started},
	}
	if inc.b == nil {
		return m.absent(v, inc)
	}
	// Where it is steered to follows from whether it is ready, so that is read first: a view that shows it left out says why.
	if m.addresses != nil {
		for _, sp := range inc.b.dp.spaces() {
			v.Addresses = append(v.Addresses, m.addresses(sp.id)...)
		}
	}
	s := inc.machine.Status()
	ready := inc.serves(ctx, m.name)
	v.State, v.Ready, v.OnNew = s.State, ready == nil, onNewOf(set, s)
	if ready != nil && (s.State == drain.StateServing || s.ID == "") {
		v.Warnings = append(v.Warnings, ready.Error())
	}
	v.Datapath, v.Guarded, v.PID = api.Datapath(inc.b.dp.name()), inc.b.dp.guarded(), inc.proc.pid
	counts, at := s.Counts, s.CountsAt
	if !inc.draining() || at.IsZero() {
		// Outside a drain nobody looks, so look now.
		c, ok := inc.b.glance(ctx, g)
		if !ok {
			var err error
			if c, err = inc.b.Look(ctx); err != nil {
				c = drain.Counts{}
				v.Warnings = append(v.Warnings, "counts are unknown: "+err.Error())
			}
		}
		counts, at = c, time.Now()
	}
	v.Counts, v.CountsKnown, v.CountsAt = api.CountsOf(counts), counts.Known, &at
	v.InFlight = api.InFlightOf(counts, set.eff.Policy.Idle)
	if v.State == drain.StateServing && !inc.b.heard() {
		v.State = drain.StateSuspect
	}
	v.Sessions = inc.b.book.Views()
	inc.sockets(&v, closer)
	v.Warnings = append(append(v.Warnings, inc.b.dp.warnings(g)...), inc.b.late.warnings()...)
	v.Warnings = append(append(v.Warnings, inc.b.late.keep.warnings()...), inc.b.sessionWarnings(s.State)...)
	if len(s.Phases) > 0 {
		d := m.drainView(inc, s)
		v.Drain = &d
	} else if ds := m.past(); len(ds) > 0 { // of those before, or of an owner before us
		v.Drain = &ds[len(ds)-1]
	}
	return v
}

// absent is the view of a backend that has no process: nothing serves, and nothing is open.
func (m *member) absent(v api.Backend, inc *incarnation) api.Backend {
	zero, at := drain.Counts{Known: !inc.unknown}, time.Now()
	v.State, v.OnNew, v.Datapath = drain.StateDone, onNewOf(inc.set, drain.Status{}), api.DatapathNone
	v.Counts, v.CountsKnown, v.CountsAt, v.InFlight = api.CountsOf(zero), zero.Known, &at, api.InFlightOf(zero, inc.set.eff.Policy.Idle)
	if inc.unknown {
		v.State = drain.StateLost
		v.Warnings = append(v.Warnings, "counts are unknown: "+inc.absent)
	} else {
		v.Warnings = append(v.Warnings, "no process: "+inc.absent)
	}
	if ds := m.past(); len(ds) > 0 {
		v.Drain = &ds[len(ds)-1]
		if v.Drain.Outcome == drain.OutcomeLost {
			v.State = drain.StateLost
		}
	}
	if inc.lost {
		v.State = drain.StateLost
	}
	return v
}

// sockets fills in the listeners and what is not covered. closer is that of view.
func (i *incarnation) sockets(v *api.Backend, closer bool) {
	i.b.mu.Lock()
	for _, l := range i.b.all {
		if !l.live {
			continue
		}
		_, covered := i.b.covered[l.cookie]
		proto := "tcp"
		if l.mptcp {
			proto = "mptcp"
		}
		v.Listeners = append(v.Listeners, api.Listener{Address: l.addr.String(), Protocol: proto, PID: l.pid, Covered: covered, Why: i.b.why[l.cookie]})
		if !covered {
			v.NotCovered = append(v.NotCovered, api.NotCovered{What: proto + " " + l.addr.String(), Why: i.b.why[l.cookie]})
		}
	}
	known := slices.Clone(i.b.all)
	i.b.mu.Unlock()
	if closer {
		for _, l := range i.unwatched(known) {
			v.Listeners = append(v.Listeners, l)
			v.NotCovered = append(v.NotCovered, api.NotCovered{What: l.Protocol + " " + l.Address, Why: l.Why})
		}
		v.NotCovered = append(v.NotCovered, i.notCovered()...)
	}
	slices.SortFunc(v.Listeners, func(a, b api.Listener) int { return cmp.Compare(a.Address, b.Address) })
}

// unwatched lists the TCP listeners of CMD that the datapath was told to leave alone, which it therefore does not know.
func (i *incarnation) unwatched(known []listener) []api.Listener {
	var out []api.Listener
	for _, sp := range i.b.dp.spaces() {
		found, err := probes.Listeners(sp.diag, i.b.proc.descendants())
		if err != nil {
			i.b.log.Debug("list listeners", "err", err)
			continue
		}
		for _, f := range found {
			if slices.ContainsFunc(known, func(l listener) bool { return l.cookie == f.Cookie }) {
				continue
			}
			l := api.Listener{Address: f.Local.String(), Protocol: f.Protocol, PID: f.PID, Why: i.b.cov.split([]listener{{addr: f.Local}})[0]}
			if l.Why == "" {
				l.Why = "the census does not see it"
			}
			out = append(out, l)
		}
	}
	return out
}

func onNewOf(set *settings, s drain.Status) api.OnNewChoice {
	c := api.OnNewChoice{Configured: set.policy.OnNew, Chosen: s.OnNew, Why: s.OnNewWhy}
	if c.Configured == "" {
		c.Configured = drain.OnNewAuto
	}
	if c.Chosen == "" {
		c.Chosen = c.Configured
	}
	return c
}

func (i *incarnation) notCovered() []api.NotCovered {
	var out []api.NotCovered
	for _, sp := range i.b.dp.spaces() {
		us, err := probes.NotCovered(sp.diag, i.b.proc.descendants())
		if err != nil {
			out = append(out, api.NotCovered{What: "UDP and Unix listeners", Why: "not known: " + err.Error()})
			continue
		}
		for _, u := range us {
			out = append(out, api.NotCovered{What: u.What, Why: u.Why})
		}
	}
	return out
}

// stragglers are the connections that keep a drain open, those first that keep it longest.
func (m *member) stragglers(ctx context.Context, n int) ([]api.Straggler, error) {
	inc := m.life()
	if inc.b == nil {
		return nil, nil
	}
	vs, err := inc.b.classify(ctx, inc.b.coveredMap())
	if err != nil {
		return nil, err
	}
	vs = slices.Clone(vs)
	slices.SortStableFunc(vs, func(a, b probes.Verdict) int {
		if c := cmp.Compare(rank(a.Class), rank(b.Class)); c != 0 {
			return c
		}
		return cmp.Compare(b.Since, a.Since)
	})
	out := make([]api.Straggler, 0, min(n, len(vs)))
	for _, v := range vs[:min(n, len(vs))] {
		st := api.StragglerOf(survivorOf(v))
		st.PID = v.Sample.PID
		out = append(out, st)
	}
	return out, nil
}

func rank(c probes.Class) int {
	switch c {
	case probes.ClassStalled:
		return 0
	case probes.ClassActive, probes.ClassUnknown, probes.ClassQueued:
		return 1
	case probes.ClassUnused:
		return 2
	case probes.ClassIdle:
		return 3
	}
	return 4
}

// machine is what drains the present incarnation, unless it cannot be drained.
func (m *member) machine() (*incarnation, *drain.Machine, error) {
	inc := m.life()
	switch {
	case inc.set.mode == drain.ModeOff:
		return nil, nil, fmt.Errorf("%w: %s has the mode off", api.ErrNotPossible, m.name)
	case inc.b == nil:
		return nil, nil, fmt.Errorf("%w: %s has no process", api.ErrNotPossible, m.name)
	}
	return inc, inc.machine, nil
}

func (m *member) beginDrain(ctx context.Context, cause drain.Cause, q api.DrainRequest) (api.Drain, error) {
	inc, mach, err := m.machine()
	if err != nil {
		return api.Drain{}, err
	}
	p := inc.set.policy
	if q.OnNew != "" {
		p.OnNew = q.OnNew
	}
	if q.OnDeadline != "" {
		p.OnDeadline = q.OnDeadline
	}
	var deadline time.Time
	if q.Grace != nil {
		// A longer budget lengthens the wait. One that the configured flush and reserve may not fit into is like a kill
		// time that is nearer than grace: the slices are scaled to it. Not both, or the moment in between would scale.
		if grace := time.Duration(*q.Grace); grace >= inc.set.eff.Policy.Grace {
			p.Grace = grace
		} else {
			deadline = time.Now().Add(grace)
		}
	}
	eff, err := drain.Validate(p)
	if err != nil {
		return api.Drain{}, fmt.Errorf("%w: %w", api.ErrNotPossible, err)
	}
	s, err := mach.Begin(ctx, drain.Request{
		Gen: q.Gen, Cause: cause, Policy: eff.Policy, Deadline: deadline, Join: q.Grace == nil, Reason: q.Reason, By: q.By,
	})
	if m.replaced(ctx, inc, err) {
		return m.beginDrain(ctx, cause, q)
	}
	return m.answer(inc, s, err)
}

// replaced tells, of a machine that has ended, that there is another one, for which it waits: a reload puts one in the place
// of the other.
func (m *member) replaced(ctx context.Context, inc *incarnation, err error) bool {
	if !errors.Is(err, drain.ErrClosed) {
		return false
	}
	for end := time.Now().Add(replaceFor); m.life() == inc && time.Now().Before(end); {
		if !wait(ctx, replaceEvery) {
			return false
		}
	}
	return m.life() != inc
}

// replaceFor bounds the wait for another incarnation. At the end of this process none comes.
const (
	replaceFor   = 2 * time.Second
	replaceEvery = 5 * time.Millisecond
)

func (m *member) undrain(ctx context.Context, q api.UndrainRequest) (api.Drain, error) {
	inc, mach, err := m.machine()
	if err != nil {
		return api.Drain{}, err
	}
	s, err := mach.Undrain(ctx, q.Gen, q.By)
	return m.answer(inc, s, err)
}

// extend: whoever kills us at a time of its own has not told it, and the operator is believed.
func (m *member) extend(ctx context.Context, q api.ExtendRequest) (api.Drain, error) {
	inc, mach, err := m.machine()
	if err != nil {
		return api.Drain{}, err
	}
	s, err := mach.Extend(ctx, q.Gen, time.Duration(q.Extra), time.Time{}, q.By)
	return m.answer(inc, s, err)
}

func (m *member) cut(ctx context.Context, q api.CutRequest) (api.Drain, error) {
	inc, mach, err := m.machine()
	if err != nil {
		return api.Drain{}, err
	}
	s, err := mach.Cut(ctx, q.Gen, q.By)
	return m.answer(inc, s, err)
}

func (m *member) answer(inc *incarnation, s drain.Status, err error) (api.Drain, error) {
	switch {
	case err == nil:
		return m.drainView(inc, s), nil
	case errors.Is(err, drain.ErrStale):
		err = fmt.Errorf("%w: %w", api.ErrStale, err)
	case errors.Is(err, drain.ErrFlushing):
		err = fmt.Errorf("%w: %w", api.ErrFlushing, err)
	case errors.Is(err, drain.ErrNotDraining):
		err = fmt.Errorf("%w: %w", api.ErrNotDraining, err)
	}
	return api.Drain{}, err
}

// past are the running and the remembered drains, the oldest first.
func (m *member) past() []api.Drain {
	m.mu.Lock()
	ds := slices.Clone(m.drains)
	m.mu.Unlock()
	inc := m.life()
	if inc.b == nil {
		return ds
	}
	if s := inc.machine.Status(); s.ID != "" && !slices.ContainsFunc(ds, func(d api.Drain) bool { return d.ID == s.ID }) {
		ds = append(ds, m.drainView(inc, s))
	}
	return ds
}

// serves is nil when new connections are welcome: the application lives, listens, answers its probe and does not drain.
func (i *incarnation) serves(ctx context.Context, name string) error {
	if i.b == nil {
		return fmt.Errorf("%w: %s has no process", api.ErrNotReady, name)
	}
	select {
	case <-i.proc.exited():
		return fmt.Errorf("%w: %s has ended", api.ErrNotReady, name)
	default:
	}
	if !i.b.ready.Load() {
		return fmt.Errorf("%w: %s is draining", api.ErrNotReady, name)
	}
	if h, why := i.b.book.Health(); h != api.HealthOK && i.b.enforce {
		return fmt.Errorf("%w: %s is %s: %s", api.ErrNotReady, name, h, why)
	}
	if len(i.b.listening()) == 0 {
		if err := i.b.refresh(ctx); err != nil {
			return fmt.Errorf("%w: %w", api.ErrNotReady, err)
		}
		if len(i.b.listening()) == 0 {
			return fmt.Errorf("%w: %s does not listen yet", api.ErrNotReady, name)
		}
	}
	if i.set.ready != nil {
		if err := i.set.ready(ctx); err != nil {
			return fmt.Errorf("%w: %w", api.ErrNotReady, err)
		}
	}
	return nil
}

// drainView is the wire form of a drain.
func (m *member) drainView(inc *incarnation, s drain.Status) api.Drain {
	p := s.Budget.Policy
	d := api.Drain{
		ID: s.ID, Backend: m.name, Service: m.service, Gen: s.Gen, Cause: s.Cause, By: s.By, Reason: s.Reason,
		State: s.State, Outcome: s.Outcome, Begun: s.Begun, Deadline: s.Deadline, Policy: api.PolicyOf(p),
		Slices:      api.Slices{Wait: api.Duration(s.Budget.Wait), Flush: api.Duration(p.FlushTimeout), Reserve: api.Duration(p.Reserve)},
		FlushReason: s.FlushReason, FlushResult: api.FlushResult(s.FlushResult), Retired: int64(s.Retired),
		Unguarded: s.Unguarded, WouldHave: s.Mode == drain.ModeObserve, Warnings: append(slices.Clone(s.Warnings), s.Would...),
	}
	if s.Over() {
		d.Ended = &s.Ended
	}
	for _, ph := range s.Phases {
		d.Phases = append(d.Phases, api.PhaseAt{Phase: ph.Phase, At: ph.At})
	}
	if s.Counts.Known {
		d.Blocking = map[string]int64{}
		for _, b := range s.Blocks {
			d.Blocking[b.Class] = b.N
		}
	}
	for _, sv := range s.Survivors {
		d.Survivors = append(d.Survivors, api.StragglerOf(sv))
	}
	if s.Cut != nil {
		d.Cut = &api.Cut{Method: p.OnDeadline, Graceful: int64(s.Cut.Graceful), Destroyed: int64(s.Cut.Destroyed), Left: int64(s.Cut.Left), InFlight: int64(s.Cut.InFlight), Note: s.Cut.Note}
	}
	d.Late, d.Held = inc.b.lateView(s), inc.b.book.HeldDuring(s.ID)
	return d
}

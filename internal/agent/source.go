// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/probes"
)

// readyTimeout bounds one probe of --ready.
const readyTimeout = 2 * time.Second

// The runner is the api.Source of one backend. A request that comes while nothing drains costs one walk, and only
// when somebody asks.
var _ api.Source = (*runner)(nil)

// serve opens the API socket and, if asked for, the TCP address of probes and metrics.
func (r *runner) serve(ctx context.Context) (closeAPI func(), err error) {
	srv, err := api.NewServer(api.Options{Source: r, Log: r.events, Metrics: r.metrics.Handler(), Logger: r.log, Audit: r.audited})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	var served sync.WaitGroup
	start := func(f func(context.Context, net.Listener) error, ln net.Listener) {
		served.Go(func() {
			if err := f(ctx, ln); err != nil {
				r.log.Error("serve API", "address", ln.Addr().String(), "err", err)
			}
		})
	}
	start(srv.Serve, r.bound[0])
	for _, ln := range r.bound[1:] {
		start(srv.ServeProbes, ln)
	}
	return func() {
		// The log is closed first, so that followers read the last events and leave.
		if err := r.events.Close(); err != nil {
			r.log.Warn("close event log", "err", err)
		}
		cancel()
		served.Wait()
	}, nil
}

// bind opens the API socket and, if asked for, the TCP address of probes and metrics.
func (r *runner) bind(ctx context.Context) error {
	ln, err := api.Listen(r.paths.sock)
	if err != nil {
		return err
	}
	r.bound = []net.Listener{ln}
	if r.o.Metrics == "" {
		return nil
	}
	// Plain TCP: an MPTCP socket would fit no socket map, and nobody asks for one here.
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	if ln, err = lc.Listen(ctx, "tcp", r.o.Metrics); err != nil {
		return errors.Join(fmt.Errorf("listen for metrics: %w", err), r.unbind())
	}
	r.bound = append(r.bound, ln)
	return nil
}

// unbind closes what bind has opened, unless it was served and is closed already.
func (r *runner) unbind() error {
	var errs []error
	for _, ln := range r.bound {
		if err := ln.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			errs = append(errs, err)
		}
	}
	r.bound = nil
	return errors.Join(errs...)
}

// audited publishes one event for each action that somebody asked for, refused ones too.
func (r *runner) audited(a api.Audit) {
	e := drain.Event{Type: EventAction, Drain: a.Drain, Fields: map[string]any{
		"action": a.Action, "uid": a.UID, "pid": a.PID, "by": a.By, "reason": a.Reason, "status": a.Status,
	}}
	e.Message = a.Action + " by " + a.By
	if a.Err != nil {
		e.Message += " was refused: " + a.Err.Error()
		e.Fields["err"] = a.Err.Error()
	}
	r.emit(e)
}

// Backends implements api.Source.
func (r *runner) Backends(ctx context.Context) []api.Backend {
	return []api.Backend{r.view(ctx, false)}
}

// Backend implements api.Source.
func (r *runner) Backend(ctx context.Context, name string) (api.Backend, error) {
	if err := r.mine(name); err != nil {
		return api.Backend{}, err
	}
	return r.view(ctx, true), nil
}

func (r *runner) mine(name string) error {
	if name != r.o.Name {
		return fmt.Errorf("%w: %q is not run here", api.ErrUnknown, name)
	}
	return nil
}

// view is one look at the backend. closer also names what is not covered, which takes a walk of its own.
func (r *runner) view(ctx context.Context, closer bool) api.Backend {
	s := r.life().machine.Status()
	v := api.Backend{
		Name: r.o.Name, Service: r.o.Service, Gen: r.life().gen, State: s.State, Ready: r.BackendReady(ctx, r.o.Name) == nil,
		Mode: r.o.Mode, Protocol: r.eff.Policy.Protocol, OnNew: r.onNew(s),
		Datapath: api.Datapath(r.life().b.dp.name()), Guarded: r.life().b.dp.guarded(), PID: r.life().b.proc.pid,
		Owner: api.Owner{PID: os.Getpid(), Started: r.started},
	}
	counts, at := s.Counts, s.CountsAt
	if !r.draining() || at.IsZero() {
		// Outside a drain nobody looks, so look now.
		c, err := r.life().b.Look(ctx)
		if err != nil {
			c = drain.Counts{}
			v.Warnings = append(v.Warnings, "counts are unknown: "+err.Error())
		}
		counts, at = c, time.Now()
	}
	v.Counts, v.CountsKnown, v.CountsAt = api.CountsOf(counts), counts.Known, &at
	v.InFlight = api.InFlightOf(counts, r.eff.Policy.Idle)
	r.sockets(&v, closer)
	v.Warnings = append(append(v.Warnings, r.life().b.dp.warnings()...), r.life().b.late.warnings()...)
	v.Warnings = append(v.Warnings, r.life().b.late.keep.warnings()...)
	if s.ID != "" {
		d := r.drainView(s)
		v.Drain = &d
	}
	return v
}

// sockets fills in the listeners and what is not covered. closer is that of view.
func (r *runner) sockets(v *api.Backend, closer bool) {
	r.life().b.mu.Lock()
	for _, l := range r.life().b.all {
		if !l.live {
			continue
		}
		_, covered := r.life().b.covered[l.cookie]
		proto := "tcp"
		if l.mptcp {
			proto = "mptcp"
		}
		v.Listeners = append(v.Listeners, api.Listener{Address: l.addr.String(), Protocol: proto, PID: l.pid, Covered: covered, Why: r.life().b.why[l.cookie]})
		if !covered {
			v.NotCovered = append(v.NotCovered, api.NotCovered{What: proto + " " + l.addr.String(), Why: r.life().b.why[l.cookie]})
		}
	}
	known := slices.Clone(r.life().b.all)
	r.life().b.mu.Unlock()
	if closer {
		for _, l := range r.unwatched(known) {
			v.Listeners = append(v.Listeners, l)
			v.NotCovered = append(v.NotCovered, api.NotCovered{What: l.Protocol + " " + l.Address, Why: l.Why})
		}
		v.NotCovered = append(v.NotCovered, r.notCovered()...)
	}
	slices.SortFunc(v.Listeners, func(a, b api.Listener) int { return cmp.Compare(a.Address, b.Address) })
}

// unwatched lists the TCP listeners of CMD that the datapath was told to leave alone, which it therefore does not know.
func (r *runner) unwatched(known []listener) []api.Listener {
	var out []api.Listener
	for _, sp := range r.life().b.dp.spaces() {
		found, err := probes.Listeners(sp.diag, r.life().b.proc.descendants())
		if err != nil {
			r.log.Debug("list listeners", "err", err)
			continue
		}
		for _, f := range found {
			if slices.ContainsFunc(known, func(l listener) bool { return l.cookie == f.Cookie }) {
				continue
			}
			l := api.Listener{Address: f.Local.String(), Protocol: f.Protocol, PID: f.PID, Why: r.life().b.cov.split([]listener{{addr: f.Local}})[0]}
			if l.Why == "" {
				l.Why = "the census does not see it"
			}
			out = append(out, l)
		}
	}
	return out
}

func (r *runner) onNew(s drain.Status) api.OnNewChoice {
	c := api.OnNewChoice{Configured: r.o.Policy.OnNew, Chosen: s.OnNew, Why: s.OnNewWhy}
	if c.Configured == "" {
		c.Configured = drain.OnNewAuto
	}
	if c.Chosen == "" {
		c.Chosen = c.Configured
	}
	return c
}

func (r *runner) notCovered() []api.NotCovered {
	var out []api.NotCovered
	for _, sp := range r.life().b.dp.spaces() {
		us, err := probes.NotCovered(sp.diag, r.life().b.proc.descendants())
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

// Stragglers implements api.Source: what keeps a drain open comes first, then the oldest.
func (r *runner) Stragglers(ctx context.Context, name string, n int) ([]api.Straggler, error) {
	if err := r.mine(name); err != nil {
		return nil, err
	}
	vs, err := r.life().b.classify(ctx, r.life().b.coveredMap())
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

// Drain implements api.Source.
func (r *runner) Drain(ctx context.Context, name string, q api.DrainRequest) (api.Drain, error) {
	if err := r.mine(name); err != nil {
		return api.Drain{}, err
	}
	if r.o.Mode == drain.ModeOff {
		return api.Drain{}, fmt.Errorf("%w: %s runs with --mode off", api.ErrNotPossible, name)
	}
	p := r.o.Policy
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
		if grace := time.Duration(*q.Grace); grace >= r.eff.Policy.Grace {
			p.Grace = grace
		} else {
			deadline = time.Now().Add(grace)
		}
	}
	eff, err := drain.Validate(p)
	if err != nil {
		return api.Drain{}, fmt.Errorf("%w: %w", api.ErrNotPossible, err)
	}
	s, err := r.life().machine.Begin(ctx, drain.Request{
		Gen: q.Gen, Cause: drain.CauseOperator, Policy: eff.Policy, Deadline: deadline, Join: q.Grace == nil, Reason: q.Reason, By: q.By,
	})
	return r.answer(s, err)
}

// Undrain implements api.Source.
func (r *runner) Undrain(ctx context.Context, name string, q api.UndrainRequest) (api.Drain, error) {
	if err := r.mine(name); err != nil {
		return api.Drain{}, err
	}
	return r.answer(r.life().machine.Undrain(ctx, q.Gen, q.By))
}

// Extend implements api.Source. Whoever kills us at a time of its own has not told it: the operator is believed.
func (r *runner) Extend(ctx context.Context, name string, q api.ExtendRequest) (api.Drain, error) {
	if err := r.mine(name); err != nil {
		return api.Drain{}, err
	}
	return r.answer(r.life().machine.Extend(ctx, q.Gen, time.Duration(q.Extra), time.Time{}, q.By))
}

// Cut implements api.Source.
func (r *runner) Cut(ctx context.Context, name string, q api.CutRequest) (api.Drain, error) {
	if err := r.mine(name); err != nil {
		return api.Drain{}, err
	}
	return r.answer(r.life().machine.Cut(ctx, q.Gen, q.By))
}

func (r *runner) answer(s drain.Status, err error) (api.Drain, error) {
	switch {
	case err == nil:
		return r.drainView(s), nil
	case errors.Is(err, drain.ErrStale):
		err = fmt.Errorf("%w: %w", api.ErrStale, err)
	case errors.Is(err, drain.ErrFlushing):
		err = fmt.Errorf("%w: %w", api.ErrFlushing, err)
	case errors.Is(err, drain.ErrNotDraining):
		err = fmt.Errorf("%w: %w", api.ErrNotDraining, err)
	}
	return api.Drain{}, err
}

// Drains implements api.Source.
func (r *runner) Drains(context.Context) []api.Drain {
	r.mu.Lock()
	ds := slices.Clone(r.drains)
	r.mu.Unlock()
	if s := r.life().machine.Status(); s.ID != "" && !slices.ContainsFunc(ds, func(d api.Drain) bool { return d.ID == s.ID }) {
		ds = append(ds, r.drainView(s))
	}
	slices.Reverse(ds)
	return ds
}

// DrainByID implements api.Source.
func (r *runner) DrainByID(ctx context.Context, id string) (api.Drain, error) {
	for _, d := range r.Drains(ctx) {
		if d.ID == id {
			return d, nil
		}
	}
	return api.Drain{}, fmt.Errorf("%w: %s", api.ErrUnknownDrain, id)
}

// Ready implements api.Source.
func (r *runner) Ready(ctx context.Context) error { return r.BackendReady(ctx, r.o.Name) }

// BackendReady implements api.Source: CMD lives, listens, answers --ready and does not drain.
func (r *runner) BackendReady(ctx context.Context, name string) error {
	if err := r.mine(name); err != nil {
		return err
	}
	select {
	case <-r.life().b.proc.exited():
		return fmt.Errorf("%w: %s has ended", api.ErrNotReady, name)
	default:
	}
	if !r.life().b.ready.Load() {
		return fmt.Errorf("%w: %s is draining", api.ErrNotReady, name)
	}
	if len(r.life().b.listening()) == 0 {
		if err := r.life().b.refresh(ctx); err != nil {
			return fmt.Errorf("%w: %w", api.ErrNotReady, err)
		}
		if len(r.life().b.listening()) == 0 {
			return fmt.Errorf("%w: %s does not listen yet", api.ErrNotReady, name)
		}
	}
	if r.o.Ready != "" {
		if err := probes.Ready(ctx, r.o.Ready, readyTimeout); err != nil {
			return fmt.Errorf("%w: %w", api.ErrNotReady, err)
		}
	}
	return nil
}

// urlPort is the port that an http(s) URL names, explicitly or by its scheme.
func urlPort(s string) (uint16, bool) {
	u, err := url.Parse(s)
	if s == "" || err != nil {
		return 0, false
	}
	if u.Port() == "" {
		switch u.Scheme {
		case "http":
			return 80, true
		case "https":
			return 443, true
		}
		return 0, false
	}
	n, err := strconv.ParseUint(u.Port(), 10, 16)
	return uint16(n), err == nil
}

// drainView is the wire form of a drain.
func (r *runner) drainView(s drain.Status) api.Drain {
	p := s.Budget.Policy
	d := api.Drain{
		ID: s.ID, Backend: r.o.Name, Service: r.o.Service, Gen: s.Gen, Cause: s.Cause, By: s.By, Reason: s.Reason,
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
	d.Late = r.life().b.lateView(s)
	return d
}

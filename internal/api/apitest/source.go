// SPDX-License-Identifier: Apache-2.0

// Package apitest is an api.Source for tests of what lies on either side of the API: backends whose
// connections are numbers in memory. It decides as the contract says (one drain at a time, undrain until
// the flush) and has no time of its own: a test moves a drain on by calling Step and End.
package apitest

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
)

// Source is the api.Source. Its methods may be called from any goroutine.
type Source struct {
	Log *api.Log // events go here

	mu         sync.Mutex
	backends   []api.Backend
	stragglers map[string][]api.Straggler
	drains     []api.Drain // the newest first
	calls      []string
}

var _ api.Source = (*Source)(nil)

// New returns a Source with these backends.
func New(log *api.Log, backends ...api.Backend) *Source {
	return &Source{Log: log, backends: backends, stragglers: make(map[string][]api.Straggler)}
}

// Web is a backend under nginx with a few connections, one of which is slow.
func Web() api.Backend {
	t := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	c := drain.Counts{Known: true, Active: 3, Idle: 50, Stalled: 1, Closing: 2, Accepted: 1234}
	queued := int64(0)
	return api.Backend{
		Name: "web", Service: "shop", Gen: 7, State: drain.StateServing, Ready: true,
		Mode: drain.ModeEnforce, Protocol: drain.ProtocolHTTP1,
		OnNew:    api.OnNewChoice{Configured: drain.OnNewAuto, Chosen: drain.OnNewAdmit, Why: "no other backend serves here"},
		Datapath: api.DatapathBPF, Guarded: true, PID: 4242,
		Owner: api.Owner{PID: 4200, Started: t},
		Listeners: []api.Listener{
			{Address: "0.0.0.0:80", Protocol: "tcp", PID: 4242, Covered: true, Queued: &queued},
			{Address: "127.0.0.1:8081", Protocol: "tcp", PID: 4242, Why: "loopback, and there are others"},
		},
		NotCovered: []api.NotCovered{{What: "udp 0.0.0.0:443", Why: "only TCP is drained"}},
		Counts:     api.CountsOf(c), InFlight: api.InFlightOf(c, drain.IdleClose), CountsKnown: true, CountsAt: &t,
	}
}

// Blind is a backend whose counts are not known and whose admission cannot close.
func Blind() api.Backend {
	return api.Backend{
		Name: "blind", Service: "blind", Gen: 1, State: drain.StateServing, Ready: true,
		Mode: drain.ModeEnforce, Protocol: drain.ProtocolOpaque,
		OnNew:    api.OnNewChoice{Configured: drain.OnNewAdmit, Chosen: drain.OnNewAdmit},
		Datapath: api.DatapathNone, PID: 77, Owner: api.Owner{PID: 70, Started: time.Unix(1782900000, 0)},
		Warnings: []string{"no BPF here: counts come from sock_diag; run as root for more"},
	}
}

// SetStragglers sets the open connections of a backend.
func (s *Source) SetStragglers(name string, rows ...api.Straggler) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stragglers[name] = rows
}

// Calls are the actions so far, as "verb backend by reason".
func (s *Source) Calls() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.calls)
}

// Update changes a backend.
func (s *Source) Update(name string, change func(*api.Backend)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if i := s.index(name); i >= 0 {
		change(&s.backends[i])
	}
}

// Step moves the running drain of a backend into a phase.
func (s *Source) Step(name string, p drain.Phase) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.step(name, p)
}

func (s *Source) step(name string, p drain.Phase) {
	i := s.index(name)
	if i < 0 || s.backends[i].Drain == nil {
		return
	}
	d := *s.backends[i].Drain
	d.Phases = append(slices.Clone(d.Phases), api.PhaseAt{Phase: p, At: time.Now()})
	if p == drain.PhaseFlush {
		d.State, d.FlushReason = drain.StateFlushing, drain.FlushZero
	}
	s.put(i, d)
	s.Log.Publish(drain.Event{
		Type: "drain.phase", Service: d.Service, Backend: d.Backend, Gen: d.Gen, Drain: d.ID, Cause: d.Cause,
		Phase: p, Message: "phase " + string(p),
	})
}

// End ends the running drain of a backend.
func (s *Source) End(name string, o drain.Outcome) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.end(name, o)
}

func (s *Source) end(name string, o drain.Outcome) {
	i := s.index(name)
	if i < 0 || s.backends[i].Drain == nil {
		return
	}
	d, t := *s.backends[i].Drain, time.Now()
	d.Outcome, d.Ended, d.State = o, &t, drain.StateDone
	switch o {
	case drain.OutcomeCancelled:
		d.State = drain.StateServing
	case drain.OutcomeLost:
		d.State = drain.StateLost
	}
	s.put(i, d)
	s.backends[i].Ready = o == drain.OutcomeCancelled
	s.Log.Publish(drain.Event{
		Type: "drain.end", Service: d.Service, Backend: d.Backend, Gen: d.Gen, Drain: d.ID, Cause: d.Cause,
		Outcome: o, Message: "drain ended: " + string(o),
	})
}

// put stores a drain in its backend and in the list.
func (s *Source) put(i int, d api.Drain) {
	s.backends[i].Drain, s.backends[i].State = &d, d.State
	if j := slices.IndexFunc(s.drains, func(o api.Drain) bool { return o.ID == d.ID }); j >= 0 {
		s.drains[j] = d
		return
	}
	s.drains = slices.Insert(s.drains, 0, d)
}

func (s *Source) index(name string) int {
	return slices.IndexFunc(s.backends, func(b api.Backend) bool { return b.Name == name })
}

// find returns the index of a backend whose generation is gen, or any if gen is 0.
func (s *Source) find(name string, gen uint64) (int, error) {
	i := s.index(name)
	if i < 0 {
		return i, fmt.Errorf("%w %q", api.ErrUnknown, name)
	}
	if g := s.backends[i].Gen; gen != 0 && gen != g {
		return i, fmt.Errorf("%w: %s is at gen %d, not %d; nothing was done", api.ErrStale, name, g, gen)
	}
	return i, nil
}

// Backends implements api.Source.
func (s *Source) Backends(context.Context) []api.Backend {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.backends)
}

// Backend implements api.Source.
func (s *Source) Backend(_ context.Context, name string) (api.Backend, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i, err := s.find(name, 0)
	if err != nil {
		return api.Backend{}, err
	}
	return s.backends[i], nil
}

// Stragglers implements api.Source.
func (s *Source) Stragglers(_ context.Context, name string, n int) ([]api.Straggler, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, err := s.find(name, 0); err != nil {
		return nil, err
	}
	rows := s.stragglers[name]
	return slices.Clone(rows[:min(n, len(rows))]), nil
}

// Drain implements api.Source.
func (s *Source) Drain(_ context.Context, name string, r api.DrainRequest) (api.Drain, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls = append(s.calls, fmt.Sprintf("drain %s %s %s", name, r.By, r.Reason))
	i, err := s.find(name, r.Gen)
	if err != nil {
		return api.Drain{}, err
	}
	b := &s.backends[i]
	if !b.Guarded && r.OnNew == drain.OnNewRefuse {
		return api.Drain{}, fmt.Errorf("%w: on_new refuse needs admission in the kernel, which %s does not have; use admit", api.ErrNotPossible, name)
	}
	grace := 30 * time.Second
	if r.Grace != nil {
		grace = time.Duration(*r.Grace)
	}
	if b.Drain != nil && b.Drain.Running() {
		d := *b.Drain
		if t := time.Now().Add(grace); r.Grace != nil && t.Before(d.Deadline) {
			d.Deadline = t
		}
		s.put(i, d)
		return d, nil
	}
	now := time.Now()
	d := api.Drain{
		ID: fmt.Sprintf("%s-%d-%d", name, b.Gen, len(s.drains)+1), Backend: name, Service: b.Service, Gen: b.Gen,
		Cause: cmp.Or(r.Cause, drain.CauseOperator), By: r.By, Reason: r.Reason, State: drain.StateDraining,
		Begun: now, Deadline: now.Add(grace),
		Policy: api.PolicyOf(drain.Policy{
			Protocol: b.Protocol, OnNew: cmp.Or(r.OnNew, b.OnNew.Chosen), OnDeadline: cmp.Or(r.OnDeadline, drain.OnDeadlineCut),
			Idle: drain.IdleClose, NotifyAt: drain.NotifyAtBegin, Grace: grace, FlushTimeout: 5 * time.Second,
			Reserve: 3 * time.Second, QuietPeriod: time.Second, IdleAfter: 10 * time.Second,
		}),
		Slices:    api.Slices{Wait: api.Duration(grace - 8*time.Second), Flush: api.Duration(5 * time.Second), Reserve: api.Duration(3 * time.Second)},
		Unguarded: !b.Guarded, WouldHave: b.Mode == drain.ModeObserve,
	}
	if b.CountsKnown {
		d.Blocking = map[string]int64{"active": *b.Counts.Active, "stalled": *b.Counts.Stalled}
	}
	b.Ready = false
	s.put(i, d)
	s.step(name, drain.PhaseBegin)
	s.step(name, drain.PhaseStopNew)
	return *s.backends[i].Drain, nil
}

// running is the backend's index if it is draining.
func (s *Source) running(name string, gen uint64) (int, error) {
	i, err := s.find(name, gen)
	if err != nil {
		return i, err
	}
	if d := s.backends[i].Drain; d == nil || !d.Running() {
		return i, fmt.Errorf("%w: %s is %s; nothing was done", api.ErrNotDraining, name, s.backends[i].State)
	}
	return i, nil
}

// Undrain implements api.Source.
func (s *Source) Undrain(_ context.Context, name string, r api.UndrainRequest) (api.Drain, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls = append(s.calls, fmt.Sprintf("undrain %s %s %s", name, r.By, r.Reason))
	i, err := s.running(name, r.Gen)
	if err != nil {
		return api.Drain{}, err
	}
	if s.backends[i].State == drain.StateFlushing {
		return api.Drain{}, fmt.Errorf("%w: %s has been told to end, which cannot be taken back", api.ErrFlushing, name)
	}
	s.end(name, drain.OutcomeCancelled)
	return *s.backends[i].Drain, nil
}

// Extend implements api.Source.
func (s *Source) Extend(_ context.Context, name string, r api.ExtendRequest) (api.Drain, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls = append(s.calls, fmt.Sprintf("extend %s %s %s", name, r.By, r.Reason))
	i, err := s.running(name, r.Gen)
	if err != nil {
		return api.Drain{}, err
	}
	if r.Extra > api.Duration(time.Hour) {
		return api.Drain{}, fmt.Errorf("%w: an hour is the most", api.ErrNotPossible)
	}
	d := *s.backends[i].Drain
	d.Deadline = d.Deadline.Add(time.Duration(r.Extra))
	s.put(i, d)
	return d, nil
}

// Cut implements api.Source.
func (s *Source) Cut(_ context.Context, name string, r api.CutRequest) (api.Drain, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls = append(s.calls, fmt.Sprintf("cut %s %s %s", name, r.By, r.Reason))
	i, err := s.running(name, r.Gen)
	if err != nil {
		return api.Drain{}, err
	}
	age, idle := api.Duration(90*time.Second), api.Duration(2*time.Second)
	d := *s.backends[i].Drain
	d.Survivors = []api.Straggler{{Peer: "192.0.2.7:40000", Local: "192.0.2.1:80", Class: "active", Age: &age, Idle: &idle, Unacked: 512}}
	d.Cut = &api.Cut{Method: drain.OnDeadlineCut, Graceful: 3, Destroyed: 1}
	d.Late = &api.Late{Admitted: 2}
	s.put(i, d)
	s.step(name, drain.PhaseCut)
	return *s.backends[i].Drain, nil
}

// Drains implements api.Source.
func (s *Source) Drains(context.Context) []api.Drain {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.drains)
}

// DrainByID implements api.Source.
func (s *Source) DrainByID(_ context.Context, id string) (api.Drain, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range s.drains {
		if d.ID == id {
			return d, nil
		}
	}
	return api.Drain{}, fmt.Errorf("%w %q", api.ErrUnknownDrain, id)
}

// Ready implements api.Source.
func (s *Source) Ready(ctx context.Context) error {
	for _, b := range s.Backends(ctx) {
		if err := s.BackendReady(ctx, b.Name); err != nil {
			return err
		}
	}
	return nil
}

// BackendReady implements api.Source.
func (s *Source) BackendReady(_ context.Context, name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	i, err := s.find(name, 0)
	if err != nil {
		return err
	}
	if b := s.backends[i]; !b.Ready {
		return fmt.Errorf("%w: %s is %s", api.ErrNotReady, name, b.State)
	}
	return nil
}

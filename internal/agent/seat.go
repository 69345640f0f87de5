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
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/bpf"
	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/config"
	"github.com/ebbproxy/ebb/internal/discovery"
	"github.com/ebbproxy/ebb/internal/health"
	"github.com/ebbproxy/ebb/internal/netns"
	"github.com/ebbproxy/ebb/probes"
	"github.com/ebbproxy/ebb/proxy"
)

// seat is a configured backend of this host: its processes come and go, it stays. One goroutine, that of tend, changes it.
type seat struct {
	*member
	n     *node
	log   *slog.Logger
	match discovery.Match
	finds chan find      // the last look at the host; of capacity 1
	confs chan *settings // the last configuration; of capacity 1
	gone  chan struct{}  // closed when tend has returned

	spared uint64 // generation whose drain for a higher version was taken back under the owner before us; 0: none

	once   sync.Once
	looked chan struct{} // closed when the first look was taken in

	configured *settings // the last that was put into confs; of whoever applies a configuration

	// What follows is of the goroutine.
	j        *journal
	past     history
	dp       datapath
	cgroup   uint64    // that dp watches; 0: none
	failed   string    // why the process that is there is not taken in
	netns    uint64    // inode number of the namespace that dp was made in
	set      *settings // for the next incarnation
	asks     *asking   // nil: nothing is probed
	settle   <-chan time.Time
	resting  <-chan time.Time
	exited   bool   // the present process has, and its drain knows
	over     bool   // the drain of the present incarnation is
	audited  uint64 // connections counted at the last audit that agreed
	unproven bool   // no audit has agreed yet
}

// find is what a look at the host has shown.
type find struct {
	workload discovery.Workload
	err      error
}

// put replaces what waits in a channel of capacity 1 that one goroutine writes to.
func put[T any](c chan T, v T) {
	select {
	case <-c:
	default:
	}
	c <- v
}

func (n *node) newSeat(sv config.Service, b config.Backend) (*seat, error) {
	s := &seat{
		member: &member{
			wg:   &n.wg,
			name: b.Name, service: sv.Name, unit: b.Match.Unit, matched: b.Match.String(), id: agentBackendID(b.Name), started: n.started, log: n.log, events: n.events, metrics: n.metrics,
		},
		n: n, log: n.log.With("backend", b.Name), match: *b.Match, finds: make(chan find, 1), confs: make(chan *settings, 1), gone: make(chan struct{}), looked: make(chan struct{}), unproven: true,
	}
	s.drains, s.remember = n.recall(b.Name), func(ds []api.Drain) { n.remember(b.Name, ds) }
	s.late = s.lateOptions
	s.flipped = func(ctx context.Context) error { return n.flipped(ctx, sv.Name) }
	s.sessions, s.hears = n.sessionsOf(b.Name), n.hears
	s.turned = func() { n.changed(sv.Name) }
	s.addresses = func(netns uint64) []api.ServiceAddress { return n.addresses(sv.Name, netns) }
	s.set = settingsOf(sv, b)
	s.configured = s.set
	path := filepath.Join(n.conf().State.Dir, "backends", b.Name+".journal")
	var err error
	s.j, s.past, err = openJournal(path)
	var damaged error
	if errors.Is(err, ErrJournal) && !errors.Is(err, errNewer) {
		// One backend's journal must not keep the agent from all the others.
		damaged = err
		if err = os.Rename(path, path+".damaged"); err == nil {
			s.j, s.past, err = openJournal(path)
			s.past.lastGen = n.genOf(s.id)
		}
	}
	if err != nil {
		return nil, errors.Join(damaged, err)
	}
	if r := s.past.ended; r != nil && r.Type == "end" && !slices.ContainsFunc(s.drains, func(d api.Drain) bool { return d.ID == r.Drain }) {
		s.drains = append(s.drains, s.recorded(*r, "the agent that ran it was killed before it could tell more"))
	}
	if r := s.past.ended; r != nil && r.Type == "undrain" && r.Cause == drain.CauseVersionUpgrade {
		s.spared = r.Gen
	}
	if s.past.torn {
		s.log.Warn("journal ended in a torn record, which was cut off")
	}
	s.current.Store(&incarnation{gen: s.past.lastGen, set: s.set, absent: "it was not looked for yet", unknown: true})
	n.metrics.Register(sv.Name, b.Name)
	if damaged != nil {
		s.degraded(fmt.Sprintf("its journal was moved to %s.damaged: a drain that ran has no outcome, and its admission opens: %v", path, damaged))
	}
	return s, nil
}

// settingsOf is what a configuration says of one backend.
func settingsOf(sv config.Service, b config.Backend) *settings {
	set := &settings{
		mode: b.Mode, policy: sv.Policy, notify: sv.Notify, flush: sv.Flush, weight: b.Weight,
		holdMax: sv.HoldMax, holdFor: sv.HoldFor, extension: sv.Extension, version: b.Version, upgrade: sv.DrainOnVersionUpgrade,
	}
	// The policy of a configuration has been validated, so that its sums fit.
	set.eff, _ = drain.Validate(sv.Policy)
	if b.Match.Port != 0 {
		set.cov.ports = []uint16{b.Match.Port}
	}
	if sv.Ready != nil {
		p := sv.Ready.At(b.Match.Port)
		set.probe = &p
		var port uint16
		switch {
		case p.HTTP != nil:
			port = p.HTTP.Port
		case p.TCP != nil:
			port = p.TCP.Port
		case p.GRPC != nil:
			port = p.GRPC.Port
		}
		// One that clients are steered to by the service's address, or that it is matched by, is the service's own.
		if port != 0 && port != b.Match.Port && !slices.ContainsFunc(sv.Listen, func(a netip.AddrPort) bool { return a.Port() == port }) {
			set.cov.aux = []uint16{port}
		}
	}
	if len(sv.Health.From) > 0 || sv.Health.Path != "" {
		set.health = &proxy.Health{From: sv.Health.From, Path: sv.Health.Path}
	}
	for _, r := range sv.Backends {
		if r.Address.IsValid() {
			set.peers = append(set.peers, r.Address)
		}
	}
	return set
}

// agentRelay is what the relay of a backend is called: a run may have the backend's name.
func agentRelay(backend string) string { return "agent-" + backend }

// agentBackendID names a backend of the agent of this host: the same name is the same one until the next boot.
func agentBackendID(name string) uint64 { return hashID("agent", bootID(), name) }

// restAfter is how long after the end of a process its successor is expected where it was.
const restAfter = 5 * time.Second

// settleFor is how long what was open before is given to be counted, before anybody is told that it is not.
const settleFor = time.Second

// tend lives as long as the backend is configured and this process owns it.
func (s *seat) tend(ctx context.Context) {
	defer close(s.gone)
	every := time.NewTicker(auditEvery)
	defer every.Stop()
	for {
		inc := s.life()
		var exited, over <-chan struct{}
		var hints <-chan hint
		if inc.b != nil {
			hints = inc.b.dp.hints()
			if !s.exited {
				exited = inc.proc.exited()
			}
			if !s.over {
				over = inc.machine.Done()
			}
		}
		select {
		case f := <-s.finds:
			s.look(ctx, f)
			s.once.Do(func() { close(s.looked) })
		case set := <-s.confs:
			s.set = set
			s.adjust(ctx)
		case h := <-hints:
			s.hear(ctx, h)
		case <-exited:
			s.left(inc)
		case <-over:
			s.ended(ctx, inc)
		case <-s.settle:
			s.settle = nil
			for _, why := range inc.b.dp.warnings(nil) {
				s.degraded(why)
			}
		case <-s.resting:
			s.resting = nil
			s.routine(ctx, inc)
		case <-every.C:
			s.routine(ctx, inc)
		case <-ctx.Done():
			return
		}
	}
}

// hear answers a hint of the kernel.
func (s *seat) hear(ctx context.Context, h hint) {
	inc := s.life()
	if h == hintZero {
		inc.machine.Zero()
		return
	}
	if err := inc.b.refresh(ctx); err != nil && !errors.Is(err, probes.ErrGone) {
		s.log.Warn("look for listeners", "err", err)
	}
	inc.b.lift()
	s.n.changed(s.service)
	if s.exited {
		s.n.poke() // it may be its successor's
	}
}

// left says that the process has ended.
func (s *seat) left(inc *incarnation) {
	s.exited = true
	s.resting = time.After(restAfter)
	s.unprobe()
	s.n.unclaim(s)
	s.emit(drain.Event{Type: EventRun, Gen: inc.gen, Message: fmt.Sprintf("process %d ended: %s", inc.proc.pid, inc.proc.exit), Fields: map[string]any{"pid": inc.proc.pid, "exit": inc.proc.exit.String()}})
	s.n.poke()
	s.reopen(inc)
	if inc.b.flushing.Load() {
		return // the flush sees it, and says so itself
	}
	inc.machine.Exited(endOf(inc))
}

// endOf says what was wrong with the way a process ended; nil if it was asked to, ended well, or nobody can tell.
func endOf(inc *incarnation) error {
	if inc.b.flushed.Load() || !inc.proc.exit.known {
		return nil
	}
	switch inc.proc.exit.code {
	case 0, 128 + int(unix.SIGHUP), 128 + int(unix.SIGINT), 128 + int(unix.SIGTERM), 128 + int(unix.SIGPIPE):
		return nil // those by which a manager stops a service, as systemd takes them (systemd.service(5), SuccessExitStatus=)
	}
	return fmt.Errorf("process %d ended: %s", inc.proc.pid, inc.proc.exit)
}

// ended says that the drain is over, or that the application has ended without one.
func (s *seat) ended(ctx context.Context, inc *incarnation) {
	st := inc.machine.Status()
	s.over = st.State == drain.StateDone || st.State == drain.StateLost
	s.reopen(inc)
	s.n.changed(s.service)
	switch {
	case !s.over:
		s.adjust(ctx) // taken back: what was configured meanwhile holds now
	case inc.set.mode != drain.ModeEnforce && !s.exited && s.alive(inc):
		s.anew(ctx, inc) // nothing was done to it: it serves, and can be drained again
	}
}

// reopen ends the refusal of a process that has ended, drain and all. The kernel does it when the last listener closes, but one
// that somebody else holds, as systemd does for a socket unit, is there for the next process, which may be started by what
// comes.
func (s *seat) reopen(inc *incarnation) {
	if !s.exited || !s.over || !inc.b.dp.refusing() {
		return
	}
	if err := inc.b.dp.admit(); err != nil {
		s.log.Warn("open admission after the end of the process", "err", err)
	}
}

// routine compares the census with the sockets, unless nothing has come or gone since it was last seen to be right.
func (s *seat) routine(ctx context.Context, inc *incarnation) {
	if inc.b == nil || inc.draining() {
		return // a drain has audits of its own
	}
	if s.exited && s.over {
		s.rest(ctx, inc)
		return
	}
	inc.b.cookies.sample(time.Now())
	if total, ok := inc.b.resting(s.n.recent()); ok && !s.unproven && total == s.audited {
		return
	}
	// All of hundreds are due at once, and each holds what it has read while it works.
	select {
	case s.n.audits <- struct{}{}:
		defer func() { <-s.n.audits }()
	case <-ctx.Done():
		return
	}
	c, err := inc.b.census(ctx)
	agreed := false
	if err == nil {
		agreed, err = inc.b.audit(ctx)
	}
	if err != nil {
		if ctx.Err() == nil {
			s.log.Warn("audit", "err", err)
		}
		return
	}
	s.unproven, s.audited = !agreed, c.total
}

// rest lets go of the network namespace of a process that has ended, once nothing of it is open: whoever made that wants to
// see it go.
func (s *seat) rest(ctx context.Context, inc *incarnation) {
	c, err := inc.b.census(ctx)
	if err != nil || !c.known || c.open+c.ending+c.closing > 0 {
		return
	}
	inc.b.late.leave()
	inc.end(api.EndEvicted)
	if err := s.dp.close(false); err != nil {
		s.log.Warn("let go of a network namespace", "err", err)
	}
	s.dp, s.netns = nil, 0
	s.vacate(inc, "its process has ended", false)
}

// look takes in what was found on the host.
func (s *seat) look(ctx context.Context, f find) {
	inc := s.life()
	if inc.b == nil && s.past.lastRun != nil {
		if err := s.recover(ctx, f); err != nil {
			if ctx.Err() == nil {
				s.fail("what an earlier owner has left cannot be taken over: " + err.Error())
			}
			return
		}
		inc = s.life()
	}
	switch {
	case f.err != nil:
		if inc.b == nil {
			s.current.Store(&incarnation{gen: inc.gen, set: s.set, absent: f.err.Error(), unknown: !errors.Is(f.err, discovery.ErrNone)})
		}
	case inc.b != nil && inc.proc.pid == f.workload.Main && inc.proc.start == f.workload.Start:
	case inc.b != nil && !s.exited && s.alive(inc):
		// What it was found by may mean another one too by now; that one's turn comes when this one has ended.
	default:
		if err := s.arrive(ctx, f.workload); err != nil && ctx.Err() == nil {
			s.fail("its process cannot be taken in: " + err.Error())
			return
		}
	}
	s.failed = ""
}

// fail says that there is a process whose connections are not counted, once for each reason. It is tried again at the next
// look.
func (s *seat) fail(why string) {
	if s.failed != why {
		s.failed = why
		s.degraded(why)
	}
	if inc := s.life(); inc.b == nil {
		s.current.Store(&incarnation{gen: inc.gen, set: s.set, absent: why, unknown: true})
	}
}

// alive tells whether the present process lives, and says so to its drain if it does not.
func (s *seat) alive(inc *incarnation) bool {
	select {
	case <-inc.proc.exited():
		s.left(inc)
		return false
	default:
		return true
	}
}

// recover goes on with what an earlier owner has left: its process if that lives, else the end of its drain. After an error
// it is tried again.
func (s *seat) recover(ctx context.Context, f find) error {
	last, past := s.past.lastRun, s.past
	w := discovery.Workload{Main: last.PID, Start: last.Start}
	if f.err == nil && f.workload.Main == last.PID && f.workload.Start == last.Start {
		w = f.workload
	}
	done := func() { s.past.lastRun, s.past.openDrain, s.past.late = nil, nil, nil }
	p, ok := s.process(w)
	if !ok || last.BootID != bootID() {
		if past.openDrain != nil {
			s.bury(*past.openDrain, last.BootID == bootID())
		}
		if ok {
			s.closeProcess(p)
		}
		done()
		return nil
	}
	if past.openDrain == nil && last.Match != "" && last.Match != s.match.String() {
		// The name means another application by now, which begins from nothing.
		s.closeProcess(p)
		if err := s.n.forget(s.id); err != nil {
			return err
		}
		done()
		return nil
	}
	if err := s.n.claim(s, w); err != nil {
		s.closeProcess(p)
		return err
	}
	set := s.set
	if past.openDrain != nil && set.mode != drain.ModeEnforce {
		// What was journalled was enforced, and goes on so; the configured mode is in force after it.
		enforced := *set
		enforced.mode = drain.ModeEnforce
		set = &enforced
	}
	over := past.ended
	if over != nil && (over.Type != "end" || over.Gen != last.Gen || past.openDrain != nil || set.mode != drain.ModeEnforce) {
		over = nil
	}
	if err := s.enter(ctx, w, arrival{gen: last.Gen, set: set, proc: p, argv: last.Argv, past: past, adopted: true, over: over}); err != nil {
		s.closeProcess(p)
		return err
	}
	done()
	inc := s.life()
	if past.openDrain == nil {
		// A refusal whose drain is in no journal is nobody's any more.
		if err := s.dp.admit(); err != nil {
			s.log.Warn("open admission", "err", err)
		}
	}
	if past.flushed {
		inc.b.flushed.Store(true)
	}
	s.emit(drain.Event{Type: EventRun, Message: fmt.Sprintf("took over %s, process %d; %s", strings.Join(last.Argv, " "), p.pid, s.set.eff), Fields: map[string]any{"pid": p.pid, "argv": last.Argv}})
	return nil
}

// bury ends the drain of a process that ended while nobody watched: it has its one outcome, and what it closed is open.
// Connections do not outlive a boot, and neither does what is in the kernel.
func (s *seat) bury(r drain.Record, sameBoot bool) {
	r.Type, r.Outcome = "end", drain.OutcomeLost
	why := "its process ended while no agent watched"
	switch {
	case !sameBoot:
		why = "the machine was started again"
	case r.FlushReason == drain.FlushZero:
		r.Outcome = drain.OutcomeDrained
	case r.FlushReason == drain.FlushDeadline:
		r.Outcome = drain.OutcomeExpired
	}
	if err := s.j.append(r); err != nil {
		s.log.Warn("journal the end of a drain", "drain", r.Drain, "err", err)
	}
	if sameBoot {
		if err := s.n.release(s.id); err != nil {
			s.log.Warn("open admission after a drain", "drain", r.Drain, "err", err)
		}
	}
	d := s.recorded(r, why)
	s.keepDrain(d, "")
	s.log.Info("drain ended", "drain", r.Drain, "outcome", r.Outcome, "why", why)
	s.emit(drain.Event{
		Type: drain.EventEnd, Gen: r.Gen, Drain: r.Drain, Cause: r.Cause, Phase: drain.PhaseDone, Outcome: r.Outcome,
		Message: fmt.Sprintf("the drain is over: %s: %s", r.Outcome, why), Fields: map[string]any{"flush_reason": string(r.FlushReason)},
	})
}

// recorded is what the record of an end tells of its drain.
func (s *seat) recorded(r drain.Record, warnings ...string) api.Drain {
	eff, _ := drain.Validate(r.Policy) // it is that of a drain that ran
	d := api.Drain{
		ID: r.Drain, Backend: s.name, Service: s.service, Gen: r.Gen, Cause: r.Cause, By: r.By, Reason: r.Reason,
		State: drain.StateDone, Outcome: r.Outcome, Begun: r.Begun, Deadline: r.Deadline, Ended: new(time.Now()),
		Policy: api.PolicyOf(eff.Policy), FlushReason: r.FlushReason, Warnings: warnings,
		Slices: api.Slices{Wait: api.Duration(eff.Wait), Flush: api.Duration(eff.Policy.FlushTimeout), Reserve: api.Duration(eff.Policy.Reserve)},
	}
	if r.Outcome == drain.OutcomeLost {
		d.State = drain.StateLost
	}
	return d
}

// closeProcess lets go of a process.
func (s *seat) closeProcess(p *process) {
	if err := p.close(); err != nil {
		s.log.Warn("let go of a process", "pid", p.pid, "err", err)
	}
}

// arrive makes a process the present incarnation.
func (s *seat) arrive(ctx context.Context, w discovery.Workload) error {
	old := s.life()
	if old.b != nil {
		s.conclude(ctx, old)
		s.vacate(old, "its process has ended", s.life().unknown)
		old = s.life()
	}
	p, ok := s.process(w)
	if !ok {
		s.n.poke() // it has gone again
		return nil
	}
	if err := s.n.claim(s, w); err != nil {
		return errors.Join(err, p.close())
	}
	gen := max(old.gen+1, s.past.lastGen+1, uint64(time.Now().Unix()))
	argv := commandOf(p.pid)
	if err := s.enter(ctx, w, arrival{gen: gen, set: s.set, proc: p, argv: argv}); err != nil {
		return errors.Join(err, p.close())
	}
	if old.b == nil {
		// What an owner before us has left closed was closed for the process before this one.
		if err := s.dp.admit(); err != nil {
			s.log.Warn("open admission for a new process", "err", err)
		}
		late := s.life().b.late
		late.resume(ctx, nil)
		late.shed()
	}
	s.emit(drain.Event{Type: EventRun, Message: fmt.Sprintf("found %s, process %d; %s", strings.Join(argv, " "), p.pid, s.set.eff), Fields: map[string]any{"pid": p.pid, "argv": argv}})
	return nil
}

// concludeFor bounds the wait for the end of a drain whose process has a successor already.
const concludeFor = 10 * time.Second

// conclude brings the drain of a process that has ended to its outcome, so that its successor's connections are not taken
// for late ones.
func (s *seat) conclude(ctx context.Context, old *incarnation) {
	old.b.late.shed()
	if err := s.dp.admit(); err != nil {
		s.log.Warn("open admission for the next process", "err", err)
	}
	if old.draining() {
		t := time.NewTimer(concludeFor)
		defer t.Stop()
		select {
		case <-old.machine.Done():
		case <-t.C:
			s.log.Warn("the drain of a process that has a successor does not end, and is given up", "drain", old.machine.Status().ID)
		case <-ctx.Done():
		}
	}
	old.end(api.EndEvicted)
	// Whoever reads the events may come to its end only when there is a successor.
	if st := old.machine.Status(); st.ID != "" && st.Over() {
		s.keepDrain(s.drainView(old, st), st.OnNew)
	}
}

// process is the one that was found, if it lives still.
func (s *seat) process(w discovery.Workload) (*process, bool) {
	p, ok := adoptProcess(w.Main, w.Start)
	if !ok {
		return nil, false
	}
	p.foreign, p.workload = true, w
	if w.CgroupPath != "" {
		p.members = func() []int {
			pids, err := w.Members()
			if err != nil {
				s.log.Debug("list the processes of the cgroup", "cgroup", w.CgroupPath, "err", err)
			}
			return pids
		}
	}
	return p, true
}

// enter makes an arrival the present incarnation, in a datapath that sees its network namespace.
func (s *seat) enter(ctx context.Context, w discovery.Workload, a arrival) error {
	ns, err := w.OpenNetNS()
	if err == nil {
		defer ns.Close()
	} else {
		ns = nil // it has ended: what it left is looked at from here
	}
	var id netns.Identity
	if ns != nil {
		if id, err = netns.ID(int(ns.Fd())); err != nil {
			return err
		}
	}
	fresh := s.dp == nil || ns != nil && id.Ino != s.netns || w.CgroupID != s.cgroup || s.inKernel(a.set) != (s.dp.name() == datapathKernel)
	switch {
	case !fresh:
		if err := s.dp.renew(a.gen, a.set.mode == drain.ModeEnforce); err != nil {
			return err
		}
	default:
		s.unprobe() // it asks from the namespace of the datapath
		if s.dp != nil {
			if err := s.dp.close(!s.inKernel(a.set)); err != nil {
				s.log.Warn("let go of the datapath before", "err", err)
			}
			s.dp = nil
		}
		if s.cgroup != 0 && s.cgroup != w.CgroupID && s.n.host != nil {
			// One that was made anew has another number, and this one may be somebody else's soon.
			if err := s.n.host.UnwatchCgroup(s.cgroup); err != nil {
				s.log.Warn("leave a control group", "err", err)
			}
		}
		if s.dp, err = s.datapath(ns, w, a); err != nil {
			return err
		}
		s.netns, s.cgroup = id.Ino, w.CgroupID
	}
	a.dp, a.journal, a.from = s.dp, s.j, a.set
	set := *a.set
	a.set = &set
	if ns == nil {
		s.unprobe()
	} else if set.ready, err = s.probe(a.proc, set.probe); err != nil {
		return err
	}
	if _, err := s.incarnate(s.n.ctx, a); err != nil { // a drain outlives this seat's configuration
		return err
	}
	s.exited, s.over = false, false
	if fresh {
		s.unproven, s.settle = true, time.After(settleFor)
	}
	if err := s.life().b.refresh(ctx); err != nil && !errors.Is(err, probes.ErrGone) {
		s.log.Warn("look for listeners", "err", err)
	}
	s.n.changed(s.service)
	return nil
}

// inKernel tells whether the backend is counted in the kernel.
func (s *seat) inKernel(set *settings) bool { return set.mode != drain.ModeOff && s.n.host != nil }

// datapath counts in the kernel where that can be, else by walks.
func (s *seat) datapath(ns *os.File, w discovery.Workload, a arrival) (datapath, error) {
	if !s.inKernel(a.set) {
		var why []string
		if a.set.mode != drain.ModeOff {
			why = []string{"no kernel datapath, so admission cannot close and a zero is believed only after a pause: " + s.n.hostErr.Error() + "; see `ebb check`"}
		}
		d, err := newWalkDatapath(ns, why...)
		if err != nil {
			return nil, err
		}
		return d, nil
	}
	port, cgroup := s.match.Port, w.CgroupID
	var id uint64
	if ns != nil {
		var err error
		if id, err = bpf.NetNSID(int(ns.Fd())); err != nil {
			return nil, err
		}
	}
	k, err := newKernelDatapath(kernelOptions{
		BPF: s.n.bpf, Host: s.n.host, Ring: s.n.ring, NetNS: ns, ID: s.id, Gen: a.gen, Enforce: a.set.mode == drain.ModeEnforce,
		Only: a.set.cov.ports, Adopt: true, PIDs: a.proc.descendants, Log: s.log,
		Watch: func(h *bpf.Host, watch bpf.Watch) error {
			var errs []error
			if cgroup != 0 {
				errs = append(errs, h.WatchCgroup(cgroup, watch))
			}
			if port != 0 && ns != nil {
				errs = append(errs, h.WatchPort(id, port, watch))
			}
			return errors.Join(errs...)
		},
	})
	if err != nil {
		return nil, err // and no datapath that is a nil pointer
	}
	return k, nil
}

// asking is a probe of one process that runs.
type asking struct {
	probe *health.Probe
	proc  *process
	*health.Checker
	stop func()
}

// probe has the process asked whether it is ready, from inside its namespace, and returns what it last said. One that asks the
// same already goes on: what it has found out stays. Without a probe it returns nil.
func (s *seat) probe(p *process, probe *health.Probe) (ready func(context.Context) error, err error) {
	if s.asks != nil && s.asks.proc == p && reflect.DeepEqual(s.asks.probe, probe) {
		return s.asks.ready, nil
	}
	s.unprobe()
	if probe == nil {
		return nil, nil
	}
	// The descriptor of the datapath stays open until unprobe.
	c, err := health.New(health.Options{
		Probe: *probe, NetNS: s.dp.spaces()[0].fd, Log: s.log,
		Paused: s.draining, // its connections would keep the drain from being quiet
	})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(s.n.ctx)
	var wg sync.WaitGroup
	s.asks = &asking{probe: probe, proc: p, Checker: c, stop: func() { cancel(); wg.Wait() }}
	wg.Go(func() {
		if err := c.Run(ctx); err != nil && ctx.Err() == nil {
			s.log.Error("probe the application", "err", err)
		}
	})
	wg.Go(func() {
		for {
			select {
			case <-c.Changed():
				s.n.changed(s.service)
			case <-ctx.Done():
				return
			}
		}
	})
	return s.asks.ready, nil
}

// unprobe ends probe.
func (s *seat) unprobe() {
	if s.asks != nil {
		s.asks.stop()
		s.asks = nil
	}
}

// ready is nil if the last answers were good.
func (a *asking) ready(context.Context) error {
	st := a.State()
	switch {
	case st.Ready:
		return nil
	case !st.Known && st.Err == nil:
		return errUnprobed
	case !st.Known:
		return fmt.Errorf("%w: %w", errUnprobed, st.Err)
	}
	return cmp.Or(st.Err, errNotReadyYet)
}

// errUnprobed says that too few answers have come to tell whether a backend is ready.
var errUnprobed = errors.New("its probe has not told yet")

// errNotReadyYet says that answers are good again, but too few in a row.
var errNotReadyYet = errors.New("its probe has too few good answers in a row yet")

// adjust makes a changed configuration the present one, unless a drain runs: that keeps what it began with.
func (s *seat) adjust(ctx context.Context) {
	inc := s.life()
	if inc.draining() || s.over || inc.from == s.set {
		return
	}
	if inc.b == nil {
		s.current.Store(&incarnation{gen: inc.gen, set: s.set, absent: inc.absent, unknown: inc.unknown})
		return
	}
	s.anew(ctx, inc)
}

// anew makes the process that is there the present incarnation once more, under the present configuration.
func (s *seat) anew(ctx context.Context, inc *incarnation) {
	inc.end("")
	if err := s.enter(ctx, inc.proc.workload, arrival{gen: inc.gen, set: s.set, proc: inc.proc}); err != nil && ctx.Err() == nil {
		s.vacate(inc, "", true)
		s.fail("the configuration cannot be put in force: " + err.Error())
		s.n.poke()
	}
}

// vacate makes an incarnation that has been ended one without a process.
func (s *seat) vacate(inc *incarnation, why string, unknown bool) {
	next := &incarnation{gen: inc.gen, set: s.set, absent: why, unknown: unknown}
	if st := inc.machine.Status(); st.ID == "" {
		next.lost = st.State == drain.StateLost
	}
	s.current.Store(next)
	s.closeProcess(inc.proc)
}

// lateOptions is member.late.
func (s *seat) lateOptions(set *settings, _ datapath) lateOptions {
	o := lateOptions{name: s.name, relay: agentRelay(s.name), service: s.service, runDir: s.n.o.RunDir, sock: s.n.conf().API.Socket, health: set.health}
	o.park = proxy.ParkOptions{Max: set.holdMax, For: set.holdFor}
	for _, p := range set.peers {
		o.peers = append(o.peers, Peer{Address: p})
	}
	o.siblings = func(ctx context.Context, sp *space) ([]sibling, []string) { return s.n.siblings(ctx, s, sp) }
	if set.eff.Policy.Idle == drain.IdleClose {
		o.retire = relayRetireAfter
	}
	return o
}

// stop ends what tend began, after it has returned. With remove nothing is left of the backend; without, all goes on in the
// kernel for the next owner.
func (s *seat) stop(remove bool) error {
	<-s.gone
	inc := s.life()
	var errs []error
	if inc.b != nil {
		if remove {
			ctx, cancel := context.WithTimeout(context.Background(), concludeFor)
			defer cancel()
			if inc.draining() {
				// Nobody waits for it any more. After the flush it comes to its end by itself.
				_, err := inc.machine.Undrain(ctx, inc.gen, "the configuration, which names it no more")
				switch {
				case errors.Is(err, drain.ErrFlushing):
					select {
					case <-inc.machine.Done():
					case <-s.n.ctx.Done(): // the next owner finds it
					}
				case err != nil && !errors.Is(err, drain.ErrNotDraining):
					errs = append(errs, err)
				}
			}
			inc.b.late.close()
			inc.end(api.EndTransient)
		} else {
			inc.b.late.leave()
			inc.end(api.EndRestarting)
		}
		errs = append(errs, inc.proc.close())
	}
	s.unprobe()
	s.n.unclaim(s)
	switch {
	case s.dp != nil:
		errs = append(errs, s.dp.close(remove))
	case remove:
		errs = append(errs, s.n.forget(s.id)) // of an owner before us
	}
	errs = append(errs, s.j.close())
	if remove {
		errs = append(errs, os.Remove(s.j.path), removeIfThere(s.sessions))
	}
	return errors.Join(errs...)
}

// siblings are the other backends of the service that are ready and listen in the namespace. Those that serve elsewhere on
// this host are peers where they can be dialled.
func (n *node) siblings(ctx context.Context, s *seat, sp *space) (sibs []sibling, why []string) {
	for _, o := range n.seatsOf(s.service) {
		inc := o.life()
		if o == s {
			continue
		}
		if err := inc.serves(ctx, o.name); err != nil {
			why = append(why, err.Error())
			continue
		}
		ls, err := inc.held(sp)
		if err != nil {
			why = append(why, o.name+" cannot be looked at: "+err.Error())
			continue
		}
		if len(ls) == 0 {
			why = append(why, o.name+" does not listen in this network namespace")
			continue
		}
		sibs = append(sibs, sibling{o.name, ls})
	}
	return sibs, why
}

// configure gives a seat that stays what the configuration says now, if that is something else.
func (s *seat) configure(sv config.Service, b config.Backend) {
	set := settingsOf(sv, b)
	if reflect.DeepEqual(s.configured, set) {
		return
	}
	s.configured = set
	put(s.confs, set)
}

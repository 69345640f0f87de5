// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/signal"
	"path"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/bpf"
	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/config"
	"github.com/ebbproxy/ebb/internal/discovery"
	"github.com/ebbproxy/ebb/internal/lease"
	"github.com/ebbproxy/ebb/internal/metrics"
	"github.com/ebbproxy/ebb/internal/systemd"
	"github.com/ebbproxy/ebb/probes"
)

// Events of the agent itself; they have no backend.
const (
	// EventAgent says that the agent has started, taken over, reloaded its configuration or gives up what it owns.
	EventAgent = "agent"
	// EventService says what has become of the addresses of a service: whom they are steered to, or why they are not.
	EventService = "service"
)

// AgentOptions say how `ebb agent` works. The zero value of a field is the documented default.
type AgentOptions struct {
	Config   *config.Config
	Reload   func() (*config.Config, error) // reads the configuration again
	Standby  bool                           // wait until the owner of this host goes
	Datapath string                         // auto (default), bpf, none
	RunDir   string                         // where relays and runs are
	Version  string
	Commit   string
	Log      *slog.Logger
}

// node is one `ebb agent`: the backends of this host that a configuration names.
type node struct {
	o       AgentOptions
	log     *slog.Logger
	started time.Time
	bpf     bpf.Options
	host    *bpf.Host // nil: this host has no kernel datapath
	hostErr error     // why
	ring    *ring     // of host
	events  *api.Log
	metrics *metrics.Metrics
	lease   atomic.Pointer[lease.Lease]
	moved   atomic.Pointer[time.Time] // when the goroutine of run last went on
	// A look was asked for by a process of no backend, less than lookAtAll ago.
	askedFor atomic.Bool
	heard    atomic.Pointer[time.Time] // when the front of applications last spoke; nil: never
	here     atomic.Bool               // this process answers applications itself
	watcher  *discovery.Watcher
	snap     discovery.Snapshot // of look
	pokes    chan struct{}      // a look at the host is due
	room     chan struct{}      // the configuration is to be applied again: one that left has gone, or something was in the way
	audits   chan struct{}      // those of routine that run
	turns    chan struct{}      // of capacity 1: a backend may have become ready, or shown its version
	ctx      context.Context
	wg       sync.WaitGroup

	// Of apply alone.
	unsteered string      // why a service is not steered
	again     *time.Timer // until what could not be put in force is tried again

	claims   claims
	mu       sync.Mutex
	cfg      *config.Config
	seats    []*seat            // in the order of the configuration
	broken   map[string]*member // backends whose seat cannot be made at present
	ends     map[*seat]context.CancelFunc
	leaving  map[string]bool // names of backends that are configured no more, and not gone yet
	services map[string]*serviceSeat
	last     *glance // at all backends, and when that was
	lastAt   time.Time
}

// RunAgent owns the backends of this host until SIGTERM or the end of ctx, and then leaves everything in place for the next
// owner.
func RunAgent(ctx context.Context, o AgentOptions) error {
	sigs := make(chan os.Signal, 8)
	signal.Notify(sigs, unix.SIGTERM, unix.SIGINT, unix.SIGHUP) // to the end of the process, as in catchSignals
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	n := &node{
		o: o, log: o.Log, cfg: o.Config, pokes: make(chan struct{}, 1), room: make(chan struct{}, 1), audits: make(chan struct{}, 2), turns: make(chan struct{}, 1), leaving: map[string]bool{}, broken: map[string]*member{},
		ends: map[*seat]context.CancelFunc{}, services: map[string]*serviceSeat{},
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	for _, d := range []string{"backends", "lease", "services", "reports", "sessions"} {
		if err := os.MkdirAll(filepath.Join(o.Config.State.Dir, d), 0o700); err != nil {
			return fmt.Errorf("make the state directory: %w", err)
		}
	}
	if err := api.MakeRunDir(o.RunDir, os.Getuid()); err != nil {
		return err
	}
	n.goesOn()
	keeping, stop := context.WithCancel(context.WithoutCancel(ctx))
	var kept sync.WaitGroup
	kept.Go(func() { n.keep(keeping, cancel) })
	ok, err := n.own(ctx, sigs)
	if ok {
		err = n.run(ctx, sigs)
	}
	stop()
	kept.Wait()
	if l := n.lease.Load(); l != nil {
		err = errors.Join(err, l.Release())
	}
	if lost := context.Cause(ctx); errors.Is(lost, lease.ErrLost) {
		err = errors.Join(lost, err)
	}
	return err
}

// stuckAfter is by when every step of the agent's own goroutine is over, even where all that it asks hangs: the longest is the
// reading of a configuration, which may take 30 s.
const stuckAfter = 45 * time.Second

// goesOn says that the goroutine that owns the backends is not stuck. It is called at least once a step.
func (n *node) goesOn() { n.moved.Store(new(time.Now())) }

// keep renews the lease and answers systemd's watchdog until ctx ends, as long as the goroutine that owns the backends goes on.
// That one cannot do it itself: what it has to wait for may take longer than a standby is patient. lost is called if the lease is.
func (n *node) keep(ctx context.Context, lost context.CancelCauseFunc) {
	tick := time.NewTicker(lease.RenewEvery)
	defer tick.Stop()
	stuck := false
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if still := time.Since(*n.moved.Load()); still > stuckAfter {
			if !stuck {
				n.log.Error("the agent is stuck and renews its lease no more: a standby takes over", "for", still.String())
			}
			stuck = true
			continue
		}
		stuck = false
		n.tell(systemd.Watchdog)
		l := n.lease.Load()
		if l == nil {
			continue // another one owns the host still
		}
		if err := l.Renew(); errors.Is(err, lease.ErrLost) {
			lost(fmt.Errorf("another agent may own this host now: %w", err))
			return
		} else if err != nil {
			n.log.Error("renew the lease: a standby takes over if this goes on", "err", err)
		}
	}
}

// own waits for the lease. ok is false if a stop was asked for meanwhile.
func (n *node) own(ctx context.Context, sigs <-chan os.Signal) (ok bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	got := make(chan error, 1)
	go func() {
		l, err := lease.Acquire(ctx, filepath.Join(n.conf().State.Dir, "lease", "owner"), lease.Options{Standby: n.o.Standby, Log: n.log})
		if l != nil {
			n.lease.Store(l) // it is to be renewed from now on, whatever the goroutine of own is in the middle of
		}
		got <- err
	}()
	if n.o.Standby {
		n.tell(systemd.Ready, systemd.Status("standing by"))
	}
	alive := time.NewTicker(lease.RenewEvery)
	defer alive.Stop()
	for {
		select {
		case <-alive.C:
			n.goesOn()
		case err := <-got:
			return err == nil, err
		case s := <-sigs:
			if s == unix.SIGHUP {
				n.reload()
				continue
			}
			cancel()
			<-got
			return false, nil
		}
	}
}

// tell informs systemd.
func (n *node) tell(states ...string) {
	if err := systemd.Notify(states...); err != nil {
		n.log.Warn("tell systemd", "err", err)
	}
}

// ready tells systemd that the agent is at work, and what on.
func (n *node) ready() {
	n.tell(systemd.Ready, systemd.Status(fmt.Sprintf("%d backends", len(n.roster()()))))
}

func (n *node) conf() *config.Config {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.cfg
}

func (n *node) run(ctx context.Context, sigs <-chan os.Signal) (err error) {
	n.started = time.Now()
	var cancel context.CancelFunc
	n.ctx, cancel = context.WithCancel(ctx)
	defer cancel()
	cfg := n.conf()
	// Numbers go on growing from one owner to the next, whatever became of the one before.
	n.events = api.NewLog(api.LogOptions{First: uint64(n.started.UnixMicro())})
	if n.metrics, err = metrics.New(metrics.Options{Source: n.roster(), Version: n.o.Version, Commit: n.o.Commit, Retain: cfg.Defaults.Retain}); err != nil {
		return err
	}
	n.bpf = bpf.Options{Dir: cfg.State.BPFFS, Log: n.log}
	n.hostErr = errors.New("--datapath none is set")
	if n.o.Datapath != "none" {
		if n.host, n.hostErr = bpf.Install(n.bpf); n.hostErr != nil {
			if n.o.Datapath == "bpf" {
				return fmt.Errorf("use the kernel datapath: %w (see `ebb check`)", n.hostErr)
			}
			n.log.Warn("no kernel datapath: counts come from walks, and admission cannot close", "err", n.hostErr)
		}
	}
	if n.host != nil {
		defer func() { err = errors.Join(err, n.host.Close()) }()
		lock, err := n.alone(ctx)
		if err != nil {
			return err
		}
		defer lock.Close()
		if n.ring, err = openRing(n.host, n.log); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, n.ring.close()) }()
	}
	n.metrics.SetFeature("admission", n.host != nil && n.host.HasAdmission())
	n.metrics.SetFeature("census", n.host != nil)
	if n.watcher, err = discovery.Watch(n.ctx, discovery.Options{}); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.watcher.Close()) }()
	lns, later, err := n.bind(n.ctx)
	if err != nil {
		return err
	}
	if err := n.orphans(cfg); err != nil {
		n.log.Warn("remove what an earlier agent has left", "err", err)
	}
	n.apply(cfg)
	n.look()
	n.settle()
	stopAPI, err := n.serve(lns, later)
	if err != nil {
		return err
	}
	n.wg.Go(func() { n.follow() })
	n.wg.Go(func() { n.upgrade(n.ctx) })
	n.emit(drain.Event{Type: EventAgent, Message: fmt.Sprintf("owns the %d backends of this host", len(n.roster()()))})
	for _, why := range n.watcher.Degraded() {
		n.emit(drain.Event{Type: EventDegraded, Message: why})
	}
	n.ready()

	err = n.loop(sigs)

	n.tell(systemd.Stopping)
	n.emit(drain.Event{Type: EventAgent, Message: "gives up what it owns; rules, counts and deadlines stay for the next owner"})
	cancel()
	n.mu.Lock()
	seats := n.seats
	n.mu.Unlock()
	errs := []error{err}
	for _, s := range seats {
		n.goesOn()
		errs = append(errs, s.stop(false))
	}
	stopAPI()
	n.wg.Wait()
	return errors.Join(errs...)
}

// alone makes this agent the only one of its installation: another, with a state.dir of its own, would have the same backends
// there. One that was killed may be on its way out still.
func (n *node) alone(ctx context.Context) (*os.File, error) {
	for until := time.Now().Add(letGoFor); ; {
		lock, err := lease.Lock(n.bpf.Dir)
		if !errors.Is(err, lease.ErrHeld) {
			return lock, err
		}
		if time.Now().After(until) || !wait(ctx, 10*time.Millisecond) {
			return nil, fmt.Errorf("another agent works with this installation: %w: stop it, or give this one its state.dir to follow it, or a state.bpffs of its own", err)
		}
	}
}

// settle waits until each backend's first look was taken in, so that nobody is told of one that it has no process.
func (n *node) settle() {
	late := time.NewTimer(startFor)
	defer late.Stop()
	n.mu.Lock()
	seats := slices.Clone(n.seats)
	n.mu.Unlock()
	for len(seats) > 0 {
		select {
		case <-seats[0].looked:
			seats = seats[1:]
		case <-late.C:
			return
		case <-n.ctx.Done():
			return
		}
	}
}

// A look costs a walk of /proc. What backends tell is looked at soon; that somewhere a process has started or ended, which on
// some hosts is always so, less often.
const (
	lookEvery = 50 * time.Millisecond
	lookAtAll = 500 * time.Millisecond
	lookSlow  = 30 * time.Second // whatever is heard
)

// startFor is by when the start is over, also of an agent of hundreds of backends.
const startFor = 10 * time.Second

// loop lives until a stop.
func (n *node) loop(sigs <-chan os.Signal) error {
	alive := time.NewTicker(lease.RenewEvery)
	defer alive.Stop()
	every := time.NewTicker(lookSlow)
	defer every.Stop()
	// Much is read and little is kept: with the usual half of the heap for what is not needed any more 200 idle backends take
	// 55 MiB, with a third 42.
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(50)
	}
	// What the start has left is given back; from now on little is needed.
	defer time.AfterFunc(startFor, debug.FreeOSMemory).Stop()
	var calm <-chan time.Time // until the next look at all
	changed := n.watcher.Changed()
	for {
		n.goesOn()
		select {
		case <-alive.C:
		case <-changed:
			n.glance()
			if !n.missing() {
				continue // whoever starts or ends is nobody we wait for
			}
			n.look()
			changed, calm = nil, time.After(lookAtAll)
		case <-every.C:
			if n.missing() { // the end of those that are there is heard of in any case
				n.look()
			}
		case <-calm:
			changed, calm = n.watcher.Changed(), nil
		case <-n.pokes:
			n.look()
			wait(n.ctx, lookEvery)
		case <-n.room:
			n.apply(n.conf())
			n.look()
		case s := <-sigs:
			if s != unix.SIGHUP {
				return nil
			}
			n.tell(systemd.Reloading)
			n.reload()
			n.look()
			n.ready()
		case <-n.ctx.Done():
			return nil
		}
	}
}

// poke asks for a look at the host.
func (n *node) poke() {
	select {
	case n.pokes <- struct{}{}:
	default:
	}
}

// recent is a glance at all backends of the last second.
func (n *node) recent() *glance {
	n.mu.Lock()
	defer n.mu.Unlock()
	if now := time.Now(); now.Sub(n.lastAt) > time.Second {
		n.last, n.lastAt = &glance{}, now
	}
	return n.last
}

// missing tells whether a backend has no process.
func (n *node) missing() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.ContainsFunc(n.seats, func(s *seat) bool {
		p := s.life().proc
		if p == nil {
			return true
		}
		select {
		case <-p.exited():
			return true
		default:
			return false
		}
	})
}

// look finds out what each backend's processes are.
func (n *node) look() {
	n.mu.Lock()
	seats := slices.Clone(n.seats)
	n.mu.Unlock()
	if len(seats) == 0 {
		return
	}
	if err := n.snap.Scan(n.ctx); err != nil {
		if n.ctx.Err() == nil {
			n.log.Error("look at the processes of this host", "err", err)
		}
		return
	}
	var found []discovery.Workload
	for _, s := range seats {
		n.goesOn()
		w, err := n.snap.Find(n.ctx, s.match)
		if err == nil {
			found = append(found, w)
		}
		put(s.finds, find{w, err})
	}
	n.watcher.Follow(found...)
}

// reload puts a changed configuration in force. What is wrong with it changes nothing.
func (n *node) reload() {
	cfg, err := n.o.Reload()
	n.goesOn()
	if err == nil {
		err = n.reloadable(cfg)
	}
	if err != nil {
		n.log.Error("the configuration stays as it was", "err", err)
		n.emit(drain.Event{Type: EventAgent, Message: "the configuration stays as it was: " + err.Error()})
		return
	}
	changes := config.Diff(n.conf(), cfg).String()
	n.log.Info("configuration reloaded", "changes", changes)
	n.emit(drain.Event{Type: EventAgent, Message: "reloaded its configuration, which changes " + changes})
	if n.events != nil {
		n.apply(cfg)
		return
	}
	// Another one owns the host still.
	n.mu.Lock()
	n.cfg = cfg
	n.mu.Unlock()
}

// reloadable refuses a configuration that only a start can put in force.
func (n *node) reloadable(cfg *config.Config) error {
	if keys := config.Diff(n.conf(), cfg).Restart; len(keys) > 0 {
		return fmt.Errorf("%s: read at the start alone; restart the agent to change it, which cuts nothing", strings.Join(keys, ", "))
	}
	return nil
}

// applyEvery is how often what could not be put in force is tried again.
const applyEvery = 5 * time.Second

// apply makes the seats those of the configuration: what is unchanged is not touched. What cannot be made keeps nothing else
// from it: it is told, shown as unknown, and tried again.
func (n *node) apply(cfg *config.Config) {
	n.mu.Lock()
	have := map[string]*seat{}
	for _, s := range n.seats {
		have[s.name] = s
	}
	was := n.broken
	n.mu.Unlock()
	var seats, fresh []*seat
	broken := map[string]*member{}
	for _, sv := range cfg.Services {
		for _, b := range sv.Backends {
			if b.Match == nil {
				continue // a peer of the others: see settingsOf
			}
			s := have[b.Name]
			if s != nil && s.service == sv.Name && s.match == *b.Match {
				delete(have, b.Name)
				seats = append(seats, s)
				s.configure(sv, b)
				continue
			}
			n.mu.Lock()
			leaving := n.leaving[b.Name]
			n.mu.Unlock()
			if s != nil || leaving {
				continue // the same name for something else: what was has to go first, and then we come again
			}
			n.goesOn()
			s, err := n.newSeat(sv, b)
			if err != nil {
				broken[b.Name] = n.unseated(sv, b, err, was[b.Name])
				continue
			}
			seats, fresh = append(seats, s), append(fresh, s)
		}
	}
	again := len(broken) > 0
	if len(fresh) > 0 {
		if err := syncDir(filepath.Join(cfg.State.Dir, "backends")); err != nil {
			n.degraded("the journals of new backends may not outlive a power failure: " + err.Error())
		}
	}
	n.mu.Lock()
	n.cfg, n.seats, n.broken = cfg, seats, broken
	n.mu.Unlock()
	for _, s := range have {
		n.remove(s)
	}
	for _, s := range fresh {
		ctx, cancel := context.WithCancel(n.ctx)
		n.mu.Lock()
		n.ends[s] = cancel
		n.mu.Unlock()
		go s.tend(ctx)
	}
	unsteered := ""
	if err := n.steerServices(cfg); err != nil {
		unsteered, again = err.Error(), true
		if unsteered != n.unsteered {
			n.degraded(unsteered)
		}
	}
	n.unsteered = unsteered
	if n.again != nil {
		n.again.Stop()
	}
	if again {
		n.again = time.AfterFunc(applyEvery, n.makeRoom)
	}
}

// unseated stands for a backend that cannot be made. before is the one of the last try, if that failed too: what is the same
// still is not told again.
func (n *node) unseated(sv config.Service, b config.Backend, err error, before *member) *member {
	why := "it cannot be looked after: " + err.Error()
	m := &member{
		wg:   &n.wg,
		name: b.Name, service: sv.Name, unit: b.Match.Unit, id: agentBackendID(b.Name), started: n.started, log: n.log, events: n.events, metrics: n.metrics,
		drains: n.recall(b.Name),
	}
	m.current.Store(&incarnation{set: settingsOf(sv, b), absent: why, unknown: true})
	if before == nil || before.life().absent != why {
		n.metrics.Register(sv.Name, b.Name)
		m.degraded(why)
	}
	return m
}

// degraded tells what the agent itself cannot do.
func (n *node) degraded(msg string) {
	n.log.Warn("degraded", "why", msg)
	n.emit(drain.Event{Type: EventDegraded, Message: msg})
}

// makeRoom has the configuration applied again.
func (n *node) makeRoom() {
	select {
	case n.room <- struct{}{}:
	default:
	}
}

// remove ends a backend that is configured no more, beside us: what it is in the middle of may take a while.
func (n *node) remove(s *seat) {
	n.log.Info("backend is configured no more", "backend", s.name)
	n.mu.Lock()
	cancel := n.ends[s]
	delete(n.ends, s)
	n.leaving[s.name] = true
	n.mu.Unlock()
	cancel()
	n.wg.Go(func() {
		if err := s.stop(true); err != nil {
			n.log.Warn("end a backend", "backend", s.name, "err", err)
		}
		n.mu.Lock()
		delete(n.leaving, s.name)
		n.mu.Unlock()
		n.makeRoom()
	})
}

// roster is what the API shows.
func (n *node) roster() roster {
	return func() []*member {
		n.mu.Lock()
		defer n.mu.Unlock()
		ms := make([]*member, 0, len(n.seats)+len(n.broken))
		for _, s := range n.seats {
			ms = append(ms, s.member)
		}
		for _, name := range slices.Sorted(maps.Keys(n.broken)) {
			ms = append(ms, n.broken[name])
		}
		return ms
	}
}

func (n *node) seatsOf(service string) []*seat {
	n.mu.Lock()
	defer n.mu.Unlock()
	var out []*seat
	for _, s := range n.seats {
		if s.service == service {
			out = append(out, s)
		}
	}
	return out
}

// owns is the backend that a process belongs to. A process of none may be one that we are waiting for.
func (n *node) owns(_ context.Context, pid int) (string, bool) {
	name, ok := n.ownerOf(pid)
	if !ok && n.missing() && n.askedFor.CompareAndSwap(false, true) {
		n.poke()
		time.AfterFunc(lookAtAll, func() { n.askedFor.Store(false) })
	}
	return name, ok
}

// ownerOf is asked before each request of an application, and so does not look at all processes of a backend but at the
// ancestors of this one.
func (n *node) ownerOf(pid int) (string, bool) {
	mains, groups := map[int]string{}, map[string]string{}
	n.mu.Lock()
	for _, s := range n.seats {
		if p := s.life().proc; p != nil && p.lives() {
			mains[p.pid] = s.name
			if g := p.workload.CgroupPath; g != "" {
				groups[g] = s.name
			}
		}
	}
	n.mu.Unlock()
	if len(groups) > 0 {
		group, err := discovery.CgroupOf(pid)
		for err == nil && len(group) > 1 {
			if name, ok := groups[group]; ok {
				return name, true
			}
			group = path.Dir(group)
		}
	}
	for pid > 1 {
		if name, ok := mains[pid]; ok {
			return name, true
		}
		var err error
		if pid, err = probes.Parent(pid); err != nil {
			return "", false
		}
	}
	return "", false
}

func (n *node) emit(e drain.Event) {
	e.Time = time.Now()
	if n.events != nil {
		n.events.Publish(e)
	}
}

// follow reads the events to their end and accounts for each where it belongs.
func (n *node) follow() {
	sub := n.events.Subscribe(1)
	for {
		e, err := sub.Next(context.WithoutCancel(n.ctx))
		if err != nil {
			return // the log is closed and read
		}
		for _, m := range n.roster()() {
			if m.name == e.Backend {
				m.account(n.ctx, e)
			}
		}
		if e.Type == drain.EventBegin {
			n.changed(e.Service) // others take what is new from now on
		}
	}
}

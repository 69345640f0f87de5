// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/bpf"
	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/probes"
)

// incarnation is one process of a backend under its own generation, with its drain. It is never changed, only replaced.
type incarnation struct {
	gen     uint64
	set     *settings
	from    *settings // what set was made of; the same where nothing was added
	proc    *process
	b       *backend // nil while there is no process
	machine *drain.Machine
	absent  string // why there is none
	lost    bool   // the last one has crashed
	unknown bool   // whether there is one, and what it has open, is not known

	ctx    context.Context    // until end
	cancel context.CancelFunc // ends the goroutines of wg
	wg     sync.WaitGroup
}

// arrival is a process that is to be the present incarnation.
type arrival struct {
	gen     uint64
	set     *settings
	from    *settings // nil: set itself
	proc    *process
	argv    []string
	dp      datapath
	journal *journal
	past    history
	adopted bool                          // an earlier owner had it already
	over    *drain.Record                 // its drain is over, and it lives on; nil: it serves, or drains
	aside   []func(context.Context) error // what runs beside it until it ends
}

// incarnate makes the backend and the drain of a process that has just been started, found or adopted the present ones.
func (m *member) incarnate(ctx context.Context, a arrival) (*incarnation, error) {
	inc := &incarnation{gen: a.gen, set: a.set, from: cmp.Or(a.from, a.set), proc: a.proc}
	ctx, inc.cancel = context.WithCancel(ctx)
	inc.ctx = ctx
	inc.wg.Go(func() { a.proc.watch(ctx) })
	before := m.life().b
	if !a.adopted && (before == nil || before.proc != a.proc) {
		if err := a.journal.restart(run{Version: journalVersion, Type: "run", Name: m.name, Gen: a.gen, Backend: m.id, PID: a.proc.pid, Start: a.proc.start, BootID: bootID(), Argv: a.argv, Match: m.matched}); err != nil {
			m.log.Warn("journal run: a restart could not adopt the process", "err", err)
		}
	}
	bk, err := m.openBook(a, before)
	if err != nil {
		inc.end("")
		return nil, err
	}
	inc.b = m.backend(a, bk)
	switch {
	case before != nil:
		inc.b.succeed(before)
		before.late.handOver(inc.b.late)
	case !a.adopted:
		inc.b.late.keep.inherit(ctx)
	}
	if err := a.dp.watch(ctx, a.proc); err != nil && ctx.Err() == nil && !errors.Is(err, unix.ESRCH) { // ESRCH: it has ended at once
		m.degraded("its listeners cannot be followed: " + err.Error())
	}
	if a.adopted {
		inc.b.late.resume(ctx, a.past.late)
		if a.past.openDrain == nil {
			inc.b.late.keep.resume()
		}
	}
	if a.adopted && a.past.openDrain != nil {
		inc.b.begun() // what came before us is in nobody's numbers any more
	}
	o := drain.Options{
		Backend: m.name, Service: m.service, Gen: a.gen, Mode: a.set.mode, Unguarded: !a.dp.guarded(),
		World: inc.b, Log: m.log, Boot: bpf.BootNow, Notify: !a.set.notify.IsZero() && !a.set.notify.API,
	}
	if a.adopted {
		o.Resume, o.Over = a.past.openDrain, a.over
	}
	inc.b.ready.Store(a.over == nil)
	if inc.machine, err = drain.New(o); err != nil {
		inc.end(api.EndTransient)
		return nil, err
	}
	bk.machine.Store(inc.machine)
	inc.machine.SetHolds(bk.Holds()) // before the machine can find that there is nothing to wait for
	inc.wg.Go(func() { m.attend(ctx, inc) })
	inc.wg.Go(func() {
		if err := bk.Run(ctx); err != nil && ctx.Err() == nil {
			m.log.Error("look after the sessions", "err", err)
		}
	})
	inc.wg.Go(func() {
		if err := inc.machine.Run(ctx); err != nil && ctx.Err() == nil {
			m.log.Error("drain machine", "err", err)
		}
	})
	for _, f := range a.aside {
		inc.wg.Go(func() {
			if err := f(ctx); err != nil && ctx.Err() == nil {
				m.log.Error("look after the application", "err", err)
			}
		})
	}
	m.current.Store(inc)
	if a.past.openDrain == nil {
		inc.b.late.keep.begin()
	}
	return inc, nil
}

func (m *member) backend(a arrival, bk *book) *backend {
	policy := a.set.eff.Policy
	b := &backend{
		name: m.name, service: m.service, cov: a.set.cov,
		notify: a.set.notify, flush: a.set.flush, enforce: a.set.mode == drain.ModeEnforce, book: bk, proc: a.proc, dp: a.dp, journal: a.journal, cookies: &cookieWatch{pid: a.proc.pid},
		log: m.log.With("backend", m.name, "gen", a.gen), emit: m.emit, boot: bpf.BootNow, metrics: m.metrics, flipped: m.flipped,
		covered: map[uint64]listener{}, why: map[uint64]string{}, mustSee: a.adopted,
		cls:  probes.NewClassifier(probes.ClassifierOptions{Protocol: string(policy.Protocol), IdleAfter: policy.IdleAfter}),
		held: map[uint64]*probes.Held{},
	}
	b.ready.Store(true)
	b.late = newLate(b, m.late(a.set, a.dp))
	return b
}

// held are the covered listeners in a namespace that its processes hold. It reads the descriptors of all of them.
func (i *incarnation) held(sp *space) ([]probes.Listener, error) {
	covered := i.b.coveredMap()
	ls, err := probes.Listeners(sp.diag, i.proc.descendants())
	return slices.DeleteFunc(ls, func(l probes.Listener) bool { _, ok := covered[l.Cookie]; return !ok }), err
}

func (i *incarnation) draining() bool {
	if i.machine == nil {
		return false
	}
	s := i.machine.Status()
	return s.State == drain.StateDraining || s.State == drain.StateFlushing
}

// end ends what belongs to this incarnation alone. The process is left as it is. why is what its sessions are told; empty: they
// go on, for the next incarnation of the same process.
func (i *incarnation) end(why string) {
	if i.cancel == nil {
		return
	}
	i.cancel()
	i.wg.Wait()
	if why == "" || i.b == nil {
		return
	}
	if i.machine != nil {
		i.b.book.Follow(i.machine.Status()) // the last that there is to say of its drain
	}
	i.b.book.Close(why)
}

// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/hook"
	"github.com/ebbproxy/ebb/internal/metrics"
	"github.com/ebbproxy/ebb/probes"
)

// backend is one supervised CMD as its drain sees it: the drain.World of `ebb run`.
type backend struct {
	name, service string
	cov           coverage
	notify, flush hook.Hook
	enforce       bool // else the sessions are told nothing
	book          *book
	proc          *process
	dp            datapath
	journal       *journal
	cookies       *cookieWatch
	log           *slog.Logger
	emit          func(drain.Event)
	boot          func() time.Duration
	metrics       *metrics.Metrics
	late          *late
	flipped       func(context.Context) error // admission is closed, or late connections go elsewhere; nil: nobody cares

	ready    atomic.Bool
	told     atomic.Bool // CMD was sent its stop signal by somebody else
	flushing atomic.Bool // the flush is being delivered or waited for
	flushed  atomic.Bool // the flush signal has been sent: an exit from now on was asked for

	mu       sync.Mutex
	covered  map[uint64]listener // by cookie; stays until the last connection of a closed listener is gone
	aside    bool                // the covered ones are all on loopback
	why      map[uint64]string   // why a listener is not covered
	all      []listener
	goneSum  uint64 // connections accepted by listeners that were forgotten
	halfOpen map[*space]*probes.HalfOpen
	mustSee  bool   // after a restart the counts are checked against a walk before a zero is believed
	accepted uint64 // connections ever accepted, at the last census
	atBegin  uint64 // the same when the drain began
	refused  int64  // connections turned away before it began
	gone     bool   // nothing of the flip's half-open requests and queues is left
	refusing bool

	lookMu   sync.Mutex // classifier and last look
	cls      *probes.Classifier
	verdicts []probes.Verdict
	waitFrom time.Time // when retiring became allowed
	held     map[uint64]*probes.Held
}

// succeed takes over what is known of the same process by another configuration's backend, which is in use no more.
func (b *backend) succeed(before *backend) {
	if before.proc != b.proc || before.dp != b.dp {
		return
	}
	before.mu.Lock()
	defer before.mu.Unlock()
	b.covered, b.aside, b.why, b.all = before.covered, before.aside, before.why, before.all
	b.goneSum, b.mustSee, b.accepted, b.cookies = before.goneSum, before.mustSee, before.accepted, before.cookies
}

// refresh reads the listeners, decides which are covered and prepares those for the flip.
func (b *backend) refresh(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	ls, _, err := b.dp.listeners(ctx)
	if err != nil {
		return err
	}
	b.take(ls)
	return nil
}

// take replaces what is known of the listeners. The caller has held mu since before it listed them: a list that was made
// before another was taken would add a forgotten listener to goneSum again.
func (b *backend) take(ls []listener) {
	var live []listener
	for _, l := range ls {
		if l.live {
			live = append(live, l)
		}
	}
	why := b.cov.split(live)
	reasons := make(map[uint64]string, len(live))
	covered := make(map[uint64]listener, len(live))
	aside, n := true, 0
	for i, l := range live {
		reasons[l.cookie] = why[i]
		if why[i] != "" {
			continue
		}
		n++
		aside = aside && l.loopback()
		if _, ok := b.covered[l.cookie]; !ok {
			b.log.Info("listener found", "address", l.addr.String())
			b.emit(drain.Event{Type: EventListener, Message: "listening on " + l.addr.String(), Fields: map[string]any{"address": l.addr.String(), "mptcp": l.mptcp}})
			if err := b.dp.cover(l); err != nil {
				reasons[l.cookie] = err.Error()
				b.log.Warn("prepare listener", "address", l.addr.String(), "err", err)
			}
		}
		covered[l.cookie] = l
	}
	for _, l := range ls {
		if l.live {
			continue
		}
		// A closed listener's connections are still the backend's, also when it closed while nobody looked.
		_, was := b.covered[l.cookie]
		if !was {
			was = b.cov.split(append(slices.Clone(live), l))[len(live)] == ""
		}
		if l.open+l.ending+l.closing == 0 && b.dp.forget(l.cookie) {
			if was {
				b.goneSum += l.total
			}
			continue
		}
		if was {
			covered[l.cookie] = l
		}
	}
	if !b.late.redirecting() {
		b.dismiss(covered)
	} // else connections go elsewhere, also after the application has closed
	b.all, b.why, b.covered, b.aside = ls, reasons, covered, aside && n > 0
}

// dismiss takes away the rules of addresses on which nothing of ours listens any more. The caller holds mu.
func (b *backend) dismiss(now map[uint64]listener) {
	live := liveAddrs(now)
	for addr, l := range liveAddrs(b.covered) {
		if _, ok := live[addr]; !ok {
			b.dp.uncover(l)
		}
	}
}

func liveAddrs(m map[uint64]listener) map[netip.AddrPort]listener {
	addrs := make(map[netip.AddrPort]listener, len(m))
	for _, l := range m {
		if l.live {
			addrs[l.addr] = l
		}
	}
	return addrs
}

// listening lists the covered listeners that are open.
func (b *backend) listening() []listener {
	b.mu.Lock()
	defer b.mu.Unlock()
	var ls []listener
	for _, l := range b.covered {
		if l.live {
			ls = append(ls, l)
		}
	}
	return ls
}

func (b *backend) coveredMap() map[uint64]listener {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.covered // replaced, never changed
}

// census is the kernel's count over the covered listeners.
type census struct {
	open, ending, closing int64
	total                 uint64
	known                 bool
}

func (b *backend) census(ctx context.Context) (census, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	ls, known, err := b.dp.listeners(ctx)
	if err != nil {
		return census{}, err
	}
	b.take(ls)
	c := census{known: known && !b.mustSee, total: b.goneSum}
	for _, l := range b.covered {
		c.open += l.open
		c.ending += l.ending
		c.closing += l.closing
		c.total += l.total
	}
	b.accepted = c.total
	return c, nil
}

// Journal implements drain.World.
func (b *backend) Journal(r drain.Record) error {
	if r.Type == "flush" {
		// First, so that no work begins any more while the record is written. Each session is told once, over restarts too.
		left := min(r.Policy.FlushTimeout, time.Duration(r.CutBoot)-b.boot())
		err := b.book.Flush(drain.FlushRequest{Drain: r.Drain, Gen: r.Gen, Reason: r.FlushReason, TimeLeft: max(0, left)})
		if errors.Is(err, drain.ErrHeld) {
			return err
		}
		if err != nil {
			b.log.Error("tell the sessions to flush", "drain", r.Drain, "err", err)
		}
	}
	if err := b.journal.append(r); err != nil {
		return err
	}
	switch r.Type {
	case "begin":
		b.late.keep.yield()
		b.begun()
		b.mark(r)
	case "shorten", "extend":
		b.mark(r)
	}
	return nil
}

// SetReady implements drain.World.
func (b *backend) SetReady(ready bool) { b.ready.Store(ready) }

// Notify implements drain.World: it is the hook's. Sessions hear by attend.
func (b *backend) Notify(ctx context.Context, n drain.Notice) error {
	return b.tell(ctx, b.notify, hook.Message{Kind: hook.Notify, Drain: n.Drain, Gen: n.Gen, Cause: n.Cause, TimeLeft: time.Until(n.Deadline)})
}

// CloseAdmission implements drain.World.
func (b *backend) CloseAdmission(ctx context.Context, until time.Time) error {
	if err := b.refresh(ctx); err != nil {
		return err
	}
	if b.cookies.recent(time.Now()) {
		// The last ACK of a stateless handshake would be refused like a SYN: give those that are out time to come in.
		b.emit(drain.Event{Type: drain.EventWarning, Message: "SYN cookies were sent within the last minute: admission stays open 2s more, since their handshakes cannot be told from new ones"})
		wait(ctx, 2*time.Second)
	}
	// Without a listener too: one that CMD opens from now on is refused at once.
	ls := b.listening()
	b.mu.Lock()
	aside := b.aside
	b.mu.Unlock()
	if err := b.dp.refuse(ctx, ls, aside, b.boot()+time.Until(until)); err != nil {
		if errors.Is(err, errUnguarded) {
			return fmt.Errorf("%w: %w", drain.ErrUnguarded, err)
		}
		return err
	}
	b.mu.Lock()
	if !b.refusing {
		b.halfOpen, b.gone = nil, false
	}
	b.refusing = true
	b.mu.Unlock()
	if b.flipped != nil {
		if err := b.flipped(ctx); err != nil {
			return err
		}
	}
	if other := b.dp.overruled(); other != "" {
		return fmt.Errorf("%w: %s may choose a socket although admission is closed", drain.ErrUnguarded, other)
	}
	return nil
}

// OpenAdmission implements drain.World.
func (b *backend) OpenAdmission(ctx context.Context) error {
	b.mu.Lock()
	b.refusing = false
	b.mu.Unlock()
	err := errors.Join(b.dp.admit(), b.dp.unmark())
	b.late.open()
	b.late.keep.begin()
	if b.flipped != nil {
		err = errors.Join(err, b.flipped(ctx))
	}
	return err
}

// Settled implements drain.World.
func (b *backend) Settled(ctx context.Context) (drain.Pending, error) {
	var p drain.Pending
	b.mu.Lock()
	first := b.halfOpen == nil
	if first {
		b.halfOpen = map[*space]*probes.HalfOpen{}
	}
	snaps := b.halfOpen
	b.mu.Unlock()
	ports, cookies := portsOf(b.coveredMap()), b.coveredMap()
	for _, sp := range b.dp.spaces() {
		if first {
			s, err := sp.diag.HalfOpen(ctx, ports)
			if err != nil {
				return p, err
			}
			b.mu.Lock()
			snaps[sp] = s
			b.mu.Unlock()
		}
		b.mu.Lock()
		s := snaps[sp]
		b.mu.Unlock()
		q, h, err := sp.diag.Pending(ctx, ports, has(cookies), s)
		if err != nil {
			return p, err
		}
		p.Queued += q
		p.HalfOpen += h
	}
	b.mu.Lock()
	b.gone = p == drain.Pending{}
	b.mu.Unlock()
	return p, nil
}

// settled tells that admission is closed and that nothing is left of what was on its way at the flip.
func (b *backend) settled() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.refusing && b.gone
}

func has(m map[uint64]listener) func(uint64) bool {
	return func(c uint64) bool { _, ok := m[c]; return ok }
}

// Look implements drain.World: the census says how many, a walk says of which class.
func (b *backend) Look(ctx context.Context) (drain.Counts, error) {
	if err := b.check(ctx); err != nil {
		return drain.Counts{}, err
	}
	c, err := b.census(ctx)
	if err != nil {
		return drain.Counts{}, err
	}
	covered := b.coveredMap()
	counts := drain.Counts{Known: c.known, Accepted: c.total, Closing: c.closing}
	if !c.known {
		return counts, nil
	}
	ports := portsOf(covered)
	if c.open+c.ending == 0 && b.settled() {
		ports = nil // nothing is open, nothing half-open was left, and nothing new comes: the walks are saved
	}
	for _, sp := range b.dp.spaces() {
		if len(ports) == 0 {
			break
		}
		q, h, err := sp.diag.Pending(ctx, ports, has(covered), nil)
		if err != nil {
			return drain.Counts{}, err
		}
		counts.Queued += int64(q)
		counts.Handshake += int64(h)
	}
	if c.open+c.ending == 0 {
		counts.Queued = 0 // what is queued is open; the queue was read later
		b.lookMu.Lock()
		b.verdicts = nil
		b.lookMu.Unlock()
		return counts, nil
	}
	verdicts, err := b.classify(ctx, covered)
	if err != nil {
		return drain.Counts{}, err
	}
	for _, v := range verdicts {
		switch v.Class {
		case probes.ClassIdle:
			counts.Idle++
		case probes.ClassUnused:
			counts.Unused++
		case probes.ClassStalled:
			counts.Stalled++
		}
	}
	// The walk took time: count again, and believe the larger.
	after, err := b.census(ctx)
	if err != nil {
		return drain.Counts{}, err
	}
	c.open, c.ending, counts.Accepted = max(c.open, after.open), max(c.ending, after.ending), after.total
	counts.Known = after.known
	// The census is the number; the walk only tells classes. Whatever was not seen to be something else is active: a
	// connection on its way between processes, or one whose class is unknown.
	counts.Queued = min(counts.Queued, c.open)
	counts.Active = max(0, c.open+c.ending-counts.Queued-counts.Idle-counts.Unused-counts.Stalled)
	return counts, nil
}

// classify looks at each connection of the covered listeners.
func (b *backend) classify(ctx context.Context, covered map[uint64]listener) ([]probes.Verdict, error) {
	b.lookMu.Lock()
	defer b.lookMu.Unlock()
	ss, full, err := b.dp.samples(ctx, b.proc.descendants(), covered)
	if err != nil {
		return nil, err
	}
	b.verdicts = b.cls.Look(time.Now(), ss, full)
	return b.verdicts, nil
}

// check compares the census with a walk where that is due: after a restart, before anything is believed.
func (b *backend) check(ctx context.Context) error {
	b.mu.Lock()
	due := b.mustSee
	b.mu.Unlock()
	if !due {
		return nil
	}
	agreed, err := b.audit(ctx)
	if err != nil {
		return err
	}
	if agreed {
		b.mu.Lock()
		b.mustSee = false
		b.mu.Unlock()
	}
	return nil
}

// lift opens admission when nothing of ours listens any more: whoever listens on these addresses from now on is
// somebody else. The kernel does it by itself unless one of our other listeners is still open.
func (b *backend) lift() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.refusing {
		return
	}
	for _, l := range b.covered {
		if l.live {
			return
		}
	}
	b.refusing = false
	if err := b.dp.admit(); err != nil {
		b.log.Warn("open admission after the last listener closed", "err", err)
	}
}

// begun notes where the counts stand, so that what comes later can be told, and begins the patience of Retire anew.
func (b *backend) begun() {
	b.lookMu.Lock()
	b.waitFrom = time.Time{}
	b.lookMu.Unlock()
	refused, _ := b.dp.refused()
	c, err := b.census(context.Background())
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refused = refused
	if err == nil {
		b.atBegin = c.total
	}
}

// mark tells the kernel of the drain and its deadline.
func (b *backend) mark(r drain.Record) {
	if err := b.dp.mark(time.Duration(r.BegunBoot), time.Duration(r.DeadlineBoot)); err != nil {
		b.log.Warn("mark drain in the kernel: zero is found by polling alone", "err", err)
	}
}

// lateView counts the connections that came after the drain began, or after the restart of ebb if that was later.
func (b *backend) lateView(s drain.Status) *api.Late {
	refused, ok := b.dp.refused()
	b.mu.Lock()
	v := &api.Late{Admitted: max(0, int64(b.accepted)-int64(b.atBegin)), Ended: int64(s.LateEnded)}
	if ok {
		v.Refused = max(0, refused-b.refused)
	}
	b.mu.Unlock()
	b.late.view(v)
	if c := s.LateCounts; c != nil && c.Known {
		carried, parked := int64(c.Carried), int64(c.Parked)
		v.Carried, v.Parked = &carried, &parked
	}
	return v
}

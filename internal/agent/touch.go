// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/hook"
	"github.com/ebbproxy/ebb/internal/metrics"
	"github.com/ebbproxy/ebb/probes"
)

// What follows is all that Ebb ever does to a connection of the application, and only during its drain.

// busyAfter is how long retiring waits for a connection to fall idle by itself before the guard relaxes for clients
// that never pause.
const busyAfter = time.Second

// Nobody looks before a drain, so a connection that is idle at the first look may be in a pause of its answer, however
// many requests it has served: it must show seenCycles answers to looks of this drain, or stay idle for unseenIdle. At
// the second of them a pause in the first has been seen, and marks the connection as pushing. Of 40 answers with a pause
// of 1 s in the middle 40 were broken without this, and none with it.
const (
	seenCycles = 2
	unseenIdle = 2500 * time.Millisecond
)

// retireBatch bounds the connections retired between two looks, so that an application with thousands of idle
// clients does not see all of them leave in one instant.
const retireBatch = 256

// Retire implements drain.World: idle connections of the last look are ended one by one, as if their clients had left.
func (b *backend) Retire(ctx context.Context) (int, error) {
	b.lookMu.Lock()
	vs := slices.Clone(b.verdicts)
	now := time.Now()
	if b.waitFrom.IsZero() {
		b.waitFrom = now
	}
	guard := probes.RetireGuard{Busy: now.Sub(b.waitFrom) > busyAfter}
	b.lookMu.Unlock()
	n := 0
	var failed error
	for _, v := range vs {
		if ctx.Err() != nil || n >= retireBatch {
			break
		}
		g := guard
		if v.Cycles < seenCycles {
			g.MinIdle = unseenIdle
		}
		if !probes.Retirable(v, g) {
			continue
		}
		err := probes.Retire(ctx, v)
		switch {
		case err == nil && v.Shutdown&1 != 0: // it was told before, and is counted
		case err == nil:
			n++
		case errors.Is(err, probes.ErrChanged), errors.Is(err, probes.ErrGone):
		default:
			failed = err
		}
	}
	return n, failed
}

func survivorOf(v probes.Verdict) drain.Survivor {
	s := v.Sample
	return drain.Survivor{
		Peer: s.Remote.String(), Local: s.Local.String(), Class: v.Class.String(),
		Age: s.Since, Idle: v.IdleFor, Unacked: uint64(s.Unacked), In: s.BytesReceived, Out: s.BytesSent,
	}
}

// Survivors implements drain.World.
func (b *backend) Survivors(ctx context.Context) ([]drain.Survivor, error) {
	vs, err := b.classify(ctx, b.coveredMap())
	if err != nil {
		return nil, err
	}
	out := make([]drain.Survivor, 0, len(vs))
	for _, v := range vs {
		if v.Class == probes.ClassClosing {
			continue
		}
		out = append(out, survivorOf(v))
	}
	return out, nil
}

// Flush implements drain.World: the application is told once. By a signal it has flushed when it has exited, by another hook
// when that says so, or when it has exited. What is still open then is held by a descriptor of ours, so that an exit with unread
// data does not turn into a reset that destroys a response on its way (RFC 9112, section 9.6).
func (b *backend) Flush(ctx context.Context, q drain.FlushRequest) error {
	if q.Reason == drain.FlushDeadline {
		b.hold(ctx)
	}
	b.flushed.Store(true)
	b.flushing.Store(true)
	defer b.flushing.Store(false)
	exits, failed := b.tellFlush(ctx, q)
	if failed != nil {
		if b.proc.foreign || ctx.Err() != nil && !errors.Is(failed, drain.ErrSlice) {
			return failed
		}
		// CMD is to end all the same.
		b.emit(drain.Event{Type: drain.EventWarning, Drain: q.Drain, Message: "CMD has not flushed and is sent SIGTERM: " + failed.Error()})
		if err := b.proc.signal(unix.SIGTERM); err != nil {
			return errors.Join(failed, err)
		}
		exits = true
	}
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	var finishing sync.WaitGroup
	defer finishing.Wait()
	if !exits && b.proc.lives() {
		b.release(ctx, b.stillOwned(ctx), &finishing)
		return nil
	}
	for {
		select {
		case <-b.proc.exited():
			b.release(ctx, nil, &finishing)
			err := b.endRest(ctx)
			if failed != nil && err == nil {
				err = drain.ErrEnded
			}
			return errors.Join(failed, err)
		case <-tick.C:
			// What the application has closed by itself is finished at once: its client waits for the FIN that our
			// descriptor holds back.
			b.release(ctx, b.stillOwned(ctx), &finishing)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// tellFlush tells the application to flush, and waits until it has where its hook says so. exits tells that it is to end.
func (b *backend) tellFlush(ctx context.Context, q drain.FlushRequest) (exits bool, err error) {
	h := b.flush
	switch {
	case b.told.Load():
		return true, nil
	case h.API && b.book.Apps() == 0:
		b.emit(drain.Event{Type: drain.EventWarning, Drain: q.Drain, Message: "no application has registered that could be told to flush: it is sent SIGTERM"})
		h = hook.Hook{Signal: unix.SIGTERM}
	}
	if h.Signal != 0 {
		return true, b.tellHook(ctx, h, q)
	}
	// Its slice is for what the application has to do; it may end after it. One that ends has flushed, whoever was to say so.
	ctx, cancel := context.WithTimeoutCause(ctx, q.TimeLeft, drain.ErrSlice)
	defer cancel()
	go func() {
		select {
		case <-b.proc.exited():
			cancel()
		case <-ctx.Done():
		}
	}()
	if h.API {
		err = b.book.Answered(ctx, q.Drain)
	} else {
		err = b.tellHook(ctx, h, q)
	}
	if !b.proc.lives() {
		err = nil
	}
	return false, err
}

// answered waits for the answers to a flush that went out before a restart, and tells the machine.
func (b *backend) answered(ctx context.Context, m *drain.Machine, id string) {
	err := b.book.Answered(ctx, id)
	if err == nil {
		err = m.Flushed(ctx, id)
	}
	if err != nil && ctx.Err() == nil {
		b.log.Warn("the flush of before the restart", "drain", id, "err", err)
	}
}

func (b *backend) tellHook(ctx context.Context, h hook.Hook, q drain.FlushRequest) error {
	return b.tell(ctx, h, hook.Message{Kind: hook.Flush, Drain: q.Drain, Gen: q.Gen, Cause: q.Cause, Reason: q.Reason, TimeLeft: q.TimeLeft})
}

// tell delivers a hook, inside the network namespace of the application.
func (b *backend) tell(ctx context.Context, h hook.Hook, m hook.Message) error {
	m.Backend, m.Service = b.name, b.service
	t := hook.Target{Signal: b.proc.signal, Log: b.log}
	if sps := b.dp.spaces(); len(sps) > 0 {
		t.NetNS = sps[0].fd
	}
	return h.Deliver(ctx, t, m)
}

// endRest asks what CMD has left behind to end, as when CMD is a shell that waits for its server, and waits for it: the
// flush is theirs too.
func (b *backend) endRest(ctx context.Context) error {
	rest := b.proc.rest()
	if len(rest) == 0 || b.proc.foreign {
		return nil
	}
	b.log.Info("CMD has ended; its descendants are asked to", "pids", rest)
	err := b.proc.endRest(ctx)
	if err != nil {
		b.emit(drain.Event{Type: drain.EventWarning, Message: fmt.Sprintf("%d processes that CMD has started have not ended in time and are killed", len(b.proc.rest()))})
	}
	return err
}

// hold takes a descriptor of every connection that is left.
func (b *backend) hold(ctx context.Context) {
	vs, err := b.classify(ctx, b.coveredMap())
	if err != nil {
		b.log.Warn("look at survivors", "err", err)
		return
	}
	b.lookMu.Lock()
	defer b.lookMu.Unlock()
	for _, v := range vs {
		s := v.Sample
		if s.PID == 0 || s.FD < 0 || b.held[uint64(s.Inode)] != nil {
			continue
		}
		h, err := probes.Hold(s.PID, s.FD, uint64(s.Inode))
		if err != nil {
			if !errors.Is(err, probes.ErrGone) {
				b.log.Debug("hold connection", "peer", s.Remote.String(), "err", err)
			}
			continue
		}
		b.held[uint64(s.Inode)] = h
	}
}

// stillOwned is the set of sockets that CMD's processes hold open; nil when that cannot be told, and then nothing may
// be taken for closed.
func (b *backend) stillOwned(ctx context.Context) map[uint64]bool {
	b.lookMu.Lock()
	none := len(b.held) == 0
	b.lookMu.Unlock()
	if none {
		return map[uint64]bool{}
	}
	ss, full, err := b.dp.samples(ctx, b.proc.descendants(), b.coveredMap())
	if err != nil || !full {
		return nil
	}
	own := make(map[uint64]bool, len(ss))
	for _, s := range ss {
		own[uint64(s.Inode)] = true
	}
	return own
}

// release finishes the held connections that nobody else holds any more: SHUT_WR, then reading until the peer's FIN.
// With owned nil they are all taken to be ours alone.
func (b *backend) release(ctx context.Context, owned map[uint64]bool, wg *sync.WaitGroup) {
	select {
	case <-b.proc.exited():
		owned = map[uint64]bool{}
	default:
		if owned == nil {
			return
		}
	}
	b.lookMu.Lock()
	defer b.lookMu.Unlock()
	for ino, h := range b.held {
		if owned[ino] {
			continue
		}
		delete(b.held, ino)
		wg.Go(func() {
			if err := h.FinishAfterExit(ctx); err != nil {
				b.log.Debug("finish connection", "err", err)
			}
			if err := h.Close(); err != nil {
				b.log.Debug("close held connection", "err", err)
			}
		})
	}
}

// Cut implements drain.World. cut: the application sees each client leave (SHUT_RD, spread over the window) and may
// still finish its answer; what is not acknowledged and closed by then is destroyed. reset destroys at once.
func (b *backend) Cut(ctx context.Context, q drain.CutRequest) (drain.CutReport, error) {
	ctx, cancel := context.WithTimeout(ctx, q.Within)
	defer cancel()
	var rep drain.CutReport
	before, err := b.census(ctx)
	if err != nil {
		return rep, err
	}
	vs, err := b.classify(ctx, b.coveredMap())
	if err != nil {
		return rep, err
	}
	for _, v := range vs {
		switch v.Class {
		case probes.ClassActive, probes.ClassStalled, probes.ClassQueued, probes.ClassUnknown:
			rep.InFlight++
		}
	}
	if q.Method == drain.OnDeadlineCut {
		b.askToEnd(ctx, vs, q)
	}
	mid, err := b.census(ctx)
	if err != nil {
		return rep, err
	}
	rep.Graceful = max(0, int(before.open+before.ending-mid.open-mid.ending))
	if mid.open+mid.ending > 0 {
		rep.Destroyed, rep.Note, err = b.destroy(ctx)
	}
	after, cerr := b.census(ctx)
	if cerr == nil {
		rep.Left = int(after.open + after.ending)
	}
	b.metrics.ConnectionsCut(b.service, metrics.CutShutdown, rep.Graceful)
	b.metrics.ConnectionsCut(b.service, metrics.CutDestroy, rep.Destroyed)
	return rep, errors.Join(err, cerr)
}

// askToEnd shuts the receiving side of each connection, at random moments of the window, and waits until they are gone
// or most of the time is used.
func (b *backend) askToEnd(ctx context.Context, vs []probes.Verdict, q drain.CutRequest) {
	b.hold(ctx)
	patience := q.Within * 2 / 3 // the rest is for destroying and for the application's own end
	spread := min(q.Spread, patience)
	type shut struct {
		at  time.Duration
		ino uint64
	}
	var plan []shut
	b.lookMu.Lock()
	for ino := range b.held {
		at := time.Duration(0)
		if spread > 0 {
			at = rand.N(spread)
		}
		plan = append(plan, shut{at, ino})
	}
	b.lookMu.Unlock()
	slices.SortFunc(plan, func(a, b shut) int { return int(a.at - b.at) })
	began := time.Now()
	for _, s := range plan {
		if d := s.at - time.Since(began); d > 0 && !wait(ctx, d) {
			return
		}
		// Under the lock, and only while it is here: the flush that still runs finishes what CMD has closed.
		b.lookMu.Lock()
		if h := b.held[s.ino]; h != nil {
			if err := h.ShutRead(); err != nil {
				b.log.Debug("shut receiving side", "err", err)
			}
		}
		b.lookMu.Unlock()
	}
	var finishing sync.WaitGroup
	defer finishing.Wait()
	fctx, cancel := context.WithDeadline(ctx, began.Add(patience))
	defer cancel()
	for wait(fctx, 20*time.Millisecond) {
		b.release(fctx, b.stillOwned(fctx), &finishing)
		if c, err := b.census(fctx); err == nil && c.open+c.ending == 0 {
			return
		}
	}
}

// destroy ends by SOCK_DESTROY what is left on the covered ports. A subflow of an MPTCP connection could be
// destroyed, yet both its applications would hang: such pairs are left and said so.
func (b *backend) destroy(ctx context.Context) (n int, note string, err error) {
	covered := b.coveredMap()
	mptcp := map[uint16]bool{}
	for _, l := range covered {
		if l.mptcp {
			mptcp[l.addr.Port()] = true
		}
	}
	for _, sp := range b.dp.spaces() {
		socks, err := b.dp.connections(ctx, sp, covered, false)
		if err != nil {
			return n, note, err
		}
		if len(socks) == 0 {
			continue
		}
		if len(mptcp) > 0 {
			pairs, err := mptcpPairs(ctx, sp.diag, covered)
			if err != nil {
				b.log.Debug("list MPTCP connections", "err", err)
			}
			all := len(socks)
			socks = slices.DeleteFunc(socks, func(s probes.Socket) bool { return pairs[s.Remote.String()+" "+s.Local.String()] })
			if left := all - len(socks); left > 0 {
				note = fmt.Sprintf("%d MPTCP connections were left: destroying their subflows would hang both ends", left)
			}
		}
		k, err := sp.diag.Destroy(ctx, socks)
		n += k
		if errors.Is(err, probes.ErrCannotForce) {
			return n, "this kernel cannot destroy sockets (CONFIG_INET_DIAG_DESTROY): what is left ends with its process", nil
		}
		if errors.Is(err, unix.EPERM) {
			return n, "no privilege to destroy sockets (CAP_NET_ADMIN): what is left ends with its process", nil
		}
		if err != nil {
			return n, note, err
		}
	}
	return n, note, nil
}

// mptcpPairs names the connections on the covered ports that really speak MPTCP; a plain TCP client of an MPTCP
// listener is an ordinary connection.
func mptcpPairs(ctx context.Context, d *probes.Diag, covered map[uint64]listener) (map[string]bool, error) {
	socks, err := d.Dump(ctx, probes.Filter{States: connStates, LocalPorts: portsOf(covered), Protocol: unix.IPPROTO_MPTCP})
	if err != nil {
		return nil, err
	}
	m := make(map[string]bool, len(socks))
	for _, s := range socks {
		m[s.Remote.String()+" "+s.Local.String()] = true
	}
	return m, nil
}

// Kill implements drain.World: the last resort.
func (b *backend) Kill(ctx context.Context) error {
	if len(b.proc.descendants()) == 0 {
		return nil
	}
	if b.proc.foreign {
		if b.flush.Signal != 0 {
			b.emit(drain.Event{Type: drain.EventWarning, Message: fmt.Sprintf("process %d has not ended in time; whoever manages it has to end it", b.proc.pid)})
		}
		b.dropHeld()
		return nil
	}
	b.log.Error("CMD has not ended in time and is killed", "pid", b.proc.pid)
	if err := b.proc.killAll(); err != nil {
		return err
	}
	select {
	case <-b.proc.exited():
	case <-ctx.Done():
	}
	b.dropHeld()
	return nil
}

// dropHeld closes our descriptors of connections that were not finished.
func (b *backend) dropHeld() {
	b.lookMu.Lock()
	defer b.lookMu.Unlock()
	for ino, h := range b.held {
		delete(b.held, ino)
		if err := h.Close(); err != nil {
			b.log.Debug("close held connection", "err", err)
		}
	}
}

// Emit implements drain.World.
func (b *backend) Emit(e drain.Event) { b.emit(e) }

var _ drain.World = (*backend)(nil)

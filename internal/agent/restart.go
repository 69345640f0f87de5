// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
)

const (
	// restartMin and restartMax bound the time between the end of a CMD that did not live for restartCalm and its next
	// start. The first restart after that comes at once.
	restartMin  = 100 * time.Millisecond
	restartMax  = 30 * time.Second
	restartCalm = 10 * time.Second
)

// restarts tells whether CMD is to be started again now that it has ended by itself.
func (r *runner) restarts() bool {
	r.stop.Lock()
	asked := r.stopping > 0 || r.forced
	r.stop.Unlock()
	return r.o.RestartOnExit && !asked && !r.draining()
}

// restart starts CMD again, as often as it takes, while new connections wait. It returns false when a stop is asked for
// meanwhile, or ctx is over.
func (r *runner) restart(ctx context.Context, sigs <-chan os.Signal) bool {
	old := r.life()
	r.emit(drain.Event{Type: EventRun, Message: fmt.Sprintf("process %d ended: %s; it is started again", old.proc.pid, old.proc.exit), Fields: map[string]any{"pid": old.proc.pid, "exit": old.proc.exit.String()}})
	k := old.b.late.keep
	if k != nil {
		k.end()
		if err := k.flip("CMD has ended and is started again"); err != nil {
			r.degraded("connections are refused until CMD listens again: " + err.Error())
		}
	}
	// A worker that is left would go on serving, or hold the address.
	r.reapRest(ctx, old.proc)
	if k != nil {
		k.empty()
	}
	old.end(api.EndEvicted)
	for {
		pause := r.backOff()
		if pause > 0 {
			r.log.Warn("CMD has ended soon after its start; the next one waits", "pause", pause)
		}
		if r.stoppedWithin(ctx, sigs, pause) {
			old.b.dropHold(ctx)
			return false
		}
		if err := r.succeed(ctx, old); err != nil {
			r.log.Error("start CMD again", "err", err)
			continue
		}
		return true
	}
}

// succeed starts CMD and makes it the present incarnation.
func (r *runner) succeed(ctx context.Context, old *incarnation) error {
	r.lastStart = time.Now()
	gen := max(old.gen+1, uint64(r.lastStart.Unix()))
	// Before the process is there, so that its first listener is of the new generation.
	if err := old.b.dp.renew(gen, r.set.mode == drain.ModeEnforce); err != nil {
		return err
	}
	proc, err := startProcess(r.o.Argv, r.environ(), r.stdin(), r.o.Stdout, r.o.Stderr)
	if err != nil {
		return err
	}
	if _, err := r.incarnate(ctx, arrival{gen: gen, set: r.set, proc: proc, argv: r.o.Argv, dp: old.b.dp, journal: old.b.journal}); err != nil {
		return errors.Join(err, proc.killAll(), proc.close())
	}
	r.emit(drain.Event{Type: EventRun, Message: fmt.Sprintf("started %s again as process %d", strings.Join(r.o.Argv, " "), proc.pid), Fields: map[string]any{"pid": proc.pid, "argv": r.o.Argv}})
	if err := old.proc.close(); err != nil {
		r.log.Warn("let go of the process before", "err", err)
	}
	return nil
}

// backOff is how long the next start waits: not at all for a CMD that has lived for a while, else ever longer.
func (r *runner) backOff() time.Duration {
	if time.Since(r.lastStart) >= restartCalm {
		r.startsSoon = 0
		return 0
	}
	r.startsSoon++
	return min(restartMax, restartMin<<min(r.startsSoon-1, 16))
}

// stoppedWithin waits and tells whether a stop is asked for meanwhile. CMD is not there to hear any other signal.
func (r *runner) stoppedWithin(ctx context.Context, sigs <-chan os.Signal, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		select {
		case s := <-sigs:
			sig, ok := s.(syscall.Signal)
			if !ok || !slices.Contains(r.o.StopSignals, sig) {
				continue
			}
			r.stop.Lock()
			r.stopping++
			r.stop.Unlock()
			r.emit(drain.Event{Type: EventSignal, Message: fmt.Sprintf("%s received while CMD is not running", unix.SignalName(sig)), Fields: map[string]any{"signal": unix.SignalName(sig), "forwarded": false}})
			return true
		case <-timer.C:
			return false
		case <-ctx.Done():
			return true
		}
	}
}

// dropHold refuses what waits for an application that does not come back.
func (b *backend) dropHold(ctx context.Context) {
	if k := b.late.keep; k == nil || !k.isAway() {
		return
	}
	if err := errors.Join(b.dp.admit(), b.EndLate(ctx)); err != nil {
		b.log.Warn("end the hold", "err", err)
	}
	b.late.open()
}

// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/drain"
)

// incarnation is one process of CMD under its own generation, with its drain. It is never changed, only replaced.
type incarnation struct {
	gen     uint64
	proc    *process
	b       *backend
	machine *drain.Machine

	cancel context.CancelFunc // ends the goroutines of wg
	wg     sync.WaitGroup
}

// life is the present incarnation. Before CMD is started it has a generation only.
func (r *runner) life() *incarnation { return r.current.Load() }

// incarnate makes the backend and the drain of a process that has just been started or adopted the present ones.
func (r *runner) incarnate(ctx context.Context, gen uint64, proc *process, dp datapath, j *journal, past history, adopted bool) (*incarnation, error) {
	inc := &incarnation{gen: gen, proc: proc}
	ctx, inc.cancel = context.WithCancel(ctx)
	inc.wg.Go(func() { proc.watch(ctx) })
	if !adopted {
		if err := j.restart(run{Version: journalVersion, Type: "run", Name: r.o.Name, Gen: gen, Backend: r.id, PID: proc.pid, Start: proc.start, BootID: bootID(), Argv: r.o.Argv}); err != nil {
			r.log.Warn("journal run: a restart could not adopt CMD", "err", err)
		}
	}
	inc.b = r.backend(gen, proc, dp, j, adopted)
	switch before := r.life().b; {
	case before != nil:
		before.late.handOver(inc.b.late)
	case !adopted:
		inc.b.late.keep.inherit(ctx)
	}
	if err := dp.watch(ctx, proc.pid); err != nil && ctx.Err() == nil && !errors.Is(err, unix.ESRCH) { // ESRCH: it has ended at once
		r.degraded("the listeners of CMD cannot be followed: " + err.Error())
	}
	if adopted {
		inc.b.late.resume(ctx, past.late)
		if past.openDrain == nil {
			inc.b.late.keep.resume()
		}
	}
	var err error
	if inc.machine, err = drain.New(r.machineOptions(gen, inc.b, past, adopted)); err != nil {
		inc.end()
		return nil, err
	}
	inc.wg.Go(func() {
		if err := inc.machine.Run(ctx); err != nil && ctx.Err() == nil {
			r.log.Error("drain machine", "err", err)
		}
	})
	r.current.Store(inc)
	if past.openDrain == nil {
		inc.b.late.keep.begin()
	}
	return inc, nil
}

// end ends what belongs to this incarnation alone. The process is left as it is.
func (i *incarnation) end() {
	if i.cancel == nil {
		return
	}
	i.cancel()
	i.wg.Wait()
}

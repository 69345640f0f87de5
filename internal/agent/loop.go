// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/probes"
)

// loop lives as long as CMD: it answers signals, kernel hints and the end of a drain.
func (r *runner) loop(ctx context.Context, sigs <-chan os.Signal) {
	proc := r.life().proc
	every := time.NewTicker(cookieWindow / 2)
	defer every.Stop()
	r.life().b.cookies.sample(time.Now())
	if err := r.life().b.refresh(ctx); err != nil {
		r.log.Warn("look for listeners", "err", err)
	}
	// Without the kernel's hints the first listener is looked for; later ones are found by the next look.
	find := time.NewTicker(findEvery)
	defer find.Stop()
	if r.life().b.dp.guarded() {
		find.Stop()
	}
	over, exited := r.life().machine.Done(), proc.exited()
	for {
		select {
		case <-find.C:
			if err := r.life().b.refresh(ctx); err != nil && !errors.Is(err, probes.ErrGone) {
				r.log.Warn("look for listeners", "err", err)
			}
			if len(r.life().b.listening()) > 0 {
				find.Stop()
			}
		case s := <-sigs:
			if sig, ok := s.(syscall.Signal); ok {
				r.signal(ctx, sig, proc)
			}
		case h := <-r.life().b.dp.hints():
			if h == hintZero {
				r.life().machine.Zero()
				continue
			}
			if err := r.life().b.refresh(ctx); err != nil {
				r.log.Warn("look for listeners", "err", err)
			}
			r.life().b.lift()
		case sig := <-r.early.stopped():
			r.stoppedElsewhere(ctx, sig)
		case <-every.C:
			r.life().b.cookies.sample(time.Now())
		case <-exited:
			if sig, ok := r.early.caught(); ok { // the kernel's word of it may still be on its way
				r.stoppedElsewhere(ctx, sig)
			}
			if r.restarts() {
				if !r.restart(ctx, sigs) {
					return
				}
				proc = r.life().proc
				over, exited = r.life().machine.Done(), proc.exited()
				continue
			}
			// A drain that runs comes to its outcome first: the kernel may still be delivering the last bytes.
			exited = nil
			if over == nil {
				r.end(ctx, proc)
				return
			}
			if r.life().b.flushing.Load() {
				continue // the flush ends when all that CMD has started has ended too, and says so itself
			}
			r.life().machine.Exited(r.ended(proc))
		case <-over:
			if s := r.life().machine.Status(); s.State != drain.StateDone && s.State != drain.StateLost {
				// Taken back, and perhaps another one has begun since: stop signals count anew.
				r.takenBack()
				over = r.life().machine.Done()
				continue
			}
			if r.o.Mode != drain.ModeEnforce && exited != nil {
				over = nil // what would have been done is known; CMD ends when it wants to
				continue
			}
			r.end(ctx, proc)
			return
		case <-ctx.Done():
			return
		}
	}
}

// takenBack forgets the stop signals that began a drain which was taken back.
func (r *runner) takenBack() {
	r.stop.Lock()
	defer r.stop.Unlock()
	r.stopping = 0
}

// findEvery is how often a command that does not listen yet is looked at where the kernel does not tell.
const findEvery = 200 * time.Millisecond

// ended says what was wrong with the way CMD ended; nil if it was asked to, or ended well by itself.
func (r *runner) ended(proc *process) error {
	if r.life().b.flushed.Load() || (proc.exit.known && proc.exit.code == 0) {
		return nil
	}
	return fmt.Errorf("process %d ended: %s", proc.pid, proc.exit)
}

// end waits for a CMD that its drain has left alive, as after a SIGKILL that needs a moment, and ends what it left behind.
func (r *runner) end(ctx context.Context, proc *process) {
	if r.o.Mode == drain.ModeEnforce && r.o.Flush.Signal == 0 {
		// It has flushed, and may not know that it is to end.
		select {
		case <-proc.exited():
		case <-time.After(endWait):
			if err := proc.signal(unix.SIGTERM); err != nil {
				r.log.Error("end CMD after its flush", "err", err)
			}
		}
	}
	select {
	case <-proc.exited():
	case <-time.After(killWait):
		r.log.Error("CMD has not ended after its drain", "pid", proc.pid)
		if err := proc.killAll(); err != nil {
			r.log.Error("kill CMD", "err", err)
		}
		<-proc.exited()
	}
	r.reapRest(ctx, proc)
}

// endWait is how long a CMD that was told to flush by another way than a signal may take to end by itself afterwards.
const endWait = time.Second

// killWait bounds the wait for a killed process to be reaped. Exit of a large process takes the time that its memory
// takes to be freed.
const killWait = 5 * time.Second

// reapRest ends what CMD left behind: first asked, then made to.
func (r *runner) reapRest(ctx context.Context, proc *process) {
	rest := proc.rest()
	if len(rest) == 0 {
		return
	}
	if r.life().b.flushed.Load() {
		r.log.Info("CMD has ended; its descendants are asked to", "pids", rest)
	} else {
		r.log.Warn("CMD has ended by itself while processes that it started live, and these are ended too; a server must stay in the foreground, as nginx does with -g 'daemon off;'", "pids", rest)
	}
	ctx, cancel := context.WithTimeout(ctx, r.set.eff.Policy.Reserve)
	defer cancel()
	if err := proc.endRest(ctx); err == nil {
		return
	}
	if err := proc.killAll(); err != nil {
		r.log.Warn("kill descendants", "err", err)
	}
}

// sameStop is how close behind the first stop signal a second one is taken for the same.
const sameStop = 100 * time.Millisecond

// signal answers one signal: a stop begins the drain, is reported, or forces the end; any other one is CMD's.
func (r *runner) signal(ctx context.Context, sig syscall.Signal, proc *process) {
	if !slices.Contains(r.o.StopSignals, sig) {
		r.forward(sig, proc)
		return
	}
	r.stop.Lock()
	last := r.stoppedAt
	r.stoppedAt = time.Now()
	if r.o.Mode == drain.ModeEnforce && r.stopping == 1 && r.stoppedAt.Sub(last) < sameStop {
		r.stop.Unlock()
		return // one stop that was sent to us and to our group, as timeout(1) does
	}
	r.stopping++
	n := r.stopping
	r.stop.Unlock()
	r.emit(drain.Event{Type: EventSignal, Message: fmt.Sprintf("%s received", unix.SignalName(sig)), Fields: map[string]any{"signal": unix.SignalName(sig), "forwarded": false, "count": n}})
	if r.o.Mode != drain.ModeEnforce {
		// observe changes nothing: CMD gets what it would have got without us, at once.
		if r.o.Mode == drain.ModeObserve && n == 1 {
			r.begin(ctx, sig)
		}
		if err := proc.signal(sig); err != nil {
			r.log.Error("pass stop signal on", "err", err)
		}
		return
	}
	switch n {
	case 1:
		r.begin(ctx, sig)
	case 2:
		s := r.life().machine.Status()
		if s.ID == "" {
			r.emit(drain.Event{Type: EventSignal, Message: "the drain is beginning; once more ends it by force"})
			return
		}
		r.log.Warn("already draining; a third stop signal ends it by force", "in_flight", describe(s), "deadline", s.Deadline.Format(time.RFC3339))
		r.emit(drain.Event{Type: EventSignal, Drain: s.ID, Message: "already draining: " + describe(s) + " left, until " + s.Deadline.Format(time.TimeOnly) + "; once more ends it by force"})
	default:
		r.stop.Lock()
		r.forced = true
		r.stop.Unlock()
		r.log.Error("forced by a third stop signal: CMD is killed")
		if err := proc.killAll(); err != nil {
			r.log.Error("kill CMD", "err", err)
		}
	}
}

func (r *runner) begin(ctx context.Context, sig syscall.Signal) {
	// A flip waits for nothing but a map write, yet under SYN cookies it takes 2 s: signals must be heard meanwhile.
	go func() {
		_, err := r.life().machine.Begin(ctx, drain.Request{Gen: r.life().gen, Cause: drain.CauseSignal, Policy: r.set.eff.Policy, By: unix.SignalName(sig), Force: true})
		if err != nil && ctx.Err() == nil {
			// Not even the drain can start: CMD must still stop.
			r.log.Error("begin drain; CMD gets its stop signal without one", "err", err)
			if err := r.life().b.proc.signal(r.o.flushSignal()); err != nil {
				r.log.Error("send stop signal", "err", err)
			}
		}
	}()
}

// forward passes a signal on. A terminal's stop stops us too, and its continue wakes CMD.
func (r *runner) forward(sig syscall.Signal, proc *process) {
	if keepSignals[sig] {
		return
	}
	if sig == unix.SIGTSTP || sig == unix.SIGCONT {
		if err := proc.signalGroup(sig); err != nil {
			r.log.Warn("forward signal", "signal", unix.SignalName(sig), "err", err)
		}
		if sig == unix.SIGTSTP {
			if err := unix.Kill(os.Getpid(), unix.SIGSTOP); err != nil {
				r.log.Warn("stop", "err", err)
			}
		}
		return
	}
	r.log.Debug("forward signal", "signal", unix.SignalName(sig))
	if err := proc.signal(sig); err != nil {
		r.log.Warn("forward signal", "signal", unix.SignalName(sig), "err", err)
	}
}

// finish works out the exit code and writes the report.
func (r *runner) finish(ctx context.Context, proc *process) int {
	s := r.life().machine.Status()
	r.stop.Lock()
	// Under observe CMD ends as it would have without us.
	requested := r.o.Mode == drain.ModeEnforce && (r.stopping > 0 || (s.ID != "" && s.Outcome != drain.OutcomeCancelled))
	r.stop.Unlock()
	code := 0
	switch {
	case requested:
		if r.o.ExitOnOutcome {
			switch s.Outcome {
			case drain.OutcomeExpired:
				code = ExitExpired
			case drain.OutcomeLost:
				code = ExitLost
			}
		}
	case proc.exit.known:
		code = proc.exit.code
	default:
		r.log.Warn("how CMD ended cannot be known: it was adopted from an earlier run")
	}
	r.emit(drain.Event{Type: EventRun, Message: fmt.Sprintf("process %d ended: %s", proc.pid, proc.exit), Fields: map[string]any{"pid": proc.pid, "exit": proc.exit.String(), "code": code}})
	if r.o.Report != "" {
		if err := r.report(ctx, proc, code); err != nil {
			r.log.Error("write report", "err", err)
		}
	}
	return code
}

// report writes the file aside and renames it in, so that a reader sees a whole one or none.
func (r *runner) report(ctx context.Context, proc *process, code int) error {
	b := r.view(ctx, true, nil)
	if b.Listeners == nil {
		// CMD has ended and taken its sockets along: what it had is known from the beginning of its drain.
		r.mu.Lock()
		b.Listeners, b.NotCovered = r.had.Listeners, r.had.NotCovered
		r.mu.Unlock()
	}
	body, err := json.MarshalIndent(Report{Name: r.o.Name, Service: r.o.Service, Gen: r.life().gen, Exit: proc.exit.String(), Code: code, Backend: b}, "", "  ")
	if err != nil {
		return fmt.Errorf("encode report: %w", err)
	}
	body = append(body, '\n')
	if st, err := os.Stat(r.o.Report); err == nil && !st.Mode().IsRegular() {
		return os.WriteFile(r.o.Report, body, 0o600) // /dev/stdout or a pipe: written to, never replaced
	}
	f, err := os.CreateTemp(filepath.Dir(r.o.Report), ".ebb-report-*")
	if err != nil {
		return err
	}
	_, err = f.Write(body)
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), r.o.Report)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

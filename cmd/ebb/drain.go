// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
)

// The exit codes of `ebb drain --wait`, by outcome.
const (
	exitExpired   = 3
	exitLost      = 4
	exitCancelled = 5
)

func newDrainCmd(env *environment) *cobra.Command {
	var (
		c     drainCall
		grace time.Duration
		onNew onNewFlag
	)
	onDeadline := newWord("", "cut", "reset", "leave")
	output := newWord("table", "table", "json", "yaml")
	cmd := &cobra.Command{
		Use:   "drain BACKEND|--all",
		Short: "Drain a backend",
		Long: `Drains a backend: readiness fails, new connections stop, those in flight finish,
the application is told to flush, and what is left at the deadline is ended.

A drain that runs already is joined: --grace may then shorten its deadline and
never lengthens it; see ebb extend.

With --wait the exit code is the outcome: 0 drained, 3 expired, 4 lost,
5 cancelled. Interrupting the wait does not stop the drain; see ebb undrain.`,
		Example: `  ebb drain web --wait --reason "kernel update"
  ebb drain web --grace 2m --on-new refuse
  ebb drain --all`,
		Args:              atMost(1),
		ValidArgsFunction: env.completeBackends,
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case c.all && len(args) > 0:
				return usagef("both BACKEND and --all are given; choose one")
			case !c.all && len(args) == 0:
				return usagef("BACKEND is missing; name one, or drain every backend with --all")
			}
			if cmd.Flags().Changed("grace") {
				if grace <= 0 {
					return usagef("--grace %s is not greater than 0", grace)
				}
				g := api.Duration(grace)
				c.request.Grace = &g
			}
			c.request.OnNew, c.request.OnDeadline = onNew.value, drain.OnDeadline(onDeadline.value)
			c.format = output.value
			if len(args) == 1 {
				c.name = args[0]
			}
			return env.drain(cmd.Context(), c)
		},
	}
	f := cmd.Flags()
	f.DurationVar(&grace, "grace", 0, "the whole budget from now (default: the backend's own)")
	f.Var(&onNew, "on-new", "what happens to new connections (default: the backend's own)")
	f.Var(onDeadline, "on-deadline", "what happens to what is left (default: the backend's own)")
	f.StringVar(&c.request.Reason, "reason", "", "why, for the journal and the report")
	f.BoolVar(&c.wait, "wait", false, "wait for the end and show how it goes")
	f.BoolVar(&c.all, "all", false, "drain every backend")
	complete(cmd, "on-new", []string{"auto", "admit", "refuse"})
	complete(cmd, "on-deadline", onDeadline.known)
	addAPI(cmd, &c.socket)
	addOutput(cmd, output)
	return cmd
}

// drainCall is one call of `ebb drain`.
type drainCall struct {
	socket, name string
	all, wait    bool
	format       string
	request      api.DrainRequest
}

func (e *environment) drain(ctx context.Context, c drainCall) error {
	targets, err := e.targets(ctx, c)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()

	var errs []error
	for i := range targets {
		t := &targets[i]
		if c.wait {
			// Before the drain begins: a process that drains itself may end, and leave, before a stream that is
			// opened afterwards is accepted.
			if t.stream, t.err = t.client.Follow(ctx, 0); t.err != nil {
				errs = append(errs, fmt.Errorf("drain %s: %w", t.Name, t.err))
				continue
			}
			defer t.stream.Close()
		}
		t.drain, t.err = t.client.Drain(ctx, t.Name, c.request)
		switch {
		case t.err != nil:
			errs = append(errs, fmt.Errorf("drain %s: %w", t.Name, t.err))
		case c.format == "table":
			fmt.Fprintf(e.stdout, "%s: %s (drain %s), deadline %s, in %s\n", line(t.Name), t.drain.State, t.drain.ID,
				clockTime(t.drain.Deadline), brief(time.Until(t.drain.Deadline)))
			if !c.wait {
				fmt.Fprintf(e.stdout, "see what blocks it with: ebb explain %s\n", shellWord(t.Name))
			}
		}
	}
	if c.wait {
		errs = append(errs, e.await(ctx, targets)...)
	}
	if c.format != "table" {
		if err := e.writeDrains(c, targets); err != nil {
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if !c.wait {
		return nil
	}
	if code := worst(targets); code != 0 {
		return &exitError{code: code}
	}
	return nil
}

// target is a backend that is drained, and how that went.
type target struct {
	located
	stream *api.Stream // nil without --wait
	drain  api.Drain
	err    error
}

func (e *environment) targets(ctx context.Context, c drainCall) ([]target, error) {
	if !c.all {
		b, err := e.find(ctx, c.socket, c.name)
		return []target{{located: b}}, err
	}
	all, bad, err := e.backends(ctx, c.socket)
	if err != nil {
		return nil, err
	}
	if len(bad) > 0 {
		hints := make([]string, len(bad))
		for i, s := range bad {
			hints[i] = s.hint()
		}
		return nil, fmt.Errorf("all cannot be drained, and nothing was: %s", strings.Join(hints, "; "))
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("there is nothing to drain: no ebb runs here (no socket in %s)", strings.Join(api.RunDirs(e.getenv, e.uid), " or "))
	}
	var out []target
	for _, b := range all {
		out = append(out, target{located: b})
	}
	return out, nil
}

func (e *environment) writeDrains(c drainCall, targets []target) error {
	l := api.DrainList{Drains: []api.Drain{}}
	for _, t := range targets {
		if t.err == nil {
			l.Drains = append(l.Drains, t.drain)
		}
	}
	if !c.all {
		if len(l.Drains) == 0 {
			return nil
		}
		return writeDocument(e.stdout, c.format, l.Drains[0])
	}
	return writeDocument(e.stdout, c.format, l)
}

// worst is the exit code that stands for all outcomes.
func worst(targets []target) int {
	code := 0
	rank := map[int]int{0: 0, exitCancelled: 1, exitExpired: 2, exitLost: 3}
	for _, t := range targets {
		c := 0
		switch t.drain.Outcome {
		case drain.OutcomeExpired:
			c = exitExpired
		case drain.OutcomeLost:
			c = exitLost
		case drain.OutcomeCancelled:
			c = exitCancelled
		}
		if rank[c] > rank[code] {
			code = c
		}
	}
	return code
}

// await waits for the end of every drain that was begun.
func (e *environment) await(ctx context.Context, targets []target) []error {
	p := e.newProgress()
	defer p.clear()
	var wg sync.WaitGroup
	for i := range targets {
		t := &targets[i]
		if t.err != nil {
			continue
		}
		wg.Go(func() {
			watching, stop := context.WithCancel(ctx)
			var watcher sync.WaitGroup
			if p.live {
				watcher.Go(func() { p.watch(watching, t.client, t.Name) })
			}
			end, err := waitForEnd(ctx, t.client, t.stream, t.drain, p.event)
			stop()
			watcher.Wait()
			t.drain, t.err = end, err
			p.ended(t.Name, end, err)
		})
	}
	wg.Wait()
	p.clear()
	var errs []error
	for _, t := range targets {
		if t.err == nil {
			continue
		}
		if ctx.Err() != nil {
			return []error{errors.New("the wait was interrupted; the drain goes on (take it back with ebb undrain)")}
		}
		errs = append(errs, fmt.Errorf("wait for %s: %w", t.Name, t.err))
	}
	return errs
}

// errEndUnseen: the process that runs the drain ended without telling how the drain did.
var errEndUnseen = errors.New("the process that ran the drain went away before its end was seen; its log and its --report file tell how it ended")

// resumeDelay is the pause before a broken event stream is taken up again.
const resumeDelay = 200 * time.Millisecond

// waitForEnd reads the stream, which was opened before d began, until d has its outcome, hands each of d's events
// to seen, and returns d as it ended. The event, not a question, is what counts: the process that drains
// itself leaves right after it.
func waitForEnd(ctx context.Context, c *api.Client, stream *api.Stream, d api.Drain, seen func(api.Event)) (api.Drain, error) {
	from := uint64(0)
	for {
		var streamErr error
		for ev, err := range stream.All() {
			if err != nil {
				streamErr = err
				break
			}
			from = ev.Seq + 1
			if ev.Drain != d.ID {
				continue
			}
			learn(&d, ev)
			if ev.Outcome == "" {
				seen(ev)
				continue
			}
			d.Outcome, d.Ended = ev.Outcome, &ev.Time
			// It may still be there to tell the rest.
			if full, err := c.DrainByID(ctx, d.ID); err == nil && full.Outcome == ev.Outcome {
				d = full
			}
			return d, nil
		}
		if ctx.Err() != nil {
			return d, context.Cause(ctx)
		}
		// The stream ended without the outcome: either the process is gone, or only the stream is.
		now, err := c.DrainByID(ctx, d.ID)
		if err != nil {
			return d, errors.Join(errEndUnseen, streamErr)
		}
		if !now.Running() {
			return now, nil
		}
		pause := time.NewTimer(resumeDelay)
		select {
		case <-ctx.Done():
			pause.Stop()
			return d, context.Cause(ctx)
		case <-pause.C:
		}
		if stream, err = c.Follow(ctx, from); err != nil {
			return d, errors.Join(errEndUnseen, err)
		}
		defer stream.Close()
	}
}

// learn takes over what an event tells about d, for when nobody is left to ask. What it cannot read it leaves:
// an event of another version has other fields.
func learn(d *api.Drain, ev api.Event) {
	if ev.Phase != "" && ev.Phase != d.Phase() {
		d.Phases = append(d.Phases, api.PhaseAt{Phase: ev.Phase, At: ev.Time})
	}
	var fields struct {
		Survivors []drain.Survivor
		Report    *drain.CutReport
	}
	b, err := json.Marshal(ev.Fields)
	if err != nil || json.Unmarshal(b, &fields) != nil {
		return
	}
	switch ev.Type {
	case drain.EventSurvivors:
		d.Survivors = nil
		for _, s := range fields.Survivors {
			d.Survivors = append(d.Survivors, api.StragglerOf(s))
		}
	case drain.EventCut:
		if r := fields.Report; r != nil {
			d.Cut = &api.Cut{
				Method: d.Policy.OnDeadline, Graceful: int64(r.Graceful), Destroyed: int64(r.Destroyed),
				Left: int64(r.Left), InFlight: int64(r.InFlight), Note: r.Note,
			}
		}
	}
}

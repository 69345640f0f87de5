// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
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
		Use:   "drain BACKEND|--unit U|--all",
		Short: "Drain a backend",
		Long: `Drains a backend: readiness fails, new connections stop, those in flight finish,
the application is told to flush, and what is left at the deadline is ended.

A drain that runs already is joined: --grace may then shorten its deadline and
never lengthens it; see ebb extend.

--unit drains what a systemd unit runs: each backend that is matched by the unit, or
whose main process is in its cgroup.

With --wait the exit code is the outcome: 0 drained, 3 expired, 4 lost,
5 cancelled; of several, the worst. Interrupting the wait does not stop the drain;
see ebb undrain. A drain of a backend that is only observed is not waited for: it
does nothing, and ebb report shows later what it would have done.`,
		Example: `  ebb drain web --wait --reason "kernel update"
  ebb drain web --grace 2m --on-new refuse
  ebb drain --unit nginx --wait
  ebb drain --all`,
		Args:              atMost(1),
		ValidArgsFunction: env.completeBackends,
		RunE: func(cmd *cobra.Command, args []string) error {
			given := []string{}
			if len(args) > 0 {
				given = append(given, "BACKEND")
			}
			if c.unit != "" {
				given = append(given, "--unit")
			}
			if c.all {
				given = append(given, "--all")
			}
			switch len(given) {
			case 0:
				return usagef("BACKEND is missing; name one, or drain what a unit runs with --unit, or every backend with --all")
			case 1:
			default:
				return usagef("both %s are given; choose one", strings.Join(given, " and "))
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
	f.StringVar(&c.unit, "unit", "", "drain what this systemd `unit` runs")
	complete(cmd, "on-new", []string{"auto", "steer", "relay", "hold", "admit", "refuse"})
	complete(cmd, "on-deadline", onDeadline.known)
	addAPI(cmd, &c.at)
	addOutput(cmd, output)
	return cmd
}

// drainCall is one call of `ebb drain`.
type drainCall struct {
	at         where
	name, unit string
	all, wait  bool
	format     string
	request    api.DrainRequest
}

// one says whether one backend is meant, by its name.
func (c drainCall) one() bool { return c.name != "" }

func (e *environment) drain(ctx context.Context, c drainCall) error {
	targets, err := e.targets(ctx, c)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()

	p := e.newProgress()
	var wg sync.WaitGroup
	for _, g := range byServer(targets) {
		wg.Go(func() { e.drainGroup(ctx, c, g, p) })
	}
	wg.Wait()
	p.clear()
	if c.wait && ctx.Err() != nil {
		return errors.New("the wait was interrupted; the drain goes on (take it back with ebb undrain)")
	}
	return e.sayDrains(c, targets)
}

// target is a backend that is drained, and how that went.
type target struct {
	located
	drain api.Drain
	err   error
}

// byServer are the targets of each server.
func byServer(targets []*target) [][]*target {
	var groups [][]*target
	for _, t := range targets {
		i := slices.IndexFunc(groups, func(g []*target) bool { return g[0].client == t.client })
		if i < 0 {
			groups = append(groups, nil)
			i = len(groups) - 1
		}
		groups[i] = append(groups[i], t)
	}
	return groups
}

// beginAtOnce bounds the drains that one server is asked to begin at the same time.
const beginAtOnce = 8

// drainGroup drains the backends of one server.
func (e *environment) drainGroup(ctx context.Context, c drainCall, g []*target, p *progress) {
	var tail *api.Tail
	var giveUp context.CancelFunc
	if c.wait {
		// Before the drains begin: a process that drains itself may end, and leave, before a stream that is
		// opened afterwards is accepted.
		var err error
		if tail, giveUp, err = openTail(ctx, g[0].client); err != nil {
			for _, t := range g {
				t.err = fmt.Errorf("drain %s: %w", t.Name, err)
			}
			return
		}
		defer giveUp()
		defer tail.Close()
	}
	var wg sync.WaitGroup
	places := make(chan struct{}, beginAtOnce)
	for _, t := range g {
		wg.Go(func() {
			places <- struct{}{}
			defer func() { <-places }()
			if t.drain, t.err = t.client.Drain(ctx, t.Name, c.request); t.err != nil {
				t.err = fmt.Errorf("drain %s: %w", t.Name, t.err)
			}
		})
	}
	wg.Wait()
	if c.one() && c.format == "table" && g[0].err == nil {
		d := g[0].drain
		if d.ID == "" {
			g[0].err = fmt.Errorf("drain %s: there is nothing to drain: it is %s", d.Backend, d.State)
			return
		}
		if !d.Running() {
			fmt.Fprintf(e.stdout, "%s: there is nothing to drain: %s (drain %s)\n", line(d.Backend), line(ending(d)), d.ID)
			return
		}
		fmt.Fprintf(e.stdout, "%s: %s (drain %s), deadline %s, in %s\n", line(d.Backend), d.State, d.ID,
			clockTime(d.Deadline), brief(time.Until(d.Deadline)))
		// As it was before we asked.
		if was := g[0].Drain; c.request.Grace != nil && was != nil && was.ID == d.ID && !d.Deadline.Before(was.Deadline) {
			fmt.Fprintf(e.stdout, "it ran already, and --grace %s would end it later: its deadline stays; see ebb extend\n", *c.request.Grace)
		}
		if !c.wait {
			fmt.Fprintf(e.stdout, "see what blocks it with: ebb explain %s\n", shellWord(d.Backend))
		}
	}
	if c.wait {
		awaitEnds(ctx, tail, giveUp, e.enforced(g), p)
	}
}

// enforced are the targets whose drains do something. Nobody has to wait for one that is only observed: whoever stops the
// application must not be held up by it.
func (e *environment) enforced(g []*target) (rest []*target) {
	for _, t := range g {
		if t.err == nil && t.drain.WouldHave && t.drain.Running() {
			fmt.Fprintf(e.stderr, "%s: observe: nothing is done; ebb report shows what would have been\n", line(t.Name))
			continue
		}
		rest = append(rest, t)
	}
	return rest
}

// sayDrains writes what came of the targets and returns the worst of it.
func (e *environment) sayDrains(c drainCall, targets []*target) error {
	var errs []error
	if !c.one() {
		// Of many, one without a process is none that could not be drained.
		targets = slices.DeleteFunc(targets, func(t *target) bool {
			nothing := t.PID == 0 && errors.Is(t.err, api.ErrNotPossible)
			if nothing {
				fmt.Fprintf(e.stderr, "ebb: nothing to drain: %s has no process\n", line(t.Name))
			}
			return nothing
		})
	}
	for _, t := range targets {
		if t.err != nil {
			errs = append(errs, t.err)
		}
	}
	switch {
	case c.format != "table":
		if err := e.writeDrains(c, targets); err != nil {
			errs = append(errs, err)
		}
	case !c.one():
		if err := e.drainTable(targets); err != nil {
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

func (e *environment) drainTable(targets []*target) error {
	t := table{colour: e.colour(e.stdout)}
	t.head("BACKEND", "SERVICE", "DRAIN", "RESULT")
	for _, g := range targets {
		result := cell{text: line(ending(g.drain)), paint: outcomeColour(&g.drain)}
		switch {
		case g.err != nil:
			result = cell{text: line(g.err.Error()), paint: red}
		case g.drain.Running():
			result = cell{text: fmt.Sprintf("%s, deadline %s, in %s", g.drain.State, clockTime(g.drain.Deadline), brief(time.Until(g.drain.Deadline))), paint: yellow}
		}
		t.row(line(g.Name), line(g.Service), cmp.Or(g.drain.ID, "–"), result)
	}
	return t.write(e.stdout, "")
}

func (e *environment) targets(ctx context.Context, c drainCall) ([]*target, error) {
	if c.one() {
		b, err := e.find(ctx, c.at, c.name)
		return []*target{{located: b}}, err
	}
	all, bad, err := e.backends(ctx, c.at)
	switch {
	case err != nil:
		return nil, err
	case c.unit != "":
		all, err = e.inUnit(c.unit, all, bad)
	case len(bad) > 0:
		hints := make([]string, len(bad))
		for i, s := range bad {
			hints[i] = s.hint()
		}
		err = fmt.Errorf("all cannot be drained, and nothing was: %s", strings.Join(hints, "; "))
	case len(all) == 0:
		err = fmt.Errorf("there is nothing to drain: no ebb runs here (no socket in %s)", strings.Join(api.RunDirs(e.getenv, e.uid), " or "))
	}
	if err != nil {
		return nil, err
	}
	var out []*target
	for _, b := range all {
		out = append(out, &target{located: b})
	}
	return out, nil
}

func (e *environment) writeDrains(c drainCall, targets []*target) error {
	l := api.DrainList{Drains: []api.Drain{}}
	for _, t := range targets {
		if t.drain.ID != "" {
			l.Drains = append(l.Drains, t.drain)
		}
	}
	if !c.one() {
		return writeDocument(e.stdout, c.format, l)
	}
	if len(l.Drains) == 0 {
		return nil
	}
	return writeDocument(e.stdout, c.format, l.Drains[0])
}

// worst is the exit code that stands for all outcomes. One that this version does not know is none that it could call good.
func worst(targets []*target) int {
	rank := []int{0, exitCancelled, exitExpired, exitLost, exitFailed}
	at := 0
	for _, t := range targets {
		c := exitFailed
		switch t.drain.Outcome {
		case drain.OutcomeDrained, "":
			c = 0
		case drain.OutcomeExpired:
			c = exitExpired
		case drain.OutcomeLost:
			c = exitLost
		case drain.OutcomeCancelled:
			c = exitCancelled
		}
		at = max(at, slices.Index(rank, c))
	}
	return rank[at]
}

// How long a server that has gone is waited for: an agent, about as long as an application waits for it before it gives it
// up (15 s); an `ebb run` hardly, since it ends with its command.
const (
	agentPatience = 15 * time.Second
	runPatience   = time.Second
)

// openTail opens the events of a server, from the oldest on. giveUp ends it at once, however the server does.
func openTail(ctx context.Context, c *api.Client) (tail *api.Tail, giveUp context.CancelFunc, err error) {
	patience := runPatience
	if returns(c.Path()) {
		patience = agentPatience
	}
	ctx, giveUp = context.WithCancel(ctx)
	if tail, err = c.Tail(ctx, 0, patience); err != nil {
		giveUp()
	}
	return tail, giveUp, err
}

// errEndUnseen: the process that runs the drain ended without telling how the drain did.
var errEndUnseen = errors.New("the process that ran the drain went away before its end was seen; its log and its --report file tell how it ended")

// errOverdue: a drain that has no end although its deadline has passed, so that whoever should end it does not.
var errOverdue = errors.New("its deadline has passed and it has no outcome: whoever runs it does not answer, or hangs")

// overdueAfter is how long past its deadline a drain is waited for.
const overdueAfter = 10 * time.Second

// waitDeadlines waits until the deadlines of drains, all of one server, have been over for so long. An operator may have
// moved them, so that the server is asked then.
func waitDeadlines(ctx context.Context, c *api.Client, past time.Duration, drains ...api.Drain) {
	last := func() (at time.Time) {
		for _, d := range drains {
			if d.Deadline.After(at) {
				at = d.Deadline
			}
		}
		return at
	}
	for end := last(); ; {
		over := time.NewTimer(time.Until(end) + past)
		select {
		case <-over.C:
		case <-ctx.Done():
			over.Stop()
			return
		}
		ask, cancel := context.WithTimeout(ctx, time.Second)
		for i, d := range drains {
			if now, err := c.DrainByID(ask, d.ID); err == nil {
				drains[i] = now
			}
		}
		cancel()
		later := last()
		if !later.After(end) {
			return
		}
		end = later
	}
}

// awaitEnds reads the tail, which was opened before the drains began, until each of the targets, all of one server, has its
// outcome or an error. The event, not a question, is what counts: the process that drains itself leaves right after
// it.
func awaitEnds(ctx context.Context, tail *api.Tail, giveUp context.CancelFunc, g []*target, p *progress) {
	if len(g) == 0 {
		return
	}
	c := g[0].client
	pending := make(map[string]*target)
	end := func(t *target, err error) {
		delete(pending, t.drain.ID)
		if t.err = err; err != nil {
			t.err = fmt.Errorf("wait for %s: %w", t.Name, err)
		}
		p.ended(t.Name, t.drain, t.err)
	}
	for _, t := range g {
		switch {
		case t.err != nil:
			// It has not begun.
		case t.drain.Running():
			pending[t.drain.ID] = t
		default:
			end(t, nil)
		}
	}
	// look asks how the pending drains are, after events may have been missed.
	look := func() {
		for _, t := range pending {
			switch now, err := c.DrainByID(ctx, t.drain.ID); {
			case errors.Is(err, api.ErrUnknownDrain):
				end(t, errEndUnseen)
			case err == nil && !now.Running():
				t.drain = now
				end(t, nil)
			}
		}
	}
	watching, stop := context.WithCancel(ctx)
	var watcher sync.WaitGroup
	if p.live {
		watcher.Go(func() { p.watch(watching, c, g) })
	}
	defer watcher.Wait()
	defer stop()

	if len(pending) == 0 {
		return
	}
	var late atomic.Bool
	running := make([]api.Drain, 0, len(pending))
	for _, t := range pending {
		running = append(running, t.drain)
	}
	watcher.Go(func() {
		if waitDeadlines(watching, c, overdueAfter, running...); watching.Err() == nil {
			late.Store(true)
			giveUp()
		}
	})
	for ev, err := range tail.All() {
		t := pending[ev.Drain]
		switch {
		case err != nil:
			// The tail is over.
		case ev.Type == api.EventLost:
			look()
		case t == nil:
			// Of another drain.
		case ev.Outcome == "":
			learn(&t.drain, ev)
			p.event(ev)
		default:
			learn(&t.drain, ev)
			t.drain.Outcome, t.drain.Ended = ev.Outcome, &ev.Time
			t.drain.Held = nil // what was held when we asked need not have been to the end
			// It may still be there to tell the rest.
			if full, err := c.DrainByID(ctx, t.drain.ID); err == nil && full.Outcome == ev.Outcome {
				t.drain = full
			}
			end(t, nil)
		}
		if len(pending) == 0 {
			return
		}
	}
	why := errEndUnseen
	if late.Load() {
		why = errOverdue
	} else {
		look()
	}
	for _, t := range pending {
		end(t, why)
	}
}

// learn takes over what an event tells about d, for when nobody is left to ask. What it cannot read it leaves:
// an event of another version has other fields.
func learn(d *api.Drain, ev api.Event) {
	if ev.Phase != "" && !slices.ContainsFunc(d.Phases, func(p api.PhaseAt) bool { return p.Phase == ev.Phase }) {
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

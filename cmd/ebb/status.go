// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
)

// watchInterval is how often --watch looks: fast enough to see a drain move, and 100 ms of looking is 10 %.
const watchInterval = time.Second

func newStatusCmd(env *environment) *cobra.Command {
	var (
		at    where
		watch bool
	)
	output := newWord("table", "table", "wide", "json", "yaml")
	cmd := &cobra.Command{
		Use:   "status [BACKEND]",
		Short: "Show backends, their states, connections by class and drains",
		Long: `Shows each backend: its state, its connections by class, and its drain.

A count that is not known is shown as ?, in JSON as null. It is not zero.`,
		Example: `  ebb status
  ebb status web --watch
  ebb status -o wide
  ebb status -o json | jq '.backends[] | {name, state, in_flight}'`,
		Args:              atMost(1),
		ValidArgsFunction: env.completeBackends,
		RunE: func(cmd *cobra.Command, args []string) error {
			name := ""
			if len(args) == 1 {
				name = args[0]
			}
			if !watch {
				return env.status(cmd.Context(), at, name, output.value)
			}
			return env.watchStatus(cmd.Context(), at, name, output.value)
		},
	}
	addAPI(cmd, &at)
	addOutput(cmd, output)
	cmd.Flags().BoolVarP(&watch, "watch", "w", false, "show it again every second, until interrupted")
	return cmd
}

func (e *environment) watchStatus(ctx context.Context, at where, name, format string) error {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	_, screen := e.terminal(e.stdout)
	tick := time.NewTicker(watchInterval)
	defer tick.Stop()
	for {
		if screen && format != "json" {
			// Home and erase below (ECMA-48 CUP, ED).
			if _, err := io.WriteString(e.stdout, "\x1b[H\x1b[J"); err != nil {
				return err
			}
		}
		if err := e.status(ctx, at, name, format); err != nil && ctx.Err() == nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if !screen && (format == "table" || format == "wide") {
			if _, err := fmt.Fprintln(e.stdout); err != nil {
				return err
			}
		}
	}
}

func (e *environment) status(ctx context.Context, at where, name, format string) error {
	var (
		list  []located
		bad   []silent
		asked int
		err   error
	)
	if name != "" {
		var b located
		if b, err = e.find(ctx, at, name); err != nil {
			return err
		}
		// One backend may be looked at more closely than all.
		if b.Backend, err = b.client.Backend(ctx, name); err != nil {
			return err
		}
		list = []located{b}
	} else if list, bad, asked, err = e.ask(ctx, at); err != nil {
		return err
	}
	switch format {
	case "json", "yaml":
		if name != "" {
			err = writeDocument(e.stdout, format, list[0].Backend)
			break
		}
		l := api.BackendList{Backends: []api.Backend{}}
		for _, b := range list {
			l.Backends = append(l.Backends, b.Backend)
		}
		err = writeDocument(e.stdout, format, l)
	default:
		err = e.statusTable(list, format == "wide")
		switch {
		case len(list) > 0 || len(bad) > 0:
		case asked > 0:
			fmt.Fprintln(e.stderr, "ebb: the node agent has no backends; name some under services in its configuration")
		default:
			fmt.Fprintf(e.stderr, "ebb: no ebb runs here (no socket in %s); start one with: ebb run -- CMD, the node agent with: systemctl start ebb-agent\n",
				strings.Join(api.RunDirs(e.getenv, e.uid), " or "))
		}
	}
	if err != nil {
		return err
	}
	e.sayHints(bad)
	if len(list) == 0 && len(bad) > 0 {
		return &exitError{code: exitFailed}
	}
	return nil
}

func (e *environment) statusTable(list []located, wide bool) error {
	if len(list) == 0 {
		return nil
	}
	t := table{colour: e.colour(e.stdout)}
	head := []string{"BACKEND", "SERVICE", "STATE", "IN FLIGHT", "ACTIVE", "IDLE", "STALLED", "QUEUED", "DRAIN"}
	if wide {
		head = append(head, "GEN", "MODE", "SINCE", "PROTOCOL", "NEW", "DATAPATH", "HANDSHAKE", "UNUSED", "CLOSING", "LATE", "SESSIONS", "HOLDS", "WARNINGS",
			"UNIT", "PID", "OWNER", "LISTENERS")
	}
	t.head(head...)
	for _, b := range list {
		c := b.Counts
		row := []any{
			line(b.Name), line(b.Service), stateCell(b.State), number(b.InFlight), number(c.Active), number(c.Idle), number(c.Stalled),
			number(c.Queued), drainCell(b.Drain),
		}
		if wide {
			row = append(row, b.Gen, b.Mode, sinceText(b.Backend, time.Now()), b.Protocol, b.OnNew.Chosen, guardedCell(b.Backend), number(c.Handshake),
				number(c.Unused), number(c.Closing), lateText(b.Drain), sessionsCell(b.Backend), len(leases(b.Backend)), warnings(b.Backend), line(cmp.Or(b.Unit, "–")), b.PID, b.Owner.PID,
				listeners(b.Listeners))
		}
		t.row(row...)
	}
	if err := t.write(e.stdout, ""); err != nil {
		return err
	}
	for _, b := range list {
		for _, w := range b.Warnings {
			if _, err := fmt.Fprintf(e.stdout, "%s %s: %s\n", paint("‼", yellow, t.colour), line(b.Name), line(w)); err != nil {
				return err
			}
		}
		for _, n := range b.NotCovered {
			if _, err := fmt.Fprintf(e.stdout, "  %s: not covered: %s (%s)\n", line(b.Name), line(n.What), line(n.Why)); err != nil {
				return err
			}
		}
	}
	return nil
}

// since is when a backend entered its state, as far as its last drain and its owner's start tell.
func since(b api.Backend) time.Time {
	d := b.Drain
	switch {
	case d == nil || b.State == drain.StateServing && d.Outcome != drain.OutcomeCancelled:
		return b.Owner.Started
	case d.Ended != nil:
		return *d.Ended
	case b.State == drain.StateFlushing:
		for _, p := range d.Phases {
			if p.Phase == drain.PhaseFlush {
				return p.At
			}
		}
	}
	return d.Begun
}

func sinceText(b api.Backend, now time.Time) string {
	s := since(b)
	if now.Sub(s) < 12*time.Hour {
		return clockTime(s)
	}
	return s.Local().Format("2006-01-02")
}

// lateText is the number of connections that have come since the drain began.
func lateText(d *api.Drain) string {
	if d == nil || d.Late == nil {
		return "–"
	}
	return fmt.Sprint(d.Late.Admitted + d.Late.Refused + d.Late.Redirected + d.Late.Adopted)
}

// warnings is how many there are, which the lines below and `ebb explain` tell.
func warnings(b api.Backend) cell {
	n := len(b.Warnings)
	if b.Drain != nil {
		n += len(b.Drain.Warnings)
	}
	if n == 0 {
		return cell{text: "0"}
	}
	return cell{text: fmt.Sprint(n), paint: yellow}
}

// drainCell is where the drain stands, in a few words.
func drainCell(d *api.Drain) cell {
	switch {
	case d == nil:
		return cell{text: "–"}
	case d.Running():
		return cell{text: fmt.Sprintf("%s, %s left", d.Phase(), brief(time.Until(d.Deadline))), paint: yellow}
	}
	c := cell{text: string(d.Outcome)}
	if d.Ended != nil {
		c.text += " after " + brief(d.Ended.Sub(d.Begun))
	}
	if d.WouldHave {
		c.text += " (observed)"
	}
	c.paint = outcomeColour(d)
	return c
}

func outcomeColour(d *api.Drain) string {
	switch d.Outcome {
	case "drained", "cancelled":
		return green
	case "lost":
		return red
	}
	return yellow
}

func guardedCell(b api.Backend) cell {
	if b.PID == 0 {
		return cell{text: "–"} // nothing runs
	}
	if b.Guarded {
		return cell{text: string(b.Datapath)}
	}
	return cell{text: string(b.Datapath) + " (unguarded)", paint: yellow}
}

func listeners(ls []api.Listener) string {
	var out []string
	for _, l := range ls {
		s := line(l.Address)
		if l.Protocol != "tcp" {
			s = l.Protocol + "/" + s
		}
		if !l.Covered {
			s += " (left alone)"
		}
		out = append(out, s)
	}
	return strings.Join(out, ", ")
}

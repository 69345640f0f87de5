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
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/ebbproxy/ebb/internal/api"
)

func newEventsCmd(env *environment) *cobra.Command {
	var c eventsCall
	cmd := &cobra.Command{
		Use:   "events [BACKEND]",
		Short: "Show numbered events as JSON lines",
		Long: `Shows what happened, one JSON object a line. The numbers (seq) are those of one
process: go on after the last one seen with --from. Where the log no longer holds
what was asked for, an event of type events.lost says so.

--follow goes on when the node agent is restarted, with no event shown twice; where
its numbers have begun again, an event of type events.lost says so. It ends with the
process that it follows where that is an ebb run.`,
		Example: `  ebb events --follow
  ebb events web --from 120`,
		Args:              atMost(1),
		ValidArgsFunction: env.completeBackends,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				c.name = args[0]
			}
			c.resume = cmd.Flags().Changed("from")
			return env.events(cmd.Context(), c)
		},
	}
	cmd.Flags().BoolVarP(&c.follow, "follow", "f", false, "go on with the events to come, until interrupted")
	cmd.Flags().Uint64Var(&c.from, "from", 0, "begin at the event with this `number` (default: the oldest retained)")
	addAPI(cmd, &c.at)
	return cmd
}

// eventsCall is one call of `ebb events`.
type eventsCall struct {
	at     where
	name   string
	follow bool
	from   uint64
	resume bool // --from was given
}

func (e *environment) events(ctx context.Context, c eventsCall) error {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	clients, bad, err := e.eventSources(ctx, c)
	if err != nil {
		return err
	}
	e.sayHints(bad)
	if len(clients) == 0 {
		if len(bad) > 0 {
			return &exitError{code: exitFailed}
		}
		return fmt.Errorf("no ebb runs here (no socket in %s); start one with: ebb run -- CMD, the node agent with: systemctl start ebb-agent", strings.Join(api.RunDirs(e.getenv, e.uid), " or "))
	}
	if c.resume && len(clients) > 1 {
		var paths []string
		for _, cl := range clients {
			paths = append(paths, cl.Path())
		}
		return usagef("--from is a number of one process, and %d answer; choose with --api %s, or name a BACKEND", len(clients), strings.Join(paths, " or --api "))
	}
	if c.follow {
		return e.followEvents(ctx, c, clients)
	}
	var (
		all  []api.Event
		errs []error
	)
	for _, cl := range clients {
		for ev, err := range cl.Events(ctx, c.from, false) {
			if err != nil {
				errs = append(errs, err)
				break
			}
			if c.wants(ev) {
				all = append(all, ev)
			}
		}
	}
	slices.SortStableFunc(all, func(a, b api.Event) int { return cmp.Or(a.Time.Compare(b.Time), cmp.Compare(a.Seq, b.Seq)) })
	if len(clients) == 1 {
		slices.SortStableFunc(all, func(a, b api.Event) int { return cmp.Compare(a.Seq, b.Seq) })
	}
	for _, ev := range all {
		if err := e.writeEvent(ev); err != nil {
			return err
		}
	}
	return errors.Join(errs...)
}

// wants says whether ev is to be shown. What was lost may have been of any backend.
func (c eventsCall) wants(ev api.Event) bool {
	return c.name == "" || ev.Backend == c.name || ev.Type == api.EventLost
}

func (e *environment) eventSources(ctx context.Context, c eventsCall) ([]*api.Client, []silent, error) {
	if c.name != "" {
		b, err := e.find(ctx, c.at, c.name)
		return []*api.Client{b.client}, nil, err
	}
	found, err := e.sockets(ctx, c.at)
	if err != nil {
		return nil, nil, err
	}
	var (
		clients []*api.Client
		bad     []silent
	)
	for _, f := range found {
		if f.Err != nil {
			bad = append(bad, silent{f.Path, f.Err})
			continue
		}
		clients = append(clients, f.Client)
	}
	return clients, bad, nil
}

// followEvents shows events as they come, until ctx is over or the last of the processes that do not come back has gone.
func (e *environment) followEvents(ctx context.Context, c eventsCall, clients []*api.Client) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var (
		wg   sync.WaitGroup
		mu   sync.Mutex
		errs []error
	)
	for _, cl := range clients {
		wg.Go(func() {
			patience := time.Duration(0)
			if returns(cl.Path()) {
				patience = api.Forever
			}
			tail, err := cl.Tail(ctx, c.from, patience)
			if err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, err)
				return
			}
			defer tail.Close()
			for ev, err := range tail.All() {
				mu.Lock()
				if err == nil && c.wants(ev) {
					err = e.writeEvent(ev)
					if err != nil {
						cancel() // nobody reads any more
					}
				}
				if err != nil && ctx.Err() == nil {
					errs = append(errs, err)
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

func (e *environment) writeEvent(ev api.Event) error {
	b, err := json.Marshal(ev)
	if err != nil {
		return fmt.Errorf("encode an event: %w", err)
	}
	_, err = e.stdout.Write(append(b, '\n'))
	return err
}

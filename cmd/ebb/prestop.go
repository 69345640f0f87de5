// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
)

func newPrestopCmd(env *environment) *cobra.Command {
	var (
		at   where
		name string
	)
	cmd := &cobra.Command{
		Use:   "prestop",
		Short: "Drain the caller's own backend and wait, as a hook before a stop",
		Long: `Drains the backend that the caller belongs to and waits for the end of the drain: for
a preStop hook, or an ExecStop= in front of the others. The backend is that of
--backend, else the one whose processes the node agent counts the caller among.

It never stands in the way of the stop: when the drain's deadline is over, when no
agent answers, or when it knows no such backend, that is said on stderr, and the
exit code is 0 all the same. It never waits beyond the deadline.`,
		Example: `  ebb prestop
  EBB_BACKEND=web ebb prestop`,
		Args: exactly(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			err := env.prestop(ctx, at, name)
			if ctx.Err() != nil {
				return errors.New("the wait was interrupted; the drain goes on")
			}
			if err != nil {
				fmt.Fprintf(env.stderr, "ebb: prestop: %v; the stop goes on\n", err)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&name, "backend", "", "the `name` of the backend, where it is not to be found by the caller's process")
	addAPI(cmd, &at)
	return cmd
}

// errDeadline: the drain's deadline is over and it has not ended.
var errDeadline = errors.New("the drain's deadline is over")

// beginTimeout is how long the answer to the begin of a drain may take: it comes when new connections are decided, which may
// take a test dial.
const beginTimeout = 10 * time.Second

func (e *environment) prestop(ctx context.Context, at where, name string) error {
	b, err := e.ownBackend(ctx, at, name)
	if err != nil {
		return fmt.Errorf("nothing is drained: %w", err)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	begun := time.AfterFunc(beginTimeout, func() {
		cancel(fmt.Errorf("%s is not answering within %s", b.client.Path(), beginTimeout))
	})
	defer begun.Stop()
	tail, giveUp, err := openTail(ctx, b.client)
	if err != nil {
		return fmt.Errorf("%s is not drained: %w", b.Name, err)
	}
	defer giveUp()
	defer tail.Close()
	t := &target{located: b}
	request := api.DrainRequest{Cause: drain.CausePrestop, Reason: "stop hook"}
	t.drain, err = b.client.Drain(ctx, b.Name, request)
	if p := (*api.Problem)(nil); errors.As(err, &p) && p.Field == "cause" {
		request.Cause = "" // an older ebb, which does not tell causes apart
		t.drain, err = b.client.Drain(ctx, b.Name, request)
	}
	if err != nil {
		return fmt.Errorf("%s is not drained: %w", b.Name, err)
	}
	if !begun.Stop() {
		return context.Cause(ctx)
	}
	if len(e.enforced([]*target{t})) == 0 {
		return nil
	}
	begin := t.drain
	go func() {
		waitDeadlines(ctx, b.client, 0, begin)
		cancel(errDeadline)
	}()
	awaitEnds(ctx, tail, giveUp, []*target{t}, e.newProgress())
	if ctx.Err() != nil && t.err != nil {
		return fmt.Errorf("%s has not ended its drain: %w", b.Name, context.Cause(ctx))
	}
	return t.err
}

// ownBackend is the backend of that name, wherever it is served, or, without one, the backend that the node agent says this
// process belongs to.
func (e *environment) ownBackend(ctx context.Context, at where, name string) (located, error) {
	var unknown error
	if name != "" {
		b, err := e.find(ctx, at, name)
		if err == nil || at.address != "" {
			return b, err
		}
		unknown = err
	}
	if at.address == "" {
		at.address = e.appSocket()
	}
	all, bad, err := e.backends(ctx, at)
	switch {
	case unknown != nil && (err != nil || len(all) != 1 || all[0].Name != name):
		return located{}, unknown
	case err != nil:
		return located{}, err
	case len(bad) > 0:
		return located{}, errors.New(bad[0].hint())
	case len(all) != 1:
		return located{}, fmt.Errorf("%s has %d backends; name one with --backend", at.address, len(all))
	}
	return all[0], nil
}

// appSocket is the socket of applications: what a supervisor of ours says, else the first there is.
func (e *environment) appSocket() string {
	if p := e.getenv("EBB_APP_SOCKET"); p != "" {
		return p
	}
	dirs := api.RunDirs(e.getenv, e.uid)
	for _, d := range dirs {
		if p := filepath.Join(d, api.AppSocket); exists(p) {
			return p
		}
	}
	return filepath.Join(dirs[0], api.AppSocket)
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

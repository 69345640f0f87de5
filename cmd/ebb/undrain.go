// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/ebbproxy/ebb/internal/api"
)

func newUndrainCmd(env *environment) *cobra.Command {
	var (
		at     where
		reason string
	)
	output := newWord("table", "table", "json", "yaml")
	cmd := &cobra.Command{
		Use:   "undrain BACKEND",
		Short: "Take a drain back, until the flush has begun",
		Long: `Takes a drain back: admission opens, readiness is good again, and the drain ends as
cancelled. After the flush has begun it is refused: the application has been told
to end.`,
		Example:           `  ebb undrain web`,
		Args:              exactly(1, "BACKEND"),
		ValidArgsFunction: env.completeBackends,
		RunE: func(cmd *cobra.Command, args []string) error {
			return env.act(cmd.Context(), at, args[0], output.value, "undrain", func(ctx context.Context, b located) (api.Drain, string, error) {
				d, err := b.client.Undrain(ctx, b.Name, api.UndrainRequest{Reason: reason})
				return d, "serves again", err
			})
		},
	}
	cmd.Flags().StringVar(&reason, "reason", "", "why, for the journal and the report")
	addAPI(cmd, &at)
	addOutput(cmd, output)
	return cmd
}

// act does one thing to one backend and says what came of it.
func (e *environment) act(ctx context.Context, at where, name, format, verb string,
	do func(context.Context, located) (api.Drain, string, error)) error {
	b, err := e.find(ctx, at, name)
	if err != nil {
		return err
	}
	d, done, err := do(ctx, b)
	if err != nil {
		return fmt.Errorf("%s %s: %w", verb, name, err)
	}
	if format != "table" {
		return writeDocument(e.stdout, format, d)
	}
	_, err = fmt.Fprintf(e.stdout, "%s: %s (drain %s)\n", line(name), done, d.ID)
	return err
}

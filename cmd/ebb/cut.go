// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/ebbproxy/ebb/internal/api"
)

func newCutCmd(env *environment) *cobra.Command {
	var (
		at     where
		reason string
	)
	output := newWord("table", "table", "json", "yaml")
	cmd := &cobra.Command{
		Use:   "cut BACKEND",
		Short: "End a drain's wait now",
		Long: `Ends the wait of a running drain now, as if its time had run out: the survivors are
listed, the application is flushed and what is left is ended as the drain's
on_deadline says.`,
		Example:           `  ebb cut web`,
		Args:              exactly(1, "BACKEND"),
		ValidArgsFunction: env.completeBackends,
		RunE: func(cmd *cobra.Command, args []string) error {
			return env.act(cmd.Context(), at, args[0], output.value, "cut", func(ctx context.Context, b located) (api.Drain, string, error) {
				d, err := b.client.Cut(ctx, b.Name, api.CutRequest{Reason: reason})
				return d, "its wait is over", err
			})
		},
	}
	cmd.Flags().StringVar(&reason, "reason", "", "why, for the journal and the report")
	addAPI(cmd, &at)
	addOutput(cmd, output)
	return cmd
}

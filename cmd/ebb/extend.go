// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/ebbproxy/ebb/internal/api"
)

func newExtendCmd(env *environment) *cobra.Command {
	var (
		at     where
		reason string
		by     time.Duration
	)
	output := newWord("table", "table", "json", "yaml")
	cmd := &cobra.Command{
		Use:   "extend BACKEND --by D",
		Short: "Move a drain's deadline later",
		Long: `Moves the deadline of a running drain later. Nothing else lengthens a drain. It
cannot go beyond the moment at which an orchestrator kills, where that is known.`,
		Example:           `  ebb extend web --by 30s --reason "upload still running"`,
		Args:              exactly(1, "BACKEND"),
		ValidArgsFunction: env.completeBackends,
		RunE: func(cmd *cobra.Command, args []string) error {
			if !cmd.Flags().Changed("by") {
				return usagef("--by is missing: by how much, such as --by 30s")
			}
			if by <= 0 {
				return usagef("--by %s is not greater than 0", by)
			}
			return env.act(cmd.Context(), at, args[0], output.value, "extend", func(ctx context.Context, b located) (api.Drain, string, error) {
				d, err := b.client.Extend(ctx, b.Name, api.ExtendRequest{Extra: api.Duration(by), Reason: reason})
				return d, fmt.Sprintf("deadline now %s, in %s", clockTime(d.Deadline), brief(time.Until(d.Deadline))), err
			})
		},
	}
	cmd.Flags().DurationVar(&by, "by", 0, "by how much")
	cmd.Flags().StringVar(&reason, "reason", "", "why, for the journal and the report")
	addAPI(cmd, &at)
	addOutput(cmd, output)
	return cmd
}

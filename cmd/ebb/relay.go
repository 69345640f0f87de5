// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/spf13/cobra"

	"github.com/ebbproxy/ebb/internal/relay"
)

func newRelayCmd(env *environment) *cobra.Command {
	return &cobra.Command{
		Use:   relay.Arg,
		Short: "Carry late connections (internal)",
		Long: `Carry late connections of a backend. It is started by the backend's owner, which hands over a listener and
a control socket as descriptors 3 and 4; it cannot be used by hand.`,
		Hidden: true,
		Args:   exactly(0, "an argument"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return relay.Run(cmd.Context(), env.logger(env.stderr, false))
		},
	}
}

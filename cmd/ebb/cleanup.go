// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ebbproxy/ebb/internal/agent"
	"github.com/ebbproxy/ebb/internal/config"
)

func newCleanupCmd(env *environment) *cobra.Command {
	var bpffs, state string
	cmd := &cobra.Command{
		Use:   "cleanup",
		Short: "Remove all that Ebb ever pinned on this host",
		Long: `Remove every program, map and link that Ebb pinned, of any version, and the sockets, journals and
locks of runs and of an agent that have ended. It needs no running ebb. Those that live go on, without
admission and with unknown counts.`,
		Args: exactly(0, ""),
		RunE: func(_ *cobra.Command, _ []string) error {
			removed, alive, err := agent.Cleanup(agent.HostOptions{BPFFS: bpffs, RunDir: env.runDir(), StateDir: state})
			for _, path := range removed {
				if _, werr := fmt.Fprintln(env.stdout, "removed", path); werr != nil {
					return werr
				}
			}
			if err != nil {
				return err
			}
			if len(removed) == 0 {
				fmt.Fprintln(env.stdout, "nothing to remove")
			}
			if len(alive) > 0 {
				fmt.Fprintf(env.stderr, "ebb: still running, and without admission from now on: %s\n", strings.Join(alive, ", "))
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&bpffs, "bpffs", "", "`directory` in a bpffs for what is pinned (default: /sys/fs/bpf/ebb)")
	cmd.Flags().StringVar(&state, "state-dir", config.DefaultStateDir, "`directory` that the agent's configuration names as state.dir")
	return cmd
}

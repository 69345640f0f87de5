// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/ebbproxy/ebb/internal/agent"
)

func newOpenCmd(env *environment) *cobra.Command {
	var (
		all, resume bool
		bpffs       string
	)
	cmd := &cobra.Command{
		Use:   "open --all | --resume",
		Short: "The kill switch: open every admission of this host",
		Long: `Open every admission of this host at once, whoever drains. It writes one pinned word that every
program reads, and needs neither a running ebb nor a journal. Drains that run go on with unknown counts,
since new connections may come; --resume lifts it.

A service address of the node agent at which nobody listens goes on to be steered: nothing else is there.`,
		Args: exactly(0, ""),
		RunE: func(_ *cobra.Command, _ []string) error {
			if all == resume {
				return usagef("want either --all or --resume")
			}
			had, err := agent.OpenAll(agent.HostOptions{BPFFS: bpffs, RunDir: env.runDir()}, all)
			if err != nil {
				return err
			}
			said := "every admission of this host is open, until `ebb open --resume`"
			switch {
			case !had:
				said = "nothing is installed on this host, so nothing was closed"
			case resume:
				said = "admission is Ebb's to decide again"
			}
			_, err = fmt.Fprintln(env.stdout, said)
			return err
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "open everything")
	cmd.Flags().BoolVar(&resume, "resume", false, "lift the kill switch")
	cmd.Flags().StringVar(&bpffs, "bpffs", "", "`directory` in a bpffs for what is pinned (default: /sys/fs/bpf/ebb)")
	return cmd
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"io/fs"
	"log/slog"
	"slices"

	"github.com/spf13/cobra"

	"github.com/ebbproxy/ebb/internal/agent"
	"github.com/ebbproxy/ebb/internal/config"
	"github.com/ebbproxy/ebb/internal/front"
)

// defaultConfig is where `ebb agent` looks for its configuration. That one may be missing.
const defaultConfig = "/etc/ebb/agent.yaml"

func newAgentCmd(env *environment) *cobra.Command {
	var (
		path, datapath        string
		standby, check, print bool
	)
	cmd := &cobra.Command{
		Use:   "agent [flags]",
		Short: "Own the backends of this host",
		Long: `Own the backends of this host that the configuration names: count their connections,
steer services over those that are ready, and drain one on request.

SIGHUP reads the configuration again; a bad one changes nothing. SIGTERM gives up what
the agent owns at once and leaves it in place: counts, rules, deadlines and relays go on,
and the next agent takes them over.`,
		Example: `  ebb agent --check-config --config agent.yaml
  ebb agent --config /etc/ebb/agent.yaml
  ebb agent --standby`,
		Args: exactly(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !slices.Contains([]string{"auto", "bpf", "none"}, datapath) {
				return usagef("--datapath %q: want one of auto, bpf, none", datapath)
			}
			log := slog.New(slog.NewJSONHandler(env.stderr, nil))
			load := func() (*config.Config, error) {
				c, err := agent.LoadConfig(cmd.Context(), path, func(err error) {
					if !check && !print {
						log.Warn("the configuration is read by the agent itself, which is root", "err", err)
					}
				})
				if errors.Is(err, fs.ErrNotExist) && !cmd.Flags().Changed("config") {
					return config.Parse(path, nil)
				}
				return c, err
			}
			if !check && !print {
				if err := agent.Confine(); err != nil {
					return err
				}
			}
			c, err := load()
			if err != nil || check && !print {
				return err
			}
			if print {
				b, err := c.YAML()
				if err != nil {
					return err
				}
				_, err = env.stdout.Write(b)
				return err
			}
			o := agent.AgentOptions{
				Config: c, Reload: load, Standby: standby, Datapath: datapath, RunDir: env.runDir(),
				Log: log,
			}
			o.Version, o.Commit = buildVersion()
			return agent.RunAgent(cmd.Context(), o)
		},
	}
	fl := cmd.Flags()
	fl.StringVar(&path, "config", defaultConfig, "`file` with the configuration; the default one may be missing")
	fl.StringVar(&datapath, "datapath", "auto", "auto, bpf, or none (count by sock_diag, without privilege)")
	fl.BoolVar(&standby, "standby", false, "wait until the agent that owns this host goes, and take over; one that hangs for 11 s is killed")
	fl.BoolVar(&check, "check-config", false, "say what is wrong with the configuration, and end")
	fl.BoolVar(&print, "print-config", false, "print the effective configuration, and end")
	complete(cmd, "datapath", []string{"auto", "bpf", "none"})
	return cmd
}

func newFrontCmd(env *environment) *cobra.Command {
	var parse string
	cmd := &cobra.Command{
		Use:   front.Arg,
		Short: "Serve the agent's API without privilege (internal)",
		Long: `Serve the API of a node agent without privilege. It is started by the agent, which hands over its sockets;
it cannot be used by hand.`,
		Hidden: true,
		Args:   exactly(0, "an argument"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if parse != "" {
				return front.Parse(parse, env.stdin, env.stdout)
			}
			return front.Main(cmd.Context(), slog.New(slog.NewJSONHandler(env.stderr, nil)))
		},
	}
	cmd.Flags().StringVar(&parse, "parse-config", "", "read a configuration, of the file named `name`, from standard input")
	return cmd
}

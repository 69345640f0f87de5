// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"

	"github.com/spf13/cobra"

	"github.com/ebbproxy/ebb/internal/demo"
)

func newDemoCmd(env *environment) *cobra.Command {
	var (
		o      demo.Options
		inside string
		output = newWord("text", "text", "json")
		path   = newWord("auto", "auto", "bpf", "none")
	)
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Show what Ebb does, on this machine, in about half a minute",
		Long: `Two ordinary web servers share the work of a few hundred clients, and one of them
has to stop. The demo shows what the clients notice: without Ebb, with it, with it
when newcomers are to be turned away, and with it when it is killed halfway. It ends
with a table and a verdict, which are counted and not assumed.

Everything is real, and everything is in namespaces of its own: nothing outside is
touched and nothing stays. The exit code is 0 only if nothing was lost with Ebb.`,
		Example: `  sudo ebb demo
  sudo ebb demo --acts drain --rate 1000 --keep-alive 200
  sudo ebb demo -o json`,
		Args: atMost(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if inside != "" {
				return exitWith(demo.Inside(cmd.Context(), inside, env.stdout, env.stderr), nil)
			}
			for name, given := range map[string]*int{"keep-alive": &o.KeepAlive, "slow": &o.Slow} {
				if cmd.Flags().Changed(name) && *given == 0 {
					*given = -1 // none, where the zero option is the default
				}
			}
			if cmd.Flags().Changed("rate") && o.Rate == 0 {
				o.Rate = -1
			}
			if cmd.Flags().Changed("gap") && o.Gap == 0 {
				o.Gap = -1
			}
			_, o.Terminal = env.terminal(env.stdout)
			o.Color = env.colour(env.stdout)
			o.JSON = output.value == "json"
			o.Datapath = path.value
			o.Stdout, o.Stderr = env.stdout, env.stderr
			o.Inside = func(spec string) []string { return []string{"demo", "--inside", spec} }
			code, err := demo.Run(cmd.Context(), o)
			if errors.Is(err, demo.ErrOption) {
				return &usageError{err}
			}
			return exitWith(code, err)
		},
	}
	f := cmd.Flags()
	f.StringSliceVar(&o.Acts, "acts", demo.Acts, "which acts to play, in which order")
	f.Float64Var(&o.Rate, "rate", 300, "new connections a second")
	f.IntVar(&o.KeepAlive, "keep-alive", 30, "clients that keep their connection")
	f.DurationVar(&o.Gap, "gap", 0, "mean pause of such a client between two requests; 0: none (default 50ms)")
	f.IntVar(&o.Slow, "slow", 10, "clients that wait for a slow answer at any time")
	f.DurationVar(&o.SlowFor, "slow-for", 0, "how long a slow answer takes (default 3s)")
	f.DurationVar(&o.Lag, "balancer-lag", 0, "how late the load balancer learns that a server leaves (default 3s)")
	f.DurationVar(&o.Warm, "warm-up", 0, "load before the signal (default 1.5s)")
	f.DurationVar(&o.Grace, "grace", 0, "--grace of ebb run (default its own)")
	f.Var(path, "datapath", "--datapath of ebb run")
	f.StringVar(&inside, "inside", "", "play in the namespaces that this process is in")
	f.VarP(output, "output", "o", "how to show it")
	complete(cmd, "output", output.known)
	complete(cmd, "datapath", path.known)
	complete(cmd, "acts", demo.Acts)
	_ = f.MarkHidden("inside") // it fails on a flag that does not exist
	return cmd
}

// exitWith is an error for the code, or nil for 0.
func exitWith(code int, err error) error {
	if code == 0 && err == nil {
		return nil
	}
	return &exitError{code: code, err: err}
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// run is the whole program: it returns the exit code.
func run(ctx context.Context, env environment) int {
	root := newRootCmd(&env)
	root.SetArgs(env.args)
	root.SetIn(env.stdin)
	root.SetOut(env.stdout)
	root.SetErr(env.stderr)
	cmd, err := root.ExecuteContextC(ctx)
	name := ""
	for c := cmd; c != nil && c.HasParent(); c = c.Parent() {
		name = c.Name() // that of the command right below ebb
	}
	return env.exitCode(name, err)
}

func newRootCmd(env *environment) *cobra.Command {
	root := &cobra.Command{
		Use:   "ebb",
		Short: "Drain TCP backends without losing a connection",
		Long: `Ebb drains TCP backends on a Linux node without losing a connection and without
changing the application.

Each flag can be given as a variable: EBB_GRACE for --grace. EBB_RUN_DIR is the
directory for sockets.`,
		Example: `  ebb run --protocol http1 -- nginx -g 'daemon off;'
  ebb drain web --wait
  ebb explain web`,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return cmd.Help()
			}
			return usagef("there is no command %q%s", args[0], didYouMean(cmd.SuggestionsFor(args[0])))
		},
		SilenceErrors:              true,
		SilenceUsage:               true,
		SuggestionsMinimumDistance: 2,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			return applyVariables(cmd.Flags(), env.getenv)
		},
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		var unknown *pflag.NotExistError
		if errors.As(err, &unknown) {
			var names []string
			cmd.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
			if near := nearest(unknown.GetSpecifiedName(), names); near != "" {
				return usagef("%w%s", err, didYouMean([]string{"--" + near}))
			}
		}
		return &usageError{err}
	})
	root.AddCommand(
		newRunCmd(env), newAgentCmd(env), newFrontCmd(env), newStatusCmd(env), newExplainCmd(env),
		newDrainCmd(env), newUndrainCmd(env), newExtendCmd(env), newCutCmd(env),
		newReportCmd(env), newPrestopCmd(env), newHoldCmd(env), newEventsCmd(env), newCheckCmd(env), newOpenCmd(env), newCleanupCmd(env),
		newDemoCmd(env), newVersionCmd(env), newRelayCmd(env), newSystemdCmd(env),
	)
	return root
}

// applyVariables sets each flag that was not given from its EBB_ variable. A list is separated by commas.
func applyVariables(flags *pflag.FlagSet, getenv func(string) string) error {
	var bad error
	flags.VisitAll(func(f *pflag.Flag) {
		// EBB_APP_SOCKET says where a supervisor of ours serves us, not where to serve.
		if bad != nil || f.Changed || f.Name == "help" || f.Name == "app-socket" {
			return
		}
		name := "EBB_" + strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))
		v := getenv(name)
		if v == "" {
			return
		}
		if list, ok := f.Value.(pflag.SliceValue); ok {
			if err := list.Replace(strings.Split(v, ",")); err != nil {
				bad = usagef("%s: %w", name, err)
			}
			f.Changed = true
			return
		}
		if err := flags.Set(f.Name, v); err != nil {
			var invalid *pflag.InvalidValueError
			if errors.As(err, &invalid) {
				err = invalid.Unwrap() // that of the flag's own text names the flag, which nobody has given
			}
			bad = usagef("%s: invalid value %q: %w", name, v, err)
		}
	})
	return bad
}

func didYouMean(names []string) string {
	if len(names) == 0 {
		return ""
	}
	return "; did you mean " + strings.Join(names, " or ") + "?"
}

// nearest is the name that s most likely is a misspelling of, or empty.
func nearest(s string, names []string) string {
	best, at := "", 3 // three edits are another word
	for _, n := range names {
		if d := distance(s, n); d < at && d < len(n) {
			best, at = n, d
		}
	}
	if best == "" {
		for _, n := range names {
			if len(s) >= 3 && strings.HasPrefix(n, s) {
				return n
			}
		}
	}
	return best
}

// distance is the number of single-byte edits, a swap of neighbours among them, from a to b.
func distance(a, b string) int {
	d := make([][]int, len(a)+1)
	for i := range d {
		d[i] = make([]int, len(b)+1)
		d[i][0] = i
	}
	for j := range d[0] {
		d[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			d[i][j] = min(d[i-1][j]+1, d[i][j-1]+1, d[i-1][j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				d[i][j] = min(d[i][j], d[i-2][j-2]+1)
			}
		}
	}
	return d[len(a)][len(b)]
}

// exactly wants n arguments, which what names.
func exactly(n int, what string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		switch {
		case len(args) < n:
			return usagef("%s is missing", what)
		case len(args) > n:
			return usagef("there is an argument too many: %q", args[n])
		}
		return nil
	}
}

// atMost wants at most n arguments.
func atMost(n int) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) > n {
			return usagef("there is an argument too many: %q", args[n])
		}
		return nil
	}
}

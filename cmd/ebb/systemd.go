// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/systemd"
)

// installedPath is where the package puts the binary: the only one that an image can be expected to have.
const installedPath = "/usr/bin/ebb"

func newSystemdCmd(env *environment) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "systemd enable|disable UNIT",
		Short: "Let a systemd service drain before it stops",
		Long: `Writes or removes a drop-in of a systemd service, so that each stop of it, by
systemctl, at an upgrade or when the machine goes down, begins with a drain.`,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return cmd.Help()
			}
			return usagef("%q: want enable or disable%s", args[0], didYouMean(cmd.SuggestionsFor(args[0])))
		},
		SuggestionsMinimumDistance: 2,
	}
	cmd.AddCommand(newSystemdEnableCmd(env), newSystemdDisableCmd(env))
	return cmd
}

func newSystemdEnableCmd(env *environment) *cobra.Command {
	var (
		grace time.Duration
		root  string
		dry   bool
	)
	cmd := &cobra.Command{
		Use:   "enable UNIT",
		Short: "Write the drop-in that drains a service before it stops",
		Long: `Writes /etc/systemd/system/UNIT.d/50-ebb.conf and shows what it changes: "ebb drain"
goes in front of the unit's own ExecStop=, and TimeoutStopSec= leaves it the time.
If the drain fails, or no agent runs, the unit stops as it did before.

The unit's own ExecStop= lines are repeated in the drop-in, because systemd can
only replace such a list. When its package changes them, run this again. For a
unit that runs "ebb run" only KillMode=mixed and the timeout are set: its stop
signal is what begins the drain. A running service need not be restarted.`,
		Example: `  ebb systemd enable nginx --dry-run
  ebb systemd enable web@blue --grace 2m
  ebb systemd enable nginx --root /mnt/image`,
		Args: exactly(1, "UNIT"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if grace < time.Second {
				return usagef("--grace %s: want at least 1s", grace)
			}
			return env.systemdEnable(cmd.Context(), hostOf(root), args[0], grace, dry)
		},
	}
	cmd.Flags().DurationVar(&grace, "grace", drain.DefaultGrace, "the whole budget of the drain")
	addSystemd(cmd, &root, &dry)
	return cmd
}

func newSystemdDisableCmd(env *environment) *cobra.Command {
	var (
		root string
		dry  bool
	)
	cmd := &cobra.Command{
		Use:   "disable UNIT",
		Short: "Remove the drop-in again",
		Long: `Removes what "ebb systemd enable" has written, and nothing else: a drop-in that was
changed by hand is left alone. A running service need not be restarted.`,
		Example: `  ebb systemd disable nginx`,
		Args:    exactly(1, "UNIT"),
		RunE: func(cmd *cobra.Command, args []string) error {
			path, err := hostOf(root).Disable(cmd.Context(), args[0], dry)
			if errors.Is(err, systemd.ErrNotEnabled) {
				_, err = fmt.Fprintf(env.stdout, "nothing to remove: %s does not exist\n", path)
				return err
			}
			if err != nil {
				return usageOf(err)
			}
			verb := "removed"
			if dry {
				verb = "would remove"
			}
			_, err = fmt.Fprintln(env.stdout, verb, path)
			return err
		},
	}
	addSystemd(cmd, &root, &dry)
	return cmd
}

// addSystemd adds the flags that both directions have.
func addSystemd(cmd *cobra.Command, root *string, dry *bool) {
	cmd.Flags().StringVar(root, "root", "", "`directory` of an image to work on instead of this machine")
	cmd.Flags().BoolVar(dry, "dry-run", false, "show what would be done, and do nothing")
}

// hostOf is the image at root, or this machine.
func hostOf(root string) systemd.Host {
	h := systemd.Host{Root: root}
	if root == "" && systemd.Booted() {
		h.Systemctl = systemd.Systemctl
	}
	return h
}

func (e *environment) systemdEnable(ctx context.Context, h systemd.Host, unit string, grace time.Duration, dry bool) error {
	ebb := installedPath
	if h.Root == "" {
		self, err := os.Executable()
		if err == nil {
			self, err = filepath.EvalSymlinks(self)
		}
		if err != nil {
			return fmt.Errorf("find this program: %w", err)
		}
		ebb = self
	}
	p, err := h.Plan(ctx, unit, systemd.Drain{Ebb: ebb, Grace: grace})
	if err != nil {
		return usageOf(err)
	}
	if p.Current {
		_, err := fmt.Fprintf(e.stdout, "nothing to change: %s drains before it stops\n", p.Unit.Name)
		return err
	}
	if _, err := fmt.Fprint(e.stdout, p.Diff()); err != nil {
		return err
	}
	if dry {
		_, err := fmt.Fprintf(e.stdout, "\n%s would be:\n\n%s", p.Path, p.Content)
		return err
	}
	if err := h.Apply(ctx, p); err != nil {
		return err
	}
	_, err = fmt.Fprintf(e.stdout, "\nwrote %s; take it back with: ebb systemd disable %s\n", p.Path, shellWord(p.Unit.Name))
	return err
}

// usageOf makes the error of a wrong name one of usage.
func usageOf(err error) error {
	if errors.Is(err, systemd.ErrName) {
		return &usageError{err}
	}
	return err
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/ebbproxy/ebb/internal/agent"
)

// checkRow is a feature in JSON and YAML.
type checkRow struct {
	Name   string `json:"name"`
	State  string `json:"state"`
	Detail string `json:"detail,omitempty"`
	Hint   string `json:"hint,omitempty"`
}

// checkEvery is the pause between two tries of --wait.
const checkEvery = time.Second

func newCheckCmd(env *environment) *cobra.Command {
	var (
		bpffs   string
		patient time.Duration
	)
	format := newWord("table", "table", "json", "yaml")
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Say what this kernel and host can do for Ebb",
		Long: `Try each thing that Ebb uses on this kernel and host, and say what degrades and what to do.
Nothing is left behind.

  √  works
  ‼  degraded: Ebb has another way, which the line describes
  ×  missing: the exit code is 1`,
		Args: exactly(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			o := agent.HostOptions{BPFFS: bpffs, RunDir: env.runDir()}
			deadline := time.Now().Add(patient)
			features := agent.Check(cmd.Context(), o)
			for missing(features) > 0 && time.Now().Before(deadline) {
				select {
				case <-time.After(checkEvery):
				case <-cmd.Context().Done():
					return cmd.Context().Err()
				}
				features = agent.Check(cmd.Context(), o)
			}
			if err := writeCheck(env, format.value, features); err != nil {
				return err
			}
			if n := missing(features); n > 0 {
				return &exitError{code: exitFailed, err: errors.New(plural(int64(n), "feature") + " missing; see the hints")}
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&bpffs, "bpffs", "", "`directory` in a bpffs for what is pinned (default: /sys/fs/bpf/ebb)")
	cmd.Flags().DurationVar(&patient, "wait", 0, "try again for this long while something is missing")
	addOutput(cmd, format)
	return cmd
}

func missing(fs []agent.Feature) (n int) {
	for _, f := range fs {
		if f.State == agent.FeatureMissing {
			n++
		}
	}
	return n
}

func writeCheck(env *environment, format string, fs []agent.Feature) error {
	if format != "table" {
		rows := make([]checkRow, 0, len(fs))
		for _, f := range fs {
			rows = append(rows, checkRow{f.Name, f.State, f.Detail, f.Hint})
		}
		return writeDocument(env.stdout, format, struct {
			Features []checkRow `json:"features"`
		}{rows})
	}
	marks := map[string]cell{
		agent.FeatureOK: {"√", green}, agent.FeatureDegraded: {"‼", yellow}, agent.FeatureMissing: {"×", red},
	}
	colour := env.colour(env.stdout)
	for _, f := range fs {
		m := marks[f.State]
		if _, err := fmt.Fprintf(env.stdout, "%s %s: %s\n", paint(m.text, m.paint, colour), f.Name, line(f.Detail)); err != nil {
			return err
		}
		if f.Hint != "" && f.State != agent.FeatureOK {
			if _, err := fmt.Fprintf(env.stdout, "    %s\n", line(f.Hint)); err != nil {
				return err
			}
		}
	}
	return nil
}

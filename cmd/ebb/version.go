// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// version and commit are set by the linker (-X main.version=…) in a release; see buildVersion.
var version, commit string

// buildVersion is what the linker was told, else what Go recorded in the binary.
func buildVersion() (v, c string) {
	v, c = version, commit
	if info, ok := debug.ReadBuildInfo(); ok {
		if v == "" && info.Main.Version != "" && info.Main.Version != "(devel)" {
			v = info.Main.Version
		}
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" && c == "" {
				c = s.Value
			}
		}
	}
	if v == "" {
		v = "devel"
	}
	if c == "" {
		c = "unknown"
	}
	return v, c
}

func newVersionCmd(env *environment) *cobra.Command {
	output := newWord("table", "table", "json", "yaml")
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Show version and commit",
		Args:  atMost(0),
		RunE: func(*cobra.Command, []string) error {
			v, c := buildVersion()
			if output.value == "table" {
				_, err := fmt.Fprintf(env.stdout, "ebb %s, commit %s, %s %s/%s\n", v, c, runtime.Version(), runtime.GOOS, runtime.GOARCH)
				return err
			}
			return writeDocument(env.stdout, output.value, map[string]string{
				"version": v, "commit": c, "go": runtime.Version(), "platform": runtime.GOOS + "/" + runtime.GOARCH,
			})
		},
	}
	addOutput(cmd, output)
	return cmd
}

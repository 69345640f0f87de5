// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
)

// inUnit are the backends that a systemd unit runs: matched by it, or with their main process in its cgroup.
func (e *environment) inUnit(unit string, all []located, bad []silent) ([]located, error) {
	if !strings.Contains(unit, ".") {
		unit += ".service" // as systemctl does
	}
	var (
		hits  []located
		there []string
	)
	for _, b := range all {
		units := unitsOf(b)
		if slices.Contains(units, unit) {
			hits = append(hits, b)
			continue
		}
		what := "in no unit"
		if len(units) > 0 {
			what = units[len(units)-1]
		}
		there = append(there, fmt.Sprintf("%s (%s)", line(b.Name), line(what)))
	}
	if len(hits) > 0 {
		return hits, nil
	}
	var msg strings.Builder
	fmt.Fprintf(&msg, "the unit %s runs no backend", line(unit))
	if len(there) > 0 {
		msg.WriteString("; there are: " + strings.Join(there, ", "))
	}
	for _, s := range bad {
		msg.WriteString("\nebb: " + s.hint())
	}
	return nil, errors.New(msg.String())
}

// unitsOf are the units that a backend belongs to, the outermost first.
func unitsOf(b located) []string {
	var units []string
	// The pid of another host's process says nothing here.
	if b.PID > 0 && !remote(b.client.Path()) {
		// A process that has ended is in no unit.
		cgroups, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", b.PID))
		units = unitsIn(string(cgroups))
	}
	if b.Unit != "" {
		units = append(units, b.Unit)
	}
	return units
}

// unitsIn are the units in the text of /proc/PID/cgroup, the outermost first: the parts of a path that have a unit's suffix
// (cgroups(7); systemd's CONTROL_GROUP_INTERFACE).
func unitsIn(cgroups string) []string {
	var units []string
	for l := range strings.Lines(cgroups) {
		parts := strings.SplitN(strings.TrimSpace(l), ":", 3)
		if len(parts) < 3 {
			continue
		}
		for name := range strings.SplitSeq(parts[2], "/") {
			if strings.HasSuffix(name, ".service") || strings.HasSuffix(name, ".scope") {
				if !slices.Contains(units, name) {
					units = append(units, name)
				}
			}
		}
	}
	return units
}

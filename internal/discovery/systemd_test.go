// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A systemd that hangs costs one look one bounded wait, however many units there are, and is asked again by the next.
func TestSystemdHangs(t *testing.T) {
	dir := t.TempDir()
	asked := filepath.Join(dir, "asked")
	program := filepath.Join(dir, "systemctl")
	answers := func(does string) {
		t.Helper()
		if err := os.WriteFile(program, []byte("#!/bin/sh\necho once >>"+asked+"\n"+does+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	oldBooted, oldSystemctl := booted, systemctl
	t.Cleanup(func() { booted, systemctl = oldBooted, oldSystemctl })
	booted, systemctl = dir, program

	var s Snapshot
	tops := []*process{{pid: 7, start: 1}}
	units := []string{"a.service", "b.service", "c.service", "d.service"}
	if err := s.Scan(t.Context()); err != nil {
		t.Fatal(err)
	}
	answers("sleep 60") // a child, which keeps the output open when the shell is killed
	for _, unit := range units {
		if main, control := s.askSystemd(t.Context(), unit, tops); main != 0 || control != 0 {
			t.Errorf("%s: got %d, %d of a systemd that hangs, want none", unit, main, control)
		}
	}
	if b, err := os.ReadFile(asked); err != nil || strings.Count(string(b), "once") != 1 {
		t.Errorf("asked %q, %v, want once for all units", b, err)
	}
	if err := s.Scan(t.Context()); err != nil {
		t.Fatal(err)
	}
	answers("echo MainPID=7")
	for _, unit := range units {
		if main, _ := s.askSystemd(t.Context(), unit, tops); main != 7 {
			t.Errorf("%s: got %d of a systemd that answers again, want 7", unit, main)
		}
	}
}

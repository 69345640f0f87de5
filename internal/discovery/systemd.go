// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"context"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"
)

// booted is there if systemd is the system's manager: sd_booted(3).
var booted = "/run/systemd/system"

// systemctl is the program that asks systemd.
var systemctl = "systemctl"

// askTimeout bounds all questions of one look to a systemd that hangs. It answers in milliseconds.
const askTimeout = 2 * time.Second

// answer is what systemd said of a unit while it had these processes at its top.
type answer struct {
	tops          []process
	main, control int
}

// askSystemd returns the main process of a unit, and the one that systemd runs to start, reload or stop it; 0 if there is
// none or it cannot be asked now. Asking means to execute a program, so the answer is kept until the processes at the top of the
// unit are others.
func (s *Snapshot) askSystemd(ctx context.Context, unit string, tops []*process) (main, control int) {
	if _, err := os.Stat(booted); err != nil {
		return 0, 0
	}
	var ids []process
	for _, p := range tops {
		ids = append(ids, process{pid: p.pid, start: p.start})
	}
	if a, ok := s.mains[unit]; ok && slices.Equal(a.tops, ids) {
		return a.main, a.control
	}
	if s.asked >= askTimeout {
		return 0, 0
	}
	begun := time.Now()
	limited, cancel := context.WithTimeout(ctx, askTimeout-s.asked)
	defer cancel()
	cmd := exec.CommandContext(limited, systemctl, "show", "--property=MainPID,ControlPID", "--", unit)
	cmd.WaitDelay = 100 * time.Millisecond // a child of its that is left may hold the output open
	out, err := cmd.Output()
	s.asked += time.Since(begun)
	if err != nil {
		// Where it cannot be asked, as in most containers, the processes themselves tell as much as there is to know.
		return 0, 0
	}
	main, control = parseShow(string(out))
	if s.mains == nil {
		s.mains = map[string]answer{}
	}
	s.mains[unit] = answer{ids, main, control}
	return main, control
}

// parseShow reads lines like MainPID=1234.
func parseShow(out string) (main, control int) {
	for line := range strings.Lines(out) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		pid, err := strconv.Atoi(value)
		switch {
		case err != nil:
		case key == "MainPID":
			main = pid
		case key == "ControlPID":
			control = pid
		}
	}
	return main, control
}

// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/ebbproxy/ebb/probes"
)

// attach takes over a process that somebody else has started. Its exit status is known where the kernel tells it
// (Linux 6.15).
func (r *runner) attach() (*process, error) {
	pid := r.o.Attach
	start, err := probes.Started(pid)
	if err != nil {
		return nil, fmt.Errorf("attach to process %d: %w", pid, err)
	}
	p, ok := adoptProcess(pid, start)
	if !ok {
		return nil, fmt.Errorf("attach to process %d: %w", pid, probes.ErrGone)
	}
	return p, nil
}

// commandOf is the command line of a process, for the journal and messages.
func commandOf(pid int) []string {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cmdline")
	if err != nil {
		return nil
	}
	return strings.Split(strings.TrimRight(string(b), "\x00"), "\x00")
}

// nameOf is what a process is called: the base name of its program.
func nameOf(pid int) (string, error) {
	argv := commandOf(pid)
	if len(argv) == 0 || argv[0] == "" {
		return "", fmt.Errorf("attach to process %d: there is none, or it is a kernel thread", pid)
	}
	return filepath.Base(argv[0]), nil
}

// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// trampoline is the name under which this binary executes CMD in place of itself. systemd hands listening sockets over to the
// process whose pid LISTEN_PID names (sd_listen_fds(3)), which would be ours: only the child can put its own pid there.
const trampoline = "ebb-activate"

// activated makes the command line go by the trampoline if systemd has handed us sockets. They pass to CMD by themselves,
// since inherited descriptors have no close-on-exec.
func activated(path string, argv, env []string) (string, []string) {
	if !slices.Contains(env, "LISTEN_PID="+strconv.Itoa(os.Getpid())) {
		return path, argv
	}
	return "/proc/self/exe", append([]string{trampoline, path}, argv...)
}

// ExecIfAsked becomes CMD, if the process was started to. The main function calls it first of all.
func ExecIfAsked() {
	if len(os.Args) < 3 || os.Args[0] != trampoline {
		return
	}
	env := slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.HasPrefix(kv, "LISTEN_PID=") })
	err := syscall.Exec(os.Args[1], os.Args[2:], append(env, "LISTEN_PID="+strconv.Itoa(os.Getpid())))
	fmt.Fprintf(os.Stderr, "ebb: execute %s: %v\n", os.Args[1], err)
	os.Exit(ExitNotExecutable)
}

// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/sys/unix"
)

// signals that are never forwarded: they are about ourselves (SIGCHLD), the Go runtime's own (SIGURG, SIGPROF), or come
// from our being a background process on a terminal (SIGTTIN, SIGTTOU) or from our own writes (SIGPIPE).
var keepSignals = map[syscall.Signal]bool{
	unix.SIGCHLD: true, unix.SIGURG: true, unix.SIGPROF: true,
	unix.SIGTTIN: true, unix.SIGTTOU: true, unix.SIGPIPE: true,
}

// DefaultStopSignals are those that ask for a stop. As PID 1 also USR1 and, without a terminal, WINCH count, because
// images set them as STOPSIGNAL (apache httpd: WINCH; haproxy: USR1).
func DefaultStopSignals(pid int, terminal bool) []syscall.Signal {
	s := []syscall.Signal{unix.SIGTERM, unix.SIGINT, unix.SIGQUIT}
	if pid == 1 {
		s = append(s, unix.SIGUSR1)
		if !terminal {
			s = append(s, unix.SIGWINCH)
		}
	}
	return s
}

// catchSignals delivers every signal that can be caught. It is called before anything else, so that a stop that
// comes while the run is still starting is not lost. A signal that we were started with ignored, as nohup does with
// SIGHUP, stays ignored, for CMD too; a caught one is reset by CMD's exec. They are caught to the end of the process: one that
// comes in its last moments changes no exit code.
func catchSignals() <-chan os.Signal {
	c := make(chan os.Signal, 64)
	var list []os.Signal
	for n := syscall.Signal(1); n < 65; n++ {
		if n == unix.SIGKILL || n == unix.SIGSTOP || n == unix.SIGURG || signal.Ignored(n) {
			continue
		}
		list = append(list, n)
	}
	signal.Notify(c, list...)
	return c
}

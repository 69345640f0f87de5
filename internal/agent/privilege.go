// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/config"
	"github.com/ebbproxy/ebb/internal/front"
)

// kept are the capabilities that an agent has a use for. docs/security.md says which, and tests say what breaks without each.
var kept = []int{
	unix.CAP_BPF, unix.CAP_PERFMON, unix.CAP_NET_ADMIN, unix.CAP_SYS_ADMIN, unix.CAP_SYS_PTRACE, unix.CAP_DAC_READ_SEARCH,
	unix.CAP_KILL, unix.CAP_CHOWN, unix.CAP_SETUID, unix.CAP_SETGID, unix.CAP_SYS_RESOURCE,
}

// Confine gives up for ever, for this process and all that it starts, every capability that an agent has no use for, and
// what an exec could give back. It executes the process again, because both belong to a thread and the runtime has started
// several; it returns nil when there is nothing more to give up, and an error if that is not possible.
func Confine() error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	again := false
	caps, err := capabilities()
	if err != nil {
		return err
	}
	if caps.Effective&(1<<unix.CAP_SETPCAP) != 0 { // else whoever started this process has decided
		for c := 0; ; c++ {
			has, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, uintptr(c), 0, 0, 0)
			if errors.Is(err, unix.EINVAL) {
				break // past the last one that this kernel knows
			}
			if err != nil || has == 0 || slices.Contains(kept, c) {
				continue
			}
			if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0); err != nil {
				return fmt.Errorf("drop capability %d: %w", c, err)
			}
			again = true
		}
	}
	nnp, err := unix.PrctlRetInt(unix.PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0)
	if err != nil {
		return fmt.Errorf("read no_new_privs: %w", err)
	}
	if nnp == 0 {
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return fmt.Errorf("set no_new_privs: %w", err)
		}
		again = true
	}
	if !again {
		return nil
	}
	// What whoever started this process has left open is not for what this process starts. Before Linux 5.11 it stays.
	_ = unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC)
	return fmt.Errorf("execute again without privileges that are of no use: %w", syscall.Exec("/proc/self/exe", os.Args, os.Environ()))
}

// capabilities are the lower 32 of this thread.
func capabilities() (unix.CapUserData, error) {
	var caps [2]unix.CapUserData
	if err := unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &caps[0]); err != nil {
		return caps[0], fmt.Errorf("read own capabilities: %w", err)
	}
	return caps[0], nil
}

// separable says whether this process can do anything that a front could not: else there is nothing to keep apart.
func separable() bool {
	caps, err := capabilities()
	return os.Geteuid() == 0 || err == nil && caps.Permitted != 0
}

// LoadConfig reads a configuration, in a process without privilege if this one has any. said tells, once, why it could not
// be started, in which case this one reads it; nil discards.
func LoadConfig(ctx context.Context, path string, said func(error)) (*config.Config, error) {
	if !separable() {
		return config.Load(path)
	}
	c, err := front.Load(ctx, path)
	if errors.Is(err, front.ErrUnavailable) {
		if said != nil {
			said(err)
		}
		return config.Load(path)
	}
	return c, err
}

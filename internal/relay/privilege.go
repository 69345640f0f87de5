// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// wantFDs is the limit of descriptors that the default number of connections needs: two for each, and some for pipes.
const wantFDs = 1 << 18

// securebits that keep user 0 from being given capabilities ever again, capabilities(7): NOROOT, NO_SETUID_FIXUP and
// NO_CAP_AMBIENT_RAISE, each with its lock, and KEEP_CAPS locked off.
const securebits = 0x01 | 0x02 | 0x04 | 0x08 | 0x20 | 0x40 | 0x80

// Unprivileged returns nil in a process that has no capability and can never have one. Any other one gives up all of
// them and executes itself again, because a capability belongs to a thread and the runtime has started several: what
// remains after execve(2) is one thread, that which has given them up. It returns only if that cannot be done, with
// ErrPrivilege.
func Unprivileged() error {
	s, err := readStatus()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrPrivilege, err)
	}
	if s.none() {
		return nil
	}
	runtime.LockOSThread()
	if err := giveUp(); err != nil {
		return fmt.Errorf("%w: %w", ErrPrivilege, err)
	}
	return fmt.Errorf("%w: execute again: %w", ErrPrivilege, syscall.Exec("/proc/self/exe", os.Args, os.Environ()))
}

// giveUp takes everything from the calling thread.
func giveUp() error {
	// While it can be: the limit stays over execve.
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err == nil && lim.Max < wantFDs {
		// Not possible without privilege, and then the relay carries fewer connections, which it says.
		_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: wantFDs, Max: wantFDs})
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	s, err := readThreadStatus()
	if err != nil {
		return err
	}
	// Without CAP_SETPCAP the bounding set stays; under no_new_privs an exec adds nothing from it.
	if s.effective&(1<<unix.CAP_SETPCAP) != 0 {
		if err := unix.Prctl(unix.PR_SET_SECUREBITS, securebits, 0, 0, 0); err != nil {
			return fmt.Errorf("set securebits: %w", err)
		}
		for c := 0; ; c++ {
			err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0)
			if errors.Is(err, unix.EINVAL) {
				break // past the last one that this kernel knows
			}
			if err != nil {
				return fmt.Errorf("drop capability %d from the bounding set: %w", c, err)
			}
		}
	}
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return fmt.Errorf("clear ambient capabilities: %w", err)
	}
	var none [2]unix.CapUserData
	if err := unix.Capset(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &none[0]); err != nil {
		return fmt.Errorf("set capabilities: %w", err)
	}
	return nil
}

// status is what proc(5) says of a thread's privileges.
type status struct {
	inheritable, permitted, effective, bounding, ambient uint64
	noNewPrivs                                           bool
}

// none tells that there is no capability, and that none can come.
func (s status) none() bool {
	return s.inheritable|s.permitted|s.effective|s.ambient == 0 && s.noNewPrivs
}

func readStatus() (status, error) { return readStatusFile("/proc/self/status") }

func readThreadStatus() (status, error) { return readStatusFile("/proc/thread-self/status") }

func readStatusFile(path string) (status, error) {
	f, err := os.Open(path)
	if err != nil {
		return status{}, fmt.Errorf("read own capabilities: %w", err)
	}
	defer f.Close()
	var s status
	var nnp, found int
	in := bufio.NewScanner(f)
	for in.Scan() {
		key, value, _ := strings.Cut(in.Text(), ":")
		var to *uint64
		switch key {
		case "CapInh":
			to = &s.inheritable
		case "CapPrm":
			to = &s.permitted
		case "CapEff":
			to = &s.effective
		case "CapBnd":
			to = &s.bounding
		case "CapAmb":
			to = &s.ambient
		case "NoNewPrivs":
			if _, err := fmt.Sscan(value, &nnp); err != nil {
				return status{}, fmt.Errorf("read own %s: %w", key, err)
			}
			found++
			continue
		default:
			continue
		}
		if _, err := fmt.Sscanf(strings.TrimSpace(value), "%x", to); err != nil {
			return status{}, fmt.Errorf("read own %s: %w", key, err)
		}
		found++
	}
	if err := in.Err(); err != nil {
		return status{}, fmt.Errorf("read own capabilities: %w", err)
	}
	if found != 6 {
		return status{}, fmt.Errorf("read own capabilities: %s has %d of 6 lines", path, found)
	}
	s.noNewPrivs = nnp == 1
	return s, nil
}

// SPDX-License-Identifier: Apache-2.0

package netnstest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
)

// LeakCheck fails the test if, when all else that it set up has been taken down, it leaves behind a
// file descriptor, a goroutine, a child process, a mount below its temporary directory, a cgroup made by
// [Cgroup], or a file below one of the given directories, where it pins. A network namespace without a
// mount lives by descriptors and processes, so those tell of it too. What ends by itself is waited for. Call it before anything else in the test, which must not be parallel to others.
func LeakCheck(t testing.TB, pinDirs ...string) {
	t.Helper()
	// The runtime opens descriptors of its own the first time something waits for one.
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	r.Close()
	w.Close()
	// All temporary directories of a test have one parent.
	in := leakScope{pinDirs: pinDirs, tmp: filepath.Dir(t.TempDir()) + "/"}
	before, err := in.takeInventory()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		var left []string
		var err error
		if eventually(func() bool {
			var after inventory
			after, err = in.takeInventory()
			left = after.minus(before)
			return err == nil && len(left) == 0
		}) {
			return
		}
		if err != nil {
			t.Errorf("look for leaks: %v", err)
		}
		for _, l := range left {
			t.Errorf("leaked %s", l)
		}
	})
}

// inventory counts things by a description that does not depend on numbers given anew.
type inventory map[string]int

func (inv inventory) minus(before inventory) []string {
	var left []string
	for what, n := range inv {
		if extra := n - before[what]; extra > 0 {
			left = append(left, fmt.Sprintf("%d × %s", extra, what))
		}
	}
	slices.Sort(left)
	return left
}

// leakScope is where a test may leave things that others leave too.
type leakScope struct {
	pinDirs []string
	tmp     string
}

func (in leakScope) takeInventory() (inventory, error) {
	inv := make(inventory)
	return inv, errors.Join(
		inv.addDescriptors(),
		inv.addGoroutines(),
		inv.addChildren(),
		inv.addMounts(in.tmp),
		inv.addCgroups(),
		inv.addPins(in.pinDirs),
	)
}

func (inv inventory) addDescriptors() error {
	const dir = "/proc/self/fd"
	fds, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("list descriptors: %w", err)
	}
	for _, fd := range fds {
		target, err := os.Readlink(filepath.Join(dir, fd.Name()))
		if err != nil {
			continue // that of the listing itself
		}
		inv["descriptor "+target]++
	}
	return nil
}

func (inv inventory) addGoroutines() error {
	buf := make([]byte, 1<<20)
	for {
		n := runtime.Stack(buf, true)
		if n < len(buf) {
			buf = buf[:n]
			break
		}
		buf = make([]byte, 2*len(buf))
	}
	for g := range strings.SplitSeq(string(buf), "\n\n") {
		// The first function and the creator stay the same while the numbers and states change.
		var first, creator string
		for i, line := range strings.Split(g, "\n") {
			switch {
			case i == 1:
				first, _, _ = strings.Cut(line, "(0x")
				first, _, _ = strings.Cut(first, "({")
			case strings.HasPrefix(line, "created by "):
				creator, _, _ = strings.Cut(line, " in goroutine")
			}
		}
		// The testing package starts and ends its own as it likes, and runtime ones are no one's leak.
		if strings.HasPrefix(creator, "created by testing.") || creator == "" ||
			strings.HasPrefix(creator, "created by runtime") || strings.HasPrefix(creator, "created by os/signal.") {
			continue
		}
		inv["goroutine in "+first+", "+creator]++
	}
	return nil
}

func (inv inventory) addChildren() error {
	tasks, err := filepath.Glob("/proc/self/task/*/children")
	if err != nil {
		return err
	}
	for _, task := range tasks {
		children, err := os.ReadFile(task)
		if err != nil {
			continue // the thread has ended, and its children are another's now
		}
		for pid := range strings.FieldsSeq(string(children)) {
			comm, _ := os.ReadFile("/proc/" + pid + "/comm")
			inv["process "+pid+" "+strings.TrimSpace(string(comm))]++
		}
	}
	return nil
}

func (inv inventory) addMounts(below string) error {
	mounts, err := readMounts()
	if err != nil {
		return err
	}
	for _, m := range mounts {
		if strings.HasPrefix(m.point, below) {
			inv["mount of "+m.fstype+" on "+m.point]++
		}
	}
	return nil
}

func (inv inventory) addCgroups() error {
	root, err := CgroupRoot()
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	dirs, err := filepath.Glob(filepath.Join(root, fmt.Sprintf("netnstest-%d-*", os.Getpid())))
	for _, d := range dirs {
		inv["cgroup "+d]++
	}
	return err
}

func (inv inventory) addPins(dirs []string) error {
	for _, dir := range dirs {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil // removed meanwhile, which is what we wait for
			}
			if err != nil {
				return err
			}
			if path != dir {
				inv["pin "+path]++
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("list pins: %w", err)
		}
	}
	return nil
}

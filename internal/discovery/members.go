// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"
)

// Members lists the processes that are in the workload's control group now, and in those below it. It is for workloads
// that have one; the error wraps fs.ErrNotExist when the group is gone.
func (w Workload) Members() ([]int, error) {
	h, err := findHierarchy()
	if err != nil {
		return nil, err
	}
	if h.point == "" || w.CgroupPath == "" {
		return nil, fmt.Errorf("list the processes of a control group: %w", fs.ErrNotExist)
	}
	var pids []int
	top := h.dir(w.CgroupPath)
	err = filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			if path != top && errors.Is(err, fs.ErrNotExist) {
				return nil // it has gone meanwhile
			}
			return err
		}
		if !d.IsDir() {
			return nil
		}
		found, err := readProcs(filepath.Join(path, "cgroup.procs"))
		pids = append(pids, found...)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list the processes of a control group: %w", err)
	}
	slices.Sort(pids)
	return slices.Compact(pids), nil
}

func readProcs(path string) (pids []int, err error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		// 0 is a process that this pid namespace does not show.
		if pid, err := strconv.Atoi(lines.Text()); err == nil && pid > 0 {
			pids = append(pids, pid)
		}
	}
	if err := lines.Err(); err != nil && !errors.Is(err, unix.ENODEV) && !errors.Is(err, unix.EOPNOTSUPP) {
		return pids, err // ENODEV: the group has gone; EOPNOTSUPP: it is a threaded one, whose processes are above
	}
	return pids, nil
}

// CgroupOf is the path, as Workload.CgroupPath has it, of the control group (version 2) that a process is in; empty if it
// is in none. The error wraps fs.ErrNotExist if there is no such process.
func CgroupOf(pid int) (string, error) {
	h, err := findHierarchy()
	if err != nil {
		return "", err
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return "", fmt.Errorf("find the control group of a process: %w", err)
	}
	return h.parse(b, func(b []byte) string { return string(b) }).v2, nil
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// From include/uapi/linux/bpf.h.
const (
	bpfProgQuery     = 16
	bpfCgroupSockOps = 3
)

// sockOps counts the sock_ops programs at the root of the cgroups. Others than ours mean that somebody else counts
// connections too, so that what Ebb costs is measured on top of them.
func sockOps() (int, error) {
	root, err := cgroupRoot()
	if err != nil {
		return 0, err
	}
	dir, err := os.Open(root)
	if err != nil {
		return 0, fmt.Errorf("open cgroup root: %w", err)
	}
	defer dir.Close()
	var ids [64]uint32
	attr := struct {
		target, attach, query, flags uint32
		ids                          uint64
		count, pad                   uint32
		rest                         [4]uint64
	}{target: uint32(dir.Fd()), attach: bpfCgroupSockOps, ids: uint64(uintptr(unsafe.Pointer(&ids))), count: uint32(len(ids))}
	if _, _, errno := unix.Syscall(unix.SYS_BPF, bpfProgQuery, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr)); errno != 0 {
		return 0, fmt.Errorf("list sock_ops programs: %w", errno)
	}
	return int(attr.count), nil
}

func cgroupRoot() (string, error) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", fmt.Errorf("read mounts: %w", err)
	}
	for line := range strings.Lines(string(text)) {
		left, right, ok := strings.Cut(line, " - ")
		l, r := strings.Fields(left), strings.Fields(right)
		if ok && len(l) > 4 && len(r) > 0 && r[0] == "cgroup2" {
			return l[4], nil
		}
	}
	return "", errors.New("no cgroup v2 hierarchy is mounted")
}

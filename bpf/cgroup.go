// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// openCgroup opens the cgroup v2 root. A root cgroup sees the sockets of every cgroup and every
// network namespace below it. A host that mounts only cgroup v1 still has the hierarchy: it is mounted
// without a path, and goes when the file is closed and no link holds it.
func openCgroup(path string) (*os.File, error) {
	if path == "" {
		var err error
		if path, err = findCgroup(); err != nil {
			return nil, err
		}
	}
	if path != "" {
		f, err := os.Open(path)
		if err != nil {
			return nil, fmt.Errorf("open cgroup: %w", err)
		}
		return f, nil
	}
	fsfd, err := unix.Fsopen("cgroup2", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("mount cgroup2: %w", err)
	}
	defer unix.Close(fsfd)
	if err := unix.FsconfigCreate(fsfd); err != nil {
		return nil, fmt.Errorf("mount cgroup2: %w", err)
	}
	mfd, err := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("mount cgroup2: %w", err)
	}
	defer unix.Close(mfd)
	fd, err := unix.Openat(mfd, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open cgroup2: %w", err)
	}
	return os.NewFile(uintptr(fd), "cgroup2"), nil
}

// findCgroup returns where cgroup v2 is mounted, or "" if nowhere. The fields are those of proc(5),
// /proc/PID/mountinfo.
func findCgroup() (string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return "", fmt.Errorf("find cgroup2: %w", err)
	}
	defer f.Close()
	found := ""
	for s := bufio.NewScanner(f); s.Scan(); {
		before, after, ok := strings.Cut(s.Text(), " - ")
		fields := strings.Fields(before)
		if !ok || len(fields) < 5 || !strings.HasPrefix(after, "cgroup2 ") {
			continue
		}
		// Several can be mounted, parts of the tree among them; the whole tree has the root "/".
		if fields[3] == "/" {
			return unescapeMount(fields[4]), nil
		}
		if found == "" {
			found = unescapeMount(fields[4])
		}
	}
	return found, nil
}

var mountEscapes = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

func unescapeMount(path string) string { return mountEscapes.Replace(path) }

// CgroupID is the id by which WatchCgroup knows a cgroup directory: its inode number, which on 64-bit
// kernels is the id of the kernfs node (since Linux 5.5).
func CgroupID(path string) (uint64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return 0, fmt.Errorf("stat cgroup %s: %w", path, err)
	}
	if st.Type != unix.CGROUP2_SUPER_MAGIC {
		return 0, fmt.Errorf("stat cgroup %s: %w", path, errors.New("not in a cgroup v2 file system"))
	}
	var s unix.Stat_t
	if err := unix.Stat(path, &s); err != nil {
		return 0, fmt.Errorf("stat cgroup %s: %w", path, err)
	}
	return s.Ino, nil
}

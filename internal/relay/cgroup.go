// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// ownCgroup is the caller's cgroup in the version 2 hierarchy, as cgroups(7) shows it.
func ownCgroup() (string, error) {
	f, err := os.Open("/proc/self/cgroup")
	if err != nil {
		return "", fmt.Errorf("read own cgroup: %w", err)
	}
	defer f.Close()
	s := bufio.NewScanner(f)
	for s.Scan() {
		if path, ok := strings.CutPrefix(s.Text(), "0::"); ok {
			return path, nil
		}
	}
	if err := s.Err(); err != nil {
		return "", fmt.Errorf("read own cgroup: %w", err)
	}
	return "", errors.New("read own cgroup: there is no version 2 hierarchy")
}

// cgroupParent holds the cgroups of relays. A relay has no capability, and so can remove its own from a directory that
// belongs to its user, which the root of the hierarchy is not open to.
const cgroupParent = "ebb-relay"

// besideCgroup is the cgroup of a relay: below the parent of the caller's own, or below the root if the caller is there.
// Where the caller's is the root of a container's view there is none beside it.
func besideCgroup(name string) (string, error) {
	own, err := ownCgroup()
	if err != nil {
		return "", err
	}
	root, err := cgroupMount()
	if err != nil {
		return "", err
	}
	if own == "/" {
		// Every cgroup has this file but the real root (Documentation/admin-guide/cgroup-v2.rst).
		if _, err := os.Stat(filepath.Join(root, "cgroup.type")); err == nil {
			return "", errors.New("find a place for a cgroup: the caller's own is all that can be seen")
		}
	}
	// A parent that is out of sight in the caller's cgroup namespace shows as "/..".
	return filepath.Join(root, filepath.Dir(filepath.Join("/", own)), cgroupParent, name), nil
}

// cgroupMount is where the version 2 hierarchy is mounted, its root and not a part of it.
func cgroupMount() (string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return "", fmt.Errorf("find cgroup2: %w", err)
	}
	defer f.Close()
	s := bufio.NewScanner(f)
	for s.Scan() {
		// 25 24 0:22 / /sys/fs/cgroup rw,… shared:4 - cgroup2 cgroup2 rw,… (proc(5))
		mount, fs, ok := strings.Cut(s.Text(), " - ")
		m := strings.Fields(mount)
		if ok && strings.HasPrefix(fs, "cgroup2 ") && len(m) > 5 && m[3] == "/" && !strings.Contains(m[4], `\`) {
			return m[4], nil
		}
	}
	if err := s.Err(); err != nil {
		return "", fmt.Errorf("find cgroup2: %w", err)
	}
	return "", errors.New("find cgroup2: it is not mounted")
}

// makeCgroup makes the cgroup of a relay, or takes the one that an earlier relay of that name has left, and opens it.
func makeCgroup(dir string) (*os.File, error) {
	err := os.MkdirAll(dir, 0o755)
	for range 3 { // another relay's end may remove the parent in between
		if !errors.Is(err, fs.ErrNotExist) {
			break
		}
		err = os.MkdirAll(dir, 0o755)
	}
	if err != nil {
		return nil, fmt.Errorf("make cgroup: %w", err)
	}
	f, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open cgroup: %w", err)
	}
	return f, nil
}

// removeCgroup removes the cgroup of a relay that has ended. One that is in use, or that somebody else has made something
// of, stays: the kernel removes none that is not empty.
func removeCgroup(name string) {
	if dir, err := besideCgroup(name); err == nil {
		_ = unix.Rmdir(dir)
		_ = unix.Rmdir(filepath.Dir(dir))
	}
}

// Sweep removes the cgroups that relays have left, of any owner, and returns them. Those with a process in them stay.
func Sweep() (removed []string, err error) {
	root, err := cgroupMount()
	if err != nil {
		return nil, nil // then there are none
	}
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil: // it has gone meanwhile, or nobody may look
			return fs.SkipDir
		case !d.IsDir() || d.Name() != cgroupParent:
			return nil
		}
		entries, err := os.ReadDir(path)
		if err != nil {
			return fs.SkipDir
		}
		for _, e := range entries {
			if e.IsDir() {
				_ = unix.Rmdir(filepath.Join(path, e.Name())) // fails if it is in use
			}
		}
		if unix.Rmdir(path) == nil {
			removed = append(removed, path)
		}
		return fs.SkipDir
	})
	return removed, err
}

// leaveCgroup moves the relay back to its owner's side and removes its cgroup, for an owner that has ended before. Where
// that takes no processes (cgroups(7), no internal processes) the next relay of the name uses it again.
func leaveCgroup(name string) {
	own, err := ownCgroup()
	if err != nil || !strings.HasSuffix(own, "/"+cgroupParent+"/"+name) {
		return
	}
	root, err := cgroupMount()
	if err != nil {
		return
	}
	dir := filepath.Join(root, own)
	if os.WriteFile(filepath.Join(filepath.Dir(filepath.Dir(dir)), "cgroup.procs"), []byte("0"), 0) == nil {
		_ = unix.Rmdir(dir)
	}
}

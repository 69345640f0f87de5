// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

// files is an inotify(7) instance that tells of named network namespaces and of control groups.
type files struct {
	fd        int
	hierarchy *hierarchy

	mu      sync.Mutex // guards what follows: Follow is called from outside of the watcher's goroutine
	closed  bool
	watches map[string]int // path to watch descriptor
}

func openFiles() (*files, error) {
	h, err := findHierarchy()
	if err != nil {
		return nil, err
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("open inotify: %w", err)
	}
	f := &files{fd: fd, hierarchy: h, watches: map[string]int{}}
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.watchNetNS(); err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return f, nil
}

// add watches what a path is now: the control group file system does not say that a file has gone, and another may have
// come in its place. The caller holds mu.
func (f *files) add(path string, mask uint32) error {
	wd, err := unix.InotifyAddWatch(f.fd, path, mask)
	if err != nil {
		return fmt.Errorf("watch %s: %w", path, err)
	}
	if f.watches[path] != wd {
		f.remove(path)
		f.watches[path] = wd
	}
	return nil
}

// remove ends a watch. The caller holds mu.
func (f *files) remove(path string) {
	if wd, ok := f.watches[path]; ok {
		delete(f.watches, path)
		_, _ = unix.InotifyRmWatch(f.fd, uint32(wd)) // it fails if what was watched has gone
	}
}

// watchNetNS watches the directory of named namespaces, or until the first one makes it, where it will be. The caller holds mu.
func (f *files) watchNetNS() error {
	const changes = unix.IN_CREATE | unix.IN_DELETE | unix.IN_ONLYDIR
	parent := filepath.Dir(netnsDir)
	err := f.add(netnsDir, changes)
	if errors.Is(err, os.ErrNotExist) {
		if err := f.add(parent, unix.IN_CREATE|unix.IN_ONLYDIR); err != nil {
			return err
		}
		if err = f.add(netnsDir, changes); errors.Is(err, os.ErrNotExist) {
			return nil
		}
	}
	f.remove(parent)
	return err
}

// follow watches the control groups of these workloads, and those beside them, instead of those before.
func (f *files) follow(ws []Workload) error {
	want := map[string]uint32{}
	for _, w := range ws {
		if w.CgroupPath == "" || f.hierarchy.point == "" {
			continue
		}
		dir := f.hierarchy.dir(w.CgroupPath)
		// The kernel modifies this file when the first process comes and the last one has gone (cgroups(7)).
		want[filepath.Join(dir, "cgroup.events")] = unix.IN_MODIFY
		// A unit that starts again gets a new directory.
		want[filepath.Dir(dir)] = unix.IN_CREATE | unix.IN_ONLYDIR
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return nil
	}
	for path := range f.watches {
		if _, ok := want[path]; !ok && path != netnsDir && path != filepath.Dir(netnsDir) {
			f.remove(path)
		}
	}
	var errs []error
	for path, mask := range want {
		if err := f.add(path, mask); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// drain takes what has come, and tells whether anything of it matters.
func (f *files) drain() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	b := make([]byte, 16<<10)
	news := false
	for range maxDrain {
		n, err := unix.Read(f.fd, b)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return news
		}
		for rest := b[:n]; len(rest) >= unix.SizeofInotifyEvent; {
			wd, mask := int(int32(binary.NativeEndian.Uint32(rest))), binary.NativeEndian.Uint32(rest[4:])
			end := min(unix.SizeofInotifyEvent+int(binary.NativeEndian.Uint32(rest[12:])), len(rest))
			name, _, _ := bytes.Cut(rest[unix.SizeofInotifyEvent:end], []byte{0})
			rest = rest[end:]
			news = f.event(wd, mask, string(name)) || news
		}
	}
	return news
}

// event tells whether an event matters. The caller holds mu.
func (f *files) event(wd int, mask uint32, name string) bool {
	if mask&unix.IN_Q_OVERFLOW != 0 {
		return true
	}
	for path, of := range f.watches {
		switch {
		case of != wd:
		case mask&unix.IN_IGNORED != 0:
			delete(f.watches, path)
			if path == netnsDir {
				_ = f.watchNetNS() // the slow look remains
			}
			return true
		case path != filepath.Dir(netnsDir):
			return true
		case name == filepath.Base(netnsDir):
			return f.watchNetNS() == nil
		}
	}
	return false // of a watch that has been removed, or of a neighbour of the directory that is waited for
}

func (f *files) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	return unix.Close(f.fd)
}

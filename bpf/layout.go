// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// The directory of an installation:
//
//	DIR/v1/maps/NAME      the maps of maps.h
//	DIR/v1/links/NAME     the counting hooks
//	DIR/v1/netns/ID       one admission link per namespace
//	DIR/v1-new-PID        an installation that is being made or removed
//
// The BPF file system refuses dots in names.
const (
	// DefaultDir is where an installation is unless Options say otherwise.
	DefaultDir = "/sys/fs/bpf/ebb"

	bpffsRoot = "/sys/fs/bpf"
)

// layoutName has another number when a map has another shape. Keys stay as they are, and a value only grows at its end,
// with zeros for what was before: so TakeOver can carry it to and from any layout. It never changes while a program runs;
// a test links one with another name (-X).
var layoutName = "v1"

// layout is what an installation looks like. Tests make another one of it.
type layout struct {
	name   string
	census func() (*ebpf.CollectionSpec, error)
}

var versionDir = regexp.MustCompile(`^v[0-9]+(-new-[0-9]+)?$`)

// Options say where an installation is.
type Options struct {
	Dir    string       // in a BPF file system; DefaultDir if empty
	Cgroup string       // the cgroup v2 root; if empty it is found, or one is mounted for the moment
	Log    *slog.Logger // nil discards

	layout layout // this binary's, if empty
}

func (o Options) withDefaults() Options {
	if o.Dir == "" {
		o.Dir = DefaultDir
	}
	o.Dir = filepath.Clean(o.Dir)
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.layout.name == "" {
		o.layout = layout{layoutName, loadCensus}
	}
	return o
}

func (o Options) version() string         { return filepath.Join(o.Dir, o.layout.name) }
func mapPin(version, name string) string  { return filepath.Join(version, "maps", name) }
func linkPin(version, name string) string { return filepath.Join(version, "links", name) }

// BootNow is the time since boot, suspend included, which kernel programs compare with.
func BootNow() time.Duration {
	var ts unix.Timespec
	// CLOCK_BOOTTIME exists since Linux 2.6.39; the call has no other way to fail.
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts)
	return time.Duration(ts.Nano())
}

// lockPatience bounds the wait for the lock of a directory. An installer holds it while it loads programs; another
// user, who can lock any directory that can be read, must not hold up a start for ever.
const lockPatience = 30 * time.Second

// flock waits for an exclusive lock on a directory. The kernel releases it when f is closed or its
// process dies.
func flock(dir string) (*os.File, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for until := time.Now().Add(lockPatience); ; <-tick.C {
		err := retry(func() error { return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) })
		switch {
		case err == nil:
			return f, nil
		case !errors.Is(err, unix.EWOULDBLOCK):
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", dir, err)
		case time.Now().After(until):
			f.Close()
			return nil, fmt.Errorf("lock %s: another process has held it for %v; `lslocks` says which", dir, lockPatience)
		}
	}
}

func retry(call func() error) error {
	for {
		if err := call(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// lockInstallation makes sure that dir can be in a BPF file system and locks its parent, under which
// installations are made, changed and removed.
func lockInstallation(dir string) (*os.File, error) {
	parent := filepath.Dir(dir)
	if strings.HasPrefix(dir, bpffsRoot+"/") && !isBPFFS(bpffsRoot) {
		if err := mountBPFFS(); err != nil {
			return nil, err
		}
	}
	if !isBPFFS(parent) {
		if isBPFFS(dir) {
			return nil, fmt.Errorf("%s is where a BPF file system is mounted: name a directory in it, such as %s", dir, filepath.Join(dir, "ebb"))
		}
		return nil, fmt.Errorf("%s is not in a BPF file system: mount one with `mount -t bpf bpf %s`, or choose another directory", dir, parent)
	}
	return flock(parent)
}

// ownDir refuses a directory that another user has made or can write to: what is pinned there would be theirs, and a
// BPF file system can be open to all.
func ownDir(dir string) error {
	var st unix.Stat_t
	err := unix.Lstat(dir, &st)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("look at %s: %w", dir, err)
	case st.Mode&unix.S_IFMT != unix.S_IFDIR || st.Uid != 0 && int(st.Uid) != os.Geteuid() || st.Mode&0o022 != 0:
		return fmt.Errorf("%s can be changed by another user: remove it, or choose another directory", dir)
	}
	return nil
}

func isBPFFS(dir string) bool {
	var st unix.Statfs_t
	return unix.Statfs(dir, &st) == nil && st.Type == unix.BPF_FS_MAGIC
}

// mountBPFFS holds the lock of the directory below the mount, so that two processes do not mount one
// over the other.
func mountBPFFS() error {
	f, err := flock(bpffsRoot)
	if err != nil {
		return fmt.Errorf("mount a BPF file system: %w", err)
	}
	defer f.Close()
	if isBPFFS(bpffsRoot) {
		return nil
	}
	if err := unix.Mount("bpf", bpffsRoot, "bpf", 0, "mode=700"); err != nil {
		return fmt.Errorf("mount a BPF file system on %s: %w", bpffsRoot, err)
	}
	return nil
}

// versions lists the installations in dir, finished or not. A missing directory is empty.
func versions(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() && versionDir.MatchString(e.Name()) {
			names = append(names, e.Name())
		}
	}
	sort.Strings(names)
	return names, nil
}

// removeTree unpins everything under dir, links before maps: what still counts must not lose its maps
// first. detach says whether links that a process holds open are to let go as well.
func removeTree(dir string, detach bool) ([]string, error) {
	var pins, dirs []string
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			dirs = append(dirs, path)
		} else {
			pins = append(pins, path)
		}
		return nil
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	last := func(path string) bool { return filepath.Base(filepath.Dir(path)) == "maps" }
	sort.SliceStable(pins, func(i, j int) bool { return !last(pins[i]) && last(pins[j]) })
	var removed []string
	var errs []error
	for _, pin := range pins {
		if detach && !last(pin) {
			detachLink(pin)
		}
		if err := os.Remove(pin); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
			continue
		}
		removed = append(removed, pin)
	}
	for i := len(dirs) - 1; i >= 0; i-- {
		if err := os.Remove(dirs[i]); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return removed, errors.Join(errs...)
}

// aside is where this process makes or removes an installation.
func aside(version string) string { return version + "-new-" + strconv.Itoa(os.Getpid()) }

// removeVersion removes an installation. It is put aside first, so that no part of it is ever taken for the whole.
func removeVersion(version string) ([]string, error) {
	aside := aside(version)
	if err := os.Rename(version, aside); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, nil
		}
		return nil, err
	}
	return removeTree(aside, true)
}

// detachLink makes a link let go although a process holds it. Tracing links cannot; they go with
// their last holder.
func detachLink(pin string) {
	l, err := link.LoadPinnedLink(pin, nil)
	if err != nil {
		return // not a link
	}
	defer l.Close()
	if d, ok := l.(interface{ Detach() error }); ok {
		_ = d.Detach() // EOPNOTSUPP for tracing, ENOLINK for a dead namespace: unpinning is left
	}
}

// Cleanup removes all that was ever pinned in the directory, of any version, whoever uses it, and
// returns the pins that it removed. Everything that a process still holds is opened first by the kill
// switch. It is idempotent and works with nothing there.
func Cleanup(o Options) ([]string, error) {
	o = o.withDefaults()
	if _, err := os.Stat(o.Dir); errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	lock, err := lockInstallation(o.Dir)
	if err != nil {
		return nil, fmt.Errorf("clean up: %w", err)
	}
	defer lock.Close()
	if _, err := setControl(o, false); err != nil {
		o.Log.Warn("kill switch not set before clean-up", "err", err)
	}
	names, err := versions(o.Dir)
	if err != nil {
		return nil, fmt.Errorf("clean up: %w", err)
	}
	var removed []string
	var errs []error
	for _, name := range names {
		r, err := removeTree(filepath.Join(o.Dir, name), true)
		removed = append(removed, r...)
		errs = append(errs, err)
	}
	if err := os.Remove(o.Dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return removed, fmt.Errorf("clean up: %w", err)
	}
	return removed, nil
}

// SetControl sets the kill switch of every installation in the directory: with enforce false every
// admission of the host is open. It needs the pins only, neither their owner nor a matching layout.
// had says whether anything was installed.
func SetControl(o Options, enforce bool) (had bool, err error) {
	return setControl(o.withDefaults(), enforce)
}

func setControl(o Options, enforce bool) (had bool, err error) {
	var word uint32
	if enforce {
		word = 1
	}
	var errs []error
	// Until no installation has come meanwhile.
	for n, last := 0, -1; n != last; {
		maps, err := controls(o)
		errs = append(errs, err)
		for _, m := range maps {
			if err := m.Put(uint32(0), word); err != nil {
				errs = append(errs, err)
			}
			m.Close()
		}
		n, last = len(maps), n
		had = had || n > 0
	}
	if err := errors.Join(errs...); err != nil {
		return had, fmt.Errorf("set the kill switch: %w", err)
	}
	return had, nil
}

// Control tells the kill switch. ErrNotInstalled if nothing is installed.
func Control(o Options) (enforce bool, err error) {
	maps, err := controls(o.withDefaults())
	enforce = len(maps) > 0
	for _, m := range maps {
		var word uint32
		if e := m.Lookup(uint32(0), &word); e != nil {
			err = errors.Join(err, e)
		}
		enforce = enforce && word != 0
		m.Close()
	}
	if err != nil {
		return false, fmt.Errorf("read the kill switch: %w", err)
	}
	if len(maps) == 0 {
		return false, ErrNotInstalled
	}
	return enforce, nil
}

func controls(o Options) ([]*ebpf.Map, error) {
	names, err := versions(o.Dir)
	if err != nil {
		return nil, err
	}
	var maps []*ebpf.Map
	var errs []error
	for _, name := range names {
		m, err := ebpf.LoadPinnedMap(mapPin(filepath.Join(o.Dir, name), "control"), nil)
		if errors.Is(err, fs.ErrNotExist) {
			continue // not finished, or half removed
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		maps = append(maps, m)
	}
	return maps, errors.Join(errs...)
}

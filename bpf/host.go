// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"
)

// revision grows when the programs change while the maps stay as they are. A binary with an older one
// leaves newer programs in place.
const revision = 1

// Indexes of the map meta, as in ebb.h.
const (
	metaRevision = uint32(iota)
	metaDigest
	metaNetNSBy
)

const (
	sockopsLink = "census_sockops"
	stateLink   = "census_state"
	destroyLink = "census_destroy"
)

// hostMaps are the pinned maps, each by the name of its pin.
type hostMaps struct {
	Admissions *ebpf.Map `ebpf:"admissions"`
	Backends   *ebpf.Map `ebpf:"backends"`
	Listeners  *ebpf.Map `ebpf:"listeners"`
	Control    *ebpf.Map `ebpf:"control"`
	Targets    *ebpf.Map `ebpf:"targets"`
	Watch      *ebpf.Map `ebpf:"watch"`
	Tags       *ebpf.Map `ebpf:"tags"`
	Counts     *ebpf.Map `ebpf:"counts"`
	Drains     *ebpf.Map `ebpf:"drains"`
	Events     *ebpf.Map `ebpf:"events"`
	Errors     *ebpf.Map `ebpf:"errors"`
	Meta       *ebpf.Map `ebpf:"meta"`
}

func (m *hostMaps) each() map[string]**ebpf.Map {
	return map[string]**ebpf.Map{
		censusMapAdmissions: &m.Admissions, censusMapBackends: &m.Backends,
		censusMapListeners: &m.Listeners, censusMapControl: &m.Control,
		censusMapTargets: &m.Targets, censusMapWatch: &m.Watch,
		censusMapTags: &m.Tags, censusMapCounts: &m.Counts,
		censusMapDrains: &m.Drains, censusMapEvents: &m.Events,
		censusMapErrors: &m.Errors, censusMapMeta: &m.Meta,
	}
}

func (m *hostMaps) close() error {
	var errs []error
	for _, p := range m.each() {
		if *p != nil {
			errs = append(errs, (*p).Close())
		}
	}
	return errors.Join(errs...)
}

// Host is an installation as one process uses it. Its methods may be called concurrently.
type Host struct {
	opts Options
	maps hostMaps
	held *os.File // shared lock: Release leaves what somebody uses

	mu           sync.Mutex
	closed       bool
	links        map[string]link.Link // kept: an unreferenced link is closed by its finalizer
	netns        map[uint64]link.Link
	collected    time.Time // when namespaces that are gone were looked for
	hasAdmission bool
	files        *fileReaders // loaded when first used
	corrector    *corrector   // loaded when first used

	taking sync.Mutex // one TakeOver at a time
	taker  *taker     // loaded when first used
}

// Install makes the installation, or opens it and brings its programs up to date, and returns it. It
// is idempotent and may run in several processes at once. A hook that cannot be attached is logged
// and left out: see Guarded and HasAdmission. What binaries with another layout have installed stays and works
// beside it, each with its own backends: see TakeOver. ErrLayout if what is pinned is no installation.
func Install(o Options) (*Host, error) {
	o = o.withDefaults()
	// Before 5.11 the memory of maps and programs counts against RLIMIT_MEMLOCK. Where that
	// cannot be raised, creating the maps says so.
	if err := rlimit.RemoveMemlock(); err != nil {
		o.Log.Debug("memlock limit not raised", "err", err)
	}
	lock, err := lockInstallation(o.Dir)
	if err != nil {
		return nil, fmt.Errorf("install: %w", err)
	}
	defer lock.Close()
	if err := o.removeUnfinished(); err != nil {
		return nil, fmt.Errorf("install: %w", err)
	}
	h, err := open(o)
	if errors.Is(err, ErrNotInstalled) {
		if err := create(o); err != nil {
			return nil, fmt.Errorf("install: %w", err)
		}
		h, err = open(o)
	}
	if err != nil {
		return nil, fmt.Errorf("install: %w", err)
	}
	if err := makeDirs(o.version()); err != nil {
		return nil, errors.Join(fmt.Errorf("install: %w", err), h.Close())
	}
	if err := h.refresh(o.version()); err != nil {
		return nil, errors.Join(fmt.Errorf("install: %w", err), h.Close())
	}
	if err := o.removeUnused(); err != nil {
		o.Log.Warn("unused installation of another layout not removed", "err", err)
	}
	return h, nil
}

// Open opens an installation that exists. ErrNotInstalled if there is none of this layout, ErrLayout if what is
// pinned there is none.
func Open(o Options) (*Host, error) {
	o = o.withDefaults()
	h, err := open(o)
	if err != nil {
		return nil, fmt.Errorf("open: %w", err)
	}
	return h, nil
}

func open(o Options) (*Host, error) {
	if err := ownDir(o.Dir); err != nil {
		return nil, err
	}
	held, err := os.Open(o.version())
	if err != nil {
		return nil, notInstalled(err)
	}
	h := &Host{opts: o, held: held, links: map[string]link.Link{}, netns: map[uint64]link.Link{}}
	if err := retry(func() error { return unix.Flock(int(h.held.Fd()), unix.LOCK_SH) }); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", o.version(), err), h.Close())
	}
	// The lock may have been waited for until somebody had removed it all.
	if _, err := os.Stat(o.version()); err != nil {
		return nil, errors.Join(notInstalled(err), h.Close())
	}
	if err := h.openMaps(o.version()); err != nil {
		return nil, errors.Join(err, h.Close())
	}
	for _, name := range []string{sockopsLink, stateLink, destroyLink} {
		l, err := link.LoadPinnedLink(linkPin(o.version(), name), nil)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, errors.Join(damaged("link "+name, err), h.Close())
		}
		h.links[name] = l
	}
	if prog, err := h.loadAdmission(0); err == nil {
		prog.Close()
		h.hasAdmission = true
	} else {
		o.Log.Debug("admission cannot be loaded", "err", err)
	}
	return h, nil
}

func notInstalled(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return ErrNotInstalled
	}
	return err
}

func (h *Host) openMaps(version string) error {
	spec, err := h.opts.layout.census()
	if err != nil {
		return err
	}
	for name, p := range h.maps.each() {
		m, err := ebpf.LoadPinnedMap(mapPin(version, name), nil)
		if errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("map %s is missing: %w", name, ErrLayout)
		}
		if err != nil {
			return damaged("map "+name, err)
		}
		*p = m
		if err := spec.Maps[name].Compatible(m); err != nil {
			return fmt.Errorf("map %s: %v: %w", name, err, ErrLayout)
		}
	}
	return nil
}

// create makes an installation beside and renames it in, so that nobody sees a part of one.
func create(o Options) (err error) {
	if err := os.Mkdir(o.Dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	aside := aside(o.version())
	if err := makeDirs(aside); err != nil {
		return err
	}
	h := &Host{opts: o, links: map[string]link.Link{}, netns: map[uint64]link.Link{}}
	defer func() {
		if err != nil {
			_, rmErr := removeTree(aside, true)
			err = errors.Join(err, rmErr)
		}
		err = errors.Join(err, h.Close())
	}()
	spec, err := o.layout.census()
	if err != nil {
		return err
	}
	if err := spec.LoadAndAssign(&h.maps, nil); err != nil {
		return fmt.Errorf("create maps: %w", err)
	}
	for name, p := range h.maps.each() {
		if err := (*p).Pin(mapPin(aside, name)); err != nil {
			return fmt.Errorf("pin map %s: %w", name, err)
		}
	}
	if err := h.maps.Control.Put(uint32(0), uint32(1)); err != nil {
		return fmt.Errorf("set the kill switch: %w", err)
	}
	if err := h.refresh(aside); err != nil {
		return err
	}
	if err := os.Rename(aside, o.version()); err != nil {
		return err
	}
	// The kill switch is the host's: one that is open under another layout is open here. It is read when this
	// installation can be seen: who sets it meanwhile sets it here too, or has set it before.
	enforce, err := Control(o)
	if err == nil && !enforce {
		err = h.maps.Control.Put(uint32(0), uint32(0))
	}
	return err
}

// makeDirs makes the directories of an installation, or those that it lacks.
func makeDirs(version string) error {
	for _, dir := range []string{"", "maps", "links", "netns"} {
		if err := os.Mkdir(filepath.Join(version, dir), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	return nil
}

// removeUnfinished removes what a process that was killed while it made or removed an installation left. It is
// dead: the lock is ours.
func (o Options) removeUnfinished() error {
	names, err := versions(o.Dir)
	if err != nil {
		return err
	}
	for _, name := range names {
		if !strings.Contains(name, "-new-") {
			continue
		}
		if _, err := removeTree(filepath.Join(o.Dir, name), true); err != nil {
			return err
		}
	}
	return nil
}

// digest identifies the programs of this binary. The kernel's own program tags differ between
// kernels' hash functions and are not used.
var digest = sync.OnceValue(func() uint64 {
	sum := sha256.New()
	sum.Write(_AdmissionBytes)
	sum.Write(_CensusBytes)
	return binary.LittleEndian.Uint64(sum.Sum(nil))
})

// refresh attaches the hooks that are not attached, and replaces in place the programs of an older
// binary. version is the directory of the pins.
func (h *Host) refresh(version string) error {
	var have [2]uint64
	for i := range have {
		if err := h.maps.Meta.Lookup(uint32(i), &have[i]); err != nil {
			return fmt.Errorf("read what is installed: %w", err)
		}
	}
	older := have[metaRevision] < revision || have[metaRevision] == revision && have[metaDigest] != digest()
	// sock_ops comes last: from it on listeners are told, and the tracepoint then guards them.
	for _, hook := range []struct {
		name   string
		attach func(version string) error
	}{{stateLink, h.attachState}, {destroyLink, h.attachDestroy}, {sockopsLink, h.attachSockops}} {
		if h.links[hook.name] != nil && !older {
			continue
		}
		if hook.name == destroyLink && h.links[stateLink] == nil {
			continue // it has the last look, and needs the same of the kernel
		}
		if err := hook.attach(version); err != nil {
			h.opts.Log.Warn("counting hook not attached", "hook", hook.name, "err", err)
		}
	}
	if h.links[sockopsLink] == nil && h.links[stateLink] == nil {
		return fmt.Errorf("attach counting hooks: neither can be attached: %w", ErrNotSupported)
	}
	if !older {
		return nil
	}
	if err := h.updateAdmissions(version); err != nil {
		return err
	}
	by := uint64(0)
	if netnsByInode() {
		by = 1
	}
	for i, word := range []uint64{revision, digest(), by} {
		if err := h.maps.Meta.Put(uint32(i), word); err != nil {
			return fmt.Errorf("write what is installed: %w", err)
		}
	}
	return nil
}

func (h *Host) attachState(version string) error {
	return h.attachTracing(version, stateLink, censusProgCensusState)
}

func (h *Host) attachDestroy(version string) error {
	return h.attachTracing(version, destroyLink, censusProgCensusDestroy)
}

// attachTracing attaches a tracepoint. A tracing link cannot be updated: the new one is attached and
// pinned beside the old one and renamed over it. Meanwhile both count, which the state machine bears.
func (h *Host) attachTracing(version, name, program string) error {
	prog, err := h.loadCensusProgram(program)
	if err != nil {
		return err
	}
	defer prog.Close()
	l, err := link.AttachTracing(link.TracingOptions{Program: prog, AttachType: ebpf.AttachTraceRawTp})
	if err != nil {
		return fmt.Errorf("attach %s: %w", name, err)
	}
	beside := linkPin(version, name+"-new")
	if err := os.Remove(beside); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return errors.Join(err, l.Close())
	}
	if err := l.Pin(beside); err != nil {
		return errors.Join(fmt.Errorf("pin %s: %w", name, err), l.Close())
	}
	if err := os.Rename(beside, linkPin(version, name)); err != nil {
		return errors.Join(fmt.Errorf("pin %s: %w", name, err), l.Close())
	}
	if old := h.links[name]; old != nil {
		old.Close()
	}
	h.links[name] = l
	return nil
}

func (h *Host) attachSockops(version string) error {
	prog, err := h.loadSockops()
	if err != nil {
		return err
	}
	defer prog.Close()
	if old := h.links[sockopsLink]; old != nil {
		if err := old.Update(prog); err != nil {
			return fmt.Errorf("update %s: %w", sockopsLink, err)
		}
		return nil
	}
	cgroup, err := openCgroup(h.opts.Cgroup)
	if err != nil {
		return err
	}
	defer cgroup.Close()
	l, err := link.AttachRawLink(link.RawLinkOptions{
		Target: int(cgroup.Fd()), Program: prog, Attach: ebpf.AttachCGroupSockOps,
	})
	if err != nil {
		return fmt.Errorf("attach %s to cgroup %s: %w", sockopsLink, cgroup.Name(), err)
	}
	if err := l.Pin(linkPin(version, sockopsLink)); err != nil {
		return errors.Join(fmt.Errorf("pin %s: %w", sockopsLink, err), l.Close())
	}
	h.links[sockopsLink] = l
	return nil
}

// loadSockops loads the program that works beside the tracepoint, or, where the kernel has no compare
// and swap (before 5.12), the one that works alone.
func (h *Host) loadSockops() (*ebpf.Program, error) {
	prog, err := h.loadCensusProgram(censusProgCensusSockops)
	if err == nil {
		return prog, nil
	}
	if h.links[stateLink] != nil {
		return nil, err // the plain one must not run beside another hook
	}
	plain, plainErr := h.loadCensusProgram(censusProgCensusSockopsPlain)
	if plainErr != nil {
		return nil, errors.Join(err, plainErr)
	}
	return plain, nil
}

func (h *Host) loadCensusProgram(name string) (*ebpf.Program, error) {
	spec, err := h.opts.layout.census()
	if err != nil {
		return nil, err
	}
	if err := spec.Variables[censusVarNetnsByInode].Set(netnsByInode()); err != nil {
		return nil, fmt.Errorf("set kind of namespace id: %w", err)
	}
	if err := spec.Variables[censusVarTraced].Set(h.links[stateLink] != nil); err != nil {
		return nil, fmt.Errorf("set which hooks are attached: %w", err)
	}
	for other := range spec.Programs {
		if other != name {
			delete(spec.Programs, other)
		}
	}
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: h.replacements(spec)})
	if err != nil {
		return nil, fmt.Errorf("load %s: %w", name, err)
	}
	defer coll.Close()
	return coll.DetachProgram(name), nil
}

// updateAdmissions replaces the program in every namespace.
func (h *Host) updateAdmissions(version string) error {
	pins, err := os.ReadDir(filepath.Join(version, "netns"))
	if err != nil {
		return err
	}
	for _, pin := range pins {
		id, err := strconv.ParseUint(pin.Name(), 10, 64)
		if err != nil {
			continue
		}
		if err := h.updateAdmission(filepath.Join(version, "netns", pin.Name()), id); err != nil {
			return err
		}
	}
	return nil
}

func (h *Host) updateAdmission(pin string, id uint64) error {
	l, err := link.LoadPinnedLink(pin, nil)
	if err != nil {
		return fmt.Errorf("open admission: %w", err)
	}
	defer l.Close()
	if netnsInode(l) == 0 {
		return os.Remove(pin)
	}
	prog, err := h.loadAdmission(id)
	if err != nil {
		return err
	}
	defer prog.Close()
	// The namespace may die at any moment; its pin is removed later.
	if err := l.Update(prog); err != nil && !errors.Is(err, unix.ENOLINK) {
		return fmt.Errorf("update admission: %w", err)
	}
	return nil
}

// replacements are the pinned maps that spec uses.
func (h *Host) replacements(spec *ebpf.CollectionSpec) map[string]*ebpf.Map {
	r := map[string]*ebpf.Map{}
	for name, p := range h.maps.each() {
		if s := spec.Maps[name]; s != nil {
			r[name] = *p
			resemble(s, *p)
		}
	}
	return r
}

// resemble gives a map of a spec the size of one that stands in for it: programs read the beginning of a value.
func resemble(s *ebpf.MapSpec, m *ebpf.Map) {
	s.ValueSize, s.MaxEntries = m.ValueSize(), m.MaxEntries()
}

// Close lets go of the installation, which stays. It is idempotent.
func (h *Host) Close() error {
	h.taking.Lock()
	defer h.taking.Unlock()
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil
	}
	h.closed = true
	var errs []error
	for _, l := range h.links {
		errs = append(errs, l.Close())
	}
	for _, l := range h.netns {
		errs = append(errs, l.Close())
	}
	errs = append(errs, h.taker.close(), h.files.close(), h.corrector.close(), h.maps.close())
	if h.held != nil {
		errs = append(errs, h.held.Close())
	}
	return errors.Join(errs...)
}

// Release removes the whole installation if no backend is left and no other process has it open, and
// closes the Host if it did. Otherwise the Host stays usable.
func (h *Host) Release() (removed bool, err error) {
	lock, err := lockInstallation(h.opts.Dir)
	if err != nil {
		return false, fmt.Errorf("release: %w", err)
	}
	defer lock.Close()
	ids, err := h.Backends()
	if err != nil {
		return false, fmt.Errorf("release: %w", err)
	}
	if len(ids) > 0 {
		return false, nil
	}
	err = unix.Flock(int(h.held.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return false, unix.Flock(int(h.held.Fd()), unix.LOCK_SH)
	}
	if err != nil {
		return false, fmt.Errorf("release: %w", err)
	}
	_, err = removeVersion(h.opts.version())
	err = errors.Join(err, h.Close())
	if rm := os.Remove(h.opts.Dir); rm != nil && !errors.Is(rm, fs.ErrNotExist) && !errors.Is(rm, unix.ENOTEMPTY) {
		err = errors.Join(err, rm)
	}
	if err != nil {
		return true, fmt.Errorf("release: %w", err)
	}
	return true, nil
}

// present says whether the installation that this process uses is still the one in the directory.
func (h *Host) present() error {
	var ours, there unix.Stat_t
	if err := unix.Fstat(int(h.held.Fd()), &ours); err != nil {
		return err
	}
	if err := unix.Stat(h.opts.version(), &there); err != nil {
		return notInstalled(err)
	}
	if ours.Ino != there.Ino || ours.Dev != there.Dev {
		return ErrNotInstalled
	}
	return nil
}

// HasAdmission says whether this kernel can close an admission (sk_lookup, Linux 5.9).
func (h *Host) HasAdmission() bool { return h.hasAdmission }

// Guarded says whether both counting hooks are attached. One alone counts, but is not exact: sock_ops
// loses a connection whose callback flags another program overwrites, the tracepoint loses about one
// in a hundred over veth.
func (h *Host) Guarded() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.links[sockopsLink] != nil && h.links[stateLink] != nil
}

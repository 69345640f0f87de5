// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// TakeOver moves a backend into this installation from those of other layouts, newer or older ones: what it
// watches, its sockets with their tags, its rule with admissions and targets, its drain. pids are its processes
// in the caller's pid namespace. AttachNetNS comes first, for each of its namespaces. Call it before anything
// else is done to the backend here; it is idempotent, and without another installation it does nothing.
//
// Both installations work meanwhile, so a closed admission stays closed and no change of a socket is missed. The
// rule moves when both know the same listeners, and the other installation lets go when both count the same
// connections. Until then the error wraps ErrElsewhere: call again, with the processes of then. A connection
// that waits in an accept queue has no file and is taken over once it is accepted, what a process that is not
// named holds when it has gone. An MPTCP listener is not taken over while it listens.
//
// The last backend that leaves takes its installation with it, unless a process has that open. Totals begin
// anew. ErrNotSupported on kernels whose sockets cannot be read through files (before 5.11).
func (h *Host) TakeOver(backend uint64, pids []int) error {
	h.taking.Lock()
	defer h.taking.Unlock()
	moved := false
	err := h.opts.eachOther(func(o *other) error {
		ids, err := o.backends()
		if err != nil || !slices.Contains(ids, backend) {
			return err
		}
		moved = true
		return h.takeFrom(o, backend, pids)
	})
	if err == nil && moved {
		var lock *os.File
		if lock, err = lockInstallation(h.opts.Dir); err == nil {
			err = errors.Join(h.opts.removeUnused(), lock.Close())
		}
	}
	if err != nil {
		return fmt.Errorf("take over backend %d: %w", backend, err)
	}
	return nil
}

// Elsewhere lists the backends that installations of other layouts have.
func (h *Host) Elsewhere() ([]uint64, error) {
	var ids []uint64
	err := h.opts.eachOther(func(o *other) error {
		have, err := o.backends()
		ids = append(ids, have...)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list backends elsewhere: %w", err)
	}
	slices.Sort(ids)
	return slices.Compact(ids), nil
}

func (h *Host) takeFrom(o *other, backend uint64, pids []int) error {
	// From here on both hear of its new listeners. A watch that is here already is newer.
	if err := o.copy("watch", h.maps.Watch, backend, ebpf.UpdateNoExist); err != nil {
		return err
	}
	taker, err := h.loadTaker(o)
	if err != nil {
		return err
	}
	if err := h.inherit(o, taker, backend, pids); err != nil {
		return err
	}
	here, err := h.Listeners(backend)
	if err != nil {
		return err
	}
	there, _, err := get[censusAlive](o.maps["listeners"], backend)
	if err != nil {
		return err
	}
	// There may be fewer there: a take-over that was broken off has ended its watch.
	if here.Live < int(there.Live) || here.Aside < int(there.Aside) {
		return fmt.Errorf("%d of its %d listeners found: it %w", here.Live+here.Aside, there.Live+there.Aside, ErrElsewhere)
	}
	if err := h.takeRule(o, taker, backend); err != nil {
		return err
	}
	missing, err := h.missing(o, backend)
	if err != nil {
		return err
	}
	if missing > 0 {
		return fmt.Errorf("connections of %d of its listeners are not found: it %w", missing, ErrElsewhere)
	}
	if err := o.remove(backend); err != nil {
		return err
	}
	h.opts.Log.Info("backend taken over", "backend_id", backend, "from", o.version)
	return nil
}

// taker are the programs that read what another installation has. The next backend needs them too.
type taker struct {
	*fileReaders
	from ebpf.MapID // of that one's tags
	objs struct {
		Inherit     *ebpf.Program `ebpf:"inherit"`
		CopyTargets *ebpf.Program `ebpf:"copy_targets"`
	}
}

func (t *taker) close() error {
	if t == nil {
		return nil
	}
	return errors.Join(t.objs.Inherit.Close(), t.objs.CopyTargets.Close())
}

func (h *Host) loadTaker(o *other) (*taker, error) {
	r, err := h.readers()
	if err != nil {
		return nil, err
	}
	info, err := o.maps["tags"].Info()
	if err != nil {
		return nil, fmt.Errorf("identify map of tags: %w", err)
	}
	id, _ := info.ID()
	if h.taker != nil && h.taker.from == id {
		return h.taker, nil
	}
	spec, err := loadFiles()
	if err != nil {
		return nil, err
	}
	if err := spec.Variables[filesVarNetnsByInode].Set(netnsByInode()); err != nil {
		return nil, fmt.Errorf("set kind of namespace id: %w", err)
	}
	maps := h.replacements(spec)
	maps[filesMapTagsBefore] = o.maps["tags"]
	resemble(spec.Maps[filesMapTagsBefore], o.maps["tags"])
	maps[filesMapWalk], maps[filesMapWalked], maps[filesMapChosen] = r.objs.Walk, r.objs.Walked, r.objs.Chosen
	t := &taker{fileReaders: r, from: id}
	if err := spec.LoadAndAssign(&t.objs, &ebpf.CollectionOptions{MapReplacements: maps}); err != nil {
		return nil, fmt.Errorf("load readers of another layout: %w: %w", ErrNotSupported, err)
	}
	err = h.taker.close()
	h.taker = t
	return t, err
}

// inherit takes over the sockets that the processes have open.
func (h *Host) inherit(o *other, t *taker, backend uint64, pids []int) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	order := filesWalkOrder{Tags: t.tagsID}
	order.Target.Backend = backend
	if _, err := t.adopt(t.objs.Inherit, pids, order); err != nil {
		return err
	}
	// A connection is counted with its listener, which may have closed since.
	cs, err := o.counts(backend)
	if err != nil {
		return err
	}
	for cookie, c := range cs {
		if c.Listening == 0 && c.Live == 0 && c.Closing == 0 {
			continue
		}
		fresh, err := encode(h.maps.Counts, censusCount{Addr: c.Addr, Backend: backend, Gen: c.Gen, Flags: c.Flags})
		if err != nil {
			return err
		}
		// NOEXIST never undoes what a hook has added.
		if err := h.maps.Counts.Update(cookie, fresh, ebpf.UpdateNoExist); err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
			return fmt.Errorf("count listener %d: %w", cookie, room(h.maps.Counts, err))
		}
	}
	order.Conns = 1
	for range 8 { // as in Adopt
		done, err := t.adopt(t.objs.Inherit, pids, order)
		if err != nil || done.Conns == 0 && done.Healed == 0 {
			return err
		}
	}
	return nil
}

// takeRule moves the rule if the other installation still has it: here in the order in which it comes into
// force, there the rule itself first. While both have it both refuse, and one refusal is enough.
func (h *Host) takeRule(o *other, t *taker, backend uint64) error {
	if _, ok, err := get[censusBackend](o.maps["backends"], backend); err != nil || !ok {
		return err
	}
	var cookies []uint64
	err := o.each("admissions", backend, func(k, v []byte) error {
		key, err := decode[censusAddress](k)
		if err != nil {
			return err
		}
		// The pin tells, not what this Host has attached: another process may have.
		if _, err := os.Stat(h.netnsPin(key.Netns)); err != nil {
			return fmt.Errorf("admission of network namespace %d: %w", key.Netns, err)
		}
		a, err := decode[censusAdmission](v)
		cookies = append(cookies, a.Targets[:min(int(a.Ntargets), MaxTargets)]...)
		return err
	})
	if err != nil {
		return err
	}
	if len(cookies) > 0 {
		if err := t.copyTargets(o.maps["targets"], cookies); err != nil {
			return err
		}
	}
	for _, m := range []struct {
		name string
		to   *ebpf.Map
	}{{"drains", h.maps.Drains}, {"admissions", h.maps.Admissions}, {"backends", h.maps.Backends}} {
		if err := o.copy(m.name, m.to, backend, ebpf.UpdateAny); err != nil {
			return err
		}
	}
	return errors.Join(o.drop("backends", backend), o.drop("admissions", backend))
}

// copyTargets puts those sockets of another map that are still there into ours. Only a program can: to user
// space such a map gives a cookie for a socket.
func (t *taker) copyTargets(from *ebpf.Map, cookies []uint64) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, c := range cookies {
		if err := t.fileReaders.objs.Chosen.Put(c, uint32(1)); err != nil {
			return fmt.Errorf("copy targets: %w", err)
		}
	}
	it, err := link.AttachIter(link.IterOptions{Program: t.objs.CopyTargets, Map: from})
	if err != nil {
		return fmt.Errorf("copy targets: %w", err)
	}
	defer it.Close()
	r, err := it.Open()
	if err == nil {
		_, err = io.Copy(io.Discard, r)
		err = errors.Join(err, r.Close())
	}
	if err = errors.Join(err, removeWhere(t.fileReaders.objs.Chosen, func(uint64, uint32) bool { return true })); err != nil {
		return fmt.Errorf("copy targets: %w", err)
	}
	return nil
}

// missing counts the listeners for which the two installations do not count the same.
func (h *Host) missing(o *other, backend uint64) (n int, err error) {
	cs, err := o.counts(backend)
	if err != nil {
		return 0, err
	}
	for cookie := range cs {
		ok, err := h.agrees(o, cookie)
		if err != nil {
			return 0, err
		}
		if !ok {
			n++
		}
	}
	return n, nil
}

// agrees compares the counts of a listener at moments at which nothing changes here. Hooks run one after the
// other, so one such moment can mislead: it takes three in a row, of as many looks as a busy listener needs.
func (h *Host) agrees(o *other, cookie uint64) (bool, error) {
	for row, looks := 0, 0; looks < 300; looks++ {
		before, _, err1 := get[censusCount](h.maps.Counts, cookie)
		there, _, err2 := get[censusCount](o.maps["counts"], cookie)
		after, _, err3 := get[censusCount](h.maps.Counts, cookie)
		if err := errors.Join(err1, err2, err3); err != nil {
			return false, fmt.Errorf("compare counts of listener %d: %w", cookie, err)
		}
		row++
		if before != after || there.Live != after.Live || there.Closing != after.Closing || there.Listening != after.Listening {
			row = 0
		}
		if row == 3 {
			return true, nil
		}
	}
	return false, nil
}

// other is an installation of another layout. Its keys are ours, its values begin or end like ours.
type other struct {
	version string
	maps    map[string]*ebpf.Map // by the names of hostMaps
}

// eachOther calls f for each installation of another layout.
func (o Options) eachOther(f func(*other) error) error {
	names, err := versions(o.Dir)
	errs := []error{err}
	for _, name := range names {
		if name == o.layout.name || strings.Contains(name, "-new-") {
			continue
		}
		there, err := openOther(filepath.Join(o.Dir, name))
		switch {
		case errors.Is(err, fs.ErrNotExist): // half removed
		case err != nil:
			errs = append(errs, err)
		default:
			errs = append(errs, f(there))
		}
		there.close()
	}
	return errors.Join(errs...)
}

func openOther(version string) (*other, error) {
	spec, err := loadCensus()
	o := &other{version: version, maps: map[string]*ebpf.Map{}}
	if err != nil {
		return o, err
	}
	for name := range new(hostMaps).each() {
		m, err := ebpf.LoadPinnedMap(mapPin(version, name), nil)
		if err != nil {
			return o, fmt.Errorf("open map %s of %s: %w", name, version, err)
		}
		o.maps[name] = m
		if s := spec.Maps[name]; m.Type() != s.Type || m.KeySize() != s.KeySize {
			return o, fmt.Errorf("map %s of %s has a %v with keys of %d bytes: %w", name, version, m.Type(), m.KeySize(), ErrLayout)
		}
	}
	return o, nil
}

func (o *other) close() {
	for _, m := range o.maps {
		m.Close()
	}
}

// ofBackend says whether an entry of a map is a backend's.
func ofBackend(name string, id uint64, k, v []byte) bool {
	at := k
	switch name {
	case "watch":
		at = v[unsafe.Offsetof(censusWatchRule{}.Backend):]
	case "admissions":
		at = v[unsafe.Offsetof(censusAdmission{}.Backend):]
	case "counts":
		at = v[unsafe.Offsetof(censusCount{}.Backend):]
	}
	return binary.NativeEndian.Uint64(at) == id
}

// each calls f for the entries of a backend.
func (o *other) each(name string, id uint64, f func(k, v []byte) error) error {
	err := eachRaw(o.maps[name], func(k, v []byte) error {
		if !ofBackend(name, id, k, v) {
			return nil
		}
		return f(k, v)
	})
	if err != nil {
		return fmt.Errorf("read map %s of %s: %w", name, o.version, err)
	}
	return nil
}

// copy gives the entries of a backend to a map of ours.
func (o *other) copy(name string, to *ebpf.Map, id uint64, flags ebpf.MapUpdateFlags) error {
	return o.each(name, id, func(k, v []byte) error {
		err := to.Update(k, resize(v, to.ValueSize()), flags)
		if errors.Is(err, ebpf.ErrKeyExist) {
			return nil
		}
		return room(to, err)
	})
}

// drop removes the entries of a backend.
func (o *other) drop(name string, id uint64) error {
	return o.each(name, id, func(k, _ []byte) error { return remove(o.maps[name], k) })
}

// remove removes all of a backend, in the order of RemoveBackend.
func (o *other) remove(id uint64) error {
	var errs []error
	for _, name := range []string{"backends", "watch", "admissions", "drains", "counts", "listeners"} {
		errs = append(errs, o.drop(name, id))
	}
	return errors.Join(append(errs, remove(o.maps["events"], id))...)
}

// backends lists those that have a rule, a watch or a count, each once.
func (o *other) backends() ([]uint64, error) {
	seen := map[uint64]bool{}
	add := func(at uintptr) func(k, v []byte) error {
		return func(_, v []byte) error { seen[binary.NativeEndian.Uint64(v[at:])] = true; return nil }
	}
	err := errors.Join(
		eachRaw(o.maps["backends"], func(k, _ []byte) error { seen[binary.NativeEndian.Uint64(k)] = true; return nil }),
		eachRaw(o.maps["watch"], add(unsafe.Offsetof(censusWatchRule{}.Backend))),
		eachRaw(o.maps["counts"], add(unsafe.Offsetof(censusCount{}.Backend))),
	)
	if err != nil {
		return nil, fmt.Errorf("list backends of %s: %w", o.version, err)
	}
	return slices.Collect(maps.Keys(seen)), nil
}

// counts are those of a backend, by listener cookie.
func (o *other) counts(id uint64) (map[uint64]censusCount, error) {
	cs := map[uint64]censusCount{}
	err := o.each("counts", id, func(k, v []byte) (err error) {
		cs[binary.NativeEndian.Uint64(k)], err = decode[censusCount](v)
		return err
	})
	return cs, err
}

// removeUnused removes the installations of other layouts that have no backend and that no process has open. The
// caller has the installation lock.
func (o Options) removeUnused() error {
	return o.eachOther(func(there *other) error {
		ids, err := there.backends()
		if err != nil || len(ids) > 0 {
			return err
		}
		held, err := os.Open(there.version)
		if err != nil {
			return err
		}
		defer held.Close()
		err = unix.Flock(int(held.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil
		}
		if err == nil {
			_, err = removeVersion(there.version)
		}
		return err
	})
}

// eachRaw calls f with the bytes of every entry that is there all the while, once.
func eachRaw(m *ebpf.Map, f func(k, v []byte) error) error {
	type entry struct{ k, v []byte }
	var all []entry
	seen := map[string]bool{}
	k, err := m.NextKeyBytes(nil)
	for ; err == nil && k != nil; k, err = m.NextKeyBytes(k) {
		v, err := m.LookupBytes(k)
		if err != nil {
			return err
		}
		if v == nil || seen[string(k)] {
			continue // removed meanwhile, or begun anew because of that
		}
		seen[string(k)] = true
		all = append(all, entry{k, v})
	}
	if err != nil {
		return err
	}
	for _, e := range all {
		if err := f(e.k, e.v); err != nil {
			return err
		}
	}
	return nil
}

// get reads a value whose layout may be another's; ok is false if there is none.
func get[V any](m *ebpf.Map, key uint64) (v V, ok bool, err error) {
	b, err := m.LookupBytes(key)
	if err != nil || b == nil {
		return v, false, err
	}
	v, err = decode[V](b)
	return v, true, err
}

func decode[V any](b []byte) (v V, err error) {
	_, err = binary.Decode(resize(b, uint32(binary.Size(v))), binary.NativeEndian, &v)
	return v, err
}

func encode[V any](m *ebpf.Map, v V) ([]byte, error) {
	b, err := binary.Append(nil, binary.NativeEndian, v)
	return resize(b, m.ValueSize()), err
}

// resize makes a value of one layout one of another: both begin alike.
func resize(b []byte, size uint32) []byte {
	return append(make([]byte, 0, size), append(b, make([]byte, size)...)[:size]...)
}

// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// Action is what the kernel does with a new connection to a backend.
type Action uint32

// The actions of a backend.
const (
	ActionOpen   Action = iota // the ordinary look-up; with targets, one of them
	ActionSteer                // to one of the targets of the address
	ActionRefuse               // an immediate reset, before any byte reached the backend
)

// String names the action as the contract does.
func (a Action) String() string {
	switch a {
	case ActionOpen:
		return "open"
	case ActionSteer:
		return "steer"
	case ActionRefuse:
		return "refuse"
	}
	return fmt.Sprintf("action(%d)", uint32(a))
}

// MaxTargets is how many listeners one address can be steered to.
const MaxTargets = 8

// Flags of an admission and of a backend, as in ebb.h.
const (
	admissionPass   = 1
	admissionV6Only = 2
	backendAside    = 1
	backendStandby  = 2
)

// BackendRule is the rule of one backend. Writing it is the flip, whatever the number of listeners.
type BackendRule struct {
	Action  Action
	Enforce bool // false: the rule is written but does nothing
	Gen     uint64
	// Until is when a closed admission opens by itself, on the boot clock; see BootNow. A zero
	// Until has passed.
	Until time.Duration
	// Aside says that listeners that were put aside, loopback ones that nobody named, keep a
	// refusal alive as well. Else it ends when the last other one has closed.
	Aside bool
	// Standby says that targets are meant for ActionSteer alone: they can be set before the flip, which
	// then is one write, and while the action is open they are left alone.
	Standby bool
	// Bypass is a range of source ports, both ends inclusive; a zero one is none. A connection from this
	// host (from the very address that it goes to, or from a loopback one) that comes from one of them is
	// neither steered nor refused. It is how a relay reaches the address that it stands in front of. It
	// must bind to that address: a route may choose another of this host.
	Bypass [2]uint16
}

// Address is a listening address in a network namespace. A v4-mapped IPv6 address is the same as the
// IPv4 one: the kernel finds its listener in the same place.
type Address struct {
	NetNS    uint64
	AddrPort netip.AddrPort
}

// String is for messages.
func (a Address) String() string { return a.AddrPort.String() }

func (a Address) kernel() censusAddress {
	k := censusAddress{Netns: a.NetNS, Port: a.AddrPort.Port(), Proto: unix.IPPROTO_TCP}
	k.Family, k.Addr = kernelAddr(a.AddrPort.Addr())
	return k
}

func kernelAddr(addr netip.Addr) (family uint8, b [16]uint8) {
	addr = addr.Unmap()
	if addr.Is4() {
		v4 := addr.As4()
		copy(b[:], v4[:])
		return unix.AF_INET, b
	}
	return unix.AF_INET6, addr.WithZone("").As16()
}

func addrOf(family uint8, b [16]uint8) netip.Addr {
	if family == unix.AF_INET {
		return netip.AddrFrom4([4]byte(b[:4]))
	}
	return netip.AddrFrom16(b)
}

func addressOf(k censusAddress) Address {
	return Address{NetNS: k.Netns, AddrPort: netip.AddrPortFrom(addrOf(k.Family, k.Addr), k.Port)}
}

// SetBackend writes the rule of a backend in one step: a connection whose SYN comes after it returned
// meets the new rule.
func (h *Host) SetBackend(id uint64, r BackendRule) error {
	k, err := r.kernel()
	if err != nil {
		return fmt.Errorf("set rule of backend %d: %w", id, err)
	}
	if err := h.maps.Backends.Put(id, &k); err != nil {
		return fmt.Errorf("set rule of backend %d: %w", id, room(h.maps.Backends, err))
	}
	return nil
}

func (r BackendRule) kernel() (censusBackend, error) {
	k := censusBackend{
		Action: uint32(r.Action), Gen: r.Gen, Until: uint64(max(r.Until, 0)),
		BypassLo: r.Bypass[0], BypassHi: r.Bypass[1],
	}
	if lo, hi := r.Bypass[0], r.Bypass[1]; lo > hi || lo == 0 && hi > 0 {
		return k, fmt.Errorf("%d to %d is no range of ports", lo, hi)
	}
	if r.Enforce {
		k.Mode = 1
	}
	if r.Aside {
		k.Flags |= backendAside
	}
	if r.Standby {
		k.Flags |= backendStandby
	}
	return k, nil
}

// Backend reads the rule of a backend; ok is false if it has none.
func (h *Host) Backend(id uint64) (r BackendRule, ok bool, err error) {
	var k censusBackend
	err = h.maps.Backends.Lookup(id, &k)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return BackendRule{}, false, nil
	}
	if err != nil {
		return BackendRule{}, false, fmt.Errorf("read rule of backend %d: %w", id, err)
	}
	return BackendRule{
		Action: Action(k.Action), Enforce: k.Mode != 0, Gen: k.Gen,
		Until: time.Duration(k.Until), Aside: k.Flags&backendAside != 0, Standby: k.Flags&backendStandby != 0,
		Bypass: [2]uint16{k.BypassLo, k.BypassHi},
	}, true, nil
}

// Backends lists the backends that have a rule.
func (h *Host) Backends() ([]uint64, error) {
	var ids []uint64
	err := each(h.maps.Backends, func(id uint64, _ censusBackend) { ids = append(ids, id) })
	if err != nil {
		return nil, fmt.Errorf("list backends: %w", err)
	}
	return ids, nil
}

// RemoveBackend removes all that belongs to a backend: its rule first, which opens it, then its
// admissions with the pass entries made for it, what it watches, its drain, its ring and its counts, in
// installations of other layouts too. pids are its processes that live on: what they have open goes on being counted, for whoever
// adopts it next. Other sockets that carry its tag are not counted any more, and cannot be adopted. Counts that were kept like this and have
// come to nothing go too.
func (h *Host) RemoveBackend(id uint64, pids ...int) error {
	errs := []error{
		remove(h.maps.Backends, id),
		removeWhere(h.maps.Watch, func(_ censusWatchKey, v censusWatchRule) bool { return v.Backend == id }),
		removeWhere(h.maps.Admissions, func(_ censusAddress, v censusAdmission) bool { return v.Backend == id }),
		remove(h.maps.Drains, id),
		remove(h.maps.Events, id),
		h.leave(id, pids), // once nothing new becomes its own
		removeWhere(h.maps.Counts, func(_ uint64, v censusCount) bool {
			return v.Backend == id || v.Backend == 0 && v.Listening == 0 && v.Live == 0 && v.Closing == 0
		}),
		remove(h.maps.Listeners, id),
		h.opts.eachOther(func(o *other) error { return o.remove(id) }),
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("remove backend %d: %w", id, err)
	}
	return nil
}

// Admit puts an address under the rule of a backend. v6only is the listener's IPV6_V6ONLY, which
// matters for [::]. It is idempotent for the same backend, and replaces another's pass entry. It
// returns a *TakenError if another backend has the address.
func (h *Host) Admit(a Address, v6only bool, backend uint64) error {
	key := a.kernel()
	v := censusAdmission{Backend: backend}
	if v6only {
		v.Flags |= admissionV6Only
	}
	err := h.maps.Admissions.Update(&key, &v, ebpf.UpdateNoExist)
	if errors.Is(err, ebpf.ErrKeyExist) {
		var have censusAdmission
		if err := h.maps.Admissions.Lookup(&key, &have); err != nil {
			return fmt.Errorf("admit %s: %w", a, err)
		}
		switch {
		case have.Flags&admissionPass != 0:
		case have.Backend != backend:
			return fmt.Errorf("admit %s: %w", a, &TakenError{What: a.String(), Backend: have.Backend})
		case have.Flags == v.Flags:
			return nil
		default:
			v.Ntargets, v.Targets = have.Ntargets, have.Targets
		}
		err = h.maps.Admissions.Put(&key, &v)
	}
	if err != nil {
		return fmt.Errorf("admit %s: %w", a, room(h.maps.Admissions, err))
	}
	return nil
}

// Pass leaves an address alone although a wildcard rule of owner covers it, because another process
// listens there. The entry goes with owner. It is idempotent and never replaces a rule.
func (h *Host) Pass(a Address, owner uint64) error {
	key := a.kernel()
	v := censusAdmission{Backend: owner, Flags: admissionPass}
	err := h.maps.Admissions.Update(&key, &v, ebpf.UpdateNoExist)
	if err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
		return fmt.Errorf("pass %s: %w", a, room(h.maps.Admissions, err))
	}
	return nil
}

// Admission tells what is said about an address: whose it is, and whether it is only passed. ok is
// false if nothing is said.
func (h *Host) Admission(a Address) (backend uint64, pass, ok bool, err error) {
	key := a.kernel()
	var v censusAdmission
	err = h.maps.Admissions.Lookup(&key, &v)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return 0, false, false, nil
	}
	if err != nil {
		return 0, false, false, fmt.Errorf("read admission of %s: %w", a, err)
	}
	return v.Backend, v.Flags&admissionPass != 0, true, nil
}

// Dismiss removes the admission of an address if it is the backend's; the address is open then.
func (h *Host) Dismiss(a Address, backend uint64) error {
	have, _, ok, err := h.Admission(a)
	if err != nil || !ok || have != backend {
		return err
	}
	if err := remove(h.maps.Admissions, a.kernel()); err != nil {
		return fmt.Errorf("dismiss %s: %w", a, err)
	}
	return nil
}

// SetTargets says which listeners, added before, an address is steered to; none ends it. ErrNoRule if
// the address has no admission.
func (h *Host) SetTargets(a Address, cookies []uint64) error {
	if len(cookies) > MaxTargets {
		return fmt.Errorf("set targets of %s: %d are more than %d", a, len(cookies), MaxTargets)
	}
	key := a.kernel()
	var v censusAdmission
	err := h.maps.Admissions.Lookup(&key, &v)
	if errors.Is(err, ebpf.ErrKeyNotExist) || err == nil && v.Flags&admissionPass != 0 {
		return fmt.Errorf("set targets of %s: %w", a, ErrNoRule)
	}
	if err != nil {
		return fmt.Errorf("set targets of %s: %w", a, err)
	}
	v.Targets = [MaxTargets]uint64{}
	v.Ntargets = uint8(copy(v.Targets[:], cookies))
	if err := h.maps.Admissions.Update(&key, &v, ebpf.UpdateExist); err != nil {
		return fmt.Errorf("set targets of %s: %w", a, err)
	}
	return nil
}

// Targets reads which listeners an address is steered to; none if it has no admission.
func (h *Host) Targets(a Address) ([]uint64, error) {
	key := a.kernel()
	var v censusAdmission
	err := h.maps.Admissions.Lookup(&key, &v)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read targets of %s: %w", a, err)
	}
	return slices.Clone(v.Targets[:min(int(v.Ntargets), MaxTargets)]), nil
}

// AddTarget makes a listening socket one that connections in the namespace can be steered to, and
// returns its cookie for SetTargets. The kernel drops it when it closes. It is idempotent. ErrMPTCP,
// ErrForeignNamespace.
func (h *Host) AddTarget(fd int, netns uint64) (cookie uint64, err error) {
	proto, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL)
	if err != nil {
		return 0, fmt.Errorf("add target: %w", err)
	}
	if proto == unix.IPPROTO_MPTCP {
		return 0, fmt.Errorf("add target: socket %d %w", fd, ErrMPTCP)
	}
	in, err := socketNetNS(fd)
	if err != nil {
		return 0, fmt.Errorf("add target: %w", err)
	}
	if in != netns {
		return 0, fmt.Errorf("add target: socket %d %w", fd, ErrForeignNamespace)
	}
	cookie, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	if err != nil {
		return 0, fmt.Errorf("add target: %w", err)
	}
	// Never over an element that exists: that races with the close of the socket in it
	// (CVE-2024-56664). Under the cookie it can only be this very socket.
	err = h.maps.Targets.Update(cookie, uint64(fd), ebpf.UpdateNoExist)
	if err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
		return 0, fmt.Errorf("add target: %w", room(h.maps.Targets, err))
	}
	return cookie, nil
}

// RemoveTarget takes a listener out of those that can be steered to. It is idempotent.
func (h *Host) RemoveTarget(cookie uint64) error {
	if err := remove(h.maps.Targets, cookie); err != nil {
		return fmt.Errorf("remove target: %w", err)
	}
	return nil
}

// remove deletes a key; one that is not there is removed already.
func remove[K any](m *ebpf.Map, key K) error {
	if err := m.Delete(&key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	return nil
}

// removeWhere deletes the entries for which gone holds.
func removeWhere[K comparable, V any](m *ebpf.Map, gone func(K, V) bool) error {
	var keys []K
	err := each(m, func(k K, v V) {
		if gone(k, v) {
			keys = append(keys, k)
		}
	})
	errs := []error{err}
	for _, k := range keys {
		errs = append(errs, remove(m, k))
	}
	return errors.Join(errs...)
}

// each calls f once for every entry that is there all the while; entries that come or go meanwhile may
// be missed. It reads in batches, which the deletion of a key does not set back to the beginning.
func each[K comparable, V any](m *ebpf.Map, f func(K, V)) error {
	for size := min(int(m.MaxEntries()), 256); ; size *= 2 {
		err := eachBatch(m, size, f)
		// A bucket of the hash did not fit; nothing of it was given to f. Start again.
		if !errors.Is(err, unix.ENOSPC) {
			return err
		}
	}
}

func eachBatch[K comparable, V any](m *ebpf.Map, size int, f func(K, V)) error {
	type entry struct {
		k K
		v V
	}
	var all []entry
	seen := map[K]bool{}
	add := func(k K, v V) {
		if !seen[k] {
			seen[k] = true
			all = append(all, entry{k, v})
		}
	}
	keys, values := make([]K, size), make([]V, size)
	var cursor ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		for i := range n {
			add(keys[i], values[i])
		}
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			break
		}
		if errors.Is(err, ebpf.ErrNotSupported) {
			return eachOne(m, f)
		}
		if err != nil {
			return err
		}
	}
	for _, e := range all {
		f(e.k, e.v)
	}
	return nil
}

func eachOne[K comparable, V any](m *ebpf.Map, f func(K, V)) error {
	var k K
	var v V
	seen := map[K]bool{}
	it := m.Iterate()
	for it.Next(&k, &v) {
		if !seen[k] {
			seen[k] = true
			f(k, v)
		}
	}
	return it.Err()
}

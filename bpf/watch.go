// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// MaxPorts is how many ports a Watch can name in either list.
const MaxPorts = 16

const (
	watchProcess = uint32(iota + 1)
	watchCgroup
	watchAddress
	watchPort
)

const watchNotSelf = 1

// Watch says which backend gets a listener that appears. It holds for sockets that begin to listen
// from then on; Adopt takes in those that do already.
type Watch struct {
	Backend, Gen uint64
	// NotSelf, for a process: its children's listeners are meant, not its own.
	NotSelf bool
	// Only, if not empty, are the ports that count; a loopback listener counts in full only if its
	// port is here, and is put aside otherwise.
	Only []uint16
	// Exclude are ports that never count.
	Exclude []uint16
}

func (w Watch) kernel(start uint64) (censusWatchRule, error) {
	if len(w.Only) > MaxPorts || len(w.Exclude) > MaxPorts {
		return censusWatchRule{}, fmt.Errorf("more than %d ports", MaxPorts)
	}
	k := censusWatchRule{Backend: w.Backend, Gen: w.Gen, Start: start}
	if w.NotSelf {
		k.Flags |= watchNotSelf
	}
	k.Nonly = uint16(copy(k.Only[:], w.Only))
	k.Nexclude = uint16(copy(k.Exclude[:], w.Exclude))
	return k, nil
}

// WatchProcess watches a process and its descendants, by global thread group id and start time: see
// TaskID. A descendant stays one when it is re-parented to a watched subreaper. Of nested watches the
// nearest counts. It returns a *TakenError if another backend watches that very process.
func (h *Host) WatchProcess(tgid uint32, start uint64, w Watch) error {
	return h.watch(censusWatchKey{Kind: watchProcess, Id: uint64(tgid)}, fmt.Sprintf("process %d", tgid), start, w)
}

// WatchCgroup watches the processes of a cgroup and of those below it, by its id: see CgroupID.
func (h *Host) WatchCgroup(id uint64, w Watch) error {
	return h.watch(censusWatchKey{Kind: watchCgroup, Id: id}, fmt.Sprintf("cgroup %d", id), 0, w)
}

// WatchAddress watches exactly this address, whoever listens on it. It goes before the other kinds: of several
// watches that hold, the order is address, process, cgroup, port.
func (h *Host) WatchAddress(a Address, w Watch) error {
	return h.watch(censusWatchKey{Kind: watchAddress, Addr: a.kernel()}, a.String(), 0, w)
}

// WatchPort watches every address of a port in a network namespace, loopback ones in full, for listeners that
// no other kind of watch claims. Only is ignored.
func (h *Host) WatchPort(netns uint64, port uint16, w Watch) error {
	w.Only = []uint16{port}
	return h.watch(portKey(netns, port), fmt.Sprintf("port %d", port), 0, w)
}

func portKey(netns uint64, port uint16) censusWatchKey {
	return censusWatchKey{Kind: watchPort, Addr: censusAddress{Netns: netns, Port: port, Proto: unix.IPPROTO_TCP}}
}

func (h *Host) watch(key censusWatchKey, what string, start uint64, w Watch) error {
	v, err := w.kernel(start)
	if err != nil {
		return fmt.Errorf("watch %s: %w", what, err)
	}
	err = h.maps.Watch.Update(&key, &v, ebpf.UpdateNoExist)
	if errors.Is(err, ebpf.ErrKeyExist) {
		var have censusWatchRule
		if err := h.maps.Watch.Lookup(&key, &have); err != nil {
			return fmt.Errorf("watch %s: %w", what, err)
		}
		// Another start time is another process: the one that had this id is gone.
		if have.Backend != w.Backend && have.Start == start {
			return fmt.Errorf("watch: %w", &TakenError{What: what, Backend: have.Backend})
		}
		err = h.maps.Watch.Put(&key, &v)
	}
	if err != nil {
		return fmt.Errorf("watch %s: %w", what, room(h.maps.Watch, err))
	}
	return nil
}

// UnwatchProcess ends WatchProcess. Listeners that were found stay the backend's.
func (h *Host) UnwatchProcess(tgid uint32) error {
	return h.unwatch(censusWatchKey{Kind: watchProcess, Id: uint64(tgid)})
}

// UnwatchCgroup ends WatchCgroup.
func (h *Host) UnwatchCgroup(id uint64) error {
	return h.unwatch(censusWatchKey{Kind: watchCgroup, Id: id})
}

// UnwatchAddress ends WatchAddress.
func (h *Host) UnwatchAddress(a Address) error {
	return h.unwatch(censusWatchKey{Kind: watchAddress, Addr: a.kernel()})
}

// UnwatchPort ends WatchPort.
func (h *Host) UnwatchPort(netns uint64, port uint16) error {
	return h.unwatch(portKey(netns, port))
}

func (h *Host) unwatch(key censusWatchKey) error {
	if err := remove(h.maps.Watch, key); err != nil {
		return fmt.Errorf("unwatch: %w", err)
	}
	return nil
}

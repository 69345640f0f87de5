// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
)

// A ring of one backend holds about 900 events, a shared one about 3,600: two for each listener of 1,000
// backends that start at once, with room. A full ring loses events, which are hints.
const (
	ringBytes   = 64 << 10
	sharedBytes = 256 << 10
)

// EventType says what happened to a listener.
type EventType uint32

// The types of events.
const (
	EventListen EventType = iota + 1 // a listener of the backend appeared
	EventZero                        // it has no open connection left, or none in flight, during a drain
	EventClosed                      // it closed
	EventSignal                      // its process was sent a stop signal, and admission was closed early; see Early
)

// Event is a hint that a level has changed: read the level.
type Event struct {
	Type         EventType
	Backend, Gen uint64
	Cookie       uint64        // the listener's; for EventSignal the signal's number
	Time         time.Duration // boot clock
	Open         int64         // open and ending connections of that listener
}

// EventReader reads the events of one backend, or of many. Its methods may be called concurrently.
type EventReader struct {
	events *ebpf.Map // of the Host
	ring   *ebpf.Map
	rd     *ringbuf.Reader
}

// Events opens the events of a backend, for its one owner. What came while the backend had no owner is
// read first. Without an opened ring the kernel sends nothing.
func (h *Host) Events(backend uint64) (*EventReader, error) {
	var ring *ebpf.Map
	err := h.maps.Events.Lookup(backend, &ring)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		r, err := h.newRing(ringBytes)
		if err != nil {
			return nil, fmt.Errorf("open ring of backend %d: %w", backend, err)
		}
		if err := r.Follow(backend); err != nil {
			return nil, errors.Join(err, r.Close())
		}
		return r, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open ring of backend %d: %w", backend, err)
	}
	r, err := h.readRing(ring)
	if err != nil {
		return nil, fmt.Errorf("open ring of backend %d: %w", backend, err)
	}
	return r, nil
}

// Ring makes a ring for an owner of many backends, which Follow adds: one descriptor, one thread that waits
// and one buffer for all of them. What came before Follow is not in it; the levels are in the counts.
func (h *Host) Ring() (*EventReader, error) {
	r, err := h.newRing(sharedBytes)
	if err != nil {
		return nil, fmt.Errorf("open ring: %w", err)
	}
	return r, nil
}

func (h *Host) newRing(size int) (*EventReader, error) {
	size = max(size, os.Getpagesize()) // the kernel wants a multiple of the page size
	ring, err := ebpf.NewMap(&ebpf.MapSpec{Name: "ebb_ring", Type: ebpf.RingBuf, MaxEntries: uint32(size)})
	if err != nil {
		return nil, fmt.Errorf("create ring: %w", err)
	}
	return h.readRing(ring)
}

// readRing takes over the ring.
func (h *Host) readRing(ring *ebpf.Map) (*EventReader, error) {
	rd, err := ringbuf.NewReader(ring)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("read ring: %w", err), ring.Close())
	}
	return &EventReader{events: h.maps.Events, ring: ring, rd: rd}, nil
}

// Follow sends the events of these backends to this ring from now on, and no longer to another one;
// RemoveBackend ends it. Read the counts after it. Name many in one call: the kernel waits in each until no
// program uses the map as it was (synchronize_rcu, about 13 ms; before Linux 6.8 for each backend).
func (r *EventReader) Follow(backends ...uint64) error {
	rings := make([]uint32, len(backends))
	for i := range rings {
		rings[i] = uint32(r.ring.FD())
	}
	_, err := r.events.BatchUpdate(backends, rings, nil)
	if errors.Is(err, ebpf.ErrNotSupported) {
		err = nil
		for _, b := range backends {
			err = errors.Join(err, r.events.Put(b, r.ring))
		}
	}
	if err != nil {
		return fmt.Errorf("follow events: %w", room(r.events, err))
	}
	return nil
}

// Read blocks until there is an event. After Close it returns an error that wraps os.ErrClosed.
func (r *EventReader) Read() (Event, error) {
	rec, err := r.rd.Read()
	if err != nil {
		return Event{}, fmt.Errorf("read event: %w", err)
	}
	var k censusEvent
	if _, err := binary.Decode(rec.RawSample, binary.NativeEndian, &k); err != nil {
		return Event{}, fmt.Errorf("decode event: %w", err)
	}
	return Event{
		Type: EventType(k.Type), Backend: k.Backend, Gen: k.Gen, Cookie: k.Cookie,
		Time: time.Duration(k.Time), Open: k.Open,
	}, nil
}

// Close unblocks Read. The ring stays, so that a successor reads what comes meanwhile. It is idempotent.
func (r *EventReader) Close() error { return errors.Join(r.rd.Close(), r.ring.Close()) }

// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"
)

// Flags of a listener, as in ebb.h.
const (
	listenerAside  = 1
	listenerMPTCP  = 2
	listenerV6Only = 4
)

// ListenerCount is what the kernel counts for one listener. In flight is Open + Ending. The counts
// stay after the listener has closed, until its last connection has gone and Forget is called.
type ListenerCount struct {
	Cookie       uint64
	Backend, Gen uint64
	Address      Address
	V6Only       bool
	MPTCP        bool  // an MPTCP listener: each subflow counts as a connection, and it cannot be a target
	Aside        bool  // a loopback listener that nobody named
	Listening    bool  // false once it has closed
	Open         int64 // ESTABLISHED or CLOSE_WAIT, those in the accept queue among them
	Ending       int64 // our FIN is sent and not all of what we sent is acknowledged
	Closing      int64 // our FIN and all before it is acknowledged, the peer has not closed: FIN_WAIT2
	Total        uint64
	Closed       uint64
	// Total by who counted a connection first.
	BySockops, ByTracing, ByAdopt uint64
	// Healed is how often a callback flag was found overwritten, or a state that no hook had shown.
	Healed uint64
}

// Counts reads the counts of a backend's listeners, one by one: a sum over them is not one moment. Once the
// installation has been cleaned up the counts stand still, and Counts returns ErrNotInstalled.
func (h *Host) Counts(backend uint64) ([]ListenerCount, error) {
	var cs []ListenerCount
	err := h.eachCount(func(c ListenerCount) {
		if c.Backend == backend {
			cs = append(cs, c)
		}
	})
	if err != nil {
		return nil, fmt.Errorf("read counts of backend %d: %w", backend, err)
	}
	return cs, nil
}

// AllCounts reads the counts of every backend of the host in the one walk that Counts takes for each: some
// 2 µs for each listener of the host.
func (h *Host) AllCounts() (map[uint64][]ListenerCount, error) {
	all := map[uint64][]ListenerCount{}
	if err := h.eachCount(func(c ListenerCount) { all[c.Backend] = append(all[c.Backend], c) }); err != nil {
		return nil, fmt.Errorf("read counts: %w", err)
	}
	return all, nil
}

func (h *Host) eachCount(f func(ListenerCount)) error {
	if err := h.present(); err != nil {
		return err
	}
	return each(h.maps.Counts, func(cookie uint64, c censusCount) { f(listenerCount(cookie, c)) })
}

func listenerCount(cookie uint64, c censusCount) ListenerCount {
	return ListenerCount{
		Cookie: cookie, Backend: c.Backend, Gen: c.Gen, Address: addressOf(c.Addr),
		V6Only: c.Flags&listenerV6Only != 0, MPTCP: c.Flags&listenerMPTCP != 0,
		Aside: c.Flags&listenerAside != 0, Listening: c.Listening != 0,
		// Signed halves: a count below zero must show as one.
		Open: int64(int32(uint32(c.Live))), Ending: int64(int32(uint32(c.Live >> 32))), Closing: c.Closing,
		Total: c.Total, Closed: c.Closed,
		BySockops: c.BySockops, ByTracing: c.ByTracing, ByAdopt: c.ByAdopt, Healed: c.Healed,
	}
}

// Forget removes the counts of a listener that has closed and has no connection left; ErrInUse if it
// has. It is idempotent.
func (h *Host) Forget(cookie uint64) error {
	var c censusCount
	err := h.maps.Counts.Lookup(cookie, &c)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("forget listener %d: %w", cookie, err)
	}
	if c.Listening != 0 || c.Live != 0 || c.Closing != 0 {
		return fmt.Errorf("forget listener %d: %w", cookie, ErrInUse)
	}
	if err := remove(h.maps.Counts, cookie); err != nil {
		return fmt.Errorf("forget listener %d: %w", cookie, err)
	}
	return nil
}

// Alive is how many of a backend's listeners the kernel believes to be open, and how many connections it
// turned away or steered for them. A refusal ends when none is open.
type Alive struct {
	Live  int // those that count
	Aside int // those that were put aside

	Refused uint64 // connections turned away so far
	// Steered is how many were sent to a target while the action was steer. What looks like a new
	// connection and is none, such as a retransmitted SYN, counts as well.
	Steered uint64
}

// Listeners reads how many listeners of a backend are open.
func (h *Host) Listeners(backend uint64) (Alive, error) {
	var a censusAlive
	err := h.maps.Listeners.Lookup(backend, &a)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return Alive{}, fmt.Errorf("read listeners of backend %d: %w", backend, err)
	}
	return Alive{Live: int(a.Live), Aside: int(a.Aside), Refused: a.Refused, Steered: a.Steered}, nil
}

// DrainMark tells the kernel that a backend drains, so that it sends zero events, and tells a
// successor what was going on. Times are on the boot clock.
type DrainMark struct {
	Gen             uint64
	Begun, Deadline time.Duration
	Draining        bool
}

// SetDrain writes the mark of a backend. Read the counts after it: no event comes if they are zero
// already.
func (h *Host) SetDrain(id uint64, d DrainMark) error {
	k := censusDrain{Gen: d.Gen, Begun: uint64(d.Begun), Deadline: uint64(d.Deadline)}
	if d.Draining {
		k.Draining = 1
	}
	if err := h.maps.Drains.Put(id, &k); err != nil {
		return fmt.Errorf("mark drain of backend %d: %w", id, room(h.maps.Drains, err))
	}
	return nil
}

// DrainMark reads the mark of a backend; ok is false if it has none.
func (h *Host) DrainMark(id uint64) (d DrainMark, ok bool, err error) {
	var k censusDrain
	err = h.maps.Drains.Lookup(id, &k)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return DrainMark{}, false, nil
	}
	if err != nil {
		return DrainMark{}, false, fmt.Errorf("read drain of backend %d: %w", id, err)
	}
	return DrainMark{
		Gen: k.Gen, Begun: time.Duration(k.Begun), Deadline: time.Duration(k.Deadline), Draining: k.Draining != 0,
	}, true, nil
}

// ClearDrain removes the mark of a backend. It is idempotent.
func (h *Host) ClearDrain(id uint64) error {
	if err := remove(h.maps.Drains, id); err != nil {
		return fmt.Errorf("clear drain of backend %d: %w", id, err)
	}
	return nil
}

// TagState is what the kernel has counted a socket as.
type TagState uint32

// The states of a tag. A connection that is in TagNew or TagListener is not counted yet.
const (
	TagNew TagState = iota
	TagListener
	TagOpen
	TagEnding
	TagClosing
	TagDone
)

// Tag is what the kernel remembers with a socket: whose it is and how it is counted.
type Tag struct {
	Backend, Gen uint64
	Cookie       uint64        // the listener's
	Since        time.Duration // boot clock, when it was first counted; for an adopted one, when it was adopted
	State        TagState
	How          uint8 // who counted it first: 1 sock_ops, 2 the tracepoint, 3 adoption
	Aside        bool  // its listener is one put aside
}

// TagMapFD is the map of tags, for sock_diag's INET_DIAG_REQ_SK_BPF_STORAGES. It is valid until Close.
func (h *Host) TagMapFD() int { return h.maps.Tags.FD() }

// DecodeTag decodes a tag as sock_diag returns it.
func DecodeTag(b []byte) (Tag, error) {
	var k censusTag
	if size := binary.Size(k); len(b) < size {
		return Tag{}, fmt.Errorf("decode tag: %d bytes, want %d", len(b), size)
	}
	if _, err := binary.Decode(b, binary.NativeEndian, &k); err != nil {
		return Tag{}, fmt.Errorf("decode tag: %w", err)
	}
	return tagOf(k), nil
}

func tagOf(k censusTag) Tag {
	return Tag{
		Backend: k.Backend, Gen: k.Gen, Cookie: k.Cookie, Since: time.Duration(k.Since),
		State: TagState(k.St), How: k.How, Aside: k.Flags&listenerAside != 0,
	}
}

// errorNames are the counters of what the kernel could not do, in the order of ebb.h.
var errorNames = [...]string{"counts_full", "tags_nomem", "ring_full", "listeners_full", "admissions_full"}

// Errors reads how often a kernel program could not do its work, since the installation. Growth of
// counts_full or tags_nomem means that a listener is not counted, so a count is unknown; ring_full
// loses events, listeners_full makes a refusal do nothing, admissions_full leaves a listener under
// another's wildcard.
func (h *Host) Errors() (map[string]uint64, error) {
	out := make(map[string]uint64, len(errorNames))
	for i, name := range errorNames {
		var n uint64
		if err := h.maps.Errors.Lookup(uint32(i), &n); err != nil {
			return nil, fmt.Errorf("read error counters: %w", err)
		}
		out[name] = n
	}
	return out, nil
}

// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"crypto/rand"
	"slices"
	"sync"
	"time"

	"github.com/ebbproxy/ebb/drain"
)

// DefaultLogSize is the number of events that a Log retains unless told otherwise: a drain emits some
// twenty, so this is the last fifty drains or so, in about 1 MiB.
const DefaultLogSize = 1024

// maxKept bounds what a Log keeps of one drain beside its ring. A drain has seven phases and one outcome;
// only the newest event of each kind is kept.
const maxKept = 32

// Log is the numbered event log: a bounded ring that publishers never wait for and that each subscriber
// reads at its own pace. Beside the ring it keeps the phases and the outcome of each backend's latest
// drain, so that a subscriber who comes late still reads the present phase.
//
// All methods may be called from any goroutine.
type Log struct {
	epoch  string
	mu     sync.Mutex
	ring   []Event // ring[seq % len(ring)]
	first  uint64  // the number of the first event ever
	next   uint64  // the number of the next event
	kept   map[string][]Event
	wake   chan struct{} // closed and replaced at each Publish
	closed bool
}

// LogOptions are the options of NewLog. The zero value is usable.
type LogOptions struct {
	// Size is the number of events retained; DefaultLogSize if 0.
	Size int
	// First is the number of the first event; 1 if 0. A process that goes on with the log of another
	// sets it beyond the other's last, so that numbers are not used twice.
	First uint64
	// Epoch names the numbering; made up if empty. A process that goes on with the numbers of another takes its epoch over,
	// so that its followers know that no number comes twice.
	Epoch string
}

// NewLog returns an empty log.
func NewLog(o LogOptions) *Log {
	if o.Size <= 0 {
		o.Size = DefaultLogSize
	}
	if o.First == 0 {
		o.First = 1
	}
	if o.Epoch == "" {
		o.Epoch = rand.Text()
	}
	return &Log{
		epoch: o.Epoch,
		ring:  make([]Event, o.Size),
		first: o.First,
		next:  o.First,
		kept:  make(map[string][]Event),
		wake:  make(chan struct{}),
	}
}

// Publish gives ev its number, and the present time if it has none, and returns the number. It never
// blocks: a subscriber that is too slow reads EventLost in place of what was overwritten. Fields must not
// be changed afterwards. After Close it does nothing and returns 0.
func (l *Log) Publish(ev Event) uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return 0
	}
	ev.Seq = l.next
	if ev.Time.IsZero() {
		ev.Time = time.Now()
	}
	l.ring[ev.Seq%uint64(len(l.ring))] = ev
	l.next++
	l.keep(ev)
	close(l.wake)
	l.wake = make(chan struct{})
	return ev.Seq
}

// keep remembers ev if it tells where a drain stands.
func (l *Log) keep(ev Event) {
	if ev.Drain == "" || (ev.Phase == "" && ev.Outcome == "") {
		return
	}
	evs := l.kept[ev.Backend]
	if len(evs) > 0 && evs[0].Drain != ev.Drain {
		evs = nil
	}
	// Progress repeats itself; of each kind only the newest matters.
	evs = slices.DeleteFunc(slices.Clone(evs), func(o Event) bool {
		return o.Type == ev.Type && o.Phase == ev.Phase && o.Outcome == ev.Outcome
	})
	if len(evs) == maxKept {
		evs = evs[1:]
	}
	l.kept[ev.Backend] = append(evs, ev)
}

// Forget drops what is kept beside the ring for a backend that is gone.
func (l *Log) Forget(backend string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.kept, backend)
}

// Epoch names the numbering of the log: where it is another one, the numbers have begun again.
func (l *Log) Epoch() string { return l.epoch }

// Last is the number of the newest event; 0 if there is none yet.
func (l *Log) Last() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.next == l.first {
		return 0
	}
	return l.next - 1
}

// Close ends every subscription after it has read what is retained. It is idempotent.
func (l *Log) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.closed {
		l.closed = true
		close(l.wake)
	}
	return nil
}

// Subscribe starts reading at the event numbered from; 0 is the oldest that is retained. It costs nothing
// until Next is called and needs no end.
func (l *Log) Subscribe(from uint64) *Subscription {
	return &Subscription{log: l, pos: from}
}

// Subscription is one reader of a Log. It belongs to one goroutine.
type Subscription struct {
	log     *Log
	pos     uint64  // the number of the next event wanted; 0: the oldest
	ready   []Event // to be returned before the ring is looked at again
	started bool
}

// Next returns the next event and waits for it if there is none. It returns the context's cause when ctx
// is over, and ErrLogClosed when the log is closed and has been read to its end.
//
// Where events were overwritten before they were read, it returns first those that are kept of the
// backends' latest drains, then one EventLost for the rest.
func (s *Subscription) Next(ctx context.Context) (Event, error) {
	for {
		ev, wake, err := s.step()
		if wake == nil {
			return ev, err
		}
		select {
		case <-wake:
		case <-ctx.Done():
			return Event{}, context.Cause(ctx)
		}
	}
}

// TryNext returns the next event without waiting; false if there is none yet.
func (s *Subscription) TryNext() (Event, bool) {
	ev, wake, err := s.step()
	return ev, wake == nil && err == nil
}

// step returns an event, or an error, or a channel that is closed when it is worth trying again.
func (s *Subscription) step() (Event, <-chan struct{}, error) {
	l := s.log
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(s.ready) == 0 {
		s.fill()
	}
	if len(s.ready) > 0 {
		ev := s.ready[0]
		s.ready = s.ready[1:]
		return ev, nil, nil
	}
	if l.closed {
		return Event{}, nil, ErrLogClosed
	}
	return Event{}, l.wake, nil
}

// fill puts at least one event into ready if there is one. The log is locked.
func (s *Subscription) fill() {
	l := s.log
	oldest := l.first
	if n := uint64(len(l.ring)); l.next-l.first > n {
		oldest = l.next - n
	}
	if !s.started {
		s.started = true
		switch {
		case s.pos == 0:
			s.pos = l.first
		case s.pos > l.next:
			// A number that was not given yet comes from another log: the owner was restarted.
			s.ready = append(s.ready, lost(s.pos, s.pos, 0, "the log was restarted; its numbers begin again"))
			s.pos = l.first
		case s.pos < l.first:
			s.ready = append(s.ready, lost(s.pos, l.first-1, 0, "the log was restarted"))
			s.pos = l.first
		}
	}
	if s.pos < oldest {
		kept := l.keptBetween(s.pos, oldest)
		s.ready = append(s.ready, kept...)
		if n := oldest - s.pos - uint64(len(kept)); n > 0 {
			s.ready = append(s.ready, lost(s.pos, oldest-1, n, "overwritten before they were read"))
		}
		s.pos = oldest
	}
	if len(s.ready) == 0 && s.pos < l.next {
		s.ready = append(s.ready, l.ring[s.pos%uint64(len(l.ring))])
		s.pos++
	}
}

// keptBetween are the kept events numbered from ≤ seq < to, in order. The log is locked.
func (l *Log) keptBetween(from, to uint64) []Event {
	var out []Event
	for _, evs := range l.kept {
		for _, ev := range evs {
			if ev.Seq >= from && ev.Seq < to {
				out = append(out, ev)
			}
		}
	}
	slices.SortFunc(out, func(a, b Event) int {
		if a.Seq < b.Seq {
			return -1
		}
		return 1
	})
	return out
}

func lost(from, to, count uint64, reason string) Event {
	return drain.Event{
		Seq: to, Time: time.Now(), Type: EventLost,
		Message: "events are missing here: " + reason,
		Fields:  map[string]any{"from": from, "to": to, "count": count, "reason": reason},
	}
}

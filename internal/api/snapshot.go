// SPDX-License-Identifier: Apache-2.0

package api

import (
	"errors"
	"fmt"
	"slices"
)

// LogSnapshot is what a Log holds at one moment, in a form that another process can make the same Log of.
type LogSnapshot struct {
	Epoch string  `json:"epoch"`
	First uint64  `json:"first"`
	Next  uint64  `json:"next"`
	Size  int     `json:"size"`
	Ring  []Event `json:"ring"` // the newest, in order
	Kept  []Event `json:"kept"` // of the latest drains, in order; some of them are in Ring too
}

// Snapshot is what the log holds now. The next event that is published has the number Next.
func (l *Log) Snapshot() LogSnapshot {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := LogSnapshot{Epoch: l.epoch, First: l.first, Next: l.next, Size: len(l.ring), Kept: l.keptBetween(0, l.next)}
	for seq := l.oldest(); seq < l.next; seq++ {
		s.Ring = append(s.Ring, l.ring[seq%uint64(len(l.ring))])
	}
	return s
}

// oldest is the number of the oldest event in the ring. The log is locked.
func (l *Log) oldest() uint64 { return max(l.first, l.next-min(l.next, uint64(len(l.ring)))) }

// NewLogOf returns a Log that goes on where the one of the snapshot was.
func NewLogOf(s LogSnapshot) (*Log, error) {
	if s.Size < 1 || s.First == 0 || s.Next < s.First {
		return nil, errors.New("copy an event log: the snapshot is none")
	}
	l := NewLog(LogOptions{Size: s.Size, First: s.First, Epoch: s.Epoch})
	l.next = s.Next
	if want := l.next - l.oldest(); uint64(len(s.Ring)) != want {
		return nil, fmt.Errorf("copy an event log: %d events, want %d", len(s.Ring), want)
	}
	for i, ev := range s.Ring {
		if ev.Seq != l.oldest()+uint64(i) {
			return nil, fmt.Errorf("copy an event log: event %d stands in place of %d", ev.Seq, l.oldest()+uint64(i))
		}
		l.ring[ev.Seq%uint64(len(l.ring))] = ev
	}
	for _, ev := range slices.Clone(s.Kept) {
		l.keep(ev)
	}
	return l, nil
}

// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/ebbproxy/ebb/drain"
)

// readAll reads what there is without waiting.
func readAll(s *Subscription) []Event {
	var out []Event
	for ev, ok := s.TryNext(); ok; ev, ok = s.TryNext() {
		out = append(out, ev)
	}
	return out
}

func seqs(evs []Event) []uint64 {
	out := make([]uint64, len(evs))
	for i, ev := range evs {
		out[i] = ev.Seq
	}
	return out
}

func equal[T comparable](a, b []T) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return true
}

func TestLogNumbersAndResumes(t *testing.T) {
	l := NewLog(LogOptions{Size: 8})
	if got := l.Last(); got != 0 {
		t.Errorf("Last of an empty log: got %d, want 0", got)
	}
	for range 5 {
		l.Publish(Event{Type: "x"})
	}
	if got := l.Last(); got != 5 {
		t.Errorf("Last: got %d, want 5", got)
	}
	for _, tc := range []struct {
		from uint64
		want []uint64
	}{
		{0, []uint64{1, 2, 3, 4, 5}},
		{1, []uint64{1, 2, 3, 4, 5}},
		{4, []uint64{4, 5}},
		{6, []uint64{}},
	} {
		if got := seqs(readAll(l.Subscribe(tc.from))); !equal(got, tc.want) {
			t.Errorf("from %d: got %v, want %v", tc.from, got, tc.want)
		}
	}
}

// A gap is said, with the numbers that are missing.
func TestLogSaysWhatIsLost(t *testing.T) {
	l := NewLog(LogOptions{Size: 4})
	s := l.Subscribe(0)
	l.Publish(Event{Type: "x"})
	if got := seqs(readAll(s)); !equal(got, []uint64{1}) {
		t.Fatalf("got %v, want [1]", got)
	}
	for range 9 { // 2 … 10; the ring holds 7 … 10
		l.Publish(Event{Type: "x"})
	}
	evs := readAll(s)
	if got, want := seqs(evs), []uint64{6, 7, 8, 9, 10}; !equal(got, want) {
		t.Fatalf("got %v, want %v", got, want)
	}
	f := evs[0].Fields
	if evs[0].Type != EventLost || f["from"] != uint64(2) || f["to"] != uint64(6) || f["count"] != uint64(5) {
		t.Errorf("got %q %v, want events.lost from 2 to 6, 5 of them", evs[0].Type, f)
	}
	// A restarted log has numbers of its own: nobody waits for one that will not come for days.
	evs = readAll(l.Subscribe(1_000_000))
	if len(evs) == 0 || evs[0].Type != EventLost {
		t.Fatalf("from a number of another log: got %v, want events.lost first", evs)
	}
	if got := evs[len(evs)-1].Seq; got != 10 {
		t.Errorf("after it: got up to %d, want 10", got)
	}
}

func TestLogGoesOnWithTheNumbersOfAnother(t *testing.T) {
	l := NewLog(LogOptions{First: 100})
	if got := l.Publish(Event{}); got != 100 {
		t.Errorf("first number: got %d, want 100", got)
	}
	evs := readAll(l.Subscribe(98))
	if len(evs) != 2 || evs[0].Type != EventLost || evs[1].Seq != 100 {
		t.Errorf("got %v, want events.lost, then 100", evs)
	}
}

// A subscriber who comes after the ring has turned over many times still reads the phases of the latest
// drain, and those of no other.
func TestT11_LateSubscriberSeesThePresentPhase(t *testing.T) {
	l := NewLog(LogOptions{Size: 4})
	phase := func(id string, p drain.Phase) {
		l.Publish(Event{Type: "drain.phase", Backend: "web", Drain: id, Phase: p})
	}
	phase("old", drain.PhaseBegin)
	phase("old", drain.PhaseWait)
	for _, p := range []drain.Phase{drain.PhaseBegin, drain.PhaseStopNew, drain.PhaseSettle, drain.PhaseWait} {
		phase("new", p)
	}
	for range 1000 {
		l.Publish(Event{Type: "drain.progress", Backend: "web", Drain: "new", Phase: drain.PhaseWait})
	}
	for range 100 {
		l.Publish(Event{Type: "other", Backend: "api"})
	}
	var phases []drain.Phase
	evs := readAll(l.Subscribe(0))
	for _, ev := range evs {
		if ev.Type == "drain.phase" {
			if ev.Drain != "new" {
				t.Errorf("got an event of drain %q, want new ones only", ev.Drain)
			}
			phases = append(phases, ev.Phase)
		}
	}
	want := []drain.Phase{drain.PhaseBegin, drain.PhaseStopNew, drain.PhaseSettle, drain.PhaseWait}
	if !equal(phases, want) {
		t.Errorf("phases: got %v, want %v", phases, want)
	}
	var last uint64
	for _, ev := range evs {
		if ev.Seq <= last {
			t.Fatalf("number %d after %d: they must grow", ev.Seq, last)
		}
		last = ev.Seq
	}
	if n := len(l.kept["web"]); n > maxKept {
		t.Errorf("kept %d events of one drain, want at most %d", n, maxKept)
	}
	l.Forget("web")
	for _, ev := range readAll(l.Subscribe(0)) {
		if ev.Type == "drain.phase" {
			t.Errorf("got %v of a backend that was forgotten", ev)
		}
	}
}

func TestLogWakesAndEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLog(LogOptions{})
		ctx, cancel := context.WithCancelCause(t.Context())
		var (
			wg    sync.WaitGroup
			got   [2][]uint64
			ended [2]error
		)
		for i := range got {
			wg.Go(func() {
				s := l.Subscribe(0)
				for {
					ev, err := s.Next([]context.Context{t.Context(), ctx}[i])
					if err != nil {
						ended[i] = err
						return
					}
					got[i] = append(got[i], ev.Seq)
				}
			})
		}
		synctest.Wait()
		l.Publish(Event{})
		synctest.Wait()
		why := errors.New("enough")
		cancel(why)
		synctest.Wait()
		l.Publish(Event{})
		if err := errors.Join(l.Close(), l.Close()); err != nil {
			t.Errorf("Close: %v", err)
		}
		if seq := l.Publish(Event{}); seq != 0 {
			t.Errorf("Publish after Close: got %d, want 0", seq)
		}
		wg.Wait()
		if !equal(got[0], []uint64{1, 2}) || !errors.Is(ended[0], ErrLogClosed) {
			t.Errorf("follower: got %v, %v, want [1 2] and ErrLogClosed", got[0], ended[0])
		}
		if !equal(got[1], []uint64{1}) || !errors.Is(ended[1], why) {
			t.Errorf("cancelled: got %v, %v, want [1] and the cause", got[1], ended[1])
		}
	})
}

// Publishers never wait, and a reader of a log that turns over under it misses nothing without being told.
func TestLogUnderConcurrentPublishers(t *testing.T) {
	const publishers, each = 8, 500
	l := NewLog(LogOptions{Size: 64})
	var wg sync.WaitGroup
	for range publishers {
		wg.Go(func() {
			for range each {
				l.Publish(Event{Type: "x"})
			}
		})
	}
	var seen, lost uint64
	read := make(chan error, 1)
	go func() {
		s := l.Subscribe(0)
		next := uint64(1)
		for {
			ev, err := s.Next(t.Context())
			if err != nil {
				read <- err
				return
			}
			if ev.Type == EventLost {
				n, _ := ev.Fields["count"].(uint64)
				lost += n
				next = ev.Seq + 1
				continue
			}
			if ev.Seq != next {
				t.Errorf("number %d, want %d: a gap that was not said", ev.Seq, next)
			}
			next = ev.Seq + 1
			seen++
		}
	}()
	wg.Wait()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-read; !errors.Is(err, ErrLogClosed) {
		t.Errorf("end: got %v, want ErrLogClosed", err)
	}
	if seen+lost != publishers*each {
		t.Errorf("seen %d + lost %d, want %d", seen, lost, publishers*each)
	}
}

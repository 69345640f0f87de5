// SPDX-License-Identifier: Apache-2.0

package session

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
)

var seed = flag.Uint64("seed", 0, "of the random schedules; 0: another each time")

// client is an application's side: it reads what comes, drops duplicates and acknowledges when it likes.
type client struct {
	id     string
	seen   []api.SessionEvent // without duplicates, in order
	reads  int                // with them
	stream uint64
}

// schedule is one random run: drains come and go, clients and the owner fail at any moment.
type schedule struct {
	t       *testing.T
	rnd     *rand.Rand
	opt     Options
	b       *Book
	status  drain.Status
	told    []string // of the present drain, as somebody hears it who was there from its beginning
	clients []*client
	expect  map[*client][]string // drain and type of each event
	trace   []string
}

func (s *schedule) say(format string, a ...any) { s.trace = append(s.trace, fmt.Sprintf(format, a...)) }

// tell notes that each client is to hear of something, once.
func (s *schedule) tell(what string) {
	e := s.status.ID + " " + what
	s.told = append(s.told, e)
	for _, c := range s.clients {
		s.expect[c] = append(s.expect[c], e)
	}
}

// trouble is what happens between two steps of a drain.
func (s *schedule) trouble() {
	for range s.rnd.IntN(8) {
		time.Sleep(time.Duration(s.rnd.Int64N(int64(200 * time.Millisecond))))
		switch n := s.rnd.IntN(10); {
		case n == 0 && len(s.clients) < 8:
			v, err := s.b.Open(s.t.Context(), api.Process{PID: 10}, api.SessionRequest{})
			if err != nil {
				s.t.Fatal(err)
			}
			c := &client{id: v.ID}
			s.clients = append(s.clients, c)
			for _, e := range s.told {
				if e != s.status.ID+" "+api.SessionDeadline { // which is in the notice by now
					s.expect[c] = append(s.expect[c], e)
				}
			}
			s.say("client %d registers", len(s.clients)-1)
		case n == 1:
			s.restart()
		case n == 2:
			s.b.Follow(s.status) // again
		case len(s.clients) > 0:
			s.act(s.rnd.IntN(len(s.clients)))
		}
	}
}

// restart is the death of the owner between two writes: the next one has the file and the machine's journal.
func (s *schedule) restart() {
	s.say("restart")
	var err error
	if s.b, err = New(s.opt); err != nil {
		s.t.Fatal(err)
	}
	s.b.Follow(s.status)
}

// act lets a client read some, forget that it did, or acknowledge.
func (s *schedule) act(i int) {
	c := s.clients[i]
	if len(c.seen) > 0 && s.rnd.IntN(3) == 0 {
		seq := c.seen[s.rnd.IntN(len(c.seen))].Seq
		s.say("client %d acknowledges %d", i, seq)
		s.ack(c, seq)
		return
	}
	var from uint64
	if len(c.seen) > 0 && s.rnd.IntN(2) == 0 {
		from = c.seen[len(c.seen)-1].Seq + 1
	}
	c.stream++
	batch, err := s.b.Events(s.t.Context(), c.id, api.Process{}, from, c.stream)
	if errors.Is(err, api.ErrUnknownSession) && c.over() {
		return
	}
	if err != nil || batch.End != "" {
		s.t.Fatalf("client %d reads: %q, %v", i, batch.End, err)
	}
	cut := s.rnd.IntN(len(batch.Events) + 1)
	s.say("client %d reads %d events from %d on, and is cut after %d", i, len(batch.Events), from, cut)
	for _, e := range batch.Events[:cut] {
		c.reads++
		c.take(s.t, e)
	}
}

func (s *schedule) ack(c *client, seq uint64) {
	_, err := s.b.Call(s.t.Context(), c.id, api.Process{}, api.SessionCall{Op: "ack", Seq: seq})
	if err != nil && !(errors.Is(err, api.ErrUnknownSession) && c.over()) {
		s.t.Fatal(err)
	}
}

// over reports whether the client has read that it must not come back.
func (c *client) over() bool {
	return len(c.seen) > 0 && c.seen[len(c.seen)-1].Reason == api.EndEvicted
}

// take drops a duplicate, which must be one, and keeps what is new, which must be next.
func (c *client) take(t *testing.T, e api.SessionEvent) {
	if i := slices.IndexFunc(c.seen, func(x api.SessionEvent) bool { return x.Seq == e.Seq }); i >= 0 {
		if x := c.seen[i]; x.Type != e.Type || x.Drain != e.Drain || x.Key != e.Key || !x.Time.Equal(e.Time) {
			t.Errorf("event %d is another than before: %+v, then %+v", e.Seq, x, e)
		}
		return
	}
	if e.Seq != uint64(len(c.seen))+1 {
		t.Errorf("got event %d after %d", e.Seq, len(c.seen))
	}
	c.seen = append(c.seen, e)
}

// drain goes through one, to its end or until it is taken back.
func (s *schedule) drain(id string, last bool) {
	old := s.status
	s.status = draining(id, 30*time.Second)
	s.told = nil
	// The notice is not ordered with the statuses.
	if s.rnd.IntN(2) == 0 {
		s.b.Follow(s.status)
		notify(s.t, s.b, s.status)
	} else {
		notify(s.t, s.b, s.status)
		s.b.Follow(old)
		s.b.Follow(s.status)
	}
	s.tell(api.SessionDraining)
	s.trouble()
	for range s.rnd.IntN(3) {
		s.status.Deadline, s.status.FlushBy = s.status.Deadline.Add(-time.Second), s.status.FlushBy.Add(-time.Second)
		s.b.Follow(s.status)
		s.tell(api.SessionDeadline)
		s.trouble()
	}
	if !last {
		s.status = over(s.status, drain.OutcomeCancelled)
		s.finish(api.SessionCancelled)
		return
	}
	s.status = flushing(s.status)
	switch s.rnd.IntN(3) {
	case 0:
		tellFlush(s.t, s.b, id)
	case 1:
		s.b.Follow(s.status)
		tellFlush(s.t, s.b, id)
	case 2:
		s.restart() // behind the journal's record of the flush
	}
	s.tell(api.SessionFlush)
	s.trouble()
	s.status = over(s.status, drain.OutcomeDrained)
	s.finish(api.SessionDone)
}

// finish tells of the end, by the machine or by a restart in the very moment.
func (s *schedule) finish(what string) {
	if s.rnd.IntN(3) == 0 {
		s.restart()
	} else {
		s.b.Follow(s.status)
	}
	s.tell(what)
	if what == api.SessionDone {
		s.tell(api.SessionEnd)
		s.told = []string{s.status.ID + " " + api.SessionEnd} // all that a late one hears
	} else {
		s.told = nil
	}
	s.trouble()
}

// Each event reaches each client that was registered, once after duplicates are dropped and in order, whatever is cut,
// restarted and acknowledged in between; and so there is one flush.
func TestR15_EveryEventOnceInRandomSchedules(t *testing.T) {
	base := *seed
	if base == 0 {
		base = rand.Uint64()
	}
	t.Logf("seed %d", base)
	dir := t.TempDir()
	duplicates, events := 0, 0
	for n := range uint64(1000) {
		synctest.Test(t, func(t *testing.T) {
			var o owner
			s := &schedule{t: t, rnd: rand.New(rand.NewPCG(base, n)), opt: o.options(), expect: map[*client][]string{}}
			defer func() {
				if t.Failed() {
					t.Errorf("schedule %d of seed %d: %q", n, base, s.trace)
				}
			}()
			s.opt.File = filepath.Join(dir, fmt.Sprint(n))
			s.b = open(t, s.opt)
			s.status = drain.Status{Gen: gen, Mode: drain.ModeEnforce, State: drain.StateServing}
			s.trouble()
			drains := 1 + s.rnd.IntN(3)
			for i := range drains {
				s.drain(fmt.Sprintf("d%d", i), i == drains-1)
			}
			for i, c := range s.clients {
				for !c.over() {
					s.act(i)
				}
				var got []string
				for _, e := range c.seen {
					got = append(got, e.Drain+" "+e.Type)
				}
				want(t, got, s.expect[c]...)
				events += len(c.seen)
				duplicates += c.reads - len(c.seen)
				s.ack(c, c.seen[len(c.seen)-1].Seq)
			}
			if v := s.b.Views(); len(v) != 0 {
				t.Errorf("got %+v when everything is acknowledged", v)
			}
			if err := os.Remove(s.opt.File); err != nil {
				t.Error(err)
			}
		})
		if t.Failed() {
			return
		}
	}
	t.Logf("%d events, and %d duplicates of them that were dropped", events, duplicates)
	if duplicates < events/10 {
		t.Errorf("got %d duplicates of %d events: the schedules cut too little", duplicates, events)
	}
}

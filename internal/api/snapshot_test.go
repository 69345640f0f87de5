// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/api/apitest"
)

// read is what a follower of a log reads now.
func read(l *api.Log, from uint64) (evs []api.Event) {
	sub := l.Subscribe(from)
	for {
		ev, ok := sub.TryNext()
		if !ok {
			return evs
		}
		if ev.Type == api.EventLost {
			ev.Time = ev.Time.Truncate(1 << 62) // that of the reading
		}
		evs = append(evs, ev)
	}
}

// A copy of a log reads like the log, whatever was overwritten, and goes on with its numbers.
func TestACopyOfALogReadsLikeIt(t *testing.T) {
	for _, published := range []int{0, 1, 7, 8, 9, 50} {
		l := api.NewLog(api.LogOptions{Size: 8, First: 5})
		for i := range published {
			ev := drain.Event{Type: "t", Backend: "web", Drain: "d"}
			if i%4 == 0 {
				ev.Phase = drain.PhaseWait
			}
			l.Publish(ev)
		}
		b, err := json.Marshal(l.Snapshot())
		if err != nil {
			t.Fatal(err)
		}
		var s api.LogSnapshot
		if err := json.Unmarshal(b, &s); err != nil {
			t.Fatal(err)
		}
		c, err := api.NewLogOf(s)
		if err != nil {
			t.Fatalf("%d events: %v", published, err)
		}
		ev := drain.Event{Type: "next"}
		if a, b := l.Publish(ev), c.Publish(ev); a != b {
			t.Errorf("after %d events the next number is %d, that of the copy %d", published, a, b)
		}
		if c.Epoch() != l.Epoch() || c.Last() != l.Last() {
			t.Errorf("%d events: the copy has another epoch or end", published)
		}
		for _, from := range []uint64{0, 1, 5, 9, 60, 1000} {
			want, got := read(l, from), read(c, from)
			for i := range want {
				// Times in JSON have no monotonic reading.
				want[i].Time = want[i].Time.Round(0)
				if i < len(got) {
					if !got[i].Time.Equal(want[i].Time) && want[i].Type == "t" {
						t.Errorf("event %d has another time", want[i].Seq)
					}
					got[i].Time = want[i].Time
				}
			}
			if !reflect.DeepEqual(got, want) {
				t.Errorf("%d events, from %d:\ngot  %+v\nwant %+v", published, from, got, want)
			}
		}
	}
}

func TestACopyOfALogIsOfAWholeOne(t *testing.T) {
	l := api.NewLog(api.LogOptions{Size: 4})
	for range 3 {
		l.Publish(drain.Event{Type: "t"})
	}
	for name, change := range map[string]func(*api.LogSnapshot){
		"zero":      func(s *api.LogSnapshot) { *s = api.LogSnapshot{} },
		"one less":  func(s *api.LogSnapshot) { s.Ring = s.Ring[1:] },
		"swapped":   func(s *api.LogSnapshot) { s.Ring[0], s.Ring[1] = s.Ring[1], s.Ring[0] },
		"backwards": func(s *api.LogSnapshot) { s.Next = 0 },
	} {
		s := l.Snapshot()
		change(&s)
		if _, err := api.NewLogOf(s); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// What a server would not have passed on is not done for one that is not trusted.
func TestRequestsAreCheckedAgain(t *testing.T) {
	log := api.NewLog(api.LogOptions{})
	src := apitest.New(log, apitest.Web())
	c := api.Checked(src)
	ctx := t.Context()
	long := strings.Repeat("x", 2000)
	neg := api.Duration(-1)
	for name, do := range map[string]func() (api.Drain, error){
		"cause":    func() (api.Drain, error) { return c.Drain(ctx, "web", api.DrainRequest{Cause: drain.CauseSignal}) },
		"no cause": func() (api.Drain, error) { return c.Drain(ctx, "web", api.DrainRequest{}) },
		"word": func() (api.Drain, error) {
			return c.Drain(ctx, "web", api.DrainRequest{Cause: drain.CauseOperator, OnNew: "maybe"})
		},
		"grace": func() (api.Drain, error) {
			return c.Drain(ctx, "web", api.DrainRequest{Cause: drain.CauseOperator, Grace: &neg})
		},
		"by": func() (api.Drain, error) {
			return c.Drain(ctx, "web", api.DrainRequest{Cause: drain.CauseApp, By: long})
		},
		"undrain": func() (api.Drain, error) { return c.Undrain(ctx, "web", api.UndrainRequest{Reason: long}) },
		"extend":  func() (api.Drain, error) { return c.Extend(ctx, "web", api.ExtendRequest{}) },
		"cut":     func() (api.Drain, error) { return c.Cut(ctx, "web", api.CutRequest{By: long}) },
	} {
		if _, err := do(); !errors.Is(err, api.ErrNotPossible) {
			t.Errorf("%s: got %v, want ErrNotPossible", name, err)
		}
	}
	if n := len(c.Drains(ctx)); n != 0 {
		t.Fatalf("%d drains were begun", n)
	}
	if _, err := c.Drain(ctx, "web", api.DrainRequest{Cause: drain.CauseOperator, Reason: "deploy", By: "root"}); err != nil {
		t.Error(err)
	}
}

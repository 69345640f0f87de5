// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestValidate(t *testing.T) {
	http := func(port uint16, path string) Probe { return Probe{HTTP: &HTTPProbe{Port: port, Path: path}} }
	for name, tt := range map[string]struct {
		probe Probe
		ok    bool
	}{
		"http":              {http(80, "/healthz?full=1"), true},
		"no path":           {http(80, ""), true},
		"tcp":               {Probe{TCP: &TCPProbe{Port: 80}, Interval: time.Second, Fall: 1}, true},
		"grpc":              {Probe{GRPC: &GRPCProbe{Port: 80}}, true},
		"exec":              {Probe{Exec: []string{"true"}}, true},
		"none":              {Probe{}, false},
		"two":               {Probe{TCP: &TCPProbe{Port: 80}, Exec: []string{"true"}}, false},
		"no port":           {http(0, "/"), false},
		"relative path":     {http(80, "healthz"), false},
		"no path at all":    {http(80, "/%zz"), false},
		"no program":        {Probe{Exec: []string{}}, false},
		"negative interval": {Probe{TCP: &TCPProbe{Port: 80}, Interval: -1}, false},
		"negative rise":     {Probe{TCP: &TCPProbe{Port: 80}, Rise: -1}, false},
	} {
		_, err := New(Options{Probe: tt.probe})
		if (err == nil) != tt.ok || (err != nil && !errors.Is(err, ErrInvalid)) {
			t.Errorf("%s: got %v, want ok %v", name, err, tt.ok)
		}
	}
}

// scripted is a checker whose attempts come out as told, and which says when each has been counted.
type scripted struct {
	*Checker
	results chan error
}

func start(t *testing.T, p Probe) scripted {
	t.Helper()
	p.TCP = &TCPProbe{Port: 1}
	c, err := New(Options{Probe: p})
	if err != nil {
		t.Fatal(err)
	}
	s := scripted{c, make(chan error)}
	c.attempt = func(ctx context.Context) error {
		select {
		case err := <-s.results:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("got %v, want the cause of the context", err)
		}
	})
	return s
}

var errDown = errors.New("down")

// give makes attempts come out as each letter says: + succeeds, - fails.
func (s scripted) give(results string) State {
	for _, r := range results {
		if r == '+' {
			s.results <- nil
		} else {
			s.results <- errDown
		}
	}
	synctest.Wait()
	return s.State()
}

func TestRiseAndFall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := start(t, Probe{Timeout: time.Hour})
		for i, step := range []struct {
			results      string
			ready, known bool
			changes      bool
		}{
			{"", false, false, false},
			{"+", false, false, false},
			{"-+", false, false, false}, // not in a row
			{"+", true, true, true},
			{"--+--", true, true, false},
			{"-", false, true, true},
			{"-----", false, true, false},
			{"+-+", false, true, false},
			{"+", true, true, true},
			{"++++", true, true, false},
		} {
			before := s.State().Since
			got := s.give(step.results)
			if got.Ready != step.ready || got.Known != step.known {
				t.Errorf("step %d: got %+v, want ready %v, known %v", i, got, step.ready, step.known)
			}
			if failed := step.results != "" && step.results[len(step.results)-1] == '-'; errors.Is(got.Err, errDown) != failed {
				t.Errorf("step %d: got error %v", i, got.Err)
			}
			changed := false
			select {
			case <-s.Changed():
				changed = true
			default:
			}
			if changed != step.changes || got.Since.Equal(before) == step.changes {
				t.Errorf("step %d: got change %v, since %v → %v, want %v", i, changed, before, got.Since, step.changes)
			}
		}
	})
}

// A backend that has never answered is known not to be ready only after it has failed often enough.
func TestFallFromUnknown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := start(t, Probe{Timeout: time.Hour, Fall: 2, Rise: 1})
		if got := s.give("-"); got.Known || got.Ready {
			t.Errorf("got %+v, want unknown", got)
		}
		if got := s.give("-"); !got.Known || got.Ready {
			t.Errorf("got %+v, want known not to be ready", got)
		}
		if got := s.give("+"); !got.Ready {
			t.Errorf("got %+v, want ready after one success", got)
		}
	})
}

// An attempt that hangs fails when its time is over, and the next comes at its usual time.
func TestTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begun := time.Now()
		s := start(t, Probe{Interval: 10 * time.Second, Timeout: time.Second, Fall: 1})
		<-s.Changed()
		if took := time.Since(begun); took < time.Second || took > 2*time.Second {
			t.Errorf("known after %v, want within a tenth of the interval and the timeout", took)
		}
		if got := s.State(); got.Known == false || !errors.Is(got.Err, errTimeout) {
			t.Errorf("got %+v, want no answer in time", got)
		}
	})
}

// Checkers that are started together spread out, and none asks more often than nine tenths of its interval.
func TestCheckersSpread(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const checkers, interval = 200, 2 * time.Second
		at := make([][]time.Duration, checkers)
		begun := time.Now()
		ctx, cancel := context.WithCancel(t.Context())
		for i := range at {
			c, err := New(Options{Probe: Probe{TCP: &TCPProbe{Port: 1}, Interval: interval}})
			if err != nil {
				t.Fatal(err)
			}
			c.attempt = func(context.Context) error {
				at[i] = append(at[i], time.Since(begun))
				return nil
			}
			go c.Run(ctx)
		}
		time.Sleep(10 * time.Minute) // of the bubble's clock
		cancel()
		synctest.Wait()
		buckets := map[time.Duration]int{} // of the last minute, by tenths of a second
		for _, times := range at {
			if n := len(times); n < 600*9/20 || n > 600*11/20 {
				t.Errorf("got %d attempts in ten minutes, want about 300", n)
			}
			for i := range times[1:] {
				if gap := times[i+1] - times[i]; gap < interval*9/10 || gap > interval*11/10 {
					t.Fatalf("got %v between two attempts, want %v within a tenth", gap, interval)
				}
			}
			for _, x := range times {
				if x > 9*time.Minute {
					buckets[x/(100*time.Millisecond)]++
				}
			}
		}
		for at, n := range buckets {
			if n > 40 { // 10 on average
				t.Errorf("%d of %d checkers ask in the same tenth of a second (%v)", n, checkers, at)
			}
		}
	})
}

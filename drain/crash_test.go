// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// A crash closes its connections before anybody can see that it was one: the zero that it makes is no drain.
func TestR9_AZeroThatACrashHasMadeIsLost(t *testing.T) {
	for _, tt := range []struct {
		name  string
		zero  time.Duration // before the exit is seen
		quiet time.Duration
		err   error
		want  Outcome
	}{
		{"crash", 10 * time.Millisecond, time.Second, errors.New("signal: killed"), OutcomeLost},
		{"crash seen late", 900 * time.Millisecond, time.Second, errors.New("signal: killed"), OutcomeLost},
		{"clean end", 10 * time.Millisecond, time.Second, nil, OutcomeDrained},
		{"crash long after", 4 * time.Second, 2 * time.Second, errors.New("exit status 2"), OutcomeDrained},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld()
				w.counts = Counts{Known: true, Active: 1}
				b := run(t, w)
				p := budget
				p.QuietPeriod = tt.quiet
				if tt.zero > tt.quiet {
					// A hold keeps the flush from being sent at zero.
					b.SetHolds(1, []string{"job"})
				}
				b.begin(Request{Policy: p})
				after(2 * time.Second)
				w.set(func(w *world) { w.counts.Active = 0 })
				b.Zero()
				after(tt.zero)
				b.Exited(tt.err)
				b.outcome(tt.want)
				if n := w.count("flush"); n != 0 {
					t.Errorf("flushes: got %d, want none to a dead application", n)
				}
			})
		})
	}
}

// SPDX-License-Identifier: Apache-2.0

package api

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := Rate{Burst: 3, Every: 10 * time.Millisecond}
		takes := func() (n int) {
			for range 10 {
				if r.Take() {
					n++
				}
			}
			return n
		}
		for _, tc := range []struct {
			after time.Duration
			want  int
		}{{0, 3}, {0, 0}, {9 * time.Millisecond, 0}, {time.Millisecond, 1}, {25 * time.Millisecond, 2}, {5 * time.Millisecond, 1}, {time.Hour, 3}, {10 * time.Millisecond, 1}} {
			time.Sleep(tc.after)
			if got := takes(); got != tc.want {
				t.Errorf("after %v: got %d, want %d", tc.after, got, tc.want)
			}
		}
	})
}

// What was too much is counted, for each application apart.
func TestRatesOfApplications(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := rates{each: Rate{Burst: maxRecords, Every: everyRecord}}
		n := 0
		for range 100 {
			if before, ok := r.take("web"); ok {
				n++
			} else if before != 0 {
				t.Errorf("got %d before one that is not recorded", before)
			}
		}
		if n != maxRecords {
			t.Errorf("got %d records, want %d", n, maxRecords)
		}
		if before, ok := r.take("other"); !ok || before != 0 {
			t.Errorf("of another one: got %d, %v", before, ok)
		}
		time.Sleep(2 * everyRecord)
		for _, want := range []int{100 - maxRecords, 0} {
			if before, ok := r.take("web"); !ok || before != want {
				t.Errorf("got %d before, %v; want %d", before, ok, want)
			}
		}
	})
}

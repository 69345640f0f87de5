// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestPlaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlaces(3, 2, "are answered")
		enter := func(app string, patience time.Duration) (func(), int) {
			t.Helper()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			leave, err := p.enter(ctx, app)
			var pr *Problem
			if errors.As(err, &pr) {
				if !pr.retry {
					t.Errorf("%v: it does not say when to try again", err)
				}
				return nil, pr.Status
			}
			return leave, 0
		}
		a1, _ := enter("a", 0)
		a2, _ := enter("a", 0)
		if _, status := enter("a", time.Second); status != 429 {
			t.Errorf("a third of a: got %d, want 429", status)
		}
		b1, _ := enter("b", 0)
		for _, app := range []string{"b", "c", ""} {
			if _, status := enter(app, time.Second); status != 503 {
				t.Errorf("a fourth, of %q: got %d, want 503", app, status)
			}
		}
		// Who waits comes in when its own application leaves.
		got := make(chan func())
		go func() {
			leave, _ := enter("a", time.Hour)
			got <- leave
		}()
		synctest.Wait()
		a1()
		a3 := <-got
		for _, leave := range []func(){a2, a3, b1} {
			leave()
		}
		if len(p.apps) != 0 || len(p.all) != 0 {
			t.Errorf("%d applications and %d places are left", len(p.apps), len(p.all))
		}
	})
}

// Where many connections are open each application may have a few more, and none can take them all.
func TestConnectionsOfOneAreFewWhenThereAreMany(t *testing.T) {
	var s shares
	take := func(app string) (n int) {
		for s.take(app, connsOf(app)) {
			n++
		}
		return n
	}
	var got []int
	for _, app := range []string{"", "a", "b", "c", "d", "e", "f", "g"} {
		got = append(got, take(app))
	}
	for i, want := range []int{16, 192, 192, 192, 192, 192, 48, 16} {
		if got[i] != want {
			t.Fatalf("got %v", got)
		}
	}
	s.give("a")
	if n := take("a"); n != 0 {
		t.Errorf("one with many was given %d more", n)
	}
}

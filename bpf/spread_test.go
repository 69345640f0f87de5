// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

func TestSpreadApportionsTheSlots(t *testing.T) {
	for _, tt := range []struct{ weights, want []int }{
		{nil, []int{}},
		{[]int{0, 0}, []int{0, 0}},
		{[]int{5}, []int{8}},
		{[]int{1, 1}, []int{4, 4}},
		{[]int{1, 1, 1}, []int{3, 3, 2}},
		{[]int{3, 1}, []int{6, 2}},
		{[]int{2, 0, 1}, []int{5, 0, 3}},
		{[]int{100, 1, 1}, []int{6, 1, 1}},
		{[]int{1, 100, 1}, []int{1, 6, 1}},
		{[]int{1, 1, 1, 1, 1, 1, 1, 1}, []int{1, 1, 1, 1, 1, 1, 1, 1}},
		{[]int{1, 1, 1, 1, 1, 1, 1, 1, 2, -1}, []int{1, 1, 1, 1, 1, 1, 1, 0, 1, 0}},
	} {
		if got := Spread(tt.weights); !slices.Equal(got, tt.want) {
			t.Errorf("%v: got %v, want %v", tt.weights, got, tt.want)
		}
	}
}

// Whatever the weights, every slot is used, every target that can be has one, and a heavier one has no fewer. From one
// arrangement to the next no slot moves that need not.
func TestPlaceMovesOnlyWhatItMust(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	var old []uint64
	for range 2000 {
		n := 1 + rnd.IntN(10)
		cookies, weights := make([]uint64, n), make([]int, n)
		for i := range cookies {
			cookies[i], weights[i] = uint64(100+i), rnd.IntN(7)
		}
		shares := Spread(weights)
		what := fmt.Sprintf("weights %v after %v", weights, old)
		took, with := 0, 0
		for i, s := range shares {
			took += s
			if weights[i] > 0 {
				with++
			}
			for j := range shares {
				if weights[i] > weights[j] && s < shares[j] {
					t.Fatalf("%s: shares %v, a heavier one has less", what, shares)
				}
			}
			if (s > 0) != (weights[i] > 0) && with <= MaxTargets && n <= MaxTargets {
				t.Fatalf("%s: shares %v", what, shares)
			}
		}
		slots := Place(old, cookies, weights)
		if with == 0 {
			if took != 0 || slots != nil {
				t.Fatalf("%s: got %v, want none", what, slots)
			}
			continue
		}
		if took != MaxTargets || len(slots) != MaxTargets {
			t.Fatalf("%s: got shares %v, slots %v", what, shares, slots)
		}
		have, had := map[uint64]int{}, map[uint64]int{}
		kept, stay := 0, 0
		for i, c := range slots {
			have[c]++
			if i < len(old) {
				had[old[i]]++
				if old[i] == c {
					kept++
				}
			}
		}
		for i, c := range cookies {
			if have[c] != shares[i] {
				t.Fatalf("%s: got slots %v, want shares %v", what, slots, shares)
			}
			stay += min(had[c], shares[i])
		}
		if kept != stay {
			t.Fatalf("%s: %d slots stayed, %d could", what, kept, stay)
		}
		old = slots
	}
}

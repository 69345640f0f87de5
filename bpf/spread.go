// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"cmp"
	"slices"
)

// Spread apportions the MaxTargets slots of an address by weight and returns how many each gets: by largest
// remainder, and at least one for every weight above zero. Of more than MaxTargets such weights the largest
// get one each. All are zero if no weight is above zero. Of equals the earlier comes first.
func Spread(weights []int) []int {
	slots := make([]int, len(weights))
	var order []int // those that take part, the largest first
	sum := 0
	for i, w := range weights {
		if w > 0 {
			order = append(order, i)
			sum += w
		}
	}
	if len(order) == 0 {
		return slots
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(weights[b], weights[a]) })
	order = order[:min(len(order), MaxTargets)]
	left := MaxTargets
	for _, i := range order {
		slots[i] = max(1, MaxTargets*weights[i]/sum)
		left -= slots[i]
	}
	// behind is how much a share lacks of what is due, in units of 1/sum.
	behind := func(i int) int { return MaxTargets*weights[i] - slots[i]*sum }
	for ; left > 0; left-- {
		slots[slices.MaxFunc(order, func(a, b int) int { return cmp.Compare(behind(a), behind(b)) })]++
	}
	for ; left < 0; left++ { // the minimum of one has given too many
		many := slices.DeleteFunc(slices.Clone(order), func(i int) bool { return slots[i] == 1 })
		slots[slices.MinFunc(many, func(a, b int) int { return cmp.Compare(behind(a), behind(b)) })]--
	}
	return slots
}

// Place arranges targets for SetTargets by weight, as Spread apportions them. A slot of old, what Targets
// returned, keeps its target as long as that one's share has room, so that new connections move only where
// they must. cookies are distinct and as many as weights; it returns none if no weight is above zero.
func Place(old, cookies []uint64, weights []int) []uint64 {
	room := map[uint64]int{}
	free := 0
	for i, n := range Spread(weights) {
		room[cookies[i]] = n
		free += n
	}
	if free == 0 {
		return nil
	}
	slots := make([]uint64, MaxTargets)
	for i, c := range old[:min(len(old), MaxTargets)] {
		if room[c] > 0 {
			slots[i] = c
			room[c]--
		}
	}
	// In turn, so that the shares lie mixed: the kernel goes on to the next slot when a target has closed.
	for at, i := 0, 0; i < MaxTargets; i++ {
		if slots[i] != 0 {
			continue
		}
		for room[cookies[at%len(cookies)]] == 0 {
			at++
		}
		c := cookies[at%len(cookies)]
		slots[i] = c
		room[c]--
		at++
	}
	return slots
}

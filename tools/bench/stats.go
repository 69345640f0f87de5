// SPDX-License-Identifier: Apache-2.0

package main

import (
	"math"
	"math/rand/v2"
	"slices"
)

// median of values that need not be sorted; NaN of none.
func median(v []float64) float64 { return quantile(v, 0.5) }

// quantile interpolates between the two nearest ranks (Hyndman and Fan, definition 7).
func quantile(v []float64, q float64) float64 {
	if len(v) == 0 {
		return math.NaN()
	}
	s := slices.Clone(v)
	slices.Sort(s)
	at := q * float64(len(s)-1)
	lo := int(at)
	hi := min(lo+1, len(s)-1)
	return s[lo] + (at-float64(lo))*(s[hi]-s[lo])
}

// interval is a bootstrap 95 % interval of the median: the 2.5 % and 97.5 % quantiles of the medians of resamples.
func interval(v []float64, rng *rand.Rand) (low, high float64) {
	const resamples = 5000
	if len(v) == 0 {
		return math.NaN(), math.NaN()
	}
	medians := make([]float64, resamples)
	draw := make([]float64, len(v))
	for i := range medians {
		for j := range draw {
			draw[j] = v[rng.IntN(len(v))]
		}
		medians[i] = median(draw)
	}
	return quantile(medians, 0.025), quantile(medians, 0.975)
}

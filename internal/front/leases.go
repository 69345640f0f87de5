// SPDX-License-Identifier: Apache-2.0

package front

import (
	"fmt"
	"slices"

	"github.com/ebbproxy/ebb/internal/api"
)

// An application may hold 256 leases of 128 bytes of name and id, which JSON makes six times longer at most, and as many are
// in the report of its drain. With all those of many an answer would not fit into a message, and nobody would see any backend.
const (
	maxLeases = 4096 // of one answer; if there are more,
	fewLeases = 32   // at least so many of each backend, or of each drain, are in it
)

// boundBackends leaves leases out of an answer that would be too long, and says so.
func boundBackends(bs []api.Backend) []api.Backend {
	n := 0
	for _, b := range bs {
		for _, s := range b.Sessions {
			n += len(s.Holds)
		}
		if b.Drain != nil {
			n += len(b.Drain.Held)
		}
	}
	if n <= maxLeases {
		return bs
	}
	keep := max(fewLeases, maxLeases/len(bs))
	bs = slices.Clone(bs)
	for i := range bs {
		b, left := &bs[i], keep
		b.Sessions = slices.Clone(b.Sessions)
		out := 0
		for j := range b.Sessions {
			s := &b.Sessions[j]
			k := min(left, len(s.Holds))
			left, out = left-k, out+len(s.Holds)-k
			s.Holds = s.Holds[:k]
		}
		if b.Drain != nil {
			d := boundDrain(*b.Drain, keep)
			b.Drain = &d
		}
		if out > 0 {
			b.Warnings = append(slices.Clip(b.Warnings), leftOut(out))
		}
	}
	return bs
}

// boundDrains is the same for drains.
func boundDrains(ds []api.Drain) []api.Drain {
	n := 0
	for _, d := range ds {
		n += len(d.Held)
	}
	if n <= maxLeases {
		return ds
	}
	ds = slices.Clone(ds)
	for i, d := range ds {
		ds[i] = boundDrain(d, max(fewLeases, maxLeases/len(ds)))
	}
	return ds
}

func boundDrain(d api.Drain, keep int) api.Drain {
	if out := len(d.Held) - keep; out > 0 {
		d.Held = d.Held[:keep]
		d.Warnings = append(slices.Clip(d.Warnings), leftOut(out))
	}
	return d
}

func leftOut(n int) string {
	return fmt.Sprintf("%d more leases are not shown, since there are so many", n)
}

// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"fmt"
	"runtime"
	"testing"
)

// Two hundred services in which nothing has happened yet are small: a host has as many, and most of them rest.
func TestManyServicesAreSmall(t *testing.T) {
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	m := newMetrics(t, &source{}, nil)
	before := heap()
	for i := range 200 {
		m.Register(fmt.Sprint("service", i), "web")
	}
	after := heap()
	t.Logf("%d KiB", (int64(after)-int64(before))>>10)
	if after > before+1<<20 {
		t.Errorf("got %d KiB for 200 services, want 1 MiB at most", (after-before)>>10)
	}
	runtime.KeepAlive(m)
}

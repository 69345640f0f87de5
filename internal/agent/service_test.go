// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"maps"
	"net/netip"
	"testing"

	"github.com/ebbproxy/ebb/bpf"
	"github.com/ebbproxy/ebb/probes"
)

// A service lives through any number of its backends' restarts, each of which has other listeners.
func TestServiceForgetsTheNamesOfListenersThatAreGone(t *testing.T) {
	t.Parallel()
	at := bpf.Address{AddrPort: netip.MustParseAddrPort("127.0.0.1:80")}
	v := &serviceSeat{at: map[bpf.Address][]uint64{}}
	for cookie := uint64(1); cookie <= 100; cookie++ {
		v.names = v.called([]candidate{{Listener: probes.Listener{Cookie: cookie}, backend: "web"}})
		want := map[string]int{}
		if cookie > 1 {
			want["web"] = 1 // the one of before is steered to until the address is written
		}
		if got := v.whom(v.at[at]); !maps.Equal(got, want) {
			t.Fatalf("before the address is steered to listener %d: got %v, want %v", cookie, got, want)
		}
		v.at[at] = []uint64{cookie}
	}
	if len(v.names) != 2 {
		t.Errorf("got the names of %d listeners, want 2: of the last one and of the one before", len(v.names))
	}
}

// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"encoding/json"
	"io"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/drain"
)

// The event that lists what is left of a drain has a line for each connection, and nothing is lost behind it.
func TestEventOfTenThousandSurvivors(t *testing.T) {
	left := make([]drain.Survivor, 10_000)
	for i := range left {
		left[i] = drain.Survivor{Peer: netip.MustParseAddrPort("192.0.2.1:40000").String(), Class: "active", Age: time.Hour, Idle: time.Minute}
	}
	var text strings.Builder
	e := json.NewEncoder(&text)
	for _, ev := range []Event{{Seq: 1, Type: drain.EventSurvivors, Fields: map[string]any{"survivors": left}}, {Seq: 2, Type: drain.EventEnd}} {
		if err := e.Encode(ev); err != nil {
			t.Fatal(err)
		}
	}
	if text.Len() < 1<<20 {
		t.Fatalf("the events have %d bytes, too few to test anything", text.Len())
	}
	s := &Stream{ctx: context.Background(), body: io.NopCloser(strings.NewReader(text.String()))}
	var got []uint64
	for ev, err := range s.All() {
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, ev.Seq)
	}
	if len(got) != 2 || got[1] != 2 {
		t.Errorf("got events %v, want 1 and 2", got)
	}
}

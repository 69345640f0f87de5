// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
)

// A flush at zero has its own slice, long before the deadline; one at the end of the wait has what is left until it is cut.
func TestExplainSaysWhenTheSliceOfTheFlushIsOver(t *testing.T) {
	begun := time.Date(2026, 11, 30, 12, 0, 0, 0, time.Local)
	for _, tc := range []struct {
		after time.Duration
		want  string
	}{
		{10 * time.Second, "12:00:15"},
		{54 * time.Second, "12:00:57"},
	} {
		d := &api.Drain{
			State: drain.StateFlushing, FlushReason: drain.FlushZero, Begun: begun, Deadline: begun.Add(time.Minute),
			Phases: []api.PhaseAt{{Phase: drain.PhaseBegin, At: begun}, {Phase: drain.PhaseFlush, At: begun.Add(tc.after)}},
			Slices: api.Slices{Flush: api.Duration(5 * time.Second), Reserve: api.Duration(3 * time.Second)},
		}
		items := map[string]string{}
		explanation{Backend: api.Backend{Drain: d}}.drainItems(func(name, format string, args ...any) {
			items[name] = fmt.Sprintf(format, args...)
		}, begun)
		if got, want := items["flush"], "sent (reason zero); the application has until "+tc.want; got != want {
			t.Errorf("flushed after %v: got %q, want %q", tc.after, got, want)
		}
	}
}

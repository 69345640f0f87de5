// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"strings"
	"syscall"
	"testing"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
)

// What is cut with a request in flight may have been done or not: report, event, metrics and the drain's own view call its
// result unknown, and count it neither as a success nor as a failure. An idle connection that is cut with it is no such.
func TestD8_CutInFlightIsUnknown(t *testing.T) {
	n := newLAN(t)
	r := n.run("web", []string{"--protocol", "http1", "--idle", "wait", "--on-new", "refuse", "--on-deadline", "reset", "--grace", "6s", "--flush-timeout", "1s", "--reserve", "2s", "--quiet-period", "300ms"},
		goServer(t, n.v4(8080), "-ignore-signals")...)
	idle, busy := dialHTTP(t, n.client, n.v4(8080)), dialHTTP(t, n.client, n.v4(8080))
	idle.get(t, "/")
	busy.send(t, "/?ms=600000")
	r.awaitCounts("one idle and one accepted", func(b api.Backend) bool { return value(b.Counts.Accepted) == 2 })
	_, view, code := n.ebb("drain", "web", "--wait")
	if code != 3 {
		t.Errorf("drain --wait: got exit code %d, want 3: expired", code)
	}
	if !strings.Contains(view, "2 destroyed, 0 left, 1 with a request in flight, whose result is unknown") {
		t.Errorf("drain --wait does not say that one result is unknown:\n%s", view)
	}
	if _, err := busy.answer(); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the client whose request was in flight: got %v, want a reset", err)
	}
	r.wait()
	e := r.find("a report of the cut", func(e drain.Event) bool { return e.Type == drain.EventCut && e.Fields["report"] != nil })
	if rep, ok := e.Fields["report"].(map[string]any); !ok || rep["InFlight"] != 1.0 || rep["Destroyed"] != 2.0 {
		t.Errorf("event: got %v, want 2 destroyed, 1 of them in flight", e.Fields)
	}
	d := r.drained()
	if d.Cut == nil || d.Cut.InFlight != 1 || d.Cut.Destroyed != 2 || d.Outcome != drain.OutcomeExpired {
		t.Errorf("report: got %+v, outcome %s, want 2 destroyed, 1 of them in flight, expired", d.Cut, d.Outcome)
	}
}

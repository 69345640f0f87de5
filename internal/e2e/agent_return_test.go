// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"testing"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
)

// A backend drains, its new connections going to another one, and ends; its owner is killed. Its next process, which the
// next owner finds, gets its own connections, long before the rule of the drain would end by itself.
func TestG1_TheNextProcessIsServedWhereTheOwnerWasKilled(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	const one, two = "127.0.0.1:8081", "127.0.0.1:8082"
	n.set(agentBudget + fmt.Sprintf(`services:
  - name: web
    protocol: http1
    backends:
      - {name: one, match: %s}
      - {name: two, match: %s}
`, match(n.ns, 8081), match(n.ns, 8082)))
	p := program(t, n.ns, goServer(t, one)...)
	program(t, n.ns, goServer(t, two)...)
	d := n.agent()
	n.ready("one")
	n.ready("two")
	id := n.drains("one", api.DrainRequest{}).ID
	d.ended(id)
	_ = p.Wait() // its stop signal ends it
	d.kill9()
	n.agent()
	n.awaitView("one", "without a process", func(b api.Backend) bool { return !b.Ready && b.PID == 0 })
	if b := n.view("one"); b.Drain == nil || b.Drain.ID != id || b.Drain.Outcome != drain.OutcomeDrained {
		t.Errorf("the next owner knows of the drain %+v, want %s, drained", b.Drain, id)
	}
	program(t, n.ns, goServer(t, one)...)
	n.ready("one")
	hold := holdOpen(t, n.ns, one)
	defer hold.Close()
	n.awaitView("one", "its connection is its own", func(b api.Backend) bool { return value(b.InFlight) == 1 })
	if b := n.view("two"); value(b.InFlight) != 0 {
		t.Errorf("%d of its connections are at the other backend", value(b.InFlight))
	}
}

// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
)

// readyWhen is a server whose health is that of a file: 200 when it is there.
const readyWhen = `
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if os.path.exists(sys.argv[2]) else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *a): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
`

// A version that is ready drains those below it, and nothing else: not one of its own, not one without a version, and none before
// it is ready. One that comes back is drained again.
func TestR16_AReadyVersionDrainsLowerOnes(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	n.set(agentBudget + "services:\n" + backendsOf("web", "drain_on_version_upgrade: true\nready: {http: {path: /healthz}, interval: 200ms, rise: 1}\nlisten: [\"127.0.0.1:80\"]",
		"name: none, match: "+match(n.ns, 8080),
		"name: v1, version: 1, match: "+match(n.ns, 8081),
		"name: v2, version: 2, match: "+match(n.ns, 8082),
		"name: v2b, version: 2, match: "+match(n.ns, 8083),
		"name: v3, version: 3, match: "+match(n.ns, 8084)))
	start := func(name string, port int) { named(t, n.ns, name, fmt.Sprintf("127.0.0.1:%d", port), "-graceful") }
	start("none", 8080)
	start("v1", 8081)
	d := n.agent()
	n.shares("v1", "none", "v1")
	start("v2", 8082)
	start("v2b", 8083)
	n.upgraded("v1")
	n.shares("v2", "none", "v2", "v2b")
	ready := filepath.Join(t.TempDir(), "ready")
	program(t, n.ns, python(t, readyWhen, "8084", ready)...)
	n.awaitView("v3", "there, and not ready", func(b api.Backend) bool { return b.PID != 0 && !b.Ready })
	// v1 comes back while v2 is ready.
	before := len(d.all(drain.EventEnd))
	start("v1", 8081)
	d.look("the next end of v1", func() bool {
		ends := 0
		for _, e := range d.events {
			if e.Type == drain.EventEnd {
				ends++
				if ends > before && e.Backend != "v1" {
					t.Errorf("%s was drained, and nothing is above it that is ready", e.Backend)
				}
			}
		}
		return ends > before
	})
	if err := os.WriteFile(ready, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	n.upgraded("v2")
	n.upgraded("v2b")
	n.shares("v3", "none", "v3")
	for _, name := range []string{"none", "v3"} {
		if b := n.view(name); b.State != drain.StateServing || b.Drain != nil {
			t.Errorf("%s is %s, its drain %+v", name, b.State, b.Drain)
		}
	}
	for _, e := range d.all(drain.EventBegin) {
		if e.Cause != drain.CauseVersionUpgrade {
			t.Errorf("%s was drained because of %s", e.Backend, e.Cause)
		}
	}
}

// upgraded waits until a backend is out because of a higher version.
func (n *node) upgraded(name string) {
	n.t.Helper()
	b := n.awaitView(name, "drained by a version", func(b api.Backend) bool {
		return b.Drain != nil && b.Drain.Cause == drain.CauseVersionUpgrade && !b.Drain.Running()
	})
	if b.Drain.Outcome != drain.OutcomeDrained {
		n.t.Errorf("the drain of %s ended %s, want drained", name, b.Drain.Outcome)
	}
}

// The version that an application says wins over the one that is configured. Under observe it is only told.
func TestR16_TheApplicationSaysItsVersion(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	config := func(mode string) string {
		return agentBudget + "services:\n" + backendsOf("web", "drain_on_version_upgrade: true\nmode: "+mode,
			"name: old, version: 5, match: "+match(n.ns, 8081), "name: new, version: 1, match: "+match(n.ns, 8082))
	}
	n.set(config("observe"))
	named(t, n.ns, "old", webAddr, "-graceful")
	n.part("auto,version=9", "listen=127.0.0.1:8082")
	d := n.agent()
	n.ready("old")
	if b := n.sessions("new", 1); b.Sessions[0].Version != 9 {
		t.Errorf("got version %d", b.Sessions[0].Version)
	}
	if b := n.view("old"); b.State != drain.StateServing {
		t.Errorf("under observe, old is %s", b.State)
	}
	d.reload(config("enforce"))
	n.upgraded("old")
	if b := n.view("new"); b.State != drain.StateServing || !b.Ready {
		t.Errorf("new is %s", b.State)
	}
}

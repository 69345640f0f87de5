// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
)

// A backend that has drained and whose process lives on stays drained under the next agent: it gets nothing, and drains nobody.
func TestR12_AnEndedGenerationStaysEndedUnderTheNextAgent(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	n.set(agentBudget + "services:\n" + backendsOf("web", "listen: [\"127.0.0.1:80\"]\nflush: {exec: [\"true\"]}\ndrain_on_version_upgrade: true",
		"name: old, version: 2, match: "+match(n.ns, 8081), "name: back, version: 1, match: "+match(n.ns, 8082)))
	named(t, n.ns, "old", webAddr)
	d := n.agent()
	n.shares("old", "old")
	got := n.drains("old", api.DrainRequest{})
	if e := d.ended(got.ID); e.Outcome != drain.OutcomeDrained {
		t.Fatalf("the drain ended %s", e.Outcome)
	}
	named(t, n.ns, "back", "127.0.0.1:8082")
	n.shares("back", "back")
	d.stop()
	next := n.agent()
	n.shares("back", "back")
	if b := n.view("old"); b.State != drain.StateDone || b.Ready || b.Drain == nil || b.Drain.ID != got.ID || len(b.Drain.Phases) == 0 {
		t.Errorf("after the restart it is %s, ready %v, its drain %+v", b.State, b.Ready, b.Drain)
	}
	if b := n.view("back"); b.State != drain.StateServing {
		t.Errorf("its successor is %s", b.State)
	}
	if again := n.drains("old", api.DrainRequest{}); again.ID != got.ID || again.Outcome != drain.OutcomeDrained {
		t.Errorf("a drain of it is %+v, want the one that is over", again)
	}
	n.shares("back", "back")
	if begins := next.all(drain.EventBegin); len(begins) > 0 {
		t.Errorf("the next agent began %+v", begins)
	}
}

// Under ebb run a flush whose hook does not come back in its slice ends in SIGTERM, and not in SIGKILL alone. The hook hears the
// cause.
func TestT12_AFlushThatIsNotAnsweredEndsInSIGTERM(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	said := filepath.Join(t.TempDir(), "said")
	script := filepath.Join(t.TempDir(), "hook")
	if err := os.WriteFile(script, []byte("#!/bin/sh\necho \"$EBB_CAUSE\" >"+said+"\nexec sleep 1000\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	r := h.run("web", []string{"--grace", "60s", "--flush-timeout", "1s", "--reserve", "1s", "--quiet-period", "100ms", "--on-new", "refuse", "--flush", "exec:" + script},
		app(t, "listen=127.0.0.1:8001")...)
	begun := time.Now()
	if _, err := r.api().Drain(t.Context(), "web", api.DrainRequest{}); err != nil {
		t.Fatal(err)
	}
	if code := r.wait(); code != 0 {
		t.Errorf("got exit code %d, want 0", code)
	}
	if took := time.Since(begun); took > 50*time.Second {
		t.Errorf("it took %v, want no longer than the flush", took)
	}
	if r.count("signal SIGTERM") != 1 {
		t.Errorf("CMD heard SIGTERM %d times, want once", r.count("signal SIGTERM"))
	}
	if b, err := os.ReadFile(said); err != nil || strings.TrimSpace(string(b)) != "operator" {
		t.Errorf("the hook heard the cause %q, %v", b, err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"syscall"
	"testing"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
)

// What applications say comes in by a process that may stand still itself. That is no silence of theirs, and nothing drains.
func TestR13_AFrontThatStandsStillIsNoSilence(t *testing.T) {
	t.Parallel()
	n := webNode(t, apiFlush)
	p := n.part("auto", "listen="+webAddr, "exit=none")
	d := n.agent()
	n.sessions("web", 1)
	p.says("beat", 1)
	front := d.front()
	if err := syscall.Kill(front, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	p.says("away lost", 1)
	if err := syscall.Kill(front, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	n.awaitView("web", "as before", func(b api.Backend) bool {
		return b.State == drain.StateServing && b.Ready && len(b.Sessions) == 1 && b.Sessions[0].Health == api.HealthOK
	})
	if begins := d.all(drain.EventBegin); len(begins) > 0 {
		t.Errorf("a silence of the front drained %+v", begins)
	}
}

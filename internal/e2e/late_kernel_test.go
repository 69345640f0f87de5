// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"testing"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
)

// What late connections meet on the kernel at hand. Where admission can close they are steered, relayed and held; where it
// cannot they are admitted, and it is said. It needs no program but Ebb and this one, so that it runs on any kernel that
// boots.
func TestC1_LateConnectionsOnThisKernel(t *testing.T) {
	lates := func(t *testing.T, n *lan, how drain.OnNew, flags []string, next func()) {
		t.Helper()
		r := n.run("web", flags, goServer(t, n.v4(8080), "-name", "web")...)
		hold := holdOpen(t, n.client, n.v4(8080))
		var b api.Backend
		eventually(t, "a drain that finds out what can be done", func() bool {
			r.must("drain", map[string]string{"on_new": string(how)})
			if b = r.backend(); !b.Guarded || b.OnNew.Chosen == how {
				return true
			}
			r.must("undrain", struct{}{}) // an emulated machine answers too late for the choice
			return false
		})
		want := "other"
		if !b.Guarded {
			want = "web"
			chosen(t, b, drain.OnNewAdmit)
		}
		conns := []*httpConn{dialHTTP(t, n.client, n.v4(8080)), dialHTTP(t, n.client, n.v4(8080))}
		if next != nil {
			next()
		}
		for _, c := range conns {
			if got := c.servedBy(t); got != want {
				t.Errorf("a late connection, guarded %v: served by %q, want %q", b.Guarded, got, want)
			}
			c.Close()
		}
		hold.Close()
		if d := r.drainedAtZero(); b.Guarded && (d.Late == nil || d.Late.Redirected < 2 || d.Late.Failed != 0) {
			t.Errorf("late: got %+v, want two redirected and none failed", d.Late)
		}
	}
	redirected(t, func(t *testing.T, n *lan, how drain.OnNew, flags []string) { lates(t, n, how, flags, nil) })
	t.Run(string(drain.OnNewHold), func(t *testing.T) {
		n := newLAN(t)
		lates(t, n, drain.OnNewHold, with(wideBudget, "--service", "web", "--hold-for", "30s"), func() {
			n.run("other", []string{"--service", "web"}, goServer(t, n.v4(8081), "-name", "other")...)
		})
	})
}

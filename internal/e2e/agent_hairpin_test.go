// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"testing"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
)

// A workload calls itself by the address of its service, which the agent steers, and by its own. While it serves, it reaches
// itself, and each connection is counted once, by the end that was accepted; while it drains, its own new connections meet
// what everybody's do.
func TestC34_AWorkloadThatCallsItsService(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		onNew drain.OnNew
		meets string
	}{{drain.OnNewRefuse, "refused"}, {drain.OnNewSteer, "other"}, {drain.OnNewRelay, "other"}} {
		t.Run(string(tt.onNew), func(t *testing.T) {
			t.Parallel()
			lan := newLAN(t)
			n := nodeOn(lan.host, "")
			backends := []string{"name: web, match: " + match(n.ns, 8081)}
			switch tt.onNew {
			case drain.OnNewSteer:
				backends = append(backends, "name: other, match: "+match(n.ns, 8082))
			case drain.OnNewRelay:
				backends = append(backends, fmt.Sprintf("name: elsewhere, address: %q", newElsewhere(t, n.host, 9000, "-name", "other").v4))
			}
			n.set(agentBudget + "services:\n" + backendsOf("web", "listen: [\"0.0.0.0:80\"]\nidle: wait\non_new: "+string(tt.onNew), backends...))
			program(t, n.ns, python(t, selfCaller, lan.link.B.V4.String(), "8081")...)
			d := n.agent()
			n.shares("web", "web")
			c := dialHTTP(t, lan.client, lan.v4(80))
			entrances := []string{lan.v4(80), lan.v4(8081)}
			call := func(at, want string) {
				t.Helper()
				if got := string(c.get(t, "/call?"+at)); got != want {
					t.Fatalf("by %s it reaches %q, want %s", at, got, want)
				}
			}
			for _, at := range entrances {
				call(at, "self")
			}
			once := func(b api.Backend) bool {
				return b.CountsKnown && value(b.Counts.Open) == 3 && value(b.InFlight) == 3 && value(b.Counts.Accepted) == 3
			}
			n.awaitView("web", "the client and two calls, counted once each", once)
			if tt.onNew == drain.OnNewSteer {
				named(t, n.ns, "other", lan.v4(8082))
				n.shares("web", "other", "web")
			}

			got := n.drains("web", api.DrainRequest{})
			chosen(t, n.view("web"), tt.onNew)
			const calls = 5
			for range calls {
				for _, at := range entrances {
					call(at, tt.meets)
				}
			}
			b := n.view("web")
			if !once(b) {
				t.Errorf("after %d calls while it drains: %s, want 3 open, 3 accepted", 2*calls, shown(b))
			}
			// What comes by the service's address is not late: the service has left this backend out.
			if l := b.Drain.Late; l == nil || l.Failed != 0 || tt.onNew == drain.OnNewRefuse && l.Refused < calls || tt.onNew != drain.OnNewRefuse && l.Redirected < calls {
				t.Errorf("late by its own address: got %+v, want %d", l, calls)
			}
			if tt.onNew == drain.OnNewSteer {
				n.awaitView("other", "each call, counted once", func(b api.Backend) bool {
					return b.CountsKnown && value(b.Counts.Open) == 2*calls
				})
			}
			c.Close()
			if err := n.ask(func(ctx context.Context, c *api.Client) error {
				_, err := c.Cut(ctx, "web", api.CutRequest{}) // its calls to itself are open for ever
				return err
			}); err != nil {
				t.Fatal(err)
			}
			d.ended(got.ID)
		})
	}
}

// SPDX-License-Identifier: Apache-2.0

package probes_test

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/internal/netnstest"
	"github.com/ebbproxy/ebb/probes"
	"github.com/ebbproxy/ebb/probes/probestest"
)

// By sock_diag alone a busy connection is never called idle, be it at the first look or after many, with keepalives or
// without. What it does not know it says.
func TestMatrixBySockDiag(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	d, err := probes.OpenDiag(probes.DiagOptions{NetNS: ns.Fd()})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	m := probestest.Build(t, 20, probestest.Env{
		Listen:      func(network, address string) (net.Listener, error) { return ns.Listen(t, network, address), nil },
		DialContext: ns.DialContext,
	})
	look := func(c *probes.Classifier) ([]probes.Verdict, []probes.Sample) {
		t.Helper()
		socks, err := d.Dump(context.Background(), probes.Filter{States: probes.StatesConnected, LocalPorts: []uint16{m.Port}, Info: true})
		if err != nil {
			t.Fatal(err)
		}
		var samples []probes.Sample
		for _, s := range socks {
			x, partial := probes.SampleFromSocket(s)
			if partial {
				t.Fatalf("%v: no tcp_info", s.Remote)
			}
			samples = append(samples, x)
		}
		verdicts := c.Look(time.Now(), samples, false)
		if wrong := m.Wrong(verdicts); len(wrong) > 0 {
			t.Fatalf("%d wrong:\n%s", len(wrong), strings.Join(wrong, "\n"))
		}
		return verdicts, samples
	}
	c := probes.NewClassifier(probes.ClassifierOptions{Protocol: probes.ProtocolHTTP1})
	opaque := probes.NewClassifier(probes.ClassifierOptions{IdleAfter: 500 * time.Millisecond})
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	verdicts, samples := look(c)
	t.Logf("first look:\n%s", m.Summary(verdicts))
	for end := time.Now().Add(time.Minute); !m.Blurred(samples); <-tick.C {
		if time.Now().After(end) {
			t.Fatal("keepalives were not answered within a minute")
		}
		verdicts, samples = look(c)
		look(opaque)
	}
	t.Logf("after keepalives:\n%s", m.Summary(verdicts))
	fresh, _ := look(probes.NewClassifier(probes.ClassifierOptions{Protocol: probes.ProtocolHTTP1}))
	t.Logf("after keepalives, without history:\n%s", m.Summary(fresh))
	verdicts, _ = look(opaque)
	t.Logf("opaque:\n%s", m.Summary(verdicts))
	for name, class := range map[string]probes.Class{
		"unused": probes.ClassUnused, "idle after a slow handler": probes.ClassIdle, "peer takes nothing": probes.ClassStalled,
		"half-closed by the application": probes.ClassClosing,
	} {
		for _, v := range fresh {
			for _, x := range m.Conns {
				if x.State == name && v.Remote.String() == x.Client.LocalAddr().String() && v.Class != class {
					t.Errorf("%s: called %s", name, v.Class)
				}
			}
		}
	}
	// A pause inside a response: this reader does not know the direction until data goes out alone; from the second time on
	// it knows that the connection pushes.
	m.Push(t, false)
	look(c)
	<-tick.C
	m.Push(t, true)
	verdicts, _ = look(c)
	pushing := map[string]int{}
	for _, v := range verdicts {
		for _, x := range m.Conns {
			if v.Pushing && v.Remote.String() == x.Client.LocalAddr().String() {
				pushing[x.State]++
			}
		}
	}
	if len(pushing) != 1 || pushing["response paused"] != 20 {
		t.Errorf("got pushing %v, want the 20 paused responses", pushing)
	}
}

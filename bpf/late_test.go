// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/netnstest"
)

// Targets on standby are set before the flip and change nothing until it; the flip is one write, and what is steered is
// counted. Opening leaves them alone again.
func TestR3_StandbyTargetsWaitForTheFlip(t *testing.T) {
	ns := netnstest.New(t)
	h := installed(t, options(t))
	id := attach(t, h, ns)
	watchSelf(t, h, Watch{Backend: 7, Gen: 1, Only: []uint16{4390}})
	own := acceptAll(t, ns.Listen(t, "tcp", "127.0.0.1:4390"))
	other := ns.Listen(t, "tcp", "127.0.0.1:4391")
	elsewhere := acceptAll(t, other)
	a := Address{id, netip.MustParseAddrPort("127.0.0.1:4390")}
	admit(t, h, id, a.AddrPort, false, 7)
	rule := BackendRule{Action: ActionOpen, Enforce: true, Standby: true, Until: BootNow() + time.Hour}
	setRule(t, h, 7, rule)
	cookie, err := h.AddTarget(rawFD(t, other), id)
	if err != nil {
		t.Fatal(err)
	}
	if err := h.SetTargets(a, []uint64{cookie}); err != nil {
		t.Fatal(err)
	}
	if got, err := h.Targets(a); err != nil || len(got) != 1 || got[0] != cookie {
		t.Errorf("targets: got %v, %v, want [%d]", got, err, cookie)
	}
	steered := func() uint64 {
		t.Helper()
		alive, err := h.Listeners(7)
		if err != nil {
			t.Fatal(err)
		}
		return alive.Steered
	}
	goes := func(when, where string) {
		t.Helper()
		dial(t, ns, "127.0.0.1:4390")
		got := ""
		select {
		case <-own:
			got = "own"
		case <-elsewhere:
			got = "target"
		case <-time.After(30 * time.Second):
		}
		if got != where {
			t.Errorf("%s: a connection went to %q, want %q", when, got, where)
		}
	}
	goes("on standby", "own")
	if n := steered(); n != 0 {
		t.Errorf("steered before the flip: got %d, want 0", n)
	}
	rule.Action = ActionSteer
	setRule(t, h, 7, rule)
	if got, _, err := h.Backend(7); err != nil || got != rule {
		t.Errorf("rule: got %+v, %v, want %+v", got, err, rule)
	}
	goes("after the flip", "target")
	goes("after the flip", "target")
	if n := steered(); n != 2 {
		t.Errorf("steered: got %d, want 2", n)
	}
	rule.Action = ActionOpen
	setRule(t, h, 7, rule)
	goes("opened again", "own")
	if n := steered(); n != 2 {
		t.Errorf("steered after opening: got %d, want 2", n)
	}
}

// A connection that was taken out of an accept queue to be served elsewhere leaves the count at once, and neither its
// life nor its end is counted again.
func TestC24_DisownedConnectionsLeaveTheCount(t *testing.T) {
	ns := netnstest.New(t)
	h := installed(t, options(t))
	watchSelf(t, h, Watch{Backend: 7, Gen: 1, Only: []uint16{4392}})
	ln := ns.Listen(t, "tcp", "127.0.0.1:4392")
	fd := rawFD(t, ln)
	clients := []interface{ Close() error }{dial(t, ns, "127.0.0.1:4392"), dial(t, ns, "127.0.0.1:4392"), dial(t, ns, "127.0.0.1:4392")}
	eventually(t, "three connections", func() bool { return sum(t, h, 7).Open == 3 })
	var taken []int
	eventually(t, "two of them to be accepted", func() bool {
		c, _, err := unix.Accept4(fd, unix.SOCK_CLOEXEC)
		if err == nil {
			taken = append(taken, c)
		} else if !errors.Is(err, unix.EAGAIN) {
			t.Fatal(err)
		}
		return len(taken) == 2
	})
	n, err := h.Disown(taken)
	if errors.Is(err, ErrNotSupported) {
		t.Skip(err)
	}
	if n != 2 || err != nil {
		t.Fatalf("disown: got %d, %v, want 2", n, err)
	}
	if s := sum(t, h, 7); s.Open != 1 || s.Total != 3 || s.Closed != 2 {
		t.Errorf("disowned: got %d open, %d closed of %d, want 1, 2 of 3", s.Open, s.Closed, s.Total)
	}
	if n, err := h.Disown(taken); n != 0 || err != nil {
		t.Errorf("disown again: got %d, %v, want 0", n, err)
	}
	for _, c := range taken {
		if err := unix.Close(c); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range clients[:2] {
		c.Close()
	}
	eventually(t, "the ends of the disowned", func() bool { return tableOf(t, ns, 4392)[tcpEstablished] == 1 })
	if s := sum(t, h, 7); s.Open+s.Ending+s.Closing != 1 || s.Closed != 2 {
		t.Errorf("after they ended: got %d open, %d ending, %d closing, %d closed, want 1 open and 2 closed", s.Open, s.Ending, s.Closing, s.Closed)
	}
}

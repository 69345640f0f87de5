// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"net"
	"os"
	"testing"

	"github.com/ebbproxy/ebb/internal/netnstest"
)

// What a backend has open when it is removed is counted on for whoever adopts it, by another name and a later generation: also
// what waits in an accept queue, what comes while nobody asks, and the connections of a listener that has closed.
func TestC40_WhatARemovedBackendHasOpenIsCountedOn(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	h := installed(t, options(t))
	requireFiles(t, h)
	type pair struct{ client, server net.Conn }
	open := func(ln net.Listener) pair {
		t.Helper()
		c := dial(t, ns, ln.Addr().String())
		s, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		return pair{c, s}
	}
	end := func(p pair) {
		p.server.Close()
		p.client.Close()
	}
	counts := func(backend uint64, want int64) {
		t.Helper()
		eventually(t, "the count", func() bool { s := sum(t, h, backend); return s.Open+s.Ending == want })
	}
	live := func(backend uint64, want int) {
		t.Helper()
		if a, err := h.Listeners(backend); err != nil || a.Live+a.Aside != want {
			t.Errorf("backend %d: got %+v, %v, want %d listeners", backend, a, err, want)
		}
	}
	ports := []uint16{4970, 4971}
	watchSelf(t, h, Watch{Backend: 7, Gen: 3, Only: ports})
	ln, gone := ns.Listen(t, "tcp", "127.0.0.1:4970"), ns.Listen(t, "tcp", "127.0.0.1:4971")
	kept, ended := open(ln), open(ln)
	orphan := open(gone)
	gone.Close()
	dial(t, ns, "127.0.0.1:4970") // waits
	counts(7, 4)

	if err := h.RemoveBackend(7, os.Getpid()); err != nil {
		t.Fatal(err)
	}
	counts(7, 0)
	live(7, 0)
	end(ended)
	waiting := func() pair { // of the accept queue
		t.Helper()
		s, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		return pair{server: s}
	}
	dial(t, ns, "127.0.0.1:4970") // while nobody asks
	first := waiting()

	adopt := func(want int64) {
		t.Helper()
		if _, _, err := h.Adopt([]int{os.Getpid()}, AdoptTarget{Backend: 8, Gen: 9, Only: ports}); err != nil {
			t.Fatal(err)
		}
		counts(8, want)
	}
	adopt(4)
	live(8, 1)
	second := waiting()
	adopt(4)
	for _, c := range mustCounts(t, h, 8) {
		if c.Gen != 9 {
			t.Errorf("got generation %d, want 9: %+v", c.Gen, c)
		}
	}
	// Under the same name again.
	if err := h.RemoveBackend(8, os.Getpid()); err != nil {
		t.Fatal(err)
	}
	adopt(4)
	for i, p := range []pair{kept, orphan, first, second} {
		p.server.Close()
		if p.client != nil {
			p.client.Close()
		}
		if i < 2 {
			counts(8, int64(3-i))
		}
	}
	for _, c := range mustCounts(t, h, 8) {
		if c.Open < 0 || c.Ending < 0 || c.Closing < 0 {
			t.Errorf("below zero: %+v", c)
		}
	}
	// The last listener is missed: a refusal ends with it.
	if err := h.SetBackend(8, BackendRule{Gen: 9, Enforce: true, Action: ActionRefuse, Until: BootNow() + 1<<40}); err != nil {
		t.Fatal(err)
	}
	ln.Close()
	eventually(t, "no listener", func() bool { a, err := h.Listeners(8); return err == nil && a.Live+a.Aside == 0 })
	if r, _, err := h.Backend(8); err != nil || r.Action != ActionOpen {
		t.Errorf("got %+v, %v, want a rule that has opened", r, err)
	}
}

// What nobody has adopted goes once it is over.
func TestCountsThatWereKeptGoInTheEnd(t *testing.T) {
	ns := netnstest.New(t)
	h := installed(t, options(t))
	requireFiles(t, h)
	watchSelf(t, h, Watch{Backend: 7, Gen: 3, Only: []uint16{4972}})
	ln := ns.Listen(t, "tcp", "127.0.0.1:4972")
	if err := h.RemoveBackend(7, os.Getpid()); err != nil {
		t.Fatal(err)
	}
	if cs := mustCounts(t, h, 0); len(cs) != 1 || !cs[0].Listening {
		t.Fatalf("got %+v, want the listener of nobody", cs)
	}
	ln.Close()
	eventually(t, "it is closed", func() bool { return !mustCounts(t, h, 0)[0].Listening })
	if err := h.RemoveBackend(99); err != nil {
		t.Fatal(err)
	}
	if cs := mustCounts(t, h, 0); len(cs) != 0 {
		t.Errorf("got %+v, want nothing", cs)
	}
}

func mustCounts(t *testing.T, h *Host, backend uint64) []ListenerCount {
	t.Helper()
	cs, err := h.Counts(backend)
	if err != nil {
		t.Fatal(err)
	}
	return cs
}

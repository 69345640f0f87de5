// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/netnstest"
)

// counted opens a connection to a listener of this process and waits until it is counted.
func counted(t *testing.T, h *Host, ns *netnstest.NS, port uint16) {
	t.Helper()
	watchSelf(t, h, Watch{Backend: 7, Gen: 1, Only: []uint16{port}})
	ln := ns.Listen(t, "tcp", fmt.Sprintf("127.0.0.1:%d", port))
	dial(t, ns, ln.Addr().String())
	if s := sum(t, h, 7); s.Open != 1 || s.Total != 1 {
		t.Errorf("got %d open of %d, want one", s.Open, s.Total)
	}
	if !h.Guarded() {
		t.Error("not guarded")
	}
}

// An installation that was killed half-way, while it was made or removed, is removed by the next one, with what is
// attached.
func TestUnfinishedInstallationIsRemoved(t *testing.T) {
	ns := netnstest.New(t)
	o := options(t)
	h, err := Install(o)
	if err != nil {
		t.Fatal(err)
	}
	attach(t, h, ns)
	whole := h.opts.version()
	guarded := h.Guarded()
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(whole, whole+"-new-1"); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(linkPin(whole+"-new-1", sockopsLink)); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(o.Dir, "v9-new-2", "maps"), 0o700); err != nil {
		t.Fatal(err)
	}
	h = installed(t, o)
	if got := layouts(t, o); len(got) != 1 {
		t.Errorf("got %v, want one layout", got)
	}
	if got := programs(t, o); len(got) != len(h.links) {
		t.Errorf("got %d programs attached, want %d", len(got), len(h.links))
	}
	if guarded {
		counted(t, h, ns, 4801)
	}
}

// A hook whose pin is gone is attached again; what is there stays.
func TestMissingPinsAreMadeAgain(t *testing.T) {
	ns := netnstest.New(t)
	o := options(t)
	first := installed(t, o)
	if !first.Guarded() {
		t.Skip("needs Linux 5.12: one of the hooks is not attached")
	}
	setRule(t, first, 9, BackendRule{Gen: 5})
	attach(t, first, ns)
	version := first.opts.version()
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	for i, gone := range []string{"links/" + stateLink, "links/" + destroyLink, "links/" + sockopsLink, "links", "netns"} {
		if _, err := removeTree(filepath.Join(version, gone), false); err != nil {
			t.Fatal(err)
		}
		h, err := Install(o)
		if err != nil {
			t.Fatalf("without %s: %v", gone, err)
		}
		if got := pins(t, h, "links"); got != 3 {
			t.Errorf("without %s: got %d links after another install, want 3", gone, got)
		}
		attach(t, h, ns)
		counted(t, h, ns, uint16(4810+i))
		if r, ok, err := h.Backend(9); r.Gen != 5 || !ok || err != nil {
			t.Errorf("without %s: got rule %+v, %v, %v", gone, r, ok, err)
		}
		if err := errors.Join(h.RemoveBackend(7), h.Close()); err != nil {
			t.Fatal(err)
		}
	}
}

// A pin that is something else is not taken for what it should be, and the error says what to do.
func TestPinOfAnotherKindIsRefused(t *testing.T) {
	ns := netnstest.New(t)
	o := options(t)
	for _, tt := range []struct {
		what, pin string
		program   bool // else a map
	}{
		{"a program for a map", "maps/watch", true},
		{"a map for a link", "links/" + sockopsLink, false},
	} {
		t.Run(tt.what, func(t *testing.T) {
			h := installed(t, o)
			pin := filepath.Join(h.opts.version(), tt.pin)
			if err := os.Remove(pin); err != nil {
				t.Fatal(err)
			}
			var by interface {
				Pin(string) error
				Close() error
			}
			var err error
			if tt.program {
				by, err = h.loadAdmission(1)
			} else {
				by, err = h.maps.Watch.Clone()
			}
			if err == nil {
				err = errors.Join(by.Pin(pin), by.Close())
			}
			if err != nil {
				t.Fatal(err)
			}
			if _, err := Install(o); !errors.Is(err, ErrLayout) || !strings.Contains(err.Error(), "ebb cleanup") {
				t.Errorf("install: got %v, want %v with advice", err, ErrLayout)
			}
			if _, err := Cleanup(o); err != nil {
				t.Errorf("clean up: %v", err)
			}
			if left := tree(t, filepath.Dir(o.Dir)); len(left) != 1 {
				t.Errorf("clean-up left %v", left)
			}
		})
	}
	// The same of a namespace: what is installed works on.
	h := installed(t, o)
	id := netnsID(t, ns)
	m, err := h.maps.Watch.Clone()
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := m.Pin(h.netnsPin(id)); err != nil {
		t.Fatal(err)
	}
	if _, err := h.AttachNetNS(ns.Fd()); !errors.Is(err, ErrLayout) {
		t.Errorf("attach: got %v, want %v", err, ErrLayout)
	}
}

// cramped is an installation whose maps have room for two.
func cramped(o Options) Options {
	o.layout = layout{layoutName, func() (*ebpf.CollectionSpec, error) {
		spec, err := loadCensus()
		if err != nil {
			return nil, err
		}
		for name, m := range spec.Maps {
			if m.Type == ebpf.Hash || m.Type == ebpf.SockHash || name == censusMapEvents {
				m.MaxEntries = 2
			}
		}
		return spec, nil
	}}
	return o
}

// A full map is named, with what to do about it; what has room goes on, and so does what was there.
func TestFullMapIsNamed(t *testing.T) {
	ns := netnstest.New(t)
	h := installed(t, cramped(options(t)))
	id := attach(t, h, ns)
	ring, err := h.Ring()
	if err != nil {
		t.Fatal(err)
	}
	defer ring.Close()
	at := func(i uint64) Address {
		return Address{id, netip.AddrPortFrom(netip.IPv4Unspecified(), uint16(4820+i))}
	}
	for name, add := range map[string]func(i uint64) error{
		censusMapBackends:   func(i uint64) error { return h.SetBackend(i, BackendRule{}) },
		censusMapAdmissions: func(i uint64) error { return h.Admit(at(i), false, i) },
		censusMapWatch:      func(i uint64) error { return h.WatchPort(id, uint16(4830+i), Watch{Backend: i}) },
		censusMapDrains:     func(i uint64) error { return h.SetDrain(i, DrainMark{Gen: 1}) },
		censusMapEvents:     func(i uint64) error { return ring.Follow(i) },
		censusMapTargets: func(i uint64) error {
			_, err := h.AddTarget(rawFD(t, ns.Listen(t, "tcp", fmt.Sprintf("127.0.0.1:%d", 4840+i))), id)
			return err
		},
	} {
		for i := range uint64(2) {
			if err := add(i + 1); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
		err := add(3)
		if !errors.Is(err, ErrFull) || !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), "ebb cleanup") {
			t.Errorf("%s: got %v, want %v that names it, with advice", name, err, ErrFull)
		}
	}
	if err := h.Pass(at(9), 1); !errors.Is(err, ErrFull) {
		t.Errorf("pass: got %v, want %v", err, ErrFull)
	}
	if err := h.RemoveBackend(1); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(h.SetBackend(3, BackendRule{}), h.Admit(at(3), false, 3), ring.Follow(3)); err != nil {
		t.Errorf("in the place of one that was removed: %v", err)
	}
}

// Listeners that do not fit are told apart from none: the refusal does nothing and a counter says why.
func TestG1_FullListenersRefuseNothing(t *testing.T) {
	ns := netnstest.New(t)
	h := installed(t, cramped(options(t)))
	id := attach(t, h, ns)
	for i := range uint64(2) {
		if err := h.maps.Listeners.Put(90+i, &censusAlive{Live: 1}); err != nil {
			t.Fatal(err)
		}
	}
	watchSelf(t, h, Watch{Backend: 7, Gen: 1, Only: []uint16{4850}})
	ln := ns.Listen(t, "tcp", "127.0.0.1:4850")
	admit(t, h, id, addrPort(ln.Addr()), false, 7)
	refuse(t, h, 7)
	if refused(ns, ln.Addr().String()) {
		t.Error("refused although no listener is known")
	}
	if got, err := h.Errors(); err != nil || got["listeners_full"] == 0 {
		t.Errorf("got %v, %v, want listeners_full", got, err)
	}
}

// The BPF file system is mounted anew while a process works: its pins are gone, which it says, and another installation
// can be made at once.
func TestRemountedFileSystem(t *testing.T) {
	ns := netnstest.New(t)
	o := options(t)
	old := installed(t, o)
	attach(t, old, ns)
	guarded := old.Guarded()
	dir := filepath.Dir(o.Dir)
	if err := unix.Mount("bpf", dir, "bpf", 0, "mode=0700"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	if _, err := old.Counts(7); !errors.Is(err, ErrNotInstalled) {
		t.Errorf("counts: got %v, want %v", err, ErrNotInstalled)
	}
	if _, err := old.AttachNetNS(ns.Fd()); !errors.Is(err, ErrNotInstalled) {
		t.Errorf("attach: got %v, want %v", err, ErrNotInstalled)
	}
	h, err := Install(o)
	if err != nil {
		t.Fatal(err)
	}
	attach(t, h, ns)
	if guarded {
		counted(t, h, ns, 4860)
	}
	if err := h.RemoveBackend(7); err != nil {
		t.Fatal(err)
	}
	if removed, err := h.Release(); !removed || err != nil {
		t.Errorf("release: got %v, %v", removed, err)
	}
	if removed, err := old.Release(); !removed || err != nil {
		t.Errorf("release of what is hidden: got %v, %v", removed, err)
	}
}

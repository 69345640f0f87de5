// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/internal/netns"
	"github.com/ebbproxy/ebb/internal/netnstest"
)

// usage is what a process takes, apart from the threads of the runtime.
type usage struct {
	Backends, Threads, FDs, Goroutines int
	RSS                                int // KiB
}

func used(backends int) (u usage, err error) {
	runtime.GC()
	u.Backends, u.Goroutines = backends, runtime.NumGoroutine()
	fds, err := os.ReadDir("/proc/self/fd")
	u.FDs = len(fds)
	status, rerr := os.ReadFile("/proc/self/status")
	for line := range strings.Lines(string(status)) {
		fmt.Sscanf(line, "Threads: %d", &u.Threads)
		fmt.Sscanf(line, "VmRSS: %d", &u.RSS)
	}
	return u, errors.Join(err, rerr)
}

// many owns idle backends in namespaces, tells what it takes with a tenth of them and with all, and then whose
// listeners appear.
func many(dir, backends, namespaces string) error {
	var n, spaces int
	if _, err := fmt.Sscan(backends+" "+namespaces, &n, &spaces); err != nil {
		return err
	}
	began := time.Now()
	h, err := Install(Options{Dir: dir})
	if err != nil {
		return err
	}
	defer h.Close()
	ring, err := h.Ring()
	if err != nil {
		return err
	}
	defer ring.Close()
	events := make(chan Event)
	go func() {
		for {
			e, err := ring.Read()
			if err != nil {
				return
			}
			events <- e
		}
	}()
	var ids []uint64
	var first *os.File
	for range spaces {
		f, err := netns.New()
		if err != nil {
			return err
		}
		defer f.Close()
		if first == nil {
			first = f
		}
		ns, err := h.AttachNetNS(int(f.Fd()))
		if err != nil {
			return err
		}
		ids = append(ids, ns.ID)
	}
	add := func(from, to int) error {
		var all []uint64
		for i := from; i < to; i++ {
			id, port, ns := uint64(i+1), uint16(10000+i), ids[i%len(ids)]
			if err := errors.Join(
				h.WatchPort(ns, port, Watch{Backend: id, Gen: 1}),
				h.Admit(Address{ns, netip.AddrPortFrom(netip.IPv6Unspecified(), port)}, false, id),
				h.SetBackend(id, BackendRule{Action: ActionOpen, Enforce: true, Gen: 1, Standby: true}),
				h.SetDrain(id, DrainMark{Gen: 1}),
			); err != nil {
				return err
			}
			all = append(all, id)
		}
		if err := ring.Follow(all...); err != nil {
			return err
		}
		u, err := used(to)
		if err != nil {
			return err
		}
		fmt.Println(u.Backends, u.Threads, u.FDs, u.Goroutines, u.RSS)
		return nil
	}
	if err := errors.Join(add(0, n/10), add(n/10, n)); err != nil {
		return err
	}
	fmt.Println(time.Since(began).Round(time.Millisecond))
	for i := range n {
		if i%len(ids) != 0 {
			continue
		}
		if err := netns.Do(int(first.Fd()), func() error {
			ln, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", 10000+i))
			if err != nil {
				return err
			}
			return ln.Close()
		}); err != nil {
			return err
		}
		if e := <-events; e.Type != EventListen || e.Backend != uint64(i+1) {
			return fmt.Errorf("got event %+v, want a listener of backend %d", e, i+1)
		}
		if e := <-events; e.Type != EventClosed || e.Backend != uint64(i+1) {
			return fmt.Errorf("got event %+v, want the close of a listener of backend %d", e, i+1)
		}
	}
	fmt.Println("told")
	return nil
}

// One process owns many backends in many namespaces through one Host and one ring: a backend costs it neither a
// descriptor nor a goroutine nor a thread, and events say whose they are.
func TestManyBackendsCostTheirOwnerNothing(t *testing.T) {
	ns := netnstest.New(t)
	o := options(t)
	n := "1000"
	if testing.Short() {
		n = "200" // before Linux 6.8 each waits for the kernel
	}
	p, line := start(t, ns, "many", o.Dir, n, "50")
	defer func() {
		if _, err := Cleanup(o); err != nil {
			t.Error(err)
		}
	}()
	var few, all usage
	for _, u := range []*usage{&few, &all} {
		if _, err := fmt.Sscan(line, &u.Backends, &u.Threads, &u.FDs, &u.Goroutines, &u.RSS); err != nil {
			t.Fatal(err)
		}
		line = p.line(t)
	}
	t.Logf("%+v, then %+v, after %s", few, all, line)
	// A thread more or less is the runtime's.
	if few.FDs != all.FDs || few.Goroutines != all.Goroutines || all.Threads > few.Threads+4 {
		t.Errorf("got %+v, then %+v, want no more of anything but memory", few, all)
	}
	if got := p.line(t); got != "told" {
		t.Errorf("got %q", got)
	}
	p.end(t)
}

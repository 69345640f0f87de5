// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/netnstest"
)

// newer makes options of a binary with the next layout, in which three values have grown and a map has more room.
func newer(o Options) Options {
	o.layout = layout{"v2", func() (*ebpf.CollectionSpec, error) {
		spec, err := loadCensus()
		if err != nil {
			return nil, err
		}
		for _, name := range []string{censusMapWatch, censusMapBackends, censusMapDrains} {
			m := spec.Maps[name]
			m.ValueSize += 16
			m.Key, m.Value = nil, nil // its type is another one
		}
		spec.Maps[censusMapCounts].MaxEntries *= 2
		return spec, nil
	}}
	return o
}

// put writes a value of this layout into a map of any.
func put[V any](t *testing.T, m *ebpf.Map, key any, v V) {
	t.Helper()
	b, err := encode(m, v)
	if err == nil {
		err = m.Put(key, b)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// A backend moves between layouts, up and down, under load: no connection is lost, none is counted twice or not at all,
// a closed admission lets none through at any moment, and steering goes on to the same target.
func TestD12_BackendsMoveBetweenLayouts(t *testing.T) {
	for _, tt := range []struct {
		name     string
		from, to func(Options) Options
	}{
		{"upgrade", func(o Options) Options { return o }, newer},
		{"downgrade", newer, func(o Options) Options { return o }},
	} {
		t.Run(tt.name, func(t *testing.T) { moveBackends(t, tt.from, tt.to) })
	}
}

func moveBackends(t *testing.T, from, to func(Options) Options) {
	const busy, closedOne, leaving, target = 7, 8, 9, 10
	total := size(6000, 200_000)
	client, server := netnstest.New(t), netnstest.New(t)
	l := netnstest.Veth(t, client, server)
	netnstest.RPS(t, server, l.B.Dev)
	quickPorts(t, client)
	o := options(t)
	before := installed(t, from(o))
	requireFiles(t, before)
	id := attach(t, before, server)
	ports := map[uint64]uint16{busy: 4700, closedOne: 4701, leaving: 4702, target: 4703}
	lns := map[uint64]net.Listener{}
	for backend, port := range ports {
		w, err := Watch{Backend: backend, Gen: 3, Only: []uint16{port}}.kernel(0)
		if err != nil {
			t.Fatal(err)
		}
		put(t, before.maps.Watch, new(portKey(id, port)), w)
		lns[backend] = server.Listen(t, "tcp4", netip.AddrPortFrom(l.B.V4, port).String())
		admit(t, before, id, addrPort(lns[backend].Addr()), false, backend)
		go answer(lns[backend])
	}
	rules := map[uint64]BackendRule{
		busy:      {Action: ActionOpen, Enforce: true, Gen: 3},
		closedOne: {Action: ActionRefuse, Enforce: true, Gen: 3, Until: BootNow() + time.Hour},
		leaving:   {Action: ActionSteer, Enforce: true, Gen: 3, Until: BootNow() + time.Hour, Bypass: [2]uint16{7, 9}},
		target:    {Action: ActionOpen, Enforce: true, Gen: 3},
	}
	cookie, err := before.AddTarget(rawFD(t, lns[target]), id)
	if err != nil {
		t.Fatal(err)
	}
	if err := before.SetTargets(Address{id, addrPort(lns[leaving].Addr())}, []uint64{cookie}); err != nil {
		t.Fatal(err)
	}
	for backend, r := range rules {
		k, err := r.kernel()
		if err != nil {
			t.Fatal(err)
		}
		put(t, before.maps.Backends, backend, k)
	}
	put(t, before.maps.Drains, uint64(closedOne), censusDrain{Gen: 3, Deadline: 11, Begun: 5, Draining: 1})
	var held []net.Conn
	for range 20 {
		held = append(held, dial(t, client, lns[busy].Addr().String()))
		held = append(held, dial(t, client, lns[leaving].Addr().String())) // arrive at target
	}

	// The probes ask all the while.
	stop := make(chan struct{})
	var probes, wrong atomic.Int64
	var wg sync.WaitGroup
	probe := func(addr string, ok func(error) bool) {
		wg.Go(func() {
			for !closed(stop) {
				if err := exchange(client, addr, 1); !ok(err) {
					t.Errorf("%s: %v", addr, err)
					wrong.Add(1)
					return
				}
				probes.Add(1)
			}
		})
	}
	probe(lns[closedOne].Addr().String(), func(err error) bool { return err != nil && refusedBy(err) })
	probe(lns[leaving].Addr().String(), func(err error) bool { return err == nil })

	var after *Host
	wg.Go(func() {
		defer close(stop)
		churn(t, client, lns[busy].Addr().String(), total)
	})
	after = installed(t, to(o))
	attach(t, after, server)
	if ids, err := after.Elsewhere(); err != nil || !slices.Equal(ids, []uint64{busy, closedOne, leaving, target}) {
		t.Errorf("elsewhere: got %v, %v", ids, err)
	}
	for backend := range ports {
		tries := 0
		eventually(t, "a backend to be taken over", func() bool {
			tries++
			err := after.TakeOver(backend, []int{os.Getpid()})
			if err != nil && !errors.Is(err, ErrElsewhere) {
				t.Fatal(err)
			}
			return err == nil
		})
		t.Logf("backend %d after %d tries, %d probes", backend, tries, probes.Load())
	}
	if ids, err := after.Elsewhere(); err != nil || len(ids) != 0 {
		t.Errorf("elsewhere: got %v, %v, want none", ids, err)
	}
	// Its last user leaves: the other layout goes.
	if err := before.Close(); err != nil {
		t.Fatal(err)
	}
	again := installed(t, to(o))
	if got := layouts(t, o); !slices.Equal(got, []string{again.opts.layout.name}) {
		t.Errorf("got layouts %v, want the new one alone", got)
	}
	wg.Wait()

	t.Logf("%d probes, %d wrong", probes.Load(), wrong.Load())
	for backend, r := range rules {
		k, err := r.kernel()
		if err != nil {
			t.Fatal(err)
		}
		if got, ok, err := get[censusBackend](after.maps.Backends, backend); got != k || !ok || err != nil {
			t.Errorf("rule of backend %d: got %+v, %v, want %+v", backend, got, err, k)
		}
	}
	if d, ok, err := get[censusDrain](after.maps.Drains, closedOne); d.Deadline != 11 || d.Draining != 1 || !ok || err != nil {
		t.Errorf("drain: got %+v, %v, %v", d, ok, err)
	}
	if got, err := after.Targets(Address{id, addrPort(lns[leaving].Addr())}); err != nil || !slices.Equal(got, []uint64{cookie}) {
		t.Errorf("targets: got %v, %v, want %d", got, err, cookie)
	}
	census(t, after, server, ports[busy], busy)
	if s := sum(t, after, busy); s.Open != 20 {
		t.Errorf("got %d open, want the 20 held", s.Open)
	}
	// They came by another port than their listener's.
	if s := sum(t, after, target); s.Open != 20 {
		t.Errorf("got %d open at the target, want 20", s.Open)
	}
	// The new watch is in force.
	lns[target].Close()
	server.Listen(t, "tcp4", lns[target].Addr().String())
	eventually(t, "the listener that came back", func() bool {
		a, err := after.Listeners(target)
		return err == nil && a.Live == 1
	})
	for _, c := range held {
		c.Close()
	}
	eventually(t, "zero", func() bool { return sum(t, after, busy).Open+sum(t, after, target).Open == 0 })
}

// refusedBy tells a refusal from other errors.
func refusedBy(err error) bool { return errors.Is(err, unix.ECONNREFUSED) }

// D4: what is not found is not taken for gone. The rule moves at once, the count is another installation's until the last
// connection in the accept queue has a file.
func TestD4_TakeOverWaitsForTheAcceptQueue(t *testing.T) {
	ns := netnstest.New(t)
	o := options(t)
	before := installed(t, o)
	requireFiles(t, before)
	id := attach(t, before, ns)
	watchSelf(t, before, Watch{Backend: 7, Gen: 1, Only: []uint16{4711, 4712}})
	// One whose listener has closed since.
	gone := ns.Listen(t, "tcp", "127.0.0.1:4712")
	dial(t, ns, gone.Addr().String())
	orphan, err := gone.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer orphan.Close()
	gone.Close()
	ln := ns.Listen(t, "tcp", "127.0.0.1:4711")
	admit(t, before, id, addrPort(ln.Addr()), false, 7)
	for range 3 {
		dial(t, ns, ln.Addr().String())
	}
	refuse(t, before, 7)
	after := installed(t, newer(o))
	// A refusal without a listener is none: the rule stays where the listener is known.
	if err := after.TakeOver(7, nil); !errors.Is(err, ErrElsewhere) || !refused(ns, ln.Addr().String()) {
		t.Errorf("without its processes: got %v, want %v and admission closed", err, ErrElsewhere)
	}
	if _, ok, err := before.Backend(7); !ok || err != nil {
		t.Errorf("without its processes: the rule has moved: %v, %v", ok, err)
	}
	if err := after.TakeOver(7, []int{os.Getpid()}); err == nil || errors.Is(err, ErrElsewhere) {
		t.Errorf("without the namespace: got %v, want an error", err)
	}
	attach(t, after, ns)
	for range 2 {
		if err := after.TakeOver(7, []int{os.Getpid()}); !errors.Is(err, ErrElsewhere) {
			t.Fatalf("with three waiting: got %v, want %v", err, ErrElsewhere)
		}
	}
	if _, ok, err := before.Backend(7); ok || err != nil {
		t.Errorf("the rule is still in the old layout: %v, %v", ok, err)
	}
	if sum(t, before, 7).Open != 4 || !refused(ns, ln.Addr().String()) {
		t.Error("with three waiting: want them counted and admission closed")
	}
	got := acceptAll(t, ln)
	for range 3 {
		c := <-got
		defer c.Close()
	}
	if err := after.TakeOver(7, []int{os.Getpid()}); err != nil {
		t.Fatal(err)
	}
	if s := sum(t, after, 7); s.Open != 4 || !refused(ns, ln.Addr().String()) {
		t.Errorf("taken over: got %+v, want 4 open and admission closed", s)
	}
	if err := after.TakeOver(7, nil); err != nil {
		t.Errorf("again: %v", err)
	}
}

// A take-over that is killed at any moment is taken up by the next, and admission is closed all the while.
func TestD12_TakeOverKilledAtAnyMoment(t *testing.T) {
	ns := netnstest.New(t)
	o := options(t)
	before := installed(t, newer(o))
	requireFiles(t, before)
	id := attach(t, before, ns)
	w, err := Watch{Backend: 7, Gen: 1, Only: []uint16{4720}}.kernel(0)
	if err != nil {
		t.Fatal(err)
	}
	put(t, before.maps.Watch, new(portKey(id, 4720)), w)
	p, addr := start(t, ns, "listen", "tcp4", "127.0.0.1:4720")
	admit(t, before, id, netip.MustParseAddrPort(addr), false, 7)
	for range 5 {
		c := dial(t, ns, addr)
		if _, err := c.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Read(make([]byte, 1)); err != nil { // accepted, then
			t.Fatal(err)
		}
	}
	k, err := BackendRule{Action: ActionRefuse, Enforce: true, Gen: 1, Until: BootNow() + time.Hour}.kernel()
	if err != nil {
		t.Fatal(err)
	}
	put(t, before.maps.Backends, uint64(7), k)

	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for !closed(stop) {
			if !refused(ns, addr) {
				t.Error("a connection came through")
				return
			}
		}
	})
	for i := range size(8, 60) {
		killed, _ := start(t, ns, "takeover", o.Dir, "7", strconv.Itoa(p.Process.Pid))
		time.Sleep(time.Duration(i) * 8 * time.Millisecond) // another moment each time
		killed.kill9()
	}
	after := installed(t, o)
	eventually(t, "the backend to be taken over", func() bool {
		err := after.TakeOver(7, []int{p.Process.Pid})
		if err != nil && !errors.Is(err, ErrElsewhere) {
			t.Fatal(err)
		}
		return err == nil
	})
	if err := before.Close(); err != nil {
		t.Fatal(err)
	}
	if installed(t, o); !slices.Equal(layouts(t, o), []string{"v1"}) {
		t.Errorf("got %v, want v1", layouts(t, o))
	}
	close(stop)
	wg.Wait()
	all, err := after.AllCounts()
	if err != nil || len(all) != 1 || len(all[7]) != 1 {
		t.Fatalf("got counts %+v, %v, want those of one listener", all, err)
	}
	if c := all[7][0]; c.Open != 5 || !c.Listening {
		t.Errorf("got %+v, want 5 open", c)
	}
	p.end(t)
	eventually(t, "the refusal to end with the last listener", func() bool {
		a, err := after.Listeners(7)
		return err == nil && a.Live == 0
	})
}

// G2: the kill switch is the host's, and a backend of another layout can be removed.
func TestG2_KillSwitchHoldsForTheNextLayout(t *testing.T) {
	o := options(t)
	before := installed(t, newer(o))
	put(t, before.maps.Backends, uint64(7), censusBackend{})
	if _, err := SetControl(o, false); err != nil {
		t.Fatal(err)
	}
	after := installed(t, o)
	var word uint32
	if err := after.maps.Control.Lookup(uint32(0), &word); word != 0 || err != nil {
		t.Errorf("the next layout: got %d, %v, want it open", word, err)
	}
	if err := after.RemoveBackend(7); err != nil {
		t.Fatal(err)
	}
	if ids, err := after.Elsewhere(); len(ids) != 0 || err != nil {
		t.Errorf("elsewhere: got %v, %v, want none left", ids, err)
	}
	// An installation without a backend stays while somebody has it open.
	if installed(t, o); !slices.Equal(layouts(t, o), []string{"v1", "v2"}) {
		t.Errorf("got %v, want both", layouts(t, o))
	}
	if err := before.Close(); err != nil {
		t.Fatal(err)
	}
	if installed(t, o); !slices.Equal(layouts(t, o), []string{"v1"}) {
		t.Errorf("its last user has left: got %v, want v1", layouts(t, o))
	}
}

func layouts(t *testing.T, o Options) []string {
	t.Helper()
	names, err := versions(o.Dir)
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/loadtest"
	"github.com/ebbproxy/ebb/internal/netnstest"
)

// pinsOf lists what is pinned in the host's directory.
func (h *host) pinsOf() (pins []string) {
	h.t.Helper()
	err := filepath.WalkDir(filepath.Dir(h.bpffs), func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		// A bpffs shows two files of its own.
		if !d.IsDir() && !strings.HasSuffix(path, ".debug") {
			pins = append(pins, path)
		}
		return nil
	})
	if err != nil {
		h.t.Fatalf("list pins: %v", err)
	}
	return pins
}

// serves tells whether an address answers a request on a new connection; refused is a RST at the SYN.
func (h *host) serves(addr string) (served, refused bool) {
	h.t.Helper()
	var x shot
	h.ns.Do(h.t, func() { x = fire(addr, "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n") })
	return x.served, x.refused
}

func (h *host) mustServe(addr string) {
	h.t.Helper()
	if served, refused := h.serves(addr); !served {
		h.t.Errorf("%s does not serve (refused: %v)", addr, refused)
	}
}

func (h *host) mustRefuse(addr string) {
	h.t.Helper()
	if served, refused := h.serves(addr); !refused {
		h.t.Errorf("%s does not refuse (served: %v)", addr, served)
	}
}

// adopted waits until a run has taken over the CMD of an earlier one.
func (r *supervised) adopted(pid int) {
	r.h.t.Helper()
	if got := r.child(); got != pid {
		r.h.t.Fatalf("process %d is supervised, want %d to be adopted", got, pid)
	}
}

// One of three servers is killed: its own streams are lost, and nothing else. Then one of the supervisors is killed, and
// nothing is.
func TestD1_ACrashCostsWhatWasInFlightThere(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	type one struct {
		r      *supervised
		addr   string
		stream *httpConn
	}
	var all []one
	for i, name := range []string{"d1a", "d1b", "d1c"} {
		addr := fmt.Sprintf("127.0.0.1:%d", 8080+i)
		r := h.run(name, with(wideBudget, "--on-new", "refuse"), goServer(t, addr)...)
		o := one{r: r, addr: addr, stream: dialHTTP(t, h.ns, addr)}
		o.stream.send(t, "/events?ms=50")
		o.stream.head(t)
		all = append(all, o)
	}
	flows := func(o one) error {
		_, err := io.ReadFull(o.stream.br, make([]byte, 1))
		return err
	}
	a, b, c := all[0], all[1], all[2]
	if err := syscall.Kill(a.r.child(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if code := a.r.wait(); code != 128+9 {
		t.Errorf("exit code %d after CMD was killed, want 137", code)
	}
	if _, err := io.Copy(io.Discard, a.stream.br); err == nil {
		// A chunked answer that ends without its last chunk: the bytes stop, by FIN or by RST.
		t.Log("the stream of the killed server ended by FIN")
	}
	pid := b.r.child()
	endAfter(t, pid)
	b.r.kill9()
	for _, o := range []one{b, c} {
		if err := flows(o); err != nil {
			t.Errorf("%s: the stream ended with another's crash: %v", o.r.name, err)
		}
		h.mustServe(o.addr)
	}
	b.r = h.start("d1b", with(wideBudget, "--on-new", "refuse"), goServer(t, b.addr)...)
	b.r.adopted(pid)
	for _, o := range []one{b, c} {
		o.r.awaitCounts("its one stream is counted", func(v api.Backend) bool { return value(v.InFlight) == 1 })
		o.r.signal(syscall.SIGTERM)
		o.r.phase(drain.PhaseWait)
		if err := flows(o); err != nil {
			t.Errorf("%s: the stream ended before its drain: %v", o.r.name, err)
		}
		o.stream.Close()
		o.r.drainedAtZero()
	}
	if pins := h.pinsOf(); len(pins) > 0 {
		t.Errorf("left behind: %q", pins)
	}
}

// The supervisor is killed in the middle of a drain with 50 connections open, 20 of which close while it is dead. Its
// successor finds 30, keeps the deadline, and ends the drain when they have gone.
func TestD4_KilledInTheMiddleOfADrain(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	const addr = "127.0.0.1:8080"
	argv := goServer(t, addr)
	r := h.run("d4", wideBudget, argv...)
	pid := r.child()
	endAfter(t, pid)
	var open []*httpConn
	for range 50 {
		open = append(open, holdOpen(t, h.ns, addr))
	}
	before := r.must("drain", refusing)
	r.awaitCounts("all are counted", func(b api.Backend) bool { return value(b.InFlight) == 50 })
	h.mustRefuse(addr)
	r.kill9()
	for _, c := range open[:20] {
		c.Close()
	}
	h.mustRefuse(addr)
	r = h.start("d4", wideBudget, argv...)
	r.adopted(pid)
	b := r.awaitCounts("30 are left", func(b api.Backend) bool {
		if n := value(b.InFlight); b.CountsKnown && n < 30 {
			t.Fatalf("%d in flight while 30 are open", n)
		}
		return value(b.InFlight) == 30
	})
	d := b.Drain
	if d == nil || d.ID != before.ID || d.Outcome != "" {
		t.Fatalf("got drain %+v, want %s to go on", d, before.ID)
	}
	// Both are the same moment of the boot clock, shown on the wall clock.
	if off := d.Deadline.Sub(before.Deadline).Abs(); off > time.Second {
		t.Errorf("the deadline moved by %v", off)
	}
	h.mustRefuse(addr)
	r.stays("30 connections are open")
	for _, c := range open[20:] {
		c.Close()
	}
	r.drainedAtZero()
	eventually(t, "CMD has ended", func() bool { return startOf(pid) == "" })
	if pins := h.pinsOf(); len(pins) > 0 {
		t.Errorf("left behind: %q", pins)
	}
}

// The supervisor dies after the flip and so does the server; whoever is started on its port, without ebb, is served.
func TestG1_RestartedWithoutEbbIsServed(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	const addr = "127.0.0.1:8080"
	r := h.run("g1", wideBudget, goServer(t, addr)...)
	pid := r.child()
	endAfter(t, pid)
	hold := holdOpen(t, h.ns, addr)
	r.must("drain", refusing)
	h.mustRefuse(addr)
	r.kill9()
	h.mustRefuse(addr)
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	hold.Close()
	eventually(t, "CMD has ended", func() bool { return startOf(pid) == "" })
	program(t, h.ns, goServer(t, addr)...)
	eventually(t, "the new server is reached", func() bool { served, _ := h.serves(addr); return served })
	if len(h.pinsOf()) == 0 {
		t.Error("nothing was pinned: the test shows nothing")
	}
	h.clean()
}

// clean removes what a killed run has left, as a person would.
func (h *host) clean() {
	h.t.Helper()
	if _, stderr, code := h.ebb("cleanup", "--bpffs", h.bpffs); code != 0 {
		h.t.Errorf("cleanup: code %d: %s", code, stderr)
	}
	if pins := h.pinsOf(); len(pins) > 0 {
		h.t.Errorf("cleanup left %q", pins)
	}
}

// The supervisor dies after the flip and the server lives: its admission opens by itself after the deadline.
func TestG1_ClosedAdmissionOpensByItself(t *testing.T) {
	t.Parallel() // it waits for a clock in the kernel
	h := newHost(t)
	const addr = "127.0.0.1:8080"
	r := h.run("g1", wideBudget, goServer(t, addr)...)
	pid := r.child()
	endAfter(t, pid)
	holdOpen(t, h.ns, addr)
	d := r.must("drain", map[string]string{"on_new": "refuse", "grace": "4s"})
	r.kill9()
	if served, refused := h.serves(addr); !refused && time.Now().Before(d.Deadline) {
		t.Errorf("admission was open before its deadline (served: %v)", served)
	}
	eventually(t, "admission is open again", func() bool { served, _ := h.serves(addr); return served })
	if now := time.Now(); now.Before(d.Deadline) {
		t.Errorf("admission opened %v before its deadline", d.Deadline.Sub(now))
	}
	h.clean()
}

// Supervisors share a host, and come, are killed and come back in any order: none disturbs another, counts stay exact,
// and the last one to leave leaves nothing.
func TestG9_SideBySideInAnyOrder(t *testing.T) {
	h := newHost(t)
	names := []string{"g9a", "g9b", "g9c"}
	addr := map[string]string{}
	argv := map[string][]string{}
	for i, name := range names {
		addr[name] = fmt.Sprintf("127.0.0.1:%d", 8080+i)
		argv[name] = goServer(t, addr[name])
	}
	flags := with(wideBudget, "--on-new", "refuse")
	runs, pids, streams := map[string]*supervised{}, map[string]int{}, map[string][]*httpConn{}
	check := func(step string) {
		t.Helper()
		for _, name := range names {
			if pids[name] == 0 {
				continue
			}
			h.mustServe(addr[name])
			streams[name] = append(streams[name], holdOpen(t, h.ns, addr[name]))
			if r := runs[name]; r != nil {
				want := int64(len(streams[name]))
				b := r.awaitCounts(step+": "+name+" has every stream in its count", func(b api.Backend) bool { return value(b.Counts.Open) == want })
				if !b.CountsKnown {
					t.Errorf("%s: the counts of %s are unknown", step, name)
				}
			}
		}
	}
	steps := []struct{ do, name string }{
		{"start", "g9a"}, {"start", "g9b"}, {"kill", "g9a"}, {"start", "g9c"}, {"start", "g9a"},
		{"kill", "g9b"}, {"kill", "g9c"}, {"stop", "g9a"}, {"start", "g9c"}, {"start", "g9b"}, {"start", "g9a"},
		{"stop", "g9c"}, {"kill", "g9a"}, {"stop", "g9b"}, {"start", "g9a"}, {"stop", "g9a"},
	}
	for i, s := range steps {
		step := fmt.Sprintf("step %d, %s %s", i+1, s.do, s.name)
		switch s.do {
		case "start":
			if pids[s.name] != 0 {
				runs[s.name] = h.start(s.name, flags, argv[s.name]...)
				runs[s.name].adopted(pids[s.name])
			} else {
				runs[s.name] = h.run(s.name, flags, argv[s.name]...)
				pids[s.name] = runs[s.name].child()
				endAfter(t, pids[s.name])
			}
		case "kill":
			runs[s.name].kill9()
			runs[s.name] = nil
		case "stop":
			r := runs[s.name]
			r.signal(syscall.SIGTERM)
			r.phase(drain.PhaseWait)
			for _, c := range streams[s.name] {
				c.Close()
			}
			r.drainedAtZero()
			runs[s.name], pids[s.name], streams[s.name] = nil, 0, nil
			h.mustRefuse(addr[s.name]) // nothing listens
		}
		check(step)
		if t.Failed() {
			t.Fatalf("after %s", step)
		}
	}
	if pins := h.pinsOf(); len(pins) > 0 {
		t.Errorf("left behind: %q", pins)
	}
}

// Two containers of one host have the same addresses: the drain of one does not touch the other.
func TestG9_SameAddressInTwoNamespaces(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	other := *h
	other.ns = netnstest.New(t)
	const addr = "127.0.0.1:8080"
	flags := with(wideBudget, "--on-new", "refuse")
	a := h.run("g9here", flags, goServer(t, addr)...)
	b := other.run("g9there", flags, goServer(t, addr)...)
	here, there := holdOpen(t, h.ns, addr), holdOpen(t, other.ns, addr)
	a.must("drain", refusing)
	h.mustRefuse(addr)
	other.mustServe(addr)
	for _, r := range []*supervised{a, b} {
		r.awaitCounts("one stream each", func(v api.Backend) bool { return value(v.Counts.Open) == 1 })
	}
	b.signal(syscall.SIGTERM)
	b.phase(drain.PhaseWait)
	other.mustRefuse(addr)
	there.Close()
	b.drainedAtZero()
	h.mustRefuse(addr)
	here.Close()
	a.drainedAtZero()
	if pins := h.pinsOf(); len(pins) > 0 {
		t.Errorf("left behind: %q", pins)
	}
}

// shuttingDown counts the nginx workers that a reload has told to go.
func shuttingDown(master int) (n int) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", master, master))
	if err != nil {
		return 0
	}
	for pid := range strings.FieldsSeq(string(b)) {
		title, err := os.ReadFile("/proc/" + pid + "/cmdline")
		if err == nil && strings.Contains(string(title), "shutting down") {
			n++
		}
	}
	return n
}

// resident is the memory of a process in bytes, the second field of /proc/PID/statm.
func resident(t *testing.T, pid int) int64 {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		t.Fatal(err)
	}
	pages, err := strconv.ParseInt(strings.Fields(string(b))[1], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return pages * int64(os.Getpagesize())
}

// nginx is reloaded twenty times by a signal that ebb passes on, and each time a client is left behind with an answer half
// read: every one is counted, none is lost, and neither listeners nor memory pile up.
func TestC17_ReloadsWithConnectionsLeftBehind(t *testing.T) {
	t.Parallel()
	n := newLAN(t)
	addr := n.v4(8080)
	const reloads = 20
	argv := packaged(loadtest.Nginx)(t, 8080, loadtest.ServerOptions{Host: n.link.B.V4.String(), Workers: 1})
	r := n.run("c17", with(wideBudget, "--on-new", "refuse", "--protocol", "http1"), argv...)
	master := r.child()
	var bodies []io.ReadCloser
	var before int64
	for i := range reloads {
		c := dialHTTP(t, n.client, addr)
		if err := c.Conn.(*net.TCPConn).SetReadBuffer(64 << 10); err != nil {
			t.Fatal(err)
		}
		c.send(t, "/big")
		resp, err := http.ReadResponse(c.br, nil)
		if err != nil {
			t.Fatal(err)
		}
		bodies = append(bodies, resp.Body)
		r.signal(syscall.SIGHUP)
		eventually(t, "an old worker is left with its client", func() bool { return shuttingDown(master) == i+1 })
		if i == 1 {
			before = resident(t, r.pid())
		}
	}
	b := r.awaitCounts("every client is in flight", func(b api.Backend) bool { return value(b.InFlight) == reloads })
	if got := value(b.Counts.Accepted); got != reloads || len(b.Listeners) != 1 {
		t.Errorf("got %d accepted on %d listeners, want %d on 1", got, len(b.Listeners), reloads)
	}
	// The race detector's own memory varies by tens of megabytes.
	if grown := resident(t, r.pid()) - before; grown > 64<<20 {
		t.Errorf("ebb grew by %d MB over %d reloads", grown>>20, reloads)
	}
	r.signal(syscall.SIGTERM)
	r.phase(drain.PhaseWait)
	r.stays("clients of old workers are reading")
	for _, body := range slices.Backward(bodies) {
		if got, err := io.Copy(io.Discard, body); err != nil || got != 10<<20 {
			t.Errorf("read %d bytes, %v; want 10 MB", got, err)
		}
	}
	r.drainedAtZero()
}

// An operator's longer budget is had in full, and nothing is said of a kill time.
func TestT13_OperatorsLongerGraceIsNotScaled(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	const addr = "127.0.0.1:8080"
	r := h.run("t13", tightBudget, goServer(t, addr)...)
	hold := holdOpen(t, h.ns, addr)
	d := r.must("drain", map[string]string{"grace": "90s"})
	if got := time.Duration(d.Slices.Wait); got != 86*time.Second || time.Duration(d.Slices.Flush) != 2*time.Second || time.Duration(d.Slices.Reserve) != 2*time.Second {
		t.Errorf("got slices %+v, want 86s, 2s and 2s", d.Slices)
	}
	if budget, _ := r.phase(drain.PhaseBegin).Fields["budget"].(string); strings.Contains(budget, "scaled") {
		t.Errorf("the budget speaks of a kill time: %s", budget)
	}
	hold.Close()
	r.drainedAtZero()
}

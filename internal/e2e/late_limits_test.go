// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/agent"
)

// Connections that wait for a successor are bounded in number and in time: what comes beyond the one is reset at once,
// what has waited for the other is reset then, and events and metrics say so.
func TestD9_AHoldIsBoundedAsConfigured(t *testing.T) {
	n := newLAN(t)
	r := n.run("web", with(wideBudget, "--service", "web", "--on-new", "hold", "--hold-max", "3", "--hold-for", "2s"), goServer(t, n.v4(8080))...)
	hold := holdOpen(t, n.client, n.v4(8080))
	r.must("drain", struct{}{})
	failed := func() float64 {
		return r.sample(`ebb_late_connections_total{action="hold",result="failed",service="web"}`)
	}
	const many = 5
	started := time.Now()
	resets := make(chan time.Duration, many)
	for range many {
		go func() {
			c, err := n.client.DialContext(t.Context(), "tcp", n.v4(8080))
			if err == nil {
				defer c.Close()
				_ = c.SetReadDeadline(time.Now().Add(patience))
				_, err = c.Read(make([]byte, 1))
			}
			if !errors.Is(err, syscall.ECONNRESET) { // it may come before connect() has returned
				t.Errorf("a connection that waits in vain: got %v, want a reset", err)
			}
			resets <- time.Since(started)
		}()
	}
	var last time.Duration
	for range many {
		last = <-resets
	}
	if last < 2*time.Second {
		t.Errorf("the last was reset after %v, want those that may wait to do so for 2s", last)
	}
	eventually(t, "all to be counted", func() bool { return failed() == many })
	r.find("an event of what was too much", func(e drain.Event) bool {
		return e.Type == drain.EventLate && strings.Contains(e.Message, "2 more connections came than may wait, which are 3")
	})
	hold.Close()
	r.wait()
}

// servedBy is the name of the server that answers.
func (c *httpConn) servedBy(t *testing.T) string {
	t.Helper()
	c.send(t, "/")
	resp, err := http.ReadResponse(c.br, nil)
	if err == nil {
		_, err = io.Copy(io.Discard, resp.Body)
	}
	if err != nil {
		t.Fatalf("ask who serves: %v", err)
	}
	resp.Body.Close()
	return resp.Header.Get("X-Served-By")
}

// A service with two ports has peers for each: those of the same port, and those that are named for it. What comes late
// goes to a peer of its own port. With a port that has none nothing is relayed, and it is said why.
func TestC1_PeersOfTheirPorts(t *testing.T) {
	n := newLAN(t)
	one, two := newElsewhere(t, n.host, 8080, "-name", "one"), newElsewhere(t, n.host, 9000, "-name", "two")
	argv := goServer(t, n.v4(8080), "-listen", n.v4(8081))
	r := n.run("web", with(wideBudget, "--service", "web", "--peer", one.v4, "--peer", "8081="+two.v4), argv...)
	eventually(t, "both ports to be found", func() bool { return len(r.backend().Listeners) == 2 })
	hold := holdOpen(t, n.client, n.v4(8080))
	r.must("drain", struct{}{})
	b := r.backend()
	chosen(t, b, drain.OnNewRelay)
	if want := "to " + one.v4 + ", " + two.v4 + " (for port 8081)"; b.OnNew.Why != want {
		t.Errorf("why: got %q, want %q", b.OnNew.Why, want)
	}
	if out := n.must("explain", "web"); !strings.Contains(out, two.v4+" (for port 8081)") {
		t.Errorf("explain does not say where they go:\n%s", out)
	}
	for range 5 {
		for port, want := range map[uint16]string{8080: "one", 8081: "two"} {
			c := dialHTTP(t, n.client, n.v4(port))
			if got := c.servedBy(t); got != want {
				t.Fatalf("port %d: served by %q, want %s", port, got, want)
			}
			c.Close()
		}
	}
	hold.Close()
	r.wait()
	if _, late := r.lateOf(); late.Relayed != 10 || late.Failed != 0 {
		t.Errorf("got %+v, want 10 relayed and none failed", late)
	}

	r = n.run("web", with(wideBudget, "--service", "web", "--peer", one.v4), argv...)
	eventually(t, "both ports to be found", func() bool { return len(r.backend().Listeners) == 2 })
	r.signal(syscall.SIGTERM)
	r.wait()
	if b := r.result().Backend; b.OnNew.Chosen != drain.OnNewAdmit || !strings.Contains(b.OnNew.Why, "no peer for port 8081") {
		t.Errorf("one port has no peer: got %s (%s), want admit and why", b.OnNew.Chosen, b.OnNew.Why)
	}
}

// cgroupsOfRelays are those that there are on the host.
func cgroupsOfRelays(t *testing.T) (dirs []string) {
	t.Helper()
	err := filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && filepath.Base(filepath.Dir(path)) == "ebb-relay" {
			dirs = append(dirs, path)
		}
		return nil // what is gone meanwhile is none of them
	})
	if err != nil {
		t.Fatal(err)
	}
	return dirs
}

// A relay has outlived its owner and its CMD, with nothing to carry, and another one has left an empty cgroup elsewhere: a
// clean-up ends the one and removes what both have made.
func TestG2_CleanupRemovesTheCgroupsOfRelays(t *testing.T) {
	n := newLAN(t)
	peer := newElsewhere(t, n.host, 9000)
	r := n.run("web-g2", []string{"--service", "web", "--grace", "120s", "--peer", peer.v4}, goServer(t, n.v4(8080))...)
	pid := r.child()
	endAfter(t, pid)
	hold := holdOpen(t, n.client, n.v4(8080))
	r.must("drain", struct{}{})
	own := slices.IndexFunc(cgroupsOfRelays(t), func(dir string) bool { return filepath.Base(dir) == "web-g2" })
	if own < 0 {
		t.Skip("relays have no cgroup of their own here")
	}
	beside := filepath.Dir(filepath.Dir(cgroupsOfRelays(t)[own]))
	other := filepath.Join(beside, fmt.Sprintf("ebb-e2e-%d", os.Getpid()))
	left := filepath.Join(other, "ebb-relay", "left")
	if err := os.MkdirAll(left, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, dir := range []string{left, filepath.Dir(left), other} {
			if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
				t.Error(err)
			}
		}
	})
	r.kill9()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	hold.Close()
	if out := n.must("cleanup"); !strings.Contains(out, "removed "+filepath.Dir(left)+"\n") {
		t.Errorf("clean-up: got %q, want %s in it", out, filepath.Dir(left))
	}
	for _, dir := range cgroupsOfRelays(t) {
		if dir == left || filepath.Base(dir) == "web-g2" {
			t.Errorf("after the clean-up: %s is left", dir)
		}
	}
	n.nothingLeft("after the clean-up")
}

// The relay carries no more connections than it has descriptors for. What comes beyond waits in its backlog, which is
// told, and is carried as soon as others end.
func TestD9_TheRelayAtItsLimit(t *testing.T) {
	n := newLAN(t)
	peer := newElsewhere(t, n.host, 9000, "-name", "other")
	few := func(c *exec.Cmd) {
		c.Path, c.Args = need(t, "prlimit"), append([]string{"prlimit", "--nofile=256:256"}, c.Args...)
	}
	r := n.startWith(few, "web", with(wideBudget, "--service", "web", "--peer", peer.v4), goServer(t, n.v4(8080))...)
	r.await(agent.EventListener)
	hold := holdOpen(t, n.client, n.v4(8080))
	r.must("drain", struct{}{})
	const many = 150 // two descriptors for each, and it has 256
	var conns []*httpConn
	for range many {
		conns = append(conns, dialHTTP(t, n.client, n.v4(8080)))
	}
	r.find("an event of the limit", func(e drain.Event) bool {
		return e.Type == drain.EventLate && strings.Contains(e.Message, "descriptors")
	})
	for _, c := range conns { // those that are carried first, and so in the order in which they came
		if got := c.servedBy(t); got != "other" {
			t.Errorf("served by %q, want other", got)
		}
		c.Close()
	}
	hold.Close()
	if d := r.drainedAtZero(); d.Late == nil || d.Late.Failed != 0 || d.Late.Relayed != many {
		t.Errorf("late: got %+v, want %d relayed and none failed", d.Late, many)
	}
}

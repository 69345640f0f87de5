// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/netnstest"
)

// twoPorts is a server that takes connections on two ports of the loopback and keeps them.
const twoPorts = `
import socket, select
ls = [socket.create_server(("127.0.0.1", p)) for p in (8081, 8082)]
held = []
while True:
    for l in select.select(ls, [], [])[0]:
        held.append(l.accept())
`

// A process is told to end as a whole, so it is one backend: the second that matches it has an unknown count and cannot be
// drained, and the first one's is its own.
func TestD4_OneProcessIsOneBackend(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	n.set(agentBudget + fmt.Sprintf(`services:
  - name: web
    backends:
      - {name: one, match: %s}
      - {name: two, match: %s}
`, match(n.ns, 8081), match(n.ns, 8082)))
	p := program(t, n.ns, "python3", "-c", twoPorts)
	listens(t, n.ns, 8081, 8082)
	n.agent()
	var taken, left string
	for _, name := range []string{"one", "two"} {
		if b := n.awaitView(name, "taken in, or not", func(b api.Backend) bool { return b.PID != 0 || len(b.Warnings) > 0 }); b.PID != 0 {
			taken = name
		} else {
			left = name
			if b.CountsKnown || b.InFlight != nil {
				t.Errorf("%s, which is not taken in, has the count %v, known %v", name, b.InFlight, b.CountsKnown)
			}
		}
	}
	if taken == "" || left == "" {
		t.Fatalf("taken in: %q, left: %q, want one each", taken, left)
	}
	err := n.ask(func(ctx context.Context, c *api.Client) error {
		_, err := c.Drain(ctx, left, api.DrainRequest{})
		return err
	})
	if err == nil {
		t.Errorf("%s was drained, although its process is another backend's", left)
	}
	if err := p.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("the process has ended: %v", err)
	}
}

// The name of a backend means another process after a restart of the agent: the one before is left alone.
func TestR5_ANameThatMeansAnotherProcess(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	config := func(port int) string {
		return agentBudget + fmt.Sprintf("services:\n  - name: web\n    backends:\n      - {name: one, match: %s}\n", match(n.ns, port))
	}
	first, second := program(t, n.ns, goServer(t, "127.0.0.1:8081")...), program(t, n.ns, goServer(t, "127.0.0.1:8082")...)
	n.set(config(8081))
	d := n.agent()
	if b := n.ready("one"); b.PID != first.Process.Pid {
		t.Fatalf("got process %d, want %d", b.PID, first.Process.Pid)
	}
	d.stop()
	n.set(config(8082))
	d = n.agent()
	if b := n.ready("one"); b.PID != second.Process.Pid {
		t.Fatalf("got process %d, want %d", b.PID, second.Process.Pid)
	}
	if e := d.ended(n.drains("one", api.DrainRequest{}).ID); e.Outcome != drain.OutcomeDrained {
		t.Errorf("got %s, want drained", e.Outcome)
	}
	if err := first.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("the process that is configured no more was ended: %v", err)
	}
}

// A unit that is started again may get a control group of the same name and another number: what begins to listen in it, in
// a process that the main one has not started, is counted.
func TestC25_AControlGroupThatIsMadeAnew(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	root, err := netnstest.CgroupRoot()
	if err != nil {
		t.Fatal(err)
	}
	outer := netnstest.Cgroup(t)
	dir := filepath.Join(outer, "unit")
	t.Cleanup(func() {
		eventually(t, "the control group goes", func() bool { err := os.Remove(dir); return err == nil || errors.Is(err, fs.ErrNotExist) })
	})
	n.set(agentBudget + fmt.Sprintf("services:\n  - name: web\n    backends:\n      - {name: one, match: {cgroup: %s}}\n", strings.TrimPrefix(dir, root)))
	begin := func(addr string) *netnstest.Cmd {
		return program(t, n.ns, append([]string{"sh", "-c", `echo $$ > "$0"/cgroup.procs && exec "$@"`, dir}, goServer(t, addr)...)...)
	}
	mkdir := func() {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	mkdir()
	first := begin("127.0.0.1:8081")
	n.agent()
	n.ready("one")
	if err := first.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = first.Wait()
	eventually(t, "the control group goes", func() bool { return os.Remove(dir) == nil })
	mkdir()
	second := begin("127.0.0.1:8081")
	n.awaitView("one", "the next process is there", func(b api.Backend) bool { return b.Ready && b.PID == second.Process.Pid })
	begin("127.0.0.1:8082")
	listens(t, n.ns, 8082)
	for range 3 {
		holdOpen(t, n.ns, "127.0.0.1:8082")
	}
	n.awaitView("one", "three are open", func(b api.Backend) bool { return b.CountsKnown && value(b.Counts.Open) == 3 })
}

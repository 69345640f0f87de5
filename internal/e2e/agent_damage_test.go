// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/agent"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/netnstest"
)

// small mounts a tmpfs with the options over a directory, until the test ends.
func small(t *testing.T, dir, options string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, options); err != nil {
		t.Fatalf("mount tmpfs: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount %s: %v", dir, err)
		}
	})
}

// fill takes all the room that a file system has, and returns what gives it back.
func fill(t *testing.T, dir string) (empty func()) {
	t.Helper()
	path := filepath.Join(dir, "fill")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for err == nil {
		_, err = f.Write(make([]byte, 4096))
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("fill %s: %v", dir, err)
	}
	return func() {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
}

// journal is the journal of a backend.
func (n *node) journal(backend string) string {
	return filepath.Join(n.state, "backends", backend+".journal")
}

// In each state of an agent the kill switch opens everything at once and gives it back, and a clean-up leaves nothing of
// what no process holds.
func TestG2_AnAgentInEachState(t *testing.T) {
	for _, state := range []string{"alive", "draining", "dead in a drain"} {
		t.Run(state, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, "")
			const addr = "127.0.0.1:8080"
			n.set(agentBudget + "services:\n" + service("web", n.ns, 8080))
			program(t, n.ns, goServer(t, addr)...)
			d := n.agent()
			n.ready("web")
			holdOpen(t, n.ns, addr)
			if state != "alive" {
				n.drains("web", refused)
				n.mustRefuse(addr)
			}
			if state == "dead in a drain" {
				d.kill9()
				n.mustRefuse(addr)
			}
			ebb := func(args ...string) string {
				t.Helper()
				out, stderr, code := n.ebb(append(args, "--bpffs", n.bpffs)...)
				if code != 0 {
					t.Fatalf("ebb %q: %d: %s", args, code, stderr)
				}
				return out + stderr
			}
			ebb("open", "--all")
			n.mustServe(addr)
			ebb("open", "--resume")
			if state == "alive" {
				n.mustServe(addr)
			} else {
				n.mustRefuse(addr)
			}
			said := ebb("cleanup", "--state-dir", n.state)
			n.mustServe(addr)
			if pins := n.pinsOf(); len(pins) > 0 {
				t.Errorf("left behind: %q", pins)
			}
			if state != "dead in a drain" {
				if !strings.Contains(said, strconv.Itoa(d.pid())) {
					t.Errorf("the agent that lives is not named: %s", said)
				}
				b := n.awaitView("web", "unknown", func(b api.Backend) bool { return !b.CountsKnown })
				if !strings.Contains(strings.Join(b.Warnings, " "), "ebb cleanup") {
					t.Errorf("got warnings %q, want the clean-up among them", b.Warnings)
				}
				d.stop()
				ebb("cleanup", "--state-dir", n.state)
			}
			n.mustServe(addr)
			for _, dir := range []string{n.state, n.runDir} {
				if left, err := os.ReadDir(dir); !errors.Is(err, os.ErrNotExist) {
					t.Errorf("%s is left behind with %v (%v)", dir, left, err)
				}
			}
			if pins := n.pinsOf(); len(pins) > 0 {
				t.Errorf("left behind: %q", pins)
			}
		})
	}
}

// The journal of a drain is torn, damaged or of a newer version when the next agent comes.
func TestD13_AnAgentsJournal(t *testing.T) {
	const addr, other = "127.0.0.1:8080", "127.0.0.1:8081"
	begun := func(t *testing.T) (*node, api.Drain) {
		n := newNode(t, "")
		n.set(agentBudget + "services:\n" + service("web", n.ns, 8080) + service("other", n.ns, 8081))
		program(t, n.ns, goServer(t, addr)...)
		program(t, n.ns, goServer(t, other)...)
		d := n.agent()
		n.ready("web")
		n.ready("other")
		holdOpen(t, n.ns, addr)
		got := n.drains("web", refused)
		n.phaseOf("web", drain.PhaseWait)
		d.kill9()
		return n, got
	}
	change := func(t *testing.T, path string, f func([]byte) []byte) {
		t.Helper()
		b, err := os.ReadFile(path)
		if err == nil {
			err = os.WriteFile(path, f(b), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	t.Run("torn", func(t *testing.T) {
		t.Parallel()
		n, before := begun(t)
		change(t, n.journal("web"), func(b []byte) []byte { return append(b, `0badf00d {"version":1,"type":"en`...) })
		d := n.agent()
		d.says("torn record")
		if b := n.view("web"); b.Drain == nil || b.Drain.ID != before.ID || !b.Drain.Running() {
			t.Errorf("got drain %+v, want %s to go on", b.Drain, before.ID)
		}
		n.mustRefuse(addr)
	})
	t.Run("damaged", func(t *testing.T) {
		t.Parallel()
		n, before := begun(t)
		change(t, n.journal("web"), func(b []byte) []byte { b[3] ^= 0x11; return b })
		d := n.agent()
		if e := d.await(agent.EventDegraded, "web"); !strings.Contains(e.Message, ".damaged") {
			t.Errorf("got %q, want it to say where the journal is", e.Message)
		}
		b := n.awaitView("web", "it serves under a new generation", func(b api.Backend) bool { return b.Ready && b.Gen > before.Gen })
		n.mustServe(addr)
		n.mustServe(other)
		if again := n.drains("web", refused); again.ID == before.ID || again.Gen != b.Gen {
			t.Errorf("got drain %s of generation %d after %s", again.ID, again.Gen, before.ID)
		}
		n.mustRefuse(addr)
	})
	t.Run("another boot's", func(t *testing.T) {
		t.Parallel()
		n, before := begun(t)
		boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
		if err != nil {
			t.Fatal(err)
		}
		change(t, n.journal("web"), func(b []byte) []byte {
			var out []byte
			for line := range bytes.Lines(b) {
				_, body, _ := bytes.Cut(bytes.TrimSpace(line), []byte(" "))
				body = bytes.ReplaceAll(body, bytes.TrimSpace(boot), []byte("00000000-0000-0000-0000-000000000000"))
				out = fmt.Appendf(out, "%08x %s\n", crc32.ChecksumIEEE(body), body)
			}
			return out
		})
		d := n.agent()
		if e := d.ended(before.ID); e.Outcome != drain.OutcomeLost {
			t.Errorf("the drain ended %s, want lost", e.Outcome)
		}
		n.awaitView("web", "it serves under a new generation", func(b api.Backend) bool { return b.Ready && b.Gen > before.Gen })
		n.mustServe(addr)
		d.kill9()
		d = n.agent()
		n.ready("web")
		if ends := d.all(drain.EventEnd); len(ends) > 0 {
			t.Errorf("the drain ended again: %+v", ends)
		}
	})
	t.Run("newer", func(t *testing.T) {
		t.Parallel()
		n, _ := begun(t)
		change(t, n.journal("web"), func([]byte) []byte { return newerJournal() })
		d := n.agent()
		if b := n.view("web"); b.State != drain.StateLost || b.CountsKnown || !strings.Contains(strings.Join(b.Warnings, " "), "start the newer version") {
			t.Errorf("it is %s, counts known %v, warnings %q; want it unknown, and the newer version named", b.State, b.CountsKnown, b.Warnings)
		}
		n.ready("other")
		n.mustRefuse(addr)
		n.mustServe(other)
		d.stop()
	})
}

// newerJournal is a journal of a layout that this version does not know.
func newerJournal() []byte { return []byte("af9a3260 {\"version\":99,\"type\":\"run\"}\n") }

// phaseOf waits until the drain of a backend is in a phase.
func (n *node) phaseOf(backend string, p drain.Phase) {
	n.t.Helper()
	n.awaitView(backend, "in "+string(p), func(b api.Backend) bool { return b.Drain != nil && b.Drain.Phase() == p })
}

// With no room for a journal no drain begins, and nothing is touched. The process that came meanwhile is in the journal as
// soon as there is room.
func TestD13_NoRoomForTheJournal(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	const addr = "127.0.0.1:8080"
	n.set(agentBudget + "services:\n" + service("web", n.ns, 8080))
	small(t, n.state, "size=128k,mode=0700")
	p := program(t, n.ns, goServer(t, addr)...)
	d := n.agent()
	n.ready("web")
	empty := fill(t, n.state)
	if err := p.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = p.Wait()
	next := program(t, n.ns, goServer(t, addr)...)
	b := n.awaitView("web", "the next process serves", func(b api.Backend) bool { return b.Ready && b.PID == next.Process.Pid })
	_, stderr, code := n.ebb("drain", "web", "--on-new", "refuse")
	if code != 1 || !strings.Contains(stderr, "no space left") {
		t.Errorf("a drain without a journal: %d: %s; want it to say that there is no space", code, stderr)
	}
	n.mustServe(addr)
	if v := n.view("web"); v.State != drain.StateServing || !v.Ready {
		t.Errorf("it is %s, ready %v, after a drain that could not begin", v.State, v.Ready)
	}
	empty()
	holdOpen(t, n.ns, addr)
	got := n.drains("web", refused)
	d.kill9()
	n.agent()
	v := n.view("web")
	if v.Drain == nil || v.Drain.ID != got.ID || !v.Drain.Running() || v.Gen != b.Gen || v.PID != next.Process.Pid {
		t.Errorf("got generation %d, process %d, drain %+v; want %d, %d and %s", v.Gen, v.PID, v.Drain, b.Gen, next.Process.Pid, got.ID)
	}
	n.mustRefuse(addr)
}

// An agent that cannot make its socket, because the run directory is full, says so and leaves everything as it is.
func TestD7_NoRoomForTheSocket(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	const addr = "127.0.0.1:8080"
	n.set(agentBudget + "services:\n" + service("web", n.ns, 8080))
	program(t, n.ns, goServer(t, addr)...)
	d := n.agent()
	n.ready("web")
	hold := holdOpen(t, n.ns, addr)
	before := n.drains("web", refused)
	d.kill9()
	full := filepath.Join(t.TempDir(), "run")
	small(t, full, "nr_inodes=1,mode=0755") // the directory itself
	env := n.env
	n.env = append(append([]string(nil), env...), "EBB_RUN_DIR="+full)
	d = n.begin()
	if code := d.wait(); code != 1 {
		t.Errorf("the agent ended with code %d, want 1", code)
	}
	d.mu.Lock()
	if said := strings.Join(d.log, "\n"); !strings.Contains(said, "no space left") {
		t.Errorf("it does not say that there is no space: %s", said)
	}
	d.mu.Unlock()
	n.mustRefuse(addr)
	n.env = env
	d = n.agent()
	hold.Close()
	if e := d.ended(before.ID); e.Outcome != drain.OutcomeDrained {
		t.Errorf("the drain ended %s, want drained", e.Outcome)
	}
}

// The file system of the pins is mounted anew under a living agent: its counts are unknown, and those of the next one are
// exact.
func TestD4_PinsAreMountedAnew(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	const addr = "127.0.0.1:8080"
	n.set(agentBudget + "services:\n" + service("web", n.ns, 8080))
	program(t, n.ns, goServer(t, addr)...)
	d := n.agent()
	n.ready("web")
	for range 7 {
		holdOpen(t, n.ns, addr)
	}
	n.awaitView("web", "seven", func(b api.Backend) bool { return b.CountsKnown && value(b.Counts.Open) == 7 })
	mount := filepath.Dir(n.bpffs)
	if err := unix.Unmount(mount, unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("bpf", mount, "bpf", 0, "mode=0700"); err != nil {
		t.Fatal(err)
	}
	n.awaitView("web", "unknown", func(b api.Backend) bool { return !b.CountsKnown && b.InFlight == nil })
	d.stop()
	n.agent()
	n.awaitView("web", "seven again", func(b api.Backend) bool {
		if b.CountsKnown && value(b.Counts.Open) != 7 {
			t.Fatalf("%d are counted", value(b.Counts.Open))
		}
		return b.CountsKnown
	})
	n.drains("web", refused)
	n.mustRefuse(addr)
}

// The namespace of a backend goes away with its process; others stay as they are, and its next one is taken in.
func TestG6_TheNamespaceOfABackendGoes(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	const addr = "127.0.0.1:8080"
	name := "ebb-a1-" + strconv.Itoa(os.Getpid())
	in := "/run/netns/" + name
	if err := os.MkdirAll("/run/netns", 0o755); err != nil {
		t.Fatal(err)
	}
	named := func() (*netnstest.NS, func()) {
		ns := netnstest.New(t)
		f, err := os.Create(in)
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
		if err := unix.Mount(ns.Path(), in, "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
		gone := false
		end := func() {
			if gone {
				return
			}
			gone = true
			if err := errors.Join(unix.Unmount(in, unix.MNT_DETACH), os.Remove(in), ns.Close()); err != nil {
				t.Error(err)
			}
		}
		t.Cleanup(end)
		return ns, end
	}
	ns, end := named()
	n.set(agentBudget + "services:\n" + service("here", n.ns, 8080) + "  - name: there\n    backends:\n      - {name: there, match: {port: 8080, netns: " + name + "}}\n")
	program(t, n.ns, goServer(t, addr)...)
	p := program(t, ns, goServer(t, addr)...)
	n.agent()
	n.ready("here")
	first := n.ready("there")
	holdOpen(t, n.ns, addr)
	if err := p.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = p.Wait()
	end()
	n.awaitView("there", "without a process", func(b api.Backend) bool { return !b.Ready })
	n.awaitView("here", "as it was", func(b api.Backend) bool { return b.Ready && b.CountsKnown && value(b.Counts.Open) == 1 })
	ns, _ = named()
	program(t, ns, goServer(t, addr)...)
	if next := n.ready("there"); next.Gen <= first.Gen {
		t.Errorf("got generation %d after %d", next.Gen, first.Gen)
	}
	c := dialHTTP(t, ns, addr)
	c.get(t, "/")
	n.awaitView("there", "its connection", func(b api.Backend) bool { return b.CountsKnown && value(b.Counts.Open) == 1 })
}

// A process that has the number of the one before is another one: the drain that ran is over, and it is served.
func TestR5_TheNumberOfAProcessIsUsedAgain(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	const addr = "127.0.0.1:8080"
	n.set(agentBudget + "services:\n" + service("web", n.ns, 8080))
	p := program(t, n.ns, goServer(t, addr)...)
	d := n.agent()
	n.ready("web")
	holdOpen(t, n.ns, addr)
	before := n.drains("web", refused)
	d.kill9()
	if err := p.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = p.Wait()
	n.sameNumber(p.Process.Pid, goServer(t, addr))
	d = n.agent()
	if e := d.ended(before.ID); e.Outcome != drain.OutcomeLost {
		t.Errorf("the drain ended %s, want lost", e.Outcome)
	}
	b := n.awaitView("web", "it serves", func(b api.Backend) bool { return b.Ready })
	if b.PID != p.Process.Pid || b.Gen <= before.Gen {
		t.Errorf("got process %d of generation %d, want %d of one after %d", b.PID, b.Gen, p.Process.Pid, before.Gen)
	}
	n.mustServe(addr)
}

// sameNumber starts a program as the process of a number, which nobody else must take meanwhile: it is tried until it works.
func (n *node) sameNumber(pid int, argv []string) {
	n.t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); {
		// The next process of this pid namespace gets the number after this one (proc_sys_kernel(5)).
		if err := os.WriteFile("/proc/sys/kernel/ns_last_pid", []byte(strconv.Itoa(pid-1)), 0); err != nil {
			n.t.Fatalf("choose the next pid: %v", err)
		}
		c := n.ns.Command(n.t, argv[0], argv[1:]...)
		if err := c.Start(); err != nil {
			n.t.Fatal(err)
		}
		if c.Process.Pid == pid {
			return
		}
		_ = c.Process.Kill()
		_ = c.Wait()
	}
	n.t.Fatalf("no process got the number %d", pid)
}

// An agent is killed once its drain has flushed, and the process ends while there is none: the drain has had what it wanted.
func TestR9_TheProcessEndsAfterItsFlushWithoutAnAgent(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	const addr = "127.0.0.1:8080"
	n.set(agentBudget + "services:\n" + service("web", n.ns, 8080))
	p := program(t, n.ns, goServer(t, addr, "-ignore-signals")...)
	d := n.agent()
	n.ready("web")
	got := n.drains("web", refused)
	d.phase("web", drain.PhaseFlush)
	d.kill9()
	if err := p.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = p.Wait()
	d = n.agent()
	if e := d.ended(got.ID); e.Outcome != drain.OutcomeDrained {
		t.Errorf("the drain ended %s, want drained", e.Outcome)
	}
	var drains []api.Drain
	if err := n.ask(func(ctx context.Context, c *api.Client) (err error) { drains, err = c.Drains(ctx); return err }); err != nil {
		t.Fatal(err)
	}
	if len(drains) != 1 || drains[0].ID != got.ID || drains[0].Outcome != drain.OutcomeDrained || drains[0].Ended == nil {
		t.Errorf("got drains %+v, want the one that is over", drains)
	}
	d.kill9()
	d = n.agent()
	n.awaitView("web", "without a process", func(b api.Backend) bool { return !b.Ready })
	if ends := d.all(drain.EventEnd); len(ends) > 0 {
		t.Errorf("the drain ended again: %+v", ends)
	}
}

// A drain is taken back through the agent: the next one is another, across a kill of the agent too; and one that is taken
// back while its count falls to zero has one end.
func TestD14_UndrainThroughAnAgent(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	const addr = "127.0.0.1:8080"
	n.set(agentBudget + "services:\n" + service("web", n.ns, 8080))
	program(t, n.ns, goServer(t, addr)...)
	d := n.agent()
	n.ready("web")
	hold := holdOpen(t, n.ns, addr)
	undrain := func() error {
		return n.ask(func(ctx context.Context, c *api.Client) error {
			_, err := c.Undrain(ctx, "web", api.UndrainRequest{})
			return err
		})
	}
	first := n.drains("web", refused)
	if err := undrain(); err != nil {
		t.Fatal(err)
	}
	n.mustServe(addr)
	d.kill9()
	d = n.agent()
	n.ready("web")
	n.mustServe(addr)
	second := n.drains("web", refused)
	if second.ID == first.ID {
		t.Errorf("the second drain is %s again", first.ID)
	}
	hold.Close()
	err := undrain()
	switch e := d.ended(second.ID); {
	case err == nil && e.Outcome != drain.OutcomeCancelled, errors.Is(err, api.ErrFlushing) && e.Outcome != drain.OutcomeDrained:
		t.Errorf("undrain said %v, and the drain ended %s", err, e.Outcome)
	case err != nil && !errors.Is(err, api.ErrFlushing) && !errors.Is(err, api.ErrNotDraining):
		t.Errorf("undrain: %v", err)
	}
	d.stop()
	ends := 0
	for _, e := range d.all(drain.EventEnd) {
		if e.Drain == second.ID {
			ends++
		}
	}
	if ends != 1 {
		t.Errorf("the drain has %d ends, want one", ends)
	}
}

// nextLayout builds the binary under test with another name for its layout.
func nextLayout(t *testing.T) string {
	t.Helper()
	next := filepath.Join(t.TempDir(), "ebb")
	args := []string{"build", "-ldflags", "-X github.com/ebbproxy/ebb/bpf.layoutName=v2", "-o", next}
	if os.Getenv("EBB_BIN") == "" {
		args = append(args, "-race") // what was built for that serves again
	}
	if out, err := exec.Command("go", append(args, "github.com/ebbproxy/ebb/cmd/ebb")...).CombinedOutput(); err != nil {
		t.Fatalf("build another version: %v\n%s", err, out)
	}
	return next
}

// layouts are the installations on the host.
func (h *host) layouts() (names []string) {
	h.t.Helper()
	entries, err := os.ReadDir(h.bpffs)
	if err != nil {
		h.t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// Agents and runs of a version with another layout take over, up and down again, in the middle of a drain: counts, deadlines
// and admissions are what they were, and what nobody uses is removed.
func TestD12_AnotherLayoutTakesOver(t *testing.T) {
	versions := []string{ebbBin, nextLayout(t)}
	t.Run("agent", func(t *testing.T) {
		n := newNode(t, "")
		const open, closed, front = "127.0.0.1:8080", "127.0.0.1:8081", "127.0.0.1:8000"
		n.set(agentBudget + "services:\n" + service("open", n.ns, 8080, `listen: ["`+front+`"]`) + service("closed", n.ns, 8081))
		program(t, n.ns, goServer(t, open)...)
		program(t, n.ns, goServer(t, closed)...)
		d := n.agent()
		n.ready("open")
		n.ready("closed")
		eventually(t, "the service is steered", func() bool { served, _ := n.serves(front); return served })
		var held []*httpConn
		for range 5 {
			held = append(held, holdOpen(t, n.ns, closed))
			holdOpen(t, n.ns, open)
		}
		before := n.drains("closed", refused)
		w := n.watchAdmissions(open, closed)
		for i, bin := range []string{versions[1], versions[0], versions[1]} {
			if i == 1 {
				d.kill9()
			} else {
				d.stop()
			}
			n.bin = bin
			d = n.agent()
			b := n.awaitView("closed", "five in flight", func(b api.Backend) bool {
				if got := value(b.Counts.Open); b.CountsKnown && got != 5 {
					t.Fatalf("%d are counted while 5 are open", got)
				}
				return b.CountsKnown
			})
			if b.Drain == nil || b.Drain.ID != before.ID || !b.Drain.Running() {
				t.Errorf("got drain %+v, want %s to go on", b.Drain, before.ID)
			}
			n.awaitView("open", "five open", func(b api.Backend) bool { return b.Ready && b.CountsKnown && value(b.Counts.Open) >= 5 })
			n.mustServe(front)
			want := []string{map[string]string{versions[0]: "v1", versions[1]: "v2"}[bin]}
			eventually(t, "only its installation is left", func() bool { return slices.Equal(n.layouts(), want) })
		}
		w.end()
		for _, c := range held {
			c.Close()
		}
		if e := d.ended(before.ID); e.Outcome != drain.OutcomeDrained {
			t.Errorf("the drain ended %s, want drained", e.Outcome)
		}
	})
	t.Run("run", func(t *testing.T) {
		h := newHost(t)
		const addr = "127.0.0.1:8080"
		argv := goServer(t, addr)
		r := h.run("d12", wideBudget, argv...)
		pid := r.child()
		endAfter(t, pid)
		var held []*httpConn
		for range 5 {
			held = append(held, holdOpen(t, h.ns, addr))
		}
		before := r.must("drain", refusing)
		r.kill9()
		h.bin = versions[1]
		r = h.start("d12", wideBudget, argv...)
		r.adopted(pid)
		b := r.awaitCounts("five in flight", func(b api.Backend) bool {
			if got := value(b.InFlight); b.CountsKnown && got != 5 {
				t.Fatalf("%d in flight while 5 are open", got)
			}
			return b.CountsKnown
		})
		if b.Drain == nil || b.Drain.ID != before.ID {
			t.Errorf("got drain %+v, want %s to go on", b.Drain, before.ID)
		}
		h.mustRefuse(addr)
		for _, c := range held {
			c.Close()
		}
		r.drainedAtZero()
		if pins := h.pinsOf(); len(pins) > 0 {
			t.Errorf("left behind: %q", pins)
		}
	})
}

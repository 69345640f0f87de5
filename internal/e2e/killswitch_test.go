// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"io/fs"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
)

// must runs a command that has to succeed.
func (h *host) must(args ...string) string {
	h.t.Helper()
	stdout, stderr, code := h.ebb(args...)
	if code != 0 {
		h.t.Fatalf("ebb %s: code %d: %s", strings.Join(args, " "), code, stderr)
	}
	return stdout
}

// nothingLeft checks that no trace of ebb is on the host: no pin, no program in its namespace, no file of a run.
func (h *host) nothingLeft(when string) {
	h.t.Helper()
	if pins := h.pinsOf(); len(pins) > 0 {
		h.t.Errorf("%s: pins are left: %q", when, pins)
	}
	check, _, _ := h.ebb("check", "--bpffs", h.bpffs)
	for line := range strings.Lines(check) {
		if strings.Contains(line, "sk_lookup program") { // without an installation every program would be a foreign one
			h.t.Errorf("%s: a program is left in the namespace: %s", when, line)
		}
	}
	err := filepath.WalkDir(h.runDir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			h.t.Errorf("%s: %s is left", when, path)
		}
		return nil // the directory itself may be gone
	})
	if err != nil {
		h.t.Error(err)
	}
}

// The kill switch opens a closed admission in whatever state its owner is, dead or alive, and nothing claims a zero
// meanwhile; lifted, the rule is back.
func TestG2_OpenAllFromEveryState(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	const addr = "127.0.0.1:8080"
	argv := goServer(t, addr)
	if out := h.must("open", "--all", "--bpffs", h.bpffs); !strings.Contains(out, "nothing") {
		t.Errorf("with nothing installed: got %q", out)
	}
	r := h.run("g2", wideBudget, argv...)
	pid := r.child()
	endAfter(t, pid)
	hold := holdOpen(t, h.ns, addr)

	// Serving: the switch changes nothing that one could see.
	h.must("open", "--all", "--bpffs", h.bpffs)
	h.mustServe(addr)
	h.must("open", "--resume", "--bpffs", h.bpffs)

	r.must("drain", refusing)
	h.mustRefuse(addr)
	h.must("open", "--all", "--bpffs", h.bpffs)
	h.mustServe(addr)
	r.awaitCounts("the counts of a drain are unknown while everything is open", func(b api.Backend) bool { return !b.CountsKnown && b.InFlight == nil })
	hold.Close()
	r.stays("a zero would not stay one")
	h.must("open", "--resume", "--bpffs", h.bpffs)
	hold = holdOpenOnceServed(t, h, r, addr)

	// Its owner dead, the rule still stands, and falls to the switch alone.
	r.must("drain", refusing)
	h.mustRefuse(addr)
	r.kill9()
	h.mustRefuse(addr)
	h.must("open", "--all", "--bpffs", h.bpffs)
	h.mustServe(addr)
	h.must("open", "--resume", "--bpffs", h.bpffs)
	h.mustRefuse(addr)
	hold.Close()
	h.must("open", "--all", "--bpffs", h.bpffs)
	h.mustServe(addr)
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	h.must("cleanup", "--bpffs", h.bpffs)
	h.nothingLeft("after cleanup")
}

// holdOpenOnceServed takes a drain back and opens a stream. A drain whose flush has been sent is past that.
func holdOpenOnceServed(t *testing.T, h *host, r *supervised, addr string) *httpConn {
	t.Helper()
	if status, b := r.post("undrain", struct{}{}); status >= 300 {
		t.Skipf("the machine is too slow to take the drain back before its flush: %s", b)
	}
	return holdOpen(t, h.ns, addr)
}

// Cleanup removes everything from every state. A live run goes on without admission, its counts become unknown, never zero,
// and its drain still ends.
func TestG2_CleanupFromEveryState(t *testing.T) {
	short := []string{"--grace", "6s", "--flush-timeout", "1s", "--reserve", "1s", "--quiet-period", "300ms", "--on-new", "refuse"}
	for _, state := range []string{"nothing", "serving", "draining", "dead", "dead with its server"} {
		t.Run(state, func(t *testing.T) {
			t.Parallel() // most of it is a wait slice that has to run out
			h := newHost(t)
			const addr = "127.0.0.1:8080"
			if state == "nothing" {
				h.must("cleanup", "--bpffs", h.bpffs)
				h.nothingLeft("after cleanup")
				return
			}
			r := h.run("g2", short, goServer(t, addr)...)
			pid := r.child()
			endAfter(t, pid)
			hold := holdOpen(t, h.ns, addr)
			r.awaitCounts("the stream is counted", func(b api.Backend) bool { return value(b.Counts.Open) == 1 })
			alive := true
			switch state {
			case "draining":
				r.must("drain", refusing)
				h.mustRefuse(addr)
			case "dead", "dead with its server":
				r.must("drain", refusing)
				r.kill9()
				alive = false
				if state != "dead" {
					if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
						t.Fatal(err)
					}
					eventually(t, "the server has ended", func() bool { return startOf(pid) == "" })
				}
			}
			h.must("cleanup", "--bpffs", h.bpffs)
			if pins := h.pinsOf(); len(pins) > 0 {
				t.Errorf("pins are left: %q", pins)
			}
			if startOf(pid) != "" {
				h.mustServe(addr)
			}
			if !alive {
				h.nothingLeft("after cleanup")
				return
			}
			b := r.awaitCounts("the counts are unknown", func(b api.Backend) bool { return !b.CountsKnown })
			if b.InFlight != nil || b.Counts.Open != nil || len(b.Warnings) == 0 {
				t.Errorf("after cleanup: %s, warnings %q; want nulls and a warning", shown(b), b.Warnings)
			}
			if state == "serving" {
				r.signal(syscall.SIGTERM)
			} else {
				r.must("drain", map[string]string{"grace": "6s"}) // shortens the one that runs
			}
			r.stays("the counts are unknown")
			if code := r.wait(); code != 0 {
				t.Errorf("exit code %d, want 0", code)
			}
			hold.Close()
			if d := r.result().Backend.Drain; d == nil || d.Outcome != drain.OutcomeExpired {
				t.Errorf("got drain %+v, want expired: nobody could count", d)
			}
			h.must("cleanup", "--bpffs", h.bpffs)
			h.nothingLeft("after the run")
		})
	}
}

// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
)

// The examples are applications that take part, in three languages: each says that it is not ready when it drains, goes on across
// a restart of the agent, holds the flush for a job, flushes once and ends.
func TestExamplesTakePart(t *testing.T) {
	t.Parallel()
	root, err := filepath.Abs("../../examples")
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct {
		name  string
		needs []string
		argv  func(www string) []string
		job   func(t *testing.T, n *node, www string) (over func())
	}{
		{"python", []string{"python3"}, func(string) []string { return []string{"python3", filepath.Join(root, "python/app.py"), "8081"} }, jobByURL},
		{"node", []string{"node"}, func(string) []string { return []string{"node", filepath.Join(root, "node/app.mjs"), "8081"} }, jobByURL},
		{"shell", []string{"bash", "curl", "python3"}, func(www string) []string {
			return []string{filepath.Join(root, "shell/run.sh"), filepath.Join(www, "ready"), "python3", "-m", "http.server", "--bind", "127.0.0.1", "--directory", www, "8081"}
		}, jobByFile},
	} {
		t.Run(x.name, func(t *testing.T) {
			t.Parallel()
			for _, program := range x.needs {
				need(t, program)
			}
			n := newNode(t, "")
			www := t.TempDir()
			argv := x.argv(www)
			c := n.ns.Command(t, argv[0], argv[1:]...)
			c.Env = append(n.env[:len(n.env):len(n.env)], "EBB_APP_SOCKET="+filepath.Join(n.runDir, api.AppSocket))
			stdout := filepath.Join(t.TempDir(), "stdout")
			out, err := os.Create(stdout)
			if err != nil {
				t.Fatal(err)
			}
			defer out.Close()
			c.Stdout, c.Stderr = out, out
			c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
			if err := c.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				_ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL) // of a failed test
				if b, err := os.ReadFile(stdout); t.Failed() {
					t.Logf("it said %v:\n%s", err, b)
				}
			})
			n.set(agentBudget + "services:\n" + backendsOf("web", apiFlush, fmt.Sprintf("name: web, match: {pid: %d}", c.Process.Pid)))
			d := n.agent()
			n.sessions("web", 1)
			eventually(t, "it is ready", func() bool { return answered(t, n, webAddr, "/ready") == 200 })
			over := x.job(t, n, www)
			n.awaitView("web", "held", func(b api.Backend) bool { return len(b.Sessions) == 1 && len(b.Sessions[0].Holds) == 1 })
			id := n.view("web").Sessions[0].ID
			got := n.drains("web", api.DrainRequest{OnNew: drain.OnNewAdmit})
			eventually(t, "it is not ready", func() bool { return answered(t, n, webAddr, "/ready") != 200 })
			d.kill9()
			d = n.agent()
			d.stop()
			d = n.agent()
			if b := n.awaitView("web", "with its session", func(b api.Backend) bool { return len(b.Sessions) == 1 }); b.Sessions[0].ID != id || len(b.Sessions[0].Holds) != 1 {
				t.Errorf("after two restarts: %+v, want session %s", b.Sessions, id)
			}
			over()
			if e := d.ended(got.ID); e.Outcome != drain.OutcomeDrained {
				t.Errorf("the drain ended %s, want drained", e.Outcome)
			}
			if err := c.Wait(); err != nil && x.name != "shell" { // whose server ends by SIGTERM
				t.Errorf("it ended with %v", err)
			}
			text, err := os.ReadFile(stdout)
			if err != nil {
				t.Fatal(err)
			}
			lines := strings.Split(string(text), "\n")
			for _, begin := range []string{"session ", "draining ", "flush "} {
				if n := len(slices.DeleteFunc(slices.Clone(lines), func(l string) bool { return !strings.HasPrefix(l, begin) })); n != 1 {
					t.Errorf("it said %q %d times", begin, n)
				}
			}
			if b := n.view("web"); b.Drain == nil || b.Drain.FlushReason != drain.FlushZero || b.Drain.FlushResult != drain.FlushOK || len(b.Drain.Held) != 1 {
				t.Errorf("the drain: %+v", b.Drain)
			}
		})
	}
}

// jobByURL begins a job that ends by itself, and takes long enough to see.
func jobByURL(t *testing.T, n *node, _ string) (over func()) {
	t.Helper()
	if status := answered(t, n, webAddr, "/job?s=20"); status != 202 {
		t.Fatalf("begin a job: status %d", status)
	}
	return func() {}
}

// jobByFile is a job for as long as a file is there.
func jobByFile(t *testing.T, _ *node, www string) (over func()) {
	t.Helper()
	file := filepath.Join(www, "ready.jobs", "holds") // a member of the session has that name too
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := os.Remove(file); err != nil {
			t.Error(err)
		}
	}
}

// answered is the status of one request, on a connection of its own; 0 if it is not served.
func answered(t *testing.T, n *node, addr, path string) int {
	t.Helper()
	c, err := n.ns.DialContext(t.Context(), "tcp", addr)
	if err != nil {
		return 0
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience)) // of an open connection it cannot fail
	if _, err := fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", path); err != nil {
		return 0
	}
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return 0
	}
	resp.Body.Close()
	return resp.StatusCode
}

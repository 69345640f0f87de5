// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/agent"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/netnstest"
)

// startedBy are the processes that a process has started, by the argument that makes this binary something else.
func startedBy(pid int, arg string) (pids []int) {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, f := range files {
		b, _ := os.ReadFile(f) // a thread may have ended
		for field := range bytes.FieldsSeq(b) {
			child, err := strconv.Atoi(string(field))
			line, rerr := os.ReadFile("/proc/" + string(field) + "/cmdline")
			if argv := strings.Split(string(line), "\x00"); err == nil && rerr == nil && len(argv) == 3 && argv[0] == "ebb" && argv[1] == arg {
				pids = append(pids, child)
			}
		}
	}
	return pids
}

// statusOf is a line of /proc/PID/status; empty if the process has ended.
func statusOf(pid int, key string) string {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, key+":"); ok {
			return strings.Join(strings.Fields(v), " ")
		}
	}
	return ""
}

// own are the capabilities that a child of this process can have.
func own(t *testing.T) uint64 {
	t.Helper()
	caps, err := strconv.ParseUint(statusOf(os.Getpid(), "CapBnd"), 16, 64)
	if err != nil {
		t.Fatal(err)
	}
	return caps
}

// privileged is an agent with two backends: alice, whose process is another user's in the agent's own network namespace and
// does not end when it is told to, and inner, root's in another one.
type privileged struct {
	*node
	d     *daemon
	alice *netnstest.Cmd
	said  string // file with what alice says
	// within bounds the wait for what must happen, or must not.
	within time.Duration
}

const aliceAddr = "127.0.0.1:8080"

// privilegedNode is a node whose agent is not started yet.
func privilegedNode(t *testing.T) *privileged {
	t.Helper()
	p := &privileged{node: newNode(t, ""), said: filepath.Join(t.TempDir(), "said"), within: patience}
	inner := netnstest.New(t)
	_, application := p.host.as(t).unprivileged(t)
	argv := application("exit=none", "listen="+aliceAddr)
	said, err := os.Create(p.said)
	if err != nil {
		t.Fatal(err)
	}
	defer said.Close()
	// A fork of another test may hold the file that was just written open until its exec.
	eventually(t, "alice can be executed", func() bool {
		p.alice = p.ns.Command(t, argv[0], argv[1:]...)
		p.alice.Cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
		p.alice.Cmd.Stdout = said
		err = p.alice.Start()
		return !errors.Is(err, unix.ETXTBSY)
	})
	if err != nil {
		t.Fatal(err)
	}
	program(t, p.ns, goServer(t, "127.0.0.1:8090")...)
	program(t, inner, goServer(t, "127.0.0.1:8081")...)
	// A name of the namespace that is nobody's: one below /proc is its process's.
	ns := filepath.Join(t.TempDir(), "netns")
	if err := os.WriteFile(ns, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(p.ns.Path(), ns, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(ns, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	p.set(fmt.Sprintf(`defaults: {grace: 3s, flush_timeout: 1s, reserve: 1s, quiet_period: 300ms, on_deadline: reset}
services:
  - name: alice
    flush: {signal: SIGUSR1}
    backends: [{name: alice, match: {port: 8080, netns: %s}}, {name: elsewhere, address: "127.0.0.1:8090"}]
`, ns) + service("inner", inner, 8081))
	return p
}

// lacking is the command under which an agent lacks capabilities, and has a limit of descriptors.
func (p *privileged) lacking(lacks ...string) []string {
	under := []string{"/bin/sh", "-c", `ulimit -n 4096 && exec "$@"`, "sh"}
	if len(lacks) > 0 {
		under = append(under, need(p.t, "setpriv"), "--bounding-set", "-"+strings.Join(lacks, ",-"), "--")
	}
	return under
}

// privilegedWith starts an agent that lacks capabilities, and whose socket is for a group.
func privilegedWith(t *testing.T, lacks ...string) *privileged {
	t.Helper()
	p := privilegedNode(t)
	conf, err := os.ReadFile(p.config)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(p.config, bytes.Replace(conf, []byte("/app.sock}"), []byte("/app.sock, group: daemon}"), 1), 0o600); err != nil {
		t.Fatal(err)
	}
	if len(lacks) > 0 {
		p.within = 4 * time.Second
	}
	p.d = p.beginUnder(p.lacking(lacks...))
	return p
}

// told waits until alice hears its stop signal.
func (p *privileged) told() bool {
	return p.sees(func() bool {
		b, err := os.ReadFile(p.said)
		return err == nil && bytes.Contains(b, []byte("signal SIGUSR1"))
	})
}

// sees waits for something.
func (p *privileged) sees(ok func() bool) bool {
	for end := time.Now().Add(p.within); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if ok() {
			return true
		}
	}
	return false
}

// backend waits for something of a backend.
func (p *privileged) backend(name string, ok func(api.Backend) bool) bool {
	return p.sees(func() bool {
		var b api.Backend
		err := p.ask(func(ctx context.Context, c *api.Client) (err error) {
			b, err = c.Backend(ctx, name)
			return err
		})
		return err == nil && ok(b)
	})
}

func (p *privileged) serves() {
	p.t.Helper()
	p.d.owns()
	p.awaitView("alice", "taken in", func(b api.Backend) bool { return b.PID != 0 && len(b.Listeners) > 0 })
}

// What each capability is for: with all that an agent keeps it works, and without that one it does not.
func TestAgentKeepsTheCapabilitiesThatItNeeds(t *testing.T) {
	taken := func(p *privileged) bool {
		return p.backend("alice", func(b api.Backend) bool { return b.PID == p.alice.Process.Pid && len(b.Listeners) > 0 })
	}
	counted := func(p *privileged) bool {
		return p.backend("alice", func(b api.Backend) bool { return b.Datapath == api.DatapathBPF && b.Guarded })
	}
	for _, tc := range []struct {
		lacks []string // CAP_SYS_ADMIN stands for CAP_BPF, CAP_PERFMON and, for BPF, CAP_NET_ADMIN
		what  string
		works func(*privileged) bool
	}{
		{[]string{"sys_admin"}, "enters another network namespace", func(p *privileged) bool {
			return p.backend("inner", func(b api.Backend) bool { return b.PID != 0 })
		}},
		{[]string{"sys_admin", "bpf"}, "counts in the kernel", counted},
		{[]string{"sys_admin", "perfmon"}, "counts in the kernel", counted},
		{[]string{"sys_admin", "net_admin"}, "closes admission in the kernel", counted},
		{[]string{"sys_ptrace"}, "finds another user's process by its port", taken},
		{[]string{"dac_read_search"}, "finds another user's process by its port", taken},
		{[]string{"kill"}, "tells another user's process to stop", func(p *privileged) bool {
			p.serves()
			p.drains("alice", api.DrainRequest{OnNew: drain.OnNewRefuse})
			return p.told()
		}},
		{[]string{"net_admin"}, "resets what is left at the deadline", func(p *privileged) bool {
			p.serves()
			c := p.stuck(aliceAddr)
			defer c.Close()
			p.awaitView("alice", "one connection", func(b api.Backend) bool { return value(b.InFlight) == 1 })
			p.drains("alice", api.DrainRequest{OnNew: drain.OnNewRefuse})
			got := p.awaitView("alice", "the end of the drain", func(b api.Backend) bool { return b.Drain != nil && b.Drain.Outcome != "" })
			return got.Drain.Cut != nil && got.Drain.Cut.Destroyed == 1
		}},
		{[]string{"chown"}, "gives its socket to the operators' group", func(p *privileged) bool {
			return p.sees(func() bool {
				fi, err := os.Stat(p.sock)
				if err != nil {
					return false
				}
				st, ok := fi.Sys().(*syscall.Stat_t)
				return ok && st.Gid == 1 // daemon
			})
		}},
		{[]string{"setuid"}, "has a front", func(p *privileged) bool { return p.sees(p.d.hasFront) }},
		{[]string{"setgid"}, "has a front", func(p *privileged) bool { return p.sees(p.d.hasFront) }},
		{[]string{"sys_resource"}, "lets a relay have more descriptors than itself", func(p *privileged) bool {
			p.serves()
			p.drains("alice", api.DrainRequest{OnNew: drain.OnNewRelay})
			return p.sees(func() bool {
				for _, pid := range startedBy(p.d.pid(), "relay") {
					var lim unix.Rlimit
					if unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &lim) == nil && lim.Cur >= 1<<18 {
						return true
					}
				}
				return false
			})
		}},
	} {
		t.Run(strings.Join(tc.lacks, "+"), func(t *testing.T) {
			t.Parallel()
			if tc.lacks[0] == "sys_resource" && own(t)&(1<<unix.CAP_SYS_RESOURCE) == 0 {
				t.Skip("this machine's root lacks CAP_SYS_RESOURCE")
			}
			if !tc.works(privilegedWith(t)) {
				t.Errorf("with all that it keeps, it never %s", tc.what)
			}
			if p := privilegedWith(t, tc.lacks...); tc.works(p) {
				t.Errorf("without %s it %s all the same", strings.Join(tc.lacks, " and "), tc.what)
			}
		})
	}
}

func (d *daemon) hasFront() bool {
	return slices.ContainsFunc(startedBy(d.pid(), "front"), func(pid int) bool { return statusOf(pid, "Seccomp") == "2" })
}

// front waits for the process that serves the API.
func (d *daemon) front() (pid int) {
	d.n.t.Helper()
	eventually(d.n.t, "a front serves", d.hasFront)
	for _, pid := range startedBy(d.pid(), "front") {
		return pid
	}
	d.n.t.Fatal("the front has ended at once")
	return 0
}

// An agent gives up what it has no use for; what serves its API has no privilege at all.
func TestAgentPrivileges(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	n.set(agentBudget + "services:\n" + service("web", n.ns, 8080, "flush: {exec: [/bin/sh, -c, 'grep -E \"^(CapEff|NoNewPrivs)\" /proc/self/status > "+n.state+".hook']}"))
	program(t, n.ns, goServer(t, "127.0.0.1:8080")...)
	d := n.beginUnder([]string{"/bin/sh", "-c", `exec 9</etc/passwd; exec "$@"`, "sh"})
	d.owns()
	n.ready("web")
	// The names are those of docs/security.md.
	const kept = 1<<unix.CAP_BPF | 1<<unix.CAP_PERFMON | 1<<unix.CAP_NET_ADMIN | 1<<unix.CAP_SYS_ADMIN | 1<<unix.CAP_SYS_PTRACE |
		1<<unix.CAP_DAC_READ_SEARCH | 1<<unix.CAP_KILL | 1<<unix.CAP_CHOWN | 1<<unix.CAP_SETUID | 1<<unix.CAP_SETGID | 1<<unix.CAP_SYS_RESOURCE
	all := fmt.Sprintf("%016x", kept&own(t)) // a container's root lacks some
	for _, key := range []string{"CapPrm", "CapEff", "CapBnd"} {
		if got := statusOf(d.pid(), key); got != all {
			t.Errorf("the agent's %s: got %s, want %s", key, got, all)
		}
	}
	if got := statusOf(d.pid(), "NoNewPrivs"); got != "1" {
		t.Errorf("the agent's NoNewPrivs: got %s", got)
	}
	front := d.front()
	for key, want := range map[string]string{"CapPrm": strings.Repeat("0", 16), "CapEff": strings.Repeat("0", 16), "NoNewPrivs": "1", "Seccomp": "2", "Groups": ""} {
		if got := statusOf(front, key); got != want {
			t.Errorf("the front's %s: got %q, want %q", key, got, want)
		}
	}
	if got := statusOf(front, "Uid"); got == "" || strings.Contains(" "+got, " 0") {
		t.Errorf("the front's users: got %q", got)
	}
	fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", front))
	if err != nil || len(fds) == 0 {
		t.Fatalf("look at the front's descriptors: %d, %v", len(fds), err)
	}
	for _, fd := range fds {
		if to, err := os.Readlink(fd); err == nil && to == "/etc/passwd" {
			t.Error("the front has a descriptor of whoever started the agent")
		}
	}
	// A hook is root's, with what the agent has and no more.
	d.ended(n.drains("web", api.DrainRequest{OnNew: drain.OnNewRefuse}).ID)
	if b, err := os.ReadFile(n.state + ".hook"); err != nil || string(b) != "CapEff:\t"+all+"\nNoNewPrivs:\t1\n" {
		t.Errorf("the hook has %q, %v", b, err)
	}
}

// Who takes the front down takes nothing else down: the drain goes on, and the API comes back.
func TestAgentOutlivesItsFront(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	const addr = "127.0.0.1:8080"
	n.set(agentBudget + "services:\n" + service("web", n.ns, 8080))
	program(t, n.ns, goServer(t, addr)...)
	d := n.agent()
	n.ready("web")
	hold := holdOpen(t, n.ns, addr)
	n.awaitView("web", "one connection", func(b api.Backend) bool { return value(b.InFlight) == 1 })
	got := n.drains("web", api.DrainRequest{OnNew: drain.OnNewRefuse})
	n.mustRefuse(addr)
	for range 3 {
		front := d.front()
		if err := unix.Kill(front, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the front is another one", func() bool {
			now := startedBy(d.pid(), "front")
			return len(now) == 1 && now[0] != front
		})
		n.awaitView("web", "the same drain", func(b api.Backend) bool { return b.Drain != nil && b.Drain.ID == got.ID && value(b.InFlight) == 1 })
	}
	n.mustRefuse(addr)
	d.says("the front has ended")
	hold.Close()
	b := n.awaitView("web", "the end of the drain", func(b api.Backend) bool { return b.Drain != nil && b.Drain.Outcome != "" })
	if b.Drain.ID != got.ID || b.Drain.Outcome != drain.OutcomeDrained {
		t.Errorf("got drain %s %s, want %s drained", b.Drain.ID, b.Drain.Outcome, got.ID)
	}
	// A front does not hold the sockets of an agent that was killed.
	front := d.front()
	if err := unix.Kill(front, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	d.kill9()
	n.agent().stop()
}

// Where no front can be, the agent says so and serves all the same.
func TestAgentWithoutAFrontServesItself(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	n.set(agentBudget + "services:\n" + service("web", n.ns, 8080))
	program(t, n.ns, goServer(t, "127.0.0.1:8080")...)
	d := n.beginUnder([]string{need(t, "setpriv"), "--bounding-set", "-setuid", "--"})
	d.owns()
	n.ready("web")
	d.find("word that it serves itself", func(e drain.Event) bool {
		return e.Type == agent.EventDegraded && strings.Contains(e.Message, "served by the agent itself")
	})
	d.says("the configuration is read by the agent itself")
	d.stop()
}

// With less than it keeps an agent does less, and what is left works.
func TestAgentWithLess(t *testing.T) {
	for name, tc := range map[string]struct {
		lacks    []string
		datapath api.Datapath
		flags    []string
	}{
		"one namespace": {[]string{"sys_admin", "chown", "sys_resource"}, api.DatapathBPF, nil},
		"no kernel":     {[]string{"sys_admin", "bpf", "perfmon", "net_admin", "chown", "sys_resource"}, api.DatapathNone, []string{"--datapath", "none"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := privilegedNode(t)
			p.d = p.beginUnder(p.lacking(tc.lacks...), tc.flags...)
			p.within = patience
			p.serves()
			if b := p.view("alice"); b.Datapath != tc.datapath || b.Guarded != (tc.datapath == api.DatapathBPF) {
				t.Errorf("got datapath %s, guarded %v, want %s", b.Datapath, b.Guarded, tc.datapath)
			}
			c := p.stuck(aliceAddr)
			p.awaitView("alice", "one connection", func(b api.Backend) bool { return value(b.InFlight) == 1 })
			p.drains("alice", api.DrainRequest{OnNew: drain.OnNewAdmit})
			c.Close()
			if !p.told() {
				t.Error("the application is never told")
			}
		})
	}
}

// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/netns"
	"github.com/ebbproxy/ebb/internal/netnstest"
	"github.com/ebbproxy/ebb/probes"
)

const addr, port = "127.0.0.1:7080", 7080

func TestPort(t *testing.T) {
	netnstest.LeakCheck(t)
	ns, other := netnstest.New(t), netnstest.New(t)
	m := Match{Port: port, NetNS: ns.Path()}
	if _, err := Find(t.Context(), m); !errors.Is(err, ErrNone) {
		t.Errorf("nobody: got %v, want ErrNone", err)
	}
	launch(t, other, "", "listen", addr)
	for _, part := range []string{"listen", "mptcp", "inherit"} {
		for _, at := range []string{addr, "[::]:7080"} {
			a := launch(t, ns, "", part, at)
			w := find(t, m)
			if w.Main != a.pid || !slices.Equal(w.PIDs, a.pids) || !probes.Alive(w.Main, w.Start) {
				t.Errorf("%s %s: got %+v, want %d with %v", part, at, w, a.pid, a.pids)
			}
			id, err := netns.ID(ns.Fd())
			if err != nil || w.NetNS != id.Ino {
				t.Errorf("%s %s: got namespace %d, want %d, %v", part, at, w.NetNS, id.Ino, err)
			}
			if _, err := Find(t.Context(), Match{Port: port + 1, NetNS: ns.Path()}); !errors.Is(err, ErrNone) {
				t.Errorf("%s %s, another port: got %v, want ErrNone", part, at, err)
			}
			a.stop()
			// A child of it ends a little later.
			if !eventually(func() bool { _, err := Find(t.Context(), m); return errors.Is(err, ErrNone) }) {
				t.Errorf("%s %s: it is still found after its end", part, at)
			}
		}
	}
}

// Who may not look at a process does not know that it is not there.
func TestWhatMayNotBeLookedAtIsUnknown(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	a := launch(t, ns, "", "listen", addr)
	ports := Match{Port: port, NetNS: ns.Path()}
	without(t, unix.CAP_SYS_PTRACE, func() {
		for _, m := range []Match{ports, {NetNS: ns.Path()}, {Port: port, NetNS: ns.Path(), PID: a.pid}} {
			if w, err := Find(t.Context(), m); !errors.Is(err, ErrUnknown) || errors.Is(err, ErrNone) {
				t.Errorf("%v: got %+v, %v, want ErrUnknown alone", m, w, err)
			}
		}
		if w, err := Find(t.Context(), Match{PID: a.pid}); err != nil || w.Main != a.pid {
			t.Errorf("by its number, which anybody may see: got %+v, %v, want %d", w, err, a.pid)
		}
		if w, err := Find(t.Context(), Match{Port: port + 1, NetNS: ns.Path(), PID: a.pid}); err == nil {
			t.Errorf("another port: got %+v", w)
		}
	})
	if w := find(t, ports); w.Main != a.pid {
		t.Errorf("with all capabilities: got %+v, want %d", w, a.pid)
	}
}

// A listener that no process holds any more, as it is on its way to one, is of somebody who may be the backend.
func TestAListenerThatNobodyHoldsIsUnknown(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var l net.Listener
	if err := netns.Do(ns.Fd(), func() (err error) {
		l, err = listen(addr, false)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	m := Match{Port: port, NetNS: ns.Path()}
	launch(t, ns, "", "wait")
	if w, err := Find(t.Context(), m); !errors.Is(err, ErrNone) {
		t.Errorf("while this process holds it: got %+v, %v, want ErrNone", w, err)
	}
	f, err := l.(*net.TCPListener).File()
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(unix.Sendmsg(pair[0], []byte{0}, unix.UnixRights(int(f.Fd())), nil, 0), f.Close(), l.Close()); err != nil {
		t.Fatal(err)
	}
	if w, err := Find(t.Context(), m); !errors.Is(err, ErrUnknown) || errors.Is(err, ErrNone) {
		t.Errorf("while nobody does: got %+v, %v, want ErrUnknown alone", w, err)
	}
	if err := errors.Join(unix.Close(pair[0]), unix.Close(pair[1])); err != nil {
		t.Fatal(err)
	}
	if !eventually(func() bool { _, err := Find(t.Context(), m); return errors.Is(err, ErrNone) }) {
		t.Error("it is still there after its last descriptor was closed")
	}
}

// Without NetNS the host's is meant, and this process, which listens there too, is not found.
func TestPortOfTheHost(t *testing.T) {
	netnstest.RequireRoot(t)
	own, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	id, err := netns.ID(int(own.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	host, ino, err := openNetNS("")
	if err != nil {
		t.Fatal(err)
	}
	host.Close()
	if ino != id.Ino {
		netnstest.Skip(t, "the test does not run in the host's network namespace")
	}
	l, err := listen("127.0.0.1:0", false)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	m := Match{Port: l.Addr().(*net.TCPAddr).AddrPort().Port()}
	if w, err := Find(t.Context(), m); !errors.Is(err, ErrNone) {
		t.Errorf("this process alone: got %+v, %v, want ErrNone", w, err)
	}
}

// Listeners of one port in several processes are one workload if something below the first process has started them all.
func TestReusePort(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	m := Match{Port: port, NetNS: ns.Path()}
	a := launch(t, ns, "", "workers", addr)
	if w := find(t, m); w.Main != a.pid || !slices.Equal(w.PIDs, a.pids) {
		t.Errorf("two workers: got %+v, want %d with %v", w, a.pid, a.pids)
	}
	b := launch(t, ns, "", "listen", addr)
	_, err := Find(t.Context(), m)
	if !errors.Is(err, ErrAmbiguous) || !strings.Contains(err.Error(), strconv.Itoa(b.pid)) {
		t.Errorf("another tree: got %v, want ErrAmbiguous that names %d", err, b.pid)
	}
	narrow := m
	narrow.PID = b.pid
	if w := find(t, narrow); w.Main != b.pid {
		t.Errorf("%v: got %+v", narrow, w)
	}
	a.stop()
	if !eventually(func() bool { w, err := Find(t.Context(), m); return err == nil && w.Main == b.pid }) {
		t.Error("what is left is not found")
	}
}

// A container is one workload, and what has started it is none.
func TestReusePortInContainers(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	m := Match{Port: port, NetNS: ns.Path()}
	a := launch(t, ns, "", "container", addr)
	if w := find(t, m); w.Main == a.pid || !slices.Contains(a.pids, w.Main) || len(w.PIDs) != 3 {
		t.Errorf("one: got %+v, want the child of %d in %v with two of its own", w, a.pid, a.pids)
	}
	a.stop()
	if !eventually(func() bool { _, err := Find(t.Context(), m); return errors.Is(err, ErrNone) }) {
		t.Fatal("it is still found after its end")
	}
	launch(t, ns, "", "runtime", addr)
	if w, err := Find(t.Context(), m); !errors.Is(err, ErrAmbiguous) {
		t.Errorf("two: got %+v, %v, want ErrAmbiguous", w, err)
	}
}

// Two trees at one port are one workload if they are in one unit.
func TestReusePortInOneUnit(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	unit := cgroup(t, slice()+"/ebbdisc.service")
	a := launch(t, ns, unit, "inherit", addr)
	b := launch(t, ns, unit, "listen", addr)
	launch(t, ns, unit, "wait")
	w := find(t, Match{Port: port, NetNS: ns.Path(), Unit: "ebbdisc"})
	want := append(slices.Clone(a.pids), b.pid)
	slices.Sort(want)
	if w.Main != a.pid && w.Main != b.pid || !slices.Equal(w.PIDs, want) {
		t.Errorf("got %+v, want %v", w, want)
	}
}

// A socket that systemd holds for a service is not the service.
func TestActivatedListener(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	m := Match{Port: port, NetNS: ns.Path()}
	a := launch(t, ns, "", "activate", addr, "systemd")
	if _, err := Find(t.Context(), m); !errors.Is(err, ErrNone) || !strings.Contains(err.Error(), "for a service that does not run") {
		t.Errorf("before the service runs: got %v, want ErrNone that says so", err)
	}
	if _, err := a.in.Write([]byte("\n")); err != nil {
		t.Fatal(err)
	}
	a.ready(t)
	if w := find(t, m); w.Main == a.pid || !slices.Contains(a.pids, w.Main) || len(w.PIDs) != 1 {
		t.Errorf("got %+v, want the child of %d in %v", w, a.pid, a.pids)
	}
}

func TestUnitAndCgroup(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	name := fmt.Sprintf("ebbdisc%d@blue.service", os.Getpid())
	path := slice() + "/ebbdisc-inner.slice/" + name
	group := cgroup(t, path)
	user := cgroup(t, slice()+"/user@1000.service/"+name)
	sub := cgroup(t, path+"/below")
	matches := []Match{
		{Unit: name}, {Unit: strings.TrimSuffix(name, ".service")}, {Cgroup: path}, {Cgroup: path[1:] + "/"},
		{Unit: name, NetNS: ns.Path()},
	}
	launch(t, ns, user, "wait")
	for _, m := range matches {
		if _, err := Find(t.Context(), m); !errors.Is(err, ErrNone) {
			t.Errorf("%v, empty: got %v, want ErrNone", m, err)
		}
	}
	a := launch(t, ns, group, "inherit", addr)
	b := launch(t, ns, sub, "wait")
	fi, err := os.Stat(group)
	if err != nil {
		t.Fatal(err)
	}
	want := append(slices.Clone(a.pids), b.pid)
	slices.Sort(want)
	for _, m := range matches {
		w := find(t, m)
		start, err := probes.Started(a.pid)
		older := w.Main == a.pid || w.Main == b.pid && start == w.Start // started in the same tick
		if err != nil || !older || !slices.Equal(w.PIDs, want) {
			t.Errorf("%v: got %+v, want %d with %v", m, w, a.pid, want)
		}
		if ino := fi.Sys().(*syscall.Stat_t).Ino; w.CgroupPath != path || w.CgroupID != ino {
			t.Errorf("%v: got control group %d %s, want %d %s", m, w.CgroupID, w.CgroupPath, ino, path)
		}
	}
	if w := find(t, Match{Unit: name, Port: port, NetNS: ns.Path()}); w.Main != a.pid || !slices.Equal(w.PIDs, a.pids) {
		t.Errorf("with a port: got %+v, want %d with %v", w, a.pid, a.pids)
	}
	if w := find(t, Match{Cgroup: path + "/below"}); w.Main != b.pid || len(w.PIDs) != 1 {
		t.Errorf("below: got %+v, want %d alone", w, b.pid)
	}
	if _, err := Find(t.Context(), Match{Cgroup: path[:len(path)-1]}); !errors.Is(err, ErrNone) {
		t.Errorf("a prefix of the name: got %v, want ErrNone", err)
	}
	if _, err := Find(t.Context(), Match{Unit: name, PID: os.Getppid()}); !errors.Is(err, ErrNone) {
		t.Errorf("a process outside: got %v, want ErrNone", err)
	}
}

// What systemd says of a unit decides between several processes at its top.
func TestMainPIDOfSystemd(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	name := fmt.Sprintf("ebbdisc%d@green.service", os.Getpid())
	group := cgroup(t, slice()+"/"+name)
	dir := t.TempDir()
	said, asked := filepath.Join(dir, "said"), filepath.Join(dir, "asked")
	say := func(main, control int) {
		t.Helper()
		if err := os.WriteFile(said, fmt.Appendf(nil, "MainPID=%d\nControlPID=%d\n", main, control), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	script := "#!/bin/sh\necho \"$@\" >>" + asked + "\nexec cat " + said + "\n"
	program := filepath.Join(dir, "systemctl")
	if err := os.WriteFile(program, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	oldBooted, oldSystemctl := booted, systemctl
	t.Cleanup(func() { booted, systemctl = oldBooted, oldSystemctl })
	booted, systemctl = dir, program

	var s Snapshot
	look := func() (Workload, error) {
		t.Helper()
		if err := s.Scan(t.Context()); err != nil {
			t.Fatal(err)
		}
		return s.Find(t.Context(), Match{Unit: name})
	}
	first := launch(t, ns, group, "wait")
	say(0, first.pid)
	if w, err := look(); !errors.Is(err, ErrNone) {
		t.Errorf("while it is being started: got %+v, %v, want ErrNone", w, err)
	}
	second := launch(t, ns, group, "wait")
	say(second.pid, 0)
	for range 3 {
		if w, err := look(); err != nil || w.Main != second.pid {
			t.Errorf("got %+v, %v, want %d", w, err, second.pid)
		}
	}
	b, err := os.ReadFile(asked)
	if want := "show --property=MainPID,ControlPID -- " + name + "\n"; err != nil || string(b) != want+want {
		t.Errorf("asked %q, %v, want once for each change", b, err)
	}
	say(second.pid, 0)
	second.stop()
	if err := os.WriteFile(program, []byte("#!/bin/sh\nexit 1\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if w, err := look(); err != nil || w.Main != first.pid {
		t.Errorf("no answer: got %+v, %v, want %d", w, err, first.pid)
	}
}

// nginx puts itself into the background: the process that was started is not the one that serves.
func TestNginx(t *testing.T) {
	nginx, err := exec.LookPath("nginx")
	if err != nil {
		netnstest.Skip(t, "needs nginx")
	}
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	name := fmt.Sprintf("ebbdisc%d-nginx.service", os.Getpid())
	group := cgroup(t, slice()+"/"+name)
	dir := t.TempDir()
	conf := filepath.Join(dir, "nginx.conf")
	if err := os.WriteFile(conf, fmt.Appendf(nil, `
		pid %[1]s/pid; error_log %[1]s/error.log; worker_processes 2;
		events {}
		http { access_log off; server { listen %[2]s reuseport; return 204; } }
		`, dir, addr), 0o644); err != nil {
		t.Fatal(err)
	}
	// A shell that is in the control group starts it there.
	cmd := ns.Command(t, "sh", "-c", `echo $$ >"$1/cgroup.procs" && exec "$2" -p "$3" -c "$4"`, "sh", group, nginx, dir, conf)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("start nginx: %v\n%s", err, out)
	}
	b, err := os.ReadFile(filepath.Join(dir, "pid"))
	if err != nil {
		t.Fatal(err)
	}
	master, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		unix.Kill(master, unix.SIGTERM)
		if !eventually(func() bool { _, err := probes.Started(master); return errors.Is(err, probes.ErrGone) }) {
			t.Error("nginx does not end")
		}
	})
	for _, m := range []Match{{Unit: name}, {Port: port, NetNS: ns.Path()}, {NetNS: ns.Path()}, {PID: master}} {
		if !eventually(func() bool { w, err := Find(t.Context(), m); return err == nil && w.Main == master && len(w.PIDs) == 3 }) {
			w, err := Find(t.Context(), m)
			t.Errorf("%v: got %+v, %v, want %d with two workers", m, w, err, master)
		}
	}
}

func TestPIDAndNetNS(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	if _, err := Find(t.Context(), Match{NetNS: ns.Path()}); !errors.Is(err, ErrNone) {
		t.Errorf("empty namespace: got %v, want ErrNone", err)
	}
	a := launch(t, ns, "", "workers", addr)
	late := ns.Command(t, "/proc/self/exe", "relay")
	late.Args[0] = "ebb"
	in, err := late.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := late.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := late.Start(); err != nil {
		t.Fatal(err)
	}
	defer late.Wait()
	defer in.Close()
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	for _, m := range []Match{{PID: a.pid}, {NetNS: ns.Path()}, {NetNS: fmt.Sprintf("/proc/%d/ns/net", a.pid), PID: a.pid}} {
		if w := find(t, m); w.Main != a.pid || !slices.Equal(w.PIDs, a.pids) {
			t.Errorf("%v: got %+v, want %d with %v", m, w, a.pid, a.pids)
		}
	}
	if w, err := Find(t.Context(), Match{PID: late.Process.Pid}); !errors.Is(err, ErrNone) {
		t.Errorf("what carries late connections: got %+v, %v, want ErrNone", w, err)
	}
	if w, err := Find(t.Context(), Match{PID: os.Getpid()}); !errors.Is(err, ErrNone) {
		t.Errorf("this process: got %+v, %v, want ErrNone", w, err)
	}
	if w := find(t, Match{NetNS: "/proc/self/ns/net"}); slices.Contains(w.PIDs, os.Getpid()) {
		t.Errorf("own namespace: got %v with this process, %d", w.PIDs, os.Getpid())
	}
	a.stop()
	if _, err := Find(t.Context(), Match{PID: a.pid}); !errors.Is(err, ErrNone) {
		t.Errorf("ended: got %v, want ErrNone", err)
	}
}

func TestNoMatch(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, m := range []Match{
		{NetNS: "ebb-no-such-namespace"}, {NetNS: "/proc/self/ns/nothing"}, {NetNS: file}, {NetNS: "/proc/self/ns/mnt"},
		{Unit: "ebb-no-such-unit"}, {Cgroup: "/ebb-no-such-group"}, {PID: 1 << 29},
	} {
		if w, err := Find(t.Context(), m); !errors.Is(err, ErrNone) || !strings.Contains(err.Error(), m.String()) {
			t.Errorf("%v: got %+v, %v, want ErrNone", m, w, err)
		}
	}
	if _, err := Find(t.Context(), Match{}); err == nil || errors.Is(err, ErrNone) {
		t.Errorf("empty match: got %v, want an error that is not ErrNone", err)
	}
}

// Another process at the same port is another generation; a process that executes another program is not.
func TestR5_WhoListensAfterARestartIsAnotherWorkload(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	m := Match{Port: port, NetNS: ns.Path()}
	a := launch(t, ns, "", "listen", addr)
	before := find(t, m)
	a.stop()
	launch(t, ns, "", "listen", addr)
	if after := find(t, m); after.Main == before.Main && after.Start == before.Start {
		t.Errorf("got %+v twice", after)
	}

	b := launch(t, ns, "", "again")
	before = find(t, Match{PID: b.pid})
	if _, err := b.in.Write([]byte("\n")); err != nil {
		t.Fatal(err)
	}
	b.ready(t)
	if after := find(t, Match{PID: b.pid}); after.Main != before.Main || after.Start != before.Start {
		t.Errorf("executed: got %+v, want that of %+v", after, before)
	}
}

func TestOpenNetNS(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	a := launch(t, ns, "", "wait")
	w := find(t, Match{PID: a.pid})
	f, err := w.OpenNetNS()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if id, err := netns.ID(int(f.Fd())); err != nil || id.Ino != w.NetNS {
		t.Errorf("got %+v, %v, want %d", id, err, w.NetNS)
	}
	reused := w
	reused.Start++
	if _, err := reused.OpenNetNS(); !errors.Is(err, ErrNone) {
		t.Errorf("another process of that number: got %v, want ErrNone", err)
	}
	a.stop()
	if _, err := w.OpenNetNS(); !errors.Is(err, ErrNone) {
		t.Errorf("ended: got %v, want ErrNone", err)
	}
}

// Processes that come and go during a scan are no error.
func TestScanWhileProcessesComeAndGo(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	a := launch(t, ns, "", "listen", addr)
	stop := make(chan struct{})
	var churn sync.WaitGroup
	for range 2 {
		churn.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					cmd := ns.Command(t, "sh", "-c", "true & true & wait")
					cmd.Run()
				}
			}
		})
	}
	var s Snapshot
	for range 100 {
		if err := s.Scan(t.Context()); err != nil {
			t.Errorf("scan: %v", err)
			break
		}
		w, err := s.Find(t.Context(), Match{Port: port, NetNS: ns.Path()})
		if err != nil || w.Main != a.pid || len(w.PIDs) != 1 {
			t.Errorf("port: got %+v, %v, want %d alone", w, err, a.pid)
		}
		for _, m := range []Match{{NetNS: ns.Path()}, {PID: a.pid, NetNS: ns.Path()}} {
			// Main may be one of those that go; a process that stays may not be missing.
			w, err := s.Find(t.Context(), m)
			if err != nil && !errors.Is(err, ErrNone) || err == nil && !slices.Contains(w.PIDs, a.pid) {
				t.Errorf("%v: got %+v, %v, want %d in it", m, w, err, a.pid)
			}
		}
	}
	close(stop)
	churn.Wait()
}

// cpu is what this process has used of its processors so far.
func cpu(b *testing.B) time.Duration {
	b.Helper()
	var ru unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &ru); err != nil {
		b.Fatal(err)
	}
	return time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
}

// The time of a scan among many processes, and of the matches of a full node.
func BenchmarkSnapshot(b *testing.B) {
	netnstest.RequireRoot(b)
	var spaces []*netnstest.NS
	for i := range 50 {
		ns := netnstest.New(b)
		spaces = append(spaces, ns)
		l, err := ns.Listen(b, "tcp4", fmt.Sprintf("127.0.0.1:%d", port+i)).(*net.TCPListener).File()
		if err != nil {
			b.Fatal(err)
		}
		for range 8 {
			c := ns.Command(b, "sleep", "3600")
			c.ExtraFiles = []*os.File{l}
			if err := c.Start(); err != nil {
				b.Fatal(err)
			}
		}
		l.Close()
	}
	var s Snapshot
	b.Run("scan", func(b *testing.B) {
		before := cpu(b)
		for b.Loop() {
			if err := s.Scan(b.Context()); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric(float64(cpu(b)-before)/float64(b.N)/1e6, "cpu-ms/op")
		b.ReportMetric(float64(len(s.procs)), "processes")
	})
	b.Run("scan and 200 matches", func(b *testing.B) {
		before := cpu(b)
		for b.Loop() {
			if err := s.Scan(b.Context()); err != nil {
				b.Fatal(err)
			}
			for i, ns := range spaces {
				for _, m := range []Match{
					{Port: uint16(port + i), NetNS: ns.Path()}, {Unit: "web.service"}, {NetNS: ns.Path()}, {Port: 1, NetNS: ns.Path()},
				} {
					if _, err := s.Find(b.Context(), m); err != nil && !errors.Is(err, ErrNone) && !errors.Is(err, ErrAmbiguous) {
						b.Fatal(err)
					}
				}
			}
		}
		b.ReportMetric(float64(cpu(b)-before)/float64(b.N)/1e6, "cpu-ms/op")
	})
}

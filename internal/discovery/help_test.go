// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/netnstest"
)

// patience is how long a test waits for what has to come.
const patience = 90 * time.Second

// testArg makes the test binary a process to be found.
const testArg = "discovery-test"

func TestMain(m *testing.M) {
	switch {
	case len(os.Args) > 2 && os.Args[1] == testArg:
		if err := play(os.Args[2:]); err != nil {
			fmt.Println("error", err)
			os.Exit(1)
		}
		os.Exit(0)
	case len(os.Args) == 2 && os.Args[1] == "relay":
		play([]string{"wait"})
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// play is what such a process does. It says "ready" and the pids of its own making, and ends with its input.
func play(args []string) error {
	var pids []int
	var clone uintptr // of what is started
	start := func(files []*os.File, args ...string) error {
		cmd := exec.Command("/proc/self/exe", append([]string{testArg}, args...)...)
		cmd.ExtraFiles = files
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: clone}
		in, err := cmd.StdinPipe() // its end comes with ours
		if err != nil {
			return err
		}
		_ = in
		out, err := cmd.StdoutPipe()
		if err != nil {
			return err
		}
		if err := cmd.Start(); err != nil {
			return err
		}
		pids = append(pids, cmd.Process.Pid)
		line, err := bufio.NewReader(out).ReadString('\n')
		if err != nil || !strings.HasPrefix(line, "ready") {
			return fmt.Errorf("child said %q, %w", line, err)
		}
		go cmd.Wait()
		return nil
	}
	input := bufio.NewReader(os.Stdin)
	switch args[0] {
	case "wait":
	case "listen": // ADDR
		l, err := listen(args[1], false)
		if err != nil {
			return err
		}
		defer l.Close()
	case "mptcp": // ADDR
		l, err := listen(args[1], true)
		if err != nil {
			return err
		}
		defer l.Close()
	case "workers": // ADDR: two children that listen, as SO_REUSEPORT allows
		for range 2 {
			if err := start(nil, "listen", args[1]); err != nil {
				return err
			}
		}
	case "runtime": // ADDR: two containers that listen
		clone = unix.CLONE_NEWPID
		for range 2 {
			if err := start(nil, "listen", args[1]); err != nil {
				return err
			}
		}
	case "container": // ADDR: one whose first process starts two that listen
		clone = unix.CLONE_NEWPID
		if err := start(nil, "workers", args[1]); err != nil {
			return err
		}
	case "inherit": // ADDR: a child has the listener too
		l, err := listen(args[1], false)
		if err != nil {
			return err
		}
		f, err := l.File()
		if err != nil {
			return err
		}
		defer l.Close()
		if err := start([]*os.File{f}, "wait"); err != nil {
			return err
		}
	case "activate": // ADDR NAME: holds a listener under a name of its own, and gives it to a child when told
		if err := os.WriteFile("/proc/self/comm", []byte(args[2]), 0); err != nil {
			return err
		}
		l, err := listen(args[1], false)
		if err != nil {
			return err
		}
		f, err := l.File()
		if err != nil {
			return err
		}
		defer l.Close()
		fmt.Println("ready")
		if _, err := input.ReadString('\n'); err != nil {
			return nil
		}
		if err := start([]*os.File{f}, "wait"); err != nil {
			return err
		}
	case "again": // executes itself when told
		fmt.Println("ready")
		if _, err := input.ReadString('\n'); err != nil {
			return nil
		}
		return syscall.Exec("/proc/self/exe", []string{os.Args[0], testArg, "wait"}, os.Environ())
	}
	fmt.Println("ready", strings.Trim(fmt.Sprint(pids), "[]"))
	io.Copy(io.Discard, input)
	return nil
}

func listen(addr string, mptcp bool) (*net.TCPListener, error) {
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) { unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) })
	}}
	lc.SetMultipathTCP(mptcp)
	l, err := lc.Listen(context.Background(), "tcp", addr)
	if err != nil {
		return nil, err
	}
	return l.(*net.TCPListener), nil
}

// app is a process of a test.
type app struct {
	*netnstest.Cmd
	pid  int
	pids []int // what it has started, and itself
	in   io.WriteCloser
	out  *bufio.Reader
}

// launch starts this binary to play a part, in a namespace, and in a control group if one is given.
func launch(t *testing.T, ns *netnstest.NS, group string, args ...string) *app {
	t.Helper()
	a := &app{Cmd: ns.Command(t, "/proc/self/exe", append([]string{testArg}, args...)...)}
	a.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0") // or each takes a second to end
	var err error
	if a.in, err = a.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := a.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if group != "" {
		dir, err := os.Open(group)
		if err != nil {
			t.Fatal(err)
		}
		defer dir.Close()
		a.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	}
	if err := a.Start(); err != nil {
		t.Fatal(err)
	}
	a.pid, a.out = a.Process.Pid, bufio.NewReader(out)
	a.ready(t)
	t.Cleanup(a.stop) // before it is killed, so that its children end with their input
	return a
}

// ready waits for it to say what it has started.
func (a *app) ready(t *testing.T) {
	t.Helper()
	line, err := a.out.ReadString('\n')
	if err != nil || !strings.HasPrefix(line, "ready") {
		t.Fatalf("process %d said %q, %v", a.pid, line, err)
	}
	a.pids = []int{a.pid}
	for f := range strings.FieldsSeq(strings.TrimPrefix(line, "ready")) {
		pid, err := strconv.Atoi(f)
		if err != nil {
			t.Fatal(err)
		}
		a.pids = append(a.pids, pid)
	}
	slices.Sort(a.pids)
}

// stop ends it and waits for that.
func (a *app) stop() {
	a.in.Close()
	a.Wait()
}

// cgroup makes a control group below the root, with its parents, and removes it at the end of the test.
func cgroup(t *testing.T, path string) string {
	t.Helper()
	netnstest.RequireRoot(t)
	root, err := netnstest.CgroupRoot()
	if err != nil {
		t.Fatal(err)
	}
	at := root
	for name := range strings.SplitSeq(strings.Trim(path, "/"), "/") {
		at = filepath.Join(at, name)
		if os.Mkdir(at, 0o755) == nil {
			dir := at
			t.Cleanup(func() {
				if !eventually(func() bool { return os.Remove(dir) == nil }) {
					t.Errorf("control group %s stays", dir)
				}
			})
		}
	}
	return at
}

// slice is a name for control groups of one test.
func slice() string {
	return fmt.Sprintf("/ebbdisc%d.slice", os.Getpid())
}

// eventually looks again until ok. It is for what sends no event.
func eventually(ok func() bool) bool {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(patience)
	for !ok() {
		select {
		case <-tick.C:
		case <-limit:
			return ok()
		}
	}
	return true
}

// find looks once.
func find(t *testing.T, m Match) Workload {
	t.Helper()
	w, err := Find(t.Context(), m)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// without runs f on a thread that lacks a capability.
func without(t *testing.T, capability int, f func()) {
	t.Helper()
	netnstest.Apart(func() {
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var data [2]unix.CapUserData
		if err := unix.Capget(&header, &data[0]); err != nil {
			t.Error(err)
			return
		}
		data[capability/32].Effective &^= 1 << (capability % 32)
		if err := unix.Capset(&header, &data[0]); err != nil {
			t.Error(err)
			return
		}
		f()
	})
}

// SPDX-License-Identifier: Apache-2.0

package netnstest

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestVethReachesBothWays(t *testing.T) {
	LeakCheck(t)
	a, b := New(t), New(t)
	link := Veth(t, a, b)
	RPS(t, b, link.B.Dev)
	for _, addr := range []netip.Addr{link.B.V4, link.B.V6} {
		l := b.Listen(t, "tcp", netip.AddrPortFrom(addr, 0).String())
		c, err := a.DialContext(t.Context(), "tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		s, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Write([]byte("hello")); err != nil {
			t.Error(err)
		}
		s.Close()
		if got, err := io.ReadAll(c); err != nil || string(got) != "hello" {
			t.Errorf("%s: got %q, %v, want hello", addr, got, err)
		}
		c.Close()
	}
}

func TestRPSSteersToEveryCPU(t *testing.T) {
	a, b := New(t), New(t)
	link := Veth(t, a, b)
	RPS(t, b, link.B.Dev)
	// A shell in the namespace, with a sysfs of its own, reads what the kernel took over.
	out, err := b.Command(t, "unshare", "--mount", "sh", "-c",
		"mount -t sysfs none /sys && cat /sys/class/net/"+link.B.Dev+"/queues/rx-*/rps_cpus").Output()
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Trim(string(out), "0,\n"); got == "" {
		t.Errorf("got mask %q, want at least one CPU", out)
	}
}

func TestCPUMask(t *testing.T) {
	for _, tt := range []struct{ list, want string }{
		{"0", "00000001"},
		{"0-1", "00000003"},
		{"0-3,8", "0000010f"},
		{"0-31", "ffffffff"},
		{"0-32", "00000001,ffffffff"},
		{"64", "00000001,00000000,00000000"},
	} {
		if got, err := cpuMask(tt.list); err != nil || got != tt.want {
			t.Errorf("%s: got %s, %v, want %s", tt.list, got, err, tt.want)
		}
	}
	for _, list := range []string{"", "a", "0-", "0-x", "-1", "99999"} {
		if got, err := cpuMask(list); err == nil {
			t.Errorf("%q: got %s, want an error", list, got)
		}
	}
}

func TestCommandIsBornInside(t *testing.T) {
	ns := New(t)
	var st unix.Stat_t
	if err := unix.Fstat(ns.Fd(), &st); err != nil {
		t.Fatal(err)
	}
	out, err := ns.Command(t, "readlink", "/proc/self/ns/net").Output()
	if err != nil {
		t.Fatal(err)
	}
	if got, want := strings.TrimSpace(string(out)), fmt.Sprintf("net:[%d]", st.Ino); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	out, err = ns.Command(t, "readlink", ns.Path()).Output()
	if err != nil {
		t.Fatal(err)
	}
	if got, want := strings.TrimSpace(string(out)), fmt.Sprintf("net:[%d]", st.Ino); got != want {
		t.Errorf("path: got %s, want %s", got, want)
	}
}

func TestCommandIsEndedWithItsTest(t *testing.T) {
	var c *Cmd
	t.Run("inner", func(t *testing.T) {
		c = New(t).Command(t, "sleep", "1000")
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
	})
	if c == nil {
		t.Skip("the inner test was skipped")
	}
	var exit *exec.ExitError
	if err := c.Wait(); !errors.As(err, &exit) || exit.Success() {
		t.Errorf("got %v, want a process that was killed", err)
	}
}

func TestBPFFSGoesAwayWithItsTest(t *testing.T) {
	var dir string
	t.Run("inner", func(t *testing.T) {
		dir = BPFFS(t)
		var st unix.Statfs_t
		if err := unix.Statfs(dir, &st); err != nil {
			t.Fatal(err)
		}
		if st.Type != unix.BPF_FS_MAGIC {
			t.Errorf("got file system %#x, want %#x", st.Type, unix.BPF_FS_MAGIC)
		}
		// A directory inside is allowed and must not keep the mount.
		if err := os.Mkdir(filepath.Join(dir, "v1"), 0o700); err != nil {
			t.Fatal(err)
		}
	})
	if dir == "" {
		t.Skip("the inner test was skipped")
	}
	mounts, err := readMounts()
	if err != nil {
		t.Fatal(err)
	}
	if slices.ContainsFunc(mounts, func(m mount) bool { return m.point == dir }) {
		t.Errorf("%s is still mounted", dir)
	}
}

func TestCgroupGoesAwayWithItsTest(t *testing.T) {
	var dir string
	t.Run("inner", func(t *testing.T) {
		dir = Cgroup(t)
		if _, err := os.Stat(filepath.Join(dir, "cgroup.procs")); err != nil {
			t.Error(err)
		}
	})
	if dir == "" {
		t.Skip("the inner test was skipped")
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v, want %v", err, os.ErrNotExist)
	}
}

func TestParseMounts(t *testing.T) {
	got, err := parseMounts(`36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw
41 35 0:30 / /sys/fs/my\040cgroup rw shared:4 propagate_from:2 - cgroup2 cgroup2 rw
42 35 0:31 / / rw - bpf bpf rw,mode=700
`)
	if err != nil {
		t.Fatal(err)
	}
	want := []mount{{"/mnt1", "/mnt2", "ext3"}, {"/", "/sys/fs/my cgroup", "cgroup2"}, {"/", "/", "bpf"}}
	if !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if _, err := parseMounts("36 35 98:0 / / rw\n"); err == nil {
		t.Error("got no error for a line without a file system")
	}
}

// recorder is a test that fails without failing the one it is used in.
type recorder struct {
	testing.TB
	errors   []string
	cleanups []func()
}

func (r *recorder) Cleanup(f func()) { r.cleanups = append(r.cleanups, f) }
func (r *recorder) Errorf(format string, args ...any) {
	r.errors = append(r.errors, fmt.Sprintf(format, args...))
}

func (r *recorder) finish() {
	for _, f := range slices.Backward(r.cleanups) {
		f()
	}
}

func TestLeakCheckFindsEachKind(t *testing.T) {
	defer func(d time.Duration) { patience = d }(patience)
	for _, tt := range []struct {
		kind string
		root bool
		leak func(t *testing.T, pins string)
	}{
		{kind: "descriptor", leak: func(t *testing.T, _ string) {
			f, err := os.Open(os.DevNull)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { f.Close() })
		}},
		{kind: "goroutine", leak: func(t *testing.T, _ string) {
			stop := make(chan struct{})
			go func() { <-stop }()
			t.Cleanup(func() { close(stop) })
		}},
		{kind: "process", leak: func(t *testing.T, _ string) {
			c := exec.Command("sleep", "1000")
			if err := c.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = c.Process.Kill(); _ = c.Wait() })
		}},
		{kind: "pin", leak: func(t *testing.T, pins string) {
			if err := os.WriteFile(filepath.Join(pins, "map"), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}},
		{kind: "mount", root: true, leak: func(t *testing.T, _ string) { BPFFS(t) }},
		{kind: "cgroup", root: true, leak: func(t *testing.T, _ string) { Cgroup(t) }},
		{kind: "descriptor net:", root: true, leak: func(t *testing.T, _ string) { New(t) }},
	} {
		t.Run(tt.kind, func(t *testing.T) {
			if tt.root {
				RequireRoot(t)
			}
			r := &recorder{TB: t}
			pins := t.TempDir()
			LeakCheck(r, pins)
			tt.leak(t, pins)
			patience = 100 * time.Millisecond
			r.finish()
			if !slices.ContainsFunc(r.errors, func(e string) bool { return strings.Contains(e, "× "+tt.kind) }) {
				t.Errorf("got %q, want a leaked %s", r.errors, tt.kind)
			}
		})
	}
}

func TestLeakCheckWaitsForWhatEndsByItself(t *testing.T) {
	r := &recorder{TB: t}
	LeakCheck(r)
	stop := make(chan struct{})
	go func() { <-stop }()
	looked := false
	r.cleanups = append(r.cleanups, func() {
		// Runs before the check, as a test's own cleanups do; the goroutine may end after it began to look.
		looked = true
		close(stop)
	})
	r.finish()
	if !looked || len(r.errors) > 0 {
		t.Errorf("got %q, want nothing left", r.errors)
	}
}

func TestRequireRootFailsOnlyInCI(t *testing.T) {
	// Ask a copy of this binary that is nobody.
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var nobody *syscall.SysProcAttr
	if os.Geteuid() == 0 {
		exe = copyForEveryone(t, exe)
		nobody = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	}
	for _, tt := range []struct{ ci, want string }{{"", "--- SKIP: TestNeedsRoot"}, {"true", "--- FAIL: TestNeedsRoot"}} {
		c := exec.Command(exe, "-test.run=^TestNeedsRoot$", "-test.v")
		c.Dir = "/"
		c.Env = append(os.Environ(), "CI="+tt.ci)
		c.SysProcAttr = nobody
		out, _ := c.CombinedOutput() // its exit code is what the output says
		if !strings.Contains(string(out), tt.want) {
			t.Errorf("CI=%q: got %s, want %s", tt.ci, out, tt.want)
		}
	}
}

// copyForEveryone copies a program to where every user may run it.
func copyForEveryone(t *testing.T, path string) string {
	t.Helper()
	program, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	exe := filepath.Join(t.TempDir(), "netnstest.test")
	if err := os.WriteFile(exe, program, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{filepath.Dir(exe), filepath.Dir(filepath.Dir(exe))} {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return exe
}

func TestNeedsRoot(t *testing.T) {
	RequireRoot(t)
	if missing, err := missingPrivilege(); err != nil || missing != "" {
		t.Errorf("got %q, %v after RequireRoot, want all privileges", missing, err)
	}
}

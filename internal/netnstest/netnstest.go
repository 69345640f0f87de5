// SPDX-License-Identifier: Apache-2.0

// Package netnstest gives a test network namespaces, links, packet steering, a BPF file system and a
// cgroup of its own, and takes them away again when the test ends.
//
// It is for tests that are root and use real sockets. It knows nothing of this project's programs.
//
//	func TestX(t *testing.T) {
//		netnstest.LeakCheck(t)
//		client, server := netnstest.New(t), netnstest.New(t)
//		link := netnstest.Veth(t, client, server)
//		netnstest.RPS(t, server, link.B.Dev)
//		l := server.Listen(t, "tcp", netip.AddrPortFrom(link.B.V4, 80).String())
//		c, err := client.DialContext(t.Context(), "tcp", l.Addr().String())
//		…
//	}
package netnstest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/netns"
)

// patience limits the wait for what ends in its own time, such as the last process of a cgroup.
var patience = 30 * time.Second

// RequireRoot skips the test where the process may not administer the kernel, and fails it if the
// environment says CI=true, so that CI cannot pass by testing nothing.
func RequireRoot(t testing.TB) {
	t.Helper()
	missing, err := missingPrivilege()
	switch {
	case err != nil:
		t.Fatalf("read own capabilities: %v", err)
	case missing != "":
		Skip(t, "needs %s: run the tests as root", missing)
	}
}

// Skip skips a test that this machine cannot run, and fails it if the environment says CI=true. It is not for what a kernel
// lacks: that is tested on several.
func Skip(t testing.TB, format string, args ...any) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatalf(format+"; CI=true", args...)
	}
	t.Skipf(format, args...)
}

// missingPrivilege names what a root test would lack, or is empty.
func missingPrivilege() (string, error) {
	if os.Geteuid() != 0 {
		return "root", nil
	}
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(status)) {
		hex, ok := strings.CutPrefix(line, "CapEff:")
		if !ok {
			continue
		}
		caps, err := strconv.ParseUint(strings.TrimSpace(hex), 16, 64)
		if err != nil {
			return "", err
		}
		// Root in a container often lacks these.
		for _, c := range []struct {
			bit  uint
			name string
		}{{unix.CAP_SYS_ADMIN, "CAP_SYS_ADMIN"}, {unix.CAP_NET_ADMIN, "CAP_NET_ADMIN"}} {
			if caps&(1<<c.bit) == 0 {
				return c.name, nil
			}
		}
		return "", nil
	}
	return "", errors.New("/proc/self/status has no CapEff line")
}

// NS is a network namespace of one test.
type NS struct {
	file *os.File
	once sync.Once
	err  error
}

// New creates a namespace with lo up. It is closed when the test ends, and dies then unless a process
// or a socket of the test still holds it. It calls RequireRoot.
func New(t testing.TB) *NS {
	t.Helper()
	RequireRoot(t)
	f, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	ns := &NS{file: f}
	t.Cleanup(func() {
		if err := ns.Close(); err != nil {
			t.Errorf("close network namespace: %v", err)
		}
	})
	if err := netns.Do(ns.Fd(), func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return fmt.Errorf("find lo: %w", err)
		}
		return netlink.LinkSetUp(lo)
	}); err != nil {
		t.Fatal(err)
	}
	return ns
}

// Close lets go of the namespace before the test ends. It may be called again.
func (ns *NS) Close() error {
	ns.once.Do(func() { ns.err = ns.file.Close() })
	return ns.err
}

// Fd is the descriptor of the namespace. It stays the namespace's.
func (ns *NS) Fd() int { return int(ns.file.Fd()) }

// Path names the namespace for programs that open it themselves, such as nsenter, while this process lives.
func (ns *NS) Path() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), ns.Fd()) }

// Cookie is the number that the kernel knows the namespace by; the test is skipped on kernels before
// 5.14, which do not tell it.
func (ns *NS) Cookie(t testing.TB) uint64 {
	t.Helper()
	cookie, err := netns.Cookie(ns.Fd())
	if errors.Is(err, unix.ENOPROTOOPT) {
		t.Skip("needs Linux 5.14 (SO_NETNS_COOKIE)")
	}
	if err != nil {
		t.Fatal(err)
	}
	return cookie
}

// Do runs fn inside the namespace, under the rules of [netns.Do]. fn may fail the test.
func (ns *NS) Do(t testing.TB, fn func()) {
	t.Helper()
	if err := netns.Do(ns.Fd(), func() error { fn(); return nil }); err != nil {
		t.Fatal(err)
	}
}

// DialContext dials a literal address from inside the namespace. It fits http.Transport and everything
// else that dials from goroutines of its own.
func (ns *NS) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	var c net.Conn
	err := netns.Do(ns.Fd(), func() error {
		var err error
		c, err = new(net.Dialer).DialContext(ctx, network, address)
		return err
	})
	return c, err
}

// Listen listens inside the namespace with plain TCP, not with MPTCP, until the test ends.
func (ns *NS) Listen(t testing.TB, network, address string) net.Listener {
	t.Helper()
	var l net.Listener
	if err := netns.Do(ns.Fd(), func() error {
		var lc net.ListenConfig
		lc.SetMultipathTCP(false)
		var err error
		l, err = lc.Listen(t.Context(), network, address)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// Cmd is an [exec.Cmd] whose process is born in a namespace.
type Cmd struct {
	*exec.Cmd
	ns   *NS
	once sync.Once
	err  error
}

// Command prepares a process of the namespace; set its fields, then call Start or Run. The process sees
// the same /sys, cgroups and BPF file systems as the test. When the test ends it is killed, if it has
// not been waited for, and reaped.
func (ns *NS) Command(t testing.TB, name string, args ...string) *Cmd {
	t.Helper()
	c := &Cmd{Cmd: exec.Command(name, args...), ns: ns}
	t.Cleanup(func() {
		if c.Process == nil {
			return
		}
		_ = c.Process.Kill() // an ended process has nothing left to kill
		_ = c.Wait()
	})
	return c
}

// Start starts the process inside the namespace: a child is born in that of the thread that forks.
func (c *Cmd) Start() error { return netns.Do(c.ns.Fd(), c.Cmd.Start) }

// Wait is [exec.Cmd.Wait], but may be called repeatedly and by several goroutines.
func (c *Cmd) Wait() error {
	c.once.Do(func() { c.err = c.Cmd.Wait() })
	return c.err
}

// Run starts the process and waits for its end.
func (c *Cmd) Run() error {
	if err := c.Start(); err != nil {
		return err
	}
	return c.Wait()
}

// Output runs the process and returns what it wrote to its standard output.
func (c *Cmd) Output() ([]byte, error) {
	var b strings.Builder
	c.Stdout = &b
	err := c.Run()
	return []byte(b.String()), err
}

// CombinedOutput runs the process and returns what it wrote to its standard output and error.
func (c *Cmd) CombinedOutput() ([]byte, error) {
	var b strings.Builder
	c.Stdout, c.Stderr = &b, &b
	err := c.Run()
	return []byte(b.String()), err
}

// End is one end of a link.
type End struct {
	Dev string
	V4  netip.Addr
	V6  netip.Addr
}

// Link is a veth pair with addresses that reach each other.
type Link struct{ A, B End }

var links atomic.Uint32

// Veth joins two namespaces by a veth pair: a /30 of 192.0.2.0/24 and a /64 of 2001:db8::/48, the
// documentation ranges of RFC 5737 and RFC 3849. The IPv6 addresses are usable at once (no duplicate
// address detection). The link goes away with either namespace. The first 64 links of a test binary do not
// share an IPv4 range.
func Veth(t testing.TB, a, b *NS) Link {
	t.Helper()
	n := links.Add(1) - 1
	end := func(name string, host byte) End {
		v6 := netip.MustParseAddr("2001:db8::").As16()
		v6[6], v6[7], v6[15] = byte(n>>8), byte(n), host
		return End{
			Dev: fmt.Sprintf("%s%d", name, n),
			V4:  netip.AddrFrom4([4]byte{192, 0, 2, byte(n%64)*4 + host}),
			V6:  netip.AddrFrom16(v6),
		}
	}
	l := Link{A: end("va", 1), B: end("vb", 2)}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Namespace = l.A.Dev, netlink.NsFd(a.Fd())
	pair := netlink.NewVeth(attrs)
	pair.PeerName, pair.PeerNamespace = l.B.Dev, netlink.NsFd(b.Fd())
	// From inside, so that neither name need be free in the namespace of the test binary.
	a.Do(t, func() {
		if err := netlink.LinkAdd(pair); err != nil {
			t.Fatalf("add veth pair %s, %s: %v", l.A.Dev, l.B.Dev, err)
		}
	})
	a.configure(t, l.A)
	b.configure(t, l.B)
	return l
}

func (ns *NS) configure(t testing.TB, e End) {
	t.Helper()
	ns.Do(t, func() {
		link, err := netlink.LinkByName(e.Dev)
		if err != nil {
			t.Fatalf("find %s: %v", e.Dev, err)
		}
		for _, p := range []netip.Prefix{netip.PrefixFrom(e.V4, 30), netip.PrefixFrom(e.V6, 64)} {
			addr := &netlink.Addr{IPNet: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}}
			if p.Addr().Is6() {
				addr.Flags = unix.IFA_F_NODAD
			}
			if err := netlink.AddrAdd(link, addr); err != nil {
				t.Fatalf("add %s to %s: %v", p, e.Dev, err)
			}
		}
		if err := netlink.LinkSetUp(link); err != nil {
			t.Fatalf("set %s up: %v", e.Dev, err)
		}
	})
}

// RPS turns on receive packet steering of a device to all CPUs, which makes a second CPU process what
// the first one received: without it state changes of a connection hardly ever nest.
// Documentation/networking/scaling.rst.
func RPS(t testing.TB, ns *NS, dev string) {
	t.Helper()
	// A sysfs shows the network devices of the namespace in which it was mounted. This one is mounted
	// nowhere, so there is nothing to unmount.
	root := -1
	ns.Do(t, func() {
		fs, err := unix.Fsopen("sysfs", unix.FSOPEN_CLOEXEC)
		if err != nil {
			t.Fatalf("open sysfs: %v", err)
		}
		defer unix.Close(fs)
		if err := unix.FsconfigCreate(fs); err != nil {
			t.Fatalf("create sysfs: %v", err)
		}
		if root, err = unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0); err != nil {
			t.Fatalf("mount sysfs: %v", err)
		}
	})
	defer unix.Close(root)
	cpus, err := os.ReadFile("/sys/devices/system/cpu/online")
	if err != nil {
		t.Fatal(err)
	}
	mask, err := cpuMask(strings.TrimSpace(string(cpus)))
	if err != nil {
		t.Fatal(err)
	}
	base := fmt.Sprintf("/proc/self/fd/%d/class/net/%s/queues", root, dev)
	queues, err := filepath.Glob(base + "/rx-*/rps_cpus")
	if err != nil || len(queues) == 0 {
		t.Fatalf("%s has no receive queue to steer (%v): is CONFIG_RPS on?", dev, err)
	}
	for _, q := range queues {
		if err := os.WriteFile(q, []byte(mask), 0); err != nil {
			t.Fatalf("steer %s: %v", dev, err)
		}
	}
}

// cpuMask turns a list like "0-3,8" into the kernel's bitmap notation: 32-bit words in hexadecimal, the
// highest first, separated by commas.
func cpuMask(list string) (string, error) {
	var words []uint32
	for part := range strings.SplitSeq(list, ",") {
		lo, hi, isRange := strings.Cut(part, "-")
		if !isRange {
			hi = lo
		}
		first, err1 := strconv.ParseUint(lo, 10, 16)
		last, err2 := strconv.ParseUint(hi, 10, 16)
		if err := errors.Join(err1, err2); err != nil {
			return "", fmt.Errorf("parse CPU list %q: %w", list, err)
		}
		for cpu := first; cpu <= last; cpu++ {
			for uint64(len(words)) <= cpu/32 {
				words = append(words, 0)
			}
			words[cpu/32] |= 1 << (cpu % 32)
		}
	}
	var b strings.Builder
	for i := len(words) - 1; i >= 0; i-- {
		if b.Len() > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, "%08x", words[i])
	}
	return b.String(), nil
}

// BPFFS mounts a BPF file system of the test's own and returns its directory. What is pinned there goes
// away with the mount when the test ends. It calls RequireRoot.
func BPFFS(t testing.TB) string {
	t.Helper()
	RequireRoot(t)
	dir := t.TempDir()
	if err := unix.Mount("bpf", dir, "bpf", 0, "mode=0700"); err != nil {
		t.Fatalf("mount BPF file system: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("unmount BPF file system %s: %v", dir, err)
			_ = unix.Unmount(dir, unix.MNT_DETACH) // so that the directory can be removed
		}
	})
	return dir
}

// CgroupRoot is where the cgroup v2 hierarchy is mounted, as /proc/self/mountinfo says. The error wraps
// [os.ErrNotExist] if it is mounted nowhere.
func CgroupRoot() (string, error) {
	mounts, err := readMounts()
	if err != nil {
		return "", err
	}
	for _, m := range mounts {
		// A mount of a part of the hierarchy, as containers have, is as good when there is no other.
		if m.fstype == "cgroup2" && m.root == "/" {
			return m.point, nil
		}
	}
	for _, m := range mounts {
		if m.fstype == "cgroup2" {
			return m.point, nil
		}
	}
	return "", fmt.Errorf("find cgroup v2 hierarchy in /proc/self/mountinfo: %w; mount one with mount -t cgroup2 none DIR", os.ErrNotExist)
}

var cgroups atomic.Uint32

// Cgroup makes a cgroup below CgroupRoot and removes it when the test ends; by then its processes must
// have ended. It calls RequireRoot.
func Cgroup(t testing.TB) string {
	t.Helper()
	RequireRoot(t)
	root, err := CgroupRoot()
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(root, fmt.Sprintf("netnstest-%d-%d", os.Getpid(), cgroups.Add(1)))
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		var err error
		if !eventually(func() bool { err = os.Remove(dir); return err == nil }) {
			t.Errorf("remove cgroup: %v", err)
		}
	})
	return dir
}

// eventually looks again until ok, or until patience is at an end. It is for what sends no event.
func eventually(ok func() bool) bool {
	tick := time.NewTicker(10 * time.Millisecond)
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

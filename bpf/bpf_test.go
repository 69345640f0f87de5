// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/netnstest"
)

// helperEnv makes the test binary one of the processes that the tests need.
const helperEnv = "EBB_BPF_TEST_HELPER"

func TestMain(m *testing.M) {
	if os.Getenv(helperEnv) != "" {
		os.Exit(helper(os.Args[1:]))
	}
	// Loaded once and kept: no test leaks it.
	if os.Geteuid() == 0 {
		_, _, _ = Self()
	}
	os.Exit(m.Run())
}

// helper is a process of a test. It says what it has done, a line each, and ends with its standard input.
func helper(args []string) int {
	fail := func(err error) int {
		fmt.Println("error:", err)
		return 1
	}
	switch args[0] {
	case "listen": // NETWORK ADDRESS
		ln, err := listenShared(args[1], args[2])
		if err != nil {
			return fail(err)
		}
		defer ln.Close()
		fmt.Println(ln.Addr())
		go serve(ln)
		io.Copy(io.Discard, os.Stdin)
	case "spawn": // ARGS of the helper below
		cmd := exec.Command("/proc/self/exe", args[1:]...)
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
		if err := cmd.Run(); err != nil {
			return fail(err)
		}
	case "self":
		tgid, start, err := Self()
		if err != nil {
			return fail(err)
		}
		fmt.Println(tgid, start, os.Getpid())
		io.Copy(io.Discard, os.Stdin)
	case "install": // DIR: holds an installation until it is told to end
		h, err := Install(Options{Dir: args[1]})
		if err != nil {
			return fail(err)
		}
		fmt.Println("installed")
		io.Copy(io.Discard, os.Stdin)
		if err := h.Close(); err != nil {
			return fail(err)
		}
	case "refuse": // DIR BACKEND NETNS ADDRESS: refuses for a minute
		var backend, netns uint64
		fmt.Sscan(args[2], &backend)
		fmt.Sscan(args[3], &netns)
		h, err := Install(Options{Dir: args[1]})
		if err != nil {
			return fail(err)
		}
		if err := h.Admit(Address{netns, netip.MustParseAddrPort(args[4])}, false, backend); err != nil {
			return fail(err)
		}
		if err := h.SetBackend(backend, BackendRule{Action: ActionRefuse, Enforce: true, Until: BootNow() + time.Minute}); err != nil {
			return fail(err)
		}
		fmt.Println("refused")
		io.Copy(io.Discard, os.Stdin)
	case "takeover": // DIR BACKEND PID: takes over from another layout; it may be killed after the first line
		var backend uint64
		var pid int
		fmt.Sscan(args[2], &backend)
		fmt.Sscan(args[3], &pid)
		h, err := Install(Options{Dir: args[1]})
		if err != nil {
			return fail(err)
		}
		ns, err := os.Open("/proc/self/ns/net")
		if err != nil {
			return fail(err)
		}
		defer ns.Close()
		if _, err := h.AttachNetNS(int(ns.Fd())); err != nil {
			return fail(err)
		}
		fmt.Println("installed")
		if err := h.TakeOver(backend, []int{pid}); err != nil && !errors.Is(err, ErrElsewhere) {
			return fail(err)
		}
		fmt.Println("done")
		io.Copy(io.Discard, os.Stdin)
	case "many": // DIR BACKENDS NAMESPACES: an owner of so many idle backends
		if err := many(args[1], args[2], args[3]); err != nil {
			return fail(err)
		}
	default:
		return fail(fmt.Errorf("no helper %q", args[0]))
	}
	return 0
}

// listenShared listens with SO_REUSEPORT, without which the kernel allows no second listener on a port that
// overlaps with the first.
func listenShared(network, addr string) (net.Listener, error) {
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		cErr := c.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
		})
		return errors.Join(cErr, err)
	}}
	lc.SetMultipathTCP(false)
	return lc.Listen(context.Background(), network, addr)
}

// shared is listenShared inside a namespace, until the test ends.
func shared(t *testing.T, ns *netnstest.NS, network, addr string) net.Listener {
	t.Helper()
	var ln net.Listener
	ns.Do(t, func() {
		var err error
		if ln, err = listenShared(network, addr); err != nil {
			t.Fatal(err)
		}
	})
	t.Cleanup(func() { ln.Close() })
	return ln
}

// serve accepts and answers what it reads until the client leaves.
func serve(ln net.Listener) {
	for {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		go func() {
			io.Copy(c, c)
			c.Close()
		}()
	}
}

// process is a running helper.
type process struct {
	*netnstest.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

// start runs a helper in the namespace and returns it with the first line that it wrote.
func start(t *testing.T, ns *netnstest.NS, args ...string) (*process, string) {
	t.Helper()
	cmd := ns.Command(t, "/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), helperEnv+"=1")
	cmd.Stderr = os.Stderr
	return startCmd(t, cmd)
}

func startCmd(t *testing.T, cmd *netnstest.Cmd) (*process, string) {
	t.Helper()
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := &process{Cmd: cmd, in: in, out: bufio.NewReader(out)}
	return p, p.line(t)
}

func (p *process) line(t *testing.T) string {
	t.Helper()
	s, err := p.out.ReadString('\n')
	if err != nil || strings.HasPrefix(s, "error:") {
		t.Fatalf("helper %v: %s %v", p.Args, s, err)
	}
	return strings.TrimSpace(s)
}

// end asks the helper to end and waits for it.
func (p *process) end(t *testing.T) {
	t.Helper()
	p.in.Close()
	if err := p.Wait(); err != nil {
		t.Fatalf("helper %v: %v", p.Args, err)
	}
}

// kill9 kills the helper and waits for its end.
func (p *process) kill9() {
	_ = p.Process.Signal(syscall.SIGKILL)
	_ = p.Wait()
}

// options are those of an installation in a BPF file system of the test's own.
func options(t *testing.T) Options {
	t.Helper()
	return Options{Dir: filepath.Join(netnstest.BPFFS(t), "ebb"), Log: slog.New(slog.NewTextHandler(t.Output(), nil))}
}

// installed makes an installation that goes with the test.
func installed(t *testing.T, o Options) *Host {
	t.Helper()
	h, err := Install(o)
	if err != nil {
		t.Fatalf("install: %+v", err)
	}
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
		if _, err := Cleanup(o); err != nil {
			t.Errorf("clean up: %v", err)
		}
	})
	return h
}

// watchSelf makes the listeners of this process the backend's, on the given ports only: tests of other
// packages may listen in this process tree too.
func watchSelf(t *testing.T, h *Host, w Watch) {
	t.Helper()
	tgid, start, err := Self()
	if err != nil {
		t.Fatal(err)
	}
	if err := h.WatchProcess(tgid, start, w); err != nil {
		t.Fatal(err)
	}
}

func attach(t *testing.T, h *Host, ns *netnstest.NS) uint64 {
	t.Helper()
	n, err := h.AttachNetNS(ns.Fd())
	if err != nil {
		t.Fatalf("attach: %+v", err)
	}
	return n.ID
}

// netnsID is the namespace's id, which on kernels before 5.14 is no cookie.
func netnsID(t *testing.T, ns *netnstest.NS) uint64 {
	t.Helper()
	id, err := NetNSID(ns.Fd())
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// requireFiles skips the test on kernels on which the files of a process cannot be read.
func requireFiles(t *testing.T, h *Host) {
	t.Helper()
	if _, err := h.Files(os.Getpid()); errors.Is(err, ErrNotSupported) {
		t.Skipf("needs Linux 5.11 (bpf_sock_from_file): %v", err)
	}
}

func addrPort(a net.Addr) netip.AddrPort { return netip.MustParseAddrPort(a.String()) }

func admit(t *testing.T, h *Host, netns uint64, addr netip.AddrPort, v6only bool, backend uint64) {
	t.Helper()
	if err := h.Admit(Address{netns, addr}, v6only, backend); err != nil {
		t.Fatal(err)
	}
}

func setRule(t *testing.T, h *Host, id uint64, r BackendRule) {
	t.Helper()
	if err := h.SetBackend(id, r); err != nil {
		t.Fatal(err)
	}
}

func refuse(t *testing.T, h *Host, id uint64) {
	t.Helper()
	setRule(t, h, id, BackendRule{Action: ActionRefuse, Enforce: true, Gen: 1, Until: BootNow() + time.Hour})
}

// eventually waits for what happens in its own time.
func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	limit := time.NewTimer(60 * time.Second)
	defer limit.Stop()
	for !is() {
		select {
		case <-tick.C:
		case <-limit.C:
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

// sum is the counts of all listeners of a backend.
func sum(t *testing.T, h *Host, backend uint64) (s ListenerCount) {
	t.Helper()
	cs, err := h.Counts(backend)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range cs {
		s.Open += c.Open
		s.Ending += c.Ending
		s.Closing += c.Closing
		s.Total += c.Total
		s.Closed += c.Closed
		s.BySockops += c.BySockops
		s.ByTracing += c.ByTracing
		s.ByAdopt += c.ByAdopt
		s.Healed += c.Healed
		if c.Open < 0 || c.Ending < 0 || c.Closing < 0 {
			t.Errorf("a count below zero: %+v", c)
		}
	}
	return s
}

// walked counts the connections on a local port, in TCP states, as the namespace's socket table shows them.
func tableOf(t *testing.T, ns *netnstest.NS, port uint16) (states map[uint8]int) {
	t.Helper()
	states = map[uint8]int{}
	ns.Do(t, func() {
		for _, name := range []string{"tcp", "tcp6"} {
			text, err := os.ReadFile("/proc/thread-self/net/" + name)
			if err != nil {
				t.Fatal(err)
			}
			for i, line := range strings.Split(string(text), "\n") {
				f := strings.Fields(line)
				if i == 0 || len(f) < 4 {
					continue
				}
				var lport uint16
				var state uint8
				_, hex, _ := strings.Cut(f[1], ":")
				fmt.Sscanf(hex, "%X", &lport)
				fmt.Sscanf(f[3], "%X", &state)
				if lport == port {
					states[state]++
				}
			}
		}
	})
	return states
}

const (
	tcpEstablished = 1
	tcpFinWait1    = 4
	tcpFinWait2    = 5
	tcpCloseWait   = 8
	tcpLastAck     = 9
	tcpListen      = 10
	tcpClosing     = 11
)

// dial connects from inside a namespace.
func dial(t *testing.T, ns *netnstest.NS, addr string) net.Conn {
	t.Helper()
	c, err := ns.DialContext(t.Context(), "tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func refused(ns *netnstest.NS, addr string) bool {
	c, err := ns.DialContext(context.Background(), "tcp", addr)
	if err == nil {
		c.Close()
		return false
	}
	return strings.Contains(err.Error(), unix.ECONNREFUSED.Error())
}

// acceptAll accepts in the background and hands the connections over.
func acceptAll(t *testing.T, ln net.Listener) <-chan net.Conn {
	t.Helper()
	c := make(chan net.Conn, 4096)
	go func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				close(c)
				return
			}
			c <- conn
		}
	}()
	return c
}

func pins(t *testing.T, h *Host, dir string) int {
	t.Helper()
	es, err := os.ReadDir(filepath.Join(h.opts.version(), dir))
	if err != nil {
		t.Fatal(err)
	}
	return len(es)
}

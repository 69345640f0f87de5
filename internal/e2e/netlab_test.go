// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/loadtest"
	"github.com/ebbproxy/ebb/internal/netns"
	"github.com/ebbproxy/ebb/internal/netnstest"
	"github.com/ebbproxy/ebb/probes"
)

// tightBudget is a budget for tests: long enough that a slow machine reaches zero in it, short enough to run out in a test.
var tightBudget = []string{"--grace", "12s", "--flush-timeout", "2s", "--reserve", "2s", "--quiet-period", "300ms"}

// wideBudget is a budget that no test uses up.
var wideBudget = []string{"--grace", "60s", "--flush-timeout", "5s", "--reserve", "3s", "--quiet-period", "300ms"}

func with(flags []string, more ...string) []string {
	return append(append([]string(nil), flags...), more...)
}

// lan is a host and a client's machine, joined by a link whose receiving side is steered to all CPUs.
type lan struct {
	*host
	client *netnstest.NS
	link   netnstest.Link
}

func newLAN(t *testing.T) *lan {
	t.Helper()
	h := newHost(t)
	n := &lan{host: h, client: netnstest.New(t)}
	n.link = netnstest.Veth(t, n.client, h.ns)
	netnstest.RPS(t, n.client, n.link.A.Dev)
	netnstest.RPS(t, h.ns, n.link.B.Dev)
	return n
}

func (n *lan) v4(port uint16) string { return netip.AddrPortFrom(n.link.B.V4, port).String() }
func (n *lan) v6(port uint16) string { return netip.AddrPortFrom(n.link.B.V6, port).String() }

// loadFrom makes load from a namespace until stop.
func loadFrom(t *testing.T, ns *netnstest.NS, o loadtest.Options) *load {
	t.Helper()
	o.Dial = ns.DialContext
	g, err := loadtest.New(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	l := &load{Generator: g, t: t, stop: cancel, done: make(chan error, 1)}
	go func() { l.done <- g.Run(ctx) }()
	t.Cleanup(cancel)
	return l
}

// shot is one connection of a storm.
type shot struct {
	start     time.Time // before the SYN
	connected time.Time // zero: never
	end       time.Time
	served    bool // answered in full
	refused   bool // a RST in answer to the SYN
	err       error
}

// storm makes one connection after the other as fast as its workers can, each with one request.
type storm struct {
	t       *testing.T
	request func(n int64) string
	stopped atomic.Bool
	wg      sync.WaitGroup
	served  atomic.Int64
	refused atomic.Int64
	begun   atomic.Int64

	mu    sync.Mutex
	shots []shot
}

// newStorm starts workers in the namespace. Each shot is a GET / unless request says otherwise.
func newStorm(t *testing.T, ns *netnstest.NS, addr string, workers int, request func(n int64) string) *storm {
	t.Helper()
	s := &storm{t: t, request: request}
	if request == nil {
		s.request = func(int64) string { return "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" }
	}
	for range workers {
		s.wg.Go(func() {
			if err := netns.Do(ns.Fd(), func() error { s.work(addr); return nil }); err != nil {
				t.Errorf("enter the client's namespace: %v", err)
			}
		})
	}
	t.Cleanup(s.stop)
	return s
}

func (s *storm) work(addr string) {
	var mine []shot
	for !s.stopped.Load() {
		x := fire(addr, s.request(s.begun.Add(1)))
		switch {
		case x.served:
			s.served.Add(1)
		case x.refused:
			s.refused.Add(1)
		}
		mine = append(mine, x)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.shots = append(s.shots, mine...)
}

// fire is one connection from the thread's namespace.
func fire(addr, request string) (x shot) {
	x.start = time.Now()
	defer func() { x.end = time.Now() }()
	d := net.Dialer{Timeout: patience}
	d.SetMultipathTCP(false)
	c, err := d.Dial("tcp", addr)
	if err != nil {
		x.refused, x.err = errors.Is(err, syscall.ECONNREFUSED), err
		return x
	}
	x.connected = time.Now()
	defer c.Close()
	// The ports of a storm would run out in TIME_WAIT; a reset after the whole answer has been read harms nobody.
	_ = c.(*net.TCPConn).SetLinger(0)
	_ = c.SetDeadline(time.Now().Add(patience))
	_, werr := io.WriteString(c, request)
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err == nil {
		_, err = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		if err == nil && resp.StatusCode >= 300 {
			err = errors.New(resp.Status)
		}
	}
	if err != nil {
		x.err = errors.Join(err, werr)
		return x
	}
	x.served = true
	return x
}

func (s *storm) stop() {
	s.stopped.Store(true)
	s.wg.Wait()
}

// end stops the storm and returns every shot.
func (s *storm) end() []shot {
	s.t.Helper()
	s.stop()
	return s.shots
}

// neither lists the shots that were neither answered in full nor turned away by a RST in answer to their SYN.
func neither(t *testing.T, shots []shot) {
	t.Helper()
	n := 0
	for _, x := range shots {
		if x.served || x.refused {
			continue
		}
		if n++; n <= 5 {
			t.Errorf("a connection of %v was neither served nor turned away: connected %v, %v after its start: %v", x.start, !x.connected.IsZero(), x.end.Sub(x.start), x.err)
		}
	}
	if n > 0 {
		t.Errorf("%d of %d connections were neither served nor turned away", n, len(shots))
	}
}

// httpConn is a client's kept connection.
type httpConn struct {
	net.Conn
	br *bufio.Reader
}

func dialHTTP(t *testing.T, ns *netnstest.NS, addr string) *httpConn {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := ns.DialContext(ctx, "tcp", addr)
	if err != nil {
		t.Fatalf("dial %s: %v", addr, err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(3 * patience))
	return &httpConn{Conn: c, br: bufio.NewReader(c)}
}

// send writes a GET and waits for nothing.
func (c *httpConn) send(t *testing.T, path string) {
	t.Helper()
	if _, err := fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", path); err != nil {
		t.Fatalf("send request for %s: %v", path, err)
	}
}

// answer reads one answer in full.
func (c *httpConn) answer() (body []byte, err error) {
	resp, err := http.ReadResponse(c.br, nil)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err = io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode >= 300 {
		err = errors.New(resp.Status)
	}
	return body, err
}

// head reads the head of an answer that has no end.
func (c *httpConn) head(t *testing.T) {
	t.Helper()
	for {
		line, err := c.br.ReadString('\n')
		if err != nil {
			t.Fatalf("read the head of an answer: %v", err)
		}
		if strings.TrimSpace(line) == "" {
			return
		}
	}
}

// get is a request with its answer.
func (c *httpConn) get(t *testing.T, path string) []byte {
	t.Helper()
	c.send(t, path)
	b, err := c.answer()
	if err != nil {
		t.Fatalf("get %s: %v", path, err)
	}
	return b
}

// holdOpen begins an endless answer, so that the backend's count does not fall to zero.
func holdOpen(t *testing.T, ns *netnstest.NS, addr string) *httpConn {
	t.Helper()
	c := dialHTTP(t, ns, addr)
	c.send(t, "/events")
	c.head(t)
	go func() { _, _ = io.Copy(io.Discard, c.br) }() // it ends with the connection
	return c
}

// stats asks the Go server what it has seen, on a kept connection.
func (c *httpConn) stats(t *testing.T) (s loadtest.ServerStats) {
	t.Helper()
	if err := json.Unmarshal(c.get(t, "/stats"), &s); err != nil {
		t.Fatalf("decode stats: %v", err)
	}
	return s
}

// post asks the run's API and returns the status and the body.
func (r *supervised) post(action string, body any) (int, []byte) {
	r.h.t.Helper()
	b, err := json.Marshal(body)
	if err != nil {
		r.h.t.Fatal(err)
	}
	resp, err := r.client().Post("http://ebb/v1/backends/"+r.name+"/"+action, "application/json", bytes.NewReader(b))
	if err != nil {
		r.h.t.Fatalf("ask for %s: %v", action, err)
	}
	defer resp.Body.Close()
	out, err := io.ReadAll(resp.Body)
	if err != nil {
		r.h.t.Fatalf("ask for %s: %v", action, err)
	}
	return resp.StatusCode, out
}

// must is post of what has to succeed.
func (r *supervised) must(action string, body any) (d api.Drain) {
	r.h.t.Helper()
	status, b := r.post(action, body)
	if status >= 300 {
		r.h.t.Fatalf("%s: got status %d: %s", action, status, b)
	}
	if err := json.Unmarshal(b, &d); err != nil {
		r.h.t.Fatalf("%s: decode: %v", action, err)
	}
	return d
}

// value reads a count for a message; -1 is unknown.
func value[T int64 | uint64](p *T) int64 {
	if p == nil {
		return -1
	}
	return int64(*p)
}

// shown is a backend's counts in one line, for messages.
func shown(b api.Backend) string {
	var parts []string
	for _, class := range api.Classes {
		parts = append(parts, fmt.Sprintf("%s %d", class, value(b.Counts.Class(class))))
	}
	return fmt.Sprintf("known %v, in flight %d, %s, accepted %d", b.CountsKnown, value(b.InFlight), strings.Join(parts, ", "), value(b.Counts.Accepted))
}

// awaitCounts waits until the backend's counts satisfy ok.
func (r *supervised) awaitCounts(what string, ok func(api.Backend) bool) api.Backend {
	r.h.t.Helper()
	var b api.Backend
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if b = r.backend(); ok(b) {
			return b
		}
	}
	r.h.t.Fatalf("never %s: %s", what, shown(b))
	return b
}

// walk counts the sockets of a namespace in the given states by local port, by sock_diag and so by nothing of the
// census.
func walk(t *testing.T, ns *netnstest.NS, states uint32, port uint16) (socks []probes.Socket) {
	t.Helper()
	d, err := probes.OpenDiag(probes.DiagOptions{NetNS: ns.Fd()})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	socks, err = d.Dump(ctx, probes.Filter{States: states, LocalPorts: []uint16{port}, Info: true})
	if err != nil {
		t.Fatalf("walk the sockets: %v", err)
	}
	return socks
}

// setSysctl writes a value of a namespace's net sysctls. A new namespace takes it to its grave.
func setSysctl(t *testing.T, ns *netnstest.NS, name, value string) {
	t.Helper()
	ns.Do(t, func() {
		if err := os.WriteFile(filepath.Join("/proc/sys/net", name), []byte(value), 0); err != nil {
			t.Fatalf("set %s: %v", name, err)
		}
	})
}

// program is a process of a namespace that is not supervised.
func program(t *testing.T, ns *netnstest.NS, argv ...string) *netnstest.Cmd {
	t.Helper()
	c := ns.Command(t, argv[0], argv[1:]...)
	if err := c.Start(); err != nil {
		t.Fatalf("start %s: %v", argv[0], err)
	}
	return c
}

// python is the argument vector of a script for servers that do what no proper one does.
func python(t *testing.T, script string, args ...string) []string {
	t.Helper()
	exe := need(t, "python3")
	path := filepath.Join(t.TempDir(), "server.py")
	if err := os.WriteFile(path, []byte(script), 0o600); err != nil {
		t.Fatal(err)
	}
	return append([]string{exe, path}, args...)
}

// need finds a program that a test cannot do without.
func need(t *testing.T, name string) string {
	t.Helper()
	exe, err := exec.LookPath(name)
	if err == nil {
		return exe
	}
	if os.Getenv("CI") == "true" {
		t.Fatalf("%s is not installed, and CI=true", name)
	}
	t.Skipf("%s is not installed", name)
	return ""
}

// kill9 ends an ebb run as a crash does and waits until it is gone; its CMD lives on.
func (r *supervised) kill9() {
	r.h.t.Helper()
	r.signal(syscall.SIGKILL)
	<-r.done
}

// endAfter makes sure that a CMD which has lost its ebb does not outlive the test.
func endAfter(t *testing.T, pid int) {
	t.Helper()
	start := startOf(pid)
	t.Cleanup(func() {
		if start != "" && startOf(pid) == start {
			_ = syscall.Kill(-pid, syscall.SIGKILL) // its group, which ebb made for it
		}
	})
}

// startOf is the start time of a living process: with the pid it names a process for good. Field 22 of proc(5).
func startOf(pid int) string {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return ""
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	f := strings.Fields(rest)
	if len(f) < 20 || f[0] == "Z" {
		return ""
	}
	return f[19]
}

// netstat reads a counter of a namespace's TcpExt lines of /proc/net/netstat (proc(5)).
func netstat(t *testing.T, ns *netnstest.NS, name string) (n int64) {
	t.Helper()
	ns.Do(t, func() {
		b, err := os.ReadFile("/proc/thread-self/net/netstat")
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for line := range strings.Lines(string(b)) {
			f := strings.Fields(line)
			switch {
			case len(f) == 0 || f[0] != "TcpExt:":
			case names == nil:
				names = f
			default:
				for i, v := range f[:min(len(f), len(names))] {
					if names[i] == name {
						n, _ = strconv.ParseInt(v, 10, 64) // the kernel writes numbers
						return
					}
				}
			}
		}
		t.Fatalf("no counter %s", name)
	})
	return n
}

// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/probes"
)

// tinyServer answers on one listener: an address with the options that Go's net package does not give, or a listener
// that it was handed as descriptor 3.
const tinyServer = `
import socket, sys, threading
kind = sys.argv[1]
if kind == "inherited":
    l = socket.socket(fileno=3)
else:
    l = socket.socket(socket.AF_INET if kind == "v4" else socket.AF_INET6, socket.SOCK_STREAM)
    l.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if kind != "v4":
        l.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1 if kind == "v6only" else 0)
    l.bind((sys.argv[2], int(sys.argv[3])))
    l.listen(1024)
def serve(c):
    with c:
        while True:
            b = b""
            while b"\r\n\r\n" not in b:
                m = c.recv(4096)
                if not m:
                    return
                b += m
            c.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nhello\n")
            if b"close" in b:
                return
threading.stack_size(256 << 10)
while True:
    c, _ = l.accept()
    threading.Thread(target=serve, args=(c,), daemon=True).start()
`

// One listener, one rule: whatever way a client reaches it, it is counted, and turned away after the flip.
func TestC33_ListenersOfBothFamilies(t *testing.T) {
	t.Parallel()
	n := newLAN(t)
	// Each case has a port of its own, so that they can share the machines.
	for i, tt := range []struct {
		name    string
		argv    func(t *testing.T, port int) []string
		v4, v6  bool // reaches it
		foreign bool // another process has 0.0.0.0 of the same port
	}{
		{"dual stack", func(t *testing.T, p int) []string { return goServer(t, fmt.Sprintf("[::]:%d", p), "-mptcp") }, true, true, false},
		{"v6only beside another's v4", func(t *testing.T, p int) []string { return python(t, tinyServer, "v6only", "::", fmt.Sprint(p)) }, false, true, true},
		{"v4-mapped", func(t *testing.T, p int) []string {
			return python(t, tinyServer, "mapped", "::ffff:"+n.link.B.V4.String(), fmt.Sprint(p))
		}, true, false, false},
		{"one v6 address", func(t *testing.T, p int) []string { return goServer(t, n.v6(uint16(p))) }, false, true, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			port := 8080 + i
			if tt.foreign {
				program(t, n.ns, python(t, tinyServer, "v4", "0.0.0.0", fmt.Sprint(port))...)
				eventually(t, "the other process listens", func() bool { return len(walk(t, n.ns, 1<<probes.StateListen, uint16(port))) == 1 })
			}
			r := n.run(fmt.Sprintf("c33-%d", i), with(wideBudget, "--on-new", "refuse", "--protocol", "http1"), tt.argv(t, port)...)
			var clients []*httpConn
			for _, way := range []struct {
				addr string
				on   bool
			}{{n.v4(uint16(port)), tt.v4}, {n.v6(uint16(port)), tt.v6}} {
				if way.on {
					for range 3 {
						c := dialHTTP(t, n.client, way.addr)
						c.get(t, "/")
						clients = append(clients, c)
					}
				}
			}
			r.awaitCounts("every client is counted", func(b api.Backend) bool {
				return value(b.Counts.Open) == int64(len(clients)) && value(b.Counts.Accepted) == int64(len(clients))
			})
			// A request that is under way keeps the drain from ending while the test looks.
			c := dialHTTP(t, n.client, map[bool]string{true: n.v4(uint16(port)), false: n.v6(uint16(port))}[tt.v4])
			if _, err := io.WriteString(c, "GET / HT"); err != nil {
				t.Fatal(err)
			}
			r.awaitCounts("the request is seen", func(b api.Backend) bool { return value(b.Counts.Open) == int64(len(clients))+1 })
			r.must("drain", refusing)
			from := *n.host
			from.ns = n.client
			if tt.v4 {
				from.mustRefuse(n.v4(uint16(port)))
			}
			if tt.v6 {
				from.mustRefuse(n.v6(uint16(port)))
			}
			if tt.foreign {
				from.mustServe(n.v4(uint16(port)))
			}
			if _, err := io.WriteString(c, "TP/1.1\r\nHost: x\r\n\r\n"); err != nil {
				t.Fatal(err)
			}
			if b, err := c.answer(); err != nil || string(b) != "hello\n" {
				t.Errorf("the request that was under way: got %q, %v", b, err)
			}
			r.drainedAtZero()
			for _, c := range clients {
				c.Close()
			}
		})
	}
}

// A listener that was open before ebb came is handed down, with connections in its queue, others that arrive while ebb
// attaches, and later ones: every one is counted, and each leaves the count.
func TestC25_InheritedListenerIsCountedExactly(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	l := h.ns.Listen(t, "tcp", "127.0.0.1:8080")
	file, err := l.(*net.TCPListener).File()
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	const each = 200
	var mu sync.Mutex
	var conns []*httpConn
	dial := func() {
		c := dialHTTP(t, h.ns, "127.0.0.1:8080")
		mu.Lock()
		conns = append(conns, c)
		mu.Unlock()
	}
	for range each {
		dial()
	}
	var during sync.WaitGroup
	var begun atomic.Int64
	during.Go(func() {
		for range each {
			c, err := h.ns.DialContext(context.Background(), "tcp", "127.0.0.1:8080")
			begun.Add(1)
			if err != nil {
				t.Errorf("dial while ebb starts: %v", err)
				return
			}
			mu.Lock()
			conns = append(conns, &httpConn{Conn: c})
			mu.Unlock()
		}
	})
	h.files = []*os.File{file}
	r := h.start("c25", with(wideBudget, "--on-new", "refuse"), python(t, tinyServer, "inherited")...)
	r.await("listener.found")
	// Ours of the listener must go, or its backlog would outlive the server's.
	l.Close()
	file.Close()
	during.Wait()
	for range each {
		dial()
	}
	same := func(b api.Backend) bool {
		socks := walk(t, h.ns, probes.StatesConnected, 8080)
		return b.CountsKnown && value(b.Counts.Open) == int64(len(socks)) && len(socks) == len(conns)
	}
	b := r.awaitCounts("all are counted", same)
	if value(b.Counts.Open) != 3*each {
		t.Errorf("%s, want %d open", shown(b), 3*each)
	}
	for _, c := range conns[:each+each/2] {
		c.Close()
	}
	conns = conns[each+each/2:]
	r.awaitCounts("half are left", same)
	r.signal(syscall.SIGTERM)
	r.phase(drain.PhaseSettle)
	for _, c := range conns {
		c.Close()
	}
	r.drainedAtZero()
}

// A wildcard rule leaves alone whoever listens on a specific address of its port, before the flip or after it.
func TestG6_SpecificAddressOfAnotherIsLeftAlone(t *testing.T) {
	for _, tt := range []struct{ kind, wildcard string }{{"v4", "0.0.0.0"}, {"mapped", "::"}} {
		t.Run(tt.wildcard, func(t *testing.T) {
			t.Parallel()
			h := newHost(t)
			// One that waits for its client's next request is what keeps the drain from ending while the test looks.
			r := h.run("g6", with(wideBudget, "--on-new", "refuse", "--idle", "wait"), python(t, tinyServer, tt.kind, tt.wildcard, "8080")...)
			other := func(addr string) {
				t.Helper()
				program(t, h.ns, goServer(t, addr, "-reuseport", "-name", "B")...)
				eventually(t, "B serves "+addr, func() bool {
					ip, _, _ := strings.Cut(addr, ":")
					for _, s := range walk(t, h.ns, 1<<probes.StateListen, 8080) {
						if s.Local.Addr().String() == ip {
							return true
						}
					}
					return false
				})
			}
			other("127.0.0.1:8080")
			hold := dialHTTP(t, h.ns, "127.0.0.9:8080")
			hold.get(t, "/")
			r.must("drain", refusing)
			h.mustRefuse("127.0.0.9:8080")
			h.mustServe("127.0.0.1:8080")
			other("127.0.0.3:8080")
			h.mustServe("127.0.0.3:8080")
			h.mustServe("127.0.0.1:8080")
			h.mustRefuse("127.0.0.9:8080")
			if b := r.backend(); value(b.Counts.Accepted) != 1 {
				t.Errorf("%s, want only A's own connection", shown(b))
			}
			hold.Close()
			r.drainedAtZero()
			h.mustServe("127.0.0.1:8080")
		})
	}
}

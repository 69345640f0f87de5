// SPDX-License-Identifier: Apache-2.0

package probes

import (
	"context"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/netnstest"
)

// patience is far above what anything here takes.
const patience = 30 * time.Second

// eventually waits for what sends no event.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(patience); !ok(); <-tick.C {
		if time.Now().After(end) {
			t.Fatalf("%s: not within %s", what, patience)
		}
	}
}

func openDiag(t testing.TB, ns *netnstest.NS) *Diag {
	t.Helper()
	d, err := OpenDiag(DiagOptions{NetNS: ns.Fd()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

func dial(t testing.TB, ns *netnstest.NS, address string) net.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := ns.DialContext(ctx, "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func accept(t testing.TB, l net.Listener) net.Conn {
	t.Helper()
	if d, ok := l.(interface{ SetDeadline(time.Time) error }); ok {
		if err := d.SetDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
	}
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// port is the port of a listener or connection's own end.
func port(t testing.TB, a net.Addr) uint16 {
	t.Helper()
	ap, err := netip.ParseAddrPort(a.String())
	if err != nil {
		t.Fatal(err)
	}
	return ap.Port()
}

// control runs fn on the descriptor of a connection or listener.
func control(t testing.TB, c any, fn func(fd int)) {
	t.Helper()
	rc, err := c.(syscall.Conn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := rc.Control(func(fd uintptr) { fn(int(fd)) }); err != nil {
		t.Fatal(err)
	}
}

func cookie(t testing.TB, c any) (n uint64) {
	t.Helper()
	control(t, c, func(fd int) {
		var err error
		if n, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE); err != nil {
			t.Fatal(err)
		}
	})
	return n
}

func write(t testing.TB, c net.Conn, s string) {
	t.Helper()
	if err := c.SetWriteDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(c, s); err != nil {
		t.Fatal(err)
	}
}

func read(t testing.TB, c net.Conn, want string) {
	t.Helper()
	b := make([]byte, len(want))
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, b); err != nil || string(b) != want {
		t.Fatalf("got %q, %v, want %q", b, err, want)
	}
}

// sample looks for the connection at whose other end c is, as sock_diag shows it.
func sample(t testing.TB, d *Diag, c net.Conn) (Sample, bool) {
	t.Helper()
	socks, err := d.Dump(t.Context(), Filter{States: StatesConnected, LocalPorts: []uint16{port(t, c.RemoteAddr())}, Info: true})
	if err != nil {
		t.Fatal(err)
	}
	want := port(t, c.LocalAddr())
	for _, s := range socks {
		if s.Remote.Port() == want {
			got, partial := SampleFromSocket(s)
			if partial && !got.ourFIN() {
				t.Fatalf("%v: got no tcp_info", s.Remote)
			}
			return got, true
		}
	}
	return Sample{}, false
}

func TestMain(m *testing.M) {
	if what := os.Getenv("EBB_PROBES_TEST_PROCESS"); what != "" {
		os.Exit(testProcess(what, strings.Fields(os.Getenv("EBB_PROBES_TEST_ARGS"))))
	}
	os.Exit(m.Run())
}

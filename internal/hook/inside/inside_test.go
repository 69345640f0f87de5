// SPDX-License-Identifier: Apache-2.0

package inside

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/netnstest"
)

func addr(t *testing.T, l net.Listener) netip.AddrPort {
	t.Helper()
	a, err := netip.ParseAddrPort(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func TestDial(t *testing.T) {
	netnstest.LeakCheck(t)
	for _, at := range []string{"127.0.0.1:0", "[::1]:0"} {
		l, err := net.Listen("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		to := addr(t, l)
		c, err := Dial(t.Context(), 0, to, [2]uint16{})
		if err != nil {
			t.Fatal(err)
		}
		s, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Write([]byte("x")); err != nil {
			t.Error(err)
		}
		if n, err := c.Read(make([]byte, 2)); n != 1 || err != nil {
			t.Errorf("%s: got %d, %v, want one byte", at, n, err)
		}
		if got := c.RemoteAddr().String(); got != to.String() {
			t.Errorf("got %s, want %s", got, to)
		}
		if err := errors.Join(c.Close(), s.Close(), l.Close()); err != nil {
			t.Error(err)
		}
		if _, err := Dial(t.Context(), 0, to, [2]uint16{}); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("%s: got %v, want ECONNREFUSED", at, err)
		}
	}
}

// A listener that takes nobody leaves a SYN without an answer.
func TestDialWaitsNoLongerThanItsContext(t *testing.T) {
	netnstest.LeakCheck(t)
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), unix.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	to := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(sa.(*unix.SockaddrInet4).Port))
	mine := errors.New("mine")
	for range 5 { // its backlog holds one or two
		ctx, cancel := context.WithTimeoutCause(t.Context(), 100*time.Millisecond, mine)
		c, err := Dial(ctx, 0, to, [2]uint16{})
		cancel()
		if err == nil {
			defer c.Close()
			continue
		}
		if !errors.Is(err, mine) {
			t.Errorf("got %v, want the cause of the context", err)
		}
		if _, err := Dial(ctx, 0, to, [2]uint16{}); !errors.Is(err, mine) {
			t.Errorf("with a context that has ended: got %v, want its cause", err)
		}
		return
	}
	t.Error("five connections fit into a backlog of none")
}

func TestDialFromOtherPorts(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	if out, err := ns.Command(t, "sh", "-c", "echo 40000 40015 >/proc/sys/net/ipv4/ip_local_port_range").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, at := range []string{"127.0.0.1:80", "[::1]:80"} {
		l := ns.Listen(t, "tcp", at)
		// Most ports of the right half are taken by the time the last one is chosen.
		for range 3 {
			c, err := Dial(t.Context(), ns.Fd(), addr(t, l), [2]uint16{40000, 40007})
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if port := c.LocalAddr().(*net.TCPAddr).Port; port < 40008 || port > 40015 {
				t.Errorf("got source port %d, want 40008 to 40015", port)
			}
		}
	}
	l := ns.Listen(t, "tcp", "127.0.0.1:81")
	if c, err := Dial(t.Context(), ns.Fd(), addr(t, l), [2]uint16{40000, 40015}); err == nil {
		c.Close()
		t.Errorf("got a connection from %v, want none", c.LocalAddr())
	}
}

// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/proxy"
)

// A peer whose accept queue is full drops SYNs for longer than a dial may take. Its clients wait, as they would have at the
// peer itself, and are carried there as soon as it has room.
func TestCrowdedPeerIsDialledAgain(t *testing.T) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	crowded := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: sa.(*unix.SockaddrInet4).Port}
	first, err := net.DialTCP("tcp4", nil, crowded) // a backlog of 0 holds one
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()

	r, err := proxy.New(proxy.Options{Peers: []proxy.Peer{{Address: crowded.AddrPort()}}, DialTimeout: 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	ln, err := new(net.ListenConfig).Listen(t.Context(), "tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	at := ln.Addr().(*net.TCPAddr).AddrPort()
	client := adopted(t, r, ln.(*net.TCPListener), at)
	defer client.Close()
	if _, err := client.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for r.Stats().DialFailures < 4 { // longer than one round of all peers
		select {
		case <-ctx.Done():
			t.Fatalf("no second dial of a silent peer: %+v", r.Stats())
		case <-time.After(5 * time.Millisecond):
		}
	}
	// Room for one more: what the queue held, and then the relay's dial.
	for range 2 {
		c := acceptWithin(t, fd)
		defer unix.Close(c)
		from, err := unix.Getpeername(c)
		if err != nil {
			t.Fatal(err)
		}
		if from.(*unix.SockaddrInet4).Port == first.LocalAddr().(*net.TCPAddr).Port {
			continue
		}
		readable(t, c)
		b := make([]byte, 2)
		if n, err := unix.Read(c, b); n != 1 || err != nil || b[0] != 'x' {
			t.Errorf("got %q, %v, want what the client sent", b[:max(n, 0)], err)
		}
		return
	}
	t.Error("the client of a crowded peer was not carried when there was room")
}

func acceptWithin(t *testing.T, fd int) int {
	t.Helper()
	readable(t, fd)
	c, _, err := unix.Accept4(fd, unix.SOCK_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// readable waits until a descriptor has something to read.
func readable(t *testing.T, fd int) {
	t.Helper()
	for end := time.Now().Add(time.Minute); time.Now().Before(end); {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 1000)
		if n > 0 {
			return
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			t.Fatal(err)
		}
	}
	t.Fatal("nothing to read for a minute")
}

// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/nettest"
	"golang.org/x/sys/unix"
)

// TestConn holds both ends of a relayed connection to what net.Conn promises.
func TestConn(t *testing.T) {
	leakCheck(t)
	for _, network := range []string{"tcp4", "tcp6"} {
		t.Run(network, func(t *testing.T) {
			nettest.TestConn(t, func() (net.Conn, net.Conn, func(), error) {
				l, err := nettest.NewLocalListener(network)
				if err != nil {
					return nil, nil, nil, err
				}
				r := start(t, Options{Peers: []Peer{{Address: l.Addr().(*net.TCPAddr).AddrPort()}}, Loops: 1})
				to := serve(t, r, "tcp", "localhost:0")
				c1, err := net.Dial("tcp", to.String())
				if err != nil {
					return nil, nil, nil, err
				}
				c2, err := l.Accept()
				if err != nil {
					return nil, nil, nil, err
				}
				return c1, c2, func() { c1.Close(); c2.Close(); l.Close() }, nil
			})
		})
	}
}

func TestHalfClose(t *testing.T) {
	leakCheck(t)
	to := backend(t, "tcp", "127.0.0.1:0", func(c *net.TCPConn) {
		got, err := io.ReadAll(c) // until the client has finished
		if err != nil {
			t.Errorf("read request: %v", err)
		}
		fmt.Fprintf(c, "%d", len(got))
		c.CloseWrite()
		// The other way round is nothing more to come.
		if n, err := c.Read(make([]byte, 1)); n != 0 || err != io.EOF {
			t.Errorf("after both have finished: got %d, %v, want EOF", n, err)
		}
	})
	r := start(t, Options{Peers: []Peer{{Address: to}}})
	c := dial(t, serve(t, r, "tcp", "127.0.0.1:0"))
	for range 300 {
		if _, err := c.Write(make([]byte, 10_000)); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(c)
	if err != nil || string(got) != "3000000" {
		t.Errorf("got %q, %v, want 3000000", got, err)
	}
	c.Close()
	waitIdle(t, r)
	wantResult(t, r, ResultDone, 1)
	if s := r.Stats(); s.BytesToPeers != 3_000_000 || s.BytesToClients != 7 || s.Accepted != 1 {
		t.Errorf("got %+v, want 3000000 bytes to peers and 7 to clients", s)
	}
}

func TestServerSpeaksFirst(t *testing.T) {
	leakCheck(t)
	to := backend(t, "tcp", "127.0.0.1:0", func(c *net.TCPConn) {
		io.WriteString(c, "220 ready\r\n")
		echo(c)
	})
	for _, h := range []*Health{nil, {Path: "/healthz", Within: time.Millisecond}} {
		r := start(t, Options{Peers: []Peer{{Address: to}}, Health: h})
		c := dial(t, serve(t, r, "tcp", "127.0.0.1:0"))
		got := make([]byte, 11)
		if _, err := io.ReadFull(c, got); err != nil || string(got) != "220 ready\r\n" {
			t.Errorf("got %q, %v, want the greeting", got, err)
		}
		if err := ask(c, "hello"); err != nil {
			t.Error(err)
		}
		c.Close()
	}
}

// TestResetFromServer: what a server sent before its reset arrives, and then the reset.
func TestResetFromServer(t *testing.T) {
	leakCheck(t)
	to := backend(t, "tcp", "127.0.0.1:0", func(c *net.TCPConn) {
		io.ReadFull(c, make([]byte, 4))
		io.WriteString(c, "answer")
		io.ReadFull(c, make([]byte, 4))
		c.SetLinger(0)
	})
	r := start(t, Options{Peers: []Peer{{Address: to}}})
	c := dial(t, serve(t, r, "tcp", "127.0.0.1:0"))
	io.WriteString(c, "ping")
	got := make([]byte, 6)
	if _, err := io.ReadFull(c, got); err != nil || string(got) != "answer" {
		t.Errorf("got %q, %v, want answer", got, err)
	}
	io.WriteString(c, "ping")
	if n, err := c.Read(got); !isReset(err) {
		t.Errorf("got %d, %v, want a reset", n, err)
	}
	waitIdle(t, r)
	wantResult(t, r, ResultReset, 1)
}

// TestAnswerBeforeReset: a server that answers and closes with the upload unread resets the connection; its answer must
// not be lost on the way.
func TestAnswerBeforeReset(t *testing.T) {
	leakCheck(t)
	for range 50 {
		closed := make(chan struct{})
		to := backend(t, "tcp", "127.0.0.1:0", func(c *net.TCPConn) {
			io.ReadFull(c, make([]byte, 4))
			io.WriteString(c, "413 no")
			c.Close() // unread bytes make it a reset
			close(closed)
		})
		r := start(t, Options{Peers: []Peer{{Address: to}}, Loops: 1})
		c := dial(t, serve(t, r, "tcp", "127.0.0.1:0"))
		io.WriteString(c, "POST")
		go func() {
			for {
				if _, err := c.Write(make([]byte, 1000)); err != nil {
					return
				}
			}
		}()
		got := make([]byte, 6)
		if _, err := io.ReadFull(c, got); err != nil || string(got) != "413 no" {
			t.Fatalf("got %q, %v, want the answer", got, err)
		}
		<-closed
		if _, err := io.Copy(io.Discard, c); err != nil && !isReset(err) {
			t.Errorf("got %v, want the end or a reset", err)
		}
		c.Close()
		waitIdle(t, r)
	}
}

// TestC20_AbortIsSeenAtOnce: a client that goes away in the middle of an endless answer is passed on without a timeout.
func TestC20_AbortIsSeenAtOnce(t *testing.T) {
	leakCheck(t)
	gone := make(chan error, 1)
	to := backend(t, "tcp", "127.0.0.1:0", func(c *net.TCPConn) {
		for {
			if _, err := c.Write(make([]byte, 100_000)); err != nil {
				gone <- err
				return
			}
		}
	})
	for _, reading := range []bool{true, false} {
		r := start(t, Options{Peers: []Peer{{Address: to}}})
		c := dial(t, serve(t, r, "tcp", "127.0.0.1:0"))
		if reading {
			if _, err := io.CopyN(io.Discard, c, 3<<20); err != nil {
				t.Fatal(err)
			}
		} else if !eventually(func() bool { return r.Stats().BytesToClients > 100_000 }) {
			t.Fatal("nothing arrives")
		}
		c.SetLinger(0)
		c.Close()
		select {
		case err := <-gone:
			if !isReset(err) {
				t.Errorf("got %v, want a reset", err)
			}
		case <-time.After(patience):
			t.Fatal("the server was not told")
		}
		waitIdle(t, r)
		wantResult(t, r, ResultReset, 1)
	}
}

// TestBackPressure: what the client does not take is not taken from the server, and nothing is lost by that.
func TestBackPressure(t *testing.T) {
	leakCheck(t)
	for _, pipes := range []int{4, 1} {
		const total = 96 << 20
		stuck := make(chan int, 8)
		to := backend(t, "tcp", "127.0.0.1:0", func(c *net.TCPConn) {
			src := rand.NewChaCha8([32]byte{1})
			sent, b := 0, make([]byte, 1<<20)
			said := false
			src.Read(b)
			for at := 0; sent < total; {
				c.SetWriteDeadline(time.Now().Add(500 * time.Millisecond))
				n, err := c.Write(b[at:])
				sent, at = sent+n, at+n
				if errors.Is(err, os.ErrDeadlineExceeded) {
					if !said {
						said = true
						stuck <- sent
					}
					continue
				}
				if err != nil {
					t.Errorf("write: %v", err)
					return
				}
				if at == len(b) {
					src.Read(b)
					at = 0
				}
			}
			c.CloseWrite()
		})
		// One pipe and four connections: three have to do without.
		r := start(t, Options{Peers: []Peer{{Address: to}}, MaxPipes: pipes, Loops: 1})
		at := serve(t, r, "tcp", "127.0.0.1:0")
		var conns []*net.TCPConn
		for range 4 {
			conns = append(conns, dial(t, at))
		}
		for range conns {
			if n := <-stuck; n >= total/2 {
				t.Errorf("the server could send %d bytes to a client that reads none", n)
			}
		}
		want := crc32.New(crc32.MakeTable(crc32.Castagnoli))
		if _, err := io.CopyN(want, rand.NewChaCha8([32]byte{1}), total); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for _, c := range conns {
			wg.Go(func() {
				got := crc32.New(crc32.MakeTable(crc32.Castagnoli))
				n, err := io.Copy(got, c)
				if err != nil || n != total || got.Sum32() != want.Sum32() {
					t.Errorf("got %d bytes with sum %08x, %v, want %d with %08x", n, got.Sum32(), err, total, want.Sum32())
				}
				c.Close()
			})
		}
		wg.Wait()
		waitIdle(t, r)
	}
}

// TestUrgentByteStaysInline: a byte sent as urgent is neither lost nor moved.
func TestUrgentByteStaysInline(t *testing.T) {
	leakCheck(t)
	to := backend(t, "tcp", "127.0.0.1:0", echo)
	r := start(t, Options{Peers: []Peer{{Address: to}}})
	c := dial(t, serve(t, r, "tcp", "127.0.0.1:0"))
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var want []byte
	for i := range 20 {
		part := bytes.Repeat([]byte{byte('a' + i)}, 1+i*9000)
		flags := 0
		if i%3 == 1 {
			flags = unix.MSG_OOB
		}
		for at := 0; at < len(part); {
			n := 0
			if err := raw.Write(func(fd uintptr) bool {
				var err error
				n, err = unix.SendmsgN(int(fd), part[at:], nil, nil, flags)
				return !errors.Is(err, unix.EAGAIN)
			}); err != nil || n <= 0 {
				t.Fatalf("send: %d, %v", n, err)
			}
			at += n
		}
		want = append(want, part...)
	}
	c.CloseWrite()
	got, err := io.ReadAll(c)
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("got %d bytes, %v, want the %d that were sent", len(got), err, len(want))
	}
}

func TestIdleTimeout(t *testing.T) {
	leakCheck(t)
	to := backend(t, "tcp", "127.0.0.1:0", echo)
	r := start(t, Options{Peers: []Peer{{Address: to}}, IdleTimeout: 50 * time.Millisecond})
	c := dial(t, serve(t, r, "tcp", "127.0.0.1:0"))
	if err := ask(c, "hello"); err != nil {
		t.Fatal(err)
	}
	if n, err := c.Read(make([]byte, 1)); !isReset(err) {
		t.Errorf("got %d, %v, want a reset", n, err)
	}
	wantResult(t, r, ResultIdle, 1)
}

// TestHalfClosedTimeout: a client that neither sends nor closes after its server has finished is ended, and one that
// has finished and waits for its answer is not.
func TestHalfClosedTimeout(t *testing.T) {
	leakCheck(t)
	answer := make(chan struct{})
	to := backend(t, "tcp", "127.0.0.1:0", func(c *net.TCPConn) {
		b := make([]byte, 1)
		c.Read(b)
		if b[0] == 'w' {
			<-answer
		}
		io.WriteString(c, "bye")
		c.CloseWrite()
		io.Copy(io.Discard, c)
	})
	r := start(t, Options{Peers: []Peer{{Address: to}}, HalfClosed: 50 * time.Millisecond})
	at := serve(t, r, "tcp", "127.0.0.1:0")
	waiting := dial(t, at)
	io.WriteString(waiting, "w")
	waiting.CloseWrite()
	lingering := dial(t, at)
	io.WriteString(lingering, "l")
	if got, err := io.ReadAll(lingering); err != nil || string(got) != "bye" {
		t.Errorf("got %q, %v, want bye", got, err)
	}
	wantResult(t, r, ResultIdle, 1)
	close(answer)
	if got, err := io.ReadAll(waiting); err != nil || string(got) != "bye" {
		t.Errorf("waiting for an answer: got %q, %v, want bye", got, err)
	}
	wantResult(t, r, ResultDone, 1)
}

// TestC33_DualStack: one listener on [::] relays clients of both families to peers of both.
func TestC33_DualStack(t *testing.T) {
	leakCheck(t)
	for _, peer := range []string{"127.0.0.1:0", "[::1]:0"} {
		to := backend(t, "tcp", peer, func(c *net.TCPConn) {
			b := make([]byte, 256)
			n := 0
			for {
				m, err := c.Read(b[n:])
				n += m
				h, k, perr := ParseHeader(b[:n])
				if perr != nil || err != nil {
					t.Errorf("read header: %v, %v", perr, err)
					return
				}
				if k > 0 {
					fmt.Fprintf(c, "%v %v\n", h.Source, h.Destination)
					c.Write(b[k:n])
					echo(c)
					return
				}
			}
		})
		r := start(t, Options{Peers: []Peer{{Address: to, ProxyProtocol: true}}})
		at := serve(t, r, "tcp", "[::]:0")
		for _, host := range []string{"127.0.0.1", "::1"} {
			c := dial(t, netip.AddrPortFrom(netip.MustParseAddr(host), at.Port()))
			want := fmt.Sprintf("%v %v\n", c.LocalAddr(), c.RemoteAddr())
			got := make([]byte, len(want))
			if _, err := io.ReadFull(c, got); err != nil || string(got) != want {
				t.Errorf("%s to %s: got %q, %v, want %q", host, peer, got, err, want)
			}
			if err := ask(c, "hello"); err != nil {
				t.Error(err)
			}
			c.Close()
		}
	}
}

func TestSourceAddress(t *testing.T) {
	leakCheck(t)
	to := backend(t, "tcp", "127.0.0.1:0", func(c *net.TCPConn) { fmt.Fprint(c, c.RemoteAddr().(*net.TCPAddr).IP) })
	r := start(t, Options{Peers: []Peer{{Address: to, Source: netip.MustParseAddr("127.77.0.1")}}})
	got, err := io.ReadAll(dial(t, serve(t, r, "tcp", "127.0.0.1:0")))
	if err != nil || string(got) != "127.77.0.1" {
		t.Errorf("got %q, %v, want 127.77.0.1", got, err)
	}
	if err := r.Check(t.Context()); err != nil {
		t.Errorf("check: %v", err)
	}
}

// blackhole is a listener whose queue is full, so that SYNs are dropped.
func blackhole(t *testing.T) netip.AddrPort {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), unix.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	to := name(int32(fd), unix.SYS_GETSOCKNAME)
	c := dial(t, to) // the one for which there is room
	t.Cleanup(func() { c.Close() })
	return to
}

// refused is an address where nobody listens.
func refused(t *testing.T) netip.AddrPort {
	t.Helper()
	l := listen(t, "tcp", "127.0.0.1:0")
	defer l.Close()
	return address(l)
}

// TestFailedDialTriesNext: a client does not notice peers that refuse or do not answer.
func TestFailedDialTriesNext(t *testing.T) {
	leakCheck(t)
	good := backend(t, "tcp", "127.0.0.1:0", echo)
	r := start(t, Options{Peers: []Peer{{Address: refused(t)}, {Address: blackhole(t)}, {Address: good}}, DialTimeout: 100 * time.Millisecond, Probe: ProbeOptions{Interval: Never, Fall: 1000}})
	at := serve(t, r, "tcp", "127.0.0.1:0")
	var wg sync.WaitGroup
	for i := range 40 {
		wg.Go(func() {
			c := dial(t, at)
			if err := ask(c, fmt.Sprintf("request %d", i)); err != nil {
				t.Error(err)
			}
			c.Close()
		})
	}
	wg.Wait()
	waitIdle(t, r)
	if s := r.Stats(); s.Results[ResultDone] != 40 {
		t.Errorf("got %+v, want 40 done", s)
	}
	if good := r.Peers()[2]; good.Dialled != 40 || good.State != PeerUp || good.Failed != 0 {
		t.Errorf("got %+v, want 40 dials of the peer that serves", good)
	}
	if err := r.Check(t.Context()); err != nil {
		t.Errorf("check: %v", err)
	}
}

// TestR18_NothingIsTakenBeforeADialSucceeds: a client that is turned away may repeat what it sent.
func TestR18_NothingIsTakenBeforeADialSucceeds(t *testing.T) {
	leakCheck(t)
	for name, peers := range map[string][]Peer{"no peers": nil, "none reached": {{Address: refused(t)}, {Address: blackhole(t)}}} {
		r := start(t, Options{Peers: peers, DialTimeout: 50 * time.Millisecond})
		c, err := net.Dial("tcp", serve(t, r, "tcp", "127.0.0.1:0").String())
		if err == nil {
			c.SetDeadline(time.Now().Add(patience))
			io.WriteString(c, "POST / HTTP/1.1\r\n\r\n")
			_, err = c.Read(make([]byte, 1))
			c.Close()
		}
		if !isReset(err) {
			t.Errorf("%s: got %v, want a reset", name, err)
		}
		waitIdle(t, r)
		if s := r.Stats(); s.Results[ResultNoPeer] != 1 || s.BytesToPeers != 0 {
			t.Errorf("%s: got %+v, want one without peer and no byte", name, s)
		}
		if err := r.Check(t.Context()); !errors.Is(err, ErrNoPeer) {
			t.Errorf("%s: check: got %v, want ErrNoPeer", name, err)
		}
	}
}

// TestClientLeavesWhileDialling: a client that resets before a peer answers leaves nothing behind.
func TestClientLeavesWhileDialling(t *testing.T) {
	leakCheck(t)
	r := start(t, Options{Peers: []Peer{{Address: blackhole(t)}}, DialTimeout: patience})
	at := serve(t, r, "tcp", "127.0.0.1:0")
	c := dial(t, at)
	if !eventually(func() bool { return r.Stats().Active == 1 }) {
		t.Fatal("not accepted")
	}
	c.SetLinger(0)
	c.Close()
	waitIdle(t, r)
	wantResult(t, r, ResultGone, 1)
}

func TestMaxConnections(t *testing.T) {
	leakCheck(t)
	to := backend(t, "tcp", "127.0.0.1:0", echo)
	r := start(t, Options{Peers: []Peer{{Address: to}}, MaxConnections: 3})
	at := serve(t, r, "tcp", "127.0.0.1:0")
	var conns []*net.TCPConn
	for range 10 {
		conns = append(conns, dial(t, at)) // the backlog takes what the relay does not
	}
	if !eventually(func() bool { return r.Stats().Pauses > 0 }) {
		t.Errorf("got %+v, want a pause", r.Stats())
	}
	served := 0
	for len(conns) > 0 {
		if n := r.Stats().Active; n > 3 {
			t.Errorf("%d connections are held, want at most 3", n)
		}
		// The first in the queue is served, and makes room for another.
		if err := ask(conns[0], "hello"); err != nil {
			t.Fatalf("after %d: %v", served, err)
		}
		conns[0].Close()
		conns = conns[1:]
		served++
	}
	waitIdle(t, r)
	wantResult(t, r, ResultDone, 10)
}

// TestDescriptorsExhausted: without descriptors the relay stops accepting, and goes on when there are some again.
func TestDescriptorsExhausted(t *testing.T) {
	leakCheck(t)
	to := backend(t, "tcp", "127.0.0.1:0", echo)
	r := start(t, Options{Peers: []Peer{{Address: to}}})
	at := serve(t, r, "tcp", "127.0.0.1:0")
	if err := ask(dial(t, at), "hello"); err != nil {
		t.Fatal(err)
	}
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	restore := func() {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
			t.Fatal(err)
		}
	}
	defer restore()
	var fds []int
	for range 5 {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		fds = append(fds, fd)
	}
	// The lowest limit: every number below the sockets' that is free gets used, none above can be.
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: old.Max}); err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: at.Addr().As4(), Port: int(at.Port())}); err != nil {
			t.Fatal(err)
		}
	}
	paused := eventually(func() bool { return r.Stats().Pauses > 0 })
	restore()
	if !paused {
		t.Errorf("got %+v, want a pause", r.Stats())
	}
	for _, fd := range fds {
		f := os.NewFile(uintptr(fd), "client")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		c.SetDeadline(time.Now().Add(patience))
		if err := ask(c, "hello"); err != nil {
			t.Error(err)
		}
		c.Close()
	}
}

// TestAdopt relays connections out of an application's accept queue, MPTCP ones among them.
func TestAdopt(t *testing.T) {
	leakCheck(t)
	to := backend(t, "tcp", "127.0.0.1:0", echo)
	for _, mptcp := range []bool{false, true} {
		r := start(t, Options{Peers: []Peer{{Address: to}}, Loops: 2})
		var lc net.ListenConfig
		lc.SetMultipathTCP(mptcp)
		app, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer app.Close()
		f, err := app.(*net.TCPListener).File()
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		var d net.Dialer
		d.SetMultipathTCP(mptcp)
		for range 10 {
			c, err := d.Dial("tcp", app.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			c.SetDeadline(time.Now().Add(patience))
			fd := -1
			raw, err := f.SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			if err := raw.Read(func(l uintptr) bool {
				fd, _, err = unix.Accept4(int(l), unix.SOCK_CLOEXEC)
				return err != unix.EAGAIN
			}); err != nil {
				t.Fatal(err)
			}
			if fd < 0 {
				t.Fatal(err)
			}
			if err := r.Adopt(fd); err != nil {
				t.Fatal(err)
			}
			// Enough that it is spliced.
			want := make([]byte, 3<<20)
			rand.NewChaCha8([32]byte{7}).Read(want)
			go func() {
				c.Write(want)
				c.(*net.TCPConn).CloseWrite()
			}()
			got, err := io.ReadAll(c)
			if err != nil || !bytes.Equal(got, want) {
				t.Errorf("mptcp %v: got %d bytes, %v, want %d", mptcp, len(got), err, len(want))
			}
			c.Close()
		}
		wantResult(t, r, ResultDone, 10)
	}
	r := start(t, Options{MaxConnections: 1})
	var pair [2]int
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pair[1])
	if err := r.Adopt(pair[0]); err == nil {
		t.Error("adopted a Unix socket")
	}
}

func TestServeRefuses(t *testing.T) {
	leakCheck(t)
	r := start(t, Options{})
	var lc net.ListenConfig
	lc.SetMultipathTCP(true)
	mptcp, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer mptcp.Close()
	if ok, err := os.ReadFile("/proc/sys/net/mptcp/enabled"); err == nil && ok[0] == '1' {
		if err := r.Serve(t.Context(), mptcp.(*net.TCPListener)); !errors.Is(err, ErrNotListener) {
			t.Errorf("MPTCP listener: got %v, want ErrNotListener", err)
		}
	}
	l := listen(t, "tcp", "127.0.0.1:0")
	c := dial(t, address(l))
	if err := r.Serve(t.Context(), c); !errors.Is(err, ErrNotListener) {
		t.Errorf("connection: got %v, want ErrNotListener", err)
	}
	if err := r.SetPeers([]Peer{{Address: address(l)}}); err != nil {
		t.Fatal(err)
	}
	if err := r.Serve(t.Context(), l); !errors.Is(err, ErrLoop) {
		t.Errorf("own address as peer: got %v, want ErrLoop", err)
	}
	if err := r.SetPeers(nil); err != nil {
		t.Fatal(err)
	}
	any := listen(t, "tcp", "[::]:0")
	serveListener(t, r, any)
	peer := Peer{Address: netip.AddrPortFrom(netip.MustParseAddr("127.0.0.9"), address(any).Port())}
	if c, err := net.Dial("tcp", address(any).String()); err == nil { // it is reset: there are no peers
		c.Close()
	}
	if !eventually(func() bool { return r.Stats().Accepted == 1 }) {
		t.Fatal("nothing is accepted")
	}
	if err := r.SetPeers([]Peer{peer}); !errors.Is(err, ErrLoop) {
		t.Errorf("loopback behind the own wildcard listener: got %v, want ErrLoop", err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if err := r.Serve(t.Context(), l); !errors.Is(err, ErrClosed) {
		t.Errorf("after close: got %v, want ErrClosed", err)
	}
}

// TestServeEndsAndRelayingGoesOn: the end of Serve stops new connections only, Shutdown waits for the others, and Close
// resets them.
func TestServeEndsAndRelayingGoesOn(t *testing.T) {
	leakCheck(t)
	to := backend(t, "tcp", "127.0.0.1:0", echo)
	r := start(t, Options{Peers: []Peer{{Address: to}}})
	l := listen(t, "tcp", "127.0.0.1:0")
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- r.Serve(ctx, l) }()
	a, b := dial(t, address(l)), dial(t, address(l))
	for _, c := range []*net.TCPConn{a, b} {
		if err := ask(c, "hello"); err != nil {
			t.Fatal(err)
		}
	}
	cancel()
	if err := <-served; err != nil {
		t.Errorf("serve: %v", err)
	}
	late := dial(t, address(l)) // the listener is still the caller's, and its backlog takes it
	if err := ask(a, "still there"); err != nil {
		t.Error(err)
	}
	if n := r.Stats().Accepted; n != 2 {
		t.Errorf("%d were accepted, want 2", n)
	}
	late.Close()
	cause := errors.New("enough")
	ended, end := context.WithCancelCause(t.Context())
	end(cause)
	if err := r.Shutdown(ended); !errors.Is(err, cause) {
		t.Errorf("shutdown with two connections: got %v, want the cause", err)
	}
	if err := ask(b, "and now"); err != nil {
		t.Error(err)
	}
	a.Close()
	if !eventually(func() bool { return r.Stats().Active == 1 }) {
		t.Errorf("got %+v, want one", r.Stats())
	}
	if err := r.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
	if n, err := b.Read(make([]byte, 1)); !isReset(err) {
		t.Errorf("after close: got %d, %v, want a reset", n, err)
	}
	if got := r.Stats().Results; got[ResultClosed] != 1 || got[ResultDone] != 1 {
		t.Errorf("got %v, want one closed and one done", got)
	}

	r = start(t, Options{Peers: []Peer{{Address: to}}})
	c := dial(t, serve(t, r, "tcp", "127.0.0.1:0"))
	if err := ask(c, "hello"); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- r.Shutdown(context.Background()) }()
	c.Close()
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("shutdown: %v", err)
		}
	case <-time.After(patience):
		t.Error("shutdown does not end")
	}
}

// counted collects what Metrics is told.
type counted struct {
	mu sync.Mutex
	n  map[string]int
}

func (c *counted) LateConnection(a Action, r Result) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.n == nil {
		c.n = make(map[string]int)
	}
	c.n[string(a)+" "+string(r)]++
}

func (c *counted) get(what string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n[what]
}

// TestManyConnections relays connections with random half-closes, resets, slow readers and writers and servers that
// speak first, and checks every byte. EBB_LONG=1 makes it 100,000.
func TestManyConnections(t *testing.T) {
	leakCheck(t)
	total := 1_000
	if os.Getenv("EBB_LONG") == "1" {
		total = 100_000
	} else if testing.Short() {
		total = 300
	}
	const parallel = 64
	// The header tells the backend which client it talks to.
	var pairs sync.Map // client's address → chan *net.TCPConn
	to := listen(t, "tcp", "127.0.0.1:0")
	serveBackend(t, to, func(c *net.TCPConn) {
		b := make([]byte, 28)
		if _, err := io.ReadFull(c, b); err != nil {
			return // reset before the header came through
		}
		h, _, err := ParseHeader(b)
		if err != nil {
			t.Errorf("read header: %v", err)
			return
		}
		ch, _ := pairs.LoadOrStore(h.Source, make(chan accepted, 1)) // the first of the two to come makes it
		done := make(chan struct{})
		ch.(chan accepted) <- accepted{c, done}
		select {
		case <-done:
		case <-t.Context().Done(): // nobody came for it, and the test has failed
		}
	})
	r := start(t, Options{Peers: []Peer{{Address: address(to), ProxyProtocol: true}}, MaxPipes: 8})
	at := serve(t, r, "tcp", "127.0.0.1:0")
	var next atomic.Int64
	var wg sync.WaitGroup
	for range parallel {
		wg.Go(func() {
			for {
				i := next.Add(1)
				if i > int64(total) || t.Failed() {
					return
				}
				if err := onePair(at, uint64(i), &pairs); err != nil {
					t.Errorf("connection %d: %v", i, err)
				}
			}
		})
	}
	wg.Wait()
	waitIdle(t, r)
	s := r.Stats()
	t.Logf("%+v", s)
	if n := s.Results[ResultDone] + s.Results[ResultReset] + s.Results[ResultGone]; n != uint64(total) {
		t.Errorf("%d connections are over, want %d: %+v", n, total, s)
	}
}

type accepted struct {
	c    *net.TCPConn
	done chan struct{}
}

// part is what one side of a connection does.
type part struct {
	send     int  // bytes
	resetAt  int  // after so many sent bytes; −1: never
	chunk    int  // of its writes
	slow     bool // reads in small pieces out of a small buffer
	waits    bool // sends nothing before the other side has finished
	seed     byte // of what it sends
	sent     int  // of the bytes to the relay
	received int  // of the other side's
	sum      uint32
	readErr  error
	writeErr error
}

func randomPart(rng *rand.Rand) part {
	sizes := []int{0, 1, 100, 1024, 16 << 10, 40 << 10, 200 << 10, 1 << 20}
	p := part{resetAt: -1, chunk: []int{1 << 20, 1 << 20, 64 << 10, 4096, 1000}[rng.IntN(5)], slow: rng.IntN(8) == 0, seed: byte(rng.IntN(256))}
	if n := sizes[rng.IntN(len(sizes))]; n > 0 {
		p.send = n + rng.IntN(n)
	}
	if rng.IntN(6) == 0 {
		p.resetAt = rng.IntN(p.send + 1)
	}
	return p
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// play does what p says on c.
func (p *part) play(c *net.TCPConn) {
	if p.slow {
		c.SetReadBuffer(4096)
	}
	finished := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(finished)
		b := make([]byte, 64<<10)
		if p.slow {
			b = b[:3000]
		}
		for {
			n, err := c.Read(b)
			p.received += n
			p.sum = crc32.Update(p.sum, castagnoli, b[:n])
			if err != nil {
				p.readErr = err
				return
			}
		}
	})
	wg.Go(func() {
		if p.waits {
			<-finished
		}
		src := rand.NewChaCha8([32]byte{p.seed})
		b := make([]byte, min(p.chunk, max(p.send, 1)))
		limit := p.send
		if p.resetAt >= 0 {
			limit = p.resetAt
		}
		for p.sent < limit {
			n := min(len(b), limit-p.sent)
			src.Read(b[:n])
			n, err := c.Write(b[:n])
			p.sent += n
			if err != nil {
				p.writeErr = err
				return
			}
		}
		if p.resetAt >= 0 {
			c.SetLinger(0)
			c.Close()
			return
		}
		c.CloseWrite()
	})
	wg.Wait()
	c.Close()
}

// check compares what p received with what o sent.
func (p *part) check(o *part, who string) error {
	if p.received > 0 {
		want := make([]byte, p.received)
		rand.NewChaCha8([32]byte{o.seed}).Read(want)
		if sum := crc32.Checksum(want, castagnoli); sum != p.sum || p.received > o.sent {
			return fmt.Errorf("%s received %d bytes with sum %08x, want the first of %d that were sent, with %08x", who, p.received, p.sum, o.sent, sum)
		}
	}
	switch {
	case p.resetAt >= 0: // it left
	case o.resetAt >= 0:
		// The kernel tells a reset once, to a read or to a write.
		if !isReset(p.readErr) && !isReset(p.writeErr) {
			return fmt.Errorf("%s saw %v and %v, want a reset", who, p.readErr, p.writeErr)
		}
	case !errors.Is(p.readErr, io.EOF) || p.received != o.send:
		return fmt.Errorf("%s received %d bytes, want %d, and then %v", who, p.received, o.send, p.readErr)
	}
	return nil
}

func onePair(at netip.AddrPort, seed uint64, pairs *sync.Map) error {
	rng := rand.New(rand.NewPCG(seed, 1))
	a, b := randomPart(rng), randomPart(rng)
	if a.slow {
		b.send = min(b.send, 100<<10) // its window is a few KB, and acknowledgements are delayed
	}
	if b.slow {
		a.send = min(a.send, 100<<10)
	}
	a.resetAt, b.resetAt = min(a.resetAt, a.send), min(b.resetAt, b.send)
	switch rng.IntN(4) {
	case 0:
		a.waits = true // the server speaks first
	case 1:
		b.waits = true
	}
	fd, err := net.DialTimeout("tcp", at.String(), patience)
	if err != nil {
		return err
	}
	c := fd.(*net.TCPConn)
	defer c.Close()
	c.SetDeadline(time.Now().Add(patience))
	key := c.LocalAddr().(*net.TCPAddr).AddrPort()
	if a.resetAt == 0 {
		a.resetAt = -1 // or else it might never come to the backend
	}
	v, _ := pairs.LoadOrStore(key, make(chan accepted, 1))
	var peer accepted
	select {
	case peer = <-v.(chan accepted):
	case <-time.After(patience):
		return errors.New("the connection does not come to the backend")
	}
	pairs.Delete(key) // while nobody else can have this port
	defer close(peer.done)
	peer.c.SetDeadline(time.Now().Add(patience))
	var wg sync.WaitGroup
	wg.Go(func() { a.play(c) })
	wg.Go(func() { b.play(peer.c) })
	wg.Wait()
	return errors.Join(a.check(&b, "client"), b.check(&a, "server"))
}

// TestUrgentByteInTheQueue: reads end early at an urgent byte, which must not be taken for the end of what is there.
func TestUrgentByteInTheQueue(t *testing.T) {
	leakCheck(t)
	to := backend(t, "tcp", "127.0.0.1:0", echo)
	r := start(t, Options{Peers: []Peer{{Address: to}}})
	r.Park()
	c := dial(t, serve(t, r, "tcp", "127.0.0.1:0"))
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []struct {
		b     string
		flags int
	}{{"before ", 0}, {"urgen", 0}, {"t", unix.MSG_OOB}, {" after", 0}} {
		var err error
		if e := raw.Write(func(fd uintptr) bool {
			_, err = unix.SendmsgN(int(fd), []byte(part.b), nil, nil, part.flags)
			return !errors.Is(err, unix.EAGAIN)
		}); e != nil || err != nil {
			t.Fatal(e, err)
		}
	}
	if !eventually(func() bool { return r.Stats().Parked == 1 }) {
		t.Fatal("not parked")
	}
	if err := r.Release(); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len("before urgent after"))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != "before urgent after" {
		t.Errorf("got %q, %v", got, err)
	}
}

// TestShortWrites: what a client takes only a part of is kept, in order.
func TestShortWrites(t *testing.T) {
	leakCheck(t)
	messages := make(chan []byte)
	to := backend(t, "tcp", "127.0.0.1:0", func(c *net.TCPConn) {
		for b := range messages {
			c.Write(b)
		}
		c.CloseWrite()
		io.Copy(io.Discard, c)
	})
	l := listen(t, "tcp", "127.0.0.1:0")
	raw, err := l.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	// The relay's sockets inherit it, so that they are full soon.
	if err := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUF, 16<<10) }); err != nil {
		t.Fatal(err)
	}
	r := start(t, Options{Peers: []Peer{{Address: to}}, MaxPipes: 1})
	serveListener(t, r, l)
	c := dial(t, address(l))
	if err := c.SetReadBuffer(64 << 10); err != nil {
		t.Fatal(err)
	}
	rng := rand.NewChaCha8([32]byte{3})
	var want []byte
	message := func(n int) {
		b := make([]byte, n)
		rng.Read(b)
		want = append(want, b...)
		messages <- b
	}
	// One message at a time, so that each is one read of the relay, until one is not carried whole.
	for full := false; !full; {
		message(20_000)
		last := uint64(0)
		stands := 0
		if !eventually(func() bool {
			n := r.Stats().BytesToClients
			if n == last {
				stands++
			} else {
				last, stands = n, 0
			}
			full = stands > 20
			return full || n == uint64(len(want))
		}) {
			t.Fatal("nothing moves")
		}
	}
	go func() {
		for range 10 {
			message(20_000)
		}
		close(messages)
	}()
	got, err := io.ReadAll(c)
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("got %d bytes, %v, want %d, the same: %v", len(got), err, len(want), bytes.Equal(got, want))
	}
}

// TestFlowsTakeTurns: a flow that has much to carry lets others have theirs.
func TestFlowsTakeTurns(t *testing.T) {
	leakCheck(t)
	r := start(t, Options{Loops: 1})
	l, err := newLoop(r, 1) // not run
	if err != nil {
		t.Fatal(err)
	}
	defer l.release()
	pair := func() (ours int32, other *net.TCPConn) {
		ln := listen(t, "tcp", "127.0.0.1:0")
		other = dial(t, address(ln))
		c, err := ln.AcceptTCP()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		raw, err := c.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		if err := raw.Control(func(fd uintptr) { ours = int32(fd) }); err != nil {
			t.Fatal(err)
		}
		return ours, other
	}
	c := l.get()
	c.phase = open
	var from, to *net.TCPConn
	c.side[client].fd, from = pair()
	c.side[server].fd, to = pair()
	c.side[client].ready, c.side[server].room = true, true
	const total = 60_000
	go from.Write(make([]byte, total))
	if !eventually(func() bool {
		n, err := unix.IoctlGetInt(int(c.side[client].fd), unix.SIOCINQ)
		return err == nil && n == total
	}) {
		t.Fatal("the bytes do not come")
	}
	l.turn = 1000
	l.pump(c, client)
	if n := l.carried[client].Load(); n < 1000 || n >= total || len(l.again) != 1 {
		t.Errorf("got %d bytes carried and %d flows that wait for a turn, want a part of %d and one", n, len(l.again), total)
	}
	c.flow[client].again = false
	l.turn = turnSize
	l.pump(c, client)
	if n := l.carried[client].Load(); n != total {
		t.Errorf("got %d bytes carried after another turn, want %d", n, total)
	}
	if _, err := io.CopyN(io.Discard, to, total); err != nil {
		t.Error(err)
	}
	for _, p := range l.pipes {
		p.close()
		r.pipes.Add(-1)
	}
}

// TestOneStreamDoesNotStarveOthers: small messages get through beside a stream that never pauses.
func TestOneStreamDoesNotStarveOthers(t *testing.T) {
	leakCheck(t)
	stop := make(chan struct{})
	to := backend(t, "tcp", "127.0.0.1:0", func(c *net.TCPConn) {
		b := make([]byte, 1)
		if _, err := c.Read(b); err != nil {
			return
		}
		if b[0] == 's' {
			for big := make([]byte, 1<<20); ; {
				select {
				case <-stop:
					return
				default:
				}
				if _, err := c.Write(big); err != nil {
					return
				}
			}
		}
		c.Write(b)
		echo(c)
	})
	r := start(t, Options{Peers: []Peer{{Address: to}}, Loops: 1})
	at := serve(t, r, "tcp", "127.0.0.1:0")
	stream := dial(t, at)
	io.WriteString(stream, "s")
	drained := make(chan int64)
	go func() {
		n, _ := io.Copy(io.Discard, stream)
		drained <- n
	}()
	c := dial(t, at)
	for range 200 {
		if err := ask(c, "x"); err != nil {
			t.Fatal(err)
		}
	}
	close(stop)
	if n := <-drained; n == 0 {
		t.Error("the stream carried nothing meanwhile")
	}
}

func TestOptionsAreChecked(t *testing.T) {
	for name, o := range map[string]Options{
		"negative":      {DialTimeout: -2},
		"never dial":    {DialTimeout: Never},
		"connections":   {MaxConnections: -1},
		"path":          {Health: &Health{Path: "healthz"}},
		"path query":    {Health: &Health{Path: "/a?b"}},
		"prefix":        {Health: &Health{From: []netip.Prefix{{}}}},
		"no port":       {Peers: []Peer{{Address: netip.MustParseAddrPort("192.0.2.1:0")}}},
		"unspecified":   {Peers: []Peer{{Address: netip.MustParseAddrPort("0.0.0.0:80")}}},
		"weight":        {Peers: []Peer{{Address: netip.MustParseAddrPort("192.0.2.1:80"), Weight: -1}}},
		"other family":  {Peers: []Peer{{Address: netip.MustParseAddrPort("192.0.2.1:80"), Source: netip.IPv6Loopback()}}},
		"no such zone":  {Peers: []Peer{{Address: netip.MustParseAddrPort("[fe80::1%nosuchdev]:80")}}},
		"probe timeout": {Probe: ProbeOptions{Timeout: -1}},
	} {
		r, err := New(o)
		if err == nil {
			r.Close()
			t.Errorf("%s: accepted", name)
		} else if name != "no such zone" && !errors.Is(err, ErrOptions) {
			t.Errorf("%s: got %v, want ErrOptions", name, err)
		}
	}
}

var _ syscall.Conn = (*net.TCPListener)(nil)

// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/loadtest"
	"github.com/ebbproxy/ebb/probes"
)

// stays watches for a second that a drain has not flushed. It can only miss a fault, never invent one.
func (r *supervised) stays(why string) {
	r.h.t.Helper()
	for end := time.Now().Add(time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if len(r.all(drain.EventFlush)) > 0 {
			r.h.t.Fatalf("flushed although %s", why)
		}
	}
}

// drainedAtZero ends a test: the run must exit with 0 and its drain must have reached zero.
func (r *supervised) drainedAtZero() api.Drain {
	r.h.t.Helper()
	if code := r.wait(); code != 0 {
		r.h.t.Errorf("exit code %d, want 0", code)
	}
	d := r.result().Backend.Drain
	if d == nil {
		r.h.t.Fatal("the report has no drain")
	}
	if d.Outcome != drain.OutcomeDrained || d.FlushReason != drain.FlushZero {
		r.h.t.Errorf("got outcome %s, flush %s, survivors %+v; want drained at zero", d.Outcome, d.FlushReason, d.Survivors)
	}
	return *d
}

// The framework shuts down and forgets its upgraded connection; the kernel does not, and the drain waits for it.
func TestT7_ForgottenConnectionStillCounts(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	const addr = "127.0.0.1:8080"
	// The server, told at notify, closes its listener and is done at once: net/http does not wait for what was hijacked.
	r := h.run("web", with(wideBudget, "--notify", "signal:SIGQUIT", "--flush", "signal:SIGKILL"),
		goServer(t, addr, "-graceful", "-linger", "1h")...)
	c := dialHTTP(t, h.ns, addr)
	if _, err := io.WriteString(c, "GET /upgrade HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	c.head(t)
	echo := func() {
		t.Helper()
		b := []byte{'x'}
		if _, err := c.Write(b); err != nil {
			t.Fatalf("the upgraded connection: %v", err)
		}
		if _, err := io.ReadFull(c.br, b); err != nil {
			t.Fatalf("the upgraded connection: %v", err)
		}
	}
	echo()
	r.signal(syscall.SIGTERM)
	eventually(t, "the server has closed its listener", func() bool { return len(walk(t, h.ns, 1<<probes.StateListen, 8080)) == 0 })
	r.phase(drain.PhaseWait)
	r.stays("an upgraded connection is open")
	echo()
	if b := r.backend(); value(b.InFlight) != 1 || value(b.Counts.Active) != 1 {
		t.Errorf("with one upgraded connection: %s", shown(b))
	}
	c.Close()
	r.drainedAtZero()
}

// unreadUpload answers when it is told to stop, and exits with the upload unread.
const unreadUpload = `
import os, signal, socket, sys
l = socket.create_server((sys.argv[1], int(sys.argv[2])))
c, _ = l.accept()
c.setsockopt(socket.SOL_SOCKET, 32, 8 << 20)  # SO_SNDBUFFORCE: the answer fits
c.recv(4096)
def stop(*_):
    n = 1 << 20
    c.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % n + b"x" * n)
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
while True:
    signal.pause()
`

// A process that exits with unread data resets the connection, and what it has answered is lost on its way: at the
// deadline the answer arrives all the same.
func TestT15_UnreadUploadKeepsItsAnswer(t *testing.T) {
	t.Parallel()
	n := newLAN(t)
	r := n.run("web", []string{"--grace", "20s", "--flush-timeout", "8s", "--reserve", "8s", "--quiet-period", "300ms", "--on-new", "refuse"},
		python(t, unreadUpload, n.link.B.V4.String(), "8080")...)
	pid := r.child()
	c := dialHTTP(t, n.client, n.v4(8080))
	if err := c.Conn.(*net.TCPConn).SetReadBuffer(16 << 10); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer c.Close()
	wg.Go(func() {
		_, _ = fmt.Fprint(c, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4194304\r\n\r\n")
		_, _ = c.Write(make([]byte, 4<<20)) // most of it is never taken
	})
	eventually(t, "the upload is unread", func() bool {
		for _, s := range walk(t, n.ns, 1<<probes.StateEstablished, 8080) {
			return s.RQueue > 64<<10
		}
		return false
	})
	r.signal(syscall.SIGTERM)
	eventually(t, "the server has exited", func() bool { return startOf(pid) == "" })
	body, err := c.answer()
	if err != nil || len(body) != 1<<20 {
		t.Errorf("got %d bytes of the answer, %v; want 1 MB", len(body), err)
	}
	c.Close()
	if code := r.wait(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	if d := r.result().Backend.Drain; d == nil || d.Outcome != drain.OutcomeExpired || len(d.Survivors) != 1 {
		t.Errorf("got drain %+v, want expired with one survivor", d)
	}
}

// Clients send requests that must not run twice on kept connections, at any moment, also the one at which theirs is
// retired. Each is answered, or its connection has ended before it began: what a client meets at any server's own idle
// timeout, counted apart from failures.
func TestC10_RequestAtTheInstantOfRetirement(t *testing.T) {
	n := newLAN(t)
	addr := n.v4(8080)
	r := n.run("web", with(wideBudget, "--protocol", "http1"), goServer(t, addr)...)
	hold := holdOpen(t, n.client, addr)
	const clients = 100
	var answered, raced, idle atomic.Int64
	var wg sync.WaitGroup
	for i := range clients {
		c := dialHTTP(t, n.client, addr)
		gap := time.Duration(i) * 200 * time.Microsecond // from a closed loop to one that is idle most of the time
		wg.Go(func() {
			for uses := 0; ; uses++ {
				_, werr := io.WriteString(c, "POST /flush HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
				_, err := c.br.Peek(1)
				switch {
				case err == nil:
				case uses > 0 && (errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET)):
					raced.Add(1)
					return
				default:
					t.Errorf("a request that was not the first: %v", errors.Join(err, werr))
					return
				}
				if _, err := c.answer(); err != nil {
					t.Errorf("an answer was cut short: %v", err)
					return
				}
				answered.Add(1)
				_ = c.SetReadDeadline(time.Now().Add(gap))
				if _, err := c.br.Peek(1); errors.Is(err, io.EOF) {
					idle.Add(1)
					return
				}
				_ = c.SetReadDeadline(time.Now().Add(2 * patience))
			}
		})
	}
	eventually(t, "requests are answered", func() bool { return answered.Load() > 20*clients })
	r.must("drain", map[string]string{"on_new": "refuse"})
	wg.Wait()
	d := r.must("undrain", struct{}{})
	if d.Retired == 0 {
		t.Error("nothing was retired: the test shows nothing")
	}
	if got := dialHTTP(t, n.client, addr).stats(t).Flushes; got != answered.Load() {
		t.Errorf("%d requests ran, %d were answered: a request was lost after it had begun", got, answered.Load())
	}
	t.Logf("%d answered, %d retired, %d clients saw it while idle, %d in a race", answered.Load(), d.Retired, idle.Load(), raced.Load())
	hold.Close()
	r.signal(syscall.SIGTERM)
	r.drainedAtZero()
}

// A client reads 10 MB slowly. The answer is in flight until its last byte is acknowledged, also when the server has
// written all of it and closed its side.
func TestC11_SlowReaderIsInFlight(t *testing.T) {
	t.Parallel()
	n := newLAN(t)
	argv := packaged(loadtest.Nginx)(t, 8080, loadtest.ServerOptions{Host: n.link.B.V4.String(), Workers: 1})
	r := n.run("web", with(wideBudget, "--protocol", "http1", "--on-new", "refuse"), argv...)
	c := dialHTTP(t, n.client, n.v4(8080))
	if err := c.Conn.(*net.TCPConn).SetReadBuffer(64 << 10); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(c, "GET /big HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(c.br, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.signal(syscall.SIGTERM)
	r.phase(drain.PhaseWait)
	r.stays("the answer is being read")
	// Read until the server has nothing left to write and has closed.
	var got int64
	for closed := false; !closed; {
		m, err := io.CopyN(io.Discard, resp.Body, 256<<10)
		if got += m; err != nil {
			t.Fatalf("read %d bytes: %v", got, err)
		}
		socks := walk(t, n.ns, probes.StatesConnected, 8080)
		if len(socks) == 0 {
			t.Fatalf("the connection is gone after %d bytes", got)
		}
		closed = socks[0].State == probes.StateFinWait1
	}
	r.stays("the server's last bytes are not acknowledged")
	if b := r.backend(); value(b.InFlight) != 1 {
		t.Errorf("with %d bytes to read: %s", 10<<20-got, shown(b))
	}
	m, err := io.Copy(io.Discard, resp.Body)
	if got += m; err != nil || got != 10<<20 {
		t.Errorf("read %d bytes, %v; want 10 MB", got, err)
	}
	c.Close()
	r.drainedAtZero()
}

// halfCloser says goodbye, closes its side and leaves the other one open.
const halfCloser = `
import socket, sys
l = socket.create_server((sys.argv[1], int(sys.argv[2])))
kept = []
while True:
    c, _ = l.accept()
    c.sendall(b"bye\n")
    c.shutdown(socket.SHUT_WR)
    kept.append(c)
`

// A connection on which our side is finished and acknowledged is closing and blocks nothing.
func TestC18_HalfClosedServerSideDoesNotBlock(t *testing.T) {
	t.Parallel()
	n := newLAN(t)
	r := n.run("web", with(wideBudget, "--on-new", "refuse"), python(t, halfCloser, n.link.B.V4.String(), "8080")...)
	c := dialHTTP(t, n.client, n.v4(8080))
	if b, err := io.ReadAll(c.br); err != nil || string(b) != "bye\n" {
		t.Fatalf("got %q, %v", b, err)
	}
	b := r.awaitCounts("it is closing", func(b api.Backend) bool { return value(b.Counts.Closing) == 1 })
	if value(b.InFlight) != 0 || value(b.Counts.Open) != 0 {
		t.Errorf("with one closing connection: %s", shown(b))
	}
	r.signal(syscall.SIGTERM)
	r.drainedAtZero()
}

// A client that has closed its side still gets its answer, and the drain waits for it.
func TestC18_HalfClosedClientIsAnswered(t *testing.T) {
	t.Parallel()
	n := newLAN(t)
	r := n.run("web", with(wideBudget, "--on-new", "refuse", "--protocol", "http1"), goServer(t, n.v4(8080))...)
	c := dialHTTP(t, n.client, n.v4(8080))
	c.send(t, "/?ms=2500")
	if err := c.Conn.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the server has the FIN", func() bool { return len(walk(t, n.ns, 1<<probes.StateCloseWait, 8080)) == 1 })
	r.signal(syscall.SIGTERM)
	if body, err := c.answer(); err != nil || string(body) != "hello\n" {
		t.Errorf("got %q, %v", body, err)
	}
	r.drainedAtZero()
}

// Clients abort endless answers, politely and not: the drain ends then, and not at its deadline.
func TestC20_AbortedStreamLeavesTheCount(t *testing.T) {
	t.Parallel()
	n := newLAN(t)
	addr := n.v4(8080)
	r := n.run("web", with(wideBudget, "--on-new", "refuse"), goServer(t, addr)...)
	polite, rude := holdOpen(t, n.client, addr), holdOpen(t, n.client, addr)
	r.signal(syscall.SIGTERM)
	r.phase(drain.PhaseWait)
	r.awaitCounts("both are active", func(b api.Backend) bool { return value(b.Counts.Active) == 2 })
	polite.Close()
	r.awaitCounts("one is active", func(b api.Backend) bool { return value(b.Counts.Active) == 1 && value(b.InFlight) == 1 })
	r.stays("a stream is open")
	if err := rude.Conn.(*net.TCPConn).SetLinger(0); err != nil {
		t.Fatal(err)
	}
	rude.Close()
	r.drainedAtZero()
}

// The client's machine vanishes with data on the way to it: the connection is stalled, blocks the drain, and is listed.
func TestC21_DeadPeerIsStalled(t *testing.T) {
	t.Parallel()
	n := newLAN(t)
	addr := n.v4(8080)
	r := n.run("web", with(wideBudget, "--on-new", "refuse"), goServer(t, addr)...)
	c := dialHTTP(t, n.client, addr)
	c.send(t, "/events?ms=20")
	c.head(t)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer c.Close()
	wg.Go(func() { _, _ = io.Copy(io.Discard, bufio.NewReader(c)) }) // ends with the connection
	r.signal(syscall.SIGTERM)
	r.phase(drain.PhaseWait)
	r.awaitCounts("the stream is active", func(b api.Backend) bool { return value(b.Counts.Active) == 1 })
	n.client.Do(t, func() {
		link, err := netlink.LinkByName(n.link.A.Dev)
		if err != nil {
			t.Fatal(err)
		}
		if err := netlink.LinkSetDown(link); err != nil {
			t.Fatal(err)
		}
	})
	r.awaitCounts("the dead peer is stalled", func(b api.Backend) bool { return value(b.Counts.Stalled) == 1 && value(b.InFlight) == 1 })
	r.must("cut", struct{}{})
	if code := r.wait(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	d := r.result().Backend.Drain
	if d == nil || d.Outcome != drain.OutcomeExpired {
		t.Fatalf("got drain %+v, want expired", d)
	}
	if len(d.Survivors) != 1 || d.Survivors[0].Class != "stalled" || d.Survivors[0].Unacked == 0 {
		t.Errorf("got survivors %+v, want one that is stalled, with bytes unacknowledged", d.Survivors)
	}
}

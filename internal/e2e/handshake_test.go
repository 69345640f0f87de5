// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/probes"
)

// Flags of a segment (RFC 9293, 3.1).
const (
	flagFIN = 1
	flagSYN = 2
	flagRST = 4
	flagPSH = 8
	flagACK = 16
)

// wire is a network of clients whose TCP is the test's own: each segment is sent when the test says so, and no kernel
// answers in its place. It is a TUN device in the server's namespace, with the addresses of TEST-NET-2 (RFC 5737).
type wire struct {
	t      *testing.T
	f      *os.File
	server netip.Addr
	client netip.Addr

	mu    sync.Mutex
	conns map[uint16]*peer
}

func newWire(t *testing.T, h *host) *wire {
	t.Helper()
	w := &wire{t: t, server: netip.MustParseAddr("198.51.100.1"), client: netip.MustParseAddr("198.51.100.2"), conns: map[uint16]*peer{}}
	h.ns.Do(t, func() {
		fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
		if err != nil {
			t.Fatalf("open TUN: %v", err)
		}
		req, err := unix.NewIfreq("e2etun0")
		if err != nil {
			t.Fatal(err)
		}
		req.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, req); err != nil {
			t.Fatalf("make TUN device: %v", errors.Join(err, unix.Close(fd)))
		}
		w.f = os.NewFile(uintptr(fd), "tun")
		link, err := netlink.LinkByName("e2etun0")
		if err != nil {
			t.Fatal(err)
		}
		addr := &netlink.Addr{IPNet: &net.IPNet{IP: w.server.AsSlice(), Mask: net.CIDRMask(24, 32)}}
		if err := errors.Join(netlink.AddrAdd(link, addr), netlink.LinkSetUp(link)); err != nil {
			t.Fatalf("set up TUN device: %v", err)
		}
	})
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.read()
	}()
	t.Cleanup(func() {
		w.f.Close()
		<-done
	})
	return w
}

// peer is one client's end of a connection. Segments arrive in order on a TUN device, so it keeps no more than the two
// sequence numbers.
type peer struct {
	w        *wire
	port, to uint16

	mu       sync.Mutex
	seq, ack uint32
	silent   bool // does not acknowledge what it receives
	synAck   bool
	reset    bool
	fin      bool
	in       []byte
	wake     chan struct{}
}

func (w *wire) peer(to uint16) *peer {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := &peer{w: w, to: to, port: uint16(20000 + len(w.conns)), seq: rand.Uint32(), wake: make(chan struct{})}
	w.conns[p.port] = p
	return p
}

func (w *wire) read() {
	b := make([]byte, 65536)
	for {
		n, err := w.f.Read(b)
		if err != nil {
			return // closed
		}
		w.segment(b[:n])
	}
}

func (w *wire) segment(b []byte) {
	if len(b) < 40 || b[0]>>4 != 4 || b[9] != unix.IPPROTO_TCP {
		return
	}
	tcp := b[int(b[0]&15)*4:]
	w.mu.Lock()
	p := w.conns[binary.BigEndian.Uint16(tcp[2:])]
	w.mu.Unlock()
	if p == nil {
		return
	}
	data := tcp[int(tcp[12]>>4)*4:]
	seq, flags := binary.BigEndian.Uint32(tcp[4:]), tcp[13]
	p.mu.Lock()
	answer := false
	switch {
	case flags&flagRST != 0:
		p.reset = true
	case flags&flagSYN != 0:
		p.ack, p.synAck = seq+1, true // a repeated one changes nothing
	case seq == p.ack:
		p.in = append(p.in, data...)
		p.ack += uint32(len(data))
		if flags&flagFIN != 0 {
			p.fin = true
			p.ack++
		}
		answer = (len(data) > 0 || flags&flagFIN != 0) && !p.silent
	}
	close(p.wake)
	p.wake = make(chan struct{})
	p.mu.Unlock()
	if answer {
		p.send(flagACK, nil)
	}
}

// send writes one segment and moves the sequence number.
func (p *peer) send(flags byte, data []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	tcp := make([]byte, 20, 24+len(data))
	binary.BigEndian.PutUint16(tcp[0:], p.port)
	binary.BigEndian.PutUint16(tcp[2:], p.to)
	binary.BigEndian.PutUint32(tcp[4:], p.seq)
	binary.BigEndian.PutUint32(tcp[8:], p.ack)
	tcp[13] = flags
	binary.BigEndian.PutUint16(tcp[14:], 65535)
	if flags&flagSYN != 0 {
		tcp = append(tcp, 2, 4, 5, 180) // MSS 1460
		p.seq++
	}
	tcp[12] = byte(len(tcp)/4) << 4
	tcp = append(tcp, data...)
	p.seq += uint32(len(data))
	if flags&flagFIN != 0 {
		p.seq++
	}
	src, dst := p.w.client.As4(), p.w.server.As4()
	pseudo := append(append(append([]byte{}, src[:]...), dst[:]...), 0, unix.IPPROTO_TCP, byte(len(tcp)>>8), byte(len(tcp)))
	binary.BigEndian.PutUint16(tcp[16:], checksum(append(pseudo, tcp...)))
	ip := []byte{0x45, 0, byte((20 + len(tcp)) >> 8), byte(20 + len(tcp)), 0, 0, 0x40, 0, 64, unix.IPPROTO_TCP, 0, 0}
	ip = append(append(ip, src[:]...), dst[:]...)
	binary.BigEndian.PutUint16(ip[10:], checksum(ip))
	if _, err := p.w.f.Write(append(ip, tcp...)); err != nil {
		p.w.t.Errorf("write to TUN: %v", err)
	}
}

// checksum is that of RFC 1071.
func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(b[i])<<8 | uint32(b[i+1])
	}
	if len(b)%2 == 1 {
		sum += uint32(b[len(b)-1]) << 8
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// await waits until ok holds of the peer, which it may read.
func (p *peer) await(what string, ok func() bool) error {
	limit := time.After(patience)
	for {
		p.mu.Lock()
		done, wake := ok(), p.wake
		p.mu.Unlock()
		if done {
			return nil
		}
		select {
		case <-wake:
		case <-limit:
			return fmt.Errorf("no %s from the server", what)
		}
	}
}

// halfOpen sends a SYN and waits for its answer, and leaves it at that.
func (p *peer) halfOpen() error {
	p.send(flagSYN, nil)
	if err := p.await("answer to a SYN", func() bool { return p.synAck || p.reset }); err != nil {
		return err
	}
	if p.reset {
		return syscall.ECONNREFUSED
	}
	return nil
}

// complete sends the last ACK and a request, and waits for the answer and the server's FIN.
func (p *peer) complete() error {
	p.send(flagACK, nil)
	p.send(flagPSH|flagACK, []byte("GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))
	return p.answered()
}

func (p *peer) answered() error {
	if err := p.await("answer to a request", func() bool { return p.fin || p.reset }); err != nil {
		return err
	}
	p.mu.Lock()
	in, reset := string(p.in), p.reset
	p.mu.Unlock()
	switch {
	case !strings.Contains(in, "200 OK") || !strings.HasSuffix(in, "hello\n"):
		return fmt.Errorf("got %q, want a whole answer", in)
	case reset:
		return syscall.ECONNRESET
	}
	p.send(flagFIN|flagACK, nil)
	return nil
}

// The last ACK of a handshake comes after its server was told to stop: the connection is served, whether the half-open
// request is in the kernel's table or, under SYN cookies, nowhere.
func TestR6_LastAckAfterTheFlip(t *testing.T) {
	for _, cookies := range []string{"1", "2"} { // when the table is full, always
		for _, onNew := range []drain.OnNew{drain.OnNewAuto, drain.OnNewRefuse} {
			t.Run("syncookies "+cookies+"/"+string(onNew), func(t *testing.T) {
				t.Parallel()
				h := newHost(t)
				setSysctl(t, h.ns, "ipv4/tcp_syncookies", cookies)
				w := newWire(t, h)
				r := h.run("web", with(wideBudget, "--on-new", string(onNew)), goServer(t, w.server.String()+":8080")...)
				const clients = 20
				var ps []*peer
				for range clients {
					p := w.peer(8080)
					if err := p.halfOpen(); err != nil {
						t.Fatal(err)
					}
					ps = append(ps, p)
				}
				if got := len(walk(t, h.ns, 1<<probes.StateSynRecv, 8080)); (got == 0) != (cookies == "2") {
					t.Fatalf("%d half-open requests are in the table with tcp_syncookies=%s", got, cookies)
				}
				r.signal(syscall.SIGTERM)
				if cookies == "2" {
					// The flip is about to come; no rule can tell a cookie's ACK from a SYN, so it gives them time.
					r.find("warning of cookies", func(e drain.Event) bool {
						return e.Type == drain.EventWarning && strings.Contains(e.Message, "SYN cookies")
					})
				} else {
					r.phase(drain.PhaseSettle)
				}
				errs := make(chan error, clients)
				for _, p := range ps {
					go func() { errs <- p.complete() }()
				}
				for range clients {
					if err := <-errs; err != nil {
						t.Errorf("a client that was connecting at the stop: %v", err)
					}
				}
				if code := r.wait(); code != 0 {
					t.Errorf("exit code %d, want 0", code)
				}
				b := r.result().Backend
				if b.Drain == nil || b.Drain.Outcome != drain.OutcomeDrained {
					t.Errorf("got drain %+v, want drained", b.Drain)
				}
			})
		}
	}
}

// With admission closed a SYN is turned away at once, and a handshake that began before is not.
func TestR6_SynAfterTheFlipIsTurnedAway(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	w := newWire(t, h)
	r := h.run("web", with(wideBudget, "--on-new", "refuse"), goServer(t, w.server.String()+":8080")...)
	early := w.peer(8080)
	if err := early.halfOpen(); err != nil {
		t.Fatal(err)
	}
	r.must("drain", refusing)
	if err := w.peer(8080).halfOpen(); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a SYN after the flip: got %v, want a RST", err)
	}
	r.awaitCounts("the half-open request is counted", func(b api.Backend) bool { return value(b.Counts.Handshake) == 1 && value(b.InFlight) == 1 })
	if err := early.complete(); err != nil {
		t.Errorf("the earlier handshake: %v", err)
	}
	if code := r.wait(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
}

// Connections that are born in unusual ways are counted like the others: the census equals a walk over the sockets while
// they are open, and nothing is left when they are gone.
func TestC26_UnusualBirthsEqualAWalk(t *testing.T) {
	t.Parallel()
	n := newLAN(t)
	setSysctl(t, n.ns, "ipv4/tcp_fastopen", "519") // client, server, no cookie needed on either side
	setSysctl(t, n.client, "ipv4/tcp_fastopen", "519")
	addr := n.v4(8080)
	r := n.run("web", with(wideBudget, "--protocol", "http1"), goServer(t, addr, "-fast-open", "64", "-defer-accept", "30")...)
	const each = 20
	request := []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n")
	var fds []int
	defer func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
	}()
	sa := &unix.SockaddrInet4{Port: 8080, Addr: n.link.B.V4.As4()}
	socket := func() int {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
		if err != nil {
			t.Fatal(err)
		}
		fds = append(fds, fd)
		return fd
	}
	n.client.Do(t, func() {
		for range each { // data in the SYN
			if err := unix.Sendto(socket(), request, unix.MSG_FASTOPEN, sa); err != nil {
				t.Fatalf("send by fast open: %v", err)
			}
		}
		for i := range each { // every second one stays silent: no connection for the server yet
			fd := socket()
			if err := unix.Connect(fd, sa); err != nil {
				t.Fatal(err)
			}
			if i%2 == 0 {
				if _, err := unix.Write(fd, request); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
	setSysctl(t, n.ns, "ipv4/tcp_syncookies", "2")
	n.client.Do(t, func() {
		for range each {
			fd := socket()
			if err := unix.Connect(fd, sa); err != nil {
				t.Fatal(err)
			}
			if _, err := unix.Write(fd, request); err != nil {
				t.Fatal(err)
			}
		}
	})
	if netstat(t, n.ns, "TCPFastOpenPassive") == 0 {
		t.Error("no connection was opened by TCP Fast Open: the test shows nothing of it")
	}
	if netstat(t, n.ns, "SyncookiesRecv") == 0 {
		t.Error("no connection was made by a SYN cookie: the test shows nothing of it")
	}
	same := func(b api.Backend) bool {
		open := int64(len(walk(t, n.ns, probes.StatesConnected&^(1<<probes.StateFinWait2), 8080)))
		half := int64(len(walk(t, n.ns, 1<<probes.StateSynRecv, 8080)))
		return value(b.Counts.Open) == open && value(b.Counts.Handshake) == half && open >= 2*each
	}
	b := r.awaitCounts("the census equals the walk", same)
	t.Logf("with all open: %s", shown(b))
	for _, fd := range fds {
		unix.Close(fd)
	}
	fds = nil
	r.awaitCounts("all are gone", func(b api.Backend) bool {
		return value(b.Counts.Open) == 0 && value(b.Counts.Closing) == 0 && len(walk(t, n.ns, probes.StatesConnected, 8080)) == 0
	})
	r.signal(syscall.SIGTERM)
	if code := r.wait(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
}

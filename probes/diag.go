// SPDX-License-Identifier: Apache-2.0

package probes

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/netns"
)

// The states of a socket, as in include/net/tcp_states.h. A half-open request is listed as StateSynRecv.
const (
	StateEstablished = 1
	StateSynSent     = 2
	StateSynRecv     = 3
	StateFinWait1    = 4
	StateFinWait2    = 5
	StateTimeWait    = 6
	StateClose       = 7
	StateCloseWait   = 8
	StateLastAck     = 9
	StateListen      = 10
	StateClosing     = 11
	stateNewSynRecv  = 12
)

// StatesConnected are those of a connection that an application has, or may yet get from its accept queue.
const StatesConnected uint32 = 1<<StateEstablished | 1<<StateFinWait1 | 1<<StateFinWait2 | 1<<StateCloseWait |
	1<<StateLastAck | 1<<StateClosing

// Protocols of a [Filter].
const (
	protoTCP   = 6
	protoUDP   = 17
	protoMPTCP = 262
)

// DiagOptions configures a [Diag].
type DiagOptions struct {
	NetNS    int // file descriptor of a network namespace; 0 or less: that of the calling thread. Not kept
	TagMapFD int // file descriptor of a BPF socket storage map whose values are wanted; 0: none. Must stay open
}

// Diag asks one network namespace about its sockets by sock_diag(7). It is safe for concurrent use; requests are
// answered one after the other. It keeps the namespace it was opened in, whatever thread calls it later.
//
// Dumps need no privilege, tags need CAP_BPF (before Linux 5.8 CAP_SYS_ADMIN), and Destroy needs CAP_NET_ADMIN in the
// namespace.
type Diag struct {
	turn  chan struct{} // holds one token: whoever has it may use what follows
	fd    int           // -1 once closed
	seq   uint32
	tagFD int
	buf   []byte // from buffers, during a turn
}

// buffers are for one turn each: many namespaces are open at once, and few are asked.
var buffers = sync.Pool{New: func() any { return new([recvBuffer]byte) }}

// Socket is one socket of a dump.
type Socket struct {
	Family        uint8 // AF_INET or AF_INET6. A dual-stack listener's IPv4 connections are AF_INET6
	State         uint8
	Local, Remote netip.AddrPort // IPv4-mapped addresses are unmapped
	Cookie        uint64         // the same for the life of the socket: SO_COOKIE
	Inode         uint32         // 0: no process has it. Of an established one: it is in the accept queue
	UID           uint32
	RQueue        uint32 // bytes not read; of a listener: length of the accept queue
	WQueue        uint32 // bytes not acknowledged; of a listener: its backlog
	Interface     uint32 // the one it is bound to, or 0
	V6Only        bool
	Shutdown      uint8  // bit 0: reading is shut down, bit 1: writing
	CgroupID      uint64 // 0 unless asked for and told (5.9)
	Mark          uint32 // told to CAP_NET_ADMIN only
	MPTCP         bool   // a subflow of MPTCP. Told with Info only, and to CAP_NET_ADMIN only
	Info          *TCPInfo
	Tag           []byte // value of the tag map, if it has one
}

// Filter selects sockets.
type Filter struct {
	States     uint32   // bit per state, 1<<StateListen and so on; 0: all but CLOSE
	Family     uint8    // AF_INET or AF_INET6; 0: both, which costs a walk each
	LocalPorts []uint16 // the kernel compares; empty: all ports
	Info       bool     // fill Socket.Info, Shutdown and MPTCP
	Cgroup     bool     // fill Socket.CgroupID
	Tags       bool     // fill Socket.Tag
	Protocol   int      // 6 TCP (0 means this), 17 UDP, 262 MPTCP
}

const (
	// dumpAttempts bounds the repetitions of a dump that the kernel says was interrupted by a change.
	dumpAttempts = 8
	// destroyBatch is how many connections go into one message. Measured for 10,000: 256 per message 70 ms, one per
	// message 105 ms.
	destroyBatch = 256
	// recvBuffer is above the 32 KiB that the kernel fills at most in one go.
	recvBuffer = 64 << 10
	// socketBuffer holds the acknowledgements of a full batch, which take about 768 bytes each.
	socketBuffer = 4 << 20
	// answerTimeout only guards against a kernel that does not answer at all: a dump is made within the call itself.
	answerTimeout = 10 * time.Second
)

// OpenDiag opens a sock_diag socket in a network namespace. Entering one that is not the caller's needs CAP_SYS_ADMIN.
func OpenDiag(o DiagOptions) (*Diag, error) {
	fd, err := openIn(o.NetNS)
	if err != nil {
		return nil, fmt.Errorf("open sock_diag: %w", err)
	}
	d := &Diag{turn: make(chan struct{}, 1), fd: fd, tagFD: o.TagMapFD}
	d.turn <- struct{}{}
	if err := d.configure(); err != nil {
		return nil, errors.Join(fmt.Errorf("configure sock_diag: %w", err), d.Close())
	}
	return d, nil
}

func (d *Diag) configure() error {
	tv := unix.NsecToTimeval(answerTimeout.Nanoseconds())
	if err := unix.SetsockoptTimeval(d.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		return err
	}
	if unix.SetsockoptInt(d.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, socketBuffer) != nil {
		if err := unix.SetsockoptInt(d.fd, unix.SOL_SOCKET, unix.SO_RCVBUF, socketBuffer); err != nil {
			return err
		}
	}
	// An acknowledgement needs not repeat the request.
	return unix.SetsockoptInt(d.fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1)
}

func diagSocket() (int, error) {
	return unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
}

// openIn makes a socket in a namespace.
func openIn(ns int) (fd int, err error) {
	if ns <= 0 {
		return diagSocket()
	}
	err = netns.Do(ns, func() error {
		var err error
		fd, err = diagSocket()
		return err
	})
	return fd, err
}

// Close lets go of the namespace. It waits for a running request and may be called again.
func (d *Diag) Close() error {
	<-d.turn
	defer func() { d.turn <- struct{}{} }()
	if d.fd < 0 {
		return nil
	}
	err := unix.Close(d.fd)
	d.fd = -1
	if err != nil {
		return fmt.Errorf("close sock_diag: %w", err)
	}
	return nil
}

// take waits for the caller's turn.
func (d *Diag) take(ctx context.Context) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	select {
	case <-d.turn:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if d.fd < 0 {
		d.turn <- struct{}{}
		return fmt.Errorf("sock_diag: %w", unix.EBADF)
	}
	d.buf = buffers.Get().(*[recvBuffer]byte)[:]
	return nil
}

// give ends the caller's turn.
func (d *Diag) give() {
	buffers.Put((*[recvBuffer]byte)(d.buf))
	d.buf = nil
	d.turn <- struct{}{}
}

// Dump lists the sockets that the filter selects, each once. It is not a snapshot: the kernel walks its tables while
// sockets come and go, the listeners before the connections, IPv4 before IPv6. What existed, in a selected state,
// during the whole call is in it, except that an entry of a hash chain can be passed over when one before it in the same
// chain goes away between two parts of the answer. Whoever waits for none must see none more than once.
//
// It wraps [ErrNoDiag] if the kernel cannot answer and [ErrTorn] if it never could without an interruption.
func (d *Diag) Dump(ctx context.Context, f Filter) ([]Socket, error) {
	if err := d.take(ctx); err != nil {
		return nil, err
	}
	defer d.give()
	var all []Socket
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		if f.Family != 0 && f.Family != family {
			continue
		}
		part, err := d.dumpFamily(ctx, family, f)
		if err != nil {
			return nil, fmt.Errorf("list sockets: %w", err)
		}
		all = append(all, part...)
	}
	return all, nil
}

func (d *Diag) dumpFamily(ctx context.Context, family uint8, f Filter) ([]Socket, error) {
	for range dumpAttempts {
		socks, torn, err := d.dumpOnce(ctx, family, f)
		if err != nil {
			return nil, err
		}
		if !torn {
			return socks, nil
		}
	}
	return nil, ErrTorn
}

func (d *Diag) dumpOnce(ctx context.Context, family uint8, f Filter) (socks []Socket, torn bool, err error) {
	d.seq++
	if err := d.send(dumpRequest(d.seq, family, f, d.tagFD)); err != nil {
		return nil, false, err
	}
	seen := map[uint64]bool{}
	// Whatever goes wrong, read to the end: what is left unread would be taken for the answer to the next request.
	for {
		n, err := d.recv()
		if err != nil {
			return nil, false, err
		}
		done := false
		parseErr := eachMessage(d.buf[:n], func(m message) error {
			if m.seq != d.seq {
				return nil // left over from a request that was given up
			}
			torn = torn || m.flags&unix.NLM_F_DUMP_INTR != 0
			switch m.typ {
			case unix.NLMSG_DONE, unix.NLMSG_ERROR:
				done = true
				if e := m.errno(); e != 0 {
					return diagError(e)
				}
			case sockDiagByFamily:
				s, err := parseSocket(m.payload, f)
				if err != nil {
					return err
				}
				// The kernel resumes a table where it stopped, by number: what has moved may come twice.
				if again := seen[s.Cookie] && s.Cookie != 0; !again && s.matches(f) {
					seen[s.Cookie] = true
					socks = append(socks, s)
				}
			}
			return nil
		})
		if parseErr != nil {
			err = parseErr
		} else if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		if err != nil && !done {
			d.discard()
		}
		if err != nil || done {
			return socks, torn, err
		}
	}
}

// discard reads the rest of an answer that is not wanted. A dump ends in any case, with an error if need be.
func (d *Diag) discard() {
	for {
		n, err := d.recv()
		if err != nil {
			return
		}
		done := false
		if err := eachMessage(d.buf[:n], func(m message) error {
			done = done || m.seq == d.seq && (m.typ == unix.NLMSG_DONE || m.typ == unix.NLMSG_ERROR)
			return nil
		}); err != nil || done {
			return
		}
	}
}

// diagError turns the kernel's number into what a person can act on.
func diagError(e unix.Errno) error {
	if e == unix.ENOENT {
		return fmt.Errorf("%w: %w", ErrNoDiag, e)
	}
	return e
}

func (d *Diag) send(b []byte) error {
	for {
		err := unix.Sendto(d.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
		if err != unix.EINTR {
			return err
		}
	}
}

func (d *Diag) recv() (int, error) {
	for {
		n, from, err := unix.Recvfrom(d.fd, d.buf, unix.MSG_TRUNC)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.EAGAIN:
			return 0, fmt.Errorf("no answer from the kernel within %s: %w", answerTimeout, unix.ETIMEDOUT)
		case err != nil:
			return 0, err
		case n > len(d.buf):
			return 0, fmt.Errorf("answer of %d bytes: %w", n, unix.EMSGSIZE)
		}
		if nl, ok := from.(*unix.SockaddrNetlink); !ok || nl.Pid != 0 {
			continue // not from the kernel
		}
		return n, nil
	}
}

// Destroy ends connections at once: the local application's calls fail with ECONNABORTED and the peer gets a RST. It
// returns how many the kernel ended; one that has gone in the meantime is neither counted nor an error. A socket is
// found by addresses and cookie, so a later connection with the same addresses is not touched.
//
// Subflows of MPTCP are left alone: without its subflow an MPTCP connection hangs at both ends instead of failing. List
// with Info, which tells them. Listeners are left alone too. It wraps [ErrCannotForce] if the kernel lacks the ability, and stops early, between
// two batches, when ctx ends.
func (d *Diag) Destroy(ctx context.Context, socks []Socket) (n int, err error) {
	if err := d.take(ctx); err != nil {
		return 0, err
	}
	defer d.give()
	var batch []Socket
	flush := func() error {
		if len(batch) == 0 {
			return nil
		}
		k, err := d.destroyBatch(batch)
		n += k
		batch = batch[:0]
		return err
	}
	for _, s := range socks {
		if s.MPTCP || s.State == StateListen {
			continue
		}
		if batch = append(batch, s); len(batch) < destroyBatch {
			continue
		}
		if err := flush(); err != nil {
			return n, fmt.Errorf("destroy connections: %w", err)
		}
		if ctx.Err() != nil {
			return n, context.Cause(ctx)
		}
	}
	if err := flush(); err != nil {
		return n, fmt.Errorf("destroy connections: %w", err)
	}
	return n, nil
}

func (d *Diag) destroyBatch(batch []Socket) (n int, err error) {
	first := d.seq + 1
	var b []byte
	for _, s := range batch {
		d.seq++
		b = append(b, destroyRequest(d.seq, s)...)
	}
	if err := d.send(b); err != nil {
		return 0, err
	}
	for left := len(batch); left > 0; {
		k, rerr := d.recv()
		if rerr != nil {
			return n, rerr
		}
		if perr := eachMessage(d.buf[:k], func(m message) error {
			if m.typ != unix.NLMSG_ERROR || m.seq-first >= uint32(len(batch)) {
				return nil
			}
			left--
			switch e := m.errno(); e {
			case 0:
				n++
			case unix.ENOENT, unix.ENOTCONN: // gone, or replaced by another with the same addresses
			case unix.EOPNOTSUPP:
				err = fmt.Errorf("%w: %w", ErrCannotForce, e)
			default:
				err = e
			}
			return nil
		}); perr != nil {
			return n, perr
		}
	}
	return n, err
}

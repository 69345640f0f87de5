// SPDX-License-Identifier: Apache-2.0

package probes

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Listener is one listening socket that a process holds.
type Listener struct {
	PID, FD  int
	Inode    uint64
	Cookie   uint64         // of an MPTCP listener: that of the TCP socket beneath it, which BPF programs see
	Local    netip.AddrPort // [::] without V6Only takes IPv4 connections too
	V6Only   bool
	Protocol string // "tcp" or "mptcp"
	Queue    uint32 // connections in the accept queue
	Backlog  uint32 // how many it can hold
}

// descriptor is where a process holds a socket.
type descriptor struct{ pid, fd int }

// sockets maps the inode of each wanted socket that the processes hold to the descriptor of the lowest pid, and there the
// lowest number. Processes that have exited hold none. A nil wanted is every socket. An application may hold a hundred thousand
// connections besides the few sockets that are wanted, so the descriptors are read no further than to the last of those.
func sockets(pids []int, wanted map[uint64]bool) (map[uint64]descriptor, error) {
	held := map[uint64]descriptor{}
	pids = slices.Clone(pids)
	slices.Sort(pids)
	for _, pid := range pids {
		if wanted != nil && len(held) == len(wanted) {
			break
		}
		if err := socketsOf(pid, wanted, held); err != nil {
			return nil, fmt.Errorf("list descriptors of process %d: %w", pid, err)
		}
	}
	return held, nil
}

// socketsOf adds those of one process to held.
func socketsOf(pid int, wanted map[uint64]bool, held map[uint64]descriptor) error {
	dir, err := os.Open(fmt.Sprintf("/proc/%d/fd", pid))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	defer dir.Close()
	fds, err := numbers(dir)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, os.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	var link [64]byte
	for _, fd := range fds {
		n, err := unix.Readlinkat(int(dir.Fd()), strconv.Itoa(fd), link[:])
		if err != nil {
			continue // closed meanwhile
		}
		inode, ok := parseSocketLink(string(link[:n]))
		if !ok || wanted != nil && !wanted[inode] {
			continue
		}
		if _, have := held[inode]; have {
			continue
		}
		if held[inode] = (descriptor{pid, fd}); wanted != nil && len(held) == len(wanted) {
			return nil
		}
	}
	return nil
}

// parseSocketLink reads "socket:[12345]".
func parseSocketLink(s string) (uint64, bool) {
	s, ok := strings.CutPrefix(s, "socket:[")
	if !ok {
		return 0, false
	}
	if s, ok = strings.CutSuffix(s, "]"); !ok {
		return 0, false
	}
	n, err := strconv.ParseUint(s, 10, 64)
	return n, err == nil && n != 0
}

// Listeners lists every listening TCP and MPTCP socket of d's network namespace that one of the processes holds open,
// each once: the lowest pid that has it is named. Listeners that a process holds in another namespace are not seen.
// Reading another user's descriptors needs CAP_SYS_PTRACE.
//
// An MPTCP listener shows in the kernel's tables as the TCP socket beneath it, with the inode of the MPTCP one. That it
// is MPTCP is known from the module mptcp_diag, and failing that from the socket itself.
func Listeners(d *Diag, pids []int) ([]Listener, error) {
	ctx := context.Background() // a walk over listeners is short
	socks, err := d.Dump(ctx, Filter{States: 1 << StateListen})
	if err != nil {
		return nil, err
	}
	wanted := make(map[uint64]bool, len(socks))
	for _, s := range socks {
		wanted[uint64(s.Inode)] = true
	}
	held, err := sockets(pids, wanted)
	if err != nil {
		return nil, err
	}
	var ls []Listener
	for _, s := range socks {
		at, ok := held[uint64(s.Inode)]
		if !ok {
			continue
		}
		l := Listener{
			PID: at.pid, FD: at.fd, Inode: uint64(s.Inode), Cookie: s.Cookie, Local: s.Local, V6Only: s.V6Only,
			Protocol: "tcp", Queue: s.RQueue, Backlog: s.WQueue,
		}
		ls = append(ls, l)
	}
	if err := nameMPTCP(ctx, d, ls); err != nil {
		return nil, err
	}
	slices.SortFunc(ls, func(a, b Listener) int {
		if a.PID != b.PID {
			return a.PID - b.PID
		}
		return a.FD - b.FD
	})
	return ls, nil
}

// nameMPTCP finds out which listeners are MPTCP.
func nameMPTCP(ctx context.Context, d *Diag, ls []Listener) error {
	if len(ls) == 0 {
		return nil
	}
	socks, err := d.Dump(ctx, Filter{States: 1 << StateListen, Protocol: protoMPTCP})
	if err != nil && !errors.Is(err, ErrNoDiag) && !errors.Is(err, unix.EINVAL) {
		return err
	}
	mptcp := map[uint64]bool{}
	for _, s := range socks {
		mptcp[uint64(s.Inode)] = true
	}
	for i := range ls {
		l := &ls[i]
		if mptcp[l.Inode] || (err != nil && isMPTCP(l.PID, l.FD, l.Inode)) {
			l.Protocol = "mptcp"
		}
	}
	return nil
}

// isMPTCP asks the socket itself. What may not be asked counts as plain TCP.
func isMPTCP(pid, fd int, inode uint64) bool {
	dup, err := dupOf(pid, fd, inode)
	if err != nil {
		return false
	}
	defer unix.Close(dup)
	proto, err := unix.GetsockoptInt(dup, unix.SOL_SOCKET, unix.SO_PROTOCOL)
	return err == nil && proto == protoMPTCP
}

// Locate fills in PID and FD of samples that were observed without them, by the inode. What none of the processes
// holds keeps FD -1. It reads the descriptors of the processes, so call it only when something is to be done.
func Locate(pids []int, samples []Sample) error {
	wanted := make(map[uint64]bool, len(samples))
	for _, s := range samples {
		if s.FD < 0 {
			wanted[s.Inode] = true
		}
	}
	held, err := sockets(pids, wanted)
	if err != nil {
		return err
	}
	for i := range samples {
		s := &samples[i]
		if at, ok := held[s.Inode]; ok && s.FD < 0 {
			s.PID, s.FD = at.pid, at.fd
		}
	}
	return nil
}

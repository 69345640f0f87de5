// SPDX-License-Identifier: Apache-2.0

package probes

import (
	"bufio"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Uncovered is something an application serves that a drain does not see.
type Uncovered struct {
	What string // "udp 0.0.0.0:53", "unix /run/x.sock", "unix @abstract"
	PID  int
	Why  string
}

const (
	whyUDP  = "UDP has no connections to count; tell the application at notify"
	whyUnix = "connections over a Unix socket are not counted or turned away"
)

// NotCovered lists the UDP sockets that anyone may send to, and the listening Unix sockets, that the processes hold:
// what a drain of their TCP listeners does not cover. UDP sockets are those of d's network namespace; with a nil d, or
// without the module udp_diag, those of each process's own.
func NotCovered(d *Diag, pids []int) ([]Uncovered, error) {
	held, err := sockets(pids, nil)
	if err != nil || len(held) == 0 {
		return nil, err
	}
	udp, err := udpSockets(d, pids)
	if err != nil {
		return nil, err
	}
	var us []Uncovered
	for _, s := range udp {
		if at, ok := held[s.inode]; ok {
			us = append(us, Uncovered{What: "udp " + s.name, PID: at.pid, Why: whyUDP})
		}
	}
	unixes, err := fromProc(pids, []string{"unix"}, parseProcUnix)
	if err != nil {
		return nil, err
	}
	for _, s := range unixes {
		if at, ok := held[s.inode]; ok {
			us = append(us, Uncovered{What: "unix " + s.name, PID: at.pid, Why: whyUnix})
		}
	}
	slices.SortFunc(us, func(a, b Uncovered) int {
		if a.PID != b.PID {
			return a.PID - b.PID
		}
		return strings.Compare(a.What, b.What)
	})
	return us, nil
}

// named is a socket that is known by an address.
type named struct {
	inode uint64
	name  string
}

func udpSockets(d *Diag, pids []int) ([]named, error) {
	if d != nil {
		// An unconnected UDP socket is in state CLOSE; a connected one hears its peer only.
		socks, err := d.Dump(context.Background(), Filter{States: 1 << StateClose, Protocol: protoUDP})
		if err == nil {
			var list []named
			for _, s := range socks {
				if s.Local.Port() != 0 {
					list = append(list, named{uint64(s.Inode), s.Local.String()})
				}
			}
			return list, nil
		}
		if !errors.Is(err, ErrNoDiag) {
			return nil, err
		}
	}
	return fromProc(pids, []string{"udp", "udp6"}, parseProcUDP)
}

// fromProc reads tables of /proc/PID/net, once for each network namespace among the processes.
func fromProc(pids []int, tables []string, parse func(io.Reader) ([]named, error)) ([]named, error) {
	var list []named
	seen := map[string]bool{}
	for _, pid := range pids {
		ns, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", pid))
		if err != nil || seen[ns] {
			continue // exited, or done
		}
		seen[ns] = true
		for _, table := range tables {
			f, err := os.Open(fmt.Sprintf("/proc/%d/net/%s", pid, table))
			if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) {
				continue // exited, or this kernel has no such family
			}
			if err != nil {
				return nil, fmt.Errorf("read %s sockets: %w", table, err)
			}
			part, err := parse(f)
			f.Close()
			if err != nil {
				return nil, fmt.Errorf("read %s sockets: %w", table, err)
			}
			list = append(list, part...)
		}
	}
	return list, nil
}

// lines calls fn with the fields of each line but the first, which names the columns.
func lines(r io.Reader, fn func(line string) error) error {
	sc := bufio.NewScanner(r)
	sc.Scan()
	for sc.Scan() {
		if err := fn(sc.Text()); err != nil {
			return err
		}
	}
	return sc.Err()
}

// parseProcUDP reads /proc/net/udp and udp6 and returns the unconnected sockets that have a port.
//
//	sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode …
//	 7: 0100007F:0035 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 12345 …
func parseProcUDP(r io.Reader) ([]named, error) {
	var list []named
	err := lines(r, func(line string) error {
		f := strings.Fields(line)
		if len(f) < 10 {
			return fmt.Errorf("line of %d fields", len(f))
		}
		if f[3] != "07" {
			return nil
		}
		local, err := parseProcAddr(f[1])
		if err != nil {
			return err
		}
		inode, err := strconv.ParseUint(f[9], 10, 64)
		if err != nil {
			return fmt.Errorf("inode: %w", err)
		}
		if local.Port() != 0 && inode != 0 {
			list = append(list, named{inode, local.String()})
		}
		return nil
	})
	return list, err
}

// parseProcAddr reads an address of /proc/net: words of 32 bits, each in the machine's byte order, and a port.
func parseProcAddr(s string) (netip.AddrPort, error) {
	addr, port, ok := strings.Cut(s, ":")
	b, err := hex.DecodeString(addr)
	if !ok || err != nil || (len(b) != 4 && len(b) != 16) {
		return netip.AddrPort{}, fmt.Errorf("address %q", s)
	}
	p, err := strconv.ParseUint(port, 16, 16)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("address %q: %w", s, err)
	}
	if nativeLittle {
		for w := b; len(w) > 0; w = w[4:] {
			slices.Reverse(w[:4])
		}
	}
	a, _ := netip.AddrFromSlice(b)
	return netip.AddrPortFrom(a.Unmap(), uint16(p)), nil
}

// acceptConn is the flag of /proc/net/unix for a socket that listens: __SO_ACCEPTCON of include/linux/net.h.
const acceptConn = 1 << 16

// parseProcUnix reads /proc/net/unix and returns the listening sockets. The path is the last column, is missing if the
// socket has no name, may hold blanks, and starts with @ if it is abstract.
//
//	Num       RefCount Protocol Flags    Type St Inode Path
//	ffff…: 00000002 00000000 00010000 0001 01 12345 /run/x.sock
func parseProcUnix(r io.Reader) ([]named, error) {
	var list []named
	err := lines(r, func(line string) error {
		var f [7]string
		rest := line
		for i := range f {
			rest = strings.TrimLeft(rest, " ")
			f[i], rest, _ = strings.Cut(rest, " ")
		}
		if f[6] == "" {
			// A name may hold a newline: this is the rest of the one before.
			return nil
		}
		flags, err := strconv.ParseUint(f[3], 16, 32)
		if err != nil || flags&acceptConn == 0 {
			return nil
		}
		inode, err := strconv.ParseUint(f[6], 10, 64)
		if err != nil || inode == 0 {
			return nil
		}
		if rest == "" {
			rest = "(unnamed)"
		}
		list = append(list, named{inode, rest})
		return nil
	})
	return list, err
}

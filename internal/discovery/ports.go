// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/netns"
	"github.com/ebbproxy/ebb/probes"
)

// netnsDir is where ip-netns(8) keeps namespaces by name.
const netnsDir = "/run/netns"

// hostNetNS is the namespace of the first process. In a container with processes of its own that is the container's.
const hostNetNS = "/proc/1/ns/net"

// openNetNS opens what Match.NetNS names, by default the host's. The caller closes it.
func openNetNS(name string) (*os.File, uint64, error) {
	at := name
	switch {
	case name == "":
		at = hostNetNS
	case !strings.Contains(name, "/"):
		at = filepath.Join(netnsDir, name)
	}
	f, err := os.Open(at)
	if name == "" && errors.Is(err, os.ErrPermission) {
		f, err = netns.Current()
	}
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return nil, 0, fmt.Errorf("there is no network namespace %s: %w", at, ErrNone)
	}
	if err != nil {
		return nil, 0, fmt.Errorf("open network namespace: %w", err)
	}
	// ip-netns(8) makes the file before it mounts the namespace on it.
	if kind, err := unix.IoctlRetInt(int(f.Fd()), unix.NS_GET_NSTYPE); err != nil || kind != unix.CLONE_NEWNET {
		return nil, 0, errors.Join(fmt.Errorf("%s is not a network namespace: %w", at, ErrNone), f.Close())
	}
	id, err := netns.ID(int(f.Fd()))
	if err != nil {
		return nil, 0, errors.Join(err, f.Close())
	}
	return f, id.Ino, nil
}

// listeners are the listening TCP sockets of a network namespace and the processes in it that hold them.
type listeners struct {
	byPort  map[uint16][]uint64   // inode numbers
	holders map[uint64][]*process // by inode number
	hidden  int                   // processes that may be in it, or are, and whose descriptors may not be read
}

// listenersOf reads them once for each namespace. An MPTCP listener is listed by the kernel with its own inode.
func (s *Snapshot) listenersOf(ctx context.Context, ns *os.File, ino uint64) (*listeners, error) {
	if l := s.sockets[ino]; l != nil {
		return l, nil
	}
	socks, err := listening(ctx, ns)
	if err != nil {
		return nil, err
	}
	l := &listeners{byPort: map[uint16][]uint64{}, holders: map[uint64][]*process{}, hidden: s.hidden + s.homeless}
	for _, sock := range socks {
		if sock.Inode != 0 {
			l.byPort[sock.Local.Port()] = append(l.byPort[sock.Local.Port()], uint64(sock.Inode))
			l.holders[uint64(sock.Inode)] = nil
		}
	}
	if len(l.holders) > 0 {
		for _, p := range s.procs {
			if ctx.Err() != nil {
				return nil, context.Cause(ctx)
			}
			if p.netns == ino {
				l.read(p)
			}
		}
	}
	s.sockets[ino] = l
	return l, nil
}

// listening dumps the listening sockets of a network namespace, of these ports if any are given.
func listening(ctx context.Context, ns *os.File, ports ...uint16) ([]probes.Socket, error) {
	var d *probes.Diag
	if err := netns.Do(int(ns.Fd()), func() (err error) {
		d, err = probes.OpenDiag(probes.DiagOptions{})
		return err
	}); err != nil {
		return nil, err
	}
	socks, err := d.Dump(ctx, probes.Filter{States: 1 << probes.StateListen, LocalPorts: ports})
	return socks, errors.Join(err, d.Close())
}

// unheld tells whether a listener on a port is still there that no process holds: none in its namespace, this one not, nor one
// in another namespace, such as a relay or a service manager.
func (s *Snapshot) unheld(ctx context.Context, ns *os.File, l *listeners, port uint16) (bool, error) {
	rest := &listeners{holders: map[uint64][]*process{}}
	for _, ino := range l.byPort[port] {
		if len(l.holders[ino]) == 0 {
			rest.holders[ino] = nil
		}
	}
	if len(rest.holders) == 0 {
		return false, nil
	}
	rest.read(&process{pid: os.Getpid()})
	for _, p := range s.procs {
		if ctx.Err() != nil {
			return false, context.Cause(ctx)
		}
		rest.read(p)
	}
	socks, err := listening(ctx, ns, port)
	for _, sock := range socks {
		if by, asked := rest.holders[uint64(sock.Inode)]; asked && len(by) == 0 {
			return true, err
		}
	}
	return false, err
}

// read notes which of the sockets the process holds. One that ends meanwhile holds none.
func (l *listeners) read(p *process) {
	dir := "/proc/" + strconv.Itoa(p.pid) + "/fd"
	fds, err := probes.Numbers(dir)
	if errors.Is(err, os.ErrPermission) {
		l.hide(p)
	}
	var b [64]byte
	held := map[uint64]bool{}
	for _, fd := range fds {
		n, err := unix.Readlink(dir+"/"+strconv.Itoa(fd), b[:])
		if errors.Is(err, os.ErrPermission) { // who may list them may not always read them
			l.hide(p)
			return
		}
		if err != nil {
			continue // closed meanwhile
		}
		num, ok := strings.CutPrefix(string(b[:n]), "socket:[")
		if !ok {
			continue
		}
		ino, err := strconv.ParseUint(strings.TrimSuffix(num, "]"), 10, 64)
		if _, listens := l.holders[ino]; err == nil && listens && !held[ino] {
			held[ino] = true
			l.holders[ino] = append(l.holders[ino], p)
		}
	}
}

// hide counts a process whose descriptors may not be read, which is also said of one that has ended.
func (l *listeners) hide(p *process) {
	if probes.Alive(p.pid, p.start) {
		l.hidden++
	}
}

// on lists who holds a listener on a port, each process once.
func (l *listeners) on(port uint16) []*process {
	var ps []*process
	seen := map[int]bool{}
	for _, ino := range l.byPort[port] {
		for _, p := range l.holders[ino] {
			if !seen[p.pid] {
				seen[p.pid] = true
				ps = append(ps, p)
			}
		}
	}
	return ps
}

// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/user"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// peer is the process at the other end of a Unix socket when it connected (unix(7), SO_PEERCRED).
type peer struct {
	uid, pid int
	groups   []int    // its effective group and its supplementary ones
	pidfd    *os.File // nil if the kernel gives none; closed with the connection
}

// unknownPeer is that of any other connection.
var unknownPeer = &peer{uid: -1}

// String names the user for a human: "alice (uid 1000)".
func (p *peer) String() string {
	if p.uid < 0 {
		return "unknown"
	}
	uid := strconv.Itoa(p.uid)
	if u, err := user.LookupId(uid); err == nil {
		return fmt.Sprintf("%s (uid %s)", u.Username, uid)
	}
	return "uid " + uid
}

// alive says whether the process that connected still has its pid: nobody else can have been given it. A
// connection outlives the process that made it when a child has inherited it.
func (p *peer) alive() bool {
	if p.pidfd == nil {
		return false
	}
	err := unix.PidfdSendSignal(int(p.pidfd.Fd()), 0, nil, 0)
	return err == nil || errors.Is(err, unix.EPERM)
}

type peerKey struct{}

// withPeer is the http.Server's ConnContext.
func (e *entrance) withPeer(ctx context.Context, c net.Conn) context.Context {
	l, ok := c.(*limitedConn)
	if !ok {
		return ctx // over TLS
	}
	p := readPeer(l.Conn)
	l.pidfd = p.pidfd
	if e.owner != nil {
		owner := e.owner(ctx, p)
		if !e.conns.take(owner, connsOf(owner)) {
			// The server will find it closed.
			_ = l.Close()
			return ctx
		}
		release := l.release
		l.release = sync.OnceFunc(func() {
			e.conns.give(owner)
			release()
		})
	}
	return context.WithValue(ctx, peerKey{}, p)
}

// connsOf is the limit of one application's connections, by how many all have. Processes of no backend share a few.
func connsOf(owner string) func(sum int) int {
	return func(sum int) int {
		if owner == "" || sum >= maxAppConns/2 {
			return fewConnsPerApp
		}
		return maxConnsPerApp
	}
}

func peerOf(ctx context.Context) *peer {
	if p, ok := ctx.Value(peerKey{}).(*peer); ok {
		return p
	}
	return unknownPeer
}

func readPeer(c net.Conn) *peer {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return unknownPeer
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return unknownPeer
	}
	p := unknownPeer
	err = raw.Control(func(fd uintptr) {
		cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
		if err != nil {
			return
		}
		p = &peer{uid: int(cred.Uid), pid: int(cred.Pid), groups: append(peerGroups(int(fd)), int(cred.Gid))}
		// SO_PEERPIDFD (Linux 6.5) is the process that connected; without it, the one that has its pid right after.
		n, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PEERPIDFD)
		if errors.Is(err, unix.ENOPROTOOPT) && p.pid > 0 {
			n, err = unix.PidfdOpen(p.pid, 0)
		}
		if err == nil {
			p.pidfd = os.NewFile(uintptr(n), "pidfd")
		}
	})
	if err != nil {
		return unknownPeer
	}
	return p
}

// peerGroups are the supplementary groups of the process that connected (SO_PEERGROUPS, Linux 4.13): what it has, not what
// the group file says of its user.
func peerGroups(fd int) []int {
	gids := make([]uint32, 64)
	for {
		size := uint32(4 * len(gids))
		_, _, errno := syscall.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_PEERGROUPS,
			uintptr(unsafe.Pointer(&gids[0])), uintptr(unsafe.Pointer(&size)), 0)
		n := int(size / 4)
		switch {
		case errno == unix.ERANGE && n > len(gids):
			gids = make([]uint32, n) // size says how many there are
			continue
		case errno != 0:
			return nil
		}
		out := make([]int, n)
		for i, g := range gids[:n] {
			out[i] = int(g)
		}
		return out
	}
}

func (p *peer) in(gid int) bool { return slices.Contains(p.groups, gid) }

// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"fmt"
	"net"
	"os/user"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// peer is the process at the other end of a Unix socket when it connected (unix(7), SO_PEERCRED).
type peer struct {
	uid, pid int
}

// unknownPeer is that of any other connection.
var unknownPeer = peer{uid: -1}

// String names the user for a human: "alice (uid 1000)".
func (p peer) String() string {
	if p.uid < 0 {
		return "unknown"
	}
	uid := strconv.Itoa(p.uid)
	if u, err := user.LookupId(uid); err == nil {
		return fmt.Sprintf("%s (uid %s)", u.Username, uid)
	}
	return "uid " + uid
}

type peerKey struct{}

// withPeer is the http.Server's ConnContext.
func withPeer(ctx context.Context, c net.Conn) context.Context {
	if l, ok := c.(*limitedConn); ok {
		c = l.Conn
	}
	return context.WithValue(ctx, peerKey{}, readPeer(c))
}

func peerOf(ctx context.Context) peer {
	if p, ok := ctx.Value(peerKey{}).(peer); ok {
		return p
	}
	return unknownPeer
}

func readPeer(c net.Conn) peer {
	if c.LocalAddr().Network() != "unix" {
		return unknownPeer
	}
	sc, ok := c.(syscall.Conn)
	if !ok {
		return unknownPeer
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return unknownPeer
	}
	var (
		cred    *unix.Ucred
		credErr error
	)
	err = raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err != nil || credErr != nil {
		return unknownPeer
	}
	return peer{uid: int(cred.Uid), pid: int(cred.Pid)}
}

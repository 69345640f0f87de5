// SPDX-License-Identifier: Apache-2.0

package client

import (
	"errors"
	"syscall"
)

// From linux/socket.h; package syscall has it on some architectures only.
const (
	soProtocol  = 38
	tcpProtocol = syscall.IPPROTO_TCP
)

// protocol is the protocol that a socket was made for: TCP or MPTCP.
func protocol(raw syscall.RawConn) (int, error) {
	var proto int
	var err error
	cerr := raw.Control(func(fd uintptr) { proto, err = syscall.GetsockoptInt(int(fd), syscall.SOL_SOCKET, soProtocol) })
	return proto, errors.Join(err, cerr)
}

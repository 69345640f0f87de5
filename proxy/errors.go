// SPDX-License-Identifier: Apache-2.0

package proxy

import "errors"

var (
	// ErrOptions means that options contradict each other or cannot work; the error says which and why.
	ErrOptions = errors.New("invalid relay options")

	// ErrClosed means that the relay is closed, or accepts no more.
	ErrClosed = errors.New("relay is closed")

	// ErrNotListener means that a descriptor is not a listening TCP socket. MPTCP listeners are among these: make the
	// listener with MPTCP off (net.ListenConfig.SetMultipathTCP(false)), since it has to take part in socket maps.
	ErrNotListener = errors.New("not a plain TCP listener")

	// ErrLoop means that a peer is the relay's own listener, so that it would accept its own dials.
	ErrLoop = errors.New("peer is the relay's own listener")

	// ErrNoPeer means that no peer could be reached.
	ErrNoPeer = errors.New("no peer can be reached")

	// ErrFull means that as many connections are relayed as may be (Options.MaxConnections).
	ErrFull = errors.New("relay is full")

	// ErrHeader means that bytes are not a PROXY protocol version 2 header.
	ErrHeader = errors.New("not a PROXY protocol v2 header")
)

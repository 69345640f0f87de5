// SPDX-License-Identifier: Apache-2.0

// Package front keeps the parsing of HTTP, TLS and YAML out of a process that is root: a child of it without any
// privilege, the front, does that and asks for what it needs in small messages over one socket.
//
//	core (root)                                   front (nobody, no capability, system calls denied)
//	opens the sockets ── listeners, socket pair ──► accepts, parses, decides who may ask
//	owns the backends ◄── call, 64 KiB at most ───  asks
//	                  ── answer, event ───────────► writes HTTP
//
// It serves internal/api as it is and adds no rule to it. It is not a sandbox for what runs as root: whoever takes the
// front over can ask for all that the API offers, and for nothing else. If it ends it is started again; it ends with the core.
//
// The core:
//
//	err := front.Serve(ctx, front.Options{Source: src, Log: log, Entrances: es})
//	if errors.Is(err, front.ErrUnavailable) {
//		// serve in this process
//	}
//
// The front is the same binary with the argument Arg; see Main. A configuration is read by a front that lives for that
// alone; see Load.
package front

import "errors"

// Arg is the argument of this binary that makes it a front.
const Arg = "front"

// ErrUnavailable means that a process without privilege cannot be started here; the error says why.
var ErrUnavailable = errors.New("no process without privilege can be started")

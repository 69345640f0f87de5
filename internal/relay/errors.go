// SPDX-License-Identifier: Apache-2.0

package relay

import "errors"

var (
	// ErrNone means that no relay of that name is alive.
	ErrNone = errors.New("no relay is alive")

	// ErrInUse means that a relay of that name is alive already; see Find.
	ErrInUse = errors.New("a relay of that name is alive")

	// ErrEnded means that the relay has ended.
	ErrEnded = errors.New("the relay has ended")

	// ErrCommand means that the relay did not understand or could not do a command; the error says why.
	ErrCommand = errors.New("relay command")

	// ErrPrivilege means that a capability could not be given up, and that the process has therefore ended.
	ErrPrivilege = errors.New("give up privileges")
)

// SPDX-License-Identifier: Apache-2.0

package demo

import "errors"

var (
	// ErrOption is an option that makes no sense.
	ErrOption = errors.New("wrong option")

	// ErrPrivilege says that namespaces cannot be made, and what to do.
	ErrPrivilege = errors.New("the demo needs root to make namespaces of its own")

	// ErrInterrupted says that a signal ended the demo before its verdict.
	ErrInterrupted = errors.New("interrupted before the verdict; nothing is left behind")

	// errSaid is a failure that the inner process has already put into words.
	errSaid = errors.New("the demo could not be played to its end")
)

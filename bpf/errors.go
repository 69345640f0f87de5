// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"fmt"
)

var (
	// ErrNotInstalled means that the directory holds no installation.
	ErrNotInstalled = errors.New("ebb is not installed in the kernel")
	// ErrLayout means that what is pinned in the directory is damaged, or was made by a binary whose maps
	// cannot be told from this one's.
	ErrLayout = errors.New("what is pinned there is not this version's: finish its drains and run `ebb cleanup`, or use the version that made it")
	// ErrElsewhere means that a backend is still counted by an installation of another layout: its count is
	// unknown until TakeOver has moved it.
	ErrElsewhere = errors.New("is not wholly taken over from another version's installation yet")
	// ErrTaken means that another backend has the address, process or cgroup. The error is a
	// *TakenError, which names that backend.
	ErrTaken = errors.New("belongs to another backend")
	// ErrMPTCP means that an MPTCP listener cannot be steered to: no socket map takes it.
	ErrMPTCP = errors.New("is an MPTCP listener, which cannot be steered to")
	// ErrAdoptMPTCP means that MPTCP listeners that listened before the installation, and their
	// connections, are not counted: no kernel helper takes a subflow from a file. One that listens
	// later is counted like all others.
	ErrAdoptMPTCP = errors.New("speak MPTCP, which can be counted only from the start of listening on")
	// ErrForeignNamespace means that a socket is in another network namespace than the rule. The
	// kernel does not check that, and connections steered there disappear.
	ErrForeignNamespace = errors.New("is in another network namespace")
	// ErrNotSupported means that this kernel lacks the feature; Probe says which and what to do.
	ErrNotSupported = errors.New("this kernel does not support it")
	// ErrNoRule means that the address has no admission yet.
	ErrNoRule = errors.New("no admission for this address")
	// ErrInUse means that a listener still has connections or listens.
	ErrInUse = errors.New("is still in use")

	errNegative = errors.New("it would be below zero")
)

// TakenError says whose something is. It wraps ErrTaken.
type TakenError struct {
	What    string // an address, "process 12" or "cgroup 34"
	Backend uint64 // the one that has it
}

// Error names what is taken.
func (e *TakenError) Error() string { return fmt.Sprintf("%s %v (%d)", e.What, ErrTaken, e.Backend) }

// Unwrap returns ErrTaken.
func (e *TakenError) Unwrap() error { return ErrTaken }

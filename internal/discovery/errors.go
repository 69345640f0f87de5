// SPDX-License-Identifier: Apache-2.0

package discovery

import "errors"

var (
	// ErrNone means that nothing matches at the moment. The error that wraps it says why.
	ErrNone = errors.New("no such workload")

	// ErrUnknown means that nothing was found and that this says little: processes may not be looked at, or nobody is known to
	// hold a listener that is there.
	ErrUnknown = errors.New("it cannot be told")

	// ErrAmbiguous means that a match finds processes that have nothing to do with each other.
	ErrAmbiguous = errors.New("more than one workload matches")
)

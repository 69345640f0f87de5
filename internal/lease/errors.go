// SPDX-License-Identifier: Apache-2.0

package lease

import "errors"

var (
	// ErrHeld says that another process owns the lease. The error names it where it is known.
	ErrHeld = errors.New("lease is held")

	// ErrLost says that the lease protects nothing any more: its directory was deleted or replaced, and another process
	// may own the one that is there now; or it was released.
	ErrLost = errors.New("lease is lost")

	errRecord = errors.New("lease record cannot be read")
)

// SPDX-License-Identifier: Apache-2.0

package hook

import "errors"

var (
	// ErrInvalid says that a hook is set in a way that cannot work.
	ErrInvalid = errors.New("hook cannot work")

	// ErrAPI says that a hook is for the application's session to carry, not
	// for Deliver.
	ErrAPI = errors.New("hook is carried by the application's session")
)

// SPDX-License-Identifier: Apache-2.0

package systemd

import "errors"

var (
	// ErrName says that a name is not one of a service: it is malformed, of another type, or a template.
	ErrName = errors.New("not the name of a service")

	// ErrNotFound says that there is no such unit.
	ErrNotFound = errors.New("there is no such unit")

	// ErrUnit says that a unit is there and cannot be drained by a drop-in.
	ErrUnit = errors.New("the unit cannot be drained by a drop-in")

	// ErrChanged says that the drop-in is not as Ebb has written it.
	ErrChanged = errors.New("the drop-in was changed by hand")

	// ErrNotEnabled says that there is no drop-in of ours to remove.
	ErrNotEnabled = errors.New("draining is not enabled for the unit")
)

// SPDX-License-Identifier: Apache-2.0

package drain

import "errors"

var (
	// ErrStale is returned for a command that names another generation than the machine's. The
	// command is counted and changes nothing.
	ErrStale = errors.New("another generation is meant")

	// ErrFlushing is returned for a command that comes after the flush began: the application has
	// been told to end, which nothing takes back.
	ErrFlushing = errors.New("the flush has begun")

	// ErrNotDraining is returned for a command that needs a running drain when there is none.
	ErrNotDraining = errors.New("no drain is running")

	// ErrOff is returned by Begin when the mode is off.
	ErrOff = errors.New("the mode is off: nothing is drained")

	// ErrLimit is returned by Extend when the deadline is already at the limit or the extension is
	// not positive.
	ErrLimit = errors.New("the deadline cannot move")

	// ErrPolicy is wrapped by every refusal of Validate.
	ErrPolicy = errors.New("the policy contradicts itself")

	// ErrJournal is wrapped by a command that was refused because it could not be made durable.
	// Nothing was changed.
	ErrJournal = errors.New("the journal cannot be written")

	// ErrHeld is returned by World.Journal for the record of a flush on zero while the application holds something, which
	// SetHolds has perhaps not said yet. The record is not written, and the drain goes on waiting.
	ErrHeld = errors.New("the application holds the flush")

	// ErrRecord is wrapped by New when the record to resume from cannot be one of this generation.
	ErrRecord = errors.New("the record does not fit")

	// ErrUnguarded is returned by World.CloseAdmission when the datapath cannot close admission. The
	// drain goes on, and believes a zero only after a pause of arrivals.
	ErrUnguarded = errors.New("admission cannot be closed here")

	// ErrClosed is returned for a command after Run has ended.
	ErrClosed = errors.New("the machine has ended")

	// ErrRunning is returned by a second Run.
	ErrRunning = errors.New("the machine is running already")

	// ErrOver is the cause with which the contexts of World's calls end when their drain is over.
	ErrOver = errors.New("the drain is over")

	// ErrSlice is the cause with which the context of a call of World ends when its slice is over.
	ErrSlice = errors.New("the slice is over")

	// ErrEnded is wrapped by World.Flush where the application has ended all the same.
	ErrEnded = errors.New("the application has ended")

	// errDeferred puts a command aside until the flip has returned. No caller sees it.
	errDeferred = errors.New("deferred until the flip has returned")
)

// SPDX-License-Identifier: Apache-2.0

package agent

import "errors"

// ErrJournal means that a journal holds what this version cannot read or trust.
var ErrJournal = errors.New("journal is damaged")

// errNewer is the ErrJournal of a journal that a newer version has written.
var errNewer = errors.New("its layout is newer")

// ErrNameTaken means that another living owner has the name.
var ErrNameTaken = errors.New("name is taken")

// ErrNotFound means that CMD does not exist; its exit code is 127.
var ErrNotFound = errors.New("command not found")

// ErrNotExecutable means that CMD exists and cannot be executed; its exit code is 126.
var ErrNotExecutable = errors.New("command is not executable")

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/term"

	"github.com/ebbproxy/ebb/internal/api"
)

// environment is what the process gets from outside, so that a test can give it something else.
type environment struct {
	args           []string // without the program's name
	stdin          io.Reader
	stdout, stderr io.Writer
	getenv         func(string) string
	uid            int
}

// runDir is where this user's sockets are.
func (e *environment) runDir() string { return api.RunDir(e.getenv, e.uid) }

// terminal says whether w is a terminal, and how many columns it has (0 if it does not tell).
func (e *environment) terminal(w io.Writer) (columns int, ok bool) {
	f, isFile := w.(*os.File)
	if !isFile || !term.IsTerminal(int(f.Fd())) {
		return 0, false
	}
	columns, _, err := term.GetSize(int(f.Fd()))
	if err != nil {
		columns = 0
	}
	return columns, true
}

// colour says whether w takes colour: a terminal that is not dumb, unless NO_COLOR is set (no-color.org).
func (e *environment) colour(w io.Writer) bool {
	if e.getenv("NO_COLOR") != "" || e.getenv("TERM") == "dumb" {
		return false
	}
	_, ok := e.terminal(w)
	return ok
}

// The exit codes of the contract that are not an outcome's.
const (
	exitFailed    = 1
	exitUsage     = 2
	exitRunFailed = 125 // `ebb run`: an error or a usage error of our own
)

// exitError ends the process with a code. A nil err says nothing on stderr.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

// usageError is a command line that cannot be understood.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

func usagef(format string, args ...any) error { return &usageError{fmt.Errorf(format, args...)} }

// exitCode says err on stderr and returns the process's exit code. command is the subcommand's name.
func (e *environment) exitCode(command string, err error) int {
	if err == nil {
		return 0
	}
	var (
		exit  *exitError
		usage *usageError
		code  = exitFailed
	)
	switch {
	case errors.As(err, &exit):
		code = exit.code
		if exit.err == nil {
			return code
		}
	case command == "run":
		code = exitRunFailed
	case errors.As(err, &usage):
		code = exitUsage
	}
	fmt.Fprintf(e.stderr, "ebb: %v\n", err)
	if errors.As(err, &usage) {
		help := "ebb --help"
		if command != "" {
			help = "ebb " + command + " --help"
		}
		fmt.Fprintf(e.stderr, "ebb: see '%s'\n", help)
	}
	return code
}

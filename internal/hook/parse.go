// SPDX-License-Identifier: Apache-2.0

package hook

import (
	"fmt"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/drain"
)

// Forms are those that Parse reads, for help and errors.
const Forms = "signal:NAME, http://HOST:PORT/PATH, https://…, exec:CMD ARG… or api"

// Parse reads a hook as a command line gives it, in one of Forms. A command is split at spaces; quotes and backslashes, which
// would promise more, are refused. The hook is valid, and an error wraps ErrInvalid.
func Parse(s string) (Hook, error) {
	var h Hook
	kind, rest, _ := strings.Cut(s, ":")
	switch {
	case s == "api":
		h.API = true
	case kind == "signal":
		sig, err := ParseSignal(rest)
		if err != nil {
			return Hook{}, fmt.Errorf("%w: %w", ErrInvalid, err)
		}
		h.Signal = sig
	case kind == "http" || kind == "https":
		h.HTTP = s
	case kind == "exec":
		if strings.ContainsAny(rest, `'"\`) {
			return Hook{}, fmt.Errorf("%w: %s: no shell reads it, so quotes and backslashes would be arguments: name a script", ErrInvalid, s)
		}
		h.Exec = append([]string{}, strings.Fields(rest)...)
	default:
		return Hook{}, fmt.Errorf("%w: want %s", ErrInvalid, Forms)
	}
	if err := h.Validate(); err != nil {
		return Hook{}, err
	}
	return h, nil
}

// ParseNotify is Parse of a hook that may end in @begin or @settled, which say when it is told; empty if neither is given.
func ParseNotify(s string) (Hook, drain.NotifyAt, error) {
	var at drain.NotifyAt
	for _, m := range []drain.NotifyAt{drain.NotifyAtBegin, drain.NotifyAtSettled} {
		if rest, ok := strings.CutSuffix(s, "@"+string(m)); ok {
			s, at = rest, m
			break
		}
	}
	// A URL and a command may have an @ of their own.
	if before, moment, ok := strings.Cut(s, "@"); ok && (before == "api" || strings.HasPrefix(s, "signal:")) {
		return Hook{}, "", fmt.Errorf("%w: @%s: want @begin or @settled", ErrInvalid, moment)
	}
	h, err := Parse(s)
	return h, at, err
}

// ParseSignal reads a signal's name with or without SIG, in any case, or its number.
func ParseSignal(s string) (syscall.Signal, error) {
	if n, err := strconv.Atoi(s); err == nil && n > 0 && n <= lastSignal {
		return syscall.Signal(n), nil
	}
	if n := unix.SignalNum("SIG" + strings.TrimPrefix(strings.ToUpper(s), "SIG")); n != 0 {
		return n, nil
	}
	return 0, fmt.Errorf("unknown signal %q: want a name such as TERM or QUIT, or a number", s)
}

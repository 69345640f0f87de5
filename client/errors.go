// SPDX-License-Identifier: Apache-2.0

package client

import (
	"errors"
	"fmt"
	"slices"
)

var (
	// ErrFlushing: it is too late to begin work, since the flush has begun. Hold returns it, and the contexts of requests and
	// of [Session.Context] end with it as their cause.
	ErrFlushing = errors.New("the flush has begun")
	// ErrStopped: the session is over.
	ErrStopped = errors.New("the session is over")
	// ErrForced: a stop ended something that was still in flight at its deadline, or left behind what was still held.
	ErrForced = errors.New("ended by force at the deadline")
	// ErrNoAgent: what was asked for needs an agent, and none answers.
	ErrNoAgent = errors.New("no agent answers")
	// ErrNotPossible: the agent refuses, and says why: an extension that is not allowed, a second one.
	ErrNotPossible = errors.New("not possible")

	errUnknownSession = errors.New("unknown session")
	errStale          = errors.New("another drain is being flushed")
)

// Refusal is what the agent answers to a request that it does not fulfil. Where there is a sentinel for the Kind, errors.Is finds
// it: ErrFlushing, ErrNotPossible.
type Refusal struct {
	Kind   string // as docs/protocol.md lists them, such as "not-possible"; empty if the answer names none
	Status int    // of HTTP
	Detail string // for people
}

func (r *Refusal) Error() string { return fmt.Sprintf("the agent refuses: %s", r.Detail) }

// Is ties kinds to the sentinels of this package.
func (r *Refusal) Is(target error) bool {
	switch r.Kind {
	case "unknown-session":
		return target == errUnknownSession
	case "flush-has-begun":
		return target == ErrFlushing
	case "stale-generation":
		return target == errStale
	case "not-possible", "not-draining":
		return target == ErrNotPossible
	}
	return false
}

// final are the kinds of problem that only an agent that is alive and has decided answers. Everything else, 403, 429, 503 and what
// a newer agent says, may be different the next time, or come from a process in front of an agent that stands still.
var final = []string{
	"ambiguous-session", "bad-request", "flush-has-begun", "not-draining", "not-possible", "stale-generation", "unknown-backend",
	"unknown-drain", "unknown-session",
}

// answered says whether the agent has decided, given the error of a request.
func answered(err error) bool {
	var r *Refusal
	return err == nil || errors.As(err, &r) && slices.Contains(final, r.Kind)
}

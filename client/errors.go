// SPDX-License-Identifier: Apache-2.0

package client

import (
	"errors"
	"strings"
)

var (
	// ErrFlushing: it is too late to begin work, since the flush has begun. Hold returns it, and the contexts of requests and
	// of [Session.Context] end with it as their cause.
	ErrFlushing = errors.New("the flush has begun")
	// ErrStopped: the session is over.
	ErrStopped = errors.New("the session is over")
	// ErrForced: a stop ended something that was still in flight at its deadline.
	ErrForced = errors.New("ended by force at the deadline")
	// ErrNoAgent: what was asked for needs an agent, and none answers.
	ErrNoAgent = errors.New("no agent answers")
	// ErrNotPossible: the agent refuses, and says why: an extension that is not allowed, a second one.
	ErrNotPossible = errors.New("not possible")

	errUnknownSession = errors.New("unknown session")
	errStale          = errors.New("another drain is being flushed")
)

// problem is an RFC 9457 problem document, as the agent answers errors.
type problem struct {
	Type   string `json:"type"`
	Title  string `json:"title"`
	Detail string `json:"detail"`
	Status int    `json:"status"`
}

func (p *problem) Error() string {
	if p.Detail != "" {
		return p.Detail
	}
	return p.Title
}

// Is compares the last part of the type, which is a tag URI.
func (p *problem) Is(target error) bool {
	switch p.Type[strings.LastIndexByte(p.Type, ':')+1:] {
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

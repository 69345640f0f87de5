// SPDX-License-Identifier: Apache-2.0

package api

import (
	"errors"
	"slices"

	"github.com/ebbproxy/ebb/drain"
)

// Sentinels that a [Source] wraps and a [Client] returns. The text of the wrapping error is what the
// caller reads as the problem's detail, so it says what to do.
var (
	// ErrUnknown: no backend of that name. 404; the problem lists those that exist.
	ErrUnknown = errors.New("unknown backend")
	// ErrUnknownDrain: no drain of that id is running or remembered. 404.
	ErrUnknownDrain = errors.New("unknown drain")
	// ErrUnknownSession: no session of that id, or none of the calling process, is open. 404.
	ErrUnknownSession = errors.New("unknown session")
	// ErrAmbiguous: the calling process has registered several sessions and the request names none. 400.
	ErrAmbiguous = errors.New("several sessions")
	// ErrStale: the request names a generation that is over. Nothing was done. 409.
	ErrStale = errors.New("stale generation")
	// ErrNotDraining: undrain, extend or cut of a backend that is not draining. 409.
	ErrNotDraining = errors.New("backend is not draining")
	// ErrFlushing: undrain after the flush has begun. 409.
	ErrFlushing = errors.New("flush has begun")
	// ErrNotPossible: the request is well formed, but this backend, budget, kernel or version cannot do
	// it: a budget that does not fit, refuse without a datapath, an extension beyond the cap. 422.
	ErrNotPossible = errors.New("not possible")
	// ErrTooFast: the applications of one backend ask for more than their share. Nothing was done; try again. 429.
	ErrTooFast = errors.New("too many requests")
	// ErrNotReady: what Ready and BackendReady wrap while a backend drains. 503.
	ErrNotReady = errors.New("not ready")

	// ErrInUse: another process answers on the socket.
	ErrInUse = errors.New("socket is in use")
	// ErrNotAnswering: a socket file exists, but nobody accepts on it: its owner has died.
	ErrNotAnswering = errors.New("not answering")
	// ErrUnsafeDir: a directory for sockets that another user owns or can write to.
	ErrUnsafeDir = errors.New("unsafe directory")
	// ErrLogClosed: the event log's owner has stopped and everything retained has been read.
	ErrLogClosed = errors.New("event log closed")
)

// problemType is the namespace of the problem types: a tag URI (RFC 4151), which identifies and is not
// meant to be fetched (RFC 9457 section 3.1.1).
const problemType = "tag:github.com,2026:ebbproxy/ebb:"

// problemKinds ties what crosses the wire to its problem type and status. The first sentinel of a kind is
// the one that a client sees; a Source may as well return the state machine's own.
var problemKinds = []problemKind{
	{"unknown-backend", 404, []error{ErrUnknown}},
	{"unknown-drain", 404, []error{ErrUnknownDrain}},
	{"unknown-session", 404, []error{ErrUnknownSession}},
	{"ambiguous-session", 400, []error{ErrAmbiguous}},
	{"stale-generation", 409, []error{ErrStale, drain.ErrStale}},
	{"not-draining", 409, []error{ErrNotDraining, drain.ErrNotDraining}},
	{"flush-has-begun", 409, []error{ErrFlushing, drain.ErrFlushing}},
	{"not-possible", 422, []error{ErrNotPossible, drain.ErrPolicy, drain.ErrLimit, drain.ErrOff}},
	{"too-many-requests", 429, []error{ErrTooFast}},
	{"not-ready", 503, []error{ErrNotReady}},
}

type problemKind struct {
	name      string
	status    int
	sentinels []error
}

// matches says whether err is of this kind.
func (k problemKind) matches(err error) bool {
	return slices.ContainsFunc(k.sentinels, func(s error) bool { return errors.Is(err, s) })
}

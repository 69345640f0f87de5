// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"encoding/json"
	"time"

	"github.com/ebbproxy/ebb/drain"
)

// EventSession is the type of the event that is published whenever a session opens, ends, changes its health, is told or
// answers something. Fields: session, pid, what, seq (the number of its last event).
const EventSession = "session"

// SessionRole says what a session stands for.
type SessionRole string

// The roles.
const (
	RoleApp    SessionRole = "app"    // the application itself: its silence makes the backend suspect and then lost
	RoleHolder SessionRole = "holder" // something that only holds the flush, such as a job; its silence ends its holds
)

// Health says what is thought of a session, by how long it has been silent.
type Health string

// The healths.
const (
	HealthOK      Health = "ok"
	HealthSuspect Health = "suspect"
	HealthLost    Health = "lost"
)

// The types of session events.
const (
	SessionDraining  = "draining"
	SessionDeadline  = "deadline"
	SessionCancelled = "cancelled"
	SessionFlush     = "flush"
	SessionDone      = "done"
	SessionEnd       = "end"
)

// The reasons of SessionEnd.
const (
	EndEvicted    = "evicted"          // this generation is over: do not come back
	EndRestarting = "agent_restarting" // the session survives: come back at once
	EndTransient  = "transient"        // back off
)

// SessionRequest registers a process of a backend. It names nothing that could be forged: the backend is the one that the
// process belongs to.
type SessionRequest struct {
	Role    SessionRole `json:"role,omitempty"`    // default app
	Version int64       `json:"version,omitempty"` // of the application, above 0; 0: none
	// Bound: the session ends with the process that registers it. Otherwise with its silence, or when it says so.
	Bound     bool   `json:"bound,omitempty"`
	Remaining *int64 `json:"remaining,omitempty"` // work left, in units of the application's own
}

// Session is one registration, as it is.
type Session struct {
	ID      string      `json:"session"`
	Backend string      `json:"backend"`
	Service string      `json:"service"`
	Gen     uint64      `json:"gen"`
	Role    SessionRole `json:"role"`
	Version int64       `json:"version,omitempty"`
	PID     int         `json:"pid"` // that registered
	State   drain.State `json:"state"`
	Health  Health      `json:"health"`
	Seq     uint64      `json:"seq"`   // number of its last event
	Acked   uint64      `json:"acked"` // up to which they are acknowledged
	// Heartbeat is how often each side gives a sign of life. After Suspect and Lost of silence the other one thinks so.
	HeartbeatMS int64         `json:"heartbeat_ms"`
	SuspectMS   int64         `json:"suspect_ms"`
	LostMS      int64         `json:"lost_ms"`
	ExtensionMS int64         `json:"extension_ms"` // the most that it may extend a drain by, once; 0: not at all
	Holds       []Lease       `json:"holds"`
	Remaining   *int64        `json:"remaining"` // nil: never said
	Drain       *SessionDrain `json:"drain,omitempty"`
}

// SessionDrain is the running drain as an application sees it.
type SessionDrain struct {
	ID         string      `json:"drain"`
	Cause      drain.Cause `json:"cause"`
	Deadline   time.Time   `json:"deadline"`
	FlushBy    time.Time   `json:"flush_by"` // when the flush is sent at the latest
	TimeLeftMS int64       `json:"time_left_ms"`
	State      drain.State `json:"state"`
}

// Lease is something that an application is in the middle of and that a flush at zero waits for.
type Lease struct {
	ID    string    `json:"id"`
	Name  string    `json:"name"`
	Since time.Time `json:"since"`
}

// SessionEvent is one numbered message to an application.
type SessionEvent struct {
	Seq     uint64    `json:"seq,omitempty"` // 0: not numbered, and not sent again
	Type    string    `json:"type"`
	Backend string    `json:"backend"`
	Service string    `json:"service"`
	Gen     uint64    `json:"gen"`
	Drain   string    `json:"drain,omitempty"`
	Time    time.Time `json:"time"` // when it happened

	Cause      drain.Cause   `json:"cause,omitempty"`  // draining
	Reason     string        `json:"reason,omitempty"` // draining: why; flush: zero or deadline; end: see End*
	Deadline   time.Time     `json:"deadline,omitzero"`
	FlushBy    time.Time     `json:"flush_by,omitzero"`
	TimeLeftMS *int64        `json:"time_left_ms,omitempty"` // when it is sent: to the deadline, of a flush to the end of its slice
	Key        string        `json:"key,omitempty"`          // flush: the idempotency key, DRAIN-flush
	Outcome    drain.Outcome `json:"outcome,omitempty"`      // done
}

// SessionCall is what a session asks or says. Op is one of get, ack, heartbeat, hold, release, flushed, extend, end.
type SessionCall struct {
	Op        string `json:"op"`
	Seq       uint64 `json:"seq,omitempty"`
	Remaining *int64 `json:"remaining,omitempty"`
	ID        string `json:"id,omitempty"`   // of a lease
	Name      string `json:"name,omitempty"` // of a lease
	Drain     string `json:"drain,omitempty"`
	Error     string `json:"error,omitempty"` // of flushed
	ByMS      int64  `json:"by_ms,omitempty"` // of extend
}

// Process is who calls. The server holds a descriptor of it, so that its number is no other's.
type Process struct {
	PID int `json:"pid"`
	UID int `json:"uid"`
}

// SessionBatch is what a reader of a session's events is to be sent now.
type SessionBatch struct {
	Session Session        `json:"session"`
	Events  []SessionEvent `json:"events"`
	End     string         `json:"end,omitempty"` // a reason: this stream is over; empty: it goes on
}

// Sessions is what a [Source] with applications implements as well. Its methods are called from many goroutines at once.
type Sessions interface {
	// OpenSession registers a process of a backend.
	OpenSession(ctx context.Context, backend string, p Process, r SessionRequest) (Session, error)
	// SessionCall does what a session asks: ErrUnknownSession, ErrFlushing, ErrStale, ErrNotPossible. An empty id is the only
	// session that p has registered.
	SessionCall(ctx context.Context, backend, id string, p Process, c SessionCall) (Session, error)
	// SessionEvents are those from a number on (0: behind the last acknowledged one) and is a sign of nobody's life but ours. stream
	// numbers the reader: a higher one replaces it, and it reads the end.
	SessionEvents(ctx context.Context, backend, id string, p Process, from, stream uint64) (SessionBatch, error)
}

// SessionView is a session as an operator sees it.
type SessionView struct {
	ID        string      `json:"session"`
	Role      SessionRole `json:"role"`
	PID       int         `json:"pid"`
	Version   int64       `json:"version,omitempty"`
	Health    Health      `json:"health"`
	Since     time.Time   `json:"since"`
	Heard     time.Time   `json:"heard"` // its last sign of life
	Remaining *int64      `json:"remaining"`
	Holds     []Lease     `json:"holds"`
	Seq       uint64      `json:"seq"`
	Acked     uint64      `json:"acked"`
}

// HeldDuring is a lease that a drain has met.
type HeldDuring struct {
	Name     string   `json:"name"`
	PID      int      `json:"pid"`      // of the session's process
	For      Duration `json:"for"`      // from Begin, or from when it was taken, to its release or to now
	Released bool     `json:"released"` // false: held still, or to the end
}

// MarshalJSON writes every list as an array, never as null.
func (s Session) MarshalJSON() ([]byte, error) {
	type plain Session
	s.Holds = orEmpty(s.Holds)
	return json.Marshal(plain(s))
}

// MarshalJSON writes every list as an array, never as null.
func (v SessionView) MarshalJSON() ([]byte, error) {
	type plain SessionView
	v.Holds = orEmpty(v.Holds)
	return json.Marshal(plain(v))
}

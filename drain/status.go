// SPDX-License-Identifier: Apache-2.0

package drain

import "time"

// PhaseTime is when a phase was entered.
type PhaseTime struct {
	Phase Phase     `json:"phase"`
	At    time.Time `json:"at"`
}

// Block is one thing that keeps a flush on zero from being sent or, when the drain lingers, from being over.
type Block struct {
	Class string `json:"class"` // a class of connection, "hold", "unknown", "quiet"; of late ones "relayed", "parked"
	N     int64  `json:"n"`     // how many; 0 for unknown and quiet
}

// Admission says what the kernel does with new connections.
type Admission string

// The states of admission as a drain knows it.
const (
	AdmissionOpen      Admission = "open"
	AdmissionClosed    Admission = "closed"    // new connections are refused, or go elsewhere; see OnNew
	AdmissionUnguarded Admission = "unguarded" // it should be closed and cannot be
)

// Status is a snapshot of a machine: of its drain that runs or of the last one. It shares nothing with
// the machine, and its slices must not be written to.
type Status struct {
	Service string `json:"service,omitempty"`
	Backend string `json:"backend"`
	Gen     uint64 `json:"gen"`
	Mode    Mode   `json:"mode"`
	State   State  `json:"state"`

	ID     string    `json:"id,omitempty"` // empty if nothing was ever drained
	Cause  Cause     `json:"cause,omitempty"`
	By     string    `json:"by,omitempty"`
	Reason string    `json:"reason,omitempty"`
	Begun  time.Time `json:"begun,omitzero"`
	Ended  time.Time `json:"ended,omitzero"`

	// Deadline, FlushBy and CutAt are absolute; they carry a monotonic reading.
	Deadline time.Time `json:"deadline,omitzero"`
	FlushBy  time.Time `json:"flush_by,omitzero"` // when the flush is sent at the latest
	CutAt    time.Time `json:"cut_at,omitzero"`   // when on_deadline acts

	Phase   Phase       `json:"phase,omitempty"`
	Phases  []PhaseTime `json:"phases,omitempty"` // in the order in which they were entered
	Budget  Effective   `json:"budget,omitzero"`  // the slices as they are now; Budget.Scaled says why they differ
	Outcome Outcome     `json:"outcome,omitempty"`

	OnNew        OnNew     `json:"on_new,omitempty"` // what auto came to; auto while that is being found out
	OnNewWhy     string    `json:"on_new_why,omitempty"`
	Admission    Admission `json:"admission,omitempty"`
	Flipped      time.Time `json:"flipped,omitzero"` // when admission closed, or would have
	Unguarded    bool      `json:"unguarded,omitempty"`
	UnguardedWhy string    `json:"unguarded_why,omitempty"`

	Counts   Counts        `json:"counts"`
	CountsAt time.Time     `json:"counts_at,omitzero"` // zero: never looked
	LookTook time.Duration `json:"look_took_ns,omitempty"`
	InFlight *int64        `json:"in_flight"` // nil: unknown
	Blocks   []Block       `json:"blocks,omitempty"`
	Holds    int           `json:"holds,omitempty"`
	HeldBy   []string      `json:"held_by,omitempty"`
	Pending  Pending       `json:"pending"`        // what the last settle look found
	Late     uint64        `json:"late,omitempty"` // connections established after the flip, here

	LateCounts *LateCounts `json:"late_counts,omitempty"` // of redirected connections; nil: none is redirected
	LateEnded  int         `json:"late_ended,omitempty"`  // of them, how many were ended at the deadline
	Lingering  bool        `json:"lingering,omitempty"`   // the application is done, late connections are not

	Retired int `json:"retired,omitempty"`

	Notified    time.Time   `json:"notified,omitzero"` // when the application took the notice
	FlushReason FlushReason `json:"flush_reason,omitempty"`
	FlushResult FlushResult `json:"flush_result,omitempty"`
	Survivors   []Survivor  `json:"survivors,omitempty"` // listed before a flush at the deadline
	Cut         *CutReport  `json:"cut,omitempty"`       // nil: nothing was cut
	Killed      bool        `json:"killed,omitempty"`

	Warnings []string `json:"warnings,omitempty"`
	Would    []string `json:"would,omitempty"` // under observe: what enforcing would have done, in order
	Stale    uint64   `json:"stale,omitempty"` // commands for another generation so far
}

// FlushResult says what became of the flush.
type FlushResult string

// The results of a flush. It is empty while the application flushes.
const (
	FlushOK      FlushResult = "ok"      // the application has flushed, or ended
	FlushTimeout FlushResult = "timeout" // it had not when its slice was over
	FlushFailed  FlushResult = "failed"  // it could not be told
	FlushUnknown FlushResult = "unknown" // sent before a restart
	FlushWould   FlushResult = "observe" // not sent: observe touches nothing
)

// Over reports whether the drain that the status shows has ended.
func (s Status) Over() bool { return s.Outcome != "" }

// Left is the time to the deadline, 0 if it has passed or the drain is over.
func (s Status) Left() time.Duration {
	if s.ID == "" || s.Over() {
		return 0
	}
	return max(0, time.Until(s.Deadline))
}

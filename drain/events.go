// SPDX-License-Identifier: Apache-2.0

package drain

// The types of the events that a Machine emits. Each carries service, backend, gen, drain and cause;
// under ModeObserve each also carries the field would=true. Durations in fields are in seconds (float64, keys end in _s), counts are int64 by class.
const (
	// EventBegin: a drain began. Fields: by, reason, deadline (RFC 3339), on_new, on_new_why, budget,
	// resumed (true after a restart). What on_new comes to where it must be found out, EventLate says.
	EventBegin = "drain.begin"

	// EventPhase: the drain entered the phase in Event.Phase. Fields: left_s (time to the deadline).
	EventPhase = "drain.phase"

	// EventProgress: every 5 s until the drain is over. Fields: known, in_flight, counts (by class),
	// blocks, holds, retired, left_s.
	EventProgress = "drain.progress"

	// EventShortened: the deadline moved earlier. Fields: by, from, deadline (both RFC 3339), budget.
	EventShortened = "drain.shortened"

	// EventExtended: the deadline moved later. Fields as EventShortened.
	EventExtended = "drain.extended"

	// EventSurvivors: what was open when the wait slice ran out, before the flush. Fields: survivors
	// ([]Survivor), n, err (why they could not be listed).
	EventSurvivors = "drain.survivors"

	// EventFlush: the flush is sent, or (field result) came back. Fields: reason, left_s, result, err.
	EventFlush = "drain.flush"

	// EventCut: connections are being ended, or (field report) were. Fields: method, spread_s,
	// within_s, report (CutReport).
	EventCut = "drain.cut"

	// EventLate: what happens to late connections was decided (field why), fell back to something else
	// (err), was counted anew (with the progress, when it has changed) or is over. Fields: action (an
	// OnNew), why, err, known, arrived, carried, parked, ended (how many were ended at the deadline).
	EventLate = "drain.late"

	// EventEnd: the drain is over; Event.Outcome says how. Fields: flush_reason, took_s, retired, late,
	// survivors (their number), report; if late connections were redirected late_arrived, late_ended.
	EventEnd = "drain.end"

	// EventStale: a command for another generation was ignored. Fields: command, gen (the one meant),
	// stale (how many so far).
	EventStale = "drain.stale"

	// EventWould: under ModeObserve, what enforcing would have done at this moment, in the message.
	EventWould = "drain.would"

	// EventWarning: something is not as it should be and the drain goes on. Fields: err.
	EventWarning = "drain.warning"
)

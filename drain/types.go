// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"context"
	"time"
)

// Cause says which entrance began a drain. The first cause stays.
type Cause string

// The causes of the contract.
const (
	CauseSignal         Cause = "signal"
	CauseApp            Cause = "app"
	CauseOperator       Cause = "operator"
	CausePodDeleted     Cause = "pod-deleted"
	CausePrestop        Cause = "prestop"
	CauseVersionUpgrade Cause = "version-upgrade"
	CauseHeartbeat      Cause = "heartbeat"
)

// State is what a backend is doing.
type State string

// The states of a backend. A backend moves serving → draining → flushing → done;
// an undrain moves it from draining back to serving.
const (
	StateServing  State = "serving"
	StateDraining State = "draining"
	StateFlushing State = "flushing"
	StateDone     State = "done"
	StateSuspect  State = "suspect"
	StateLost     State = "lost"
)

// Outcome is how a drain ended. It is empty while the drain runs.
type Outcome string

// The outcomes of a drain. Exactly one is reached.
const (
	OutcomeDrained   Outcome = "drained"   // the count was zero before the flush and nothing was cut
	OutcomeExpired   Outcome = "expired"   // the wait slice ran out, or connections were cut
	OutcomeLost      Outcome = "lost"      // the application died with connections in flight
	OutcomeCancelled Outcome = "cancelled" // taken back by undrain
)

// Phase is a step of a drain. Each is entered at most once and has a timestamp.
type Phase string

// The phases in the order in which a drain passes through them.
const (
	PhaseBegin   Phase = "begin"
	PhaseStopNew Phase = "stop_new"
	PhaseSettle  Phase = "settle"
	PhaseWait    Phase = "wait"
	PhaseFlush   Phase = "flush"
	PhaseCut     Phase = "cut"
	PhaseDone    Phase = "done"
)

// OnNew says what happens to a connection that arrives while its backend drains.
type OnNew string

// The values of on_new.
const (
	OnNewAuto   OnNew = "auto"
	OnNewSteer  OnNew = "steer"
	OnNewRelay  OnNew = "relay"
	OnNewHold   OnNew = "hold"
	OnNewAdmit  OnNew = "admit"
	OnNewRefuse OnNew = "refuse"
)

// OnDeadline says what happens to connections that are left at deadline − reserve.
type OnDeadline string

// The values of on_deadline.
const (
	OnDeadlineCut   OnDeadline = "cut"
	OnDeadlineReset OnDeadline = "reset"
	OnDeadlineLeave OnDeadline = "leave"
)

// IdlePolicy says what an idle connection means to a drain.
type IdlePolicy string

// The values of idle.
const (
	IdleIgnore IdlePolicy = "ignore" // does not block the drain
	IdleWait   IdlePolicy = "wait"   // blocks until the peer closes it
	IdleClose  IdlePolicy = "close"  // is retired; does not block
)

// Protocol says how busy and idle are told apart.
type Protocol string

// The values of protocol.
const (
	ProtocolOpaque Protocol = "opaque"
	ProtocolHTTP1  Protocol = "http1"
)

// Mode says how much Ebb may do.
type Mode string

// The values of mode.
const (
	ModeOff     Mode = "off"
	ModeObserve Mode = "observe"
	ModeEnforce Mode = "enforce"
)

// NotifyAt says when the application hears that it is draining.
type NotifyAt string

// The values of notify's at.
const (
	NotifyAtBegin   NotifyAt = "begin"
	NotifyAtSettled NotifyAt = "settled"
)

// FlushReason says why the flush was sent.
type FlushReason string

// The reasons of a flush.
const (
	FlushZero     FlushReason = "zero"
	FlushDeadline FlushReason = "deadline"
)

// Counts is one look at a backend's connections. The classes are mutually exclusive.
// A Counts with Known false carries no information: its numbers must not be read.
type Counts struct {
	Known     bool  // false: unknown, which never reads as zero
	Handshake int64 // half-open
	Queued    int64 // established, not yet accepted
	Active    int64
	Idle      int64
	Unused    int64  // never carried a byte
	Stalled   int64  // the peer takes nothing
	Closing   int64  // our FIN is out and everything is acknowledged
	Accepted  uint64 // connections ever established, to tell whether new ones still arrive
}

// InFlight is what a drain waits for: handshake + queued + active + stalled, plus idle and unused
// under IdleWait. It is meaningless when Known is false.
func (c Counts) InFlight(idle IdlePolicy) int64 {
	n := c.Handshake + c.Queued + c.Active + c.Stalled
	if idle == IdleWait {
		n += c.Idle + c.Unused
	}
	return n
}

// Pending is what the flip left behind and settle waits for.
type Pending struct {
	Queued   int // connections in the accept queues of the backend's listeners
	HalfOpen int // half-open requests of the snapshot taken at the flip that still exist
}

// Survivor is a connection that was open when the wait slice ran out.
type Survivor struct {
	Peer    string        `json:"peer"`
	Local   string        `json:"local"`
	Class   string        `json:"class"`
	Age     time.Duration `json:"age_ns"`  // since it was established; 0 if unknown
	Idle    time.Duration `json:"idle_ns"` // since the last byte either way
	Unacked uint64        `json:"unacked_bytes"`
	In      uint64        `json:"received_bytes"`
	Out     uint64        `json:"sent_bytes"`
}

// Notice is what the application is told at notify.
type Notice struct {
	Drain    string
	Gen      uint64
	Cause    Cause
	Deadline time.Time
}

// FlushRequest is what the application is told at flush. Drain is the idempotency key.
type FlushRequest struct {
	Drain    string
	Gen      uint64
	Cause    Cause
	Reason   FlushReason
	TimeLeft time.Duration // until the flush slice is over
}

// CutRequest asks for what is left to be ended.
type CutRequest struct {
	Drain  string
	Method OnDeadline    // cut or reset
	Spread time.Duration // the cuts are spread over this window
	Within time.Duration // everything must be over within this
}

// CutReport says what a cut did.
type CutReport struct {
	Graceful  int // ended by SHUT_RD and the application's own close
	Destroyed int // ended by SOCK_DESTROY
	Left      int // could not be ended, MPTCP pairs among them
	InFlight  int // of those ended, how many had a request in flight: their result is unknown
	Note      string
}

// World is all that a drain does to the outside. A Machine calls it; nothing else in this package
// does I/O. Journal, SetReady, OpenAdmission and Emit are called one at a time by the goroutine that
// owns the machine, and it answers nobody meanwhile. Of the others one call each may run beside the
// rest, in a goroutine of the machine; a context ends when its slice does, with ErrSlice or ErrOver as
// its cause, and the call must return soon after.
type World interface {
	// Journal makes the record durable before it returns. Of a flush on zero it decides, too, whether anything is held: it
	// returns ErrHeld, or from then on the application gets no hold.
	Journal(Record) error
	// SetReady answers readiness probes from now on.
	SetReady(ready bool)
	// Notify tells the application that it is draining.
	Notify(context.Context, Notice) error
	// CloseAdmission is the flip: when it returns no new connection is admitted. The rule ends by
	// itself at until. ErrUnguarded means that this datapath cannot close admission.
	CloseAdmission(ctx context.Context, until time.Time) error
	// OpenAdmission undoes CloseAdmission.
	OpenAdmission(context.Context) error
	// Settled reports what is left of the flip; the first call after CloseAdmission takes the snapshot.
	Settled(context.Context) (Pending, error)
	// Look counts by class. Its cost is bounded by the caller's polling: max(100 ms, 10 × its duration).
	Look(context.Context) (Counts, error)
	// Retire asks the application's side of idle connections to close, and returns how many.
	Retire(context.Context) (int, error)
	// Survivors lists what is open.
	Survivors(context.Context) ([]Survivor, error)
	// Flush delivers the flush once and blocks until the application has flushed or ctx is over. An error may wrap ErrEnded.
	Flush(context.Context, FlushRequest) error
	// Cut ends what is left and returns inside Within.
	Cut(context.Context, CutRequest) (CutReport, error)
	// Kill is the last resort: the application is ended.
	Kill(context.Context) error
	// Emit publishes an event. It must not block.
	Emit(Event)
}

// LateCounts is what has become of the connections that came after a redirection. One with Known false
// carries no information: its numbers must not be read, and never count as none.
type LateCounts struct {
	Arrived uint64 `json:"arrived"` // since the redirection; never falls while it lasts
	Carried int    `json:"carried"` // being relayed now; what was steered is not carried by us
	Parked  int    `json:"parked"`  // held now, for a successor
	Known   bool   `json:"known"`
}

// none reports whether nothing is known to be carried or parked.
func (c LateCounts) none() bool { return c.Known && c.Carried+c.Parked == 0 }

// LateWorld is a World that has something better for late connections than to admit or to refuse them.
// Its methods run beside the machine like those of World; Redirect and CloseAdmission never run at the
// same time.
type LateWorld interface {
	World
	// ChooseLate decides what happens to late connections. want is the policy's on_new: auto, steer,
	// relay or hold; got is steer, relay, hold, admit or refuse, and why says in words what decided. It
	// may test-dial while ctx lasts (1 s), and leaves nothing behind: it is called under ModeObserve as
	// well. After a restart it is asked again, and answers with what is in force already. An error
	// means admit.
	ChooseLate(ctx context.Context, want OnNew) (got OnNew, why string, err error)
	// Redirect is the flip for steer, relay and hold: when it returns a new connection goes elsewhere.
	// The rule ends by itself at until. Again with another until, it moves only that. After an error
	// nothing is redirected. OpenAdmission and CloseAdmission end it for new connections; what is
	// carried goes on.
	Redirect(ctx context.Context, how OnNew, until time.Time) error
	// Late is what has come since, and what is still carried or parked.
	Late(context.Context) (LateCounts, error)
	// EndLate ends what is still carried or parked: the deadline has come.
	EndLate(context.Context) error
}

// Event is one numbered thing that happened to a backend.
type Event struct {
	Seq     uint64         `json:"seq"` // given by the publisher
	Time    time.Time      `json:"time"`
	Type    string         `json:"type"` // see the Event* constants
	Service string         `json:"service,omitempty"`
	Backend string         `json:"backend,omitempty"`
	Gen     uint64         `json:"gen,omitempty"`
	Drain   string         `json:"drain,omitempty"`
	Cause   Cause          `json:"cause,omitempty"`
	Phase   Phase          `json:"phase,omitempty"`
	Outcome Outcome        `json:"outcome,omitempty"`
	Message string         `json:"message,omitempty"`
	Fields  map[string]any `json:"fields,omitempty"` // details whose keys are documented with the type
}

// Record is one line of the journal.
type Record struct {
	Version  int       `json:"version"` // of this layout: 1
	Type     string    `json:"type"`    // begin, shorten, extend, flush, undrain, end
	Drain    string    `json:"drain"`
	Backend  string    `json:"backend"`
	Gen      uint64    `json:"gen"`
	Cause    Cause     `json:"cause"`
	By       string    `json:"by,omitempty"`
	Reason   string    `json:"reason,omitempty"`
	Begun    time.Time `json:"begun"`
	Deadline time.Time `json:"deadline"`
	// BegunBoot and DeadlineBoot are the same moments on the boot clock in ns, which no step of the
	// wall clock moves and which a restarted process can compare with its own.
	BegunBoot    int64       `json:"begun_boot_ns"`
	DeadlineBoot int64       `json:"deadline_boot_ns"`
	FlushBoot    int64       `json:"flush_boot_ns,omitempty"` // when the flush is due at the latest
	CutBoot      int64       `json:"cut_boot_ns,omitempty"`   // when on_deadline acts
	Policy       Policy      `json:"policy"`
	Reached      Phase       `json:"reached,omitempty"`
	FlushReason  FlushReason `json:"flush_reason,omitempty"`
	Outcome      Outcome     `json:"outcome,omitempty"`
}

// SPDX-License-Identifier: Apache-2.0

package session

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
)

// What a book takes at most. An application in good order is far from any of them.
const (
	maxSessions = 64   // of a backend
	maxHolds    = 256  // of a backend
	maxEvents   = 64   // of a session, not acknowledged
	maxName     = 128  // bytes of a lease's id or name
	maxError    = 1024 // bytes that are kept of what a failed flush says
	maxMet      = 256  // leases of a drain's report
	maxNames    = 32   // that Holds returns, for a log
)

// How often an application has us write the file. A registration, a hold and an extension are written before they are answered,
// and so are, at most twice for each, what answers a flush or gives them back: 150 times a second at most.
const (
	burstWrites = maxSessions + maxHolds // all that comes back at once when the file was lost
	everyWrite  = 20 * time.Millisecond  // from then on
	lazily      = 250 * time.Millisecond // between two writes for what nobody waits for, such as acknowledgements
)

// How many of its events an application has us publish, in a log of 1,024 that is all backends'. What a stream waits for is
// always among them.
const (
	burstEvents = 64
	everyEvent  = 5 * time.Second
)

// Options are what New needs to know.
type Options struct {
	Backend string
	Service string
	Gen     uint64

	// Heartbeat is how often each side gives a sign of life. After Suspect of silence a session is suspect, after Lost it is
	// lost. Defaults 3 s, 10 s and 15 s.
	Heartbeat, Suspect, Lost time.Duration
	// Extension is the most that an application may extend a drain by, once. 0: not at all.
	Extension time.Duration

	File string       // where the book is kept, in a directory of the owner's alone; empty: nowhere
	Log  *slog.Logger // nil discards

	// Started is the start time of a process in clock ticks since boot. It tells a process from the next owner of its pid;
	// nil: nothing does.
	Started func(pid int) (uint64, error)

	// Hears says whether signs of life can reach this process now, which is not so where another one takes them and does not
	// answer: silence is not counted meanwhile. It must neither block nor use the book. Nil: always.
	Hears func() bool

	// Emit, Changed and Stale must not block. They are called one at a time, and before the call that made them necessary
	// returns, but never by New; they may read the book and must not change it.

	Emit    func(drain.Event) // an event; nil discards
	Changed func()            // holds, health, version or number of applications may have changed
	Stale   func()            // a late answer was ignored: count it
	// Extend asks for a later deadline, and returns the drain as it is then. It is called without a lock.
	Extend func(ctx context.Context, by time.Duration) (drain.Status, error)

	boot  string                                                   // the boot id; empty: the kernel's
	watch func(ctx context.Context, pid int, is func() bool) error // nil: awaitEnd
}

// Book is the sessions of one backend generation. Its methods may be called from any goroutine. What a client was told,
// or is answered, is in the file before: a process that dies and comes back knows it.
//
//	           Open                silent for suspect          silent for lost
//	┌──────┐         ┌────┐                    ┌─────────┐                     ┌──────┐
//	│ none ├────────►│ ok ├───────────────────►│ suspect ├────────────────────►│ lost │
//	└──────┘         └────┘                    └────┬────┘                     └──┬───┘
//	   ▲               ▲ ▲     a sign of life       │  a sign of life             │  a holder, or the
//	   │ end, its      │ └──────────────────────────┘                             │  drain is taken back
//	   │ process ended │                                                          │
//	   │ (bound), end  └──────────────────────────────────────────────────────────┤
//	   │ acknowledged                                                             │
//	   └──────────────────────────────────────────────────────────────────────────┘
//
// Holds of a lost session do not count. They do again when it gives a sign of life. An application is as silent as its process:
// of several sessions of one, those that are silent for lost while another is not end as a holder's do.
type Book struct {
	o   Options
	log *slog.Logger

	mu    sync.Mutex
	state // what is kept in the file

	level drain.Status // as Follow saw it last
	end   string       // why streams end; empty: they go on

	// up is the time for which somebody was there to hear signs of life, since New; at is when it was last advanced. Where
	// nobody looked for longer than two ticks this process was stopped, and that time is not counted.
	up time.Duration
	at time.Time

	made  time.Time
	alone time.Duration // on that clock: since when the machine knows of no drain

	dirty  bool      // the file is behind
	owed   bool      // it is, in what nobody waits for
	wrote  time.Time // when it was written
	failed bool      // the last attempt to write it failed
	writes api.Rate

	events api.Rate
	hidden int // events that were not published since one said how many

	out     []drain.Event
	changed bool
	stale   int
	moved   chan struct{} // closed at the next change

	telling sync.Mutex    // Emit, Changed and Stale are called with it
	wake    chan struct{} // for Run: there is something to watch
}

// Held is a lease and who holds it.
type Held struct {
	api.Lease
	Session string
	PID     int // of the process that registered
}

// New makes a book, with what its file says if that is of this generation and boot. A file that cannot be read is put
// aside, beside itself with the prefix .bad., and until Lost has passed the book holds the flush, since what was held is
// not known. What Holds says now must be known to the machine before it runs. The error is one of the options.
func New(o Options) (*Book, error) {
	o.Heartbeat = cmp.Or(o.Heartbeat, 3*time.Second)
	o.Suspect = cmp.Or(o.Suspect, 10*time.Second)
	o.Lost = cmp.Or(o.Lost, 15*time.Second)
	if o.Heartbeat <= 0 || o.Suspect <= o.Heartbeat || o.Lost <= o.Suspect || o.Extension < 0 {
		return nil, fmt.Errorf("open sessions of %q: heartbeat %v, suspect %v, lost %v and extension %v do not fit: they must grow",
			o.Backend, o.Heartbeat, o.Suspect, o.Lost, o.Extension)
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.watch == nil {
		o.watch = awaitEnd
	}
	if o.boot == "" && o.File != "" {
		var err error
		if o.boot, err = bootID(); err != nil {
			return nil, fmt.Errorf("open sessions of %q: %w", o.Backend, err)
		}
	}
	b := &Book{
		o: o, log: o.Log.With("service", o.Service, "backend", o.Backend, "gen", o.Gen), at: time.Now(), made: time.Now(),
		moved: make(chan struct{}), wake: make(chan struct{}, 1),
		writes: api.Rate{Burst: burstWrites, Every: everyWrite}, events: api.Rate{Burst: burstEvents, Every: everyEvent},
	}
	b.level.State = drain.StateServing
	b.restore()
	return b, nil
}

// do runs f with the book locked, keeps what it changed and tells of it.
func (b *Book) do(f func() error) error {
	b.mu.Lock()
	now := time.Now()
	if b.o.Hears == nil || b.o.Hears() {
		b.up += min(now.Sub(b.at), 2*b.tick())
	}
	b.at = now
	err := f()
	if b.dirty || b.owed && now.Sub(b.wrote) >= lazily {
		_ = b.save() // it is tried again
	}
	if b.changed || len(b.out) > 0 {
		close(b.moved)
		b.moved = make(chan struct{})
	}
	b.mu.Unlock()
	b.tell()
	return err
}

// tell calls back what has come together. Whoever returns from it knows that its own has been told, by itself or by
// another, in the order in which it happened.
func (b *Book) tell() {
	b.telling.Lock()
	defer b.telling.Unlock()
	b.mu.Lock()
	out, changed, stale := b.out, b.changed, b.stale
	b.out, b.changed, b.stale = nil, false, 0
	b.mu.Unlock()
	if b.o.Emit != nil {
		for _, e := range out {
			b.o.Emit(e)
		}
	}
	if changed && b.o.Changed != nil {
		b.o.Changed()
	}
	if b.o.Stale != nil {
		for range stale {
			b.o.Stale()
		}
	}
}

// mention is say for what nobody waits for: an application may not fill the log that all share.
func (b *Book) mention(s *session, what string) {
	if b.events.Take() {
		b.say(s, what)
	} else {
		b.hidden++
	}
}

// unhide says how many events were not published.
func (b *Book) unhide() {
	if b.hidden > 0 && b.events.Take() {
		b.out = append(b.out, drain.Event{
			Time: time.Now(), Type: api.EventSession, Service: b.o.Service, Backend: b.o.Backend, Gen: b.o.Gen,
			Message: fmt.Sprintf("sessions: %d more events", b.hidden), Fields: map[string]any{"what": "more", "n": b.hidden},
		})
		b.hidden = 0
	}
}

// say publishes what has happened to a session.
func (b *Book) say(s *session, what string) {
	e := drain.Event{
		Time: time.Now(), Type: api.EventSession, Service: b.o.Service, Backend: b.o.Backend, Gen: b.o.Gen,
		Message: fmt.Sprintf("session of process %d: %s", s.PID, what),
		Fields:  map[string]any{"session": s.ID, "pid": s.PID, "what": what, "seq": s.Seq},
	}
	if t := b.running(); t != nil {
		e.Drain, e.Cause = t.ID, t.Cause
	}
	b.out = append(b.out, e)
}

// warn says that something is not as it should be.
func (b *Book) warn(msg string, err error) {
	b.log.Warn(msg, "err", err)
	b.out = append(b.out, drain.Event{
		Time: time.Now(), Type: drain.EventWarning, Service: b.o.Service, Backend: b.o.Backend, Gen: b.o.Gen,
		Message: msg + ": " + err.Error(), Fields: map[string]any{"err": err.Error()},
	})
}

// Open registers a process. The caller vouches for it: it is of this backend, and its pid is its own while the call lasts.
// A session that opens in mid-drain has as its first events what the others were told of it. The error wraps
// [api.ErrNotPossible] for a request that is none or one session too many, or [api.ErrTooFast]; else the session could not be
// kept.
func (b *Book) Open(_ context.Context, p api.Process, r api.SessionRequest) (api.Session, error) {
	var v api.Session
	err := b.do(func() error {
		s := &session{
			ID: newID(), Role: cmp.Or(r.Role, api.RoleApp), Version: r.Version, PID: p.PID, Start: b.started(p.PID), Bound: r.Bound,
			Since: time.Now(), Remaining: r.Remaining, health: api.HealthOK, heard: b.up, heardAt: time.Now(), mute: true,
		}
		switch {
		case s.Role != api.RoleApp && s.Role != api.RoleHolder:
			return fmt.Errorf("%w: role %q: a session is %s or %s", api.ErrNotPossible, s.Role, api.RoleApp, api.RoleHolder)
		case s.Version < 0:
			return fmt.Errorf("%w: version %d: it is above 0, or left out", api.ErrNotPossible, s.Version)
		}
		var room *session
		if len(b.Sessions) >= maxSessions {
			// One that is lost makes room, the longest silent first.
			i := -1
			for j, x := range b.Sessions {
				if x.health == api.HealthLost && (i < 0 || x.heard < b.Sessions[i].heard) {
					i = j
				}
			}
			if i < 0 {
				return fmt.Errorf("%w: %d sessions of %q are open already, which is the most; end those that are not needed", api.ErrNotPossible, maxSessions, b.o.Backend)
			}
			room = b.Sessions[i]
		}
		if err := b.mayWrite(); err != nil {
			return err
		}
		if room != nil {
			b.drop(room, "makes room")
		}
		b.Sessions = append(b.Sessions, s)
		b.mention(s, "opened")
		switch t := b.running(); {
		case b.Over:
			b.queue(s, b.evicted())
		case t != nil:
			b.queue(s, t.draining())
			if t.Flush != nil {
				b.queue(s, t.flush())
			}
		}
		if err := b.save(); err != nil {
			b.drop(s, "cannot be kept")
			return fmt.Errorf("open session: %w", err)
		}
		b.changed = true
		b.log.Info("session opened", "session", s.ID, "pid", s.PID, "role", s.Role, "version", s.Version, "bound", s.Bound)
		b.rouse()
		v = b.view(s)
		return nil
	})
	return v, err
}

// Call does what a session asks, and is a sign of its life. The error wraps one of [api.ErrUnknownSession],
// [api.ErrAmbiguous], [api.ErrFlushing], [api.ErrStale], [api.ErrNotPossible] and [api.ErrTooFast]; any other says that a hold
// could not be kept, and it is none.
func (b *Book) Call(ctx context.Context, id string, p api.Process, c api.SessionCall) (api.Session, error) {
	var v api.Session
	var extend time.Duration
	err := b.do(func() error {
		s, err := b.find(id, p)
		if err != nil {
			return err
		}
		b.alive(s)
		switch c.Op {
		case "get":
		case "ack":
			b.ack(s, c.Seq)
		case "heartbeat":
			if c.Remaining != nil {
				s.Remaining = c.Remaining
			}
		case "hold":
			err = b.hold(s, c)
		case "release":
			b.release(s, cmp.Or(c.ID, c.Name))
		case "flushed":
			err = b.flushed(s, c)
		case "extend":
			extend, err = b.mayExtend(c)
		case "end":
			b.drop(s, "ended by itself")
		default:
			err = fmt.Errorf("%w: %q is nothing that a session does", api.ErrNotPossible, c.Op)
		}
		v = b.view(s)
		return err
	})
	if err != nil || extend == 0 {
		return v, err
	}
	return b.extend(ctx, v.ID, p, extend)
}

// Events are those of a session from a number on, 0 being the first that is not acknowledged. A stream with a higher
// number than the one before replaces it, and is as a request of the session a sign of its life; the same stream again
// is none. Stream 0 replaces nothing. The error wraps [api.ErrUnknownSession] or [api.ErrAmbiguous].
func (b *Book) Events(_ context.Context, id string, p api.Process, from, stream uint64) (api.SessionBatch, error) {
	var batch api.SessionBatch
	err := b.do(func() error {
		s, err := b.find(id, p)
		if err != nil {
			return err
		}
		if stream > s.stream {
			if s.stream != 0 {
				b.mention(s, "stream replaced")
			}
			s.stream = stream
			b.alive(s)
		}
		batch.Session, batch.Events, batch.End = b.view(s), []api.SessionEvent{}, b.end
		if stream != 0 && stream < s.stream {
			batch.End = api.EndTransient
			return nil
		}
		for _, e := range s.Events {
			if e.Seq >= from {
				batch.Events = append(batch.Events, b.sent(e))
			}
		}
		return nil
	})
	return batch, err
}

// Close ends every stream, for one of the reasons [api.EndEvicted], which the sessions are told like any event, since
// their generation is over, [api.EndRestarting] and [api.EndTransient].
func (b *Book) Close(reason string) {
	_ = b.do(func() error {
		b.dirty = b.dirty || b.owed
		if reason == api.EndEvicted {
			b.evict()
			return nil
		}
		b.end = reason
		for _, s := range b.Sessions {
			b.say(s, reason)
		}
		return nil
	})
}

// Holds is how many holds keep a flush on zero from being sent, and the names of the first 32 of them.
func (b *Book) Holds() (n int, names []string) {
	for _, h := range b.Leases() {
		n++
		if len(names) < maxNames {
			names = append(names, h.Name)
		}
	}
	return n, names
}

// Leases are what Holds counts, and who holds it.
func (b *Book) Leases() []Held {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.held()
}

// held is Leases with the book locked.
func (b *Book) held() []Held {
	var all []Held
	if b.Unknown {
		all = append(all, Held{Lease: api.Lease{Name: "sessions of before are not known", Since: b.made}})
	}
	for _, s := range b.Sessions {
		if s.health != api.HealthLost {
			for _, l := range s.Holds {
				all = append(all, Held{Lease: l, Session: s.ID, PID: s.PID})
			}
		}
	}
	return all
}

// HeldDuring are the leases that a drain has met: those that were held when it began or were taken since. Of the last
// drain alone; of more than 256 those that were held for longest.
func (b *Book) HeldDuring(id string) []api.HeldDuring {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.Met == nil || b.Met.Drain != id {
		return nil
	}
	all := slices.Clone(b.Met.Held)
	if !b.Met.Ended {
		for _, s := range b.Sessions {
			for _, l := range s.Holds {
				all = append(all, b.Met.during(s, l, time.Now(), false))
			}
		}
	}
	return all
}

// Health is the worst of the applications' sessions, and in words why.
func (b *Book) Health() (h api.Health, why string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.worst()
	if s == nil || s.health == api.HealthOK {
		return api.HealthOK, ""
	}
	return s.health, fmt.Sprintf("process %d, which has registered, is silent since %s", s.PID, s.heardAt.Format(time.RFC3339))
}

// worst is the application's session that is thought worst of; nil if there is none, or the generation is over and it
// does not matter any more.
func (b *Book) worst() *session {
	if b.Over {
		return nil
	}
	var worst *session
	for _, s := range b.Sessions {
		if s.Role == api.RoleApp && (worst == nil || rank(s.health) > rank(worst.health)) {
			worst = s
		}
	}
	return worst
}

func rank(h api.Health) int {
	return slices.Index([]api.Health{api.HealthOK, api.HealthSuspect, api.HealthLost}, h)
}

// Apps is how many sessions of applications are not lost.
func (b *Book) Apps() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := 0
	for _, s := range b.Sessions {
		if s.lives() {
			n++
		}
	}
	return n
}

// Version is the highest that an application which is not lost has registered with; false if none has one.
func (b *Book) Version() (int64, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	var v int64
	for _, s := range b.Sessions {
		if s.lives() {
			v = max(v, s.Version)
		}
	}
	return v, v > 0
}

// Views are the sessions as an operator sees them, in the order in which they were opened.
func (b *Book) Views() []api.SessionView {
	b.mu.Lock()
	defer b.mu.Unlock()
	var all []api.SessionView
	for _, s := range b.Sessions {
		all = append(all, api.SessionView{
			ID: s.ID, Role: s.Role, PID: s.PID, Version: s.Version, Health: s.health, Since: s.Since, Heard: s.heardAt,
			Remaining: s.Remaining, Holds: s.leases(), Seq: s.Seq, Acked: s.Acked,
		})
	}
	return all
}

// view is a session as its application sees it.
func (b *Book) view(s *session) api.Session {
	v := api.Session{
		ID: s.ID, Backend: b.o.Backend, Service: b.o.Service, Gen: b.o.Gen, Role: s.Role, Version: s.Version, PID: s.PID,
		State: b.stateNow(), Health: s.health, Seq: s.Seq, Acked: s.Acked,
		HeartbeatMS: b.o.Heartbeat.Milliseconds(), SuspectMS: b.o.Suspect.Milliseconds(), LostMS: b.o.Lost.Milliseconds(),
		ExtensionMS: b.o.Extension.Milliseconds(), Holds: s.leases(), Remaining: s.Remaining,
	}
	if t := b.running(); t != nil {
		v.Drain = &api.SessionDrain{ID: t.ID, Cause: t.Cause, Deadline: t.Deadline, FlushBy: t.FlushBy, TimeLeftMS: *left(t.Deadline), State: v.State}
	}
	return v
}

// stateNow is the backend's state. A drain that only observes is none to an application.
func (b *Book) stateNow() drain.State {
	t, worst := b.running(), b.worst()
	switch {
	case b.Over && b.level.State == drain.StateLost:
		return drain.StateLost
	case b.Over:
		return drain.StateDone
	case t != nil && t.Flush != nil:
		return drain.StateFlushing
	case t != nil:
		return drain.StateDraining
	case b.level.Mode == drain.ModeEnforce && b.level.State != drain.StateServing:
		return b.level.State
	case worst != nil && worst.health == api.HealthSuspect:
		return drain.StateSuspect
	case worst != nil && worst.health == api.HealthLost:
		return drain.StateLost
	}
	return drain.StateServing
}

// find is the session that is meant.
func (b *Book) find(id string, p api.Process) (*session, error) {
	if id != "" {
		if i := slices.IndexFunc(b.Sessions, func(s *session) bool { return s.ID == id }); i >= 0 {
			return b.Sessions[i], nil
		}
		return nil, fmt.Errorf("%w: %q has none of this id; register anew", api.ErrUnknownSession, b.o.Backend)
	}
	var found *session
	start := b.started(p.PID)
	for _, s := range b.Sessions {
		if !s.of(p.PID, start) {
			continue
		}
		if found != nil {
			return nil, fmt.Errorf("%w: process %d has registered more than one; name one by Ebb-Session", api.ErrAmbiguous, p.PID)
		}
		found = s
	}
	if found == nil {
		return nil, fmt.Errorf("%w: process %d has registered none; register, or name one by Ebb-Session", api.ErrUnknownSession, p.PID)
	}
	return found, nil
}

// ack forgets the events up to a number. With the last one, which says that the generation is over, the session ends.
func (b *Book) ack(s *session, seq uint64) {
	seq = min(seq, s.Seq)
	if seq <= s.Acked {
		return
	}
	s.Acked = seq
	b.owe()
	s.Events = slices.DeleteFunc(s.Events, func(e event) bool { return e.Seq <= seq })
	if b.Over && len(s.Events) == 0 {
		b.drop(s, "has acknowledged the end")
	}
}

// hold takes a lease.
func (b *Book) hold(s *session, c api.SessionCall) error {
	id, name := cmp.Or(c.ID, c.Name), cmp.Or(c.Name, c.ID)
	if !printable(id) || !printable(name) {
		return fmt.Errorf("%w: a hold needs a name of 1 to %d bytes that can be printed", api.ErrNotPossible, maxName)
	}
	switch {
	case s.lease(id) >= 0:
		return nil
	case b.flushing():
		return fmt.Errorf("%w: it is too late to begin work", api.ErrFlushing)
	case b.leases() >= maxHolds:
		return fmt.Errorf("%w: %d leases of %q are held already, which is the most", api.ErrNotPossible, maxHolds, b.o.Backend)
	}
	if err := b.mayWrite(); err != nil {
		return err
	}
	s.Holds = append(s.Holds, api.Lease{ID: id, Name: name, Since: time.Now()})
	if err := b.save(); err != nil {
		s.Holds = s.Holds[:len(s.Holds)-1]
		return fmt.Errorf("hold %q: %w", name, err)
	}
	b.changed = true
	return nil
}

// leases is how many all sessions have, also those that are lost.
func (b *Book) leases() (n int) {
	for _, s := range b.Sessions {
		n += len(s.Holds)
	}
	return n
}

// mayWrite counts one more write for which an application waits.
func (b *Book) mayWrite() error {
	if b.writes.Take() {
		return nil
	}
	return fmt.Errorf("%w: sessions of %q register, hold and extend %d times a second at most; try again", api.ErrTooFast, b.o.Backend, time.Second/everyWrite)
}

// owe has the file written soon.
func (b *Book) owe() {
	if !b.owed {
		b.owed = true
		b.rouse()
	}
}

// release gives a lease back. One that is not held is none that matters.
func (b *Book) release(s *session, id string) {
	i := s.lease(id)
	if i < 0 {
		i = slices.IndexFunc(s.Holds, func(l api.Lease) bool { return l.Name == id })
	}
	if i < 0 {
		return
	}
	b.met(s, s.Holds[i], true)
	s.Holds = slices.Delete(s.Holds, i, i+1)
	b.changed, b.dirty = true, true
}

// drop ends a session with its holds.
func (b *Book) drop(s *session, why string) {
	for _, l := range s.Holds {
		b.met(s, l, true)
	}
	b.Sessions = slices.DeleteFunc(b.Sessions, func(x *session) bool { return x == s })
	if s.unwatch != nil {
		s.unwatch()
	}
	b.changed, b.dirty = true, true
	b.log.Info("session ended", "session", s.ID, "pid", s.PID, "why", why)
	b.mention(s, why)
}

// started is when a process started, 0 if nobody can say.
func (b *Book) started(pid int) uint64 {
	if b.o.Started == nil {
		return 0
	}
	start, err := b.o.Started(pid)
	if err != nil {
		return 0
	}
	return start
}

// newID is 128 random bits: who knows it may speak for the session, within its backend.
func newID() string {
	var id [16]byte
	_, _ = rand.Read(id[:]) // it does not fail
	return hex.EncodeToString(id[:])
}

func printable(s string) bool {
	return s != "" && len(s) <= maxName && utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) })
}

// left is the time to a moment in ms, 0 if it has passed.
func left(t time.Time) *int64 {
	ms := max(0, time.Until(t).Milliseconds())
	return &ms
}

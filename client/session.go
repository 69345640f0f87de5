// SPDX-License-Identifier: Apache-2.0

package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"
)

// Defaults of Options: those of `ebb run`.
const (
	DefaultSocket       = "/run/ebb/app.sock"
	DefaultGrace        = 25 * time.Second
	DefaultFlushTimeout = 5 * time.Second
	DefaultReserve      = 3 * time.Second
	DefaultQuietPeriod  = time.Second
)

const (
	// firstAnswer is how long Register waits for an agent that has accepted its connection and says nothing.
	firstAnswer = time.Second
	// flushSlack is how long past the announced time a flush of an agent that is heard from is waited for.
	flushSlack = time.Second
	// byeTimeout is for the last two messages of a session: that it has flushed, and that it ends.
	byeTimeout = 2 * time.Second
)

// Options of Register. The zero value is usable.
type Options struct {
	// Socket is the agent's; default is the environment variable EBB_APP_SOCKET, which `ebb run` sets, else DefaultSocket.
	Socket string
	// Version of the application, above 0, for drain_on_version_upgrade; 0: none.
	Version int64

	// Grace is the whole budget of a drain that this process begins, from SIGTERM, Stop or Drain to the end; default 25 s, which
	// fits Kubernetes' 30. A drain that the agent begins has the agent's budget.
	Grace time.Duration
	// Reserve is the part of Grace in which what is still in flight or held has been asked to end; default 3 s.
	Reserve time.Duration
	// FlushTimeout is the part of Grace in which the functions of OnFlush run; default 5 s.
	FlushTimeout time.Duration
	// QuietPeriod is how long nothing may have arrived before the listeners are closed, and nothing been held before the flush,
	// where no agent decides; default 1 s.
	QuietPeriod time.Duration

	// Signals begin a drain; the second is harmless, and the third ends it by force. Nil: SIGTERM and SIGINT; for none see
	// [NoSignals].
	Signals []os.Signal
	// Log gets what changes at Info, and what is tried in vain at Debug; nil discards.
	Log *slog.Logger

	dial func(context.Context) (net.Conn, error) // nil: Socket
}

// NoSignals are the Options.Signals of a program that handles its signals itself, and calls Stop.
var NoSignals = []os.Signal{}

func (o *Options) fill() error {
	o.Socket = cmp.Or(o.Socket, os.Getenv("EBB_APP_SOCKET"), DefaultSocket)
	o.Grace = cmp.Or(o.Grace, DefaultGrace)
	o.FlushTimeout = cmp.Or(o.FlushTimeout, DefaultFlushTimeout)
	o.Reserve = cmp.Or(o.Reserve, DefaultReserve)
	o.QuietPeriod = cmp.Or(o.QuietPeriod, DefaultQuietPeriod)
	if o.Signals == nil {
		o.Signals = []os.Signal{syscall.SIGTERM, os.Interrupt}
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.dial == nil {
		o.dial = func(ctx context.Context) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", o.Socket)
		}
	}
	switch {
	case o.Version < 0:
		return fmt.Errorf("register: version %d is below 0", o.Version)
	case min(o.FlushTimeout, o.Reserve, o.QuietPeriod) < 0:
		return errors.New("register: a time is below 0")
	case o.FlushTimeout+o.Reserve >= o.Grace:
		return fmt.Errorf("register: grace %s leaves no wait: flush timeout %s + reserve %s = %s", o.Grace, o.FlushTimeout, o.Reserve,
			o.FlushTimeout+o.Reserve)
	}
	return nil
}

// Flush says why a flush has come and what is left for it.
type Flush struct {
	Drain  string      // id of the agent's drain; empty without an agent
	Reason FlushReason // why now
	Key    string      // idempotency key, for whoever is told in turn; empty without an agent
	Until  time.Time   // the deadline of the context, a moment before the end of the flush's slice
}

// FlushReason says why a flush has come.
type FlushReason string

// The reasons.
const (
	FlushZero     FlushReason = "zero"     // nothing is in flight, and nothing is held
	FlushDeadline FlushReason = "deadline" // the wait is over
)

// Health says what is thought of the agent, by how long it has been silent.
type Health string

// The healths of an agent.
const (
	HealthNone    Health = "none"    // there has been none, or it does not know this process
	HealthOK      Health = "ok"      // heard from
	HealthSuspect Health = "suspect" // silent for longer than it said that it would be
	HealthLost    Health = "lost"    // the session goes on alone
)

// Status is a session as it is.
type Status struct {
	ID, Backend, Service string // empty before the first registration
	Gen                  uint64 // generation of the backend
	Agent                Health
	Evicted              bool // this generation is over: the session does not come back

	Draining bool      // from its beginning to the end of the process, unless it is taken back
	Flushing bool      // the flush has begun
	Drain    string    // id of the agent's drain; empty without one
	Cause    string    // of the agent's drain, or what began this one
	Deadline time.Time // when everything is over; zero while serving
	FlushBy  time.Time // when the flush begins at the latest; zero while serving
	Outcome  string    // of the last drain that the agent said is over

	Holds int // that are not released
}

// Session is the registration of this process. Its methods may be called from any goroutine, and those without a result on a
// nil Session too.
//
// One goroutine, loop, owns everything below owned. What it is:
//
//	serving ──draining, signal, Stop──► draining ──flush, flush_by, zero──► flushing ──► over
//	   ▲                                   │
//	   └────────────── cancelled ──────────┘ (unless this process began it, or a server is too far gone)
type Session struct {
	o      Options
	wire   *wire
	notice atomic.Pointer[notice] // told to whoever listens
	asked  context.Context        // over when the flush begins
	ask    context.CancelCauseFunc
	forced context.Context // over when a stop has to end what is left
	force  context.CancelFunc

	calls    chan func()
	wake     chan struct{} // there may be something to send
	kick     chan struct{} // do not wait any longer before the next attempt to connect
	finished chan struct{} // closed when the flush is over and everything closed
	over     chan struct{} // closed when loop has ended
	quit     context.CancelFunc
	quitting context.Context
	group    sync.WaitGroup
	bye      sync.Once

	// owned by loop
	id         string
	closeLink  context.CancelFunc // ends the stream of events; nil: none is open
	status     Status
	limits     limits
	heard      time.Time // last sign of the agent's life
	retry      time.Time // nothing is sent before; zero: the last request was answered
	refusals   int       // requests in a row that were refused for now
	beat       time.Time // next heartbeat
	drain      *run      // nil: serving
	signals    int
	servers    []Server
	onFlush    []func(context.Context, Flush) error
	leases     map[string]*lease
	held       chan struct{} // closed and replaced when a hold begins or ends
	heldAt     time.Time     // when that was last, or draining began
	remaining  *int64
	seq, acked uint64
	seen       []seen
	flushing   string  // the agent's drain that is to be answered; empty: none
	answer     *answer // to it; nil while the flush runs
	err        error
	applied    func(wireEvent) // for tests: nil
}

// notice is closed when draining begins, and replaced when it is taken back.
type notice struct{ c chan struct{} }

// limits are the thresholds that both sides keep.
type limits struct{ heartbeat, suspect, lost time.Duration }

// defaultLimits are those before the agent's first message.
var defaultLimits = limits{3 * time.Second, 10 * time.Second, 15 * time.Second}

// seen is what has been applied of a drain and cannot come twice.
type seen struct{ drain, typ string }

// maxSeen bounds what is remembered: four for each drain, of which one runs at a time.
const maxSeen = 64

// Register registers this process with the agent, if there is one. An agent that is absent or does not know the process is no
// error: the session goes on alone and keeps trying. ctx bounds how long it waits for the agent's first answer, which is a
// second at most. An error is a contradiction in o.
//
// The session takes the signals of o for itself: a program that does not use [ListenAndServe] ends after [Session.Done].
func Register(ctx context.Context, o Options) (*Session, error) {
	if err := o.fill(); err != nil {
		return nil, err
	}
	s := &Session{
		o: o, wire: newWire(o.dial), limits: defaultLimits,
		calls: make(chan func()), wake: make(chan struct{}, 1), kick: make(chan struct{}, 1),
		finished: make(chan struct{}), over: make(chan struct{}),
		leases: make(map[string]*lease), held: make(chan struct{}), status: Status{Agent: HealthNone},
	}
	s.notice.Store(&notice{make(chan struct{})})
	s.asked, s.ask = context.WithCancelCause(context.WithoutCancel(ctx))
	s.forced, s.force = context.WithCancel(context.WithoutCancel(ctx))
	s.quitting, s.quit = context.WithCancel(context.WithoutCancel(ctx))
	go s.loop()
	s.group.Go(s.send)
	if len(o.Signals) > 0 {
		c := make(chan os.Signal, 4)
		signal.Notify(c, o.Signals...)
		s.group.Go(func() { s.listen(c) })
	}
	tried := make(chan struct{})
	s.group.Go(func() { s.link(sync.OnceFunc(func() { close(tried) })) })
	ctx, cancel := context.WithTimeout(ctx, firstAnswer)
	defer cancel()
	select {
	case <-tried:
	case <-ctx.Done():
	}
	return s, nil
}

// listen turns signals into a drain.
func (s *Session) listen(c chan os.Signal) {
	defer signal.Stop(c)
	for {
		select {
		case sig := <-c:
			s.do(func() { s.signal(sig.String()) })
		case <-s.quitting.Done():
			return
		}
	}
}

// do runs f in loop and returns when it has, or false if the session is over.
func (s *Session) do(f func()) bool {
	if s == nil {
		return false
	}
	done := make(chan struct{})
	select {
	case s.calls <- func() { f(); close(done) }:
		<-done
		return true
	case <-s.over:
		return false
	}
}

// loop owns the session until quit.
func (s *Session) loop() {
	defer close(s.over)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case f := <-s.calls:
			f()
		case <-timer.C:
		case <-s.quitting.Done():
			return
		}
		timer.Reset(s.tick(time.Now()))
	}
}

// tick does what the time asks for and returns when to look again.
func (s *Session) tick(now time.Time) time.Duration {
	next := now.Add(time.Hour)
	due := func(t time.Time) bool {
		if now.Before(t) {
			next = earlier(next, t)
			return false
		}
		return true
	}
	if s.id != "" && !s.status.Evicted {
		switch silent := s.heard; {
		case due(silent.Add(s.limits.lost)):
			s.think(HealthLost)
		case due(silent.Add(s.limits.suspect)):
			s.think(HealthSuspect)
		default:
			s.think(HealthOK)
		}
		if due(s.retry) && (due(s.beat) || !s.retry.IsZero()) {
			s.nudge() // sending moves both on
		}
	}
	if d := s.drain; d != nil && !s.status.Flushing {
		by := d.flushBy
		if d.led && !d.own && s.status.Agent == HealthOK {
			by = by.Add(flushSlack)
		}
		if due(by) {
			s.flush(FlushDeadline, d.id, d.deadline)
		}
	}
	return next.Sub(now)
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// think changes what is thought of the agent.
func (s *Session) think(h Health) {
	if s.status.Agent == h {
		return
	}
	s.o.Log.Info("agent", "health", h, "was", s.status.Agent)
	s.status.Agent = h
	if h != HealthOK {
		s.holdAlone()
	}
	s.lead()
}

// nudge has send look for something to send.
func (s *Session) nudge() { poke(s.wake) }

func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Draining is closed once the application drains: no new long work, clients are to go. If the drain is taken back, the channel
// stays closed and the next call returns another: ask again for each wait. Who has ended something for good learns from
// Status whether it was in vain.
func (s *Session) Draining() <-chan struct{} {
	if s == nil {
		return nil
	}
	return s.notice.Load().c
}

// Context is over when what is still in flight or held is asked to end: the flush has begun. Its cause is ErrFlushing.
func (s *Session) Context() context.Context {
	if s == nil {
		return context.Background()
	}
	return s.asked
}

// Done is closed when the flush is over, all servers are closed, and the process is to end.
func (s *Session) Done() <-chan struct{} {
	if s == nil {
		return nil
	}
	return s.finished
}

// OnFlush has f called when the flush comes, at most once, after those that were given before it: when no request runs any more
// and nothing is held, or they have had their time to end; see [Session.Stop]. Its context ends a moment before the flush's slice.
// The agent is told its error. Once the flush has begun OnFlush does nothing. Nil is refused, with a line in the log.
func (s *Session) OnFlush(f func(context.Context, Flush) error) {
	s.do(func() {
		if f == nil {
			s.o.Log.Error("refuse a function of OnFlush", "err", "it is nil")
			return
		}
		s.onFlush = append(s.onFlush, f)
	})
}

// Remaining says how much work is left, in units of the application's own; below 0 is 0. Operators see it, with the next
// heartbeat.
func (s *Session) Remaining(n int64) {
	n = max(n, 0)
	s.do(func() { s.remaining = &n })
}

// Status is the session as it is; after its end, as it was.
func (s *Session) Status() Status {
	if s == nil {
		return Status{Agent: HealthNone}
	}
	var st Status
	if !s.do(func() { st = s.snapshot() }) {
		st = s.snapshot()
	}
	return st
}

func (s *Session) snapshot() Status {
	st := s.status
	st.ID = s.id
	for _, l := range s.leases {
		st.Holds += l.n
	}
	if d := s.drain; d != nil {
		st.Draining, st.Drain, st.Cause, st.Deadline, st.FlushBy = true, d.id, d.cause, d.deadline, d.flushBy
	}
	return st
}

// lease is what is held under one name, however often.
type lease struct {
	n       int  // holds
	told    bool // the agent may know: a request may have arrived whose answer was lost
	known   bool // the agent knows, or has refused
	waiters []chan error
}

// Hold keeps the flush from beginning before release is called; holds of one name, 1 to 128 bytes of printable UTF-8, are counted.
// It returns when the agent knows, and where that does not answer, in 5 s at most: then the session counts alone and tells the
// agent later. The flush at the end of the wait comes all the same.
//
// ErrFlushing: it is too late to begin. A [Refusal]: the agent does not take so many. The cause of ctx: it was over first. Nothing
// is held then.
//
// release is idempotent.
func (s *Session) Hold(ctx context.Context, name string) (release func(), err error) {
	if ctx.Err() != nil {
		return nil, fmt.Errorf("hold %q: %w", name, context.Cause(ctx))
	}
	if !printable(name) {
		return nil, fmt.Errorf("hold %q: a name has 1 to %d bytes of printable UTF-8", name, maxName)
	}
	answer := make(chan error, 1)
	if !s.do(func() { s.hold(name, answer) }) {
		return nil, ErrStopped
	}
	timer := time.NewTimer(answerTimeout)
	defer timer.Stop()
	select {
	case err = <-answer:
	case <-timer.C:
		err = s.unwait(name, answer, nil)
	case <-ctx.Done():
		err = s.unwait(name, answer, context.Cause(ctx))
	case <-s.over:
		err = ErrStopped
	}
	if err != nil {
		return nil, fmt.Errorf("hold %q: %w", name, err)
	}
	return sync.OnceFunc(func() { s.do(func() { s.release(name, 1) }) }), nil
}

// unwait ends the wait of a hold with err, unless it has been answered meanwhile.
func (s *Session) unwait(name string, answer chan error, err error) error {
	if !s.do(func() {
		select {
		case err = <-answer:
			return
		default:
		}
		l := s.leases[name]
		l.waiters = slices.DeleteFunc(l.waiters, func(c chan error) bool { return c == answer })
		if err != nil {
			s.release(name, 1)
		}
	}) {
		return ErrStopped
	}
	return err
}

// printable says whether the agent takes a name.
func printable(name string) bool {
	return name != "" && len(name) <= maxName && utf8.ValidString(name) &&
		!strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) })
}

func (s *Session) hold(name string, answer chan error) {
	switch {
	case s.status.Flushing:
		answer <- ErrFlushing
		return
	}
	l := s.leases[name]
	if l == nil {
		l = &lease{}
		s.leases[name] = l
	}
	l.n++
	s.heldChanged()
	if l.known || !s.connected() {
		answer <- nil
		return
	}
	l.waiters = append(l.waiters, answer)
	s.nudge()
}

// maxName is the longest name of a lease in bytes, as the agent takes it.
const maxName = 128

func (s *Session) release(name string, n int) {
	l := s.leases[name]
	if l == nil {
		return
	}
	l.n -= n
	s.heldChanged()
	s.forget(name, l)
	s.nudge()
}

// forget drops a lease that is neither held nor told.
func (s *Session) forget(name string, l *lease) {
	if l.n == 0 && !l.told {
		delete(s.leases, name)
	}
}

func (s *Session) heldChanged() {
	s.heldAt = time.Now()
	close(s.held)
	s.held = make(chan struct{})
}

// answerHolds tells those that wait for the agent to know their lease. An error takes their holds back.
func (s *Session) answerHolds(name string, l *lease, err error) {
	waiters := l.waiters
	l.waiters = nil
	for _, w := range waiters {
		w <- err
	}
	if err != nil {
		s.release(name, len(waiters))
	}
}

// holdAlone has those that wait for the agent go on without it.
func (s *Session) holdAlone() {
	for name, l := range s.leases {
		if len(l.waiters) > 0 {
			s.answerHolds(name, l, nil)
		}
	}
}

// unheld returns once nothing has been held for quiet, or the error of ctx.
func (s *Session) unheld(ctx context.Context, quiet time.Duration) error {
	for {
		var n int
		var changed chan struct{}
		var since time.Time
		if !s.do(func() { n, changed, since = s.snapshot().Holds, s.held, s.heldAt }) {
			return ErrStopped
		}
		var pause <-chan time.Time
		if n == 0 {
			pause = time.After(time.Until(since.Add(quiet)))
		}
		select {
		case <-pause:
			return nil
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// connected says whether a request has a chance now.
func (s *Session) connected() bool {
	return s.id != "" && !s.status.Evicted && s.status.Agent == HealthOK && s.retry.IsZero()
}

// Drain asks for a drain of this backend, as an operator would, and returns when it has begun: [Session.Draining] is closed then
// or, under `notify: {at: settled}`, soon. Without an agent, or one that only observes, the session drains alone.
func (s *Session) Drain(ctx context.Context, reason string) error {
	if s == nil {
		return ErrStopped
	}
	var id string
	var known bool
	if !s.do(func() { id, known = s.id, s.connected() }) {
		return ErrStopped
	}
	if known {
		var d drainAnswer
		err := s.wire.call(ctx, "POST", "/v1/session/drain", id, wireCall{Reason: clip(reason)}, &d)
		if err == nil && !d.WouldHave {
			return nil
		}
		if err != nil && answered(err) && !errors.Is(err, errUnknownSession) {
			return fmt.Errorf("drain: %w", err)
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	if !s.do(func() { s.begin(reason, time.Now().Add(s.o.Grace)) }) {
		return ErrStopped
	}
	return nil
}

// Extend asks for more time, once per drain and at most what the agent's configuration allows. ErrNotPossible says why not,
// ErrNoAgent that there is nobody to ask: a drain without an agent has its Grace.
func (s *Session) Extend(ctx context.Context, by time.Duration) error {
	if s == nil {
		return ErrStopped
	}
	var id, drain string
	var known bool
	if !s.do(func() {
		id, known = s.id, s.connected()
		if s.drain != nil {
			drain = s.drain.id
		}
	}) {
		return ErrStopped
	}
	if !known {
		return fmt.Errorf("extend: %w", ErrNoAgent)
	}
	if drain == "" {
		return fmt.Errorf("extend: %w: the agent drains nothing", ErrNotPossible)
	}
	err := s.wire.call(ctx, "POST", "/v1/session/extend", id, wireCall{Drain: drain, ByMS: by.Milliseconds()}, nil)
	switch r := (*Refusal)(nil); {
	case err == nil:
		return nil
	case errors.As(err, &r) || ctx.Err() != nil:
		return fmt.Errorf("extend: %w", err)
	}
	return fmt.Errorf("extend: %w: %w", ErrNoAgent, err)
}

// Stop ends the session in stages, whoever has begun:
//
//   - it drains, and waits until nothing is in flight and nothing held;
//   - then, or when the wait is over, it closes the listeners, asks what is left to end ([Session.Context], the contexts of
//     requests), has kept connections go, and waits for both to end;
//   - it runs the functions of OnFlush: nothing new begins any more;
//   - at ctx's deadline, or after Options.Grace if that has none, it closes what is left by force, and leaves behind what is
//     held.
//
// Stages of a shorter time are shorter in proportion. It returns nil if everything ended by itself, else joined: ErrForced if
// something was closed by force or left behind, with the names of what was held, and ctx's error if ctx was over then; the
// errors of OnFlush. It may be called before anything has begun, again, and several times at once: the shortest context counts.
// In a function of OnFlush there is nothing to wait for: given the function's context, Stop returns nil at once.
func (s *Session) Stop(ctx context.Context) error {
	if s == nil || ctx.Value(flushKey{}) == s {
		return nil
	}
	deadline := time.Now().Add(s.o.Grace)
	if d, ok := ctx.Deadline(); ok {
		deadline = d
	}
	s.do(func() { s.begin("stop", deadline) })
	select {
	case <-s.finished:
	case <-ctx.Done():
		select {
		case <-s.finished: // both at once
		default:
			s.do(s.forceNow)
			<-s.finished
		}
	}
	s.bye.Do(s.leave)
	if errors.Is(s.err, ErrForced) {
		return errors.Join(ctx.Err(), s.err)
	}
	return s.err
}

// flushKey is that of the session in the contexts of its functions of OnFlush.
type flushKey struct{}

// leave tells the agent that the session ends, and ends it.
func (s *Session) leave() {
	ctx, cancel := context.WithTimeout(s.quitting, byeTimeout)
	defer cancel()
	var id string
	s.do(func() {
		if !s.status.Evicted && s.connected() {
			id = s.id
		}
	})
	if id != "" {
		// If this does not arrive, the end of the process says the same.
		_ = s.wire.call(ctx, "DELETE", "/v1/session", id, nil, nil)
	}
	s.quit()
	s.group.Wait()
	<-s.over
	s.wire.http.CloseIdleConnections()
}

// remember notes what cannot come twice, and says whether it has come already.
func (s *Session) remember(drain, typ string) (again bool) {
	k := seen{drain, typ}
	if slices.Contains(s.seen, k) {
		return true
	}
	if len(s.seen) == maxSeen {
		s.seen = s.seen[1:]
	}
	s.seen = append(s.seen, k)
	return false
}

// SPDX-License-Identifier: Apache-2.0

package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// fakeAgent is the agent's side of docs/protocol.md for one backend, as a script moves it: it keeps events until they are
// acknowledged, stands still, is away, forgets, and breaks connections.
type fakeAgent struct {
	t     *testing.T
	conns chan net.Conn
	gone  chan struct{} // closed at the end of the test
	srv   *http.Server

	mu       sync.Mutex
	away     bool          // nobody listens
	frozen   chan struct{} // closed when it goes on; nil: it runs
	sessions map[string]*fakeSession
	opened   int
	changed  chan struct{}
	calls    []fakeCall
	dials    []time.Time
	holds    map[string]bool // whoever holds them
	refuse   func(op string) *problem
	// fault breaks the connection of a request or an event: before it is done, or after.
	fault func(op string) (before, after bool)

	drain                      string // the one that runs
	deadline, flushBy          time.Time
	announced, flushing, ended bool
	flushedBy                  []string // errors, of each answer that was not stale
	stale                      int
	observed                   bool
}

type fakeCall struct {
	at      time.Time
	op      string
	session string
	body    wireCall
}

type fakeSession struct {
	id         string
	events     []fakeEvent
	seq, acked uint64
	stream     int
	end        string // unnumbered end of the stream
	wasFlushed bool
	deleted    bool
	registered wireCall
	lastHeard  time.Time
}

type fakeEvent struct {
	Seq     uint64     `json:"seq,omitempty"`
	Type    string     `json:"type"`
	Drain   string     `json:"drain,omitempty"`
	Cause   string     `json:"cause,omitempty"`
	Reason  string     `json:"reason,omitempty"`
	By      *time.Time `json:"flush_by,omitempty"`
	At      *time.Time `json:"deadline,omitempty"`
	Left    *int64     `json:"time_left_ms,omitempty"`
	Key     string     `json:"key,omitempty"`
	Outcome string     `json:"outcome,omitempty"`
	until   time.Time
}

func newFakeAgent(t *testing.T) *fakeAgent {
	a := &fakeAgent{
		t: t, conns: make(chan net.Conn), gone: make(chan struct{}), sessions: make(map[string]*fakeSession), changed: make(chan struct{}),
		holds: make(map[string]bool),
	}
	a.srv = &http.Server{Handler: a, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0)}
	go func() { _ = a.srv.Serve(a) }() // ends with Close
	return a
}

// Accept, Addr and Close make it a listener.
func (a *fakeAgent) Accept() (net.Conn, error) {
	select {
	case c := <-a.conns:
		return c, nil
	case <-a.gone:
		return nil, net.ErrClosed
	}
}

func (a *fakeAgent) Addr() net.Addr { return &net.UnixAddr{Name: "agent", Net: "unix"} }
func (a *fakeAgent) Close() error   { return nil }

func (a *fakeAgent) close() {
	a.thaw()
	close(a.gone)
	_ = a.srv.Close() // nothing was written
}

func (a *fakeAgent) dial(context.Context) (net.Conn, error) {
	a.mu.Lock()
	a.dials = append(a.dials, time.Now())
	away := a.away
	a.mu.Unlock()
	if away {
		return nil, errors.New("connection refused")
	}
	c, s := net.Pipe()
	select {
	case a.conns <- s:
		return c, nil
	case <-a.gone:
		return nil, errors.New("connection refused")
	}
}

// with runs f with the lock, and has the streams look again.
func (a *fakeAgent) with(f func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f()
	close(a.changed)
	a.changed = make(chan struct{})
}

func (a *fakeAgent) freeze() { a.with(func() { a.frozen = make(chan struct{}) }) }

func (a *fakeAgent) thaw() {
	a.with(func() {
		if a.frozen != nil {
			close(a.frozen)
			a.frozen = nil
		}
	})
}

// standStill returns when the agent runs.
func (a *fakeAgent) standStill() {
	for {
		a.mu.Lock()
		frozen := a.frozen
		a.mu.Unlock()
		if frozen == nil {
			return
		}
		<-frozen
	}
}

// push queues an event for every session.
func (a *fakeAgent) push(ev fakeEvent) {
	for _, s := range a.sessions {
		s.push(ev)
	}
}

func (s *fakeSession) push(ev fakeEvent) {
	s.seq++
	ev.Seq = s.seq
	s.events = append(s.events, ev)
}

// begin announces a drain.
func (a *fakeAgent) begin(id string, wait, grace time.Duration) {
	a.with(func() { a.beginLocked(id, wait, grace) })
}

func (a *fakeAgent) beginLocked(id string, wait, grace time.Duration) {
	a.drain, a.flushBy, a.deadline = id, time.Now().Add(wait), time.Now().Add(grace)
	a.announced, a.flushing, a.ended = true, false, false
	a.push(a.drainingEvent())
}

func (a *fakeAgent) drainingEvent() fakeEvent {
	by, at := a.flushBy, a.deadline
	return fakeEvent{Type: "draining", Drain: a.drain, Cause: "operator", By: &by, At: &at, until: at}
}

func (a *fakeAgent) flushEvent(reason string) fakeEvent {
	return fakeEvent{Type: "flush", Drain: a.drain, Reason: reason, Key: a.drain + "-flush", until: a.deadline}
}

func (a *fakeAgent) flush(reason string) {
	a.with(func() {
		a.flushing = true
		a.push(a.flushEvent(reason))
	})
}

func (a *fakeAgent) done(outcome string) {
	a.with(func() {
		a.push(fakeEvent{Type: "done", Drain: a.drain, Outcome: outcome})
		a.announced, a.flushing, a.ended = false, false, true
	})
}

func (a *fakeAgent) evict() { a.with(func() { a.push(fakeEvent{Type: "end", Reason: "evicted"}) }) }

// end ends all streams with a reason that is not numbered.
func (a *fakeAgent) end(reason string) {
	a.with(func() {
		for _, s := range a.sessions {
			s.end = reason
		}
	})
}

// count is how many calls of op there have been.
func (a *fakeAgent) count(op string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := 0
	for _, c := range a.calls {
		if c.op == op {
			n++
		}
	}
	return n
}

// held are the names that are held, sorted.
func (a *fakeAgent) held() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	var names []string
	for n := range a.holds {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

func (a *fakeAgent) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.standStill()
	op := strings.TrimPrefix(strings.TrimPrefix(r.URL.Path, "/v1/session"), "/")
	if op == "" {
		op = map[string]string{"POST": "open", "DELETE": "bye"}[r.Method]
	}
	var body wireCall
	if r.Method == "POST" {
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
			a.t.Errorf("read the body of %s: %v", op, err)
		}
	}
	a.mu.Lock()
	before, after := false, false
	if a.fault != nil {
		before, after = a.fault(op)
	}
	if before {
		a.mu.Unlock()
		panic(http.ErrAbortHandler)
	}
	id := r.Header.Get("Ebb-Session")
	a.calls = append(a.calls, fakeCall{time.Now(), op, id, body})
	var p *problem
	if a.refuse != nil {
		p = a.refuse(op)
	}
	s := a.sessions[id]
	if s != nil {
		s.lastHeard = time.Now()
	}
	var answer any
	switch {
	case p != nil:
	case op == "open":
		s = a.open(body)
		answer = a.view(s)
		w.WriteHeader(http.StatusCreated)
	case s == nil:
		p = &problem{Type: "tag:x:unknown-session", Title: "unknown session", Status: 404}
	case op == "events":
		s.stream++
		s.end = ""
		mine := s.stream
		a.mu.Unlock()
		if after {
			panic(http.ErrAbortHandler)
		}
		a.events(w, r, s, mine)
		return
	default:
		answer, p = a.act(op, s, body)
	}
	a.mu.Unlock()
	a.with(func() {})
	if after {
		panic(http.ErrAbortHandler)
	}
	if p != nil {
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(p.Status)
		answer = p
	}
	_ = json.NewEncoder(w).Encode(answer) // the client may have gone
}

func (a *fakeAgent) open(body wireCall) *fakeSession {
	a.opened++
	s := &fakeSession{id: fmt.Sprintf("s%d", a.opened), registered: body}
	a.sessions[s.id] = s
	if a.announced {
		s.push(a.drainingEvent())
		if a.flushing {
			s.push(a.flushEvent("zero"))
		}
	}
	return s
}

func (a *fakeAgent) view(s *fakeSession) wireSession {
	return wireSession{
		ID: s.id, Backend: "web-blue", Service: "web", Gen: 7, Acked: s.acked,
		HeartbeatMS: 3000, SuspectMS: 10000, LostMS: 15000,
	}
}

func (a *fakeAgent) act(op string, s *fakeSession, body wireCall) (any, *problem) {
	switch op {
	case "ack":
		if s.acked = max(s.acked, body.Seq); body.Seq > s.seq {
			a.t.Errorf("acknowledged %d of %d", body.Seq, s.seq)
		}
	case "heartbeat", "extend":
	case "hold":
		if a.flushing {
			return nil, &problem{Type: "tag:x:flush-has-begun", Title: "flush has begun", Status: 409}
		}
		a.holds[body.ID] = true
	case "release":
		delete(a.holds, body.ID)
	case "drain":
		if !a.observed && !a.announced {
			a.beginLocked("d-app", 17*time.Second, 25*time.Second)
		}
		return map[string]any{"id": "d-app", "would_have": a.observed}, nil
	case "flushed":
		if body.Drain != a.drain || !a.flushing {
			a.stale++
			return nil, &problem{Type: "tag:x:stale-generation", Title: "stale", Status: 409}
		}
		if !s.wasFlushed {
			a.flushedBy = append(a.flushedBy, body.Error)
		}
		s.wasFlushed = true
	case "bye":
		s.deleted = true
		delete(a.sessions, s.id)
	default:
		a.t.Errorf("unknown request %q", op)
	}
	return a.view(s), nil
}

// events writes the stream of a session.
func (a *fakeAgent) events(w http.ResponseWriter, r *http.Request, s *fakeSession, mine int) {
	rc := http.NewResponseController(w)
	w.Header().Set("Content-Type", "text/event-stream")
	put := func(id uint64, typ string, v any) {
		b, err := json.Marshal(v)
		if err != nil {
			a.t.Error(err)
		}
		if id > 0 {
			fmt.Fprintf(w, "id: %d\n", id)
		}
		fmt.Fprintf(w, "event: %s\ndata: %s\n\n", typ, b)
		_ = rc.Flush() // the client may have gone
	}
	a.mu.Lock()
	next, level := s.acked+1, a.view(s)
	a.mu.Unlock()
	put(0, "session", level)
	beat := time.NewTicker(2 * time.Second)
	defer beat.Stop()
	for {
		a.standStill()
		a.mu.Lock()
		changed := a.changed
		var ev fakeEvent
		end := s.end
		switch {
		case s.stream != mine:
			end = "transient"
		case a.sessions[s.id] != s:
			a.mu.Unlock()
			return
		case end == "" && next <= s.seq:
			ev = s.events[next-1]
			next++
		}
		before, after := false, false
		if ev.Seq > 0 && a.fault != nil {
			before, after = a.fault("event " + ev.Type)
		}
		a.mu.Unlock()
		switch {
		case before:
			panic(http.ErrAbortHandler)
		case end != "":
			put(0, "end", fakeEvent{Type: "end", Reason: end})
			return
		case ev.Seq > 0:
			if !ev.until.IsZero() {
				left := time.Until(ev.until).Milliseconds()
				ev.Left = &left
			}
			put(ev.Seq, ev.Type, ev)
			if ev.Reason == "evicted" {
				return
			}
			if after {
				panic(http.ErrAbortHandler)
			}
			continue
		}
		select {
		case <-changed:
		case <-beat.C:
			a.standStill()
			fmt.Fprint(w, ": beat\n\n")
			_ = rc.Flush() // the client may have gone
		case <-r.Context().Done():
			return
		}
	}
}

// bubble runs f with an agent and the options for a session with it, on a virtual clock.
func bubble(t *testing.T, f func(t *testing.T, a *fakeAgent, o Options)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		a := newFakeAgent(t)
		defer a.close()
		f(t, a, Options{Signals: NoSignals, dial: a.dial})
	})
}

func register(t *testing.T, o Options) *Session {
	t.Helper()
	s, err := Register(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	synctest.Wait()
	return s
}

// leave ends a session without any more ado.
func leave(s *Session) {
	s.force()
	s.bye.Do(s.leave)
}

func after(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

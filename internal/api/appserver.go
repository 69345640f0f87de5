// SPDX-License-Identifier: Apache-2.0

package api

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// sessionHeader names the session that is meant; left out, it is the only one that the calling process has registered.
const sessionHeader = "Ebb-Session"

// defaultHeartbeat is how often a stream gives a sign of life if the session does not say.
const defaultHeartbeat = 3 * time.Second

// lastLook bounds the question what a stream is still to be sent when the server stops. It is less than closeTimeout.
const lastLook = 2 * time.Second

// The bodies of what a session says. Each has the members of a SessionCall that its operation knows.
type (
	getRequest struct{}
	endRequest struct{}
	ackRequest struct { // all up to Seq have arrived
		Seq uint64 `json:"seq"`
	}
	heartbeatRequest struct {
		Remaining *int64 `json:"remaining,omitempty"`
	}
	holdRequest struct { // at least one of the two, and the other is the same
		ID   string `json:"id,omitempty"`
		Name string `json:"name,omitempty"`
	}
	releaseRequest struct {
		ID   string `json:"id,omitempty"`
		Name string `json:"name,omitempty"`
	}
	flushedRequest struct {
		Drain string `json:"drain"`
		Error string `json:"error,omitempty"`
	}
	extensionRequest struct {
		ByMS  int64  `json:"by_ms"`
		Drain string `json:"drain,omitempty"`
	}
)

func (r *getRequest) call() SessionCall { return SessionCall{Op: "get"} }
func (r *endRequest) call() SessionCall { return SessionCall{Op: "end"} }
func (r *ackRequest) call() SessionCall { return SessionCall{Op: "ack", Seq: r.Seq} }
func (r *heartbeatRequest) call() SessionCall {
	return SessionCall{Op: "heartbeat", Remaining: r.Remaining}
}
func (r *holdRequest) call() SessionCall {
	return SessionCall{Op: "hold", ID: r.ID, Name: r.Name}
}
func (r *releaseRequest) call() SessionCall {
	return SessionCall{Op: "release", ID: r.ID, Name: r.Name}
}
func (r *flushedRequest) call() SessionCall {
	return SessionCall{Op: "flushed", Drain: r.Drain, Error: r.Error}
}
func (r *extensionRequest) call() SessionCall {
	return SessionCall{Op: "extend", Drain: r.Drain, ByMS: r.ByMS}
}

// request is a pointer to the body of what a session says.
type request[T any] interface {
	*T
	call() SessionCall
}

// sessionOf is the session that a request names; empty if it names none.
func sessionOf(req *http.Request) (string, error) {
	id := req.Header.Get(sessionHeader)
	return id, checkSessionID(id)
}

func (c caller) process() Process { return Process{PID: c.pid, UID: c.uid} }

func (s *Server) postSession(w http.ResponseWriter, req *http.Request) error {
	c := callerOf(req.Context())
	session, err := func() (Session, error) {
		var r SessionRequest
		if err := decodeBody(req, &r); err != nil {
			return Session{}, err
		}
		if err := r.check(); err != nil {
			return Session{}, err
		}
		ctx := context.WithoutCancel(req.Context())
		session, err := s.sessions.OpenSession(ctx, c.backend, c.process(), r)
		if err == nil && !c.alive() {
			// Its number may have been another's when the source looked at it.
			_, err = s.sessions.SessionCall(ctx, c.backend, session.ID, c.process(), SessionCall{Op: "end"})
			err = errors.Join(forbidden("process %d, which connected, has ended", c.pid), err)
		}
		return session, err
	}()
	s.audit(req, Audit{Status: http.StatusCreated, Err: err})
	if err != nil {
		return err
	}
	return writeJSONAs(w, http.StatusCreated, session)
}

// told is the handler of what a session says often: nobody is told but who reads the log at debug level.
func told[T any, P request[T]](s *Server, w http.ResponseWriter, req *http.Request) error {
	call, session, err := say(s, req, P(new(T)))
	s.o.Logger.Debug("session says", "op", call.Op, "backend", req.PathValue("name"), "session", session.ID, "lease", call.ID, "err", err)
	if err != nil {
		return err
	}
	return writeJSON(w, session)
}

// done is the handler of what a session does; it is audited.
func done[T any, P request[T]](s *Server, w http.ResponseWriter, req *http.Request) error {
	call, session, err := say(s, req, P(new(T)))
	status := http.StatusOK
	if call.Op == "end" {
		status = http.StatusNoContent
	}
	s.audit(req, Audit{Drain: call.Drain, Reason: call.Error, Status: status, Err: err})
	if err != nil {
		return err
	}
	if call.Op == "end" {
		w.WriteHeader(status)
		return nil
	}
	return writeJSON(w, session)
}

// say decodes what a session says, checks it and has it done.
func say[T any, P request[T]](s *Server, req *http.Request, body P) (call SessionCall, session Session, err error) {
	id, err := sessionOf(req)
	if err != nil {
		return call, session, err
	}
	if err := decodeBody(req, body); err != nil {
		return call, session, err
	}
	call = body.call()
	if err := call.check(); err != nil {
		return call, session, err
	}
	c := callerOf(req.Context())
	session, err = s.sessions.SessionCall(context.WithoutCancel(req.Context()), c.backend, id, c.process(), call)
	return call, session, err
}

// getSessionEvents writes a session's events as they come (text/event-stream, HTML Living Standard, "Server-sent events").
func (s *Server) getSessionEvents(w http.ResponseWriter, req *http.Request) error {
	id, err := sessionOf(req)
	if err != nil {
		return err
	}
	if id == "" {
		id = req.URL.Query().Get("session")
		if err := checkSessionID(id); err != nil {
			return err
		}
	}
	from, err := eventsFrom(req)
	if err != nil {
		return err
	}
	// HEAD has no events to wait for, and must not replace the stream that has.
	if req.Method == http.MethodHead {
		w.Header().Set("Content-Type", eventStream)
		return nil
	}
	c := callerOf(req.Context())
	v := &eventsView{server: s, c: c, id: id, from: from, stream: streamNumber(), w: w, rc: http.NewResponseController(w)}
	// What happens from here on is seen after the first look.
	v.hints = &ownEvents{s.o.Log.Subscribe(s.o.Log.Last() + 1), c}
	ctx, cancel := context.WithCancelCause(req.Context())
	defer cancel(nil)
	if stopping, ok := req.Context().Value(stoppingKey{}).(context.Context); ok {
		defer context.AfterFunc(stopping, func() { cancel(errStopping) })()
	}
	return v.serve(ctx, req.Context())
}

const eventStream = "text/event-stream"

// eventsFrom is the number of the first event wanted, 0 for the first that is not acknowledged.
func eventsFrom(req *http.Request) (uint64, error) {
	if req.URL.Query().Has("from") {
		return queryUint(req, "from", 0)
	}
	v := req.Header.Get("Last-Event-ID")
	if v == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(v, 10, 63)
	if err != nil {
		return 0, &fieldError{Field: "Last-Event-ID", Msg: fmt.Sprintf("%q is not the number of an event", v)}
	}
	return n + 1, nil
}

var lastStream atomic.Uint64

// streamNumber is higher than any before, of this process and of those before it: it is the time since the machine started,
// in nanoseconds, which nobody sets.
func streamNumber() uint64 {
	var now uint64
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts) == nil {
		now = uint64(ts.Nano())
	}
	for {
		last := lastStream.Load()
		if n := max(now, last+1); lastStream.CompareAndSwap(last, n) {
			return n
		}
	}
}

// eventsView is one stream of a session's events. It belongs to one goroutine.
//
//	look ──► write events, or a beat ──► wait: for an event of the log, or until a beat is due
//	 ▲                                              │
//	 └──────────────────────────────────────────────┘   until an end, the server's stop, or the reader has gone
type eventsView struct {
	server  *Server
	c       caller
	id      string // of the session; if the request names none, empty until the first look
	from    uint64 // the next event wanted
	stream  uint64
	hints   *ownEvents
	w       http.ResponseWriter
	rc      *http.ResponseController
	session Session       // of the first look
	every   time.Duration // the longest between two writes, if the source answers
	wrote   time.Time     // when the reader was last written to
}

// serve writes until the stream is over. stopping is over with the server or the reader, gone with the reader alone. It
// returns an error for the answer if nothing is written yet; afterwards there is nobody to tell.
func (v *eventsView) serve(stopping, gone context.Context) error {
	b, err := v.look(stopping)
	if err != nil && stopping.Err() != nil {
		return &Problem{Title: "stopping", Status: http.StatusServiceUnavailable, retry: true, Detail: context.Cause(stopping).Error()}
	}
	if err != nil {
		return err
	}
	v.session, v.id = b.Session, b.Session.ID
	// A quarter of the heartbeat is left for the source to answer.
	v.every = min(cmp.Or(time.Duration(b.Session.HeartbeatMS)*time.Millisecond, defaultHeartbeat), streamInterval) * 3 / 4
	v.w.Header().Set("Content-Type", eventStream)
	v.w.Header().Set("Cache-Control", "no-store")
	// The reader may stay silent for as long as it likes.
	if err := v.rc.SetReadDeadline(time.Time{}); err != nil {
		return fmt.Errorf("lift the read deadline: %w", err)
	}
	if v.write("session", 0, b.Session) != nil {
		return nil
	}
	for {
		if over, err := v.put(b); over || err != nil {
			return nil
		}
		goes := v.wait(stopping)
		if goes {
			b, err = v.look(stopping)
		}
		switch {
		case gone.Err() != nil:
			return nil
		case !goes || stopping.Err() != nil:
			// What happened before the stop is still delivered.
			within, cancel := context.WithTimeout(gone, lastLook)
			b, _ = v.look(within) // nothing, if the source has stopped before
			cancel()
			b.End = cmp.Or(b.End, EndRestarting)
		case err != nil:
			b.End = EndTransient
		}
	}
}

// look asks what is to be written.
func (v *eventsView) look(ctx context.Context) (SessionBatch, error) {
	leave, err := v.server.asks.enter(ctx, v.c.backend)
	if err != nil {
		return SessionBatch{}, err
	}
	defer leave()
	return v.server.sessions.SessionEvents(ctx, v.c.backend, v.id, v.c.process(), v.from, v.stream)
}

// put writes what a look has found, and a sign of life if that is nothing and one is due. over: it was the end.
func (v *eventsView) put(b SessionBatch) (over bool, err error) {
	for _, ev := range b.Events {
		if err := v.write(ev.Type, ev.Seq, ev); err != nil {
			return false, err
		}
		v.from = max(v.from, ev.Seq+1) // one without a number is 0
		if ev.Type == SessionEnd {
			b.End, over = "", true // which is numbered
		}
	}
	switch {
	case b.End != "":
		over = true
		err = v.write(SessionEnd, 0, SessionEvent{
			Type: SessionEnd, Backend: v.session.Backend, Service: v.session.Service, Gen: v.session.Gen, Time: time.Now(), Reason: b.End,
		})
	case time.Since(v.wrote) >= v.every:
		err = v.print(": beat\n\n")
	}
	if err != nil {
		return over, err
	}
	return over, v.rc.Flush()
}

// write writes one event; one without a number if that is 0.
func (v *eventsView) write(name string, seq uint64, data any) error {
	b, err := json.Marshal(data)
	if err != nil {
		return fmt.Errorf("encode an event: %w", err)
	}
	id := ""
	if seq != 0 {
		id = "id: " + strconv.FormatUint(seq, 10) + "\n"
	}
	return v.print(id + "event: " + name + "\ndata: " + string(b) + "\n\n")
}

// print gives a reader that takes nothing up after a while.
func (v *eventsView) print(text string) error {
	v.wrote = time.Now()
	if err := v.rc.SetWriteDeadline(v.wrote.Add(v.server.slowest)); err != nil {
		return err
	}
	_, err := io.WriteString(v.w, text)
	return err
}

// wait returns when there may be something new or a sign of life is due; false when there will be nothing new any more.
func (v *eventsView) wait(ctx context.Context) bool {
	due, cancel := context.WithDeadline(ctx, v.wrote.Add(v.every))
	defer cancel()
	for {
		ev, err := v.hints.Next(due)
		switch {
		case errors.Is(err, ErrLogClosed):
			return false
		case err != nil:
			return ctx.Err() == nil
		case v.concerns(ev):
			// One look sees all that has happened.
			for more := true; more; _, more = v.hints.TryNext() {
			}
			return true
		}
	}
}

// concerns says whether there may be something new for the session after an event of the log.
func (v *eventsView) concerns(ev Event) bool {
	id, named := ev.Fields["session"].(string)
	return ev.Type == EventLost || ev.Type == EventSession && (!named || id == v.id)
}

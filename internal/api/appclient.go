// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"sync/atomic"
	"time"
)

// maxSessionEvent bounds one event of a session's stream, its lines included: the longest is a Session with 256 leases.
const maxSessionEvent = 1 << 20

// OpenSession registers this process with its backend.
func (c *Client) OpenSession(ctx context.Context, r SessionRequest) (Session, error) {
	var s Session
	err := c.doAs(ctx, "", http.MethodPost, "/v1/session", r, &s)
	return s, err
}

// SessionCall has a session say or ask something: ErrUnknownSession if it must register anew, ErrFlushing of a hold that comes
// too late, ErrStale, ErrNotPossible. An empty id is the only session of this process. The answer to end is empty.
func (c *Client) SessionCall(ctx context.Context, id string, q SessionCall) (Session, error) {
	var (
		s    Session
		body any
	)
	switch q.Op {
	case "get":
		return s, c.doAs(ctx, id, http.MethodGet, "/v1/session", nil, &s)
	case "end":
		return s, c.doAs(ctx, id, http.MethodDelete, "/v1/session", nil, nil)
	case "ack":
		body = ackRequest{q.Seq}
	case "heartbeat":
		body = heartbeatRequest{q.Remaining}
	case "hold":
		body = holdRequest{q.ID, q.Name}
	case "release":
		body = releaseRequest{q.ID, q.Name}
	case "flushed":
		body = flushedRequest{q.Drain, q.Error}
	case "extend":
		body = extensionRequest{q.ByMS, q.Drain}
	default:
		return s, fmt.Errorf("%q is nothing that a session says", q.Op)
	}
	err := c.doAs(ctx, id, http.MethodPost, "/v1/session/"+q.Op, body, &s)
	return s, err
}

// EndSession ends a session, whose leases are released.
func (c *Client) EndSession(ctx context.Context, id string) error {
	_, err := c.SessionCall(ctx, id, SessionCall{Op: "end"})
	return err
}

// SessionEvents opens the stream of a session's events from number from on (0: behind the last acknowledged one) and returns
// when the server has sent what the session is. ctx holds for the stream's whole life.
func (c *Client) SessionEvents(ctx context.Context, id string, from uint64) (*SessionStream, error) {
	target := "/v1/session/events"
	if from > 0 {
		target += "?" + url.Values{"from": {strconv.FormatUint(from, 10)}}.Encode()
	}
	resp, err := c.sendAs(ctx, id, http.MethodGet, target, nil)
	if err != nil {
		return nil, err
	}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, maxSessionEvent)
	s := &SessionStream{ctx: ctx, path: c.path, body: resp.Body, lines: lines}
	name, data, err := s.next()
	if err == nil && name != "session" {
		err = fmt.Errorf("it begins with %q", name)
	}
	if err == nil {
		err = json.Unmarshal(data, &s.Session)
	}
	if err != nil {
		return nil, errors.Join(s.fail(err), s.Close())
	}
	return s, nil
}

// SessionStream is an open stream of a session's events. It belongs to one goroutine.
type SessionStream struct {
	Session Session // as it was when the stream was opened

	ctx   context.Context // that of the request; for the cause of its end
	path  string
	body  io.ReadCloser
	lines *bufio.Scanner
}

// errSilent: nothing was read for so long that the server is taken for lost.
var errSilent = errors.New("nothing is heard of it")

// Close ends the stream. It is idempotent.
func (s *SessionStream) Close() error { return s.body.Close() }

// All yields the events, the last of which is an end unless the connection is lost: then, or when nothing was heard for as
// long as the session's lost_ms, an error is yielded once, last. It can be used once.
func (s *SessionStream) All() iter.Seq2[SessionEvent, error] {
	return func(yield func(SessionEvent, error) bool) {
		for {
			var ev SessionEvent
			_, data, err := s.next()
			if err == nil {
				err = json.Unmarshal(data, &ev)
			}
			if err != nil {
				yield(SessionEvent{}, s.fail(err))
				return
			}
			if !yield(ev, nil) || ev.Type == SessionEnd {
				return
			}
		}
	}
}

func (s *SessionStream) fail(err error) error {
	if s.ctx.Err() != nil {
		err = context.Cause(s.ctx)
	}
	return fmt.Errorf("read a session's events from %s: %w", s.path, err)
}

// next reads one event: its name and its data. Comments and fields that are not known are passed over (HTML Living Standard,
// "Interpreting an event stream").
func (s *SessionStream) next() (name string, data []byte, err error) {
	patience := cmp.Or(time.Duration(s.Session.LostMS)*time.Millisecond, dialTimeout+answerTimeout)
	var lost atomic.Bool
	silence := time.AfterFunc(patience, func() {
		lost.Store(true)
		_ = s.body.Close() // the reader is told
	})
	defer silence.Stop()
	for size := 0; s.lines.Scan(); {
		silence.Reset(patience)
		line := bytes.TrimSuffix(s.lines.Bytes(), []byte("\r"))
		if len(line) == 0 {
			if data != nil {
				return name, data, nil
			}
			name, size = "", 0
			continue
		}
		if size += len(line); size > maxSessionEvent {
			return "", nil, bufio.ErrTooLong
		}
		field, value, _ := bytes.Cut(line, []byte(":"))
		value = bytes.TrimPrefix(value, []byte(" "))
		switch string(field) {
		case "event":
			name = string(value)
		case "data":
			if data != nil {
				data = append(data, '\n')
			}
			data = append(data, value...)
		}
	}
	switch err := s.lines.Err(); {
	case lost.Load():
		return "", nil, errSilent
	case err != nil:
		return "", nil, err
	}
	return "", nil, io.ErrUnexpectedEOF
}

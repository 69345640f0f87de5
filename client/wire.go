// SPDX-License-Identifier: Apache-2.0

package client

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"
)

// Bounds on what is read, against a server that is none of ours.
const (
	maxAnswer = 1 << 20
	maxLine   = 1 << 20
	// An agent that is there answers at once. One that has stopped must not hold a request until it is lost.
	answerTimeout = 5 * time.Second
	// The agent takes no longer reason or error, in bytes.
	maxText = 1024
)

// clip shortens what would be refused for its length.
func clip(s string) string {
	if len(s) > maxText {
		s = strings.ToValidUTF8(s[:maxText], "")
	}
	return s
}

// wireSession is a session as the agent tells it; see docs/protocol.md.
type wireSession struct {
	ID          string `json:"session"`
	Backend     string `json:"backend"`
	Service     string `json:"service"`
	Gen         uint64 `json:"gen"`
	Acked       uint64 `json:"acked"`
	HeartbeatMS int64  `json:"heartbeat_ms"`
	SuspectMS   int64  `json:"suspect_ms"`
	LostMS      int64  `json:"lost_ms"`
}

// wireEvent is a message of the agent.
type wireEvent struct {
	Seq        uint64    `json:"seq"`
	Type       string    `json:"type"`
	Drain      string    `json:"drain"`
	Cause      string    `json:"cause"`
	Reason     string    `json:"reason"`
	Deadline   time.Time `json:"deadline"`
	FlushBy    time.Time `json:"flush_by"`
	TimeLeftMS *int64    `json:"time_left_ms"`
	Key        string    `json:"key"`
	Outcome    string    `json:"outcome"`
}

// drainAnswer is what the agent answers to a request for a drain.
type drainAnswer struct {
	ID        string `json:"id"`
	WouldHave bool   `json:"would_have"` // it only takes note
}

// wireCall is the body of every request; a request uses some of it.
type wireCall struct {
	Role      string `json:"role,omitempty"`
	Version   int64  `json:"version,omitempty"`
	Bound     bool   `json:"bound,omitempty"`
	Remaining *int64 `json:"remaining,omitempty"`
	Seq       uint64 `json:"seq,omitempty"`
	ID        string `json:"id,omitempty"`
	Name      string `json:"name,omitempty"`
	Drain     string `json:"drain,omitempty"`
	Error     string `json:"error,omitempty"`
	ByMS      int64  `json:"by_ms,omitempty"`
	Reason    string `json:"reason,omitempty"`
}

// wire is HTTP over the agent's socket. Its methods may be called from any goroutine.
type wire struct{ http *http.Client }

func newWire(dial func(context.Context) (net.Conn, error)) *wire {
	return &wire{&http.Client{
		Transport: &http.Transport{
			DialContext:           func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
			ResponseHeaderTimeout: 2 * answerTimeout, // of the stream; everything else has answerTimeout in all
			MaxIdleConnsPerHost:   1,
			IdleConnTimeout:       30 * time.Second,
			DisableCompression:    true,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
}

// problem is an RFC 9457 problem document, as the agent answers errors. The last part of its type, which is a tag URI, is the kind.
type problem struct {
	Type   string `json:"type"`
	Title  string `json:"title"`
	Detail string `json:"detail"`
	Status int    `json:"status"`
}

// request sends one request. The error is a *Refusal if the answer is not 2xx, and anything else if there is none.
func (w *wire) request(ctx context.Context, method, path, session string, in any) (*http.Response, error) {
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return nil, fmt.Errorf("encode a request: %w", err)
		}
		body = bytes.NewReader(b)
	}
	// The host is not used: the transport dials the socket.
	req, err := http.NewRequestWithContext(ctx, method, "http://ebb"+path, body)
	if err != nil {
		return nil, fmt.Errorf("make a request: %w", err)
	}
	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if session != "" {
		req.Header.Set("Ebb-Session", session)
	}
	res, err := w.http.Do(req)
	if err != nil {
		return nil, err
	}
	if res.StatusCode/100 == 2 {
		return res, nil
	}
	defer res.Body.Close()
	p := problem{Title: res.Status}
	// What is not a problem document has its status to say.
	if b, err := io.ReadAll(io.LimitReader(res.Body, maxAnswer)); err == nil {
		_ = json.Unmarshal(b, &p)
	}
	return nil, &Refusal{
		Kind: p.Type[strings.LastIndexByte(p.Type, ':')+1:], Status: res.StatusCode, Detail: cmp.Or(p.Detail, p.Title),
	}
}

// call asks for something and reads the answer into out, if there is one.
func (w *wire) call(ctx context.Context, method, path, session string, in, out any) error {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	res, err := w.request(ctx, method, path, session, in)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(io.LimitReader(res.Body, maxAnswer))
	if err != nil {
		return fmt.Errorf("read the answer: %w", err)
	}
	if out == nil || len(b) == 0 {
		return nil
	}
	if err := json.Unmarshal(b, out); err != nil {
		return fmt.Errorf("read the answer: %w", err)
	}
	return nil
}

// errStreamEnded: the stream has ended without saying why.
var errStreamEnded = errors.New("the stream has ended")

// readStream reads an event stream (WHATWG HTML, 9.2.6) until it ends. heard is called for each line, comments too, and
// event for each message; an error of it ends the reading.
func readStream(r io.Reader, heard func(), event func(typ string, data []byte) error) error {
	sc := bufio.NewScanner(r)
	sc.Buffer(make([]byte, 0, 4<<10), maxLine)
	var typ string
	var data []byte
	for sc.Scan() {
		heard()
		name, value, _ := strings.Cut(sc.Text(), ":")
		value = strings.TrimPrefix(value, " ")
		switch {
		case sc.Text() == "":
			if data != nil {
				if err := event(typ, data); err != nil {
					return err
				}
			}
			typ, data = "", nil
		case name == "event":
			typ = value
		case name == "data":
			if data != nil {
				data = append(data, '\n')
			}
			data = append(data, value...)
		}
	}
	if err := sc.Err(); err != nil {
		return fmt.Errorf("read the stream: %w", err)
	}
	return errStreamEnded
}

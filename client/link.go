// SPDX-License-Identifier: Apache-2.0

package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"
)

// The pause between two attempts to connect doubles from the first to the longest. It ends when a heartbeat is answered.
const (
	firstPause   = time.Second
	longestPause = 30 * time.Second
)

// next is what follows the end of a stream.
type next int

const (
	never next = iota // evicted
	again             // come back at once: it is restarting, it has broken, or it does not know us
	soon              // nobody answers
	later             // asked to stay away for a while, or refused
)

// link keeps the session registered and its stream open. tried is called after the first attempt.
func (s *Session) link(tried func()) {
	defer tried()
	var last time.Time // time of the last attempt that was made at once
	before := never
	for fails := 0; ; fails++ {
		begun := time.Now()
		what, read := s.stream(tried)
		tried()
		if what != before {
			fails, before = 0, what // the longest pause is for what goes on and on
		}
		switch what {
		case never:
			return
		case again:
			if time.Since(last) > firstPause {
				last = time.Now()
				continue
			}
			fails = 0
		case later:
			// One that lasted shows that the reason has gone.
			if read && time.Since(begun) > longestPause {
				fails = 0
			}
		}
		pause := min(firstPause<<min(fails, 8), longestPause)
		pause += time.Duration((rand.Float64() - 0.5) / 2 * float64(pause))
		select {
		case <-s.kick: // of before
		default:
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-s.kick:
			timer.Stop()
		case <-s.quitting.Done():
			timer.Stop()
			return
		}
	}
}

// stream registers, if need be, and reads events until they end. read: the agent has said something.
func (s *Session) stream(tried func()) (what next, read bool) {
	ctx, cancel := context.WithCancel(s.quitting)
	defer cancel()
	s.do(func() { s.closeLink = cancel })
	id, err := s.register(ctx)
	if err != nil {
		return s.refused(err), false
	}
	tried()
	res, err := s.wire.request(ctx, "GET", "/v1/session/events", id, nil)
	if err != nil {
		return s.refused(err), false
	}
	defer res.Body.Close()
	var suspect time.Duration
	if !s.do(func() { suspect = s.limits.suspect }) {
		return never, false
	}
	silence := time.AfterFunc(suspect, cancel)
	defer silence.Stop()
	err = readStream(res.Body, func() {
		silence.Reset(suspect)
		s.do(s.heardNow)
	}, func(typ string, data []byte) error {
		read = true
		return s.event(typ, data)
	})
	end := streamEnd("")
	switch {
	case s.quitting.Err() != nil || errors.As(err, &end) && end == "evicted":
		return never, read
	case end != "" && end != "agent_restarting":
		return later, read
	case !read:
		return soon, read
	}
	s.o.Log.Debug("stream of events ended", "err", err)
	return again, read
}

// streamEnd is the reason with which the agent has ended a stream.
type streamEnd string

func (e streamEnd) Error() string { return "the stream has ended: " + string(e) }

// event handles one message of the stream.
func (s *Session) event(typ string, data []byte) error {
	if typ == "session" {
		var ws wireSession
		if err := json.Unmarshal(data, &ws); err != nil {
			return fmt.Errorf("read a session: %w", err)
		}
		s.do(func() { s.level(ws) })
		return nil
	}
	var ev wireEvent
	if err := json.Unmarshal(data, &ev); err != nil {
		return fmt.Errorf("read an event: %w", err)
	}
	ev.Type = typ
	s.do(func() { s.apply(ev) })
	if typ == "end" {
		return streamEnd(ev.Reason)
	}
	return nil
}

// register returns the id of the session, a new one if there is none.
func (s *Session) register(ctx context.Context) (string, error) {
	in := wireCall{Role: "app", Version: s.o.Version, Bound: true}
	var id string
	if !s.do(func() { id, in.Remaining = s.id, s.remaining }) {
		return "", ErrStopped
	}
	if id != "" {
		return id, nil
	}
	var ws wireSession
	if err := s.wire.call(ctx, "POST", "/v1/session", "", in, &ws); err != nil {
		return "", err
	}
	if ws.ID == "" {
		return "", errors.New("the agent gave no session")
	}
	s.do(func() {
		s.id, s.seq, s.acked = ws.ID, 0, 0
		for name, l := range s.leases {
			l.told, l.known = false, false
			s.forget(name, l)
		}
		s.refusals = 0
		s.heardNow()
		s.level(ws)
		s.o.Log.Info("registered", "backend", ws.Backend, "gen", ws.Gen)
		s.beat = s.heard.Add(s.limits.heartbeat)
		s.nudge()
	})
	return ws.ID, nil
}

// level takes over what the agent says of the session.
func (s *Session) level(ws wireSession) {
	s.status.Backend, s.status.Service, s.status.Gen = ws.Backend, ws.Service, ws.Gen
	s.acked = ws.Acked
	if l := (limits{millis(ws.HeartbeatMS), millis(ws.SuspectMS), millis(ws.LostMS)}); l.heartbeat > 0 && l.suspect > 0 && l.lost > 0 {
		s.limits = l
	}
}

func millis(n int64) time.Duration { return time.Duration(n) * time.Millisecond }

// heardNow notes a sign of the agent's life.
func (s *Session) heardNow() {
	s.heard = time.Now()
	if !s.retry.IsZero() && s.refusals == 0 {
		s.retry = time.Time{}
		s.nudge()
		poke(s.kick)
	}
}

// refused says what follows an attempt that failed.
func (s *Session) refused(err error) next {
	r := (*Refusal)(nil)
	switch {
	case s.quitting.Err() != nil:
		return never
	case errors.Is(err, errUnknownSession):
		s.do(s.forgotten)
		return again
	case errors.As(err, &r):
		s.o.Log.Debug("agent refuses", "err", err)
		return later
	}
	s.o.Log.Debug("connect to the agent", "err", err)
	return soon
}

// forgotten: the agent does not know the session any more.
func (s *Session) forgotten() {
	if s.id == "" {
		return
	}
	s.o.Log.Info("the agent does not know the session any more")
	s.id = ""
	s.think(HealthNone)
	s.closeLink()
}

// SPDX-License-Identifier: Apache-2.0

package client

import (
	"errors"
	"time"
)

// sendPause is how long nothing is sent after a request that the agent has not answered. With each more that is refused for now it
// doubles, up to the pause between two heartbeats: a longer one would be taken for silence.
const sendPause = time.Second

// message is one request to the agent, and what its answer changes.
type message struct {
	path string
	in   wireCall
	out  any                            // nil: the answer says nothing new
	done func(answered bool, err error) // answered: the agent has decided; see answered
}

// send tells the agent, one after the other, what it should know and does not: the difference between what is and what it has
// been told, so that nothing is lost with a request, a connection or a session.
func (s *Session) send() {
	for {
		select {
		case <-s.wake:
		case <-s.quitting.Done():
			return
		}
		for s.sendOne() {
		}
	}
}

// sendOne sends one request and returns whether there may be more.
func (s *Session) sendOne() (more bool) {
	var m *message
	var id string
	s.do(func() { id, m = s.id, s.nextMessage(time.Now()) })
	if m == nil {
		return false
	}
	err := s.wire.call(s.quitting, "POST", "/v1/session/"+m.path, id, m.in, m.out)
	unknown := errors.Is(err, errUnknownSession)
	answered := answered(err) && !unknown
	s.do(func() {
		if s.id != id {
			return // registered anew meanwhile
		}
		switch {
		case unknown:
			s.forgotten()
		case answered:
			s.refusals = 0
			s.heardNow()
			s.beat = s.heard.Add(s.limits.heartbeat)
			more = true
		case s.status.Evicted:
			s.acked = s.seq // it was the last thing to say
		default:
			if r := (*Refusal)(nil); errors.As(err, &r) {
				s.refusals++
				s.o.Log.Debug("agent refuses", "request", m.path, "err", err)
			}
			s.retry = time.Now().Add(min(sendPause<<min(max(s.refusals-1, 0), 8), max(sendPause, s.limits.heartbeat)))
		}
		m.done(answered, err)
		if !s.connected() {
			s.holdAlone()
		}
	})
	return more
}

// nextMessage is what the agent should be told now, or nil.
func (s *Session) nextMessage(now time.Time) *message {
	if s.id == "" || now.Before(s.retry) {
		return nil
	}
	if a := s.answer; a != nil && s.flushing != "" {
		in := wireCall{Drain: s.flushing}
		if a.err != nil {
			in.Error = clip(a.err.Error())
		}
		return &message{path: "flushed", in: in, done: func(answered bool, _ error) {
			if answered && s.flushing == in.Drain {
				s.flushing = ""
				a.heard()
			}
		}}
	}
	if seq := s.seq; s.acked < seq {
		return &message{path: "ack", in: wireCall{Seq: seq}, done: func(answered bool, _ error) {
			if answered {
				s.acked = max(s.acked, seq)
			}
		}}
	}
	if s.status.Evicted {
		return nil
	}
	if d := s.drain; d != nil && d.ask != "" {
		out := new(drainAnswer)
		return &message{path: "drain", in: wireCall{Reason: clip(d.ask)}, out: out, done: func(answered bool, err error) {
			if !answered {
				return
			}
			d.ask = ""
			if err == nil && !out.WouldHave && s.drain == d && d.id == "" {
				d.id, d.led = out.ID, true
				s.lead()
			}
		}}
	}
	for name, l := range s.leases {
		switch {
		case l.n > 0 && !l.known:
			l.told = true
			return &message{path: "hold", in: wireCall{ID: name, Name: name}, done: func(answered bool, err error) {
				if !answered {
					err = nil // held here alone, until the agent can be told
				}
				l.known = answered // what is refused is not asked again
				s.answerHolds(name, l, err)
			}}
		case l.n == 0 && l.told:
			l.known = false // a hold that begins meanwhile is told anew
			return &message{path: "release", in: wireCall{ID: name}, done: func(answered bool, _ error) {
				l.told = !answered
				s.forget(name, l)
			}}
		}
	}
	if now.Before(s.beat) && s.retry.IsZero() { // after one that was lost, any will do to find out
		return nil
	}
	return &message{path: "heartbeat", in: wireCall{Remaining: s.remaining}, done: func(bool, error) {}}
}

// SPDX-License-Identifier: Apache-2.0

package probes

import (
	"fmt"
	"net/netip"
	"time"
)

// Sample is one look at one connection. The three ages are differences to one reading of the clock, in steps of the
// kernel's tick: equal ages mean the same tick.
type Sample struct {
	PID, FD       int // the process and descriptor that hold it; FD is -1 if that is not known
	Inode         uint64
	Cookie        uint64
	Listener      uint64 // cookie of the listener that it came through; 0: not known
	State         uint8
	Local, Remote netip.AddrPort

	Unread        uint32 // bytes received that the application has not read
	Unacked       uint32 // bytes sent and not acknowledged
	Unsent        uint32 // bytes written and not sent
	BytesReceived uint64 // in sequence; the peer's FIN counts as one, as in the kernel
	BytesSent     uint64
	BytesAcked    uint64
	DataSegsIn    uint32
	DataSegsOut   uint32
	RcvNxtSndWl1  int32  // rcv_nxt - snd_wl1; not read unless the look is full
	SndWnd        uint32 // the peer's window in bytes; [UnknownWindow] if not known
	Retrans       uint32 // segments sent again; 0 if not known

	LastSent time.Duration // since data was last sent
	LastRecv time.Duration // since data last came
	LastAck  time.Duration // since anything last came, a bare ACK included
	Since    time.Duration // since it was established; 0: not known

	Shutdown uint8 // bit 0: reading is shut down, bit 1: writing
	MPTCP    bool
}

// SampleReader reads the sockets that a process holds, LISTEN and CLOSE among them. A process that has exited has none.
type SampleReader interface {
	Samples(pid int) ([]Sample, error)
}

// SampleFromSocket makes a sample of what sock_diag tells. It is partial if the socket was listed without [TCPInfo]: then
// nothing but state and queues is known. That is so if it was not asked for, and for a connection in FIN_WAIT2 that the
// application has closed, whose rest the kernel keeps in little. Even a whole one lacks RcvNxtSndWl1, PID and FD.
func SampleFromSocket(s Socket) (sample Sample, partial bool) {
	sample = Sample{
		FD: -1, Inode: uint64(s.Inode), Cookie: s.Cookie, State: s.State, Local: s.Local, Remote: s.Remote,
		Unread: s.RQueue, Unacked: s.WQueue, SndWnd: UnknownWindow, Shutdown: s.Shutdown, MPTCP: s.MPTCP,
	}
	if s.Info == nil {
		return sample, true
	}
	i := s.Info
	sample.Unsent = min(i.NotSent, s.WQueue)
	sample.Unacked = s.WQueue - sample.Unsent
	sample.BytesReceived, sample.BytesSent, sample.BytesAcked = i.BytesReceived, i.BytesSent, i.BytesAcked
	sample.DataSegsIn, sample.DataSegsOut = i.DataSegsIn, i.DataSegsOut
	sample.SndWnd, sample.Retrans = i.SndWnd, i.TotalRetrans
	sample.LastSent, sample.LastRecv, sample.LastAck = i.LastSent, i.LastRecv, i.LastAck
	return sample, false
}

// peerFIN says that the peer's FIN has been taken in, and with it one number of the sequence.
func (s *Sample) peerFIN() bool {
	switch s.State {
	case StateCloseWait, StateLastAck, StateClosing:
		return true
	}
	return false
}

// ourFIN says that our side has closed or shut down writing.
func (s *Sample) ourFIN() bool {
	switch s.State {
	case StateFinWait1, StateFinWait2, StateClosing, StateLastAck:
		return true
	}
	return false
}

// unread is the data not read, without the peer's FIN.
func (s *Sample) unread() uint32 {
	// An application that has read the end has read the FIN's number too. MPTCP counts packets here, and no FIN.
	if s.peerFIN() && !s.MPTCP && s.Unread > 0 {
		return s.Unread - 1
	}
	return s.Unread
}

// received is the data received, without the peer's FIN.
func (s *Sample) received() uint64 {
	if s.peerFIN() && s.BytesReceived > 0 {
		return s.BytesReceived - 1
	}
	return s.BytesReceived
}

// queued is what the application has written and the peer has not acknowledged.
func (s *Sample) queued() uint64 { return uint64(s.Unacked) + uint64(s.Unsent) }

// quiet is how long no data has passed either way.
func (s *Sample) quiet() time.Duration { return min(s.LastSent, s.LastRecv) }

// Class says what a connection is doing. The classes exclude each other.
type Class uint8

// The classes of a connection.
const (
	ClassUnknown   Class = iota // cannot be told; callers treat it as active
	ClassHandshake              // half-open
	ClassQueued                 // established, not yet accepted by the application
	ClassActive                 // a request is being received or answered, or the answer is not acknowledged
	ClassIdle                   // between requests
	ClassUnused                 // never carried a byte
	ClassStalled                // the peer takes nothing of what is to be sent
	ClassClosing                // our side has sent FIN, and all data is acknowledged
)

func (c Class) String() string {
	switch c {
	case ClassUnknown:
		return "unknown"
	case ClassHandshake:
		return "handshake"
	case ClassQueued:
		return "queued"
	case ClassActive:
		return "active"
	case ClassIdle:
		return "idle"
	case ClassUnused:
		return "unused"
	case ClassStalled:
		return "stalled"
	case ClassClosing:
		return "closing"
	}
	return fmt.Sprintf("class %d", uint8(c))
}

// Verdict is what a look concluded about one connection.
type Verdict struct {
	Sample
	Class    Class
	Pushing  bool          // the server sends without being asked; such a connection is active
	Requests uint32        // at most so many requests were served, ever: the smaller of the data segments in and out
	Cycles   uint32        // looks at which data had come and gone since the look before: so many answers were seen at least
	IdleFor  time.Duration // since data last passed either way; of an unused connection its age, 0 if not known

	strict bool // judged under http1
}

// The protocols of a classifier.
const (
	ProtocolHTTP1  = "http1"
	ProtocolOpaque = "opaque"
)

// ClassifierOptions configures a [Classifier].
type ClassifierOptions struct {
	Protocol  string        // "http1" or "opaque"; the default is opaque
	IdleAfter time.Duration // under opaque: quiet for so long is idle; the default is 10 s
}

const (
	defaultIdleAfter = 10 * time.Second

	// ackWindow bounds how late an ACK may follow data to be the ACK of our answer: a receiver delays it for 200 ms at
	// most (TCP_DELACK_MAX), and one tick. What comes later may answer a keepalive, whose interval is 1 s at least.
	ackWindow = 250 * time.Millisecond

	// stallAfter is how long a peer must have acknowledged nothing, and said nothing, to be stalled while its window is
	// open. It is the initial retransmission timeout of RFC 6298: a shorter silence can be a long path.
	stallAfter = time.Second

	// pushQuiet is the least time that a connection which has pushed must be quiet, after the peer has spoken again,
	// to be idle; and pushGaps how many times its longest pause so far.
	pushQuiet = 2500 * time.Millisecond
	pushGaps  = 2

	// What follows bounds the beginning of a connection in which a server speaks without having answered: session
	// tickets of TLS 1.3, SETTINGS of HTTP/2. See [Classifier].
	reflex        = time.Second      // far more than a busy server takes for what needs no application
	beginning     = 10 * time.Second // in which clients give up a TLS handshake (net/http: 10 s)
	beginningSegs = 8
)

// Classifier tells the classes of connections apart from one look to the next, without touching a byte. It remembers
// each connection, by cookie or else by inode, while looks show it. It is not safe for concurrent use.
//
// # http1
//
// For strict request and response in the clear. A connection whose FIN is out with all data acknowledged is closing; one
// that never carried a byte is unused; one whose peer takes nothing is stalled. What has unread, unsent or unacknowledged
// data, or has received but never sent, is active. Else the direction of the last data decides: the peer's makes it active,
// ours idle. TCP keepalives move neither clock.
//
// Within one tick of the kernel (4 ms at HZ 250, usual for a fast server) the clocks are equal and the sequence numbers
// decide. The peer's next request acknowledges our last answer in the same segment, so: while our answer is not
// acknowledged no request has come after it, and it will be idle once it is. If the last segment that moved snd_wl1
// carried data (rcv_nxt ≠ snd_wl1), that is a request to be answered. If it was a bare ACK, it acknowledged our answer;
// but a late one may have answered a keepalive (a Go server sends them after 15 s) and a peer's FIN looks the same: then it is
// unknown. Without the sequence numbers (sock_diag) a tie is unknown.
//
// An answer holds while no byte has passed, so what is told once stays told when a keepalive blurs it: look at least
// once per keepalive interval. Between two looks, data in alone makes a connection active, data out alone idle.
//
// Data out alone while it *was* idle shows a server that pauses inside its response, or streams (SSE, WebSocket). Such a
// connection is pushing and active, from its first pause on. It stays so until its peer has spoken again and it has then been
// quiet for 2.5 s and twice its longest pause. Blind spots are that first pause, pipelined requests (the first answer
// looks like the last) and a WebSocket whose client spoke last (active for ever).
//
// # opaque
//
// For everything else: TLS, HTTP/2, any protocol. The rules for closing, unused, stalled and queued data are the same. A
// connection is idle only if no data has passed for IdleAfter *and* ours was the last. If the peer's was the last,
// it may wait for an answer, however long: active.
//
// Not all that a server sends is an answer. After a TLS 1.3 handshake it sends session tickets, often when the first
// request is already there; in HTTP/2 it sends SETTINGS, and acknowledges those of its peer. Such a reflex comes at once, at
// the beginning, after at least two segments of the peer. So a connection whose every segment may belong to such a beginning (2
// to 8 data segments in; the last data out within 1 s of the last in, and within 10 s of the connection's start if that is
// known) is unknown rather than idle: it may be waiting for its first answer. An answer given later than that, or a
// ninth segment, clears it. The price is that a connection which has only shaken hands, or was used a few
// times right after it was opened and never since, is not called idle.
//
// HTTP/2 remains partly out of sight: a request that is pending while another stream is answered, a ping answered or
// a window enlarged (for uploads) looks idle after IdleAfter of silence. An application that speaks HTTP/2 should be told to
// wind down at notify.
type Classifier struct {
	http1     bool
	idleAfter time.Duration
	seen      map[connID]*track
}

// connID is the cookie of a connection, or its inode where no cookie is known.
type connID struct {
	number uint64
	inode  bool
}

func idOf(s *Sample) connID {
	if s.Cookie != 0 {
		return connID{number: s.Cookie}
	}
	return connID{number: s.Inode, inode: true}
}

// turn says whose move it is.
type turn uint8

const (
	turnUnknown turn = iota
	turnOurs         // the peer's data came last: it waits for an answer
	turnPeers        // our data came last: it was answered
)

// past is what the next look needs of a sample: a backend may have a hundred thousand connections.
type past struct {
	in, out               uint32 // DataSegsIn, DataSegsOut
	received, sent, acked uint64
	queued                uint64
	quiet                 time.Duration
}

func (s *Sample) past() past {
	return past{s.DataSegsIn, s.DataSegsOut, s.received(), s.BytesSent, s.BytesAcked, s.queued(), s.quiet()}
}

// track is the history of one connection.
type track struct {
	at     time.Time // of the last look
	last   past
	class  Class
	turn   turn // holds while no byte passes
	firm   bool // two looks in a row came to this turn by themselves
	cycles uint32

	moved time.Time // when the peer was last seen to take something, or nothing was queued

	pushing bool
	asked   bool          // the peer has spoken since the last push
	pause   time.Duration // the longest before a push
}

// NewClassifier returns a classifier that has seen nothing. A protocol that it does not know is treated as opaque, which
// claims least.
func NewClassifier(o ClassifierOptions) *Classifier {
	if o.IdleAfter <= 0 {
		o.IdleAfter = defaultIdleAfter
	}
	return &Classifier{http1: o.Protocol == ProtocolHTTP1, idleAfter: o.IdleAfter, seen: map[connID]*track{}}
}

// Look judges one complete look, taken at now on a clock that does not step: what is not in it is forgotten. full says that
// the samples have RcvNxtSndWl1. Listeners and sockets in CLOSE or TIME_WAIT get no verdict; a connection that several
// descriptors show gets one. Verdicts are in the order of the samples.
func (c *Classifier) Look(now time.Time, samples []Sample, full bool) []Verdict {
	verdicts := make([]Verdict, 0, len(samples))
	next := make(map[connID]*track, len(samples))
	for i := range samples {
		s := &samples[i]
		switch s.State {
		case StateListen, StateClose, StateTimeWait, StateSynSent:
			continue
		}
		id := idOf(s)
		if next[id] != nil {
			continue
		}
		t := c.seen[id]
		if t == nil {
			t = &track{moved: now}
		}
		next[id] = t
		verdicts = append(verdicts, c.judge(t, now, s, full))
	}
	c.seen = next
	return verdicts
}

func (c *Classifier) judge(t *track, now time.Time, s *Sample, full bool) Verdict {
	first := t.at.IsZero()
	in, out := s.DataSegsIn-t.last.in, s.DataSegsOut-t.last.out
	if first {
		in, out = 0, 0
	}
	if in > 0 && out > 0 {
		t.cycles++
	}
	progress := s.BytesAcked != t.last.acked || s.queued() < t.last.queued
	if first || progress || s.queued() == 0 || t.last.queued == 0 {
		t.moved = now
	}
	t.take(s, full, first, in, out)
	t.push(now, s, in, out)

	v := Verdict{Sample: *s, Requests: min(s.DataSegsIn, s.DataSegsOut), Cycles: t.cycles, IdleFor: s.quiet(), strict: c.http1}
	v.Class = c.class(t, now, s)
	if v.Class == ClassUnused {
		v.IdleFor = s.Since
	}
	if c.http1 && v.Class == ClassIdle && t.pushing {
		if t.asked && s.quiet() >= max(pushQuiet, pushGaps*t.pause) {
			t.pushing = false
		} else {
			v.Class = ClassActive
		}
	}
	v.Pushing = t.pushing
	t.at, t.last, t.class = now, s.past(), v.Class
	return v
}

// class is the class but for pushing.
func (c *Classifier) class(t *track, now time.Time, s *Sample) Class {
	switch s.State {
	case StateSynRecv, stateNewSynRecv:
		return ClassHandshake
	}
	if s.ourFIN() && s.queued() <= 1 { // the FIN's own number may be on its way
		return ClassClosing
	}
	if s.Inode == 0 && !s.ourFIN() {
		return ClassQueued
	}
	queued := s.queued() > 0
	switch {
	case s.received() == 0 && s.BytesSent == 0 && !queued && s.unread() == 0:
		return ClassUnused
	case queued && s.SndWnd == 0:
		return ClassStalled
	case queued && now.Sub(t.moved) >= stallAfter && s.LastAck >= stallAfter:
		return ClassStalled
	case s.unread() > 0, queued:
		return ClassActive
	case s.BytesSent == 0:
		return ClassActive // received, and never answered
	}
	switch t.turn {
	case turnOurs:
		return ClassActive
	case turnUnknown:
		return ClassUnknown
	}
	if c.http1 {
		return ClassIdle
	}
	switch {
	case s.quiet() < c.idleAfter:
		return ClassActive
	case mayBeBeginning(s):
		return ClassUnknown
	}
	return ClassIdle
}

// take finds out whose turn it is. See [Classifier] for the rule.
func (t *track) take(s *Sample, full, first bool, in, out uint32) {
	fresh := turnNow(s, full)
	still := !first && s.received() == t.last.received && s.BytesSent == t.last.sent
	if fresh == turnUnknown && !first && !still {
		switch {
		case in > 0 && out == 0:
			fresh = turnOurs
		case in == 0 && out > 0:
			fresh = turnPeers
		}
	}
	switch {
	case !still:
		t.turn, t.firm = fresh, false
	case fresh == t.turn:
		t.firm = true
	case fresh == turnOurs, t.turn == turnUnknown:
		t.turn, t.firm = fresh, false
	case fresh == turnPeers && !t.firm:
		// The numbers of a look are not read at one instant: an ACK that came between two of them made the first look
		// take an answered connection for a waiting one. Twice in a row is no accident.
		t.turn = fresh
	}
}

// turnNow judges one look alone.
func turnNow(s *Sample, full bool) turn {
	switch {
	case s.unread() > 0:
		return turnOurs // holds while nothing is sent: it was read and not answered
	case s.LastRecv < s.LastSent:
		return turnOurs
	case s.LastRecv > s.LastSent:
		return turnPeers
	case s.Unacked > 0 && !s.ourFIN():
		return turnPeers // a request that came later would have acknowledged it
	case !full:
		return turnUnknown
	}
	gap := s.RcvNxtSndWl1
	if s.peerFIN() {
		gap--
	}
	switch late := s.LastRecv - s.LastAck; {
	case gap != 0:
		return turnOurs
	case s.peerFIN():
		return turnUnknown // the FIN moved snd_wl1, as a bare ACK would have
	case late <= ackWindow:
		return turnPeers
	}
	return turnUnknown
}

// push keeps account of a server that sends without being asked.
func (t *track) push(now time.Time, s *Sample, in, out uint32) {
	if t.at.IsZero() {
		return
	}
	if in > 0 {
		t.asked = true
		return
	}
	if out == 0 || (t.class != ClassIdle && !t.pushing) {
		return
	}
	t.pushing, t.asked = true, false
	t.pause = max(t.pause, t.last.quiet+now.Sub(t.at)-s.quiet())
}

// mayBeBeginning says that all that the server has sent may be the reflexes of a connection's beginning.
func mayBeBeginning(s *Sample) bool {
	switch {
	case s.DataSegsIn < 2 || s.DataSegsIn > beginningSegs:
		return false
	case s.LastRecv-s.LastSent > reflex && s.Retrans == 0: // what is sent again is late without being an answer
		return false
	case s.Since > 0 && s.Since-s.LastSent > beginning:
		return false
	}
	return true
}

// SPDX-License-Identifier: Apache-2.0

package probes

import (
	"testing"
	"time"
)

const ms = time.Millisecond

// answered is an HTTP/1.1 connection that was quiet for a while after its second answer.
func answered() Sample {
	return Sample{
		Cookie: 1, Inode: 2, State: StateEstablished, BytesReceived: 200, BytesSent: 400, BytesAcked: 400,
		DataSegsIn: 2, DataSegsOut: 2, SndWnd: 65536, LastSent: 40 * ms, LastRecv: 60 * ms, LastAck: 40 * ms,
	}
}

// with changes a sample.
func with(s Sample, change func(s *Sample)) Sample {
	change(&s)
	return s
}

// tied is answered in the tick of the request: the sequence numbers must tell.
func tied(gap int32, change func(s *Sample)) Sample {
	return with(answered(), func(s *Sample) {
		s.LastSent, s.LastRecv, s.LastAck, s.RcvNxtSndWl1 = 60*ms, 60*ms, 20*ms, gap
		if change != nil {
			change(s)
		}
	})
}

func TestClassOfOneLook(t *testing.T) {
	for _, c := range []struct {
		name    string
		s       Sample
		full    Class // http1 with sequence numbers
		partial Class // http1 without
	}{
		{"unused", Sample{Cookie: 1, Inode: 2, State: StateEstablished, SndWnd: 9}, ClassUnused, ClassUnused},
		{"unused, client has left", Sample{Cookie: 1, Inode: 2, State: StateCloseWait, BytesReceived: 1, Unread: 1, RcvNxtSndWl1: 1}, ClassUnused, ClassUnused},
		{"answered in a later tick", answered(), ClassIdle, ClassIdle},
		{"asked in a later tick", with(answered(), func(s *Sample) { s.LastSent, s.LastRecv = 60*ms, 40*ms }), ClassActive, ClassActive},
		{"never answered", with(answered(), func(s *Sample) { s.BytesSent, s.DataSegsOut = 0, 0 }), ClassActive, ClassActive},
		{"unread", with(answered(), func(s *Sample) { s.Unread = 1 }), ClassActive, ClassActive},
		{"unsent", with(answered(), func(s *Sample) { s.Unsent = 1 }), ClassActive, ClassActive},
		{"unacknowledged", with(answered(), func(s *Sample) { s.Unacked = 1 }), ClassActive, ClassActive},
		{"window closed", with(answered(), func(s *Sample) { s.Unsent, s.SndWnd = 1, 0 }), ClassStalled, ClassStalled},
		{"window closed, nothing to send", with(answered(), func(s *Sample) { s.SndWnd = 0 }), ClassIdle, ClassIdle},
		{"window not known", with(answered(), func(s *Sample) { s.Unsent, s.SndWnd = 1, UnknownWindow }), ClassActive, ClassActive},
		{"tie, request last", tied(100, nil), ClassActive, ClassUnknown},
		{"tie, request last, numbers wrapped", tied(-100, nil), ClassActive, ClassUnknown},
		{"tie, bare ACK last", tied(0, nil), ClassIdle, ClassUnknown},
		{"tie, late ACK may answer a keepalive", tied(0, func(s *Sample) { s.LastRecv, s.LastSent, s.LastAck = time.Second, time.Second, 700*ms }), ClassUnknown, ClassUnknown},
		{"tie, ACK delayed as long as one may be", tied(0, func(s *Sample) { s.LastRecv, s.LastSent, s.LastAck = time.Second, time.Second, 800*ms }), ClassIdle, ClassUnknown},
		{"tie, unacknowledged", tied(100, func(s *Sample) { s.Unacked = 1 }), ClassActive, ClassActive},
		{"tie, half-closed client, request before its FIN", tied(101, func(s *Sample) { s.State = StateCloseWait }), ClassActive, ClassUnknown},
		{"tie, half-closed client, FIN last", tied(1, func(s *Sample) { s.State = StateCloseWait }), ClassUnknown, ClassUnknown},
		{"half-closed client asked", with(answered(), func(s *Sample) {
			s.State, s.LastSent, s.LastRecv, s.BytesReceived = StateCloseWait, 60*ms, 40*ms, 201
		}), ClassActive, ClassActive},
		{"half-closed client answered, its FIN unread", with(answered(), func(s *Sample) { s.State, s.Unread, s.BytesReceived = StateCloseWait, 1, 201 }), ClassIdle, ClassIdle},
		{"FIN_WAIT2", with(answered(), func(s *Sample) { s.State = StateFinWait2 }), ClassClosing, ClassClosing},
		{"FIN_WAIT1, only the FIN unacknowledged", with(answered(), func(s *Sample) { s.State, s.Unacked = StateFinWait1, 1 }), ClassClosing, ClassClosing},
		{"FIN_WAIT1, data unacknowledged", with(answered(), func(s *Sample) { s.State, s.Unacked = StateFinWait1, 2 }), ClassActive, ClassActive},
		{"FIN_WAIT1, closed window", with(answered(), func(s *Sample) { s.State, s.Unsent, s.SndWnd = StateFinWait1, 999, 0 }), ClassStalled, ClassStalled},
		{"LAST_ACK, data unacknowledged", with(answered(), func(s *Sample) { s.State, s.Unsent = StateLastAck, 500 }), ClassActive, ClassActive},
		{"orphan with data", with(answered(), func(s *Sample) { s.State, s.Unacked, s.Inode = StateFinWait1, 50, 0 }), ClassActive, ClassActive},
		{"in the accept queue", with(answered(), func(s *Sample) { s.Inode = 0 }), ClassQueued, ClassQueued},
		{"in the accept queue, client has left", with(answered(), func(s *Sample) { s.Inode, s.State = 0, StateCloseWait }), ClassQueued, ClassQueued},
		{"half-open", Sample{Cookie: 1, State: StateSynRecv}, ClassHandshake, ClassHandshake},
	} {
		for full, want := range map[bool]Class{true: c.full, false: c.partial} {
			v := NewClassifier(ClassifierOptions{Protocol: ProtocolHTTP1}).Look(time.Now(), []Sample{c.s}, full)
			if len(v) != 1 || v[0].Class != want {
				t.Errorf("%s, full %v: got %v, want %v", c.name, full, v, want)
			}
		}
	}
}

// step is a look some time after the one before.
type step struct {
	after time.Duration
	s     Sample
	want  Class
}

func run(t *testing.T, name string, o ClassifierOptions, full bool, steps []step) Verdict {
	t.Helper()
	c := NewClassifier(o)
	now := time.Unix(1_000_000, 0)
	var last Verdict
	for i, st := range steps {
		now = now.Add(st.after)
		v := c.Look(now, []Sample{st.s}, full)
		if len(v) != 1 || v[0].Class != st.want {
			t.Errorf("%s, look %d: got %v, want %v", name, i+1, v, st.want)
			return Verdict{}
		}
		last = v[0]
	}
	return last
}

func TestClassRemembers(t *testing.T) {
	http1 := ClassifierOptions{Protocol: ProtocolHTTP1}
	// A keepalive is answered 15 s later: the answer moves snd_wl1.
	kept := func(s *Sample) {
		s.LastRecv, s.LastSent, s.LastAck, s.RcvNxtSndWl1 = 15*time.Second, 15*time.Second, ms, 0
	}
	for _, c := range []struct {
		name  string
		full  bool
		steps []step
	}{
		{"waiting, then a keepalive", true, []step{{0, tied(100, nil), ClassActive}, {15 * time.Second, tied(0, kept), ClassActive}}},
		{"idle, then a keepalive", true, []step{{0, tied(0, nil), ClassIdle}, {15 * time.Second, tied(0, kept), ClassIdle}}},
		{"first look after a keepalive", true, []step{{0, tied(0, kept), ClassUnknown}, {time.Second, tied(0, kept), ClassUnknown}}},
		{"an ACK between two reads of one look", true, []step{{0, tied(100, nil), ClassActive}, {100 * ms, tied(0, nil), ClassIdle}}},
		{"waiting at two looks stays so", true, []step{{0, tied(100, nil), ClassActive}, {100 * ms, tied(100, nil), ClassActive}, {100 * ms, tied(0, nil), ClassActive}}},
		{"told idle, told waiting", true, []step{{0, tied(0, nil), ClassIdle}, {100 * ms, tied(100, nil), ClassActive}}},
		{"idle once acknowledged", false, []step{
			{0, tied(0, func(s *Sample) { s.Unacked, s.BytesAcked = 40, 360 }), ClassActive},
			{100 * ms, tied(0, nil), ClassIdle}, // without sequence numbers a tie alone would be unknown
		}},
		{"read and not answered", false, []step{{0, tied(0, func(s *Sample) { s.Unread = 9 }), ClassActive}, {100 * ms, tied(0, nil), ClassActive}}},
		{"data in alone", false, []step{{0, tied(0, nil), ClassUnknown}, {100 * ms, tied(0, func(s *Sample) { s.BytesReceived, s.DataSegsIn = 300, 3 }), ClassActive}}},
		{"data out alone", false, []step{{0, tied(0, nil), ClassUnknown}, {100 * ms, tied(0, func(s *Sample) { s.BytesSent, s.BytesAcked, s.DataSegsOut = 800, 800, 3 }), ClassIdle}}},
		{"a FIN is no data", false, []step{
			{0, answered(), ClassIdle},
			{100 * ms, tied(0, func(s *Sample) { s.State, s.BytesReceived = StateCloseWait, 201 }), ClassIdle},
			{100 * ms, tied(0, func(s *Sample) { s.State, s.BytesReceived = StateCloseWait, 201 }), ClassIdle},
		}},
		{"what held does not hold once bytes have passed", false, []step{
			{0, answered(), ClassIdle},
			{100 * ms, tied(0, func(s *Sample) { s.BytesReceived, s.BytesSent, s.DataSegsIn, s.DataSegsOut = 300, 800, 3, 3 }), ClassUnknown},
		}},
	} {
		run(t, c.name, http1, c.full, c.steps)
	}
}

func TestC21_DeadPeerIsStalled(t *testing.T) {
	sent := func(acked uint64, unacked uint32, silent time.Duration) Sample {
		return with(answered(), func(s *Sample) { s.Unacked, s.BytesAcked, s.LastAck = unacked, acked, silent })
	}
	for _, o := range []ClassifierOptions{{Protocol: ProtocolHTTP1}, {}} {
		run(t, "silence", o, true, []step{
			{0, sent(400, 1000, 0), ClassActive},
			{500 * ms, sent(400, 1000, 500*ms), ClassActive},
			{600 * ms, sent(400, 1000, 1100*ms), ClassStalled},
			{100 * ms, sent(900, 500, 0), ClassActive}, // it lives
		})
		run(t, "a slow reader that still reads", o, true, []step{
			{0, sent(400, 1000, 0), ClassActive},
			{2 * time.Second, sent(500, 900, 0), ClassActive},
			{2 * time.Second, sent(600, 800, 0), ClassActive},
		})
	}
}

func TestPushing(t *testing.T) {
	http1 := ClassifierOptions{Protocol: ProtocolHTTP1}
	at := func(in, out uint32, quiet time.Duration) Sample {
		return with(answered(), func(s *Sample) {
			s.DataSegsIn, s.DataSegsOut, s.BytesReceived, s.BytesSent = in, out, uint64(in)*100, uint64(out)*100
			s.BytesAcked, s.LastSent, s.LastRecv, s.LastAck = s.BytesSent, quiet, quiet+time.Second, quiet
		})
	}
	v := run(t, "stream", http1, true, []step{
		{0, at(1, 1, 500*ms), ClassIdle}, // the one pause that cannot be seen
		{time.Second, at(1, 2, 10*ms), ClassActive},
		{time.Second, at(1, 3, 10*ms), ClassActive},
		{time.Hour, at(1, 3, time.Hour), ClassActive},
	})
	if !v.Pushing {
		t.Error("a stream is not pushing")
	}
	v = run(t, "response with pauses, then the next request", http1, true, []step{
		{0, at(1, 1, 500*ms), ClassIdle},
		{time.Second, at(1, 2, 10*ms), ClassActive},
		{time.Second, at(2, 3, 10*ms), ClassActive},       // asked and answered
		{time.Second, at(2, 3, 1010*ms), ClassActive},     // not quiet for long enough
		{2 * time.Second, at(2, 3, 3010*ms), ClassIdle},   // it is
		{2 * time.Second, at(3, 4, 10*ms), ClassIdle},     // a plain one
		{2 * time.Second, at(3, 5, 10*ms), ClassActive},   // it pushes again
		{2 * time.Second, at(4, 6, 10*ms), ClassActive},   // a WebSocket's client speaks
		{4 * time.Second, at(4, 6, 3700*ms), ClassActive}, // twice its longest pause is more than 2.5 s
		{time.Second, at(4, 6, 4700*ms), ClassIdle},
	})
	if v.Pushing {
		t.Error("a connection that answers one request after the other is pushing")
	}
	run(t, "a pause that began before the look", http1, true, []step{
		{0, at(1, 1, 10*time.Second), ClassIdle},
		{time.Second, at(1, 2, 10*ms), ClassActive},
		{time.Second, at(2, 3, 10*ms), ClassActive},
		{10 * time.Second, at(2, 3, 10*time.Second), ClassActive}, // it paused for 11 s
		{13 * time.Second, at(2, 3, 23*time.Second), ClassIdle},
	})
	run(t, "ordinary requests", http1, true, []step{
		{0, at(1, 1, 500*ms), ClassIdle}, {100 * ms, at(2, 2, 10*ms), ClassIdle}, {100 * ms, at(90, 90, 10*ms), ClassIdle},
	})
}

func TestCyclesAndRequests(t *testing.T) {
	c := NewClassifier(ClassifierOptions{Protocol: ProtocolHTTP1})
	now := time.Unix(1_000_000, 0)
	for i := range uint32(12) {
		now = now.Add(100 * ms)
		s := with(answered(), func(s *Sample) { s.DataSegsIn, s.DataSegsOut = 10+2*i, 20+2*i })
		v := c.Look(now, []Sample{s}, true)[0]
		if v.Cycles != i || v.Requests != 10+2*i {
			t.Errorf("look %d: got %d cycles, %d requests, want %d, %d", i+1, v.Cycles, v.Requests, i, 10+2*i)
		}
	}
	upload := with(answered(), func(s *Sample) { s.DataSegsIn, s.DataSegsOut = 5000, 20+2*11 })
	if v := c.Look(now, []Sample{upload}, true)[0]; v.Cycles != 11 {
		t.Errorf("upload: got %d cycles, want 11", v.Cycles)
	}
}

func TestLookForgetsAndSkips(t *testing.T) {
	c := NewClassifier(ClassifierOptions{Protocol: ProtocolHTTP1})
	now := time.Unix(1_000_000, 0)
	listener, closed, wait := answered(), answered(), answered()
	listener.State, closed.State, wait.State = StateListen, StateClose, StateTimeWait
	twice := answered()
	twice.FD = 9 // the same socket by another descriptor, as 6.1 repeats them
	if v := c.Look(now, []Sample{listener, closed, wait, answered(), twice}, true); len(v) != 1 || v[0].FD != 0 {
		t.Fatalf("got %v, want one verdict", v)
	}
	byInode := answered()
	byInode.Cookie = 0
	if v := c.Look(now, []Sample{byInode}, true); len(v) != 1 || len(c.seen) != 1 {
		t.Errorf("got %v and %d remembered, want one of each", v, len(c.seen))
	}
	if c.Look(now, nil, true); len(c.seen) != 0 {
		t.Errorf("got %d remembered, want none", len(c.seen))
	}
}

func TestOpaque(t *testing.T) {
	// at is a connection with the ages of its last data, ours and the peer's.
	at := func(in uint32, sent, recv, since time.Duration) Sample {
		return with(answered(), func(s *Sample) {
			s.DataSegsIn, s.LastSent, s.LastRecv, s.LastAck, s.Since = in, sent, recv, sent, since
		})
	}
	const quiet = 11 * time.Second
	for _, c := range []struct {
		name string
		s    Sample
		want Class
	}{
		{"answered long ago", at(20, quiet, quiet+ms*20, 0), ClassIdle},
		{"answered just now", at(20, time.Second, time.Second+20*ms, 0), ClassActive},
		{"waiting for ever", at(20, time.Hour+time.Second, time.Hour, 0), ClassActive},
		{"one request in the clear", at(1, quiet, quiet+20*ms, 0), ClassIdle},
		{"server speaks first", with(at(0, quiet, quiet+time.Second, 0), func(s *Sample) { s.BytesReceived = 0 }), ClassIdle},
		{"perhaps tickets only", at(3, quiet, quiet+20*ms, 0), ClassUnknown},
		{"perhaps tickets only, start known", at(3, quiet, quiet+20*ms, quiet+time.Second), ClassUnknown},
		{"answered by a slow handler", at(3, quiet, quiet+1100*ms, 0), ClassIdle},
		{"tickets sent again", with(at(3, quiet, quiet+1100*ms, 0), func(s *Sample) { s.Retrans = 1 }), ClassUnknown},
		{"long after the start", at(3, quiet, quiet+20*ms, quiet+11*time.Second), ClassIdle},
		{"unused", Sample{Cookie: 1, Inode: 2, State: StateEstablished, Since: quiet}, ClassUnused},
		{"handshake begun", with(at(1, quiet, quiet+time.Second, 0), func(s *Sample) { s.BytesSent, s.BytesAcked, s.DataSegsOut = 0, 0, 0 }), ClassActive},
		{"unacknowledged", with(at(20, quiet, quiet+20*ms, 0), func(s *Sample) { s.Unacked = 1 }), ClassActive},
		{"tie", with(at(20, quiet, quiet, 0), func(s *Sample) { s.RcvNxtSndWl1, s.LastAck = 0, quiet-40*ms }), ClassIdle},
		{"tie, request last", with(at(20, quiet, quiet, 0), func(s *Sample) { s.RcvNxtSndWl1 = 77 }), ClassActive},
		{"closing", with(answered(), func(s *Sample) { s.State = StateFinWait2 }), ClassClosing},
	} {
		v := NewClassifier(ClassifierOptions{}).Look(time.Now(), []Sample{c.s}, true)
		if len(v) != 1 || v[0].Class != c.want {
			t.Errorf("%s: got %v, want %v", c.name, v[0].Class, c.want)
		}
	}
	if v := NewClassifier(ClassifierOptions{Protocol: "http3", IdleAfter: time.Second}).Look(time.Now(), []Sample{at(20, 500*ms, 600*ms, 0)}, true); v[0].Class != ClassActive {
		t.Errorf("a protocol not known: got %v, want it opaque", v[0].Class)
	}
}

// SPDX-License-Identifier: Apache-2.0

package front

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/api/apitest"
	sessions "github.com/ebbproxy/ebb/internal/session"
)

// captured is a core as one who has taken its front over sees it.
type captured struct {
	t    *testing.T
	conn net.Conn
	link link
	over chan error // how the core ends it
	src  *apitest.Apps
}

func capture(t *testing.T) *captured {
	t.Helper()
	own, its := net.Pipe()
	log := api.NewLog(api.LogOptions{})
	src, err := apitest.NewApps(log, sessions.Options{}, apitest.Web())
	if err != nil {
		t.Fatal(err)
	}
	c := &captured{t: t, conn: its, link: link{conn: its}, over: make(chan error, 1), src: src}
	s := &session{o: Options{Source: api.Checked(c.src), Log: log}, link: link{conn: own}, slots: make(chan struct{}, maxCalls), ready: make(chan struct{})}
	ctx, cancel := context.WithCancel(t.Context())
	go func() { c.over <- s.listen(ctx) }()
	t.Cleanup(func() {
		cancel()
		own.Close()
		its.Close()
		s.calls.Wait()
	})
	return c
}

func (c *captured) raw(size uint32, body string) {
	c.t.Helper()
	if _, err := c.conn.Write(append(binary.BigEndian.AppendUint32(nil, size), body...)); err != nil {
		c.t.Fatal(err)
	}
}

func (c *captured) answer() *answer {
	c.t.Helper()
	var m message
	if err := c.link.read(&m, maxAnswer, waitFor); err != nil {
		c.t.Fatal(err)
	}
	if m.Answer == nil {
		c.t.Fatalf("got %+v, want an answer", m)
	}
	return m.Answer
}

// What is no call ends the front that makes it.
func TestACoreTakesCallsAlone(t *testing.T) {
	for name, body := range map[string]string{
		"no JSON":         `what`,
		"unknown member":  `{"id":1,"op":"ping","uid":0}`,
		"another case's":  `{"id":1,"op":"drain","drain":{"reason":"x","policy":{}}}`,
		"by in the body":  `{"id":1,"op":"drain","drain":{"By":"root"}}`,
		"a wrong type":    `{"id":"1","op":"ping"}`,
		"two":             `{"id":1,"op":"ping"}{"id":2,"op":"ping"}`,
		"a bare duration": `{"id":1,"op":"extend","extend":{"by":5}}`,
	} {
		c := capture(t)
		c.raw(uint32(len(body)), body)
		if err := <-c.over; err == nil || !strings.Contains(err.Error(), "decode") {
			t.Errorf("%s: ended with %v", name, err)
		}
	}
	for _, size := range []uint32{0, maxCall + 1, 1<<32 - 1} {
		c := capture(t)
		c.raw(size, "")
		if err := <-c.over; !errors.Is(err, errTooLong) {
			t.Errorf("%d bytes: ended with %v", size, err)
		}
	}
}

// What is a call that cannot be done is answered, and nothing is done.
func TestACoreRefuses(t *testing.T) {
	c := capture(t)
	for i, q := range []call{
		{Op: "exec"}, {Op: ""}, {Op: opDrain, Name: "web"}, {Op: opOwner, N: 1}, {Op: opMetrics}, {Op: opAudit, Audit: &audit{}},
		{Op: opDrain, Name: "web", Drain: &api.DrainRequest{Cause: drain.CausePodDeleted}},
		{Op: opDrain, Name: "web", By: strings.Repeat("x", 1000), Drain: &api.DrainRequest{Cause: drain.CauseOperator}},
		{Op: opDrain, Name: "../web", Drain: &api.DrainRequest{Cause: drain.CauseOperator}},
		{Op: opCut, Name: "web", Cut: &api.CutRequest{}},
		{Op: opOpenSession, Name: "web"},
		{Op: opOpenSession, Name: "web", Session: &sessionCall{Process: api.Process{PID: 1}}},
		{Op: opOpenSession, Name: "web", Session: &sessionCall{Open: &api.SessionRequest{}}},
		{Op: opOpenSession, Name: "../web", Session: &sessionCall{Process: api.Process{PID: 1}, Open: &api.SessionRequest{}}},
		{Op: opOpenSession, Name: "web", Session: &sessionCall{Process: api.Process{PID: 1}, Open: &api.SessionRequest{Role: "root"}}},
		{Op: opSessionCall, Name: "web", Session: &sessionCall{Process: api.Process{PID: 1}, Call: &api.SessionCall{Op: "get"}}},
		{Op: opSessionCall, Name: "web", Session: &sessionCall{Process: api.Process{PID: 1}, Call: &api.SessionCall{Op: "hold", Name: strings.Repeat("x", 1000)}}},
		{Op: opSessionCall, Name: "web", Session: &sessionCall{ID: strings.Repeat("x", 1000), Process: api.Process{PID: 1}, Call: &api.SessionCall{Op: "get"}}},
		{Op: opSessionEvents, Name: "web", Session: &sessionCall{Process: api.Process{PID: -1}}},
	} {
		q.ID = uint64(i)
		if err := c.link.write(q, maxCall); err != nil {
			t.Fatal(err)
		}
		if a := c.answer(); a.ID != q.ID || a.Error == nil {
			t.Errorf("%+v: got %+v, want an error", q, a)
		}
	}
	if n, apps := len(c.src.Drains(t.Context())), c.src.Book("web").Apps(); n != 0 || apps != 0 {
		t.Errorf("%d drains were begun and %d sessions opened", n, apps)
	}
	// It still answers.
	if err := c.link.write(call{ID: 99, Op: opBackends}, maxCall); err != nil {
		t.Fatal(err)
	}
	var bs []api.Backend
	if err := json.Unmarshal(c.answer().Result, &bs); err != nil || len(bs) != 1 {
		t.Errorf("got %d backends, %v", len(bs), err)
	}
}

func TestACoreBoundsWhatIsUnderWay(t *testing.T) {
	c := capture(t)
	src := &slow{Source: c.src.Source, hold: make(chan struct{})}
	own, its := net.Pipe()
	defer own.Close()
	defer its.Close()
	s := &session{o: Options{Source: src}, link: link{conn: own}, slots: make(chan struct{}, maxCalls), ready: make(chan struct{})}
	go s.listen(t.Context())
	l := link{conn: its}
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		for i := range 2 * maxCalls {
			if l.write(call{ID: uint64(i), Op: opBackends}, maxCall) != nil {
				return
			}
		}
	}()
	for src.asked.Load() < maxCalls {
		select {
		case <-sent:
			t.Fatal("all calls were taken")
		default:
		}
	}
	close(src.hold)
	for range 2 * maxCalls {
		var m message
		if err := l.read(&m, maxAnswer, waitFor); err != nil {
			t.Fatal(err)
		}
	}
	if most := src.most.Load(); most > maxCalls {
		t.Errorf("%d calls were under way at once, want at most %d", most, maxCalls)
	}
	s.calls.Wait()
}

// slow is a Source whose Backends waits.
type slow struct {
	*apitest.Source
	hold             chan struct{}
	asked, now, most atomic.Int64
}

func (s *slow) Backends(context.Context) []api.Backend {
	n := s.now.Add(1)
	for m := s.most.Load(); n > m && !s.most.CompareAndSwap(m, n); m = s.most.Load() {
	}
	s.asked.Add(1)
	<-s.hold
	s.now.Add(-1)
	return nil
}

func TestErrorsKeepTheirMeaning(t *testing.T) {
	for _, k := range kinds {
		for _, sentinel := range k.sentinels {
			b, err := json.Marshal(failureOf(fmt.Errorf("backend web: %w", sentinel)))
			if err != nil {
				t.Fatal(err)
			}
			var f failure
			if err := json.Unmarshal(b, &f); err != nil {
				t.Fatal(err)
			}
			if !errors.Is(&f, k.sentinels[0]) || f.Error() != "backend web: "+sentinel.Error() {
				t.Errorf("%v became %v", sentinel, &f)
			}
		}
	}
	if f := failureOf(errors.New("disk full")); f.Unwrap() != nil || f.Error() != "disk full" {
		t.Errorf("got %+v", f)
	}
}

func FuzzCall(f *testing.F) {
	f.Add([]byte(`{"id":1,"op":"drain","name":"web","by":"root","drain":{"grace":"5s","on_new":"refuse","cause":"operator"}}`))
	f.Add([]byte(`{"id":1,"op":"extend","name":"web","extend":{"by":"5s"}}`))
	f.Add([]byte(`{"id":2,"op":"audit","audit":{"uid":0,"pid":1,"by":"","action":"cut","backend":"","drain":"","reason":"","status":200,"err":""}}`))
	f.Add([]byte(`{"id":3,"op":"open-session","name":"web","session":{"process":{"pid":7,"uid":0},"open":{"role":"holder","version":1,"bound":true}}}`))
	f.Add([]byte(`{"id":4,"op":"session","name":"web","session":{"id":"a","process":{"pid":7,"uid":0},"call":{"op":"hold","name":"mail"}}}`))
	f.Add([]byte(`{"id":5,"op":"session-events","name":"web","session":{"process":{"pid":7,"uid":0},"from":1,"stream":2}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		log := api.NewLog(api.LogOptions{})
		src, err := apitest.NewApps(log, sessions.Options{}, apitest.Web())
		if err != nil {
			t.Fatal(err)
		}
		s := &session{o: Options{Source: api.Checked(src), Log: log, Audit: func(api.Audit) {}}}
		var q call
		if decode(b, &q) != nil {
			return
		}
		v, err := s.do(t.Context(), q)
		if err != nil {
			_ = failureOf(err)
		} else if _, err := json.Marshal(v); err != nil {
			t.Error(err)
		}
	})
}

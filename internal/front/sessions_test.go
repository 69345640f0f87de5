// SPDX-License-Identifier: Apache-2.0

package front

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/api/apitest"
)

// serveApps is a core with a front for applications, and a client of it that is one of web.
func serveApps(t *testing.T) (*served, *api.Client) {
	t.Helper()
	var ln net.Listener
	s := serve(t, func(o *Options) {
		var err error
		if ln, err = api.ListenAs(filepath.Join(t.TempDir(), "a"), 0o666, -1); err != nil {
			t.Fatal(err)
		}
		o.Entrances = append(o.Entrances, Entrance{Kind: Apps, Listener: ln})
	})
	c, err := api.Dial(t.Context(), ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return s, c
}

// follow opens a stream of a session's events.
func follow(t *testing.T, c *api.Client, id string) func() (api.SessionEvent, error) {
	t.Helper()
	stream, err := apitest.OpenEvents(t.Context(), c.Path(), id)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stream.Close() })
	return stream.Next
}

// The sessions are the core's: another front serves them as they were, with what the application has missed.
func TestR15_SessionsOutliveAFront(t *testing.T) {
	s, c := serveApps(t)
	first, ctx := s.next(), t.Context()
	one, err := c.OpenSession(ctx, api.SessionRequest{Version: 3})
	if err != nil || one.PID != os.Getpid() || one.Backend != "web" || one.Version != 3 {
		t.Fatalf("open: got %+v, %v", one, err)
	}
	if _, err := c.SessionCall(ctx, one.ID, api.SessionCall{Op: "hold", Name: "mail"}); err != nil {
		t.Fatal(err)
	}
	next := follow(t, c, one.ID)
	if err := s.src.Announce("web", "web-7-1"); err != nil {
		t.Fatal(err)
	}
	if ev, err := next(); err != nil || ev.Type != api.SessionDraining || ev.Seq != 1 || *ev.TimeLeftMS <= 0 {
		t.Fatalf("got %+v, %v, want draining", ev, err)
	}
	if err := unix.Kill(first, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if ev, err := next(); err == nil {
		t.Errorf("after the front's death: got %+v, want an error", ev)
	}
	if err := s.src.Flush("web", "web-7-1"); err != nil {
		t.Fatal(err)
	}
	s.next()
	next = follow(t, c, one.ID)
	for i, want := range []string{api.SessionDraining, api.SessionFlush} {
		if ev, err := next(); err != nil || ev.Type != want || ev.Seq != uint64(i+1) {
			t.Errorf("got %+v, %v, want %s", ev, err, want)
		}
	}
	got, err := c.SessionCall(ctx, one.ID, api.SessionCall{Op: "ack", Seq: 2})
	if err != nil || got.Acked != 2 || len(got.Holds) != 1 || got.Holds[0].Name != "mail" {
		t.Errorf("ack: got %+v, %v", got, err)
	}
	// What the core says keeps its meaning.
	two, err := c.OpenSession(ctx, api.SessionRequest{Role: api.RoleHolder})
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		id   string
		q    api.SessionCall
		want error
	}{
		{one.ID, api.SessionCall{Op: "hold", Name: "late"}, api.ErrFlushing},
		{one.ID, api.SessionCall{Op: "flushed", Drain: "web-7-0"}, api.ErrStale},
		{one.ID, api.SessionCall{Op: "extend", ByMS: 1}, api.ErrNotPossible},
		{"", api.SessionCall{Op: "get"}, api.ErrAmbiguous},
		{"none", api.SessionCall{Op: "get"}, api.ErrUnknownSession},
	} {
		if _, err := c.SessionCall(ctx, tc.id, tc.q); !errors.Is(err, tc.want) {
			t.Errorf("%s of %q: got %v, want %v", tc.q.Op, tc.id, err, tc.want)
		}
	}
	if err := c.EndSession(ctx, two.ID); err != nil {
		t.Error(err)
	}
	if d, err := c.Drain(ctx, "web", api.DrainRequest{}); err != nil || d.Cause != drain.CauseApp {
		t.Errorf("drain: got %+v, %v", d, err)
	}
	if _, err := s.client().OpenSession(ctx, api.SessionRequest{}); err == nil || !strings.Contains(err.Error(), "/run/ebb/app.sock") {
		t.Errorf("over the socket of operators: got %v", err)
	}
}

// A core that stops tells the applications to come back at once, behind all that has happened before.
func TestR12_AFrontThatStopsSaysComeBack(t *testing.T) {
	s, c := serveApps(t)
	s.next()
	one, err := c.OpenSession(t.Context(), api.SessionRequest{})
	if err != nil {
		t.Fatal(err)
	}
	next := follow(t, c, one.ID)
	if err := s.src.Announce("web", "web-7-1"); err != nil {
		t.Fatal(err)
	}
	if err := s.log.Close(); err != nil {
		t.Fatal(err)
	}
	s.cancel()
	if ev, err := next(); err != nil || ev.Type != api.SessionDraining {
		t.Errorf("got %+v, %v, want draining", ev, err)
	}
	if ev, err := next(); err != nil || ev.Type != api.SessionEnd || ev.Reason != api.EndRestarting {
		t.Errorf("got %+v, %v, want agent_restarting", ev, err)
	}
}

// A front whose core hangs is alive, and says nothing.
func TestR13_AFrontBeatsWithItsCoreAlone(t *testing.T) {
	var hang atomic.Bool
	entered, release := make(chan struct{}, 10), make(chan struct{})
	s, c := serveApps(t)
	s.src.Before = func(_ context.Context, op, _ string) error {
		if op == "events" && hang.Load() {
			entered <- struct{}{}
			<-release
		}
		return nil
	}
	s.next()
	if _, err := c.OpenSession(t.Context(), api.SessionRequest{}); err != nil {
		t.Fatal(err)
	}
	conn, err := net.Dial("unix", c.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := fmt.Fprint(conn, "GET /v1/session/events HTTP/1.1\r\nHost: ebb\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(resp.Body)
	for beats := 0; beats < 3; {
		if !lines.Scan() {
			t.Fatalf("after %d beats: %v", beats, lines.Err())
		}
		if strings.HasPrefix(lines.Text(), ": beat") {
			beats++
		}
	}
	hang.Store(true)
	<-entered
	if _, err := c.SessionCall(t.Context(), "", api.SessionCall{Op: "heartbeat"}); err != nil {
		t.Errorf("a heartbeat beside the stream: %v", err)
	}
	// What was written before is read, and then nothing comes for as long as ten beats.
	for until := time.Now().Add(waitFor); ; {
		if err := conn.SetReadDeadline(time.Now().Add(200 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		if !lines.Scan() {
			break
		}
		if time.Now().After(until) {
			t.Fatal("something comes again and again")
		}
	}
	if !errors.Is(lines.Err(), os.ErrDeadlineExceeded) {
		t.Errorf("the stream has ended: %v", lines.Err())
	}
	close(release)
}

// A process whose backend nobody can tell, since the core hangs, is not told that it belongs to none.
func TestAFrontWhoseCoreHangsRefusesNobody(t *testing.T) {
	ln, err := api.ListenAs(filepath.Join(t.TempDir(), "a"), 0o666, -1)
	if err != nil {
		t.Fatal(err)
	}
	var hang atomic.Bool
	release := make(chan struct{})
	s := serve(t, func(o *Options) {
		owns, audit := o.Owns, o.Audit
		o.Owns = func(ctx context.Context, pid int) (string, bool) {
			if hang.Load() {
				<-release
			}
			return owns(ctx, pid)
		}
		o.Audit = func(a api.Audit) {
			if hang.Load() {
				<-release
			}
			audit(a)
		}
		o.Entrances = append(o.Entrances, Entrance{Kind: Apps, Listener: ln})
	})
	s.next()
	defer close(release)
	hang.Store(true)
	hc := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", ln.Addr().String())
	}}}
	defer hc.CloseIdleConnections()
	for _, method := range []string{http.MethodPost, http.MethodGet} {
		req, err := http.NewRequestWithContext(t.Context(), method, "http://ebb/v1/session", nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := hc.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" {
			t.Errorf("%s: got %s, Retry-After %q, want 503 and when to try again", method, resp.Status, resp.Header.Get("Retry-After"))
		}
	}
}

// One application that holds all that it may cannot make an answer too long for a message.
func TestAllLeasesFitIntoAnAnswer(t *testing.T) {
	greedy := func(name string) api.Backend {
		b := api.Backend{Name: name, Drain: &api.Drain{ID: name}}
		worst := strings.Repeat("<", 128)
		for range 64 {
			b.Sessions = append(b.Sessions, api.SessionView{Holds: make([]api.Lease, 256)})
		}
		for i := range b.Sessions {
			for j := range b.Sessions[i].Holds {
				b.Sessions[i].Holds[j] = api.Lease{ID: worst, Name: worst}
				b.Drain.Held = append(b.Drain.Held, api.HeldDuring{Name: worst})
			}
		}
		return b
	}
	modest := func(b api.Backend) api.Backend {
		b.Sessions = []api.SessionView{{Holds: make([]api.Lease, 20)}}
		b.Drain = &api.Drain{Held: make([]api.HeldDuring, 20)}
		return b
	}
	all := []api.Backend{greedy("a"), modest(api.Backend{Name: "m"})}
	for range 100 {
		all = append(all, all[0])
	}
	var ds []api.Drain
	for _, b := range all {
		ds = append(ds, *b.Drain)
	}
	one := boundBackends(all[:1])
	got, gotDrains := boundBackends(all), boundDrains(ds)
	for name, v := range map[string]any{"one": one, "all": got, "drains": gotDrains} {
		b, err := json.Marshal(v)
		if err != nil || len(b) > maxAnswer {
			t.Errorf("%s: %d bytes, want at most %d, %v", name, len(b), maxAnswer, err)
		}
	}
	if b := got[1]; len(b.Sessions[0].Holds) != 20 || len(b.Drain.Held) != 20 || len(b.Warnings) != 0 || len(gotDrains[1].Held) != 20 {
		t.Error("what is modest was shortened")
	}
	if b := got[0]; len(b.Warnings) != 1 || !strings.Contains(b.Warnings[0], "16344 more leases") || len(b.Drain.Warnings) != 1 {
		t.Errorf("got %v, want what was left out", b.Warnings)
	}
	if n := len(all[0].Sessions[0].Holds); n != 256 || len(all[0].Warnings) != 0 {
		t.Error("what is not ours was changed")
	}
	few := []api.Backend{modest(api.Backend{})}
	if got := boundBackends(few); len(got[0].Sessions[0].Holds) != 20 {
		t.Error("few leases were shortened")
	}
}

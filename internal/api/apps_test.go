// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/api/apitest"
	"github.com/ebbproxy/ebb/internal/session"
)

// appsFixture is a server for the applications of web and blind; this process is of the one that owner names.
type appsFixture struct {
	t      *testing.T
	src    *apitest.Apps
	log    *api.Log
	server *api.Server
	path   string
	client *api.Client
	owner  atomic.Value
	stop   func()

	mu     sync.Mutex
	audits []api.Audit
}

// newApps serves a source with sessions of heartbeat hb; change may put another one in front of it.
func newApps(t *testing.T, hb time.Duration, change func(*apitest.Apps) api.Source) *appsFixture {
	t.Helper()
	f := &appsFixture{t: t, log: api.NewLog(api.LogOptions{}), path: filepath.Join(shortTemp(t), "a.sock")}
	f.owner.Store("web")
	var err error
	o := session.Options{Heartbeat: hb, Suspect: 1000 * hb, Lost: 2000 * hb}
	if f.src, err = apitest.NewApps(f.log, o, apitest.Web(), apitest.Blind()); err != nil {
		t.Fatal(err)
	}
	source := api.Source(f.src)
	if change != nil {
		source = change(f.src)
	}
	f.server, err = api.NewServer(api.Options{Source: source, Log: f.log, Audit: func(a api.Audit) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.audits = append(f.audits, a)
	}})
	if err != nil {
		t.Fatal(err)
	}
	ln, err := api.ListenAs(f.path, 0o666, -1)
	if err != nil {
		t.Fatal(err)
	}
	access := api.Apps(func(_ context.Context, pid int) (string, bool) {
		o, _ := f.owner.Load().(string)
		return o, pid == os.Getpid()
	})
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- f.server.ServeAs(ctx, ln, access) }()
	f.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-served; err != nil {
			t.Errorf("ServeAs: %v", err)
		}
	})
	t.Cleanup(f.stop)
	if f.client, err = api.Dial(t.Context(), f.path); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.client.Close() })
	return f
}

func (f *appsFixture) open() api.Session {
	f.t.Helper()
	s, err := f.client.OpenSession(f.t.Context(), api.SessionRequest{})
	if err != nil {
		f.t.Fatal(err)
	}
	return s
}

func (f *appsFixture) say(id string, c api.SessionCall) api.Session {
	f.t.Helper()
	s, err := f.client.SessionCall(f.t.Context(), id, c)
	if err != nil {
		f.t.Fatalf("%s: %v", c.Op, err)
	}
	return s
}

// stream is an open stream; next reads one event of it.
func (f *appsFixture) stream(id string) (next func() api.SessionEvent, s *apitest.Events) {
	f.t.Helper()
	s, err := apitest.OpenEvents(f.t.Context(), f.path, id)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { _ = s.Close() })
	return func() api.SessionEvent {
		f.t.Helper()
		ev, err := s.Next()
		if err != nil {
			f.t.Fatalf("the stream has ended: %v", err)
		}
		return ev
	}, s
}

// raw is a stream as it comes.
func (f *appsFixture) raw(target, header string) (net.Conn, *bufio.Scanner) {
	f.t.Helper()
	c := connect(f.t, f.path)
	f.t.Cleanup(func() { _ = c.Close() })
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		f.t.Fatal(err)
	}
	if _, err := fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: ebb\r\n%s\r\n", target, header); err != nil {
		f.t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		f.t.Fatal(err)
	}
	if ct := resp.Header.Get("Content-Type"); resp.StatusCode != 200 || ct != "text/event-stream" {
		b, _ := io.ReadAll(resp.Body)
		f.t.Fatalf("GET %s: got %d %s %s", target, resp.StatusCode, ct, b)
	}
	return c, bufio.NewScanner(resp.Body)
}

// line reads lines up to one that begins with prefix.
func (f *appsFixture) line(lines *bufio.Scanner, prefix string) string {
	f.t.Helper()
	for lines.Scan() {
		if strings.HasPrefix(lines.Text(), prefix) {
			return lines.Text()
		}
	}
	f.t.Fatalf("no %q before the end: %v", prefix, lines.Err())
	return ""
}

func TestASessionSaysAllThatThereIs(t *testing.T) {
	f := newApps(t, time.Minute, nil)
	ctx, seven := t.Context(), int64(7)
	s, err := f.client.OpenSession(ctx, api.SessionRequest{Role: api.RoleHolder, Version: 3, Bound: true, Remaining: &seven})
	if err != nil || s.ID == "" || s.Backend != "web" || s.Gen != 7 || s.PID != os.Getpid() || s.Version != 3 || s.Role != api.RoleHolder || *s.Remaining != 7 || s.HeartbeatMS != 60_000 {
		t.Fatalf("open: got %+v, %v", s, err)
	}
	if got := f.say("", api.SessionCall{Op: "get"}); got.ID != s.ID {
		t.Errorf("the only session of this process: got %+v", got)
	}
	eight := int64(8)
	if got := f.say(s.ID, api.SessionCall{Op: "heartbeat", Remaining: &eight}); *got.Remaining != 8 {
		t.Errorf("heartbeat: got %+v", got)
	}
	f.say(s.ID, api.SessionCall{Op: "hold", Name: "mail"})
	got := f.say(s.ID, api.SessionCall{Op: "hold", ID: "2", Name: "mail"})
	if len(got.Holds) != 2 || got.Holds[0].ID != "mail" || got.Holds[1].ID != "2" {
		t.Errorf("hold: got %+v", got.Holds)
	}
	f.say(s.ID, api.SessionCall{Op: "release", ID: "2"})
	if got := f.say(s.ID, api.SessionCall{Op: "release", Name: "mail"}); len(got.Holds) != 0 {
		t.Errorf("release: got %+v", got.Holds)
	}
	if _, err := f.client.SessionCall(ctx, s.ID, api.SessionCall{Op: "extend", ByMS: 1000}); !errors.Is(err, api.ErrNotPossible) && !errors.Is(err, api.ErrNotDraining) {
		t.Errorf("extend: got %v, want that it is not possible", err)
	}
	if _, err := f.client.SessionCall(ctx, s.ID, api.SessionCall{Op: "flushed", Drain: "web-7-0"}); !errors.Is(err, api.ErrStale) {
		t.Errorf("flushed of no drain: got %v, want ErrStale", err)
	}
	if err := f.src.Announce("web", "web-7-1"); err != nil {
		t.Fatal(err)
	}
	if err := f.src.Flush("web", "web-7-1"); err != nil {
		t.Fatal(err)
	}
	if got := f.say(s.ID, api.SessionCall{Op: "ack", Seq: 2}); got.Acked != 2 || got.Drain == nil || got.Drain.ID != "web-7-1" {
		t.Errorf("ack: got %+v", got)
	}
	if _, err := f.client.SessionCall(ctx, s.ID, api.SessionCall{Op: "hold", Name: "late"}); !errors.Is(err, api.ErrFlushing) {
		t.Errorf("hold after the flush: got %v, want ErrFlushing", err)
	}
	f.say(s.ID, api.SessionCall{Op: "flushed", Drain: "web-7-1", Error: "half of it"})
	if status, _, body := over(t, connect(t, f.path), "POST", "/v1/session/drain", `{"reason":"enough"}`); status != 200 || !strings.Contains(body, `"cause":"app"`) || !strings.Contains(body, `"reason":"enough"`) {
		t.Errorf("drain: got %d %s", status, body)
	}
	second := f.open()
	var p *api.Problem
	if _, err := f.client.SessionCall(ctx, "", api.SessionCall{Op: "get"}); !errors.Is(err, api.ErrAmbiguous) || !errors.As(err, &p) || p.Status != 400 {
		t.Errorf("one of two sessions: got %v, want ErrAmbiguous and 400", err)
	}
	for _, id := range []string{s.ID, second.ID} {
		if err := f.client.EndSession(ctx, id); err != nil {
			t.Error(err)
		}
	}
	for _, id := range []string{s.ID, ""} {
		if _, err := f.client.SessionCall(ctx, id, api.SessionCall{Op: "get"}); !errors.Is(err, api.ErrUnknownSession) {
			t.Errorf("session %q after its end: got %v, want ErrUnknownSession", id, err)
		}
	}
	f.stop()
	var got2 []string
	for _, a := range f.audits {
		got2 = append(got2, fmt.Sprint(a.Action, " ", a.Backend, " ", a.PID == os.Getpid(), " ", a.Status))
	}
	want := "open-session web true 201, extend web true 422, flushed web true 409, flushed web true 200, drain web true 200, " +
		"open-session web true 201, end-session web true 204, end-session web true 204"
	if strings.Join(got2, ", ") != want {
		t.Errorf("audited\n%s, want\n%s", strings.Join(got2, ", "), want)
	}
}

// Nobody registers for another backend, and who is of none has no session.
func TestSessionsAreForApplications(t *testing.T) {
	f := newApps(t, time.Minute, nil)
	s := f.open()
	f.owner.Store("blind")
	if _, err := f.client.SessionCall(t.Context(), s.ID, api.SessionCall{Op: "get"}); !errors.Is(err, api.ErrUnknownSession) {
		t.Errorf("another backend's session: got %v, want ErrUnknownSession", err)
	}
	if o := f.open(); o.Backend != "blind" {
		t.Errorf("got %+v, want a session of blind", o)
	}
	f.owner.Store("")
	if status, _, body := over(t, connect(t, f.path), "POST", "/v1/session", ""); status != 403 || !strings.Contains(body, "belongs to no backend") {
		t.Errorf("a process of no backend: got %d %s, want 403", status, body)
	}
	plain := newFixture(t, apitest.Web())
	if a := plain.do("POST", "/v1/session", "", ""); a.status != 404 {
		t.Errorf("a source without sessions: got %d %s, want 404", a.status, a.body)
	}
	ln, err := api.Listen(filepath.Join(shortTemp(t), "o.sock"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- f.server.ServeAs(ctx, ln, api.Operators(0)) }()
	for _, target := range []string{"POST /v1/session", "GET /v1/session", "GET /v1/session/events", "POST /v1/session/drain"} {
		method, path, _ := strings.Cut(target, " ")
		if status, _, body := over(t, connect(t, ln.Addr().String()), method, path, ""); status != 403 || !strings.Contains(body, "/run/ebb/app.sock") {
			t.Errorf("%s by an operator: got %d %s, want 403 that names the socket", target, status, body)
		}
	}
	cancel()
	if err := <-served; err != nil {
		t.Error(err)
	}
}

func TestASessionIsRefusedWhatIsWrong(t *testing.T) {
	f := newApps(t, time.Minute, nil)
	f.open()
	long := strings.Repeat("x", 129)
	for _, tc := range []struct {
		method, target, body string
		status               int
		want                 string
	}{
		{"POST", "/v1/session", `{"role":"boss"}`, 400, `"field":"role"`},
		{"POST", "/v1/session", `{"version":-1}`, 400, `"field":"version"`},
		{"POST", "/v1/session", `{"version":9007199254740992}`, 400, `from 1 to 9007199254740991, or 0 for none`},
		{"POST", "/v1/session", `{"version":"1"}`, 400, `want a whole number`},
		{"POST", "/v1/session", `{"bound":1}`, 400, `want true or false`},
		{"POST", "/v1/session", `{"remaining":-1}`, 400, `"field":"remaining"`},
		{"POST", "/v1/session", `{"backend":"blind"}`, 400, `"field":"backend"`},
		{"POST", "/v1/session", `[]`, 400, "not a JSON object"},
		{"PUT", "/v1/session", ``, 405, "DELETE or GET or HEAD or POST"},
		{"POST", "/v1/session/ack", ``, 400, `"field":"seq"`},
		{"POST", "/v1/session/ack", `{"seq":-1}`, 400, `"field":"seq"`},
		{"POST", "/v1/session/ack", `{"seq":1,"remaining":1}`, 400, `"field":"remaining"`},
		{"POST", "/v1/session/heartbeat", `{"remaining":-1}`, 400, `"field":"remaining"`},
		{"POST", "/v1/session/hold", `{}`, 400, `"field":"name"`},
		{"POST", "/v1/session/hold", `{"name":"` + long + `"}`, 400, `"field":"name"`},
		{"POST", "/v1/session/hold", `{"name":"a\nb"}`, 400, `"field":"name"`},
		{"POST", "/v1/session/hold", `{"name":"a","id":"` + long + `"}`, 400, `"field":"id"`},
		{"POST", "/v1/session/hold", `{"id":"` + long + `"}`, 400, `"field":"id"`},
		{"POST", "/v1/session/hold", `{"id":"a` + "\xff" + `"}`, 400, `id: is not valid UTF-8`},
		{"POST", "/v1/session/hold", `{"name":"` + strings.Repeat("x", 70<<10) + `"}`, 413, "65536"},
		{"POST", "/v1/session/release", ``, 400, `"field":"name"`},
		{"POST", "/v1/session/release", `{"name":"` + long + `"}`, 400, `"field":"name"`},
		{"POST", "/v1/session/flushed", `{}`, 400, `"field":"drain"`},
		{"POST", "/v1/session/flushed", `{"drain":"d","error":"` + strings.Repeat("x", 1025) + `"}`, 400, `"field":"error"`},
		{"POST", "/v1/session/extend", `{"by_ms":0}`, 400, `"field":"by_ms"`},
		{"POST", "/v1/session/extend", `{"by_ms":86400001}`, 400, `"field":"by_ms"`},
		{"POST", "/v1/session/extend", `{"by_ms":1,"drain":"` + long + `"}`, 400, `"field":"drain"`},
		{"GET", "/v1/session/events?from=x", "", 400, `"field":"from"`},
		{"GET", "/v1/session/events?session=" + long, "", 400, `"field":"Ebb-Session"`},
		{"GET", "/v1/session/events?session=none", "", 404, "unknown-session"},
	} {
		if status, _, body := over(t, connect(t, f.path), tc.method, tc.target, tc.body); status != tc.status || !strings.Contains(body, tc.want) {
			t.Errorf("%s %s %.40s: got %d %s, want %d and %q", tc.method, tc.target, tc.body, status, body, tc.status, tc.want)
		}
	}
	if n := len(f.src.Book("web").Leases()); n != 0 {
		t.Errorf("%d leases are held after nothing but refusals", n)
	}
}

// What is not acknowledged comes again on each new stream, in order; what is does not.
func TestR15_AStreamGoesOnWhereTheOtherWasCut(t *testing.T) {
	f := newApps(t, time.Minute, nil)
	s := f.open()
	next, first := f.stream(s.ID)
	if first.Session.ID != s.ID || first.Session.SuspectMS != s.SuspectMS || first.Session.LostMS != s.LostMS {
		t.Errorf("it begins with %+v, want the thresholds of %+v", first.Session, s)
	}
	if err := f.src.Announce("web", "web-7-1"); err != nil {
		t.Fatal(err)
	}
	ev := next()
	if ev.Seq != 1 || ev.Type != api.SessionDraining || ev.Drain != "web-7-1" || ev.Cause != drain.CauseOperator || *ev.TimeLeftMS <= 0 || *ev.TimeLeftMS > 60_000 {
		t.Errorf("got %+v", ev)
	}
	if err := f.src.Flush("web", "web-7-1"); err != nil {
		t.Fatal(err)
	}
	if ev := next(); ev.Seq != 2 || ev.Type != api.SessionFlush {
		t.Errorf("got %+v, want each event once", ev)
	}
	_ = first.Close()
	next, second := f.stream(s.ID)
	for i, want := range []string{api.SessionDraining, api.SessionFlush} {
		if ev := next(); ev.Type != want || ev.Seq != uint64(i+1) {
			t.Errorf("again: got %+v, want %s", ev, want)
		}
	}
	_ = second.Close()
	f.say(s.ID, api.SessionCall{Op: "ack", Seq: 1})
	next, third := f.stream(s.ID)
	if ev := next(); ev.Type != api.SessionFlush || ev.Seq != 2 || ev.Key != "web-7-1-flush" || ev.Reason != "zero" {
		t.Errorf("behind the acknowledged: got %+v", ev)
	}
	_ = third.Close()
	// In the words of the protocol, for a reader that knows what it has.
	for _, tc := range []struct{ target, header, want string }{
		{"/v1/session/events?session=" + s.ID, "", "id: 2"},
		{"/v1/session/events", "Ebb-Session: " + s.ID + "\r\nLast-Event-ID: 1\r\n", "id: 2"},
		{"/v1/session/events?from=2", "Last-Event-ID: 2\r\n", "id: 2"},
		{"/v1/session/events", "Last-Event-ID: 2\r\n", "id: 3"},
		{"/v1/session/events?from=3", "", "id: 3"},
	} {
		if strings.HasSuffix(tc.want, "3") {
			f.src.Book("web").Close(api.EndEvicted)
		}
		c, lines := f.raw(tc.target, tc.header)
		for _, want := range []string{"event: session", "data: {", ""} {
			if !lines.Scan() || !strings.HasPrefix(lines.Text(), want) {
				t.Fatalf("GET %s: got %q, want %q first", tc.target, lines.Text(), want)
			}
		}
		if !lines.Scan() || lines.Text() != tc.want {
			t.Errorf("GET %s: got %q, want %q", tc.target, lines.Text(), tc.want)
		}
		_ = c.Close()
	}
}

// Who is to come back at once, who later, and who never.
func TestR12_AStreamSaysWhyItEnds(t *testing.T) {
	f := newApps(t, time.Minute, nil)
	var stopping atomic.Bool
	f.src.Before = func(_ context.Context, op, _ string) error {
		if op == "events" && stopping.Load() {
			return f.src.Announce("web", "web-7-1")
		}
		return nil
	}
	s := f.open()
	old, _ := f.stream(s.ID)
	next, _ := f.stream(s.ID)
	if ev := old(); ev.Type != api.SessionEnd || ev.Seq != 0 || ev.Reason != api.EndTransient {
		t.Errorf("a stream that was replaced: got %+v, want transient", ev)
	}
	other := f.open()
	gone, _ := f.stream(other.ID)
	if err := f.client.EndSession(t.Context(), other.ID); err != nil {
		t.Fatal(err)
	}
	if ev := gone(); ev.Type != api.SessionEnd || ev.Reason != api.EndTransient || ev.Backend != "web" || ev.Gen != 7 {
		t.Errorf("a stream whose session has ended: got %+v, want transient", ev)
	}
	// What happened before the stop comes before the end.
	stopping.Store(true)
	f.stop()
	if ev := next(); ev.Type != api.SessionDraining {
		t.Errorf("got %+v, want draining first", ev)
	}
	if ev := next(); ev.Type != api.SessionEnd || ev.Seq != 0 || ev.Reason != api.EndRestarting {
		t.Errorf("a server that stops: got %+v, want agent_restarting", ev)
	}
}

func TestR12_AStreamEndsWithTheLog(t *testing.T) {
	f := newApps(t, time.Minute, nil)
	s := f.open()
	next, _ := f.stream(s.ID)
	if err := f.log.Close(); err != nil {
		t.Fatal(err)
	}
	if ev := next(); ev.Type != api.SessionEnd || ev.Reason != api.EndRestarting {
		t.Errorf("got %+v, want agent_restarting", ev)
	}
}

// The last of all is numbered, comes again until it is acknowledged, and is the only end of its stream.
func TestR12_TheEndOfAGenerationIsNumbered(t *testing.T) {
	f := newApps(t, time.Minute, nil)
	s := f.open()
	_, lines := f.raw("/v1/session/events", "")
	f.line(lines, "event: session")
	f.src.Book("web").Close(api.EndEvicted)
	f.line(lines, "id: 1")
	f.line(lines, "event: end")
	if data := f.line(lines, "data: "); !strings.Contains(data, `"reason":"evicted"`) {
		t.Errorf("got %s, want evicted", data)
	}
	for lines.Scan() {
		if lines.Text() != "" {
			t.Errorf("after the end: got %q", lines.Text())
		}
	}
	if err := lines.Err(); err != nil {
		t.Errorf("the stream goes on: %v", err)
	}
	next, _ := f.stream(s.ID)
	if ev := next(); ev.Type != api.SessionEnd || ev.Seq != 1 || ev.Reason != api.EndEvicted {
		t.Errorf("again: got %+v", ev)
	}
}

// quiet reads lines until none has come for a while.
func quiet(t *testing.T, c net.Conn, lines *bufio.Scanner) {
	t.Helper()
	for until := time.Now().Add(patience); time.Now().Before(until); {
		if err := c.SetReadDeadline(time.Now().Add(200 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		if !lines.Scan() {
			if !errors.Is(lines.Err(), os.ErrDeadlineExceeded) {
				t.Errorf("the stream has ended: %v", lines.Err())
			}
			return
		}
	}
	t.Error("something comes again and again")
}

// A server whose source hangs gives no sign of life.
func TestR13_ABeatSaysThatTheSourceAnswers(t *testing.T) {
	f := newApps(t, 20*time.Millisecond, nil)
	entered, release := make(chan struct{}, 1), make(chan struct{})
	var hang atomic.Bool
	f.src.Before = func(ctx context.Context, op, _ string) error {
		if op == "events" && hang.Load() {
			entered <- struct{}{}
			select {
			case <-release:
			case <-ctx.Done():
			}
		}
		return nil
	}
	f.open()
	c, lines := f.raw("/v1/session/events", "")
	for range 3 {
		f.line(lines, ": beat")
	}
	hang.Store(true)
	<-entered
	// What was written before is read, and then nothing comes for as long as ten beats.
	quiet(t, c, lines)
	hang.Store(false)
	close(release)
	_, lines = f.raw("/v1/session/events", "")
	f.line(lines, ": beat")
}

// flood is a source of which each look finds a megabyte.
type flood struct {
	*apitest.Apps
	over chan struct{} // closed when the stream is
}

func (f flood) SessionEvents(ctx context.Context, backend, id string, p api.Process, from, stream uint64) (api.SessionBatch, error) {
	b, err := f.Apps.SessionEvents(ctx, backend, id, p, from, stream)
	for i := range uint64(1024) {
		b.Events = append(b.Events, api.SessionEvent{Seq: i + 1, Type: api.SessionDraining, Reason: strings.Repeat("x", 1024)})
	}
	context.AfterFunc(ctx, func() { close(f.over) })
	return b, err
}

// A reader that takes nothing does not keep its place.
func TestAReaderThatTakesNothingIsDropped(t *testing.T) {
	over := make(chan struct{})
	f := newApps(t, time.Minute, func(a *apitest.Apps) api.Source { return flood{a, over} })
	api.SetSlowest(f.server, 50*time.Millisecond)
	f.open()
	c := connect(t, f.path)
	defer c.Close()
	if _, err := io.WriteString(c, "GET /v1/session/events HTTP/1.1\r\nHost: ebb\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	select {
	case <-over:
	case <-time.After(patience):
		t.Fatal("the stream goes on")
	}
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(c)
	if len(b) >= 1<<20 || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read %d bytes, %v; want an early end", len(b), err)
	}
}

// Neither streams nor what sessions say keep an application's other requests waiting, nor those of another.
func TestStreamsAndSignsStarveNobody(t *testing.T) {
	f := newApps(t, time.Minute, nil)
	api.SetQueueTimeout(f.server, patience)
	hang, waiting := make(chan struct{}), make(chan string, 200)
	f.src.Before = func(_ context.Context, op, backend string) error {
		if backend == "web" && op != "open" {
			waiting <- op
			<-hang
		}
		return nil
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer close(hang)
	web := f.open()
	refused := make(chan int, 130)
	for range 130 {
		c := connect(t, f.path)
		defer c.Close()
		wg.Go(func() {
			_, _ = fmt.Fprintf(c, "GET /v1/session/events HTTP/1.1\r\nHost: ebb\r\nEbb-Session: %s\r\n\r\n", web.ID)
			if resp, err := http.ReadResponse(bufio.NewReader(c), nil); err == nil {
				refused <- resp.StatusCode
			}
		})
	}
	for range 2 {
		if status := <-refused; status != 429 {
			t.Errorf("one stream too many: got %d, want 429", status)
		}
	}
	for range 20 {
		wg.Go(func() { _, _ = f.client.SessionCall(t.Context(), web.ID, api.SessionCall{Op: "heartbeat"}) })
	}
	asked := map[string]int{}
	for range 8 {
		select {
		case op := <-waiting:
			asked[op]++
		case <-time.After(patience):
			t.Fatalf("the source was asked for %v only", asked)
		}
	}
	if asked["events"] != 4 || asked["heartbeat"] != 4 {
		t.Errorf("the source was asked for %v, want 4 of each", asked)
	}
	if status, _, body := over(t, connect(t, f.path), "POST", "/v1/session/drain", ""); status != 200 {
		t.Errorf("a drain of the same application: got %d %s, want 200", status, body)
	}
	f.owner.Store("blind")
	blind := f.open()
	f.say(blind.ID, api.SessionCall{Op: "heartbeat"})
	next, _ := f.stream(blind.ID)
	if err := f.src.Announce("blind", "blind-1-1"); err != nil {
		t.Fatal(err)
	}
	if ev := next(); ev.Type != api.SessionDraining {
		t.Errorf("another application's stream: got %+v", ev)
	}
	select {
	case op := <-waiting:
		t.Errorf("the source was asked for one more %s", op)
	default:
	}
	f.owner.Store("web") // whose streams these are
}

// All sessions that an application may have say something at once, and none is turned away.
func TestSixtyFourSessionsAtOnce(t *testing.T) {
	f := newApps(t, time.Minute, nil)
	var wg sync.WaitGroup
	for range 64 {
		wg.Go(func() {
			s, err := f.client.OpenSession(t.Context(), api.SessionRequest{})
			if err != nil {
				t.Error(err)
				return
			}
			stream, err := apitest.OpenEvents(t.Context(), f.path, s.ID)
			if err != nil {
				t.Error(err)
				return
			}
			defer stream.Close()
			for _, c := range []api.SessionCall{{Op: "hold", Name: "job"}, {Op: "heartbeat"}, {Op: "release", Name: "job"}} {
				if _, err := f.client.SessionCall(t.Context(), s.ID, c); err != nil {
					t.Errorf("%s: %v", c.Op, err)
				}
			}
		})
	}
	wg.Wait()
	if n := f.src.Book("web").Apps(); n != 64 {
		t.Errorf("%d applications have registered, want 64", n)
	}
}

// One application does not have its deadlines written all the time.
func TestDrainsByOneApplicationAreBounded(t *testing.T) {
	f := newApps(t, time.Minute, nil)
	begun := time.Now()
	for i := 0; ; i++ {
		_, err := f.client.Drain(t.Context(), "web", api.DrainRequest{})
		most := 16 + int(time.Since(begun)/time.Second)
		if errors.Is(err, api.ErrTooFast) && i >= 16 {
			break
		}
		if err != nil || i > most {
			t.Fatalf("request %d, of %d at most: got %v", i, most, err)
		}
	}
	f.owner.Store("blind")
	if _, err := f.client.Drain(t.Context(), "blind", api.DrainRequest{}); err != nil {
		t.Errorf("another application: got %v", err)
	}
}

// One application does not fill the log with what it does; who is an operator is always recorded.
func TestRecordsOfOneApplicationAreBounded(t *testing.T) {
	f := newApps(t, time.Minute, nil)
	recorded := func() int {
		f.mu.Lock()
		defer f.mu.Unlock()
		return len(f.audits)
	}
	begun := time.Now()
	for range 100 {
		if err := f.client.EndSession(t.Context(), f.open().ID); err != nil {
			t.Fatal(err)
		}
	}
	n := recorded()
	if most := 65 + int(time.Since(begun)/(5*time.Second)); n < 64 || n > most {
		t.Errorf("got %d records of 200 actions, want 64 to %d", n, most)
	}
	f.owner.Store("blind")
	f.open()
	if got := recorded(); got != n+1 {
		t.Errorf("the action of another application: got %d records, want 1", got-n)
	}
	ln, err := api.ListenAs(filepath.Join(shortTemp(t), "o.sock"), 0o600, -1)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- f.server.ServeAs(ctx, ln, api.Anyone()) }()
	defer func() { cancel(); <-served }()
	c, err := api.Dial(t.Context(), ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	n = recorded()
	for range 70 {
		if _, err := c.Drain(t.Context(), "web", api.DrainRequest{}); err != nil {
			t.Fatal(err)
		}
	}
	if got := recorded() - n; got != 70 {
		t.Errorf("got %d records of 70 actions of an operator", got)
	}
}

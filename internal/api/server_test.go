// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/api/apitest"
)

// patience is how long a test waits for an event that comes at once on a machine that is not stuck.
const patience = 30 * time.Second

// fixture is a server over a fake source, with a client and raw HTTP.
type fixture struct {
	t      *testing.T
	source *apitest.Source
	log    *api.Log
	path   string
	client *api.Client
	raw    *http.Client
	stop   func() error // stops the server and returns what Serve returned

	mu     sync.Mutex
	audits []api.Audit
}

func newFixture(t *testing.T, backends ...api.Backend) *fixture {
	t.Helper()
	dir, err := os.MkdirTemp("", "ebbapi")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	f := &fixture{t: t, log: api.NewLog(api.LogOptions{}), path: filepath.Join(dir, "a.sock")}
	f.source = apitest.New(f.log, backends...)
	srv, err := api.NewServer(api.Options{
		Source: f.source, Log: f.log,
		Metrics: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/plain; version=0.0.4")
			_, _ = io.WriteString(w, "ebb_build_info 1\n")
		}),
		Audit: func(a api.Audit) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.audits = append(f.audits, a)
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	ln, err := api.Listen(f.path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ctx, ln) }()
	f.stop = sync.OnceValue(func() error {
		cancel()
		select {
		case err := <-served:
			return err
		case <-time.After(patience):
			return errors.New("the server did not stop")
		}
	})
	t.Cleanup(func() {
		if err := f.stop(); err != nil {
			t.Errorf("Serve: %v", err)
		}
	})
	if f.client, err = api.Dial(t.Context(), f.path); err != nil {
		t.Fatal(err)
	}
	f.raw = &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", f.path)
	}}}
	t.Cleanup(f.raw.CloseIdleConnections)
	t.Cleanup(func() { _ = f.client.Close() })
	return f
}

type answer struct {
	status int
	header http.Header
	body   []byte
}

func (f *fixture) do(method, target, contentType, body string) answer {
	f.t.Helper()
	req, err := http.NewRequestWithContext(f.t.Context(), method, "http://ebb"+target, strings.NewReader(body))
	if err != nil {
		f.t.Fatal(err)
	}
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	resp, err := f.raw.Do(req)
	if err != nil {
		f.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		f.t.Fatal(err)
	}
	return answer{resp.StatusCode, resp.Header, b}
}

func (f *fixture) problem(a answer) api.Problem {
	f.t.Helper()
	var p api.Problem
	if ct := a.header.Get("Content-Type"); ct != "application/problem+json" {
		f.t.Errorf("content type: got %q, want application/problem+json", ct)
	}
	if err := json.Unmarshal(a.body, &p); err != nil {
		f.t.Fatalf("%q is not a problem: %v", a.body, err)
	}
	if p.Status != a.status {
		f.t.Errorf("status: got %d in the problem, %d in the answer", p.Status, a.status)
	}
	return p
}

const jsonType = "application/json"

func TestServerRefuses(t *testing.T) {
	f := newFixture(t, apitest.Web(), apitest.Blind())
	for _, tc := range []struct {
		name, method, target, contentType, body string
		status                                  int
		want                                    string // in the detail
		field                                   string
	}{
		{"unknown backend", "GET", "/v1/backends/wbe", "", "", 404, `"wbe"`, ""},
		{"drain of an unknown backend", "POST", "/v1/backends/wbe/drain", "", "", 404, `"wbe"`, ""},
		{"stragglers of an unknown backend", "GET", "/v1/backends/wbe/stragglers", "", "", 404, `"wbe"`, ""},
		{"readiness of an unknown backend", "GET", "/readyz/wbe", "", "", 404, `"wbe"`, ""},
		{"unknown drain", "GET", "/v1/drains/x", "", "", 404, `"x"`, ""},
		{"unknown path", "GET", "/v2/backends", "", "", 404, "/v2/backends", ""},
		{"method", "DELETE", "/v1/backends/web", "", "", 405, "GET", ""},
		{"GET of an action", "GET", "/v1/backends/web/drain", "", "", 405, "POST", ""},
		{"form", "POST", "/v1/backends/web/drain", "application/x-www-form-urlencoded", "grace=1s", 415, "application/json", ""},
		{"no content type", "POST", "/v1/backends/web/drain", "", "{}", 415, "application/json", ""},
		{"unknown member", "POST", "/v1/backends/web/drain", jsonType, `{"grce":"1s"}`, 400, "grce", "grce"},
		{"not JSON", "POST", "/v1/backends/web/drain", jsonType, `grace`, 400, "JSON object", ""},
		{"drop", "POST", "/v1/backends/web/drain", jsonType, `{"on_new":"drop"}`, 400, "none of auto", "on_new"},
		{"no by", "POST", "/v1/backends/web/extend", jsonType, `{}`, 400, "required", "by"},
		{"too large", "POST", "/v1/backends/web/drain", jsonType, `{"reason":"` + strings.Repeat("x", 70<<10) + `"}`, 413, "65536", ""},
		{"stale", "POST", "/v1/backends/web/drain", jsonType, `{"gen":6}`, 409, "nothing was done", ""},
		{"undrain while serving", "POST", "/v1/backends/web/undrain", "", "", 409, "serving", ""},
		{"extend while serving", "POST", "/v1/backends/web/extend", jsonType, `{"by":"1s"}`, 409, "serving", ""},
		{"cut while serving", "POST", "/v1/backends/web/cut", "", "", 409, "serving", ""},
		{"refuse without a datapath", "POST", "/v1/backends/blind/drain", jsonType, `{"on_new":"refuse"}`, 422, "use admit", ""},
		{"n", "GET", "/v1/backends/web/stragglers?n=0", "", "", 400, "1 to 10000", "n"},
		{"n too large", "GET", "/v1/backends/web/stragglers?n=10001", "", "", 400, "1 to 10000", "n"},
		{"from", "GET", "/v1/events?from=x", "", "", 400, "whole number", "from"},
		{"follow", "GET", "/v1/events?follow=maybe", "", "", 400, "neither true nor false", "follow"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a := f.do(tc.method, tc.target, tc.contentType, tc.body)
			p := f.problem(a)
			if a.status != tc.status || !strings.Contains(p.Detail, tc.want) || p.Field != tc.field {
				t.Errorf("got %d %+v, want %d, %q in the detail, field %q", a.status, p, tc.status, tc.want, tc.field)
			}
			if a.status == 405 && a.header.Get("Allow") == "" {
				t.Error("no Allow header beside 405")
			}
			if strings.Contains(tc.name, "unknown backend") && !bytes.Contains(a.body, []byte(`"known":["web","blind"]`)) {
				t.Errorf("got %s, want the backends that exist", a.body)
			}
		})
	}
	for _, b := range f.source.Backends(t.Context()) {
		if b.Drain != nil {
			t.Errorf("%s drains after nothing but refusals: %+v", b.Name, b.Drain)
		}
	}
}

// Every way of asking twice answers with the drain that runs; the deadline moves earlier only.
func TestR2_SecondDrainIsTheSame(t *testing.T) {
	f := newFixture(t, apitest.Web())
	first, err := f.client.Drain(t.Context(), "web", api.DrainRequest{Reason: "first"})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			a := f.do("POST", "/v1/backends/web/drain", jsonType, `{"grace":"10m","reason":"again"}`)
			var d api.Drain
			if err := json.Unmarshal(a.body, &d); err != nil || a.status != 200 || d.ID != first.ID {
				t.Errorf("got %d, drain %q, %v, want 200 and %q", a.status, d.ID, err, first.ID)
			}
			if d.Deadline.After(first.Deadline) || d.Reason != "first" {
				t.Errorf("got deadline %s, reason %q, want not after %s and the first reason", d.Deadline, d.Reason, first.Deadline)
			}
		})
	}
	wg.Wait()
	short := api.Duration(time.Second)
	d, err := f.client.Drain(t.Context(), "web", api.DrainRequest{Grace: &short})
	if err != nil || !d.Deadline.Before(first.Deadline) {
		t.Errorf("a shorter one: got %v, %v, want before %v", d.Deadline, err, first.Deadline)
	}
	ds, err := f.client.Drains(t.Context())
	if err != nil || len(ds) != 1 {
		t.Errorf("got %d drains, %v, want 1", len(ds), err)
	}
}

func TestR5_StaleGenerationDoesNothing(t *testing.T) {
	f := newFixture(t, apitest.Web())
	_, err := f.client.Drain(t.Context(), "web", api.DrainRequest{Gen: 6})
	if !errors.Is(err, api.ErrStale) {
		t.Errorf("got %v, want ErrStale", err)
	}
	if b, err := f.client.Backend(t.Context(), "web"); err != nil || b.State != drain.StateServing {
		t.Errorf("got %s, %v, want it untouched", b.State, err)
	}
	if _, err := f.client.Drain(t.Context(), "web", api.DrainRequest{Gen: 7}); err != nil {
		t.Errorf("the right generation: %v", err)
	}
}

func TestT3_ReadinessFailsAtBeginLivenessStays(t *testing.T) {
	f := newFixture(t, apitest.Web(), apitest.Blind())
	status := func(path string) int { return f.do("GET", path, "", "").status }
	for _, path := range []string{"/livez", "/readyz", "/readyz/web", "/readyz/blind"} {
		if got := status(path); got != 200 {
			t.Errorf("before: %s: got %d, want 200", path, got)
		}
	}
	if err := f.client.Ready(t.Context()); err != nil {
		t.Errorf("before: Ready: %v", err)
	}
	if _, err := f.client.Drain(t.Context(), "web", api.DrainRequest{}); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]int{"/livez": 200, "/readyz": 503, "/readyz/web": 503, "/readyz/blind": 200} {
		if got := status(path); got != want {
			t.Errorf("during: %s: got %d, want %d", path, got, want)
		}
	}
	if p := f.problem(f.do("GET", "/readyz", "", "")); !strings.Contains(p.Detail, "web is draining") {
		t.Errorf("reason: got %q, want it to name web and its state", p.Detail)
	}
	if err := f.client.Ready(t.Context()); !errors.Is(err, api.ErrNotReady) {
		t.Errorf("Ready: got %v, want ErrNotReady", err)
	}
}

func TestD14_UndrainUntilFlush(t *testing.T) {
	f := newFixture(t, apitest.Web())
	first, err := f.client.Drain(t.Context(), "web", api.DrainRequest{})
	if err != nil {
		t.Fatal(err)
	}
	d, err := f.client.Undrain(t.Context(), "web", api.UndrainRequest{Reason: "not today"})
	if err != nil || d.Outcome != drain.OutcomeCancelled {
		t.Fatalf("got %q, %v, want cancelled", d.Outcome, err)
	}
	second, err := f.client.Drain(t.Context(), "web", api.DrainRequest{})
	if err != nil || second.ID == first.ID {
		t.Fatalf("drain after undrain: got %q, %v, want another id than %q", second.ID, err, first.ID)
	}
	f.source.Step("web", drain.PhaseFlush)
	if _, err := f.client.Undrain(t.Context(), "web", api.UndrainRequest{}); !errors.Is(err, api.ErrFlushing) {
		t.Errorf("after flush: got %v, want ErrFlushing", err)
	}
	got, err := f.client.DrainByID(t.Context(), first.ID)
	if err != nil || got.Outcome != drain.OutcomeCancelled {
		t.Errorf("DrainByID: got %q, %v, want cancelled", got.Outcome, err)
	}
	if _, err := f.client.DrainByID(t.Context(), "none"); !errors.Is(err, api.ErrUnknownDrain) {
		t.Errorf("DrainByID of none: got %v, want ErrUnknownDrain", err)
	}
}

// One record for each action, done or refused, with who asked.
func TestAuditNamesTheCaller(t *testing.T) {
	f := newFixture(t, apitest.Web())
	ctx := t.Context()
	d, err := f.client.Drain(ctx, "web", api.DrainRequest{Reason: "deploy 7"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.client.Extend(ctx, "web", api.ExtendRequest{Extra: api.Duration(time.Second)}); err != nil {
		t.Fatal(err)
	}
	if _, err := f.client.Cut(ctx, "web", api.CutRequest{}); err != nil {
		t.Fatal(err)
	}
	f.do("POST", "/v1/backends/web/drain", jsonType, `{"grce":1}`)
	f.do("POST", "/v1/backends/nope/cut", "", "")
	f.do("GET", "/v1/backends", "", "")
	f.mu.Lock()
	defer f.mu.Unlock()
	want := []struct {
		action, backend, drain string
		status                 int
	}{
		{"drain", "web", d.ID, 200}, {"extend", "web", d.ID, 200}, {"cut", "web", d.ID, 200},
		{"drain", "web", "", 400}, {"cut", "nope", "", 404},
	}
	if len(f.audits) != len(want) {
		t.Fatalf("got %d records, want %d: %+v", len(f.audits), len(want), f.audits)
	}
	for i, w := range want {
		a := f.audits[i]
		if a.Action != w.action || a.Backend != w.backend || a.Drain != w.drain || a.Status != w.status ||
			a.UID != os.Getuid() || a.PID != os.Getpid() || a.Time.IsZero() || (a.Err == nil) != (w.status == 200) {
			t.Errorf("record %d: got %+v, want %+v of uid %d", i, a, w, os.Getuid())
		}
	}
	if by := fmt.Sprintf("uid %d", os.Getuid()); !strings.Contains(d.By, by) {
		t.Errorf("by: got %q, want %q in it", d.By, by)
	}
	if f.audits[0].Reason != "deploy 7" {
		t.Errorf("reason: got %q, want deploy 7", f.audits[0].Reason)
	}
}

// Without an Audit function the record is one log line.
func TestAuditGoesToTheLog(t *testing.T) {
	var buf bytes.Buffer
	events := api.NewLog(api.LogOptions{})
	srv, err := api.NewServer(api.Options{
		Source: apitest.New(events, apitest.Web()), Log: events,
		Logger: slog.New(slog.NewJSONHandler(&buf, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "ebbapi")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	ln, err := api.Listen(filepath.Join(dir, "a.sock"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ctx, ln) }()
	c, err := api.Dial(t.Context(), ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.Drain(t.Context(), "web", api.DrainRequest{Reason: "why"})
	cancel()
	if err = errors.Join(err, <-served); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(buf.String(), "\n"); n != 1 {
		t.Errorf("got %d lines, want 1: %s", n, buf.String())
	}
	for _, want := range []string{`"action":"drain"`, `"backend":"web"`, fmt.Sprintf(`"uid":%d`, os.Getuid()), `"reason":"why"`, `"status":200`} {
		if !strings.Contains(buf.String(), want) {
			t.Errorf("got %s, want %s in it", buf.String(), want)
		}
	}
}

// Over TCP nobody knows who asks: probes and metrics answer, the rest is not there; and even the whole API
// refuses actions.
func TestServeProbesHasNoActions(t *testing.T) {
	events := api.NewLog(api.LogOptions{})
	source := apitest.New(events, apitest.Web())
	srv, err := api.NewServer(api.Options{Source: source, Log: events})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 2)
	listen := func(serve func(context.Context, net.Listener) error) string {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		go func() { served <- serve(ctx, ln) }()
		return "http://" + ln.Addr().String()
	}
	probes, whole := listen(srv.ServeProbes), listen(srv.Serve)
	for _, tc := range []struct {
		method, url string
		want        int
	}{
		{"GET", probes + "/livez", 200},
		{"GET", probes + "/readyz", 200},
		{"GET", probes + "/readyz/web", 200},
		{"GET", probes + "/metrics", 404}, // this server has none
		{"GET", probes + "/v1/backends", 404},
		{"POST", probes + "/v1/backends/web/drain", 404},
		{"GET", probes + "/v1/events", 404},
		{"GET", whole + "/v1/backends", 200},
		{"POST", whole + "/v1/backends/web/drain", 403},
	} {
		req, err := http.NewRequestWithContext(t.Context(), tc.method, tc.url, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != tc.want {
			t.Errorf("%s %s: got %d, want %d", tc.method, tc.url, resp.StatusCode, tc.want)
		}
	}
	if calls := source.Calls(); len(calls) != 0 {
		t.Errorf("the source was asked to %v", calls)
	}
	http.DefaultClient.CloseIdleConnections()
	cancel()
	for range 2 {
		if err := <-served; err != nil {
			t.Error(err)
		}
	}
}

// follow reads events in a goroutine and hands them over one by one.
func follow(t *testing.T, c *api.Client, from uint64) <-chan api.Event {
	t.Helper()
	ch := make(chan api.Event)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer close(ch)
		for ev, err := range c.Events(ctx, from, true) {
			if err != nil {
				if ctx.Err() == nil {
					t.Errorf("events: %v", err)
				}
				return
			}
			select {
			case ch <- ev:
			case <-ctx.Done():
				return
			}
		}
	}()
	t.Cleanup(func() { cancel(); <-done })
	return ch
}

func next(t *testing.T, ch <-chan api.Event) (api.Event, bool) {
	t.Helper()
	select {
	case ev, ok := <-ch:
		return ev, ok
	case <-time.After(patience):
		t.Fatal("no event came")
		return api.Event{}, false
	}
}

func TestEventsFollowAndResume(t *testing.T) {
	f := newFixture(t, apitest.Web())
	if _, err := f.client.Drain(t.Context(), "web", api.DrainRequest{}); err != nil {
		t.Fatal(err)
	}
	ch := follow(t, f.client, 0)
	for i, want := range []drain.Phase{drain.PhaseBegin, drain.PhaseStopNew} {
		if ev, _ := next(t, ch); ev.Phase != want || ev.Seq != uint64(i+1) {
			t.Errorf("got %d %s, want %d %s", ev.Seq, ev.Phase, i+1, want)
		}
	}
	f.source.Step("web", drain.PhaseWait)
	if ev, _ := next(t, ch); ev.Phase != drain.PhaseWait || ev.Seq != 3 {
		t.Errorf("got %d %s, want 3 wait", ev.Seq, ev.Phase)
	}
	resumed := follow(t, f.client, 3)
	if ev, _ := next(t, resumed); ev.Seq != 3 {
		t.Errorf("resumed: got %d, want 3", ev.Seq)
	}
	// Without follow the answer ends by itself.
	var n int
	for ev, err := range f.client.Events(t.Context(), 2, false) {
		if err != nil || ev.Seq != uint64(n+2) {
			t.Errorf("got %d, %v, want %d", ev.Seq, err, n+2)
		}
		n++
	}
	if n != 2 {
		t.Errorf("got %d events, want 2", n)
	}
}

// The last events before the process ends reach those who follow, and the stream ends in order: a caller
// who waits for a drain learns its outcome from a supervisor that leaves.
func TestEventsAreDeliveredBeforeTheServerStops(t *testing.T) {
	f := newFixture(t, apitest.Web())
	ch := follow(t, f.client, 0)
	if _, err := f.client.Drain(t.Context(), "web", api.DrainRequest{}); err != nil {
		t.Fatal(err)
	}
	next(t, ch)
	next(t, ch)
	f.source.End("web", drain.OutcomeExpired)
	if err := f.log.Close(); err != nil {
		t.Fatal(err)
	}
	stopped := make(chan error, 1)
	go func() { stopped <- f.stop() }()
	ev, ok := next(t, ch)
	if !ok || ev.Outcome != drain.OutcomeExpired {
		t.Errorf("got %+v, %v, want the end of the drain", ev, ok)
	}
	if ev, ok := next(t, ch); ok {
		t.Errorf("after it: got %+v, want the end", ev)
	}
	if err := <-stopped; err != nil {
		t.Error(err)
	}
}

// A silent follower does not keep the server from stopping.
func TestServerStopsWithFollowers(t *testing.T) {
	f := newFixture(t, apitest.Web())
	f.log.Publish(api.Event{Type: "x"})
	ch := follow(t, f.client, 0)
	next(t, ch)
	if err := f.stop(); err != nil {
		t.Error(err)
	}
	if _, ok := next(t, ch); ok {
		t.Error("an event after the stop")
	}
}

func TestTooManyFollowers(t *testing.T) {
	f := newFixture(t, apitest.Web())
	f.log.Publish(api.Event{Type: "x"})
	for range 64 {
		next(t, follow(t, f.client, 0))
	}
	a := f.do("GET", "/v1/events?follow=true", "", "")
	if p := f.problem(a); a.status != 503 || a.header.Get("Retry-After") == "" {
		t.Errorf("got %d %+v, want 503 with Retry-After", a.status, p)
	}
	if a := f.do("GET", "/v1/backends", "", ""); a.status != 200 {
		t.Errorf("others: got %d, want 200", a.status)
	}
}

// A client that sends its header and no more is let go, and others are answered all the while.
func TestSilentClientsDoNotStopOthers(t *testing.T) {
	f := newFixture(t, apitest.Web())
	for range 40 {
		c, err := net.Dial("unix", f.path)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := io.WriteString(c, "POST /v1/backends/web/drain HTTP/1.1\r\nHost: ebb\r\n"); err != nil {
			t.Fatal(err)
		}
	}
	if a := f.do("GET", "/v1/backends", "", ""); a.status != 200 {
		t.Errorf("got %d, want 200", a.status)
	}
}

func TestHeaderLimit(t *testing.T) {
	f := newFixture(t, apitest.Web())
	c, err := net.Dial("unix", f.path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	go func() {
		_, _ = fmt.Fprintf(c, "GET /v1/backends HTTP/1.1\r\nHost: ebb\r\nX: %s\r\n\r\n", strings.Repeat("x", 64<<10))
	}()
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("got %d, want 431", resp.StatusCode)
	}
}

// An unknown count is null on the wire and nil again in the client; lists are arrays.
func TestD4_UnknownCountIsNull(t *testing.T) {
	f := newFixture(t, apitest.Blind())
	a := f.do("GET", "/v1/backends/blind", "", "")
	for _, want := range []string{
		`"in_flight":null`, `"active":null`, `"open":null`, `"counts_known":false`, `"counts_at":null`,
		`"drain":null`, `"listeners":[]`, `"not_covered":[]`,
	} {
		if !bytes.Contains(a.body, []byte(want)) {
			t.Errorf("got %s, want %s in it", a.body, want)
		}
	}
	b, err := f.client.Backend(t.Context(), "blind")
	if err != nil || b.InFlight != nil || b.CountsKnown {
		t.Errorf("got in flight %v, known %v, %v, want neither", b.InFlight, b.CountsKnown, err)
	}
	for _, class := range api.Classes {
		if n := b.Counts.Class(class); n != nil {
			t.Errorf("%s: got %d, want nil", class, *n)
		}
	}
}

func TestCountsOf(t *testing.T) {
	c := drain.Counts{Known: true, Handshake: 1, Queued: 2, Active: 3, Idle: 4, Unused: 5, Stalled: 6, Closing: 7, Accepted: 8}
	got := api.CountsOf(c)
	for i, class := range api.Classes {
		if n := got.Class(class); n == nil || *n != []int64{1, 2, 3, 4, 5, 6, 7}[i] {
			t.Errorf("%s: got %v", class, n)
		}
	}
	if *got.Open != 20 || *got.Accepted != 8 {
		t.Errorf("got open %d, accepted %d, want 20, 8", *got.Open, *got.Accepted)
	}
	if n := api.InFlightOf(c, drain.IdleWait); *n != 21 {
		t.Errorf("in flight: got %d, want 21", *n)
	}
	c.Known = false
	if n := api.InFlightOf(c, drain.IdleWait); n != nil || api.CountsOf(c) != (api.Counts{}) {
		t.Errorf("unknown: got %v, %+v, want nothing", n, api.CountsOf(c))
	}
}

// The state machine's own sentinels reach the client as the API's.
func TestSentinelsOfTheMachine(t *testing.T) {
	for _, tc := range []struct {
		returned, want error
		status         int
	}{
		{drain.ErrStale, api.ErrStale, 409},
		{drain.ErrFlushing, api.ErrFlushing, 409},
		{drain.ErrNotDraining, api.ErrNotDraining, 409},
		{drain.ErrPolicy, api.ErrNotPossible, 422},
		{drain.ErrLimit, api.ErrNotPossible, 422},
		{drain.ErrOff, api.ErrNotPossible, 422},
		{api.ErrTooFast, api.ErrTooFast, 429},
		{errors.New("disk full"), nil, 500},
	} {
		events := api.NewLog(api.LogOptions{})
		srv, err := api.NewServer(api.Options{Source: failing{apitest.New(events), tc.returned}, Log: events})
		if err != nil {
			t.Fatal(err)
		}
		dir, err := os.MkdirTemp("", "ebbapi")
		if err != nil {
			t.Fatal(err)
		}
		ln, err := api.Listen(filepath.Join(dir, "a.sock"))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		served := make(chan error, 1)
		go func() { served <- srv.Serve(ctx, ln) }()
		c, err := api.Dial(t.Context(), ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		_, err = c.Drain(t.Context(), "web", api.DrainRequest{})
		var p *api.Problem
		if !errors.As(err, &p) || p.Status != tc.status || (tc.want != nil && !errors.Is(err, tc.want)) {
			t.Errorf("%v: got %v, want %d %v", tc.returned, err, tc.status, tc.want)
		}
		if p != nil && !strings.Contains(p.Detail, tc.returned.Error()) {
			t.Errorf("%v: got detail %q, want the reason", tc.returned, p.Detail)
		}
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
		_ = os.RemoveAll(dir)
	}
}

// failing is a Source whose Drain returns an error.
type failing struct {
	*apitest.Source
	err error
}

func (f failing) Drain(context.Context, string, api.DrainRequest) (api.Drain, error) {
	return api.Drain{}, fmt.Errorf("begin: %w", f.err)
}

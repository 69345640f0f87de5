// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"bytes"
	"context"
	"fmt"
	"net/http/httptest"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
)

// source is what the collector looks at.
type source struct {
	mu       sync.Mutex
	backends []api.Backend
}

func (s *source) Backends(context.Context) []api.Backend {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.backends)
}

func (s *source) set(bs ...api.Backend) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.backends = bs
}

func backend(state drain.State, c drain.Counts) api.Backend {
	return api.Backend{
		Name: "web", Service: "shop", Gen: 1, State: state, Mode: drain.ModeEnforce,
		Counts: api.CountsOf(c), InFlight: api.InFlightOf(c, drain.IdleClose), CountsKnown: c.Known,
	}
}

// clock is moved by hand.
type clock struct{ t time.Time }

func (c *clock) now() time.Time { return c.t }

func newMetrics(t *testing.T, s Source, c *clock) *Metrics {
	t.Helper()
	o := Options{Source: s, Version: "1.2.3", Commit: "abc", Features: map[string]bool{"sk_lookup": true, "tcx": false}}
	if c != nil {
		o.Now = c.now
	}
	m, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func scrape(t *testing.T, m *Metrics) string {
	t.Helper()
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", "/metrics", nil))
	if w.Code != 200 {
		t.Fatalf("scrape: got %d: %s", w.Code, w.Body)
	}
	return w.Body.String()
}

// samples maps each series to its value, without comments.
func samples(text string) map[string]string {
	out := make(map[string]string)
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if i := strings.LastIndexByte(line, ' '); i > 0 && line[0] != '#' {
			out[line[:i]] = line[i+1:]
		}
	}
	return out
}

func wantSamples(t *testing.T, text string, want map[string]string) {
	t.Helper()
	got := samples(text)
	for series, v := range want {
		if got[series] != v {
			t.Errorf("%s: got %q, want %q", series, got[series], v)
		}
	}
}

const web = `{backend="web",service="shop"}`

func TestGaugesFollowTheBackend(t *testing.T) {
	s := &source{}
	m := newMetrics(t, s, nil)
	b := backend(drain.StateDraining, drain.Counts{Known: true, Handshake: 1, Queued: 2, Active: 3, Idle: 4, Unused: 5, Stalled: 6, Closing: 7})
	b.Drain = &api.Drain{Deadline: time.UnixMilli(1_700_000_000_250), Survivors: make([]api.Straggler, 2)}
	s.set(b)
	want := map[string]string{
		"ebb_connections_in_flight" + web:                                    "12",
		"ebb_counts_known" + web:                                             "1",
		"ebb_drain_survivors" + web:                                          "2",
		`ebb_mode{mode="enforce",service="shop"}`:                            "1",
		`ebb_mode{mode="observe",service="shop"}`:                            "0",
		`ebb_backend_state{backend="web",service="shop",state="draining"}`:   "1",
		`ebb_backend_state{backend="web",service="shop",state="serving"}`:    "0",
		`ebb_build_info{commit="abc",version="1.2.3"}`:                       "1",
		`ebb_feature{feature="sk_lookup"}`:                                   "1",
		`ebb_feature{feature="tcx"}`:                                         "0",
		`ebb_drain_deadline_timestamp_seconds{backend="web",service="shop"}`: "1.70000000025e+09",
	}
	for i, class := range api.Classes {
		want[fmt.Sprintf(`ebb_connections{backend="web",class=%q,service="shop"}`, class)] = fmt.Sprint(i + 1)
	}
	wantSamples(t, scrape(t, m), want)

	b.Drain.Outcome, b.State = drain.OutcomeExpired, drain.StateDone
	s.set(b)
	wantSamples(t, scrape(t, m), map[string]string{
		"ebb_drain_deadline_timestamp_seconds" + web:                   "NaN",
		`ebb_backend_state{backend="web",service="shop",state="done"}`: "1",
	})
}

// What applications say of themselves is there from registration on, and not after they have gone.
func TestSessionsAndHolds(t *testing.T) {
	s := &source{}
	m := newMetrics(t, s, nil)
	check := func(when, ok, suspect, lost, holds string) {
		t.Helper()
		got := samples(scrape(t, m))
		for series, want := range map[string]string{
			`ebb_sessions{backend="web",health="ok",service="shop"}`:      ok,
			`ebb_sessions{backend="web",health="suspect",service="shop"}`: suspect,
			`ebb_sessions{backend="web",health="lost",service="shop"}`:    lost,
			"ebb_holds" + web: holds,
		} {
			if got[series] != want {
				t.Errorf("%s: %s: got %q, want %q", when, series, got[series], want)
			}
		}
	}
	m.Register("shop", "web")
	check("registered", "0", "0", "0", "0")
	b := backend(drain.StateServing, drain.Counts{Known: true})
	two := make([]api.Lease, 2)
	b.Sessions = []api.SessionView{
		{Health: api.HealthOK}, {Health: api.HealthOK, Holds: two}, {Health: api.HealthSuspect, Holds: two[:1]}, {Health: api.HealthLost, Holds: two},
	}
	s.set(b)
	check("open", "2", "1", "1", "3")
	s.set()
	check("gone", "0", "0", "0", "0")
}

// Exactly one state and one mode are 1, whatever the state and the mode are.
func TestExactlyOneStateAndMode(t *testing.T) {
	s := &source{}
	m := newMetrics(t, s, nil)
	for _, st := range states {
		for _, mode := range modes {
			b := backend(st, drain.Counts{Known: true})
			b.Mode = mode
			s.set(b)
			var on []string
			for series, v := range samples(scrape(t, m)) {
				if v == "1" && (strings.HasPrefix(series, "ebb_backend_state{") || strings.HasPrefix(series, "ebb_mode{")) {
					on = append(on, series)
				}
			}
			slices.Sort(on)
			want := []string{
				fmt.Sprintf(`ebb_backend_state{backend="web",service="shop",state=%q}`, st),
				fmt.Sprintf(`ebb_mode{mode=%q,service="shop"}`, mode),
			}
			if !slices.Equal(on, want) {
				t.Errorf("got %v, want %v", on, want)
			}
		}
	}
}

// The sample of in-flight is there from registration on, through every state, unknown counts included, and
// for the retention after the backend is gone; it never reads as zero unless zero is known.
func TestC50_InFlightIsAlwaysPresent(t *testing.T) {
	s, c := &source{}, &clock{t: time.Unix(1_700_000_000, 0)}
	m := newMetrics(t, s, c)
	m.Register("shop", "web")
	check := func(when, inFlight, known string) {
		t.Helper()
		got := samples(scrape(t, m))
		if got["ebb_connections_in_flight"+web] != inFlight || got["ebb_counts_known"+web] != known {
			t.Errorf("%s: got in flight %q, known %q, want %q, %q", when,
				got["ebb_connections_in_flight"+web], got["ebb_counts_known"+web], inFlight, known)
		}
		for _, class := range api.Classes {
			if _, ok := got[fmt.Sprintf(`ebb_connections{backend="web",class=%q,service="shop"}`, class)]; !ok {
				t.Errorf("%s: no sample of class %s", when, class)
			}
		}
	}
	check("registered", "NaN", "0")
	s.set(backend(drain.StateServing, drain.Counts{Known: true}))
	check("known zero", "0", "1")
	s.set(backend(drain.StateServing, drain.Counts{Known: true, Active: 4}))
	check("known", "4", "1")
	s.set(backend(drain.StateServing, drain.Counts{Active: 4}))
	check("unknown", "NaN", "0")

	// A backend that ended its drain keeps what it ended with.
	s.set(backend(drain.StateDone, drain.Counts{Known: true}))
	check("done", "0", "1")
	s.set()
	check("gone after done", "0", "1")
	c.t = c.t.Add(DefaultRetain - time.Second)
	check("just before the retention ends", "0", "1")
	c.t = c.t.Add(2 * time.Second)
	if text := scrape(t, m); strings.Contains(text, "shop") {
		t.Errorf("after the retention: got %s, want no series of it", text)
	}

	// One that vanished says nothing about its connections any more.
	s.set(backend(drain.StateServing, drain.Counts{Known: true, Active: 4}))
	check("back", "4", "1")
	s.set()
	check("vanished", "NaN", "0")
	s.set(backend(drain.StateServing, drain.Counts{Known: true, Active: 5}))
	check("back again", "5", "1")
}

// Every series of a service and a backend exists right after Register, and none appears later.
func TestSeriesExistFromRegistration(t *testing.T) {
	s := &source{}
	m := newMetrics(t, s, nil)
	m.Register("shop", "web")
	before := samples(scrape(t, m))
	for _, cause := range causes {
		for _, o := range outcomes {
			series := fmt.Sprintf(`ebb_drains_total{cause=%q,outcome=%q,service="shop"}`, cause, o)
			if before[series] != "0" {
				t.Errorf("%s: got %q, want 0", series, before[series])
			}
		}
	}
	begun := time.Unix(1000, 0)
	ended := begun.Add(13 * time.Second)
	d := api.Drain{
		Service: "shop", Backend: "web", Cause: drain.CauseSignal, Outcome: drain.OutcomeExpired, Begun: begun, Ended: &ended,
		Phases: []api.PhaseAt{{Phase: drain.PhaseBegin, At: begun}, {Phase: drain.PhaseWait, At: begun.Add(time.Second)}, {Phase: drain.PhaseDone, At: ended}},
	}
	m.DrainEnded(d)
	for _, r := range flushResults {
		m.Flushed("shop", drain.FlushDeadline, r)
	}
	m.StaleSignal("shop")
	m.ConnectionsCut("shop", CutDestroy, 3)
	m.ConnectionsCut("shop", CutShutdown, -1)
	m.LateConnections("shop", LateAdmit, LateOK, 7)
	m.HeldConnections("shop", 3)
	m.CensusAudited(0)
	m.CensusAudited(-2)
	s.set(backend(drain.StateServing, drain.Counts{Known: true}))
	after := scrape(t, m)
	for series := range samples(after) {
		if _, ok := before[series]; !ok {
			t.Errorf("%s appeared after registration", series)
		}
	}
	wantSamples(t, after, map[string]string{
		`ebb_drains_total{cause="signal",outcome="expired",service="shop"}`:          "1",
		`ebb_drains_total{cause="signal",outcome="drained",service="shop"}`:          "0",
		`ebb_drain_duration_seconds_sum{phase="begin",service="shop"}`:               "1",
		`ebb_drain_duration_seconds_sum{phase="wait",service="shop"}`:                "12",
		`ebb_drain_duration_seconds_sum{phase="done",service="shop"}`:                "13",
		`ebb_drain_duration_seconds_count{phase="settle",service="shop"}`:            "0",
		`ebb_flushes_total{reason="deadline",result="timeout",service="shop"}`:       "1",
		`ebb_stale_signals_total{service="shop"}`:                                    "1",
		`ebb_connections_cut_total{method="destroy",service="shop"}`:                 "3",
		`ebb_connections_cut_total{method="shutdown",service="shop"}`:                "0",
		`ebb_late_connections_total{action="admit",result="ok",service="shop"}`:      "7",
		`ebb_late_connections_total{action="refuse",result="failed",service="shop"}`: "0",
		`ebb_late_connections_total{action="hold",result="failed",service="shop"}`:   "0",
		`ebb_held_connections{service="shop"}`:                                       "3",
		`ebb_census_audits_total`:                                                    "2",
		`ebb_census_drift_total`:                                                     "2",
	})
}

// The newest generation of a name is the one that is shown, whatever the order.
func TestNewestGenerationIsShown(t *testing.T) {
	s := &source{}
	m := newMetrics(t, s, nil)
	older, newer := backend(drain.StateDone, drain.Counts{Known: true, Active: 1}), backend(drain.StateServing, drain.Counts{Known: true, Active: 2})
	newer.Gen = 2
	for _, bs := range [][]api.Backend{{older, newer}, {newer, older}} {
		s.set(bs...)
		wantSamples(t, scrape(t, m), map[string]string{"ebb_connections_in_flight" + web: "2"})
	}
}

// Names from outside can not break a scrape, and no label holds an address or an id.
func TestLabels(t *testing.T) {
	s := &source{}
	m := newMetrics(t, s, nil)
	bad := backend(drain.StateServing, drain.Counts{Known: true})
	bad.Name, bad.Service = "w\xffb\"\n", "s\xfe"
	bad.Listeners = []api.Listener{{Address: "192.0.2.1:80"}}
	bad.Drain = &api.Drain{ID: "drain-id-1", Survivors: []api.Straggler{{Peer: "192.0.2.7:4000"}}}
	s.set(bad)
	m.Register(bad.Service, bad.Name)
	m.StaleSignal(bad.Service)
	text := scrape(t, m)
	for _, leak := range []string{"192.0.2", "drain-id-1"} {
		if strings.Contains(text, leak) {
			t.Errorf("%s is in the metrics", leak)
		}
	}
	if n := strings.Count(text, "ebb_connections_in_flight{"); n != 1 {
		t.Errorf("got %d samples in flight, want 1: Register and the scrape must agree on the name", n)
	}
}

func TestConcurrentScrapes(t *testing.T) {
	s := &source{}
	m := newMetrics(t, s, nil)
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for range 25 {
				scrape(t, m)
				m.StaleSignal("shop")
				m.Register("shop", fmt.Sprint("b", i))
				s.set(backend(drain.StateServing, drain.Counts{Known: true}))
			}
		})
	}
	wg.Wait()
	wantSamples(t, scrape(t, m), map[string]string{`ebb_stale_signals_total{service="shop"}`: "100"})
}

// The names are those of the contract, neither more nor fewer.
func TestNames(t *testing.T) {
	m := newMetrics(t, &source{}, nil)
	m.Register("shop", "web")
	var got []string
	for _, match := range regexp.MustCompile(`(?m)^# TYPE (\S+)`).FindAllStringSubmatch(scrape(t, m), -1) {
		got = append(got, match[1])
	}
	slices.Sort(got)
	want := []string{
		"ebb_backend_state", "ebb_build_info", "ebb_census_audits_total", "ebb_census_drift_total", "ebb_connections",
		"ebb_connections_cut_total", "ebb_connections_in_flight", "ebb_counts_known", "ebb_drain_deadline_timestamp_seconds",
		"ebb_drain_duration_seconds", "ebb_drain_survivors", "ebb_drains_total", "ebb_feature", "ebb_flushes_total",
		"ebb_held_connections", "ebb_holds", "ebb_late_connections_total", "ebb_mode", "ebb_sessions", "ebb_stale_signals_total",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// Prometheus's own linter has nothing to say.
func TestPromtoolCheck(t *testing.T) {
	promtool, err := exec.LookPath("promtool")
	if err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("promtool is required here: %v", err)
		}
		t.Skip("promtool is not installed (Debian: prometheus)")
	}
	s := &source{}
	m := newMetrics(t, s, nil)
	s.set(backend(drain.StateServing, drain.Counts{Known: true, Active: 1}))
	check := func(text string) (string, error) {
		cmd := exec.CommandContext(t.Context(), promtool, "check", "metrics")
		cmd.Stdin = strings.NewReader(text)
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		err := cmd.Run()
		return out.String(), err
	}
	text := scrape(t, m)
	if !strings.Contains(text, "ebb_drains_total{") {
		t.Error("the counters of a backend are missing in the first scrape that sees it")
	}
	if out, err := check(text); err != nil || strings.TrimSpace(out) != "" {
		t.Errorf("promtool check metrics: %v\n%s", err, out)
	}
	// It does look: a counter without _total is found.
	if out, err := check(strings.ReplaceAll(text, "ebb_drains_total", "ebb_drains")); err == nil && strings.TrimSpace(out) == "" {
		t.Error("promtool accepts a counter without _total: it did not look")
	}
}

func TestNewNeedsASource(t *testing.T) {
	if _, err := New(Options{}); err == nil {
		t.Error("got no error")
	}
}

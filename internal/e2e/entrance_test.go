// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"errors"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/agent"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/loadtest"
)

// A hundred who ask at once, over the API, by command line and by signal, are told of one drain: one flip, one notice,
// one flush.
func TestR2_AHundredBeginsAreOneDrain(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	r := h.run("web", []string{"--grace", "60s", "--on-new", "refuse", "--quiet-period", "300ms", "--notify", "signal:HUP"},
		app(t, "listen=127.0.0.1:8001")...)
	c := h.stuck("127.0.0.1:8001")
	client := r.api()
	var (
		wg  sync.WaitGroup
		mu  sync.Mutex
		ids = map[string]int{}
	)
	note := func(id string) {
		mu.Lock()
		defer mu.Unlock()
		ids[id]++
	}
	for i := range 90 {
		wg.Go(func() {
			var q api.DrainRequest
			if i%3 == 0 {
				later := api.Duration(time.Hour)
				q.Grace = &later // never moves the deadline later
			}
			d, err := client.Drain(t.Context(), "web", q)
			if err != nil {
				t.Errorf("drain: %v", err)
				return
			}
			note(d.ID)
		})
	}
	for range 3 {
		wg.Go(func() {
			out, stderr, code := h.ebb("drain", "web", "-o", "json")
			var d api.Drain
			if err := json.Unmarshal([]byte(out), &d); err != nil || code != 0 {
				t.Errorf("ebb drain: exit code %d, %v\n%s", code, err, stderr)
				return
			}
			note(d.ID)
		})
	}
	r.signal(unix.SIGTERM)
	wg.Wait()
	if len(ids) != 1 {
		t.Errorf("got %d drains, want 1: %v", len(ids), ids)
	}
	d := r.backend().Drain
	if d == nil || ids[d.ID] != 93 {
		t.Fatalf("got %v answers, want 93 with the id of %+v", ids, d)
	}
	budget := d.Deadline.Sub(d.Begun)
	if d.Cause == drain.CauseSignal && budget > 61*time.Second {
		t.Errorf("the deadline is %v after Begin, later than grace", budget)
	}
	r.said("signal SIGHUP")
	c.Close()
	if code := r.wait(); code != 0 {
		t.Errorf("got exit code %d, want 0", code)
	}
	for typ, want := range map[string]int{drain.EventBegin: 1, drain.EventEnd: 1, drain.EventExtended: 0} {
		if n := len(r.all(typ)); n != want {
			t.Errorf("got %d × %s, want %d", n, typ, want)
		}
	}
	for _, p := range []drain.Phase{drain.PhaseStopNew, drain.PhaseSettle, drain.PhaseWait, drain.PhaseFlush, drain.PhaseDone} {
		n := 0
		for _, e := range r.all(drain.EventPhase) {
			if e.Phase == p {
				n++
			}
		}
		if n != 1 {
			t.Errorf("phase %s was entered %d times", p, n)
		}
	}
	if got := r.heard(); !slices.Equal(got, []string{"SIGHUP", "SIGTERM"}) {
		t.Errorf("CMD heard %v, want one notice and one flush", got)
	}
	end := r.drained()
	if !end.Deadline.Equal(d.Deadline) || end.Cause != d.Cause || end.Outcome != drain.OutcomeDrained {
		t.Errorf("got %s by %s until %v, want drained by %s until %v", end.Outcome, end.Cause, end.Deadline, d.Cause, d.Deadline)
	}
}

// What is meant for an older generation changes nothing and is counted; an unknown backend is an error of the asker only.
func TestR5_AStaleGenerationIsACountedNoOp(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	flags := []string{"--grace", "60s", "--on-new", "refuse", "--quiet-period", "300ms"}
	first := h.run("web", flags, app(t, "listen=127.0.0.1:8001")...)
	old := first.backend().Gen
	first.signal(unix.SIGTERM)
	if code := first.wait(); code != 0 {
		t.Fatalf("got exit code %d, want 0", code)
	}
	r := h.run("web", flags, app(t, "listen=127.0.0.1:8001")...)
	gen := r.backend().Gen
	if gen <= old {
		t.Fatalf("the second generation is %d, not above %d", gen, old)
	}
	client := r.api()
	c := h.stuck("127.0.0.1:8001")
	replay := func(state drain.State) {
		t.Helper()
		for what, ask := range map[string]func() error{
			"drain":   func() error { _, err := client.Drain(t.Context(), "web", api.DrainRequest{Gen: old}); return err },
			"undrain": func() error { _, err := client.Undrain(t.Context(), "web", api.UndrainRequest{Gen: old}); return err },
			"cut":     func() error { _, err := client.Cut(t.Context(), "web", api.CutRequest{Gen: old}); return err },
			"extend": func() error {
				_, err := client.Extend(t.Context(), "web", api.ExtendRequest{Gen: old, Extra: api.Duration(time.Minute)})
				return err
			},
		} {
			if err := ask(); !errors.Is(err, api.ErrStale) {
				t.Errorf("a %s for the last generation: %v, want it called stale", what, err)
			}
		}
		if b := r.backend(); b.State != state {
			t.Errorf("got state %s after stale commands, want %s", b.State, state)
		}
		alive(t, c)
	}
	replay(drain.StateServing)
	d, err := client.Drain(t.Context(), "web", api.DrainRequest{Gen: gen})
	if err != nil {
		t.Fatal(err)
	}
	replay(drain.StateDraining)
	if now := r.backend().Drain; now.ID != d.ID || !now.Deadline.Equal(d.Deadline) {
		t.Errorf("stale commands changed the drain: %+v, want %+v", now, d)
	}
	eventually(t, "eight stale commands are counted", func() bool {
		return strings.Contains(r.metrics(), `ebb_stale_signals_total{service="web"} 8`)
	})
	if _, err := client.Drain(t.Context(), "nobody", api.DrainRequest{}); !errors.Is(err, api.ErrUnknown) {
		t.Errorf("drain of an unknown backend: %v, want it called unknown", err)
	}
	c.Close()
	r.wait()
	if n := len(r.all(drain.EventStale)); n != 8 {
		t.Errorf("got %d events of stale commands, want 8", n)
	}
}

// A drain that is taken back leaves everything as it was; the next one is another drain.
func TestD14_UndrainOpensAndTheNextDrainIsAnother(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	r := h.run("web", []string{"--grace", "60s", "--on-new", "refuse", "--quiet-period", "300ms"}, app(t, "listen=127.0.0.1:8001")...)
	c := h.stuck("127.0.0.1:8001")
	if s := r.status("/readyz"); s != http.StatusOK {
		t.Fatalf("readiness is %d before the drain", s)
	}
	client := r.api()
	first, err := client.Drain(t.Context(), "web", api.DrainRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if !h.refused("127.0.0.1:8001") {
		t.Fatal("a connection was taken although the drain had been answered")
	}
	out, stderr, code := h.ebb("undrain", "web")
	if code != 0 || !strings.Contains(out, "serves again") {
		t.Fatalf("ebb undrain: exit code %d\n%s%s", code, out, stderr)
	}
	if h.refused("127.0.0.1:8001") {
		t.Error("a connection is refused although the drain was taken back")
	}
	if s := r.status("/readyz"); s != http.StatusOK {
		t.Errorf("readiness is %d after the undrain", s)
	}
	alive(t, c)
	if b := r.backend(); b.State != drain.StateServing || b.Drain.Outcome != drain.OutcomeCancelled {
		t.Errorf("got state %s and outcome %q, want serving and cancelled", b.State, b.Drain.Outcome)
	}
	eventually(t, "the metrics tell of one cancelled drain, and of no other", func() bool {
		m := r.metrics()
		return strings.Contains(m, `ebb_drains_total{cause="operator",outcome="cancelled",service="web"} 1`) &&
			strings.Contains(m, `ebb_drains_total{cause="operator",outcome="drained",service="web"} 0`) &&
			strings.Contains(m, `ebb_drains_total{cause="operator",outcome="lost",service="web"} 0`)
	})
	if _, _, code := h.ebb("undrain", "web"); code == 0 {
		t.Error("a second undrain found something to take back")
	}
	second, err := client.Drain(t.Context(), "web", api.DrainRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if second.ID == first.ID {
		t.Errorf("the second drain has the id of the first, %s", first.ID)
	}
	c.Close()
	if code := r.wait(); code != 0 {
		t.Errorf("got exit code %d, want 0", code)
	}
	if d := r.drained(); d.ID != second.ID || d.Outcome != drain.OutcomeDrained {
		t.Errorf("got drain %s %s, want %s drained", d.ID, d.Outcome, second.ID)
	}
	if got := r.heard(); !slices.Equal(got, []string{"SIGTERM"}) {
		t.Errorf("CMD heard %v, want SIGTERM once", got)
	}
}

// An undrain that races with zero wins or loses; there is one outcome, and the state is that of the winner.
func TestD14_UndrainRacesZero(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	r := h.run("race", []string{"--grace", "60s", "--on-new", "refuse", "--quiet-period", "50ms"}, app(t, "listen=127.0.0.1:8001")...)
	client := r.api()
	won := 0
	after := 5 * time.Millisecond
	for range 30 {
		c := h.stuck("127.0.0.1:8001")
		d, err := client.Drain(t.Context(), "race", api.DrainRequest{})
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
		// From right after zero to long past the quiet period, however slow the machine is: in the end the flush wins.
		pause := time.NewTimer(after)
		after = after * 4 / 3
		<-pause.C
		_, err = client.Undrain(t.Context(), "race", api.UndrainRequest{})
		if err == nil {
			won++
			if b := r.backend(); b.State != drain.StateServing || b.Drain.ID != d.ID || b.Drain.Outcome != drain.OutcomeCancelled {
				t.Fatalf("undrain was answered, and the state is %s with outcome %q", b.State, b.Drain.Outcome)
			}
			if h.refused("127.0.0.1:8001") {
				t.Fatal("undrain was answered, and admission is closed")
			}
			if got := r.heard(); len(got) > 0 {
				t.Fatalf("undrain was answered, and CMD heard %v", got)
			}
			continue
		}
		// Flushing, over, or the run has gone already: zero has won.
		if code := r.wait(); code != 0 {
			t.Errorf("got exit code %d, want 0", code)
		}
		if end := r.drained(); end.ID != d.ID || end.Outcome != drain.OutcomeDrained {
			t.Errorf("got drain %s %s, want %s drained", end.ID, end.Outcome, d.ID)
		}
		if got := r.heard(); !slices.Equal(got, []string{"SIGTERM"}) {
			t.Errorf("CMD heard %v, want SIGTERM once", got)
		}
		ends := map[string]int{}
		for _, e := range r.all(drain.EventEnd) {
			ends[e.Drain]++
		}
		for id, n := range ends {
			if n != 1 {
				t.Errorf("drain %s ended %d times", id, n)
			}
		}
		if len(ends) != won+1 {
			t.Errorf("%d drains ended, want %d taken back and one drained", len(ends), won)
		}
		return
	}
	t.Errorf("undrain won %d times out of 30, also long after zero", won)
}

// The phases come in the order of the contract, each once, and the notice at the moment that was asked for.
func TestT1_OrderOfPhasesAndMomentOfTheNotice(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	order := []drain.Phase{drain.PhaseBegin, drain.PhaseStopNew, drain.PhaseSettle, drain.PhaseWait, drain.PhaseFlush, drain.PhaseCut, drain.PhaseDone}
	for _, moment := range []string{"begin", "settled"} {
		t.Run(moment, func(t *testing.T) {
			h := h.as(t)
			quiet := "40s" // stop_new lasts as long: the notice at begin does not wait for its end
			if moment == "settled" {
				quiet = "2s"
			}
			r := h.run(moment, []string{"--grace", "120s", "--flush-timeout", "500ms", "--reserve", "2s", "--quiet-period", quiet, "--on-new", "admit",
				"--notify", "signal:HUP@" + moment}, app(t, "listen=127.0.0.1:8001", "exit=none")...)
			h.stuck("127.0.0.1:8001")
			r.signal(unix.SIGTERM)
			r.phase(drain.PhaseStopNew)
			if moment == "begin" {
				r.said("signal SIGHUP")
				if p := r.backend().Drain.Phase(); p != drain.PhaseStopNew {
					t.Errorf("the notice came in %s, want it while admission is open", p)
				}
			} else {
				// Forwarded at once. The kernel delivers the lower number first, so a notice that was sent already would be heard.
				r.signal(unix.SIGUSR2)
				r.said("signal SIGUSR2")
				early := r.count("signal SIGHUP") > 0
				if p := r.backend().Drain.Phase(); early && p == drain.PhaseStopNew {
					t.Error("the notice came before the drain had settled")
				}
				r.phase(drain.PhaseWait)
				r.said("signal SIGHUP")
			}
			// It ends with a cut, so that every phase is there.
			if _, stderr, code := h.ebb("cut", moment); code != 0 {
				t.Fatalf("ebb cut: exit code %d\n%s", code, stderr)
			}
			if code := r.wait(); code != 0 {
				t.Errorf("got exit code %d, want 0", code)
			}
			d := r.drained()
			var got []drain.Phase
			for i, p := range d.Phases {
				got = append(got, p.Phase)
				if p.At.IsZero() || (i > 0 && p.At.Before(d.Phases[i-1].At)) {
					t.Errorf("phase %s has time %v, before %v", p.Phase, p.At, d.Phases[max(0, i-1)].At)
				}
			}
			if !slices.Equal(got, order) {
				t.Errorf("got phases %v, want %v", got, order)
			}
			// The events tell the same story.
			got = nil
			r.mu.Lock()
			for _, e := range r.events {
				if e.Type == drain.EventBegin || e.Type == drain.EventPhase {
					got = append(got, e.Phase)
				}
			}
			r.mu.Unlock()
			if !slices.Equal(got, order) {
				t.Errorf("got events of %v, want %v", got, order)
			}
			if r.count("signal SIGHUP") != 1 || r.count("signal SIGTERM") != 1 {
				t.Errorf("CMD heard %v, want the notice and the flush once each", r.heard())
			}
		})
	}
}

// Whoever subscribes in the middle of a drain is told where it stands, and so is whoever asks.
func TestT11_ALateSubscriberSeesThePresent(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	r := h.run("web", []string{"--grace", "60s", "--on-new", "refuse", "--quiet-period", "300ms"}, app(t, "listen=127.0.0.1:8001")...)
	c := h.stuck("127.0.0.1:8001")
	r.signal(unix.SIGTERM)
	r.phase(drain.PhaseWait)

	stream, err := r.api().Follow(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	seen := make(chan drain.Event, 100)
	go func() {
		defer close(seen)
		for e, err := range stream.All() {
			if err != nil {
				return
			}
			seen <- e
		}
	}()
	next := func(what string, is func(drain.Event) bool) drain.Event {
		t.Helper()
		timeout := time.After(patience)
		for {
			select {
			case e, ok := <-seen:
				if !ok {
					t.Fatalf("the stream ended without %s", what)
				}
				if is(e) {
					return e
				}
			case <-timeout:
				t.Fatalf("no %s came", what)
			}
		}
	}
	// All that has happened, and nothing has to happen first.
	last := next("the present phase", func(e drain.Event) bool { return e.Phase == drain.PhaseWait })
	if d := r.backend().Drain; d == nil || d.Phase() != drain.PhaseWait || d.ID != last.Drain || d.Blocking["active"] != 1 {
		t.Errorf("status in the middle of the drain is %+v, want it in wait for 1 active", d)
	}
	out, _, code := h.ebb("status", "web")
	if code != 0 || !strings.Contains(out, "draining") {
		t.Errorf("ebb status: exit code %d, want draining\n%s", code, out)
	}
	out, _, code = h.ebb("explain", "web")
	if code != 0 || !strings.Contains(out, "1 active") || !strings.Contains(out, c.LocalAddr().String()) || !strings.Contains(out, "cause signal") {
		t.Errorf("ebb explain: exit code %d, want what blocks, the peer %v and the cause\n%s", code, c.LocalAddr(), out)
	}
	// A subscriber that has seen some already gets the rest only.
	out, _, code = h.ebb("events", "--from", "3")
	var first drain.Event
	if line, _, _ := strings.Cut(out, "\n"); code != 0 || json.Unmarshal([]byte(line), &first) != nil || first.Seq != 3 {
		t.Errorf("ebb events --from 3: exit code %d, first %d", code, first.Seq)
	}
	c.Close()
	end := next("the end", func(e drain.Event) bool { return e.Type == drain.EventEnd })
	if end.Outcome != drain.OutcomeDrained {
		t.Errorf("got outcome %s, want drained", end.Outcome)
	}
	r.wait()
}

// Readiness turns at Begin, liveness stays, and a balancer that goes on for three seconds loses nothing.
func TestT3_ReadinessTurnsAtBeginAndASlowBalancerLosesNothing(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	r := h.run("web", []string{"--grace", "60s", "--protocol", "http1"}, goServer(t, "127.0.0.1:8001")...)
	if ready, live := r.status("/readyz"), r.status("/livez"); ready != http.StatusOK || live != http.StatusOK {
		t.Fatalf("got readiness %d and liveness %d before the drain, want 200 and 200", ready, live)
	}
	l := h.load(loadtest.Options{Targets: []loadtest.Target{{Name: "web", Addr: "127.0.0.1:8001"}}, Rate: 50, Drain: 3 * time.Second})
	l.warm(20)
	if err := l.Drop("web"); err != nil {
		t.Fatal(err)
	}
	r.signal(unix.SIGTERM)
	r.phase(drain.PhaseStopNew)
	for path, want := range map[string]int{"/readyz": http.StatusServiceUnavailable, "/readyz/web": http.StatusServiceUnavailable, "/livez": http.StatusOK} {
		if got := r.status(path); got != want {
			t.Errorf("%s answers %d during the drain, want %d", path, got, want)
		}
	}
	if code := r.wait(); code != 0 {
		t.Errorf("got exit code %d, want 0", code)
	}
	rep := l.end()
	if rep.Failed != 0 {
		t.Errorf("%d of %d requests failed: %s", rep.Failed, rep.Requests, verdicts(rep))
	}
	d := r.drained()
	if d.Outcome != drain.OutcomeDrained || d.Late == nil || d.Late.Admitted == 0 {
		t.Errorf("got %s with late %+v, want drained with late connections admitted", d.Outcome, d.Late)
	}
}

// A balancer that never learns is served for admit_for, and turned away before a byte from then on.
func TestT3_AdmitForBoundsTheAdmission(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	r := h.run("web", []string{"--grace", "60s", "--quiet-period", "300ms", "--admit-for", "2s", "--protocol", "http1"}, goServer(t, "127.0.0.1:8001")...)
	l := h.load(loadtest.Options{Targets: []loadtest.Target{{Name: "web", Addr: "127.0.0.1:8001"}}, Rate: 50})
	l.warm(20)
	r.signal(unix.SIGTERM)
	if code := r.wait(); code != 0 {
		t.Errorf("got exit code %d, want 0", code)
	}
	rep := l.end()
	d := r.drained()
	flip := at(t, d, drain.PhaseSettle)
	if admitted := flip.Sub(d.Begun); admitted < 2*time.Second {
		t.Errorf("admission closed after %v, want 2s: connections never paused", admitted)
	}
	for v, tally := range rep.Verdicts {
		switch {
		case v == loadtest.OK:
		case v == loadtest.ConnectRefused && tally.FirstStart.After(d.Begun.Add(2*time.Second)):
		default:
			t.Errorf("%d × %s (%s), first at %v; begun at %v, flip at %v", tally.Count, v, tally.Example, tally.FirstStart, d.Begun, flip)
		}
	}
	if d.Outcome != drain.OutcomeDrained || d.Late == nil || d.Late.Admitted == 0 || d.Late.Refused == 0 {
		t.Errorf("got %s with late %+v, want drained with late connections admitted and refused", d.Outcome, d.Late)
	}
}

// A drain is begun with a shorter budget: the slices are scaled to it, and the drain says so.
func TestT13_AShorterKillTimeScalesTheSlices(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	// What does not fit is refused before CMD is started, with the sums.
	_, stderr, code := h.ebb("run", "--grace", "10s", "--flush-timeout", "8s", "--", "sh", "-c", "echo started >&2")
	if code != agent.ExitFailure || strings.Contains(stderr, "started") {
		t.Errorf("got exit code %d, want %d and no start:\n%s", code, agent.ExitFailure, stderr)
	}
	for _, want := range []string{"grace 10s", "flush_timeout 8s", "reserve 3s", "-1s", "beyond 11s"} {
		if !strings.Contains(stderr, want) {
			t.Errorf("the error does not show %q:\n%s", want, stderr)
		}
	}
	r := h.run("web", []string{"--grace", "60s", "--flush-timeout", "20s", "--reserve", "10s", "--on-new", "refuse"}, app(t, "listen=127.0.0.1:8001")...)
	c := h.stuck("127.0.0.1:8001")
	out, stderr, code := h.ebb("drain", "web", "--grace", "30s", "-o", "json")
	var d api.Drain
	if err := json.Unmarshal([]byte(out), &d); err != nil || code != 0 {
		t.Fatalf("ebb drain: exit code %d, %v\n%s", code, err, stderr)
	}
	near := func(got api.Duration, want time.Duration) bool {
		// The request took some of it to arrive.
		return time.Duration(got) <= want && time.Duration(got) > want*4/5
	}
	if !near(d.Slices.Wait, 15*time.Second) || !near(d.Slices.Flush, 10*time.Second) || !near(d.Slices.Reserve, 5*time.Second) {
		t.Errorf("got slices %v, want 15s, 10s and 5s at most", d.Slices)
	}
	if left := d.Deadline.Sub(d.Begun); left > 30*time.Second {
		t.Errorf("the deadline is %v after Begin, want 30s at most", left)
	}
	begin := r.await(drain.EventBegin)
	if budget, _ := begin.Fields["budget"].(string); !strings.Contains(budget, "scaled to") {
		t.Errorf("the drain begins with %q and does not say that it was scaled", budget)
	}
	c.Close()
	r.wait()
}

// However often Begin is called and whatever signals pass through, the deadline stays where it is.
func TestR7_NothingThatArrivesMovesTheDeadline(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	r := h.run("web", []string{"--grace", "5s", "--flush-timeout", "1s", "--reserve", "1s", "--quiet-period", "300ms", "--on-new", "refuse"},
		app(t, "listen=127.0.0.1:8001")...)
	c := h.stuck("127.0.0.1:8001")
	client := r.api()
	d, err := client.Drain(t.Context(), "web", api.DrainRequest{})
	if err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var spam sync.WaitGroup
	spam.Go(func() {
		later := api.Duration(time.Hour)
		for {
			select {
			case <-stop:
				return
			case <-r.done:
				return
			default:
			}
			got, err := client.Drain(t.Context(), "web", api.DrainRequest{Grace: &later})
			if err == nil && got.Running() && !got.Deadline.Equal(d.Deadline) {
				t.Errorf("the deadline moved from %v to %v", d.Deadline, got.Deadline)
				return
			}
			_ = r.cmd.Cmd.Process.Signal(unix.SIGHUP) // it may have ended
			if _, err := c.Write([]byte("x")); err != nil {
				return
			}
			pause := time.NewTimer(20 * time.Millisecond)
			<-pause.C
		}
	})
	if code := r.wait(); code != 0 {
		t.Errorf("got exit code %d, want 0", code)
	}
	close(stop)
	spam.Wait()
	end := r.drained()
	if end.ID != d.ID || !end.Deadline.Equal(d.Deadline) || end.Outcome != drain.OutcomeExpired || end.FlushReason != drain.FlushDeadline {
		t.Errorf("got drain %s until %v, %s at %s; want %s until %v, expired at the deadline", end.ID, end.Deadline, end.Outcome, end.FlushReason, d.ID, d.Deadline)
	}
	if n := len(r.all(drain.EventShortened)) + len(r.all(drain.EventExtended)); n != 0 {
		t.Errorf("the deadline moved %d times", n)
	}
	if r.count("signal SIGTERM") != 1 || r.count("signal SIGHUP") == 0 {
		t.Errorf("CMD heard %d × SIGTERM, want 1, and %d × SIGHUP, want some", r.count("signal SIGTERM"), r.count("signal SIGHUP"))
	}
}

// The exit code of ebb drain --wait is the outcome.
func TestR9_TheWaitOfTheCommandLineEndsWithTheOutcome(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	short := []string{"--grace", "3s", "--flush-timeout", "1s", "--reserve", "1s", "--quiet-period", "200ms", "--on-new", "refuse"}
	wait := func(t *testing.T, name string) (stderr func() string, code func() int) {
		t.Helper()
		var errs strings.Builder
		cmd := h.ns.Command(t, ebbBin, "drain", name, "--wait")
		cmd.Cmd.Env, cmd.Cmd.Stderr = h.env, &errs
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return errs.String, func() int {
			t.Helper()
			done := make(chan error, 1)
			go func() { done <- cmd.Wait() }()
			select {
			case err := <-done:
				var exit *exec.ExitError
				if err != nil && !errors.As(err, &exit) {
					t.Fatal(err)
				}
			case <-time.After(patience):
				t.Fatal("ebb drain --wait has not ended")
			}
			return cmd.Cmd.ProcessState.ExitCode()
		}
	}
	for _, c := range []struct {
		name   string
		flags  []string
		code   int
		during func(t *testing.T, r *supervised)
	}{
		{"drained", append(slices.Clone(short), "--grace", "60s"), 0, nil},
		{"expired", short, 3, nil},
		{"lost", append(slices.Clone(short), "--grace", "60s"), 4, func(t *testing.T, r *supervised) {
			r.phase(drain.PhaseWait)
			if err := unix.Kill(r.child(), unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
		}},
		{"cancelled", append(slices.Clone(short), "--grace", "60s"), 5, func(t *testing.T, r *supervised) {
			r.phase(drain.PhaseWait)
			if _, err := r.api().Undrain(t.Context(), r.name, api.UndrainRequest{}); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := h.as(t)
			r := h.run(c.name, c.flags, app(t, "listen=127.0.0.1:8001")...)
			if c.name != "drained" {
				conn := h.stuck("127.0.0.1:8001")
				defer conn.Close()
			}
			stderr, code := wait(t, c.name)
			if c.during != nil {
				c.during(t, r)
			}
			if got := code(); got != c.code {
				t.Errorf("got exit code %d, want %d:\n%s", got, c.code, stderr())
			}
			if !strings.Contains(stderr(), c.name) {
				t.Errorf("the wait does not name the outcome %s:\n%s", c.name, stderr())
			}
			if c.name == "cancelled" {
				r.signal(unix.SIGKILL)
				if err := unix.Kill(-r.child(), unix.SIGKILL); err != nil {
					t.Error(err)
				}
			}
			<-r.done
		})
	}
}

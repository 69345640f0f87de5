// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
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

// survivors are those of the event, which comes before the flush.
func (r *supervised) survivors() []drain.Survivor {
	r.h.t.Helper()
	told := r.await(drain.EventSurvivors)
	b, err := json.Marshal(told.Fields["survivors"])
	if err != nil {
		r.h.t.Fatal(err)
	}
	var out []drain.Survivor
	if err := json.Unmarshal(b, &out); err != nil {
		r.h.t.Fatal(err)
	}
	if flush := r.await(drain.EventFlush); flush.Seq < told.Seq {
		r.h.t.Errorf("%s: survivors were listed after the flush", r.name)
	}
	return out
}

// One stuck connection: it is listed before the flush with all that is known of it, the flush gets its slice, and then
// the policy decides.
func TestR8_ThePolicyDecidesAboutOneStuckConnection(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	type stuck struct {
		policy drain.OnDeadline
		addr   string
		r      *supervised
		c      net.Conn
	}
	var all []stuck
	for i, policy := range []drain.OnDeadline{drain.OnDeadlineCut, drain.OnDeadlineReset, drain.OnDeadlineLeave} {
		addr := fmt.Sprintf("127.0.0.1:800%d", i+1)
		r := h.run(string(policy), []string{"--grace", "5s", "--flush-timeout", "1500ms", "--reserve", "2s", "--quiet-period", "200ms", "--on-new", "refuse",
			"--on-deadline", string(policy)}, app(t, "listen="+addr, "exit=none")...)
		c := h.stuck(addr)
		alive(t, c)
		all = append(all, stuck{policy, addr, r, c})
	}
	// The three drains wait side by side.
	for _, s := range all {
		s.r.signal(unix.SIGTERM)
	}
	for _, s := range all {
		policy, addr, r, c := s.policy, s.addr, s.r, s.c
		t.Run(string(policy), func(t *testing.T) {
			list := r.survivors()
			if len(list) != 1 {
				t.Fatalf("got %d survivors, want 1: %v", len(list), list)
			}
			s := list[0]
			if s.Peer != c.LocalAddr().String() || s.Local != addr || s.Class != "active" || s.In != 2 || s.Out != 2 || s.Age <= 0 || s.Idle <= 0 || s.Idle > s.Age+time.Second {
				t.Errorf("got survivor %+v, want %v with 2 bytes each way, its age and its idle time", s, c.LocalAddr())
			}
			err := ended(t, c)
			if code := r.wait(); code != 0 {
				t.Errorf("got exit code %d, want 0", code)
			}
			d := r.drained()
			if d.Outcome != drain.OutcomeExpired || d.FlushReason != drain.FlushDeadline || len(d.Survivors) != 1 {
				t.Errorf("got %s at %s with %d survivors, want expired at the deadline with 1", d.Outcome, d.FlushReason, len(d.Survivors))
			}
			asked := r.count("eof "+c.LocalAddr().String()) > 0
			switch policy {
			case drain.OnDeadlineCut:
				if !errors.Is(err, io.EOF) || !asked || d.Cut == nil || d.Cut.Graceful != 1 || d.Cut.Destroyed != 0 || d.Cut.Left != 0 {
					t.Errorf("the client saw %v, CMD saw it leave: %t, report %+v; want a clean end", err, asked, d.Cut)
				}
			case drain.OnDeadlineReset:
				if !errors.Is(err, unix.ECONNRESET) || d.Cut == nil || d.Cut.Graceful != 0 || d.Cut.Destroyed != 1 || d.Cut.Left != 0 {
					t.Errorf("the client saw %v, report %+v; want a reset", err, d.Cut)
				}
			case drain.OnDeadlineLeave:
				if asked || d.Cut != nil {
					t.Errorf("CMD saw it leave: %t, report %+v; want it left alone", asked, d.Cut)
				}
			}
			// The flush kept its slice, and CMD heard it once.
			if slice := at(t, d, drain.PhaseCut).Sub(at(t, d, drain.PhaseFlush)); slice < time.Second {
				t.Errorf("the flush had %v of its 1.5s", slice)
			}
			if got := r.heard(); !slices.Equal(got, []string{"SIGTERM"}) {
				t.Errorf("CMD heard %v, want SIGTERM once", got)
			}
		})
	}
}

// The wait has used up its slice: the flush goes to CMD's main process alone, and has all of its own.
func TestT12_TheFlushGoesToTheMainProcessAloneAndKeepsItsSlice(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	child := app(t, "name=child", "exit=none")
	script := fmt.Sprintf(`%s %s & exec "$@"`, child[0], strings.Join(child[1:], " "))
	r := h.run("main", []string{"--grace", "5s", "--flush-timeout", "3s", "--reserve", "1s", "--quiet-period", "200ms", "--on-new", "refuse"},
		append([]string{"sh", "-c", script, "sh"}, app(t, "listen=127.0.0.1:8001", "exit=none")...)...)
	r.said("child: ready")
	h.stuck("127.0.0.1:8001")
	r.signal(unix.SIGTERM)
	flush := r.await(drain.EventFlush)
	if left, _ := flush.Fields["left_s"].(float64); left < 2 || flush.Fields["reason"] != string(drain.FlushDeadline) {
		t.Errorf("the flush is told %v, want the deadline and 3 s", flush.Fields)
	}
	if code := r.wait(); code != 0 {
		t.Errorf("got exit code %d, want 0", code)
	}
	if got := r.heard(); !slices.Equal(got, []string{"SIGTERM"}) {
		t.Errorf("CMD heard %v, want SIGTERM once", got)
	}
	for _, l := range r.lines() {
		if strings.HasPrefix(l, "child: signal") {
			t.Errorf("the child in CMD's group heard %q", l)
		}
	}
}

// A client that reads events for ever does not keep a service from its end.
func TestT8_AnEndlessEventStreamEndsAtTheDeadline(t *testing.T) {
	t.Parallel()
	endless(t, []string{"--protocol", "http1"}, []string{"-graceful"}, loadtest.Options{Events: 1})
}

// Nor does a stream of bytes both ways, under an application that goes on with it.
func TestC2_ABidirectionalStreamEndsAtTheDeadline(t *testing.T) {
	t.Parallel()
	endless(t, nil, []string{"-ignore-signals"}, loadtest.Options{Upgrade: 1})
}

func endless(t *testing.T, flags, serverFlags []string, o loadtest.Options) {
	t.Helper()
	h := newHost(t)
	r := h.run("web", append([]string{"--grace", "5s", "--flush-timeout", "1s", "--reserve", "2s", "--quiet-period", "200ms", "--exit-on-outcome"}, flags...),
		goServer(t, "127.0.0.1:8001", serverFlags...)...)
	o.Targets = []loadtest.Target{{Name: "web", Addr: "127.0.0.1:8001"}}
	l := h.load(o)
	eventually(t, "the stream is open", func() bool { b := r.backend(); return b.InFlight != nil && *b.InFlight == 1 })
	r.signal(unix.SIGTERM)
	if code := r.wait(); code != agent.ExitExpired {
		t.Errorf("got exit code %d, want %d", code, agent.ExitExpired)
	}
	rep := l.end()
	if n := rep.Verdicts[loadtest.Open]; n != nil && n.Count > 0 {
		t.Errorf("the stream is open after the end: %s", verdicts(rep))
	}
	d := r.drained()
	if d.Outcome != drain.OutcomeExpired || d.FlushReason != drain.FlushDeadline || len(d.Survivors) != 1 {
		t.Fatalf("got %s at %s with %d survivors, want expired at the deadline with 1", d.Outcome, d.FlushReason, len(d.Survivors))
	}
	if s := d.Survivors[0]; s.Class != "active" || s.Sent == 0 || s.Received == 0 {
		t.Errorf("got survivor %+v, want an active one that has sent and received", s)
	}
}

// Every five seconds the drain says what is left, by class; and zero ends the wait long before the deadline.
func TestR10_ProgressIsToldByClass(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	r := h.run("web", []string{"--grace", "10m", "--on-new", "refuse", "--quiet-period", "300ms", "--idle-after", "1s"}, app(t, "listen=127.0.0.1:8001", "listen=127.0.0.1:8002")...)
	idle := h.stuck("127.0.0.1:8002")
	h.connect("127.0.0.1:8002")
	busy := h.stuck("127.0.0.1:8001")
	r.signal(unix.SIGTERM)
	stop := make(chan struct{})
	var talk sync.WaitGroup
	defer talk.Wait()
	talk.Go(func() {
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				if _, err := busy.Write([]byte("x")); err != nil {
					return
				}
			}
		}
	})
	var seen []drain.Event
	r.find("two reports of progress", func(e drain.Event) bool {
		if e.Type == drain.EventProgress {
			seen = append(seen, e)
		}
		return len(seen) == 2
	})
	close(stop)
	for _, e := range seen {
		counts, _ := e.Fields["counts"].(map[string]any)
		if e.Fields["known"] != true || e.Fields["in_flight"] != 1.0 || counts["active"] != 1.0 || counts["idle"] != 1.0 || counts["unused"] != 1.0 || e.Message != "waiting for: 1 active" {
			t.Errorf("progress is %q %v, want 1 active in flight, 1 idle, 1 unused", e.Message, e.Fields)
		}
	}
	if gap := seen[1].Time.Sub(seen[0].Time); gap < 4*time.Second || gap > 20*time.Second {
		t.Errorf("progress came %v apart, want 5s", gap)
	}
	talk.Wait()
	busy.Close()
	if code := r.wait(); code != 0 {
		t.Errorf("got exit code %d, want 0", code)
	}
	if d := r.drained(); d.Outcome != drain.OutcomeDrained || d.FlushReason != drain.FlushZero {
		t.Errorf("got %s at %s, want drained at zero", d.Outcome, d.FlushReason)
	}
	idle.Close()
}

// The clients that are cut do not all learn it in one instant.
func TestR17_CutsAreSpread(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	_, stderr, code := h.ebb("run", "--close-spread", "10s", "--", "true")
	if code != agent.ExitFailure || !strings.Contains(stderr, "close_spread 10s is longer than reserve 3s") {
		t.Errorf("a spread that does not fit: exit code %d, want %d and the sums\n%s", code, agent.ExitFailure, stderr)
	}
	const conns = 100
	r := h.run("web", []string{"--grace", "9s", "--flush-timeout", "500ms", "--reserve", "7s", "--quiet-period", "200ms", "--on-new", "refuse", "--close-spread", "2s"},
		app(t, "listen=127.0.0.1:8001", "exit=none")...)
	var wg sync.WaitGroup
	var mu sync.Mutex
	var ends []time.Time
	for range conns {
		c := h.stuck("127.0.0.1:8001")
		wg.Go(func() {
			if err := ended(t, c); !errors.Is(err, io.EOF) {
				t.Errorf("a client saw %v, want a clean end", err)
			}
			mu.Lock()
			defer mu.Unlock()
			ends = append(ends, time.Now())
		})
	}
	r.signal(unix.SIGTERM)
	wg.Wait()
	if code := r.wait(); code != 0 {
		t.Errorf("got exit code %d, want 0", code)
	}
	if d := r.drained(); d.Cut == nil || d.Cut.Graceful != conns {
		t.Errorf("got report %+v, want %d closed by CMD", d.Cut, conns)
	}
	slices.SortFunc(ends, time.Time.Compare)
	most := 0
	for i := range ends {
		j := i
		for j < len(ends) && ends[j].Sub(ends[i]) < 100*time.Millisecond {
			j++
		}
		most = max(most, j-i)
	}
	// 5 in a tenth of a second are to be expected of 100 in two seconds; a slow machine bunches some of them.
	if span := ends[len(ends)-1].Sub(ends[0]); most > conns/2 || span < 500*time.Millisecond {
		t.Errorf("%d of %d ended within 100ms, all within %v; want them spread over 2s", most, conns, span)
	}
	if e := r.await(drain.EventCut); e.Fields["spread_s"] != 2.0 {
		t.Errorf("the cut was spread over %v s, want 2", e.Fields["spread_s"])
	}
}

// A moment of zero is not the end: a kept connection carries a request after it, and the quiet period begins anew.
func TestC30_ARequestAfterAMomentOfZero(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	r := h.run("web", []string{"--grace", "60s", "--on-new", "refuse", "--quiet-period", "4s", "--protocol", "http1", "--idle", "ignore"},
		goServer(t, "127.0.0.1:8001")...)
	c := h.connect("127.0.0.1:8001")
	get := func(path string) {
		t.Helper()
		if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		if _, err := fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", path); err != nil {
			t.Fatalf("send request: %v", err)
		}
		var b []byte
		buf := make([]byte, 4096)
		for !strings.HasSuffix(string(b), "hello\n") {
			n, err := c.Read(buf)
			if err != nil {
				t.Fatalf("read answer: %v after %q", err, b)
			}
			b = append(b, buf[:n]...)
		}
	}
	get("/")
	r.signal(unix.SIGTERM)
	r.phase(drain.PhaseWait)
	eventually(t, "the count is zero", func() bool { b := r.backend(); return b.InFlight != nil && *b.InFlight == 0 })
	get("/?ms=1500")
	answered := time.Now()
	if n := len(r.all(drain.EventFlush)); n != 0 {
		t.Fatal("the flush did not wait for the request")
	}
	flush := r.await(drain.EventFlush)
	if quiet := flush.Time.Sub(answered); quiet < 3*time.Second {
		t.Errorf("the flush came %v after the answer, want zero to last for 4s", quiet)
	}
	if code := r.wait(); code != 0 {
		t.Errorf("got exit code %d, want 0", code)
	}
	if d := r.drained(); d.Outcome != drain.OutcomeDrained || d.FlushReason != drain.FlushZero {
		t.Errorf("got %s at %s, want drained at zero", d.Outcome, d.FlushReason)
	}
}

// Settings that cannot work together are refused before CMD starts, each with what is wrong; the budget in force is told.
func TestC31_ContradictionsAreRefusedWithTheSums(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	for _, c := range []struct {
		flags []string
		want  []string
	}{
		{[]string{"--grace", "5s"}, []string{"grace 5s − flush_timeout 5s − reserve 3s leaves -3s", "beyond 8s"}},
		{[]string{"--grace", "10s", "--quiet-period", "5s"}, []string{"quiet_period 5s does not fit into wait 2s = grace 10s − flush_timeout 5s − reserve 3s"}},
		{[]string{"--grace", "10s", "--admit-for", "3s"}, []string{"admit_for 3s does not fit into wait 2s"}},
		{[]string{"--close-spread", "4s"}, []string{"close_spread 4s is longer than reserve 3s"}},
		{[]string{"--grace", "-1s"}, []string{"grace -1s is negative"}},
		{[]string{"--reserve", "0s"}, []string{"--reserve 0s: want a duration above 0"}},
		{[]string{"--grace", "5s", "--close-spread", "4s", "--idle", "never"}, []string{"leaves -3s", "close_spread 4s", `idle "never" is unknown: use one of ignore, wait, close`}},
		{[]string{"--protocol", "h2"}, []string{`protocol "h2" is unknown: use one of opaque, http1`}},
		{[]string{"--on-deadline", "kill"}, []string{`"kill"`, "cut, reset, leave"}},
		{[]string{"--notify", "signal:NOSUCH"}, []string{"--notify", "NOSUCH"}},
		{[]string{"--flush", "signal:TERM@settled"}, []string{"--flush", "--notify"}},
		{[]string{"--listen", "localhost:80"}, []string{"--listen", "numeric address"}},
		{[]string{"--exclude-port", "70000"}, []string{"--exclude-port 70000"}},
		{[]string{"--ready", "127.0.0.1:80"}, []string{"--ready", "http://"}},
		{[]string{"--stop-signal", "STOPP"}, []string{"--stop-signal", "STOPP"}},
	} {
		t.Run(strings.Join(c.flags, " "), func(t *testing.T) {
			_, stderr, code := h.ebb(append(append([]string{"run"}, c.flags...), "--", "sh", "-c", "echo started >&2")...)
			if code != agent.ExitFailure || strings.Contains(stderr, "started") {
				t.Errorf("got exit code %d, want %d and no start", code, agent.ExitFailure)
			}
			for _, want := range c.want {
				if !strings.Contains(stderr, want) {
					t.Errorf("the error does not say %q:\n%s", want, stderr)
				}
			}
		})
	}
	r := h.run("web", []string{"--grace", "20s", "--flush-timeout", "4s", "--reserve", "2s"}, app(t, "listen=127.0.0.1:8001")...)
	if e := r.await(agent.EventRun); !strings.Contains(e.Message, "grace 20s = wait 14s + flush_timeout 4s + reserve 2s; quiet_period 1s, admit_for 7s") {
		t.Errorf("the start says %q, want the budget in force", e.Message)
	}
	r.signal(unix.SIGTERM)
	if code := r.wait(); code != 0 {
		t.Errorf("got exit code %d, want 0", code)
	}
	if p := r.drained().Policy; p.Grace != api.Duration(20*time.Second) || p.AdmitFor != api.Duration(7*time.Second) {
		t.Errorf("the report tells of policy %+v, want grace 20s and admit_for 7s", p)
	}
}

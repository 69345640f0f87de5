// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/loadtest"
)

// refusing is a drain that turns new connections away and does not end while the test looks.
var refusing = map[string]string{"on_new": "refuse", "grace": "120s"}

// A drain is begun and taken back again and again under a storm of connections over a steered link. Each connection is
// counted and served, or turned away; and once the caller has been answered, no later SYN goes the old way.
func TestR3_ConnectStormAcrossTheFlip(t *testing.T) {
	n := newLAN(t)
	addr := n.v4(8080)
	r := n.run("web", wideBudget, goServer(t, addr)...)
	hold := holdOpen(t, n.client, addr)
	total, flips := int64(6000), 4
	if long {
		total, flips = 100_000, 50
	}
	s := newStorm(t, n.client, addr, 8, nil)
	type window struct{ asked, closed, opening, open time.Time }
	var ws []window
	each := total / int64(flips)
	for range flips {
		served := s.served.Load()
		eventually(t, "connections are served", func() bool { return s.served.Load() >= served+each/2 })
		w := window{asked: time.Now()}
		r.must("drain", refusing)
		w.closed = time.Now()
		refused := s.refused.Load()
		eventually(t, "connections are turned away", func() bool { return s.refused.Load() >= refused+each/2 })
		w.opening = time.Now()
		r.must("undrain", struct{}{})
		w.open = time.Now()
		ws = append(ws, w)
	}
	served := s.served.Load()
	eventually(t, "connections are served again", func() bool { return s.served.Load() >= served+100 })
	shots := s.end()
	neither(t, shots)
	wrong := 0
	for _, x := range shots {
		for i, w := range ws {
			next := time.Now()
			if i+1 < len(ws) {
				next = ws[i+1].asked
			}
			switch {
			case x.served && x.start.After(w.closed) && x.connected.Before(w.opening):
				wrong++
				t.Errorf("flip %d: a connection begun %v after the answer was admitted", i, x.start.Sub(w.closed))
			case x.refused && x.start.After(w.open) && x.end.Before(next),
				x.refused && i == 0 && x.end.Before(w.asked):
				wrong++
				t.Errorf("flip %d: a connection was turned away while admission was open", i)
			}
		}
	}
	// The storm's connections and the one that is held.
	want := s.served.Load() + 1
	b := r.awaitCounts("the storm is over", func(b api.Backend) bool {
		return value(b.Counts.Active) == 1 && value(b.Counts.Accepted) >= want
	})
	if got := value(b.Counts.Accepted); got != want {
		t.Errorf("ebb counted %d connections, %d were served", got, want)
	}
	c := dialHTTP(t, n.client, addr)
	if got := c.stats(t).Accepted; got != want+1 {
		t.Errorf("the server accepted %d connections, %d were served", got, want+1)
	}
	t.Logf("%d connections over %d flips: %d served, %d turned away, %d on the wrong side", len(shots), flips, s.served.Load(), s.refused.Load(), wrong)
	c.Close()
	hold.Close()
	r.signal(syscall.SIGTERM)
	if code := r.wait(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
}

// A server that dies at its signal leaves a storm of connections: what it has accepted it answers, and no client sees a
// RST but those that are turned away at their SYN. Under auto the storm goes on after the signal and nobody is.
func TestC36_ListenerLeavesAStorm(t *testing.T) {
	for _, onNew := range []drain.OnNew{drain.OnNewAuto, drain.OnNewRefuse} {
		t.Run(string(onNew), func(t *testing.T) {
			n := newLAN(t)
			argv := packaged(loadtest.Nginx)(t, 8080, loadtest.ServerOptions{Host: n.link.B.V4.String(), Workers: 2, ReusePort: true})
			r := n.run("web", with(wideBudget, "--on-new", string(onNew)), argv...)
			s := newStorm(t, n.client, n.v4(8080), 24, nil)
			eventually(t, "the storm is up", func() bool { return s.served.Load() > 1000 })
			began := time.Now()
			r.signal(syscall.SIGTERM)
			if onNew == drain.OnNewAuto {
				served := s.served.Load()
				r.phase(drain.PhaseStopNew)
				eventually(t, "late connections are served", func() bool { return s.served.Load() > served+1000 })
				s.stop()
			}
			if code := r.wait(); code != 0 {
				t.Errorf("exit code %d, want 0", code)
			}
			shots := s.end()
			neither(t, shots)
			for _, x := range shots {
				if x.refused && (onNew == drain.OnNewAuto || x.end.Before(began)) {
					t.Errorf("a connection was turned away, %v after the signal", x.end.Sub(began))
					break
				}
			}
			if d := r.result().Backend.Drain; d == nil || d.Outcome != drain.OutcomeDrained {
				t.Errorf("got drain %+v, want drained", d)
			}
			if len(shots) > 0 {
				secs := shots[len(shots)-1].end.Sub(shots[0].start).Seconds()
				t.Logf("%d connections, %.0f per second, %d turned away", len(shots), float64(len(shots))/max(secs, 1), s.refused.Load())
			}
		})
	}
}

// 200 connections wait in the accept queue of a server that accepts slowly and dies at its signal: the stop waits for the
// queue, and each is answered.
func TestT4_FullAcceptQueueIsServed(t *testing.T) {
	for _, onNew := range []drain.OnNew{drain.OnNewAuto, drain.OnNewRefuse} {
		t.Run(string(onNew), func(t *testing.T) {
			n := newLAN(t)
			addr := n.v4(8080)
			r := n.run("web", with(wideBudget, "--on-new", string(onNew), "--protocol", "http1"), goServer(t, addr, "-accept-delay", "10ms")...)
			const clients = 200
			var wg sync.WaitGroup
			errs := make(chan error, clients)
			for range clients {
				c := dialHTTP(t, n.client, addr)
				c.send(t, "/")
				wg.Go(func() {
					_, err := c.answer()
					errs <- err
				})
			}
			queued := 0
			for _, l := range walk(t, n.ns, 1<<10, 8080) {
				queued += int(l.RQueue)
			}
			if queued == 0 {
				t.Fatal("nothing is queued: the test shows nothing")
			}
			r.signal(syscall.SIGTERM)
			wg.Wait()
			close(errs)
			failed := 0
			for err := range errs {
				if err != nil {
					failed++
					t.Logf("a queued client: %v", err)
				}
			}
			if failed > 0 {
				t.Errorf("%d of %d clients that were connected before the stop failed", failed, clients)
			}
			if code := r.wait(); code != 0 {
				t.Errorf("exit code %d, want 0", code)
			}
			if d := r.result().Backend.Drain; d == nil || d.Outcome != drain.OutcomeDrained {
				t.Errorf("got drain %+v, want drained", d)
			}
			t.Logf("%d were queued at the stop", queued)
		})
	}
}

// A client that is turned away sends its POST to another server. However the flips fall, each POST runs once: what was
// refused had not begun.
func TestR18_RefusedPostRunsNowhere(t *testing.T) {
	n := newLAN(t)
	blue, green := n.v4(8080), n.v4(8081)
	r := n.run("blue", wideBudget, goServer(t, blue)...)
	program(t, n.ns, goServer(t, green)...)
	hold := holdOpen(t, n.client, blue)
	eventually(t, "the other server listens", func() bool {
		c, err := n.client.DialContext(t.Context(), "tcp", green)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
	post := func(int64) string {
		return "POST /flush HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
	}
	s := newStorm(t, n.client, blue, 8, post)
	for range 2 {
		served := s.served.Load()
		eventually(t, "posts run", func() bool { return s.served.Load() > served+100 })
		r.must("drain", refusing)
		refused := s.refused.Load()
		eventually(t, "posts are refused", func() bool { return s.refused.Load() > refused+100 })
		r.must("undrain", struct{}{})
	}
	shots := s.end()
	neither(t, shots)
	var retried int64
	n.client.Do(t, func() {
		for _, x := range shots {
			if !x.refused {
				continue
			}
			if y := fire(green, post(0)); !y.served {
				t.Fatalf("the retry failed: %v", y.err)
			}
			retried++
		}
	})
	onBlue := dialHTTP(t, n.client, blue).stats(t).Flushes
	onGreen := dialHTTP(t, n.client, green).stats(t).Flushes
	if onBlue != s.served.Load() || onGreen != retried || onBlue+onGreen != int64(len(shots)) {
		t.Errorf("%d posts ran %d times on blue and %d times on green; %d were answered by blue, %d were turned away", len(shots), onBlue, onGreen, s.served.Load(), retried)
	}
	hold.Close()
	r.signal(syscall.SIGTERM)
	r.wait()
}

// Ten thousand connections are turned away while others come to their end: no count ever goes below zero, and nothing that
// was turned away is counted.
func TestC22_RefusalsAreNotCounted(t *testing.T) {
	n := newLAN(t)
	addr := n.v4(8080)
	r := n.run("web", wideBudget, goServer(t, addr)...)
	hold := holdOpen(t, n.client, addr)
	var leaving []net.Conn
	for range 20 {
		c := dialHTTP(t, n.client, addr)
		c.get(t, "/")
		leaving = append(leaving, c)
	}
	before := r.awaitCounts("all are counted", func(b api.Backend) bool { return value(b.Counts.Open) == 21 })
	r.must("drain", refusing)
	s := newStorm(t, n.client, addr, 4, nil)
	check := func(b api.Backend) {
		t.Helper()
		for _, class := range api.Classes {
			if c := b.Counts.Class(class); b.CountsKnown && (c == nil || *c < 0) {
				t.Errorf("%s is %d beside refusals: %s", class, value(c), shown(b))
			}
		}
		if !b.CountsKnown {
			t.Errorf("counts became unknown beside refusals")
		}
		if got, want := value(b.Counts.Accepted), value(before.Counts.Accepted); got != want {
			t.Errorf("%d connections are counted, want %d: a refusal was counted", got, want)
		}
	}
	for i := int64(0); s.refused.Load() < 10_000; i++ {
		check(r.backend())
		if len(leaving) > 0 && s.refused.Load() > int64(20-len(leaving))*400 {
			leaving[0].Close()
			leaving = leaving[1:]
		}
	}
	for _, c := range leaving {
		c.Close()
	}
	shots := s.end()
	for _, x := range shots {
		if !x.refused {
			t.Fatalf("a connection was not refused while admission was closed: served %v, %v", x.served, x.err)
		}
	}
	check(r.awaitCounts("only the held one is left", func(b api.Backend) bool { return value(b.Counts.Open) == 1 }))
	resp, err := r.client().Get("http://ebb/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Fatalf("metrics: %s", resp.Status)
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(body)) {
		if f := strings.Fields(line); !strings.HasPrefix(line, "#") && len(f) == 2 && strings.HasPrefix(f[1], "-") {
			t.Errorf("a metric is below zero: %s", line)
		}
	}
	t.Logf("%d refusals", s.refused.Load())
	hold.Close()
	r.signal(syscall.SIGTERM)
	r.wait()
}

// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net/http"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/loadtest"
	"github.com/ebbproxy/ebb/internal/netnstest"
)

// transport is Go's own client, whose pool keeps its connections.
func transport(t *testing.T, ns *netnstest.NS, secure, http2 bool) *http.Transport {
	t.Helper()
	tr := &http.Transport{
		DialContext: ns.DialContext, MaxIdleConnsPerHost: 100, MaxConnsPerHost: 100,
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS13}, Protocols: new(http.Protocols),
	}
	tr.Protocols.SetHTTP1(!http2)
	tr.Protocols.SetHTTP2(http2 && secure)
	tr.Protocols.SetUnencryptedHTTP2(http2 && !secure)
	t.Cleanup(tr.CloseIdleConnections)
	return tr
}

// pool is clients that ask again as soon as they are answered, until they cannot connect any more.
type pool struct {
	answered atomic.Int64
	wg       sync.WaitGroup
	mu       sync.Mutex
	failures []error
}

func startPool(t *testing.T, tr *http.Transport, url string, clients int) *pool {
	t.Helper()
	p := &pool{}
	for range clients {
		p.wg.Go(func() {
			for {
				err := get(tr, url)
				if err == nil {
					p.answered.Add(1)
					continue
				}
				if !errors.Is(err, syscall.ECONNREFUSED) {
					p.mu.Lock()
					p.failures = append(p.failures, err)
					p.mu.Unlock()
				}
				return
			}
		})
	}
	return p
}

func get(tr *http.Transport, url string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := tr.RoundTrip(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return err
}

// unhurried checks that a drain which was given a minute ended by itself.
func unhurried(t *testing.T, d api.Drain) {
	t.Helper()
	if d.Ended == nil || d.Deadline.Sub(*d.Ended) < 8*time.Second {
		t.Errorf("the drain ended at %v, its deadline was %v: the pool kept it open", d.Ended, d.Deadline)
	}
}

// A pool that never pauses leaves: cleartext ones by retiring, TLS and HTTP/2 ones because the server, told, closes what
// is idle and says goodbye on the rest. Nobody is failed.
func TestG5_PoolsThatNeverPauseLeave(t *testing.T) {
	for _, tt := range []struct {
		name          string
		secure, http2 bool
		flags, server []string
	}{
		{"http1", false, false, []string{"--protocol", "http1"}, nil},
		{"tls, notified", true, false, []string{"--notify", "signal:SIGQUIT@settled"}, []string{"-tls", "-graceful"}},
		{"http2, notified", true, true, []string{"--notify", "signal:SIGQUIT@settled"}, []string{"-tls", "-graceful"}},
		{"http2 in cleartext, notified", false, true, []string{"--notify", "signal:SIGQUIT@settled"}, []string{"-h2c", "-graceful"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n := newLAN(t)
			addr := n.v4(8080)
			r := n.run("g5", with(with(wideBudget, "--on-new", "refuse"), tt.flags...), goServer(t, addr, tt.server...)...)
			url := map[bool]string{true: "https://", false: "http://"}[tt.secure] + addr + "/"
			p := startPool(t, transport(t, n.client, tt.secure, tt.http2), url, 20)
			eventually(t, "the pool is served", func() bool { return p.answered.Load() > 500 })
			r.signal(syscall.SIGTERM)
			if code := r.wait(); code != 0 {
				t.Errorf("exit code %d, want 0", code)
			}
			p.wg.Wait()
			for i, err := range p.failures {
				if i < 3 {
					t.Errorf("a request failed: %v", err)
				}
			}
			d := r.result().Backend.Drain
			if d == nil || d.Outcome != drain.OutcomeDrained || len(d.Survivors) > 0 {
				t.Fatalf("got drain %+v, want drained", d)
			}
			unhurried(t, *d)
			if !tt.secure && !tt.http2 && d.Retired == 0 {
				t.Error("nothing was retired: the test shows nothing")
			}
			t.Logf("%d answered, %d retired, took %v", p.answered.Load(), d.Retired, d.Ended.Sub(d.Begun))
		})
	}
}

// wrk, which never pauses either, and counts every error that it sees.
func TestG5_WrkLeaves(t *testing.T) {
	n := newLAN(t)
	argv := packaged(loadtest.Nginx)(t, 8080, loadtest.ServerOptions{Host: n.link.B.V4.String(), Workers: 2})
	r := n.run("g5", with(wideBudget, "--on-new", "refuse", "--protocol", "http1"), argv...)
	wrk := n.client.Command(t, need(t, "wrk"), "-t1", "-c20", "-d600s", "http://"+n.v4(8080)+"/")
	var out bytes.Buffer
	wrk.Cmd.Stdout = &out
	if err := wrk.Start(); err != nil {
		t.Fatal(err)
	}
	r.awaitCounts("wrk is connected", func(b api.Backend) bool { return value(b.Counts.Open) == 20 })
	r.signal(syscall.SIGTERM)
	d := r.drainedAtZero()
	unhurried(t, d)
	if d.Retired < 20 {
		t.Errorf("%d connections were retired, want wrk's 20", d.Retired)
	}
	if err := wrk.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	var exit *exec.ExitError
	if err := wrk.Wait(); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	// "Socket errors: connect 1, read 2, write 3, timeout 0": refused ones after the flip are expected, timeouts and
	// answers that are no success are not.
	if strings.Contains(out.String(), "Non-2xx") || strings.Contains(out.String(), "Socket errors") && !strings.Contains(out.String(), "timeout 0") {
		t.Errorf("wrk saw more than its connections' ends:\n%s", out.String())
	}
}

// A TLS pool that nobody tells keeps its drain open, and the report says which connections did.
func TestG5_UntoldPoolIsNamed(t *testing.T) {
	t.Parallel() // most of it is a wait slice that has to run out
	n := newLAN(t)
	addr := n.v4(8080)
	r := n.run("g5", []string{"--grace", "6s", "--flush-timeout", "1s", "--reserve", "1s", "--quiet-period", "300ms", "--on-new", "refuse"},
		goServer(t, addr, "-tls")...)
	tr := transport(t, n.client, true, false)
	tr.MaxConnsPerHost = 5 // or it dials one more whenever that may be faster
	p := startPool(t, tr, "https://"+addr+"/", 5)
	r.awaitCounts("the pool is connected", func(b api.Backend) bool { return value(b.Counts.Open) == 5 })
	r.signal(syscall.SIGTERM)
	if code := r.wait(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	p.wg.Wait()
	d := r.result().Backend.Drain
	if d == nil || d.Outcome != drain.OutcomeExpired || d.FlushReason != drain.FlushDeadline {
		t.Fatalf("got drain %+v, want expired", d)
	}
	if len(d.Survivors) != 5 {
		t.Errorf("got survivors %+v, want the pool's 5", d.Survivors)
	}
	for _, s := range d.Survivors {
		if !strings.HasPrefix(s.Peer, n.link.A.V4.String()+":") || s.Class != "active" {
			t.Errorf("got survivor %+v, want an active connection of %s", s, n.link.A.V4)
		}
	}
}

// A request is being worked on behind TLS or HTTP/2: the connection is never idle, and the drain waits for the answer.
func TestG7_PendingRequestIsNeverIdle(t *testing.T) {
	for _, tt := range []struct {
		name          string
		secure, http2 bool
		argv          func(*testing.T, *lan) []string
	}{
		{"OpenSSL, TLS 1.3", true, false, func(t *testing.T, n *lan) []string {
			return packaged(loadtest.Nginx)(t, 8080, loadtest.ServerOptions{Host: n.link.B.V4.String(), Workers: 1, TLS: true})
		}},
		{"Go, HTTP/2", true, true, func(t *testing.T, n *lan) []string { return goServer(t, n.v4(8080), "-tls") }},
		{"Go, HTTP/2 in cleartext", false, true, func(t *testing.T, n *lan) []string { return goServer(t, n.v4(8080), "-h2c") }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel() // it waits for slow answers
			n := newLAN(t)
			r := n.run("g7", with(wideBudget, "--on-new", "refuse", "--idle", "close"), tt.argv(t, n)...)
			const clients = 10
			url := map[bool]string{true: "https://", false: "http://"}[tt.secure] + n.v4(8080) + "/?ms=4000"
			var wg sync.WaitGroup
			var done atomic.Int64
			for range clients {
				tr := transport(t, n.client, tt.secure, tt.http2)
				wg.Go(func() {
					if err := get(tr, url); err != nil {
						t.Errorf("a slow request failed: %v", err)
					}
					done.Add(1)
					tr.CloseIdleConnections()
				})
			}
			r.awaitCounts("every request is under way", func(b api.Backend) bool { return value(b.Counts.Active) == clients })
			r.signal(syscall.SIGTERM)
			for done.Load() == 0 {
				b := r.backend()
				if done.Load() > 0 {
					break // this look may be of one that has been answered
				}
				if value(b.Counts.Active) != clients || value(b.Counts.Idle) != 0 {
					t.Errorf("with %d requests under way: %s", clients, shown(b))
					break
				}
				time.Sleep(20 * time.Millisecond) // the pace of looking, nothing waits for it
			}
			wg.Wait()
			d := r.drainedAtZero()
			if d.Retired != 0 {
				t.Errorf("%d connections were retired with a request under way", d.Retired)
			}
		})
	}
}

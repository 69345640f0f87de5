// SPDX-License-Identifier: Apache-2.0

package examples_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// patience is for what happens at once unless the machine stands still.
const patience = time.Minute

// build makes an example.
func build(t *testing.T, name string) string {
	t.Helper()
	bin := filepath.Join(t.TempDir(), name)
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", bin, "./"+name).CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", name, err, out)
	}
	return bin
}

// process is a running example; each line of its output is kept.
type process struct {
	t   *testing.T
	cmd *exec.Cmd

	mu    sync.Mutex
	lines []string
	more  chan struct{} // closed and replaced at each line
	ended chan struct{}
}

func start(t *testing.T, bin string, args ...string) *process {
	t.Helper()
	p := &process{t: t, cmd: exec.Command(bin, args...), more: make(chan struct{}), ended: make(chan struct{})}
	// No agent of this machine is theirs.
	p.cmd.Env = append(os.Environ(), "EBB_APP_SOCKET="+filepath.Join(t.TempDir(), "none.sock"))
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.ended)
		for sc := bufio.NewScanner(out); sc.Scan(); {
			p.mu.Lock()
			p.lines = append(p.lines, sc.Text())
			close(p.more)
			p.more = make(chan struct{})
			p.mu.Unlock()
		}
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill() // it may have ended
		<-p.ended
		_ = p.cmd.Wait() // told already
	})
	return p
}

// line waits for one that begins with prefix.
func (p *process) line(prefix string) string {
	p.t.Helper()
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	for {
		p.mu.Lock()
		i := slices.IndexFunc(p.lines, func(s string) bool { return strings.HasPrefix(s, prefix) })
		more, lines := p.more, slices.Clone(p.lines)
		p.mu.Unlock()
		if i >= 0 {
			return lines[i]
		}
		select {
		case <-more:
		case <-p.ended:
			p.t.Fatalf("no %q before its end: %q", prefix, lines)
		case <-deadline.C:
			p.t.Fatalf("no %q: %q", prefix, lines)
		}
	}
}

// stop sends SIGTERM, twice, and returns the output when the process has ended well.
func (p *process) stop() []string {
	p.t.Helper()
	for range 2 {
		if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
			p.t.Fatal(err)
		}
	}
	select {
	case <-p.ended:
	case <-time.After(patience):
		p.t.Fatal("it does not end")
	}
	if err := p.cmd.Wait(); err != nil {
		p.t.Errorf("it ended badly: %v", err)
	}
	return p.lines
}

// balancer sends requests to those of its servers that say that they are ready, which it asks from time to time, over kept
// connections.
type balancer struct {
	client  *http.Client
	servers []string
	ready   []atomic.Bool
	next    atomic.Int64
}

func (b *balancer) watch(ctx context.Context) {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		for i, s := range b.servers {
			res, err := b.client.Get(s + "/healthz")
			if err == nil {
				_, _ = io.Copy(io.Discard, res.Body) // the status counts
				_ = res.Body.Close()                 // nothing was written
			}
			b.ready[i].Store(err == nil && res.StatusCode == 200)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// get sends one request, once.
func (b *balancer) get() error {
	for range b.servers {
		i := int(b.next.Add(1)) % len(b.servers)
		if !b.ready[i].Load() {
			continue
		}
		res, err := b.client.Post(b.servers[i]+"/", "text/plain", strings.NewReader("x")) // a POST is not repeated by the transport
		if err != nil {
			return err
		}
		defer res.Body.Close()
		body, err := io.ReadAll(res.Body)
		if err != nil || res.StatusCode != 200 || string(body) != "hello\n" {
			return fmt.Errorf("%s %q: %w", res.Status, body, err)
		}
		return nil
	}
	return errNotReady
}

var errNotReady = errors.New("no server is ready")

// Without an agent and with SIGTERM alone a server leaves under load, behind a balancer that looks at its readiness.
func TestC1_HTTPLeavesUnderLoad(t *testing.T) {
	bin := build(t, "http")
	one, two := start(t, bin, "-listen", "127.0.0.1:0"), start(t, bin, "-listen", "127.0.0.1:0")
	url := func(p *process) string { return "http://" + strings.TrimPrefix(p.line("listening "), "listening ") }
	b := &balancer{client: &http.Client{}, servers: []string{url(one), url(two)}, ready: make([]atomic.Bool, 2)}
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	all.Go(func() { b.watch(ctx) })
	var answered, failed atomic.Int64
	for range 8 {
		all.Go(func() {
			for tick := time.Tick(5 * time.Millisecond); ctx.Err() == nil; <-tick {
				switch err := b.get(); {
				case err == nil:
					answered.Add(1)
				case !errors.Is(err, errNotReady) && failed.Add(1) < 10:
					t.Errorf("request: %v", err)
				}
			}
		})
	}
	stream, err := http.Get(b.servers[0] + "/events")
	if err != nil {
		t.Fatal(err)
	}
	last := make(chan string, 1)
	go func() {
		defer stream.Body.Close()
		body, err := io.ReadAll(stream.Body)
		last <- fmt.Sprintf("%v %v", strings.HasSuffix(string(body), "event: bye\ndata: {}\n\n"), err)
	}()
	enough := time.NewTimer(patience)
	defer enough.Stop()
	for tick := time.Tick(5 * time.Millisecond); answered.Load() < 200; {
		select {
		case <-tick:
		case <-enough.C:
			t.Fatalf("%d requests were answered", answered.Load())
		}
	}
	lines := one.stop()
	cancel()
	all.Wait()
	if n := strings.Count(strings.Join(lines, "\n"), "flush"); n != 1 || !slices.Contains(lines, "flush zero") {
		t.Errorf("got %q, want one flush, for zero", lines)
	}
	if got := <-last; got != "true <nil>" {
		t.Errorf("end of the stream: got %s, want its goodbye", got)
	}
	t.Logf("%d requests answered, %d failed", answered.Load(), failed.Load())
	two.stop()
}

// Jobs that have begun are done before the flush, and none begins.
func TestT9_JobsAreDone(t *testing.T) {
	p := start(t, build(t, "job"), "-length", "300ms")
	p.line("begin worker-0")
	p.line("begin worker-1")
	lines := p.stop()
	text := strings.Join(lines, "\n")
	if lines[len(lines)-1] != "flush zero" || strings.Count(text, "begin ") != strings.Count(text, "end ") || strings.Contains(text, "put back") {
		t.Errorf("got\n%s\nwant every job done, then the flush", text)
	}
}

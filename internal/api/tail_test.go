// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/api/apitest"
)

// serveLog serves a log at path until stop is called, which ends in order: what was published is still delivered.
func serveLog(t *testing.T, path string, log *api.Log) (stop func()) {
	t.Helper()
	srv, err := api.NewServer(api.Options{Source: apitest.New(log), Log: log})
	if err != nil {
		t.Fatal(err)
	}
	ln, err := api.Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ctx, ln) }()
	return func() {
		_ = log.Close()
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}
}

// tail follows path in a goroutine until the test is over.
func tail(t *testing.T, path string, from uint64, patience time.Duration) <-chan api.Event {
	t.Helper()
	c, err := api.Dial(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	tl, err := c.Tail(ctx, from, patience)
	if err != nil {
		t.Fatal(err)
	}
	ch, done := make(chan api.Event), make(chan struct{})
	go func() {
		defer close(done)
		defer close(ch)
		for ev, err := range tl.All() {
			if err != nil {
				if ctx.Err() == nil {
					t.Errorf("tail: %v", err)
				}
				return
			}
			select {
			case ch <- ev:
			case <-ctx.Done():
			}
		}
	}()
	t.Cleanup(func() { cancel(); <-done; _ = tl.Close(); _ = c.Close() })
	return ch
}

func want(t *testing.T, ch <-chan api.Event, seq uint64, typ string) {
	t.Helper()
	if ev, ok := next(t, ch); !ok || ev.Seq != seq || ev.Type != typ {
		t.Fatalf("got %d %s, %v, want %d %s", ev.Seq, ev.Type, ok, seq, typ)
	}
}

// A follower goes on across a restart: no event twice, none lost, and numbers that begin again are said.
func TestR15_TailGoesOnAcrossARestart(t *testing.T) {
	path := filepath.Join(shortTemp(t), "a.sock")
	one := api.NewLog(api.LogOptions{})
	stop := serveLog(t, path, one)
	ch := tail(t, path, 0, api.Forever)
	one.Publish(api.Event{Type: "a"})
	one.Publish(api.Event{Type: "b"})
	want(t, ch, 1, "a")
	want(t, ch, 2, "b")
	one.Publish(api.Event{Type: "c"})
	stop()
	want(t, ch, 3, "c")

	// A log that goes on with the numbers of the other.
	two := api.NewLog(api.LogOptions{First: 4, Epoch: one.Epoch()})
	two.Publish(api.Event{Type: "d"})
	stop = serveLog(t, path, two)
	want(t, ch, 4, "d")
	two.Publish(api.Event{Type: "e"})
	want(t, ch, 5, "e")
	stop()

	// A log that does not, and is further than the other ever was.
	three := api.NewLog(api.LogOptions{})
	for range 7 {
		three.Publish(api.Event{Type: "f"})
	}
	stop = serveLog(t, path, three)
	want(t, ch, 5, api.EventLost)
	for i := range uint64(7) {
		want(t, ch, i+1, "f")
	}
	three.Publish(api.Event{Type: "g"})
	want(t, ch, 8, "g")
	stop()
}

// The same socket asked again from a number: what comes of a later log that goes on with it, said where some are missing.
func TestR15_ResumeFromANumberOfAnEarlierLog(t *testing.T) {
	path := filepath.Join(shortTemp(t), "a.sock")
	log := api.NewLog(api.LogOptions{First: 100})
	log.Publish(api.Event{Type: "a"})
	stop := serveLog(t, path, log)
	defer stop()
	ch := tail(t, path, 42, 0)
	want(t, ch, 99, api.EventLost)
	want(t, ch, 100, "a")
}

// Without patience the tail ends with its stream, and with some when it is over.
func TestTailEnds(t *testing.T) {
	for _, patience := range []time.Duration{0, 300 * time.Millisecond} {
		path := filepath.Join(shortTemp(t), "a.sock")
		log := api.NewLog(api.LogOptions{})
		stop := serveLog(t, path, log)
		ch := tail(t, path, 0, patience)
		log.Publish(api.Event{Type: "a"})
		stop()
		want(t, ch, 1, "a")
		if ev, ok := next(t, ch); ok {
			t.Errorf("patience %s: got %+v, want the end", patience, ev)
		}
	}
}

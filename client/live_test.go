// SPDX-License-Identifier: Apache-2.0

package client_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/client"
	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/api/apitest"
	"github.com/ebbproxy/ebb/internal/session"
)

// owner is an API server with the books of its applications, which can be restarted.
type owner struct {
	t    *testing.T
	src  *apitest.Apps
	log  *api.Log
	path string
	stop func()
}

func newOwner(t *testing.T) *owner {
	t.Helper()
	dir, err := os.MkdirTemp("", "client-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) }) // a temporary directory
	o := &owner{t: t, log: api.NewLog(api.LogOptions{}), path: filepath.Join(dir, "a.sock")}
	o.src, err = apitest.NewApps(o.log, session.Options{Heartbeat: 50 * time.Millisecond, Suspect: time.Minute, Lost: 2 * time.Minute}, apitest.Web())
	if err != nil {
		t.Fatal(err)
	}
	o.start()
	t.Cleanup(func() { o.stop() })
	return o
}

func (o *owner) start() {
	o.t.Helper()
	srv, err := api.NewServer(api.Options{Source: o.src, Log: o.log, Audit: func(api.Audit) {}})
	if err != nil {
		o.t.Fatal(err)
	}
	ln, err := api.ListenAs(o.path, 0o666, -1)
	if err != nil {
		o.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() {
		served <- srv.ServeAs(ctx, ln, api.Apps(func(_ context.Context, pid int) (string, bool) { return "web", pid == os.Getpid() }))
	}()
	o.stop = func() {
		cancel()
		if err := <-served; err != nil {
			o.t.Errorf("serve: %v", err)
		}
	}
}

func (o *owner) book() *session.Book { return o.src.Book("web") }

// until waits for something that happens at once unless the machine stands still.
func until(t *testing.T, what string, is func() bool) {
	t.Helper()
	deadline := time.NewTimer(time.Minute)
	defer deadline.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !is() {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("never: %s", what)
		}
	}
}

// The library and the real server, through a restart of it in the middle of a drain.
func TestR15_WithARealOwner(t *testing.T) {
	o := newOwner(t)
	s, err := client.Register(t.Context(), client.Options{Socket: o.path, Version: 3, Signals: client.NoSignals})
	if err != nil {
		t.Fatal(err)
	}
	flushes := 0
	s.OnFlush(func(context.Context, client.Flush) error { flushes++; return errors.New("disk full") })
	if v, ok := o.book().Version(); !ok || v != 3 || s.Status().Backend != "web" || s.Status().Gen != 7 {
		t.Errorf("registered: got version %d, %+v", v, s.Status())
	}
	release, err := s.Hold(t.Context(), "invoices")
	if err != nil {
		t.Fatal(err)
	}
	if n, names := o.book().Holds(); n != 1 || !slices.Equal(names, []string{"invoices"}) {
		t.Errorf("held: got %d %q", n, names)
	}
	s.Remaining(42)
	until(t, "what is left is known", func() bool { r := o.book().Views()[0].Remaining; return r != nil && *r == 42 })
	draining := s.Draining()
	if err := o.src.Announce("web", "web-7-1"); err != nil {
		t.Fatal(err)
	}
	<-draining
	if st := s.Status(); st.Drain != "web-7-1" || st.Cause != "operator" {
		t.Errorf("draining: got %+v", st)
	}
	until(t, "it is acknowledged", func() bool { return o.book().Views()[0].Acked == 1 })
	o.stop()
	release()
	o.start()
	until(t, "the release arrives after the restart", func() bool { n, _ := o.book().Holds(); return n == 0 })
	if err := o.src.Flush("web", "web-7-1"); err != nil {
		t.Fatal(err)
	}
	until(t, "it is too late for a hold", func() bool {
		release, err := s.Hold(t.Context(), "late")
		if err == nil {
			release() // the session counted alone: it has not heard from the owner since the restart
		}
		return errors.Is(err, client.ErrFlushing)
	})
	answered, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := o.book().Answered(answered, "web-7-1"); err == nil || answered.Err() != nil {
		t.Errorf("answer: got %v, want disk full", err)
	}
	<-s.Done()
	if views := o.book().Views(); len(views) != 1 || flushes != 1 {
		t.Errorf("got %d sessions and %d flushes, want one each", len(views), flushes)
	}
	o.book().Follow(drain.Status{ID: "web-7-1", Mode: drain.ModeEnforce, State: drain.StateDone, Outcome: drain.OutcomeDrained})
	until(t, "it is evicted", func() bool { return s.Status().Evicted && s.Status().Outcome == "drained" })
	until(t, "the end is acknowledged, and with it the session", func() bool { return len(o.book().Views()) == 0 })
	if err := s.Stop(t.Context()); err == nil {
		t.Error("stop does not say that the flush failed")
	}
}

func TestGoodbyeEndsTheSession(t *testing.T) {
	o := newOwner(t)
	s, err := client.Register(t.Context(), client.Options{Socket: o.path, Signals: client.NoSignals, QuietPeriod: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	if n := o.book().Apps(); n != 1 {
		t.Errorf("got %d applications, want 1", n)
	}
	go func() {
		<-s.Draining()
		_ = o.src.Flush("web", "web-7-1") // Stop would say that it went wrong
	}()
	if err := o.src.Announce("web", "web-7-1"); err != nil {
		t.Fatal(err)
	}
	if err := s.Stop(t.Context()); err != nil {
		t.Error(err)
	}
	if n := o.book().Apps(); n != 0 {
		t.Errorf("after the goodbye: got %d applications, want none", n)
	}
}

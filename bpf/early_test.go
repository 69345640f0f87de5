// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/netnstest"
)

// The admission of a process is closed before the kill of a stop signal returns, every time; another signal, another
// process, one that ignores the signal, and an admission that is closed already are left alone.
func TestR3_EarlyAdmissionIsClosedBeforeKillReturns(t *testing.T) {
	netnstest.RequireRoot(t)
	h := installed(t, options(t))
	e, err := h.OpenEarly()
	if errors.Is(err, ErrNotSupported) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	sigs := make(chan os.Signal, 512)
	signal.Notify(sigs, unix.SIGUSR1, unix.SIGUSR2)
	defer signal.Stop(sigs)
	tgid, start, err := Self()
	if err != nil {
		t.Fatal(err)
	}
	events, err := h.Events(7)
	if err != nil {
		t.Fatal(err)
	}
	defer events.Close()
	open := BackendRule{Action: ActionOpen, Enforce: true, Gen: 3, Standby: true}
	closed := BackendRule{Action: ActionSteer, Enforce: true, Gen: 3, Standby: true, Bypass: [2]uint16{40000, 40010}}
	rule := EarlyRule{Start: start, Signals: []syscall.Signal{unix.SIGUSR1}, Backend: 7, Rule: closed, Span: time.Hour}
	if err := e.Set(tgid, rule); err != nil {
		t.Fatal(err)
	}
	after := func(what string, sig syscall.Signal, before BackendRule, want Action) BackendRule {
		t.Helper()
		setRule(t, h, 7, before)
		if err := unix.Kill(os.Getpid(), sig); err != nil {
			t.Fatal(err)
		}
		got, _, err := h.Backend(7)
		if err != nil || got.Action != want {
			t.Fatalf("%s: got %s, %v when kill had returned, want %s", what, got.Action, err, want)
		}
		return got
	}
	for range 100 {
		got := after("a stop signal", unix.SIGUSR1, open, ActionSteer)
		if d := got.Until - BootNow(); d <= 0 || d > time.Hour {
			t.Fatalf("the rule ends in %v, want within an hour", d)
		}
		if got.Until = 0; got != closed {
			t.Fatalf("got rule %+v, want %+v", got, closed)
		}
	}
	if ev, err := events.Read(); err != nil || ev.Type != EventSignal || ev.Backend != 7 || ev.Gen != 3 || ev.Cookie != uint64(unix.SIGUSR1) {
		t.Errorf("event: got %+v, %v, want one of the signal", ev, err)
	}
	after("another signal", unix.SIGUSR2, open, ActionOpen)
	refused := BackendRule{Action: ActionRefuse, Enforce: true, Gen: 3, Until: BootNow() + time.Hour}
	if got := after("an admission that is closed", unix.SIGUSR1, refused, ActionRefuse); got != refused {
		t.Errorf("a closed admission was changed: got %+v, want %+v", got, refused)
	}

	other := rule
	other.Start++
	if err := e.Set(tgid, other); err != nil {
		t.Fatal(err)
	}
	after("another process of that number", unix.SIGUSR1, open, ActionOpen)
	if err := errors.Join(e.Set(tgid, rule), e.Clear(tgid), e.Clear(tgid)); err != nil {
		t.Fatal(err)
	}
	after("cleared", unix.SIGUSR1, open, ActionOpen)

	// A process that ignores the signal stays, so its admission does too.
	deaf := exec.Command("sh", "-c", "trap '' USR1; echo deaf; exec sleep 60")
	out, err := deaf.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := deaf.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { deaf.Process.Kill(); deaf.Wait() }()
	if _, err := out.Read(make([]byte, 8)); err != nil {
		t.Fatal(err)
	}
	rule.Start = 0
	if tgid, rule.Start, err = TaskID(deaf.Process.Pid); err != nil {
		t.Fatal(err)
	}
	if err := e.Set(tgid, rule); err != nil {
		t.Fatal(err)
	}
	setRule(t, h, 7, open)
	if err := deaf.Process.Signal(unix.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	if got, _, err := h.Backend(7); err != nil || got.Action != ActionOpen {
		t.Errorf("an ignored signal: got %s, %v, want open", got.Action, err)
	}
	// No rule of a backend that was removed comes back.
	if err := h.RemoveBackend(7); err != nil {
		t.Fatal(err)
	}
	if err := deaf.Process.Signal(unix.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	if _, ok, err := h.Backend(7); ok || err != nil {
		t.Errorf("a removed backend has a rule again: %v, %v", ok, err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"errors"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
)

func TestC31_ContradictionsAreRefusedWithTheSums(t *testing.T) {
	for _, tt := range []struct {
		name string
		p    Policy
		want []string // in the message
	}{
		{"oversubscribed", Policy{Grace: 10 * time.Second, FlushTimeout: 8 * time.Second}, []string{"grace 10s", "flush_timeout 8s", "reserve 3s", "leaves -1s"}},
		{"no wait", Policy{Grace: 8 * time.Second}, []string{"leaves 0s"}},
		{"quiet longer than wait", Policy{Grace: 10 * time.Second, QuietPeriod: 4 * time.Second}, []string{"quiet_period 4s", "wait 2s = grace 10s − flush_timeout 5s − reserve 3s"}},
		{"admit as long as wait", Policy{Grace: 30 * time.Second, AdmitFor: 22 * time.Second}, []string{"admit_for 22s", "wait 22s"}},
		{"spread", Policy{CloseSpread: 10 * time.Second}, []string{"close_spread 10s", "reserve 3s"}},
		{"negative", Policy{Reserve: -time.Second}, []string{"reserve -1s is negative"}},
		{"overflow", Policy{Grace: 1<<63 - 1, FlushTimeout: 1<<63 - 1, Reserve: 1<<63 - 1}, []string{"grace", "flush_timeout", "reserve", "longer than a year"}},
		{"protocol", Policy{Protocol: "http2"}, []string{`protocol "http2"`, "opaque, http1"}},
		{"on_new", Policy{OnNew: "drop"}, []string{`on_new "drop"`, "auto, admit, refuse, steer, relay, hold"}},
		{"on_deadline", Policy{OnDeadline: "kill"}, []string{`on_deadline "kill"`}},
		{"idle", Policy{Idle: "keep"}, []string{`idle "keep"`}},
		{"notify", Policy{NotifyAt: "end"}, []string{`notify at "end"`}},
		{"all at once", Policy{Grace: time.Second, CloseSpread: time.Minute, Idle: "x"}, []string{"idle", "close_spread", "leaves -7s"}},
	} {
		e, err := Validate(tt.p)
		if !errors.Is(err, ErrPolicy) {
			t.Errorf("%s: got %v, %v, want ErrPolicy", tt.name, e, err)
			continue
		}
		for _, w := range tt.want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: got %q, want %q in it", tt.name, err, w)
			}
		}
	}
}

func TestC31_EffectiveBudgetIsShown(t *testing.T) {
	e, err := Validate(Policy{})
	if err != nil {
		t.Fatal(err)
	}
	want := "grace 30s = wait 22s + flush_timeout 5s + reserve 3s; quiet_period 1s, admit_for 11s, settle 3s, close_spread 0s"
	if e.String() != want {
		t.Errorf("got %q, want %q", e, want)
	}
	if e.Policy.Idle != IdleIgnore || e.Policy.OnNew != OnNewAuto || e.Policy.OnDeadline != OnDeadlineCut || e.Policy.NotifyAt != NotifyAtBegin {
		t.Errorf("defaults: got %+v", e.Policy)
	}
	if e, err = Validate(Policy{Protocol: ProtocolHTTP1}); err != nil || e.Policy.Idle != IdleClose {
		t.Errorf("http1: got idle %s, %v, want close", e.Policy.Idle, err)
	}
}

func TestR21_GraceMustBeShorterThanAge(t *testing.T) {
	for _, age := range []time.Duration{time.Second, 30 * time.Second} {
		if _, err := Validate(Policy{MaxAge: age}); !errors.Is(err, ErrPolicy) || !strings.Contains(err.Error(), "max_connection_age") {
			t.Errorf("grace 30s, age %v: got %v, want ErrPolicy", age, err)
		}
	}
	if _, err := Validate(Policy{MaxAge: 31 * time.Second}); err != nil {
		t.Errorf("grace 30s, age 31s: got %v, want nil", err)
	}
}

// randomPolicy makes durations that often do and often do not fit.
func randomPolicy(r *rand.Rand) Policy {
	d := func() time.Duration {
		switch n := r.IntN(40); {
		case n < 15:
			return 0
		case n == 15:
			return time.Duration(r.Uint64()) // any, negative ones too
		default:
			return time.Duration(r.Int64N(int64(60 * time.Second)))
		}
	}
	words := func(w ...string) string {
		if r.IntN(20) > 0 {
			w = w[:len(w)-1] // the last is a bad one
		}
		return w[r.IntN(len(w))]
	}
	return Policy{
		Protocol: Protocol(words("", "opaque", "http1", "quic")), OnNew: OnNew(words("", "auto", "admit", "refuse", "hold")),
		OnDeadline: OnDeadline(words("", "cut", "reset", "leave", "kill")), Idle: IdlePolicy(words("", "ignore", "wait", "close", "keep")),
		Grace: d() * 2, FlushTimeout: d(), Reserve: d(), QuietPeriod: d() / 4, AdmitFor: d() / 2, IdleAfter: d(), CloseSpread: d() / 4, MaxAge: d(),
	}
}

// checkEffective states what must hold of every budget that a drain runs by.
func checkEffective(t *testing.T, e Effective) {
	t.Helper()
	p := e.Policy
	if sum := e.Wait + p.FlushTimeout + p.Reserve; sum != p.Grace {
		t.Errorf("sum %v is not grace: %v", sum, e)
	}
	if e.Wait < 0 || p.FlushTimeout < 0 || p.Reserve < 0 || e.Settle < 0 || e.Settle > e.Wait || e.Settle > maxSettle {
		t.Errorf("slices out of range: %v", e)
	}
	if p.QuietPeriod > e.Wait || p.AdmitFor > e.Wait || p.CloseSpread > p.Reserve {
		t.Errorf("parts longer than their slices: %v", e)
	}
}

func TestR20_ValidatorProperty(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	ok := 0
	for range 20000 {
		p := randomPolicy(r)
		e, err := Validate(p)
		if err != nil {
			if !errors.Is(err, ErrPolicy) || e != (Effective{}) {
				t.Errorf("seed %d: %+v: got %v, %v, want ErrPolicy and nothing", seed, p, e, err)
			}
			continue
		}
		ok++
		checkEffective(t, e)
		if e.Wait <= 0 || e.Policy.QuietPeriod >= e.Wait || e.Policy.AdmitFor >= e.Wait || e.Policy.AdmitFor <= 0 && e.Wait > 1 {
			t.Errorf("seed %d: %+v was let through: %v", seed, p, e)
		}
		if a := e.Policy.MaxAge; a > 0 && e.Policy.Grace >= a {
			t.Errorf("seed %d: grace %v of age %v was let through", seed, e.Policy.Grace, a)
		}
		// What was set stays set, and an effective policy is its own effect.
		if p.Grace != 0 && p.Grace != e.Policy.Grace || p.FlushTimeout != 0 && p.FlushTimeout != e.Policy.FlushTimeout || p.Reserve != 0 && p.Reserve != e.Policy.Reserve {
			t.Errorf("seed %d: %+v became %v", seed, p, e)
		}
		if again, err := Validate(e.Policy); err != nil || again != e {
			t.Errorf("seed %d: validated again: got %v, %v, want %v", seed, again, err, e)
		}
		// However little is left, the slices fit it.
		total := time.Duration(r.Int64N(int64(2 * e.Policy.Grace)))
		spent := time.Duration(r.Int64N(int64(2 * e.Policy.Grace)))
		s := e.spend(spent).scale(total)
		checkEffective(t, s)
		if least := min(minBudget, e.Policy.Grace); s.Policy.Grace > max(least, min(total, e.Policy.Grace-spent)) {
			t.Errorf("seed %d: %v with %v spent and %v left became %v", seed, e, spent, total, s)
		}
	}
	if ok < 500 {
		t.Errorf("seed %d: only %d policies were valid: the test shows little", seed, ok)
	}
}

func FuzzValidate(f *testing.F) {
	f.Add(int64(25*time.Second), int64(5*time.Second), int64(3*time.Second), int64(time.Second), int64(0), int64(0), int64(0), "http1", "auto")
	f.Add(int64(-1), int64(1<<62), int64(1<<62), int64(1<<62), int64(1), int64(1), int64(1), "", "refuse")
	f.Fuzz(func(t *testing.T, grace, flush, reserve, quiet, admit, spread, age int64, protocol, onNew string) {
		e, err := Validate(Policy{
			Protocol: Protocol(protocol), OnNew: OnNew(onNew), Grace: time.Duration(grace), FlushTimeout: time.Duration(flush),
			Reserve: time.Duration(reserve), QuietPeriod: time.Duration(quiet), AdmitFor: time.Duration(admit),
			CloseSpread: time.Duration(spread), MaxAge: time.Duration(age),
		})
		if err == nil {
			checkEffective(t, e)
			checkEffective(t, e.scale(e.Policy.Grace/3))
		}
	})
}

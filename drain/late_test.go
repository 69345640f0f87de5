// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// lateWorld is a scripted LateWorld. Its own fields are under the lock of world.
type lateWorld struct {
	*world
	got                                   OnNew
	why                                   string
	lates                                 LateCounts
	chooseErr, redirectErr, lateErr       error
	endErr                                error
	chooseTakes, redirectTakes, lateTakes time.Duration
	hangLate, hangEnd, deafLate           bool
}

func newLateWorld(got OnNew) *lateWorld {
	return &lateWorld{world: newWorld(), got: got, why: "because", lates: LateCounts{Known: true}}
}

func (w *lateWorld) setLate(f func(*lateWorld)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f(w)
}

func (w *lateWorld) ChooseLate(ctx context.Context, want OnNew) (OnNew, string, error) {
	w.note("choose", want)
	w.mu.Lock()
	takes, got, why, err := w.chooseTakes, w.got, w.why, w.chooseErr
	if w.deafLate {
		ctx = context.Background()
	}
	w.mu.Unlock()
	if perr := pause(ctx, takes); perr != nil {
		return "", "", perr
	}
	return got, why, err
}

func (w *lateWorld) Redirect(ctx context.Context, how OnNew, until time.Time) error {
	w.mu.Lock()
	takes := w.redirectTakes
	if w.deafLate {
		ctx = context.Background()
	}
	w.mu.Unlock()
	if err := pause(ctx, takes); err != nil {
		return err
	}
	w.note("redirect", how)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.redirectErr == nil {
		w.untils = append(w.untils, until)
	}
	return w.redirectErr
}

func (w *lateWorld) Late(ctx context.Context) (LateCounts, error) {
	w.note("late", nil)
	w.mu.Lock()
	c, err, takes, hang := w.lates, w.lateErr, w.lateTakes, w.hangLate
	w.mu.Unlock()
	if hang {
		<-ctx.Done()
		return LateCounts{}, ctx.Err()
	}
	if perr := pause(ctx, takes); perr != nil {
		return LateCounts{}, perr
	}
	return c, err
}

func (w *lateWorld) EndLate(ctx context.Context) error {
	w.note("end late", nil)
	w.mu.Lock()
	hang, err := w.hangEnd, w.endErr
	w.mu.Unlock()
	if hang {
		<-ctx.Done()
		return ctx.Err()
	}
	w.setLate(func(w *lateWorld) { w.lates.Carried, w.lates.Parked = 0, 0 })
	return err
}

// sequence are the calls in order, without those that repeat.
func (w *lateWorld) sequence() []string {
	return slices.DeleteFunc(w.names(), func(s string) bool { return s == "late" })
}

func runLate(t *testing.T, w *lateWorld, change ...func(*Options)) *bench {
	t.Helper()
	return run(t, w.world, append([]func(*Options){func(o *Options) { o.World = w }}, change...)...)
}

func late(how OnNew) Policy { return with(func(p *Policy) { p.OnNew = how }) }

func TestC48_LateConnectionsGoElsewhereAtOnce(t *testing.T) {
	for _, how := range []OnNew{OnNewSteer, OnNewRelay, OnNewHold} {
		for _, want := range []OnNew{OnNewAuto, how} {
			synctest.Test(t, func(t *testing.T) {
				w := newLateWorld(how)
				w.counts = Counts{Known: true, Active: 1, Accepted: 1}
				b := runLate(t, w)
				st := b.begin(Request{Policy: late(want)})
				if st.OnNew != how || st.OnNewWhy != "because" || st.Admission != AdmissionClosed || st.Flipped.IsZero() || st.Flipped.After(w.start) {
					t.Errorf("want %s: answered with %s (%s), admission %s, flipped %v, want %s at once", want, st.OnNew, st.OnNewWhy, st.Admission, st.Flipped, how)
				}
				if c := w.all("choose"); len(c) != 1 || c[0].arg != want {
					t.Errorf("choices: got %+v, want one for %s", c, want)
				}
				after(4 * time.Second)
				w.set(func(w *world) { w.counts.Active = 0 })
				st = b.outcome(OutcomeDrained)
				if got := w.sequence(); !slices.Equal(got, []string{"journal begin", "ready false", "choose", "redirect", "journal flush", "flush", "journal end"}) {
					t.Errorf("calls: got %q", got)
				}
				if got := phases(st); !slices.Equal(got, allPhases) {
					t.Errorf("phases: got %v, want %v", got, allPhases)
				}
				if r := w.all("redirect"); r[0].arg != how || w.untils[0].Sub(st.Deadline) != deadMan {
					t.Errorf("redirect: got %v until %v, want %s until 10s past the deadline", r[0].arg, w.untils[0], how)
				}
				if e := w.eventsOf(EventLate); len(e) == 0 || e[0].Fields["action"] != string(how) || e[0].Fields["why"] != "because" {
					t.Errorf("events: got %+v, want the choice", e)
				}
			})
		}
	}
}

// The application's flush does not wait for late connections; the drain does.
func TestC48_DrainWaitsForLateConnections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newLateWorld(OnNewRelay)
		b := runLate(t, w)
		b.begin(Request{Policy: late(OnNewAuto)})
		w.setLate(func(w *lateWorld) { w.lates = LateCounts{Arrived: 3, Carried: 2, Parked: 1, Known: true} })
		after(3 * time.Second)
		if f := w.all("flush"); len(f) != 1 || f[0].at > 1500*time.Millisecond {
			t.Fatalf("flush: got %+v, want one after the quiet period", f)
		}
		st := b.Status()
		if st.Over() || !st.Lingering || st.State != StateFlushing || st.LateCounts == nil || st.LateCounts.Carried != 2 || st.LateCounts.Arrived != 3 {
			t.Fatalf("got over %v, lingering %v, %s, late %+v, want a drain that waits for 3", st.Over(), st.Lingering, st.State, st.LateCounts)
		}
		if !slices.Equal(st.Blocks, []Block{{"relayed", 2}, {"parked", 1}}) {
			t.Errorf("blocks: got %v, want the late ones", st.Blocks)
		}
		// They come and go for a while, each well inside the quiet period of the one before.
		for i := range 8 {
			w.setLate(func(w *lateWorld) { w.lates = LateCounts{Arrived: uint64(4 + i), Known: true} })
			after(700 * time.Millisecond)
			if b.Status().Over() {
				t.Fatalf("over although the last one came 700ms ago")
			}
		}
		last := time.Since(w.start) - 700*time.Millisecond
		st = b.outcome(OutcomeDrained)
		if d := st.Ended.Sub(w.start) - last; d < time.Second || d > 1500*time.Millisecond {
			t.Errorf("ended %v after the last arrival, want the quiet period", d)
		}
		if st.LateCounts.Arrived != 11 || st.LateEnded != 0 || st.Lingering || w.count("end late") != 0 {
			t.Errorf("got %+v, %d ended, want 11 that all went through", st.LateCounts, st.LateEnded)
		}
		end := w.eventsOf(EventEnd)
		if len(end) != 1 || end[0].Fields["late_arrived"] != uint64(11) || end[0].Fields["late_ended"] != 0 {
			t.Errorf("end: got %+v, want it to tell of 11", end)
		}
		var told []any
		for _, e := range w.eventsOf(EventLate) {
			told = append(told, e.Fields["arrived"])
		}
		if len(told) < 2 {
			t.Errorf("events: got %v, want the counts with the progress too", told)
		}
	})
}

func TestT8_LateConnectionsEndAtTheDeadline(t *testing.T) {
	for _, tt := range []struct {
		name string
		set  func(*lateWorld)
		late time.Duration // past the deadline, at most
		say  string
	}{
		{"ended", func(*lateWorld) {}, 0, "4 carried and 1 parked are ended"},
		{"fails", func(w *lateWorld) { w.endErr = errors.New("the relay is stuck") }, 0, "the relay is stuck"},
		{"hangs", func(w *lateWorld) { w.hangEnd = true }, 0, "deadline"},
	} {
		synctest.Test(t, func(t *testing.T) {
			w := newLateWorld(OnNewRelay)
			w.lates = LateCounts{Arrived: 9, Carried: 4, Parked: 1, Known: true}
			tt.set(w)
			b := runLate(t, w)
			b.begin(Request{Policy: late(OnNewRelay)})
			st := b.outcome(OutcomeDrained)
			e := w.all("end late")
			if len(e) != 1 || e[0].at < 24*time.Second || e[0].at >= 25*time.Second {
				t.Errorf("%s: end of late ones: got %+v, want one just before 25s", tt.name, e)
			}
			if d := st.Ended.Sub(st.Deadline); d > tt.late {
				t.Errorf("%s: ended %v after the deadline", tt.name, d)
			}
			if st.LateEnded != 5 || w.eventsOf(EventEnd)[0].Fields["late_ended"] != 5 {
				t.Errorf("%s: got %d ended, want 5 in status and report", tt.name, st.LateEnded)
			}
			if !slices.ContainsFunc(st.Warnings, func(s string) bool { return strings.Contains(s, tt.say) }) {
				t.Errorf("%s: warnings: got %q, want %q", tt.name, st.Warnings, tt.say)
			}
		})
	}
	// Where the wait ran out, what is carried is ended beside the cut, and nothing is later for it.
	synctest.Test(t, func(t *testing.T) {
		w := newLateWorld(OnNewSteer)
		w.counts = Counts{Known: true, Active: 1}
		w.lates = LateCounts{Arrived: 1, Carried: 1, Known: true}
		w.flushed = make(chan struct{})
		b := runLate(t, w)
		w.onKill = func() { b.Exited(errors.New("signal: killed")) }
		b.begin(Request{Policy: late(OnNewAuto)})
		st := b.outcome(OutcomeExpired)
		if st.Ended.After(st.Deadline) || w.count("end late") != 1 || w.count("kill") != 1 {
			t.Errorf("ended %v after the deadline, %d ends, %d kills", st.Ended.Sub(st.Deadline), w.count("end late"), w.count("kill"))
		}
	})
}

func TestD4_UnknownLateCountIsNeverNone(t *testing.T) {
	for _, set := range []func(*lateWorld){
		func(w *lateWorld) { w.lates = LateCounts{} },
		func(w *lateWorld) { w.lateErr = errors.New("the relay does not answer") },
		func(w *lateWorld) { w.lates.Carried = -1 },
		func(w *lateWorld) { w.hangLate = true },
	} {
		synctest.Test(t, func(t *testing.T) {
			w := newLateWorld(OnNewRelay)
			b := runLate(t, w)
			b.begin(Request{Policy: late(OnNewAuto)})
			after(500 * time.Millisecond)
			w.setLate(set)
			after(15 * time.Second)
			st := b.Status()
			if st.Over() || !st.Lingering || st.LateCounts.Known || !slices.Equal(st.Blocks, []Block{{Class: "unknown"}}) {
				t.Fatalf("got over %v, late %+v, blocks %v, want unknown and waiting", st.Over(), st.LateCounts, st.Blocks)
			}
			w.setLate(func(w *lateWorld) { w.lates, w.lateErr, w.hangLate = LateCounts{Known: true}, nil, false })
			if st := b.outcome(OutcomeDrained); !st.Ended.Before(st.Deadline.Add(-time.Second)) || !st.LateCounts.Known {
				t.Errorf("ended at %v, late %+v, want soon after it was known again", st.Ended.Sub(st.Begun), st.LateCounts)
			}
			if n := len(slices.DeleteFunc(b.Status().Warnings, func(s string) bool { return !strings.Contains(s, "unknown") })); n != 1 {
				t.Errorf("got %d warnings, want one", n)
			}
		})
	}
}

func TestT3_WhatCannotBeRedirectedIsAdmitted(t *testing.T) {
	steps := []string{"journal begin", "ready false", "choose", "close", "journal flush", "flush", "journal end"}
	for _, tt := range []struct {
		name string
		set  func(*lateWorld)
		by   time.Duration // when the choice is known
		why  string
		want []string
	}{
		{"says admit", func(w *lateWorld) { w.got = OnNewAdmit }, 0, "because", steps},
		{"cannot tell", func(w *lateWorld) { w.chooseErr = errors.New("no route") }, 0, "could not be found out", steps},
		{"no answer", func(w *lateWorld) { w.got = "proxy" }, 0, "could not be found out", steps},
		{"says auto", func(w *lateWorld) { w.got = OnNewAuto }, 0, "could not be found out", steps},
		{"slow", func(w *lateWorld) { w.chooseTakes = time.Minute }, time.Second, "could not be found out", steps},
		{"deaf", func(w *lateWorld) { w.chooseTakes, w.deafLate = 8*time.Second, true }, 1100 * time.Millisecond, "could not be found out", steps},
		{"fails", func(w *lateWorld) { w.redirectErr = errors.New("no listener") }, 0, "did not work (no listener)", slices.Insert(slices.Clone(steps), 3, "redirect")},
	} {
		for _, policy := range []OnNew{OnNewAuto, OnNewRelay} {
			synctest.Test(t, func(t *testing.T) {
				w := newLateWorld(OnNewRelay)
				w.counts.Accepted = 1
				tt.set(w)
				b := runLate(t, w)
				st := b.begin(Request{Policy: with(func(p *Policy) { p.OnNew, p.QuietPeriod = policy, 2*time.Second })})
				if d := time.Since(w.start); d != tt.by {
					t.Errorf("%s: answered after %v, want %v", tt.name, d, tt.by)
				}
				if st.OnNew != OnNewAdmit || !strings.Contains(st.OnNewWhy, tt.why) || st.Admission != AdmissionOpen || !st.Flipped.IsZero() {
					t.Errorf("%s: got %s (%s), %s, want admit and %q", tt.name, st.OnNew, st.OnNewWhy, st.Admission, tt.why)
				}
				synctest.Wait()
				if n := w.count("notify"); n != 1 {
					t.Errorf("%s: notices: got %d, want one", tt.name, n)
				}
				// Arrivals go on for 3 s: admission stays open for them.
				for range 30 {
					after(100 * time.Millisecond)
					w.set(func(w *world) { w.counts.Accepted++ })
				}
				if n := w.count("close"); n != 0 {
					t.Errorf("%s: closed while connections came", tt.name)
				}
				st = b.outcome(OutcomeDrained)
				if got := w.sequence(); !slices.Equal(got, tt.want) {
					t.Errorf("%s: calls: got %q, want %q", tt.name, got, tt.want)
				}
				if st.LateCounts != nil || w.count("late")+w.count("end late") != 0 {
					t.Errorf("%s: late connections were looked at: %+v", tt.name, st.LateCounts)
				}
				if e := w.eventsOf(EventLate); len(e) == 0 || e[len(e)-1].Fields["action"] != "admit" {
					t.Errorf("%s: events: got %+v, want admit said", tt.name, e)
				}
			})
		}
	}
	synctest.Test(t, func(t *testing.T) { // refuse may be the answer too
		w := newLateWorld(OnNewRefuse)
		b := runLate(t, w)
		if st := b.begin(Request{Policy: late(OnNewHold)}); st.OnNew != OnNewRefuse || st.Flipped.IsZero() {
			t.Errorf("got %s, flipped %v, want refuse at once", st.OnNew, st.Flipped)
		}
		b.outcome(OutcomeDrained)
	})
}

func TestT3_NothingToRedirectWith(t *testing.T) {
	for _, on := range []OnNew{OnNewAuto, OnNewSteer, OnNewRelay, OnNewHold} {
		synctest.Test(t, func(t *testing.T) { // a World that cannot
			b := run(t, newWorld())
			st := b.begin(Request{Policy: late(on)})
			if st.OnNew != OnNewAdmit || (on != OnNewAuto && !strings.Contains(st.OnNewWhy, string(on)+" is configured")) {
				t.Errorf("%s: got %s (%s), want admit and why", on, st.OnNew, st.OnNewWhy)
			}
			b.outcome(OutcomeDrained)
		})
		synctest.Test(t, func(t *testing.T) { // a datapath without admission
			w := newLateWorld(OnNewRelay)
			b := runLate(t, w, func(o *Options) { o.Unguarded = true })
			if st := b.begin(Request{Policy: late(on)}); st.OnNew != OnNewAdmit {
				t.Errorf("%s unguarded: got %s, want admit", on, st.OnNew)
			}
			b.outcome(OutcomeDrained)
			if w.count("choose")+w.count("redirect") != 0 {
				t.Errorf("%s unguarded: asked for a redirection", on)
			}
		})
	}
}

// A redirection that hangs is given up in time, and one that comes in after all counts.
func TestC48_RedirectionThatIsLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newLateWorld(OnNewRelay)
		w.counts = Counts{Known: true, Active: 1, Accepted: 1}
		w.deafLate, w.redirectTakes = true, 7*time.Second
		b := runLate(t, w)
		st := b.begin(Request{Policy: with(func(p *Policy) { p.OnNew = OnNewRelay; p.QuietPeriod = 5 * time.Second })})
		if d := time.Since(w.start); d < flipLimit || d > flipLimit+pollFloor || st.OnNew != OnNewAdmit {
			t.Errorf("answered after %v with %s, want admit after 5s", d, st.OnNew)
		}
		w.set(func(w *world) { w.counts.Accepted++ })
		after(3 * time.Second)
		st = b.Status()
		if st.OnNew != OnNewRelay || st.OnNewWhy != "because" || st.Admission != AdmissionClosed || st.LateCounts == nil {
			t.Errorf("got %s (%s), %s, want the relay that works after all", st.OnNew, st.OnNewWhy, st.Admission)
		}
		w.set(func(w *world) { w.counts.Active = 0 })
		b.outcome(OutcomeDrained)
		if n := w.count("close"); n != 0 {
			t.Errorf("closed %d times what is redirected", n)
		}
	})
	synctest.Test(t, func(t *testing.T) { // the drain is over before
		w := newLateWorld(OnNewRelay)
		w.redirectTakes = 2 * time.Second
		w.lates = LateCounts{Arrived: 1, Carried: 1, Known: true}
		b := runLate(t, w)
		go b.Begin(t.Context(), Request{Cause: CauseSignal, Policy: late(OnNewRelay)})
		after(time.Second)
		b.Exited(nil)
		after(500 * time.Millisecond)
		if b.Status().Over() {
			t.Fatal("over before the redirection that is under way was known")
		}
		after(3 * time.Second)
		if st := b.Status(); st.Over() || !st.Lingering {
			t.Fatalf("got over %v, want one relayed connection waited for", st.Over())
		}
		w.setLate(func(w *lateWorld) { w.lates.Carried = 0 })
		b.outcome(OutcomeDrained)
	})
	synctest.Test(t, func(t *testing.T) { // the same, and it fails
		w := newLateWorld(OnNewRelay)
		w.redirectTakes, w.redirectErr = 2*time.Second, errors.New("no listener")
		b := runLate(t, w)
		go b.Begin(t.Context(), Request{Cause: CauseSignal, Policy: late(OnNewRelay)})
		after(time.Second)
		b.Exited(nil)
		if st := b.outcome(OutcomeDrained); st.Ended.Sub(st.Begun) > 3*time.Second {
			t.Errorf("ended after %v, want when the redirection failed", st.Ended.Sub(st.Begun))
		}
	})
}

// An application that leaves by itself, told or not, leaves its late connections to the relay.
func TestD1_LateConnectionsOutliveTheApplication(t *testing.T) {
	for _, tt := range []struct {
		err  error
		want Outcome
	}{{nil, OutcomeDrained}, {errors.New("signal: killed"), OutcomeLost}} {
		synctest.Test(t, func(t *testing.T) {
			w := newLateWorld(OnNewHold)
			w.counts = Counts{Known: true, Active: 1, Accepted: 1}
			w.lates = LateCounts{Arrived: 2, Parked: 2, Known: true}
			b := runLate(t, w)
			b.begin(Request{Policy: late(OnNewAuto)})
			after(2 * time.Second)
			b.Exited(tt.err)
			after(2 * time.Second)
			if st := b.Status(); st.Over() || st.State != StateFlushing {
				t.Fatalf("got over %v, %s, want two parked ones waited for", st.Over(), st.State)
			}
			if _, err := b.Undrain(t.Context(), 0, "root"); !errors.Is(err, ErrFlushing) {
				t.Errorf("undrain: got %v, want ErrFlushing", err)
			}
			looks := w.count("look")
			after(time.Second)
			if n := w.count("look") - looks; n > 0 {
				t.Errorf("looked %d times at an application that is gone", n)
			}
			w.setLate(func(w *lateWorld) { w.lates.Parked = 0 })
			st := b.outcome(tt.want)
			if st.FlushReason != "" || w.count("flush") != 0 {
				t.Errorf("flush: got %s, want none: there is nobody to hear it", st.FlushReason)
			}
		})
	}
}

func TestD14_UndrainLetsCarriedOnesFinish(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newLateWorld(OnNewRelay)
		w.counts = Counts{Known: true, Active: 1}
		w.lates = LateCounts{Arrived: 5, Carried: 5, Known: true}
		b := runLate(t, w)
		b.begin(Request{Policy: late(OnNewAuto)})
		after(2 * time.Second)
		st, err := b.Undrain(t.Context(), 7, "root")
		if err != nil || st.State != StateServing || st.Admission != AdmissionOpen || st.Outcome != OutcomeCancelled {
			t.Fatalf("got %v, %s, %s, want serving at once", err, st.State, st.Admission)
		}
		if got := w.sequence(); !slices.Equal(got, []string{"journal begin", "ready false", "choose", "redirect", "open", "journal undrain", "ready true"}) {
			t.Errorf("calls: got %q", got)
		}
		// The next drain chooses anew.
		w.setLate(func(w *lateWorld) { w.got, w.lates = OnNewSteer, LateCounts{Known: true} })
		w.set(func(w *world) { w.counts.Active = 0 })
		if st := b.begin(Request{Policy: late(OnNewAuto)}); st.OnNew != OnNewSteer || st.LateCounts == nil || st.LateCounts.Arrived != 0 {
			t.Errorf("the next drain: got %s, late %+v, want steer and nothing carried over", st.OnNew, st.LateCounts)
		}
		b.outcome(OutcomeDrained)
		if n := w.count("end late"); n != 0 {
			t.Errorf("ended late connections %d times", n)
		}
	})
	// While it is chosen, and while it is redirected.
	for _, tt := range []struct {
		set  func(*lateWorld)
		want []string
	}{
		{func(w *lateWorld) { w.chooseTakes = 800 * time.Millisecond }, []string{"journal begin", "ready false", "choose", "journal undrain", "ready true"}},
		{func(w *lateWorld) { w.redirectTakes = 2 * time.Second }, []string{"journal begin", "ready false", "choose", "redirect", "open", "journal undrain", "ready true"}},
	} {
		synctest.Test(t, func(t *testing.T) {
			w := newLateWorld(OnNewRelay)
			w.counts = Counts{Known: true, Active: 1}
			tt.set(w)
			b := runLate(t, w)
			var begun sync.WaitGroup
			begun.Go(func() { b.begin(Request{Policy: late(OnNewAuto)}) })
			after(500 * time.Millisecond)
			if st, err := b.Undrain(t.Context(), 0, "root"); err != nil || st.State != StateServing {
				t.Fatalf("got %v, %s, want serving", err, st.State)
			}
			begun.Wait() // its caller is not left waiting
			after(5 * time.Second)
			if got := w.sequence(); !slices.Equal(got, tt.want) {
				t.Errorf("calls: got %q, want %q", got, tt.want)
			}
		})
	}
	// A redirection that does not hear of the end of its drain is undone.
	synctest.Test(t, func(t *testing.T) {
		w := newLateWorld(OnNewRelay)
		w.counts = Counts{Known: true, Active: 1, Accepted: 1}
		w.deafLate, w.redirectTakes = true, 20*time.Second
		b := runLate(t, w)
		b.begin(Request{Policy: late(OnNewAuto)})
		if _, err := b.Undrain(t.Context(), 0, "root"); err != nil {
			t.Fatal(err)
		}
		after(20 * time.Second)
		if n := w.sequence(); n[len(n)-1] != "open" || n[len(n)-2] != "redirect" {
			t.Errorf("calls: got %q, want admission opened after the late redirection", n)
		}
	})
}

func TestC2_CutDoesNotWaitForLateConnections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newLateWorld(OnNewRelay)
		w.lates = LateCounts{Arrived: 1, Carried: 1, Known: true}
		b := runLate(t, w)
		b.begin(Request{Policy: late(OnNewAuto)})
		after(5 * time.Second)
		if st := b.Status(); !st.Lingering {
			t.Fatalf("got %+v, want a drain that waits for a late connection", st)
		}
		at := time.Now()
		if _, err := b.Cut(t.Context(), 0, "root"); err != nil {
			t.Fatal(err)
		}
		st := b.outcome(OutcomeDrained)
		if st.Ended.Sub(at) > time.Second || st.LateEnded != 1 || w.count("end late") != 1 {
			t.Errorf("ended after %v, %d of them ended, want one at once", st.Ended.Sub(at), st.LateEnded)
		}
	})
}

func TestR7_RuleOfARedirectionFollowsTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newLateWorld(OnNewSteer)
		w.counts = Counts{Known: true, Active: 1}
		b := runLate(t, w)
		b.begin(Request{Policy: late(OnNewAuto)})
		after(time.Second)
		st, err := b.Extend(t.Context(), 0, 20*time.Second, time.Time{}, "root")
		if err != nil {
			t.Fatal(err)
		}
		after(time.Second)
		untils := get(w.world, func(w *world) []time.Time { return slices.Clone(w.untils) })
		if len(untils) != 2 || untils[1].Sub(st.Deadline) != deadMan || w.count("close") != 0 {
			t.Errorf("rule ends: got %v with %d closes, want the redirection moved with the deadline", untils, w.count("close"))
		}
		w.set(func(w *world) { w.counts.Active = 0 })
		b.outcome(OutcomeDrained)
	})
	// Extended while it is under way, and then it fails: nothing is closed for that.
	synctest.Test(t, func(t *testing.T) {
		w := newLateWorld(OnNewSteer)
		w.counts = Counts{Known: true, Active: 1, Accepted: 1}
		w.redirectTakes, w.redirectErr = 2*time.Second, errors.New("no listener")
		b := runLate(t, w)
		go b.Begin(t.Context(), Request{Cause: CauseSignal, Policy: with(func(p *Policy) { p.OnNew = OnNewAuto; p.QuietPeriod = 4 * time.Second })})
		after(time.Second)
		if _, err := b.Extend(t.Context(), 0, 20*time.Second, time.Time{}, "root"); err != nil {
			t.Fatal(err)
		}
		after(2 * time.Second)
		if st := b.Status(); st.OnNew != OnNewAdmit || st.Admission != AdmissionOpen || w.count("close") != 0 {
			t.Errorf("got %s, %s, %d closes, want admission open", st.OnNew, st.Admission, w.count("close"))
		}
		w.set(func(w *world) { w.counts.Active = 0 })
		b.outcome(OutcomeDrained)
	})
}

// The notice that makes an application close its listener comes when new connections go elsewhere.
func TestNoticeFollowsTheRedirection(t *testing.T) {
	for _, fails := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			w := newLateWorld(OnNewRelay)
			w.counts = Counts{Known: true, Active: 1, Accepted: 1}
			w.chooseTakes, w.redirectTakes = 500*time.Millisecond, time.Second
			if fails {
				w.redirectErr = errors.New("no listener")
			}
			b := runLate(t, w)
			b.begin(Request{Policy: late(OnNewAuto)})
			synctest.Wait()
			n := w.all("notify")
			if len(n) != 1 || n[0].at != 1500*time.Millisecond {
				t.Errorf("fails %v: notices: got %+v, want one at 1.5s", fails, n)
			}
			w.set(func(w *world) { w.counts.Active = 0 })
			b.outcome(OutcomeDrained)
			if n := w.count("notify"); n != 1 {
				t.Errorf("fails %v: notices: got %d, want one", fails, n)
			}
		})
	}
}

func TestR2_OneRedirectionForManyBegins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newLateWorld(OnNewRelay)
		w.counts = Counts{Known: true, Active: 1}
		w.chooseTakes, w.redirectTakes = 300*time.Millisecond, 200*time.Millisecond
		b := runLate(t, w)
		var wg sync.WaitGroup
		for range 100 {
			wg.Go(func() {
				if st := b.begin(Request{Policy: late(OnNewAuto)}); st.OnNew != OnNewRelay || st.Flipped.IsZero() {
					t.Errorf("answered with %s, flipped %v, want relay and flipped", st.OnNew, st.Flipped)
				}
			})
		}
		wg.Wait()
		if w.count("choose") != 1 || w.count("redirect") != 1 {
			t.Errorf("got %d choices and %d redirections, want one each", w.count("choose"), w.count("redirect"))
		}
		w.set(func(w *world) { w.counts.Active = 0 })
		b.outcome(OutcomeDrained)
	})
}

func TestG3_ObserveRedirectsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newLateWorld(OnNewRelay)
		w.lates = LateCounts{Arrived: 1, Carried: 1, Known: true}
		b := runLate(t, w, func(o *Options) { o.Mode = ModeObserve })
		b.begin(Request{Policy: late(OnNewAuto)})
		st := b.outcome(OutcomeDrained)
		if got := w.sequence(); !slices.Equal(got, []string{"choose"}) {
			t.Errorf("observe called %q, want the question alone", got)
		}
		want := []string{"turn readiness off", "relay new connections", "tell the application that it drains", "flush: zero"}
		got := slices.Clone(st.Would)
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) || st.LateCounts != nil {
			t.Errorf("would: got %q, want %q", st.Would, want)
		}
	})
}

func TestD13_RestartFindsTheRedirection(t *testing.T) {
	// In the wait: it is chosen and made again, which changes nothing, and undrain opens.
	synctest.Test(t, func(t *testing.T) {
		w := newLateWorld(OnNewRelay)
		w.counts = Counts{Known: true, Active: 5, Accepted: 5}
		rec, boot, _ := interruptedLate(t, w, 4*time.Second)
		b := runLate(t, w, func(o *Options) { o.Resume, o.Boot = &rec, boot })
		after(time.Second)
		st := b.Status()
		if st.OnNew != OnNewRelay || st.Admission != AdmissionClosed || st.LateCounts == nil || w.count("redirect") != 2 || w.count("close") != 0 {
			t.Errorf("got %s, %s, late %+v, %d redirections, want relay again", st.OnNew, st.Admission, st.LateCounts, w.count("redirect"))
		}
		if _, err := b.Undrain(t.Context(), 0, "root"); err != nil || w.count("open") != 1 {
			t.Errorf("undrain: got %v, %d opens, want admission opened", err, w.count("open"))
		}
	})
	// After the flush: the redirection is renewed and not replaced by a refusal, and the drain lingers.
	for _, tt := range []struct {
		name string
		set  func(*lateWorld)
		exit time.Duration // after the restart
		ends bool          // the relay is gone
	}{
		{"found", func(*lateWorld) {}, 3 * time.Second, false},
		{"the application ends meanwhile", func(w *lateWorld) { w.chooseTakes = 500 * time.Millisecond }, 0, false},
		{"not found", func(w *lateWorld) { w.chooseErr = errors.New("no relay") }, 3 * time.Second, true},
		{"not renewed", func(w *lateWorld) { w.redirectErr = errors.New("no relay") }, 3 * time.Second, true},
	} {
		synctest.Test(t, func(t *testing.T) {
			w := newLateWorld(OnNewRelay)
			w.lates = LateCounts{Arrived: 4, Carried: 1, Known: true}
			w.flushed = make(chan struct{})
			rec, boot, _ := interruptedLate(t, w, 2*time.Second)
			if rec.Type != recordFlush {
				t.Fatalf("%s: record: got %+v, want the flush", tt.name, rec)
			}
			w.setLate(tt.set)
			b := runLate(t, w, func(o *Options) { o.Resume, o.Boot = &rec, boot })
			time.Sleep(tt.exit)
			b.Exited(nil)
			after(2 * time.Second)
			if tt.ends {
				if st := b.Status(); !st.Over() || w.count("close") != 1 || st.Outcome != OutcomeDrained {
					t.Errorf("%s: got over %v, %d closes, want a refusal and the end", tt.name, st.Over(), w.count("close"))
				}
				return
			}
			if st := b.Status(); st.Over() || !st.Lingering || w.count("close") != 0 || w.count("redirect") != 2 {
				t.Fatalf("%s: got over %v, lingering %v, %d closes, %d redirections, want the relayed one waited for", tt.name, st.Over(), st.Lingering, w.count("close"), w.count("redirect"))
			}
			w.setLate(func(w *lateWorld) { w.lates.Carried = 0 })
			b.outcome(OutcomeDrained)
		})
	}
}

// interruptedLate is interrupted for a lateWorld, with a second between the two lives.
func interruptedLate(t *testing.T, w *lateWorld, ran time.Duration) (Record, func() time.Duration, Status) {
	t.Helper()
	booted := time.Now().Add(-1000 * time.Hour)
	boot := func() time.Duration { return time.Since(booted) }
	b := runLate(t, w, func(o *Options) { o.Boot = boot })
	st := b.begin(Request{Policy: late(OnNewAuto)})
	after(ran)
	b.end()
	time.Sleep(time.Second)
	return get(w.world, func(w *world) Record { return w.records[len(w.records)-1] }), boot, st
}

// A drain that is very short has no time to ask.
func TestT13_ShortDrainWithLateConnections(t *testing.T) {
	for _, left := range []time.Duration{-time.Second, 100 * time.Millisecond, time.Second} {
		synctest.Test(t, func(t *testing.T) {
			w := newLateWorld(OnNewRelay)
			w.chooseTakes = 900 * time.Millisecond
			w.lates = LateCounts{Arrived: 1, Carried: 1, Known: true}
			b := runLate(t, w)
			b.begin(Request{Policy: late(OnNewAuto), Deadline: time.Now().Add(left)})
			st := b.ended()
			if d := st.Ended.Sub(w.start); d > max(left, minBudget)+time.Second || w.count("flush") != 1 {
				t.Errorf("left %v: ended after %v with %d flushes", left, d, w.count("flush"))
			}
		})
	}
}

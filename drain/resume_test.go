// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// interrupted runs a drain for a while, ends its machine as a crash would, and returns a boot clock and
// the last record.
func interrupted(t *testing.T, w *world, p Policy, ran, down time.Duration) (Record, func() time.Duration, Status) {
	t.Helper()
	booted := time.Now().Add(-1000 * time.Hour)
	boot := func() time.Duration { return time.Since(booted) }
	b := run(t, w, func(o *Options) { o.Boot = boot })
	st := b.begin(Request{Cause: CauseOperator, Policy: p, By: "root", Reason: "new kernel"})
	after(ran)
	b.end()
	time.Sleep(down)
	rec := get(w, func(w *world) Record { return w.records[len(w.records)-1] })
	// The wall clock of the next process may have been stepped: nothing may be taken from it.
	rec.Begun, rec.Deadline = rec.Begun.Add(-time.Hour), rec.Deadline.Add(-time.Hour)
	return rec, boot, st
}

func resumed(t *testing.T, w *world, rec Record, boot func() time.Duration) *bench {
	t.Helper()
	b := run(t, w, func(o *Options) { o.Resume, o.Boot = &rec, boot })
	synctest.Wait()
	return b
}

func TestD13_RestartGoesOnWithTheDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Active: 50, Accepted: 50}
		rec, boot, first := interrupted(t, w, with(func(p *Policy) { p.NotifyAt = NotifyAtSettled }), 4*time.Second, 3*time.Second)
		b := resumed(t, w, rec, boot)
		st := b.Status()
		if st.ID != first.ID || st.Cause != CauseOperator || st.By != "root" || st.State != StateDraining {
			t.Errorf("got %s by %s (%s), %s, want the same drain", st.ID, st.By, st.Cause, st.State)
		}
		if d := st.Deadline.Sub(first.Deadline).Abs(); d > time.Millisecond {
			t.Errorf("the deadline moved by %v", d)
		}
		if got := b.begin(Request{Policy: budget}); got.ID != first.ID {
			t.Errorf("a Begin after the restart: got %s, want %s", got.ID, first.ID)
		}
		w.set(func(w *world) { w.counts.Active = 30 })
		after(time.Second)
		if st := b.Status(); st.InFlight == nil || *st.InFlight != 30 {
			t.Errorf("in flight: got %v, want 30", st.InFlight)
		}
		b.outcome(OutcomeExpired)
		if n := w.count("notify"); n != 1 {
			t.Errorf("notices: got %d, want 1 over both lives", n)
		}
		if f := w.all("flush"); len(f) != 1 || f[0].at != 17*time.Second {
			t.Errorf("flush: got %+v, want one at 17s of the first life", f)
		}
		if n := w.count("close"); n != 2 {
			t.Errorf("flips: got %d, want one in each life", n)
		}
	})
}

func TestD13_FlushIsNotSentTwice(t *testing.T) {
	for _, then := range []string{"exits", "answers", "stays"} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld()
			w.flushed = make(chan struct{})
			rec, boot, first := interrupted(t, w, budget, 2*time.Second, time.Second)
			if rec.Type != recordFlush || rec.FlushReason != FlushZero {
				t.Fatalf("record: got %+v, want the flush", rec)
			}
			b := resumed(t, w, rec, boot)
			st := b.Status()
			if st.State != StateFlushing || st.FlushReason != FlushZero || st.FlushResult != FlushUnknown || st.ID != first.ID {
				t.Errorf("got %s, %s, %s, want flushing", st.State, st.FlushReason, st.FlushResult)
			}
			if _, err := b.Undrain(t.Context(), 0, "root"); !errors.Is(err, ErrFlushing) {
				t.Errorf("undrain: got %v, want ErrFlushing", err)
			}
			switch then {
			case "exits":
				b.Exited(nil)
			case "answers":
				for _, id := range []string{"d-another", first.ID} {
					if err := b.Flushed(t.Context(), id); err != nil {
						t.Errorf("flushed: %v", err)
					}
				}
				if st := b.Status(); st.FlushResult != FlushOK {
					t.Errorf("got the flush %s, want it ok", st.FlushResult)
				}
			}
			if then != "stays" {
				if st := b.outcome(OutcomeDrained); st.Ended.Sub(st.Begun) > 5*time.Second {
					t.Errorf("%s: ended after %v, want at once", then, st.Ended.Sub(st.Begun))
				}
			} else {
				b.outcome(OutcomeDrained)
				if n := w.count("kill"); n != 1 {
					t.Errorf("kills: got %d, want 1", n)
				}
			}
			if n := w.count("flush"); n != 1 {
				t.Errorf("flushes: got %d, want 1", n)
			}
		})
	}
}

func TestD13_RestartAfterTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Active: 1}
		w.flushed = make(chan struct{})
		rec, boot, _ := interrupted(t, w, budget, 4*time.Second, time.Minute)
		back := time.Now()
		b := resumed(t, w, rec, boot)
		st := b.outcome(OutcomeExpired)
		if n := w.count("flush"); n != 1 {
			t.Errorf("flushes: got %d, want one although it is late", n)
		}
		if d := st.Ended.Sub(back); d > 2*time.Second {
			t.Errorf("took %v after the restart, want soon", d)
		}
		if n := w.names(); slices.Index(n, "survivors") < 0 || slices.Index(n, "cut") < slices.Index(n, "flush") {
			t.Errorf("calls: got %q, want survivors, flush, cut", n)
		}
	})
}

func TestD13_ShortenedAndExtendedDeadlinesSurvive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Active: 1}
		booted := time.Now()
		boot := func() time.Duration { return time.Since(booted) }
		b := run(t, w, func(o *Options) { o.Boot = boot })
		b.begin(Request{Policy: with(func(p *Policy) { p.OnNew = OnNewAdmit })})
		after(5 * time.Second)
		b.begin(Request{Deadline: time.Now().Add(10 * time.Second)})
		want, err := b.Extend(t.Context(), 0, 3*time.Second, time.Time{}, "root")
		if err != nil {
			t.Fatal(err)
		}
		b.end()
		rec := get(w, func(w *world) Record { return w.records[len(w.records)-1] })
		got := resumed(t, w, rec, boot).Status()
		if !got.Deadline.Equal(want.Deadline) || !got.FlushBy.Equal(want.FlushBy) || !got.CutAt.Equal(want.CutAt) {
			t.Errorf("got %v, %v, %v, want %v, %v, %v", got.FlushBy, got.CutAt, got.Deadline, want.FlushBy, want.CutAt, want.Deadline)
		}
	})
}

func TestResumeRefusesWhatDoesNotFit(t *testing.T) {
	good := Record{Version: 1, Type: recordBegin, Drain: "d-1", Gen: 7, BegunBoot: int64(time.Hour), DeadlineBoot: int64(time.Hour + 25*time.Second), Policy: budget}
	for _, tt := range []struct {
		name   string
		change func(*Record)
		want   string
	}{
		{"generation", func(r *Record) { r.Gen = 6 }, "generation 6"},
		{"layout", func(r *Record) { r.Version = 2 }, "layout is 2"},
		{"over", func(r *Record) { r.Type = recordEnd }, "is over"},
		{"taken back", func(r *Record) { r.Type = recordUndrain }, "is over"},
		{"earlier boot", func(r *Record) { r.BegunBoot = int64(3 * time.Hour) }, "earlier boot"},
		{"nameless", func(r *Record) { r.Drain = "" }, "no drain id"},
		{"policy", func(r *Record) { r.Policy.Reserve = time.Hour }, "reserve 1h0m0s"},
	} {
		r := good
		tt.change(&r)
		_, err := New(Options{Backend: "web", Gen: 7, World: newWorld(), Resume: &r, Boot: func() time.Duration { return 2 * time.Hour }})
		if !errors.Is(err, ErrRecord) || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got %v, want ErrRecord with %q", tt.name, err, tt.want)
		}
	}
	if _, err := New(Options{Backend: "web", Gen: 7, World: newWorld(), Resume: &good, Boot: func() time.Duration { return 2 * time.Hour }}); err != nil {
		t.Errorf("good: got %v, want nil", err)
	}
	if _, err := New(Options{Backend: "web"}); err == nil {
		t.Error("no world: got nil, want an error")
	}
	if _, err := New(Options{Backend: "web", World: newWorld(), Mode: "maybe"}); err == nil {
		t.Error("mode maybe: got nil, want an error")
	}
}

// A record without the moments of its slices still has its policy: they are worked out from that.
func TestD13_RecordWithoutSlices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Active: 1}
		rec, boot, first := interrupted(t, w, budget, 4*time.Second, time.Second)
		rec.FlushBoot, rec.CutBoot = 0, 0
		st := resumed(t, w, rec, boot).Status()
		if !st.FlushBy.Equal(first.FlushBy) || !st.CutAt.Equal(first.CutAt) {
			t.Errorf("got flush by %v, cut at %v, want %v, %v", st.FlushBy, st.CutAt, first.FlushBy, first.CutAt)
		}
		if got, want := st.Left(), 20*time.Second; got != want {
			t.Errorf("left: got %v, want %v", got, want)
		}
	})
}

func TestD13_UnguardedFlushIsResumedUnguarded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.counts = Counts{Known: true, Active: 1}
		w.flushed = make(chan struct{})
		rec, boot, _ := interrupted(t, w, budget, 18*time.Second, time.Second)
		rec.FlushReason = "" // the type alone says that it was sent
		b := run(t, w, func(o *Options) { o.Resume, o.Boot, o.Unguarded = &rec, boot, true })
		st := b.outcome(OutcomeExpired)
		if st.FlushReason != FlushDeadline || !st.Unguarded || w.count("flush") != 1 || w.count("cut") != 1 {
			t.Errorf("got reason %s, unguarded %v, calls %q, want one flush by deadline and the cut", st.FlushReason, st.Unguarded, w.names())
		}
		if st.Left() != 0 {
			t.Errorf("left after the end: got %v, want 0", st.Left())
		}
	})
}

// A generation whose drain is over stays over in the next process: it is not ready, and a Begin has nothing to do.
func TestR12_AnEndedGenerationStaysEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		booted := time.Now().Add(-time.Hour)
		boot := func() time.Duration { return time.Since(booted) }
		b := run(t, w, func(o *Options) { o.Boot = boot })
		first := b.begin(Request{Cause: CauseOperator, Policy: budget, By: "root"})
		b.outcome(OutcomeDrained)
		b.end()
		rec := get(w, func(w *world) Record { return w.records[len(w.records)-1] })
		w = newWorld()
		b = run(t, w, func(o *Options) { o.Over, o.Boot = &rec, boot })
		synctest.Wait()
		<-b.Done()
		st := b.begin(Request{Cause: CauseApp, Policy: budget})
		if st.ID != first.ID || st.State != StateDone || st.Outcome != OutcomeDrained || st.By != "root" {
			t.Errorf("got %s by %s, %s, %s, want the drain that is over", st.ID, st.By, st.State, st.Outcome)
		}
		if get(w, func(w *world) bool { return w.ready }) {
			t.Error("it is ready")
		}
		if n := len(get(w, func(w *world) []Record { return w.records })); n != 0 {
			t.Errorf("%d records were written for nothing", n)
		}
		rec.Gen++
		if _, err := New(Options{Backend: "web", Gen: rec.Gen - 1, World: w, Over: &rec}); !errors.Is(err, ErrRecord) {
			t.Errorf("another generation's end: got %v, want ErrRecord", err)
		}
	})
}

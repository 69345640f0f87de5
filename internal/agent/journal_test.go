// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"golang.org/x/sys/unix"
)

func record(typ, id string, at time.Time) drain.Record {
	return drain.Record{Version: 1, Type: typ, Drain: id, Backend: "web", Gen: 7, Cause: drain.CauseSignal, Begun: at, Deadline: at.Add(time.Minute)}
}

func TestJournalTellsWhatWasGoingOn(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_700_000_000, 0)
	start := run{Version: 1, Type: "run", Name: "web", Gen: 7, PID: 42, Start: 99}
	for _, tc := range []struct {
		name    string
		records []any
		drain   string
		flushed bool
	}{
		{"a run alone", []any{start}, "", false},
		{"a drain that runs", []any{start, record("begin", "d1", now)}, "d1", false},
		{"a deadline that moved", []any{start, record("begin", "d1", now), record("shorten", "d1", now.Add(-time.Second))}, "d1", false},
		{"a flush that was sent", []any{start, record("begin", "d1", now), record("flush", "d1", now)}, "d1", true},
		{"a drain that ended", []any{start, record("begin", "d1", now), record("end", "d1", now)}, "", false},
		{"a drain taken back and another", []any{start, record("begin", "d1", now), record("undrain", "d1", now), record("begin", "d2", now)}, "d2", false},
		{"a new run", []any{start, record("begin", "d1", now), run{Version: 1, Type: "run", Name: "web", Gen: 8, PID: 43}}, "", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "web.journal")
			j, _, err := openJournal(path)
			if err != nil {
				t.Fatal(err)
			}
			for _, r := range tc.records {
				if err := j.append(r); err != nil {
					t.Fatal(err)
				}
			}
			if err := j.close(); err != nil {
				t.Fatal(err)
			}
			j, h, err := openJournal(path)
			if err != nil {
				t.Fatal(err)
			}
			defer j.close()
			got := ""
			if h.openDrain != nil {
				got = h.openDrain.Drain
			}
			if got != tc.drain || h.flushed != tc.flushed || h.lastRun == nil {
				t.Errorf("got drain %q flushed %v run %v, want %q %v and a run", got, h.flushed, h.lastRun, tc.drain, tc.flushed)
			}
		})
	}
}

// A crash can stop a write at any byte: what was whole before must be read, and the next record must be readable.
func TestD13_JournalSurvivesATornWrite(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "web.journal")
	j, _, err := openJournal(path)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Unix(1_700_000_000, 0)
	for _, r := range []any{run{Version: 1, Type: "run", Gen: 7}, record("begin", "d1", now)} {
		if err := j.append(r); err != nil {
			t.Fatal(err)
		}
	}
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := j.append(record("end", "d1", now)); err != nil {
		t.Fatal(err)
	}
	if err := j.close(); err != nil {
		t.Fatal(err)
	}
	full, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for cut := len(whole); cut < len(full); cut++ {
		if err := os.WriteFile(path, full[:cut], 0o600); err != nil {
			t.Fatal(err)
		}
		j, h, err := openJournal(path)
		if err != nil {
			t.Fatalf("cut at %d: %v", cut, err)
		}
		if h.openDrain == nil || h.openDrain.Drain != "d1" || h.torn != (cut > len(whole)) {
			t.Fatalf("cut at %d: got %+v, want the drain still open", cut, h)
		}
		if err := j.append(record("begin", "d2", now)); err != nil {
			t.Fatal(err)
		}
		if err := j.close(); err != nil {
			t.Fatal(err)
		}
		j, h, err = openJournal(path)
		if err != nil || h.openDrain.Drain != "d2" || h.torn {
			t.Fatalf("after cut at %d: got %+v, %v; want d2", cut, h, err)
		}
		if err := j.close(); err != nil {
			t.Fatal(err)
		}
	}
}

// noSync is a file on a disk that tells only at the sync that it is full, or broken.
type noSync struct{ *os.File }

func (noSync) Sync() error { return unix.ENOSPC }

// Whoever is told that the begin of a drain is not in the journal refuses the drain: it must not be resumed later.
func TestD13_WhatCannotBeSyncedIsNotInTheJournal(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "web.journal")
	j, _, err := openJournal(path)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Unix(1_700_000_000, 0)
	if err := j.append(run{Version: 1, Type: "run", Gen: 7}); err != nil {
		t.Fatal(err)
	}
	good := j.f
	j.f = noSync{good.(*os.File)}
	if err := j.append(record("begin", "d1", now)); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("append to a full disk: got %v, want ENOSPC", err)
	}
	if h := reread(t, path); h.lastRun == nil || h.openDrain != nil {
		t.Errorf("after a begin that was refused: got run %v, drain %v; want the run alone", h.lastRun, h.openDrain)
	}
	j.f = good
	if err := j.append(record("begin", "d2", now)); err != nil {
		t.Fatal(err)
	}
	if h := reread(t, path); h.openDrain == nil || h.openDrain.Drain != "d2" || h.torn {
		t.Errorf("after the next begin: got %+v, want d2", h.openDrain)
	}
	if err := j.close(); err != nil {
		t.Fatal(err)
	}
}

// reread is what a process that starts now would find.
func reread(t *testing.T, path string) history {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	h, _, err := readJournal(f)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// A process may be drained and taken back any number of times: its journal stays short, and says at each moment what one that
// was never rewritten would.
func TestJournalOfAProcessThatLivesOnStaysShort(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "web.journal")
	j, _, err := openJournal(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := j.close(); err != nil {
			t.Error(err)
		}
	}()
	add := func(r any) {
		t.Helper()
		if err := j.append(r); err != nil {
			t.Fatal(err)
		}
	}
	now := time.Unix(1_700_000_000, 0)
	if err := j.restart(run{Version: 1, Type: "run", Name: "web", Gen: 7, PID: 42, Start: 99}); err != nil {
		t.Fatal(err)
	}
	add(lateRecord{Version: 1, Type: "late", How: drain.OnNewRelay, Listener: 5})
	rewritten := 0
	var size int64
	for i := range 400 {
		id := fmt.Sprint("d", i)
		begin := record("begin", id, now)
		begin.Reason = strings.Repeat("r", 200)
		add(begin)
		if h := reread(t, path); h.openDrain == nil || h.openDrain.Drain != id || h.openDrain.Reason != begin.Reason {
			t.Fatalf("drain %s runs: got %+v", id, h.openDrain)
		}
		add(record("undrain", id, now))
		h := reread(t, path)
		if h.openDrain != nil || h.lastGen != 7 || h.lastRun == nil || h.lastRun.PID != 42 || h.late == nil || h.late.Listener != 5 {
			t.Fatalf("drain %s was taken back: got drain %v, generation %d, run %v, late %v", id, h.openDrain, h.lastGen, h.lastRun, h.late)
		}
		st, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if st.Size() > compactAt {
			t.Fatalf("after drain %s: got a journal of %d bytes, want at most %d", id, st.Size(), compactAt)
		}
		if st.Size() < size {
			rewritten++
		}
		size = st.Size()
	}
	if rewritten == 0 {
		t.Error("it was never rewritten: the test is too short")
	}
	if _, err := os.Stat(path + ".new"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("what it was written to: got %v, want it gone", err)
	}
}

func TestJournalRefusesWhatNoCrashExplains(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "web.journal")
	j, _, err := openJournal(path)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := j.append(run{Version: 1, Type: "run", Gen: 7}); err != nil {
			t.Fatal(err)
		}
	}
	if err := j.close(); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	b[12] ^= 1
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := openJournal(path); !errors.Is(err, ErrJournal) {
		t.Errorf("a flipped bit in the first of two records: got %v, want ErrJournal", err)
	}
	if after, err := os.ReadFile(path); err != nil || string(after) != string(b) {
		t.Errorf("the damaged journal was changed")
	}

	newer := filepath.Join(t.TempDir(), "web.journal")
	j, _, err = openJournal(newer)
	if err != nil {
		t.Fatal(err)
	}
	if err := j.append(run{Version: journalVersion + 1, Type: "run"}); err != nil {
		t.Fatal(err)
	}
	if err := j.close(); err != nil {
		t.Fatal(err)
	}
	if _, _, err := openJournal(newer); !errors.Is(err, ErrJournal) {
		t.Errorf("a newer layout: got %v, want ErrJournal", err)
	}
}

func FuzzReadJournal(f *testing.F) {
	f.Add([]byte("00000000 {}\n"))
	f.Add([]byte("a3f0 {\"version\":1,\"type\":\"run\"}\nxx"))
	f.Fuzz(func(t *testing.T, b []byte) {
		path := filepath.Join(t.TempDir(), "j")
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		j, _, err := openJournal(path)
		if err != nil {
			return
		}
		if err := j.append(run{Version: 1, Type: "run", Gen: 3}); err != nil {
			t.Fatal(err)
		}
		if err := j.close(); err != nil {
			t.Fatal(err)
		}
		j, h, err := openJournal(path)
		if err != nil || h.lastRun == nil || h.lastRun.Gen != 3 {
			t.Fatalf("after append: got %+v, %v; want the run", h, err)
		}
		if err := j.close(); err != nil {
			t.Fatal(err)
		}
	})
}

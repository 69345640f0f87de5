// SPDX-License-Identifier: Apache-2.0

package session

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
)

// filled makes a book with something of everything in its file.
func filled(t *testing.T, opt Options) (id string) {
	t.Helper()
	b := open(t, opt)
	n := int64(3)
	id = enter(t, b, 10, api.SessionRequest{Version: 4, Bound: true, Remaining: &n})
	call(t, b, id, api.SessionCall{Op: "hold", Name: "job"})
	begin(t, b, "d1", 30*time.Second)
	return id
}

func TestFileBringsEverythingBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o owner
		opt := o.options()
		opt.File = filepath.Join(t.TempDir(), "web-blue")
		id := filled(t, opt)
		// What a death in the middle of a write leaves is in nobody's way.
		if err := os.WriteFile(beside(opt.File, "new"), []byte(`{"layout":1,"sess`), 0o600); err != nil {
			t.Fatal(err)
		}
		b := open(t, opt)
		s := call(t, b, id, api.SessionCall{Op: "get"})
		if s.Version != 4 || s.PID != 10 || len(s.Holds) != 1 || s.Holds[0].Name != "job" || s.Seq != 1 || s.Acked != 0 || *s.Remaining != 3 || s.Drain.ID != "d1" {
			t.Errorf("got %+v", s)
		}
		if n, _ := b.Holds(); n != 1 {
			t.Errorf("got %d holds", n)
		}
		want(t, types(t, b, id, 0), api.SessionDraining)
		call(t, b, id, api.SessionCall{Op: "ack", Seq: 1})
		call(t, b, id, api.SessionCall{Op: "release", Name: "job"})
		b = open(t, opt)
		want(t, types(t, b, id, 0))
		if n, _ := b.Holds(); n != 0 {
			t.Errorf("got %d holds after the release", n)
		}
		st, err := os.Stat(opt.File)
		if err != nil || st.Mode() != 0o600 {
			t.Errorf("got %v, %v", st, err)
		}
	})
}

func TestFileOfAnotherGenerationBootOrProcess(t *testing.T) {
	for name, change := range map[string]func(*Options){
		"generation": func(o *Options) { o.Gen++ },
		"boot":       func(o *Options) { o.boot = "another" },
		"process":    func(o *Options) { o.Started = func(int) (uint64, error) { return 2000, nil } },
	} {
		synctest.Test(t, func(t *testing.T) {
			var o owner
			opt := o.options()
			opt.File = filepath.Join(t.TempDir(), "web-blue")
			opt.Started = func(int) (uint64, error) { return 1000, nil }
			id := filled(t, opt)
			change(&opt)
			b := open(t, opt)
			refused(t, b, id, api.SessionCall{Op: "get"}, api.ErrUnknownSession)
			if n, _ := b.Holds(); n != 0 || len(o.warned) != 0 {
				t.Errorf("another %s: got %d holds, %q", name, n, o.warned)
			}
		})
	}
}

// What was held is not known, and that never reads as nothing.
func TestFileThatCannotBeReadHoldsTheFlush(t *testing.T) {
	for name, spoil := range map[string]func(string) error{
		"torn": func(f string) error {
			data, err := os.ReadFile(f)
			return errors.Join(err, os.WriteFile(f, data[:len(data)/2], 0o600))
		},
		"empty": func(f string) error { return os.WriteFile(f, nil, 0o600) },
		"layout": func(f string) error {
			return os.WriteFile(f, []byte(`{"layout":2,"gen":7,"boot_id":"this-boot"}`), 0o600)
		},
		"twice": func(f string) error {
			return os.WriteFile(f, []byte(`{"layout":1,"sessions":[{"session":"a","role":"app"},{"session":"a","role":"app"}]}`), 0o600)
		},
		"directory": func(f string) error { return errors.Join(os.Remove(f), os.Mkdir(f, 0o700)) },
	} {
		synctest.Test(t, func(t *testing.T) {
			var o owner
			opt := o.options()
			opt.File = filepath.Join(t.TempDir(), "web-blue")
			id := filled(t, opt)
			if err := spoil(opt.File); err != nil {
				t.Fatal(err)
			}
			b := open(t, opt)
			if n, names := b.Holds(); n != 1 || len(names) != 1 {
				t.Errorf("%s: got %d holds, %q", name, n, names)
			}
			refused(t, b, id, api.SessionCall{Op: "get"}, api.ErrUnknownSession)
			stop := run(t, b)
			time.Sleep(8 * time.Second)
			stop()
			if len(o.warned) != 1 {
				t.Errorf("%s: got warnings %q, want one", name, o.warned)
			}
			if _, err := os.Stat(beside(opt.File, "bad")); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			b = open(t, opt) // again
			if n, _ := b.Holds(); n != 1 {
				t.Errorf("%s, after another restart: got %d holds", name, n)
			}
			run(t, b)
			time.Sleep(15*time.Second - time.Millisecond)
			if n, _ := b.Holds(); n != 1 {
				t.Errorf("%s: got %d holds before the time is over", name, n)
			}
			o.changes()
			time.Sleep(time.Second)
			synctest.Wait()
			if n, _ := b.Holds(); n != 0 || o.changes() == 0 {
				t.Errorf("%s: got %d holds, or the owner was not told", name, n)
			}
		})
	}
}

// What cannot be kept is not promised; what is told is told, and kept when that is possible again.
func TestFileThatCannotBeWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o owner
		opt := o.options()
		dir := filepath.Join(t.TempDir(), "sessions")
		opt.File = filepath.Join(dir, "web-blue")
		b := open(t, opt)
		run(t, b)
		if _, err := b.Open(t.Context(), api.Process{PID: 10}, api.SessionRequest{}); !errors.Is(err, os.ErrNotExist) || b.Apps() != 0 {
			t.Errorf("got %v and %d applications", err, b.Apps())
		}
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		id := enter(t, b, 10, api.SessionRequest{})
		if err := os.Rename(dir, dir+"2"); err != nil {
			t.Fatal(err)
		}
		refused(t, b, id, api.SessionCall{Op: "hold", Name: "job"}, os.ErrNotExist)
		if n, _ := b.Holds(); n != 0 {
			t.Errorf("got %d holds that were refused", n)
		}
		s := begin(t, b, "d1", 30*time.Second)
		want(t, types(t, b, id, 0), api.SessionDraining)
		if len(o.warned) != 2 {
			t.Errorf("got warnings %q, want one for each outage", o.warned)
		}
		if err := os.Rename(dir+"2", dir); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		b = open(t, opt)
		b.Follow(s)
		want(t, types(t, b, id, 0), api.SessionDraining)
	})
}

// A drain of before a restart that the journal does not know was taken back; a machine that has yet to resume it does
// not know it either, for a moment.
func TestDrainThatNobodyKnowsAfterARestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o owner
		opt := o.options()
		opt.File = filepath.Join(t.TempDir(), "web-blue")
		id := filled(t, opt)
		idle := drain.Status{Gen: gen, Mode: drain.ModeEnforce, State: drain.StateServing}
		b := open(t, opt)
		b.Follow(idle)
		run(t, b)
		time.Sleep(9 * time.Second)
		synctest.Wait()
		want(t, types(t, b, id, 0), api.SessionDraining)
		time.Sleep(3 * time.Second)
		synctest.Wait()
		want(t, types(t, b, id, 0), api.SessionDraining, api.SessionCancelled)
		// A status may be older than the notice, and another machine may take the process over.
		s := draining("d2", 30*time.Second)
		notify(t, b, s)
		b.Follow(idle)
		time.Sleep(3 * time.Second)
		b.Follow(s)
		time.Sleep(8 * time.Second)
		b.Follow(idle)
		time.Sleep(3 * time.Second)
		b.Follow(s)
		synctest.Wait()
		want(t, types(t, b, id, 2), api.SessionCancelled, api.SessionDraining)
	})
}

// FuzzDecode: nothing in a file makes a book fall over, and what is read is what is written.
func FuzzDecode(f *testing.F) {
	f.Add([]byte(`{"layout":1,"gen":7,"boot_id":"this-boot","told":{"drain":"d","flush":{"reason":"zero"}},"sessions":[{"session":"a","role":"app","pid":1,"seq":2,"holds":[{"id":"x","name":"x"}],"events":[{"seq":1,"type":"draining","drain":"d"},{"seq":2,"type":"flush"}]}]}`))
	f.Add([]byte(`{"layout":1,"gen":7,"boot_id":"this-boot","over":true,"met":{"drain":"d","held":[{"name":"x","for":"1s"}]},"sessions":[{"session":"a","role":"holder","seq":1,"events":[{"seq":1,"type":"draining"}]}]}`))
	f.Add([]byte(`{"layout":2}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		st, err := decode(data)
		if err != nil {
			if !errors.Is(err, errFile) {
				t.Errorf("got %v, which is no errFile", err)
			}
			return
		}
		again, err := json.Marshal(st)
		if err != nil {
			t.Skip(err) // a year that JSON cannot say
		}
		st2, err := decode(again)
		if err != nil {
			t.Fatalf("%s: %v", again, err)
		}
		third, err := json.Marshal(st2)
		if err != nil || string(third) != string(again) {
			t.Errorf("got %s, %v, want %s", third, err, again)
		}
		st.Gen, st.Boot = gen, "this-boot"
		data, _ = json.Marshal(st)
		var o owner
		opt := o.options()
		opt.File = filepath.Join(t.TempDir(), "web-blue")
		if err := os.WriteFile(opt.File, data, 0o600); err != nil {
			t.Fatal(err)
		}
		b := open(t, opt)
		if len(b.Sessions) != len(st.Sessions) || !reflect.DeepEqual(b.Told, st2.Told) {
			t.Errorf("got %+v, want %+v", b.state, st2)
		}
		for _, v := range b.Views() {
			if _, err := b.Events(t.Context(), v.ID, api.Process{}, 0, 1); err != nil {
				t.Error(err)
			}
			call(t, b, v.ID, api.SessionCall{Op: "ack", Seq: v.Seq})
		}
		notify(t, b, draining("d2", time.Hour))
		if err := b.Flush(drain.FlushRequest{Drain: "d2", Gen: gen, Reason: drain.FlushDeadline}); err != nil {
			t.Error(err)
		}
		b.Follow(over(draining("d2", time.Hour), drain.OutcomeDrained))
		b.Holds()
		b.HeldDuring("d2")
	})
}

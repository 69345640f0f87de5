// SPDX-License-Identifier: Apache-2.0

package session

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
)

// kept is what the file says.
func kept(t *testing.T, file string) state {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	st, err := decode(data)
	if err != nil {
		t.Fatal(err)
	}
	return st
}

// What is written before it is answered is written at a bounded rate; what gives back is never refused.
func TestWritesThatAreWaitedForAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o owner
		opt := o.options()
		opt.Extension = time.Second
		b := open(t, opt)
		id := enter(t, b, 10, api.SessionRequest{})
		for i := range burstWrites - 1 {
			call(t, b, id, api.SessionCall{Op: "hold", Name: fmt.Sprint(i)})
			call(t, b, id, api.SessionCall{Op: "hold", Name: fmt.Sprint(i)}) // the same again is nothing to write
			call(t, b, id, api.SessionCall{Op: "release", Name: fmt.Sprint(i)})
		}
		begin(t, b, "d1", 30*time.Second)
		refuse := func() {
			t.Helper()
			refused(t, b, id, api.SessionCall{Op: "hold", Name: "more"}, api.ErrTooFast)
			refused(t, b, id, api.SessionCall{Op: "extend", ByMS: 1}, api.ErrTooFast)
			if _, err := b.Open(t.Context(), api.Process{PID: 10}, api.SessionRequest{}); err == nil {
				t.Error("a registration above the rate was taken")
			}
		}
		refuse()
		for range 3 {
			time.Sleep(everyWrite)
			call(t, b, id, api.SessionCall{Op: "hold", Name: "job"})
			refuse()
			call(t, b, id, api.SessionCall{Op: "release", Name: "job"})
		}
		time.Sleep(time.Hour)
		for i := range maxHolds {
			call(t, b, id, api.SessionCall{Op: "hold", Name: fmt.Sprint(i)})
		}
	})
}

func TestAcknowledgementsAreWrittenTogether(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		var o owner
		opt := o.options()
		opt.File = filepath.Join(dir, "web-blue")
		b := open(t, opt)
		run(t, b)
		id := enter(t, b, 10, api.SessionRequest{})
		for i := range 20 {
			begin(t, b, fmt.Sprint("d", i), 30*time.Second)
		}
		acked := func() uint64 { return kept(t, opt.File).Sessions[0].Acked }
		for i := range 10 {
			call(t, b, id, api.SessionCall{Op: "ack", Seq: uint64(i + 1)})
			synctest.Wait()
			if n := acked(); n != 0 {
				t.Fatalf("%d is in the file at once", n)
			}
		}
		time.Sleep(lazily + time.Millisecond)
		synctest.Wait()
		if n := acked(); n != 10 {
			t.Errorf("got %d in the file, want 10", n)
		}
		call(t, b, id, api.SessionCall{Op: "ack", Seq: 12})
		b.Close(api.EndRestarting)
		if n := acked(); n != 12 {
			t.Errorf("got %d in the file of an owner that stops, want 12", n)
		}
	})
}

func TestFileIsNoLongerThanItMustBe(t *testing.T) {
	var o owner
	opt := o.options()
	opt.File = filepath.Join(t.TempDir(), "web-blue")
	b := open(t, opt)
	id := enter(t, b, 10, api.SessionRequest{})
	for i := range maxHolds {
		name := fmt.Sprintf("%03d%s", i, strings.Repeat("<", maxName-3))
		call(t, b, id, api.SessionCall{Op: "hold", ID: name, Name: name})
	}
	if fi, err := os.Stat(opt.File); err != nil || fi.Size() > 128<<10 {
		t.Errorf("got a file of %d bytes, %v", fi.Size(), err)
	}
	if n := len(kept(t, opt.File).Sessions[0].Holds); n != maxHolds {
		t.Errorf("got %d leases in it", n)
	}
}

// One application does not fill the log that all share, and what a stream waits for is in it all the same.
func TestEventsForTheLogAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o owner
		opt := o.options()
		emit, told := opt.Emit, 0
		opt.Emit = func(e drain.Event) {
			if n, ok := e.Fields["n"].(int); ok {
				told += n
			}
			emit(e)
		}
		b := open(t, opt)
		run(t, b)
		listens := enter(t, b, 10, api.SessionRequest{})
		if _, err := b.Events(t.Context(), listens, api.Process{}, 0, 1); err != nil {
			t.Fatal(err)
		}
		const n = 1000
		for i := range n {
			call(t, b, enter(t, b, 10, api.SessionRequest{}), api.SessionCall{Op: "end"})
			if _, err := b.Events(t.Context(), listens, api.Process{}, 0, uint64(i+2)); err != nil {
				t.Fatal(err)
			}
			time.Sleep(everyWrite)
		}
		most := burstEvents + int(n*everyWrite/everyEvent) + 1
		o.mu.Lock()
		seen := len(o.what)
		o.mu.Unlock()
		if seen > most {
			t.Errorf("got %d events for the log, want at most %d", seen, most)
		}
		begin(t, b, "d1", 30*time.Second)
		tellFlush(t, b, "d1")
		o.mu.Lock()
		want(t, o.what[seen:], api.SessionDraining, api.SessionFlush)
		o.mu.Unlock()
		call(t, b, listens, api.SessionCall{Op: "heartbeat"})
		time.Sleep(everyEvent + time.Second)
		synctest.Wait()
		if all := 1 + 3*n; len(o.what)-2+told < all {
			t.Errorf("got %d events and were told of %d more, want %d", len(o.what)-2, told, all)
		}
	})
}

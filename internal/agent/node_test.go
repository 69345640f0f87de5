// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ebbproxy/ebb/internal/config"
	"github.com/ebbproxy/ebb/internal/lease"
)

// What the agent waits for in one step costs it nothing, but one that is stuck loses the host.
func TestLeaseFollowsTheLoop(t *testing.T) {
	path := filepath.Join(t.TempDir(), "owner")
	synctest.Test(t, func(t *testing.T) {
		l, err := lease.Acquire(t.Context(), path, lease.Options{})
		if err != nil {
			t.Fatal(err)
		}
		renewed := func(d time.Duration) bool {
			t.Helper()
			before, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(d)
			synctest.Wait()
			after, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			return !bytes.Equal(before, after)
		}
		n := &node{log: slog.New(slog.DiscardHandler)}
		n.lease.Store(l)
		n.goesOn()
		ctx, cancel := context.WithCancelCause(t.Context())
		defer cancel(nil)
		go n.keep(ctx, cancel)
		for range 30 {
			if !renewed(lease.RenewEvery) {
				t.Fatal("not renewed during a step that takes its time")
			}
		}
		time.Sleep(stuckAfter)
		synctest.Wait()
		if renewed(10 * lease.RenewEvery) {
			t.Error("renewed although the agent is stuck")
		}
		n.goesOn()
		if !renewed(lease.RenewEvery) {
			t.Error("not renewed after it went on")
		}
		if err := l.Release(); err != nil {
			t.Fatal(err)
		}
		n.goesOn()
		time.Sleep(lease.RenewEvery)
		synctest.Wait()
		if err := context.Cause(ctx); !errors.Is(err, lease.ErrLost) {
			t.Errorf("got %v once the lease is lost, want ErrLost", err)
		}
	})
}

// What is read at the start alone is refused also while another agent owns the host: the lease that is waited for is in it.
func TestStandbyKeepsItsStateDir(t *testing.T) {
	parse := func(dir string) *config.Config {
		t.Helper()
		c, err := config.Parse("agent.yaml", []byte("state:\n  dir: "+dir+"\n"))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	was := parse("/var/lib/one")
	n := &node{log: slog.New(slog.DiscardHandler), cfg: was}
	n.o.Reload = func() (*config.Config, error) { return parse("/var/lib/two"), nil }
	if n.reload(); n.conf() != was {
		t.Errorf("got state.dir %s, want it refused", n.conf().State.Dir)
	}
	same := parse("/var/lib/one")
	n.o.Reload = func() (*config.Config, error) { return same, nil }
	if n.reload(); n.conf() != same {
		t.Error("a configuration that can be put in force was refused")
	}
}

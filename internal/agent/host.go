// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/bpf"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/lease"
	"github.com/ebbproxy/ebb/internal/relay"
	"github.com/ebbproxy/ebb/probes"
)

// HostOptions names what Ebb keeps on a host.
type HostOptions struct {
	BPFFS    string // bpffs directory; "" for the default
	RunDir   string // sockets, journals and locks
	StateDir string // of the agent; "" if none is known
}

// OpenAll is the kill switch: with open every admission of the host is open, whoever drains. It needs neither an
// owner nor a journal. had tells whether there was anything to open.
func OpenAll(o HostOptions, open bool) (had bool, err error) {
	return bpf.SetControl(bpf.Options{Dir: o.BPFFS}, !open)
}

// Cleanup removes all that Ebb ever pinned, and the sockets, journals and locks of runs and of an agent that have ended. It
// lists what it removed, and the runs and the agent that live: these go on without admission and with unknown counts.
func Cleanup(o HostOptions) (removed, alive []string, err error) {
	removed, err = bpf.Cleanup(bpf.Options{Dir: o.BPFFS})
	dir := filepath.Join(o.RunDir, "run")
	entries, derr := os.ReadDir(dir)
	if derr != nil && !errors.Is(derr, os.ErrNotExist) {
		return removed, nil, errors.Join(err, fmt.Errorf("clean up run directory: %w", derr))
	}
	live := map[string]bool{}
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), ".lock")
		if !ok {
			continue
		}
		// Kept until all is removed, so that a run of that name does not start with files that are about to go.
		lock, dead := lockOfDead(filepath.Join(dir, e.Name()))
		if !dead {
			live[name] = true
			alive = append(alive, name)
			continue
		}
		if pid, ok := orphan(filepath.Join(dir, name+".journal")); ok {
			// Its journal goes like all else, and with it the way for the next run of that name to adopt it.
			alive = append(alive, fmt.Sprintf("%s (process %d, which has no ebb and will not be adopted)", name, pid))
		}
		if lock != nil {
			defer lock.Close()
		}
	}
	gone, owner, aerr := cleanupAgent(o)
	removed, err = append(removed, gone...), errors.Join(err, aerr)
	if owner != "" {
		alive = append(alive, owner)
	}
	for _, e := range entries {
		name := e.Name()
		if base, ok := strings.CutSuffix(name, ".relay"); ok && !live[base] {
			if owner != "" && strings.HasPrefix(base, agentRelay("")) {
				continue
			}
			if rerr := endRelay(o.RunDir, base); rerr != nil {
				err = errors.Join(err, rerr)
				continue
			}
			removed = append(removed, filepath.Join(dir, name))
		}
		base, ok := runFile(name)
		if !ok || live[base] {
			continue
		}
		path := filepath.Join(dir, name)
		if rerr := os.Remove(path); rerr != nil {
			err = errors.Join(err, rerr)
			continue
		}
		removed = append(removed, path)
	}
	swept, serr := relay.Sweep()
	removed, err = append(removed, swept...), errors.Join(err, serr)
	for _, d := range []string{dir, o.RunDir} {
		// Only empty ones go; what is in them is somebody's.
		if rerr := os.Remove(d); rerr == nil {
			removed = append(removed, d)
		}
	}
	return removed, alive, err
}

// runFile is the run that a file in the run directory is of.
func runFile(file string) (run string, ok bool) {
	// A run's socket of applications ends as another's socket of operators would.
	for _, ext := range []string{".lock", ".journal", sessionsExt, api.AppExt, ".sock"} {
		if run, ok = strings.CutSuffix(file, ext); ok {
			return run, true
		}
	}
	return "", false
}

// cleanupAgent removes the state and the sockets of an agent that has ended; owner names one that lives.
func cleanupAgent(o HostOptions) (removed []string, owner string, err error) {
	remove := func(path string) {
		switch rerr := os.Remove(path); {
		case rerr == nil:
			removed = append(removed, path)
		case !errors.Is(rerr, os.ErrNotExist):
			err = errors.Join(err, rerr)
		}
	}
	dirs := []string{"backends", "services", "reports", "sessions", "lease"}
	if at := filepath.Join(o.StateDir, "lease"); o.StateDir != "" {
		held, lerr := lease.Acquire(context.Background(), filepath.Join(at, "owner"), lease.Options{})
		switch {
		case errors.Is(lerr, lease.ErrHeld):
			return nil, "the agent (" + lerr.Error() + ")", nil
		case lerr == nil:
			// Kept until all is removed, so that an agent does not start with what is about to go.
			defer func() { err = errors.Join(err, held.Release()) }()
		case !errors.Is(lerr, os.ErrNotExist):
			return nil, "", lerr
		}
		for _, d := range dirs {
			entries, derr := os.ReadDir(filepath.Join(o.StateDir, d))
			if derr != nil && !errors.Is(derr, os.ErrNotExist) {
				err = errors.Join(err, derr)
			}
			for _, e := range entries {
				remove(filepath.Join(o.StateDir, d, e.Name()))
			}
			remove(filepath.Join(o.StateDir, d))
		}
		if rerr := os.Remove(o.StateDir); rerr == nil { // what else is in it is somebody's
			removed = append(removed, o.StateDir)
		}
	}
	for _, name := range []string{api.AgentSocket, api.AppSocket} {
		path := filepath.Join(o.RunDir, name)
		if c, derr := net.Dial("unix", path); derr == nil {
			c.Close() // an agent with another state directory
			return removed, "an agent that answers on " + path, err
		} else if errors.Is(derr, unix.ECONNREFUSED) {
			remove(path)
		}
	}
	return removed, "", err
}

// orphan is the command of a run whose ebb has died, if it lives.
func orphan(journal string) (pid int, ok bool) {
	f, err := os.Open(journal)
	if err != nil {
		return 0, false
	}
	defer f.Close()
	h, _, err := readJournal(f)
	if err != nil || h.lastRun == nil || h.lastRun.BootID != bootID() || !probes.Alive(h.lastRun.PID, h.lastRun.Start) {
		return 0, false
	}
	return h.lastRun.PID, true
}

// lockOfDead takes the lock of a run that has ended, shared with others who look; false if its owner lives.
func lockOfDead(path string) (lock *os.File, dead bool) {
	f, err := os.Open(path)
	if err != nil {
		return nil, errors.Is(err, os.ErrNotExist)
	}
	if unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB) != nil {
		f.Close()
		return nil, false
	}
	return f, true
}

// endRelay ends a relay that nobody owns as soon as it carries nothing, and removes its socket. The rule that sent
// connections there is gone. It waits for the end of one that carries nothing now.
func endRelay(runDir, name string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second) // it ends after 1 s without arrivals, or 5 s
	defer cancel()
	p, err := relay.Find(ctx, runDir, name)
	if errors.Is(err, relay.ErrNone) {
		return nil // and a socket that nobody answers on was removed
	}
	if err != nil {
		return err
	}
	err = p.Stop(ctx)
	if s, serr := p.Stats(ctx); err == nil && serr == nil && s.Relay.Active == 0 {
		select { // so that its cgroup can be removed
		case <-p.Done():
		case <-ctx.Done():
		}
	}
	if err := errors.Join(err, p.Close()); err != nil {
		return fmt.Errorf("end relay %s: %w", name, err)
	}
	if err := os.Remove(relay.Socket(runDir, name)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

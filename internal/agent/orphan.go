// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/ebbproxy/ebb/bpf"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/config"
	"github.com/ebbproxy/ebb/probes"
)

// orphans removes what an earlier agent of this host has left of backends that are configured no more: it did not live to see
// them go. For services steerServices does.
func (n *node) orphans(cfg *config.Config) error {
	if n.host == nil {
		return nil // what they have in the kernel cannot be removed now, and their names must not be lost
	}
	backends := map[string]bool{}
	for _, sv := range cfg.Services {
		for _, b := range sv.Backends {
			if b.Match != nil {
				backends[b.Name] = true
			}
		}
	}
	var errs []error
	for _, name := range n.recorded("backends", ".journal") {
		if backends[name] {
			continue
		}
		path := filepath.Join(cfg.State.Dir, "backends", name+".journal")
		id := agentBackendID(name)
		var pids []int
		if f, err := os.Open(path); err == nil {
			h, _, err := readJournal(f)
			if r := h.lastRun; err == nil && r != nil {
				id = r.Backend
				if r.BootID == bootID() && probes.Alive(r.PID, r.Start) {
					tree, _ := probes.Tree(r.PID) // one that has ended meanwhile leaves nothing
					for _, p := range tree {
						pids = append(pids, p.PID)
					}
				}
			}
			f.Close()
		}
		if err := n.forget(id, pids...); err != nil {
			errs = append(errs, err)
			continue
		}
		errs = append(errs, os.Remove(path))
		n.wg.Go(func() { // it may take the time that its last arrivals need
			if err := endRelay(n.o.RunDir, agentRelay(name)); err != nil {
				n.log.Warn("end a relay", "backend", name, "err", err)
			}
		})
		errs = append(errs, removeIfThere(filepath.Join(cfg.State.Dir, "reports", name+".json")), removeIfThere(n.sessionsOf(name)))
		n.log.Info("removed what was left of a backend that is configured no more", "backend", name)
	}
	return errors.Join(errs...)
}

// sessionsOf is the file that keeps the sessions of a backend.
func (n *node) sessionsOf(backend string) string {
	return filepath.Join(n.o.Config.State.Dir, "sessions", backend)
}

func removeIfThere(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// remember keeps the ended drains of a backend in a file, whole or not at all. Losing it costs a report, and no drain.
func (n *node) remember(backend string, ds []api.Drain) {
	path := filepath.Join(n.conf().State.Dir, "reports", backend+".json")
	body, err := json.Marshal(ds)
	if err == nil {
		err = os.WriteFile(path+".new", body, 0o600)
	}
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	if err != nil {
		n.log.Warn("keep the report of a drain", "backend", backend, "err", err)
	}
}

// recall are the drains that an earlier agent has remembered.
func (n *node) recall(backend string) (ds []api.Drain) {
	path := filepath.Join(n.conf().State.Dir, "reports", backend+".json")
	body, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = json.Unmarshal(body, &ds)
	}
	if err != nil {
		n.log.Warn("read the reports of earlier drains", "path", path, "err", err)
		return nil
	}
	return ds
}

// recorded are the names of which a file in the state directory tells.
func (n *node) recorded(dir, ext string) (names []string) {
	entries, err := os.ReadDir(filepath.Join(n.o.Config.State.Dir, dir))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		n.log.Warn("look for what is left of an earlier agent", "err", err)
	}
	for _, e := range entries {
		if name, ok := strings.CutSuffix(e.Name(), ext); ok && nameOK.MatchString(name) {
			names = append(names, name)
		}
	}
	return names
}

func (n *node) forget(id uint64, pids ...int) error {
	if n.host == nil {
		return nil
	}
	return n.host.RemoveBackend(id, pids...)
}

// genOf is the generation that the kernel knows a backend by; 0 if it knows none.
func (n *node) genOf(id uint64) uint64 {
	if n.host == nil {
		return 0
	}
	r, _, err := n.host.Backend(id)
	if err != nil {
		n.log.Warn("read a backend's generation", "err", err)
	}
	return r.Gen
}

// release opens the admission of a backend of which no process is left.
func (n *node) release(id uint64) error {
	if n.host == nil {
		return nil
	}
	r, ok, err := n.host.Backend(id)
	if ok && err == nil {
		r.Action, r.Until = bpf.ActionOpen, 0
		err = n.host.SetBackend(id, r)
	}
	return errors.Join(err, n.host.ClearDrain(id))
}

// record says that a service has a rule in the kernel, for an agent that comes after us.
func (n *node) record(service string) error {
	path := filepath.Join(n.o.Config.State.Dir, "services", service)
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		return fmt.Errorf("record service %s: %w", service, err)
	}
	return nil
}

// serviceID names the rule of a service of the agent of this host, until the next boot.
func serviceID(name string) uint64 { return hashID("service", bootID(), name) }

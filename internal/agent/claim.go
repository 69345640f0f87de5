// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"sync"

	"github.com/ebbproxy/ebb/internal/discovery"
)

// claims say which backend has a process: a process is told to end as a whole, so that it is one backend's alone.
type claims struct {
	mu sync.Mutex
	of map[claimed]*seat
}

// claimed is a process.
type claimed struct {
	pid   int
	start uint64
}

// claim gives a workload to a seat, which gives up the one that it had. The error names the backend that has it.
func (n *node) claim(s *seat, w discovery.Workload) error {
	n.claims.mu.Lock()
	defer n.claims.mu.Unlock()
	key := claimed{w.Main, w.Start}
	if other := n.claims.of[key]; other != nil && other != s {
		return fmt.Errorf("process %d is the backend %s already: what serves on several ports is one backend, matched without a port", w.Main, other.name)
	}
	n.claims.drop(s)
	if n.claims.of == nil {
		n.claims.of = map[claimed]*seat{}
	}
	n.claims.of[key] = s
	return nil
}

// unclaim gives up what a seat has claimed.
func (n *node) unclaim(s *seat) {
	n.claims.mu.Lock()
	defer n.claims.mu.Unlock()
	n.claims.drop(s)
}

func (c *claims) drop(s *seat) {
	for key, owner := range c.of {
		if owner == s {
			delete(c.of, key)
		}
	}
}

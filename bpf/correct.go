// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/cilium/ebpf"
)

// corrector is the program that corrects counts. Its order is in a map, so one correction runs at a time.
type corrector struct {
	mu   sync.Mutex
	objs struct {
		Correct    *ebpf.Program `ebpf:"correct"`
		Correction *ebpf.Map     `ebpf:"correction"`
	}
}

func (c *corrector) close() error {
	if c == nil {
		return nil
	}
	return errors.Join(c.objs.Correct.Close(), c.objs.Correction.Close())
}

func (h *Host) loadCorrector() (*corrector, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil, os.ErrClosed
	}
	if h.corrector != nil {
		return h.corrector, nil
	}
	spec, err := loadFiles()
	if err != nil {
		return nil, err
	}
	c := &corrector{}
	if err := spec.LoadAndAssign(&c.objs, &ebpf.CollectionOptions{MapReplacements: h.replacements(spec)}); err != nil {
		return nil, fmt.Errorf("load: %w: %w", ErrNotSupported, err)
	}
	h.corrector = c
	return c, nil
}

// Correct adds to the counts of a listener what an audit found missing, or takes away what it found too much;
// seen is what the audit compared. It does nothing and reports false if a connection has been counted or has
// closed since. Healed grows by one. The caller has seen the same difference twice.
func (h *Host) Correct(seen ListenerCount, open, ending, closing int64) (done bool, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("correct count of listener %d: %w", seen.Cookie, err)
		}
	}()
	if seen.Open+open < 0 || seen.Ending+ending < 0 || seen.Closing+closing < 0 {
		return false, errNegative
	}
	c, err := h.loadCorrector()
	if err != nil {
		return false, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	order := filesCountCorrection{
		Cookie: seen.Cookie, Live: uint64(open) + uint64(ending)<<32, Closing: closing, Total: seen.Total, Closed: seen.Closed,
	}
	if err := c.objs.Correction.Put(uint32(0), &order); err != nil {
		return false, err
	}
	if _, err := walkTasks(c.objs.Correct, os.Getpid()); err != nil {
		return false, err
	}
	if err := c.objs.Correction.Lookup(uint32(0), &order); err != nil {
		return false, err
	}
	return order.Cookie == 0, nil
}

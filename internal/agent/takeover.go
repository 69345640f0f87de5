// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"time"

	"github.com/ebbproxy/ebb/bpf"
)

const (
	// takeOverEvery is how often it is tried again. What it waits for is an accept queue that the application empties.
	takeOverEvery = 100 * time.Millisecond

	// takeOverFor bounds the wait for the rule. Whoever has it meanwhile enforces it.
	takeOverFor = 5 * time.Second
)

// takeOver moves the backend here from an installation of another version. It returns when the rule has moved, since what is
// done to the backend here before that would be undone; its connections may follow later, and the counts are unknown until
// they have.
func (k *kernelDatapath) takeOver(pids func() []int) error {
	if pids == nil {
		return nil
	}
	late := time.NewTimer(takeOverFor)
	defer late.Stop()
	for {
		if k.tryTakeOver(pids) {
			return nil
		}
		_, here, err := k.host.Backend(k.id)
		if err != nil {
			return err
		}
		select {
		case <-late.C:
			k.log.Warn("the rule of another version's installation is not taken over yet", "why", k.elsewhereWhy())
		case <-time.After(takeOverEvery):
			if !here {
				continue
			}
		}
		k.wg.Go(func() {
			for wait(k.ctx, takeOverEvery) && !k.tryTakeOver(pids) {
			}
			if k.ctx.Err() == nil && !here {
				// It came after all, and is older than what was decided here.
				if err := k.setRule(func(*bpf.BackendRule) {}); err != nil {
					k.log.Warn("write the rule again", "err", err)
				}
			}
		})
		return nil
	}
}

// tryTakeOver tells whether nothing of the backend is elsewhere any more.
func (k *kernelDatapath) tryTakeOver(pids func() []int) bool {
	err := k.host.TakeOver(k.id, pids())
	k.mu.Lock()
	defer k.mu.Unlock()
	k.elsewhere = err
	return err == nil
}

func (k *kernelDatapath) elsewhereWhy() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.elsewhere
}

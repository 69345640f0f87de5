// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
)

// upgradeEvery is how often versions are compared although nobody has told of a change: who listens is not heard of where
// nothing is seen in the kernel.
const upgradeEvery = 10 * time.Second

// outdated says that a generation was drained, or that it was told, for a version.
type outdated struct {
	gen     uint64
	version int64
	told    bool // that it would be drained, under observe
}

// upgrade has a ready higher version of a service drain strictly lower ones, until ctx ends. One generation is drained once for
// one version: what an operator takes back stays so until a still higher one comes.
func (n *node) upgrade(ctx context.Context) {
	tick := time.NewTicker(upgradeEvery)
	defer tick.Stop()
	done := map[string]outdated{} // by backend
	for {
		services := map[string][]*seat{}
		n.mu.Lock()
		for _, s := range n.seats {
			if s.life().set.upgrade {
				services[s.service] = append(services[s.service], s)
			}
		}
		n.mu.Unlock()
		for _, seats := range services {
			outdate(ctx, seats, done)
		}
		select {
		case <-n.turns:
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// contender is a backend as an upgrade of its service sees it.
type contender struct {
	version int64 // 0: none, which takes no part
	ready   bool
}

// newest is the ready contender of the highest version; -1: none.
func newest(cs []contender) int {
	at := -1
	for i, c := range cs {
		if c.ready && c.version > 0 && (at < 0 || c.version > cs[at].version) {
			at = i
		}
	}
	return at
}

// outdate drains those of a service's backends that a ready higher version supersedes.
func outdate(ctx context.Context, seats []*seat, done map[string]outdated) {
	lives, cs := make([]*incarnation, len(seats)), make([]contender, len(seats))
	for i, s := range seats {
		inc := s.life()
		lives[i], cs[i] = inc, contender{version: inc.version()}
		cs[i].ready = cs[i].version > 0 && inc.serves(ctx, s.name) == nil
	}
	top := newest(cs)
	if top < 0 {
		return
	}
	for i, s := range seats {
		inc, mark := lives[i], outdated{lives[i].gen, cs[top].version, lives[i].set.mode != drain.ModeEnforce}
		if cs[i].version == 0 || cs[i].version >= mark.version || inc.set.mode == drain.ModeOff || inc.machine.Status().State != drain.StateServing {
			continue
		}
		before, known := done[s.name]
		if known && before.gen == mark.gen && before.version >= mark.version && (mark.told || !before.told) {
			continue
		}
		why := fmt.Sprintf("%s is ready with version %d, and this is %d", seats[top].name, mark.version, cs[i].version)
		switch {
		case !known && s.spared == mark.gen: // taken back under the owner before us
		case mark.told:
			s.emit(drain.Event{Type: drain.EventWould, Gen: inc.gen, Cause: drain.CauseVersionUpgrade, Message: "would drain: " + why})
		default:
			if _, err := s.beginDrain(ctx, drain.CauseVersionUpgrade, api.DrainRequest{Gen: inc.gen, Reason: why, By: "ebb"}); err != nil {
				if ctx.Err() == nil {
					s.log.Warn("drain a lower version", "err", err)
				}
				continue // it is tried again
			}
		}
		done[s.name] = mark
	}
}

// version is the application's; 0 if there is none, or nobody says.
func (i *incarnation) version() int64 {
	if i.b == nil {
		return 0
	}
	if v, ok := i.b.book.Version(); ok {
		return v
	}
	return i.set.version
}

// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"time"

	"github.com/ebbproxy/ebb/drain"
)

const (
	// auditEvery is how often a running drain compares its census with the sockets.
	auditEvery = 30 * time.Second
	// auditPause is the time between two walks. Softirq work that is under way at the first has long ended at the
	// second.
	auditPause = 200 * time.Millisecond
	// auditLooks bounds the walks of one audit: under load counts move while one looks, and then nothing can be said.
	auditLooks = 6
)

// drift is by how much the census of a listener differs from a walk of its sockets, and the totals at that moment: equal
// totals mean that nothing was accepted and nothing has closed between two looks.
type drift struct {
	cookie                uint64
	open, ending, closing int64 // what is to be added to the census
	total, closed         uint64
}

func (d drift) connections() int {
	return int(max(d.open, -d.open) + max(d.ending, -d.ending) + max(d.closing, -d.closing))
}

// audit compares the census with the sockets that carry our tags. A difference that two walks in a row see, with
// unchanged totals, is corrected in the kernel and told. agreed means that the two were seen to be equal, or were made so.
func (b *backend) audit(ctx context.Context) (agreed bool, err error) {
	corrected := 0
	last := map[uint64]drift{}
	for i := range auditLooks {
		if i > 0 && !wait(ctx, auditPause) {
			return false, context.Cause(ctx)
		}
		drifts, still, ok, err := b.dp.compare(ctx)
		if err != nil || !ok {
			return !ok && err == nil, err
		}
		if still && len(drifts) == 0 {
			agreed = true
			break
		}
		now := make(map[uint64]drift, len(drifts))
		for _, d := range drifts {
			if last[d.cookie] != d {
				now[d.cookie] = d
				continue
			}
			done, err := b.dp.correct(d)
			if err != nil {
				return false, err
			}
			if done {
				corrected += d.connections()
			}
		}
		last = now
	}
	b.metrics.CensusAudited(corrected)
	if corrected > 0 {
		b.log.Error("the census differed from the sockets and was corrected", "connections", corrected)
		b.emit(drain.Event{Type: drain.EventWarning, Message: fmt.Sprintf("the census differed from the sockets by %d connections and was corrected", corrected)})
	}
	return agreed, nil
}

// wait pauses; false means that ctx ended first.
func wait(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

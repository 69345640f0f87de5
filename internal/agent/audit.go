// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"time"

	"github.com/ebbproxy/ebb/drain"
)

// auditPause is the time between the two walks that must agree before a mismatch is believed. Softirq work that is under
// way at the first has long ended at the second.
const auditPause = 200 * time.Millisecond

// auditEvery is how often a running drain compares.
const auditEvery = 30 * time.Second

// audit compares the census with a walk of the sockets that carry our tags. Counts move while one looks, so a
// mismatch counts only when two in a row are equal and nothing was accepted or closed in between. It reports whether
// the two agree and, if they do not, by how much the census is off.
func (b *backend) audit(ctx context.Context) (equal bool, off int64, err error) {
	type seen struct {
		off   int64
		total uint64
	}
	look := func() (s seen, ok bool, err error) {
		before, err := b.raw(ctx)
		if err != nil {
			return s, false, err
		}
		open, ending, closing, ok, err := b.dp.audit(ctx)
		if err != nil || !ok {
			return s, ok, err
		}
		after, err := b.raw(ctx)
		if err != nil {
			return s, true, err
		}
		got := open + ending + closing
		lo, hi := order(before.sum(), after.sum())
		if got >= lo && got <= hi {
			return seen{total: after.total}, true, nil
		}
		return seen{off: after.sum() - got, total: after.total}, true, nil
	}
	var last seen
	for i := range 10 {
		s, ok, err := look()
		if err != nil || !ok {
			return !ok && err == nil, 0, err
		}
		if s.off == 0 {
			b.audited(0)
			return true, 0, nil
		}
		if i > 0 && s == last {
			b.audited(s.off)
			return false, s.off, nil
		}
		last = s
		if !wait(ctx, auditPause) {
			return false, 0, ctx.Err()
		}
	}
	// It never held still: under load the two cannot be compared exactly, and nothing says that they differ.
	b.audited(0)
	return true, 0, nil
}

func order(a, b int64) (int64, int64) { return min(a, b), max(a, b) }

// raw is the census of the whole backend, covered or not, which is what a walk by tags sees.
type raw struct {
	n     int64
	total uint64
}

func (r raw) sum() int64 { return r.n }

func (b *backend) raw(ctx context.Context) (raw, error) {
	ls, _, err := b.dp.listeners(ctx)
	if err != nil {
		return raw{}, err
	}
	var r raw
	for _, l := range ls {
		r.n += l.open + l.ending + l.closing
		r.total += l.total
	}
	return r, nil
}

// audited records the result: a census that is off is unknown from then on.
func (b *backend) audited(off int64) {
	b.metrics.CensusAudited(int(off))
	b.mu.Lock()
	was := b.drifted
	b.drifted = off != 0
	b.mu.Unlock()
	if off != 0 && !was {
		b.log.Error("census differs from the socket walk: counts are unknown until they agree", "off", off)
		b.emit(drain.Event{Type: drain.EventWarning, Message: fmt.Sprintf("the census is %+d against a socket walk: counts are unknown until the two agree", off)})
	}
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

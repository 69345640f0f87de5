// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"sync"

	"github.com/ebbproxy/ebb/bpf"
	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/probes"
)

// glance is what one read of the kernel tells of all backends of a host, so that a request for all of them, such as a scrape,
// does not read it for each: the counts are in one map, half-open requests and foreign programs belong to a namespace. It
// belongs to one goroutine but for resting; nil tells nothing.
type glance struct {
	once     sync.Once
	err      error
	counts   map[uint64][]bpf.ListenerCount // by backend
	missed   uint64
	on       bool                      // as bpf.Control tells, and
	gone     error                     // the same
	halfOpen map[uint64]map[uint16]int // by namespace and port
	foreign  map[uint64][]string       // by namespace
}

// hostwide reads what is the same for all backends, once.
func (g *glance) hostwide(k *kernelDatapath) error {
	g.once.Do(func() {
		g.halfOpen, g.foreign = map[uint64]map[uint16]int{}, map[uint64][]string{}
		if g.missed, g.err = k.missed(); g.err == nil {
			g.counts, g.err = k.host.AllCounts()
		}
		g.on, g.gone = bpf.Control(k.opts)
	})
	return g.err
}

// requests counts the half-open requests in a namespace by the port that they are for.
func (g *glance) requests(ctx context.Context, sp *space) (map[uint16]int, error) {
	n, ok := g.halfOpen[sp.id]
	if ok {
		return n, nil
	}
	socks, err := sp.diag.Dump(ctx, probes.Filter{States: states(probes.StateSynRecv)})
	if err != nil {
		return nil, err
	}
	n = map[uint16]int{}
	for _, s := range socks {
		n[s.Local.Port()]++
	}
	g.halfOpen[sp.id] = n
	return n, nil
}

// resting tells that a backend had no connection when g was read, and how many it had accepted by then. ok is false where
// it takes a census to know: also if a listener has come or gone that was not taken in yet.
func (b *backend) resting(g *glance) (accepted uint64, ok bool) {
	k, kernel := b.dp.(*kernelDatapath)
	if g == nil || !kernel || g.hostwide(k) != nil {
		return 0, false
	}
	now := g.counts[k.id]
	b.mu.Lock()
	all, covered, due := b.all, b.covered, b.mustSee
	accepted = b.goneSum
	b.mu.Unlock()
	if due || len(now) != len(all) || !k.trusted(g.missed, k.brokenBy(g.on, g.gone)) {
		return 0, false
	}
	live := make(map[uint64]bool, len(all))
	for _, l := range all {
		live[l.cookie] = l.live
	}
	for _, l := range now {
		was, known := live[l.Cookie]
		if !known || was != l.Listening || l.Open != 0 || l.Ending != 0 || l.Closing != 0 {
			return 0, false
		}
		if _, ok := covered[l.Cookie]; ok {
			accepted += l.Total
		}
	}
	return accepted, true
}

// glance is Look at a backend that has no connection; ok is false where it takes a Look.
func (b *backend) glance(ctx context.Context, g *glance) (c drain.Counts, ok bool) {
	if c.Accepted, c.Known = b.resting(g); !c.Known {
		return c, false
	}
	ports := portsOf(b.coveredMap())
	for _, sp := range b.dp.spaces() {
		n, err := g.requests(ctx, sp)
		if err != nil {
			return c, false
		}
		for _, p := range ports {
			c.Handshake += int64(n[p])
		}
	}
	return c, true
}

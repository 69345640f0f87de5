// SPDX-License-Identifier: Apache-2.0

package probes

import (
	"context"
	"net/netip"
)

// halfOpenKey identifies a half-open request. The addresses alone could be those of a later attempt of the same client.
type halfOpenKey struct {
	local, remote netip.AddrPort
	cookie        uint64
}

// HalfOpen is a set of half-open requests: SYN answered, last ACK not here yet. The kernel does not tell whose listener
// they belong to, so the set of a port covers every listener of that port. Requests under SYN cookies are kept nowhere
// and are not in it.
type HalfOpen struct{ requests map[halfOpenKey]struct{} }

// Len is the number of requests in the set.
func (h *HalfOpen) Len() int { return len(h.requests) }

// HalfOpen lists the half-open requests to the given local ports. It walks each address family once.
func (d *Diag) HalfOpen(ctx context.Context, ports []uint16) (*HalfOpen, error) {
	h := &HalfOpen{requests: map[halfOpenKey]struct{}{}}
	if len(ports) == 0 {
		return h, nil
	}
	socks, err := d.Dump(ctx, Filter{States: 1 << StateSynRecv, LocalPorts: ports})
	if err != nil {
		return nil, err
	}
	for _, s := range socks {
		h.requests[halfOpenKey{s.Local, s.Remote, s.Cookie}] = struct{}{}
	}
	return h, nil
}

// Pending reports what is on its way to listeners of the given ports: queued, the connections in the accept queues of
// those listeners whose cookie is ours, and halfOpen, how many requests of the snapshot still exist; without a snapshot
// (nil) all half-open requests to these ports are counted.
//
// A request that completes moves from half-open to queued, so the half-open ones are listed first: it may be counted
// twice, but never missed.
func (d *Diag) Pending(ctx context.Context, ports []uint16, ours func(cookie uint64) bool, snapshot *HalfOpen) (queued, halfOpen int, err error) {
	if len(ports) == 0 {
		return 0, 0, nil
	}
	if snapshot == nil || snapshot.Len() > 0 {
		now, err := d.HalfOpen(ctx, ports)
		if err != nil {
			return 0, 0, err
		}
		halfOpen = now.Len()
		if snapshot != nil {
			halfOpen = 0
			for k := range snapshot.requests {
				if _, ok := now.requests[k]; ok {
					halfOpen++
				}
			}
		}
	}
	listeners, err := d.Dump(ctx, Filter{States: 1 << StateListen, LocalPorts: ports})
	if err != nil {
		return 0, 0, err
	}
	for _, l := range listeners {
		if ours(l.Cookie) {
			queued += int(l.RQueue)
		}
	}
	return queued, halfOpen, nil
}

// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"

	"github.com/ebbproxy/ebb/bpf"
	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/config"
	"github.com/ebbproxy/ebb/probes"
)

// serviceSeat steers the new connections to a service's addresses over the listeners of its ready backends, in the kernel:
// the addresses are under the rule of a backend that has no listener of its own.
//
//	ready backends ──► their listeners
//	none is ready  ──► those that drain and still admit ──► the relay of one that drains ──► nobody: the ordinary look-up
//
// An address on which a backend, or anybody else, listens itself is left to that one.
type serviceSeat struct {
	n    *node
	name string
	id   uint64
	log  *slog.Logger
	kick chan struct{} // of capacity 1: something may have changed

	mu    sync.Mutex
	addrs []netip.AddrPort
	at    map[bpf.Address][]uint64 // addresses under our rule, and what they are steered to
	said  map[bpf.Address]string   // why one is not
	gone  bool
}

// steerServices makes the services that are steered those of the configuration.
func (n *node) steerServices(cfg *config.Config) error {
	want := map[string]config.Service{}
	for _, sv := range cfg.Services {
		if sv.Mode == drain.ModeEnforce && len(sv.Listen) > 0 && n.host != nil && n.host.HasAdmission() {
			want[sv.Name] = sv
		}
	}
	var errs []error
	for name := range want {
		errs = append(errs, n.record(name))
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for name, v := range n.services {
		if _, ok := want[name]; !ok {
			errs = append(errs, v.end())
			delete(n.services, name)
		}
	}
	for name, sv := range want {
		v := n.services[name]
		if v == nil {
			v = &serviceSeat{
				n: n, name: name, id: serviceID(name), log: n.log.With("service", name), kick: make(chan struct{}, 1),
				at: map[bpf.Address][]uint64{}, said: map[bpf.Address]string{},
			}
			if err := n.host.SetBackend(v.id, bpf.BackendRule{Action: bpf.ActionOpen, Enforce: true, Gen: 1}); err != nil {
				errs = append(errs, err)
				continue
			}
			n.services[name] = v
			n.wg.Go(func() { v.follow(n.ctx) })
		}
		v.mu.Lock()
		v.addrs = sv.Listen
		v.mu.Unlock()
		v.poke()
	}
	return errors.Join(errs...)
}

// changed says that a backend of the service may be ready now, or not any more.
func (n *node) changed(service string) {
	n.mu.Lock()
	v := n.services[service]
	n.mu.Unlock()
	if v != nil {
		v.poke()
	}
}

// flipped has the service leave a backend out whose admission is closed, before whoever asked for that is answered.
func (n *node) flipped(ctx context.Context, service string) error {
	n.mu.Lock()
	v := n.services[service]
	n.mu.Unlock()
	if v == nil {
		return nil
	}
	return v.update(ctx)
}

func (v *serviceSeat) poke() {
	select {
	case v.kick <- struct{}{}:
	default:
	}
}

func (v *serviceSeat) follow(ctx context.Context) {
	for {
		select {
		case <-v.kick:
			if err := v.update(ctx); err != nil && ctx.Err() == nil {
				v.log.Warn("steer the service", "err", err)
			}
		case <-ctx.Done():
			return
		}
	}
}

// end removes the rules. What is not steered any more goes by the ordinary look-up.
func (v *serviceSeat) end() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.gone = true
	return v.n.host.RemoveBackend(v.id)
}

// candidate is a listener that connections to the service can be steered to.
type candidate struct {
	probes.Listener
	netns  uint64
	space  *space
	weight int
	tier   int    // the lowest that there is is used
	cookie uint64 // of a relay's listener, which is a target already; else 0
}

// The tiers of candidates.
const (
	tierReady = iota
	tierAdmits
	tierRelay
)

// candidates are the listeners of the service's backends, by how good they are.
func (v *serviceSeat) candidates(ctx context.Context) (out []candidate) {
	for _, s := range v.n.seatsOf(v.name) {
		inc := s.life()
		if inc.b == nil {
			continue
		}
		tier := tierReady
		if inc.serves(ctx, s.name) != nil {
			tier = tierAdmits
			if inc.b.dp.refusing() || inc.b.late.redirecting() {
				tier = tierRelay
			}
			if !inc.draining() {
				continue // it has ended, or fails its probe
			}
		}
		for _, sp := range inc.b.dp.spaces() {
			c := candidate{netns: sp.id, space: sp, weight: inc.set.weight, tier: tier}
			if tier == tierRelay {
				inc.b.late.mu.Lock()
				c.cookie = inc.b.late.listener
				inc.b.late.mu.Unlock()
				if c.cookie != 0 {
					out = append(out, c)
				}
				continue
			}
			covered := inc.b.coveredMap()
			ls, err := probes.Listeners(sp.diag, inc.proc.descendants())
			if err != nil {
				v.log.Warn("look at a backend's listeners", "backend", s.name, "err", err)
				continue
			}
			for _, l := range ls {
				if _, ok := covered[l.Cookie]; ok && l.Protocol != "mptcp" {
					c.Listener = l
					out = append(out, c)
				}
			}
		}
	}
	return out
}

// update writes where each address is steered to, one write for each that has changed.
func (v *serviceSeat) update(ctx context.Context) error {
	all := v.candidates(ctx)
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.gone {
		return nil
	}
	spaces := map[uint64]*space{}
	for _, c := range all {
		spaces[c.netns] = c.space
	}
	want := map[bpf.Address]bool{}
	var errs []error
	for _, addr := range v.addrs {
		for id, sp := range spaces {
			at := bpf.Address{NetNS: id, AddrPort: addr}
			want[at] = true
			if err := v.steer(ctx, at, sp, all); err != nil {
				errs = append(errs, fmt.Errorf("steer %s: %w", addr, err))
			}
		}
	}
	for at, targets := range v.at {
		switch {
		case want[at]:
		case slices.Contains(v.addrs, at.AddrPort):
			if len(targets) > 0 { // its last backend has gone
				errs = append(errs, v.n.host.SetTargets(at, nil))
				v.at[at] = nil
			}
		default:
			errs = append(errs, v.n.host.Dismiss(at, v.id))
			delete(v.at, at)
		}
	}
	return errors.Join(errs...)
}

// steer writes the targets of one address. The caller holds mu.
func (v *serviceSeat) steer(ctx context.Context, at bpf.Address, sp *space, all []candidate) error {
	if _, ok := v.at[at]; !ok {
		why, err := v.claim(ctx, at, sp)
		if err != nil {
			return err
		}
		if why != v.said[at] {
			v.said[at] = why
			if why != "" {
				v.log.Warn("the service's address is not steered", "address", at.AddrPort.String(), "why", why)
			}
		}
		if why != "" {
			return nil
		}
		v.at[at] = nil
	}
	best := tierRelay
	var here []candidate
	for _, c := range all {
		if c.netns == at.NetNS && (c.cookie != 0 || suits(c.Listener, at.AddrPort, all)) {
			here = append(here, c)
			best = min(best, c.tier)
		}
	}
	var cookies []uint64
	var weights []int
	for _, c := range here {
		if c.tier != best {
			continue
		}
		cookie := c.cookie
		if cookie == 0 {
			cookie = c.Cookie
			if err := v.target(c); err != nil {
				if errors.Is(err, probes.ErrGone) {
					continue
				}
				return err
			}
		}
		if !slices.Contains(cookies, cookie) {
			cookies, weights = append(cookies, cookie), append(weights, c.weight)
		}
	}
	placed := bpf.Place(v.at[at], cookies, weights)
	if slices.Equal(placed, v.at[at]) {
		return nil
	}
	if err := v.n.host.SetTargets(at, placed); err != nil {
		return err
	}
	v.at[at] = placed
	return nil
}

// target makes a backend's listener one that can be steered to.
func (v *serviceSeat) target(c candidate) error {
	h, err := probes.HoldListener(c.Listener)
	if err != nil {
		return err
	}
	// Not kept: the backend's close of its listener must close it.
	_, err = v.n.host.AddTarget(h.FD(), c.netns)
	return errors.Join(err, h.Close())
}

// suits tells whether a listener of a backend stands for a service's address: it takes its family, and it has its port or
// is on the only one of its process.
func suits(l probes.Listener, at netip.AddrPort, all []candidate) bool {
	v4, v6 := takes(l)
	a := at.Addr().Unmap()
	if a.Is4() && !v4 || !a.Is4() && !v6 {
		return false
	}
	for _, c := range all {
		if c.cookie == 0 && c.PID == l.PID && c.Local.Port() != l.Local.Port() {
			return l.Local.Port() == at.Port()
		}
	}
	return true
}

// claim puts an address under our rule, unless somebody listens there. The caller holds mu.
func (v *serviceSeat) claim(ctx context.Context, at bpf.Address, sp *space) (why string, err error) {
	socks, err := sp.diag.Dump(ctx, probes.Filter{States: states(tcpListen), LocalPorts: []uint16{at.AddrPort.Port()}})
	if err != nil {
		return "", err
	}
	a := at.AddrPort.Addr().Unmap()
	var others []netip.AddrPort
	for _, s := range socks {
		l := s.Local.Addr().Unmap()
		switch {
		case l == a, l.IsUnspecified() && (l.Is4() == a.Is4() || !s.V6Only && !l.Is4()):
			return "somebody listens on " + s.Local.String(), nil
		case a.IsUnspecified():
			others = append(others, s.Local)
		}
	}
	v6only := slices.ContainsFunc(v.addrs, func(o netip.AddrPort) bool {
		return o.Port() == at.AddrPort.Port() && o.Addr().Unmap().Is4() && o.Addr().IsUnspecified()
	})
	for _, o := range others {
		// More specific than ours: it goes on to get what it got.
		if err := v.n.host.Pass(bpf.Address{NetNS: at.NetNS, AddrPort: o}, v.id); err != nil {
			return "", err
		}
	}
	err = v.n.host.Admit(at, v6only, v.id)
	if errors.Is(err, bpf.ErrTaken) {
		return err.Error(), nil
	}
	return "", err
}

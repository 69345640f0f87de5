// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/ebbproxy/ebb/bpf"
	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/config"
	"github.com/ebbproxy/ebb/probes"
)

// serviceSeat steers the new connections to a service's addresses over the listeners of its ready backends, in the kernel:
// the addresses are under the rule of a backend that has no listener of its own.
//
//	ready backends ──► their listeners
//	none is ready  ──► those that drain and still admit ──► where a drain sends what is late: its relay, a run ──► nobody
//
// An address on which a backend, or anybody else, listens itself is left to that one.
type serviceSeat struct {
	n    *node
	name string
	id   uint64
	log  *slog.Logger
	kick chan struct{} // of capacity 1: something may have changed
	peek chan struct{} // of capacity 1: somebody may listen on our addresses now, or not any more

	// turn is held from the look at the backends to the last write, so that what was seen before a backend closed is never
	// written after it. It goes before the node's mu, which goes before ours.
	turn sync.Mutex

	// Of whoever has the turn.
	found   map[uint64]probes.Listener // where the listeners of the last look are held, by cookie
	mislaid bool                       // one of them was not there any more

	mu    sync.Mutex
	addrs []netip.AddrPort
	at    map[bpf.Address][]uint64 // addresses under our rule, and what they are steered to
	said  map[bpf.Address]string   // why one is not
	names map[uint64]string        // backends by their listeners; see called
	// spaces are the namespaces of the backends at the last update.
	spaces map[uint64]*space
	gone   bool
}

// steerServices makes the services that are steered those of the configuration.
func (n *node) steerServices(cfg *config.Config) error {
	if n.host == nil || !n.host.HasAdmission() {
		return nil
	}
	want := map[string]config.Service{}
	for _, sv := range cfg.Services {
		if sv.Mode == drain.ModeEnforce && len(sv.Listen) > 0 {
			want[sv.Name] = sv
		}
	}
	var errs []error
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, name := range n.recorded("services", "") {
		if _, ok := want[name]; ok {
			continue
		}
		if v := n.services[name]; v != nil {
			v.end()
			delete(n.services, name)
		}
		errs = append(errs, n.forget(serviceID(name)), os.Remove(filepath.Join(n.o.Config.State.Dir, "services", name)))
	}
	for name, sv := range want {
		v := n.services[name]
		if v == nil {
			v = &serviceSeat{
				n: n, name: name, id: serviceID(name), log: n.log.With("service", name), kick: make(chan struct{}, 1), peek: make(chan struct{}, 1),
				at: map[bpf.Address][]uint64{}, said: map[bpf.Address]string{}, names: map[uint64]string{},
			}
			err := n.record(name)
			if err == nil {
				err = n.host.SetBackend(v.id, bpf.BackendRule{Action: bpf.ActionOpen, Enforce: true, Gen: 1})
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("steer service %s: %w", name, err))
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
	select {
	case n.turns <- struct{}{}:
	default:
	}
}

// addresses are those of a service that is steered, in a network namespace.
func (n *node) addresses(service string, netns uint64) []api.ServiceAddress {
	n.mu.Lock()
	v := n.services[service]
	n.mu.Unlock()
	if v == nil {
		return nil
	}
	return v.view(netns)
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

// glance has every service look whether somebody listens on its addresses.
func (n *node) glance() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, v := range n.services {
		select {
		case v.peek <- struct{}{}:
		default:
		}
	}
}

func (v *serviceSeat) poke() {
	select {
	case v.kick <- struct{}{}:
	default:
	}
}

// peekEvery is how often a service looks who listens on its addresses although nobody has started: one dump of the listeners
// of its ports.
const peekEvery = 10 * time.Second

func (v *serviceSeat) follow(ctx context.Context) {
	every := time.NewTicker(peekEvery)
	defer every.Stop()
	for {
		look := true
		select {
		case <-v.kick:
		case <-v.peek:
			look = v.stale(ctx)
		case <-every.C:
			look = v.stale(ctx)
		case <-ctx.Done():
			return
		}
		if !look {
			continue
		}
		if err := v.update(ctx); err != nil && ctx.Err() == nil {
			v.log.Warn("steer the service", "err", err)
		}
	}
}

// stale tells whether somebody listens on an address that nobody listened on, or the other way round.
func (v *serviceSeat) stale(ctx context.Context) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, addr := range v.addrs {
		for id, sp := range v.spaces {
			who, _, err := v.listens(ctx, addr, sp)
			if err != nil || who != v.said[bpf.Address{NetNS: id, AddrPort: addr}] {
				return true
			}
		}
	}
	return false
}

// end has nothing written any more.
func (v *serviceSeat) end() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.gone = true
}

// candidate is a listener that connections to the service can be steered to.
type candidate struct {
	probes.Listener
	backend string
	netns   uint64
	space   *space
	weight  int
	tier    int    // the lowest that there is is used
	cookie  uint64 // of one that is a target already, a relay's or another's; else 0
}

// The tiers of candidates.
const (
	tierReady = iota
	tierAdmits
	tierLate
	tierUnknown // its probe has not told yet: what is steered to it already stays, as after a restart of the agent
	tierNone    // it gets nothing new
)

// candidates are the listeners of the service's backends, by how good they are.
func (v *serviceSeat) candidates(ctx context.Context) (all []candidate) {
	found := map[uint64]probes.Listener{}
	defer func() { v.found = found }()
	for _, s := range v.n.seatsOf(v.name) {
		inc := s.life()
		if inc.b == nil || inc.b.dp.name() != datapathKernel {
			continue // there is none, or its mode is off
		}
		tier := tierReady
		if err := inc.serves(ctx, s.name); err != nil {
			switch {
			case inc.b.dp.refusing() || inc.b.late.redirecting():
				tier = tierLate
			case inc.draining():
				tier = tierAdmits
			case errors.Is(err, errUnprobed):
				tier = tierUnknown
			default:
				tier = tierNone
			}
		}
		for _, sp := range inc.b.dp.spaces() {
			c := candidate{backend: s.name, netns: sp.id, space: sp, weight: inc.set.weight, tier: tier}
			if tier == tierLate {
				cookies, err := v.late(inc, sp)
				if err != nil {
					v.log.Warn("look where late connections go", "backend", s.name, "err", err)
				}
				for _, c.cookie = range cookies {
					all = append(all, c)
				}
				c.cookie, c.tier = 0, tierNone // for its own listeners
			}
			ls, err := v.located(inc, sp, found)
			if err != nil {
				v.log.Warn("look at a backend's listeners", "backend", s.name, "err", err)
				continue
			}
			for _, l := range ls {
				if l.Protocol != "mptcp" {
					c.Listener = l
					all = append(all, c)
				}
			}
		}
	}
	return all
}

// located are the covered listeners of a backend in a namespace, with where its processes hold them. That is looked for among
// all of their descriptors, of which there may be a hundred thousand while a drain waits for its flip, so it is remembered. The
// caller holds turn.
func (v *serviceSeat) located(inc *incarnation, sp *space, found map[uint64]probes.Listener) (ls []probes.Listener, err error) {
	known := true
	for _, l := range inc.b.coveredMap() {
		if !l.live || l.netns != sp.id {
			continue
		}
		at, ok := v.found[l.cookie]
		known = known && ok
		ls = append(ls, at)
	}
	if !known {
		if ls, err = inc.held(sp); err != nil {
			return nil, err
		}
	}
	for _, l := range ls {
		found[l.Cookie] = l
	}
	slices.SortFunc(ls, func(a, b probes.Listener) int { return cmp.Compare(a.Cookie, b.Cookie) })
	return ls, nil
}

// called are the names that are asked for: those of the candidates, and of the listeners that may have gone and that an
// address is steered to still. The caller holds mu.
func (v *serviceSeat) called(all []candidate) map[uint64]string {
	names := map[uint64]string{}
	for _, targets := range v.at {
		for _, cookie := range targets {
			if name, ok := v.names[cookie]; ok {
				names[cookie] = name
			}
		}
	}
	for _, c := range all {
		if c.cookie != 0 {
			names[c.cookie] = "late of " + c.backend // unless it is a backend's own, which comes below
		}
	}
	for _, c := range all {
		if c.cookie == 0 {
			names[c.Cookie] = c.backend
		}
	}
	return names
}

// late are the listeners to which a drain redirects what comes late.
func (v *serviceSeat) late(inc *incarnation, sp *space) (cookies []uint64, err error) {
	if !inc.b.late.redirecting() {
		return nil, nil
	}
	for _, l := range inc.b.late.addresses() {
		to, err := v.n.host.Targets(bpf.Address{NetNS: sp.id, AddrPort: l.addr})
		if err != nil {
			return nil, err
		}
		cookies = append(cookies, to...)
	}
	slices.Sort(cookies)
	return slices.Compact(cookies), nil
}

// update writes where each address is steered to, one write for each that has changed.
func (v *serviceSeat) update(ctx context.Context) error {
	v.turn.Lock()
	defer v.turn.Unlock()
	v.mislaid = false
	err := v.write(ctx)
	if v.mislaid {
		err = v.write(ctx)
	}
	return err
}

// write is update once. The caller holds turn.
func (v *serviceSeat) write(ctx context.Context) error {
	if err := v.n.host.TakeOver(v.id, nil); err != nil {
		v.log.Warn("take the service over from another version's installation", "err", err)
	}
	all := v.candidates(ctx)
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.gone {
		return nil
	}
	v.spaces = map[uint64]*space{}
	v.names = v.called(all)
	for _, c := range all {
		v.spaces[c.netns] = c.space
	}
	want := map[bpf.Address]bool{}
	var errs []error
	for _, addr := range v.addrs {
		for id, sp := range v.spaces {
			at := bpf.Address{NetNS: id, AddrPort: addr}
			want[at] = true
			if err := v.steer(ctx, at, sp, all); err != nil {
				errs = append(errs, fmt.Errorf("steer %s: %w", addr, err))
			}
		}
	}
	for at := range v.at {
		switch {
		case want[at]:
		case slices.Contains(v.addrs, at.AddrPort): // its last backend has gone
			errs = append(errs, v.set(at, nil))
		default:
			errs = append(errs, v.release(at))
		}
	}
	for at := range v.said {
		if !want[at] {
			delete(v.said, at)
		}
	}
	return errors.Join(errs...)
}

// steer writes the targets of one address. The caller holds mu.
func (v *serviceSeat) steer(ctx context.Context, at bpf.Address, sp *space, all []candidate) error {
	why, err := v.claim(ctx, at, sp)
	if err != nil {
		return err
	}
	if why != v.said[at] {
		if v.said[at] = why; why != "" {
			v.say(at, "is not steered: "+why)
		}
	}
	if why != "" {
		return v.release(at)
	}
	old, ok := v.at[at]
	if !ok {
		// An owner before may have left some.
		if old, err = v.n.host.Targets(at); err != nil {
			return err
		}
		v.at[at] = old
	}
	best := tierNone
	var here []candidate
	for _, c := range all {
		if c.netns != at.NetNS || c.tier == tierNone || c.cookie == 0 && !suits(c.Listener, at.AddrPort, all) {
			continue
		}
		if c.tier == tierUnknown {
			if !slices.Contains(old, c.Cookie) {
				continue
			}
			c.tier = tierReady
		}
		here = append(here, c)
		best = min(best, c.tier)
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
			if err := v.target(c); errors.Is(err, probes.ErrGone) {
				delete(v.found, c.Cookie)
				v.mislaid = true // another process may hold it by now
				continue
			} else if err != nil {
				return err
			}
		}
		if !slices.Contains(cookies, cookie) {
			cookies, weights = append(cookies, cookie), append(weights, c.weight)
		}
	}
	return v.set(at, bpf.Place(old, cookies, weights))
}

// set steers an address. The caller holds mu.
func (v *serviceSeat) set(at bpf.Address, targets []uint64) error {
	old := v.at[at]
	if slices.Equal(targets, old) {
		return nil
	}
	if err := v.n.host.SetTargets(at, targets); err != nil {
		return err
	}
	v.at[at] = targets
	was, is := v.whom(old), v.whom(targets)
	switch {
	case len(is) == 0:
		v.say(at, "is steered to nobody: no backend is ready")
	case !maps.Equal(was, is):
		v.say(at, "is steered to "+shares(is))
	}
	return nil
}

// release leaves an address to the ordinary look-up. The caller holds mu.
func (v *serviceSeat) release(at bpf.Address) error {
	if _, ok := v.at[at]; !ok {
		return nil
	}
	delete(v.at, at)
	return v.n.host.Dismiss(at, v.id)
}

// say tells what has become of an address.
func (v *serviceSeat) say(at bpf.Address, what string) {
	v.log.Info("service address", "address", at.AddrPort.String(), "now", what)
	v.n.emit(drain.Event{Type: EventService, Service: v.name, Message: at.AddrPort.String() + " " + what})
}

// whom counts the slots of each backend. The caller holds mu.
func (v *serviceSeat) whom(targets []uint64) map[string]int {
	n := map[string]int{}
	for _, c := range targets {
		n[cmp.Or(v.names[c], "a listener of before")]++
	}
	return n
}

// shares says who gets how many of the connections.
func shares(n map[string]int) string {
	sum := 0
	for _, k := range n {
		sum += k
	}
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(n)) {
		if n[name] == sum {
			return name
		}
		parts = append(parts, fmt.Sprintf("%s (%d of %d)", name, n[name], sum))
	}
	return strings.Join(parts, ", ")
}

// view tells where the addresses are steered in a namespace.
func (v *serviceSeat) view(netns uint64) (as []api.ServiceAddress) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, addr := range v.addrs {
		at := bpf.Address{NetNS: netns, AddrPort: addr}
		a := api.ServiceAddress{Address: addr.String(), Shares: v.whom(v.at[at]), Why: v.said[at]}
		if len(a.Shares) == 0 && a.Why == "" {
			a.Why = "no backend is ready"
		}
		as = append(as, a)
	}
	return as
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

// claim puts an address under our rule, unless somebody listens there: whoever that is keeps what it gets. The caller holds mu.
func (v *serviceSeat) claim(ctx context.Context, at bpf.Address, sp *space) (why string, err error) {
	who, others, err := v.listens(ctx, at.AddrPort, sp)
	if who != "" || err != nil {
		return who, err
	}
	for _, o := range others {
		// More specific than ours: it goes on to get what it got.
		if err := v.n.host.Pass(bpf.Address{NetNS: at.NetNS, AddrPort: o}, v.id); err != nil {
			return "", err
		}
	}
	v6only := slices.ContainsFunc(v.addrs, func(o netip.AddrPort) bool {
		return o.Port() == at.AddrPort.Port() && o.Addr().Unmap().Is4() && o.Addr().IsUnspecified()
	})
	err = v.n.host.Admit(at, v6only, v.id)
	if errors.Is(err, bpf.ErrTaken) {
		return err.Error(), nil
	}
	return "", err
}

// listens tells who listens on an address, "" if nobody does, and which listeners there are on more specific ones. The caller
// holds mu.
func (v *serviceSeat) listens(ctx context.Context, addr netip.AddrPort, sp *space) (who string, others []netip.AddrPort, err error) {
	socks, err := sp.diag.Dump(ctx, probes.Filter{States: states(tcpListen), LocalPorts: []uint16{addr.Port()}})
	if err != nil {
		return "", nil, err
	}
	a := addr.Addr().Unmap()
	for _, s := range socks {
		l := s.Local.Addr().Unmap()
		switch {
		case l == a, l.IsUnspecified() && (l.Is4() == a.Is4() || !s.V6Only && !l.Is4()):
			return cmp.Or(v.names[s.Cookie], "somebody else") + " listens on " + s.Local.String() + " itself", nil, nil
		case a.IsUnspecified():
			others = append(others, s.Local)
		}
	}
	return "", others, nil
}

// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/probes"
	"github.com/ebbproxy/ebb/proxy"
)

// sibling is another run of the service that serves in the same network namespace.
type sibling struct {
	name      string
	listeners []probes.Listener // those that are the service
}

// askSibling bounds what one run is given to answer: it looks at its own readiness meanwhile.
const askSibling = 400 * time.Millisecond

// siblings asks the other runs of this host which of them are ready and of the same service, and looks for their
// listeners in the namespace. why says of those that are of no use what is in the way. silent says that one has not
// answered in time, as on a busy host: whether it serves is not known.
func (l *late) siblings(ctx context.Context, sp *space) (sibs []sibling, silent bool, why []string) {
	found, err := api.Discover(ctx, l.o.runDir)
	if err != nil {
		why = append(why, "other runs cannot be asked: "+err.Error())
	}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, f := range found {
		if f.Err != nil {
			// Refused: its owner has died.
			silent = silent || isTimeout(f.Err)
			continue
		}
		if f.Path == l.o.sock {
			f.Client.Close()
			continue
		}
		wg.Go(func() {
			defer f.Client.Close()
			ask, cancel := context.WithTimeout(ctx, askSibling)
			defer cancel()
			bs, err := f.Client.Backends(ask)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				silent = silent || isTimeout(err)
				l.log.Debug("ask another run", "socket", f.Path, "err", err)
				return
			}
			for _, b := range bs {
				if b.Service != l.o.service || b.Name == l.o.name {
					continue
				}
				s, no := siblingOf(b, sp)
				if no != "" {
					why = append(why, b.Name+" "+no)
					continue
				}
				sibs = append(sibs, s)
			}
		})
	}
	wg.Wait()
	if l.o.siblings != nil {
		more, not := l.o.siblings(ctx, sp)
		sibs, why = append(sibs, more...), append(why, not...)
	}
	slices.SortFunc(sibs, func(a, b sibling) int { return cmp.Compare(a.name, b.name) })
	if silent {
		why = append(why, "a run on this host does not answer in time")
	}
	slices.Sort(why)
	return sibs, silent, why
}

func isTimeout(err error) bool {
	return errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded)
}

func siblingOf(b api.Backend, sp *space) (s sibling, no string) {
	s.name = b.Name
	switch {
	case b.State != drain.StateServing:
		return s, fmt.Sprintf("is %s itself", b.State)
	case !b.Ready:
		return s, "is not ready"
	}
	// Of a run what its command has orphaned hangs below the owner; an agent has not started what it owns.
	var pids []int
	for _, root := range []int{b.PID, b.Owner.PID} {
		tree, err := probes.Tree(root)
		if err != nil {
			return s, "is out of sight: " + err.Error()
		}
		for _, p := range tree {
			pids = append(pids, p.PID)
		}
	}
	ls, err := probes.Listeners(sp.diag, pids)
	if err != nil {
		return s, "cannot be looked at: " + err.Error()
	}
	for _, x := range b.Listeners {
		at, err := netip.ParseAddrPort(x.Address)
		if err != nil || !x.Covered {
			continue
		}
		for _, y := range ls {
			if y.Local == at {
				s.listeners = append(s.listeners, y)
			}
		}
	}
	if len(s.listeners) == 0 {
		return s, "does not listen in this network namespace"
	}
	return s, ""
}

// match says which listeners of siblings can take the connections of each of our addresses: all of them, or none is
// steered at all. A listener of the same port stands for ours; where that cannot tell, the only port of both does. peers
// are addresses at which siblings can be dialled.
func match(own []listener, sibs []sibling) (steer map[netip.AddrPort][]probes.Listener, whom []string, peers []Peer, why []string) {
	if len(sibs) == 0 {
		return nil, nil, nil, nil
	}
	ownPorts := servicePorts(own)
	for _, s := range sibs {
		ports := map[uint16]bool{}
		for _, l := range s.listeners {
			ports[l.Local.Port()] = true
		}
		whole := len(own) > 0
		these := map[netip.AddrPort][]probes.Listener{}
		mptcp := false
		for _, o := range own {
			var v4, v6 bool
			for _, l := range s.listeners {
				if l.Local.Port() != o.addr.Port() && !(len(ownPorts) == 1 && len(ports) == 1) {
					continue
				}
				if l.Protocol == "mptcp" {
					mptcp = true
					continue
				}
				a, b := takes(l)
				if !(a && o.needs4()) && !(b && o.needs6()) {
					continue
				}
				v4, v6 = v4 || a, v6 || b
				these[o.addr] = append(these[o.addr], l)
			}
			whole = whole && (v4 || !o.needs4()) && (v6 || !o.needs6())
		}
		switch {
		case whole:
			if steer == nil {
				steer = map[netip.AddrPort][]probes.Listener{}
			}
			for a, ls := range these {
				steer[a] = append(steer[a], ls...)
			}
			whom = append(whom, s.name)
		case mptcp:
			why = append(why, s.name+" listens with MPTCP, which cannot be steered to")
		case len(ownPorts) > 1 || len(ports) > 1:
			why = append(why, s.name+": which of its ports stands for which of ours is not known")
		default:
			why = append(why, s.name+" does not take both of IPv4 and IPv6")
		}
		// With several it is not known which of its ports a connection wants.
		if len(ownPorts) == 1 && len(ports) == 1 && !ports[own[0].addr.Port()] {
			peers = append(peers, Peer{Address: dialable(s.listeners[0].Local)})
		}
	}
	return steer, whom, peers, why
}

// Peer is another backend of the service, to which late connections can be relayed.
type Peer struct {
	// For is the port of this backend whose connections are carried there. 0 means the peer's own port, or whatever this
	// backend has if it has one port only.
	For     uint16
	Address netip.AddrPort
}

func servicePorts(own []listener) map[uint16]bool {
	ports := map[uint16]bool{}
	for _, l := range own {
		ports[l.addr.Port()] = true
	}
	return ports
}

// assign says for which of our ports each peer is. why says of those that are for none what is in the way.
func assign(own []listener, peers []Peer) (to []proxy.Peer, why []string) {
	ports := servicePorts(own)
	for _, p := range peers {
		q := proxy.Peer{Address: p.Address, For: p.For}
		if p.For == 0 && len(ports) > 1 {
			q.For = p.Address.Port()
		}
		switch {
		case q.For != 0 && !ports[q.For]:
			why = append(why, fmt.Sprintf("peer %s is for port %d, on which nothing listens here", p.Address, q.For))
		case !slices.Contains(to, q):
			to = append(to, q)
		}
	}
	return to, why
}

// whole are the peers, if there is one for each of our ports: what comes to the others would have nowhere to go.
func whole(own []listener, peers []proxy.Peer) (_ []proxy.Peer, why []string) {
	for _, port := range slices.Sorted(maps.Keys(servicePorts(own))) {
		if !slices.ContainsFunc(peers, func(p proxy.Peer) bool { return p.For == 0 || p.For == port }) {
			why = append(why, fmt.Sprintf("no peer for port %[1]d can be reached: name one (%[1]d=ADDR:PORT), or leave the port out of the service", port))
		}
	}
	if why != nil {
		return nil, why
	}
	return peers, nil
}

// inWords says where peers are, and for which ports if it matters.
func inWords(peers []proxy.Peer) string {
	words := make([]string, len(peers))
	for i, p := range peers {
		words[i] = p.Address.String()
		if p.For != 0 && p.For != p.Address.Port() {
			words[i] += fmt.Sprintf(" (for port %d)", p.For)
		}
	}
	return strings.Join(words, ", ")
}

// takes tells of which families a listener takes connections that were sent to it.
func takes(l probes.Listener) (v4, v6 bool) {
	a := l.Local.Addr()
	if a.Unmap().Is4() {
		return true, false
	}
	return a.IsUnspecified() && !l.V6Only, true
}

func (l listener) needs4() bool {
	a := l.addr.Addr()
	return a.Unmap().Is4() || (a.IsUnspecified() && !l.v6only)
}

func (l listener) needs6() bool { return !l.addr.Addr().Unmap().Is4() }

// dialable is the address at which a listener of the same namespace answers.
func dialable(a netip.AddrPort) netip.AddrPort {
	switch addr := a.Addr().Unmap(); {
	case !addr.IsUnspecified():
		return netip.AddrPortFrom(addr, a.Port())
	case addr.Is4():
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), a.Port())
	default:
		return netip.AddrPortFrom(netip.IPv6Loopback(), a.Port())
	}
}

// dialAll dials each address once from the namespace, all at the same time, and returns those that answer in their
// order. Ours are left out: what they take would come back.
func dialAll(ctx context.Context, sp *space, own []listener, to []proxy.Peer) (good []proxy.Peer, why []string) {
	errs := make([]error, len(to))
	var wg sync.WaitGroup
	for i, p := range to {
		a := p.Address
		wg.Go(func() {
			errs[i] = sp.in(func() error {
				if isOwn(a, own) {
					return fmt.Errorf("%s is this backend itself", a)
				}
				var d net.Dialer
				d.SetMultipathTCP(false)
				c, err := d.DialContext(ctx, "tcp", a.String())
				if err != nil {
					return err
				}
				return c.Close()
			})
		})
	}
	wg.Wait()
	for i, err := range errs {
		if err != nil {
			why = append(why, fmt.Sprintf("peer %s: %v", to[i].Address, err))
			continue
		}
		good = append(good, to[i])
	}
	return good, why
}

// isOwn tells whether dialling a from the thread's namespace reaches one of our listeners.
func isOwn(a netip.AddrPort, own []listener) bool {
	to := a.Addr().Unmap()
	local := to.IsLoopback()
	if as, err := net.InterfaceAddrs(); err == nil {
		for _, x := range as {
			if n, ok := x.(*net.IPNet); ok {
				if ip, ok := netip.AddrFromSlice(n.IP); ok && ip.Unmap() == to.WithZone("") {
					local = true
				}
			}
		}
	}
	for _, l := range own {
		at := l.addr.Addr().Unmap()
		if l.addr.Port() == a.Port() && (at == to || local && at.IsUnspecified() && (to.Is4() && l.needs4() || to.Is6() && l.needs6())) {
			return true
		}
	}
	return false
}

// sameSiblings tells whether the listeners to steer to are the same.
func sameSiblings(a, b map[netip.AddrPort][]probes.Listener) bool {
	inodes := func(m map[netip.AddrPort][]probes.Listener) (out []uint64) {
		for _, ls := range m {
			for _, l := range ls {
				out = append(out, l.Inode)
			}
		}
		slices.Sort(out)
		return out
	}
	return slices.Equal(inodes(a), inodes(b))
}

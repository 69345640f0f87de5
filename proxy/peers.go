// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const maxWeight = 1 << 20

// PeerState says what is known of a peer.
type PeerState string

// The states of a peer.
//
//	unknown ──dial works──► up ──Fall failures in a row──► down
//	   └──Fall failures in a row──► down ──Rise successes in a row──► up
//
// A peer that is not up is dialled only for a connection for which none that is up is left.
const (
	PeerUnknown PeerState = "unknown" // nothing has been dialled yet
	PeerUp      PeerState = "up"
	PeerDown    PeerState = "down"
)

// The states in the order in which peers are tried.
const (
	stateUp int32 = iota
	stateUnknown
	stateDown
)

// PeerStatus is what is known of one peer.
type PeerStatus struct {
	Peer     Peer
	State    PeerState
	InFlight int    // connections that are dialled or carried
	Dialled  uint64 // dials for clients that worked
	Failed   uint64 // dials for clients that did not
	Err      error  // of the last dial that failed, if the last one did
}

// peer is one of the peers that loops dial. Loops and the prober share it by atomics alone.
type peer struct {
	Peer
	weight   int64
	family   int
	to, from rawAddr
	// ourself is set where a dial can meet itself: TCP's simultaneous open with the port that the kernel happened to
	// choose (RFC 9293, section 3.5).
	ourself bool

	rise, fall int32
	state      atomic.Int32
	good, bad  atomic.Int32 // in a row
	inFlight   atomic.Int64
	dialled    atomic.Uint64
	failed     atomic.Uint64
	nextPort   atomic.Uint32
	err        atomic.Pointer[error]
}

// peerSet is never changed, only replaced.
type peerSet struct {
	peers  []*peer
	sum    []int64             // of the weights up to and with each peer
	byPort map[uint16]*peerSet // those for each port that some peer is for; nil if all are for every port
}

func newPeer(p Peer, probe ProbeOptions, ports [2]uint16) (*peer, error) {
	if err := p.check(); err != nil {
		return nil, err
	}
	n := &peer{Peer: p, weight: int64(max(p.Weight, 1)), rise: int32(probe.Rise), fall: int32(probe.Fall)}
	n.state.Store(stateUnknown)
	if p.Own {
		n.ourself = true
		return n, nil
	}
	var err error
	if n.to, n.family, err = newRawAddr(p.Address); err != nil {
		return nil, err
	}
	if p.Source.IsValid() {
		if n.from, _, err = newRawAddr(netip.AddrPortFrom(p.Source, 0)); err != nil {
			return nil, err
		}
	}
	n.ourself = p.Address.Port() >= ports[0] && p.Address.Port() <= ports[1]
	return n, nil
}

// ephemeralPorts is the range from which the kernel chooses ports, ip(7).
func ephemeralPorts() [2]uint16 {
	var r [2]uint16
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err == nil {
		_, err = fmt.Sscan(string(text), &r[0], &r[1])
	}
	if err != nil {
		return [2]uint16{1, 65535} // then every dial is looked at
	}
	return r
}

func newPeerSet(peers []*peer) *peerSet {
	s := &peerSet{peers: peers}
	var sum int64
	for _, p := range peers {
		sum += p.weight
		s.sum = append(s.sum, sum)
	}
	return s
}

// split adds byPort.
func (s *peerSet) split() *peerSet {
	for _, p := range s.peers {
		if p.For == 0 || s.byPort[p.For] != nil {
			continue
		}
		if s.byPort == nil {
			s.byPort = make(map[uint16]*peerSet)
		}
		s.byPort[p.For] = s.only(p.For)
	}
	if s.byPort != nil {
		s.byPort[0] = s.only(0) // for any other port
	}
	return s
}

func (s *peerSet) only(port uint16) *peerSet {
	return newPeerSet(slices.DeleteFunc(slices.Clone(s.peers), func(p *peer) bool { return p.For != 0 && p.For != port }))
}

// of are the peers for the client's connection fd.
func (s *peerSet) of(fd int32) *peerSet {
	if s.byPort == nil {
		return s
	}
	if at := s.byPort[name(fd, unix.SYS_GETSOCKNAME).Port()]; at != nil {
		return at
	}
	return s.byPort[0]
}

// choose takes a peer that is not among tried, nil if none is left: the one with less in flight per weight of two that
// are drawn by weight, so that a peer that is new or looks idle is not given everything at once (Mitzenmacher, The
// Power of Two Choices, 2001).
func (s *peerSet) choose(rng *rand.Rand, tried []*peer) *peer {
	if len(s.peers) == 1 {
		if p := s.peers[0]; !slices.Contains(tried, p) {
			return p
		}
		return nil
	}
	if len(s.peers) == 0 {
		return nil
	}
	best := s.draw(rng)
	if other := s.draw(rng); better(other, best) {
		best = other
	}
	if best.state.Load() == stateUp && !slices.Contains(tried, best) {
		return best
	}
	best = nil
	start := rng.IntN(len(s.peers)) // so that equals take turns
	for i := range s.peers {
		p := s.peers[(start+i)%len(s.peers)]
		if !slices.Contains(tried, p) && (best == nil || better(p, best)) {
			best = p
		}
	}
	return best
}

func (s *peerSet) draw(rng *rand.Rand) *peer {
	n := rng.Int64N(s.sum[len(s.sum)-1])
	i, _ := slices.BinarySearch(s.sum, n+1)
	return s.peers[i]
}

func better(a, b *peer) bool {
	if x, y := a.state.Load(), b.state.Load(); x != y {
		return x < y
	}
	// (a+1)/wa < (b+1)/wb: with the connection that is to come.
	return (a.inFlight.Load()+1)*b.weight < (b.inFlight.Load()+1)*a.weight
}

// worked notes a dial that succeeded.
func (p *peer) worked() (changed bool) {
	if p.bad.Load() != 0 {
		p.bad.Store(0)
	}
	switch p.state.Load() {
	case stateUp:
		return false
	case stateDown:
		if p.good.Add(1) < p.rise {
			return false
		}
	}
	p.good.Store(0)
	p.err.Store(nil)
	return p.state.Swap(stateUp) != stateUp
}

// broke notes a dial that failed.
func (p *peer) broke(err error) (changed bool) {
	p.err.Store(&err)
	p.good.Store(0)
	if p.bad.Add(1) < p.fall {
		return false
	}
	return p.state.Swap(stateDown) != stateDown
}

func (p *peer) status() PeerStatus {
	s := PeerStatus{Peer: p.Peer, InFlight: int(p.inFlight.Load()), Dialled: p.dialled.Load(), Failed: p.failed.Load()}
	switch p.state.Load() {
	case stateUp:
		s.State = PeerUp
	case stateDown:
		s.State = PeerDown
	default:
		s.State = PeerUnknown
	}
	if err := p.err.Load(); err != nil {
		s.Err = *err
	}
	return s
}

// probe dials a peer once and closes the connection.
func (p *peer) probe(ctx context.Context, timeout time.Duration) error {
	d := net.Dialer{Timeout: timeout}
	d.SetMultipathTCP(false)
	switch {
	case p.Own:
		return nil // there is no address without a client
	case p.Ports[1] != 0:
		d.Control = p.bindProbe
	case p.Source.IsValid():
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(p.Source, 0))
	}
	c, err := d.DialContext(ctx, "tcp", p.Address.String())
	if err != nil {
		return err
	}
	if c.LocalAddr().String() == c.RemoteAddr().String() {
		err = fmt.Errorf("dial %v: %w", p.Address, errSelf)
	}
	if p.ProxyProtocol && err == nil {
		// A peer that expects a header would log its absence at every probe.
		err = c.SetWriteDeadline(time.Now().Add(timeout))
		if err == nil {
			_, err = c.Write(AppendHeader(nil, Header{Local: true}))
		}
	}
	return errors.Join(err, c.Close())
}

var errSelf = errors.New("nobody listens: the dial met itself")

// prober probes every peer at each interval until ctx ends. Peers that are new are probed at once.
func (r *Relay) prober(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-r.probeNow:
		}
		r.probeAll(ctx)
		timer.Reset(r.o.Probe.Interval)
	}
}

// probeAll dials every peer, 16 at a time.
func (r *Relay) probeAll(ctx context.Context) {
	var wg sync.WaitGroup
	slots := make(chan struct{}, 16)
	for _, p := range r.peers.Load().peers {
		if p.Own {
			continue
		}
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			err := p.probe(ctx, r.o.Probe.Timeout)
			if ctx.Err() == nil {
				r.judgePeer(p, err)
			}
		})
	}
	wg.Wait()
}

// judgePeer takes the result of a dial into account.
func (r *Relay) judgePeer(p *peer, err error) {
	switch {
	case err == nil && p.worked():
		r.log.Info("peer is up", "peer", p.Address)
	case err != nil && p.broke(err):
		r.log.Warn("peer is down", "peer", p.Address, slog.Any("err", err))
	}
}

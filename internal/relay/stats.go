// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/proxy"
)

// counts are the connections that are over, by action and result: the proxy.Metrics of the process.
type counts struct {
	mu sync.Mutex
	n  map[LateCount]uint64 // by a count whose N is 0
}

// LateConnection implements proxy.Metrics.
func (c *counts) LateConnection(a proxy.Action, r proxy.Result) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.n == nil {
		c.n = make(map[LateCount]uint64)
	}
	c.n[LateCount{Action: a, Result: r}]++
}

// list is sorted, so that two looks can be compared.
func (c *counts) list() []LateCount {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := make([]LateCount, 0, len(c.n))
	for k, n := range c.n {
		k.N = n
		out = append(out, k)
	}
	slices.SortFunc(out, func(a, b LateCount) int {
		return cmp.Or(cmp.Compare(a.Action, b.Action), cmp.Compare(a.Result, b.Result))
	})
	return out
}

// stats is what the process says of itself. The caller holds mu.
func (s *server) stats() *Stats {
	st := &Stats{
		Relay: s.relay.Stats(), Late: s.counts.list(), Parking: s.parking, Stopping: s.stopping,
		Started: s.started, Until: s.until, Listener: s.cookie, PID: os.Getpid(), Place: s.config.Place, Name: s.config.Name,
	}
	for _, p := range s.relay.Peers() {
		state := PeerState{Peer: p.Peer, State: p.State, InFlight: p.InFlight, Dialled: p.Dialled, Failed: p.Failed}
		if p.Err != nil {
			state.Err = p.Err.Error()
		}
		st.Peers = append(st.Peers, state)
	}
	return st
}

// checkListener tells at once what Serve would only tell later, and the socket's cookie.
func checkListener(f *os.File) (cookie uint64, err error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return 0, fmt.Errorf("reach listener: %w", err)
	}
	var listens, proto int
	var inner error
	if err := raw.Control(func(fd uintptr) {
		if listens, inner = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ACCEPTCONN); inner == nil {
			proto, inner = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PROTOCOL)
		}
		if inner == nil {
			cookie, inner = unix.GetsockoptUint64(int(fd), unix.SOL_SOCKET, unix.SO_COOKIE)
		}
	}); err != nil {
		return 0, fmt.Errorf("reach listener: %w", err)
	}
	if inner != nil || listens == 0 || proto != unix.IPPROTO_TCP {
		return 0, fmt.Errorf("%w: it listens %d, protocol %d", proxy.ErrNotListener, listens, proto)
	}
	return cookie, nil
}

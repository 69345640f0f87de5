// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/ebbproxy/ebb/probes"
)

// TCP states as sock_diag numbers them (include/net/tcp_states.h).
const (
	tcpEstablished = 1
	tcpSynRecv     = 3
	tcpFinWait1    = 4
	tcpFinWait2    = 5
	tcpCloseWait   = 8
	tcpLastAck     = 9
	tcpListen      = 10
	tcpClosing     = 11
	tcpNewSynRecv  = 12
)

func states(ss ...int) uint32 {
	var m uint32
	for _, s := range ss {
		m |= 1 << s
	}
	return m
}

// connStates are the states that the census counts: all that are established or on their way out, without TIME_WAIT.
var connStates = states(tcpEstablished, tcpFinWait1, tcpFinWait2, tcpCloseWait, tcpLastAck, tcpClosing)

// walkDatapath counts by sock_diag alone: it needs no privilege and closes nothing.
type walkDatapath struct {
	sp    *space
	why   []string
	hintc chan hint

	mu   sync.Mutex
	proc *process // nil until watch
	// seen holds the cookies of the connections of the last walk, so that arrivals between walks are counted. One that
	// came and went between two walks is not seen: the pause of arrivals that a zero needs is a pause of seen ones.
	seen  map[uint64]bool
	total map[uint16]uint64   // by local port
	known map[uint64]listener // until forgotten: a closed listener's connections are still counted
}

// newWalkDatapath counts in the network namespace ns; nil: ours.
func newWalkDatapath(ns *os.File, why ...string) (*walkDatapath, error) {
	fd := -1
	if ns != nil {
		var err error
		if fd, err = dupFD(int(ns.Fd())); err != nil {
			return nil, err
		}
	}
	d, err := probes.OpenDiag(probes.DiagOptions{NetNS: fd})
	if err != nil {
		closeFD(fd)
		return nil, fmt.Errorf("count by sock_diag: %w", err)
	}
	return &walkDatapath{sp: &space{fd: fd, diag: d}, why: why, hintc: make(chan hint), seen: map[uint64]bool{}, total: map[uint16]uint64{}, known: map[uint64]listener{}}, nil
}

func (w *walkDatapath) name() string              { return "none" }
func (w *walkDatapath) guarded() bool             { return false }
func (w *walkDatapath) warnings(*glance) []string { return w.why }
func (w *walkDatapath) hints() <-chan hint        { return w.hintc }
func (w *walkDatapath) spaces() []*space          { return []*space{w.sp} }
func (w *walkDatapath) cover(listener) error      { return nil }
func (w *walkDatapath) uncover(listener)          {}
func (w *walkDatapath) overruled() string         { return "" }
func (w *walkDatapath) admit() error              { return nil }
func (w *walkDatapath) unmark() error             { return nil }

func (w *walkDatapath) close(bool) error {
	err := w.sp.diag.Close()
	closeFD(w.sp.fd)
	return err
}

func (w *walkDatapath) refused() (int64, bool) { return 0, false }

func (w *walkDatapath) mark(_, _ time.Duration) error { return nil }

func (w *walkDatapath) refuse(context.Context, []listener, bool, time.Duration) error {
	return errUnguarded
}

func (w *walkDatapath) steer(context.Context, []listener, map[netip.AddrPort][]uint64, time.Duration) error {
	return errUnguarded
}

func (w *walkDatapath) renew(uint64, bool) error { return nil }

func (w *walkDatapath) target(int, *space) (uint64, error) { return 0, errUnguarded }
func (w *walkDatapath) steering() (time.Duration, bool)    { return 0, false }
func (w *walkDatapath) steered() (uint64, bool)            { return 0, false }
func (w *walkDatapath) refusing() bool                     { return false }
func (w *walkDatapath) disown([]int) error                 { return nil }

func (w *walkDatapath) compare(context.Context) ([]drift, bool, bool, error) {
	return nil, false, false, nil
}

func (w *walkDatapath) correct(drift) (bool, error) { return false, nil }

func (w *walkDatapath) watch(_ context.Context, p *process) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.proc = p
	return nil
}

func (w *walkDatapath) listeners(ctx context.Context) ([]listener, bool, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	ls, err := listenersOf(w.sp.diag, w.pids())
	if err != nil {
		return nil, false, err
	}
	live := make(map[uint64]bool, len(ls))
	for _, l := range ls {
		live[l.cookie], w.known[l.cookie] = true, l
	}
	for cookie, l := range w.known {
		if !live[cookie] {
			l.live = false
			ls = append(ls, l)
		}
	}
	byPort := map[uint16]int{} // port → the first listener that has it
	covered := make(map[uint64]listener, len(ls))
	for i, l := range ls {
		if _, ok := byPort[l.addr.Port()]; !ok {
			byPort[l.addr.Port()] = i
		}
		covered[l.cookie] = l
	}
	socks, err := w.connections(ctx, w.sp, covered, false)
	if err != nil {
		return ls, false, err
	}
	seen := make(map[uint64]bool, len(socks))
	for _, s := range socks {
		l := &ls[byPort[s.Local.Port()]]
		switch int(s.State) {
		case tcpEstablished, tcpCloseWait:
			l.open++
		case tcpFinWait2:
			l.closing++
		default:
			l.ending++
		}
		seen[s.Cookie] = true
		if !w.seen[s.Cookie] {
			w.total[s.Local.Port()]++
		}
	}
	w.seen = seen
	for port, i := range byPort {
		ls[i].total = w.total[port]
	}
	return ls, true, nil
}

func (w *walkDatapath) forget(cookie uint64) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	port := w.known[cookie].addr.Port()
	delete(w.known, cookie)
	for _, l := range w.known {
		if l.addr.Port() == port {
			return true
		}
	}
	delete(w.total, port)
	return true
}

// connections takes a port's connections for ours unless another process's descriptor says otherwise: one that nobody
// holds is not accepted yet, or its process has gone.
func (w *walkDatapath) connections(ctx context.Context, sp *space, covered map[uint64]listener, info bool) ([]probes.Socket, error) {
	ports := portsOf(covered)
	if len(ports) == 0 {
		return nil, nil
	}
	socks, err := sp.diag.Dump(ctx, probes.Filter{States: connStates, LocalPorts: ports, Info: info})
	if err != nil {
		return nil, err
	}
	// Of a CMD that has ended the kernel may still be delivering the last bytes: sockets that nobody holds.
	samples := samplesOf(socks)
	if err := probes.Locate(w.pids(), samples); err != nil {
		return socks, nil // whose they are cannot be told: too many is safe, too few is not
	}
	own := socks[:0]
	for i, s := range socks {
		if s.Inode == 0 || samples[i].FD >= 0 {
			own = append(own, s)
		}
	}
	return own, nil
}

// pids are the application's processes. The caller holds mu.
func (w *walkDatapath) pids() []int {
	if w.proc == nil {
		return nil
	}
	return w.proc.descendants()
}

// listenersOf finds the TCP and MPTCP listeners of processes through /proc and sock_diag.
func listenersOf(d *probes.Diag, pids []int) ([]listener, error) {
	found, err := probes.Listeners(d, pids)
	if err != nil {
		return nil, err
	}
	ls := make([]listener, 0, len(found))
	for _, f := range found {
		ls = append(ls, listener{cookie: f.Cookie, addr: f.Local, v6only: f.V6Only, mptcp: f.Protocol == "mptcp", pid: f.PID, live: true})
	}
	return ls, nil
}

func (w *walkDatapath) samples(ctx context.Context, pids []int, covered map[uint64]listener) ([]probes.Sample, bool, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return located(ctx, w, w.sp, pids, covered)
}

// located looks by sock_diag and finds where each connection is held, so that it can be touched.
func located(ctx context.Context, d datapath, sp *space, pids []int, covered map[uint64]listener) ([]probes.Sample, bool, error) {
	socks, err := d.connections(ctx, sp, covered, true)
	if err != nil {
		return nil, false, err
	}
	ss := samplesOf(socks)
	if err := probes.Locate(pids, ss); err != nil {
		return ss, false, nil // they can still be counted
	}
	return ss, false, nil
}

func samplesOf(socks []probes.Socket) []probes.Sample {
	ss := make([]probes.Sample, 0, len(socks))
	for _, s := range socks {
		sample, _ := probes.SampleFromSocket(s)
		ss = append(ss, sample)
	}
	return ss
}

func portsOf(covered map[uint64]listener) []uint16 {
	seen := map[uint16]bool{}
	var ports []uint16
	for _, l := range covered {
		if p := l.addr.Port(); !seen[p] {
			seen[p] = true
			ports = append(ports, p)
		}
	}
	return ports
}

var _ datapath = (*walkDatapath)(nil)

// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/bpf"
	"github.com/ebbproxy/ebb/probes"
)

// kernelDatapath admits and counts in the kernel.
type kernelDatapath struct {
	opts bpf.Options
	host *bpf.Host
	// shared says that host is not ours to close.
	shared bool
	// watchMore is kernelOptions.Watch.
	watchMore func(*bpf.Host, bpf.Watch) error
	id        uint64
	rule      bpf.BackendRule
	w         bpf.Watch
	log       *slog.Logger
	why       []string

	hintc  chan hint
	events *bpf.EventReader // nil with a ring
	ring   *ring
	ctx    context.Context // until close
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu   sync.Mutex
	proc *process // nil until watch
	// watched is its main process as the kernel numbers it.
	watched uint32
	sps     []*space
	taken   map[netip.AddrPort]error // addresses whose rule another backend has
	early   *early                   // nil without --early
	// targets are those of steer; nil if none were set by this process.
	targets map[netip.AddrPort][]uint64
	// unseen says why connections may be open that are in no count yet; "" if none can be.
	unseen string
	// rival is the process, if another owner has it.
	rival string
	// elsewhere is why the counts are another installation's still; nil if they are not.
	elsewhere error

	missedBase uint64 // listeners that were missed before we came

	// sampled is how many connections the last look found: a slice that grows to a hundred thousand leaves five times as much.
	sampled atomic.Int64
}

// kernelOptions says what a kernel datapath is for.
type kernelOptions struct {
	BPF   bpf.Options
	Host  *bpf.Host // of all backends of this process; nil: one of its own
	Ring  *ring     // of Host; nil: the backend has one of its own
	NetNS *os.File  // the network namespace of the application; nil: ours
	// Watch watches for listeners of a process that is not known yet; nil: all that descends from us is the application.
	Watch   func(*bpf.Host, bpf.Watch) error
	ID, Gen uint64
	Enforce bool
	Only    []uint16
	Exclude []uint16
	Bypass  [2]uint16 // source ports that the rule lets pass from this host; zero: none
	Adopt   bool      // the backend is in the kernel already: keep its counts and rule
	// PIDs lists the processes of a backend that the installation of another version may have; nil: it has not.
	PIDs func() []int
	// Dead tells whether a backend's owner and its CMD are known to have died: what they left is removed.
	Dead func(id uint64) bool
	Log  *slog.Logger
}

// newKernelDatapath installs what the host lacks and registers the backend. Nothing is touched in the path of a
// connection until refuse: an open backend without targets is SK_PASS.
func newKernelDatapath(o kernelOptions) (_ *kernelDatapath, err error) {
	host := o.Host
	if host == nil {
		if host, err = bpf.Install(o.BPF); err != nil {
			return nil, err
		}
	}
	k := &kernelDatapath{
		opts: o.BPF, host: host, shared: o.Host != nil, watchMore: o.Watch, id: o.ID, log: o.Log,
		rule:  bpf.BackendRule{Action: bpf.ActionOpen, Enforce: o.Enforce, Gen: o.Gen, Standby: true, Bypass: o.Bypass},
		w:     bpf.Watch{Backend: o.ID, Gen: o.Gen, Only: o.Only, Exclude: o.Exclude},
		hintc: make(chan hint, 16), taken: map[netip.AddrPort]error{},
	}
	k.ctx, k.cancel = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			err = errors.Join(err, k.close(!o.Adopt))
		}
	}()
	ns := o.NetNS
	if ns == nil {
		if ns, err = os.Open("/proc/thread-self/ns/net"); err != nil {
			return nil, fmt.Errorf("open network namespace: %w", err)
		}
		defer ns.Close()
	}
	if err := k.addSpace(int(ns.Fd()), o.NetNS == nil); err != nil {
		return nil, err
	}
	if err := k.takeOver(o.PIDs); err != nil {
		return nil, err
	}
	if old, ok, err := host.Backend(o.ID); err != nil {
		return nil, err
	} else if ok && o.Adopt {
		k.rule = old
		k.rule.Gen = o.Gen
		if o.Bypass != ([2]uint16{}) {
			k.rule.Bypass = o.Bypass
		}
		if old.Action == bpf.ActionOpen { // else a drain runs, which keeps what it began with
			k.rule.Enforce = o.Enforce
		}
		if k.rule != old {
			if err := host.SetBackend(o.ID, k.rule); err != nil {
				return nil, err
			}
		}
	} else {
		if ok { // left by an owner that died with its CMD
			if err := host.RemoveBackend(o.ID); err != nil {
				return nil, err
			}
		}
		if err := host.SetBackend(o.ID, k.rule); err != nil {
			return nil, err
		}
	}
	if err := k.sweep(o.Dead); err != nil {
		return nil, err
	}
	if !host.Guarded() {
		k.why = append(k.why, "counts rest on one hook alone on this kernel: another sock_ops program that overwrites callback flags would make them too high")
	}
	if o.Ring != nil {
		k.ring = o.Ring
		if err := k.ring.follow(k); err != nil {
			return nil, err
		}
	} else {
		if k.events, err = host.Events(o.ID); err != nil {
			return nil, err
		}
		k.wg.Go(func() { read(k.events, k.log, k.hear) })
	}
	if k.missedBase, err = k.missed(); err != nil {
		return nil, err
	}
	if err := k.watchSelf(); err != nil {
		return nil, err
	}
	return k, nil
}

// watchSelf watches all that descends from us, which is CMD's: as a subreaper we are an ancestor of what CMD orphans
// too. CMD itself is watched as well, for the time when we are gone.
func (k *kernelDatapath) watchSelf() error {
	if k.watchMore != nil {
		return k.watchMore(k.host, k.watchRule())
	}
	tgid, start, err := bpf.Self()
	if err != nil {
		return err
	}
	w := k.watchRule()
	w.NotSelf = true
	return k.host.WatchProcess(tgid, start, w)
}

func (k *kernelDatapath) watchRule() bpf.Watch {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.w
}

func (k *kernelDatapath) renew(gen uint64, enforce bool) error {
	k.mu.Lock()
	last := k.watched
	if gen == k.w.Gen {
		last = 0
	}
	k.w.Gen = gen
	k.mu.Unlock()
	err := k.setRule(func(r *bpf.BackendRule) { r.Gen, r.Enforce = gen, enforce })
	if last != 0 {
		// Its number may be another process's soon.
		err = errors.Join(err, k.host.UnwatchProcess(last))
	}
	return errors.Join(err, k.watchSelf())
}

// sweep removes the backends of the dead.
func (k *kernelDatapath) sweep(dead func(uint64) bool) error {
	ids, err := k.host.Backends()
	if err != nil {
		return err
	}
	for _, id := range ids {
		if id != k.id && dead != nil && dead(id) {
			k.log.Info("remove what a dead owner left in the kernel", "backend_id", id)
			if err := k.host.RemoveBackend(id); err != nil {
				return err
			}
		}
	}
	return nil
}

// addSpace takes a network namespace in: the admission program is linked there.
func (k *kernelDatapath) addSpace(fd int, own bool) error {
	ns, err := k.host.AttachNetNS(fd)
	if err != nil {
		return err
	}
	sp := &space{id: ns.ID, fd: -1}
	o := probes.DiagOptions{NetNS: -1, TagMapFD: k.host.TagMapFD()}
	if !own {
		if sp.fd, err = dupFD(fd); err != nil {
			return err
		}
		o.NetNS = sp.fd
	}
	if sp.diag, err = probes.OpenDiag(o); err != nil {
		closeFD(sp.fd)
		return err
	}
	k.mu.Lock()
	k.sps = append(k.sps, sp)
	k.mu.Unlock()
	return nil
}

// space returns the namespace of that id, looking for it among the processes of the tree if it is new: CMD may have
// moved into one of its own.
func (k *kernelDatapath) space(id uint64) (*space, error) {
	k.mu.Lock()
	for _, sp := range k.sps {
		if sp.id == id {
			k.mu.Unlock()
			return sp, nil
		}
	}
	k.mu.Unlock()
	for _, pid := range k.pids() {
		f, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", pid))
		if err != nil {
			continue // it has exited, or is another user's
		}
		got, err := bpf.NetNSID(int(f.Fd()))
		if err == nil && got == id {
			err = k.addSpace(int(f.Fd()), false)
			f.Close()
			if err != nil {
				return nil, err
			}
			return k.space(id)
		}
		f.Close()
	}
	return nil, fmt.Errorf("network namespace %d of a listener has no living process of this backend", id)
}

// read hands on events until their reader is closed.
func read(events *bpf.EventReader, log *slog.Logger, hear func(bpf.Event)) {
	for {
		e, err := events.Read()
		if errors.Is(err, os.ErrClosed) {
			return
		}
		if err != nil {
			log.Warn("read kernel events", "err", err)
			return
		}
		hear(e)
	}
}

// hear turns an event of the kernel into a hint.
func (k *kernelDatapath) hear(e bpf.Event) {
	if e.Type == bpf.EventSignal {
		k.mu.Lock()
		early := k.early
		k.mu.Unlock()
		if early != nil {
			early.seen(e)
		}
		return
	}
	h := hintListeners
	if e.Type == bpf.EventZero {
		h = hintZero
	}
	select {
	case k.hintc <- h:
	default:
		// A full channel makes its reader list the listeners all the same; zero takes the place of one such hint.
		if h == hintZero {
			select {
			case <-k.hintc:
			default:
			}
			select {
			case k.hintc <- h:
			default:
			}
		}
	}
}

// ring reads the events of many backends.
type ring struct {
	events *bpf.EventReader
	done   chan struct{}

	mu   sync.Mutex
	of   map[uint64]*kernelDatapath // by backend
	next *batch                     // of those who want to follow while others do
	busy sync.Mutex                 // held during a call of Follow
}

// batch is a call of Follow for several backends: each waits for a grace period of the kernel.
type batch struct {
	ids  []uint64
	done chan struct{}
	err  error
}

// openRing begins to read. What a backend's kernel says is handed to the datapath that follows.
func openRing(h *bpf.Host, log *slog.Logger) (*ring, error) {
	events, err := h.Ring()
	if err != nil {
		return nil, err
	}
	r := &ring{events: events, done: make(chan struct{}), of: map[uint64]*kernelDatapath{}}
	go func() {
		defer close(r.done)
		read(events, log, func(e bpf.Event) {
			r.mu.Lock()
			k := r.of[e.Backend]
			r.mu.Unlock()
			if k != nil {
				k.hear(e)
			}
		})
	}()
	return r, nil
}

func (r *ring) follow(k *kernelDatapath) error {
	r.mu.Lock()
	r.of[k.id] = k
	b, first := r.next, false
	if b == nil {
		b, first = &batch{done: make(chan struct{})}, true
		r.next = b
	}
	b.ids = append(b.ids, k.id)
	r.mu.Unlock()
	if !first {
		<-b.done
		return b.err
	}
	r.busy.Lock()
	defer r.busy.Unlock()
	r.mu.Lock()
	r.next = nil // whoever comes now is too late for this one
	r.mu.Unlock()
	b.err = r.events.Follow(b.ids...)
	close(b.done)
	return b.err
}

// forget drops a datapath, unless another one has the backend by now.
func (r *ring) forget(k *kernelDatapath) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.of[k.id] == k {
		delete(r.of, k.id)
	}
}

func (r *ring) close() error {
	err := r.events.Close()
	<-r.done
	return err
}

func (k *kernelDatapath) name() string       { return datapathKernel }
func (k *kernelDatapath) guarded() bool      { return k.host.HasAdmission() }
func (k *kernelDatapath) hints() <-chan hint { return k.hintc }

func (k *kernelDatapath) warnings(g *glance) []string {
	var broken string
	var foreign []string
	if g == nil || g.hostwide(k) != nil {
		broken, foreign = k.broken(), k.foreign()
	} else {
		broken = k.brokenBy(g.on, g.gone)
		if sps := k.spaces(); len(sps) > 0 {
			var ok bool
			if foreign, ok = g.foreign[sps[0].id]; !ok {
				foreign = k.foreign()
				g.foreign[sps[0].id] = foreign
			}
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	why := append([]string(nil), k.why...)
	if broken != "" {
		why = append(why, broken)
	}
	if k.unseen != "" {
		why = append(why, k.unseen+": counts are unknown")
	}
	if k.elsewhere != nil {
		why = append(why, k.elsewhere.Error()+": counts are unknown")
	}
	if k.rival != "" {
		why = append(why, k.rival+" has another owner on this host already, an agent or a run, which counts its connections and drains it: leave it to one of them; counts are unknown here")
	}
	for _, err := range k.taken {
		why = append(why, err.Error())
	}
	return append(why, foreign...)
}

// foreign names the programs of others that could overrule admission or disturb the census, and what that means.
func (k *kernelDatapath) foreign() (why []string) {
	sps := k.spaces()
	if len(sps) == 0 {
		return nil
	}
	fd := sps[0].fd
	if fd < 0 {
		ns, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			return nil // then nothing of ours is attached either, which is said
		}
		defer ns.Close()
		fd = int(ns.Fd())
	}
	progs, err := bpf.Foreign(k.opts, fd)
	if err != nil {
		return []string{err.Error()}
	}
	for _, p := range progs {
		if p.Name != "admission" && p.Name != "census_sockops" { // another installation of Ebb touches its own backends only
			why = append(why, "another's "+p.String()+": "+foreignMeans(p))
		}
	}
	return why
}

// foreignMeans says what a program of another can do to ours. The kernel runs every sk_lookup program, and a socket that
// any of them has selected wins over a refusal (include/linux/filter.h, BPF_PROG_SK_LOOKUP_RUN_ARRAY).
func foreignMeans(p bpf.ForeignProgram) string {
	switch {
	case p.Attach == "sk_lookup":
		return "a connection for which it selects a socket arrives there although admission is closed, and one that it drops fails although it is open"
	case p.Exclusive:
		return "it allows none beside it, so counts rest on one hook alone"
	}
	return "callback flags that it overwrites are put back at the next callback"
}

func (k *kernelDatapath) spaces() []*space {
	k.mu.Lock()
	defer k.mu.Unlock()
	return append([]*space(nil), k.sps...)
}

// pids are the application's processes.
func (k *kernelDatapath) pids() []int {
	k.mu.Lock()
	p := k.proc
	k.mu.Unlock()
	if p == nil {
		return nil
	}
	return p.descendants()
}

func (k *kernelDatapath) watch(ctx context.Context, p *process) error {
	k.mu.Lock()
	k.proc, k.rival = p, ""
	k.mu.Unlock()
	tgid, start, err := bpf.TaskID(p.pid)
	if err != nil {
		return err
	}
	err = k.host.WatchProcess(tgid, start, k.watchRule())
	if errors.Is(err, bpf.ErrTaken) {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.rival = fmt.Sprintf("process %d", p.pid)
		return nil // warnings says it
	}
	if err != nil {
		k.setUnseen("its process cannot be watched: " + err.Error())
		return err
	}
	k.mu.Lock()
	k.watched = tgid
	k.mu.Unlock()
	return k.adopt(ctx)
}

// adopt takes in listeners and connections that were there before the watch: inherited sockets, or all of a CMD that
// an earlier owner started. It repeats until a pass finds nothing new.
func (k *kernelDatapath) adopt(ctx context.Context) error {
	k.mu.Lock()
	queues := k.unseen == whyQueued // as of an incarnation that ended before it had looked
	k.mu.Unlock()
	for range 8 {
		ls, conns, err := k.adoptOnce()
		if errors.Is(err, bpf.ErrNotSupported) {
			k.mu.Lock()
			k.why = append(k.why, "sockets that were open before the watch cannot be adopted on this kernel")
			k.mu.Unlock()
			return nil
		}
		if errors.Is(err, bpf.ErrAdoptMPTCP) {
			k.setUnseen("an MPTCP listener was open before the watch, and its connections cannot be counted")
			return err
		}
		if err != nil {
			k.setUnseen("what was open before the watch cannot be adopted: " + err.Error())
			return err
		}
		queues = queues || ls > 0
		if ls+conns == 0 {
			break
		}
	}
	if queues {
		k.setUnseen(whyQueued)
		k.wg.Go(func() { k.adoptQueues(ctx) })
	}
	return nil
}

const whyQueued = "connections may wait in the accept queue of a listener that was open before the watch"

func (k *kernelDatapath) adoptOnce() (ls, conns int, err error) {
	w := k.watchRule()
	return k.host.Adopt(k.pids(), bpf.AdoptTarget{Backend: k.id, Gen: w.Gen, Only: w.Only, Exclude: w.Exclude})
}

func (k *kernelDatapath) setUnseen(why string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.unseen = why
}

// adoptPause lies between two looks at the accept queues. It also lets a connection that left its queue at the one get
// into its process's table before the other.
const adoptPause = 50 * time.Millisecond

// adoptQueues adopts what waited in the accept queues of adopted listeners: it has no file, and so cannot be seen, until
// it is accepted. A queue is first in, first out, so once it was seen empty all of them are in a process's table.
func (k *kernelDatapath) adoptQueues(ctx context.Context) {
	emptied := map[uint64]bool{}
	for wait(ctx, adoptPause) {
		waiting, err := k.waiting(emptied)
		if err == nil && waiting > 0 {
			continue
		}
		if err == nil && wait(ctx, adoptPause) {
			var ls, conns int
			if ls, conns, err = k.adoptOnce(); err == nil && ls+conns == 0 {
				k.setUnseen("")
				return
			}
		}
		if err != nil {
			k.log.Warn("adopt what waits in the accept queues; counts stay unknown", "err", err)
			return
		}
	}
}

// waiting is how many connections wait in the accept queues that were not seen empty yet.
func (k *kernelDatapath) waiting(emptied map[uint64]bool) (n int, err error) {
	for _, p := range k.pids() {
		err := k.host.EachFile(p, func(f bpf.File) {
			switch {
			case f.State != tcpListen || f.Tag.Backend != k.id || emptied[f.Cookie]:
			case f.AckBacklog == 0:
				emptied[f.Cookie] = true
			default:
				n += int(f.AckBacklog)
			}
		})
		if err != nil && !errors.Is(err, unix.ESRCH) { // else it has exited
			return 0, err
		}
	}
	return n, nil
}

func (k *kernelDatapath) listeners(context.Context) ([]listener, bool, error) {
	cs, err := k.host.Counts(k.id)
	if err != nil {
		return nil, false, err
	}
	ls := make([]listener, 0, len(cs))
	known := true
	for _, c := range cs {
		if c.Open < 0 || c.Ending < 0 || c.Closing < 0 {
			known = false // a count below zero is no count
		}
		ls = append(ls, listener{
			cookie: c.Cookie, addr: c.Address.AddrPort, v6only: c.V6Only, mptcp: c.MPTCP, netns: c.Address.NetNS, live: c.Listening,
			open: c.Open, ending: c.Ending, closing: c.Closing, total: c.Total,
		})
	}
	missed, err := k.missed()
	if err != nil {
		return ls, false, err
	}
	return ls, known && k.trusted(missed, k.broken()), nil
}

// trusted tells whether the counts are all that is open.
func (k *kernelDatapath) trusted(missed uint64, broken string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.unseen == "" && k.rival == "" && k.elsewhere == nil && missed == k.missedBase && broken == ""
}

// broken says why what this host counts or refuses cannot be believed any more; "" while it can.
func (k *kernelDatapath) broken() string { return k.brokenBy(bpf.Control(k.opts)) }

// brokenBy is broken for what bpf.Control has answered.
func (k *kernelDatapath) brokenBy(on bool, err error) string {
	switch {
	case err != nil:
		return "Ebb was removed from this kernel (`ebb cleanup`): counts and admission are gone"
	case !on && k.closed():
		return "the kill switch is on (`ebb open --all`): admission is open, so a zero would not stay one"
	}
	return ""
}

func (k *kernelDatapath) closed() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.rule.Action != bpf.ActionOpen
}

// missed counts the listeners of this host that found a map full, and so are in no list at all. Whose they were cannot
// be told, so growth makes every count unknown.
func (k *kernelDatapath) missed() (uint64, error) {
	errs, err := k.host.Errors()
	return errs["counts_full"] + errs["tags_nomem"], err
}

// sampleOf is what the classes need of a socket as the kernel's own structures show it.
func sampleOf(f bpf.File) probes.Sample {
	s := probes.Sample{
		PID: f.PID, FD: f.FD, Inode: f.Inode, Cookie: f.Cookie, Listener: f.Tag.Cookie, State: f.State, Local: f.Local, Remote: f.Remote,
		Unread: f.RcvNxt - f.CopiedSeq, Unacked: f.SndNxt - f.SndUna, Unsent: f.WriteSeq - f.SndNxt,
		BytesReceived: f.BytesReceived, BytesSent: f.BytesSent, BytesAcked: f.BytesAcked, DataSegsIn: f.DataSegsIn, DataSegsOut: f.DataSegsOut,
		RcvNxtSndWl1: int32(f.RcvNxt - f.SndWl1), SndWnd: f.SndWnd, LastSent: f.LastSent, LastRecv: f.LastReceived, LastAck: f.LastAck,
		Shutdown: f.Shutdown, MPTCP: f.Protocol == unix.IPPROTO_MPTCP,
	}
	if f.Tag.Since > 0 {
		s.Since = bpf.BootNow() - f.Tag.Since
	}
	return s
}

func (k *kernelDatapath) cover(l listener) error {
	if _, err := k.space(l.netns); err != nil {
		return err
	}
	if k.closed() { // it will be refused from the next line on
		if _, err := k.shadow(context.Background(), []listener{l}); err != nil {
			return err
		}
	}
	err := k.host.Admit(bpf.Address{NetNS: l.netns, AddrPort: l.addr}, l.v6only, k.id)
	if _, steering := k.steering(); steering && err == nil {
		err = k.setTargets([]listener{l})
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if errors.Is(err, bpf.ErrTaken) {
		k.taken[l.addr] = fmt.Errorf("%s is shared with another backend: its new connections cannot be turned away for this one alone (%w)", l.addr, err)
		return nil
	}
	delete(k.taken, l.addr)
	return err
}

func (k *kernelDatapath) uncover(l listener) {
	// The kernel may have begun to steer by itself: what is steered outlives the application's listener.
	if r, ok, err := k.host.Backend(k.id); err != nil || ok && r.Action == bpf.ActionSteer {
		return
	}
	if err := k.host.Dismiss(bpf.Address{NetNS: l.netns, AddrPort: l.addr}, k.id); err != nil {
		k.log.Debug("dismiss rule", "address", l.addr.String(), "err", err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.taken, l.addr)
}

func (k *kernelDatapath) overruled() string {
	for _, sp := range k.spaces() {
		fd := sp.fd
		if fd < 0 {
			ns, err := os.Open("/proc/thread-self/ns/net")
			if err != nil {
				return ""
			}
			defer ns.Close()
			fd = int(ns.Fd())
		}
		progs, err := bpf.Foreign(k.opts, fd)
		if err != nil {
			k.log.Debug("look for other programs", "err", err)
			continue
		}
		for _, p := range progs {
			// One of another installation of Ebb refuses and steers its own backends only.
			if p.Attach == "sk_lookup" && p.Name != "admission" {
				return p.String()
			}
		}
	}
	return ""
}

func (k *kernelDatapath) samples(ctx context.Context, pids []int, covered map[uint64]listener) ([]probes.Sample, bool, error) {
	last := k.sampled.Load()
	ss := make([]probes.Sample, 0, last+last/16)
	for _, pid := range pids {
		err := k.host.EachFile(pid, func(f bpf.File) {
			if _, ok := covered[f.Tag.Cookie]; ok && f.Tag.Backend == k.id && f.State != tcpListen {
				ss = append(ss, sampleOf(f))
			}
		})
		if errors.Is(err, bpf.ErrNotSupported) {
			return k.walk(ctx, pids, covered)
		}
		if err != nil && !errors.Is(err, unix.ESRCH) { // else it has exited
			return nil, false, err
		}
	}
	k.sampled.Store(int64(len(ss)))
	return ss, true, nil
}

// walk is the look by sock_diag for kernels without task_file.
func (k *kernelDatapath) walk(ctx context.Context, pids []int, covered map[uint64]listener) ([]probes.Sample, bool, error) {
	var all []probes.Sample
	for _, sp := range k.spaces() {
		ss, _, err := located(ctx, k, sp, pids, covered)
		if err != nil {
			return nil, false, err
		}
		all = append(all, ss...)
	}
	return all, false, nil
}

// connections tells by the tags whose a connection is.
func (k *kernelDatapath) connections(ctx context.Context, sp *space, covered map[uint64]listener, info bool) ([]probes.Socket, error) {
	ports := portsOf(covered)
	if len(ports) == 0 {
		return nil, nil
	}
	socks, err := sp.diag.Dump(ctx, probes.Filter{States: connStates, LocalPorts: ports, Info: info, Tags: true})
	if err != nil {
		return nil, err
	}
	own := socks[:0]
	for _, s := range socks {
		t, err := bpf.DecodeTag(s.Tag)
		if err != nil || t.Backend != k.id {
			continue
		}
		if _, ok := covered[t.Cookie]; ok {
			own = append(own, s)
		}
	}
	return own, nil
}

func (k *kernelDatapath) compare(ctx context.Context) (drifts []drift, still, ok bool, err error) {
	before, err := k.byCookie()
	if err != nil {
		return nil, false, true, err
	}
	seen := map[uint64]*drift{}
	for _, sp := range k.spaces() {
		socks, err := sp.diag.Dump(ctx, probes.Filter{States: connStates, Tags: true})
		if err != nil {
			return nil, false, true, err
		}
		for _, s := range socks {
			t, err := bpf.DecodeTag(s.Tag)
			if err != nil || t.Backend != k.id {
				continue
			}
			d := seen[t.Cookie]
			if d == nil {
				d = &drift{}
				seen[t.Cookie] = d
			}
			switch int(s.State) {
			case tcpEstablished, tcpCloseWait:
				d.open++
			case tcpFinWait2:
				d.closing++
			default:
				d.ending++
			}
		}
	}
	after, err := k.byCookie()
	if err != nil {
		return nil, false, true, err
	}
	still = true
	for cookie, c := range after {
		if before[cookie] != c {
			still = false
			continue
		}
		d := drift{cookie: cookie, open: -c.Open, ending: -c.Ending, closing: -c.Closing, total: c.Total, closed: c.Closed}
		if w := seen[cookie]; w != nil {
			d.open, d.ending, d.closing = d.open+w.open, d.ending+w.ending, d.closing+w.closing
		}
		if d.connections() > 0 {
			drifts = append(drifts, d)
		}
	}
	return drifts, still, true, nil
}

func (k *kernelDatapath) byCookie() (map[uint64]bpf.ListenerCount, error) {
	cs, err := k.host.Counts(k.id)
	m := make(map[uint64]bpf.ListenerCount, len(cs))
	for _, c := range cs {
		m[c.Cookie] = c
	}
	return m, err
}

func (k *kernelDatapath) correct(d drift) (bool, error) {
	cs, err := k.byCookie()
	if err != nil {
		return false, err
	}
	c, ok := cs[d.cookie]
	if !ok || c.Total != d.total || c.Closed != d.closed {
		return false, nil
	}
	return k.host.Correct(c, d.open, d.ending, d.closing)
}

func (k *kernelDatapath) refuse(ctx context.Context, covered []listener, aside bool, until time.Duration) error {
	if !k.host.HasAdmission() {
		return errUnguarded
	}
	k.mu.Lock()
	taken := len(k.taken)
	k.mu.Unlock()
	if taken > 0 {
		return fmt.Errorf("%w: %d of its addresses are shared with another backend", errUnguarded, taken)
	}
	shared, err := k.shadow(ctx, covered)
	if err != nil {
		return err
	}
	if shared.IsValid() {
		return fmt.Errorf("%w: another process listens on %s too, and a refusal would meet its new connections as well", errUnguarded, shared)
	}
	return k.setRule(func(r *bpf.BackendRule) { r.Action, r.Until, r.Aside = bpf.ActionRefuse, until, aside })
}

func (k *kernelDatapath) steer(ctx context.Context, covered []listener, targets map[netip.AddrPort][]uint64, until time.Duration) error {
	if !k.host.HasAdmission() {
		return errUnguarded
	}
	k.mu.Lock()
	taken := len(k.taken)
	if targets != nil {
		k.targets = targets
	}
	k.mu.Unlock()
	if taken > 0 {
		return fmt.Errorf("%w: %d of its addresses are shared with another backend", errUnguarded, taken)
	}
	// An address that another process listens on as well (SO_REUSEPORT) is steered too: nobody is turned away by that.
	if _, err := k.shadow(ctx, covered); err != nil {
		return err
	}
	if err := k.setTargets(covered); err != nil {
		return err
	}
	return k.setRule(func(r *bpf.BackendRule) { r.Action, r.Until, r.Standby = bpf.ActionSteer, until, true })
}

// setTargets says where the listeners' connections go while the rule steers. Until then nothing follows it.
func (k *kernelDatapath) setTargets(ls []listener) error {
	k.mu.Lock()
	targets := k.targets
	k.mu.Unlock()
	if targets == nil {
		return nil
	}
	for _, l := range ls {
		to, ok := targets[l.addr]
		if !ok {
			to = targets[netip.AddrPort{}]
		}
		if err := k.host.SetTargets(bpf.Address{NetNS: l.netns, AddrPort: l.addr}, to[:min(len(to), bpf.MaxTargets)]); err != nil {
			return err
		}
	}
	return nil
}

// target stays in the kernel's map of targets until its socket closes: another backend may steer to it too.
func (k *kernelDatapath) target(fd int, sp *space) (uint64, error) {
	return k.host.AddTarget(fd, sp.id)
}

func (k *kernelDatapath) steering() (time.Duration, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.rule.Until, k.rule.Action == bpf.ActionSteer
}

func (k *kernelDatapath) steered() (uint64, bool) {
	a, err := k.host.Listeners(k.id)
	return a.Steered, err == nil
}

func (k *kernelDatapath) refusing() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.rule.Action == bpf.ActionRefuse
}

func (k *kernelDatapath) disown(fds []int) error {
	_, err := k.host.Disown(fds)
	if errors.Is(err, bpf.ErrNotSupported) {
		return nil // they stay counted until they close, and the drain waits for them
	}
	return err
}

func (k *kernelDatapath) setRule(change func(*bpf.BackendRule)) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	r := k.rule
	change(&r)
	if err := k.host.SetBackend(k.id, r); err != nil {
		return err
	}
	k.rule = r
	return nil
}

// shadow lets other processes' listeners through that sit on a more specific address of a port for which we have a
// wildcard rule: the rule would otherwise catch their connections too. Those that come later get their pass entry in the
// kernel, at LISTEN. A listener of theirs on an address of ours (SO_REUSEPORT) no rule can tell apart: shared names one.
func (k *kernelDatapath) shadow(ctx context.Context, covered []listener) (shared netip.AddrPort, err error) {
	type at struct {
		netns uint64
		addr  netip.AddrPort
	}
	mine := map[uint64]bool{}
	rules := map[at]listener{}
	var ports []uint16
	for _, l := range covered {
		mine[l.cookie] = true
		rules[at{l.netns, l.addr}] = l
		ports = append(ports, l.addr.Port())
	}
	if len(ports) == 0 {
		return shared, nil
	}
	for _, sp := range k.spaces() {
		socks, err := sp.diag.Dump(ctx, probes.Filter{States: states(tcpListen), LocalPorts: ports, Tags: true})
		if err != nil {
			return shared, err
		}
		for _, s := range socks {
			if t, err := bpf.DecodeTag(s.Tag); mine[s.Cookie] || err == nil && t.Backend == k.id {
				continue
			}
			if _, ok := rules[at{sp.id, s.Local}]; ok {
				shared = s.Local
				continue
			}
			_, v4 := rules[at{sp.id, netip.AddrPortFrom(netip.IPv4Unspecified(), s.Local.Port())}]
			any6, v6 := rules[at{sp.id, netip.AddrPortFrom(netip.IPv6Unspecified(), s.Local.Port())}]
			if s.Local.Addr().Is4() {
				v6 = v6 && !any6.v6only
			} else {
				v4 = false
			}
			if !v4 && !v6 {
				continue
			}
			if err := k.host.Pass(bpf.Address{NetNS: sp.id, AddrPort: s.Local}, k.id); err != nil {
				return shared, err
			}
		}
	}
	return shared, nil
}

func (k *kernelDatapath) admit() error {
	return k.setRule(func(r *bpf.BackendRule) { r.Action, r.Until = bpf.ActionOpen, 0 })
}

func (k *kernelDatapath) mark(begun, deadline time.Duration) error {
	return k.host.SetDrain(k.id, bpf.DrainMark{Gen: k.watchRule().Gen, Begun: begun, Deadline: deadline, Draining: true})
}

func (k *kernelDatapath) refused() (int64, bool) {
	a, err := k.host.Listeners(k.id)
	return int64(a.Refused), err == nil
}

func (k *kernelDatapath) unmark() error { return k.host.ClearDrain(k.id) }

func (k *kernelDatapath) forget(cookie uint64) bool {
	if err := k.host.Forget(cookie); err != nil {
		k.log.Debug("forget listener", "err", err)
		return false
	}
	return true
}

func (k *kernelDatapath) close(remove bool) error {
	var err error
	if k.ring != nil {
		k.ring.forget(k)
	}
	if k.events != nil {
		err = k.events.Close()
	}
	k.cancel()
	k.wg.Wait()
	if remove {
		err = errors.Join(err, k.host.RemoveBackend(k.id, k.pids()...))
		if !k.shared {
			_, rerr := k.host.Release()
			err = errors.Join(err, rerr)
		}
	}
	for _, sp := range k.spaces() {
		if sp.diag != nil {
			err = errors.Join(err, sp.diag.Close())
		}
		closeFD(sp.fd)
	}
	if k.shared {
		return err
	}
	return errors.Join(err, k.host.Close())
}

var _ datapath = (*kernelDatapath)(nil)

func dupFD(fd int) (int, error) {
	n, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return -1, fmt.Errorf("keep network namespace: %w", err)
	}
	return n, nil
}

func closeFD(fd int) {
	if fd >= 0 {
		unix.Close(fd)
	}
}

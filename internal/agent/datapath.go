// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"net/netip"
	"time"

	"github.com/ebbproxy/ebb/probes"
)

// listener is one listening socket of a backend, as a datapath knows it.
type listener struct {
	cookie  uint64
	addr    netip.AddrPort
	v6only  bool
	mptcp   bool
	netns   uint64 // 0 where the datapath cannot tell namespaces apart
	pid     int    // a process that holds it, 0 if not looked up
	live    bool   // still listening
	open    int64  // established and not yet closed by our side
	ending  int64  // our FIN is out and not all is acknowledged
	closing int64  // our FIN is out and all is acknowledged
	total   uint64 // connections ever established
}

func (l listener) loopback() bool { return l.addr.Addr().Unmap().IsLoopback() }

// hint says that something may have changed. Levels are read, never carried by a hint.
type hint uint8

const (
	hintListeners hint = iota + 1 // a listener came or went
	hintZero                      // a listener's last connection has ended
)

// errUnguarded is what a datapath without admission answers.
var errUnguarded = errors.New("this datapath cannot close admission")

// datapathKernel is the name of the datapath in the kernel.
const datapathKernel = "bpf"

// datapath is how Ebb counts a backend's connections and decides where new ones go: by BPF in the kernel, or with
// no privilege at all by sock_diag. Its methods may be called from any goroutine.
type datapath interface {
	name() string
	// guarded tells whether admission can be closed, so that a zero stays a zero.
	guarded() bool
	// warnings are degradations a user should know of.
	warnings(g *glance) []string
	// watch takes the listeners that the application opens from now on, and adopts those it has.
	watch(ctx context.Context, p *process) error
	// renew makes what is watched from now on a generation's, and says whether its rule is enforced.
	renew(gen uint64, enforce bool) error
	// hints delivers until the datapath is closed. A hint may be dropped when nobody listens; levels never are.
	hints() <-chan hint
	// listeners lists those of the backend, with their counts. known is false when the counts cannot be trusted.
	listeners(ctx context.Context) (ls []listener, known bool, err error)
	// cover prepares the listener so that refuse will take it in.
	cover(l listener) error
	// uncover takes that back: nothing of ours listens there any more.
	uncover(l listener)
	// overruled names a program of somebody else that may overrule a closed admission; "" if there is none.
	overruled() string
	// samples looks at each established connection of the listeners that the processes hold. full tells that the
	// samples carry what only task_file sees.
	samples(ctx context.Context, pids []int, covered map[uint64]listener) (ss []probes.Sample, full bool, err error)
	// connections lists those of the covered listeners in a namespace, accepted or not, and nobody else's.
	connections(ctx context.Context, sp *space, covered map[uint64]listener, info bool) ([]probes.Socket, error)
	// refuse closes admission for every covered listener in one write; the rule ends by itself at until (boot clock).
	refuse(ctx context.Context, covered []listener, aside bool, until time.Duration) error
	// admit opens it again.
	admit() error
	// steer sends the new connections of the covered listeners to targets, in one write. targets are by the listener's
	// address, or under the zero address for all the others; nil leaves them as they are. The rule ends by itself at
	// until, and before that when no target is left.
	steer(ctx context.Context, covered []listener, targets map[netip.AddrPort][]uint64, until time.Duration) error
	// target makes a listening socket of the namespace one that can be steered to.
	target(fd int, sp *space) (cookie uint64, err error)
	// steering tells whether connections are steered, and until when; an earlier owner may have begun it.
	steering() (until time.Duration, ok bool)
	// steered counts the connections that were sent to a target so far; ok is false where none can be.
	steered() (n uint64, ok bool)
	// refusing tells whether admission is closed for good.
	refusing() bool
	// disown takes connections that this process has accepted out of the backend's counts.
	disown(fds []int) error
	// mark tells the kernel that a drain runs, so that it sends zero events and a successor finds the deadline.
	mark(begun, deadline time.Duration) error
	unmark() error
	// refused counts the connections turned away so far; ok is false where none can be.
	refused() (n int64, ok bool)
	// spaces are the network namespaces that the backend's listeners are in.
	spaces() []*space
	// compare counts the backend's sockets by a walk and lists the listeners whose census differs. still is false when
	// counts moved meanwhile, so that not all could be compared; ok is false where a walk is all there is.
	compare(ctx context.Context) (drifts []drift, still, ok bool, err error)
	// correct adds a difference to the census, unless that has moved since.
	correct(drift) (done bool, err error)
	// forget drops what is kept of a listener that has closed and has no connection left; false if it is still kept.
	forget(cookie uint64) bool
	// close releases what this process holds; with remove, also all that the backend has in the kernel.
	close(remove bool) error
}

// space is a network namespace in which the backend listens.
type space struct {
	id   uint64
	fd   int // -1: the namespace we live in
	diag *probes.Diag
}

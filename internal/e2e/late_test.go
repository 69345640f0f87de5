// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/bpf"
	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/loadtest"
	"github.com/ebbproxy/ebb/internal/netns"
	"github.com/ebbproxy/ebb/internal/netnstest"
	"github.com/ebbproxy/ebb/probes"
)

// Where the two instances of a departure listen, in one network namespace.
const (
	leavingPort = 8080
	stayingPort = 8081
)

// departure is a server that leaves, beside another of its kind that stays, while a balancer goes on sending half of all
// connections to it for three seconds more.
type departure struct {
	name string
	argv func(t *testing.T, name string, port int) []string
	stop syscall.Signal // what it leaves by; gracefully unless it dies
	dies bool           // at that signal, with what it has accepted
	// early is argv for when it hears of the stop at once, nil if that is argv. Go's own net/http.Server.Shutdown
	// loses a request that it reads after it, which nobody but the server can mend.
	early func(t *testing.T, name string, port int) []string
	full  bool // it accepts more slowly than connections come: its accept queue is full
	// mptcp: servers and clients speak MPTCP. Such a listener cannot be steered to, so the relay carries.
	mptcp bool
	rate  float64 // new connections per second, to both and on both address families
}

// departures are the rows of the table.
var departures = []departure{
	{name: "go", argv: goInstance("-graceful"), early: goInstance("-patient"), stop: syscall.SIGTERM, rate: 600},
	{name: "go, accept queue full", argv: goInstance("-graceful"), early: goInstance("-patient"), stop: syscall.SIGTERM, full: true, rate: 1000},
	{name: "go, MPTCP, accept queue full", argv: goInstance("-graceful", "-mptcp"), early: goInstance("-patient", "-mptcp"), stop: syscall.SIGTERM, full: true, mptcp: true, rate: 600},
	{name: "go that dies", argv: goInstance(), stop: syscall.SIGTERM, dies: true, rate: 600},
	{name: "nginx", argv: packagedInstance(loadtest.Nginx), stop: syscall.SIGQUIT, rate: 600},
	{name: "haproxy", argv: packagedInstance(loadtest.HAProxy), stop: syscall.SIGUSR1, rate: 600},
	{name: "node that dies", argv: packagedInstance(loadtest.Node), stop: syscall.SIGTERM, dies: true, rate: 400},
	{name: "python that dies", argv: packagedInstance(loadtest.Python), stop: syscall.SIGTERM, dies: true, rate: 100},
}

func goInstance(flags ...string) func(*testing.T, string, int) []string {
	return func(t *testing.T, name string, port int) []string {
		t.Helper()
		return goServer(t, fmt.Sprintf("[::]:%d", port), append([]string{"-name", name}, flags...)...)
	}
}

func packagedInstance(f func(string, int, loadtest.ServerOptions) ([]string, error)) func(*testing.T, string, int) []string {
	return func(t *testing.T, name string, port int) []string {
		t.Helper()
		return packaged(f)(t, port, loadtest.ServerOptions{Host: "::", Name: name})
	}
}

// leaving is the command line of the instance that leaves. Accepting 250 a second is half of what comes.
func (d departure) leaving(t *testing.T, early bool) []string {
	t.Helper()
	instance := d.argv
	if early && d.early != nil {
		instance = d.early
	}
	argv := instance(t, "leaving", leavingPort)
	if d.full {
		argv = append(argv, "-accept-delay", "4ms")
	}
	return argv
}

// crowd makes short the backlog of the instance that start begins, if it is to be full, and of no other.
func (d departure) crowd(t *testing.T, n *lan, start func()) {
	t.Helper()
	if !d.full {
		start()
		return
	}
	setSysctl(t, n.ns, "core/somaxconn", "128")
	start()
	listens(t, n.ns, leavingPort)
	setSysctl(t, n.ns, "core/somaxconn", "4096")
}

// load is what the balancer sends, to both instances by IPv4 and IPv6 in turn.
func (d departure) load(n *lan) *load {
	n.t.Helper()
	var targets []loadtest.Target
	for _, port := range []uint16{leavingPort, stayingPort} {
		for _, addr := range []string{n.v4(port), n.v6(port)} {
			targets = append(targets, loadtest.Target{Name: addr, Addr: addr})
		}
	}
	o := loadtest.Options{Targets: targets, Rate: d.rate, Drain: 3 * time.Second, ConnectTimeout: patience}
	dial := n.client.DialContext
	if d.mptcp {
		dial = func(ctx context.Context, network, addr string) (c net.Conn, err error) {
			err = netns.Do(n.client.Fd(), func() error {
				var nd net.Dialer
				nd.SetMultipathTCP(true)
				c, err = nd.DialContext(ctx, network, addr)
				return err
			})
			return c, err
		}
	}
	l := loadBy(n.t, dial, o)
	l.warm(500)
	if d.full {
		eventually(n.t, "its accept queue is full", func() bool { return queued(n.t, n.ns, leavingPort) >= 128 })
	}
	return l
}

// clock shows a moment in the same way as the events do.
const clock = "15:04:05.000000"

func loadBy(t *testing.T, dial func(context.Context, string, string) (net.Conn, error), o loadtest.Options) *load {
	t.Helper()
	o.Dial = dial
	var failed atomic.Int64
	o.OnResult = func(r loadtest.Result) {
		if r.Verdict.Failure() && failed.Add(1) <= 5 {
			t.Logf("%s: from %s, connected %s, until %s: %v", r.Verdict, r.Start.Format(clock), r.Connected.Format(clock), r.End.Format(clock), r.Err)
		}
	}
	g, err := loadtest.New(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	l := &load{Generator: g, t: t, stop: cancel, done: make(chan error, 1)}
	go func() { l.done <- g.Run(ctx) }()
	t.Cleanup(cancel)
	return l
}

// queued is how many connections wait to be accepted on a port.
func queued(t *testing.T, ns *netnstest.NS, port uint16) (n int) {
	t.Helper()
	for _, s := range walk(t, ns, 1<<probes.StateListen, port) {
		n += int(s.RQueue)
	}
	return n
}

// drop tells the balancer, which is slow to learn, that an instance has left.
func drop(t *testing.T, n *lan, l *load) {
	t.Helper()
	if err := errors.Join(l.Drop(n.v4(leavingPort)), l.Drop(n.v6(leavingPort))); err != nil {
		t.Fatal(err)
	}
}

// learnt waits until the balancer has learnt, and returns what became of every connection.
func learnt(t *testing.T, n *lan, l *load) loadtest.Report {
	t.Helper()
	sent := func() int64 {
		r := l.Report()
		var sent int64
		for _, addr := range []string{n.v4(leavingPort), n.v6(leavingPort)} {
			if s := r.Targets[addr]; s != nil {
				sent += s.Attempts
			}
		}
		return sent
	}
	eventually(t, "nothing goes to the instance that left", func() bool {
		before, all := sent(), l.Report().Requests
		eventually(t, "a hundred more requests", func() bool { return l.Report().Requests >= all+100 })
		return sent() == before
	})
	return l.end()
}

// departed wants that every connection was answered in full, and that some were by the instance that stayed.
func departed(t *testing.T, rep loadtest.Report) {
	t.Helper()
	t.Logf("%d requests, %d failed: %s; served by %v", rep.Requests, rep.Failed, verdicts(rep), rep.ServedBy)
	if rep.Failed != 0 || rep.Unsent != 0 {
		t.Errorf("%d of %d failed, %d were not sent: %s", rep.Failed, rep.Requests, rep.Unsent, verdicts(rep))
	}
	if rep.ServedBy["leaving"] == 0 || rep.ServedBy["staying"] == 0 {
		t.Errorf("served by %v, want both", rep.ServedBy)
	}
}

// A server leaves, and the balancer learns three seconds late. Unaided each late connection fails. Steered without care,
// what waits in its accept queue does. Settled before it is told, or with its queue adopted where it closes at once, none
// does: of a server that dies at its signal by the former alone, since nothing saves what it has accepted.
func TestT4_LateConnections(t *testing.T) {
	for _, d := range departures {
		t.Run(d.name, func(t *testing.T) {
			if long || d.full && !d.mptcp {
				t.Run("nothing", d.nothing)
			}
			if d.full && !d.mptcp {
				t.Run("steer", d.steer)
			}
			if !d.dies {
				t.Run("steer and adopt", func(t *testing.T) {
					d.aided(t, true, "--notify", "signal:"+strings.TrimPrefix(signalName(d.stop), "SIG"))
				})
			}
			t.Run("settle, then signal", func(t *testing.T) {
				d.aided(t, false, "--flush", "signal:"+strings.TrimPrefix(signalName(d.stop), "SIG"))
			})
		})
	}
}

func signalName(s syscall.Signal) string {
	switch s {
	case syscall.SIGQUIT:
		return "SIGQUIT"
	case syscall.SIGUSR1:
		return "SIGUSR1"
	}
	return "SIGTERM"
}

// nothing is the departure without Ebb. It shows that the load would notice.
func (d departure) nothing(t *testing.T) {
	n := newLAN(t)
	var leaving *netnstest.Cmd
	d.crowd(t, n, func() { leaving = program(t, n.ns, d.leaving(t, true)...) })
	program(t, n.ns, d.argv(t, "staying", stayingPort)...)
	listens(t, n.ns, leavingPort, stayingPort)
	l := d.load(n)
	drop(t, n, l)
	if err := leaving.Process.Signal(d.stop); err != nil {
		t.Fatal(err)
	}
	rep := learnt(t, n, l)
	t.Logf("%d requests, %d failed: %s", rep.Requests, rep.Failed, verdicts(rep))
	if rep.Failed == 0 {
		t.Error("nothing failed without help: the test shows nothing")
	}
}

// steer is the departure with the kernel's rule alone, as whoever only switches does it.
func (d departure) steer(t *testing.T) {
	n := newLAN(t)
	var leaving *netnstest.Cmd
	d.crowd(t, n, func() { leaving = program(t, n.ns, d.leaving(t, true)...) })
	ln := n.ns.Listen(t, "tcp", fmt.Sprintf("[::]:%d", stayingPort))
	hs := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-Served-By", "staying")
		_, _ = io.WriteString(w, "hello\n") // the client is gone if this fails
	})}
	go hs.Serve(ln)
	t.Cleanup(func() { hs.Close() })
	listens(t, n.ns, leavingPort, stayingPort)

	host, err := bpf.Install(bpf.Options{Dir: n.bpffs})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := host.Close(); err != nil {
			t.Error(err)
		}
		if _, err := bpf.Cleanup(bpf.Options{Dir: n.bpffs}); err != nil {
			t.Error(err)
		}
	})
	ns, err := host.AttachNetNS(n.ns.Fd())
	if err != nil {
		t.Fatal(err)
	}
	raw, err := ln.(*net.TCPListener).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var cookie uint64
	var inner error
	if err := raw.Control(func(fd uintptr) { cookie, inner = host.AddTarget(int(fd), ns.ID) }); err != nil || inner != nil {
		t.Fatal(errors.Join(err, inner))
	}
	addr := bpf.Address{NetNS: ns.ID, AddrPort: netip.MustParseAddrPort(fmt.Sprintf("[::]:%d", leavingPort))}
	const backend = 7
	rule := bpf.BackendRule{Action: bpf.ActionOpen, Enforce: true, Standby: true}
	if err := errors.Join(host.SetBackend(backend, rule), host.Admit(addr, false, backend), host.SetTargets(addr, []uint64{cookie})); err != nil {
		t.Fatal(err)
	}
	l := d.load(n)
	drop(t, n, l)
	rule.Action, rule.Until = bpf.ActionSteer, bpf.BootNow()+time.Hour
	if err := host.SetBackend(backend, rule); err != nil {
		t.Fatal(err)
	}
	waiting := queued(t, n.ns, leavingPort)
	if err := leaving.Process.Signal(d.stop); err != nil {
		t.Fatal(err)
	}
	rep := learnt(t, n, l)
	t.Logf("%d waited to be accepted at the flip; %d requests, %d failed: %s", waiting, rep.Requests, rep.Failed, verdicts(rep))
	if rep.Failed == 0 {
		t.Error("nothing failed although an accept queue was closed: the test shows nothing")
	}
	for v := range rep.Verdicts {
		if v == loadtest.ConnectRefused {
			t.Errorf("a steered connection was refused: %s", verdicts(rep))
		}
	}
}

// aided is the departure under `ebb run`. The quiet period is longer than a busy machine keeps the load from sending.
func (d departure) aided(t *testing.T, early bool, flags ...string) {
	n := newLAN(t)
	common := []string{"--grace", "90s", "--flush-timeout", "5s", "--reserve", "3s", "--quiet-period", "2s", "--service", "web", "--on-new", "auto"}
	staying := n.run("staying", common, d.argv(t, "staying", stayingPort)...)
	var r *supervised
	d.crowd(t, n, func() { r = n.run("leaving", with(common, flags...), d.leaving(t, early)...) })
	l := d.load(n)
	drop(t, n, l)
	r.signal(syscall.SIGTERM)
	if code := r.wait(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	departed(t, learnt(t, n, l))
	if t.Failed() {
		for _, c := range []string{"SyncookiesSent", "SyncookiesRecv", "SyncookiesFailed", "ListenOverflows", "ListenDrops", "TCPReqQFullDoCookies", "TCPAbortFailed"} {
			t.Logf("%s %d", c, netstat(t, n.ns, c))
		}
	}
	got, chosen := r.drained(), r.result().Backend.OnNew
	want := drain.OnNewSteer
	if d.mptcp {
		want = drain.OnNewRelay
	}
	if chosen.Chosen != want || got.Outcome != drain.OutcomeDrained {
		t.Errorf("got %s (%s), outcome %s, want %s and drained", chosen.Chosen, chosen.Why, got.Outcome, want)
	}
	if got.Late == nil || got.Late.Redirected == 0 {
		t.Errorf("late connections: got %+v, want redirected ones", got.Late)
	} else {
		t.Logf("late: %+v, took %v", *got.Late, got.Ended.Sub(got.Begun))
	}
	staying.signal(syscall.SIGTERM)
	if code := staying.wait(); code != 0 {
		t.Errorf("exit code of the other %d, want 0", code)
	}
}

// listens waits until something listens on each port.
func listens(t *testing.T, ns *netnstest.NS, ports ...uint16) {
	t.Helper()
	for _, port := range ports {
		eventually(t, fmt.Sprintf("something listens on port %d", port), func() bool { return len(walk(t, ns, 1<<probes.StateListen, port)) > 0 })
	}
}

// Twenty clients whose last ACK comes after their server has closed its listener, and gone, are served, and so is who comes
// later; the one by the instance that stays and through the relay, the other by it alone.
func TestR6_LastAckAfterTheClose(t *testing.T) {
	h := newHost(t)
	w := newWire(t, h)
	common := with(wideBudget, "--service", "web", "--on-new", "auto")
	h.run("staying", common, goServer(t, fmt.Sprintf("%s:%d", w.server, stayingPort))...)
	r := h.run("leaving", with(common, "--notify", "signal:TERM"), goServer(t, fmt.Sprintf("%s:%d", w.server, leavingPort), "-graceful")...)
	child := r.child()
	const clients = 20
	var ps []*peer
	for range clients {
		p := w.peer(leavingPort)
		if err := p.halfOpen(); err != nil {
			t.Fatal(err)
		}
		ps = append(ps, p)
	}
	r.signal(syscall.SIGTERM)
	eventually(t, "the server has gone", func() bool { return !living(child) })
	select { // three quiet periods
	case <-r.done:
		t.Fatal("the drain is over with handshakes under way")
	case <-time.After(time.Second):
	}
	ps = append(ps, w.peer(leavingPort)) // a SYN after the flip
	if err := ps[clients].halfOpen(); err != nil {
		t.Fatalf("a client that comes late: %v", err)
	}
	errs := make(chan error, len(ps))
	for _, p := range ps {
		go func() { errs <- p.complete() }()
	}
	for range ps {
		if err := <-errs; err != nil {
			t.Errorf("a client that was connecting at the stop: %v", err)
		}
	}
	if code := r.wait(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	d := r.drained()
	if d.Outcome != drain.OutcomeDrained || d.Late == nil || d.Late.Adopted != clients {
		t.Errorf("got outcome %s, late %+v, want drained with %d adopted", d.Outcome, d.Late, clients)
	}
}

// Handshakes that a SYN cookie began at the leaving server, and that leave no trace in the kernel, are completed by the
// relay's listener, which has sent a cookie itself before anybody was sent there.
func TestR6_CookieHandshakesAtTheRelay(t *testing.T) {
	h := newHost(t)
	w := newWire(t, h)
	common := with(wideBudget, "--service", "web", "--on-new", "relay")
	h.run("staying", common, goServer(t, fmt.Sprintf("%s:%d", w.server, stayingPort))...)
	r := h.run("leaving", common, goServer(t, fmt.Sprintf("%s:%d", w.server, leavingPort))...)
	const clients = 20
	var ps []*peer
	setSysctl(t, h.ns, "ipv4/tcp_syncookies", "2")
	for range clients {
		p := w.peer(leavingPort)
		if err := p.halfOpen(); err != nil {
			t.Fatal(err)
		}
		ps = append(ps, p)
	}
	if n := len(walk(t, h.ns, 1<<probes.StateSynRecv, leavingPort)); n != 0 {
		t.Fatalf("%d half-open requests are in the table: these are no cookies", n)
	}
	// As on a host where they are sent only when the table is full, which it is not any more.
	setSysctl(t, h.ns, "ipv4/tcp_syncookies", "1")
	r.signal(syscall.SIGTERM)
	r.phase(drain.PhaseSettle)
	errs := make(chan error, clients)
	for _, p := range ps {
		go func() { errs <- p.complete() }()
	}
	for range ps {
		if err := <-errs; err != nil {
			t.Errorf("a client whose handshake is a cookie: %v", err)
		}
	}
	if code := r.wait(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	if d := r.drained(); d.Outcome != drain.OutcomeDrained || d.Late == nil || d.Late.Relayed != clients {
		t.Errorf("got outcome %s, late %+v, want drained with %d relayed", d.Outcome, d.Late, clients)
	}
}

// Nobody else of the service can be reached: connections are admitted until they pause, as ever, and it is said.
func TestT3_NobodyToRedirectTo(t *testing.T) {
	h := newHost(t)
	r := h.run("web", with(tightBudget, "--on-new", "auto"), goServer(t, "127.0.0.1:8080", "-graceful")...)
	l := h.load(loadtest.Options{Targets: []loadtest.Target{{Name: "web", Addr: "127.0.0.1:8080"}}, Rate: 50, Drain: time.Second})
	l.warm(50)
	if err := l.Drop("web"); err != nil {
		t.Fatal(err)
	}
	r.signal(syscall.SIGTERM)
	if code := r.wait(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	if rep := l.end(); rep.Failed != 0 {
		t.Errorf("%d of %d failed: %s", rep.Failed, rep.Requests, verdicts(rep))
	}
	if d, c := r.drained(), r.result().Backend.OnNew; c.Chosen != drain.OnNewAdmit || c.Why == "" || d.Outcome != drain.OutcomeDrained {
		t.Errorf("got %s (%q), %s, want admit with its reason, drained", c.Chosen, c.Why, d.Outcome)
	}
	if e := r.all(drain.EventLate); len(e) != 1 || e[0].Fields["action"] != string(drain.OnNewAdmit) {
		t.Errorf("events: got %+v, want one that says admit", e)
	}
}

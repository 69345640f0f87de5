// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/loadtest"
	"github.com/ebbproxy/ebb/internal/netnstest"
)

// latePolicy is a budget whose quiet period is longer than any pause of the loads below.
func latePolicy(more ...string) []string {
	return append([]string{"--service", "web", "--grace", "60s", "--flush-timeout", "5s", "--reserve", "3s", "--quiet-period", "1s", "--protocol", "http1"}, more...)
}

// clean wants that nothing of a load failed.
func clean(t *testing.T, rep loadtest.Report) {
	t.Helper()
	for v, tally := range rep.Verdicts {
		if v.Failure() {
			t.Errorf("%d × %s (%s)", tally.Count, v, tally.Example)
		}
	}
	if rep.OK == 0 {
		t.Error("nothing was answered: the test shows nothing")
	}
}

// lateOf is what the report of a run says of its late connections.
func (r *supervised) lateOf() (api.Backend, api.Late) {
	r.h.t.Helper()
	b := r.result().Backend
	if b.Drain == nil || b.Drain.Late == nil {
		r.h.t.Fatalf("the report has no late connections: %+v", b.Drain)
	}
	return b, *b.Drain.Late
}

// chosen wants that the backend's drain did that with late connections.
func chosen(t *testing.T, b api.Backend, want drain.OnNew) {
	t.Helper()
	if b.OnNew.Chosen != want || b.OnNew.Why == "" {
		t.Errorf("on_new: got %s (%s), want %s and why", b.OnNew.Chosen, b.OnNew.Why, want)
	}
}

// Two runs of one service in one network namespace: the one that leaves has its late connections steered to the other, in
// the kernel. A balancer goes on sending to it for three seconds, and nothing fails; then the other one goes, to a third.
func TestC1_SteeredToASibling(t *testing.T) {
	for _, family := range []string{"ipv4", "ipv6"} {
		t.Run(family, func(t *testing.T) {
			n := newLAN(t)
			at := func(port uint16) string {
				if family == "ipv6" {
					return n.v6(port)
				}
				return n.v4(port)
			}
			one := n.run("one", latePolicy(), goServer(t, at(8080))...)
			two := n.run("two", latePolicy(), goServer(t, at(8081))...)
			l := loadFrom(t, n.client, loadtest.Options{
				Targets: []loadtest.Target{{Name: "one", Addr: at(8080)}, {Name: "two", Addr: at(8081)}},
				Rate:    300, KeepAlive: 10, Slow: 5, Drain: 3 * time.Second,
			})
			l.warm(500)
			if err := l.Drop("one"); err != nil {
				t.Fatal(err)
			}
			one.signal(syscall.SIGTERM)
			if code := one.wait(); code != 0 {
				t.Errorf("exit code %d, want 0", code)
			}
			clean(t, l.end())
			b, late := one.lateOf()
			chosen(t, b, drain.OnNewSteer)
			if !strings.Contains(b.OnNew.Why, "two") {
				t.Errorf("why: got %q, want the sibling's name in it", b.OnNew.Why)
			}
			if late.Redirected == 0 || late.Refused != 0 {
				t.Errorf("got %+v, want redirected ones and none refused", late)
			}
			if b.Drain.Outcome != drain.OutcomeDrained {
				t.Errorf("outcome: got %s, want drained", b.Drain.Outcome)
			}
			two.signal(syscall.SIGTERM)
			two.wait()
			if b, _ := two.lateOf(); b.OnNew.Chosen != drain.OnNewAdmit || !strings.Contains(b.OnNew.Why, "no other backend") {
				t.Errorf("the last one: got %s (%s), want admit, since nobody is left", b.OnNew.Chosen, b.OnNew.Why)
			}
		})
	}
}

// Clients that came late keep their connections after their answers, as a pool does. The relay retires them as the
// application's own idle connections are: each sees an orderly end, and the drain does not last to its deadline.
func TestG5_RelayedPoolLeaves(t *testing.T) {
	n := newLAN(t)
	peer := newElsewhere(t, n.host, 9000)
	r := n.run("web", latePolicy("--peer", peer.v4), goServer(t, n.v4(8080))...)
	hold := holdOpen(t, n.client, n.v4(8080))
	r.must("drain", struct{}{})
	conns := make([]*httpConn, 5)
	for i := range conns {
		conns[i] = dialHTTP(t, n.client, n.v4(8080))
		conns[i].get(t, "/")
	}
	hold.Close()
	for i, c := range conns {
		if _, err := c.br.ReadByte(); err != io.EOF {
			t.Errorf("connection %d: got %v, want its end", i, err)
		}
	}
	r.wait()
	b, late := r.lateOf()
	chosen(t, b, drain.OnNewRelay)
	if !b.Drain.Ended.Before(b.Drain.Deadline) || late.Ended != 0 || late.Relayed != 5 {
		t.Errorf("got %+v, ended %v before its deadline, want 5 relayed to their end and time left", late, b.Drain.Deadline.Sub(*b.Drain.Ended))
	}
}

// elsewhere is a server in a namespace of its own, reached from the host over a link.
type elsewhere struct {
	v4, v6 string
	ns     *netnstest.NS
}

func newElsewhere(t *testing.T, h *host, port uint16, flags ...string) elsewhere {
	t.Helper()
	e := elsewhere{ns: netnstest.New(t)}
	link := netnstest.Veth(t, h.ns, e.ns)
	e.v4, e.v6 = net.JoinHostPort(link.B.V4.String(), fmt.Sprint(port)), net.JoinHostPort(link.B.V6.String(), fmt.Sprint(port))
	program(t, e.ns, goServer(t, net.JoinHostPort("::", fmt.Sprint(port)), flags...)...)
	eventually(t, "the peer to listen", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		c, err := h.ns.DialContext(ctx, "tcp", e.v6)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
	return e
}

// A backend whose only peer is on another machine has its late connections relayed there, by IPv4 and by IPv6, and none of
// them fails; a peer that does not answer is not chosen.
func TestC1_RelayedToAPeerElsewhere(t *testing.T) {
	for _, family := range []string{"ipv4", "ipv6"} {
		t.Run(family, func(t *testing.T) {
			n := newLAN(t)
			peer := newElsewhere(t, n.host, 9000)
			at, to, none := n.v4(8080), peer.v4, net.JoinHostPort("127.0.0.1", "1")
			if family == "ipv6" {
				at, to, none = n.v6(8080), peer.v6, net.JoinHostPort("::1", "1")
			}
			r := n.run("web", latePolicy("--peer", none, "--peer", to), goServer(t, at, "-graceful")...)
			l := loadFrom(t, n.client, loadtest.Options{
				Targets: []loadtest.Target{{Name: "web", Addr: at}}, Rate: 200, Slow: 5, Drain: 3 * time.Second,
			})
			l.warm(300)
			if err := l.Drop("web"); err != nil {
				t.Fatal(err)
			}
			r.signal(syscall.SIGTERM)
			if code := r.wait(); code != 0 {
				t.Errorf("exit code %d, want 0", code)
			}
			clean(t, l.end())
			b, late := r.lateOf()
			chosen(t, b, drain.OnNewRelay)
			if !strings.Contains(b.OnNew.Why, to) || strings.Contains(b.OnNew.Why, none) {
				t.Errorf("why: got %q, want %s in it and not %s", b.OnNew.Why, to, none)
			}
			if late.Redirected == 0 || late.Refused != 0 || late.Failed != 0 || late.Relayed == 0 {
				t.Errorf("got %+v, want relayed ones, none refused and none failed", late)
			}
			if e := r.await(drain.EventLate); e.Fields["action"] != string(drain.OnNewRelay) {
				t.Errorf("event: got %+v, want action relay", e)
			}
		})
	}
}

// echoed sends n random bytes over a connection of app and wants them back.
func echoed(c net.Conn, n int, seed uint64) error {
	if err := c.SetDeadline(time.Now().Add(2 * patience)); err != nil {
		return err
	}
	rng := rand.New(rand.NewPCG(seed, 1))
	out := make([]byte, n)
	for i := range out {
		out[i] = byte(rng.Uint32())
	}
	sent := make(chan error, 1)
	go func() {
		_, err := c.Write(out)
		sent <- err
	}()
	in := make([]byte, n)
	if _, err := io.ReadFull(c, in); err != nil {
		return fmt.Errorf("read: %w", err)
	}
	if err := <-sent; err != nil {
		return fmt.Errorf("write: %w", err)
	}
	if !bytes.Equal(in, out) {
		return errors.New("other bytes came back than were sent")
	}
	return nil
}

// The owner of a drain is killed while its relay carries transfers. They go on, and what comes new meanwhile is carried
// too; the next owner of that name finds the relay and its counts, and takes the drain to its end.
func TestC24_OwnerKilledWithRelayedTransfers(t *testing.T) {
	n := newLAN(t)
	other := netnstest.New(t)
	link := netnstest.Veth(t, n.ns, other)
	program(t, other, app(t, "listen=[::]:9000")...)
	to := net.JoinHostPort(link.B.V4.String(), "9000")
	eventually(t, "the peer listens", func() bool {
		c, err := n.ns.DialContext(t.Context(), "tcp", to)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
	flags := []string{"--service", "web", "--grace", "120s", "--flush-timeout", "5s", "--reserve", "3s", "--quiet-period", "300ms", "--idle", "wait", "--peer", to}
	argv := app(t, "listen="+n.v4(8080))
	r := n.run("web", flags, argv...)
	pid := r.child()
	endAfter(t, pid)
	direct := n.dialFrom(n.client, n.v4(8080))
	alive(t, direct)
	r.must("drain", struct{}{})
	const many = 60
	conns := make([]net.Conn, many)
	for i := range conns {
		conns[i] = n.dialFrom(n.client, n.v4(8080))
		alive(t, conns[i])
	}
	var wg sync.WaitGroup
	errs := make(chan error, 2*many)
	for i, c := range conns[:many/2] {
		wg.Go(func() { errs <- echoed(c, 4<<20, uint64(i)) })
	}
	r.kill9()
	fresh := n.dialFrom(n.client, n.v4(8080))
	alive(t, fresh)
	for i, c := range conns[many/2:] {
		wg.Go(func() { errs <- echoed(c, 1<<20, uint64(1000+i)) })
	}
	again := n.start("web", flags, argv...)
	again.adopted(pid)
	wg.Wait()
	close(errs)
	for err := range errs {
		if err != nil {
			t.Errorf("a relayed transfer: %v", err)
		}
	}
	var b api.Backend
	eventually(t, "the next owner to know what is carried", func() bool {
		b = again.backend()
		return b.Drain != nil && b.Drain.Late != nil && b.Drain.Late.Carried != nil && *b.Drain.Late.Carried == many+1
	})
	chosen(t, b, drain.OnNewRelay)
	later := n.dialFrom(n.client, n.v4(8080))
	alive(t, later)
	alive(t, direct)
	for _, c := range append(conns, direct, fresh, later) {
		c.Close()
	}
	again.wait()
	d := again.drained()
	if d.Outcome != drain.OutcomeDrained {
		t.Errorf("outcome: got %s, want drained", d.Outcome)
	}
	if d.Late == nil || d.Late.Redirected < many+2 || d.Late.Failed != 0 {
		t.Errorf("late: got %+v, want %d redirected and none failed", d.Late, many+2)
	}
}

// The owner of a drain that steers is killed: the kernel goes on steering with nobody alive, although the application has
// closed meanwhile, and the next owner takes the drain to its end.
func TestC24_OwnerKilledWhileItSteers(t *testing.T) {
	n := newLAN(t)
	n.run("two", []string{"--service", "web"}, app(t, "listen="+n.v4(8081), "name=two")...)
	flags := []string{"--service", "web", "--grace", "120s", "--flush-timeout", "5s", "--reserve", "3s", "--quiet-period", "300ms", "--idle", "wait"}
	argv := app(t, "listen="+n.v4(8080))
	r := n.run("one", flags, argv...)
	pid := r.child()
	endAfter(t, pid)
	direct := n.dialFrom(n.client, n.v4(8080))
	alive(t, direct)
	r.must("drain", struct{}{})
	alive(t, n.dialFrom(n.client, n.v4(8080)))
	r.kill9()
	alive(t, n.dialFrom(n.client, n.v4(8080)))
	again := n.start("one", flags, argv...)
	again.adopted(pid)
	alive(t, n.dialFrom(n.client, n.v4(8080)))
	var b api.Backend
	eventually(t, "the next owner to go on", func() bool {
		b = again.backend()
		return b.Drain != nil && b.Drain.Late != nil && b.Drain.Late.Redirected == 3
	})
	chosen(t, b, drain.OnNewSteer)
	if b.Counts.Open == nil || *b.Counts.Open != 1 {
		t.Errorf("counts: got %s, want the one direct connection", shown(b))
	}
	direct.Close()
	again.wait()
	d := again.drained()
	if d.Outcome != drain.OutcomeDrained || d.Late == nil || d.Late.Redirected != 3 {
		t.Errorf("got %s, %+v, want drained, 3 redirected", d.Outcome, d.Late)
	}
}

// An MPTCP listener, which Go opens unless told otherwise, fits no socket map: late connections go to a sibling that has
// one through the relay, and it is said why.
func TestC1_RelayedToAnMPTCPSibling(t *testing.T) {
	n := newLAN(t)
	at := func(port string) string { return net.JoinHostPort("::", port) }
	one := n.run("one", latePolicy(), goServer(t, at("8080"), "-mptcp", "-patient")...)
	two := n.run("two", latePolicy(), goServer(t, at("8081"), "-mptcp")...)
	if ls := two.backend().Listeners; len(ls) != 1 || ls[0].Protocol != "mptcp" {
		t.Skipf("no MPTCP here: %+v", ls)
	}
	l := loadFrom(t, n.client, loadtest.Options{
		Targets: []loadtest.Target{{Name: "v4", Addr: n.v4(8080)}, {Name: "v6", Addr: n.v6(8080)}}, Rate: 200, Slow: 4, Drain: 3 * time.Second,
	})
	l.warm(300)
	for _, name := range []string{"v4", "v6"} {
		if err := l.Drop(name); err != nil {
			t.Fatal(err)
		}
	}
	one.signal(syscall.SIGTERM)
	one.wait()
	clean(t, l.end())
	b, late := one.lateOf()
	chosen(t, b, drain.OnNewRelay)
	if late.Redirected == 0 || late.Failed != 0 || late.Relayed == 0 {
		t.Errorf("got %+v, want relayed ones and none failed", late)
	}
}

// A relay that outlives its owner and its CMD is ended by a clean-up, once it carries nothing: nothing is left behind.
func TestG2_CleanupEndsALeftRelay(t *testing.T) {
	n := newLAN(t)
	peer := newElsewhere(t, n.host, 9000)
	r := n.run("web", []string{"--service", "web", "--grace", "120s", "--peer", peer.v4}, goServer(t, n.v4(8080))...)
	pid := r.child()
	endAfter(t, pid)
	hold := holdOpen(t, n.client, n.v4(8080))
	r.must("drain", struct{}{})
	carried := dialHTTP(t, n.client, n.v4(8080))
	carried.get(t, "/")
	r.kill9()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	carried.get(t, "/")
	if out := n.must("cleanup"); !strings.Contains(out, "web.relay") {
		t.Errorf("clean-up: got %q, want the relay's socket in it", out)
	}
	carried.get(t, "/") // it goes on
	carried.Close()
	hold.Close()
	n.nothingLeft("after the clean-up")
}

// dialFrom connects from a namespace.
func (h *host) dialFrom(ns *netnstest.NS, addr string) net.Conn {
	h.t.Helper()
	ctx, cancel := context.WithTimeout(h.t.Context(), patience)
	defer cancel()
	c, err := ns.DialContext(ctx, "tcp", addr)
	if err != nil {
		h.t.Fatalf("connect to %s: %v", addr, err)
	}
	h.t.Cleanup(func() { c.Close() })
	return c
}

// A balancer's checker on the service's port sees a backend that drains, whatever happens to other late connections: by
// source it is reset, by path it reads 503; and others are carried to a peer. Without either flag the status says that the
// checker will not see it.
func TestG8_HealthChecksSeeTheDrain(t *testing.T) {
	check := func(n *lan, from *netnstest.NS, addr, path string) (status string) {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		c, err := from.DialContext(ctx, "tcp", addr)
		if err != nil {
			return "reset" // the RST may come before connect() has returned
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(patience))
		if _, err := fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", path); err != nil {
			return "reset"
		}
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			return "reset"
		}
		resp.Body.Close()
		return resp.Status[:3]
	}
	for _, tt := range []struct {
		name           string
		flags          func(checker string) []string
		checks, others string
		warned         bool
	}{
		{"by source", func(c string) []string { return []string{"--health-from", c} }, "reset", "200", false},
		{"by path", func(string) []string { return []string{"--health-path", "/healthz"} }, "503", "200", false},
		{"neither", func(string) []string { return nil }, "200", "200", true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := newLAN(t)
			checker := netnstest.New(t)
			link := netnstest.Veth(t, checker, n.ns)
			at := net.JoinHostPort("0.0.0.0", "8080")
			own := net.JoinHostPort(link.B.V4.String(), "8080")
			r := n.run("web", with(wideBudget, append(tt.flags(link.A.V4.String()), "--service", "web")...), goServer(t, at)...)
			// A sibling that could be steered to: the checks would go there with all else.
			n.run("other", []string{"--service", "web"}, goServer(t, net.JoinHostPort("0.0.0.0", "8081"))...)
			if got := check(n, checker, own, "/healthz"); got != "200" {
				t.Fatalf("before the drain: got %s, want 200", got)
			}
			hold := holdOpen(t, n.client, n.v4(8080))
			r.must("drain", struct{}{})
			for range 3 {
				if got := check(n, checker, own, "/healthz"); got != tt.checks {
					t.Errorf("the checker: got %s, want %s", got, tt.checks)
				}
				if got := check(n, n.client, n.v4(8080), "/"); got != tt.others {
					t.Errorf("a client: got %s, want %s", got, tt.others)
				}
			}
			b := r.backend()
			warned := strings.Contains(strings.Join(b.Warnings, " "), "--health-from")
			if warned != tt.warned {
				t.Errorf("warned of health checks: got %v, want %v: %q", warned, tt.warned, b.Warnings)
			}
			if !tt.warned {
				chosen(t, b, drain.OnNewRelay)
				eventually(t, "the checks to be counted", func() bool {
					l := r.backend().Drain.Late
					return l != nil && l.Health == 3 && l.Failed == 0
				})
				if m := r.metrics(); !strings.Contains(m, `ebb_late_connections_total{action="health",result="ok",service="web"} 3`) {
					t.Errorf("metrics: no three health checks in\n%s", m)
				}
			}
			hold.Close()
			r.wait()
		})
	}
}

// A balancer goes on sending for twenty times the quiet period: the drain follows the arrivals, every late connection is
// served, and the drain ends once they pause, by far before its deadline.
func TestC48_ABalancerThatGoesOn(t *testing.T) {
	n := newLAN(t)
	peer := newElsewhere(t, n.host, 9000)
	r := n.run("web", []string{"--grace", "120s", "--quiet-period", "500ms", "--service", "web", "--peer", peer.v4}, goServer(t, n.v4(8080), "-graceful")...)
	l := loadFrom(t, n.client, loadtest.Options{
		Targets: []loadtest.Target{{Name: "web", Addr: n.v4(8080)}}, Rate: 50, Drain: 10 * time.Second,
	})
	l.warm(50)
	if err := l.Drop("web"); err != nil {
		t.Fatal(err)
	}
	r.signal(syscall.SIGTERM)
	r.phase(drain.PhaseFlush)
	flushed := l.Report().OK
	r.wait()
	clean(t, l.end())
	_, late := r.lateOf()
	if got := l.Report().OK; got <= flushed {
		t.Errorf("%d answers at the flush, %d at the end: the drain did not wait for the balancer", flushed, got)
	}
	d := r.drained()
	if d.Outcome != drain.OutcomeDrained || late.Ended != 0 || late.Failed != 0 {
		t.Errorf("got %s, %+v, want drained, nothing ended or failed", d.Outcome, late)
	}
	if left := d.Deadline.Sub(*d.Ended); left <= 0 {
		t.Errorf("the drain lasted to its deadline")
	}
}

// A request that is not idempotent is carried once: each runs on one backend, and what is answered is what ran.
func TestR18_RelayedPostRunsOnce(t *testing.T) {
	n := newLAN(t)
	peer := newElsewhere(t, n.host, 9000)
	r := n.run("blue", with(wideBudget, "--service", "web", "--peer", peer.v4), goServer(t, n.v4(8080))...)
	hold := holdOpen(t, n.client, n.v4(8080))
	blue := dialHTTP(t, n.client, n.v4(8080))
	post := func(int64) string {
		return "POST /flush HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
	}
	s := newStorm(t, n.client, n.v4(8080), 4, post)
	eventually(t, "posts run", func() bool { return s.served.Load() > 100 })
	for range 2 {
		r.must("drain", struct{}{})
		served := s.served.Load()
		eventually(t, "posts are relayed", func() bool { return s.served.Load() > served+100 })
		r.must("undrain", struct{}{})
		served = s.served.Load()
		eventually(t, "posts run here again", func() bool { return s.served.Load() > served+100 })
	}
	shots := s.end()
	for _, x := range shots {
		if !x.served {
			t.Fatalf("a post was not answered: %v", x.err)
		}
	}
	onBlue, onPeer := blue.stats(t).Flushes, dialHTTP(t, n.ns, peer.v4).stats(t).Flushes
	if onBlue+onPeer != int64(len(shots)) || onBlue == 0 || onPeer == 0 {
		t.Errorf("%d posts ran %d times here and %d times at the peer", len(shots), onBlue, onPeer)
	}
	// D10: a redirection is no failure, in no counter.
	b := r.backend()
	if l := b.Drain.Late; l == nil || l.Failed != 0 || l.Refused != 0 {
		t.Errorf("late: got %+v, want none failed or refused", l)
	}
	hold.Close()
	blue.Close()
	r.signal(syscall.SIGTERM)
	r.wait()
}

// A redirection is not a failure: with late connections on, nothing that counts failures moves, the drain's outcome is
// drained, and neither events nor log warn.
func TestD10_ARedirectionIsNoFailure(t *testing.T) {
	n := newLAN(t)
	peer := newElsewhere(t, n.host, 9000)
	r := n.run("web", with(wideBudget, "--service", "web", "--peer", peer.v4, "--health-path", "/healthz"), goServer(t, n.v4(8080))...)
	hold := holdOpen(t, n.client, n.v4(8080))
	r.must("drain", struct{}{})
	for range 20 {
		c := dialHTTP(t, n.client, n.v4(8080))
		c.get(t, "/")
		c.Close()
	}
	eventually(t, "all to be counted", func() bool {
		l := r.backend().Drain.Late
		return l != nil && l.Relayed == 20
	})
	m := r.metrics()
	for _, want := range []string{
		`ebb_late_connections_total{action="relay",result="ok",service="web"} 20`,
		`ebb_late_connections_total{action="relay",result="failed",service="web"} 0`,
		`ebb_late_connections_total{action="refuse",result="failed",service="web"} 0`,
		`ebb_census_drift_total 0`,
		`ebb_held_connections{service="web"} 0`,
	} {
		if !strings.Contains(m, want+"\n") {
			t.Errorf("metrics: no line %s", want)
		}
	}
	hold.Close()
	if code := r.wait(); code != 0 {
		t.Errorf("exit code: got %d, want 0", code)
	}
	if d := r.drained(); d.Outcome != drain.OutcomeDrained {
		t.Errorf("outcome: got %s, want drained", d.Outcome)
	}
	if w := r.all(drain.EventWarning); len(w) > 0 {
		t.Errorf("the drain warned: %+v", w)
	}
}

// With nobody to serve, new connections are refused at once, or wait until somebody can: both are there. What waits is
// served, in full, by the sibling that comes.
func TestD9_NobodyToServe(t *testing.T) {
	t.Run("refuse", func(t *testing.T) {
		n := newLAN(t)
		r := n.run("web", with(wideBudget, "--service", "web", "--on-new", "refuse"), goServer(t, n.v4(8080))...)
		hold := holdOpen(t, n.client, n.v4(8080))
		r.must("drain", struct{}{})
		if served, refused := n.serves(n.v4(8080)); served || !refused {
			t.Errorf("got served %v, refused %v, want refused", served, refused)
		}
		hold.Close()
		r.wait()
	})
	t.Run("hold", func(t *testing.T) {
		n := newLAN(t)
		r := n.run("web", with(wideBudget, "--service", "web", "--on-new", "hold"), goServer(t, n.v4(8080))...)
		hold := holdOpen(t, n.client, n.v4(8080))
		r.must("drain", struct{}{})
		const many = 20
		conns := make([]*httpConn, many)
		for i := range conns {
			conns[i] = dialHTTP(t, n.client, n.v4(8080))
			conns[i].send(t, "/")
		}
		eventually(t, "all to be parked", func() bool {
			l := r.backend().Drain.Late
			return l != nil && l.Parked != nil && *l.Parked == many
		})
		if m := r.metrics(); !strings.Contains(m, `ebb_held_connections{service="web"} 20`) {
			t.Errorf("metrics: no 20 held connections")
		}
		n.run("next", []string{"--service", "web"}, goServer(t, n.v4(8081))...)
		for i, c := range conns {
			if _, err := c.answer(); err != nil {
				t.Errorf("parked connection %d: %v", i, err)
			}
			c.Close()
		}
		hold.Close()
		r.wait()
		if _, late := r.lateOf(); late.Failed != 0 || late.Relayed != many {
			t.Errorf("got %+v, want %d relayed and none failed", late, many)
		}
	})
}

// Many clients are told at once that their backend leaves and come back at once: every one of them is served elsewhere, on
// its first attempt.
func TestC15_AllReconnectAtOnce(t *testing.T) {
	n := newLAN(t)
	peer := newElsewhere(t, n.host, 9000)
	many, budget := 300, wideBudget
	if long {
		// A look at so many takes its time, with the race detector above all.
		many, budget = 10000, with(wideBudget, "--grace", "600s")
	}
	r := n.run("web", with(budget, "--service", "web", "--protocol", "http1", "--peer", peer.v4), goServer(t, n.v4(8080))...)
	conns := make([]*httpConn, many)
	for i := range conns {
		conns[i] = dialHTTP(t, n.client, n.v4(8080))
		conns[i].get(t, "/")
		conns[i].get(t, "/")
	}
	r.must("drain", struct{}{})
	var wg sync.WaitGroup
	var failed, served atomic.Int64
	// Each connect takes a thread in the client's namespace, and of thousands some would come to their request too late.
	threads := make(chan struct{}, 300)
	for _, c := range conns {
		wg.Go(func() {
			_, _ = io.Copy(io.Discard, c) // until the application has closed it
			c.Close()
			threads <- struct{}{}
			defer func() { <-threads }()
			n.client.Do(t, func() {
				if x := fire(n.v4(8080), "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"); x.served {
					served.Add(1)
				} else if failed.Add(1) <= 3 {
					t.Errorf("a client that came back: %v", x.err)
				}
			})
		})
	}
	wg.Wait()
	if served.Load() != int64(many) {
		t.Errorf("%d of %d clients were served when they came back", served.Load(), many)
	}
	r.wait()
	if _, late := r.lateOf(); late.Failed != 0 || late.Refused != 0 {
		t.Errorf("got %+v, want none failed or refused", late)
	}
}

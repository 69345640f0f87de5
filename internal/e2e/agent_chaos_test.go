// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/netns"
	"github.com/ebbproxy/ebb/internal/netnstest"
)

// expectation is what a new connection to a backend must meet.
type expectation uint64

const (
	anything expectation = iota // something is being done to it
	open
	closed
)

// chaotic is a backend that chaos is made with.
type chaotic struct {
	c    *chaos
	name string
	ns   *netnstest.NS
	port int
	p    *netnstest.Cmd
	gone chan struct{} // closed when p has ended

	drain   string // that runs as far as is known
	streams []*stream
	state   atomic.Uint64 // expectation, below a number that grows with each change
}

func (b *chaotic) addr() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(b.port)) }

func (b *chaotic) expect(e expectation) { b.state.Store((b.state.Load()>>2+1)<<2 | uint64(e)) }

// stream is a client that reads an endless answer. Its end before the client's own is an error, unless its server was ended.
type stream struct {
	conn  *httpConn
	bytes atomic.Int64
	over  atomic.Bool // the client ends it, or the server was killed
	done  chan struct{}
}

// chaos is what is done to a node, and what is known of it.
type chaos struct {
	*node
	t        *testing.T
	r        *rand.Rand
	backends []*chaotic
	live     []*daemon // agents that have not ended, the owner first
	frozen   *daemon
	all      []*daemon
	killed   bool // an agent was killed since the last check: what it said last may not have been read
	ended    map[string]drain.Outcome
	begun    map[string]bool
	did      []string

	stop    chan struct{}
	wg      sync.WaitGroup
	probes  atomic.Int64
	visits  atomic.Int64 // to the service
	crashes atomic.Int64 // odd while a server is being killed
	quiet   atomic.Bool  // nobody connects: it is being counted
}

func (c *chaos) note(format string, a ...any) {
	c.did = append(c.did, time.Now().Format("15:04:05.000 ")+fmt.Sprintf(format, a...))
}

// fail says what is wrong and what was done before.
func (c *chaos) fail(format string, a ...any) {
	c.t.Helper()
	c.t.Errorf("%s at %s", fmt.Sprintf(format, a...), time.Now().Format("15:04:05.000"))
}

// Agents are killed, stopped, ended, started beside each other and given torn journals at random moments, while backends in
// two namespaces drain, are taken back, crash and come back under load. After each round every count equals a walk, every
// admission is what it has to be, and has been all along, no connection was cut, and no drain had two ends. EBB_CHAOS is how
// long it goes on, EBB_SEED repeats one.
func TestD3_Chaos(t *testing.T) {
	long, seed := 30*time.Second, rand.Uint64()
	var err error
	if v := os.Getenv("EBB_CHAOS"); v != "" {
		if long, err = time.ParseDuration(v); err != nil {
			t.Fatal(err)
		}
	}
	if v := os.Getenv("EBB_SEED"); v != "" {
		if seed, err = strconv.ParseUint(v, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("chaos for %v; EBB_SEED=%d makes the same choices", long, seed)
	n := newNode(t, "")
	c := &chaos{
		node: n, t: t, r: rand.New(rand.NewPCG(seed, 0)), ended: map[string]drain.Outcome{}, begun: map[string]bool{}, stop: make(chan struct{}),
	}
	other := netnstest.New(t)
	for _, b := range []*chaotic{{name: "one", ns: n.ns, port: 8081}, {name: "two", ns: n.ns, port: 8082}, {name: "three", ns: other, port: 8081}, {name: "four", ns: other, port: 8083}} {
		b.c = c
		c.backends = append(c.backends, b)
	}
	one, two, three, four := c.backends[0], c.backends[1], c.backends[2], c.backends[3]
	n.set("defaults: {grace: 600s, flush_timeout: 5s, reserve: 3s, quiet_period: 300ms}\nservices:\n" +
		fmt.Sprintf("  - name: web\n    listen: [\"127.0.0.1:8000\"]\n    backends:\n      - {name: one, match: %s}\n      - {name: two, match: %s}\n", match(one.ns, one.port), match(two.ns, two.port)) +
		fmt.Sprintf("  - name: api\n    backends:\n      - {name: three, match: %s}\n", match(three.ns, three.port)) +
		fmt.Sprintf("  - name: more\n    protocol: http1\n    backends:\n      - {name: four, match: %s}\n", match(four.ns, four.port)))
	for _, b := range c.backends {
		b.start()
		c.wg.Go(b.probe)
	}
	c.wg.Go(c.visit)
	defer func() {
		close(c.stop)
		for _, b := range c.backends {
			b.disconnect()
		}
		c.wg.Wait()
		if t.Failed() {
			t.Logf("what was done:\n%s", strings.Join(c.did, "\n"))
		}
	}()
	c.check()
	rounds, steps := 0, 0
	for end := time.Now().Add(long); time.Now().Before(end) && !t.Failed(); rounds++ {
		for range 3 + c.r.IntN(8) {
			c.step()
			steps++
			<-time.After(time.Duration(c.r.IntN(120)) * time.Millisecond)
		}
		c.check()
	}
	t.Logf("%d rounds of %d steps, %d agents, %d drains of which %d are over, %d new connections to backends and %d to a service", rounds, steps, len(c.all), len(c.begun), len(c.ended), c.probes.Load(), c.visits.Load())
}

// start starts the server.
func (b *chaotic) start() {
	t := b.c.t
	t.Helper()
	b.p = program(t, b.ns, goServer(t, b.addr())...)
	gone := make(chan struct{})
	b.gone = gone
	p := b.p
	go func() {
		_ = p.Wait() // how it ended is chaos's own doing, or its drain's
		close(gone)
	}()
}

func (b *chaotic) hasEnded() bool {
	select {
	case <-b.gone:
		return true
	default:
		return false
	}
}

// probe makes new connections as long as it is known what has to become of them.
func (b *chaotic) probe() {
	err := netns.Do(b.ns.Fd(), func() error {
		for {
			select {
			case <-b.c.stop:
				return nil
			case <-time.After(3 * time.Millisecond):
			}
			was := b.state.Load()
			if expectation(was&3) == anything || b.c.quiet.Load() {
				continue
			}
			x := fire(b.addr(), "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
			b.c.probes.Add(1)
			if b.state.Load() != was {
				continue
			}
			if expectation(was&3) == open && !x.served || expectation(was&3) == closed && !x.refused {
				b.c.fail("%s, which has to be %s: served %v, refused %v: %v", b.name, map[expectation]string{open: "open", closed: "closed"}[expectation(was&3)], x.served, x.refused, x.err)
				return nil
			}
		}
	})
	if err != nil {
		b.c.fail("enter a namespace: %v", err)
	}
}

// visit makes new connections to the service, of which each is served or refused unless a server is killed meanwhile.
func (c *chaos) visit() {
	err := netns.Do(c.ns.Fd(), func() error {
		for {
			select {
			case <-c.stop:
				return nil
			case <-time.After(5 * time.Millisecond):
			}
			was := c.crashes.Load()
			if c.quiet.Load() {
				continue
			}
			x := fire("127.0.0.1:8000", "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
			c.visits.Add(1)
			if !x.served && !x.refused && was%2 == 0 && c.crashes.Load() == was {
				c.fail("a connection to the service was neither served nor refused: %v", x.err)
				return nil
			}
		}
	})
	if err != nil {
		c.fail("enter a namespace: %v", err)
	}
}

// connect begins a stream.
func (b *chaotic) connect() {
	t := b.c.t
	t.Helper()
	s := &stream{conn: dialHTTP(t, b.ns, b.addr()), done: make(chan struct{})}
	_ = s.conn.SetDeadline(time.Time{})
	s.conn.send(t, "/events?ms=20")
	s.conn.head(t)
	b.streams = append(b.streams, s)
	b.c.wg.Go(func() {
		defer close(s.done)
		buf := make([]byte, 4096)
		for {
			n, err := s.conn.br.Read(buf)
			s.bytes.Add(int64(n))
			if err == nil {
				continue
			}
			if !s.over.Load() {
				b.c.fail("a stream of %s ended after %d bytes: %v", b.name, s.bytes.Load(), err)
			}
			return
		}
	})
}

// disconnect ends the streams, of which the server may be dead.
func (b *chaotic) disconnect() {
	for _, s := range b.streams {
		s.over.Store(true)
		s.conn.Close()
		<-s.done
	}
	b.streams = nil
}

// crash kills the server and starts it again.
func (b *chaotic) crash() {
	b.expect(anything)
	for _, s := range b.streams {
		s.over.Store(true)
	}
	b.c.crashes.Add(1)
	_ = b.p.Process.Kill() // it may have ended by its drain
	<-b.gone
	b.c.crashes.Add(1)
	b.disconnect()
	b.drain = ""
	b.start()
}

// owner is the agent that is up, if it is not known to stand still.
func (c *chaos) owner() *daemon {
	if len(c.live) == 0 || c.live[0] == c.frozen {
		return nil
	}
	return c.live[0]
}

// begin starts an agent.
func (c *chaos) begin(flags ...string) {
	d := c.node.begin(flags...)
	c.live, c.all = append(c.live, d), append(c.all, d)
}

// lose ends the agent that is up.
func (c *chaos) lose(how syscall.Signal) {
	d := c.live[0]
	if how == syscall.SIGTERM {
		d.stop()
	} else {
		d.kill9()
		c.killed = true
	}
	c.live = c.live[1:]
	if len(c.live) > 0 {
		c.live[0].owns() // it was standing by
	}
}

// step does one thing.
func (c *chaos) step() {
	b := c.backends[c.r.IntN(len(c.backends))]
	owner := c.owner()
	switch k := c.r.IntN(24); {
	case k < 6 && b.drain == "" && expectation(b.state.Load()&3) == open:
		for range 1 + c.r.IntN(5) {
			b.connect()
		}
		c.note("%s: %d streams", b.name, len(b.streams))
	case k < 11 && owner != nil && b.drain == "" && expectation(b.state.Load()&3) == open:
		b.connect()
		q := refused
		if c.r.IntN(3) == 0 {
			q.OnNew = drain.OnNewAuto
		}
		b.expect(anything)
		// An agent that starts has perhaps not found it yet.
		c.note("%s: drain (%s)", b.name, q.OnNew)
		kill := c.r.IntN(3) == 0
		done := make(chan error, 1)
		var d api.Drain
		go func() {
			done <- c.ask(func(ctx context.Context, cl *api.Client) (err error) { d, err = cl.Drain(ctx, b.name, q); return err })
		}()
		if kill {
			<-time.After(time.Duration(c.r.IntN(60)) * time.Millisecond)
			c.note("killed meanwhile")
			c.lose(syscall.SIGKILL)
		}
		if err := <-done; err != nil {
			c.note("%s: drain was not answered: %v", b.name, err)
			return
		}
		b.drain = d.ID
		c.begun[d.ID] = true
		if q.OnNew == drain.OnNewRefuse {
			b.expect(closed)
		}
	case k < 13 && owner != nil && b.drain != "":
		b.expect(anything)
		err := c.ask(func(ctx context.Context, cl *api.Client) error {
			_, err := cl.Undrain(ctx, b.name, api.UndrainRequest{})
			return err
		})
		c.note("%s: undrain: %v", b.name, err)
	case k == 13 && len(b.streams) > 0:
		b.expect(anything)
		b.disconnect()
		c.note("%s: streams closed", b.name)
	case k == 14:
		c.note("%s: crash", b.name)
		b.crash()
	case k == 15 && owner != nil:
		c.note("agent %d killed", owner.pid())
		c.lose(syscall.SIGKILL)
	case k == 16 && owner != nil:
		c.note("agent %d ended", owner.pid())
		c.lose(syscall.SIGTERM)
	case k == 17 && owner != nil && c.r.IntN(3) == 0:
		c.note("agent %d stopped", owner.pid())
		owner.freeze()
		c.frozen = owner
	case k == 18 && len(c.live) == 0 && c.frozen == nil:
		for _, b := range c.backends {
			f, err := os.OpenFile(c.journal(b.name), os.O_WRONLY|os.O_APPEND, 0)
			if errors.Is(err, os.ErrNotExist) {
				continue
			}
			if err == nil {
				_, err = f.WriteString(`1234abcd {"version":1,"type":"un`)
				err = errors.Join(err, f.Close())
			}
			if err != nil {
				c.t.Fatal(err)
			}
		}
		c.note("journals torn")
	case k == 19 && owner != nil:
		_, stderr, code := c.ebb("agent", "--config", c.config)
		c.note("second agent: %d", code)
		if code != 1 {
			c.fail("a second agent ended with %d: %s", code, stderr)
		}
	case k == 20 && len(c.live) == 1:
		c.begin("--standby")
		c.note("agent %d stands by", c.live[1].pid())
	case len(c.live) == 0 && c.r.IntN(3) == 0:
		c.begin()
		c.note("agent %d started", c.live[0].pid())
		c.live[0].owns()
	}
}

// settle has an agent own the node.
func (c *chaos) settle() {
	if d := c.frozen; d != nil {
		c.frozen = nil
		if len(c.live) > 1 {
			c.note("the standby takes over")
			c.live[1].owns()
			if d.wait() != -1 {
				c.fail("agent %d was not killed by the standby", d.pid())
			}
			c.live, c.killed = c.live[1:], true
		} else {
			c.note("agent %d goes on", d.pid())
			d.signal(syscall.SIGCONT)
		}
	}
	if len(c.live) == 0 {
		c.begin()
	}
	c.live[0].owns()
}

// check waits until all is quiet, and compares it with what it has to be.
func (c *chaos) check() {
	c.t.Helper()
	c.settle()
	for _, b := range c.backends {
		b.check()
	}
	c.outcomes()
	c.note("checked")
}

func (b *chaotic) check() {
	c := b.c
	c.t.Helper()
	var v api.Backend
	for {
		v = c.awaitView(b.name, "as it has to be", func(v api.Backend) bool {
			// A drain with nothing open ends, and its process with it, unless there is nowhere else to go: then it admits, and
			// our probes do not pause.
			running := v.Drain != nil && v.Drain.Running()
			waits := running && (len(b.streams) > 0 || v.OnNew.Chosen == drain.OnNewAdmit)
			return b.hasEnded() || v.PID == b.p.Process.Pid && v.CountsKnown && (v.Ready && !running || waits)
		})
		if !b.hasEnded() {
			break
		}
		if n := len(b.streams); n > 0 {
			c.fail("%s was ended with %d streams open", b.name, n)
		}
		b.expect(anything)
		b.start()
		c.note("%s: started again after its drain", b.name)
	}
	was := b.drain
	b.drain = ""
	if v.Drain != nil && v.Drain.Running() {
		b.drain = v.Drain.ID
		c.begun[b.drain] = true
	}
	if was != "" && b.drain != was && expectation(b.state.Load()&3) == closed {
		c.fail("%s: drain %s, which was answered and not taken back, does not run", b.name, was)
	}
	switch {
	case b.drain == "":
		b.expect(open)
	case v.Drain.Policy.OnNew == drain.OnNewRefuse:
		// One that was not answered may have been killed before its flip, and makes it now.
		if expectation(b.state.Load()&3) != closed {
			eventually(c.t, b.name+" is closed", func() bool {
				refused := false
				b.ns.Do(c.t, func() { refused = fire(b.addr(), "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").refused })
				return refused
			})
			b.expect(closed)
		}
	}
	c.quiet.Store(true)
	defer c.quiet.Store(false)
	var got, want int64
	for end := time.Now().Add(patience); ; {
		before := len(walk(c.t, b.ns, 1<<1|1<<8, uint16(b.port))) // ESTABLISHED, CLOSE_WAIT
		v = c.view(b.name)
		got, want = value(v.Counts.Open), int64(len(walk(c.t, b.ns, 1<<1|1<<8, uint16(b.port))))
		if v.CountsKnown && got == want && int64(before) == want && want >= int64(len(b.streams)) {
			break
		}
		if time.Now().After(end) {
			c.fail("%s: %d are counted (known %v), a walk finds %d, and %d streams are open", b.name, got, v.CountsKnown, want, len(b.streams))
			return
		}
		<-time.After(20 * time.Millisecond)
	}
	for i, s := range b.streams {
		from := s.bytes.Load()
		eventually(c.t, fmt.Sprintf("stream %d of %s goes on", i, b.name), func() bool { return s.bytes.Load() > from })
	}
}

// outcomes reads what the agents have said: no drain ends twice, none runs that has ended, and each that does not run any
// more has ended, unless the agent that would have said so was killed.
func (c *chaos) outcomes() {
	c.t.Helper()
	ends := map[string][]string{}
	for _, d := range c.all {
		for _, e := range d.all(drain.EventBegin) {
			c.begun[e.Drain] = true
		}
		for _, e := range d.all(drain.EventEnd) {
			ends[e.Drain] = append(ends[e.Drain], string(e.Outcome))
			c.ended[e.Drain] = e.Outcome
		}
	}
	for id, how := range ends {
		if len(how) > 1 {
			c.fail("drain %s has ended %d times: %s", id, len(how), strings.Join(how, ", "))
		}
	}
	running := map[string]bool{}
	for _, b := range c.backends {
		running[b.drain] = true
		if how, ok := c.ended[b.drain]; ok {
			c.fail("drain %s runs, and has ended %s", b.drain, how)
		}
	}
	for id := range c.begun {
		if running[id] || c.ended[id] != "" {
			continue
		}
		c.ended[id] = "not heard of"
		if !c.killed {
			c.fail("drain %s does not run, and has no outcome", id)
		}
	}
	c.killed = false
}

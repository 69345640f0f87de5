// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/bpf"
	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/probes"
)

// perSpace is how many backends share a network namespace.
const perSpace = 4

// tenant is a backend of an agent: a process of its own.
type tenant struct {
	name string
	sp   *space
	port uint16
	cmd  *exec.Cmd
	done chan struct{}
}

func (t *tenant) addr() string { return fmt.Sprintf("127.0.0.1:%d", t.port) }

// house is a number of backends in network namespaces of their own, and the place of their agent's files.
type house struct {
	o       options
	dir     string // on a disk: journals are synced
	spaces  []*space
	tenants []*tenant
}

func newHouse(o options, n int, flags ...string) (_ *house, err error) {
	h := &house{o: o, dir: filepath.Join(o.Disk, "agent")}
	defer func() {
		if err != nil {
			err = errors.Join(err, h.close())
		}
	}()
	if err := h.forget(); err != nil {
		return nil, err
	}
	for i := range n {
		if i%perSpace == 0 {
			sp, err := newSpace(loopback)
			if err != nil {
				return nil, err
			}
			h.spaces = append(h.spaces, sp)
		}
		t := &tenant{name: fmt.Sprintf("b%d", i), sp: h.spaces[len(h.spaces)-1], port: uint16(8000 + i%perSpace), done: make(chan struct{})}
		t.cmd = exec.Command("/proc/self/exe", append([]string{"serve", "-listen", t.addr()}, flags...)...)
		t.cmd.Env, t.cmd.Stderr = append(environment(), "GODEBUG=asyncpreemptoff=1"), os.Stderr
		out, err := t.cmd.StdoutPipe()
		if err != nil {
			return nil, fmt.Errorf("start server: %w", err)
		}
		if err := start(t.sp.server, t.cmd); err != nil {
			return nil, fmt.Errorf("start server: %w", err)
		}
		h.tenants = append(h.tenants, t)
		r := bufio.NewReader(out)
		line, err := r.ReadString('\n')
		go func() {
			defer close(t.done)
			_, _ = io.Copy(io.Discard, r) // it ends with the process
			_ = t.cmd.Wait()              // killed, which is what is wanted
		}()
		if err != nil {
			return nil, fmt.Errorf("start server: it says %q: %w", line, err)
		}
	}
	return h, nil
}

func (h *house) close() error {
	var errs []error
	for _, t := range h.tenants {
		_ = t.cmd.Process.Kill() // it may have ended by its drain
		<-t.done
	}
	for _, sp := range h.spaces {
		errs = append(errs, sp.close())
	}
	return errors.Join(append(errs, h.forget())...)
}

// forget makes the next start the first one.
func (h *house) forget() error { return errors.Join(os.RemoveAll(pins), os.RemoveAll(h.dir)) }

// config writes the agent's configuration: one service for each backend.
func (h *house) config() (string, error) {
	var b strings.Builder
	fmt.Fprintf(&b, "mode: enforce\napi: {socket: %s, app_socket: %s/app.sock}\nmetrics: {listen: \"\"}\nstate: {dir: %s, bpffs: %s}\n", agentSock, runDir, h.dir, pins)
	b.WriteString("defaults: {grace: 60s, flush_timeout: 1s, reserve: 10s, quiet_period: 50ms}\nservices:\n")
	for _, t := range h.tenants {
		fmt.Fprintf(&b, "  - {name: %s, protocol: http1, idle: wait, backends: [{name: %[1]s, match: {port: %d, netns: /proc/%d/ns/net}}]}\n", t.name, t.port, t.cmd.Process.Pid)
	}
	path := filepath.Join(runDir, "agent.yaml")
	return path, os.WriteFile(path, []byte(b.String()), 0o600)
}

const agentSock = runDir + "/ebb.sock"

// owner is an `ebb agent` that runs.
type owner struct {
	cmd    *exec.Cmd
	said   bytes.Buffer
	done   chan struct{}
	client *api.Client
	ready  time.Duration // from its start until it said that it is
	cpu    int64         // that it had taken by then
}

// agent starts an agent and waits until it says that it is ready, as it does to systemd.
func (h *house) agent(ctx context.Context) (_ *owner, err error) {
	config, err := h.config()
	if err != nil {
		return nil, err
	}
	notify := filepath.Join(runDir, "notify")
	_ = os.Remove(notify) // of the agent before
	ln, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: notify, Net: "unixgram"})
	if err != nil {
		return nil, fmt.Errorf("listen for the agent's word: %w", err)
	}
	a := &owner{done: make(chan struct{})}
	a.cmd = exec.Command(h.o.Ebb, "agent", "--config", config, "--datapath", "bpf")
	a.cmd.Env, a.cmd.Stderr = append(environment(), "EBB_RUN_DIR="+runDir, "NOTIFY_SOCKET="+notify), &a.said
	began := time.Now()
	if err := a.cmd.Start(); err != nil {
		return nil, errors.Join(fmt.Errorf("start ebb agent: %w", err), ln.Close())
	}
	go func() {
		defer close(a.done)
		defer ln.Close()
		_ = a.cmd.Wait() // how it ended is in ProcessState
	}()
	defer func() {
		if err != nil {
			a.end(unix.SIGKILL)
			err = fmt.Errorf("%w; it wrote:\n%s", err, a.said.String())
		}
	}()
	if err := ln.SetReadDeadline(began.Add(limit)); err != nil {
		return nil, err
	}
	for b := make([]byte, 4096); a.ready == 0; {
		n, err := ln.Read(b)
		if err != nil {
			return nil, fmt.Errorf("wait for ebb agent: %w", err)
		}
		if strings.Contains(string(b[:n]), "READY=1") {
			a.ready = time.Since(began)
		}
	}
	if a.cpu, err = a.spent(); err != nil {
		return nil, err
	}
	go func() { _, _ = io.Copy(io.Discard, ln) }() // what it says later; it ends with the agent
	a.client, err = api.Dial(ctx, agentSock)
	return a, err
}

func (a *owner) end(sig unix.Signal) {
	_ = a.cmd.Process.Signal(sig) // it may have ended
	<-a.done
	if a.client != nil {
		_ = a.client.Close() // nobody is there any more
	}
}

// pids are the agent and what it has started to serve its API.
func (a *owner) pids() []int {
	pids := []int{a.cmd.Process.Pid}
	if tree, err := probes.Tree(pids[0]); err == nil {
		for _, p := range tree[1:] {
			pids = append(pids, p.PID)
		}
	}
	return pids
}

// spent is the CPU time of the agent's processes.
func (a *owner) spent() (sum int64, err error) {
	for _, pid := range a.pids() {
		n, err := processCPU(pid)
		if err != nil {
			return 0, err
		}
		sum += n
	}
	return sum, nil
}

// resident is the memory of the agent's processes: each one's resident pages, and those with shared ones divided.
func (a *owner) resident() (rss, pss int64, err error) {
	for _, pid := range a.pids() {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
		if err != nil {
			return 0, 0, fmt.Errorf("read memory of ebb agent: %w", err)
		}
		for line := range strings.Lines(string(text)) {
			name, rest, _ := strings.Cut(line, ":")
			if name != "Rss" && name != "Pss" {
				continue
			}
			kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			if err != nil {
				return 0, 0, fmt.Errorf("read memory of ebb agent: %w", err)
			}
			if name == "Rss" {
				rss += kib << 10
			} else {
				pss += kib << 10
			}
		}
	}
	return rss, pss, nil
}

// metered calls f and returns the CPU time that the agent took for it, and the time.
func (a *owner) metered(f func() error) (cost, error) {
	cpu, err := a.spent()
	if err != nil {
		return cost{}, err
	}
	began := time.Now()
	if err := f(); err != nil {
		return cost{}, err
	}
	c := cost{Wall: time.Since(began)}
	after, err := a.spent()
	c.CPU = time.Duration(after - cpu)
	return c, err
}

// cost is what an answer takes.
type cost struct {
	Wall time.Duration `json:"wall_ns"`
	CPU  time.Duration `json:"cpu_ns"`
}

// closable is nil if the kernel has a rule for the listener of each backend: what the drain of one flips. It asks the
// kernel and not the agent.
func (h *house) closable() error {
	host, err := bpf.Open(bpf.Options{Dir: pins})
	if err != nil {
		return err
	}
	defer host.Close()
	for _, t := range h.tenants {
		id, err := bpf.NetNSID(int(t.sp.server.Fd()))
		if err != nil {
			return err
		}
		if _, err := os.Stat(filepath.Join(pins, "v1", "netns", strconv.FormatUint(id, 10))); err != nil {
			return fmt.Errorf("admission of %s: %w", t.name, err)
		}
		_, pass, ok, err := host.Admission(bpf.Address{NetNS: id, AddrPort: netip.MustParseAddrPort(t.addr())})
		if err == nil && (!ok || pass) {
			err = errors.New("there is none")
		}
		if err != nil {
			return fmt.Errorf("rule of %s: %w", t.name, err)
		}
	}
	return nil
}

// known is nil if the agent knows the count of each backend, which serves.
func (h *house) known(ctx context.Context, a *owner) error {
	bs, err := a.client.Backends(ctx)
	if err != nil {
		return err
	}
	for _, b := range bs {
		if !b.Ready || !b.Guarded || !b.CountsKnown {
			return fmt.Errorf("%s is %s, ready %v, guarded %v, counts known %v: %v", b.Name, b.State, b.Ready, b.Guarded, b.CountsKnown, b.Warnings)
		}
	}
	if len(bs) != len(h.tenants) {
		return fmt.Errorf("%d backends, not %d", len(bs), len(h.tenants))
	}
	return nil
}

// until asks until the answer is nil.
func until(ctx context.Context, ask func() error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		err := ask()
		if err == nil {
			return nil
		}
		if pause(ctx, 5*time.Millisecond) != nil {
			return err
		}
	}
}

// startSample is one start of an agent, a line of the raw data.
type startSample struct {
	Backends int           `json:"start_backends"`
	First    bool          `json:"first"` // nothing was there; else the agent before was killed
	Ready    time.Duration `json:"ready_ns"`
	CPU      time.Duration `json:"cpu_ns"`
	Verified time.Duration `json:"verified_ns"` // all rules are in the kernel
}

func (h *house) start(ctx context.Context, first bool) (*owner, startSample, error) {
	s := startSample{Backends: len(h.tenants), First: first}
	if first {
		if err := h.forget(); err != nil {
			return nil, s, err
		}
	}
	a, err := h.agent(ctx)
	if err != nil {
		return nil, s, err
	}
	s.Ready, s.CPU, s.Verified = a.ready, time.Duration(a.cpu), a.ready
	if h.closable() != nil {
		late := time.Now()
		err = until(ctx, h.closable)
		s.Verified += time.Since(late)
	}
	if err == nil {
		err = until(ctx, func() error { return h.known(ctx, a) })
	}
	if err != nil {
		a.end(unix.SIGKILL)
	}
	return a, s, err
}

// idleSample is an agent whose backends have nothing to do.
type idleSample struct {
	Backends int           `json:"idle_backends"`
	RSS      int64         `json:"rss_bytes"`
	PSS      int64         `json:"pss_bytes"`
	CPU      time.Duration `json:"cpu_ns"`
	Over     time.Duration `json:"over_ns"`
	List     cost          `json:"list"`
	Scrape   cost          `json:"scrape"`
}

// settled is when an agent's start is over: its first audits, half a minute after it, among it.
const settled = 40 * time.Second

func (h *house) idle(ctx context.Context, a *owner) (s idleSample, err error) {
	s.Backends, s.Over = len(h.tenants), time.Duration(h.o.Idle)*time.Second
	if err := pause(ctx, min(settled, s.Over)); err != nil {
		return s, err
	}
	if s.RSS, s.PSS, err = a.resident(); err != nil {
		return s, err
	}
	c, err := a.metered(func() error { return pause(ctx, s.Over) })
	if err != nil {
		return s, err
	}
	s.CPU = c.CPU
	if s.List, err = a.metered(func() error { return h.known(ctx, a) }); err != nil {
		return s, err
	}
	s.Scrape, err = a.metered(func() error { return scrape(ctx) })
	return s, err
}

// scrape reads the metrics.
func scrape(ctx context.Context) error {
	c := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", agentSock)
	}}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://ebb/metrics", nil)
	if err != nil {
		return err
	}
	resp, err := c.Do(req)
	if err != nil {
		return fmt.Errorf("scrape: %w", err)
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != http.StatusOK {
		return fmt.Errorf("scrape: %s: %w", resp.Status, err)
	}
	return nil
}

// flipSample is the flip of one of many drains that begin at once.
type flipSample struct {
	Backends  int           `json:"flip_backends"`
	FlipBegin time.Duration `json:"flip_from_begin_ns"`
	FlipAsked time.Duration `json:"flip_from_command_ns"` // since `ebb drain --all` was started
}

// drainAll drains every backend at once.
func (h *house) drainAll(ctx context.Context, a *owner) (flips []flipSample, c cost, err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*limit)
	defer cancel()
	tail, err := a.client.Follow(ctx, 0)
	if err != nil {
		return nil, c, err
	}
	defer tail.Close()
	began := time.Now()
	c, err = a.metered(func() error {
		cmd := exec.Command(h.o.Ebb, "drain", "--all", "--on-new", "refuse")
		cmd.Env = append(environment(), "EBB_RUN_DIR="+runDir)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("ebb drain --all: %w: %s", err, out)
		}
		return nil
	})
	if err != nil {
		return nil, c, err
	}
	begun := map[string]time.Time{}
	for e, err := range tail.All() {
		switch {
		case err != nil:
			return nil, c, fmt.Errorf("%d of %d flips: %w", len(flips), len(h.tenants), err)
		case e.Type == drain.EventBegin:
			begun[e.Drain] = e.Time
		case e.Type == drain.EventPhase && e.Phase == drain.PhaseSettle:
			flips = append(flips, flipSample{len(h.tenants), e.Time.Sub(begun[e.Drain]), e.Time.Sub(began)})
		}
		if len(flips) == len(h.tenants) {
			break
		}
	}
	return flips, c, nil
}

// crowdSample is one backend with very many connections.
type crowdSample struct {
	Conns  int   `json:"crowd_connections"`
	Ebb    bool  `json:"ebb"`
	Kernel int64 `json:"kernel_bytes"` // as in memorySample
	User   int64 `json:"user_bytes"`   // growth of the resident memory of the agent
	Looked int64 `json:"looked_bytes"` // the same after each connection was looked at
	// Looks are answers about the backend, each of which tells the class of every connection.
	Looks     []cost        `json:"looks"`
	FlipBegin time.Duration `json:"flip_from_begin_ns"`
}

func (h *house) crowd(ctx context.Context, withEbb bool) (s crowdSample, err error) {
	s = crowdSample{Conns: h.o.Established, Ebb: withEbb}
	var a *owner
	user := func() (n int64, err error) {
		if a != nil {
			n, _, err = a.resident()
		}
		return n, err
	}
	if withEbb {
		if a, _, err = h.start(ctx, true); err != nil {
			return s, err
		}
		defer a.end(unix.SIGKILL)
	}
	userBefore, err := user()
	if err != nil {
		return s, err
	}
	kernelBefore, err := kernelMemory()
	if err != nil {
		return s, err
	}
	release, err := h.tenants[0].hold(h.o.Established)
	if err != nil {
		return s, err
	}
	defer func() { err = errors.Join(err, release()) }()
	kernel, err := kernelMemory()
	if err != nil {
		return s, err
	}
	userNow, err := user()
	if err != nil {
		return s, err
	}
	s.Kernel, s.User = kernel-kernelBefore, userNow-userBefore
	if !withEbb {
		return s, nil
	}
	t := h.tenants[0]
	for range 5 {
		c, err := a.metered(func() error {
			b, err := a.client.Backend(ctx, t.name)
			if err == nil && (b.Counts.Open == nil || *b.Counts.Open != int64(h.o.Established)) {
				err = fmt.Errorf("%s counts %v connections, not %d: %v", t.name, b.Counts.Open, h.o.Established, b.Warnings)
			}
			return err
		})
		if err != nil {
			return s, err
		}
		s.Looks = append(s.Looks, c)
	}
	if userNow, err = user(); err != nil {
		return s, err
	}
	s.Looked = userNow - userBefore
	s.FlipBegin, err = a.flip(ctx, t.name, api.DrainRequest{OnNew: drain.OnNewRefuse})
	return s, err
}

// flip begins a drain and returns how long it took from its begin until admission was closed.
func (a *owner) flip(ctx context.Context, backend string, q api.DrainRequest) (time.Duration, error) {
	var begun time.Time
	tail, err := a.client.Follow(ctx, 0)
	if err != nil {
		return 0, err
	}
	defer tail.Close()
	if _, err := a.client.Drain(ctx, backend, q); err != nil {
		return 0, err
	}
	for e, err := range tail.All() {
		switch {
		case err != nil:
			return 0, err
		case e.Type == drain.EventBegin:
			begun = e.Time
		case e.Type == drain.EventPhase && e.Phase == drain.PhaseSettle:
			return e.Time.Sub(begun), nil
		}
	}
	return 0, errors.New("the events ended before the flip")
}

// holders is how many processes n connections take, on either side: each has its descriptors, and a client's address its
// ports.
func holders(n int) int { return 1 + n/min(room(), 12_000) }

// hold opens connections to a backend that stay until release.
func (t *tenant) hold(n int) (release func() error, err error) {
	var ends []func() error
	release = func() error {
		var errs []error
		for _, end := range ends {
			errs = append(errs, end())
		}
		return errors.Join(errs...)
	}
	for k := holders(n); k > 0; k-- {
		end, err := t.holdSome(clientSpec{Addr: t.addr(), Conns: n / k, Source: byte(1 + k)})
		if err != nil {
			return nil, errors.Join(err, release())
		}
		n -= n / k
		ends = append(ends, end)
	}
	return release, nil
}

func (t *tenant) holdSome(s clientSpec) (end func() error, err error) {
	spec, err := json.Marshal(s)
	if err != nil {
		return nil, fmt.Errorf("encode spec: %w", err)
	}
	cmd := exec.Command("/proc/self/exe", "hold", string(spec))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("start holder: %w", err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("start holder: %w", err)
	}
	if err := start(t.sp.client, cmd); err != nil {
		return nil, fmt.Errorf("start holder: %w", err)
	}
	end = func() error { return errors.Join(in.Close(), cmd.Wait()) }
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		return nil, errors.Join(fmt.Errorf("hold connections: %w", err), end())
	}
	return end, nil
}

// cutSample is the cut of a backend's connections.
type cutSample struct {
	Conns  int              `json:"cut_connections"`
	Method drain.OnDeadline `json:"method"`
	// Took is from the event that says that connections are being ended to the one that says that they were.
	Took      time.Duration `json:"took_ns"`
	Graceful  int64         `json:"graceful"`
	Destroyed int64         `json:"destroyed"`
}

func (h *house) cut(ctx context.Context, method drain.OnDeadline) (s cutSample, err error) {
	s = cutSample{Conns: h.o.Cut, Method: method}
	ctx, cancel := context.WithTimeout(ctx, 2*limit)
	defer cancel()
	a, _, err := h.start(ctx, true)
	if err != nil {
		return s, err
	}
	defer a.end(unix.SIGKILL)
	t := h.tenants[0]
	release, err := t.hold(h.o.Cut)
	if err != nil {
		return s, err
	}
	defer func() { err = errors.Join(err, release()) }()
	tail, err := a.client.Follow(ctx, 0)
	if err != nil {
		return s, err
	}
	defer tail.Close()
	d, err := a.client.Drain(ctx, t.name, api.DrainRequest{OnNew: drain.OnNewRefuse, OnDeadline: method})
	if err != nil {
		return s, err
	}
	if _, err := a.client.Cut(ctx, t.name, api.CutRequest{}); err != nil {
		return s, err
	}
	var began time.Time
	for e, err := range tail.All() {
		if err != nil {
			return s, fmt.Errorf("wait for the cut: %w", err)
		}
		if e.Type != drain.EventCut {
			continue
		}
		if !began.IsZero() { // the second says that it is done
			s.Took = e.Time.Sub(began)
			break
		}
		began = e.Time
	}
	if err := until(ctx, func() error { return h.none(ctx) }); err != nil {
		return s, err
	}
	if d, err = a.client.DrainByID(ctx, d.ID); err != nil {
		return s, err
	}
	if d.Cut == nil {
		return s, fmt.Errorf("nothing was cut: the drain ended %s", d.Outcome)
	}
	s.Graceful, s.Destroyed = d.Cut.Graceful, d.Cut.Destroyed
	return s, nil
}

// none is nil if the backend's processes have no connection any more, as the kernel lists them.
func (h *house) none(ctx context.Context) error {
	t := h.tenants[0]
	diag, err := probes.OpenDiag(probes.DiagOptions{NetNS: int(t.sp.server.Fd())})
	if err != nil {
		return err
	}
	defer diag.Close()
	left, err := diag.Dump(ctx, probes.Filter{States: probes.StatesConnected, LocalPorts: []uint16{t.port}})
	left = slices.DeleteFunc(left, func(s probes.Socket) bool { return s.Inode == 0 })
	if err == nil && len(left) > 0 {
		err = fmt.Errorf("%d connections are left after the cut", len(left))
	}
	return err
}

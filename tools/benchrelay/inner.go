// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// kinds of work.
var kinds = []string{"connections", "requests", "bulk1", "bulk16", "idle"}

const (
	server = "127.0.0.1:9001"
	self   = "/proc/self/exe"
)

// contender is one proxy.
type contender struct {
	Name string
	addr string
	path string
	args []string
	cmd  *exec.Cmd
	pids []int
}

// sample is what one contender took for one kind of work. Times are ns, memory is bytes.
type sample struct {
	Round   int     `json:"round"`
	Kind    string  `json:"kind"`
	Name    string  `json:"name"`
	Units   int64   `json:"units"`
	Wall    int64   `json:"wall_ns"`
	Proxy   int64   `json:"proxy_cpu_ns"`
	Server  int64   `json:"server_cpu_ns"`
	Client  int64   `json:"client_cpu_ns"`
	Memory  int64   `json:"memory_bytes,omitempty"` // of idle: more PSS than before
	FDs     int     `json:"fds,omitempty"`          // of idle: more descriptors than before
	LoadAvg float64 `json:"loadavg"`
}

// inner runs in namespaces of its own.
func inner(args []string) error {
	var o options
	if len(args) != 1 {
		return errors.New("this is for benchrelay itself")
	}
	if err := json.Unmarshal([]byte(args[0]), &o); err != nil {
		return fmt.Errorf("read spec: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return fmt.Errorf("mount proc: %w", err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find lo: %w", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set up lo: %w", err)
	}
	// reno is in every kernel and paces nothing by a timer.
	for name, v := range map[string]string{"ipv4/tcp_congestion_control": "reno", "ipv4/ip_local_port_range": "10000 65000"} {
		if err := os.WriteFile("/proc/sys/net/"+name, []byte(v), 0); err != nil {
			return err
		}
	}
	dir, err := os.MkdirTemp("", "benchrelay")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	b := &bench{o: o, dir: dir, rng: rand.New(rand.NewPCG(o.Seed, 0)), machine: describe()}
	err = b.measure()
	b.stop()
	return err
}

type bench struct {
	o       options
	dir     string
	rng     *rand.Rand
	machine machine
	server  int
	with    []*contender
	cmds    []*exec.Cmd
	missing []string
	samples []sample
}

func (b *bench) say(format string, a ...any) {
	fmt.Fprintf(os.Stderr, "benchrelay: "+format+"\n", a...)
}

// start starts a process and waits until something listens on addr.
func (b *bench) start(addr string, name string, args ...string) (*exec.Cmd, error) {
	cmd := exec.Command(name, args...)
	var out bytes.Buffer
	cmd.Stderr = &out
	if name == self {
		// It says when it is ready, which is later than when it listens.
		said, err := cmd.StdoutPipe()
		if err != nil {
			return nil, err
		}
		if err := cmd.Start(); err != nil {
			return nil, err
		}
		b.cmds = append(b.cmds, cmd)
		if _, err := io.ReadFull(said, make([]byte, len("ready\n"))); err != nil {
			return nil, fmt.Errorf("%v does not get ready: %w: %s", args, err, out.String())
		}
		return cmd, nil
	}
	cmd.Stdout = &out
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	b.cmds = append(b.cmds, cmd)
	for range 1000 {
		c, err := net.Dial("tcp", addr)
		if err == nil {
			c.Close()
			return cmd, nil
		}
		pause()
	}
	return nil, fmt.Errorf("%s does not listen on %s: %s", name, addr, out.String())
}

func (b *bench) stop() {
	for _, cmd := range slices.Backward(b.cmds) {
		end(cmd)
	}
}

const haproxyConfig = `global
  maxconn 9600
  maxpipes 64
  nbthread 2
  tune.pipesize 1048576
defaults
  mode tcp
  timeout connect 5s
  timeout client 300s
  timeout server 300s
  option splice-auto
  option splice-request
  option splice-response
listen t
  bind 127.0.0.1:8101 backlog 4096
  server b1 ` + server + "\n"

const nginxConfig = `load_module %s;
user root; daemon off; worker_processes 2; worker_rlimit_nofile 20000; pid %s/nginx.pid; error_log stderr crit;
events { worker_connections 19000; }
stream {
  server { listen 127.0.0.1:8102 backlog=4096 reuseport; proxy_pass ` + server + `; tcp_nodelay on; proxy_timeout 300s; }
}
`

func (b *bench) startAll() error {
	cmd, err := b.start(server, self, "serve", server)
	if err != nil {
		return err
	}
	b.server = cmd.Process.Pid
	args := []string{"relay", "-listen", "127.0.0.1:8103", "-peer", server}
	if b.o.Profile != "" {
		args = append(args, "-profile", b.o.Profile)
	}
	if err := b.contend("relay", "127.0.0.1:8103", self, args...); err != nil {
		return err
	}
	if err := b.contend("io.Copy", "127.0.0.1:8104", self, "copy", "127.0.0.1:8104", server); err != nil {
		return err
	}
	if path, err := exec.LookPath("haproxy"); err != nil {
		b.missing = append(b.missing, "haproxy is not installed")
	} else {
		b.machine.Peers["HAProxy"] = version(path, "-v")
		file := filepath.Join(b.dir, "haproxy.cfg")
		if err := os.WriteFile(file, []byte(haproxyConfig), 0o600); err != nil {
			return err
		}
		if err := b.contend("HAProxy", "127.0.0.1:8101", path, "-db", "-q", "-f", file); err != nil {
			return err
		}
	}
	const module = "/usr/lib/nginx/modules/ngx_stream_module.so"
	path, err := exec.LookPath("nginx")
	if err == nil {
		_, err = os.Stat(module)
	}
	if err != nil {
		b.missing = append(b.missing, "nginx or its stream module is not installed (libnginx-mod-stream)")
	} else {
		b.machine.Peers["nginx"] = version(path, "-v")
		file := filepath.Join(b.dir, "nginx.conf")
		if err := os.WriteFile(file, fmt.Appendf(nil, nginxConfig, module, b.dir), 0o600); err != nil {
			return err
		}
		if err := b.contend("nginx", "127.0.0.1:8102", path, "-p", b.dir, "-c", file); err != nil {
			return err
		}
	}
	for _, m := range b.missing {
		b.say("left out: %s", m)
	}
	return nil
}

func (b *bench) contend(name, addr, path string, args ...string) error {
	c := &contender{Name: name, addr: addr, path: path, args: args}
	b.with = append(b.with, c)
	return b.fresh(c)
}

// fresh starts a contender, again if it runs.
func (b *bench) fresh(c *contender) error {
	if c.cmd != nil {
		b.cmds = slices.DeleteFunc(b.cmds, func(cmd *exec.Cmd) bool { return cmd == c.cmd })
		end(c.cmd)
	}
	var err error
	if c.cmd, err = b.start(c.addr, c.path, c.args...); err != nil {
		return err
	}
	want := 1
	if c.Name == "nginx" {
		want = 3 // it listens before it starts its two workers
	}
	for range 1000 {
		if c.pids, err = family(c.cmd.Process.Pid); err != nil || len(c.pids) >= want {
			return err
		}
		pause()
	}
	return fmt.Errorf("%s has %d processes, want %d", c.Name, len(c.pids), want)
}

// pause is the time between two looks at what another process does.
func pause() {
	timer := time.NewTimer(10 * time.Millisecond)
	<-timer.C
}

// end ends a process. An error is how some say that they were told to.
func end(cmd *exec.Cmd) {
	if err := cmd.Process.Signal(unix.SIGTERM); err == nil {
		_ = cmd.Wait()
	}
}

// family is a process and those that it has started.
func family(pid int) ([]int, error) {
	all := []int{pid}
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return nil, err
	}
	for _, t := range tasks {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", pid, t.Name()))
		if err != nil {
			return nil, err
		}
		for c := range strings.FieldsSeq(string(text)) {
			n, err := strconv.Atoi(c)
			if err != nil {
				return nil, err
			}
			more, err := family(n)
			if err != nil {
				return nil, err
			}
			all = append(all, more...)
		}
	}
	return all, nil
}

func (b *bench) measure() error {
	if err := b.startAll(); err != nil {
		return err
	}
	began := time.Now()
	for _, c := range b.with { // once for the caches and the heaps, uncounted
		for _, k := range b.o.Only {
			if k != "idle" {
				if _, err := b.take(c, k); err != nil {
					return fmt.Errorf("%s of %s: %w", k, c.Name, err)
				}
			}
		}
	}
	for round := range b.o.Rounds {
		for _, k := range b.o.Only {
			if k == "idle" && round >= 3 {
				continue // sizes do not vary like times do
			}
			for _, i := range b.rng.Perm(len(b.with)) {
				if k == "idle" && b.with[i].Name == "io.Copy" {
					continue // it needs six descriptors for each
				}
				if k == "idle" {
					// What one that has worked keeps for later would hide what a connection takes.
					if err := b.fresh(b.with[i]); err != nil {
						return err
					}
				}
				s, err := b.take(b.with[i], k)
				if err != nil {
					return fmt.Errorf("%s of %s: %w", k, b.with[i].Name, err)
				}
				s.Round = round
				b.samples = append(b.samples, s)
			}
		}
		b.say("round %d of %d", round+1, b.o.Rounds)
	}
	text := b.table(time.Since(began))
	if _, err := os.Stdout.WriteString(text); err != nil {
		return err
	}
	if b.o.Write == "" {
		return nil
	}
	return b.keep(filepath.Join(b.o.Write, began.UTC().Format("2006-01-02")), text)
}

// keep writes the table and the raw data.
func (b *bench) keep(dir, text string) error {
	o := b.o
	o.Write, o.Profile = "", "" // paths of this machine say nothing
	var raw bytes.Buffer
	e := json.NewEncoder(&raw)
	errs := []error{e.Encode(struct {
		machine
		Options options `json:"options"`
	}{b.machine, o})}
	for _, s := range b.samples {
		errs = append(errs, e.Encode(s))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("encode raw data: %w", err)
	}
	return errors.Join(
		os.MkdirAll(dir, 0o755),
		os.WriteFile(filepath.Join(dir, "relay.md"), []byte(text), 0o644),
		os.WriteFile(filepath.Join(dir, "relay.jsonl"), raw.Bytes(), 0o644),
	)
}

// machine is what was measured on, and with what.
type machine struct {
	Time   string            `json:"time"`
	Kernel string            `json:"kernel"`
	CPU    string            `json:"cpu"`
	CPUs   int               `json:"cpus"`
	Go     string            `json:"go"`
	Peers  map[string]string `json:"peers"` // what each calls its version
}

func describe() machine {
	m := machine{Time: time.Now().UTC().Format(time.RFC3339), Kernel: "unknown", CPU: "unknown", CPUs: runtime.NumCPU(), Go: runtime.Version(), Peers: map[string]string{}}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		m.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	text, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return m
	}
	for line := range strings.Lines(string(text)) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			m.CPU = strings.TrimSpace(value)
			break
		}
	}
	return m
}

// version is the first line of what a program says of itself.
func version(path string, flag string) string {
	out, err := exec.Command(path, flag).CombinedOutput() // nginx says it on its standard error
	if err != nil {
		return "unknown"
	}
	line, _, _ := strings.Cut(string(out), "\n")
	return strings.TrimSpace(line)
}

// take takes one sample.
func (b *bench) take(c *contender, kind string) (s sample, err error) {
	s = sample{Kind: kind, Name: c.Name}
	role, parallel := kind, 1
	switch kind {
	case "connections":
		s.Units, parallel = int64(b.o.Conns), b.o.Parallel
	case "requests":
		s.Units, parallel = int64(b.o.Requests/b.o.Kept*b.o.Kept), b.o.Kept
	case "bulk1":
		role, s.Units = "bulk", b.o.Bulk
	case "bulk16":
		role, s.Units, parallel = "bulk", b.o.Bulk, 16
	case "idle":
		s.Units, parallel = int64(b.o.Idle), 64
	}
	if text, err := os.ReadFile("/proc/loadavg"); err == nil {
		fmt.Sscan(string(text), &s.LoadAvg)
	}
	cmd := exec.Command(self, "load", role, c.addr, strconv.FormatInt(s.Units, 10), strconv.Itoa(parallel))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return s, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return s, err
	}
	if err := cmd.Start(); err != nil {
		return s, err
	}
	defer func() { err = errors.Join(err, in.Close(), cmd.Wait()) }()
	lines := bufio.NewScanner(out)
	step := func(want string) error {
		if !lines.Scan() || lines.Text() != want {
			return fmt.Errorf("the load said %q, want %s: %w", lines.Text(), want, io.ErrUnexpectedEOF)
		}
		return nil
	}
	if err := step("ready"); err != nil {
		return s, err
	}
	memory, fds, err := c.size()
	if err != nil {
		return s, err
	}
	all := [3][]int{c.pids, {b.server}, {cmd.Process.Pid}}
	var before, after [3]int64
	for i := range all {
		if before[i], err = cpu(all[i]); err != nil {
			return s, err
		}
	}
	start := time.Now()
	if _, err := io.WriteString(in, "\n"); err != nil {
		return s, err
	}
	if err := step("done"); err != nil {
		return s, err
	}
	s.Wall = int64(time.Since(start))
	for i := range all {
		if after[i], err = cpu(all[i]); err != nil {
			return s, err
		}
	}
	s.Proxy, s.Server, s.Client = after[0]-before[0], after[1]-before[1], after[2]-before[2]
	if kind == "idle" {
		m, f, err := c.size()
		if err != nil {
			return s, err
		}
		s.Memory, s.FDs = m-memory, f-fds
	}
	return s, nil
}

// cpu reads the CPU clocks of processes, whose ids clock_getcpuclockid(3) makes of the pids.
func cpu(pids []int) (int64, error) {
	const schedClock = 2 // CPUCLOCK_SCHED, include/linux/posix-timers_types.h
	var sum int64
	for _, pid := range pids {
		var ts unix.Timespec
		if err := unix.ClockGettime(int32(^pid<<3|schedClock), &ts); err != nil {
			return 0, fmt.Errorf("read CPU time of process %d: %w", pid, err)
		}
		sum += ts.Nano()
	}
	return sum, nil
}

// size is the proportional set size and the number of descriptors.
func (c *contender) size() (memory int64, fds int, err error) {
	for _, pid := range c.pids {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
		if err != nil {
			return 0, 0, err
		}
		for line := range strings.Lines(string(text)) {
			if v, ok := strings.CutPrefix(line, "Pss:"); ok {
				n, err := strconv.ParseInt(strings.Fields(v)[0], 10, 64)
				if err != nil {
					return 0, 0, err
				}
				memory += n << 10
			}
		}
		names, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
		if err != nil {
			return 0, 0, err
		}
		fds += len(names)
	}
	return memory, fds, nil
}

// quantity is one figure that is compared.
type quantity struct {
	kind, name, unit, bar string
	of                    func(sample) float64
}

var quantities = []quantity{
	{"connections", "CPU of the proxy per new connection", "µs", "≤ 1.25", func(s sample) float64 { return float64(s.Proxy) / float64(s.Units) / 1e3 }},
	{"connections", "CPU of all per new connection", "µs", "", func(s sample) float64 { return s.all() / float64(s.Units) / 1e3 }},
	{"requests", "CPU of the proxy per request on a kept connection", "µs", "", func(s sample) float64 { return float64(s.Proxy) / float64(s.Units) / 1e3 }},
	{"requests", "CPU of all per request on a kept connection", "µs", "", func(s sample) float64 { return s.all() / float64(s.Units) / 1e3 }},
	{"bulk1", "CPU of the proxy per GB, 1 flow", "s", "≤ 1", func(s sample) float64 { return float64(s.Proxy) / float64(s.Units) }},
	{"bulk1", "CPU of all per GB, 1 flow", "s", "", func(s sample) float64 { return s.all() / float64(s.Units) }},
	{"bulk16", "CPU of the proxy per GB, 16 flows", "s", "≤ 1", func(s sample) float64 { return float64(s.Proxy) / float64(s.Units) }},
	{"bulk16", "CPU of all per GB, 16 flows", "s", "", func(s sample) float64 { return s.all() / float64(s.Units) }},
	{"idle", "memory per idle connection (PSS)", "B", "≤ 1", func(s sample) float64 { return float64(s.Memory) / float64(s.Units) }},
	{"idle", "descriptors per idle connection", "", "≤ 1", func(s sample) float64 { return float64(s.FDs) / float64(s.Units) }},
}

func (s sample) all() float64 { return float64(s.Proxy + s.Server + s.Client) }

// table is the result in Markdown.
func (b *bench) table(took time.Duration) string {
	var w strings.Builder
	m := b.machine
	fmt.Fprintf(&w, "# The relay beside HAProxy in TCP mode, nginx's stream module and io.Copy\n\n")
	fmt.Fprintf(&w, "%s, %d × %s, Linux %s, %s", m.Time, m.CPUs, m.CPU, m.Kernel, m.Go)
	for _, name := range slices.Sorted(maps.Keys(m.Peers)) {
		fmt.Fprintf(&w, "; %s", m.Peers[name])
	}
	fmt.Fprintf(&w, ".\n%d rounds in %v, each contender once in each, order by lot.\n", b.o.Rounds, took.Round(time.Second))
	fmt.Fprintf(&w, "New connections: %d, %d at a time. Requests: %d on %d connections, %d bytes for %d. Bulk: %d MiB from server to client. Idle: %d connections after one request each. Loopback in a network namespace, reno.\n", b.o.Conns, b.o.Parallel, b.o.Requests, b.o.Kept, requestSize, answerSize, b.o.Bulk>>20, b.o.Idle)
	for _, m := range b.missing {
		fmt.Fprintf(&w, "\n**Left out: %s.**\n", m)
	}
	names := []string{"relay", "HAProxy", "nginx", "io.Copy"}
	fmt.Fprintf(&w, "\n| | %s | relay to the better peer | 95 %% interval | bar |\n|---|%s\n", strings.Join(names, " | "), strings.Repeat("---|", len(names)+3))
	for _, q := range quantities {
		if !slices.Contains(b.o.Only, q.kind) {
			continue
		}
		values := make(map[string]map[int]float64)
		for _, s := range b.samples {
			if s.Kind == q.kind {
				if values[s.Name] == nil {
					values[s.Name] = make(map[int]float64)
				}
				values[s.Name][s.Round] = q.of(s)
			}
		}
		fmt.Fprintf(&w, "| %s |", q.name)
		best, bestMedian := "", math.Inf(1)
		for _, n := range names {
			if len(values[n]) == 0 {
				w.WriteString(" – |")
				continue
			}
			var v []float64
			for _, x := range values[n] {
				v = append(v, x)
			}
			m := median(v)
			fmt.Fprintf(&w, " %s |", figure(m, q.unit))
			if (n == "HAProxy" || n == "nginx") && m < bestMedian {
				best, bestMedian = n, m
			}
		}
		if best == "" {
			fmt.Fprintf(&w, " – | – | %s |\n", q.bar)
			continue
		}
		var ratios []float64
		for round, v := range values["relay"] {
			if p, ok := values[best][round]; ok {
				ratios = append(ratios, v/p)
			}
		}
		slices.Sort(ratios) // map order must not reach the bootstrap
		low, high := interval(ratios, b.rng)
		fmt.Fprintf(&w, " **%.2f** (%s) | %.2f – %.2f | %s |\n", median(ratios), best, low, high, q.bar)
	}
	low, high := math.Inf(1), 0.0
	for _, s := range b.samples {
		low, high = min(low, s.LoadAvg), max(high, s.LoadAvg)
	}
	fmt.Fprintf(&w, "\nCPU is the process CPU time, in which the kernel's work for a process is accounted. The load average was %.1f to %.1f.\n", low, high)
	return w.String()
}

func figure(v float64, unit string) string {
	switch {
	case math.Abs(v) >= 100:
		return strings.TrimSpace(fmt.Sprintf("%.0f %s", v, unit))
	case math.Abs(v) >= 1:
		return strings.TrimSpace(fmt.Sprintf("%.1f %s", v, unit))
	}
	return strings.TrimSpace(fmt.Sprintf("%.3f %s", v, unit))
}

func median(v []float64) float64 { return quantile(v, 0.5) }

// quantile interpolates between the two nearest ranks (Hyndman and Fan, definition 7).
func quantile(v []float64, q float64) float64 {
	if len(v) == 0 {
		return math.NaN()
	}
	s := slices.Clone(v)
	slices.Sort(s)
	at := q * float64(len(s)-1)
	lo := int(at)
	hi := min(lo+1, len(s)-1)
	return s[lo] + (at-float64(lo))*(s[hi]-s[lo])
}

// interval is a bootstrap 95 % interval of the median: the 2.5 % and 97.5 % quantiles of the medians of resamples.
func interval(v []float64, rng *rand.Rand) (low, high float64) {
	const resamples = 5000
	if len(v) == 0 {
		return math.NaN(), math.NaN()
	}
	medians := make([]float64, resamples)
	draw := make([]float64, len(v))
	for i := range medians {
		for j := range draw {
			draw[j] = v[rng.IntN(len(v))]
		}
		medians[i] = median(draw)
	}
	return quantile(medians, 0.025), quantile(medians, 0.975)
}

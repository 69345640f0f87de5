// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/agent"
	"github.com/ebbproxy/ebb/internal/hook"
	"github.com/ebbproxy/ebb/proxy"
)

const runLong = `Start CMD, find its listening sockets, and drain it on a stop signal.

Until a stop nothing is in CMD's way: connections are counted in the kernel, and none is touched. On SIGTERM, SIGINT or
SIGQUIT (or "ebb drain NAME") new connections are kept away, those that are open finish, CMD gets its own stop signal once
none is in flight or the wait slice is over, and what is left at the deadline is cut.

The budget is --grace = wait + --flush-timeout + --reserve. A second stop signal only says what is left, a third ends it by
force. Every other signal is forwarded to CMD.

Exit code: CMD's own when it ends by itself (128+N for signal N); 0 after a requested stop; with --exit-on-outcome 3 if the
drain expired and 4 if it was lost; 125 if ebb itself fails, 126 if CMD cannot be executed, 127 if it is not found.`

// runFlags are the flags of `ebb run` as they are typed.
type runFlags struct {
	name, service, protocol, idle, onDeadline string
	onNew                                     onNewFlag
	notify, flush, ready, mode, datapath, api string
	appSocket, metrics, report, bpffs         string
	listen, stopSignals                       []string
	peers, healthFrom                         []string
	healthPath                                string
	exclude                                   []uint
	grace, flushTimeout, reserve, quietPeriod time.Duration
	admitFor, idleAfter, closeSpread, holdFor time.Duration
	extension                                 time.Duration
	holdMax                                   int
	exitOnOutcome, restartOnExit, early       bool
	attach                                    int
}

func newRunCmd(env *environment) *cobra.Command {
	var f runFlags
	cmd := &cobra.Command{
		Use:   "run [flags] -- CMD [ARG...] | run --attach PID [flags]",
		Short: "Supervise CMD and drain it on a stop signal",
		Long:  runLong,
		Example: `  ebb run --protocol http1 -- nginx -g 'daemon off;'
  ebb run --name api --listen :8080 --grace 40s --report /var/log/api-drain.json -- ./server
  ebb run --service web --peer 192.0.2.10:8080 --health-path /healthz -- ./server
  ebb run --on-new refuse --notify signal:SIGQUIT -- ./server
  ebb run --flush api --extension 20s -- ./server`,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			o, err := f.options(env, args, cmd.ArgsLenAtDash())
			if err != nil {
				return err
			}
			// Whoever reads stderr may be slow, and a drain must not wait for that.
			out := agent.NewOutput(o.Stderr)
			o.Progress, o.Log = out, env.logger(out, o.Terminal)
			code, err := agent.Run(cmd.Context(), o)
			if cerr := out.Close(); err == nil {
				err = cerr
			}
			if err != nil || code != 0 {
				return &exitError{code: code, err: err}
			}
			return nil
		},
	}
	fl := cmd.Flags()
	fl.StringVar(&f.name, "name", "", "name of the backend (default: the base name of CMD)")
	fl.StringVar(&f.service, "service", "", "name of the service it belongs to (default: the name)")
	fl.StringArrayVar(&f.listen, "listen", nil, "`ADDR:PORT` that is the service (repeatable; default: CMD's listeners outside loopback, or all if there are no others)")
	fl.UintSliceVar(&f.exclude, "exclude-port", nil, "`port` that is not the service (repeatable)")
	fl.DurationVar(&f.grace, "grace", 25*time.Second, "total budget of a drain")
	fl.DurationVar(&f.flushTimeout, "flush-timeout", drain.DefaultFlushTimeout, "part of it for CMD to end after its stop signal")
	fl.DurationVar(&f.reserve, "reserve", drain.DefaultReserve, "part of it for the cut and the exit")
	fl.DurationVar(&f.quietPeriod, "quiet-period", drain.DefaultQuietPeriod, "how long zero, and under admit a pause of arrivals, must last")
	fl.DurationVar(&f.admitFor, "admit-for", 0, "longest time to admit late connections (default: half of the wait)")
	fl.StringVar(&f.protocol, "protocol", string(drain.ProtocolOpaque), "opaque, or http1 (cleartext, strict request and response)")
	fl.StringVar(&f.idle, "idle", "", "idle connections: ignore, wait or close (default: close for http1, ignore for opaque)")
	fl.DurationVar(&f.idleAfter, "idle-after", drain.DefaultIdleAfter, "under opaque: idle after this long without data either way")
	f.onNew.value = drain.OnNewAuto
	fl.Var(&f.onNew, "on-new", "late connections: auto, steer, relay, hold, admit or refuse")
	fl.StringArrayVar(&f.peers, "peer", nil, "`[PORT=]ADDR:PORT` of another backend of the service, to which late connections can be relayed, those to PORT where it is another one (repeatable)")
	fl.IntVar(&f.holdMax, "hold-max", proxy.DefaultParkMax, "how many new connections may wait for a successor, or for CMD to come back; more are reset")
	fl.DurationVar(&f.holdFor, "hold-for", proxy.DefaultParkFor, "how long each may wait")
	fl.StringArrayVar(&f.healthFrom, "health-from", nil, "`CIDR` from which a balancer's health checks come: when late they are reset (repeatable)")
	fl.StringVar(&f.healthPath, "health-path", "", "`path` of a balancer's health checks: when late they are answered with 503")
	fl.StringVar(&f.onDeadline, "on-deadline", string(drain.OnDeadlineCut), "what is left at the deadline: cut, reset or leave")
	fl.DurationVar(&f.closeSpread, "close-spread", 0, "spread the cuts over this window")
	fl.StringVar(&f.notify, "notify", "", "tell CMD that it is draining: `HOOK[@begin|@settled]`, as for --flush")
	fl.StringVar(&f.flush, "flush", "signal:SIGTERM", "tell CMD to stop: a `HOOK` is "+hook.Forms)
	fl.DurationVar(&f.extension, "extension", 0, "how much CMD may extend a drain by, once, through its session (default: not at all)")
	fl.StringSliceVar(&f.stopSignals, "stop-signal", nil, "`signals` that begin the drain (default: TERM, INT, QUIT; as PID 1 also USR1 and, without a terminal, WINCH)")
	fl.StringVar(&f.ready, "ready", "", "`URL` that must answer for /readyz to say yes")
	fl.StringVar(&f.mode, "mode", string(drain.ModeEnforce), "off, observe (count and report only) or enforce")
	fl.StringVar(&f.datapath, "datapath", "auto", "auto, bpf, or none (count by sock_diag, without privilege)")
	fl.StringVar(&f.api, "api", "", "`path` of the API socket (default: run/NAME.sock in the run directory)")
	fl.StringVar(&f.appSocket, "app-socket", "", "`path` of the socket that CMD finds in EBB_APP_SOCKET (default: run/NAME.app.sock in the run directory)")
	fl.StringVar(&f.metrics, "metrics", "", "`ADDR:PORT` for /metrics, /readyz and /livez over TCP")
	fl.StringVar(&f.report, "report", "", "write what happened to `FILE` as JSON at the end")
	fl.BoolVar(&f.exitOnOutcome, "exit-on-outcome", false, "exit with 3 if the drain expired, 4 if it was lost")
	fl.BoolVar(&f.early, "early", false, "a stop signal that another process sends to CMD closes admission in the kernel at once, and begins the drain")
	fl.IntVar(&f.attach, "attach", 0, "supervise the running process `PID` instead of starting CMD")
	fl.BoolVar(&f.restartOnExit, "restart-on-exit", false, "start CMD again when it ends unasked; new connections wait meanwhile, as --hold-for and --hold-max say")
	fl.StringVar(&f.bpffs, "bpffs", "", "`directory` in a bpffs for what is pinned (default: /sys/fs/bpf/ebb)")
	complete(cmd, "protocol", []string{string(drain.ProtocolOpaque), string(drain.ProtocolHTTP1)})
	complete(cmd, "idle", []string{string(drain.IdleIgnore), string(drain.IdleWait), string(drain.IdleClose)})
	complete(cmd, "on-deadline", []string{string(drain.OnDeadlineCut), string(drain.OnDeadlineReset), string(drain.OnDeadlineLeave)})
	complete(cmd, "mode", []string{string(drain.ModeOff), string(drain.ModeObserve), string(drain.ModeEnforce)})
	complete(cmd, "datapath", []string{"auto", "bpf", "none"})
	completeHook(cmd, "notify")
	completeHook(cmd, "flush")
	return cmd
}

// completeHook offers how a hook begins.
func completeHook(cmd *cobra.Command, flag string) {
	begins := []string{"signal:SIGTERM", "signal:SIGQUIT", "signal:SIGINT", "signal:SIGUSR1", "http://", "https://", "exec:", "api"}
	_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(begins, cobra.ShellCompDirectiveNoFileComp|cobra.ShellCompDirectiveNoSpace))
}

// options checks what was typed. Every error is one of usage, and `ebb run` answers 125 for those too.
func (f *runFlags) options(env *environment, args []string, dash int) (agent.RunOptions, error) {
	var o agent.RunOptions
	if dash > 0 {
		return o, usagef("%q stands before --; CMD and its arguments come after it", args[0])
	}
	switch {
	case f.attach < 0:
		return o, usagef("--attach %d: want the PID of a process", f.attach)
	case f.attach > 0 && len(args) > 0:
		return o, usagef("both --attach and a command are given")
	case f.attach == 0 && len(args) == 0:
		return o, usagef("no command: want ebb run [flags] -- CMD [ARG...]")
	}
	stdin, ok1 := env.stdin.(*os.File)
	stdout, ok2 := env.stdout.(*os.File)
	stderr, ok3 := env.stderr.(*os.File)
	if !ok1 || !ok2 || !ok3 {
		return o, errors.New("run: standard streams are not files")
	}
	_, terminal := env.terminal(env.stderr)
	o = agent.RunOptions{
		Name: f.name, Service: f.service, Argv: args, Env: os.Environ(), Stdin: stdin, Stdout: stdout, Stderr: stderr,
		Ready: f.ready, Mode: drain.Mode(f.mode), Datapath: f.datapath, API: f.api, AppSocket: f.appSocket, Metrics: f.metrics, Report: f.report,
		ExitOnOutcome: f.exitOnOutcome, RestartOnExit: f.restartOnExit, Early: f.early, Attach: f.attach, RunDir: env.runDir(), BPFFS: f.bpffs,
		Terminal: terminal,
		Policy: drain.Policy{
			Protocol: drain.Protocol(f.protocol), OnNew: f.onNew.value, OnDeadline: drain.OnDeadline(f.onDeadline),
			Idle: drain.IdlePolicy(f.idle), Grace: f.grace, FlushTimeout: f.flushTimeout, Reserve: f.reserve,
			QuietPeriod: f.quietPeriod, AdmitFor: f.admitFor, IdleAfter: f.idleAfter, CloseSpread: f.closeSpread,
		},
	}
	o.Version, o.Commit = buildVersion()
	for _, v := range []struct{ flag, value, known string }{
		{"mode", f.mode, "off observe enforce"}, {"datapath", f.datapath, "auto bpf none"},
	} {
		if !slices.Contains(strings.Fields(v.known), v.value) {
			return o, usagef("--%s %q: want one of %s", v.flag, v.value, strings.ReplaceAll(v.known, " ", ", "))
		}
	}
	for _, s := range f.listen {
		ap, err := agent.ParseListen(s)
		if err != nil {
			return o, usagef("--listen: %w", err)
		}
		o.Listen = append(o.Listen, ap)
	}
	if len(o.Listen) > maxPorts || len(f.exclude) > maxPorts {
		return o, usagef("--listen and --exclude-port take %d values each at most", maxPorts)
	}
	for _, p := range f.exclude {
		if p == 0 || p > 65535 {
			return o, usagef("--exclude-port %d: want a port from 1 to 65535", p)
		}
		o.Exclude = append(o.Exclude, uint16(p))
	}
	for _, v := range []struct {
		flag string
		d    time.Duration
	}{{"grace", f.grace}, {"flush-timeout", f.flushTimeout}, {"reserve", f.reserve}, {"quiet-period", f.quietPeriod}, {"idle-after", f.idleAfter}, {"hold-for", f.holdFor}} {
		if v.d == 0 { // which would mean the default to what comes after
			return o, usagef("--%s %v: want a duration above 0", v.flag, v.d)
		}
	}
	if f.ready != "" {
		if u, err := url.Parse(f.ready); err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" {
			return o, usagef("--ready %q: want a URL such as http://127.0.0.1:8081/healthz", f.ready)
		}
	}
	if err := f.late(&o); err != nil {
		return o, err
	}
	for _, s := range f.stopSignals {
		sig, err := hook.ParseSignal(s)
		if err != nil {
			return o, usagef("--stop-signal: %w", err)
		}
		if sig == syscall.SIGKILL || sig == syscall.SIGSTOP || sig == syscall.SIGCHLD {
			return o, usagef("--stop-signal %s: nobody can catch KILL and STOP, and CHLD is how CMD's end is heard of", s)
		}
		o.StopSignals = append(o.StopSignals, sig)
	}
	return o, f.hooks(&o)
}

// late reads what is said of late connections.
func (f *runFlags) late(o *agent.RunOptions) error {
	for _, s := range f.peers {
		p, err := parsePeer(s)
		if err != nil {
			return usagef("--peer %q: %w", s, err)
		}
		o.Peers = append(o.Peers, p)
	}
	if f.holdMax < 1 || f.holdMax > agent.MaxHold {
		return usagef("--hold-max %d: want 1 to %d connections", f.holdMax, agent.MaxHold)
	}
	if f.holdFor < 0 {
		return usagef("--hold-for %v: want a duration above 0", f.holdFor)
	}
	o.HoldMax, o.HoldFor = f.holdMax, f.holdFor
	for _, s := range f.healthFrom {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			addr, aerr := netip.ParseAddr(s)
			if aerr != nil {
				return usagef("--health-from %q: want an address or a prefix, such as 192.0.2.0/28", s)
			}
			p = netip.PrefixFrom(addr, addr.BitLen())
		}
		o.HealthFrom = append(o.HealthFrom, p.Masked())
	}
	if o.HealthPath = f.healthPath; o.HealthPath != "" && (o.HealthPath[0] != '/' || strings.ContainsAny(o.HealthPath, " \t\r\n?#")) {
		return usagef("--health-path %q: want a path that begins with / and has no query", o.HealthPath)
	}
	return nil
}

// parsePeer reads [PORT=]ADDR:PORT.
func parsePeer(s string) (p agent.Peer, err error) {
	port, addr, named := strings.Cut(s, "=")
	if !named {
		addr = s
	} else if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return p, fmt.Errorf("%q is no port of this service: want 1 to 65535", port)
	} else {
		p.For = uint16(n)
	}
	p.Address, err = netip.ParseAddrPort(addr)
	if err != nil || p.Address.Port() == 0 || p.Address.Addr().IsUnspecified() {
		return p, errors.New("want ADDR:PORT with a numeric address, such as 192.0.2.10:80, [2001:db8::10]:80 or 443=192.0.2.10:8443")
	}
	return p, nil
}

// maxPorts is how many ports a watch in the kernel holds.
const maxPorts = 16

// hooks reads what CMD is told, and what it may ask for.
func (f *runFlags) hooks(o *agent.RunOptions) error {
	var err error
	if f.notify != "" {
		if o.Notify, o.Policy.NotifyAt, err = hook.ParseNotify(f.notify); err != nil {
			return usagef("--notify %q: %w", f.notify, err)
		}
	}
	if s := o.Notify.Signal; s == syscall.SIGKILL || s == syscall.SIGSTOP {
		return usagef("--notify %q: CMD cannot wind down at a signal that it cannot catch", f.notify)
	}
	var at drain.NotifyAt
	if o.Flush, at, err = hook.ParseNotify(f.flush); err != nil {
		return usagef("--flush %q: %w", f.flush, err)
	}
	if at != "" {
		return usagef("--flush %q: @%s belongs to --notify", f.flush, at)
	}
	if s := o.Flush.Signal; s == syscall.SIGSTOP || s == syscall.SIGCONT || s == syscall.SIGCHLD {
		return usagef("--flush %q: no program ends at it", f.flush)
	}
	if f.extension < 0 || f.extension > max(0, f.grace) { // a grace below zero is told with the rest of the budget
		return usagef("--extension %v: want a duration up to --grace, %v", f.extension, f.grace)
	}
	o.Extension = f.extension
	return nil
}

// logger writes what is wrong to stderr: in words on a terminal, as JSON beside the events elsewhere.
func (e *environment) logger(w io.Writer, terminal bool) *slog.Logger {
	o := &slog.HandlerOptions{Level: slog.LevelWarn}
	if e.getenv("EBB_DEBUG") != "" {
		o.Level = slog.LevelDebug
	}
	if terminal {
		return slog.New(slog.NewTextHandler(w, o))
	}
	return slog.New(slog.NewJSONHandler(w, o))
}

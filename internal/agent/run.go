// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/bpf"
	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/hook"
	"github.com/ebbproxy/ebb/internal/metrics"
	"github.com/ebbproxy/ebb/probes"
	"github.com/ebbproxy/ebb/proxy"
)

// Events that a run adds to those of its drains.
const (
	// EventRun says that the run has started, adopted or ended its CMD; fields pid, argv, exit.
	EventRun = "run"
	// EventListener says that a covered listener was found; fields address, mptcp.
	EventListener = "listener.found"
	// EventDegraded says what this host cannot do for the run; the message says what to do about it.
	EventDegraded = "degraded"
	// EventGuarded says that connections which come while CMD is away wait for it from now on; field address.
	EventGuarded = "listener.guarded"
	// EventEarly says what a stop signal to CMD does at once from now on; field prepared, or guarded (true).
	EventEarly = "early"
	// EventAction is the audit of one action over the API; fields action, uid, pid, by, reason, status (of the answer),
	// err if it was refused.
	EventAction = "action"
	// EventSignal says that a signal was received; fields signal, forwarded.
	EventSignal = "signal"
)

// Exit codes of `ebb run` beside CMD's own.
const (
	ExitExpired       = 3
	ExitLost          = 4
	ExitFailure       = 125
	ExitNotExecutable = 126
	ExitNotFound      = 127
)

// RunOptions says what `ebb run` supervises and how. The zero value of a field is the documented default.
type RunOptions struct {
	Name    string // default: CMD's base name
	Service string // default: Name
	Argv    []string
	Env     []string
	Stdin   *os.File
	Stdout  *os.File
	Stderr  *os.File

	Listen  []netip.AddrPort
	Exclude []uint16
	Ready   string // URL

	Peers      []Peer         // backends to which late connections can be relayed
	HealthFrom []netip.Prefix // sources of a balancer's health checks
	HealthPath string         // their path
	HoldMax    int            // connections that may wait at a time; default proxy.DefaultParkMax
	HoldFor    time.Duration  // how long each may wait; default proxy.DefaultParkFor

	// RestartOnExit starts CMD again when it ends without having been asked to; new connections wait meanwhile.
	RestartOnExit bool

	Early  bool // a stop signal that somebody else sends to CMD closes admission in the kernel
	Attach int  // instead of Argv: a process that runs already

	Policy      drain.Policy
	Mode        drain.Mode       // default enforce
	Notify      hook.Hook        // zero: none
	Flush       hook.Hook        // default SIGTERM
	Extension   time.Duration    // by how much an application may extend a drain, once; 0: not at all
	StopSignals []syscall.Signal // default DefaultStopSignals

	Datapath      string // auto (default), bpf, none
	API           string // socket; default NAME.sock in the run directory
	AppSocket     string // socket of applications; default NAME.app.sock in the run directory
	Metrics       string // ADDR:PORT; "" serves them on the API socket only
	Report        string
	ExitOnOutcome bool
	RunDir        string // where sockets and journals are
	BPFFS         string // bpffs directory; "" for the default
	Version       string
	Commit        string

	Terminal bool      // Progress is a terminal: a live line and plain words instead of JSON
	Progress io.Writer // nil: nothing is shown
	Log      *slog.Logger
}

// flushSignal is what tells CMD to stop where no hook can.
func (o RunOptions) flushSignal() syscall.Signal { return cmp.Or(o.Flush.Signal, unix.SIGTERM) }

// Report is what --report writes: the drain as the API shows it, and what became of CMD.
type Report struct {
	Name    string      `json:"name"`
	Service string      `json:"service"`
	Gen     uint64      `json:"gen"`
	Exit    string      `json:"exit"`
	Code    int         `json:"exit_code"`
	Backend api.Backend `json:"backend"`
}

var nameOK = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$`)

// sessionsExt is how the file of a run's sessions ends, beside its journal.
const sessionsExt = ".sessions"

// runner is one `ebb run`: its backend, and CMD, which it starts and ends.
type runner struct {
	*member
	o     RunOptions
	set   *settings
	lock  *os.File
	bound bound
	paths paths
	ports [2]uint16 // source ports from which our relay reaches CMD past the rule; zero: it never does

	early      *early    // nil without --early
	lastStart  time.Time // of CMD; both are for the goroutine of loop alone
	startsSoon int       // how many in a row ended soon

	stop      sync.Mutex
	stoppedAt time.Time // when the last one came
	stopping  int       // stop signals received
	forced    bool      // the third one came
}

type paths struct{ dir, sock, apps, journal string }

// Run supervises a command until it has ended and returns the exit code of the contract. The error, if any, is Ebb's
// own; the code already says so.
func Run(ctx context.Context, o RunOptions) (int, error) {
	// First of all, so that no signal is lost to a start that is under way.
	sigs := catchSignals()
	r, err := newRunner(o)
	if err != nil {
		return ExitFailure, err
	}
	code, err := r.run(ctx, sigs)
	return code, errors.Join(err, r.lock.Close())
}

func newRunner(o RunOptions) (*runner, error) {
	switch {
	case o.Attach > 0 && len(o.Argv) > 0:
		return nil, errors.New("both --attach and a command are given")
	case o.Attach > 0 && o.RestartOnExit:
		return nil, errors.New("--restart-on-exit starts a command again, and --attach has none")
	case o.Early && o.RestartOnExit:
		return nil, errors.New("--early makes a drain of a stop signal to CMD, and --restart-on-exit a restart: choose one")
	case o.Attach > 0:
	case len(o.Argv) == 0:
		return nil, errors.New("no command: want `ebb run [flags] -- CMD [ARG…]`")
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Mode == "" {
		o.Mode = drain.ModeEnforce
	}
	if o.Flush.IsZero() {
		o.Flush = hook.Hook{Signal: unix.SIGTERM}
	}
	if o.StopSignals == nil {
		o.StopSignals = DefaultStopSignals(os.Getpid(), o.Terminal)
	}
	eff, err := drain.Validate(o.Policy)
	if err != nil {
		return nil, err
	}
	r := &runner{member: &member{log: o.Log, started: time.Now(), wg: new(sync.WaitGroup)}, o: o, lastStart: time.Now()}
	r.set = &settings{
		mode: o.Mode, policy: o.Policy, eff: eff, cov: r.coverage(), notify: o.Notify, flush: o.Flush, extension: o.Extension,
	}
	if o.Ready != "" {
		r.set.ready = func(ctx context.Context) error { return probes.Ready(ctx, o.Ready, readyTimeout) }
	}
	if o.RestartOnExit {
		r.ports = freePorts(cmp.Or(o.HoldMax, proxy.DefaultParkMax))
	}
	if err := r.claim(); err != nil {
		return nil, err
	}
	r.name, r.service, r.late = r.o.Name, r.o.Service, r.lateOptions
	return r, nil
}

// claim takes the name: a lock that lives as long as we do.
func (r *runner) claim() error {
	given := r.o.Name != ""
	if !given {
		called := ""
		if r.o.Attach > 0 {
			var err error
			if called, err = nameOf(r.o.Attach); err != nil {
				return err
			}
		} else {
			called = filepath.Base(r.o.Argv[0])
		}
		r.o.Name = strings.Map(func(c rune) rune {
			if strings.ContainsRune("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-", c) {
				return c
			}
			return '-'
		}, called)
		r.o.Name = strings.TrimLeft(r.o.Name, "._-")
	}
	if !nameOK.MatchString(r.o.Name) {
		return fmt.Errorf("name %q: want 1 to 63 letters, digits, dots, dashes or underscores, the first a letter or digit", r.o.Name)
	}
	if strings.HasSuffix(r.o.Name+".sock", api.AppExt) {
		return fmt.Errorf("name %q: it must not end in .app, since its socket would be that of another run's applications", r.o.Name)
	}
	if err := api.MakeRunDir(r.o.RunDir, os.Getuid()); err != nil {
		return err
	}
	dir := filepath.Join(r.o.RunDir, "run")
	take := func(name string) (*os.File, error) {
		path := filepath.Join(dir, name+".lock")
		// Not at the first refusal: a run that is starting tries the locks of the others for a moment, to tell the dead.
		for range 25 {
			f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
			if err != nil {
				return nil, fmt.Errorf("open lock: %w", err)
			}
			err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
			if err == nil && isAt(f, path) {
				return f, nil
			}
			f.Close()
			if err != nil && !errors.Is(err, unix.EWOULDBLOCK) {
				return nil, fmt.Errorf("lock name %s: %w", name, err)
			}
			wait(context.Background(), 20*time.Millisecond)
		}
		return nil, fmt.Errorf("%w: another `ebb run` named %s is alive; give this one its own --name", ErrNameTaken, name)
	}
	f, err := take(r.o.Name)
	if errors.Is(err, ErrNameTaken) && !given {
		r.o.Name = fmt.Sprintf("%s-%d", r.o.Name, os.Getpid())
		f, err = take(r.o.Name)
	}
	if err != nil {
		return err
	}
	r.lock = f
	if r.o.Service == "" {
		r.o.Service = r.o.Name
	}
	base := filepath.Join(dir, r.o.Name)
	r.paths = paths{dir: dir, sock: cmp.Or(r.o.API, base+".sock"), apps: cmp.Or(r.o.AppSocket, base+api.AppExt), journal: base + ".journal"}
	r.sessions = base + sessionsExt
	return nil
}

// isAt tells whether an open file is still the one at path: `ebb cleanup` may have removed it before it was locked.
func isAt(f *os.File, path string) bool {
	open, err := f.Stat()
	if err != nil {
		return false
	}
	there, err := os.Lstat(path)
	return err == nil && os.SameFile(open, there)
}

// backendID names a backend of this host: the same run, restarted, gets the same one, and the same name in another
// container or after a reboot another one.
func backendID(name string) uint64 {
	var netns uint64
	if f, err := os.Open("/proc/thread-self/ns/net"); err == nil {
		var st unix.Stat_t
		if unix.Fstat(int(f.Fd()), &st) == nil {
			netns = st.Ino
		}
		f.Close()
	}
	return hashID("run", bootID(), strconv.FormatUint(netns, 10), name)
}

func hashID(parts ...string) uint64 {
	sum := sha256.Sum256([]byte(strings.Join(parts, "\x00")))
	return max(1, binary.LittleEndian.Uint64(sum[:]))
}

var bootID = sync.OnceValue(func() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
})

func (r *runner) run(ctx context.Context, sigs <-chan os.Signal) (code int, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	j, past, err := openJournal(r.paths.journal)
	if err != nil {
		return ExitFailure, err
	}
	defer func() { err = errors.Join(err, j.close()) }()
	if err := syncDir(filepath.Dir(r.paths.journal)); err != nil {
		return ExitFailure, err
	}
	if past.torn {
		r.log.Warn("journal ended in a torn record, which was cut off", "path", r.paths.journal)
	}
	r.events = api.NewLog(api.LogOptions{})
	if r.metrics, err = metrics.New(metrics.Options{Source: only(r.member), Version: r.o.Version, Commit: r.o.Commit}); err != nil {
		return ExitFailure, err
	}

	proc := r.survivor(past)
	adopted := proc != nil
	r.id = backendID(r.o.Name)
	inc := &incarnation{set: r.set, gen: max(past.lastGen+1, uint64(time.Now().Unix()))}
	if adopted {
		inc.gen = past.lastRun.Gen
	}
	r.current.Store(inc)
	dp, err := r.datapath(proc)
	if err != nil {
		return ExitFailure, err
	}
	r.metrics.Register(r.o.Service, r.o.Name)
	r.metrics.SetFeature("admission", dp.guarded())
	r.metrics.SetFeature("census", dp.name() == "bpf")
	removed := false
	defer func() {
		if !removed {
			// An adopted CMD outlives us once more: the next owner finds its counts and its rule.
			err = errors.Join(err, dp.close(!adopted))
		}
	}()
	if !adopted && r.stopBefore(sigs) { // the start is abandoned: nothing runs yet
		return 0, nil
	}
	// What cannot be served must be known before CMD runs, since CMD would have to be killed for it.
	if err := r.bind(ctx); err != nil {
		return ExitFailure, err
	}
	defer func() { err = errors.Join(err, r.unbind()) }()
	if adopted && past.openDrain == nil {
		// A refusal whose drain is in no journal is nobody's any more.
		if err := dp.admit(); err != nil {
			return ExitFailure, err
		}
	}
	if proc == nil && r.o.Attach > 0 {
		if proc, err = r.attach(); err != nil {
			return ExitFailure, err
		}
		r.o.Argv = commandOf(proc.pid)
	}
	if proc == nil {
		if proc, err = startProcess(r.o.Argv, r.environ(), r.stdin(), r.o.Stdout, r.o.Stderr); err != nil {
			switch {
			case errors.Is(err, ErrNotFound):
				return ExitNotFound, err
			case errors.Is(err, ErrNotExecutable):
				return ExitNotExecutable, err
			}
			return ExitFailure, err
		}
	}
	if _, err = r.incarnate(ctx, arrival{gen: inc.gen, set: r.set, proc: proc, argv: r.o.Argv, dp: dp, journal: j, past: past, adopted: adopted}); err != nil {
		return ExitFailure, errors.Join(err, abandon(proc, adopted), proc.close())
	}
	defer func() { err = errors.Join(err, r.life().proc.close()) }()
	defer func() {
		cancel()
		r.life().end(api.EndRestarting)
		r.wg.Wait()
	}()
	closeAPI, err := r.serve(ctx)
	if err != nil {
		return ExitFailure, errors.Join(err, abandon(proc, adopted))
	}
	verb := "started"
	if r.o.Attach > 0 {
		verb = "attached to"
	}
	argv := r.o.Argv
	if adopted {
		verb, argv = "adopted", past.lastRun.Argv
	}
	r.emit(drain.Event{Type: EventRun, Message: fmt.Sprintf("%s %s as process %d; %s", verb, strings.Join(argv, " "), proc.pid, r.set.eff), Fields: map[string]any{"pid": proc.pid, "argv": argv}})
	for _, why := range dp.warnings(nil) {
		r.degraded(why)
	}
	if r.o.Early && r.o.Mode == drain.ModeEnforce {
		if r.early, err = r.openEarly(dp); err != nil {
			r.degraded("a stop signal that somebody else sends to CMD is not seen: " + err.Error())
		} else {
			inc := r.life()
			inc.wg.Go(func() { r.early.keep(ctx, inc.b) })
			defer func() { err = errors.Join(err, r.early.close()) }()
		}
	}
	if r.o.RestartOnExit && r.life().b.late.keep == nil {
		r.degraded("connections that come while CMD is away are refused: holding them takes the kernel datapath and --mode enforce")
	}
	if r.o.Terminal && r.o.Progress != nil {
		r.wg.Go(func() { r.live(ctx) })
	}
	r.wg.Go(func() { r.follow(ctx) })

	r.loop(ctx, sigs)

	r.life().b.late.close() // before the report, which says what the relay has done
	code = r.finish(ctx, r.life().proc)
	closeAPI()
	cancel()
	r.life().end(api.EndEvicted)
	r.wg.Wait()
	if rerr := removeIfThere(r.sessions); rerr != nil {
		r.log.Warn("remove the sessions", "err", rerr)
	}
	removed = true
	if cerr := dp.close(true); cerr != nil {
		r.log.Warn("remove backend from kernel", "err", cerr)
	}
	return code, nil
}

// abandon ends a CMD that cannot be supervised, unless it is one that served before us.
func abandon(proc *process, adopted bool) error {
	if adopted {
		return nil
	}
	return proc.killAll()
}

// survivor is the CMD of an earlier `ebb run` of this name, if it is still the same living process.
func (r *runner) survivor(past history) *process {
	last := past.lastRun
	if last == nil || last.BootID != bootID() {
		return nil
	}
	p, ok := adoptProcess(last.PID, last.Start)
	if !ok {
		return nil
	}
	if r.o.Attach > 0 {
		if last.PID != r.o.Attach {
			r.log.Warn("the command of the last run still lives and is adopted; the other process is not attached to", "pid", last.PID, "argv", last.Argv)
		}
		r.o.Argv = last.Argv
		return p
	}
	if !slices.Equal(last.Argv, r.o.Argv) {
		r.log.Warn("the command of the last run still lives and is adopted; the new command line is not started", "pid", last.PID, "argv", last.Argv)
	}
	return p
}

// datapath chooses how to count. auto prefers the kernel and says what it lacks; bpf insists.
func (r *runner) datapath(adopted *process) (datapath, error) {
	if r.o.Mode == drain.ModeOff || r.o.Datapath == "none" {
		return newWalkDatapath(nil)
	}
	cov := r.coverage()
	var pids func() []int
	if adopted != nil {
		pids = adopted.descendants
	}
	k, err := newKernelDatapath(kernelOptions{
		BPF: bpf.Options{Dir: r.o.BPFFS, Log: r.log}, ID: r.id, Gen: r.life().gen, Enforce: r.o.Mode == drain.ModeEnforce,
		Only: portsOnly(cov.only), Exclude: cov.exclude, Adopt: adopted != nil, PIDs: pids, Log: r.log, Dead: deadBackends(r.paths.dir), Bypass: r.ports,
	})
	if err == nil {
		return k, nil
	}
	if r.o.Datapath == "bpf" {
		return nil, fmt.Errorf("use the kernel datapath: %w (see `ebb check`)", err)
	}
	return newWalkDatapath(nil, "no kernel datapath, so admission cannot close and a zero is believed only after a pause: "+err.Error()+"; see `ebb check`")
}

// deadBackends tells of the runs in dir whose owner has let go of its lock and whose CMD has ended. A backend that no
// journal there names may belong to another container and is left alone.
func deadBackends(dir string) func(uint64) bool {
	dead := map[uint64]bool{}
	journals, err := filepath.Glob(filepath.Join(dir, "*.journal"))
	if err != nil {
		return nil
	}
	for _, path := range journals {
		if locked(strings.TrimSuffix(path, ".journal") + ".lock") {
			continue
		}
		f, err := os.Open(path)
		if err != nil {
			continue
		}
		h, _, err := readJournal(f)
		f.Close()
		if err != nil || h.lastRun == nil || (h.lastRun.BootID == bootID() && probes.Alive(h.lastRun.PID, h.lastRun.Start)) {
			continue
		}
		dead[h.lastRun.Backend] = true
	}
	return func(id uint64) bool { return dead[id] }
}

// locked tells whether a living owner holds the lock.
func locked(path string) bool {
	lock, dead := lockOfDead(path)
	if lock != nil {
		lock.Close()
	}
	return !dead
}

func portsOnly(aps []netip.AddrPort) []uint16 {
	var ports []uint16
	for _, ap := range aps {
		if !slices.Contains(ports, ap.Port()) {
			ports = append(ports, ap.Port())
		}
	}
	return ports
}

func (r *runner) coverage() coverage {
	c := coverage{only: r.o.Listen, exclude: r.o.Exclude}
	for _, url := range []string{r.o.Ready, r.o.Notify.HTTP, r.o.Flush.HTTP} {
		if p, ok := hook.URLPort(url); ok {
			c.aux = append(c.aux, p)
		}
	}
	return c
}

// relayRetireAfter is how long a relayed connection must be idle behind its answer to be retired: as for the application's
// own connections of which little is known.
const relayRetireAfter = 2500 * time.Millisecond

func (r *runner) lateOptions(set *settings, dp datapath) lateOptions {
	o := lateOptions{name: r.o.Name, relay: r.o.Name, service: r.o.Service, runDir: r.o.RunDir, sock: r.paths.sock, peers: r.o.Peers, ports: r.ports}
	o.park = proxy.ParkOptions{Max: r.o.HoldMax, For: r.o.HoldFor}
	o.keep = r.o.RestartOnExit && set.mode == drain.ModeEnforce && dp.guarded()
	o.ready = set.ready
	if set.eff.Policy.Idle == drain.IdleClose {
		o.retire, o.quiet = relayRetireAfter, set.eff.Policy.QuietPeriod
	}
	if len(r.o.HealthFrom) > 0 || r.o.HealthPath != "" {
		o.health = &proxy.Health{From: r.o.HealthFrom, Path: r.o.HealthPath}
	}
	return o
}

// stdin is CMD's standard input. CMD is in a process group of its own, so that Ctrl-C does not reach it before its turn;
// reading from a terminal would stop it for ever (SIGTTIN), so it gets an empty one.
func (r *runner) stdin() *os.File {
	if _, err := unix.IoctlGetTermios(int(r.o.Stdin.Fd()), unix.TCGETS); err == nil {
		if null, err := os.Open(os.DevNull); err == nil {
			return null
		}
	}
	return r.o.Stdin
}

// environ is CMD's environment: ours, and where CMD finds us.
func (r *runner) environ() []string {
	const key = "EBB_APP_SOCKET="
	env := slices.DeleteFunc(slices.Clone(r.o.Env), func(kv string) bool { return strings.HasPrefix(kv, key) })
	return append(env, key+r.paths.apps)
}

// stopBefore tells whether a stop signal came while the run was starting.
func (r *runner) stopBefore(sigs <-chan os.Signal) bool {
	for {
		select {
		case s := <-sigs:
			if sig, ok := s.(syscall.Signal); ok && slices.Contains(r.o.StopSignals, sig) {
				r.log.Info("stopped before CMD was started", "signal", unix.SignalName(sig))
				return true
			}
		default:
			return false
		}
	}
}

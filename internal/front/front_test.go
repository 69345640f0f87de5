// SPDX-License-Identifier: Apache-2.0

package front

import (
	"bufio"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/api/apitest"
	"github.com/ebbproxy/ebb/internal/config"
	"github.com/ebbproxy/ebb/internal/netnstest"
	sessions "github.com/ebbproxy/ebb/internal/session"
)

const waitFor = 60 * time.Second

// TestMain lets this binary be a front, as that of the product is one.
func TestMain(m *testing.M) {
	if err := os.Setenv("GORACE", "atexit_sleep_ms=0"); err != nil { // a second for each process
		panic(err)
	}
	if len(os.Args) < 2 || os.Args[1] != Arg && os.Args[1] != "core" {
		os.Exit(m.Run())
	}
	err := fmt.Errorf("%q is unknown", os.Args[1:])
	switch args := os.Args[1:]; {
	case args[0] == "core":
		err = coreMain(args[1])
	case len(args) == 1:
		err = Main(context.Background(), slog.New(slog.NewTextHandler(os.Stderr, nil)))
	case args[1] == "--parse-config" && strings.HasSuffix(args[2], "crash.yaml"):
		err = errors.New("the parser has crashed")
	case args[1] == "--parse-config":
		err = Parse(args[2], os.Stdin, os.Stdout)
	case args[1] == "try":
		err = tryAll(os.Stdout)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// served is a core with its front.
type served struct {
	t       *testing.T
	log     *api.Log
	src     *apitest.Apps
	sock    string
	probes  string
	remote  string
	cancel  context.CancelFunc
	done    chan error
	started chan int
	ended   chan error

	mu     sync.Mutex
	audits []api.Audit
}

func serve(t *testing.T, change func(*Options)) *served {
	t.Helper()
	netnstest.RequireRoot(t)
	s := &served{t: t, log: api.NewLog(api.LogOptions{}), sock: filepath.Join(t.TempDir(), "s"), done: make(chan error, 1), started: make(chan int, 10), ended: make(chan error, 10)}
	var err error
	thresholds := sessions.Options{Heartbeat: 20 * time.Millisecond, Suspect: time.Hour, Lost: 2 * time.Hour}
	if s.src, err = apitest.NewApps(s.log, thresholds, apitest.Web(), apitest.Blind()); err != nil {
		t.Fatal(err)
	}
	ln, err := api.ListenAs(s.sock, 0o660, 0)
	if err != nil {
		t.Fatal(err)
	}
	tcp := func() (net.Listener, string) {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		return ln, ln.Addr().String()
	}
	probes, addr := tcp()
	s.probes = addr
	o := Options{
		Source: s.src, Log: s.log,
		Entrances: []Entrance{{Kind: Operators, Listener: ln}, {Kind: Probes, Listener: probes}},
		Owns:      func(_ context.Context, pid int) (string, bool) { return "web", pid == os.Getpid() },
		Metrics: http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			w.Header().Set("Content-Type", "text/plain; version=0.0.4")
			if req.Header.Get("Accept-Encoding") != "gzip" {
				t.Error("the core does not ask for a compressed page")
			}
			w.Header().Set("Content-Encoding", "gzip")
			z := gzip.NewWriter(w)
			_, _ = io.WriteString(z, "ebb_up 1\n")
			z.Close()
		}),
		Audit: func(a api.Audit) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.audits = append(s.audits, a)
		},
		Started: func(pid int) { s.started <- pid },
		Ended:   func(err error) { s.ended <- err },
	}
	if change != nil {
		change(&o)
	}
	for _, e := range o.Entrances {
		if e.Kind == Remote {
			s.remote = e.Listener.Addr().String()
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	s.cancel = cancel
	go func() { s.done <- Serve(ctx, o) }()
	t.Cleanup(func() {
		if err := s.log.Close(); err != nil {
			t.Error(err)
		}
		cancel()
		select {
		case err := <-s.done:
			if err != nil {
				t.Errorf("serve: %v", err)
			}
		case <-time.After(waitFor):
			t.Error("Serve does not return")
		}
		for _, e := range o.Entrances {
			if err := e.Listener.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	return s
}

// next is the pid of the next front that serves.
func (s *served) next() int {
	s.t.Helper()
	select {
	case pid := <-s.started:
		return pid
	case err := <-s.done:
		s.done <- nil
		s.t.Fatalf("serve: %v", err)
	case <-time.After(waitFor):
		s.t.Fatal("no front begins to serve")
	}
	return 0
}

func (s *served) client() *api.Client {
	s.t.Helper()
	c, err := api.Dial(s.t.Context(), s.sock)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { c.Close() })
	return c
}

// status are lines of /proc/PID/status.
func status(t *testing.T, pid int) map[string]string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for line := range strings.Lines(string(b)) {
		k, v, _ := strings.Cut(line, ":")
		out[k] = strings.TrimSpace(v)
	}
	return out
}

func TestAFrontHasNoPrivilege(t *testing.T) {
	s := serve(t, nil)
	pid := s.next()
	st := status(t, pid)
	for key, want := range map[string]string{
		"CapPrm": "0000000000000000", "CapEff": "0000000000000000", "CapInh": "0000000000000000", "CapAmb": "0000000000000000",
		"NoNewPrivs": "1", "Seccomp": "2", "Groups": "",
	} {
		if st[key] != want {
			t.Errorf("%s: got %q, want %q", key, st[key], want)
		}
	}
	for _, key := range []string{"Uid", "Gid"} {
		if f := strings.Fields(st[key]); len(f) != 4 || strings.Contains(" "+st[key], " 0") {
			t.Errorf("%s: got %q, want none that is root's", key, st[key])
		}
	}
	// What belongs to root below /proc is not dumpable, and out of reach of the same user.
	fi, err := os.Stat(fmt.Sprintf("/proc/%d/mem", pid))
	if err != nil {
		t.Fatal(err)
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); !ok || st.Uid != 0 {
		t.Error("other processes of its user may read its memory")
	}
	env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	if err != nil || strings.Contains(string(env), "PATH=") {
		t.Errorf("it has the core's environment: %q, %v", env, err)
	}
}

// attempts are what one who has taken a front over would try.
var attempts = []struct {
	name string
	try  func() error
}{
	{"execute", func() error { return unix.Exec("/bin/true", []string{"true"}, nil) }},
	{"fork", func() error { _, err := syscall.ForkExec("/bin/true", []string{"true"}, nil); return err }},
	{"open a TCP socket", func() error { _, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0); return err }},
	{"open a Unix socket", func() error { _, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0); return err }},
	{"open a netlink socket", func() error {
		_, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_SOCK_DIAG)
		return err
	}},
	{"trace its parent", func() error { return unix.PtraceAttach(os.Getppid()) }},
	{"signal its parent", func() error { return unix.Kill(os.Getppid(), 0) }},
	{"a new user namespace", func() error { return unix.Unshare(unix.CLONE_NEWUSER) }},
	{"load BPF", func() error { _, _, e := unix.Syscall(unix.SYS_BPF, 0, 0, 0); return e }},
	{"become dumpable", func() error { return unix.Prctl(unix.PR_SET_DUMPABLE, 1, 0, 0, 0) }},
	{"survive its parent", func() error { return unix.Prctl(unix.PR_SET_PDEATHSIG, 0, 0, 0, 0) }},
	{"become root", func() error { _, _, e := unix.RawSyscall(unix.SYS_SETUID, 0, 0, 0); return errno(e) }},
	{"set capabilities", func() error {
		var c [2]unix.CapUserData
		c[0].Permitted = 1
		return unix.Capset(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &c[0])
	}},
	{"mount", func() error { return unix.Mount("none", "/mnt", "tmpfs", 0, "") }},
	{"io_uring", func() error { _, _, e := unix.Syscall(unix.SYS_IO_URING_SETUP, 1, 0, 0); return errno(e) }},
	{"read the shadow file", func() error { _, err := os.ReadFile("/etc/shadow"); return err }},
	{"write to the state", func() error { return os.WriteFile("/var/lib/ebb-front-test", nil, 0o600) }},
	{"take the core's descriptors", func() error { _, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", os.Getppid())); return err }},
}

func errno(e syscall.Errno) error {
	if e == 0 {
		return nil
	}
	return e
}

func tryAll(w io.Writer) error {
	if _, err := confine(); err != nil {
		return err
	}
	failed := map[string]string{}
	for _, a := range attempts {
		failed[a.name] = "it worked"
		if err := a.try(); err != nil && (errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.EPERM)) {
			failed[a.name] = ""
		} else if err != nil {
			failed[a.name] = err.Error()
		}
	}
	return json.NewEncoder(w).Encode(failed)
}

func TestAFrontCanDoNothingElse(t *testing.T) {
	netnstest.RequireRoot(t)
	cmd := command("try")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	var got map[string]string
	if err := json.Unmarshal(out, &got); err != nil {
		t.Fatal(err)
	}
	for _, a := range attempts {
		if got[a.name] != "" {
			t.Errorf("%s: got %q, want a refusal", a.name, got[a.name])
		}
	}
}

func TestAFrontIsNotRoot(t *testing.T) {
	netnstest.RequireRoot(t)
	if _, err := confine(); err == nil {
		t.Error("root is taken for a front")
	}
}

func TestTheAPIThroughAFront(t *testing.T) {
	s := serve(t, nil)
	s.next()
	c, ctx := s.client(), t.Context()
	bs, err := c.Backends(ctx)
	if err != nil || len(bs) != 2 || bs[0].Name != "web" || *bs[0].Counts.Active != 3 || bs[1].InFlight != nil {
		t.Fatalf("got %+v, %v", bs, err)
	}
	if _, err := c.Backend(ctx, "nobody"); !errors.Is(err, api.ErrUnknown) || !strings.Contains(err.Error(), "nobody") {
		t.Errorf("got %v, want ErrUnknown", err)
	}
	if _, err := c.Cut(ctx, "web", api.CutRequest{}); !errors.Is(err, api.ErrNotDraining) {
		t.Errorf("got %v, want ErrNotDraining", err)
	}
	s.src.SetStragglers("web", make([]api.Straggler, 5000)...)
	if rows, err := c.Stragglers(ctx, "web", 5000); err != nil || len(rows) != 5000 {
		t.Errorf("got %d stragglers, %v", len(rows), err)
	}
	grace := api.Duration(7 * time.Second)
	d, err := c.Drain(ctx, "web", api.DrainRequest{Grace: &grace, Reason: "deploy"})
	if err != nil || d.Cause != drain.CauseOperator || d.By != "root (uid 0)" || d.Reason != "deploy" || time.Duration(d.Policy.Grace) != 7*time.Second {
		t.Fatalf("got %+v, %v", d, err)
	}
	if got, err := c.DrainByID(ctx, d.ID); err != nil || got.ID != d.ID {
		t.Errorf("got %+v, %v", got, err)
	}
	if ds, err := c.Drains(ctx); err != nil || len(ds) != 1 {
		t.Errorf("got %d drains, %v", len(ds), err)
	}
	if err := c.Ready(ctx); !errors.Is(err, api.ErrNotReady) {
		t.Errorf("got %v, want ErrNotReady", err)
	}
	if _, err := c.Extend(ctx, "web", api.ExtendRequest{Extra: grace}); err != nil {
		t.Error(err)
	}
	if _, err := c.Undrain(ctx, "web", api.UndrainRequest{}); err != nil {
		t.Error(err)
	}
	s.mu.Lock()
	var actions []string
	for _, a := range s.audits {
		actions = append(actions, fmt.Sprint(a.Action, " ", a.UID, " ", a.PID == os.Getpid(), " ", a.Status, " ", a.Err != nil))
	}
	s.mu.Unlock()
	want := "[cut 0 true 409 true drain 0 true 200 false extend 0 true 200 false undrain 0 true 200 false]"
	if fmt.Sprint(actions) != want {
		t.Errorf("audited %v, want %s", actions, want)
	}
	plain := &http.Client{Transport: &http.Transport{DisableCompression: true, DisableKeepAlives: true}}
	for _, c := range []*http.Client{http.DefaultClient, plain} {
		resp, err := c.Get("http://" + s.probes + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if compressed := c != plain; resp.Uncompressed != compressed || resp.Header.Get("Content-Encoding") != "" {
			t.Errorf("to one who takes compressed pages (%v): %v", compressed, resp.Header)
		}
	}
	for path, want := range map[string]string{"/metrics": "ebb_up 1\n", "/livez": "{\"status\":\"ok\"}\n"} {
		resp, err := http.Get("http://" + s.probes + path)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || string(b) != want || resp.StatusCode != 200 {
			t.Errorf("GET %s: got %d %q, %v", path, resp.StatusCode, b, err)
		}
		if ct := resp.Header.Get("Content-Type"); path == "/metrics" && ct != "text/plain; version=0.0.4" {
			t.Errorf("metrics are %q", ct)
		}
	}
}

// A front that ends is started again; who follows the events goes on where it was.
func TestAFrontThatDiesIsReplaced(t *testing.T) {
	s := serve(t, nil)
	first := s.next()
	const big = 1<<63 + 1
	s.log.Publish(drain.Event{Type: "one", Fields: map[string]any{"n": uint64(big)}})
	tail, err := s.client().Tail(t.Context(), 0, waitFor)
	if err != nil {
		t.Fatal(err)
	}
	defer tail.Close()
	next, stop := iter.Pull2(tail.All())
	defer stop()
	ev, err, _ := next()
	if err != nil || ev.Type != "one" {
		t.Fatalf("got %+v, %v", ev, err)
	}
	if err := unix.Kill(first, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-s.ended:
		if err == nil || !strings.Contains(err.Error(), "killed") {
			t.Errorf("ended because of %v, want the signal", err)
		}
	case <-time.After(waitFor):
		t.Fatal("nobody notices")
	}
	s.log.Publish(drain.Event{Type: "two"})
	if second := s.next(); second == first {
		t.Error("it is the same process")
	}
	s.log.Publish(drain.Event{Type: "three"})
	for i, want := range []string{"two", "three"} {
		ev, err, _ := next()
		if err != nil || ev.Type != want || ev.Seq != uint64(i+2) {
			t.Errorf("got %+v, %v, want %s", ev, err, want)
		}
	}
	resp, err := http.Get("http://" + s.probes + "/livez")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	// Numbers cross unharmed.
	unixSocket := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", s.sock)
	}}}
	defer unixSocket.CloseIdleConnections()
	if resp, err = unixSocket.Get("http://ebb/v1/events"); err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if b, err := io.ReadAll(resp.Body); err != nil || !strings.Contains(string(b), fmt.Sprint(uint64(big))) {
		t.Errorf("no %d in %s, %v", uint64(big), b, err)
	}
}

// The end of the core is told to followers, and events up to it.
func TestAFrontStopsInOrder(t *testing.T) {
	s := serve(t, nil)
	pid := s.next()
	tail, err := s.client().Follow(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer tail.Close()
	for i := range 200 {
		s.log.Publish(drain.Event{Type: "t", Message: strconv.Itoa(i)})
	}
	if err := s.log.Close(); err != nil {
		t.Fatal(err)
	}
	s.cancel()
	next, stop := iter.Pull2(tail.All())
	defer stop()
	for i := range 200 {
		if ev, err, _ := next(); err != nil || ev.Message != strconv.Itoa(i) {
			t.Fatalf("event %d: got %+v, %v", i, ev, err)
		}
	}
	if ev, err, ok := next(); ok {
		t.Errorf("after the last: got %+v, %v, want the end", ev, err)
	}
	err = <-s.done
	s.done <- err
	if err != nil {
		t.Error(err)
	}
	if unix.Kill(pid, 0) == nil {
		t.Error("the front is still there")
	}
}

// Credentials are the core's to read, and a front sees them change.
func TestAFrontReadsNoSecretsItself(t *testing.T) {
	token := filepath.Join(t.TempDir(), "token")
	put := func(s string) {
		t.Helper()
		if err := os.WriteFile(token, []byte(s), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put(strings.Repeat("a", 32))
	s := serve(t, func(o *Options) {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		o.Entrances = append(o.Entrances, Entrance{Kind: Remote, Listener: ln})
		o.Credentials.TokenFile = token
	})
	s.next()
	get := func(token string) int {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+s.remote+"/v1/backends", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+token)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp.StatusCode
	}
	if got := get(strings.Repeat("a", 32)); got != 200 {
		t.Errorf("with the token: %d", got)
	}
	if got := get(strings.Repeat("b", 32)); got != 401 {
		t.Errorf("with another one: %d", got)
	}
	put(strings.Repeat("b", 40))
	for end := time.Now().Add(waitFor); get(strings.Repeat("b", 40)) != 200; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("a new token is never good")
		}
	}
	if err := os.Remove(token); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(waitFor); get(strings.Repeat("b", 40)) != 401; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("a token that was taken away is good for ever")
		}
	}
}

// coreMain is a core that lives until it is killed.
func coreMain(sock string) error {
	ln, err := api.Listen(sock)
	if err != nil {
		return err
	}
	log := api.NewLog(api.LogOptions{})
	return Serve(context.Background(), Options{
		Source: apitest.New(log, apitest.Web()), Log: log, Entrances: []Entrance{{Kind: Operators, Listener: ln}},
		Started: func(pid int) { fmt.Println(pid) },
	})
}

// Nobody holds the sockets of a core that was killed, not even a front that hangs.
func TestAFrontDiesWithItsCore(t *testing.T) {
	netnstest.RequireRoot(t)
	for _, hangs := range []bool{false, true} {
		sock := filepath.Join(t.TempDir(), "s")
		cmd := exec.Command("/proc/self/exe", "core", sock)
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		defer cmd.Process.Kill()
		line, err := bufio.NewReader(out).ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		pid, err := strconv.Atoi(strings.TrimSpace(line))
		if err != nil {
			t.Fatal(err)
		}
		if hangs {
			if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
				t.Fatal(err)
			}
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // killed
		for end := time.Now().Add(waitFor); ; time.Sleep(10 * time.Millisecond) {
			c, err := net.Dial("unix", sock)
			if errors.Is(err, unix.ECONNREFUSED) {
				break
			}
			if err == nil {
				c.Close()
			}
			if time.Now().After(end) {
				t.Fatalf("its front holds the socket (hangs: %v)", hangs)
			}
		}
	}
}

func TestAConfigurationIsReadByAFront(t *testing.T) {
	netnstest.RequireRoot(t)
	dir := t.TempDir()
	file := func(name, text string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	good, err := os.ReadFile("../../docs/examples/agent.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"good.yaml": string(good), "empty.yaml": "", "bad.yaml": "mode: enforce\nservices: [{nam: x}]\nmdoe: off\n", "none.yaml": "{"} {
		path := file(name, text)
		want, werr := config.Load(path)
		got, err := Load(t.Context(), path)
		if fmt.Sprint(err) != fmt.Sprint(werr) {
			t.Errorf("%s: got error %v, want %v", name, err, werr)
		}
		if err == nil {
			a, _ := got.YAML()
			b, _ := want.YAML()
			if string(a) != string(b) {
				t.Errorf("%s: got\n%s\nwant\n%s", name, a, b)
			}
		}
	}
	if _, err := Load(t.Context(), filepath.Join(dir, "absent")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("an absent file: got %v", err)
	}
	// Whoever makes the parser fail does not get another one that is root.
	if _, err := Load(t.Context(), file("crash.yaml", "")); err == nil || errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), "has crashed") {
		t.Errorf("a parser that crashes: got %v", err)
	}
}

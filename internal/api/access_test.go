// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/api/apitest"
	"github.com/ebbproxy/ebb/internal/netnstest"
)

// connectVar tells the test binary to connect its descriptor 3 to a socket and to end.
const connectVar = "EBB_API_TEST_CONNECT"

func TestMain(m *testing.M) {
	if path := os.Getenv(connectVar); path != "" {
		if err := unix.Connect(3, &unix.SockaddrUnix{Name: path}); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// entrance is one listener of a server over a fake source.
type entrance struct {
	t      *testing.T
	server *api.Server
	source *apitest.Source
	log    *api.Log
	addr   string

	mu     sync.Mutex
	audits []api.Audit
}

func shortTemp(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "ebbapi")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// newEntrance serves web and blind on ln, to those whom a admits.
func newEntrance(t *testing.T, ln net.Listener, a api.Access) *entrance {
	t.Helper()
	e := &entrance{t: t, log: api.NewLog(api.LogOptions{}), addr: ln.Addr().String()}
	e.source = apitest.New(e.log, apitest.Web(), apitest.Blind())
	var err error
	e.server, err = api.NewServer(api.Options{Source: e.source, Log: e.log, Audit: func(a api.Audit) {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.audits = append(e.audits, a)
	}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- e.server.ServeAs(ctx, ln, a) }()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Errorf("ServeAs: %v", err)
		}
	})
	return e
}

func newSocketEntrance(t *testing.T, mode os.FileMode, a api.Access) *entrance {
	t.Helper()
	dir := shortTemp(t)
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	ln, err := api.ListenAs(filepath.Join(dir, "a.sock"), mode, -1)
	if err != nil {
		t.Fatal(err)
	}
	return newEntrance(t, ln, a)
}

func (e *entrance) lastAudit() api.Audit {
	e.t.Helper()
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.audits) == 0 {
		e.t.Fatal("no audit record")
	}
	return e.audits[len(e.audits)-1]
}

// over sends one request over a connection.
func over(t *testing.T, c net.Conn, method, target, body string) (int, http.Header, string) {
	t.Helper()
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	ct := ""
	if body != "" {
		ct = fmt.Sprintf("Content-Type: application/json\r\nContent-Length: %d\r\n", len(body))
	}
	if _, err := fmt.Fprintf(c, "%s %s HTTP/1.1\r\nHost: ebb\r\nConnection: close\r\n%s\r\n%s", method, target, ct, body); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, resp.Header, string(b)
}

// connect is a connection of this process.
func connect(t *testing.T, path string) net.Conn {
	t.Helper()
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// connectAs is a connection that another user has made: of a thread with its ids.
func connectAs(t *testing.T, path string, uid, gid int, groups ...uint32) (c net.Conn) {
	t.Helper()
	var err error
	netnstest.Apart(func() {
		c, err = func() (net.Conn, error) {
			fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return nil, err
			}
			f := os.NewFile(uintptr(fd), path)
			defer f.Close()
			// The calls of package syscall are for the whole process; these are for the thread.
			if err := setIDs(uid, gid, groups); err != nil {
				return nil, err
			}
			if err := unix.Connect(fd, &unix.SockaddrUnix{Name: path}); err != nil {
				return nil, err
			}
			return net.FileConn(f)
		}()
	})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestOperatorsAreRootAndTheGroup(t *testing.T) {
	netnstest.RequireRoot(t)
	const group, stranger = 54321, 54322
	e := newSocketEntrance(t, 0o666, api.Operators(group))
	for _, tc := range []struct {
		name   string
		conn   func() net.Conn
		status int
		uid    int
	}{
		{"root", func() net.Conn { return connect(t, e.addr) }, 200, os.Getuid()},
		{"a member by its supplementary groups", func() net.Conn { return connectAs(t, e.addr, stranger, stranger, 7, group) }, 200, stranger},
		{"a member by its own group", func() net.Conn { return connectAs(t, e.addr, stranger, group) }, 200, stranger},
		{"a member of a hundred groups", func() net.Conn { return connectAs(t, e.addr, stranger, stranger, hundredAnd(group)...) }, 200, stranger},
		{"another user", func() net.Conn { return connectAs(t, e.addr, stranger, stranger, 7) }, 403, stranger},
		{"the group's number as a user", func() net.Conn { return connectAs(t, e.addr, group, stranger) }, 403, group},
	} {
		t.Run(tc.name, func(t *testing.T) {
			status, _, body := over(t, tc.conn(), "GET", "/v1/backends", "")
			if status != tc.status || (status == 403 && !strings.Contains(body, "neither root nor in the group 54321")) {
				t.Errorf("look: got %d %s, want %d", status, body, tc.status)
			}
			if status, _, body := over(t, tc.conn(), "POST", "/v1/backends/web/drain", ""); status != tc.status {
				t.Errorf("drain: got %d %s, want %d", status, body, tc.status)
			}
			if a := e.lastAudit(); a.UID != tc.uid || a.Status != tc.status || a.Action != "drain" || a.Backend != "web" || (a.Err == nil) != (tc.status == 200) {
				t.Errorf("audit: got %+v, want uid %d and %d", a, tc.uid, tc.status)
			}
		})
	}
	if n := len(e.source.Calls()); n != 4 {
		t.Errorf("the source was asked %d times, want 4: %v", n, e.source.Calls())
	}
}

func hundredAnd(gid uint32) []uint32 {
	var out []uint32
	for i := range uint32(100) {
		out = append(out, 60000+i)
	}
	return append(out, gid)
}

// An application sees its own backend and drains it, and nothing else.
func TestAppsActOnTheirOwnBackendOnly(t *testing.T) {
	var owner atomic.Value
	owner.Store("web")
	e := newSocketEntrance(t, 0o666, api.Apps(func(_ context.Context, pid int) (string, bool) {
		o, _ := owner.Load().(string)
		return o, o != "" && pid == os.Getpid()
	}))
	c, err := api.Dial(t.Context(), e.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := e.source.Drain(t.Context(), "blind", api.DrainRequest{}); err != nil {
		t.Fatal(err)
	}
	blind := e.source.Drains(t.Context())[0].ID

	d, err := c.Drain(t.Context(), "web", api.DrainRequest{Reason: "enough"})
	if err != nil || d.Cause != drain.CauseApp {
		t.Fatalf("drain of its own: got cause %q, %v, want app", d.Cause, err)
	}
	for _, tc := range []struct {
		method, target, body string
		status               int
	}{
		{"GET", "/v1/backends", "", 200},
		{"GET", "/v1/backends/web", "", 200},
		{"GET", "/v1/backends/blind", "", 403},
		{"GET", "/v1/backends/none", "", 403}, // not even whether it exists
		{"GET", "/v1/backends/web/stragglers", "", 200},
		{"GET", "/v1/backends/blind/stragglers", "", 403},
		{"POST", "/v1/backends/web/drain", `{"cause":"prestop"}`, 200},
		{"POST", "/v1/backends/web/drain", `{"cause":"operator"}`, 400},
		{"POST", "/v1/backends/blind/drain", "", 403},
		{"POST", "/v1/backends/web/undrain", "", 403},
		{"POST", "/v1/backends/web/extend", `{"by":"1h"}`, 403},
		{"POST", "/v1/backends/web/cut", "", 403},
		{"GET", "/v1/drains", "", 200},
		{"GET", "/v1/drains/" + d.ID, "", 200},
		{"GET", "/v1/drains/" + blind, "", 404},
		{"GET", "/v1/events", "", 200},
		{"GET", "/readyz/web", "", 503},
		{"GET", "/readyz/blind", "", 403},
		{"GET", "/readyz", "", 403},
		{"GET", "/livez", "", 200},
		{"GET", "/metrics", "", 403},
		{"GET", "/openapi.json", "", 200},
	} {
		status, _, body := over(t, connect(t, e.addr), tc.method, tc.target, tc.body)
		if status != tc.status {
			t.Errorf("%s %s %s: got %d %s, want %d", tc.method, tc.target, tc.body, status, body, tc.status)
		}
		if status == 200 && tc.target != "/openapi.json" && strings.Contains(body, "blind") {
			t.Errorf("%s %s tells of another's backend: %s", tc.method, tc.target, body)
		}
		if tc.method == "POST" {
			if a := e.lastAudit(); a.Status != tc.status || a.UID != os.Getuid() {
				t.Errorf("%s %s: audit got %+v, want status %d", tc.method, tc.target, a, tc.status)
			}
		}
	}
	// What the application follows is its own too.
	s, err := c.Follow(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	e.source.End("blind", drain.OutcomeLost)
	e.source.End("web", drain.OutcomeDrained)
	for ev, err := range s.All() {
		if err != nil || ev.Backend != "web" {
			t.Fatalf("got %+v, %v, want events of web alone", ev, err)
		}
		if ev.Outcome != "" {
			break
		}
	}
	_ = s.Close()

	owner.Store("")
	if status, _, body := over(t, connect(t, e.addr), "GET", "/v1/backends", ""); status != 403 || !strings.Contains(body, "belongs to no backend") {
		t.Errorf("a process of no backend: got %d %s, want 403", status, body)
	}
}

// A connection that its maker has left to another process says nothing about who asks: its pid may be anybody's by now.
func TestAppsRefuseAConnectionWhoseMakerHasEnded(t *testing.T) {
	e := newSocketEntrance(t, 0o666, api.Apps(func(context.Context, int) (string, bool) { return "web", true }))
	if status, _, body := over(t, connect(t, e.addr), "GET", "/v1/backends", ""); status != 200 {
		t.Fatalf("a maker that lives: got %d %s, want 200", status, body)
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "socket")
	defer f.Close()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self)
	cmd.Env, cmd.ExtraFiles, cmd.Stderr = append(os.Environ(), connectVar+"="+e.addr), []*os.File{f}, os.Stderr
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	c, err := net.FileConn(f)
	if err != nil {
		t.Fatal(err)
	}
	if status, _, body := over(t, c, "POST", "/v1/backends/web/drain", ""); status != 403 || !strings.Contains(body, "has ended") {
		t.Errorf("got %d %s, want 403", status, body)
	}
}

// One application cannot take all the places of the others.
func TestAppsHaveALimitEach(t *testing.T) {
	var owner atomic.Value
	owner.Store("web")
	e := newSocketEntrance(t, 0o666, api.Apps(func(context.Context, int) (string, bool) {
		o, _ := owner.Load().(string)
		return o, true
	}))
	c, err := api.Dial(t.Context(), e.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var streams []*api.Stream
	for range 8 {
		s, err := c.Follow(t.Context(), 0)
		if err != nil {
			t.Fatal(err)
		}
		streams = append(streams, s)
	}
	var p *api.Problem
	if _, err := c.Follow(t.Context(), 0); !errors.As(err, &p) || p.Status != 429 {
		t.Errorf("a ninth: got %v, want 429", err)
	}
	// Who follows keeps nobody from asking.
	if status, _, body := over(t, connect(t, e.addr), "POST", "/v1/backends/web/drain", ""); status != 200 {
		t.Errorf("a drain beside them: got %d %s, want 200", status, body)
	}
	owner.Store("blind")
	other, err := c.Follow(t.Context(), 0)
	if err != nil {
		t.Fatalf("another application: %v", err)
	}
	if err := other.Close(); err != nil {
		t.Error(err)
	}
	owner.Store("web")
	for _, s := range streams {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
	// The server sees a stream's end when it next writes.
	for until := time.Now().Add(patience); ; {
		e.log.Publish(api.Event{Type: "x", Backend: "web"})
		s, err := c.Follow(t.Context(), 0)
		if err == nil {
			_ = s.Close()
			break
		}
		if time.Now().After(until) {
			t.Fatalf("after the streams: %v", err)
		}
	}
}

// Nor all of their connections.
func TestAppsHaveAShareOfTheConnections(t *testing.T) {
	var owner atomic.Value
	owner.Store("web")
	e := newSocketEntrance(t, 0o666, api.Apps(func(context.Context, int) (string, bool) {
		o, _ := owner.Load().(string)
		return o, o != ""
	}))
	var held []net.Conn
	for range 192 {
		c := connect(t, e.addr)
		defer c.Close()
		held = append(held, c)
	}
	// gone says whether the server has closed a connection without an answer.
	gone := func(c net.Conn) bool {
		defer c.Close()
		if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(c, "GET /livez HTTP/1.1\r\nHost: ebb\r\nConnection: close\r\n\r\n") // it may be closed already
		b, err := io.ReadAll(c)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatal("neither an answer nor an end")
		}
		return len(b) == 0
	}
	if !gone(connect(t, e.addr)) {
		t.Error("one connection more was answered")
	}
	owner.Store("blind")
	if gone(connect(t, e.addr)) {
		t.Error("another application's connection was closed")
	}
	// A process of no backend is told so, and has one share with all of its kind.
	owner.Store("")
	if status, _, body := over(t, connect(t, e.addr), "GET", "/livez", ""); status != 403 {
		t.Errorf("a process of no backend: got %d %s, want 403", status, body)
	}
	owner.Store("web")
	_ = held[0].Close()
	for until := time.Now().Add(patience); gone(connect(t, e.addr)); {
		if time.Now().After(until) {
			t.Fatal("the place of a connection that has ended is not given back")
		}
	}
}

// slow is a Source whose Backends waits.
type slow struct {
	*apitest.Source
	entered chan struct{}
	release chan struct{}
}

func (s slow) Backends(ctx context.Context) []api.Backend {
	s.entered <- struct{}{}
	<-s.release
	return s.Source.Backends(ctx)
}

func TestTooManyRequests(t *testing.T) {
	log := api.NewLog(api.LogOptions{})
	source := slow{apitest.New(log, apitest.Web()), make(chan struct{}), make(chan struct{})}
	srv, err := api.NewServer(api.Options{Source: source, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	api.SetQueueTimeout(srv, time.Millisecond)
	ln, err := api.Listen(filepath.Join(shortTemp(t), "a.sock"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ctx, ln) }()
	c, err := api.Dial(t.Context(), ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 32 {
		wg.Go(func() {
			if _, err := c.Backends(t.Context()); err != nil {
				t.Errorf("one of 32: %v", err)
			}
		})
	}
	for range 32 {
		<-source.entered
	}
	status, header, body := over(t, connect(t, ln.Addr().String()), "GET", "/v1/backends/web", "")
	if status != 503 || header.Get("Retry-After") == "" {
		t.Errorf("the 33rd: got %d %s, want 503 with Retry-After", status, body)
	}
	if status, _, body := over(t, connect(t, ln.Addr().String()), "GET", "/readyz", ""); status != 200 {
		t.Errorf("a probe: got %d %s, want 200", status, body)
	}
	close(source.release)
	wg.Wait()
	if status, _, body := over(t, connect(t, ln.Addr().String()), "GET", "/v1/backends/web", ""); status != 200 {
		t.Errorf("afterwards: got %d %s, want 200", status, body)
	}
	_ = c.Close()
	cancel()
	if err := <-served; err != nil {
		t.Error(err)
	}
}

func TestListenAsSetsGroupAndMode(t *testing.T) {
	netnstest.RequireRoot(t)
	path := filepath.Join(shortTemp(t), "a.sock")
	ln, err := api.ListenAs(path, 0o666, 54321)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	fi, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok || st.Gid != 54321 || st.Uid != 0 || fi.Mode().Perm() != 0o666 {
		t.Errorf("got %+v, mode %#o, want root:54321 0666", st, fi.Mode().Perm())
	}
}

func TestGroupID(t *testing.T) {
	for in, want := range map[string]int{"": 0, "root": 0, "54321": 54321} {
		if got, err := api.GroupID(in); err != nil || got != want {
			t.Errorf("%q: got %d, %v, want %d", in, got, err, want)
		}
	}
	if _, err := api.GroupID("no-such-group"); err == nil || !strings.Contains(err.Error(), "groupadd") {
		t.Errorf("a group that does not exist: got %v, want an error that says what to do", err)
	}
}

// A member that this version does not know is ignored, and a word is kept as it is: the server may be newer.
func TestClientReadsANewerServer(t *testing.T) {
	path := filepath.Join(shortTemp(t), "a.sock")
	ln, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(apitest.Web())
	if err != nil {
		t.Fatal(err)
	}
	newer := strings.NewReplacer(`"state":"serving"`, `"state":"hibernating","moon":{"phase":[1]}`, `"mode":"enforce"`, `"mode":"advise"`).Replace(string(b))
	srv := &http.Server{ReadHeaderTimeout: patience, Handler: http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		switch req.URL.Path {
		case "/v1/backends/web":
			_, _ = io.WriteString(w, newer)
		case "/v1/events":
			_, _ = io.WriteString(w, `{"seq":1,"type":"moon.rise","phase":"orbit","sun":true,"fields":{"a":1}}`+"\n")
		default:
			w.WriteHeader(418)
			_, _ = io.WriteString(w, `{"type":"tag:x","title":"teapot","status":418,"detail":"short and stout","handle":1}`)
		}
	})}
	go func() { _ = srv.Serve(ln) }() // ends with Close
	defer srv.Close()
	c, err := api.Dial(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if b, err := c.Backend(t.Context(), "web"); err != nil || b.State != "hibernating" || b.Mode != "advise" || b.Name != "web" {
		t.Errorf("got %+v, %v", b, err)
	}
	for ev, err := range c.Events(t.Context(), 0, false) {
		if err != nil || ev.Type != "moon.rise" || ev.Phase != "orbit" {
			t.Errorf("got %+v, %v", ev, err)
		}
	}
	var p *api.Problem
	if _, err := c.Drain(t.Context(), "web", api.DrainRequest{}); !errors.As(err, &p) || p.Status != 418 || p.Error() != "short and stout" {
		t.Errorf("got %v, want the problem as it is", err)
	}
}

// A member that only a newer client knows is refused by name, with those there are, before anything is done.
func TestServerRefusesWhatANewerClientAsks(t *testing.T) {
	f := newFixture(t, apitest.Web())
	a := f.do("POST", "/v1/backends/web/drain", jsonType, `{"reason":"x","tenderly":true}`)
	p := f.problem(a)
	if a.status != 400 || p.Field != "tenderly" || !strings.Contains(p.Detail, "it has cause, gen, grace") || len(p.Known) == 0 {
		t.Errorf("got %d %+v, want 400 that names the member and those there are", a.status, p)
	}
	if calls := f.source.Calls(); len(calls) != 0 {
		t.Errorf("the source was asked to %v", calls)
	}
}

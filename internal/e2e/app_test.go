// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/netnstest"
)

// appCommand is the first argument by which the test binary knows that it is to be the application below.
const appCommand = "e2e-app"

// app is the command line of an application that says on its standard output, a line each, what it hears:
//
//	listening ADDR      a listener is open
//	signal NAME         any signal that can be caught
//	stdin TEXT, eof     what came on its standard input
//	eof PEER            a connection's client has left
//
// and sends every byte of a connection back. Options: listen=ADDR opens a listener (mptcp=ADDR one of MPTCP),
// usr2=ADDR opens one at SIGUSR2, exit=NAME ends with status 0 at that signal (default TERM; exit=none never), code=N
// is that status, read=stdin reads standard input, session=HOW takes part in the drain (see takePart), udp=ADDR and unix=PATH open what Ebb does not cover, deaf lets the
// connections of listeners after it wait unread, name=N puts "N: " before each line.
func app(t *testing.T, options ...string) []string {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return append([]string{exe, appCommand}, options...)
}

// actIfAsked is the application, if the process was started by a command line of app.
func actIfAsked() {
	if len(os.Args) > 1 && os.Args[1] == appCommand {
		os.Exit(act(os.Args[2:]))
	}
}

func act(options []string) int {
	sigs := make(chan os.Signal, 64)
	signal.Notify(sigs)
	var mu sync.Mutex
	prefix, deaf := "", false
	say := func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		fmt.Printf(prefix+format+"\n", args...)
	}
	listen := func(addr string, mptcp bool) {
		deaf := deaf
		var lc net.ListenConfig
		lc.SetMultipathTCP(mptcp)
		l, err := lc.Listen(context.Background(), "tcp", addr)
		if err != nil {
			say("error %v", err)
			return
		}
		say("listening %s", l.Addr())
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					if deaf {
						select {}
					}
					_, _ = io.Copy(c, c) // ends with the client, however that ends
					say("eof %s", c.RemoteAddr())
					c.Close()
				}()
			}
		}()
	}
	exit, code, usr2 := "SIGTERM", 0, ""
	var keep []io.Closer
	for _, o := range options {
		key, value, _ := strings.Cut(o, "=")
		switch key {
		case "listen":
			listen(value, false)
		case "mptcp":
			listen(value, true)
		case "name":
			prefix = value + ": "
		case "deaf":
			deaf = true
		case "usr2":
			usr2 = value
		case "exit":
			exit = "SIG" + value
		case "code":
			code, _ = strconv.Atoi(value)
		case "udp":
			c, err := net.ListenPacket("udp", value)
			if err != nil {
				say("error %v", err)
				continue
			}
			keep = append(keep, c)
		case "unix":
			c, err := net.Listen("unix", value)
			if err != nil {
				say("error %v", err)
				continue
			}
			keep = append(keep, c)
		case "session":
			part := &takePart{say: say, mode: strings.Split(value, ",")}
			go part.begin()
		case "read":
			go func() {
				sc := bufio.NewScanner(os.Stdin)
				for sc.Scan() {
					say("stdin %s", sc.Text())
				}
				say("eof")
			}()
		}
	}
	defer func() {
		for _, c := range keep {
			c.Close()
		}
	}()
	say("ready")
	for s := range sigs {
		sig, ok := s.(syscall.Signal)
		if !ok || sig == unix.SIGURG || sig == unix.SIGCHLD || sig == unix.SIGPIPE {
			continue // the runtime's own
		}
		name := unix.SignalName(sig)
		say("signal %s", name)
		if sig == unix.SIGUSR2 && usr2 != "" {
			listen(usr2, false)
		}
		if name == exit {
			return code
		}
	}
	return 0
}

// as is the host for a subtest: what fails or is started then is the subtest's.
func (h *host) as(t *testing.T) *host {
	sub := *h
	sub.t = t
	return &sub
}

// roomy is the budget of a drain that reaches zero: a slow machine does not use it up.
func roomy(more ...string) []string {
	return append([]string{"--grace", "60s", "--flush-timeout", "5s", "--reserve", "2s", "--quiet-period", "300ms"}, more...)
}

// said waits until CMD has written a line to its standard output.
func (r *supervised) said(line string) {
	r.h.t.Helper()
	eventually(r.h.t, fmt.Sprintf("CMD says %q", line), func() bool { return r.count(line) > 0 })
}

// count is how many lines of CMD's standard output are that line.
func (r *supervised) count(line string) int {
	r.h.t.Helper()
	n := 0
	for _, l := range r.lines() {
		if l == line {
			n++
		}
	}
	return n
}

func (r *supervised) lines() []string {
	r.h.t.Helper()
	b, err := os.ReadFile(r.stdout)
	if err != nil {
		r.h.t.Fatal(err)
	}
	return strings.Split(strings.TrimSpace(string(b)), "\n")
}

// heard is what signals CMD says it has received, in order.
func (r *supervised) heard() (names []string) {
	r.h.t.Helper()
	for _, l := range r.lines() {
		if name, ok := strings.CutPrefix(l, "signal "); ok {
			names = append(names, name)
		}
	}
	return names
}

// stderr is what the run has written beside its events.
func (r *supervised) stderr() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return strings.Join(r.other, "\n")
}

// complaints are the lines of the log but for those about the host: other tests install beside this one.
func (r *supervised) complaints() (lines []string) {
	for l := range strings.SplitSeq(r.stderr(), "\n") {
		if l != "" && !strings.Contains(l, `"msg":"degraded"`) {
			lines = append(lines, l)
		}
	}
	return lines
}

// logged tells whether a line of the log at a level contains a text.
func (r *supervised) logged(level, text string) bool {
	for l := range strings.SplitSeq(r.stderr(), "\n") {
		if strings.Contains(l, `"level":"`+level+`"`) && strings.Contains(l, text) {
			return true
		}
	}
	return false
}

// api is a client of the run's own API.
func (r *supervised) api() *api.Client {
	r.h.t.Helper()
	c, err := api.Dial(r.h.t.Context(), api.RunSocket(r.h.runDir, r.name))
	if err != nil {
		r.h.t.Fatal(err)
	}
	r.h.t.Cleanup(func() { c.Close() })
	return c
}

// metrics is what the run's /metrics says.
func (r *supervised) metrics() string {
	r.h.t.Helper()
	resp, err := r.client().Get("http://ebb/metrics")
	if err != nil {
		r.h.t.Fatalf("ask for metrics: %v", err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		r.h.t.Fatalf("read metrics: %v", err)
	}
	return string(b)
}

// drained is the drain that the report tells of.
func (r *supervised) drained() api.Drain {
	r.h.t.Helper()
	d := r.result().Backend.Drain
	if d == nil {
		r.h.t.Fatal("the report tells of no drain")
	}
	return *d
}

// stuck opens a connection, carries one byte there and back and keeps it: under opaque it is active until idle_after.
func (h *host) stuck(addr string) net.Conn {
	h.t.Helper()
	c := h.connect(addr)
	if _, err := c.Write([]byte("x")); err != nil {
		h.t.Fatalf("write to %s: %v", addr, err)
	}
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		h.t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		h.t.Fatalf("read from %s: %v", addr, err)
	}
	if err := c.SetReadDeadline(time.Time{}); err != nil {
		h.t.Fatal(err)
	}
	return c
}

// connect opens a connection, which ends with the test.
func (h *host) connect(addr string) net.Conn {
	h.t.Helper()
	ctx, cancel := context.WithTimeout(h.t.Context(), patience)
	defer cancel()
	c, err := h.ns.DialContext(ctx, "tcp", addr)
	if err != nil {
		h.t.Fatalf("connect to %s: %v", addr, err)
	}
	h.t.Cleanup(func() { c.Close() })
	return c
}

// refused tells whether a new connection is turned away.
func (h *host) refused(addr string) bool {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := h.ns.DialContext(ctx, "tcp", addr)
	if err == nil {
		c.Close()
		return false
	}
	if !errors.Is(err, unix.ECONNREFUSED) {
		h.t.Errorf("connect to %s: %v, want it served or refused", addr, err)
	}
	return true
}

// ended waits for the peer's end of a connection and returns the error that told of it: io.EOF or a reset.
func ended(t *testing.T, c net.Conn) error {
	t.Helper()
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	_, err := io.Copy(io.Discard, c)
	if err == nil {
		return io.EOF
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("the connection to %s has not ended", c.RemoteAddr())
	}
	return err
}

// alive sends a byte over a connection of app and wants it back.
func alive(t *testing.T, c net.Conn) {
	t.Helper()
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write([]byte("y")); err != nil {
		t.Fatalf("write to %s: %v", c.RemoteAddr(), err)
	}
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		t.Fatalf("read from %s: %v", c.RemoteAddr(), err)
	}
}

// at is when a drain entered a phase; the test fails if it has not.
func at(t *testing.T, d api.Drain, p drain.Phase) time.Time {
	t.Helper()
	for _, ph := range d.Phases {
		if ph.Phase == p {
			return ph.At
		}
	}
	t.Fatalf("the drain was never in %s: %v", p, d.Phases)
	return time.Time{}
}

// living tells whether a process exists and is no zombie.
func living(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(b), ") Z ")
}

// installed looks for a program that a test needs, which CI must have.
func installed(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		netnstest.Skip(t, "%s is not installed", name)
	}
	return path
}

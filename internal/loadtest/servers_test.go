// SPDX-License-Identifier: Apache-2.0

package loadtest

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
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// freePort is a port that nothing listened on a moment ago.
func freePort(t *testing.T, host string) int {
	t.Helper()
	l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// startServer runs a real server until the test ends and returns when it answers.
func startServer(t *testing.T, argv []string, addr string) *exec.Cmd {
	t.Helper()
	var log syncBuilder
	c := exec.Command(argv[0], argv[1:]...)
	c.Stdout, c.Stderr = &log, &log
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	exited := make(chan struct{})
	go func() {
		_ = c.Wait() // how it ends is the test's doing
		close(exited)
	}()
	t.Cleanup(func() {
		_ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL) // workers too
		<-exited
	})
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	for {
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
		if err == nil {
			conn.Close()
			return c
		}
		select {
		case <-exited:
			t.Fatalf("%s ended: %s", argv[0], log.String())
		default:
		}
		if pause(ctx, 10*time.Millisecond) != nil {
			t.Fatalf("%s does not listen on %s: %v\n%s", argv[0], addr, err, log.String())
		}
	}
}

type syncBuilder struct {
	mu sync.Mutex
	b  strings.Builder
}

func (s *syncBuilder) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuilder) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func TestRealServers(t *testing.T) {
	for _, server := range []struct {
		name string
		argv func(string, int, ServerOptions) ([]string, error)
	}{{"nginx", Nginx}, {"haproxy", HAProxy}, {"python3", Python}, {"node", Node}} {
		for _, variant := range []struct {
			name string
			o    ServerOptions
		}{{"plain", ServerOptions{ReusePort: true}}, {"tls", ServerOptions{TLS: true, HTTP2: true, Name: "secret"}}, {"both families", ServerOptions{Host: "::"}}} {
			t.Run(server.name+" "+variant.name, func(t *testing.T) {
				port := freePort(t, or(variant.o.Host, "127.0.0.1"))
				argv, err := server.argv(t.TempDir(), port, variant.o)
				if (errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist)) && os.Getenv("CI") != "true" {
					t.Skip(err)
				}
				if err != nil {
					t.Fatal(err)
				}
				addr := fmt.Sprintf("127.0.0.1:%d", port)
				if os.Geteuid() != 0 && server.name == "nginx" && os.Getenv("CI") != "true" {
					t.Skip("nginx changes the user of its workers: needs root")
				}
				startServer(t, argv, addr)
				o := Options{
					Targets: []Target{{Addr: addr}}, Rate: 50, KeepAlive: 2, Gap: 5 * time.Millisecond,
					Slow: 1, SlowPath: "/?ms=1250", SlowRead: 1, SlowReadRate: 100 << 20,
				}
				if variant.o.TLS {
					o.TLS = InsecureTLS()
				}
				if variant.o.Host == "::" {
					o.Targets = append(o.Targets, Target{Addr: fmt.Sprintf("[::1]:%d", port)})
				}
				ctx, cancel := context.WithTimeout(t.Context(), limit)
				defer cancel()
				o.OnResult = func(r Result) {
					if r.Kind == KindSlow {
						if took := r.End.Sub(r.Start); took < 1200*time.Millisecond { // a timer of a server may be a little early by our clock
							t.Errorf("the slow answer took %s, want at least 1.2 s", took)
						}
						cancel()
					}
				}
				g, err := New(o)
				if err != nil {
					t.Fatal(err)
				}
				if err := g.Run(ctx); err != nil {
					t.Fatal(err)
				}
				rep := g.Report()
				if rep.Failed != 0 || rep.OK == 0 || rep.OK != rep.Requests {
					t.Errorf("got %d of %d, failed %d", rep.OK, rep.Requests, rep.Failed)
					for _, v := range rep.Failures() {
						t.Errorf("%s: %+v", v, *rep.Verdicts[v])
					}
				}
				if got := rep.ServedBy[or(variant.o.Name, server.name)]; got != rep.OK {
					t.Errorf("got %d answers by it, want %d (%v)", got, rep.OK, rep.ServedBy)
				}
				if s := rep.Kinds[KindSlowRead]; s.Bytes != s.Attempts*10<<20 {
					t.Errorf("the slow reader got %d bytes of %d answers, want 10 MB each", s.Bytes, s.Attempts)
				}
				if len(o.Targets) > 1 {
					for name, s := range rep.Targets {
						if s.Verdicts[OK] == 0 {
							t.Errorf("%s answered nothing", name)
						}
					}
				}
			})
		}
	}
}

func TestServerOptionsThatNeedQuotingAreRefused(t *testing.T) {
	for _, o := range []ServerOptions{{Name: `a"; evil`}, {Host: "localhost"}} {
		if _, err := prepare(t.TempDir(), 80, o, "x"); err == nil {
			t.Errorf("%+v: got no error", o)
		}
	}
}

// startGo runs the Go server as a child and returns its address and the lines that it logs.
func startGo(t *testing.T, flags ...string) (*exec.Cmd, string, *bufio.Scanner) {
	t.Helper()
	argv, err := GoServer(flags...)
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(argv[0], argv[1:]...)
	c.Stderr = os.Stderr
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
	})
	lines := bufio.NewScanner(out)
	if !lines.Scan() {
		t.Fatalf("the server said nothing: %v", lines.Err())
	}
	addr, ok := strings.CutPrefix(lines.Text(), "listening ")
	if !ok {
		t.Fatalf("got %q, want the address", lines.Text())
	}
	return c, addr, lines
}

func TestGoServerStopsAsTold(t *testing.T) {
	t.Run("graceful", func(t *testing.T) {
		c, addr, lines := startGo(t, "-graceful")
		answer := make(chan error, 1)
		go func() {
			resp, err := http.Get("http://" + addr + "/?ms=500")
			if err == nil {
				_, err = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
			answer <- err
		}()
		waitStats(t, addr, func(s ServerStats) bool { return s.Requests-s.Answered >= 2 }) // the slow one, and the question
		if err := c.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if err := <-answer; err != nil {
			t.Errorf("the request in flight failed: %v", err)
		}
		var got []string
		for lines.Scan() {
			got = append(got, lines.Text())
		}
		if want := "signal SIGTERM,exit"; strings.Join(got, ",") != want {
			t.Errorf("got %q, want %s", got, want)
		}
		if err := c.Wait(); err != nil {
			t.Errorf("got %v, want exit code 0", err)
		}
	})
	// A client that was accepted and has said nothing yet when the signal comes.
	t.Run("patient", func(t *testing.T) {
		c, addr, lines := startGo(t, "-patient")
		early, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer early.Close()
		waitStats(t, addr, func(s ServerStats) bool { return s.Accepted >= 2 })
		if err := c.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if !lines.Scan() || lines.Text() != "signal SIGTERM" {
			t.Fatalf("got %q, want the signal", lines.Text())
		}
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		for { // until the listener has closed
			late, err := net.Dial("tcp", addr)
			if err != nil {
				break
			}
			late.Close()
			if err := pause(ctx, 5*time.Millisecond); err != nil {
				t.Fatalf("it listens for a minute: %v", err)
			}
		}
		if _, err := io.WriteString(early, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		answer, err := io.ReadAll(early)
		if err != nil || !strings.Contains(string(answer), "200 OK") || !strings.HasSuffix(string(answer), "hello\n") {
			t.Errorf("got %q, %v, want a whole answer and the end", answer, err)
		}
		if !lines.Scan() || lines.Text() != "exit" {
			t.Errorf("got %q, want exit", lines.Text())
		}
		if err := c.Wait(); err != nil {
			t.Errorf("got %v, want exit code 0", err)
		}
	})
	t.Run("ignore", func(t *testing.T) {
		c, addr, _ := startGo(t, "-ignore-signals")
		if err := c.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		s := waitStats(t, addr, func(s ServerStats) bool { return len(s.Signals) == 1 })
		if s.Signals[0] != "SIGTERM" {
			t.Errorf("got %q, want SIGTERM", s.Signals)
		}
	})
	t.Run("neither", func(t *testing.T) {
		c, _, _ := startGo(t)
		if err := c.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		var exit *exec.ExitError
		if err := c.Wait(); !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGTERM {
			t.Errorf("got %v, want death by SIGTERM", err)
		}
	})
}

func waitStats(t *testing.T, addr string, ok func(ServerStats) bool) ServerStats {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	for {
		var s ServerStats
		resp, err := http.Get("http://" + addr + "/stats")
		if err == nil {
			err = json.NewDecoder(resp.Body).Decode(&s)
			resp.Body.Close()
		}
		if err != nil {
			t.Fatal(err)
		}
		if ok(s) {
			return s
		}
		if pause(ctx, 5*time.Millisecond) != nil {
			t.Fatalf("got %+v for a minute", s)
		}
	}
}

func TestServerFlags(t *testing.T) {
	o, err := ParseServerFlags([]string{"-listen", "127.0.0.1:1", "-listen", "[::1]:1", "-graceful", "-accept-delay", "5ms"}, io.Discard)
	if err != nil || len(o.Listen) != 2 || !o.Graceful || o.AcceptDelay != 5*time.Millisecond {
		t.Errorf("got %+v, %v", o, err)
	}
	for _, args := range [][]string{{"-nope"}, {"extra"}} {
		if code := ServerMain(args, io.Discard, io.Discard); code != 2 {
			t.Errorf("%q: got exit code %d, want 2", args, code)
		}
	}
	if code := ServerMain([]string{"-listen", "256.0.0.1:1"}, io.Discard, io.Discard); code != 1 {
		t.Errorf("got exit code %d for an address that does not exist, want 1", code)
	}
}

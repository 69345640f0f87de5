// SPDX-License-Identifier: Apache-2.0

package probes

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestG5_RetireEndsAnIdleConnection(t *testing.T) {
	eachServer(t, func(t *testing.T, s *server) {
		c, other := s.client(t), s.client(t)
		c.get(t, "/")
		c.get(t, "/")
		other.get(t, "/")
		if err := Retire(t.Context(), s.settled(t, c)); err != nil {
			t.Fatal(err)
		}
		c.ended(t)
		other.get(t, "/") // its neighbour is untouched
	})
}

// What arrives after reading was shut down, but before the application has read the end, is answered.
func TestC10_RequestAtTheInstantOfRetireIsAnswered(t *testing.T) {
	eachServer(t, func(t *testing.T, s *server) {
		c := s.client(t)
		c.get(t, "/")
		v := s.settled(t, c)
		if err := s.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		// The signal is delivered to one thread after the other: one that still runs would read the end at once.
		eventually(t, "every thread to stop", func() bool { return stopped(t, s.cmd.Process.Pid) })
		if err := Retire(t.Context(), v); err != nil {
			t.Fatal(err)
		}
		c.send(t, "/")
		eventually(t, "the request to arrive", func() bool {
			x, ok := sample(t, s.diag, c)
			return ok && x.Unread > 0
		})
		if err := s.cmd.Process.Signal(syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		if err := c.answer(); err != nil {
			t.Fatalf("the request was not answered: %v", err)
		}
		c.ended(t)
	})
}

// stopped tells whether no thread of a process runs any more.
func stopped(t *testing.T, pid int) bool {
	t.Helper()
	stats, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil || len(stats) == 0 {
		t.Fatalf("no threads of %d: %v", pid, err)
	}
	for _, path := range stats {
		b, err := os.ReadFile(path)
		if err != nil {
			continue // the thread has ended
		}
		if i := bytes.LastIndexByte(b, ')'); i < 0 || len(b) < i+3 || b[i+2] != 'T' {
			return false
		}
	}
	return true
}

func TestRetireLeavesABusyConnection(t *testing.T) {
	eachServer(t, func(t *testing.T, s *server) {
		c := s.client(t)
		c.get(t, "/")
		v := s.settled(t, c)
		c.send(t, "/?ms=300")
		eventually(t, "the request to arrive", func() bool {
			x, ok := sample(t, s.diag, c)
			return ok && x.BytesReceived > v.BytesReceived
		})
		if err := Retire(t.Context(), v); !errors.Is(err, ErrChanged) {
			t.Errorf("got %v, want ErrChanged", err)
		}
		if err := c.answer(); err != nil {
			t.Fatal(err)
		}
		if err := Retire(t.Context(), v); !errors.Is(err, ErrChanged) {
			t.Errorf("with an old look: got %v, want ErrChanged", err)
		}
		c.get(t, "/")
	})
}

func TestRetireOfWhatIsGone(t *testing.T) {
	eachServer(t, func(t *testing.T, s *server) {
		c := s.client(t)
		c.get(t, "/")
		v := s.settled(t, c)
		unlocated, reused := v, v
		unlocated.FD = -1
		reused.Inode++
		if err := Retire(t.Context(), unlocated); !errors.Is(err, ErrNoFile) {
			t.Errorf("without a descriptor: got %v, want ErrNoFile", err)
		}
		if err := Retire(t.Context(), reused); !errors.Is(err, ErrGone) {
			t.Errorf("a descriptor that is another socket: got %v, want ErrGone", err)
		}
		if _, err := Hold(reused.PID, reused.FD, reused.Inode); !errors.Is(err, ErrGone) {
			t.Errorf("hold of another socket: got %v, want ErrGone", err)
		}
		c.get(t, "/") // nothing was done to it
		if err := s.cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		s.cmd.Wait()
		if err := Retire(t.Context(), v); !errors.Is(err, ErrGone) {
			t.Errorf("a process that has exited: got %v, want ErrGone", err)
		}
	})
}

// Clients that never pause are let go between two requests. No answer that was begun is cut short.
func TestG5_RetireLetsGoOfAClosedLoop(t *testing.T) {
	eachServer(t, func(t *testing.T, s *server) {
		const clients = 20
		var wg sync.WaitGroup
		var answered, lost atomic.Int64
		for range clients {
			c := s.client(t)
			wg.Go(func() {
				defer c.Close()
				for {
					if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
						if !errors.Is(err, unix.EPIPE) && !errors.Is(err, unix.ECONNRESET) {
							t.Errorf("send: %v", err)
						}
						return
					}
					first, err := c.r.Peek(1)
					if err != nil {
						// The race of every kept connection: nothing of the request was begun.
						if !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) {
							t.Errorf("before the answer: %q, %v", first, err)
						}
						lost.Add(1)
						return
					}
					if err := c.answer(); err != nil {
						t.Errorf("within an answer: %v", err)
						return
					}
					answered.Add(1)
				}
			})
		}
		cl := NewClassifier(ClassifierOptions{Protocol: ProtocolHTTP1})
		retired, changed := 0, 0
		eventually(t, "all clients to be let go", func() bool {
			left := 0
			for _, v := range cl.Look(time.Now(), s.samples(t), false) {
				if v.Class != ClassClosing {
					left++
				}
				if !Retirable(v, RetireGuard{Busy: true}) {
					continue
				}
				switch err := Retire(t.Context(), v); {
				case err == nil:
					retired++
				case errors.Is(err, ErrChanged), errors.Is(err, ErrGone), errors.Is(err, ErrNoFile):
					changed++
				default:
					t.Fatal(err)
				}
			}
			return left == 0
		})
		wg.Wait()
		t.Logf("%d clients, %d answers, %d retired, %d attempts found it busy or gone, %d requests met the close", clients, answered.Load(), retired, changed, lost.Load())
		if retired < clients/2 {
			t.Errorf("got %d retired of %d", retired, clients)
		}
	})
}

// A stock pool that never pauses loses nothing: net/http sends again what met the close, since nothing of it was begun.
func TestG5_BusyPoolLosesNothing(t *testing.T) {
	eachServer(t, func(t *testing.T, s *server) {
		const clients = 20
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var wg sync.WaitGroup
		var answered atomic.Int64
		for range clients {
			tr := &http.Transport{DialContext: s.ns.DialContext}
			wg.Go(func() {
				defer tr.CloseIdleConnections()
				for ctx.Err() == nil {
					req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+s.addr()+"/", nil)
					if err != nil {
						t.Error(err)
						return
					}
					resp, err := tr.RoundTrip(req)
					if err == nil {
						_, err = io.Copy(io.Discard, resp.Body)
						resp.Body.Close()
					}
					if err != nil && ctx.Err() == nil {
						t.Errorf("a request failed: %v", err)
						return
					}
					answered.Add(1)
				}
			})
		}
		cl := NewClassifier(ClassifierOptions{Protocol: ProtocolHTTP1})
		retired := map[uint64]bool{}
		eventually(t, "as many retired as there are clients", func() bool {
			for _, v := range cl.Look(time.Now(), s.samples(t), false) {
				if Retirable(v, RetireGuard{Busy: true}) && Retire(ctx, v) == nil {
					retired[v.Cookie] = true
				}
			}
			return len(retired) >= clients
		})
		cancel()
		wg.Wait()
		t.Logf("%d answers, %d connections retired", answered.Load(), len(retired))
	})
}

func TestRetirable(t *testing.T) {
	idle := func(v Verdict) Verdict {
		v.State, v.Class = StateEstablished, ClassIdle
		return v
	}
	for _, c := range []struct {
		name  string
		v     Verdict
		guard RetireGuard
		want  bool
	}{
		{"two requests, 8 ms", idle(Verdict{Requests: 2, IdleFor: 8 * time.Millisecond}), RetireGuard{}, true},
		{"two requests, 4 ms", idle(Verdict{Requests: 2, IdleFor: 4 * time.Millisecond}), RetireGuard{}, false},
		{"one request, 1 s", idle(Verdict{Requests: 1, IdleFor: time.Second}), RetireGuard{}, false},
		{"one request, 2.5 s", idle(Verdict{Requests: 1, IdleFor: 2500 * time.Millisecond}), RetireGuard{}, true},
		{"pushing", idle(Verdict{Requests: 9, IdleFor: time.Hour, Pushing: true}), RetireGuard{}, false},
		{"half-closed client", Verdict{Sample: Sample{State: StateCloseWait}, Class: ClassIdle, Requests: 2, IdleFor: time.Hour}, RetireGuard{}, false},
		{"unknown", Verdict{Sample: Sample{State: StateEstablished}, Class: ClassUnknown, Requests: 2, IdleFor: time.Hour}, RetireGuard{}, false},
		{"own guard", idle(Verdict{Requests: 2, IdleFor: time.Second}), RetireGuard{MinIdle: 2 * time.Second}, false},
		{"closed loop, not asked", Verdict{Sample: Sample{State: StateEstablished}, Class: ClassActive, Cycles: 10, strict: true}, RetireGuard{}, false},
		{"closed loop", Verdict{Sample: Sample{State: StateEstablished}, Class: ClassActive, Cycles: 10, strict: true}, RetireGuard{Busy: true}, true},
		{"closed loop, pushing", Verdict{Sample: Sample{State: StateEstablished}, Class: ClassActive, Cycles: 10, strict: true, Pushing: true}, RetireGuard{Busy: true}, false},
		{"closed loop, opaque", Verdict{Sample: Sample{State: StateEstablished}, Class: ClassActive, Cycles: 10}, RetireGuard{Busy: true}, false},
		{"few cycles", Verdict{Sample: Sample{State: StateEstablished}, Class: ClassActive, Cycles: 9, strict: true}, RetireGuard{Busy: true}, false},
	} {
		if got := Retirable(c.v, c.guard); got != c.want {
			t.Errorf("%s: got %v, want %v", c.name, got, c.want)
		}
	}
}

// An upload that the application never reads, its answer out, and the application killed: the answer arrives.
func TestT15_UnreadUploadDoesNotLoseTheAnswer(t *testing.T) {
	for _, shutRead := range []bool{false, true} {
		name := "at once"
		if shutRead {
			name = "after SHUT_RD"
		}
		t.Run(name, func(t *testing.T) {
			ns, d, pid, addr, stop := startMute(t)
			c := dial(t, ns, addr)
			write(t, c, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
			read(t, c, muteAnswer[:1]) // the server has answered and reads nothing more
			write(t, c, string(make([]byte, 50_000)))
			var x Sample
			eventually(t, "unread data", func() bool {
				var ok bool
				x, ok = sample(t, d, c)
				return ok && x.Unread >= 50_000 && x.queued() == 0
			})
			list := []Sample{x}
			if err := Locate([]int{pid}, list); err != nil || list[0].FD < 0 {
				t.Fatalf("got %+v, %v", list[0], err)
			}
			h, err := Hold(list[0].PID, list[0].FD, list[0].Inode)
			if err != nil {
				t.Fatal(err)
			}
			defer h.Close()
			if shutRead {
				if err := h.ShutRead(); err != nil {
					t.Fatal(err)
				}
			}
			eventually(t, "the answer to be acknowledged", func() bool {
				ok, err := h.Acked()
				if err != nil {
					t.Fatal(err)
				}
				return ok
			})
			stop()
			done := make(chan error, 1)
			go func() { done <- h.FinishAfterExit(t.Context()) }()
			write(t, c, string(make([]byte, 50_000))) // the upload goes on; a RST would break the answer
			read(t, c, muteAnswer[1:])
			if n, err := c.Read(make([]byte, 1)); err != io.EOF {
				t.Fatalf("got %d bytes, %v, want the end", n, err)
			}
			if err := c.Close(); err != nil {
				t.Fatal(err)
			}
			if err := <-done; err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(h.Close(), h.Close()); err != nil {
				t.Fatal(err)
			}
		})
	}
}

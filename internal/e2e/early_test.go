// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/agent"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/loadtest"
)

// A stop signal that somebody else sends to CMD, past Ebb, is seen in the kernel: its admission is closed before a handler
// runs, late connections go to the sibling or to a peer, what waits to be accepted is carried, and CMD is not told twice.
func TestT4_ASignalPastEbb(t *testing.T) {
	for _, how := range []drain.OnNew{drain.OnNewSteer, drain.OnNewRelay} {
		t.Run(string(how), func(t *testing.T) {
			n := newLAN(t)
			flags := latePolicy("--early")
			if how == drain.OnNewSteer {
				n.run("two", latePolicy(), goServer(t, n.v4(8081))...)
			} else {
				peer := newElsewhere(t, n.host, 9000)
				flags = append(flags, "--peer", peer.v4)
			}
			r := n.run("one", flags, goServer(t, n.v4(8080), "-patient")...)
			r.find("what a stop signal does", func(e drain.Event) bool {
				what, _ := e.Fields["prepared"].(string)
				return e.Type == agent.EventEarly && strings.HasPrefix(what, string(how))
			})
			r.find("the listeners guarded", func(e drain.Event) bool { return e.Type == agent.EventEarly && e.Fields["guarded"] == true })
			l := loadFrom(t, n.client, loadtest.Options{
				Targets: []loadtest.Target{{Name: "one", Addr: n.v4(8080)}}, Rate: 200, Slow: 3, Drain: 3 * time.Second,
			})
			l.warm(200)
			if err := l.Drop("one"); err != nil {
				t.Fatal(err)
			}
			if err := syscall.Kill(r.child(), syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			if code := r.wait(); code != 0 {
				t.Errorf("exit code %d, want 0", code)
			}
			clean(t, l.end())
			b, late := r.lateOf()
			chosen(t, b, how)
			if b.Drain.Cause != drain.CauseSignal || b.Drain.Outcome != drain.OutcomeDrained {
				t.Errorf("drain: got %s, %s, want begun by a signal and drained", b.Drain.Cause, b.Drain.Outcome)
			}
			if late.Redirected == 0 || late.Failed != 0 || late.Refused != 0 {
				t.Errorf("late: got %+v, want redirected ones, none failed or refused", late)
			}
		})
	}
}

// The same of a process that Ebb has not started: it is counted and drained, by a stop of Ebb as by a signal past it, and
// hears one stop signal only.
func TestT4_AttachedToARunningProcess(t *testing.T) {
	for _, past := range []bool{false, true} {
		t.Run("signal past ebb "+strconv.FormatBool(past), func(t *testing.T) {
			n := newLAN(t)
			n.run("two", latePolicy(), goServer(t, n.v4(8081))...)
			argv := goServer(t, n.v4(8080), "-patient")
			c := program(t, n.ns, argv...)
			eventually(t, "it serves", func() bool { served, _ := n.serves(n.v4(8080)); return served })
			pid := c.Cmd.Process.Pid
			before := dialHTTP(t, n.client, n.v4(8080))
			before.get(t, "/")
			r := n.start("one", latePolicy("--early", "--attach", strconv.Itoa(pid)))
			r.await(agent.EventListener)
			r.find("what a stop signal does", func(e drain.Event) bool { return e.Type == agent.EventEarly })
			r.awaitCounts("one connection", func(b api.Backend) bool { return b.CountsKnown && value(b.Counts.Open) == 1 })
			l := loadFrom(t, n.client, loadtest.Options{
				Targets: []loadtest.Target{{Name: "one", Addr: n.v4(8080)}}, Rate: 100, Drain: 3 * time.Second,
			})
			l.warm(100)
			if err := l.Drop("one"); err != nil {
				t.Fatal(err)
			}
			before.Close()
			if past {
				if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
					t.Fatal(err)
				}
			} else {
				r.signal(syscall.SIGTERM)
			}
			if code := r.wait(); code != 0 {
				t.Errorf("exit code %d, want 0", code)
			}
			clean(t, l.end())
			b, late := r.lateOf()
			chosen(t, b, drain.OnNewSteer)
			if b.PID != pid || b.Drain.Outcome != drain.OutcomeDrained || late.Redirected == 0 {
				t.Errorf("got pid %d, %s, %+v, want pid %d, drained, redirected ones", b.PID, b.Drain.Outcome, late, pid)
			}
			if err := c.Wait(); err != nil && !isExit(err) {
				t.Errorf("the process: %v", err)
			}
		})
	}
}

func isExit(err error) bool {
	_, ok := err.(*exec.ExitError)
	return ok
}

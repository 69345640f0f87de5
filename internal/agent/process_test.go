// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/probes"
)

// The status of a process that is not our child is read while it is a zombie.
func TestZombieExit(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		argv []string
		want int
	}{
		{[]string{"sh", "-c", "exit 7"}, 7},
		{[]string{"sh", "-c", "kill -KILL $$"}, 128 + 9},
		{[]string{"true"}, 0},
	} {
		cmd := exec.Command(tc.argv[0], tc.argv[1:]...)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", cmd.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		start, err := strconv.ParseUint(strings.Fields(string(stat[bytes.LastIndexByte(stat, ')'):]))[20], 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		// waitid with WNOWAIT waits for the end and leaves the zombie.
		for {
			_, _, e := syscall.Syscall6(syscall.SYS_WAITID, 1, uintptr(cmd.Process.Pid), 0, 0x1000004, 0, 0)
			if e == 0 {
				break
			}
			if e != syscall.EINTR {
				t.Fatal(e)
			}
		}
		code, known := zombieExit(cmd.Process.Pid, start)
		if !known || code != tc.want {
			t.Errorf("%v: got %d, %v; want %d", tc.argv, code, known, tc.want)
		}
		if _, known := zombieExit(cmd.Process.Pid, start+1); known {
			t.Errorf("%v: another process's start time was accepted", tc.argv)
		}
		var exit *exec.ExitError
		if err := cmd.Wait(); err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
	}
}

// A process that was watched for a while is watched again, as after a change of the configuration: it has not ended.
func TestWatchAgain(t *testing.T) {
	t.Parallel()
	cmd := exec.Command("cat")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	start, err := probes.Started(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	p, ok := adoptProcess(cmd.Process.Pid, start)
	if !ok {
		t.Fatal("the process is not there")
	}
	defer p.close()
	for range 2 {
		ctx, cancel := context.WithCancel(t.Context())
		watched := make(chan struct{})
		go func() {
			p.watch(ctx)
			close(watched)
		}()
		time.AfterFunc(10*time.Millisecond, cancel)
		<-watched
		select {
		case <-p.exited():
			t.Fatalf("it has ended: %+v", p.exit)
		default:
		}
	}
	go p.watch(t.Context())
	in.Close()
	<-p.exited()
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
}

func FuzzParseZombie(f *testing.F) {
	if b, err := os.ReadFile("/proc/self/stat"); err == nil {
		f.Add(string(b))
		f.Add(strings.Replace(string(b), ") R", ") Z", 1))
	}
	f.Add("1 (a) b) Z")
	f.Fuzz(func(t *testing.T, s string) {
		if code, known := parseZombie(s, 0); !known && code != 0 {
			t.Errorf("got code %d of an unknown status", code)
		}
	})
}

// Who speaks for CMD is found by ancestors, as descendants finds those whom CMD has started.
func TestProcessHas(t *testing.T) {
	t.Parallel()
	cmd := exec.Command("sh", "-c", "sleep 60 & echo $!; wait")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	grandchild, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = syscall.Kill(grandchild, syscall.SIGKILL)
		_ = cmd.Wait()
	}()
	child := cmd.Process.Pid
	p := &process{pid: child, done: make(chan struct{})}
	orphans := &process{pid: 1 << 30, child: true, done: make(chan struct{})}
	apart := &process{pid: child, done: make(chan struct{})}
	apart.leaveOut(grandchild)
	ended := &process{pid: child, done: make(chan struct{})}
	ended.finish(exit{})
	for _, tt := range []struct {
		name string
		p    *process
		pid  int
		want bool
	}{
		{"itself", p, child, true},
		{"its child", p, grandchild, true},
		{"us", p, os.Getpid(), false},
		{"our parent", p, os.Getppid(), false},
		{"nobody", p, 1 << 30, false},
		{"an orphan of CMD below us", orphans, grandchild, true},
		{"us, with CMD our child", orphans, os.Getpid(), false},
		{"our parent, with CMD our child", orphans, os.Getppid(), false},
		{"a process of ours below CMD", apart, grandchild, false},
		{"whoever has the number of one that has ended", ended, child, false},
	} {
		if got := tt.p.has(tt.pid); got != tt.want {
			t.Errorf("%s: got %t, want %t", tt.name, got, tt.want)
		}
	}
}

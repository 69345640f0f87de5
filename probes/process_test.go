// SPDX-License-Identifier: Apache-2.0

package probes

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// testProcess is what this binary does when a test starts it as a process to be looked at.
func testProcess(what string, args []string) int {
	switch what {
	case "tree": // forks a chain of the given length, prints the pids, and waits for its input to end
		n, err := strconv.Atoi(args[0])
		if err != nil {
			return 2
		}
		fmt.Println(os.Getpid())
		if n > 0 {
			cmd := exec.Command("/proc/self/exe")
			cmd.Env = append(os.Environ(), fmt.Sprintf("EBB_PROBES_TEST_ARGS=%d", n-1))
			cmd.Stdin, cmd.Stdout = os.Stdin, os.Stdout
			if err := cmd.Run(); err != nil {
				return 1
			}
			return 0
		}
		io.Copy(io.Discard, os.Stdin)
		return 0
	case "http":
		return serveHTTP(args[0])
	case "mute":
		return serveMute(args[0])
	}
	return 2
}

// child starts this binary as a testProcess.
func child(t *testing.T, what string, args ...string) (*exec.Cmd, io.WriteCloser, *bufio.Scanner) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "EBB_PROBES_TEST_PROCESS="+what, "EBB_PROBES_TEST_ARGS="+strings.Join(args, " "))
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd, in, bufio.NewScanner(out)
}

func TestTree(t *testing.T) {
	cmd, in, out := child(t, "tree", "3")
	var pids []int
	for len(pids) < 4 && out.Scan() {
		pid, err := strconv.Atoi(out.Text())
		if err != nil {
			t.Fatal(err)
		}
		pids = append(pids, pid)
	}
	if len(pids) != 4 {
		t.Fatalf("got pids %v", pids)
	}
	tree, err := Tree(cmd.Process.Pid)
	if err != nil || len(tree) != 4 {
		t.Fatalf("got %+v, %v, want 4 processes", tree, err)
	}
	if tree[0].PID != pids[0] || tree[0].PPID != os.Getpid() {
		t.Errorf("got root %+v, want pid %d of %d", tree[0], pids[0], os.Getpid())
	}
	in2 := map[int]bool{}
	for _, p := range tree {
		in2[p.PID] = true
		if p.Start == 0 || p.PGID != unix.Getpgrp() || !Alive(p.PID, p.Start) || Alive(p.PID, p.Start+1) {
			t.Errorf("got %+v, want it alive with this start only", p)
		}
	}
	for _, pid := range pids {
		if !in2[pid] {
			t.Errorf("pid %d is missing in %+v", pid, tree)
		}
	}
	byParent, err := parents()
	if err != nil || len(byParent[pids[0]]) != 1 || byParent[pids[0]][0] != pids[1] {
		t.Errorf("by a walk of /proc: got %v, %v, want %d", byParent[pids[0]], err, pids[1])
	}
	if err := in.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the process to end", func() bool { return !Alive(tree[0].PID, tree[0].Start) }) // a zombie until it is reaped
	if _, err := Tree(cmd.Process.Pid); !errors.Is(err, ErrGone) {
		t.Errorf("zombie: got %v, want ErrGone", err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if _, err := Tree(cmd.Process.Pid); !errors.Is(err, ErrGone) {
		t.Errorf("reaped: got %v, want ErrGone", err)
	}
}

// Processes that come and go while the tree is read are no error.
func TestTreeWhileProcessesComeAndGo(t *testing.T) {
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			default:
				exec.Command("/bin/true").Run()
			}
		}
	}()
	for range 200 {
		tree, err := Tree(os.Getpid())
		if err != nil || tree[0].PID != os.Getpid() {
			t.Errorf("got %+v, %v", tree, err)
			break
		}
	}
	close(stop)
	<-done
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/api"
)

// limit bounds every wait for what takes milliseconds.
const limit = 30 * time.Second

// server is a server that runs, alone or under `ebb run`.
type server struct {
	cmd    *exec.Cmd // of ebb run if there is one
	pid    int       // of the server
	client *api.Client
	stderr bytes.Buffer
	signal chan int64 // when the server heard of SIGTERM, in Unix nanoseconds
	done   chan struct{}
}

// startServer starts a server in a space and waits until it listens and, under Ebb, is covered.
func startServer(ctx context.Context, o options, sp *space, withEbb bool, flags ...string) (_ *server, err error) {
	argv := []string{"/proc/self/exe", "serve", "-listen", sp.addr}
	sock := filepath.Join(runDir, "bench.sock")
	if withEbb {
		run := append([]string{o.Ebb, "run", "--name", "bench", "--protocol", "http1", "--datapath", "bpf", "--api", sock}, flags...)
		exe, err := os.Readlink("/proc/self/exe")
		if err != nil {
			return nil, fmt.Errorf("find own binary: %w", err)
		}
		argv = append(append(run, "--"), append([]string{exe}, argv[1:]...)...)
	}
	s := &server{signal: make(chan int64, 1), done: make(chan struct{})}
	s.cmd = exec.Command(argv[0], argv[1:]...)
	s.cmd.Env = append(environment(), "GODEBUG=asyncpreemptoff=1", "EBB_BPFFS="+pins, "EBB_RUN_DIR="+runDir)
	s.cmd.Stderr = &s.stderr
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("start server: %w", err)
	}
	if err := start(sp.server, s.cmd); err != nil {
		return nil, fmt.Errorf("start server: %w", err)
	}
	up := make(chan int, 1)
	go func() {
		defer close(s.done)
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			f := strings.Fields(lines.Text())
			switch {
			case len(f) == 3 && f[0] == "listening":
				if pid, err := strconv.Atoi(f[2]); err == nil {
					up <- pid
				}
			case len(f) == 2 && f[0] == "signal":
				if ns, err := strconv.ParseInt(f[1], 10, 64); err == nil {
					s.signal <- ns
				}
			}
		}
		_ = s.cmd.Wait() // how it ended is in ProcessState
	}()
	defer func() {
		if err != nil {
			s.kill()
			if s.stderr.Len() > 0 {
				err = fmt.Errorf("%w; it wrote:\n%s", err, s.stderr.String())
			}
		}
	}()
	wait, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	select {
	case s.pid = <-up:
	case <-s.done:
		return nil, fmt.Errorf("start server: it ended (%v) before it listened", s.cmd.ProcessState)
	case <-wait.Done():
		return nil, errors.New("start server: it does not listen")
	}
	if !withEbb {
		return s, nil
	}
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		if err = s.covered(wait, sock); err == nil {
			return s, nil
		}
		select {
		case <-tick.C:
		case <-s.done:
			return nil, fmt.Errorf("start ebb run: it ended (%v)", s.cmd.ProcessState)
		case <-wait.Done():
			return nil, fmt.Errorf("start ebb run: the server is not covered: %w", err)
		}
	}
}

// environment is ours without the variables that are flags of Ebb.
func environment() []string {
	return slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "EBB_") })
}

// covered is nil once Ebb has found the listener.
func (s *server) covered(ctx context.Context, sock string) error {
	if s.client == nil {
		c, err := api.Dial(ctx, sock)
		if err != nil {
			return err
		}
		s.client = c
	}
	return s.client.Ready(ctx)
}

// kill ends a server at once, and waits until Ebb has taken its programs back.
func (s *server) kill() {
	if s.pid > 0 {
		_ = unix.Kill(s.pid, unix.SIGKILL) // an ended process has nothing left to kill; ebb run ends with its command
	} else {
		_ = s.cmd.Process.Kill()
	}
	<-s.done
}

// gone waits until no pin of Ebb is left, so that what is measured next is without it.
func gone(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		_, err := os.Stat(pins)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return errors.New("the programs of ebb run are still there after its end")
		}
	}
}

// sample is one line of the raw data.
type sample struct {
	Round   int    `json:"round"`
	Link    link   `json:"link"`
	Ebb     bool   `json:"ebb"`
	Others  int    `json:"other_sock_ops"` // programs of others at the root of the cgroups while it was taken
	LoadAvg string `json:"load"`
	work
}

// take takes one sample.
func take(ctx context.Context, o options, softirqs []*os.File, l link, withEbb bool) (sample, error) {
	s := sample{Link: l, Ebb: withEbb}
	sp, err := newSpace(l)
	if err != nil {
		return s, err
	}
	srv, err := startServer(ctx, o, sp, withEbb)
	if err != nil {
		return s, errors.Join(err, sp.close())
	}
	if s.Others, err = sockOps(); err != nil {
		s.Others = -1
	} else if withEbb {
		s.Others--
	}
	if avg, err := os.ReadFile("/proc/loadavg"); err == nil {
		s.LoadAvg, _, _ = strings.Cut(string(avg), " ")
	}
	spec := clientSpec{
		Addr: sp.addr, Server: srv.pid, Softirqs: len(softirqs),
		Conns: o.Conns, Parallel: o.Parallel, Requests: o.Requests, Kept: o.Kept,
	}
	if withEbb {
		spec.Ebb = srv.cmd.Process.Pid
	}
	s.work, err = runClient(sp, spec, softirqs)
	srv.kill()
	err = errors.Join(err, sp.close())
	if withEbb {
		err = errors.Join(err, gone(ctx))
	}
	return s, err
}

func runClient(sp *space, spec clientSpec, softirqs []*os.File) (work, error) {
	var w work
	text, err := json.Marshal(spec)
	if err != nil {
		return w, fmt.Errorf("encode spec: %w", err)
	}
	cmd := exec.Command("/proc/self/exe", "client", string(text))
	var out, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &said
	cmd.Env = append(environment(), "GODEBUG=asyncpreemptoff=1")
	cmd.ExtraFiles = softirqs
	if err := start(sp.client, cmd); err != nil {
		return w, fmt.Errorf("start client: %w", err)
	}
	if err := cmd.Wait(); err != nil {
		return w, fmt.Errorf("run client: %w: %s", err, strings.TrimSpace(said.String()))
	}
	if err := json.NewDecoder(&out).Decode(&w); err != nil && !errors.Is(err, io.EOF) {
		return w, fmt.Errorf("read the client's figures: %w", err)
	}
	return w, nil
}

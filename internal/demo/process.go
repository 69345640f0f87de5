// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/loadtest"
)

// patience bounds the wait for what takes milliseconds on a machine that has time.
const patience = 30 * time.Second

// process is a server or its supervisor.
type process struct {
	name string
	cmd  *exec.Cmd
	said *tail         // what it wrote to standard error
	up   chan struct{} // closed when the server has said that it listens
	done chan struct{} // closed when it has ended
	read chan struct{} // closed when nobody can write to said any more
}

// serverCommand is the command line of a server: Go's own, with the MPTCP listener that Go makes by default, which
// dies at SIGTERM as a program without a handler does.
func serverCommand(name, addr string) ([]string, error) {
	argv, err := loadtest.GoServer("-name", name, "-listen", addr, "-mptcp")
	if err != nil {
		return nil, err
	}
	argv[0] = "/proc/self/exe" // the path may have another file behind it by now
	return argv, nil
}

// startServer starts a server and waits until it listens.
func startServer(ctx context.Context, name, addr string) (*process, error) {
	argv, err := serverCommand(name, addr)
	if err != nil {
		return nil, err
	}
	p, err := start(name, argv, nil)
	if err != nil {
		return nil, err
	}
	if err := p.listening(ctx); err != nil {
		p.kill()
		return nil, err
	}
	return p, nil
}

func start(name string, argv, env []string) (_ *process, err error) {
	p := &process{name: name, said: &tail{}, up: make(chan struct{}), done: make(chan struct{}), read: make(chan struct{})}
	// Pipes of our own: those of exec break when the process ends, and blue can outlive its supervisor.
	outR, outW, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	errR, errW, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start %s: %w", name, err), outR.Close(), outW.Close())
	}
	p.cmd = exec.Command(argv[0], argv[1:]...)
	p.cmd.Env = append(outerEnv(), env...)
	p.cmd.Stdout, p.cmd.Stderr = outW, errW
	// In a process group of its own, so that Ctrl-C reaches nobody but us.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	err = p.cmd.Start()
	if err = errors.Join(err, outW.Close(), errW.Close()); err != nil {
		return nil, errors.Join(fmt.Errorf("start %s: %w", name, err), outR.Close(), errR.Close())
	}
	go func() {
		defer outR.Close()
		lines := bufio.NewScanner(outR)
		var once sync.Once
		for lines.Scan() {
			if strings.HasPrefix(lines.Text(), "listening ") {
				once.Do(func() { close(p.up) })
			}
		}
	}()
	go func() {
		defer close(p.read)
		defer errR.Close()
		_, _ = io.Copy(p.said, errR) // it ends with the last writer
	}()
	go func() {
		_ = p.cmd.Wait() // how it ended is in ProcessState
		close(p.done)
	}()
	return p, nil
}

// outerEnv is the environment without the variables that are flags of ours: what they say is meant for elsewhere.
func outerEnv() []string {
	return slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "EBB_") })
}

// words is what the process wrote to standard error, for the end of an error message.
func (p *process) words() string {
	select {
	case <-p.read:
	case <-time.After(200 * time.Millisecond): // it lives, and may say no more
	}
	return p.said.String()
}

// listening waits until the server has said so.
func (p *process) listening(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	select {
	case <-p.up:
		return nil
	case <-p.done:
		return fmt.Errorf("start %s: it ended (%v) before it listened%s", p.name, p.cmd.ProcessState, p.words())
	case <-ctx.Done():
		return fmt.Errorf("start %s: it does not listen: %w%s", p.name, context.Cause(ctx), p.words())
	}
}

func (p *process) stop() error {
	if err := p.cmd.Process.Signal(unix.SIGTERM); err != nil {
		return fmt.Errorf("send SIGTERM to %s: %w", p.name, err)
	}
	return nil
}

func (p *process) ended() <-chan struct{} { return p.done }

func (p *process) wait(ctx context.Context) error {
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// kill ends the process, if it still runs, and reaps it.
func (p *process) kill() {
	_ = p.cmd.Process.Kill() // an ended process has nothing left to kill
	<-p.done
}

// tail keeps the last lines for an error message.
type tail struct {
	mu  sync.Mutex
	buf []byte
}

const tailSize = 4 << 10

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, b...)
	if extra := len(t.buf) - tailSize; extra > 0 {
		t.buf = append(t.buf[:0], t.buf[extra:]...)
	}
	return len(b), nil
}

// String is empty, or what was written, indented below a line of its own.
func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var b strings.Builder
	lines := bufio.NewScanner(bytes.NewReader(t.buf))
	for lines.Scan() {
		fmt.Fprintf(&b, "\n    %s", lines.Text())
	}
	if b.Len() == 0 {
		return ""
	}
	return "; it wrote:" + b.String()
}

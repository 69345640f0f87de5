// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/agent"
	"github.com/ebbproxy/ebb/internal/api"
)

func newHoldCmd(env *environment) *cobra.Command {
	var h hold
	cmd := &cobra.Command{
		Use:   "hold [flags] -- CMD [ARG...]",
		Short: "Run CMD, and hold the flush of the caller's own backend while it runs",
		Long: `Runs CMD, for work of a backend that no connection shows: a job, a hook, a script.
While it runs a drain of the backend does not tell the application to end, unless
the wait is over. The backend is that whose process the caller is.

When no ebb answers, or the caller is no process of a backend, that is said on
stderr and CMD runs all the same, without a hold; with --require it does not run.
When the flush has begun it is too late to begin work: CMD does not run.

Signals are forwarded to CMD, but for SIGKILL, which cannot be: kill -9 of this process
leaves CMD running, and its hold is released. Exit code: CMD's own (128+N for signal N); 1 if it was
not run, 126 if it cannot be executed, 127 if it is not found.`,
		Example: `  ebb hold -- ./nightly-report
  ebb hold --name export --require -- tar -cf /backup/export.tar /srv/export`,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usagef("no command: want ebb hold [flags] -- CMD [ARG...]")
			}
			if !cmd.Flags().Changed("name") {
				h.name = filepath.Base(args[0])
			}
			if err := api.CheckName(h.name); err != nil {
				return usagef("--name: %v, got %q", err, h.name)
			}
			h.env, h.socket = env, cmp.Or(h.socket, env.appSocket())
			return h.run(cmd.Context(), args)
		},
	}
	f := cmd.Flags()
	f.SetInterspersed(false) // what follows CMD is CMD's
	f.StringVar(&h.name, "name", "", "what the work is called in ebb explain (default: the base name of CMD)")
	f.StringVar(&h.socket, "socket", "", "`path` of the socket of applications (default: EBB_APP_SOCKET, else app.sock in the run directory)")
	f.BoolVar(&h.require, "require", false, "do not run CMD without a hold")
	return cmd
}

const (
	// endPatience is for the last word; without it the session ends as well, with this process.
	endPatience = 2 * time.Second
	// defaultBeat is the heartbeat of a server that does not say.
	defaultBeat = 3 * time.Second
	// The pause before another session is tried doubles from the first to the longest.
	firstSessionPause   = time.Second
	longestSessionPause = 30 * time.Second
)

// hold is the session of one command.
type hold struct {
	env          *environment
	name, socket string
	require      bool

	client *api.Client
	id     string // of the session; empty: there is none
	beat   time.Duration
}

func (h *hold) run(ctx context.Context, argv []string) error {
	err := h.open(ctx)
	switch {
	case errors.Is(err, api.ErrFlushing):
		return fmt.Errorf("hold: %w; %s is not run", err, argv[0])
	case err != nil && h.require:
		return fmt.Errorf("hold: %w; %s is not run without it", err, argv[0])
	case err != nil:
		fmt.Fprintf(h.env.stderr, "ebb: hold: %v; %s runs without a hold\n", err, argv[0])
	default:
		ctx, cancel := context.WithCancel(ctx)
		kept := make(chan struct{})
		go func() {
			defer close(kept)
			h.keep(ctx)
		}()
		defer func() {
			cancel()
			<-kept
			h.end()
		}()
	}
	return h.env.runCommand(argv)
}

// open registers this process and takes the lease.
func (h *hold) open(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	if h.client == nil {
		c, err := api.Dial(ctx, h.socket)
		if err != nil {
			return err
		}
		h.client = c
	}
	// Bound: when this process is killed nobody else knows when the work is over.
	s, err := h.client.OpenSession(ctx, api.SessionRequest{Role: api.RoleHolder, Bound: true})
	if err != nil {
		return err
	}
	h.heard(s)
	if _, err = h.client.SessionCall(ctx, s.ID, api.SessionCall{Op: "hold", Name: h.name}); err != nil {
		h.end()
	}
	return err
}

func (h *hold) heard(s api.Session) {
	h.id, h.beat = s.ID, cmp.Or(time.Duration(s.HeartbeatMS)*time.Millisecond, defaultBeat)
}

// end ends the session, and so the lease.
func (h *hold) end() {
	if h.id == "" {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), endPatience)
	defer cancel()
	_ = h.client.EndSession(ctx, h.id) // it ends with this process anyway
	h.id = ""
}

// keep gives signs of life until ctx is over. A server that does not answer is asked again at the next beat, since the session
// survives its restart; a session that it does not know is opened anew.
func (h *hold) keep(ctx context.Context) {
	next, pause := h.beat, firstSessionPause
	for {
		timer := time.NewTimer(next)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		}
		next = h.beat
		if h.id != "" {
			if err := h.alive(ctx); !errors.Is(err, api.ErrUnknownSession) {
				continue
			}
			h.id = ""
		}
		switch err := h.open(ctx); {
		case err == nil:
			next, pause = h.beat, firstSessionPause
		case errors.Is(err, api.ErrFlushing):
			fmt.Fprintf(h.env.stderr, "ebb: hold: the session was lost, and %v; %s goes on without a hold\n", err, h.name)
			return
		default:
			// Between a half and the whole of it, so that those that were lost together do not come back together.
			next, pause = pause/2+rand.N(pause/2), min(2*pause, longestSessionPause)
		}
	}
}

func (h *hold) alive(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	s, err := h.client.SessionCall(ctx, h.id, api.SessionCall{Op: "heartbeat"})
	if err == nil {
		h.heard(s)
	}
	return err
}

// runCommand runs a program in place of this one, as far as those around it can see.
func (e *environment) runCommand(argv []string) error {
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = e.stdin, e.stdout, e.stderr
	sigs := make(chan os.Signal, 64)
	signal.Notify(sigs, forwarded()...)
	defer signal.Stop(sigs)
	if err := cmd.Start(); err != nil {
		code := agent.ExitNotExecutable
		if errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist) {
			code = agent.ExitNotFound
		}
		return &exitError{code: code, err: fmt.Errorf("start %s: %w", argv[0], err)}
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for {
		select {
		case s := <-sigs:
			if (s == unix.SIGINT || s == unix.SIGQUIT) && foreground() {
				continue // a key was pressed, and CMD has the signal too
			}
			_ = cmd.Process.Signal(s) // it has just ended
		case err := <-ended:
			ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus)
			switch {
			case ok && ws.Signaled():
				return &exitError{code: 128 + int(ws.Signal())}
			case ok && ws.ExitStatus() != 0:
				return &exitError{code: ws.ExitStatus()}
			}
			return err
		}
	}
}

// forwarded are the signals that CMD gets through us: those that can be caught, but for what stops us together with it, what is
// about ourselves, and what we were started with ignored, as CMD is then.
func forwarded() (all []os.Signal) {
	for n := syscall.Signal(1); n < 65; n++ {
		switch n {
		case unix.SIGKILL, unix.SIGSTOP, unix.SIGTSTP, unix.SIGTTIN, unix.SIGTTOU, unix.SIGCHLD, unix.SIGURG, unix.SIGPROF, unix.SIGPIPE:
			continue
		}
		if !signal.Ignored(n) {
			all = append(all, n)
		}
	}
	return all
}

// foreground says whether our process group, which is CMD's too, is the one that the keys of its terminal reach.
func foreground() bool {
	tty, err := os.Open("/dev/tty")
	if err != nil {
		return false
	}
	defer tty.Close()
	group, err := unix.IoctlGetInt(int(tty.Fd()), unix.TIOCGPGRP)
	return err == nil && group == unix.Getpgrp()
}

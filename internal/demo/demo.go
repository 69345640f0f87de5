// SPDX-License-Identifier: Apache-2.0

// Package demo shows on one machine what a departing server does to its users, without Ebb and with it:
// real processes, real connections and the kernel's own counters, in namespaces of their own that take
// everything with them when they end.
//
// It is not a benchmark, and it judges nothing by time: it counts requests and what became of them.
//
//	code, err := demo.Run(ctx, demo.Options{
//		Stdout: os.Stdout, Stderr: os.Stderr,
//		Inside: func(spec string) []string { return []string{"demo", "--inside", spec} },
//	})
//
// Run starts this binary again inside the namespaces; `ebb demo --inside SPEC` is to call [Inside] there.
package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// The acts.
const (
	ActBare   = "bare"   // a plain SIGTERM, as it is today
	ActDrain  = "drain"  // ebb run as it is by default
	ActRefuse = "refuse" // ebb run --on-new refuse
	ActCrash  = "crash"  // the same, killed in the middle of its drain and started again
)

// Acts are all acts in the order in which they are played.
var Acts = []string{ActBare, ActDrain, ActRefuse, ActCrash}

// Options says what to show. A zero value is the default, a negative number of clients, rate or pause is none.
type Options struct {
	Acts      []string      `json:"acts"`       // default: all
	Rate      float64       `json:"rate"`       // new connections per second, default 300
	KeepAlive int           `json:"keep_alive"` // clients that keep their connection, default 30
	Gap       time.Duration `json:"gap"`        // mean of their pauses, default 50 ms
	Slow      int           `json:"slow"`       // slow answers at any time, default 10
	SlowFor   time.Duration `json:"slow_for"`   // how long one takes, default 3 s
	Lag       time.Duration `json:"lag"`        // how late the balancer learns, default 3 s
	Warm      time.Duration `json:"warm"`       // load before the signal, default 1.5 s
	Grace     time.Duration `json:"grace"`      // of ebb run, default its own (25 s)
	Datapath  string        `json:"datapath"`   // of ebb run, default auto

	JSON     bool `json:"json"`     // numbers instead of words
	Terminal bool `json:"terminal"` // Stdout is a terminal: a line that moves while an act is played
	Color    bool `json:"color"`

	Stdout io.Writer `json:"-"`
	Stderr io.Writer `json:"-"`
	// Inside makes the arguments by which this binary calls the function Inside with the given spec.
	Inside func(spec string) []string `json:"-"`
}

func (o *Options) setDefaults() error {
	if len(o.Acts) == 0 {
		o.Acts = Acts
	}
	for _, a := range o.Acts {
		if !slices.Contains(Acts, a) {
			return fmt.Errorf("%w: act %q is unknown: use some of %s", ErrOption, a, strings.Join(Acts, ", "))
		}
	}
	for _, d := range []time.Duration{o.SlowFor, o.Lag, o.Warm, o.Grace} {
		if d < 0 {
			return fmt.Errorf("%w: %v is negative", ErrOption, d)
		}
	}
	switch o.Datapath {
	case "":
		o.Datapath = "auto"
	case "auto", "bpf", "none":
	default:
		return fmt.Errorf("%w: datapath %q is unknown: use auto, bpf or none", ErrOption, o.Datapath)
	}
	o.Rate = or(o.Rate, 300)
	o.KeepAlive = or(o.KeepAlive, 30)
	o.Gap = or(o.Gap, 50*time.Millisecond)
	o.Slow = or(o.Slow, 10)
	o.SlowFor = or(o.SlowFor, 3*time.Second)
	o.Lag = or(o.Lag, 3*time.Second)
	o.Warm = or(o.Warm, 1500*time.Millisecond)
	if o.Stdout == nil {
		o.Stdout = io.Discard
	}
	if o.Stderr == nil {
		o.Stderr = io.Discard
	}
	return nil
}

func or[T comparable](v, fallback T) T {
	var zero T
	if v == zero {
		return fallback
	}
	return v
}

// killAfter is how long the inner process may take to end once it was told to. All it has to do is to exit.
const killAfter = 5 * time.Second

// Run plays the acts in namespaces of their own and returns the exit code: 0 if nothing was lost with Ebb,
// else 1. The error is why the demo could not be played to its end, or wraps ErrOption. Signals that ask
// to stop end it early. Nothing is left behind, however it ends: every process is in one pid
// namespace, and every file in mounts that nobody else sees.
func Run(ctx context.Context, o Options) (int, error) {
	if err := o.setDefaults(); err != nil {
		return 2, err
	}
	if err := privileged(); err != nil {
		return 1, err
	}
	spec, err := json.Marshal(o)
	if err != nil {
		return 1, fmt.Errorf("encode options: %w", err)
	}
	sigs := make(chan os.Signal, 4)
	signal.Notify(sigs, unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT)
	defer signal.Stop(sigs)

	// The kernel delivers a parent's death signal when the thread that forked ends, so it must not.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	// The link and not the path behind it: the binary may have been replaced meanwhile.
	cmd := exec.Command("/proc/self/exe", o.Inside(string(spec))...)
	cmd.Args[0] = "ebb"
	cmd.Stdout, cmd.Stderr = o.Stdout, o.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS | unix.CLONE_NEWPID,
		Pdeathsig:  unix.SIGKILL,
	}
	if err := cmd.Start(); err != nil {
		if errors.Is(err, unix.EPERM) {
			return 1, fmt.Errorf("%w: the kernel refuses to make namespaces (in a container it needs --privileged): %w", ErrPrivilege, err)
		}
		return 1, fmt.Errorf("start the demo in namespaces of its own: %w", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	asked := false
	ask := func(sig os.Signal) {
		asked = true
		_ = cmd.Process.Signal(sig) // it fails on a process that has ended, which is what was asked for
		time.AfterFunc(killAfter, func() { _ = cmd.Process.Kill() })
	}
	done := ctx.Done()
	for n := 0; ; {
		select {
		case <-done:
			done = nil
			if !asked {
				ask(unix.SIGTERM)
			}
		case sig := <-sigs:
			if n++; n > 1 {
				_ = cmd.Process.Kill() // see ask
			} else if !asked {
				ask(sig)
			}
		case err := <-ended:
			switch code := cmd.ProcessState.ExitCode(); {
			case asked:
				return 1, ErrInterrupted
			case code == codeFailed:
				return 1, errSaid
			case code >= 0:
				return code, nil
			default:
				return 1, fmt.Errorf("play the demo: %w", err)
			}
		}
	}
}

// privileged says what the process lacks and what to do.
func privileged() error {
	if os.Geteuid() != 0 {
		return fmt.Errorf("%w: run `sudo ebb demo`; it stays inside namespaces of its own and leaves nothing behind", ErrPrivilege)
	}
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return fmt.Errorf("read own capabilities: %w", err)
	}
	for line := range strings.Lines(string(status)) {
		hex, ok := strings.CutPrefix(line, "CapEff:")
		if !ok {
			continue
		}
		caps, err := strconv.ParseUint(strings.TrimSpace(hex), 16, 64)
		if err != nil {
			return fmt.Errorf("read own capabilities: %w", err)
		}
		for bit, name := range map[uint]string{unix.CAP_SYS_ADMIN: "CAP_SYS_ADMIN", unix.CAP_NET_ADMIN: "CAP_NET_ADMIN"} {
			if caps&(1<<bit) == 0 {
				return fmt.Errorf("%w: this root lacks %s; in a container, start it with --privileged", ErrPrivilege, name)
			}
		}
	}
	return nil
}

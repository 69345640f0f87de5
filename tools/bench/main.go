// SPDX-License-Identifier: Apache-2.0

// Command bench measures what Ebb costs while nothing drains, and how fast it acts when something does.
//
//	go run ./bench -ebb ../bin/ebb [-rounds 30] [-write ../docs/benchmarks]
//
// A server is measured alone and under `ebb run`, which attaches its programs to the server's network
// namespace and to the root of the cgroups. Each round takes both twice, in the order A B B A or B A A B by
// lot, so that what drifts on the machine falls on both alike. Figures are ratios of one round, their
// medians and bootstrap 95 % intervals. CPU time comes first: it counts what was done, while rates also
// count who else was using the machine.
//
// With -agent it is `ebb agent` that is measured, with many backends in many network namespaces.
//
// It needs root, touches nothing outside namespaces of its own but the root of the cgroups, where Ebb's
// counting programs sit while a server runs under it, and leaves nothing behind.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// options say what to measure. They travel to the inner process as JSON.
type options struct {
	Ebb    string `json:"ebb"`
	Rounds int    `json:"rounds"`
	Limit  int64  `json:"limit_s"` // seconds after which no round is begun; 0: none
	Drains int    `json:"drains"`
	Memory int    `json:"memory"` // connections
	Write  string `json:"write"`
	Seed   uint64 `json:"seed"`

	Conns    int `json:"conns"`    // new connections per sample
	Parallel int `json:"parallel"` // of them at a time
	Requests int `json:"requests"` // per sample
	Kept     int `json:"kept"`     // connections that carry them

	// What follows is of the agent: see measureAgent.
	Agent       bool   `json:"agent"`
	Backends    int    `json:"backends"`
	Starts      int    `json:"starts"`
	Idle        int    `json:"idle_s"`
	Established int    `json:"established"`
	Cut         int    `json:"cut"`
	Disk        string `json:"disk,omitempty"` // directory for journals
}

func main() {
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}

func run(args []string, stdout, stderr io.Writer) int {
	if len(args) > 0 {
		// The roles of this binary, each a process of its own so that its CPU time is its own.
		role, ok := map[string]func([]string) error{"inner": inner, "serve": serve, "client": client, "hold": hold}[args[0]]
		if ok {
			if err := role(args[1:]); err != nil {
				fmt.Fprintf(stderr, "bench: %s: %v\n", args[0], err)
				return 1
			}
			return 0
		}
	}
	o := options{}
	fs := flag.NewFlagSet("bench", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.StringVar(&o.Ebb, "ebb", "../bin/ebb", "the `binary` to measure")
	fs.IntVar(&o.Rounds, "rounds", 0, "rounds per link, however long they take; 100 make the intervals tight (default 30, or what fits into 2m15s)")
	fs.IntVar(&o.Drains, "drains", 30, "drains whose latencies are measured")
	fs.IntVar(&o.Memory, "memory", 8000, "connections for the memory measurement; 0: none")
	fs.StringVar(&o.Write, "write", "", "`directory` in which to keep the results, in a folder named by the date")
	fs.Uint64Var(&o.Seed, "seed", 1, "of the order of samples and of the bootstrap")
	fs.IntVar(&o.Conns, "conns", 2000, "new connections per sample")
	fs.IntVar(&o.Parallel, "parallel", 16, "new connections at a time")
	fs.IntVar(&o.Requests, "requests", 20000, "requests per sample on kept connections")
	fs.IntVar(&o.Kept, "kept", 32, "kept connections")
	fs.BoolVar(&o.Agent, "agent", false, "measure ebb agent with many backends instead; the flags below are for that, and of those above -ebb, -write and -seed")
	fs.IntVar(&o.Backends, "backends", 200, "backends of the agent")
	fs.IntVar(&o.Starts, "starts", 5, "starts of the agent for each number of backends")
	fs.IntVar(&o.Idle, "idle", 60, "seconds of idleness")
	fs.IntVar(&o.Established, "established", 100_000, "connections of one backend")
	fs.IntVar(&o.Cut, "cut", 10_000, "connections that are cut")
	if err := fs.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return 0
		}
		return 2
	}
	if o.Rounds == 0 {
		o.Rounds, o.Limit = 30, 135
	}
	if err := o.check(fs.NArg()); err != nil {
		fmt.Fprintf(stderr, "bench: %v\n", err)
		return 2
	}
	code, err := outer(o, stdout, stderr)
	if err != nil {
		fmt.Fprintf(stderr, "bench: %v\n", err)
	}
	return code
}

func (o *options) check(extra int) error {
	if extra > 0 {
		return errors.New("there is an argument too many")
	}
	for name, n := range map[string]int{
		"rounds": o.Rounds, "conns": o.Conns, "parallel": o.Parallel, "requests": o.Requests, "kept": o.Kept,
		"backends": o.Backends, "starts": o.Starts, "idle": o.Idle, "established": o.Established, "cut": o.Cut,
	} {
		if n < 1 {
			return fmt.Errorf("-%s is %d: it must be 1 or more", name, n)
		}
	}
	if o.Drains < 0 || o.Memory < 0 {
		return errors.New("a number is negative")
	}
	var err error
	if o.Ebb, err = filepath.Abs(o.Ebb); err != nil {
		return err
	}
	if _, err := os.Stat(o.Ebb); err != nil {
		return fmt.Errorf("find ebb: %w; run `make build` first", err)
	}
	if o.Write != "" {
		if o.Write, err = filepath.Abs(o.Write); err != nil {
			return err
		}
	}
	return nil
}

// outer starts the inner process in mount and pid namespaces of its own, with which all that it starts ends.
func outer(o options, stdout, stderr io.Writer) (int, error) {
	if os.Geteuid() != 0 {
		return 1, errors.New("network namespaces and BPF need root: run `sudo make bench`")
	}
	var err error
	if o.Agent {
		// Not in memory as all else is: what waits for a disk is to be measured with it.
		if o.Disk, err = os.MkdirTemp("/var/tmp", "ebb-bench-*"); err != nil {
			return 1, err
		}
		defer os.RemoveAll(o.Disk)
	}
	spec, err := json.Marshal(o)
	if err != nil {
		return 1, fmt.Errorf("encode options: %w", err)
	}
	sigs := make(chan os.Signal, 4)
	signal.Notify(sigs, unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
	defer signal.Stop(sigs)
	// A parent's death signal comes when the thread that forked ends, so it must not.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd := exec.Command("/proc/self/exe", "inner", string(spec))
	cmd.Stdout, cmd.Stderr = stdout, stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID, Pdeathsig: unix.SIGKILL}
	if err := cmd.Start(); err != nil {
		return 1, fmt.Errorf("start in namespaces of its own: %w", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for {
		select {
		case <-sigs:
			// All that the inner process has is in its namespaces.
			_ = cmd.Process.Kill() // it fails on a process that has ended, which is what is wanted
		case err := <-ended:
			if code := cmd.ProcessState.ExitCode(); code >= 0 {
				return code, nil
			}
			return 1, fmt.Errorf("measure: %w", err)
		}
	}
}

// Where the inner process keeps files: in memory, in mounts that nobody else sees.
const (
	home   = "/run"
	bpffs  = home + "/ebb-bench-bpf"
	pins   = bpffs + "/ebb"
	runDir = home + "/ebb-bench"
)

func inner(args []string) error {
	o := options{}
	if len(args) != 1 {
		return errors.New("this is for bench itself")
	}
	if err := json.Unmarshal([]byte(args[0]), &o); err != nil {
		return fmt.Errorf("read options: %w", err)
	}
	if os.Getpid() != 1 {
		return errors.New("this is for bench itself")
	}
	host, err := softirqThreads()
	if err != nil {
		return err
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return fmt.Errorf("mount proc: %w", err)
	}
	if err := unix.Mount("tmpfs", home, "tmpfs", 0, "mode=0755"); err != nil {
		return fmt.Errorf("mount tmpfs: %w", err)
	}
	for _, dir := range []string{bpffs, runDir} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
	}
	if err := unix.Mount("bpf", bpffs, "bpf", 0, "mode=0700"); err != nil {
		return fmt.Errorf("mount bpf: %w", err)
	}
	if o.Agent {
		return measureAgent(context.Background(), o)
	}
	return measure(context.Background(), o, host)
}

// softirqThreads opens the CPU accounting of the kernel threads that take packets when a softirq has too many. They
// are only to be seen from the initial pid namespace.
func softirqThreads() ([]*os.File, error) {
	comms, err := filepath.Glob("/proc/[0-9]*/comm")
	if err != nil {
		return nil, err
	}
	var files []*os.File
	for _, c := range comms {
		name, err := os.ReadFile(c)
		if err != nil || !strings.HasPrefix(string(name), "ksoftirqd/") {
			continue // ended, or none
		}
		f, err := os.Open(filepath.Join(filepath.Dir(c), "schedstat"))
		if err != nil {
			continue // a kernel without CONFIG_SCHED_INFO: the column stays empty
		}
		files = append(files, f)
	}
	return files, nil
}

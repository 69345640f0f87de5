// SPDX-License-Identifier: Apache-2.0

// Command benchrelay measures what the relay costs beside HAProxy in TCP mode, nginx's stream module and a proxy made of
// io.Copy.
//
//	go run ./benchrelay [-rounds 15] [-only connections,bulk1] [-write ../docs/benchmarks]
//
// All of them stand in front of the same server in a network namespace of their own; each round measures every one of
// them, in an order by lot, so that what drifts on the machine falls on all alike. CPU time comes first: it counts what
// was done, while rates also count who else was using the machine. Figures are medians over rounds, ratios are of one
// round, to the better of HAProxy and nginx, with bootstrap 95 % intervals.
//
// It needs root for the namespaces, and haproxy, nginx and nginx's stream module (libnginx-mod-stream on Debian and
// Ubuntu); a peer that is not installed is left out, and said so. It leaves nothing behind.
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
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// options say what to measure. They travel to the inner process as JSON.
type options struct {
	Rounds   int      `json:"rounds"`
	Only     []string `json:"only"`
	Write    string   `json:"write"`
	Profile  string   `json:"profile"`
	Seed     uint64   `json:"seed"`
	Conns    int      `json:"conns"`    // new connections per sample
	Parallel int      `json:"parallel"` // of them at a time
	Requests int      `json:"requests"` // per sample
	Kept     int      `json:"kept"`     // connections that carry them
	Bulk     int64    `json:"bulk"`     // bytes per sample
	Idle     int      `json:"idle"`     // connections
}

func main() {
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}

func run(args []string, stdout, stderr io.Writer) int {
	if len(args) > 0 {
		// The roles of this binary, each a process of its own so that its CPU time is its own.
		role, ok := map[string]func([]string) error{"inner": inner, "serve": serve, "load": load, "relay": relay, "copy": plainCopy}[args[0]]
		if ok {
			if err := role(args[1:]); err != nil {
				fmt.Fprintf(stderr, "benchrelay: %s: %v\n", args[0], err)
				return 1
			}
			return 0
		}
	}
	o := options{}
	only := ""
	fs := flag.NewFlagSet("benchrelay", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.IntVar(&o.Rounds, "rounds", 15, "rounds")
	fs.StringVar(&only, "only", "", "`kinds` of work, separated by commas, of "+strings.Join(kinds, ","))
	fs.StringVar(&o.Write, "write", "", "`directory` in which to keep the results, in a folder named by the date")
	fs.StringVar(&o.Profile, "profile", "", "`file` for a CPU profile of the relay")
	fs.Uint64Var(&o.Seed, "seed", 1, "of the order and of the bootstrap")
	fs.IntVar(&o.Conns, "conns", 3000, "new connections per sample")
	fs.IntVar(&o.Parallel, "parallel", 32, "new connections at a time")
	fs.IntVar(&o.Requests, "requests", 30000, "requests per sample on kept connections")
	fs.IntVar(&o.Kept, "kept", 64, "kept connections")
	fs.Int64Var(&o.Bulk, "bulk", 2<<30, "bytes per sample of bulk")
	fs.IntVar(&o.Idle, "idle", 9000, "idle connections")
	if err := fs.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return 0
		}
		return 2
	}
	o.Only = kinds
	if only != "" {
		o.Only = strings.Split(only, ",")
	}
	for _, k := range o.Only {
		if !slices.Contains(kinds, k) {
			fmt.Fprintf(stderr, "benchrelay: -only %q: use some of %s\n", k, strings.Join(kinds, ","))
			return 2
		}
	}
	if fs.NArg() > 0 || o.Rounds < 1 || o.Conns < 1 || o.Parallel < 1 || o.Requests < 1 || o.Kept < 1 || o.Bulk < 1<<20 || o.Idle < 1 {
		fmt.Fprintln(stderr, "benchrelay: a number is too small, or there is an argument too many")
		return 2
	}
	for _, p := range []*string{&o.Write, &o.Profile} {
		if *p == "" {
			continue
		}
		var err error
		if *p, err = filepath.Abs(*p); err != nil {
			fmt.Fprintln(stderr, "benchrelay:", err)
			return 1
		}
	}
	if err := outer(o, stdout, stderr); err != nil {
		fmt.Fprintln(stderr, "benchrelay:", err)
		return 1
	}
	return 0
}

// outer starts the inner process in network, mount and pid namespaces of its own, with which all that it starts ends.
func outer(o options, stdout, stderr io.Writer) error {
	if os.Geteuid() != 0 {
		return errors.New("network namespaces need root")
	}
	spec, err := json.Marshal(o)
	if err != nil {
		return fmt.Errorf("encode options: %w", err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	// A parent's death signal comes when the thread that forked ends, so it must not.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", "inner", string(spec))
	cmd.Stdout, cmd.Stderr = stdout, stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS | unix.CLONE_NEWPID, Pdeathsig: unix.SIGKILL}
	return cmd.Run()
}

// SPDX-License-Identifier: Apache-2.0

// Command load puts servers under load and prints as JSON what became of every request.
//
//	go run ./load -target blue=127.0.0.1:8080 -rate 500 -keep-alive 50 -slow 20 -for 30s
//
// It reads commands from its standard input, one per line: "drop NAME" takes a target out of rotation
// after -drain, "report" prints a report at once, "stop" ends the load. It ends with -for, "stop", SIGINT or
// SIGTERM, waits for the answers that are due, and exits 0 if no request failed, 3 if one did, 2 for a
// wrong flag and 1 for any other error.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/ebbproxy/ebb/internal/loadtest"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	var o loadtest.Options
	var length time.Duration
	var insecure bool
	fs := flag.NewFlagSet("load", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.Func("target", "`[NAME=]ADDR:PORT[,READYURL]` of a server (repeatable)", func(s string) error {
		t, err := parseTarget(s)
		o.Targets = append(o.Targets, t)
		return err
	})
	fs.Float64Var(&o.Rate, "rate", 0, "new connections per second")
	fs.IntVar(&o.KeepAlive, "keep-alive", 0, "clients that keep their connections")
	fs.DurationVar(&o.Gap, "gap", 0, "mean pause of the keep-alive clients (0: none)")
	fs.IntVar(&o.Slow, "slow", 0, "parallel slow requests")
	fs.IntVar(&o.SlowRead, "slow-read", 0, "parallel slow readers of a big answer")
	fs.IntVar(&o.HalfClose, "half-close", 0, "parallel clients that half-close")
	fs.IntVar(&o.Events, "events", 0, "endless responses")
	fs.IntVar(&o.Upgrade, "upgrade", 0, "upgraded connections")
	fs.IntVar(&o.Silent, "silent", 0, "connections that send nothing")
	fs.StringVar(&o.Path, "path", "/", "path of the requests")
	fs.StringVar(&o.SlowPath, "slow-path", "/?ms=3000", "path of the slow requests")
	fs.BoolVar(&insecure, "tls", false, "use TLS, and accept every certificate")
	fs.BoolVar(&o.HTTP2, "http2", false, "use HTTP/2")
	fs.DurationVar(&o.Drain, "drain", 0, "how long a dropped or unready target still gets new connections")
	fs.DurationVar(&o.Timeout, "timeout", time.Minute, "of a request")
	fs.DurationVar(&length, "for", 0, "length of the load (0: until told to stop)")
	if err := fs.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return 0
		}
		return 2
	}
	if fs.NArg() > 0 {
		fmt.Fprintf(stderr, "load: unexpected argument %q\n", fs.Arg(0))
		return 2
	}
	if insecure {
		o.TLS = loadtest.InsecureTLS()
	}
	g, err := loadtest.New(o)
	if err != nil {
		fmt.Fprintln(stderr, "load:", err)
		return 2
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if length > 0 {
		ctx, cancel = context.WithTimeout(ctx, length)
		defer cancel()
	}
	go obey(g, stdin, stdout, stderr, cancel)
	if err := g.Run(ctx); err != nil {
		fmt.Fprintln(stderr, "load:", err)
		return 1
	}
	rep := g.Report()
	if err := printReport(stdout, rep); err != nil {
		fmt.Fprintln(stderr, "load:", err)
		return 1
	}
	if rep.Failed > 0 {
		return 3
	}
	return 0
}

func parseTarget(s string) (loadtest.Target, error) {
	var t loadtest.Target
	s, t.ReadyURL, _ = strings.Cut(s, ",")
	if name, addr, ok := strings.Cut(s, "="); ok {
		t.Name, t.Addr = name, addr
	} else {
		t.Addr = s
	}
	if t.Addr == "" {
		return t, errors.New("an address is missing")
	}
	return t, nil
}

// obey carries out the commands. The end of the input ends nothing.
func obey(g *loadtest.Generator, stdin io.Reader, stdout, stderr io.Writer, stop func()) {
	lines := bufio.NewScanner(stdin)
	for lines.Scan() {
		command, name, _ := strings.Cut(strings.TrimSpace(lines.Text()), " ")
		var err error
		switch command {
		case "":
		case "drop":
			err = g.Drop(name)
		case "report":
			err = printReport(stdout, g.Report())
		case "stop":
			stop()
		default:
			err = fmt.Errorf("unknown command %q: use drop NAME, report or stop", command)
		}
		if err != nil {
			fmt.Fprintln(stderr, "load:", err)
		}
	}
}

func printReport(w io.Writer, r loadtest.Report) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	if err := e.Encode(r); err != nil {
		return fmt.Errorf("print report: %w", err)
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

// Command serve is a server to put under load. `go run ./serve` is one in Go; with the name of another
// as its first argument it becomes that one:
//
//	go run ./serve -listen 127.0.0.1:8080 -graceful
//	go run ./serve nginx -port 8080 -tls
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"syscall"

	"github.com/ebbproxy/ebb/internal/loadtest"
)

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

func run(args []string, stdout, stderr io.Writer) int {
	servers := map[string]func(string, int, loadtest.ServerOptions) ([]string, error){
		"nginx": loadtest.Nginx, "haproxy": loadtest.HAProxy, "python": loadtest.Python, "node": loadtest.Node,
	}
	var commandLine func(string, int, loadtest.ServerOptions) ([]string, error)
	if len(args) > 0 {
		commandLine = servers[args[0]]
	}
	if commandLine == nil {
		return loadtest.ServerMain(args, stdout, stderr)
	}
	var o loadtest.ServerOptions
	fs := flag.NewFlagSet("serve "+args[0], flag.ContinueOnError)
	fs.SetOutput(stderr)
	port := fs.Int("port", 8080, "port to listen on")
	dir := fs.String("dir", "", "directory of its files (default: a new temporary one, which stays)")
	fs.StringVar(&o.Host, "host", "127.0.0.1", "literal address to listen on")
	fs.StringVar(&o.Name, "name", "", "value of the X-Served-By header")
	fs.IntVar(&o.Workers, "workers", 2, "worker processes or threads")
	fs.BoolVar(&o.ReusePort, "reuseport", false, "one listener per worker")
	fs.BoolVar(&o.TLS, "tls", false, "serve TLS with a new certificate")
	fs.BoolVar(&o.HTTP2, "http2", false, "serve HTTP/2")
	if err := fs.Parse(args[1:]); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return 0
		}
		return 2
	}
	if err := become(commandLine, *dir, *port, o); err != nil {
		fmt.Fprintln(stderr, "serve:", err)
		return 1
	}
	return 0
}

// become replaces this process by the server, so that signals and exit code are the server's own.
func become(commandLine func(string, int, loadtest.ServerOptions) ([]string, error), dir string, port int, o loadtest.ServerOptions) error {
	if dir == "" {
		var err error
		if dir, err = os.MkdirTemp("", "serve-"); err != nil {
			return fmt.Errorf("make directory: %w", err)
		}
	}
	argv, err := commandLine(dir, port, o)
	if err != nil {
		return err
	}
	return os.NewSyscallError("exec "+argv[0], syscall.Exec(argv[0], argv, os.Environ()))
}

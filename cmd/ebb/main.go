// SPDX-License-Identifier: Apache-2.0

// Command ebb drains TCP backends without losing a connection. `ebb run -- CMD` supervises a server and drains
// it on a stop signal; the other commands ask a running ebb, or look after this host.
package main

import (
	"context"
	"os"

	"github.com/ebbproxy/ebb/internal/agent"
	"github.com/ebbproxy/ebb/internal/loadtest"
)

func main() {
	agent.ExecIfAsked()
	loadtest.ServeIfAsked() // a server of `ebb demo` is this binary too
	os.Exit(run(context.Background(), environment{
		args:   os.Args[1:],
		stdin:  os.Stdin,
		stdout: os.Stdout,
		stderr: os.Stderr,
		getenv: os.Getenv,
		uid:    os.Getuid(),
	}))
}

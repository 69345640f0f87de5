// SPDX-License-Identifier: Apache-2.0

package inside

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// outputPatience is how long what a program has written is waited for once it
// has ended: something that it left running may keep its output open.
const outputPatience = 200 * time.Millisecond

// Program is what Run runs.
type Program struct {
	NetNS  int       // descriptor of the network namespace; 0 or less: the caller's own
	Argv   []string  // at least the program, which is looked for in the caller's PATH; no shell
	Env    []string  // nothing is added to it but the caller's PATH, in front
	Output io.Writer // standard output and error, from one goroutine; nil discards
}

// Run runs a program to its end, in a process group of its own, which is killed
// when ctx ends; the error wraps the context's cause then. An exit status other
// than 0 is an *exec.ExitError. What the program leaves running when it ends by
// itself is left alone, and loses its output.
func Run(ctx context.Context, p Program) error {
	cmd := exec.CommandContext(ctx, p.Argv[0], p.Argv[1:]...)
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH")}, p.Env...)
	cmd.Stdout, cmd.Stderr = p.Output, p.Output
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.WaitDelay = outputPatience
	cmd.Cancel = func() error {
		// By its handle first: that tells whether the number still is this process's.
		if err := cmd.Process.Kill(); err != nil {
			return err
		}
		if err := unix.Kill(-cmd.Process.Pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
			return err
		}
		return nil
	}
	// A child is born in the namespace of the thread that forks.
	err := do(p.NetNS, cmd.Start)
	if err == nil {
		err = cmd.Wait()
	}
	switch {
	case err == nil, errors.Is(err, exec.ErrWaitDelay):
		return nil
	case ctx.Err() != nil:
		return fmt.Errorf("run %s: %w", p.Argv[0], context.Cause(ctx))
	}
	return fmt.Errorf("run %s: %w", p.Argv[0], err)
}

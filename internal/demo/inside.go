// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// codeFailed is how the inner process says that it could not play; it has said why.
const codeFailed = 70

// Where the demo keeps its files. A file system in memory is mounted there that only its own mount
// namespace sees, so nothing is ever written to a disk.
const (
	home     = "/run"
	bpffs    = home + "/ebb-demo-bpf"
	pins     = bpffs + "/ebb" // an installation is a directory in a BPF file system
	runDir   = home + "/ebb-demo"
	reports  = home + "/ebb-demo-reports"
	ownBPFFS = "EBB_BPFFS"
	ownRun   = "EBB_RUN_DIR"
)

// Inside plays the acts in the namespaces that Run has made, and returns the exit code for Run.
func Inside(ctx context.Context, spec string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(ctx, unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT)
	defer stop()
	code, err := inside(ctx, spec, stdout, stderr)
	if err != nil && ctx.Err() == nil {
		fmt.Fprintf(stderr, "ebb: %v\n", err)
	}
	if err != nil {
		return codeFailed
	}
	return code
}

func inside(ctx context.Context, spec string, stdout, stderr io.Writer) (int, error) {
	o := Options{}
	if err := json.Unmarshal([]byte(spec), &o); err != nil {
		return 0, fmt.Errorf("read spec: %w", err)
	}
	o.Stdout, o.Stderr = stdout, stderr
	if err := o.setDefaults(); err != nil {
		return 0, err
	}
	if os.Getpid() != 1 {
		return 0, fmt.Errorf("%w: --inside is for ebb demo itself", ErrOption)
	}
	if err := furnish(); err != nil {
		return 0, err
	}
	return play(ctx, o)
}

// furnish turns fresh namespaces into a place to work in.
func furnish() error {
	// First of all: a mount made before would show up outside.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	for _, m := range []struct{ fs, dir, data string }{
		{"proc", "/proc", ""}, // of our own pid namespace
		{"tmpfs", home, "mode=0755,size=64m"},
		{"bpf", bpffs, "mode=0700"},
	} {
		if m.fs == "bpf" {
			for _, dir := range []string{bpffs, runDir, reports} {
				if err := os.Mkdir(dir, 0o755); err != nil {
					return fmt.Errorf("make directory: %w", err)
				}
			}
		}
		if err := unix.Mount(m.fs, m.dir, m.fs, unix.MS_NOSUID|unix.MS_NODEV, m.data); err != nil {
			return fmt.Errorf("mount %s on %s: %w", m.fs, m.dir, err)
		}
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find lo: %w", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	return nil
}

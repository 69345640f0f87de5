// SPDX-License-Identifier: Apache-2.0

// Command kernelinit is the first process of a virtual machine that exists to run tests: it mounts what
// they need, loads the modules under /modules in the order of their names, runs every /tests/…/test and
// powers off. A file named run beside a test is the pattern of what to run of it; /bin/ebb is what is
// tested where a test needs the program itself. Its standard output is the console.
package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

func main() {
	// A panic of process 1 would be one of the kernel, without a word of why.
	defer powerOff()
	if err := run(); err != nil {
		fmt.Println("kernelinit:", err)
	}
}

func powerOff() {
	unix.Sync()
	if err := unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF); err != nil {
		fmt.Println("kernelinit: power off:", err)
	}
}

func run() error {
	if os.Getpid() != 1 {
		return errors.New("this is for a virtual machine's first process: it would power off")
	}
	for _, m := range []struct{ source, target, fstype string }{
		{"proc", "/proc", "proc"},
		{"sysfs", "/sys", "sysfs"},
		{"devtmpfs", "/dev", "devtmpfs"},
		{"tmpfs", "/tmp", "tmpfs"},
		{"tmpfs", "/run", "tmpfs"},
		{"cgroup2", "/sys/fs/cgroup", "cgroup2"},
		{"bpf", "/sys/fs/bpf", "bpf"},
		{"tracefs", "/sys/kernel/tracing", "tracefs"},
	} {
		if err := unix.Mount(m.source, m.target, m.fstype, 0, ""); err != nil {
			return fmt.Errorf("mount %s: %w", m.target, err)
		}
	}
	if err := loadModules(); err != nil {
		return err
	}
	for _, set := range []struct{ path, value string }{
		// Go looks for the loopback's addresses, and many connections need many descriptors.
		{"/proc/sys/fs/nr_open", "1048576"},
		{"/proc/sys/net/core/somaxconn", "4096"},
	} {
		if err := os.WriteFile(set.path, []byte(set.value), 0); err != nil {
			return fmt.Errorf("set %s: %w", set.path, err)
		}
	}
	env := append(os.Environ(), "PATH=/bin", "HOME=/tmp", "TMPDIR=/tmp", "CI=true", "EBB_BIN=/bin/ebb")
	for _, c := range []string{"/bin/busybox --install -s /bin", "/bin/ip link set lo up"} {
		argv := strings.Fields(c)
		out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%s: %w: %s", c, err, out)
		}
	}
	tests, err := findTests()
	if err != nil {
		return err
	}
	for _, path := range tests {
		runTest(path, env)
	}
	return nil
}

func loadModules() error {
	files, err := filepath.Glob("/modules/*")
	if err != nil {
		return err
	}
	slices.Sort(files)
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		err = unix.FinitModule(int(f.Fd()), "", 0)
		f.Close()
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("load %s: %w", name, err)
		}
	}
	return nil
}

func findTests() ([]string, error) {
	var tests []string
	err := filepath.WalkDir("/tests", func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() && d.Name() == "test" {
			tests = append(tests, path)
		}
		return err
	})
	return tests, err
}

func runTest(path string, env []string) {
	name := strings.TrimPrefix(filepath.Dir(path), "/tests/")
	args := []string{"-test.v", "-test.short", "-test.timeout=9m"}
	if pattern, err := os.ReadFile(filepath.Join(filepath.Dir(path), "run")); err == nil {
		args = append(args, "-test.run="+strings.TrimSpace(string(pattern)))
	}
	// The kernel hands on what it does not know itself as a variable; what has a dot it takes for a module's.
	if pattern := os.Getenv("ebb_run"); pattern != "" {
		args = append(args, "-test.run="+pattern)
	}
	begin := time.Now()
	c := exec.Command(path, args...)
	c.Dir, c.Env = filepath.Dir(path), env
	c.Stdout, c.Stderr = os.Stdout, os.Stdout
	code := 0
	if err := c.Run(); err != nil {
		fmt.Printf("kernelinit: %s: %v\n", name, err)
		code = 1
	}
	fmt.Printf("kernelinit: %s: took %s\n", name, time.Since(begin).Round(time.Millisecond))
	fmt.Printf("kernelinit: %s: exit %d\n", name, code)
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// memorySample is what connections take while they are open and idle, a line of the raw data.
type memorySample struct {
	Memory int   `json:"memory_connections"`
	Ebb    bool  `json:"ebb"`
	Kernel int64 `json:"kernel_bytes"` // growth of what is in use of the kmalloc caches, everybody's
	User   int64 `json:"user_bytes"`   // growth of the resident memory of ebb run
}

func takeMemory(ctx context.Context, o options, withEbb bool) (m memorySample, err error) {
	m = memorySample{Memory: o.Memory, Ebb: withEbb}
	sp, err := newSpace(loopback)
	if err != nil {
		return m, err
	}
	srv, err := startServer(ctx, o, sp, withEbb)
	if err != nil {
		return m, errors.Join(err, sp.close())
	}
	defer func() {
		srv.kill()
		err = errors.Join(err, sp.close())
		if withEbb {
			err = errors.Join(err, gone(ctx))
		}
	}()
	spec, err := json.Marshal(clientSpec{Addr: sp.addr, Conns: o.Memory})
	if err != nil {
		return m, fmt.Errorf("encode spec: %w", err)
	}
	kernel, user, err := memory(srv, withEbb)
	if err != nil {
		return m, err
	}
	cmd := exec.Command("/proc/self/exe", "hold", string(spec))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return m, fmt.Errorf("start holder: %w", err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return m, fmt.Errorf("start holder: %w", err)
	}
	if err := start(sp.client, cmd); err != nil {
		return m, fmt.Errorf("start holder: %w", err)
	}
	_, held := bufio.NewReader(out).ReadString('\n')
	kernelOpen, userOpen, err := memory(srv, withEbb)
	m.Kernel, m.User = kernelOpen-kernel, userOpen-user
	return m, errors.Join(held, err, in.Close(), cmd.Wait())
}

// kernelMemory reads what kernel objects take. Only the general caches are looked at: sockets and files have caches of their
// own, are the same with Ebb and without, and move with everything that the machine does.
func kernelMemory() (kernel int64, err error) {
	text, err := os.ReadFile("/proc/slabinfo")
	if err != nil {
		return 0, fmt.Errorf("read kernel memory: %w", err)
	}
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line) // name, objects in use, objects, size of one, …; slabinfo(5)
		if len(f) < 4 || !strings.HasPrefix(f[0], "kmalloc-") {
			continue
		}
		used, err1 := strconv.ParseInt(f[1], 10, 64)
		size, err2 := strconv.ParseInt(f[3], 10, 64)
		if err := errors.Join(err1, err2); err != nil {
			return 0, fmt.Errorf("read kernel memory: %w", err)
		}
		kernel += used * size
	}
	return kernel, nil
}

// memory reads what kernel objects take, and what ebb run does.
func memory(srv *server, withEbb bool) (kernel, user int64, err error) {
	if kernel, err = kernelMemory(); err != nil {
		return 0, 0, err
	}
	if !withEbb {
		return kernel, 0, nil
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", srv.cmd.Process.Pid))
	if err != nil {
		return 0, 0, fmt.Errorf("read memory of ebb run: %w", err)
	}
	f := strings.Fields(string(text))
	if len(f) < 2 {
		return 0, 0, errors.New("read memory of ebb run: too few fields")
	}
	pages, err := strconv.ParseInt(f[1], 10, 64)
	if err != nil {
		return 0, 0, fmt.Errorf("read memory of ebb run: %w", err)
	}
	return kernel, pages * int64(os.Getpagesize()), nil
}

// hold opens connections, uses each once, says so and keeps them until its standard input ends.
func hold(args []string) error {
	var s clientSpec
	if len(args) != 1 {
		return errors.New("this is for bench itself")
	}
	if err := json.Unmarshal([]byte(args[0]), &s); err != nil {
		return fmt.Errorf("read spec: %w", err)
	}
	ap, err := netip.ParseAddrPort(s.Addr)
	if err != nil {
		return fmt.Errorf("parse address: %w", err)
	}
	c, err := newLoader(ap)
	if err != nil {
		return err
	}
	c.source = s.Source
	// In parts, so that no accept queue runs over.
	const part = 256
	for n := s.Conns; n > 0; n -= part {
		var kept []int
		for range min(n, part) {
			fd, err := c.dial()
			if err != nil {
				return err
			}
			if err := c.ep.add(fd, unix.EPOLLIN); err != nil {
				return err
			}
			kept = append(kept, fd)
		}
		if err := c.requests(len(kept), kept); err != nil {
			return err
		}
	}
	fmt.Println("held")
	_, _, _ = unix.RawSyscall(unix.SYS_READ, 0, uintptr(unsafe.Pointer(&c.buf[0])), 1) // it ends with the pipe
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// clientSpec is what a client is to do. Its extra descriptors are the CPU accounts of softirq threads.
type clientSpec struct {
	Addr     string `json:"addr"`
	Server   int    `json:"server"` // process ids whose CPU time is read
	Ebb      int    `json:"ebb"`    // 0: none
	Softirqs int    `json:"softirqs"`
	Source   byte   `json:"source"` // 127.0.0.x to connect from, since one has not enough ports for all; 0: the usual one

	Conns    int `json:"conns"`
	Parallel int `json:"parallel"`
	Requests int `json:"requests"`
	Kept     int `json:"kept"`
}

// usage is what one kind of work took. Times are nanoseconds.
type usage struct {
	Units   int   `json:"units"`
	Wall    int64 `json:"wall_ns"`
	Client  int64 `json:"client_cpu_ns"`
	Server  int64 `json:"server_cpu_ns"`
	Ebb     int64 `json:"ebb_cpu_ns"`     // of the supervisor; its programs run in the others' time
	Softirq int64 `json:"softirq_cpu_ns"` // of the kernel threads, who else's packets they took included
}

// cpu is CPU time per unit of all that the work needed and nobody else can have caused.
func (u usage) cpu() float64 { return float64(u.Client+u.Server+u.Ebb) / float64(u.Units) }

func (u usage) rate() float64 { return float64(u.Units) / (float64(u.Wall) / 1e9) }

// work is what a client measures.
type work struct {
	Conn usage `json:"conn"` // connect, one request, one answer, close
	Req  usage `json:"req"`  // one request and one answer on a kept connection
}

// client makes load on one thread and reports on standard output.
func client(args []string) error {
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
	debug.SetGCPercent(-1) // nothing is allocated once it runs
	c, err := newLoader(ap)
	if err != nil {
		return err
	}
	var w work
	// A tenth first: caches, and the server's memory.
	if err := c.connections(s.Conns/10+1, s.Parallel); err != nil {
		return err
	}
	if w.Conn, err = s.metered(s.Conns, func() error { return c.connections(s.Conns, s.Parallel) }); err != nil {
		return err
	}
	kept := make([]int, 0, s.Kept)
	for range s.Kept {
		fd, err := c.dial()
		if err != nil {
			return err
		}
		if err := c.ep.add(fd, unix.EPOLLIN); err != nil {
			return err
		}
		kept = append(kept, fd)
	}
	if err := c.requests(s.Requests/10+1, kept); err != nil {
		return err
	}
	if w.Req, err = s.metered(s.Requests, func() error { return c.requests(s.Requests, kept) }); err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(w)
}

// metered runs f and reads every clock before and after.
func (s clientSpec) metered(units int, f func() error) (usage, error) {
	before, err := s.clocks()
	if err != nil {
		return usage{}, err
	}
	if err := f(); err != nil {
		return usage{}, err
	}
	after, err := s.clocks()
	if err != nil {
		return usage{}, err
	}
	return usage{
		Units: units, Wall: after.Wall - before.Wall, Client: after.Client - before.Client,
		Server: after.Server - before.Server, Ebb: after.Ebb - before.Ebb, Softirq: after.Softirq - before.Softirq,
	}, nil
}

func (s clientSpec) clocks() (usage, error) {
	u := usage{Wall: int64(time.Since(epoch))}
	var err error
	if u.Client, err = processCPU(os.Getpid()); err != nil {
		return u, err
	}
	if u.Server, err = processCPU(s.Server); err != nil {
		return u, err
	}
	if s.Ebb > 0 {
		if u.Ebb, err = processCPU(s.Ebb); err != nil {
			return u, err
		}
	}
	for i := range s.Softirqs {
		b := make([]byte, 128)
		n, err := unix.Pread(3+i, b, 0)
		if err != nil {
			return u, fmt.Errorf("read CPU time of a softirq thread: %w", err)
		}
		first, _, _ := strings.Cut(string(b[:n]), " ")
		ns, err := strconv.ParseInt(first, 10, 64)
		if err != nil {
			return u, fmt.Errorf("read CPU time of a softirq thread: %w", err)
		}
		u.Softirq += ns
	}
	return u, nil
}

var epoch = time.Now()

// processCPU reads the CPU clock of a process, whose id clock_getcpuclockid(3) makes of the pid.
func processCPU(pid int) (int64, error) {
	const schedClock = 2 // CPUCLOCK_SCHED, include/linux/posix-timers_types.h
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|schedClock), &ts); err != nil {
		return 0, fmt.Errorf("read CPU time of process %d: %w", pid, err)
	}
	return ts.Nano(), nil
}

// loader makes connections and requests.
type loader struct {
	ep  *epoll
	to  unix.RawSockaddrInet4
	req []byte
	buf []byte
	got [maxFD]int

	source byte // clientSpec.Source
}

func newLoader(to netip.AddrPort) (*loader, error) {
	ep, err := newEpoll()
	if err != nil {
		return nil, err
	}
	l := &loader{ep: ep, to: unix.RawSockaddrInet4{Family: unix.AF_INET, Addr: to.Addr().As4()}, req: request(), buf: make([]byte, 64<<10)}
	port := (*[2]byte)(unsafe.Pointer(&l.to.Port)) // in network order
	port[0], port[1] = byte(to.Port()>>8), byte(to.Port())
	return l, nil
}

// patience is how long nothing may happen, in milliseconds.
const patience = 30_000

// dial begins a connection, which on return is usually not made yet.
func (c *loader) dial() (int, error) {
	n, _, errno := unix.RawSyscall(unix.SYS_SOCKET, unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if errno != 0 {
		return -1, fmt.Errorf("open socket: %w", errno)
	}
	fd := int(n)
	if fd >= maxFD {
		return -1, errors.New("more connections than descriptors")
	}
	c.got[fd] = -1 // the request is not sent yet
	if c.source > 0 {
		if err := from(fd, c.source); err != nil {
			return -1, err
		}
	}
	_, _, errno = unix.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&c.to)), unix.SizeofSockaddrInet4)
	if errno != 0 && errno != unix.EINPROGRESS {
		return -1, fmt.Errorf("connect: %w", errno)
	}
	return fd, nil
}

// from gives a socket an address of 127.0.0.0/8; its port is chosen when it connects.
func from(fd int, last byte) error {
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1); err != nil {
		return fmt.Errorf("choose source address: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, last}}); err != nil {
		return fmt.Errorf("choose source address: %w", err)
	}
	return nil
}

// connections makes n connections with one request each, up to parallel at a time.
func (c *loader) connections(n, parallel int) error {
	begun, open := 0, 0
	next := func() error {
		if begun == n {
			return nil
		}
		begun++
		open++
		fd, err := c.dial()
		if err != nil {
			return err
		}
		return c.ep.add(fd, unix.EPOLLIN|unix.EPOLLOUT|unix.EPOLLET)
	}
	for range min(n, parallel) {
		if err := next(); err != nil {
			return err
		}
	}
	for open > 0 {
		events, err := c.ep.wait(patience)
		if err != nil {
			return err
		}
		if len(events) == 0 {
			return errors.New("no answer for half a minute")
		}
		for _, ev := range events {
			fd := int(ev.Fd)
			if ev.Events&unix.EPOLLERR != 0 {
				return errors.New("a connection failed")
			}
			if c.got[fd] < 0 && ev.Events&unix.EPOLLOUT != 0 {
				c.got[fd] = 0
				if m, errno := rawSend(fd, c.req); errno != 0 || m != len(c.req) {
					return fmt.Errorf("send request: %w", errno)
				}
			}
			if c.got[fd] < 0 || ev.Events&unix.EPOLLIN == 0 {
				continue
			}
			m, errno := rawRecv(fd, c.buf)
			if errno == unix.EAGAIN {
				continue
			}
			if m <= 0 {
				return fmt.Errorf("read answer: connection ended: %w", errno)
			}
			if c.got[fd] += m; c.got[fd] < answerSize {
				continue
			}
			rawClose(fd)
			open--
			if err := next(); err != nil {
				return err
			}
		}
	}
	return nil
}

// requests sends n requests over the connections, one at a time on each.
func (c *loader) requests(n int, kept []int) error {
	sent, done := 0, 0
	send := func(fd int) error {
		if sent == n {
			return nil
		}
		sent++
		c.got[fd] = 0
		for {
			m, errno := rawSend(fd, c.req)
			if errno == unix.EAGAIN || errno == unix.ENOTCONN {
				// The handshake is not over yet, which it is within one round trip.
				if _, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, patience); err != nil && !errors.Is(err, unix.EINTR) {
					return fmt.Errorf("wait for connection: %w", err)
				}
				continue
			}
			if errno != 0 || m != len(c.req) {
				return fmt.Errorf("send request: %w", errno)
			}
			return nil
		}
	}
	for _, fd := range kept {
		if err := send(fd); err != nil {
			return err
		}
	}
	for done < n {
		events, err := c.ep.wait(patience)
		if err != nil {
			return err
		}
		if len(events) == 0 {
			return errors.New("no answer for half a minute")
		}
		for _, ev := range events {
			fd := int(ev.Fd)
			m, errno := rawRecv(fd, c.buf)
			if errno == unix.EAGAIN {
				continue
			}
			if m <= 0 {
				return fmt.Errorf("read answer: connection ended: %w", errno)
			}
			if c.got[fd] += m; c.got[fd] < answerSize {
				continue
			}
			done++
			if err := send(fd); err != nil {
				return err
			}
		}
	}
	return nil
}

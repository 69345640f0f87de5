// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"runtime/debug"
	"runtime/pprof"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/proxy"
)

const (
	requestSize = 100
	answerSize  = 1024
	maxFD       = 20000
)

// request asks for n bytes.
func request(n int64) []byte {
	head := fmt.Sprintf("GET /%d HTTP/1.1\r\nX: ", n)
	return []byte(head + strings.Repeat("p", requestSize-len(head)-4) + "\r\n\r\n")
}

// relay is what is measured.
func relay(args []string) error {
	fs := flag.NewFlagSet("relay", flag.ContinueOnError)
	listen, peer := fs.String("listen", "", "address"), fs.String("peer", "", "address")
	profile := fs.String("profile", "", "file")
	if err := fs.Parse(args); err != nil {
		return err
	}
	to, err := netip.ParseAddrPort(*peer)
	if err != nil {
		return err
	}
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	ln, err := lc.Listen(context.Background(), "tcp", *listen)
	if err != nil {
		return err
	}
	if err := proxy.Warm(ln.(*net.TCPListener), 4096); err != nil {
		return err
	}
	r, err := proxy.New(proxy.Options{Peers: []proxy.Peer{{Address: to}}})
	if err != nil {
		return err
	}
	if *profile != "" {
		f, err := os.Create(*profile)
		if err != nil {
			return err
		}
		defer f.Close()
		if err := pprof.StartCPUProfile(f); err != nil {
			return err
		}
		defer pprof.StopCPUProfile()
	}
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM)
	defer stop()
	fmt.Println("ready")
	return errors.Join(r.Serve(ctx, ln.(*net.TCPListener)), r.Close())
}

// plainCopy is the proxy that one writes first.
func plainCopy(args []string) error {
	if len(args) != 2 {
		return errors.New("want two addresses")
	}
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	ln, err := lc.Listen(context.Background(), "tcp", args[0])
	if err != nil {
		return err
	}
	fmt.Println("ready")
	for {
		c, err := ln.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer c.Close()
			b, err := net.Dial("tcp", args[1])
			if err != nil {
				return
			}
			defer b.Close()
			done := make(chan struct{})
			go func() {
				defer close(done)
				io.Copy(b, c)
				b.(*net.TCPConn).CloseWrite()
			}()
			io.Copy(c, b)
			c.(*net.TCPConn).CloseWrite()
			<-done
		}()
	}
}

// serve answers requests on one thread by epoll, so that little of what is measured is its own.
func serve(args []string) error {
	if len(args) != 1 {
		return errors.New("want an address")
	}
	addr, err := netip.ParseAddrPort(args[0])
	if err != nil {
		return err
	}
	debug.SetGCPercent(-1) // nothing is allocated once it runs
	l, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	ep, err := newEpoll()
	if err != nil {
		return err
	}
	if err := errors.Join(
		unix.SetsockoptInt(l, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1),
		unix.SetsockoptInt(l, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1),
		unix.Bind(l, &unix.SockaddrInet4{Port: int(addr.Port()), Addr: addr.Addr().As4()}),
		unix.Listen(l, 4096),
		ep.add(l, unix.EPOLLIN),
	); err != nil {
		return err
	}
	fmt.Println("ready")
	big := make([]byte, 256<<10)
	buf := make([]byte, 64<<10)
	got, left := make([]int, maxFD), make([]int64, maxFD) // bytes of the request at hand, and of the answer
	for {
		events, err := ep.wait(-1)
		if err != nil {
			return err
		}
		for _, ev := range events {
			fd := int(ev.Fd)
			if fd == l {
				for {
					n, _, errno := unix.RawSyscall6(unix.SYS_ACCEPT4, uintptr(l), 0, 0, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0, 0)
					if errno != 0 {
						break
					}
					got[n], left[n] = 0, 0
					if err := ep.add(int(n), unix.EPOLLIN|unix.EPOLLOUT|unix.EPOLLRDHUP|unix.EPOLLET); err != nil {
						return err
					}
				}
				continue
			}
			for {
				n, errno := rawRecv(fd, buf)
				if errno == unix.EAGAIN {
					break
				}
				if n <= 0 || errno != 0 {
					unix.RawSyscall(unix.SYS_CLOSE, uintptr(fd), 0, 0)
					left[fd] = -1
					break
				}
				if got[fd] += n; got[fd] >= requestSize {
					got[fd] -= requestSize
					left[fd] = sizeOf(buf[:n])
				}
				if n < len(buf) && ev.Events&unix.EPOLLRDHUP == 0 {
					break
				}
			}
			for left[fd] > 0 {
				n, errno := rawSend(fd, big[:min(int64(len(big)), left[fd])])
				if errno != 0 {
					break
				}
				left[fd] -= int64(n)
			}
		}
	}
}

// sizeOf reads how much is asked for.
func sizeOf(b []byte) int64 {
	var n int64
	for _, c := range b[len("GET /"):] {
		if c < '0' || c > '9' {
			break
		}
		n = 10*n + int64(c-'0')
	}
	return n
}

type epoll struct {
	fd     int
	events []unix.EpollEvent
}

func newEpoll() (*epoll, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	return &epoll{fd, make([]unix.EpollEvent, 256)}, err
}

func (e *epoll) add(fd int, events uint32) error {
	ev := unix.EpollEvent{Events: events, Fd: int32(fd)}
	return unix.EpollCtl(e.fd, unix.EPOLL_CTL_ADD, fd, &ev)
}

// wait waits up to ms milliseconds; -1 is for ever.
func (e *epoll) wait(ms int) ([]unix.EpollEvent, error) {
	for {
		n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(e.fd), uintptr(unsafe.Pointer(&e.events[0])), uintptr(len(e.events)), uintptr(ms), 0, 0)
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 {
			return nil, errno
		}
		return e.events[:n], nil
	}
}

func rawRecv(fd int, b []byte) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), unix.MSG_DONTWAIT, 0, 0)
	return int(n), errno
}

func rawSend(fd int, b []byte) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0, 0)
	return int(n), errno
}

// load makes one kind of work and says how much CPU time it took itself: KIND ADDRESS UNITS PARALLEL.
func load(args []string) error {
	if len(args) != 4 {
		return errors.New("want a kind, an address and two numbers")
	}
	to, err := netip.ParseAddrPort(args[1])
	if err != nil {
		return err
	}
	units, err := strconv.ParseInt(args[2], 10, 64)
	if err != nil {
		return err
	}
	parallel, err := strconv.Atoi(args[3])
	if err != nil {
		return err
	}
	debug.SetGCPercent(-1)
	ep, err := newEpoll()
	if err != nil {
		return err
	}
	l := &loader{ep: ep, to: &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}, buf: make([]byte, 1<<20)}
	return l.work(args[0], units, parallel)
}

type loader struct {
	ep  *epoll
	to  *unix.SockaddrInet4
	buf []byte
}

const patience = 60_000 // ms in which something has to happen

func (l *loader) dial() (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1); err != nil {
		return -1, err
	}
	if err := unix.Connect(fd, l.to); err != nil && err != unix.EINPROGRESS {
		return -1, fmt.Errorf("connect: %w", err)
	}
	return fd, l.ep.add(fd, unix.EPOLLIN|unix.EPOLLOUT|unix.EPOLLRDHUP|unix.EPOLLET)
}

// work runs connections: each sends a request as soon as it can, and when the answer is there either the next one or
// closes. What is said on standard output is "ready" before and "done" after; in between a line is awaited on standard
// input.
func (l *loader) work(kind string, units int64, parallel int) error {
	size, perConn := int64(answerSize), int64(1)
	kept := false
	switch kind {
	case "connections":
	case "requests":
		kept, perConn = true, units/int64(parallel)
	case "bulk":
		kept, size = true, units/int64(parallel)
		units = int64(parallel)
	case "idle":
		kept = true
	default:
		return fmt.Errorf("unknown kind %q", kind)
	}
	req := request(size)
	got, todo, sent := make([]int64, maxFD), make([]int64, maxFD), make([]bool, maxFD)
	open := func() error {
		fd, err := l.dial()
		if err == nil {
			got[fd], todo[fd], sent[fd] = 0, perConn, false
		}
		return err
	}
	begin := func() error {
		fmt.Println("ready")
		_, err := os.Stdin.Read(l.buf[:1])
		return err
	}
	var fds []int
	if kept && kind != "idle" {
		// They are open and accepted, with one answer each, before the clock starts.
		warm := &loader{ep: l.ep, to: l.to, buf: l.buf}
		for range parallel {
			fd, err := warm.dial()
			if err != nil {
				return err
			}
			fds = append(fds, fd)
		}
		small, seen := request(answerSize), 0
		have := make([]int, maxFD)
		asked := make([]bool, maxFD)
		for seen < parallel {
			events, err := l.ep.wait(patience)
			if err != nil || len(events) == 0 {
				return fmt.Errorf("warm up: %d of %d: %v", seen, parallel, err)
			}
			for _, ev := range events {
				fd := int(ev.Fd)
				if !asked[fd] && ev.Events&unix.EPOLLOUT != 0 {
					asked[fd] = true
					if _, errno := rawSend(fd, small); errno != 0 {
						return fmt.Errorf("warm up: send: %w", errno)
					}
				}
				for asked[fd] {
					n, errno := rawRecv(fd, l.buf)
					if errno == unix.EAGAIN {
						break
					}
					if n <= 0 || errno != 0 {
						return fmt.Errorf("warm up: read: %d, %v", n, errno)
					}
					if have[fd] += n; have[fd] == answerSize {
						seen++
					}
				}
			}
		}
	}
	if err := begin(); err != nil {
		return err
	}
	started, finished := int64(0), int64(0)
	if len(fds) > 0 {
		for _, fd := range fds {
			todo[fd], sent[fd] = perConn, true
			started++
			if _, errno := rawSend(fd, req); errno != 0 {
				return fmt.Errorf("send: %w", errno)
			}
		}
		units = perConn * int64(parallel)
	} else {
		for ; started < int64(parallel) && started < units; started++ {
			if err := open(); err != nil {
				return err
			}
		}
	}
	for finished < units {
		events, err := l.ep.wait(patience)
		if err != nil {
			return err
		}
		if len(events) == 0 {
			return fmt.Errorf("nothing happens after %d of %d", finished, units)
		}
		for _, ev := range events {
			fd := int(ev.Fd)
			if !sent[fd] {
				if ev.Events&unix.EPOLLOUT == 0 {
					continue
				}
				sent[fd] = true
				if n, errno := rawSend(fd, req); errno != 0 || n != len(req) {
					return fmt.Errorf("send: %d, %w", n, errno)
				}
				if ev.Events&unix.EPOLLIN == 0 {
					continue
				}
			}
			for todo[fd] > 0 {
				n, errno := rawRecv(fd, l.buf)
				if errno == unix.EAGAIN {
					break
				}
				if n <= 0 || errno != 0 {
					return fmt.Errorf("read: %d, %v", n, errno)
				}
				if got[fd] += int64(n); got[fd] < size {
					if n < len(l.buf) {
						break
					}
					continue
				}
				got[fd] = 0
				finished++
				if todo[fd]--; todo[fd] > 0 {
					if _, errno := rawSend(fd, req); errno != 0 {
						return fmt.Errorf("send: %w", errno)
					}
					break
				}
				if kept && kind != "idle" {
					break
				}
				if kind != "idle" {
					unix.Close(fd)
				}
				if started < units {
					started++
					if err := open(); err != nil {
						return err
					}
				}
				break
			}
		}
	}
	fmt.Println("done")
	_, err := os.Stdin.Read(l.buf[:1]) // until the measurement is over
	if err == io.EOF {
		err = nil
	}
	return err
}

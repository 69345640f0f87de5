// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"flag"
	"fmt"
	"math"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// One request and its answer, which have the shape of HTTP and a fixed size: neither end parses.
const (
	requestSize = 100
	answerSize  = 1024
)

func request() []byte {
	head := "GET / HTTP/1.1\r\nHost: bench\r\nX: "
	return []byte(head + strings.Repeat("p", requestSize-len(head)-4) + "\r\n\r\n")
}

func answer() []byte {
	head := "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 900\r\nX: "
	body := strings.Repeat("b", 900)
	return []byte(head + strings.Repeat("p", answerSize-900-len(head)-4) + "\r\n\r\n" + body)
}

// serve answers requests on one thread by epoll, so that little of what is measured is its own. At SIGTERM it says when
// it heard of it and ends.
func serve(args []string) error {
	fs := flag.NewFlagSet("serve", flag.ContinueOnError)
	addr := fs.String("listen", "", "address")
	stay := fs.Bool("stay", false, "do not end at SIGTERM")
	workers := fs.Int("workers", 1, "processes that accept, each as many as it has room for")
	worker := fs.Bool("worker", false, "be one of them, with the listener as descriptor 3")
	if err := fs.Parse(args); err != nil {
		return err
	}
	debug.SetGCPercent(-1) // nothing is allocated once it runs
	runtime.GOMAXPROCS(2)  // the loop below never lets go of its share
	sigs := make(chan os.Signal, 1)
	signal.Notify(sigs, unix.SIGTERM)
	go func() {
		<-sigs
		fmt.Printf("signal %d\n", time.Now().UnixNano())
		if !*stay {
			os.Exit(0)
		}
	}()
	l := 3
	if !*worker {
		var err error
		if l, err = listen(*addr); err != nil {
			return err
		}
		shared := os.NewFile(uintptr(l), "listener")
		defer shared.Close()
		runtime.LockOSThread() // a death signal comes when the thread that forked ends
		for range *workers - 1 {
			cmd := exec.Command("/proc/self/exe", "serve", "-worker", "-stay")
			cmd.Stderr, cmd.ExtraFiles = os.Stderr, []*os.File{shared}
			cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
			if err := cmd.Start(); err != nil {
				return fmt.Errorf("start worker: %w", err)
			}
		}
	}
	left := math.MaxInt
	if *worker || *workers > 1 {
		left = room()
	}
	ep, err := newEpoll()
	if err != nil {
		return err
	}
	if err := ep.add(l, unix.EPOLLIN); err != nil {
		return err
	}
	if !*worker {
		fmt.Printf("listening %s %d\n", *addr, os.Getpid())
	}

	reply := answer()
	buf := make([]byte, 64<<10)
	got := make([]int, maxFD) // bytes of the request at hand
	for {
		events, err := ep.wait(-1)
		if err != nil {
			return err
		}
		for _, ev := range events {
			fd := int(ev.Fd)
			if fd == l {
				for {
					if left == 0 {
						ep.remove(l) // another one has room
						break
					}
					c, errno := rawAccept(l)
					if errno != 0 {
						break
					}
					left--
					if c >= maxFD {
						return errors.New("more connections than descriptors")
					}
					got[c] = 0
					if err := ep.add(c, unix.EPOLLIN); err != nil {
						return err
					}
				}
				continue
			}
			n, errno := rawRecv(fd, buf)
			if errno == unix.EAGAIN {
				continue
			}
			if n <= 0 {
				rawClose(fd)
				continue
			}
			for got[fd] += n; got[fd] >= requestSize; got[fd] -= requestSize {
				if m, errno := rawSend(fd, reply); errno != 0 || m != len(reply) {
					rawClose(fd)
					got[fd] = 0
					break
				}
			}
		}
	}
}

const maxFD = 1 << 16

// listen opens a listener.
func listen(addr string) (int, error) {
	ap, err := netip.ParseAddrPort(addr)
	if err != nil {
		return -1, fmt.Errorf("parse address: %w", err)
	}
	l, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open socket: %w", err)
	}
	if err := unix.SetsockoptInt(l, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return -1, fmt.Errorf("set SO_REUSEADDR: %w", err)
	}
	if err := unix.Bind(l, &unix.SockaddrInet4{Port: int(ap.Port()), Addr: ap.Addr().As4()}); err != nil {
		return -1, fmt.Errorf("bind %s: %w", ap, err)
	}
	if err := unix.Listen(l, 4096); err != nil {
		return -1, fmt.Errorf("listen on %s: %w", ap, err)
	}
	return l, nil
}

// room is how many connections one process can have.
func room() int {
	n := uint64(maxFD)
	var l unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &l) == nil {
		n = min(n, l.Cur)
	}
	return int(n) - 64 // of other use
}

// epoll is epoll(7) without the Go scheduler: calls that do not block do not tell it, and one that blocks keeps its
// thread, which has nothing else to do.
type epoll struct {
	fd     int
	events [512]unix.EpollEvent
}

func newEpoll() (*epoll, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("create epoll: %w", err)
	}
	return &epoll{fd: fd}, nil
}

func (e *epoll) add(fd int, events uint32) error {
	ev := unix.EpollEvent{Events: events, Fd: int32(fd)}
	_, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_CTL, uintptr(e.fd), unix.EPOLL_CTL_ADD, uintptr(fd), uintptr(unsafe.Pointer(&ev)), 0, 0)
	if errno != 0 {
		return fmt.Errorf("watch descriptor: %w", errno)
	}
	return nil
}

// remove cannot fail in a way that matters: what is not watched needs not be removed.
func (e *epoll) remove(fd int) {
	_, _, _ = unix.RawSyscall6(unix.SYS_EPOLL_CTL, uintptr(e.fd), unix.EPOLL_CTL_DEL, uintptr(fd), 0, 0, 0)
}

// wait waits up to ms milliseconds; -1 is for ever.
func (e *epoll) wait(ms int) ([]unix.EpollEvent, error) {
	for {
		n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(e.fd), uintptr(unsafe.Pointer(&e.events[0])), uintptr(len(e.events)), uintptr(ms), 0, 0)
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 {
			return nil, fmt.Errorf("wait for events: %w", errno)
		}
		return e.events[:n], nil
	}
}

func rawAccept(fd int) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall6(unix.SYS_ACCEPT4, uintptr(fd), 0, 0, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0, 0)
	return int(n), errno
}

func rawRecv(fd int, b []byte) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), unix.MSG_DONTWAIT, 0, 0)
	return int(n), errno
}

func rawSend(fd int, b []byte) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT, 0, 0)
	return int(n), errno
}

// rawClose cannot fail in a way that matters: the descriptor is gone.
func rawClose(fd int) { _, _, _ = unix.RawSyscall(unix.SYS_CLOSE, uintptr(fd), 0, 0) }

// SPDX-License-Identifier: Apache-2.0

// Package netns runs code inside another network namespace and tells namespaces apart.
//
// A Linux thread, not a process, is in a network namespace, and a Go program does not choose its threads:
// everything here therefore holds on to the calling thread and gives it back as it was found. It never
// uses `ip netns exec`, which mounts a new /sys and so hides the BPF file system.
//
// It does not configure links, addresses or routes, and creates nothing under /run/netns.
//
//	ns, err := netns.OfPID(pid)
//	if err != nil { … }
//	defer ns.Close()
//	var l net.Listener
//	err = netns.Do(int(ns.Fd()), func() error {
//		var err error
//		l, err = net.Listen("tcp", "127.0.0.1:80")
//		return err
//	})
package netns

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"
)

// Identity tells namespaces apart while they live. The kernel gives the inode of a dead namespace to
// a new one, so a rule that outlives a process must be kept under the Cookie instead.
type Identity struct {
	Dev uint64 // of the nsfs file system
	Ino uint64 // as /proc/PID/ns/net shows it
}

// ID returns the identity of the namespace that fd is open on.
func ID(fd int) (Identity, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return Identity{}, fmt.Errorf("stat network namespace: %w", err)
	}
	return Identity{Dev: st.Dev, Ino: st.Ino}, nil
}

// Cookie returns the cookie of the namespace that fd is open on: a number that the kernel never gives
// to a second namespace. It needs Linux 5.14 (SO_NETNS_COOKIE); the error wraps unix.ENOPROTOOPT below that.
func Cookie(fd int) (uint64, error) {
	var cookie uint64
	err := Do(fd, func() error {
		s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open socket: %w", err)
		}
		defer unix.Close(s)
		if cookie, err = unix.GetsockoptUint64(s, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE); err != nil {
			return fmt.Errorf("read network namespace cookie: %w", err)
		}
		return nil
	})
	return cookie, err
}

// Current opens the namespace of the calling thread. The caller closes the file.
func Current() (*os.File, error) {
	// /proc/self would be the main thread, which may be somewhere else.
	return open("/proc/thread-self/ns/net")
}

// OfPID opens the namespace of a process. The caller closes the file.
func OfPID(pid int) (*os.File, error) {
	return open("/proc/" + strconv.Itoa(pid) + "/ns/net")
}

func open(path string) (*os.File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open network namespace: %w", err)
	}
	return f, nil
}

// New creates a network namespace in which every link is down. It lives as long as the file, a process
// or a socket in it does. The caller closes the file. It needs CAP_SYS_ADMIN.
func New() (*os.File, error) {
	var ns *os.File
	err := visit(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("create network namespace: %w", err)
		}
		var err error
		ns, err = Current()
		return err
	}, nil)
	return ns, err
}

// Do runs fn inside the namespace that fd is open on, and returns its error. It needs CAP_SYS_ADMIN, unless the calling
// thread is there already.
//
// Sockets and processes that fn itself makes belong to that namespace, whatever happens to them later;
// goroutines that fn starts run outside of it. So dial literal addresses: a name may be resolved, and
// its addresses tried, on other threads. Do may be called by several goroutines at once and nested.
// Should fn end its goroutine (runtime.Goexit), the caller's ends too.
func Do(fd int, fn func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if here(fd) {
		return fn()
	}
	return visit(func() error {
		if err := unix.Setns(fd, unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter network namespace: %w", err)
		}
		return nil
	}, fn)
}

// here tells whether the calling thread is in the namespace that fd is open on.
func here(fd int) bool {
	var own, other unix.Stat_t
	err := errors.Join(unix.Stat("/proc/thread-self/ns/net", &own), unix.Fstat(fd, &other))
	return err == nil && own.Dev == other.Dev && own.Ino == other.Ino
}

// visit locks the thread, calls enter and, if that succeeds, fn, and brings the thread back.
func visit(enter, fn func() error) error {
	runtime.LockOSThread()
	if unix.Gettid() != unix.Getpid() {
		return visitLocked(enter, fn)
	}
	// The main thread must stay where it is: /proc/self/ns/net is its namespace, and other processes
	// take that for ours. Holding it here makes the goroutine run on another one.
	defer runtime.UnlockOSThread()
	var err error
	goexit := true
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		err = visitLocked(enter, fn)
		goexit = false
	}()
	<-done
	if goexit {
		runtime.Goexit()
	}
	return err
}

// visitLocked is visit on a thread that is locked and not the main one. It unlocks the thread only once
// that is back: a thread that stays locked dies with its goroutine instead of serving others.
func visitLocked(enter, fn func() error) (err error) {
	home, err := Current()
	if err != nil {
		runtime.UnlockOSThread()
		return err
	}
	defer func() {
		if back := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); back != nil {
			err = errors.Join(err, fmt.Errorf("leave network namespace: %w", back))
		} else {
			runtime.UnlockOSThread()
		}
		home.Close()
	}()
	if err := enter(); err != nil {
		return err
	}
	if fn == nil {
		return nil
	}
	return fn()
}

// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/netns"
)

// The process connector: include/uapi/linux/connector.h and cn_proc.h. It answers only in the first network namespace, and
// speaks only to a listener in the first user and process namespace, with CAP_NET_ADMIN.
const (
	cnProc    = 1 // CN_IDX_PROC and CN_VAL_PROC
	cnListen  = 1 // PROC_CN_MCAST_LISTEN
	cnIgnore  = 2 // PROC_CN_MCAST_IGNORE
	procNone  = 0 // PROC_EVENT_NONE, the acknowledgement
	procExec  = 2
	procExit  = 0x80000000
	cnHeader  = unix.SizeofNlMsghdr
	procEvent = cnHeader + 20  // after struct cn_msg: what, cpu, timestamp_ns
	procData  = procEvent + 16 // event_data: of exec and exit the thread, then its leader; of an acknowledgement an error

	// connectorAnswer bounds the wait for an acknowledgement, which the kernel sends within the call: it is there, behind events
	// of others, or does not come. Every start outside the first process namespace waits for it.
	connectorAnswer = 50 * time.Millisecond
)

// connector is a socket that becomes readable when a process executes a program or ends.
type connector struct{ fd int }

func openConnector() (*connector, error) {
	c, err := listenConnector()
	if errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.ECONNREFUSED) {
		// Perhaps only because this process is in another network namespace than the first.
		if ns, nerr := os.Open(hostNetNS); nerr == nil {
			err = errors.Join(netns.Do(int(ns.Fd()), func() (err error) {
				c, err = listenConnector()
				return err
			}), ns.Close())
		}
	}
	return c, err
}

func listenConnector() (*connector, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_CONNECTOR)
	if err != nil {
		return nil, fmt.Errorf("open process connector: %w", err)
	}
	c := &connector{fd}
	if err := c.listen(); err != nil {
		return nil, errors.Join(fmt.Errorf("listen to process connector: %w", err), unix.Close(fd))
	}
	return c, nil
}

func (c *connector) listen() error {
	if err := unix.Bind(c.fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: cnProc}); err != nil {
		return err
	}
	if err := c.ask(cnListen); err != nil {
		return err
	}
	if err := c.acknowledged(); err != nil {
		return err
	}
	return unix.SetsockoptSockFprog(c.fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, execOrExit())
}

// ask sends an operation, in a struct cn_msg whose ack tells our acknowledgement, which has one more, from those that others
// get. The kernel gives the sequence number a meaning of its own.
func (c *connector) ask(op uint32) error {
	b := make([]byte, procEvent+4)
	order := binary.NativeEndian
	order.PutUint32(b[0:], uint32(len(b)))
	order.PutUint16(b[4:], unix.NLMSG_DONE)
	order.PutUint32(b[cnHeader:], cnProc)
	order.PutUint32(b[cnHeader+4:], cnProc)
	order.PutUint32(b[cnHeader+12:], uint32(os.Getpid()))
	order.PutUint16(b[cnHeader+16:], 4)
	order.PutUint32(b[procEvent:], op)
	return unix.Sendto(c.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
}

// acknowledged waits for the kernel's word that events will come. From outside the first namespaces it says nothing at all.
func (c *connector) acknowledged() error {
	b := make([]byte, 4096)
	order := binary.NativeEndian
	deadline := time.Now().Add(connectorAnswer)
	for { // events of others may come before
		left := time.Until(deadline)
		fds := []unix.PollFd{{Fd: int32(c.fd), Events: unix.POLLIN}}
		if n, err := unix.Poll(fds, milliseconds(left)); left <= 0 || n == 0 && err == nil {
			break
		} else if err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
		n, err := unix.Read(c.fd, b)
		if errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.ENOBUFS) {
			continue
		}
		if err != nil {
			return err
		}
		if n >= procData+4 && order.Uint32(b[procEvent:]) == procNone && order.Uint32(b[cnHeader+12:]) == uint32(os.Getpid())+1 {
			if e := order.Uint32(b[procData:]); e != 0 {
				return unix.Errno(e)
			}
			return nil
		}
	}
	return errors.New("no answer: it speaks only in the first user and process namespaces")
}

// execOrExit is a filter in the kernel, so that forks and threads, of which there are many more, wake nobody.
func execOrExit() *unix.SockFprog {
	// A filter loads words as if they came from the network.
	native := func(v uint32) uint32 {
		var b [4]byte
		binary.NativeEndian.PutUint32(b[:], v)
		return binary.BigEndian.Uint32(b[:])
	}
	const (
		load = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
		jeq  = unix.BPF_JMP | unix.BPF_JEQ
		ret  = unix.BPF_RET | unix.BPF_K
	)
	code := []unix.SockFilter{
		{Code: load, K: procEvent},
		{Code: jeq | unix.BPF_K, K: native(procExec), Jt: 5},
		{Code: jeq | unix.BPF_K, K: native(procExit), Jf: 5},
		{Code: load, K: procData},
		{Code: unix.BPF_MISC | unix.BPF_TAX},
		{Code: load, K: procData + 4},
		{Code: jeq | unix.BPF_X, Jf: 1}, // of a thread that is not the leader
		{Code: ret, K: 0xffff},
		{Code: ret, K: 0},
	}
	return &unix.SockFprog{Len: uint16(len(code)), Filter: &code[0]}
}

// drain takes what has come, and tells whether anything has. That some was lost for want of room is news as well.
func (c *connector) drain() bool {
	var b [128]byte
	news := false
	for range maxDrain {
		_, err := unix.Read(c.fd, b[:])
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN):
			return news
		default:
			news = true
			if err != nil && !errors.Is(err, unix.ENOBUFS) {
				return news
			}
		}
	}
	return news
}

// Close tells the kernel first: before Linux 6.6 it goes on making events for a listener that has left without a word.
func (c *connector) Close() error { return errors.Join(c.ask(cnIgnore), unix.Close(c.fd)) }

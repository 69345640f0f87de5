// SPDX-License-Identifier: Apache-2.0

package probes

import (
	"context"
	"errors"
	"fmt"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// RetireGuard is how sure one must be before an idle connection is retired. The zero value has the defaults.
type RetireGuard struct {
	MinIdle   time.Duration // idle age once two requests were served; the default is 8 ms, two ticks at HZ 250
	FirstIdle time.Duration // idle age before that; the default is 2.5 s
	// Busy lets go of clients that never pause: see [Retirable]. Set it once the drain has waited for a while.
	Busy bool
}

const (
	defaultMinIdle   = 8 * time.Millisecond
	defaultFirstIdle = 2500 * time.Millisecond

	// busyCycles is how many answers must have been seen, each at a look of its own, before a connection counts as a
	// closed loop: one response that pauses, or an upload, does not show data both ways at ten looks.
	busyCycles = 10

	// busyPatience bounds the search for the moment between two requests of a closed loop, busyStep is how often it
	// is looked for.
	busyPatience = 20 * time.Millisecond
	busyStep     = 50 * time.Microsecond
)

// Retirable says whether a connection may be retired after this look. It must be idle and not pushing, for 8 ms if two
// or more requests were served and 2.5 s otherwise: a server that pauses for 1 s inside its first response broke 26
// responses in 8 restarts with 8 ms for all, and none in 10 with this guard.
//
// A client in a closed loop sends its next request as soon as it has the answer, so no look ever finds it idle for 8 ms,
// and most find it active. It would keep a drain open up to the deadline. Under http1, with Busy set, ten seen answers
// replace the idle age, and Retire finds the moment between two requests itself. What such a client can lose is what
// it can lose whenever a server closes a kept connection: a request that arrives after the application has read the
// end is not answered, and was not begun. What arrives before, or is being answered, is answered in full, since
// SHUT_RD takes away neither what was received nor the way back. A WebSocket on which both ends talk without a pause
// looks like a closed loop; where there are such, leave Busy unset.
func Retirable(v Verdict, g RetireGuard) bool {
	if v.Pushing || v.State != StateEstablished {
		return false
	}
	if g.Busy && v.closedLoop() && (v.Class == ClassIdle || v.Class == ClassActive) {
		return true
	}
	if v.Class != ClassIdle {
		return false
	}
	least := g.FirstIdle
	if least <= 0 {
		least = defaultFirstIdle
	}
	if v.Requests >= 2 {
		if least = g.MinIdle; least <= 0 {
			least = defaultMinIdle
		}
	}
	return v.IdleFor >= least
}

// closedLoop says that the history shows one request after the other.
func (v Verdict) closedLoop() bool { return v.strict && !v.Pushing && v.Cycles >= busyCycles }

// Retire makes the application see its client leave: it shuts down reading on a duplicate of the descriptor, so that the
// application reads the end after what it has not read yet, and closes in its own way. Nothing the application writes
// is lost.
//
// It wraps [ErrChanged], and does nothing, if the connection was used since the look; of a connection in a closed
// loop, if within 20 ms no moment between two requests was seen. It wraps [ErrGone] if process, descriptor or connection
// are not the same any more, and [ErrNoFile] if v does not say where it is. It needs the right to ptrace the process
// (PTRACE_MODE_ATTACH_REALCREDS, pidfd_getfd(2)).
func Retire(ctx context.Context, v Verdict) error {
	if v.FD < 0 || v.PID <= 0 {
		return fmt.Errorf("retire %s: %w", v.Remote, ErrNoFile)
	}
	fd, err := dupOf(v.PID, v.FD, v.Inode)
	if err != nil {
		return fmt.Errorf("retire %s: %w", v.Remote, err)
	}
	defer unix.Close(fd)
	if v.closedLoop() {
		err = awaitBetween(ctx, fd)
	} else {
		err = checkUntouched(fd, v)
	}
	if err == nil {
		err = shutdown(fd, unix.SHUT_RD)
	}
	if err != nil {
		return fmt.Errorf("retire %s: %w", v.Remote, err)
	}
	return nil
}

// checkUntouched compares the connection with the look.
func checkUntouched(fd int, v Verdict) error {
	info, unread, err := peek(fd)
	switch {
	case err != nil:
		return err
	case info.State != StateEstablished:
		return ErrGone
	case unread > 0 || info.Unacked > 0 || info.NotSent > 0,
		info.LastRecv < info.LastSent, // a request came last, whatever the look saw
		info.BytesReceived != v.BytesReceived || info.BytesSent != v.BytesSent:
		return ErrChanged
	}
	return nil
}

// awaitBetween waits until the last thing on the connection is our answer, which is certain while it is not
// acknowledged: the next request would acknowledge it.
func awaitBetween(ctx context.Context, fd int) error {
	ctx, cancel := context.WithTimeoutCause(ctx, busyPatience, ErrChanged)
	defer cancel()
	tick := time.NewTicker(busyStep)
	defer tick.Stop()
	for {
		info, unread, err := peek(fd)
		switch {
		case err != nil:
			return err
		case info.State != StateEstablished:
			return ErrGone
		case unread == 0 && info.NotSent == 0 && info.LastSent <= info.LastRecv &&
			(info.Unacked > 0 || info.LastSent < info.LastRecv):
			return nil
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}

// peek reads what decides whether a connection is busy, the receive queue last.
func peek(fd int) (TCPInfo, int, error) {
	info, err := tcpInfo(fd)
	if err != nil {
		return info, 0, err
	}
	unread, err := unix.IoctlGetInt(fd, unix.SIOCINQ)
	if err != nil {
		return info, 0, fmt.Errorf("read length of receive queue: %w", err)
	}
	return info, unread, nil
}

func tcpInfo(fd int) (TCPInfo, error) {
	var b [512]byte
	n := uint32(len(b))
	// x/sys would cut the answer to the fields that it knows.
	_, _, e := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.IPPROTO_TCP, unix.TCP_INFO,
		uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&n)), 0)
	if e != 0 {
		return TCPInfo{}, fmt.Errorf("read TCP_INFO: %w", e)
	}
	return parseTCPInfo(b[:min(int(n), len(b))]), nil
}

func shutdown(fd, how int) error {
	err := unix.Shutdown(fd, how)
	if errors.Is(err, unix.ENOTCONN) {
		return ErrGone
	}
	if err != nil {
		return fmt.Errorf("shut down: %w", err)
	}
	return nil
}

// dupOf duplicates a descriptor of another process if it is still the socket that it was. Descriptor numbers are
// reused at once, so it is the inode of the duplicate that counts.
func dupOf(pid, fd int, inode uint64) (int, error) {
	p, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return -1, goneOr(err, "open process %d", pid)
	}
	defer unix.Close(p)
	dup, err := unix.PidfdGetfd(p, fd, 0)
	if err != nil {
		return -1, goneOr(err, "duplicate descriptor %d of process %d", fd, pid)
	}
	var st unix.Stat_t
	if err := unix.Fstat(dup, &st); err != nil {
		return -1, errors.Join(fmt.Errorf("identify descriptor %d of process %d: %w", fd, pid, err), unix.Close(dup))
	}
	if st.Mode&unix.S_IFMT != unix.S_IFSOCK || st.Ino != inode {
		return -1, errors.Join(ErrGone, unix.Close(dup))
	}
	return dup, nil
}

// goneOr says ErrGone where the process has exited or the descriptor was closed.
func goneOr(err error, what string, args ...any) error {
	what = fmt.Sprintf(what, args...)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EBADF) {
		return fmt.Errorf("%s: %w: %w", what, ErrGone, err)
	}
	return fmt.Errorf("%s: %w", what, err)
}

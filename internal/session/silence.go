// SPDX-License-Identifier: Apache-2.0

package session

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/api"
)

// tick is how long at most nobody looks at the clock while there are sessions: a third of a heartbeat.
func (b *Book) tick() time.Duration { return b.o.Heartbeat / 3 }

// alive is a sign of life of a session.
func (b *Book) alive(s *session) {
	s.heard, s.heardAt, s.mute = b.up, time.Now(), false
	b.judge(s, api.HealthOK)
}

// judge changes what is thought of a session.
func (b *Book) judge(s *session, h api.Health) {
	if s.health == h {
		return
	}
	s.health, b.changed = h, true
	if h == api.HealthOK {
		b.log.Info("session gives signs of life again", "session", s.ID, "pid", s.PID)
	} else {
		b.log.Warn("session is silent", "session", s.ID, "pid", s.PID, "health", h, "since", s.heardAt)
	}
	b.mention(s, string(h))
}

// heardOf is when the process of a session was last heard of. An application that had to register anew, since it did not get
// the answer, speaks by its new session alone: it lives.
func (b *Book) heardOf(s *session) time.Duration {
	heard := s.heard
	if s.Role == api.RoleApp {
		for _, x := range b.Sessions {
			if x.Role == api.RoleApp && x.of(s.PID, s.Start) {
				heard = max(heard, x.heard)
			}
		}
	}
	return heard
}

// look judges every session by its silence, and returns when to look again; 0: not before something wakes it.
func (b *Book) look() time.Duration {
	b.resolve()
	if b.Unknown && b.up >= b.o.Lost {
		b.Unknown, b.changed, b.dirty = false, true, true
	}
	b.unhide()
	next := b.tick()
	if b.owed {
		next = min(next, max(lazily-time.Since(b.wrote), time.Millisecond))
	}
	if b.Over || len(b.Sessions) == 0 && !b.Unknown {
		if b.owed || b.hidden > 0 {
			return next
		}
		return 0
	}
	for _, s := range slices.Clone(b.Sessions) {
		silent := b.up - b.heardOf(s)
		switch {
		case b.up-s.heard >= b.o.Lost && s.Role == api.RoleHolder:
			b.drop(s, "silent")
		case b.up-s.heard >= b.o.Lost && silent < b.o.Lost:
			b.drop(s, "silent, while its process speaks by another")
		case silent >= b.o.Lost:
			b.judge(s, api.HealthLost)
		case silent >= b.o.Suspect:
			b.judge(s, api.HealthSuspect)
			next = min(next, b.o.Lost-silent)
		default:
			next = min(next, b.o.Suspect-silent)
		}
	}
	return next
}

// rouse makes Run look at once.
func (b *Book) rouse() {
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

// Run watches the silence of sessions and the ends of the processes of those that are bound. It returns the cause of
// ctx's end, and may be called again then. While it does not run, nobody is thought silent.
func (b *Book) Run(ctx context.Context) error {
	var watching sync.WaitGroup
	defer func() {
		watching.Wait()
		b.mu.Lock()
		defer b.mu.Unlock()
		for _, s := range b.Sessions {
			s.unwatch = nil
		}
	}()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-b.wake:
		case <-timer.C:
		}
		_ = b.do(func() error {
			for _, s := range b.Sessions {
				if s.Bound && s.unwatch == nil {
					wctx, cancel := context.WithCancel(ctx)
					s.unwatch = cancel
					watching.Go(func() { b.watch(wctx, s) })
				}
			}
			if next := b.look(); next > 0 {
				timer.Reset(next)
			}
			return nil
		})
	}
}

// watch ends a session when its process has ended.
func (b *Book) watch(ctx context.Context, s *session) {
	err := b.o.watch(ctx, s.PID, func() bool {
		start := b.started(s.PID)
		return start == 0 || s.Start == 0 || start == s.Start
	})
	_ = b.do(func() error {
		switch {
		case ctx.Err() != nil: // the session has ended, or Run has
		case err != nil:
			b.warn(fmt.Sprintf("the end of process %d cannot be watched, its silence is", s.PID), err)
		default:
			b.drop(s, "its process has ended")
		}
		return nil
	})
}

// awaitEnd blocks until a process has ended, which is so at once if none has this pid or is does not say that it is the
// one that is meant. When ctx ends first it returns its cause.
func awaitEnd(ctx context.Context, pid int, is func() bool) error {
	// Non-blocking, so that the runtime waits for it and not a thread.
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open pidfd of process %d: %w", pid, err)
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	defer f.Close()
	if !is() {
		return nil
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return fmt.Errorf("watch process %d: %w", pid, err)
	}
	defer context.AfterFunc(ctx, func() { f.Close() })()
	ended := false
	err = raw.Read(func(fd uintptr) bool {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		ended = err == nil && n > 0
		return ended
	})
	switch {
	case ended:
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	}
	return fmt.Errorf("watch process %d: %w", pid, err)
}

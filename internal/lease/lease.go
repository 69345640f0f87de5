// SPDX-License-Identifier: Apache-2.0

package lease

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// RenewEvery is how often an owner renews.
const RenewEvery = time.Second

// Options configure Acquire.
type Options struct {
	Standby bool         // wait for the owner to go, and see to it when it does not move any more
	Log     *slog.Logger // nil discards

	looks <-chan time.Time // when a standby looks at the owner; nil: every second
}

// Lease is owned by this process until Release, or until Renew says that it is lost. It is safe for concurrent use.
type Lease struct {
	path string

	mu   sync.Mutex
	own  record
	dir  *os.File // holds the lock; nil once the lease is lost or released
	file *os.File // the record; nil where it must be made
}

// Acquire makes the calling process the owner of the lease whose record is at path. The directory of path must exist. It
// is what is locked, so nobody else must use it for a lock, and it should be readable by this user alone: whoever can
// open it can lock it, and so keep others from owning the lease.
//
// While another process owns the lease, the error wraps ErrHeld. A standby waits instead, until that process gives up or
// ends, or ctx ends, whose cause it returns then. A standby that finds 11 times in a row, a second apart, that the owner
// has not renewed kills it (SIGKILL by pidfd), and goes on waiting until the kernel has taken the lock from it, which is
// when its last thread has gone. An owner that cannot be told for certain is not killed: its record must be whole, of this
// boot and of this pid namespace, and the process must have started when the record says.
//
// A standby whose ctx ends leaves a thread that waits for the lock, to give it up at once.
func Acquire(ctx context.Context, path string, o Options) (*Lease, error) {
	l, err := acquire(ctx, path, o)
	if err != nil {
		return nil, fmt.Errorf("acquire lease %s: %w", path, err)
	}
	return l, nil
}

func acquire(ctx context.Context, path string, o Options) (*Lease, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	own, err := self()
	if err != nil {
		return nil, err
	}
	if o.looks == nil {
		ticker := time.NewTicker(time.Second)
		defer ticker.Stop()
		o.looks = ticker.C
	}
	for {
		dir, err := os.Open(filepath.Dir(path))
		if err != nil {
			return nil, err
		}
		if st, err := dir.Stat(); err == nil && st.Mode()&0o066 != 0 {
			o.Log.Warn("others can open the directory of the lease, and so keep this process from owning it: chmod 0700", "dir", dir.Name())
		}
		err = flock(dir, unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case errors.Is(err, unix.EWOULDBLOCK) && o.Standby:
			// From here on the directory is closed by whoever waits.
			if err = (&watch{path: path, own: own, o: o}).wait(ctx, dir); errors.Is(err, errReplaced) {
				continue
			}
			if err != nil {
				return nil, err
			}
		case errors.Is(err, unix.EWOULDBLOCK):
			return nil, errors.Join(held(path), dir.Close())
		case err != nil:
			return nil, errors.Join(err, dir.Close())
		}
		l := &Lease{path: path, own: own, dir: dir}
		if err = l.Renew(); err == nil {
			return l, nil
		}
		if err = errors.Join(err, l.Release()); !errors.Is(err, ErrLost) {
			return nil, err
		}
		// The directory was replaced before it was locked.
	}
}

// held is ErrHeld with what is known of the owner.
func held(path string) error {
	r, err := readPath(path)
	if err != nil {
		return fmt.Errorf("%w by a process that is not known: %w", ErrHeld, err)
	}
	return fmt.Errorf("%w by process %d", ErrHeld, r.pid)
}

// flock is flock(2), which a signal may interrupt.
func flock(f *os.File, how int) error {
	for {
		err := unix.Flock(int(f.Fd()), how)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("lock %s: %w", f.Name(), err)
		}
	}
}

// isAt says whether path still is this file.
func isAt(f *os.File, path string) (bool, error) {
	mine, err := f.Stat()
	if err != nil {
		return false, err
	}
	there, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil && os.SameFile(mine, there), err
}

// Renew says that this process is alive. Call it every RenewEvery from the loop whose life matters: a standby kills an
// owner that has not renewed for 11 s. It makes the record anew if that was deleted. It wraps ErrLost if another process
// may own the lease, which this process has released then; any other error is of the file system, and the lease still is
// this process's, as long as no standby takes it for dead.
func (l *Lease) Renew() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.renew(); err != nil {
		return fmt.Errorf("renew lease %s: %w", l.path, err)
	}
	return nil
}

func (l *Lease) renew() error {
	if l.dir == nil {
		return ErrLost
	}
	if at, err := isAt(l.dir, filepath.Dir(l.path)); err != nil {
		return err
	} else if !at {
		return errors.Join(ErrLost, l.release())
	}
	if l.file != nil {
		if at, err := isAt(l.file, l.path); err != nil {
			return err
		} else if !at {
			if err := l.closeRecord(); err != nil {
				return err
			}
		}
	}
	if l.file == nil {
		f, err := os.OpenFile(l.path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			return err
		}
		l.file = f
	}
	var err error
	if l.own.renewed, err = now(); err != nil {
		return err
	}
	_, err = l.file.WriteAt(l.own.encode(), 0)
	return err
}

// Release gives the lease up at once. It may be called again.
func (l *Lease) Release() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.release()
}

func (l *Lease) release() error {
	if l.dir == nil {
		return nil
	}
	var err error
	if l.file != nil {
		// The next owner may be stopped before it has written its own: it must not be this process that is killed for it.
		_, err = l.file.WriteAt(blank, 0)
		err = errors.Join(err, l.closeRecord())
	}
	err = errors.Join(err, l.dir.Close()) // which unlocks it: the descriptor is inherited by no program
	l.dir = nil
	return err
}

func (l *Lease) closeRecord() error {
	f := l.file
	l.file = nil
	return f.Close()
}

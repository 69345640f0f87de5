// SPDX-License-Identifier: Apache-2.0

package lease

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/probes"
)

// patience is how many looks, one a second, a standby finds the same renewal before it kills the owner: 10 s and one to
// spare. Looks are counted, and no clock is compared with the owner's: CLOCK_BOOTTIME has grown by hours when a machine
// wakes from suspend, and any clock may have when a virtual machine goes on that was stopped. Owner and standby stood
// still for as long, and both go on.
const patience = 11

// errReplaced says that what is waited for is not at its path any more.
var errReplaced = errors.New("directory was replaced")

// watch is one wait of a standby.
type watch struct {
	path string
	own  record
	o    Options

	seen  record // at the last look; zero: nothing that could be read
	looks int    // in a row that found the same as the one before
}

// wait blocks until dir is locked. If it returns an error, dir will be closed.
func (w *watch) wait(ctx context.Context, dir *os.File) error {
	w.o.Log.Info("standing by", "err", held(w.path))
	locked, gone := make(chan error), make(chan struct{})
	defer close(gone)
	go func() {
		err := flock(dir, unix.LOCK_EX)
		select {
		case locked <- err:
			if err == nil {
				return
			}
		case <-gone:
		}
		dir.Close()
	}()
	for {
		select {
		case err := <-locked:
			return err
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-w.o.looks:
			if at, err := isAt(dir, filepath.Dir(w.path)); err == nil && !at {
				return errReplaced
			}
			w.look()
		}
	}
}

// look compares the record with that of the last look, and ends an owner that has not renewed for too long.
func (w *watch) look() {
	r, _ := readPath(w.path) // what cannot be read is the zero record
	if r != w.seen {
		w.seen, w.looks = r, 0
		return
	}
	if w.looks++; w.looks < patience {
		return
	}
	w.looks = 0
	if err := w.kill(r); err != nil {
		w.o.Log.Warn("owner does not renew its lease and is left alone", "pid", r.pid, "err", err)
		return
	}
	w.o.Log.Warn("owner did not renew its lease and was killed", "pid", r.pid)
}

// kill ends the process that wrote the record, if it is certain that it did.
func (w *watch) kill(r record) error {
	switch {
	case r.pid == 0:
		return errRecord
	case r.boot != w.own.boot:
		return errors.New("the record is of another boot")
	case r.pidns != w.own.pidns:
		return errors.New("the owner is in another pid namespace")
	}
	pidfd, err := unix.PidfdOpen(r.pid, 0)
	if err != nil {
		return fmt.Errorf("open pidfd of process %d: %w", r.pid, err)
	}
	defer unix.Close(pidfd)
	// The descriptor keeps the process that it names; if the number had another owner before, the start tells.
	start, err := probes.Started(r.pid)
	if err != nil {
		return err
	}
	if start != r.start {
		return fmt.Errorf("process %d is not the one that wrote the record", r.pid)
	}
	if last, err := readPath(w.path); err != nil || last != r {
		return errors.Join(errors.New("the record has just changed"), err)
	}
	if err := unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0); err != nil {
		return fmt.Errorf("kill process %d: %w", r.pid, err)
	}
	return nil
}

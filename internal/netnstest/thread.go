// SPDX-License-Identifier: Apache-2.0

package netnstest

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// Apart runs fn on a thread of its own, which ends with it, so that what fn does to its thread, ids and capabilities, is
// nobody else's. It is never the process's first thread: that does not end, and /proc/self shows what it is.
func Apart(fn func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		if unix.Gettid() == unix.Getpid() {
			Apart(fn) // on another one, since this one is taken
			runtime.UnlockOSThread()
			return
		}
		fn()
	}()
	<-done
}

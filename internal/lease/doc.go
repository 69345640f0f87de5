// SPDX-License-Identifier: Apache-2.0

// Package lease sees to it that one process at a time owns what there is one of
// on a host, and that an owner that does not move any more is replaced.
//
// The kernel's lock on a directory decides (flock(2)): it ends with its process,
// whatever ends that, and no file that is deleted in there takes it away. A record
// in the directory, which the owner's main loop renews, tells a process that waits
// for its turn whether the owner works, or is stopped or wedged. All this protects
// processes of one host and one file system from each other, and nothing across
// hosts.
//
//	l, err := lease.Acquire(ctx, "/var/lib/ebb/lease", lease.Options{Standby: true, Log: log})
//	if err != nil { … }
//	defer l.Release()
//	for range time.Tick(lease.RenewEvery) {
//		if err := l.Renew(); errors.Is(err, lease.ErrLost) {
//			return err // somebody else may own it: touch nothing more
//		}
//	}
package lease

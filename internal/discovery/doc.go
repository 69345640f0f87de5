// SPDX-License-Identifier: Apache-2.0

// Package discovery finds the processes that are a backend, and tells when to look again.
//
// A [Match] names them, by the port they listen on, their systemd unit, control group, process or network namespace; a
// [Snapshot] is one scan of /proc that answers any number of matches; a [Watcher] says that something has changed which may
// make another answer. It follows nothing by itself and remembers no backend: whether a [Workload] is a new generation is
// for its caller to tell, by Main and Start, as is a pidfd on Main, which tells of its end at once.
//
// What listens, and on which addresses, is package probes.
//
//	w, err := discovery.Watch(ctx, discovery.Options{})
//	defer w.Close()
//	var snap discovery.Snapshot
//	for ctx.Err() == nil {
//		err := snap.Scan(ctx)
//		web, err := snap.Find(ctx, discovery.Match{Unit: "web@blue.service"})
//		errors.Is(err, discovery.ErrNone) // nothing there at the moment, and why; ErrUnknown: nobody can tell
//		w.Follow(web)
//		select {
//		case <-w.Changed():
//		case <-ctx.Done():
//		}
//	}
package discovery

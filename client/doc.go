// SPDX-License-Identifier: Apache-2.0

// Package client is for applications that Ebb drains: they hear that they are draining before anybody feels it, say what
// they are still in the middle of, are told to flush exactly once, and answer. It imports the standard library alone.
//
// A server needs one line, which readiness, the end of kept connections, the order of a stop and the signals come with:
//
//	err := client.ListenAndServe(srv, client.WithReadiness("/healthz", nil))
//
// Whatever else works in the background registers itself:
//
//	s, err := client.Register(ctx, client.Options{})
//	…
//	s.OnFlush(func(ctx context.Context, f client.Flush) error { return store.Sync(ctx) })
//	for job := range jobs(s.Draining()) { // takes no more when the channel is closed
//		release, err := s.Hold(ctx, "invoices") // the flush waits for it
//		…
//		release()
//	}
//	<-s.Done()
//
// Without an agent all of it works as well: SIGTERM then begins a drain that the session runs by itself. With one, the agent
// decides when to flush, since the kernel tells it what is still on its way here; the session only takes over where the agent
// falls silent, and keeps to the deadline that was announced. Either way:
//
//	draining        flush                                     deadline
//	───┬──────────────┬───────────────┬──────────────────────────┬──►
//	   │ the wait     │ what is left  │ OnFlush                  │ what is left
//	   │              │ is asked to   │                          │ is closed
//	   │              │ end, closed,  │                          │
//	   │              │ waited for    │                          │
//
// The flush comes as soon as nothing is in flight and nothing is held, at the latest when its slice of the budget begins.
//
// It is not a proxy and counts no connections for the agent: the kernel does. What it talks to the agent is described in
// docs/protocol.md.
//
// # Servers of other protocols
//
// gRPC has its own module, client/grpc. What such a server needs, and nobody else, is in one place and may change before version 1:
// [Server], [Session.Attach], [Session.Detach], [Session.Commit], [Session.QuietPeriod], [WithDraining] and [Listener].
package client

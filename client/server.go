// SPDX-License-Identifier: Apache-2.0

package client

import (
	"context"
	"net/http"
	"slices"
	"time"
)

// What is in this file is for servers of protocols that this package does not serve. It may change before version 1.

// Server is what takes new work from outside and is stopped in stages. [ListenAndServe] attaches one for net/http and the package
// client/grpc one for gRPC; a server of another protocol can do the same. Its methods are called from several goroutines, and
// some of them more than once: Pause, StopNew and Wait while nobody has been asked to end yet, then StopNew, Retire and at last
// Shutdown in the flush.
//
// For servers of other protocols; it may change before version 1.
type Server interface {
	// Pause returns nil once nothing new has arrived for quiet, else the error of ctx.
	Pause(ctx context.Context, quiet time.Duration) error
	// StopNew closes the listeners. What the kernel has accepted is still served.
	StopNew()
	// Wait returns nil once nothing is in flight, else the error of ctx. If nothing is, it returns nil though ctx is over.
	Wait(ctx context.Context) error
	// Retire has kept connections go, and returns nil once nothing is in flight, else the error of ctx. When it has returned,
	// nothing new begins.
	Retire(ctx context.Context) error
	// Shutdown closes everything: what is idle in good order, and the rest when ctx is over, of which it returns ctx's error.
	Shutdown(ctx context.Context) error
}

// Attach has the session stop srv with everything else. It returns [http.ErrServerClosed] if the flush has begun. Call it when
// srv listens: a process that listens is one that the agent finds.
//
// For servers of other protocols; it may change before version 1.
func (s *Session) Attach(srv Server) error {
	err := http.ErrServerClosed
	s.do(func() {
		if s.status.Flushing {
			return
		}
		err = nil
		s.servers = append(s.servers, srv)
		if s.drain != nil && s.drain.cancel != nil {
			s.restart() // with this one too
		}
		if s.id == "" {
			poke(s.kick)
		}
	})
	return err
}

// Detach is for a server that has ended by itself.
//
// For servers of other protocols; it may change before version 1.
func (s *Session) Detach(srv Server) {
	s.do(func() { s.servers = slices.DeleteFunc(s.servers, func(x Server) bool { return x == srv }) })
}

// Commit is for a server that does what cannot be undone, such as closing its listener while it is only draining: if the agent
// takes the running drain back after that, the session goes on with it alone, to the end. It returns false if no drain runs.
//
// For servers of other protocols; it may change before version 1.
func (s *Session) Commit() bool {
	ok := false
	s.do(func() {
		if ok = s.drain != nil; ok {
			s.drain.committed = true
			s.lead()
		}
	})
	return ok
}

// QuietPeriod is that of Options, or its default.
//
// For servers of other protocols; it may change before version 1.
func (s *Session) QuietPeriod() time.Duration {
	if s == nil {
		return DefaultQuietPeriod
	}
	return s.o.QuietPeriod
}

// WithDraining returns a context for which [Draining] is that of s, for servers that are not of net/http.
//
// For servers of other protocols; it may change before version 1.
func WithDraining(ctx context.Context, s *Session) context.Context {
	return context.WithValue(ctx, sessionKey{}, s)
}

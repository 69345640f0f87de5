// SPDX-License-Identifier: Apache-2.0

package ebbgrpc

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/ebbproxy/ebb/client"
)

// ServerOptions are what grpc.NewServer is to be called with: with them the contexts of calls end when the flush begins, with
// client.ErrFlushing as their cause, and client.Draining of them is the session's.
func ServerOptions(s *client.Session) []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
			ctx, end := within(ctx, s)
			defer end()
			return next(ctx, req)
		}),
		grpc.ChainStreamInterceptor(func(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
			ctx, end := within(ss.Context(), s)
			defer end()
			if info.FullMethod == healthpb.Health_Watch_FullMethodName {
				go endWatch(ctx, s, end)
			}
			return next(srv, stream{ss, ctx})
		}),
	}
}

// endWatch ends a stream that watches health, which never ends by itself, when it has had the time to say NOT_SERVING.
func endWatch(ctx context.Context, s *client.Session, end func()) {
	select {
	case <-s.Draining():
	case <-ctx.Done():
		return
	}
	timer := time.NewTimer(s.QuietPeriod())
	defer timer.Stop()
	select {
	case <-timer.C:
		end()
	case <-ctx.Done():
	}
}

// stream is a stream with another context.
type stream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s stream) Context() context.Context { return s.ctx }

func within(ctx context.Context, s *client.Session) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(client.WithDraining(ctx, s))
	if s.Context().Err() != nil {
		// It begins while GOAWAY is on its way. It is waited for like the rest, and nobody has asked it to end yet.
		return ctx, func() { cancel(nil) }
	}
	stop := context.AfterFunc(s.Context(), func() { cancel(context.Cause(s.Context())) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}

// ListenAndServe is Serve on a TCP address, by client.Listen.
func ListenAndServe(srv *grpc.Server, addr string, s *client.Session, h *health.Server) error {
	l, err := client.Listen(context.Background(), "tcp", addr)
	if err != nil {
		return err // it names the address
	}
	return Serve(srv, l, s, h)
}

// Serve serves srv, once for each, until it has been drained:
//
//   - While draining, h (nil: there is none) says NOT_SERVING for all and then ends its Watch streams, and all streams are
//     told by [client.Draining].
//   - Once nothing has arrived for the quiet period, at the latest after half the wait, it closes the listener, without
//     resetting what the kernel has queued, and sends a GOAWAY on every connection: clients finish what is in flight and
//     connect anew, which is when they come to another server. Until then new connections and calls are served: a client that
//     was refused would report UNAVAILABLE.
//   - When the flush begins, the contexts of calls end; what they still answer is delivered.
//   - What is left at the deadline is closed by force.
//
// A GOAWAY cannot be taken back: when a drain is cancelled after it, the session goes on to the end all the same, and the
// process is to be started again.
//
// It returns nil when all of that went well, client.ErrForced if something was closed by force, or at once why it cannot serve.
// The program stops the session then.
func Serve(srv *grpc.Server, l net.Listener, s *client.Session, h *health.Server) error {
	v := &server{srv: srv, l: client.NewListener(l), stopping: make(chan struct{}), stopped: make(chan struct{})}
	if err := s.Attach(v); err != nil {
		return errors.Join(err, l.Close())
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go v.follow(ctx, s, h)
	err := srv.Serve(v.l)
	select {
	case <-v.stopping:
		<-s.Done() // the listener has closed before the rest
	default:
		s.Detach(v)
		return err
	}
	if v.forced {
		return fmt.Errorf("serve gRPC: %w", client.ErrForced)
	}
	return nil
}

// server is a gRPC server as a client.Server.
type server struct {
	srv      *grpc.Server
	l        *client.Listener
	stop     sync.Once
	stopping chan struct{} // closed by StopNew
	stopped  chan struct{} // closed when GracefulStop has returned
	forced   bool          // it took Stop; read after stopped has been closed
}

// follow turns health off while draining, and sends clients away in time: a connection that carries streams all the time never
// becomes idle by itself, and would keep the drain open.
func (v *server) follow(ctx context.Context, s *client.Session, h *health.Server) {
	for {
		select {
		case <-s.Draining():
		case <-ctx.Done():
			return
		}
		if h != nil {
			h.Shutdown()
		}
		half, cancel := context.WithTimeout(ctx, time.Until(s.Status().FlushBy)/2)
		_ = v.l.Pause(half, s.QuietPeriod()) // also over at half the wait
		cancel()
		if s.Commit() {
			v.StopNew()
			return
		}
		if h != nil {
			h.Resume() // taken back
		}
	}
}

// Pause is that of client.Server.
func (v *server) Pause(ctx context.Context, quiet time.Duration) error { return v.l.Pause(ctx, quiet) }

// StopNew is that of client.Server.
func (v *server) StopNew() {
	v.stop.Do(func() {
		close(v.stopping)
		v.l.Finish()
		go func() {
			v.srv.GracefulStop()
			close(v.stopped)
		}()
	})
}

// Wait is that of client.Server.
func (v *server) Wait(ctx context.Context) error {
	select {
	case <-v.stopped:
		return nil
	case <-ctx.Done():
	}
	select {
	case <-v.stopped: // both at once
		return nil
	default:
		return ctx.Err()
	}
}

// Retire is that of client.Server: StopNew has sent a GOAWAY.
func (v *server) Retire(ctx context.Context) error { return v.Wait(ctx) }

// Shutdown is that of client.Server.
func (v *server) Shutdown(ctx context.Context) error {
	v.StopNew()
	err := v.Wait(ctx)
	if err != nil {
		err = fmt.Errorf("close gRPC connections: %w", err)
		v.forced = true
		v.srv.Stop() // GracefulStop returns then
		<-v.stopped
	}
	return err
}

// SPDX-License-Identifier: Apache-2.0

package ebbgrpc_test

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"

	"github.com/ebbproxy/ebb/client"
	ebbgrpc "github.com/ebbproxy/ebb/client/grpc"
)

// generous is for what happens at once unless the machine stands still.
const generous = 30 * time.Second

// service answers unary calls, and has a stream that ends only when it is told.
type service struct {
	grpc_testing.UnimplementedTestServiceServer
	told  atomic.Int32
	asked atomic.Int32 // streams that were not told in time
	deaf  bool         // its stream heeds nothing but the end of its connection
	begun chan struct{}
}

func (v *service) EmptyCall(ctx context.Context, _ *grpc_testing.Empty) (*grpc_testing.Empty, error) {
	timer := time.NewTimer(5 * time.Millisecond)
	defer timer.Stop()
	select {
	case <-timer.C:
		return &grpc_testing.Empty{}, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

func (v *service) StreamingOutputCall(_ *grpc_testing.StreamingOutputCallRequest, out grpc.ServerStreamingServer[grpc_testing.StreamingOutputCallResponse]) error {
	if err := out.Send(&grpc_testing.StreamingOutputCallResponse{}); err != nil {
		return err
	}
	v.begun <- struct{}{}
	if v.deaf {
		<-out.Context().Done()
		for {
			if err := out.Send(&grpc_testing.StreamingOutputCallResponse{}); err != nil {
				return err
			}
		}
	}
	select {
	case <-client.Draining(out.Context()):
		v.told.Add(1)
		return out.Send(&grpc_testing.StreamingOutputCallResponse{})
	case <-out.Context().Done():
		v.asked.Add(1)
		return context.Cause(out.Context())
	}
}

// serving is one server under test.
type serving struct {
	session *client.Session
	service *service
	health  *health.Server
	addr    string
	done    chan error
}

func serve(t *testing.T, opts ...func(*client.Options)) *serving {
	t.Helper()
	o := client.Options{Socket: filepath.Join(t.TempDir(), "none.sock"), Signals: client.NoSignals, Grace: 4 * generous}
	for _, opt := range opts {
		opt(&o)
	}
	s, err := client.Register(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	l, err := client.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	v := &serving{
		session: s, service: &service{begun: make(chan struct{}, 16)}, health: health.NewServer(), addr: l.Addr().String(),
		done: make(chan error, 1),
	}
	srv := grpc.NewServer(ebbgrpc.ServerOptions(s)...)
	grpc_testing.RegisterTestServiceServer(srv, v.service)
	healthpb.RegisterHealthServer(srv, v.health)
	go func() { v.done <- ebbgrpc.Serve(srv, l, s, v.health) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		_ = s.Stop(ctx) // what the test was about is over
	})
	return v
}

func (v *serving) ended(t *testing.T) error {
	t.Helper()
	select {
	case err := <-v.done:
		return err
	case <-time.After(2 * generous):
		return errors.New("it does not end")
	}
}

func dial(t *testing.T, servers ...*serving) *grpc.ClientConn {
	t.Helper()
	r := manual.NewBuilderWithScheme("test")
	var st resolver.State
	for _, v := range servers {
		st.Endpoints = append(st.Endpoints, resolver.Endpoint{Addresses: []resolver.Address{{Addr: v.addr}}})
	}
	r.InitialState(st)
	cc, err := grpc.NewClient("test:///servers", grpc.WithResolvers(r), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultServiceConfig(`{"loadBalancingConfig": [{"round_robin": {}}]}`))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cc.Close() }) // nothing was written
	return cc
}

// Two servers under unary load, with endless streams to both: one leaves. No call fails, and its streams end by themselves in
// time.
func TestC4_NobodySeesAServerLeave(t *testing.T) {
	leaving, staying := serve(t), serve(t)
	cc := dial(t, leaving, staying)
	c := grpc_testing.NewTestServiceClient(cc)
	if _, err := c.EmptyCall(t.Context(), &grpc_testing.Empty{}, grpc.WaitForReady(true)); err != nil {
		t.Fatal(err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	const streams = 8
	ends := make(chan error, streams)
	for range streams {
		st, err := c.StreamingOutputCall(ctx, &grpc_testing.StreamingOutputCallRequest{}, grpc.WaitForReady(true))
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			for {
				if _, err := st.Recv(); err != nil {
					ends <- err
					return
				}
			}
		}()
	}
	for range streams {
		select {
		case <-leaving.service.begun:
		case <-staying.service.begun:
		}
	}

	var calls, failed atomic.Int64
	stop := make(chan struct{})
	var load sync.WaitGroup
	for range 8 {
		load.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				calls.Add(1)
				if _, err := c.EmptyCall(t.Context(), &grpc_testing.Empty{}); err != nil && failed.Add(1) < 10 {
					t.Errorf("call: %v", err)
				}
			}
		})
	}
	hc := healthpb.NewHealthClient(dial(t, leaving))
	if res, err := hc.Check(t.Context(), &healthpb.HealthCheckRequest{}, grpc.WaitForReady(true)); err != nil || res.Status != healthpb.HealthCheckResponse_SERVING {
		t.Errorf("health: got %v, %v", res, err)
	}
	watch, err := hc.Watch(t.Context(), &healthpb.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if err := leaving.session.Drain(t.Context(), "test"); err != nil {
		t.Fatal(err)
	}
	for {
		res, err := watch.Recv()
		if err != nil {
			t.Errorf("health while draining: %v", err)
			break
		}
		if res.Status == healthpb.HealthCheckResponse_NOT_SERVING {
			break
		}
	}
	err = leaving.ended(t)
	close(stop)
	load.Wait()
	if err != nil {
		t.Errorf("serve: %v", err)
	}
	if leaving.session.Status().Cause != "test" || leaving.service.asked.Load() != 0 {
		t.Errorf("asked to end: %d; it should all have ended before the flush", leaving.service.asked.Load())
	}
	told := leaving.service.told.Load()
	if told == 0 {
		t.Error("no stream was told")
	}
	for range told {
		if err := <-ends; err.Error() != "EOF" {
			t.Errorf("a stream that was told: got %v, want EOF", err)
		}
	}
	t.Logf("%d calls, %d failed, %d streams told", calls.Load(), failed.Load(), told)
	if staying.service.told.Load() != 0 {
		t.Error("the other server drains too")
	}
}

// A stream that heeds nothing is closed at the deadline, and it is said.
func TestD2_StreamIsForced(t *testing.T) {
	v := serve(t)
	v.service.deaf = true
	c := grpc_testing.NewTestServiceClient(dial(t, v))
	st, err := c.StreamingOutputCall(t.Context(), &grpc_testing.StreamingOutputCallRequest{}, grpc.WaitForReady(true))
	if err != nil {
		t.Fatal(err)
	}
	<-v.service.begun
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	go func() {
		for {
			if _, err := st.Recv(); err != nil {
				return
			}
		}
	}()
	if err := v.session.Stop(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("stop: got %v, want %v", err, context.DeadlineExceeded)
	}
	if err := v.ended(t); !errors.Is(err, client.ErrForced) {
		t.Errorf("serve: got %v, want %v", err, client.ErrForced)
	}
}

// The quiet period is the session's: with a long one, what connects long after the drain has begun is served.
func TestQuietPeriodOfTheSession(t *testing.T) {
	v := serve(t, func(o *client.Options) { o.QuietPeriod = time.Hour })
	if err := v.session.Drain(t.Context(), "test"); err != nil {
		t.Fatal(err)
	}
	<-time.After(client.DefaultQuietPeriod + 500*time.Millisecond)
	if _, err := grpc_testing.NewTestServiceClient(dial(t, v)).EmptyCall(t.Context(), &grpc_testing.Empty{}); err != nil {
		t.Error(err)
	}
}

func TestStopBeforeServe(t *testing.T) {
	s, err := client.Register(t.Context(), client.Options{
		Socket: filepath.Join(t.TempDir(), "none.sock"), Signals: client.NoSignals, QuietPeriod: time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := ebbgrpc.Serve(grpc.NewServer(), l, s, nil); err == nil {
		t.Error("it serves")
	}
}

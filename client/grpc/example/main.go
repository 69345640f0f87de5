// SPDX-License-Identifier: Apache-2.0

// Command example is a gRPC server that leaves without a client seeing UNAVAILABLE.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"log/slog"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/interop/grpc_testing"

	"github.com/ebbproxy/ebb/client"
	ebbgrpc "github.com/ebbproxy/ebb/client/grpc"
)

func main() {
	addr := flag.String("listen", "127.0.0.1:50051", "`address` to listen on")
	flag.Parse()
	if err := run(*addr); err != nil {
		log.Fatal(err)
	}
}

func run(addr string) error {
	s, err := client.Register(context.Background(), client.Options{Log: slog.Default()})
	if err != nil {
		return err
	}
	s.OnFlush(func(_ context.Context, f client.Flush) error {
		fmt.Println("flush", f.Reason)
		return nil
	})
	srv := grpc.NewServer(ebbgrpc.ServerOptions(s)...)
	h := health.NewServer()
	healthpb.RegisterHealthServer(srv, h)
	grpc_testing.RegisterTestServiceServer(srv, service{})
	l, err := client.Listen(context.Background(), "tcp", addr)
	if err != nil {
		return errors.Join(err, s.Stop(context.Background()))
	}
	fmt.Println("listening", l.Addr())
	if err := ebbgrpc.Serve(srv, l, s, h); err != nil {
		return err
	}
	return s.Stop(context.Background())
}

type service struct {
	grpc_testing.UnimplementedTestServiceServer
}

func (service) EmptyCall(context.Context, *grpc_testing.Empty) (*grpc_testing.Empty, error) {
	return &grpc_testing.Empty{}, nil
}

// StreamingOutputCall is a stream without end, but for a drain: its client comes back, and to another server.
func (service) StreamingOutputCall(_ *grpc_testing.StreamingOutputCallRequest,
	out grpc.ServerStreamingServer[grpc_testing.StreamingOutputCallResponse]) error {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		if err := out.Send(&grpc_testing.StreamingOutputCallResponse{}); err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-client.Draining(out.Context()):
			return nil
		case <-out.Context().Done():
			return context.Cause(out.Context())
		}
	}
}

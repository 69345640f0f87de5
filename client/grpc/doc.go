// SPDX-License-Identifier: Apache-2.0

// Package ebbgrpc serves gRPC for an application that Ebb drains, as package client does HTTP. It is a module of its own, so that
// only those who serve gRPC depend on it:
//
//	s, err := client.Register(ctx, client.Options{})
//	…
//	srv := grpc.NewServer(ebbgrpc.ServerOptions(s)...)
//	pb.RegisterGreeterServer(srv, greeter{})
//	err = ebbgrpc.ListenAndServe(srv, ":50051", s, health)
//
// Streams that do not end by themselves wait for client.Draining of their contexts:
//
//	select {
//	case m := <-messages:
//		err = stream.Send(m)
//	case <-client.Draining(stream.Context()):
//		return nil // the client comes back, and to another server
//	}
//
// It is no interceptor for authentication or limits, and no health service: that is google.golang.org/grpc/health.
package ebbgrpc

// SPDX-License-Identifier: Apache-2.0

// Command load is what the end-to-end tests put the example server under: unary calls, over connections that it keeps and over
// new ones, and on each kept connection a stream without end, which it opens anew when it has ended. On its standard output it
// says, a line each:
//
//	warm             a hundred calls have been answered
//	open             a stream has had its first message
//	end ERROR        a stream has ended; a server that sends its clients away in time ends it with EOF
//	failed ERROR     a call has failed
//	answered N       calls, at the end
//
// It goes on until its standard input ends, and then waits for the calls that it has begun.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/interop/grpc_testing"
)

const (
	kept = 4 // connections
	// Between two calls: one that fails takes no time. Between two streams: while a server drains each new one ends at once.
	callGap, streamGap = 5 * time.Millisecond, 100 * time.Millisecond
	// timeout is for a call that is answered at once unless the machine stands still.
	timeout = time.Minute
)

func main() {
	target := flag.String("target", "127.0.0.1:50051", "`address` of the server")
	flag.Parse()
	if err := run(*target); err != nil {
		log.Fatal(err)
	}
}

func run(target string) error {
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // its end counts, however it comes
		cancel()
	}()
	l := &load{target: "passthrough:///" + target}
	var group sync.WaitGroup
	for range kept {
		cc, err := l.dial()
		if err != nil {
			return err
		}
		defer cc.Close()
		c := grpc_testing.NewTestServiceClient(cc)
		group.Go(func() { repeat(ctx, callGap, func() { l.call(c) }) })
		group.Go(func() { repeat(ctx, streamGap, func() { stream(ctx, c) }) })
	}
	group.Go(func() { repeat(ctx, callGap, l.callAnew) })
	group.Wait()
	fmt.Println("answered", l.answered.Load())
	return nil
}

// load is on one server, or on several behind one address.
type load struct {
	target   string
	answered atomic.Int64
}

func (l *load) dial() (*grpc.ClientConn, error) {
	return grpc.NewClient(l.target, grpc.WithTransportCredentials(insecure.NewCredentials()))
}

// repeat does something again and again until the load is over.
func repeat(ctx context.Context, gap time.Duration, do func()) {
	tick := time.NewTicker(gap)
	defer tick.Stop()
	for {
		do()
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// call is not broken off at the end of the load, and fails at once when there is no connection to be had.
func (l *load) call(c grpc_testing.TestServiceClient) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	if _, err := c.EmptyCall(ctx, &grpc_testing.Empty{}); err != nil {
		fmt.Println("failed", err)
		return
	}
	if l.answered.Add(1) == 100 {
		fmt.Println("warm")
	}
}

// callAnew is a call over a connection of its own.
func (l *load) callAnew() {
	cc, err := l.dial()
	if err != nil {
		fmt.Println("failed", err)
		return
	}
	defer cc.Close()
	l.call(grpc_testing.NewTestServiceClient(cc))
}

// stream reads one to its end.
func stream(ctx context.Context, c grpc_testing.TestServiceClient) {
	st, err := c.StreamingOutputCall(ctx, &grpc_testing.StreamingOutputCallRequest{})
	for n := 0; err == nil; n++ {
		if n == 1 {
			fmt.Println("open")
		}
		_, err = st.Recv()
	}
	switch {
	case ctx.Err() != nil: // by us
	case errors.Is(err, io.EOF):
		fmt.Println("end EOF")
	default:
		fmt.Println("end", err)
	}
}

// SPDX-License-Identifier: Apache-2.0

// Command job works through jobs that no connection shows. While it drains it takes no more, and the flush waits for those that
// it has.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"log/slog"
	"sync"
	"time"

	"github.com/ebbproxy/ebb/client"
)

func main() {
	length := flag.Duration("length", 2*time.Second, "`duration` of a job")
	workers := flag.Int("workers", 2, "jobs at a time")
	flag.Parse()
	if err := run(*length, *workers); err != nil {
		log.Fatal(err)
	}
}

func run(length time.Duration, workers int) error {
	s, err := client.Register(context.Background(), client.Options{Log: slog.Default()})
	if err != nil {
		return err
	}
	s.OnFlush(func(_ context.Context, f client.Flush) error {
		fmt.Println("flush", f.Reason)
		return nil
	})
	var group sync.WaitGroup
	for w := range workers {
		group.Go(func() { work(s, w, length) })
	}
	group.Wait()
	<-s.Done()
	return s.Stop(context.Background())
}

// work takes one job after the other, until the session drains.
func work(s *client.Session, worker int, length time.Duration) {
	for n := 0; ; n++ {
		select {
		case <-s.Draining():
			return
		default:
		}
		name := fmt.Sprintf("worker-%d", worker)
		release, err := s.Hold(context.Background(), name)
		if errors.Is(err, client.ErrFlushing) {
			return // too late to begin
		} else if err != nil {
			log.Print(err)
			return
		}
		fmt.Println("begin", name, n)
		select {
		case <-time.After(length):
			fmt.Println("end", name, n)
		case <-s.Context().Done():
			fmt.Println("put back", name, n) // the wait is over: somebody else does it
		}
		release()
	}
}

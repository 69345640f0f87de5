// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"io"
	"sync/atomic"
	"time"
)

const (
	// outputQueue is how many lines wait for a reader that is slow.
	outputQueue = 4096
	// outputPatience is how long the end of a run waits for the lines that are left.
	outputPatience = time.Second
)

// Output writes to a stream whose reader may be slow, stopped or gone, without ever waiting for it: a drain must not
// depend on who reads its log. What does not fit is dropped and counted. Each Write is one unit. It may be used from any
// goroutine.
type Output struct {
	w       io.Writer
	lines   chan []byte
	stop    chan struct{}
	done    chan struct{}
	dropped atomic.Uint64
}

// NewOutput starts the goroutine that writes to w.
func NewOutput(w io.Writer) *Output {
	o := &Output{w: w, lines: make(chan []byte, outputQueue), stop: make(chan struct{}), done: make(chan struct{})}
	go o.run()
	return o
}

// Write takes a copy of b; it never blocks and never fails.
func (o *Output) Write(b []byte) (int, error) {
	select {
	case o.lines <- append([]byte(nil), b...):
	default:
		o.dropped.Add(1)
	}
	return len(b), nil
}

func (o *Output) run() {
	defer close(o.done)
	for {
		select {
		case b := <-o.lines:
			o.put(b)
			continue
		default:
		}
		select {
		case b := <-o.lines:
			o.put(b)
		case <-o.stop:
			for {
				select {
				case b := <-o.lines:
					o.put(b)
				default:
					return
				}
			}
		}
	}
}

func (o *Output) put(b []byte) {
	if n := o.dropped.Swap(0); n > 0 {
		fmt.Fprintf(o.w, "{\"type\":\"output.lost\",\"message\":\"%d lines were dropped: nobody read them\"}\n", n)
	}
	// An error is the reader's: there is nobody else to tell.
	_, _ = o.w.Write(b)
}

// Close writes what is left, for a second at most. Nothing may be written after it.
func (o *Output) Close() error {
	close(o.stop)
	t := time.NewTimer(outputPatience)
	defer t.Stop()
	select {
	case <-o.done:
	case <-t.C:
	}
	return nil
}

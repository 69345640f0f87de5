// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
)

// A reader that has stopped holds nobody up, and hears what it missed once it reads again.
func TestOutputNeverWaits(t *testing.T) {
	t.Parallel()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	o := NewOutput(w)
	line := []byte(strings.Repeat("x", 1023) + "\n")
	for range outputQueue + 1000 { // the pipe holds 64 of them
		if n, err := o.Write(line); n != len(line) || err != nil {
			t.Fatalf("got %d, %v", n, err)
		}
	}
	read := make(chan string)
	go func() {
		var b strings.Builder
		buf := make([]byte, 1<<16)
		for {
			n, err := r.Read(buf)
			b.Write(buf[:n])
			if err != nil {
				read <- b.String()
				return
			}
		}
	}()
	if err := o.Close(); err != nil {
		t.Fatal(err)
	}
	<-o.done
	w.Close()
	if got := <-read; !strings.Contains(got, "lines were dropped") {
		t.Errorf("%d bytes came through and none says that lines were dropped", len(got))
	}
}

func TestOutputKeepsWritesWhole(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	o := NewOutput(&b)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for j := range 100 {
				fmt.Fprintf(o, "%d-%d\n", i, j)
			}
		})
	}
	wg.Wait()
	if err := o.Close(); err != nil {
		t.Fatal(err)
	}
	if got := strings.Count(b.String(), "\n"); got != 800 {
		t.Errorf("got %d lines, want 800", got)
	}
}

// SPDX-License-Identifier: Apache-2.0

package hook

import (
	"bytes"
	"log/slog"
)

const (
	lineMax  = 512 // bytes of one line that are logged
	linesMax = 200 // lines of one program that are logged
)

// lines logs what a program writes, line by line, and no more than a log should take from it. One goroutine at a time
// uses it.
type lines struct {
	log     *slog.Logger
	part    []byte // of a line that has not ended
	logged  int
	dropped int // lines beyond linesMax
}

func (l *lines) Write(b []byte) (int, error) {
	n := len(b)
	for {
		line, rest, ended := bytes.Cut(b, []byte{'\n'})
		l.part = append(l.part, line[:min(len(line), lineMax-len(l.part))]...)
		if !ended {
			return n, nil
		}
		l.put()
		b = rest
	}
}

// put logs the line so far.
func (l *lines) put() {
	if line := bytes.TrimRight(l.part, "\r"); l.logged < linesMax {
		l.logged++
		l.log.Info("hook says", "line", string(line))
	} else {
		l.dropped++
	}
	l.part = l.part[:0]
}

// end logs what is left.
func (l *lines) end() {
	if len(l.part) > 0 {
		l.put()
	}
	if l.dropped > 0 {
		l.log.Warn("hook says more than is logged", "lines", l.dropped)
	}
}

// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/loadtest"
)

// load is the clients of one act and all that they met.
type load struct {
	s      *stage
	a      *Act
	g      *loadtest.Generator
	before Connections // the network stack's counters when the act began
	cancel context.CancelFunc
	done   chan struct{}
	ticker chan struct{} // closed when the moving line has stopped

	signalled atomic.Pointer[time.Time]
	lost      atomic.Int64
	turned    atomic.Int64

	mu      sync.Mutex
	results []loadtest.Result
}

// turnsAway tells whether refusals are on purpose in an act.
func (a *Act) turnsAway() bool { return a.Name == ActRefuse || a.Name == ActCrash }

func (s *stage) startLoad(ctx context.Context, a *Act) (*load, error) {
	l := &load{s: s, a: a, done: make(chan struct{}), ticker: make(chan struct{})}
	var err error
	if l.before, err = networkStack(); err != nil {
		return nil, err
	}
	o := s.o
	if l.g, err = loadtest.New(loadtest.Options{
		Targets:   []loadtest.Target{{Name: blueName, Addr: blueAddr}, {Name: greenName, Addr: greenAddr}},
		Rate:      max(0, o.Rate),
		KeepAlive: max(0, o.KeepAlive),
		Gap:       max(0, o.Gap),
		Slow:      max(0, o.Slow),
		SlowPath:  fmt.Sprintf("/?ms=%d", o.SlowFor.Milliseconds()),
		Drain:     o.Lag,
		OnResult:  l.take,
	}); err != nil {
		return nil, err
	}
	ctx, l.cancel = context.WithCancel(ctx)
	go func() {
		defer close(l.done)
		_ = l.g.Run(ctx) // it fails only when it is run twice
	}()
	go l.show()
	return l, nil
}

func (l *load) take(r loadtest.Result) {
	if r.End.IsZero() {
		r.End = time.Now()
	}
	l.mu.Lock()
	l.results = append(l.results, r)
	l.mu.Unlock()
	if !r.Verdict.Failure() {
		return
	}
	if l.a.turnsAway() && l.signalled.Load() != nil && r.Target == blueName && r.Verdict == loadtest.ConnectRefused {
		l.turned.Add(1)
	} else {
		l.lost.Add(1)
	}
}

// show keeps the moving line up to date until the last answer has come.
func (l *load) show() {
	defer close(l.ticker)
	began := time.Now()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-l.done:
			return
		case <-tick.C:
		}
		l.mu.Lock()
		n := len(l.results)
		l.mu.Unlock()
		at := "         "
		if t := l.signalled.Load(); t != nil {
			at = since(time.Since(*t))
		}
		text := fmt.Sprintf("%s requests, %s under way, %s lost", number(n), number(l.g.InFlight()), number(l.lost.Load()))
		if n := l.turned.Load(); n > 0 {
			text += ", " + number(n) + " turned away"
		}
		if l.signalled.Load() == nil {
			text += fmt.Sprintf(" (blue is told to stop in %.1f s)", max(0, (l.s.o.Warm-time.Since(began)).Seconds()))
		}
		l.s.w.move("   %s  %s", l.s.w.paint(faint, at), l.s.w.paint(faint, text))
	}
}

// stopper is whoever gets the stop signal: blue itself or its supervisor.
type stopper interface {
	stop() error
	ended() <-chan struct{}
}

// signal lets the load warm up and then tells blue to stop, in the eyes of the load too.
func (l *load) signal(ctx context.Context, p stopper) (time.Time, error) {
	timer := time.NewTimer(l.s.o.Warm)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-p.ended():
		return time.Time{}, errNoBlue
	case <-ctx.Done():
		return time.Time{}, context.Cause(ctx)
	}
	t := time.Now()
	l.signalled.Store(&t)
	if err := p.stop(); err != nil {
		return t, err
	}
	return t, l.g.Drop(blueName)
}

// stop ends the load and waits for what is under way. It may be called again.
func (l *load) stop() {
	l.cancel()
	<-l.done
	<-l.ticker
}

// finish ends the load and counts.
func (l *load) finish(ctx context.Context, signal, flip time.Time) error {
	l.cancel()
	select {
	case <-l.done:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	<-l.ticker
	after, err := networkStack()
	if err != nil {
		return err
	}
	a := l.a
	a.Network = Connections{Made: after.Made - l.before.Made, Refused: after.Refused - l.before.Refused}
	l.mu.Lock()
	defer l.mu.Unlock()
	a.count(l.results, signal, flip, a.turnsAway())
	rep := l.g.Report()
	a.Unsent = rep.Unsent
	return nil
}

// networkStack reads the counters of this network namespace (RFC 4022): tcpPassiveOpens is the connections that
// listeners took, tcpAttemptFails those that came to nothing.
func networkStack() (Connections, error) {
	var c Connections
	f, err := os.Open("/proc/thread-self/net/snmp")
	if err != nil {
		return c, fmt.Errorf("read counters of the network stack: %w", err)
	}
	defer f.Close()
	var names []string
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		values, ok := strings.CutPrefix(lines.Text(), "Tcp: ")
		if !ok {
			continue
		}
		if names == nil {
			names = strings.Fields(values)
			continue
		}
		for i, v := range strings.Fields(values) {
			if i >= len(names) {
				break
			}
			n, err := strconv.ParseInt(v, 10, 64)
			if err != nil {
				return c, fmt.Errorf("read counters of the network stack: %w", err)
			}
			switch names[i] {
			case "PassiveOpens":
				c.Made = n
			case "AttemptFails":
				c.Refused = n
			}
		}
		return c, nil
	}
	if err := lines.Err(); err != nil {
		return c, fmt.Errorf("read counters of the network stack: %w", err)
	}
	return c, fmt.Errorf("read counters of the network stack: no Tcp line: %w", unix.ENOENT)
}

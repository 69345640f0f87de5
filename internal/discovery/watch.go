// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// defaultTick is how often a Watcher says "look again" when it has heard of nothing.
	defaultTick = 10 * time.Second

	// After the first news Changed follows in firstLook, then again in twice that, and so on up to lastLook, until looks of
	// them have passed since the last news: a program that is executed now listens only later. While news keeps coming there
	// is so one look in every lastLook.
	firstLook = 100 * time.Millisecond
	lastLook  = 800 * time.Millisecond
	looks     = 4

	// maxDrain bounds how much is taken at one time of what may come without end.
	maxDrain = 4096
)

// Options configure a Watcher.
type Options struct {
	Tick time.Duration // how often to look again when nothing is heard; default 10 s
}

// Watcher tells when another look may find something else: because a process has executed a program or ended (process
// connector), because a network namespace was given or has lost a name, because a control group that is followed has got its
// first process or lost its last, or because some time has passed. Any of these works without the others.
//
//	       news              100 ms     200 ms     400 ms     800 ms
//	quiet ─────► looking ──► Changed ─► Changed ─► Changed ─► Changed ──► quiet
//	  └─ 10 s ─► Changed        └── news meanwhile: four more, up to 800 ms apart ──┘
//
// While it waits to say so it does not listen, so that a storm of processes costs what a single one does. Its methods may be
// called from any goroutine.
type Watcher struct {
	changed   chan struct{}
	tick      time.Duration
	connector *connector // nil: missing
	files     *files     // nil: missing
	stop      int        // eventfd
	unhook    func() bool
	done      chan struct{}

	mu      sync.Mutex
	missing []string
	closed  bool
	err     error // of the end
}

// Watch starts a Watcher, which ends with ctx or by Close. What of it this machine or privilege does not allow is told by
// Degraded and is no error.
func Watch(ctx context.Context, o Options) (*Watcher, error) {
	w := &Watcher{}
	var err error
	if w.connector, err = openConnector(); err != nil {
		w.lacks("that a process starts or ends is noticed late", err)
	}
	if w.files, err = openFiles(); err != nil {
		w.lacks("changes of network namespaces and control groups are noticed late", err)
	}
	if err := w.start(ctx, o); err != nil {
		return nil, err
	}
	return w, nil
}

// start begins to listen to the sources that w has, which are closed at the end, or if it fails.
func (w *Watcher) start(ctx context.Context, o Options) error {
	w.changed, w.done, w.tick = make(chan struct{}, 1), make(chan struct{}), o.Tick
	if w.tick <= 0 {
		w.tick = defaultTick
	}
	var err error
	if w.stop, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return errors.Join(fmt.Errorf("watch processes: %w", err), w.closeSources())
	}
	w.unhook = context.AfterFunc(ctx, w.end)
	go w.loop()
	return nil
}

// Changed gets a value when it is time to look again. One that is not taken stands for all that follow it. It is not closed
// at the end.
func (w *Watcher) Changed() <-chan struct{} { return w.changed }

// Degraded says, a sentence for each, what cannot be noticed at once, and why.
func (w *Watcher) Degraded() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.missing)
}

func (w *Watcher) lacks(what string, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if s := fmt.Sprintf("%s: %v", what, err); !slices.Contains(w.missing, s) {
		w.missing = append(w.missing, s)
	}
}

// Follow has the control groups of these workloads watched, and no others. Call it after each look.
func (w *Watcher) Follow(ws ...Workload) {
	if w.files == nil {
		return
	}
	if err := w.files.follow(ws); err != nil {
		w.lacks("changes of a control group are noticed late (fs.inotify.max_user_watches)", err)
	}
}

// end has the loop end.
func (w *Watcher) end() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.closed {
		w.closed = true
		_, _ = unix.Write(w.stop, binary.NativeEndian.AppendUint64(nil, 1)) // the first write to an eventfd does not block
	}
}

// Close ends the watching and waits for it. It may be called again.
func (w *Watcher) Close() error {
	w.unhook()
	w.end()
	<-w.done
	return w.err
}

// loop is the one goroutine that waits for news. It waits in poll(2), on a thread of its own, and not in the runtime's
// poller: that would be woken by each event, also while nobody listens.
func (w *Watcher) loop() {
	defer close(w.done)
	defer w.release()
	sources := []unix.PollFd{{Fd: int32(w.stop), Events: unix.POLLIN}}
	if w.connector != nil {
		sources = append(sources, unix.PollFd{Fd: int32(w.connector.fd), Events: unix.POLLIN})
	}
	if w.files != nil {
		sources = append(sources, unix.PollFd{Fd: int32(w.files.fd), Events: unix.POLLIN})
	}
	left, gap := 0, firstLook // looks to come, none while it is quiet, and the time before the next
	next := time.Now().Add(w.tick)
	for {
		listen := sources
		if left > 0 {
			listen = sources[:1]
		}
		if _, err := unix.Poll(listen, milliseconds(time.Until(next))); err != nil && !errors.Is(err, unix.EINTR) {
			w.lacks("nothing is noticed any more", err)
			return
		}
		if sources[0].Revents != 0 {
			return
		}
		due := !time.Now().Before(next)
		if left == 0 && w.drain() {
			left, gap, next = looks, firstLook, time.Now().Add(firstLook)
			continue
		}
		if !due {
			continue
		}
		if left > 0 {
			left--
			if w.drain() {
				left = looks
			}
		}
		select {
		case w.changed <- struct{}{}:
		default:
		}
		if left > 0 {
			gap = min(2*gap, lastLook)
			next = time.Now().Add(gap)
		} else {
			next = time.Now().Add(w.tick)
		}
	}
}

// drain takes the news there are, and tells whether there were any.
func (w *Watcher) drain() bool {
	news := w.connector != nil && w.connector.drain()
	return w.files != nil && w.files.drain() || news
}

func (w *Watcher) release() {
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	w.err = errors.Join(unix.Close(w.stop), w.closeSources())
}

func (w *Watcher) closeSources() error {
	var err error
	if w.connector != nil {
		err = w.connector.Close()
	}
	if w.files != nil {
		err = errors.Join(err, w.files.Close())
	}
	return err
}

// milliseconds rounds up, so that poll(2) does not return before the time.
func milliseconds(d time.Duration) int {
	return int(max(0, d+time.Millisecond-1) / time.Millisecond)
}

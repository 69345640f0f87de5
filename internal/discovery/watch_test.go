// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/netnstest"
)

// connectorOf opens a process connector, or skips where the kernel speaks to none.
func connectorOf(t *testing.T) *connector {
	t.Helper()
	netnstest.RequireRoot(t)
	c, err := openConnector()
	if err != nil {
		netnstest.Skip(t, "needs the process connector: %v", err)
	}
	return c
}

func started(t *testing.T, w *Watcher, o Options) *Watcher {
	t.Helper()
	if err := w.start(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	})
	return w
}

// told waits for a look.
func told(t *testing.T, w *Watcher, why string) {
	t.Helper()
	select {
	case <-w.Changed():
	case <-time.After(patience):
		t.Fatalf("nothing is told of %s", why)
	}
}

// quiet waits until it has said all it had to say: two looks cannot be further apart than lastLook while there is news.
func quiet(t *testing.T, w *Watcher) {
	t.Helper()
	limit := time.After(patience)
	for {
		select {
		case <-w.Changed():
		case <-time.After(2 * lastLook):
			return
		case <-limit:
			t.Fatal("it is never quiet")
		}
	}
}

// endThread ends a thread of this process that is not the first.
func endThread(t *testing.T) {
	t.Helper()
	hold := make(chan struct{})
	defer close(hold)
	tids := make(chan int)
	for range 2 { // one of them is not on the first thread, which never ends
		go func() {
			runtime.LockOSThread() // and leaves it so, so that the thread ends with the goroutine
			tid := unix.Gettid()
			tids <- tid
			if tid == os.Getpid() {
				<-hold
				runtime.UnlockOSThread()
			}
		}()
	}
	for range 2 {
		tid := <-tids
		if tid == os.Getpid() {
			continue
		}
		if !eventually(func() bool { _, err := os.Stat(fmt.Sprintf("/proc/self/task/%d", tid)); return err != nil }) {
			t.Fatalf("thread %d does not end", tid)
		}
	}
}

// The filter lets pass that a program is executed and that a process ends, and neither forks nor threads.
func TestConnectorFilter(t *testing.T) {
	netnstest.LeakCheck(t)
	c := connectorOf(t)
	defer c.Close()
	c.drain()
	endThread(t)
	// An exit is told after the parent could reap it, so this one stays unreaped until it has been read.
	cmd := exec.Command("sh", "-c", "(:) & wait; exec true")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	b := make([]byte, 4096)
	for execs, exits := 0, 0; execs < 2 || exits < 1; {
		fds := []unix.PollFd{{Fd: int32(c.fd), Events: unix.POLLIN}}
		if n, err := unix.Poll(fds, int(patience/time.Millisecond)); n == 0 || err != nil && !errors.Is(err, unix.EINTR) {
			t.Fatalf("%d programs executed and %d processes ended, then %v", execs, exits, err)
		}
		n, err := unix.Read(c.fd, b)
		if err != nil || n < procData+8 {
			continue
		}
		what := binary.NativeEndian.Uint32(b[procEvent:])
		tid, pid := binary.NativeEndian.Uint32(b[procData:]), binary.NativeEndian.Uint32(b[procData+4:])
		switch {
		case what == procExec:
		case what == procExit && tid == pid:
		default:
			t.Fatalf("got event %#x of thread %d of process %d", what, tid, pid)
		}
		if int(pid) == cmd.Process.Pid {
			if what == procExec {
				execs++
			} else {
				exits++
			}
		}
	}
}

// Each source works without the others.
func TestWatchProcesses(t *testing.T) {
	netnstest.LeakCheck(t)
	w := started(t, &Watcher{connector: connectorOf(t)}, Options{Tick: time.Hour})
	ns := netnstest.New(t)
	a := launch(t, ns, "", "wait")
	told(t, w, "a process that has started")
	a.stop()
	told(t, w, "a process that has ended")
}

func TestWatchTime(t *testing.T) {
	netnstest.LeakCheck(t)
	w := started(t, &Watcher{}, Options{Tick: time.Millisecond})
	for range 3 {
		told(t, w, "the time")
	}
}

func openFilesOf(t *testing.T) *files {
	t.Helper()
	f, err := openFiles()
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestWatchNamespaces(t *testing.T) {
	netnstest.RequireRoot(t)
	if _, err := exec.LookPath("ip"); err != nil {
		netnstest.Skip(t, "needs ip")
	}
	netnstest.LeakCheck(t)
	w := started(t, &Watcher{files: openFilesOf(t)}, Options{Tick: time.Hour})
	name := fmt.Sprintf("ebbdisc%d", os.Getpid())
	t.Cleanup(func() { exec.Command("ip", "netns", "del", name).Run() })
	if out, err := exec.Command("ip", "netns", "add", name).CombinedOutput(); err != nil {
		t.Fatalf("add namespace: %v\n%s", err, out)
	}
	told(t, w, "a new namespace")
	f, _, err := openNetNS(name)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	quiet(t, w)
	if out, err := exec.Command("ip", "netns", "del", name).CombinedOutput(); err != nil {
		t.Fatalf("delete namespace: %v\n%s", err, out)
	}
	told(t, w, "a namespace that has gone")
}

// The directory of named namespaces may be made only later, and a neighbour of it is no news.
func TestNamespaceDirectoryThatIsMadeLater(t *testing.T) {
	netnstest.LeakCheck(t)
	f := openFilesOf(t)
	defer f.Close()
	run, dir := filepath.Dir(netnsDir), netnsDir
	f.mu.Lock()
	defer f.mu.Unlock()
	f.remove(dir)
	if err := f.add(run, unix.IN_CREATE); err != nil {
		t.Fatal(err)
	}
	wd := f.watches[run]
	if f.event(wd, unix.IN_CREATE, "neighbour") {
		t.Error("a neighbour is taken for news")
	}
	_, missing := os.Stat(dir)
	if !f.event(wd, unix.IN_CREATE, filepath.Base(dir)) {
		t.Error("the directory is not taken for news")
	}
	if _, ok := f.watches[dir]; ok != (missing == nil) {
		t.Errorf("it is watched: %v, want %v", ok, missing == nil)
	}
}

func TestWatchControlGroups(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	path := slice() + "/ebbdisc-watch.service"
	group := cgroup(t, path)
	w := started(t, &Watcher{files: openFilesOf(t)}, Options{Tick: time.Hour})
	w.Follow(Workload{CgroupPath: path})
	a := launch(t, ns, group, "wait")
	told(t, w, "the first process of a control group")
	quiet(t, w)
	a.stop()
	told(t, w, "the end of the last process of a control group")
	quiet(t, w)
	if err := os.Remove(group); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(group, 0o755); err != nil {
		t.Fatal(err)
	}
	told(t, w, "a control group that is made again")
	quiet(t, w)
	w.Follow(Workload{CgroupPath: path})
	launch(t, ns, group, "wait")
	told(t, w, "the first process of a control group that was made again")
	w.Follow()
	w.files.mu.Lock()
	defer w.files.mu.Unlock()
	for path := range w.files.watches {
		if path != netnsDir && path != filepath.Dir(netnsDir) {
			t.Errorf("%s is watched by nobody's wish", path)
		}
	}
}

// A storm of processes is told no more often than every firstLook.
func TestStorm(t *testing.T) {
	netnstest.LeakCheck(t)
	w := started(t, &Watcher{connector: connectorOf(t)}, Options{Tick: time.Hour})
	begin := time.Now()
	stop, counted := make(chan struct{}), make(chan int)
	go func() {
		n := 0
		for {
			select {
			case <-w.Changed():
				n++
			case <-stop:
				counted <- n
				return
			}
		}
	}()
	for range 300 {
		if err := exec.Command("true").Run(); err != nil {
			t.Fatal(err)
		}
	}
	close(stop)
	n := <-counted
	if most := 1 + int(time.Since(begin)/firstLook); n > most {
		t.Errorf("told %d times of 300 processes, want at most %d", n, most)
	}
	told(t, w, "the end of the storm")
}

func TestWatchEnds(t *testing.T) {
	netnstest.LeakCheck(t)
	ctx, cancel := context.WithCancel(t.Context())
	w, err := Watch(ctx, Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range w.Degraded() {
		t.Log(s)
	}
	cancel()
	<-w.done
	w.Follow(Workload{CgroupPath: "/"})
	for range 2 {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	}
	if w, err = Watch(t.Context(), Options{}); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Error(err)
	}
}

// Where the kernel does not speak, it is said, and nothing else fails.
func TestDegraded(t *testing.T) {
	w := &Watcher{}
	w.lacks("this is noticed late", errors.New("no such thing"))
	w.lacks("this is noticed late", errors.New("no such thing"))
	if got := w.Degraded(); len(got) != 1 || got[0] != "this is noticed late: no such thing" {
		t.Errorf("got %q, want it once", got)
	}
}

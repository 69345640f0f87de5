// SPDX-License-Identifier: Apache-2.0

package netns_test

import (
	"errors"
	"net"
	"os"
	"runtime"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/netns"
	"github.com/ebbproxy/ebb/internal/netnstest"
)

func newNS(t *testing.T) *os.File {
	t.Helper()
	netnstest.RequireRoot(t)
	ns, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ns.Close() })
	return ns
}

func id(t *testing.T, f *os.File) netns.Identity {
	t.Helper()
	id, err := netns.ID(int(f.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func currentID(t *testing.T) netns.Identity {
	t.Helper()
	f, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	return id(t, f)
}

func TestDoEntersAndComesBack(t *testing.T) {
	ns := newNS(t)
	home := currentID(t)
	want := id(t, ns)
	if want == home {
		t.Fatalf("got a new namespace %v, want another than our own", want)
	}
	sentinel := errors.New("from inside")
	err := netns.Do(int(ns.Fd()), func() error {
		if got := currentID(t); got != want {
			t.Errorf("inside: got %v, want %v", got, want)
		}
		return sentinel
	})
	if !errors.Is(err, sentinel) {
		t.Errorf("got error %v, want %v", err, sentinel)
	}
	if got := currentID(t); got != home {
		t.Errorf("afterwards: got %v, want %v", got, home)
	}
}

func TestDoNests(t *testing.T) {
	outer, inner := newNS(t), newNS(t)
	err := netns.Do(int(outer.Fd()), func() error {
		if err := netns.Do(int(inner.Fd()), func() error {
			if got, want := currentID(t), id(t, inner); got != want {
				t.Errorf("inner: got %v, want %v", got, want)
			}
			return nil
		}); err != nil {
			return err
		}
		if got, want := currentID(t), id(t, outer); got != want {
			t.Errorf("after inner: got %v, want %v", got, want)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestDoRefusesWhatIsNoNamespace(t *testing.T) {
	netnstest.RequireRoot(t)
	f, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	ran := false
	if err := netns.Do(int(f.Fd()), func() error { ran = true; return nil }); !errors.Is(err, unix.EINVAL) {
		t.Errorf("got error %v, want %v", err, unix.EINVAL)
	}
	if ran {
		t.Error("the function ran outside the namespace")
	}
}

func TestDoPassesGoexitOn(t *testing.T) {
	ns := newNS(t)
	survived := false
	var wg sync.WaitGroup
	wg.Go(func() {
		_ = netns.Do(int(ns.Fd()), func() error { runtime.Goexit(); return nil })
		survived = true
	})
	wg.Wait()
	if survived {
		t.Error("the caller went on after its function had ended the goroutine")
	}
}

// The main thread is what other processes see as our namespace.
func TestDoLeavesMainThreadWhereItIs(t *testing.T) {
	ns := newNS(t)
	self, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 64 {
		wg.Go(func() {
			if err := netns.Do(int(ns.Fd()), func() error {
				got, err := os.Readlink("/proc/self/ns/net")
				if err == nil && got != self {
					t.Errorf("main thread: got %s, want %s", got, self)
				}
				return err
			}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

func TestSocketStaysWhereItWasMade(t *testing.T) {
	a := netnstest.New(t)
	var l net.Listener
	if err := netns.Do(a.Fd(), func() error {
		var err error
		l, err = net.Listen("tcp", "127.0.0.1:0")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if c, err := net.Dial("tcp", l.Addr().String()); err == nil {
		c.Close()
		t.Fatalf("dialled %s from outside its namespace", l.Addr())
	}
	if err := netns.Do(a.Fd(), func() error {
		c, err := net.Dial("tcp", l.Addr().String())
		if err == nil {
			c.Close()
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
}

func TestCookieTellsNamespacesApart(t *testing.T) {
	a, b := newNS(t), newNS(t)
	ca, err := netns.Cookie(int(a.Fd()))
	if errors.Is(err, unix.ENOPROTOOPT) {
		t.Skip("needs Linux 5.14 (SO_NETNS_COOKIE)")
	}
	if err != nil {
		t.Fatal(err)
	}
	cb, err := netns.Cookie(int(b.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	if ca == 0 || ca == cb {
		t.Errorf("got cookies %d and %d, want two different ones", ca, cb)
	}
	if again, err := netns.Cookie(int(a.Fd())); err != nil || again != ca {
		t.Errorf("got cookie %d (%v) the second time, want %d", again, err, ca)
	}
}

func TestOfPID(t *testing.T) {
	f, err := netns.OfPID(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if got, want := id(t, f), currentID(t); got != want {
		t.Errorf("got %v, want %v", got, want)
	}
	if _, err := netns.OfPID(-1); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got error %v, want %v", err, os.ErrNotExist)
	}
}

// Who is there already needs no privilege.
func TestDoAtHomeNeedsNoPrivilege(t *testing.T) {
	other := newNS(t)
	own, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	var there, elsewhere error
	var wg sync.WaitGroup
	wg.Go(func() {
		runtime.LockOSThread() // and it ends with the goroutine
		if unix.Gettid() == unix.Getpid() {
			// The main thread has others do it. While this one is held, another one is found.
			var inner sync.WaitGroup
			inner.Go(func() { runtime.LockOSThread(); there, elsewhere = unprivileged(t, own, other) })
			inner.Wait()
			runtime.UnlockOSThread()
			return
		}
		there, elsewhere = unprivileged(t, own, other)
	})
	wg.Wait()
	if there != nil {
		t.Errorf("in our own namespace: %v", there)
	}
	if !errors.Is(elsewhere, unix.EPERM) {
		t.Errorf("in another one: got %v, want EPERM", elsewhere)
	}
}

// unprivileged tries both namespaces on a thread that loses its capabilities for that.
func unprivileged(t *testing.T, own, other *os.File) (there, elsewhere error) {
	var none [2]unix.CapUserData
	if err := unix.Capset(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &none[0]); err != nil {
		t.Error(err)
	}
	nothing := func() error { return nil }
	return netns.Do(int(own.Fd()), nothing), netns.Do(int(other.Fd()), nothing)
}

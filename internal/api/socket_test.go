// SPDX-License-Identifier: Apache-2.0

package api

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// shortDir is a temporary directory whose path leaves room for a socket's name.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "ebbapi")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// stale leaves a socket file that nobody listens on, as a killed process does.
func stale(t *testing.T, path string) {
	t.Helper()
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	ln.SetUnlinkOnClose(false)
	if err := ln.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestListenMode(t *testing.T) {
	path := filepath.Join(shortDir(t), "a.sock")
	ln, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	fi, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if got := fi.Mode().Perm(); got != 0o660 {
		t.Errorf("mode: got %#o, want 0660", got)
	}
	if got := ln.Addr().String(); got != path {
		t.Errorf("address: got %s, want %s", got, path)
	}
	if err := errors.Join(ln.Close(), ln.Close()); err != nil {
		t.Errorf("Close: %v", err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the socket file is left after Close: %v", err)
	}
}

func TestListenReplacesOnlyTheDead(t *testing.T) {
	dir := shortDir(t)
	path := filepath.Join(dir, "a.sock")
	stale(t, path)
	ln, err := Listen(path)
	if err != nil {
		t.Fatalf("over a stale socket: %v", err)
	}
	if _, err := Listen(path); !errors.Is(err, ErrInUse) {
		t.Errorf("over a live socket: got %v, want ErrInUse", err)
	}
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatalf("the live one was harmed: %v", err)
	}
	_ = c.Close()
	if err := ln.Close(); err != nil {
		t.Fatal(err)
	}

	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	if ln, err := Listen(file); err == nil {
		_ = ln.Close()
		t.Error("over a file: got no error")
	}
	if b, err := os.ReadFile(file); err != nil || string(b) != "mine" {
		t.Errorf("the file was touched: %q, %v", b, err)
	}
	if _, err := Listen("/tmp/" + strings.Repeat("x", 200)); err == nil || !strings.Contains(err.Error(), "107") {
		t.Errorf("a path that is too long: got %v, want an error with the limit", err)
	}
}

// A socket that has replaced ours is not removed when we close.
func TestListenLeavesTheSocketOfAnother(t *testing.T) {
	path := filepath.Join(shortDir(t), "a.sock")
	ln, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	other, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := ln.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("the other's socket is gone: %v", err)
	}
}

// Anyone who can read the directory can lock it, and must not keep us from listening.
func TestListenInADirectoryThatAnotherLocks(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	ln, err := Listen(filepath.Join(dir, "a.sock"))
	if err != nil {
		t.Fatal(err)
	}
	if err := ln.Close(); err != nil {
		t.Error(err)
	}
}

// Of many that start over one stale socket exactly one gets it.
func TestListenRace(t *testing.T) {
	path := filepath.Join(shortDir(t), "a.sock")
	stale(t, path)
	const n = 16
	var (
		wg  sync.WaitGroup
		mu  sync.Mutex
		got []net.Listener
	)
	for range n {
		wg.Go(func() {
			ln, err := Listen(path)
			if err != nil {
				if !errors.Is(err, ErrInUse) {
					t.Errorf("got %v, want ErrInUse", err)
				}
				return
			}
			mu.Lock()
			defer mu.Unlock()
			got = append(got, ln)
		})
	}
	wg.Wait()
	if len(got) != 1 {
		t.Fatalf("%d of %d have the socket, want 1", len(got), n)
	}
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Errorf("the winner does not answer: %v", err)
	} else {
		_ = c.Close()
	}
	if err := got[0].Close(); err != nil {
		t.Error(err)
	}
}

func TestRunDir(t *testing.T) {
	for _, tc := range []struct {
		env  map[string]string
		uid  int
		want string
		dirs []string
	}{
		{nil, 0, "/run/ebb", []string{"/run/ebb"}},
		{map[string]string{"XDG_RUNTIME_DIR": "/run/user/0"}, 0, "/run/ebb", []string{"/run/ebb"}},
		{map[string]string{"XDG_RUNTIME_DIR": "/run/user/7"}, 7, "/run/user/7/ebb", []string{"/run/user/7/ebb", "/run/ebb"}},
		{map[string]string{"XDG_RUNTIME_DIR": "relative"}, 7, "/tmp/ebb-7", []string{"/tmp/ebb-7", "/run/ebb"}},
		{nil, 7, "/tmp/ebb-7", []string{"/tmp/ebb-7", "/run/ebb"}},
		{map[string]string{"EBB_RUN_DIR": "/x"}, 0, "/x", []string{"/x"}},
		{map[string]string{"EBB_RUN_DIR": "/x"}, 7, "/x", []string{"/x"}},
	} {
		getenv := func(k string) string { return tc.env[k] }
		if got := RunDir(getenv, tc.uid); got != tc.want {
			t.Errorf("%v uid %d: got %s, want %s", tc.env, tc.uid, got, tc.want)
		}
		if got := RunDirs(getenv, tc.uid); !equal(got, tc.dirs) {
			t.Errorf("%v uid %d: got %v, want %v", tc.env, tc.uid, got, tc.dirs)
		}
	}
}

func TestMakeRunDir(t *testing.T) {
	uid := os.Getuid()
	base := shortDir(t)
	dir := filepath.Join(base, "deep", "ebb")
	for range 2 {
		if err := MakeRunDir(dir, uid); err != nil {
			t.Fatal(err)
		}
	}
	if fi, err := os.Stat(filepath.Join(dir, "run")); err != nil || fi.Mode().Perm()&0o022 != 0 {
		t.Errorf("run: got %v, %v, want a directory that only its owner writes to", fi.Mode(), err)
	}

	link := filepath.Join(base, "link")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	if err := MakeRunDir(link, uid); !errors.Is(err, ErrUnsafeDir) {
		t.Errorf("a link: got %v, want ErrUnsafeDir", err)
	}
	open := filepath.Join(base, "open")
	if err := os.Mkdir(open, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(open, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := MakeRunDir(open, uid); !errors.Is(err, ErrUnsafeDir) {
		t.Errorf("writable by all: got %v, want ErrUnsafeDir", err)
	}
	// To any other user this directory belongs to somebody else.
	if err := MakeRunDir(dir, uid+1); !errors.Is(err, ErrUnsafeDir) {
		t.Errorf("of another user: got %v, want ErrUnsafeDir", err)
	}
}

func TestDiscover(t *testing.T) {
	dir := shortDir(t)
	if err := MakeRunDir(dir, os.Getuid()); err != nil {
		t.Fatal(err)
	}
	ln, err := Listen(RunSocket(dir, "web"))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	agent, err := Listen(filepath.Join(dir, AgentSocket))
	if err != nil {
		t.Fatal(err)
	}
	defer agent.Close()
	stale(t, RunSocket(dir, "api"))
	stale(t, filepath.Join(dir, "run", "web"+AppExt)) // of applications: nobody looks for backends there
	if err := os.WriteFile(filepath.Join(dir, "run", "note.sock"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	found, err := Discover(t.Context(), dir, filepath.Join(dir, "nothing here"))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{filepath.Join(dir, AgentSocket), RunSocket(dir, "api"), RunSocket(dir, "web")}
	var paths []string
	for _, f := range found {
		paths = append(paths, f.Path)
		dead := f.Path == RunSocket(dir, "api")
		if dead != errors.Is(f.Err, ErrNotAnswering) || dead != (f.Client == nil) {
			t.Errorf("%s: got client %v, error %v", f.Path, f.Client, f.Err)
		}
	}
	if !equal(paths, want) {
		t.Errorf("got %v, want %v", paths, want)
	}
	if _, err := Dial(t.Context(), filepath.Join(dir, "none.sock")); !errors.Is(err, unix.ENOENT) {
		t.Errorf("no socket: got %v, want ENOENT", err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package api

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// RootRunDir is where root keeps its sockets.
const RootRunDir = "/run/ebb"

// The node agent's sockets in a run directory: that of operators and that of applications.
const (
	AgentSocket = "ebb.sock"
	AppSocket   = "app.sock"
)

// AppExt is how the name of a run's socket of applications ends, beside NAME.sock for operators.
const AppExt = ".app.sock"

// maxSocketPath is what sun_path holds with its final zero byte left out (unix(7)).
const maxSocketPath = 107

// RunDir is the directory for sockets of a user: EBB_RUN_DIR if it is set, else /run/ebb for root, else
// ebb in XDG_RUNTIME_DIR, else /tmp/ebb-UID. It does not create the directory; see MakeRunDir.
func RunDir(getenv func(string) string, uid int) string {
	if d := getenv("EBB_RUN_DIR"); d != "" {
		return d
	}
	if uid == 0 {
		return RootRunDir
	}
	// XDG Base Directory Specification: a relative path must be ignored.
	if d := getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(d) {
		return filepath.Join(d, "ebb")
	}
	return "/tmp/ebb-" + strconv.Itoa(uid)
}

// RunDirs are the directories in which a user's command line looks for sockets: its own and root's.
func RunDirs(getenv func(string) string, uid int) []string {
	own := RunDir(getenv, uid)
	if own == RootRunDir || getenv("EBB_RUN_DIR") != "" {
		return []string{own}
	}
	return []string{own, RootRunDir}
}

// MakeRunDir creates dir and its folder for the sockets of `ebb run`, 0755 for root, so that the group of a
// socket can reach it, and 0700 for others. A directory that is a link, belongs to another user, or can
// be written by others is ErrUnsafeDir: there another user could put a socket of their own.
func MakeRunDir(dir string, uid int) error {
	mode := fs.FileMode(0o700)
	if uid == 0 {
		mode = 0o755
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return fmt.Errorf("create the run directory: %w", err)
	}
	for _, d := range []string{dir, filepath.Join(dir, "run")} {
		if err := os.Mkdir(d, mode); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("create the run directory: %w", err)
		}
		fi, err := os.Lstat(d)
		if err != nil {
			return fmt.Errorf("look at the run directory: %w", err)
		}
		st, ok := fi.Sys().(*syscall.Stat_t)
		switch {
		case !fi.IsDir():
			return fmt.Errorf("%s is not a directory; remove it or set EBB_RUN_DIR: %w", d, ErrUnsafeDir)
		case !ok || int(st.Uid) != uid:
			return fmt.Errorf("%s belongs to another user; remove it or set EBB_RUN_DIR: %w", d, ErrUnsafeDir)
		case fi.Mode().Perm()&0o022 != 0:
			return fmt.Errorf("%s can be written by other users (mode %#o); chmod it to %#o or set EBB_RUN_DIR: %w",
				d, fi.Mode().Perm(), mode, ErrUnsafeDir)
		}
	}
	return nil
}

// RunSocket is the path of the socket of the `ebb run` named name.
func RunSocket(dir, name string) string { return filepath.Join(dir, "run", name+".sock") }

// Listen opens a Unix socket at path with mode 0660. A socket there that nobody answers on is replaced; a live
// one is ErrInUse; anything that is not a socket is left alone and an error. Closing the listener removes
// the file if it is still its own.
func Listen(path string) (net.Listener, error) { return ListenAs(path, 0o660, -1) }

// ListenAs is Listen with another mode, and, unless it is -1, another group.
func ListenAs(path string, mode fs.FileMode, gid int) (net.Listener, error) {
	if len(path) > maxSocketPath {
		return nil, fmt.Errorf("listen on %s: the path has %d bytes, a socket's may have %d; choose a shorter one with --api or EBB_RUN_DIR",
			path, len(path), maxSocketPath)
	}
	unlock, err := lockDir(filepath.Dir(path))
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	defer unlock()
	if err := removeStale(path); err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	ln, err := listenMode(path, mode, gid)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	return ln, nil
}

// lockPatience bounds the wait for the lock of a directory. Whoever opens a socket holds it for milliseconds; another
// user, who can lock any directory that can be read, must not hold up a start for ever.
const lockPatience = 2 * time.Second

// lockDir takes an exclusive lock on the directory, so that two processes that find the same stale socket do
// not remove each other's new one. When its patience is over it does without.
func lockDir(dir string) (unlock func(), err error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for until := time.Now().Add(lockPatience); ; <-tick.C {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		busy := errors.Is(err, unix.EWOULDBLOCK) || errors.Is(err, unix.EINTR)
		switch {
		case err != nil && !busy:
			return nil, errors.Join(fmt.Errorf("lock %s: %w", dir, err), f.Close())
		case err == nil || time.Now().After(until):
			// The lock goes with the last descriptor of this open file.
			return func() { _ = f.Close() }, nil
		}
	}
}

// removeStale removes the socket at path if nobody answers on it.
func removeStale(path string) error {
	fi, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if fi.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("%s exists and is not a socket; remove it or choose another path", path)
	}
	c, err := net.Dial("unix", path)
	switch {
	case err == nil:
		_ = c.Close()
		return fmt.Errorf("another process answers there; give this one another --name or --api: %w", ErrInUse)
	case errors.Is(err, unix.EAGAIN):
		// A full backlog is alive.
		return fmt.Errorf("another process listens there and is busy: %w", ErrInUse)
	case errors.Is(err, unix.ECONNREFUSED):
		return os.Remove(path)
	}
	return err
}

// listenMode binds, sets group and mode and only then listens: until listen(2) a connect is refused, so nobody gets
// in while the mode is still what the umask made it.
func listenMode(path string, mode fs.FileMode, gid int) (_ net.Listener, err error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	f := os.NewFile(uintptr(fd), path)
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		return nil, os.NewSyscallError("bind", err)
	}
	fi, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(os.Chown(path, -1, gid), os.Chmod(path, mode)); err != nil {
		return nil, errors.Join(err, os.Remove(path))
	}
	if err := unix.Listen(fd, unix.SOMAXCONN); err != nil {
		return nil, errors.Join(os.NewSyscallError("listen", err), os.Remove(path))
	}
	ln, err := net.FileListener(f)
	if err != nil {
		return nil, errors.Join(err, os.Remove(path))
	}
	return &socketListener{Listener: ln, path: path, file: fi}, nil
}

// socketListener removes its socket file when it is closed.
type socketListener struct {
	net.Listener
	path string
	file fs.FileInfo
	once sync.Once
	err  error
}

// File is a duplicate of the socket, for another process to accept on.
func (l *socketListener) File() (*os.File, error) {
	u, ok := l.Listener.(*net.UnixListener)
	if !ok {
		return nil, fmt.Errorf("duplicate a %T: %w", l.Listener, errors.ErrUnsupported)
	}
	return u.File()
}

// Close closes the socket and removes its file, unless another process has put its own there.
func (l *socketListener) Close() error {
	l.once.Do(func() {
		var rm error
		if fi, err := os.Lstat(l.path); err == nil && os.SameFile(fi, l.file) {
			rm = os.Remove(l.path)
		}
		l.err = errors.Join(rm, l.Listener.Close())
	})
	return l.err
}

// sockets are the paths of the operators' sockets in a run directory, the agent's first.
func sockets(dir string) ([]string, error) {
	var out []string
	isSocket := func(path string) bool {
		fi, err := os.Lstat(path)
		return err == nil && fi.Mode().Type() == fs.ModeSocket
	}
	if p := filepath.Join(dir, AgentSocket); isSocket(p) {
		out = append(out, p)
	}
	entries, err := os.ReadDir(filepath.Join(dir, "run"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return out, err
	}
	for _, e := range entries {
		if p := filepath.Join(dir, "run", e.Name()); strings.HasSuffix(p, ".sock") && !strings.HasSuffix(p, AppExt) && isSocket(p) {
			out = append(out, p)
		}
	}
	return out, nil
}

// SPDX-License-Identifier: Apache-2.0

package front

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/api"
)

// secrets are copies in memory of the files that prove who is who over TCP: a front may not read the originals. When one of
// those changes, so does its copy, which a front sees as it would see the file.
type secrets struct {
	paths  api.Credentials // as a front opens them
	names  []string        // of the originals
	files  []*os.File
	stamps []string
}

// maxSecret bounds one file, in bytes.
const maxSecret = 1 << 20

// openSecrets copies the files. fd is the descriptor of the first one in a front.
func openSecrets(c api.Credentials, fd int) (*secrets, error) {
	s := &secrets{paths: c}
	for _, path := range []*string{&s.paths.Cert, &s.paths.Key, &s.paths.ClientCA, &s.paths.TokenFile} {
		if *path == "" {
			continue
		}
		n, err := unix.MemfdCreate("ebb", unix.MFD_CLOEXEC)
		if err != nil {
			s.close()
			return nil, fmt.Errorf("copy %s: %w", *path, err)
		}
		// For any user: no other process has its descriptor.
		f := os.NewFile(uintptr(n), "copy")
		s.names, s.files, s.stamps = append(s.names, *path), append(s.files, f), append(s.stamps, "")
		if err := f.Chmod(0o444); err != nil {
			s.close()
			return nil, fmt.Errorf("copy %s: %w", *path, err)
		}
		*path = "/proc/self/fd/" + strconv.Itoa(fd+len(s.files)-1)
	}
	s.refresh(nil)
	return s, nil
}

func (s *secrets) close() {
	for _, f := range s.files {
		_ = f.Close() // nothing was written that anybody keeps
	}
}

// follow refreshes until ctx is over.
func (s *secrets) follow(ctx context.Context, log *slog.Logger) {
	if len(s.files) == 0 {
		return
	}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			s.refresh(log)
		case <-ctx.Done():
			return
		}
	}
}

// refresh copies what has changed. One that cannot be read is empty, which is no certificate and no token.
func (s *secrets) refresh(log *slog.Logger) {
	for i, name := range s.names {
		stamp := "none"
		if fi, err := os.Stat(name); err == nil {
			st, _ := fi.Sys().(*syscall.Stat_t)
			stamp = fmt.Sprint(st.Ino, fi.Size(), fi.ModTime().UnixNano(), st.Ctim)
		}
		if stamp == s.stamps[i] {
			continue
		}
		b, err := readSecret(name)
		if err == nil {
			_, err = s.files[i].WriteAt(b, 0)
		}
		if err := errors.Join(err, s.files[i].Truncate(int64(len(b)))); err != nil && log != nil {
			log.Warn("copy a file for the front", "path", name, "err", err)
		}
		s.stamps[i] = stamp
	}
}

func readSecret(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, maxSecret))
}

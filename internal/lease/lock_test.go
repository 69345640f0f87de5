// SPDX-License-Identifier: Apache-2.0

package lease

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
)

// One process at a time has a directory, and the next one is told which.
func TestLock(t *testing.T) {
	// On tmpfs, where the kernel's list of locks and stat(2) tell the same device number, as on a bpffs.
	dir, err := os.MkdirTemp("/dev/shm", "ebblock")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Remove(dir) })
	f, err := Lock(dir)
	if err != nil {
		t.Fatal(err)
	}
	_, err = Lock(dir)
	if want := fmt.Sprintf("by process %d", os.Getpid()); !errors.Is(err, ErrHeld) || !strings.Contains(err.Error(), want) {
		t.Errorf("got %v, want ErrHeld %s", err, want)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if f, err = Lock(dir); err != nil {
		t.Fatalf("after its release: %v", err)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}

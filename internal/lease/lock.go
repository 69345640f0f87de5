// SPDX-License-Identifier: Apache-2.0

package lease

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Lock makes the calling process the only one that has a directory, of any file system and whatever is in it, until the file
// is closed or the process ends. There is no record and no standby: a process that has it and hangs keeps it. The error wraps
// [ErrHeld] while another one has it, and names that one where the kernel tells.
func Lock(dir string) (*os.File, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("own %s: %w", dir, err)
	}
	err = flock(f, unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = ErrHeld
		if pid := holder(f); pid != 0 {
			err = fmt.Errorf("%w by process %d", ErrHeld, pid)
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("own %s: %w", dir, err), f.Close())
	}
	return f, nil
}

// holder is the process that has locked a file, as proc_locks(5) tells; 0 if it does not, as of one in another pid namespace.
func holder(f *os.File) int {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return 0
	}
	at := fmt.Sprintf("%02x:%02x:%d", unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino)
	locks, err := os.Open("/proc/locks")
	if err != nil {
		return 0
	}
	defer locks.Close()
	for sc := bufio.NewScanner(locks); sc.Scan(); {
		// 12: FLOCK  ADVISORY  WRITE 4711 00:1f:10086 0 EOF
		if l := strings.Fields(sc.Text()); len(l) == 8 && l[1] == "FLOCK" && l[5] == at {
			pid, _ := strconv.Atoi(l[4])
			return pid
		}
	}
	return 0
}

// SPDX-License-Identifier: Apache-2.0

package lease

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/probes"
)

// recordSize is more than the longest record takes. A record is always as long, so that to write it anew needs no space.
const recordSize = 192

// blank is what is left of a record that was given up.
var blank = bytes.Repeat([]byte{' '}, recordSize)

// record is what the owner writes into the file, as one line of text.
type record struct {
	pid     int
	start   uint64 // clock ticks since boot, probes.Started
	pidns   uint64 // inode of the pid namespace in which pid is meant
	boot    string // /proc/sys/kernel/random/boot_id
	renewed uint64 // ns since boot, CLOCK_BOOTTIME; compared for being another, never with a clock
}

// self is the record of the calling process.
func self() (record, error) {
	r := record{pid: os.Getpid()}
	var err error
	if r.start, err = probes.Started(r.pid); err != nil {
		return r, err
	}
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return r, fmt.Errorf("read boot id: %w", err)
	}
	r.boot = strings.TrimSpace(string(b))
	var st unix.Stat_t
	if err := unix.Stat("/proc/self/ns/pid", &st); err != nil {
		return r, fmt.Errorf("stat pid namespace: %w", err)
	}
	r.pidns = st.Ino
	return r, nil
}

func now() (uint64, error) {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return 0, fmt.Errorf("read boot clock: %w", err)
	}
	return uint64(ts.Nano()), nil
}

const recordFormat = "ebb-lease v1 pid=%d start_ticks=%d pidns=%d boot=%s renewed_boot_ns=%d"

func (r record) encode() []byte {
	text := fmt.Sprintf(recordFormat, r.pid, r.start, r.pidns, r.boot, r.renewed)
	text += fmt.Sprintf(" crc=%08x", crc32.ChecksumIEEE([]byte(text)))
	return fmt.Appendf(nil, "%-*s\n", recordSize-1, text)
}

func decode(b []byte) (record, error) {
	text, sum, ok := strings.Cut(strings.TrimSpace(string(b)), " crc=")
	if !ok || sum != fmt.Sprintf("%08x", crc32.ChecksumIEEE([]byte(text))) {
		return record{}, errRecord
	}
	var r record
	if _, err := fmt.Sscanf(text, recordFormat, &r.pid, &r.start, &r.pidns, &r.boot, &r.renewed); err != nil || r.pid <= 0 {
		return record{}, errRecord
	}
	return r, nil
}

// readPath reads the record of a file. One that is being written, or was given up, is errRecord.
func readPath(path string) (record, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return record{}, err
	}
	defer f.Close()
	b := make([]byte, recordSize)
	n, err := f.ReadAt(b, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return record{}, fmt.Errorf("read lease: %w", err)
	}
	return decode(b[:n])
}

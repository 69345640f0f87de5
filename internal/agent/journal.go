// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"sync"

	"github.com/ebbproxy/ebb/drain"
	"golang.org/x/sys/unix"
)

// journalVersion is the layout of a line. A reader refuses a newer one rather than guess.
const journalVersion = 1

// run is the journal's record of one supervised CMD: enough for a later process to recognise it.
type run struct {
	Version int      `json:"version"`
	Type    string   `json:"type"` // always "run"
	Name    string   `json:"name"`
	Gen     uint64   `json:"gen"`
	Backend uint64   `json:"backend_id"`
	PID     int      `json:"pid"`
	Start   uint64   `json:"start_ticks"` // field 22 of /proc/PID/stat: with the boot id it tells a process from its pid's next owner
	BootID  string   `json:"boot_id"`
	Argv    []string `json:"argv"`
	Match   string   `json:"match,omitempty"` // by what it was found; empty: it was started
}

// journal is an append-only file of JSON lines, each "CRC32 JSON\n", fsynced before append returns.
// A torn last line, which a crash in the middle of a write leaves, is cut off when the file is opened.
// Its methods may be called from any goroutine.
type journal struct {
	path    string
	mu      sync.Mutex
	f       file
	owed    *run // could not be written in its time: it goes before whatever comes next
	unnamed bool // that path means f may not be on the disk yet: what was appended could be lost with the name
}

// file is what a journal needs of an *os.File.
type file interface {
	io.ReadWriteSeeker
	io.Closer
	Sync() error
	Truncate(size int64) error
}

// compactAt is the size in bytes from which a journal is rewritten when a drain is over: a hundred drains of a process that
// lives on, and so little that the next owner reads it in no time.
const compactAt = 64 << 10

// history is what a journal says of the past.
type history struct {
	lastRun   *run
	lastGen   uint64
	openDrain *drain.Record // begun and not ended, with the latest deadline and phase
	ended     *drain.Record // the last one that has ended since the run began
	flushed   bool          // openDrain's flush was journalled
	torn      bool          // a torn last line was cut off
	late      *lateRecord   // what happens to late connections, nil if nothing was said
}

// openJournal opens or makes the journal at path and reads its history. ErrJournal means that the file holds
// something that no crash explains; it is left as it is. Its directory is for the caller to sync, once for all journals in
// it: the entry too must survive, or the first record would be lost with the name.
func openJournal(path string) (*journal, history, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, history{}, fmt.Errorf("open journal: %w", err)
	}
	h, good, err := readJournal(f)
	if err != nil {
		return nil, history{}, errors.Join(fmt.Errorf("read journal %s: %w (move it away to start afresh)", path, err), f.Close())
	}
	if err := f.Truncate(good); err != nil {
		return nil, history{}, errors.Join(fmt.Errorf("cut torn record off journal: %w", err), f.Close())
	}
	if _, err := f.Seek(good, io.SeekStart); err != nil {
		return nil, history{}, errors.Join(fmt.Errorf("seek journal: %w", err), f.Close())
	}
	return &journal{path: path, f: f}, h, nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("open directory of journal: %w", err)
	}
	err = d.Sync()
	if errors.Is(err, unix.EINVAL) { // some filesystems cannot sync a directory
		err = nil
	}
	return errors.Join(err, d.Close())
}

// readJournal returns the history and the offset up to which the file is whole.
func readJournal(r io.Reader) (history, int64, error) {
	var h history
	var good int64
	br := bufio.NewReader(r)
	for {
		line, err := br.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			h.torn = len(line) > 0
			return h, good, nil
		}
		if err != nil {
			return h, good, err
		}
		body, ok := checkLine(line)
		if !ok {
			// Only the last line can be torn. Damage before it means lost records, and a lost end or
			// begin would be taken for a living or a finished drain.
			if _, err := br.Peek(1); errors.Is(err, io.EOF) {
				h.torn = true
				return h, good, nil
			}
			return h, good, fmt.Errorf("%w at byte %d", ErrJournal, good)
		}
		if err := h.apply(body); err != nil {
			return h, good, fmt.Errorf("record at byte %d: %w", good, err)
		}
		good += int64(len(line))
	}
}

func checkLine(line []byte) ([]byte, bool) {
	sum, body, ok := bytes.Cut(bytes.TrimSuffix(line, []byte{'\n'}), []byte{' '})
	if !ok {
		return nil, false
	}
	want, err := strconv.ParseUint(string(sum), 16, 32)
	return body, err == nil && uint32(want) == crc32.ChecksumIEEE(body)
}

func (h *history) apply(body []byte) error {
	var head struct {
		Version int    `json:"version"`
		Type    string `json:"type"`
	}
	if err := json.Unmarshal(body, &head); err != nil {
		return fmt.Errorf("decode: %w", err)
	}
	if head.Version > journalVersion {
		return fmt.Errorf("%w: %w: it has %d, this ebb reads up to %d; start the newer version", ErrJournal, errNewer, head.Version, journalVersion)
	}
	if head.Type == "run" {
		var r run
		if err := json.Unmarshal(body, &r); err != nil {
			return fmt.Errorf("decode run: %w", err)
		}
		h.lastRun, h.lastGen = &r, max(h.lastGen, r.Gen)
		h.openDrain, h.flushed, h.late = nil, false, nil
		return nil
	}
	if head.Type == "late" {
		var r lateRecord
		if err := json.Unmarshal(body, &r); err != nil {
			return fmt.Errorf("decode late: %w", err)
		}
		h.late = &r
		return nil
	}
	var r drain.Record
	if err := json.Unmarshal(body, &r); err != nil {
		return fmt.Errorf("decode %s: %w", head.Type, err)
	}
	h.lastGen = max(h.lastGen, r.Gen)
	switch r.Type {
	case "end", "undrain":
		h.openDrain, h.flushed, h.ended = nil, false, &r
	case "flush":
		h.openDrain, h.flushed = &r, true
	default:
		h.openDrain = &r
	}
	return nil
}

// append writes one record and returns when it is on the disk. After an error it is not in the journal.
func (j *journal) append(record any) error {
	line, err := encode(record)
	if err != nil {
		return err
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.owed != nil {
		if err := j.begin(*j.owed); err != nil {
			return err
		}
	}
	if err := j.name(); err != nil {
		return err
	}
	size, err := j.write(line)
	if err != nil {
		return err
	}
	if r, ok := record.(drain.Record); ok && (r.Type == "end" || r.Type == "undrain") && size > compactAt {
		// The record is on the disk already. If this fails the journal is as long as before, and the next end tries again.
		_ = j.compact(line)
	}
	return nil
}

func encode(record any) ([]byte, error) {
	body, err := json.Marshal(record)
	if err != nil {
		return nil, fmt.Errorf("encode record: %w", err)
	}
	return fmt.Appendf(nil, "%08x %s\n", crc32.ChecksumIEEE(body), body), nil
}

// write appends lines and returns the size of the file. The caller holds mu.
func (j *journal) write(lines []byte) (size int64, err error) {
	at, err := j.f.Seek(0, io.SeekCurrent)
	if err != nil {
		return 0, fmt.Errorf("journal: %w", err)
	}
	if _, err = j.f.Write(lines); err != nil {
		err = fmt.Errorf("write journal: %w", err)
	} else if err = j.f.Sync(); err != nil {
		err = fmt.Errorf("sync journal: %w", err)
	}
	if err != nil {
		// A half-written line must not stand before the next one, and a whole one must not be taken for what has happened:
		// whoever appends is told that it has not.
		terr := j.f.Truncate(at)
		_, serr := j.f.Seek(at, io.SeekStart)
		return 0, errors.Join(err, terr, serr)
	}
	return at + int64(len(lines)), nil
}

// restart replaces the journal by one that begins with this run: nothing of the runs before is asked for any more but
// their highest generation, which the new one exceeds. What cannot be written is tried again before the next record:
// without the run that record would be of the one before.
func (j *journal) restart(r run) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.begin(r)
}

// begin is restart; the caller holds mu.
func (j *journal) begin(r run) error {
	j.owed = &r
	line, err := encode(r)
	if err != nil {
		return err
	}
	if err := j.replace(line); err != nil {
		return err
	}
	j.owed = nil
	return j.name()
}

// compact leaves out the drains before the last one, which has ended with the line: what is asked for is the run, what happens
// to late connections, and the generation. The caller holds mu.
func (j *journal) compact(last []byte) error {
	if _, err := j.f.Seek(0, io.SeekStart); err != nil {
		return err
	}
	h, _, err := readJournal(j.f)
	if _, serr := j.f.Seek(0, io.SeekEnd); err != nil || serr != nil || h.lastRun == nil || h.openDrain != nil {
		return errors.Join(err, serr)
	}
	lines, err := encode(h.lastRun)
	if err != nil {
		return err
	}
	if h.late != nil {
		line, err := encode(h.late)
		if err != nil {
			return err
		}
		lines = append(lines, line...)
	}
	if err := j.replace(append(lines, last...)); err != nil {
		return err
	}
	return j.name()
}

// replace puts a journal of these lines in the place of the present one. After a crash either file is there, whole. The caller
// holds mu.
func (j *journal) replace(lines []byte) error {
	path := j.path + ".new"
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return fmt.Errorf("replace journal: %w", err)
	}
	fresh := &journal{f: f}
	if _, err := fresh.write(lines); err != nil {
		return errors.Join(err, f.Close(), os.Remove(path))
	}
	if err := os.Rename(path, j.path); err != nil {
		return errors.Join(fmt.Errorf("replace journal: %w", err), f.Close(), os.Remove(path))
	}
	old := j.f
	j.f, j.unnamed = f, true
	return old.Close()
}

// name has it on the disk that the path means the present file. The caller holds mu.
func (j *journal) name() error {
	if !j.unnamed {
		return nil
	}
	err := syncDir(filepath.Dir(j.path))
	j.unnamed = err != nil
	return err
}

func (j *journal) close() error { return j.f.Close() }

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
}

// journal is an append-only file of JSON lines, each "CRC32 JSON\n", fsynced before append returns.
// A torn last line, which a crash in the middle of a write leaves, is cut off when the file is opened.
// Its methods may be called from any goroutine.
type journal struct {
	path string
	mu   sync.Mutex
	f    *os.File
	owed *run // could not be written in its time: it goes before whatever comes next
}

// history is what a journal says of the past.
type history struct {
	lastRun   *run
	lastGen   uint64
	openDrain *drain.Record // begun and not ended, with the latest deadline and phase
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
		h.openDrain, h.flushed = nil, false
	case "flush":
		h.openDrain, h.flushed = &r, true
	default:
		h.openDrain = &r
	}
	return nil
}

// append writes one record and returns when it is on the disk.
func (j *journal) append(record any) error {
	body, err := json.Marshal(record)
	if err != nil {
		return fmt.Errorf("encode record: %w", err)
	}
	line := fmt.Appendf(nil, "%08x %s\n", crc32.ChecksumIEEE(body), body)
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.owed != nil {
		if err := j.begin(*j.owed); err != nil {
			return err
		}
	}
	at, err := j.f.Seek(0, io.SeekCurrent)
	if err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	if _, err := j.f.Write(line); err != nil {
		// A half-written line must not stand before the next one.
		_, serr := j.f.Seek(at, io.SeekStart)
		return errors.Join(fmt.Errorf("write journal: %w", err), j.f.Truncate(at), serr)
	}
	if err := j.f.Sync(); err != nil {
		return fmt.Errorf("sync journal: %w", err)
	}
	return nil
}

// restart replaces the journal by one that begins with this run: nothing of the runs before is asked for any more but
// their highest generation, which the new one exceeds. After a crash either file is there, whole. What cannot be written is
// tried again before the next record: without the run that record would be of the one before.
func (j *journal) restart(r run) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.begin(r)
}

// begin is restart; the caller holds mu.
func (j *journal) begin(r run) error {
	j.owed = &r
	path := j.path + ".new"
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return fmt.Errorf("begin journal: %w", err)
	}
	fresh := &journal{path: j.path, f: f}
	if err := fresh.append(r); err != nil {
		return errors.Join(err, f.Close(), os.Remove(path))
	}
	if err := os.Rename(path, j.path); err != nil {
		return errors.Join(fmt.Errorf("begin journal: %w", err), f.Close(), os.Remove(path))
	}
	old := j.f
	j.f, j.owed = f, nil
	return errors.Join(syncDir(filepath.Dir(j.path)), old.Close())
}

func (j *journal) close() error { return j.f.Close() }

// SPDX-License-Identifier: Apache-2.0

package session

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/ebbproxy/ebb/internal/api"
)

// fileLayout is the layout of the file. One of another is not read.
const fileLayout = 1

// state is what a book keeps, as it is in its file.
type state struct {
	Layout   int        `json:"layout"`
	Gen      uint64     `json:"gen"`
	Boot     string     `json:"boot_id"`
	Unknown  bool       `json:"unknown,omitempty"`  // a file of before could not be read, and Lost has not passed since
	Over     bool       `json:"over,omitempty"`     // the generation is, and everybody was told
	Told     *told      `json:"told,omitempty"`     // the last drain that applications were told of
	Extended string     `json:"extended,omitempty"` // the last drain that an application has extended
	Met      *met       `json:"met,omitempty"`
	Sessions []*session `json:"sessions"` // in the order in which they were opened
}

// session is one registration.
type session struct {
	ID        string          `json:"session"`
	Role      api.SessionRole `json:"role"`
	Version   int64           `json:"version,omitempty"`
	PID       int             `json:"pid"`
	Start     uint64          `json:"start_ticks,omitempty"` // of the process; 0: not known
	Bound     bool            `json:"bound,omitempty"`
	Since     time.Time       `json:"since"`
	Remaining *int64          `json:"remaining,omitempty"`
	Seq       uint64          `json:"seq"`
	Acked     uint64          `json:"acked"`
	Flushed   string          `json:"flushed,omitempty"` // the last drain whose flush it has answered
	Holds     []api.Lease     `json:"holds,omitempty"`
	Events    []event         `json:"events,omitempty"` // not acknowledged

	health  api.Health
	heard   time.Duration // on the book's clock
	heardAt time.Time
	stream  uint64             // its reader
	mute    bool               // it has said nothing since it was opened: perhaps nobody knows of it
	unwatch context.CancelFunc // nil: its process is not watched
}

// event is one that waits to be acknowledged.
type event struct {
	api.SessionEvent
	Until time.Time `json:"until,omitzero"` // what time_left_ms counts down to
}

// lives reports whether it is an application's that is not lost.
func (s *session) lives() bool { return s.Role == api.RoleApp && s.health != api.HealthLost }

// of reports whether a process has registered it; a start of 0 is not known.
func (s *session) of(pid int, start uint64) bool {
	return s.PID == pid && (start == 0 || s.Start == 0 || start == s.Start)
}

// lease is the index of a lease by id, or −1.
func (s *session) lease(id string) int {
	return slices.IndexFunc(s.Holds, func(l api.Lease) bool { return l.ID == id })
}

// leases are its holds, never nil.
func (s *session) leases() []api.Lease { return append([]api.Lease{}, s.Holds...) }

var errFile = errors.New("the file of sessions cannot be read")

// decode reads a file.
func decode(data []byte) (state, error) {
	var head struct {
		Layout int `json:"layout"`
	}
	if err := json.Unmarshal(data, &head); err != nil {
		return state{}, fmt.Errorf("%w: %w", errFile, err)
	}
	if head.Layout != fileLayout {
		return state{}, fmt.Errorf("%w: its layout is %d, not %d", errFile, head.Layout, fileLayout)
	}
	var st state
	if err := json.Unmarshal(data, &st); err != nil {
		return state{}, fmt.Errorf("%w: %w", errFile, err)
	}
	if len(st.Sessions) > maxSessions {
		return state{}, fmt.Errorf("%w: it has %d sessions", errFile, len(st.Sessions))
	}
	ids := make(map[string]bool)
	for _, s := range st.Sessions {
		if err := s.check(); err != nil {
			return state{}, fmt.Errorf("%w: %w", errFile, err)
		}
		if ids[s.ID] {
			return state{}, fmt.Errorf("%w: session %s is there twice", errFile, s.ID)
		}
		ids[s.ID] = true
	}
	return st, nil
}

// check finds what no book has written.
func (s *session) check() error {
	if s == nil || s.ID == "" || s.Role != api.RoleApp && s.Role != api.RoleHolder {
		return errors.New("a session without id or role")
	}
	if s.Acked > s.Seq || len(s.Events) > maxEvents || len(s.Holds) > maxHolds {
		return fmt.Errorf("session %s has numbers that do not fit", s.ID)
	}
	last := s.Acked
	for _, e := range s.Events {
		if e.Seq <= last || e.Seq > s.Seq {
			return fmt.Errorf("event %d of session %s is out of order", e.Seq, s.ID)
		}
		last = e.Seq
	}
	return nil
}

// restore reads the file, once.
func (b *Book) restore() {
	b.state = state{Layout: fileLayout, Gen: b.o.Gen, Boot: b.o.boot}
	if b.o.File == "" {
		return
	}
	data, err := os.ReadFile(b.o.File)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	var st state
	if err == nil {
		st, err = decode(data)
	}
	if err != nil {
		if aside := os.Rename(b.o.File, beside(b.o.File, "bad")); aside != nil {
			err = errors.Join(err, aside)
		}
		b.Unknown, b.changed = true, true
		b.warn("sessions of before are not known, so the flush is held until they have had the time to come back", err)
		_ = b.save() // it is tried again
		return
	}
	if st.Gen != b.o.Gen || st.Boot != b.o.boot {
		return // of processes that are gone
	}
	b.state, b.changed = st, true
	for _, s := range slices.Clone(b.Sessions) {
		s.health, s.heardAt = api.HealthOK, b.made
		if start := b.started(s.PID); s.Bound && start != 0 && s.Start != 0 && start != s.Start {
			b.drop(s, "its process has ended")
		}
	}
	b.log.Info("sessions restored", "sessions", len(b.Sessions))
}

// save writes the file. That a process dies it survives; the end of the machine ends the sessions too, so it is not synced.
func (b *Book) save() error {
	var err error
	if b.o.File != "" {
		err = b.write()
	}
	b.owed, b.wrote = false, time.Now()
	if b.dirty = err != nil; !b.dirty {
		b.failed = false
		return nil
	}
	if !b.failed {
		b.failed = true
		b.warn("sessions cannot be kept: a restart would not know what was told", err)
	}
	return err
}

func (b *Book) write() error {
	var data bytes.Buffer
	enc := json.NewEncoder(&data)
	enc.SetEscapeHTML(false) // six bytes for one that an application has chosen
	if err := enc.Encode(b.state); err != nil {
		return fmt.Errorf("encode sessions: %w", err)
	}
	next := beside(b.o.File, "new")
	if err := os.WriteFile(next, data.Bytes(), 0o600); err != nil {
		return fmt.Errorf("write sessions: %w", err)
	}
	if err := os.Rename(next, b.o.File); err != nil {
		return fmt.Errorf("write sessions: %w", err)
	}
	return nil
}

// beside is a file in the same directory that can be no other backend's, since no name begins with a dot.
func beside(file, what string) string {
	return filepath.Join(filepath.Dir(file), "."+what+"."+filepath.Base(file))
}

func bootID() (string, error) {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read boot id: %w", err)
	}
	return strings.TrimSpace(string(id)), nil
}

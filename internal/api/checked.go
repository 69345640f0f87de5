// SPDX-License-Identifier: Apache-2.0

package api

import (
	"cmp"
	"context"
	"fmt"

	"github.com/ebbproxy/ebb/drain"
)

// Checked is src behind the checks that a [Server] makes of a request, for the owner of backends whose server is another
// process, which it does not trust.
func Checked(src Source) Source {
	if ss, ok := src.(Sessions); ok {
		return checkedSessions{checked{src}, ss}
	}
	return checked{src}
}

type checked struct{ Source }

// checkedSessions is checked for a Source that has applications.
type checkedSessions struct {
	checked
	Sessions
}

// maxBy bounds who asks, as maxReason bounds why: both are written into the journal.
const maxBy = 256

func check(r interface{ check() error }, by string) error {
	if len(by) > maxBy {
		return fmt.Errorf("%w: who asks has %d bytes, at most %d fit", ErrNotPossible, len(by), maxBy)
	}
	if err := r.check(); err != nil {
		return fmt.Errorf("%w: %w", ErrNotPossible, err)
	}
	return nil
}

// Drain implements Source.
func (c checked) Drain(ctx context.Context, name string, r DrainRequest) (Drain, error) {
	switch r.Cause {
	case drain.CauseOperator, drain.CauseApp, drain.CausePrestop:
	default:
		return Drain{}, fmt.Errorf("%w: %q is no cause of a request", ErrNotPossible, string(r.Cause))
	}
	if err := check(&r, r.By); err != nil {
		return Drain{}, err
	}
	return c.Source.Drain(ctx, name, r)
}

// Undrain implements Source.
func (c checked) Undrain(ctx context.Context, name string, r UndrainRequest) (Drain, error) {
	if err := check(&r, r.By); err != nil {
		return Drain{}, err
	}
	return c.Source.Undrain(ctx, name, r)
}

// Extend implements Source.
func (c checked) Extend(ctx context.Context, name string, r ExtendRequest) (Drain, error) {
	if err := check(&r, r.By); err != nil {
		return Drain{}, err
	}
	return c.Source.Extend(ctx, name, r)
}

// Cut implements Source.
func (c checked) Cut(ctx context.Context, name string, r CutRequest) (Drain, error) {
	if err := check(&r, r.By); err != nil {
		return Drain{}, err
	}
	return c.Source.Cut(ctx, name, r)
}

// OpenSession implements Sessions.
func (c checkedSessions) OpenSession(ctx context.Context, backend string, p Process, r SessionRequest) (Session, error) {
	if err := cmp.Or(p.check(), r.check()); err != nil {
		return Session{}, fmt.Errorf("%w: %w", ErrNotPossible, err)
	}
	return c.Sessions.OpenSession(ctx, backend, p, r)
}

// SessionCall implements Sessions.
func (c checkedSessions) SessionCall(ctx context.Context, backend, id string, p Process, q SessionCall) (Session, error) {
	if err := cmp.Or(p.check(), checkSessionID(id), q.check()); err != nil {
		return Session{}, fmt.Errorf("%w: %w", ErrNotPossible, err)
	}
	return c.Sessions.SessionCall(ctx, backend, id, p, q)
}

// SessionEvents implements Sessions.
func (c checkedSessions) SessionEvents(ctx context.Context, backend, id string, p Process, from, stream uint64) (SessionBatch, error) {
	if err := cmp.Or(p.check(), checkSessionID(id)); err != nil {
		return SessionBatch{}, fmt.Errorf("%w: %w", ErrNotPossible, err)
	}
	return c.Sessions.SessionEvents(ctx, backend, id, p, from, stream)
}

func (p Process) check() error {
	if p.PID <= 0 || p.UID < 0 {
		return fmt.Errorf("process %d of user %d is none", p.PID, p.UID)
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"fmt"

	"github.com/ebbproxy/ebb/drain"
)

// Checked is src behind the checks that a [Server] makes of a request, for the owner of backends whose server is another
// process, which it does not trust.
func Checked(src Source) Source { return checked{src} }

type checked struct{ Source }

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

// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/ebbproxy/ebb/internal/api"
)

// roster is the api.Source of the backends of one process, in the order in which they are shown. A request that comes
// while nothing drains costs one walk for each backend that has connections, and only when somebody asks.
type roster func() []*member

var _ api.Source = roster(nil)

// only is the roster of one.
func only(m *member) roster { return func() []*member { return []*member{m} } }

func (r roster) find(name string) (*member, error) {
	ms := r()
	names := make([]string, len(ms))
	for i, m := range ms {
		if m.name == name {
			return m, nil
		}
		names[i] = m.name
	}
	if len(names) == 1 {
		return nil, fmt.Errorf("%w: %q is not run here", api.ErrUnknown, name)
	}
	return nil, fmt.Errorf("%w: %q is none of %s", api.ErrUnknown, name, strings.Join(names, ", "))
}

// Backends implements api.Source.
func (r roster) Backends(ctx context.Context) []api.Backend {
	ms := r()
	bs := make([]api.Backend, len(ms))
	g := &glance{}
	for i, m := range ms {
		bs[i] = m.view(ctx, false, g)
	}
	return bs
}

// Backend implements api.Source.
func (r roster) Backend(ctx context.Context, name string) (api.Backend, error) {
	m, err := r.find(name)
	if err != nil {
		return api.Backend{}, err
	}
	return m.view(ctx, true, nil), nil
}

// Stragglers implements api.Source.
func (r roster) Stragglers(ctx context.Context, name string, n int) ([]api.Straggler, error) {
	m, err := r.find(name)
	if err != nil {
		return nil, err
	}
	return m.stragglers(ctx, n)
}

// Drain implements api.Source.
func (r roster) Drain(ctx context.Context, name string, q api.DrainRequest) (api.Drain, error) {
	m, err := r.find(name)
	if err != nil {
		return api.Drain{}, err
	}
	return m.beginDrain(ctx, q.Cause, q)
}

// Undrain implements api.Source.
func (r roster) Undrain(ctx context.Context, name string, q api.UndrainRequest) (api.Drain, error) {
	m, err := r.find(name)
	if err != nil {
		return api.Drain{}, err
	}
	return m.undrain(ctx, q)
}

// Extend implements api.Source.
func (r roster) Extend(ctx context.Context, name string, q api.ExtendRequest) (api.Drain, error) {
	m, err := r.find(name)
	if err != nil {
		return api.Drain{}, err
	}
	return m.extend(ctx, q)
}

// Cut implements api.Source.
func (r roster) Cut(ctx context.Context, name string, q api.CutRequest) (api.Drain, error) {
	m, err := r.find(name)
	if err != nil {
		return api.Drain{}, err
	}
	return m.cut(ctx, q)
}

// Drains implements api.Source.
func (r roster) Drains(context.Context) []api.Drain {
	var ds []api.Drain
	for _, m := range r() {
		ds = append(ds, m.past()...)
	}
	slices.SortStableFunc(ds, func(a, b api.Drain) int { return cmp.Compare(b.Begun.UnixNano(), a.Begun.UnixNano()) })
	return ds
}

// DrainByID implements api.Source.
func (r roster) DrainByID(ctx context.Context, id string) (api.Drain, error) {
	for _, d := range r.Drains(ctx) {
		if d.ID == id {
			return d, nil
		}
	}
	return api.Drain{}, fmt.Errorf("%w: %s", api.ErrUnknownDrain, id)
}

// Ready implements api.Source.
func (r roster) Ready(ctx context.Context) error {
	var errs []error
	for _, m := range r() {
		errs = append(errs, m.life().serves(ctx, m.name))
	}
	return errors.Join(errs...)
}

// BackendReady implements api.Source.
func (r roster) BackendReady(ctx context.Context, name string) error {
	m, err := r.find(name)
	if err != nil {
		return err
	}
	return m.life().serves(ctx, name)
}

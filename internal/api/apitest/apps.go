// SPDX-License-Identifier: Apache-2.0

package apitest

import (
	"context"
	"fmt"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/session"
)

// Apps is a Source whose backends have applications: each has a book of sessions, which a test tells what happens.
type Apps struct {
	*Source
	// Before is called at the beginning of each method of api.Sessions with the name of the method, or the operation of a
	// call. An error is the answer. It may wait; nil does nothing.
	Before func(ctx context.Context, op, backend string) error

	books map[string]*session.Book
}

var _ api.Sessions = (*Apps)(nil)

// NewApps returns an Apps with these backends. Of o the thresholds count.
func NewApps(log *api.Log, o session.Options, backends ...api.Backend) (*Apps, error) {
	a := &Apps{Source: New(log, backends...), books: make(map[string]*session.Book)}
	o.Emit = func(ev drain.Event) { log.Publish(ev) }
	for _, b := range backends {
		o.Backend, o.Service, o.Gen = b.Name, b.Service, b.Gen
		var err error
		if a.books[b.Name], err = session.New(o); err != nil {
			return nil, err
		}
	}
	return a, nil
}

// Book is that of a backend.
func (a *Apps) Book(backend string) *session.Book { return a.books[backend] }

// Announce tells the applications of a backend that it drains, for the next minute.
func (a *Apps) Announce(backend, id string) error {
	b, err := a.Backend(context.Background(), backend)
	if err != nil {
		return err
	}
	deadline := time.Now().Add(time.Minute)
	n := drain.Notice{Drain: id, Gen: b.Gen, Cause: drain.CauseOperator, Deadline: deadline}
	return a.books[backend].Draining(n, deadline.Add(-8*time.Second))
}

// Flush tells them to end: the wait is over, if they hold something.
func (a *Apps) Flush(backend, id string) error {
	b, err := a.Backend(context.Background(), backend)
	if err != nil {
		return err
	}
	reason := drain.FlushZero
	if n, _ := a.books[backend].Holds(); n > 0 {
		reason = drain.FlushDeadline
	}
	return a.books[backend].Flush(drain.FlushRequest{Drain: id, Gen: b.Gen, Reason: reason, TimeLeft: 5 * time.Second})
}

func (a *Apps) book(ctx context.Context, op, backend string) (*session.Book, error) {
	if a.Before != nil {
		if err := a.Before(ctx, op, backend); err != nil {
			return nil, err
		}
	}
	if b := a.books[backend]; b != nil {
		return b, nil
	}
	return nil, fmt.Errorf("%w %q", api.ErrUnknown, backend)
}

// OpenSession implements api.Sessions.
func (a *Apps) OpenSession(ctx context.Context, backend string, p api.Process, r api.SessionRequest) (api.Session, error) {
	b, err := a.book(ctx, "open", backend)
	if err != nil {
		return api.Session{}, err
	}
	return b.Open(ctx, p, r)
}

// SessionCall implements api.Sessions.
func (a *Apps) SessionCall(ctx context.Context, backend, id string, p api.Process, c api.SessionCall) (api.Session, error) {
	b, err := a.book(ctx, c.Op, backend)
	if err != nil {
		return api.Session{}, err
	}
	return b.Call(ctx, id, p, c)
}

// SessionEvents implements api.Sessions.
func (a *Apps) SessionEvents(ctx context.Context, backend, id string, p api.Process, from, stream uint64) (api.SessionBatch, error) {
	b, err := a.book(ctx, "events", backend)
	if err != nil {
		return api.SessionBatch{}, err
	}
	return b.Events(ctx, id, p, from, stream)
}

// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"fmt"
	"net/http"
	"sync"
)

// places bound what is done at the same time: for all, and for each application, so that none of them can keep the others
// out. Its methods may be called from any goroutine.
type places struct {
	of     string        // what is done in them, for who is turned away
	all    chan struct{} // one element for each that is taken
	perApp int

	mu   sync.Mutex
	apps map[string]*share // those that have one or wait for one
}

// share is what one application has of the places.
type share struct {
	taken chan struct{}
	users int // that have a place or wait for one
}

func newPlaces(n, perApp int, of string) *places {
	return &places{of: of, all: make(chan struct{}, n), perApp: perApp, apps: make(map[string]*share)}
}

// enter takes a place, for which it waits until ctx is over, first in the line of its application. app is empty for who is
// none. What it returns gives the place back. The error is a *Problem.
func (p *places) enter(ctx context.Context, app string) (func(), error) {
	leaveApp := func() {}
	if app != "" {
		s := p.share(app)
		if !take(ctx, s.taken) {
			p.forget(app, s)
			return nil, &Problem{
				Title: "too many requests", Status: http.StatusTooManyRequests, retry: true,
				Detail: fmt.Sprintf("of this application %d %s", p.perApp, p.of),
			}
		}
		leaveApp = func() {
			<-s.taken
			p.forget(app, s)
		}
	}
	if !take(ctx, p.all) {
		leaveApp()
		return nil, &Problem{
			Title: "busy", Status: http.StatusServiceUnavailable, retry: true, Detail: fmt.Sprintf("%d %s", cap(p.all), p.of),
		}
	}
	return func() {
		<-p.all
		leaveApp()
	}, nil
}

// share is that of an application, for one more user; forget is for one less.
func (p *places) share(app string) *share {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.apps[app]
	if s == nil {
		s = &share{taken: make(chan struct{}, p.perApp)}
		p.apps[app] = s
	}
	s.users++
	return s
}

func (p *places) forget(app string, s *share) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if s.users--; s.users == 0 {
		delete(p.apps, app)
	}
}

// take puts an element into c, for which it waits until ctx is over.
func take(ctx context.Context, c chan struct{}) bool {
	select {
	case c <- struct{}{}:
		return true
	default:
	}
	select {
	case c <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}

// shares counts what each name has taken. The zero value is usable.
type shares struct {
	mu    sync.Mutex
	sum   int
	taken map[string]int
}

// take takes one more for name, unless it has limit(sum) already, where sum is what all have.
func (s *shares) take(name string, limit func(sum int) int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.taken[name] >= limit(s.sum) {
		return false
	}
	if s.taken == nil {
		s.taken = make(map[string]int)
	}
	s.taken[name]++
	s.sum++
	return true
}

func (s *shares) give(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sum--
	if s.taken[name]--; s.taken[name] == 0 {
		delete(s.taken, name)
	}
}

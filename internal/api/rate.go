// SPDX-License-Identifier: Apache-2.0

package api

import (
	"sync"
	"time"
)

// Rate bounds how often something happens: Burst times at once, and once in Every from then on (a token bucket). Its one
// method may not be called from several goroutines at once.
type Rate struct {
	Burst int
	Every time.Duration

	used int
	at   time.Time // up to when what was used has been given back
}

// Take says whether it may happen once more, and counts it then.
func (r *Rate) Take() bool {
	now := time.Now()
	if back := now.Sub(r.at) / r.Every; back >= time.Duration(r.used) {
		r.used, r.at = 0, now
	} else {
		r.used -= int(back)
		r.at = r.at.Add(back * r.Every)
	}
	if r.used >= r.Burst {
		return false
	}
	r.used++
	return true
}

// rates bounds what the processes of each backend do. Its methods may be called from any goroutine.
type rates struct {
	each Rate

	mu sync.Mutex
	of map[string]*appRate // by the backend; empty: who is of none
}

type appRate struct {
	Rate
	over int // what was too much since the last that was not
}

// take says whether it may happen once more, and how often it might not since the last time that it did.
func (r *rates) take(app string) (before int, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.of == nil {
		r.of = make(map[string]*appRate)
	}
	of := r.of[app]
	if of == nil {
		of = &appRate{Rate: r.each}
		r.of[app] = of
	}
	if !of.Take() {
		of.over++
		return 0, false
	}
	before, of.over = of.over, 0
	return before, true
}

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

// records bounds the audit records of those who are no operators: of the processes of each backend, and of all who are refused.
// An application may not fill the log that all share. Its methods may be called from any goroutine.
type records struct {
	mu sync.Mutex
	of map[string]*record // by the backend; empty: who is of none
}

type record struct {
	rate  Rate
	under int // that were not recorded since the last one that was
}

// take says whether one more is recorded, and how many were not before it.
func (r *records) take(backend string) (before int, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.of == nil {
		r.of = make(map[string]*record)
	}
	of := r.of[backend]
	if of == nil {
		of = &record{rate: Rate{Burst: maxRecords, Every: everyRecord}}
		r.of[backend] = of
	}
	if !of.rate.Take() {
		of.under++
		return 0, false
	}
	before, of.under = of.under, 0
	return before, true
}

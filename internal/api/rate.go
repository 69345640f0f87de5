// SPDX-License-Identifier: Apache-2.0

package api

import "time"

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

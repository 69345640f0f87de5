// SPDX-License-Identifier: Apache-2.0

package drain

import "time"

// Policy is the snapshot that a drain takes at Begin. A zero duration or empty word means the default.
type Policy struct {
	Protocol     Protocol      `json:"protocol"`
	OnNew        OnNew         `json:"on_new"`
	OnDeadline   OnDeadline    `json:"on_deadline"`
	Idle         IdlePolicy    `json:"idle"`
	NotifyAt     NotifyAt      `json:"notify_at"`
	Grace        time.Duration `json:"grace_ns"`
	FlushTimeout time.Duration `json:"flush_timeout_ns"`
	Reserve      time.Duration `json:"reserve_ns"`
	QuietPeriod  time.Duration `json:"quiet_period_ns"`
	AdmitFor     time.Duration `json:"admit_for_ns"` // default: half the wait slice
	IdleAfter    time.Duration `json:"idle_after_ns"`
	CloseSpread  time.Duration `json:"close_spread_ns"`
	MaxAge       time.Duration `json:"max_connection_age_ns,omitempty"`
}

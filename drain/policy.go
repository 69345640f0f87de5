// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"errors"
	"fmt"
	"strings"
	"time"
)

// Policy is the snapshot that a drain takes at Begin. A zero duration or empty word means the default.
type Policy struct {
	Protocol     Protocol      `json:"protocol"`
	OnNew        OnNew         `json:"on_new"`
	OnDeadline   OnDeadline    `json:"on_deadline"`
	Idle         IdlePolicy    `json:"idle"` // default: close for http1, ignore for opaque
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

// The defaults of a policy. Those of the words are opaque, auto, cut and begin.
const (
	DefaultGrace        = 30 * time.Second
	DefaultFlushTimeout = 5 * time.Second
	DefaultReserve      = 3 * time.Second
	DefaultQuietPeriod  = time.Second
	DefaultIdleAfter    = 10 * time.Second
)

const (
	// maxDuration bounds every duration, so that sums of several cannot overflow.
	maxDuration = 365 * 24 * time.Hour

	// minBudget is what a drain gets whose deadline has passed before it began: enough to turn
	// readiness, close admission and deliver the flush.
	minBudget = 100 * time.Millisecond

	// maxSettle bounds the settle phase together with a third of the wait slice. Queues emptied in
	// 53 to 94 ms behind servers that accept, and in 0.9 s behind one that accepts slowly.
	maxSettle = 3 * time.Second
)

// Effective is a policy with its defaults filled in and its slices computed. The wait slice is what
// grace leaves: wait = grace − flush_timeout − reserve. All of it is settled before a drain begins; a
// kill time that is nearer than grace scales the slices, which Scaled says.
type Effective struct {
	Policy Policy        `json:"policy"`
	Wait   time.Duration `json:"wait_ns"`
	Settle time.Duration `json:"settle_ns"` // the longest settle: min(3 s, wait/3), part of wait

	// Scaled says in words why the slices differ from the policy's. It is empty if they do not.
	Scaled string `json:"scaled,omitempty"`
}

// String shows the budget as a sum, for the log.
func (e Effective) String() string {
	p := e.Policy
	s := fmt.Sprintf("grace %v = wait %v + flush_timeout %v + reserve %v; quiet_period %v, admit_for %v, settle %v, close_spread %v",
		show(p.Grace), show(e.Wait), show(p.FlushTimeout), show(p.Reserve), show(p.QuietPeriod), show(p.AdmitFor), show(e.Settle), show(p.CloseSpread))
	if e.Scaled != "" {
		s += " (" + e.Scaled + ")"
	}
	return s
}

// show rounds what a person reads.
func show(d time.Duration) time.Duration {
	if d < -time.Second || d > time.Second {
		return d.Round(time.Millisecond)
	}
	return d.Round(time.Microsecond)
}

// Validate fills in the defaults and refuses what cannot work, with the sums shown. The error wraps
// ErrPolicy and names every contradiction, one a line.
func Validate(p Policy) (Effective, error) {
	var bad []error
	refuse := func(format string, a ...any) {
		bad = append(bad, fmt.Errorf("%w: "+format, append([]any{ErrPolicy}, a...)...))
	}

	word(&p.Protocol, ProtocolOpaque, "protocol", refuse, ProtocolOpaque, ProtocolHTTP1)
	word(&p.OnNew, OnNewAuto, "on_new", refuse, OnNewAuto, OnNewAdmit, OnNewRefuse, OnNewSteer, OnNewRelay, OnNewHold)
	word(&p.OnDeadline, OnDeadlineCut, "on_deadline", refuse, OnDeadlineCut, OnDeadlineReset, OnDeadlineLeave)
	idle := IdleIgnore
	if p.Protocol == ProtocolHTTP1 {
		idle = IdleClose
	}
	word(&p.Idle, idle, "idle", refuse, IdleIgnore, IdleWait, IdleClose)
	word(&p.NotifyAt, NotifyAtBegin, "notify at", refuse, NotifyAtBegin, NotifyAtSettled)

	durations := []struct {
		name string
		d    *time.Duration
		def  time.Duration
	}{
		{"grace", &p.Grace, DefaultGrace},
		{"flush_timeout", &p.FlushTimeout, DefaultFlushTimeout},
		{"reserve", &p.Reserve, DefaultReserve},
		{"quiet_period", &p.QuietPeriod, DefaultQuietPeriod},
		{"admit_for", &p.AdmitFor, 0},
		{"idle_after", &p.IdleAfter, DefaultIdleAfter},
		{"close_spread", &p.CloseSpread, 0},
		{"max_connection_age", &p.MaxAge, 0},
	}
	ranged := true
	for _, v := range durations {
		switch {
		case *v.d < 0:
			refuse("%s %v is negative", v.name, *v.d)
			ranged = false
		case *v.d > maxDuration:
			refuse("%s %v is longer than a year", v.name, *v.d)
			ranged = false
		case *v.d == 0:
			*v.d = v.def
		}
	}
	if !ranged {
		// Sums of values out of range would only mislead.
		return Effective{}, errors.Join(bad...)
	}

	wait := p.Grace - p.FlushTimeout - p.Reserve
	if wait <= 0 {
		refuse("grace %v − flush_timeout %v − reserve %v leaves %v to wait: lengthen grace beyond %v or shorten the others",
			p.Grace, p.FlushTimeout, p.Reserve, wait, p.FlushTimeout+p.Reserve)
	} else {
		if p.AdmitFor == 0 {
			p.AdmitFor = wait / 2
		}
		sum := fmt.Sprintf("wait %v = grace %v − flush_timeout %v − reserve %v", wait, p.Grace, p.FlushTimeout, p.Reserve)
		if p.QuietPeriod >= wait {
			refuse("quiet_period %v does not fit into %s: zero could never be believed", p.QuietPeriod, sum)
		}
		if p.AdmitFor >= wait {
			refuse("admit_for %v does not fit into %s: nothing would be left to wait after the flip", p.AdmitFor, sum)
		}
	}
	if p.CloseSpread > p.Reserve {
		refuse("close_spread %v is longer than reserve %v, in which every cut must be over", p.CloseSpread, p.Reserve)
	}
	if p.MaxAge > 0 && p.Grace >= p.MaxAge {
		refuse("grace %v is not shorter than max_connection_age %v: age would end connections before the drain does", p.Grace, p.MaxAge)
	}
	if len(bad) > 0 {
		return Effective{}, errors.Join(bad...)
	}
	return Effective{Policy: p, Wait: wait, Settle: min(maxSettle, wait/3)}, nil
}

// word fills in the default of a word and refuses what is not among the known ones.
func word[T ~string](v *T, def T, name string, refuse func(string, ...any), known ...T) {
	if *v == "" {
		*v = def
		return
	}
	list := make([]string, 0, len(known))
	for _, k := range known {
		if *v == k {
			return
		}
		list = append(list, string(k))
	}
	refuse("%s %q is unknown: use one of %s", name, string(*v), strings.Join(list, ", "))
}

// spend takes time that was used before the drain began out of the wait slice, and what exceeds it out
// of flush and reserve in proportion.
func (e Effective) spend(spent time.Duration) Effective {
	if spent <= 0 {
		return e
	}
	grace := e.Policy.Grace
	total := max(grace-spent, min(minBudget, grace))
	if rest := e.Policy.FlushTimeout + e.Policy.Reserve; total >= rest {
		e = e.withWait(total - rest)
	} else {
		e.Policy.FlushTimeout = part(e.Policy.FlushTimeout, total, rest)
		e.Policy.Reserve = total - e.Policy.FlushTimeout
		e = e.withWait(0)
	}
	e.Scaled = fmt.Sprintf("%v of grace %v were spent before the drain began", show(spent), show(grace))
	return e
}

// scale makes the slices fit into total, in proportion. A total that is not shorter than grace changes
// nothing: a later kill time does not lengthen a drain.
func (e Effective) scale(total time.Duration) Effective {
	grace := e.Policy.Grace
	if total >= grace {
		return e
	}
	total = max(total, min(minBudget, grace))
	e.Policy.FlushTimeout = part(e.Policy.FlushTimeout, total, grace)
	e.Policy.Reserve = part(e.Policy.Reserve, total, grace)
	e = e.withWait(total - e.Policy.FlushTimeout - e.Policy.Reserve)
	said := fmt.Sprintf("scaled to %v of %v: the kill time is nearer than grace", show(total), show(grace))
	if e.Scaled != "" {
		said = e.Scaled + "; " + said
	}
	e.Scaled = said
	return e
}

// withWait gives the wait slice another length and fits what lies inside it. The quiet period is a
// property of the clients, so it is kept while it fits into half of the slice.
func (e Effective) withWait(wait time.Duration) Effective {
	if wait < e.Wait {
		e.Policy.AdmitFor = part(e.Policy.AdmitFor, wait, e.Wait)
		if e.Policy.QuietPeriod > wait/2 {
			e.Policy.QuietPeriod = part(e.Policy.QuietPeriod, wait, e.Wait)
		}
	}
	e.Wait = wait
	e.Settle = min(maxSettle, wait/3)
	e.Policy.CloseSpread = min(e.Policy.CloseSpread, e.Policy.Reserve)
	e.Policy.Grace = wait + e.Policy.FlushTimeout + e.Policy.Reserve
	return e
}

// part is d × num / den for durations up to a year, which would overflow as a product of integers.
func part(d, num, den time.Duration) time.Duration {
	if den <= 0 {
		return 0
	}
	return time.Duration(float64(d) * (float64(num) / float64(den)))
}

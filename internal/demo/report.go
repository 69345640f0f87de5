// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/loadtest"
)

// Report is what `ebb demo -o json` writes.
type Report struct {
	Kernel  string `json:"kernel"`
	Load    Load   `json:"load"`
	Acts    []*Act `json:"acts"`
	OK      bool   `json:"ok"`      // every act with Ebb that was played lost nothing, and at least one was
	Verdict string `json:"verdict"` // the same in words
}

// Load is what the clients did in each act.
type Load struct {
	Rate      float64 `json:"new_connections_per_second"`
	KeepAlive int     `json:"keep_alive_clients"`
	Slow      int     `json:"slow_answers"`
	SlowFor   float64 `json:"slow_answer_seconds"`
	Lag       float64 `json:"balancer_lag_seconds"`
}

// Act is what happened in one act. A request and its repetitions are one request.
type Act struct {
	Name    string `json:"name"`
	Title   string `json:"title"`
	Command string `json:"command"`
	Ebb     bool   `json:"ebb"`               // Ebb was there, so that nothing may be lost
	Skipped string `json:"skipped,omitempty"` // why the act could not be shown on this machine

	Requests   int64                      `json:"requests"`
	Answered   int64                      `json:"answered"`
	TurnedAway int64                      `json:"turned_away"` // refused on purpose before any byte was sent
	Lost       int64                      `json:"lost"`
	LostBy     map[loadtest.Verdict]int64 `json:"lost_by,omitempty"`
	Losses     []Loss                     `json:"losses,omitempty"` // the first few
	Repeated   int64                      `json:"repeated"`         // sent again by a client whose idle connection had just been closed
	Unsent     int64                      `json:"unsent"`           // due but not sent, since too many were waiting

	AtSignal int64 `json:"in_flight_at_signal"` // requests that blue had not answered when it was told to stop
	AtFlip   int64 `json:"in_flight_at_flip"`   // the same when new connections were closed off
	Late     int64 `json:"late_served"`         // connections that blue took after the signal
	Through  int64 `json:"late_after_flip"`     // of those, begun after admission had closed: must be 0

	// LastAnswer, Flushed and Gone are seconds after the signal: the last answer of blue, its stop signal, and its end.
	LastAnswer float64 `json:"last_answer_s"`
	Flushed    float64 `json:"app_signal_s"`
	Gone       float64 `json:"gone_s"`

	Clients Connections `json:"clients"` // as the clients counted
	Network Connections `json:"network"` // as the network stack counted, from /proc/net/snmp
	ToBlue  int64       `json:"connections_to_blue"`
	Census  *uint64     `json:"census,omitempty"` // connections to blue as Ebb counted them; nil if unknown

	Timeline []Moment   `json:"timeline"`
	Drain    *api.Drain `json:"drain,omitempty"`
	Checks   []Check    `json:"checks,omitempty"`
}

// Loss is one request that was lost.
type Loss struct {
	At      float64          `json:"at_s"` // when it ended, in seconds after the signal
	Took    float64          `json:"took_s"`
	Kind    loadtest.Kind    `json:"kind"`
	Target  string           `json:"target"`
	Verdict loadtest.Verdict `json:"verdict"`
	Err     string           `json:"err,omitempty"`
}

// maxLosses bounds Act.Losses.
const maxLosses = 10

// Connections counts attempts to connect by their result.
type Connections struct {
	Made    int64 `json:"made"`
	Refused int64 `json:"refused"`
}

// Moment is one line of an act's timeline.
type Moment struct {
	At       float64     `json:"at_s"` // seconds after the signal
	Phase    drain.Phase `json:"phase,omitempty"`
	Text     string      `json:"text"`
	Counts   *api.Counts `json:"counts,omitempty"`
	InFlight *int64      `json:"in_flight,omitempty"`
}

// Check is one thing that must be true of an act with Ebb.
type Check struct {
	Name string `json:"name"`
	OK   bool   `json:"ok"`
	Text string `json:"text"`
}

// held tells whether an act with Ebb kept its promise.
func (a *Act) held() bool {
	for _, c := range a.Checks {
		if !c.OK {
			return false
		}
	}
	return a.Lost == 0
}

// count sums up what became of the requests. turnAway: from the signal on a refusal by blue is on purpose.
func (a *Act) count(rs []loadtest.Result, signal, flip time.Time, turnAway bool) {
	a.LostBy = make(map[loadtest.Verdict]int64)
	var races, retries int64
	for _, r := range rs {
		blue := r.Target == blueName
		if r.Retry {
			retries++
		}
		switch {
		case !r.Connected.IsZero():
			a.Clients.Made++
			if blue {
				a.ToBlue++
				if r.Start.After(signal) {
					a.Late++
				}
				if !flip.IsZero() && r.Start.After(flip) {
					a.Through++
				}
			}
		case r.Verdict == loadtest.ConnectRefused, r.Verdict == loadtest.ConnectReset:
			a.Clients.Refused++
		}
		if blue && r.Verdict != loadtest.ConnectRefused {
			if during(r, signal) {
				a.AtSignal++
			}
			if !flip.IsZero() && during(r, flip) {
				a.AtFlip++
			}
		}
		switch {
		case r.Verdict == loadtest.KeepAliveRace:
			races++
			continue
		case r.Verdict == loadtest.OK:
			a.Answered++
			if blue && r.End.After(signal) {
				a.LastAnswer = max(a.LastAnswer, r.End.Sub(signal).Seconds())
			}
		case turnAway && blue && r.Verdict == loadtest.ConnectRefused && r.End.After(signal):
			a.TurnedAway++
		default:
			a.lose(r, signal)
		}
		a.Requests++
	}
	a.Repeated = retries
	// A race that nobody repeated is a request without an answer.
	if n := races - retries; n > 0 {
		a.Requests += n
		a.Lost += n
		a.LostBy[loadtest.KeepAliveRace] = n
	}
}

func (a *Act) lose(r loadtest.Result, signal time.Time) {
	a.Lost++
	a.LostBy[r.Verdict]++
	if len(a.Losses) == maxLosses {
		return
	}
	l := Loss{At: r.End.Sub(signal).Seconds(), Took: r.End.Sub(r.Start).Seconds(), Kind: r.Kind, Target: r.Target, Verdict: r.Verdict}
	if r.Err != nil {
		l.Err = r.Err.Error()
	}
	a.Losses = append(a.Losses, l)
}

// during tells whether a request was under way at t.
func during(r loadtest.Result, t time.Time) bool { return !r.Start.After(t) && r.End.After(t) }

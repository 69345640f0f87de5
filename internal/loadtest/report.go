// SPDX-License-Identifier: Apache-2.0

package loadtest

import (
	"maps"
	"math"
	"slices"
	"sync"
	"time"
)

// Report sums up a load. A request and its retries are one request; its verdict is the last one.
type Report struct {
	Start    time.Time `json:"start"`
	Seconds  float64   `json:"seconds"`
	Requests int64     `json:"requests"` // of the kinds that have an answer
	OK       int64     `json:"ok"`
	Failed   int64     `json:"failed"` // requests without a good answer, and streams that were reset
	Races    int64     `json:"races"`  // attempts that met a KeepAliveRace; each was repeated
	// Abandoned are races that were not repeated, since nothing was left in rotation or the load was
	// over. They are neither OK nor Failed.
	Abandoned   int64                 `json:"abandoned"`
	Connections int64                 `json:"connections"`  // established
	IdleClosed  int64                 `json:"idle_closed"`  // connections that the server ended between two requests
	Unsent      int64                 `json:"unsent"`       // open-loop requests beyond MaxOutstanding
	Verdicts    map[Verdict]*Tally    `json:"verdicts"`     // of attempts
	Kinds       map[Kind]*Summary     `json:"kinds"`        // of attempts
	Targets     map[string]*Summary   `json:"targets"`      // of attempts
	ServedBy    map[string]int64      `json:"served_by"`    // complete answers by their X-Served-By header
	Latency     map[Kind]*Percentiles `json:"latency_ms"`   // of good answers
	FirstSent   time.Time             `json:"first_sent"`   // the start of the earliest attempt that has ended
	LastOK      time.Time             `json:"last_ok"`      // the end of the last good answer
	LastConnect time.Time             `json:"last_connect"` // when the last connection was established
}

// Tally is how often something happened, and when.
type Tally struct {
	Count int64     `json:"count"`
	First time.Time `json:"first"` // the end of the first such attempt
	Last  time.Time `json:"last"`
	// FirstStart and LastStart are the earliest and the latest start of such an attempt.
	FirstStart time.Time `json:"first_start"`
	LastStart  time.Time `json:"last_start"`
	Example    string    `json:"example,omitempty"` // the first error
}

// Summary counts attempts.
type Summary struct {
	Attempts int64             `json:"attempts"`
	Verdicts map[Verdict]int64 `json:"verdicts"`
	Bytes    int64             `json:"bytes"`
}

// Percentiles are in milliseconds, to within 5 %.
type Percentiles struct {
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
	Max float64 `json:"max"`
}

type recorder struct {
	onResult func(Result)

	mu        sync.Mutex
	finish    time.Time
	pending   int64 // races whose retry has not ended
	rep       Report
	latencies map[Kind]*histogram
}

func (c *recorder) init(onResult func(Result)) {
	c.onResult = onResult
	c.rep = Report{
		Verdicts: make(map[Verdict]*Tally),
		Kinds:    make(map[Kind]*Summary),
		Targets:  make(map[string]*Summary),
		ServedBy: make(map[string]int64),
	}
	c.latencies = make(map[Kind]*histogram)
}

func (c *recorder) begin() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rep.Start = time.Now()
}

func (c *recorder) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.finish = time.Now()
}

func (c *recorder) unsent() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rep.Unsent++
}

func (c *recorder) idleClosed() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rep.IdleClosed++
}

func (c *recorder) add(r Result) {
	if r.End.IsZero() {
		r.End = time.Now()
	}
	if c.onResult != nil {
		c.onResult(r)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	rep := &c.rep
	t := rep.Verdicts[r.Verdict]
	if t == nil {
		t = &Tally{First: r.End, FirstStart: r.Start}
		rep.Verdicts[r.Verdict] = t
	}
	t.Count++
	if r.End.Before(t.First) {
		t.First = r.End
	}
	if r.Start.Before(t.FirstStart) {
		t.FirstStart = r.Start
	}
	t.Last, t.LastStart = later(t.Last, r.End), later(t.LastStart, r.Start)
	if t.Example == "" && r.Err != nil {
		t.Example = r.Err.Error()
	}
	for _, s := range []*Summary{summary(rep.Kinds, r.Kind), summary(rep.Targets, r.Target)} {
		s.Attempts++
		s.Verdicts[r.Verdict]++
		s.Bytes += r.Bytes
	}
	if !r.Connected.IsZero() {
		rep.Connections++
		rep.LastConnect = later(rep.LastConnect, r.Connected)
	}
	if rep.FirstSent.IsZero() || r.Start.Before(rep.FirstSent) {
		rep.FirstSent = r.Start
	}
	if r.ServedBy != "" {
		rep.ServedBy[r.ServedBy]++
	}
	if r.Retry {
		c.pending--
	}
	if r.Verdict == KeepAliveRace {
		rep.Races++
		c.pending++
		return
	}
	stream := r.Kind == KindEvents || r.Kind == KindUpgrade || r.Kind == KindSilent
	if !stream {
		rep.Requests++
	}
	switch {
	case r.Verdict == OK:
		rep.OK++
		rep.LastOK = later(rep.LastOK, r.End)
		h := c.latencies[r.Kind]
		if h == nil {
			h = new(histogram)
			c.latencies[r.Kind] = h
		}
		h.add(r.End.Sub(r.Start))
	case r.Verdict.Failure():
		rep.Failed++
	}
}

// later is the later of two times.
func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

func summary[K comparable](m map[K]*Summary, k K) *Summary {
	s := m[k]
	if s == nil {
		s = &Summary{Verdicts: make(map[Verdict]int64)}
		m[k] = s
	}
	return s
}

func (c *recorder) report() Report {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := c.rep
	end := c.finish
	if end.IsZero() {
		end = time.Now()
	} else {
		r.Abandoned = c.pending
	}
	if !r.Start.IsZero() {
		r.Seconds = end.Sub(r.Start).Seconds()
	}
	r.Verdicts = make(map[Verdict]*Tally)
	for v, t := range c.rep.Verdicts {
		r.Verdicts[v] = new(*t)
	}
	r.Kinds, r.Targets = cloneSummaries(c.rep.Kinds), cloneSummaries(c.rep.Targets)
	r.ServedBy = maps.Clone(c.rep.ServedBy)
	r.Latency = make(map[Kind]*Percentiles)
	for k, h := range c.latencies {
		r.Latency[k] = h.percentiles()
	}
	return r
}

func cloneSummaries[K comparable](m map[K]*Summary) map[K]*Summary {
	out := make(map[K]*Summary, len(m))
	for k, s := range m {
		out[k] = &Summary{Attempts: s.Attempts, Verdicts: maps.Clone(s.Verdicts), Bytes: s.Bytes}
	}
	return out
}

// Count is the number of attempts that ended with a verdict.
func (r *Report) Count(v Verdict) int64 {
	if t := r.Verdicts[v]; t != nil {
		return t.Count
	}
	return 0
}

// Failures lists the verdicts that are failures and occurred, in alphabetical order.
func (r *Report) Failures() []Verdict {
	var vs []Verdict
	for v := range r.Verdicts {
		if v.Failure() {
			vs = append(vs, v)
		}
	}
	slices.Sort(vs)
	return vs
}

// histogram has buckets that grow by 5 % from 10 µs on, and so bounded memory.
type histogram struct {
	buckets [400]int64
	n       int64
	max     time.Duration
}

const (
	histogramUnit   = 10 * time.Microsecond
	histogramGrowth = 1.05
)

func (h *histogram) add(d time.Duration) {
	i := 0
	if d > histogramUnit {
		i = int(math.Ceil(math.Log(float64(d)/float64(histogramUnit)) / math.Log(histogramGrowth)))
	}
	h.buckets[min(i, len(h.buckets)-1)]++
	h.n++
	h.max = max(h.max, d)
}

func (h *histogram) percentiles() *Percentiles {
	return &Percentiles{P50: h.at(0.50), P99: h.at(0.99), Max: ms(h.max)}
}

// at is the upper bound of the bucket in which the fraction q of the values is reached.
func (h *histogram) at(q float64) float64 {
	rank := int64(math.Ceil(q * float64(h.n)))
	var seen int64
	for i, n := range h.buckets {
		if seen += n; n > 0 && seen >= rank {
			bound := time.Duration(float64(histogramUnit) * math.Pow(histogramGrowth, float64(i)))
			return ms(min(bound, h.max))
		}
	}
	return ms(h.max)
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// SPDX-License-Identifier: Apache-2.0

// Package metrics exposes Ebb to Prometheus: gauges read from the backends at each scrape, and counters
// and histograms that the owner of the backends adds to as things happen.
//
// It is not where a decision is made: nothing in Ebb reads a metric back. Its names and labels are a
// contract with dashboards, alerts and gates: base units, no address and no id in a label, every series of
// a service and a backend present from its registration on, and kept for a while after the backend is
// gone, so that a gate never mistakes a missing sample for a good one.
//
//	m, err := metrics.New(metrics.Options{Source: src, Version: version, Commit: commit})
//	…
//	m.Register("shop", "web") // the series exist from here on
//	m.DrainEnded(d)           // once per drain, when it has its outcome
//	http.Handle("/metrics", m.Handler())
package metrics

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
)

// DefaultRetain is how long the series of a backend stay after it is gone (the contract's retain).
const DefaultRetain = 10 * time.Minute

// scrapeTimeout bounds one look at the backends. Prometheus gives up after 10 s by default.
const scrapeTimeout = 5 * time.Second

// CutMethod says how a connection was ended at the deadline.
type CutMethod string

// The methods of a cut.
const (
	CutShutdown CutMethod = "shutdown" // SHUT_RD, and the application closed
	CutDestroy  CutMethod = "destroy"  // SOCK_DESTROY
)

// LateAction says what was done with a connection that arrived after its backend was told to stop.
type LateAction string

// The actions on late connections.
const (
	LateAdmit  LateAction = "admit"
	LateRefuse LateAction = "refuse"
	LateSteer  LateAction = "steer"  // to a sibling; what became of it there is not seen
	LateRelay  LateAction = "relay"  // carried, those out of an accept queue among them
	LateHold   LateAction = "hold"   // parked first
	LateHealth LateAction = "health" // turned away as a health check
)

// LateResult says what became of the action.
type LateResult string

// The results of an action on a late connection.
const (
	LateOK     LateResult = "ok"
	LateFailed LateResult = "failed"
)

// The values of the labels, all of which exist as series from registration on.
var (
	causes = []drain.Cause{
		drain.CauseSignal, drain.CauseApp, drain.CauseOperator, drain.CausePodDeleted,
		drain.CausePrestop, drain.CauseVersionUpgrade, drain.CauseHeartbeat,
	}
	outcomes = []drain.Outcome{drain.OutcomeDrained, drain.OutcomeExpired, drain.OutcomeLost, drain.OutcomeCancelled}
	phases   = []drain.Phase{
		drain.PhaseBegin, drain.PhaseStopNew, drain.PhaseSettle, drain.PhaseWait,
		drain.PhaseFlush, drain.PhaseCut, drain.PhaseDone,
	}
	states = []drain.State{
		drain.StateServing, drain.StateDraining, drain.StateFlushing, drain.StateDone,
		drain.StateSuspect, drain.StateLost,
	}
	modes        = []drain.Mode{drain.ModeOff, drain.ModeObserve, drain.ModeEnforce}
	reasons      = []drain.FlushReason{drain.FlushZero, drain.FlushDeadline}
	flushResults = []drain.FlushResult{
		drain.FlushOK, drain.FlushTimeout, drain.FlushFailed, drain.FlushUnknown, drain.FlushWould,
	}
	cutMethods  = []CutMethod{CutShutdown, CutDestroy}
	lateActions = []LateAction{LateAdmit, LateRefuse, LateSteer, LateRelay, LateHold, LateHealth}
	lateResults = []LateResult{LateOK, LateFailed}
	healths     = []api.Health{api.HealthOK, api.HealthSuspect, api.HealthLost}
)

// durationBuckets reach from a flip (milliseconds) to the longest grace periods in use (an hour), in
// seconds.
var durationBuckets = []float64{.001, .005, .025, .1, .5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 900, 3600}

// Source gives the backends at the moment of a scrape. It is called from many goroutines at once.
type Source interface {
	Backends(context.Context) []api.Backend
}

// Options of New. Source is required.
type Options struct {
	Source  Source
	Version string
	Commit  string
	// Features are the features of this host and kernel; more with SetFeature.
	Features map[string]bool
	// Retain is how long the series of a backend stay after it is gone; DefaultRetain if 0.
	Retain time.Duration
	// Now is the clock for Retain; time.Now if nil.
	Now func() time.Time
}

// Metrics are the metrics of one process. All methods may be called from any goroutine.
type Metrics struct {
	o        Options
	registry *prometheus.Registry
	audits   prometheus.Counter
	drift    prometheus.Counter
	feature  *prometheus.GaugeVec

	mu       sync.Mutex
	backends map[key]*entry
	services map[string]bool // those whose counters exist

	drains, cut, late, held, flushes, staleSignals *counted
	durations                                      map[numbered]*histogram // by phase
}

type key struct{ service, backend string }

// entry is what the last scrape saw of a backend.
type entry struct {
	last api.Backend
	seen bool      // by a scrape; before, only its name is known
	gone time.Time // when it was first missing; zero while it is there
}

// New returns the metrics with their own registry.
func New(o Options) (*Metrics, error) {
	if o.Source == nil {
		return nil, errors.New("create the metrics: Source is required")
	}
	if o.Retain == 0 {
		o.Retain = DefaultRetain
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	m := &Metrics{
		o:        o,
		registry: prometheus.NewRegistry(),
		backends: make(map[key]*entry),
		services: make(map[string]bool),

		drains: newCounted(prometheus.CounterValue, "ebb_drains_total", "Drains that ended, by what began them and how they ended.",
			values("cause", causes), values("outcome", outcomes)),
		cut: newCounted(prometheus.CounterValue, "ebb_connections_cut_total", "Connections ended at the deadline, by how.",
			values("method", cutMethods)),
		late: newCounted(prometheus.CounterValue, "ebb_late_connections_total",
			"Connections that arrived after their backend was told to stop, by what was done with them.",
			values("action", lateActions), values("result", lateResults)),
		held: newCounted(prometheus.GaugeValue, "ebb_held_connections", "Late connections that are parked until a successor listens."),
		flushes: newCounted(prometheus.CounterValue, "ebb_flushes_total", "Flushes sent to applications, by why and how they ended.",
			values("reason", reasons), values("result", flushResults)),
		staleSignals: newCounted(prometheus.CounterValue, "ebb_stale_signals_total",
			"Commands for a generation that was over; nothing was done."),
		durations: map[numbered]*histogram{},
		audits: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "ebb_census_audits_total", Help: "Comparisons of the kernel's counts with a walk over the sockets.",
		}),
		drift: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "ebb_census_drift_total", Help: "Connections by which an audit had to correct a count. Stays 0.",
		}),
		feature: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "ebb_feature", Help: "Whether a feature works on this kernel and host.",
		}, []string{"feature"}),
	}
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "ebb_build_info", Help: "The version of Ebb that runs; always 1.",
		ConstLabels: prometheus.Labels{"version": orUnknown(o.Version), "commit": orUnknown(o.Commit)},
	})
	build.Set(1)
	for name, on := range o.Features {
		m.SetFeature(name, on)
	}
	for _, c := range []prometheus.Collector{
		m.audits, m.drift, m.feature, build, (*snapshot)(m),
	} {
		if err := m.registry.Register(c); err != nil {
			return nil, fmt.Errorf("register metrics: %w", err)
		}
	}
	return m, nil
}

// Gather implements prometheus.Gatherer. The backends are looked at before the collectors run, since those
// run side by side and all of them must agree on which series exist.
func (m *Metrics) Gather() ([]*dto.MetricFamily, error) {
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTimeout)
	defer cancel()
	m.look(m.o.Source.Backends(ctx))
	return m.registry.Gather()
}

// Handler answers a scrape. A failure of one collector fails the scrape: half an answer would hide series
// that a gate relies on.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m, promhttp.HandlerOpts{ErrorHandling: promhttp.HTTPErrorOnError})
}

// Register makes every series of a service and a backend present, before the Source shows it. It is
// idempotent, and a scrape does the same for what it sees.
func (m *Metrics) Register(service, backend string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.register(key{label(service), label(backend)})
}

func (m *Metrics) register(k key) *entry {
	e := m.backends[k]
	if e == nil {
		e = &entry{last: api.Backend{Service: k.service, Name: k.backend, State: drain.StateServing, Mode: drain.ModeOff}}
		m.backends[k] = e
	}
	e.gone = time.Time{}
	m.services[k.service] = true
	return e
}

// DrainEnded counts a drain that has its outcome, and the time it spent in each phase. It is called once
// per drain.
func (m *Metrics) DrainEnded(d api.Drain) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.drains.add(1, d.Service, string(d.Cause), string(d.Outcome))
	end := d.Begun
	if n := len(d.Phases); n > 0 {
		end = d.Phases[n-1].At
	}
	if d.Ended != nil {
		end = *d.Ended
	}
	for i, p := range d.Phases {
		if p.Phase == drain.PhaseDone {
			continue
		}
		next := end
		if i+1 < len(d.Phases) {
			next = d.Phases[i+1].At
		}
		m.observe(d.Service, p.Phase, next.Sub(p.At))
	}
	m.observe(d.Service, drain.PhaseDone, end.Sub(d.Begun))
}

// observe takes the time of a phase into account. The caller holds mu.
func (m *Metrics) observe(service string, p drain.Phase, d time.Duration) {
	k := numberOf(service, string(p))
	if m.durations[k] == nil {
		m.durations[k] = &histogram{buckets: make([]uint64, len(durationBuckets))}
	}
	m.durations[k].observe(max(d, 0).Seconds())
}

// ConnectionsCut counts n connections ended at a deadline.
func (m *Metrics) ConnectionsCut(service string, method CutMethod, n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.cut.add(max(n, 0), service, string(method))
}

// LateConnections counts n connections that arrived late.
func (m *Metrics) LateConnections(service string, action LateAction, result LateResult, n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.late.add(max(n, 0), service, string(action), string(result))
}

// HeldConnections says how many late connections are parked now.
func (m *Metrics) HeldConnections(service string, n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.held.numbers[numberOf(service)] = max(n, 0)
}

// Flushed counts one flush that has ended.
func (m *Metrics) Flushed(service string, reason drain.FlushReason, result drain.FlushResult) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.flushes.add(1, service, string(reason), string(result))
}

// StaleSignal counts one command for a generation that was over.
func (m *Metrics) StaleSignal(service string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.staleSignals.add(1, service)
}

// CensusAudited counts one audit and the number of connections by which it corrected the count.
func (m *Metrics) CensusAudited(corrected int) {
	m.audits.Inc()
	if corrected < 0 {
		corrected = -corrected
	}
	m.drift.Add(float64(corrected))
}

// SetFeature says whether a feature works here.
func (m *Metrics) SetFeature(name string, on bool) {
	m.feature.WithLabelValues(label(name)).Set(boolValue(on))
}

// The gauges that are read from the backends at each scrape.
var (
	descConnections = desc("ebb_connections", "Open connections by class; NaN where not known.", "service", "backend", "class")
	descInFlight    = desc("ebb_connections_in_flight",
		"Connections that a drain waits for; NaN where not known, beside ebb_counts_known 0.", "service", "backend")
	descKnown    = desc("ebb_counts_known", "Whether the counts of connections are known.", "service", "backend")
	descState    = desc("ebb_backend_state", "The state of a backend: exactly one is 1.", "service", "backend", "state")
	descMode     = desc("ebb_mode", "How much Ebb may do for a service: exactly one is 1.", "service", "mode")
	descDeadline = desc("ebb_drain_deadline_timestamp_seconds",
		"The deadline of the running drain, in Unix time; NaN while there is none.", "service", "backend")
	descSurvivors = desc("ebb_drain_survivors",
		"Connections that were open when the wait of the running or the last drain ran out.", "service", "backend")
	descSessions = desc("ebb_sessions", "Sessions that are open, by how long they have been silent.", "service", "backend", "health")
	descHolds    = desc("ebb_holds", "Leases that a flush at zero waits for; those of lost sessions do not count.", "service", "backend")
)

var descDurations = desc("ebb_drain_duration_seconds",
	"Time that drains spent in each phase; phase \"done\" is the whole drain, from begin to done.", "service", "phase")

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, labels, nil)
}

// snapshot is the collector of the gauges.
type snapshot Metrics

// Describe implements prometheus.Collector.
func (s *snapshot) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		descConnections, descInFlight, descKnown, descState, descMode, descDeadline, descSurvivors,
		descSessions, descHolds, descDurations,
	} {
		ch <- d
	}
	for _, c := range (*Metrics)(s).counted() {
		ch <- c.desc
	}
}

// Collect implements prometheus.Collector.
func (s *snapshot) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		m, err := prometheus.NewConstMetric(d, prometheus.GaugeValue, v, labels...)
		if err != nil {
			m = prometheus.NewInvalidMetric(d, err)
		}
		ch <- m
	}
	modeOf := make(map[string]drain.Mode)
	for _, e := range (*Metrics)(s).entries() {
		b := e.last
		for _, class := range api.Classes {
			gauge(descConnections, count(b.Counts.Class(class), b.CountsKnown), b.Service, b.Name, class)
		}
		inFlight := count(b.InFlight, b.CountsKnown)
		gauge(descInFlight, inFlight, b.Service, b.Name)
		gauge(descKnown, boolValue(!math.IsNaN(inFlight)), b.Service, b.Name)
		for _, st := range states {
			gauge(descState, boolValue(b.State == st), b.Service, b.Name, string(st))
		}
		deadline, survivors := math.NaN(), 0.0
		if d := b.Drain; d != nil {
			survivors = float64(len(d.Survivors))
			if d.Running() && e.gone.IsZero() {
				deadline = float64(d.Deadline.UnixMilli()) / 1000
			}
		}
		gauge(descDeadline, deadline, b.Service, b.Name)
		gauge(descSurvivors, survivors, b.Service, b.Name)
		sessions, holds := make(map[api.Health]int), 0
		if e.gone.IsZero() {
			for _, s := range b.Sessions {
				sessions[s.Health]++
				if s.Health != api.HealthLost {
					holds += len(s.Holds)
				}
			}
		}
		for _, h := range healths {
			gauge(descSessions, float64(sessions[h]), b.Service, b.Name, string(h))
		}
		gauge(descHolds, float64(holds), b.Service, b.Name)
		// A service enforces as soon as one of its backends does.
		if m, ok := modeOf[b.Service]; !ok || slices.Index(modes, b.Mode) > slices.Index(modes, m) {
			modeOf[b.Service] = b.Mode
		}
	}
	for service, mode := range modeOf {
		for _, m := range modes {
			gauge(descMode, boolValue(mode == m), service, string(m))
		}
	}
	for _, c := range (*Metrics)(s).ofServices() {
		ch <- c
	}
}

// look brings the entries up to date with what the Source shows.
func (m *Metrics) look(now []api.Backend) {
	m.mu.Lock()
	defer m.mu.Unlock()
	t := m.o.Now()
	there := make(map[key]bool, len(now))
	for _, b := range now {
		b.Service, b.Name = label(b.Service), label(b.Name)
		k := key{b.Service, b.Name}
		e := m.register(k)
		if there[k] && b.Gen < e.last.Gen {
			continue // an older generation of the same name that is on its way out
		}
		there[k] = true
		e.last, e.seen = b, true
	}
	live := make(map[string]bool)
	for k, e := range m.backends {
		if !there[k] && e.seen {
			if e.gone.IsZero() {
				e.gone = t
				if e.last.State != drain.StateDone {
					// It went without an end that was seen: what it had then says nothing about now.
					e.last.CountsKnown = false
				}
			}
			if t.Sub(e.gone) >= m.o.Retain {
				delete(m.backends, k)
				continue
			}
		}
		live[k.service] = true
	}
	for s := range m.services {
		if !live[s] {
			delete(m.services, s)
			of := func(k numbered) bool { return k.service == s }
			for _, c := range m.counted() {
				maps.DeleteFunc(c.numbers, func(k numbered, _ int) bool { return of(k) })
			}
			maps.DeleteFunc(m.durations, func(k numbered, _ *histogram) bool { return of(k) })
		}
	}
}

// entries are copies of the entries.
func (m *Metrics) entries() []entry {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make([]entry, 0, len(m.backends))
	for _, e := range m.backends {
		out = append(out, *e)
	}
	return out
}

// count is the value of a count: NaN where it is not known, so that it never reads as zero.
func count(n *int64, known bool) float64 {
	if n == nil || !known {
		return math.NaN()
	}
	return float64(*n)
}

// label is s as a label's value, which must be UTF-8.
func label(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

func boolValue(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

func orUnknown(s string) string {
	if s == "" {
		return "unknown"
	}
	return s
}

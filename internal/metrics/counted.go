// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// counted is a counter or a gauge of each service, with a series for every combination of the values of at most two other
// labels. It keeps what is not zero: of 60 series of a service that does not drain that is nothing, where the client
// library's vectors take 50 KB.
type counted struct {
	desc    *prometheus.Desc
	kind    prometheus.ValueType
	names   []string // of the other labels
	pairs   map[[2]string][]*dto.LabelPair
	numbers map[numbered]int
}

// numbered is a series: a service and the values of the other labels.
type numbered struct {
	service string
	values  [2]string
}

func numberOf(service string, values ...string) numbered {
	k := numbered{service: label(service)}
	copy(k.values[:], values)
	return k
}

// choice is a label and its values.
type choice struct {
	name   string
	values []string
}

func values[T ~string](name string, all []T) choice {
	c := choice{name: name}
	for _, v := range all {
		c.values = append(c.values, string(v))
	}
	return c
}

func newCounted(kind prometheus.ValueType, name, help string, labels ...choice) *counted {
	c := &counted{kind: kind, pairs: map[[2]string][]*dto.LabelPair{}, numbers: map[numbered]int{}}
	all := [][2]string{{}}
	for i, l := range labels {
		c.names = append(c.names, l.name)
		var more [][2]string
		for _, values := range all {
			for _, values[i] = range l.values {
				more = append(more, values)
			}
		}
		all = more
	}
	c.desc = desc(name, help, append([]string{"service"}, c.names...)...)
	for _, values := range all {
		c.show(values)
	}
	return c
}

// show makes a series of each service of these values.
func (c *counted) show(values [2]string) {
	if c.pairs[values] != nil {
		return
	}
	pairs := []*dto.LabelPair{}
	for i := range c.names {
		pairs = append(pairs, &dto.LabelPair{Name: &c.names[i], Value: &values[i]})
	}
	c.pairs[values] = pairs
}

func (c *counted) add(n int, service string, values ...string) {
	k := numberOf(service, values...)
	c.show(k.values)
	c.numbers[k] += n
}

// sample is one series at a scrape.
type sample struct {
	desc   *prometheus.Desc
	kind   prometheus.ValueType
	labels []*dto.LabelPair
	value  float64
}

// Desc implements prometheus.Metric.
func (s *sample) Desc() *prometheus.Desc { return s.desc }

// Write implements prometheus.Metric.
func (s *sample) Write(m *dto.Metric) error {
	m.Label = s.labels
	if s.kind == prometheus.CounterValue {
		m.Counter = &dto.Counter{Value: &s.value}
	} else {
		m.Gauge = &dto.Gauge{Value: &s.value}
	}
	return nil
}

// histogram counts durations as durationBuckets divide them.
type histogram struct {
	buckets []uint64
	count   uint64
	sum     float64
}

func (h *histogram) observe(seconds float64) {
	h.count++
	h.sum += seconds
	if i, _ := slices.BinarySearch(durationBuckets, seconds); i < len(h.buckets) {
		h.buckets[i]++
	}
}

// metric is the histogram at a scrape; nil was never told of anything.
func (h *histogram) metric(labels ...string) prometheus.Metric {
	if h == nil {
		h = &histogram{buckets: make([]uint64, len(durationBuckets))}
	}
	upTo, sum := make(map[float64]uint64, len(durationBuckets)), uint64(0)
	for i, b := range durationBuckets {
		sum += h.buckets[i]
		upTo[b] = sum
	}
	m, err := prometheus.NewConstHistogram(descDurations, h.count, h.sum, upTo, labels...)
	if err != nil {
		return prometheus.NewInvalidMetric(descDurations, err)
	}
	return m
}

func (m *Metrics) counted() []*counted {
	return []*counted{m.drains, m.cut, m.late, m.held, m.flushes, m.staleSignals}
}

// ofServices are the counters and histograms of all services.
func (m *Metrics) ofServices() (all []prometheus.Metric) {
	m.mu.Lock()
	defer m.mu.Unlock()
	name := "service"
	for s := range m.services {
		service := &dto.LabelPair{Name: &name, Value: &s}
		for _, c := range m.counted() {
			for values, pairs := range c.pairs {
				// It comes last in the order of names, which the registry wants.
				labels := append(slices.Clip(pairs), service)
				all = append(all, &sample{c.desc, c.kind, labels, float64(c.numbers[numbered{s, values}])})
			}
		}
		for _, p := range phases {
			all = append(all, m.durations[numberOf(s, string(p))].metric(s, string(p)))
		}
	}
	return all
}

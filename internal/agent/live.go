// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/metrics"
)

// follow reads the run's own events to the end: it keeps the metrics, remembers ended drains and shows what happens, as
// a line of words on a terminal and as a line of JSON elsewhere.
func (r *runner) follow(ctx context.Context) {
	sub := r.events.Subscribe(1)
	for {
		e, err := sub.Next(context.WithoutCancel(ctx))
		if err != nil {
			return // the log is closed and read
		}
		r.account(ctx, e)
		if r.o.Progress == nil {
			continue
		}
		if r.o.Terminal {
			if line := words(e); line != "" {
				fmt.Fprintf(r.o.Progress, "\r\x1b[Kebb: %s\n", line)
			}
			continue
		}
		if line, err := json.Marshal(e); err == nil {
			fmt.Fprintf(r.o.Progress, "%s\n", line)
		}
	}
}

// keepDrains bounds the ended drains of a backend that are remembered.
const keepDrains = 10

// account turns an event into metrics.
func (m *member) account(ctx context.Context, e drain.Event) {
	switch e.Type {
	case drain.EventBegin:
		inc := m.life()
		if inc.b == nil {
			return // it has gone already
		}
		m.wg.Go(func() { m.audits(inc) })
		// The report is written when CMD and its sockets are gone.
		var had api.Backend
		inc.sockets(&had, true)
		m.mu.Lock()
		m.had = had
		m.mu.Unlock()
	case drain.EventFlush:
		if res, ok := e.Fields["result"].(string); ok {
			reason, _ := e.Fields["reason"].(string)
			m.metrics.Flushed(m.service, drain.FlushReason(reason), api.FlushResult(res))
		}
	case drain.EventStale:
		m.metrics.StaleSignal(m.service)
	case drain.EventEnd:
		s := m.finished(ctx, e.Drain)
		if s.ID != e.Drain {
			return
		}
		m.keepDrain(m.drainView(m.life(), s), s.OnNew)
	}
}

// keepDrain remembers a drain that is over, and counts it, once. onNew is what became of its new connections.
func (m *member) keepDrain(d api.Drain, onNew drain.OnNew) {
	m.mu.Lock()
	known := slices.ContainsFunc(m.drains, func(o api.Drain) bool { return o.ID == d.ID })
	if !known {
		m.drains = append(m.drains, d)
		m.drains = m.drains[max(0, len(m.drains)-keepDrains):]
	}
	ds := slices.Clone(m.drains)
	m.mu.Unlock()
	if known {
		return
	}
	if m.remember != nil {
		m.remember(ds)
	}
	m.metrics.DrainEnded(d)
	if d.Late != nil {
		m.metrics.LateConnections(m.service, metrics.LateAdmit, metrics.LateOK, int(d.Late.Admitted))
		m.metrics.LateConnections(m.service, metrics.LateRefuse, metrics.LateOK, int(d.Late.Refused))
		if onNew == drain.OnNewSteer {
			m.metrics.LateConnections(m.service, metrics.LateSteer, metrics.LateOK, int(d.Late.Redirected))
		}
	}
}

// finished is the status of a drain whose end was told. The event comes a moment before the status that shows it.
func (m *member) finished(ctx context.Context, id string) drain.Status {
	for {
		machine := m.life().machine
		if machine == nil {
			return drain.Status{} // its process has gone, and has no successor
		}
		changed := machine.Changed()
		s := machine.Status()
		if s.ID != id || s.Over() {
			return s
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return machine.Status()
		}
	}
}

// audits compares the census with a walk while the drain runs: at once, and every 30 s.
func (m *member) audits(inc *incarnation) {
	for inc.ctx.Err() == nil && inc.draining() {
		if _, err := inc.b.audit(inc.ctx); err != nil && inc.ctx.Err() == nil {
			m.log.Warn("audit", "err", err)
		}
		select {
		case <-time.After(auditEvery):
		case <-inc.machine.Done():
			return
		case <-inc.ctx.Done():
			return
		}
	}
}

// words is what a person reads of an event; "" for those the live line already shows.
func words(e drain.Event) string {
	switch e.Type {
	case drain.EventProgress:
		return ""
	case drain.EventPhase:
		return e.Time.Format("15:04:05.000") + " " + string(e.Phase)
	case drain.EventEnd:
		return e.Time.Format("15:04:05.000") + " " + string(e.Outcome) + "; " + e.Message
	}
	if e.Message == "" {
		return e.Type
	}
	return e.Time.Format("15:04:05.000") + " " + e.Message
}

// live keeps one line on the terminal up to date while a drain runs.
func (r *runner) live(ctx context.Context) {
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	shown := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		s := r.life().machine.Status()
		if s.ID == "" || s.Over() {
			if shown {
				fmt.Fprint(r.o.Progress, "\r\x1b[K")
			}
			shown = false
			continue
		}
		fmt.Fprintf(r.o.Progress, "\r\x1b[K%s", liveLine(r.o.Name, s))
		shown = true
	}
}

// liveLine is the state of a drain in one line.
func liveLine(name string, s drain.Status) string {
	return fmt.Sprintf("ebb: %s %s: %s, %s left", name, s.Phase, describe(s), s.Left().Round(100*time.Millisecond))
}

// describe names the counts by class that are not zero.
func describe(s drain.Status) string {
	if s.CountsAt.IsZero() {
		return "not counted yet"
	}
	if !s.Counts.Known {
		return "counts unknown"
	}
	c := s.Counts
	var parts []string
	for _, p := range []struct {
		name string
		n    int64
	}{{"half-open", c.Handshake}, {"queued", c.Queued}, {"active", c.Active}, {"stalled", c.Stalled}, {"idle", c.Idle}, {"unused", c.Unused}, {"closing", c.Closing}} {
		if p.n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", p.n, p.name))
		}
	}
	if len(parts) == 0 {
		return "nothing open"
	}
	return strings.Join(parts, ", ")
}

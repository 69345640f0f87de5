// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/ebbproxy/ebb/internal/api"
)

// liveInterval is how often the live line is drawn. The server answers it from the drain's own last look.
const liveInterval = 500 * time.Millisecond

// progress shows how drains go, on stderr: one live line on a terminal, else one line per event.
type progress struct {
	env     *environment
	live    bool
	columns int
	colour  bool

	mu    sync.Mutex
	order []string
	parts map[string]string // by backend
	over  map[string]bool   // backends whose drain has ended
	drawn bool
}

func (e *environment) newProgress() *progress {
	columns, live := e.terminal(e.stderr)
	return &progress{env: e, live: live, columns: columns, colour: e.colour(e.stderr), parts: make(map[string]string), over: make(map[string]bool)}
}

// event shows one event of a drain. On a terminal the live line shows the same.
func (p *progress) event(ev api.Event) {
	if p.live {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	what := ev.Message
	if what == "" {
		what = ev.Type
	}
	fmt.Fprintf(p.env.stderr, "%s %s: %s\n", clockTime(ev.Time), line(ev.Backend), line(what))
}

// watch draws the live line of the targets, all of one server, until ctx is over.
func (p *progress) watch(ctx context.Context, c *api.Client, g []*target) {
	tick := time.NewTicker(liveInterval)
	defer tick.Stop()
	for {
		// An answer that does not come leaves the line as it was: the event stream tells what became of it.
		var (
			bs  []api.Backend
			err error
		)
		if len(g) == 1 {
			var b api.Backend
			b, err = c.Backend(ctx, g[0].Name)
			bs = append(bs, b)
		} else {
			bs, err = c.Backends(ctx)
		}
		if err == nil {
			for _, b := range bs {
				if slices.ContainsFunc(g, func(t *target) bool { return t.Name == b.Name }) {
					p.set(b.Name, liveText(b, time.Now()))
				}
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// liveText is the state of a drain in one line: counts by class, time left.
func liveText(b api.Backend, now time.Time) string {
	var s strings.Builder
	s.WriteString(line(b.Name))
	if b.Drain != nil {
		fmt.Fprintf(&s, " %s", b.Drain.Phase())
	}
	if !b.CountsKnown {
		s.WriteString(" · connections unknown")
	} else {
		fmt.Fprintf(&s, " · %s in flight", number(b.InFlight))
		for _, class := range api.Classes {
			if n := b.Counts.Class(class); n != nil && *n > 0 {
				fmt.Fprintf(&s, " · %d %s", *n, class)
			}
		}
	}
	if b.Drain != nil {
		if n := b.Drain.Blocking["hold"]; n > 0 {
			fmt.Fprintf(&s, " · %d held", n)
		}
		fmt.Fprintf(&s, " · %s left", brief(b.Drain.Deadline.Sub(now).Truncate(100*time.Millisecond)))
	}
	return s.String()
}

func (p *progress) set(name, text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.over[name] {
		return
	}
	if _, ok := p.parts[name]; !ok {
		p.order = append(p.order, name)
	}
	p.parts[name] = text
	p.draw()
}

// draw writes the live line. It is locked.
func (p *progress) draw() {
	var parts []string
	for _, name := range p.order {
		if text, ok := p.parts[name]; ok {
			parts = append(parts, text)
		}
	}
	text := strings.Join(parts, " | ")
	if len(parts) > 1 {
		text = fmt.Sprintf("%d left: %s", len(parts), text)
	}
	// A line that wraps could not be drawn over again.
	if p.columns > 0 && utf8.RuneCountInString(text) >= p.columns {
		text = string([]rune(text)[:p.columns-1])
	}
	fmt.Fprintf(p.env.stderr, "\r\x1b[K%s", text) // EL: erase to the end of the line (ECMA-48)
	p.drawn = true
}

// ended shows how a drain ended.
func (p *progress) ended(name string, d api.Drain, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.erase()
	delete(p.parts, name)
	p.over[name] = true
	if err == nil {
		fmt.Fprintf(p.env.stderr, "%s: %s\n", line(name), paint(line(ending(d)), outcomeColour(&d), p.colour))
		for _, s := range d.Survivors {
			fmt.Fprintf(p.env.stderr, "  was open: %s %s, age %s, idle %s, %d B unacknowledged\n",
				line(s.Peer), line(s.Class), briefOr(s.Age, "?"), briefOr(s.Idle, "?"), s.Unacked)
		}
	}
	if len(p.parts) > 0 {
		p.draw()
	}
}

// clear takes the live line away.
func (p *progress) clear() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.erase()
}

// erase is clear while locked.
func (p *progress) erase() {
	if p.drawn {
		fmt.Fprint(p.env.stderr, "\r\x1b[K")
		p.drawn = false
	}
}

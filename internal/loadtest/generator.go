// SPDX-License-Identifier: Apache-2.0

package loadtest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Generator makes the load that its Options say. Its methods may be called by several goroutines at once.
type Generator struct {
	opts Options

	mu       sync.Mutex
	rotation []*target     // those that get new connections
	changed  chan struct{} // closed and replaced when rotation changes
	turn     int

	all      []*target
	started  atomic.Bool
	inFlight atomic.Int64
	open     atomic.Int64 // open-loop requests in flight
	rec      recorder
}

type target struct {
	Target
	dropOnce sync.Once
	drop     chan struct{} // closed when it is to leave after Options.Drain
}

// New checks the options. Nothing is sent before Run.
func New(opts Options) (*Generator, error) {
	if err := opts.setDefaults(); err != nil {
		return nil, err
	}
	g := &Generator{opts: opts, changed: make(chan struct{})}
	for _, t := range opts.Targets {
		g.all = append(g.all, &target{Target: t, drop: make(chan struct{})})
	}
	g.rotation = slices.Clone(g.all)
	g.rec.init(opts.OnResult)
	return g, nil
}

// Drop takes a target out of rotation once Options.Drain has passed, as if it had turned unready. It may
// be called before Run, and again.
func (g *Generator) Drop(name string) error {
	for _, t := range g.all {
		if t.Name == name {
			t.dropOnce.Do(func() { close(t.drop) })
			return nil
		}
	}
	return fmt.Errorf("drop target: none is named %q", name)
}

// InFlight is the number of requests that have been begun and not answered, streams not included.
func (g *Generator) InFlight() int { return int(g.inFlight.Load()) }

// Report is what has happened so far.
func (g *Generator) Report() Report { return g.rec.report() }

// Run makes the load until ctx is done, then begins nothing new and returns when every request has its
// answer or has timed out. It may be called once.
func (g *Generator) Run(ctx context.Context) error {
	if g.started.Swap(true) {
		return errors.New("make load: already run")
	}
	g.rec.begin()
	defer g.rec.end()
	var wg sync.WaitGroup
	for _, t := range g.all {
		wg.Go(func() { g.balance(ctx, t) })
	}
	if g.opts.Rate > 0 {
		wg.Go(func() { g.openLoop(ctx, &wg) })
	}
	each := func(n int, client func(context.Context)) {
		for range n {
			wg.Go(func() { client(ctx) })
		}
	}
	each(g.opts.KeepAlive, g.keepAlive)
	each(g.opts.Slow, func(ctx context.Context) { g.repeat(ctx, KindSlow, g.opts.SlowPath) })
	each(g.opts.SlowRead, func(ctx context.Context) { g.repeatStream(ctx, KindSlowRead) })
	each(g.opts.HalfClose, func(ctx context.Context) { g.repeatStream(ctx, KindHalfClose) })
	each(g.opts.Events, func(ctx context.Context) { g.oneStream(ctx, KindEvents) })
	each(g.opts.Upgrade, func(ctx context.Context) { g.oneStream(ctx, KindUpgrade) })
	each(g.opts.Silent, func(ctx context.Context) { g.oneStream(ctx, KindSilent) })
	wg.Wait()
	return nil
}

// balance takes a target out of rotation Options.Drain after it was dropped or read as unready.
func (g *Generator) balance(ctx context.Context, t *target) {
	if t.ReadyURL != "" {
		client := &http.Client{
			Timeout:   g.opts.ConnectTimeout,
			Transport: &http.Transport{DialContext: g.opts.Dial, TLSClientConfig: g.opts.TLS, DisableKeepAlives: true},
		}
		tick := time.NewTicker(g.opts.ReadyInterval)
		defer tick.Stop()
		for ready := true; ready; {
			select {
			case <-ctx.Done():
				return
			case <-t.drop:
				ready = false
			case <-tick.C:
				ready = isReady(ctx, client, t.ReadyURL)
				if !ready && ctx.Err() != nil {
					return
				}
			}
		}
	} else {
		select {
		case <-ctx.Done():
			return
		case <-t.drop:
		}
	}
	if pause(ctx, g.opts.Drain) != nil {
		return
	}
	g.mu.Lock()
	g.rotation = slices.DeleteFunc(g.rotation, func(o *target) bool { return o == t })
	close(g.changed)
	g.changed = make(chan struct{})
	g.mu.Unlock()
}

func isReady(ctx context.Context, client *http.Client, url string) bool {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return false
	}
	resp, err := client.Do(req)
	if err != nil {
		return false
	}
	_, _ = io.Copy(io.Discard, resp.Body) // the status has been read, the rest only frees the connection
	resp.Body.Close()
	return resp.StatusCode < 300
}

// next is the target whose turn it is, or nil and a channel that closes when there may be one.
func (g *Generator) next() (*target, <-chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.rotation) == 0 {
		return nil, g.changed
	}
	g.turn++
	return g.rotation[g.turn%len(g.rotation)], nil
}

// await is next, but waits for a target. It returns nil when the load is over.
func (g *Generator) await(ctx context.Context) *target {
	for ctx.Err() == nil {
		t, changed := g.next()
		if t != nil {
			return t
		}
		select {
		case <-ctx.Done():
		case <-changed:
		}
	}
	return nil
}

func (g *Generator) openLoop(ctx context.Context, wg *sync.WaitGroup) {
	begin, sent := time.Now(), 0
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		// What a late timer missed is sent now: the rate does not depend on how busy the machine is.
		for due := int(time.Since(begin).Seconds()*g.opts.Rate) + 1; sent < due; sent++ {
			t, _ := g.next()
			if t == nil {
				continue // out of rotation: a balancer has nothing to send there
			}
			if g.open.Load() >= int64(g.opts.MaxOutstanding) {
				g.rec.unsent()
				continue
			}
			g.open.Add(1)
			wg.Go(func() {
				defer g.open.Add(-1)
				g.once(KindNew, t, g.opts.Path)
			})
		}
		timer.Reset(time.Until(begin.Add(time.Duration(float64(sent) / g.opts.Rate * float64(time.Second)))))
	}
}

// once is a request on a connection of its own. What has begun is not broken off at the end of the load.
func (g *Generator) once(kind Kind, t *target, path string) {
	g.inFlight.Add(1)
	defer g.inFlight.Add(-1)
	if g.opts.HTTP2 {
		c := g.newHTTP2(t)
		defer c.close()
		g.rec.add(c.get(kind, path, false))
		return
	}
	r := Result{Kind: kind, Target: t.Name, Start: time.Now()}
	if c := g.connect(context.Background(), t, &r); c != nil {
		c.roundTrip(request(t, path, "close"), g.opts.Timeout, &r)
		c.Close()
	}
	g.rec.add(r)
}

func (g *Generator) repeat(ctx context.Context, kind Kind, path string) {
	for {
		t := g.await(ctx)
		if t == nil {
			return
		}
		begin := time.Now()
		g.once(kind, t, path)
		// A refusal takes no time: a client that asks again at once would only measure itself.
		if pause(ctx, time.Until(begin.Add(10*time.Millisecond))) != nil {
			return
		}
	}
}

// keepAlive is one client with at most one connection.
func (g *Generator) keepAlive(ctx context.Context) {
	if g.opts.HTTP2 {
		g.keepAliveHTTP2(ctx)
		return
	}
	var c *conn
	defer func() {
		if c != nil {
			c.Close()
		}
	}()
	for {
		if c != nil && c.closedByPeer() {
			g.rec.idleClosed()
			c.Close()
			c = nil
		}
		var t *target
		if c != nil {
			t = c.to // a balancer keeps the connections that it has
		} else if t = g.await(ctx); t == nil {
			return
		}
		var v Verdict
		if c, v = g.attempt(c, t, false); v == KeepAliveRace {
			if t, _ := g.next(); t != nil {
				c, v = g.attempt(nil, t, true)
			}
		}
		gap := time.Duration(rand.ExpFloat64() * float64(g.opts.Gap))
		if v.Failure() {
			gap = max(gap, 10*time.Millisecond) // see repeat
		}
		if pause(ctx, gap) != nil {
			return
		}
	}
}

// attempt sends one request on c, or on a new connection if that is nil, and returns the connection if
// it can carry another.
func (g *Generator) attempt(c *conn, t *target, retry bool) (*conn, Verdict) {
	g.inFlight.Add(1)
	defer g.inFlight.Add(-1)
	r := Result{Kind: KindKeepAlive, Target: t.Name, Start: time.Now(), Retry: retry}
	defer func() { g.rec.add(r) }()
	if c == nil {
		if c = g.connect(context.Background(), t, &r); c == nil {
			return nil, r.Verdict
		}
	}
	if !c.roundTrip(request(t, g.opts.Path, ""), g.opts.Timeout, &r) {
		c.Close()
		return nil, r.Verdict
	}
	return c, r.Verdict
}

func request(t *target, path, connection string) []byte {
	s := "GET " + path + " HTTP/1.1\r\nHost: " + t.Addr + "\r\n"
	if connection != "" {
		s += "Connection: " + connection + "\r\n"
	}
	return []byte(s + "\r\n")
}

// pause waits for d or for the end of the load.
func pause(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}

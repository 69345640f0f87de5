// SPDX-License-Identifier: Apache-2.0

package loadtest

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptrace"
	"sync/atomic"
	"time"
)

// http2Client is one client with a connection pool of its own, by net/http: it obeys GOAWAY, and repeats
// by itself what the server has said it did not process.
type http2Client struct {
	g  *Generator
	t  *target
	tr *http.Transport
}

func (g *Generator) newHTTP2(t *target) *http2Client {
	tr := &http.Transport{
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			ctx, cancel := context.WithTimeout(ctx, g.opts.ConnectTimeout)
			defer cancel()
			c, err := g.opts.Dial(ctx, network, t.Addr)
			if err != nil {
				return nil, dialError{err}
			}
			return c, nil
		},
		Protocols: new(http.Protocols),
	}
	if g.opts.TLS != nil {
		tr.TLSClientConfig = g.opts.TLS.Clone()
		tr.Protocols.SetHTTP2(true)
	} else {
		tr.Protocols.SetUnencryptedHTTP2(true)
	}
	return &http2Client{g: g, t: t, tr: tr}
}

// dialError tells a failed connection from a failed request.
type dialError struct{ error }

func (e dialError) Unwrap() error { return e.error }

func (c *http2Client) close() { c.tr.CloseIdleConnections() }

func (c *http2Client) get(kind Kind, path string, retry bool) Result {
	r := Result{Kind: kind, Target: c.t.Name, Start: time.Now(), Retry: retry}
	// The trace is called from the transport's goroutines, some of them after Do has returned.
	var connected atomic.Pointer[time.Time]
	var reused, began atomic.Bool
	ctx, cancel := context.WithTimeout(context.Background(), c.g.opts.Timeout)
	defer cancel()
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		ConnectDone: func(_, _ string, err error) {
			if err == nil {
				now := time.Now()
				connected.Store(&now)
			}
		},
		GotConn:              func(i httptrace.GotConnInfo) { reused.Store(i.Reused) },
		GotFirstResponseByte: func() { began.Store(true) },
	})
	scheme := "http://"
	if c.g.opts.TLS != nil {
		scheme = "https://"
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, scheme+c.t.Addr+path, nil)
	if err != nil {
		r.End, r.Verdict, r.Err = time.Now(), ClientError, err
		return r
	}
	resp, err := c.tr.RoundTrip(req)
	if err == nil {
		r.Status, r.ServedBy = resp.StatusCode, resp.Header.Get("X-Served-By")
		r.Bytes, err = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
	r.End, r.Reused = time.Now(), reused.Load()
	if at := connected.Load(); at != nil {
		r.Connected = *at
	}
	var dialErr dialError
	switch {
	case errors.As(err, &dialErr):
		r.Verdict, r.Err = classifyDial(err), err
	case err != nil:
		r.Verdict, r.Err = classifyRead(err, r.Reused, began.Load()), err
		if r.Verdict == Malformed {
			// GOAWAY and RST_STREAM have no exported type. Whatever ended the request, the question
			// is whether a client may repeat it.
			switch {
			case began.Load():
				r.Verdict = Partial
			case r.Reused:
				r.Verdict = KeepAliveRace
			default:
				r.Verdict = EOF
			}
		}
	case r.Status >= 400:
		r.Verdict, r.Err = Status, errors.New(resp.Status)
	default:
		r.Verdict = OK
	}
	return r
}

func (g *Generator) keepAliveHTTP2(ctx context.Context) {
	t := g.await(ctx)
	if t == nil {
		return
	}
	c := g.newHTTP2(t)
	defer func() { c.close() }()
	for retry := false; ; {
		g.inFlight.Add(1)
		r := c.get(KindKeepAlive, g.opts.Path, retry)
		g.inFlight.Add(-1)
		g.rec.add(r)
		retry = r.Verdict == KeepAliveRace
		gap := time.Duration(rand.ExpFloat64() * float64(g.opts.Gap))
		if retry || r.Verdict != OK {
			// Another connection, and to another server if this one has left the rotation.
			c.close()
			next := g.await(ctx)
			if next == nil {
				return
			}
			c = g.newHTTP2(next)
			if retry {
				continue
			}
			gap = max(gap, 10*time.Millisecond) // see repeat
		}
		if pause(ctx, gap) != nil {
			return
		}
	}
}

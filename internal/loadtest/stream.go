// SPDX-License-Identifier: Apache-2.0

package loadtest

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"time"
)

// repeatStream makes requests of an unusual shape one after the other.
func (g *Generator) repeatStream(ctx context.Context, kind Kind) {
	for {
		t := g.await(ctx)
		if t == nil {
			return
		}
		begin := time.Now()
		g.inFlight.Add(1)
		g.rec.add(g.stream(context.Background(), kind, t))
		g.inFlight.Add(-1)
		if pause(ctx, time.Until(begin.Add(10*time.Millisecond))) != nil { // see repeat
			return
		}
	}
}

// oneStream opens a stream once and watches how it ends.
func (g *Generator) oneStream(ctx context.Context, kind Kind) {
	if t := g.await(ctx); t != nil {
		g.rec.add(g.stream(ctx, kind, t))
	}
}

func (g *Generator) stream(ctx context.Context, kind Kind, t *target) Result {
	r := Result{Kind: kind, Target: t.Name, Start: time.Now()}
	c := g.connect(context.WithoutCancel(ctx), t, &r)
	if c == nil {
		return r
	}
	defer c.Close()
	switch kind {
	case KindSlowRead:
		c.slowRead(request(t, g.opts.BigPath, "close"), g.opts.SlowReadRate, g.opts.Timeout, &r)
	case KindHalfClose:
		c.halfClose(request(t, g.opts.Path, "close"), g.opts.Timeout, &r)
	case KindEvents:
		c.watch(ctx, request(t, g.opts.EventsPath, ""), &r)
	case KindUpgrade:
		req := "GET " + g.opts.UpgradePath + " HTTP/1.1\r\nHost: " + t.Addr + "\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n"
		c.watch(ctx, []byte(req), &r)
	case KindSilent:
		c.watch(ctx, nil, &r)
	}
	return r
}

// slowRead takes the answer at a rate. The receive buffer is small, so that the server's send queue
// fills, and the deadline moves with what is read: it is a slow reader, not a late one.
func (c *conn) slowRead(request []byte, rate int, timeout time.Duration, r *Result) {
	if tc, ok := c.Conn.(*net.TCPConn); ok {
		// Not smaller: a window below loopback's segment of 64 KB waits for the persist timer each time.
		_ = tc.SetReadBuffer(128 << 10) // a bigger one only makes the reader less slow
	}
	_ = c.SetDeadline(time.Now().Add(timeout)) // see roundTrip
	if _, err := c.Write(request); err != nil {
		r.Verdict, r.Err = classifyRead(err, false, false), err
		return
	}
	c.readAnswer(r, bufio.NewReaderSize(&slowReader{c: c, rate: rate, timeout: timeout, begin: time.Now()}, 4096))
}

type slowReader struct {
	c       *conn
	rate    int
	timeout time.Duration
	begin   time.Time
	n       int
}

func (s *slowReader) Read(p []byte) (int, error) {
	at := s.begin.Add(time.Duration(float64(s.n) / float64(s.rate) * float64(time.Second)))
	_ = pause(context.Background(), time.Until(at)) // that context never ends
	_ = s.c.SetReadDeadline(time.Now().Add(s.timeout))
	n, err := s.c.Read(p)
	s.n += n
	return n, err
}

// halfClose sends FIN behind the request: the server must answer all the same (RFC 9293, 3.6).
func (c *conn) halfClose(request []byte, timeout time.Duration, r *Result) {
	_ = c.SetDeadline(time.Now().Add(timeout)) // see roundTrip
	_, err := c.Write(request)
	if cw, ok := c.Conn.(interface{ CloseWrite() error }); ok && err == nil {
		err = cw.CloseWrite()
	}
	if err != nil {
		r.Verdict, r.Err = classifyRead(err, false, false), err
		return
	}
	c.readAnswer(r, c.br)
}

// watch sends the request, if there is one, and reads until the stream or the load ends. On an upgraded
// connection it keeps an echo going.
func (c *conn) watch(ctx context.Context, request []byte, r *Result) {
	var ended atomic.Bool
	stop := context.AfterFunc(ctx, func() {
		ended.Store(true)
		_ = c.SetDeadline(time.Unix(1, 0)) // wakes the reader
	})
	defer stop()
	err := func() error {
		if request == nil {
			_, err := c.br.ReadByte()
			if err == nil {
				r.Bytes = 1
				err = errors.New("bytes on a connection that asked for nothing")
			}
			return err
		}
		if _, err := c.Write(request); err != nil {
			return err
		}
		resp, err := http.ReadResponse(c.br, getRequest)
		if err != nil {
			return err
		}
		r.Status, r.ServedBy = resp.StatusCode, resp.Header.Get("X-Served-By")
		switch {
		case resp.StatusCode == http.StatusSwitchingProtocols:
			return c.echo(r)
		case resp.StatusCode >= 400:
			return errors.New(resp.Status)
		}
		r.Bytes, err = io.Copy(io.Discard, resp.Body)
		if err == nil {
			err = io.EOF
		}
		return err
	}()
	switch {
	case ended.Load():
		r.Verdict = Open
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		r.Verdict = Closed
	case r.Status >= 400:
		r.Verdict, r.Err = Status, err
	default:
		r.Verdict, r.Err = classifyRead(err, false, false), err
	}
}

// echo sends a byte as soon as the previous one has come back.
func (c *conn) echo(r *Result) error {
	b := []byte{'x'}
	for {
		if _, err := c.Write(b); err != nil {
			return err
		}
		if _, err := io.ReadFull(c.br, b); err != nil {
			return err
		}
		r.Bytes++
		if err := pause(context.Background(), 20*time.Millisecond); err != nil {
			return err
		}
	}
}

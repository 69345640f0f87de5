// SPDX-License-Identifier: Apache-2.0

package loadtest

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"syscall"
	"time"
)

// conn is a client's connection that speaks HTTP/1.1 by itself: net/http's own client hides which
// attempt failed how, and repeats requests without saying so.
type conn struct {
	net.Conn
	to   *target
	br   *bufio.Reader
	got  int64 // bytes received since the request at hand began
	uses int   // requests answered in full
	err  error // of the last read: a parser that is cut short speaks of the syntax only
}

// Read counts, and is what br reads from.
func (c *conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.got += int64(n)
	c.err = err
	return n, err
}

// connect dials, with a TLS handshake if there is to be one, and notes the time and a failure in r.
func (g *Generator) connect(ctx context.Context, t *target, r *Result) *conn {
	ctx, cancel := context.WithTimeout(ctx, g.opts.ConnectTimeout)
	defer cancel()
	nc, err := g.opts.Dial(ctx, "tcp", t.Addr)
	if err != nil {
		r.Verdict, r.Err = classifyDial(err), err
		return nil
	}
	r.Connected = time.Now()
	if g.opts.TLS != nil {
		cfg := g.opts.TLS.Clone()
		cfg.NextProtos = []string{"http/1.1"}
		if cfg.ServerName == "" {
			cfg.ServerName, _, _ = net.SplitHostPort(t.Addr)
		}
		tc := tls.Client(nc, cfg)
		if err := tc.HandshakeContext(ctx); err != nil {
			nc.Close()
			// TCP gave us the connection, so its end is one before the first byte of an answer.
			if r.Verdict = classifyRead(err, false, false); r.Verdict == Malformed {
				r.Verdict = ConnectError
			}
			r.Err = err
			return nil
		}
		nc = tc
	}
	c := &conn{Conn: nc, to: t}
	c.br = bufio.NewReaderSize(c, 4096)
	return c
}

// roundTrip sends the request and reads the whole answer into r. It tells whether the connection can carry
// another request.
func (c *conn) roundTrip(request []byte, timeout time.Duration, r *Result) (reusable bool) {
	r.Reused = c.uses > 0
	c.got, c.err = 0, nil
	_ = c.SetDeadline(time.Now().Add(timeout)) // fails on a closed connection only, and then so does Write
	if _, err := c.Write(request); err != nil && isTimeout(err) {
		r.Verdict, r.Err = Timeout, err
		return false
	}
	// A server may answer and close without having read everything: a failed write decides nothing.
	return c.readAnswer(r, c.br)
}

func (c *conn) readAnswer(r *Result, br *bufio.Reader) (reusable bool) {
	resp, err := http.ReadResponse(br, getRequest)
	if err != nil {
		err = or(c.err, err)
		r.Verdict, r.Err = classifyRead(err, r.Reused, c.got > 0), err
		return false
	}
	r.Bytes, err = io.Copy(io.Discard, resp.Body)
	resp.Body.Close()
	r.Status, r.ServedBy = resp.StatusCode, resp.Header.Get("X-Served-By")
	switch {
	case err != nil:
		r.Verdict, r.Err = classifyRead(err, r.Reused, true), err
		return false
	case resp.StatusCode >= 400:
		r.Verdict, r.Err = Status, errors.New(resp.Status)
	default:
		r.Verdict = OK
	}
	c.uses++
	return !resp.Close
}

// getRequest tells http.ReadResponse that a body may follow.
var getRequest = &http.Request{Method: http.MethodGet}

// closedByPeer tells whether the server has ended an idle connection, as a client's pool notices
// before it reuses one.
func (c *conn) closedByPeer() bool {
	raw := c.Conn
	tc, isTLS := raw.(*tls.Conn)
	if isTLS {
		raw = tc.NetConn()
	}
	sc, ok := raw.(syscall.Conn)
	if !ok {
		return false
	}
	rc, err := sc.SyscallConn()
	if err != nil {
		return true
	}
	var n int
	var peekErr error
	if err := rc.Control(func(fd uintptr) {
		var b [1]byte
		n, _, peekErr = syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
	}); err != nil {
		return true
	}
	switch {
	case errors.Is(peekErr, syscall.EAGAIN):
		return false
	case peekErr != nil || n == 0:
		return true
	case !isTLS:
		return false // bytes that nobody asked for: the next answer will be malformed, and say so
	}
	// Under TLS it may be a session ticket, or the alert that precedes the FIN.
	_ = c.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	_, err = c.br.Peek(1)
	return err != nil && !isTimeout(err)
}

// SPDX-License-Identifier: Apache-2.0

package apitest

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"

	"github.com/ebbproxy/ebb/internal/api"
)

// Events is a stream of a session's events, as an application reads it. It belongs to one goroutine.
type Events struct {
	Session api.Session // as it was when the stream was opened

	conn  net.Conn
	lines *bufio.Scanner
}

// OpenEvents opens the stream of a session over the socket at path, and returns when it has begun. The end of ctx closes it.
func OpenEvents(ctx context.Context, path, id string) (e *Events, err error) {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("open events of a session: %w", err)
	}
	context.AfterFunc(ctx, func() { conn.Close() })
	defer func() {
		if err != nil {
			conn.Close()
		}
	}()
	if _, err := fmt.Fprintf(conn, "GET /v1/session/events HTTP/1.1\r\nHost: ebb\r\nEbb-Session: %s\r\n\r\n", id); err != nil {
		return nil, fmt.Errorf("open events of a session: %w", err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return nil, fmt.Errorf("open events of a session: %w", err)
	}
	e = &Events{conn: conn, lines: bufio.NewScanner(resp.Body)}
	e.lines.Buffer(nil, 1<<20)
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("open events of a session: %s", resp.Status)
	}
	return e, e.read(&e.Session)
}

// Next is the next event. The error is io.ErrUnexpectedEOF where the stream ends without one.
func (e *Events) Next() (ev api.SessionEvent, err error) {
	err = e.read(&ev)
	return ev, err
}

// Close closes the connection. It is idempotent.
func (e *Events) Close() error {
	_ = e.conn.Close() // nothing was written
	return nil
}

// read reads the data of one event, which is one line.
func (e *Events) read(v any) error {
	for e.lines.Scan() {
		if data, ok := strings.CutPrefix(e.lines.Text(), "data: "); ok {
			return json.Unmarshal([]byte(data), v)
		}
	}
	if err := e.lines.Err(); err != nil {
		return fmt.Errorf("read events of a session: %w", err)
	}
	return fmt.Errorf("read events of a session: %w", io.ErrUnexpectedEOF)
}

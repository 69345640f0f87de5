// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"fmt"
	"net/http"
)

// OpenSession registers this process with its backend.
func (c *Client) OpenSession(ctx context.Context, r SessionRequest) (Session, error) {
	var s Session
	err := c.doAs(ctx, "", http.MethodPost, "/v1/session", r, &s)
	return s, err
}

// SessionCall has a session say or ask something: ErrUnknownSession if it must register anew, ErrFlushing of a hold that comes
// too late, ErrStale, ErrNotPossible. An empty id is the only session of this process. The answer to end is empty.
func (c *Client) SessionCall(ctx context.Context, id string, q SessionCall) (Session, error) {
	var (
		s    Session
		body any
	)
	switch q.Op {
	case "get":
		return s, c.doAs(ctx, id, http.MethodGet, "/v1/session", nil, &s)
	case "end":
		return s, c.doAs(ctx, id, http.MethodDelete, "/v1/session", nil, nil)
	case "ack":
		body = ackRequest{q.Seq}
	case "heartbeat":
		body = heartbeatRequest{q.Remaining}
	case "hold":
		body = holdRequest{q.ID, q.Name}
	case "release":
		body = releaseRequest{q.ID, q.Name}
	case "flushed":
		body = flushedRequest{q.Drain, q.Error}
	case "extend":
		body = extensionRequest{q.ByMS, q.Drain}
	default:
		return s, fmt.Errorf("%q is nothing that a session says", q.Op)
	}
	err := c.doAs(ctx, id, http.MethodPost, "/v1/session/"+q.Op, body, &s)
	return s, err
}

// EndSession ends a session, whose leases are released.
func (c *Client) EndSession(ctx context.Context, id string) error {
	_, err := c.SessionCall(ctx, id, SessionCall{Op: "end"})
	return err
}

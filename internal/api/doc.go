// SPDX-License-Identifier: Apache-2.0

// Package api is the control interface of Ebb: HTTP/1.1 and JSON over Unix sockets and TCP, its server, its
// client, and the numbered event log behind GET /v1/events. Who may do what over a listener is its [Access].
//
// It is not the state machine and owns no backend. What it serves it asks of a [Source], which the
// owner of the backends implements; what it is told to do it hands to the same Source, once per
// request, after the request has been checked against the types of this package.
//
// A server:
//
//	ln, err := api.Listen("/run/ebb/run/web.sock")
//	…
//	srv, err := api.NewServer(api.Options{Source: src, Log: log, Metrics: metrics.Handler()})
//	…
//	err = srv.Serve(ctx, ln) // blocks until ctx is over
//
// A client:
//
//	c, err := api.Dial(ctx, "/run/ebb/run/web.sock")
//	…
//	d, err := c.Drain(ctx, "web", api.DrainRequest{Reason: "deploy 7"})
package api

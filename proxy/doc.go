// SPDX-License-Identifier: Apache-2.0

// Package proxy is the relay: it carries connections that arrive at a backend which has been told to stop to a peer
// that still serves, and parks them while there is none.
//
// It accepts, chooses a peer, dials it and copies bytes both ways until both sides are done: a half-close is passed on
// when every byte before it is through, a reset is passed on as a reset, and what one side does not take is not read
// from the other. A few event loops do that over epoll(7) with splice(2). An idle connection costs two descriptors and
// no goroutine, pipe or buffer.
//
// It is not a load balancer for the life of a service, understands no protocol but the request line of a health check,
// and needs neither root nor BPF. Its sockets are made in the network namespace of the process. A byte is never
// repeated: what a client sent goes to one peer only, after the dial of that peer has succeeded.
//
//	r, err := proxy.New(proxy.Options{Peers: []proxy.Peer{{Address: netip.MustParseAddrPort("192.0.2.10:80")}}})
//	go r.Serve(ctx, listener) // until ctx ends; what is relayed goes on
//	r.Park()                  // nobody serves: connections wait
//	err = r.Release()         // somebody does again: they are carried there, a few at a time
//	<-r.Idle()                // nothing is relayed any more
//	err = r.Close()
package proxy

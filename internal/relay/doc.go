// SPDX-License-Identifier: Apache-2.0

// Package relay is the process that carries late connections, and its owner's end of it.
//
// The process is this binary as `ebb relay`. It inherits a listener that already takes connections, has no capability
// left before it reads a byte, and lives outside its owner's cgroup where that can be had, so that killing, restarting
// or upgrading the owner does not touch what it carries. The next owner finds it under its name. It ends by itself:
// told to, as soon as it carries nothing; or when its time is over, nobody owns it and it carries nothing.
//
// It does not decide who goes there: the kernel's rule does, and the owner writes it. How bytes are carried is package
// proxy.
//
//	p, err := relay.Start(ctx, listener, relay.Options{Name: "web", RunDir: "/run/ebb", Until: deadline})
//	err = p.SetPeers(ctx, []proxy.Peer{{Address: sibling}})
//	err = p.Adopt(ctx, fd) // a connection out of an application's accept queue
//	s, err := p.Stats(ctx) // s.Relay.Active is what it carries
//	err = p.Stop(ctx)      // accepts no more
//	<-p.Done()             // has ended
//	err = p.Close()        // gives it up; it lives on
package relay

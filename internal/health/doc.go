// SPDX-License-Identifier: Apache-2.0

// Package health asks a backend again and again whether it is ready, by HTTP,
// TCP, gRPC or a program, inside the backend's network namespace.
//
// It looks at one backend and decides nothing about it: what a backend that is
// not ready means for new connections is for its reader. It is not how an
// orchestrator is answered, either.
//
//	c, err := health.New(health.Options{Probe: health.Probe{HTTP: &health.HTTPProbe{Path: "/healthz", Port: 8081}}, NetNS: int(ns.Fd())})
//	if err != nil { … }
//	go c.Run(ctx)
//	for range c.Changed() {
//		fmt.Println(c.State().Ready)
//	}
package health

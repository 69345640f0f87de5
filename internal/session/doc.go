// SPDX-License-Identifier: Apache-2.0

// Package session keeps the sessions of one backend generation: which processes have registered, what they have been
// told and have not acknowledged, what they hold, and since when they are silent. It knows neither sockets nor who may
// call: the server of the API decides that. It begins no drain and changes no admission: it says what it finds, and its
// owner acts.
//
//	b, err := session.New(session.Options{Backend: "web", Service: "web", Gen: 7, File: path, Started: probes.Started,
//		Emit: publish, Changed: changed, …})
//	if err != nil {
//		return err
//	}
//	machine.SetHolds(b.Holds())             // before it runs, and in changed
//	go b.Run(ctx)                           // watches silence and ends of processes
//	b.Follow(machine.Status())              // at every change of it
//	err = b.Draining(notice, flushBy)       // in World.Notify
//	err = b.Flush(request)                  // in World.Flush, and with an api hook then
//	err = b.Answered(ctx, request.Drain)
package session

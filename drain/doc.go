// SPDX-License-Identifier: Apache-2.0

// Package drain decides how one generation of a backend stops: when new connections are turned away,
// how long those in flight are waited for, when the application is told to flush, what is cut at the
// deadline, and what the outcome was. It does no I/O and knows neither sockets nor processes: all that
// it sees and does goes through a [World]. It is not a supervisor and it keeps no journal of its own.
//
//	m, err := drain.New(drain.Options{Backend: "web", Gen: 7, World: world, Log: log})
//	if err != nil {
//		return err
//	}
//	go m.Run(ctx)                   // one goroutine owns the machine
//	st, err := m.Begin(ctx, drain.Request{Cause: drain.CauseSignal, Policy: policy, Force: true})
//	if err != nil {
//		return err
//	}
//	log.Info("draining", "drain", st.ID, "deadline", st.Deadline)
//	<-m.Done()                      // the drain is over
//	return report(m.Status())       // st.Outcome: drained, expired, lost or cancelled
package drain

// SPDX-License-Identifier: Apache-2.0

// Package hook tells an application of a moment of its drain: by a signal, by an
// HTTP request, or by a program that is run.
//
// It tells once, and repeats itself only where it cannot know that it was heard.
// It does not decide when, it does not wait for what the application does about
// it, and it does not speak for the application's own session (see ErrAPI).
//
//	h := hook.Hook{HTTP: "http://127.0.0.1:8081/flush"}
//	if err := h.Validate(); err != nil { … }
//	ctx, cancel := context.WithTimeout(ctx, left)
//	defer cancel()
//	err := h.Deliver(ctx, hook.Target{NetNS: int(ns.Fd()), Signal: signal, Log: log}, hook.Message{
//		Drain: id, Backend: "web-blue", Service: "web", Gen: 7,
//		Kind: hook.Flush, Reason: drain.FlushZero, Cause: drain.CauseOperator, TimeLeft: left,
//	})
package hook

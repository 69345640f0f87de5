// SPDX-License-Identifier: Apache-2.0

// Package hook tells an application of a moment of its drain: by a signal, an
// HTTP request or a program that is run.
package hook

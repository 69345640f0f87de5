// SPDX-License-Identifier: Apache-2.0

package probes

import "errors"

var (
	// ErrNoDiag means that this kernel does not answer sock_diag for the protocol asked: the module is not
	// loaded, and could not be loaded from here.
	ErrNoDiag = errors.New("sock_diag is not available (modprobe tcp_diag; for UDP udp_diag, for MPTCP mptcp_diag)")

	// ErrCannotForce means that the kernel cannot destroy a connection on request.
	ErrCannotForce = errors.New("this kernel cannot close connections by force (it was built without CONFIG_INET_DIAG_DESTROY)")

	// ErrTorn means that each attempt at a dump was interrupted by a change; nothing of it can be believed.
	ErrTorn = errors.New("the socket tables changed during every attempt to list them")

	// ErrGone means that the process, descriptor or connection does not exist any more.
	ErrGone = errors.New("process or connection is gone")

	// ErrChanged means that the connection was used since it was looked at, so nothing was done to it.
	ErrChanged = errors.New("connection is in use again")

	// ErrNoFile means that a connection was observed without the process and descriptor that hold it. [Locate]
	// finds them.
	ErrNoFile = errors.New("process and descriptor of the connection are not known")

	// ErrNotReady means that an application answered a readiness probe with a refusal, or not at all.
	ErrNotReady = errors.New("application is not ready")
)

// SPDX-License-Identifier: Apache-2.0

//go:build !amd64

package front

// more are the system calls that this architecture alone has.
var more []uint32

// SPDX-License-Identifier: Apache-2.0

package front

import "golang.org/x/sys/unix"

// more are the system calls that this architecture alone has.
var more = []uint32{unix.SYS_FORK, unix.SYS_VFORK, unix.SYS_MODIFY_LDT, unix.SYS_IOPL, unix.SYS_IOPERM}

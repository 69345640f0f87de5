// SPDX-License-Identifier: Apache-2.0

package front

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// nobody is the user of a front if there is no user of its own, by its number too where no file of users has it.
const (
	ownUser   = "ebb-front"
	nobody    = "nobody"
	nobodyUID = 65534
)

// command is a process of this binary that begins as another user, without a capability.
func command(args ...string) *exec.Cmd {
	// Not a path, behind which a newer version may be already, and which another user may not reach.
	cmd := exec.Command("/proc/self/exe", append([]string{Arg}, args...)...)
	cmd.Args[0] = "ebb"
	// Of the environment, which may hold secrets, it gets what is for the runtime: GOTRACEBACK, GODEBUG and their like.
	cmd.Env = []string{"GOGC=50"} // it holds a few lists, and little changes
	for _, v := range os.Environ() {
		if strings.HasPrefix(v, "GO") {
			cmd.Env = append(cmd.Env, v)
		}
	}
	uid, gid := account()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Credential: &syscall.Credential{Uid: uid, Gid: gid}}
	return cmd
}

func account() (uid, gid uint32) {
	for _, name := range []string{ownUser, nobody} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		id, err := strconv.ParseUint(u.Uid, 10, 32)
		group, gerr := strconv.ParseUint(u.Gid, 10, 32)
		if errors.Join(err, gerr) == nil && id != 0 && group != 0 {
			return uint32(id), uint32(group)
		}
	}
	return nobodyUID, nobodyUID
}

// confine makes sure that this process has no privilege and never gets one, and denies it system calls that it has no use
// for. denied says whether the kernel could do the latter.
func confine() (denied bool, err error) {
	if slices.Contains([]int{os.Getuid(), os.Geteuid(), os.Getgid(), os.Getegid()}, 0) {
		return false, errors.New("a front is not root; `ebb front` is started by `ebb agent`")
	}
	var caps [2]unix.CapUserData
	if err := unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &caps[0]); err != nil {
		return false, fmt.Errorf("read own capabilities: %w", err)
	}
	for _, c := range caps {
		if c.Permitted|c.Inheritable != 0 {
			return false, errors.New("a front has no capabilities; `ebb front` is started by `ebb agent`")
		}
	}
	// Other processes of the same user are kept out of its memory.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return false, fmt.Errorf("become not dumpable: %w", err)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	// Of this thread; the filter brings it to all others.
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return false, fmt.Errorf("set no_new_privs: %w", err)
	}
	return filter(), nil
}

// denials are the system calls that fail with EPERM: all that starts, enters, traces, mounts or loads anything, or makes a
// new way out. A list of what is allowed would be safer and would break with the next version of Go.
var denials = []uint32{
	unix.SYS_EXECVE, unix.SYS_EXECVEAT, unix.SYS_PTRACE, unix.SYS_PROCESS_VM_READV, unix.SYS_PROCESS_VM_WRITEV, unix.SYS_KCMP,
	unix.SYS_PIDFD_GETFD, unix.SYS_KILL, unix.SYS_TKILL, unix.SYS_RT_SIGQUEUEINFO, unix.SYS_RT_TGSIGQUEUEINFO, unix.SYS_PRCTL,
	unix.SYS_SOCKET, unix.SYS_SOCKETPAIR, unix.SYS_CONNECT, unix.SYS_BIND,
	unix.SYS_UNSHARE, unix.SYS_SETNS, unix.SYS_CHROOT, unix.SYS_PIVOT_ROOT, unix.SYS_MOUNT, unix.SYS_UMOUNT2,
	unix.SYS_OPEN_TREE, unix.SYS_MOVE_MOUNT, unix.SYS_FSOPEN, unix.SYS_FSCONFIG, unix.SYS_FSMOUNT, unix.SYS_FSPICK, unix.SYS_MOUNT_SETATTR,
	unix.SYS_NAME_TO_HANDLE_AT, unix.SYS_OPEN_BY_HANDLE_AT,
	unix.SYS_BPF, unix.SYS_PERF_EVENT_OPEN, unix.SYS_USERFAULTFD, unix.SYS_IO_URING_SETUP, unix.SYS_IO_URING_ENTER, unix.SYS_IO_URING_REGISTER,
	unix.SYS_KEYCTL, unix.SYS_ADD_KEY, unix.SYS_REQUEST_KEY, unix.SYS_MEMFD_CREATE, unix.SYS_PERSONALITY,
	unix.SYS_INIT_MODULE, unix.SYS_FINIT_MODULE, unix.SYS_DELETE_MODULE, unix.SYS_KEXEC_LOAD, unix.SYS_REBOOT, unix.SYS_SWAPON,
	unix.SYS_SETTIMEOFDAY, unix.SYS_CLOCK_SETTIME, unix.SYS_ADJTIMEX, unix.SYS_CLOCK_ADJTIME,
}

// arches are those whose numbers of system calls the filter knows to be this build's.
var arches = map[string]uint32{"amd64": unix.AUDIT_ARCH_X86_64, "arm64": unix.AUDIT_ARCH_AARCH64}

// x32 is the bit of a second set of numbers on amd64.
const x32 = 0x40000000

// filter denies system calls to every thread; false if this kernel or architecture cannot.
func filter() bool {
	arch, ok := arches[runtime.GOARCH]
	if !ok {
		return false
	}
	const (
		load   = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
		equal  = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		from   = unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K
		set    = unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K
		ret    = unix.BPF_RET | unix.BPF_K
		deny   = unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)
		absent = unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)
	)
	// struct seccomp_data: the number at 0, the architecture at 4, the low half of the first argument at 16.
	prog := []unix.SockFilter{
		{Code: load, K: 4},
		{Code: equal, K: arch, Jt: 1},
		{Code: ret, K: deny},
		{Code: load, K: 0},
		{Code: from, K: x32, Jf: 1},
		{Code: ret, K: deny},
		// A thread is no process; clone3 hides which it is, and whoever gets ENOSYS takes clone.
		{Code: equal, K: unix.SYS_CLONE3, Jf: 1},
		{Code: ret, K: absent},
		{Code: equal, K: unix.SYS_CLONE, Jf: 4},
		{Code: load, K: 16},
		{Code: set, K: unix.CLONE_THREAD, Jf: 1},
		{Code: ret, K: unix.SECCOMP_RET_ALLOW},
		{Code: ret, K: deny},
		// A signal to one of our own threads, as the runtime sends them.
		{Code: equal, K: unix.SYS_TGKILL, Jf: 4},
		{Code: load, K: 16},
		{Code: equal, K: uint32(os.Getpid()), Jf: 1},
		{Code: ret, K: unix.SECCOMP_RET_ALLOW},
		{Code: ret, K: deny},
	}
	for _, nr := range slices.Concat(denials, more) {
		prog = append(prog, unix.SockFilter{Code: equal, K: nr, Jf: 1}, unix.SockFilter{Code: ret, K: deny})
	}
	prog = append(prog, unix.SockFilter{Code: ret, K: unix.SECCOMP_RET_ALLOW})
	fprog := unix.SockFprog{Len: uint16(len(prog)), Filter: &prog[0]}
	stuck, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&fprog)))
	return errno == 0 && stuck == 0
}

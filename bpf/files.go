// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// File is one TCP socket that a process has open, as the kernel's own structures show it. Of an MPTCP
// socket it is the first subflow. Times are "ago", in whole ticks of the kernel: two that are equal fell
// in one tick.
type File struct {
	PID      int // as asked for
	FD       int
	Inode    uint64 // of the socket
	Cookie   uint64
	NetNS    uint64
	Local    netip.AddrPort
	Remote   netip.AddrPort
	Protocol int   // IPPROTO_TCP or IPPROTO_MPTCP
	State    uint8 // of TCP: 1 ESTABLISHED, 10 LISTEN; see tcp_states.h
	Shutdown uint8 // 1 receive, 2 send
	V6Only   bool
	Tagged   bool
	Tag      Tag // if Tagged

	// LastSent, LastReceived: since the last data segment went out or came in. LastAck: since
	// the last segment that acknowledged something.
	LastSent, LastReceived, LastAck time.Duration
	Tick                            time.Duration // of the kernel

	// Sequence numbers, modulo 2^32, and counters, by their names in struct tcp_sock.
	RcvNxt, CopiedSeq, SndUna, SndNxt, WriteSeq, SndWl1, SndWnd, RcvWup uint32
	DataSegsIn, DataSegsOut                                             uint32
	BytesReceived, BytesAcked, BytesSent                                uint64

	AckBacklog, MaxAckBacklog uint32 // of a listener: its accept queue and the limit
}

// AdoptTarget says whose the adopted sockets become. Only and Exclude are as in Watch.
type AdoptTarget struct {
	Backend, Gen  uint64
	Only, Exclude []uint16
}

// fileReaders are the iterators over the files of a process. Their parameters are in maps, so one walk
// runs at a time.
type fileReaders struct {
	mu   sync.Mutex
	objs struct {
		Files    *ebpf.Program `ebpf:"files"`
		Adopt    *ebpf.Program `ebpf:"adopt"`
		Disown   *ebpf.Program `ebpf:"disown"`
		Leave    *ebpf.Program `ebpf:"leave"`
		Walk     *ebpf.Map     `ebpf:"walk"`
		Walked   *ebpf.Map     `ebpf:"walked"`
		Adopting *ebpf.Map     `ebpf:"adopting"`
		Chosen   *ebpf.Map     `ebpf:"chosen"`
	}
	tagsID uint32 // the id of the map of tags, by which an MPTCP subflow's tag is recognised
}

func (r *fileReaders) close() error {
	if r == nil {
		return nil
	}
	o := &r.objs
	return errors.Join(o.Files.Close(), o.Adopt.Close(), o.Disown.Close(), o.Leave.Close(),
		o.Walk.Close(), o.Walked.Close(), o.Adopting.Close(), o.Chosen.Close())
}

func (h *Host) readers() (*fileReaders, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil, os.ErrClosed
	}
	if h.files != nil {
		return h.files, nil
	}
	spec, err := loadFiles()
	if err != nil {
		return nil, err
	}
	if err := spec.Variables[filesVarNetnsByInode].Set(netnsByInode()); err != nil {
		return nil, fmt.Errorf("set kind of namespace id: %w", err)
	}
	r := &fileReaders{}
	if err := spec.LoadAndAssign(&r.objs, &ebpf.CollectionOptions{MapReplacements: h.replacements(spec)}); err != nil {
		return nil, fmt.Errorf("load file readers: %w: %w", ErrNotSupported, err)
	}
	info, err := h.maps.Tags.Info()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("identify map of tags: %w", err), r.close())
	}
	id, ok := info.ID()
	if !ok {
		return nil, errors.Join(fmt.Errorf("identify map of tags: %w", ErrNotSupported), r.close())
	}
	r.tagsID = uint32(id)
	h.files = r
	return r, nil
}

// EachFile tells of each TCP socket that a process has open, once, and keeps none: there may be a hundred
// thousand. each must not ask for files itself. pid is in the caller's pid namespace. What was told before an error is not all.
// ErrNotSupported on kernels without the iterator (before 5.11, or without BTF); ESRCH if there is no
// such process.
func (h *Host) EachFile(pid int, each func(File)) error {
	r, err := h.readers()
	if err != nil {
		return fmt.Errorf("read files of %d: %w", pid, err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	seen := map[uint64]bool{} // Linux 6.1 shows each twice
	err = r.walk(r.objs.Files, pid, filesWalkOrder{Tags: r.tagsID}, func(records io.Reader) error {
		var k filesFileRecord
		raw := make([]byte, binary.Size(k))
		for {
			if _, err := io.ReadFull(records, raw); errors.Is(err, io.EOF) {
				return nil
			} else if err != nil {
				return err
			}
			if _, err := binary.Decode(raw, binary.NativeEndian, &k); err != nil {
				return err
			}
			if !seen[k.Inode] {
				seen[k.Inode] = true
				each(fileOf(pid, &k))
			}
		}
	})
	if err != nil {
		return fmt.Errorf("read files of %d: %w", pid, err)
	}
	return nil
}

// Files lists what EachFile tells.
func (h *Host) Files(pid int) ([]File, error) {
	var files []File
	if err := h.EachFile(pid, func(f File) { files = append(files, f) }); err != nil {
		return nil, err
	}
	return files, nil
}

func fileOf(pid int, k *filesFileRecord) File {
	local := addressOf(censusAddress(k.Local))
	ago := func(at uint32) time.Duration { return time.Duration(k.Now-at) * tick() }
	f := File{
		PID: pid, FD: int(k.Fd), Inode: k.Inode, Cookie: k.Cookie, NetNS: local.NetNS,
		Local:    local.AddrPort,
		Remote:   netip.AddrPortFrom(addrOf(k.Local.Family, k.Remote), k.RemotePort),
		Protocol: int(k.Protocol), State: k.State, Shutdown: k.Shutdown, V6Only: k.V6only != 0,
		Tagged:   k.Tagged != 0,
		LastSent: ago(k.Lsndtime), LastReceived: ago(k.Lrcvtime), LastAck: ago(k.RcvTstamp), Tick: tick(),
		RcvNxt: k.RcvNxt, CopiedSeq: k.CopiedSeq, SndUna: k.SndUna, SndNxt: k.SndNxt, WriteSeq: k.WriteSeq,
		SndWl1: k.SndWl1, SndWnd: k.SndWnd, RcvWup: k.RcvWup,
		DataSegsIn: k.DataSegsIn, DataSegsOut: k.DataSegsOut,
		BytesReceived: k.BytesReceived, BytesAcked: k.BytesAcked, BytesSent: k.BytesSent,
		AckBacklog: k.AckBacklog, MaxAckBacklog: k.MaxAckBacklog,
	}
	if f.Tagged {
		f.Tag = tagOf(censusTag(k.Tag))
	}
	return f
}

// tick is the length of a jiffy. The coarse clock advances once a tick and tells so as its resolution
// (kernel/time/posix-timers.c, posix_get_coarse_res), which no kernel configuration has to be read for.
var tick = sync.OnceValue(func() time.Duration {
	var res unix.Timespec
	if err := unix.ClockGetres(unix.CLOCK_MONOTONIC_COARSE, &res); err != nil || res.Nano() <= 0 {
		return 4 * time.Millisecond // HZ=250, the usual configuration
	}
	return time.Duration(res.Nano())
})

// Adopt makes what the processes have open already the backend's: their listeners, which begin to be
// counted with what comes, and the connections that their listeners have accepted. What a backend was removed from (see
// RemoveBackend) comes with its counts. Install and watch
// first, so that nothing falls between. It is idempotent and returns how many were new.
//
// A connection that waits in an accept queue has no file and is adopted once it is accepted: repeat
// until a call adopts none and the accept queue was once seen empty. An MPTCP
// listener that is not counted yet cannot be adopted: when the rest is done the error wraps ErrAdoptMPTCP,
// and the backend's count is unknown.
func (h *Host) Adopt(pids []int, t AdoptTarget) (listeners, conns int, err error) {
	r, err := h.readers()
	if err != nil {
		return 0, 0, fmt.Errorf("adopt: %w", err)
	}
	target, err := Watch{Backend: t.Backend, Gen: t.Gen, Only: t.Only, Exclude: t.Exclude}.kernel(0)
	if err != nil {
		return 0, 0, fmt.Errorf("adopt: %w", err)
	}
	order := filesWalkOrder{Tags: r.tagsID}
	order.Target.Backend, order.Target.Gen = target.Backend, target.Gen
	order.Target.Nonly, order.Target.Nexclude = target.Nonly, target.Nexclude
	order.Target.Only, order.Target.Exclude = target.Only, target.Exclude

	r.mu.Lock()
	defer r.mu.Unlock()
	done, err := r.adopt(r.objs.Adopt, pids, order)
	if err != nil {
		return 0, 0, fmt.Errorf("adopt: %w", err)
	}
	listeners = int(done.Listeners)
	if err := h.fillAdopting(r, t.Backend); err != nil {
		return listeners, 0, fmt.Errorf("adopt: %w", err)
	}
	mptcp := done.Mptcp
	order.Conns = 1
	// Most walks are two: one that adopts, one that finds nothing left. Under a storm of accepts each
	// finds some; what is left then is for the caller's next call.
	for range 8 {
		done, err := r.adopt(r.objs.Adopt, pids, order)
		conns += int(done.Conns)
		if err != nil {
			return listeners, conns, fmt.Errorf("adopt: %w", err)
		}
		if done.Conns == 0 && done.Healed == 0 {
			break
		}
	}
	if mptcp > 0 {
		return listeners, conns, fmt.Errorf("adopt: %d listeners %w", mptcp, ErrAdoptMPTCP)
	}
	return listeners, conns, nil
}

// fillAdopting says which listener a connection on a port is counted with. Of several listeners on one
// port any will do: they are one backend's.
func (h *Host) fillAdopting(r *fileReaders, backend uint64) error {
	if err := removeWhere(r.objs.Adopting, func(filesPortKey, censusTag) bool { return true }); err != nil {
		return err
	}
	cs, err := h.Counts(backend)
	if err != nil {
		return err
	}
	for _, c := range cs {
		if !c.Listening {
			continue
		}
		key := filesPortKey{Netns: c.Address.NetNS, Port: c.Address.AddrPort.Port()}
		tag := censusTag{Backend: c.Backend, Gen: c.Gen, Cookie: c.Cookie}
		if c.Aside {
			tag.Flags = listenerAside
		}
		if err := r.objs.Adopting.Put(&key, &tag); err != nil {
			return err
		}
	}
	return nil
}

// adopt walks the files of the processes once. One that has ended meanwhile has nothing to adopt.
func (r *fileReaders) adopt(prog *ebpf.Program, pids []int, order filesWalkOrder) (filesWalkResult, error) {
	var done filesWalkResult
	if err := r.objs.Walked.Put(uint32(0), &done); err != nil {
		return done, err
	}
	for _, pid := range pids {
		if err := r.walk(prog, pid, order, drop); err != nil && !errors.Is(err, unix.ESRCH) {
			return done, fmt.Errorf("walk files of %d: %w", pid, err)
		}
	}
	err := r.objs.Walked.Lookup(uint32(0), &done)
	return done, err
}

// leave gives up what the processes of a backend have open without ending its counts, which go on for nobody until a backend
// adopts the sockets.
func (h *Host) leave(backend uint64, pids []int) error {
	if len(pids) == 0 {
		return nil
	}
	r, err := h.readers()
	if errors.Is(err, ErrNotSupported) {
		return nil // and nothing can be adopted
	} else if err != nil {
		return err
	}
	order := filesWalkOrder{Tags: r.tagsID}
	order.Target.Backend = backend
	r.mu.Lock()
	defer r.mu.Unlock()
	_, err = r.adopt(r.objs.Leave, pids, order)
	return err
}

// Disown takes connections that the calling process holds out of their backend's count, as if they had closed, and
// returns how many were in one. It is for what was taken out of an application's accept queue to be served by
// somebody else. An MPTCP connection stays counted until it closes: no kernel helper reaches its subflow from a
// file.
func (h *Host) Disown(fds []int) (n int, err error) {
	if len(fds) == 0 {
		return 0, nil
	}
	r, err := h.readers()
	if err != nil {
		return 0, fmt.Errorf("disown connections: %w", err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	defer func() {
		if rerr := removeWhere(r.objs.Chosen, func(uint64, uint32) bool { return true }); rerr != nil {
			err = errors.Join(err, fmt.Errorf("disown connections: %w", rerr))
		}
	}()
	for _, fd := range fds {
		cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
		if err == nil {
			err = r.objs.Chosen.Put(cookie, uint32(1))
		}
		if err != nil {
			return 0, fmt.Errorf("disown connection %d: %w", fd, err)
		}
	}
	var done filesWalkResult
	if err := r.objs.Walked.Put(uint32(0), &done); err != nil {
		return 0, fmt.Errorf("disown connections: %w", err)
	}
	if err := r.walk(r.objs.Disown, os.Getpid(), filesWalkOrder{Tags: r.tagsID}, drop); err != nil {
		return 0, fmt.Errorf("disown connections: %w", err)
	}
	if err := r.objs.Walked.Lookup(uint32(0), &done); err != nil {
		return 0, fmt.Errorf("disown connections: %w", err)
	}
	return int(done.Conns), nil
}

// Commands and attach type of include/uapi/linux/bpf.h.
const (
	bpfLinkCreate = 28
	bpfIterCreate = 33
	bpfTraceIter  = 28
)

// drop reads what an iterator shows that is run for what it does.
func drop(shown io.Reader) error {
	_, err := io.Copy(io.Discard, shown)
	return err
}

// walk runs an iterator over the files of one process, as fast as what it shows is read. Before Linux 6.1 it runs over those
// of all processes of the caller's pid namespace, and the program picks the one by its global id.
func (r *fileReaders) walk(prog *ebpf.Program, pid int, order filesWalkOrder, read func(io.Reader) error) error {
	if pid <= 0 {
		return unix.ESRCH
	}
	// The iterator shows nothing for a process that is not there.
	if err := unix.Kill(pid, 0); errors.Is(err, unix.ESRCH) {
		return err
	}
	linkFD, err := attachIter(prog, pid)
	if unlimited(err) {
		if order.Tgid, _, err = TaskID(pid); err != nil {
			return err
		}
		linkFD, err = attachIter(prog, 0)
	}
	if err != nil {
		return fmt.Errorf("attach iterator: %w", err)
	}
	defer unix.Close(linkFD)
	if err := r.objs.Walk.Put(uint32(0), &order); err != nil {
		return fmt.Errorf("order walk: %w", err)
	}
	return readIter(linkFD, read)
}

// unlimited says whether an iterator was refused because the kernel cannot limit it to a process.
func unlimited(err error) bool { return errors.Is(err, unix.E2BIG) || errors.Is(err, unix.EINVAL) }

// walkTasks runs an iterator over the threads of one process, or before Linux 6.1 over all tasks.
func walkTasks(prog *ebpf.Program, pid int) (shown []byte, err error) {
	linkFD, err := attachIter(prog, pid)
	if unlimited(err) {
		linkFD, err = attachIter(prog, 0)
	}
	if err != nil {
		return nil, fmt.Errorf("attach iterator: %w", err)
	}
	defer unix.Close(linkFD)
	err = readIter(linkFD, func(all io.Reader) error {
		shown, err = io.ReadAll(all)
		return err
	})
	return shown, err
}

func readIter(linkFD int, read func(io.Reader) error) error {
	iter := struct{ link, flags uint32 }{link: uint32(linkFD)}
	fd, err := bpfCall(bpfIterCreate, unsafe.Pointer(&iter), unsafe.Sizeof(iter))
	if err != nil {
		return fmt.Errorf("create iterator: %w", err)
	}
	f := os.NewFile(uintptr(fd), "bpf_iter")
	defer f.Close()
	return read(bufio.NewReaderSize(f, iterBuffer))
}

// iterBuffer is what the kernel shows at a time: bpf_seq_read fills eight pages (kernel/bpf/bpf_iter.c).
const iterBuffer = 32 << 10

// attachIter creates an iterator link, limited to a process unless pid is 0. The library has no option for
// the process.
func attachIter(prog *ebpf.Program, pid int) (int, error) {
	info := &struct{ tid, pid, pidFD uint32 }{pid: uint32(pid)}
	var pin runtime.Pinner // the kernel is given its address as a number
	pin.Pin(info)
	defer pin.Unpin()
	attr := struct {
		prog, target, attach, flags uint32
		info                        uint64
		infoLen, _                  uint32
	}{prog: uint32(prog.FD()), attach: bpfTraceIter}
	if pid != 0 {
		attr.info, attr.infoLen = uint64(uintptr(unsafe.Pointer(info))), uint32(unsafe.Sizeof(*info))
	}
	fd, err := bpfCall(bpfLinkCreate, unsafe.Pointer(&attr), unsafe.Sizeof(attr))
	runtime.KeepAlive(prog)
	return fd, err
}

func bpfCall(cmd uintptr, attr unsafe.Pointer, size uintptr) (int, error) {
	for {
		fd, _, errno := unix.Syscall(unix.SYS_BPF, cmd, uintptr(attr), size)
		if errno == unix.EINTR || errno == unix.EAGAIN {
			continue
		}
		if errno != 0 {
			return 0, errno
		}
		unix.CloseOnExec(int(fd))
		return int(fd), nil
	}
}

// taskReader is loaded when first used, and stays: it holds no state.
var taskReader = sync.OnceValues(func() (*ebpf.Program, error) {
	spec, err := loadFiles()
	if err != nil {
		return nil, err
	}
	var objs struct {
		Tasks *ebpf.Program `ebpf:"tasks"`
	}
	if err := spec.LoadAndAssign(&objs, nil); err != nil {
		return nil, fmt.Errorf("load task reader: %w: %w", ErrNotSupported, err)
	}
	return objs.Tasks, nil
})

// Self is the calling process as WatchProcess knows it, also inside a pid namespace.
func Self() (tgid uint32, start uint64, err error) {
	return findTask(os.Getpid(), func(r *filesTaskRecord) bool { return r.Self != 0 })
}

// TaskID is a process of the caller's pid namespace as WatchProcess knows it: its global thread group id
// and its start time in ns on the boot clock, which /proc rounds. ESRCH if there is no such process.
func TaskID(pid int) (tgid uint32, start uint64, err error) {
	return findTask(pid, func(r *filesTaskRecord) bool { return int(r.Local) == pid })
}

func findTask(pid int, is func(*filesTaskRecord) bool) (tgid uint32, start uint64, err error) {
	prog, err := taskReader()
	if err != nil {
		return 0, 0, fmt.Errorf("identify process %d: %w", pid, err)
	}
	raw, err := walkTasks(prog, pid)
	if err != nil {
		return 0, 0, fmt.Errorf("identify process %d: %w", pid, err)
	}
	var k filesTaskRecord
	for size := binary.Size(k); len(raw) >= size; raw = raw[size:] {
		if _, err := binary.Decode(raw, binary.NativeEndian, &k); err != nil {
			return 0, 0, fmt.Errorf("identify process %d: %w", pid, err)
		}
		if is(&k) {
			return k.Tgid, k.Start, nil
		}
	}
	return 0, 0, fmt.Errorf("identify process %d: %w", pid, unix.ESRCH)
}

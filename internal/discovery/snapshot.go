// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/probes"
)

// process is what one scan reads of one process. Kernel threads and processes that only wait to be reaped are not read.
type process struct {
	pid, ppid int
	start     uint64
	comm      string
	netns     uint64 // inode number of its namespace; 0: it may not be read
	cgroups
}

// Snapshot is one scan of /proc, from which any number of matches are answered. The zero value is ready for Scan. It
// belongs to one goroutine.
type Snapshot struct {
	procs    []*process // ascending by pid, without this process
	byPID    map[int]*process
	children map[int][]*process
	sockets  map[uint64]*listeners // by the inode number of the namespace; read when a match needs it
	apart    map[int]bool          // what isApart found out
	hidden   int                   // processes of which nothing may be read (hidepid, proc(5))
	homeless int                   // those in procs whose network namespace may not be read

	hierarchy *hierarchy        // kept from scan to scan, as mounts do not move
	mains     map[string]answer // what systemd said of a unit, kept as long as that can be true
	asked     time.Duration     // how long systemd was asked since the last scan

	buf      []byte
	interned map[string]string // the strings of the last scan, most of which come again
}

// Scan reads /proc anew. Processes that come and go meanwhile are in it or not. The error is that of ctx, or says that
// /proc cannot be read at all.
func (s *Snapshot) Scan(ctx context.Context) error {
	if s.hierarchy == nil {
		h, err := findHierarchy()
		if err != nil {
			return fmt.Errorf("scan processes: %w", err)
		}
		s.hierarchy = h
	}
	if s.buf == nil {
		s.buf = make([]byte, 4096)
	}
	pids, err := probes.Numbers("/proc")
	if err != nil {
		return fmt.Errorf("scan processes: %w", err)
	}
	old := s.interned
	s.interned = make(map[string]string, len(old))
	intern := func(b []byte) string {
		str, ok := s.interned[string(b)]
		if !ok {
			if str, ok = old[string(b)]; !ok {
				str = string(b)
			}
			s.interned[str] = str
		}
		return str
	}
	s.procs = make([]*process, 0, len(pids))
	s.byPID = make(map[int]*process, len(pids))
	s.children = make(map[int][]*process, len(pids))
	s.sockets, s.apart, s.asked = map[uint64]*listeners{}, map[int]bool{}, 0
	s.hidden, s.homeless = 0, 0
	self := os.Getpid()
	for _, pid := range pids {
		if ctx.Err() != nil {
			return fmt.Errorf("scan processes: %w", context.Cause(ctx))
		}
		if pid == self {
			continue
		}
		p, err := s.read(pid, intern)
		if errors.Is(err, os.ErrPermission) {
			s.hidden++
			continue
		}
		if err != nil {
			return fmt.Errorf("scan processes: %w", err)
		}
		if p != nil {
			s.procs = append(s.procs, p)
			s.byPID[pid] = p
			s.children[p.ppid] = append(s.children[p.ppid], p)
		}
	}
	return nil
}

// read returns nil for what is not a living process, or is none any more.
func (s *Snapshot) read(pid int, intern func([]byte) string) (*process, error) {
	// The directory belongs to the process that had the number when it was opened, so what is read in it is of one process.
	dir, err := unix.Open("/proc/"+strconv.Itoa(pid), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, unlessGone(err)
	}
	defer unix.Close(dir)
	b, err := s.readAt(dir, "stat")
	if err != nil {
		return nil, unlessGone(err)
	}
	p, living, err := parseStat(b, intern)
	if err != nil {
		return nil, fmt.Errorf("read process %d: %w", pid, err)
	}
	if !living {
		return nil, nil
	}
	p.pid = pid
	if b, err = s.readAt(dir, "cgroup"); err != nil {
		return nil, unlessGone(err)
	}
	p.cgroups = s.hierarchy.parse(b, intern)
	p.netns, err = namespace(dir, "ns/net")
	if errors.Is(err, os.ErrPermission) {
		if !probes.Alive(pid, p.start) {
			return nil, nil // that is said of one that has ended too
		}
		if pid == 1 {
			p.netns, err = namespace(unix.AT_FDCWD, "/proc/self/ns/net") // as openNetNS has it
			return p, err
		}
		s.homeless++
	} else if err != nil {
		return nil, unlessGone(err)
	}
	return p, nil
}

// unlessGone is nil if the error only says that the process has ended.
func unlessGone(err error) error {
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) {
		return nil
	}
	return err
}

// readAt reads a whole file into the buffer, which the next call uses again.
func (s *Snapshot) readAt(dir int, name string) ([]byte, error) {
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	n := 0
	for {
		if n == len(s.buf) {
			s.buf = append(s.buf, make([]byte, len(s.buf))...)
		}
		m, err := unix.Read(fd, s.buf[n:])
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, err
		}
		// The kernel makes these files at once, and leaves out only what has no room.
		if n += m; n < len(s.buf) {
			return s.buf[:n], nil
		}
	}
}

// namespace reads the inode number of a namespace out of a link such as "net:[4026531840]".
func namespace(dir int, name string) (uint64, error) {
	var b [64]byte
	n, err := unix.Readlinkat(dir, name, b[:])
	if err != nil {
		return 0, err
	}
	_, num, _ := strings.Cut(string(b[:n]), ":[")
	return strconv.ParseUint(strings.TrimSuffix(num, "]"), 10, 64)
}

// kernelThread is PF_KTHREAD of include/linux/sched.h.
const kernelThread = 0x00200000

// parseStat reads the fields of proc_pid_stat(5) that are needed. The name may hold blanks and parentheses, so the last
// parenthesis ends it.
func parseStat(b []byte, intern func([]byte) string) (p *process, living bool, err error) {
	open, end := bytes.IndexByte(b, '('), bytes.LastIndexByte(b, ')')
	if open < 0 || end < open {
		return nil, false, errors.New("stat line without a name in parentheses")
	}
	f := strings.Fields(string(b[end+1:])) // f[0] is field 3
	if len(f) < 20 {
		return nil, false, fmt.Errorf("stat line of %d fields", len(f)+2)
	}
	ppid, err1 := strconv.Atoi(f[4-3])
	flags, err2 := strconv.ParseUint(f[9-3], 10, 64)
	threads, err3 := strconv.Atoi(f[20-3])
	start, err4 := strconv.ParseUint(f[22-3], 10, 64)
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		return nil, false, fmt.Errorf("stat line: %w", err)
	}
	// A leader that has ended while its threads run on is a zombie by name only.
	living = f[0] != "X" && f[0] != "x" && (f[0] != "Z" || threads > 1) && flags&kernelThread == 0
	return &process{ppid: ppid, start: start, comm: intern(b[open+1 : end])}, living, nil
}

// tree lists a process and its descendants.
func (s *Snapshot) tree(root *process) []*process {
	tree := []*process{root}
	seen := map[int]bool{root.pid: true}
	for i := 0; i < len(tree); i++ {
		for _, c := range s.children[tree[i].pid] {
			// A number that was given away again during the scan could close a circle.
			if !seen[c.pid] {
				seen[c.pid] = true
				tree = append(tree, c)
			}
		}
	}
	return tree
}

// ancestors lists a process, its parent and so on up. It ends below this process.
func (s *Snapshot) ancestors(p *process) []*process {
	var up []*process
	for p != nil && !slices.Contains(up, p) {
		up = append(up, p)
		p = s.byPID[p.ppid]
	}
	return up
}

// roots are the processes of a set whose parent is not in it.
func roots(set []*process) []*process {
	in := make(map[int]bool, len(set))
	for _, p := range set {
		in[p.pid] = true
	}
	return filter(set, func(p *process) bool { return !in[p.ppid] })
}

// oldest is the process that started first.
func oldest(set []*process) *process {
	return slices.MinFunc(set, func(a, b *process) int {
		return cmp.Or(cmp.Compare(a.start, b.start), cmp.Compare(a.pid, b.pid))
	})
}

func filter(set []*process, keep func(*process) bool) []*process {
	var kept []*process
	for _, p := range set {
		if keep(p) {
			kept = append(kept, p)
		}
	}
	return kept
}

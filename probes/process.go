// SPDX-License-Identifier: Apache-2.0

package probes

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Process is one living process.
type Process struct {
	PID, PPID, PGID int
	Start           uint64 // when it started, in clock ticks since boot: field 22 of proc_pid_stat(5)
	Comm            string // its name, at most 15 bytes; a program can choose any bytes
}

// treePasses bounds how often Tree looks again because a process came or went meanwhile. A command that forks
// without a pause would otherwise keep it busy for ever.
const treePasses = 5

// Tree lists a process and all its living descendants, the root first and then by pid. A child whose parent has
// exited belongs to the tree only if something in the tree adopted it (PR_SET_CHILD_SUBREAPER). It wraps [ErrGone] if
// the root is not alive.
//
// The lists of children that the kernel gives are exact only while nothing forks or exits (proc_pid_task(5)), so Tree
// repeats until two passes agree.
func Tree(root int) ([]Process, error) {
	var last []Process
	for range treePasses {
		now, err := treePass(root)
		if err != nil {
			return nil, err
		}
		if slices.Equal(now, last) {
			return now, nil
		}
		last = now
	}
	return last, nil
}

func treePass(root int) ([]Process, error) {
	p, err := readStat(root)
	if err != nil {
		return nil, err
	}
	if !p.living() {
		return nil, fmt.Errorf("process %d: %w", root, ErrGone)
	}
	tree := []Process{p.Process}
	seen := map[int]bool{root: true}
	var byParent map[int][]int // filled only where the kernel keeps no lists of children
	for i := 0; i < len(tree); i++ {
		kids, err := children(tree[i].PID)
		if errors.Is(err, fs.ErrNotExist) && byParent == nil {
			if byParent, err = parents(); err != nil {
				return nil, err
			}
		}
		if byParent != nil {
			kids = byParent[tree[i].PID]
		}
		for _, pid := range kids {
			if seen[pid] {
				continue
			}
			seen[pid] = true
			p, err := readStat(pid)
			if err != nil || !p.living() {
				continue // it exited meanwhile
			}
			tree = append(tree, p.Process)
		}
	}
	slices.SortFunc(tree[1:], func(a, b Process) int { return a.PID - b.PID })
	return tree, nil
}

// children lists what the threads of a process have forked. The error is fs.ErrNotExist if the kernel keeps no such
// list (CONFIG_PROC_CHILDREN); a process that has exited has none.
func children(pid int) ([]int, error) {
	dir := fmt.Sprintf("/proc/%d/task", pid)
	tids, err := Numbers(dir)
	if err != nil {
		return nil, nil
	}
	var pids []int
	for _, tid := range tids {
		b, err := os.ReadFile(fmt.Sprintf("%s/%d/children", dir, tid))
		if err != nil {
			if _, gone := os.Stat(fmt.Sprintf("%s/%d/stat", dir, tid)); gone == nil && errors.Is(err, fs.ErrNotExist) {
				return nil, err
			}
			continue // the thread has ended
		}
		for f := range strings.FieldsSeq(string(b)) {
			if n, err := strconv.Atoi(f); err == nil {
				pids = append(pids, n)
			}
		}
	}
	return pids, nil
}

// parents reads every process there is, and returns the children of each.
func parents() (map[int][]int, error) {
	pids, err := Numbers("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	m := map[int][]int{}
	for _, pid := range pids {
		if p, err := readStat(pid); err == nil {
			m[p.PPID] = append(m[p.PPID], pid)
		}
	}
	return m, nil
}

// Numbers lists the entries of a directory that are numbers, in ascending order: the processes of /proc, the descriptors
// of one.
func Numbers(dir string) ([]int, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return numbers(f)
}

func numbers(dir *os.File) ([]int, error) {
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	nums := make([]int, 0, len(names))
	for _, name := range names {
		if n, err := strconv.Atoi(name); err == nil {
			nums = append(nums, n)
		}
	}
	slices.Sort(nums)
	return nums, nil
}

// Started is when a process started, in clock ticks since boot. It is known of a zombie too. It wraps [ErrGone] if there
// is no such process.
func Started(pid int) (uint64, error) {
	p, err := readStat(pid)
	return p.Start, err
}

// Parent is the process that a process is a child of, 0 if that is none of this pid namespace. It wraps [ErrGone] if there
// is no such process.
func Parent(pid int) (int, error) {
	p, err := readStat(pid)
	return p.PPID, err
}

// Alive reports whether the process that had this pid and start time still runs. A zombie does not.
func Alive(pid int, start uint64) bool {
	p, err := readStat(pid)
	return err == nil && p.Start == start && p.living()
}

// stat is what /proc/PID/stat says.
type stat struct {
	Process
	state   byte
	threads int
}

// living is false for a process that only waits to be reaped. A leader that has ended while its threads run on is a
// zombie by name only.
func (s stat) living() bool {
	return s.state != 'X' && s.state != 'x' && (s.state != 'Z' || s.threads > 1)
}

func readStat(pid int) (stat, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return stat{}, fmt.Errorf("process %d: %w", pid, ErrGone)
	}
	if err != nil {
		return stat{}, fmt.Errorf("read process %d: %w", pid, err)
	}
	s, err := parseStat(string(b))
	if err != nil {
		return stat{}, fmt.Errorf("read process %d: %w", pid, err)
	}
	return s, nil
}

// parseStat reads proc_pid_stat(5). The name stands in parentheses and may itself hold blanks and parentheses, so the
// last one ends it.
func parseStat(line string) (stat, error) {
	open, end := strings.IndexByte(line, '('), strings.LastIndexByte(line, ')')
	if open < 1 || end < open {
		return stat{}, errors.New("stat line without a name in parentheses")
	}
	pid, err := strconv.Atoi(strings.TrimSpace(line[:open]))
	if err != nil || pid < 1 {
		return stat{}, errors.New("stat line without a pid")
	}
	f := strings.Fields(line[end+1:]) // f[0] is field 3
	if len(f) < 20 || len(f[0]) != 1 {
		return stat{}, fmt.Errorf("stat line of %d fields", len(f)+2)
	}
	s := stat{Process: Process{PID: pid, Comm: line[open+1 : end]}, state: f[0][0]}
	for _, n := range []struct {
		to    *int
		field int
	}{{&s.PPID, 4}, {&s.PGID, 5}, {&s.threads, 20}} {
		if *n.to, err = strconv.Atoi(f[n.field-3]); err != nil {
			return stat{}, fmt.Errorf("field %d of a stat line: %w", n.field, err)
		}
	}
	if s.Start, err = strconv.ParseUint(f[22-3], 10, 64); err != nil {
		return stat{}, fmt.Errorf("field 22 of a stat line: %w", err)
	}
	return s, nil
}

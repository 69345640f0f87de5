// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/ebbproxy/ebb/probes"
)

// Find scans /proc and answers one match; see [Snapshot.Find].
func Find(ctx context.Context, m Match) (Workload, error) {
	var s Snapshot
	if err := s.Scan(ctx); err != nil {
		return Workload{}, err
	}
	return s.Find(ctx, m)
}

// Find tells which of the processes of the last Scan a match means. Its error wraps [ErrNone] with the reason if there is
// none, [ErrUnknown] if there may be one that cannot be seen, or [ErrAmbiguous].
//
//   - Unit, Cgroup: the processes in that control group and below. Main is the one whose parent is outside; of several the
//     one that systemd says is the unit's main process, or else the oldest.
//   - PID: that process, which is Main, and its descendants.
//   - NetNS: all processes in that namespace; Main is the oldest of those whose parent is outside.
//   - Port: Main is the topmost process that holds a listener there. If there are several, none above the other (SO_REUSEPORT),
//     it is their nearest common ancestor; if that is the first process, a service manager, this process, or the runtime
//     above their containers, they are ambiguous, unless Unit or Cgroup makes them one workload, of which the oldest is Main then.
//     PIDs are Main and its descendants. A service manager that holds a socket for a service to come does not count.
//
// A port is looked up among the processes of the namespace whose listener it is. This process, and processes that carry late
// connections, are never found.
func (s *Snapshot) Find(ctx context.Context, m Match) (Workload, error) {
	if m == (Match{}) {
		return Workload{}, errors.New("find workload: the match names nothing")
	}
	w, err := s.find(ctx, m)
	if err != nil {
		return Workload{}, fmt.Errorf("find %s: %w", m, err)
	}
	return w, nil
}

func none(format string, args ...any) error {
	return fmt.Errorf(format+": %w", append(args, ErrNone)...)
}

// noneOf is none, or [ErrUnknown] if so many processes that may not be looked at could be what is asked for.
func noneOf(hidden int, format string, args ...any) error {
	if hidden == 0 {
		return none(format, args...)
	}
	return fmt.Errorf("%s, but %d processes may not be looked at (CAP_SYS_PTRACE): %w", fmt.Sprintf(format, args...), hidden, ErrUnknown)
}

func (s *Snapshot) find(ctx context.Context, m Match) (Workload, error) {
	var w Workload
	set, hidden := s.procs, s.hidden
	var ns *os.File
	var ino uint64
	if m.NetNS != "" || m.Port != 0 {
		var err error
		if ns, ino, err = openNetNS(m.NetNS); err != nil {
			return w, err
		}
		defer ns.Close()
	}
	if m.NetNS != "" {
		set = filter(set, func(p *process) bool { return p.netns == ino })
		hidden += s.homeless
		if len(set) == 0 {
			return w, noneOf(hidden, "no process is in that network namespace")
		}
	}
	if m.Unit != "" {
		unit := m.Unit
		if path.Ext(unit) == "" {
			unit += ".service"
		}
		set = filter(set, func(p *process) bool {
			dir, ok := s.inUnit(p.cgroups, unit)
			w.CgroupPath = cmp.Or(dir, w.CgroupPath)
			return ok
		})
		if len(set) == 0 {
			return w, noneOf(hidden, "no process is in the control group of %s", unit)
		}
		m.Unit = unit
	}
	if m.Cgroup != "" {
		dir := path.Clean("/" + m.Cgroup)
		set = filter(set, func(p *process) bool {
			if p.v2 != "" && within(p.v2, dir) {
				w.CgroupPath = dir
				return true
			}
			return p.v1 != "" && within(p.v1, dir)
		})
		if len(set) == 0 {
			return w, noneOf(hidden, "no process is in that control group")
		}
	}
	if m.PID != 0 {
		p := s.byPID[m.PID]
		if p == nil {
			return w, noneOf(s.hidden, "process %d does not run", m.PID)
		}
		tree := map[int]bool{}
		for _, p := range s.tree(p) {
			tree[p.pid] = true
		}
		set = filter(set, func(p *process) bool { return tree[p.pid] })
	}
	set = filter(set, func(p *process) bool { return !s.isApart(p) })
	if len(set) == 0 {
		return w, noneOf(hidden, "no process is all of that")
	}
	var main *process
	var err error
	if m.Port != 0 {
		var l *listeners
		if l, err = s.listenersOf(ctx, ns, ino); err == nil {
			main, set, err = s.atPort(ctx, m, ns, l, set)
		}
	} else {
		main, err = s.mainOf(ctx, m, roots(set), set)
	}
	if err != nil {
		return w, err
	}
	if !probes.Alive(main.pid, main.start) {
		return w, none("process %d has just ended", main.pid)
	}
	w.Main, w.Start, w.NetNS = main.pid, main.start, main.netns
	for _, p := range set {
		w.PIDs = append(w.PIDs, p.pid)
	}
	slices.Sort(w.PIDs)
	if w.CgroupPath != "" {
		w.CgroupID = s.hierarchy.id(w.CgroupPath)
	}
	return w, nil
}

// mainOf chooses the main process of a set among those that nothing in the set has started.
func (s *Snapshot) mainOf(ctx context.Context, m Match, tops, set []*process) (*process, error) {
	if p := s.byPID[m.PID]; p != nil && slices.Contains(set, p) {
		return p, nil
	}
	if m.Unit != "" {
		main, control := s.askSystemd(ctx, m.Unit, tops)
		if p := s.byPID[main]; p != nil && slices.Contains(set, p) {
			return p, nil
		}
		tops = filter(tops, func(p *process) bool { return p.pid != control })
		if len(tops) == 0 {
			return nil, none("%s is still being started", m.Unit)
		}
	}
	return oldest(tops), nil
}

// atPort narrows a set to the processes at a port.
func (s *Snapshot) atPort(ctx context.Context, m Match, ns *os.File, l *listeners, set []*process) (*process, []*process, error) {
	in := make(map[int]bool, len(set))
	for _, p := range set {
		in[p.pid] = true
	}
	if len(l.byPort[m.Port]) == 0 {
		return nil, nil, none("nothing listens on port %d", m.Port)
	}
	holds := map[int]bool{}
	var activator *process
	holders := filter(l.on(m.Port), func(p *process) bool {
		if isActivator(p) {
			activator = p
			return false
		}
		holds[p.pid] = in[p.pid]
		return in[p.pid]
	})
	switch {
	case len(holders) > 0:
	case activator != nil:
		return nil, nil, none("process %d (%s) holds the listener of port %d for a service that does not run", activator.pid, activator.comm, m.Port)
	default:
		if lost, err := s.unheld(ctx, ns, l, m.Port); err != nil {
			return nil, nil, err
		} else if lost {
			return nil, nil, fmt.Errorf("something listens on port %d, and no process was found that holds it (%d may not be looked at, CAP_SYS_PTRACE): %w", m.Port, l.hidden, ErrUnknown)
		}
		return nil, nil, none("none of these processes listens on port %d", m.Port)
	}
	tops := filter(holders, func(p *process) bool {
		return !slices.ContainsFunc(s.ancestors(p)[1:], func(a *process) bool { return holds[a.pid] })
	})
	main := tops[0]
	if len(tops) > 1 {
		main = s.commonAncestor(tops)
		if main != nil && in[main.pid] {
			tops = []*process{main}
		} else if m.Unit == "" && m.Cgroup == "" {
			return nil, nil, fmt.Errorf("unrelated processes listen on port %d: %s: %w", m.Port, names(tops), ErrAmbiguous)
		} else {
			main = oldest(tops)
		}
	}
	var tree []*process
	for _, top := range tops {
		tree = append(tree, filter(s.tree(top), func(p *process) bool { return in[p.pid] })...)
	}
	return main, tree, nil
}

// names says which processes are meant, in a line for a person.
func names(ps []*process) string {
	var b []string
	for _, p := range ps {
		b = append(b, fmt.Sprintf("%d (%s)", p.pid, p.comm))
	}
	return strings.Join(b, ", ")
}

// isActivator tells a systemd, the system's, a user's or a container's, which holds sockets for services to come.
func isActivator(p *process) bool { return p.comm == "systemd" }

// commonAncestor is the nearest process above all of them, or nil if that does not make them one workload.
func (s *Snapshot) commonAncestor(ps []*process) *process {
	common := s.ancestors(ps[0])
	for _, p := range ps[1:] {
		up := s.ancestors(p)
		common = filter(common, func(a *process) bool { return slices.Contains(up, a) })
	}
	if len(common) == 0 || common[0].pid == 1 || isActivator(common[0]) {
		return nil
	}
	// What started a container lies in another process namespace than all that run in it.
	outer := pidNamespace(common[0].pid)
	if !slices.ContainsFunc(ps, func(p *process) bool { return pidNamespace(p.pid) == outer }) {
		return nil
	}
	return common[0]
}

// pidNamespace is the process namespace that a process is in, or "" if that cannot be read.
func pidNamespace(pid int) string {
	ns, err := os.Readlink("/proc/" + strconv.Itoa(pid) + "/ns/pid")
	if err != nil {
		return ""
	}
	return ns
}

// isApart tells a process that carries late connections, and one that this process has forked and that has not executed
// what it was forked for, so that it still has our descriptors.
func (s *Snapshot) isApart(p *process) bool {
	apart, known := s.apart[p.pid]
	if !known {
		apart = isApart(p)
		s.apart[p.pid] = apart
	}
	return apart
}

func isApart(p *process) bool {
	switch p.comm {
	case "ebb", "exe", ownComm():
	default:
		return false // spares the reading of most
	}
	args, err := os.ReadFile("/proc/" + strconv.Itoa(p.pid) + "/cmdline")
	if err != nil {
		return false
	}
	if p.ppid == os.Getpid() {
		if own, err := os.ReadFile("/proc/self/cmdline"); err == nil && bytes.Equal(args, own) {
			return true
		}
	}
	// `ebb relay`, which is executed as ebb or by way of its owner's /proc/PID/exe.
	exe, ok := strings.CutSuffix(string(args), "\x00relay\x00")
	if !ok {
		return false
	}
	by, _ := filepath.Match("/proc/[0-9]*/exe", exe)
	return by || exe == "ebb"
}

// ownComm is the name of this process.
var ownComm = sync.OnceValue(func() string {
	name, err := os.ReadFile("/proc/self/comm")
	if err != nil {
		return ""
	}
	return strings.TrimSuffix(string(name), "\n")
})

// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/ebbproxy/ebb/internal/netns"
	"github.com/ebbproxy/ebb/probes"
)

// Match says which processes are a backend. The fields that are set narrow each other; at least one must be set.
type Match struct {
	Port   uint16 // whoever listens there, on any local address, in NetNS or else the host's namespace
	Unit   string // systemd unit, by its full name: web@blue.service; without a suffix a service
	Cgroup string // path of a control group below the root of the hierarchy: /system.slice/web.service
	PID    int    // a process and its descendants
	NetNS  string // path of a network namespace, or a name under /run/netns
}

// String names what is set, as a configuration file does.
func (m Match) String() string {
	var parts []string
	add := func(set bool, key string, value any) {
		if set {
			parts = append(parts, fmt.Sprintf("%s %v", key, value))
		}
	}
	add(m.Port != 0, "port", m.Port)
	add(m.Unit != "", "unit", m.Unit)
	add(m.Cgroup != "", "cgroup", m.Cgroup)
	add(m.PID != 0, "pid", m.PID)
	add(m.NetNS != "", "netns", m.NetNS)
	return strings.Join(parts, ", ")
}

// Workload is what a Match finds at one moment. Main and Start together are its identity: another pair is another
// generation, since a process number is given away again and a start time is not.
type Workload struct {
	Main  int    // root of the tree
	Start uint64 // start of Main in clock ticks since boot, as probes.Started tells it
	PIDs  []int  // all processes, ascending, Main among them

	// CgroupID is the id of the version 2 control group that Unit or Cgroup named, which is the inode number of its
	// directory and what BPF programs know it by, and CgroupPath its path below the root of that hierarchy. They are 0 and
	// "" where neither was set, or only a version 1 hierarchy has it.
	CgroupID   uint64
	CgroupPath string

	NetNS uint64 // inode number of Main's network namespace, as netns.ID tells it; 0 if it may not be read
}

// OpenNetNS opens the network namespace of Main, which the caller closes. It wraps [ErrNone] if Main has ended, even if
// another process has its number by now.
func (w Workload) OpenNetNS() (*os.File, error) {
	ns, err := netns.OfPID(w.Main)
	if !probes.Alive(w.Main, w.Start) {
		if err == nil {
			err = ns.Close()
		}
		return nil, errors.Join(fmt.Errorf("open network namespace of process %d, which has ended: %w", w.Main, ErrNone), err)
	}
	return ns, err
}

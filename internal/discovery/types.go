// SPDX-License-Identifier: Apache-2.0

package discovery

// Match says which processes are a backend. The fields that are set narrow each other; at least one must be set.
type Match struct {
	Port   uint16 // whoever listens there, on any local address, in NetNS or else the host's namespace
	Unit   string // systemd unit, by its full name: web@blue.service
	Cgroup string // path of a control group below the root of the hierarchy: /system.slice/web.service
	PID    int    // a process and its descendants
	NetNS  string // path of a network namespace, or a name under /run/netns
}

// Workload is what a Match finds at one moment. Main and Start together are its identity: another pair is another
// generation, since a process number is given away again and a start time is not.
type Workload struct {
	Main       int    // root of the tree
	Start      uint64 // start of Main in clock ticks since boot, as probes.Started tells it
	PIDs       []int  // all processes, ascending, Main among them
	CgroupID   uint64 // id of the control group (inode number of its directory) that Unit or Cgroup named; else 0
	CgroupPath string // its path below the root of the hierarchy; else ""
	NetNS      uint64 // inode number of Main's network namespace, as netns.ID tells it
}

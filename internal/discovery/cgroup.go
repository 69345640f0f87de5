// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"bytes"
	"fmt"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

// cgroups are the control groups of a process, as paths below the root of their hierarchy.
type cgroups struct {
	v2 string // of version 2; "": there is none
	v1 string // of version 1 that systemd keeps, or failing that the first one; "": there is none
}

// within tells whether a control group is dir or below it.
func within(group, dir string) bool {
	rest, ok := strings.CutPrefix(group, dir)
	return ok && (rest == "" || rest[0] == '/' || dir == "/")
}

// hierarchy is where control groups of version 2 are mounted. Where they are not, point is empty.
type hierarchy struct {
	point string // the directory
	root  string // the control group that is mounted there, in the view of this process; "" means "/"
}

// findHierarchy looks for the mount that shows most. In a control group namespace what lies outside of it has paths that
// begin with "/..", the mounts of the host's hierarchy too (cgroup_namespaces(7)).
func findHierarchy() (*hierarchy, error) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("find control groups: %w", err)
	}
	return parseMounts(string(text)), nil
}

func parseMounts(text string) *hierarchy {
	// White space and backslashes stand in it as three octal digits, see proc_pid_mountinfo(5).
	unescape := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
	best := &hierarchy{}
	for line := range strings.Lines(text) {
		// 25 24 0:22 / /sys/fs/cgroup rw,… shared:4 - cgroup2 cgroup2 rw,…
		mount, kind, ok := strings.Cut(line, " - ")
		f := strings.Fields(mount)
		if !ok || len(f) < 6 || !strings.HasPrefix(kind, "cgroup2 ") {
			continue
		}
		h := &hierarchy{point: unescape.Replace(f[4]), root: strings.TrimSuffix(unescape.Replace(f[3]), "/")}
		if best.point == "" || above(h.root, best.root) {
			best = h
		}
	}
	return best
}

// above tells whether one mounted control group shows more than another.
func above(a, b string) bool {
	if up, than := strings.Count(a, "/.."), strings.Count(b, "/.."); up != than {
		return up > than
	}
	return len(a) < len(b)
}

// below is the path of a control group from the one that is mounted. What is not to be seen there stays as it is.
func (h *hierarchy) below(group string) string {
	if h.root == "" || !within(group, h.root) {
		return group
	}
	return path.Clean("/" + group[len(h.root):])
}

// dir is the directory of a control group of version 2.
func (h *hierarchy) dir(group string) string { return path.Join(h.point, group) }

// id is the number by which BPF programs know a control group; 0 if it has gone.
func (h *hierarchy) id(group string) uint64 {
	var st unix.Stat_t
	if h.point == "" || unix.Stat(h.dir(group), &st) != nil {
		return 0
	}
	return st.Ino
}

// parse reads /proc/PID/cgroup, a line "id:controllers:path" for each hierarchy. See cgroups(7).
func (h *hierarchy) parse(b []byte, intern func([]byte) string) cgroups {
	var c cgroups
	for line := range bytes.Lines(b) {
		id, rest, _ := bytes.Cut(bytes.TrimSuffix(line, []byte("\n")), []byte(":"))
		controllers, group, ok := bytes.Cut(rest, []byte(":"))
		switch {
		case !ok:
		case string(id) == "0":
			c.v2 = h.below(intern(group))
		case c.v1 == "" || string(controllers) == "name=systemd":
			c.v1 = intern(group)
		}
	}
	return c
}

// unitGroup finds the control group of a system unit in the path of a control group at or below it. base is where systemd
// keeps its units. A unit lies in nothing but slices, which tells it from one of the same name that a user's systemd, or one
// in a container, has made. See systemd.slice(5).
func unitGroup(group, base, unit string) (string, bool) {
	rest, ok := strings.CutPrefix(group, base+"/")
	for ok {
		var name string
		name, rest, ok = strings.Cut(rest, "/")
		// systemd escapes a name that could be taken for a file of the kernel's, such as cpu.service, by one "_" more.
		if name == unit || name == "_"+unit {
			return strings.TrimSuffix(strings.TrimSuffix(group, rest), "/"), true
		}
		ok = ok && strings.HasSuffix(name, ".slice")
	}
	return "", false
}

// unitBase is the control group below which systemd keeps its units: it has put itself into init.scope there.
func unitBase(init string) string {
	base, ok := strings.CutSuffix(init, "/init.scope")
	if !ok {
		return ""
	}
	return base
}

// inUnit tells the control group of a unit that the process is in.
func (s *Snapshot) inUnit(c cgroups, unit string) (string, bool) {
	var init cgroups
	if p := s.byPID[1]; p != nil {
		init = p.cgroups
	}
	if dir, ok := unitGroup(c.v2, unitBase(init.v2), unit); ok {
		return dir, true
	}
	_, ok := unitGroup(c.v1, unitBase(init.v1), unit)
	return "", ok
}

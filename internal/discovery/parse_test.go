// SPDX-License-Identifier: Apache-2.0

package discovery

import "testing"

func text(b []byte) string { return string(b) }

func TestParseMounts(t *testing.T) {
	const v1 = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"
	for _, c := range []struct {
		name, in    string
		point, root string
	}{
		{"version 1 alone", v1, "", ""},
		{"hybrid", v1 + "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw\n", "/sys/fs/cgroup/unified", ""},
		{"blank in the path", `41 31 0:38 / /a\040b rw - cgroup2 none rw` + "\n", "/a b", ""},
		{
			"a part before the whole",
			"41 31 0:38 /docker/x /part rw - cgroup2 none rw\n42 31 0:38 / /whole rw - cgroup2 none rw\n", "/whole", "",
		},
		{
			"the host's in a container",
			"41 31 0:38 / /sys/fs/cgroup rw - cgroup2 none rw\n42 31 0:38 /../.. /host rw - cgroup2 none rw\n", "/host", "/../..",
		},
		{"nonsense", "a b - cgroup2 \n - cgroup2 x\n\n", "", ""},
	} {
		if h := parseMounts(c.in); h.point != c.point || h.root != c.root {
			t.Errorf("%s: got %+v, want %q of %q", c.name, h, c.point, c.root)
		}
	}
}

func TestParseCgroup(t *testing.T) {
	for _, c := range []struct {
		root, in string
		want     cgroups
	}{
		{"", "0::/system.slice/a.service\n", cgroups{v2: "/system.slice/a.service"}},
		{"", "9:name=systemd:/system.slice/a.service\n8:pids:/b\n0::/\n", cgroups{v2: "/", v1: "/system.slice/a.service"}},
		{"", "8:pids:/docker/x\n4:memory:/y\n", cgroups{v1: "/docker/x"}},
		{"", "8:pids:/b\n1:name=systemd:/a:c\n", cgroups{v1: "/a:c"}},
		{"/../..", "0::/../../system.slice/a.service\n", cgroups{v2: "/system.slice/a.service"}},
		{"/../..", "0::/\n", cgroups{v2: "/"}},
		{"/pod", "0::/pod\n", cgroups{v2: "/"}},
		{"/pod", "0::/pods/x\n", cgroups{v2: "/pods/x"}},
		{"", "nonsense\n", cgroups{}},
	} {
		h := hierarchy{point: "/x", root: c.root}
		if got := h.parse([]byte(c.in), text); got != c.want {
			t.Errorf("%q below %q: got %+v, want %+v", c.in, c.root, got, c.want)
		}
	}
}

func TestUnitGroup(t *testing.T) {
	for _, c := range []struct{ group, init, unit, want string }{
		{"/system.slice/web.service", "/init.scope", "web.service", "/system.slice/web.service"},
		{"/system.slice/web.service/worker/1", "/init.scope", "web.service", "/system.slice/web.service"},
		{"/system.slice/system-web.slice/web@blue.service", "/init.scope", "web@blue.service", "/system.slice/system-web.slice/web@blue.service"},
		{"/system.slice/_cpu.service", "/init.scope", "cpu.service", "/system.slice/_cpu.service"},
		{"/system.slice/web.service", "/init.scope", "system.slice", "/system.slice"},
		{"/system.slice/web.service", "/init.scope", "web.serv", ""},
		{"/system.slice/web.service2", "/init.scope", "web.service", ""},
		{"/user.slice/user-1.slice/user@1.service/app.slice/web.service", "/init.scope", "web.service", ""},
		{"/system.slice/docker-x.scope/system.slice/web.service", "/init.scope", "web.service", ""},
		{"/docker/x/system.slice/web.service", "/docker/x/init.scope", "web.service", "/docker/x/system.slice/web.service"},
		{"/../../system.slice/web.service", "/../../init.scope", "web.service", "/../../system.slice/web.service"},
		{"/system.slice/web.service", "/", "web.service", "/system.slice/web.service"},
		{"/", "/", "web.service", ""},
		{"", "", "web.service", ""},
	} {
		got, ok := unitGroup(c.group, unitBase(c.init), c.unit)
		if got != c.want || ok != (c.want != "") {
			t.Errorf("%s in %s: got %q, %v, want %q", c.unit, c.group, got, ok, c.want)
		}
	}
}

func TestParseStat(t *testing.T) {
	const rest = " 17 42 42 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 "
	for _, c := range []struct {
		in     string
		living bool
		ok     bool
	}{
		{"42 (a (b) c) S" + rest + "1 0 99 5 6", true, true},
		{"42 (a) Z" + rest + "1 0 99 5 6", false, true},
		{"42 (a) Z" + rest + "2 0 99 5 6", true, true},
		{"42 (a) S 2 0 0 0 -1 2129984 1 2 3 4 5 6 7 8 20 0 1 0 99 5 6", false, true},
		{"42 (a) S 1 2", false, false},
		{"42 a S" + rest + "1 0 99", false, false},
		{"42 (a) S" + rest + "x 0 99", false, false},
		{")(", false, false},
	} {
		p, living, err := parseStat([]byte(c.in), text)
		if living != c.living || (err == nil) != c.ok {
			t.Errorf("%q: got %v, %v, want %v, %v", c.in, living, err, c.living, c.ok)
		}
		if err == nil && p.start != 99 {
			t.Errorf("%q: got start %d, want 99", c.in, p.start)
		}
	}
}

func TestParseShow(t *testing.T) {
	for _, c := range []struct {
		in            string
		main, control int
	}{
		{"MainPID=12\nControlPID=0\n", 12, 0},
		{"ControlPID=7\nMainPID=0\n", 0, 7},
		{"", 0, 0},
		{"MainPID=\nOther=3\nnonsense", 0, 0},
	} {
		if main, control := parseShow(c.in); main != c.main || control != c.control {
			t.Errorf("%q: got %d, %d, want %d, %d", c.in, main, control, c.main, c.control)
		}
	}
}

func FuzzProc(f *testing.F) {
	f.Add([]byte("42 (a (b) c) S 17 42 42 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 99 5 6"), "/", "web.service")
	f.Add([]byte("9:name=systemd:/system.slice/a.service\n0::/../x\n"), "/..", "a.service")
	f.Add([]byte("41 31 0:38 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw\n"), "/system.slice", "x")
	f.Fuzz(func(t *testing.T, b []byte, root, unit string) {
		if p, living, err := parseStat(b, text); err != nil && (p != nil || living) {
			t.Errorf("got %+v, %v with %v", p, living, err)
		}
		parseMounts(string(b))
		c := (&hierarchy{root: root}).parse(b, text)
		if dir, ok := unitGroup(c.v2, unitBase(c.v1), unit); ok && !within(c.v2, dir) {
			t.Errorf("%q is not within %q", c.v2, dir)
		}
	})
}

// SPDX-License-Identifier: Apache-2.0

package systemd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// nginx is the unit that Debian's package has, as far as its stop goes.
const nginx = `[Unit]
Description=web server
[Service]
Type=forking
PIDFile=/run/nginx.pid
ExecStart=/usr/sbin/nginx -g 'daemon on; master_process on;'
ExecStop=-/sbin/start-stop-daemon --quiet --stop --retry QUIT/5 \
  # a comment does not end what a backslash continues
  --pidfile /run/nginx.pid
TimeoutStopSec=5
KillMode=mixed
[Install]
WantedBy=multi-user.target
`

// image is a directory with these files; a content that begins with -> is a symbolic link.
func image(t *testing.T, files map[string]string) Host {
	t.Helper()
	root := t.TempDir()
	for name, content := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		if target, ok := strings.CutPrefix(content, "->"); ok {
			err = os.Symlink(target, path)
		} else {
			err = os.WriteFile(path, []byte(content), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return Host{Root: root}
}

var someDrain = Drain{Ebb: "/usr/bin/ebb", Grace: 30 * time.Second}

// inForce is what the files of a service say in the end, the drop-in among them.
func inForce(t *testing.T, h Host, unit string) settings {
	t.Helper()
	u, err := h.Unit(t.Context(), unit)
	if err != nil {
		t.Fatal(err)
	}
	s, err := read(h.Root, u.Files)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func enable(t *testing.T, h Host, unit string, d Drain) Plan {
	t.Helper()
	p, err := h.Plan(t.Context(), unit, d)
	if err != nil {
		t.Fatal(err)
	}
	if err := h.Apply(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	return p
}

func TestDrainGoesBeforeTheUnitsOwnStop(t *testing.T) {
	h := image(t, map[string]string{"/lib/systemd/system/nginx.service": nginx})
	p := enable(t, h, "nginx", someDrain)
	if p.Current || p.Path != "/etc/systemd/system/nginx.service.d/50-ebb.conf" {
		t.Errorf("got %q, current %v", p.Path, p.Current)
	}
	got := inForce(t, h, "nginx.service")
	want := []string{
		"-+/usr/bin/ebb drain --unit %n --wait --grace 30s",
		"-/sbin/start-stop-daemon --quiet --stop --retry QUIT/5  --pidfile /run/nginx.pid",
	}
	if !slices.Equal(got.stop, want) {
		t.Errorf("ExecStop: got %q, want %q", got.stop, want)
	}
	if got.timeout != "40s" || got.kill != "mixed" {
		t.Errorf("got TimeoutStopSec=%s KillMode=%s, want 40s, mixed", got.timeout, got.kill)
	}
	for _, line := range []string{"-TimeoutStopSec=5", "+TimeoutStopSec=40s", "+After=ebb-agent.service", " ExecStop=-/sbin/start-stop-daemon", "+ExecStop=-+/usr/bin/ebb"} {
		if !strings.Contains(p.Diff(), "\n"+line) {
			t.Errorf("the diff has no line %q:\n%s", line, p.Diff())
		}
	}
}

// What is enabled again is not changed, unless its own settings or the grace have.
func TestEnableAgain(t *testing.T) {
	h := image(t, map[string]string{"/usr/lib/systemd/system/nginx.service": nginx})
	first := enable(t, h, "nginx", someDrain)
	if again := enable(t, h, "nginx.service", someDrain); !again.Current || again.Content != first.Content {
		t.Errorf("got current %v and\n%s\nwant that of the first time:\n%s", again.Current, again.Content, first.Content)
	}
	if err := os.WriteFile(filepath.Join(h.Root, "/usr/lib/systemd/system/nginx.service"), []byte(strings.ReplaceAll(nginx, "QUIT/5", "QUIT/9")), 0o644); err != nil {
		t.Fatal(err)
	}
	if p := enable(t, h, "nginx", someDrain); p.Current {
		t.Error("the unit's own ExecStop has changed, and the drop-in is said to be current")
	}
	if got := inForce(t, h, "nginx").stop; len(got) != 2 || !strings.Contains(got[1], "QUIT/9") {
		t.Errorf("got %q, want the unit's new ExecStop", got)
	}
	enable(t, h, "nginx", Drain{Ebb: "/usr/bin/ebb", Grace: 2 * time.Minute})
	if got := inForce(t, h, "nginx").timeout; got != "130s" {
		t.Errorf("got TimeoutStopSec=%s, want 130s", got)
	}
}

func TestDisableRemovesWhatWasWritten(t *testing.T) {
	h := image(t, map[string]string{"/lib/systemd/system/nginx.service": nginx})
	before := inForce(t, h, "nginx")
	p := enable(t, h, "nginx", someDrain)
	if _, err := h.Disable(t.Context(), "nginx", true); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(h.Root, p.Path)); err != nil {
		t.Errorf("a dry run has removed it: %v", err)
	}
	if path, err := h.Disable(t.Context(), "nginx", false); err != nil || path != p.Path {
		t.Fatalf("got %s, %v", path, err)
	}
	if _, err := os.Stat(filepath.Dir(filepath.Join(h.Root, p.Path))); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the empty directory is left: %v", err)
	}
	if after := inForce(t, h, "nginx"); fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("got %v, want %v", after, before)
	}
	if _, err := h.Disable(t.Context(), "nginx", false); !errors.Is(err, ErrNotEnabled) {
		t.Errorf("got %v, want ErrNotEnabled", err)
	}
}

// The drop-in outlives its unit, and can still be removed.
func TestDisableWithoutAUnit(t *testing.T) {
	h := image(t, map[string]string{"/lib/systemd/system/nginx.service": nginx})
	p := enable(t, h, "nginx", someDrain)
	if err := os.Remove(filepath.Join(h.Root, "/lib/systemd/system/nginx.service")); err != nil {
		t.Fatal(err)
	}
	if path, err := h.Disable(t.Context(), "nginx", false); err != nil || path != p.Path {
		t.Errorf("got %s, %v", path, err)
	}
}

func TestWhatAPersonChangedStays(t *testing.T) {
	for name, change := range map[string]func(string) string{
		"a line more":      func(s string) string { return s + "Nice=5\n" },
		"a value":          func(s string) string { return strings.Replace(s, "40s", "50s", 1) },
		"never written":    func(string) string { return "[Service]\nNice=5\n" },
		"first line taken": func(s string) string { _, body, _ := strings.Cut(s, "\n"); return body },
		"emptied":          func(string) string { return "" },
	} {
		t.Run(name, func(t *testing.T) {
			h := image(t, map[string]string{"/lib/systemd/system/nginx.service": nginx})
			p := enable(t, h, "nginx", someDrain)
			path := filepath.Join(h.Root, p.Path)
			want := change(p.Content)
			if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
				t.Fatal(err)
			}
			if _, err := h.Plan(t.Context(), "nginx", someDrain); !errors.Is(err, ErrChanged) {
				t.Errorf("enable: got %v, want ErrChanged", err)
			}
			if _, err := h.Disable(t.Context(), "nginx", false); !errors.Is(err, ErrChanged) {
				t.Errorf("disable: got %v, want ErrChanged", err)
			}
			if got, err := os.ReadFile(path); err != nil || string(got) != want {
				t.Errorf("got %q, %v, want it untouched", got, err)
			}
		})
	}
}

func TestPlanOf(t *testing.T) {
	const lib, etc = "/usr/lib/systemd/system/", "/etc/systemd/system/"
	const plain = "[Service]\nExecStart=/bin/app\n"
	drain := "-+/usr/bin/ebb drain --unit %n --wait --grace 30s"
	for _, tc := range []struct {
		name, unit string
		files      map[string]string
		stop       []string
		timeout    string
		kill       string
	}{
		{"no stop of its own", "app", map[string]string{lib + "app.service": plain}, []string{drain}, "", ""},
		{"an instance", "web@blue", map[string]string{lib + "web@.service": plain + "ExecStop=/bin/stop %i\n"}, []string{drain, "/bin/stop %i"}, "", ""},
		{"its own time is longer", "app", map[string]string{lib + "app.service": plain + "TimeoutStopSec=2min\n"}, []string{drain}, "2min", ""},
		{"no limit", "app", map[string]string{lib + "app.service": plain + "TimeoutStopSec=infinity\n"}, []string{drain}, "infinity", ""},
		{"zero is no limit", "app", map[string]string{lib + "app.service": plain + "TimeoutSec=0\n"}, []string{drain}, "0", ""},
		{"KillMode is kept", "app", map[string]string{lib + "app.service": plain + "KillMode=process\n"}, []string{drain}, "", "process"},
		{"a drop-in before ours", "app", map[string]string{
			lib + "app.service":               plain + "ExecStop=/bin/one\n",
			etc + "app.service.d/10-own.conf": "[Service]\nExecStop=\nExecStop=/bin/two\nTimeoutStopSec=10\n",
		}, []string{drain, "/bin/two"}, "40s", ""},
		{"a drop-in after ours adds", "app", map[string]string{
			lib + "app.service":               plain + "ExecStop=/bin/one\n",
			etc + "app.service.d/90-own.conf": "[Service]\nExecStop=/bin/two\n",
		}, []string{drain, "/bin/one", "/bin/two"}, "", ""},
		{"of two drop-ins of a name the more specific counts", "app-x", map[string]string{
			lib + "app-x.service":             plain,
			lib + "app-x.service.d/10-a.conf": "[Service]\nExecStop=/bin/specific\n",
			etc + "app-.service.d/10-a.conf":  "[Service]\nExecStop=/bin/prefix\n",
			etc + "service.d/20-b.conf":       "[Service]\nExecStop=/bin/every\n",
			etc + "app-x.service.d/30-c.conf": "->/dev/null",
			lib + "app-x.service.d/30-c.conf": "[Service]\nExecStop=/bin/masked\n",
		}, []string{drain, "/bin/specific", "/bin/every"}, "", ""},
		{"an alias", "www", map[string]string{
			lib + "app.service": plain + "ExecStop=/bin/one\n",
			etc + "www.service": "->" + lib + "app.service",
		}, []string{drain, "/bin/one"}, "", ""},
		{"a unit file elsewhere", "app", map[string]string{
			"/opt/app.service":  plain + "ExecStop=/bin/one\n",
			etc + "app.service": "->/opt/app.service",
		}, []string{drain, "/bin/one"}, "", ""},
		{"/etc wins", "app", map[string]string{
			lib + "app.service": plain + "ExecStop=/bin/one\n", etc + "app.service": plain + "ExecStop=/bin/two\n",
		}, []string{drain, "/bin/two"}, "", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := image(t, tc.files)
			enable(t, h, tc.unit, someDrain)
			got := inForce(t, h, tc.unit)
			if !slices.Equal(got.stop, tc.stop) || got.timeout != tc.timeout || got.kill != tc.kill {
				t.Errorf("got %q, TimeoutStopSec=%s KillMode=%s, want %q, %s, %s", got.stop, got.timeout, got.kill, tc.stop, tc.timeout, tc.kill)
			}
		})
	}
}

// TestT2_AUnitThatRunsEbb: the command of `ebb run` must not hear systemd's stop signal, which by default goes to the
// whole cgroup.
func TestT2_AUnitThatRunsEbb(t *testing.T) {
	h := image(t, map[string]string{"/lib/systemd/system/web.service": "[Service]\nExecStart=/usr/bin/ebb run -- /bin/app\nTimeoutStopSec=10\n"})
	p := enable(t, h, "web", someDrain)
	if got := inForce(t, h, "web"); got.kill != "mixed" || got.timeout != "40s" || len(got.stop) != 0 {
		t.Errorf("got %+v, want KillMode=mixed, TimeoutStopSec=40s and no ExecStop", got)
	}
	if !strings.Contains(p.Diff(), "\n-KillMode=control-group\n") {
		t.Errorf("got\n%s", p.Diff())
	}
	h = image(t, map[string]string{"/lib/systemd/system/web.service": "[Service]\nExecStart=-/usr/bin/ebb run -- /bin/app\nKillMode=mixed\n"})
	if p := enable(t, h, "web", someDrain); !p.Current {
		t.Errorf("got\n%s\nwant nothing to do", p.Content)
	}
}

func TestRefused(t *testing.T) {
	const unit = "/usr/lib/systemd/system/app.service"
	const plain = "[Service]\nExecStart=/bin/app\n"
	for _, tc := range []struct {
		name, unit string
		files      map[string]string
		want       error
		says       string
	}{
		{"no such unit", "nosuch", nil, ErrNotFound, "/etc/systemd/system"},
		{"a template", "web@", nil, ErrName, "web@blue"},
		{"another type", "app.socket", nil, ErrName, "app.socket is a socket"},
		{"a path", "../../app", nil, ErrName, ""},
		{"a path with a suffix", "/etc/app.service", nil, ErrName, ""},
		{"an option", "--root=/", nil, ErrName, ""},
		{"nothing", "", nil, ErrName, ""},
		{"masked", "app", map[string]string{"/etc/systemd/system/app.service": "->/dev/null", unit: plain}, ErrUnit, "masked"},
		{"an alias of itself", "app", map[string]string{"/etc/systemd/system/app.service": "->b.service", "/etc/systemd/system/b.service": "->app.service"}, ErrUnit, "itself"},
		{"emptied later", "app", map[string]string{unit: plain, "/etc/systemd/system/app.service.d/60-x.conf": "[Service]\nExecStop=\n"}, ErrUnit, "60-x.conf"},
		{"cut short later", "app", map[string]string{unit: plain, "/etc/systemd/system/app.service.d/60-x.conf": "[Service]\nTimeoutStopSec=5\n"}, ErrUnit, "TimeoutStopSec=5"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := image(t, tc.files)
			if _, err := h.Plan(t.Context(), tc.unit, someDrain); !errors.Is(err, tc.want) || !strings.Contains(err.Error(), tc.says) {
				t.Errorf("got %v, want %v with %q", err, tc.want, tc.says)
			}
		})
	}
	h := image(t, map[string]string{unit: plain})
	if _, err := h.Plan(t.Context(), "app", Drain{Ebb: "/home/a b/ebb", Grace: time.Second}); err == nil {
		t.Error("a path with a space is taken")
	}
}

// A running manager knows the files, and reads the drop-in at once.
func TestManagerIsAsked(t *testing.T) {
	h := image(t, map[string]string{"/run/elsewhere/app.service": nginx, "/run/elsewhere/10.conf": "[Service]\nTimeoutStopSec=\n"})
	var reloads int
	answer := "Id=app.service\nLoadState=loaded\nFragmentPath=/run/elsewhere/app.service\nDropInPaths=/run/elsewhere/10.conf\n"
	h.Systemctl = func(_ context.Context, args ...string) (string, error) {
		switch line := strings.Join(args, " "); line {
		case "daemon-reload":
			reloads++
			return "", nil
		case "show --property=Id,LoadState,FragmentPath,DropInPaths -- alias.service":
			return answer, nil
		case "show --property=DefaultTimeoutStopUSec":
			return "DefaultTimeoutStopUSec=1min 30s\n", nil
		default:
			return "", fmt.Errorf("unexpected: %s", line)
		}
	}
	p := enable(t, h, "alias", someDrain)
	if p.Path != dropInPath("app.service") || reloads != 1 {
		t.Errorf("got %s and %d reloads, want that of app.service and 1", p.Path, reloads)
	}
	// An empty TimeoutStopSec= is the manager's default, which is long enough.
	if strings.Contains(p.Content, "TimeoutStopSec") {
		t.Errorf("got\n%s\nwant no TimeoutStopSec", p.Content)
	}
	enable(t, h, "alias", someDrain)
	if reloads != 1 {
		t.Error("what is current was read again")
	}
	if _, err := h.Disable(t.Context(), "alias", false); err != nil || reloads != 2 {
		t.Errorf("disable: got %v and %d reloads, want 2", err, reloads)
	}
	for state, want := range map[string]error{"not-found": ErrNotFound, "masked": ErrUnit, "bad-setting": ErrUnit} {
		answer = "Id=alias.service\nLoadState=" + state + "\n"
		if _, err := h.Unit(t.Context(), "alias"); !errors.Is(err, want) {
			t.Errorf("%s: got %v, want %v", state, err, want)
		}
	}
}

func TestParseSpan(t *testing.T) {
	for in, want := range map[string]time.Duration{
		"5": 5 * time.Second, "90s": 90 * time.Second, "1min 30s": 90 * time.Second, "1min30s": 90 * time.Second, " 2 h ": 2 * time.Hour,
		"1.5s": 1500 * time.Millisecond, "20ms": 20 * time.Millisecond, "1d": 24 * time.Hour, "infinity": maxSpan, "1000000y": maxSpan, "0": 0,
	} {
		if got, err := parseSpan(in); err != nil || got != want {
			t.Errorf("%q: got %v, %v, want %v", in, got, err, want)
		}
	}
	for _, in := range []string{"", " ", "s", "5x", "-5", "5 s s", "1..2s", "five"} {
		if got, err := parseSpan(in); err == nil {
			t.Errorf("%q: got %v, want an error", in, got)
		}
	}
}

func TestService(t *testing.T) {
	var got []string
	const text = "Key=outside\n[Service]\r\n  A = 1 \r\n#B=2\n;C=3\nD=a \\\n# comment\n  b\nE=\\\n\n[Install]\nF=4\n[Service]\nG=x=y\nno assignment\nH=end\\"
	for key, value := range service(text) {
		got = append(got, key+"="+value)
	}
	if want := []string{"A=1", "D=a  b", "E=", "G=x=y", "H=end"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// FuzzParseSpan: what is written is read as what it was, and no text is a negative time.
func FuzzParseSpan(f *testing.F) {
	for _, s := range []string{"5", "1min 30s", "infinity", "0.5h", "1y2M3w"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		d, err := parseSpan(s)
		if err != nil {
			return
		}
		if d < 0 {
			t.Fatalf("%q: got %v", s, d)
		}
		again, err := parseSpan(formatSpan(d))
		if err != nil || again < d || d < maxSpan-time.Second && again > d+time.Second {
			t.Errorf("%q: %v is written as %s and read as %v, %v", s, d, formatSpan(d), again, err)
		}
	})
}

// FuzzService: what the reader yields are words of the text, without a line's end in them.
func FuzzService(f *testing.F) {
	f.Add(nginx)
	f.Add("[Service]\nExecStop=a\\\n;c\n\\\n\nb=c\\")
	f.Fuzz(func(t *testing.T, s string) {
		for key, value := range service(s) {
			if strings.Contains(key+value, "\n") {
				t.Fatalf("got %q=%q", key, value)
			}
			for word := range strings.FieldsSeq(key + " " + value) {
				if !strings.Contains(s, word) {
					t.Fatalf("got %q=%q, and %q is not in the text", key, value, word)
				}
			}
		}
	})
}

func TestNotify(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "")
	if err := Notify(Ready); err != nil {
		t.Errorf("without a manager: %v", err)
	}
	t.Setenv("NOTIFY_SOCKET", "vsock:2:3")
	if err := Notify(Ready); err == nil {
		t.Error("an address that is no socket of unix(7) is taken")
	}
	dir, err := os.MkdirTemp("", "ebbsd") // a socket's path has room for 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	for _, name := range []string{filepath.Join(dir, "notify"), "@ebb-notify-test-" + strconv.Itoa(os.Getpid())} {
		conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: name, Net: "unixgram"})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		t.Setenv("NOTIFY_SOCKET", name)
		if err := Notify(Ready, Status("serving\n2 backends")); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 256)
		n, err := conn.Read(b)
		if want := "READY=1\nSTATUS=serving 2 backends"; err != nil || string(b[:n]) != want {
			t.Errorf("%s: got %q, %v, want %q", name, b[:n], err, want)
		}
	}
}

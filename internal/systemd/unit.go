// SPDX-License-Identifier: Apache-2.0

package systemd

import (
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// defaultTimeoutStop is DefaultTimeoutStopSec= as systemd-system.conf(5) ships it.
const defaultTimeoutStop = 90 * time.Second

// Unit is a service, as far as its stop is concerned.
type Unit struct {
	Name  string   // as the manager calls it: an alias is resolved
	Files []string // the unit file first, then its drop-ins in the order in which they are read; paths inside the root

	manager time.Duration // what TimeoutStopSec= is if nobody says it
}

// settings are those of a service that its stop depends on, verbatim.
type settings struct {
	stop     []string // values of ExecStop= that are in force
	replaced string   // the file that emptied that list last
	timeout  string   // TimeoutStopSec=; empty: the manager's default
	timedBy  string   // the file that says it
	kill     string   // KillMode=; empty: control-group
	start    string   // the last ExecStart=
}

// Characters of a unit's name, systemd.unit(5). The slash is none of them, and so it is no path.
var serviceName = regexp.MustCompile(`^[A-Za-z0-9:_.\\-]+(@[A-Za-z0-9:_.\\-]*)?\.service$`)

// serviceOf is the full name of a service that a person has named; the suffix may be left out.
func serviceOf(name string) (string, error) {
	full := name
	switch ext := filepath.Ext(name); ext {
	case ".service":
	case ".socket", ".device", ".mount", ".automount", ".swap", ".target", ".path", ".timer", ".slice", ".scope":
		return "", fmt.Errorf("%q: %w: only services are stopped with connections; %s is a %s", name, ErrName, name, ext[1:])
	default:
		full += ".service"
	}
	if !serviceName.MatchString(full) || len(full) > 255 {
		return "", fmt.Errorf("%q: %w", name, ErrName)
	}
	if base, ok := strings.CutSuffix(full, "@.service"); ok {
		return "", fmt.Errorf("%q: %w: it is a template; name an instance, such as %s@blue", name, ErrName, base)
	}
	return full, nil
}

// read is what the files say, in their order.
func read(root string, files []string) (settings, error) {
	var s settings
	for _, f := range files {
		b, err := os.ReadFile(inside(root, f))
		if err != nil {
			return s, fmt.Errorf("read %s: %w", f, err)
		}
		for key, value := range service(string(b)) {
			switch key {
			case "ExecStop":
				// An empty value drops what came before, systemd.service(5).
				if value == "" {
					s.stop, s.replaced = nil, f
				} else {
					s.stop = append(s.stop, value)
				}
			case "ExecStart":
				s.start = value
			case "TimeoutStopSec", "TimeoutSec":
				s.timeout, s.timedBy = value, f
			case "KillMode":
				s.kill = value
			}
		}
	}
	return s, nil
}

// timeoutStop is TimeoutStopSec= as a duration; 0 there means infinity, systemd.service(5).
func (s settings) timeoutStop(otherwise time.Duration) (time.Duration, error) {
	if s.timeout == "" {
		return otherwise, nil
	}
	d, err := parseSpan(s.timeout)
	if err != nil {
		return 0, fmt.Errorf("read %s: TimeoutStopSec: %w", s.timedBy, err)
	}
	if d == 0 {
		d = maxSpan
	}
	return d, nil
}

// inside is the path of a file of the root, with symbolic links followed inside it.
func inside(root, file string) string {
	for range 16 { // more are a loop, which the caller then finds to be one
		target, err := os.Readlink(filepath.Join(root, file))
		if err != nil {
			break
		}
		if !filepath.IsAbs(target) {
			target = filepath.Join(filepath.Dir(file), target)
		}
		file = target
	}
	return filepath.Join(root, file)
}

// service yields the assignments in the [Service] sections of a unit file, systemd.syntax(7): a backslash at the end of
// a line continues it, comments in between are left out.
func service(text string) iter.Seq2[string, string] {
	return func(yield func(string, string) bool) {
		section, pending := "", ""
		for line := range strings.Lines(text + "\n\n") { // the last one too may be continued, by nothing
			line = strings.TrimLeft(strings.TrimRight(line, "\r\n"), " \t")
			if strings.HasPrefix(line, "#") || strings.HasPrefix(line, ";") {
				continue
			}
			line = pending + line
			if head, ok := strings.CutSuffix(line, `\`); ok {
				pending = head + " "
				continue
			}
			pending = ""
			if strings.HasPrefix(line, "[") {
				section = strings.TrimSpace(line)
				continue
			}
			key, value, ok := strings.Cut(line, "=")
			if ok && section == "[Service]" && !yield(strings.TrimSpace(key), strings.TrimSpace(value)) {
				return
			}
		}
	}
}

// searchPath are the directories of unit files, those that win first, systemd.unit(5). What a manager makes at run time
// is among them, and is not there in an image.
var searchPath = []string{
	"/etc/systemd/system", "/run/systemd/system", "/run/systemd/generator", "/usr/local/lib/systemd/system",
	"/usr/lib/systemd/system", "/lib/systemd/system", "/run/systemd/generator.late",
}

// search finds the files of a service without a manager's help. Symbolic links are followed inside the root.
func search(root, name string) (Unit, error) {
	u := Unit{manager: defaultTimeoutStop}
	names := []string{name}
	for {
		file, alias, err := fragment(root, names[len(names)-1])
		if err != nil {
			return u, err
		}
		if alias == "" {
			u.Name, u.Files = names[len(names)-1], []string{file}
			break
		}
		if slices.Contains(names, alias) {
			return u, fmt.Errorf("%s: %w: it is an alias of itself", name, ErrUnit)
		}
		names = append(names, alias)
	}
	u.Files = append(u.Files, dropIns(root, names)...)
	return u, nil
}

// fragment finds the unit file of name, or what name is an alias of.
func fragment(root, name string) (file, alias string, err error) {
	candidates := []string{name}
	if base, _, ok := strings.Cut(name, "@"); ok {
		candidates = append(candidates, base+"@.service")
	}
	for _, c := range candidates {
		for _, dir := range searchPath {
			file := filepath.Join(dir, c)
			at := filepath.Join(root, file)
			fi, err := os.Lstat(at)
			if err != nil {
				continue
			}
			if fi.Mode()&os.ModeSymlink == 0 {
				if fi.Size() == 0 {
					return "", "", fmt.Errorf("%s: %w: it is masked by %s", name, ErrUnit, file)
				}
				return file, "", nil
			}
			target, err := os.Readlink(at)
			if err != nil {
				return "", "", fmt.Errorf("find %s: %w", name, err)
			}
			if !filepath.IsAbs(target) {
				target = filepath.Join(dir, target)
			}
			switch base := filepath.Base(target); {
			case target == os.DevNull:
				return "", "", fmt.Errorf("%s: %w: it is masked by %s", name, ErrUnit, file)
			case base == c || strings.HasSuffix(base, "@.service"):
				return target, "", nil // a unit file that is kept elsewhere, `systemctl link`
			default:
				return "", base, nil
			}
		}
	}
	return "", "", fmt.Errorf("%s: %w: looked in %s", name, ErrNotFound, strings.Join(searchPath, ", "))
}

// dropIns finds the drop-ins of a service that has these names, in the order in which they are read: by file name,
// whatever the directory; of several of one name that in the most specific directory counts, systemd.unit(5).
func dropIns(root string, names []string) []string {
	var dirs []string
	for _, name := range slices.Backward(names) {
		dirs = append(dirs, name+".d")
		stem := strings.TrimSuffix(name, ".service")
		if base, _, ok := strings.Cut(stem, "@"); ok {
			dirs = append(dirs, base+"@.service.d")
			stem = base
		}
		for i := len(stem) - 2; i > 0; i-- {
			if stem[i] == '-' {
				dirs = append(dirs, stem[:i+1]+".service.d")
			}
		}
	}
	dirs = append(dirs, "service.d")
	found := make(map[string]string)
	for _, d := range dirs {
		for _, top := range searchPath {
			dir := filepath.Join(top, d)
			entries, err := os.ReadDir(filepath.Join(root, dir))
			if err != nil {
				continue // most of them do not exist
			}
			for _, e := range entries {
				if _, seen := found[e.Name()]; !seen && strings.HasSuffix(e.Name(), ".conf") {
					found[e.Name()] = filepath.Join(dir, e.Name())
				}
			}
		}
	}
	var out []string
	for _, file := range found {
		// A link to /dev/null takes a drop-in of that name away.
		if target, err := os.Readlink(filepath.Join(root, file)); err == nil && target == os.DevNull {
			continue
		}
		out = append(out, file)
	}
	slices.SortFunc(out, func(a, b string) int { return strings.Compare(filepath.Base(a), filepath.Base(b)) })
	return out
}

// SPDX-License-Identifier: Apache-2.0

package systemd

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// dropInName is the file below UNIT.d. What sorts after it can change what it says.
const dropInName = "50-ebb.conf"

// Margin is what `ebb drain --wait` may need beyond the grace: to find the agent and to hear its answer.
const Margin = 10 * time.Second

// Host is whose units are meant. The zero value is this machine without a running manager.
type Host struct {
	// Root is the directory of an image; empty: this machine.
	Root string
	// Systemctl runs systemctl(1) with these arguments and returns what it prints. Nil: there is no manager to ask, and
	// the unit files are searched for.
	Systemctl func(ctx context.Context, args ...string) (string, error)
}

// Booted says whether systemd manages this machine, sd_booted(3).
func Booted() bool {
	fi, err := os.Lstat("/run/systemd/system")
	return err == nil && fi.IsDir()
}

// Systemctl runs systemctl(1) of this machine.
func Systemctl(ctx context.Context, args ...string) (string, error) {
	out, err := exec.CommandContext(ctx, "systemctl", args...).Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) && len(exit.Stderr) > 0 {
			err = errors.New(strings.TrimSpace(string(exit.Stderr)))
		}
		return "", fmt.Errorf("systemctl %s: %w", strings.Join(args, " "), err)
	}
	return string(out), nil
}

// Drain is what a unit does before it stops.
type Drain struct {
	Ebb   string        // path of the binary, absolute
	Grace time.Duration // the whole budget of the drain
}

// Plan is a drop-in, and what it changes.
type Plan struct {
	Unit    Unit
	Path    string // of the drop-in inside the root
	Content string
	Current bool // nothing is to be done: the file is there and says just that, or the unit needs none

	was, is []setting
}

// setting is one line of a diff, and why it is there.
type setting struct{ line, why string }

// Unit finds a service. name may lack the suffix .service.
func (h Host) Unit(ctx context.Context, name string) (Unit, error) {
	name, err := serviceOf(name)
	if err != nil {
		return Unit{}, err
	}
	if h.Systemctl == nil {
		return search(h.Root, name)
	}
	out, err := h.Systemctl(ctx, "show", "--property=Id,LoadState,FragmentPath,DropInPaths", "--", name)
	if err != nil {
		return Unit{}, err
	}
	p := properties(out)
	switch p["LoadState"] {
	case "loaded":
	case "not-found":
		return Unit{}, fmt.Errorf("%s: %w; see systemctl list-unit-files --type=service", name, ErrNotFound)
	default:
		return Unit{}, fmt.Errorf("%s: %w: it is %s; see systemctl status %s", name, ErrUnit, p["LoadState"], name)
	}
	if p["FragmentPath"] == "" {
		return Unit{}, fmt.Errorf("%s: %w: it has no unit file", name, ErrUnit)
	}
	u := Unit{Name: p["Id"], Files: append([]string{p["FragmentPath"]}, strings.Fields(p["DropInPaths"])...)}
	if out, err = h.Systemctl(ctx, "show", "--property=DefaultTimeoutStopUSec"); err != nil {
		return u, err
	}
	if u.manager, err = parseSpan(properties(out)["DefaultTimeoutStopUSec"]); err != nil {
		return u, fmt.Errorf("DefaultTimeoutStopSec of the manager: %w", err)
	}
	return u, nil
}

// properties reads the lines of `systemctl show`.
func properties(out string) map[string]string {
	p := make(map[string]string)
	for line := range strings.Lines(out) {
		if key, value, ok := strings.Cut(strings.TrimSuffix(line, "\n"), "="); ok {
			p[key] = value
		}
	}
	return p
}

// plainPath has nothing in it that systemd.service(5) would read as a quote or a specifier.
var plainPath = regexp.MustCompile(`^/[A-Za-z0-9/._+-]+$`)

// Plan derives the drop-in of a service from its files. It writes nothing. The error wraps ErrName, ErrNotFound, or
// ErrUnit if the drop-in would not have its effect, and ErrChanged if the one that is there is not as Ebb wrote it.
func (h Host) Plan(ctx context.Context, name string, d Drain) (Plan, error) {
	if !plainPath.MatchString(d.Ebb) {
		return Plan{}, fmt.Errorf("%q cannot stand in a unit file; install ebb below a directory such as /usr/local/bin", d.Ebb)
	}
	u, err := h.Unit(ctx, name)
	if err != nil {
		return Plan{}, err
	}
	p := Plan{Unit: u, Path: dropInPath(u.Name)}
	var before, after []string
	for i, f := range u.Files {
		switch order := strings.Compare(filepath.Base(f), dropInName); {
		case i == 0 || order < 0:
			before = append(before, f)
		case order > 0:
			after = append(after, f)
		}
	}
	own, err := read(h.Root, before)
	if err != nil {
		return p, err
	}
	later, err := read(h.Root, after)
	if err != nil {
		return p, err
	}
	if err := p.derive(own, later, d); err != nil {
		return p, err
	}
	if len(p.is) == 0 { // a unit of `ebb run` that has it all
		p.Current = true
		return p, nil
	}
	written, err := h.written(p.Path)
	if errors.Is(err, fs.ErrNotExist) {
		return p, nil
	}
	p.Current = written == p.Content
	return p, err
}

func dropInPath(unit string) string {
	return filepath.Join("/etc/systemd/system", unit+".d", dropInName)
}

// derive makes the content from what the files before and after the drop-in say.
func (p *Plan) derive(own, later settings, d Drain) error {
	limit, err := own.timeoutStop(p.Unit.manager)
	if err != nil {
		return err
	}
	need := max(limit, d.Grace+Margin)
	lateLimit, err := later.timeoutStop(need)
	if err != nil {
		return err
	}
	if lateLimit < d.Grace+Margin {
		return fmt.Errorf("%s: %w: %s sets TimeoutStopSec=%s, and less than %s would cut the drain short; rename it so that it sorts before %s",
			p.Unit.Name, ErrUnit, later.timedBy, later.timeout, formatSpan(d.Grace+Margin), dropInName)
	}
	var b strings.Builder
	// A unit whose main process is `ebb run` begins its drain at the stop signal.
	if supervised(own.start) {
		b.WriteString("[Service]\n")
		if kill := own.kill; kill != "mixed" {
			const why = "the command of ebb run must not hear the stop signal before its turn"
			fmt.Fprintf(&b, "# %s.\nKillMode=mixed\n", why)
			p.was = append(p.was, setting{line: "KillMode=" + orDefault(kill, "control-group")})
			p.is = append(p.is, setting{"KillMode=mixed", why})
		}
	} else {
		if later.replaced != "" {
			return fmt.Errorf("%s: %w: %s empties ExecStop= and the drain with it; rename it so that it sorts before %s",
				p.Unit.Name, ErrUnit, later.replaced, dropInName)
		}
		const order = "when the system goes down, the agent is there until this unit has drained"
		drain := fmt.Sprintf("-+%s drain --unit %%n --wait --grace %s", d.Ebb, formatSpan(d.Grace))
		const first = "drains before anything stops the service; - goes on if that fails, + is for a unit with a User="
		fmt.Fprintf(&b, "[Unit]\n# %s.\nAfter=%s\n\n[Service]\n# %s.\n", order, agentUnit, first)
		if len(own.stop) > 0 {
			// Nothing can be put in front of a list but by writing it anew.
			b.WriteString("ExecStop=\n")
		}
		for _, line := range append([]string{drain}, own.stop...) {
			fmt.Fprintf(&b, "ExecStop=%s\n", line)
		}
		p.is = append(p.is, setting{"After=" + agentUnit, order}, setting{"ExecStop=" + drain, first})
		for _, line := range own.stop {
			p.was = append(p.was, setting{line: "ExecStop=" + line})
			p.is = append(p.is, setting{line: "ExecStop=" + line})
		}
	}
	if need != limit && later.timeout == "" {
		why := fmt.Sprintf("each ExecStop= may take this long, and the drain takes up to %s", formatSpan(d.Grace))
		fmt.Fprintf(&b, "# %s.\nTimeoutStopSec=%s\n", why, formatSpan(need))
		p.was = append(p.was, setting{line: "TimeoutStopSec=" + orDefault(own.timeout, formatSpan(limit))})
		p.is = append(p.is, setting{"TimeoutStopSec=" + formatSpan(need), why})
	}
	p.Content = sign(b.String())
	return nil
}

// agentUnit is what drains.
const agentUnit = "ebb-agent.service"

func orDefault(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}

// supervised says whether a value of ExecStart= is `ebb run`.
func supervised(start string) bool {
	words := strings.Fields(strings.TrimLeft(start, "@-:+!"))
	return len(words) > 1 && filepath.Base(words[0]) == "ebb" && words[1] == "run"
}

// Diff shows what the drop-in changes: lines that go (-), that come (+, with the reason) and that stay.
func (p Plan) Diff() string {
	var b strings.Builder
	fmt.Fprintf(&b, "--- %s\n+++ %s with %s\n", p.Unit.Name, p.Unit.Name, p.Path)
	for _, s := range p.was {
		if !slices.ContainsFunc(p.is, func(t setting) bool { return t.line == s.line }) {
			fmt.Fprintf(&b, "-%s\n", s.line)
		}
	}
	for _, s := range p.is {
		if s.why == "" {
			fmt.Fprintf(&b, " %s\n", s.line)
		} else {
			fmt.Fprintf(&b, "+%s\n     %s\n", s.line, s.why)
		}
	}
	return b.String()
}

// signature begins the first line of a drop-in; the checksum of all that follows that line comes after it.
const signature = "# Written by ebb systemd enable. Once changed it is neither replaced nor removed by ebb. sha256 "

func sign(body string) string {
	sum := sha256.Sum256([]byte(body))
	return signature + hex.EncodeToString(sum[:]) + "\n" + body
}

// written reads a drop-in and checks that it is as Ebb wrote it, else ErrChanged.
func (h Host) written(path string) (string, error) {
	b, err := os.ReadFile(filepath.Join(h.Root, path))
	if err != nil {
		return "", fmt.Errorf("read the drop-in: %w", err)
	}
	_, body, _ := strings.Cut(string(b), "\n")
	if string(b) != sign(body) {
		return "", fmt.Errorf("%s: %w; remove it yourself if it is not needed", path, ErrChanged)
	}
	return string(b), nil
}

// Apply writes the drop-in, unless it is there, and has the manager read it. Nothing is started or stopped.
func (h Host) Apply(ctx context.Context, p Plan) error {
	if p.Current {
		return nil
	}
	path := filepath.Join(h.Root, p.Path)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("enable draining of %s: %w", p.Unit.Name, err)
	}
	// Only what ends in .conf is read, and the rename makes it whole.
	temporary := path + ".new"
	err := os.WriteFile(temporary, []byte(p.Content), 0o644)
	if err == nil {
		err = os.Rename(temporary, path)
	}
	if err != nil {
		return fmt.Errorf("enable draining of %s: %w", p.Unit.Name, errors.Join(err, removeIfThere(temporary)))
	}
	return h.reload(ctx)
}

// Disable removes the drop-in of a service and returns its path inside the root. The error wraps ErrNotEnabled if there
// is none, and ErrChanged if it is not as Ebb wrote it. Of a unit that is gone the drop-in can be removed too.
func (h Host) Disable(ctx context.Context, name string, dryRun bool) (string, error) {
	full, err := serviceOf(name)
	if err != nil {
		return "", err
	}
	switch u, err := h.Unit(ctx, full); {
	case err == nil:
		full = u.Name // it may be an alias
	case !errors.Is(err, ErrNotFound) && !errors.Is(err, ErrUnit):
		return "", err
	}
	path := dropInPath(full)
	if _, err := h.written(path); errors.Is(err, fs.ErrNotExist) {
		return path, fmt.Errorf("%s: %w: %s does not exist", full, ErrNotEnabled, path)
	} else if err != nil || dryRun {
		return path, err
	}
	if err := os.Remove(filepath.Join(h.Root, path)); err != nil {
		return path, fmt.Errorf("disable draining of %s: %w", full, err)
	}
	// It stays if there are other drop-ins.
	_ = os.Remove(filepath.Dir(filepath.Join(h.Root, path)))
	return path, h.reload(ctx)
}

// reload has the manager read its unit files again.
func (h Host) reload(ctx context.Context) error {
	if h.Systemctl == nil {
		return nil
	}
	_, err := h.Systemctl(ctx, "daemon-reload")
	return err
}

func removeIfThere(path string) error {
	if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"net"
	"net/netip"
	"path"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/drain"
)

// The bounds of durations. A shorter one is a slip of the unit.
const (
	shortest = time.Millisecond
	fastest  = 100 * time.Millisecond // at which a probe does nothing but probe
	longest  = 365 * 24 * time.Hour   // what a drain.Policy takes
)

// mostHeld bounds hold_max: each connection that waits takes one of the host's ports.
const mostHeld = 16384

// highestVersion is the highest number that every reader of JSON keeps exactly: RFC 8259, section 6.
const highestVersion = 1<<53 - 1

// maxSocketPath is that of sun_path, without its final zero: unix(7).
const maxSocketPath = 107

var (
	plainName  = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$`)
	groupName  = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}$`)
	unitName   = regexp.MustCompile(`^[A-Za-z0-9:_.\\@-]{1,248}\.(service|scope|slice)$`) // systemd.unit(5)
	hostHeader = regexp.MustCompile(`^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?$`)
	dnsLabel   = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
)

// dnsName says whether s is a subdomain as of RFC 1123, which is what the prefix of a Kubernetes label is.
func dnsName(s string) bool {
	for label := range strings.SplitSeq(s, ".") {
		if !dnsLabel.MatchString(label) {
			return false
		}
	}
	return len(s) <= 253
}

// omit leaves a value out when nothing is set.
func omit[T any](s scalar[T]) scalar[T] {
	s.omitZero = true
	return s
}

// orNone takes the empty string as well.
func orNone(s scalar[string]) scalar[string] {
	parse := s.form.parse
	s.form.want += `, or "" for none`
	s.form.parse = func(v string) (string, bool) {
		if v == "" {
			return "", true
		}
		return parse(v)
	}
	return s
}

func same(s string) string { return s }

func str(to *string, want string, parse func(string) (string, bool)) scalar[string] {
	return scalar[string]{to: to, form: form[string]{tag: "!!str", want: want, parse: parse, print: same}}
}

// matching is a string of which ok is true.
func matching(to *string, want string, ok func(string) bool) scalar[string] {
	return str(to, want, func(s string) (string, bool) { return s, ok(s) })
}

func printable(s string) bool { return !strings.ContainsFunc(s, unicode.IsControl) }

func text(to *string, want string) scalar[string] {
	return matching(to, want, printable)
}

func name(to *string) scalar[string] {
	return matching(to, `a name of up to 63 letters, digits, ".", "_" and "-" that begins with a letter or digit`, plainName.MatchString)
}

func absolute(to *string) scalar[string] {
	return str(to, "an absolute path", func(s string) (string, bool) { return path.Clean(s), path.IsAbs(s) && printable(s) })
}

func socketPath(to *string) scalar[string] {
	return str(to, fmt.Sprintf("an absolute path of up to %d bytes", maxSocketPath), func(s string) (string, bool) {
		s, abs := path.Clean(s), path.IsAbs(s)
		return s, abs && printable(s) && s != "/" && len(s) <= maxSocketPath
	})
}

func requestPath(to *string) scalar[string] {
	return matching(to, `a path that begins with "/" and has no query`, func(s string) bool {
		return s != "" && s[0] == '/' && !strings.ContainsAny(s, " ?#") && printable(s)
	})
}

// cgroup is a path below the root of the control groups, with or without a leading slash.
func cgroup(to *string) scalar[string] {
	return str(to, `a path below the root of the control groups such as /system.slice/web.service, without ".."`, func(s string) (string, bool) {
		for element := range strings.SplitSeq(s, "/") {
			if element == ".." {
				return "", false
			}
		}
		s = path.Join("/", s)
		return s, s != "/" && printable(s)
	})
}

// namespace is a path or a name; a path to a name's place is that name.
func namespace(to *string) scalar[string] {
	return str(to, "an absolute path, or a name under /run/netns", func(s string) (string, bool) {
		if path.IsAbs(s) {
			s = path.Clean(s)
			if dir, base := path.Split(s); (dir == "/run/netns/" || dir == "/var/run/netns/") && base != "" {
				s = base
			}
			return s, printable(s) && s != "/"
		}
		return s, s != "" && s != "." && s != ".." && !strings.Contains(s, "/") && printable(s)
	})
}

// listenOn is an address for a listener of the agent's own. It stays as it is written: :PORT is both families.
func listenOn(to *string) scalar[string] {
	return matching(to, "ADDR:PORT with a numeric address, or :PORT", func(s string) bool {
		host, port, err := net.SplitHostPort(s)
		if err != nil {
			return false
		}
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return false
		}
		_, err = netip.ParseAddr(host)
		return host == "" || err == nil
	})
}

// addressForm is an address and port of a service, or of a peer, which is dialled.
func addressForm(peer bool) form[netip.AddrPort] {
	f := form[netip.AddrPort]{tag: "!!str", want: "ADDR:PORT with a numeric address such as 0.0.0.0:80 or [::]:80, or :PORT", print: netip.AddrPort.String}
	if peer {
		f.want = "ADDR:PORT with a numeric address such as 192.0.2.10:80 or [2001:db8::10]:80"
	}
	f.parse = func(s string) (netip.AddrPort, bool) {
		if strings.HasPrefix(s, ":") && !peer {
			s = "0.0.0.0" + s
		}
		ap, err := netip.ParseAddrPort(s)
		addr := ap.Addr().Unmap()
		ok := err == nil && ap.Port() != 0 && addr.Zone() == "" && !addr.IsMulticast() && !(peer && addr.IsUnspecified())
		return netip.AddrPortFrom(addr, ap.Port()), ok
	}
	return f
}

func prefixForm() form[netip.Prefix] {
	return form[netip.Prefix]{
		tag: "!!str", want: "an address or a prefix such as 192.0.2.0/28", print: netip.Prefix.String,
		parse: func(s string) (netip.Prefix, bool) {
			if addr, err := netip.ParseAddr(s); err == nil {
				addr = addr.Unmap()
				return netip.PrefixFrom(addr, addr.BitLen()), addr.Zone() == ""
			}
			p, err := netip.ParsePrefix(s)
			return p.Masked(), err == nil && !p.Addr().Is4In6()
		},
	}
}

func signalForm() form[syscall.Signal] {
	return form[syscall.Signal]{
		tag: "!!str", want: "the name of a signal such as SIGTERM", print: unix.SignalName,
		parse: func(s string) (syscall.Signal, bool) {
			n := unix.SignalNum("SIG" + strings.TrimPrefix(strings.ToUpper(s), "SIG"))
			return n, n != 0
		},
	}
}

// argv is a program and its arguments, which may have several lines.
func argv(to *[]string) list[string] {
	f := text(nil, "a string").form
	f.parse = func(s string) (string, bool) { return s, !strings.Contains(s, "\x00") }
	return list[string]{to: to, form: f, omitZero: true}
}

func boolean(to *bool) scalar[bool] {
	return scalar[bool]{to: to, form: form[bool]{
		tag: "!!bool", want: "true or false", print: strconv.FormatBool,
		parse: func(s string) (bool, bool) {
			v, err := strconv.ParseBool(s)
			return v, err == nil
		},
	}}
}

// number is a decimal number; YAML takes 010 for 8, which is not what a port was meant to be.
func number[T ~int | ~uint16 | ~int64](to *T, lo, hi int64) scalar[T] {
	return scalar[T]{to: to, form: form[T]{
		tag: "!!int", want: fmt.Sprintf("a number from %d to %d", lo, hi),
		print: func(v T) string { return strconv.FormatInt(int64(v), 10) },
		parse: func(s string) (T, bool) {
			v, err := strconv.ParseInt(s, 10, 64)
			return T(v), err == nil && strconv.FormatInt(v, 10) == s && lo <= v && v <= hi
		},
	}}
}

func port(to *uint16) scalar[uint16] { return number(to, 1, 65535) }

func duration(to *time.Duration, lo time.Duration) scalar[time.Duration] {
	return scalar[time.Duration]{to: to, form: form[time.Duration]{
		tag: "!!str", want: fmt.Sprintf("a duration such as 30s or 1m30s, from %s to %s", brief(lo), brief(longest)), print: brief,
		parse: func(s string) (time.Duration, bool) {
			d, err := time.ParseDuration(s)
			return d, err == nil && lo <= d && d <= longest
		},
	}}
}

// brief is d without the zeros that say nothing: 10m, not 10m0s.
func brief(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// word is one of a few.
func word[T ~string](to *T, known ...T) scalar[T] {
	f := form[T]{tag: "!!str", print: func(v T) string { return string(v) }}
	for _, k := range known {
		f.known = append(f.known, string(k))
	}
	f.want = "one of " + strings.Join(f.known, ", ")
	f.parse = func(s string) (T, bool) {
		for _, k := range known {
			if s == string(k) {
				return k, true
			}
		}
		return "", false
	}
	return scalar[T]{to: to, form: f}
}

func mode(to *drain.Mode) scalar[drain.Mode] {
	return word(to, drain.ModeOff, drain.ModeObserve, drain.ModeEnforce)
}

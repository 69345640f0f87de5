// SPDX-License-Identifier: Apache-2.0

package hook

import (
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Hook is how an application is told of one moment of its drain. Exactly one
// field is set; the zero value is no hook.
type Hook struct {
	Signal syscall.Signal // to the main process, once
	HTTP   string         // URL, http or https, that a JSON Message is posted to
	Exec   []string       // argument vector, run without a shell
	API    bool           // the application's own session carries it
}

// lastSignal is the highest number of one: signal(7), SIGRTMAX.
const lastSignal = 64

// IsZero says that there is no hook.
func (h Hook) IsZero() bool {
	return h.Signal == 0 && h.HTTP == "" && h.Exec == nil && !h.API
}

// Validate returns why a hook cannot work: none or several of its fields are
// set, or the one that is set is malformed. The error wraps ErrInvalid.
func (h Hook) Validate() error {
	var kinds []string
	if h.Signal != 0 {
		kinds = append(kinds, "signal")
	}
	if h.HTTP != "" {
		kinds = append(kinds, "http")
	}
	if h.Exec != nil {
		kinds = append(kinds, "exec")
	}
	if h.API {
		kinds = append(kinds, "api")
	}
	switch {
	case len(kinds) == 0:
		return fmt.Errorf("%w: give one of signal, http, exec, api", ErrInvalid)
	case len(kinds) > 1:
		return fmt.Errorf("%w: give only one of %s", ErrInvalid, strings.Join(kinds, ", "))
	case h.Signal < 0 || h.Signal > lastSignal:
		return fmt.Errorf("%w: no signal has the number %d", ErrInvalid, int(h.Signal))
	case h.Exec != nil && (len(h.Exec) == 0 || h.Exec[0] == ""):
		return fmt.Errorf("%w: exec names no program", ErrInvalid)
	case h.HTTP != "":
		if err := validateURL(h.HTTP); err != nil {
			return fmt.Errorf("%w: %w", ErrInvalid, err)
		}
	}
	return nil
}

func validateURL(s string) error {
	u, err := url.Parse(s)
	switch {
	case err != nil:
		return err // names the URL
	case u.Scheme != "http" && u.Scheme != "https":
		return fmt.Errorf("%s: only http:// and https:// URLs can be posted to", s)
	case u.Hostname() == "":
		return fmt.Errorf("%s: names no host", s)
	case u.User != nil:
		return errors.New("a URL with a user name or a password ends up in logs: leave them out")
	}
	return nil
}

// LoopbackPort is the port of this host to which an HTTP hook goes by loopback.
func (h Hook) LoopbackPort() (port uint16, ok bool) {
	u, err := url.Parse(h.HTTP)
	if err != nil {
		return 0, false
	}
	if ip, err := netip.ParseAddr(u.Hostname()); u.Hostname() != "localhost" && (err != nil || !ip.IsLoopback()) {
		return 0, false
	}
	return URLPort(h.HTTP)
}

// URLPort is the port that an http(s) URL names, explicitly or by its scheme.
func URLPort(s string) (port uint16, ok bool) {
	u, err := url.Parse(s)
	if err != nil {
		return 0, false
	}
	switch {
	case u.Port() != "":
		n, err := strconv.ParseUint(u.Port(), 10, 16)
		return uint16(n), err == nil
	case u.Scheme == "http":
		return 80, true
	case u.Scheme == "https":
		return 443, true
	}
	return 0, false
}

// String is the hook as Parse reads it, but for a program whose arguments have
// spaces or quotes: `signal:SIGTERM`, `http://127.0.0.1:8081/flush`,
// `exec:/usr/bin/flush now`, `api`; `none` for the zero value.
func (h Hook) String() string {
	switch {
	case h.Signal != 0:
		if name := unix.SignalName(h.Signal); name != "" {
			return "signal:" + name
		}
		return fmt.Sprintf("signal:%d", int(h.Signal))
	case h.HTTP != "":
		return h.HTTP
	case h.Exec != nil:
		return "exec:" + strings.Join(h.Exec, " ")
	case h.API:
		return "api"
	}
	return "none"
}

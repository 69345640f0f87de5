// SPDX-License-Identifier: Apache-2.0

package health

import (
	"cmp"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"
)

// What a Probe does without being told.
const (
	DefaultInterval = 2 * time.Second
	DefaultTimeout  = time.Second
	DefaultFall     = 3
	DefaultRise     = 2
)

// Probe is how a backend is asked whether it is ready. Exactly one of HTTP,
// TCP, GRPC and Exec is set.
type Probe struct {
	HTTP *HTTPProbe
	TCP  *TCPProbe
	GRPC *GRPCProbe
	Exec []string // argument vector, run without a shell and with nothing but PATH in its environment; exit status 0 is ready

	Interval time.Duration // from the start of one attempt to the next; 0 is DefaultInterval
	Timeout  time.Duration // of one attempt; 0 is DefaultTimeout
	Fall     int           // failures in a row that make a ready backend not ready; 0 is DefaultFall
	Rise     int           // successes in a row that make it ready; 0 is DefaultRise
}

// HTTPProbe asks with GET over cleartext HTTP/1.1; a status of 200 to 399 is
// ready. Redirects are not followed.
type HTTPProbe struct {
	Path string // "" is "/"
	Port uint16
	Host string // the Host header; "" is the address and port
}

// TCPProbe asks by connecting; a handshake is ready.
type TCPProbe struct {
	Port uint16
}

// GRPCProbe asks by grpc.health.v1.Health/Check over cleartext HTTP/2; SERVING
// is ready.
type GRPCProbe struct {
	Port    uint16
	Service string // "" asks for the server as a whole
}

// ErrInvalid says that a probe is set in a way that cannot work.
var ErrInvalid = errors.New("probe cannot work")

// NeedsPort tells whether the probe asks at a port and names none.
func (p Probe) NeedsPort() bool {
	return p.HTTP != nil && p.HTTP.Port == 0 || p.TCP != nil && p.TCP.Port == 0 || p.GRPC != nil && p.GRPC.Port == 0
}

// At is the probe with a port in the place of one that it does not name.
func (p Probe) At(port uint16) Probe {
	if p.HTTP != nil {
		h := *p.HTTP
		h.Port = cmp.Or(h.Port, port)
		p.HTTP = &h
	}
	if p.TCP != nil {
		p.TCP = &TCPProbe{Port: cmp.Or(p.TCP.Port, port)}
	}
	if p.GRPC != nil {
		g := *p.GRPC
		g.Port = cmp.Or(g.Port, port)
		p.GRPC = &g
	}
	return p
}

// Validate returns why a probe cannot work. The error wraps ErrInvalid. Zero
// times and counts are valid: they are the defaults.
func (p Probe) Validate() error {
	var kinds []string
	var port uint16 = 1
	if p.HTTP != nil {
		kinds, port = append(kinds, "http"), p.HTTP.Port
	}
	if p.TCP != nil {
		kinds, port = append(kinds, "tcp"), p.TCP.Port
	}
	if p.GRPC != nil {
		kinds, port = append(kinds, "grpc"), p.GRPC.Port
	}
	if p.Exec != nil {
		kinds = append(kinds, "exec")
	}
	switch {
	case len(kinds) == 0:
		return fmt.Errorf("%w: give one of http, tcp, grpc, exec", ErrInvalid)
	case len(kinds) > 1:
		return fmt.Errorf("%w: give only one of %s", ErrInvalid, strings.Join(kinds, ", "))
	case port == 0:
		return fmt.Errorf("%w: %s names no port", ErrInvalid, kinds[0])
	case p.Exec != nil && (len(p.Exec) == 0 || p.Exec[0] == ""):
		return fmt.Errorf("%w: exec names no program", ErrInvalid)
	case p.Interval < 0 || p.Timeout < 0 || p.Fall < 0 || p.Rise < 0:
		return fmt.Errorf("%w: interval, timeout, fall and rise are not negative", ErrInvalid)
	case p.HTTP != nil && p.HTTP.Path != "":
		if p.HTTP.Path[0] != '/' {
			return fmt.Errorf("%w: the path %q does not begin with /", ErrInvalid, p.HTTP.Path)
		}
		if _, err := url.ParseRequestURI(p.HTTP.Path); err != nil {
			return fmt.Errorf("%w: %w", ErrInvalid, err)
		}
	}
	return nil
}

func (p Probe) withDefaults() Probe {
	if p.Interval == 0 {
		p.Interval = DefaultInterval
	}
	if p.Timeout == 0 {
		p.Timeout = DefaultTimeout
	}
	if p.Fall == 0 {
		p.Fall = DefaultFall
	}
	if p.Rise == 0 {
		p.Rise = DefaultRise
	}
	return p
}

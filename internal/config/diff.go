// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"net/netip"
	"reflect"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Changes is what a new configuration changes of an old one. What is not named is untouched, however the files are
// written and whatever order they are in.
type Changes struct {
	// Restart are the node-wide keys, such as api.socket, of which a new value takes effect only when the agent is
	// started again, defaults.retain among them; Node are the others, mode and those of defaults, which a reload applies. Both
	// are sorted.
	Restart, Node []string

	Services Delta[string]      // by name; a change of a backend alone is none of its service
	Backends Delta[BackendName] // a backend that moves to another service is removed and added
}

// BackendName is the name of a backend together with that of its service.
type BackendName struct{ Service, Backend string }

// Delta names what differs, in the order of the new configuration, Removed in that of the old one.
type Delta[K comparable] struct {
	Added, Removed, Changed []K
}

// Empty says that nothing differs.
func (d Delta[K]) Empty() bool { return len(d.Added)+len(d.Removed)+len(d.Changed) == 0 }

// Empty says that the two configurations mean the same.
func (c Changes) Empty() bool {
	return len(c.Restart)+len(c.Node) == 0 && c.Services.Empty() && c.Backends.Empty()
}

// String says what changes, in a line for a person.
func (c Changes) String() string {
	var parts []string
	say := func(what string, names []string) {
		if len(names) > 0 {
			parts = append(parts, what+" "+strings.Join(names, ", "))
		}
	}
	backends := func(bs []BackendName) (names []string) {
		for _, b := range bs {
			names = append(names, b.Backend)
		}
		return names
	}
	say("for all", append(slices.Clone(c.Restart), c.Node...))
	say("new services", c.Services.Added)
	say("changed services", c.Services.Changed)
	say("removed services", c.Services.Removed)
	say("new backends", backends(c.Backends.Added))
	say("changed backends", backends(c.Backends.Changed))
	say("removed backends", backends(c.Backends.Removed))
	if len(parts) == 0 {
		return "nothing"
	}
	return strings.Join(parts, "; ")
}

// Diff says what next changes of old. It compares effective values, so that a default that changes shows at each service
// that inherits it. Neither is altered.
func Diff(old, next *Config) Changes {
	var ch Changes
	was := old.nodeWide()
	for key, now := range next.nodeWide() {
		switch {
		case now == was[key]:
		case key == "mode" || strings.HasPrefix(key, "defaults.") && key != "defaults.retain":
			ch.Node = append(ch.Node, key)
		default:
			ch.Restart = append(ch.Restart, key)
		}
	}
	slices.Sort(ch.Restart)
	slices.Sort(ch.Node)

	var before, after parts
	before.take(old)
	after.take(next)
	ch.Services = delta(before.services, after.services)
	ch.Backends = delta(before.backends, after.backends)
	return ch
}

// nodeWide is every key outside of the services with its value. All of them are scalars that are always written.
func (c *Config) nodeWide() map[string]string {
	values := make(map[string]string)
	walk("", (&Config{Mode: c.Mode, API: c.API, Metrics: c.Metrics, State: c.State, Defaults: c.Defaults, Kubernetes: c.Kubernetes}).keys(),
		func(path string, k key) {
			if n := k.value.write(); n != nil && n.Kind == yaml.ScalarNode && !strings.HasPrefix(path, "services") {
				values[path] = n.Value
			}
		})
	return values
}

// parts are the services and the backends of a configuration apart, in a form in which order does not matter.
type parts struct {
	services []part[string, Service]
	backends []part[BackendName, Backend]
}

type part[K comparable, V any] struct {
	key   K
	value V
}

func (p *parts) take(c *Config) {
	for _, s := range c.Services {
		for _, b := range s.Backends {
			p.backends = append(p.backends, part[BackendName, Backend]{BackendName{s.Name, b.Name}, b})
		}
		s.Backends = nil
		s.Listen = slices.SortedFunc(slices.Values(s.Listen), netip.AddrPort.Compare)
		s.Health.From = slices.SortedFunc(slices.Values(s.Health.From), func(a, b netip.Prefix) int {
			return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
		})
		p.services = append(p.services, part[string, Service]{s.Name, s})
	}
}

func delta[K comparable, V any](old, next []part[K, V]) Delta[K] {
	var d Delta[K]
	was := make(map[K]V)
	for _, p := range old {
		was[p.key] = p.value
	}
	now := make(map[K]bool)
	for _, p := range next {
		now[p.key] = true
		if v, ok := was[p.key]; !ok {
			d.Added = append(d.Added, p.key)
		} else if !reflect.DeepEqual(v, p.value) {
			d.Changed = append(d.Changed, p.key)
		}
	}
	for _, p := range old {
		if !now[p.key] {
			d.Removed = append(d.Removed, p.key)
		}
	}
	return d
}

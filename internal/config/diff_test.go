// SPDX-License-Identifier: Apache-2.0

package config

import (
	"reflect"
	"testing"
)

// before is what the tests of Diff change.
const before = `mode: observe
defaults: {grace: 30s}
services:
- name: a
  listen: [":80", "[::]:80"]
  health: {from: [192.0.2.0/28, 192.0.2.64/28]}
  flush: {exec: [x, y]}
  ready: {tcp: {port: 80}}
  backends:
  - {name: a1, match: {unit: a1.service}}
  - {name: a2, address: "192.0.2.1:80"}
- name: b
  grace: 40s
  mode: enforce
  backends: [{name: b1, match: {port: 81}}]
`

func TestC14_TheSameInOtherWordsIsNoChange(t *testing.T) {
	old := mustParse(t, before)
	for _, text := range []string{
		before,
		`# Another order, other spellings, and what is said that was the default.
services:
- {name: b, mode: enforce, grace: 0m40s, backends: [{name: b1, weight: 1, match: {port: 81}}], flush: {signal: term}, protocol: opaque}
- name: a
  backends:
  - {address: "[::ffff:192.0.2.1]:80", name: a2, mode: observe}
  - {name: a1, match: {unit: a1.service}}
  ready: {rise: 2, interval: 2000ms, tcp: {port: 80}}
  flush: {exec: [x, y]}
  health: {from: [192.0.2.65/28, 192.0.2.0/28]}
  listen: ["[::]:80", "0.0.0.0:80"]
  admit_for: 11s
metrics: {}
`,
	} {
		if ch := Diff(old, mustParse(t, text)); !ch.Empty() {
			t.Errorf("got %+v, want no change by\n%s", ch, text)
		}
	}
}

func TestDiff(t *testing.T) {
	const (
		a = `- name: a
  listen: [":80", "[::]:80"]
  health: {from: [192.0.2.0/28, 192.0.2.64/28]}
  flush: {exec: [x, y]}
  ready: {tcp: {port: 80}}
  backends:
`
		a12 = a + `  - {name: a1, match: {unit: a1.service}}
  - {name: a2, address: "192.0.2.1:80"}
`
		b = `- {name: b, grace: 40s, mode: enforce, backends: [{name: b1, match: {port: 81}}]}
`
	)
	a1, a2, b1 := BackendName{"a", "a1"}, BackendName{"a", "a2"}, BackendName{"b", "b1"}
	for _, tt := range []struct {
		name, text string
		want       Changes
	}{
		{"node's own", "api: {app_socket: \"\", group: ops}\nstate: {dir: /x}\nmetrics: {listen: \":1\"}\nkubernetes: {label_prefix: a.b}\nservices:\n" + a12 + b,
			Changes{Restart: []string{"api.app_socket", "api.group", "kubernetes.label_prefix", "metrics.listen", "state.dir"}}},
		{"how long metrics stay", "defaults: {grace: 30s, retain: 5m}\nservices:\n" + a12 + b,
			Changes{Restart: []string{"defaults.retain"}, Services: Delta[string]{Changed: []string{"a", "b"}}}},
		{"a default that one overrides", "defaults: {grace: 31s}\nservices:\n" + a12 + b,
			Changes{Node: []string{"defaults.admit_for", "defaults.grace"}, Services: Delta[string]{Changed: []string{"a"}}}},
		{"the mode of the node", "mode: off\nservices:\n" + a12 + b,
			Changes{Node: []string{"mode"}, Services: Delta[string]{Changed: []string{"a"}}, Backends: Delta[BackendName]{Changed: []BackendName{a1, a2}}}},
		{"a service goes", "services:\n" + a12,
			Changes{Services: Delta[string]{Removed: []string{"b"}}, Backends: Delta[BackendName]{Removed: []BackendName{b1}}}},
		{"a service comes", "services:\n" + a12 + b + service("c"),
			Changes{Services: Delta[string]{Added: []string{"c"}}, Backends: Delta[BackendName]{Added: []BackendName{{"c", "c-1"}}}}},
		{"backends alone", "services:\n" + a + "  - {name: a1, match: {unit: a2.service}}\n  - {name: a3, match: {pid: 3}}\n" + b,
			Changes{Backends: Delta[BackendName]{Added: []BackendName{{"a", "a3"}}, Removed: []BackendName{a2}, Changed: []BackendName{a1}}}},
		{"a backend moves", "services:\n" + a + "  - {name: a2, address: \"192.0.2.1:80\"}\n- {name: b, grace: 40s, mode: enforce, backends: [{name: b1, match: {port: 81}}, {name: a1, match: {unit: a1.service}}]}\n",
			Changes{Backends: Delta[BackendName]{Added: []BackendName{{"b", "a1"}}, Removed: []BackendName{a1}}}},
		{"a weight", "services:\n" + a + "  - {name: a1, weight: 2, match: {unit: a1.service}}\n  - {name: a2, address: \"192.0.2.1:80\"}\n" + b,
			Changes{Backends: Delta[BackendName]{Changed: []BackendName{a1}}}},
		{"the order of arguments", "services:\n- name: a\n  listen: [\":80\", \"[::]:80\"]\n  health: {from: [192.0.2.0/28, 192.0.2.64/28]}\n  flush: {exec: [y, x]}\n  ready: {tcp: {port: 80}}\n  backends: [{name: a1, match: {unit: a1.service}}, {name: a2, address: \"192.0.2.1:80\"}]\n" + b,
			Changes{Services: Delta[string]{Changed: []string{"a"}}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := Diff(mustParse(t, before), mustParse(t, tt.text))
			if !reflect.DeepEqual(got, tt.want) {
				t.Errorf("got  %+v\nwant %+v", got, tt.want)
			}
			if got.Empty() {
				t.Error("a change is called none")
			}
		})
	}
}

func TestChangesInWords(t *testing.T) {
	for _, tt := range []struct {
		c    Changes
		want string
	}{
		{Changes{}, "nothing"},
		{
			Changes{
				Node: []string{"mode"}, Services: Delta[string]{Added: []string{"c"}, Changed: []string{"a", "b"}},
				Backends: Delta[BackendName]{Added: []BackendName{{"c", "c1"}}, Removed: []BackendName{{"a", "a2"}}},
			},
			"for all mode; new services c; changed services a, b; new backends c1; removed backends a2",
		},
	} {
		if got := tt.c.String(); got != tt.want {
			t.Errorf("got %q, want %q", got, tt.want)
		}
	}
}

// A drain keeps the policy that it took at Begin only if a reload cannot reach into what was loaded before.
func TestD11_AReloadLeavesWhatWasLoaded(t *testing.T) {
	old, reference := mustParse(t, before), mustParse(t, before)
	next := mustParse(t, "services:\n"+service("a", "grace: 50s", `listen: [":81", ":80"]`, "ready: {tcp: {port: 1}}",
		"backends: [{name: a1, match: {unit: other.service}}]"))
	if ch := Diff(old, next); !reflect.DeepEqual(ch.Services.Changed, []string{"a"}) {
		t.Errorf("changed services: got %q, want a", ch.Services.Changed)
	}
	if !reflect.DeepEqual(old, reference) {
		t.Errorf("the old configuration: got %+v, want %+v", old, reference)
	}
	if got := next.Services[0].Listen[0].Port(); got != 81 {
		t.Errorf("the new one's first port: got %d, want 81 as written", got)
	}
}

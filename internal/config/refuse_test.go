// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/health"
	"github.com/ebbproxy/ebb/internal/hook"
)

// one is a service around the keys of a backend's match, a hook or a probe.
func one(more ...string) string { return "services:\n" + service("a", more...) }

// refusals are texts with all that is said of them, the name of the file left out. The schema refuses those too that are
// marked so: the others contradict themselves in a way that it cannot see.
var refusals = []struct {
	name, text string
	schema     bool
	want       string
}{
	{"unknown key", "mode: off\nsomething: {}\n", true, `
:2: something: unknown key: the keys here are mode, api, metrics, state, kubernetes, defaults, services`},
	{"typo", "defaults:\n  grase: 30s\n  flush-timeout: 3s\n  MODE: off\n", true, `
:2: defaults.grase: unknown key: did you mean "grace"?
:3: defaults.flush-timeout: unknown key: did you mean "flush_timeout"?
:4: defaults.MODE: unknown key: the keys here are protocol, grace, flush_timeout, reserve, extension, quiet_period, idle, idle_after, on_new, admit_for, hold_max, hold_for, on_deadline, close_spread, max_connection_age, retain, drain_on_version_upgrade`},
	{"key in the wrong place", "grace: 30s\n" + one("unit: a.service"), true, `
:1: grace: unknown key here: it belongs to defaults, services[]
:4: services[0].unit: unknown key here: it belongs to services[].backends[].match`},
	{"key twice", "mode: off\napi: {group: a}\nmode: enforce\n", false, `
:3: mode: is given twice, first on line 1`},
	{"strange keys", "1: 2\n? [a]\n: 3\n\"a\\nb\": 4\n", true, `
:1: want a word as key, got the number 1
:2: want a word as key, got a list
:4: a�b: unknown key: the keys here are mode, api, metrics, state, kubernetes, defaults, services`},
	{"wrong word", "mode: enfroce\ndefaults: {on_new: carry, protocol: http}\n", true, `
:1: mode: want one of off, observe, enforce, got "enfroce": did you mean "enforce"?
:2: defaults.protocol: want one of opaque, http1, got "http": did you mean "http1"?
:2: defaults.on_new: want one of auto, steer, relay, hold, admit, refuse, got "carry"`},
	{"wrong types", "mode: [off]\napi: /run/ebb.sock\nmetrics: {listen: 9402}\nkubernetes: {enabled: yes}\nservices: {name: a}\ndefaults: [a]\n", true, `
:1: mode: want one of off, observe, enforce, got a list
:2: api: want a mapping, got "/run/ebb.sock"
:3: metrics.listen: want ADDR:PORT with a numeric address, or :PORT, or "" for none, got the number 9402
:4: kubernetes.enabled: want true or false, got "yes"
:5: services: want a list of mappings, got a mapping
:6: defaults: want a mapping, got a list`},
	{"no value", "mode:\nservices:\n- name: a\n  backends:\n  -\n", true, `
:1: mode: want one of off, observe, enforce, got nothing
:5: services[0].backends[0]: want a mapping, got nothing`},
	{"dates and words of truth", one("grace: 2026-01-02", "drain_on_version_upgrade: \"true\"", "idle: true"), true, `
:3: services[0].grace: want a duration such as 30s or 1m30s, from 1ms to 8760h, got the date 2026-01-02
:4: services[0].drain_on_version_upgrade: want true or false, got "true"
:5: services[0].idle: want one of ignore, wait, close, got the boolean true`},
	{"numbers", "defaults: {hold_max: 010}\n" + one("ready: {tcp: {port: 70000}, fall: 0, rise: -1}", "backends: [{name: a1, weight: 1.5, match: {pid: 0x10}}]"), false, `
:1: defaults.hold_max: want a number from 1 to 16384, got the number 010
:4: services[0].ready.tcp.port: want a number from 1 to 65535, got the number 70000
:4: services[0].ready.fall: want a number from 1 to 1000, got the number 0
:4: services[0].ready.rise: want a number from 1 to 1000, got the number -1
:5: services[0].backends[0].match.pid: want a number from 1 to 4194304, got the number 0x10
:5: services[0].backends[0].weight: want a number from 1 to 256, got the number 1.5`},
	{"durations", one("grace: 30", "reserve: -3s", "quiet_period: 0s", "close_spread: 1 s", "hold_for: 1d", "retain: 9000h", "ready: {tcp: {port: 1}, interval: 1ms}"), false, `
:3: services[0].grace: want a duration such as 30s or 1m30s, from 1ms to 8760h, got the number 30
:4: services[0].reserve: want a duration such as 30s or 1m30s, from 1ms to 8760h, got "-3s"
:5: services[0].quiet_period: want a duration such as 30s or 1m30s, from 1ms to 8760h, got "0s"
:6: services[0].close_spread: want a duration such as 30s or 1m30s, from 0s to 8760h, got "1 s"
:7: services[0].hold_for: want a duration such as 30s or 1m30s, from 1ms to 8760h, got "1d"
:8: services[0].retain: want a duration such as 30s or 1m30s, from 1ms to 8760h, got "9000h"
:9: services[0].ready.interval: want a duration such as 30s or 1m30s, from 100ms to 8760h, got "1ms"`},
	{"addresses", one(`listen: [":0", "localhost:80", "[fe80::1%eth0]:80", "224.0.0.1:80", 80, ":80", "0.0.0.0:80"]`,
		`health: {from: [10.0.0.0/33, "::ffff:10.0.0.0/120", 10.0.0.1, 10.0.0.1/32], path: "healthz?a"}`,
		`backends: [{name: a1, address: ":80"}, {name: a2, address: "[::]:80"}]`), false, `
:3: services[0].listen[0]: want ADDR:PORT with a numeric address such as 0.0.0.0:80 or [::]:80, or :PORT, got ":0"
:3: services[0].listen[1]: want ADDR:PORT with a numeric address such as 0.0.0.0:80 or [::]:80, or :PORT, got "localhost:80"
:3: services[0].listen[2]: want ADDR:PORT with a numeric address such as 0.0.0.0:80 or [::]:80, or :PORT, got "[fe80::1%eth0]:80"
:3: services[0].listen[3]: want ADDR:PORT with a numeric address such as 0.0.0.0:80 or [::]:80, or :PORT, got "224.0.0.1:80"
:3: services[0].listen[4]: want ADDR:PORT with a numeric address such as 0.0.0.0:80 or [::]:80, or :PORT, got the number 80
:3: services[0].listen[6]: 0.0.0.0:80 is listed twice, first on line 3
:4: services[0].health.from[0]: want an address or a prefix such as 192.0.2.0/28, got "10.0.0.0/33"
:4: services[0].health.from[1]: want an address or a prefix such as 192.0.2.0/28, got "::ffff:10.0.0.0/120"
:4: services[0].health.from[3]: 10.0.0.1/32 is listed twice, first on line 4
:4: services[0].health.path: want a path that begins with "/" and has no query, or "" for none, got "healthz?a"
:5: services[0].backends[0].address: want ADDR:PORT with a numeric address such as 192.0.2.10:80 or [2001:db8::10]:80, got ":80"
:5: services[0].backends[1].address: want ADDR:PORT with a numeric address such as 192.0.2.10:80 or [2001:db8::10]:80, got "[::]:80"`},
	{"paths", "api: {socket: ebb.sock, listen: \":0\", token_file: \"a\\u0085b\"}\nmetrics: {listen: \"9402\"}\nstate: {dir: \"\"}\nkubernetes: {label_prefix: Ebb/}\n", false, `
:1: api.socket: want an absolute path of up to 107 bytes, got "ebb.sock"
:1: api.listen: want ADDR:PORT with a numeric address, or :PORT, or "" for none, got ":0"
:1: api.token_file: want an absolute path, or "" for none, got "a�b"
:2: metrics.listen: want ADDR:PORT with a numeric address, or :PORT, or "" for none, got "9402"
:3: state.dir: want an absolute path, got ""
:4: kubernetes.label_prefix: want a DNS name such as ebb.internal, got "Ebb/"`},
	{"names", "services:\n" + service("a/b") + service("-x", "backends: [{name: "+strings.Repeat("n", 64)+", match: {pid: 1}}, {match: {pid: 2}}]") + "- {}\n", true, `
:2: services[0].name: want a name of up to 63 letters, digits, ".", "_" and "-" that begins with a letter or digit, got "a/b"
:3: services[0].backends[0].name: want a name of up to 63 letters, digits, ".", "_" and "-" that begins with a letter or digit, got "a/b-1"
:3: services[0].backends[0].match.unit: want the full name of a unit such as nginx.service, got "a/b.service"
:4: services[1].name: want a name of up to 63 letters, digits, ".", "_" and "-" that begins with a letter or digit, got "-x"
:5: services[1].backends[0].name: want a name of up to 63 letters, digits, ".", "_" and "-" that begins with a letter or digit, got "nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn…"
:5: services[1].backends[1]: the key "name" is missing
:6: services[2]: the key "name" is missing
:6: services[2]: the key "backends" is missing`},
	{"name taken", "services:\n" + service("a") + service("b", "backends: [{name: a-1, match: {pid: 1}}, {name: b, match: {pid: 2}}, {name: b, match: {pid: 3}}]") + service("a", "backends: [{name: c, match: {pid: 4}}]"), false, `
:5: services[1].backends[0].name: "a-1" is taken by services[0].backends[0].name on line 3
:5: services[1].backends[2].name: "b" is taken by services[1].backends[1].name on line 5
:6: services[2].name: "a" is taken by services[0].name on line 2`},
	{"match", one("backends:", "- {name: m1, match: {}}", "- {name: m2, match: {unit: nginx}}", "- {name: m3, match: {unit: a/b.service}}",
		"- {name: m4, match: {cgroup: ../system.slice}}", "- {name: m5, match: {cgroup: /}}", "- {name: m6, match: {netns: a/b}}", "- {name: m7, match: {netns: ..}}"), true, `
:4: services[0].backends[0].match: give at least one of port, unit, cgroup, pid, netns
:5: services[0].backends[1].match.unit: want the full name of a unit such as nginx.service, got "nginx"
:6: services[0].backends[2].match.unit: want the full name of a unit such as nginx.service, got "a/b.service"
:7: services[0].backends[3].match.cgroup: want a path below the root of the control groups such as /system.slice/web.service, without "..", got "../system.slice"
:8: services[0].backends[4].match.cgroup: want a path below the root of the control groups such as /system.slice/web.service, without "..", got "/"
:9: services[0].backends[5].match.netns: want an absolute path, or a name under /run/netns, got "a/b"
:10: services[0].backends[6].match.netns: want an absolute path, or a name under /run/netns, got ".."`},
	{"neither here nor there", one("backends: [{name: a1}, {name: a2, match: {pid: 1}, address: \"192.0.2.1:80\"}]"), true, `
:3: services[0].backends[0]: give match for a local backend or address for a remote one
:3: services[0].backends[1]: match says that it is local and address that it is remote: give one of them`},
	{"no backend", one("backends: []"), true, `
:3: services[0].backends: a service needs at least one backend`},
	{"matched twice", "services:\n" + service("a", "backends: [{name: a1, match: {cgroup: /x, netns: /run/netns/blue}}]") + service("b", "backends: [{name: b1, match: {netns: blue, cgroup: x/}}]"), false, `
:5: services[1].backends[0].match: the same is matched by services[0].backends[0].match on line 3`},
	{"listened on twice", "services:\n" + service("a", `listen: ["192.0.2.1:80", ":81"]`) + service("b", `listen:`, `- ":81"`, `- "[::ffff:192.0.2.1]:80"`, `- "192.0.2.2:80"`), false, `
:7: services[1].listen[0]: 0.0.0.0:81 is listened on by services[0].listen[1] on line 3
:8: services[1].listen[1]: 192.0.2.1:80 is listened on by services[0].listen[0] on line 3`},
	{"listened on twice in a namespace", "services:\n" +
		service("a", `listen: [":80"]`, "backends: [{name: a1, match: {netns: blue}}, {name: a2, match: {netns: red}}]") +
		service("b", `listen: [":80"]`, "backends: [{name: b1, match: {netns: /run/netns/red, port: 80}}]"), false, `
:6: services[1].listen[0]: 0.0.0.0:80 is listened on by services[0].listen[0] on line 3`},
	{"hooks", one("notify: {signal: KILL}", "flush: {signal: CONT}") + service("b", "notify: {at: begin}", "flush: {signal: NOPE}") +
		service("c", "notify: {api: true, exec: [a]}", "flush: {http: \"https://127.0.0.1/\", at: begin}") +
		service("d", "notify: {http: \"http://u:p@127.0.0.1/\"}", "flush: {http: \"https:///\"}") +
		service("e", "notify: {exec: []}", "flush: {api: false}") + service("f", "notify: {http: \"ftp://h/\"}"), false, `
:3: services[0].notify.signal: nothing can wind down at a signal that it cannot catch
:4: services[0].flush.signal: no program ends at it
:7: services[1].notify: hook cannot work: give one of signal, http, exec, api
:8: services[1].flush.signal: want the name of a signal such as SIGTERM, got "NOPE"
:11: services[2].notify: hook cannot work: give only one of exec, api
:12: services[2].flush.at: unknown key here: it belongs to services[].notify
:15: services[3].notify: hook cannot work: a URL with a user name or a password ends up in logs: leave them out
:16: services[3].flush: hook cannot work: https:///: names no host
:19: services[4].notify: hook cannot work: give one of signal, http, exec, api
:20: services[4].flush: hook cannot work: give one of signal, http, exec, api
:23: services[5].notify: hook cannot work: ftp://h/: only http:// and https:// URLs can be posted to`},
	{"a hook that a drain would keep away", one("notify: {http: \"http://192.0.2.1:8080/\"}", "flush: {http: \"http://localhost:8080/flush\"}", "backends: [{name: own, match: {port: 8080}}]"), false, `
:4: services[0].flush.http: port 8080 of own is what a drain closes: give the application another one for this`},
	{"two hooks", one("flush: {api: true, signal: TERM}"), true, `
:3: services[0].flush: hook cannot work: give only one of signal, api`},
	{"sessions without a socket", "api: {app_socket: \"\"}\n" + one("notify: {api: true}") + service("b", "flush: {api: true}"), false, `
:4: services[0].notify.api: applications have their sessions at api.app_socket, and there is none: give it, or another hook
:7: services[1].flush.api: applications have their sessions at api.app_socket, and there is none: give it, or another hook`},
	{"versions", one("backends: [{name: a1, version: 0, match: {pid: 1}}, {name: a2, version: \"1\", match: {pid: 2}}]") +
		service("b", "backends: [{name: b1, version: 1.2, match: {pid: 3}}]"), true, `
:3: services[0].backends[0].version: want a number from 1 to 9007199254740991, got the number 0
:3: services[0].backends[1].version: want a number from 1 to 9007199254740991, got "1"
:5: services[1].backends[0].version: want a number from 1 to 9007199254740991, got the number 1.2`},
	{"the version of a remote backend", one("backends: [{name: a1, version: 1, address: \"192.0.2.1:80\"}]"), false, `
:3: services[0].backends[0].version: is of no use: a remote backend is neither drained from here nor known to be ready`},
	{"what this version does not do", "kubernetes: {enabled: true}\ndefaults: {max_connection_age: 1h, retain: 5m}\n" +
		one("max_connection_age: 2h", "retain: 6m"), true, `
:1: kubernetes.enabled: this version does not look for pods: name them as backends, by match
:2: defaults.max_connection_age: this version does not end connections by their age: leave it out, or 0s
:5: services[0].max_connection_age: this version does not end connections by their age: leave it out, or 0s
:6: services[0].retain: this version keeps the metrics of all services equally long: set defaults.retain`},
	{"probes", one("ready: {}") + service("b", "ready: {tcp: {port: 1}, exec: [a]}") + service("c", "ready: {http: {path: /}}") +
		service("d", "ready: {http: {port: 1, host: \"a b\"}}"), true, `
:3: services[0].ready: probe cannot work: give one of http, tcp, grpc, exec
:6: services[1].ready: probe cannot work: give only one of tcp, exec
:9: services[2].ready: names no port, and c-1 is not matched by one: give either
:12: services[3].ready.http.host: want a host name, or a host name and a port, or "" for none, got "a b"`},
	{"api open to everybody", "api: {listen: \":9443\", tls: {cert: /c, key: /k}}\n", false, `
:1: api.listen: whoever reaches :9443 could drain everything: give tls with client_ca, or token_file`},
	{"api with its token in clear", "api:\n  token_file: /t\n  listen: \":9443\"\n", false, `
:3: api.listen: the token would travel in clear text: give tls with cert and key, or listen on a loopback address`},
	{"api by halves", "api:\n  listen: \"127.0.0.1:9443\"\n  token_file: /t\n  tls: {key: /k, client_ca: /a}\n  app_socket: /run//ebb/ebb.sock\n", false, `
:4: api.tls: cert and key go together
:5: api.app_socket: is the socket of the operators too: api decides by who asks, so that each needs its own`},
	{"authority without a certificate", "api: {listen: \"127.0.0.1:9443\", tls: {client_ca: /a}}\n", false, `
:1: api.tls.client_ca: needs cert and key`},
	{"api of no use", "api:\n  tls: {client_ca: /a}\n  token_file: /t\n", false, `
:2: api.tls.client_ca: needs cert and key
:2: api.tls: has no use without api.listen
:3: api.token_file: has no use without api.listen`},
	{"one address for two", "api: {listen: \"127.0.0.1:9402\", token_file: /t}\n", false, `
:1: metrics.listen: is api.listen too`},
	{"files in a bpffs", "state: {dir: /sys/fs/bpf/ebb/journal}\n", false, `
:1: state: dir /sys/fs/bpf/ebb/journal and bpffs /sys/fs/bpf/ebb must lie outside of each other: a bpffs holds no files`},
	{"anchors", "defaults: &d {grace: 40s}\nservices:\n- <<: *d\n  name: &n a\n  backends: [{name: *n, match: {pid: 1}}]\n", false, `
:1: defaults: anchors and aliases are not supported: write the value out
:3: services[0]: want a word as key, got !!merge "<<"
:4: services[0].name: anchors and aliases are not supported: write the value out
:5: services[0].backends[0].name: anchors and aliases are not supported: write the value out`},
	{"tags", "mode: !mine off\napi: {group: !!binary b3Bz}\n", false, `
:1: mode: want one of off, observe, enforce, got !mine "off"
:2: api.group: want the name of a group, or "" for none, got !!binary "b3Bz"`},
	{"two documents", "mode: off\n---\nmode: enforce\n", false, `
:2: want one document, got a second one`},
	{"bad syntax", "mode: off\napi: {socket: [\n", false, `
:2: did not find expected node content`},
	{"bad syntax in the first line", "\tmode: off\n", false, `
:1: found character that cannot start any token`},
	{"not UTF-8", "mode: off\n# caf\xe9\n", false, `
:2: is not UTF-8`},
	{"control character", "mode: off\n# a\x00b\n", false, `
:2: has the control character U+0000`},
	{"no mapping", "- mode\n", true, `
:1: want a mapping, got a list`},
}

func TestRefusals(t *testing.T) {
	for _, tt := range refusals {
		t.Run(tt.name, func(t *testing.T) {
			c, err := Parse("f", []byte(tt.text))
			if err == nil || c != nil {
				t.Fatalf("got %v and the error %v, want it refused", c, err)
			}
			want := strings.ReplaceAll(tt.want, "\n:", "\nf:")[1:]
			if err.Error() != want {
				t.Errorf("text:\n%s\ngot:\n%v\nwant:\n%s", tt.text, err, want)
			}
		})
	}
}

func TestAFileThatIsNoConfigurationIsGivenUp(t *testing.T) {
	for _, text := range []string{
		"services: [" + strings.Repeat("a,", 20_000) + "]",
		strings.Repeat("k: 1\n", 20_000),
		"services: [{name: a, listen: [" + strings.Repeat("a,", 20_000) + "]}]",
	} {
		_, err := Parse("f", []byte(text))
		if err == nil {
			t.Fatalf("taken: %.40s…", text)
		}
		lines := strings.Split(err.Error(), "\n")
		if last := lines[len(lines)-1]; len(lines) != maxProblems+1 || last != "f: these are the first 100 things that are wrong: there may be more" {
			t.Errorf("got %d lines, the last %q", len(lines), last)
		}
	}
}

// Nothing is ever expanded: a text that would be gigabytes costs what is written of it.
func TestAliasesCostNothing(t *testing.T) {
	lines := []string{"a0: &a0 [x]"}
	for i := range 20 {
		lines = append(lines, fmt.Sprintf("a%d: &a%d [%s*a%d]", i+1, i+1, strings.Repeat(fmt.Sprintf("*a%d,", i), 19), i))
	}
	text := []byte(strings.Join(lines, "\n"))
	allocs := testing.AllocsPerRun(1, func() {
		if _, err := Parse("f", text); err == nil {
			t.Error("taken")
		}
	})
	if allocs > 1e6 { // 20²⁰ if they were expanded
		t.Errorf("got %v allocations", allocs)
	}
}

func TestErrorsWrapWhatTheyComeFrom(t *testing.T) {
	_, err := Parse("f", []byte("defaults: {grace: 1s}\n"+one("flush: {}", "ready: {}")))
	for _, want := range []error{drain.ErrPolicy, hook.ErrInvalid, health.ErrInvalid} {
		if !errors.Is(err, want) {
			t.Errorf("got %v, want one that wraps %q", err, want)
		}
	}
}

func TestR20_BudgetsAreRefusedWithTheSums(t *testing.T) {
	for _, tt := range []struct{ name, text, want string }{
		{"of the defaults, once", "defaults: {grace: 8s}\n" + one() + service("b"),
			"f:1: defaults: the policy contradicts itself: grace 8s − flush_timeout 5s − reserve 3s leaves 0s to wait: lengthen grace beyond 8s or shorten the others"},
		{"of a service by its own", one("grace: 10s", "flush_timeout: 8s"),
			"f:2: services[0]: the policy contradicts itself: grace 10s − flush_timeout 8s − reserve 3s leaves -1s to wait: lengthen grace beyond 11s or shorten the others"},
		{"of a service by what it inherits", "defaults: {reserve: 20s}\n" + one("flush_timeout: 12s"),
			"f:3: services[0]: the policy contradicts itself: grace 30s − flush_timeout 12s − reserve 20s leaves -2s to wait: lengthen grace beyond 32s or shorten the others"},
		{"an extension that is longer than what it extends", "defaults: {extension: 31s}\n" + one(),
			"f:1: defaults.extension: 31s is longer than grace 30s: a drain could take 1m1s: shorten it to 30s or less"},
		{"an extension of a service", "defaults: {grace: 20s, extension: 20s}\n" + one("grace: 19s") + service("b", "extension: 21s") + service("c"), strings.Join([]string{
			"f:3: services[0].extension: 20s is longer than grace 19s: a drain could take 39s: shorten it to 19s or less",
			"f:7: services[1].extension: 21s is longer than grace 20s: a drain could take 41s: shorten it to 20s or less"}, "\n")},
		{"several at once", one("quiet_period: 22s", "admit_for: 30s", "close_spread: 4s"), strings.Join([]string{
			"f:2: services[0]: the policy contradicts itself: quiet_period 22s does not fit into wait 22s = grace 30s − flush_timeout 5s − reserve 3s: zero could never be believed",
			"f:2: services[0]: the policy contradicts itself: admit_for 30s does not fit into wait 22s = grace 30s − flush_timeout 5s − reserve 3s: nothing would be left to wait after the flip",
			"f:2: services[0]: the policy contradicts itself: close_spread 4s is longer than reserve 3s, in which every cut must be over"}, "\n")},
		{"not from a value that could not be read", "defaults: {grace: 8 s}\n" + one("flush_timeout: 40s"),
			`f:1: defaults.grace: want a duration such as 30s or 1m30s, from 1ms to 8760h, got "8 s"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Parse("f", []byte(tt.text))
			if err == nil || err.Error() != tt.want {
				t.Errorf("got:\n%v\nwant:\n%s", err, tt.want)
			}
		})
	}
}

func TestR21_GraceMustBeShorterThanAge(t *testing.T) {
	_, err := Parse("f", []byte("defaults: {max_connection_age: 1m}\n"+one("grace: 1m")+service("b", "grace: 59s")))
	want := "f:1: defaults.max_connection_age: this version does not end connections by their age: leave it out, or 0s\n" +
		"f:3: services[0]: the policy contradicts itself: grace 1m0s is not shorter than max_connection_age 1m0s: age would end connections before the drain does"
	if err == nil || err.Error() != want {
		t.Errorf("got:\n%v\nwant:\n%s", err, want)
	}
}

// Each refusal is of a text that is taken once the contradiction alone is gone.
func TestC31_ContradictionsAreRefused(t *testing.T) {
	for _, tt := range []struct{ name, bad, good string }{
		{"budget", one("grace: 8s"), one("grace: 8s", "reserve: 1s")},
		{"extension", one("extension: 31s"), one("extension: 30s")},
		{"age", one("max_connection_age: 30s"), one("max_connection_age: 0s")},
		{"local and remote", one(`backends: [{name: b, match: {pid: 1}, address: "192.0.2.1:80"}]`), one(`backends: [{name: b, address: "192.0.2.1:80"}]`)},
		{"same match", one("backends: [{name: b, match: {pid: 1}}, {name: c, match: {pid: 1}}]"), one("backends: [{name: b, match: {pid: 1}}, {name: c, match: {pid: 1, port: 2}}]")},
		{"same address", one(`listen: [":80"]`) + service("b", `listen: [":80"]`), one(`listen: [":80"]`) + service("b", `listen: [":80"]`, "backends: [{name: b, match: {netns: blue}}]")},
		{"same name", one("backends: [{name: b, match: {pid: 1}}]") + service("b", "backends: [{name: b, match: {pid: 2}}]"), one("backends: [{name: b, match: {pid: 1}}]") + service("b")},
		{"open API", `api: {listen: "127.0.0.1:1"}`, `api: {listen: "127.0.0.1:1", token_file: /t}`},
		{"token in clear", `api: {listen: ":1", token_file: /t}`, `api: {listen: ":1", token_file: /t, tls: {cert: /c, key: /k}}`},
		{"two hooks", one("flush: {api: true, signal: TERM}"), one("flush: {signal: TERM}")},
		{"two probes", one("ready: {tcp: {port: 1}, grpc: {port: 1}}"), one("ready: {grpc: {port: 1}}")},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := Parse("f", []byte(tt.bad)); err == nil {
				t.Errorf("taken:\n%s", tt.bad)
			}
			mustParse(t, tt.good)
		})
	}
}

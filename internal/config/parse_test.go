// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"
	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/hook"
)

const examples = "../../docs/examples"

// service is a service as short as can be, with more keys of its own, which are indented by two.
func service(name string, more ...string) string {
	s := "- name: " + name + "\n"
	for _, m := range more {
		s += "  " + m + "\n"
	}
	if !strings.Contains(s, "backends:") {
		s += "  backends: [{name: " + name + "-1, match: {unit: " + name + ".service}}]\n"
	}
	return s
}

func mustParse(t *testing.T, text string) *Config {
	t.Helper()
	c, err := Parse("agent.yaml", []byte(text))
	if err != nil {
		t.Fatalf("parse:\n%s\n%v", text, err)
	}
	return c
}

func TestParse(t *testing.T) {
	c, err := Load(filepath.Join(examples, "agent.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if len(c.Services) != 3 {
		t.Fatalf("services: got %d, want 3", len(c.Services))
	}
	web, queue, grpc := c.Services[0], c.Services[1], c.Services[2]
	for _, v := range []struct {
		what      string
		got, want any
	}{
		{"mode", c.Mode, drain.ModeObserve},
		{"client_ca", c.API.TLS.ClientCA, "/etc/ebb/operators.crt"},
		{"token_file", c.API.TokenFile, ""},
		{"default idle", c.Defaults.Policy.Idle, drain.IdleIgnore},
		{"default admit_for", c.Defaults.Policy.AdmitFor, 11 * time.Second},
		{"web mode", web.Mode, drain.ModeEnforce},
		{"web idle, by protocol", web.Policy.Idle, drain.IdleClose},
		{"web listen", web.Listen[1].String(), "[::]:80"},
		{"web health", web.Health.From[0].String(), "192.0.2.128/28"},
		{"web notify", web.Notify, hook.Hook{Signal: unix.SIGQUIT}},
		{"web notify at", web.Policy.NotifyAt, drain.NotifyAtSettled},
		{"web flush", web.Flush, hook.Hook{HTTP: "http://127.0.0.1:8081/flush"}},
		{"web ready", *web.Ready.HTTP, struct {
			Path string
			Port uint16
			Host string
		}{"/healthz", 8081, ""}},
		{"web remote", web.Backends[2].Address.String(), "192.0.2.10:80"},
		{"web remote match", web.Backends[2].Match == nil, true},
		{"web remote weight", web.Backends[2].Weight, 1},
		{"queue flush", queue.Flush, hook.Hook{Signal: unix.SIGTERM}},
		{"queue notify", queue.Notify, hook.Hook{API: true}},
		{"queue extension", queue.Extension, 30 * time.Second},
		{"web extension", web.Extension, time.Duration(0)},
		{"grpc notify", grpc.Notify.IsZero(), true},
		{"queue admit_for, half of its own wait", queue.Policy.AdmitFor, 48500 * time.Millisecond},
		{"queue hold_for", queue.HoldFor, 8 * time.Second},
		{"queue retain, inherited", queue.Retain, 10 * time.Minute},
		{"queue rise", queue.Ready.Rise, 2},
		{"grpc mode, of the node", grpc.Mode, drain.ModeObserve},
		{"grpc-a mode", grpc.Backends[0].Mode, drain.ModeEnforce},
		{"grpc-b mode", grpc.Backends[1].Mode, drain.ModeObserve},
		{"grpc ready", grpc.Ready.GRPC.Service, "shop.Cart"},
		{"grpc exec", grpc.Flush.Exec[1], "--quietly"},
	} {
		if got := reflect.ValueOf(v.got); got.Kind() == reflect.Struct && got.Type().ConvertibleTo(reflect.TypeOf(v.want)) {
			v.got = got.Convert(reflect.TypeOf(v.want)).Interface()
		}
		if !reflect.DeepEqual(v.got, v.want) {
			t.Errorf("%s: got %v, want %v", v.what, v.got, v.want)
		}
	}
}

func TestEmptyFileIsAllDefaults(t *testing.T) {
	want := mustParse(t, "mode: observe\n")
	for _, text := range []string{"", "\n", "# a comment\n", "---\n", "{}", "\ufeff", "services: []\n", "defaults: {}\n"} {
		if got := mustParse(t, text); !reflect.DeepEqual(got, want) {
			t.Errorf("%q: got %+v, want %+v", text, got, want)
		}
	}
	if want.Mode != drain.ModeObserve || want.Defaults.Policy.Grace != drain.DefaultGrace {
		t.Errorf("got mode %s and grace %v", want.Mode, want.Defaults.Policy.Grace)
	}
}

func TestTheMostSpecificWins(t *testing.T) {
	c := mustParse(t, `services:
- name: a
  backends: [{name: a1, mode: off, match: {pid: 10}}, {name: a2, match: {pid: 11}}]
- name: b
  mode: enforce
  grace: 40s
  protocol: opaque
  backends: [{name: b1, match: {pid: 12}}, {name: b2, mode: observe, match: {pid: 13}}]
# What is inherited counts wherever it stands.
mode: off
defaults: {grace: 20s, protocol: http1, admit_for: 3s, hold_max: 7}
`)
	a, b := c.Services[0], c.Services[1]
	for _, v := range []struct {
		what      string
		got, want any
	}{
		{"mode of the node", c.Mode, drain.ModeOff},
		{"mode of a, from the node", a.Mode, drain.ModeOff},
		{"mode of a1, its own", a.Backends[0].Mode, drain.ModeOff},
		{"mode of a2, from the node", a.Backends[1].Mode, drain.ModeOff},
		{"mode of b1, from b", b.Backends[0].Mode, drain.ModeEnforce},
		{"mode of b2, its own", b.Backends[1].Mode, drain.ModeObserve},
		{"grace of a, from the defaults", a.Policy.Grace, 20 * time.Second},
		{"grace of b, its own", b.Policy.Grace, 40 * time.Second},
		{"flush_timeout of a, built in", a.Policy.FlushTimeout, drain.DefaultFlushTimeout},
		{"idle of a, from the protocol it inherits", a.Policy.Idle, drain.IdleClose},
		{"idle of b, from its own protocol", b.Policy.Idle, drain.IdleIgnore},
		{"admit_for of b, inherited", b.Policy.AdmitFor, 3 * time.Second},
		{"hold_max of b, inherited", b.HoldMax, 7},
	} {
		if v.got != v.want {
			t.Errorf("%s: got %v, want %v", v.what, v.got, v.want)
		}
	}
}

func TestSpellings(t *testing.T) {
	c := mustParse(t, "services:\n"+service("a",
		`listen: [":80", "[::ffff:192.0.2.1]:81", "[2001:db8::1]:82"]`,
		`health: {from: [192.0.2.1, "192.0.2.77/28", "::ffff:192.0.2.2", "2001:db8::/32"]}`,
		`notify: {signal: usr1}`,
		`flush: {signal: quit}`,
		`backends:`,
		`- {name: a1, match: {cgroup: system.slice//web.service/}}`,
		`- {name: a2, match: {netns: /var/run/netns/blue, pid: 7}}`,
		`- {name: a3, match: {netns: /proc/self/../1/ns/net, port: 80}}`,
		`- {name: a4, address: "[::ffff:192.0.2.3]:80", weight: 256}`))
	s := c.Services[0]
	var got []string
	for _, a := range s.Listen {
		got = append(got, a.String())
	}
	for _, p := range s.Health.From {
		got = append(got, p.String())
	}
	got = append(got, s.Notify.String(), s.Flush.String(), s.Backends[0].Match.Cgroup, s.Backends[1].Match.NetNS,
		s.Backends[2].Match.NetNS, s.Backends[3].Address.String())
	want := []string{
		"0.0.0.0:80", "192.0.2.1:81", "[2001:db8::1]:82", "192.0.2.1/32", "192.0.2.64/28", "192.0.2.2/32", "2001:db8::/32",
		"signal:SIGUSR1", "signal:SIGQUIT", "/system.slice/web.service", "blue", "/proc/1/ns/net", "192.0.2.3:80",
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

func TestLoadSaysWhatItCouldNotRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.yaml")
	if _, err := Load(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v, want one that says that %s does not exist", err, path)
	}
	if err := os.WriteFile(path, []byte(strings.Repeat("#", maxSize+1)), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(path); err == nil || err.Error() != path+": is longer than 1048576 bytes" {
		t.Errorf("got %v, want it refused for its length", err)
	}
}

func TestPrintedParsesToTheSame(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(examples, "*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no examples: %v", err)
	}
	texts := []string{"", everything}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		texts = append(texts, string(b))
	}
	for _, text := range texts {
		reparse(t, mustParse(t, text))
	}
}

// reparse fails the test unless c prints to what parses to the same.
func reparse(t *testing.T, c *Config) {
	t.Helper()
	b, err := c.YAML()
	if err != nil {
		t.Fatal(err)
	}
	again, err := Parse("printed", b)
	if err != nil {
		t.Fatalf("printed:\n%s\n%v", b, err)
	}
	if !reflect.DeepEqual(c, again) {
		t.Fatalf("printed:\n%s\ngot  %+v\nwant %+v", b, again, c)
	}
	if ch := Diff(c, again); !ch.Empty() {
		t.Fatalf("printed:\n%s\ndiffers: %+v", b, ch)
	}
}

// everything has every key of the file at least once.
const everything = `mode: off
api: {socket: /run/a, app_socket: /run/b, listen: ":9443", tls: {cert: /c, key: /k, client_ca: /a}, token_file: /t, group: ops}
metrics: {listen: ""}
state: {dir: /d, bpffs: /b}
kubernetes: {enabled: false, label_prefix: drain.example.org}
defaults:
  protocol: http1
  grace: 1m
  flush_timeout: 6s
  reserve: 4s
  extension: 1m
  quiet_period: 1500ms
  idle: wait
  idle_after: 11s
  on_new: hold
  admit_for: 7s
  hold_max: 12
  hold_for: 9s
  on_deadline: reset
  close_spread: 2s
  max_connection_age: 0s
  retain: 5m
  drain_on_version_upgrade: true
services:
- name: s
  mode: observe
  protocol: opaque
  grace: 30s
  flush_timeout: 5s
  reserve: 3s
  extension: 0s
  quiet_period: 1s
  idle: ignore
  idle_after: 10s
  on_new: steer
  admit_for: 0s
  hold_max: 1
  hold_for: 1s
  on_deadline: leave
  close_spread: 0s
  max_connection_age: 0s
  retain: 5m
  drain_on_version_upgrade: false
  listen: [":80"]
  health: {from: ["2001:db8::/32"], path: /healthz}
  notify: {signal: USR1, at: settled}
  flush: {http: "http://[::1]:81/flush?now=1"}
  ready: {http: {path: /ready, port: 81, host: "app.example.org:80"}, interval: 3s, timeout: 500ms, fall: 4, rise: 1}
  backends:
  - {name: s1, mode: enforce, match: {port: 80, unit: s@1.service, cgroup: /a/b, pid: 77, netns: blue}, weight: 3, version: 20261130183537}
  - {name: s2, address: "192.0.2.1:80"}
- name: t
  notify: {exec: [sh, -c, "echo drain\necho again"]}
  flush: {signal: TERM, api: false}
  ready: {tcp: {port: 82}}
  backends: [{name: t1, match: {port: 82}}]
- name: u
  notify: {http: "http://127.0.0.1/notify"}
  flush: {exec: [/bin/flush, "", "a b", "true", "1"]}
  ready: {grpc: {port: 83, service: a.B}}
  backends: [{name: u1, match: {netns: /run/somewhere/ns}}]
- name: v
  notify: {signal: USR2, api: false, at: begin}
  flush: {signal: SIGINT}
  ready: {exec: [/bin/true]}
  backends: [{name: v1, match: {pid: 4194304}}]
- name: w
  notify: {api: true, at: settled}
  flush: {api: true}
  backends: [{name: w1, match: {pid: 1}}]
`

func TestEveryKeyIsReadAndPrinted(t *testing.T) {
	var root yaml.Node
	b, err := mustParse(t, everything).YAML()
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(b, &root); err != nil {
		t.Fatal(err)
	}
	printed := make(map[string]bool)
	var visit func(path string, n *yaml.Node)
	visit = func(path string, n *yaml.Node) {
		switch n.Kind {
		case yaml.MappingNode:
			for i := 0; i < len(n.Content); i += 2 {
				at := join(path, n.Content[i].Value)
				printed[at] = true
				visit(at, n.Content[i+1])
			}
		case yaml.SequenceNode:
			for _, c := range n.Content {
				visit(path+"[]", c)
			}
		}
	}
	visit("", root.Content[0])
	walk("", new(Config).keys(), func(path string, _ key) {
		if !printed[path] {
			t.Errorf("%s is not printed", path)
		}
	})
}

func FuzzParse(f *testing.F) {
	files, err := filepath.Glob(filepath.Join(examples, "*.yaml"))
	if err != nil {
		f.Fatal(err)
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte(everything))
	for _, tt := range refusals {
		f.Add([]byte(tt.text))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := Parse("f", b)
		if err == nil {
			reparse(t, c)
			return
		}
		if c != nil {
			t.Errorf("got a configuration beside %v", err)
		}
		for line := range strings.SplitSeq(err.Error(), "\n") {
			if !strings.HasPrefix(line, "f:") {
				t.Errorf("%q names no file", line)
			}
		}
	})
}

// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

// What one process reads another one may trust no further than if it had read it itself.
func TestAConfigurationIsCheckedAgain(t *testing.T) {
	files, err := filepath.Glob("../../docs/examples/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("find examples: %v, %d", err, len(files))
	}
	for _, f := range append(files, os.DevNull) {
		c, err := Load(f)
		if err != nil {
			t.Fatal(err)
		}
		b, err := json.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		var got Config
		if err := json.Unmarshal(b, &got); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(&got, c) {
			t.Errorf("%s: in JSON it is another one:\n%s", f, b)
		}
		if err := got.Validate(f); err != nil {
			t.Error(err)
		}
	}
}

func TestAnotherProcessCannotSetWhatAFileCannot(t *testing.T) {
	const text = `
services:
  - name: web
    flush: {exec: [/bin/true]}
    ready: {http: {port: 80}}
    backends: [{name: web, match: {port: 80}}]
`
	for _, tc := range []struct {
		name   string
		change func(*Config)
		want   string
	}{
		{"word", func(c *Config) { c.Services[0].Policy.OnNew = "maybe" }, "on_new"},
		{"name", func(c *Config) { c.Services[0].Backends[0].Name = "../../etc/passwd" }, "backends[0].name"},
		{"two hooks", func(c *Config) { c.Services[0].Flush.Signal = 15 }, "flush"},
		{"budget", func(c *Config) { c.Services[0].Policy.Grace = time.Second }, "services[0]"},
		{"path", func(c *Config) { c.State.Dir = "relative" }, "state.dir"},
		{"no backend", func(c *Config) { c.Services[0].Backends = nil }, "backends"},
		{"no match", func(c *Config) { c.Services[0].Backends[0].Match = nil }, "backends[0]"},
		{"no default", func(c *Config) { c.Services[0].Policy.Idle = "" }, "idle"},
		{"port", func(c *Config) {
			c.Services[0].Ready.HTTP.Port, c.Services[0].Backends[0].Match.Port, c.Services[0].Backends[0].Match.Unit = 0, 0, "web.service"
		}, "services[0].ready"},
	} {
		c, err := Parse("f", []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Validate("f"); err != nil {
			t.Fatalf("%s: before the change: %v", tc.name, err)
		}
		tc.change(c)
		if err := c.Validate("f"); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: got %v, want word of %s", tc.name, err, tc.want)
		}
	}
}

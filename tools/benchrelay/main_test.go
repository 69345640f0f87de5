// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && slices.Contains([]string{"inner", "serve", "load", "relay", "copy"}, os.Args[1]) {
		os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

func TestFlags(t *testing.T) {
	for _, args := range [][]string{{"-rounds", "0"}, {"-only", "work"}, {"-no-such-flag"}, {"word"}} {
		var out, said bytes.Buffer
		if code := run(args, &out, &said); code != 2 || said.Len() == 0 {
			t.Errorf("%v: got exit code %d and %q, want 2 and a reason", args, code, said.String())
		}
	}
}

// Everything once, with the real peers, in a size that measures nothing.
func TestBenchRelay(t *testing.T) {
	if os.Geteuid() != 0 {
		if os.Getenv("CI") == "true" {
			t.Fatal("needs root, and CI=true: run the tests as root")
		}
		t.Skip("needs root: run the tests as root")
	}
	dir := t.TempDir()
	var out, said bytes.Buffer
	if code := run([]string{"-rounds", "1", "-conns", "50", "-parallel", "4", "-requests", "100", "-kept", "4", "-bulk", "2097152", "-idle", "20", "-write", dir}, &out, &said); code != 0 {
		t.Fatalf("got exit code %d, want 0; it wrote:\n%s%s", code, out.String(), said.String())
	}
	for _, q := range quantities {
		if !strings.Contains(out.String(), "| "+q.name+" | ") {
			t.Errorf("the table lacks %q:\n%s", q.name, out.String())
		}
	}
	tables, err := filepath.Glob(filepath.Join(dir, "*", "relay.md"))
	if err != nil || len(tables) != 1 {
		t.Fatalf("got tables in %v (%v), want one", tables, err)
	}
	raw, err := os.ReadFile(filepath.Join(filepath.Dir(tables[0]), "relay.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(raw)), "\n")
	var head struct {
		Kernel string
		Peers  map[string]string
	}
	if err := json.Unmarshal([]byte(lines[0]), &head); err != nil || head.Kernel == "" {
		t.Errorf("the first line is not about the machine: %v in %s", err, lines[0])
	}
	contenders := 2 + len(head.Peers)
	if want := 4*contenders + contenders - 1; len(lines)-1 != want { // io.Copy has no idle connections
		t.Errorf("got %d samples, want %d", len(lines)-1, want)
	}
	for _, line := range lines[1:] {
		var s sample
		if err := json.Unmarshal([]byte(line), &s); err != nil || s.Units <= 0 || s.Wall <= 0 || s.Client <= 0 {
			t.Errorf("not a sample: %v in %s", err, line)
		}
	}
	if len(head.Peers) < 2 && os.Getenv("CI") == "true" {
		t.Errorf("got %v beside the relay, want HAProxy and nginx", head.Peers)
	}
}

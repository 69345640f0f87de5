// SPDX-License-Identifier: Apache-2.0

package ebb_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/ebbproxy/ebb"

// goPackage is what the rules need of `go list -json`. Imports of test files are not among them.
type goPackage struct {
	ImportPath string
	Standard   bool
	Imports    []string
}

// TestImportsPointOneWay keeps the parts apart: each of drain, proxy, probes and bpf can be read, tested
// and replaced without the others.
func TestImportsPointOneWay(t *testing.T) {
	c := exec.CommandContext(t.Context(), "go", "list", "-deps", "-json=ImportPath,Standard,Imports", "./...")
	var stderr bytes.Buffer
	c.Stderr = &stderr
	out, err := c.Output()
	if err != nil {
		t.Fatalf("list packages: %v\n%s", err, stderr.String())
	}
	var pkgs []goPackage
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p goPackage
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("read package list: %v", err)
		}
		pkgs = append(pkgs, p)
	}
	if !slices.ContainsFunc(pkgs, func(p goPackage) bool { return p.ImportPath == module+"/drain" }) {
		t.Fatal("the list has no package drain")
	}
	for _, v := range violations(pkgs) {
		t.Error(v)
	}
}

// violations names every edge that breaks a rule.
func violations(pkgs []goPackage) []string {
	byPath := make(map[string]goPackage)
	for _, p := range pkgs {
		byPath[p.ImportPath] = p
	}
	var found []string
	for _, p := range pkgs {
		from, ours := strings.CutPrefix(p.ImportPath, module+"/")
		if !ours {
			continue
		}
		var joined []string
		for _, imp := range p.Imports {
			to, toOurs := strings.CutPrefix(imp, module+"/")
			why := ""
			switch {
			case part(from) == "drain" && !byPath[imp].Standard && part(to) != "drain":
				why = "drain imports the standard library only"
			case part(from) == "client" && toOurs && part(to) != "client":
				why = "client imports nothing of this module"
			case isPart(part(from)) && isPart(part(to)) && part(from) != part(to):
				why = "drain, proxy, probes and bpf do not import each other"
			case isPart(part(from)) && joins(to):
				why = "internal/agent joins the parts, not the other way round"
			case within(imp, "github.com/cilium/ebpf") && part(from) != "bpf":
				why = "only bpf imports it"
			}
			if why != "" {
				found = append(found, fmt.Sprintf("%s → %s: %s", from, strings.TrimPrefix(imp, module+"/"), why))
			}
			if toOurs && isPart(part(to)) && part(to) != "drain" && !slices.Contains(joined, part(to)) {
				joined = append(joined, part(to))
			}
		}
		// drain is vocabulary; what acts on the world is joined in one place.
		if len(joined) > 1 && !joins(from) {
			found = append(found, fmt.Sprintf("%s → %s: only internal/agent and cmd/ebb join the parts", from, strings.Join(joined, ", ")))
		}
	}
	return found
}

// part is the first element of a path inside the module: the packages below a part are the part's.
func part(path string) string {
	first, _, _ := strings.Cut(path, "/")
	return first
}

func isPart(p string) bool { return slices.Contains([]string{"drain", "proxy", "probes", "bpf"}, p) }

func joins(path string) bool { return within(path, "internal/agent") || within(path, "cmd/ebb") }

func within(path, dir string) bool { return path == dir || strings.HasPrefix(path, dir+"/") }

func TestViolationsAreFound(t *testing.T) {
	std := goPackage{ImportPath: "time", Standard: true}
	for _, tt := range []struct {
		from string
		to   []string
		want string // in the violation; empty: allowed
	}{
		{"drain", []string{"time"}, ""},
		{"drain", []string{module + "/drain/internal/clock"}, ""},
		{"drain", []string{"golang.org/x/sys/unix"}, "drain → golang.org/x/sys/unix: "},
		{"drain", []string{module + "/internal/netns"}, "drain → internal/netns: "},
		{"probes", []string{module + "/drain"}, "probes → drain: "},
		{"probes", []string{module + "/bpf"}, "probes → bpf: "},
		{"bpf", []string{module + "/proxy"}, "bpf → proxy: "},
		{"bpf", []string{"github.com/cilium/ebpf/link", "golang.org/x/sys/unix"}, ""},
		{"bpf", []string{module + "/internal/agent"}, "bpf → internal/agent: "},
		{"probes", []string{"github.com/cilium/ebpf"}, "probes → github.com/cilium/ebpf: "},
		{"internal/agent", []string{"github.com/cilium/ebpf/ringbuf"}, "internal/agent → github.com/cilium/ebpf/ringbuf: "},
		{"internal/agent", []string{module + "/bpf", module + "/probes", module + "/drain"}, ""},
		{"cmd/ebb", []string{module + "/bpf", module + "/probes"}, ""},
		{"internal/api", []string{module + "/drain", module + "/probes"}, ""},
		{"internal/api", []string{module + "/bpf", module + "/probes"}, "internal/api → bpf, probes: "},
		{"client", []string{"net/http"}, ""},
		{"client", []string{module + "/drain"}, "client → drain: "},
	} {
		pkgs := []goPackage{std, {ImportPath: "net/http", Standard: true}, {ImportPath: module + "/" + tt.from, Imports: tt.to}}
		got := violations(pkgs)
		switch {
		case tt.want == "" && len(got) > 0:
			t.Errorf("%s → %q: got %q, want none", tt.from, tt.to, got)
		case tt.want != "" && (len(got) != 1 || !strings.HasPrefix(got[0], tt.want)):
			t.Errorf("%s → %q: got %q, want one that begins with %q", tt.from, tt.to, got, tt.want)
		}
	}
}

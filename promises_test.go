// SPDX-License-Identifier: Apache-2.0

package ebb_test

import (
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the tests that exist into docs/promises.md")

const promisesFile = "docs/promises.md"

var (
	promiseRow = regexp.MustCompile(`^\| ([A-Z][0-9]+) \| ([^|]+) \|([^|]*)\|$`)
	testFunc   = regexp.MustCompile(`(?m)^func (Test([RDTCG][0-9]+)_\w+)\(`)
	testScript = regexp.MustCompile(`^([rdtcg][0-9]+)-.*\.txtar$`)
)

// TestPromisesHaveTests keeps docs/promises.md and the tests together: each promise has a test, each test
// that is named for a promise has it in the table, and the table names them all.
func TestPromisesHaveTests(t *testing.T) {
	text, err := os.ReadFile(promisesFile)
	if err != nil {
		t.Fatal(err)
	}
	tests, err := findTests(os.DirFS("."))
	if err != nil {
		t.Fatal(err)
	}
	if *update {
		text = []byte(fillPromises(string(text), tests))
		if err := os.WriteFile(promisesFile, text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range complaints(string(text), tests) {
		t.Error(c)
	}
}

// findTests returns the tests and scripts that are named for a promise, by its id.
func findTests(tree fs.FS) (map[string][]string, error) {
	tests := make(map[string][]string)
	err := fs.WalkDir(tree, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		switch {
		case d.IsDir() && path != "." && (strings.HasPrefix(name, ".") || name == "bin"):
			return fs.SkipDir
		case d.IsDir():
		case strings.HasSuffix(name, "_test.go"):
			text, err := fs.ReadFile(tree, path)
			if err != nil {
				return err
			}
			for _, m := range testFunc.FindAllStringSubmatch(string(text), -1) {
				tests[m[2]] = append(tests[m[2]], filepath.Dir(path)+"."+m[1])
			}
		case testScript.MatchString(name):
			id := strings.ToUpper(testScript.FindStringSubmatch(name)[1])
			tests[id] = append(tests[id], path)
		}
		return nil
	})
	for _, names := range tests {
		slices.Sort(names)
	}
	return tests, err
}

// cell is how the table names tests.
func cell(names []string) string {
	if len(names) == 0 {
		return ""
	}
	return "`" + strings.Join(slices.Compact(slices.Clone(names)), "`, `") + "`"
}

func fillPromises(text string, tests map[string][]string) string {
	lines := strings.Split(text, "\n")
	for i, line := range lines {
		if m := promiseRow.FindStringSubmatch(line); m != nil {
			lines[i] = fmt.Sprintf("| %s | %s | %s |", m[1], m[2], cell(tests[m[1]]))
		}
	}
	return strings.Join(lines, "\n")
}

func complaints(text string, tests map[string][]string) []string {
	var found []string
	rows := make(map[string]bool)
	for line := range strings.Lines(text) {
		m := promiseRow.FindStringSubmatch(strings.TrimSuffix(line, "\n"))
		if m == nil {
			continue
		}
		id := m[1]
		switch {
		case rows[id]:
			found = append(found, id+" stands in the table twice")
		case len(tests[id]) == 0:
			found = append(found, fmt.Sprintf("%s has no test: none is named Test%s_…, and no script %s-….txtar", id, id, strings.ToLower(id)))
		case strings.TrimSpace(m[3]) != cell(tests[id]):
			found = append(found, fmt.Sprintf("%s: got %s in the table, want %s; go test . -run TestPromises -update writes it", id, strings.TrimSpace(m[3]), cell(tests[id])))
		}
		rows[id] = true
	}
	if len(rows) == 0 {
		found = append(found, "the table has no rows")
	}
	for _, id := range slices.Sorted(maps.Keys(tests)) {
		if !rows[id] {
			found = append(found, fmt.Sprintf("%s is not in the table: %s", id, cell(tests[id])))
		}
	}
	return found
}

func TestPromiseComplaints(t *testing.T) {
	const table = "| id | promise | tests |\n|---|---|---|\n"
	tests := map[string][]string{"R2": {"drain.TestR2_Once", "drain.TestR2_Twice"}}
	for _, tt := range []struct{ name, text, want string }{
		{"complete", table + "| R2 | once | `drain.TestR2_Once`, `drain.TestR2_Twice` |\n", ""},
		{"old", table + "| R2 | once | `drain.TestR2_Once` |\n", "R2: got"},
		{"no test", table + "| R2 | once | `drain.TestR2_Once`, `drain.TestR2_Twice` |\n| C9 | idle |  |\n", "C9 has no test"},
		{"no promise", table + "| C9 | idle | |\n", "C9 has no test"},
		{"twice", table + "| R2 | a | `drain.TestR2_Once`, `drain.TestR2_Twice` |\n| R2 | b | x |\n", "R2 stands in the table twice"},
		{"empty", "", "the table has no rows"},
	} {
		got := complaints(tt.text, tests)
		if tt.want == "" && len(got) > 0 || tt.want != "" && (len(got) == 0 || !strings.HasPrefix(got[0], tt.want)) {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}
	if got := complaints(table+"| C9 | idle | |\n", tests); !slices.ContainsFunc(got, func(c string) bool { return strings.HasPrefix(c, "R2 is not in the table") }) {
		t.Errorf("got %q, want a complaint about R2", got)
	}
	filled := fillPromises(table+"| R2 | once | |\n", tests)
	if got := complaints(filled, tests); len(got) > 0 {
		t.Errorf("after an update: got %q, want none", got)
	}
}

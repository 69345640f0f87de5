// SPDX-License-Identifier: Apache-2.0

// Command vulncheck runs govulncheck with a database that comes as a Go module, so that it works
// wherever modules do, and always gives the same answer for the same commit.
//
//	go run ./vulncheck DIR…
//
// It fails if code of the module in one of the directories reaches a known vulnerability of a module that it
// requires. What it reaches in the standard library is told and does not fail, since this repository
// cannot change it: a newer Go does.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
)

// database is the module, whose data/osv holds an OSV entry per vulnerability. For a newer one see
// `go list -m golang.org/x/vulndb@latest`.
const database = "golang.org/x/vulndb@v0.0.0-20261105234957-e22db6528018"

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: vulncheck DIR…")
		os.Exit(2)
	}
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "vulncheck:", err)
		os.Exit(1)
	}
}

func run(dirs []string, out io.Writer) error {
	db, err := download()
	if err != nil {
		return err
	}
	tool, err := output("", "go", "tool", "-n", "golang.org/x/vuln/cmd/govulncheck")
	if err != nil {
		return err
	}
	var errs []error
	for _, dir := range dirs {
		report, err := output(dir, string(bytes.TrimSpace(tool)), "-db", "file://"+db, "-format", "json", "./...")
		if err != nil {
			return err
		}
		found, err := reached(report)
		if err != nil {
			return err
		}
		for _, id := range slices.Sorted(maps.Keys(found)) {
			f := found[id]
			fmt.Fprintf(out, "%s: %s in %s, fixed in %s, reached by %s\n", dir, id, f.module, f.fixed, f.by)
			if f.module != "stdlib" {
				errs = append(errs, fmt.Errorf("%s is affected by %s in %s", dir, id, f.module))
			}
		}
	}
	return errors.Join(errs...)
}

// download returns the directory of the database.
func download() (string, error) {
	// Inside a module, the checksums of go.sum would be asked for.
	text, err := output(os.TempDir(), "go", "mod", "download", "-json", database)
	if err != nil {
		return "", err
	}
	var m struct{ Dir, Error string }
	if err := json.Unmarshal(text, &m); err != nil {
		return "", fmt.Errorf("read answer of go mod download: %w", err)
	}
	if m.Error != "" {
		return "", fmt.Errorf("download %s: %s", database, m.Error)
	}
	return filepath.Join(m.Dir, "data", "osv"), nil
}

type finding struct{ module, fixed, by string }

// reached picks the findings of whose code a function is called, by their ids. govulncheck lists the
// same vulnerability for modules and packages that are only required or imported too.
func reached(report []byte) (map[string]finding, error) {
	found := make(map[string]finding)
	dec := json.NewDecoder(bytes.NewReader(report))
	for {
		var message struct {
			Finding *struct {
				OSV   string `json:"osv"`
				Fixed string `json:"fixed_version"`
				Trace []struct {
					Module   string `json:"module"`
					Package  string `json:"package"`
					Function string `json:"function"`
				} `json:"trace"` // from the vulnerable function to the caller
			} `json:"finding"`
		}
		if err := dec.Decode(&message); errors.Is(err, io.EOF) {
			return found, nil
		} else if err != nil {
			return nil, fmt.Errorf("read report of govulncheck: %w", err)
		}
		f := message.Finding
		if f == nil || len(f.Trace) == 0 || f.Trace[0].Function == "" {
			continue
		}
		if _, ok := found[f.OSV]; ok {
			continue
		}
		caller := f.Trace[len(f.Trace)-1]
		fixed := f.Fixed
		if fixed == "" {
			fixed = "no version yet"
		}
		found[f.OSV] = finding{module: f.Trace[0].Module, fixed: fixed, by: caller.Package + "." + caller.Function}
	}
}

func output(dir, name string, args ...string) ([]byte, error) {
	c := exec.Command(name, args...)
	c.Dir, c.Stderr = dir, os.Stderr
	out, err := c.Output()
	if err != nil {
		return nil, fmt.Errorf("run %s: %w", name, err)
	}
	return out, nil
}

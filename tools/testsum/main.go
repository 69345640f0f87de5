// SPDX-License-Identifier: Apache-2.0

// Command testsum reads `go test -json` from its standard input and prints what a person wants to know:
// a line per package, the output of what failed, the tests that were skipped and why, and a last line
// of the form "N passed, N failed, N skipped". It exits 1 if anything failed or no test ran.
//
//	go test -json ./... | go run ./testsum [-logs] [-last FILE]
//
// With -logs it prints what passing tests have logged too; with -last it also writes the last line to a file.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
)

// event is a line of `go test -json`, see `go doc test2json`.
type event struct {
	Action  string
	Package string
	// ImportPath stands in the events of the build.
	ImportPath  string
	Test        string
	Elapsed     float64 // seconds
	Output      string
	FailedBuild string
}

type key struct{ pkg, test string }

func main() {
	logs := flag.Bool("logs", false, "print what passing tests have logged")
	last := flag.String("last", "", "also write the last line to this `file`")
	flag.Parse()
	line, code := run(os.Stdin, os.Stdout, *logs)
	if *last != "" {
		if err := os.WriteFile(*last, []byte(line), 0o644); err != nil {
			fmt.Fprintln(os.Stderr, "testsum:", err)
			code = 1
		}
	}
	os.Exit(code)
}

// run returns the last line and the exit code.
func run(in io.Reader, out io.Writer, logs bool) (string, int) {
	var passed, failed, skipped int
	output := make(map[key][]string)
	running := make(map[key]bool)
	broken := make(map[string]bool) // packages of which a test has failed
	var skips []string
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			var e event
			if json.Unmarshal(line, &e) != nil {
				// What is not JSON is the go command's own complaint.
				_, _ = out.Write(line)
				continue
			}
			k := key{e.Package, e.Test}
			switch e.Action {
			case "build-output":
				fmt.Fprint(out, e.Output)
			case "run":
				running[k] = true
			case "output":
				output[k] = append(output[k], e.Output)
			case "pass", "fail", "skip":
				delete(running, k)
				if e.Test == "" {
					failed += packageEnded(out, e, output, running, broken[e.Package])
					break
				}
				switch e.Action {
				case "pass":
					passed++
					if logs {
						fmt.Fprint(out, logged(e, output[k]))
					}
				case "fail":
					failed++
					broken[e.Package] = true
					fmt.Fprintf(out, "%s", strings.Join(output[k], ""))
				case "skip":
					skipped++
					skips = append(skips, fmt.Sprintf("skipped %s %s: %s", e.Package, e.Test, reason(output[k])))
				}
				delete(output, k)
			}
		}
		if err != nil {
			break
		}
	}
	for _, s := range skips {
		fmt.Fprintln(out, s)
	}
	line := fmt.Sprintf("%d passed, %d failed, %d skipped\n", passed, failed, skipped)
	fmt.Fprint(out, line)
	if failed > 0 || passed == 0 {
		return line, 1
	}
	return line, 0
}

// logged is what a test has logged, under its name, or empty.
func logged(e event, output []string) string {
	var b strings.Builder
	for _, line := range output {
		if t := strings.TrimSpace(line); strings.HasPrefix(t, "===") || strings.HasPrefix(t, "---") {
			continue
		}
		if b.Len() == 0 {
			fmt.Fprintf(&b, "%s %s (%.1fs)\n", e.Package, e.Test, e.Elapsed)
		}
		b.WriteString(line)
	}
	return b.String()
}

// packageEnded prints the package's line and returns how many failures it adds: tests that never ended,
// and a failure outside of any test.
func packageEnded(out io.Writer, e event, output map[key][]string, running map[key]bool, failedTest bool) int {
	whole := key{e.Package, ""}
	defer delete(output, whole)
	if e.Action == "skip" {
		return 0 // no test files
	}
	if e.Action == "pass" {
		fmt.Fprintf(out, "ok  \t%s\t%.3fs\n", e.Package, e.Elapsed)
		return 0
	}
	extra := 0
	for k := range running {
		if k.pkg == e.Package {
			fmt.Fprintf(out, "%s--- FAIL: %s (did not end)\n", strings.Join(output[k], ""), k.test)
			delete(running, k)
			extra++
		}
	}
	// The package's own output tells of a panic, a data race outside of a test or a failed TestMain.
	fmt.Fprintf(out, "%sFAIL\t%s\t%.3fs\n", strings.Join(output[whole], ""), e.Package, e.Elapsed)
	if extra == 0 && !failedTest {
		extra = 1
	}
	return extra
}

// reason is what a test said when it skipped.
func reason(output []string) string {
	for _, line := range slices.Backward(output) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "---") || strings.HasPrefix(line, "===") {
			continue
		}
		return line
	}
	return "no reason given"
}

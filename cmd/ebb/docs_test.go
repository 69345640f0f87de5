// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/config"
	"github.com/ebbproxy/ebb/internal/metrics"
)

const docsRoot = "../.."

// documents are the texts for users, by their path below the repository's root.
func documents(t *testing.T) map[string]string {
	t.Helper()
	docs := map[string]string{}
	err := filepath.WalkDir(docsRoot, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, _ := filepath.Rel(docsRoot, path)
		switch {
		case e.IsDir() && (strings.HasPrefix(e.Name(), ".") && name != "." || name == "bin"):
			return fs.SkipDir
		case strings.HasSuffix(name, ".md"):
			b, err := os.ReadFile(path)
			docs[name] = string(b)
			return err
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if docs["docs/agent.md"] == "" || docs["README.md"] == "" {
		t.Fatalf("found %d documents, and not those that there must be", len(docs))
	}
	return docs
}

var (
	codeSpan = regexp.MustCompile("`[^`\n]+`")
	// A command begins a line or follows what a shell puts in front of it.
	ebbCall = regexp.MustCompile(`(?:^|\$ |sudo |; |&& |\| |\(|env )(?:(?:[A-Z_]+=\S+|\./bin/)\s*)*ebb (.*)`)
)

// commandsIn are the calls of ebb in a text: lines of its blocks of code, and spans of code that are one.
func commandsIn(text string) (calls []string) {
	add := func(s string) {
		if m := ebbCall.FindStringSubmatch(strings.ReplaceAll(s, "./bin/ebb", "ebb")); m != nil {
			calls = append(calls, m[1])
		}
	}
	block := false
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		switch {
		case strings.HasPrefix(strings.TrimSpace(line), "```"):
			block = !block
		case block:
			add(strings.TrimSpace(line))
		default:
			for _, span := range codeSpan.FindAllString(line, -1) {
				add(strings.Trim(span, "`"))
			}
		}
	}
	return calls
}

// words splits a command line as a shell does, as far as the documents go: quotes, comments, and the end of a command.
func words(s string) (out []string) {
	var w strings.Builder
	quote, open := rune(0), false
	flush := func() {
		if open {
			out = append(out, w.String())
		}
		w.Reset()
		open = false
	}
	for _, r := range s {
		switch {
		case quote != 0 && r == quote:
			quote = 0
		case quote == 0 && (r == '\'' || r == '"'):
			quote, open = r, true
		case quote == 0 && (r == ' ' || r == '\t'):
			flush()
		case quote == 0 && (r == '|' || r == ';' || r == '&' || r == '>' || r == '#' && !open):
			flush()
			return out
		default:
			w.WriteRune(r)
			open = true
		}
	}
	flush()
	return out
}

// unknownIn says what of a call there is not: the command, or a flag.
func unknownIn(call string) string {
	root := newRootCmd(&environment{getenv: func(string) string { return "" }})
	args := words(call)
	if end := slices.Index(args, "--"); end >= 0 {
		args = args[:end] // of another program
	}
	// What stands for the rest of a command line is none of it.
	args = slices.DeleteFunc(args, func(a string) bool { return a == "…" || strings.HasPrefix(a, "[") })
	cmd, rest, err := root.Find(args)
	if err != nil || cmd == root && len(args) > 0 && !strings.HasPrefix(args[0], "-") && args[0] != "help" && args[0] != "completion" {
		return "no such command"
	}
	if cmd == root {
		return ""
	}
	for _, a := range rest {
		name, _, _ := strings.Cut(a, "=")
		var f *pflag.Flag
		switch {
		case strings.HasPrefix(name, "--"):
			f = cmd.Flag(strings.TrimPrefix(name, "--"))
		case len(name) == 2 && name[0] == '-':
			f = cmd.Flags().ShorthandLookup(name[1:])
		default:
			if cmd.HasSubCommands() && !strings.ContainsAny(a, "|") && a == strings.ToLower(a) {
				return "no such subcommand " + a
			}
			continue
		}
		if f == nil && name != "--help" && name != "-h" {
			return "no flag " + name
		}
	}
	return ""
}

// Each command that a document names is one, with these flags.
func TestDocsNameCommandsThatExist(t *testing.T) {
	t.Parallel()
	n := 0
	for name, text := range documents(t) {
		for _, call := range commandsIn(text) {
			n++
			if wrong := unknownIn(call); wrong != "" {
				t.Errorf("%s: ebb %s: %s", name, call, wrong)
			}
		}
	}
	if n < 100 {
		t.Errorf("only %d commands were found", n)
	}
	for call, want := range map[string]string{
		"drain web --wait":              "",
		"drian web":                     "no such command",
		"drain web --wiat":              "no flag --wiat",
		"status -q":                     "no flag -q",
		"systemd enable nginx":          "",
		"systemd enabel nginx":          "no such subcommand enabel",
		`extend web --by 30s # --wrong`: "",
	} {
		if got := unknownIn(call); got != want {
			t.Errorf("ebb %s: got %q, want %q", call, got, want)
		}
	}
}

var link = regexp.MustCompile(`\]\(([^)#:\s]+)(?:#[^)]*)?\)`)

// Each link of a document to a file of this repository leads to one.
func TestDocsLinkToFilesThatExist(t *testing.T) {
	t.Parallel()
	for name, text := range documents(t) {
		for _, m := range link.FindAllStringSubmatch(text, -1) {
			if _, err := os.Stat(filepath.Join(docsRoot, filepath.Dir(name), m[1])); err != nil {
				t.Errorf("%s links to %s: %v", name, m[1], err)
			}
		}
	}
}

var yamlBlock = regexp.MustCompile("(?s)```yaml\n(.*?)```")

// Each configuration in a document is one that the agent takes.
func TestDocsShowConfigurationsThatAreValid(t *testing.T) {
	t.Parallel()
	n := 0
	for name, text := range documents(t) {
		for _, m := range yamlBlock.FindAllStringSubmatch(text, -1) {
			if !strings.Contains(m[1], "services:") {
				continue
			}
			n++
			if _, err := config.Parse(name, []byte(m[1])); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	if n < 3 {
		t.Errorf("only %d configurations were found", n)
	}
}

// noBackends is a source without any.
type noBackends struct{}

func (noBackends) Backends(context.Context) []api.Backend {
	return nil
}

var (
	metricName = regexp.MustCompile(`\bebb_[a-z_]+[a-z]\b`)
	alertName  = regexp.MustCompile(`(?m)^ +- alert: (\w+)$`)
	runbookRef = regexp.MustCompile(`(?m)^ +runbook: (\S+)$`)
)

// The metrics of the alerts, and of the documents, exist; each alert has a test and a runbook that names it.
func TestDocsNameMetricsAndAlertsThatExist(t *testing.T) {
	t.Parallel()
	m, err := metrics.New(metrics.Options{Source: noBackends{}, Features: map[string]bool{"admission": true}})
	if err != nil {
		t.Fatal(err)
	}
	m.Register("service", "backend")
	families, err := m.Gather()
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{}
	for _, f := range families {
		known[f.GetName()] = true
	}
	docs := documents(t)
	texts := map[string]string{}
	for _, name := range []string{"deploy/prometheus/ebb.rules.yml", "deploy/prometheus/ebb.rules.test.yml"} {
		b, err := os.ReadFile(filepath.Join(docsRoot, name))
		if err != nil {
			t.Fatal(err)
		}
		texts[name] = string(b)
	}
	rules, tests := texts["deploy/prometheus/ebb.rules.yml"], texts["deploy/prometheus/ebb.rules.test.yml"]
	for name, text := range docs {
		if name == "docs/agent.md" || strings.HasPrefix(name, "docs/runbooks/") {
			texts[name] = text
		}
	}
	for name, text := range texts {
		for _, s := range metricName.FindAllString(text, -1) {
			if !known[s] && s != "ebb_census" { // what a runbook greps for
				t.Errorf("%s names the metric %s, which there is not", name, s)
			}
		}
	}
	alerts := map[string]bool{}
	for _, part := range strings.Split(rules, "- alert: ")[1:] {
		alert := strings.TrimSpace(strings.SplitN(part, "\n", 2)[0])
		alerts[alert] = true
		if !strings.Contains(tests, alert) {
			t.Errorf("alert %s has no test", alert)
		}
		ref := runbookRef.FindStringSubmatch(part)
		if ref == nil {
			t.Errorf("alert %s has no runbook", alert)
		} else if !strings.Contains(docs[ref[1]], alert) {
			t.Errorf("the runbook %s of alert %s does not name it", ref[1], alert)
		}
	}
	if n := len(alertName.FindAllString(rules, -1)); n != len(alerts) || n == 0 {
		t.Errorf("%d alerts, %d names", n, len(alerts))
	}
	for name, text := range texts {
		for _, s := range regexp.MustCompile("`(Ebb[A-Z]\\w+)`").FindAllStringSubmatch(text, -1) {
			if !alerts[s[1]] {
				t.Errorf("%s names the alert %s, which there is not", name, s[1])
			}
		}
	}
}

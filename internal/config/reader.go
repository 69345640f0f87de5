// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/ebbproxy/ebb/drain"
)

// reader collects what is wrong with one file.
type reader struct {
	file      string
	problems  []problem
	lines     map[string]int  // where each key and list element stands, by path
	bad       map[string]bool // paths at which, or below which, something is wrong
	inherited []string        // what is wrong with the policy of the defaults
}

type problem struct {
	line int // 0: not known
	err  error
}

// refuse adds a problem at a path: on its line, or on that of the nearest one above it that has a line.
func (r *reader) refuse(path, format string, a ...any) {
	line, at := 0, path
	for line == 0 && at != "" {
		line = r.lines[at]
		at, _ = cutLast(at)
	}
	if line == 0 {
		line = r.lines[""]
	}
	r.refuseAt(line, path, format, a...)
}

func (r *reader) refuseAt(line int, path, format string, a ...any) {
	for at := path; at != ""; at, _ = cutLast(at) {
		r.bad[at] = true
	}
	if r.full() {
		return
	}
	where := r.file + ":"
	if line > 0 {
		where += strconv.Itoa(line) + ":"
	}
	if path != "" {
		where += " " + path + ":"
	}
	r.problems = append(r.problems, problem{line, fmt.Errorf("%s %w", where, fmt.Errorf(format, a...))})
}

// maxProblems is how many are told of one file. One that has more is no configuration, and to read on is a waste.
const maxProblems = 100

func (r *reader) full() bool { return len(r.problems) >= maxProblems }

// err joins the problems in the order of the lines.
func (r *reader) err() error {
	slices.SortStableFunc(r.problems, func(a, b problem) int { return cmp.Compare(a.line, b.line) })
	var errs []error
	for _, p := range r.problems {
		errs = append(errs, p.err)
	}
	if r.full() {
		errs = append(errs, fmt.Errorf("%s: these are the first %d things that are wrong: there may be more", r.file, maxProblems))
	}
	return errors.Join(errs...)
}

// document returns the root of the one document in b; nil if there is nothing in it or it is no YAML.
func (r *reader) document(b []byte) *yaml.Node {
	if len(b) > maxSize {
		r.refuseAt(0, "", "is longer than %d bytes", maxSize)
		return nil
	}
	for i, line := 0, 1; i < len(b); {
		c, size := utf8.DecodeRune(b[i:])
		if c == utf8.RuneError && size == 1 {
			r.refuseAt(line, "", "is not UTF-8")
			return nil
		}
		if unicode.IsControl(c) && !strings.ContainsRune("\t\n\r\u0085", c) { // the library tells no line of them
			r.refuseAt(line, "", "has the control character %U", c)
			return nil
		}
		if c == '\n' {
			line++
		}
		i += size
	}
	dec := yaml.NewDecoder(bytes.NewReader(b))
	var first, second yaml.Node
	if err := dec.Decode(&first); errors.Is(err, io.EOF) {
		return nil
	} else if err != nil {
		r.syntax(err)
		return nil
	}
	if err := dec.Decode(&second); err == nil {
		r.refuseAt(second.Line, "", "want one document, got a second one")
	} else if !errors.Is(err, io.EOF) {
		r.syntax(err)
	}
	root := first.Content[0]
	if root.Kind == yaml.ScalarNode && root.ShortTag() == "!!null" {
		return nil // comments alone
	}
	return root
}

// syntax adds an error of the YAML library, which tells the line in its text alone, and none if it is the first.
func (r *reader) syntax(err error) {
	text, line := strings.TrimPrefix(err.Error(), "yaml: "), 1
	if rest, ok := strings.CutPrefix(text, "line "); ok {
		if number, reason, ok := strings.Cut(rest, ": "); ok {
			if n, err := strconv.Atoi(number); err == nil {
				text, line = reason, n
			}
		}
	}
	r.refuseAt(line, "", "%s", text)
}

// value reads the node at path by v.
func (r *reader) value(path string, line int, n *yaml.Node, v value) {
	r.lines[path] = line
	if n.Kind == yaml.AliasNode || n.Anchor != "" {
		// One value under one key: a reader of the file, and of an error about it, need not look elsewhere.
		r.refuse(path, "anchors and aliases are not supported: write the value out")
		return
	}
	v.read(r, path, n)
}

// policy validates what is set of a policy and returns it with its defaults. What is wrong with the defaults is not
// told again of every service that inherits it.
func (r *reader) policy(path string, p drain.Policy) drain.Policy {
	for _, k := range new(Settings).keys() {
		if r.bad[join(path, k.name)] || r.bad[join("defaults", k.name)] {
			return p // a value is missing: what contradicts the rest cannot be told
		}
	}
	eff, err := drain.Validate(p)
	if err == nil {
		return eff.Policy
	}
	all := []error{err}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		all = joined.Unwrap()
	}
	for _, err := range all {
		if !slices.Contains(r.inherited, err.Error()) {
			r.refuse(path, "%w", err)
		}
		if path == "defaults" {
			r.inherited = append(r.inherited, err.Error())
		}
	}
	return p
}

// got says what a node is, for an error.
func got(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	case yaml.AliasNode:
		return "an alias"
	}
	switch n.ShortTag() {
	case "!!str":
		return strconv.Quote(short(n.Value))
	case "!!null":
		return "nothing"
	case "!!int", "!!float":
		return "the number " + short(n.Value)
	case "!!bool":
		return "the boolean " + short(n.Value)
	case "!!timestamp":
		return "the date " + short(n.Value)
	}
	return n.ShortTag() + " " + strconv.Quote(short(n.Value))
}

// short makes text from the file fit into a line of an error.
func short(s string) string {
	const most = 60
	s = strings.Map(func(c rune) rune {
		if unicode.IsPrint(c) {
			return c
		}
		return utf8.RuneError
	}, s)
	if utf8.RuneCountInString(s) > most {
		s = string([]rune(s)[:most]) + "…"
	}
	return s
}

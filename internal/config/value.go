// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"fmt"
	"reflect"
	"strings"

	"go.yaml.in/yaml/v3"
)

// key is one key of a mapping. The tables of keys are the only place that says what the file may hold: reading,
// printing and comparing all go by them.
type key struct {
	name     string
	value    value
	required bool
}

// value ties what stands behind a key to the place where it is kept.
type value interface {
	// read puts what the node says in its place, over the default or what is inherited.
	read(r *reader, path string, n *yaml.Node)
	// write is the inverse; nil if the key is to be left out.
	write() *yaml.Node
	// children are the keys below, with what a path has between.
	children() (sep string, keys []key)
}

// walk visits keys and all that are below them, with their paths: services[].backends[].name.
func walk(prefix string, keys []key, visit func(path string, k key)) {
	for _, k := range keys {
		path := join(prefix, k.name)
		visit(path, k)
		sep, below := k.value.children()
		walk(path+sep, below, visit)
	}
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// form is how values of one kind are written.
type form[T any] struct {
	tag   string // of YAML
	want  string // in words, for errors
	known []string
	parse func(string) (T, bool)
	print func(T) string
}

// scalar is a single value.
type scalar[T any] struct {
	to       *T
	form     form[T]
	omitZero bool // the zero value means that nothing is set
}

func (s scalar[T]) read(r *reader, path string, n *yaml.Node) {
	hint := ""
	if n.Kind == yaml.ScalarNode && n.ShortTag() == s.form.tag {
		if v, ok := s.form.parse(n.Value); ok {
			*s.to = v
			return
		}
		if near := nearest(n.Value, s.form.known); near != "" {
			hint = fmt.Sprintf(": did you mean %q?", near)
		}
	}
	r.refuse(path, "want %s, got %s%s", s.form.want, got(n), hint)
}

func (s scalar[T]) write() *yaml.Node {
	if s.omitZero && reflect.ValueOf(s.to).Elem().IsZero() {
		return nil
	}
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: s.form.tag, Value: s.form.print(*s.to)}
}

func (scalar[T]) children() (string, []key) { return "", nil }

// list is a list of scalars.
type list[T any] struct {
	to       *[]T
	form     form[T]
	unique   bool
	omitZero bool
}

func (l list[T]) read(r *reader, path string, n *yaml.Node) {
	if n.Kind != yaml.SequenceNode {
		r.refuse(path, "want a list, each %s, got %s", l.form.want, got(n))
		return
	}
	first := make(map[string]int)
	*l.to = nil
	for i, c := range n.Content {
		if r.full() {
			return
		}
		var v T
		at := fmt.Sprintf("%s[%d]", path, i)
		r.value(at, c.Line, c, scalar[T]{to: &v, form: l.form})
		if r.bad[at] {
			continue
		}
		if line, ok := first[l.form.print(v)]; ok && l.unique {
			r.refuse(at, "%s is listed twice, first on line %d", l.form.print(v), line)
			continue
		}
		first[l.form.print(v)] = c.Line
		*l.to = append(*l.to, v)
	}
}

func (l list[T]) write() *yaml.Node {
	if l.omitZero && *l.to == nil {
		return nil
	}
	n := &yaml.Node{Kind: yaml.SequenceNode, Style: yaml.FlowStyle}
	for i := range *l.to {
		n.Content = append(n.Content, scalar[T]{to: &(*l.to)[i], form: l.form}.write())
	}
	return n
}

func (list[T]) children() (string, []key) { return "", nil }

// object is a mapping that is always there.
type object struct {
	keys  []key
	check func(r *reader, path string) // what no key can see by itself; nil: nothing
	unset func() bool                  // whether it is to be left out; nil: never
}

func (o object) read(r *reader, path string, n *yaml.Node) {
	if n.Kind != yaml.MappingNode {
		r.refuse(path, "want a mapping, got %s", got(n))
		return
	}
	known := make(map[string]bool)
	for _, k := range o.keys {
		known[k.name] = true
	}
	type entry struct{ key, value *yaml.Node }
	given := make(map[string]entry)
	for i := 0; i+1 < len(n.Content) && !r.full(); i += 2 {
		k := n.Content[i]
		at := join(path, short(k.Value))
		switch first, twice := given[k.Value]; {
		case k.Kind != yaml.ScalarNode || k.ShortTag() != "!!str":
			r.refuseAt(k.Line, path, "want a word as key, got %s", got(k))
		case twice:
			r.refuseAt(k.Line, at, "is given twice, first on line %d", first.key.Line)
		case !known[k.Value]:
			r.refuseAt(k.Line, at, "unknown key%s", unknown(k.Value, o.keys))
		default:
			given[k.Value] = entry{k, n.Content[i+1]}
		}
	}
	// In the order of the table: what is inherited comes before those who inherit it.
	for _, k := range o.keys {
		if e, ok := given[k.name]; ok {
			r.value(join(path, k.name), e.key.Line, e.value, k.value)
		} else if k.required {
			r.refuse(path, "the key %q is missing", k.name)
		}
	}
	if o.check != nil {
		o.check(r, path)
	}
}

func (o object) write() *yaml.Node {
	if o.unset != nil && o.unset() {
		return nil
	}
	n := &yaml.Node{Kind: yaml.MappingNode}
	for _, k := range o.keys {
		if v := k.value.write(); v != nil {
			n.Content = append(n.Content, &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: k.name}, v)
		}
	}
	return n
}

func (o object) children() (string, []key) { return "", o.keys }

// optional is a mapping that need not be there.
type optional[T any] struct {
	to    **T
	make  func() T
	keys  func(*T) []key
	check func(*T, *reader, string)
}

func (o optional[T]) of(v *T) object {
	return object{keys: o.keys(v), check: func(r *reader, path string) {
		if o.check != nil {
			o.check(v, r, path)
		}
	}}
}

func (o optional[T]) read(r *reader, path string, n *yaml.Node) {
	v := new(T)
	if o.make != nil {
		*v = o.make()
	}
	o.of(v).read(r, path, n)
	*o.to = v
}

func (o optional[T]) write() *yaml.Node {
	if *o.to == nil {
		return nil
	}
	return o.of(*o.to).write()
}

func (o optional[T]) children() (string, []key) { return "", o.keys(new(T)) }

// objects is a list of mappings.
type objects[T any] struct {
	to    *[]T
	make  func() T // with what is inherited
	keys  func(*T) []key
	check func(*T, *reader, string)
}

func (o objects[T]) read(r *reader, path string, n *yaml.Node) {
	if n.Kind != yaml.SequenceNode {
		r.refuse(path, "want a list of mappings, got %s", got(n))
		return
	}
	for i, c := range n.Content {
		if r.full() {
			return
		}
		v := new(T)
		r.value(fmt.Sprintf("%s[%d]", path, i), c.Line, c, optional[T]{to: &v, make: o.make, keys: o.keys, check: o.check})
		*o.to = append(*o.to, *v)
	}
}

func (o objects[T]) write() *yaml.Node {
	n := &yaml.Node{Kind: yaml.SequenceNode}
	for i := range *o.to {
		n.Content = append(n.Content, object{keys: o.keys(&(*o.to)[i])}.write())
	}
	return n
}

func (o objects[T]) children() (string, []key) { return "[]", o.keys(new(T)) }

// unknown says what may have been meant by a key that is not among keys.
func unknown(name string, keys []key) string {
	var places []string
	walk("", new(Config).keys(), func(path string, k key) {
		if k.name == name {
			place, _ := cutLast(path)
			places = append(places, cmp.Or(place, "the top level"))
		}
	})
	var here []string
	for _, k := range keys {
		here = append(here, k.name)
	}
	switch near := nearest(name, here); {
	case near != "":
		return fmt.Sprintf(": did you mean %q?", near)
	case len(places) > 0:
		return " here: it belongs to " + strings.Join(places, ", ")
	}
	return ": the keys here are " + strings.Join(here, ", ")
}

// cutLast takes the last element off a path.
func cutLast(path string) (before, last string) {
	i := max(strings.LastIndexByte(path, '.'), strings.LastIndexByte(path, '['))
	return path[:max(i, 0)], path[i+1:]
}

// nearest is the one of known that differs least from s: by a third of its letters at most, or by two, and never by more
// than half of the other's. It is empty if there is none.
func nearest(s string, known []string) string {
	best, found := max(2, len(s)/3)+1, ""
	for _, k := range known {
		if d := distance(strings.ToLower(short(s)), k); d < best && 2*d <= len(k) {
			best, found = d, k
		}
	}
	return found
}

// distance is how many letters must be replaced, added or left out to make b of a (Levenshtein).
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			d := diagonal
			if a[i] != b[j] {
				d = 1 + min(diagonal, row[j], row[j+1])
			}
			diagonal, row[j+1] = row[j+1], d
		}
	}
	return row[len(b)]
}

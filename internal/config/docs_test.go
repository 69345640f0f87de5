// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.yaml.in/yaml/v3"

	"github.com/ebbproxy/ebb/drain"
)

var update = flag.Bool("update", false, "write docs/config.schema.json from the keys and docs/config.md")

const (
	docsFile   = "../../docs/config.md"
	schemaFile = "../../docs/config.schema.json"
)

// row is one row of the table of docs/config.md: | `key`, `key` | type | default | what |
type row struct{ kind, def, what string }

// readDocs returns the rows by key.
func readDocs(t *testing.T) map[string]row {
	t.Helper()
	b, err := os.ReadFile(docsFile)
	if err != nil {
		t.Fatal(err)
	}
	rows := make(map[string]row)
	for line := range strings.SplitSeq(string(b), "\n") {
		cells := strings.Split(strings.Trim(line, "|"), " | ")
		if !strings.HasPrefix(line, "| `") || len(cells) != 4 {
			continue
		}
		for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(cells[0], -1) {
			if _, ok := rows[m[1]]; ok {
				t.Errorf("%s has two rows", m[1])
			}
			rows[m[1]] = row{cells[1], cells[2], strings.TrimSpace(cells[3])}
		}
	}
	return rows
}

// kind names the type of a value as docs/config.md does.
func kind(v value) string {
	switch v := v.(type) {
	case scalar[time.Duration]:
		return "duration"
	case scalar[bool]:
		return "boolean"
	case scalar[int]:
		return strings.TrimPrefix(v.form.want, "a ")
	case scalar[int64]:
		return strings.TrimPrefix(v.form.want, "a ")
	case scalar[uint16]:
		return "port"
	case scalar[drain.Mode]:
		return words(v.form.known)
	case scalar[drain.Protocol]:
		return words(v.form.known)
	case scalar[drain.OnNew]:
		return words(v.form.known)
	case scalar[drain.OnDeadline]:
		return words(v.form.known)
	case scalar[drain.IdlePolicy]:
		return words(v.form.known)
	case scalar[drain.NotifyAt]:
		return words(v.form.known)
	case scalar[string]:
		return "string"
	case scalar[syscall.Signal]:
		return "signal"
	case scalar[netip.AddrPort]:
		return "address"
	case list[netip.AddrPort]:
		return "list of addresses"
	case list[netip.Prefix]:
		return "list of prefixes"
	case list[string]:
		return "list of strings"
	case objects[Service], objects[Backend]:
		return "list of mappings"
	}
	return "mapping"
}

func words(known []string) string { return "`" + strings.Join(known, "`, `") + "`" }

// sparse sets as little as possible to have every key that has a default.
const sparse = `services:
- {name: a, backends: [{name: b, match: {pid: 1}}, {name: c, address: "192.0.2.1:80"}]}
- {name: d, notify: {signal: USR1}, ready: {http: {port: 1}}, backends: [{name: e, match: {port: 1}}]}
- {name: f, ready: {grpc: {port: 1}}, backends: [{name: g, match: {port: 2}}]}
`

// defaults are the values that sparse has and does not set, by key.
func defaults(t *testing.T) map[string]string {
	t.Helper()
	b, err := mustParse(t, sparse).YAML()
	if err != nil {
		t.Fatal(err)
	}
	printed, set := flatten(t, b), flatten(t, []byte(sparse))
	for path := range set {
		delete(printed, path)
	}
	return printed
}

// flatten returns the scalars and lists of scalars of a text by key, the first of each.
func flatten(t *testing.T, b []byte) map[string]string {
	t.Helper()
	var root yaml.Node
	if err := yaml.Unmarshal(b, &root); err != nil {
		t.Fatal(err)
	}
	values := make(map[string]string)
	var visit func(path string, n *yaml.Node)
	visit = func(path string, n *yaml.Node) {
		switch {
		case n.Kind == yaml.MappingNode:
			for i := 0; i < len(n.Content); i += 2 {
				visit(join(path, n.Content[i].Value), n.Content[i+1])
			}
		case n.Kind == yaml.SequenceNode && len(n.Content) > 0:
			for _, c := range n.Content {
				visit(path+"[]", c)
			}
		default:
			v := n.Value
			if n.Kind == yaml.SequenceNode {
				v = "[]"
			} else if v == "" {
				v = `""`
			}
			if _, ok := values[path]; !ok {
				values[path] = v
			}
		}
	}
	visit("", root.Content[0])
	return values
}

// derived are the keys whose default follows from others, and is told in words.
var derived = []string{
	"services[].mode", "services[].backends[].mode",
	"defaults.idle", "services[].idle", "defaults.admit_for", "services[].admit_for",
}

// Every key is in docs/config.md with its type and its default, and every key there exists.
func TestDocsHaveEveryKey(t *testing.T) {
	rows, values := readDocs(t), defaults(t)
	known := make(map[string]bool)
	walk("", new(Config).keys(), func(path string, k key) {
		known[path] = true
		r, ok := rows[path]
		if !ok {
			t.Errorf("%s is not in %s", path, docsFile)
			return
		}
		if want := kind(k.value); r.kind != want {
			t.Errorf("type of %s: got %s, want %s", path, r.kind, want)
		}
		value, has := values[path]
		switch {
		case k.required != (r.def == "required"):
			t.Errorf("%s: the default is %q and the key is required: %t", path, r.def, k.required)
		case has && !slices.Contains(derived, path) && r.def != "`"+value+"`":
			t.Errorf("default of %s: got %s, want `%s`", path, r.def, value)
		case !has && strings.HasPrefix(r.def, "`"):
			t.Errorf("default of %s: got %s, but there is none", path, r.def)
		}
		if r.what == "" {
			t.Errorf("%s is not explained", path)
		}
	})
	for path := range rows {
		if !known[path] {
			t.Errorf("%s is in %s and not read", path, docsFile)
		}
	}
}

// every adds to the schema of a key what no key can say by itself.
var every = map[string]map[string]any{
	"services[].notify":  {"oneOf": oneHook},
	"services[].flush":   {"oneOf": oneHook},
	"kubernetes.enabled": {"const": false},

	"defaults.max_connection_age":   {"pattern": zeroPattern},
	"services[].max_connection_age": {"pattern": zeroPattern},

	"services[].notify.exec":           {"minItems": 1},
	"services[].flush.exec":            {"minItems": 1},
	"services[].ready":                 {"oneOf": exactlyOne("http", "tcp", "grpc", "exec")},
	"services[].ready.exec":            {"minItems": 1},
	"services[].backends":              {"minItems": 1},
	"services[].backends[]":            {"oneOf": exactlyOne("match", "address")},
	"services[].backends[].match":      {"minProperties": 1},
	"services[].name":                  {"pattern": plainName.String()},
	"services[].backends[].name":       {"pattern": plainName.String()},
	"services[].backends[].match.unit": {"pattern": unitName.String()},
	"api.socket":                       {"pattern": "^/"},
	"state.dir":                        {"pattern": "^/"},
	"state.bpffs":                      {"pattern": "^/"},
}

// oneHook is exactly one of the four; api counts when it is true.
var oneHook = []any{
	map[string]any{"required": []string{"signal"}, "properties": notAPI},
	map[string]any{"required": []string{"http"}, "properties": notAPI},
	map[string]any{"required": []string{"exec"}, "properties": notAPI},
	map[string]any{
		"required": []string{"api"}, "properties": map[string]any{"api": map[string]any{"const": true}},
		"not": map[string]any{"anyOf": exactlyOne("signal", "http", "exec")},
	},
}

var notAPI = map[string]any{"api": map[string]any{"const": false}}

func exactlyOne(keys ...string) []any {
	var all []any
	for _, k := range keys {
		all = append(all, map[string]any{"required": []string{k}})
	}
	return all
}

const durationPattern = `^\+?(0|(([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h))+)$`

// zeroPattern is of a duration that this version takes only as none.
const zeroPattern = `^\+?0(\.0*)?(ns|us|µs|μs|ms|s|m|h)?$`

// makeSchema writes the schema of the whole file.
func makeSchema(t *testing.T) []byte {
	t.Helper()
	rows := readDocs(t)
	var mapping func(path string, keys []key) map[string]any
	of := func(path string, v value) map[string]any {
		s := make(map[string]any)
		sep, keys := v.children()
		switch kind := kind(v); {
		case sep == "[]":
			s["type"], s["items"] = "array", mapping(path+"[]", keys)
		case keys != nil:
			s = mapping(path, keys)
		case kind == "duration":
			s["type"], s["pattern"] = "string", durationPattern
		case kind == "boolean":
			s["type"] = "boolean"
		case kind == "port":
			s["type"], s["minimum"], s["maximum"] = "integer", 1, 65535
		case strings.HasPrefix(kind, "number"):
			var lo, hi int
			if _, err := fmt.Sscanf(kind, "number from %d to %d", &lo, &hi); err != nil {
				t.Fatalf("%s: %v", path, err)
			}
			s["type"], s["minimum"], s["maximum"] = "integer", lo, hi
		case strings.HasPrefix(kind, "`"):
			s["enum"] = strings.Split(strings.Trim(kind, "`"), "`, `")
		case strings.HasPrefix(kind, "list"):
			s["type"], s["items"] = "array", map[string]any{"type": "string"}
		default:
			s["type"] = "string"
		}
		if r, ok := rows[path]; ok {
			s["description"] = strings.ReplaceAll(r.what, "`", "")
			if def, ok := strings.CutPrefix(r.def, "`"); ok {
				var v any
				if err := yaml.Unmarshal([]byte(strings.TrimSuffix(def, "`")), &v); err != nil {
					t.Fatalf("%s: %v", path, err)
				}
				s["default"] = v
			}
		}
		return s
	}
	with := func(path string, s map[string]any) map[string]any {
		maps.Copy(s, every[path])
		return s
	}
	mapping = func(path string, keys []key) map[string]any {
		properties, required := make(map[string]any), []string(nil)
		for _, k := range keys {
			at := join(path, k.name)
			properties[k.name] = with(at, of(at, k.value))
			if k.required {
				required = append(required, k.name)
			}
		}
		s := map[string]any{"type": "object", "additionalProperties": false, "properties": properties}
		if required != nil {
			s["required"] = required
		}
		if strings.HasSuffix(path, "[]") {
			return with(path, s)
		}
		return s
	}
	root := mapping("", new(Config).keys())
	root["$schema"] = "https://json-schema.org/draft/2020-12/schema"
	root["title"] = "Configuration of ebb agent"
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(root); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestSchemaIsThatOfTheKeys(t *testing.T) {
	want := makeSchema(t)
	if *update {
		if err := os.WriteFile(schemaFile, want, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(schemaFile)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s is out of date: go test ./internal/config -run TestSchema -update", schemaFile)
	}
}

// The schema takes what Parse takes, and refuses what it can see is wrong.
func TestSchemaAgreesWithParse(t *testing.T) {
	f, err := os.Open(schemaFile)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	doc, err := jsonschema.UnmarshalJSON(f)
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource("config.json", doc); err != nil {
		t.Fatal(err)
	}
	schema, err := c.Compile("config.json")
	if err != nil {
		t.Fatal(err)
	}
	validate := func(text string) error {
		var v any
		if err := yaml.Unmarshal([]byte(text), &v); err != nil {
			return err
		}
		return schema.Validate(v)
	}

	good := []string{"{}", everything, sparse, before}
	files, err := filepath.Glob(filepath.Join(examples, "*.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		good = append(good, string(b))
	}
	for _, text := range good {
		printed, err := mustParse(t, text).YAML()
		if err != nil {
			t.Fatal(err)
		}
		for _, text := range []string{text, string(printed)} {
			if err := validate(text); err != nil {
				t.Errorf("Parse takes and the schema refuses\n%s\n%v", text, err)
			}
		}
	}
	for _, tt := range refusals {
		if tt.schema && validate(tt.text) == nil {
			t.Errorf("%s: the schema takes\n%s", tt.name, tt.text)
		}
	}
}

// The example of docs/config.md is one that works.
func TestDocsExamplesParse(t *testing.T) {
	b, err := os.ReadFile(docsFile)
	if err != nil {
		t.Fatal(err)
	}
	blocks := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllStringSubmatch(string(b), -1)
	if len(blocks) == 0 {
		t.Fatal("no example")
	}
	for _, m := range blocks {
		mustParse(t, m[1])
	}
}

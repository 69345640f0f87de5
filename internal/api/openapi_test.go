// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/ebbproxy/ebb/drain"
)

type openapiDoc struct {
	OpenAPI string
	Paths   map[string]map[string]struct {
		OperationID string
		Parameters  []struct{ Name, In string }
		RequestBody *struct {
			Content map[string]struct {
				Schema struct {
					Ref string `json:"$ref"`
				}
			}
		}
		Responses map[string]struct {
			Description string
			Content     map[string]json.RawMessage
		}
	}
	Components struct {
		Schemas map[string]struct {
			Properties map[string]json.RawMessage
			Required   []string
		}
	}
}

func readDoc(t *testing.T) openapiDoc {
	t.Helper()
	var d openapiDoc
	if err := json.Unmarshal(OpenAPI(), &d); err != nil {
		t.Fatal(err)
	}
	return d
}

func diff(a, b []string) []string {
	return slices.DeleteFunc(slices.Clone(a), func(s string) bool { return slices.Contains(b, s) })
}

// Every route is in the document and every operation of the document is a route.
func TestOpenAPIHasEveryRoute(t *testing.T) {
	d := readDoc(t)
	if !strings.HasPrefix(d.OpenAPI, "3.1.") {
		t.Errorf("version: got %s, want 3.1", d.OpenAPI)
	}
	var have, want []string
	ids := make(map[string]string)
	for path, ops := range d.Paths {
		for method, op := range ops {
			name := strings.ToUpper(method) + " " + path
			have = append(have, name)
			if other, ok := ids[op.OperationID]; ok || op.OperationID == "" {
				t.Errorf("%s: operation id %q is missing or that of %s", name, op.OperationID, other)
			}
			ids[op.OperationID] = name
			for part := range strings.SplitSeq(path, "/") {
				if param, ok := strings.CutPrefix(part, "{"); ok {
					param = strings.TrimSuffix(param, "}")
					if !slices.ContainsFunc(op.Parameters, func(p struct{ Name, In string }) bool { return p.Name == param && p.In == "path" }) {
						t.Errorf("%s: the parameter %s is not described", name, param)
					}
				}
			}
		}
	}
	for _, r := range routes {
		want = append(want, r.method+" "+r.path)
	}
	for _, s := range diff(want, have) {
		t.Errorf("%s is not in the document", s)
	}
	for _, s := range diff(have, want) {
		t.Errorf("%s is in the document and not served", s)
	}
}

// Every operation says how it is refused.
func TestOpenAPIHasEveryRefusal(t *testing.T) {
	d := readDoc(t)
	for _, r := range routes {
		want := []string{"401", "403", "default"}
		if r.kind != probe {
			want = append(want, "429", "503")
		}
		if r.method != "GET" {
			want = append(want, "400", "404", "409", "413", "415", "422")
		}
		have := slices.Collect(maps.Keys(d.Paths[r.path][strings.ToLower(r.method)].Responses))
		for _, s := range diff(want, have) {
			t.Errorf("%s %s: %s is not described", r.method, r.path, s)
		}
	}
}

// goTypes are the structs behind the schemas.
var goTypes = map[string]any{
	"BackendList": BackendList{}, "Backend": Backend{}, "OnNewChoice": OnNewChoice{}, "Owner": Owner{},
	"Listener": Listener{}, "NotCovered": NotCovered{}, "Counts": Counts{}, "DrainList": DrainList{},
	"Drain": Drain{}, "PhaseAt": PhaseAt{}, "Policy": Policy{}, "Slices": Slices{},
	"StragglerList": StragglerList{}, "Straggler": Straggler{}, "Cut": Cut{}, "Late": Late{},
	"DrainRequest": DrainRequest{}, "UndrainRequest": UndrainRequest{}, "ExtendRequest": ExtendRequest{},
	"CutRequest": CutRequest{}, "Event": Event{}, "Readiness": Readiness{}, "Problem": Problem{},
	"ServiceAddress": ServiceAddress{}, "SessionRequest": SessionRequest{}, "Session": Session{}, "SessionDrain": SessionDrain{},
	"Lease": Lease{}, "SessionEvent": SessionEvent{}, "SessionView": SessionView{}, "HeldDuring": HeldDuring{},
	"AckRequest": ackRequest{}, "HeartbeatRequest": heartbeatRequest{}, "HoldRequest": holdRequest{}, "ReleaseRequest": releaseRequest{},
	"FlushedRequest": flushedRequest{}, "ExtensionRequest": extensionRequest{},
}

// Every member of every Go type is in its schema and the other way round, and is required there exactly
// when Go always writes it.
func TestOpenAPIHasEveryField(t *testing.T) {
	d := readDoc(t)
	have := slices.Sorted(maps.Keys(d.Components.Schemas))
	for _, s := range diff(have, append(slices.Collect(maps.Keys(goTypes)), "Duration")) {
		t.Errorf("schema %s has no Go type", s)
	}
	for name, v := range goTypes {
		schema, ok := d.Components.Schemas[name]
		if !ok {
			t.Errorf("%s has no schema", name)
			continue
		}
		var fields []string
		rt := reflect.TypeOf(v)
		for f := range rt.Fields() {
			field := jsonName(f)
			if field == "" {
				continue
			}
			fields = append(fields, field)
			required := slices.Contains(schema.Required, field)
			if optional := strings.Contains(f.Tag.Get("json"), ",omit"); optional == required {
				t.Errorf("%s.%s: optional in Go is %v, required in the schema is %v", name, field, optional, required)
			}
			raw, ok := schema.Properties[field]
			if !ok {
				t.Errorf("%s.%s is not in the schema", name, field)
				continue
			}
			nullable := bytes.Contains(raw, []byte(`"null"`))
			isList := f.Type.Kind() == reflect.Slice
			canBeNull := !strings.Contains(f.Tag.Get("json"), ",omit") && !isList &&
				(f.Type.Kind() == reflect.Pointer || f.Type.Kind() == reflect.Map)
			if nullable != canBeNull {
				t.Errorf("%s.%s: null in the schema is %v, in Go %v", name, field, nullable, canBeNull)
			}
		}
		for _, s := range diff(slices.Collect(maps.Keys(schema.Properties)), fields) {
			t.Errorf("%s.%s is in the schema and not in Go", name, s)
		}
	}
}

// The values of every word are those of the code.
func TestOpenAPIHasEveryWord(t *testing.T) {
	enum := func(schema, field string) []string {
		t.Helper()
		var p struct{ Enum []string }
		if err := json.Unmarshal(readDoc(t).Components.Schemas[schema].Properties[field], &p); err != nil {
			t.Fatal(err)
		}
		return p.Enum
	}
	for _, tc := range []struct {
		schema, field string
		want          []string
	}{
		{"Backend", "state", words(drain.StateServing, drain.StateDraining, drain.StateFlushing, drain.StateDone, drain.StateSuspect, drain.StateLost)},
		{"Drain", "state", words(drain.StateServing, drain.StateDraining, drain.StateFlushing, drain.StateDone, drain.StateSuspect, drain.StateLost)},
		{"Backend", "mode", words(drain.ModeOff, drain.ModeObserve, drain.ModeEnforce)},
		{"Backend", "protocol", words(drain.ProtocolOpaque, drain.ProtocolHTTP1)},
		{"Backend", "datapath", words(DatapathBPF, DatapathNone)},
		{"Drain", "cause", words(drain.CauseSignal, drain.CauseApp, drain.CauseOperator, drain.CausePodDeleted, drain.CausePrestop, drain.CauseVersionUpgrade, drain.CauseHeartbeat)},
		{"Event", "cause", words(drain.CauseSignal, drain.CauseApp, drain.CauseOperator, drain.CausePodDeleted, drain.CausePrestop, drain.CauseVersionUpgrade, drain.CauseHeartbeat)},
		{"Drain", "outcome", words(drain.OutcomeDrained, drain.OutcomeExpired, drain.OutcomeLost, drain.OutcomeCancelled)},
		{"PhaseAt", "phase", words(drain.PhaseBegin, drain.PhaseStopNew, drain.PhaseSettle, drain.PhaseWait, drain.PhaseFlush, drain.PhaseCut, drain.PhaseDone)},
		{"Drain", "flush_reason", words(drain.FlushZero, drain.FlushDeadline)},
		{"Drain", "flush_result", words(drain.FlushOK, drain.FlushTimeout, drain.FlushFailed, drain.FlushUnknown, drain.FlushWould)},
		{"Policy", "idle", words(drain.IdleIgnore, drain.IdleWait, drain.IdleClose)},
		{"Policy", "notify_at", words(drain.NotifyAtBegin, drain.NotifyAtSettled)},
		{"DrainRequest", "on_new", words(drain.OnNewAuto, drain.OnNewSteer, drain.OnNewRelay, drain.OnNewHold, drain.OnNewAdmit, drain.OnNewRefuse)},
		{"DrainRequest", "cause", words(drain.CauseOperator, drain.CauseApp, drain.CausePrestop)},
		{"Session", "role", words(RoleApp, RoleHolder)},
		{"SessionRequest", "role", words(RoleApp, RoleHolder)},
		{"Session", "health", words(HealthOK, HealthSuspect, HealthLost)},
		{"SessionView", "health", words(HealthOK, HealthSuspect, HealthLost)},
		{"SessionEvent", "type", []string{SessionDraining, SessionDeadline, SessionCancelled, SessionFlush, SessionDone, SessionEnd}},
		{"DrainRequest", "on_deadline", words(drain.OnDeadlineCut, drain.OnDeadlineReset, drain.OnDeadlineLeave)},
	} {
		if got := enum(tc.schema, tc.field); !equal(got, tc.want) {
			t.Errorf("%s.%s: got %v, want %v", tc.schema, tc.field, got, tc.want)
		}
	}
	for _, v := range enum("DrainRequest", "on_new") {
		if err := CheckOnNew(drain.OnNew(v)); err != nil {
			t.Errorf("on_new %s is in the document and refused: %v", v, err)
		}
	}
}

func words[T ~string](vs ...T) []string {
	out := make([]string, len(vs))
	for i, v := range vs {
		out[i] = string(v)
	}
	return out
}

// Validator checks JSON against the schemas of the document.
type Validator struct{ compiler *jsonschema.Compiler }

const docURL = "file:///openapi.json"

// NewValidator reads the document.
func NewValidator() (*Validator, error) {
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(OpenAPI()))
	if err != nil {
		return nil, err
	}
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	return &Validator{c}, c.AddResource(docURL, doc)
}

// Response validates a response's body against what the document says about the operation.
func (v *Validator) Response(method, path string, status int, contentType string, body []byte) error {
	var d openapiDoc
	if err := json.Unmarshal(OpenAPI(), &d); err != nil {
		return err
	}
	op, ok := d.Paths[path][strings.ToLower(method)]
	if !ok {
		return fmt.Errorf("%s %s is not in the document", method, path)
	}
	code := fmt.Sprint(status)
	if _, ok := op.Responses[code]; !ok {
		code = "default"
	}
	ct, _, _ := strings.Cut(contentType, ";")
	if _, ok := op.Responses[code].Content[ct]; !ok {
		return fmt.Errorf("%s %s: %s of %s is not in the document", method, path, ct, code)
	}
	escape := strings.NewReplacer("~", "~0", "/", "~1").Replace
	schema, err := v.compiler.Compile(docURL + "#/paths/" + strings.ReplaceAll(strings.ReplaceAll(escape(path), "{", "%7B"), "}", "%7D") + "/" +
		strings.ToLower(method) + "/responses/" + code + "/content/" + escape(ct) + "/schema")
	if err != nil {
		return err
	}
	if ct == "text/plain" {
		return schema.Validate(string(body))
	}
	documents := [][]byte{body}
	switch ct {
	case "application/x-ndjson":
		documents = bytes.Split(bytes.TrimSpace(body), []byte("\n"))
	case "text/event-stream":
		documents = nil
		for line := range bytes.Lines(body) {
			if data, ok := bytes.CutPrefix(line, []byte("data: ")); ok {
				documents = append(documents, data)
			}
		}
	}
	for _, doc := range documents {
		if ct == "application/x-ndjson" && len(bytes.TrimSpace(doc)) == 0 {
			continue // a sign of life
		}
		x, err := jsonschema.UnmarshalJSON(bytes.NewReader(doc))
		if err != nil {
			return err
		}
		if err := schema.Validate(x); err != nil {
			return err
		}
	}
	return nil
}

// The schemas refuse what is not the contract: a test of the test below.
func TestOpenAPIValidatorRefuses(t *testing.T) {
	v, err := NewValidator()
	if err != nil {
		t.Fatal(err)
	}
	b := Backend{
		State: drain.StateServing, Mode: drain.ModeEnforce, Protocol: drain.ProtocolOpaque, Datapath: DatapathBPF,
		OnNew: OnNewChoice{Configured: drain.OnNewAuto, Chosen: drain.OnNewAdmit}, Owner: Owner{Started: time.Unix(1, 0)},
	}
	good, err := json.Marshal(b)
	if err != nil {
		t.Fatal(err)
	}
	try := func(body string) error {
		return v.Response("GET", "/v1/backends/{name}", 200, "application/json", []byte(body))
	}
	if err := try(string(good)); err != nil {
		t.Errorf("a backend: %v", err)
	}
	for _, change := range [][2]string{
		{`"state":"serving"`, `"state":"asleep"`},
		{`"in_flight":null`, `"in_flight":-1`},
		{`"in_flight":null`, `"in_flight":"0"`},
		{`"in_flight":null,`, ``},
		{`"name":""`, `"name":"","extra":1`},
		{`"listeners":[]`, `"listeners":null`},
		{`"1970-`, `"70-`},
	} {
		bad := strings.Replace(string(good), change[0], change[1], 1)
		if bad == string(good) {
			t.Fatalf("%s is not in %s", change[0], good)
		}
		if err := try(bad); err == nil {
			t.Errorf("%s instead of %s: got no error", change[1], change[0])
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/ebbproxy/ebb/drain"
)

// fieldError is a request whose member Field is wrong.
type fieldError struct {
	Field string
	Msg   string
	known []string
}

func (e *fieldError) Error() string {
	if e.Field == "" {
		return e.Msg
	}
	return fmt.Sprintf("%s: %s", e.Field, e.Msg)
}

// decodeRequest reads one JSON object into v, a pointer to a struct of scalars. Stricter than
// encoding/json: a member that the struct does not have, one that differs in case, one given twice, null,
// a value that is not UTF-8, and anything after the object are refused, naming the member. Nothing at all is the empty object.
func decodeRequest(r io.Reader, v any) error {
	body, err := io.ReadAll(r)
	if err != nil {
		return fmt.Errorf("read the request: %w", err)
	}
	if len(bytes.TrimSpace(body)) == 0 {
		return nil
	}
	fields := requestFields(v)
	dec := json.NewDecoder(bytes.NewReader(body))
	if tok, err := dec.Token(); err != nil || tok != json.Delim('{') {
		return &fieldError{Msg: "the request is not a JSON object"}
	}
	seen := make(map[string]bool)
	for dec.More() {
		tok, err := dec.Token()
		if err != nil {
			return &fieldError{Msg: "the request is not valid JSON: " + err.Error()}
		}
		name, ok := tok.(string)
		if !ok {
			return &fieldError{Msg: "the request is not a JSON object"}
		}
		var raw json.RawMessage
		if err := dec.Decode(&raw); err != nil {
			return &fieldError{Field: name, Msg: "is not valid JSON: " + err.Error()}
		}
		f, ok := fields[name]
		if !ok {
			return unknownField(name, fields)
		}
		if seen[name] {
			return &fieldError{Field: name, Msg: "is given twice"}
		}
		seen[name] = true
		if string(raw) == "null" {
			return &fieldError{Field: name, Msg: "is null; leave it out for the default"}
		}
		// Go would put another character in its place, so that two ids could become one.
		if !utf8.Valid(raw) {
			return &fieldError{Field: name, Msg: "is not valid UTF-8"}
		}
		if err := json.Unmarshal(raw, f.Addr().Interface()); err != nil {
			return &fieldError{Field: name, Msg: wrongValue(err, f.Type())}
		}
	}
	if _, err := dec.Token(); err != nil {
		return &fieldError{Msg: "the request is not valid JSON: it ends too early"}
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return &fieldError{Msg: "something follows the JSON object"}
	}
	return nil
}

// requestFields maps the JSON names of a struct to its fields.
func requestFields(v any) map[string]reflect.Value {
	rv := reflect.ValueOf(v).Elem()
	out := make(map[string]reflect.Value, rv.NumField())
	for i := range rv.NumField() {
		if name := jsonName(rv.Type().Field(i)); name != "" {
			out[name] = rv.Field(i)
		}
	}
	return out
}

// jsonName is the name of a field in JSON; empty if it is not part of it.
func jsonName(f reflect.StructField) string {
	name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
	if name == "-" || !f.IsExported() {
		return ""
	}
	return name
}

func unknownField(name string, fields map[string]reflect.Value) error {
	known := make([]string, 0, len(fields))
	for k := range fields {
		known = append(known, k)
	}
	slices.Sort(known)
	msg := "is not a member of this request; it has " + strings.Join(known, ", ")
	return &fieldError{Field: name, Msg: msg, known: known}
}

// wrongValue says what is wrong with a member's value in words of JSON, not of Go.
func wrongValue(err error, t reflect.Type) string {
	var te *json.UnmarshalTypeError
	if !errors.As(err, &te) {
		return err.Error()
	}
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	want := "a string"
	switch {
	case t == reflect.TypeFor[Duration]():
		want = `a duration such as "25s" or "1m30s"`
	case t.Kind() == reflect.Uint64:
		want = "a whole number, not negative"
	case t.Kind() == reflect.Int64:
		want = "a whole number"
	case t.Kind() == reflect.Bool:
		want = "true or false"
	}
	return fmt.Sprintf("is %s, want %s", te.Value, want)
}

// maxReason bounds what is written into journal, log and events.
const maxReason = 1024

func checkReason(s string) error {
	if len(s) > maxReason {
		return &fieldError{Field: "reason", Msg: fmt.Sprintf("has %d bytes, at most %d fit", len(s), maxReason)}
	}
	return nil
}

// check refuses what no backend could do.
func (r *DrainRequest) check() error {
	if r.Grace != nil && *r.Grace <= 0 {
		return &fieldError{Field: "grace", Msg: fmt.Sprintf("%s is not greater than 0", *r.Grace)}
	}
	if err := CheckOnNew(r.OnNew); r.OnNew != "" && err != nil {
		return &fieldError{Field: "on_new", Msg: err.Error()}
	}
	if err := CheckOnDeadline(r.OnDeadline); r.OnDeadline != "" && err != nil {
		return &fieldError{Field: "on_deadline", Msg: err.Error()}
	}
	return checkReason(r.Reason)
}

func (r *UndrainRequest) check() error { return checkReason(r.Reason) }
func (r *CutRequest) check() error     { return checkReason(r.Reason) }

func (r *ExtendRequest) check() error {
	if r.Extra <= 0 {
		return &fieldError{Field: "by", Msg: `is required: how much later, a duration greater than 0 such as "30s"`}
	}
	return checkReason(r.Reason)
}

// maxName bounds ids and names of sessions, leases and drains, in bytes.
const maxName = 128

// maxExtension is longer than any orchestrator waits.
const maxExtension = 24 * time.Hour

// maxVersion is the highest number that every reader of JSON keeps exactly: RFC 8259, section 6.
const maxVersion = 1<<53 - 1

// CheckName refuses an id or name of a session, lease or drain that cannot be shown on a line.
func CheckName(s string) error {
	printable := !strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) })
	if s == "" || len(s) > maxName || !utf8.ValidString(s) || !printable {
		return fmt.Errorf("want 1 to %d bytes of printable UTF-8", maxName)
	}
	return nil
}

func checkName(field, s string) error {
	if err := CheckName(s); err != nil {
		return &fieldError{Field: field, Msg: err.Error()}
	}
	return nil
}

// checkSessionID refuses an id that no session has. An empty one names none.
func checkSessionID(id string) error {
	if id == "" {
		return nil
	}
	return checkName(sessionHeader, id)
}

func checkRemaining(n *int64) error {
	if n != nil && *n < 0 {
		return &fieldError{Field: "remaining", Msg: fmt.Sprintf("%d is negative", *n)}
	}
	return nil
}

func (r *SessionRequest) check() error {
	switch {
	case r.Role != "" && r.Role != RoleApp && r.Role != RoleHolder:
		return &fieldError{Field: "role", Msg: fmt.Sprintf("%q is neither %s nor %s", string(r.Role), RoleApp, RoleHolder)}
	case r.Version < 0 || r.Version > maxVersion:
		return &fieldError{Field: "version", Msg: fmt.Sprintf("want a number from 1 to %d, or 0 for none, got %d", int64(maxVersion), r.Version)}
	}
	return checkRemaining(r.Remaining)
}

// check refuses what no session could say, and completes what is left out.
func (c *SessionCall) check() error {
	switch c.Op {
	case "get", "end":
		return nil
	case "heartbeat":
		return checkRemaining(c.Remaining)
	case "ack":
		if c.Seq == 0 {
			return &fieldError{Field: "seq", Msg: "is required: the number of the last event that has arrived"}
		}
		return nil
	case "hold", "release":
		if c.ID != "" {
			if err := checkName("id", c.ID); err != nil {
				return err
			}
		}
		c.Name = cmp.Or(c.Name, c.ID)
		c.ID = cmp.Or(c.ID, c.Name)
		return checkName("name", c.Name)
	case "flushed":
		if len(c.Error) > maxReason {
			return &fieldError{Field: "error", Msg: fmt.Sprintf("has %d bytes, at most %d fit", len(c.Error), maxReason)}
		}
		return checkName("drain", c.Drain)
	case "extend":
		if c.ByMS <= 0 || c.ByMS > maxExtension.Milliseconds() {
			return &fieldError{Field: "by_ms", Msg: fmt.Sprintf("how much later, want 1 to %d milliseconds", maxExtension.Milliseconds())}
		}
		if c.Drain == "" {
			return nil
		}
		return checkName("drain", c.Drain)
	}
	return fmt.Errorf("%q is nothing that a session says", c.Op)
}

// CheckOnNew refuses a value of on_new that does not exist.
func CheckOnNew(v drain.OnNew) error {
	switch v {
	case drain.OnNewAuto, drain.OnNewSteer, drain.OnNewRelay, drain.OnNewHold, drain.OnNewAdmit, drain.OnNewRefuse:
		return nil
	}
	return fmt.Errorf("%q is none of auto, steer, relay, hold, admit, refuse", string(v))
}

// CheckOnDeadline refuses a value of on_deadline that does not exist.
func CheckOnDeadline(v drain.OnDeadline) error {
	switch v {
	case drain.OnDeadlineCut, drain.OnDeadlineReset, drain.OnDeadlineLeave:
		return nil
	}
	return fmt.Errorf("%q is none of cut, reset, leave", string(v))
}

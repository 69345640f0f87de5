// SPDX-License-Identifier: Apache-2.0

package api

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"
)

func TestDecodeRequest(t *testing.T) {
	for _, tc := range []struct {
		in    string
		field string // of the error
		want  string // in the error; empty: none
	}{
		{``, "", ""},
		{"\n", "", ""},
		{`{}`, "", ""},
		{`{"grace":"25s","on_new":"admit","on_deadline":"leave","reason":"deploy","gen":3}`, "", ""},
		{`{"grce":"25s"}`, "grce", "cause, gen, grace, on_deadline, on_new, reason"},
		{`{"Grace":"25s"}`, "Grace", "not a member"},
		{`{"By":"root"}`, "By", "not a member"},
		{`{"by":"root"}`, "by", "not a member"},
		{`{"grace":"25s","grace":"26s"}`, "grace", "twice"},
		{`{"grace":25}`, "grace", "is number, want a duration"},
		{`{"grace":"25"}`, "grace", "is not a duration"},
		{`{"grace":"-1s"}`, "grace", "not greater than 0"},
		{`{"grace":"0s"}`, "grace", "not greater than 0"},
		{`{"grace":null}`, "grace", "null"},
		{`{"gen":-1}`, "gen", "want a whole number"},
		{`{"gen":1.5}`, "gen", "want a whole number"},
		{`{"reason":{}}`, "reason", "want a string"},
		{`{"reason":"` + strings.Repeat("x", maxReason+1) + `"}`, "reason", "at most 1024"},
		{`{"on_new":"steer"}`, "", ""},
		{`{"on_new":"relay"}`, "", ""},
		{`{"on_new":"hold"}`, "", ""},
		{`{"on_new":"drop"}`, "on_new", `"drop" is none of auto, steer, relay, hold, admit, refuse`},
		{`{"on_deadline":"kill"}`, "on_deadline", `"kill" is none of cut, reset, leave`},
		{`[]`, "", "not a JSON object"},
		{`null`, "", "not a JSON object"},
		{`{`, "", "ends too early"},
		{`{"grace"`, "grace", "not valid JSON"},
		{`{"grace":"25s"} {}`, "", "follows"},
		{`{"grace":"25s"}x`, "", "follows"},
		{`{,}`, "", "not valid JSON"},
	} {
		var r DrainRequest
		err := decodeRequest(strings.NewReader(tc.in), &r)
		if err == nil {
			err = r.check()
		}
		if tc.want == "" {
			if err != nil {
				t.Errorf("%s: got %v, want no error", tc.in, err)
			}
			continue
		}
		var fe *fieldError
		if !errors.As(err, &fe) || fe.Field != tc.field || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%.60s: got %v, want field %q and %q", tc.in, err, tc.field, tc.want)
		}
	}
}

func TestDecodeRequestReadsEveryMember(t *testing.T) {
	var r DrainRequest
	in := `{"grace":"1m30s","on_new":"refuse","on_deadline":"reset","reason":"r","gen":18446744073709551615}`
	if err := decodeRequest(strings.NewReader(in), &r); err != nil {
		t.Fatal(err)
	}
	if r.Grace == nil || time.Duration(*r.Grace) != 90*time.Second || r.OnNew != "refuse" || r.OnDeadline != "reset" ||
		r.Reason != "r" || r.Gen != 1<<64-1 {
		t.Errorf("got %+v", r)
	}
	var e ExtendRequest
	if err := errors.Join(decodeRequest(strings.NewReader(`{"by":"30s"}`), &e), e.check()); err != nil || time.Duration(e.Extra) != 30*time.Second {
		t.Errorf("extend: got %v, %v", e, err)
	}
	if err := (&ExtendRequest{}).check(); err == nil {
		t.Error("extend by nothing: got no error")
	}
}

// What is accepted is a JSON object whose members are known, and says the same when it is written again.
func FuzzDecodeRequest(f *testing.F) {
	for _, s := range []string{
		``, `{}`, `{"grace":"25s"}`, `{"grce":1}`, `{"grace":"25s","grace":"1s"}`, `{"gen":1e3}`, `{"reason":"\ud800"}`,
		`[{}]`, `{"a":{"b":[1,2,{"c":null}]}}`, "{\"reason\":\"\x80\"}", `{"on_new":"admit"}{}`,
	} {
		f.Add([]byte(s))
	}
	known := map[string]bool{"grace": true, "on_new": true, "on_deadline": true, "reason": true, "gen": true, "cause": true}
	f.Fuzz(func(t *testing.T, in []byte) {
		var r DrainRequest
		if err := decodeRequest(strings.NewReader(string(in)), &r); err != nil {
			return
		}
		if len(strings.TrimSpace(string(in))) == 0 {
			return
		}
		var m map[string]json.RawMessage
		if err := json.Unmarshal(in, &m); err != nil {
			t.Fatalf("accepted %q, which is not a JSON object: %v", in, err)
		}
		for k := range m {
			if !known[k] {
				t.Fatalf("accepted %q with the unknown member %q", in, k)
			}
		}
		b, err := json.Marshal(r)
		if err != nil {
			t.Fatalf("write %+v again: %v", r, err)
		}
		var again DrainRequest
		if err := decodeRequest(strings.NewReader(string(b)), &again); err != nil {
			t.Fatalf("read %s again: %v", b, err)
		}
		b2, err := json.Marshal(again)
		if err != nil || string(b2) != string(b) {
			t.Fatalf("got %s, want %s (%v)", b2, b, err)
		}
	})
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"maps"
	"testing"
)

func TestReachedTakesCalledFunctionsOnly(t *testing.T) {
	got, err := reached([]byte(`{"config":{}}
{"finding":{"osv":"GO-1","fixed_version":"v1.2.3","trace":[{"module":"m"}]}}
{"finding":{"osv":"GO-2","fixed_version":"v1.2.3","trace":[{"module":"m","package":"m/p"}]}}
{"finding":{"osv":"GO-3","trace":[{"module":"m","package":"m/p","function":"F"},{"module":"us","package":"us/p","function":"G"}]}}
`))
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]finding{"GO-3": {module: "m", fixed: "no version yet", by: "us/p.G"}}
	if !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if _, err := reached([]byte(`{"finding":`)); err == nil {
		t.Error("got no error for a report that is cut short")
	}
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
)

func TestRun(t *testing.T) {
	for _, tt := range []struct {
		name, in string
		logs     bool
		code     int
		want     []string
	}{
		{
			name: "pass and skip",
			in: `{"Action":"run","Package":"p","Test":"TestA"}
{"Action":"pass","Package":"p","Test":"TestA"}
{"Action":"run","Package":"p","Test":"TestB"}
{"Action":"output","Package":"p","Test":"TestB","Output":"    b_test.go:3: needs root\n"}
{"Action":"output","Package":"p","Test":"TestB","Output":"--- SKIP: TestB (0.00s)\n"}
{"Action":"skip","Package":"p","Test":"TestB"}
{"Action":"pass","Package":"p","Elapsed":1.5}
`,
			want: []string{"ok  \tp\t1.500s\n", "skipped p TestB: b_test.go:3: needs root\n", "\n1 passed, 0 failed, 1 skipped\n"},
		},
		{
			name: "failure shows its output",
			in: `{"Action":"run","Package":"p","Test":"TestA"}
{"Action":"output","Package":"p","Test":"TestA","Output":"got 1, want 2\n"}
{"Action":"fail","Package":"p","Test":"TestA"}
{"Action":"fail","Package":"p","Elapsed":1}
`,
			code: 1, want: []string{"got 1, want 2\n", "FAIL\tp\t1.000s\n", "0 passed, 1 failed, 0 skipped\n"},
		},
		{
			name: "panic",
			in: `{"Action":"run","Package":"p","Test":"TestA"}
{"Action":"output","Package":"p","Test":"TestA","Output":"panic: no\n"}
{"Action":"fail","Package":"p","Elapsed":1}
`,
			code: 1, want: []string{"panic: no\n", "--- FAIL: TestA (did not end)\n", "0 passed, 1 failed, 0 skipped\n"},
		},
		{
			name: "build failure",
			in: `{"ImportPath":"p","Action":"build-output","Output":"p.go:1: broken\n"}
{"Action":"fail","Package":"p","Elapsed":0,"FailedBuild":"p"}
`,
			code: 1, want: []string{"p.go:1: broken\n", "0 passed, 1 failed, 0 skipped\n"},
		},
		{
			name: "logs", logs: true,
			in: `{"Action":"run","Package":"p","Test":"TestA"}
{"Action":"output","Package":"p","Test":"TestA","Output":"=== RUN   TestA\n"}
{"Action":"output","Package":"p","Test":"TestA","Output":"    a_test.go:1: 98,342 connections\n"}
{"Action":"pass","Package":"p","Test":"TestA","Elapsed":2}
{"Action":"pass","Package":"p","Elapsed":2}
`,
			want: []string{"p TestA (2.0s)\n    a_test.go:1: 98,342 connections\nok"},
		},
		{name: "nothing ran", in: "go: no such package\n", code: 1, want: []string{"go: no such package\n", "0 passed, 0 failed, 0 skipped\n"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var out strings.Builder
			last, code := run(strings.NewReader(tt.in), &out, tt.logs)
			if code != tt.code {
				t.Errorf("got exit code %d, want %d", code, tt.code)
			}
			if !strings.HasSuffix(out.String(), last) {
				t.Errorf("got %q as the last line of %q", last, out.String())
			}
			for _, w := range tt.want {
				if !strings.Contains(out.String(), w) {
					t.Errorf("got %q, want %q in it", out.String(), w)
				}
			}
		})
	}
}

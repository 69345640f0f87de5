// SPDX-License-Identifier: Apache-2.0

package agent

import "testing"

// What a living run has must not be taken for another's.
func TestRunFile(t *testing.T) {
	for file, want := range map[string]string{
		"web.lock": "web", "web.journal": "web", "web.sock": "web", "web.app.sock": "web", "web.sessions": "web",
		"web.v2.app.sock": "web.v2", "web.relay": "", "web": "",
	} {
		if got, ok := runFile(file); got != want || ok != (want != "") {
			t.Errorf("%s: got %q, %t, want %q", file, got, ok, want)
		}
	}
}

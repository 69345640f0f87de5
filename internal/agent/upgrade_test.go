// SPDX-License-Identifier: Apache-2.0

package agent

import "testing"

func TestR16_NewestIsReadyAndHasAVersion(t *testing.T) {
	for _, tt := range []struct {
		name string
		cs   []contender
		want int
	}{
		{"none", nil, -1},
		{"unversioned", []contender{{0, true}, {0, true}}, -1},
		{"higher", []contender{{1, true}, {3, true}, {2, true}}, 1},
		{"higher is unready", []contender{{1, true}, {3, false}, {2, true}}, 2},
		{"all unready", []contender{{1, false}, {3, false}}, -1},
		{"equal", []contender{{2, true}, {2, true}}, 0},
		{"unversioned is ready", []contender{{0, true}, {1, false}, {1, true}}, 2},
	} {
		if got := newest(tt.cs); got != tt.want {
			t.Errorf("%s: got %d, want %d", tt.name, got, tt.want)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package hook

import (
	"errors"
	"reflect"
	"strings"
	"syscall"
	"testing"

	"github.com/ebbproxy/ebb/drain"
)

var parsed = []struct {
	text string
	hook Hook
	at   drain.NotifyAt
	err  string // part of the error; "": none
}{
	{"signal:SIGQUIT", Hook{Signal: syscall.SIGQUIT}, "", ""},
	{"signal:quit@begin", Hook{Signal: syscall.SIGQUIT}, drain.NotifyAtBegin, ""},
	{"signal:37@settled", Hook{Signal: 37}, drain.NotifyAtSettled, ""},
	{"http://127.0.0.1:8081/flush", Hook{HTTP: "http://127.0.0.1:8081/flush"}, "", ""},
	{"https://h/@x@settled", Hook{HTTP: "https://h/@x"}, drain.NotifyAtSettled, ""},
	{"exec:/bin/flush  now a@b ", Hook{Exec: []string{"/bin/flush", "now", "a@b"}}, "", ""},
	{"exec:flush @settled", Hook{Exec: []string{"flush"}}, drain.NotifyAtSettled, ""},
	{"api", Hook{API: true}, "", ""},
	{"api@begin", Hook{API: true}, drain.NotifyAtBegin, ""},

	{"", Hook{}, "", "want signal:NAME, http://"},
	{"@settled", Hook{}, "", "want signal:NAME, http://"},
	{"SIGTERM", Hook{}, "", "exec:CMD ARG… or api"},
	{"api:", Hook{}, "", "want signal:NAME"},
	{"http", Hook{}, "", "only http:// and https://"},
	{"http:http://h/", Hook{}, "", "names no host"},
	{"http://u:p@settled", Hook{}, "", "port"},
	{"http://u:secret@h/", Hook{}, "", "ends up in logs"},
	{"signal:", Hook{}, "", `unknown signal ""`},
	{"signal:NOSUCH", Hook{}, "", `unknown signal "NOSUCH": want a name`},
	{"signal:65", Hook{}, "", `unknown signal "65"`},
	{"signal:SIGSIGTERM", Hook{}, "", "unknown signal"},
	{"signal:TERM@noon", Hook{}, "", "@noon: want @begin or @settled"},
	{"api@settled@noon", Hook{}, "", "@settled@noon: want @begin or @settled"},
	{"exec:", Hook{}, "", "exec names no program"},
	{"exec: ", Hook{}, "", "exec names no program"},
	{`exec:sh -c "exit 0"`, Hook{}, "", "name a script"},
}

func TestParseNotify(t *testing.T) {
	for _, tt := range parsed {
		h, at, err := ParseNotify(tt.text)
		switch {
		case tt.err != "":
			if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), tt.err) || strings.Contains(err.Error(), "secret") {
				t.Errorf("%q: got %v, want ErrInvalid with %q", tt.text, err, tt.err)
			}
		case err != nil || at != tt.at || !reflect.DeepEqual(h, tt.hook):
			t.Errorf("%q: got %v at %q, %v, want %v at %q", tt.text, h, at, err, tt.hook, tt.at)
		}
	}
}

// What is taken works, and reads the same when it is shown.
func FuzzParse(f *testing.F) {
	for _, tt := range parsed {
		f.Add(tt.text)
	}
	f.Fuzz(func(t *testing.T, s string) {
		h, _, err := ParseNotify(s)
		if err != nil {
			if !errors.Is(err, ErrInvalid) || !h.IsZero() {
				t.Errorf("got %v beside %v", h, err)
			}
			return
		}
		if err := h.Validate(); err != nil {
			t.Errorf("got %v, which is refused: %v", h, err)
		}
		if again, err := Parse(h.String()); err != nil || !reflect.DeepEqual(again, h) {
			t.Errorf("got %v, %v from %q, want %v", again, err, h.String(), h)
		}
	})
}

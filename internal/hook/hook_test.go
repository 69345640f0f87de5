// SPDX-License-Identifier: Apache-2.0

package hook

import (
	"errors"
	"strings"
	"syscall"
	"testing"
)

func TestValidate(t *testing.T) {
	for _, tt := range []struct {
		name string
		hook Hook
		want string // part of the error; "": none
	}{
		{"signal", Hook{Signal: syscall.SIGTERM}, ""},
		{"http", Hook{HTTP: "http://127.0.0.1:8081/flush"}, ""},
		{"exec", Hook{Exec: []string{"flush", "now"}}, ""},
		{"api", Hook{API: true}, ""},
		{"none", Hook{}, "give one of"},
		{"two", Hook{Signal: syscall.SIGTERM, API: true}, "only one of signal, api"},
		{"no such signal", Hook{Signal: 200}, "no signal has the number 200"},
		{"https", Hook{HTTP: "https://127.0.0.1/"}, ""},
		{"a real-time signal", Hook{Signal: 37}, ""},
		{"a file", Hook{HTTP: "file:///flush"}, "only http:// and https://"},
		{"a path alone", Hook{HTTP: "/flush"}, "only http://"},
		{"no host", Hook{HTTP: "http:///flush"}, "names no host"},
		{"no URL", Hook{HTTP: "http://[::1/"}, "missing ']'"},
		{"a password", Hook{HTTP: "http://u:secret@127.0.0.1/"}, "ends up in logs"},
		{"no program", Hook{Exec: []string{}}, "exec names no program"},
		{"an empty program", Hook{Exec: []string{""}}, "exec names no program"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := tt.hook.Validate()
			switch {
			case tt.want == "" && err != nil:
				t.Errorf("got %v, want none", err)
			case tt.want != "" && (!errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), tt.want)):
				t.Errorf("got %v, want ErrInvalid with %q", err, tt.want)
			case err != nil && strings.Contains(err.Error(), "secret"):
				t.Errorf("got the password in %v", err)
			}
		})
	}
}

func TestString(t *testing.T) {
	for want, h := range map[string]Hook{
		"signal:SIGTERM":       {Signal: syscall.SIGTERM},
		"signal:200":           {Signal: 200},
		"http://h/x":           {HTTP: "http://h/x"},
		"exec:/bin/flush -now": {Exec: []string{"/bin/flush", "-now"}},
		"api":                  {API: true},
		"none":                 {},
	} {
		if got := h.String(); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
		if got := h.IsZero(); got != (want == "none") {
			t.Errorf("%s: got zero %v", want, got)
		}
	}
}

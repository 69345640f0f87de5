// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/ebbproxy/ebb/internal/loadtest"
)

func TestRunReportsAndObeys(t *testing.T) {
	stdin, commands := io.Pipe()
	var served atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if served.Add(1) == 20 {
			// From outside the handler, whose own answer belongs to the load.
			go io.WriteString(commands, "nonsense\ndrop b\nstop\n")
		}
	}))
	defer s.Close()
	addr := s.Listener.Addr().String()
	var stdout, stderr bytes.Buffer
	code := run(t.Context(), []string{"-target", "b=" + addr, "-rate", "200", "-keep-alive", "1", "-for", "60s"}, stdin, &stdout, &stderr)
	if code != 0 {
		t.Fatalf("got exit code %d: %s", code, stderr.String())
	}
	var rep loadtest.Report
	if err := json.Unmarshal(stdout.Bytes(), &rep); err != nil {
		t.Fatalf("read report: %v in %s", err, stdout.String())
	}
	if rep.Failed != 0 || rep.OK < 20 || rep.OK != served.Load() {
		t.Errorf("got %d ok and %d failed, the server counts %d", rep.OK, rep.Failed, served.Load())
	}
	if want := `unknown command "nonsense"`; !strings.Contains(stderr.String(), want) {
		t.Errorf("got %q, want %q in it", stderr.String(), want)
	}
}

func TestExitCodes(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	for _, tt := range []struct {
		args []string
		code int
	}{
		{[]string{"-help"}, 0},
		{[]string{"-nope"}, 2},
		{[]string{"-target", "127.0.0.1:1", "extra"}, 2},
		{[]string{"-target", "=,"}, 2},
		{nil, 2},
		{[]string{"-target", l.Addr().String(), "-rate", "50", "-for", "100ms"}, 3},
	} {
		if code := run(t.Context(), tt.args, strings.NewReader(""), io.Discard, io.Discard); code != tt.code {
			t.Errorf("%q: got exit code %d, want %d", tt.args, code, tt.code)
		}
	}
}

func TestParseTarget(t *testing.T) {
	got, err := parseTarget("blue=[::1]:80,http://[::1]:81/healthz")
	if want := (loadtest.Target{Name: "blue", Addr: "[::1]:80", ReadyURL: "http://[::1]:81/healthz"}); err != nil || got != want {
		t.Errorf("got %+v, %v, want %+v", got, err, want)
	}
}

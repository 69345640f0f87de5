// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/api/apitest"
)

// Live answers of every route, good and bad, are what the OpenAPI document says.
func TestLiveAnswersMatchOpenAPI(t *testing.T) {
	v, err := api.NewValidator()
	if err != nil {
		t.Fatal(err)
	}
	f := newFixture(t, apitest.Web(), apitest.Blind())
	age, idle := api.Duration(90*time.Second), api.Duration(1500*time.Millisecond)
	f.source.SetStragglers("web",
		api.Straggler{Peer: "192.0.2.7:40000", Local: "192.0.2.1:80", Class: "stalled", Age: &age, Idle: &idle, Unacked: 512, PID: 4243},
		api.Straggler{Peer: "[2001:db8::7]:40001", Local: "[2001:db8::1]:80", Class: "active"},
	)
	var id string
	routes := make(map[string]bool)
	check := func(method, path, target, body string, status int) {
		t.Helper()
		ct := ""
		if body != "" {
			ct = jsonType
		}
		a := f.do(method, target, ct, body)
		if a.status != status {
			t.Errorf("%s %s: got %d, want %d: %s", method, target, a.status, status, a.body)
		}
		if err := v.Response(method, path, a.status, a.header.Get("Content-Type"), a.body); err != nil {
			t.Errorf("%s %s: %v\n%s", method, target, err, a.body)
		}
		routes[method+" "+path] = true
	}
	look := func() {
		t.Helper()
		check("GET", "/v1/backends", "/v1/backends", "", 200)
		check("GET", "/v1/backends/{name}", "/v1/backends/web", "", 200)
		check("GET", "/v1/drains", "/v1/drains", "", 200)
		check("GET", "/v1/events", "/v1/events", "", 200)
		if id != "" {
			check("GET", "/v1/drains/{id}", "/v1/drains/"+id, "", 200)
		}
	}
	look()
	check("GET", "/v1/backends/{name}", "/v1/backends/none", "", 404)
	check("GET", "/v1/backends/{name}/stragglers", "/v1/backends/web/stragglers?n=5", "", 200)
	check("GET", "/v1/backends/{name}/stragglers", "/v1/backends/web/stragglers?n=x", "", 400)
	check("GET", "/readyz", "/readyz", "", 200)
	check("GET", "/readyz/{name}", "/readyz/web", "", 200)
	check("GET", "/readyz/{name}", "/readyz/none", "", 404)
	check("GET", "/livez", "/livez", "", 200)
	check("GET", "/metrics", "/metrics", "", 200)
	check("GET", "/openapi.json", "/openapi.json", "", 200)
	check("POST", "/v1/backends/{name}/drain", "/v1/backends/web/drain", `{"x":1}`, 400)
	check("POST", "/v1/backends/{name}/undrain", "/v1/backends/web/undrain", "", 409)
	check("POST", "/v1/backends/{name}/drain", "/v1/backends/web/drain", `{"grace":"1m","reason":"deploy"}`, 200)
	d, err := f.client.Drains(t.Context())
	if err != nil || len(d) != 1 {
		t.Fatalf("got %v, %v, want one drain", d, err)
	}
	id = d[0].ID
	look()
	check("GET", "/readyz", "/readyz", "", 503)
	check("POST", "/v1/backends/{name}/extend", "/v1/backends/web/extend", `{"by":"30s"}`, 200)
	check("POST", "/v1/backends/{name}/extend", "/v1/backends/web/extend", `{"by":"2h"}`, 422)
	check("POST", "/v1/backends/{name}/undrain", "/v1/backends/web/undrain", `{"reason":"no"}`, 200)
	look()
	check("POST", "/v1/backends/{name}/drain", "/v1/backends/web/drain", `{}`, 200)
	check("POST", "/v1/backends/{name}/cut", "/v1/backends/web/cut", `{"reason":"now"}`, 200)
	f.source.Step("web", drain.PhaseFlush)
	f.source.Update("web", func(b *api.Backend) { b.Drain.FlushResult = drain.FlushTimeout })
	look()
	f.source.End("web", drain.OutcomeExpired)
	look()
	check("GET", "/v1/drains/{id}", "/v1/drains/none", "", 404)

	trySessions(t, v, routes)
	for _, r := range api.RouteNames() {
		if !routes[r] {
			t.Errorf("%s was not tried", r)
		}
	}
	if !bytes.Contains(f.do("GET", "/v1/backends/web", "", "").body, []byte(`"survivors":[{"peer":"192.0.2.7:40000"`)) {
		t.Error("the survivors are not in the answer: the schemas were not tried on them")
	}
}

// trySessions does the same for the routes of applications, and adds them to routes.
func trySessions(t *testing.T, v *api.Validator, routes map[string]bool) {
	f := newApps(t, time.Minute, nil)
	check := func(method, path, query, body string, status int) string {
		t.Helper()
		got, header, text := over(t, connect(t, f.path), method, path+query, body)
		if got != status {
			t.Errorf("%s %s: got %d, want %d: %s", method, path, got, status, text)
		}
		if got != 204 {
			if err := v.Response(method, path, got, header.Get("Content-Type"), []byte(text)); err != nil {
				t.Errorf("%s %s: %v\n%s", method, path, err, text)
			}
		}
		routes[method+" "+path] = true
		return text
	}
	check("POST", "/v1/session", "", `{"role":"chef"}`, 400)
	check("GET", "/v1/session", "", "", 404)
	check("POST", "/v1/session", "", `{"role":"holder","version":2,"bound":true}`, 201)
	check("DELETE", "/v1/session", "", "", 204)
	check("POST", "/v1/session", "", "", 201)
	check("POST", "/v1/session/heartbeat", "", `{"remaining":5}`, 200)
	check("POST", "/v1/session/hold", "", `{"name":"mail"}`, 200)
	check("POST", "/v1/session/extend", "", `{"by_ms":1000}`, 422)
	check("POST", "/v1/session/flushed", "", `{"drain":"none"}`, 409)
	check("POST", "/v1/session/drain", "", `{"reason":"enough"}`, 200)
	for _, tell := range []func(string, string) error{f.src.Announce, f.src.Flush} {
		if err := tell("web", "web-7-1"); err != nil {
			t.Fatal(err)
		}
	}
	f.src.Update("web", func(b *api.Backend) {
		b.Sessions = f.src.Book("web").Views()
		b.Drain.Held = []api.HeldDuring{{Name: "mail", PID: 4242, For: api.Duration(time.Second), Released: true}}
		if len(b.Sessions) != 1 || len(b.Sessions[0].Holds) != 1 {
			t.Errorf("got %+v, too few to try the schemas on", b.Sessions)
		}
	})
	check("GET", "/v1/backends", "", "", 200)
	check("GET", "/v1/session", "", "", 200)
	check("POST", "/v1/session/hold", "", `{"name":"more"}`, 409)
	check("POST", "/v1/session/release", "", `{"id":"mail"}`, 200)
	check("POST", "/v1/session/flushed", "", `{"drain":"web-7-1","error":"half"}`, 200)
	f.src.Book("web").Close(api.EndEvicted) // and so the stream has an end
	if text := check("GET", "/v1/session/events", "?from=0", "", 200); strings.Count(text, "data: ") != 4 {
		t.Errorf("got %s, want a session and three events", text)
	}
	check("POST", "/v1/session/ack", "", `{"seq":3}`, 200)
}

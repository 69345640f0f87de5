// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/agent"
	"github.com/ebbproxy/ebb/internal/api"
)

// What is in the way of one backend, or of one address of the API, is told and tried again; it keeps the agent from nothing else,
// neither at its start nor when the configuration is read again.
func TestAgentGoesOnWithoutWhatFails(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	const metrics = "127.0.0.1:9402"
	set := func(services ...string) {
		t.Helper()
		n.set(agentBudget + "services:\n" + strings.Join(services, ""))
		b, err := os.ReadFile(n.config)
		if err == nil {
			err = os.WriteFile(n.config, []byte(strings.Replace(string(b), `metrics: {listen: ""}`, "metrics: {listen: "+strconv.Quote(metrics)+"}", 1)), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	block := func(backend string) (unblock func()) {
		t.Helper()
		if err := os.MkdirAll(filepath.Join(n.journal(backend), "in the way"), 0o700); err != nil {
			t.Fatal(err)
		}
		return func() {
			t.Helper()
			if err := os.RemoveAll(n.journal(backend)); err != nil {
				t.Fatal(err)
			}
		}
	}
	unknown := func(backend string) {
		t.Helper()
		n.awaitView(backend, "unknown, with the reason", func(b api.Backend) bool {
			return b.State == drain.StateLost && !b.CountsKnown && strings.Contains(strings.Join(b.Warnings, " "), "is a directory")
		})
	}
	taken := program(t, n.ns, goServer(t, metrics)...)
	for _, addr := range []string{"127.0.0.1:8080", "127.0.0.1:8081", "127.0.0.1:8082"} {
		program(t, n.ns, goServer(t, addr)...)
	}
	web, second, shop := service("web", n.ns, 8080), service("api", n.ns, 8081), service("shop", n.ns, 8082)

	set(second, web)
	unblock := block("api")
	d := n.agent()
	n.ready("web")
	unknown("api")
	d.find("word that metrics are not served", func(e drain.Event) bool {
		return e.Type == agent.EventDegraded && strings.Contains(e.Message, "metrics are not served at "+metrics)
	})
	unblock()
	n.ready("api")

	unblock = block("shop")
	set(shop, web)
	d.signal(syscall.SIGHUP)
	unknown("shop")
	n.ready("web")
	if err := taken.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	d.find("word that metrics are served", func(e drain.Event) bool {
		return e.Type == agent.EventAgent && strings.Contains(e.Message, "is served: "+metrics)
	})
	client := http.Client{Timeout: patience, Transport: &http.Transport{DialContext: n.ns.DialContext, DisableKeepAlives: true}}
	resp, err := client.Get("http://" + metrics + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if body, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != http.StatusOK || !strings.Contains(string(body), `backend="shop"`) {
		t.Errorf("got %s %s, %v, want metrics of all backends", resp.Status, body, err)
	}
	unblock()
	n.ready("shop")
	d.stop()
}

// An installation has one agent, also if another one has a state directory of its own, and so a lease of its own.
func TestAgentIsAloneInItsInstallation(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	d := n.agent()
	other := nodeOn(n.host, "").begin()
	other.says("another agent works with this installation")
	other.says("by process " + strconv.Itoa(d.pid()))
	if code := other.wait(); code == 0 {
		t.Error("the other agent ended with code 0")
	}
	d.stop()
	d = n.agent()
	d.stop()
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/api/apitest"
	"github.com/ebbproxy/ebb/internal/netnstest"
)

// agentOf is a fake node agent that can be restarted.
type agentOf struct {
	t      *testing.T
	dir    string
	source *apitest.Source
	*fake
}

func newAgent(t *testing.T, names ...string) *agentOf {
	t.Helper()
	a := &agentOf{t: t, dir: shortDir(t)}
	var bs []api.Backend
	for _, n := range names {
		b := apitest.Web()
		b.Name = n
		bs = append(bs, b)
	}
	log := api.NewLog(api.LogOptions{})
	a.source = apitest.New(log, bs...)
	a.start(log)
	t.Cleanup(func() { a.end() })
	return a
}

func (a *agentOf) start(log *api.Log) {
	a.t.Helper()
	f, err := startAgent(a.dir, "b0", a.source, log)
	if err != nil {
		a.t.Fatal(err)
	}
	stop := f.stop
	f.stop = sync.OnceValue(stop)
	a.fake = f
}

func (a *agentOf) end() {
	a.t.Helper()
	if err := a.stop(); err != nil {
		a.t.Errorf("stop the agent: %v", err)
	}
}

// Two hundred backends are drained and waited for over one stream of events, of which a server has 64.
func TestDrainAllOfManyBackends(t *testing.T) {
	var names []string
	for i := range 200 {
		names = append(names, fmt.Sprintf("b%d", i))
	}
	a := newAgent(t, names...)
	for _, n := range names {
		a.endAfterBegin(n, drain.OutcomeDrained, false)
	}
	out, stderr := newBuffer(), newBuffer()
	if code := run(t.Context(), testEnv(a.dir, out, stderr, nil, "drain", "--all", "--wait")); code != 0 {
		t.Errorf("exit code: got %d, want 0: %s", code, stderr)
	}
	if n := strings.Count(out.String(), "drained at"); n != len(names) {
		t.Errorf("got %d backends drained, want %d", n, len(names))
	}
}

// D7: a caller who waits for a drain learns its end from the agent's successor, whether that ends the drain or has
// found it ended.
func TestD7_DrainWaitGoesOnAcrossARestartOfTheAgent(t *testing.T) {
	for name, endFirst := range map[string]bool{"ended by the successor": false, "ended meanwhile": true} {
		t.Run(name, func(t *testing.T) {
			a := newAgent(t, "web", "other")
			out, stderr := newBuffer(), newBuffer()
			code := start(t.Context(), testEnv(a.dir, out, stderr, nil, "drain", "web", "--wait"))
			stderr.waitFor(t, "phase stop_new")
			a.end()
			log := api.NewLog(api.LogOptions{})
			if endFirst {
				a.source.Log = api.NewLog(api.LogOptions{}) // nobody reads of it
				a.source.End("web", drain.OutcomeExpired)
			}
			a.start(log)
			if !endFirst {
				a.source.Step("web", drain.PhaseWait)
				stderr.waitFor(t, "phase wait")
				a.source.End("web", drain.OutcomeExpired)
			}
			if got := wait(t, code); got != exitExpired {
				t.Errorf("exit code: got %d, want %d: %s", got, exitExpired, stderr)
			}
		})
	}
}

// R15: a follower of the agent's events goes on across its restart: each event once, in order, and numbers that begin
// again are said.
func TestR15_EventsFollowGoesOnAcrossARestartOfTheAgent(t *testing.T) {
	a := newAgent(t, "web")
	cmd, out, stderr := command(t, a.dir, "events", "--follow", "--from", "2")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for _, typ := range []string{"a", "b", "c"} {
		a.log.Publish(api.Event{Type: typ})
	}
	out.waitFor(t, `"type":"c"`)
	a.end()
	log := api.NewLog(api.LogOptions{})
	log.Publish(api.Event{Type: "d"})
	a.start(log)
	out.waitFor(t, `"type":"d"`)
	log.Publish(api.Event{Type: "e"})
	out.waitFor(t, `"type":"e"`)
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("%v: %s", err, stderr)
	}
	var got []string
	lines := bufio.NewScanner(strings.NewReader(out.String()))
	for lines.Scan() {
		var ev api.Event
		if err := json.Unmarshal(lines.Bytes(), &ev); err != nil {
			t.Fatal(err)
		}
		got = append(got, fmt.Sprintf("%d %s", ev.Seq, ev.Type))
	}
	if want := "2 b, 3 c, 3 events.lost, 1 d, 2 e"; strings.Join(got, ", ") != want {
		t.Errorf("got %s, want %s", strings.Join(got, ", "), want)
	}
}

// The hook before a stop does not wait beyond the deadline, and says that it is over.
func TestPrestopEndsAtTheDeadline(t *testing.T) {
	a := newAgent(t, "b0")
	if _, err := a.source.Drain(t.Context(), "b0", api.DrainRequest{}); err != nil {
		t.Fatal(err)
	}
	short := api.Duration(50 * time.Millisecond)
	if _, err := a.source.Drain(t.Context(), "b0", api.DrainRequest{Grace: &short}); err != nil {
		t.Fatal(err)
	}
	out, stderr := newBuffer(), newBuffer()
	if code := wait(t, start(t.Context(), testEnv(a.dir, out, stderr, nil, "prestop"))); code != 0 {
		t.Errorf("exit code: got %d, want 0: %s", code, stderr)
	}
	stderr.waitFor(t, "(?m)^ebb: prestop: b0 has not ended its drain: the drain's deadline is over; the stop goes on\n$")
}

// An operator who gives the drain more time gives the hook more time.
func TestPrestopWaitsForADeadlineThatWasMoved(t *testing.T) {
	a := newAgent(t, "b0")
	short := api.Duration(time.Second)
	if _, err := a.source.Drain(t.Context(), "b0", api.DrainRequest{Grace: &short}); err != nil {
		t.Fatal(err)
	}
	if _, err := a.source.Extend(t.Context(), "b0", api.ExtendRequest{Extra: api.Duration(time.Minute)}); err != nil {
		t.Fatal(err)
	}
	out, stderr := newBuffer(), newBuffer()
	code := start(t.Context(), testEnv(a.dir, out, stderr, nil, "prestop"))
	stderr.waitFor(t, "phase stop_new")
	a.source.End("b0", drain.OutcomeDrained)
	if got := wait(t, code); got != 0 {
		t.Errorf("exit code: got %d, want 0", got)
	}
	stderr.waitFor(t, "^(.*phase.*\n)*b0: drained at .*\n$")
}

// An older agent does not know the causes: the hook asks again without.
func TestPrestopWithAnOlderAgent(t *testing.T) {
	dir := shortDir(t)
	if err := api.MakeRunDir(dir, os.Getuid()); err != nil {
		t.Fatal(err)
	}
	ln, err := api.Listen(filepath.Join(dir, api.AgentSocket))
	if err != nil {
		t.Fatal(err)
	}
	var bodies []string // written by one request after the other
	srv := &http.Server{ReadHeaderTimeout: patience, Handler: http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		switch req.URL.Path {
		case "/v1/backends":
			_ = json.NewEncoder(w).Encode(api.BackendList{Backends: []api.Backend{apitest.Web()}})
		case "/v1/backends/web/drain":
			b, _ := io.ReadAll(req.Body)
			bodies = append(bodies, string(b))
			p := api.Problem{Status: 422, Detail: "not today"}
			if strings.Contains(string(b), "cause") {
				p = api.Problem{Status: 400, Field: "cause", Detail: "cause: is not a member of this request"}
			}
			w.WriteHeader(p.Status)
			_ = json.NewEncoder(w).Encode(p)
		}
	})}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ln) }()
	out, stderr := newBuffer(), newBuffer()
	if code := run(t.Context(), testEnv(dir, out, stderr, nil, "prestop", "--backend", "web")); code != 0 {
		t.Errorf("exit code: got %d, want 0", code)
	}
	_ = srv.Close()
	<-served
	if want := "ebb: prestop: web is not drained: not today; the stop goes on\n"; stderr.String() != want {
		t.Errorf("got %q, want %q", stderr, want)
	}
	if len(bodies) != 2 || !strings.Contains(bodies[0], "prestop") || strings.Contains(bodies[1], "prestop") {
		t.Errorf("got %q, want two requests, the second without a cause", bodies)
	}
}

// A unit runs a backend whose main process is in its cgroup, however the backend was found.
func TestDrainByTheUnitOfTheProcess(t *testing.T) {
	netnstest.RequireRoot(t)
	root, err := netnstest.CgroupRoot()
	if err != nil {
		t.Fatal(err)
	}
	unit := fmt.Sprintf("ebbcli%d.service", os.Getpid())
	cgroup := filepath.Join(root, unit)
	if err := os.Mkdir(cgroup, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "sleep", "600")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if err := os.Remove(cgroup); err != nil {
			t.Error(err)
		}
	})
	if err := os.WriteFile(filepath.Join(cgroup, "cgroup.procs"), []byte(strconv.Itoa(cmd.Process.Pid)), 0); err != nil {
		t.Fatal(err)
	}
	a := newAgent(t, "b0", "b1")
	a.source.Update("b0", func(b *api.Backend) { b.PID = os.Getpid() })
	a.source.Update("b1", func(b *api.Backend) { b.PID = cmd.Process.Pid })
	out := newBuffer()
	if code := run(t.Context(), testEnv(a.dir, out, out, nil, "drain", "--unit", unit)); code != 0 {
		t.Errorf("exit code: got %d, want 0: %s", code, out)
	}
	if ds := a.source.Drains(t.Context()); len(ds) != 1 || ds[0].Backend != "b1" {
		t.Errorf("got %+v, want a drain of b1 alone", ds)
	}
}

// Words that this version does not know are shown as they are, and an outcome among them is no success.
func TestWordsOfANewerServer(t *testing.T) {
	a := newAgent(t, "web")
	out := newBuffer()
	code := start(t.Context(), testEnv(a.dir, out, out, nil, "drain", "web", "--wait"))
	out.waitFor(t, "phase stop_new")
	a.source.Update("web", func(b *api.Backend) {
		b.Drain.Policy.OnDeadline, b.Mode, b.State, b.OnNew.Chosen = "evict", "advise", "hibernating", "teleport"
	})
	for args, want := range map[string][]string{
		"status -o wide": {"hibernating", "advise", "teleport"},
		"explain web":    {"hibernating", `treated by "evict", a word of a newer ebb`},
	} {
		shown := newBuffer()
		if code := run(t.Context(), testEnv(a.dir, shown, shown, nil, strings.Fields(args)...)); code != 0 {
			t.Errorf("%s: exit code %d: %s", args, code, shown)
		}
		for _, w := range want {
			if !strings.Contains(shown.String(), w) {
				t.Errorf("%s: got %s, want %q in it", args, shown, w)
			}
		}
	}
	a.source.End("web", "evaporated")
	if got := wait(t, code); got != exitFailed {
		t.Errorf("exit code: got %d, want %d", got, exitFailed)
	}
	out.waitFor(t, "web: evaporated at")
}

func TestUnitsIn(t *testing.T) {
	for in, want := range map[string]string{
		"0::/system.slice/nginx.service\n":                                                 "nginx.service",
		"0::/system.slice/system-web.slice/web@blue.service\n":                             "web@blue.service",
		"0::/user.slice/user-1000.slice/user@1000.service/app.slice/app-x.service\n":       "user@1000.service app-x.service",
		"12:cpu:/system.slice/nginx.service\n1:name=systemd:/system.slice/nginx.service\n": "nginx.service",
		"0::/kubepods.slice/cri-containerd-0123.scope\n":                                   "cri-containerd-0123.scope",
		"0::/\n": "", "": "", "nonsense": "",
	} {
		if got := strings.Join(unitsIn(in), " "); got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
}

// The command line works over TCP with a certificate or a token, given as flags or as variables.
func TestCommandsOverTCP(t *testing.T) {
	dir := shortDir(t)
	cert, key := selfSigned(t, dir)
	token := filepath.Join(dir, "token")
	if err := os.WriteFile(token, []byte("0123456789abcdef\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	access, err := api.Remote(api.Credentials{Cert: cert, Key: key, ClientCA: cert, TokenFile: token}, nil)
	if err != nil {
		t.Fatal(err)
	}
	log := api.NewLog(api.LogOptions{})
	srv, err := api.NewServer(api.Options{Source: apitest.New(log, apitest.Web()), Log: log})
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- srv.ServeAs(t.Context(), ln, access) }()
	url := "https://" + ln.Addr().String()
	for _, tc := range []struct {
		name string
		vars map[string]string
		args []string
		code int
		want string // in stdout or stderr
	}{
		{"certificate", nil, []string{"status", "--api", url, "--tls-ca", cert, "--tls-cert", cert, "--tls-key", key}, 0, "web"},
		{"token", nil, []string{"drain", "web", "--api", url, "--tls-ca", cert, "--token-file", token}, 0, "web: draining"},
		{"variables", map[string]string{"EBB_API": url, "EBB_TLS_CA": cert, "EBB_TOKEN_FILE": token}, []string{"report"}, 0, "operator"},
		{"no proof", nil, []string{"status", "--api", url, "--tls-ca", cert}, 1, "a bearer token is needed"},
		{"a server that is not known", nil, []string{"status", "--api", url, "--token-file", token}, 1, "certificate"},
		{"not a URL of ours", nil, []string{"status", "--api", url + "/v1"}, 1, "not of the form https://HOST:PORT"},
	} {
		out := newBuffer()
		if code := run(t.Context(), testEnv(dir, out, out, tc.vars, tc.args...)); code != tc.code || !strings.Contains(out.String(), tc.want) {
			t.Errorf("%s: got exit code %d and %s, want %d and %q", tc.name, code, out, tc.code, tc.want)
		}
	}
}

// selfSigned writes a certificate for 127.0.0.1 that is its own signer, good for either side.
func selfSigned(t *testing.T, dir string) (cert, key string) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		KeyUsage:    x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, k.Public(), k)
	if err != nil {
		t.Fatal(err)
	}
	kder, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for path, b := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: der}, key: {Type: "PRIVATE KEY", Bytes: kder}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(b), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return cert, key
}

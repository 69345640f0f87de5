// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/binary"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/agent"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/loadtest"
)

// authority signs certificates.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	file string // its own, PEM
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{t: t, key: newKey(t), file: filepath.Join(t.TempDir(), "ca.pem")}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "an authority"}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, a.key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	replace(t, a.file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	return a
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// replace puts a file into the place of another at once, as whoever renews a secret should.
func replace(t *testing.T, path string, b []byte) {
	t.Helper()
	err := os.WriteFile(path+".new", b, 0o600)
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// pair is the files of a certificate and its key.
type pair struct{ cert, key string }

// issue signs a certificate: for a server at ip, or for a client if there is none.
func (a *authority) issue(name string, ip netip.Addr, until time.Time) pair {
	a.t.Helper()
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		a.t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-24 * time.Hour), NotAfter: until,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	if ip.IsValid() {
		tmpl.IPAddresses, tmpl.ExtKeyUsage = []net.IP{ip.AsSlice()}, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	}
	key := newKey(a.t)
	der, err := x509.CreateCertificate(rand.Reader, tmpl, a.cert, key.Public(), a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	kder, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	dir := a.t.TempDir()
	p := pair{filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")}
	replace(a.t, p.cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	replace(a.t, p.key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: kder}))
	return p
}

// serveAt has the agent's API answer over TCP, with further keys of `api` in YAML.
func (n *node) serveAt(listen, keys string) {
	n.t.Helper()
	b, err := os.ReadFile(n.config)
	if err != nil {
		n.t.Fatal(err)
	}
	replace(n.t, n.config, []byte(strings.Replace(string(b), "app.sock}", fmt.Sprintf("app.sock, listen: %q, %s}", listen, keys), 1)))
}

// elsewhere is the command line of another machine, which finds no socket there.
func (l *lan) elsewhere() *host {
	h := *l.host
	h.ns, h.runDir = l.client, l.t.TempDir()
	h.env = append(slices.Clone(h.env), "EBB_RUN_DIR="+h.runDir)
	return &h
}

// asks runs a command of ebb with flags that say whom to ask, and wants it done, or refused for a reason: then nobody is drained.
func asks(t *testing.T, h *host, at []string, refused string, command ...string) (stdout string) {
	t.Helper()
	stdout, stderr, code := h.ebb(append(command, at...)...)
	if (code != 0) != (refused != "") || !strings.Contains(stderr, refused) {
		t.Errorf("ebb %s: code %d, %s%swant refusal %q", strings.Join(append(command, at...), " "), code, stdout, stderr, refused)
	}
	return stdout
}

// audited waits for the audit of an answered drain over TCP, where no user and no process is known.
func (d *daemon) audited(by string) drain.Event {
	d.n.t.Helper()
	return d.find("audit of a drain by "+by, func(e drain.Event) bool {
		return e.Type == agent.EventAction && e.Fields["by"] == by && e.Fields["action"] == "drain" && e.Fields["uid"] == float64(-1) && e.Fields["status"] == float64(http.StatusOK)
	})
}

// An operator on another machine proves by a certificate who he is, and the audit names it; whoever cannot is told so and
// changes nothing. The files change without a restart.
func TestOperatorsFromAfarByCertificate(t *testing.T) {
	t.Parallel()
	lan := newLAN(t)
	n := nodeOn(lan.host, "")
	n.set(agentBudget + "services:\n" + service("web", n.ns, 8081, "on_new: refuse"))
	ca, other := newAuthority(t), newAuthority(t)
	later := time.Now().Add(time.Hour)
	server, alice := ca.issue("server", lan.link.B.V4, later), ca.issue("alice", netip.Addr{}, later)
	n.serveAt(lan.v4(9443), fmt.Sprintf("tls: {cert: %s, key: %s, client_ca: %s}", server.cert, server.key, ca.file))
	named(t, n.ns, "web", "127.0.0.1:8081")
	d := n.agent()
	n.ready("web")

	afar := lan.elsewhere()
	token := filepath.Join(t.TempDir(), "token")
	replace(t, token, []byte("0123456789abcdef"))
	at := func(ca *authority, p pair) []string {
		flags := []string{"--api", "https://" + lan.v4(9443), "--tls-ca", ca.file}
		if p.cert != "" {
			flags = append(flags, "--tls-cert", p.cert, "--tls-key", p.key)
		}
		return flags
	}
	if out := asks(t, afar, at(ca, alice), "", "status"); !strings.Contains(out, "web") {
		t.Errorf("status: got %s", out)
	}
	for name, tt := range map[string]struct {
		at  []string
		why string
	}{
		"none":                 {at(ca, pair{}), "certificate required"},
		"of another signer":    {at(ca, other.issue("mallory", netip.Addr{}, later)), "unknown certificate authority"},
		"expired":              {at(ca, ca.issue("yesterday's", netip.Addr{}, time.Now().Add(-time.Hour))), "expired certificate"},
		"a server's":           {at(ca, server), "bad certificate"},
		"an unknown server":    {at(other, alice), "certificate signed by unknown authority"},
		"in the clear":         {[]string{"--api", "http://" + lan.v4(9443)}, "HTTP request to an HTTPS server"},
		"a token in place":     {append(at(ca, pair{}), "--token-file", token), "certificate required"},
		"where nobody answers": {[]string{"--api", "https://" + lan.v4(8081), "--tls-ca", ca.file}, "refused"},
	} {
		t.Run(name, func(t *testing.T) { asks(t, afar.as(t), tt.at, tt.why, "drain", "web") })
	}
	if b := n.view("web"); b.State != drain.StateServing || b.Drain != nil {
		t.Errorf("after the refused: %s, drain %+v", b.State, b.Drain)
	}

	asks(t, afar, at(ca, alice), "", "drain", "web", "--wait", "--reason", "from afar")
	e := d.audited("certificate alice")
	if e.Backend != "web" || e.Drain == "" || e.Fields["reason"] != "from afar" {
		t.Errorf("audit: got %+v of %s, drain %q", e.Fields, e.Backend, e.Drain)
	}
	if b := n.view("web"); b.Drain == nil || b.Drain.ID != e.Drain || b.Drain.Outcome != drain.OutcomeDrained || b.Drain.By != "certificate alice" || b.Drain.Reason != "from afar" {
		t.Errorf("the drain: got %+v", b.Drain)
	}

	// The server's certificate and the signer of clients change.
	renewed := other.issue("server", lan.link.B.V4, later)
	for to, from := range map[string]string{server.cert: renewed.cert, server.key: renewed.key, ca.file: other.file} {
		b, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		replace(t, to, b)
	}
	bob := at(other, other.issue("bob", netip.Addr{}, later))
	eventually(t, "who is signed by the new one is known", func() bool {
		_, _, code := afar.ebb(append([]string{"status"}, bob...)...)
		return code == 0
	})
	asks(t, afar, at(other, alice), "unknown certificate authority", "status")
	d.stop()
}

// A token does what a certificate does: on the host's own loopback, and over TLS from another machine. A new one in the file
// counts, and the old one no more.
func TestOperatorsByToken(t *testing.T) {
	t.Parallel()
	for _, secure := range []bool{false, true} {
		t.Run(map[bool]string{false: "loopback", true: "TLS"}[secure], func(t *testing.T) {
			t.Parallel()
			lan := newLAN(t)
			n := nodeOn(lan.host, "")
			n.set(agentBudget + "services:\n" + service("web", n.ns, 8081, "on_new: refuse"))
			dir := t.TempDir()
			file := filepath.Join(dir, "token")
			const first, second = "0123456789abcdef0123", "fedcba9876543210fedc"
			replace(t, file, []byte(first+"\n"))
			from, at, listen, keys := lan.host, []string{"--api", "http://127.0.0.1:9443"}, "127.0.0.1:9443", "token_file: "+file
			if secure {
				ca := newAuthority(t)
				server := ca.issue("server", lan.link.B.V4, time.Now().Add(time.Hour))
				from, at, listen = lan.elsewhere(), []string{"--api", "https://" + lan.v4(9443), "--tls-ca", ca.file}, lan.v4(9443)
				keys += fmt.Sprintf(", tls: {cert: %s, key: %s}", server.cert, server.key)
			}
			n.serveAt(listen, keys)
			named(t, n.ns, "web", "127.0.0.1:8081")
			d := n.agent()
			n.ready("web")
			proof := func(token string) []string {
				mine := filepath.Join(dir, token)
				replace(t, mine, []byte(token))
				return append(slices.Clone(at), "--token-file", mine)
			}
			asks(t, from, at, "a bearer token is needed", "drain", "web")
			asks(t, from, proof(second), "the token is not the right one", "drain", "web")
			if b := n.view("web"); b.State != drain.StateServing || b.Drain != nil {
				t.Errorf("after the refused: %s, drain %+v", b.State, b.Drain)
			}
			asks(t, from, proof(first), "", "drain", "web", "--wait")
			if e := d.audited("token"); e.Drain == "" || e.Backend != "web" {
				t.Errorf("audit: got %+v of %s", e.Fields, e.Backend)
			}

			replace(t, file, []byte(second))
			eventually(t, "the new token is good", func() bool {
				_, _, code := from.ebb(append([]string{"status"}, proof(second)...)...)
				return code == 0
			})
			asks(t, from, proof(first), "the token is not the right one", "status")
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
			eventually(t, "none is good when there is none", func() bool {
				_, stderr, code := from.ebb(append([]string{"status"}, proof(second)...)...)
				return code != 0 && strings.Contains(stderr, "no token is good at present")
			})
			d.stop()
		})
	}
}

// healthServer is grpc.health.v1 as a gRPC server speaks it over cleartext HTTP/2: the status of each service, and NOT_FOUND
// for one that it does not know, in trailers that nothing announces.
type healthServer struct {
	status atomic.Pointer[map[string]byte] // by service; 1 is SERVING, 2 NOT_SERVING
}

func (s *healthServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	msg, err := io.ReadAll(r.Body)
	if err != nil || r.ProtoMajor != 2 || r.Method != http.MethodPost || r.URL.Path != "/grpc.health.v1.Health/Check" ||
		r.Header.Get("Content-Type") != "application/grpc" || len(msg) < 5 || int(binary.BigEndian.Uint32(msg[1:])) != len(msg)-5 {
		w.WriteHeader(http.StatusUnsupportedMediaType)
		return
	}
	service := ""
	if len(msg) > 7 {
		service = string(msg[7:]) // behind the field's tag and one byte of length
	}
	w.Header().Set("Content-Type", "application/grpc")
	status, ok := (*s.status.Load())[service]
	if !ok {
		w.Header().Set("Grpc-Status", "5") // NOT_FOUND; without a message there is one header only
		w.Header().Set("Grpc-Message", "unknown service")
		return
	}
	_, _ = w.Write([]byte{0, 0, 0, 0, 2, 8, status}) // else the reader has gone
	w.Header().Set(http.TrailerPrefix+"Grpc-Status", "0")
}

func (s *healthServer) set(status map[string]byte) { s.status.Store(&status) }

// A backend whose gRPC health service says that it does not serve, or does not know it, gets nothing new, and keeps what it
// has; the answer about one service is none about another. Coming and going is no failure of anything.
func TestD10_AGRPCHealthServiceTakesABackendOutAndBack(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	probe := func(listen, service string) string {
		return fmt.Sprintf("listen: [%q]\nready: {grpc: {port: 9000, service: %q}, interval: 200ms}", listen, service)
	}
	n.set(agentBudget + "services:\n" +
		backendsOf("shop", probe("127.0.0.1:80", "shop.v1.Shop"), "name: shop, match: "+match(n.ns, 8081)) +
		backendsOf("whole", probe("127.0.0.1:81", ""), "name: whole, match: "+match(n.ns, 8082)))
	health := &healthServer{}
	const serving, notServing = 1, 2
	health.set(map[string]byte{"": serving, "shop.v1.Shop": notServing})
	srv := &http.Server{Handler: health, Protocols: new(http.Protocols)}
	srv.Protocols.SetUnencryptedHTTP2(true)
	listener := n.ns.Listen(t, "tcp", "127.0.0.1:9000")
	served := make(chan error, 1)
	go func() { served <- srv.Serve(listener) }()
	t.Cleanup(func() { _ = srv.Close() })
	named(t, n.ns, "shop", "127.0.0.1:8081")
	named(t, n.ns, "whole", "127.0.0.1:8082")
	d := n.agent()
	n.shares("whole", "whole")
	l := n.load(loadtest.Options{Rate: 50, Targets: []loadtest.Target{{Addr: "127.0.0.1:81"}}})
	out := func(why string) {
		t.Helper()
		b := n.awaitView("shop", "left out: "+why, func(b api.Backend) bool {
			return !b.Ready && len(b.Addresses) > 0 && len(b.Addresses[0].Shares) == 0 && strings.Contains(strings.Join(b.Warnings, " "), why)
		})
		if b.State != drain.StateServing || b.Drain != nil {
			t.Errorf("%s: got %s, drain %+v, want one that serves what it has", why, b.State, b.Drain)
		}
		n.mustRefuse("127.0.0.1:80")
	}
	out("NOT_SERVING")
	health.set(map[string]byte{"": serving, "shop.v1.Shop": serving})
	n.shares("shop", "shop")
	kept := dialHTTP(t, n.ns, "127.0.0.1:80")
	for _, tt := range []struct {
		status map[string]byte
		why    string
	}{
		{map[string]byte{"": serving, "shop.v1.Shop": notServing}, "NOT_SERVING"},
		{map[string]byte{"": serving}, "unknown service"},
	} {
		health.set(tt.status)
		out(tt.why)
		kept.get(t, "/")
		health.set(map[string]byte{"": serving, "shop.v1.Shop": serving})
		n.shares("shop", "shop")
		n.mustServe("127.0.0.1:80")
	}
	if r := l.end(); r.Failed > 0 || !slices.Equal(slices.Collect(maps.Keys(r.ServedBy)), []string{"whole"}) {
		t.Errorf("%d of %d failed: %s, by %v", r.Failed, r.OK+r.Failed, verdicts(r), r.ServedBy)
	}
	// Nobody is there to ask.
	if err := srv.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-served; !errors.Is(err, http.ErrServerClosed) {
		t.Errorf("the health service: %v", err)
	}
	out("refused")
	if e := d.all(drain.EventBegin); len(e) > 0 || d.logged(`"level":"ERROR"`) > 0 {
		t.Errorf("%d drains, %d errors in the log, want none", len(e), d.logged(`"level":"ERROR"`))
	}
}

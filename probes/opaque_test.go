// SPDX-License-Identifier: Apache-2.0

package probes

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/internal/netnstest"
)

// certificate is a self-signed one for 127.0.0.1, as PEM.
func certificate(t *testing.T) (cert, key []byte) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{{127, 0, 0, 1}}}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &k.PublicKey, k)
	if err != nil {
		t.Fatal(err)
	}
	kder, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: kder})
}

const pythonTLS = `
import http.server, ssl, sys, threading
class H(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def do_GET(self):
        if self.path == '/wait':
            sys.stdout.write('w'); sys.stdout.flush()
            threading.Event().wait()
        self.send_response(200)
        self.send_header('Content-Length', '6')
        self.end_headers()
        self.wfile.write(b'hello\n')
    def do_POST(self):
        self.rfile.read(int(self.headers['Content-Length']))
        self.do_GET()
    def log_message(self, *a): pass
http.server.ThreadingHTTPServer.request_queue_size = 128
http.server.ThreadingHTTPServer.daemon_threads = True
http.server.ThreadingHTTPServer.handle_error = lambda *a: None
s = http.server.ThreadingHTTPServer(('127.0.0.1', 8443), H)
c = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
c.load_cert_chain(sys.argv[1], sys.argv[2])
s.socket = c.wrap_socket(s.socket, server_side=True, do_handshake_on_connect=False)
s.serve_forever()
`

// goTLS serves the same, with HTTP/2 if the client wants it.
func goTLS(t *testing.T, ns *netnstest.NS, cert, key []byte, waiting *atomic.Int64) string {
	t.Helper()
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	l := ns.Listen(t, "tcp", "127.0.0.1:0")
	ctx, stop := context.WithCancel(context.Background()) // the test's own ends before its clients do
	srv := &http.Server{
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{pair}},
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			if r.URL.Path == "/wait" {
				waiting.Add(1)
				<-ctx.Done()
			}
			io.WriteString(w, "hello\n")
		}),
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		srv.ServeTLS(l, "", "")
	}()
	t.Cleanup(func() {
		stop()
		srv.Close()
		<-done
	})
	return l.Addr().String()
}

func pythonTLSServer(t *testing.T, ns *netnstest.NS, d *Diag, cert, key []byte, waiting *atomic.Int64) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(dir+"/cert", cert, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir+"/key", key, 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := ns.Command(t, "python3", "-c", pythonTLS, dir+"/cert", dir+"/key")
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for b := make([]byte, 1); ; waiting.Add(1) {
			if _, err := out.Read(b); err != nil {
				return
			}
		}
	}()
	t.Cleanup(func() {
		cmd.Process.Kill()
		<-done
		cmd.Wait()
	})
	eventually(t, "the server to listen", func() bool {
		ls, err := Listeners(d, []int{cmd.Process.Pid})
		return err == nil && len(ls) == 1
	})
	return "127.0.0.1:8443"
}

// A request that waits for its answer behind TLS or HTTP/2 is never called idle, however short idle_after is: behind the
// session tickets of the handshake, behind the SETTINGS of HTTP/2, and later on the same connection.
func TestG7_PendingBehindTLSIsNeverIdle(t *testing.T) {
	netnstest.RequireRoot(t)
	const clients = 20
	for _, c := range []struct {
		name   string
		python bool
		h2     bool
		before int // requests answered before
		body   string
	}{
		{name: "OpenSSL, first GET", python: true},
		{name: "OpenSSL, first POST", python: true, body: strings.Repeat("x", 500)},
		{name: "OpenSSL, GET after 3", python: true, before: 3},
		{name: "Go, first GET"},
		{name: "Go, first POST", body: strings.Repeat("x", 500)},
		{name: "Go, GET after 12", before: 12},
		{name: "Go HTTP/2, first GET", h2: true},
		{name: "Go HTTP/2, first POST", h2: true, body: strings.Repeat("x", 500)},
		{name: "Go HTTP/2, GET after 3", h2: true, before: 3},
		{name: "Go HTTP/2, GET after 12", h2: true, before: 12},
	} {
		t.Run(c.name, func(t *testing.T) {
			netnstest.LeakCheck(t)
			ns := netnstest.New(t)
			d := openDiag(t, ns)
			cert, key := certificate(t)
			var addr string
			var waiting atomic.Int64
			if c.python {
				addr = pythonTLSServer(t, ns, d, cert, key, &waiting)
			} else {
				addr = goTLS(t, ns, cert, key, &waiting)
			}
			roots := x509.NewCertPool()
			roots.AppendCertsFromPEM(cert)
			ctx, cancel := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			t.Cleanup(func() {
				cancel()
				wg.Wait()
			})
			for range clients {
				tr := &http.Transport{
					DialContext: ns.DialContext, TLSClientConfig: &tls.Config{RootCAs: roots}, ForceAttemptHTTP2: c.h2, MaxConnsPerHost: 1,
				}
				t.Cleanup(tr.CloseIdleConnections)
				method := http.MethodGet
				if c.body != "" {
					method = http.MethodPost
				}
				ask := func(path string) error {
					req, err := http.NewRequestWithContext(ctx, method, "https://"+addr+path, bytes.NewReader([]byte(c.body)))
					if err != nil {
						return err
					}
					resp, err := tr.RoundTrip(req)
					if err != nil {
						return err
					}
					_, err = io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
					return err
				}
				for range c.before {
					if err := ask("/"); err != nil {
						t.Fatal(err)
					}
				}
				wg.Go(func() {
					if err := ask("/wait"); ctx.Err() == nil {
						t.Errorf("the pending request ended: %v", err)
					}
				})
			}
			_, p, _ := net.SplitHostPort(addr)
			cl := NewClassifier(ClassifierOptions{IdleAfter: 100 * time.Millisecond})
			counts := map[Class]int{}
			quiet := 0
			eventually(t, "a second of silence", func() bool {
				pending := waiting.Load() == clients // before the look
				socks, err := d.Dump(t.Context(), Filter{States: StatesConnected, Info: true})
				if err != nil {
					t.Fatal(err)
				}
				var samples []Sample
				for _, s := range socks {
					if x, _ := SampleFromSocket(s); strings.HasSuffix(s.Local.String(), ":"+p) {
						samples = append(samples, x)
					}
				}
				clear(counts)
				quiet = 0
				for _, v := range cl.Look(time.Now(), samples, false) {
					counts[v.Class]++
					if v.Class == ClassIdle && pending {
						t.Fatalf("called idle: %+v", v)
					}
					if v.IdleFor > time.Second {
						quiet++
					}
				}
				return pending && quiet == clients
			})
			t.Logf("%d pending, quiet for 1 s: %v", clients, counts)
		})
	}
}

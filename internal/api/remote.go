// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"
)

// minToken is the least number of bytes of a token: 128 bits in the densest spelling.
const minToken = 16

// Credentials say how a caller over TCP proves who it is: by a certificate of ClientCA, by the token, or, where both are
// set, by either. Whoever does may do everything. Each file is read again when it changes.
type Credentials struct {
	Cert, Key string // PEM files: the server's own
	ClientCA  string // PEM file: who signs the certificates of clients
	TokenFile string // its one line is the bearer token
}

// Remote admits, over TCP, whoever has the credentials. Without a certificate of the server's own a token would cross the
// network in the clear, so that it is possible on a loopback address alone. nil discards the log.
func Remote(c Credentials, log *slog.Logger) (Access, error) {
	switch {
	case c.ClientCA == "" && c.TokenFile == "":
		return Access{}, errors.New("a caller over TCP must prove who it is; set tls.client_ca or token_file")
	case (c.Cert == "") != (c.Key == ""):
		return Access{}, errors.New("a certificate and its key belong together; set both tls.cert and tls.key")
	case c.ClientCA != "" && c.Cert == "":
		return Access{}, errors.New("clients' certificates need TLS; set tls.cert and tls.key")
	}
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	r := &remote{}
	if c.Cert != "" {
		r.tls = &watched[*tls.Config]{files: []string{c.Cert, c.Key, c.ClientCA}, read: c.tlsConfig}
		if _, err := r.tls.get(); err != nil {
			return Access{}, err
		}
		r.tls.failed = func(err error) { log.Warn("read the API's certificates again, the old ones serve on", "err", err) }
	}
	if c.TokenFile != "" {
		r.token = &watched[[sha256.Size]byte]{files: []string{c.TokenFile}, read: func() ([sha256.Size]byte, error) { return readToken(c.TokenFile) }}
		if _, err := r.token.get(); err != nil {
			return Access{}, err
		}
		r.token.failed = func(err error) { log.Warn("read the API's token again, none is good meanwhile", "err", err) }
	}
	return Access{listen: r.listen, admit: r.admit}, nil
}

type remote struct {
	tls   *watched[*tls.Config]       // nil: clear text
	token *watched[[sha256.Size]byte] // nil: none is good
	cross http.CrossOriginProtection
}

func (r *remote) listen(ln net.Listener) (net.Listener, error) {
	if r.tls == nil {
		if a, ok := ln.Addr().(*net.TCPAddr); !ok || !a.IP.IsLoopback() {
			return nil, fmt.Errorf("a token would cross the network in the clear on %s; set tls.cert and tls.key, or listen on 127.0.0.1", ln.Addr())
		}
		return ln, nil
	}
	return tls.NewListener(ln, &tls.Config{
		MinVersion:         tls.VersionTLS12,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return r.config(), nil },
	}), nil
}

// config is the present one, or the last good one: a certificate and its key do not change at the same instant.
func (r *remote) config() *tls.Config {
	cfg, _ := r.tls.get() // the failure is logged
	return cfg
}

// tlsConfig reads the certificates.
func (c Credentials) tlsConfig() (*tls.Config, error) {
	pair, err := tls.LoadX509KeyPair(c.Cert, c.Key)
	if err != nil {
		return nil, fmt.Errorf("read the certificate of the API: %w", err)
	}
	cfg := &tls.Config{
		MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}, NextProtos: []string{"http/1.1"},
		// A resumed session would outlive a change of the files.
		SessionTicketsDisabled: true,
	}
	if c.ClientCA == "" {
		return cfg, nil
	}
	pem, err := os.ReadFile(c.ClientCA)
	if err != nil {
		return nil, fmt.Errorf("read the certificates that sign clients: %w", err)
	}
	cfg.ClientCAs = x509.NewCertPool()
	if !cfg.ClientCAs.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("read the certificates that sign clients: %s holds none in PEM", c.ClientCA)
	}
	cfg.ClientAuth = tls.RequireAndVerifyClientCert
	if c.TokenFile != "" {
		cfg.ClientAuth = tls.VerifyClientCertIfGiven
	}
	return cfg, nil
}

func readToken(path string) ([sha256.Size]byte, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return [sha256.Size]byte{}, fmt.Errorf("read the API's token: %w", err)
	}
	b = bytes.TrimSpace(b)
	if len(b) < minToken || bytes.ContainsAny(b, " \t\r\n") {
		return [sha256.Size]byte{}, fmt.Errorf("read the API's token: %s does not hold one word of at least %d bytes; make one with: openssl rand -hex 32", path, minToken)
	}
	return sha256.Sum256(b), nil
}

func (r *remote) admit(req *http.Request) (caller, error) {
	nobody := caller{peer: unknownPeer}
	// A browser that holds a certificate sends it whoever's page asks.
	if err := r.cross.Check(req); err != nil {
		return nobody, forbidden("%v", err)
	}
	if s := req.TLS; s != nil && len(s.PeerCertificates) > 0 {
		c := caller{peer: unknownPeer, credential: certificateName(s.PeerCertificates[0])}
		return c, r.verify(s.PeerCertificates)
	}
	if r.token == nil {
		return nobody, unauthorized("a client certificate is needed")
	}
	scheme, token, _ := strings.Cut(req.Header.Get("Authorization"), " ")
	if token == "" || !strings.EqualFold(scheme, "Bearer") {
		return nobody, unauthorized("a bearer token is needed")
	}
	want, err := r.token.get()
	if err != nil {
		// Unlike a certificate: a token that was taken away is good no more.
		return nobody, unauthorized("no token is good at present")
	}
	got := sha256.Sum256([]byte(strings.TrimSpace(token)))
	if subtle.ConstantTimeCompare(got[:], want[:]) != 1 {
		return nobody, unauthorized("the token is not the right one")
	}
	return caller{peer: unknownPeer, credential: "token"}, nil
}

// verify looks at a client's certificate again at each request: it may have expired, or its signer may have been taken
// away, since the connection was made.
func (r *remote) verify(chain []*x509.Certificate) error {
	o := x509.VerifyOptions{Roots: r.config().ClientCAs, Intermediates: x509.NewCertPool(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}
	for _, c := range chain[1:] {
		o.Intermediates.AddCert(c)
	}
	if _, err := chain[0].Verify(o); err != nil {
		return unauthorized("the client certificate is good no more: %v", err)
	}
	return nil
}

// certificateName names the holder of a certificate for a human.
func certificateName(c *x509.Certificate) string {
	name := c.Subject.CommonName
	if name == "" && len(c.DNSNames) > 0 {
		name = c.DNSNames[0]
	}
	if name == "" && len(c.URIs) > 0 {
		name = c.URIs[0].String()
	}
	return "certificate " + cmp.Or(name, "no. "+c.SerialNumber.String())
}

func unauthorized(format string, args ...any) *Problem {
	return &Problem{
		Type: problemType + "unauthorized", Title: "unauthorized", Status: http.StatusUnauthorized, Detail: fmt.Sprintf(format, args...),
	}
}

// watched is what files hold, read again when one of them has changed. It may be used from any goroutine.
type watched[T any] struct {
	files []string
	read  func() (T, error)
	// failed is told when what was good is not any more; nil: nobody.
	failed func(error)

	mu    sync.Mutex
	seen  string
	value T // the last good one
	err   error
}

// settled is how old a file's last change must be for its times to tell the next: coarser than the clock of any file
// system that is still in use.
const settled = 2 * time.Second

// get is the last good value, and what went wrong if the files hold none now.
func (w *watched[T]) get() (T, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	// Before the files are read: what changes in between is seen the next time.
	stamp, young := stampOf(w.files)
	if w.seen == "" || stamp != w.seen {
		v, err := w.read()
		if w.err = err; err == nil {
			w.value = v
		} else if w.failed != nil {
			w.failed(err)
		}
		w.seen = stamp
		if young {
			w.seen = ""
		}
	}
	return w.value, w.err
}

// stampOf tells one state of files from another, and whether one of them is so young that it may not.
func stampOf(files []string) (stamp string, young bool) {
	var b strings.Builder
	b.WriteByte('.') // never empty
	for _, f := range files {
		fi, err := os.Stat(f)
		if err != nil {
			fmt.Fprintf(&b, "%v,", err)
			continue
		}
		var ino uint64
		if st, ok := fi.Sys().(*syscall.Stat_t); ok {
			ino = st.Ino
		}
		fmt.Fprintf(&b, "%d %d %d,", ino, fi.Size(), fi.ModTime().UnixNano())
		young = young || time.Since(fi.ModTime()) < settled
	}
	return b.String(), young
}

// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/internal/api"
)

// authority signs certificates for a test.
type authority struct {
	t    *testing.T
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	file string
}

func newAuthority(t *testing.T, dir, name string) *authority {
	t.Helper()
	a := &authority{t: t, dir: dir, file: filepath.Join(dir, name+".pem")}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	a.key = newKey(t)
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, a.key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	writePEM(t, a.file, "CERTIFICATE", der)
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

func writePEM(t *testing.T, path, kind string, der []byte) {
	t.Helper()
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
}

// issue writes a certificate for name and its key, over those that were there.
func (a *authority) issue(name string, usage x509.ExtKeyUsage) (cert, key string) {
	a.t.Helper()
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		a.t.Fatal(err)
	}
	k := newKey(a.t)
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: name}, NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, ExtKeyUsage: []x509.ExtKeyUsage{usage},
	}, a.cert, k.Public(), a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	kder, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		a.t.Fatal(err)
	}
	cert, key = filepath.Join(a.dir, name+"-cert.pem"), filepath.Join(a.dir, name+"-key.pem")
	writePEM(a.t, cert, "CERTIFICATE", der)
	writePEM(a.t, key, "PRIVATE KEY", kder)
	return cert, key
}

func listenTCP(t *testing.T) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return ln
}

func newRemote(t *testing.T, c api.Credentials) *entrance {
	t.Helper()
	a, err := api.Remote(c, nil)
	if err != nil {
		t.Fatal(err)
	}
	return newEntrance(t, listenTCP(t), a)
}

// ask lists the backends with a client of its own, so over a connection of its own.
func ask(t *testing.T, url string, p api.Proof) error {
	t.Helper()
	c, err := api.DialURL(url, p)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, err = c.Backends(t.Context())
	return err
}

func status(err error) int {
	var p *api.Problem
	if errors.As(err, &p) {
		return p.Status
	}
	return 0
}

func writeToken(t *testing.T, path, token string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(token+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestRemoteByCertificate(t *testing.T) {
	dir := shortTemp(t)
	ca, other := newAuthority(t, dir, "ca"), newAuthority(t, dir, "other")
	cert, key := ca.issue("server", x509.ExtKeyUsageServerAuth)
	e := newRemote(t, api.Credentials{Cert: cert, Key: key, ClientCA: ca.file})
	url := "https://" + e.addr

	alice, aliceKey := ca.issue("alice", x509.ExtKeyUsageClientAuth)
	c, err := api.DialURL(url, api.Proof{CA: ca.file, Cert: alice, Key: aliceKey})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	d, err := c.Drain(t.Context(), "web", api.DrainRequest{Reason: "from afar"})
	if err != nil || d.By != "certificate alice" {
		t.Fatalf("got by %q, %v, want the certificate's name", d.By, err)
	}
	if a := e.lastAudit(); a.UID != -1 || a.By != "certificate alice" || a.Status != 200 {
		t.Errorf("audit: got %+v", a)
	}
	for name, p := range map[string]api.Proof{
		"no certificate":             {CA: ca.file},
		"another signer's":           proofOf(ca, other, "mallory", x509.ExtKeyUsageClientAuth),
		"one that is for servers":    proofOf(ca, ca, "carol", x509.ExtKeyUsageServerAuth),
		"a server that is not known": {CA: other.file, Cert: alice, Key: aliceKey},
	} {
		if err := ask(t, url, p); err == nil {
			t.Errorf("%s: got an answer", name)
		}
	}
	if _, err := tls.Dial("tcp", e.addr, &tls.Config{MaxVersion: tls.VersionTLS11, MinVersion: tls.VersionTLS10, InsecureSkipVerify: true}); err == nil {
		t.Error("TLS 1.1: got a connection")
	}
	// Not over the network in the clear either.
	resp, err := http.Get("http://" + e.addr + "/v1/backends")
	if err == nil {
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusBadRequest {
			t.Errorf("in the clear: got %d", resp.StatusCode)
		}
	}
	if err := ask(t, "http://"+e.addr, api.Proof{}); err == nil || !strings.Contains(err.Error(), "http://"+e.addr+" answered 400 Bad Request: \"Client sent an HTTP request to an HTTPS server.\"") {
		t.Errorf("in the clear: got %v, want what is there instead", err)
	}
	if calls := e.source.Calls(); len(calls) != 1 {
		t.Errorf("the source was asked to %v", calls)
	}

	// The files change: another certificate of the server, and another signer, which ends the good of the old ones on
	// connections that are open as well.
	other.issue("server", x509.ExtKeyUsageServerAuth)
	b, err := os.ReadFile(other.file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(ca.file+".new", b, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(ca.file+".new", ca.file); err != nil {
		t.Fatal(err)
	}
	if err := ask(t, url, proofOf(other, other, "bob", x509.ExtKeyUsageClientAuth)); err != nil {
		t.Errorf("after the change: %v", err)
	}
	if _, err := c.Backends(t.Context()); status(err) != 401 {
		t.Errorf("the open connection of a certificate whose signer is gone: got %v, want 401", err)
	}

	// Half a change: the last good pair serves on.
	if err := os.WriteFile(key, []byte("nonsense"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := ask(t, url, proofOf(other, other, "bob", x509.ExtKeyUsageClientAuth)); err != nil {
		t.Errorf("with a broken key: %v", err)
	}
}

// proofOf is a fresh certificate by signer for a client that trusts ca.
func proofOf(ca, signer *authority, name string, usage x509.ExtKeyUsage) api.Proof {
	cert, key := signer.issue(name, usage)
	return api.Proof{CA: ca.file, Cert: cert, Key: key}
}

func TestRemoteByToken(t *testing.T) {
	dir := shortTemp(t)
	const first, second = "0123456789abcdef0123", "fedcba9876543210fedc"
	tokenFile := filepath.Join(dir, "token")
	writeToken(t, tokenFile, first)
	e := newRemote(t, api.Credentials{TokenFile: tokenFile})
	url := "http://" + e.addr

	proof := func(token string) api.Proof {
		path := filepath.Join(dir, "mine")
		writeToken(t, path, token)
		return api.Proof{TokenFile: path}
	}
	c, err := api.DialURL(url, proof(first))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if d, err := c.Drain(t.Context(), "web", api.DrainRequest{}); err != nil || d.By != "token" {
		t.Fatalf("got by %q, %v, want token", d.By, err)
	}
	if a := e.lastAudit(); a.By != "token" || a.UID != -1 || a.Status != 200 {
		t.Errorf("audit: got %+v", a)
	}
	for name, p := range map[string]api.Proof{"none": {}, "another": proof(second), "a longer one": proof(first + "0")} {
		if err := ask(t, url, p); status(err) != 401 {
			t.Errorf("%s: got %v, want 401", name, err)
		}
	}
	post := func(set func(http.Header)) *http.Response {
		req, err := http.NewRequestWithContext(t.Context(), "POST", url+"/v1/backends/web/cut", nil)
		if err != nil {
			t.Fatal(err)
		}
		set(req.Header)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		_ = resp.Body.Close()
		return resp
	}
	resp := post(func(h http.Header) { h.Set("Authorization", "Basic "+first) })
	if resp.StatusCode != 401 || resp.Header.Get("WWW-Authenticate") != "Bearer" || !resp.Close {
		t.Errorf("another scheme: got %d, WWW-Authenticate %q, closed %v", resp.StatusCode, resp.Header.Get("WWW-Authenticate"), resp.Close)
	}
	if a := e.lastAudit(); a.Action != "cut" || a.Status != 401 || a.By != "unknown" || a.Err == nil {
		t.Errorf("audit of a refusal: got %+v", a)
	}
	// A page in a browser that holds the credentials.
	resp = post(func(h http.Header) {
		h.Set("Authorization", "Bearer "+first)
		h.Set("Origin", "https://evil.example")
	})
	if resp.StatusCode != 403 {
		t.Errorf("from another origin: got %d, want 403", resp.StatusCode)
	}
	http.DefaultClient.CloseIdleConnections()

	writeToken(t, tokenFile, second)
	if _, err := c.Backends(t.Context()); status(err) != 401 {
		t.Errorf("the old token after the change: got %v, want 401", err)
	}
	if err := ask(t, url, proof(second)); err != nil {
		t.Errorf("the new token: %v", err)
	}
	// A token that is taken away is good no more.
	if err := os.Remove(tokenFile); err != nil {
		t.Fatal(err)
	}
	if err := ask(t, url, proof(second)); status(err) != 401 {
		t.Errorf("without the file: got %v, want 401", err)
	}
	writeToken(t, tokenFile, second)
	if err := ask(t, url, proof(second)); err != nil {
		t.Errorf("with the file again: %v", err)
	}
}

// With both, either is enough, and neither is not.
func TestRemoteByEither(t *testing.T) {
	dir := shortTemp(t)
	ca := newAuthority(t, dir, "ca")
	cert, key := ca.issue("server", x509.ExtKeyUsageServerAuth)
	tokenFile := filepath.Join(dir, "token")
	writeToken(t, tokenFile, strings.Repeat("t", 16))
	e := newRemote(t, api.Credentials{Cert: cert, Key: key, ClientCA: ca.file, TokenFile: tokenFile})
	url := "https://" + e.addr
	if err := ask(t, url, api.Proof{CA: ca.file, TokenFile: tokenFile}); err != nil {
		t.Errorf("a token: %v", err)
	}
	if err := ask(t, url, proofOf(ca, ca, "alice", x509.ExtKeyUsageClientAuth)); err != nil {
		t.Errorf("a certificate: %v", err)
	}
	if err := ask(t, url, api.Proof{CA: ca.file}); status(err) != 401 {
		t.Errorf("neither: got %v, want 401", err)
	}
}

func TestRemoteRefusesWhatIsNotSafe(t *testing.T) {
	dir := shortTemp(t)
	ca := newAuthority(t, dir, "ca")
	cert, key := ca.issue("server", x509.ExtKeyUsageServerAuth)
	token, short := filepath.Join(dir, "token"), filepath.Join(dir, "short")
	writeToken(t, token, strings.Repeat("t", 16))
	writeToken(t, short, "secret")
	for _, tc := range []struct {
		c    api.Credentials
		want string
	}{
		{api.Credentials{}, "must prove who it is"},
		{api.Credentials{Cert: cert, Key: key}, "must prove who it is"},
		{api.Credentials{Cert: cert, TokenFile: token}, "set both"},
		{api.Credentials{ClientCA: ca.file}, "need TLS"},
		{api.Credentials{TokenFile: short}, "at least 16 bytes"},
		{api.Credentials{TokenFile: filepath.Join(dir, "none")}, "no such file"},
		{api.Credentials{Cert: cert, Key: key, ClientCA: token}, "holds none in PEM"},
		{api.Credentials{Cert: key, Key: cert, ClientCA: ca.file}, "read the certificate of the API"},
	} {
		if _, err := api.Remote(tc.c, nil); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%+v: got %v, want %q", tc.c, err, tc.want)
		}
	}
	a, err := api.Remote(api.Credentials{TokenFile: token}, nil)
	if err != nil {
		t.Fatal(err)
	}
	srv, err := api.NewServer(api.Options{Source: newFixture(t).source, Log: api.NewLog(api.LogOptions{})})
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := srv.ServeAs(context.Background(), ln, a); err == nil || !strings.Contains(err.Error(), "in the clear") {
		t.Errorf("a token on every address without TLS: got %v", err)
	}
	if _, err := ln.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("the listener is left open: %v", err)
	}
	for url, p := range map[string]api.Proof{
		"ftp://h": {}, "https://": {}, "https://h/v1": {}, "https://u:p@h": {}, "http://192.0.2.1:80": {TokenFile: token},
		"http://127.0.0.1:1": {CA: ca.file}, "https://h": {Cert: cert}, "https://h:1": {TokenFile: ca.file},
	} {
		if c, err := api.DialURL(url, p); err == nil {
			_ = c.Close()
			t.Errorf("DialURL %s %+v: got no error", url, p)
		}
	}
}

// Who opens connections and says nothing, or half a handshake, does not keep others out.
func TestRemoteSilentClients(t *testing.T) {
	dir := shortTemp(t)
	ca := newAuthority(t, dir, "ca")
	cert, key := ca.issue("server", x509.ExtKeyUsageServerAuth)
	e := newRemote(t, api.Credentials{Cert: cert, Key: key, ClientCA: ca.file})
	var first net.Conn
	for i := range 40 {
		c, err := net.Dial("tcp", e.addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := c.Write([]byte{22, 3, 1}); err != nil { // the first bytes of a TLS record
			t.Fatal(err)
		}
		if i == 0 {
			first = c
		}
	}
	if err := ask(t, "https://"+e.addr, proofOf(ca, ca, "alice", x509.ExtKeyUsageClientAuth)); err != nil {
		t.Errorf("beside the silent: %v", err)
	}
	// And they are let go.
	if err := first.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	var buf bytes.Buffer
	if _, err := buf.ReadFrom(first); err != nil && errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a silent client is kept: %v", err)
	}
}

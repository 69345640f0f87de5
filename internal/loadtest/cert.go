// SPDX-License-Identifier: Apache-2.0

package loadtest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"time"
)

// InsecureTLS is a client configuration that accepts every certificate.
func InsecureTLS() *tls.Config { return &tls.Config{InsecureSkipVerify: true} }

// selfSigned makes a certificate for the loopback addresses and its key, both in PEM.
func selfSigned() (cert, key []byte, err error) {
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("make key: %w", err)
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(now.UnixNano()),
		Subject:      pkix.Name{CommonName: "loadtest"},
		NotBefore:    now.Add(-time.Hour),
		NotAfter:     now.Add(24 * time.Hour),
		DNSNames:     []string{"localhost"},
		IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &k.PublicKey, k)
	if err != nil {
		return nil, nil, fmt.Errorf("make certificate: %w", err)
	}
	keyDER, err := x509.MarshalECPrivateKey(k)
	if err != nil {
		return nil, nil, fmt.Errorf("encode key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: keyDER}), nil
}

// writeCertificate puts a new certificate and its key into one file, as nginx and haproxy take it.
func writeCertificate(path string) error {
	cert, key, err := selfSigned()
	if err != nil {
		return err
	}
	if err := os.WriteFile(path, append(cert, key...), 0o600); err != nil {
		return fmt.Errorf("write certificate: %w", err)
	}
	return nil
}

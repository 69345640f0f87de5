// SPDX-License-Identifier: Apache-2.0

package health

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"

	"github.com/ebbproxy/ebb/internal/hook/inside"
)

const (
	// answerMax is how much of an answer is read: an application sees its answer taken, and a long one is not waited for.
	answerMax = 4 << 10
	// sayMax is how much of what a program says is kept for the error.
	sayMax = 200
)

func (c *Checker) askTCP(ctx context.Context) error {
	conn, err := c.dial(ctx, c.probe.TCP.Port)
	if err != nil {
		return err
	}
	return conn.Close()
}

// say keeps the beginning of what a program writes.
type say struct{ text []byte }

func (s *say) Write(b []byte) (int, error) {
	s.text = append(s.text, b[:min(len(b), sayMax-len(s.text))]...)
	return len(b), nil
}

func (c *Checker) askExec(ctx context.Context) error {
	var out say
	err := inside.Run(ctx, inside.Program{NetNS: c.o.NetNS, Argv: c.probe.Exec, Output: &out})
	if text := bytes.TrimSpace(out.text); err != nil && len(text) > 0 {
		return fmt.Errorf("%w: %q", err, text)
	}
	return err
}

// url is for the request line and the default of the Host header; where the connection goes is the transport's matter.
func (c *Checker) url(port uint16, path string) string {
	return "http://" + net.JoinHostPort(c.addrs[0].String(), strconv.Itoa(int(port))) + path
}

func (c *Checker) askHTTP(ctx context.Context) error {
	p := c.probe.HTTP
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.url(p.Port, p.Path), nil)
	if err != nil {
		return err
	}
	req.Host = p.Host // "" is the URL's
	req.Header.Set("User-Agent", "ebb-health")
	resp, err := c.http.RoundTrip(req) // which follows no redirect
	if err != nil {
		return err
	}
	// The status decides; a body that does not come is no matter.
	_, _ = io.CopyN(io.Discard, resp.Body, answerMax)
	resp.Body.Close()
	if resp.StatusCode < 200 || resp.StatusCode > 399 {
		return fmt.Errorf("%s answered %s", req.URL.RequestURI(), resp.Status)
	}
	return nil
}

// gRPC over HTTP/2 is one POST per call, messages with five bytes before each, and the status in the trailers:
// https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md. The service is grpc.health.v1,
// https://github.com/grpc/grpc/blob/master/doc/health-checking.md. That is all of it that is needed here.

// servingStatus are the names of HealthCheckResponse.ServingStatus.
var servingStatus = map[uint64]string{0: "UNKNOWN", 1: "SERVING", 2: "NOT_SERVING", 3: "SERVICE_UNKNOWN"}

const serving = 1

func (c *Checker) askGRPC(ctx context.Context) error {
	p := c.probe.GRPC
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url(p.Port, "/grpc.health.v1.Health/Check"), bytes.NewReader(healthRequest(p.Service)))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/grpc")
	req.Header.Set("Te", "trailers")
	req.Header.Set("User-Agent", "ebb-health")
	resp, err := c.http.RoundTrip(req)
	if err != nil {
		return err
	}
	answer, err := io.ReadAll(io.LimitReader(resp.Body, answerMax))
	resp.Body.Close()
	if err != nil {
		return fmt.Errorf("read answer: %w", err)
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("health service answered HTTP status %s", resp.Status)
	}
	trailer := resp.Trailer
	if resp.Header.Get("Grpc-Status") != "" {
		trailer = resp.Header // an answer without a message has one header only
	}
	if code := trailer.Get("Grpc-Status"); code != "0" {
		return fmt.Errorf("health service answered status %q: %q", code, trailer.Get("Grpc-Message"))
	}
	status, err := healthStatus(answer)
	if err != nil {
		return fmt.Errorf("read answer: %w", err)
	}
	if status != serving {
		return fmt.Errorf("service %q is %s (%d)", p.Service, servingStatus[status], status)
	}
	return nil
}

// healthRequest is a HealthCheckRequest, whose field 1 is the service, as a gRPC message: not compressed, length, bytes.
func healthRequest(service string) []byte {
	var msg []byte
	if service != "" {
		msg = append(binary.AppendUvarint([]byte{1<<3 | 2}, uint64(len(service))), service...)
	}
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(msg))), msg...)
}

var errMessage = errors.New("it is no health check response")

// healthStatus reads a gRPC message that is a HealthCheckResponse: its field 1, a varint, is the status. It has no other
// field, and a status of 0 may be left out.
func healthStatus(b []byte) (uint64, error) {
	if len(b) < 5 || b[0] != 0 || uint64(binary.BigEndian.Uint32(b[1:])) != uint64(len(b)-5) {
		return 0, errMessage
	}
	b = b[5:]
	if len(b) == 0 {
		return 0, nil
	}
	status, n := binary.Uvarint(b[1:])
	if b[0] != 1<<3 || n <= 0 || 1+n != len(b) {
		return 0, errMessage
	}
	return status, nil
}

// SPDX-License-Identifier: Apache-2.0

package probes

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"
)

// Readiness is a probe that asks an application by HTTP whether it is ready. Its methods are safe for concurrent use.
type Readiness struct {
	URL     string
	Timeout time.Duration // for one whole probe; the default is 1 s, as kubelet's
	// DialContext makes the probe's connection, for a caller that must know it or make it in another network namespace.
	// Nil dials directly.
	DialContext func(ctx context.Context, network, address string) (net.Conn, error)
}

// Check asks once, on a connection of its own that is closed afterwards. Ready is any status from 200 to 399; a
// redirect is not followed and no proxy is used. Any other answer, or none, wraps [ErrNotReady].
func (r Readiness) Check(ctx context.Context) error {
	timeout := r.Timeout
	if timeout <= 0 {
		timeout = time.Second
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.URL, nil)
	if err != nil {
		return fmt.Errorf("make readiness request: %w", err)
	}
	req.Header.Set("User-Agent", "ebb-ready")
	tr := &http.Transport{DisableKeepAlives: true, DialContext: r.DialContext}
	defer tr.CloseIdleConnections()
	client := http.Client{
		Transport:     tr,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	resp, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNotReady, err)
	}
	// A little of the body is read so that an application sees its answer taken; a long one is not waited for.
	_, err = io.CopyN(io.Discard, resp.Body, 4<<10)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	err = errors.Join(err, resp.Body.Close())
	if resp.StatusCode < 200 || resp.StatusCode > 399 {
		return fmt.Errorf("%w: %s answered %s", ErrNotReady, r.URL, resp.Status)
	}
	if err != nil {
		return fmt.Errorf("%w: read answer of %s: %w", ErrNotReady, r.URL, err)
	}
	return nil
}

// Ready is [Readiness.Check] of a URL with a timeout.
func Ready(ctx context.Context, url string, timeout time.Duration) error {
	return Readiness{URL: url, Timeout: timeout}.Check(ctx)
}

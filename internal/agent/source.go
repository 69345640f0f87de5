// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/ebbproxy/ebb/internal/api"
)

// readyTimeout bounds one probe of --ready.
const readyTimeout = 2 * time.Second

// serve opens the API socket and, if asked for, the TCP address of probes and metrics.
func (r *runner) serve(ctx context.Context) (closeAPI func(), err error) {
	srv, err := api.NewServer(api.Options{Source: only(r.member), Log: r.events, Metrics: r.metrics.Handler(), Logger: r.log, Audit: r.audited})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	var served sync.WaitGroup
	start := func(f func(context.Context, net.Listener) error, ln net.Listener) {
		served.Go(func() {
			if err := f(ctx, ln); err != nil {
				r.log.Error("serve API", "address", ln.Addr().String(), "err", err)
			}
		})
	}
	start(srv.Serve, r.bound[0])
	for _, ln := range r.bound[1:] {
		start(srv.ServeProbes, ln)
	}
	return func() {
		// The log is closed first, so that followers read the last events and leave.
		if err := r.events.Close(); err != nil {
			r.log.Warn("close event log", "err", err)
		}
		cancel()
		served.Wait()
	}, nil
}

// bind opens the API socket and, if asked for, the TCP address of probes and metrics.
func (r *runner) bind(ctx context.Context) error {
	ln, err := api.Listen(r.paths.sock)
	if err != nil {
		return err
	}
	r.bound = []net.Listener{ln}
	if r.o.Metrics == "" {
		return nil
	}
	// Plain TCP: an MPTCP socket would fit no socket map, and nobody asks for one here.
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	if ln, err = lc.Listen(ctx, "tcp", r.o.Metrics); err != nil {
		return errors.Join(fmt.Errorf("listen for metrics: %w", err), r.unbind())
	}
	r.bound = append(r.bound, ln)
	return nil
}

// unbind closes what bind has opened, unless it was served and is closed already.
func (r *runner) unbind() error {
	var errs []error
	for _, ln := range r.bound {
		if err := ln.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			errs = append(errs, err)
		}
	}
	r.bound = nil
	return errors.Join(errs...)
}

// audited publishes one event for each action that somebody asked for, refused ones too.
func (r *runner) audited(a api.Audit) { r.emit(actionEvent(a)) }

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

// bound is where a run answers.
type bound struct {
	api, apps net.Listener
	probes    net.Listener // nil: nowhere
}

// serve answers where bind has listened.
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
	start(srv.Serve, r.bound.api)
	start(func(ctx context.Context, ln net.Listener) error { return srv.ServeAs(ctx, ln, api.Apps(r.owns)) }, r.bound.apps)
	if r.bound.probes != nil {
		start(srv.ServeProbes, r.bound.probes)
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

// bind opens the sockets of operators and applications and, if asked for, the TCP address of probes and metrics.
func (r *runner) bind(ctx context.Context) error {
	var err error
	if r.bound.api, err = api.Listen(r.paths.sock); err != nil {
		return err
	}
	if r.bound.apps, err = api.ListenAs(r.paths.apps, 0o666, -1); err != nil {
		return errors.Join(fmt.Errorf("serve applications: %w", err), r.unbind())
	}
	if r.o.Metrics == "" {
		return nil
	}
	// Plain TCP: an MPTCP socket would fit no socket map, and nobody asks for one here.
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	if r.bound.probes, err = lc.Listen(ctx, "tcp", r.o.Metrics); err != nil {
		return errors.Join(fmt.Errorf("listen for metrics: %w", err), r.unbind())
	}
	return nil
}

// unbind closes what bind has opened, unless it was served and is closed already.
func (r *runner) unbind() error {
	var errs []error
	for _, ln := range []net.Listener{r.bound.api, r.bound.apps, r.bound.probes} {
		if ln == nil {
			continue
		}
		if err := ln.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			errs = append(errs, err)
		}
	}
	r.bound = bound{}
	return errors.Join(errs...)
}

// owns tells whether a process is CMD's.
func (r *runner) owns(_ context.Context, pid int) (backend string, ok bool) {
	return r.name, r.life().proc.has(pid)
}

// audited publishes one event for each action that somebody asked for, refused ones too.
func (r *runner) audited(a api.Audit) { r.emit(actionEvent(a)) }

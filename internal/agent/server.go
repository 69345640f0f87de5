// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os/user"
	"sync"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
)

// nodeAPI is the API of an agent: what the roster shows, while the agent's own readiness is that it owns the host.
type nodeAPI struct{ roster }

// Ready implements api.Source.
func (nodeAPI) Ready(context.Context) error { return nil }

// entrance is one address of the API and who may come in there.
type entrance struct {
	ln     net.Listener
	access api.Access
	probes bool // health and metrics alone
}

type entrances []entrance

func (es entrances) close() error {
	var errs []error
	for _, e := range es {
		if err := e.ln.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// bind opens what the configuration names.
func (n *node) bind(ctx context.Context) (es entrances, err error) {
	defer func() {
		if err != nil {
			err = errors.Join(err, es.close())
		}
	}()
	c := n.conf()
	gid, err := operators(c.API.Group)
	if err != nil {
		return es, err
	}
	ln, err := api.ListenAs(c.API.Socket, 0o660, gid)
	if err != nil {
		return es, err
	}
	es = append(es, entrance{ln: ln, access: api.Operators(gid)})
	if c.API.AppSocket != "" {
		if ln, err = api.ListenAs(c.API.AppSocket, 0o666, -1); err != nil {
			return es, err
		}
		es = append(es, entrance{ln: ln, access: api.Apps(n.owns)})
	}
	// Plain TCP: an MPTCP socket would fit no socket map, and nobody asks for one here.
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	if c.API.Listen != "" {
		access, err := api.Remote(api.Credentials{Cert: c.API.TLS.Cert, Key: c.API.TLS.Key, ClientCA: c.API.TLS.ClientCA, TokenFile: c.API.TokenFile}, n.log)
		if err != nil {
			return es, err
		}
		if ln, err = lc.Listen(ctx, "tcp", c.API.Listen); err != nil {
			return es, fmt.Errorf("listen for the API: %w", err)
		}
		es = append(es, entrance{ln: ln, access: access})
	}
	if c.Metrics.Listen != "" {
		if ln, err = lc.Listen(ctx, "tcp", c.Metrics.Listen); err != nil {
			return es, fmt.Errorf("listen for metrics: %w", err)
		}
		es = append(es, entrance{ln: ln, probes: true})
	}
	return es, nil
}

// operators is the group of those who may act: the one that is named, else ebb if there is one, else root.
func operators(name string) (gid int, err error) {
	if name == "" {
		if _, err := user.LookupGroup("ebb"); err != nil {
			return 0, nil
		}
		name = "ebb"
	}
	return api.GroupID(name)
}

// serve answers at the entrances until stop is called.
func (n *node) serve(es entrances) (stop func(), err error) {
	srv, err := api.NewServer(api.Options{Source: nodeAPI{n.roster()}, Log: n.events, Metrics: n.metrics.Handler(), Logger: n.log, Audit: n.audited})
	if err != nil {
		return nil, errors.Join(err, es.close())
	}
	ctx, cancel := context.WithCancel(context.Background())
	var served sync.WaitGroup
	for _, e := range es {
		served.Go(func() {
			err := error(nil)
			if e.probes {
				err = srv.ServeProbes(ctx, e.ln)
			} else {
				err = srv.ServeAs(ctx, e.ln, e.access)
			}
			if err != nil {
				n.log.Error("serve API", "address", e.ln.Addr().String(), "err", err)
			}
		})
	}
	return func() {
		// The log is closed first, so that followers read the last events and leave.
		if err := n.events.Close(); err != nil {
			n.log.Warn("close event log", "err", err)
		}
		cancel()
		served.Wait()
	}, nil
}

// audited publishes one event for each action that somebody asked for, refused ones too.
func (n *node) audited(a api.Audit) {
	e := actionEvent(a)
	for _, m := range n.roster()() {
		if m.name == a.Backend {
			m.emit(e)
			return
		}
	}
	e.Backend = a.Backend
	n.emit(e)
}

// actionEvent is the audit of one action.
func actionEvent(a api.Audit) drain.Event {
	e := drain.Event{Type: EventAction, Drain: a.Drain, Fields: map[string]any{
		"action": a.Action, "uid": a.UID, "pid": a.PID, "by": a.By, "reason": a.Reason, "status": a.Status,
	}}
	e.Message = a.Action + " by " + a.By
	if a.Err != nil {
		e.Message += " was refused: " + a.Err.Error()
		e.Fields["err"] = a.Err.Error()
	}
	return e
}

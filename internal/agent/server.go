// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os/user"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/front"
)

// nodeAPI is the API of an agent: what the roster shows, while the agent's own readiness is that it owns the host.
type nodeAPI struct{ roster }

// Ready implements api.Source.
func (nodeAPI) Ready(context.Context) error { return nil }

// entrance is one address of the API and who may come in there.
type entrance struct {
	front.Entrance
	access api.Access // but for probes
}

type entrances []entrance

func (es entrances) close() error {
	var errs []error
	for _, e := range es {
		if err := e.Listener.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// opening is an entrance that the configuration names.
type opening struct {
	what string
	open func(context.Context) (entrance, error)
}

// openings are all but the operators' socket.
func (n *node) openings() (os []opening) {
	c := n.conf()
	// Plain TCP: an MPTCP socket would fit no socket map, and nobody asks for one here.
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	if c.API.AppSocket != "" {
		os = append(os, opening{"applications are not served at " + c.API.AppSocket, func(context.Context) (entrance, error) {
			ln, err := api.ListenAs(c.API.AppSocket, 0o666, -1)
			return entrance{front.Entrance{Kind: front.Apps, Listener: ln}, api.Apps(n.owns)}, err
		}})
	}
	if c.API.Listen != "" {
		os = append(os, opening{"the API is not served at " + c.API.Listen, func(ctx context.Context) (entrance, error) {
			access, err := api.Remote(n.credentials(), n.log)
			if err != nil {
				return entrance{}, err
			}
			ln, err := lc.Listen(ctx, "tcp", c.API.Listen)
			return entrance{front.Entrance{Kind: front.Remote, Listener: ln}, access}, err
		}})
	}
	if c.Metrics.Listen != "" {
		os = append(os, opening{"metrics are not served at " + c.Metrics.Listen, func(ctx context.Context) (entrance, error) {
			ln, err := lc.Listen(ctx, "tcp", c.Metrics.Listen)
			return entrance{front.Entrance{Kind: front.Probes, Listener: ln}, api.Access{}}, err
		}})
	}
	return os
}

// bind opens what the configuration names. Without the operators' socket there is no agent; what else cannot be opened keeps it
// from nothing, and is to be opened later.
func (n *node) bind(ctx context.Context) (es entrances, later []opening, err error) {
	c := n.conf()
	gid, err := operators(c.API.Group)
	if err != nil {
		return nil, nil, err
	}
	until := time.Now().Add(letGoFor)
	e, err := listen(ctx, until, func(context.Context) (entrance, error) {
		ln, err := api.ListenAs(c.API.Socket, 0o660, gid)
		return entrance{front.Entrance{Kind: front.Operators, Listener: ln, GID: gid}, api.Operators(gid)}, err
	})
	if err != nil {
		return nil, nil, err
	}
	es = append(es, e)
	for _, o := range n.openings() {
		if e, err = listen(ctx, until, o.open); err != nil {
			later = append(later, o)
			n.degraded(o.what + ": " + err.Error())
			continue
		}
		es = append(es, e)
	}
	return es, later, nil
}

// letGoFor is how long the front of an agent that was killed may take to let go of its sockets.
const letGoFor = 5 * time.Second

// listen opens an entrance, and waits a little for one that is in use: whoever owns this host alone is the agent.
func listen(ctx context.Context, until time.Time, open func(context.Context) (entrance, error)) (entrance, error) {
	for {
		e, err := open(ctx)
		if err == nil || !errors.Is(err, api.ErrInUse) && !errors.Is(err, unix.EADDRINUSE) || time.Now().After(until) {
			return e, err
		}
		if !wait(ctx, 10*time.Millisecond) {
			return e, err
		}
	}
}

func (n *node) credentials() api.Credentials {
	a := n.conf().API
	return api.Credentials{Cert: a.TLS.Cert, Key: a.TLS.Key, ClientCA: a.TLS.ClientCA, TokenFile: a.TokenFile}
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

// serve answers at the entrances, and at those that can be opened later, until stop is called.
func (n *node) serve(es entrances, later []opening) (stop func(), err error) {
	srv, err := api.NewServer(api.Options{Source: nodeAPI{n.roster()}, Log: n.events, Metrics: n.metrics.Handler(), Logger: n.log, Audit: n.audited})
	if err != nil {
		return nil, errors.Join(err, es.close())
	}
	ctx, cancel := context.WithCancel(context.Background())
	var served sync.WaitGroup
	served.Go(func() { n.answer(ctx, srv, es) })
	for _, o := range later {
		served.Go(func() { n.openLater(ctx, srv, o) })
	}
	return func() {
		// The log is closed first, so that followers read the last events and leave.
		if err := n.events.Close(); err != nil {
			n.log.Warn("close event log", "err", err)
		}
		cancel()
		served.Wait()
		if err := es.close(); err != nil {
			n.log.Warn("close the API's sockets", "err", err)
		}
	}, nil
}

// openEvery is how often an entrance that could not be opened is tried again.
const openEvery = 3 * time.Second

// openLater tries to open an entrance until it is open, and answers there.
func (n *node) openLater(ctx context.Context, srv *api.Server, o opening) {
	for wait(ctx, openEvery) {
		e, err := o.open(ctx)
		if err != nil {
			n.log.Debug("open an entrance of the API", "err", err)
			continue
		}
		at := e.Listener.Addr().String()
		n.log.Info("an entrance of the API could be opened at last", "address", at)
		n.emit(drain.Event{Type: EventAgent, Message: "could be opened at last, and is served: " + at})
		es := entrances{e}
		n.answer(ctx, srv, es)
		if err := es.close(); err != nil {
			n.log.Warn("close the API's sockets", "err", err)
		}
		return
	}
}

// answer answers at the entrances until ctx is over: in a process without privilege, or if there can be none in this one.
func (n *node) answer(ctx context.Context, srv *api.Server, es entrances) {
	if separable() {
		err := front.Serve(ctx, n.frontOptions(es))
		if err == nil {
			return
		}
		if !errors.Is(err, front.ErrUnavailable) {
			n.log.Warn("end the front", "err", err)
			return
		}
		n.degraded("the API is served by the agent itself, which is root: " + err.Error())
	}
	n.serveHere(ctx, srv, es)
}

func (n *node) frontOptions(es entrances) front.Options {
	o := front.Options{
		Source: nodeAPI{n.roster()}, Log: n.events, Owns: n.owns, Credentials: n.credentials(), Metrics: n.metrics.Handler(), Audit: n.audited, Logger: n.log,
		Started: func(pid int) { n.log.Info("the API is served by a process without privilege", "pid", pid) },
		Ended: func(err error) {
			n.log.Warn("the front has ended, and is started again", "err", err)
			n.emit(drain.Event{Type: EventAgent, Message: "the process that serves the API has ended, and is started again: " + err.Error()})
		},
	}
	for _, e := range es {
		o.Entrances = append(o.Entrances, e.Entrance)
		if e.Kind == front.Apps {
			o.Heard = func() { n.heard.Store(new(time.Now())) }
		}
	}
	return o
}

// heardFor is how long a front may say nothing and is still thought to hear what applications say. It pings every 2 s.
const heardFor = 6 * time.Second

// hears tells whether what applications say comes in: their silence counts only then.
func (n *node) hears() bool {
	at := n.heard.Load()
	return n.here.Load() || at != nil && time.Since(*at) < heardFor
}

// serveHere answers at the entrances until ctx is over.
func (n *node) serveHere(ctx context.Context, srv *api.Server, es entrances) {
	var served sync.WaitGroup
	defer served.Wait()
	for _, e := range es {
		if e.Kind == front.Apps {
			n.here.Store(true)
		}
		served.Go(func() {
			err := error(nil)
			if e.Kind == front.Probes {
				err = srv.ServeProbes(ctx, e.Listener)
			} else {
				err = srv.ServeAs(ctx, e.Listener, e.access)
			}
			if err != nil {
				n.log.Error("serve API", "address", e.Listener.Addr().String(), "err", err)
			}
		})
	}
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
	if a.Before > 0 {
		e.Message = fmt.Sprintf("%d more actions, which are not recorded, and then %s", a.Before, e.Message)
		e.Fields["before"] = a.Before
	}
	if a.Err != nil {
		e.Message += " was refused: " + a.Err.Error()
		e.Fields["err"] = a.Err.Error()
	}
	return e
}

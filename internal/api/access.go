// SPDX-License-Identifier: Apache-2.0

package api

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/user"
	"strconv"
)

// Access is who may ask over a listener, and for what. Make one with [Anyone], [Operators], [OperatorsOf], [Apps] or [Remote].
type Access struct {
	// listen puts what the listener needs around it; nil: nothing.
	listen func(net.Listener) (net.Listener, error)
	// owner is the backend whose application has made a connection, empty if none has, so that each gets its share of
	// the connections; nil: they are not told apart.
	owner func(context.Context, *peer) string
	// admit is who asks, or a *Problem. What is known of a caller who is refused is returned too, for the audit.
	admit func(*http.Request) (caller, error)
}

// caller is who asks.
type caller struct {
	*peer
	credential string // the certificate's name or "token"; empty over a Unix socket
	// backend is the only one that an application may ask about; empty: all.
	backend string
	records *rates // bounds what is recorded of them; nil: nothing does
}

// known says whether anybody knows who asks; others may only look.
func (c caller) known() bool { return c.uid >= 0 || c.credential != "" }

// String names the caller for a human. It may ask the user database.
func (c caller) String() string { return cmp.Or(c.credential, c.peer.String()) }

// sees says whether the caller may know about a backend.
func (c caller) sees(backend string) bool { return c.backend == "" || c.backend == backend }

type callerKey struct{}

func callerOf(ctx context.Context) caller {
	if c, ok := ctx.Value(callerKey{}).(caller); ok {
		return c
	}
	return caller{peer: unknownPeer}
}

// Anyone admits whoever can connect: the mode of the socket's file decides. Over TCP, where nobody knows who asks, they may
// only look.
func Anyone() Access {
	return Access{admit: func(req *http.Request) (caller, error) { return caller{peer: peerOf(req.Context())}, nil }}
}

// Operators is OperatorsOf the user of this process.
func Operators(gid int) Access { return OperatorsOf(os.Geteuid(), gid) }

// OperatorsOf admits, over a Unix socket, root, the user uid, whose backends they are, and the members of the group gid: by
// what the kernel says of the process that connected, whatever became of the file's mode. See [GroupID].
func OperatorsOf(uid, gid int) Access {
	return Access{admit: func(req *http.Request) (caller, error) {
		p := peerOf(req.Context())
		c := caller{peer: p}
		if p.uid == 0 || p.uid == uid || p.in(gid) {
			return c, nil
		}
		return c, forbidden("%s is neither root nor in the group %s", p, groupName(gid))
	}}
}

// Apps is AppsOf who always knows.
func Apps(owns func(ctx context.Context, pid int) (backend string, ok bool)) Access {
	return AppsOf(func(ctx context.Context, pid int) (string, error) {
		if b, ok := owns(ctx, pid); ok {
			return b, nil
		}
		return "", nil
	})
}

// AppsOf admits, over a Unix socket, the processes of backends: each may look at its own backend and drain it. owns is the
// backend that has the process, empty if none has; while it cannot say, nobody is refused for good. It is asked when a
// connection comes and for each request, from any goroutine, and must not wait for long: while it does, no connection is
// accepted.
func AppsOf(owns func(ctx context.Context, pid int) (backend string, err error)) Access {
	a := Access{owner: func(ctx context.Context, p *peer) string {
		if p.pid <= 0 {
			return ""
		}
		b, _ := owns(ctx, p.pid) // who cannot be told is as one of none until the request asks
		return b
	}}
	a.admit = func(req *http.Request) (caller, error) {
		p := peerOf(req.Context())
		c := caller{peer: p}
		if p.pid <= 0 {
			return c, forbidden("the process that asks is not one of this host")
		}
		b, err := owns(req.Context(), p.pid)
		if err != nil {
			return c, &Problem{
				Title: "busy", Status: http.StatusServiceUnavailable, retry: true,
				Detail: fmt.Sprintf("it cannot be told which backend process %d belongs to: %v", p.pid, err),
			}
		}
		if b == "" {
			return c, forbidden("process %d belongs to no backend", p.pid)
		}
		// After owns: only now is it certain that owns has not been asked about the pid of another process.
		if !p.alive() {
			return c, forbidden("process %d, which connected, has ended", p.pid)
		}
		c.backend = b
		return c, nil
	}
	return a
}

// GroupID is the id of a group given by name or number; that of root if name is empty.
func GroupID(name string) (int, error) {
	if name == "" {
		return 0, nil
	}
	if n, err := strconv.ParseUint(name, 10, 31); err == nil {
		return int(n), nil
	}
	g, err := user.LookupGroup(name)
	if err != nil {
		return 0, fmt.Errorf("find the group of operators: %w; create it with: groupadd --system %s", err, name)
	}
	return strconv.Atoi(g.Gid)
}

func groupName(gid int) string {
	if g, err := user.LookupGroupId(strconv.Itoa(gid)); err == nil {
		return g.Name
	}
	return strconv.Itoa(gid)
}

func forbidden(format string, args ...any) *Problem {
	return &Problem{
		Type: problemType + "forbidden", Title: "forbidden", Status: http.StatusForbidden, Detail: fmt.Sprintf(format, args...),
	}
}

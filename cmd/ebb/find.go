// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/ebbproxy/ebb/internal/api"
)

// askTimeout is how long an answer may take. A server answers in milliseconds unless it is stopped.
const askTimeout = 5 * time.Second

// located is a backend and whom to ask about it.
type located struct {
	api.Backend
	client *api.Client
}

// silent is a socket that gave no answer.
type silent struct {
	path string
	err  error
}

// hint says what is wrong with the socket and what to do.
func (s silent) hint() string {
	switch {
	case errors.Is(s.err, api.ErrNotAnswering) && returns(s.path):
		return s.path + " is not answering: the node agent has died; start it again with: systemctl start ebb-agent"
	case errors.Is(s.err, fs.ErrNotExist) && returns(s.path):
		return "no node agent runs here (no socket " + s.path + ")"
	case errors.Is(s.err, api.ErrNotAnswering):
		return s.path + " is not answering: its owner has died; start it again under the same name to take over, or remove what is left with: ebb cleanup"
	case errors.Is(s.err, fs.ErrPermission):
		return s.path + " may not be asked by this user: use sudo, or join the group of the socket"
	case errors.Is(s.err, context.DeadlineExceeded):
		return fmt.Sprintf("%s is not answering within %s: its owner may be stopped (SIGSTOP) or starved", s.path, askTimeout)
	}
	return s.err.Error() // names the path itself
}

// where says whom to ask: the server at the address, or all that are found if it is empty.
type where struct {
	address string // a socket's path or a URL
	proof   api.Proof
}

// addAPI adds the flags that say whom to ask.
func addAPI(cmd *cobra.Command, at *where) {
	f := cmd.Flags()
	f.StringVar(&at.address, "api", "", "ask at this `address`, a socket or https://HOST:PORT, instead of at all sockets that are found")
	f.StringVar(&at.proof.TokenFile, "token-file", "", "`file` with the token for --api https://…")
	f.StringVar(&at.proof.CA, "tls-ca", "", "`file` with the signer of the server's certificate")
	f.StringVar(&at.proof.Cert, "tls-cert", "", "`file` with our certificate for --api https://…")
	f.StringVar(&at.proof.Key, "tls-key", "", "`file` with its key")
}

// remote says whether the address is that of another host's server, perhaps.
func remote(address string) bool { return strings.Contains(address, "://") }

// returns says whether the server at an address is expected to come back when it ends: a node agent is, an `ebb run` ends with
// its command.
func returns(address string) bool {
	return remote(address) || slices.Contains([]string{api.AgentSocket, api.AppSocket}, filepath.Base(address))
}

// sockets finds whom to ask.
func (e *environment) sockets(ctx context.Context, at where) ([]api.Found, error) {
	if at.address == "" {
		return api.Discover(ctx, api.RunDirs(e.getenv, e.uid)...)
	}
	f := api.Found{Path: at.address}
	if remote(at.address) {
		f.Client, f.Err = api.DialURL(at.address, at.proof)
	} else {
		f.Client, f.Err = api.Dial(ctx, at.address)
	}
	return []api.Found{f}, nil
}

// backends asks every socket at once and sorts what they say by name.
func (e *environment) backends(ctx context.Context, at where) ([]located, []silent, error) {
	all, bad, _, err := e.ask(ctx, at)
	return all, bad, err
}

// ask is backends, and how many sockets there were to ask.
func (e *environment) ask(ctx context.Context, at where) ([]located, []silent, int, error) {
	found, err := e.sockets(ctx, at)
	if err != nil {
		return nil, nil, 0, err
	}
	out, bad := askAll(ctx, found, func(ctx context.Context, c *api.Client) (ls []located, err error) {
		bs, err := c.Backends(ctx)
		for _, b := range bs {
			ls = append(ls, located{b, c})
		}
		return ls, err
	})
	slices.SortFunc(out, func(a, b located) int {
		return cmp.Or(strings.Compare(a.Service, b.Service), strings.Compare(a.Name, b.Name), strings.Compare(a.client.Path(), b.client.Path()))
	})
	return out, bad, len(found), nil
}

// askAll asks all sockets at once; bad are those that do not answer, by path.
func askAll[T any](ctx context.Context, found []api.Found, ask func(context.Context, *api.Client) ([]T, error)) (out []T, bad []silent) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	var (
		wg sync.WaitGroup
		mu sync.Mutex
	)
	for _, f := range found {
		wg.Go(func() {
			var got []T
			err := f.Err
			if err == nil {
				got, err = ask(ctx, f.Client)
			}
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				bad = append(bad, silent{f.Path, err})
			}
			out = append(out, got...)
		})
	}
	wg.Wait()
	slices.SortFunc(bad, func(a, b silent) int { return strings.Compare(a.path, b.path) })
	return out, bad
}

// find is the backend of that name.
func (e *environment) find(ctx context.Context, at where, name string) (located, error) {
	all, bad, err := e.backends(ctx, at)
	if err != nil {
		return located{}, err
	}
	var hits []located
	var names []string
	for _, b := range all {
		names = append(names, line(b.Name))
		if b.Name == name {
			hits = append(hits, b)
		}
	}
	switch len(hits) {
	case 1:
		return hits[0], nil
	case 0:
		return located{}, e.notFound(name, names, bad)
	}
	var paths []string
	for _, h := range hits {
		paths = append(paths, h.client.Path())
	}
	return located{}, fmt.Errorf("there are %d backends named %q; choose one with --api %s", len(hits), name, strings.Join(paths, " or --api "))
}

func (e *environment) notFound(name string, names []string, bad []silent) error {
	var b strings.Builder
	fmt.Fprintf(&b, "there is no backend %q", name)
	switch {
	case len(names) > 0:
		fmt.Fprintf(&b, "; there are: %s", strings.Join(names, ", "))
		if near := nearest(name, names); near != "" {
			b.WriteString(didYouMean([]string{near}))
		}
	case len(bad) == 0:
		fmt.Fprintf(&b, ": no ebb runs here (no socket in %s); start one with: ebb run --name %s -- CMD, the node agent with: systemctl start ebb-agent",
			strings.Join(api.RunDirs(e.getenv, e.uid), " or "), name)
	}
	for _, s := range bad {
		b.WriteString("\nebb: " + s.hint())
	}
	return errors.New(b.String())
}

// sayHints tells about the sockets that gave no answer.
func (e *environment) sayHints(bad []silent) {
	for _, s := range bad {
		fmt.Fprintf(e.stderr, "ebb: %s\n", s.hint())
	}
}

// completeBackends offers the names of backends to the shell.
func (e *environment) completeBackends(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ctx := cmd.Context()
	if ctx == nil {
		ctx = context.Background()
	}
	all, _, err := e.backends(ctx, where{})
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	var names []string
	for _, b := range all {
		names = append(names, line(b.Name))
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

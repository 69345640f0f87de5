// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"io"
	"net/netip"
	"os"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/discovery"
	"github.com/ebbproxy/ebb/internal/health"
	"github.com/ebbproxy/ebb/internal/hook"
)

// Config is the effective configuration: every default is filled in, and what was left out of a service or a backend is
// inherited. It is read-only once made, and so safe for concurrent use.
type Config struct {
	Mode       drain.Mode // of the node; default observe
	API        API
	Metrics    Metrics
	State      State
	Defaults   Settings // what a service starts from, and what backends get that are in no service of this file
	Services   []Service
	Kubernetes Kubernetes
}

// API says where the agent answers.
type API struct {
	Socket    string // of operators
	AppSocket string // of applications; empty: none
	Listen    string // ADDR:PORT or :PORT; empty: not over TCP
	TLS       TLS
	TokenFile string // file with the token that a TCP client shows; empty: no tokens
	Group     string // may use Socket, besides root; empty: the group ebb if there is one
}

// TLS names the files of API.Listen; each is empty if it is not used.
type TLS struct {
	Cert, Key string
	ClientCA  string // whoever shows a certificate of it is an operator
}

// Metrics says where metrics are served.
type Metrics struct {
	Listen string // ADDR:PORT or :PORT; empty: nowhere
}

// State says where the agent keeps what outlives it.
type State struct {
	Dir   string // journal and lease
	BPFFS string // directory in a bpffs for what is pinned
}

// Kubernetes says whether the pods of this node are backends too.
type Kubernetes struct {
	Enabled     bool
	LabelPrefix string // of labels and annotations, without the slash: ebb.internal of ebb.internal/drain
}

// Settings are what a drain is governed by.
type Settings struct {
	Policy    drain.Policy  // as drain.Validate returned it
	Extension time.Duration // by so much at most an application may extend a drain, once; 0: not at all
	HoldMax   int           // connections parked at most at any moment
	HoldFor   time.Duration // and for so long at most, each
	Retain    time.Duration // for so long the metrics of a backend that is gone stay
	// DrainOnVersionUpgrade lets a ready higher version of the service drain lower ones.
	DrainOnVersionUpgrade bool
}

// DefaultStateDir is State.Dir where nothing else is said.
const DefaultStateDir = "/var/lib/ebb"

// The defaults of Settings, beside those of drain.Policy.
const (
	DefaultHoldMax = 4096
	DefaultHoldFor = 10 * time.Second
	DefaultRetain  = 10 * time.Minute
)

// Service is what clients connect to.
type Service struct {
	Name string
	Mode drain.Mode // effective; of backends that set none
	Settings
	Listen   []netip.AddrPort // its addresses; empty: those at which its backends listen. 0.0.0.0 stands for :PORT
	Health   Health
	Notify   hook.Hook     // zero: none; Policy.NotifyAt says when
	Flush    hook.Hook     // default: SIGTERM
	Ready    *health.Probe // nil: a backend is ready when it listens
	Backends []Backend
}

// Health tells the health checks of a balancer from other late connections.
type Health struct {
	From []netip.Prefix // where they come from; late ones are reset
	Path string         // what they ask for; late ones get a 503
}

// Backend is one workload behind a service: a local one, which Match finds, or a remote one at Address.
type Backend struct {
	Name    string
	Mode    drain.Mode       // effective
	Match   *discovery.Match // nil if it is remote
	Address netip.AddrPort   // not valid if it is local
	Weight  int              // share of new connections relative to the other backends of the service; default 1
	Version int64            // of the application, unless a session of it says another; 0: none
}

// maxSize bounds a configuration, in bytes. One backend takes about a hundred.
const maxSize = 1 << 20

// Load reads the file at path; see Parse.
func Load(path string) (*Config, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read the configuration: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxSize+1))
	if err != nil {
		return nil, fmt.Errorf("read the configuration: %w", err)
	}
	return Parse(path, b)
}

// Parse reads a configuration; an empty one is all defaults. The error joins everything that is wrong (100 things at
// most), in the order of the lines, each as "NAME:LINE: key.path: reason"; a budget that does not fit wraps
// drain.ErrPolicy. Aliases, anchors, merge keys and a second document are refused, as is more than 1 MiB.
func Parse(name string, b []byte) (*Config, error) {
	r := newReader(name)
	return r.config(r.document(b))
}

func newReader(name string) *reader {
	return &reader{file: name, lines: make(map[string]int), bad: make(map[string]bool)}
}

// config reads a document; nil is an empty one.
func (r *reader) config(root *yaml.Node) (*Config, error) {
	c := &Config{
		Mode:       drain.ModeObserve,
		API:        API{Socket: "/run/ebb/ebb.sock", AppSocket: "/run/ebb/app.sock"},
		Metrics:    Metrics{Listen: "127.0.0.1:9402"},
		State:      State{Dir: DefaultStateDir, BPFFS: "/sys/fs/bpf/ebb"},
		Defaults:   Settings{HoldMax: DefaultHoldMax, HoldFor: DefaultHoldFor, Retain: DefaultRetain},
		Kubernetes: Kubernetes{LabelPrefix: "ebb.internal"},
	}
	if root != nil {
		r.value("", root.Line, root, object{keys: c.keys(), check: c.check})
	}
	// Until here the policy of the defaults held only what was set: what follows from the rest (idle from protocol,
	// admit_for from the budget) is each service's own. What is wrong with it has been told.
	if eff, err := drain.Validate(c.Defaults.Policy); err == nil {
		c.Defaults.Policy = eff.Policy
	}
	if err := r.err(); err != nil {
		return nil, err
	}
	return c, nil
}

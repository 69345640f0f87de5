// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/discovery"
	"github.com/ebbproxy/ebb/internal/health"
	"github.com/ebbproxy/ebb/internal/hook"
)

func (c *Config) keys() []key {
	return []key{
		{name: "mode", value: mode(&c.Mode)},
		{name: "api", value: object{check: c.API.check, keys: []key{
			{name: "socket", value: socketPath(&c.API.Socket)},
			{name: "app_socket", value: orNone(socketPath(&c.API.AppSocket))},
			{name: "listen", value: orNone(listenOn(&c.API.Listen))},
			{name: "tls", value: object{keys: []key{
				{name: "cert", value: orNone(absolute(&c.API.TLS.Cert))},
				{name: "key", value: orNone(absolute(&c.API.TLS.Key))},
				{name: "client_ca", value: orNone(absolute(&c.API.TLS.ClientCA))},
			}}},
			{name: "token_file", value: orNone(absolute(&c.API.TokenFile))},
			{name: "group", value: orNone(matching(&c.API.Group, "the name of a group", groupName.MatchString))},
		}}},
		{name: "metrics", value: object{keys: []key{
			{name: "listen", value: orNone(listenOn(&c.Metrics.Listen))},
		}}},
		{name: "state", value: object{keys: []key{
			{name: "dir", value: absolute(&c.State.Dir)},
			{name: "bpffs", value: absolute(&c.State.BPFFS)},
		}}},
		{name: "kubernetes", value: object{check: c.Kubernetes.check, keys: []key{
			{name: "enabled", value: boolean(&c.Kubernetes.Enabled)},
			{name: "label_prefix", value: matching(&c.Kubernetes.LabelPrefix, "a DNS name such as ebb.internal", dnsName)},
		}}},
		// Those who inherit come after what they inherit from.
		{name: "defaults", value: object{keys: c.Defaults.keys(), check: func(r *reader, path string) { r.policy(path, c.Defaults.Policy) }}},
		{name: "services", value: objects[Service]{
			to:    &c.Services,
			make:  func() Service { return Service{Mode: c.Mode, Settings: c.Defaults} },
			keys:  (*Service).keys,
			check: (*Service).check,
		}},
	}
}

func (s *Settings) keys() []key {
	p := &s.Policy
	return []key{
		{name: "protocol", value: word(&p.Protocol, drain.ProtocolOpaque, drain.ProtocolHTTP1)},
		{name: "grace", value: duration(&p.Grace, shortest)},
		{name: "flush_timeout", value: duration(&p.FlushTimeout, shortest)},
		{name: "reserve", value: duration(&p.Reserve, shortest)},
		{name: "extension", value: duration(&s.Extension, 0)},
		{name: "quiet_period", value: duration(&p.QuietPeriod, shortest)},
		{name: "idle", value: word(&p.Idle, drain.IdleIgnore, drain.IdleWait, drain.IdleClose)},
		{name: "idle_after", value: duration(&p.IdleAfter, shortest)},
		{name: "on_new", value: word(&p.OnNew, drain.OnNewAuto, drain.OnNewSteer, drain.OnNewRelay, drain.OnNewHold, drain.OnNewAdmit, drain.OnNewRefuse)},
		{name: "admit_for", value: duration(&p.AdmitFor, 0)},
		{name: "hold_max", value: number(&s.HoldMax, 1, mostHeld)},
		{name: "hold_for", value: duration(&s.HoldFor, shortest)},
		{name: "on_deadline", value: word(&p.OnDeadline, drain.OnDeadlineCut, drain.OnDeadlineReset, drain.OnDeadlineLeave)},
		{name: "close_spread", value: duration(&p.CloseSpread, 0)},
		{name: "max_connection_age", value: duration(&p.MaxAge, 0)},
		{name: "retain", value: duration(&s.Retain, shortest)},
		{name: "drain_on_version_upgrade", value: boolean(&s.DrainOnVersionUpgrade)},
	}
}

func (s *Service) keys() []key {
	notify := hookKeys(&s.Notify)
	notify.keys = append(notify.keys, key{name: "at", value: word(&s.Policy.NotifyAt, drain.NotifyAtBegin, drain.NotifyAtSettled)})
	return slices.Concat([]key{
		{name: "name", value: name(&s.Name), required: true},
		{name: "mode", value: mode(&s.Mode)},
	}, s.Settings.keys(), []key{
		{name: "listen", value: list[netip.AddrPort]{to: &s.Listen, form: addressForm(false), unique: true}},
		{name: "health", value: object{keys: []key{
			{name: "from", value: list[netip.Prefix]{to: &s.Health.From, form: prefixForm(), unique: true}},
			{name: "path", value: orNone(requestPath(&s.Health.Path))},
		}}},
		{name: "notify", value: notify},
		{name: "flush", value: hookKeys(&s.Flush)},
		{name: "ready", value: optional[health.Probe]{to: &s.Ready, make: defaultProbe, keys: probeKeys, check: checkProbe}},
		{name: "backends", required: true, value: objects[Backend]{
			to:    &s.Backends,
			make:  func() Backend { return Backend{Mode: s.Mode, Weight: 1} },
			keys:  (*Backend).keys,
			check: (*Backend).check,
		}},
	})
}

func (b *Backend) keys() []key {
	return []key{
		{name: "name", value: name(&b.Name), required: true},
		{name: "mode", value: mode(&b.Mode)},
		{name: "match", value: optional[discovery.Match]{to: &b.Match, keys: matchKeys, check: checkMatch}},
		{name: "address", value: omit(scalar[netip.AddrPort]{to: &b.Address, form: addressForm(true)})},
		{name: "weight", value: number(&b.Weight, 1, 256)},
		{name: "version", value: omit(number(&b.Version, 1, highestVersion))},
	}
}

func matchKeys(m *discovery.Match) []key {
	return []key{
		{name: "port", value: omit(port(&m.Port))},
		{name: "unit", value: omit(matching(&m.Unit, "the full name of a unit such as nginx.service", unitName.MatchString))},
		{name: "cgroup", value: omit(cgroup(&m.Cgroup))},
		{name: "pid", value: omit(number(&m.PID, 1, 1<<22))}, // PID_MAX_LIMIT, proc(5)
		{name: "netns", value: omit(namespace(&m.NetNS))},
	}
}

func hookKeys(h *hook.Hook) object {
	return object{
		unset: h.IsZero,
		check: func(r *reader, path string) { checkHook(h, r, path) },
		keys: []key{
			{name: "signal", value: omit(scalar[syscall.Signal]{to: &h.Signal, form: signalForm()})},
			{name: "http", value: omit(text(&h.HTTP, "a URL"))},
			{name: "exec", value: argv(&h.Exec)},
			{name: "api", value: omit(boolean(&h.API))},
		},
	}
}

func defaultProbe() health.Probe {
	return health.Probe{
		Interval: health.DefaultInterval, Timeout: health.DefaultTimeout, Fall: health.DefaultFall, Rise: health.DefaultRise,
	}
}

func probeKeys(p *health.Probe) []key {
	return []key{
		{name: "http", value: optional[health.HTTPProbe]{
			to:   &p.HTTP,
			make: func() health.HTTPProbe { return health.HTTPProbe{Path: "/"} },
			keys: func(h *health.HTTPProbe) []key {
				return []key{
					{name: "path", value: requestPath(&h.Path)},
					{name: "port", value: omit(port(&h.Port))},
					{name: "host", value: orNone(matching(&h.Host, "a host name, or a host name and a port", hostHeader.MatchString))},
				}
			},
		}},
		{name: "tcp", value: optional[health.TCPProbe]{to: &p.TCP, keys: func(t *health.TCPProbe) []key {
			return []key{{name: "port", value: omit(port(&t.Port))}}
		}}},
		{name: "grpc", value: optional[health.GRPCProbe]{to: &p.GRPC, keys: func(g *health.GRPCProbe) []key {
			return []key{
				{name: "port", value: omit(port(&g.Port))},
				{name: "service", value: text(&g.Service, "the name of a service")},
			}
		}}},
		{name: "exec", value: argv(&p.Exec)},
		{name: "interval", value: duration(&p.Interval, fastest)},
		{name: "timeout", value: duration(&p.Timeout, shortest)},
		{name: "fall", value: number(&p.Fall, 1, 1000)},
		{name: "rise", value: number(&p.Rise, 1, 1000)},
	}
}

// check comes after the policies, which tell of what they contradict. What this version does not do is refused: nobody may rely
// on a setting that is taken and then ignored.
func (s *Settings) check(r *reader, path string) {
	s.checkExtension(r, path)
	if at := path + ".max_connection_age"; s.Policy.MaxAge > 0 && r.lines[at] != 0 {
		r.refuse(at, "this version does not end connections by their age: leave it out, or 0s")
	}
}

// checkExtension tells what is inherited where it stands, not of every service.
func (s *Settings) checkExtension(r *reader, path string) {
	grace, at := cmp.Or(s.Policy.Grace, drain.DefaultGrace), path+".extension"
	if r.lines[at] == 0 && r.lines[path+".grace"] == 0 {
		return
	}
	for _, of := range []string{path, "defaults"} {
		if r.bad[of+".extension"] || r.bad[of+".grace"] {
			return
		}
	}
	if s.Extension > grace {
		r.refuse(at, "%s is longer than grace %s: a drain could take %s: shorten it to %s or less",
			brief(s.Extension), brief(grace), brief(grace+s.Extension), brief(grace))
	}
}

func (k *Kubernetes) check(r *reader, path string) {
	if k.Enabled {
		r.refuse(path+".enabled", "this version does not look for pods: name them as backends, by match")
	}
}

func (a *API) check(r *reader, path string) {
	if r.bad[path] {
		return
	}
	if a.Socket == a.AppSocket {
		r.refuse(path+".app_socket", "is the socket of the operators too: %s decides by who asks, so that each needs its own", path)
	}
	tls := a.TLS
	switch {
	case (tls.Cert == "") != (tls.Key == ""):
		r.refuse(path+".tls", "cert and key go together")
	case tls.ClientCA != "" && tls.Cert == "":
		r.refuse(path+".tls.client_ca", "needs cert and key")
	}
	if a.Listen == "" {
		if tls != (TLS{}) {
			r.refuse(path+".tls", "has no use without %s.listen", path)
		}
		if a.TokenFile != "" {
			r.refuse(path+".token_file", "has no use without %s.listen", path)
		}
		return
	}
	switch {
	case tls.ClientCA == "" && a.TokenFile == "":
		r.refuse(path+".listen", "whoever reaches %s could drain everything: give tls with client_ca, or token_file", a.Listen)
	case tls.Cert == "" && !onLoopback(a.Listen):
		r.refuse(path+".listen", "the token would travel in clear text: give tls with cert and key, or listen on a loopback address")
	}
}

func (c *Config) check(r *reader, _ string) {
	if c.API.Listen != "" && c.API.Listen == c.Metrics.Listen {
		r.refuse("metrics.listen", "is api.listen too")
	}
	if within(c.State.Dir, c.State.BPFFS) || within(c.State.BPFFS, c.State.Dir) {
		r.refuse("state", "dir %s and bpffs %s must lie outside of each other: a bpffs holds no files", c.State.Dir, c.State.BPFFS)
	}
	c.Defaults.check(r, "defaults")
	var (
		services = make(map[string]string)
		backends = make(map[string]string)
		matches  = make(map[discovery.Match]string)
		listens  = make(map[place]string)
	)
	// claim refuses what has been claimed already by another path.
	claim := func(at, first, format string, a ...any) {
		if first != "" {
			r.refuse(at, "%s by %s on line %d", fmt.Sprintf(format, a...), first, r.lines[first])
		}
	}
	for i := range c.Services {
		s := &c.Services[i]
		sp := fmt.Sprintf("services[%d]", i)
		s.Settings.check(r, sp)
		if r.lines[sp+".retain"] != 0 && !r.bad[sp+".retain"] && !r.bad["defaults.retain"] && s.Retain != c.Defaults.Retain {
			r.refuse(sp+".retain", "this version keeps the metrics of all services equally long: set defaults.retain")
		}
		sessions := func(at string, h hook.Hook) {
			if h.API && c.API.AppSocket == "" && !r.bad["api"] {
				r.refuse(at, "applications have their sessions at api.app_socket, and there is none: give it, or another hook")
			}
		}
		sessions(sp+".notify.api", s.Notify)
		sessions(sp+".flush.api", s.Flush)
		if s.Name != "" {
			claim(sp+".name", services[s.Name], "%q is taken", s.Name)
			services[s.Name] = sp + ".name"
		}
		for j := range s.Backends {
			b := &s.Backends[j]
			bp := fmt.Sprintf("%s.backends[%d]", sp, j)
			if b.Name != "" {
				claim(bp+".name", backends[b.Name], "%q is taken", b.Name)
				backends[b.Name] = bp + ".name"
			}
			if b.Match != nil && !r.bad[bp+".match"] {
				claim(bp+".match", matches[*b.Match], "the same is matched")
				matches[*b.Match] = bp + ".match"
			}
		}
		for j, addr := range s.Listen {
			at := fmt.Sprintf("%s.listen[%d]", sp, j)
			for _, ns := range s.namespaces() {
				p := place{ns, addr}
				if claim(at, listens[p], "%v is listened on", addr); r.bad[at] {
					break // once is enough
				}
				listens[p] = at
			}
		}
	}
}

// place is an address in a network namespace; "" is the host's, or one that only running processes tell.
type place struct {
	netns string
	addr  netip.AddrPort
}

// namespaces are those in which the backends of a service listen, as far as the file tells.
func (s *Service) namespaces() []string {
	var all []string
	for _, b := range s.Backends {
		if b.Match != nil && !slices.Contains(all, b.Match.NetNS) {
			all = append(all, b.Match.NetNS)
		}
	}
	if all == nil {
		all = []string{""}
	}
	return all
}

func (s *Service) check(r *reader, path string) {
	s.Policy = r.policy(path, s.Policy)
	if s.Flush.IsZero() {
		s.Flush.Signal = unix.SIGTERM
	}
	if !r.bad[path+".notify"] && (s.Notify.Signal == unix.SIGKILL || s.Notify.Signal == unix.SIGSTOP) {
		r.refuse(path+".notify.signal", "nothing can wind down at a signal that it cannot catch")
	}
	switch s.Flush.Signal {
	case unix.SIGSTOP, unix.SIGCONT, unix.SIGCHLD:
		r.refuse(path+".flush.signal", "no program ends at it")
	}
	s.checkPort(s.Notify, r, path+".notify")
	s.checkPort(s.Flush, r, path+".flush")
	if s.Ready != nil && !r.bad[path+".ready"] && s.Ready.NeedsPort() {
		for _, b := range s.Backends {
			if b.Match != nil && b.Match.Port == 0 {
				r.refuse(path+".ready", "names no port, and %s is not matched by one: give either", b.Name)
				break
			}
		}
	}
	if s.Backends == nil && r.lines[path+".backends"] != 0 && !r.bad[path+".backends"] {
		r.refuse(path+".backends", "a service needs at least one backend")
	}
}

// checkPort refuses a hook that would come like a client, whom a drain keeps away or sends to somebody else.
func (s *Service) checkPort(h hook.Hook, r *reader, path string) {
	port, ok := h.LoopbackPort()
	for _, b := range s.Backends {
		if ok && b.Match != nil && b.Match.Port == port && !r.bad[path] {
			r.refuse(path+".http", "port %d of %s is what a drain closes: give the application another one for this", port, b.Name)
			return
		}
	}
}

func (b *Backend) check(r *reader, path string) {
	_, match := r.lines[path+".match"]
	_, address := r.lines[path+".address"]
	switch {
	case match && address:
		r.refuse(path, "match says that it is local and address that it is remote: give one of them")
	case !match && !address:
		r.refuse(path, "give match for a local backend or address for a remote one")
	case address && b.Version != 0:
		r.refuse(path+".version", "is of no use: a remote backend is neither drained from here nor known to be ready")
	}
}

func checkMatch(m *discovery.Match, r *reader, path string) {
	if *m == (discovery.Match{}) && !r.bad[path] {
		r.refuse(path, "give at least one of port, unit, cgroup, pid, netns")
	}
}

func checkHook(h *hook.Hook, r *reader, path string) {
	if r.bad[path] {
		return
	}
	if err := h.Validate(); err != nil {
		r.refuse(path, "%w", err)
	}
}

func checkProbe(p *health.Probe, r *reader, path string) {
	if r.bad[path] {
		return
	}
	if err := p.At(1).Validate(); err != nil { // that a port is missing is for Service.check
		r.refuse(path, "%w", err)
	}
}

// onLoopback says whether an address that listenOn has accepted is reached from this host alone.
func onLoopback(listen string) bool {
	host, _, err := net.SplitHostPort(listen)
	ip, perr := netip.ParseAddr(host)
	return errors.Join(err, perr) == nil && ip.IsLoopback()
}

// within says whether a clean path is dir or below it.
func within(p, dir string) bool {
	return p == dir || strings.HasPrefix(p, path.Join(dir, "/")+"/")
}

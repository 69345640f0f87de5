// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/bpf"
	"github.com/ebbproxy/ebb/probes"
)

// Feature is one line of `ebb check`.
type Feature = bpf.Feature

// The states of a feature.
const (
	FeatureOK       = bpf.FeatureOK
	FeatureDegraded = bpf.FeatureDegraded
	FeatureMissing  = bpf.FeatureMissing
)

// Check tries each thing that Ebb uses on this kernel and host, and leaves nothing behind. It decides by trying the
// very feature, never by a version. missing is what `ebb run` cannot do without in its full form; degraded what it has
// another way for.
func Check(ctx context.Context, h HostOptions) []Feature {
	o := bpf.Options{Dir: h.BPFFS}
	fs := []Feature{checkPrivilege()}
	fs = append(fs, bpf.Probe(o)...)
	fs = append(fs, checkPins(o)...)
	fs = append(fs, checkDiag(ctx)...)
	fs = append(fs, checkGetFD(), checkMPTCP(), checkRunDir(h.RunDir))
	if f, ok := checkControl(o); ok {
		fs = append(fs, f)
	}
	return append(fs, checkForeign(o)...)
}

func checkPrivilege() Feature {
	f := Feature{Name: "privilege", State: bpf.FeatureOK, Detail: "root with every capability that Ebb uses"}
	var missing []string
	for _, c := range []struct {
		bit  uint
		name string
	}{{unix.CAP_NET_ADMIN, "NET_ADMIN"}, {unix.CAP_BPF, "BPF"}, {unix.CAP_PERFMON, "PERFMON"}, {unix.CAP_SYS_ADMIN, "SYS_ADMIN"}, {unix.CAP_SYS_PTRACE, "SYS_PTRACE"}} {
		if !hasCap(c.bit) {
			missing = append(missing, "CAP_"+c.name)
		}
	}
	if len(missing) > 0 {
		f.State = bpf.FeatureMissing
		f.Detail = "without " + strings.Join(missing, ", ")
		f.Hint = "run as root, or give these capabilities; without them use `ebb run --datapath none`, which counts by sock_diag and cannot close admission"
	}
	return f
}

// hasCap reads the effective set of the calling thread; before 5.8 BPF and PERFMON are part of SYS_ADMIN.
func hasCap(bit uint) bool {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return false
	}
	return data[bit/32].Effective&(1<<(bit%32)) != 0
}

func checkDiag(ctx context.Context) []Feature {
	diag := Feature{Name: "sock_diag", State: bpf.FeatureOK, Detail: "accept queues, half-open requests and stragglers can be seen"}
	destroy := Feature{Name: "SOCK_DESTROY", State: bpf.FeatureOK, Detail: "connections can be ended at a deadline"}
	d, err := probes.OpenDiag(probes.DiagOptions{NetNS: -1})
	if err == nil {
		defer d.Close()
		_, err = d.Dump(ctx, probes.Filter{States: states(tcpListen)})
	}
	if err != nil {
		diag.State, diag.Detail = bpf.FeatureMissing, err.Error()
		diag.Hint = "load the modules inet_diag and tcp_diag (modprobe tcp_diag)"
		destroy.State, destroy.Detail = bpf.FeatureDegraded, "not tried: sock_diag does not work"
		return []Feature{diag, destroy}
	}
	if err := tryDestroy(ctx, d); err != nil {
		destroy.State, destroy.Detail = bpf.FeatureDegraded, err.Error()
		destroy.Hint = "what is left at a deadline ends with its process; a kernel with CONFIG_INET_DIAG_DESTROY and CAP_NET_ADMIN can force it"
	}
	return []Feature{diag, destroy}
}

// tryDestroy ends a connection that we make to ourselves over loopback.
func tryDestroy(ctx context.Context, d *probes.Diag) error {
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	ln, err := lc.Listen(ctx, "tcp4", "127.0.0.1:0")
	if err != nil {
		return err
	}
	defer ln.Close()
	dialer := net.Dialer{Timeout: time.Second}
	dialer.SetMultipathTCP(false)
	c, err := dialer.DialContext(ctx, "tcp4", ln.Addr().String())
	if err != nil {
		return fmt.Errorf("connect over loopback: %w (is lo up?)", err)
	}
	defer c.Close()
	port := c.LocalAddr().(*net.TCPAddr).AddrPort().Port()
	socks, err := d.Dump(ctx, probes.Filter{States: states(tcpEstablished), LocalPorts: []uint16{port}})
	if err != nil {
		return err
	}
	if len(socks) != 1 {
		return fmt.Errorf("own connection not found among %d sockets", len(socks))
	}
	n, err := d.Destroy(ctx, socks)
	if err == nil && n != 1 {
		err = fmt.Errorf("destroyed %d of 1 connections", n)
	}
	return err
}

func checkGetFD() Feature {
	f := Feature{Name: "pidfd_getfd", State: bpf.FeatureOK, Detail: "idle connections can be retired, survivors asked to end"}
	hint := "idle: close is taken as ignore, and a cut resets at once"
	if b, err := os.ReadFile("/proc/sys/kernel/yama/ptrace_scope"); err == nil && strings.TrimSpace(string(b)) == "3" {
		f.State, f.Detail, f.Hint = bpf.FeatureDegraded, "Yama's ptrace_scope is 3, which nobody may pass", hint
		return f
	}
	pidfd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err == nil {
		defer unix.Close(pidfd)
		var fd int
		if fd, err = unix.PidfdGetfd(pidfd, 0, 0); err == nil {
			unix.Close(fd)
		} else if errors.Is(err, unix.EBADF) {
			err = nil // standard input is closed; the call itself works
		}
	}
	if err != nil {
		f.State, f.Detail, f.Hint = bpf.FeatureDegraded, err.Error(), hint
	}
	return f
}

func checkMPTCP() Feature {
	f := Feature{Name: "MPTCP", State: bpf.FeatureOK, Detail: "off: every listener is plain TCP"}
	b, err := os.ReadFile("/proc/sys/net/mptcp/enabled")
	if err == nil && strings.TrimSpace(string(b)) == "1" {
		f.Detail = "on: listeners of Go programs are MPTCP. They are counted and turned away like others; connections that really speak MPTCP cannot be ended by force at a deadline"
	}
	return f
}

func checkRunDir(dir string) Feature {
	f := Feature{Name: "run directory", State: FeatureOK, Detail: dir}
	at := dir
	for {
		err := unix.Access(at, unix.W_OK|unix.X_OK)
		if err == nil {
			return f
		}
		if !errors.Is(err, unix.ENOENT) || at == filepath.Dir(at) {
			f.State, f.Detail, f.Hint = FeatureMissing, fmt.Sprintf("%s: %v", at, err), "set EBB_RUN_DIR to a directory that can be written"
			return f
		}
		at = filepath.Dir(at) // it would be made
	}
}

// checkControl tells of a kill switch that somebody has left on.
func checkControl(o bpf.Options) (Feature, bool) {
	on, err := bpf.Control(o)
	switch {
	case errors.Is(err, bpf.ErrNotInstalled), errors.Is(err, fs.ErrPermission):
		return Feature{}, false // there is none, or privilege is missing, which is said already
	case err != nil:
		return Feature{Name: "kill switch", State: bpf.FeatureDegraded, Detail: err.Error(), Hint: "`ebb cleanup` removes what another version has left"}, true
	case !on:
		return Feature{Name: "kill switch", State: bpf.FeatureDegraded, Detail: "every admission on this host is held open", Hint: "`ebb open --resume` lifts it"}, true
	}
	return Feature{Name: "kill switch", State: bpf.FeatureOK, Detail: "off"}, true
}

func checkForeign(o bpf.Options) []Feature {
	ns, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil
	}
	defer ns.Close()
	progs, err := bpf.Foreign(o, int(ns.Fd()))
	if err != nil {
		if errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.EPERM) {
			return nil // privilege is missing, which is said already
		}
		return []Feature{{Name: "other BPF programs", State: bpf.FeatureDegraded, Detail: err.Error()}}
	}
	if len(progs) == 0 {
		return []Feature{{Name: "other BPF programs", State: bpf.FeatureOK, Detail: "none beside ours on sk_lookup and sock_ops"}}
	}
	var out []Feature
	for _, p := range progs {
		out = append(out, Feature{
			Name: "other BPF program", State: bpf.FeatureDegraded, Detail: p.String(),
			Hint: foreignMeans(p),
		})
	}
	return out
}

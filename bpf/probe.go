// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/netns"
)

// Feature is what this kernel and host can do for Ebb.
type Feature struct {
	Name   string
	State  string // one of the Feature* states
	Detail string // what was found
	Hint   string // what to do about it, if not ok
}

// The states of a feature.
const (
	FeatureOK       = "ok"
	FeatureDegraded = "degraded"
	FeatureMissing  = "missing"
)

// Probe tries every feature by using it, not by the kernel's version, and leaves nothing behind: it makes
// an installation of its own that is never pinned, and a network namespace that dies with it. The
// programs that it attaches for a moment watch nothing.
func Probe(o Options) []Feature {
	o = o.withDefaults()
	if err := rlimit.RemoveMemlock(); err != nil {
		o.Log.Debug("memlock limit not raised", "err", err)
	}
	fs := []Feature{probeBPFFS(o.Dir)}
	h := &Host{opts: o, links: map[string]link.Link{}, netns: map[uint64]link.Link{}}
	defer h.Close()
	spec, err := loadCensus()
	if err == nil {
		err = spec.LoadAndAssign(&h.maps, nil)
	}
	if err != nil {
		return append(fs, Feature{
			Name: "BPF maps", State: FeatureMissing, Detail: err.Error(),
			Hint: "run as root with CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN on Linux 5.10 or later, or use --datapath none",
		})
	}
	fs = append(fs, probeAdmission(h), probeState(h), probeSockops(h), probeNetNSID())
	fs = append(fs, probeFiles(h)...)
	return append(fs, probeEarly(h))
}

// feature is ok unless err says otherwise.
func feature(name, ok, hint string, err error) Feature {
	if err == nil {
		return Feature{Name: name, State: FeatureOK, Detail: ok}
	}
	return Feature{Name: name, State: FeatureMissing, Detail: firstLine(err), Hint: hint}
}

// firstLine leaves out what a verifier has to say.
func firstLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}

func probeBPFFS(dir string) Feature {
	const name = "BPF file system"
	for parent := filepath.Dir(dir); ; parent = filepath.Dir(parent) {
		if isBPFFS(parent) {
			return Feature{Name: name, State: FeatureOK, Detail: parent}
		}
		if _, err := os.Stat(parent); err == nil || parent == "/" {
			break
		}
	}
	if strings.HasPrefix(dir, bpffsRoot+"/") {
		return Feature{Name: name, State: FeatureOK, Detail: "not mounted; it is mounted on " + bpffsRoot + " when needed"}
	}
	return Feature{
		Name: name, State: FeatureMissing, Detail: dir + " is not in one",
		Hint: "mount one there (mount -t bpf bpf DIR), or choose a directory below " + bpffsRoot,
	}
}

// probeAdmission attaches the program in a namespace that nobody is in.
func probeAdmission(h *Host) Feature {
	prog, err := h.loadAdmission(0)
	if err == nil {
		defer prog.Close()
		err = inEmptyNetNS(prog)
	}
	return feature("admission", "sk_lookup: new connections can be turned away and steered",
		"new connections cannot be closed off: drains use on_new: admit. It needs Linux 5.9, and CAP_NET_ADMIN", err)
}

func inEmptyNetNS(prog *ebpf.Program) error {
	ns, err := netns.New()
	if err != nil {
		return err
	}
	defer ns.Close()
	l, err := link.AttachNetNs(int(ns.Fd()), prog)
	if err != nil {
		return err
	}
	return l.Close()
}

func probeState(h *Host) Feature {
	prog, err := h.loadCensusProgram(censusProgCensusState)
	if err == nil {
		defer prog.Close()
		var l link.Link
		l, err = link.AttachTracing(link.TracingOptions{Program: prog, AttachType: ebpf.AttachTraceRawTp})
		if err == nil {
			// Kept until the end of the probe: sock_ops then tries the program that works beside it.
			h.links[stateLink] = l
		}
	}
	f := feature("count by tracepoint", "inet_sock_set_state with socket storage, compare and swap",
		"counts rest on sock_ops alone (\"unguarded\"): another program that overwrites its flags makes them too high. It needs Linux 5.12 and BTF (CONFIG_DEBUG_INFO_BTF)", err)
	if err != nil {
		f.State = FeatureDegraded
	}
	return f
}

// probeSockops attaches at the root itself: whether another program there is exclusive shows only there.
func probeSockops(h *Host) Feature {
	const name = "count by sock_ops"
	err := func() error {
		prog, err := h.loadSockops()
		if err != nil {
			return err
		}
		defer prog.Close()
		cgroup, err := openCgroup(h.opts.Cgroup)
		if err != nil {
			return err
		}
		defer cgroup.Close()
		l, err := link.AttachRawLink(link.RawLinkOptions{
			Target: int(cgroup.Fd()), Program: prog, Attach: ebpf.AttachCGroupSockOps,
		})
		if err != nil {
			return fmt.Errorf("attach to cgroup %s: %w", cgroup.Name(), err)
		}
		return l.Close()
	}()
	f := feature(name, "at the cgroup v2 root", "", err)
	switch {
	case err == nil:
	case errors.Is(err, unix.EPERM) && os.Geteuid() == 0:
		f.Hint = "another program is attached there exclusively (`bpftool cgroup show`): detach it, or attach it with BPF_F_ALLOW_MULTI"
	default:
		f.Hint = "it needs cgroup v2 (CONFIG_CGROUP_BPF)"
	}
	if err != nil && h.links[stateLink] != nil {
		f.State = FeatureDegraded
		f.Hint += "; counts rest on the tracepoint alone, which misses about one change in a hundred"
	}
	return f
}

// probeEarly attaches the program for a moment with nothing prepared.
func probeEarly(h *Host) Feature {
	e, err := h.OpenEarly()
	if err == nil {
		err = e.Close()
	}
	f := feature("early admission", "signal_generate: a stop signal closes admission before its handler runs",
		"`ebb run --early` does not see a stop signal that another process sends to CMD. It needs Linux 5.5 and BTF", err)
	if err != nil {
		f.State = FeatureDegraded
	}
	return f
}

func probeNetNSID() Feature {
	const name = "network namespace cookies"
	if !netnsByInode() {
		return Feature{Name: name, State: FeatureOK, Detail: "SO_NETNS_COOKIE"}
	}
	return Feature{
		Name: name, State: FeatureDegraded, Detail: "namespaces are told apart by inode number, which the kernel reuses",
		Hint: "rules of a namespace that died are removed before its number is used again; Linux 5.14 has cookies",
	}
}

// probeFiles looks at its own sockets: one listener and one accepted connection.
func probeFiles(h *Host) []Feature {
	const name = "sockets of a process"
	hint := "idle and busy are told apart by sock_diag, which leaves some unknown, and running processes cannot be adopted. It needs Linux 5.11 and BTF"
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return []Feature{feature(name, "", hint, err)}
	}
	defer ln.Close()
	files, err := h.Files(os.Getpid())
	if err == nil {
		err = errors.New("the iterator does not show a listener of this process")
		for _, f := range files {
			if f.State == 10 && f.Local.String() == ln.Addr().String() {
				err = nil
			}
		}
	}
	f := feature(name, "task_file iterator", hint, err)
	if err != nil {
		f.State = FeatureDegraded
		return []Feature{f}
	}
	if !limitsByPID(h) {
		f.State = FeatureDegraded
		f.Detail = "task_file iterator, over all processes"
		f.Hint = "looks cost more on a host with many open files; Linux 6.1 limits them to one process"
	}
	return []Feature{f}
}

// limitsByPID asks for one process and looks whether the kernel takes the request.
func limitsByPID(h *Host) bool {
	fd, err := attachIter(h.files.objs.Files, os.Getpid())
	if err != nil {
		return false
	}
	unix.Close(fd)
	return true
}

// ForeignProgram is a program of somebody else where ours are attached.
type ForeignProgram struct {
	ID     uint32
	Name   string
	Attach string // "sk_lookup" or "sock_ops"
	// AfterOurs says that it runs after ours. A later sk_lookup that selects a socket overrides a
	// refusal; an earlier sock_ops is overridden by what ours does to the flags, and ours by a later
	// one until the next callback.
	AfterOurs bool
	// Exclusive says that nothing can be attached beside it.
	Exclusive bool
}

// String is one line for a report.
func (p ForeignProgram) String() string {
	s := fmt.Sprintf("%s program %q (id %d)", p.Attach, p.Name, p.ID)
	switch {
	case p.Exclusive:
		s += ", exclusive"
	case p.AfterOurs:
		s += ", after ours"
	default:
		s += ", before ours"
	}
	return s
}

// Foreign lists the programs of others on sk_lookup of a network namespace and on sock_ops of the cgroup
// root. Ours are known by the pins in the directory; without an installation all are others'.
func Foreign(o Options, netnsFD int) ([]ForeignProgram, error) {
	o = o.withDefaults()
	id, err := NetNSID(netnsFD)
	if err != nil {
		return nil, fmt.Errorf("list foreign programs: %w", err)
	}
	ours, err := ownPrograms(o, strconv.FormatUint(id, 10))
	if err != nil {
		return nil, fmt.Errorf("list foreign programs: %w", err)
	}
	lookups, err := queryForeign("sk_lookup", ebpf.AttachSkLookup, netnsFD, ours)
	errs := []error{err}
	cgroup, err := openCgroup(o.Cgroup)
	if err != nil {
		errs = append(errs, err)
	} else {
		defer cgroup.Close()
		var ops []ForeignProgram
		ops, err = queryForeign("sock_ops", ebpf.AttachCGroupSockOps, int(cgroup.Fd()), ours)
		errs = append(errs, err)
		lookups = append(lookups, ops...)
	}
	if err := errors.Join(errs...); err != nil {
		return lookups, fmt.Errorf("list foreign programs: %w", err)
	}
	return lookups, nil
}

// ownPrograms are the ids of the programs behind our pinned links, of any version, and of the namespaces whose pins
// match a pattern: there may be hundreds.
func ownPrograms(o Options, netns string) (map[ebpf.ProgramID]bool, error) {
	ours := map[ebpf.ProgramID]bool{}
	names, err := versions(o.Dir)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		for _, pattern := range []string{"links/*", "netns/" + netns} {
			pins, err := filepath.Glob(filepath.Join(o.Dir, name, pattern))
			if err != nil {
				return nil, err
			}
			for _, pin := range pins {
				l, err := link.LoadPinnedLink(pin, nil)
				if err != nil {
					continue // removed meanwhile
				}
				if info, err := l.Info(); err == nil {
					ours[info.Program] = true
				}
				l.Close()
			}
		}
	}
	return ours, nil
}

func queryForeign(attach string, at ebpf.AttachType, fd int, ours map[ebpf.ProgramID]bool) ([]ForeignProgram, error) {
	res, err := link.QueryPrograms(link.QueryOptions{Target: fd, Attach: at})
	if err != nil {
		return nil, fmt.Errorf("query %s: %w", attach, err)
	}
	exclusive := false
	if len(res.Programs) > 0 && at == ebpf.AttachCGroupSockOps {
		// The library does not return the flags of the attachment.
		flags, err := attachFlags(fd, at)
		if err != nil {
			return nil, fmt.Errorf("query %s: %w", attach, err)
		}
		exclusive = flags&unix.BPF_F_ALLOW_MULTI == 0
	}
	var out []ForeignProgram
	after := false
	for _, p := range res.Programs {
		if ours[p.ID] {
			after = true
			continue
		}
		f := ForeignProgram{ID: uint32(p.ID), Attach: attach, AfterOurs: after, Exclusive: exclusive}
		if prog, err := ebpf.NewProgramFromID(p.ID); err == nil {
			if info, err := prog.Info(); err == nil {
				f.Name = info.Name
			}
			prog.Close()
		}
		out = append(out, f)
	}
	return out, nil
}

// attachFlags asks BPF_PROG_QUERY of include/uapi/linux/bpf.h.
func attachFlags(fd int, at ebpf.AttachType) (uint32, error) {
	const progQuery = 16
	attr := struct {
		target, attach, queryFlags, attachFlags uint32
		ids                                     uint64
		count, _                                uint32
	}{target: uint32(fd), attach: uint32(at)}
	_, _, errno := unix.Syscall(unix.SYS_BPF, progQuery, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
	if errno != 0 && errno != unix.ENOSPC {
		return 0, errno
	}
	return attr.attachFlags, nil
}

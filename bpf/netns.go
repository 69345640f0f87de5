// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/netns"
)

// NetNS is a network namespace in which admission works.
type NetNS struct {
	ID uint64 // as in Address and in the kernel
}

// netnsByInode says whether this kernel identifies namespaces by inode number, because it has no
// cookies (SO_NETNS_COOKIE, Linux 5.14). Inode numbers are reused, cookies are not.
var netnsByInode = sync.OnceValue(func() bool {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	_, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	return errors.Is(err, unix.ENOPROTOOPT)
})

// NetNSID is the kernel's id of the network namespace that fd refers to.
func NetNSID(fd int) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, fmt.Errorf("stat network namespace: %w", err)
	}
	if netnsByInode() {
		return st.Ino, nil
	}
	id, err := netns.Cookie(fd)
	if err != nil {
		return 0, fmt.Errorf("read network namespace cookie: %w", err)
	}
	return id, nil
}

// socketNetNS is the id of the namespace of a socket.
func socketNetNS(fd int) (uint64, error) {
	if !netnsByInode() {
		id, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
		if err != nil {
			return 0, fmt.Errorf("read network namespace cookie: %w", err)
		}
		return id, nil
	}
	ns, err := unix.IoctlRetInt(fd, unix.SIOCGSKNS)
	if err != nil {
		return 0, fmt.Errorf("find the socket's network namespace: %w", err)
	}
	defer unix.Close(ns)
	return NetNSID(ns)
}

// AttachNetNS makes admissions work in the network namespace that fd refers to, unless they do
// already. The program stays until the namespace or the installation goes; pins of namespaces that are
// gone are removed on the way. ErrNotSupported without sk_lookup.
func (h *Host) AttachNetNS(fd int) (NetNS, error) {
	id, err := NetNSID(fd)
	if err != nil {
		return NetNS{}, err
	}
	if !h.HasAdmission() {
		return NetNS{ID: id}, fmt.Errorf("attach admission: %w", ErrNotSupported)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return NetNS{}, fmt.Errorf("stat network namespace: %w", err)
	}
	lock, err := flock(filepath.Dir(h.opts.Dir))
	if err != nil {
		return NetNS{}, fmt.Errorf("attach admission: %w", err)
	}
	defer lock.Close()

	h.mu.Lock()
	defer h.mu.Unlock()
	// Not for each of hundreds of namespaces that are attached at once.
	if now := time.Now(); now.Sub(h.collected) > collectEvery {
		h.collected = now
		h.collectNetNS()
	}
	if h.closed {
		return NetNS{}, os.ErrClosed
	}
	if err := h.present(); err != nil {
		return NetNS{}, fmt.Errorf("attach admission: %w", err)
	}
	pin := h.netnsPin(id)
	l, err := link.LoadPinnedLink(pin, nil)
	if err == nil && netnsInode(l) == uint32(st.Ino) {
		h.keep(id, l)
		return NetNS{ID: id}, nil
	}
	if err == nil {
		l.Close()
		if err := os.Remove(pin); err != nil {
			return NetNS{}, fmt.Errorf("remove stale admission: %w", err)
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return NetNS{}, damaged("admission", err)
	}
	prog, err := h.loadAdmission(id)
	if err != nil {
		return NetNS{}, err
	}
	defer prog.Close()
	nl, err := link.AttachNetNs(fd, prog)
	if err != nil {
		return NetNS{}, fmt.Errorf("attach admission: %w", err)
	}
	if err := nl.Pin(pin); err != nil {
		nl.Close()
		return NetNS{}, fmt.Errorf("pin admission: %w", err)
	}
	h.keep(id, nl)
	h.opts.Log.Info("admission attached", "netns", id)
	return NetNS{ID: id}, nil
}

func (h *Host) keep(id uint64, l link.Link) {
	if old := h.netns[id]; old != nil {
		old.Close()
	}
	h.netns[id] = l
}

func (h *Host) netnsPin(id uint64) string {
	return filepath.Join(h.opts.version(), "netns", strconv.FormatUint(id, 10))
}

// netnsInode is the inode number of a link's namespace, 0 once that is gone.
func netnsInode(l link.Link) uint32 {
	info, err := l.Info()
	if err != nil || info.NetNs() == nil {
		return 0
	}
	return info.NetNs().NetnsInode
}

// collectEvery is how often AttachNetNS at most looks for namespaces that are gone.
const collectEvery = time.Second

// collectNetNS removes the pins of namespaces that are gone: their links read inode 0.
func (h *Host) collectNetNS() {
	pins, err := os.ReadDir(filepath.Join(h.opts.version(), "netns"))
	if err != nil {
		return
	}
	for _, p := range pins {
		path := filepath.Join(h.opts.version(), "netns", p.Name())
		l, err := link.LoadPinnedLink(path, nil)
		if err != nil {
			continue
		}
		if netnsInode(l) == 0 && os.Remove(path) == nil {
			h.opts.Log.Debug("admission of a namespace that is gone removed", "netns", p.Name())
		}
		l.Close()
	}
}

// loadAdmission loads the program for one namespace. It has one instance per namespace because no
// helper tells sk_lookup where it runs.
func (h *Host) loadAdmission(id uint64) (*ebpf.Program, error) {
	spec, err := loadAdmission()
	if err != nil {
		return nil, err
	}
	if err := spec.Variables[admissionVarNetnsId].Set(id); err != nil {
		return nil, fmt.Errorf("set namespace of admission: %w", err)
	}
	var objs struct {
		Admission *ebpf.Program `ebpf:"admission"`
	}
	if err := spec.LoadAndAssign(&objs, &ebpf.CollectionOptions{MapReplacements: h.replacements(spec)}); err != nil {
		return nil, fmt.Errorf("load admission: %w", err)
	}
	return objs.Admission, nil
}

// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/ebbproxy/ebb/internal/netnstest"
)

// programs are the ids of the programs that are attached.
func programs(t *testing.T, o Options) (ids map[ebpf.ProgramID]bool) {
	t.Helper()
	ids, err := ownPrograms(o, "*")
	if err != nil {
		t.Fatal(err)
	}
	return ids
}

// tree lists what is below a directory, directories with a slash.
func tree(t *testing.T, dir string) []string {
	t.Helper()
	var paths []string
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, path)
		if strings.HasSuffix(rel, ".debug") {
			return nil // the kernel's own, in every BPF file system
		}
		if d.IsDir() {
			rel += "/"
		}
		paths = append(paths, rel)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return paths
}

func TestG9_ConcurrentInstallsShareOneInstallation(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	o := options(t)
	var helpers []*process
	for range 4 {
		cmd := ns.Command(t, "/proc/self/exe", "install", o.Dir)
		cmd.Env = append(os.Environ(), helperEnv+"=1")
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		helpers = append(helpers, &process{Cmd: cmd, in: in, out: bufio.NewReader(out)})
	}
	for _, p := range helpers {
		p.line(t)
	}
	names, err := versions(o.Dir)
	if err != nil || len(names) != 1 || names[0] != layoutName {
		t.Errorf("got versions %v, %v, want one %s", names, err, layoutName)
	}
	h, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	if ids := programs(t, o); len(ids) == 0 || len(ids) != len(h.links) {
		t.Errorf("got %d attached programs, want the %d hooks", len(ids), len(h.links))
	}
	alone := installed(t, options(t))
	if h.Guarded() != alone.Guarded() || h.HasAdmission() != alone.HasAdmission() {
		t.Errorf("guarded %v, admission %v, unlike one that was installed alone", h.Guarded(), h.HasAdmission())
	}
	// Somebody uses it: it stays.
	if removed, err := h.Release(); removed || err != nil {
		t.Errorf("release beside others: got %v, %v", removed, err)
	}
	for i, p := range helpers {
		if i%2 == 0 {
			p.kill9()
		} else {
			p.end(t)
		}
	}
	setRule(t, h, 7, BackendRule{})
	if removed, err := h.Release(); removed || err != nil {
		t.Errorf("release with a backend: got %v, %v", removed, err)
	}
	if err := h.RemoveBackend(7); err != nil {
		t.Fatal(err)
	}
	if removed, err := h.Release(); !removed || err != nil {
		t.Errorf("release by the last user: got %v, %v", removed, err)
	}
	if left := tree(t, filepath.Dir(o.Dir)); len(left) != 1 {
		t.Errorf("left behind: %v", left)
	}
	if _, err := Open(o); !errors.Is(err, ErrNotInstalled) {
		t.Errorf("open after release: got %v, want %v", err, ErrNotInstalled)
	}
}

// G2: clean-up leaves nothing, from every state.
func TestG2_CleanupLeavesNothing(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	o := options(t)
	if removed, err := Cleanup(o); len(removed) != 0 || err != nil {
		t.Fatalf("nothing there: got %v, %v", removed, err)
	}
	h, err := Install(o)
	if err != nil {
		t.Fatal(err)
	}
	id := attach(t, h, ns)
	watchSelf(t, h, Watch{Backend: 7, Gen: 1, Only: []uint16{4800}})
	ln := ns.Listen(t, "tcp", "127.0.0.1:4800")
	go serve(ln)
	admit(t, h, id, addrPort(ln.Addr()), false, 7)
	refuse(t, h, 7)
	// What an installer that was killed leaves, and another version.
	unfinished := filepath.Join(o.Dir, "v1-new-1")
	for _, dir := range []string{unfinished, filepath.Join(unfinished, "maps"), filepath.Join(o.Dir, "v7")} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Pin(filepath.Join(o.Dir, "v7", "something")); err != nil {
		t.Fatal(err)
	}
	m.Close()
	if !refused(ns, ln.Addr().String()) {
		t.Fatal("not refused")
	}
	removed, err := Cleanup(o)
	if err != nil || len(removed) < 15 {
		t.Errorf("clean up: got %d pins, %v", len(removed), err)
	}
	if left := tree(t, filepath.Dir(o.Dir)); len(left) != 1 {
		t.Errorf("left behind: %v", left)
	}
	// h still holds links and maps, but they do nothing.
	if refused(ns, ln.Addr().String()) {
		t.Error("still refused after clean-up")
	}
	// D4: what no longer counts must not be read as a count.
	if cs, err := h.Counts(7); !errors.Is(err, ErrNotInstalled) {
		t.Errorf("counts after clean-up: got %+v, %v, want %v", cs, err, ErrNotInstalled)
	}
	if removed, err := Cleanup(o); len(removed) != 0 || err != nil {
		t.Errorf("again: got %v, %v", removed, err)
	}
	if err := h.Close(); err != nil {
		t.Error(err)
	}
}

// What is pinned under this layout's name must be of it.
func TestD12_AnotherShapeIsRefused(t *testing.T) {
	o := options(t)
	h := installed(t, o)
	pin := mapPin(h.opts.version(), "drains")
	if err := os.Remove(pin); err != nil {
		t.Fatal(err)
	}
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 8, ValueSize: 4, MaxEntries: 4096})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := m.Pin(pin); err != nil {
		t.Fatal(err)
	}
	for name, f := range map[string]func(Options) (*Host, error){"open": Open, "install": Install} {
		if _, err := f(o); !errors.Is(err, ErrLayout) || !strings.Contains(err.Error(), "ebb cleanup") {
			t.Errorf("%s: got %v, want %v with advice", name, err, ErrLayout)
		}
	}
	if ids := programs(t, o); len(ids) != len(h.links) {
		t.Errorf("the installation in use was touched: got %d programs attached, want %d", len(ids), len(h.links))
	}
}

// A BPF file system can be open to all, so the directory may have been put there by another user.
func TestDirectoryOfAnotherUserIsRefused(t *testing.T) {
	o := options(t)
	netnstest.RequireRoot(t)
	if err := os.Mkdir(o.Dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		uid  int
		mode os.FileMode
		ok   bool
	}{{0, 0o700, true}, {12345, 0o700, false}, {0, 0o777, false}} {
		if err := errors.Join(os.Chown(o.Dir, tt.uid, -1), os.Chmod(o.Dir, tt.mode)); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(o); errors.Is(err, ErrNotInstalled) != tt.ok {
			t.Errorf("uid %d, mode %v: got %v, want ok %v", tt.uid, tt.mode, err, tt.ok)
		}
	}
}

// A binary with other programs of the same revision, or of an older one, replaces them in place; one with
// older programs leaves newer ones.
func TestUpgradeReplacesProgramsInPlace(t *testing.T) {
	ns := netnstest.New(t)
	o := options(t)
	h := installed(t, o)
	attach(t, h, ns)
	before := programs(t, o)
	if len(before) != len(h.links)+1 {
		t.Fatalf("got programs %v, want %d hooks and an admission", before, len(h.links))
	}
	again := func() map[ebpf.ProgramID]bool {
		t.Helper()
		h2, err := Install(o)
		if err != nil {
			t.Fatal(err)
		}
		h2.Close()
		return programs(t, o)
	}
	if got := again(); fmt.Sprint(got) != fmt.Sprint(before) {
		t.Errorf("the same binary replaced programs: %v, then %v", before, got)
	}
	if err := h.maps.Meta.Put(metaRevision, uint64(revision+1)); err != nil {
		t.Fatal(err)
	}
	if err := h.maps.Meta.Put(metaDigest, uint64(1)); err != nil {
		t.Fatal(err)
	}
	if got := again(); fmt.Sprint(got) != fmt.Sprint(before) {
		t.Errorf("an older binary replaced newer programs: %v, then %v", before, got)
	}
	if err := h.maps.Meta.Put(metaRevision, uint64(revision)); err != nil {
		t.Fatal(err)
	}
	got := again()
	if len(got) != len(before) {
		t.Fatalf("got programs %v, want as many as in %v", got, before)
	}
	for id := range got {
		if before[id] {
			t.Errorf("program %d was not replaced", id)
		}
	}
}

func TestG4_ForeignProgramsAreNamed(t *testing.T) {
	ns := netnstest.New(t)
	o := options(t)
	lookup := func(name string) link.Link {
		t.Helper()
		prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
			Name: name, Type: ebpf.SkLookup, AttachType: ebpf.AttachSkLookup, License: "GPL",
			Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, skPass), asm.Return()},
		})
		if err != nil {
			t.Fatal(err)
		}
		defer prog.Close()
		l, err := link.AttachNetNs(ns.Fd(), prog)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		return l
	}
	lookup("ebbt_early")
	h := installed(t, o)
	attach(t, h, ns)
	lookup("ebbt_late")
	late := clobber(t, 1) // port 1: nobody's
	progs, err := Foreign(o, ns.Fd())
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]bool{"ebbt_early": false, "ebbt_late": true, "ebbt_clobber": true}
	for _, p := range progs {
		after, ok := want[p.Name]
		if !ok || p.Attach == "sock_ops" && p.ID != late {
			continue // of another process on this host
		}
		delete(want, p.Name)
		if p.AfterOurs != after || p.Exclusive || p.ID == 0 || !strings.Contains(p.String(), p.Name) {
			t.Errorf("got %+v, want after ours %v and not exclusive", p, after)
		}
		if (p.Attach == "sock_ops") != (p.Name == "ebbt_clobber") {
			t.Errorf("got %+v, attached at %s", p, p.Attach)
		}
	}
	if len(want) != 0 {
		t.Errorf("not named: %v, got %+v", want, progs)
	}
	for _, p := range progs {
		if p.Name == "admission" && p.Attach == "sk_lookup" {
			t.Errorf("our own program is named as foreign: %+v", p)
		}
	}
}

// clobber attaches a sock_ops program after ours, which asks for round-trip times of the sockets on a local port as
// other tools do: by overwriting all callback flags when a connection is established.
func clobber(t *testing.T, port int32) (id uint32) {
	t.Helper()
	// Offsets in struct bpf_sock_ops, an operation and a flag of include/uapi/linux/bpf.h.
	const op, localPort, passiveEstablished, rttFlag = 0, 68, 5, 8
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "ebbt_clobber", Type: ebpf.SockOps, AttachType: ebpf.AttachCGroupSockOps, License: "GPL",
		Instructions: asm.Instructions{
			asm.LoadMem(asm.R2, asm.R1, localPort, asm.Word),
			asm.JNE.Imm(asm.R2, port, "out"),
			asm.LoadMem(asm.R2, asm.R1, op, asm.Word),
			asm.JNE.Imm(asm.R2, passiveEstablished, "out"),
			asm.Mov.Imm(asm.R2, rttFlag),
			asm.FnSockOpsCbFlagsSet.Call(),
			asm.Mov.Imm(asm.R0, 1).WithSymbol("out"),
			asm.Return(),
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer prog.Close()
	cgroup, err := openCgroup("")
	if err != nil {
		t.Fatal(err)
	}
	defer cgroup.Close()
	l, err := link.AttachRawLink(link.RawLinkOptions{Target: int(cgroup.Fd()), Program: prog, Attach: ebpf.AttachCGroupSockOps})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	info, err := l.Info()
	if err != nil {
		t.Fatal(err)
	}
	return uint32(info.Program)
}

func TestProbeFindsWhatInstallUsesAndLeavesNothing(t *testing.T) {
	netnstest.LeakCheck(t)
	o := options(t)
	fs := Probe(o)
	if left := tree(t, filepath.Dir(o.Dir)); len(left) != 1 {
		t.Errorf("the probe left %v", left)
	}
	h := installed(t, o)
	states := map[string]string{}
	for _, f := range fs {
		states[f.Name] = f.State
		if f.Detail == "" || f.State != FeatureOK && f.Hint == "" {
			t.Errorf("%+v: want a detail, and a hint unless ok", f)
		}
	}
	for name, have := range map[string]bool{
		"admission":           h.HasAdmission(),
		"count by tracepoint": h.links[stateLink] != nil,
		"count by sock_ops":   h.links[sockopsLink] != nil,
	} {
		if (states[name] == FeatureOK) != have {
			t.Errorf("%s: probe says %q, install has it: %v", name, states[name], have)
		}
	}
}

func TestErrorsAreNamed(t *testing.T) {
	netnstest.RequireRoot(t)
	h := installed(t, options(t))
	if err := h.maps.Errors.Put(uint32(2), uint64(5)); err != nil {
		t.Fatal(err)
	}
	got, err := h.Errors()
	if err != nil || len(got) != len(errorNames) || got["ring_full"] != 5 || got["counts_full"] != 0 {
		t.Errorf("got %v, %v", got, err)
	}
}

// A full map of counts leaves the listener untagged and says so: it must not look like a listener without
// connections (D4).
func TestD4_FullCountsAreAnError(t *testing.T) {
	ns := netnstest.New(t)
	h := installed(t, options(t))
	watchSelf(t, h, Watch{Backend: 7, Gen: 1, Only: []uint16{4810}})
	const room = 8192
	keys, values := make([]uint64, room), make([]censusCount, room)
	for i := range keys {
		keys[i], values[i].Backend = 1<<60+uint64(i), 99
	}
	if _, err := h.maps.Counts.BatchUpdate(keys, values, nil); err != nil {
		t.Fatal(err)
	}
	ns.Listen(t, "tcp", "127.0.0.1:4810")
	if got, err := h.Errors(); err != nil || got["counts_full"] == 0 {
		t.Errorf("got %v, %v, want counts_full", got, err)
	}
	if cs, err := h.Counts(7); err != nil || len(cs) != 0 {
		t.Errorf("got %+v, %v, want no count", cs, err)
	}
	if cs, err := h.Counts(99); err != nil || len(cs) != room {
		t.Errorf("got %d counts, %v, want all %d of a full map", len(cs), err, room)
	}
	if err := h.RemoveBackend(99); err != nil {
		t.Fatal(err)
	}
	if cs, err := h.Counts(99); err != nil || len(cs) != 0 {
		t.Errorf("got %d counts, %v, want none", len(cs), err)
	}
}

func TestCloseIsIdempotent(t *testing.T) {
	h := installed(t, options(t))
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if err := h.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if _, err := h.Files(os.Getpid()); !errors.Is(err, os.ErrClosed) {
		t.Errorf("files of a closed host: got %v, want os.ErrClosed", err)
	}
}

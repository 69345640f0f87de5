// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/agent"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/netnstest"
)

// Programs of others: what a monitoring tool, a load balancer or a firewall may have loaded.
const foreignPrograms = `
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

char _license[] SEC("license") = "GPL";

#ifdef CLOBBER
SEC("sockops")
int e2e_clobber(struct bpf_sock_ops *ctx)
{
	if (ctx->local_port == CLOBBER && ctx->op == BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB)
		bpf_sock_ops_cb_flags_set(ctx, BPF_SOCK_OPS_RTT_CB_FLAG);
	return 1;
}
#endif

#ifdef DROP
SEC("sk_lookup")
int e2e_drop(struct bpf_sk_lookup *ctx)
{
	return ctx->local_port == DROP ? SK_DROP : SK_PASS;
}
#endif

#ifdef SELECT
struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} e2e_target SEC(".maps");

SEC("sk_lookup")
int e2e_select(struct bpf_sk_lookup *ctx)
{
	__u32 zero = 0;
	struct bpf_sock *sk;

	if (ctx->local_port != SELECT)
		return SK_PASS;
	sk = bpf_map_lookup_elem(&e2e_target, &zero);
	if (!sk)
		return SK_PASS;
	bpf_sk_assign(ctx, sk, 0);
	bpf_sk_release(sk);
	return SK_PASS;
}
#endif
`

// foreignProgram compiles and loads one of them and pins it, with its map, in a bpffs of the test's own.
func foreignProgram(t *testing.T, define string) (dir string) {
	t.Helper()
	clang, bpftool := need(t, "clang-19"), need(t, "bpftool")
	src := filepath.Join(t.TempDir(), "foreign.bpf.c")
	if err := os.WriteFile(src, []byte(foreignPrograms), 0o600); err != nil {
		t.Fatal(err)
	}
	arch := map[string]string{"amd64": "x86_64", "arm64": "aarch64"}[runtime.GOARCH]
	obj := strings.TrimSuffix(src, ".c") + ".o"
	dir = netnstest.BPFFS(t)
	for _, argv := range [][]string{
		{clang, "-O2", "-g", "-target", "bpf", "-I/usr/include/" + arch + "-linux-gnu", "-D" + define, "-c", src, "-o", obj},
		{bpftool, "prog", "loadall", obj, dir + "/prog", "pinmaps", dir + "/map"},
	} {
		if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", strings.Join(argv, " "), err, out)
		}
	}
	return dir
}

// Commands and attach types of include/uapi/linux/bpf.h.
const (
	bpfMapUpdate    = 2
	bpfObjGet       = 7
	bpfLinkCreate   = 28
	attachSockOps   = 3
	attachSkLookup  = 36
	bpfAttrMaxBytes = 128
)

func bpfCall(t *testing.T, what string, cmd uintptr, attr []byte) int {
	t.Helper()
	b := make([]byte, bpfAttrMaxBytes)
	copy(b, attr)
	fd, _, errno := unix.Syscall(unix.SYS_BPF, cmd, uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
	if errno != 0 {
		t.Fatalf("%s: %v", what, errno)
	}
	return int(fd)
}

func words(ws ...uint32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(&ws[0])), 4*len(ws))
}

// pinnedObject opens what is pinned at a path.
func pinnedObject(t *testing.T, path string) int {
	t.Helper()
	name := append([]byte(path), 0)
	attr := make([]byte, 16)
	*(*uint64)(unsafe.Pointer(&attr[0])) = uint64(uintptr(unsafe.Pointer(&name[0])))
	fd := bpfCall(t, "open "+path, bpfObjGet, attr)
	runtime.KeepAlive(name)
	return fd
}

// attachForeign attaches a pinned program by a link until the test ends.
func attachForeign(t *testing.T, path string, target int, attachType uint32) {
	t.Helper()
	prog := pinnedObject(t, path)
	defer unix.Close(prog)
	link := bpfCall(t, "attach "+path, bpfLinkCreate, words(uint32(prog), uint32(target), attachType, 0))
	t.Cleanup(func() { unix.Close(link) })
}

// clobberFlags attaches, after ours, a sock_ops program that overwrites the callback flags of a port's connections.
func clobberFlags(t *testing.T, port string) {
	t.Helper()
	dir := foreignProgram(t, "CLOBBER="+port)
	root, err := netnstest.CgroupRoot()
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(root)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	attachForeign(t, dir+"/prog/e2e_clobber", int(f.Fd()), attachSockOps)
}

// reported checks that a program of another is named by check and by status, with what it can break.
func reported(t *testing.T, h *host, r *supervised, name string) {
	t.Helper()
	check, _, _ := h.ebb("check", "--bpffs", h.bpffs)
	if !strings.Contains(check, name) {
		t.Errorf("check does not name %s:\n%s", name, check)
	}
	if w := strings.Join(r.backend().Warnings, "\n"); !strings.Contains(w, name) {
		t.Errorf("status does not name %s: %q", name, w)
	}
	if out := h.must("status", r.name); !strings.Contains(out, name) {
		t.Errorf("ebb status does not name %s:\n%s", name, out)
	}
}

// Another's sk_lookup program drops what comes to the port, attached before ours or after.
func TestG4_ForeignDropIsReported(t *testing.T) {
	for _, before := range []bool{true, false} {
		t.Run(map[bool]string{true: "before ours", false: "after ours"}[before], func(t *testing.T) {
			t.Parallel()
			h := newHost(t)
			const addr = "127.0.0.1:8080"
			dir := foreignProgram(t, "DROP=8080")
			if before {
				attachForeign(t, dir+"/prog/e2e_drop", h.ns.Fd(), attachSkLookup)
			}
			r := h.run("g4", wideBudget, goServer(t, addr)...)
			if !before {
				h.mustServe(addr)
				attachForeign(t, dir+"/prog/e2e_drop", h.ns.Fd(), attachSkLookup)
			}
			h.mustRefuse(addr)
			reported(t, h, r, "e2e_drop")
			r.signal(syscall.SIGTERM)
			r.drainedAtZero()
		})
	}
}

// Another's sk_lookup program selects the server's own listener, which wins over our refusal: its connections are counted
// all the same, and the drain does not call zero what is not.
func TestG4_ForeignSelectionIsCounted(t *testing.T) {
	for _, before := range []bool{true, false} {
		t.Run(map[bool]string{true: "before ours", false: "after ours"}[before], func(t *testing.T) {
			t.Parallel()
			h := newHost(t)
			const addr = "127.0.0.1:8080"
			dir := foreignProgram(t, "SELECT=8080")
			attach := func() { attachForeign(t, dir+"/prog/e2e_select", h.ns.Fd(), attachSkLookup) }
			if before {
				attach()
			}
			r := h.run("g4", wideBudget, goServer(t, addr)...)
			if !before {
				attach()
			}
			selectListener(t, dir+"/map/e2e_target", r.child())
			hold := holdOpen(t, h.ns, addr)
			r.must("drain", refusing)
			late := holdOpen(t, h.ns, addr) // by the other's choice
			hold.Close()
			r.awaitCounts("only the late one is left", func(b api.Backend) bool { return value(b.InFlight) == 1 && value(b.Counts.Accepted) == 2 })
			r.stays("a late connection is open")
			reported(t, h, r, "e2e_select")
			late.Close()
			d := r.drainedAtZero()
			if d.Late == nil || d.Late.Admitted != 1 {
				t.Errorf("got late %+v, want the one that came after the flip", d.Late)
			}
		})
	}
}

// selectListener puts the listening socket of a process into a map of sockets.
func selectListener(t *testing.T, path string, pid int) {
	t.Helper()
	m := pinnedObject(t, path)
	defer unix.Close(m)
	p, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(p)
	for fd := range 64 {
		dup, err := unix.PidfdGetfd(p, fd, 0)
		if err != nil {
			continue
		}
		listening, err := unix.GetsockoptInt(dup, unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
		if err == nil && listening == 1 {
			key, v := uint32(0), uint64(dup)
			attr := make([]byte, 32)
			*(*uint32)(unsafe.Pointer(&attr[0])) = uint32(m)
			*(*uint64)(unsafe.Pointer(&attr[8])) = uint64(uintptr(unsafe.Pointer(&key)))
			*(*uint64)(unsafe.Pointer(&attr[16])) = uint64(uintptr(unsafe.Pointer(&v)))
			bpfCall(t, "put listener into map", bpfMapUpdate, attr)
			runtime.KeepAlive(&key)
			runtime.KeepAlive(&v)
			unix.Close(dup)
			return
		}
		unix.Close(dup)
	}
	t.Fatal("the process has no listener")
}

// An exclusive sock_ops program at the root of the cgroups leaves no place for ours: said, and what is claimed rests on
// what is left. The root is that of a cgroup namespace, so that nobody else on this machine is disturbed.
func TestG4_ExclusiveSockOpsIsReported(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	const addr = "127.0.0.1:8080"
	cg := netnstest.Cgroup(t)
	dir := foreignProgram(t, "CLOBBER=1")
	bpftool := need(t, "bpftool")
	attach := exec.Command(bpftool, "cgroup", "attach", cg, "cgroup_sock_ops", "pinned", dir+"/prog/e2e_clobber")
	if out, err := attach.CombinedOutput(); err != nil {
		t.Fatalf("attach exclusively: %v\n%s", err, out)
	}
	inside := func(args ...string) []string {
		return append([]string{"-c", `echo $$ >"$0/cgroup.procs" && exec unshare --cgroup --mount sh -c 'mount -t cgroup2 none /sys/fs/cgroup && exec "$0" "$@"' "$@"`, cg, ebbBin}, args...)
	}
	check := h.ns.Command(t, "sh", inside("check", "--bpffs", h.bpffs)...)
	var out bytes.Buffer
	check.Cmd.Env, check.Cmd.Stdout = h.env, &out
	_ = check.Run() // it exits with 1 where a feature is missing
	if !strings.Contains(out.String(), "e2e_clobber") || !strings.Contains(out.String(), "exclusive") {
		t.Errorf("check does not tell of the exclusive program:\n%s", out.String())
	}
	run := h.startWith(func(c *exec.Cmd) {
		c.Path, c.Args = need(t, "sh"), append([]string{"sh"}, inside(c.Args[1:]...)...)
	}, "g4", wideBudget, goServer(t, addr)...)
	run.await(agent.EventListener)
	hold := holdOpen(t, h.ns, addr)
	b := run.awaitCounts("the stream is counted", func(b api.Backend) bool { return value(b.Counts.Open) == 1 })
	if w := strings.Join(b.Warnings, "\n"); !strings.Contains(w, "one hook alone") {
		t.Errorf("status does not say that counts rest on one hook alone: %q", w)
	}
	run.signal(syscall.SIGTERM)
	run.phase(drain.PhaseWait)
	hold.Close()
	run.drainedAtZero()
}

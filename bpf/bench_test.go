// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"context"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/netnstest"
)

// BenchmarkAdmission is the program's own time per SYN, measured by the kernel's test run.
func BenchmarkAdmission(b *testing.B) {
	netnstest.RequireRoot(b)
	o := Options{Dir: netnstest.BPFFS(b) + "/ebb"}
	h, err := Install(o)
	if err != nil {
		b.Fatal(err)
	}
	defer func() {
		h.Close()
		Cleanup(o)
	}()
	const netns = 77
	prog, err := h.loadAdmission(netns)
	if err != nil {
		b.Fatal(err)
	}
	defer prog.Close()
	if err := h.maps.Listeners.Put(uint64(7), &censusAlive{Live: 1}); err != nil {
		b.Fatal(err)
	}
	for _, bb := range []struct {
		name, admit string
		rule        BackendRule
	}{
		{"no rule", "", BackendRule{}},
		{"open", "0.0.0.0:80", BackendRule{Enforce: true}},
		{"open, on ::", "[::]:80", BackendRule{Enforce: true}},
		{"refuse", "0.0.0.0:80", BackendRule{Enforce: true, Action: ActionRefuse, Until: BootNow() + time.Hour}},
	} {
		b.Run(bb.name, func(b *testing.B) {
			if err := h.RemoveBackend(7); err != nil {
				b.Fatal(err)
			}
			if bb.admit != "" {
				a := Address{netns, netip.MustParseAddrPort(bb.admit)}
				if err := h.Admit(a, false, 7); err != nil {
					b.Fatal(err)
				}
				if err := h.SetBackend(7, bb.rule); err != nil {
					b.Fatal(err)
				}
				if err := h.maps.Listeners.Put(uint64(7), &censusAlive{Live: 1}); err != nil {
					b.Fatal(err)
				}
			}
			ctx := lookupContext{Family: unix.AF_INET, Protocol: unix.IPPROTO_TCP, LocalIP4: [4]byte{192, 0, 2, 1}, LocalPort: 80}
			b.ResetTimer()
			if _, err := prog.Run(&ebpf.RunOptions{Context: &ctx, Repeat: uint32(b.N)}); err != nil {
				b.Fatal(err)
			}
		})
	}
}

// BenchmarkCensus makes connections over loopback with the kernel's run-time statistics on, and reports what
// each of our programs took per connection. The statistics themselves are a part of it.
func BenchmarkCensus(b *testing.B) {
	netnstest.RequireRoot(b)
	o := Options{Dir: netnstest.BPFFS(b) + "/ebb"}
	h, err := Install(o)
	if err != nil {
		b.Fatal(err)
	}
	defer func() {
		h.Close()
		Cleanup(o)
	}()
	ns := netnstest.New(b)
	n, err := h.AttachNetNS(ns.Fd())
	if err != nil {
		b.Fatal(err)
	}
	tgid, start, err := Self()
	if err != nil {
		b.Fatal(err)
	}
	if err := h.WatchProcess(tgid, start, Watch{Backend: 7, Gen: 1, Only: []uint16{5100}}); err != nil {
		b.Fatal(err)
	}
	ln := ns.Listen(b, "tcp", "127.0.0.1:5100")
	go answer(ln)
	if err := h.Admit(Address{n.ID, addrPort(ln.Addr())}, false, 7); err != nil {
		b.Fatal(err)
	}
	if err := h.SetBackend(7, BackendRule{Enforce: true}); err != nil {
		b.Fatal(err)
	}
	ids, err := ownPrograms(o, "*")
	if err != nil {
		b.Fatal(err)
	}
	stats, err := ebpf.EnableStats(0 /* BPF_STATS_RUN_TIME */)
	if err != nil {
		b.Fatal(err)
	}
	defer stats.Close()
	read := func() map[string]time.Duration {
		out := map[string]time.Duration{}
		for id := range ids {
			prog, err := ebpf.NewProgramFromID(id)
			if err != nil {
				b.Fatal(err)
			}
			info, err := prog.Info()
			if err != nil {
				b.Fatal(err)
			}
			st, err := prog.Stats()
			if err != nil {
				b.Fatal(err)
			}
			out[info.Name] += st.Runtime
			prog.Close()
		}
		return out
	}
	before := read()
	b.ResetTimer()
	for range b.N {
		c, err := ns.DialContext(context.Background(), "tcp", ln.Addr().String())
		if err != nil {
			b.Fatal(err)
		}
		_ = c.(*net.TCPConn).SetLinger(0)
		c.Close()
	}
	b.StopTimer()
	var total time.Duration
	for name, took := range read() {
		d := took - before[name]
		total += d
		b.ReportMetric(float64(d.Nanoseconds())/float64(b.N), name+"-ns/conn")
	}
	b.ReportMetric(float64(total.Nanoseconds())/float64(b.N), "bpf-ns/conn")
}

// BenchmarkFiles is one look at a process with a thousand connections.
func BenchmarkFiles(b *testing.B) {
	netnstest.RequireRoot(b)
	o := Options{Dir: netnstest.BPFFS(b) + "/ebb"}
	h, err := Install(o)
	if err != nil {
		b.Fatal(err)
	}
	defer func() {
		h.Close()
		Cleanup(o)
	}()
	ns := netnstest.New(b)
	ln := ns.Listen(b, "tcp", "127.0.0.1:5110")
	go answer(ln)
	for range 500 { // both ends are in this process
		c, err := ns.DialContext(context.Background(), "tcp", ln.Addr().String())
		if err != nil {
			b.Fatal(err)
		}
		defer c.Close()
	}
	for b.Loop() {
		if files, err := h.Files(os.Getpid()); err != nil || len(files) < 1000 {
			b.Fatalf("got %d files, %v", len(files), err)
		}
	}
}

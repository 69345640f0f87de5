// SPDX-License-Identifier: Apache-2.0

package health

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/netnstest"
)

// ask makes one attempt.
func ask(t *testing.T, o Options) error {
	t.Helper()
	c, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	return c.attempt(ctx)
}

// serve answers on a listener with one handler, by HTTP/1.1 and cleartext HTTP/2.
func serve(t *testing.T, l net.Listener, h http.HandlerFunc) uint16 {
	t.Helper()
	srv := &http.Server{Handler: h, Protocols: new(http.Protocols)}
	srv.Protocols.SetHTTP1(true)
	srv.Protocols.SetUnencryptedHTTP2(true)
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { _ = srv.Close() })
	return port(l)
}

func port(l net.Listener) uint16 { return uint16(l.Addr().(*net.TCPAddr).Port) }

func listen(t *testing.T, at string) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func TestAskHTTP(t *testing.T) {
	netnstest.LeakCheck(t)
	var host, connection atomic.Value
	p := serve(t, listen(t, "127.0.0.1:0"), func(w http.ResponseWriter, r *http.Request) {
		host.Store(r.Host)
		connection.Store(r.Header.Get("Connection"))
		status, _ := strconv.Atoi(r.URL.Query().Get("status"))
		w.Header().Set("Location", "/?status=500")
		w.WriteHeader(status)
		_, _ = w.Write(make([]byte, 3*answerMax))
	})
	for status, want := range map[int]bool{200: true, 204: true, 302: true, 399: true, 400: false, 404: false, 500: false, 503: false} {
		err := ask(t, Options{Probe: Probe{HTTP: &HTTPProbe{Port: p, Path: "/healthz?status=" + strconv.Itoa(status), Host: "web.example"}}})
		if (err == nil) != want {
			t.Errorf("%d: got %v, want ready %v", status, err, want)
		}
		if err != nil && !strings.Contains(err.Error(), strconv.Itoa(status)) {
			t.Errorf("%d: got %v, want the status in it", status, err)
		}
		if host.Load() != "web.example" || connection.Load() != "close" {
			t.Errorf("got Host %q, Connection %q, want web.example, close", host.Load(), connection.Load())
		}
	}
	if err := ask(t, Options{Probe: Probe{HTTP: &HTTPProbe{Port: p, Path: "/?status=200"}}}); err != nil {
		t.Error(err)
	}
	if want := fmt.Sprintf("127.0.0.1:%d", p); host.Load() != want {
		t.Errorf("got Host %q, want %q", host.Load(), want)
	}
}

// What listens on one family of the loopback only is found there, and an address that was given is the only one.
func TestAskWhere(t *testing.T) {
	netnstest.LeakCheck(t)
	ok := func(http.ResponseWriter, *http.Request) {}
	l6 := listen(t, "[::1]:0")
	p6 := serve(t, l6, ok)
	if err := ask(t, Options{Probe: Probe{HTTP: &HTTPProbe{Port: p6}}}); err != nil {
		t.Error(err)
	}
	if err := ask(t, Options{Probe: Probe{TCP: &TCPProbe{Port: p6}}, Address: netip.MustParseAddr("127.0.0.1")}); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("got %v, want ECONNREFUSED", err)
	}
	if err := ask(t, Options{Probe: Probe{HTTP: &HTTPProbe{Port: p6}}, Address: netip.IPv6Loopback()}); err != nil {
		t.Error(err)
	}
}

func TestAskTCP(t *testing.T) {
	netnstest.LeakCheck(t)
	l := listen(t, "127.0.0.1:0")
	o := Options{Probe: Probe{TCP: &TCPProbe{Port: port(l)}}}
	if err := ask(t, o); err != nil {
		t.Error(err)
	}
	l.Close()
	if err := ask(t, o); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("got %v, want ECONNREFUSED", err)
	}
}

// health is the health service of a gRPC server: what it answers by service name.
func health(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	if r.Method != http.MethodPost || r.URL.Path != "/grpc.health.v1.Health/Check" || r.ProtoMajor != 2 ||
		r.Header.Get("Content-Type") != "application/grpc" || r.Header.Get("Te") != "trailers" ||
		len(body) < 5 || int(binary.BigEndian.Uint32(body[1:])) != len(body)-5 {
		http.Error(w, "no such call", http.StatusNotFound)
		return
	}
	service := ""
	if len(body) > 5 {
		service = string(body[7:]) // behind the tag and one byte of length
	}
	w.Header().Set("Content-Type", "application/grpc")
	status, ok := map[string]byte{"": 1, "down": 2, "odd": 9}[service]
	if !ok {
		w.Header().Set("Grpc-Status", "5") // NOT_FOUND, without a message
		w.Header().Set("Grpc-Message", "unknown service")
		return
	}
	w.Header().Set("Trailer", "Grpc-Status")
	_, _ = w.Write([]byte{0, 0, 0, 0, 2, 8, status})
	w.Header().Set("Grpc-Status", "0")
}

func TestAskGRPC(t *testing.T) {
	netnstest.LeakCheck(t)
	p := serve(t, listen(t, "127.0.0.1:0"), health)
	for service, want := range map[string]string{"": "", "down": "NOT_SERVING", "odd": "(9)", "missing": "unknown service"} {
		err := ask(t, Options{Probe: Probe{GRPC: &GRPCProbe{Port: p, Service: service}}})
		if (err == nil) != (want == "") || (err != nil && !strings.Contains(err.Error(), want)) {
			t.Errorf("%q: got %v, want %q", service, err, want)
		}
	}
	// A server that speaks HTTP/1.1 alone.
	l := listen(t, "127.0.0.1:0")
	srv := &http.Server{Handler: http.HandlerFunc(health)}
	go func() { _ = srv.Serve(l) }()
	defer srv.Close()
	if err := ask(t, Options{Probe: Probe{GRPC: &GRPCProbe{Port: port(l)}}}); err == nil {
		t.Error("a server without HTTP/2 is ready, want an error")
	}
}

func TestHealthStatus(t *testing.T) {
	for _, tt := range []struct {
		msg  string
		want uint64
		ok   bool
	}{
		{"\x00\x00\x00\x00\x02\x08\x01", 1, true},
		{"\x00\x00\x00\x00\x00", 0, true},
		{"\x00\x00\x00\x00\x03\x08\x80\x01", 128, true},
		{"", 0, false},
		{"\x00\x00\x00\x00", 0, false},
		{"\x01\x00\x00\x00\x02\x08\x01", 0, false}, // compressed
		{"\x00\x00\x00\x00\x03\x08\x01", 0, false}, // too short
		{"\x00\x00\x00\x00\x02\x10\x01", 0, false}, // another field
		{"\x00\x00\x00\x00\x01\x08", 0, false},     // no value
		{"\x00\x00\x00\x00\x02\x08\x80", 0, false}, // a value without end
		{"\x00\x00\x00\x00\x03\x08\x01\x01", 0, false},
	} {
		got, err := healthStatus([]byte(tt.msg))
		if got != tt.want && tt.ok || (err == nil) != tt.ok {
			t.Errorf("%q: got %d, %v, want %d, ok %v", tt.msg, got, err, tt.want, tt.ok)
		}
	}
}

func FuzzHealthStatus(f *testing.F) {
	f.Add([]byte("\x00\x00\x00\x00\x02\x08\x01"))
	f.Add(healthRequest("web"))
	f.Fuzz(func(t *testing.T, b []byte) {
		status, err := healthStatus(b)
		if err != nil || len(b) == 5 {
			return
		}
		// What was read is all there is.
		if want := binary.AppendUvarint([]byte{8}, status); len(b)-5 == len(want) && !bytes.Equal(b[5:], want) {
			t.Errorf("read %d from % x", status, b)
		}
	})
}

func TestAskExec(t *testing.T) {
	netnstest.LeakCheck(t)
	if err := ask(t, Options{Probe: Probe{Exec: []string{"true"}}}); err != nil {
		t.Error(err)
	}
	err := ask(t, Options{Probe: Probe{Exec: []string{"sh", "-c", "echo the disk is full; head -c 9999 /dev/zero; exit 4"}}})
	if err == nil || !strings.Contains(err.Error(), "exit status 4") || !strings.Contains(err.Error(), "the disk is full") || len(err.Error()) > 2000 {
		t.Errorf("got %v, want the status and the beginning of what it said", err)
	}
}

// Every kind asks in the backend's namespace, where the same address is something else.
func TestAskInsideNamespace(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	serve(t, ns.Listen(t, "tcp", "127.0.0.1:80"), health)
	serve(t, ns.Listen(t, "tcp", "127.0.0.1:81"), func(http.ResponseWriter, *http.Request) {})
	link, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(ns.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	for name, p := range map[string]Probe{
		"http": {HTTP: &HTTPProbe{Port: 81}},
		"tcp":  {TCP: &TCPProbe{Port: 80}},
		"grpc": {GRPC: &GRPCProbe{Port: 80}},
		"exec": {Exec: []string{"sh", "-c", "test $(readlink /proc/self/ns/net) = '" + link + "'"}},
	} {
		if err := ask(t, Options{Probe: p, NetNS: ns.Fd()}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Where a rule lets source ports pass, a probe comes from others.
func TestAskFromOtherPorts(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	if out, err := ns.Command(t, "sh", "-c", "echo 40000 40015 >/proc/sys/net/ipv4/ip_local_port_range").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	var from atomic.Value
	serve(t, ns.Listen(t, "tcp", "127.0.0.1:80"), func(w http.ResponseWriter, r *http.Request) { from.Store(r.RemoteAddr) })
	for range 4 {
		if err := ask(t, Options{Probe: Probe{HTTP: &HTTPProbe{Port: 80}}, NetNS: ns.Fd(), NotFrom: [2]uint16{40000, 40007}}); err != nil {
			t.Fatal(err)
		}
		if a := netip.MustParseAddrPort(from.Load().(string)); a.Port() < 40008 {
			t.Errorf("got source port %d, want none of 40000 to 40007", a.Port())
		}
	}
}

// Two hundred checkers cost little while they wait: one goroutine each, and no more than a few MiB.
func TestManyCheckersAreSmall(t *testing.T) {
	netnstest.LeakCheck(t)
	var asked atomic.Int64
	p := serve(t, listen(t, "127.0.0.1:0"), func(http.ResponseWriter, *http.Request) { asked.Add(1) })
	const checkers = 200
	memory := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc + m.StackInuse
	}
	before, goroutines := memory(), runtime.NumGoroutine()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, checkers)
	all := make([]*Checker, checkers)
	for i := range all {
		c, err := New(Options{Probe: Probe{HTTP: &HTTPProbe{Port: p}, Rise: 1, Timeout: time.Minute}})
		if err != nil {
			t.Fatal(err)
		}
		all[i] = c
		go func() { done <- c.Run(ctx) }()
	}
	for _, c := range all {
		select {
		case <-c.Changed():
		case <-time.After(time.Minute):
			t.Fatalf("not ready after a minute: %+v", c.State())
		}
	}
	after, grown := memory(), runtime.NumGoroutine()-goroutines
	t.Logf("%d checkers after %d attempts: %d KiB, %d goroutines", checkers, asked.Load(), (int64(after)-int64(before))>>10, grown)
	if after > before+8<<20 {
		t.Errorf("got %d KiB for %d checkers, want 8 MiB at most", (after-before)>>10, checkers)
	}
	cancel()
	for range checkers {
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("got %v, want the cause of the context", err)
		}
	}
	runtime.KeepAlive(all)
}

// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/netnstest"
	"github.com/ebbproxy/ebb/proxy"
)

// patience is how long a test waits for what has to come.
const patience = 90 * time.Second

// ownerArg makes the test binary an owner that starts a relay and then waits to be killed.
const ownerArg = "relay-test-owner"

func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case Arg:
			if err := Run(context.Background(), slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			os.Exit(0)
		case ownerArg:
			if err := own(os.Args[2], os.Args[3], os.Args[4]); err != nil {
				fmt.Println("error", err)
				os.Exit(1)
			}
		}
	}
	os.Exit(m.Run())
}

// own starts a relay to peer, says on what address and in what process, and waits.
func own(dir, name, peer string) error {
	at, err := netip.ParseAddrPort(peer)
	if err != nil {
		return err
	}
	f, addr, err := listener("127.0.0.1:0")
	if err != nil {
		return err
	}
	p, err := Start(context.Background(), f, Options{Name: name, RunDir: dir, Until: time.Now().Add(time.Hour), Peers: []proxy.Peer{{Address: at}}, Stderr: os.Stderr})
	if err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	fmt.Println(addr, p.PID())
	select {}
}

// listener is a plain TCP listener as a file.
func listener(addr string) (*os.File, netip.AddrPort, error) {
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	l, err := lc.Listen(context.Background(), "tcp", addr)
	if err != nil {
		return nil, netip.AddrPort{}, err
	}
	defer l.Close()
	f, err := l.(*net.TCPListener).File()
	return f, l.Addr().(*net.TCPAddr).AddrPort(), err
}

var names atomic.Uint32

// fixture is a run directory, a name, and how to start a relay there.
type fixture struct {
	t    *testing.T
	dir  string
	name string
}

func newFixture(t *testing.T) fixture {
	t.Helper()
	netnstest.LeakCheck(t)
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "run"), 0o700); err != nil {
		t.Fatal(err)
	}
	return fixture{t, dir, fmt.Sprintf("relaytest-%d-%d", os.Getpid(), names.Add(1))}
}

// start starts a relay and ends it with the test.
func (f fixture) start(o Options) (*Process, netip.AddrPort) {
	f.t.Helper()
	return f.startOn("127.0.0.1:0", o)
}

func (f fixture) startOn(listen string, o Options) (*Process, netip.AddrPort) {
	f.t.Helper()
	o.Name, o.RunDir, o.Stderr = f.name, f.dir, os.Stderr
	if o.Until.IsZero() {
		o.Until = time.Now().Add(time.Hour)
	}
	l, at, err := listener(listen)
	if err != nil {
		f.t.Fatal(err)
	}
	defer l.Close()
	p, err := Start(f.t.Context(), l, o)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { f.end(p) })
	return p, at
}

func (f fixture) end(p *Process) {
	f.t.Helper()
	if err := p.Kill(); err != nil && !errors.Is(err, os.ErrClosed) {
		f.t.Error(err)
	}
	f.ended(p)
	if err := p.Close(); err != nil {
		f.t.Error(err)
	}
}

// ended waits for the end of the process.
func (f fixture) ended(p *Process) {
	f.t.Helper()
	select {
	case <-p.Done():
	case <-time.After(patience):
		f.t.Fatalf("relay %d has not ended", p.PID())
	}
}

// echo serves connections of an address by sending back what comes.
func echo(t *testing.T, addr string) netip.AddrPort {
	t.Helper()
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	l, err := lc.Listen(t.Context(), "tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			}()
		}
	}()
	return l.Addr().(*net.TCPAddr).AddrPort()
}

func dialTCP(t *testing.T, at netip.AddrPort) *net.TCPConn {
	t.Helper()
	var d net.Dialer
	d.SetMultipathTCP(false)
	c, err := d.DialContext(t.Context(), "tcp", at.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	return c.(*net.TCPConn)
}

// ask sends a line and wants it back.
func ask(t *testing.T, c net.Conn, text string) {
	t.Helper()
	if _, err := c.Write([]byte(text)); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, len(text))
	if _, err := io.ReadFull(c, b); err != nil || string(b) != text {
		t.Fatalf("got %q, %v, want %q", b, err, text)
	}
}

// wantReset wants the end of c to be a reset.
func wantReset(t *testing.T, c net.Conn) {
	t.Helper()
	if _, err := io.ReadAll(c); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("got %v, want a reset", err)
	}
}

// eventually waits for what sends no event.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(patience)
	for !ok() {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("%s: has not come", what)
		}
	}
}

func (f fixture) stats(p *Process) Stats {
	f.t.Helper()
	s, err := p.Stats(f.t.Context())
	if err != nil {
		f.t.Fatal(err)
	}
	return s
}

// startOwner runs another process that owns a relay.
func (f fixture) startOwner(peer netip.AddrPort) (owner *exec.Cmd, at netip.AddrPort, relay int) {
	f.t.Helper()
	exe, err := os.Executable()
	if err != nil {
		f.t.Fatal(err)
	}
	owner = exec.Command(exe, ownerArg, f.dir, f.name, peer.String())
	owner.Stderr = os.Stderr
	out, err := owner.StdoutPipe()
	if err != nil {
		f.t.Fatal(err)
	}
	if err := owner.Start(); err != nil {
		f.t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	addr, pid, ok := strings.Cut(strings.TrimSpace(line), " ")
	if err != nil || !ok || addr == "error" {
		f.t.Fatalf("owner says %q, %v", line, err)
	}
	if at, err = netip.ParseAddrPort(addr); err != nil {
		f.t.Fatal(err)
	}
	if relay, err = strconv.Atoi(pid); err != nil {
		f.t.Fatal(err)
	}
	return owner, at, relay
}

// SPDX-License-Identifier: Apache-2.0

package probes

import (
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/netnstest"
)

// look is the verdict about the connection at whose other end c is.
func look(t *testing.T, cl *Classifier, d *Diag, c net.Conn) (Verdict, bool) {
	t.Helper()
	x, ok := sample(t, d, c)
	if !ok {
		cl.Look(time.Now(), nil, false)
		return Verdict{}, false
	}
	v := cl.Look(time.Now(), []Sample{x}, false)
	if len(v) != 1 {
		return Verdict{}, false
	}
	return v[0], true
}

// A reader that takes its time keeps a response in flight until all of it is acknowledged, also when the application
// has long closed.
func TestC11_SlowReaderIsInFlight(t *testing.T) {
	const size = 10 << 20
	for name, protocol := range map[string]string{"http1": ProtocolHTTP1, "opaque": ProtocolOpaque} {
		t.Run(name, func(t *testing.T) {
			netnstest.LeakCheck(t)
			ns := netnstest.New(t)
			d := openDiag(t, ns)
			l := ns.Listen(t, "tcp", "127.0.0.1:0")
			c := dial(t, ns, l.Addr().String())
			s := accept(t, l)
			if err := errors.Join(c.(*net.TCPConn).SetReadBuffer(64<<10), s.(*net.TCPConn).SetWriteBuffer(16<<20)); err != nil {
				t.Fatal(err)
			}
			write(t, c, "GET / HTTP/1.1\r\n\r\n")
			read(t, s, "GET / HTTP/1.1\r\n\r\n")
			closed := make(chan error, 1)
			go func() {
				_, err := s.Write(make([]byte, size))
				closed <- errors.Join(err, s.Close())
			}()
			cl := NewClassifier(ClassifierOptions{Protocol: protocol, IdleAfter: time.Millisecond})
			for left := size; left > 2<<20; {
				n, err := c.Read(make([]byte, 256<<10))
				if err != nil {
					t.Fatal(err)
				}
				left -= n
				if v, ok := look(t, cl, d, c); !ok || (v.Class != ClassActive && v.Class != ClassStalled) {
					t.Fatalf("%d bytes to go: got %v %+v, want it in flight", left, v.Class, v.Sample)
				}
			}
			go io.Copy(io.Discard, c)
			if err := <-closed; err != nil {
				t.Fatal(err)
			}
			eventually(t, "the connection to be closing", func() bool {
				v, ok := look(t, cl, d, c)
				return !ok || v.Class == ClassClosing
			})
		})
	}
}

func TestC18_HalfClose(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	d := openDiag(t, ns)
	l := ns.Listen(t, "tcp", "127.0.0.1:0")
	cl := NewClassifier(ClassifierOptions{Protocol: ProtocolHTTP1})

	// The client has said all it has to say, and waits.
	c := dial(t, ns, l.Addr().String())
	s := accept(t, l)
	write(t, c, "ask")
	if err := c.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	read(t, s, "ask")
	eventually(t, "the client's FIN", func() bool {
		x, ok := sample(t, d, c)
		return ok && x.State == StateCloseWait
	})
	if v, ok := look(t, cl, d, c); !ok || v.Class != ClassActive {
		t.Fatalf("a half-closed client that waits: got %v %+v, want active", v.Class, v.Sample)
	}
	write(t, s, "answer")
	read(t, c, "answer")

	// The application has said all it has to say.
	c = dial(t, ns, l.Addr().String())
	s = accept(t, l)
	write(t, c, "ask")
	read(t, s, "ask")
	write(t, s, "answer")
	if err := s.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	read(t, c, "answer")
	eventually(t, "class closing", func() bool {
		v, ok := look(t, cl, d, c)
		return ok && v.Class == ClassClosing
	})
}

// The peer's link goes down while there is something to be acknowledged.
func TestC21_PeerThatVanishesIsStalled(t *testing.T) {
	netnstest.LeakCheck(t)
	client, server := netnstest.New(t), netnstest.New(t)
	link := netnstest.Veth(t, client, server)
	d := openDiag(t, server)
	l := server.Listen(t, "tcp", netip.AddrPortFrom(link.B.V4, 8080).String())
	c := dial(t, client, l.Addr().String())
	s := accept(t, l)
	write(t, c, "ask")
	read(t, s, "ask")
	if out, err := client.Command(t, "ip", "link", "set", "dev", link.A.Dev, "down").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	write(t, s, strings.Repeat("x", 10_000))
	cl := NewClassifier(ClassifierOptions{Protocol: ProtocolHTTP1})
	classes := map[Class]bool{}
	eventually(t, "class stalled", func() bool {
		v, ok := look(t, cl, d, c)
		if !ok {
			t.Fatal("the connection is gone")
		}
		classes[v.Class] = true
		return v.Class == ClassStalled
	})
	for class := range classes {
		if class != ClassActive && class != ClassStalled {
			t.Errorf("on the way it was called %s", class)
		}
	}
	// The census lets go of it at last.
	socks, err := d.Dump(t.Context(), Filter{States: StatesConnected, Info: true})
	if err != nil {
		t.Fatal(err)
	}
	if n, err := d.Destroy(t.Context(), socks); err != nil || n != 1 {
		t.Errorf("got %d destroyed, %v, want 1", n, err)
	}
}

func TestReady(t *testing.T) {
	status, slow := http.StatusOK, make(chan struct{})
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slow" {
			<-slow
		}
		w.Header().Set("Location", "/elsewhere")
		w.WriteHeader(status)
	}))
	defer srv.Close()
	defer close(slow)
	for code, ready := range map[int]bool{200: true, 204: true, 302: true, 399: true, 400: false, 404: false, 503: false} {
		status = code
		if err := Ready(t.Context(), srv.URL, patience); (err == nil) != ready || (err != nil && !errors.Is(err, ErrNotReady)) {
			t.Errorf("status %d: got %v, want ready %v", code, err, ready)
		}
	}
	if err := Ready(t.Context(), srv.URL+"/slow", time.Millisecond); !errors.Is(err, ErrNotReady) {
		t.Errorf("no answer: got %v, want ErrNotReady", err)
	}
	if err := Ready(t.Context(), "http://127.0.0.1:1/", patience); !errors.Is(err, ErrNotReady) || !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("no listener: got %v, want ErrNotReady and ECONNREFUSED", err)
	}
	if err := Ready(t.Context(), "http://[", patience); err == nil || errors.Is(err, ErrNotReady) {
		t.Errorf("a bad URL: got %v, want an error that is not ErrNotReady", err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package probes

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/internal/netnstest"
)

// The servers answer GET /?ms=N after N ms, and POST after having read nothing of the body.

const nodeServer = `
const http = require('http')
http.createServer((q, r) => {
  const m = /ms=(\d+)/.exec(q.url)
  const answer = () => { r.setHeader('Content-Length', 6); r.end('hello\n') }
  m ? setTimeout(answer, +m[1]) : answer()
}).listen(+process.argv[1], '127.0.0.1')
`

const pythonServer = `
import http.server, sys, time, re
class H(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def do_GET(self):
        m = re.search(r'ms=(\d+)', self.path)
        if m: time.sleep(int(m[1]) / 1000)
        self.send_response(200)
        self.send_header('Content-Length', '6')
        self.end_headers()
        self.wfile.write(b'hello\n')
    def log_message(self, *a): pass
http.server.ThreadingHTTPServer.request_queue_size = 128
http.server.ThreadingHTTPServer.handle_error = lambda *a: None
http.server.ThreadingHTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()
`

func serveHTTP(port string) int {
	l, err := net.Listen("tcp", "127.0.0.1:"+port)
	if err != nil {
		return 1
	}
	err = http.Serve(l, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if ms, err := strconv.Atoi(r.URL.Query().Get("ms")); err == nil {
			time.Sleep(time.Duration(ms) * time.Millisecond)
		}
		w.Header().Set("Content-Length", "6")
		io.WriteString(w, "hello\n")
	}))
	fmt.Fprintln(os.Stderr, err)
	return 1
}

const muteAnswer = "HTTP/1.1 413 Too Much\r\nConnection: close\r\n\r\nsorry\n"

// serveMute answers each connection at once and never reads from it.
func serveMute(port string) int {
	l, err := net.Listen("tcp", "127.0.0.1:"+port)
	if err != nil {
		return 1
	}
	var kept []net.Conn
	for {
		c, err := l.Accept()
		if err != nil {
			return 1
		}
		kept = append(kept, c)
		if _, err := io.WriteString(c, muteAnswer); err != nil {
			return len(kept)
		}
	}
}

func startMute(t *testing.T) (ns *netnstest.NS, d *Diag, pid int, addr string, stop func()) {
	t.Helper()
	netnstest.LeakCheck(t)
	ns = netnstest.New(t)
	d = openDiag(t, ns)
	cmd := ns.Command(t, "/proc/self/exe")
	cmd.Env = append(os.Environ(), "EBB_PROBES_TEST_PROCESS=mute", "EBB_PROBES_TEST_ARGS=8081")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid = cmd.Process.Pid
	eventually(t, "the server to listen", func() bool {
		ls, err := Listeners(d, []int{pid})
		return err == nil && len(ls) == 1
	})
	return ns, d, pid, "127.0.0.1:8081", func() {
		t.Helper()
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		cmd.Wait()
	}
}

// server is a real server in a namespace of its own.
type server struct {
	ns   *netnstest.NS
	diag *Diag
	cmd  *netnstest.Cmd
	port uint16
}

func (s *server) addr() string { return fmt.Sprintf("127.0.0.1:%d", s.port) }

// eachServer runs a subtest with each server that this machine has.
func eachServer(t *testing.T, fn func(t *testing.T, s *server)) {
	netnstest.RequireRoot(t)
	for _, c := range []struct {
		name string
		args []string
		env  []string
	}{
		{"go", []string{"/proc/self/exe"}, []string{"EBB_PROBES_TEST_PROCESS=http", "EBB_PROBES_TEST_ARGS=8080"}},
		{"node", []string{"node", "-e", nodeServer, "8080"}, nil},
		{"python", []string{"python3", "-c", pythonServer, "8080"}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			if _, err := exec.LookPath(c.args[0]); err != nil {
				if os.Getenv("CI") == "true" {
					t.Fatal(err)
				}
				t.Skip(err)
			}
			netnstest.LeakCheck(t)
			s := &server{ns: netnstest.New(t), port: 8080}
			s.diag = openDiag(t, s.ns)
			s.cmd = s.ns.Command(t, c.args[0], c.args[1:]...)
			s.cmd.Env = append(os.Environ(), c.env...)
			s.cmd.Stderr = os.Stderr
			if err := s.cmd.Start(); err != nil {
				t.Fatal(err)
			}
			eventually(t, "the server to listen", func() bool {
				ls, err := Listeners(s.diag, s.pids(t))
				return err == nil && len(ls) == 1
			})
			fn(t, s)
		})
	}
}

func (s *server) pids(t testing.TB) []int {
	t.Helper()
	tree, err := Tree(s.cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, p := range tree {
		pids = append(pids, p.PID)
	}
	return pids
}

// samples looks at all connections of the server.
func (s *server) samples(t testing.TB) []Sample {
	t.Helper()
	socks, err := s.diag.Dump(t.Context(), Filter{States: StatesConnected, LocalPorts: []uint16{s.port}, Info: true})
	if err != nil {
		t.Fatal(err)
	}
	var list []Sample
	for _, sock := range socks {
		x, _ := SampleFromSocket(sock)
		list = append(list, x)
	}
	if err := Locate(s.pids(t), list); err != nil {
		t.Fatal(err)
	}
	return list
}

// settled waits until the server's end of c has received and sent something and nothing is on its way.
func (s *server) settled(t testing.TB, c net.Conn) Verdict {
	t.Helper()
	var got Sample
	eventually(t, "the answer to be acknowledged", func() bool {
		for _, x := range s.samples(t) {
			if x.Remote.Port() == port(t, c.LocalAddr()) && x.FD >= 0 && x.queued() == 0 && x.Unread == 0 && x.BytesSent > 0 {
				got = x
				return true
			}
		}
		return false
	})
	return Verdict{Sample: got, Class: ClassIdle}
}

// client is an HTTP client that shows everything.
type client struct {
	net.Conn
	r *bufio.Reader
}

func (s *server) client(t testing.TB) client {
	c := dial(t, s.ns, s.addr())
	return client{c, bufio.NewReader(c)}
}

func (c client) send(t testing.TB, path string) {
	t.Helper()
	write(t, c, "GET "+path+" HTTP/1.1\r\nHost: x\r\n\r\n")
}

func (c client) answer() error {
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	resp, err := http.ReadResponse(c.r, nil)
	if err != nil {
		return err
	}
	body, err := io.ReadAll(resp.Body)
	if err == nil && strings.TrimSpace(string(body)) != "hello" {
		err = fmt.Errorf("got body %q", body)
	}
	return err
}

func (c client) get(t testing.TB, path string) {
	t.Helper()
	c.send(t, path)
	if err := c.answer(); err != nil {
		t.Fatal(err)
	}
}

// ended waits for the server to close.
func (c client) ended(t testing.TB) {
	t.Helper()
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if b, err := c.r.ReadByte(); err != io.EOF {
		t.Fatalf("got byte %q, %v, want the end", b, err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"testing"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
)

// selfCaller answers /call by what a connection of its own to its own address meets: the name of who answers there, or
// refused; /call?HOST:PORT by the same of another address. The connection stays open.
const selfCaller = `
import http.server, socket, sys
addr, port = sys.argv[1], int(sys.argv[2])
kept = []
def call(to):
    try:
        c = socket.create_connection(to.split(":") if to else (addr, port))
    except ConnectionRefusedError:
        return b"refused"
    kept.append(c)
    c.sendall(b"GET /name HTTP/1.1\r\nHost: x\r\n\r\n")
    head = b""
    while b"\r\n\r\n" not in head:
        m = c.recv(4096)
        if not m:
            return b"cut short"
        head += m
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"x-served-by: "):
            return line[13:]
    return b"nobody"
class H(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        path, _, to = self.path.partition("?")
        b = call(to) if path == "/call" else b"hello\n"
        self.send_response(200)
        self.send_header("X-Served-By", "self")
        self.send_header("Content-Length", str(len(b)))
        self.end_headers()
        self.wfile.write(b)
    def log_message(self, *a):
        pass
http.server.ThreadingHTTPServer((addr, port), H).serve_forever()
`

// A workload calls itself by the address of its service. While it serves, it reaches itself and the connection is counted
// once, by the end that was accepted; while it drains, its own new connections meet what everybody's do.
func TestC34_AWorkloadThatCallsItself(t *testing.T) {
	for _, tt := range []struct {
		onNew drain.OnNew
		meets string
	}{{drain.OnNewRefuse, "refused"}, {drain.OnNewSteer, "other"}, {drain.OnNewRelay, "other"}} {
		t.Run(string(tt.onNew), func(t *testing.T) {
			n := newLAN(t)
			flags := with(wideBudget, "--service", "web", "--idle", "wait", "--on-new", string(tt.onNew))
			switch tt.onNew {
			case drain.OnNewSteer:
				n.run("other", []string{"--service", "web"}, goServer(t, n.v4(8081), "-name", "other")...)
			case drain.OnNewRelay:
				flags = append(flags, "--peer", newElsewhere(t, n.host, 9000, "-name", "other").v4)
			}
			r := n.run("web", flags, python(t, selfCaller, n.link.B.V4.String(), "8080")...)
			c := dialHTTP(t, n.client, n.v4(8080))
			if got := string(c.get(t, "/call")); got != "self" {
				t.Fatalf("before the drain: it reaches %q, want itself", got)
			}
			twice := func(b api.Backend) bool {
				return b.CountsKnown && value(b.Counts.Open) == 2 && value(b.Counts.Accepted) == 2
			}
			r.awaitCounts("the client and the call are counted once each", twice)
			r.must("drain", struct{}{})
			chosen(t, r.backend(), tt.onNew)
			const calls = 5
			for range calls {
				if got := string(c.get(t, "/call")); got != tt.meets {
					t.Fatalf("while it drains: it reaches %q, want %s", got, tt.meets)
				}
			}
			if b := r.backend(); !twice(b) {
				t.Errorf("after %d calls while it drains: %s, want 2 open, 2 accepted", calls, shown(b))
			}
			l := r.backend().Drain.Late
			if l == nil || l.Failed != 0 || tt.onNew == drain.OnNewRefuse && l.Refused != calls || tt.onNew != drain.OnNewRefuse && l.Redirected < calls {
				t.Errorf("late: got %+v, want %d", l, calls)
			}
			c.Close()
			r.must("cut", struct{}{}) // its call to itself is open for ever
			r.wait()
		})
	}
}

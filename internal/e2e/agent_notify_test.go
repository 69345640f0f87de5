// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"net"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// systemd is told how many backends there are, at the start and after each reload (sd_notify(3)).
func TestAgentTellsSystemdWhatItHas(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	path := filepath.Join(t.TempDir(), "notify")
	sock, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer sock.Close()
	n.env = append(n.env, "NOTIFY_SOCKET="+path)
	hears := func(want string) {
		t.Helper()
		sock.SetReadDeadline(time.Now().Add(patience))
		for b := make([]byte, 4096); ; {
			l, err := sock.Read(b)
			if err != nil {
				t.Fatalf("never heard %q: %v", want, err)
			}
			if strings.Contains(string(b[:l]), want) {
				return
			}
		}
	}
	d := n.agent()
	hears("READY=1\nSTATUS=0 backends")
	n.set("services:\n" + service("web", n.ns, 8080))
	d.signal(syscall.SIGHUP)
	hears("RELOADING=1")
	hears("READY=1\nSTATUS=1 backends")
	d.stop()
	hears("STOPPING=1")
}

// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
)

// cookieWindow is how long after the last SYN cookie a stateless handshake is still taken to be possible: a client
// whose last ACK was lost retransmits within it (RFC 6298, with the initial RTO of 1 s and backoff).
const cookieWindow = 60 * time.Second

// cookieWatch remembers when the namespace last answered a SYN by a cookie. Such a handshake leaves no state, so no
// snapshot can see it, and its last ACK would meet a closed admission. The counter is read every half window: one
// file of a few kilobytes, no walk.
type cookieWatch struct {
	pid  int // whose namespace; 0: ours
	mu   sync.Mutex
	sent uint64
	at   time.Time // when it last grew
	have bool
}

func (w *cookieWatch) sample(now time.Time) {
	path := "/proc/thread-self/net/netstat"
	if w.pid != 0 {
		path = fmt.Sprintf("/proc/%d/net/netstat", w.pid)
	}
	f, err := os.Open(path)
	if err != nil {
		return
	}
	defer f.Close()
	n, err := cookiesSent(f)
	if err != nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.have && n > w.sent {
		w.at = now
	}
	w.sent, w.have = n, true
}

// recent tells whether a cookie was sent within the window.
func (w *cookieWatch) recent(now time.Time) bool {
	w.sample(now)
	w.mu.Lock()
	defer w.mu.Unlock()
	return !w.at.IsZero() && now.Sub(w.at) < cookieWindow
}

// cookiesSent reads TcpExt's SyncookiesSent from the pairs of lines of /proc/net/netstat (proc(5)).
func cookiesSent(r io.Reader) (uint64, error) {
	var names []string
	sc := bufio.NewScanner(r)
	sc.Buffer(nil, 1<<20)
	for sc.Scan() {
		f := strings.Fields(sc.Text())
		if len(f) == 0 || f[0] != "TcpExt:" {
			continue
		}
		if names == nil {
			names = f
			continue
		}
		for i, name := range names {
			if name == "SyncookiesSent" && i < len(f) {
				return strconv.ParseUint(f[i], 10, 64)
			}
		}
	}
	if err := sc.Err(); err != nil {
		return 0, fmt.Errorf("read netstat: %w", err)
	}
	return 0, fmt.Errorf("read netstat: no SyncookiesSent in it")
}

// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"net/netip"
	"strconv"
	"strings"
	"testing"

	"github.com/ebbproxy/ebb/proxy"
)

// Which of our ports each peer is for, and whether that is enough to relay at all.
func TestPeersForPorts(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, own, peers, want, why string
	}{
		{"one port, whatever the peer's", "80", "192.0.2.1:9000", "192.0.2.1:9000", ""},
		{"one port, named", "80", "80=192.0.2.1:9000", "192.0.2.1:9000 (for port 80)", ""},
		{"one port, another named", "80", "81=192.0.2.1:9000 192.0.2.2:80", "192.0.2.2:80", "peer 192.0.2.1:9000 is for port 81, on which nothing listens here"},
		{"two ports, the same there", "80 443", "192.0.2.1:80 192.0.2.1:443", "192.0.2.1:80, 192.0.2.1:443", ""},
		{"two ports, others there", "80 443", "80=192.0.2.1:8080 443=192.0.2.1:8443", "192.0.2.1:8080 (for port 80), 192.0.2.1:8443 (for port 443)", ""},
		{"two ports, one without a peer", "80 443", "192.0.2.1:80", "", "no peer for port 443 can be reached: name one (443=ADDR:PORT), or leave the port out of the service"},
		{"two ports, an unknown one there", "80 443", "192.0.2.1:80 192.0.2.1:443 192.0.2.1:9000", "192.0.2.1:80, 192.0.2.1:443", "peer 192.0.2.1:9000 is for port 9000, on which nothing listens here"},
		{"the same twice", "80", "192.0.2.1:80 192.0.2.1:80", "192.0.2.1:80", ""},
		{"none", "80", "", "", "no peer for port 80 can be reached: name one (80=ADDR:PORT), or leave the port out of the service"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			var own []listener
			for p := range strings.FieldsSeq(tc.own) {
				own = append(own, listener{addr: netip.MustParseAddrPort("0.0.0.0:" + p)})
			}
			var peers []Peer
			for s := range strings.FieldsSeq(tc.peers) {
				var p Peer
				if port, addr, named := strings.Cut(s, "="); named {
					n, err := strconv.ParseUint(port, 10, 16)
					if err != nil {
						t.Fatal(err)
					}
					p.For, s = uint16(n), addr
				}
				p.Address = netip.MustParseAddrPort(s)
				peers = append(peers, p)
			}
			to, why := assign(own, peers)
			got, more := whole(own, to)
			if words := inWords(got); words != tc.want {
				t.Errorf("peers: got %q, want %q", words, tc.want)
			}
			if said := strings.Join(append(why, more...), "; "); said != tc.why {
				t.Errorf("why: got %q, want %q", said, tc.why)
			}
		})
	}
	if got := inWords([]proxy.Peer{}); got != "" {
		t.Errorf("no peers: got %q", got)
	}
}

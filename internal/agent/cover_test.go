// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func TestCoverage(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		c    coverage
		ls   string // addresses; a leading + is one that is covered
	}{
		{"the one there is", coverage{}, "+0.0.0.0:80"},
		{"loopback beside another", coverage{}, "+0.0.0.0:80 127.0.0.1:9000 [::1]:9000 [::ffff:127.0.0.1]:9001"},
		{"loopback alone", coverage{}, "+127.0.0.1:80 +[::1]:80"},
		{"excluded", coverage{exclude: []uint16{9000}}, "+0.0.0.0:80 0.0.0.0:9000"},
		{"loopback when all others are excluded", coverage{exclude: []uint16{80}}, "0.0.0.0:80 +127.0.0.1:9000"},
		{"named", coverage{only: addrs("127.0.0.1:9000")}, "0.0.0.0:80 +127.0.0.1:9000"},
		{"named wildcard of the other family", coverage{only: addrs("0.0.0.0:80")}, "+[::]:80 [::]:81"},
		{"readiness on its own port", coverage{aux: []uint16{8081}}, "+0.0.0.0:80 0.0.0.0:8081"},
		{"readiness on the service's port", coverage{aux: []uint16{80}}, "+0.0.0.0:80"},
		{"readiness on loopback, service on loopback", coverage{aux: []uint16{8081}}, "+127.0.0.1:80 127.0.0.1:8081"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			var ls []listener
			var want []bool
			for a := range strings.FieldsSeq(tc.ls) {
				want = append(want, a[0] == '+')
				ls = append(ls, listener{addr: netip.MustParseAddrPort(strings.TrimPrefix(a, "+"))})
			}
			var got []bool
			for _, why := range tc.c.split(ls) {
				got = append(got, why == "")
			}
			if !slices.Equal(got, want) {
				t.Errorf("got %v, want %v", got, want)
			}
		})
	}
}

func addrs(ss ...string) (out []netip.AddrPort) {
	for _, s := range ss {
		out = append(out, netip.MustParseAddrPort(s))
	}
	return out
}

func TestParseListen(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		":8080": "0.0.0.0:8080", "127.0.0.1:1": "127.0.0.1:1", "[::]:443": "[::]:443",
		"8080": "", "localhost:80": "", "0.0.0.0:0": "", "1.2.3.4:99999": "", "": "",
	} {
		got, err := ParseListen(in)
		if (err != nil) != (want == "") || (err == nil && got.String() != want) {
			t.Errorf("ParseListen(%q): got %v, %v; want %q", in, got, err, want)
		}
	}
}

func TestCookiesSent(t *testing.T) {
	t.Parallel()
	text := "TcpExt: SyncookiesSent SyncookiesRecv\nTcpExt: 17 3\nIpExt: InNoRoutes\nIpExt: 0\n"
	if n, err := cookiesSent(strings.NewReader(text)); err != nil || n != 17 {
		t.Errorf("got %d, %v; want 17", n, err)
	}
	if _, err := cookiesSent(strings.NewReader("IpExt: A\nIpExt: 1\n")); err == nil {
		t.Error("a file without the counter: got no error")
	}
}

func FuzzCookiesSent(f *testing.F) {
	f.Add("TcpExt: SyncookiesSent\nTcpExt: 1\n")
	f.Fuzz(func(t *testing.T, s string) {
		if n, err := cookiesSent(strings.NewReader(s)); err != nil && n != 0 {
			t.Errorf("got %d beside an error", n)
		}
	})
}

// SPDX-License-Identifier: Apache-2.0

package probes

import (
	"encoding/binary"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestParseStat(t *testing.T) {
	const tail = " S 1 42 42 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 3 0 987654 1000 10 0"
	for _, c := range []struct{ name, line, comm string }{
		{"plain", "42 (nginx)" + tail, "nginx"},
		{"blanks", "42 (a b c)" + tail, "a b c"},
		{"parentheses", "42 (a) R 9 9 (b)" + tail, "a) R 9 9 (b"},
		{"newline", "42 (a\nb)" + tail, "a\nb"},
		{"empty", "42 ()" + tail, ""},
	} {
		s, err := parseStat(c.line)
		want := stat{Process: Process{PID: 42, PPID: 1, PGID: 42, Start: 987654, Comm: c.comm}, state: 'S', threads: 3}
		if err != nil || s != want {
			t.Errorf("%s: got %+v, %v, want %+v", c.name, s, err, want)
		}
	}
	for _, line := range []string{"", "42", "42 (a", "x (a)" + tail, "42 (a) S 1", ") 42 (", "-1 (a)" + tail} {
		if s, err := parseStat(line); err == nil {
			t.Errorf("%q: got %+v, want an error", line, s)
		}
	}
}

func FuzzParseStat(f *testing.F) {
	f.Add("42 (a) R 9 9 (b) S 1 42 42 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 3 0 987654 1000 10 0")
	f.Add("1 ((sd-pam)) Z 1 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 18446744073709551615")
	f.Fuzz(func(t *testing.T, line string) {
		s, err := parseStat(line)
		if err == nil && (s.PID < 1 || !strings.Contains(line, "("+s.Comm+")")) {
			t.Errorf("%q: got %+v", line, s)
		}
	})
}

func TestParseTCPInfo(t *testing.T) {
	b := make([]byte, 280)
	b[0] = StateCloseWait
	for at := 8; at+4 <= len(b); at += 4 {
		binary.NativeEndian.PutUint32(b[at:], uint32(at))
	}
	pair := func(at uint64) uint64 {
		if nativeLittle {
			return at | (at+4)<<32
		}
		return at<<32 | (at + 4)
	}
	want := TCPInfo{
		State: StateCloseWait, Unacked: 24, LastSent: 44 * time.Millisecond, LastRecv: 52 * time.Millisecond,
		LastAck: 56 * time.Millisecond, RTT: 68 * time.Microsecond, TotalRetrans: 100, BytesAcked: pair(120),
		BytesReceived: pair(128), NotSent: 144, DataSegsIn: 152, DataSegsOut: 156, BytesSent: pair(200), SndWnd: 228,
		ReceivedOOOData: true,
	}
	if got := parseTCPInfo(b); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	want.SndWnd = UnknownWindow // Linux 5.3 and before
	if got := parseTCPInfo(b[:228]); got != want {
		t.Errorf("228 bytes: got %+v, want %+v", got, want)
	}
}

func FuzzParseTCPInfo(f *testing.F) {
	for _, n := range []int{0, 1, 104, 192, 228, 232, 248, 280, 300} {
		f.Add(make([]byte, n))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		got := parseTCPInfo(b)
		if len(b) < 232 && got.SndWnd != UnknownWindow {
			t.Errorf("%d bytes: got window %d, want unknown", len(b), got.SndWnd)
		}
		// What a kernel appends later must not change what is read.
		longer := append(slices.Clone(b), make([]byte, max(0, 300-len(b)))...)
		if len(b) >= 232 && parseTCPInfo(longer) != got {
			t.Errorf("%d bytes: got %+v, and %+v with more of them", len(b), got, parseTCPInfo(longer))
		}
	})
}

// appendDiagMsg is what the kernel sends for a socket.
func appendDiagMsg(b []byte, typ, flags uint16, seq uint32, s Socket, attrs []byte) []byte {
	m := make([]byte, lenMsg)
	m[0], m[1] = s.Family, s.State
	binary.BigEndian.PutUint16(m[4:], s.Local.Port())
	binary.BigEndian.PutUint16(m[6:], s.Remote.Port())
	putAddr(m[8:24], s.Family, s.Local.Addr())
	putAddr(m[24:40], s.Family, s.Remote.Addr())
	binary.NativeEndian.PutUint32(m[40:], s.Interface)
	binary.NativeEndian.PutUint32(m[44:], uint32(s.Cookie))
	binary.NativeEndian.PutUint32(m[48:], uint32(s.Cookie>>32))
	binary.NativeEndian.PutUint32(m[56:], s.RQueue)
	binary.NativeEndian.PutUint32(m[60:], s.WQueue)
	binary.NativeEndian.PutUint32(m[64:], s.UID)
	binary.NativeEndian.PutUint32(m[68:], s.Inode)
	m = append(m, attrs...)
	b = binary.NativeEndian.AppendUint32(b, uint32(lenNlmsg+len(m)))
	b = binary.NativeEndian.AppendUint16(b, typ)
	b = binary.NativeEndian.AppendUint16(b, flags)
	b = binary.NativeEndian.AppendUint32(b, seq)
	b = binary.NativeEndian.AppendUint32(b, 0)
	b = append(b, m...)
	return append(b, make([]byte, align4(len(b))-len(b))...)
}

func TestParseSocket(t *testing.T) {
	want := Socket{
		Family: unix.AF_INET6, State: StateEstablished, Cookie: 1<<40 | 7, Inode: 99, UID: 33, RQueue: 5, WQueue: 6,
		Interface: 3, Local: netip.MustParseAddrPort("192.0.2.1:80"), Remote: netip.MustParseAddrPort("[2001:db8::1]:1234"),
		V6Only: true, Shutdown: 2, CgroupID: 77, Mark: 9, MPTCP: true, Tag: []byte{1, 2, 3, 4, 5, 6, 7, 8},
	}
	attrs := appendAttr(nil, attrShutdown, []byte{2})
	attrs = appendAttr(attrs, attrV6Only, []byte{1})
	attrs = appendAttr(attrs, attrMark, binary.NativeEndian.AppendUint32(nil, 9))
	attrs = appendAttr(attrs, attrCgroup, binary.NativeEndian.AppendUint64(nil, 77))
	attrs = appendAttr(attrs, attrULP|unix.NLA_F_NESTED, appendAttr(nil, ulpName, []byte("mptcp\x00")))
	value := appendAttr(appendAttr(nil, 2, []byte{0, 0, 0, 0}), storageValue, want.Tag)
	attrs = appendAttr(attrs, attrStorages, appendAttr(nil, storage, value))
	attrs = appendAttr(attrs, attrInfo, make([]byte, 104))
	info := parseTCPInfo(make([]byte, 104))
	b := appendDiagMsg(nil, sockDiagByFamily, 0, 1, want, attrs)

	got, err := parseSocket(b[lenNlmsg:], Filter{Info: true, Cgroup: true, Tags: true})
	if err != nil || got.Info == nil || *got.Info != info || string(got.Tag) != string(want.Tag) {
		t.Fatalf("got %+v, %v", got, err)
	}
	got.Info, got.Tag, want.Tag = nil, nil, nil
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if got, err = parseSocket(b[lenNlmsg:], Filter{}); err != nil || got.Info != nil || got.Tag != nil || got.CgroupID != 0 {
		t.Errorf("not asked for: got %+v, %v", got, err)
	}
}

// A destroy request must name exactly the socket that the dump showed.
func TestDestroyRequestNamesTheSocket(t *testing.T) {
	for _, s := range []Socket{
		{Family: unix.AF_INET, Local: netip.MustParseAddrPort("192.0.2.1:80"), Remote: netip.MustParseAddrPort("192.0.2.9:4321")},
		{Family: unix.AF_INET6, Local: netip.MustParseAddrPort("192.0.2.1:80"), Remote: netip.MustParseAddrPort("192.0.2.9:4321")},
		{Family: unix.AF_INET6, Local: netip.MustParseAddrPort("[2001:db8::1]:80"), Remote: netip.MustParseAddrPort("[2001:db8::2]:1")},
	} {
		s.Cookie, s.Interface = 0x1122334455667788, 4
		answer := appendDiagMsg(nil, sockDiagByFamily, 0, 1, s, nil)
		ask := destroyRequest(1, s)
		if got, want := ask[lenNlmsg+8:lenNlmsg+8+lenSockID], answer[lenNlmsg+4:lenNlmsg+4+lenSockID]; string(got) != string(want) {
			t.Errorf("%v: got id %x, want %x", s.Local, got, want)
		}
	}
}

func FuzzNetlink(f *testing.F) {
	s := Socket{Family: unix.AF_INET, State: StateListen, Local: netip.MustParseAddrPort("192.0.2.1:80")}
	attrs := appendAttr(nil, attrStorages, appendAttr(nil, storage, appendAttr(nil, storageValue, []byte{1})))
	attrs = appendAttr(attrs, attrULP, appendAttr(nil, ulpName, []byte("tls\x00")))
	attrs = appendAttr(attrs, attrInfo, make([]byte, 232))
	f.Add(appendDiagMsg(nil, sockDiagByFamily, unix.NLM_F_MULTI, 1, s, attrs))
	f.Add(appendDiagMsg(appendDiagMsg(nil, unix.NLMSG_ERROR, 0, 1, s, nil), unix.NLMSG_DONE, 0, 1, s, nil))
	f.Add([]byte{16, 0, 0, 0, 3, 0, 2, 0, 1, 0, 0, 0, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		messages := 0
		err := eachMessage(b, func(m message) error {
			messages++
			m.errno()
			got, err := parseSocket(m.payload, Filter{Info: true, Tags: true, Cgroup: true})
			if err == nil && (!got.Local.IsValid() || !got.Remote.IsValid()) {
				t.Errorf("%x: got %+v", m.payload, got)
			}
			return nil
		})
		if err == nil && messages*lenNlmsg > len(b) {
			t.Errorf("%d messages in %d bytes", messages, len(b))
		}
	})
}

// The filter is a program for the kernel; this runs it as the kernel would (inet_diag_bc_run).
func TestPortFilter(t *testing.T) {
	run := func(bc []byte, port uint16) bool {
		for left := len(bc); left > 0; {
			op := bc[len(bc)-left:]
			yes, no := int(op[1]), int(binary.NativeEndian.Uint16(op[2:]))
			switch {
			case op[0] == bcSrc && binary.NativeEndian.Uint16(op[6:]) == port:
				left -= yes
			default:
				left -= no
			}
			if left < 0 {
				return false
			}
		}
		return true
	}
	for _, ports := range [][]uint16{{80}, {80, 443}, {1, 2, 3, 65535}, make([]uint16, maxFilterPorts)} {
		bc := portFilter(ports)
		if len(bc)+8 > 1<<16 {
			t.Errorf("%d ports: filter of %d bytes does not fit an attribute", len(ports), len(bc))
		}
		for _, p := range ports {
			if !run(bc, p) {
				t.Errorf("ports %v: %d is rejected", ports, p)
			}
		}
		if run(bc, 8080) {
			t.Errorf("ports %v: 8080 is accepted", ports)
		}
	}
}

func TestParseProcUDP(t *testing.T) {
	const v4 = `   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops
  1: 0100007F:0035 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 111 2 0 0
  2: 00000000:0044 0200000A:0043 01 00000000:00000000 00:00000000 00000000     0        0 112 2 0 0
`
	const v6 = `  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops
  3: B80D0120000000000000000001000000:14E9 00000000000000000000000000000000:0000 07 00000000:00000000 00:00000000 00000000   0 0 113 2 0 0
`
	if !nativeLittle {
		t.Skip("the tables above are those of a little-endian machine")
	}
	for _, c := range []struct {
		table string
		want  []named
	}{{v4, []named{{111, "127.0.0.1:53"}}}, {v6, []named{{113, "[2001:db8::1]:5353"}}}} {
		got, err := parseProcUDP(strings.NewReader(c.table))
		if err != nil || !slices.Equal(got, c.want) {
			t.Errorf("got %v, %v, want %v", got, err, c.want)
		}
	}
}

func TestParseProcUnix(t *testing.T) {
	const table = `Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00010000 0001 01 201 /run/x.sock
0000000000000000: 00000002 00000000 00010000 0005 01 202 @abstract
0000000000000000: 00000003 00000000 00000000 0001 03   203 /run/accepted
0000000000000000: 00000002 00000000 00010000 0001 01   204 /run/with blanks
0000000000000000: 00000002 00000000 00010000 0001 01 205
`
	want := []named{{201, "/run/x.sock"}, {202, "@abstract"}, {204, "/run/with blanks"}, {205, "(unnamed)"}}
	got, err := parseProcUnix(strings.NewReader(table))
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("got %v, %v, want %v", got, err, want)
	}
}

func FuzzProcNet(f *testing.F) {
	f.Add("head\n 1: 0100007F:0035 00000000:0000 07 0:0 0:0 0 0 0 111 2 0 0\n")
	f.Add("head\n0: 2 0 00010000 0001 01 205 /a b\n")
	f.Add("head\n\n\x00")
	f.Fuzz(func(t *testing.T, table string) {
		udp, err := parseProcUDP(strings.NewReader(table))
		for _, s := range udp {
			if a, perr := netip.ParseAddrPort(s.name); err == nil && (perr != nil || a.Port() == 0 || s.inode == 0) {
				t.Errorf("udp: got %v", s)
			}
		}
		unixes, err := parseProcUnix(strings.NewReader(table))
		for _, s := range unixes {
			if err == nil && (s.inode == 0 || s.name == "") {
				t.Errorf("unix: got %v", s)
			}
		}
	})
}

func FuzzSocketLink(f *testing.F) {
	f.Add("socket:[12345]")
	f.Add("pipe:[1]")
	f.Fuzz(func(t *testing.T, s string) {
		if n, ok := parseSocketLink(s); ok && (n == 0 || !strings.HasPrefix(s, "socket:[")) {
			t.Errorf("%q: got %d", s, n)
		}
	})
}

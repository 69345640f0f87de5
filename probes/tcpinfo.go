// SPDX-License-Identifier: Apache-2.0

package probes

import (
	"encoding/binary"
	"time"
)

// TCPInfo is what is used of the kernel's struct tcp_info (include/uapi/linux/tcp.h). The kernel appends fields over
// time: 232 bytes in 5.10, 280 in 7.3. Fields that a kernel does not have are zero, except SndWnd.
type TCPInfo struct {
	State           uint8
	Unacked         uint32 // segments out and not acknowledged; of a listener: connections in its accept queue
	LastSent        time.Duration
	LastRecv        time.Duration // these three: how long ago, in steps of the kernel's tick (4 ms at HZ 250)
	LastAck         time.Duration
	RTT             time.Duration // smoothed
	TotalRetrans    uint32        // segments sent again
	BytesAcked      uint64
	BytesReceived   uint64 // in sequence; the peer's FIN counts as one
	NotSent         uint32 // bytes written by the application and not sent yet
	DataSegsIn      uint32
	DataSegsOut     uint32
	BytesSent       uint64 // those sent again count again
	SndWnd          uint32 // what the peer has room for, in bytes; [UnknownWindow] before Linux 5.4
	ReceivedOOOData bool   // data came out of order at least once
}

// UnknownWindow stands for a peer's window that the kernel does not tell.
const UnknownWindow = ^uint32(0)

// parseTCPInfo accepts any length: what is cut off is zero.
func parseTCPInfo(b []byte) TCPInfo {
	u32 := func(at int) uint32 {
		if at+4 > len(b) {
			return 0
		}
		return binary.NativeEndian.Uint32(b[at:])
	}
	u64 := func(at int) uint64 {
		if at+8 > len(b) {
			return 0
		}
		return binary.NativeEndian.Uint64(b[at:])
	}
	ms := func(at int) time.Duration { return time.Duration(u32(at)) * time.Millisecond }
	t := TCPInfo{
		Unacked:         u32(24),
		LastSent:        ms(44),
		LastRecv:        ms(52),
		LastAck:         ms(56),
		RTT:             time.Duration(u32(68)) * time.Microsecond,
		TotalRetrans:    u32(100),
		BytesAcked:      u64(120),
		BytesReceived:   u64(128),
		NotSent:         u32(144),
		DataSegsIn:      u32(152),
		DataSegsOut:     u32(156),
		BytesSent:       u64(200),
		SndWnd:          UnknownWindow,
		ReceivedOOOData: u32(224) > 0,
	}
	if len(b) > 0 {
		t.State = b[0]
	}
	if len(b) >= 232 {
		t.SndWnd = u32(228)
	}
	return t
}

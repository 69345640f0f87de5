// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/proxy"
)

// The control socket carries one JSON document per packet: a command, then its answer. A connection handed over travels
// with its command as SCM_RIGHTS. Both ends are usually of the same build; an answer with members that are unknown is
// read all the same, a command is not.
const protocolVersion = 1

// maxPacket bounds a command and an answer, in bytes. It has to fit into a socket's default send buffer
// (net.core.wmem_default, at least 160 KiB), and holds about a thousand peers.
const maxPacket = 128 << 10

// The commands.
const (
	opConfigure = "configure" // the first of all, once
	opPeers     = "peers"
	opAdopt     = "adopt"
	opPark      = "park"
	opRelease   = "release"
	opExtend    = "extend"
	opLetGo     = "let_go"
	opStats     = "stats"
	opStop      = "stop"
)

// request is a command to the relay.
type request struct {
	Version int          `json:"version"`
	Op      string       `json:"op"`
	Config  *config      `json:"config,omitempty"` // of configure
	Peers   []proxy.Peer `json:"peers,omitempty"`  // of peers and release
	Until   time.Time    `json:"until,omitzero"`   // of extend
}

// config is Options as far as the process needs them.
type config struct {
	Name           string            `json:"name"`
	Place          Place             `json:"place"`
	Peers          []proxy.Peer      `json:"peers,omitempty"`
	MaxConnections int               `json:"max_connections,omitempty"`
	DialTimeout    time.Duration     `json:"dial_timeout,omitempty"`
	IdleTimeout    time.Duration     `json:"idle_timeout,omitempty"`
	RetireAfter    time.Duration     `json:"retire_after,omitempty"`
	Park           proxy.ParkOptions `json:"park"`
	Health         *proxy.Health     `json:"health,omitempty"`
	Parked         bool              `json:"parked,omitempty"`
	Until          time.Time         `json:"until"`
	OrphanFor      time.Duration     `json:"orphan_for,omitempty"`
}

// answer is what the relay says to a command.
type answer struct {
	Error string `json:"error,omitempty"`
	Stats *Stats `json:"stats,omitempty"`
}

// Stats is what a relay process has done and holds.
type Stats struct {
	Relay    proxy.Stats `json:"relay"`
	Late     []LateCount `json:"late,omitempty"` // by action and result, only what is not zero; counts from the start of the process
	Peers    []PeerState `json:"peers,omitempty"`
	Parking  bool        `json:"parking"`  // new connections are parked
	Stopping bool        `json:"stopping"` // nothing is accepted any more
	Started  time.Time   `json:"started"`
	Until    time.Time   `json:"until"`
	Listener uint64      `json:"listener"` // its socket cookie (SO_COOKIE), by which rules name it
	PID      int         `json:"pid"`      // in the relay's own pid namespace
	Place    Place       `json:"place"`
	Name     string      `json:"name"`
}

// LateCount is how many connections came to one end.
type LateCount struct {
	Action proxy.Action `json:"action"`
	Result proxy.Result `json:"result"`
	N      uint64       `json:"n"`
}

// PeerState is what is known of one peer.
type PeerState struct {
	Peer     proxy.Peer      `json:"peer"`
	State    proxy.PeerState `json:"state"`
	InFlight int             `json:"in_flight"`
	Dialled  uint64          `json:"dialled"`
	Failed   uint64          `json:"failed"`
	Err      string          `json:"err,omitempty"`
}

// decodeRequest reads a command strictly: what a relay does not know it must not silently leave out.
func decodeRequest(b []byte) (request, error) {
	var q request
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&q); err != nil {
		return q, fmt.Errorf("read command: %w", err)
	}
	if d.More() {
		return q, errors.New("read command: there is more than one document in the packet")
	}
	if q.Version != protocolVersion {
		return q, fmt.Errorf("command %q is of version %d of the protocol, and this relay speaks %d", q.Op, q.Version, protocolVersion)
	}
	return q, nil
}

// receive reads one packet and the descriptors that came with it. The caller owns them, also on error.
func receive(c *net.UnixConn, b []byte) (n int, fds []int, err error) {
	oob := make([]byte, unix.CmsgSpace(4*maxRights))
	n, oobn, flags, _, err := c.ReadMsgUnix(b, oob)
	if oobn > 0 {
		msgs, perr := unix.ParseSocketControlMessage(oob[:oobn])
		if perr != nil {
			return n, nil, errors.Join(err, fmt.Errorf("read control message: %w", perr))
		}
		for _, m := range msgs {
			if m.Header.Level == unix.SOL_SOCKET && m.Header.Type == unix.SCM_RIGHTS {
				got, perr := unix.ParseUnixRights(&m)
				if perr != nil {
					return n, fds, errors.Join(err, fmt.Errorf("read descriptors: %w", perr))
				}
				fds = append(fds, got...)
			}
		}
	}
	switch {
	case err != nil:
		return n, fds, err
	case flags&unix.MSG_TRUNC != 0:
		return n, fds, fmt.Errorf("read packet: it has more than %d bytes", len(b))
	case flags&unix.MSG_CTRUNC != 0:
		return n, fds, fmt.Errorf("read packet: it carries more than %d descriptors, or there was no room for them here", maxRights)
	}
	return n, fds, nil
}

// maxRights is how many descriptors a packet may carry: none of the commands takes more than one, and a few more are
// read so that they can be closed.
const maxRights = 4

// send writes v as one packet, with fd if it is not negative.
func send(c *net.UnixConn, v any, fd int) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode packet: %w", err)
	}
	if len(b) > maxPacket {
		return fmt.Errorf("encode packet: %d bytes are more than %d", len(b), maxPacket)
	}
	var oob []byte
	if fd >= 0 {
		oob = unix.UnixRights(fd)
	}
	if _, _, err := c.WriteMsgUnix(b, oob, nil); err != nil {
		return os.NewSyscallError("sendmsg", err)
	}
	return nil
}

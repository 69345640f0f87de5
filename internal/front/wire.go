// SPDX-License-Identifier: Apache-2.0

package front

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
)

// Limits of the protocol. A message is its length, four bytes big-endian, and one JSON object.
const (
	// maxCall bounds what the core reads: a request has at most as much, and its strings are bounded by the API.
	maxCall = 64 << 10
	// maxAnswer bounds what the front reads; 10,000 stragglers, the most that can be asked for, take 3 MiB.
	maxAnswer = 32 << 20
	// maxCalls are answered at the same time: the requests of three listeners, what the sessions of a fourth say, and the
	// looks for their streams. More wait.
	maxCalls = 256
	// callTimeout bounds the core's work for one call.
	callTimeout = 30 * time.Second
	// writeTimeout is for the other one to take a message.
	writeTimeout = 10 * time.Second
	// The front pings; one who has heard nothing for so long gives the other one up. A standby kills a core that hangs
	// for 11 s, whereupon its front ends at once.
	pingEvery    = 2 * time.Second
	corePatience = 30 * time.Second
	patience     = 20 * time.Second
)

// The operations of a call.
const (
	opReady        = "ready" // the front serves; no answer
	opPing         = "ping"
	opBackends     = "backends"
	opBackend      = "backend"
	opStragglers   = "stragglers"
	opDrain        = "drain"
	opUndrain      = "undrain"
	opExtend       = "extend"
	opCut          = "cut"
	opDrains       = "drains"
	opDrainByID    = "drain-by-id"
	opReadyAll     = "readyz"
	opBackendReady = "readyz-name"
	opOwner        = "owner"
	opMetrics      = "metrics"
	opAudit        = "audit"

	opOpenSession   = "open-session"
	opSessionCall   = "session"
	opSessionEvents = "session-events"
)

// call is what the front asks. Which members count is the operation's matter.
type call struct {
	ID      uint64              `json:"id"`
	Op      string              `json:"op"`
	Name    string              `json:"name,omitempty"` // of a backend, or the id of a drain
	N       int                 `json:"n,omitempty"`    // rows, or a pid
	By      string              `json:"by,omitempty"`   // who asks, as the front says
	Drain   *api.DrainRequest   `json:"drain,omitempty"`
	Undrain *api.UndrainRequest `json:"undrain,omitempty"`
	Extend  *api.ExtendRequest  `json:"extend,omitempty"`
	Cut     *api.CutRequest     `json:"cut,omitempty"`
	Audit   *audit              `json:"audit,omitempty"`
	Session *sessionCall        `json:"session,omitempty"`
}

// sessionCall is what the process of a backend asks.
type sessionCall struct {
	ID      string              `json:"id,omitempty"` // of the session
	Process api.Process         `json:"process"`
	Open    *api.SessionRequest `json:"open,omitempty"`
	Call    *api.SessionCall    `json:"call,omitempty"`
	From    uint64              `json:"from,omitempty"`   // the first event wanted
	Stream  uint64              `json:"stream,omitempty"` // of the reader
}

// audit is api.Audit without its time, which is the core's.
type audit struct {
	UID     int    `json:"uid"`
	PID     int    `json:"pid"`
	By      string `json:"by"`
	Action  string `json:"action"`
	Backend string `json:"backend"`
	Drain   string `json:"drain"`
	Reason  string `json:"reason"`
	Status  int    `json:"status"`
	Err     string `json:"err"`
	Before  int    `json:"before,omitempty"`
}

// message is what the core says: one member is set.
type message struct {
	Hello  *hello     `json:"hello,omitempty"` // the first
	Answer *answer    `json:"answer,omitempty"`
	Event  *api.Event `json:"event,omitempty"`
	Closed bool       `json:"closed,omitempty"` // the log is
	Stop   bool       `json:"stop,omitempty"`   // bring to an end what is under way, and end
}

type answer struct {
	ID     uint64          `json:"id"`
	Error  *failure        `json:"error,omitempty"`
	Result json.RawMessage `json:"result,omitempty"`
}

// hello is what the front has to know. Its listeners are the descriptors after that of the socket, in this order.
type hello struct {
	UID         int             `json:"uid"` // of the core
	Entrances   []entrance      `json:"entrances"`
	Credentials api.Credentials `json:"credentials"`
	Log         api.LogSnapshot `json:"log"`
	Metrics     bool            `json:"metrics"`
	Sessions    bool            `json:"sessions"` // the core has applications
}

type entrance struct {
	Kind Kind `json:"kind"`
	GID  int  `json:"gid"`
}

// page is the core's GET /metrics: of many backends a few megabytes, and compressed a few percent of that.
type page struct {
	Status   int    `json:"status"`
	Type     string `json:"type"`
	Encoding string `json:"encoding"` // gzip, or empty
	Body     []byte `json:"body"`
}

// failure is an error that keeps its sentinel across processes.
type failure struct {
	Kind string `json:"kind,omitempty"`
	Text string `json:"text"`
}

// kinds are the sentinels that mean something to the API, each with all that it stands for.
var kinds = []struct {
	name      string
	sentinels []error
}{
	{"unknown", []error{api.ErrUnknown}},
	{"unknown-drain", []error{api.ErrUnknownDrain}},
	{"unknown-session", []error{api.ErrUnknownSession}},
	{"ambiguous-session", []error{api.ErrAmbiguous}},
	{"stale", []error{api.ErrStale, drain.ErrStale}},
	{"not-draining", []error{api.ErrNotDraining, drain.ErrNotDraining}},
	{"flushing", []error{api.ErrFlushing, drain.ErrFlushing}},
	{"not-possible", []error{api.ErrNotPossible, drain.ErrPolicy, drain.ErrLimit, drain.ErrOff}},
	{"too-fast", []error{api.ErrTooFast}},
	{"not-ready", []error{api.ErrNotReady}},
}

func failureOf(err error) *failure {
	for _, k := range kinds {
		if slices.ContainsFunc(k.sentinels, func(s error) bool { return errors.Is(err, s) }) {
			return &failure{k.name, err.Error()}
		}
	}
	return &failure{"", err.Error()}
}

// Error is the text that the core gave.
func (f *failure) Error() string { return f.Text }

// Unwrap is the sentinel, nil if there is none.
func (f *failure) Unwrap() error {
	for _, k := range kinds {
		if k.name == f.Kind {
			return k.sentinels[0]
		}
	}
	return nil
}

// link is one end of the socket.
type link struct {
	conn net.Conn
	mu   sync.Mutex // of writers
}

var errTooLong = errors.New("it is too long")

// write sends v; it may be called from any goroutine.
func (l *link) write(v any, limit int) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode message: %w", err)
	}
	if len(b) > limit {
		return fmt.Errorf("write message of %d bytes: %w", len(b), errTooLong)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.conn.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return fmt.Errorf("write message: %w", err)
	}
	if _, err := l.conn.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(b))), b...)); err != nil {
		return fmt.Errorf("write message: %w", err)
	}
	return nil
}

// read receives a message of at most limit bytes into v, for which it waits at most for within. It belongs to one goroutine.
func (l *link) read(v any, limit int, within time.Duration) error {
	if err := l.conn.SetReadDeadline(time.Now().Add(within)); err != nil {
		return fmt.Errorf("read message: %w", err)
	}
	var size [4]byte
	if _, err := io.ReadFull(l.conn, size[:]); err != nil {
		return fmt.Errorf("read message: %w", err)
	}
	n := binary.BigEndian.Uint32(size[:])
	if n == 0 || uint64(n) > uint64(limit) {
		return fmt.Errorf("read message of %d bytes: %w", n, errTooLong)
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(l.conn, b); err != nil {
		return fmt.Errorf("read message: %w", err)
	}
	return decode(b, v)
}

// decode reads the one JSON object in b, which has no member that v has not. Numbers stay what they were.
func decode(b []byte, v any) error {
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	dec.UseNumber()
	if err := dec.Decode(v); err != nil {
		return fmt.Errorf("decode message: %w", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return errors.New("decode message: something follows it")
	}
	return nil
}

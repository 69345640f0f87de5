// SPDX-License-Identifier: Apache-2.0

package hook

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"syscall"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/hook/inside"
)

const (
	// dialTimeout is for one attempt to connect: the kernel repeats a SYN that was lost after 1 s, and an
	// application that lives answers at once.
	dialTimeout = 2 * time.Second
	// The pause before a request is repeated doubles from the first to the longest.
	firstPause   = 100 * time.Millisecond
	longestPause = time.Second
	// answerMax is how much of an answer is read, for answerPatience at most, and answerShown how much of a refusal
	// the error says. The status alone decides.
	answerMax      = 4 << 10
	answerShown    = 200
	answerPatience = time.Second
)

// Kind is the moment that an application is told of.
type Kind string

// The two moments.
const (
	Notify Kind = "notify" // you are draining
	Flush  Kind = "flush"  // end now
)

// Message is what an application is told.
type Message struct {
	Drain, Backend, Service string
	Gen                     uint64
	Kind                    Kind
	Reason                  drain.FlushReason // of a flush
	Cause                   drain.Cause
	TimeLeft                time.Duration // from the call of Deliver: a flush's to the end of its slice, a notify's to the deadline
}

// Key is what makes a repeated message known as such: one drain has one of each kind.
func (m Message) Key() string { return m.Drain + "-" + string(m.Kind) }

// Target is the application that is told.
type Target struct {
	Signal func(syscall.Signal) error // sends to the main process; needed for a signal
	NetNS  int                        // descriptor of its network namespace, open while Deliver runs; 0 or less: the caller's
	Env    []string                   // of a program, besides PATH and EBB_*
	Log    *slog.Logger               // takes what a program writes; nil discards
}

// Deliver tells the application and returns once it has been told, or cannot be. It wraps ErrAPI for a hook that a
// session carries, and the cause of ctx if that ends first: give it the slice's end. It may be called concurrently.
//
// signal: sent once. Whether the application does anything about it is not known.
//
// http: POST of a JSON object with the members drain, backend, service, gen, kind, reason, cause, deadline (RFC 3339)
// and time_left_ms, and the header Idempotency-Key: DRAIN-KIND. A status of 200 to 299 is success, and nothing is sent
// after it. A connection that fails, 429 and 5xx are tried again, with a pause of 100 ms that doubles up to 1 s, until
// ctx ends; so an application that loses its answer may see the key twice. Any other status is final, redirects
// included, and so is a certificate that this host does not trust. The application may take as long to answer as ctx
// lasts. A host name is resolved by the caller's resolver (localhost is the loopback of the namespace), and its addresses
// are connected to inside the namespace.
//
// exec: run once, in the network namespace and the caller's other ones, with PATH, Target.Env and EBB_DRAIN,
// EBB_BACKEND, EBB_SERVICE, EBB_GEN, EBB_KIND, EBB_REASON, EBB_CAUSE, EBB_DEADLINE (RFC 3339) and EBB_TIME_LEFT_MS. Exit
// status 0 is success. It is killed with its process group when ctx ends. See inside.Run.
func (h Hook) Deliver(ctx context.Context, t Target, m Message) error {
	deadline := time.Now().Add(m.TimeLeft)
	if t.Log == nil {
		t.Log = slog.New(slog.DiscardHandler)
	}
	var err error
	switch {
	case h.API:
		err = ErrAPI
	case h.Signal != 0:
		err = t.Signal(h.Signal)
	case h.HTTP != "":
		err = h.post(ctx, newClient(t.NetNS), t, m, deadline)
	case h.Exec != nil:
		err = h.run(ctx, t, m, deadline)
	default:
		err = fmt.Errorf("%w: it is not set", ErrInvalid)
	}
	if err != nil {
		return fmt.Errorf("deliver %s: %w", m.Kind, err)
	}
	return nil
}

func (h Hook) run(ctx context.Context, t Target, m Message, deadline time.Time) error {
	out := &lines{log: t.Log.With("backend", m.Backend, "gen", m.Gen, "drain", m.Drain, "hook", m.Kind)}
	err := inside.Run(ctx, inside.Program{NetNS: t.NetNS, Argv: h.Exec, Output: out, Env: append(t.Env[:len(t.Env):len(t.Env)],
		"EBB_DRAIN="+m.Drain, "EBB_BACKEND="+m.Backend, "EBB_SERVICE="+m.Service, "EBB_GEN="+strconv.FormatUint(m.Gen, 10),
		"EBB_KIND="+string(m.Kind), "EBB_REASON="+string(m.Reason), "EBB_CAUSE="+string(m.Cause),
		"EBB_DEADLINE="+deadline.UTC().Format(time.RFC3339Nano), "EBB_TIME_LEFT_MS="+strconv.FormatInt(left(deadline), 10))})
	out.end()
	return err
}

func left(deadline time.Time) int64 { return max(0, time.Until(deadline).Milliseconds()) }

// body is a Message as JSON.
type body struct {
	Drain      string            `json:"drain"`
	Backend    string            `json:"backend"`
	Service    string            `json:"service,omitempty"`
	Gen        uint64            `json:"gen"`
	Kind       Kind              `json:"kind"`
	Reason     drain.FlushReason `json:"reason,omitempty"`
	Cause      drain.Cause       `json:"cause"`
	Deadline   time.Time         `json:"deadline"`
	TimeLeftMS int64             `json:"time_left_ms"`
}

// errAgain wraps what may be different next time.
type errAgain struct{ error }

func (e errAgain) Unwrap() error { return e.error }

// newClient connects anew for each request, inside the namespace, and follows no redirect and no proxy.
func newClient(netNS int) *http.Client {
	return &http.Client{
		Transport: &http.Transport{
			DisableKeepAlives:      true,
			MaxResponseHeaderBytes: 64 << 10,
			DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
				return dial(ctx, netNS, address)
			},
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

func (h Hook) post(ctx context.Context, client *http.Client, t Target, m Message, deadline time.Time) error {
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		err := h.postOnce(ctx, client, m, deadline)
		var again errAgain
		if !errors.As(err, &again) {
			return err
		}
		if ctx.Err() == nil {
			t.Log.Debug("hook is repeated", "backend", m.Backend, "drain", m.Drain, "hook", m.Kind, "err", err)
			// Between a half and the whole of it, so that those told at the same time do not come back together.
			wait := time.NewTimer(pause/2 + rand.N(pause/2))
			select {
			case <-wait.C:
				continue
			case <-ctx.Done():
				wait.Stop()
			}
		}
		if cause := context.Cause(ctx); !errors.Is(err, cause) {
			return fmt.Errorf("%w; the last attempt: %w", cause, again.error)
		}
		return again.error
	}
}

func (h Hook) postOnce(ctx context.Context, client *http.Client, m Message, deadline time.Time) error {
	b, err := json.Marshal(body{
		Drain: m.Drain, Backend: m.Backend, Service: m.Service, Gen: m.Gen, Kind: m.Kind, Reason: m.Reason, Cause: m.Cause,
		Deadline: deadline.UTC(), TimeLeftMS: left(deadline),
	})
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, h.HTTP, bytes.NewReader(b))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Idempotency-Key", m.Key())
	req.Header.Set("User-Agent", "ebb-hook")
	resp, err := client.Do(req)
	if bad := (*tls.CertificateVerificationError)(nil); errors.As(err, &bad) {
		return err // it is the same one next time
	}
	if err != nil {
		return errAgain{err}
	}
	patience := time.AfterFunc(answerPatience, func() { resp.Body.Close() })
	// What there is of a body that breaks off will do.
	answer, _ := io.ReadAll(io.LimitReader(resp.Body, answerMax))
	patience.Stop()
	resp.Body.Close()
	if resp.StatusCode >= 200 && resp.StatusCode <= 299 {
		return nil
	}
	err = fmt.Errorf("%s answered %s", h.HTTP, resp.Status)
	if answer = bytes.TrimSpace(answer); len(answer) > 0 {
		err = fmt.Errorf("%w: %q", err, answer[:min(len(answer), answerShown)])
	}
	if resp.StatusCode == http.StatusTooManyRequests || resp.StatusCode >= 500 {
		return errAgain{err}
	}
	return err
}

// dial connects to the first address of a host that answers.
func dial(ctx context.Context, netNS int, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	host, service, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	port, err := strconv.ParseUint(service, 10, 16)
	if err != nil {
		return nil, err
	}
	var addrs []netip.Addr
	if host == "localhost" {
		addrs = []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}
	} else if addrs, err = net.DefaultResolver.LookupNetIP(ctx, "ip", host); err != nil {
		return nil, err
	}
	var errs error
	for _, a := range addrs {
		c, err := inside.Dial(ctx, netNS, netip.AddrPortFrom(a, uint16(port)), [2]uint16{})
		if err == nil {
			return c, nil
		}
		errs = errors.Join(errs, err)
	}
	return nil, errs
}

// SPDX-License-Identifier: Apache-2.0

package hook

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/netnstest"
)

var message = Message{
	Drain: "d1", Backend: "web-blue", Service: "web", Gen: 7, Kind: Flush, Reason: drain.FlushZero,
	Cause: drain.CauseOperator, TimeLeft: time.Minute,
}

// limit is for what happens at once, on any machine.
func limit(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// transport answers requests without a network.
type transport func(*http.Request) (*http.Response, error)

func (f transport) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func answer(status int) *http.Response {
	return &http.Response{StatusCode: status, Status: strconv.Itoa(status), Body: http.NoBody}
}

func TestD5_FlushCarriesAnIdempotencyKey(t *testing.T) {
	netnstest.LeakCheck(t)
	var keys []string
	var got body
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		keys = append(keys, r.Header.Get("Idempotency-Key"))
		if err := json.NewDecoder(r.Body).Decode(&got); err != nil {
			t.Errorf("body: %v", err)
		}
		if len(keys) < 3 {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	defer srv.Close()
	if err := (Hook{HTTP: srv.URL}).Deliver(limit(t), Target{}, message); err != nil {
		t.Fatal(err)
	}
	if want := []string{"d1-flush", "d1-flush", "d1-flush"}; !slices.Equal(keys, want) {
		t.Errorf("got keys %q, want %q", keys, want)
	}
	if got.TimeLeftMS <= 0 || got.TimeLeftMS > 60_000 || time.Until(got.Deadline) > time.Minute {
		t.Errorf("got %d ms left until %v, want a minute", got.TimeLeftMS, got.Deadline)
	}
	got.TimeLeftMS, got.Deadline = 0, time.Time{}
	want := body{Drain: "d1", Backend: "web-blue", Service: "web", Gen: 7, Kind: Flush, Reason: "zero", Cause: "operator"}
	if got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

// Over https the application proves who it is, and one that cannot is not asked again.
func TestHTTPSIsVerified(t *testing.T) {
	var asked, refused atomic.Int32
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked.Add(1) }))
	srv.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, 0)
	srv.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			refused.Add(1)
		}
	}
	srv.StartTLS()
	defer srv.Close()
	h := Hook{HTTP: srv.URL}
	if err := h.Deliver(limit(t), Target{}, message); err == nil || asked.Load() != 0 || refused.Load() != 1 {
		t.Errorf("an unknown authority: got %v after %d requests over %d connections, want it refused at the first", err, asked.Load(), refused.Load())
	}
	trusting := srv.Client()
	if err := h.post(limit(t), trusting, Target{Log: slog.New(slog.DiscardHandler)}, message, time.Now()); err != nil || asked.Load() != 1 {
		t.Errorf("got %v after %d requests, want one", err, asked.Load())
	}
}

func TestT12_DeliveredOnceOnSuccess(t *testing.T) {
	for _, status := range []int{200, 202, 204, 299} {
		n := 0
		client := &http.Client{Transport: transport(func(*http.Request) (*http.Response, error) {
			n++
			return answer(status), nil
		})}
		if err := (Hook{HTTP: "http://h/"}).post(t.Context(), client, Target{Log: slog.New(slog.DiscardHandler)}, message, time.Now()); err != nil || n != 1 {
			t.Errorf("%d: got %v after %d requests, want one", status, err, n)
		}
	}
	var sent []syscall.Signal
	err := Hook{Signal: syscall.SIGQUIT}.Deliver(t.Context(), Target{Signal: func(s syscall.Signal) error {
		sent = append(sent, s)
		return nil
	}}, message)
	if err != nil || !slices.Equal(sent, []syscall.Signal{syscall.SIGQUIT}) {
		t.Errorf("got %v, %v, want one SIGQUIT", sent, err)
	}
}

// A request is repeated after pauses that grow to a second, for as long as the slice lasts and no longer.
func TestRepeatsInsideItsSlice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var at []time.Duration
		begun := time.Now()
		client := &http.Client{Transport: transport(func(r *http.Request) (*http.Response, error) {
			at = append(at, time.Since(begun))
			if len(at)%2 == 0 {
				return nil, syscall.ECONNREFUSED
			}
			return answer(http.StatusTooManyRequests), nil
		})}
		ctx, cancel := context.WithTimeoutCause(t.Context(), 5*time.Second, drain.ErrSlice)
		defer cancel()
		err := Hook{HTTP: "http://h/"}.post(ctx, client, Target{Log: slog.New(slog.DiscardHandler)}, message, begun.Add(5*time.Second))
		if !errors.Is(err, drain.ErrSlice) || !strings.Contains(err.Error(), "the last attempt") {
			t.Errorf("got %v, want the end of the slice and the last attempt", err)
		}
		if took := time.Since(begun); took != 5*time.Second {
			t.Errorf("ended after %v, want 5s", took)
		}
		full := []time.Duration{100, 200, 400, 800, 1000, 1000, 1000}
		for i, want := range full[:min(len(full), len(at)-1)] {
			want *= time.Millisecond
			if pause := at[i+1] - at[i]; pause < want/2 || pause > want {
				t.Errorf("pause %d: got %v, want %v to %v", i, pause, want/2, want)
			}
		}
		if len(at) < 6 {
			t.Errorf("got %d attempts, want at least 6 in 5 s", len(at))
		}
	})
}

func TestRefusalIsFinal(t *testing.T) {
	for status, says := range map[int]string{
		http.StatusNotFound: strings.Repeat("x", 300), http.StatusFound: "elsewhere", http.StatusConflict: "",
	} {
		var n atomic.Int32
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			n.Add(1)
			w.Header().Set("Location", "/elsewhere")
			w.WriteHeader(status)
			_, _ = io.WriteString(w, says)
		}))
		err := Hook{HTTP: srv.URL}.Deliver(limit(t), Target{}, message)
		srv.Close()
		if err == nil || n.Load() != 1 {
			t.Fatalf("%d: got %v after %d requests, want an error after one", status, err, n.Load())
		}
		if want := says[:min(len(says), 200)]; !strings.Contains(err.Error(), strconv.Itoa(status)) || !strings.Contains(err.Error(), want) ||
			strings.Contains(err.Error(), strings.Repeat("x", 201)) {
			t.Errorf("%d: got %v, want the status and the first 200 bytes of the answer", status, err)
		}
	}
}

// An answer whose body never ends is an answer, and one without an end of its header is none.
func TestAnswersThatDoNotEnd(t *testing.T) {
	netnstest.LeakCheck(t)
	gone := make(chan struct{})
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/body" {
			w.WriteHeader(http.StatusOK)
			_ = http.NewResponseController(w).Flush()
		}
		<-gone
	}))
	defer srv.Close()
	defer close(gone)
	if err := (Hook{HTTP: srv.URL + "/body"}).Deliver(limit(t), Target{}, message); err != nil {
		t.Errorf("a body without end: got %v, want success", err)
	}
	ctx, cancel := context.WithTimeoutCause(t.Context(), 50*time.Millisecond, drain.ErrSlice)
	defer cancel()
	if err := (Hook{HTTP: srv.URL}).Deliver(ctx, Target{}, message); !errors.Is(err, drain.ErrSlice) {
		t.Errorf("no answer: got %v, want the end of the slice", err)
	}
}

// An application may open its port only while it is already being told.
func TestRepeatsUntilSomebodyListens(t *testing.T) {
	netnstest.LeakCheck(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	refused := make(chan struct{}, 100)
	log := slog.New(slog.NewTextHandler(writer(func(b []byte) {
		select {
		case refused <- struct{}{}:
		default:
		}
	}), &slog.HandlerOptions{Level: slog.LevelDebug}))
	told := make(chan error, 1)
	go func() { told <- Hook{HTTP: "http://" + addr}.Deliver(limit(t), Target{Log: log}, message) }()
	select {
	case <-refused:
	case err := <-told:
		t.Fatalf("got %v before anybody listened", err)
	}
	if l, err = net.Listen("tcp", addr); err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})}
	go func() { _ = srv.Serve(l) }()
	defer srv.Close()
	if err := <-told; err != nil {
		t.Error(err)
	}
}

type writer func([]byte)

func (f writer) Write(b []byte) (int, error) { f(b); return len(b), nil }

func TestSessionsAnswerAPI(t *testing.T) {
	if err := (Hook{API: true}).Deliver(t.Context(), Target{}, message); !errors.Is(err, ErrAPI) {
		t.Errorf("got %v, want ErrAPI", err)
	}
	if err := (Hook{}).Deliver(t.Context(), Target{}, message); !errors.Is(err, ErrInvalid) {
		t.Errorf("got %v, want ErrInvalid", err)
	}
}

func TestExec(t *testing.T) {
	netnstest.LeakCheck(t)
	t.Setenv("SECRET_OF_THE_AGENT", "1")
	var out bytes.Buffer
	target := Target{Env: []string{"MORE=yes"}, Log: slog.New(slog.NewTextHandler(&out, nil))}
	err := Hook{Exec: []string{"sh", "-c", "env | sort; printf unended; exit 3"}}.Deliver(limit(t), target, message)
	if err == nil || !strings.Contains(err.Error(), "exit status 3") {
		t.Errorf("got %v, want exit status 3", err)
	}
	for _, want := range []string{
		"EBB_DRAIN=d1", "EBB_BACKEND=web-blue", "EBB_SERVICE=web", "EBB_GEN=7", "EBB_KIND=flush", "EBB_REASON=zero",
		"EBB_CAUSE=operator", "EBB_DEADLINE=20", "EBB_TIME_LEFT_MS=", "MORE=yes", "PATH=/", "line=unended", "backend=web-blue",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("got %s\nwant %s in it", &out, want)
		}
	}
	if strings.Contains(out.String(), "SECRET_OF_THE_AGENT") {
		t.Errorf("the program got the environment of its caller")
	}
	if err := (Hook{Exec: []string{"true"}}).Deliver(limit(t), Target{}, message); err != nil {
		t.Error(err)
	}
	if err := (Hook{Exec: []string{"/nonexistent"}}).Deliver(limit(t), Target{}, message); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v, want ErrNotExist", err)
	}
}

// The end of the slice ends the program and what it has started.
func TestExecIsKilledWithItsGroup(t *testing.T) {
	netnstest.LeakCheck(t)
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	told := make(chan error, 1)
	// The grandchild holds the fifo open for writing, so its reader reads the end when that has died.
	go func() {
		told <- Hook{Exec: []string{"sh", "-c", "(echo up; exec sleep 1000) >" + fifo + " & wait"}}.Deliver(ctx, Target{}, message)
	}()
	f, err := os.Open(fifo)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	up := make([]byte, 3)
	if _, err := io.ReadFull(f, up); err != nil {
		t.Fatal(err)
	}
	cancel(drain.ErrSlice)
	if err := <-told; !errors.Is(err, drain.ErrSlice) {
		t.Errorf("got %v, want the end of the slice", err)
	}
	if rest, err := io.ReadAll(f); err != nil || len(rest) != 0 {
		t.Errorf("got %q, %v, want the end", rest, err)
	}
}

// What a hook writes is logged within bounds.
func TestOutputIsBounded(t *testing.T) {
	var out bytes.Buffer
	l := &lines{log: slog.New(slog.NewTextHandler(&out, nil))}
	long := strings.Repeat("a", 3*lineMax)
	for _, part := range []string{"one\ntw", "o\r\n", long[:700], long[700:] + "\n", strings.Repeat("more\n", linesMax), "rest"} {
		if n, err := l.Write([]byte(part)); n != len(part) || err != nil {
			t.Fatalf("got %d, %v", n, err)
		}
	}
	l.end()
	got := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(got) != linesMax+1 {
		t.Fatalf("got %d lines, want %d and what was left out", len(got), linesMax)
	}
	for i, want := range map[int]string{0: "line=one", 1: "line=two", 2: "line=" + long[:lineMax], 3: "line=more", linesMax: "lines=4"} {
		if !strings.HasSuffix(got[i], want) {
			t.Errorf("line %d: got %s, want %s", i, got[i], want)
		}
	}
}

// Both kinds that reach out go to the application's own network namespace.
func TestInAnotherNamespace(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	l := ns.Listen(t, "tcp", "127.0.0.1:8081")
	var n atomic.Int32
	srv := &http.Server{Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) { n.Add(1) })}
	go func() { _ = srv.Serve(l) }()
	defer srv.Close()
	for _, url := range []string{"http://127.0.0.1:8081/flush", "http://localhost:8081/"} {
		if err := (Hook{HTTP: url}).Deliver(limit(t), Target{NetNS: ns.Fd()}, message); err != nil {
			t.Error(err)
		}
	}
	if n.Load() != 2 {
		t.Errorf("got %d requests, want 2", n.Load())
	}
	var out bytes.Buffer
	err := Hook{Exec: []string{"readlink", "/proc/self/ns/net"}}.Deliver(limit(t), Target{NetNS: ns.Fd(), Log: slog.New(slog.NewTextHandler(&out, nil))}, message)
	want, lerr := os.Readlink("/proc/self/fd/" + strconv.Itoa(ns.Fd()))
	if err != nil || lerr != nil || !strings.Contains(out.String(), want) {
		t.Errorf("got %s, %v, want %s (%v)", &out, err, want, lerr)
	}
}

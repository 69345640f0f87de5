// SPDX-License-Identifier: Apache-2.0

// Command http is an HTTP server that leaves without anybody noticing, with an agent and without one.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/ebbproxy/ebb/client"
)

func main() {
	addr := flag.String("listen", "127.0.0.1:8080", "`address` to listen on")
	grace := flag.Duration("grace", client.DefaultGrace, "budget of a drain without an agent")
	h2c := flag.Bool("h2c", false, "serve HTTP/2 without TLS as well")
	flag.Parse()
	if err := run(*addr, *grace, *h2c); err != nil {
		log.Fatal(err)
	}
}

func run(addr string, grace time.Duration, h2c bool) error {
	s, err := client.Register(context.Background(), client.Options{Grace: grace, Log: slog.Default()})
	if err != nil {
		return err
	}
	s.OnFlush(func(_ context.Context, f client.Flush) error {
		fmt.Println("flush", f.Reason)
		return nil
	})
	mux := http.NewServeMux()
	mux.HandleFunc("/", hello)
	mux.HandleFunc("/events", events)
	srv := &http.Server{Addr: addr, Handler: mux, Protocols: new(http.Protocols)}
	srv.Protocols.SetHTTP1(true)
	srv.Protocols.SetUnencryptedHTTP2(h2c)
	serveErr := client.ListenAndServe(srv, client.WithSession(s), client.WithReadiness("/healthz", nil),
		client.WithListen(func(ctx context.Context, network, address string) (net.Listener, error) {
			l, err := client.Listen(ctx, network, address)
			if err == nil {
				fmt.Println("listening", l.Addr())
			}
			return l, err
		}))
	if serveErr != nil {
		return serveErr
	}
	return s.Stop(context.Background())
}

// hello takes a moment, as work does, or ?ms= milliseconds.
func hello(w http.ResponseWriter, r *http.Request) {
	ms, err := strconv.Atoi(r.FormValue("ms"))
	if err != nil {
		ms = 20
	}
	select {
	case <-time.After(time.Duration(ms) * time.Millisecond):
		fmt.Fprintln(w, "hello")
	case <-r.Context().Done(): // the client has gone, or the flush has begun
		http.Error(w, "too late", http.StatusServiceUnavailable)
	}
}

// events is a stream without end, but for a drain: its client comes back, and to another server.
func events(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "text/event-stream")
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		fmt.Fprintf(w, "data: %s\n\n", time.Now().Format(time.TimeOnly))
		if http.NewResponseController(w).Flush() != nil {
			return
		}
		select {
		case <-tick.C:
		case <-client.Draining(r.Context()):
			fmt.Fprint(w, "event: bye\ndata: {}\n\n")
			return
		case <-r.Context().Done():
			return
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/loadtest"
)

// serviceAddr is where clients find the instances of twins.
const serviceAddr = "127.0.0.1:80"

// twins are the two instances of a service of an agent, one of which leaves.
type twins struct {
	*node
	agent   *daemon
	argv    func(addr string) []string
	leaving *part
}

// newTwins starts the instance that leaves, which gets all that comes until then.
func newTwins(t *testing.T, argv func(addr string) []string, keys string) *twins {
	t.Helper()
	p := &twins{node: newNode(t, ""), argv: argv}
	p.set(agentBudget + "services:\n" + backendsOf("web", fmt.Sprintf("listen: [%q]\n", serviceAddr)+keys,
		"name: leaving, match: "+match(p.ns, leavingPort), "name: staying, match: "+match(p.ns, stayingPort)))
	p.leaving = p.instance(leavingPort)
	p.agent = p.node.agent()
	p.shares("leaving", "leaving")
	if strings.Contains(keys, apiFlush) {
		p.sessions("leaving", 1)
	}
	return p
}

func (p *twins) instance(port int) *part {
	p.t.Helper()
	return p.process(p.argv(fmt.Sprintf("127.0.0.1:%d", port))...)
}

// process is part for any program.
func (n *node) process(argv ...string) *part {
	n.t.Helper()
	return n.partAs(func(p *part) { p.Path, p.Args = argv[0], argv }, "")
}

// leave starts the other instance, and has the one leave: it drains to zero, flushes once, and ends well by itself. Of its flush it
// says what want is, once, behind the word said.
func (p *twins) leave(said, want string) {
	p.t.Helper()
	p.instance(stayingPort)
	p.shares("staying", "leaving", "staying")
	id := p.drains("leaving", api.DrainRequest{}).ID
	p.agent.ended(id)
	if err := p.leaving.Wait(); err != nil {
		p.t.Errorf("it ended with %v", err)
	}
	if got := p.leaving.all(said); !slices.Equal(got, []string{want}) {
		p.t.Errorf("it said %s %q, want %s, once", said, got, want)
	}
	left(p.t, *p.view("leaving").Drain, p.agent.all(drain.EventFlush))
}

// left checks how a drain went of which nobody was to notice.
func left(t *testing.T, d api.Drain, flushes []drain.Event) {
	t.Helper()
	flushes = slices.DeleteFunc(flushes, func(e drain.Event) bool { return e.Fields["result"] != nil })
	if d.Outcome != drain.OutcomeDrained || d.FlushReason != drain.FlushZero || d.FlushResult != drain.FlushOK || len(flushes) != 1 {
		t.Errorf("the drain ended %s, %d times flushed for %s, which came back %s; survivors %+v; want drained, one flush for zero",
			d.Outcome, len(flushes), d.FlushReason, d.FlushResult, d.Survivors)
	}
	unhurried(t, d)
}

// goBuild builds a command of a module of this repository.
func goBuild(t *testing.T, module, command string) string {
	t.Helper()
	bin := filepath.Join(t.TempDir(), filepath.Base(command))
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-C", filepath.Join("../..", module), "-o", bin, command).CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", command, err, out)
	}
	return bin
}

// One of two instances leaves under kept connections, new ones and slow requests: one that serves by the library, one that heeds its
// signal, and one that knows of nothing. It is the same for all of them, and nobody notices.
func TestC1_ThreeWaysToLeaveUnderLoad(t *testing.T) {
	t.Parallel()
	example := goBuild(t, ".", "./examples/http")
	library := func(addr string) []string { return []string{example, "-listen", addr} }
	signals := func(addr string) []string { return goServer(t, addr, "-graceful") }
	unmodified := func(addr string) []string { return goServer(t, addr) }
	load := loadtest.Options{Rate: 100, KeepAlive: 20, Gap: 20 * time.Millisecond, Slow: 5, SlowPath: "/?ms=1000"}

	for _, way := range []struct {
		name       string
		argv       func(addr string) []string
		keys       string
		said, want string // see leave
	}{
		{"library", library, apiFlush, "flush", "zero"},
		{"signals", signals, "", "signal", "SIGTERM"},
	} {
		t.Run(way.name+" under an agent", func(t *testing.T) {
			t.Parallel()
			p := newTwins(t, way.argv, "protocol: http1\n"+way.keys)
			o := load
			o.Targets = []loadtest.Target{{Addr: serviceAddr}}
			l := p.load(o)
			l.warm(200)
			p.leave(way.said, way.want)
			l.warm(l.Report().OK + 100)
			unnoticed(t, l)
		})
	}
	for _, way := range []struct {
		name  string
		argv  func(addr string) []string
		flags []string
		said  []string // of its flush
	}{
		{"library", library, []string{"--flush", "api"}, []string{"flush zero"}},
		{"unmodified", unmodified, nil, nil},
	} {
		t.Run(way.name+" under run", func(t *testing.T) {
			t.Parallel()
			h := newHost(t)
			flags := with(wideBudget, append([]string{"--quiet-period", "2s", "--protocol", "http1", "--service", "web"}, way.flags...)...)
			addr := func(port int) string { return fmt.Sprintf("127.0.0.1:%d", port) }
			r := h.run("leaving", flags, way.argv(addr(leavingPort))...)
			h.run("staying", flags, way.argv(addr(stayingPort))...)
			if len(way.flags) > 0 {
				r.find("its session", func(e drain.Event) bool { return e.Type == api.EventSession })
			}
			o := load
			o.Targets = []loadtest.Target{{Name: "leaving", Addr: addr(leavingPort)}, {Name: "staying", Addr: addr(stayingPort)}}
			o.Drain = 2 * time.Second // a balancer takes that long to learn
			l := h.load(o)
			l.warm(200)
			if err := l.Drop("leaving"); err != nil {
				t.Fatal(err)
			}
			r.signal(syscall.SIGTERM)
			if code := r.wait(); code != 0 {
				t.Errorf("exit code %d, want 0", code)
			}
			left(t, r.drained(), r.all(drain.EventFlush))
			if said := r.lines()[1:]; !slices.Equal(said, way.said) {
				t.Errorf("behind where it listens it said %q, want %q", said, way.said)
			}
			unnoticed(t, l)
		})
	}
}

// unnoticed ends a load of which every request has to have been answered.
func unnoticed(t *testing.T, l *load) loadtest.Report {
	t.Helper()
	rep := l.end()
	for _, kind := range []loadtest.Kind{loadtest.KindNew, loadtest.KindKeepAlive, loadtest.KindSlow} {
		if s := rep.Kinds[kind]; s == nil || s.Verdicts[loadtest.OK] == 0 {
			t.Errorf("%s: nothing was answered: the test shows nothing", kind)
		}
	}
	if rep.Failed != 0 || rep.Unsent != 0 {
		t.Errorf("%d of %d failed, %d were not sent: %s", rep.Failed, rep.Requests, rep.Unsent, verdicts(rep))
	}
	t.Logf("%d requests, %d failed, %d met a closing connection", rep.Requests, rep.Failed, rep.Races)
	return rep
}

// Streams without end are told of the drain and end by themselves, long before the budget does; no call and no request beside them
// on the same connections is broken, and their clients find the instance that stays.
func TestC4_StreamsAreToldInTime(t *testing.T) {
	t.Parallel()
	t.Run("gRPC", func(t *testing.T) {
		t.Parallel()
		server, client := goBuild(t, "client/grpc", "./example"), goBuild(t, "client/grpc", "./internal/load")
		p := newTwins(t, func(addr string) []string { return []string{server, "-listen", addr} }, apiFlush)
		l := p.process(client, "-target", serviceAddr)
		l.says("warm", 1)
		l.says("open", 4)
		p.leave("flush", "zero")
		eventually(t, "the streams are open at the other one", func() bool { return len(l.all("open"))-len(l.all("end")) == 4 })
		if err := l.in.(io.Closer).Close(); err != nil {
			t.Fatal(err)
		}
		if err := l.Wait(); err != nil {
			t.Errorf("the load ended with %v", err)
		}
		if failed := l.all("failed"); len(failed) > 0 {
			t.Errorf("%d calls failed, the first with %s", len(failed), failed[0])
		}
		ends := l.all("end")
		if broken := slices.DeleteFunc(slices.Clone(ends), func(s string) bool { return s == "EOF" }); len(ends) < 4 || len(broken) > 0 {
			t.Errorf("%d streams ended, %d of them badly: %q", len(ends), len(broken), broken)
		}
		t.Logf("%s calls answered, %d streams ended", l.says("answered", 1), len(ends))
	})
	t.Run("HTTP2", func(t *testing.T) {
		t.Parallel()
		server := goBuild(t, ".", "./examples/http")
		p := newTwins(t, func(addr string) []string { return []string{server, "-h2c", "-listen", addr} }, apiFlush)
		l := p.load(loadtest.Options{
			HTTP2: true, Rate: 20, KeepAlive: 10, Gap: 20 * time.Millisecond, Slow: 5, SlowPath: "/?ms=1000",
			Targets: []loadtest.Target{{Addr: serviceAddr}},
		})
		l.warm(200)
		// And on some connections there are streams beside the requests.
		ctx, cancel := context.WithCancel(t.Context())
		var clients sync.WaitGroup
		t.Cleanup(clients.Wait)
		t.Cleanup(cancel)
		streams := make(chan error, 4)
		for range cap(streams) {
			tr := transport(t, p.ns, false, true)
			resp := p.events(tr)
			clients.Go(func() { streams <- goodbye(resp) })
			clients.Go(func() {
				for tick := time.Tick(20 * time.Millisecond); ctx.Err() == nil; <-tick {
					if err := get(tr, "http://"+serviceAddr+"/"); err != nil {
						t.Errorf("a request beside a stream: %v", err)
						return
					}
				}
			})
		}
		p.leave("flush", "zero")
		for range cap(streams) {
			select {
			case err := <-streams:
				if err != nil {
					t.Errorf("a stream ended without its goodbye: %v", err)
				}
			case <-time.After(patience):
				t.Fatal("a stream has not ended, and its server has")
			}
		}
		l.warm(l.Report().OK + 100)
		cancel()
		if rep := unnoticed(t, l); rep.Races > 0 {
			t.Errorf("%d requests were broken off on connections of HTTP/2, which can say goodbye", rep.Races)
		}
	})
}

// events opens an endless stream of the example.
func (p *twins) events(tr *http.Transport) *http.Response {
	p.t.Helper()
	req, err := http.NewRequestWithContext(p.t.Context(), http.MethodGet, "http://"+serviceAddr+"/events", nil)
	if err != nil {
		p.t.Fatal(err)
	}
	resp, err := tr.RoundTrip(req)
	if err != nil {
		p.t.Fatal(err)
	}
	return resp
}

// goodbye reads such a stream to its end, before which it says that it ends.
func goodbye(resp *http.Response) error {
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && !bytes.HasSuffix(body, []byte("event: bye\ndata: {}\n\n")) {
		err = errors.New("it says nothing of it")
	}
	return err
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/ebbproxy/ebb/drain"
	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/api/apitest"
)

// patience is how long a test waits for what happens at once on a machine that is not stuck.
const patience = 30 * time.Second

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"ebb": main})
}

// fake is an ebb that a script talks to: a real API server over backends that are numbers.
type fake struct {
	source *apitest.Source
	log    *api.Log
	stop   func() error
}

// startFake serves backends on the socket of an `ebb run` named name.
func startFake(runDir, name string, backends ...api.Backend) (*fake, error) {
	if err := api.MakeRunDir(runDir, os.Getuid()); err != nil {
		return nil, err
	}
	log := api.NewLog(api.LogOptions{})
	return serveFake(apitest.New(log, backends...), log, door{api.RunSocket(runDir, name), api.Anyone()})
}

// startAgent is startFake for a node agent, whose socket of applications takes every process for one of the backend app. It
// goes on with the source and the log of another if there is one.
func startAgent(runDir, app string, source *apitest.Source, log *api.Log) (*fake, error) {
	if err := api.MakeRunDir(runDir, os.Getuid()); err != nil {
		return nil, err
	}
	source.Log = log
	owns := func(context.Context, int) (string, bool) { return app, app != "" }
	return serveFake(source, log,
		door{filepath.Join(runDir, api.AgentSocket), api.Operators(0)}, door{filepath.Join(runDir, api.AppSocket), api.Apps(owns)})
}

// door is a socket and whom it is for.
type door struct {
	path   string
	access api.Access
}

func serveFake(source *apitest.Source, log *api.Log, doors ...door) (*fake, error) {
	f := &fake{source: source, log: log}
	srv, err := api.NewServer(api.Options{Source: source, Log: log})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, len(doors))
	for _, d := range doors {
		ln, err := api.Listen(d.path)
		if err != nil {
			cancel()
			return nil, err
		}
		go func() { served <- srv.ServeAs(ctx, ln, d.access) }()
	}
	f.stop = func() error {
		err := log.Close()
		cancel()
		for range doors {
			err = errors.Join(err, <-served)
		}
		return err
	}
	return f, nil
}

// endAfterBegin ends each drain of a backend with an outcome, as soon as it has begun.
func (f *fake) endAfterBegin(backend string, o drain.Outcome, leave bool) {
	sub := f.log.Subscribe(0)
	go func() {
		for {
			ev, err := sub.Next(context.Background())
			if err != nil {
				return
			}
			if ev.Backend != backend || ev.Phase != drain.PhaseStopNew {
				continue
			}
			f.source.Step(backend, drain.PhaseWait)
			f.source.End(backend, o)
			if leave {
				// A supervisor leaves right after its drain.
				_ = f.stop()
				return
			}
		}
	}()
}

type fakeKey struct{}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata",
		Setup: func(env *testscript.Env) error {
			// A socket's path has room for 107 bytes, which the work directory may use up.
			dir, err := os.MkdirTemp("", "ebbcmd")
			if err != nil {
				return err
			}
			fakes := make(map[string]*fake)
			env.Values[fakeKey{}] = fakes
			env.Setenv("EBB_RUN_DIR", dir)
			// Under the race detector each process would sleep for a second at its end.
			env.Setenv("GORACE", "atexit_sleep_ms=0 "+os.Getenv("GORACE"))
			env.Defer(func() {
				stopped := make(map[*fake]bool)
				for _, f := range fakes {
					if stopped[f] {
						continue // one agent of several backends
					}
					stopped[f] = true
					if err := f.stop(); err != nil {
						t.Errorf("stop the fake: %v", err)
					}
				}
				_ = os.RemoveAll(dir)
			})
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"exits": cmdExits,
			"serve": cmdServe,
			"agent": cmdAgent,
			"ends":  cmdEnds,
			"dead":  cmdDead,
			"set":   cmdSet,

			"sessions": cmdSessions,
		},
	})
}

// exits CODE ebb ARG… runs ebb and wants that exit code.
func cmdExits(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exits CODE COMMAND [ARG…]")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	got := 0
	if err := ts.Exec(args[1], args[2:]...); err != nil {
		var ee *exec.ExitError
		if !errors.As(err, &ee) {
			ts.Fatalf("%v", err)
		}
		got = ee.ExitCode()
	}
	if got != want {
		ts.Fatalf("exit code %d, want %d", got, want)
	}
}

// serve NAME… starts a fake ebb for each name: web, blind, or another with web's numbers.
func cmdServe(ts *testscript.TestScript, neg bool, args []string) {
	for _, name := range args {
		b := apitest.Web()
		if name == "blind" {
			b = apitest.Blind()
		}
		b.Name = name
		f, err := startFake(ts.Getenv("EBB_RUN_DIR"), name, b)
		ts.Check(err)
		age, idle := api.Duration(95*time.Second), api.Duration(2500*time.Millisecond)
		f.source.SetStragglers(name,
			api.Straggler{Peer: "192.0.2.7:40000", Local: "192.0.2.1:80", Class: "stalled", Age: &age, Idle: &idle, Unacked: 4096, PID: 4243},
			api.Straggler{Peer: "[2001:db8::7]:40001", Local: "[2001:db8::1]:80", Class: "active", Idle: &idle},
		)
		fakesOf(ts)[name] = f
	}
}

// agent NAME… starts a fake node agent with those backends; each runs in the unit NAME.service, and every process belongs to
// the first.
func cmdAgent(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) == 0 {
		ts.Fatalf("usage: agent NAME…")
	}
	var bs []api.Backend
	for _, name := range args {
		b := apitest.Web()
		b.Name, b.Unit, b.PID = name, name+".service", 0
		bs = append(bs, b)
	}
	log := api.NewLog(api.LogOptions{})
	f, err := startAgent(ts.Getenv("EBB_RUN_DIR"), args[0], apitest.New(log, bs...), log)
	ts.Check(err)
	for _, name := range args {
		fakesOf(ts)[name] = f
	}
}

// ends NAME OUTCOME [leave] ends each drain of NAME that begins from now on.
func cmdEnds(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) < 2 {
		ts.Fatalf("usage: ends NAME OUTCOME [leave]")
	}
	f := fakesOf(ts)[args[0]]
	leave := len(args) == 3 && args[2] == "leave"
	f.endAfterBegin(args[0], drain.Outcome(args[1]), leave)
	if leave {
		delete(fakesOf(ts), args[0]) // it stops itself
	}
}

// dead NAME leaves a socket that nobody answers on.
func cmdDead(ts *testscript.TestScript, neg bool, args []string) {
	dir := ts.Getenv("EBB_RUN_DIR")
	ts.Check(api.MakeRunDir(dir, os.Getuid()))
	for _, name := range args {
		ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: api.RunSocket(dir, name), Net: "unix"})
		ts.Check(err)
		ln.SetUnlinkOnClose(false)
		ts.Check(ln.Close())
	}
}

// set NAME step PHASE moves the running drain into a phase; set NAME end OUTCOME ends it.
func cmdSet(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) != 3 {
		ts.Fatalf("usage: set NAME step|end WORD")
	}
	f := fakesOf(ts)[args[0]]
	switch args[1] {
	case "step":
		f.source.Step(args[0], drain.Phase(args[2]))
	case "end":
		f.source.End(args[0], drain.Outcome(args[2]))
	default:
		ts.Fatalf("set %s: unknown", args[1])
	}
}

// sessions NAME gives the backend sessions: one that serves, a silent one, a lost one and a job; the drain that runs has met a
// lease of the job, and one that was released.
func cmdSessions(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) != 1 {
		ts.Fatalf("usage: sessions NAME")
	}
	now, three := time.Now(), int64(3)
	lease := func(name string, age time.Duration) []api.Lease {
		return []api.Lease{{ID: name, Name: name, Since: now.Add(-age)}}
	}
	fakesOf(ts)[args[0]].source.Update(args[0], func(b *api.Backend) {
		b.Sessions = []api.SessionView{
			{ID: "s1", Role: api.RoleApp, PID: 4242, Version: 7, Health: api.HealthOK, Heard: now, Remaining: &three, Seq: 3, Acked: 1},
			{ID: "s2", Role: api.RoleApp, PID: 4243, Health: api.HealthSuspect, Heard: now.Add(-12 * time.Second), Holds: lease("upload", time.Minute)},
			{ID: "s3", Role: api.RoleApp, PID: 4244, Health: api.HealthLost, Heard: now.Add(-time.Hour), Holds: lease("forgotten", time.Hour)},
			{ID: "s4", Role: api.RoleHolder, PID: 4300, Health: api.HealthOK, Heard: now, Holds: lease("nightly\x1breport", 3*time.Hour)},
		}
		if b.Drain == nil {
			return
		}
		d := *b.Drain
		d.Blocking = map[string]int64{"hold": 2}
		d.Held = []api.HeldDuring{
			{Name: "nightly-report", PID: 4300, For: api.Duration(95 * time.Second)},
			{Name: "cache", PID: 4242, For: api.Duration(2500 * time.Millisecond), Released: true},
		}
		b.Drain = &d
	})
}

func fakesOf(ts *testscript.TestScript) map[string]*fake {
	fakes, ok := ts.Value(fakeKey{}).(map[string]*fake)
	if !ok {
		ts.Fatalf("no fakes")
	}
	return fakes
}

// shortDir is a temporary directory with room for a socket's path.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "ebbcmd")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return filepath.Clean(dir)
}

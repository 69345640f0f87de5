// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ebbproxy/ebb/internal/api"
	"github.com/ebbproxy/ebb/internal/netnstest"
)

// takePart is the side of an application that takes part in its drain, as an option of app. It says on standard output, a
// line each, what happens:
//
//	session ID             it has registered
//	got TYPE SEQ DRAIN     a numbered event has come, once or again
//	event TYPE JSON        it was applied, which happens once
//	beat                   the first comment of a stream
//	stream end REASON      a stream has ended; REASON is empty if it broke
//	away suspect, lost     nothing was read for that long
//	flushing alone         the owner is lost, and it is time
//	answer STATUS BODY     to a command
//
// and does what it reads on standard input: "POST PATH BODY", "GET PATH", "DELETE PATH" below /v1/session are requests;
// "silent" ends the heartbeats, "beat" begins them again; "job NAME DURATION" holds a lease for so long and says "job over";
// "cut" breaks the stream; "go" lets it acknowledge what it was told to hold back; "as ID" makes requests in the name of another
// session; "run COMMAND" runs a command of the shell, and says "ran" when it is over.
//
// The word after session= has parts, separated by commas: auto registers, follows, acknowledges, answers and beats by itself
// (without it only commands are followed), twice lets the connection break before each event is applied and again before it
// is acknowledged, wait=TYPE neither applies nor acknowledges that one before "go", mute does not answer a
// flush, leave ends the process with status 0 after its flush, version=N registers with one.
type takePart struct {
	say  func(format string, args ...any)
	mode []string

	registration string // its body
	mu           sync.Mutex
	id           string
	drain        api.SessionDrain // that was announced
	silent       bool
	stream       io.Closer
	resume       chan struct{} // closed by go

	applied uint64
	flushed map[string]bool
	heard   time.Time
	suspect time.Duration
	lost    time.Duration
}

// begin takes part until the process ends.
func (a *takePart) begin() {
	a.flushed, a.resume, a.registration = map[string]bool{}, make(chan struct{}), "{}"
	for _, word := range a.mode {
		if version, ok := strings.CutPrefix(word, "version="); ok {
			a.registration = fmt.Sprintf(`{"version":%s}`, version)
		}
	}
	if a.is("auto") {
		go a.follow()
		go a.beats()
		go a.watch()
	}
	sc := bufio.NewScanner(os.Stdin)
	for sc.Scan() {
		a.command(sc.Text())
	}
}

func (a *takePart) is(word string) bool { return slices.Contains(a.mode, word) }

func (a *takePart) command(line string) {
	word, rest, _ := strings.Cut(line, " ")
	switch word {
	case "POST", "GET", "DELETE":
		path, body, _ := strings.Cut(rest, " ")
		status, answer := a.call(word, path, body)
		if word == "POST" && path == "" && status == http.StatusCreated {
			a.opened(answer)
		}
		a.say("answer %d %s", status, answer)
	case "silent", "beat":
		a.mu.Lock()
		a.silent = word == "silent"
		a.mu.Unlock()
	case "job":
		name, length, _ := strings.Cut(rest, " ")
		d, _ := time.ParseDuration(length)
		status, answer := a.call("POST", "/hold", fmt.Sprintf(`{"name":%q}`, name))
		a.say("answer %d %s", status, answer)
		time.AfterFunc(d, func() {
			for status, _ := a.call("POST", "/release", fmt.Sprintf(`{"name":%q}`, name)); status != http.StatusOK; {
				time.Sleep(100 * time.Millisecond)
				status, _ = a.call("POST", "/release", fmt.Sprintf(`{"name":%q}`, name))
			}
			a.say("job over")
		})
	case "cut":
		a.mu.Lock()
		if a.stream != nil {
			a.stream.Close()
		}
		a.mu.Unlock()
	case "go":
		close(a.resume)
	case "as":
		a.mu.Lock()
		a.id = rest
		a.mu.Unlock()
	case "run":
		c := exec.Command("sh", "-c", rest)
		c.Stdout, c.Stderr = os.Stdout, os.Stderr
		go func() { a.say("ran %v", c.Run()) }()
	}
}

// request asks the owner over a connection of its own.
func (a *takePart) request(ctx context.Context, method, path, body string) (*http.Response, error) {
	a.mu.Lock()
	id := a.id
	a.mu.Unlock()
	req, err := http.NewRequestWithContext(ctx, method, "http://ebb/v1/session"+path, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	if id != "" {
		req.Header.Set("Ebb-Session", id)
	}
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", os.Getenv("EBB_APP_SOCKET"))
	}}}
	return c.Do(req)
}

// call is one request. Status 0: nobody has answered.
func (a *takePart) call(method, path, body string) (status int, answer string) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	resp, err := a.request(ctx, method, path, body)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err.Error()
	}
	return resp.StatusCode, string(bytes.TrimSpace(b))
}

func (a *takePart) opened(answer string) {
	var s api.Session
	_ = json.Unmarshal([]byte(answer), &s) // without an id it is asked again
	a.mu.Lock()
	a.id, a.applied = s.ID, 0
	a.mu.Unlock()
	a.say("session %s", s.ID)
}

func (a *takePart) follow() {
	for end := ""; end != api.EndEvicted; {
		a.mu.Lock()
		id := a.id
		a.mu.Unlock()
		if id == "" {
			if status, answer := a.call("POST", "", a.registration); status == http.StatusCreated {
				a.opened(answer)
			} else {
				time.Sleep(100 * time.Millisecond)
			}
			continue
		}
		end = a.read()
		a.say("stream end %s", end)
		if end != api.EndRestarting {
			time.Sleep(50 * time.Millisecond)
		}
	}
	a.mu.Lock()
	a.silent = true
	a.mu.Unlock()
}

// errCut is what a stream ends with that the application has broken itself.
var errCut = errors.New("cut")

// read reads one stream to its end, and returns the reason.
func (a *takePart) read() (end string) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	resp, err := a.request(ctx, "GET", "/events", "")
	if err != nil {
		return ""
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		if b, _ := io.ReadAll(resp.Body); strings.Contains(string(b), "unknown-session") {
			a.mu.Lock()
			a.id = ""
			a.mu.Unlock()
		}
		return ""
	}
	a.mu.Lock()
	a.stream = resp.Body
	a.mu.Unlock()
	var kind, data string
	beat := false
	sc := bufio.NewScanner(resp.Body)
	for sc.Scan() {
		a.mu.Lock()
		a.heard = time.Now()
		a.mu.Unlock()
		field, value, _ := strings.Cut(sc.Text(), ": ")
		switch {
		case field == "event":
			kind = value
		case field == "data":
			data = value
		case field == "" && value == "beat" && !beat:
			beat = true
			a.say("beat")
		case field == "" && data != "":
			if kind == "session" {
				a.level(data)
			} else if err := a.event(kind, data); err != nil {
				return ""
			}
			if kind == api.SessionEnd {
				var e api.SessionEvent
				_ = json.Unmarshal([]byte(data), &e) // an empty reason is seen
				return e.Reason
			}
			kind, data = "", ""
		}
	}
	return ""
}

// level takes the thresholds from the first message of a stream.
func (a *takePart) level(data string) {
	var s api.Session
	_ = json.Unmarshal([]byte(data), &s) // without thresholds nobody is ever lost, and tests see that
	a.mu.Lock()
	a.suspect, a.lost = time.Duration(s.SuspectMS)*time.Millisecond, time.Duration(s.LostMS)*time.Millisecond
	a.mu.Unlock()
}

// event applies an event unless it has been applied already, and acknowledges it.
func (a *takePart) event(kind, data string) error {
	var e api.SessionEvent
	if err := json.Unmarshal([]byte(data), &e); err != nil {
		a.say("error %v in %s", err, data)
		return nil
	}
	if e.Seq == 0 {
		return nil
	}
	again := e.Seq <= a.applied
	a.say("got %s %d %s", kind, e.Seq, e.Drain)
	if a.is("wait=" + kind) {
		<-a.resume
	}
	if !again {
		if a.is("twice") && a.once(e.Seq, "apply") {
			return errCut
		}
		a.applied = e.Seq
		a.say("event %s %s", kind, data)
		a.mu.Lock()
		switch kind {
		case api.SessionDraining, api.SessionDeadline:
			a.drain.ID, a.drain.Deadline, a.drain.FlushBy = e.Drain, e.Deadline, e.FlushBy
		case api.SessionCancelled, api.SessionDone:
			a.drain = api.SessionDrain{}
		}
		a.mu.Unlock()
	}
	if kind == api.SessionFlush && !a.is("mute") {
		a.mu.Lock()
		if !a.flushed[e.Drain] {
			a.say("flushing %s", e.Reason)
		}
		a.flushed[e.Drain] = true
		a.mu.Unlock()
		a.call("POST", "/flushed", fmt.Sprintf(`{"drain":%q}`, e.Drain)) // again if it is not acknowledged
	}
	if a.is("twice") && a.once(e.Seq, "acknowledge") {
		return errCut
	}
	a.call("POST", "/ack", fmt.Sprintf(`{"seq":%d}`, e.Seq)) // again if it comes again
	if kind == api.SessionFlush && a.is("leave") {
		os.Exit(0)
	}
	return nil
}

// once is true the first time.
func (a *takePart) once(seq uint64, what string) bool {
	key := fmt.Sprint(seq, what)
	a.mu.Lock()
	defer a.mu.Unlock()
	first := !a.flushed[key]
	a.flushed[key] = true
	return first
}

func (a *takePart) beats() {
	for range time.Tick(time.Second) {
		a.mu.Lock()
		silent := a.silent || a.id == ""
		a.mu.Unlock()
		if !silent {
			a.call("POST", "/heartbeat", "{}") // what comes of it, the stream tells
		}
	}
}

// watch tells what the application thinks of the owner, and flushes in its place.
func (a *takePart) watch() {
	thought := ""
	for range time.Tick(20 * time.Millisecond) {
		a.mu.Lock()
		silence, suspect, lost := time.Since(a.heard), a.suspect, a.lost
		if a.heard.IsZero() || suspect == 0 {
			silence = 0
		}
		now := ""
		if silence > suspect && suspect > 0 {
			now = "suspect"
		}
		if silence > lost && lost > 0 {
			now = "lost"
		}
		if now != thought {
			if thought = now; now != "" {
				a.say("away %s", now)
			}
		}
		if d := a.drain; now == "lost" && d.ID != "" && time.Now().After(d.FlushBy) && !a.flushed[d.ID] {
			a.flushed[d.ID] = true
			a.say("flushing alone")
		}
		a.mu.Unlock()
	}
}

// part is an application of a backend that takes part.
type part struct {
	*netnstest.Cmd
	t      *testing.T
	in     io.Writer
	stdout string // file
	mu     sync.Mutex
	asked  int // commands that are answered
}

// part starts app with the option session=mode, in the node's namespace and with its socket.
func (n *node) part(mode string, options ...string) *part {
	n.t.Helper()
	return n.partAs(nil, mode, options...)
}

// partAs is part after prepare has changed the command.
func (n *node) partAs(prepare func(*part), mode string, options ...string) *part {
	n.t.Helper()
	argv := app(n.t, append(options, "session="+mode)...)
	p := &part{Cmd: n.ns.Command(n.t, argv[0], argv[1:]...), t: n.t, stdout: filepath.Join(n.t.TempDir(), "stdout")}
	p.Cmd.Cmd.Env = append(n.env[:len(n.env):len(n.env)], "EBB_APP_SOCKET="+filepath.Join(n.runDir, api.AppSocket))
	out, err := os.Create(p.stdout)
	if err != nil {
		n.t.Fatal(err)
	}
	defer out.Close()
	p.Stdout, p.Stderr = out, out
	if p.in, err = p.StdinPipe(); err != nil {
		n.t.Fatal(err)
	}
	p.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if prepare != nil {
		prepare(p)
	}
	if err := p.Start(); err != nil {
		n.t.Fatalf("start an application: %v", err)
	}
	n.t.Cleanup(func() {
		_ = syscall.Kill(-p.pid(), syscall.SIGKILL) // what it has run too; there may be nothing left
		if n.t.Failed() {
			n.t.Logf("application %d:\n%s", p.pid(), strings.Join(p.lines(), "\n"))
		}
	})
	return p
}

func (p *part) pid() int { return p.Process.Pid }

// lines is what it has said.
func (p *part) lines() []string {
	b, err := os.ReadFile(p.stdout)
	if err != nil {
		p.t.Fatal(err)
	}
	return strings.Split(strings.TrimSuffix(string(b), "\n"), "\n")
}

// all are the lines that begin with a text, without it.
func (p *part) all(begin string) (rest []string) {
	for _, l := range p.lines() {
		if r, ok := strings.CutPrefix(l, begin); ok {
			rest = append(rest, strings.TrimPrefix(r, " "))
		}
	}
	return rest
}

// says waits until it has said n lines that begin with a text, and returns the rest of the nth.
func (p *part) says(begin string, n int) (rest string) {
	p.t.Helper()
	eventually(p.t, fmt.Sprintf("the application says %q, %d times", begin, n), func() bool {
		all := p.all(begin)
		if len(all) >= n {
			rest = all[n-1]
		}
		return len(all) >= n
	})
	return rest
}

// tell writes a command that has no answer.
func (p *part) tell(command string) {
	p.t.Helper()
	if _, err := fmt.Fprintln(p.in, command); err != nil {
		p.t.Fatalf("%s: %v", command, err)
	}
}

// ask writes a command and returns the answer to it.
func (p *part) ask(command string) (status int, body string) {
	p.t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.tell(command)
	p.asked++
	answer := p.says("answer", p.asked)
	if _, err := fmt.Sscan(answer, &status); err != nil {
		p.t.Fatalf("%s: answer %q", command, answer)
	}
	_, body, _ = strings.Cut(answer, " ")
	return status, body
}

// must is ask of what has to succeed, and returns the session.
func (p *part) must(command string) (s api.Session) {
	p.t.Helper()
	status, body := p.ask(command)
	if status < 200 || status > 299 {
		p.t.Fatalf("%s: got %d %s", command, status, body)
	}
	if body != "" {
		if err := json.Unmarshal([]byte(body), &s); err != nil {
			p.t.Fatalf("%s: %v in %s", command, err, body)
		}
	}
	return s
}

// refuses checks that a command gets a status and a kind of problem.
func (p *part) refuses(command string, want int, kind string) {
	p.t.Helper()
	if status, body := p.ask(command); status != want || !strings.Contains(body, ":"+kind+`"`) {
		p.t.Errorf("%s: got %d %s, want %d of kind %s", command, status, body, want, kind)
	}
}

// applied waits for an event of a type and returns the first.
func (p *part) applied(kind string) (e api.SessionEvent) {
	p.t.Helper()
	if err := json.Unmarshal([]byte(p.says("event "+kind+" ", 1)), &e); err != nil {
		p.t.Fatal(err)
	}
	return e
}

// order are the types of the events that were applied, in order.
func (p *part) order() (kinds []string) {
	for _, l := range p.all("event ") {
		kind, _, _ := strings.Cut(l, " ")
		kinds = append(kinds, kind)
	}
	return kinds
}

// hears waits for the last of these types, and checks that these were applied, in this order, and nothing else.
func (p *part) hears(kinds ...string) {
	p.t.Helper()
	p.says("event "+kinds[len(kinds)-1]+" ", 1)
	if got := p.order(); !slices.Equal(got, kinds) {
		p.t.Errorf("the application applied %q, want %q", got, kinds)
	}
}

// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/loadtest"
	"github.com/ebbproxy/ebb/internal/netns"
	"github.com/ebbproxy/ebb/internal/netnstest"
)

// limit bounds a whole demo; one takes half a minute on a machine that has time.
const limit = 5 * time.Minute

// mark is a variable by which the processes of a demo are told from others.
const mark = "DEMO_TEST_MARK"

// buildEbb builds the command once for the tests of this package.
func buildEbb(t *testing.T) string {
	t.Helper()
	bin := filepath.Join(t.TempDir(), "ebb")
	out, err := exec.Command("go", "build", "-o", bin, "github.com/ebbproxy/ebb/cmd/ebb").CombinedOutput()
	if err != nil {
		t.Fatalf("build ebb: %v\n%s", err, out)
	}
	return bin
}

// running is a demo that was started by a test.
type running struct {
	cmd      *exec.Cmd
	mark     string
	out, err bytes.Buffer
	done     chan struct{}
}

func startDemo(t *testing.T, bin string, args ...string) *running {
	t.Helper()
	r := &running{mark: fmt.Sprintf("%s=%s-%d", mark, t.Name(), time.Now().UnixNano()), done: make(chan struct{})}
	r.cmd = exec.Command(bin, append([]string{"demo"}, args...)...)
	r.cmd.Env = append(os.Environ(), r.mark)
	r.cmd.Stdout, r.cmd.Stderr = &r.out, &r.err
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = r.cmd.Wait() // how it ended is in ProcessState
		close(r.done)
	}()
	t.Cleanup(func() {
		_ = r.cmd.Process.Kill() // an ended process has nothing left to kill
		<-r.done
		for _, pid := range r.processes(t) {
			_ = unix.Kill(pid, unix.SIGKILL) // the test has failed already, see checkNothingLeft
		}
	})
	return r
}

func (r *running) wait(t *testing.T) int {
	t.Helper()
	select {
	case <-r.done:
	case <-time.After(limit):
		t.Fatalf("the demo has not ended in %v; it wrote:\n%s%s", limit, r.out.String(), r.err.String())
	}
	return r.cmd.ProcessState.ExitCode()
}

// processes are those of the demo that live, the outermost among them.
func (r *running) processes(t *testing.T) []int {
	t.Helper()
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, d := range dirs {
		env, err := os.ReadFile(d + "/environ")
		if err != nil || !bytes.Contains(env, []byte(r.mark)) {
			continue // ended, or another's
		}
		if pid, err := strconv.Atoi(filepath.Base(d)); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// inner is the process inside the namespaces, once it is there.
func (r *running) inner(t *testing.T) int {
	t.Helper()
	var pid int
	r.eventually(t, "the demo has no process inside namespaces", func() bool {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", r.cmd.Process.Pid, r.cmd.Process.Pid))
		if err != nil {
			return false
		}
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", r.cmd.Process.Pid))
		if err != nil {
			return false
		}
		for _, task := range tasks {
			if b, err := os.ReadFile(task); err == nil {
				text = append(text, b...)
			}
		}
		for f := range strings.FieldsSeq(string(text)) {
			n, err := strconv.Atoi(f)
			if err != nil {
				continue
			}
			// Before its exec the child is still a copy of its parent.
			if args, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", n)); err == nil && bytes.Contains(args, []byte("--inside")) {
				pid = n
				return true
			}
		}
		return false
	})
	return pid
}

// eventually waits for what sends no event. It fails at once if the demo has ended.
func (r *running) eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	end := time.After(limit)
	for !ok() {
		select {
		case <-tick.C:
		case <-end:
			t.Fatalf("%s; it wrote:\n%s%s", what, r.out.String(), r.err.String())
		}
	}
}

// checkNothingLeft fails the test if the demo has left a process, a mount, or a BPF program in its network namespace ns.
func (r *running) checkNothingLeft(t *testing.T, ns netns.Identity) {
	t.Helper()
	r.eventually(t, "processes are left behind", func() bool { return len(r.processes(t)) == 0 })
	r.eventually(t, "a BPF link of the demo is left behind", func() bool { return !linked(t, ns.Ino) })
	r.eventually(t, "the network namespace is left behind", func() bool {
		all, err := filepath.Glob("/proc/[0-9]*/ns/net")
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range all {
			var st unix.Stat_t
			if unix.Stat(path, &st) == nil && st.Dev == ns.Dev && st.Ino == ns.Ino {
				return false
			}
		}
		return true
	})
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(mounts), "ebb-demo") {
		t.Errorf("a mount of the demo shows up outside:\n%s", mounts)
	}
	for _, dir := range []string{runDir, bpffs, reports} {
		if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left behind (%v)", dir, err)
		}
	}
}

// Commands of bpf(2) and a link's type, from include/uapi/linux/bpf.h.
const (
	bpfObjGetInfoByFD = 15
	bpfLinkGetFDByID  = 30
	bpfLinkGetNextID  = 31
	bpfLinkTypeNetNS  = 5
)

// linked tells whether a BPF program is attached to the network namespace with that inode.
func linked(t *testing.T, ino uint64) bool {
	t.Helper()
	call := func(cmd uintptr, attr unsafe.Pointer, size uintptr) (int, error) {
		fd, _, errno := unix.Syscall(unix.SYS_BPF, cmd, uintptr(attr), size)
		if errno != 0 {
			return -1, errno
		}
		return int(fd), nil
	}
	next := struct{ id, next, flags uint32 }{}
	for {
		if _, err := call(bpfLinkGetNextID, unsafe.Pointer(&next), unsafe.Sizeof(next)); errors.Is(err, unix.ENOENT) {
			return false
		} else if err != nil {
			t.Fatalf("list BPF links: %v", err)
		}
		next.id = next.next
		open := struct{ id, next, flags uint32 }{id: next.id}
		fd, err := call(bpfLinkGetFDByID, unsafe.Pointer(&open), unsafe.Sizeof(open))
		if err != nil {
			continue // it has gone meanwhile
		}
		var info [64]uint32 // type, id, prog_id, padding, netns_ino, …
		ask := struct {
			fd, size uint32
			info     uint64
		}{uint32(fd), uint32(unsafe.Sizeof(info)), uint64(uintptr(unsafe.Pointer(&info)))}
		_, err = call(bpfObjGetInfoByFD, unsafe.Pointer(&ask), unsafe.Sizeof(ask))
		unix.Close(fd)
		if err == nil && info[0] == bpfLinkTypeNetNS && uint64(info[4]) == ino {
			return true
		}
	}
}

// The whole demo, as a user runs it, but shorter. Its numbers are compared with those of the network stack, which
// outlives the demo because the test holds its namespace.
func TestDemoLosesNothing(t *testing.T) {
	netnstest.RequireRoot(t)
	r := startDemo(t, buildEbb(t), "-o", "json", "--warm-up", "1s", "--balancer-lag", "1500ms", "--slow-for", "1500ms", "--rate", "200")
	ns, err := netns.OfPID(r.inner(t))
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	id, err := netns.ID(int(ns.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	code := r.wait(t)
	var rep Report
	if err := json.Unmarshal(r.out.Bytes(), &rep); err != nil {
		t.Fatalf("read the demo's report: %v; it wrote:\n%s%s", err, r.out.String(), r.err.String())
	}
	if code != 0 || !rep.OK {
		t.Errorf("got exit code %d, ok %v, want 0, true; it wrote:\n%s%s", code, rep.OK, r.out.String(), r.err.String())
	}
	var names []string
	var tried, refused, late int64
	for _, a := range rep.Acts {
		names = append(names, a.Name)
		if a.Requests != a.Answered+a.TurnedAway+a.Lost {
			t.Errorf("act %s: %d requests are not %d answered + %d turned away + %d lost", a.Name, a.Requests, a.Answered, a.TurnedAway, a.Lost)
		}
		if a.Requests < 100 {
			t.Errorf("act %s: got %d requests, want at least 100", a.Name, a.Requests)
		}
		tried += a.Clients.Made + a.Clients.Refused
		refused += a.Clients.Refused
		// A handshake that completed just before the RST is none that failed to the network stack.
		late += a.LostBy[loadtest.ConnectReset]
		if !a.Ebb {
			if a.Lost == 0 {
				t.Errorf("act %s: nothing was lost without Ebb, so the load shows nothing", a.Name)
			}
			continue
		}
		if a.Skipped != "" {
			t.Errorf("act %s was skipped: %s", a.Name, a.Skipped)
			continue
		}
		if turns := a.Name != ActDrain; (a.TurnedAway > 0) != turns {
			t.Errorf("act %s: got %d turned away, want some: %v", a.Name, a.TurnedAway, turns)
		}
		if a.Census == nil || *a.Census != uint64(a.ToBlue) {
			t.Errorf("act %s: the census is %v, the clients made %d connections to blue", a.Name, a.Census, a.ToBlue)
		}
		if a.Through != 0 {
			t.Errorf("act %s: %d connections came through a closed door", a.Name, a.Through)
		}
	}
	if !reflect.DeepEqual(names, Acts) {
		t.Errorf("got acts %v, want %v", names, Acts)
	}
	var tcp map[string]int64
	if err := netns.Do(int(ns.Fd()), func() error {
		var err error
		tcp, err = counters("/proc/thread-self/net/snmp")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if tcp["ActiveOpens"] != tried {
		t.Errorf("the network stack opened %d connections, the demo says %d", tcp["ActiveOpens"], tried)
	}
	if n := tcp["AttemptFails"]; n > refused || n < refused-late {
		t.Errorf("the network stack saw %d attempts fail, the demo says %d, %d of them reset", n, refused, late)
	}
	ns.Close()
	r.checkNothingLeft(t, id)
}

func counters(path string) (map[string]int64, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var names []string
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if len(f) == 0 || f[0] != "Tcp:" {
			continue
		}
		if names == nil {
			names = f
			continue
		}
		m := make(map[string]int64)
		for i := range f {
			if n, err := strconv.ParseInt(f[i], 10, 64); err == nil && i < len(names) {
				m[names[i]] = n
			}
		}
		return m, nil
	}
	return nil, fmt.Errorf("%s has no Tcp line", path)
}

// A drain that is too short for its slow answers loses them, and the demo says so.
func TestDemoSaysWhatWasLost(t *testing.T) {
	netnstest.RequireRoot(t)
	r := startDemo(t, buildEbb(t), "--acts", "drain", "-o", "json", "--warm-up", "500ms", "--balancer-lag", "10ms", "--slow-for", "8s", "--grace", "9500ms", "--rate", "50")
	code := r.wait(t)
	var rep Report
	if err := json.Unmarshal(r.out.Bytes(), &rep); err != nil {
		t.Fatalf("read the demo's report: %v; it wrote:\n%s%s", err, r.out.String(), r.err.String())
	}
	if code != 1 || rep.OK || len(rep.Acts) != 1 || rep.Acts[0].Lost == 0 {
		t.Fatalf("got exit code %d, want 1 and something lost; it wrote:\n%s%s", code, r.out.String(), r.err.String())
	}
	if want := fmt.Sprintf("%d request", rep.Acts[0].Lost); !strings.HasPrefix(rep.Verdict, want) {
		t.Errorf("got verdict %q, want it to begin with %q", rep.Verdict, want)
	}
}

func TestDemoLeavesNothingBehind(t *testing.T) {
	netnstest.RequireRoot(t)
	bin := buildEbb(t)
	for _, c := range []struct {
		name string
		end  func(r *running, inner int) error
	}{
		{"interrupt", func(r *running, _ int) error { return r.cmd.Process.Signal(unix.SIGINT) }},
		{"inner killed", func(_ *running, inner int) error { return unix.Kill(inner, unix.SIGKILL) }},
		{"outer killed", func(r *running, _ int) error { return r.cmd.Process.Kill() }},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := startDemo(t, bin, "--acts", "drain")
			inner := r.inner(t)
			// In the middle: two servers, a supervisor, and its programs in the kernel.
			r.eventually(t, "the drain does not start", func() bool {
				return strings.Count(strings.Join(commands(r.processes(t)), "\n"), "loadtest-server") >= 3
			})
			f, err := netns.OfPID(inner)
			if err != nil {
				t.Fatal(err)
			}
			id, err := netns.ID(int(f.Fd()))
			f.Close()
			if err != nil {
				t.Fatal(err)
			}
			r.eventually(t, "no BPF program in the network namespace of the demo", func() bool { return linked(t, id.Ino) })
			if err := c.end(r, inner); err != nil {
				t.Fatal(err)
			}
			if code := r.wait(t); code == 0 {
				t.Errorf("got exit code 0 from a demo that was ended early")
			}
			r.checkNothingLeft(t, id)
		})
	}
}

// commands are the command lines of processes.
func commands(pids []int) []string {
	var all []string
	for _, pid := range pids {
		if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); err == nil {
			all = append(all, string(bytes.ReplaceAll(b, []byte{0}, []byte(" "))))
		}
	}
	return all
}

func TestDemoWithoutPrivilegeSaysWhatToDo(t *testing.T) {
	if os.Geteuid() != 0 {
		_, err := Run(t.Context(), Options{})
		if !errors.Is(err, ErrPrivilege) || !strings.Contains(err.Error(), "sudo ebb demo") {
			t.Errorf("got %v, want ErrPrivilege and the command to type", err)
		}
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run", "^TestDemoWithoutPrivilegeSaysWhatToDo$")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	// The binary of the test is where only root may look; another user runs it through a descriptor.
	f, err := os.Open(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	cmd.Path, cmd.Dir, cmd.ExtraFiles = "/proc/self/fd/3", "/", []*os.File{f}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("as another user: %v\n%s", err, out)
	}
}

func TestOptions(t *testing.T) {
	for _, c := range []struct {
		name string
		o    Options
		want string // in the error
	}{
		{"unknown act", Options{Acts: []string{"drian"}}, "drian"},
		{"negative lag", Options{Lag: -1}, "negative"},
		{"unknown datapath", Options{Datapath: "xdp"}, "xdp"},
	} {
		code, err := Run(t.Context(), c.o)
		if code != 2 || !errors.Is(err, ErrOption) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %d, %v, want 2 and an error with %q", c.name, code, err, c.want)
		}
	}
}

func TestCount(t *testing.T) {
	signal := time.Unix(1_000_000, 0)
	flip := signal.Add(time.Second)
	at := func(ms int) time.Time { return signal.Add(time.Duration(ms) * time.Millisecond) }
	result := func(target string, v loadtest.Verdict, start, connected, end int) loadtest.Result {
		r := loadtest.Result{Kind: loadtest.KindNew, Target: target, Verdict: v, Start: at(start), End: at(end)}
		if connected != 0 {
			r.Connected = at(connected)
		}
		return r
	}
	race := result(blueName, loadtest.KeepAliveRace, 10, 0, 20)
	retry := result(greenName, loadtest.OK, 20, 21, 30)
	retry.Retry = true
	for _, c := range []struct {
		name     string
		turnAway bool
		rs       []loadtest.Result
		want     Act
	}{
		{"answered across signal and flip", false, []loadtest.Result{result(blueName, loadtest.OK, -100, -99, 1500)},
			Act{Requests: 1, Answered: 1, AtSignal: 1, AtFlip: 1, ToBlue: 1, LastAnswer: 1.5, Clients: Connections{Made: 1}}},
		{"late and served", false, []loadtest.Result{result(blueName, loadtest.OK, 500, 501, 510)},
			Act{Requests: 1, Answered: 1, Late: 1, ToBlue: 1, LastAnswer: 0.51, Clients: Connections{Made: 1}}},
		{"through a closed door", true, []loadtest.Result{result(blueName, loadtest.OK, 1001, 1002, 1003)},
			Act{Requests: 1, Answered: 1, Late: 1, Through: 1, ToBlue: 1, LastAnswer: 1.003, Clients: Connections{Made: 1}}},
		{"turned away on purpose", true, []loadtest.Result{result(blueName, loadtest.ConnectRefused, 1100, 0, 1101)},
			Act{Requests: 1, TurnedAway: 1, Clients: Connections{Refused: 1}}},
		{"refused although late ones are admitted", false, []loadtest.Result{result(blueName, loadtest.ConnectRefused, 500, 0, 501)},
			Act{Requests: 1, Lost: 1, LostBy: map[loadtest.Verdict]int64{loadtest.ConnectRefused: 1}, Clients: Connections{Refused: 1}}},
		{"refused before the signal", true, []loadtest.Result{result(blueName, loadtest.ConnectRefused, -10, 0, -9)},
			Act{Requests: 1, Lost: 1, LostBy: map[loadtest.Verdict]int64{loadtest.ConnectRefused: 1}, Clients: Connections{Refused: 1}}},
		{"refused by green", true, []loadtest.Result{result(greenName, loadtest.ConnectRefused, 1100, 0, 1101)},
			Act{Requests: 1, Lost: 1, LostBy: map[loadtest.Verdict]int64{loadtest.ConnectRefused: 1}, Clients: Connections{Refused: 1}}},
		{"reset is never on purpose", true, []loadtest.Result{result(blueName, loadtest.ReadReset, 1100, 1101, 1102)},
			Act{Requests: 1, Lost: 1, Late: 1, Through: 1, ToBlue: 1, LostBy: map[loadtest.Verdict]int64{loadtest.ReadReset: 1}, Clients: Connections{Made: 1}}},
		{"race and its repetition are one request", false, []loadtest.Result{race, retry},
			Act{Requests: 1, Answered: 1, Repeated: 1, Clients: Connections{Made: 1}}},
		{"race that nobody repeats is lost", false, []loadtest.Result{race},
			Act{Requests: 1, Lost: 1, LostBy: map[loadtest.Verdict]int64{loadtest.KeepAliveRace: 1}}},
	} {
		got := Act{}
		got.count(c.rs, signal, flip, c.turnAway)
		if int64(len(got.Losses)) > got.Lost || got.Lost > got.LostBy[loadtest.KeepAliveRace] && len(got.Losses) == 0 {
			t.Errorf("%s: got losses %v for %d lost", c.name, got.Losses, got.Lost)
		}
		got.Losses = nil
		if c.want.LostBy == nil {
			c.want.LostBy = map[loadtest.Verdict]int64{}
		}
		if !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s:\ngot  %+v\nwant %+v", c.name, got, c.want)
		}
	}
}

// The verdict follows from the acts alone.
func TestConclude(t *testing.T) {
	good := func() *Act { return &Act{Ebb: true, Requests: 5, Answered: 5} }
	for _, c := range []struct {
		name string
		acts []*Act
		ok   bool
		want string
	}{
		{"nothing lost", []*Act{{Lost: 9}, good()}, true, "nothing was lost"},
		{"lost", []*Act{good(), {Ebb: true, Lost: 2}}, false, "2 requests were lost"},
		{"a check failed", []*Act{{Ebb: true, Checks: []Check{{Name: "flip"}}}}, false, "not all went as promised"},
		{"no act with Ebb", []*Act{{}}, false, "no verdict"},
		{"skipped", []*Act{good(), {Ebb: true, Skipped: "old kernel"}}, true, "1 act was not shown"},
		{"all skipped", []*Act{{Ebb: true, Skipped: "old kernel"}}, false, "no verdict"},
	} {
		var out bytes.Buffer
		s := &stage{w: &writer{out: &out}}
		rep := &Report{Acts: c.acts}
		s.conclude(rep)
		if rep.OK != c.ok || !strings.Contains(rep.Verdict, c.want) || !strings.Contains(out.String(), rep.Verdict) {
			t.Errorf("%s: got %v, %q, want %v, %q, shown in:\n%s", c.name, rep.OK, rep.Verdict, c.ok, c.want, out.String())
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "inner", "serve", "client", "hold":
			os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
		}
	}
	os.Exit(m.Run())
}

func TestQuantile(t *testing.T) {
	for _, c := range []struct {
		v    []float64
		q    float64
		want float64
	}{
		{[]float64{3, 1, 2}, 0.5, 2},
		{[]float64{4, 1, 3, 2}, 0.5, 2.5},
		{[]float64{7}, 0.99, 7},
		{[]float64{0, 10}, 0.25, 2.5},
		{[]float64{1, 2, 3}, 1, 3},
	} {
		if got := quantile(c.v, c.q); got != c.want {
			t.Errorf("quantile(%v, %v): got %v, want %v", c.v, c.q, got, c.want)
		}
	}
	if got := median(nil); !math.IsNaN(got) {
		t.Errorf("median of nothing: got %v, want NaN", got)
	}
}

// The interval of a sample of known spread holds its median and is about as wide as theory says.
func TestInterval(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	v := make([]float64, 400)
	for i := range v {
		v[i] = 1 + rng.NormFloat64()/10
	}
	low, high := interval(v, rng)
	if m := median(v); low > m || high < m {
		t.Errorf("the interval %v – %v does not hold the median %v", low, high, m)
	}
	// The standard error of a median is 1.2533 σ/√n for a normal distribution, and the interval is 3.92 of those wide.
	want := 3.92 * 1.2533 * 0.1 / 20
	if got := high - low; got < want/2 || got > want*2 {
		t.Errorf("got an interval %v wide, want about %v", got, want)
	}
}

// A round's ratio compares the two samples of each kind, whatever their order.
func TestPairs(t *testing.T) {
	r := &result{}
	add := func(round int, l link, ebb bool, cpu int64) {
		r.samples = append(r.samples, sample{Round: round, Link: l, Ebb: ebb, work: work{Conn: usage{Units: 1, Client: cpu}}})
	}
	for _, s := range []struct {
		round int
		ebb   bool
		cpu   int64
	}{{0, false, 10}, {0, true, 12}, {0, true, 14}, {0, false, 16}, {1, true, 20}, {1, false, 10}, {1, false, 10}, {1, true, 20}} {
		add(s.round, loopback, s.ebb, s.cpu)
	}
	add(0, veth, true, 1000)
	p := r.pairs(loopback, func(w work) float64 { return w.Conn.cpu() })
	if len(p.ratio) != 2 || p.ratio[0] != 1 || p.ratio[1] != 2 {
		t.Errorf("got ratios %v, want [1 2]", p.ratio)
	}
	if p.without[0] != 13 || p.with[0] != 13 {
		t.Errorf("got means %v and %v of the first round, want 13 and 13", p.without[0], p.with[0])
	}
}

func TestUsageCountsWhatNobodyElseCaused(t *testing.T) {
	u := usage{Units: 2, Wall: 1e9, Client: 10, Server: 20, Ebb: 4, Softirq: 1000}
	if got := u.cpu(); got != 17 {
		t.Errorf("got %v ns per unit, want 17", got)
	}
	if got := u.rate(); got != 2 {
		t.Errorf("got %v units per second, want 2", got)
	}
}

func TestMessagesHaveTheirSizes(t *testing.T) {
	if got := len(request()); got != requestSize {
		t.Errorf("got a request of %d bytes, want %d", got, requestSize)
	}
	if got := len(answer()); got != answerSize {
		t.Errorf("got an answer of %d bytes, want %d", got, answerSize)
	}
}

func TestFlags(t *testing.T) {
	for _, args := range [][]string{{"-rounds", "-1"}, {"-conns", "0"}, {"-ebb", "/does/not/exist"}, {"-no-such-flag"}, {"word"}} {
		var out, said bytes.Buffer
		if code := run(args, &out, &said); code != 2 || said.Len() == 0 {
			t.Errorf("%v: got exit code %d and %q, want 2 and a reason", args, code, said.String())
		}
	}
}

// Everything once, with real servers and the real ebb, in a size that measures nothing.
func TestBench(t *testing.T) {
	if os.Geteuid() != 0 {
		if os.Getenv("CI") == "true" {
			t.Fatal("needs root, and CI=true: run the tests as root")
		}
		t.Skip("needs root: run the tests as root")
	}
	dir := t.TempDir()
	ebb := filepath.Join(dir, "ebb")
	build := exec.Command("go", "build", "-o", ebb, "./cmd/ebb")
	build.Dir = "../.."
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build ebb: %v\n%s", err, out)
	}
	var out, said bytes.Buffer
	if code := run([]string{
		"-ebb", ebb, "-write", dir, "-rounds", "1", "-drains", "1", "-memory", "300",
		"-conns", "200", "-requests", "400", "-kept", "4", "-parallel", "4",
	}, &out, &said); code != 0 {
		t.Fatalf("got exit code %d, want 0; it wrote:\n%s%s", code, out.String(), said.String())
	}
	for _, want := range []string{"## loopback", "## veth", "CPU per new connection", "## Latencies over 1 drains", "## Memory"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the table lacks %q:\n%s", want, out.String())
		}
	}
	if strings.Contains(out.String(), "NaN") {
		t.Errorf("a figure is missing:\n%s", out.String())
	}
	files, err := filepath.Glob(filepath.Join(dir, "*", "raw.jsonl"))
	if err != nil || len(files) != 1 {
		t.Fatalf("got raw data in %v (%v), want one file", files, err)
	}
	raw, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	kinds := map[string]int{}
	lines := bufio.NewScanner(bytes.NewReader(raw))
	for lines.Scan() {
		var line map[string]any
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			t.Fatalf("raw data: %v in %s", err, lines.Text())
		}
		for _, key := range []string{"kernel", "conn", "flip_ns", "memory_connections"} {
			if _, ok := line[key]; ok {
				kinds[key]++
			}
		}
		if conn, ok := line["conn"].(map[string]any); ok {
			for _, key := range []string{"wall_ns", "client_cpu_ns", "server_cpu_ns"} {
				if n, ok := conn[key].(float64); !ok || n <= 0 {
					t.Errorf("got %s %v in a sample, want more than 0", key, conn[key])
				}
			}
		}
	}
	for key, want := range map[string]int{"kernel": 1, "conn": 8, "flip_ns": 1, "memory_connections": 12} {
		if kinds[key] != want {
			t.Errorf("got %d lines with %s, want %d", kinds[key], key, want)
		}
	}
	out.Reset()
	if code := run([]string{
		"-ebb", ebb, "-write", dir, "-agent", "-backends", "5", "-starts", "1", "-idle", "1", "-established", "300", "-cut", "100",
	}, &out, &said); code != 0 {
		t.Fatalf("got exit code %d for the agent, want 0; it wrote:\n%s%s", code, out.String(), said.String())
	}
	for _, want := range []string{"## Start", "| 5 | after a kill |", "## 5 idle backends", "5 drains at once", "## Memory"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the agent's table lacks %q:\n%s", want, out.String())
		}
	}
	if strings.Contains(out.String(), "NaN") {
		t.Errorf("a figure of the agent is missing:\n%s", out.String())
	}
	if _, err := os.Stat(runDir); err == nil {
		t.Errorf("%s is left behind", runDir)
	}
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// result is all that was measured.
type result struct {
	machine machine
	rounds  int // that were taken
	samples []sample
	drains  []drainTimes
	memory  []memorySample
	began   time.Time
	took    time.Duration
}

// machine is where it was measured, the first line of the raw data.
type machine struct {
	Time    string  `json:"time"`
	Kernel  string  `json:"kernel"`
	CPU     string  `json:"cpu"`
	CPUs    int     `json:"cpus"`
	Go      string  `json:"go"`
	Ebb     string  `json:"ebb"`
	Options options `json:"options"`
}

func describe(o options) machine {
	m := machine{Time: time.Now().UTC().Format(time.RFC3339), CPUs: runtime.NumCPU(), Go: runtime.Version(), Options: o, CPU: "unknown"}
	m.Options.Ebb, m.Options.Write, m.Options.Disk = filepath.Base(o.Ebb), "", ""
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		m.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	if text, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(text)) {
			if name, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
				m.CPU = strings.TrimSpace(v)
				break
			}
		}
	}
	return m
}

// measure takes everything and reports.
func measure(ctx context.Context, o options, softirqs []*os.File) error {
	rng := rand.New(rand.NewPCG(o.Seed, 0))
	r := &result{machine: describe(o), began: time.Now()}
	if out, err := ebbVersion(o); err == nil {
		r.machine.Ebb = out
	}
	links := []link{loopback, veth}
	say := func(format string, a ...any) { fmt.Fprintf(os.Stderr, "bench: "+format+"\n", a...) }
	say("%d rounds on %d links, four samples each", o.Rounds, len(links))
	last := time.Now()
	for round := range o.Rounds {
		if o.Limit > 0 && time.Since(r.began) > time.Duration(o.Limit)*time.Second {
			say("%d rounds fit into the time", round)
			break
		}
		r.rounds = round + 1
		for _, l := range links {
			first := rng.IntN(2) == 1
			for _, withEbb := range []bool{first, !first, !first, first} {
				s, err := take(ctx, o, softirqs, l, withEbb)
				if err != nil {
					return fmt.Errorf("round %d on %s: %w", round+1, l, err)
				}
				s.Round = round
				r.samples = append(r.samples, s)
			}
		}
		if time.Since(last) > 10*time.Second {
			last = time.Now()
			say("round %d of %d", round+1, o.Rounds)
		}
	}
	if o.Drains > 0 {
		say("%d drains", o.Drains)
	}
	for n := range o.Drains {
		t, err := oneDrain(ctx, o, n)
		if err != nil {
			return fmt.Errorf("drain %d: %w", n+1, err)
		}
		r.drains = append(r.drains, t)
	}
	if o.Memory > 0 {
		say("memory of %d connections", o.Memory)
		for range 3 {
			for _, withEbb := range []bool{false, true, true, false} {
				m, err := takeMemory(ctx, o, withEbb)
				if err != nil {
					return fmt.Errorf("measure memory: %w", err)
				}
				r.memory = append(r.memory, m)
			}
		}
	}
	r.took = time.Since(r.began)
	text := r.table(rng)
	if _, err := os.Stdout.WriteString(text); err != nil {
		return err
	}
	if o.Write == "" {
		return nil
	}
	return r.keep(o.Write, text)
}

// keep writes the table and the raw data.
func (r *result) keep(dir, text string) error {
	lines := []any{r.machine}
	for _, s := range r.samples {
		lines = append(lines, s)
	}
	for _, d := range r.drains {
		lines = append(lines, d)
	}
	for _, m := range r.memory {
		lines = append(lines, m)
	}
	return write(filepath.Join(dir, r.began.UTC().Format("2006-01-02")), text, "results.md", lines, "raw.jsonl")
}

// write writes a table and raw data.
func write(dir, text, table string, lines []any, raw string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("keep results: %w", err)
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	for _, l := range lines {
		if err := e.Encode(l); err != nil {
			return fmt.Errorf("encode raw data: %w", err)
		}
	}
	return errors.Join(
		os.WriteFile(filepath.Join(dir, table), []byte(text), 0o644),
		os.WriteFile(filepath.Join(dir, raw), b.Bytes(), 0o644),
	)
}

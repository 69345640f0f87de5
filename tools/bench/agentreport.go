// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/drain"
)

// agentResult is all that was measured of an agent.
type agentResult struct {
	machine machine
	starts  []startSample
	idle    idleSample
	flips   []flipSample
	asked   cost // of `ebb drain --all`
	crowds  []crowdSample
	cuts    []cutSample
	began   time.Time
	took    time.Duration
}

// measureAgent takes everything of an agent and reports.
func measureAgent(ctx context.Context, o options) error {
	r := &agentResult{machine: describe(o), began: time.Now()}
	if out, err := ebbVersion(o); err == nil {
		r.machine.Ebb = out
	}
	say := func(format string, a ...any) { fmt.Fprintf(os.Stderr, "bench: "+format+"\n", a...) }
	sizes := []int{1, 50, o.Backends}
	slices.Sort(sizes)
	for _, n := range slices.Compact(slices.DeleteFunc(sizes, func(n int) bool { return n > o.Backends })) {
		say("starts with %d backends", n)
		if err := r.house(ctx, o, n, say); err != nil {
			return fmt.Errorf("measure %d backends: %w", n, err)
		}
	}
	say("%d connections of one backend", o.Established)
	for _, withEbb := range []bool{false, true, true, false} {
		if err := alone(o, o.Established, func(h *house) error {
			s, err := h.crowd(ctx, withEbb)
			r.crowds = append(r.crowds, s)
			return err
		}); err != nil {
			return fmt.Errorf("measure %d connections: %w", o.Established, err)
		}
	}
	say("cuts of %d connections", o.Cut)
	for range 3 {
		for _, method := range []drain.OnDeadline{drain.OnDeadlineCut, drain.OnDeadlineReset} {
			if err := alone(o, o.Cut, func(h *house) error {
				s, err := h.cut(ctx, method)
				r.cuts = append(r.cuts, s)
				return err
			}); err != nil {
				return fmt.Errorf("%s %d connections: %w", method, o.Cut, err)
			}
		}
	}
	r.took = time.Since(r.began)
	text := r.table()
	if _, err := os.Stdout.WriteString(text); err != nil {
		return err
	}
	if o.Write == "" {
		return nil
	}
	lines := []any{r.machine}
	for _, s := range r.starts {
		lines = append(lines, s)
	}
	lines = append(lines, r.idle)
	for _, s := range r.flips {
		lines = append(lines, s)
	}
	for _, s := range r.crowds {
		lines = append(lines, s)
	}
	for _, s := range r.cuts {
		lines = append(lines, s)
	}
	return write(filepath.Join(o.Write, r.began.UTC().Format("2006-01-02")), text, "agent.md", lines, "agent.jsonl")
}

// alone gives f one backend for n connections, which does not end at its stop signal.
func alone(o options, n int, f func(*house) error) error {
	h, err := newHouse(o, 1, "-stay", "-workers", fmt.Sprint(holders(n)))
	if err != nil {
		return err
	}
	return errors.Join(f(h), h.close())
}

// house measures starts with n backends and, with all of them, what the agent then costs.
func (r *agentResult) house(ctx context.Context, o options, n int, say func(string, ...any)) (err error) {
	h, err := newHouse(o, n)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.close()) }()
	for i := range 2 * o.Starts {
		a, s, err := h.start(ctx, i%2 == 0)
		if err != nil {
			return err
		}
		r.starts = append(r.starts, s)
		if n < o.Backends || i < 2*o.Starts-1 {
			a.end(unix.SIGKILL)
			continue
		}
		defer a.end(unix.SIGKILL)
		say("%d idle backends", n)
		if r.idle, err = h.idle(ctx, a); err != nil {
			return err
		}
		say("%d drains at once", n)
		if r.flips, r.asked, err = h.drainAll(ctx, a); err != nil {
			return err
		}
	}
	return nil
}

// row is the median and the largest of values in milliseconds.
func row(name string, v []float64, bar string) []string {
	return []string{name, ms(median(v)), ms(quantile(v, 0.99)), ms(quantile(v, 1)), bar}
}

func millis[S any](all []S, of func(S) (time.Duration, bool)) (v []float64) {
	for _, s := range all {
		if d, ok := of(s); ok {
			v = append(v, d.Seconds()*1e3)
		}
	}
	return v
}

// table is the result in Markdown.
func (r *agentResult) table() string {
	var b strings.Builder
	m, o := r.machine, r.machine.Options
	fmt.Fprintf(&b, "# What an agent with many backends costs\n\n")
	fmt.Fprintf(&b, "%s, %d × %s, Linux %s, %s; %s.\n", m.Time, m.CPUs, m.CPU, m.Kernel, m.Go, m.Ebb)
	fmt.Fprintf(&b, "Each backend is a process with a listener, %d to a network namespace; journals are on a disk. CPU time and memory are those of all processes of `ebb agent`. Took %v.\n", perSpace, r.took.Round(time.Second))

	fmt.Fprintf(&b, "\n## Start\n\n")
	rows := [][]string{{"backends", "", "CPU time", "ready", "verified", "largest", "bar"}}
	for _, n := range slices.Compact(slices.Sorted(func(yield func(int) bool) {
		for _, s := range r.starts {
			if !yield(s.Backends) {
				return
			}
		}
	})) {
		for _, first := range []bool{true, false} {
			of := func(d func(startSample) time.Duration) []float64 {
				return millis(r.starts, func(s startSample) (time.Duration, bool) {
					return d(s), s.Backends == n && s.First == first
				})
			}
			what := "after a kill"
			if first {
				what = "first"
			}
			verified := of(func(s startSample) time.Duration { return s.Verified })
			rows = append(rows, []string{
				fmt.Sprint(n), what, ms(median(of(func(s startSample) time.Duration { return s.CPU }))),
				ms(median(of(func(s startSample) time.Duration { return s.Ready }))), "**" + ms(median(verified)) + "**", ms(quantile(verified, 1)), "≤ 250 ms",
			})
		}
	}
	writeTable(&b, rows)
	fmt.Fprintf(&b, "\nMedians of %d starts each, from the start of the process. *Ready* is what it tells systemd. *Verified*: by then the kernel itself, not the agent, shows the admission program attached in each namespace and a rule for each backend's listener, which the drain of a backend flips.\n", o.Starts)

	i := r.idle
	fmt.Fprintf(&b, "\n## %d idle backends\n\n", i.Backends)
	writeTable(&b, [][]string{
		{"", "", "bar"},
		{"resident memory, the processes' sum", fmt.Sprintf("**%.1f MiB**", float64(i.RSS)/(1<<20)), "≤ 40 MiB"},
		{"the same, with shared pages counted once", fmt.Sprintf("%.1f MiB", float64(i.PSS)/(1<<20)), ""},
		{fmt.Sprintf("CPU time in %v", i.Over), fmt.Sprintf("**%s** (%.2f %% of one CPU)", ms(i.CPU.Seconds()*1e3), 100*i.CPU.Seconds()/i.Over.Seconds()), "not measurable"},
		{"CPU time of a list of all backends", ms(i.List.CPU.Seconds() * 1e3), ""},
		{"CPU time of a scrape", ms(i.Scrape.CPU.Seconds() * 1e3), ""},
	})

	fmt.Fprintf(&b, "\n## Drains\n\n")
	crowd := fmt.Sprintf("%d connections: ", o.Established)
	rows = [][]string{{"", "p50", "p99", "largest", "bar"}}
	rows = append(rows,
		row(fmt.Sprintf("%d drains at once (`ebb drain --all`): begin → admission closed", i.Backends), millis(r.flips, func(s flipSample) (time.Duration, bool) { return s.FlipBegin, true }), ""),
		row("the same, from the start of the command", millis(r.flips, func(s flipSample) (time.Duration, bool) { return s.FlipAsked, true }), ""),
		row(crowd+"begin → admission closed", millis(r.crowds, func(s crowdSample) (time.Duration, bool) { return s.FlipBegin, s.Ebb }), ""),
	)
	var looks []cost
	var kernel [2][]float64
	var user, looked []float64
	for _, s := range r.crowds {
		n := float64(s.Conns)
		if !s.Ebb {
			kernel[0] = append(kernel[0], float64(s.Kernel)/n)
			continue
		}
		kernel[1], user, looked = append(kernel[1], float64(s.Kernel)/n), append(user, float64(s.User)/n), append(looked, float64(s.Looked)/n)
		looks = append(looks, s.Looks...)
	}
	rows = append(rows,
		row(crowd+"the class of each, CPU time", millis(looks, func(c cost) (time.Duration, bool) { return c.CPU, true }), ""),
		row(crowd+"the class of each", millis(looks, func(c cost) (time.Duration, bool) { return c.Wall, true }), ""),
	)
	for _, method := range []drain.OnDeadline{drain.OnDeadlineCut, drain.OnDeadlineReset} {
		rows = append(rows, row(fmt.Sprintf("%d connections ended, `on_deadline: %s`", o.Cut, method), millis(r.cuts, func(s cutSample) (time.Duration, bool) { return s.Took, s.Method == method }), ""))
	}
	writeTable(&b, rows)
	fmt.Fprintf(&b, "\nThe agent took %s of CPU time while `ebb drain --all` ran.\n", ms(r.asked.CPU.Seconds()*1e3))
	more := median(kernel[1]) - median(kernel[0])
	fmt.Fprintf(&b, "\n## Memory\n\nEach of %d idle connections takes **%.0f bytes** more of the kernel's general caches with Ebb than without, and the agent grows by %.0f bytes for it (bar: ≤ 400 together); %.0f once it has looked at each, as in a drain. The caches are the whole machine's and move with whatever else runs there.\n",
		o.Established, more, median(user), median(looked))
	return b.String()
}

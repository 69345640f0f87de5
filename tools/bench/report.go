// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os/exec"
	"strings"
	"time"
)

func ebbVersion(o options) (string, error) {
	cmd := exec.Command(o.Ebb, "version")
	cmd.Env = environment()
	out, err := cmd.Output()
	name, _, _ := strings.Cut(strings.TrimSpace(string(out)), ", go")
	return name, err
}

// quantity is one figure that is compared.
type quantity struct {
	name string
	unit string
	bar  string
	of   func(work) float64
}

// The bars are goals and not limits: a run whose interval is wide says little.
var quantities = []quantity{
	{"CPU per new connection", "µs", "≤ 1.03", func(w work) float64 { return w.Conn.cpu() / 1e3 }},
	{"new connections per second", "", "", func(w work) float64 { return w.Conn.rate() }},
	{"CPU per request on a kept connection", "µs", "", func(w work) float64 { return w.Req.cpu() / 1e3 }},
	{"requests per second on kept connections", "", "≥ 0.99", func(w work) float64 { return w.Req.rate() }},
}

// pairs are a quantity's values without Ebb and with it, and their ratio, one of each per round.
type pairs struct{ without, with, ratio []float64 }

func (r *result) pairs(l link, of func(work) float64) pairs {
	type round struct{ sum [2]float64 }
	rounds := make(map[int]*round)
	var order []int
	for _, s := range r.samples {
		if s.Link != l {
			continue
		}
		if rounds[s.Round] == nil {
			rounds[s.Round] = &round{}
			order = append(order, s.Round)
		}
		i := 0
		if s.Ebb {
			i = 1
		}
		rounds[s.Round].sum[i] += of(s.work) / 2
	}
	var p pairs
	for _, n := range order {
		sum := rounds[n].sum
		p.without, p.with, p.ratio = append(p.without, sum[0]), append(p.with, sum[1]), append(p.ratio, sum[1]/sum[0])
	}
	return p
}

// table is the result in Markdown.
func (r *result) table(rng *rand.Rand) string {
	var b strings.Builder
	m := r.machine
	fmt.Fprintf(&b, "# What Ebb costs while nothing drains, and how fast it acts\n\n")
	fmt.Fprintf(&b, "%s, %d × %s, Linux %s, %s; %s.\n", m.Time, m.CPUs, m.CPU, m.Kernel, m.Go, m.Ebb)
	fmt.Fprintf(&b, "%d rounds per link of four samples each, in the order A B B A or B A A B by lot: %d new connections, %d at a time, then %d requests on %d kept ones; request %d bytes, answer %d; one thread each for client and server; congestion control reno. Took %v, load average %s.\n",
		r.rounds, m.Options.Conns, m.Options.Parallel, m.Options.Requests, m.Options.Kept, requestSize, answerSize, r.took.Round(time.Second), r.loads())
	if n := r.disturbed(); n > 0 {
		fmt.Fprintf(&b, "\n**%d of %d samples were taken while another sock_ops program was attached to the root of the cgroups: what Ebb costs was then measured on top of it.**\n", n, len(r.samples))
	}
	for _, l := range []link{loopback, veth} {
		fmt.Fprintf(&b, "\n## %s\n\n", l)
		rows := [][]string{{"", "alone", "with Ebb", "ratio", "95 % interval", "bar"}}
		for _, q := range quantities {
			p := r.pairs(l, q.of)
			low, high := interval(p.ratio, rng)
			rows = append(rows, []string{q.name, figure(median(p.without), q.unit), figure(median(p.with), q.unit), fmt.Sprintf("**%.3f**", median(p.ratio)), fmt.Sprintf("%.3f – %.3f", low, high), q.bar})
		}
		writeTable(&b, rows)
		p := r.pairs(l, func(w work) float64 { return float64(w.Conn.Ebb) / float64(w.Conn.Units) })
		q := r.pairs(l, func(w work) float64 { return float64(w.Conn.Softirq) / float64(w.Conn.Units) / 1e3 })
		fmt.Fprintf(&b, "\nOf that CPU time `ebb run` itself took %.0f ns per new connection. Kernel threads for packets took %.1f µs per new connection without Ebb and %.1f µs with it, not counted above since other traffic of the machine is in it.\n",
			median(p.with), median(q.without), median(q.with))
	}
	b.WriteString("\nCPU is the process CPU time of client, server and `ebb run`, in which the kernel's work for them and Ebb's programs are accounted. Ratios are medians over rounds, intervals are by bootstrap.\n")
	if len(r.drains) > 0 {
		fmt.Fprintf(&b, "\n## Latencies over %d drains\n\n", len(r.drains))
		rows := [][]string{{"", "p50", "p99", "largest", "bar"}}
		for _, d := range []struct {
			name, bar string
			of        func(drainTimes) time.Duration
		}{
			{"stop signal sent → admission closed (`--on-new refuse`)", "", func(t drainTimes) time.Duration { return t.Flip }},
			{"drain begun → admission closed", "", func(t drainTimes) time.Duration { return t.FlipBegin }},
			{"last connection closed → flush sent", "≤ 5 ms (p99)", func(t drainTimes) time.Duration { return t.Flush }},
			{"last connection closed → the application has its signal", "", func(t drainTimes) time.Duration { return t.Signal }},
		} {
			var v []float64
			for _, t := range r.drains {
				v = append(v, d.of(t).Seconds()*1e3)
			}
			rows = append(rows, []string{d.name, ms(median(v)), ms(quantile(v, 0.99)), ms(quantile(v, 1)), d.bar})
		}
		writeTable(&b, rows)
		fmt.Fprintf(&b, "\nThe quiet period (%v here) is taken off: it is a choice. The client's close and the server's answer to it are in.\n", quiet)
	}
	if len(r.memory) > 0 {
		var kernel [2][]float64
		var user []float64
		for _, m := range r.memory {
			i := 0
			if m.Ebb {
				i = 1
				user = append(user, float64(m.User)/float64(m.Memory))
			}
			kernel[i] = append(kernel[i], float64(m.Kernel)/float64(m.Memory))
		}
		more := median(kernel[1]) - median(kernel[0])
		fmt.Fprintf(&b, "\n## Memory\n\nEach of %d idle connections takes **%.0f bytes** more of the kernel's general caches with Ebb than without (%.0f and %.0f, medians of %d samples each, alone %.0f to %.0f), and `ebb run` grows by %.0f bytes for it (bar: ≤ 400 together). The caches are the whole machine's and move with whatever else runs there.\n",
			m.Options.Memory, more, median(kernel[1]), median(kernel[0]), len(kernel[0]), quantile(kernel[0], 0), quantile(kernel[0], 1), median(user))
	}
	return b.String()
}

func figure(v float64, unit string) string {
	s := fmt.Sprintf("%.2f", v)
	if math.Abs(v) >= 1000 {
		s = fmt.Sprintf("%.0f", v)
	}
	if unit != "" {
		s += " " + unit
	}
	return s
}

func ms(v float64) string { return fmt.Sprintf("%.2f ms", v) }

func writeTable(b *strings.Builder, rows [][]string) {
	for i, r := range rows {
		fmt.Fprintf(b, "| %s |\n", strings.Join(r, " | "))
		if i == 0 {
			fmt.Fprintf(b, "|%s\n", strings.Repeat("---|", len(r)))
		}
	}
}

// loads is the range of the load average.
func (r *result) loads() string {
	low, high := math.Inf(1), math.Inf(-1)
	for _, s := range r.samples {
		var v float64
		if _, err := fmt.Sscan(s.LoadAvg, &v); err == nil {
			low, high = min(low, v), max(high, v)
		}
	}
	if low > high {
		return "unknown"
	}
	return fmt.Sprintf("%.1f to %.1f", low, high)
}

func (r *result) disturbed() int {
	n := 0
	for _, s := range r.samples {
		if s.Others > 0 {
			n++
		}
	}
	return n
}

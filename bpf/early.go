// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// Early closes admissions when processes are sent a stop signal, before a handler of theirs runs: the program runs in
// the context of the sender. It ends with Close or with its process. Its methods may be called concurrently.
type Early struct {
	rules *ebpf.Map
	link  link.Link
}

// EarlyRule says what a stop signal of a process does.
type EarlyRule struct {
	Start   uint64 // of the process, as TaskID tells it
	Signals []syscall.Signal
	Backend uint64
	Rule    BackendRule   // what is written; Until is ignored
	Span    time.Duration // how long it lasts
}

// OpenEarly attaches the program (tp_btf/signal_generate, Linux 5.5 with BTF). ErrNotSupported if it cannot be.
func (h *Host) OpenEarly() (*Early, error) {
	spec, err := loadEarly()
	if err != nil {
		return nil, err
	}
	var objs struct {
		Early *ebpf.Program `ebpf:"early"`
		Rules *ebpf.Map     `ebpf:"early_rules"`
	}
	if err := spec.LoadAndAssign(&objs, &ebpf.CollectionOptions{MapReplacements: h.replacements(spec)}); err != nil {
		return nil, fmt.Errorf("load early admission: %w: %w", ErrNotSupported, err)
	}
	defer objs.Early.Close()
	l, err := link.AttachTracing(link.TracingOptions{Program: objs.Early, AttachType: ebpf.AttachTraceRawTp})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("attach early admission: %w: %w", ErrNotSupported, err), objs.Rules.Close())
	}
	return &Early{rules: objs.Rules, link: l}, nil
}

// Set prepares what a process's stop signals do: those that will be delivered, of an admission that is open. tgid is
// as TaskID tells it. It replaces what was prepared before.
func (e *Early) Set(tgid uint32, r EarlyRule) error {
	rule, err := r.Rule.kernel()
	if err != nil {
		return fmt.Errorf("prepare early admission of process %d: %w", tgid, err)
	}
	k := earlyEarlyRule{Start: r.Start, Backend: r.Backend, Span: uint64(max(r.Span, 0))}
	k.Rule.Action, k.Rule.Mode, k.Rule.Gen, k.Rule.Flags = rule.Action, rule.Mode, rule.Gen, rule.Flags
	k.Rule.BypassLo, k.Rule.BypassHi = rule.BypassLo, rule.BypassHi
	for _, s := range r.Signals {
		if s < 1 || s > 64 {
			return fmt.Errorf("prepare early admission of process %d: there is no signal %d", tgid, int(s))
		}
		k.Signals |= 1 << (s - 1)
	}
	if err := e.rules.Put(tgid, &k); err != nil {
		return fmt.Errorf("prepare early admission of process %d: %w", tgid, err)
	}
	return nil
}

// Clear takes back what was prepared for a process. It is idempotent.
func (e *Early) Clear(tgid uint32) error {
	if err := remove(e.rules, tgid); err != nil {
		return fmt.Errorf("clear early admission of process %d: %w", tgid, err)
	}
	return nil
}

// Close detaches the program. It may be called again.
func (e *Early) Close() error { return errors.Join(e.link.Close(), e.rules.Close()) }

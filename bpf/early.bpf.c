//go:build ignore
// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
/*
 * Closes the admission of a backend when its process is sent a stop signal, in the context of the
 * sender: before kill() returns, and so before a handler can close the listener. What is written is
 * what the owner has prepared. Belongs to the process that loaded it and goes with it.
 */
#include "census.h"

char _license[] SEC("license") = "GPL";

/* Keep the types in the object, for the Go side. */
const struct early_rule *early_rule_layout __attribute__((unused));

/* include/trace/events/signal.h */
enum {
	TRACE_SIGNAL_DELIVERED = 0,
	TRACE_SIGNAL_ALREADY_PENDING = 2,
};

/*
 * global tgid → what its stop signals do. Written by the owner that loaded the program.
 * Preallocated: a lookup here must not sleep or allocate.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 64);
	__type(key, __u32);
	__type(value, struct early_rule);
} early_rules SEC(".maps");

SEC("tp_btf/signal_generate")
int BPF_PROG(early, int sig, void *info, struct task_struct *task, int group, int result)
{
	struct backend rule, *now;
	struct early_rule *e;
	__u64 id, gen;
	__u32 tgid;

	/* The others will be ignored, as by PID 1 without a handler, or were lost. */
	if (result != TRACE_SIGNAL_DELIVERED && result != TRACE_SIGNAL_ALREADY_PENDING)
		return 0;
	if (sig < 1 || sig > 64)
		return 0;
	tgid = task->tgid;
	e = bpf_map_lookup_elem(&early_rules, &tgid);
	if (!e || !(e->signals & (1ULL << (sig - 1))))
		return 0;
	if (e->start != BPF_CORE_READ(task, group_leader, start_boottime))
		return 0; /* another process has its number */
	id = e->backend;
	now = bpf_map_lookup_elem(&backends, &id);
	if (!now || now->action != ACTION_OPEN)
		return 0; /* its drain has begun: the owner decides */
	rule = e->rule;
	rule.until = bpf_ktime_get_boot_ns() + e->span;
	gen = rule.gen;
	/* EXIST: a backend that is removed meanwhile stays so. */
	if (bpf_map_update_elem(&backends, &id, &rule, 2 /* BPF_EXIST */))
		return 0; /* the owner hears nothing and the signal takes its course */
	send(EVENT_SIGNAL, id, gen, sig, 0);
	return 0;
}

//go:build ignore
// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
/*
 * Counts the connections of every backend. Two hooks see each socket, since neither sees all of it:
 *  - sock_ops is never skipped, but another program can overwrite its callback flags;
 *  - the tracepoint needs no flags, but is skipped when it interrupts itself (1.2 % over veth with
 *    packet steering).
 * Both drive the state machine in census.h; a third one has the last look when a socket is
 * destroyed.
 *
 * Which listeners are a backend's is decided once, at LISTEN, in the context of the process that
 * listens. A connection is recognised by its listener's tag, which it inherits: its local port may
 * be another one after steering, and is zero by the time it closes.
 */
#include "census.h"

char _license[] SEC("license") = "GPL";

/* Keeps the type in the object, for the Go side. */
const struct event *event_layout __attribute__((unused));

#define MAX_ANCESTORS 24
#define MAX_CGROUPS   16

static __always_inline struct watch_rule *watched(const struct address *a)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct watch_key key = {.kind = WATCH_ADDRESS, .addr = *a};
	struct cgroup_subsys_state *css;
	struct cgroup *cgroup;
	struct watch_rule *w;

	w = bpf_map_lookup_elem(&watch, &key);
	if (w)
		return w;

	__builtin_memset(&key, 0, sizeof(key));
	key.kind = WATCH_PROCESS;
	for (int i = 0; i < MAX_ANCESTORS; i++) {
		__u32 tgid = BPF_CORE_READ(task, tgid);

		if (tgid == 0)
			break;
		key.id = tgid;
		w = bpf_map_lookup_elem(&watch, &key);
		if (w && w->start == BPF_CORE_READ(task, group_leader, start_boottime)) {
			/* A supervisor's own listener is nobody's, not even an outer supervisor's.
			 */
			if (i == 0 && (w->flags & WATCH_NOT_SELF))
				return NULL;
			return w;
		}
		/* The leader's: a thread's own parent can be a thread that is not the leader. */
		task = BPF_CORE_READ(task, group_leader, real_parent);
		if (!task)
			break;
	}

	key.kind = WATCH_CGROUP;
	task = (void *)bpf_get_current_task();
	cgroup = BPF_CORE_READ(task, cgroups, dfl_cgrp);
	for (int i = 0; i < MAX_CGROUPS; i++) {
		if (!cgroup)
			break;
		key.id = BPF_CORE_READ(cgroup, kn, id);
		w = bpf_map_lookup_elem(&watch, &key);
		if (w)
			return w;
		css = BPF_CORE_READ(cgroup, self.parent);
		if (!css)
			break;
		cgroup = BPF_CORE_READ(css, cgroup);
	}

	key.kind = WATCH_PORT;
	key.id = 0;
	key.addr.netns = a->netns;
	key.addr.port = a->port;
	key.addr.proto = a->proto;
	return bpf_map_lookup_elem(&watch, &key);
}

static __always_inline void listening(struct sock *sk, void *storage, __u64 cookie, __u8 how,
				      const bool atomic)
{
	struct address a = {};
	struct watch_rule *w;
	struct tag *t;
	__u8 flags = 0;

	local_address(sk, &a);
	if (a.port == 0)
		return; /* listen() will bind it; the other hook comes after that */
	t = bpf_sk_storage_get(&tags, storage, NULL, 0);
	if (t) {
		if (t->st == TAG_LISTENER && t->cookie == cookie)
			return;
		/* A listener that listens again, or a connection that has become a listener. */
		bpf_sk_storage_delete(&tags, storage);
	}
	w = watched(&a);
	if (!w || !wanted(w, &a, &flags)) {
		shadow(&a, 0);
		return;
	}
	shadow(&a, w->backend);
	tag_listener(sk, storage, cookie, &a, w->backend, w->gen, flags, how, atomic);
}

/* Whether the tracepoint is attached beside sock_ops. */
volatile const bool traced = false;

static __always_inline void changed(struct tag *t, int old, int new, __u8 how, const bool atomic)
{
	/* A new child is a copy of its listener, hence goes from LISTEN to SYN_RECV. */
	if (old == TCP_LISTEN && new == TCP_CLOSE) {
		/*
		 * sock_ops is told before the listener leaves the hash, the tracepoint after. A
		 * refusal that ended in between would admit a connection for the dying listener to
		 * reset.
		 */
		if (how == BY_SOCKOPS && traced)
			return;
		listener_closed(t, atomic);
	} else if (old != TCP_LISTEN && new != TCP_LISTEN)
		step(t, tag_state(new), how, atomic);
}

static __always_inline int sockops(struct bpf_sock_ops *ctx, const bool atomic)
{
	__u32 op = ctx->op, flags, old, new;
	struct bpf_sock *sk = ctx->sk;
	struct sock *full;
	struct count *c;
	struct tag *t;
	__u64 cookie;

	/* Questions about the parameters of a connection to come: there is nothing to count or to
	 * heal. */
	if (!sk || op < SOCK_OPS_PASSIVE_ESTABLISHED || op == SOCK_OPS_NEEDS_ECN)
		return 1;
	if (op == SOCK_OPS_LISTEN) {
		full = (void *)bpf_skc_to_tcp_sock(sk);
		if (full)
			listening(full, sk, bpf_get_socket_cookie(ctx), BY_SOCKOPS, atomic);
	}
	t = bpf_sk_storage_get(&tags, sk, NULL, 0);
	if (!t)
		return 1;
	/*
	 * Whatever the callback: put our flag back if another program has overwritten it, and leave
	 * the other flags as they are.
	 */
	flags = ctx->bpf_sock_ops_cb_flags;
	if (!(flags & SOCK_OPS_STATE_FLAG)) {
		bpf_sock_ops_cb_flags_set(ctx, flags | SOCK_OPS_STATE_FLAG);
		if (op != SOCK_OPS_LISTEN) {
			cookie = t->cookie;
			c = bpf_map_lookup_elem(&counts, &cookie);
			if (c)
				__sync_fetch_and_add(&c->healed, 1);
		}
	}
	if (op == SOCK_OPS_PASSIVE_ESTABLISHED) {
		/* A cookie is made when it is first asked for, and a reader of files cannot ask. */
		if (t->flags & LISTENER_MPTCP)
			bpf_get_socket_cookie(ctx);
		step(t, TAG_OPEN, BY_SOCKOPS, atomic);
	} else if (op == SOCK_OPS_STATE) {
		/* The barriers keep the compiler from reading at a computed context offset. */
		old = ctx->args[0];
		barrier_var(old);
		new = ctx->args[1];
		barrier_var(new);
		changed(t, old, new, BY_SOCKOPS, atomic);
	}
	return 1; /* the reply is never touched: other programs answer there */
}

SEC("sockops")
int census_sockops(struct bpf_sock_ops *ctx)
{
	return sockops(ctx, true);
}

/* For kernels before 5.12, where nothing else drives the machine. */
SEC("sockops")
int census_sockops_plain(struct bpf_sock_ops *ctx)
{
	return sockops(ctx, false);
}

/*
 * The tracepoint comes before the state is stored: a listener is tagged before it can be found, and
 * with it every child.
 */
SEC("tp_btf/inet_sock_set_state")
int BPF_PROG(census_state, struct sock *sk, int old, int new)
{
	struct tag *t;

	if (sk->sk_protocol != IPPROTO_TCP)
		return 0;
	if (new == TCP_LISTEN) {
		listening(sk, sk, bpf_get_socket_cookie(sk), BY_TRACING, true);
		return 0;
	}
	t = bpf_sk_storage_get(&tags, sk, NULL, 0);
	if (!t)
		return 0;
	changed(t, old, new, BY_TRACING, true);
	return 0;
}

/*
 * The last look at a socket. It narrows the hole that the two others leave together: a program that
 * overwrites our flags after us, so that sock_ops sees no more, and a close whose tracepoint
 * interrupts itself. This is another program, hence not skipped then.
 */
SEC("tp_btf/tcp_destroy_sock")
int BPF_PROG(census_destroy, struct sock *sk)
{
	struct tag *t = bpf_sk_storage_get(&tags, sk, NULL, 0);
	struct count *c;
	__u64 cookie;

	if (!t || t->st == TAG_DONE)
		return 0;
	cookie = t->cookie;
	if (t->st == TAG_LISTENER && cookie == bpf_get_socket_cookie(sk)) {
		listener_closed(t, true);
		return 0;
	}
	if (t->st >= TAG_OPEN) {
		c = bpf_map_lookup_elem(&counts, &cookie);
		if (c)
			__sync_fetch_and_add(&c->healed, 1);
	}
	step(t, TAG_DONE, BY_TRACING, true);
	return 0;
}

/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * The one state machine of a counted socket, driven by every hook that sees its state:
 *
 *   NEW ──► LISTENER ──────────────────────────────► DONE      a listener
 *            │ cloned
 *            ▼
 *   (not counted) ──► OPEN ──► ENDING ──► CLOSING ──► DONE     a connection
 *
 * States only move up, each step is a compare and swap, and whoever wins it does the arithmetic. So
 * it does not matter how many hooks see a transition, in which order, or which of them misses it.
 */
#ifndef EBB_CENSUS_H
#define EBB_CENSUS_H

#include "maps.h"

volatile const bool netns_by_inode = false;

#define LOOPBACK_NET 127

/*
 * atomic is constant: before 5.12 the verifier rejects a program that contains a compare and swap.
 * There one hook alone drives the machine, under the socket's lock.
 */
static __always_inline bool swap(__u32 *p, __u32 from, __u32 to, const bool atomic)
{
	if (atomic)
		return __sync_val_compare_and_swap(p, from, to) == from;
	if (*(volatile __u32 *)p != from)
		return false;
	*(volatile __u32 *)p = to;
	return true;
}

static __always_inline void send(__u32 type, __u64 backend, __u64 gen, __u64 cookie, __u64 live)
{
	void *ring = bpf_map_lookup_elem(&events, &backend);
	struct event e = {
		.type = type,
		.backend = backend,
		.gen = gen,
		.cookie = cookie,
		.open = (__s64)(live & 0xffffffff) + (__s64)(live >> 32),
	};

	if (!ring)
		return;
	e.time = bpf_ktime_get_boot_ns();
	if (bpf_ringbuf_output(ring, &e, sizeof(e), 0))
		failed(ERROR_RING_FULL);
}

static __always_inline __u32 tag_state(int tcp_state)
{
	switch (tcp_state) {
	case TCP_ESTABLISHED:
	case TCP_CLOSE_WAIT:
		return TAG_OPEN;
	case TCP_FIN_WAIT1:
	case TCP_CLOSING:
	case TCP_LAST_ACK:
		return TAG_ENDING;
	case TCP_FIN_WAIT2:
		return TAG_CLOSING;
	case TCP_CLOSE:
		return TAG_DONE;
	}
	return TAG_NEW; /* SYN_SENT, SYN_RECV: not counted yet */
}

static __always_inline __u64 weight(__u32 st)
{
	if (st == TAG_OPEN)
		return 1;
	if (st == TAG_ENDING)
		return 1ULL << 32;
	return 0;
}

/* Moves a connection up to want. Returns whether it was this call that counted it first. */
static __always_inline bool step(struct tag *t, __u32 want, __u8 how, const bool atomic)
{
	__u64 cookie = t->cookie, live;
	struct count *c;
	struct drain *d;
	__u32 was = 0;
	bool won = false;

	/* Each lost swap means that another hook moved it up: there are five steps at most. */
	for (int i = 0; i < 5; i++) {
		was = *(volatile __u32 *)&t->st;
		if (was >= want)
			return false;
		if (swap(&t->st, was, want, atomic)) {
			won = true;
			break;
		}
	}
	if (!won || (was < TAG_OPEN && want == TAG_DONE))
		return false; /* a handshake that failed was never counted */
	if (was < TAG_OPEN) {
		t->how = how;
		t->since = bpf_ktime_get_boot_ns();
	}
	c = bpf_map_lookup_elem(&counts, &cookie);
	if (!c)
		return false; /* its backend was removed */
	if (was < TAG_OPEN) {
		__sync_fetch_and_add(&c->total, 1);
		if (how == BY_SOCKOPS)
			__sync_fetch_and_add(&c->by_sockops, 1);
		else if (how == BY_TRACING)
			__sync_fetch_and_add(&c->by_tracing, 1);
		else
			__sync_fetch_and_add(&c->by_adopt, 1);
	}
	/* What is gained is added before what is lost is taken away: a reader sees no gap. */
	if (want == TAG_CLOSING)
		__sync_fetch_and_add(&c->closing, 1);
	if (weight(was) != weight(want))
		__sync_fetch_and_add(&c->live, weight(want) - weight(was));
	if (was == TAG_CLOSING)
		__sync_fetch_and_add(&c->closing, -1);
	if (want == TAG_DONE)
		__sync_fetch_and_add(&c->closed, 1);
	if (!weight(was))
		return was < TAG_OPEN;
	/*
	 * Add, then read again: of several that go down at once at least the last one reads zero,
	 * so zero may be told twice but is never missed. It needs no atomic that returns a value.
	 */
	live = *(volatile __u64 *)&c->live;
	if (live && (was != TAG_OPEN || (live & 0xffffffff)))
		return false;
	d = bpf_map_lookup_elem(&drains, &t->backend);
	if (d && d->draining)
		send(EVENT_ZERO, t->backend, t->gen, cookie, live);
	return false;
}

static __always_inline __u64 netns_of(struct sock *sk)
{
	if (netns_by_inode)
		return BPF_CORE_READ(sk, __sk_common.skc_net.net, ns.inum);
	return BPF_CORE_READ(sk, __sk_common.skc_net.net, net_cookie);
}

static __always_inline void set_address(struct sock *sk, __u16 family, struct in6_addr *v6,
					__be32 v4, __u8 *out, __u8 *out_family)
{
	__u32 *to = (__u32 *)out;

	to[0] = to[1] = to[2] = to[3] = 0;
	*out_family = AF_INET;
	if (family == AF_INET) {
		to[0] = v4;
		return;
	}
	if (v6->in6_u.u6_addr32[0] == 0 && v6->in6_u.u6_addr32[1] == 0 &&
	    v6->in6_u.u6_addr32[2] == bpf_htonl(0xffff)) {
		to[0] = v6->in6_u.u6_addr32[3];
		return;
	}
	*out_family = AF_INET6;
	to[0] = v6->in6_u.u6_addr32[0];
	to[1] = v6->in6_u.u6_addr32[1];
	to[2] = v6->in6_u.u6_addr32[2];
	to[3] = v6->in6_u.u6_addr32[3];
}

static __always_inline void local_address(struct sock *sk, struct address *a)
{
	struct in6_addr v6 = {};
	__u16 family = BPF_CORE_READ(sk, __sk_common.skc_family);

	a->netns = netns_of(sk);
	a->port = BPF_CORE_READ(sk, __sk_common.skc_num);
	a->proto = IPPROTO_TCP;
	a->pad = 0;
	if (family == AF_INET6)
		BPF_CORE_READ_INTO(&v6, sk, __sk_common.skc_v6_rcv_saddr);
	set_address(sk, family, &v6, BPF_CORE_READ(sk, __sk_common.skc_rcv_saddr), a->addr,
		    &a->family);
}

static __always_inline bool any(const struct address *a)
{
	const __u32 *w = (const __u32 *)a->addr;

	return !(w[0] | w[1] | w[2] | w[3]);
}

static __always_inline bool loopback(const struct address *a)
{
	const __u32 *w = (const __u32 *)a->addr;

	if (a->family == AF_INET)
		return a->addr[0] == LOOPBACK_NET;
	return !(w[0] | w[1] | w[2]) && w[3] == bpf_htonl(1);
}

/* Whether a watch wants a listener on this address, and whether only as one put aside. */
static __always_inline bool wanted(const struct watch_rule *w, const struct address *a, __u8 *flags)
{
	bool named = false;

	for (int i = 0; i < MAX_PORTS; i++)
		if (i < w->nexclude && w->exclude[i] == a->port)
			return false;
	for (int i = 0; i < MAX_PORTS; i++)
		if (i < w->nonly && w->only[i] == a->port)
			named = true;
	if (w->nonly && !named)
		return false;
	if (!named && loopback(a))
		*flags |= LISTENER_ASIDE;
	return true;
}

/*
 * A rule on a wildcard address must not catch another process's listener on a more specific one. At
 * LISTEN, before the socket can be found, such a listener gets a pass entry, which belongs to the
 * wildcard's backend and goes with it.
 */
static __always_inline void shade(const struct address *a, struct address *wild, __u64 backend)
{
	struct admission *over = bpf_map_lookup_elem(&admissions, wild);
	struct admission pass = {.flags = ADMISSION_PASS};

	if (!over || over->backend == backend || (over->flags & ADMISSION_PASS))
		return;
	if (a->family == AF_INET && wild->family == AF_INET6 && (over->flags & ADMISSION_V6ONLY))
		return;
	pass.backend = over->backend;
	/* -EEXIST is as good: somebody has said already what is to happen here. */
	if (bpf_map_update_elem(&admissions, a, &pass, BPF_NOEXIST) == -7 /* E2BIG */)
		failed(ERROR_ADMISSIONS_FULL);
}

static __always_inline void shadow(const struct address *a, __u64 backend)
{
	struct address wild = {
		.netns = a->netns,
		.port = a->port,
		.proto = IPPROTO_TCP,
		.family = AF_INET,
	};

	if (a->family == AF_INET && !any(a))
		shade(a, &wild, backend);
	wild.family = AF_INET6;
	if (a->family == AF_INET || !any(a))
		shade(a, &wild, backend);
}

/*
 * Makes a socket that begins to listen one of a backend's listeners. Idempotent: of several callers
 * the one that wins the swap counts it. storage is sk in the form that this hook's helpers take.
 */
static __always_inline bool tag_listener(struct sock *sk, void *storage, __u64 cookie,
					 const struct address *a, __u64 backend, __u64 gen,
					 __u8 flags, __u8 how, const bool atomic)
{
	struct count fresh = {
		.addr = *a,
		.backend = backend,
		.gen = gen,
		.listening = 1,
	};
	struct tag init = {
		.backend = backend,
		.gen = gen,
		.cookie = cookie,
		.how = how,
	};
	struct alive none = {}, *l;
	struct count *c;
	struct tag *t;

	if (BPF_CORE_READ_BITFIELD_PROBED(sk, __sk_common.skc_ipv6only))
		flags |= LISTENER_V6ONLY;
	if (bpf_core_field_exists(((struct tcp_sock *)0)->is_mptcp) &&
	    BPF_CORE_READ_BITFIELD_PROBED((struct tcp_sock *)sk, is_mptcp))
		flags |= LISTENER_MPTCP;
	fresh.flags = flags;
	init.flags = flags;

	/* The count comes before the tag: a child of the tagged listener must find it. */
	bpf_map_update_elem(&counts, &cookie, &fresh, BPF_NOEXIST);
	c = bpf_map_lookup_elem(&counts, &cookie);
	if (!c) {
		failed(ERROR_COUNTS_FULL);
		return false;
	}
	t = bpf_sk_storage_get(&tags, storage, &init, SK_STORAGE_CREATE);
	if (!t) {
		failed(ERROR_TAGS_NOMEM);
		bpf_map_delete_elem(&counts, &cookie);
		return false;
	}
	if (!swap(&t->st, TAG_NEW, TAG_LISTENER, atomic))
		return false;
	/* A socket that listens again, perhaps for another backend, goes on with its old count. */
	c->listening = 1;
	c->addr = *a;
	c->backend = backend;
	c->gen = gen;
	c->flags = flags;
	bpf_map_update_elem(&listeners, &backend, &none, BPF_NOEXIST);
	l = bpf_map_lookup_elem(&listeners, &backend);
	if (!l)
		failed(ERROR_LISTENERS_FULL);
	else if (flags & LISTENER_ASIDE)
		__sync_fetch_and_add(&l->aside, 1);
	else
		__sync_fetch_and_add(&l->live, 1);
	send(EVENT_LISTEN, backend, gen, cookie, 0);
	return true;
}

/*
 * A refusal ends with its backend's last listener. Whoever listens next is somebody else, also
 * where a watch on a port or a cgroup gives that one the same backend.
 */
static __always_inline void lift(__u64 backend, struct alive *l)
{
	struct backend *b = bpf_map_lookup_elem(&backends, &backend);

	if (!b || b->action != ACTION_REFUSE)
		return;
	if (*(volatile __s32 *)&l->live > 0)
		return;
	if ((b->flags & BACKEND_ASIDE) && *(volatile __s32 *)&l->aside > 0)
		return;
	b->action = ACTION_OPEN;
}

static __always_inline void listener_closed(struct tag *t, const bool atomic)
{
	__u64 backend = t->backend, cookie = t->cookie, live;
	struct count *c;
	struct alive *l;

	if (!swap(&t->st, TAG_LISTENER, TAG_DONE, atomic))
		return;
	/* Without a count its backend was removed, and who has its id now has other listeners. */
	c = bpf_map_lookup_elem(&counts, &cookie);
	if (!c)
		return;
	c->listening = 0;
	live = *(volatile __u64 *)&c->live;
	l = bpf_map_lookup_elem(&listeners, &backend);
	if (l && (t->flags & LISTENER_ASIDE))
		__sync_fetch_and_add(&l->aside, -1);
	else if (l)
		__sync_fetch_and_add(&l->live, -1);
	if (l)
		lift(backend, l);
	send(EVENT_CLOSED, backend, t->gen, cookie, live);
}

#endif /* EBB_CENSUS_H */

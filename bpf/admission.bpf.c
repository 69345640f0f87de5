//go:build ignore
// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
/*
 * What happens to a SYN. Runs when the kernel looks for a listener, hence never for a connection
 * that exists. Every doubt ends in SK_PASS, the ordinary look-up: this program fails towards
 * admitting.
 */
#include "maps.h"

char _license[] SEC("license") = "GPL";

/* The namespace it is attached to: sk_lookup has no helper that tells. */
volatile const __u64 netns_id = 0;

static __always_inline struct admission *find(struct bpf_sk_lookup *ctx)
{
	struct address key = {
		.netns = netns_id,
		.port = ctx->local_port,
		.proto = IPPROTO_TCP,
	};
	__u32 *addr = (__u32 *)key.addr;
	struct admission *a;

	/* In the order in which the kernel prefers listeners: exact, wildcard of the same family,
	 * ::. */
	if (ctx->family == AF_INET) {
		key.family = AF_INET;
		addr[0] = ctx->local_ip4;
		a = bpf_map_lookup_elem(&admissions, &key);
		if (a)
			return a;
		addr[0] = 0;
		a = bpf_map_lookup_elem(&admissions, &key);
		if (a)
			return a;
		key.family = AF_INET6;
		a = bpf_map_lookup_elem(&admissions, &key);
		if (a && (a->flags & ADMISSION_V6ONLY))
			return NULL;
		return a;
	}
	key.family = AF_INET6;
	addr[0] = ctx->local_ip6[0];
	addr[1] = ctx->local_ip6[1];
	addr[2] = ctx->local_ip6[2];
	addr[3] = ctx->local_ip6[3];
	a = bpf_map_lookup_elem(&admissions, &key);
	if (a)
		return a;
	addr[0] = addr[1] = addr[2] = addr[3] = 0;
	return bpf_map_lookup_elem(&admissions, &key);
}

static __always_inline __u32 mix(__u32 h, __u32 v)
{
	h ^= v;
	h *= 0x9e3779b1; /* 2^32 / golden ratio */
	return h ^ (h >> 15);
}

/* The same client address and port always starts at the same target, so a retransmitted SYN stays.
 */
static __always_inline __u32 hash(struct bpf_sk_lookup *ctx)
{
	__u32 h = mix(ctx->remote_port, ctx->local_port);

	if (ctx->family == AF_INET) {
		h = mix(h, ctx->remote_ip4);
		return mix(h, ctx->local_ip4);
	}
	h = mix(h, ctx->remote_ip6[0]);
	h = mix(h, ctx->remote_ip6[1]);
	h = mix(h, ctx->remote_ip6[2]);
	h = mix(h, ctx->remote_ip6[3]);
	return mix(h, ctx->local_ip6[3]);
}

/* True when a live target took the connection. */
static __always_inline bool assign(struct bpf_sk_lookup *ctx, struct admission *a)
{
	__u32 n = a->ntargets, at;

	if (n == 0 || n > MAX_TARGETS)
		return false;
	at = hash(ctx) % n;
	for (int i = 0; i < MAX_TARGETS; i++) {
		struct bpf_sock *sk;
		__u64 cookie;
		long err;

		if (i >= n)
			break;
		/* A remainder and no branch: the verifier would follow both sides of each. */
		cookie = a->targets[(at + i) % n & (MAX_TARGETS - 1)];
		sk = bpf_map_lookup_elem(&targets, &cookie);
		if (!sk)
			continue; /* closed: the kernel took it out of the map */
		/*
		 * REPLACE: another program may have chosen before us. NO_GROUP: without it the
		 * kernel hashes again among the reuseport siblings of the target, which may be
		 * the very listeners that are draining.
		 */
		err = bpf_sk_assign(ctx, (void *)sk, SK_LOOKUP_REPLACE | SK_LOOKUP_NO_GROUP);
		bpf_sk_release((void *)sk);
		if (!err)
			return true;
	}
	return false;
}

/*
 * True for a connection of the backend's owner, whose relay stands in front of this very address
 * and must reach what is behind it. Both are needed: a port alone is anybody's to choose, and an
 * address of this host alone is every local client's. From outside neither address can come: the
 * answer to a forged one stays here.
 */
static __always_inline bool bypasses(struct bpf_sk_lookup *ctx, struct backend *b)
{
	__u16 port = bpf_ntohs(ctx->remote_port);

	if (b->bypass_hi == 0 || port < b->bypass_lo || port > b->bypass_hi)
		return false;
	if (ctx->family == AF_INET)
		return ctx->remote_ip4 == ctx->local_ip4 ||
		       (ctx->remote_ip4 & bpf_htonl(0xff000000)) == bpf_htonl(0x7f000000);
	if (!(ctx->remote_ip6[0] | ctx->remote_ip6[1] | ctx->remote_ip6[2]) &&
	    ctx->remote_ip6[3] == bpf_htonl(1))
		return true;
	return ctx->remote_ip6[0] == ctx->local_ip6[0] && ctx->remote_ip6[1] == ctx->local_ip6[1] &&
	       ctx->remote_ip6[2] == ctx->local_ip6[2] && ctx->remote_ip6[3] == ctx->local_ip6[3];
}

SEC("sk_lookup")
int admission(struct bpf_sk_lookup *ctx)
{
	struct admission *a;
	struct backend *b;
	struct alive *l;
	__u32 zero = 0, *control_word;
	bool enforced;
	__u64 id;

	if (ctx->protocol != IPPROTO_TCP)
		return SK_PASS;
	a = find(ctx);
	if (!a)
		return SK_PASS;
	if (a->flags & ADMISSION_PASS)
		return SK_PASS; /* another process's listener under somebody's wildcard */
	control_word = bpf_map_lookup_elem(&control, &zero);
	enforced = control_word && *control_word != 0; /* else the kill switch: all are open */
	id = a->backend;
	b = bpf_map_lookup_elem(&backends, &id);
	if (!b || b->mode != MODE_ENFORCE)
		return SK_PASS;
	if (b->action == ACTION_OPEN) {
		if (!(b->flags & BACKEND_STANDBY))
			assign(ctx, a); /* a service's address, on which nobody else may listen */
		return SK_PASS;
	}
	if (!enforced)
		return SK_PASS;
	if (bpf_ktime_get_boot_ns() >= b->until)
		return SK_PASS; /* no closed admission outlives its drain */
	if (bypasses(ctx, b))
		return SK_PASS; /* the relay's way to the backend itself */
	if (b->action == ACTION_STEER) {
		if (!assign(ctx, a))
			return SK_PASS; /* no target left: the ordinary look-up */
		l = bpf_map_lookup_elem(&listeners, &id);
		if (l)
			__sync_fetch_and_add(&l->steered, 1);
		return SK_PASS;
	}
	if (b->action != ACTION_REFUSE)
		return SK_PASS;
	l = bpf_map_lookup_elem(&listeners, &id);
	if (!l)
		return SK_PASS;
	if (l->live > 0 || ((b->flags & BACKEND_ASIDE) && l->aside > 0)) {
		__sync_fetch_and_add(&l->refused, 1);
		return SK_DROP; /* for TCP an immediate RST, before any byte reached the backend */
	}
	return SK_PASS; /* its last listener is closed: whoever listens now is somebody else */
}

//go:build ignore
// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
/*
 * Readers that walk the open files of one process, and the tasks. They touch only sockets that a
 * process holds, so neither the established table nor a request socket is ever walked.
 *
 * Each runs once per read() of its iterator; a record that did not fit is shown again, so a program
 * may run twice for one file and must not mind.
 */
#include "census.h"

char _license[] SEC("license") = "GPL";

/* Keep the types in the object, for the Go side. */
const struct file_record *file_record_layout __attribute__((unused));
const struct task_record *task_record_layout __attribute__((unused));

/* [0]: what the walk is for. Private to the process that loaded the reader. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct walk_order);
} walk SEC(".maps");

/* [0]: what the walk did. Private. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct walk_result);
} walked SEC(".maps");

/* namespace and port → tag for connections to adopt. Private. Full: the adoption is refused. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__type(key, struct port_key);
	__type(value, struct tag);
} adopting SEC(".maps");

/* cookie → anything: what a walk is limited to. Private. Full: the order is refused. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u64);
	__type(value, __u32);
} chosen SEC(".maps");

/* The TCP or MPTCP socket behind a file, and its protocol. */
static __always_inline struct sock *socket_of(struct file *file, __u16 *protocol)
{
	struct socket *sock = bpf_sock_from_file(file);
	struct sock *sk;
	__u16 family;

	if (!sock)
		return NULL;
	sk = sock->sk;
	if (!sk)
		return NULL;
	*protocol = sk->sk_protocol;
	family = sk->__sk_common.skc_family;
	if (family != AF_INET && family != AF_INET6)
		return NULL;
	if (*protocol != IPPROTO_TCP && *protocol != IPPROTO_MPTCP)
		return NULL;
	return sk;
}

#define MAX_STORAGES 16

/*
 * The tag of an MPTCP socket's first subflow. No helper takes a subflow that was found through its
 * MPTCP socket, since the verifier does not know its type; so the storage is read like any memory.
 */
static __always_inline bool subflow_tag(struct sock *sk, const struct walk_order *w,
					struct tag *out)
{
	struct bpf_local_storage_elem *e = NULL;
	struct hlist_node *n;

	if (!bpf_core_field_exists(sk->sk_bpf_storage) ||
	    !bpf_core_field_exists(((struct bpf_local_storage *)0)->list) ||
	    !bpf_core_field_exists(e->snode) || !bpf_core_field_exists(e->sdata.smap))
		return false;
	n = BPF_CORE_READ(sk, sk_bpf_storage, list.first);
	for (int i = 0; i < MAX_STORAGES && n; i++) {
		e = (void *)n - bpf_core_field_offset(struct bpf_local_storage_elem, snode);
		if (BPF_CORE_READ(e, sdata.smap, map.id) == w->tags)
			return !bpf_core_read(out, sizeof(*out), &e->sdata.data);
		n = BPF_CORE_READ(n, next);
	}
	return false;
}

SEC("iter/task_file")
int files(struct bpf_iter__task_file *ctx)
{
	struct task_struct *task = ctx->task;
	struct file *file = ctx->file;
	struct file_record r = {};
	struct in6_addr v6 = {};
	__u32 zero = 0, fd = ctx->fd;
	struct tcp_sock *tp;
	struct walk_order *w;
	struct sock *sk;
	struct tag *t;
	__u8 family;

	if (!task || !file)
		return 0;
	r.tgid = task->tgid;
	w = bpf_map_lookup_elem(&walk, &zero);
	if (!w || (w->tgid && w->tgid != r.tgid))
		return 0;
	sk = socket_of(file, &r.protocol);
	if (!sk)
		return 0;
	if (r.protocol == IPPROTO_MPTCP) {
		/* The subflow is a plain address to the verifier: it can be read, not passed on. */
		if (!bpf_core_type_exists(struct mptcp_sock))
			return 0;
		sk = BPF_CORE_READ((struct mptcp_sock *)sk, first);
		if (!sk)
			return 0;
		r.cookie = BPF_CORE_READ(sk, __sk_common.skc_cookie.counter);
		r.tagged = subflow_tag(sk, w, &r.tag);
	} else {
		t = bpf_sk_storage_get(&tags, sk, NULL, 0);
		if (t) {
			r.tagged = 1;
			r.tag = *t;
		}
		r.cookie = bpf_get_socket_cookie(sk);
	}
	r.fd = fd;
	r.inode = BPF_CORE_READ(file, f_inode, i_ino);
	local_address(sk, &r.local);
	r.state = BPF_CORE_READ(sk, __sk_common.skc_state);
	r.shutdown = BPF_CORE_READ_BITFIELD_PROBED(sk, sk_shutdown);
	r.v6only = BPF_CORE_READ_BITFIELD_PROBED(sk, __sk_common.skc_ipv6only);
	r.remote_port = bpf_ntohs(BPF_CORE_READ(sk, __sk_common.skc_dport));
	family = BPF_CORE_READ(sk, __sk_common.skc_family);
	if (family == AF_INET6)
		BPF_CORE_READ_INTO(&v6, sk, __sk_common.skc_v6_daddr);
	set_address(sk, family, &v6, BPF_CORE_READ(sk, __sk_common.skc_daddr), r.remote, &family);

	tp = (struct tcp_sock *)sk;
	r.now = bpf_jiffies64();
	/*
	 * Nothing holds the socket still. The counters come first: data that arrives between them
	 * and the clocks makes them older than the truth, so whoever compares them later sees that
	 * something came.
	 */
	r.data_segs_in = BPF_CORE_READ(tp, data_segs_in);
	r.bytes_received = BPF_CORE_READ(tp, bytes_received);
	r.lsndtime = BPF_CORE_READ(tp, lsndtime);
	r.lrcvtime = BPF_CORE_READ(tp, inet_conn.icsk_ack.lrcvtime);
	r.rcv_tstamp = BPF_CORE_READ(tp, rcv_tstamp);
	r.rcv_nxt = BPF_CORE_READ(tp, rcv_nxt);
	r.copied_seq = BPF_CORE_READ(tp, copied_seq);
	r.snd_una = BPF_CORE_READ(tp, snd_una);
	r.snd_nxt = BPF_CORE_READ(tp, snd_nxt);
	r.write_seq = BPF_CORE_READ(tp, write_seq);
	r.snd_wl1 = BPF_CORE_READ(tp, snd_wl1);
	r.snd_wnd = BPF_CORE_READ(tp, snd_wnd);
	r.rcv_wup = BPF_CORE_READ(tp, rcv_wup);
	r.data_segs_out = BPF_CORE_READ(tp, data_segs_out);
	r.bytes_acked = BPF_CORE_READ(tp, bytes_acked);
	r.bytes_sent = BPF_CORE_READ(tp, bytes_sent);
	r.ack_backlog = BPF_CORE_READ(sk, sk_ack_backlog);
	r.max_ack_backlog = BPF_CORE_READ(sk, sk_max_ack_backlog);
	bpf_seq_write(ctx->meta->seq, &r, sizeof(r));
	return 0;
}

static __always_inline void listen_in(struct sock *sk, __u64 cookie, const struct address *a,
				      __u64 backend, __u64 gen, __u8 flags,
				      struct walk_result *done)
{
	struct tag *t;

	if (!tag_listener(sk, sk, cookie, a, backend, gen, flags, BY_ADOPT, true))
		return;
	done->listeners++;
	if (BPF_CORE_READ(sk, __sk_common.skc_state) != TCP_LISTEN) {
		t = bpf_sk_storage_get(&tags, sk, NULL, 0);
		if (t)
			listener_closed(t, true);
	}
}

/* Whose listeners a backend's open ones are changes by n. */
static __always_inline void count_alive(__u64 backend, __u8 flags, __s32 n)
{
	struct alive none = {}, *l;

	if (n > 0)
		bpf_map_update_elem(&listeners, &backend, &none, BPF_NOEXIST);
	l = bpf_map_lookup_elem(&listeners, &backend);
	if (!l && n > 0)
		failed(ERROR_LISTENERS_FULL);
	else if (l && (flags & LISTENER_ASIDE))
		__sync_fetch_and_add(&l->aside, n);
	else if (l)
		__sync_fetch_and_add(&l->live, n);
}

/* Takes a listener that another backend has left, with its count as it is. */
static __always_inline bool take_listener(struct tag *t, const struct watch_rule *to, __u8 flags)
{
	__u64 cookie = t->cookie;
	struct count *c = bpf_map_lookup_elem(&counts, &cookie);

	if (!c || t->st != TAG_LISTENER)
		return false;
	flags |= t->flags & ~LISTENER_ASIDE;
	t->flags = c->flags = flags;
	t->gen = c->gen = to->gen;
	t->backend = c->backend = to->backend;
	count_alive(to->backend, flags, 1);
	return true;
}

/*
 * A connection goes with its count to whom that belongs. One whose listener has closed and that was
 * left goes to whoever wants its address.
 */
static __always_inline void follow_count(struct tag *t, const struct watch_rule *to)
{
	__u64 cookie = t->cookie;
	struct count *c = bpf_map_lookup_elem(&counts, &cookie);
	__u8 flags = 0;

	if (!c)
		return;
	if (!c->backend && wanted(to, &c->addr, &flags)) {
		c->gen = to->gen;
		c->backend = to->backend;
	}
	if (c->backend == to->backend) {
		t->gen = to->gen;
		t->backend = to->backend;
	}
}

/* Counts a connection that has no tag as init says, or catches up with one that has. */
static __always_inline void take_in(struct sock *sk, struct tag *t, struct tag *init,
				    const struct walk_order *w, struct walk_result *done)
{
	__u64 cookie, since = init->since;
	struct count *c;
	__u32 want;

	if (!t) {
		want = tag_state(BPF_CORE_READ(sk, __sk_common.skc_state));
		if (want == TAG_NEW || want == TAG_DONE)
			return;
		init->st = TAG_NEW;
		t = bpf_sk_storage_get(&tags, sk, init, SK_STORAGE_CREATE);
		if (!t) {
			failed(ERROR_TAGS_NOMEM);
			return;
		}
		want = tag_state(BPF_CORE_READ(sk, __sk_common.skc_state));
		if (step(t, want, BY_ADOPT, true)) {
			done->conns++;
			if (since)
				t->since = since;
		}
	}
	/* Whoever tagged it: a state that no hook has shown is caught up with here. */
	want = tag_state(BPF_CORE_READ(sk, __sk_common.skc_state));
	if (t->backend != w->target.backend || t->st >= want)
		return;
	if (t->st >= TAG_OPEN) {
		done->healed++;
		cookie = t->cookie;
		c = bpf_map_lookup_elem(&counts, &cookie);
		if (c)
			__sync_fetch_and_add(&c->healed, 1);
		step(t, want, BY_ADOPT, true);
	} else if (step(t, want, BY_ADOPT, true)) {
		done->conns++;
	}
}

/*
 * Takes in what existed before the hooks were attached. They run beside it on other CPUs:
 *  - a hook that closes a socket between our tag and our look leaves DONE, and our step fails;
 *  - the hooks run before the state is stored, so one that came just before our tag is seen by
 *    looking again, in this walk or the next one; the file is held, so its owner cannot close it.
 * sock_ops' flag is not armed here: setting a socket option needs the socket's lock. The tracepoint
 * and the next callback of another kind drive an adopted socket.
 */
SEC("iter/task_file")
int adopt(struct bpf_iter__task_file *ctx)
{
	struct task_struct *task = ctx->task;
	struct file *file = ctx->file;
	struct tag init = {}, *to, *t;
	struct port_key key = {};
	struct address a = {};
	__u32 zero = 0, tgid;
	struct walk_result *done;
	struct walk_order *w;
	struct sock *sk;
	__u16 protocol;
	__u8 flags = 0, st;

	if (!task || !file)
		return 0;
	tgid = task->tgid;
	w = bpf_map_lookup_elem(&walk, &zero);
	done = bpf_map_lookup_elem(&walked, &zero);
	if (!w || !done || (w->tgid && w->tgid != tgid))
		return 0;
	sk = socket_of(file, &protocol);
	if (!sk)
		return 0;
	if (protocol == IPPROTO_MPTCP) {
		if (w->conns || !bpf_core_type_exists(struct mptcp_sock))
			return 0;
		sk = BPF_CORE_READ((struct mptcp_sock *)sk, first);
		if (!sk)
			return 0;
		if (subflow_tag(sk, w, &init) && bpf_map_lookup_elem(&counts, &init.cookie))
			return 0;
		local_address(sk, &a);
		if (BPF_CORE_READ(sk, __sk_common.skc_state) == TCP_LISTEN && a.port &&
		    wanted(&w->target, &a, &flags))
			done->mptcp++;
		return 0;
	}
	st = BPF_CORE_READ(sk, __sk_common.skc_state);
	local_address(sk, &a);
	t = bpf_sk_storage_get(&tags, sk, NULL, 0);

	if (!w->conns) {
		if (st != TCP_LISTEN || a.port == 0 || (t && t->backend))
			return 0;
		if (!wanted(&w->target, &a, &flags))
			return 0;
		if (t) {
			if (take_listener(t, &w->target, flags))
				done->listeners++;
			return 0;
		}
		listen_in(sk, bpf_get_socket_cookie(sk), &a, w->target.backend, w->target.gen,
			  flags, done);
		return 0;
	}

	if (st == TCP_LISTEN)
		return 0;
	if (t && t->backend != w->target.backend)
		follow_count(t, &w->target);
	if (!t) {
		key.netns = a.netns;
		key.port = a.port;
		to = bpf_map_lookup_elem(&adopting, &key);
		if (!to)
			return 0;
		init.backend = to->backend;
		init.gen = to->gen;
		init.cookie = to->cookie;
		init.flags = to->flags;
	}
	take_in(sk, t, &init, w, done);
	return 0;
}

/*
 * The tags of another layout. A layout may add to a tag and never moves what is in it, so it begins
 * like ours.
 */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC | BPF_F_CLONE);
	__type(key, int);
	__type(value, struct tag);
} tags_before SEC(".maps");

/*
 * Takes in what a backend's processes have open and another layout counts: the same listeners, and
 * each connection with the listener that it came by, whatever its port. Both layouts' hooks run
 * meanwhile; otherwise it is as adopt.
 */
SEC("iter/task_file")
int inherit(struct bpf_iter__task_file *ctx)
{
	struct task_struct *task = ctx->task;
	struct file *file = ctx->file;
	struct tag init = {}, *t, *before;
	struct walk_result *done;
	struct address a = {};
	__u32 zero = 0, tgid;
	struct walk_order *w;
	struct sock *sk;
	__u64 cookie;
	__u16 protocol;
	__u8 st;

	if (!task || !file)
		return 0;
	tgid = task->tgid;
	w = bpf_map_lookup_elem(&walk, &zero);
	done = bpf_map_lookup_elem(&walked, &zero);
	if (!w || !done || (w->tgid && w->tgid != tgid))
		return 0;
	sk = socket_of(file, &protocol);
	if (!sk || protocol != IPPROTO_TCP)
		return 0;
	before = bpf_sk_storage_get(&tags_before, sk, NULL, 0);
	if (!before || before->backend != w->target.backend)
		return 0;
	st = BPF_CORE_READ(sk, __sk_common.skc_state);
	t = bpf_sk_storage_get(&tags, sk, NULL, 0);
	if (w->conns) {
		if (st == TCP_LISTEN)
			return 0;
		if (!t && before->st == TAG_DONE)
			return 0; /* nobody counts it */
		init = *before;
		take_in(sk, t, &init, w, done);
		return 0;
	}
	cookie = bpf_get_socket_cookie(sk);
	if (st != TCP_LISTEN || t || before->st != TAG_LISTENER || before->cookie != cookie)
		return 0;
	local_address(sk, &a);
	listen_in(sk, cookie, &a, before->backend, before->gen, before->flags, done);
	return 0;
}

/* The context of iter/sockmap. */
SEC("iter/sockmap")
int copy_targets(struct bpf_iter__sockmap *ctx)
{
	__u64 *key = ctx->key, cookie;
	struct sock *sk = ctx->sk;

	if (!key || !sk)
		return 0;
	cookie = *key;
	if (bpf_map_lookup_elem(&chosen, &cookie))
		bpf_map_update_elem(&targets, &cookie, sk, BPF_NOEXIST);
	return 0;
}

/*
 * Takes connections out of their backend's count, as if they had closed: somebody else has taken
 * them out of the accept queue and serves them. The step comes before the tag goes, so that a hook
 * that runs meanwhile finds DONE or nothing.
 */
SEC("iter/task_file")
int disown(struct bpf_iter__task_file *ctx)
{
	struct task_struct *task = ctx->task;
	struct file *file = ctx->file;
	struct walk_result *done;
	__u32 zero = 0, tgid;
	struct walk_order *w;
	struct sock *sk;
	struct tag *t;
	__u64 cookie;
	__u16 protocol;

	if (!task || !file)
		return 0;
	tgid = task->tgid;
	w = bpf_map_lookup_elem(&walk, &zero);
	done = bpf_map_lookup_elem(&walked, &zero);
	if (!w || !done || (w->tgid && w->tgid != tgid))
		return 0;
	sk = socket_of(file, &protocol);
	if (!sk || protocol != IPPROTO_TCP || sk->__sk_common.skc_state == TCP_LISTEN)
		return 0;
	cookie = bpf_get_socket_cookie(sk);
	if (!bpf_map_lookup_elem(&chosen, &cookie))
		return 0;
	t = bpf_sk_storage_get(&tags, sk, NULL, 0);
	if (!t)
		return 0;
	step(t, TAG_DONE, BY_ADOPT, true);
	bpf_sk_storage_delete(&tags, sk);
	done->conns++;
	return 0;
}

/*
 * Leaves what a backend's processes have open to whoever adopts it next: it goes on being counted,
 * for nobody. What waits in an accept queue has no file, and is taken by its count.
 */
SEC("iter/task_file")
int leave(struct bpf_iter__task_file *ctx)
{
	struct task_struct *task = ctx->task;
	struct file *file = ctx->file;
	struct walk_result *done;
	__u32 zero = 0, tgid;
	struct walk_order *w;
	struct count *c;
	struct sock *sk;
	struct tag *t;
	__u64 cookie;
	__u16 protocol;

	if (!task || !file)
		return 0;
	tgid = task->tgid;
	w = bpf_map_lookup_elem(&walk, &zero);
	done = bpf_map_lookup_elem(&walked, &zero);
	if (!w || !done || (w->tgid && w->tgid != tgid))
		return 0;
	sk = socket_of(file, &protocol);
	if (!sk || protocol != IPPROTO_TCP)
		return 0;
	t = bpf_sk_storage_get(&tags, sk, NULL, 0);
	if (!t || t->backend != w->target.backend)
		return 0;
	cookie = t->cookie;
	c = bpf_map_lookup_elem(&counts, &cookie);
	if (!c)
		return 0;
	if (t->st == TAG_LISTENER) {
		count_alive(t->backend, t->flags, -1);
		done->listeners++;
	} else {
		done->conns++;
	}
	c->backend = 0;
	t->backend = 0;
	return 0;
}

/* [0]: what is to be corrected. Private. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct count_correction);
} correction SEC(".maps");

/*
 * Corrects a count after an audit. Only the kernel writes counts: an update from user space would
 * undo what the hooks add meanwhile. Runs for any task, and does it once.
 */
SEC("iter/task")
int correct(struct bpf_iter__task *ctx)
{
	__u32 zero = 0;
	struct count_correction *r = bpf_map_lookup_elem(&correction, &zero);
	struct count *c;
	__u64 cookie;

	if (!r || !r->cookie)
		return 0;
	cookie = r->cookie;
	c = bpf_map_lookup_elem(&counts, &cookie);
	if (!c || c->total != r->total || c->closed != r->closed)
		return 0;
	__sync_fetch_and_add(&c->live, r->live);
	__sync_fetch_and_add(&c->closing, r->closing);
	__sync_fetch_and_add(&c->healed, 1);
	r->cookie = 0;
	return 0;
}

/* For each process of the reader's pid namespace: its global id, its start, and whether it reads.
 */
SEC("iter/task")
int tasks(struct bpf_iter__task *ctx)
{
	struct task_struct *self = (void *)bpf_get_current_task(), *task = ctx->task;
	struct task_record r = {};
	struct pid *pid;
	__u32 level;

	if (!task || task->pid != task->tgid)
		return 0;
	r.tgid = task->tgid;
	r.start = BPF_CORE_READ(task, start_boottime);
	r.self = r.tgid == BPF_CORE_READ(self, tgid);
	level = BPF_CORE_READ(self, thread_pid, level);
	pid = BPF_CORE_READ(task, thread_pid);
	bpf_probe_read_kernel(&r.local, sizeof(r.local),
			      (void *)pid + bpf_core_field_offset(struct pid, numbers) +
				      level * bpf_core_type_size(struct upid) +
				      bpf_core_field_offset(struct upid, nr));
	bpf_seq_write(ctx->meta->seq, &r, sizeof(r));
	return 0;
}

/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * What the programs share: the context and kernel structures of which they read a field, and the
 * structures that cross into user space. The latter have fixed widths and explicit padding; the Go
 * side uses the types generated from them.
 *
 * Nothing here includes a kernel header, so that the objects are the same on every machine that
 * generates them.
 */
#ifndef EBB_H
#define EBB_H

typedef unsigned char __u8;
typedef unsigned short __u16;
typedef unsigned int __u32;
typedef unsigned long long __u64;
typedef signed int __s32;
typedef signed long long __s64;
typedef __u16 __be16;
typedef __u32 __be32;
typedef __u32 __wsum;
typedef _Bool bool;
#define true  1
#define false 0
#define NULL  ((void *)0)

enum bpf_map_type {
	BPF_MAP_TYPE_HASH = 1,
	BPF_MAP_TYPE_ARRAY = 2,
	BPF_MAP_TYPE_HASH_OF_MAPS = 13,
	BPF_MAP_TYPE_SOCKHASH = 18,
	BPF_MAP_TYPE_SK_STORAGE = 24,
	BPF_MAP_TYPE_RINGBUF = 27,
};

#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>

#define BPF_ANY		   0
#define BPF_NOEXIST	   1
#define BPF_F_NO_PREALLOC  1
#define BPF_F_CLONE	   (1U << 9)
#define SK_STORAGE_CREATE  1
#define SK_LOOKUP_REPLACE  1
#define SK_LOOKUP_NO_GROUP 2

#define SK_DROP 0
#define SK_PASS 1

#define AF_INET	      2
#define AF_INET6      10
#define IPPROTO_TCP   6
#define IPPROTO_MPTCP 262

/* include/net/tcp_states.h */
enum tcp_state {
	TCP_ESTABLISHED = 1,
	TCP_SYN_SENT = 2,
	TCP_SYN_RECV = 3,
	TCP_FIN_WAIT1 = 4,
	TCP_FIN_WAIT2 = 5,
	TCP_TIME_WAIT = 6,
	TCP_CLOSE = 7,
	TCP_CLOSE_WAIT = 8,
	TCP_LAST_ACK = 9,
	TCP_LISTEN = 10,
	TCP_CLOSING = 11,
};

/* include/uapi/linux/bpf.h */
#define SOCK_OPS_PASSIVE_ESTABLISHED 5
#define SOCK_OPS_NEEDS_ECN	     6
#define SOCK_OPS_STATE		     10
#define SOCK_OPS_LISTEN		     11
#define SOCK_OPS_STATE_FLAG	     (1U << 2)

/* The contexts of sk_lookup and sock_ops as user space sees them; the verifier rewrites the
 * accesses. */
struct bpf_sk_lookup {
	__u64 sk;
	__u32 family;
	__u32 protocol;
	__u32 remote_ip4;
	__u32 remote_ip6[4];
	__be16 remote_port;
	__u16 : 16;
	__u32 local_ip4;
	__u32 local_ip6[4];
	__u32 local_port; /* host order */
};

struct bpf_sock {
	__u32 bound_dev_if;
	__u32 family;
};

struct bpf_sock_ops {
	__u32 op;
	__u32 args[4];
	__u32 family;
	__u32 remote_ip4;
	__u32 local_ip4;
	__u32 remote_ip6[4];
	__u32 local_ip6[4];
	__u32 remote_port;
	__u32 local_port;
	__u32 is_fullsock;
	__u32 snd_cwnd;
	__u32 srtt_us;
	__u32 bpf_sock_ops_cb_flags;
	__u32 state;
	__u32 rtt_min;
	__u32 snd_ssthresh;
	__u32 rcv_nxt;
	__u32 snd_nxt;
	__u32 snd_una;
	__u32 mss_cache;
	__u32 ecn_flags;
	__u32 rate_delivered;
	__u32 rate_interval_us;
	__u32 packets_out;
	__u32 retrans_out;
	__u32 total_retrans;
	__u32 segs_in;
	__u32 data_segs_in;
	__u32 segs_out;
	__u32 data_segs_out;
	__u32 lost_out;
	__u32 sacked_out;
	__u32 sk_txhash;
	__u64 bytes_received;
	__u64 bytes_acked;
	struct bpf_sock *sk;
};

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct ns_common {
	unsigned int inum;
};

struct net {
	__u64 net_cookie; /* 5.12; an atomic64_t of the same size before */
	struct ns_common ns;
};

typedef struct {
	struct net *net;
} possible_net_t;

struct in6_addr {
	union {
		__u8 u6_addr8[16];
		__be32 u6_addr32[4];
	} in6_u;
};

struct sock_common {
	__be32 skc_daddr;
	__be32 skc_rcv_saddr;
	__be16 skc_dport;
	__u16 skc_num;
	unsigned short skc_family;
	volatile unsigned char skc_state;
	unsigned char skc_ipv6only : 1;
	possible_net_t skc_net;
	struct in6_addr skc_v6_daddr;
	struct in6_addr skc_v6_rcv_saddr;
	struct {
		__s64 counter;
	} skc_cookie;
};

struct bpf_map {
	__u32 id;
};

struct bpf_local_storage_map {
	struct bpf_map map;
};

struct bpf_local_storage_data {
	struct bpf_local_storage_map *smap;
	__u8 data[1];
};

struct hlist_node {
	struct hlist_node *next;
};

struct hlist_head {
	struct hlist_node *first;
};

struct bpf_local_storage_elem {
	struct hlist_node snode;
	struct bpf_local_storage_data sdata;
};

struct bpf_local_storage {
	struct hlist_head list;
};

struct sock {
	struct sock_common __sk_common;
	struct bpf_local_storage *sk_bpf_storage;
	__u16 sk_protocol;
	__u8 sk_shutdown;
	__u32 sk_ack_backlog;
	__u32 sk_max_ack_backlog;
};

struct inet_connection_sock {
	struct {
		__u32 lrcvtime;
	} icsk_ack;
};

struct tcp_sock {
	struct inet_connection_sock inet_conn;
	__u32 rcv_nxt;
	__u32 copied_seq;
	__u32 rcv_wup;
	__u32 snd_nxt;
	__u32 snd_una;
	__u32 snd_wl1;
	__u32 snd_wnd;
	__u32 write_seq;
	__u32 lsndtime;
	__u32 rcv_tstamp;
	__u32 data_segs_in;
	__u32 data_segs_out;
	__u64 bytes_received;
	__u64 bytes_acked;
	__u64 bytes_sent;
	bool is_mptcp;
};

struct mptcp_sock {
	struct sock *first;
};

struct socket {
	struct sock *sk;
};

struct inode {
	unsigned long i_ino;
};

struct file {
	struct inode *f_inode;
};

struct kernfs_node {
	__u64 id;
};

struct cgroup;

struct cgroup_subsys_state {
	struct cgroup *cgroup;
	struct cgroup_subsys_state *parent;
};

struct cgroup {
	struct cgroup_subsys_state self;
	struct kernfs_node *kn;
};

struct css_set {
	struct cgroup *dfl_cgrp;
};

struct upid {
	int nr;
};

struct pid {
	unsigned int level;
	struct upid numbers[1];
};

struct task_struct {
	int pid;
	int tgid;
	struct task_struct *real_parent;
	struct task_struct *group_leader;
	struct pid *thread_pid;
	__u64 start_boottime;
	struct css_set *cgroups;
};

struct seq_file;

struct bpf_iter_meta {
	struct seq_file *seq;
	__u64 session_id;
	__u64 seq_num;
};

struct bpf_iter__task {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
};

struct bpf_iter__task_file {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
	__u32 fd;
	struct file *file;
};

struct bpf_iter__sockmap {
	struct bpf_iter_meta *meta;
	struct bpf_map *map;
	void *key;
	struct sock *sk;
};

#pragma clang attribute pop

/* ---- what crosses into user space ---- */

/*
 * A listening address. A v4-mapped IPv6 address is stored as IPv4 (family AF_INET, the address in
 * the first four bytes, the rest zero), because the kernel finds such a listener in the same place.
 */
struct address {
	__u64 netns;
	__u8 addr[16];
	__u16 port; /* host order */
	__u8 family;
	__u8 proto;
	__u32 pad;
};

enum admission_flag {
	ADMISSION_PASS = 1,   /* leave this address alone: it is another process's */
	ADMISSION_V6ONLY = 2, /* a rule on :: that IPv4 packets do not see */
};

#define MAX_TARGETS 8

struct admission {
	__u64 backend;
	__u8 flags;
	__u8 ntargets;
	__u16 pad;
	__u32 pad2;
	__u64 targets[MAX_TARGETS]; /* cookies of listeners in the map targets */
};

enum action {
	ACTION_OPEN = 0,
	ACTION_STEER = 1,
	ACTION_REFUSE = 2,
};

enum mode {
	MODE_OFF = 0,
	MODE_ENFORCE = 1,
};

enum backend_flag {
	BACKEND_ASIDE = 1, /* listeners that were put aside keep a refusal alive too */
	BACKEND_STANDBY =
		2, /* targets are for steering only: an open admission leaves them alone */
};

struct backend {
	__u32 action;
	__u32 mode;
	__u64 gen;
	__u64 until; /* boot clock, ns */
	__u32 flags;
	/*
	 * Source ports, both inclusive, in host order: a connection from this host that comes from
	 * one of them is its owner's own, and neither steered nor refused. 0, 0: none.
	 */
	__u16 bypass_lo;
	__u16 bypass_hi;
};

struct alive {
	__s32 live;
	__s32 aside;
	__u64 refused; /* connections turned away so far */
	__u64 steered; /* connections sent to a target while steering, so far */
};

enum tag_state {
	TAG_NEW = 0,	  /* not counted yet */
	TAG_LISTENER = 1, /* a listener; in a socket cloned from it: not counted yet */
	TAG_OPEN = 2,	  /* ESTABLISHED, CLOSE_WAIT */
	TAG_ENDING = 3, /* FIN_WAIT1, CLOSING, LAST_ACK: our FIN is sent and not yet acknowledged */
	TAG_CLOSING = 4, /* FIN_WAIT2: our FIN and all before it is acknowledged */
	TAG_DONE = 5,
};

enum seen_by {
	BY_SOCKOPS = 1,
	BY_TRACING = 2,
	BY_ADOPT = 3,
};

enum listener_flag {
	LISTENER_ASIDE = 1,  /* on a loopback address that nobody asked for */
	LISTENER_MPTCP = 2,  /* the first subflow of an MPTCP listener: never in a socket map */
	LISTENER_V6ONLY = 4, /* IPV6_V6ONLY */
};

struct tag {
	__u64 backend;
	__u64 gen;
	__u64 cookie; /* the listener's */
	__u64 since;  /* boot clock in ns at which it was first counted; 0 for a listener */
	__u32 st;     /* enum tag_state; moves up only, by compare and swap */
	__u8 how;     /* enum seen_by: who counted it first */
	__u8 flags;   /* enum listener_flag, the listener's */
	__u16 pad;
};

struct count {
	struct address addr;
	__u64 backend;
	__u64 gen;
	__u32 listening;
	__u32 flags; /* enum listener_flag */
	/*
	 * open in the low half, ending in the high half: one word, so that a connection moves from
	 * one to the other in one step and "none left" is one load.
	 */
	__u64 live;
	__s64 closing;
	__u64 total;
	__u64 closed;
	__u64 by_sockops;
	__u64 by_tracing;
	__u64 by_adopt;
	__u64 healed; /* a callback flag found overwritten, or a state that no hook had shown */
};

enum watch_kind {
	WATCH_PROCESS = 1,
	WATCH_CGROUP = 2,
	WATCH_ADDRESS = 3,
	WATCH_PORT = 4, /* every address of a port: family and addr are zero */
};

struct watch_key {
	__u32 kind;
	__u32 pad;
	__u64 id;	     /* process: global tgid; cgroup: its id */
	struct address addr; /* address and port only */
};

enum watch_flag {
	WATCH_NOT_SELF =
		1, /* the process's own listeners are not the backend's, its children's are */
};

#define MAX_PORTS 16

struct watch_rule {
	__u64 backend;
	__u64 gen;
	__u64 start; /* process: start time on the boot clock in ns, against reuse of the tgid */
	__u32 flags;
	__u16 nonly;
	__u16 nexclude;
	__u16 only[MAX_PORTS];
	__u16 exclude[MAX_PORTS];
};

struct drain {
	__u64 gen;
	__u64 deadline; /* boot clock, ns */
	__u64 begun;	/* boot clock, ns */
	__u32 draining;
	__u32 pad;
};

enum event_type {
	EVENT_LISTEN = 1,
	EVENT_ZERO = 2,
	EVENT_CLOSED = 3,
	EVENT_SIGNAL = 4, /* the cookie is the signal's number */
};

struct event {
	__u32 type;
	__u32 pad;
	__u64 backend;
	__u64 gen;
	__u64 cookie; /* the listener's */
	__u64 time;   /* boot clock, ns */
	__s64 open;   /* open and ending of that listener as the sender saw them */
};

/* What happens when a watched process is sent one of its stop signals. */
struct early_rule {
	__u64 start;   /* of the process, boot clock, ns */
	__u64 signals; /* bit n is signal n + 1 */
	__u64 backend;
	__u64 span;	     /* ns for which the rule lasts */
	struct backend rule; /* without its end */
};

enum error_kind {
	ERROR_COUNTS_FULL = 0,
	ERROR_TAGS_NOMEM = 1,
	ERROR_RING_FULL = 2,
	ERROR_LISTENERS_FULL = 3,
	ERROR_ADMISSIONS_FULL = 4,
	ERROR_KINDS = 8,
};

enum meta_index {
	META_REVISION = 0, /* of the programs: an older binary leaves newer programs alone */
	META_DIGEST = 1,   /* of the objects */
	META_NETNS_BY = 2, /* 1: a namespace's id is its inode number, else its cookie */
	META_WORDS = 4,
};

/* What the reader of a process's files writes for each TCP socket. Times are jiffies, truncated. */
struct file_record {
	__u32 tgid; /* global */
	__s32 fd;
	__u64 inode;
	__u64 cookie;
	struct address local;
	__u8 remote[16];
	__u16 remote_port; /* host order */
	__u16 protocol;	   /* 6, or 262 for MPTCP, of which the first subflow is shown */
	__u8 state;
	__u8 shutdown;
	__u8 tagged;
	__u8 v6only;
	struct tag tag;
	__u32 now; /* jiffies */
	__u32 lsndtime;
	__u32 lrcvtime;
	__u32 rcv_tstamp;
	__u32 rcv_nxt;
	__u32 copied_seq;
	__u32 snd_una;
	__u32 snd_nxt;
	__u32 write_seq;
	__u32 snd_wl1;
	__u32 snd_wnd;
	__u32 rcv_wup;
	__u32 data_segs_in;
	__u32 data_segs_out;
	__u32 ack_backlog;
	__u32 max_ack_backlog;
	__u64 bytes_received;
	__u64 bytes_acked;
	__u64 bytes_sent;
};

struct task_record {
	__u32 tgid;  /* global */
	__u32 local; /* in the reader's pid namespace */
	__u64 start; /* boot clock, ns */
	__u32 self;  /* the reader itself */
	__u32 pad;
};

struct port_key {
	__u64 netns;
	__u16 port;
	__u16 pad;
	__u32 pad2;
};

struct walk_order {
	__u32 tgid;  /* 0: the iterator is already limited to one process */
	__u32 conns; /* 0: listeners, 1: connections */
	__u32 tags;  /* the id of the map tags */
	__u32 pad;
	struct watch_rule target;
};

struct walk_result {
	__u64 listeners;
	__u64 conns;
	__u64 healed;
	__u64 mptcp; /* files of MPTCP listeners without a tag: they cannot be adopted */
};

struct count_correction {
	__u64 cookie; /* the listener's; 0 once it is done */
	__u64 live;   /* added to count.live */
	__s64 closing;
	__u64 total; /* it is done only if these are still so */
	__u64 closed;
};

#endif /* EBB_H */

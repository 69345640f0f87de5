/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * The maps that are pinned and shared by all programs and owners of a host. Maps that a tracing
 * program writes are preallocated: before 6.1 it must not allocate.
 */
#ifndef EBB_MAPS_H
#define EBB_MAPS_H

#include "ebb.h"

/*
 * address → admission. Written by owners; by the kernel for pass entries, at LISTEN.
 * Full: the owner is told; a pass entry that cannot be made counts as ERROR_ADMISSIONS_FULL.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, struct address);
	__type(value, struct admission);
} admissions SEC(".maps");

/* backend id → backend. Written by its owner: one write is the flip. Full: the owner is told. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u64);
	__type(value, struct backend);
} backends SEC(".maps");

/*
 * backend id → how many of its listeners are open. Written by the kernel at LISTEN and CLOSE, and
 * at each connection that it turns away. Full: a refusal of that backend does nothing, since no
 * listener is known to be alive.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u64);
	__type(value, struct alive);
} listeners SEC(".maps");

/* [0]: 0 opens every admission of the host. Written by anyone privileged. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} control SEC(".maps");

/*
 * listener cookie → socket that may be steered to. Written by owners, NOEXIST only: replacing an
 * element races with the close of the old socket (CVE-2024-56664). The kernel removes closed ones.
 */
struct {
	__uint(type, BPF_MAP_TYPE_SOCKHASH);
	__uint(max_entries, 4096);
	__type(key, __u64);
	__type(value, __u64);
} targets SEC(".maps");

/* who → backend: what a LISTEN is looked up in. Written by owners. Full: the owner is told. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, struct watch_key);
	__type(value, struct watch_rule);
} watch SEC(".maps");

/*
 * socket → tag. Written by the kernel; a child inherits its listener's tag. It goes with its
 * socket. No memory: the socket is not counted, which ERROR_TAGS_NOMEM shows for a listener.
 */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC | BPF_F_CLONE);
	__type(key, int);
	__type(value, struct tag);
} tags SEC(".maps");

/*
 * listener cookie → count. Written by the kernel only, since an update from user space would undo
 * additions; owners delete the entries of what is gone. Full: the listener stays untagged and
 * ERROR_COUNTS_FULL grows, so its backend's count is unknown.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 8192);
	__type(key, __u64);
	__type(value, struct count);
} counts SEC(".maps");

/* backend id → drain. Written by its owner. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u64);
	__type(value, struct drain);
} drains SEC(".maps");

struct ring {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 65536);
};

/*
 * backend id → ring of events, made by its owner: a ring has one consumer. No ring: no event. A
 * full ring drops events and counts ERROR_RING_FULL; events are hints, the levels are in counts.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH_OF_MAPS);
	__uint(max_entries, 4096);
	__type(key, __u64);
	__array(values, struct ring);
} events SEC(".maps");

/* enum error_kind → how often. Written by the kernel. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, ERROR_KINDS);
	__type(key, __u32);
	__type(value, __u64);
} errors SEC(".maps");

/* enum meta_index → what is installed. Written under the installation lock. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, META_WORDS);
	__type(key, __u32);
	__type(value, __u64);
} meta SEC(".maps");

static __always_inline void failed(__u32 kind)
{
	__u64 *n = bpf_map_lookup_elem(&errors, &kind);

	if (n)
		__sync_fetch_and_add(n, 1);
}

#endif /* EBB_MAPS_H */

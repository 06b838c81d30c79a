/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Datagrams of sockets without a connection: exchanges with a destination each, which keep the path that they began on,
 * and what their socket sends to others or by a later connection. Included by placement.bpf.c behind choose.h.
 */
#ifndef MOUNTAIN_UNCONNECTED_H
#define MOUNTAIN_UNCONNECTED_H

/* Is an exchange, or all that a socket sends, left to the kernel? Until it rests, or the path is dead that the kernel takes. */
static __always_inline bool mtn_is_left(struct mtn_unconnected *e, const struct mtn_new_flow *s,
					__u64 now)
{
	if (!e || e->path < MTN_MAX_PATHS || !mtn_is_fresh(e, now) ||
	    mtn_is_preferred_dead(s->key.ipv6))
		return false;
	e->last_ns = now;
	return true;
}

/*
 * The path that a socket has sent datagrams by before it is connected: others may know it by that address. @left: it is the
 * kernel's.
 */
static __always_inline __u32 mtn_sent_by(const struct mtn_new_flow *s, __u64 cookie, __u32 group, bool *left)
{
	struct mtn_unconnected_key whole = { .cookie = cookie, .ipv6 = s->key.ipv6 };
	struct mtn_unconnected *last = bpf_map_lookup_elem(&unconnected, &whole);
	__u64 now;

	if (!last)
		return MTN_MAX_PATHS;
	now = bpf_ktime_get_ns();
	*left = mtn_is_left(last, s, now);
	return mtn_is_fresh(last, now) ? mtn_exchange_path(last, group) : MTN_MAX_PATHS;
}

/*
 * Takes a mark of ours off a socket that sends a datagram and is not connected: a connect() left it there that is
 * undone. Which it was, or 0. This datagram still follows it, unless it gets a source.
 */
static __always_inline __u32 mtn_forget_mark(struct bpf_sock_addr *ctx)
{
	struct bpf_sock *sk = ctx->sk;
	__u32 mark;

	if (!sk || sk->state != BPF_TCP_CLOSE)
		return 0;
	mark = sk->mark;
	if (!mtn_is_own_mark(mark))
		return 0;
	mtn_set_mark(ctx, mark, 0);
	return mark;
}

/* Does the uplink give datagrams a source? */
static __always_inline bool mtn_has_address(__u32 path)
{
	const struct mtn_placement_path *p = mtn_path_at(path);

	return p->addr[0] | p->addr[1] | p->addr[2] | p->addr[3];
}

/* The address stays the kernel's choice: others may know the socket by that from now on. */
static __always_inline void mtn_leave(const struct mtn_unconnected_key *key, __u64 now)
{
	struct mtn_unconnected left = { .last_ns = now, .path = MTN_MAX_PATHS };

	bpf_map_update_elem(&unconnected, key, &left, BPF_ANY);
}

/* What a datagram goes by: its socket's, or what it names for itself alone (control messages, ip(7), ipv6(7)). */
struct mtn_named {
	__u32 device;
	__u32 mark;
	int tos;	/* of IPv4; -1: the socket's */
};

/*
 * It stands around the source that the kernel hands to the program: in udp_sendmsg() (net/ipv4/udp.c) in the cookie of the
 * control messages, in udpv6_sendmsg() (net/ipv6/udp.c) in the key of the look-up.
 */
static __always_inline struct mtn_named mtn_named_by(struct bpf_sock_addr *ctx, bool ipv6)
{
	struct bpf_sock_addr_kern *kern = bpf_cast_to_kern_ctx(ctx);
	struct mtn_named named;

	if (ipv6) {
		struct flowi6 *flow = bpf_rdonly_cast(kern->t_ctx - bpf_core_field_offset(struct flowi6, saddr),
						      bpf_core_type_id_kernel(struct flowi6));

		named.device = flow->__fl_common.flowic_oif;
		named.mark = flow->__fl_common.flowic_mark;
		named.tos = -1;
	} else {
		struct ipcm_cookie *cookie = bpf_rdonly_cast(kern->t_ctx - bpf_core_field_offset(struct ipcm_cookie, addr),
							     bpf_core_type_id_kernel(struct ipcm_cookie));

		named.device = cookie->oif;
		named.mark = cookie->sockc.mark;
		named.tos = cookie->tos;
	}
	return named;
}

/* The path of a datagram of an unconnected socket, or MTN_MAX_PATHS. @stale: the mark that was just taken off it, or 0. */
static __always_inline __u32 mtn_place_unconnected(struct bpf_sock_addr *ctx, struct mtn_new_flow *s,
						   __u32 stale)
{
	struct mtn_unconnected_key pair = {}, whole = {};
	struct bpf_sock *sk = ctx->sk;
	struct mtn_unconnected new = {}, *known, *last;
	struct mtn_named named;
	__u32 group, rule, path, was = MTN_MAX_PATHS;
	bool to_provider;
	__u64 now;

	if (!sk || sk->bound_dev_if || mtn_dest_is_local(&s->key))
		return MTN_MAX_PATHS;
	named = mtn_named_by(ctx, s->key.ipv6);
	/* The kernel has read the socket's before ours was taken off. */
	s->mark = named.mark == stale ? 0 : named.mark;
	s->key.proto = ctx->protocol;
	s->key.dport = ctx->user_port;
	/* Asked each time: a route, a rule or an option may have come since the exchange began. */
	group = mtn_group_of(&s->key);
	if (group >= MTN_MAX_GROUPS)
		return MTN_MAX_PATHS;
	/* Whoever it was connected to may have told others of that address. */
	s->prefer = stale ? mtn_member_of_mark(stale, group) : MTN_MAX_PATHS;
	if (named.device || mtn_has_own_device(sk, s->key.ipv6) || (s->key.ipv6 && mtn_wants_source(sk))) {
		mtn_count(MTN_PLACE_PASS_BOUND);
		return MTN_MAX_PATHS;
	}
	s->uid = mtn_uid(sk);
	s->key.sport = bpf_htons(sk->src_port);
	mtn_read_dsfield(ctx, s);
	/* The datagram's own one, which nothing tells of IPv6. */
	s->dsfield_unknown = named.tos < 0 && (s->dsfield_unknown || s->key.ipv6);
	if (named.tos >= 0)
		s->dsfield = named.tos;
	if (mtn_passes_fib_rule(s))
		return MTN_MAX_PATHS;

	whole.cookie = bpf_get_socket_cookie(ctx);
	pair.cookie = whole.cookie;
	__builtin_memcpy(pair.daddr, s->key.daddr, 16);
	pair.dport = s->key.dport;
	pair.ipv6 = s->key.ipv6;
	whole.ipv6 = s->key.ipv6;
	now = bpf_ktime_get_ns();
	last = bpf_map_lookup_elem(&unconnected, &whole);
	if (mtn_passes_cgroup(sk)) {
		if (!mtn_is_left(last, s, now))
			mtn_leave(&whole, now);
		return MTN_MAX_PATHS;
	}
	known = bpf_map_lookup_elem(&unconnected, &pair);
	if (mtn_is_left(known, s, now)) {
		mtn_count(MTN_PLACE_PASS_RUNNING);
		return MTN_MAX_PATHS;
	}
	if (known && mtn_is_fresh(known, now))
		was = mtn_exchange_path(known, group);
	if (was < MTN_MAX_PATHS) {
		known->last_ns = now;
		known->path = was;
		to_provider = mtn_is_to_provider(&s->key) && mtn_is_preferred_alive(s->key.ipv6);
		/* The kernel's path, whose provider's the destination may be, may be alive again. */
		if (mtn_is_alive(was) &&
		    (!to_provider || (config.n_rules && mtn_local_rule(s) < MTN_MAX_RULES)))
			return was;
	}

	if (mtn_is_left(last, s, now)) {
		mtn_count(MTN_PLACE_PASS_RUNNING);
		return MTN_MAX_PATHS;
	}
	if (last && (last->path >= MTN_MAX_PATHS || !mtn_is_fresh(last, now)))
		last = NULL;

	rule = config.n_rules ? mtn_local_rule(s) : MTN_MAX_RULES;
	if (rule >= MTN_MAX_RULES) {
		if (s->mark) {
			mtn_count(MTN_PLACE_PASS_MARKED);
			return MTN_MAX_PATHS;
		}
		if (mtn_has_own_port(sk)) {
			mtn_count(MTN_PLACE_PASS_PORT);
			return MTN_MAX_PATHS;
		}
	}
	/* What the socket used last: its address should be one to all, while that path will do. */
	if (last)
		s->prefer = mtn_exchange_path(last, group);
	s->salt = whole.cookie ^ whole.cookie >> 32;
	path = mtn_place_local(s, group, rule);
	if (path < MTN_MAX_PATHS && !mtn_has_address(path)) {
		/* Nothing leads a datagram there. */
		mtn_count(MTN_PLACE_PASS_NO_PATH);
		path = MTN_MAX_PATHS;
	}
	if (path >= MTN_MAX_PATHS) {
		/* Nothing is better: an exchange keeps its address, unless the kernel's path is (which is alive then). */
		if (was < MTN_MAX_PATHS && !s->left)
			return was;
		/* Where the kernel has several, it may have taken a dead one. */
		if (config.preferred_known >> (s->key.ipv6 & 1) & 1)
			mtn_leave(was < MTN_MAX_PATHS || last || mtn_is_to_provider(&s->key) ? &pair : &whole, now);
		return MTN_MAX_PATHS;
	}
	if (was < MTN_MAX_PATHS && was != path)
		mtn_count(MTN_PLACE_LEFT_DEAD);
	new.last_ns = now;
	new.path = path;
	new.mark = mtn_path_at(path)->mark;
	bpf_map_update_elem(&unconnected, &pair, &new, BPF_ANY);
	bpf_map_update_elem(&unconnected, &whole, &new, BPF_ANY);
	mtn_placed(s, path, MTN_PLACE_PLACED_UNCONNECTED);
	return path;
}

#endif

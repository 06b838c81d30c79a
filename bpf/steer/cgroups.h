/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Packets of sockets below cgroups with programs at their egress: they stay where these have seen them. */
#ifndef MOUNTAIN_CGROUPS_H
#define MOUNTAIN_CGROUPS_H

#include "../common/egress_programs.h"

/* A function of its own to the verifier, which would else follow each case of it to the end. */
__noinline int mtn_is_held_cgroup(struct __sk_buff *ctx)
{
	struct sk_buff *skb;
	struct sock *sk;

	/* Before the members are read, which such a kernel does not have. */
	if (!mtn_runs_egress_programs())
		return 0;
	if (!mtn_origin_is_readable() || !mtn_cgroup_is_readable() ||
	    !bpf_core_field_exists(struct sock, sk_cgrp_data) ||
	    !bpf_core_field_exists(struct sock_common, skc_listener))
		return 1;
	skb = bpf_cast_to_kern_ctx(ctx);
	if (!skb->sk)
		return 0;
	sk = bpf_rdonly_cast(skb->sk, bpf_core_type_id_kernel(struct sock));
	/* As sk_to_full_sk() in the kernel: what is no whole socket yet has its listener's cgroup, and none any more after it. */
	if (sk->__sk_common.skc_state == BPF_TCP_TIME_WAIT)
		return 0;
	if (sk->__sk_common.skc_state == BPF_TCP_NEW_SYN_RECV)
		sk = bpf_rdonly_cast(sk->__sk_common.skc_listener, bpf_core_type_id_kernel(struct sock));
	return mtn_is_judged(sk->sk_cgrp_data.cgroup);
}

#endif

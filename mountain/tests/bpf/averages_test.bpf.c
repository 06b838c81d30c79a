// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * bpf/steer/averages.h alone, driven by a clock that the test makes up: averages.rs runs the
 * shared vectors through it.
 */
#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/version.h>
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 4, 0)
struct bpf_iter_num {
	__u64 __opaque[1];
} __attribute__((aligned(8)));
#endif
#include <bpf/bpf_helpers.h>

#include "../../../bpf/common/intf.h"
#include "../../../bpf/steer/traffic.h"
#include "../../../bpf/steer/averages.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

struct step {
	__u64 now_ns;
	__u32 path;
	__u32 len;
	__u32 packets;
	__u32 n_cpus;
	__u32 k_factor;
	__u32 pad;
};

/* Counts one packet as the program of argmax-load does. */
SEC("syscall")
int account(struct step *s)
{
	mtn_average_advance(s->path, s->now_ns, s->n_cpus, s->k_factor);
	mtn_count_traffic(s->path, s->len, s->packets);
	return 0;
}

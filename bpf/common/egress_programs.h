/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Programs of others at the egress of a socket's cgroup. What such a program says about a packet may depend on the device
 * that the kernel has chosen (RestrictNetworkInterfaces= of systemd, above all). They are asked of the kernel each time, as
 * a service's first flow may leave within milliseconds of the program's attachment.
 */
#ifndef MOUNTAIN_EGRESS_PROGRAMS_H
#define MOUNTAIN_EGRESS_PROGRAMS_H

/* So many programs are looked at; where there are as many, one behind them may look at the device. */
#define MTN_EGRESS_PROGRAMS	8

/* The kernel has this type where it runs programs at cgroups (include/linux/bpf-cgroup-defs.h). */
enum cgroup_bpf_attach_type {
	CGROUP_INET_INGRESS = 0,
	CGROUP_INET_EGRESS = 1,
};

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct bpf_prog_aux {
	char name[16];
};

struct bpf_prog {
	struct bpf_prog_aux *aux;
};

struct bpf_prog_array_item {
	struct bpf_prog *prog;
};

struct bpf_prog_array {
	struct bpf_prog_array_item items[0];
};

struct cgroup_bpf {
	/* Those that run, of this cgroup and of all above, by enum cgroup_bpf_attach_type. */
	struct bpf_prog_array *effective[CGROUP_INET_EGRESS + 1];
};

struct cgroup {
	struct cgroup_bpf bpf;
};

struct sock_cgroup_data {
	struct cgroup *cgroup;
};
#pragma clang attribute pop

/* systemd's filter by address, which looks at no device (src/core/bpf-firewall.c)? */
static __always_inline bool mtn_filters_by_address(const struct bpf_prog_aux *aux)
{
	static const char name[] = "sd_fw_egress";
	int i;

#pragma unroll
	for (i = 0; i < (int)sizeof(name); i++)
		if (aux->name[i] != name[i])
			return false;
	return true;
}

static __always_inline bool mtn_runs_egress_programs(void)
{
	return bpf_core_enum_value_exists(enum cgroup_bpf_attach_type, CGROUP_INET_EGRESS);
}

static __always_inline bool mtn_cgroup_is_readable(void)
{
	return bpf_core_enum_value(enum cgroup_bpf_attach_type, CGROUP_INET_EGRESS) == CGROUP_INET_EGRESS &&
	       bpf_core_field_exists(struct sock_cgroup_data, cgroup) &&
	       bpf_core_field_exists(struct cgroup, bpf) &&
	       bpf_core_field_exists(struct cgroup_bpf, effective) &&
	       bpf_core_field_exists(struct bpf_prog_array, items) &&
	       bpf_core_field_exists(struct bpf_prog_array_item, prog) &&
	       bpf_core_field_exists(struct bpf_prog, aux) &&
	       bpf_core_field_exists(struct bpf_prog_aux, name);
}

/* Does a program at the egress of the cgroup, which is readable, judge what leaves? */
static __always_inline bool mtn_is_judged(const struct cgroup *cgroup)
{
	const struct bpf_prog_array *array;
	int i;

	array = cgroup->bpf.effective[CGROUP_INET_EGRESS];
	if (!array)
		return true;
#pragma unroll
	for (i = 0; i < MTN_EGRESS_PROGRAMS; i++) {
		/* An item is larger in the kernel than here. */
		const struct bpf_prog_array_item *item =
			(const void *)array->items + i * bpf_core_type_size(struct bpf_prog_array_item);
		const struct bpf_prog *program = item->prog;

		if (!program)
			return false;
		if (!mtn_filters_by_address(program->aux))
			return true;
	}
	return true;
}

#endif

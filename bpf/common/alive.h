/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Whether the daemon still follows the host: a dead man's switch.
 *
 * The programs of a daemon that hangs or is stopped (SIGSTOP, a debugger, the cgroup freezer) stay attached, and its
 * last verdict would hold for ever, whatever becomes of routes, firewall and paths. The same holds for the process that
 * watches the firewall for redirects. So their loops write the time several times a second. Once that is older than
 * MTN_ALIVE_S, the programs leave everything to the kernel. The clock is CLOCK_MONOTONIC, which stands still while the
 * machine sleeps.
 */
#ifndef MOUNTAIN_ALIVE_H
#define MOUNTAIN_ALIVE_H

enum mtn_alive {
	MTN_ALIVE_S = 5,	/* longer than the loop is busy with one thing, s */
};

/* @alive_ns: what the daemon wrote last. 0: there is no daemon, as in tests, and none is missed. */
static __always_inline bool mtn_is_unattended(__u64 alive_ns, __u64 now)
{
	return alive_ns && now > alive_ns + MTN_ALIVE_S * 1000000000ULL;
}

#endif

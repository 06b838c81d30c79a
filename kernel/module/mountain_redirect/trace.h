/* SPDX-License-Identifier: GPL-2.0-only */
/* Tracepoints, one a rewritten packet: /sys/kernel/tracing/events/mtn_redirect/ */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM mtn_redirect

#if !defined(MTN_REDIRECT_TRACE_H) || defined(TRACE_HEADER_MULTI_READ)
#define MTN_REDIRECT_TRACE_H

#include <linux/skbuff.h>
#include <linux/tracepoint.h>

#include "redirect.h"

TRACE_EVENT(mtn_redirect_packet,
	TP_PROTO(const struct sk_buff *skb, const struct mtn_rule *rule,
		 enum mtn_direction direction, int ifindex, int error),
	TP_ARGS(skb, rule, direction, ifindex, error),

	TP_STRUCT__entry(
		__field(const void *, skb)
		__field(u32, id)
		__field(u32, len)
		__field(int, ifindex)
		__field(int, error)
		__field(u8, proto)
		__field(u8, direction)
	),

	TP_fast_assign(
		__entry->skb = skb;
		__entry->id = rule->id;
		__entry->len = skb->len;
		__entry->ifindex = ifindex;
		__entry->error = error;
		__entry->proto = rule->from.proto;
		__entry->direction = direction;
	),

	TP_printk("rule %u %s %s skb %p len %u ifindex %d error %d", __entry->id,
		  __entry->direction == MTN_FORWARD ? "forward" : "reply",
		  __entry->proto == IPPROTO_UDP ? "udp" : "tcp", __entry->skb, __entry->len,
		  __entry->ifindex, __entry->error)
);

#endif /* MTN_REDIRECT_TRACE_H */

#undef TRACE_INCLUDE_PATH
#define TRACE_INCLUDE_PATH .
#undef TRACE_INCLUDE_FILE
#define TRACE_INCLUDE_FILE trace
#include <trace/define_trace.h>

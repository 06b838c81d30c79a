// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The small programs of `mountain-lab redirect`: a generator of packets, sinks that count what
 * arrives, and the least that moves a packet from one device to another.
 *
 * The generator runs in BPF_PROG_RUN with live frames. The kernel writes a page once and then hands
 * the same pages out again, with whatever the router made of the headers: so every packet is
 * stamped anew, with the headers of the next flow, as user space has computed them.
 */
#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>

/* Ethernet, IPv4 without options, UDP. */
#define HEADERS		42
#define OFF_PROTO	12
#define OFF_IP		14
#define OFF_ADDRS	26
#define OFF_TO		30
#define OFF_TO_PORT	36
#define OFF_UDP_LEN	38
#define MAX_FLOWS	65536
/* At a fixed rate packets come in bursts, as from a card that holds its interrupts back: as many as the
 * kernel hands on at once, a quarter of what a ring of a veth holds. */
#define BURST		64

struct headers {
	__u8 bytes[HEADERS];
	__u8 pad[22];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_FLOWS);
	__type(key, __u32);
	__type(value, struct headers);
} flows SEC(".maps");

/* Of the generator; it runs on one CPU at a time. */
__u32 gen_ifindex;	/* where packets go */
__u32 gen_flows;  	/* entries of `flows` in use */
__u64 gen_interval_ns;	/* between packets, on average; 0: as fast as it goes */
__u64 gen_next_ns;
__u32 gen_at;
__u64 gen_made;
__u64 gen_wanted;

/* Whether it is too early for the next packet. Waiting here would not do: nothing else runs on this CPU
 * during a batch, and the time would be charged to whoever is woken up meanwhile. */
static __always_inline int too_early(void)
{
	__u64 now;

	if (!gen_interval_ns || gen_made % BURST)
		return 0;
	now = bpf_ktime_get_ns();
	if (now < gen_next_ns)
		return 1;
	gen_next_ns += BURST * gen_interval_ns;
	/* Late: no second burst to catch up, which would be another load. */
	if (gen_next_ns < now)
		gen_next_ns = now;
	return 0;
}

SEC("xdp")
int generate(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct headers *headers;
	__u32 at = gen_at;

	if (gen_made >= gen_wanted || too_early())
		return XDP_DROP;
	if (at >= gen_flows)
		at = 0;
	gen_at = at + 1;
	headers = bpf_map_lookup_elem(&flows, &at);
	if (!headers || data + HEADERS > end)
		return XDP_DROP;
	__builtin_memcpy(data, headers->bytes, HEADERS);
	gen_made++;
	return bpf_redirect(gen_ifindex, 0);
}

/* What a sink has seen. */
struct seen {
	__u64 packets;	/* to the target */
	__u64 bytes;	/* of these, from the network layer on */
	__u64 others;	/* IPv4 to anybody else, or with a wrong checksum: not rewritten, or wrongly */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct seen);
} seen SEC(".maps");

/* The target, network order; port 0: any. */
__be32 sink_addr;
__be16 sink_port;

/* Whether sinks look at checksums, too. Payloads are zeros, so that the headers are all there is to
 * sum up. Not for packets of a local socket, whose checksums are not there yet. */
__u32 sink_verify;

static __always_inline __u16 folded(__u64 sum)
{
	sum = (sum & 0xffff) + (sum >> 16 & 0xffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	return (sum & 0xffff) + (sum >> 16);
}

static __always_inline int intact(void *data)
{
	__be32 *ip = data + OFF_IP, *to_udp = data + OFF_ADDRS;
	__u64 sum = bpf_htons(IPPROTO_UDP) + *(__be16 *)(data + OFF_UDP_LEN);

	if (folded((__u32)bpf_csum_diff(NULL, 0, ip, 20, 0)) != 0xffff)
		return 0;
	/* Addresses, ports, length, checksum: in a row. */
	sum += (__u32)bpf_csum_diff(NULL, 0, to_udp, 16, 0);
	return folded(sum) == 0xffff;
}

static __always_inline void count(void *data, void *end, __u64 bytes)
{
	__u32 zero = 0;
	struct seen *s = bpf_map_lookup_elem(&seen, &zero);

	if (!s || data + HEADERS > end || *(__be16 *)(data + OFF_PROTO) != bpf_htons(0x0800))
		return;
	if (*(__be32 *)(data + OFF_TO) == sink_addr &&
	    (!sink_port || *(__be16 *)(data + OFF_TO_PORT) == sink_port) &&
	    (!sink_verify || intact(data))) {
		s->packets++;
		s->bytes += bytes - 14;
	} else {
		s->others++;
	}
}

SEC("tcx/ingress")
int tc_sink(struct __sk_buff *skb)
{
	/* Headers that came as a page of their own are not in the linear part. */
	if ((void *)(long)skb->data + HEADERS > (void *)(long)skb->data_end &&
	    bpf_skb_pull_data(skb, HEADERS))
		return TC_ACT_SHOT;
	count((void *)(long)skb->data, (void *)(long)skb->data_end, skb->len);
	return TC_ACT_SHOT;
}

SEC("xdp")
int xdp_sink(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;

	count(data, end, end - data);
	return XDP_DROP;
}

/* The next hop of the bare redirects. */
__u32 bare_ifindex;
__u8 bare_addresses[12];	/* destination and source MAC */

SEC("xdp")
int xdp_bare(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;

	if (data + 14 > end)
		return XDP_DROP;
	__builtin_memcpy(data, bare_addresses, sizeof(bare_addresses));
	return bpf_redirect(bare_ifindex, 0);
}

SEC("tcx/ingress")
int tc_bare_peer(struct __sk_buff *skb)
{
	return bpf_redirect_peer(bare_ifindex, 0);
}

char _license[] SEC("license") = "Dual BSD/GPL";

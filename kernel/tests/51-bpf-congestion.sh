#!/bin/bash
# Two of the kernel's own congestion controls in BPF (selftests/bpf/progs): the verifier takes them, and each
# carries a transfer over IPv4 and IPv6, ECN on for DCTCP; with 0008's larger icsk_ca_priv as without.
# mode: smp
# run: full
# selftests: yes
# seconds: 600
# shellcheck source=kernel/tests/lib.sh
. /tests/lib.sh
need bpftool iperf3
two_hosts
for ns in a b; do ip netns exec $ns sysctl -qw net.ipv4.tcp_ecn=1; done

# transfer CONTROL ADDRESS: bytes that arrived, and which control iperf3 says that it used.
transfer() {
    ip netns exec b iperf3 -s -1 -D
    sleep 0.5
    ip netns exec a timeout 60 iperf3 -J -C "$1" -c "$2" -n 20M |
        jq -r '.end | .sum_received.bytes, .sender_tcp_congestion'
}

refused "bpf_cubic before it is there" ip netns exec a iperf3 -C bpf_cubic -c 192.0.2.2 -n 1K
for name in bpf_cubic bpf_dctcp; do
    # bpf_dctcp.o brings a second one, which is there to be refused: it lacks what every control needs.
    bpftool struct_ops register "/selftests/bpf/$name.o"
    check "$name: registered" "$(grep -cw "$name" /proc/sys/net/ipv4/tcp_available_congestion_control)" == 1
    for address in 192.0.2.2 2001:db8::2; do
        mapfile -t got < <(transfer "$name" "$address")
        # Less what was under way when iperf3 looked.
        check "$name, $address: bytes" "${got[0]}" ">=" 10000000
        same "$name, $address: control" "${got[1]}" "$name"
    done
done
bpftool struct_ops show
for name in bpf_cubic bpf_dctcp; do
    bpftool struct_ops unregister name "${name#bpf_}"
    check "$name: gone" "$(grep -cw "$name" /proc/sys/net/ipv4/tcp_available_congestion_control)" == 0
done

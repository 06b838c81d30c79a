#!/bin/bash
# `mountain up` tells the kernel what it measures: forwarded traffic, of which the kernel has no round trips of its
# own, leaves a path with spikes of delay within 2 s and comes back. Without `mountain` it stays. IPv4 and IPv6, in
# virtual time.
# mode: virtual
# kernel: patched
# debug: no
# seconds: 600
# shellcheck source=kernel/tests/lib.sh
. /tests/lib.sh
need mountain choices

# a forwards from c0 by r0 and r1, each a hop away.
for ns in a r0 r1; do
    ip netns add $ns
    ip -n $ns link set lo up
done
ip netns exec a sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 net.ipv4.fib_multipath_hash_policy=1 \
    net.ipv6.fib_multipath_hash_policy=1 net.ipv4.fib_multipath_hash_seed=1 net.ipv4.fib_multipath_score=2
ip -n a link add c0 type veth peer name c1
ip -n a address add 10.6.0.1/16 dev c0
ip -n a address add 2001:db8:6::1/64 dev c0 nodad
ip -n a link set c0 up
ip -n a link set c1 up
for i in 0 1; do
    ip link add a$i netns a type veth peer name ra netns r$i
    for end in a/a$i/1 r$i/ra/2; do
        IFS=/ read -r ns dev host <<<"$end"
        ip -n "$ns" address add "10.8.$i.$host/24" dev "$dev"
        ip -n "$ns" address add "2001:db8:8$i::$host/64" dev "$dev" nodad
        ip -n "$ns" link set "$dev" up
    done
done
ip -n a route add 10.10.0.0/16 nexthop via 10.8.0.2 dev a0 nexthop via 10.8.1.2 dev a1
ip -n a -6 route add 2001:db8:10::/64 nexthop via 2001:db8:80::2 dev a0 nexthop via 2001:db8:81::2 dev a1

# delay I MS: what comes back from r$i. With a rate netem keeps the packets' order.
delay() { tc -n "r$1" qdisc replace dev ra root netem delay "$2ms" rate 100mbit limit 1000; }
spikes() {
    while :; do
        delay 1 70
        sleep 0.1
        delay 1 10
        sleep 0.2
    done
}
# begin, until `finish`.
begin() {
    spikes &
    spikes=$!
}
finish() {
    kill $spikes
    wait $spikes 2>/dev/null
    delay 1 10
}
# share FAMILY: of 1000 new flows from c0, in percent, by a1.
share() {
    local from=10.6 to=10.10
    [[ $1 == 4 ]] || from=2001:db8:6:0 to=2001:db8:10:0
    ip netns exec a choices 1000 $to c0 $from | awk '$1 == "a1" { n = $2 } END { print n / 10 }'
}
mountain() { nsenter --net=/run/netns/a mountain "$@"; }
delay 0 10
delay 1 10

begin
sleep 4
for family in 4 6; do
    check "IPv$family, nobody tells the kernel: by a1 with spikes, %" "$(share $family)" ">=" 45
done
finish

works "mountain up" mountain up
same "it tells the kernel" "$(mountain status --json | jq .kernel_told)" true
sleep 8
same "the kernel knows all four paths" \
    "$(ip netns exec a cat /proc/net/path_metrics | awk '$9 == "user"' | wc -l)" 4
for family in 4 6; do
    check "IPv$family: by a1 of equal paths, %" "$(share $family)" ">=" 45
    check "IPv$family: and not more than, %" "$(share $family)" "<=" 55
done
begin
sleep 2
ip netns exec a cat /proc/net/path_metrics
for family in 4 6; do
    check "IPv$family: by a1 after 2 s of spikes, of its 50, %" "$(share $family)" "<=" 10
    check "IPv$family: it does not starve, %" "$(share $family)" ">" 0
done
finish
for n in $(seq 30); do
    sleep 1
    awk "BEGIN { exit !($(share 4) < 45 || $(share 6) < 45) }" || break
done
echo "back after $n s"
for family in 4 6; do check "IPv$family: back, by a1, %" "$(share $family)" ">=" 45; done

works "mountain down" mountain down
sleep 6
same "what was said is forgotten" \
    "$(ip netns exec a cat /proc/net/path_metrics | awk '$9 == "user"' | wc -l)" 0

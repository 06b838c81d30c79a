#!/bin/bash
# Path metrics behind IPsec: what ESP makes of packets is counted once, to the next hop of the outer route,
# to the byte; and TCP inside feeds that path. Tunnel and transport mode, over two next hops.
# mode: virtual
# kernel: patched
# seconds: 600
# shellcheck source=kernel/tests/lib.sh
. /tests/lib.sh
need iperf3

for ns in a b; do
    ip netns add $ns
    ip -n $ns link set lo up
done
for i in 0 1; do
    ip link add a$i netns a type veth peer name b$i netns b
    ip -n a address add 10.9.$i.1/24 dev a$i
    ip -n b address add 10.9.$i.2/24 dev b$i
    for end in a/a$i b/b$i; do
        ns=${end%/*} dev=${end#*/}
        ip -n "$ns" link set "$dev" up
        ip netns exec "$ns" ethtool -K "$dev" gso off tso off gro off >/dev/null
        # Nothing but what this test sends.
        ip netns exec "$ns" sysctl -qw "net.ipv6.conf.$dev.disable_ipv6=1"
    done
    ip -n a neighbour replace 10.9.$i.2 dev a$i lladdr "$(ip -n b -j link show dev b$i | jq -r '.[0].address')"
    ip -n b neighbour replace 10.9.$i.1 dev b$i lladdr "$(ip -n a -j link show dev a$i | jq -r '.[0].address')"
done
ip netns exec a sysctl -qw net.ipv4.fib_multipath_hash_seed=1 net.ipv4.path_metrics=1
ip -n a address add 10.8.0.1/32 dev lo
ip -n a route add 10.10.0.0/16 src 10.8.0.1 nexthop via 10.9.0.2 dev a0 nexthop via 10.9.1.2 dev a1
ip -n b route add 10.8.0.1 via 10.9.0.1
# Eight endpoints, so that both next hops are used; behind each of them an address.
for n in 1 2 3 4 5 6 7 8; do
    ip -n b address add 10.10.0.$n/32 dev lo
    ip -n b address add 10.20.0.$n/32 dev lo
done
# Outer addresses are b's and a's own; the inner ones go the same way in the clear if ESP fails: no route.
ip -n a address add 10.18.0.1/32 dev lo

key=0x0102030405060708090a0b0c0d0e0f1011121314
# sa NAMESPACE FROM TO SPI MODE
sa() {
    ip -n "$1" xfrm state add src "$2" dst "$3" proto esp spi "$4" mode "$5" \
        aead 'rfc4106(gcm(aes))' $key 128
}
# policies MODE
policies() {
    local mode=$1 n here there
    for ns in a b; do
        ip -n $ns xfrm state flush
        ip -n $ns xfrm policy flush
    done
    for n in 1 2 3 4 5 6 7 8; do
        here=10.18.0.1 there=10.20.0.$n
        [[ $mode == tunnel ]] || here=10.8.0.1 there=10.10.0.$n
        for ns in a b; do
            sa $ns 10.8.0.1 10.10.0.$n $((100 + n)) "$mode"
            sa $ns 10.10.0.$n 10.8.0.1 $((200 + n)) "$mode"
        done
        ip -n a xfrm policy add src $here dst $there dir out tmpl src 10.8.0.1 dst 10.10.0.$n proto esp mode "$mode"
        ip -n a xfrm policy add src $there dst $here dir in tmpl src 10.10.0.$n dst 10.8.0.1 proto esp mode "$mode"
        ip -n b xfrm policy add src $there dst $here dir out tmpl src 10.10.0.$n dst 10.8.0.1 proto esp mode "$mode"
        ip -n b xfrm policy add src $here dst $there dir in tmpl src 10.8.0.1 dst 10.10.0.$n proto esp mode "$mode"
    done
}

# path COLUMN DEVICE: of the path by the device's gateway.
path() {
    # shellcheck disable=SC2016
    ip netns exec a awk -v dev="$2" -v want="$1" '
        NR == 1 { for (i = 1; i <= NF; i++) column[$i] = i; next }
        $1 == dev && $2 ~ /^10\.9\./ { print $column[want] }' /proc/net/path_metrics
}
sent() { ip -n a -s -j link show dev "$1" | jq ".[0].stats64.tx.$2"; }

for mode in tunnel transport; do
    policies $mode
    inner=10.20.0
    # The inner addresses are routed, so that there is something to encapsulate.
    [[ $mode == transport ]] && inner=10.10.0
    ip -n a route replace 10.20.0.0/16 src 10.18.0.1 via 10.9.0.2
    ip -n b route replace 10.18.0.1 via 10.9.0.1
    for dev in a0 a1; do
        for what in packets bytes; do
            declare "before_$dev$what=$(sent $dev $what)" "path_$dev$what=$(path $what $dev)"
        done
    done
    for n in 1 2 3 4 5 6 7 8; do
        ip netns exec a bash -c "for i in 1 2 3 4 5 6 7 8 9 10; do
            printf '%0200d' 0 >/dev/udp/$inner.$n/9; done" 2>/dev/null
    done
    total=0
    for dev in a0 a1; do
        for what in packets bytes; do
            before=before_$dev$what counted=path_$dev$what
            before=$(($(sent $dev $what) - ${!before})) counted=$(($(path $what $dev) - ${!counted}))
            check "$mode: $what of $dev's path, less those of the device" "$((counted - before))" == 0
            [[ $what == bytes ]] || check "$mode: packets by $dev" "$counted" ">" 0
            [[ $what == bytes ]] || total=$((total + counted))
        done
    done
    check "$mode: packets in all" "$total" == 80
    check "$mode: ESP that came in at b" \
        "$(ip -n b -s xfrm state | grep -c 'src 10.8.0.1')" == 8

    # TCP inside, to one endpoint: the path that its ESP takes.
    ip netns exec b iperf3 -s -1 >/dev/null &
    server=$!
    sleep 0.5
    works "$mode: TCP" ip netns exec a timeout 60 iperf3 -c $inner.1 -n 2M
    wait $server
    used=$(ip -n a route get 10.10.0.1 from 10.8.0.1 | grep -o 'dev a[01]')
    used=${used#dev }
    same "$mode: TCP inside feeds the outer path, $used" "$(path source "$used")" stack
    other=a1
    [[ $used == a0 ]] || other=a0
    same "$mode: and not the other one, $other" "$(path source $other)" none

    # The outer route changes below bundles that are in use: they are made anew, with the other path.
    ip -n a route add 10.10.0.1 src 10.8.0.1 via 10.9.${other#a}.2
    for dev in a0 a1; do declare "before_$dev=$(path packets $dev)"; done
    ip netns exec a bash -c "for i in 1 2 3 4 5 6 7 8 9 10; do printf '%0200d' 0 >/dev/udp/$inner.1/9; done"
    for dev in a0 a1; do
        before=before_$dev
        check "$mode: after the outer route has changed to $other: packets by $dev" \
            "$(($(path packets $dev) - ${!before}))" == "$([[ $dev == "$other" ]] && echo 10 || echo 0)"
    done
    ip -n a route del 10.10.0.1
    # Until nothing is known any more.
    sleep 6
done

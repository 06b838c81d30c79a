#!/bin/bash
# Scored multipath fed by the host's own TCP, over two emulated paths of 10 ms: nothing moves without a
# reason, a path with spikes of delay loses most new flows within 2 s, does not starve, and has them back
# afterwards. Routes and groups, IPv4 and IPv6; forwarded traffic, fed by netlink. Virtual time.
# mode: virtual
# kernel: patched
# debug: no
# selftests: yes
# seconds: 1800
# shellcheck source=kernel/tests/lib.sh
. /tests/lib.sh
need iperf3

# a - r0, r1 - b: the way back is by r0.
for ns in a r0 r1 b; do
    ip netns add $ns
    ip -n $ns link set lo up
    ip netns exec $ns sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1
done
ip -n a address add 10.9.9.1/32 dev lo
ip -n a address add 2001:db8:99::1/128 dev lo
ip -n b address add 10.10.0.1/16 dev lo
ip -n b address add 2001:db8:10::1/64 dev lo nodad
for i in 0 1; do
    ip link add a$i netns a type veth peer name ra netns r$i
    ip link add rb netns r$i type veth peer name b$i netns b
    for end in a/a$i/1/8 r$i/ra/2/8 r$i/rb/1/7 b/b$i/2/7; do
        IFS=/ read -r ns dev host net <<<"$end"
        ip -n "$ns" address add "10.$net.$i.$host/24" dev "$dev"
        ip -n "$ns" address add "2001:db8:$net$i::$host/64" dev "$dev" nodad
        ip -n "$ns" link set "$dev" up
        ip netns exec "$ns" ethtool -K "$dev" gso off tso off gro off >/dev/null
    done
    ip -n r$i route add 10.10.0.0/16 via 10.7.$i.2
    ip -n r$i -6 route add 2001:db8:10::/64 via 2001:db8:7$i::2
    ip -n r$i route add 10.9.9.1 via 10.8.$i.1
    ip -n r$i -6 route add 2001:db8:99::1 via 2001:db8:8$i::1
done
ip -n b route add 10.9.9.1 via 10.7.0.1
ip -n b -6 route add 2001:db8:99::1 via 2001:db8:70::1
ip netns exec a sysctl -qw net.ipv4.fib_multipath_hash_policy=1 net.ipv6.fib_multipath_hash_policy=1 \
    net.ipv4.fib_multipath_hash_seed=1

# delay I MS: with a rate netem keeps the packets' order.
delay() { tc -n "r$1" qdisc replace dev rb root netem delay "$2ms" rate 100mbit limit 10000; }

# Up to 70 ms for a third of the time, on r1.
spikes() {
    while :; do
        delay 1 70
        sleep 0.1
        delay 1 10
        sleep 0.2
    done
}

look() { looked=$(ip netns exec a choices 1000 "$to"); }
hash_now() { head -n 1 <<<"$looked"; }
# Of 1000 new flows, in percent, by a1.
share() { awk '$1 == "a1" { n = $2 } END { print n / 10 }' <<<"$looked"; }

# feeds DEVICE: how many of its paths TCP feeds.
feeds() { grep -c "^$1 .* stack " <(ip netns exec a cat /proc/net/path_metrics); }

# route FAMILY KIND
route() {
    local family=$1 kind=$2 dst=10.10.0.0/16 source=10.9.9.1
    gw=(10.8.0.2 10.8.1.2) to=10.10 server=10.10.0.1
    if [[ $family == 6 ]]; then
        dst=2001:db8:10::/64 source=2001:db8:99::1
        gw=(2001:db8:80::2 2001:db8:81::2) to=2001:db8:10:0 server=2001:db8:10::1
    fi
    if [[ $kind == route ]]; then
        ip -n a -"$family" route add $dst src $source nexthop via "${gw[0]}" dev a0 \
            nexthop via "${gw[1]}" dev a1
    else
        ip -n a nexthop add id 1 via "${gw[0]}" dev a0
        ip -n a nexthop add id 2 via "${gw[1]}" dev a1
        ip -n a nexthop add id 3 group 1/2
        ip -n a -"$family" route add $dst src $source nhid 3
    fi
}

scored() {
    local name="IPv$1, $2" calm=$3 port=$4 server_pid client_pid spikes_pid before n moved=0
    ip -n a -4 route del 10.10.0.0/16 2>/dev/null
    ip -n a -6 route del 2001:db8:10::/64 2>/dev/null
    ip -n a nexthop flush >/dev/null 2>&1
    delay 0 10
    delay 1 10
    route "$1" "$2"
    ip netns exec a sysctl -qw net.ipv4.fib_multipath_score=2
    ip netns exec b iperf3 -s -1 >/dev/null &
    server_pid=$!
    sleep 0.5
    # Sixteen flows, some by each path. Fixed ports, so that they choose alike each time.
    ip netns exec a iperf3 -c "$server" -P 16 -b 0.5M -l 2000 -t 600 -i 0 --cport "$port" >/tmp/iperf 2>&1 &
    client_pid=$!
    sleep 5
    for device in a0 a1; do
        check "$name: flows by $device" "$(feeds $device)" ">=" 1
    done
    look
    before=$(hash_now)
    check "$name: new flows by a1 of equal paths, %" "$(share)" ">=" 45
    check "$name: and not more than, %" "$(share)" "<=" 55
    for n in $(seq "$calm"); do
        sleep 1
        look
        [[ $(hash_now) == "$before" ]] || moved=$((moved + 1))
    done
    check "$name: looks in $calm s of calm that found flows moved" "$moved" == 0

    spikes &
    spikes_pid=$!
    sleep 2
    look
    n=$(share)
    echo "$name: $n % of new flows by a1 after 2 s of spikes"
    ip netns exec a cat /proc/net/path_metrics
    check "$name: of its 50 % the path with spikes keeps after 2 s, %" "$n" "<=" 10
    for n in $(seq 10); do
        sleep 1
        look
        check "$name: it does not starve, nor has more, after $((n + 2)) s, %" "$(share)" ">" 0
        check "$name: after $((n + 2)) s, %" "$(share)" "<=" 10
    done
    kill "$spikes_pid"
    wait "$spikes_pid" 2>/dev/null
    delay 1 10
    for n in $(seq 20); do
        sleep 1
        look
        [[ $(hash_now) != "$before" ]] || break
    done
    echo "$name: back after $n s"
    check "$name: all flows as before, $n s after the last spike" "$(share)" ">=" 45
    same "$name: each flow where it was" "$(hash_now)" "$before"
    kill "$client_pid" "$server_pid"
    wait "$client_pid" "$server_pid" 2>/dev/null
    ip netns exec a sysctl -qw net.ipv4.fib_multipath_score=0
    sleep 6
}

scored 4 route 60 20000
scored 6 route 60 21000
scored 4 group 60 22000
scored 6 group 60 23000

# Forwarded, fed by netlink: nobody here sends TCP.
ip -n a link add c0 type veth peer name c1
ip -n a address add 10.6.0.1/16 dev c0
ip -n a address add 2001:db8:6::1/64 dev c0 nodad
ip -n a link set c0 up
ip -n a link set c1 up
nl() { ip netns exec a /selftests/net/path_metrics_nl "$@"; }
# load I: what is put on the path by a$i, bytes/s.
load() { ip netns exec a cat /proc/net/path_metrics | awk -v gw="${gw[$1]}" '$2 == gw { print $5 }'; }
# By a1 alone, and no further than r1.
ip -n a route add 10.11.0.0/16 via 10.8.1.2
ip -n a -6 route add 2001:db8:11::/64 via 2001:db8:81::2
ip -n r1 route add blackhole 10.11.0.0/16
ip -n r1 -6 route add blackhole 2001:db8:11::/64
for family in 4 6; do
    ip -n a -4 route del 10.10.0.0/16 2>/dev/null
    ip -n a -6 route del 2001:db8:10::/64 2>/dev/null
    ip -n a nexthop flush >/dev/null 2>&1
    route $family route
    from=10.6
    [[ $family == 4 ]] || from=2001:db8:6:0
    one=10.11.0.1
    [[ $family == 4 ]] || one=2001:db8:11::1
    ip netns exec a sysctl -qw net.ipv4.fib_multipath_score=2
    look() { looked=$(ip netns exec a choices 1000 "$to" c0 "$from"); }
    sleep 1
    look
    check "IPv$family, forwarded: by a1, %" "$(share)" ">=" 45
    nl set a0 "${gw[0]}" delay 1000 variation 500
    nl set a1 "${gw[1]}" delay 40000 variation 20000
    sleep 2
    look
    check "IPv$family, forwarded: by a1 2 s after it was said to be late, %" "$(share)" "<=" 10
    check "IPv$family, forwarded: it does not starve, %" "$(share)" ">" 0
    sleep 10
    look
    check "IPv$family, forwarded: by a1 after nothing was said for 5 s, %" "$(share)" ">=" 45

    # What is put on a path is no reason to leave it.
    least=100 loaded=1e9
    ip netns exec a bash -c "while :; do printf '%01000d' 0 >/dev/udp/$one/9; done" &
    load_pid=$!
    for _ in 1 2 3 4 5 6 7 8; do
        nl set a0 "${gw[0]}" delay 1000 variation 500
        nl set a1 "${gw[1]}" delay 1000 variation 500
        sleep 0.3
        loaded=$(awk "BEGIN { n = $(load 1) / ($(load 0) + 1); print n < $loaded ? n : $loaded }")
        look
        least=$(awk "BEGIN { n = $(share); n = n < 50 ? n : 100 - n; print n < $least ? n : $least }")
    done
    kill $load_pid
    wait $load_pid 2>/dev/null
    check "IPv$family: load of a1's path, in terms of a0's, at least" "$loaded" ">=" 100
    check "IPv$family: with that the least that either has, %" "$least" ">=" 45
    ip netns exec a sysctl -qw net.ipv4.fib_multipath_score=0
done

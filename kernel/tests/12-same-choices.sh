#!/bin/bash
# Which next hops 10,000 random 5-tuples take, with a fixed hash seed, on the stock and on the patched kernel
# with everything off: kernel/scripts/test compares the lines, a hash of all choices in each. Here counts
# that they were made, and that what was on leaves nothing behind.
# mode: smp
# run: full
# seconds: 900
# shellcheck source=kernel/tests/lib.sh
. /tests/lib.sh

ip link add far0 type veth peer name a0
ip netns add b
ip link add a1 type veth peer name b1 netns b
ip link add c0 type veth peer name c1
ip link set lo up
for dev in a0 a1 c0 far0 c1; do ip link set $dev up; done
ip -n b link set b1 up
sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1
for i in 0 1; do
    ip address add 10.9.$i.1/24 dev a$i
    ip address add 2001:db8:9$i::1/64 dev a$i nodad
    ip neighbour replace 10.9.$i.2 lladdr 02:00:00:00:00:02 dev a$i
    ip neighbour replace 2001:db8:9$i::2 lladdr 02:00:00:00:00:02 dev a$i
done
ip address add 10.8.0.1/16 dev c0
ip address add 2001:db8:8::1/64 dev c0 nodad
sysctl -qw net.ipv4.fib_multipath_hash_seed=1

# policy NUMBER: 0 addresses, 1 ports, too, 2 those inside of tunnels, 3 what fib_multipath_hash_fields says
policy() { sysctl -qw net.ipv4.fib_multipath_hash_policy="$1" net.ipv6.fib_multipath_hash_policy="$1"; }

# route FAMILY KIND WEIGHT: the second next hop has this weight, the first one 1.
route() {
    local family=$1 kind=$2 weight=$3 gw dst=10.10.0.0/16
    gw=(10.9.0.2 10.9.1.2)
    [[ $family == 4 ]] || { dst=2001:db8:10::/64 gw=(2001:db8:90::2 2001:db8:91::2); }
    if [[ $kind == route ]]; then
        ip -"$family" route add $dst nexthop via "${gw[0]}" dev a0 weight 1 nexthop via "${gw[1]}" dev a1 \
            weight "$weight"
        return
    fi
    ip nexthop add id 1 via "${gw[0]}" dev a0
    ip nexthop add id 2 via "${gw[1]}" dev a1
    case $kind in
        group) ip nexthop add id 3 group "1/2,$weight" ;;
        resilient) ip nexthop add id 3 group "1/2,$weight" type resilient buckets 128 ;;
    esac
    ip -"$family" route add $dst nhid 3
}

none() {
    ip -4 route del 10.10.0.0/16 2>/dev/null
    ip -6 route del 2001:db8:10::/64 2>/dev/null
    ip nexthop flush >/dev/null 2>&1
}

declare -A first
# chosen NAME FAMILY [in]
chosen() {
    local name=$1 to=10.10 from=10.8 line
    [[ $2 == 4 ]] || { to=2001:db8:10:0 from=2001:db8:8:0; }
    line=$(choices 10000 $to ${3:+c0 $from} | tr '\n' ' ')
    line=${line% }
    check "$name: made" "$(awk '{ for (i = 3; i <= NF; i += 2) n += $i; print n }' <<<"$line")" == 10000
    if [[ -z ${first[$name]:-} ]]; then
        first[$name]=$line
        echo "mountain-subtest: PASS choices: $name: $line"
    else
        same "$name: as before" "$line" "${first[$name]}"
    fi
}

all() {
    for family in 4 6; do
        for kind in route group resilient; do
            for weight in 1 3; do
                none
                route $family $kind $weight
                policy 1
                chosen "IPv$family, $kind, 1:$weight" $family
                [[ $weight == 3 ]] || continue
                chosen "IPv$family, $kind, 1:$weight, forwarded" $family in
                [[ $kind == route ]] || continue
                for number in 0 2 3; do
                    policy $number
                    chosen "IPv$family, $kind, 1:$weight, policy $number" $family
                done
            done
        done
        policy 1
        # Without carrier: the other end is down.
        none
        sysctl -qw net.ipv4.conf.a1.ignore_routes_with_linkdown=1 \
            net.ipv6.conf.a1.ignore_routes_with_linkdown=1
        route $family route 3
        ip -n b link set b1 down
        sleep 1.5
        chosen "IPv$family, route, 1:3, linkdown" $family
        ip -n b link set b1 up
        sleep 1.5
        chosen "IPv$family, route, 1:3, link up again" $family
        sysctl -qw net.ipv4.conf.a1.ignore_routes_with_linkdown=0 \
            net.ipv6.conf.a1.ignore_routes_with_linkdown=0
        ip link set a1 down
        chosen "IPv$family, route, 1:3, dead" $family
        ip link set a1 up
        ip address replace 2001:db8:91::1/64 dev a1 nodad
        ip neighbour replace 10.9.1.2 lladdr 02:00:00:00:00:02 dev a1
        ip neighbour replace 2001:db8:91::2 lladdr 02:00:00:00:00:02 dev a1
    done
}

all
if patched; then
    # Of paths that nothing is known about nobody loses anything.
    for score in 2 0; do
        sysctl -qw net.ipv4.fib_multipath_score=$score
        none
        route 4 route 3
        route 6 route 3
        sleep 1
        chosen "IPv4, route, 1:3" 4
        chosen "IPv6, route, 1:3" 6
    done
fi

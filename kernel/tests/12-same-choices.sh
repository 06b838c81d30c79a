#!/bin/bash
# Which next hops 10,000 random 5-tuples take, with a fixed hash seed: on the patched kernel with everything
# off, after everything was on, and with scores while nothing is known about any path, those that they take on
# the stock kernel. What that chose is in kernel/tests/data/choices (`kernel/scripts/test --choices` writes
# it), a line a case: a hash of all choices, and how many each device has got.
# mode: smp
# seconds: 1800
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
        resilient) ip nexthop add id 3 group "1/2,$weight" type resilient buckets 128 idle_timer 1 ;;
    esac
    ip -"$family" route add $dst nhid 3
}

none() {
    ip -4 route del 10.10.0.0/16 2>/dev/null
    ip -6 route del 2001:db8:10::/64 2>/dev/null
    ip nexthop flush >/dev/null 2>&1
}

# wanted NAME: what the stock kernel chose there.
wanted() { awk -v name="$1: " 'index($0, name) == 1 { print substr($0, length(name) + 1) }' /tests/choices; }

# chosen NAME FAMILY [in]
chosen() {
    local name=$1 to=10.10 from=10.8 line
    [[ $2 == 4 ]] || { to=2001:db8:10:0 from=2001:db8:8:0; }
    line=$(choices 10000 $to ${3:+c0 $from} | tr '\n' ' ')
    line=${line% }
    check "$name: made" "$(awk '{ for (i = 3; i <= NF; i += 2) n += $i; print n }' <<<"$line")" == 10000
    if patched; then
        same "$name$when: as on the stock kernel" "$line" "$(wanted "$name")"
    else
        echo "mountain-subtest: PASS choices: $name: $line"
    fi
}

# fresh FAMILY KIND WEIGHT: this route and no other.
fresh() {
    none
    route "$@"
}

# all_alive FAMILY KIND: both next hops are there.
all_alive() {
    local family=$1 kind=$2 weight number
    # An hour of them all would show nothing more to a debug build.
    local weights=(1 3) numbers=(0 1 2 3)
    ! debug_build || weights=(3) numbers=(1)
    for weight in "${weights[@]}"; do
        fresh "$family" "$kind" "$weight"
        for number in "${numbers[@]}"; do
            policy "$number"
            chosen "IPv$family, $kind, 1:$weight, policy $number" "$family"
        done
        policy 1
        chosen "IPv$family, $kind, 1:$weight, forwarded" "$family" in
    done
}

linkdown_ignored() {
    sysctl -qw net.ipv4.conf.a1.ignore_routes_with_linkdown="$1" \
        net.ipv6.conf.a1.ignore_routes_with_linkdown="$1"
}

# one_down FAMILY KIND: the second one without carrier (the other end is down), then down itself. A group
# loses it each time.
one_down() {
    local family=$1 kind=$2
    policy 1
    linkdown_ignored 1
    fresh "$family" "$kind" 3
    ip -n b link set b1 down
    sleep 1.5
    chosen "IPv$family, $kind, 1:3, linkdown" "$family"
    ip -n b link set b1 up
    sleep 1.5
    [[ $kind != route ]] ||
        chosen "IPv$family, $kind, 1:3, link up again" "$family"
    linkdown_ignored 0
    fresh "$family" "$kind" 3
    ip link set a1 down
    chosen "IPv$family, $kind, 1:3, dead" "$family"
    ip link set a1 up
    ip address replace 2001:db8:91::1/64 dev a1 nodad
    ip neighbour replace 10.9.1.2 lladdr 02:00:00:00:00:02 dev a1
    ip neighbour replace 2001:db8:91::2 lladdr 02:00:00:00:00:02 dev a1
}

# Buckets of a resilient group move when they have been idle for a second.
settle() { sleep "$([[ $kind == resilient ]] && echo 3 || echo 1)"; }

when=''
for family in 4 6; do
    for kind in route group resilient; do
        all_alive $family $kind
        one_down $family $kind
    done
done
if patched; then
    policy 1
    for family in 4 6; do
        for kind in route group resilient; do
            when=' (score 2, nothing known)'
            fresh $family $kind 3
            sysctl -qw net.ipv4.fib_multipath_score=2
            sleep 1
            chosen "IPv$family, $kind, 1:3, policy 1" $family
            # All by the first: the same route, otherwise.
            sysctl -qw net.ipv4.fib_multipath_score=1
            settle
            check "IPv$family, $kind: score 1: devices that are chosen" \
                "$(choices 1000 "$([[ $family == 4 ]] && echo 10.10 || echo 2001:db8:10:0)" | grep -c '^a[01] ')" == 1
            # Which buckets move is decided by their order only while all of them are idle.
            settle
            sysctl -qw net.ipv4.fib_multipath_score=2
            sleep 1
            sysctl -qw net.ipv4.fib_multipath_score=0
            settle
            when=' (after scores 1, 2 and 0)'
            chosen "IPv$family, $kind, 1:3, policy 1" $family
        done
    done
fi

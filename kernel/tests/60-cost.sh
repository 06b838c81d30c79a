#!/bin/bash
# Instructions for a UDP packet and a route look-up, less those of an empty system call, with everything
# off and with scored multipath on. kernel/scripts/test compares them with the stock kernel's.
# mode: cost
# shellcheck source=kernel/tests/lib.sh
. /tests/lib.sh

ip link set lo up
ip link add d0 type dummy
ip link add d1 type dummy
ip netns add far
ip link add v0 type veth peer name v1 netns far
n=0
for dev in d0 d1 v0; do
    n=$((n + 1))
    ip address add 192.0.$n.1/24 dev $dev
    ip address add 2001:db8:$n::1/64 dev $dev nodad
    ip link set $dev up
    ip neighbour replace 192.0.$n.2 lladdr 02:00:00:00:00:02 dev $dev
    ip neighbour replace 2001:db8:$n::2 lladdr 02:00:00:00:00:02 dev $dev
done
ip -n far link set v1 up
ip route add 10.1.0.0/16 nexthop via 192.0.1.2 dev d0 nexthop via 192.0.2.2 dev d1
ip -6 route add 2001:db8:99::/64 nexthop via 2001:db8:1::2 dev d0 nexthop via 2001:db8:2::2 dev d1
sysctl -qw net.ipv4.fib_multipath_hash_policy=1
sysctl -qw net.ipv4.fib_multipath_hash_seed=1 2>/dev/null

# figure NAME ARGUMENT...: what an empty system call does not explain.
figure() {
    local name=$1 value empty
    shift
    empty=$(cost nothing 100000)
    value=$(cost "$@") || value=''
    [[ -z $value ]] || value=$(awk "BEGIN { printf \"%.2f\", $value - $empty }")
    echo "mountain-figure: $name: ${value:-none}"
    check "$name: measured" "$value" ">" 0
}

all() {
    figure "$1, UDP into a dummy" send 100000 192.0.1.2
    figure "$1, UDP into a veth" send 100000 192.0.3.2
    figure "$1, UDP over multipath" send 100000 10.1.0.1
    figure "$1, UDP over multipath, IPv6" send 100000 2001:db8:99::1
    figure "$1, route look-up, multipath" connect 100000 10.1
}

all off
if sysctl -qw net.ipv4.fib_multipath_score=2 2>/dev/null; then
    all on
fi

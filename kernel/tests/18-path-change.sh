#!/bin/bash
# A TCP connection whose route changes from a path of 60 ms to one of 10 ms: what it says of the new path is that
# path's delay, from the first sample on, and not what is left of the old one in its smoothed RTT. Virtual time.
# mode: virtual
# kernel: patched
# debug: no
# shellcheck source=kernel/tests/lib.sh
. /tests/lib.sh
need iperf3

# a - b by a0 and a1; both speak from and to an address that is on neither.
for ns in a b; do
    ip netns add $ns
    ip -n $ns link set lo up
done
ip -n a address add 10.9.9.1/32 dev lo
ip -n b address add 10.10.0.1/32 dev lo
for i in 0 1; do
    ip link add a$i netns a type veth peer name b$i netns b
    ip -n a address add 10.8.$i.1/24 dev a$i
    ip -n b address add 10.8.$i.2/24 dev b$i
    ip -n a link set a$i up
    ip -n b link set b$i up
done
tc -n a qdisc replace dev a0 root netem delay 60ms limit 1000
tc -n a qdisc replace dev a1 root netem delay 10ms limit 1000
# b keeps no ACK back: with so few packets that would be most of what is seen.
ip -n b route add 10.9.9.1 via 10.8.1.1 quickack 1
ip netns exec a sysctl -qw net.ipv4.path_metrics=1

# by I: a's packets to b go by a$i.
by() { ip -n a route replace 10.10.0.1 via 10.8."$1".2 src 10.9.9.1; }
# of I COLUMN: what is known of that path.
of() {
    ip netns exec a cat /proc/net/path_metrics | awk -v dev="a$1" -v gw="10.8.$1.2" -v name="$2" '
        NR == 1 { for (i = 1; i <= NF; i++) column[$i] = i; next }
        $1 == dev && $2 == gw { print $column[name] }'
}

by 0
# The path's object is there before the connection uses it.
ip -n a route add 10.10.0.2 via 10.8.1.2
ip netns exec b iperf3 -s -1 >/dev/null &
sleep 0.5
# One packet every 50 ms: so few samples that what is left of the old path would stay for seconds.
ip netns exec a iperf3 -c 10.10.0.1 -b 160k -l 1000 -t 12 -i 0 >/tmp/iperf 2>&1 &
client=$!
sleep 4
same "the old path is known" "$(of 0 source)" stack
check "its delay, us" "$(of 0 delay)" "<=" 5000
same "the new one is not" "$(of 1 source)" none
by 1
worst='' known=0
for _ in $(seq 40); do
    sleep 0.1
    [[ $(of 1 source) == stack ]] || continue
    known=$((known + 1))
    delay=$(of 1 delay)
    [[ -n $worst && $worst -ge $delay ]] || worst=$delay
done
check "how often the new path was known" $known ">=" 20
check "the most that was said of its delay, us" "$worst" "<=" 5000
ended "the connection came to its end" $client

#!/bin/bash
# tcp_bbr's delta: range of the parameter; and what becomes of the queue when a link of 50 Mbit/s becomes
# one of 10. Virtual time, so that the emulated link is exact.
# mode: virtual
# kernel: patched
# seconds: 900
# shellcheck source=kernel/tests/lib.sh
. /tests/lib.sh
need iperf3

delta=/sys/module/tcp_bbr/parameters/delta
same "off by default" "$(cat $delta)" 0
for value in -1 3 x; do
    refused "$value is refused" sh -c "echo $value >$delta"
done

# a - r - b: the rate at r towards b, 20 ms each way on hops of their own, where no sender's queue is.
for ns in a r b; do
    ip netns add $ns
    ip -n $ns link set lo up
done
ip link add ar netns a type veth peer name ra netns r
ip link add rb netns r type veth peer name br netns b
ip -n a address add 192.0.2.1/24 dev ar
ip -n r address add 192.0.2.2/24 dev ra
ip -n r address add 198.51.100.2/24 dev rb
ip -n b address add 198.51.100.1/24 dev br
for end in a/ar r/ra r/rb b/br; do
    # `dev`: ip takes "br" for "broadcast".
    ip -n ${end%/*} link set dev ${end#*/} up
    ip netns exec ${end%/*} ethtool -K ${end#*/} gso off tso off gro off >/dev/null
done
ip -n a route add default via 192.0.2.2
ip -n b route add default via 198.51.100.2
ip netns exec r sysctl -qw net.ipv4.ip_forward=1
# The way back, and the first half of the round trip, at r's other side.
tc -n r qdisc add dev ra root netem delay 40ms limit 10000

rate() { tc -n r qdisc replace dev rb root tbf rate "$1" burst 5000 limit 4000000; }

# p95 of the round trip in ms from 0 to 3 s after the drop, less that of the idle link.
drop() {
    echo "$1" >$delta
    rate 50mbit
    ip netns exec b iperf3 -s -1 -D
    sleep 0.5
    ip netns exec a iperf3 -c 198.51.100.1 -C bbr -t 10 -i 0 >/tmp/iperf &
    local client=$!
    sleep 6
    rate 10mbit
    ip netns exec a ping -c 150 -i 0.02 -W 5 198.51.100.1 >/tmp/ping
    wait "$client"
    sed -n 's/.*time=\([0-9.]*\) ms/\1/p' /tmp/ping | sort -n | awk -v base="$base" '{ v[NR] = $1 }
        END { if (NR >= 100) printf "%.1f", v[int(NR * 0.95)] - base }'
}

base=$(ip netns exec a ping -c 3 -i 0.2 -W 5 198.51.100.1 | sed -n 's|.*= \([0-9.]*\)/.*|\1|p')
check "round trip of the idle link, ms" "$base" ">=" 40
declare -A queue
for value in 0 1 2; do
    queue[$value]=$(drop "$value")
    echo "delta $value: p95 of the queue in the 3 s after the drop: ${queue[$value]} ms"
    check "delta $value: the flow goes on, Mbit/s" \
        "$(sed -n 's|.* \([0-9.]*\) Mbits/sec.*receiver|\1|p' /tmp/iperf)" ">=" 15
done
echo 0 >$delta
check "off: the queue fills, ms" "${queue[0]}" ">=" 50
check "brake against off" \
    "$(awk -v a="${queue[2]}" -v b="${queue[0]}" 'BEGIN { if (a && b) print a / b }')" "<=" 0.6

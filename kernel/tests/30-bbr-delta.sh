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

# The rate at r towards s, 40 ms on the way back, at r's other side: no sender's queue is there.
router_hosts
for end in c/cr r/rc r/rs s/sr; do
    ip netns exec ${end%/*} ethtool -K ${end#*/} gso off tso off gro off >/dev/null
done
tc -n r qdisc add dev rc root netem delay 40ms limit 10000

rate() { tc -n r qdisc replace dev rs root tbf rate "$1" burst 5000 limit 4000000; }

# p95 of the round trip in ms from 0 to 3 s after the drop, less that of the idle link.
drop() {
    echo "$1" >$delta
    rate 50mbit
    ip netns exec s iperf3 -s -1 -D
    sleep 0.5
    ip netns exec c iperf3 -c 198.51.100.1 -C bbr -t 10 -i 0 >/tmp/iperf &
    local client=$!
    sleep 6
    rate 10mbit
    ip netns exec c ping -c 150 -i 0.02 -W 5 198.51.100.1 >/tmp/ping
    wait "$client"
    sed -n 's/.*time=\([0-9.]*\) ms/\1/p' /tmp/ping | sort -n | awk -v base="$base" '{ v[NR] = $1 }
        END { if (NR >= 100) printf "%.1f", v[int(NR * 0.95)] - base }'
}

base=$(ip netns exec c ping -c 3 -i 0.2 -W 5 198.51.100.1 | sed -n 's|.*= \([0-9.]*\)/.*|\1|p')
check "round trip of the idle link, ms" "$base" ">=" 40
declare -A queue
for value in 0 1 2; do
    queue[$value]=$(drop "$value")
    echo "delta $value: p95 of the queue in the 3 s after the drop: ${queue[$value]} ms"
    # KASAN's build carries 12 Mbit/s.
    check "delta $value: the flow goes on, Mbit/s" \
        "$(sed -n 's|.* \([0-9.]*\) Mbits/sec.*receiver|\1|p' /tmp/iperf)" ">=" "$(debug_build && echo 8 || echo 15)"
done
echo 0 >$delta
check "off: the queue fills, ms" "${queue[0]}" ">=" 50
check "brake against off" \
    "$(awk -v a="${queue[2]}" -v b="${queue[0]}" 'BEGIN { if (a && b) print a / b }')" "<=" 0.6

#!/bin/bash
# Harm of adaptive NAPI weights: how long pings on a second NAPI context wait while the first one of the same
# processor is flooded, p99 in each mode against off. Virtual time.
# mode: virtual
# kernel: patched
# debug: no
# netns: init
# seconds: 900
# shellcheck source=kernel/tests/lib.sh
. /tests/lib.sh
need mountain

# Floods come in by v1, pings by w1; both have a NAPI context in `dst`, polled on the only processor.
ip netns add src
ip netns add dst
for v in v w; do
    ip link add ${v}0 netns src type veth peer name ${v}1 netns dst
    # Only what comes from a peer without TSO goes through the NAPI context that a veth has with GRO.
    ip netns exec src ethtool -K ${v}0 tso off
    ip netns exec dst ethtool -K ${v}1 gro on
    ip -n src link set ${v}0 up
    ip -n dst link set ${v}1 up
done
ip -n src address add 192.0.2.1/24 dev v0
ip -n dst address add 192.0.2.2/24 dev v1
ip -n src address add 198.51.100.1/24 dev w0
ip -n dst address add 198.51.100.2/24 dev w1
ip netns exec src ping -q -c 1 -W 5 192.0.2.2 >/dev/null
ip netns exec src ping -q -c 1 -W 5 198.51.100.2 >/dev/null

weight() {
    sysctl -qw net.core.napi_adaptive_weight="$1"
    same "mode $1 is set" "$(sysctl -n net.core.napi_adaptive_weight)" "$1"
}

# What one processor sends itself it has received before it sends more, and nobody waits. So netem keeps the
# flood and lets go of 256 packets, a veth's ring, every 20 ms, all of them before the first is polled; and
# it keeps each ping for a time of its own, so that they arrive at all moments between two bursts. That time
# does not count: a ping is stamped behind netem.
sysctl -qw net.core.dev_weight_tx_bias=4
tc -n src qdisc replace dev v0 root netem delay 1us slot 20ms limit 256
tc -n src qdisc replace dev w0 root netem delay 13ms 10ms

# More than 256 in each 20 ms, with the processor idle for most of them.
flood() { exec ip netns exec src bash -c 'while :; do cost send 300 192.0.2.2 >/dev/null; sleep 0.013; done'; }

# pings MODE: 1000 more round trips in /tmp/rtt-MODE, and the works of the flooded context's polls in
# /tmp/works-MODE.
trace=/sys/kernel/tracing
pings() {
    weight "$1"
    flood &
    local flood=$!
    sleep 1
    echo >$trace/trace
    echo 1 >$trace/events/napi/napi_poll/enable
    ip netns exec src mountain ping -4 -c 1000 -i 11ms -o /tmp/run 198.51.100.2 >/dev/null
    jq '.samples.rtt_us[] | values' /tmp/run >>"/tmp/rtt-$1"
    echo 0 >$trace/events/napi/napi_poll/enable
    kill "$flood"
    wait "$flood" 2>/dev/null
    sed -n 's/.*device v1 work \([0-9]*\) budget .*/\1/p' $trace/trace >>"/tmp/works-$1"
}

# wait_of MODE: p99 of what the round trips have above the least, us; largest_work MODE: of a poll.
wait_of() {
    sort -n "/tmp/rtt-$1" | awk '{ v[NR] = $1 }
        END { print (NR >= 5940 ? int(v[int(NR * 0.99)] - v[1]) : "none") }'
}
largest_work() { sort -n "/tmp/works-$1" | tail -n 1; }

# A few in a hundred pings come amid a burst, and p99 stands on them. The modes in turn, there and back.
for mode in 0 1 2 2 1 0 0 1 2 2 1 0 0 1 2 2 1 0; do pings $mode; done
weight 0
sysctl -qw net.core.dev_weight_tx_bias=1
off=$(wait_of 0) shrink=$(wait_of 1) large=$(wait_of 2)
echo "p99 of a second context's wait: off $off us, 1: $shrink us, 2: $large us"
check "off: packets in the largest poll of the flood" "$(largest_work 0)" == 64
check "mode 1: packets in the largest poll of the flood" "$(largest_work 1)" == 64
# Only a budget of 256, the next after 128, allows that; how many of a burst the ring has held does not matter.
check "mode 2: packets in the largest poll of the flood" "$(largest_work 2)" ">" 128
check "off: wait, us" "$off" ">" 0
# 1 must do no harm; 2 is documented as harmful, and shows that harm would be seen.
check "mode 1 against off" "$(awk -v a="$shrink" -v b="$off" 'BEGIN { if (a && b) print a / b }')" "<=" 1.05
check "mode 2 against off" "$(awk -v a="$large" -v b="$off" 'BEGIN { if (a && b) print a / b }')" ">" 1

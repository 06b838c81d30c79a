#!/bin/bash
# net.sctp.path_score: an association with two addresses at each end leaves a path with spikes of delay and
# returns; without it, and where the application has asked for the path, it stays. Virtual time.
# mode: virtual
# kernel: patched
# seconds: 900
# shellcheck source=kernel/tests/lib.sh
. /tests/lib.sh

for ns in a b; do
    ip netns add $ns
    ip -n $ns link set lo up
    # Heartbeats measure what is not in use: usually every 30 s.
    ip netns exec $ns sysctl -qw net.sctp.hb_interval=2000
done
for i in 0 1; do
    ip link add a$i netns a type veth peer name b$i netns b
    ip -n a address add 10.9.$i.1/24 dev a$i
    ip -n b address add 10.9.$i.2/24 dev b$i
    ip -n a link set a$i up
    ip -n b link set b$i up
done

# With a rate netem keeps the packets' order.
delay() { tc -n a qdisc replace dev "a$1" root netem delay "$2ms" rate 100mbit limit 1000; }
spikes() {
    while :; do
        delay 0 70
        sleep 0.1
        delay 0 10
        sleep 0.2
    done
}
# begin COMMAND: in the background, until `finish`; afterwards both paths are as late as usual.
begin() {
    "$1" &
    pid=$!
}
finish() {
    kill $pid
    wait $pid 2>/dev/null
    delay 0 10
    delay 1 10
}
# sent DEVICE packets|bytes
sent() { ip -n a -s -j link show dev "$1" | jq ".[0].stats64.tx.$2"; }
# by_first SECONDS [bytes]: of the packets that are sent in them, or of their bytes, in percent, by a0.
by_first() {
    local a0 a1 what=${2:-packets}
    a0=$(sent a0 "$what") a1=$(sent a1 "$what")
    sleep "$1"
    a0=$(($(sent a0 "$what") - a0)) a1=$(($(sent a1 "$what") - a1))
    awk -v a="$a0" -v b="$a1" 'BEGIN { if (a + b >= 20) printf "%.0f", 100 * a / (a + b) }'
}

sctp=/proc/sys/net/sctp/path_score
same "off by default" "$(ip netns exec a cat $sctp)" 0
for value in -1 2; do
    refused "$value is refused" ip netns exec a sysctl -w net.sctp.path_score=$value
done

# talk SECONDS [pin|three]
talk() {
    ip netns exec b sctp_talk serve 7000 &
    sleep 0.5
    ip netns exec a sctp_talk send 10.9.0.2 7000 "$@" &
    talk=$!
    # Both addresses are confirmed.
    sleep 4
}

delay 0 10
delay 1 10
talk 16
check "off: by the primary path, %" "$(by_first 5)" ">=" 90
begin spikes
sleep 2
check "off: by the primary path with spikes, %" "$(by_first 3)" ">=" 90
finish
ended "off: it came to its end" "$talk"
sleep 2

ip netns exec a sysctl -qw net.sctp.path_score=1
same "of the other namespace" "$(ip netns exec b cat $sctp)" 0
# On a debug build each tc takes its time, and so do the spikes: they leave more behind.
back=15
! debug_build || back=40
talk $((30 + back))
check "by the primary path, %" "$(by_first 5)" ">=" 90
begin spikes
sleep 2
first=$(by_first 1)
echo "2 s after spikes began: $first % by the primary path"
check "2 s after spikes began, by the primary path, %" "$first" "<=" 20
echo "in the 6 s after that: $(by_first 6) %"
finish
# Three heartbeats, each after 2 s, the RTO of 1 s, and up to as much by chance.
sleep $back
check "$back s after the last spike, by the primary path, %" "$(by_first 3)" ">=" 90
ended "it came to its end" "$talk"
sleep 2

talk 15 pin
begin spikes
sleep 2
check "asked for: by the primary path with spikes, %" "$(by_first 3)" ">=" 90
finish
ended "asked for: it came to its end" "$talk"
sleep 2

# A SACK for a lone packet of two messages is kept back for up to 200 ms: that is not the path's doing. In bytes,
# for there are many heartbeats among so few packets.
talk 40 three
check "messages in one packet: by the primary path, %" "$(by_first 30 bytes)" ">=" 90
ended "messages in one packet: it came to its end" "$talk"
sleep 2

# Turned off under way.
talk 20
begin spikes
sleep 2
check "left again, by the primary path, %" "$(by_first 1)" "<=" 20
ip netns exec a sysctl -qw net.sctp.path_score=0
sleep 1
check "turned off: by the primary path, %" "$(by_first 3)" ">=" 90
finish
ended "turned off: it came to its end" "$talk"
sleep 2

# With heartbeats every 30 s, as usual, both paths late and the primary later: what is known of it outlasts
# the wait for the next heartbeat, so that the association does not come back just to find that out again.
for ns in a b; do ip netns exec $ns sysctl -qw net.sctp.hb_interval=30000; done
ip netns exec a sysctl -qw net.sctp.path_score=1
both() {
    while :; do
        delay 0 140
        delay 1 40
        sleep 0.1
        delay 0 10
        delay 1 10
        sleep 0.2
    done
}
talk 40
begin both
sleep 6
check "heartbeats every 30 s: by the later primary path in 25 s, %" "$(by_first 25)" "<=" 10
finish
ended "heartbeats every 30 s: it came to its end" "$talk"
ip netns exec a sysctl -qw net.sctp.path_score=0

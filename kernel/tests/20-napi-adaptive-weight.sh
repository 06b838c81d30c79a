#!/bin/bash
# net.core.napi_adaptive_weight: budgets in every mode, by the selftest of the series; nothing is lost when a
# context goes up and down under a flood, nor by virtio_net, whose ring a budget of mode 2 could empty: there
# each packet is accounted for, as far as the socket that it reaches or is refused by.
# mode: smp
# kernel: patched
# selftests: yes
# netns: init
# nics: 1
# seconds: 600
# shellcheck source=kernel/tests/lib.sh
. /tests/lib.sh

weight() {
    sysctl -qw net.core.napi_adaptive_weight="$1"
    same "mode $1 is set" "$(sysctl -n net.core.napi_adaptive_weight)" "$1"
}
# lost FILE: what ping says, in percent.
lost() { sed -n 's/.* \([0-9.]*\)% packet loss.*/\1/p' "$1"; }

selftest net/napi_adaptive_weight.sh

two_hosts
# Only what comes from a peer without TSO goes through vb's NAPI context.
ip netns exec a ethtool -K va tso off
ip netns exec b ethtool -K vb gro on
for value in 1 2; do
    weight $value
    ip netns exec a ping -q -f -c 20000 -W 5 192.0.2.2 >/tmp/flood &
    flood=$!
    for _ in $(seq 20); do
        ip netns exec b ethtool -K vb gro off
        ip netns exec b ethtool -K vb gro on
    done
    wait "$flood"
    works "mode $value: replies after 20 times off and on" \
        ip netns exec a ping -q -c 20 -i 0.02 -W 5 192.0.2.2
    check "mode $value: most of a flood came back, %" "$(lost /tmp/flood)" "<=" 5
done
weight 0

# A pair of virtio_net devices on one wire, each in a namespace.
devices=()
for dev in /sys/class/net/*; do
    [[ $(basename "$(readlink "$dev/device/driver")") != virtio_net ]] || devices+=("$(basename "$dev")")
done
check "virtio_net devices" "${#devices[@]}" == 2
n=0
for ns in c d; do
    ip netns add $ns
    ip link set "${devices[n]}" netns $ns
    n=$((n + 1))
    ip -n $ns address add 198.51.100.$n/24 dev "${devices[n - 1]}"
    ip -n $ns link set "${devices[n - 1]}" up
done
works "virtio_net: ping" ip netns exec c ping -q -c 3 -i 0.2 -W 5 198.51.100.2

# counter NS PROTOCOL NAME: of /proc/net/snmp.
counter() {
    awk -v protocol="$2:" -v name="$3" '$1 == protocol {
        if (n++) print $column
        else for (i = 1; i <= NF; i++) if ($i == name) column = i
    }' <(ip netns exec "$1" cat /proc/net/snmp)
}
# counters: requests sent, received, answered, refused; answers received; datagrams sent, received.
counters() {
    counter c Icmp OutEchos
    counter d Icmp InEchos
    counter d Icmp OutEchoReps
    counter d Icmp OutErrors
    counter c Icmp InEchoReps
    counter c Udp OutDatagrams
    counter d Udp NoPorts
}
# difference INDEX: of that counter, from `before` to `after`.
difference() { echo $((after[$1] - before[$1])); }
dropped() { ip -n "$1" -j -s link show dev "$2" | jq '.[0].stats64 | .rx.dropped + .tx.dropped'; }

trace=/sys/kernel/tracing
for value in 0 1 2; do
    weight $value
    mapfile -t before < <(counters)
    # Fewer at once than the kernel's socket for ICMP may have on their way, some 150: what is not answered
    # then has been lost. ping's own send buffer would hold a packet or two.
    ip netns exec c ping -q -f -l 100 -S 400000 -c 5000 -W 5 198.51.100.2 >/tmp/flood
    check "mode $value: virtio_net: most of a flood came back, %" "$(lost /tmp/flood)" "<=" 5
    # Nearly as many as a ring holds. In every mode, off too, that socket refuses some of the answers, and more
    # find no room in ping's own: only what has come as far as these two is counted.
    ip netns exec c ping -q -f -l 200 -S 400000 -c 5000 -W 5 198.51.100.2 >/tmp/flood
    works "mode $value: virtio_net: replies afterwards" \
        ip netns exec c ping -q -c 20 -i 0.02 -W 5 198.51.100.2
    mapfile -t after < <(counters)
    echo "mode $value: virtio_net: of 200 requests at once $(lost /tmp/flood) % not answered;" \
        "$(difference 3) answers refused by their socket"
    check "mode $value: virtio_net: requests" "$(difference 0)" ">=" 10020
    check "mode $value: virtio_net: requests lost" $(($(difference 0) - $(difference 1))) == 0
    check "mode $value: virtio_net: neither answered nor refused" \
        $(($(difference 1) - $(difference 2) - $(difference 3))) == 0
    check "mode $value: virtio_net: answers lost" $(($(difference 2) - $(difference 4))) == 0

    # One way, as fast as it goes, while another processor polls.
    echo >$trace/trace
    echo 1 >$trace/events/napi/napi_poll/enable
    mapfile -t before < <(counters)
    works "mode $value: virtio_net: datagrams" ip netns exec c taskset 2 cost send 20000 198.51.100.2
    works "mode $value: virtio_net: replies after them" \
        ip netns exec c ping -q -c 20 -i 0.02 -W 5 198.51.100.2
    mapfile -t after < <(counters)
    echo 0 >$trace/events/napi/napi_poll/enable
    most=$(sed -n "s/.*device ${devices[1]} work [0-9]* budget //p" $trace/trace | sort -n | tail -n 1)
    echo "mode $value: virtio_net: highest budget $most"
    check "mode $value: virtio_net: datagrams sent" "$(difference 5)" ">=" 22000
    check "mode $value: virtio_net: datagrams lost" $(($(difference 5) - $(difference 6))) == 0
    check "mode $value: virtio_net: dropped by the devices" \
        $(($(dropped c "${devices[0]}") + $(dropped d "${devices[1]}"))) == 0
    case $value in
        0) check "mode 0: virtio_net: highest budget" "$most" == 64 ;;
        1) check "mode 1: virtio_net: highest budget" "$most" "<=" 64 ;;
        # That it was a flood: more was waiting than the registered weight.
        2) check "mode 2: virtio_net: highest budget" "$most" ">" 64 ;;
    esac
done
weight 0

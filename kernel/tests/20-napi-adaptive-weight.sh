#!/bin/bash
# net.core.napi_adaptive_weight: budgets in every mode, by the selftest of the series; nothing is lost when a
# context goes up and down under a flood, nor by virtio_net, whose ring a budget of mode 2 could empty.
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
for value in 0 1 2; do
    weight $value
    # As many at once as a ring holds; ping's own send buffer would hold a packet or two.
    ip netns exec c ping -q -f -l 200 -S 400000 -c 10000 -W 5 198.51.100.2 >/tmp/flood
    check "mode $value: virtio_net: most of a flood came back, %" "$(lost /tmp/flood)" "<=" 5
    works "mode $value: virtio_net: replies afterwards" \
        ip netns exec c ping -q -c 20 -i 0.02 -W 5 198.51.100.2
done
weight 0

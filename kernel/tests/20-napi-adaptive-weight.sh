#!/bin/bash
# net.core.napi_adaptive_weight: budgets in every mode, by the selftest of the series; and nothing is lost
# when a context goes up and down under a flood.
# mode: smp
# kernel: patched
# selftests: yes
# shellcheck source=kernel/tests/lib.sh
. /tests/lib.sh

selftest net/napi_adaptive_weight.sh

two_hosts
ip netns exec b ethtool -K vb gro on
for value in 1 2; do
    sysctl -qw net.core.napi_adaptive_weight=$value
    ip netns exec a ping -q -f -c 20000 -W 5 192.0.2.2 >/tmp/flood &
    flood=$!
    for _ in $(seq 20); do
        ip netns exec b ethtool -K vb gro off
        ip netns exec b ethtool -K vb gro on
    done
    wait "$flood"
    works "mode $value: replies after 20 times off and on" \
        ip netns exec a ping -q -c 20 -i 0.02 -W 5 192.0.2.2
    check "mode $value: most of a flood came back, %" \
        "$(sed -n 's/.* \([0-9.]*\)% packet loss.*/\1/p' /tmp/flood)" "<=" 5
done
sysctl -qw net.core.napi_adaptive_weight=0

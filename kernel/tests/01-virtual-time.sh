#!/bin/bash
# Virtual time: a delay of 10 ms each way is 20 ms, to the packet, whatever the machine does.
# mode: virtual
# shellcheck source=kernel/tests/lib.sh
. /tests/lib.sh

two_hosts
for side in a b; do
    tc -n "$side" qdisc add dev "v$side" root netem delay 10ms
done
# ARP first.
ip netns exec a ping -c 1 -W 5 192.0.2.2 >/dev/null
rtt=$(ip netns exec a ping -c 20 -i 0.2 -W 5 192.0.2.2 | sed -n 's|.*= \([0-9.]*\)/\([0-9.]*\)/\([0-9.]*\)/.*|\1 \3|p')
check "smallest round trip, ms" "${rtt% *}" ">=" 20
check "largest round trip, ms" "${rtt#* }" "<=" 21.5

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
# Not into a pipe: on the one processor what begins to read there would delay the first packet.
ip netns exec a ping -c 20 -i 0.2 -W 5 192.0.2.2 >/tmp/ping
rtt=$(sed -n 's|.*= \([0-9.]*\)/\([0-9.]*\)/\([0-9.]*\)/.*|\1 \3|p' /tmp/ping)
check "smallest round trip, ms" "${rtt% *}" ">=" 20
check "largest round trip, ms" "${rtt#* }" "<=" 21.5

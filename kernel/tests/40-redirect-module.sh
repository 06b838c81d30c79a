#!/bin/bash
# The module mountain_redirect: UDP and TCP, IPv4 and IPv6, checksums with and without offloads, fragments,
# statistics, namespaces; and nothing left when it is removed under load.
# mode: smp
# seconds: 600
# shellcheck source=kernel/tests/lib.sh
. /tests/lib.sh
need iperf3 mountain
[[ -e /lib/modules/mountain_redirect.ko ]] || skip "no module in the machine"

# c - r - s: clients send to 192.0.2.2:5000 and 2001:db8:1::2:5000 of r, s listens at port 5201.
for ns in c r s; do
    ip netns add $ns
    ip -n $ns link set lo up
done
ip link add cr netns c type veth peer name rc netns r
ip link add rs netns r type veth peer name sr netns s
ip -n c address add 192.0.2.1/24 dev cr
ip -n r address add 192.0.2.2/24 dev rc
ip -n r address add 198.51.100.2/24 dev rs
ip -n s address add 198.51.100.1/24 dev sr
ip -n c address add 2001:db8:1::1/64 dev cr nodad
ip -n r address add 2001:db8:1::2/64 dev rc nodad
ip -n r address add 2001:db8:2::2/64 dev rs nodad
ip -n s address add 2001:db8:2::1/64 dev sr nodad
for end in c/cr r/rc r/rs s/sr; do ip -n ${end%/*} link set ${end#*/} up; done
ip -n c route add default via 192.0.2.2
ip -n s route add default via 198.51.100.2
ip -n c -6 route add default via 2001:db8:1::2
ip -n s -6 route add default via 2001:db8:2::2
ip netns exec r sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1

redirect() { nsenter --net=/run/netns/r mountain redirect "$@"; }
# from4 PROTO, from6 PROTO: add the rule.
from4() { redirect add --backend module --proto "$1" --from 192.0.2.2:5000 --to 198.51.100.1:5201; }
from6() { redirect add --backend module --proto "$1" --from '[2001:db8:1::2]:5000' --to '[2001:db8:2::1]:5201'; }
counted() { redirect stats --json | jq "[.. | objects | select(has(\"forward\")) | .$1] | add"; }
# Bad checksums that s has seen.
bad() { ip netns exec s nstat -asz | awk '/(Tcp|Udp6?)InCsumErrors/ { n += $2 } END { print n + 0 }'; }

# transfer ADDRESS ARGUMENT...: iperf3's exit code.
transfer() {
    ip netns exec s iperf3 -s -1 -D
    sleep 0.5
    ip netns exec c timeout 60 iperf3 -c "$1" -p 5000 "${@:2}" >/tmp/iperf
    local code=$?
    sleep 0.2
    return "$code"
}

refused "without the module" from4 tcp
works "insmod" insmod /lib/modules/mountain_redirect.ko
refused "a second time" insmod /lib/modules/mountain_redirect.ko

for proto in tcp udp; do
    works "rule, $proto, IPv4" from4 $proto
    works "rule, $proto, IPv6" from6 $proto
done
refused "two rules with one target" \
    redirect add --backend module --proto tcp --from 192.0.2.2:5001 --to 198.51.100.1:5201
refused "a source that has to be rewritten" redirect add --backend module --snat always --proto tcp \
    --from 192.0.2.2:5002 --to 198.51.100.1:5202

# With offloads: packets with half a checksum, and trains of segments.
works "TCP, IPv4" transfer 192.0.2.2 -n 20M
works "TCP, IPv4, back" transfer 192.0.2.2 -n 20M -R
works "TCP, IPv6" transfer 2001:db8:1::2 -n 20M
works "TCP, IPv6, back" transfer 2001:db8:1::2 -n 20M -R
works "UDP, IPv4" transfer 192.0.2.2 -u -b 20M -l 1200 -n 4M
works "UDP, IPv6, back" transfer 2001:db8:1::2 -u -b 20M -l 1200 -n 4M -R
# Each datagram in fragments.
works "UDP in fragments, IPv4" transfer 192.0.2.2 -u -b 20M -l 4000 -n 4M
works "UDP in fragments, IPv6" transfer 2001:db8:1::2 -u -b 20M -l 4000 -n 4M
check "lost in fragments, %" "$(sed -n 's/.*(\([0-9.]*\)%).*receiver.*/\1/p' /tmp/iperf)" "<=" 5
# Whole checksums, as a network card leaves them.
for end in c/cr r/rc r/rs s/sr; do
    ip netns exec ${end%/*} ethtool -K ${end#*/} tx off rx off gso off tso off gro off >/dev/null
done
works "TCP, IPv4, without offloads" transfer 192.0.2.2 -n 5M
works "TCP, IPv6, without offloads, back" transfer 2001:db8:1::2 -n 5M -R
works "UDP, IPv4, without offloads" transfer 192.0.2.2 -u -b 20M -l 1200 -n 2M
check "wrong checksums at the server" "$(bad)" == 0
check "packets forward" "$(counted forward.packets)" ">" 1000
check "packets back" "$(counted reply.packets)" ">" 1000
# Who it is not for.
refused "another namespace has no rules" \
    sh -c 'nsenter --net=/run/netns/c mountain redirect list | grep -q 192.0.2.2'
refused "another port is not redirected" \
    ip netns exec c timeout 5 bash -c 'exec 3<>/dev/tcp/192.0.2.2/5003'

# Removed 200 times while packets go through its hooks and rules come and go.
redirect del --all >/dev/null
ip netns exec s iperf3 -s -D
ip netns exec c ping -q -f -w 300 198.51.100.1 >/dev/null &
flood=$!
failed=0
for n in $(seq 200); do
    lsmod | grep -q mountain_redirect || insmod /lib/modules/mountain_redirect.ko || failed=$((failed + 1))
    from4 udp >/dev/null && from6 tcp >/dev/null || failed=$((failed + 1))
    # shellcheck disable=SC2016
    ip netns exec c bash -c 'for i in $(seq 20); do echo x >/dev/udp/192.0.2.2/5000; done' 2>/dev/null
    # A rule that is there must not hold it; half of the times the rules go first.
    [[ $((n % 2)) -eq 0 ]] || redirect del --all >/dev/null
    rmmod mountain_redirect || failed=$((failed + 1))
    [[ $((n % 2)) -ne 0 ]] || redirect del --all >/dev/null
done
kill $flood
check "failures in 200 rounds" "$failed" == 0
works "the flood's way is still open" ip netns exec c ping -q -c 3 -W 5 198.51.100.1
refused "it is gone" grep -q mountain_redirect /proc/modules
works "a namespace ends with its rules" insmod /lib/modules/mountain_redirect.ko
from4 tcp >/dev/null
ip netns del r
works "and the module after it" rmmod mountain_redirect

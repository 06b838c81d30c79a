#!/bin/bash
# The module mountain_redirect: UDP and TCP, IPv4 and IPv6, checksums with and without offloads, fragments,
# statistics, namespaces; and nothing left when it is removed under load.
# mode: smp
# seconds: 1800
# shellcheck source=kernel/tests/lib.sh
. /tests/lib.sh
need iperf3
[[ -e /lib/modules/mountain_redirect.ko ]] || skip "no module in the machine"

# Clients send to 192.0.2.2:5000 and 2001:db8:1::2:5000 of r, s listens at port 5201.
router_hosts

rule() { ip netns exec r mtnrule "$@"; }
# all_rules: 5000 to 5201, both protocols and families, numbers 1 to 4.
all_rules() {
    rule add 1 tcp 192.0.2.2 5000 198.51.100.1 5201 &&
        rule add 2 udp 192.0.2.2 5000 198.51.100.1 5201 &&
        rule add 3 tcp 2001:db8:1::2 5000 2001:db8:2::1 5201 &&
        rule add 4 udp 2001:db8:1::2 5000 2001:db8:2::1 5201
}
counted() { rule get | awk -v column="$1" '{ n += $column } END { print n + 0 }'; }
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

refused "without the module" all_rules
works "insmod" insmod /lib/modules/mountain_redirect.ko
refused "insmod a second time" insmod /lib/modules/mountain_redirect.ko
works "rules" all_rules
# refused_with NAME ERRNO ARGUMENT...
refused_with() {
    local name=$1 errno=$2 code=0
    shift 2
    rule "$@" 2>/dev/null || code=$?
    check "refused: $name" "$code" == "$errno"
}
refused_with "a number twice" 17 add 1 tcp 192.0.2.2 5001 198.51.100.1 5202
refused_with "an address twice" 17 add 9 tcp 192.0.2.2 5000 198.51.100.1 5202
refused_with "a target twice" 17 add 9 tcp 192.0.2.2 5001 198.51.100.1 5201
refused_with "port 0" 22 add 9 tcp 192.0.2.2 0 198.51.100.1 5202
refused_with "two families" 22 add 9 tcp 192.0.2.2 5001 2001:db8:2::1 5202
refused_with "multicast" 22 add 9 udp 224.0.0.9 5001 198.51.100.1 5202
refused_with "to itself" 22 add 9 tcp 192.0.2.2 5001 192.0.2.2 5001
refused_with "no address" 22 add 9 tcp nothing 5001 198.51.100.1 5202
refused_with "too large a number" 34 add 65536 tcp 192.0.2.2 5001 198.51.100.1 5202
refused_with "deleting what is not there" 2 del 9
check "rules that are there" "$(rule get | wc -l)" == 4

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
check "packets forward" "$(counted 2)" ">" 1000
check "packets back" "$(counted 3)" ">" 1000
check "dropped" "$(counted 4)" == 0
# Who it is not for.
check "rules of another namespace" "$(ip netns exec c mtnrule get | wc -l)" == 0
refused "another port is not redirected" \
    ip netns exec c timeout 5 bash -c 'exec 3<>/dev/tcp/192.0.2.2/5003'

# A rule of one device is for what comes in there only, and goes before one without.
rule del
rc=$(ip -n r -o link show rc | cut -d : -f 1)
rs=$(ip -n r -o link show rs | cut -d : -f 1)
works "rule of the clients' device" rule add 1 tcp 192.0.2.2 5000 198.51.100.1 5201 "$rc"
works "rule of any device, to nobody" rule add 2 tcp 192.0.2.2 5000 198.51.100.1 9
works "TCP by the device's rule" transfer 192.0.2.2 -n 1M
rule del 1
works "rule of another device" rule add 1 tcp 192.0.2.2 5000 198.51.100.1 5201 "$rs"
refused "TCP by another device's rule" transfer 192.0.2.2 -n 1M
rule del

# As `mountain redirect` does it.
need mountain
redirect() { nsenter --net=/run/netns/r mountain redirect "$@"; }
works "mountain redirect add" redirect add --backend module --proto tcp --from 192.0.2.2:5000 \
    --to 198.51.100.1:5201
works "TCP" transfer 192.0.2.2 -n 1M
check "mountain redirect stats" \
    "$(redirect stats --json | jq '[.rules[].forward.packets] | add')" ">" 10
refused "a source that has to be rewritten" redirect add --backend module --snat always \
    --proto tcp --from 192.0.2.2:5002 --to 198.51.100.1:5202
works "mountain redirect del" redirect del --all
check "rules afterwards" "$(rule get | wc -l)" == 0

# Its tracepoint, with rules and without.
tracing=/sys/kernel/tracing
[[ -d $tracing/events ]] || mount -t tracefs tracefs $tracing
traced() { grep -c 'mtn_redirect_packet: rule 9 forward udp' $tracing/trace; }
echo 1 >$tracing/events/mtn_redirect/mtn_redirect_packet/enable
ip netns exec c bash -c 'echo -n x >/dev/udp/192.0.2.2/5009'
check "traced without a rule" "$(traced)" == 0
rule add 9 udp 192.0.2.2 5009 198.51.100.1 5209
ip netns exec c bash -c 'for i in 1 2 3; do echo -n x >/dev/udp/192.0.2.2/5009; done'
check "traced" "$(traced)" == 3
echo 0 >$tracing/events/mtn_redirect/mtn_redirect_packet/enable
ip netns exec c bash -c 'echo -n x >/dev/udp/192.0.2.2/5009'
check "traced after it was turned off" "$(traced)" == 3
echo >$tracing/trace
rule del

# Removed 200 times while packets go through its hooks. Other hooks stay there meanwhile, so that the kernel
# does not patch its code at each round: emulated processors that run side by side fall over that now and
# then (a breakpoint that is not there any more).
for hook in prerouting input forward output postrouting; do
    works "another hook: $hook" ip netns exec r nft "table inet other {
        chain $hook { type filter hook $hook priority 100; }
    }"
done
pids=()
for address in 192.0.2.2 2001:db8:1::2; do
    ip netns exec c bash -c "while :; do echo x >/dev/udp/$address/5000; done" 2>/dev/null &
    pids+=($!)
done
failed=0
for n in $(seq 200); do
    [[ -d /sys/module/mountain_redirect ]] || insmod /lib/modules/mountain_redirect.ko ||
        failed=$((failed + 1))
    all_rules || failed=$((failed + 1))
    sleep 0.02
    # Half of the times the rules go first; the other half they must not hold it.
    [[ $((n % 2)) -eq 0 ]] || rule del || failed=$((failed + 1))
    rmmod mountain_redirect || failed=$((failed + 1))
done
check "failures in 200 rounds" "$failed" == 0
insmod /lib/modules/mountain_redirect.ko
all_rules
sleep 1
check "packets at the end of it" "$(counted 2)" ">" 0
kill "${pids[@]}"
ip netns del r
works "removed after a namespace that had rules" rmmod mountain_redirect

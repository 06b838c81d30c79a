#!/bin/bash
# The module mountain_redirect and checksums: UDP without one stays without, a sum that would become 0 does not
# look like none, a packet that comes with its own sum (CHECKSUM_COMPLETE, from a GRE tunnel that checks) keeps
# a right one; and a stateful firewall beside it: answers come from the address that was spoken to.
# mode: smp
# seconds: 600
# shellcheck source=kernel/tests/lib.sh
. /tests/lib.sh
need iperf3 udp_talk
[[ -e /lib/modules/mountain_redirect.ko ]] || skip "no module in the machine"

# Clients speak to port 5000 of r, s listens at 5201. And a tunnel from c to r.
router_hosts
ip -n c tunnel add tun mode gre local 192.0.2.1 remote 192.0.2.2 csum
ip -n r tunnel add tun mode gre local 192.0.2.2 remote 192.0.2.1 csum
ip -n c address add 203.0.113.1/24 dev tun
ip -n r address add 203.0.113.2/24 dev tun
ip -n c address add 2001:db8:3::1/64 dev tun nodad
ip -n r address add 2001:db8:3::2/64 dev tun nodad
for ns in c r; do ip -n $ns link set tun up; done

# The first connection makes the kernel patch its code (net_get_random_once()), at which emulated processors
# that run side by side may fall over: now, while nothing else is going on.
for address in 127.0.0.1 ::1; do
    ip netns exec c bash -c "exec 3<>/dev/tcp/$address/9" 2>/dev/null
    sleep 2
done
insmod /lib/modules/mountain_redirect.ko
rule() { ip netns exec r mtnrule add "$@"; }
works "rules" rule 1 udp 192.0.2.2 5000 198.51.100.1 5201
works "rules, TCP" rule 2 tcp 192.0.2.2 5000 198.51.100.1 5201
works "rules, IPv6" rule 3 udp 2001:db8:1::2 5000 2001:db8:2::1 5201
# Out of the tunnel to r itself.
works "rules, tunnel" rule 4 udp 203.0.113.2 5000 198.51.100.2 5202
works "rules, tunnel, IPv6" rule 5 udp 2001:db8:3::2 5000 2001:db8:2::2 5202

# What is on the wire: at the server from r, and at the client.
for end in c/sport/5000 s/dport/5201; do
    IFS=/ read -r ns field port <<<"$end"
    ip netns exec "$ns" nft "table inet look {
        counter none { }; counter some { }; counter ones { }
        chain input {
            type filter hook input priority 0
            udp $field $port udp checksum 0 counter name none
            udp $field $port udp checksum != 0 counter name some
            udp $field $port udp checksum 0xffff counter name ones
        }
    }"
done
# seen NS COUNTER: packets, since the last call.
seen() { ip netns exec "$1" nft -j reset counter inet look "$2" | jq '[.nftables[].counter?.packets] | add'; }
bad() { ip netns exec "$1" nstat -asz | awk '/(Tcp|Udp6?)InCsumErrors/ { n += $2 } END { print n + 0 }'; }

servers=()
# serve NS ADDRESS PORT [nocheck]: what it says is in /tmp/served.
serve() {
    : >/tmp/served
    ip netns exec "$1" udp_talk serve "${@:2}" >>/tmp/served &
    servers+=($!)
    sleep 0.5
}
stop() {
    kill "${servers[@]}"
    wait "${servers[@]}" 2>/dev/null
    servers=()
}
ask() { ip netns exec c udp_talk "$@"; }

# Both ways with and without a checksum.
without_checksum() {
    local what
    for what in "198.51.100.1 192.0.2.2" "2001:db8:2::1 2001:db8:1::2"; do
        read -r target address <<<"$what"
        serve s "$target" 5201 nocheck
        same "$1: $address answers, without checksums" "$(ask ask "$address" 5000 1000 nocheck)" "$address 5000"
        check "$1: $address: 0 at the server" "$(seen s none)" == 1
        check "$1: $address: 0 at the client" "$(seen c none)" == 1
        same "$1: $address answers, without a checksum" "$(ask ask "$address" 5000 1000)" "$address 5000"
        check "$1: $address: a sum at the server" "$(seen s none)" == 0
        check "$1: $address: 0 at the client only" "$(seen c none)" == 1
        stop
        serve s "$target" 5201
        same "$1: $address is asked without" "$(ask ask "$address" 5000 1000 nocheck)" "$address 5000"
        check "$1: $address: 0 at the server only" "$(seen s none)" == 1
        check "$1: $address: a sum at the client" "$(seen c none)" == 0
        stop
    done
}
without_checksum "offloads"

# A tunnel without checksums: what is left to be summed up is the TCP inside of it (CHECKSUM_PARTIAL).
ip -n c link add vx type vxlan id 7 local 192.0.2.1 remote 192.0.2.2 dstport 5000 noudpcsum
ip netns exec c sysctl -qw net.ipv6.conf.vx.disable_ipv6=1
ip -n c address add 10.99.0.1/24 dev vx
ip -n c link set vx up
ip -n c neighbour add 10.99.0.2 lladdr 02:00:00:00:00:01 dev vx
seen s none >/dev/null
seen s some >/dev/null
ip netns exec c timeout 0.5 bash -c 'exec 3<>/dev/tcp/10.99.0.2/9' 2>/dev/null
check "a tunnel without checksums: 0 at the server" "$(seen s none)" ">=" 1
check "a tunnel without checksums: a sum at the server" "$(seen s some)" == 0
ip -n c link del vx
for end in c/cr r/rc r/rs s/sr c/tun r/tun; do
    ip netns exec ${end%/*} ethtool -K ${end#*/} tx off gso off tso off gro off >/dev/null 2>&1
done
without_checksum "no offloads"

# 0 would be none at all.
serve s 198.51.100.1 5201
seen s ones >/dev/null
same "a sum that would be 0" "$(ask zero 192.0.2.1 6000 192.0.2.2 5000 198.51.100.1 5201)" "192.0.2.2 5000"
check "it arrived as 0xffff" "$(seen s ones)" == 1
check "it did not as 0" "$(seen s none)" == 0
stop

# The tunnel's check has summed up all of the packet; `udp_talk serve` says what has become of that.
serve r 203.0.113.2 5203
same "COMPLETE, not redirected" "$(ask ask 203.0.113.2 5203 1000)" "203.0.113.2 5203"
same "COMPLETE: the sum there" "$(</tmp/served)" "1000 right"
stop
serve r 198.51.100.2 5202
for length in 40 1000 1001; do
    : >/tmp/served
    same "COMPLETE, $length" "$(ask ask 203.0.113.2 5000 $length)" "203.0.113.2 5000"
    same "COMPLETE, $length: the sum after it" "$(</tmp/served)" "$length right"
done
: >/tmp/served
same "COMPLETE, without a checksum" "$(ask ask 203.0.113.2 5000 1000 nocheck)" "203.0.113.2 5000"
same "COMPLETE, without a checksum: no sum after it" "$(</tmp/served)" "1000 none"
stop
serve r 2001:db8:2::2 5202
for length in 40 1000 1001; do
    same "COMPLETE, IPv6, $length" "$(ask ask 2001:db8:3::2 5000 $length)" "2001:db8:3::2 5000"
done
stop

# A firewall that lets in clients and what belongs to them.
ip netns exec r nft 'table inet firewall {
    counter invalid { }; counter clients { }
    chain forward {
        type filter hook forward priority 0; policy drop
        ct state invalid counter name invalid drop
        ct state established,related accept
        iifname "rc" ct state new ct original ip daddr 198.51.100.1 counter name clients accept
        iifname "rc" meta nfproto ipv6 ct state new accept
    }
}'
firewall() {
    ip netns exec r nft -j list counter inet firewall "$1" | jq '[.nftables[].counter?.packets] | add'
}
without_checksum "firewall"
check "firewall: new ones, by the address that they were sent on to" "$(firewall clients)" == 3
# transfer ARGUMENT...: iperf3's exit code.
transfer() {
    ip netns exec s iperf3 -s -1 -D
    sleep 0.5
    ip netns exec c timeout 60 iperf3 -c 192.0.2.2 -p 5000 "$@"
    local code=$?
    sleep 0.2
    return "$code"
}
works "firewall: TCP" transfer -n 5M
works "firewall: TCP, back" transfer -n 5M -R
works "firewall: UDP" transfer -u -b 10M -l 1200 -n 1M
check "firewall: invalid" "$(firewall invalid)" == 0
# Nobody has asked for it.
serve c 192.0.2.1 7000
refused "firewall: from the server's side" ip netns exec s udp_talk ask 192.0.2.1 7000 100
same "firewall: it did not arrive" "$(</tmp/served)" ""
stop

for ns in c r s; do check "$ns: wrong checksums" "$(bad $ns)" == 0; done
check "dropped" "$(ip netns exec r mtnrule get | awk '{ n += $4 } END { print n + 0 }')" == 0
ip netns del r
works "removed" rmmod mountain_redirect

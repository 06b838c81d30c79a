# SPDX-License-Identifier: GPL-2.0-or-later
# Parts of tests/kernels/installed with what other hosts run: firewalls, VPNs, routing by BGP, a virtual address. Sourced by
# installed.sh.
# Variables of installed.sh are single words.
# shellcheck shell=bash disable=SC2154,SC2086

# Debian's example for a workstation (examples/workstation.nft of nftables), which begins with `flush ruleset`.
workstation() {
    cat >/etc/nftables.conf <<'EOF'
#!/usr/sbin/nft -f
flush ruleset
table inet filter {
    chain input {
        type filter hook input priority 0;
        iif lo accept
        ct state established,related accept
        ip6 nexthdr icmpv6 icmpv6 type { nd-neighbor-solicit, nd-router-advert, nd-neighbor-advert } accept
        counter drop
    }
}
EOF
    works "nftables starts" systemctl start nftables
    sleep 2
    spread "a workstation's firewall, UDP" udp
    goes_on "a workstation's firewall is loaded again" systemctl reload nftables
    goes_on "it starts anew" systemctl restart nftables
    systemctl stop nftables
}

# As an intrusion prevention system has it: the program is told the device, so no flow may leave by another one.
queue() {
    nft add table inet ips
    nft add chain inet ips out '{ type filter hook output priority 0; }'
    nft add rule inet ips out ct state new queue num 0 bypass
    sleep 3
    only_by "with a queue, TCP" tcp $internet "$(address_of "$(defaults | head -n 1)")"
    only_by "with a queue, UDP" udp $internet "$(address_of "$(defaults | head -n 1)")"
    works "status names the queue" sh -c "mountain status | grep -q 'inet ips out .* queue'"
    nft delete table inet ips
    # Firewalls are loaded in steps: it waits.
    within "new flows choose again" 30 status '.placement.left | length == 0'
    spread "without a queue" tcp
}

# gateway_of DEVICE
gateway_of() { ip -4 -j route show default dev "$1" | jq -r '.[0].gateway'; }
# ike NAME REMOTE OPTIONS...: a connection of strongSwan's, and the tunnel to REMOTE.
ike() {
    local name=$1 remote=$2
    shift 2
    printf '%s\n' "connections { $name { version = 2" "remote_addrs = $internet" "$1" \
        'dpd_delay = 5s' "local { auth = psk" "id = $name }" 'remote { auth = psk' 'id = peer }' \
        "children { net { $2" "remote_ts = $remote" 'start_action = start } } } }' \
        'secrets { ike { secret = "one secret" } }' >/etc/swanctl/conf.d/test.conf
    works "strongSwan starts ($name)" systemctl restart strongswan
    within "$name is connected" 60 sh -c 'swanctl --list-sas | grep -q INSTALLED'
}
strongswan() {
    local peer=/run/peer
    mkdir -p $peer/conf.d
    # An xfrm interface has an address of its own, the others get theirs from there.
    printf '%s\n' 'connections { road { version = 2' "local_addrs = $internet" 'pools = p' 'local { auth = psk' 'id = peer }' \
        'remote { auth = psk' 'id = road }' 'children { net { local_ts = 10.20.0.0/24' '}' 'all { local_ts = 0.0.0.0/0 } } }' \
        'site { version = 2' "local_addrs = $internet" 'local { auth = psk' 'id = peer }' 'remote { auth = psk' 'id = site }' \
        'children { net { local_ts = 0.0.0.0/0' 'remote_ts = 10.40.0.0/24 } } } }' \
        'pools { p { addrs = 10.30.0.0/24 } }' 'secrets { ike { secret = "one secret" } }' >$peer/swanctl.conf
    in_isp ip address add 10.20.0.1/24 dev lo
    # Another /run for its socket.
    # shellcheck disable=SC2016 # for sh to expand
    in_isp unshare --mount sh -c 'mount --bind /run/peer /etc/swanctl && mount -t tmpfs run /run && { charon-systemd & } &&
        until swanctl --load-all; do sleep 1; done; wait' >/dev/null 2>&1 &
    sleep 5
    ike road 10.20.0.0/24 'vips = 0.0.0.0' ''
    within "settled beside a tunnel" 30 settled 2
    # It compares the default routes of all tables by their metrics.
    works "its own packets leave as the kernel sends them" \
        sh -c "swanctl --list-sas | grep -q 'local .*$(address_of "$(defaults | head -n 1)")'"
    only_by "by policy, TCP" tcp 10.20.0.1 10.30.0.1
    spread "beside a tunnel" tcp
    works "a cable is drawn" nmcli device disconnect "$wan0"
    within "the tunnel moves (MOBIKE)" 60 sh -c "swanctl --list-sas | grep -q 'local .*$(address_of "$wan1")'"
    only_by "by policy, moved" tcp 10.20.0.1 10.30.0.1
    works "and put back" nmcli device connect "$wan0"
    nmcli device modify "$wan0" ipv4.route-metric 100
    within "both, beside the tunnel" 60 settled 2
    only_by "by policy, with both" tcp 10.20.0.1 10.30.0.1
    ike road 0.0.0.0/0 'vips = 0.0.0.0' ''
    within "all goes there" 20 status '.placement.suspended | length > 0'
    only_by "a tunnel for all, TCP" tcp $other 10.30.0.1
    only_by "a tunnel for all, UDP" udp $other 10.30.0.1
    works "strongSwan stops" systemctl stop strongswan
    within "settled after the tunnel for all" 30 settled 2
    spread "after a tunnel for all" tcp
    echo 'charon-systemd { install_routes = no }' >/etc/strongswan.d/test.conf
    ip link add ipsec0 type xfrm if_id 42
    ip address add 10.40.0.1/24 dev ipsec0
    ip link set ipsec0 up
    ip route add 10.20.0.0/24 dev ipsec0
    ike site 0.0.0.0/0 $'if_id_in = 42\nif_id_out = 42' 'local_ts = 10.40.0.0/24'
    only_by "by an interface, TCP" tcp 10.20.0.1 10.40.0.1
    within "settled beside an interface" 30 settled 2
    spread "beside an interface" tcp
    systemctl stop strongswan
    ip link del ipsec0
    rm /etc/strongswan.d/test.conf /etc/swanctl/conf.d/test.conf
    # Without the rule for its table, as before.
    ip rule del priority 220
    in_isp ip rule del priority 220
    in_isp ip address del 10.20.0.1/24 dev lo
    pkill -x charon-systemd
}

# of_service PROPERTY KIND COUNT: flows of a service that has just begun.
of_service() { systemd-run --quiet --pipe --wait -p "$1" python3 /tests/installed.py flows "$2" "$3" $internet; }
# Services with BPF programs at the egress of their cgroups, without the privilege to read their names.
services() {
    local kind result
    for kind in tcp udp; do
        result=$(of_service "RestrictNetworkInterfaces=lo $(defaults | head -n 1)" $kind 20)
        printf 'a service with one device, %s: %s\n' $kind "$result"
        check "a service with one device, $kind: failed" "$(jq .failed <<<"$result")" == 0
    done
    spread_of "a service with a filter by address" 4 "$(of_service IPAccounting=yes tcp 30)"
}

# both_hops: the route has two next hops.
both_hops() { [[ $(ip -j route show 203.0.113.0/24 | jq '.[0].nexthops | length') -eq 2 ]]; }
one_hop() { [[ $(ip -j route show 203.0.113.0/24 | jq -r '.[0].dev') == "$wan1" ]]; }
# each_hop_dark PROTOCOL HOST: one next hop after the other; the protocol has not heard of it when Mountain leaves it.
each_hop_dark() {
    local wan
    for wan in "$wan0" "$wan1"; do
        dark "$wan"
        within "$1: the dead next hop by $wan is left" 10 is_left "$wan"
        works "before $1 knows of $wan" both_hops
        only_by "$1: without the next hop by $wan" tcp $internet "$2"
        light
        within "$1: the next hop by $wan is used again" 30 settled 2
    done
}
bgp() {
    local wan host=198.51.100.1 pid hops=() configs=()
    for wan in "$wan0" "$wan1"; do
        # Paths of different metrics to their next hops would not be equal ones.
        nmcli device modify "$wan" ipv4.route-metric 100
        hops+=(nexthop via "$(address_of "$wan")")
        mkdir -p "/run/isp-frr/$wan"
        printf '%s\n' 'router bgp 65001' "bgp router-id $(gateway_of "$wan")" 'no bgp ebgp-requires-policy' \
            'no bgp network import-check' "neighbor $(address_of "$wan") remote-as 65000" \
            "neighbor $(address_of "$wan") timers connect 2" 'address-family ipv4 unicast' 'network 203.0.113.0/24' \
            >"/run/isp-frr/$wan/bgpd.conf"
        configs+=("neighbor $(gateway_of "$wan") remote-as 65001" "neighbor $(gateway_of "$wan") timers connect 2"
            # It hears of a dead next hop later than Mountain, however slow the machine is.
            "neighbor $(gateway_of "$wan") timers 30 90")
        chown -R frr:frr /run/isp-frr
        # shellcheck disable=SC2016 # for sh to expand
        in_isp unshare --mount sh -c 'mkdir -p /run/frr && mount -t tmpfs frr /run/frr && chown frr:frr /run/frr &&
            exec /usr/lib/frr/bgpd -Z -l "$1" -f "$2"' sh "$(gateway_of "$wan")" "/run/isp-frr/$wan/bgpd.conf" >/dev/null 2>&1 &
    done
    in_isp ip route replace $host "${hops[@]}"
    ip address add $host/32 dev lo
    sed -i 's/^bgpd=no/bgpd=yes/' /etc/frr/daemons
    printf '%s\n' 'frr defaults datacenter' 'route-map SRC permit 10' "set src $host" 'ip protocol bgp route-map SRC' \
        'router bgp 65000' 'no bgp ebgp-requires-policy' 'no bgp network import-check' "${configs[@]}" \
        'address-family ipv4 unicast' "network $host/32" >/etc/frr/frr.conf
    echo 'MOUNTAIN_ARGS=' >/etc/default/mountain
    systemctl restart mountain
    works "FRR starts" systemctl start frr
    within "two next hops" 60 both_hops
    within "FRR's route is steered" 60 settled 2
    only_by "by FRR's route" tcp $internet $host
    python3 /tests/installed.py long $other >/run/long &
    pid=$!
    sleep 2
    each_hop_dark BGP $host
    vtysh -c 'configure' -c 'router bgp 65000' -c "neighbor $(gateway_of "$wan0") shutdown"
    within "a route is withdrawn" 20 one_hop
    only_by "with one next hop" tcp $internet $host
    vtysh -c 'configure' -c 'router bgp 65000' -c "no neighbor $(gateway_of "$wan0") shutdown"
    within "the route is back" 60 both_hops
    within "it is steered again" 30 settled 2
    only_by "with both next hops" tcp $internet $host
    works "FRR starts anew" systemctl restart frr
    within "the routes of a new FRR" 60 both_hops
    within "they are steered" 30 settled 2
    kill $pid
    wait $pid
    printf 'beside FRR: %s\n' "$(</run/long)"
    same "a connection goes on beside FRR" "$(jq .whole /run/long)" true
    check "without a long pause, ms" "$(jq .longest_ms /run/long)" '<' 3000
    systemctl stop frr
    pkill -x bgpd
    ip address del $host/32 dev lo
    in_isp ip route del $host
    nmcli device modify "$wan1" ipv4.route-metric 101
    echo 'MOUNTAIN_ARGS="--adopt"' >/etc/default/mountain
    works "placing again" systemctl restart mountain
    within "settled after FRR" 60 settled 2
    spread "after FRR" tcp
}

# What tailscaled sets: its own packets have a mark, all others look at its table first.
tailscale() {
    local preferred
    ip tuntap add tailscale0 mode tun
    ip address add 100.100.1.1/32 dev tailscale0
    ip link set tailscale0 mtu 1280 up
    ip rule add priority 5210 fwmark 0x80000/0xff0000 table main
    ip rule add priority 5230 fwmark 0x80000/0xff0000 table default
    ip rule add priority 5250 fwmark 0x80000/0xff0000 type unreachable
    ip rule add priority 5270 table 52
    ip route add 100.100.1.2 dev tailscale0 table 52
    within "settled beside tailscale" 30 settled 2
    spread "beside tailscale" tcp
    same "its hosts" "$(ip -j route get 100.100.1.2 | jq -r '.[0].dev')" tailscale0
    ip route add default dev tailscale0 table 52
    within "an exit node" 10 status '.placement.suspended | length > 0'
    preferred=$(defaults | head -n 1)
    same "its own packets" "$(ip -j route get $other mark 0x80000 | jq -r '.[0].dev')" "$preferred"
    same "all others" "$(ip -j route get $other | jq -r '.[0].dev')" tailscale0
    check "flows past the exit node" "$(say flows udp 4 $other | jq '4 - .failed')" == 0
    ip route del default table 52
    within "no exit node" 30 settled 2
    spread "without an exit node" tcp
    for preferred in 5210 5230 5250 5270; do ip rule del priority $preferred; done
    ip link del tailscale0
}

mesh() {
    local n wan
    for n in 1 2; do
        mkdir -p /run/mesh$n/hosts
        # shellcheck disable=SC2016 # for sh to expand
        printf '#!/bin/sh\nip link set $INTERFACE up\nip address add 10.50.0.%s/24 dev $INTERFACE\n' $n >/run/mesh$n/tinc-up
        chmod +x /run/mesh$n/tinc-up
        printf '%s\n' "Name = n$n" "Interface = mesh$n" 'PingInterval = 3' 'PingTimeout = 3' 'MaxTimeout = 3' >/run/mesh$n/tinc.conf
        echo "Subnet = 10.50.0.$n/32" >/run/mesh$n/hosts/n$n
        yes '' | tincd -c /run/mesh$n -K 2048
    done >/dev/null 2>&1
    echo 'ConnectTo = n2' >>/run/mesh1/tinc.conf
    echo "BindToAddress = $internet" >>/run/mesh2/tinc.conf
    sed -i "1i Address = $internet" /run/mesh2/hosts/n2
    cp /run/mesh1/hosts/n1 /run/mesh2/hosts/
    cp /run/mesh2/hosts/n2 /run/mesh1/hosts/
    in_isp tincd -c /run/mesh2 --pidfile=/run/mesh2.pid
    tincd -c /run/mesh1 --pidfile=/run/mesh1.pid
    within "tinc is connected" 60 ping -c 1 -W 1 10.50.0.2
    spread "beside tinc" tcp
    # What it sends goes as the kernel sends it: to that one.
    wan=$wan1
    dark "$wan"
    within "tinc without $wan" 30 ping -c 1 -W 1 10.50.0.2
    light
    within "settled beside tinc" 30 settled 2
    within "tinc, as before" 30 ping -c 1 -W 1 10.50.0.2
    kill "$(</run/mesh1.pid)" "$(</run/mesh2.pid)"
}

vrrp() {
    local virtual way result
    virtual=$(address_of "$wan0")
    virtual=${virtual%.*}.200
    python3 /tests/installed.py serve 127.0.0.1 &
    for way in '' use_vmac; do
        printf '%s\n' 'vrrp_instance V {' 'state MASTER' "interface $wan0" 'virtual_router_id 51' 'priority 150' "$way" \
            "virtual_ipaddress { $virtual/24 }" '}' >/etc/keepalived/keepalived.conf
        works "keepalived starts ($way)" systemctl start keepalived
        within "the address is here ($way)" 30 sh -c "ip -4 address | grep -q $virtual/"
        within "settled beside keepalived ($way)" 30 settled 2
        result=$(in_isp python3 /tests/installed.py flows tcp 10 "$virtual" 7001 $internet)
        check "to the virtual address ($way): failed" "$(jq .failed <<<"$result")" == 0
        spread "beside keepalived ($way)" tcp
        systemctl stop keepalived
        within "settled after keepalived ($way)" 30 settled 2
    done
    kill $!
}

# By BIRD: two links of equal cost. OSPF hears of a dead one later than Mountain.
ospf() {
    local wan host=198.51.100.1 pid links
    links="interface \"$wan0\", \"$wan1\" { type ptp; hello 2; dead 60; };"
    for wan in "$wan0" "$wan1"; do nmcli device modify "$wan" ipv4.route-metric 100; done
    ip address add $host/32 dev lo
    printf '%s\n' "router id $internet;" 'protocol device { }' 'protocol static { ipv4; route 203.0.113.0/24 unreachable; }' \
        'protocol kernel { ipv4 { export where source != RTS_STATIC; }; merge paths on; }' \
        'protocol ospf v2 { ecmp on; ipv4 { export where source = RTS_STATIC; };' "area 0 { $links }; }" >/run/isp-bird.conf
    in_isp bird -c /run/isp-bird.conf -s /run/isp-bird.ctl -P /run/isp-bird.pid
    printf '%s\n' "router id $host;" 'protocol device { }' 'protocol direct { ipv4; interface "lo"; }' \
        "protocol kernel { learn all; merge paths on; scan time 5; ipv4 { export filter {" \
        "if source ~ [ RTS_DEVICE, RTS_INHERIT ] then reject; krt_prefsrc = $host; accept; }; }; }" \
        "protocol ospf v2 { ecmp on; ipv4; area 0 { $links interface \"lo\" { stub; }; }; }" >/etc/bird/bird.conf
    works "BIRD starts" systemctl start bird
    within "two next hops by OSPF" 60 both_hops
    within "BIRD's route is steered" 60 settled 2
    only_by "by BIRD's route" tcp $internet $host
    python3 /tests/installed.py long $other >/run/long &
    pid=$!
    sleep 2
    each_hop_dark OSPF $host
    kill $pid
    wait $pid
    printf 'beside BIRD: %s\n' "$(</run/long)"
    same "a connection goes on beside BIRD" "$(jq .whole /run/long)" true
    check "without a long pause beside BIRD, ms" "$(jq .longest_ms /run/long)" '<' 3000
    works "BIRD starts anew" systemctl restart bird
    within "the routes of a new BIRD" 60 both_hops
    within "they are steered, too" 30 settled 2
    only_by "by a new BIRD's route" tcp $internet $host
    same "BIRD leaves Mountain's tables" "$(ip -j route show table all proto 77 | jq length)" 2
    systemctl stop bird
    kill "$(</run/isp-bird.pid)"
    ip address del $host/32 dev lo
    nmcli device modify "$wan1" ipv4.route-metric 101
    within "settled after BIRD" 60 settled 2
    spread "after BIRD" tcp
}

# NetworkManager has told the kernel of both addresses: a connection has a subflow by each.
mptcp() {
    local wan pid port=7101
    TCP_PORT=$port in_isp mptcpize run python3 /tests/installed.py serve &
    sleep 3
    same "MPTCP starts by the kernel's uplink" \
        "$(TCP_PORT=$port mptcpize run python3 /tests/installed.py flows tcp 30 $internet | jq -c .seen)" \
        "{\"$(address_of "$(defaults | head -n 1)")\":30}"
    TCP_PORT=$port mptcpize run python3 /tests/installed.py long $other >/run/long &
    pid=$!
    for wan in "$wan0" "$wan1"; do
        within "a subflow by $wan" 20 sh -c "ss -Htn state established 'dport = :$port' | grep -q '$(address_of "$wan")'"
    done
    for wan in "$wan0" "$wan1"; do
        dark "$wan"
        within "MPTCP: $wan is left" 10 is_left "$wan"
        sleep 3
        light
        within "MPTCP: $wan is used again" 30 settled 2
    done
    kill $pid
    wait $pid
    printf 'MPTCP: %s\n' "$(</run/long)"
    same "a connection by MPTCP goes on" "$(jq .whole /run/long)" true
    check "by MPTCP without a long pause, ms" "$(jq .longest_ms /run/long)" '<' 3000
    pkill -f 'installed.py serve$'
}

# Shorewall with two providers, as its documentation has it: it takes the default routes out of the main table.
multi_isp() {
    local pid wan name
    sed -i 's/^STARTUP_ENABLED=.*/STARTUP_ENABLED=Yes/; s/^ROUTE_FILTER=.*/ROUTE_FILTER=No/' /etc/shorewall/shorewall.conf
    printf '%s\n' 'fw firewall' 'net ipv4' >/etc/shorewall/zones
    printf '%s\n' '?FORMAT 2' "net $wan0 dhcp" "net $wan1 dhcp" >/etc/shorewall/interfaces
    # shellcheck disable=SC2016 # Shorewall's
    printf '%s\n' '$FW net ACCEPT' 'net all DROP' 'all all REJECT' >/etc/shorewall/policy
    # shellcheck disable=SC2016
    printf '%s\n' '?SECTION NEW' 'ACCEPT net $FW icmp' >/etc/shorewall/rules
    printf '%s\n' "one 1 1 - $wan0 $(gateway_of "$wan0") track,balance" "two 2 2 - $wan1 $(gateway_of "$wan1") track,balance" \
        >/etc/shorewall/providers
    printf '%s\n' "SNAT($(address_of "$wan0")) $(address_of "$wan1") $wan0" \
        "SNAT($(address_of "$wan1")) $(address_of "$wan0") $wan1" >/etc/shorewall/snat
    python3 /tests/installed.py long $other >/run/long &
    pid=$!
    sleep 2
    works "Shorewall starts" shorewall start
    within "its routes are followed" 30 status '.groups | length == 1'
    for name in loaded reloaded; do
        check "Shorewall is $name: failed" "$(say flows tcp 20 $internet | jq .failed)" == 0
        for wan in "$wan0" "$wan1"; do
            works "Shorewall is $name: answers by $wan" in_isp ping -c 2 -W 1 "$(address_of "$wan")"
        done
        works "Shorewall reloads" shorewall reload
    done
    kill $pid
    wait $pid
    printf 'beside Shorewall: %s\n' "$(</run/long)"
    same "a connection goes on beside Shorewall" "$(jq .whole /run/long)" true
    works "Shorewall is cleared" shorewall clear
    # What it leaves.
    ip route flush table 250
    for wan in "$wan0" "$wan1"; do ip route del "$(gateway_of "$wan")" dev "$wan"; done
    nft flush ruleset
    within "settled after Shorewall" 30 settled 2
    spread "after Shorewall" tcp
}

# As sqm-scripts have it: CAKE where packets leave, and an ifb for those that come in.
shaped() {
    local wan
    for wan in "$wan0" "$wan1"; do
        works "CAKE on $wan" tc qdisc replace dev "$wan" root cake bandwidth 100mbit diffserv4
        ip link add "ifb-$wan" type ifb
        ip link set "ifb-$wan" up
        tc qdisc replace dev "ifb-$wan" root cake bandwidth 100mbit ingress wash
        tc qdisc add dev "$wan" handle ffff: ingress
        works "what comes in by $wan" tc filter add dev "$wan" parent ffff: protocol all u32 match u32 0 0 action \
            mirred egress redirect dev "ifb-$wan"
    done
}
not_shaped() {
    local wan
    for wan in "$wan0" "$wan1"; do
        tc qdisc del dev "$wan" ingress
        tc qdisc del dev "$wan" root
        ip link del "ifb-$wan"
    done
}
# sent DEVICE CLASS: packets that left by that class.
sent() { tc -s class show dev "$1" | awk -v class="$2" '$1 == "class" { is = $2 == "htb" && $3 == class } is && $1 == "Sent" { print $4; exit }'; }
steered() { bpftool -j net show | jq '[.[0].tc[] | select(.name == "mountain_steer")] | length'; }
shaping() {
    local wan class
    shaped
    within "settled beside CAKE" 30 settled 2
    spread "beside CAKE, TCP" tcp
    spread "beside CAKE, UDP" udp
    not_shaped
    goes_on "a shaper starts anew" shaped
    dark "$wan0"
    within "a dead uplink with CAKE is left" 10 is_left "$wan0"
    only_by "during an outage beside CAKE" tcp $internet "$(address_of "$wan1")"
    light
    within "it is used again, with CAKE" 30 settled 2
    not_shaped
    for wan in "$wan0" "$wan1"; do
        tc qdisc replace dev "$wan" root handle 1: htb default 30 r2q 1000
        for class in 10 20 30; do
            tc class add dev "$wan" parent 1: classid 1:$class htb rate 30mbit
            tc qdisc add dev "$wan" parent 1:$class fq_codel
        done
        tc filter add dev "$wan" parent 1: protocol ip prio 1 u32 match ip dport 7001 0xffff flowid 1:10
        tc filter add dev "$wan" parent 1: protocol ip prio 2 handle 20 fw flowid 1:20
    done
    # It takes the place of Mountain's mark.
    iptables -t mangle -A OUTPUT -p udp --dport 7000 -j MARK --set-mark 20
    sleep 2
    spread "beside HTB, TCP" tcp
    spread "beside HTB, UDP" udp
    for wan in "$wan0" "$wan1"; do
        check "a class by u32, $wan" "$(sent "$wan" 1:10)" '>=' 4
        check "a class by fw, $wan" "$(sent "$wan" 1:20)" '>=' 4
        tc qdisc del dev "$wan" root
        # Its hooks are Mountain's, too.
        works "clsact on $wan" tc qdisc add dev "$wan" clsact
        tc filter add dev "$wan" egress protocol ip u32 match ip dport 7001 0xffff action skbedit priority 1:10
    done
    iptables -t mangle -F
    nft delete table ip mangle
    goes_on "beside clsact" systemctl restart mountain
    for wan in "$wan0" "$wan1"; do works "clsact goes from $wan" tc qdisc del dev "$wan" clsact; done
    check "devices with Mountain's program" "$(steered)" == 2
    spread "without clsact" tcp
}

# A tunnel broker's 6in4: IPv6 by the tunnel, which is nobody's uplink, IPv4 by the uplinks.
six_in_four() {
    local wan
    for wan in "$wan0" "$wan1"; do
        in_isp ip tunnel add sit1 mode sit local $other remote "$(address_of "$wan")" ttl 64
        in_isp ip address add 2001:db8:aaaa::1/64 dev sit1 nodad
        in_isp ip link set sit1 up
        ip tunnel add sit1 mode sit local "$(address_of "$wan")" remote $other ttl 255
        ip address add 2001:db8:aaaa::2/64 dev sit1 nodad
        ip link set sit1 up
        ip route add ::/0 dev sit1
        sleep 2
        within "settled beside 6in4 by $wan" 30 settled 2
        only_by "6in4 by $wan, TCP" tcp $internet6 2001:db8:aaaa::2
        only_by "6in4 by $wan, UDP" udp $internet6 2001:db8:aaaa::2
        spread "beside 6in4 by $wan" tcp
        ip link del sit1
        in_isp ip link del sit1
    done
}

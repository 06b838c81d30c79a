# SPDX-License-Identifier: GPL-2.0-or-later
# Parts of tests/kernels/installed with other programs than NetworkManager that give a host its uplinks, and with one that
# maps ports of the uplinks. Sourced by installed.sh.
# Variables of installed.sh are single words.
# shellcheck shell=bash disable=SC2154,SC2086

# let_go: NetworkManager gives up both uplinks.
let_go() {
    local wan
    systemctl stop NetworkManager
    for wan in "$wan0" "$wan1"; do
        ip address flush dev "$wan"
        ip link set "$wan" down
    done
}
# take_back: it has them again, whatever others have left there.
take_back() {
    local wan
    for wan in "$wan0" "$wan1"; do
        ip address flush dev "$wan"
        ip route flush dev "$wan"
    done
    systemctl start NetworkManager
    within "NetworkManager's uplinks" 90 settled 2
    nmcli device modify "$wan0" ipv4.route-metric 100
    nmcli device modify "$wan1" ipv4.route-metric 101
    within "NetworkManager's metrics" 30 settled 2
}
# net_of DEVICE: the network of its provider; which of the two the kernel prefers differs from one boot to another.
net_of() { [[ $1 == "$(device 0 a)" ]] && echo 100.64.0.0/24 || echo 100.65.0.0/24; }
one_default() { [[ $(defaults | wc -l) -eq 1 ]]; }

# strays: how many packets have come to a provider with an address of the other one's, since the last call.
strays() { in_isp nft -j reset counter ip strays strays | jq '[.nftables[].counter?.packets // 0] | add'; }
stray_counters() {
    in_isp nft add table ip strays
    in_isp nft add counter ip strays strays
    in_isp nft add chain ip strays in '{ type filter hook prerouting priority -450; }'
    in_isp nft add rule ip strays in iif "$wan0" ip saddr "$(net_of "$wan1")" counter name strays
    in_isp nft add rule ip strays in iif "$wan1" ip saddr "$(net_of "$wan0")" counter name strays
}

# given_by NAME RESTART...: both uplinks are given by that program; each goes dark, and connections outlive a restart.
given_by() {
    local name=$1 wan second pids=() i
    shift
    stray_counters
    within "both uplinks by $name" 90 settled 2
    spread "with $name, TCP" tcp
    spread "with $name, UDP" udp
    for wan in "$wan0" "$wan1"; do
        second=$([[ $wan == "$wan0" ]] && echo "$wan1" || echo "$wan0")
        dark $wan
        within "$name: $wan is left" 10 is_left $wan
        only_by "$name: without $wan" tcp $internet "$(address_of $second)"
        light
        within "$name: $wan is used again" 30 settled 2
    done
    for i in 1 2 3 4; do
        python3 /tests/installed.py long $other >/run/long$i &
        pids+=($!)
    done
    sleep 2
    strays >/dev/null
    works "$name starts anew" "$@"
    sleep 1
    within "$name: settled again" 60 settled 2
    spread "$name: started anew" tcp
    kill "${pids[@]}"
    wait "${pids[@]}"
    same "$name: connections go on" "$(cat /run/long[1-4] | jq -s 'map(.whole) | all')" true
    check "$name: packets by the wrong uplink" "$(strays)" == 0
    in_isp nft delete table ip strays
}

dhcpcd_alone() {
    let_go
    # The ends of other lines.
    printf 'denyinterfaces %s %s\nipv4only\n' "$(device 2 a)" "$(device 2 b)" >>/etc/dhcpcd.conf
    systemctl start dhcpcd
    given_by dhcpcd systemctl restart dhcpcd
    ip link set "$wan0" down
    within "dhcpcd: one uplink is left" 20 one_default
    only_by "dhcpcd: one is down" tcp $internet "$(address_of "$wan1")"
    ip link set "$wan0" up
    within "dhcpcd: it is back" 60 settled 2
    systemctl stop dhcpcd
    take_back
}

again() { ifdown "$1" && ifup "$1"; }
# /etc/network/interfaces
classic() {
    local name file=/etc/network/interfaces client=/usr/sbin/dhclient
    mv $file $file.before
    for name in dhclient dhcpcd; do
        let_go
        printf '%s\n' "iface $wan0 inet dhcp" 'metric 100' "iface $wan1 inet dhcp" 'metric 200' >$file
        works "ifup ($name)" ifup "$wan0" "$wan1"
        works "its client is $name" sh -c "ps ax | grep -q '[ /]$name.*$wan0'"
        given_by "ifupdown with $name" again "$wan1"
        works "ifdown ($name)" ifdown "$wan0"
        sleep 1
        only_by "one by ifupdown ($name)" tcp $internet "$(address_of "$wan1")"
        works "ifdown of the other ($name)" ifdown "$wan1"
        # Without it ifupdown takes dhcpcd.
        [[ ! -e $client ]] || mv $client $client.off
    done
    mv $client.off $client
    mv $file.before $file
    take_back
}

# A table for each uplink, by source, as netplan's documentation has it.
netplan_tables() {
    local n=0 wan net
    let_go
    printf '%s\n' 'network:' '  version: 2' '  renderer: networkd' '  ethernets:' >/etc/netplan/two.yaml
    for wan in "$wan0" "$wan1"; do
        net=$(net_of "$wan")
        printf '%s\n' "    $wan:" '      dhcp4: true' "      dhcp4-overrides: {route-metric: $((100 + n))}" \
            '      routes:' "        - {to: default, via: ${net%.0/24}.1, table: 10$n}" \
            "        - {to: $net, scope: link, table: 10$n}" \
            '      routing-policy:' "        - {from: $net, table: 10$n}" >>/etc/netplan/two.yaml
        n=$((n + 1))
    done
    chmod 600 /etc/netplan/two.yaml
    works "netplan" netplan apply
    given_by "netplan's tables" netplan apply
    # It takes rules and tables of others away.
    goes_on "beside tables, networkd starts anew" systemctl restart systemd-networkd
    goes_on "an uplink is configured again" networkctl reconfigure "$wan1"
    same "netplan's own rules" "$(ip rule | grep -cE 'lookup (100|101) ')" 2
    # Ubuntu's NetworkManager takes no wired device unless told so.
    printf '%s\n' 'network:' '  version: 2' '  renderer: NetworkManager' >/etc/netplan/two.yaml
    netplan generate
    systemctl stop systemd-networkd.socket systemd-networkd
    for n in 100 101; do
        ip rule del table $n
        ip route flush table $n
    done
    take_back
    rm /etc/netplan/two.yaml
}

# A host behind this one has ports of the uplink that the kernel does not prefer.
mapped() {
    local kind port result
    for kind in tcp udp; do
        port=$([[ $kind == tcp ]] && echo 7001 || echo 7000)
        result=$(in_isp python3 /tests/installed.py flows $kind 10 "$(address_of "$wan1")" "$port" $internet)
        printf '%s: %s\n' "$1" "$result"
        check "$1, $kind" "$(jq ".seen[\"$internet\"] // 0" <<<"$result")" == 10
    done
    check "$1: answers by the wrong uplink" "$(strays)" == 0
}
demoted() { [[ $(ip -4 -j route show default dev "$1" | jq '.[0].metric') -ge 20000 ]]; }
promoted() { ! demoted "$1"; }
# NetworkManager asks a page of the internet by each uplink. Behind one only the gateway answers, as before a portal.
connectivity() {
    mkdir -p /run/www
    echo -n online >/run/www/check
    in_isp python3 -m http.server 80 --bind $internet --directory /run/www >/dev/null 2>&1 &
    printf '[connectivity]\nuri=http://%s/check\nresponse=online\ninterval=8\n' $internet \
        >/etc/NetworkManager/conf.d/connectivity.conf
    systemctl reload NetworkManager
    in_isp nft add table ip portal
    in_isp nft add chain ip portal in '{ type filter hook prerouting priority -400; }'
    in_isp nft add rule ip portal in iif "$wan0" ip daddr 203.0.113.0/24 drop
    within "NetworkManager finds no Internet by $wan0" 60 demoted "$wan0"
    within "it is the last choice" 10 is_left "$wan0"
    only_by "beside an uplink without Internet, TCP" tcp $internet "$(address_of "$wan1")"
    only_by "beside an uplink without Internet, UDP" udp $internet "$(address_of "$wan1")"
    in_isp nft delete table ip portal
    within "NetworkManager finds it again" 60 promoted "$wan0"
    within "settled after that" 30 settled 2
    spread "with Internet by both" tcp
    pkill -f http.server
    rm /etc/NetworkManager/conf.d/connectivity.conf
    systemctl reload NetworkManager
}

upnp() {
    local times pid
    inner
    ip netns exec inner python3 /tests/installed.py serve 10.8.0.2 &
    nft add table ip n
    nft add chain ip n out '{ type nat hook postrouting priority 100; }'
    nft add rule ip n out oifname "{ $wan0, $wan1 }" masquerade
    within "forwarded connections are placed" 30 sh -c 'nft list tables | grep -q mountain_start'
    stray_counters
    printf '%s\n' "ext_ifname=$wan1" listening_ip=br0 secure_mode=yes \
        'allow 1024-65535 10.8.0.0/24 1024-65535' 'deny 0-65535 0.0.0.0/0 0-65535' >/etc/miniupnpd/miniupnpd.conf
    # Older ones do not know it, but ask for a public address to tell their clients.
    if grep -aq ext_allow_private_ipv4 /usr/sbin/miniupnpd; then
        echo ext_allow_private_ipv4=yes >>/etc/miniupnpd/miniupnpd.conf
    else
        echo ext_ip=11.0.0.1 >>/etc/miniupnpd/miniupnpd.conf
    fi
    # Ubuntu's allows two tasks, of which the helper that makes its table needs more.
    systemctl set-property --runtime miniupnpd TasksMax=20
    ip netns exec inner python3 /tests/installed.py long $other >/run/long &
    pid=$!
    for times in once twice; do
        works "miniupnpd starts, $times" systemctl restart miniupnpd
        # Its table drops what it does not know.
        nft add rule inet filter forward iifname br0 accept
        nft add rule inet filter forward ct state established,related accept
        within "a TCP port, $times" 30 ip netns exec inner upnpc -a 10.8.0.2 7001 7001 tcp
        within "a UDP port, $times" 30 ip netns exec inner upnpc -a 10.8.0.2 7000 7000 udp
        mapped "mapped ports, $times"
    done
    dark "$wan1"
    within "the uplink of the ports is left" 10 is_left "$wan1"
    same "a host behind this one, without it" "$(ip netns exec inner python3 /tests/installed.py flows tcp 10 $internet |
        jq ".seen[\"$(address_of "$wan0")\"]")" 10
    light
    within "the uplink of the ports is used again" 30 settled 2
    mapped "mapped ports after an outage"
    kill $pid
    wait $pid
    same "a connection goes on beside miniupnpd" "$(jq .whole /run/long)" true
    systemctl stop miniupnpd
    nft delete table ip n
    in_isp nft delete table ip strays
    no_inner
}

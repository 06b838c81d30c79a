#!/bin/bash
# SPDX-License-Identifier: GPL-2.0-or-later
# What the user of a Debian does with Mountain. Run by tests/kernels/installed, in its machine.
#
# Two of the machine's three network cards end in the namespace `isp`: two providers with DHCP, and hosts of the internet
# (203.0.113.1 and .2) that tell each flow which address it comes from.
# shellcheck source=kernel/tests/lib.sh
. /tests/lib.sh
# shellcheck source=tests/kernels/beside.sh
. /tests/beside.sh
# shellcheck source=tests/kernels/guests.sh
. /tests/guests.sh
# shellcheck source=tests/kernels/managers.sh
. /tests/managers.sh
# shellcheck source=/dev/null
. /tests/settings

internet=203.0.113.1 other=203.0.113.2 internet6=2001:db8:ff::1
say() { python3 /tests/installed.py "$@"; }
in_isp() { ip netns exec isp "$@"; }
device() { ip -br link | awk -v mac="52:54:00:00:0$1:0$2" '$3 == mac { print $1 }'; }
# address_of DEVICE [FAMILY]
address_of() { ip "-${2:-4}" -j address show dev "$1" scope global | jq -r '.[0].addr_info[0].local // empty'; }

# within NAME SECONDS COMMAND...: it succeeds at some time.
within() {
    local name=$1 end=$((SECONDS + $2)) code=1
    shift 2
    until [[ $code -eq 0 || $SECONDS -ge $end ]]; do
        if "$@" >/dev/null 2>&1; then code=0; else sleep 0.5; fi
    done
    if [[ $code -ne 0 ]]; then
        ip -4 -br address
        ip -4 route
        mountain check --adopt
        mountain status
        journalctl -n 40 --no-pager -o cat
    fi
    check "$name" "$code" == 0
}

status() { mountain status --json | jq -e "$1"; }
# is_left DEVICE: that path is not used.
is_left() { status ".paths[] | select(.device == \"$1\") | .state != \"good\""; }
settled() { status "(.paths | length == $1 and all(.state == \"good\")) and .settled"; }

# spread NAME KIND [DEVICE...]: new flows start on all of them, the two uplinks by default.
spread() {
    local name=$1
    spread_of "$name" 4 "$(say flows "$2" 30 $internet)" "${@:3}"
}
spread6() { spread_of "$1" 6 "$(say flows "$2" 30 $internet6)"; }
# spread_of NAME FAMILY RESULT [DEVICE...]
spread_of() {
    local name=$1 family=$2 result=$3 device
    shift 3
    printf '%s: %s\n' "$name" "$result"
    check "$name: failed" "$(jq .failed <<<"$result")" == 0
    [[ $# -gt 0 ]] || set -- "$wan0" "$wan1"
    for device in "$@"; do
        check "$name: by $device" "$(jq ".seen[\"$(address_of "$device" "$family")\"] // 0" <<<"$result")" '>=' 4
    done
}

# only_by NAME KIND HOST ADDRESS: all new flows have that address.
only_by() {
    local result
    result=$(say flows "$2" 20 "$3")
    printf '%s: %s\n' "$1" "$result"
    check "$1" "$(jq ".seen[\"$4\"] // 0" <<<"$result")" == 20
    check "$1: slowest, ms" "$(jq .slowest_ms <<<"$result")" '<' 1000
}

settings() {
    ip rule
    ip -6 rule
    # Addresses may be other ones by now, and OpenVPN puts a default route back without its protocol.
    ip -4 route show table all | grep -vE 'proto (dhcp|kernel)|^default via [0-9.]+ dev [a-z0-9]+ *$'
    ip -6 route show table all | grep -vE 'proto (kernel|ra)|metric 256'
    nft list ruleset
    tc qdisc show | grep -E 'clsact|ingress'
    bpftool net show
    bpftool struct_ops list
    find /sys/fs/bpf /run/mountain /etc /usr -name '*mountain*'
    sysctl net.ipv4.ip_forward net.ipv4.conf.all.rp_filter net.ipv4.fib_multipath_hash_policy net.ipv4.tcp_congestion_control
} 2>/dev/null

providers() {
    # Devices get their names.
    udevadm settle
    ip netns add isp
    in_isp ip link set lo up
    local n far
    for n in 0 1; do
        far=$(device $n b)
        ip link set "$far" netns isp
        # As its other end is called.
        in_isp ip link set "$far" name "$(device $n a)"
        in_isp ip address add 100.6$((4 + n)).0.1/24 dev "$(device $n a)"
        in_isp ip -6 address add 2001:db8:$n::1/64 dev "$(device $n a)" nodad
        in_isp ip link set "$(device $n a)" up
    done
    in_isp ip address add $internet/32 dev lo
    in_isp ip address add $internet6/128 dev lo
    in_isp ip address add $other/32 dev lo
    in_isp dnsmasq --conf-file=/dev/null --port=0 --bind-interfaces --interface="$(device 0 a)" --interface="$(device 1 a)" \
        --dhcp-range=100.64.0.50,100.64.0.99,1h --dhcp-range=100.65.0.50,100.65.0.99,1h "$@" \
        --pid-file=/run/isp-dnsmasq.pid --dhcp-leasefile=/run/isp-leases
    in_isp python3 /tests/installed.py serve $internet $other $internet6 &
}
# In the order in which the kernel prefers them.
defaults() { ip -4 -j route show default | jq -r 'sort_by(.metric)[].dev'; }
two_defaults() { [[ $(defaults | wc -l) -eq 2 ]]; }

install_it() {
    works "the package is installed" dpkg -i /root/mountain.deb
    same "installing starts nothing" "$(systemctl is-active mountain)" inactive
    works "check finds no fault" mountain check --adopt
    echo 'MOUNTAIN_ARGS="--adopt"' >/etc/default/mountain
    # An emulated processor is late at times. Only what is lost counts.
    sed -i 's/^#tolerance_ms .*/tolerance_ms = 1000.0/' /etc/mountain/mountain.toml
    works "the service starts" systemctl enable --now mountain
    within "both uplinks are measured" 60 settled 2
    same "one server, one uplink" "$(say flows tcp 30 $internet | jq '.failed == 0 and (.seen | length == 1)')" true
    # One server stands for all from here on.
    sed -i 's/^#spread .*/spread = "flow"/' /etc/mountain/mountain.toml
    works "the service starts anew" systemctl restart mountain
    within "both uplinks are measured again" 60 settled 2
    spread "TCP" tcp
    spread "UDP" udp
}

# dark DEVICE: that provider takes nothing any more, until `light`.
dark() {
    in_isp nft add table ip outage
    in_isp nft add chain ip outage in '{ type filter hook prerouting priority -400; }'
    in_isp nft add rule ip outage in iif "$1" drop
}
light() { in_isp nft delete table ip outage; }
outage() {
    dark "$wan0"
    within "the dead uplink is left" 10 is_left "$wan0"
    only_by "during an outage" tcp $internet "$(address_of "$wan1")"
    light
    within "it is used again" 30 settled 2
    spread "after an outage" tcp
}

# goes_on NAME COMMAND...: a connection outlives it, and new flows are placed again.
goes_on() {
    local name=$1 pid said
    shift
    python3 /tests/installed.py long $other >/run/long &
    pid=$!
    sleep 2
    works "$name" "$@"
    within "$name: settled again" 60 settled 2
    spread "$name" tcp
    kill "$pid"
    wait "$pid"
    said=$(</run/long)
    printf '%s: %s\n' "$name" "$said"
    same "$name: a connection goes on" "$(jq .whole <<<"$said")" true
}
main_pid() { systemctl show --property MainPID --value mountain; }
crash_it() { kill -KILL "$(main_pid)" && sleep 3; }
crash() {
    local pid
    pid=$(main_pid)
    goes_on "after kill -9" crash_it
    check "another process" "$(main_pid)" != "$pid"
}
upgrade() {
    local pid
    pid=$(main_pid)
    goes_on "after an upgrade" dpkg -i /root/mountain.deb
    check "the new version runs" "$(main_pid)" != "$pid"
}

vpn() {
    local server client
    server=$(wg genkey) client=$(wg genkey)
    in_isp ip link add wg0 type wireguard
    in_isp wg set wg0 listen-port 51820 private-key <(echo "$server") \
        peer "$(wg pubkey <<<"$client")" allowed-ips 10.9.0.2/32
    in_isp ip address add 10.9.0.1/24 dev wg0
    in_isp ip link set wg0 up
    cat >/etc/wireguard/tunnel.conf <<EOF
[Interface]
PrivateKey = $client
Address = 10.9.0.2/32
[Peer]
PublicKey = $(wg pubkey <<<"$server")
AllowedIPs = 0.0.0.0/0
Endpoint = $internet:51820
EOF
    works "wg-quick up" wg-quick up tunnel
    sleep 1
    only_by "through the tunnel, TCP" tcp $other 10.9.0.2
    only_by "through the tunnel, UDP" udp $other 10.9.0.2
    works "wg-quick down" wg-quick down tunnel
    within "settled after the tunnel" 30 settled 2
    spread "after the tunnel" tcp
    in_isp ip link del wg0
}

ipsec() {
    local result
    ip xfrm policy add src "$(address_of "$wan0")/32" dst $other/32 dir out action block
    sleep 2
    result=$(say flows tcp 8 $other)
    works "Mountain runs" systemctl is-active mountain
    check "flows that evade a policy" "$(jq '8 - .failed' <<<"$result")" == 0
    spread "beside a policy" tcp
    ip xfrm policy flush
    sleep 2
    result=$(say flows tcp 8 $other)
    check "flows without the policy: failed" "$(jq .failed <<<"$result")" == 0
}

firewall() {
    works "firewalld starts" systemctl start firewalld
    works "a zone" firewall-cmd --zone=external --change-interface="$wan1"
    sleep 2
    spread "with firewalld" tcp
    inner
    firewall-cmd --zone=trusted --change-interface=br0
    nft add table ip n
    nft add chain ip n out '{ type nat hook postrouting priority 100; }'
    nft add rule ip n out ip saddr 10.8.0.0/24 masquerade
    sleep 2
    local result
    result=$(ip netns exec inner python3 /tests/installed.py flows tcp 20 $internet)
    printf 'a container: %s\n' "$result"
    check "a container's flows by the uplinks" "$(jq "[.seen[\"$(address_of "$wan0")\", \"$(address_of "$wan1")\"]] | add" <<<"$result")" == 20
    nft flush ruleset
    sleep 2
    spread "after nft flush ruleset" tcp
    systemctl stop firewalld
    no_inner
}

# Busy connections of a container's go on.
loaded_anew() {
    local pid last result
    inner
    printf '%s\n' 'flush ruleset' 'table ip n {' 'chain out {' 'type nat hook postrouting priority 100' \
        'ip saddr 10.8.0.0/24 masquerade' '}' '}' >/run/rules
    works "a firewall" nft -f /run/rules
    sleep 3
    for last in {3..20}; do ip -n inner address add "10.8.0.$last/24" dev eth0; done
    ip netns exec inner python3 /tests/installed.py busy $internet 10.8.0.{2..20} >/run/busy &
    pid=$!
    sleep 3
    for _ in 1 2 3; do
        works "the firewall is loaded anew" nft -f /run/rules
        sleep 1
    done
    ip netns pids inner | xargs -r kill
    wait "$pid"
    result=$(</run/busy)
    printf 'busy: %s\n' "$result"
    check "busy connections by the second uplink" "$(jq ".seen[\"$(address_of "$wan1")\"] // 0" <<<"$result")" '>=' 1
    check "busy connections that broke" "$(jq .broken <<<"$result")" == 0
    no_inner
    nft flush ruleset
}

# A host behind this one, as containers are.
inner() {
    ip netns add inner
    ip link add br0 type veth peer name eth0 netns inner
    ip address add 10.8.0.1/24 dev br0
    ip link set br0 up
    ip -n inner address add 10.8.0.2/24 dev eth0
    ip -n inner link set eth0 up
    ip -n inner route add default via 10.8.0.1
    sysctl -qw net.ipv4.ip_forward=1
}
no_inner() {
    ip netns pids inner | xargs -r kill
    ip link del br0
    ip netns del inner
    sysctl -qw net.ipv4.ip_forward=0
}

ipv6() {
    local first second
    in_isp dnsmasq --conf-file=/dev/null --port=0 --bind-interfaces --interface="$(device 0 a)" --interface="$(device 1 a)" \
        --enable-ra --dhcp-range=2001:db8::,ra-only --dhcp-range=2001:db8:1::,ra-only --pid-file=/run/isp-ra.pid \
        --dhcp-leasefile=/run/isp-leases6
    within "IPv6 of both" 60 settled 4
    spread6 "IPv6, TCP" tcp
    spread6 "IPv6, UDP" udp
    first=$(address_of "$wan0" 6) second=$(address_of "$wan1" 6)
    in_isp nft add table ip6 outage
    in_isp nft add chain ip6 outage in '{ type filter hook prerouting priority -400; }'
    in_isp nft add rule ip6 outage in iif "$wan0" icmpv6 type != '{ nd-neighbor-solicit, nd-neighbor-advert, nd-router-solicit }' drop
    within "IPv6 leaves a dead uplink" 10 is_left "$wan0"
    only_by "during an outage of IPv6" tcp $internet6 "$second"
    spread "IPv4 beside it" tcp
    in_isp nft delete table ip6 outage
    within "IPv6 uses it again" 30 settled 4
    spread6 "after an outage of IPv6" tcp
    kill "$(</run/isp-ra.pid)"
    works "no IPv6 by the second" nmcli device modify "$wan1" ipv6.method link-local
    within "one IPv6 uplink is left" 30 settled 2
    only_by "as before, IPv6" tcp $internet6 "$first"
    works "no IPv6 by the first" nmcli device modify "$wan0" ipv6.method link-local
    spread "IPv4 goes on" tcp
}

cable() {
    works "a connection is taken down" nmcli device disconnect "$wan0"
    sleep 1
    only_by "with one connection" tcp $internet "$(address_of "$wan1")"
    works "and up again" nmcli device connect "$wan0"
    within "both connections" 60 settled 2
    spread "with both again" tcp
    works "another one is preferred" nmcli device modify "$wan1" ipv4.route-metric 50
    within "settled with another metric" 30 settled 2
    same "the preferred one" "$(defaults | head -n 1)" "$wan1"
    spread "with another metric" tcp
    nmcli device modify "$wan1" ipv4.route-metric 101
    nmcli device modify "$wan0" ipv4.route-metric 100
    within "settled with the old metric" 30 settled 2
    same "the first is preferred again" "$(defaults | head -n 1)" "$wan0"
}

sleeps() {
    local at
    at=$(cut -d. -f1 /proc/uptime)
    echo devices >/sys/power/pm_test
    goes_on "after sleeping" sh -c 'echo freeze >/sys/power/state'
    echo none >/sys/power/pm_test
    check "asleep, s" "$(($(cut -d. -f1 /proc/uptime) - at))" '>=' 5
}

containers() {
    local image result wan
    # Its root is the initial file system.
    mkdir -p /etc/systemd/system/docker.service.d
    printf '[Service]\nEnvironment=DOCKER_RAMDISK=true\n' >/etc/systemd/system/docker.service.d/ramdisk.conf
    systemctl daemon-reload
    works "Docker starts" systemctl start docker
    image=$(mktemp -d)
    mkdir "$image/bin"
    cp "$(command -v busybox)" "$image/bin/"
    tar -C "$image" -cf /run/image.tar .
    works "an image" docker import /run/image.tar box
    rm -r "$image"
    sleep 2
    spread "with Docker" tcp
    result=$(docker run --rm -v /:/host box busybox chroot /host python3 /tests/installed.py flows tcp 30 $internet)
    spread_of "a container, TCP" 4 "$result"
    result=$(docker run --rm -v /:/host box busybox chroot /host python3 /tests/installed.py flows udp 30 $internet)
    spread_of "a container, UDP" 4 "$result"
    works "a container's port" docker run --detach --name served -p 8000:7001 -v /:/host box \
        busybox chroot /host python3 /tests/installed.py serve
    sleep 3
    for wan in "$wan0" "$wan1"; do
        result=$(in_isp python3 /tests/installed.py flows tcp 10 "$(address_of "$wan")" 8000 $internet)
        printf 'a published port by %s: %s\n' "$wan" "$result"
        check "a published port by $wan" "$(jq ".failed" <<<"$result")" == 0
    done
    docker rm --force served
    systemctl stop docker docker.socket containerd
    ip link del docker0
    nft flush ruleset
    sysctl -qw net.ipv4.ip_forward=0
}

openvpn() {
    local way
    command openvpn --genkey secret /run/openvpn.key
    for way in 'redirect-gateway def1' redirect-gateway; do
        # Newer ones need the last.
        printf '%s\n' 'dev tun9' 'secret /run/openvpn.key' 'cipher AES-256-CBC' \
            'ignore-unknown-option allow-deprecated-insecure-static-crypto' allow-deprecated-insecure-static-crypto \
            >/run/openvpn.conf
        in_isp openvpn --config /run/openvpn.conf --ifconfig 10.7.0.1 10.7.0.2 --local $internet --daemon --writepid /run/openvpn-isp.pid
        # shellcheck disable=SC2086 # two words
        command openvpn --config /run/openvpn.conf --ifconfig 10.7.0.2 10.7.0.1 --remote $internet --$way --daemon \
            --writepid /run/openvpn.pid
        within "OpenVPN is up" 30 ping -c 1 -W 1 10.7.0.1
        sleep 1
        only_by "by OpenVPN ($way), TCP" tcp $other 10.7.0.2
        only_by "by OpenVPN ($way), UDP" udp $other 10.7.0.2
        kill "$(</run/openvpn.pid)" "$(</run/openvpn-isp.pid)"
        within "settled after OpenVPN" 30 settled 2
        spread "after OpenVPN" tcp
    done
}

wifi() {
    local card=wlan0 radio
    works "radios" modprobe mac80211_hwsim radios=2
    within "they are there" 20 test -e /sys/class/net/wlan1
    radio=$(basename "$(readlink -f /sys/class/net/wlan1/phy80211)")
    in_isp sleep 1000 &
    iw phy "$radio" set netns "$(ip netns pids isp | head -n 1)"
    in_isp ip address add 100.67.0.1/24 dev wlan1
    printf '%s\n' interface=wlan1 driver=nl80211 ssid=net channel=1 hw_mode=g wpa=2 wpa_key_mgmt=WPA-PSK \
        rsn_pairwise=CCMP wpa_passphrase=password >/run/hostapd.conf
    in_isp hostapd -B -P /run/hostapd.pid /run/hostapd.conf
    in_isp dnsmasq --conf-file=/dev/null --port=0 --bind-interfaces --interface=wlan1 \
        --dhcp-range=100.67.0.50,100.67.0.99,1h --pid-file=/run/isp-wifi.pid --dhcp-leasefile=/run/isp-wifi
    systemctl start wpa_supplicant
    within "connected" 90 nmcli device wifi connect net password password ifname $card
    within "Wi-Fi is an uplink" 60 settled 3
    spread "with Wi-Fi" tcp "$wan0" "$wan1" $card
    kill "$(</run/hostapd.pid)"
    within "Wi-Fi is left" 20 sh -c "! mountain status --json | jq -e '.paths[] | select(.device == \"$card\" and .state == \"good\")'"
    spread "without the access point" tcp
    in_isp hostapd -B -P /run/hostapd.pid /run/hostapd.conf
    within "Wi-Fi is back" 120 settled 3
    spread "Wi-Fi again" tcp "$wan0" "$wan1" $card
    works "Wi-Fi is off" nmcli radio wifi off
    within "two again" 30 settled 2
    spread "Wi-Fi is off" tcp
    kill "$(</run/hostapd.pid)" "$(</run/isp-wifi.pid)"
    rmmod mac80211_hwsim
}

simple_firewall() {
    works "ufw" ufw --force enable
    sleep 2
    spread "with ufw, TCP" tcp
    spread "with ufw, UDP" udp
    works "no ufw" ufw disable
    nft flush ruleset
}

# What an administrator does with NetworkManager's connections: routes and addresses are made again.
reconnected() {
    goes_on "a connection is applied again" nmcli device reapply "$wan0"
    goes_on "a connection is activated again" nmcli connection up "$(nmcli -g GENERAL.CONNECTION device show "$wan1")"
    goes_on "NetworkManager starts anew" systemctl restart NetworkManager
}

redirects() {
    local wan result
    inner
    ip netns exec inner python3 /tests/installed.py serve 10.8.0.2 &
    for wan in "$wan0" "$wan1"; do
        works "a redirect of $wan" mountain redirect add --proto udp --from "$(address_of "$wan"):9000" --to 10.8.0.2:7000
        # It is answered from there, by whatever uplink the kernel would use.
        result=$(in_isp python3 /tests/installed.py flows udp 10 "$(address_of "$wan")" 9000 $internet)
        printf 'redirected: %s\n' "$result"
        check "redirected by $wan" "$(jq ".seen[\"$internet\"] // 0" <<<"$result")" == 10
    done
    works "rules are saved" mountain redirect save
    works "rules go" mountain redirect del --all
    works "and come back with the service" systemctl start mountain-redirect
    result=$(in_isp python3 /tests/installed.py flows udp 10 "$(address_of "$wan1")" 9000 $internet)
    check "redirected again" "$(jq ".seen[\"$internet\"] // 0" <<<"$result")" == 10
    works "they go with it" systemctl stop mountain-redirect
    # This host's own flows from a rule's port. Their answers are known by connection tracking, here a module.
    # By tcx replies leave by the rule's device: the one that the kernel prefers.
    wan=$(defaults | head -n 1)
    nft add table ip t
    nft add chain ip t out '{ type filter hook output priority 0; }'
    nft add rule ip t out ct state new counter
    works "a redirect by tcx" mountain redirect add --proto udp --backend tcx --from "$(address_of "$wan"):9001" --to 10.8.0.2:7000
    result=$(in_isp python3 /tests/installed.py flows udp 10 "$(address_of "$wan")" 9001 $internet)
    check "redirected by tcx" "$(jq ".seen[\"$internet\"] // 0" <<<"$result")" == 10
    result=$(say flows udp 10 $other 7000 "$(address_of "$wan")" 9001)
    check "answers to this host itself" "$(jq ".seen[\"$(address_of "$wan")\"] // 0" <<<"$result")" == 10
    mountain redirect del --all
    nft delete table ip t
    no_inner
}

congestion_control() {
    works "cc enable" mountain cc enable --default
    same "new connections use it" "$(sysctl -n net.ipv4.tcp_congestion_control)" mountain
    spread "with cc" tcp
    works "cc disable" mountain cc disable
    same "the kernel's again" "$(sysctl -n net.ipv4.tcp_congestion_control)" cubic
}

pppoe() {
    works "the kernel has PPPoE" modprobe pppoe
    # By a card: what leads to another namespace is no uplink where there are cards.
    local line far
    line=$(device 2 a) far=$(device 2 b)
    ip netns add dsl
    ip link set "$far" netns dsl
    ip link set "$line" up
    ip -n dsl link set "$far" up
    ip -n dsl link set lo up
    ip -n dsl address add $internet/32 dev lo
    printf 'noauth\nlcp-echo-interval 10\nmtu 1492\n' >/etc/ppp/server-options
    # Another /run: its pppd is on another host, and would say there that it has the device ppp0.
    ip netns exec dsl unshare --mount sh -c 'mount -t tmpfs run /run && exec "$@"' sh pppoe-server -k \
        -g "$(find /usr/lib/pppd -name pppoe.so)" -I "$far" -L 100.66.0.1 -R 100.66.0.50 -N 4 -O /etc/ppp/server-options
    ip netns exec dsl python3 /tests/installed.py serve $internet &
    sleep 1
    printf '%s\n' 'plugin pppoe.so' "nic-$line" noauth 'user "u"' 'password "p"' defaultroute \
        'defaultroute-metric 150' persist noipv6 >/etc/ppp/peers/dsl
    pppd call dsl
    within "PPPoE is an uplink" 60 settled 3
    spread "with PPPoE" tcp "$wan0" "$wan1" ppp0
    pkill -x pppd
    within "PPPoE is gone" 30 settled 2
    spread "after PPPoE" tcp
    rm /etc/ppp/peers/dsl
    nmcli device set "$line" managed yes
    nmcli connection add type pppoe con-name dsl ifname ppp0 pppoe.parent "$line" \
        pppoe.username u pppoe.password p ipv6.method disabled autoconnect no
    works "PPPoE by NetworkManager" nmcli connection up dsl
    within "NetworkManager's PPPoE is an uplink" 60 settled 3
    spread "with NetworkManager's PPPoE" tcp "$wan0" "$wan1" ppp0
    works "PPPoE is taken down" nmcli connection delete dsl
    within "NetworkManager's PPPoE is gone" 30 settled 2
    nmcli device set "$line" managed no
    ip netns pids dsl | xargs -r kill
    ip netns del dsl
}

networkd() {
    local n=0 wan
    for wan in "$wan0" "$wan1"; do
        printf '[Match]\nName=%s\n[Network]\nDHCP=ipv4\n[DHCPv4]\nRouteMetric=%s\n' "$wan" $((100 + n++)) \
            >"/etc/systemd/network/10-$wan.network"
    done
    systemctl stop NetworkManager
    ip address flush dev "$wan0"
    ip address flush dev "$wan1"
    works "networkd starts" systemctl start systemd-networkd
    within "both uplinks by networkd" 60 settled 2
    spread "with networkd" tcp
    goes_on "networkd starts anew" systemctl restart systemd-networkd
}

# The whole of it, as it comes up by itself.
boot() {
    local unit result
    same "failed units" "$(systemctl --failed --plain --no-legend)" ''
    for unit in mountain mountain-cc mountain-redirect; do
        same "$unit runs" "$(systemctl is-active $unit)" active
        same "$unit was started once" "$(systemctl show --property NRestarts --value $unit)" 0
    done
    same "cycles" "$(journalctl -b --no-pager -o cat | grep -i 'ordering cycle')" ''
    within "both uplinks are measured" 60 settled 2
    same "new connections use cc" "$(sysctl -n net.ipv4.tcp_congestion_control)" mountain
    spread "after booting, TCP" tcp
    spread "after booting, UDP" udp
    result=$(in_isp python3 /tests/installed.py flows udp 10 100.64.0.60 9000 $internet)
    printf 'redirected: %s\n' "$result"
    check "redirected after booting: failed" "$(jq .failed <<<"$result")" == 0
    # In the order in which it is done when it goes down.
    works "it goes down" systemctl stop NetworkManager mountain mountain-cc mountain-redirect
    same "by itself" "$(journalctl -b --no-pager -o cat -t systemd | grep -E 'timed out|SIGKILL')" ''
    same "the kernel's cc again" "$(sysctl -n net.ipv4.tcp_congestion_control)" cubic
    # Sockets that were made meanwhile keep it.
    ip netns pids isp | xargs -r kill
    # shellcheck disable=SC2016 # for sh to expand
    within "no cc is left" 60 sh -c '[ "$(bpftool -j struct_ops list | jq length)" = 0 ]'
    refused "rules are left" sh -c 'nft list ruleset | grep -q mountain'
}

remove() {
    works "the service stops" systemctl stop mountain
    works "the package goes" dpkg -P mountain
    # Its administrator's.
    rm /etc/default/mountain
    same "nothing is left" "$(settings)" "$before"
    only_by "as without Mountain" tcp $internet "$(address_of "$(defaults | head -n 1)")"
}

# part NAME: runs that function.
part() {
    echo "mountain-vm: begin $1"
    "$1"
    echo "mountain-vm: end $1 $SECONDS"
}

# By a unit of the machine that boots: a redirect there is for an address that is known before.
if [[ ${1:-} == providers ]]; then
    providers --dhcp-host=52:54:00:00:00:0a,100.64.0.60
    exit
fi
[[ ${only:-} == boot ]] || part providers
within "two default routes" 120 two_defaults
{ read -r wan0 && read -r wan1; } < <(defaults)
if [[ ${only:-} == boot ]]; then
    part boot
    echo "mountain-vm: complete"
    exit
fi
before=$(settings)
part install_it
# Shorewall's comes last: it leaves a rule for the main table that networkd takes for somebody's, and deletes.
for name in ${only:-outage cable reconnected sleeps crash upgrade ipv6 wifi vpn openvpn ipsec firewall simple_firewall loaded_anew workstation queue services containers libvirt podman rootless incus nspawn proxmox redirects congestion_control pppoe strongswan bgp ospf mptcp tailscale mesh vrrp six_in_four shaping connectivity upnp dhcpcd_alone classic netplan_tables networkd multi_isp}; do
    part "$name"
done
part remove
echo "mountain-vm: complete"

# SPDX-License-Identifier: GPL-2.0-or-later
# Parts of tests/kernels/installed with guests: virtual machines and containers of other software than Docker. Sourced by
# installed.sh.
# Variables of installed.sh are single words.
# shellcheck shell=bash disable=SC2154,SC2086

# guest NAME BRIDGE ADDRESS/LENGTH GATEWAY: a machine whose card is a port of that bridge.
guest() {
    ip netns add "$1"
    ip link add "$1-tap" type veth peer name eth0 netns "$1"
    ip link set "$1-tap" master "$2" up
    ip -n "$1" link set lo up
    ip -n "$1" link set eth0 up
    ip -n "$1" address add "$3" dev eth0
    ip -n "$1" route add default via "$4"
}
no_guest() {
    ip netns pids "$1" | xargs -r kill
    ip netns del "$1"
}
# guest_by NAME COMMAND...: run by that command, a guest's new flows use both uplinks, and the one that is left in an outage.
# Datagrams of one to which ports are forwarded use the kernel's, as long as that is alive.
guest_by() {
    local name=$1 result
    shift
    spread_of "$name, TCP" 4 "$("$@" python3 /tests/installed.py flows tcp 30 $internet)"
    result=$("$@" python3 /tests/installed.py flows udp 30 $internet)
    case $name in
        podman | incus | nspawn*)
            check "$name, UDP: by the kernel's uplink" "$(jq ".seen[\"$(address_of "$wan0")\"] // 0" <<<"$result")" == 30
            ;;
        *) spread_of "$name, UDP" 4 "$result" ;;
    esac
    dark "$wan0"
    within "$name: the dead uplink is left" 10 is_left "$wan0"
    result=$("$@" python3 /tests/installed.py flows tcp 10 $internet)
    check "$name, during an outage" "$(jq ".seen[\"$(address_of "$wan1")\"] // 0" <<<"$result")" == 10
    light
    within "$name: it is used again" 30 settled 2
}
# published NAME: TCP 8000 and UDP 8001 of both uplinks are answered.
published() {
    local wan result
    for wan in "$wan0" "$wan1"; do
        result=$(in_isp python3 /tests/installed.py flows tcp 10 "$(address_of "$wan")" 8000 $internet)
        check "$1, TCP by $wan: failed" "$(jq .failed <<<"$result")" == 0
        result=$(in_isp python3 /tests/installed.py flows udp 10 "$(address_of "$wan")" 8001 $internet)
        check "$1, UDP by $wan: failed" "$(jq .failed <<<"$result")" == 0
    done
}
# box FOLDER: a container's file system.
box() {
    mkdir -p "$1"/{bin,etc,usr,proc,sys,dev,run,tmp,host}
    touch "$1/etc/os-release"
    cp "$(command -v busybox)" "$1/bin/"
}

libvirt() {
    local backend
    for backend in iptables nftables; do
        echo "firewall_backend = \"$backend\"" >/etc/libvirt/network.conf
        works "libvirt starts ($backend)" systemctl restart libvirtd
        works "its network ($backend)" virsh -c network:///system net-start default
        guest vm virbr0 192.168.122.10/24 192.168.122.1
        sleep 3
        guest_by "a virtual machine ($backend)" ip netns exec vm
        [[ $backend == nftables ]] || goes_on "libvirt starts anew" systemctl restart libvirtd
        no_guest vm
        works "its network goes ($backend)" virsh -c network:///system net-destroy default
        nft flush ruleset
    done
    systemctl stop libvirtd libvirtd{,-ro,-admin}.socket
    sysctl -qw net.ipv4.ip_forward=0
}

podman() {
    # Its root is the initial file system.
    mkdir -p /etc/containers /var/lib/containers
    printf '[engine]\nno_pivot_root = true\n' >/etc/containers/containers.conf
    mount -t tmpfs tmpfs /var/lib/containers
    box /run/box
    tar -C /run/box -cf /run/image.tar .
    works "an image for podman" command podman import /run/image.tar box
    # shellcheck disable=SC2016 # for the shell there
    works "podman's ports" command podman run --detach --name served -p 8000:7001 -p 8001:7000/udp -v /:/host box /bin/busybox sh -c \
        'a=$(ip -4 -o addr show eth0 | sed "s/.*inet //;s,/.*,,") && exec chroot /host python3 /tests/installed.py serve $a'
    sleep 4
    guest_by "podman" command podman exec served /bin/busybox chroot /host
    published "podman"
    goes_on "podman's container starts anew" command podman restart -t 1 served
    sleep 4
    published "podman again"
    command podman rm --force -t 0 served
    nft delete table inet netavark
    ip link del podman0
    umount /var/lib/containers
    sysctl -qw net.ipv4.ip_forward=0
}

rootless() {
    local result
    box /run/box
    tar -C /run/box -cf /run/image.tar .
    useradd --create-home --shell /bin/bash user
    mount -t tmpfs -o mode=777 tmpfs /home/user
    mkdir -p /run/user/1000
    chown user /run/user/1000
    cat >/run/rootless <<'EOF'
export XDG_RUNTIME_DIR=/run/user/1000
cd
mkdir -p .config/containers
printf '[engine]\nno_pivot_root = true\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n' >.config/containers/containers.conf
podman import -q /run/image.tar box
run() { podman run --rm --network "$1" -v /:/host box /bin/busybox chroot /host python3 /tests/installed.py flows "$2" 30 203.0.113.1; }
run pasta tcp >pasta
run pasta udp >pasta-udp
run slirp4netns tcp >slirp
podman run --detach -p 8000:7001 -p 8001:7000/udp -v /:/host box /bin/busybox chroot /host python3 /tests/installed.py serve 0.0.0.0
EOF
    # pasta wants to leave its root, which the initial file system does not let it.
    # shellcheck disable=SC2016 # for sh to expand
    works "podman without root" unshare --mount sh -c 'mkdir -p /mnt/r && mount --rbind / /mnt/r && cd /mnt/r && mount --move . / &&
        exec chroot . su - user -c "bash /run/rootless"'
    spread_of "pasta, TCP" 4 "$(</home/user/pasta)"
    # It binds its guest's ports, and such sockets are left to the kernel.
    result=$(</home/user/pasta-udp)
    check "pasta, UDP: failed" "$(jq .failed <<<"$result")" == 0
    spread_of "slirp4netns, TCP" 4 "$(</home/user/slirp)"
    published "pasta"
    pkill -KILL -u user
    umount -l /home/user
    userdel user
}

incus() {
    local net wan
    mount -t tmpfs tmpfs /var/lib/incus
    works "incus starts" systemctl start incus
    works "its network" command incus admin init --minimal
    net=$(command incus network get incusbr0 ipv4.address)
    net=${net%.*}
    guest c incusbr0 "$net.50/24" "$net.1"
    ip netns exec c python3 /tests/installed.py serve "$net.50" &
    for wan in "$wan0" "$wan1"; do
        command incus network forward create incusbr0 "$(address_of "$wan")"
        command incus network forward port add incusbr0 "$(address_of "$wan")" tcp 8000 "$net.50" 7001
        command incus network forward port add incusbr0 "$(address_of "$wan")" udp 8001 "$net.50" 7000
    done
    sleep 3
    guest_by "incus" ip netns exec c
    published "incus"
    goes_on "incus starts anew" systemctl restart incus
    no_guest c
    command incus profile device remove default eth0
    works "incus's network goes" command incus network delete incusbr0
    systemctl stop incus incus.socket lxcfs
    nft delete table inet incus
    umount /var/lib/incus
    sysctl -qw net.ipv4.ip_forward=0 net.ipv6.conf.all.forwarding=0
}

nspawn() {
    local kind leader address
    box /run/box
    # shellcheck disable=SC2016 # for the shell there
    printf '#!/bin/busybox sh\n[ $1 != bound ] || { busybox ifconfig host0 $ip netmask $subnet; busybox route add default gw $router; }\n' \
        >/run/dhcp
    chmod +x /run/dhcp
    systemctl start systemd-networkd
    for kind in --network-veth --network-zone=z; do
        systemd-nspawn -q -D /run/box --bind /:/host -M box $kind -p tcp:8000:7001 -p udp:8001:7000 /bin/busybox sh -c \
            'busybox ifconfig host0 up; busybox udhcpc -i host0 -n -s /host/run/dhcp; exec busybox sleep 600' </dev/null &
        # shellcheck disable=SC2016 # for sh to expand
        within "nspawn $kind has its address" 60 sh -c \
            'nsenter -n -t "$(machinectl show box -p Leader --value)" ip -4 -o address show host0 | grep -q "inet 192"'
        leader=$(machinectl show box -p Leader --value)
        address=$(nsenter -n -t "$leader" ip -4 -j address show host0 scope global | jq -r '.[0].addr_info[0].local')
        nsenter -n -t "$leader" python3 /tests/installed.py serve "$address" &
        sleep 3
        guest_by "nspawn $kind" nsenter -n -t "$leader"
        published "nspawn $kind"
        kill $!
        machinectl terminate box
        sleep 3
    done
    systemctl stop systemd-networkd systemd-networkd.socket
    nft delete table ip io.systemd.nat
    nft delete table ip6 io.systemd.nat
    sysctl -qw net.ipv4.ip_forward=0
}

forwarded() { mountain status --json | jq .placement.counters.placed_forwarded; }
# The first uplink's card is a port of a bridge with VLANs, as Proxmox VE has it, and machines are others.
proxmox() {
    local card=$wan0 kind address net placed
    modprobe 8021q
    address=$(address_of "$card")
    net=${address%.*}
    nmcli device set "$card" managed no
    ip address flush dev "$card"
    ip link add vmbr0 address "$(</sys/class/net/"$card"/address)" type bridge vlan_filtering 1 forward_delay 0
    ip link set "$card" master vmbr0
    bridge vlan add dev "$card" vid 2-4094
    ip link set vmbr0 up
    ip address add "$address/24" dev vmbr0
    ip route add default via "$net.1" dev vmbr0 onlink
    # A machine in the provider's network, one with a tag and a firewall's bridge, and one behind this host.
    guest g1 vmbr0 "$net.30/24" "$net.1"
    ip link add fwbr1 type bridge forward_delay 0
    ip link add fwpr1 type veth peer name fwln1
    ip link set fwln1 master fwbr1 up
    ip link set fwpr1 master vmbr0 up
    ip link set fwbr1 up
    bridge vlan del dev fwpr1 vid 1
    bridge vlan add dev fwpr1 vid 20 pvid untagged
    guest g2 fwbr1 10.20.0.30/24 10.20.0.1
    in_isp ip link add link "$card" name v20 type vlan id 20
    in_isp ip address add 10.20.0.1/24 dev v20
    in_isp ip link set v20 up
    ip link add vmbr1 type bridge forward_delay 0
    ip address add 10.10.10.1/24 dev vmbr1
    ip link set vmbr1 up
    guest n1 vmbr1 10.10.10.10/24 10.10.10.1
    sysctl -qw net.ipv4.ip_forward=1
    iptables -t nat -A POSTROUTING -s 10.10.10.0/24 ! -d 10.10.10.0/24 -j MASQUERADE
    iptables -t nat -A PREROUTING ! -s 10.10.10.0/24 -p tcp --dport 8000 -j DNAT --to 10.10.10.10:7001
    iptables -t nat -A PREROUTING ! -s 10.10.10.0/24 -p udp --dport 8001 -j DNAT --to 10.10.10.10:7000
    ip netns exec n1 python3 /tests/installed.py serve 10.10.10.10 &
    wan0=vmbr0
    # Until the bridge has met the gateway, that may be behind any of its ports. Nothing tells of that.
    sleep 5
    works "the gateway is met" ping -c 1 -W 3 "$net.1"
    within "the bridge is an uplink" 60 settled 2
    spread "by a bridge" tcp
    for kind in tcp udp; do
        same "a bridged machine, $kind" "$(ip netns exec g1 python3 /tests/installed.py flows $kind 20 $internet | jq -c .seen)" "{\"$net.30\":20}"
        same "one with a tag, $kind" "$(ip netns exec g2 python3 /tests/installed.py flows $kind 20 $internet | jq -c .seen)" '{"10.20.0.30":20}'
    done
    published "a machine behind this host"
    modprobe br_netfilter
    placed=$(forwarded)
    for kind in tcp udp; do
        same "a bridged machine with br_netfilter, $kind" \
            "$(ip netns exec g2 python3 /tests/installed.py flows $kind 20 $internet | jq -c .seen)" '{"10.20.0.30":20}'
    done
    same "what is bridged is not placed" "$(forwarded)" "$placed"
    spread_of "a machine behind this host" 4 "$(ip netns exec n1 python3 /tests/installed.py flows tcp 30 $internet)"
    dark "$card"
    within "the dead bridge is left" 10 is_left vmbr0
    only_by "during an outage of the bridge" tcp $internet "$(address_of "$wan1")"
    light
    within "the bridge is used again" 30 settled 2
    rmmod br_netfilter
    no_guest g1
    no_guest g2
    no_guest n1
    in_isp ip link del v20
    ip link del vmbr1
    ip link del fwbr1
    ip link del fwpr1
    ip link del vmbr0
    wan0=$card
    iptables -t nat -F
    nft delete table ip nat
    sysctl -qw net.ipv4.ip_forward=0
    nmcli device set "$card" managed yes
    nmcli device connect "$card"
    within "the card is an uplink again" 60 settled 2
    spread "without the bridge" tcp
}

#!/bin/bash
# Path metrics and what is below: over virtio_net what is counted is what the other end receives, trains of
# segments, of TCP and UDP, with the headers of each; netem's losses and duplicates; what a qdisc or a driver
# refuses is not counted, nor what finds no carrier, what is dropped later is.
# mode: virtual
# kernel: patched
# netns: init
# nics: 1
# seconds: 600
# shellcheck source=kernel/tests/lib.sh
. /tests/lib.sh
need iperf3 udp_talk

# c - d by virtio_net, a - b by veth, with nothing but this test's packets on them.
devices=()
for dev in /sys/class/net/*; do
    [[ $(basename "$(readlink "$dev/device/driver")") != virtio_net ]] || devices+=("$(basename "$dev")")
done
check "virtio_net devices" "${#devices[@]}" == 2
for ns in a b c d; do
    ip netns add $ns
    ip -n $ns link set lo up
    ip netns exec $ns sysctl -qw net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.default.disable_ipv6=1
done
ip link set "${devices[0]}" netns c name vc
ip link set "${devices[1]}" netns d name vd
ip link add va netns a type veth peer name vb netns b
n=0
for ns in a b c d; do
    n=$((n + 1))
    ip -n $ns address add 192.0.2.$n/24 dev v$ns
    ip -n $ns link set v$ns up
done
# No ARP.
neighbour() {
    ip -n "$1" neigh add "192.0.2.$3" dev "v$1" \
        lladdr "$(ip -n "$2" -j link show "v$2" | jq -r '.[0].address')"
}
neighbour a b 2
neighbour b a 1
neighbour c d 4
neighbour d c 3
# Nor answers to datagrams.
for ns in b d; do
    ip netns exec $ns nft 'table ip quiet { chain input { type filter hook input priority 0; udp dport 9 drop; }; }'
done

# pair NS NS: from whom to whom, by which devices.
pair() {
    from=$1 to=$2 there=192.0.2.2
    [[ $2 != d ]] || there=192.0.2.4
}
# counted: by the path; arrived: at the other end, as its driver has it; dropped: by the qdisc. Packets, bytes.
counted() {
    awk -v dev="v$from" '$1 == dev && $2 == "-" { print $4; print $3 }' \
        <(ip netns exec "$from" cat /proc/net/path_metrics)
}
arrived() { ip -n "$to" -j -s link show "v$to" | jq '.[0].stats64.rx | .packets, .bytes'; }
dropped() { tc -n "$from" -j -s qdisc show dev "v$from" root | jq '[.[].drops] | add'; }
begin() {
    mapfile -t counted0 < <(counted)
    mapfile -t arrived0 < <(arrived)
    dropped0=$(dropped)
}
# finish: what has been since: packets and bytes, counted_p and so on.
finish() {
    local n
    sleep 2
    mapfile -t n < <(counted)
    counted_p=$((n[0] - counted0[0])) counted_b=$((n[1] - counted0[1]))
    mapfile -t n < <(arrived)
    arrived_p=$((n[0] - arrived0[0])) arrived_b=$((n[1] - arrived0[1]))
    dropped_p=$(($(dropped) - dropped0))
    echo "counted $counted_p packets, $counted_b bytes; arrived $arrived_p, $arrived_b; dropped $dropped_p"
}
# 100 trains of ten of 1042 bytes each, headers and all.
udp_trains() { ip netns exec "$from" udp_talk trains "$there" 9 100 10 1000; }
# 1100 of 106 bytes each, headers and all.
datagrams() { ip netns exec "$from" cost send 1000 "$there" >/dev/null; }
transfer() {
    ip netns exec "$to" iperf3 -s -1 -D
    sleep 0.5
    ip netns exec "$from" timeout 120 iperf3 -c "$there" -n "$1" >/dev/null
}
all_of_it() {
    check "$1: packets counted that did not arrive" $((counted_p - arrived_p)) == 0
    check "$1: bytes counted that did not arrive" $((counted_b - arrived_b)) == 0
}

trace=/sys/kernel/tracing
pair c d
begin
datagrams
finish
check "off: arrived" "$arrived_p" == 1100
check "off: counted" "${counted_p:-none}" == 0
for ns in a c; do ip netns exec $ns sysctl -qw net.ipv4.path_metrics=1; done

begin
datagrams
finish
check "virtio_net, datagrams" "$counted_p" == 1100
check "virtio_net, datagrams: bytes" "$counted_b" == $((1100 * 106))
all_of_it "virtio_net, datagrams"

# What is queued, trains whole, with one header each.
echo >$trace/trace
echo 'name == "vc"' >$trace/events/net/net_dev_queue/filter
echo 1 >$trace/events/net/net_dev_queue/enable
begin
works "virtio_net: TCP" transfer 3M
finish
echo 0 >$trace/events/net/net_dev_queue/enable
mapfile -t queued < <(sed -n 's/.*net_dev_queue: .* len=\([0-9]*\).*/\1/p' $trace/trace |
    awk '{ n++; b += $1; if ($1 > 1514) trains++ } END { print n + 0; print b + 0; print trains + 0 }')
echo "queued ${queued[0]} packets, ${queued[1]} bytes, of them ${queued[2]} trains of segments"
check "virtio_net, TCP: trains of segments" "${queued[2]}" ">" 20
all_of_it "virtio_net, TCP"
# Ethernet, IPv4, and TCP with its timestamps.
check "virtio_net, TCP: bytes counted are the queued ones and 66 for each other segment" \
    $((counted_b - queued[1] - 66 * (counted_p - queued[0]))) == 0

begin
works "virtio_net: trains of datagrams" udp_trains
finish
check "virtio_net, trains of datagrams" "$counted_p" == 1000
check "virtio_net, trains of datagrams: bytes" "$counted_b" == $((1000 * 1042))
all_of_it "virtio_net, trains of datagrams"

# Netem: nothing changes by delay, loss is its secret, what it makes twice was sent once.
tc -n c qdisc replace dev vc root netem delay 5ms rate 50mbit limit 10000
begin
works "netem with delay and rate: TCP" transfer 3M
finish
all_of_it "netem with delay and rate, TCP"
tc -n c qdisc replace dev vc root netem loss 30%
begin
datagrams
finish
check "netem with loss: lost" "$dropped_p" ">" 200
check "netem with loss: counted, the lost ones too" "$counted_p" == 1100
check "netem with loss: neither arrived nor lost" $((counted_p - arrived_p - dropped_p)) == 0
tc -n c qdisc del dev vc root
tc -n c qdisc replace dev vc root netem duplicate 30%
begin
datagrams
finish
check "netem that duplicates: arrived" "$arrived_p" ">" 1300
check "netem that duplicates: counted" "$counted_p" == 1100
tc -n c qdisc del dev vc root

# Refused at once: there is room for ten.
tc -n c qdisc replace dev vc root netem delay 200ms limit 10
begin
datagrams
finish
check "full qdisc: refused" "$dropped_p" ">" 500
check "full qdisc: neither counted nor refused" $((1100 - counted_p - dropped_p)) == 0
all_of_it "full qdisc"
begin
works "full qdisc: TCP" transfer 100K
finish
all_of_it "full qdisc, TCP"
tc -n c qdisc del dev vc root
# NET_XMIT_CN: the newest is taken, and the oldest goes for it.
tc -n c qdisc replace dev vc root handle 1: tbf rate 200kbit burst 2000 limit 100000
tc -n c qdisc replace dev vc parent 1:1 pfifo_head_drop limit 10
begin
datagrams
finish
check "qdisc that drops its oldest: arrived" "$arrived_p" "<" 600
check "qdisc that drops its oldest: counted, as all were taken" "$counted_p" == 1100
tc -n c qdisc del dev vc root

# Without a qdisc the driver says: veth refuses what its peer's MTU does not allow.
pair a b
begin
datagrams
finish
all_of_it "veth, datagrams"
ip netns exec a ethtool -K va tso off gso off >/dev/null
begin
works "veth without TSO: TCP" transfer 3M
finish
all_of_it "veth without TSO, TCP"
ip netns exec a ethtool -K va tso on gso on >/dev/null
begin
works "veth with TSO: TCP" transfer 3M
finish
check "veth with TSO: segments counted for each packet that arrived" \
    "$(awk "BEGIN { print $counted_p / $arrived_p }")" ">" 2
check "veth with TSO: bytes counted are those that arrived and 66 for each other segment" \
    $((counted_b - arrived_b - 66 * (counted_p - arrived_p))) == 0
begin
works "veth: trains of datagrams" udp_trains
finish
echo "veth: $arrived_p packets for 1000 datagrams"
check "veth, trains of datagrams" "$counted_p" == 1000
check "veth, trains of datagrams: bytes" "$counted_b" == $((1000 * 1042))
ip netns exec a ethtool -K va tx-udp-segmentation off gso off >/dev/null
begin
works "veth without UDP segmentation: trains of datagrams" udp_trains
finish
check "veth without UDP segmentation" "$counted_p" == 1000
all_of_it "veth without UDP segmentation"
ip netns exec a ethtool -K va tx-udp-segmentation on gso on >/dev/null
ip -n b link set vb mtu 1000
begin
for ((n = 0; n < 10; n++)); do
    ip netns exec a bash -c "printf %01200d 0 >/dev/udp/$there/9; printf %0100d 0 >/dev/udp/$there/9"
done
finish
check "veth that refuses long ones: counted" "$counted_p" == 10
all_of_it "veth that refuses long ones"
ip -n b link set vb mtu 1500

# Without a carrier all is dropped, in a way that elsewhere means that this or another packet was.
ip -n b link set vb down
for qdisc in none fq_codel; do
    [[ $qdisc == none ]] || tc -n a qdisc replace dev va root $qdisc
    begin
    datagrams
    finish
    check "no carrier, qdisc $qdisc: arrived" "$arrived_p" == 0
    check "no carrier, qdisc $qdisc: counted" "${counted_p:-none}" == 0
done
ip -n b link set vb up
begin
datagrams
finish
check "the carrier is back: counted" "$counted_p" == 1100
all_of_it "the carrier is back"

# As they were.
ip -n c link set vc down
ip -n d link set vd down
ip -n c link set vc name "${devices[0]}" netns $$
ip -n d link set vd name "${devices[1]}" netns $$

#!/bin/bash
# Scores while everything changes: routes, groups and links flap, sysctls go through their values and user
# space says what it likes about delays, under load. Nothing is lost for good, all paths are in use
# afterwards; and namespaces end while their scores are on. Asserts no times.
# mode: smp
# kernel: patched
# selftests: yes
# seconds: 1200
# shellcheck source=kernel/tests/lib.sh
. /tests/lib.sh
need iperf3

# a - b by three veths; of these the first stays, and is the way back.
world() {
    local i
    ip netns add a
    ip netns add b
    ip -n a link set lo up
    ip -n b link set lo up
    ip -n a address add 10.9.9.1/32 dev lo
    ip -n a address add 2001:db8:99::1/128 dev lo
    ip -n b address add 10.10.0.1/32 dev lo
    ip -n b address add 2001:db8:10::1/128 dev lo
    ip netns exec a sysctl -qw net.ipv6.conf.default.keep_addr_on_down=1 \
        net.ipv4.fib_multipath_hash_policy=1 net.ipv6.fib_multipath_hash_policy=1
    for i in 0 1 2; do
        ip link add a$i netns a type veth peer name b$i netns b
        ip -n a address add 10.8.$i.1/24 dev a$i
        ip -n b address add 10.8.$i.2/24 dev b$i
        ip -n a address add 2001:db8:8$i::1/64 dev a$i nodad
        ip -n b address add 2001:db8:8$i::2/64 dev b$i nodad
        ip -n a link set a$i up
        ip -n b link set b$i up
        ip -n a nexthop add id 4$i via 10.8.$i.2 dev a$i
        ip -n a nexthop add id 6$i via 2001:db8:8$i::2 dev a$i
    done
    ip -n b route add 10.9.9.1 via 10.8.0.1
    ip -n b -6 route add 2001:db8:99::1 via 2001:db8:80::1
    ip -n a nexthop add id 4 group 40/41/42
    ip -n a nexthop add id 6 group 60/61/62
    routes 1 1 1
}
# routes WEIGHT WEIGHT WEIGHT: to 10.10.0.0/16 and 2001:db8:10::/64, anew. 0: not by this one.
routes() {
    local i=0 weight four=() six=()
    for weight; do
        if [[ $weight != 0 ]]; then
            four+=(nexthop via "10.8.$i.2" dev "a$i" weight "$weight")
            six+=(nexthop via "2001:db8:8$i::2" dev "a$i" weight "$weight")
        fi
        i=$((i + 1))
    done
    ip -n a route replace 10.10.0.0/16 src 10.9.9.1 "${four[@]}"
    ip -n a -6 route replace 2001:db8:10::/64 src 2001:db8:99::1 "${six[@]}"
}
groups() {
    ip -n a route replace 10.10.0.0/16 src 10.9.9.1 nhid 4
    ip -n a -6 route replace 2001:db8:10::/64 src 2001:db8:99::1 nhid 6
}
set_a() { ip netns exec a sysctl -qw "$@"; }
nl() { ip netns exec a /selftests/net/path_metrics_nl "$@"; }
devices_chosen() { ip netns exec a choices 1000 "$1" | awk 'NR > 1 && $2 >= 100 { n++ } END { print n + 0 }'; }

# Another namespace has it all on meanwhile, so that the kernel does not patch its code at each change, at which
# emulated processors that run side by side may fall over; and the first connections make it do that, too.
ip netns add keeper
ip netns exec keeper sysctl -qw net.ipv4.path_metrics=1 net.ipv4.fib_multipath_score=2
ip -n keeper link set lo up
for address in 127.0.0.1 ::1; do
    ip netns exec keeper bash -c "exec 3<>/dev/tcp/$address/9" 2>/dev/null
    sleep 2
done
RANDOM=6
world
works "scores on" set_a net.ipv4.fib_multipath_score=2
ip netns exec b iperf3 -s -D
ip netns exec b iperf3 -s -p 5202 -D
sleep 1
ip netns exec a iperf3 -c 10.10.0.1 -P 8 -b 1M -t 3000 -i 0 >/tmp/four 2>&1 &
pids=($!)
ip netns exec a iperf3 -c 2001:db8:10::1 -p 5202 -P 8 -b 1M -t 3000 -i 0 >/tmp/six 2>&1 &
pids+=($!)
sleep 2
# Many flows of a moment, look-ups, and readers.
others=()
ip netns exec a bash -c 'while :; do cost connect 2000 10.10; cost send 200 10.10.0.1; done' >/dev/null 2>&1 &
others+=($!)
ip netns exec a bash -c 'while :; do
    choices 500 2001:db8:10:0; cat /proc/net/path_metrics; cost send 200 2001:db8:10::1
done' >/dev/null 2>&1 &
others+=($!)

changed=0
for n in $(seq 60); do
    routes 1 $((RANDOM % 4)) $((RANDOM % 4)) 2>/dev/null && changed=$((changed + 1))
    nl set a0 10.8.0.2 delay $((RANDOM * 2)) variation $((RANDOM)) 2>/dev/null
    nl set a1 10.8.1.2 delay $((RANDOM * 2)) variation $((RANDOM)) 2>/dev/null
    nl set a2 2001:db8:82::2 delay $((RANDOM * 2)) variation $((RANDOM)) 2>/dev/null
    set_a net.ipv4.fib_multipath_score=$((RANDOM % 3)) net.ipv4.path_metrics=$((RANDOM % 2)) \
        net.ipv4.lowpower_ema_k_factor=$((RANDOM % 1025))
    case $((n % 4)) in
        0) ip -n a link set a$((1 + RANDOM % 2)) down ;;
        1)
            ip -n a link set a1 up
            ip -n a link set a2 up
            ;;
        2)
            # The links took them along.
            for i in 0 1 2; do
                ip -n a nexthop replace id 4$i via 10.8.$i.2 dev a$i
                ip -n a nexthop replace id 6$i via 2001:db8:8$i::2 dev a$i
            done
            ip -n a nexthop replace id 4 group 40/41,$((1 + RANDOM % 9))/42
            ip -n a nexthop replace id 6 group 60/61/62,$((1 + RANDOM % 9))
            groups && changed=$((changed + 1))
            ;;
        3) ip -n a nexthop replace id 4 group 40,3/42 ;;
    esac
done 2>/tmp/churn
check "changes of routes" "$changed" ">" 30
for pid in "${others[@]}"; do kill -0 "$pid" || check "readers and senders" 0 == 1; done
kill "${others[@]}"
wait "${others[@]}" 2>/dev/null
ip -n a link set a1 up
ip -n a link set a2 up
set_a net.ipv4.path_metrics=1 net.ipv4.fib_multipath_score=2 net.ipv4.lowpower_ema_k_factor=512

# received: by TCP in b, at either port. It goes on with each flow that was begun before.
received() {
    ip netns exec b ss -tnHi "sport = :$1" | grep -o 'bytes_received:[0-9]*' | sort
}
for port in 5201 5202; do
    received $port >/tmp/before
    check "port $port: connections" "$(wc -l </tmp/before)" == 9
    for n in $(seq 120); do
        received $port >/tmp/after
        # Lines that are the same are flows that have not moved: the one that controls iperf3 may.
        standing=$(comm -12 /tmp/before /tmp/after | wc -l)
        [[ $standing -gt 1 ]] || break
        sleep 1
    done
    check "port $port: flows that arrive no more" "$standing" "<=" 1
done
works "iperf3 goes on" kill -0 "${pids[@]}"
kill "${pids[@]}"
wait "${pids[@]}" 2>/dev/null

# What was said about delays is over after 5 s, and penalties fade.
for kind in routes groups; do
    if [[ $kind == routes ]]; then
        works routes routes 1 1 1
    else
        for i in 0 1 2; do
            ip -n a nexthop replace id 4$i via 10.8.$i.2 dev a$i
            ip -n a nexthop replace id 6$i via 2001:db8:8$i::2 dev a$i
        done
        ip -n a nexthop replace id 4 group 40/41/42
        ip -n a nexthop replace id 6 group 60/61/62
        works groups groups
    fi
    for to in 10.10 2001:db8:10:0; do
        for n in $(seq 60); do
            chosen=$(devices_chosen $to)
            [[ $chosen != 3 ]] || break
            sleep 1
        done
        check "$kind: paths to $to with a tenth of new flows" "$chosen" == 3
    done
done
# And packets do go there.
for gateway in 10.8.0.2 10.8.1.2 10.8.2.2 2001:db8:80::2 2001:db8:81::2 2001:db8:82::2; do
    awk -v gw=$gateway '$2 == gw { print $4 }' <(ip netns exec a cat /proc/net/path_metrics) >/tmp/counted-$gateway
done
for n in $(seq 40); do
    ip netns exec a bash -c 'echo x >/dev/udp/10.10.0.1/9; echo x >/dev/udp/2001:db8:10::1/9' 2>/dev/null
done
for gateway in 10.8.0.2 10.8.1.2 10.8.2.2 2001:db8:80::2 2001:db8:81::2 2001:db8:82::2; do
    n=$(awk -v gw=$gateway '$2 == gw { print $4 }' <(ip netns exec a cat /proc/net/path_metrics))
    check "packets by $gateway" $((n - $(</tmp/counted-$gateway))) ">" 0
done
works "a connection afterwards" ip netns exec a bash -c 'exec 3<>/dev/tcp/10.10.0.1/5201'
works "a connection afterwards, IPv6" ip netns exec a bash -c 'exec 3<>/dev/tcp/2001:db8:10::1/5202'

# Namespaces that end as their scores are on: routes or groups, with senders and a socket in it.
ip netns del a
ip netns del b
left=0
for round in $(seq 10); do
    world
    set_a net.ipv4.fib_multipath_score=$((1 + round % 2))
    [[ $((round % 2)) == 0 ]] || groups
    nl set a1 10.8.1.2 delay 40000 variation 20000
    ip netns exec a bash -c 'while :; do cost send 100 10.10.0.1; cost send 100 2001:db8:10::1; done' \
        >/dev/null 2>&1 &
    sender=$!
    sleep 0.5
    # Half of them go with their devices still sent by, the others once nobody is in there.
    if [[ $((round % 4)) -lt 2 ]]; then
        ip -n a link del a1
        ip netns del a
        sleep 0.2
        kill "$sender"
    else
        kill "$sender"
        ip netns del a
    fi
    wait "$sender" 2>/dev/null
    # The other ends go with theirs.
    for n in $(seq 60); do
        left=$(ip -n b -o link | grep -c ' b[0-9]@')
        [[ $left != 0 ]] || break
        sleep 0.5
    done
    check "namespace $round: devices left" "$left" == 0
    ip netns del b
done

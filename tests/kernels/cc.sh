#!/bin/bash
# SPDX-License-Identifier: GPL-2.0-or-later
# What loads BPF programs, on a kernel that is not ours: `mountain cc` end to end, every redirect backend, the
# steering and the choice of uplinks for new flows. Run by tests/kernels/run.
# mode: smp
# seconds: 1500
# shellcheck source=kernel/tests/lib.sh
. /tests/lib.sh
need exchange mountain modprobe
uname -a

in_ns() { nsenter --net="/run/netns/$1" "${@:2}"; }
m() { in_ns a mountain "$@"; }
router() { in_ns b mountain "$@"; }
# says NAME PATTERN COMMAND...: it works, and its output has the pattern.
says() {
    local said code=0
    said=$("${@:3}" 2>&1) && grep -q -- "$2" <<<"$said" || code=1
    [[ $code -eq 0 ]] || printf '%s\n' "$said"
    check "$1" "$code" == 0
}
# is NAME JQ COMMAND...: it works, and of its JSON that is true.
is() {
    local said code=0
    said=$("${@:3}") && jq -e "$2" <<<"$said" >/dev/null || code=1
    [[ $code -eq 0 ]] || printf '%s\n' "$said"
    check "$1" "$code" == 0
}
# soon SECONDS COMMAND...: until it works.
soon() {
    local end=$((SECONDS + $1))
    until "${@:2}" >/dev/null 2>&1; do
        [[ $SECONDS -lt $end ]] || return 1
        sleep 0.2
    done
}
listens() { [[ -n $(in_ns "$1" ss -Hl"$2"n "sport = :$3") ]]; }
available() { grep -qw "$1" /proc/sys/net/ipv4/tcp_available_congestion_control; }
default_is() { [[ $(in_ns a cat /proc/sys/net/ipv4/tcp_congestion_control) == "$1" ]]; }
hash_of() { sha256sum <"$1"; }

# exchanged NAME CONTROL HAD PORT [ADDRESS]: different data each way at once. Both arrive whole, and the
# client's connection had that congestion control.
exchanged() {
    local address=${5:-192.0.2.2}
    rm -f /tmp/*.got /tmp/*.had
    in_ns b timeout 120 exchange listen "$2" "$address" "$4" </tmp/b.sent >/tmp/b.got 2>/tmp/b.had &
    soon 20 listens b t "$4"
    in_ns a timeout 120 exchange connect "$2" "$address" "$4" </tmp/a.sent >/tmp/a.got 2>/tmp/a.had
    wait $!
    same "$1: the congestion control" "$(</tmp/a.had)" "$3"
    same "$1: there" "$(hash_of /tmp/b.got)" "$(hash_of /tmp/a.sent)"
    same "$1: back" "$(hash_of /tmp/a.got)" "$(hash_of /tmp/b.sent)"
}

# a has two ways to b, which routes to c.
two_hosts
ip netns add c
ip link add wa netns a type veth peer name wb netns b
ip link add bc netns b type veth peer name cb netns c
ip -n a address add 198.51.100.1/24 dev wa
ip -n b address add 198.51.100.2/24 dev wb
ip -n b address add 10.0.1.1/24 dev bc
ip -n c address add 10.0.1.2/24 dev cb
ip -n b address add 203.0.113.1/32 dev lo
for end in a/wa b/wb b/bc c/cb; do ip -n ${end%/*} link set ${end#*/} up; done
ip -n c route add default via 10.0.1.1
ip -n a route add 203.0.113.0/24 nexthop via 192.0.2.2 nexthop via 198.51.100.2
in_ns b sysctl -qw net.ipv4.ip_forward=1
head -c 3000000 /dev/urandom >/tmp/a.sent
head -c 2000000 /dev/urandom >/tmp/b.sent

# What `check` says, with BBR a module that is not there yet.
check "tcp_bbr is a module, not loaded" "$([[ -d /sys/module/tcp_bbr ]] && echo 1 || echo 0)" == 0
is "check: BTF, the program and the routes" '[.items[] | select(.name == "BTF" or .name == "program" or
    .name == "routes") | .level] == ["ok", "ok", "ok"]' m check --json

# The congestion control, of which kernels before 6.12 tell too little.
congestion_control() {
    works "qdisc netem" tc -n a qdisc add dev va root netem delay 5ms
    says "cc enable" "is available to TCP sockets" m cc enable
    works "cc: the kernel knows it" available mountain
    exchanged "cc by setsockopt" mountain mountain 7001
    exchanged "who does not ask for it" - "$(</proc/sys/net/ipv4/tcp_congestion_control)" 7002
    refused "cc: a wrong name for a socket" in_ns a exchange connect mountainx 192.0.2.2 7003
    says "cc: somebody else's name" "name" bash -c '! nsenter --net=/run/netns/a mountain cc enable --name=cubic'
    is "cc status" '.enabled and .registered and .settings.behaviour == "brake" and .flows.live == 0' \
        m cc status --json

    # Replaced and taken away below a flow, of which no byte may be lost.
    in_ns b exchange listen - 192.0.2.2 7004 </dev/null 2>/dev/null | sha256sum >/tmp/load.got &
    received=$!
    soon 20 listens b t 7004
    (while [[ ! -e /tmp/stop ]]; do head -c 100000 /tmp/a.sent && sleep 0.1; done) |
        tee >(sha256sum >/tmp/load.sent) | in_ns a exchange connect mountain 192.0.2.2 7004 2>/dev/null &
    acked() { in_ns a ss -Htin dst 192.0.2.2 dport = :7004 | sed -n 's/.*bytes_acked:\([0-9]*\).*/\1/p'; }
    grown() { [[ $(acked) -gt $(($1 + 500000)) ]]; }
    works "cc: the flow runs" soon 60 grown 0
    is "cc top" 'length == 1 and .[0].remote == "192.0.2.2:7004" and .[0].acks > 10 and
        .[0].min_rtt_us >= 5000 and .[0].min_rtt_us < 1000000' m cc top --json
    says "cc top: table" "^1 flow" m cc top --once
    says "cc enable again" "replaced" m cc enable --behaviour published
    is "cc status: the flow of before" '.flows.live == 1 and .settings.behaviour == "published"' \
        m cc status --json
    says "cc disable below a flow" "is disabled" m cc disable
    refused "cc: gone for new sockets" in_ns a exchange connect mountain 192.0.2.2 7005
    works "cc: the flow goes on" soon 60 grown "$(acked)"
    touch /tmp/stop
    wait "$received"
    # Written by a process that nobody waits for.
    soon 20 test -s /tmp/load.sent
    same "cc: all of the flow arrived" "$(</tmp/load.got)" "$(</tmp/load.sent)"

    # Who uses it.
    in_ns a sysctl -qw net.ipv4.tcp_congestion_control=reno
    works "cc enable --default" m cc enable --default
    works "cc: it is the default" default_is mountain
    exchanged "cc by default" - mountain 7006
    works "cc disable" m cc disable
    works "cc: the default of before" default_is reno
    mkdir /sys/fs/cgroup/web
    m cc enable --cgroup web >/dev/null
    is "cc enable --cgroup" '.cgroups == ["/sys/fs/cgroup/web"] and .default == "reno"' m cc status --json
    exchanged "outside of the cgroup" - reno 7007
    echo $$ >/sys/fs/cgroup/web/cgroup.procs
    exchanged "inside of the cgroup" - mountain 7008
    works "cc disable with a cgroup" m cc disable
    exchanged "inside of it afterwards" - reno 7009
    echo $$ >/sys/fs/cgroup/cgroup.procs
    refused "cc: nothing is left" ls -d /sys/fs/bpf/mountain/cc/mountain /run/mountain/cc-mountain.json
    tc -n a qdisc del dev va root

    # Where fq paces, and not TCP by itself: it has held packets back. ACKs are late, or all that this machine can send
    # would be slower than the rate.
    works "qdisc fq" tc -n a qdisc add dev va root fq
    tc -n b qdisc add dev vb root netem delay 50ms
    works "cc enable with fq" m cc enable
    exchanged "cc with fq" mountain mountain 7012
    held=$(tc -n a -s -j qdisc show dev va | jq '[.[] | select(.kind == "fq") | .throttled] | add')
    check "cc with fq: packets that fq has held back" "$held" ">" 0
    works "cc disable with fq" m cc disable
    tc -n b qdisc del dev vb root
    tc -n a qdisc del dev va root
}
if [[ $(m check --json | jq -r '.items[] | select(.name == "cc").level') == ok ]]; then
    congestion_control
else
    in_ns a sysctl -qw net.ipv4.tcp_congestion_control=reno
    says "cc enable on an old kernel" "use Linux 6.12 or newer" bash -c '! nsenter --net=/run/netns/a mountain cc enable'
fi

# Redirects: by each backend a datagram gets its answer from the target, by the address it was sent to.
in_ns c exchange answer 10.0.1.2 8083 'from the target: ' &
soon 20 listens c u 8083
ask='exec 3<>/dev/udp/192.0.2.2/8080 && echo hello >&3 && timeout 10 head -n 1 <&3'
for backend in nft tcx tcx-peer xdp xdp-redirect; do
    rule=(--proto udp --from 192.0.2.2:8080 --to 10.0.1.2:8083 --backend "$backend")
    fix=()
    [[ $backend != xdp* ]] || fix=(--fix)
    says "redirect by $backend" "by $backend" router redirect add "${rule[@]}" "${fix[@]}"
    says "redirect by $backend: answered" '^from the target: hello$' in_ns a bash -c "$ask"
    is "redirect by $backend: counted" \
        '.rules[0] | .forward.packets >= 1 and .reply.packets >= 1' router redirect stats --json
    works "redirect by $backend: del" router redirect del --all
done
refused "without a rule nobody answers" in_ns a bash -c "${ask/timeout 10/timeout 1}"

# Steering.
all_good() {
    m status --json >/tmp/status && jq -e '[.paths[].state] == ["good", "good"]' /tmp/status
}
timeout -s INT 12 nsenter --net=/run/netns/a mountain up --dry-run >/tmp/dry 2>&1
says "up --dry-run" '203.0.113.0/24 .* by va, wa' cat /tmp/dry
works "up" m up
works "up: both paths are good" soon 60 all_good
exchanged "by the steered paths" - reno 7010 203.0.113.1
works "down" m down
refused "down: nothing runs" m status
# Of default routes that differ in metric, by the programs of cgroups.
ip -n a route add default via 192.0.2.2 metric 100
ip -n a route add default via 198.51.100.2 metric 600
works "up --adopt" m up --adopt
works "up --adopt: rules" bash -c 'ip -n a rule | grep -q fwmark'
exchanged "a new flow" - reno 7011 203.0.113.1
works "down after --adopt" m down
refused "down: no rules" bash -c 'ip -n a rule | grep -q fwmark'

# Shared by the tests beside it, which run inside the test machine (kernel/vm/init): `. /tests/lib.sh`.
#
# A test is a script NN-name.sh. Comments at its head say where it runs:
#   # mode: virtual      in virtual time, on one processor: it may assert times
#   # mode: smp          on two processors: it may not
#   # mode: cost         in virtual time, in five boots, to be compared with the stock kernel
#   # kernel: patched    only with the series (without such a line: stock kernel, too)
#   # kernel: debug      only with --debug
#   # run: full          not with --quick or --debug: it takes too long, or needs both kernels
#   # debug: no          not with --debug: it is about times, and a debug build has others
#   # complaints: its own   it makes the kernel complain, and looks for that itself
#   # netns: init        it needs settings that exist in the first namespace only; it leaves that as it was
#   # nics: 1            it needs that many pairs of virtio_net devices (then with `netns: init`)
#   # selftests: yes     it runs some of the kernel's own, which then are in /selftests
#   # seconds: 120       it may take this long (machine's time), 300 by default
# shellcheck shell=bash
set -u

# check NAME FIGURE OP LIMIT: FIGURE and LIMIT are numbers, OP one of <= >= < > == !=. An empty FIGURE
# could not be measured, which is never met.
check() {
    local name=$1 figure=$2 op=$3 limit=$4 met=false
    if [[ $figure =~ ^-?[0-9]+([.][0-9]+)?([eE][-+]?[0-9]+)?$ ]]; then
        if awk "BEGIN { exit !($figure $op $limit) }"; then met=true; fi
    else
        figure=null
    fi
    jq -cn --arg name "$name" --arg op "$op" --argjson figure "$figure" --argjson limit "$limit" \
        --argjson met "$met" \
        '{name: $name, figure: $figure, op: $op, limit: $limit, met: $met}' | sed 's/^/mountain-check: /'
}

# works NAME COMMAND...: its exit code is 0. What it says is shown if it is not.
works() {
    local name=$1 said code=0
    shift
    said=$("$@" 2>&1) || code=$?
    [[ $code -eq 0 ]] || printf '%s\n' "$said"
    check "$name" "$code" == 0
}

# refused NAME COMMAND...: its exit code is not 0.
refused() {
    local name=$1 code=0
    shift
    "$@" >/dev/null 2>&1 || code=$?
    check "$name" "$code" != 0
}

# same NAME HAVE WANT: two texts are equal.
same() {
    [[ $2 == "$3" ]] || printf '%s: have %q, want %q\n' "$1" "$2" "$3"
    check "$1" "$([[ $2 == "$3" ]] && echo 0 || echo 1)" == 0
}

# ended NAME PID: that child has ended, with exit code 0.
ended() {
    local code=0
    wait "$2" || code=$?
    check "$1" "$code" == 0
}

# A skip counts as a failure, unless kernel/not-passing has it.
skip() {
    printf 'skipped: %s\n' "$*"
    exit 4
}

need() {
    local tool
    for tool in "$@"; do
        command -v "$tool" >/dev/null || skip "no $tool in the machine"
    done
}

# selftest SCRIPT ARGUMENT...: one of the kernel's own, below /selftests. Its exit code counts: 0, or 4 if
# it skips itself, which is a failure: what it needs is meant to be here.
selftest() {
    local script=$1 code=0
    shift
    (cd "/selftests/$(dirname "$script")" && bash "./$(basename "$script")" "$@") || code=$?
    check "selftest $script" "$code" == 0
}

patched() { [[ $(uname -r) != *-stock-* ]]; }

# A debug build: it is there for the kernel's complaints, and takes several times as long for everything.
debug_build() { [[ $(uname -r) =~ -k[ac]san- ]]; }

# two_hosts: namespaces `a` and `b` joined by the veths va (192.0.2.1, 2001:db8::1) and vb (.2, ::2).
two_hosts() {
    ip netns add a
    ip netns add b
    ip link add va netns a type veth peer name vb netns b
    local side n=0
    for side in a b; do
        n=$((n + 1))
        ip -n "$side" link set lo up
        ip -n "$side" address add "192.0.2.$n/24" dev "v$side"
        ip -n "$side" address add "2001:db8::$n/64" dev "v$side" nodad
        ip -n "$side" link set "v$side" up
    done
}

# router_hosts: namespaces c - r - s joined by the veths cr (192.0.2.1, 2001:db8:1::1), rc (.2, 1::2), rs
# (198.51.100.2, 2001:db8:2::2) and sr (.1, 2::1); r forwards, and is the default route of both others.
router_hosts() {
    local ns end
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
}

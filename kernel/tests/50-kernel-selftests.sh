#!/bin/bash
# The kernel's own tests of what the series touches. Each of their subtests is a check of its own, so that
# kernel/scripts/test can hold the patched kernel against the stock one; here counts that they ran.
# mode: smp
# run: full
# selftests: yes
# seconds: 6000
# shellcheck source=kernel/tests/lib.sh
. /tests/lib.sh
need bc du jq mausezahn perf ping6 socat tcpdump which

cd /selftests/net || exit 1
ln -s "$PWD/nettest" /usr/bin/
# It is asked for what is built in.
printf '#!/bin/sh\nexit 0\n' >/usr/bin/modprobe
chmod +x /usr/bin/modprobe
# Without four tests of 300 s each that nothing here is about. Its `ip monitor` has 0.2 s to start, and no time at
# all to say what it has seen: too short for an emulated processor now and then, with the stock kernel, too.
# shellcheck disable=SC2016
sed -e 's/^\tipv[46]_\(res_\)\?torture$//' -e 's/^\tsleep 0\.2$/\tsleep 2/' \
    -e 's/^\tkill \$mpid$/\tsleep 1; kill $mpid/' fib_nexthops.sh >fib_nexthops_short.sh

# may_skip SUBTEST: those that cannot run here, and why.
may_skip() {
    case $1 in
        # ip of Debian 12 knows weights up to 256, and no statistics of next hops.
        'fib_nexthops_short.sh: 16-bit weights') ;;
        'forwarding/router_mpath_nh'*': 16-bit multipath tests '*) ;;
        'forwarding/router_mpath_nh'*": NH stats test: ip doesn't support HW stats") ;;
        # Neither Open vSwitch nor Python.
        'pmtu.sh: IPv'[46]', OVS '*) ;;
        *) return 1 ;;
    esac
}

# Each with the number of its subtests, so that it cannot end early unseen: exit codes do not tell, as some
# scripts take a skip for a failure.
for script in fib_tests.sh=218 fib_nexthops_short.sh=240 fib_nexthop_multiprefix.sh=12 fib-onlink-tests.sh=38 \
    pmtu.sh=89 forwarding/router_multipath.sh=8 forwarding/router_mpath_nh.sh=13 \
    forwarding/router_mpath_nh_res.sh=20; do
    least=${script#*=} script=${script%=*}
    echo "== $script"
    # In a namespace of its own: they make devices where they are.
    # shellcheck disable=SC2016
    (cd "$(dirname "$script")" && timeout 1800 unshare --net \
        bash -c 'ip link set lo up && exec bash "$0"' "./$(basename "$script")") >/tmp/said 2>&1
    code=$?
    cat /tmp/said
    # "TEST: what   [ OK ]", "[FAIL]", "[SKIP]", "[XFAIL]"; what is numbered by a process or a time is not part
    # of a name, nor is what was measured.
    sed -n 's/^ *TEST: *\(.*[^ ]\) *\[ *\(OK\|FAIL\|SKIP\|XFAIL\) *\].*/\2 \1/p' /tmp/said |
        sed 's/ ([0-9.]*)$//' |
        while read -r result name; do
            printf 'mountain-subtest: %s %s: %s\n' "$result" "$script" "$name"
            [[ $result != SKIP ]] || may_skip "$script: $name" || printf '%s\n' "$name" >&3
        done 3>/tmp/skipped
    check "$script: subtests skipped without a reason" "$(wc -l </tmp/skipped)" == 0
    check "$script: subtests that ran" "$(grep -c '\[ *\(OK\|FAIL\) *\]' /tmp/said)" ">=" "$least"
    check "$script: subtests that failed" "$(grep -c '\[ *FAIL *\]' /tmp/said)" == 0
    check "$script: too slow" "$code" "!=" 124
    for ns in $(ip netns list | cut -d ' ' -f 1); do ip netns del "$ns"; done
done

#!/bin/bash
# The kernel's own tests of what the series touches. Each of their subtests is a check of its own, so that
# kernel/scripts/test can hold the patched kernel against the stock one; here counts that they ran.
# mode: smp
# run: full
# selftests: yes
# seconds: 3600
# shellcheck source=kernel/tests/lib.sh
. /tests/lib.sh
need jq mausezahn

cd /selftests/net || exit 1
export PATH=$PATH:/selftests/net
# Four tests of 300 s each that nothing here is about.
sed 's/ipv[46]_\(res_\)\?torture//g' fib_nexthops.sh >fib_nexthops_short.sh

# As it comes with forwarding: its eight devices, veth pairs.
cat >forwarding/forwarding.config <<'CONFIG'
NETIF_CREATE=yes
NETIF_TYPE=veth
PING=ping
PING6="ping -6"
CONFIG

for script in fib_tests.sh fib_nexthops_short.sh fib_nexthop_multiprefix.sh fib-onlink-tests.sh pmtu.sh \
    forwarding/router_multipath.sh forwarding/router_mpath_nh.sh forwarding/router_mpath_nh_res.sh; do
    echo "== $script"
    # In a namespace of its own: they make devices where they are.
    (cd "$(dirname "$script")" && timeout 900 unshare --net bash "./$(basename "$script")") >/tmp/said 2>&1
    code=$?
    cat /tmp/said
    # "TEST: what   [ OK ]", "[FAIL]", "[SKIP]", "[XFAIL]"; what is numbered by a process or a time is not part
    # of a name.
    sed -n 's/^ *TEST: *\(.*[^ ]\) *\[ *\(OK\|FAIL\|SKIP\|XFAIL\) *\].*/\2 \1/p' /tmp/said |
        while read -r result name; do
            printf 'mountain-subtest: %s %s: %s\n' "$result" "$script" "$name"
        done
    ran=$(grep -c '\[ *\(OK\|FAIL\) *\]' /tmp/said)
    check "$script: subtests that ran" "$ran" ">" 0
    # 4: it skipped as a whole.
    check "$script: not skipped" "$code" "!=" 4
    check "$script: came to an end" "$code" "!=" 124
    for ns in $(ip netns list | cut -d ' ' -f 1); do ip netns del "$ns"; done
done

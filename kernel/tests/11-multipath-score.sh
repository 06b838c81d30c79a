#!/bin/bash
# Scored multipath fed by netlink: routes, groups and resilient groups, IPv4 and IPv6, argmax, link down,
# bounds and namespaces, by the selftest of the series. Virtual time: steps are 250 ms apart.
# mode: virtual
# kernel: patched
# selftests: yes
# seconds: 900
# shellcheck source=kernel/tests/lib.sh
. /tests/lib.sh

selftest net/fib_multipath_score.sh

#!/bin/bash
# Path metrics: what is counted and where, what sysctls, netlink and /proc say, by the selftest of the
# series. Virtual time: it waits for samples to expire.
# mode: virtual
# kernel: patched
# selftests: yes
# seconds: 600
# shellcheck source=kernel/tests/lib.sh
. /tests/lib.sh

selftest net/path_metrics.sh

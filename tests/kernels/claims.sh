#!/bin/bash
# SPDX-License-Identifier: GPL-2.0-or-later
# `mountain-lab claims` on the patched kernel. Run by tests/kernels/claims, which says which ones.
# mode: virtual
# netns: init
# seconds: 7200
# shellcheck source=kernel/tests/lib.sh
. /tests/lib.sh
claims='' options=()
# shellcheck source=/dev/null
. /tests/settings
[[ $claims != *3* ]] || works "the module" insmod /lib/modules/mountain_redirect.ko
switches() {
    sysctl net.core.napi_adaptive_weight net.core.dev_weight_tx_bias net.ipv4.path_metrics \
        net.ipv4.fib_multipath_score
}
before=$(switches)
works "mountain-lab claims" mountain-lab claims --only "$claims" "${options[@]}" --json --out /tmp/out
same "the switches are as they were" "$(switches)" "$before"
same "no namespace is left" "$(ip netns list)" ""
[[ $claims != *3* ]] || works "without the module" rmmod mountain_redirect
# Whole, for whoever judges it outside; by itself on its lines whatever the console shows.
gzip -c /tmp/out/result.json | base64 -w 120 | sed 's/^/mountain-result: /'

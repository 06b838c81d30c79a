#!/bin/bash
# SPDX-License-Identifier: GPL-2.0-or-later
# The series' BBR with delta 0 beside the unpatched kernel's, by the module bbr_off. Run by tests/kernels/bbr-off.
# mode: virtual
# netns: init
# seconds: 5400
# shellcheck source=kernel/tests/lib.sh
. /tests/lib.sh
options=()
# shellcheck source=/dev/null
. /tests/settings

dmesg -C
# It does not stay: what it has seen is all that there is of it.
refused "the module does not stay" insmod /lib/modules/bbr_off.ko "${options[@]}"
dmesg -t | tee /tmp/seen | grep '^bbr_off: '
seen() { sed -n "s/^bbr_off: $1: //p" /tmp/seen; }

flows=${options[0]#flows=}
check "flows that differ with delta 0" "$(seen "delta 0 differ")" == 0
check "calls that were compared" "$(seen "delta 0 calls")" ">=" $((flows * 20000 * 4))
# As well as BBR with itself would be: all of it has been through.
states=(STARTUP DRAIN PROBE_BW PROBE_RTT "after a policer" "after idleness" "packet conservation")
for state in "${!states[@]}"; do
    check "BBR was in ${states[state]}" "$(seen "state $state")" == 1
done
# What would be seen if it were not the same.
check "flows that differ with delta 1" "$(seen "delta 1 differ")" ">=" $((flows / 2))
check "flows that differ with delta 2" "$(seen "delta 2 differ")" ">=" $((flows / 2))

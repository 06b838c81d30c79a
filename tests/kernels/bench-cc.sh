#!/bin/bash
# SPDX-License-Identifier: GPL-2.0-or-later
# `mountain-lab cc` on the patched kernel. Run by tests/kernels/bench-cc, which says with which options.
# mode: virtual
# netns: init
# seconds: 36000
# shellcheck source=kernel/tests/lib.sh
. /tests/lib.sh
options=()
# shellcheck source=/dev/null
. /tests/settings
works "mountain-lab cc" mountain-lab cc "${options[@]}" --out /tmp/out
same "no namespace is left" "$(ip netns list)" ""
# Whole, for whoever judges it outside; by itself on its lines whatever the console shows.
gzip -c /tmp/out/result.json | base64 -w 120 | sed 's/^/mountain-result: /'

#!/bin/bash
# SPDX-License-Identifier: GPL-2.0-or-later
# The random differential test with all kinds of devices. Run by tests/kernels/random.
# mode: smp
# netns: init
# seconds: 7200
# shellcheck source=kernel/tests/lib.sh
. /tests/lib.sh
# shellcheck source=/dev/null
. /tests/settings

export MOUNTAIN_RANDOM_MODULES=1 MOUNTAIN_RANDOM_LIMIT_S=1200 MOUNTAIN_RANDOM_PROGRAM=/usr/bin/mountain RUST_BACKTRACE=0
# Fewer at once than there are, or the first ones would meet them half loaded.
modprobe -a veth tun macvlan 8021q bonding ipvlan vrf wireguard ipip ip_gre esp4 esp6 xfrm_user ppp_generic \
    crypto_null authenc nf_tables nft_ct nft_nat nft_masq nft_reject_inet nf_conntrack_netlink \
    bridge nft_dup_ipv4 nft_dup_ipv6 nf_flow_table_inet nft_flow_offload
[[ -e /dev/ppp ]] || mknod /dev/ppp c 108 0
mkdir -p /dev/net
[[ -e /dev/net/tun ]] || mknod /dev/net/tun c 10 200
harm random --nocapture --test-threads 1
check "what the random test says" $? == 0

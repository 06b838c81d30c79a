#!/bin/bash
# The machine itself: the kernel that was meant, namespaces that reach each other, BTF.
# mode: smp
# shellcheck source=kernel/tests/lib.sh
. /tests/lib.sh

works "release" grep -qE -- '-mountain-(patched|stock|kasan|kcsan)-[0-9a-f]{8}' /proc/sys/kernel/osrelease
check "processors" "$(nproc)" ">=" 2
two_hosts
works "ping over a veth, IPv4" ip netns exec a ping -c 3 -i 0.2 -W 2 192.0.2.2
works "ping over a veth, IPv6" ip netns exec a ping -c 3 -i 0.2 -W 2 2001:db8::2
refused "no ping of an address that nobody has" ip netns exec a ping -c 1 -W 1 192.0.2.3
if grep -q '^CONFIG_DEBUG_INFO_BTF=y' <(gzip -dc /proc/config.gz); then
    works "types of the kernel" test -s /sys/kernel/btf/vmlinux
fi
same "sysctl" "$(sysctl -n net.ipv4.ip_forward)" 0

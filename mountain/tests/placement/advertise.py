# SPDX-License-Identifier: GPL-2.0-or-later
"""Sends one router advertisement by a device: DEVICE ROUTER_LIFETIME [PREFIX/64 PREFERRED_LIFETIME]...

RFC 4861, sections 4.2 and 4.6.2; the kernel puts in the checksum.
"""
import ipaddress
import socket
import struct
import sys

device, lifetime, *prefixes = sys.argv[1:]
# Type 134, code 0, checksum, hop limit, flags, router lifetime, reachable time, retransmission timer
packet = struct.pack("!BBHBBHII", 134, 0, 0, 64, 0, int(lifetime), 0, 0)
for prefix, preferred in zip(prefixes[::2], prefixes[1::2]):
    net = ipaddress.ip_network(prefix)
    # Type 3, length 4, prefix length, on-link and autonomous, valid, preferred, reserved, prefix
    packet += struct.pack("!BBBBIII", 3, 4, net.prefixlen, 0xC0, 7200, int(preferred), 0)
    packet += net.network_address.packed
s = socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6)
s.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
s.sendto(packet, ("ff02::1", 0, 0, socket.if_nametoindex(device)))

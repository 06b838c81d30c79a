# SPDX-License-Identifier: GPL-2.0-or-later
"""Answers each line "NONCE" with "NONCE ADDRESS": the address that it came from. TCP and UDP."""
import selectors
import socket
import sys

port = int(sys.argv[1])
selector = selectors.DefaultSelector()


def listen(family, any_address):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        s = socket.socket(family, kind)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        s.bind((any_address, port))
        if kind == socket.SOCK_STREAM:
            s.listen(500)
            selector.register(s, selectors.EVENT_READ, accept)
        else:
            selector.register(s, selectors.EVENT_READ, datagram)


def accept(s):
    connection, peer = s.accept()
    selector.register(connection, selectors.EVENT_READ, lambda c: stream(c, peer[0]))


def stream(connection, address):
    try:
        data = connection.recv(4096)
        for nonce in data.decode().split():
            connection.sendall(f"{nonce} {address}\n".encode())
    except OSError:
        data = b""
    if not data:
        selector.unregister(connection)
        connection.close()


def datagram(s):
    data, peer = s.recvfrom(4096)
    s.sendto(f"{data.decode().strip()} {peer[0]}\n".encode(), peer)


listen(socket.AF_INET, "0.0.0.0")
listen(socket.AF_INET6, "::")
print("ready", flush=True)
while True:
    for key, _ in selector.select():
        key.data(key.fileobj)

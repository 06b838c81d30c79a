# SPDX-License-Identifier: GPL-2.0-or-later
"""The flows of tests/kernels/installed.sh: a server that says whom it sees, and its clients."""

import collections
import json
import os
import signal
import socket
import sys
import threading
import time

UDP_PORT, TCP_PORT = 7000, int(os.environ.get("TCP_PORT", 7001))
TIMEOUT_S = 3


def serve():
    """Answers datagrams and connections with the address that they come from; connections are echoed after that."""

    def datagrams(address):
        server = socket.socket(family(address), socket.SOCK_DGRAM)
        server.bind((address, UDP_PORT))
        while True:
            _, peer = server.recvfrom(2048)
            server.sendto(peer[0].encode(), peer)

    def connection(client, peer):
        try:
            client.sendall((peer[0].removeprefix("::ffff:") + "\n").encode())
            while data := client.recv(65536):
                client.sendall(data)
        except OSError:
            pass
        client.close()

    for address in sys.argv[2:]:
        threading.Thread(target=datagrams, args=(address,), daemon=True).start()
    listener = socket.create_server(("", TCP_PORT), family=socket.AF_INET6, backlog=64, dualstack_ipv6=True)
    while True:
        threading.Thread(target=connection, args=listener.accept(), daemon=True).start()


def family(address):
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def one_flow(kind, host, port, source):
    if kind == "tcp":
        with socket.create_connection((host, port), TIMEOUT_S, source) as client:
            return client.makefile().readline().strip()
    with socket.socket(family(host), socket.SOCK_DGRAM) as client:
        client.settimeout(TIMEOUT_S)
        client.bind(source)
        client.connect((host, port))
        client.send(b"x")
        return client.recv(64).decode()


def flows():
    """flows KIND COUNT HOST [PORT [SOURCE [SOURCE-PORT]]]: opens them one after the other. Prints the addresses that the
    server saw, and how many failed."""
    kind, count, host = sys.argv[2], int(sys.argv[3]), sys.argv[4]
    port = int(sys.argv[5]) if len(sys.argv) > 5 else {"tcp": TCP_PORT, "udp": UDP_PORT}[kind]
    source = sys.argv[6] if len(sys.argv) > 6 else ""
    source_port = int(sys.argv[7]) if len(sys.argv) > 7 else 0
    seen, failed, slowest = collections.Counter(), 0, 0.0
    for _ in range(count):
        began = time.monotonic()
        try:
            seen[one_flow(kind, host, port, (source, source_port))] += 1
        except OSError:
            failed += 1
        slowest = max(slowest, time.monotonic() - began)
    print(json.dumps({"seen": seen, "failed": failed, "slowest_ms": round(slowest * 1000)}))


def long():
    """One connection with ten exchanges a second, until a signal ends it. Prints the longest one."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    exchanges, longest = 0, 0.0
    with socket.create_connection((sys.argv[2], TCP_PORT), timeout=60) as client:
        client.makefile().readline()
        while not ended.is_set():
            began = time.monotonic()
            client.sendall(b"x")
            if not client.recv(1):
                break
            exchanges += 1
            longest = max(longest, time.monotonic() - began)
            ended.wait(0.1)
    print(json.dumps({"whole": ended.is_set(), "exchanges": exchanges, "longest_ms": round(longest * 1000)}))


def busy():
    """busy HOST SOURCE...: a connection from each source with a hundred exchanges a second, until a signal ends them. Prints
    the addresses that the server saw, and how many connections broke."""
    ended, seen, broken = threading.Event(), collections.Counter(), []
    signal.signal(signal.SIGTERM, lambda *_: ended.set())

    def exchange(source):
        try:
            with socket.create_connection((sys.argv[2], TCP_PORT), 10, (source, 0)) as client:
                seen[client.makefile().readline().strip()] += 1
                while not ended.wait(0.01):
                    client.sendall(b"x")
                    if not client.recv(1):
                        raise ConnectionError
        except OSError as error:
            broken.append(str(error))

    threads = [threading.Thread(target=exchange, args=(source,)) for source in sys.argv[3:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"seen": seen, "broken": len(broken)}))


{"serve": serve, "flows": flows, "long": long, "busy": busy}[sys.argv[1]]()

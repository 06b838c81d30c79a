# SPDX-License-Identifier: GPL-2.0-or-later
"""Opens flows and asks over them where they seem to come from; told what to do line by line.

open KIND COUNT SERVER PORT [bind=ADDRESS[/PORT]] [dev=NAME] [out=NAME] [info=NAME] [mark=N]
                        KIND: tcp, mptcp, udp (connected), msg; with a port each flow has the next one, and a stream is
                        reset when it is closed; out: IP_UNICAST_IF, IPV6_UNICAST_IF;
                        info: IPV6_PKTINFO, for all packets; prefer: IPV6_ADDR_PREFERENCES;
                        each-info, each-mark, each-tos: IP_PKTINFO or IPV6_PKTINFO, SO_MARK, IP_TOS or IPV6_TCLASS,
                        with each datagram of msg
ask                     asks over every open flow
again SERVER PORT [...] connects every udp flow anew, after it was dissolved; options as for open
loose SERVER PORT       dissolves every udp flow, and asks there by datagrams without a connection
errors                  says how flows have ended: [[own address, name of the error, or null], ...]
close

Answers with one line of JSON: [[own address, address that the server saw, or null], ...]
"""
import errno
import json
import select
import socket
import struct
import sys
import time

flows = []
nonce = 0


def target(server, port):
    return (server, int(port))


def choose(s, server, options, number=0):
    for option in options:
        key, value = option.split("=", 1)
        if key == "bind":
            address, _, own_port = value.partition("/")
            s.bind((address, int(own_port) + number if own_port else 0))
            if own_port and s.type == socket.SOCK_STREAM:
                # So that another one may have the port at once.
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif key == "dev":
            s.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, value.encode())
        elif key == "out":
            index = socket.htonl(socket.if_nametoindex(value))
            level = (socket.IPPROTO_IPV6, 76) if ":" in server else (socket.IPPROTO_IP, 50)
            s.setsockopt(*level, index.to_bytes(4, sys.byteorder))
        elif key == "info":
            index = socket.if_nametoindex(value)
            device = bytes(16) + index.to_bytes(4, sys.byteorder)
            s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_PKTINFO, device)
        elif key == "prefer":
            s.setsockopt(socket.IPPROTO_IPV6, 72, int(value))
        elif key == "mark":
            s.setsockopt(socket.SOL_SOCKET, 36, int(value, 0))


def control_messages(server, options):
    messages = []
    for option in options:
        key, value = option.split("=", 1)
        if key == "each-info":
            index = socket.if_nametoindex(value).to_bytes(4, sys.byteorder)
            if ":" in server:
                messages.append((socket.IPPROTO_IPV6, socket.IPV6_PKTINFO, bytes(16) + index))
            else:
                messages.append((socket.IPPROTO_IP, 8, index + bytes(8)))
        elif key == "each-mark":
            messages.append((socket.SOL_SOCKET, 36, int(value, 0).to_bytes(4, sys.byteorder)))
        elif key == "each-tos":
            kind = (socket.IPPROTO_IPV6, socket.IPV6_TCLASS) if ":" in server else (socket.IPPROTO_IP, socket.IP_TOS)
            messages.append((*kind, int(value, 0).to_bytes(4, sys.byteorder)))
    return messages


def open_flow(kind, server, port, options, number):
    family = socket.AF_INET6 if ":" in server else socket.AF_INET
    is_stream = kind in ("tcp", "mptcp")
    proto = socket.IPPROTO_MPTCP if kind == "mptcp" else 0
    s = socket.socket(family, socket.SOCK_STREAM if is_stream else socket.SOCK_DGRAM, proto)
    s.setblocking(False)
    choose(s, server, options, number)
    if kind != "msg":
        s.connect_ex(target(server, port))
    to = target(server, port)
    with_each = control_messages(server, options)
    flow = {"kind": kind, "socket": s, "to": to, "with": with_each, "seen": None, "rest": "", "error": None}
    flows.append(flow)


def failed(flow, e):
    if e.errno not in (errno.EAGAIN, errno.EINPROGRESS, errno.ENOTCONN, errno.EPIPE):
        flow["error"] = errno.errorcode[e.errno]


def send(flow):
    data = f"{nonce}\n".encode()
    try:
        if flow["kind"] == "msg":
            flow["socket"].sendmsg([data], flow["with"], 0, flow["to"])
        else:
            flow["socket"].send(data)
    except OSError as e:
        failed(flow, e)
        return False
    return True


def receive(flow):
    try:
        flow["rest"] += flow["socket"].recv(4096).decode()
    except OSError as e:
        failed(flow, e)
        return
    *lines, flow["rest"] = flow["rest"].split("\n")
    for line in lines:
        number, address = line.split()
        if int(number) == nonce:
            flow["seen"] = address


def ask(wait=1.2):
    """Until all are answered, or none has been for so long: a busy machine may need a while for all."""
    global nonce
    nonce += 1
    for flow in flows:
        flow["seen"] = None
        flow["sent"] = 0
    end = time.monotonic() + wait
    while time.monotonic() < end and any(f["seen"] is None for f in flows):
        now = time.monotonic()
        for flow in flows:
            # Datagrams once more in case one was lost; a stream as soon as it is connected.
            again = flow["sent"] == 0 or (not flow["kind"].endswith("tcp") and now - flow["sent"] > 0.4)
            if flow["seen"] is None and again and send(flow):
                flow["sent"] = now
        readable, _, _ = select.select([f["socket"] for f in flows], [], [], 0.02)
        for flow in flows:
            if flow["socket"] in readable:
                before = flow["seen"]
                receive(flow)
                if before is None and flow["seen"] is not None:
                    end = time.monotonic() + wait


def own(flow):
    try:
        return flow["socket"].getsockname()[0]
    except OSError:
        return None


def say(what="seen"):
    print(json.dumps([[own(f), f[what]] for f in flows]), flush=True)


for line in sys.stdin:
    command, *rest = line.split()
    if command == "open":
        kind, count, server, port, *options = rest
        before, flows = flows, []
        for number in range(int(count)):
            open_flow(kind, server, port, options, number)
        ask()
        say()
        flows = before + flows
    elif command == "ask":
        ask()
        say()
    elif command == "again":
        server, port, *options = rest
        for flow in flows:
            # AF_UNSPEC: connect() that dissolves a connection.
            import ctypes

            ctypes.CDLL(None).connect(flow["socket"].fileno(), bytes(16), 16)
            choose(flow["socket"], server, options)
            flow["to"] = target(server, port)
            flow["socket"].connect_ex(flow["to"])
        ask()
        say()
    elif command == "loose":
        import ctypes

        for flow in flows:
            ctypes.CDLL(None).connect(flow["socket"].fileno(), bytes(16), 16)
            flow["kind"] = "msg"
            flow["to"] = target(*rest)
        ask()
        say()
    elif command == "errors":
        say("error")
    elif command == "close":
        for flow in flows:
            flow["socket"].close()
        flows = []
        say()

# SPDX-License-Identifier: GPL-2.0-or-later
"""Answers each HTTP request with the address that it came from; both families."""
import http.server
import socket
import sys


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = self.client_address[0].removeprefix("::ffff:").encode() + b"\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Server(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6


Server(("::", int(sys.argv[1])), Handler).serve_forever()

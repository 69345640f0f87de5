# SPDX-License-Identifier: Apache-2.0
"""A server of the standard library, one thread per connection. It handles no signal at all.

usage: server.py HOST PORT NAME [CERTIFICATE]
"""

import http.server
import socket
import ssl
import sys
import time
import urllib.parse

BIG = b"0123456789abcde\n" * (10 * 1024 * 1024 // 16)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body leave together: apart they would meet Nagle's algorithm and a delayed ACK.
    wbufsize = -1

    def do_GET(self):
        url = urllib.parse.urlsplit(self.path)
        query = urllib.parse.parse_qs(url.query)
        time.sleep(int(query.get("ms", ["0"])[0]) / 1000)
        body = BIG if url.path == "/big" else b"hello\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Served-By", name)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 4096
    daemon_threads = True

    def server_bind(self):
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def handle_error(self, request, client_address):
        pass  # clients come and go


host, port, name = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if ":" in host:
    Server.address_family = socket.AF_INET6
server = Server((host, port), Handler)
if len(sys.argv) > 4:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(sys.argv[4])
    # The handshake belongs to the connection's thread, not to the one that accepts.
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
server.serve_forever()

"""A front of a real SGLang server that passes everything on and changes some replies, for tests of what an engine
believes."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Lie = Callable[[str, Any], Any]
"""(route, parsed reply) -> the reply that is sent on; raises ConnectionError to drop the connection."""


@contextmanager
def lying_front(address: str, lie: Lie) -> Iterator[str]:
    """The address of a front of the server at `address`."""
    host, port = address.removeprefix("http://").split(":")

    class Front(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(length) if length else None
            behind = http.client.HTTPConnection(host, int(port), timeout=60)
            try:
                headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
                behind.request(self.command, self.path, body=body, headers=headers)
                answer = behind.getresponse()
                raw, kind = answer.read(), answer.headers.get("Content-Type", "")
            finally:
                behind.close()
            if "json" in kind and answer.status == http.HTTPStatus.OK:
                try:
                    raw = json.dumps(lie(self.path, json.loads(raw))).encode()
                except ConnectionError:
                    self.close_connection = True
                    self.connection.close()
                    return
            self.send_response(answer.status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        do_GET = do_POST = forward

        def log_message(self, format: str, *args: Any) -> None:
            """Silent."""

    front = ThreadingHTTPServer(("127.0.0.1", 0), Front)
    front.daemon_threads = True
    thread = threading.Thread(target=front.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{front.server_address[1]}"
    finally:
        front.shutdown()
        front.server_close()
        thread.join(timeout=10)
        assert not thread.is_alive()
